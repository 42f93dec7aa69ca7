"""Lock, Semaphore, Event and Barrier for green threads.

All are fair: waiting threads are served in order of arrival. Their state belongs to the scheduler's
owner thread, so no other code touches it between two awaits. Plain code uses ``with`` where a class
supports it, or ``green.run(lock.acquire)``. Any thread may call the methods that only wake others.
"""

from __future__ import annotations

from collections.abc import Awaitable
from functools import partial
from typing import Any, NoReturn

from ..runtime.checks import check_at_least, check_count
from .parking import Parking, parks
from .run import forbid_in_step, wait_in_proxy
from .scheduler import scheduler
from .waiting import WaitQueue


def _wake_all(queue: WaitQueue[Parking]) -> None:
    while queue:
        queue.popleft().wake()


def _describe_waiting(queue: WaitQueue[Parking]) -> str:
    return f", {len(queue)} waiting" if queue else ""


class _QueuedWait(Parking):
    """A wait in the queue of a primitive, unless that lets the thread pass at once. This is decided
    in a step of its own, made at the await.
    """

    __slots__ = ("primitive", "queue")

    def __init__(self, primitive: Any) -> None:
        super().__init__()
        self.primitive = primitive

    @property
    def name(self) -> str:
        return f"{self.primitive._kind}.{self.primitive._operation}"

    def enter(self) -> bool:
        # Before `_try_pass`, because `Event.set` in another thread replaces the queue.
        self.queue: WaitQueue[Parking] = self.primitive._queue
        if self.primitive._try_pass():
            return False
        self.queue.append(self)
        return True

    def leave(self) -> None:
        self.queue.remove(self)


class _OfOneProcess:
    """An object whose waiters are all in this process."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a green.{type(self).__name__} is for the green threads of one process: make it where "
            "it is used, or use a green.Channel between processes"
        )


class Semaphore(_OfOneProcess):
    """A semaphore, which lets in a limited number of holders at a time.

    Green threads use ``async with``, plain code uses ``with``.

    Parameters
    ----------
    value : int
        Number of holders to let in.

    Raises
    ------
    ValueError
        If `value` is negative.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def main():
    ...     two = green.Semaphore(2)
    ...     async with two, two:
    ...         return two.value
    >>> green.run(main)
    0
    """

    _kind = "Semaphore"
    _operation = "acquire"

    def __init__(self, value: int = 1) -> None:
        self._value = check_count("a semaphore lets in", "green thread", value, 0)
        self._queue: WaitQueue[Parking] = WaitQueue()

    @property
    def value(self) -> int:
        """Number of holders that could be let in now."""
        return self._value

    @parks
    def acquire(self) -> Awaitable[None]:
        """Park until the caller is let in."""
        return _QueuedWait(self)

    def __repr__(self) -> str:
        return f"<Semaphore {self._value}{_describe_waiting(self._queue)} at {id(self):#x}>"

    def _try_pass(self) -> bool:
        if self._value > 0:  # 0 while threads wait, so that none is overtaken
            self._value -= 1
            return True
        return False

    def release(self) -> None:
        """Let in the first waiter, or raise `value` by one. Any thread may call this."""
        scheduler.call_or_post(self._release)

    def _release(self) -> None:
        if self._queue:
            self._queue.popleft().wake()
        else:
            self._value += 1

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self.release()

    def __enter__(self) -> None:
        """Acquire in plain code, blocking only this native thread. Raise `RuntimeError` in a
        coroutine.
        """
        statement = f"with {self._kind.lower()}"
        forbid_in_step(f"`{statement}`", f"async {statement}")
        wait_in_proxy(self.acquire, (), f"{self._kind}.acquire", undo=lambda _: self.release())

    def __exit__(self, *exc: object) -> None:
        self.release()


class Lock(Semaphore):
    """A lock with one holder at a time.

    Green threads use ``async with lock``, plain code uses ``with lock``.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def main():
    ...     lock = green.Lock()
    ...     async with lock:
    ...         return lock.locked()
    >>> green.run(main)
    True
    """

    _kind = "Lock"

    def __init__(self) -> None:
        super().__init__(1)
        self._held = False

    def locked(self) -> bool:
        """Return True if the lock is held."""
        return self._held

    def __repr__(self) -> str:
        state = "held" if self._held else "free"
        return f"<Lock {state}{_describe_waiting(self._queue)} at {id(self):#x}>"

    def _try_pass(self) -> bool:
        if self._value:
            self._value = 0
            self._held = True
            return True
        return False

    def _release(self) -> None:
        self._held = bool(self._queue)
        super()._release()

    def release(self) -> None:
        """Release the lock. Any thread may call this.

        Raises
        ------
        RuntimeError
            If the lock is not held.
        """
        held, self._held = self._held, False  # at once, though plain code only posts the rest
        if not held:
            raise RuntimeError("a lock was released that was not held")
        super().release()


class Event(_OfOneProcess):
    """An event that happens once, until `clear`, and then lets all its waiters go on.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def main():
    ...     event = green.Event()
    ...     waiter = green.spawn(event.wait)
    ...     event.set()
    ...     await waiter
    ...     return event.is_set()
    >>> green.run(main)
    True
    """

    _kind = "Event"
    _operation = "wait"

    def __init__(self) -> None:
        self._set = False
        self._queue: WaitQueue[Parking] = WaitQueue()

    def is_set(self) -> bool:
        return self._set

    @parks
    def wait(self) -> Awaitable[None]:
        """Park until the event is set; return at once if it is."""
        return _QueuedWait(self)

    def _try_pass(self) -> bool:
        # Called when the thread has read the queue. `set` replaces the queue before it sets the
        # flag, and then wakes all threads of the old queue. So a thread that misses the flag is in
        # a queue that this `set`, or a later one, wakes.
        return self._set

    def set(self) -> None:
        """Set the event and wake all its waiters. Any thread may call this."""
        fresh: WaitQueue[Parking] = WaitQueue()
        # No call from here to the flag: a later waiter finds the event set or, after `clear`, the
        # new queue.
        queue = self._queue
        self._queue = fresh
        self._set = True
        scheduler.call_or_post(partial(_wake_all, queue))

    def clear(self) -> None:
        self._set = False

    def __repr__(self) -> str:
        state = "set" if self._set else "not set"
        return f"<Event {state}{_describe_waiting(self._queue)} at {id(self):#x}>"


class Barrier(_OfOneProcess):
    """A barrier, which holds each of `n` enrolled green threads at `sync` until all have arrived.

    After that, the barrier can be used again.

    Parameters
    ----------
    n : int
        Number of enrolled green threads.

    Raises
    ------
    ValueError
        If `n` is less than 1.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def main():
    ...     barrier = green.Barrier(2)
    ...     return sorted(await green.par(barrier.sync, barrier.sync))
    >>> green.run(main)
    [0, 1]
    """

    _kind = "Barrier"
    _operation = "sync"

    def __init__(self, n: int) -> None:
        self._enrolled = check_count("a barrier is for", "green thread", n)
        self._queue: WaitQueue[Parking] = WaitQueue()

    @property
    def enrolled(self) -> int:
        """Number of enrolled green threads."""
        return self._enrolled

    @property
    def waiting(self) -> int:
        """Number of green threads that wait at `sync`."""
        return len(self._queue)

    def __repr__(self) -> str:
        return f"<Barrier of {self._enrolled}{_describe_waiting(self._queue)} at {id(self):#x}>"

    def enroll(self, n: int = 1) -> None:
        """Enroll `n` more green threads. Any thread may call this.

        If the caller is not enrolled, the call may come too late.

        Raises
        ------
        ValueError
            If `n` is less than 1.
        """
        self._change_enrolled(check_at_least("the number of green threads", n, 1))

    def resign(self, n: int = 1) -> None:
        """Remove `n` green threads from the barrier. Any thread may call this.

        If all the others wait already, they go on.

        Raises
        ------
        ValueError
            If `n` is less than 1, or fewer than `n` of the enrolled threads are not waiting at
            `sync`.
        """
        self._change_enrolled(-check_at_least("the number of green threads", n, 1))

    def _change_enrolled(self, n: int) -> None:
        if self._enrolled + n < self.waiting:
            raise ValueError(
                f"{-n} green threads cannot resign from a barrier of {self._enrolled}, of which "
                f"{self.waiting} wait"
            )
        self._enrolled += n
        scheduler.call_or_post(self._release_if_complete)

    @parks
    def sync(self) -> Awaitable[int]:
        """Wait for the others.

        Returns
        -------
        int
            The caller's place in the order of arrival, from 0.

        Raises
        ------
        RuntimeError
            If no thread is enrolled.
        """
        if not self._enrolled:
            raise RuntimeError("no green thread is enrolled in this barrier: call enroll first")
        return _QueuedWait(self)

    def _try_pass(self) -> bool:
        others = self.waiting
        if others + 1 < self._enrolled:
            # The place is assigned at the end, because threads that came earlier may be cancelled.
            return False
        self._release_all()
        raise StopIteration(others)  # the value of the await

    def _release_if_complete(self) -> None:
        if self.waiting and self.waiting >= self._enrolled:
            self._release_all()

    def _release_all(self) -> None:
        for place in range(self.waiting):
            self._queue.popleft().wake(place)
