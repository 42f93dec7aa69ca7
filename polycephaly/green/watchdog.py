"""The watchdog: a native thread that watches the owner of the scheduler.

    a foreign call takes longer than the window,          ──> hand the scheduler over to
    and other green threads could run                         another native thread
    a green thread runs for `MAX_STEP_SECONDS`, no await  ──> log its name, place and duration
    such a step has sent messages to other processes      ──> flush them

The watchdog looks every `window` while foreign calls are made, else every `SLOW_INTERVAL_SECONDS`.
The watchdog ends when two looks in a row have found that the owner sleeps, or that there is none.

Either the watchdog takes the ownership or the call keeps it, never both: see
docs/decisions/0009-one-owner-runs-green-threads.md.
"""

from __future__ import annotations

import logging
import os
from _thread import allocate_lock, get_ident
from time import clock_gettime, process_time, sleep
from types import FrameType
from typing import Any

from .._compat import current_frames
from ..errors import is_own_frame
from ..runtime.checks import check_at_least, check_positive_seconds
from ..runtime.clock import monotonic
from .history import history
from .scheduler import NO_CALL, Driver, scheduler

SLOW_INTERVAL_SECONDS = 0.05  # between looks while no foreign calls are made
QUIET_CHECKS = 20  # looks without a foreign call before the watchdog looks slowly again
MAX_STEP_SECONDS = 0.1  # longer times without an await are reported; and again at each doubling
# If the watchdog wakes later than this during a step, it had to wait for the interpreter. During a
# call, one window late is the sign.
LATE_WAKEUP_SECONDS = 0.004
# Windows after which a call is handed over even if no other thread could run. After that the
# watchdog has nothing to watch.
MAX_WINDOWS_ALONE = 10

log = logging.getLogger("polycephaly.green")


class Watchdog:
    """The watchdog of one process, a job of the native thread pool. The only instance is
    `watchdog`.
    """

    def __init__(self) -> None:
        self.window = 0.001
        self.slow = True  # a foreign call that finds this True calls `watch_closely`
        self.handovers = 0
        self.ident = 0  # of the native thread of the watchdog
        self._running = False
        self._wakeup = allocate_lock()  # locked, but for a wake-up that was not noticed yet
        self._wakeup.acquire()
        # When the step that still runs was first seen; None after its end.
        self._step_seen_at: float | None = None
        self._report_after = MAX_STEP_SECONDS
        # The green thread that ran then, and the processor time of the owner and of the process.
        self._suspect: Any = None
        self._thread_seconds = self._process_seconds = 0.0

    # -- for the threads that are watched ----------------------------------------------------------

    def watch_closely(self) -> None:
        """Look every `window` from now on, because a foreign call begins."""
        # Before the release: the watchdog looks at `slow` and then waits for the lock.
        self.slow = False
        if self._wakeup.locked():  # only the owner calls this, so only one thread releases
            self._wakeup.release()

    def on_busy(self) -> None:
        """Start the watchdog if needed, because an owner begins or has slept."""
        if not self._running:
            self._running = True  # no call since the look
            if not scheduler.workers.start_urgently(self._watch):
                self._running = False  # no thread can be started: the next owner tries again

    # -- watching ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._run_checks()
        # A logging filter may raise. Then the next busy owner starts another watchdog.
        except BaseException:
            self._running = False
            log.exception("the watchdog failed")

    def _run_checks(self) -> None:
        self.ident = get_ident()
        # Look slowly until the next call: the watchdog may have been started only for a message.
        quiet_checks, calls = QUIET_CHECKS, scheduler.calls
        idle_checks = seen_token = 0
        began = last_used = last_check_at = 0.0
        while True:
            due = monotonic() + (SLOW_INTERVAL_SECONDS if self.slow else self.window)
            if self.slow:
                self._wakeup.acquire(timeout=SLOW_INTERVAL_SECONDS)
            else:
                sleep(min(self.window, SLOW_INTERVAL_SECONDS))
            now, driver, transport = monotonic(), scheduler.driver, scheduler.transport
            if transport is not None:
                transport.flush(by_owner=False)
            if scheduler.bell:
                idle_checks += 1
                if idle_checks > 1 and self._may_end():
                    return
                continue
            idle_checks = 0
            if driver is None:
                continue
            token = driver.token
            if token <= NO_CALL and scheduler.calls == calls:
                quiet_checks += 1
                self.slow = quiet_checks > QUIET_CHECKS
            else:
                quiet_checks, calls = 0, scheduler.calls
            if token <= NO_CALL:
                self._check_step(driver, now, now - due > LATE_WAKEUP_SECONDS)
                seen_token = 0
                continue
            self._step_seen_at = None
            used = _processor_time(driver)
            if token != seen_token:
                seen_token, began = token, now
            else:
                # If the call computes and holds the interpreter's lock, a hand-over gains nothing.
                # Then its thread has used the processor for most of the time since the last look,
                # and the watchdog has woken late because it had to wait for the lock.
                computing = used - last_used > (now - last_check_at) / 2 and now - due > self.window
                if not computing and (
                    now - began > MAX_WINDOWS_ALONE * self.window or _can_another_thread_run(now)
                ):
                    self._take_over(driver, began)
                    seen_token = 0
            last_check_at, last_used = now, used

    def _may_end(self) -> bool:
        """Return True if the watchdog may end, because the owner sleeps or there is none.

        When an owner begins or wakes, its waker leaves the bell, and then the owner looks at
        `_running`. This method clears `_running` and then looks at the bell. So one of the two sees
        the other, and the one that sets `_running` goes on.
        """
        self._running = False
        if scheduler.bell or self._running:
            return True
        self._running = True
        return False

    def _take_over(self, driver: Driver, began: float) -> None:
        fn = driver.fn
        driver.began = began  # before `take_ownership`, because the call may return at once
        # Possibly a later call than the one looked at: a hand-over for nothing, but harmless.
        if driver.take_ownership():
            # Before `hand_over`: the new owner may do everything else before this thread continues.
            self.handovers += 1
            history.record_long(fn)
            scheduler.hand_over()

    # -- steps that hold the scheduler -------------------------------------------------------------

    def _check_step(self, driver: Driver, now: float, late: bool) -> None:
        thread = scheduler.current
        thread_seconds, process_seconds = _processor_time(driver), process_time()
        seen_at = self._step_seen_at
        # If another thread runs now, that one may be delaying `_on_step_end`: measure anew.
        if seen_at is None or thread is not self._suspect:
            self._step_seen_at, self._report_after = now, MAX_STEP_SECONDS
            self._suspect = thread
            self._thread_seconds, self._process_seconds = thread_seconds, process_seconds
            if seen_at is None:
                scheduler.post(self._on_step_end)
            return
        held = now - seen_at
        if held < self._report_after or thread is None:
            return
        # Report a thread that computes, even if with a small share of a busy machine, and a thread
        # that blocks while the interpreter is free. Any other only waits for the interpreter.
        thread_seconds -= self._thread_seconds
        process_seconds -= self._process_seconds
        computes = thread_seconds > held / 2 or thread_seconds > max(held / 20, process_seconds / 2)
        if late and not computes:
            return
        where = _user_location(current_frames().get(driver.ident))
        if where is not None:
            self._report_after = 2 * held
            log.warning(
                "green thread %r has held the scheduler for %.2f s, at %s, and no other green "
                "thread runs meanwhile: put blocking code into `await green.call(...)`",
                thread.name, held, where,
            )  # fmt: skip

    def holder(self) -> Any:
        """Return the green thread that has not awaited for `MAX_STEP_SECONDS`, or None. Any thread
        may call it.

        `_check_step` writes the time, then the thread, and this reads them the other way round. So
        a thread that has just begun is never returned with the time of the one before.
        """
        suspect, seen_at = self._suspect, self._step_seen_at
        held = seen_at is not None and monotonic() - seen_at >= MAX_STEP_SECONDS
        return suspect if held else None

    def _on_step_end(self) -> None:
        self._step_seen_at = self._suspect = None

    def reset_after_fork(self) -> None:
        """Reset the watchdog in a forked child."""
        window = self.window
        Watchdog.__init__(self)
        self.window = window


def _can_another_thread_run(now: float) -> bool:
    try:
        return bool(scheduler.ready) or scheduler.timers.heap[0][0] <= now
    except IndexError:
        return False


def _processor_time(driver: Driver) -> float:
    try:
        return clock_gettime(driver.clock)
    except OSError:  # the thread has ended, so it was idle
        return 0.0


def _user_location(frame: FrameType | None) -> str | None:
    while frame is not None and is_own_frame(frame):
        frame = frame.f_back
    if frame is None:
        return None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_qualname}"


watchdog = Watchdog()


def configure(*, window: float | None = None, native_threads: int | None = None) -> None:
    """Change settings of green threads in this process. Arguments left out change nothing.

    Parameters
    ----------
    window
        Seconds after which a foreign call that runs in place is handed over if other green threads
        could run. At first 0.001.
    native_threads
        The largest number of native threads for plain functions and foreign calls; further ones
        queue. At first 16384.

    Raises
    ------
    ValueError
        If an argument is not positive.
    TypeError
        If `window` is no number, or `native_threads` no whole number.
    """
    seconds = None if window is None else check_positive_seconds("window", window)
    if native_threads is not None:
        native_threads = check_at_least("native_threads", native_threads, 1)
    if seconds is not None:
        watchdog.window = seconds
    if native_threads is not None:
        scheduler.workers.max_threads = native_threads
        scheduler.workers.start_queued()


scheduler.on_busy = watchdog.on_busy
os.register_at_fork(after_in_child=watchdog.reset_after_fork)
