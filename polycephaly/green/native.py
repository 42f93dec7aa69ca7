"""Native threads, cached: whatever must not run on the scheduler's own thread runs on one of these.

    start(job) ──> room under the ceiling? an idle worker, or a new one ──> job()
             └──> else the queue ──> the next worker whose job is over ───────┘

A worker is given one job after another. One that has had none for `LINGER` seconds ends, so an
image that has stopped using green threads has no thread of theirs either. There is no cap but
`ceiling`, and that is there so that a runaway loop meets a queue and not the kernel's limit.

Which interleavings are possible. Nothing here holds a lock: jobs are started from finalizers and
callbacks too, which may interrupt any other code. Whoever pops a worker from `_idle`, or a job from
`_queue`, has it alone (`pop` is atomic), and looking at `busy` and counting it up is one run of
code without a call, in which CPython changes no thread.

    submitter: A1 queue.append(job)          A2 busy is below the ceiling? takes a job from the
    queue worker:    B1 the queue is empty: busy-1 B2 looks at the queue again, as A2 does

If A1 comes before B2 the worker sees the job. If not, then B1 came before B2 before A1 before A2,
and the submitter sees the room. Both may see both: then one of them finds the queue empty."""

from __future__ import annotations

import logging
import sys
import threading
from _thread import allocate_lock, get_ident, start_new_thread
from collections import deque
from collections.abc import Callable
from functools import partial

from ..promises.promise import callbacks

__all__ = ["NativeThreadPool"]

log = logging.getLogger("polycephaly.green")

KEEP = 8  # idle ones; when thousands come back at once, most had better end than wait to end
LINGER = 0.05  # seconds; starting a thread takes some 0.1 ms, so keeping one for longer would save next to nothing


CROWD = 512  # native threads from which on they are too many for the usual switch interval
PATIENCE = 20e-6  # seconds of switch interval for each


class NativeThreadPool:
    """The cache. `start` may be called from anywhere."""

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self.count = 0  # of threads
        self.busy = 0  # jobs that run and count against the ceiling
        self._crowd = _Crowd()
        self._idle: list[_Worker] = []
        self._queue: deque[Callable[[], object]] = deque()

    def start(self, job: Callable[[], object]) -> None:
        """Has `job` run on a native thread, now if there may be one more, else when one is free.

        Raises `RuntimeError` when there is no thread at all and none can be started.
        """
        if self.busy < self.ceiling:
            self.busy += 1  # no call since the look: no other thread ran in between
            if self._give(partial(self._run, job)):
                return
            self.busy -= 1
            if not self.busy:
                raise RuntimeError(
                    "green threads cannot run: this process may not start another native thread"
                )
        self._queue.append(job)
        self.admit()

    def start_urgently(self, job: Callable[[], object]) -> bool:
        """The same for what must not stand in the queue, and does not count: who drives, watches,
        or serves a bound thread. False where no thread can be started."""
        return self._give(job)

    def _run(self, job: Callable[[], object]) -> None:
        while True:
            try:
                job()
            except (
                BaseException
            ):  # of a callback that was to be called at a thread's end, as sys.exit raises
                callbacks.exception("a callback of a green thread failed")
            del job  # nothing it holds is kept
            try:
                job = self._queue.popleft()
            except IndexError:
                break
        self.busy -= 1
        self.admit()

    def admit(self) -> None:
        """Begins with those in the queue for whom there is room."""
        while self._queue and self.busy < self.ceiling:
            self.busy += 1
            try:
                job = self._queue.popleft()
            except IndexError:
                self.busy -= 1
                continue
            if not self._give(partial(self._run, job)):
                self._queue.appendleft(job)
                self.busy -= 1
                return

    def _give(self, job: Callable[[], object]) -> bool:
        try:
            self._idle.pop().give(job)
            return True
        except IndexError:
            pass
        self.count += 1
        self._count()
        try:
            _Worker(self, job)
        except RuntimeError:  # the kernel has no more
            self.ended()
            return False
        return True

    def ended(self) -> None:
        """A worker has ended."""
        self.count -= 1
        self._count()

    def _count(self) -> None:
        if not self.count & 255 or self.count == CROWD - 1:
            self._crowd.counts(self.count)

    def idle(self) -> set[int]:
        """The identities of the threads that have nothing to do."""
        return {worker.ident for worker in list(self._idle)}

    def next_job(self, worker: _Worker) -> Callable[[], object] | None:
        """What `worker` is to do next; None: nothing for so long that it may end."""
        if len(self._idle) >= KEEP:
            return None
        self._idle.append(worker)
        if not worker.called.acquire(timeout=LINGER):
            try:
                self._idle.remove(worker)
                return None
            except ValueError:  # somebody has just popped it
                worker.called.acquire()
        job, worker.job = worker.job, None
        return job

    def forget(self) -> None:
        """In a forked child: none of the threads is there."""
        self.count = self.busy = 0
        self._idle.clear()
        self._queue.clear()


class _Crowd:
    """Keeps thousands of native threads from bringing the machine to a halt.

    A thread that waits for the interpreter wakes every switch interval (5 ms) to ask for it. When
    thousands come back from foreign calls at about the same time, this asking takes all processors,
    and fewer come through than arrive: 10,000 one-second sleeps took 2.3 s, or in one run of five
    more than 60. While there are many, the interval is therefore longer, in proportion (measured
    with it: 2.0 to 2.6 s in 18 runs of 18)."""

    def __init__(self) -> None:
        self._usual = self._ours = 0.0

    def counts(self, count: int) -> None:
        """To be told the number of threads now and then."""
        if count >= CROWD:
            if not self._ours:
                self._usual = sys.getswitchinterval()
            self._ours = max(self._usual, count * PATIENCE)
            sys.setswitchinterval(self._ours)
        elif self._ours:
            if abs(sys.getswitchinterval() - self._ours) < 1e-5:  # nobody else has set it meanwhile
                sys.setswitchinterval(self._usual)
            self._ours = 0.0


class _Worker:
    """A raw thread: `threading.Thread` would take half as long again to start and to end."""

    __slots__ = ("begun", "called", "ident", "job", "workers")

    def __init__(self, workers: NativeThreadPool, job: Callable[[], object]) -> None:
        self.workers = workers
        self.job: Callable[[], object] | None = job
        self.called = allocate_lock()
        self.called.acquire()
        self.begun = allocate_lock()
        self.begun.acquire()
        self.ident = start_new_thread(self._live, ())
        # One at a time: threads that are started faster than they come to their first blocking call
        # wait for the interpreter all together, each asking for it every 5 ms. Some thousands of
        # those bring everything to a halt.
        self.begun.acquire()

    def give(self, job: Callable[[], object]) -> None:
        self.job = job
        self.called.release()

    def _live(self) -> None:
        self.begun.release()
        job, self.job = self.job, None
        try:
            while job is not None:
                try:
                    job()
                except BaseException:
                    log.exception("a bug in polycephaly: %r raised", job)
                del job  # nothing it holds is kept while waiting
                job = self.workers.next_job(self)
        finally:
            self.workers.ended()
            if sys.version_info < (
                3,
                13,
            ):  # code that asked for `current_thread()` made an entry, which stays
                entry = threading._active.get(get_ident())  # type: ignore[attr-defined]
                if isinstance(entry, threading._DummyThread):
                    del threading._active[get_ident()]  # type: ignore[attr-defined]
