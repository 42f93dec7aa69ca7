"""Where this image is, for other images that want to reach it.

    <directory of the hub that started it>/<pid>.c     a drone's socket for its channels (green/far/)
    <directory of its own hub>/<pid>.c                 the main image's
                              /<pid>.e                 a link to nothing, whose text is the exit code of drone <pid>

A module of its own, as green threads need it, and do not need ZeroMQ.
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
"""In a drone: the directory of the hub that started it; its own hub's is made inside."""
own_home: str | None = None
"""The directory of this image's own hub, while it has one."""
address_of_parent: str | None = None
"""In a forked zygote and its drones: where the image is reached that they are a snapshot of."""
name_here = "the main image"
"""How other images call this one."""
at_start: list[Callable[[], object]] = []
"""Called when others may want to reach this image: a snapshot was taken of it, and its directory is
there."""
at_end: list[Callable[[], object]] = []
"""Called when the own hub ends, and its directory goes."""


def begin(home: str) -> None:
    """The own hub's directory is there."""
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
    """The socket of an image by which others reach the channels that live there."""
    return f"{home}/{pid}.c"


def pid_of(channels: str) -> int:
    return int(os.path.basename(channels)[:-2])


def address_here(home: str | None) -> str | None:
    """Where this image is reached: as a drone in its parent's directory, else in that of its own
    hub, `home`."""
    place = home_of_parent or home
    return None if place is None else channels_of(place, os.getpid())


def leave_word(channels: str, code: int) -> None:
    """That image has ended, with this exit code. Its socket goes; who was connected with it may ask
    how it ended."""
    if os.path.exists(channels):
        with suppress(OSError):
            if code:
                os.symlink(
                    str(code), channels[:-1] + "e"
                )  # a link is there as a whole, or not at all
            os.unlink(channels)


def how_it_ended(channels: str) -> int | None:
    """The exit code; None where that is not known yet, or was 0."""
    try:
        return int(os.readlink(channels[:-1] + "e"))
    except (OSError, ValueError):
        return None


def _forget() -> None:
    """In a forked child: the hub has stayed behind."""
    global own_home
    own_home = None


os.register_at_fork(after_in_child=_forget)
