"""Ends of channels: senders and receivers, counted so that a channel closes with the last of a
kind.

    channel.sender() ──> Sender        send, put, sending
    channel.receiver() ──> Receiver    receive, get, receiving, async for

Any number of threads in any process may use a `Channel`. If one of them ends, that closes nothing,
because others might still send. Ends are counted. An end is gone when it is closed, or when the
process that holds it has ended. When the last of its kind is gone, the channel is closed; if a
process died, the waiters at the other side get the cause. An end that never left its process is
gone only when it is closed.

In a drone, an end is also gone when nothing there refers to it any more (DROPPED): with the call
that brought it, unless the call has stored it in a global, an attribute or a thread. An end in a
reference cycle is gone when the garbage collector finds the cycle. An end is handed on with a call,
a result, or an item that a receiver or the buffer has: to drop the end here then releases nothing,
because its next holder does that. Outside of drones, dropping an end reports nothing.

The owning process counts the holders of each end, by token. See
docs/decisions/0007-channels-between-processes.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from itertools import count
from struct import Struct
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...errors import ChannelClosed
from ...promises.promise import Promise, name_of, pickling_state, stored_error, when_settled
from ...runtime.tuning import tuning
from ...wire import placeholders
from ...wire.exceptions import message_of
from .. import channel as channels
from ..channel import Channel, Receiver, Sender
from ..scheduler import scheduler
from . import opcodes
from .handlers import channel_of
from .transport import HANDLERS, PeerConnection, keep_last

T = TypeVar("T")

_NO_TOKEN = 0  # token of an end that has not arrived anywhere
_TOKENS = Struct("<QQ")
# Seconds for which a call waits until its drone has reported the ends that came with the call. Not
# for ever, because the report is sent by the scheduler, and a green thread that does not let go of
# the scheduler may be waiting for this very call.
REPORT_TIMEOUT_SECONDS = 5.0
# Steps in which a holder's time is measured. A suspended machine loses one step at most, however
# long that lasts.
GRACE_STEPS = 5


class _CountedEnd(channels.End[T]):
    """An end of a channel, counted. Like a channel, an end that is sent to another process is the
    same end there.
    """

    _only_follows = True  # follows tasks, does not wait for them: see `_waiters` in pool/inputs.py

    def __init__(self, channel: Channel[T], number: int, token: int = _NO_TOKEN) -> None:
        super().__init__(channel)
        self._number = number
        self._token = token
        self._calls = 0  # calls on their way with this end
        self._closed = self._came_with_call = False
        # The tokens that the end had when it was last pickled, and when it was handed on.
        self.pickled_token: int | None = None
        self._handed_on_token: int | None = None
        self._generation = channels.generation

    def __del__(self) -> None:
        """Release the end, in a drone. Runs in any thread, in the middle of anything. A fork of the
        drone does not release its copy.
        """
        if self._token and (self._came_with_call or _is_drone()) and self.is_held():
            report = _Report(self._token)
            scheduler.post(partial(_tell, self.channel, opcodes.DROPPED, self._number, report))

    def is_held(self) -> bool:
        """Return True unless the end was closed, handed on, or copied by a fork."""
        return not (
            self._closed
            or self._token == self._handed_on_token
            or self._generation < channels.oldest_generation
        )

    def arrive(self, token: int) -> None:
        self._came_with_call = True
        self._token = token  # the owning process counts this process by the last token

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._register_inherited()
            scheduler.post(partial(_tell, self.channel, opcodes.ENDED, self._number, _Report()))

    def _open_channel(self) -> Channel[T]:
        if self._closed:
            raise ChannelClosed(f"{self!r} was closed")
        self._register_inherited()
        return self.channel

    def _register_inherited(self) -> None:
        """Register an end that came with a fork. From its first use on, this process holds the end
        as if sent here.
        """
        if self._generation < channels.oldest_generation:
            self._generation = channels.generation
            self.channel.convert_inherited()
            # Not the token of the snapshot's process, which keeps its own hold.
            self._token = _report_arrival(self.channel, self._number, _NO_TOKEN)

    def __reduce__(self) -> Any:
        self._open_channel()
        self.pickled_token = self._token
        if pickling_state.context is not None:  # handed on with the call or the received item
            pickling_state.context.add_moved(self)
        elif pickling_state.result_ends is not None:  # handed on with the whole result
            pickling_state.result_ends.append(self)
        else:
            self.hand_on()
        return _unpickle_end, (type(self), self.channel, self._number, self._token)

    def hand_on(self, token: int | None = None) -> None:
        """Note that the end has another holder, so dropping it here releases nothing, unless the
        end has come here again meanwhile. `token` is that of the pickle, if not of the last one.
        """
        self._handed_on_token = self.pickled_token if token is None else token

    def _follow_task(self, promise: Promise[Any]) -> None:
        """Follow the task of `promise`, which has the end among its arguments, or captured. Any
        thread may call this.
        """
        self.hand_on()
        scheduler.post(partial(self._add_calls, 1))
        when_settled(promise, self._on_call_settled)

    def _on_call_settled(self, promise: Promise[Any]) -> None:
        scheduler.post(partial(self._add_calls, -1, _misplacing_error(promise)))

    def _add_calls(self, change: int, error: BaseException | None = None) -> None:
        self._calls += change
        _count_calls(self.channel, self._number, change)
        if error is not None:
            _after_grace(partial(self._report_if_misplaced, error))

    def _report_if_misplaced(self, error: BaseException) -> None:
        if not self._calls and not self._closed:
            reason = (message_of(error) or type(error).__name__).splitlines()[0]
            report = _Report(self._token, _NO_TOKEN, reason, error)
            _tell(self.channel, opcodes.MISPLACED, self._number, report)

    def __repr__(self) -> str:
        name = type(self).__name__.removeprefix("Counted")
        return f"<{name}{' closed' if self._closed else ''} of {self.channel!r}>"


class CountedSender(_CountedEnd[T], Sender[T]):
    """A sending end, counted."""


class CountedReceiver(_CountedEnd[T], Receiver[T]):
    """A receiving end, counted."""


def _misplacing_error(settled: Promise[Any]) -> BaseException | None:
    """Return why ends sent with a settled task may have arrived nowhere; None if the task has
    succeeded. A drone that has failed may have had them, which the owning process knows by then.
    """
    if settled.cancelled():
        return CancelledError(f"{name_of(settled)} was cancelled")
    return stored_error(settled)


class _Loss(NamedTuple):
    """How a holder of an end went, in words that follow "was"."""

    description: str
    cause: BaseException | None


_NO_LOSS = _Loss("", None)
"""Neither a process nor a call was lost with the end: the channel closes as if by hand."""


class _OpenEnd:
    """An open end, in the owning process of its channel.

    `holders` are by token; None stands for this process, if the end has come back. `past_tokens`
    are the last that were handed on, in order. `calls` counts the calls from here that are on their
    way with the end. `loss` is how the latest of the holders that are gone went; None if none is.
    """

    def __init__(self, kind: Literal["send", "receive"]) -> None:
        self.kind = kind
        self.holders: dict[int, PeerConnection | None] = {}
        self.past_tokens: dict[int, None] = {}
        self.calls = 0
        self.loss: _Loss | None = None


# Any thread may add an end, so loops take a copy. Only the owner thread removes and changes ends.
_open_ends: WeakKeyDictionary[Channel[Any], dict[int, _OpenEnd]] = WeakKeyDictionary()
_numbers = count(1)


def _find_end(channel: Channel[Any], number: int) -> _OpenEnd | None:
    return _open_ends.get(channel, {}).get(number)


def new_end(channel: Channel[T], kind: Literal["send", "receive"]) -> _CountedEnd[T]:
    """Return a new end, counted. Any thread may call this, because no other code can know the end
    yet.
    """
    if channel.is_remote:
        raise RuntimeError(
            f"an end of {channel!r} can be made only in the process that made the channel"
        )
    number = next(_numbers)
    _open_ends.setdefault(channel, {})[number] = _OpenEnd(kind)
    return CountedSender(channel, number) if kind == "send" else CountedReceiver(channel, number)


_arrived_ends: WeakValueDictionary[tuple[int, int], _CountedEnd[Any]] = WeakValueDictionary()
"""The ends that have arrived in this drone, by number and `id` of the channel, which they keep
alive. Each end is one object, however often it arrives, so it is released with the last
reference."""


def _is_drone() -> bool:
    """Return True in a drone."""
    return placeholders.local_store is not None


def _unpickle_end(
    kind: type[_CountedEnd[T]], channel: Channel[T], number: int, previous: int
) -> _CountedEnd[T]:
    token = _report_arrival(channel, number, previous)
    if placeholders.current_store() is None:
        return kind(channel, number, token)
    placeholders.last_arrived_end = token
    end = _arrived_ends.get((id(channel), number))
    if end is None or not end.is_held():
        end = _arrived_ends[id(channel), number] = kind(channel, number, token)
    end.arrive(token)
    return end


def _report_arrival(channel: Channel[Any], number: int, previous: int) -> int:
    """Report that an end has arrived, and return its new token.

    In a drone, wait until the report is sent. Otherwise the drone might die after its call was
    answered, and the owning process would never know that the drone had the end. The main process
    need not wait: no process outlives it that would wait for the end.
    """
    token = secrets.randbits(63) | 1
    report = partial(_report_arrival_at_once, channel, number, token, previous)
    if channel.is_remote and _is_drone():
        scheduler.run_in_owner(report, REPORT_TIMEOUT_SECONDS)
    else:
        scheduler.post(report)
    return token


def _report_arrival_at_once(channel: Channel[Any], number: int, token: int, previous: int) -> None:
    _tell(channel, opcodes.OPENED, number, _Report(token, previous))
    if scheduler.transport is not None:
        scheduler.transport.flush(by_owner=False)


class _Report(NamedTuple):
    """The news of a process about its copy of an end."""

    token: int = _NO_TOKEN
    previous: int = _NO_TOKEN  # the token that the end arrived with
    reason: str = ""
    cause: BaseException | None = None


def _tell(channel: Any, opcode: int, number: int, report: _Report) -> None:
    """Report on an end to the owning process, which may be this one."""
    if channel.is_remote:
        reason = report.reason.encode(errors="backslashreplace")  # from the message of any error
        channel.tell(opcode, number, _TOKENS.pack(report.token, report.previous) + reason)
    else:
        _ACTIONS[opcode](channel, number, None, report)


def _on_report(
    opcode: int, peer: PeerConnection, channel: int, number: int, payload: bytes
) -> None:
    target = channel_of(peer, channel)
    if target is not None:
        token, previous = _TOKENS.unpack_from(payload)
        report = _Report(token, previous, payload[_TOKENS.size :].decode())
        _ACTIONS[opcode](target, number, peer, report)


def _on_dropped(channel: Any, number: int, _: object, report: _Report) -> None:
    """Release an end, in the owning process.

    If the token holds nothing any more, the end was handed on, or has arrived at the same process
    again.
    """
    end = _find_end(channel, number)
    if end is None or report.token not in end.holders:
        return
    del end.holders[report.token]
    end.loss = _NO_LOSS
    _check_abandoned_later(channel, number, end)


def _remove_end(channel: Any, number: int, loss: _Loss = _NO_LOSS) -> None:
    ends = _open_ends.get(channel, {})
    end = ends.pop(number, None)
    if end is None:
        return
    if not channel.closed and all(each.kind != end.kind for each in [*ends.values()]):
        if loss.description:
            reason = ChannelClosed(f"the last end that could {end.kind} was {loss.description}")
            reason.__cause__ = loss.cause
            channel.rare_state.reason = reason
        channel.close()


def _on_opened(channel: Any, number: int, holder: PeerConnection | None, report: _Report) -> None:
    end = _find_end(channel, number)
    if end is not None:
        keep_last(end.past_tokens, report.previous, None)  # more than can be in transit at once
        if report.token not in end.past_tokens:
            for old_token in [each for each, owner in end.holders.items() if owner is holder]:
                del end.holders[old_token]
            end.holders[report.token] = holder
        end.holders.pop(report.previous, None)
        # The next holder may have reported before this one, and be gone already.
        _check_abandoned_later(channel, number, end)


def _on_misplaced(channel: Any, number: int, _: object, report: _Report) -> None:
    # Posted, because `_drop_misplaced` receives messages, which a handler must not do.
    scheduler.post(partial(_drop_misplaced, channel, number, report))


def _drop_misplaced(channel: Any, number: int, report: _Report) -> None:
    """Drop the holder of an end whose call came to nothing, unless the end was handed on."""
    if scheduler.transport is not None:
        scheduler.transport.receive_all()
    end = _find_end(channel, number)
    if end is None or report.token in end.past_tokens:
        return
    end.holders.pop(report.token, None)
    end.loss = _Loss(f"lost with its call: {report.reason}", report.cause)
    if not end.holders:
        _remove_end(channel, number, end.loss)


def _after_grace(action: Callable[[], object], steps: int = GRACE_STEPS) -> None:
    callback = partial(_after_grace, action, steps - 1) if steps > 1 else action
    scheduler.timers.after(tuning.next_holder_seconds / GRACE_STEPS, callback)


def _check_abandoned_later(channel: Any, number: int, end: _OpenEnd) -> None:
    """Remove an end whose last holder is gone, unless another holder reports soon.

    Calls on their way may still open the end. One of them may run again (`retries`), for example,
    which may take its time.
    """
    if end.loss is not None and not (end.holders or end.calls):
        _after_grace(partial(_remove_if_abandoned, channel, number))


def _remove_if_abandoned(channel: Any, number: int) -> None:
    if scheduler.transport is not None:
        scheduler.transport.receive_all()
    end = _find_end(channel, number)
    if end is not None and end.loss is not None and not (end.holders or end.calls):
        _remove_end(channel, number, end.loss)


def _count_calls(channel: Any, number: int, change: int) -> None:
    end = None if channel.is_remote else _find_end(channel, number)
    if end is not None:
        end.calls += change
        _check_abandoned_later(channel, number, end)


def on_loss(peer: PeerConnection) -> None:
    for reference in _open_ends.keyrefs():  # a copy, as said above
        channel = reference()
        if channel is None:
            continue
        for number, end in list(_open_ends[channel].items()):
            tokens = [token for token, holder in end.holders.items() if holder is peer]
            for token in tokens:
                del end.holders[token]
            if tokens:
                end.loss = _Loss(f"in {peer}, which {peer.ending.description}", peer.ending.death)
                _check_abandoned_later(channel, number, end)


_ACTIONS: dict[int, Callable[[Any, int, PeerConnection | None, _Report], None]] = {
    opcodes.OPENED: _on_opened,
    opcodes.ENDED: lambda channel, number, *_: _remove_end(channel, number),
    opcodes.DROPPED: _on_dropped,
    opcodes.MISPLACED: _on_misplaced,
}
HANDLERS.update({opcode: partial(_on_report, opcode) for opcode in _ACTIONS})
