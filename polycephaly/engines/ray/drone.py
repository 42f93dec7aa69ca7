"""A drone in a Ray actor: calls by the driver bring tasks, and the answers bring the results.

    driver ── take(WORK) ──> todo ── main thread: run ──> outcomes ──> answer of the call ──> driver
    switch ── orders: RECALL, CANCEL ──> control thread ── reports of a long task ──> switch

A *report* has messages (wire/messages.py), the output since the last report, and the drone's state.
Reports are numbered, because they travel by two ways: by the answer of a call or, during a long
task, through the switch. The driver reads them in order, and acknowledges them with each call.

A large result goes beside the answer as an object that the driver owns, so it outlives the drone.
A result so large that it is not copied ends the call: tasks that have not begun are given back.

Ray runs the calls of an actor in the main thread of its process. So an interrupt is a signal, as
on one machine. See docs/decisions/0011-ray-engine.md."""

from __future__ import annotations

import atexit
import faulthandler
import os
import select
import shutil
import signal
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from pickle import dumps, loads
from time import monotonic
from typing import Any, NamedTuple

import ray
from ray._private import auto_init_hook

from ...drone.console import open_console
from ...drone.executor import DroneExecutor
from ...drone.logs import send_logs_home
from ...drone.overlap import Overlap
from ...drone.result_buffer import ResultBuffer
from ...runtime.procfs import boot_of_this_machine, memory_of
from ...wire.main_snapshot import Snapshot, enter
from ...wire.messages import RETURNED, SHARED, pack_numbers, status_of
from .buffers import BufferHold, OutOfBandBuffers, RayRefTable
from .exit_record import ERR, OUT, ExitRecord, Printed, open_folder

__all__ = ["DroneActor", "Report", "SpawnReply", "SpawnRequest"]

WINDOW = 0.005  # seconds that a task runs before the control thread begins to listen
BEAT = 0.5  # seconds between reports of a long task
IDLE = 1.0  # seconds between checks for output while no task runs
PRINTED_MOST = 4 << 20  # bytes of output in a report of a task that is still running
MEMORY_EVERY = 4  # reports, of which one measures the memory
MISSED_MOST = 1000  # cancelled calls that may still be on their way here


class SpawnRequest(NamedTuple):
    """The start parameters of one drone."""

    number: int
    name: str
    env: dict[str, str]
    cwd: str | None
    path: list[str]  # the driver's `sys.path`
    switch: Any
    watches_memory: bool


class SpawnReply(NamedTuple):
    """The reply of a drone that has started."""

    pid: int
    node: str
    folder: str
    boot: str  # identifies its machine: two processes on one machine have one clock


class Report(NamedTuple):
    """One report of a drone.

    Reports travel as bytes, like the messages to a drone, because Ray takes a fifth of a
    millisecond to unpickle any other object.
    """

    number: int
    messages: list[list[bytes]]
    out: bytes
    err: bytes
    started: int
    memory: int  # bytes; 0: not measured
    laden: bool  # True if buffers go beside the report

    def packed(self) -> bytes:
        return dumps(tuple(self), 5)

    @classmethod
    def unpack(cls, packed: bytes) -> Report:
        return cls(*loads(packed))


Told = tuple[bytes, OutOfBandBuffers | None]
"""A packed report, and the buffers that go beside it."""


class DroneActor:
    """The class of the Ray actor in which a drone runs."""

    def __init__(self, birth: SpawnRequest, snapshot: Snapshot) -> None:
        self._folder = open_folder()
        os.environ.update(birth.env)
        sys.path += [each for each in birth.path if each not in sys.path]
        if birth.cwd is not None:
            os.chdir(birth.cwd)
        for descriptor, name in ((1, OUT), (2, ERR)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            file = os.open(os.path.join(self._folder, name), flags, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
        # Otherwise a thread that calls Ray while Ray ends this process would start another Ray.
        with suppress(AttributeError):
            auto_init_hook.enable_auto_connect = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray has blocked SIGINT
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would raise in the task
        main = types.ModuleType("__main__")
        self._main = sys.modules["__main__"], main  # Ray's own is still in use
        sys.modules["__main__"] = main
        known = enter(snapshot)
        self._drone = RayDrone(birth, self._folder, known)

    def begin(self) -> SpawnReply:
        node = ray.get_runtime_context().get_node_id()
        return SpawnReply(os.getpid(), node, self._folder, boot_of_this_machine())

    def clock(self) -> float:
        return monotonic()

    def take(self, said: bytes, *cargoes: OutOfBandBuffers) -> Told:
        """Handle a message, and return a report.

        `said` has the number up to which the driver has all reports, and the message.
        """
        has, frames = loads(said)
        return self._drone.take(has, frames, cargoes)

    def end(self, has: int) -> Told:
        """Run the exit handlers and return the last report. The driver then kills the actor."""
        last = self._drone.end(has)
        shutil.rmtree(self._folder, ignore_errors=True)
        return last


class _ResultBuffer(ResultBuffer):
    def keep(self) -> bool:
        """Keep the result noted last, unless its buffers go beside: those die with this drone."""
        if status_of(self._last[0]) & SHARED:
            self._row.pass_over()  # type: ignore[attr-defined]
            return False
        return super().keep()


class RayDrone(DroneExecutor):
    def __init__(self, birth: SpawnRequest, folder: str, snapshot: Any) -> None:
        tail = open_console()
        send_logs_home()
        faulthandler.enable(file=2)
        self._diary = ExitRecord(folder)
        self._manifest = RayRefTable()
        self._laden = False
        ref_table: Any = self._manifest
        super().__init__(birth.name, self._diary, snapshot, BufferHold(self._lade), ref_table, tail)
        self._outcomes = _ResultBuffer(
            self._diary, snapshot, self._store, self._ref_table, tail, self._shelf
        )
        self.birth = birth
        self._printed = [Printed(folder, name) for name in (OUT, ERR)]
        self._outbox: list[list[bytes]] = []
        self._reports = 0
        self.in_call = threading.Lock()
        self._ear = _ControlThread(self)

    def _lade(self) -> None:
        self._laden = True

    # -- the main thread ---------------------------------------------------------------------------

    def take(self, has: int, frames: list[bytes], cargoes: Sequence[OutOfBandBuffers]) -> Told:
        with self.in_call:
            with self.socket_turn:
                self._diary.acknowledged(has)
                self._manifest.landed = cargoes
                if frames:
                    self._hear(frames)
                self._manifest.landed = ()
            self._ear.wake()
            while self._todo:
                self._take_next()
                self._give_back_if_laden()
            self.pack_wanted()
            if self._overlap is not None:
                self._take_ended(self._overlap)
            if len(self._missed) > MISSED_MOST:
                self._missed.clear()
            with self.socket_turn:
                entries = self._diary.entries()
                self._send_what_waits()
                return self._report(entries, whole=True)

    def _give_back_if_laden(self) -> None:
        if self._laden:
            with self.socket_turn:
                self._send_what_waits()
                self._hear_recall([])

    def _listen(self, wait: bool) -> None:
        """Receive nothing here, because messages come by the control thread."""
        self._give_back_if_laden()

    def _overlaps(self, overlap: Overlap) -> None:
        self._ear.listen_to(overlap.bell)

    def end(self, has: int) -> Told:
        with suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        self._ear.end()
        return self.take(has, [], ())

    # -- either thread, holding `socket_turn` ------------------------------------------------------

    def _not_defined(self, definition: int, unknown: list[int]) -> None:
        """Give back calls of an unknown function: the message with the function was lost, because
        a buffer beside it was. The driver will know soon.
        """
        self._send(pack_numbers(RETURNED, unknown))

    def _send(self, frames: list[bytes]) -> bool:
        self._outbox.append(frames)
        return True

    def _send_by_bulk(self, frames: list[bytes]) -> None:
        self._outbox.append(frames)

    def _report(self, entries: int, whole: bool = False) -> Told:
        """Make a report, with or before which `entries` of the exit record have gone.

        Answers have the `whole` output, because output is shown before promises settle.
        """
        self._reports += 1
        self._diary.reported(self._reports, entries)
        messages, self._outbox = self._outbox, []
        out, err = self._what_was_printed(-1 if whole else PRINTED_MOST)
        loaded = self._manifest.take()
        self._laden = False
        memory = 0
        if self.birth.watches_memory and self._reports % MEMORY_EVERY == 0:
            memory = memory_of(os.getpid(), 0)
        report = Report(self._reports, messages, out, err, self._current, memory, bool(loaded))
        return report.packed(), OutOfBandBuffers(
            [buffer for cargo in loaded for buffer in cargo.buffers]
        ) if loaded else None

    def _what_was_printed(self, most: int) -> tuple[bytes, bytes]:
        """Return new output. stderr is read first: see `OutputMerger`."""
        out, err = self._printed
        errors = err.read(most)
        return out.read(most), errors

    # -- the control thread ------------------------------------------------------------------------

    def hear_orders(self, orders: list[list[bytes]]) -> None:
        with self.socket_turn:
            for frames in orders:
                self._hear(frames)

    def take_what_ended(self) -> None:
        """Collect ended overlapped tasks, unless the main thread is in a call and will do so."""
        if self._overlap is not None and self.in_call.acquire(blocking=False):
            try:
                self._take_ended(self._overlap)
            finally:
                self.in_call.release()

    def news(self, long: bool) -> Told | None:
        """Return a report if there is news or, as a heartbeat, if a task runs for `long`."""
        with self.socket_turn:
            entries = self._diary.entries()
            self._send_what_waits()
            self._cut_slice()
            if self._outbox or long or self._has_printed():
                return self._report(entries)
        return None

    def _has_printed(self) -> bool:
        return any(file.has_more() for file in self._printed)


class _ControlThread:
    """Receives orders, reports on long tasks, and checks now and then for output."""

    def __init__(self, drone: RayDrone) -> None:
        self._drone = drone
        self._orders: list[list[bytes]] = []
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._news = select.epoll()
        self._news.register(self._bell, select.EPOLLIN)
        self._parked = False
        self._ended = False
        self._told: Any = None
        switch = drone.birth.switch
        self._ask, self._say = switch.orders, switch.tell
        self._listen()
        self._thread = threading.Thread(target=self._live, name="polycephaly-ear", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        self._ask.remote(self._drone.birth.number).future().add_done_callback(self._heard)

    def _heard(self, future: Any) -> None:
        try:
            orders = future.result()
        except Exception:  # the pool has ended, and with it the switch
            return
        if not ray.is_initialized():
            return
        if not orders:  # the driver takes this drone for dead
            return
        self._orders += orders
        os.eventfd_write(self._bell, 1)
        self._listen()

    def wake(self) -> None:
        """Wake the control thread, because a task begins. Called in the main thread."""
        if self._parked:
            self._parked = False
            os.eventfd_write(self._bell, 1)

    def listen_to(self, bell: int) -> None:
        self._news.register(bell, select.EPOLLIN)

    def end(self) -> None:
        """End the thread; each report that it has begun to send is then on its way."""
        self._ended = True
        os.eventfd_write(self._bell, 1)
        self._thread.join()

    def _live(self) -> None:
        drone = self._drone
        seen, more = 0, False
        while not self._ended:
            self._parked = drone.current == 0
            busy = not self._parked
            self._news.poll((BEAT if drone.current == seen else WINDOW) if busy or more else IDLE)
            self._parked = False
            with suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            orders, self._orders = self._orders, []
            if orders:
                drone.hear_orders(orders)
                drone.pack_wanted()
            drone.take_what_ended()
            current = drone.current
            more = False
            if current == 0:
                more = not drone.in_call.locked() and self._tell(long=False)
            elif busy and current == seen:
                self._tell(long=True)
            seen = current

    def _tell(self, long: bool) -> bool:
        """Send a report, unless the one before is still on its way; return True if more may come.

        So a driver that cannot keep up with the output delays the reports, not the tasks.
        """
        # If Ray is ending this process, any call of Ray would start another cluster.
        if not ray.is_initialized():
            return False
        if self._told is not None and not ray.wait([self._told], timeout=0)[0]:
            return True
        news = self._drone.news(long)
        if news is not None:
            self._told = self._say.remote(self._drone.birth.number, news)
        return news is not None
