"""Combine several promises into one: `gather`, `race` and `as_completed`.

    settler of one promise ──> one_settled, its hook ──> the combined promise

Any of the threads that settle the promises may be the first or the last. An atomic step decides
which one: a pop, a `next`, or a `_settle`, of which only the first has an effect.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, TypeVar, overload

from ..runtime.checks import brief, check_seconds
from ..runtime.clock import monotonic
from .forgotten import shown_as_promise
from .promise import (
    CANCELLED,
    FINISHED,
    Promise,
    Signal,
    cancel_on_interrupt,
    check_any_in_callback,
    check_can_wait,
    fulfill,
    reject,
    stored_outcome,
    trampoline,
    when_settled,
)
from .sealed import Sealed, is_sealed

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
@overload
def gather(*promises: Future[T], return_exceptions: bool) -> Promise[list[T | BaseException]]: ...


def gather(*promises: Future[Any], return_exceptions: bool = False) -> Promise[list[Any]]:
    """Return a promise of the list of values, in the order of `promises`.

    The first error rejects the promise. Cancelling the promise cancels all of `promises`, as
    `asyncio.gather` does.

    Parameters
    ----------
    *promises
        Promises or `concurrent.futures.Future` objects.
    return_exceptions
        If True, errors stand in the places of values, and a `CancelledError` in the place of a
        cancelled promise.

    Returns
    -------
    Promise
        Settled when all of `promises` have values, or when one has an error. With
        `return_exceptions`, settled when all of `promises` are.

    Raises
    ------
    TypeError
        If an argument is not a promise.

    Examples
    --------
    >>> import polycephaly as poly
    >>> a, b = poly.Promise(), poly.Promise()
    >>> both = poly.gather(a, b)
    >>> b.set_result(2); a.set_result(1)
    >>> both.value
    [1, 2]
    """
    _check_futures("gather", promises, "gather(*promises)")
    combined = _Gathered()
    combined._awaited = promises
    waiting_for = list(promises)

    def one_settled(future: Future[Any]) -> None:
        error = _stored_error_of(future)
        if error is not None and not return_exceptions:
            reject(combined, error)
        else:
            # The pop is atomic. Only the number of entries matters, not which one is removed.
            waiting_for.pop()
            if not waiting_for:
                # Of values that must be opened, a list that must be, too.
                build = partial(_values_of, promises, return_exceptions)
                is_built = not any(is_sealed(stored_outcome(p)[0]) for p in promises)
                fulfill(combined, build() if is_built else Sealed(build))

    if not promises:
        fulfill(combined, [])

    hook = _call_when_settled(promises, one_settled)

    def all_settled(_: Promise[Any]) -> None:
        if waiting_for:  # else no promise has a hook any more
            _remove_hook(promises, hook)

    # Called at once if one had failed before the last had a hook.
    when_settled(combined, all_settled)
    return combined


@overload
def race(first: Future[T1], second: Future[T2], /) -> Promise[T1 | T2]: ...
@overload
def race(*promises: Future[T]) -> Promise[T]: ...


def race(*promises: Future[Any]) -> Promise[Any]:
    """Return a promise that settles as the first of `promises` does.

    The others are left alone.

    Parameters
    ----------
    *promises
        Promises or `concurrent.futures.Future` objects, at least one.

    Returns
    -------
    Promise
        Has the value or the error of the first promise that settles.

    Raises
    ------
    ValueError
        If there are no promises.
    TypeError
        If an argument is not a promise.

    Examples
    --------
    >>> import polycephaly as poly
    >>> slow, quick = poly.Promise(), poly.Promise()
    >>> first = poly.race(slow, quick)
    >>> quick.set_result("quick")
    >>> first.value
    'quick'
    """
    _check_futures("race", promises, "race(*promises)")
    if not promises:
        raise ValueError("race() needs a promise: a race of no promises would never settle")
    first: Promise[Any] = Promise()
    first._awaited = promises

    def one_settled(future: Future[Any]) -> None:
        first._awaited = ()
        first._settle(CANCELLED if future.cancelled() else FINISHED, *stored_outcome(future))

    hook = _call_when_settled(promises, one_settled)
    when_settled(first, lambda _: _remove_hook(promises, hook))
    return first


def _call_when_settled(
    promises: Iterable[Future[Any]], one_settled: Callable[[Future[Any]], None]
) -> Callable[[Future[Any]], None]:
    """Have `one_settled` called with each promise. Return the hook of those that are pending."""
    hook = partial(trampoline.run, one_settled)
    for each in promises:
        if each.done():  # at once, also deep in a chain of callbacks, which may wait for the result
            one_settled(each)
        else:
            when_settled(each, hook)
    return hook


def _remove_hook(promises: Iterable[Future[Any]], hook: Callable[[Any], None]) -> None:
    """Remove `hook` from those that are pending, so that they keep nothing alive."""
    for each in promises:
        if isinstance(each, Promise):
            each.remove_done_callback(hook)


class as_completed(Iterator[F], AsyncIterator[F]):  # noqa: N801 - as in the standard library
    """Iterate over promises in the order in which they settle.

    ``async for`` works too.

    Parameters
    ----------
    promises
        Promises or `concurrent.futures.Future` objects. Duplicates are yielded once.
    timeout
        Seconds for the whole iteration. After that, the iterator raises `TimeoutError` for each
        promise that has not settled. Ignored by ``async for``.

    Raises
    ------
    TypeError
        If an item is not a promise.

    Examples
    --------
    >>> import polycephaly as poly
    >>> a, b = poly.Promise(), poly.Promise()
    >>> b.set_result("b"); a.set_result("a")
    >>> [p.value for p in poly.as_completed([a, b])]
    ['a', 'b']
    """

    def __init__(self, promises: Iterable[F], timeout: float | None = None) -> None:
        if isinstance(promises, Future):
            raise TypeError("as_completed() takes one iterable of promises: as_completed([a, b])")
        limit = None if timeout is None else check_seconds("timeout", timeout)
        distinct = tuple(dict.fromkeys(promises))
        _check_futures("as_completed", distinct)
        # One slot per promise: the k-th promise that settles fills the k-th slot.
        # Signals: a consumer that is cancelled while it waits for a slot may wait for it again.
        slots: list[Signal[F]] = [Signal() for _ in distinct]
        self._slots = slots
        pending = dict.fromkeys(distinct)  # in the order given
        self._next = 0
        self._timeout = timeout
        self._deadline = None if limit is None else monotonic() + limit
        indices = itertools.count()

        # This hook has no reference to the iterator, so that an iterator which is no longer used
        # can be dropped before all promises have settled.
        def one_settled(future: Any) -> None:
            pending.pop(future, None)
            fulfill(slots[next(indices)], future)

        self._hook = one_settled
        self._pending: dict[F, None] = pending
        for each in distinct:
            when_settled(each, one_settled)

    def _remove_hooks(self) -> None:
        pending = vars(self).get("_pending")  # None if an exception came before `__init__`
        if pending:
            _remove_hook(list(pending), self._hook)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():
            self._remove_hooks()

    def __iter__(self) -> as_completed[F]:
        return self

    def __next__(self) -> F:
        if self._next == len(self._slots):
            raise StopIteration
        if not self._slots[self._next].done():
            check_can_wait(list(self._pending))
            check_any_in_callback(list(self._pending))
        remaining = None if self._deadline is None else max(0.0, self._deadline - monotonic())
        try:
            future = self._slots[self._next].result(remaining)
        except KeyboardInterrupt:
            cancel_on_interrupt(self._pending)
            raise
        except TimeoutError:
            # The hooks stay: a later call gives what has settled since.
            left = len(self._slots) - self._next
            raise TimeoutError(
                f"{left} of {len(self._slots)} promises were not settled within {self._timeout} s"
            ) from None
        self._take(self._next)
        return future

    def _take(self, index: int) -> None:
        self._next = index + 1
        self._slots[index] = _TAKEN  # so that the promise lives no longer than the caller needs it

    def __aiter__(self) -> as_completed[F]:
        return self

    async def __anext__(self) -> F:
        while (index := self._next) < len(self._slots):
            if not self._slots[index].done():
                check_any_in_callback(list(self._pending))
            future = await self._slots[index]
            if self._next == index:  # no other consumer has taken it
                self._take(index)
                return future
        raise StopAsyncIteration


_TAKEN: Signal[Any] = Signal()
"""In the slot of a promise that was yielded."""


@shown_as_promise
class _Gathered(Promise[list[Any]]):
    """The promise of `gather`. Cancelling it cancels all the promises that it gathers."""

    _can_be_interrupted = True

    def _withdraw(self) -> None:
        for each in reversed(self._awaited):  # the last one first, as in `cancel_on_interrupt`
            trampoline.run(each._cancel_with_waiter if isinstance(each, Promise) else each.cancel)

    def running(self) -> bool:
        # Not by recursion: a chain of gathered promises may be long, and many of them share some.
        seen: set[Future[Any]] = {self}
        todo: list[_Gathered] = [self]
        while todo:
            gathered = todo.pop()
            for each in () if gathered.done() else gathered._awaited:
                if each not in seen:
                    seen.add(each)
                    if isinstance(each, _Gathered):
                        todo.append(each)
                    elif each.running():
                        return True
        return False


def _error_of(future: Future[Any]) -> BaseException | None:
    return CancelledError() if future.cancelled() else future.exception()


def _stored_error_of(future: Future[Any]) -> BaseException | None:
    """Return the error without opening a value, which may turn out to have one."""
    if future.cancelled():
        return CancelledError()
    return stored_outcome(future)[1]


def _values_of(promises: Iterable[Future[Any]], return_exceptions: bool) -> list[Any]:
    return [
        failed if return_exceptions and (failed := _error_of(p)) is not None else p.result()
        for p in promises
    ]


def _check_futures(function: str, promises: Iterable[object], cure: str = "") -> None:
    """Raise `TypeError` if one of `promises` is none, with the `cure` if it is an iterable."""
    for each in promises:
        if not isinstance(each, Future):
            hint = f": use {cure}" if cure and isinstance(each, Iterable) else ""
            raise TypeError(f"{function}() takes promises, not {brief(each)}{hint}")
