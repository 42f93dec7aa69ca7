"""`multiprocessing.Pool` on drones: change one import of a program.

    from polycephaly.multiprocessing import Pool

The interface is the standard library's, over a `polycephaly.Pool`, which sends the calls. What is
better than there: a worker that dies is an error of its call, not a wait for ever; lambdas and
closures may be called; ``Pool.imap`` takes no more of its input than it needs.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, wait
from functools import partial
from multiprocessing import TimeoutError, cpu_count, current_process, freeze_support
from multiprocessing.pool import CLOSE, RUN, TERMINATE
from threading import TIMEOUT_MAX, RLock, Thread
from typing import Any, Generic, NoReturn, Self, TypeVar
from weakref import WeakSet

from .pool.map import Results
from .pool.pool import Pool as DronePool
from .pool.pool import dispatcher_of
from .promises.promise import Promise, fulfill, set_by_callback
from .runtime.checks import brief, check_at_least
from .runtime.clock import monotonic
from .wire.attempts import Failed, attempt, attempt_row
from .wire.functions import label
from .wire.output import Line

__all__ = [
    "AsyncResult",
    "IMapIterator",
    "Pool",
    "TimeoutError",
    "cpu_count",
    "current_process",
    "freeze_support",
]

T = TypeVar("T")

_NOTHING: Any = object()

Callback = Callable[[Any], object]


class AsyncResult(Generic[T]):
    """The result of ``Pool.apply_async``, ``Pool.map_async`` or ``Pool.starmap_async``.

    All methods may be called from any thread.
    """

    def __init__(self, promise: Promise[T]) -> None:
        self._promise = promise

    def get(self, timeout: float | None = None) -> T:
        """Return the result, or raise the error of the call.

        Parameters
        ----------
        timeout
            Seconds to wait. None: no limit.

        Raises
        ------
        multiprocessing.TimeoutError
            If the call has not ended by then.
        concurrent.futures.CancelledError
            If the pool was terminated before.
        """
        if timeout is not None:
            self.wait(timeout)
            if not self._promise.done():
                raise _late(timeout)
        try:
            return self._promise.result()
        except CancelledError as error:
            _explain(error)
            raise

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, or `timeout` seconds have passed."""
        wait([self._promise], timeout)

    def ready(self) -> bool:
        """Return whether the call has ended."""
        return self._promise.done()

    def successful(self) -> bool:
        """Return whether the call has ended without an error.

        Raises
        ------
        ValueError
            If the call has not ended.
        """
        if not self._promise.done():
            raise ValueError(f"{self!r} not ready")
        return not self._promise.cancelled() and self._promise.exception() is None


class IMapIterator(Iterator[T]):
    """The results of ``Pool.imap`` and ``Pool.imap_unordered``. Any thread may take the next."""

    def __init__(
        self,
        results: Results[Any],
        error_of: Callable[[Failed, int], BaseException],
        on_begin: Callable[[IMapIterator[Any]], object],
        on_end: Callable[[], object],
    ) -> None:
        self._results, self._error_of = results, error_of
        self._on_begin, self._on_end = on_begin, on_end
        self._lock = RLock()  # an input that reads these results gets an error, and does not hang
        self._batch: Iterator[Any] = iter(())  # values that came together
        self._count = 0
        self.has_ended = False

    def next(self, timeout: float | None = None) -> T:
        """Return the next result, or raise the error of its call; the calls after it go on.

        Parameters
        ----------
        timeout
            Seconds to wait. None: no limit.

        Raises
        ------
        multiprocessing.TimeoutError
            If the result is not there in time. It can be asked for again.
        StopIteration
            After the last result.
        """
        until = None if timeout is None else monotonic() + timeout
        limit = -1 if timeout is None else min(max(timeout, 0), TIMEOUT_MAX)
        if not self._lock.acquire(timeout=limit):  # another thread waits for a result
            raise _late(timeout)
        try:
            value = next(self._batch, _NOTHING)
            if value is _NOTHING:
                self._on_begin(self)
                value = self._take_value(timeout, until)
            index, self._count = self._count, self._count + 1
        except TimeoutError:
            raise
        except BaseException:  # the end, too
            self.has_ended = True
            self._on_end()
            raise
        finally:
            self._lock.release()
        if type(value) is Failed:
            raise self._error_of(value, index)
        return value  # type: ignore[no-any-return]

    __next__ = next

    def _take_value(self, timeout: float | None, until: float | None) -> Any:
        while True:
            if until is not None and not self._results.wait(until - monotonic()):
                raise _late(timeout)
            try:
                batch = self._results.take_batch()
            except CancelledError as error:
                _explain(error)
                raise
            if batch is None:
                raise StopIteration
            self._batch = iter(batch)
            for value in self._batch:
                return value


class Pool:
    """`multiprocessing.Pool`, whose workers are drones.

    Leaving a ``with`` block terminates the pool, as in the standard library.

    Parameters
    ----------
    processes
        Number of drones. None: as many as usable cores.
    initializer, initargs
        A callable that each drone calls first, and its arguments.
    maxtasksperchild
        Number of tasks after which a drone is replaced.
    **options
        Those of `polycephaly.Pool`, such as ``timeout``, ``retries`` or ``engine``. If `output` is
        not given, lines that drones print appear as they are, without the name of the drone.

    Raises
    ------
    ValueError
        If a number is out of range.
    TypeError
        If `initializer` is not callable, or there is no such option.

    Notes
    -----
    All methods may be called from any thread. As in the standard library, a call of `map` that
    raises does not stop the others: the error is raised when all have ended. A call that is lost
    with its drone, or exceeds a time limit, ends its `map` or `imap` at once. Chunks follow the
    measured time of the calls, unless a `chunksize` above 1 is given: 1 is the default of `imap`,
    and to send short calls one by one would only take longer.

    Examples
    --------
    >>> from polycephaly.multiprocessing import Pool
    >>> with Pool(2) as pool:
    ...     pool.map(abs, [-1, -2]), pool.starmap(pow, [(2, 3), (3, 2)])
    ([1, 2], [8, 9])
    """

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        maxtasksperchild: int | None = None,
        **options: Any,
    ) -> None:
        self._state = TERMINATE  # for `__del__`, if this fails
        if maxtasksperchild is not None and (
            not isinstance(maxtasksperchild, int) or maxtasksperchild <= 0
        ):
            raise ValueError(
                f"maxtasksperchild is a positive int or None, not {maxtasksperchild!r}"
            )
        if processes is not None:
            processes = check_at_least("processes", processes, 1)
        options.setdefault("output", _print_as_it_is)
        self._drones = DronePool(
            processes,
            initializer=initializer,
            initargs=tuple(initargs),
            max_tasks=maxtasksperchild,
            **options,
        )
        self._maps: set[Promise[None]] = set()  # the ends of those that go on
        self._imaps: WeakSet[IMapIterator[Any]] = WeakSet()
        # Of these, kept: those that nobody has begun to read, whose calls `join` sends.
        self._unread: set[IMapIterator[Any]] = set()
        self._state = RUN

    def apply(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
    ) -> T:
        """Return ``func(*args, **kwds)``, called by a drone."""
        self._check_running()
        return self._drones.doit(func, *args, **(kwds or {}))

    def apply_async(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[T]:
        """Have a drone call ``func(*args, **kwds)``.

        Parameters
        ----------
        callback, error_callback
            Called with the value, or with the error, before the result is ready, in a thread that
            may wait for calls without callbacks.
        """
        self._check_running()
        if kwds and "keep" in kwds:  # else it would be one of `Pool.promise`
            func, kwds = partial(func, **kwds), None
        promise: Promise[T] = self._drones.promise(func, *args, **(kwds or {}))
        if callback is not None or error_callback is not None:
            called: Promise[T] = Promise()
            set_by_callback(called, promise)
            promise.add_done_callback(partial(_settle, called, callback, error_callback))
            promise = called
        return AsyncResult(promise)

    def map(
        self, func: Callable[[Any], T], iterable: Iterable[Any], chunksize: int | None = None
    ) -> list[T]:
        """Return the list of the results of ``func(item)``."""
        return self._take_map(attempt, func, iterable, chunksize)

    def map_async(
        self,
        func: Callable[[Any], T],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[list[T]]:
        """Do as `map`, without waiting. The callbacks are those of `apply_async`."""
        return self._start_map(attempt, func, iterable, chunksize, callback, error_callback)

    def starmap(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
    ) -> list[T]:
        """Return the list of the results of ``func(*item)``."""
        return self._take_map(attempt_row, func, iterable, chunksize)

    def starmap_async(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback | None = None,
        error_callback: Callback | None = None,
    ) -> AsyncResult[list[T]]:
        """Do as `starmap`, without waiting. The callbacks are those of `apply_async`."""
        return self._start_map(attempt_row, func, iterable, chunksize, callback, error_callback)

    def imap(
        self, func: Callable[[Any], T], iterable: Iterable[Any], chunksize: int = 1
    ) -> IMapIterator[T]:
        """Return an iterator over the results of ``func(item)``.

        The input is taken only as far ahead as keeps the drones busy, so it may be endless.
        """
        return self._imap(func, iterable, chunksize, ordered=True)

    def imap_unordered(
        self, func: Callable[[Any], T], iterable: Iterable[Any], chunksize: int = 1
    ) -> IMapIterator[T]:
        """Return an iterator over the results of ``func(item)``, in the order of their arrival."""
        return self._imap(func, iterable, chunksize, ordered=False)

    def close(self) -> None:
        """Accept no more calls. The drones end when all calls have ended."""
        if self._state == RUN:
            self._state = CLOSE
            self._end_if_closed()

    def terminate(self) -> None:
        """Cancel all calls, also those that run, and end the drones."""
        self._state = TERMINATE
        self._unread.clear()
        self._drones.terminate_workers()
        self._drones.shutdown()

    def join(self) -> None:
        """Wait until the drones have ended, after `close` or `terminate`.

        Raises
        ------
        ValueError
            If the pool was not closed.
        """
        if self._state == RUN:
            raise ValueError("Pool is still running")
        wait(self._maps.copy())
        self._drones.shutdown()
        self._unread.clear()

    @property
    def _processes(self) -> int:
        """The number of drones. Many programs look for it under this name."""
        return dispatcher_of(self._drones).size

    def __enter__(self) -> Self:
        self._check_running()
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def __repr__(self) -> str:
        cls = type(self)
        return (
            f"<{cls.__module__}.{cls.__qualname__} state={self._state} pool_size={self._processes}>"
        )

    def __reduce__(self) -> NoReturn:
        raise NotImplementedError("pool objects cannot be passed between processes or pickled")

    def __del__(self) -> None:
        if self._state == RUN:
            message = f"unclosed running multiprocessing pool {self!r}"
            warnings.warn(message, ResourceWarning, source=self, stacklevel=2)

    def _check_running(self) -> None:
        if self._state != RUN:
            raise ValueError("Pool not running")

    def _map(
        self,
        call: Callable[..., Any],
        func: Callable[..., Any],
        items: Iterable[Any],
        chunksize: int | None,
        ordered: bool = True,
    ) -> Results[Any]:
        self._check_running()
        if not callable(func):
            raise TypeError(f"func is a callable, not {brief(func)}")
        size = None if chunksize == 1 else chunksize
        return self._drones.map(partial(call, func), items, chunksize=size, ordered=ordered)

    def _imap(
        self, func: Callable[[Any], T], iterable: Iterable[Any], chunksize: int, *, ordered: bool
    ) -> IMapIterator[T]:
        check_at_least("chunksize", chunksize, 1)
        results = self._map(attempt, func, iterable, chunksize, ordered)
        error_of = partial(self._error, label(func))
        iterator: IMapIterator[T] = IMapIterator(
            results, error_of, self._unread.discard, self._end_if_closed
        )
        self._imaps.add(iterator)
        self._unread.add(iterator)
        return iterator

    def _take(self, results: Results[Any], name: str) -> list[Any]:
        values = list(results)
        for index, value in enumerate(values):
            if type(value) is Failed:
                raise self._error(name, value, index)
        return values

    def _take_map(
        self,
        call: Callable[..., Any],
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None,
    ) -> list[Any]:
        ended = self._begin_map()
        try:
            return self._take(self._map(call, func, list(iterable), chunksize), label(func))
        finally:
            self._end_map(ended)

    def _start_map(
        self,
        call: Callable[..., Any],
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None,
        callback: Callback | None,
        error_callback: Callback | None,
    ) -> AsyncResult[list[Any]]:
        """Take all results in a thread, which ends with them."""
        taken: Promise[list[Any]] = Promise()
        called: Promise[list[Any]] = Promise()
        set_by_callback(called, taken)
        taken.add_done_callback(partial(_settle, called, callback, error_callback))
        name = label(func)
        ended = self._begin_map()
        try:
            results = self._map(call, func, list(iterable), chunksize)

            def take() -> None:
                try:
                    values = self._take(results, name)
                except BaseException as error:
                    taken.set_exception(error)
                else:
                    taken.set_result(values)
                finally:
                    self._end_map(ended)

            Thread(target=take, name=f"map({name}, ...)", daemon=True).start()
        except BaseException:
            self._end_map(ended)
            raise
        return AsyncResult(called)

    def _begin_map(self) -> Promise[None]:
        """Note that a `map` goes on: its calls are sent as its results are taken, so `close` ends
        the drones only after it.
        """
        ended: Promise[None] = Promise()
        self._maps.add(ended)
        return ended

    def _end_map(self, ended: Promise[None]) -> None:
        self._maps.discard(ended)
        fulfill(ended)
        self._end_if_closed()

    def _error(self, name: str, failed: Failed, index: int) -> BaseException:
        dispatcher, error = dispatcher_of(self._drones), failed.error()
        dispatcher.explain(error)
        dispatcher.note_failure(name, index, None, error)
        return error

    def _end_if_closed(self) -> None:
        """End the drones after `close`, unless a `map` or `imap` has more of its input to send."""
        if self._state == CLOSE and not self._maps and all(each.has_ended for each in self._imaps):
            self._drones.shutdown(wait=False)


def _settle(
    called: Promise[Any],
    callback: Callback | None,
    error_callback: Callback | None,
    promise: Promise[Any],
) -> None:
    """Settle `called` as `promise`, after the callback."""
    error: BaseException | None
    try:
        error = promise.exception()
    except BaseException as cancelled:
        error = cancelled
    try:
        if error is None:
            if callback is not None:
                callback(promise.result())
        elif error_callback is not None:
            error_callback(error)
    finally:
        if error is None:
            called.set_result(promise.result())
        else:
            called.set_exception(error)


def _late(timeout: float | None) -> TimeoutError:
    return TimeoutError(f"the result did not come within {timeout} s")


def _explain(error: CancelledError) -> None:
    """Give `error` its reason if it is the cancellation by `Pool.terminate`."""
    if not error.args and error.__cause__ is None:  # else it came from the called function
        error.args = (
            "the pool was terminated before this call had ended. The end of a `with` block"
            " terminates its pool: take the result within the block, or end the block with"
            " pool.close() and pool.join()",
        )


def _print_as_it_is(line: Line) -> None:
    print(line.text, file=getattr(sys, line.stream), flush=True)
