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

parent_directory: str | None = None
"""In a drone: the directory of the reactor that started it. The drone's own reactor makes its
directory inside this one.
"""
own_directory: str | None = None
"""The directory of this process's own reactor, or None while it has no reactor."""
parent_address: str | None = None
"""In a forked zygote and its drones: the channel address of the process they were forked from."""
own_name = "the controller process"
"""The name of this process in messages of other processes."""
start_callbacks: list[Callable[[], object]] = []
"""Called when other processes may want to reach this one: after the directory of its reactor was
made, and after each snapshot taken since.
"""
end_callbacks: list[Callable[[], object]] = []
"""Called when this process's reactor ends and its directory is removed."""


def on_directory_made(directory: str) -> None:
    """Record the directory of this process's reactor, which exists now."""
    global own_directory
    own_directory = directory
    on_snapshot_taken()


def on_directory_removed(directory: str) -> None:
    global own_directory
    if own_directory == directory:
        own_directory = None
        for callback in end_callbacks:
            callback()


def on_snapshot_taken() -> None:
    if own_directory is not None:
        for callback in start_callbacks:
            callback()


def channel_address(directory: str, pid: int) -> str:
    """Return the path of the socket for the channels of process `pid`."""
    return f"{directory}/{pid}.c"


def pid_of(address: str) -> int:
    return int(os.path.basename(address)[:-2])


def own_address(directory: str | None) -> str | None:
    """Return the channel address of this process, or None if it has no directory.

    A drone's socket is in the directory of its parent's reactor. Any other process uses
    `directory`, that of its own reactor.
    """
    parent = parent_directory or directory
    return None if parent is None else channel_address(parent, os.getpid())


def record_exit(address: str, code: int) -> None:
    """Record that a drone ended with exit code `code`, and remove its socket.

    Processes that were connected to the drone read the code with `recorded_exit_code`.
    """
    if os.path.exists(address):
        with suppress(OSError):
            if code:
                # A symbolic link is created atomically: readers never see half an exit code.
                os.symlink(str(code), address[:-1] + "e")
            os.unlink(address)


def recorded_exit_code(address: str) -> int | None:
    """Return the exit code of a drone, or None if the code is not known yet or was 0."""
    try:
        return int(os.readlink(address[:-1] + "e"))
    except (OSError, ValueError):
        return None


def _forget_reactor() -> None:
    """Forget the reactor in a forked child: only the parent has it."""
    global own_directory
    own_directory = None


os.register_at_fork(after_in_child=_forget_reactor)
