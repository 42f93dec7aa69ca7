"""Batched requests: one foreign call serves the requests of many green threads.

    await batched(request) ──> waiting ──┐                             ┌──> its result
    await batched(request) ──> waiting ──┼──> one crossing: fn([...]) ─┼──> its result
    await batched(request) ──> waiting ──┘    (a foreign call)         └──> its result, or error

After CEFOS's wrapped system calls. There is no timer: a crossing takes the requests that gathered
during the one before, or at first, until all threads that were ready have run. So a lone request is
not delayed, and crossings grow with the load.

The *crosser* is a green thread that exists only while requests wait. Only the scheduler's owner
runs this code, except `close`, so there are no locks. A request withdrawn before its crossing is
left out. If withdrawn during the crossing, the request stays, and its result is dropped.

The requests of a crossing stay in `_in_flight` until their threads are woken. So no thread waits
for ever, however the crosser ends: requests in flight get an error, those that wait another
crosser.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextvars import Context
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

from ..errors import copy_error, skip_own_frames, type_with_article
from ..promises.promise import FINISHED, Promise, Signal, fulfill, stored_error, when_settled
from ..runtime.checks import brief, check_count
from ..runtime.coroutines import is_coroutine_function
from .call import call as _call
from .call import call_long as call_long  # `green` takes both from here: see the end
from .parking import Parking
from .scheduler import scheduler
from .spawning import start
from .thread import GreenThread, qualname
from .waiting import Refused

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")
T = TypeVar("T")

_NOT_RESULT_LISTS = (Mapping, Set, str, bytes, bytearray)


class Batch(Generic[Q, R]):
    """A function that is called once for the requests of many green threads.

    Made by `green.call.batch`. ``await batched(request)`` returns the result of that request, or
    raises its error. If a green thread is cancelled during the wait, its request is withdrawn,
    unless already in a crossing. With ``async with``, the batch is closed at the end of the block.
    """

    parks = True  # `spawn` treats a batch as a coroutine function

    def __init__(self, fn: Callable[[list[Q]], Any], limit: int | None) -> None:
        if not callable(fn) or is_coroutine_function(fn):
            raise TypeError(
                f"green.call.batch takes a plain function of a list of requests, not {brief(fn)}"
            )
        if limit is not None:
            limit = check_count("limit= takes", "request", limit)
        update_wrapper(self, fn)
        self._fn = fn
        self._limit = limit
        self._name = qualname(fn)
        self._waiting: deque[_Request] = deque()
        self._in_flight: deque[_Request] = deque()
        self._crossings = 0
        self._closed = False
        self._crosser: GreenThread[None] | None = None

    def __call__(self, request: Q) -> Awaitable[R]:
        return _Request(self, request)

    @property
    def crossings(self) -> int:
        """The number of calls of the function so far."""
        return self._crossings

    @property
    def waiting(self) -> int:
        """The number of requests that wait for the next crossing."""
        return sum(not each.withdrawn for each in list(self._waiting))

    def close(self) -> Promise[None]:
        """Close the batch: further requests raise `RuntimeError`.

        Any thread may call this, also more than once.

        Returns
        -------
        Promise
            Settled when all waiting requests have been served.
        """
        self._closed = True
        # Cancelling this promise has no effect on the crosser or other callers.
        ended: Signal[None] = Signal()
        crosser = self._crosser
        if crosser is not None and self._has_crosser():
            when_settled(
                crosser, lambda crosser: ended._settle(FINISHED, None, stored_error(crosser))
            )
        else:
            fulfill(ended)
        return ended

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Reduce to a batch of the same function, which another process makes for itself.

        A batch made by a decorator is pickled by its name.
        """
        name, module = getattr(self, "__qualname__", ""), getattr(self, "__module__", "")
        if module != "__main__" and getattr(sys.modules.get(module), name, None) is self:
            return str(name)
        return Batch, (self._fn, self._limit)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.waiting} waiting"
        return f"<Batch {self._name}, {state}>"

    # -- for the owner -----------------------------------------------------------------------------

    def _add_request(self, request: _Request) -> None:
        if self._closed:
            raise RuntimeError(f"the batch of {self._name} was closed before this request")
        if not self._has_crosser():
            self._waiting.clear()  # left over from the process that this one was forked from
            self._start_crosser()
        self._waiting.append(request)

    def _has_crosser(self) -> bool:
        return self._crosser is not None and self._crosser in scheduler.live

    def _start_crosser(self) -> None:
        self._in_flight = deque()  # may be left over from such a process too
        context = Context()  # of no particular thread, because the crosser serves all
        name = f"batch of {self._name}"
        self._crosser = context.run(start, self._serve(), (), name=name)
        when_settled(self._crosser, self._on_crosser_end)

    def _on_crosser_end(self, crosser: Promise[None]) -> None:
        """Reject the requests in flight, because the crosser has ended.

        Start another crosser if requests wait. Some may have come since this one was cancelled,
        perhaps before its first step.
        """
        if crosser is self._crosser and not sys.is_finalizing():
            in_flight, self._in_flight = self._in_flight, deque()
            error = RuntimeError(f"the batch of {self._name} failed before this request was served")
            error.__cause__ = stored_error(crosser)
            self._reject(in_flight, error)
            if self._waiting:
                self._start_crosser()

    async def _serve(self) -> None:
        while self._waiting:
            # Here, because an error of the crosser's own in a crossing would go to the requests.
            scheduler.current.raise_if_interrupted()
            requests = self._start_crossing()
            if not requests:  # all were withdrawn
                return
            self._crossings += 1
            try:
                results = await _call(self._fn, [each.request for each in requests])
                results = _as_result_list(results, len(requests), self._name)
            except GeneratorExit:
                raise
            except BaseException as error:
                self._reject(requests, error)
                continue
            for result in results:
                each = requests.popleft()
                if not each.withdrawn:
                    each.wake(Refused(result) if isinstance(result, BaseException) else result)

    def _start_crossing(self) -> deque[_Request]:
        """Move the requests of the next crossing from `_waiting` to `_in_flight`; return them."""
        waiting = self._waiting
        taken = self._in_flight = deque()
        while waiting and len(taken) != self._limit:
            request = waiting.popleft()
            if not request.withdrawn:
                taken.append(request)
        return taken

    def _reject(self, requests: deque[_Request], error: BaseException) -> None:
        trace = skip_own_frames(error.__traceback__)
        while requests:
            refused = Refused(copy_error(error).with_traceback(trace))
            each = requests.popleft()
            if not each.withdrawn:
                each.wake(refused)


class _Request(Parking):
    """The awaitable of one request."""

    __slots__ = ("batch", "request", "withdrawn")
    name = "green.call.batch"

    def __init__(self, batch: Batch[Any, Any], request: Any) -> None:
        super().__init__()
        self.batch = batch
        self.request = request
        self.withdrawn = False

    def enter(self) -> bool:
        self.batch._add_request(self)
        return True

    def leave(self) -> None:
        self.withdrawn = True

    def send(self, value: Any) -> Any:
        if value.__class__ is Refused:
            try:
                raise value.error
            finally:
                del self, value  # no cycle through the error's traceback
        return super().send(value)


def _as_result_list(results: Any, count: int, name: str) -> list[Any]:
    """Return the results as a list of `count` items. None stands for a list of Nones.

    Raises `RuntimeError` for another number, and for texts, sets, mappings and tables, because the
    items of those cannot be matched with the requests.
    """
    if results is None:
        return [None] * count
    returned = type_with_article(results)
    # Iterating over a table gives its columns.
    if not isinstance(results, _NOT_RESULT_LISTS) and not hasattr(type(results), "columns"):
        try:
            result_list = list(results) if len(results) == count else results
            if len(result_list) == count:
                return result_list
            returned = f"{len(result_list)} results"
        except TypeError:  # no length, or not iterable
            pass
    raise RuntimeError(
        f"{name} returned {returned} for {count} requests: return a list of {count} results, "
        "or None"
    )


class Call(Protocol):
    """The type of `green.call`, including its attribute `batch`."""

    def __call__(
        self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[T]: ...

    @overload
    def batch(
        self, fn: Callable[[list[Q]], None], /, *, limit: int | None = None
    ) -> Batch[Q, None]: ...
    @overload
    def batch(
        self, fn: Callable[[list[Q]], Sequence[R]], /, *, limit: int | None = None
    ) -> Batch[Q, R]: ...
    @overload
    def batch(
        self, /, *, limit: int | None = None
    ) -> Callable[[Callable[[list[Q]], Any]], Batch[Q, Any]]: ...


def batch(fn: Callable[[list[Any]], Any] | None = None, /, *, limit: int | None = None) -> Any:
    """Make a function of a list of requests callable one request at a time.

    Also a decorator: ``@green.call.batch`` or ``@green.call.batch(limit=100)``.

    Parameters
    ----------
    fn
        A plain function that takes a list of requests and returns a list of as many results (no
        dict, set, text or table, which have no results in order), or None, for None each. An
        exception in the list is raised for its request. An error that `fn` raises is raised for all
        requests of that crossing.
    limit
        The largest number of requests in one call of `fn`; None for no limit.

    Returns
    -------
    Batch
        Used as ``await batched(request)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is of the wrong type or value.
    RuntimeError
        At the await, if `fn` has returned another number of results, or if the batch is closed.

    Notes
    -----
    `fn` runs as by `green.call`, once for all requests that have gathered. `fn` must not wait for a
    request to its own batch, because that request crosses only afterwards.

    Examples
    --------
    >>> from polycephaly import green
    >>> @green.call.batch
    ... def lengths(texts):
    ...     return [len(text) for text in texts]
    >>> async def main():
    ...     values = await green.par(*(lengths(text) for text in ("one", "two", "three")))
    ...     return values, lengths.crossings
    >>> green.run(main)
    ([3, 3, 5], 1)
    """
    if fn is None:
        return lambda fn: Batch(fn, limit)
    return Batch(fn, limit)


call = cast(Call, _call)
call.batch = batch  # type: ignore[method-assign]
