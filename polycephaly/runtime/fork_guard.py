"""Forking an image that has threads of ours.

A fork copies one thread. Whatever another thread had half done, and whatever lock it held, stays so
in the child for ever. So while `fork` forks, each of our threads stands at a *safe point*, where it
holds no lock and has nothing half done: each does its work under a lock of its own, a *turn*,
listed here, and `fork` takes all turns first. Afterwards the parent gives them back; in the child,
hooks make everything anew.

A thread that has nothing half done is an `OwnThread` and needs no turn. One that runs code of users
all the time, as green threads' does, cannot be under a lock for so long; it gives a context manager
(`add_pause`) in which it stands still, if it can do so soon.

Lock order: `guard` before turns; a thread in its turn never takes `guard`, and runs no code of
users.

Python 3.12 warns of every fork with threads. Where all Python threads but this one are ours, they
stand safe and the warning would be wrong; silencing it changes `warnings`' global state for a
moment, and that is safe for the same reason: nobody else is there to see it. With threads of the
user's own it is left to speak."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import Any

__all__ = ["GuardedLock", "OwnThread", "add_pause", "add_turn", "fork", "own_idents", "remove_turn"]

guard = threading.RLock()
"""Held while a hub begins, ends or forks."""


class GuardedLock:
    """The lock of a turn. It knows whose it is, and is taken once."""

    def __init__(self) -> None:
        lock: Any = threading.RLock()
        self.acquire: Callable[..., bool] = lock.acquire
        self.release: Callable[[], None] = lock.release
        self.is_mine: Callable[[], bool] = lock._is_owned
        """Has this thread got it?"""

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


_turns: dict[threading.Thread, AbstractContextManager[Any]] = {}
_pauses: list[Callable[[], AbstractContextManager[None]]] = []


class OwnThread(threading.Thread):
    """A daemon thread of ours that needs no turn."""

    def __init__(self, name: str, target: Callable[[], object] | None = None) -> None:
        super().__init__(name=name, target=target, daemon=True)


def add_turn(thread: threading.Thread, turn: AbstractContextManager[Any]) -> None:
    with guard:
        _turns[thread] = turn


def add_pause(pause: Callable[[], AbstractContextManager[None]]) -> None:
    """To be entered before each fork; once, when the module that it belongs to is loaded."""
    _pauses.append(pause)


def remove_turn(thread: threading.Thread) -> None:
    with guard:
        _turns.pop(thread, None)


def fork() -> int:
    """`os.fork` at a safe point. In the child every lock of ours is new and no thread of ours
    exists."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(
            Exception
        ):  # None, closed, or a stand-in: what it holds must not be written twice
            stream.flush()
    with guard, ExitStack() as standing:
        for pause in _pauses:
            standing.enter_context(pause())
        for turn in list(_turns.values()):
            standing.enter_context(turn)
        with _no_warning_of_our_threads():
            pid = os.fork()
        if pid == 0:
            standing.pop_all()  # those locks are not ours any more: `_after_fork_in_child` forgot them
        return pid


def own_idents() -> set[int]:
    """The identities of our threads that are under a turn, or need none."""
    ours = (t for t in threading.enumerate() if t in _turns or isinstance(t, OwnThread))
    return {thread.ident for thread in ours if thread.ident is not None}


def _no_warning_of_our_threads() -> Any:
    others = set(threading.enumerate()) - {threading.current_thread()} - set(_turns)
    others = {thread for thread in others if not isinstance(thread, OwnThread)}
    if others or sys.version_info < (3, 12):
        return nullcontext()
    return warnings.catch_warnings(action="ignore", category=DeprecationWarning)


def _after_fork_in_child() -> None:
    global guard
    guard = threading.RLock()
    _turns.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
