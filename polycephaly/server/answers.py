"""What may be asked of a pool's single drones, from another process. `tell` takes the answer, in
any thread."""

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
    link = find(pool, number)

    def known(_: object) -> None:
        waiting = None if link.waiting is None else link.waiting.as_dict()
        tell(value={**known_of(link), "unresponsive": link.unresponsive, "waiting": waiting})

    link.born._hook(known)


def _interrupt(pool: Pool, number: int, tell: Tell) -> None:
    link = find(pool, number)
    pool._crew.hub.post(lambda: pool._crew.interrupt(link))
    tell(value=None)


def _kill(pool: Pool, number: int, tell: Tell) -> None:
    link = find(pool, number)
    link.ended._hook(lambda _: tell(value=None))
    pool._crew.hub.post(link.kill)


OF_DRONES: dict[Any, Callable[[Pool, int, Tell], None]] = {
    "drone": _look_at,
    "interrupt": _interrupt,
    "kill": _kill,
}
"""Each raises `RuntimeError` where there is no such drone any more."""
