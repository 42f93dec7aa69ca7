"""A drone in a Ray actor: calls of the driver bring it work, and their answers bring back what came
of it.

    driver ── take(WORK) ──> todo ── main thread: run ──> outcomes ──> the call's answer ──> driver
    switch ── orders: RECALL, CANCEL ──> the ear (a thread) ── what the main thread is too busy to tell ──> switch

A *report* is what a drone tells at once: messages (wire/messages.py), what was printed since the
last one, and how it is. Reports are numbered, since they go by two ways: by the answer of a call,
or, while the main thread runs something for long, through the switch. The driver reads them in
their order, and says with each call up to which it has them.

A large result goes beside the answer as an object that is the driver's: it outlives this drone. One
so large that it is not copied before that ends the call: what was not begun is given back.

Ray runs an actor's calls in its process's main thread, so an interrupt is what it is on one
machine: a signal."""

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

WINDOW = 0.005  # seconds that a task runs before the ear begins to listen
BEAT = 0.5  # seconds between reports of a long task
IDLE = 1.0  # seconds between looks at whether something was printed by nobody's work
PRINTED_MOST = 4 << 20  # bytes of output in a report of work that goes on
MEMORY_EVERY = 4  # reports
MISSED_MOST = 1000  # cancelled calls that are on their way here, perhaps


class SpawnRequest(NamedTuple):
    """What a drone is told at its start."""

    number: int
    name: str
    env: dict[str, str]
    cwd: str | None
    path: list[str]  # of the main image's modules
    switch: Any
    watches_memory: bool


class SpawnReply(NamedTuple):
    """What it says of itself then."""

    pid: int
    node: str
    folder: str
    boot: str  # of its machine: two of one have one clock


class Report(NamedTuple):
    """It travels as bytes, like what it answers: Ray takes a fifth of a millisecond to open
    anything else."""

    number: int
    messages: list[list[bytes]]
    out: bytes
    err: bytes
    started: int
    memory: int  # bytes; 0: not looked at
    laden: bool  # something goes beside it

    def packed(self) -> bytes:
        return dumps(tuple(self), 5)

    @classmethod
    def unpack(cls, packed: bytes) -> Report:
        return cls(*loads(packed))


Told = tuple[bytes, OutOfBandBuffers | None]
"""A report, and what goes beside it."""


class DroneActor:
    """Runs in an actor: a drone's, of which Ray knows."""

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
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as it lives
        with suppress(
            AttributeError
        ):  # a thread that asks for something as Ray ends this process would start another
            auto_init_hook.enable_auto_connect = False
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray has blocked it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would raise in the work
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
        """Does what the message says. The driver has all reports up to the one that it names."""
        has, frames = loads(said)
        return self._drone.take(has, frames, cargoes)

    def end(self, has: int) -> Told:
        """Runs its exit handlers; the process ends with Ray's next word."""
        last = self._drone.end(has)
        shutil.rmtree(self._folder, ignore_errors=True)
        return last


class _ResultBuffer(ResultBuffer):
    def keep(self) -> bool:
        """Not what goes beside messages: that dies with this drone."""
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
        """Orders come by the ear."""
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

    # -- either thread, holding the socket's turn --------------------------------------------------

    def _not_defined(self, definition: int, unknown: list[int]) -> None:
        """The message that brought it has not arrived, as something beside it was lost: the driver
        knows that soon."""
        self._send(pack_numbers(RETURNED, unknown))

    def _send(self, frames: list[bytes]) -> bool:
        self._outbox.append(frames)
        return True

    def _send_by_bulk(self, frames: list[bytes]) -> None:
        self._outbox.append(frames)

    def _report(self, entries: int, whole: bool = False) -> Told:
        """With answers comes the `whole` of what was printed: it is told before their promises
        settle. So many `entries` of the diary have gone with it, or before."""
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
        """stderr's first: see `OutputMerger`."""
        out, err = self._printed
        errors = err.read(most)
        return out.read(most), errors

    # -- the ear -----------------------------------------------------------------------------------

    def hear_orders(self, orders: list[list[bytes]]) -> None:
        with self.socket_turn:
            for frames in orders:
                self._hear(frames)

    def take_what_ended(self) -> None:
        """Of what is overlapped, while the main thread has nothing to do; else it sees to that
        itself."""
        if self._overlap is not None and self.in_call.acquire(blocking=False):
            try:
                self._take_ended(self._overlap)
            finally:
                self.in_call.release()

    def news(self, long: bool) -> Told | None:
        """What there is to be told; if a task runs for `long`, at least that it lives."""
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
    """Hears orders, tells of long tasks, and looks now and then whether something was printed."""

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
        except Exception:  # the pool has ended, and its switch
            return
        if not ray.is_initialized():
            return
        if not orders:  # the driver thinks that this drone has ended
            return
        self._orders += orders
        os.eventfd_write(self._bell, 1)
        self._listen()

    def wake(self) -> None:
        """In the main thread: a task begins."""
        if self._parked:
            self._parked = False
            os.eventfd_write(self._bell, 1)

    def listen_to(self, bell: int) -> None:
        self._news.register(bell, select.EPOLLIN)

    def end(self) -> None:
        """All that it has begun to tell is on its way."""
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
        """One report at a time: who cannot keep up with what is printed holds up its telling, not
        the work. Whether there may be more to tell."""
        if (
            not ray.is_initialized()
        ):  # Ray is ending this process; asked for anything, it would start another cluster
            return False
        if self._told is not None and not ray.wait([self._told], timeout=0)[0]:
            return True
        news = self._drone.news(long)
        if news is not None:
            self._told = self._say.remote(self._drone.birth.number, news)
        return news is not None
