"""What `multiprocessing` does in a process that it starts, done in a drone, which it has not started.

Its queues, locks and managers were made to cross a fork, but have to be told of it; and what is in a queue when the
process ends has to be sent. Some of them go to no process but with its start: those are a pool's *heirloom*, which
its zygote has from the main image, and each drone from the zygote.

The names used here are private to `multiprocessing`, the same in all versions: its own `BaseProcess._bootstrap` and
`concurrent.futures` use them.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
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
