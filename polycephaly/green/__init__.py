"""Green threads: millions of communicating coroutines, and plain blocking code that overlaps.

    green.run(main)            from plain code: start a green thread, and wait for its end
    green.spawn(fn, *args)     from any thread: start a green thread; returns its promise
    await green.call(fn, ...)  make a blocking call without blocking other green threads

One scheduler per process runs coroutines one at a time, in the order in which they became ready
(scheduler.py). Plain functions run on native threads meanwhile (native.py). Green threads pass
shared objects to each other through channels.
"""

# ruff: noqa: E402 - the check comes before imports of what other systems lack

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .._compat import check_platform

check_platform(any_unix=True)

from ..errors import ChannelClosed, Deadlock, ItemLost
from .aio import aio
from .batch import Batch, call, call_long
from .channel import Channel, Receiver, Sender
from .group import Group
from .locks import Barrier, Event, Lock, Semaphore
from .mapping import map, par
from .report import ThreadInfo, threads, timeline
from .run import run
from .select import Chosen, Guard, after, select, settled, skip
from .sleeping import current, sleep, timeout
from .spawning import spawn
from .thread import Cancelled, GreenThread
from .watchdog import configure

__all__ = [
    "Barrier", "Batch", "Cancelled", "Channel", "ChannelClosed", "Chosen", "Deadlock", "Event",
    "GreenThread", "Group", "Guard", "ItemLost", "Lock", "Receiver", "Semaphore", "Sender",
    "ThreadInfo", "after", "aio", "call", "call_long", "configure", "current", "map", "par", "run",
    "select", "settled", "skip", "sleep", "spawn", "threads", "timeline", "timeout",
]  # fmt: skip


if TYPE_CHECKING:  # with a `__getattr__`, type checkers would accept any name
    from . import testing as testing
else:

    def __getattr__(name):
        """Import the part for tests at the first use."""
        if name == "testing":
            return import_module(".testing", __name__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "testing"])
