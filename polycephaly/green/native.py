"""A pool of native threads, for all code that must not run on the scheduler's own thread.

    start(job) ──> room under the limit? an idle worker, or a new one ──> job()
             └──> else the queue ──> the next worker whose job is over ─────┘

A worker without a job for `IDLE_WORKER_SECONDS` ends, so a process that has stopped using green
threads keeps no native thread for them. The only limit is `max_threads`, so that a runaway loop
meets a queue and not the kernel's limit.

No code here waits for a lock that another job could hold, because finalizers and callbacks start
jobs too, and may interrupt any other code. (A new worker is waited for until it runs.) `pop` is
atomic, so a worker popped from `_idle`, or a job popped from `_queue`, belongs to one thread.
Looking at `busy` and incrementing it is one run of code without a call, in which CPython does not
switch threads.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from _thread import allocate_lock, get_native_id, start_new_thread
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from time import sleep
from types import FrameType
from typing import Any

from .._compat import forget_dummy_thread
from ..errors import is_own_frame
from ..promises.promise import callbacks
from ..runtime.clock import monotonic
from ..runtime.deferred_sigint import DeferredSigint, is_safe_from_signals
from ..runtime.safe_log import SafeLog

log = SafeLog(logging.getLogger("polycephaly.green"))

# If thousands of jobs end at once, most workers should end too, not linger.
MAX_IDLE_WORKERS = 8
# So long an idle worker stays. Starting a thread takes about 0.1 ms: staying saves little.
IDLE_WORKER_SECONDS = 0.05
# Of workers that have ended lately. Older ones are gone, or are not waited for.
MAX_ENDING_WORKERS = 1000


NO_THREAD = "green threads cannot run: this process cannot start another native thread"
MANY_THREADS = 512  # from this number of native threads on, the usual switch interval is too short
INTERVAL_SECONDS_PER_THREAD = 20e-6  # of the switch interval


def call_unbroken(fn: Callable[[], object]) -> None:
    """Call `fn`, which no error of a signal handler can break off half done.

    Such an error is raised here, before `fn` has begun, or while `fn` goes on on a native thread of
    its own, where no handler runs. If SIGINT alone has a handler, it is deferred instead.
    """
    if is_safe_from_signals() or sys.is_finalizing():  # at its end, Python starts no thread
        with DeferredSigint():
            fn()
        return
    ended = allocate_lock()
    ended.acquire()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            fn()
        except BaseException as error:
            errors.append(error)
        ended.release()

    try:
        start_new_thread(call, ())
    except RuntimeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # by a signal handler
        fn()  # the kernel refuses another thread
        return
    ended.acquire()
    if errors:
        raise errors.pop()


class NativeThreadPool:
    """A pool of native threads. Any thread may call `start`."""

    def __init__(self, max_threads: int) -> None:
        self.max_threads = max_threads
        self.count = 0  # of threads
        self.busy = 0  # running jobs that count against `max_threads`
        self._switch_interval = _SwitchInterval()
        self._idle: list[_Worker] = []
        self._queue: deque[Callable[[], object]] = deque()
        # Native IDs of workers that run no Python code any more.
        self.ending: deque[int] = deque(maxlen=MAX_ENDING_WORKERS)

    def start(self, job: Callable[[], object]) -> None:
        """Run `job` on a native thread: now if the limit allows, else when a thread is free.

        Raises `RuntimeError` if there is no thread at all and none can be started.
        """
        if self.busy < self.max_threads:
            self.busy += 1  # no call since the look, so no other thread ran in between
            if self.start_urgently(partial(self._run, job)):
                return
            self.busy -= 1
            if not self.busy:
                raise RuntimeError(NO_THREAD)
        self._queue.append(job)
        self.start_queued()

    def start_urgently(self, job: Callable[[], object]) -> bool:
        """Run `job` at once, whatever the limit. Return False if no thread can be started.

        For `start`, and for those that must not queue: the scheduler's owner, the watchdog and
        bound threads.
        """
        try:
            self._idle.pop().jobs.put(job)
            return True
        except IndexError:
            pass
        self.count += 1
        self._switch_interval.follow(self)
        try:
            _Worker(self, job)
        except RuntimeError:  # the kernel refuses another thread
            self.remove_worker()
            return False
        return True

    # No job is left in the queue while there is room. A submitter does A1 then A2, a worker whose
    # job is over does B1 then B2:
    #
    #     A1  append the job to the queue          B1  the queue is empty: decrement `busy`
    #     A2  room? take a job from the queue      B2  look at the queue again, as in A2
    #
    # If A1 comes before B2, the worker sees the job. Otherwise B1 comes before A2, and the
    # submitter sees the room. If both see a job and room, one of them finds the queue empty.

    def _run(self, job: Callable[[], object]) -> None:
        while True:
            try:
                job()
            # Raised by a callback at the end of a green thread, for instance by `sys.exit`.
            except BaseException:
                callbacks.exception("a callback of a green thread failed")
            del job  # keep nothing that the job holds
            try:
                job = self._queue.popleft()
            except IndexError:
                break
        self.busy -= 1
        self.start_queued()

    def start_queued(self) -> None:
        """Start queued jobs while there is room."""
        while self._queue and self.busy < self.max_threads:
            self.busy += 1
            try:
                job = self._queue.popleft()
            except IndexError:
                self.busy -= 1
                continue
            if not self.start_urgently(partial(self._run, job)):
                self._queue.appendleft(job)
                self.busy -= 1
                return

    def remove_worker(self) -> None:
        """Count a worker that has ended, or could not be started."""
        self.count -= 1
        self._switch_interval.follow(self)

    def idle_idents(self) -> set[int]:
        """Return the idents of the idle threads."""
        return {worker.ident for worker in list(self._idle)}

    def next_job(self, worker: _Worker) -> Callable[[], object] | None:
        """Wait for the next job of `worker` and return it; None if the worker should end."""
        if len(self._idle) >= MAX_IDLE_WORKERS:
            return None
        self._idle.append(worker)
        try:
            return worker.jobs.get(timeout=IDLE_WORKER_SECONDS)
        except Empty:
            try:
                self._idle.remove(worker)
                return None
            except ValueError:  # another thread has just popped the worker, and gives it a job
                return worker.jobs.get()

    def wait_for_ending(self, seconds: float) -> None:
        """Before a fork: wait until the workers that have ended are gone, or for so long.

        At its end, a thread runs destructors of native libraries. OpenSSL's takes a lock there, and
        a fork at that moment would copy the lock as taken.
        """
        deadline = monotonic() + seconds
        while self.ending:
            task = f"/proc/self/task/{self.ending.popleft()}"  # no other thread pops
            while os.path.exists(task) and monotonic() < deadline:
                sleep(0.0005)

    def reset_after_fork(self) -> None:
        """Reset the pool in a forked child, where none of the threads exists."""
        self.count = self.busy = 0
        self._idle.clear()
        self._queue.clear()
        self.ending.clear()
        self._switch_interval.restore_after_fork()


class _TracingHooks(threading.local):
    """The functions of `threading.settrace` and `threading.setprofile`, in the calling thread.

    `threading` itself sets them in its own threads only. Coverage tools, debuggers and profilers
    use them to see the code of all threads.
    """

    _trace: Any = None
    _profile: Any = None

    def follow(self) -> None:
        """Set the present functions in the calling thread, unless this was done already."""
        trace, profile = threading.gettrace(), threading.getprofile()
        if trace is not self._trace:
            self._trace = trace
            sys.settrace(None if trace is None else partial(_trace_users_code, trace))
        if profile is not self._profile:
            self._profile = profile
            sys.setprofile(profile)


def _trace_users_code(trace: Any, frame: FrameType, event: str, arg: Any) -> Any:
    """Trace a frame, unless it is one of this package: a function that is called at each line would
    let threads switch where this package relies on straight-line code.
    """
    return None if is_own_frame(frame) else trace(frame, event, arg)


tracing_hooks = _TracingHooks()


class _SwitchInterval:
    """Lengthens the switch interval of the interpreter while there are many native threads.

    A thread that waits for the interpreter wakes every switch interval (5 ms) to ask for it. If
    thousands of threads return from foreign calls at about the same time, the asking takes all
    processors, and fewer threads get through than arrive: 10,000 one-second sleeps took 2.3 s, but
    more than 60 s in one run of five. The interval therefore grows in proportion to the number of
    threads (measured so: 2.0 to 2.6 s in 18 runs of 18).
    """

    def __init__(self) -> None:
        self._usual = self._raised = 0.0
        self._lock = allocate_lock()

    def follow(self, threads: NativeThreadPool) -> None:
        """Adapt the interval to the present number of threads. Any thread may call this.

        A caller that finds the lock taken leaves at once, because the caller may be a finalizer in
        the thread that holds the lock. The holder looks at the number again after the release.
        """
        while _needed_interval(threads.count) != self._raised and self._lock.acquire(False):
            try:
                self._set(_needed_interval(threads.count))
            finally:
                self._lock.release()

    def _set(self, needed: float) -> None:
        if not self._raised:
            self._usual = sys.getswitchinterval()
        if needed:
            self._raised = needed
            sys.setswitchinterval(max(self._usual, needed))
        else:
            # Restore the interval only if no other code has set it meanwhile.
            if abs(sys.getswitchinterval() - max(self._usual, self._raised)) < 1e-5:
                sys.setswitchinterval(self._usual)
            self._raised = 0.0

    def restore_after_fork(self) -> None:
        """Undo a raise in a forked child, where none of the threads exists."""
        if self._raised:
            sys.setswitchinterval(self._usual)
        self._raised = 0.0
        self._lock = allocate_lock()  # another thread may have held the old one


def _needed_interval(count: int) -> float:
    """Return the switch interval for `count` threads, in seconds; 0 if the usual one will do."""
    return (count & ~255) * INTERVAL_SECONDS_PER_THREAD if count >= MANY_THREADS else 0.0


class _Worker:
    """A worker of the pool.

    A raw thread, because a `threading.Thread` takes half as long again to start and to end.
    """

    __slots__ = ("ident", "jobs", "started", "workers")

    def __init__(self, workers: NativeThreadPool, job: Callable[[], object]) -> None:
        self.workers = workers
        self.jobs: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self.jobs.put(job)
        self.started = allocate_lock()
        self.started.acquire()
        self.ident = start_new_thread(self._run_jobs, ())
        # Start one thread at a time. Threads that start faster than they reach their first blocking
        # call wait for the interpreter together, each asking every 5 ms. Some thousands of them
        # bring everything to a halt.
        self.started.acquire()

    def _run_jobs(self) -> None:
        self.started.release()
        job: Callable[[], object] | None = self.jobs.get()
        try:
            while job is not None:
                tracing_hooks.follow()
                try:
                    job()
                except BaseException:
                    log.exception("a bug in polycephaly: %r raised", job)
                del job  # keep nothing that the job holds while waiting
                job = self.workers.next_job(self)
        finally:
            self.workers.remove_worker()
            self.workers.ending.append(get_native_id())
            forget_dummy_thread()  # code that called `current_thread()` has made one
