"""Green threads: millions of communicating coroutines, and plain blocking code that overlaps.

    green.run(main)            from plain code: start, and wait
    green.spawn(fn, *args)     from anywhere: start; a promise of the value
    await green.call(fn, ...)  a blocking call that stops nobody else

One scheduler per image runs coroutines one at a time, in the order in which they became ready (scheduler.py). Plain
functions are run on native threads meanwhile (native.py). What they share they hand each other through channels.
"""

from __future__ import annotations

from ..errors import ChannelClosed, Deadlock
from .aio import aio
from .call import call, call_long
from .channel import Channel
from .configure import configure
from .group import Group
from .locks import Barrier, Event, Lock, Semaphore
from .mapping import map, par
from .report import ThreadInfo, threads, timeline
from .run import run
from .select import Chosen, Guard, after, select, settled, skip
from .sleeping import current, sleep, timeout
from .thread import Cancelled, GreenThread, spawn

__all__ = [
    "Barrier",
    "Cancelled",
    "Channel",
    "ChannelClosed",
    "Chosen",
    "Deadlock",
    "Event",
    "GreenThread",
    "Group",
    "Guard",
    "Lock",
    "Semaphore",
    "ThreadInfo",
    "after",
    "aio",
    "call",
    "call_long",
    "configure",
    "current",
    "map",
    "par",
    "run",
    "select",
    "settled",
    "skip",
    "sleep",
    "spawn",
    "threads",
    "timeline",
    "timeout",
]
