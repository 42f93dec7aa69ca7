"""The controller's end of a zygote: takes the snapshot, sends orders, receives reports of drones.

    start="fork"    `fork_guard.fork()`: the zygote is a copy of this process at this moment
    start="spawn"   a bare zygote (bare.py); each drone imports the main module, as in the
                    standard library
    start=None      a fork if that is safe (native_threads.py); else a bare zygote, whose drones
                    get `__main__` by value

The thread that asks for a launcher makes it. After that, only the reactor's thread uses it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...memory.arena import RangeRef, hold_ranges_through_fork
from ...memory.blocks import Store
from ...memory.references import RefTable
from ...runtime import fork_guard, parent_death
from ...runtime.first_in_child import fork_with
from ...runtime.hidden import Hidden
from ...wire import addresses
from ...wire.main_names import MainSnapshot, shared_snapshots
from .native_libraries import LoadedLibraries, prepare_to_limit
from .native_threads import (
    UnsafeFork,
    check_after_fork,
    check_before_fork,
    check_interpreters,
    would_lack_threads,
)
from .start_stack import ASK_FOR_STACK, StartStack
from .zygote import MAX_ORDER_BYTES, DroneSpec, Order, Variables, Zygote

if TYPE_CHECKING:
    from ...wire.main_snapshot import Snapshot

HUNG_START_SECONDS = 2.0
"""Time for a zygote that is not known to be ready to end, before SIGKILL."""


def shared_variables(environments: Sequence[Variables]) -> Variables:
    """Return the variables that are the same in all `environments`."""
    first, *others = (each.value.items() for each in environments)
    return Hidden(dict(each for each in first if all(each in other for other in others)))


class Launcher:
    """One zygote.

    `snapshot` has the names in the `__main__` of its drones. If these import the main module, the
    names are known only after the first drone has done so.
    """

    def __init__(
        self,
        start: str | None,
        spec: DroneSpec,
        store: Store,
        name: str,
        env: Variables,
        set_by_user: frozenset[str],
    ) -> None:
        """Warn, with the pool's `name`, if `start` is None and a fork is not safe.

        A fresh interpreter starts with the variables `env`. See `native_libraries` for the names
        `set_by_user`.
        """
        fork_guard.fill_standard_descriptors()
        self.family = spec.family
        self.arena = store.arena
        self.set_by_user = set_by_user
        self.imports_main = start == "spawn"
        self.main_copy: Snapshot | None = None
        """The copy of `__main__` for its drones; None if they fork or import the main module."""
        # Shared memory that the zygote and its drones see too: held, so that its content stays.
        self._kept_memory: list[RangeRef] = []
        self._unsafe: UnsafeFork | None = None
        """Why its drones are not forks, if they might have been."""
        self._reaped = False
        self.is_ready = False
        self._start_stack: StartStack | None = None  # of a fork that is not ready
        # The names in an imported main module are unknown until a drone reports them. Until then
        # all of `__main__` is sent by value.
        self.snapshot = MainSnapshot(() if self.imports_main else None)
        self._knows_names = False
        self.pid = self._start(start, spec, store, name, env)
        self.pidfd = parent_death.open_pidfd(self.pid)
        shared_snapshots.append(self._current_snapshot)
        try:
            addresses.on_snapshot_taken()
        except BaseException:  # no thread can be started for channels, say
            self.end()
            raise

    def _current_snapshot(self) -> MainSnapshot:
        return self.snapshot

    def _start(
        self, start: str | None, spec: DroneSpec, store: Store, name: str, env: Variables
    ) -> int:
        if start != "spawn":
            fork_guard.wait_for_imports()
            try:
                check_interpreters()
                if start is None:
                    check_before_fork()
                if spec.limits_libraries:
                    prepare_to_limit()
                with self._control_pair() as theirs:
                    return self._fork(theirs, spec, forced=start is not None)
            except UnsafeFork as unsafe:
                if start == "fork":
                    text = f"{name} cannot fork this process, because {unsafe}: {unsafe.cure}"
                    raise RuntimeError(text) from None
                unsafe.warn(name)
                self._unsafe = unsafe
            self._kept_memory.clear()
            from ...wire.main_snapshot import take_snapshot

            ref_table = RefTable(self.arena, None, lambda: None)
            self.main_copy = take_snapshot(store, ref_table)
            self._kept_memory += ref_table.lent.values()
            self.snapshot = MainSnapshot(self.main_copy.names, self.main_copy.left_out)
        from .bare import start_bare_zygote

        with self._control_pair() as theirs:
            return start_bare_zygote(theirs.fileno(), self.arena, spec, self.main_copy, env)

    @contextmanager
    def _control_pair(self) -> Iterator[socket.socket]:
        """Make `_control`, and yield the zygote's end."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = parent_death.close_in_child(mine)
        try:
            yield theirs
        except BaseException:
            parent_death.close(self._control)
            raise
        finally:
            theirs.close()

    def _fork(self, control: socket.socket, spec: DroneSpec, forced: bool) -> int:
        """Fork, and return the zygote's pid. Raises `UnsafeFork`, unless `forced` by the user."""
        owner = os.getpid()
        pid = 0
        libraries = LoadedLibraries(forced and spec.limits_libraries and would_lack_threads())
        try:
            with fork_guard.guard, hold_ranges_through_fork(self._kept_memory):
                self._start_stack = StartStack()
                previous_address = addresses.parent_address
                addresses.parent_address = addresses.own_address(spec.directory)
                end_with_owner = partial(parent_death.end_with_owner, owner, spec.directory)
                try:
                    with self._start_stack.handler():
                        pid = fork_with(end_with_owner, fork_guard.fork)
                finally:
                    if os.getpid() == owner:
                        addresses.parent_address = previous_address
            if pid == 0:
                Zygote(control, spec, self.arena, self.snapshot, owner, libraries).run()
            if not forced:
                check_after_fork()
            return pid
        except BaseException:
            # SIGKILL, because the child may hang. It has no drones yet.
            if pid and os.getpid() == owner:
                os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):  # the kernel reaps it if SIGCHLD is ignored
                    os.waitpid(pid, 0)
            self._forget_start_stack()
            raise
        finally:
            # In the child, after any error, the controller's code must not go on.
            if os.getpid() != owner:
                os._exit(1)

    def ask_for_stack(self) -> None:
        """Have a fork that is not ready write where it is, for `start_stack`."""
        if self._start_stack is not None:
            self.signal_zygote(ASK_FOR_STACK)

    def start_stack(self) -> list[str]:
        """Return the lines that it has written."""
        return [] if self._start_stack is None else self._start_stack.read(0)

    def _forget_start_stack(self) -> None:
        if self._start_stack is not None:
            self._start_stack.close()
            self._start_stack = None

    def why_no_forks(self) -> str | None:
        """Return why its drones are not forks, and a remedy; None if they are."""
        if self._unsafe is not None:
            return f"that is not safe, because {self._unsafe}; {self._unsafe.cure}"
        return "drones of start='spawn' are none" if self.imports_main else None

    def left_out(self, name: str) -> str | None:
        """Return why its drones lack `name` of `__main__`, and a remedy; None if unknown."""
        if self.main_copy is not None and self._unsafe is not None:
            reason = self.main_copy.left_out.get(name)
            if name in self.main_copy.names:
                reason = "the value could not be loaded when the drone started, which printed why"
            return reason and (
                f"they are not forks, because {self._unsafe}, and {reason}; make it in an "
                f"initializer, or: {self._unsafe.cure}"
            )
        if not self.imports_main or self.snapshot.has(name):
            return None
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        has_module = file is not None if spec is None else not spec.name.endswith("__main__")
        if not has_module:
            reason = (
                "there is no main module to import under python -c, at a prompt, or for python -m "
                "with a package"
            )
        else:
            reason = (
                "the import does not define it (code under `if __name__ == '__main__':` does not "
                "run)"
            )
        return (
            "they are fresh interpreters that import the main module (start='spawn'), and "
            f"{reason}; push it, give it as an argument, or use start='fork'"
        )

    # -- orders and reports ------------------------------------------------------------------------

    def fileno(self) -> int:
        return self._control.fileno()

    def start(self, order: Order, ends: list[int]) -> None:
        """Order a drone, with its ends of stdout, stderr and two socket pairs, and its memory.

        Raises `OSError` if the zygote is gone, and `ValueError` if the order is too large.
        """
        message = order.pack()
        if len(message) > MAX_ORDER_BYTES:
            raise ValueError(
                f"env= is too large for a drone: {len(message)} of at most {MAX_ORDER_BYTES} bytes"
            )
        self._send(message, ends)

    def kill(self, number: int, with_signal: int = signal.SIGKILL) -> None:
        """Have the drone's parent send the signal, so that no other process with its pid is hit."""
        with suppress(OSError):
            self._send(json.dumps({"kill": number, "signal": with_signal}).encode())

    def _send(self, message: bytes, fds: Sequence[int] = ()) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            self._control.sendmsg([message], rights, socket.MSG_DONTWAIT)
        except BlockingIOError:
            # A zygote that a signal has stopped would not read, and the health monitor cannot
            # continue it, because the caller holds the reactor's lock.
            self.signal_zygote(signal.SIGCONT)
            self._control.sendmsg([message], rights)
        except (BrokenPipeError, ConnectionResetError):
            # It has ended, or no order reaches it any more: then its end is reported, too.
            self.signal_zygote(signal.SIGKILL)
            raise

    def signal_zygote(self, number: int) -> None:
        """Send a signal to the zygote. After SIGKILL, the kernel ends its drones."""
        if self._reaped:
            return
        with suppress(OSError):  # the zygote has ended, or other code has closed the descriptor
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, number)
            else:  # the pid is another process's only if other code has reaped the zygote
                os.kill(self.pid, number)

    def reports(self) -> list[dict[str, Any]] | None:
        """Return the zygote's reports since the last call; None if the zygote is gone."""
        received: list[dict[str, Any]] = []
        while True:
            try:
                message = self._control.recv(MAX_ORDER_BYTES * 8, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return received
            except ConnectionResetError:  # told once: the zygote had orders unread when it ended
                continue
            except OSError:
                return received or None
            if not message:
                return received or None
            report = json.loads(message)
            if "ready" in report:
                self.is_ready = True
                self._forget_start_stack()
            received.append(report)

    def learn_names(self, names: list[str]) -> bool:
        """Note the names that a drone found in the main module; return False if known before."""
        if self._knows_names:
            return False
        self._knows_names = True
        self.snapshot = MainSnapshot(names)
        return True

    # -- endings -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the parent-death pipe: the zygote ends, with all that is left of its drones.

        The goodbye message tells the zygote that its owner lives on. A second call does nothing.
        """
        with suppress(ValueError):
            shared_snapshots.remove(self._current_snapshot)
        with suppress(OSError):
            self._send(json.dumps({"goodbye": True}).encode())
        parent_death.close(self._control)
        self._forget_start_stack()

    def end(self) -> int | None:
        """Close the launcher, wait for the zygote's end, and return its exit code if known."""
        self.close()
        return self.reap()

    def reap(self) -> int | None:
        """Wait for the zygote's end, which is near or past, and return its exit code if known.

        A second call returns None.
        """
        code: int | None = None
        if self._reaped:
            return code
        self.signal_zygote(signal.SIGCONT)  # a zygote that is stopped by a signal would not end
        if not self.is_ready and self.pidfd is not None:  # it may hang in somebody's handler
            parent_death.wait_for_end(self.pidfd, HUNG_START_SECONDS)
            self.signal_zygote(signal.SIGKILL)
        self._reaped = True
        with suppress(ChildProcessError):  # reaped by another os.wait() in this process
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        if self.pidfd is not None:
            with suppress(OSError):  # other code has closed it
                os.close(self.pidfd)
            self.pidfd = None
        self._kept_memory.clear()
        return code
