"""`par` and `map`: run many green threads at once, from plain code and from green code.

    items ──next()──> width workers ──> results, in the order of the items

Plain code waits and gets a list. A coroutine, or asyncio code, gets an awaitable.
"""

from __future__ import annotations

from asyncio import CancelledError as AsyncioCancelled
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError
from operator import length_hint
from typing import Any, TypeVar, overload

from ..errors import ChannelClosed, stop_as_error
from ..promises.promise import Promise
from ..runtime.checks import brief, check_count, check_iterables
from ..runtime.clock import monotonic
from ..runtime.coroutines import is_coroutine_function
from ..runtime.progress import Progress, total_of
from ..timeline.event_log import MIN_EVENT_SECONDS, event_log
from .channel import Channel
from .collected import Collected, awaiting, run_all, run_workers
from .over import Spread, par_over
from .run import in_asyncio, run
from .scheduler import scheduler
from .spawning import spawn
from .thread import GreenThread, qualname

T = TypeVar("T")
U = TypeVar("U")


class ListOrAwaitable(list[T], Awaitable[list[T]], AsyncIterable[T]):
    """The result type of `map` and `par` for type checkers, which cannot know the kind of caller.
    Plain code gets a list. A coroutine gets an awaitable of the list or, from `map`, also an
    async iterable.
    """


MAX_UNREAD_PER_WORKER = 2  # results per worker that may wait for the reader


@overload
def par(*fns: Callable[[], Awaitable[T]] | Coroutine[Any, Any, T]) -> ListOrAwaitable[T]: ...
@overload
def par(*fns: Callable[[], T]) -> ListOrAwaitable[T]: ...
@overload
def par(*fns: Any, over: Any = None) -> ListOrAwaitable[Any]: ...


def par(*fns: Any, over: Any = None) -> Any:
    """Run all of `fns` as green threads until the last has ended (ProcessJ's par).

    The first error cancels the others. In plain code, `par` waits by itself. In a coroutine, also
    one of asyncio, use ``await green.par(...)``.

    Parameters
    ----------
    *fns : callable or coroutine
        Coroutine functions, plain functions, or coroutines.
    over : Pool, optional
        Spread the functions over the drones of this pool, neighbours in one drone if possible. Then
        `fns` must be functions; use `partial` for their arguments. Channels connect the functions
        as they do in one process.

    Returns
    -------
    list
        The values, in the order of `fns`.

    Raises
    ------
    ExceptionGroup
        All errors, if a function fails.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def one(): return 1
    >>> green.par(one, lambda: 2)
    [1, 2]
    """
    return _run_or_return(lambda: run_all(fns) if over is None else par_over(fns, over))


@overload
def map(
    fn: Callable[[T], Awaitable[U]],
    items: Iterable[T],
    width: int = 13,
    *,
    progress: bool = False,
    over: Any = None,
) -> ListOrAwaitable[U]: ...
@overload
def map(
    fn: Callable[[T], U],
    items: Iterable[T],
    width: int = 13,
    *,
    progress: bool = False,
    over: Any = None,
) -> ListOrAwaitable[U]: ...


def map(
    fn: Callable[[T], Any],
    items: Iterable[T],
    width: int = 13,
    *,
    progress: bool = False,
    over: Any = None,
) -> Any:
    """Apply `fn` to all items in `width` green threads.

    Plain code waits and gets a list. In a coroutine, ``await`` returns the list, and ``async for``
    yields the values one by one as they become ready. At most about two values per green thread
    then wait for the reader. The first error cancels the rest and is raised.

    Parameters
    ----------
    fn : callable
        A coroutine function, or a plain function, which runs on native threads.
    items : iterable
        The arguments.
    width : int
        Number of green threads.
    progress : bool
        If true, show a progress bar on stderr.
    over : Pool, optional
        Run `width` green threads in each drone of this pool. Any free one takes the next item.

    Returns
    -------
    list or awaitable
        The values, in the order of the items.

    Raises
    ------
    ValueError
        If `width` is less than 1.

    Examples
    --------
    >>> from polycephaly import green
    >>> green.map(lambda n: n * n, range(5), width=2)
    [0, 1, 4, 9, 16]
    """
    width = check_count("the width is", "green thread", width)
    if not callable(fn):
        raise TypeError(f"map takes a function, not {brief(fn)}")
    check_iterables("map", [items])
    bar = Progress(qualname(fn), total_of([items])) if progress else None
    if over is not None:
        mapped: Collected = Spread(fn, items, width, over, bar)
    else:
        width = min(width, max(1, length_hint(items, width)))
        mapped = Mapped(fn, iter(items), width, bar)
    return mapped if scheduler.in_step() or in_asyncio() else run(mapped.collect)


def _run_or_return(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run the coroutine in plain code. In a coroutine, return it; in asyncio code, return one that
    spawns it.
    """
    if scheduler.in_step():
        return make()
    return _spawn_and_await(make) if in_asyncio() else run(make())


async def _spawn_and_await(make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return await spawn(make())


class Mapped(Collected):
    """The result of `map` in a coroutine. The workers share the iterator of the items."""

    def _on_call_end(self, thread: Any, item: Any, began: float, failed: bool) -> None:
        # Foreign calls put themselves into the event log.
        if monotonic() - began >= MIN_EVENT_SECONDS and is_coroutine_function(self._fn):
            event_log.add_call(thread, self._fn, (item,), began, failed)
        if self._progress is not None:
            self._progress.step()

    async def collect(self) -> list[Any]:
        self._begin()
        apply = awaiting(self._fn)
        slots: list[list[Any]] = []
        scheduler.current.spawned_at = None  # not a thread of the user's: not in the event log

        async def task() -> None:
            thread = scheduler.current
            event_log.number_of(thread)  # number the threads in order of starting
            try:
                for item in self._items:
                    slot: list[Any] = []
                    slots.append(slot)
                    began = monotonic()
                    try:
                        slot.append(await apply(item))
                    finally:
                        self._on_call_end(thread, item, began, not slot)
            finally:
                del thread  # no cycle through the traceback of its error

        try:
            await run_workers(task, self._width, f"map {qualname(self._fn)}")
        finally:
            if self._progress is not None:
                self._progress.close()
        if not all(slots):
            raise self._cancelled_error()
        return [slot[0] for slot in slots]

    def _cancelled_error(self) -> CancelledError:
        return CancelledError(f"a call of {qualname(self._fn)} was cancelled")

    def _error_for_reader(self, error: BaseException, index: int) -> BaseException:
        if isinstance(error, AsyncioCancelled):
            return self._cancelled_error()
        if isinstance(error, StopAsyncIteration):
            return stop_as_error(error, self._place_of(index))
        return error

    def __aiter__(self) -> AsyncIterator[Any]:
        """Start workers, each of which takes an item and puts a slot for its value into the
        channel.
        """
        self._begin()
        apply = awaiting(self._fn)
        slots: Channel[_Slot] = Channel(self._width * MAX_UNREAD_PER_WORKER)
        busy_workers = self._width
        taken = 0

        async def work() -> None:
            nonlocal busy_workers, slots, taken
            thread = scheduler.current
            event_log.number_of(thread)
            try:
                for item in self._items:
                    slot, index = _Slot(), taken
                    taken += 1
                    # In the step that took the item, so that slots are in the order of the items.
                    await slots.send(slot)
                    began = monotonic()
                    try:
                        slot.set_result(await apply(item))
                    except BaseException as error:
                        # The reader, which is not cancelled, gets an error like any other.
                        slot.set_exception(self._error_for_reader(error, index))
                        if not isinstance(error, Exception):
                            raise
                    finally:
                        self._on_call_end(thread, item, began, slot.exception() is not None)
                        del slot  # no cycle through the traceback of its error
            except Exception as error:  # raised by the items' iterator
                if isinstance(error, StopAsyncIteration):
                    error = stop_as_error(error, f"the input of {self._place_of(taken)}")
                await slots.send(_Slot.of_error(error))
            finally:
                del thread  # as in `collect`
                busy_workers -= 1
                if not busy_workers:
                    slots.close()
                    del slots  # the errors of values that were not read have this frame
                    if self._progress is not None:
                        self._progress.close()

        name = f"map {qualname(self._fn)}"
        return _Values(slots, [spawn(work, name=name) for _ in range(self._width)])


class _Slot(Promise[Any]):
    _settled_from_outside = False
    _cancels_with_waiter = False

    @classmethod
    def of_error(cls, error: BaseException) -> _Slot:
        slot = cls()
        slot.set_exception(error)
        return slot


class _Values(AsyncIterator[Any]):
    """The reader's side of an ``async for``. The workers end when it is dropped or an error was
    raised.
    """

    def __init__(self, slots: Channel[_Slot], workers: list[GreenThread[Any]]) -> None:
        self._slots = slots
        self._workers = workers
        self._unread: deque[_Slot] = deque()  # of readers whose wait was cancelled

    async def __anext__(self) -> Any:
        try:
            slot = self._unread.popleft() if self._unread else await self._slots.receive()
        except ChannelClosed:
            raise StopAsyncIteration from None
        try:
            return await slot
        except BaseException as error:
            if slot.done() and slot.exception() is error:
                self._cancel_workers()
            else:
                self._unread.append(slot)
            raise
        finally:
            del slot  # no cycle through the traceback of its error

    def _cancel_workers(self) -> None:
        for worker in self._workers:
            worker.cancel()

    __del__ = _cancel_workers
