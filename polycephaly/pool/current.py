"""The pool whose ``with`` block encloses the running code, as needed by `flow`."""

from __future__ import annotations

import os
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import ref

if TYPE_CHECKING:
    from .base import ExecutorBase

__all__ = ["enter_pool", "innermost_pool", "leave_pool"]

_pools: ContextVar[tuple[ref[ExecutorBase], ...]] = ContextVar("polycephaly pools", default=())
"""From the outermost to the innermost, for this thread, asyncio task or green thread. The
references are weak, because copies of a context may live longer than the block."""


_get_pools = _pools.get


def enter_pool(pool: ExecutorBase) -> None:
    _pools.set((*_get_pools(), ref(pool)))


def leave_pool(pool: ExecutorBase) -> None:
    _pools.set(tuple(each for each in _get_pools() if each() is not pool))


def innermost_pool() -> ExecutorBase | None:
    pools = _get_pools()
    while pools:
        pool = pools[-1]()
        if pool is not None:
            return pool
        pools = pools[:-1]
    return None


def _clear_pools() -> None:
    """Forget the pools in a forked child, because they belong to the parent process."""
    _pools.set(())


os.register_at_fork(after_in_child=_clear_pools)
