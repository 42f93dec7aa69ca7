"""Socket addresses by which processes reach each other's channels, and exit markers of drones.

    <directory of the reactor that started it>/<pid>.c   a drone's channel socket
    <directory of its own reactor>/<pid>.c               the controller process's channel socket
                                  /<pid>.e               exit marker: a dangling symbolic link whose
                                                         target is the exit code of drone <pid>

The sockets are those of green/distributed/. This module is separate from `endpoint` because green
threads need addresses but not ZeroMQ.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress

__all__ = [
    "address_here",
    "begin",
    "channels_of",
    "end",
    "how_it_ended",
    "leave_word",
    "pid_of",
    "snapshot_taken",
]

home_of_parent: str | None = None
"""In a drone: the directory of the reactor that started it. The drone's own reactor makes its
directory inside this one.
"""
own_home: str | None = None
"""The directory of this process's own reactor, or None while it has no reactor."""
address_of_parent: str | None = None
"""In a forked zygote and its drones: the channel address of the process they were forked from."""
name_here = "the main image"
"""The name of this process in messages of other processes."""
at_start: list[Callable[[], object]] = []
"""Called when other processes may want to reach this one: after the directory of its reactor was
made, and after each snapshot taken since.
"""
at_end: list[Callable[[], object]] = []
"""Called when this process's reactor ends and its directory is removed."""


def begin(home: str) -> None:
    """Record the directory of this process's reactor, which exists now."""
    global own_home
    own_home = home
    snapshot_taken()


def end(home: str) -> None:
    global own_home
    if own_home == home:
        own_home = None
        for act in at_end:
            act()


def snapshot_taken() -> None:
    if own_home is not None:
        for act in at_start:
            act()


def channels_of(home: str, pid: int) -> str:
    """Return the path of the socket for the channels of process `pid`."""
    return f"{home}/{pid}.c"


def pid_of(channels: str) -> int:
    return int(os.path.basename(channels)[:-2])


def address_here(home: str | None) -> str | None:
    """Return the channel address of this process, or None if it has no directory.

    A drone's socket is in the directory of its parent's reactor. Any other process uses `home`, the
    directory of its own reactor.
    """
    place = home_of_parent or home
    return None if place is None else channels_of(place, os.getpid())


def leave_word(channels: str, code: int) -> None:
    """Record that a drone ended with exit code `code`, and remove its socket.

    Processes that were connected to the drone read the code with `how_it_ended`.
    """
    if os.path.exists(channels):
        with suppress(OSError):
            if code:
                # A symbolic link is created atomically: readers never see half an exit code.
                os.symlink(str(code), channels[:-1] + "e")
            os.unlink(channels)


def how_it_ended(channels: str) -> int | None:
    """Return the exit code of a drone, or None if the code is not known yet or was 0."""
    try:
        return int(os.readlink(channels[:-1] + "e"))
    except (OSError, ValueError):
        return None


def _forget() -> None:
    """Forget the reactor in a forked child: only the parent has it."""
    global own_home
    own_home = None


os.register_at_fork(after_in_child=_forget)
