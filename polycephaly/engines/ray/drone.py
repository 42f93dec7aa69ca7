"""A drone in a Ray actor: calls by the driver bring tasks, and the answers bring the results.

    driver ── call: WORK ──> todo ── main thread: run ──> outcomes ── answer of the call ──> driver
    switch ── orders: RECALL, CANCEL ──> control thread ── reports of a long task ──> switch

A *report* has records (wire/messages.py), the output since the last report, and the drone's state.
Reports are numbered, because they travel by two ways: by the answer of a call or, during a long
task, through the switch. The driver reads them in order, and acknowledges them with each call.

A large result goes beside the answer as an object that the driver owns, so it outlives the drone.
A result so large that it is not copied ends the call: tasks that have not begun are given back.

Ray runs the calls of an actor in the main thread of its process. So an interrupt is a signal, as
on one machine. See docs/decisions/0011-ray-engine.md.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import types
from collections.abc import Sequence
from contextlib import suppress
from pickle import dumps, loads
from typing import Any, NamedTuple

import ray

from ... import _compat
from ...drone.child import set_environment
from ...drone.executor import DroneExecutor
from ...runtime.clock import monotonic
from ...runtime.fork_guard import flush_standard_streams
from ...runtime.hidden import Hidden
from ...runtime.procfs import boot_id, memory_of
from ...wire.main_snapshot import Snapshot, restore_snapshot
from ...wire.messages import pack_returned
from .buffers import OutOfBandBuffers, PendingResultStore, RayRefTable
from .exit_record import ERR, OUT, ExitRecord, OutputFile, open_folder

LISTEN_DELAY_SECONDS = 0.005  # that a task runs before the control thread begins to listen
REPORT_INTERVAL_SECONDS = 0.5  # between reports of a long task
IDLE_CHECK_INTERVAL_SECONDS = 1.0  # between checks for output while no task runs
MAX_REPORTED_OUTPUT_BYTES = 4 << 20  # in a report of a task that is still running
REPORTS_PER_MEMORY_CHECK = 4  # reports, of which one measures the memory
MAX_PENDING_INTERRUPTS = 1000  # cancelled calls that may still be on their way here


class SpawnRequest(NamedTuple):
    """The start parameters of one drone."""

    number: int
    name: str
    env: Hidden[dict[str, str]]
    cwd: str | None
    path: list[str]  # the driver's `sys.path`
    switch: Any
    watches_memory: bool


class SpawnReply(NamedTuple):
    """The reply of a drone that has started."""

    pid: int
    node: str
    folder: str
    boot_id: str  # identifies its machine: two processes on one machine have one clock


class Report(NamedTuple):
    """One report of a drone.

    Reports travel as bytes, like the messages to a drone, because Ray takes a fifth of a
    millisecond to unpickle any other object.
    """

    number: int
    records: list[bytes]
    out: bytes
    err: bytes
    started: int
    memory: int  # bytes; 0: not measured
    has_buffers: bool  # True if buffers go beside the report

    def pack(self) -> bytes:
        return dumps(tuple(self), 5)

    @classmethod
    def unpack(cls, packed: bytes) -> Report:
        return cls(*loads(packed))


ReportWithBuffers = tuple[bytes, OutOfBandBuffers | None]
"""A packed report, and the buffers that go beside it."""


class DroneActor:
    """The class of the Ray actor in which a drone runs."""

    def __init__(self, spawn_request: SpawnRequest, snapshot: Snapshot) -> None:
        self._folder = open_folder()
        set_environment(spawn_request.env.value)
        sys.path += [each for each in spawn_request.path if each not in sys.path]
        if spawn_request.cwd is not None:
            os.chdir(spawn_request.cwd)
        for descriptor, name in ((1, OUT), (2, ERR)):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            file = os.open(os.path.join(self._folder, name), flags, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
        # Otherwise a thread that calls Ray while Ray ends this process would start another Ray.
        with suppress(AttributeError):
            _compat.disable_ray_auto_connect()
        _compat.clear_exit_handlers()  # Ray's own would disconnect this process from Ray in `end`
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray has blocked SIGINT
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's handler would raise in the task
        main = types.ModuleType("__main__")
        self._main = sys.modules["__main__"], main  # Ray's own is still in use
        sys.modules["__main__"] = main
        main_snapshot = restore_snapshot(snapshot)
        self._drone = RayDrone(spawn_request, self._folder, main_snapshot)

    def begin(self) -> SpawnReply:
        node = ray.get_runtime_context().get_node_id()
        return SpawnReply(os.getpid(), node, self._folder, boot_id())

    def clock(self) -> float:
        return monotonic()

    def handle_message(self, packed: bytes, *attachments: OutOfBandBuffers) -> ReportWithBuffers:
        """Handle a message, and return a report.

        `packed` has the number up to which the driver has all reports, and the message.
        """
        last_read, frames = loads(packed)
        return self._drone.handle_call(last_read, frames, attachments)

    def end(self, last_read: int) -> ReportWithBuffers:
        """Run the exit handlers and return the last report. The driver then kills the actor."""
        last = self._drone.end(last_read)
        shutil.rmtree(self._folder, ignore_errors=True)
        return last


class RayDrone(DroneExecutor):
    _store: PendingResultStore
    _ref_table: RayRefTable

    def __init__(self, spawn_request: SpawnRequest, folder: str, snapshot: Any) -> None:
        self._exit_record = ExitRecord(folder)
        store, ref_table = PendingResultStore(), RayRefTable()
        self._outbox: list[bytes] = []  # records for the next report
        self._outbox_lock = threading.Lock()
        super().__init__(spawn_request.name, self._exit_record.page, snapshot, store, ref_table)
        self.spawn_request = spawn_request
        # stderr is read first: see `OutputMerger`.
        self._output_files = [OutputFile(folder, name) for name in (ERR, OUT)]
        self._reports = 0
        self.call_lock = threading.Lock()
        self._control_thread = _ControlThread(self)

    # -- the main thread ---------------------------------------------------------------------------

    def handle_call(
        self, last_read: int, frames: list[bytes], attachments: Sequence[OutOfBandBuffers]
    ) -> ReportWithBuffers:
        with self.call_lock:
            with self.socket_lock:
                self._exit_record.acknowledge(last_read)
                self._ref_table.incoming = attachments
                if frames:
                    self._handle_message(frames)
                self._ref_table.incoming = ()
            self._control_thread.wake()
            while self._todo:
                self._run_next()
                self._return_tasks_if_large_result()
            self.send_requested_values()
            self._collect_ended()
            if len(self._pending_interrupts) > MAX_PENDING_INTERRUPTS:
                self._pending_interrupts.clear()
            with self.socket_lock:
                self._outcomes.put_reports()
                return self._make_report(all_output=True)

    def _return_tasks_if_large_result(self) -> None:
        if self._store.has_large_result:
            with self.socket_lock:
                self._on_recall([])

    def _receive(self, wait: bool) -> None:
        """Receive nothing here, because messages come by the control thread."""
        self._return_tasks_if_large_result()

    def _wake_main_thread(self) -> None:
        self._control_thread.wakeup.set()  # does the work of a main thread that is in no call

    def end(self, last_read: int) -> ReportWithBuffers:
        with suppress(BaseException):
            _compat.run_exit_handlers()
        flush_standard_streams()
        self._control_thread.end()
        return self.handle_call(last_read, [], ())

    # -- either thread, holding `socket_lock` ------------------------------------------------------

    def _on_undefined(self, definition: int, unknown: list[int]) -> None:
        """Give back calls of an unknown function: the message with the function was lost, because
        a buffer beside it was. The driver will know soon.
        """
        self._send(pack_returned([(number, 0) for number in unknown]))

    def _put(self, record: bytes, is_shared: bool = False) -> None:
        with self._outbox_lock:  # so that a report has what is in the exit record at its time
            self._outbox.append(record)
            if not is_shared:  # the buffers of others die with this drone
                self._exit_record.keep(record)

    def _make_report(self, all_output: bool = False) -> ReportWithBuffers:
        """Make a report. Answers of calls have `all_output`, because output is shown before
        promises settle.
        """
        self._reports += 1
        with self._outbox_lock:
            self._exit_record.add_report(self._reports)
            records, self._outbox = self._outbox, []
        limit = -1 if all_output else MAX_REPORTED_OUTPUT_BYTES
        err, out = (each.read(limit) for each in self._output_files)
        outgoing = self._ref_table.take_outgoing()
        self._store.has_large_result = False
        memory = 0
        if self.spawn_request.watches_memory and self._reports % REPORTS_PER_MEMORY_CHECK == 0:
            memory = memory_of(os.getpid(), 0)
        report = Report(self._reports, records, out, err, self._current, memory, bool(outgoing))
        return report.pack(), OutOfBandBuffers(
            [buffer for attachment in outgoing for buffer in attachment.buffers]
        ) if outgoing else None

    # -- the control thread ------------------------------------------------------------------------

    def handle_orders(self, orders: list[list[bytes]]) -> None:
        with self.socket_lock:
            for frames in orders:
                self._handle_message(frames)

    def collect_ended_tasks(self) -> None:
        """Collect ended overlapped tasks, as soon as the main thread is in no call."""
        if self._overlap.ended:
            if self.call_lock.acquire(blocking=False):
                try:
                    self._collect_ended()
                finally:
                    self.call_lock.release()
            else:
                self._wake_main_thread()  # try again: that thread may be past doing so

    def make_report_if_due(self, heartbeat: bool) -> ReportWithBuffers | None:
        """Return a report if there is news, or as a `heartbeat`."""
        with self.socket_lock:
            self._tell_of_done()
            has_output = any(file.has_more() for file in self._output_files)
            if self._outbox or heartbeat or has_output:
                return self._make_report()
        return None


class _ControlThread:
    """Receives orders, reports on long tasks, and checks now and then for output."""

    def __init__(self, drone: RayDrone) -> None:
        self._drone = drone
        self._orders: list[list[bytes]] = []
        self.wakeup = threading.Event()
        self._parked = False
        self._ended = False
        self._sent_report: Any = None
        switch = drone.spawn_request.switch
        self._get_orders, self._put_report = switch.get_orders, switch.put_report
        self._request_orders()
        self._thread = threading.Thread(target=self._run, name="polycephaly-control", daemon=True)
        self._thread.start()

    def _request_orders(self) -> None:
        orders = self._get_orders.remote(self._drone.spawn_request.number)
        orders.future().add_done_callback(self._on_orders)

    def _on_orders(self, future: Any) -> None:
        try:
            orders = future.result()
        except Exception:  # the pool has ended, and with it the switch
            return
        if not ray.is_initialized() or not orders:  # no orders: the driver takes it for dead
            return
        self._orders += orders
        self.wakeup.set()
        self._request_orders()

    def wake(self) -> None:
        """Wake the control thread, because a task begins. Called in the main thread."""
        if self._parked:
            self._parked = False
            self.wakeup.set()

    def end(self) -> None:
        """End the thread; each report that it has begun to send is then on its way."""
        self._ended = True
        self.wakeup.set()
        self._thread.join()

    def _run(self) -> None:
        drone = self._drone
        last_seen, more = 0, False
        while not self._ended:
            self._parked = drone.current == 0
            busy = not self._parked
            self.wakeup.wait(
                (REPORT_INTERVAL_SECONDS if drone.current == last_seen else LISTEN_DELAY_SECONDS)
                if busy or more
                else IDLE_CHECK_INTERVAL_SECONDS
            )
            self._parked = False
            self.wakeup.clear()
            orders, self._orders = self._orders, []
            if orders:
                drone.handle_orders(orders)
                drone.send_requested_values()
            drone.collect_ended_tasks()
            current = drone.current
            more = False
            if current == 0:
                more = not drone.call_lock.locked() and self._send_report(heartbeat=False)
            elif busy and current == last_seen:
                self._send_report(heartbeat=True)
            last_seen = current

    def _send_report(self, heartbeat: bool) -> bool:
        """Send a report, unless the one before is still on its way; return True if more may come.

        So a driver that cannot keep up with the output delays the reports, not the tasks.
        """
        # If Ray is ending this process, any call of Ray would start another cluster.
        if not ray.is_initialized():
            return False
        if self._sent_report is not None and not ray.wait([self._sent_report], timeout=0)[0]:
            return True
        report = self._drone.make_report_if_due(heartbeat)
        if report is not None:
            self._sent_report = self._put_report.remote(self._drone.spawn_request.number, report)
        return report is not None
