"""Admin requests about single drones of a pool.

`reply` sends the reply, and may be called in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .session import find_drone
from .state import describe_identity

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher

__all__ = ["DRONE_REQUESTS", "Reply"]

Reply = Callable[..., None]


def _describe(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)

    def send_reply(_: object) -> None:
        waiting = None if handle.waiting is None else handle.waiting.as_dict()
        state = {"unresponsive": handle.unresponsive, "waiting": waiting}
        reply(value={**describe_identity(handle), **state})

    handle.pid_known._hook(send_reply)


def _interrupt(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)
    dispatcher.post(dispatcher.interrupt, handle)
    reply(value=None)


def _kill(dispatcher: Dispatcher, number: int, reply: Reply) -> None:
    handle = find_drone(dispatcher, number)
    handle.ended._hook(lambda _: reply(value=None))
    dispatcher.post(handle.kill)


DRONE_REQUESTS: dict[Any, Callable[[Dispatcher, int, Reply], None]] = {
    "drone": _describe,
    "interrupt": _interrupt,
    "kill": _kill,
}
"""The handlers. Each raises `RuntimeError` if the drone has ended."""
