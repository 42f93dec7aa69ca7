"""The watchdog: a native thread that looks after the one that drives.

    a foreign call lasts longer than the window, others could go on  ──> another native thread drives from now on
    a green thread is between two awaits for longer than `HELD`      ──> says who, where and for how long
    ... and has said something to another image by a channel          ──> sends it

It looks every `window` while foreign calls are being made, else every `SLOW`, and ends when nobody
drives.

When a hand-over would gain nothing. A call that computes and holds the interpreter's lock blocks
the others whoever drives. It is told by two signs together: the driving thread has used the
processor for most of the time since the last look, and the watchdog itself came late, as it had to
wait for the lock. A call that computes without the lock (compressing, hashing, matrix products)
lets the watchdog come in time, and is handed over.

Which interleavings are possible. The ownership is taken by the watchdog or kept by the call, never
both (see scheduler.py). It may be of a later call than the one that was looked at: then a short
call is handed over for nothing, which costs a thread switch and is otherwise right. The thread
whose clock is read may have ended: that is an `OSError`, and it was idle."""

from __future__ import annotations

import logging
import os
import sys
from _thread import allocate_lock, get_ident
from time import clock_gettime, monotonic, process_time, sleep
from types import FrameType
from typing import Any

from .history import history
from .scheduler import NO_CALL, Driver, scheduler

__all__ = ["Watchdog", "watchdog"]

SLOW = 0.05  # seconds between looks while no foreign calls are made
QUIET = 20  # looks without a foreign call until it looks slowly again
HELD = 0.1  # seconds between two awaits that are worth a report; and again at each doubling
LATE = 0.004  # seconds; later than that it had to wait for the interpreter
ALONE = 10  # windows after which a call is handed over even if nobody could go on: then there is nothing to watch

log = logging.getLogger("polycephaly.green")


class Watchdog:
    """There is one, `watchdog`. It runs as a job of the scheduler's workers."""

    def __init__(self) -> None:
        self.window = 0.001
        self.slow = True  # a call that finds it so says that it is there
        self.handovers = 0
        self.ident = 0  # its native thread
        self._running = False
        self._resting = False
        self._bell = allocate_lock()
        self._bell.acquire()
        self._asked: float | None = (
            None  # when the owner was asked for a sign of life that it has not given yet
        )
        self._report_at = HELD
        self._suspect: Any = (
            None  # who ran then, and the processor time of the driving thread and of all
        )
        self._used = self._used_by_all = 0.0

    # -- for those it watches ----------------------------------------------------------------------

    def look_closely(self) -> None:
        """A foreign call begins, and nobody looks closely."""
        self.slow = False
        if self._resting:
            self._resting = False  # no call since the look: one of those who wake it rings
            self._bell.release()

    def when_busy(self) -> None:
        """An owner begins, or has slept."""
        if not self._running:
            self._running = True  # no call since the look
            if not scheduler.workers.start_urgently(self._watch):
                self._running = False  # no thread to be had: who begins next tries again

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._look()
        except (
            BaseException
        ):  # a logging filter may raise: then the next owner that is busy begins another one
            self._running = False
            log.exception("the watchdog failed")

    def _look(self) -> None:
        self.ident = get_ident()
        quiet, calls = (
            QUIET,
            scheduler.calls,
        )  # slowly, until the next call: it may have been started for a message
        idle = seen = 0
        began = used_before = looked_before = 0.0
        while True:
            due = monotonic() + (SLOW if self.slow else self.window)
            if self.slow:
                self._rest()
            else:
                sleep(min(self.window, SLOW))
            now, driver, mail = monotonic(), scheduler.driver, scheduler.mail
            if mail is not None:
                mail.send_late()
            if scheduler.bell:
                idle += 1
                if idle > 1 and self._may_end():
                    return
                continue
            idle = 0
            if driver is None:
                continue
            token = driver.token
            if token <= NO_CALL and scheduler.calls == calls:
                quiet += 1
                self.slow = quiet > QUIET
            else:
                quiet, calls = 0, scheduler.calls
            if token <= NO_CALL:
                self._look_for_life(driver, now, now - due > LATE)
                seen = 0
                continue
            self._asked = None
            used = _processor_time(driver)
            if token != seen:
                seen, began = token, now
            else:
                computing = (
                    used - used_before > (now - looked_before) / 2 and now - due > self.window
                )
                if not computing and (
                    now - began > ALONE * self.window or _somebody_could_go_on(now)
                ):
                    self._take_over(driver, began)
                    seen = 0
            looked_before, used_before = now, used

    def _rest(self) -> None:
        """Until it is time for a slow look, or somebody asks for a close one.

        Who asks clears `slow`, then looks at `_resting`; this sets `_resting`, then looks at
        `slow`: one sees the other. Who clears `_resting` first, in a line without a call, decides
        whether a ring is on its way."""
        self._resting = True
        if self.slow and self._bell.acquire(timeout=SLOW):
            return
        if self._resting:
            self._resting = False
        else:
            self._bell.acquire()

    def _may_end(self) -> bool:
        """Nobody drives. An owner that begins takes its waker from the bell, then looks at
        `_running`; this clears `_running`, then looks at the bell. So one of the two sees the
        other, and who sets `_running` goes on."""
        self._running = False
        if scheduler.bell:
            return True
        if self._running:
            return True
        self._running = True
        return False

    def _take_over(self, driver: Driver, began: float) -> None:
        fn = driver.fn
        driver.began = began  # before: the call may come back at once
        if driver.take():
            self.handovers += (
                1  # before: who drives from now on may see to everything before this thread goes on
            )
            history.was_long(fn)
            scheduler.hand_over()

    # -- who holds the scheduler -------------------------------------------------------------------

    def _look_for_life(self, driver: Driver, now: float, late: bool) -> None:
        thread, used, used_by_all = scheduler.current, _processor_time(driver), process_time()
        asked = self._asked
        if (
            asked is None or thread is not self._suspect
        ):  # another one runs now, and may hold up the sign of life
            self._asked, self._report_at = now, HELD
            self._suspect, self._used, self._used_by_all = thread, used, used_by_all
            if asked is None:
                scheduler.post(self._alive)
            return
        held = now - asked
        if held < self._report_at or thread is None:
            return
        # It computes, be it with a small share of a busy machine; or it is blocked, while the
        # interpreter is free. Else it only waits for the interpreter.
        used, used_by_all = used - self._used, used_by_all - self._used_by_all
        computes = used > held / 2 or used > max(held / 20, used_by_all / 2)
        if late and not computes:
            return
        where = _where(sys._current_frames().get(driver.ident))
        if where is not None:
            self._report_at = 2 * held
            log.warning(
                "green thread %r has held the scheduler for %.2f s, at %s; nothing else runs meanwhile: "
                "what blocks belongs into `await green.call(...)`",
                thread.name, held, where,
            )  # fmt: skip

    def _alive(self) -> None:
        self._asked = self._suspect = None

    def forget(self) -> None:
        """In a forked child."""
        window = self.window
        Watchdog.__init__(self)
        self.window = window


def _somebody_could_go_on(now: float) -> bool:
    try:
        return bool(scheduler.ready) or scheduler.timers.heap[0][0] <= now
    except IndexError:
        return False


def _processor_time(driver: Driver) -> float:
    try:
        return clock_gettime(driver.clock)
    except OSError:  # it has ended
        return 0.0


def _where(frame: FrameType | None) -> str | None:
    own = __name__.partition(".")[0]
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == own:
        frame = frame.f_back
    if frame is None:
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


watchdog = Watchdog()
scheduler.when_busy = watchdog.when_busy
os.register_at_fork(after_in_child=watchdog.forget)
