"""The controller's end of a zygote: takes the snapshot, gives orders, hears how drones start and
end.

    start="fork"    safepoint.fork() here and now: the zygote is this image as it is at this moment
    start="spawn"   a bare zygote (bare.py), each of whose drones imports the main module as the standard library does
    start=None      a fork where that is safe (native_threads.py); else a bare zygote, whose drones get `__main__`
                    by value

Made in the thread that asks for it; afterwards only the hub's thread uses it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from ...runtime import fork_guard, parent_death
from ...store.arena import Keep, kept_through_fork
from ...store.blocks import Store
from ...wire import addresses
from ...wire.main_snapshot import Snapshot, take
from ...wire.pickling import MainSnapshot, shared_with
from .bare import start_bare
from .native_threads import UnsafeFork, check_after_fork, check_before_fork
from .status_table import StatusTable
from .zygote import MAX_ORDER, DroneSpec, Order, run_zygote

__all__ = ["START_METHODS", "Launcher"]

START_METHODS = ("fork", "spawn")


class Launcher:
    """One zygote. `snapshot` says what its images have in `__main__`; of those that import it, once
    one has done so."""

    def __init__(self, start: str | None, spec: DroneSpec, store: Store, name: str) -> None:
        """Warns if it does not fork though nothing was said of the start; `name` says whose it
        is."""
        self.family = spec.family
        self.arena = store.arena
        self.imports_main = start == "spawn"
        self.taken: Snapshot | None = None
        """What its drones have by value."""
        self._held: list[
            Keep
        ] = []  # shared memory that the zygote and its drones have from this image, as it is now
        self._reaped = False
        # Of imported modules nothing is known until a drone reports: till then all of `__main__`
        # goes by value.
        self.snapshot = MainSnapshot(() if self.imports_main else None)
        self._knows_names = not self.imports_main
        self.status_table = StatusTable(spec.slots)
        try:
            self.pid = self._start(start, spec, store, name)
        except BaseException:
            self.status_table.close()
            raise
        self.pidfd = parent_death.open_pidfd(self.pid)
        shared_with.append(self._shared)
        addresses.snapshot_taken()

    def _shared(self) -> MainSnapshot:
        return self.snapshot

    def _start(self, start: str | None, spec: DroneSpec, store: Store, name: str) -> int:
        if start != "spawn":
            try:
                if start is None:
                    check_before_fork()
                return self._fork(spec, insists=start is not None)
            except UnsafeFork as why:
                why.warn(name)
            self._held.clear()
            self.taken = take(store, self._held)
            self.snapshot = MainSnapshot(self.taken.names(), self.taken.left_out)
        return self._start_bare(spec)

    def _fork(self, spec: DroneSpec, insists: bool) -> int:
        """Raises `UnsafeFork`, unless it `insists`."""
        owner = os.getpid()
        above, addresses.address_of_parent = (
            addresses.address_of_parent,
            addresses.address_here(spec.home),
        )
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = parent_death.own(mine)
        pid = 0
        try:
            with kept_through_fork(self._held):
                pid = fork_guard.fork()
            if pid == 0:
                run_zygote(theirs, spec, self.status_table, self.arena, self.snapshot, owner)
            if not insists:
                check_after_fork()
            return pid
        except BaseException:
            parent_death.close(self._control)
            if (
                pid and os.getpid() == owner
            ):  # it has no drones yet, and may hang before it is a zygote
                os.kill(pid, signal.SIGKILL)
                with suppress(
                    ChildProcessError
                ):  # the kernel reaps it itself, where SIGCHLD is ignored
                    os.waitpid(pid, 0)
            raise
        finally:
            if (
                os.getpid() != owner
            ):  # whatever went wrong: the main image's code must not go on here
                os._exit(1)
            theirs.close()
            addresses.address_of_parent = above

    def _start_bare(self, spec: DroneSpec) -> int:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = parent_death.own(mine)
        try:
            return start_bare(theirs.fileno(), self.status_table.fd, self.arena, spec, self.taken)
        except BaseException:
            parent_death.close(self._control)
            raise
        finally:
            theirs.close()

    def left_out(self, name: str) -> str | None:
        """Why its drones have that name of `__main__` not, if it has a reason; with the cure."""
        if self.taken is not None:
            why = self.taken.left_out.get(name)
            cure = "make it in an initializer, or use start='fork'"
            return why and f"they are no forks, because of native threads, and {why}; {cure}"
        if not self.imports_main:
            return None
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if (
            spec.name.endswith("__main__")
            if spec is not None
            else getattr(main, "__file__", None) is None
        ):
            why = "there is none to be imported under python -c, at a prompt, or for python -m with a package"
        else:
            why = "that does not define it (what is under `if __name__ == '__main__':` is not run)"
        return (
            f"they are fresh interpreters that import the main module (start='spawn'), and {why}; "
            "push it, give it as an argument, or use start='fork'"
        )

    # -- orders and reports ------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._control.fileno()

    def start(self, order: Order, ends: list[int]) -> None:
        """Asks for a drone, with its `ends` of stdout, stderr and lane. Raises `OSError`: no zygote
        is there."""
        message = order.to_json()
        if len(message) > MAX_ORDER:
            raise ValueError(
                f"env= is too large to hand to a drone: {len(message)} of at most {MAX_ORDER} bytes"
            )
        socket.send_fds(self._control, [message], ends)

    def kill(self, number: int) -> None:
        """SIGKILL by the drone's own parent, so that it cannot hit another process with the same
        number."""
        with suppress(OSError):
            self._control.send(json.dumps({"kill": number}).encode())

    def kill_zygote(self) -> None:
        """SIGKILL, and the kernel ends its drones with it. It is our child, unreaped: the number is
        its own."""
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def continue_zygote(self) -> None:
        """SIGCONT: it was stopped."""
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

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
            heard.append(json.loads(message))

    def learn_names(self, names: list[str]) -> bool:
        """A drone has imported the main module and found these there: was that not known?"""
        if self._knows_names:
            return False
        self._knows_names = True
        self.snapshot = MainSnapshot(names)
        return True

    # -- endings -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Lets go of the lifeline: the zygote ends, and all that is left of its drones with it.

        The goodbye tells it that its owner lives on. Twice is no error.
        """
        with suppress(ValueError):
            shared_with.remove(self._shared)
        with suppress(OSError):
            self._control.send(json.dumps({"goodbye": True}).encode())
        parent_death.close(self._control)

    def end(self) -> int | None:
        """Lets it go, and waits for its end: nothing is left to it but to end."""
        self.close()
        return self.reap()

    def reap(self) -> int | None:
        """Waits for the zygote's end (it is near, or has been) and gives its exit code, if it is
        known. Twice is no error."""
        code: int | None = None
        if self._reaped:
            return code
        self.continue_zygote()  # one that somebody has stopped would not end
        self._reaped = True
        with suppress(ChildProcessError):  # somebody else's os.wait() has had it
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
        self.status_table.close()
        self._held.clear()
        return code
