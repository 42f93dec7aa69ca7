"""The controller's handle of a local drone: sockets, ring, output and status page.

    send ── WORK, STOP ─────────────> work ────> main thread
         ── CANCEL, RECALL, TELL... ─> control ─> control thread
    _on_bell <── a byte, through work <── either thread, after it has written into the ring

What a socket does not take waits in a queue in front of it.
"""

from __future__ import annotations

import logging
import select
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ...errors import Malformed
from ...memory.references import RefTable
from ...pool.drone_handle import DroneHandle, Times
from ...pool.handlers import handle_records
from ...pool.interfaces import State
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
from ...wire.message_socket import MEMORY_RETRY_SECONDS, MessageSocket
from ...wire.messages import POSITION, TELL, URGENT, pack_numbers
from ...wire.output import OutputItems, OutputMerger, OutputSource
from ...wire.ring import RingReader
from ...wire.status_page import NO_PAGE
from .launcher import Launcher

if TYPE_CHECKING:
    from ...pool.dispatcher import Dispatcher

log = logging.getLogger(__name__)

MAX_PACKETS = 64  # that are sent at one time: other drones wait meanwhile
LOOK_AGAIN_SECONDS = 0.01
SILENT_SECONDS = 0.03
"""After that time, a drone with several calls is asked to tell what is done of them: one may take
long. More than `FLUSH_SECONDS` (chunk_run.py), after which it tells by itself."""
KILL_AGAIN_SECONDS = 1.0
GONE_SECONDS = 1.0  # in which the end of a drone is reported whose socket is closed

_STALL_REASONS = {
    "T": "the process is stopped by a signal",
    "t": "the process is stopped by a debugger",
    "D": "the process waits for a disk, or for memory that was swapped out",
    "Z": "the process has ended, and its zygote does not report that",
}
_GIL_REASON = "the process holds its interpreter (the GIL) in C code"


class _Line:
    """A socket towards a drone, with what it has not taken yet."""

    socket: MessageSocket | None = None

    def __init__(self, handle: LocalHandle) -> None:
        self._handle = handle
        self._waits_for_room = False

    def send(self, frames: list[bytes] | None = None) -> None:
        """Send a message, or what is not sent yet. Go on when there is room for what is left."""
        socket, dispatcher = self.socket, self._handle.dispatcher
        if socket is None:
            return
        try:
            if frames is None:
                is_all_sent = socket.send_rest(MAX_PACKETS)
            else:
                is_all_sent = socket.send(frames, MAX_PACKETS)
        except OSError as error:
            self._handle.end_if_left(f"its socket cannot be written to: {error}")
            return
        if not (is_all_sent or self._waits_for_room):
            self._waits_for_room = True
            if socket.lacks_memory:  # then the descriptor may tell of room at once, and in vain
                dispatcher.call_later(MEMORY_RETRY_SECONDS, self._send_rest)
            else:
                dispatcher.reactor.wait_for_room(socket.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        self._waits_for_room = False
        self.send()


class LocalHandle(DroneHandle):
    dispatcher: Dispatcher

    def __init__(self, dispatcher: Dispatcher, number: int, name: str, launcher: Launcher) -> None:
        super().__init__(dispatcher, number, name)
        self.launcher = self.spawner = launcher
        self.streams: list[OutputSource] = []
        self._output = select.poll()  # of the streams
        self._merge = OutputMerger()
        self.work, self.control = _Line(self), _Line(self)
        self._works = 0  # messages sent through the former
        self.ring: RingReader | None = None
        self._looks_again = False
        self._beats_seen = -1  # when TELL was sent: the drone beats when it gets that
        self._listens = False  # the timer is set that sends TELL if the drone is silent
        self._is_left = False  # no message comes to it any more, or from it
        self.ref_table = RefTable(launcher.arena, number, self._schedule_release_report)

    # -- sending -----------------------------------------------------------------------------------

    def send(self, frames: list[bytes], tasks: Sequence[Task] = ()) -> None:
        kind = frames[0][:1]
        if kind in URGENT:
            # TELL is about nothing that was sent: it must not wait.
            self.control.send([*frames, POSITION.pack(0 if kind == TELL else self._works)])
        else:
            self._works += 1
            self.work.send(frames)
            self._listen()

    def _has_several_calls(self) -> bool:
        tasks = self.in_flight
        return len(tasks) > 1 or any(task.calls_left > 1 for task in tasks.values())

    def _listen(self) -> None:
        """Notice if the drone is silent, while it has several calls."""
        if not self._listens and self._has_several_calls():
            self._listens = True
            self.dispatcher.call_later(SILENT_SECONDS, self._end_silence)

    def _end_silence(self) -> None:
        """Have the drone tell what is done of its calls, if it was silent for some time."""
        self._listens = False
        if not self._has_several_calls():
            return
        silent = self.dispatcher.reactor.timers.now() - self.last_contact_at
        if silent >= SILENT_SECONDS:
            self.ask_for_beat()  # when it has told something, `receive` listens again
        else:
            self._listen()

    def ask_for_beat(self) -> bool:
        beats = self.status_page.beats
        if beats == self._beats_seen:
            return False
        self._beats_seen = beats
        self.send(pack_numbers(TELL))
        return True

    def end_if_left(self, reason: str) -> None:
        """Kill the drone, to which no message comes any more, unless its zygote reports its end."""
        # One that is stopping has time for its exit handlers.
        if self.state < State.STOPPING and not self._is_left:
            self._is_left = True
            self.dispatcher.call_later(GONE_SECONDS, self.kill, reason)

    def _kill(self) -> None:
        if self.alive:
            self.launcher.kill(self.number)
            # Again until it is dead: the system may have refused the signal.
            self.dispatcher.call_later(KILL_AGAIN_SECONDS, self._kill)

    def abort(self, reason: str) -> None:
        if self.pid is not None and state_of(self.pid) not in ("T", "t"):  # a stopped one cannot
            self.note_kill(reason)
            self.launcher.kill(self.number, signal.SIGABRT)
            self.dispatcher.call_later(tuning.abort_seconds, self.kill)
        else:
            self.kill(reason)

    # -- state of the drone ------------------------------------------------------------------------

    def beat(self) -> object:
        return self.status_page.signs_of_life()

    def heartbeat(self) -> tuple[object, Times]:
        assert self.pid is not None
        page, pid = self.status_page, self.pid
        threads = {thread: processor_times(pid, thread) for thread in threads_of(pid)}
        hundredths = int(100 * threads.get(str(pid), (0, 0))[0])
        return (page.signs_of_life(), hundredths), threads

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

    def main_seconds(self) -> float | None:
        if self.pid is None or self.status_page.steps:
            return None
        return processor_times(self.pid, str(self.pid))[0]

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
        assert self.work.socket is not None and self.control.socket is not None
        self.dispatcher.reactor.watch(self.work.socket.fileno(), self._on_bell)
        # Only for room, because the drone writes nothing there.
        self.dispatcher.reactor.watch(self.control.socket.fileno(), self._on_control)

    def _on_control(self) -> None:
        socket = self.control.socket
        if socket is None:
            return
        try:
            is_open = socket.hear_bell()
        except Malformed:  # code of the task has written there
            return
        if not is_open:
            self.dispatcher.reactor.unwatch(socket.fileno())

    def _on_bell(self) -> None:
        socket = self.work.socket
        if socket is None:
            return
        try:
            is_open = socket.hear_bell()
        except Malformed as error:
            log.warning("a malformed message of %s was dropped: %s", self.name, error)
            return
        self.receive()
        if not is_open:
            self.dispatcher.reactor.unwatch(socket.fileno())
            self.end_if_left("its socket was closed")

    def receive(self) -> bool:
        """Handle what the drone has written. Return False if that was nothing."""
        ring = self.ring
        if ring is None:
            return False
        try:
            records = ring.read()
            if not records:
                if records is None:
                    self._look_again()
                return False
            handle_records(self.dispatcher, self, records, ring.length)
            self._listen()
        except Malformed as error:
            log.warning("a malformed message of %s was dropped: %s", self.name, error)
            self.dispatcher.watch_for_lost_answer(self)
        except Exception as error:
            self.dispatcher.fail(error)
            return False
        return True

    def _look_again(self) -> None:
        """Look soon for the bytes that the drone has announced: if they are not there then, it has
        written over its ring.
        """
        if not self._looks_again:
            self._looks_again = True
            self.dispatcher.call_later(LOOK_AGAIN_SECONDS, self._check_ring)

    def _check_ring(self) -> None:
        self._looks_again = False
        if not self.receive() and self._looks_again:
            self.kill("it has written over the memory in which it answers")

    def receive_all(self) -> None:
        while self.receive():
            pass

    def warn_of_no_room(self) -> None:
        self.launcher.arena.warn(MemoryError(f"drone {self.name} found no room for a result"))

    def collect_last_results(self) -> None:
        self.receive_all()

    def close(self) -> None:
        reactor = self.dispatcher.reactor
        ends: list[OutputSource | MessageSocket] = [*self.streams]
        ends += [line.socket for line in (self.work, self.control) if line.socket is not None]
        for end in ends:
            with suppress(ValueError, OSError):
                reactor.unwatch(end.fileno())
            parent_death.close(end)
        self.streams.clear()
        self.work.socket = self.control.socket = self.ring = None
        self.status_page = NO_PAGE
        self.ref_table.close()
