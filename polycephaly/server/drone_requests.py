"""Admin requests about single drones of a pool, and the threads for requests that take long.

`reply` sends the reply, and may be called in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..pool.stack_requests import ANSWER_SECONDS
from ..pool.status import describe_identity
from ..promises.promise import when_settled
from ..runtime import fork_guard
from .session import find_drone

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher

Reply = Callable[..., None]


def reply_thread(reply: Reply, compute: Callable[[], Any]) -> fork_guard.OwnThread:
    """Return a thread that calls `compute` and sends its result or its error as the reply."""

    def run() -> None:
        try:
            reply(value=compute())
        except MemoryError as error:
            reply(error=str(error) or "no memory", kind="MemoryError")
        except Exception as error:
            # The peer raises a RuntimeError with this text.
            name = "" if type(error) is RuntimeError else f"{type(error).__name__}: "
            reply(error=f"{name}{error}")

    return fork_guard.OwnThread("polycephaly-request", run)


def _describe(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)

    def send_reply(_: object) -> None:
        waiting = None if handle.waiting is None else handle.waiting.as_dict()
        state = {"unresponsive": handle.unresponsive, "waiting": waiting}
        reply(value={**describe_identity(handle), **state})

    when_settled(handle.pid_known, send_reply)


def _interrupt(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)
    dispatcher.post(dispatcher.interrupt, handle)
    reply(value=None)


def _kill(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)
    when_settled(handle.ended, lambda _: reply(value=None))
    dispatcher.post(handle.kill, "a client called kill()", True)


def _take_stack(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)

    def take() -> dict[str, Any]:  # waits, and reads source files
        (stack,) = dispatcher.stack_requests.take([handle], ANSWER_SECONDS)
        if stack is None:
            raise RuntimeError(f"the drone has ended: {handle.closed_error()}")
        return stack.as_dict()

    reply_thread(reply, take).start()


DRONE_REQUESTS: dict[Any, Callable[[Dispatcher, int, Reply], None]] = {
    "drone": _describe,
    "interrupt": _interrupt,
    "kill": _kill,
    "stack": _take_stack,
}
"""The handlers. Each raises `RuntimeError` if the drone has ended."""
