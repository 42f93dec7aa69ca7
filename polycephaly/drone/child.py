"""What `multiprocessing` does in a process that it starts, done in a drone, which it has not
started.

Its queues, locks and managers were made to cross a fork, but have to be told of it; and what is in
a queue when the process ends has to be sent. Some of them go to no process but with its start:
those are a pool's *heirloom*, which its zygote has from the main image, and each drone from the
zygote; pickled, where the zygote is bare.

The names used here are private to `multiprocessing`, the same in all versions: its own
`BaseProcess._bootstrap` and `concurrent.futures` use them.

NumPy's global random numbers would be the same in every drone, as its state is copied with the
image. CPython seeds `random` anew in a forked child; here that is done for NumPy. Where it is
loaded later, it seeds itself. It takes half a millisecond of a drone's start, most of it to copy
pages of NumPy that are written to (reference counts)."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import suppress
from pickle import loads
from typing import Any

from ..runtime.connections import Search
from ..wire.pickling import main_namespace

__all__ = [
    "become_child", "call_as_imported", "goes_only_with_the_start", "leave_exit_handlers", "with_heirloom",
]  # fmt: skip

_inherited_args: tuple[Any, ...] | bytes = ()


def become_child(name: str, inherited_args: tuple[Any, ...] | bytes | None) -> None:
    """In a drone that was just forked."""
    global _inherited_args
    _inherited_args = inherited_args or ()
    leave_exit_handlers()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().name = name
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
    _seed_numpy()


def leave_exit_handlers() -> None:
    """In any forked child: the exit handlers, and the processes for which `multiprocessing`'s own
    waits, are its parent's."""
    atexit._clear()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children = set()
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        atexit.register(util._exit_function)


def _seed_numpy() -> None:
    mtrand: Any = sys.modules.get("numpy.random.mtrand")
    with suppress(AttributeError):  # it is half loaded: another thread of the main image was at it
        lock = mtrand._rand._bit_generator.lock
        if lock.acquire(
            blocking=False
        ):  # or it is a copy of one that another thread held: seeding would wait for ever
            lock.release()
            mtrand.seed()


def with_heirloom(initializer: Callable[..., Any]) -> Any:
    return call_as_imported(
        initializer,
        *(loads(_inherited_args) if isinstance(_inherited_args, bytes) else _inherited_args),
    )


def call_as_imported(initializer: Callable[..., Any], *initargs: Any) -> Any:
    """An initializer that came by value, before it was known what the drone's `__main__` has. If
    that has imported the same function, this one is called, so that work finds the globals that it
    sets."""
    own: Any = main_namespace().get(getattr(initializer, "__name__", ""))
    same = own is not None and getattr(own, "__code__", None) == getattr(
        initializer, "__code__", own
    )
    return (own if same else initializer)(*initargs)


def goes_only_with_the_start(initargs: tuple[Any, ...]) -> bool:
    """Is a lock, queue or the like of `multiprocessing` among them, which says so itself when it is
    pickled, or something open?"""
    for arg in initargs:
        search = Search()
        with suppress(Exception):  # whoever pickles it in earnest will say so
            search.dump(arg)
        if search.inherits or search.found:
            return True
    return False
