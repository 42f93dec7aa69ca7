"""Admin requests about single drones of a pool.

`tell` takes the reply, and may be called in any thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .session import find
from .state import known_of

if TYPE_CHECKING:
    from ..pool.pool import Pool

__all__ = ["OF_DRONES", "Tell"]

Tell = Callable[..., None]


def _look_at(pool: Pool, number: int, tell: Tell) -> None:
    handle = find(pool, number)

    def known(_: object) -> None:
        waiting = None if handle.waiting is None else handle.waiting.as_dict()
        tell(value={**known_of(handle), "unresponsive": handle.unresponsive, "waiting": waiting})

    handle.born._hook(known)


def _interrupt(pool: Pool, number: int, tell: Tell) -> None:
    handle = find(pool, number)
    pool._dispatcher.reactor.post(lambda: pool._dispatcher.interrupt(handle))
    tell(value=None)


def _kill(pool: Pool, number: int, tell: Tell) -> None:
    handle = find(pool, number)
    handle.ended._hook(lambda _: tell(value=None))
    pool._dispatcher.reactor.post(handle.kill)


OF_DRONES: dict[Any, Callable[[Pool, int, Tell], None]] = {
    "drone": _look_at,
    "interrupt": _interrupt,
    "kill": _kill,
}
"""The handlers. Each raises `RuntimeError` if the drone has ended."""
