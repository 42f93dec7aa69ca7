"""The control thread of a drone, which receives messages while the main thread runs a long task.

The thread begins to receive when one task has run for longer than `TAKEOVER_SECONDS`, and its
heartbeat shows that the drone is alive. The thread ticks while there are tasks and is parked
otherwise, so an idle drone has no thread that wakes up.

No task runs without the control thread. To park, the control thread sets `_parked`, then checks
whether the main thread is busy, then waits for a token. Before each task, the main thread sets
`busy`, then checks `_parked` and, if that is set, sends a token. So one of the two sees the other,
and a token too many costs one tick. (`current` instead of `busy` would not do, because it is set
later.)
"""

from __future__ import annotations

import os
import select
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue
from time import sleep
from typing import Protocol

from ...runtime import fork_guard

TAKEOVER_SECONDS = 0.005
"""Time that a task runs before the control thread begins to receive."""
HEARTBEAT_SECONDS = 0.1
"""Time between checks if the same task still runs and no message arrives."""


class ControlledDrone(Protocol):
    """The interface of a `LocalDrone` for its control thread."""

    socket_lock: threading.Lock
    busy: bool

    @property
    def current(self) -> int: ...
    @property
    def epoll_fd(self) -> int: ...
    def set_control_thread_id(self, thread: int, /) -> None: ...
    def beat(self) -> None: ...
    def receive_if_free(self) -> None: ...
    def send_requested_values(self) -> None: ...


class ControlThread:
    def __init__(self, drone: ControlledDrone) -> None:
        self._drone = drone
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._parked = False
        thread = threading.Thread(target=self._run, name="polycephaly-control", daemon=True)
        fork_guard.add_thread_lock(thread, drone.socket_lock)  # a drone may fork drones of its own
        thread.start()

    def wake(self) -> None:
        if self._parked:
            self._parked = False
            self._tokens.put(None)

    def _run(self) -> None:
        readable = select.poll()
        readable.register(self._drone.epoll_fd, select.POLLIN)
        seen = 0
        self._drone.set_control_thread_id(threading.get_native_id())
        while True:
            current = self._drone.current
            if current == 0:
                self._parked = True
                if not self._drone.busy:
                    self._tokens.get()
                    self._parked = False
                else:
                    self._parked = False
                    sleep(TAKEOVER_SECONDS)
            elif current == seen:
                # The descriptor reports new messages only; earlier ones must be looked for.
                try:
                    self._drone.beat()
                    self._drone.receive_if_free()
                    self._drone.send_requested_values()
                except BaseException:
                    # A message or result that was taken would be lost, and a caller would wait for
                    # ever. So the drone ends: the status page shows which tasks are done, which
                    # one was running, and which can run elsewhere.
                    with suppress(BaseException):
                        os.write(2, traceback.format_exc().encode())
                    os._exit(1)
                readable.poll(HEARTBEAT_SECONDS * 1000)
                continue
            seen = current
            sleep(TAKEOVER_SECONDS)
