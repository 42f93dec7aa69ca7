"""The controller's handle of a local drone: fast transport, output and status page."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import Malformed
from ...memory.references import RefTable
from ...pool.dispatcher_base import pool_error
from ...pool.drone_handle import DroneHandle, Times
from ...pool.handlers import handle_message, handle_unsent_results
from ...pool.task import Task
from ...runtime import parent_death
from ...runtime.procfs import (
    descendants,
    memory_of,
    processor_seconds_of,
    processor_times,
    state_of,
    system_call_of,
    threads_of,
)
from ...runtime.tuning import tuning
from ...wire.fast_transport import FastTransport
from ...wire.messages import OPEN, pack_numbers
from ...wire.output import OutputItems, OutputMerger, OutputSource
from ...wire.status_page import NO_PAGE
from .bulk import BulkSocket
from .launcher import Launcher

if TYPE_CHECKING:
    from ...pool.dispatcher import Dispatcher

log = logging.getLogger(__name__)

# Messages read from ZeroMQ after a drone's death. Those behind them count as in transit.
MAX_DRAINED_MESSAGES = 1000
RETRY_INTERVAL_SECONDS = 0.002  # until a full fast transport is tried again

_STALL_REASONS = {
    "T": "the process is stopped by a signal",
    "t": "the process is stopped by a debugger",
    "D": "the process waits for a disk, or for memory that was swapped out",
    "Z": "the process has ended, and its zygote does not report that",
}
_GIL_REASON = "the process holds its interpreter (the GIL) in C code"


class LocalHandle(DroneHandle):
    dispatcher: Dispatcher

    def __init__(
        self, dispatcher: Dispatcher, number: int, name: str, launcher: Launcher, bulk: BulkSocket
    ) -> None:
        super().__init__(dispatcher, number, name)
        self.launcher = self.spawner = launcher
        self._bulk = bulk
        self.identity = b"\x01" + os.urandom(16)
        self.streams: list[OutputSource] = []
        self._output = select.poll()  # of the streams
        self._merge = OutputMerger()
        self.fast_transport: FastTransport | None = None
        self.bulk_open = False
        self._bulk_waiting: list[list[bytes]] = []
        self._open_requested = False
        self.ref_table = RefTable(launcher.arena, number, self._schedule_release_report)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        """Send by the fast transport if that overtakes no message sent by ZeroMQ; see
        wire/fast_transport.py.
        """
        if (
            not self.bulk_unanswered
            and not self._bulk_waiting
            and self.fast_transport is not None
            and self.fast_transport.send(frames)
        ):
            return
        for task in tasks:
            if task.sending is not None:
                task.sending.by_bulk = True
        self.bulk_unanswered += len(tasks)
        if self.bulk_open:
            self._bulk.send(self.identity, frames)
        else:
            self._bulk_waiting.append(frames)
            self._request_open()

    def _request_open(self) -> None:
        """Ask the drone to open ZeroMQ, because messages wait for that."""
        if self._bulk_waiting and not self._open_requested and self.fast_transport is not None:
            self._bind_bulk()
            self._open_requested = self.fast_transport.send(pack_numbers(OPEN))
            # If full, the drone is busy, and reads the fast transport later.
            if not self._open_requested:
                self.dispatcher.call_later(RETRY_INTERVAL_SECONDS, self._request_open)

    def _bind_bulk(self) -> None:
        try:
            self._bulk.bind()
        except Exception as error:  # of the system, or ZeroMQ's own: the directory may be gone
            broken = pool_error("messages need ZeroMQ", error)
            self.dispatcher.post(self.dispatcher.break_pool, broken)

    def _kill(self) -> None:
        self.launcher.kill(self.number)

    def abort(self, reason: str) -> None:
        if self.pid is not None and state_of(self.pid) not in ("T", "t"):  # a stopped one cannot
            self.note_kill(reason)
            self.launcher.kill(self.number, signal.SIGABRT)
            self.dispatcher.call_later(tuning.abort_seconds, self.kill)
        else:
            self.kill(reason)

    # -- state of the drone ------------------------------------------------------------------------

    def beat(self) -> object:
        page = self.status_page
        return page.started, page.answered, page.beats

    def heartbeat(self) -> tuple[object, Times]:
        assert self.pid is not None
        page, pid = self.status_page, self.pid
        threads = {thread: processor_times(pid, thread) for thread in threads_of(pid)}
        hundredths = int(100 * threads.get(str(pid), (0, 0))[0])
        return (page.started, page.answered, page.beats, hundredths), threads

    def is_waiting(self) -> bool:
        assert self.pid is not None
        return all(state_of(self.pid, thread) == "S" for thread in threads_of(self.pid))

    def stall_reason(self) -> str:
        assert self.pid is not None
        return _STALL_REASONS.get(state_of(self.pid), _GIL_REASON)

    def activity(self, threads: Times) -> tuple[object, Times] | None:
        """Return a value that changes when the drone makes progress with its tasks.

        The control thread does not count, because its running shows only that the drone is alive.
        A main thread that waits for promises looks up now and then, and wakes the thread that
        runs green threads. So in that case only the steps of green threads count, and threads that
        compute. Otherwise each thread counts that the kernel has let run.
        """
        page = self.status_page
        others = {thread: times for thread, times in threads.items() if thread != str(page.control)}
        done = page.started, page.answered, self.tasks_done
        steps = page.steps
        if steps:
            return (*done, steps), others
        return (*done, {thread: ran for thread, (ran, _) in others.items()}), {}

    def children_activity(self) -> object:
        assert self.pid is not None
        return {
            (other, thread): processor_times(other, thread)[0]
            for other in descendants(self.pid)
            for thread in threads_of(other)
        }

    def system_call(self) -> str | None:
        return None if self.pid is None else system_call_of(self.pid, str(self.pid))

    def memory(self, enough: int) -> int:
        return 0 if self.pid is None else memory_of(self.pid, enough)

    def processor_seconds(self) -> float | None:
        return None if self.pid is None else processor_seconds_of(self.pid)

    def add_stream(self, stream: OutputSource) -> None:
        self.streams.append(stream)
        self._output.register(stream, select.POLLIN)

    def remove_stream(self, stream: OutputSource) -> None:
        if stream in self.streams:
            self.streams.remove(stream)
            self._output.unregister(stream)
        stream.close()

    def take_output(self) -> OutputItems:
        # Nearly always there is none, and this is faster than reading in vain.
        if not (self._output.poll(0) or self._merge.postponed):
            return []
        return self._merge.read([stream for stream in self.streams if stream.open])

    # -- receiving ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Receive from now on."""
        assert self.fast_transport is not None
        self._bulk.receivers[self.identity] = self._receive_bulk
        self.dispatcher.reactor.watch(self.fast_transport.fileno(), self.receive)

    def receive(self) -> bool:
        """Handle one message of the fast transport, whose descriptor will report the next. Return
        False if there is none.
        """
        if self.fast_transport is None:
            return False
        try:
            frames = self.fast_transport.receive()
            if frames is None:
                return False
            # The other end is closed; the zygote will report how the drone ended.
            if not frames:
                self.dispatcher.reactor.unwatch(self.fast_transport.fileno())
                return False
            handle_message(self.dispatcher, self, frames)
        except Exception as error:
            self._on_error(error)
        # The drone sets this before its OPEN. If the socket had no room for an OPEN, it has other
        # packets, well-formed or not, that are read after that.
        if not self.bulk_open and self.status_page.bulk:
            self._bind_bulk()
        return True

    def _receive_bulk(self, frames: list[bytes]) -> None:
        """Handle a message of the bulk transport, after those that were sent before it.

        The first is the HELLO of the drone's DEALER. Only now does the ROUTER have a route to the
        drone, for the messages that wait.
        """
        if not self.bulk_open:
            self.bulk_open = True
            for each in self._bulk_waiting:
                self._bulk.send(self.identity, each)
            self._bulk_waiting.clear()
        self.catch_up()
        try:
            handle_message(self.dispatcher, self, frames)
        except Exception as error:
            self._on_error(error)

    def _on_error(self, error: Exception) -> None:
        if isinstance(error, Malformed):
            log.warning("a malformed message of %s was dropped: %s", self.name, error)
            self.dispatcher.watch_for_lost_answer(self)
        else:
            self.dispatcher.fail(error)

    def catch_up(self) -> None:
        while self.receive():
            pass

    def warn_of_no_room(self) -> None:
        self.launcher.arena.warn(MemoryError(f"drone {self.name} found no room for a result"))

    def collect_last_results(self) -> None:
        self.catch_up()  # messages that had already reached this process count
        self._bulk.receive(MAX_DRAINED_MESSAGES)
        handle_unsent_results(self.dispatcher, self, self.status_page.kept())

    def close(self) -> None:
        reactor = self.dispatcher.reactor
        self._bulk.receivers.pop(self.identity, None)
        ends: list[OutputSource | FastTransport] = [*self.streams]
        if self.fast_transport is not None:
            ends.append(self.fast_transport)
        for end in ends:
            with suppress(ValueError, OSError):
                reactor.unwatch(end.fileno())
            parent_death.close(end)
        self.streams.clear()
        self.fast_transport = None
        self.status_page = NO_PAGE
        self.ref_table.close()
