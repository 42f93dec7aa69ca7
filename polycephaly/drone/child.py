"""Prepare a drone as `multiprocessing` prepares the processes that it starts.

Queues, locks and managers of `multiprocessing` cross a fork, but have to be notified of the fork,
and the contents of a queue have to be sent when the process ends. Some of these objects reach a
process only when it starts. They are the *inherited arguments* of a pool: the zygote inherits them
from the controller process, and each drone from the zygote. A bare zygote gets them pickled.

The names used here are private to `multiprocessing` but the same in all versions: its own
`BaseProcess._bootstrap` and `concurrent.futures` use them.

NumPy's global random numbers would be the same in every drone, because their state is copied by the
fork. CPython seeds `random` anew in a forked child; here the same is done for NumPy. If NumPy is
loaded later, it seeds itself. Seeding takes half a millisecond of a drone's start, most of it to
copy pages of NumPy that are written to (reference counts).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pickle import loads
from typing import Any

from .. import _compat
from ..runtime.connections import search_inherited
from ..wire.main_names import main_namespace

_inherited_args: tuple[Any, ...] | bytes = ()


def prepare_child(name: str, inherited_args: tuple[Any, ...] | bytes | None) -> None:
    """Prepare a drone that was just forked."""
    global _inherited_args
    _inherited_args = inherited_args or ()
    _compat.clear_exit_handlers()
    _compat.reset_multiprocessing(name)
    _compat.seed_numpy()


def set_environment(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    if "TZ" in variables:
        time.tzset()


def call_with_inherited_args(initializer: Callable[..., Any]) -> Any:
    args = loads(_inherited_args) if isinstance(_inherited_args, bytes) else _inherited_args
    return call_as_imported(initializer, *args)


def call_as_imported(initializer: Callable[..., Any], *initargs: Any) -> Any:
    """Call an initializer that came by value, or its copy in the drone's `__main__`.

    The initializer was serialized before the names in `__main__` were known.

    If `__main__` has imported the same function, that one is called, so that tasks find the globals
    that it sets.
    """
    own: Any = main_namespace().get(getattr(initializer, "__name__", ""))
    same = own is not None and getattr(own, "__code__", None) == getattr(
        initializer, "__code__", own
    )
    return (own if same else initializer)(*initargs)


def needs_inheritance(initargs: tuple[Any, ...]) -> bool:
    """Return True if `initargs` can reach a drone only when it starts.

    That is so if they contain an open file, or a lock, queue or similar of `multiprocessing`, whose
    pickling reports that.
    """
    search = search_inherited(initargs)
    return search.must_inherit or bool(search.found)
