"""Drones that are threads of the calling process: for debuggers, coverage and tests.

    send ── any thread ──> InlineDrone._todo ── the engine's thread, one task at a time ──> post

A task is pickled and unpickled as for any drone, and runs in this process: a breakpoint, a coverage
tool or a mocked function works as in code that is called directly. The thread of the engine runs
the tasks of all drones in the order in which they were sent, and coroutines one after the other.

A thread cannot be killed. A task that ignores its interrupt is left to run on, its drone counts as
dead, and another thread runs the other tasks.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from ..drone.console import OutputTail
from ..drone.executor import DroneExecutor
from ..memory.references import RefTable
from ..pool.drone_handle import DroneHandle, Times
from ..pool.engine import Engine
from ..pool.handlers import handle_message
from ..pool.supervisor import Supervisor
from ..pool.task import Task
from ..store.shared import Shared
from ..timeline.event_log import EventLog
from ..wire.functions import FunctionRegistry
from ..wire.messages import RECALL
from ..wire.pickling import MainSnapshot, capture
from ..wire.placeholders import drone_thread
from ..wire.status_table import HEADER_BYTES, Slot

__all__ = ["ThisProcess"]

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in_thread.argtypes = (ctypes.c_ulong, ctypes.py_object)
_no_store: Any = None  # nothing is lent, because nothing leaves this process
_NO_ERROR = ctypes.py_object()  # a null pointer: withdraws one that has not struck yet


class ThisProcess:
    """The calling process as a place for drones; see `pool.engine.Machine`."""

    def default_size(self) -> int:
        return 1

    def check(self, size: int) -> None:
        """Accept any size, because a drone costs nothing here."""

    def open(self, supervisor: Supervisor) -> InlineEngine:
        return InlineEngine(supervisor)


class InlineEngine(Engine):
    """The engine of one pool. `pool.engine.Engine` says which thread calls which method."""

    def __init__(self, supervisor: Supervisor) -> None:
        config = supervisor.dispatcher.config
        if config.start is not None or config.cwd is not None or any(config.env):
            raise ValueError(
                "engine='inline' runs tasks in this process: leave out start, cwd and env"
            )
        self.supervisor = supervisor
        # A finalizer may run in a thread that holds it, and send a task to a drone.
        self.lock = threading.RLock()
        self.turns: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        """What the thread is to do: a drone's next task, or what follows a message; None: end."""
        self.adopt(self.snapshot())

    def begin(self) -> None:
        """Start a thread that runs tasks, in place of the one before, if any."""
        self._thread = threading.Thread(target=self._run, name="polycephaly-inline", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me and (turn := self.turns.get()) is not None:
            try:
                turn()
            except BaseException as error:
                self.supervisor.dispatcher.post(self.supervisor.dispatcher.fail, error)

    def start(self, number: int, name: str, index: int) -> DroneHandle | None:
        handle = InlineHandle(self, number, name)
        post = self.supervisor.dispatcher.post
        post(self.supervisor.on_started, handle, os.getpid())
        post(self.supervisor.on_hello, handle)
        return handle

    def snapshot(self) -> MainSnapshot:
        return MainSnapshot()

    def adopt(self, snapshot: MainSnapshot) -> None:
        directory = self.supervisor.dispatcher.directory
        # False: whatever the pool's width, no task runs beside another.
        self.supervisor.registry = FunctionRegistry(snapshot, None, False, directory)

    def share(self, obj: Any) -> Shared[Any]:
        return Shared(capture(obj, self.supervisor.registry.snapshot), [])

    def end(self) -> None:
        self.turns.put(None)


class InlineHandle(DroneHandle):
    def __init__(self, engine: InlineEngine, number: int, name: str) -> None:
        super().__init__(engine.supervisor.dispatcher, number, name)
        self.ref_table = RefTable(_no_store, None, lambda: None)
        self.drone = InlineDrone(engine, self)

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        self.drone.receive(frames)

    def kill(self, kill_reason: str = "") -> None:
        self.kill_reason = self.kill_reason or kill_reason
        self.drone.kill()

    def last_started(self) -> int:
        # A killed drone has given back the tasks that it had not begun.
        return next(reversed(self.in_flight), 0) if self.drone.ended else self.drone.current

    def heartbeat(self) -> tuple[object, Times]:
        return object(), {}  # differs each time: it lives


class InlineDrone(DroneExecutor):
    """The executor of one drone. Senders hand it messages; the engine's thread runs the tasks."""

    def __init__(self, engine: InlineEngine, handle: InlineHandle) -> None:
        self._engine, self._handle = engine, handle
        self.ended = False
        slot = Slot(memoryview(bytearray(HEADER_BYTES)))  # keeps no answers, because all arrive
        snapshot, table, tail = engine.supervisor.registry.snapshot, handle.ref_table, OutputTail()
        super().__init__(handle.name, slot, snapshot, _no_store, table, tail, EventLog())
        self.socket_lock = engine.lock
        self._todo = _Todo(lambda: engine.turns.put(self._take_turn))

    def _take_over_process(self) -> None:
        """Leave this process as it is."""

    # Set under the lock, so that `_interrupt` in another thread hits the task that it means.
    @property
    def _current(self) -> int:
        return self._number

    @_current.setter
    def _current(self, number: int) -> None:
        with self._engine.lock:
            if number and self.ended:
                raise KeyboardInterrupt
            self._number = number
            _raise_in_thread(self._main_thread, _NO_ERROR)

    def _interrupt(self) -> None:
        _raise_in_thread(self._main_thread, KeyboardInterrupt)

    def receive(self, frames: list[bytes]) -> None:
        """Take a message. Called by any thread that sends."""
        # Tasks that were given back would run after later ones of other drones.
        if frames[0] != RECALL:
            with self.socket_lock:
                self._handle_message(frames)
            self._engine.turns.put(self._after_message)

    def _take_turn(self) -> None:
        self._main_thread = threading.get_ident()
        drone_thread.store = self._drone_store
        self._run_next()
        self._flush()

    def _after_message(self) -> None:
        self.send_requested_values()
        with self.socket_lock:
            if not (self._todo or self.ended):
                self._pending_interrupts.clear()
                if self._stopping:
                    self._end(0)

    def _receive(self, wait: bool) -> None:
        """Do nothing: messages are handled by the threads that send them."""

    def _send(self, frames: list[bytes]) -> bool:
        if not self.ended:
            self._handle.dispatcher.post(handle_message, self._handle, frames)
        return True

    def kill(self) -> None:
        """Give back the tasks that were not begun, and leave the running one to itself."""
        with self.socket_lock:
            if self.ended:
                return
            self._on_recall([])
            self.disable()
            if self.current:
                self._interrupt()
                self._engine.begin()
            self._handle.exit_reason = "a thread cannot be killed, and is left to run on"
            self._end(None)

    def _end(self, exitcode: int | None) -> None:
        self.ended = True
        self._handle.dispatcher.post(self._engine.supervisor.on_died, self._handle, exitcode)


class _Todo(deque[Any]):
    """The tasks of a drone. `on_added` is called after each that is added."""

    def __init__(self, on_added: Callable[[], object]) -> None:
        super().__init__()
        self._on_added = on_added

    def append(self, task: Any) -> None:
        super().append(task)
        self._on_added()
