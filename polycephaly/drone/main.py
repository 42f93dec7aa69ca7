"""The main function of a local drone, and its connection to the controller.

    reactor ──WORK──> sockets ─> _todo ──main thread: _run──> _outcomes ──RESULTS──> reactor
                         └──> control thread: receives while the main thread is busy

The main thread reads the sockets (the fast transport's, and ZeroMQ's) itself while it is idle or
between tasks, so a short task crosses no thread. Only if one task has run for `WINDOW` seconds does
the control thread begin to receive. A thread that uses the sockets holds `socket_turn`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import select
import socket
import sys
from contextlib import suppress
from typing import Any

import zmq

from ..engines.local.status_table import StatusTable
from ..engines.local.zygote import DroneSpec, Order
from ..runtime import forked, parent_death
from ..runtime.tuning import tuning
from ..store.arena import Arena
from ..store.blocks import Store
from ..store.references import RefTable
from ..wire import addresses, endpoint
from ..wire.fast_transport import FastTransport
from ..wire.messages import HELLO, OPEN, PROTOCOL, Malformed, pack_numbers  # fmt: skip
from ..wire.pickling import MainSnapshot, shared_with
from .child import become_child
from .console import open_console
from .control_thread import BEAT, ControlThread
from .executor import DroneExecutor, dropped
from .logs import send_logs_home
from .notebook import leave_the_kernel
from .overlap import Overlap

__all__ = ["drone_main"]


def drone_main(
    order: Order,
    spec: DroneSpec,
    fast_transport: socket.socket,
    status_table: StatusTable,
    arena: Arena,
    snapshot: MainSnapshot,
    control: socket.socket,
) -> None:
    """Run a drone until it is told to stop.

    `control` is used if the drone reports its own start.
    """
    addresses.home_of_parent, addresses.name_here = spec.home, order.name
    channel = sys.modules.get("polycephaly.green.channel")
    if channel is not None and addresses.address_of_parent is not None:
        channel.lineage.append((channel.oldest, addresses.address_of_parent))
    become_child(order.name, spec.inherited_args)
    if spec.main is not None:
        snapshot = spec.main.make(arena)
    shared_with[:] = [lambda: snapshot]
    if spec.imports_main():
        _report_start(order, snapshot, control)
    drone = LocalDrone(order, spec, fast_transport, status_table, arena, snapshot)
    try:
        drone.serve()
    finally:
        drone.close()


def _report_start(order: Order, snapshot: MainSnapshot, control: socket.socket) -> None:
    report = {"started": order.number, "pid": os.getpid(), "names": snapshot.names()}
    try:
        control.send(json.dumps(report).encode())
    except OSError:  # more names than fit in a message: all of `__main__` goes by value
        control.send(json.dumps({**report, "names": []}).encode())
    parent_death.close(control)


class LocalDrone(DroneExecutor):
    def __init__(
        self,
        order: Order,
        spec: DroneSpec,
        fast_transport: socket.socket,
        status_table: StatusTable,
        arena: Arena,
        snapshot: MainSnapshot,
    ) -> None:
        tail = open_console()
        send_logs_home()
        leave_the_kernel()
        faulthandler.enable(file=2)
        store = Store(arena, order.number)
        super().__init__(
            order.name,
            status_table.row(order.slot),
            snapshot,
            store,
            RefTable(arena, None, self._ring),
            tail,
        )
        self._home, self._identity = spec.home, bytes.fromhex(order.identity)
        self._fast_transport = parent_death.own(FastTransport(fast_transport))
        self._bulk: zmq.Socket[bytes] | None = None
        self._bulk_may_hide = self._waiting = False
        self.busy = False
        """True if the main thread has a task to run, or is about to look for one."""
        self._news = parent_death.own(select.epoll())
        self._news.register(self._fast_transport.fileno(), select.EPOLLIN)
        self._bell = parent_death.own(
            parent_death.Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        )
        self._news.register(self._bell.fd, select.EPOLLIN)
        self._hello = pack_numbers(HELLO, (PROTOCOL, os.getpid()))
        # Before the HELLO: a drone that cannot start a thread never reports that it is up.
        self._ear = ControlThread(self)
        self._send(self._hello)

    # -- the main thread ---------------------------------------------------------------------------

    def serve(self) -> None:
        todo = self._todo
        while True:
            overlap = self._overlap
            if overlap is not None:
                self._take_ended(overlap)
            self.pack_wanted()
            if not todo:
                self.busy = False
                self._flush()
                self._let_ends_go()
                if self._may_end():
                    return
                self._listen(wait=not todo)
                continue
            self.busy = True  # set before the next line: see control_thread.py
            self._ear.wake()
            self._take_next()

    def _let_ends_go(self) -> None:
        """Free channel ends that came with a call that is over.

        An error that ends a loop over a channel is in a cycle with its traceback. From CPython 3.12
        on, the traceback keeps the frames of all callers, and so the ends.
        """
        ends: Any = sys.modules.get("polycephaly.green.distributed.ends")
        if ends is not None and ends.some_arrived:
            ends.some_arrived = False
            gc.collect()

    def _may_end(self) -> bool:
        busy = (
            self._todo
            or self._shelf.wanted
            or (self._overlap is not None and self._overlap.running)
        )
        return self._stopping and not busy

    def stay_behind(self) -> None:
        super().stay_behind()
        self._waiting = False  # no thread waits in this child

    def _overlaps(self, overlap: Overlap) -> None:
        self._news.register(overlap.bell, select.EPOLLIN)

    def _ring(self) -> None:
        """In any thread: an object reference was returned, so wake the main thread if it waits.

        Otherwise the main thread checks before it waits.
        """
        if self._waiting:
            os.eventfd_write(self._bell.fd, 1)

    def _listen(self, wait: bool) -> None:
        """Handle the messages that have arrived; if `wait`, first wait for one.

        Messages that the control thread handled before `_waiting` was set are seen here, under the
        same lock. Afterwards the control thread handles none, so `_todo` cannot grow while the main
        thread waits.
        """
        if wait:
            with self.socket_turn:
                if self._todo or self._shelf.wanted or self._may_end():
                    return
                if self._bulk_may_hide:
                    self.hear_all()
                    return
                self._missed.clear()  # no call is between queue and start now
                self._waiting = True
            if not self._ref_table.returned:  # checked after `_waiting` was set: see `_ring`
                self._sleep()
        with self.socket_turn:
            self._waiting = False
            self.hear_all()

    def _sleep(self) -> None:
        """Wait for news. If none comes for a while, give back warm memory.

        Overlapped tasks run on meanwhile, and the heartbeat shows that the drone is alive.
        """
        news: list[tuple[int, int]] = []
        overlap = self._overlap
        while not news and (
            (beside := overlap is not None and bool(overlap.running)) or self._store.is_untidy()
        ):
            news = self._news.poll(BEAT if beside else tuning.warm_seconds)
            self.beat()
            if not news:
                self._store.tidy()
        for fd, _ in news or self._news.poll():
            if fd == self._bell.fd:
                os.eventfd_read(fd)

    def close(self) -> None:
        """Run the exit handlers registered here, and deliver the messages in the socket."""
        generation = forked.generation
        with suppress(BaseException):
            atexit._run_exitfuncs()
        forked.leave_if_forked(generation)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        with self.socket_turn:
            self._waiting = True  # from now on the control thread leaves the sockets alone
            if self._bulk is not None:
                self._bulk.close()
                self._context.term()

    # -- either thread, holding `socket_turn` ------------------------------------------------------

    def hear_all(self) -> None:
        """Handle all messages that have arrived.

        The fast transport comes first, and again before each bulk message: see
        wire/fast_transport.py.
        """
        self._hear_lane()
        bulk = self._bulk
        self._bulk_may_hide = False
        while bulk is not None and endpoint.has_news(bulk):
            frames = bulk.recv_multipart(zmq.NOBLOCK)
            self._hear_lane()
            self._hear(frames)

    def _hear_lane(self) -> None:
        while True:
            try:
                frames = self._fast_transport.receive()
            except Malformed as wrong:
                dropped(wrong)
                continue
            if frames is None:
                return
            if not frames:  # the reactor has closed the connection
                os._exit(0)
            self._hear(frames)

    def _send(self, frames: list[bytes]) -> bool:
        """Send a message; return True if it went by the fast transport."""
        if self._fast_transport.send(frames):
            return True
        self._send_by_bulk(frames)
        return False

    def _send_by_bulk(self, frames: list[bytes]) -> None:
        self.open_bulk().send_multipart(frames)
        # The descriptor reports new messages only, and this call may have consumed the report. So
        # the socket must be checked before the next wait.
        self._bulk_may_hide = True

    def open_bulk(self) -> zmq.Socket[bytes]:
        if self._bulk is None:
            self._context, self._bulk = endpoint.connect(self._home, self._identity)
            self._bulk.send_multipart(self._hello)
            self._bulk_may_hide = True
            self._news.register(endpoint.news_fd(self._bulk), select.EPOLLIN)
        return self._bulk

    def _hear_open(self, frames: list[bytes]) -> None:
        self.open_bulk()

    _HEARD = {**DroneExecutor._HEARD, OPEN: _hear_open}  # noqa: RUF012 - a table, never changed

    # -- used by the control thread ----------------------------------------------------------------

    def hear_if_free(self) -> None:
        if self.socket_turn.acquire(blocking=False):
            try:
                if not self._waiting:
                    self._send_what_waits()
                    self._cut_slice()
                    self.hear_all()
            finally:
                self.socket_turn.release()

    @property
    def news_fd(self) -> int:
        return self._news.fileno()
