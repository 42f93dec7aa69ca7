"""Ends of channels: senders and receivers, counted so that a channel closes with the last of a
kind.

    channel.sender() ──> Sender        send, put, sending
    channel.receiver() ──> Receiver    receive, get, receiving, async for

Any number of threads in any process may use a `Channel`. If one of them ends, that closes nothing,
because others might still send. An end is known. It is gone when it is closed, or when the process
that holds it has ended. When the last of its kind is gone, the channel is closed; if a process
died, the waiters at the other side get the cause. An end that never left its process is gone only
when it is closed.

In a drone, an end is also gone when nothing there refers to it any more (DROPPED): with the call
that brought it, unless the call has stored it in a global, an attribute or a thread. An end in a
reference cycle is gone when the garbage collector finds the cycle. A pickled end was handed on:
only its next holder releases it. Outside of drones, dropping an end reports nothing.

The owning process counts the holders of each end, by token. See
docs/decisions/0007-channels-between-processes.md.
"""

from __future__ import annotations

import secrets
from _thread import LockType, allocate_lock, get_ident
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from struct import Struct
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...errors import ChannelClosed, DroneDied
from ...promises.promise import pickling_state
from ...wire import placeholders
from .. import channel as channels
from ..channel import Channel, Receiver, Sender
from ..scheduler import scheduler
from . import opcodes
from .connection import HANDLERS, PeerConnection, keep_last
from .handlers import channel_of

T = TypeVar("T")

_NO_TOKEN = 0  # token of an end that has not arrived anywhere
_TOKENS = Struct("<QQ")
# After the last holder of an end has died, for the next holder to report.
NEXT_HOLDER_GRACE_SECONDS = 0.1
# A call waits this long until its drone has reported the ends that came with the call: for ever
# would be too long for a green thread that holds the scheduler and itself waits for that call.
REPORT_TIMEOUT_SECONDS = 5.0
# Steps in which these two times are measured. A suspended machine loses one step at most, however
# long that lasts.
GRACE_STEPS = 5
REPORT_STEPS = 50


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
        self._closed = self._handed_on = self._came_with_call = False
        self._generation = channels.generation

    def __del__(self) -> None:
        """Release the end, in a drone. Runs in any thread, in the middle of anything. A fork of the
        drone does not release its copy.
        """
        if (
            self._token
            and not (self._closed or self._handed_on)
            and (self._came_with_call or _is_drone())
            and self._generation >= channels.oldest_generation
        ):
            scheduler.post(partial(_drop_end, self.channel, self._number, self._token))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._register_inherited()
            scheduler.post(partial(_end_closed, self.channel, self._number))

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
            self.channel._convert_inherited()
            # Not the token of the snapshot's process, which keeps its own hold.
            self._token = _report_arrival(self.channel, self._number, _NO_TOKEN)

    def __reduce__(self) -> Any:
        self._open_channel()
        self._handed_on = True
        if pickling_state.context is not None:
            pickling_state.context.add_moved(self)
        return _unpickle_end, (type(self), self.channel, self._number, self._token)

    def _follow_task(self, task: Any) -> None:
        """Follow a task that has the end among its arguments, or captured. Any thread may call
        this.
        """
        scheduler.post(self._on_call_sent)
        task._hook(self._on_call_settled)

    def _on_call_sent(self) -> None:
        self._calls += 1
        _count_calls(self.channel, self._number, 1)

    def _on_call_settled(self, task: Any) -> None:
        scheduler.post(partial(self._on_call_over, _misplacing_error(task)))
        sent = task.sending
        if sent is None or task.number not in sent.handle.in_flight:
            # No drone has the task, so none can still open the end later.
            task.channel_ends = ()

    def _on_task_lost(self, task: Any) -> None:
        """Handle a task that was settled before and, as is known now, has come to nothing."""
        scheduler.post(
            partial(self._check_misplaced_later, task._exception or _cancelled_error(task))
        )

    def _on_call_over(self, error: BaseException | None) -> None:
        self._calls -= 1
        _count_calls(self.channel, self._number, -1)
        if error is not None:
            self._check_misplaced_later(error)

    def _check_misplaced_later(self, error: BaseException) -> None:
        _after_grace(partial(self._report_if_misplaced, error))

    def _report_if_misplaced(self, error: BaseException) -> None:
        if not self._calls and not self._closed:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            if self.channel.is_remote:
                _send(
                    self.channel,
                    opcodes.MISPLACED,
                    self._number,
                    _TOKENS.pack(self._token, 0) + reason.encode(),
                )
            else:
                _drop_misplaced(self.channel, self._number, self._token, reason, error)

    def __repr__(self) -> str:
        name = type(self).__name__.removeprefix("Counted")
        return f"<{name}{' closed' if self._closed else ''} of {self.channel!r}>"


class CountedSender(_CountedEnd[T], Sender[T]):
    """A sending end, counted."""


class CountedReceiver(_CountedEnd[T], Receiver[T]):
    """A receiving end, counted."""


def _misplacing_error(task: Any) -> BaseException | None:
    """Return why ends sent with `task` cannot have arrived, or are gone again; None if they may be
    there.
    """
    error: BaseException | None = task._exception
    if isinstance(error, DroneDied) or (error is not None and task.sending is None):
        return error
    return _cancelled_error(task) if task.cancelled() and task.sending is None else None


def _cancelled_error(task: Any) -> CancelledError:
    return CancelledError(f"{task.label} was cancelled")


class _EndCounts:
    """The ends of one channel, in its owning process.

    `holders` maps each end to its holders, by token; None stands for this process, if the end has
    come back. `past_tokens` maps each end to the last tokens that were handed on, in order. `calls`
    counts the calls from here that are on their way with an end. While there are any, the death of
    a last holder has no effect yet, and `abandoned` keeps its cause.
    """

    def __init__(self) -> None:
        self.last_number = 0
        self.open: dict[Literal["send", "receive"], set[int]] = {"send": set(), "receive": set()}
        self.holders: dict[int, dict[int, PeerConnection | None]] = {}
        self.past_tokens: dict[int, dict[int, None]] = {}
        self.calls: dict[int, int] = {}
        self.abandoned: dict[int, tuple[str, BaseException | None]] = {}


_counts: WeakKeyDictionary[Channel[Any], _EndCounts] = WeakKeyDictionary()


def new_sender(channel: Channel[T]) -> Sender[T]:
    return CountedSender(channel, _count_end(channel, "send"))


def new_receiver(channel: Channel[T]) -> Receiver[T]:
    return CountedReceiver(channel, _count_end(channel, "receive"))


def _count_end(channel: Channel[Any], kind: Literal["send", "receive"]) -> int:
    """Count a new end, and return its number. Any thread may call this, because no other code can
    know the end yet.
    """
    if channel.is_remote:
        raise RuntimeError(
            f"an end of {channel!r} can be made only in the process that made the channel"
        )
    count = _counts.get(channel)
    if count is None:
        count = _counts.setdefault(channel, _EndCounts())
    # No call up to the next line, so no other thread runs in between.
    count.last_number += 1
    number = count.last_number
    count.open[kind].add(number)
    return number


_arrived_ends: WeakValueDictionary[tuple[int, int], _CountedEnd[Any]] = WeakValueDictionary()
"""The ends that have arrived in this drone, by number and `id` of the channel, which they keep
alive. Each end is one object, however often it arrives, so it is released with the last
reference."""


ends_arrived = False
"""True if ends have arrived since the drone last collected reference cycles, which would keep
them."""


def _is_drone() -> bool:
    """Return True in a drone."""
    return placeholders.local_store is not None


def _unpickle_end(
    kind: type[_CountedEnd[T]], channel: Channel[T], number: int, previous: int
) -> _CountedEnd[T]:
    global ends_arrived
    token = _report_arrival(channel, number, previous)
    if placeholders.current_store() is None:
        return kind(channel, number, token)
    ends_arrived = True
    end = _arrived_ends.get((id(channel), number))
    if end is None or end._closed or end._handed_on or end._generation < channels.oldest_generation:
        end = _arrived_ends[id(channel), number] = kind(channel, number, token)
    end._came_with_call = True
    end._token = token  # the owning process counts this process by the last token
    return end


def _report_arrival(channel: Channel[Any], number: int, previous: int) -> int:
    """Report that an end has arrived, and return its new token.

    In a drone, wait until the report is sent. Otherwise the drone might die after its call was
    answered, and the owning process would never know that the drone had the end. The owner thread
    reports soon, because it cannot wait for itself. The main process need not wait: no process
    outlives it that would wait for the end.
    """
    token = secrets.randbits(63) | 1
    if not channel.is_remote:
        scheduler.post(partial(_add_holder, channel, number, None, token, previous))
        return token
    sent = allocate_lock()
    sent.acquire()
    scheduler.post(
        partial(_send_at_once, channel, opcodes.OPENED, number, _TOKENS.pack(token, previous), sent)
    )
    if _is_drone() and get_ident() != scheduler.owner:
        step = REPORT_TIMEOUT_SECONDS / REPORT_STEPS
        any(sent.acquire(timeout=step) for _ in range(REPORT_STEPS))
    return token


def _send_at_once(
    channel: Channel[Any], opcode: int, number: int, payload: bytes, sent: LockType
) -> None:
    try:
        _send(channel, opcode, number, payload)
        if scheduler.transport is not None:
            scheduler.transport.flush_during_step()
    finally:
        sent.release()


def _send(channel: Any, opcode: int, number: int, payload: bytes = b"") -> None:
    try:
        channel._peer(may_be_closed=True).put(opcode, channel._extra.number, number, payload)
    except ChannelClosed:
        pass


def _end_closed(channel: Channel[Any], number: int) -> None:
    if channel.is_remote:
        _send(channel, opcodes.ENDED, number)
    else:
        _remove_end(channel, number)


def _drop_end(channel: Channel[Any], number: int, token: int) -> None:
    if channel.is_remote:
        _send(channel, opcodes.DROPPED, number, _TOKENS.pack(token, _NO_TOKEN))
    else:
        _release_end(channel, number, token)


def _release_end(channel: Channel[Any], number: int, token: int) -> None:
    """Release an end, in the owning process.

    If the token holds nothing any more, the end was handed on, or has arrived at the same process
    again.
    """
    count = _counts.get(channel)
    holders = None if count is None else count.holders.get(number)
    if count is None or not holders or token not in holders:
        return
    _forget_holder(count, channel, holders.pop(token))
    if not holders:  # no process died: the channel closes as if by hand
        _after_grace(partial(_remove_if_abandoned, channel, number, "", None))


def _remove_end(
    channel: Any, number: int, loss: str = "", cause: BaseException | None = None
) -> None:
    count = _counts.get(channel)
    if count is None:
        return
    count.past_tokens.pop(number, None)
    count.abandoned.pop(number, None)
    for holder in count.holders.pop(number, {}).values():
        _forget_holder(count, channel, holder)
    for end, others in count.open.items():
        if number in others:
            others.discard(number)
            if not others and not channel.closed:
                if loss:
                    reason = ChannelClosed(f"the last end that could {end} was {loss}")
                    reason.__cause__ = cause
                    channel._extra.reason = reason
                channel.close()


def _is_open(count: _EndCounts, number: int) -> bool:
    return any(number in others for others in count.open.values())


def _add_holder(
    channel: Any, number: int, holder: PeerConnection | None, token: int, previous: int
) -> None:
    count = _counts.get(channel)
    if count is not None and _is_open(count, number):
        past_tokens, holders = (
            count.past_tokens.setdefault(number, {}),
            count.holders.setdefault(number, {}),
        )
        keep_last(past_tokens, previous, None)  # keeps more than can be in transit at once
        if token not in past_tokens:
            for old_token in [each for each, owner in holders.items() if owner is holder]:
                del holders[old_token]
            holders[token] = holder
            if holder is not None:
                holder.ends.add(channel)
        _forget_holder(count, channel, holders.pop(previous, None))


def _forget_holder(count: _EndCounts, channel: Any, holder: PeerConnection | None) -> None:
    if holder is not None and not any(
        holder in others.values() for others in count.holders.values()
    ):
        holder.ends.discard(channel)


def _drop_misplaced(
    channel: Any, number: int, token: int, reason: str, cause: BaseException | None
) -> None:
    """Drop the holder of an end whose call came to nothing, unless the end was handed on."""
    if scheduler.transport is not None:
        scheduler.transport.receive_all()
    count = _counts.get(channel)
    if count is None or not _is_open(count, number) or token in count.past_tokens.get(number, ()):
        return
    holders = count.holders.get(number, {})
    holders.pop(token, None)
    if not holders:
        _remove_end(channel, number, f"lost with its call: {reason}", cause)


def _after_grace(action: Callable[[], object], steps: int = GRACE_STEPS) -> None:
    callback = partial(_after_grace, action, steps - 1) if steps > 1 else action
    scheduler.timers.set(scheduler.timers.now() + NEXT_HOLDER_GRACE_SECONDS / GRACE_STEPS, callback)


def _remove_if_abandoned(channel: Any, number: int, loss: str, cause: BaseException | None) -> None:
    """Count an end as gone whose last holder was gone a moment ago, unless another holder has
    reported.
    """
    if scheduler.transport is not None:
        scheduler.transport.receive_all()
    count = _counts.get(channel)
    if count is None or not _is_open(count, number) or count.holders.get(number):
        return
    # One of the calls may run again (`retries`), for example, which may take its time.
    if number in count.calls:
        count.abandoned[number] = loss, cause
    else:
        _remove_end(channel, number, loss, cause)


def _count_calls(channel: Any, number: int, change: int) -> None:
    count = None if channel.is_remote else _counts.get(channel)
    if count is None:
        return
    left = count.calls.pop(number, 0) + change
    if left:
        count.calls[number] = left
    elif number in count.abandoned:
        loss, cause = count.abandoned.pop(number)
        _after_grace(partial(_remove_if_abandoned, channel, number, loss, cause))


def _on_end_opened(peer: PeerConnection, channel: int, number: int, payload: bytes) -> None:
    target = channel_of(peer, channel)
    if target is not None:
        _add_holder(target, number, peer, *_TOKENS.unpack(payload))


def _on_end_closed(peer: PeerConnection, channel: int, number: int, _: bytes) -> None:
    target = channel_of(peer, channel)
    if target is not None:
        _remove_end(target, number)


def _on_end_dropped(peer: PeerConnection, channel: int, number: int, payload: bytes) -> None:
    target = channel_of(peer, channel)
    if target is not None:
        _release_end(target, number, _TOKENS.unpack(payload)[0])


def _on_end_misplaced(peer: PeerConnection, channel: int, number: int, payload: bytes) -> None:
    target = channel_of(peer, channel)
    if target is not None:
        token, _ = _TOKENS.unpack_from(payload)
        reason = payload[_TOKENS.size :].decode()
        # Posted, because `_drop_misplaced` receives messages, which a handler must not do.
        scheduler.post(partial(_drop_misplaced, target, number, token, reason, None))


def on_loss(peer: PeerConnection) -> None:
    for channel in list(peer.ends):
        count = _counts[channel]
        for number, holders in list(count.holders.items()):
            tokens = [token for token, holder in holders.items() if holder is peer]
            for token in tokens:
                del holders[token]
            if tokens and not holders:
                loss = f"in {peer}, which {peer.ending.description}"
                _after_grace(
                    partial(_remove_if_abandoned, channel, number, loss, peer.ending.death)
                )


HANDLERS[opcodes.OPENED] = _on_end_opened
HANDLERS[opcodes.ENDED] = _on_end_closed
HANDLERS[opcodes.DROPPED] = _on_end_dropped
HANDLERS[opcodes.MISPLACED] = _on_end_misplaced
