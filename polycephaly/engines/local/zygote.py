"""The zygote: a copy of the controller process, or a bare interpreter, that forks the drones.

    reactor ──Order, with stdout, stderr, socket, memory──> zygote ──fork──> drone
    reactor ──kill (a number, a signal), goodbye──> zygote ──signal──> drone
    reactor <──ready, started, failed, exited── zygote <──SIGCHLD── drone
    reactor <──started, if the drone imports the main module── drone

One SEQPACKET socket pair carries orders and reports, as JSON with descriptors beside, and is the
parent-death pipe too. The zygote is single-threaded and runs no user code, except functions that
user code has given to `os.register_at_fork`. So a fork is safe at any time. Whatever the controller
process does later, all drones come from the same snapshot.

As the parent of its drones, the zygote reaps them, reports how they ended, and kills the processes
that they left. If the zygote ends, its drones end; if the owner ends, the zygote ends.

While a drone lives, orphans of its descendants become its children, because it is a subreaper. So
each child of the zygote that is not a drone is an orphan of a dead drone, and is killed when found.
See docs/decisions/0001-fork-drones-by-a-zygote.md.
"""

from __future__ import annotations

import gc
import json
import os
import resource
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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ... import _compat
from ...drone.child import set_environment
from ...drone.sigterm import sigterm
from ...memory.arena import Arena
from ...runtime import parent_death
from ...runtime.clock import monotonic
from ...runtime.connections import replace_connections
from ...runtime.hidden import Hidden
from ...wire.addresses import channel_address, record_exit
from ...wire.main_names import MainSnapshot
from ...wire.status_page import StatusPage, map_memory
from .native_libraries import NO_LIMIT, LoadedLibraries, ThreadLimit
from .start_stack import ASK_FOR_STACK

if TYPE_CHECKING:
    from .main_maker import MainMaker

# To wait for the owner's end after its end of the parent-death pipe has closed, or seems to have.
OWNER_END_TIMEOUT_SECONDS = 2.0
SWEEP_INTERVAL_SECONDS = 0.02  # between searches for orphans
SWEEP_DURATION_SECONDS = 0.5  # of these searches after a drone's death
MAX_TRIES = 3  # to ask for children that have ended, where the system says that there is no child
RETRY_SECONDS = 0.01  # until a report is sent again that the kernel refused
MAX_ORDER_BYTES = 1 << 17  # a mapping of environment variables may be large

GROUP_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""Signals that a whole session or `pkill` gets. The zygote ignores them, because it ends when its
owner ends, and then ends the drones."""
# Signals that are reset even if the owner ignores them.
_RESET_SIGNALS = GROUP_SIGNALS | {
    signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM
}  # fmt: skip
_PYTHON_IGNORES = {signal.SIGPIPE, signal.SIGXFSZ}


class Order(NamedTuple):
    """An order to the zygote to start one drone."""

    number: int  # of the drone in its pool, and of the drone's region in the arena
    name: str
    env: Hidden[dict[str, str]]
    cwd: str | None
    limit: ThreadLimit = NO_LIMIT  # of its native libraries

    def pack(self) -> bytes:
        number, name, env, cwd, limit = self
        return json.dumps({"start": (number, name, env.value, cwd, limit)}).encode()

    @classmethod
    def unpack(cls, message: dict[str, Any]) -> Order:
        number, name, env, cwd, limit = message["start"]
        return cls(number, name, Hidden(env), cwd, ThreadLimit(*limit))


Variables = Hidden[dict[str, str]]
"""Environment variables, which may be secret."""


class Ways(NamedTuple):
    """The ways between a drone and its controller, and the page that the drone displays."""

    work: socket.socket  # messages to the main thread, and a bell for the controller
    control: socket.socket  # messages to the control thread
    status_page: StatusPage
    ring: memoryview


class DroneSpec(NamedTuple):
    """The start parameters that all drones of one zygote share."""

    drone_main: Callable[[Order, Zygote, Ways], None]
    directory: str  # the owner's private directory, with its sockets
    family: str  # see runtime/parent_death.py
    pool: str  # its name, or a single drone's
    # Objects that a process can get only at its start; see drone/child.py. Pickled for a bare
    # zygote.
    inherited_args: Hidden[tuple[Any, ...] | bytes | None]
    main: MainMaker | None = None  # of a bare zygote
    limits_libraries: bool = False  # see native_libraries.py
    post_mortem: bool = False
    debugger_patience: float | None = None  # seconds; see drone/debugger.py

    def imports_main(self) -> bool:
        """Return True if each drone imports the main module, and then reports its own start."""
        return self.main is not None and self.main.snapshot is None


def _set_process_name(name: str) -> None:
    """Have `ps -e` and top show this process as `name`, of which the kernel keeps 15 bytes."""
    with suppress(OSError), open("/proc/self/comm", "wb") as comm:
        comm.write(name.encode("utf-8", "replace"))


def reset_inherited_state() -> None:
    """Reset inherited state: the handlers and the mask of signals, exit handlers, and the profiler.

    Signals to a whole group are ignored from now on. The standard input becomes empty.
    """
    _compat.end_profiler()
    signal.set_wakeup_fd(-1)
    ignored = GROUP_SIGNALS | _PYTHON_IGNORES
    for number in signal.valid_signals():
        if number in _RESET_SIGNALS or callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    # Blocked too: in a drone, one that arrives before the handler is installed must wait for it.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    _compat.clear_exit_handlers()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - stays open


class Zygote:
    _unheard_since: float | None = None  # no report reaches the owner since then

    def __init__(
        self,
        control: socket.socket,
        spec: DroneSpec,
        arena: Arena,
        snapshot: MainSnapshot,
        owner: int,
        libraries: LoadedLibraries,
    ) -> None:
        self.control = control
        self.spec = spec
        self.arena = arena
        self.snapshot = snapshot
        self._owner = owner
        self._libraries = libraries
        self._name = f"zygote {spec.pool}"
        self._drones: dict[int, int] = {}  # pid -> number

    def run(self) -> NoReturn:
        """Serve, and end the process: in a fork, the frames below are the controller's."""
        status = 1
        try:
            self._prepare()
            self.serve()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(BaseException):
                self.end_everything()
            os._exit(status)

    def _prepare(self) -> None:
        with suppress(OSError):
            os.setsid()
        parent_death.become_subreaper()
        _set_process_name(self._name)
        parent_death.outlive_forking_thread()
        reset_inherited_state()
        # Only a fork has the controller's connections; a bare zygote has none of these.
        if self.spec.main is None:
            replace_connections(self._owner, self.spec.inherited_args.value or ())
        parent_death.join_family(self.spec.family)
        self._wakeup_reader, self._wakeup_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        # Opened before getppid() is checked: if the owner ended earlier, this process has another
        # parent.
        self._owner_pidfd = parent_death.open_pidfd(self._owner)
        self._owner_gone = os.getppid() != self._owner
        self._said_goodbye = False
        self._sweep_until = 0.0
        self._reports: deque[bytes] = deque()
        # The collector would write to, and so copy, each page that the drones share, and run
        # finalizers of the user.
        self._collector_enabled = gc.isenabled()
        gc.disable()
        gc.freeze()

    def serve(self) -> None:
        """Serve until the owner says goodbye, closes the parent-death pipe, or ends, or for some
        time after no report reaches it any more.
        """
        poll = select.poll()
        for fd in (self.control.fileno(), self._wakeup_reader, self._owner_pidfd):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        self._report(ready=os.getpid())
        while not self._owner_gone:
            sweeping = monotonic() < self._sweep_until
            if sweeping:
                self._kill_orphans()
            poll.modify(self.control, select.POLLIN | (select.POLLOUT if self._reports else 0))
            patience = SWEEP_INTERVAL_SECONDS if sweeping else None
            if self._unheard_since is not None:
                patience = OWNER_END_TIMEOUT_SECONDS
                if monotonic() - self._unheard_since > OWNER_END_TIMEOUT_SECONDS:
                    return  # it lives, and is told by this end that its drones are lost
            for fd, events in poll.poll(None if patience is None else patience * 1000):
                if fd == self.control.fileno():
                    if events & select.POLLOUT:
                        self._send_reports()
                    if events & ~select.POLLOUT:
                        self._handle_order()
                elif fd == self._owner_pidfd:
                    self._owner_gone = True
                else:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup_reader, 4096)
                    self._reap()

    # -- orders ------------------------------------------------------------------------------------

    def _handle_order(self) -> None:
        try:
            order, fds = self._receive_order()
        except ConnectionResetError:
            return  # the owner has not read all reports; its last orders, a goodbye say, come next
        except OSError:
            order, fds = None, []
        try:
            if order is None:
                self._owner_gone = True
            elif isinstance(order, Order):
                self._start(order, fds)
            elif "goodbye" in order:
                self._said_goodbye = self._owner_gone = True
            else:
                self._kill(order["kill"], order["signal"])
        finally:
            for fd in fds:
                os.close(fd)

    def _receive_order(self) -> tuple[Order | dict[str, Any] | None, list[int]]:
        """Return an order, None at end-of-file, and the descriptors that came with it.

        What an `Order` hides is in no frame of a drone: this one has ended when a drone is forked.
        """
        message, fds = parent_death.receive_fds(self.control, MAX_ORDER_BYTES, 5)
        if not message:
            return None, fds
        order = json.loads(message)
        return Order.unpack(order) if "start" in order else order, fds

    def _start(self, order: Order, stream_fds: list[int]) -> None:
        zygote = os.getpid()
        # Inherited by the drone, which would copy 80 kB of pages, in 0.3 ms, to set them itself.
        _set_process_name(order.name)
        self._libraries.limit(order.limit)
        try:
            pid = os.fork()
        except OSError as error:
            _set_process_name(self._name)
            self._report(failed=order.number, errno=error.errno)
            return
        if pid == 0:
            self._drone_main(order, stream_fds, zygote)
        self._drones[pid] = order.number
        if not self.spec.imports_main():
            self._report(started=order.number, pid=pid)
        _set_process_name(self._name)

    def _kill(self, number: int, with_signal: int) -> None:
        """Send the signal to drone `number`, unless the drone has been reaped."""
        for pid, drone_number in self._drones.items():
            if drone_number == number:  # safe: the pid of an unreaped child is not reused
                if with_signal == signal.SIGABRT:
                    # No core file: writing a large image takes long. Of 1 byte, because a limit of
                    # 0 does not hold for a program that takes core files from the kernel.
                    with suppress(OSError):
                        resource.prlimit(pid, resource.RLIMIT_CORE, (1, 1))
                with suppress(PermissionError):  # the drone has become another user's, as of `sudo`
                    os.kill(pid, with_signal)

    def _drone_main(self, order: Order, stream_fds: list[int], zygote: int) -> NoReturn:
        """Run a drone to its end, in the forked child."""
        status = 1
        try:
            parent_death.die_with_parent(zygote)
            os.setsid()
            parent_death.become_subreaper()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT, ASK_FOR_STACK):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sigterm.install()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            stdout, stderr, work, control, memory = stream_fds
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            status_page, ring = map_memory(memory)
            if self.spec.imports_main():
                # Open until the drone has reported its start. The zygote reports the drone's end.
                parent_death.close_in_child(self.control)
            else:
                self.control.close()
            pipe = self._wakeup_reader, self._wakeup_writer
            for fd in (*pipe, self._owner_pidfd, stdout, stderr, memory):
                if fd is not None:
                    os.close(fd)
            set_environment(order.env.value)
            if order.cwd is not None:
                os.chdir(order.cwd)
            if self._collector_enabled:
                gc.enable()
            self.arena.adopt()
            sockets = socket.socket(fileno=work), socket.socket(fileno=control)
            ways = Ways(*sockets, status_page, ring)
            self.spec.drone_main(order, self, ways)
            status = 0
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)

    # -- endings -----------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reap the children that have ended, and kill the processes that a dead drone left."""
        tries = 0
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                if not self._drones:
                    return
                tries += 1
                if tries == MAX_TRIES:  # the owner is told by the end of this process
                    raise
                continue
            if ended is None:
                return
            pid = ended.si_pid
            number = self._drones.get(pid)
            # Before the drone is reaped: until then its pid is not reused, and a process that has
            # lost the connection to the drone sees that it ends, and waits for the record.
            if number is not None:
                parent_death.end_process_group(pid)
                code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
                record_exit(channel_address(self.spec.directory, pid), code)
            _, status = os.waitpid(pid, 0)
            if number is not None:
                del self._drones[pid]
                # The kernel's list of children may miss one while others come and go: so `serve`
                # looks again for a while.
                self._sweep_until = monotonic() + SWEEP_DURATION_SECONDS
                self._kill_orphans()
                shutil.rmtree(os.path.join(self.spec.directory, str(pid)), ignore_errors=True)
                self._report(exited=number, status=status)

    def _kill_orphans(self) -> set[int]:
        """Kill the processes that dead drones left. Return those that this user may not kill."""
        spared = set()
        for pid in parent_death.children() - self._drones.keys():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except PermissionError:  # as of `sudo`
                spared.add(pid)
        return spared

    def end_everything(self) -> None:
        """Kill and reap all drones and the processes that they started.

        Removes the owner's directory, unless the owner has said goodbye and so lives on.
        """
        for pid in self._drones:
            parent_death.end_process_group(pid)
        self._drones.clear()
        # `waitpid` raises if there is no child left, which is the only sure sign of that.
        with suppress(ChildProcessError):
            while True:
                spared = self._kill_orphans()
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    if spared and spared >= parent_death.children():
                        break
                    time.sleep(SWEEP_INTERVAL_SECONDS)
        if self._owner_gone and not self._said_goodbye:
            # The owner may still make files: the kernel closes the descriptors of an ending process
            # first, so the end of the parent-death pipe is not yet the end of the owner.
            if self._owner_pidfd is not None:
                parent_death.wait_for_end(self._owner_pidfd, OWNER_END_TIMEOUT_SECONDS)
            shutil.rmtree(self.spec.directory, ignore_errors=True)

    def _report(self, **report: Any) -> None:
        self._reports.append(json.dumps(report).encode())
        self._send_reports()

    def _send_reports(self) -> None:
        """Send the reports that the socket takes now.

        The zygote never blocks in a send, so it always reads on. So the reactor, which may block
        while sending many orders, gets through.
        """
        try:
            while self._reports:
                self.control.send(self._reports[0], socket.MSG_DONTWAIT)
                self._reports.popleft()
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            # The owner is gone, which `serve` learns from the death pipe, or else the system has
            # refused this for another reason.
            self._reports.clear()
            self._unheard_since = self._unheard_since or monotonic()
        except OSError:  # the kernel has no memory for it now: `serve` tries again, at once
            time.sleep(RETRY_SECONDS)
