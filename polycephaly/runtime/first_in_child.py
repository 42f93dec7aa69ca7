"""What a forked zygote does before the at-fork handlers of others run in it.

Such a handler may wait for a lock for ever. CPython calls the handlers in the order in which they
were registered, so this module is loaded with the package itself, before anything is needed of it.
Handlers that were registered before ``import polycephaly``, and those of C libraries, run earlier.
"""

from __future__ import annotations

import os
from _thread import get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_thread = 0
_action: Callable[[], object] | None = None


def fork_with(action: Callable[[], object], fork: Callable[[], int]) -> int:
    """Call `fork`, and first of all `action` in the child. One thread at a time may call it."""
    global _thread, _action
    _thread, _action = get_ident(), action
    try:
        return fork()
    finally:
        _thread, _action = 0, None


def _after_fork_in_child() -> None:
    if _action is not None and _thread == get_ident():
        _action()


if hasattr(os, "register_at_fork"):  # promises work also where no process can be forked
    os.register_at_fork(after_in_child=_after_fork_in_child)
