"""The controller's end of a zygote: takes the snapshot, gives orders, hears how drones start and end.

    start="fork"    safepoint.fork() here and now: the zygote is this image as it is at this moment
    start="spawn"   a fresh interpreter through multiprocessing's spawn context, which imports the main module
                    again as the standard library does; it becomes the zygote and forks the drones

Made in the thread that asks for it; afterwards only the hub's thread uses it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, cast

from ..wire import whereabouts
from ..wire.arena import Arena, Keep, kept_through_fork
from ..wire.capture import MainSnapshot, shared_with
from . import lifeline, safepoint
from .page import RunningPage
from .zygote import MAX_ORDER, Nest, Order, run_zygote

__all__ = ["START_METHODS", "Launcher", "default_start_method"]

START_METHODS = ("fork", "spawn")


def default_start_method() -> str:
    """Fork where the platform can do it soundly; macOS system libraries do not survive it."""
    import sys

    return "fork" if hasattr(os, "fork") and sys.platform != "darwin" else "spawn"


class Launcher:
    """One zygote. `snapshot` says what its images have in `__main__`; of a spawned one, once it has reported."""

    def __init__(self, method: str, nest: Nest, arena: Arena) -> None:
        self.page = RunningPage(nest.slots)
        self.family = nest.family
        self.arena = arena
        self._held: list[Keep] = []  # shared memory that the zygote and its drones have from this image, as it is now
        self._reaped = False
        # Of a spawned image nothing is known until it reports: till then all of `__main__` goes by value.
        self.snapshot = MainSnapshot(None if method == "fork" else ())
        self._process: BaseProcess | None = None
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = lifeline.own(mine)
        try:
            if method == "fork":
                self.pid = self._fork(theirs, nest)
            else:
                self.pid = self._spawn(theirs, nest)
        except BaseException:
            self.close()
            self.page.close()
            raise
        finally:
            theirs.close()
        self.pidfd = lifeline.open_pidfd(self.pid)
        shared_with.append(self._shared)
        whereabouts.snapshot_taken()

    def _shared(self) -> MainSnapshot:
        return self.snapshot

    def _fork(self, control: socket.socket, nest: Nest) -> int:
        owner = os.getpid()
        above, whereabouts.address_of_parent = whereabouts.address_of_parent, whereabouts.address_here(nest.home)
        try:
            with kept_through_fork(self._held):
                pid = safepoint.fork()
            if pid == 0:
                run_zygote(control, nest, self.page, self.arena, self.snapshot, owner)
            return pid
        finally:
            if os.getpid() != owner:  # whatever went wrong: the main image's code must not go on here
                os._exit(1)
            whereabouts.address_of_parent = above

    def _spawn(self, control: socket.socket, nest: Nest) -> int:
        context = multiprocessing.get_context("spawn")
        process = context.Process(
            target=_become_zygote,
            args=(
                _Handed(control.fileno()),
                _Handed(self.page.fd),
                _Handed(self.arena.fd),
                self.arena.ceiling,
                nest,
                os.getpid(),
            ),
            name="polycephaly-zygote",
        )
        process.start()
        # multiprocessing would wait for it at exit, before we have told it to end.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        self._process = process
        return cast(int, process.pid)

    # -- orders and reports -----------------------------------------------------------------------

    def fileno(self) -> int:
        return self._control.fileno()

    def start(self, order: Order, ends: list[int]) -> None:
        """Asks for a drone, with its `ends` of stdout, stderr and lane. Raises `OSError`: no zygote is there."""
        message = order.to_json()
        if len(message) > MAX_ORDER:
            raise ValueError(f"env= is too large to hand to a drone: {len(message)} of at most {MAX_ORDER} bytes")
        socket.send_fds(self._control, [message], ends)

    def kill(self, number: int) -> None:
        """SIGKILL by the drone's own parent, so that it cannot hit another process with the same number."""
        with suppress(OSError):
            self._control.send(json.dumps({"kill": number}).encode())

    def kill_zygote(self) -> None:
        """SIGKILL, and the kernel ends its drones with it. It is our child, unreaped: the number is its own."""
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def reports(self) -> list[dict[str, Any]] | None:
        """What the zygote has told since the last call; None once it is gone."""
        heard: list[dict[str, Any]] = []
        while True:
            try:
                message = self._control.recv(MAX_ORDER * 8, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return heard
            except OSError:
                return heard or None
            if not message:
                return heard or None
            report = json.loads(message)
            if "ready" in report and self._process is not None:
                self.snapshot = MainSnapshot(report["names"])
            heard.append(report)

    # -- endings ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of the lifeline: the zygote ends, and all that is left of its drones with it.

        The goodbye tells it that its owner lives on. Twice is no error.
        """
        with suppress(ValueError):
            shared_with.remove(self._shared)
        with suppress(OSError):
            self._control.send(json.dumps({"goodbye": True}).encode())
        lifeline.close(self._control)

    def end(self) -> int | None:
        """Lets it go, and waits for its end: nothing is left to it but to end."""
        self.close()
        return self.reap()

    def reap(self) -> int | None:
        """Waits for the zygote's end (it is near, or has been) and gives its exit code, if it is known.
        Twice is no error."""
        code: int | None = None
        if self._reaped:
            return code
        self._reaped = True
        if self._process is not None:
            self._process.join()
            code = self._process.exitcode
            self._process.close()
        else:
            with suppress(ChildProcessError):  # somebody else's os.wait() has had it
                code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.page.close()
        self._held.clear()
        return code


class _Handed:
    """A descriptor handed to a spawned process: pickled by multiprocessing's own means."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (DupFd(self.fd),)


def _detach(handed: Any) -> int:
    return cast(int, handed.detach())


def _become_zygote(control: int, page: int, arena: int, ceiling: int, nest: Nest, owner: int) -> None:
    snapshot = MainSnapshot()
    for fd in (control, page, arena):
        os.set_inheritable(fd, False)
    shared = Arena(ceiling, arena)
    run_zygote(socket.socket(fileno=control), nest, RunningPage(nest.slots, page), shared, snapshot, owner)
