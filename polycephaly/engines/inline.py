"""Drones that run in the calling process: for debuggers, coverage and tests.

    send ── any thread ──> turns ── the engine's thread: unpickle, run, pickle ──> post

A task is pickled and unpickled as for any drone, and runs in this process: a breakpoint, a coverage
tool or a mocked function works as in code that is called directly. One thread runs the tasks of all
drones of a pool. Only one drone at a time is sent any, so tasks run in the order of the queue, and
a time limit counts from the moment when its task can begin.

A running task is not interrupted. If it is cancelled or out of time and does not end by itself, its
drone counts as dead, its thread is left to run on, and another thread runs the other tasks. (The
one means that CPython has is an asynchronous exception. While one waits for a thread that is
blocked, CPython 3.11 does not get beyond the next call of a thread that is traced: a debugger or a
coverage tool would hang.)
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import thread_time
from typing import Any

from ..drone.console import OutputTail
from ..drone.executor import DroneExecutor
from ..memory.references import RefTable
from ..pool.dispatcher import Dispatcher
from ..pool.drone_handle import DroneHandle, Times
from ..pool.engine import Engine
from ..pool.handlers import handle_records
from ..pool.machine import Machine
from ..runtime.random_numbers import give_back
from ..store.shared import Shared
from ..timeline.event_log import EventLog
from ..wire import placeholders
from ..wire.functions import FunctionRegistry, RemoteFunction
from ..wire.main_names import MainSnapshot
from ..wire.messages import (
    CANCEL,
    FRAMES,
    INTERRUPT,
    RECALL,
    STOP,
    message_type,
    unpack_numbers,
    unpack_records,
)
from ..wire.pickling import capture
from ..wire.status_page import HEADER_BYTES, StatusPage

_nothing: Any = None  # no store, no memory to lend: nothing leaves this process
_every_number: Any = range(1 << 64)


class ThisProcess(Machine):
    """The calling process as a place for drones; see `pool.machine.Machine`."""

    def default_size(self) -> int:
        return 1

    def open(self, dispatcher: Dispatcher) -> InlineEngine:
        return InlineEngine(dispatcher)


class _Turns(SimpleQueue["tuple[InlineDrone, list[bytes]] | None"]):
    """Messages for one thread, with their drones; None: its end."""


class InlineEngine(Engine):
    """The engine of one pool. `pool.engine.Engine` says which thread calls which method."""

    name, runs_here = "inline", True

    def __init__(self, dispatcher: Dispatcher) -> None:
        config = dispatcher.config
        has_env = any(each.value for each in config.env)
        if config.start is not None or config.cwd is not None or has_env:
            raise ValueError("engine='inline' runs tasks in this process: no start, cwd or env")
        self.dispatcher = dispatcher
        self.turns = _Turns()
        self.adopt(self.snapshot())

    def begin(self) -> None:
        """Start a thread that runs tasks, in place of the one before, if any, which ends after its
        turn.
        """
        before, self.turns = self.turns, _Turns()
        with suppress(Empty):
            while True:
                self.turns.put(before.get_nowait())
        before.put(None)
        self.thread = threading.Thread(
            target=self._run, args=(self.turns,), name="polycephaly-inline", daemon=True
        )
        self.thread.start()

    def _run(self, turns: _Turns) -> None:
        while (turn := turns.get()) is not None:
            drone, frames = turn
            try:
                drone.take_turn(frames)
            except Exception as error:
                self.dispatcher.post(self.dispatcher.fail, error)

    def start(self, number: int, name: str, index: int) -> DroneHandle | None:
        handle = InlineHandle(self, number, name)
        self.dispatcher.post(self.dispatcher.supervisor.on_started, handle, os.getpid())
        self.dispatcher.post(self.dispatcher.supervisor.on_hello, handle)
        return handle

    def why_no_forks(self) -> None:
        """Nothing has to be forked: tasks see the data of this process."""

    def snapshot(self) -> MainSnapshot:
        return MainSnapshot()

    def adopt(self, snapshot: MainSnapshot) -> None:
        self.dispatcher.registry = _Registry(self, snapshot)
        self.dispatcher.checks_width = False

    def share(self, obj: Any) -> Shared[Any]:
        return Shared(capture(obj, self.dispatcher.registry.snapshot), [])

    def end(self) -> None:
        self.turns.put(None)


class _Registry(FunctionRegistry):
    shares_objects = True

    def __init__(self, engine: InlineEngine, snapshot: MainSnapshot) -> None:
        # False: whatever the pool's width, no task runs beside another.
        super().__init__(snapshot, None, False, engine.dispatcher.directory)
        self._engine = engine

    def define(self, work: Any, warns: bool = True) -> RemoteFunction:
        if threading.current_thread() is self._engine.thread:
            raise RuntimeError("a task called its own pool, whose only thread runs that task")
        return super().define(work, warns)


class InlineHandle(DroneHandle):
    dispatcher: Dispatcher

    def __init__(self, engine: InlineEngine, number: int, name: str) -> None:
        super().__init__(engine.dispatcher, number, name)
        self.ref_table = RefTable(_nothing, None, lambda: None)
        self.status_page = StatusPage(memoryview(bytearray(HEADER_BYTES)))
        self.drone = InlineDrone(engine, self)

    def send(self, frames: list[bytes], tasks: Any = ()) -> None:
        self.drone.receive(frames)

    def _kill(self) -> None:
        self.drone.kill()

    def heartbeat(self) -> tuple[object, Times]:
        return object(), {}  # differs each time: it lives


class InlineDrone(DroneExecutor):
    """The executor of one drone."""

    _owns_process, _cpu_time = False, staticmethod(thread_time)

    def __init__(self, engine: InlineEngine, handle: InlineHandle) -> None:
        self._engine, self._handle, self.ended = engine, handle, False
        self._records: list[bytes] = []  # written, and not handed over yet
        snapshot, table = engine.dispatcher.registry.snapshot, handle.ref_table
        page = handle.status_page
        super().__init__(handle.name, page, snapshot, _nothing, table, EventLog())

    def _take_over_process(self, snapshot: MainSnapshot) -> OutputTail:
        """Leave streams, signals and forks of this process to the program."""
        return OutputTail()

    # -- any thread that holds the reactor's lock --------------------------------------------------

    def receive(self, frames: list[bytes]) -> None:
        kind = message_type(frames)
        # No other drone could run the tasks sooner, and no thread can be interrupted.
        if self.ended or kind in (RECALL, INTERRUPT):
            return
        if kind == CANCEL:
            self._pending_interrupts.update(unpack_numbers(frames))
        elif kind == FRAMES:
            self._on_frames(frames)
        elif kind == STOP:
            self._end(0)
        else:
            self._engine.turns.put((self, frames))

    def kill(self) -> None:
        """End now. Of tasks that begin at this moment, none runs: each start is noted in the status
        page before it looks at `_pending_interrupts`, which is replaced before the page is copied.
        """
        if not self.ended:
            self._pending_interrupts, self.ended = _every_number, True
            self._handle.status_page = StatusPage(memoryview(bytes(self._status_page.cells)))
            self.disable()
            if self.current:
                self._engine.begin()
            self._handle.exit_reason = "a thread cannot be killed"
            self._end(None)

    def _end(self, exitcode: int | None) -> None:
        self.ended = True
        dispatcher = self._handle.dispatcher
        dispatcher.post(dispatcher.supervisor.on_died, self._handle, exitcode)

    # -- the engine's thread -----------------------------------------------------------------------

    def take_turn(self, frames: list[bytes]) -> None:
        """Handle a message, and run the tasks that it brought."""
        self._main_thread = threading.get_ident()
        placeholders.drone_thread.store = self._drone_store
        placeholders.inline_stores.append(self._drone_store)
        self._handle_message(frames)
        while not self.ended and self._run_next():
            self._flush()
        self.send_requested_values()
        placeholders.inline_stores.remove(self._drone_store)

    def _receive(self, wait: bool) -> None:
        """Do nothing: messages have turns."""

    def _put(self, record: bytes, is_shared: bool = False) -> None:
        self._records.append(record)

    def _tell(self) -> None:
        records, self._records = self._records, []
        if records and not self.ended:
            give_back()  # before the caller goes on
            self._handle.dispatcher.post(self._on_answer, records)

    def _on_answer(self, packed: list[bytes]) -> None:
        handle_records(self._handle.dispatcher, self._handle, unpack_records(packed))
