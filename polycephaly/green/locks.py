"""Lock, Semaphore, Event and Barrier for green threads.

All are fair: waiting threads are served in order of arrival. Their state belongs to the scheduler's
owner thread, so no other code touches it between two awaits. Plain code uses ``with`` where a class
supports it, or ``green.run(lock.acquire)``. Any thread may call the methods that only wake others.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from ..promises.promise import Promise
from ..runtime.deferred_sigint import DeferredSigint
from .parking import Parking, parks
from .scheduler import scheduler
from .thread import GreenThread, start
from .waiting import WaitQueue

__all__ = ["Barrier", "Event", "Lock", "Semaphore"]


class _Line:
    """A queue of waiting green threads."""

    __slots__ = ("threads",)

    def __init__(self) -> None:
        self.threads: WaitQueue[GreenThread[Any]] = WaitQueue()

    def let(self, value: Any = None) -> None:
        """Wake the first thread in the queue; its await returns `value`."""
        thread = self.threads.popleft()
        thread._value = value
        scheduler.ready.append(thread)

    def let_all(self) -> None:
        while self.threads:
            self.let()


def _waiting(line: _Line) -> str:
    return f", {len(line.threads)} waiting" if line.threads else ""


class _InLine(Parking):
    """A wait in a queue. `enter` first checks whether the thread has to wait at all. That check is
    a step of its own, made at the await."""

    __slots__ = ("line", "what")
    line: _Line

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def stand(self, thread: GreenThread[Any]) -> bool:
        self.line = self.what._line
        self.line.threads.append(thread)
        return True

    def leave(self) -> None:
        assert self.thread is not None
        self.line.threads.remove(self.thread)


class Semaphore:
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

    _what = "Semaphore"

    class _Acquire(_InLine):
        __slots__ = ()
        name = "Semaphore.acquire"
        what: Semaphore

        def enter(self, thread: GreenThread[Any]) -> bool:
            return not self.what._let_in() and self.stand(thread)

    def __init__(self, value: int = 1) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"a semaphore lets in a number of green threads, not {value!r}")
        if value < 0:
            raise ValueError(f"a semaphore lets in 0 or more, not {value!r}")
        self._value = value
        self._line = _Line()

    @property
    def value(self) -> int:
        """Number of holders that could be let in now."""
        return self._value

    @parks
    def acquire(self) -> Awaitable[None]:
        """Park until the caller is let in."""
        return self._Acquire(self)

    def __repr__(self) -> str:
        return f"<Semaphore {self._value}{_waiting(self._line)} at {id(self):#x}>"

    def _let_in(self) -> bool:
        if self._value > 0:  # 0 while threads wait, so that none is overtaken
            self._value -= 1
            return True
        return False

    def release(self) -> None:
        """Let in the first waiter, or raise `value` by one. Any thread may call this."""
        if scheduler.in_step():
            self._release()
        else:
            scheduler.post(self._release)

    def _release(self) -> None:
        if self._line.threads:
            self._line.let()
        else:
            self._value += 1

    async def __aenter__(self) -> None:
        await self.acquire()

    async def __aexit__(self, *exc: object) -> None:
        self.release()

    def __enter__(self) -> None:
        """Acquire in plain code, blocking only this native thread. Raise `RuntimeError` in a
        coroutine."""
        if scheduler.in_step():
            what = f"with {self._what.lower()}"
            raise RuntimeError(
                f"`{what}` blocks, and would stop every green thread here: use `async {what}`"
            )
        proxy = None
        try:
            with DeferredSigint():
                # Ctrl-C comes before the start, or when the proxy can be cancelled.
                proxy = start(self.acquire, (), name=f"{self._what}.acquire")
            proxy.result()
        except BaseException:
            if proxy is not None:
                proxy.cancel()
                proxy._hook(self._undo)
            raise

    def _undo(self, acquiring: Promise[Any]) -> None:
        """Release if the caller is gone that was let in."""
        if not acquiring.cancelled() and acquiring.exception() is None:
            self.release()

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

    _what = "Lock"

    class _Acquire(Semaphore._Acquire):
        __slots__ = ()
        name = "Lock.acquire"

    def __init__(self) -> None:
        super().__init__(1)
        self._held = False

    def locked(self) -> bool:
        """Return True if the lock is held."""
        return self._held

    def __repr__(self) -> str:
        return f"<Lock {'held' if self._held else 'free'}{_waiting(self._line)} at {id(self):#x}>"

    def _let_in(self) -> bool:
        if self._value:
            self._value = 0
            self._held = True
            return True
        return False

    def _release(self) -> None:
        self._held = bool(self._line.threads)
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
            raise RuntimeError("a lock was released that nobody held")
        super().release()


class Event:
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

    class _Wait(_InLine):
        __slots__ = ()
        name = "Event.wait"
        what: Event

        def enter(self, thread: GreenThread[Any]) -> bool:
            # Read the queue first, then the flag. `set` replaces the queue before it sets the flag,
            # and then wakes all threads of the old queue. So a thread that misses the flag is in a
            # queue that this `set`, or a later one, wakes.
            self.line = line = self.what._line
            if self.what._set:
                return False
            line.threads.append(thread)
            return True

    def __init__(self) -> None:
        self._set = False
        self._line = _Line()

    def is_set(self) -> bool:
        return self._set

    @parks
    def wait(self) -> Awaitable[None]:
        """Park until the event is set; return at once if it is."""
        return self._Wait(self)

    def set(self) -> None:
        """Set the event and wake all its waiters. Any thread may call this."""
        fresh = _Line()
        # No call from here to the flag: a later waiter finds the event set or, after `clear`, the
        # new queue.
        line = self._line
        self._line = fresh
        self._set = True
        if scheduler.in_step():
            line.let_all()
        else:
            scheduler.post(line.let_all)

    def clear(self) -> None:
        self._set = False

    def __repr__(self) -> str:
        return f"<Event {'set' if self._set else 'not set'}{_waiting(self._line)} at {id(self):#x}>"


def _at_least_one(n: int) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"a number of green threads from 1 on is needed, not {n!r}")
    return n


class Barrier:
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

    class _Sync(_InLine):
        __slots__ = ()
        name = "Barrier.sync"
        what: Barrier

        def enter(self, thread: GreenThread[Any]) -> bool:
            others = self.what.waiting
            if others + 1 < self.what._enrolled:
                # The place is assigned at the end, because threads that came earlier may be
                # cancelled.
                return self.stand(thread)
            self.what._let_all()
            raise StopIteration(others)  # the value of the await

    def __init__(self, n: int) -> None:
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"a barrier is for a number of green threads, not {n!r}")
        if n < 1:
            raise ValueError(f"a barrier of {n} would hold nobody; 1 is the least")
        self._enrolled = n
        self._line = _Line()

    @property
    def enrolled(self) -> int:
        """Number of enrolled green threads."""
        return self._enrolled

    @property
    def waiting(self) -> int:
        """Number of green threads that wait at `sync`."""
        return len(self._line.threads)

    def __repr__(self) -> str:
        return f"<Barrier of {self._enrolled}{_waiting(self._line)} at {id(self):#x}>"

    def enroll(self, n: int = 1) -> None:
        """Enroll `n` more green threads. Any thread may call this.

        If the caller is not enrolled, the call may come too late.

        Raises
        ------
        ValueError
            If `n` is less than 1.
        """
        self._change(_at_least_one(n))

    def resign(self, n: int = 1) -> None:
        """Remove `n` green threads from the barrier. Any thread may call this.

        If all the others wait already, they go on.

        Raises
        ------
        ValueError
            If `n` is less than 1, or fewer than `n` of the enrolled threads are not waiting at
            `sync`.
        """
        self._change(-_at_least_one(n))

    def _change(self, n: int) -> None:
        if self._enrolled + n < self.waiting:
            raise ValueError(
                f"{-n} cannot resign from a barrier of {self._enrolled} of which {self.waiting} wait"
            )
        self._enrolled += n
        if scheduler.in_step():
            self._look()
        else:
            scheduler.post(self._look)

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
            raise RuntimeError("nobody is enrolled in this barrier: enroll first")
        return self._Sync(self)

    def _look(self) -> None:
        if self.waiting and self.waiting >= self._enrolled:
            self._let_all()

    def _let_all(self) -> None:
        for place in range(self.waiting):
            self._line.let(place)
