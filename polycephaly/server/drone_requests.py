"""Admin requests about single drones of a pool.

`reply` sends the reply, and may be called in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..pool.stack_requests import ANSWER_SECONDS
from ..pool.status import describe_identity
from ..runtime import fork_guard
from .session import find_drone

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher

Reply = Callable[..., None]


def _describe(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)

    def send_reply(_: object) -> None:
        waiting = None if handle.waiting is None else handle.waiting.as_dict()
        state = {"unresponsive": handle.unresponsive, "waiting": waiting}
        reply(value={**describe_identity(handle), **state})

    handle.pid_known.add_done_callback(send_reply)


def _interrupt(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)
    dispatcher.post(dispatcher.interrupt, handle)
    reply(value=None)


def _kill(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)
    handle.ended.add_done_callback(lambda _: reply(value=None))
    dispatcher.post(handle.kill)


def _take_stack(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)

    def run() -> None:  # waits, and reads source files
        try:
            (stack,) = dispatcher.stack_requests.take([handle], ANSWER_SECONDS)
        except Exception as error:
            reply(error=f"{type(error).__name__}: {error}")
            return
        if stack is None:
            reply(error=f"the drone has ended: {handle.closed_error()}")
        else:
            reply(value=stack.as_dict())

    fork_guard.OwnThread("polycephaly-request", run).start()


DRONE_REQUESTS: dict[Any, Callable[[Dispatcher, int, Reply], None]] = {
    "drone": _describe,
    "interrupt": _interrupt,
    "kill": _kill,
    "stack": _take_stack,
}
"""The handlers. Each raises `RuntimeError` if the drone has ended."""
