"""What `multiprocessing` does in a process that it starts, done in a drone, which it has not started.

Its queues, locks and managers were made to cross a fork, but have to be told of it; and what is in a queue when the
process ends has to be sent. Some of them go to no process but with its start: those are a pool's *heirloom*, which
its zygote has from the main image, and each drone from the zygote.

The names used here are private to `multiprocessing`, the same in all versions: its own `BaseProcess._bootstrap` and
`concurrent.futures` use them.

NumPy's global random numbers would be the same in every drone, as its state is copied with the image. CPython seeds
`random` anew in a forked child; here that is done for NumPy. Where it is loaded later, it seeds itself. It takes half a
millisecond of a drone's start, most of it to copy pages of NumPy that are written to (reference counts).
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from contextlib import suppress
from pickle import Pickler
from typing import Any

__all__ = ["become_child", "goes_only_with_the_start", "with_heirloom"]

_heirloom: tuple[Any, ...] = ()


def become_child(name: str, heirloom: tuple[Any, ...] | None) -> None:
    """In a drone that was just forked."""
    global _heirloom
    _heirloom = heirloom or ()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().name = name
        process._children = set()
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()
        atexit.register(util._exit_function)
    _seed_numpy()


def _seed_numpy() -> None:
    mtrand: Any = sys.modules.get("numpy.random.mtrand")
    with suppress(AttributeError):  # it is half loaded: another thread of the main image was at it
        lock = mtrand._rand._bit_generator.lock
        if lock.acquire(blocking=False):  # or it is a copy of one that another thread held: seeding would wait for ever
            lock.release()
            mtrand.seed()


def with_heirloom(initializer: Callable[..., Any]) -> Any:
    return initializer(*_heirloom)


def goes_only_with_the_start(initargs: tuple[Any, ...]) -> bool:
    """Is a lock, queue or the like of `multiprocessing` among them? It says so itself when it is pickled."""
    for arg in initargs:
        try:
            Pickler(_Nowhere(), 5, buffer_callback=lambda _: False).dump(arg)
        except RuntimeError as error:
            if "inheritance" in str(error):
                return True
        except Exception:  # whoever pickles it in earnest will say so
            continue
    return False


class _Nowhere:
    def write(self, piece: object) -> None:
        pass
