"""The zygote: a quiet copy of the main image, or a bare interpreter (bare.py), from which the
drones are forked.

    hub ──START + three ends──────> zygote ──fork──> drone      (one SEQPACKET socket pair: orders, reports and
    hub <──started, failed, exited── zygote <──SIGCHLD── drone    lifeline in one; JSON, descriptors beside it)

It is single-threaded and runs nothing of the user's, so it can fork at any time; whatever the main
image does afterwards, the drones are all of the same snapshot. It is its drones' parent: it reaps
them, tells how they ended, and kills what they left. Its own end is the end of them all, and its
owner's end is its own.

Every child of the zygote that is not a drone is an orphan of a dead one (a drone is a subreaper:
orphans of its own descendants go to it while it lives), so those are killed wherever they are met.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from ...runtime import parent_death
from ...runtime.connections import leave_connections
from ...store.arena import Arena
from ...wire.addresses import channels_of, leave_word
from ...wire.pickling import MainSnapshot
from .status_table import StatusTable

if TYPE_CHECKING:
    from .bare import MainMaker

__all__ = ["DroneSpec", "Order", "run_zygote"]

OWNER_ENDS_WITHIN = 2.0  # seconds after its end of the lifeline has closed
SWEEP = 0.02  # seconds between looks for orphans
SWEEP_FOR = 0.5  # seconds after a drone's death
MAX_ORDER = 1 << 17  # bytes; a mapping of environment variables may be large

_NOT_FOR_IT = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
"""What a whole session or `pkill` gets: the zygote ends when its owner does, and sees to the others
then."""
_RESET = ("SIGINT", "SIGTERM", "SIGHUP", "SIGCHLD", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGQUIT")


@dataclass(frozen=True, slots=True)
class Order:
    """What the zygote needs to know to start one drone."""

    number: int
    slot: int
    identity: (
        str  # hex; who knows it may speak to the hub, so it is in no file and on no command line
    )
    name: str
    env: dict[str, str]
    cwd: str | None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class DroneSpec:
    """What all drones of one zygote share. `hatch` is the drone's main function."""

    drone_main: Callable[
        [Order, DroneSpec, socket.socket, StatusTable, Arena, MainSnapshot, socket.socket], None
    ]
    home: str  # the owner's private directory, with its socket
    slots: int
    family: str  # see runtime/parent_death.py
    inherited_args: tuple[Any, ...] | bytes | None = (
        None  # what a process can only be started with; see drone/child.py
    )
    main: MainMaker | None = None  # of a bare zygote

    def imports_main(self) -> bool:
        """Whether each drone does. It reports its own start then, when it has done so."""
        return self.main is not None and self.main.snapshot is None


def run_zygote(
    control: socket.socket,
    spec: DroneSpec,
    status_table: StatusTable,
    arena: Arena,
    snapshot: MainSnapshot,
    owner: int,
) -> NoReturn:
    """The zygote's life. Never returns: the frames below belong to the main image."""
    status = 1
    try:
        zygote = _Zygote(control, spec, status_table, arena, snapshot, owner)
        zygote.serve()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            zygote.end_everything()
        os._exit(status)


def leave_the_main_image() -> None:
    """What a fork must forget: signal handlers, exit handlers, the standard input."""
    signal.set_wakeup_fd(-1)
    for name in _RESET:
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    atexit._clear()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it stays


class _Zygote:
    def __init__(
        self,
        control: socket.socket,
        spec: DroneSpec,
        status_table: StatusTable,
        arena: Arena,
        snapshot: MainSnapshot,
        owner: int,
    ) -> None:
        self._control = control
        self._spec = spec
        self._status_table = status_table
        self._arena = arena
        self._snapshot = snapshot
        self._drones: dict[int, int] = {}  # pid -> number
        with suppress(OSError):
            os.setsid()
        parent_death.become_subreaper()
        leave_the_main_image()
        if spec.main is None:  # a fork of the main image: a bare one has only what it was given
            leave_connections(owner, spec.inherited_args or ())
        for name in _NOT_FOR_IT:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        parent_death.join_family(spec.family)
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # Armed before the look at getppid(): an owner that ended earlier has left another parent
        # behind.
        self._owner = parent_death.open_pidfd(owner)
        self._owner_gone = os.getppid() != owner
        self._said_goodbye = False
        self._sweep_until = 0.0
        self._reports: deque[bytes] = deque()
        # The collector would touch, and so copy, every page that the drones share; and run
        # finalizers of users.
        self._collects = gc.isenabled()
        gc.disable()
        gc.freeze()

    def serve(self) -> None:
        """Until the owner closes the lifeline or ends."""
        poll = select.poll()
        for fd in (self._control.fileno(), self._woken, self._owner):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        self._report(ready=os.getpid())
        while not self._owner_gone:
            sweeping = time.monotonic() < self._sweep_until
            if sweeping:
                self._kill_orphans()
            poll.modify(self._control, select.POLLIN | (select.POLLOUT if self._reports else 0))
            for fd, news in poll.poll(SWEEP * 1000 if sweeping else None):
                if fd == self._control.fileno():
                    if news & select.POLLOUT:
                        self._send_reports()
                    if news & ~select.POLLOUT:
                        self._obey()
                elif fd == self._owner:
                    self._owner_gone = True
                else:
                    with suppress(BlockingIOError):
                        os.read(self._woken, 4096)
                    self._reap()

    # -- orders ------------------------------------------------------------------------------------

    def _obey(self) -> None:
        try:
            message, fds = parent_death.receive_fds(self._control, MAX_ORDER, 3)
        except OSError:
            message, fds = b"", []
        if not message:
            self._owner_gone = True
            return
        order = json.loads(message)
        try:
            if "goodbye" in order:
                self._said_goodbye = self._owner_gone = True
            elif "kill" in order:
                self._kill(order["kill"])
            else:
                self._start(Order(**order), fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _start(self, order: Order, handed: list[int]) -> None:
        self._status_table.clear(order.slot)
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._report(failed=order.number, errno=error.errno)
            return
        if pid == 0:
            self._drone_main(order, handed, zygote)
        self._drones[pid] = order.number
        if not self._spec.imports_main():
            self._report(started=order.number, pid=pid)

    def _kill(self, number: int) -> None:
        for pid, its in self._drones.items():
            if its == number:
                os.kill(pid, signal.SIGKILL)  # our child, unreaped: the number is surely its own

    def _drone_main(self, order: Order, handed: list[int], zygote: int) -> NoReturn:
        """In the forked child: becomes a headless image, then runs it to its end."""
        status = 1
        try:
            parent_death.die_with_parent(zygote)
            os.setsid()
            parent_death.become_subreaper()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for name in _NOT_FOR_IT:
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            stdout, stderr, fast_transport = handed
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            if self._spec.imports_main():
                parent_death.own(
                    self._control
                )  # until its start is reported: then the zygote sees to its end
            else:
                self._control.close()
            for fd in (self._woken, self._wake, self._owner, stdout, stderr):
                if fd is not None:
                    os.close(fd)
            os.environ.update(order.env)
            if order.cwd is not None:
                os.chdir(order.cwd)
            if self._collects:
                gc.enable()
            self._arena.enter()
            its_lane = socket.socket(fileno=fast_transport)
            self._spec.drone_main(
                order,
                self._spec,
                its_lane,
                self._status_table,
                self._arena,
                self._snapshot,
                self._control,
            )
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)

    # -- endings -----------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reaps who has ended, and kills whatever a dead drone left."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            pid = ended.si_pid
            number = self._drones.get(pid)
            if number is not None:
                parent_death.end_process_group(
                    pid
                )  # before it is reaped: until then its number is not reused
            _, status = os.waitpid(pid, 0)
            if number is not None:
                del self._drones[pid]
                leave_word(channels_of(self._spec.home, pid), os.waitstatus_to_exitcode(status))
                # The kernel's list of children may miss one while others come and go: so look again
                # for a while.
                self._sweep_until = time.monotonic() + SWEEP_FOR
                self._kill_orphans()
                shutil.rmtree(os.path.join(self._spec.home, str(pid)), ignore_errors=True)
                self._report(exited=number, status=status)

    def _kill_orphans(self) -> None:
        for pid in parent_death.children() - self._drones.keys():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end_everything(self) -> None:
        """Kills and reaps all drones and all that they started; removes the owner's directory if it
        is gone."""
        for pid in self._drones:
            parent_death.end_process_group(pid)
        self._drones.clear()
        with suppress(
            ChildProcessError
        ):  # raised when there is no child left, which is the only sure sign
            while True:
                self._kill_orphans()
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(SWEEP)
        if not self._said_goodbye:
            self._wait_for_the_owners_end()
            shutil.rmtree(self._spec.home, ignore_errors=True)

    def _wait_for_the_owners_end(self) -> None:
        """The kernel closes an ending process's descriptors first, so it may still be making
        files."""
        if self._owner is not None:
            select.select([self._owner], [], [], OWNER_ENDS_WITHIN)

    def _report(self, **what: Any) -> None:
        self._reports.append(json.dumps(what).encode())
        self._send_reports()

    def _send_reports(self) -> None:
        """What the socket takes now. The zygote never blocks in a send, so it always reads on, and
        so the hub, which may block when it gives many orders, always gets through."""
        try:
            while self._reports:
                self._control.send(self._reports[0], socket.MSG_DONTWAIT)
                self._reports.popleft()
        except BlockingIOError:
            pass
        except OSError:  # the owner is gone: the lifeline tells that in a moment
            self._reports.clear()
