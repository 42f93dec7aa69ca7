"""The main function of a local drone, and its connection to the controller.

    reactor ──WORK──> work socket ──> _todo ──main thread: _run_next──> _outcomes ──> ring
            ──CANCEL, RECALL, ...──> control socket ──> control thread

The main thread reads the work socket itself, between two tasks, so a task crosses no thread. The
control thread sleeps until there is a message for it. One that is about tasks or values tells how
many messages the controller has sent through the work socket before, and is put off until these
were received, by whichever thread: so what it is about is known. Later ones may have come, too. A
thread that reads the work socket holds `socket_lock`; one that writes into the ring, `_ring_lock`.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import sys
import threading
import traceback
from collections import deque
from contextlib import suppress
from threading import get_ident
from time import sleep
from typing import TYPE_CHECKING, Any

from ... import _compat
from ...drone.child import prepare_child
from ...drone.executor import DroneExecutor, log_malformed
from ...drone.pdb_import import replace_set_trace
from ...drone.sigterm import sigterm
from ...errors import Malformed
from ...memory.blocks import Store
from ...memory.references import RefTable
from ...runtime import fork_guard, forked, parent_death
from ...runtime.clock import monotonic
from ...runtime.system_limits import watch
from ...runtime.tuning import tuning
from ...wire import addresses, placeholders
from ...wire.debugging import MAX_KEPT_FRAMES, frames_address
from ...wire.main_names import MainSnapshot, shared_snapshots
from ...wire.message_socket import MessageSocket
from ...wire.messages import HELLO, POSITION, PROTOCOL, TELL, pack_numbers
from ...wire.ring import RingWriter
from .zygote import Order, Ways, Zygote

if TYPE_CHECKING:
    from ...drone.debugger import Debugger

_NOTHING = [POSITION.pack(0)]
"""A message of the control socket that says nothing."""
MIN_ROOM_WAIT_SECONDS, ROOM_WAIT_DOUBLINGS = 0.0002, 7
"""Time between looks for room in the ring, while the controller is slower than this drone: at
first, and how often it is doubled."""


def drone_main(order: Order, zygote: Zygote, ways: Ways) -> None:
    """Run a drone until it is told to stop."""
    spec, snapshot = zygote.spec, zygote.snapshot
    addresses.parent_directory, addresses.own_name = spec.directory, order.name
    channel = sys.modules.get("polycephaly.green.channel")
    if channel is not None and addresses.parent_address is not None:
        channel.lineage.append((channel.oldest_generation, addresses.parent_address))
    prepare_child(order.name, spec.inherited_args.value)
    if spec.main is not None:
        snapshot = spec.main.make(zygote.arena)
    shared_snapshots[:] = [lambda: snapshot]
    if spec.imports_main():
        _report_start(order, snapshot, zygote.control)
    drone = LocalDrone(order, zygote, ways, snapshot)
    try:
        drone.serve()
    finally:
        drone.close()
    if sigterm.received:
        sigterm.end_process()


def _report_start(order: Order, snapshot: MainSnapshot, control: socket.socket) -> None:
    report = {"started": order.number, "pid": os.getpid(), "names": snapshot.names()}
    try:
        control.send(json.dumps(report).encode())
    except OSError:  # more names than fit in a message: all of `__main__` goes by value
        control.send(json.dumps({**report, "names": []}).encode())
    parent_death.close(control)


class LocalDrone(DroneExecutor):
    _sigterm = sigterm

    def __init__(self, order: Order, zygote: Zygote, ways: Ways, snapshot: MainSnapshot) -> None:
        if not os.environ.get("PYTHONBREAKPOINT"):
            sys.breakpointhook = self._open_debugger
        replace_set_trace(self._open_debugger)
        spec, arena = zygote.spec, zygote.arena
        store = Store(arena, order.number)
        self._ring = RingWriter(ways.ring)
        self._ring_lock = threading.Lock()
        self._is_told = True  # the controller was told of all that is in the ring
        status_page = ways.status_page
        super().__init__(
            order.name, status_page, snapshot, store, RefTable(arena, None, self._wake_main_thread)
        )
        self._post_mortem = spec.post_mortem
        self._debugger: Debugger | None = None
        self._debugger_patience = spec.debugger_patience
        self._debugger_lock = threading.Lock()  # one thread at a time waits for a terminal
        self._kept_frames: dict[int, str] = {}  # addresses, by the process that keeps the frames
        self._directory = spec.directory
        self._socket = parent_death.close_in_child(MessageSocket(ways.work))
        self._received = 0  # messages of that socket
        # Messages of the other one that come behind more of these: (how many, frames).
        self._put_off: deque[tuple[int, list[bytes]]] = deque()
        self._waiting = False
        self._memory_checked_at = monotonic()
        self._last_freed_end = placeholders.last_arrived_end
        # The overlapped calls that were running when ends of channels arrived.
        self._may_have_ends: set[int] = set()
        self.epoll = parent_death.close_in_child(select.epoll())
        watch(self.epoll, self._socket.fileno(), select.EPOLLIN)
        self._wakeup = parent_death.close_in_child(
            parent_death.Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        )
        watch(self.epoll, self._wakeup.fd, select.EPOLLIN)
        sigterm.wake = self._wake_in_any_case
        # Before the HELLO: a drone that cannot start a thread never reports that it is up.
        control = parent_death.close_in_child(MessageSocket(ways.control))
        self._control_thread = ControlThread(self, control)
        status_page.control = self._control_thread.thread.native_id or 0
        self._send(pack_numbers(HELLO, (PROTOCOL, os.getpid())))

    # -- the main thread ---------------------------------------------------------------------------

    def serve(self) -> None:
        todo, requested = self._todo, self._drone_store.requested
        while True:
            if self._overlap.ended:
                self._collect_ended()
            if requested:
                self.send_requested_values()
            if todo and not sigterm.received:
                self._run_next()
                continue
            self._flush()
            self._free_channel_ends()
            if self._can_end():
                return
            self._receive(wait=True)

    def _free_channel_ends(self) -> None:
        """Free channel ends that came with a call that is over.

        An error that ends a loop over a channel is in a cycle with its traceback. From CPython 3.12
        on, the traceback keeps the frames of all callers, and so the ends. An overlapped call that
        goes on has its ends for longer, so there is a collection after it, too.
        """
        last_arrived = placeholders.last_arrived_end
        if self._last_freed_end == last_arrived and not self._may_have_ends:
            return
        running = self._overlap.running.keys()
        if self._last_freed_end != last_arrived:
            self._last_freed_end = last_arrived
            self._may_have_ends |= running
        elif self._may_have_ends <= running:
            return
        self._may_have_ends &= running
        gc.collect()

    def _may_begin(self) -> bool:
        return bool(self._todo) and not sigterm.received

    def _can_end(self) -> bool:
        if not (self._stopping or sigterm.received):
            return False
        return not (self._may_begin() or self._drone_store.requested or self._overlap.running)

    def _open_debugger(self, *args: Any, **kwargs: Any) -> None:
        from ...drone.debugger import open_debugger

        frame = _compat.get_frame(1)
        with self._debugger_lock:
            debugger = self._debugger
            if debugger is None or not debugger.takes(get_ident()):
                debugger = open_debugger(
                    frame, self._directory, self._status_page, self._debugger_patience
                )
                self._debugger = debugger
        # The last call, because the debugger stops at the next line that is not of this package.
        debugger.set_trace(frame)

    def keep_frames(self, number: int, error: BaseException) -> None:
        if not self._post_mortem or not isinstance(error, Exception):
            return
        if _compat.count_sub_interpreters():  # CPython cannot fork: the caller gets the error only
            return
        from ...drone.debugger import keep_frames

        # Of a limit of the system: the caller gets the error without its frames.
        with suppress(OSError):
            for keeper, address in list(self._kept_frames.items()):
                if _has_ended(keeper):
                    del self._kept_frames[keeper]
                    with suppress(FileNotFoundError):  # else it was killed
                        os.unlink(address)
            if sum(map(os.path.exists, self._kept_frames.values())) < MAX_KEPT_FRAMES:
                address = frames_address(self._directory, number)
                self._kept_frames[keep_frames(error, address)] = address

    def disable(self) -> None:
        super().disable()
        self._waiting = False  # no thread waits in this child

    def _wake_main_thread(self) -> None:
        """Wake the main thread if it waits: a reference was returned, or an overlapped task has
        ended. Otherwise the main thread checks before it waits.
        """
        if self._waiting:
            self._wake_in_any_case()

    def _wake_in_any_case(self) -> None:
        """Wake the main thread even if it is only about to wait: after its last check."""
        os.eventfd_write(self._wakeup.fd, 1)

    def _receive(self, wait: bool) -> None:
        """Handle the messages that have arrived; if `wait`, first wait for one.

        What the control thread has received before `_waiting` was set is seen here, under the same
        lock. Afterwards it wakes this thread.
        """
        is_ready = False
        if wait:
            with self.socket_lock:
                if self._may_begin() or self._drone_store.requested or self._can_end():
                    return
                self._pending_interrupts.clear()  # no call is between queue and start now
                self._waiting = True
            # Checked after `_waiting` was set: see `_wake_main_thread`.
            if not (self._ref_table.returned or self._overlap.ended):
                is_ready = self._wait()
        with self.socket_lock:
            self._waiting = False
            self.receive_all(is_ready)

    def _wait(self) -> bool:
        """Wait for an event, and meanwhile give back memory that was idle for a while. Return
        whether a message has come.

        Overlapped tasks run on meanwhile.
        """
        events: list[tuple[int, int]] = []
        while not events and self._store.has_idle_memory():
            events = self.epoll.poll(tuning.warm_seconds)
            # Also if there are events, because messages may come more often than that.
            if not events or monotonic() - self._memory_checked_at > tuning.warm_seconds:
                self._memory_checked_at = monotonic()
                self._store.free_idle_memory()
        is_ready = False
        for fd, _ in events or self.epoll.poll():
            if fd == self._wakeup.fd:
                os.eventfd_read(fd)
            elif fd == self._socket.fileno():
                is_ready = True
        return is_ready

    def close(self) -> None:
        """Run the exit handlers registered here."""
        generation = forked.generation
        with suppress(BaseException):
            _compat.run_exit_handlers()
        forked.exit_if_forked(generation)
        fork_guard.flush_standard_streams()

    # -- either thread -----------------------------------------------------------------------------

    def _put(self, record: bytes, is_shared: bool = False) -> None:
        with self._ring_lock:
            if not self._ring.write(record):
                self._ring.write_any(record, self._wait_for_room)
                self._status_page.full = 0
            self._is_told = False

    def _wait_for_room(self, waits: int) -> None:
        self._status_page.full = waits + 1  # which shows that this drone lives
        self._is_told = False
        self._tell()
        if not self._socket.is_open():
            os._exit(1)  # the controller has gone, and will read nothing
        doubled = min(waits, ROOM_WAIT_DOUBLINGS)
        sleep(MIN_ROOM_WAIT_SECONDS * 2**doubled)

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True  # first: of what is written meanwhile, who writes it tells
            try:
                self._socket.ring()
            except OSError:  # the controller has gone, or code of the task has closed the socket
                os._exit(1)

    # -- either thread, holding `socket_lock` ------------------------------------------------------

    def receive_all(self, is_ready: bool = False) -> None:
        """Handle all messages that have arrived. `is_ready`: one has."""
        while is_ready or self._socket.has_input():
            is_ready = False
            try:
                frames = self._socket.receive()
            except Malformed as error:
                log_malformed(error)
                frames = []
            else:
                if frames is None:
                    return
                if not frames:  # the reactor has closed the connection
                    os._exit(0)
            self._received += 1
            if frames:
                self._handle_message(frames)
            while self._put_off and self._put_off[0][0] <= self._received:
                self._handle_message(self._put_off.popleft()[1])

    def _on_tell(self, frames: list[bytes]) -> None:
        self._tell_of_done()

    HANDLERS = {**DroneExecutor.HANDLERS, TELL: _on_tell}  # noqa: RUF012 - not changed

    # -- used by the control thread ----------------------------------------------------------------

    def obey(self, frames: list[bytes]) -> None:
        """Handle a message of the control socket, and what has come through the work socket."""
        *frames, position = frames
        if len(position) != POSITION.size:
            log_malformed(Malformed(f"a position of {len(position)} bytes"))
            return
        [sent] = POSITION.unpack(position)
        # Not released after an error, which ends the process: the main thread would go on without
        # answers that were taken and not written.
        self.socket_lock.acquire()
        self.receive_all()
        if sent > self._received or (sent and self._put_off):
            self._put_off.append((sent, frames))
        elif frames:
            self._handle_message(frames)
        is_waiting = self._waiting
        self.socket_lock.release()
        self.beat()
        if is_waiting:
            if self._may_begin() or self._drone_store.requested or self._can_end():
                self._wake_in_any_case()
        else:
            self.send_requested_values()

    def wait_for_input(self, control: MessageSocket) -> None:
        """Wait for a message of the control socket, and for one of the work socket if one of those
        is put off.
        """
        poller = select.poll()
        poller.register(control, select.POLLIN)
        if self._put_off:
            poller.register(self._socket, select.POLLIN)
        poller.poll()


class ControlThread:
    """The thread that reads the control socket, and sleeps otherwise."""

    def __init__(self, drone: LocalDrone, socket: MessageSocket) -> None:
        self._drone = drone
        self._socket = socket
        self.thread = threading.Thread(target=self._run, name="polycephaly-control", daemon=True)
        # A drone may fork drones of its own.
        fork_guard.add_thread_lock(self.thread, drone.socket_lock)
        self.thread.start()

    def _run(self) -> None:
        socket = self._socket
        try:
            while True:
                if not socket.has_input():
                    self._drone.wait_for_input(socket)
                try:
                    frames = socket.receive()
                except Malformed as error:
                    log_malformed(error)
                    continue
                if frames == []:  # the reactor has closed the connection
                    os._exit(0)
                self._drone.obey(frames or _NOTHING)
        except BaseException:
            # A message or result that was taken would be lost, and a caller would wait for ever. So
            # the drone ends: the status page shows which tasks are done, which one was running, and
            # which can run elsewhere.
            with suppress(BaseException):
                os.write(2, traceback.format_exc().encode())
            os._exit(1)


def _has_ended(child: int) -> bool:
    try:
        return bool(os.waitpid(child, os.WNOHANG)[0])
    except ChildProcessError:  # a task has reaped it
        return True
