"""The watchdog: a native thread that watches the owner of the scheduler.

    a foreign call takes longer than the window,         ──> hand the scheduler over to
    and other green threads could run                        another native thread
    a green thread runs longer than `HELD` without await ──> log its name, place and duration
    such a step has sent messages to other processes     ──> flush them

The watchdog looks every `window` while foreign calls are made, else every `SLOW` seconds. The
watchdog ends when there is no owner.

Either the watchdog takes the ownership or the call keeps it, never both: see
docs/decisions/0009-one-owner-runs-green-threads.md.
"""

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
QUIET = 20  # looks without a foreign call before the watchdog looks slowly again
HELD = 0.1  # seconds without an await that are reported; and again at each doubling
LATE = 0.004  # seconds; if the watchdog wakes later than this, it had to wait for the interpreter
# Windows after which a call is handed over even if no other thread could run. After that the
# watchdog has nothing to watch.
ALONE = 10

log = logging.getLogger("polycephaly.green")


class Watchdog:
    """The watchdog of one process, a job of the native thread pool. The only instance is
    `watchdog`."""

    def __init__(self) -> None:
        self.window = 0.001
        self.slow = True  # a foreign call that finds this True calls `look_closely`
        self.handovers = 0
        self.ident = 0  # of the native thread of the watchdog
        self._running = False
        self._resting = False
        self._bell = allocate_lock()
        self._bell.acquire()
        # When the owner was asked for a sign of life that is still missing.
        self._asked: float | None = None
        self._report_at = HELD
        # The green thread that ran then, and the processor time of the owner and of the process.
        self._suspect: Any = None
        self._used = self._used_by_all = 0.0

    # -- for the threads that are watched ----------------------------------------------------------

    def look_closely(self) -> None:
        """Look every `window` from now on, because a foreign call begins."""
        self.slow = False
        if self._resting:
            # No call since the look, so only one thread rings.
            self._resting = False
            self._bell.release()

    def when_busy(self) -> None:
        """Start the watchdog if needed, because an owner begins or has slept."""
        if not self._running:
            self._running = True  # no call since the look
            if not scheduler.workers.start_urgently(self._watch):
                self._running = False  # no thread can be started: the next owner tries again

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._look()
        # A logging filter may raise. Then the next busy owner starts another watchdog.
        except BaseException:
            self._running = False
            log.exception("the watchdog failed")

    def _look(self) -> None:
        self.ident = get_ident()
        # Look slowly until the next call: the watchdog may have been started only for a message.
        quiet, calls = QUIET, scheduler.calls
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
                # If the call computes and holds the interpreter's lock, a hand-over gains nothing.
                # Then its thread has used the processor for most of the time since the last look,
                # and the watchdog has woken late because it had to wait for the lock.
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
        """Sleep until the next slow look, or until `look_closely` is called.

        `look_closely` clears `slow` and then looks at `_resting`. This method sets `_resting` and
        then looks at `slow`. So one sees the other. The side that clears `_resting` first, in a
        line without a call, decides whether a ring is on its way.
        """
        self._resting = True
        if self.slow and self._bell.acquire(timeout=SLOW):
            return
        if self._resting:
            self._resting = False
        else:
            self._bell.acquire()

    def _may_end(self) -> bool:
        """Return True if the watchdog may end, because there is no owner.

        An owner that begins takes its waker from the bell and then looks at `_running`. This method
        clears `_running` and then looks at the bell. So one of the two sees the other, and the one
        that sets `_running` goes on.
        """
        self._running = False
        if scheduler.bell:
            return True
        if self._running:
            return True
        self._running = True
        return False

    def _take_over(self, driver: Driver, began: float) -> None:
        fn = driver.fn
        driver.began = began  # before `take`, because the call may return at once
        # Possibly a later call than the one looked at: a hand-over for nothing, but harmless.
        if driver.take():
            # Before `hand_over`: the new owner may do everything else before this thread continues.
            self.handovers += 1
            history.was_long(fn)
            scheduler.hand_over()

    # -- steps that hold the scheduler -------------------------------------------------------------

    def _look_for_life(self, driver: Driver, now: float, late: bool) -> None:
        thread, used, used_by_all = scheduler.current, _processor_time(driver), process_time()
        asked = self._asked
        # If another thread runs now, that one may be delaying the sign of life: measure anew.
        if asked is None or thread is not self._suspect:
            self._asked, self._report_at = now, HELD
            self._suspect, self._used, self._used_by_all = thread, used, used_by_all
            if asked is None:
                scheduler.post(self._alive)
            return
        held = now - asked
        if held < self._report_at or thread is None:
            return
        # Report a thread that computes, even if with a small share of a busy machine, and a thread
        # that blocks while the interpreter is free. Any other only waits for the interpreter.
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
        """Reset the watchdog in a forked child."""
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
    except OSError:  # the thread has ended, so it was idle
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
