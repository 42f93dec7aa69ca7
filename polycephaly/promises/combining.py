"""Several promises as one: `gather`, `race` and `as_completed`.

    settler of one ──> one_settled, its hook ──> the promise that stands for all, the first, or the next

Of the threads that settle the parts, any may be the last, or the first: who that is, an atomic step
decides (a pop, a `next`, a `_settle`, of which only the first has an effect)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from time import monotonic
from typing import Any, TypeVar, overload

from .promise import CANCELLED, FINISHED, Promise, break_off, outcome

__all__ = ["as_completed", "gather", "race"]

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
F = TypeVar("F", bound="Future[Any]")


@overload
def gather(first: Future[T1], second: Future[T2], /) -> Promise[list[T1 | T2]]: ...
@overload
def gather(
    first: Future[T1], second: Future[T2], third: Future[T3], /
) -> Promise[list[T1 | T2 | T3]]: ...
@overload
def gather(*promises: Future[T]) -> Promise[list[T]]: ...


def gather(*promises: Future[Any]) -> Promise[list[Any]]:
    """A promise of the list of values, in the order given; the first error rejects it.

    Cancelling it cancels all of them, as `asyncio.gather` does. Raises `TypeError` for what is no
    promise.

    >>> import polycephaly as poly
    >>> a, b = poly.Promise(), poly.Promise()
    >>> both = poly.gather(a, b)
    >>> b.set_result(2); a.set_result(1)
    >>> both.value
    [1, 2]
    """
    _check("gather", promises)
    everyone = _Gathered(promises)
    waiting_for = list(promises)

    def one_settled(future: Future[Any]) -> None:
        if future.cancelled():
            everyone._settle(FINISHED, None, CancelledError())
        elif (error := future.exception()) is not None:
            everyone._settle(FINISHED, None, error)
        else:
            waiting_for.pop()  # atomic; which one does not matter, only how many are left
            if not waiting_for:
                try:
                    values = [p.result() for p in promises]
                except BaseException as lost:  # a value that lay elsewhere
                    everyone._settle(FINISHED, None, lost)
                else:
                    everyone._settle(FINISHED, values, None)

    if not promises:
        everyone._settle(FINISHED, [], None)
    for each in promises:
        each.add_done_callback(one_settled)
    return everyone


@overload
def race(first: Future[T1], second: Future[T2], /) -> Promise[T1 | T2]: ...
@overload
def race(*promises: Future[T]) -> Promise[T]: ...


def race(*promises: Future[Any]) -> Promise[Any]:
    """A promise that settles as the first of them does. The others are left alone.

    Raises `ValueError` when there is nobody to race, `TypeError` for what is no promise.

    >>> import polycephaly as poly
    >>> slow, quick = poly.Promise(), poly.Promise()
    >>> first = poly.race(slow, quick)
    >>> quick.set_result("quick")
    >>> first.value
    'quick'
    """
    _check("race", promises)
    if not promises:
        raise ValueError("race() of no promises would never settle")
    first: Promise[Any] = Promise()
    first._stands_for = promises

    def one_settled(future: Future[Any]) -> None:
        first._stands_for = ()
        if future.cancelled():
            first._settle(CANCELLED, None, None)
        else:
            first._settle(FINISHED, *outcome(future))
        for loser in promises:
            if isinstance(loser, Promise):
                loser._unhook(one_settled)

    for each in promises:
        each.add_done_callback(one_settled)
    return first


class as_completed(Iterator[F], AsyncIterator[F]):
    """Iterates over promises in the order in which they settle; with ``async for`` too.

    `timeout` (seconds, for the whole iteration) raises `TimeoutError` from the iterator, which ends
    there; plain iteration only.

    >>> import polycephaly as poly
    >>> a, b = poly.Promise(), poly.Promise()
    >>> b.set_result("b"); a.set_result("a")
    >>> [p.value for p in poly.as_completed([a, b])]
    ['a', 'b']
    """

    def __init__(self, promises: Iterable[F], timeout: float | None = None) -> None:
        self._open: dict[F, None] = {}
        everyone = tuple(dict.fromkeys(promises))
        _check("as_completed", everyone)
        # One place a finisher: the k-th that settles fills the k-th place.
        places: list[Promise[F]] = [Promise() for _ in everyone]
        self._places = places
        self._open = still_open = dict.fromkeys(everyone)  # in their order
        self._next = 0
        self._end = None if timeout is None else monotonic() + timeout
        turn = itertools.count()

        def one_settled(
            future: Any,
        ) -> None:  # does not know the iterator, which may be dropped before
            still_open.pop(future, None)
            places[next(turn)]._settle(FINISHED, future, None)

        self._hook = one_settled
        for each in everyone:
            each.add_done_callback(one_settled)

    def _let_go(self) -> None:
        """Nobody waits any more for those that are open: they keep nothing of this."""
        for each in list(self._open):
            if isinstance(each, Promise):
                each._unhook(self._hook)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._let_go()

    def __iter__(self) -> as_completed[F]:
        return self

    def __next__(self) -> F:
        if self._next == len(self._places):
            raise StopIteration
        left = None if self._end is None else max(0.0, self._end - monotonic())
        try:
            future = self._places[self._next].result(left)
        except KeyboardInterrupt:
            break_off(self._open)
            raise
        except TimeoutError:
            self._let_go()
            raise
        self._next += 1
        return future

    def __aiter__(self) -> as_completed[F]:
        return self

    async def __anext__(self) -> F:
        if self._next == len(self._places):
            raise StopAsyncIteration
        place = self._places[self._next]
        self._next += 1
        return await place


class _Gathered(Promise[list[Any]]):
    """Cancelling it cancels all that it gathers."""

    _can_be_interrupted = True

    def __init__(self, promises: tuple[Future[Any], ...]) -> None:
        super().__init__()
        self._promises = promises

    def _withdraw(self) -> None:
        for each in reversed(self._promises):  # the last first, as in `break_off`
            each.cancel()

    def _waits_for(self) -> Iterable[Future[Any]]:
        return self._promises

    def _break_off(self) -> None:
        self.cancel()

    def running(self) -> bool:
        return any(each.running() for each in self._promises)


def _check(what: str, promises: Iterable[object]) -> None:
    for each in promises:
        if not isinstance(each, Future):
            raise TypeError(f"{what}() takes promises, not {each!r}")
