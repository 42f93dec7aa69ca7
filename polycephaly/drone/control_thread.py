"""The ear: a drone's thread that listens while the main thread is busy with one task for longer
than the window, and shows that the drone is alive.

It ticks while there is work and is parked when there is none, so an idle drone has no thread that
wakes. Parking: it says so, then looks whether the main thread is busy, then waits for a token. The
main thread says that it is busy and then looks at `_parked`, before each task; who is parked is
sent a token. So one of them sees the other, and no task runs without an ear; one token too many
costs one tick. (`current` would not do: it is set later.)"""

from __future__ import annotations

import os
import select
import threading
import traceback
from contextlib import suppress
from queue import SimpleQueue
from time import sleep
from typing import TYPE_CHECKING

from ..runtime import fork_guard

if TYPE_CHECKING:
    from .main import LocalDrone

__all__ = ["BEAT", "ControlThread"]

WINDOW = 0.005  # seconds that a task runs before the ear begins to listen
BEAT = 0.1  # seconds between its looks at whether the same task still runs, when nothing is heard


class ControlThread:
    def __init__(self, drone: LocalDrone) -> None:
        self._drone = drone
        self._tokens: SimpleQueue[None] = SimpleQueue()
        self._parked = False
        thread = threading.Thread(target=self._live, name="polycephaly-ear", daemon=True)
        fork_guard.add_turn(thread, drone.socket_turn)  # a drone may fork drones of its own
        thread.start()

    def wake(self) -> None:
        if self._parked:
            self._parked = False
            self._tokens.put(None)

    def _live(self) -> None:
        readable = select.poll()
        readable.register(self._drone.news_fd, select.POLLIN)
        seen = 0
        self._drone.has_ear(threading.get_native_id())
        while True:
            current = self._drone.current
            if current == 0:
                self._parked = True
                if not self._drone.busy:
                    self._tokens.get()
                    self._parked = False
                else:
                    self._parked = False
                    sleep(WINDOW)
            elif current == seen:
                # The descriptor tells of news only; what came before the ear began must be looked
                # for.
                self._drone.beat()
                try:
                    self._drone.hear_if_free()
                    self._drone.pack_wanted()
                except BaseException:
                    # What it had taken, to hear or to send, would be lost, and somebody would wait
                    # for it for ever. So the drone ends: the page tells what was done, what was
                    # being run, and what can run elsewhere.
                    with suppress(BaseException):
                        os.write(2, traceback.format_exc().encode())
                    os._exit(1)
                readable.poll(BEAT * 1000)
                continue
            seen = current
            sleep(WINDOW)
