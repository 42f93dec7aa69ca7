"""`par` and `map` with ``over=pool``: green threads spread over the drones of a pool.

    par(f, g, h, k, over=pool)    half of them in one drone, half in another: a `par` in each

    map(fn, items, over=pool)     items ──> `jobs` ──> width green threads in each drone ──> `done`
                                  any free one takes the next item; results are put in order here

`jobs` and `done` are channels of this process. Channels in the functions connect them as in one
process. Each share is one task, dedicated to one drone. All shares run at the same time, because
they may wait for each other, and each drone does nothing else meanwhile. If a drone is busy with
another task until all values are there, its share of `map` is withdrawn. A share of `par` is waited
for.
"""

from __future__ import annotations

from asyncio import CancelledError as Cancelled
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import ChannelClosed, Deadlock, ItemLost, copy_error, stop_as_error
from ..promises.promise import Promise, when_settled
from ..runtime.coroutines import is_coroutine
from .channel import Channel
from .collected import Collected, awaiting, run_all, run_workers
from .locks import Semaphore
from .scheduler import scheduler
from .spawning import spawn
from .thread import as_coroutine

MAX_PENDING_PER_WORKER = 4  # items per green thread in progress, or done before an earlier one


def drones_of(pool: Any) -> Sequence[Any]:
    refusal: BaseException | None = getattr(getattr(pool, "_dispatcher", None), "refusal", None)
    if refusal is not None:  # the pool has ended, for example: as for any other task
        raise copy_error(refusal)
    drones: Sequence[Any] = getattr(pool, "drones", ())
    if not drones:
        raise TypeError(
            f"green threads can be spread over a pool that has drones, not over {pool!r}"
        )
    return drones


async def par_over(fns: Sequence[Any], pool: Any) -> list[Any]:
    drones = drones_of(pool)
    for fn in fns:
        if is_coroutine(fn):
            fn.close()
            raise TypeError(
                f"{fn!r} is a coroutine that belongs to this process: with `over=`, `par` takes "
                "functions (use `functools.partial` for their arguments)"
            )
    size, remainder = divmod(len(fns), len(drones))
    shares: list[Promise[list[Any]]] = []
    start = 0
    try:
        for index, drone in enumerate(drones):
            end = start + size + (index < remainder)
            if end > start:
                shares.append(drone.promise(run_all, list(fns[start:end])))
            start = end
        values = await run_all([as_coroutine(share, "a share of par") for share in shares])
    except BaseException as error:
        # They would wait for the functions of a share that has failed, or could not be sent.
        for share in shares:
            share.cancel()
        if not isinstance(error, BaseExceptionGroup):
            raise
        failed: list[BaseException] = []
        for each in error.exceptions:
            failed += each.exceptions if isinstance(each, BaseExceptionGroup) else [each]
        # Not those of the shares that were cancelled because others have failed.
        failed = [each for each in failed if not isinstance(each, CancelledError)] or failed[:1]
        raise BaseExceptionGroup(f"{len(failed)} of the functions failed", failed) from None
    return [value for each in values for value in each]


class Spread(Collected):
    """The result of `map` with ``over=``."""

    def __init__(
        self, fn: Callable[..., Any], items: Iterable[Any], width: int, pool: Any, progress: Any
    ) -> None:
        super().__init__(fn, items, width, progress)
        self._drones = drones_of(pool)

    async def collect(self) -> list[Any]:
        return [value async for value in self]

    async def __aiter__(self) -> AsyncIterator[Any]:
        self._begin()
        workers = self._width * len(self._drones)
        jobs: Channel[tuple[int, Any]] = Channel()
        done: Channel[tuple[int, Any]] = Channel(workers)
        free_places = Semaphore(workers * MAX_PENDING_PER_WORKER)
        promises: list[Any] = []  # of the shares, then of the feeder
        out_of_order: dict[int, Any] = {}
        next_index, total = 0, -1
        try:
            for drone in self._drones:
                promises.append(drone.promise(share_of_map, self._fn, jobs, done, self._width))
            promises.append(spawn(self._feed, jobs, done, free_places))
            for each in promises:
                when_settled(each, partial(_close_after_an_error, done))
            while next_index != total:
                index, value = await done.receive()
                if index == _END_INDEX:
                    total = value
                    continue
                out_of_order[index] = value
                while next_index in out_of_order:
                    if self._progress is not None:
                        self._progress.step()
                    free_places.release()
                    next_index += 1
                    yield out_of_order.pop(next_index - 1)
        except ChannelClosed:
            for each in promises:
                if each.done() and not each.cancelled() and each.exception() is not None:
                    raise each.exception() from each.exception().__cause__  # its remote traceback
            raise
        finally:
            jobs.close()
            done.close()
            if next_index != total:
                for each in promises:
                    each.cancel()
                promises.clear()  # no cycle through the traceback of one's error
                each = None
                spawn(_drain(done))
            if self._progress is not None:
                self._progress.close()
        *shares, feeder = promises
        try:
            for each in shares:
                if not each.cancel(running=False):  # has begun, and has no items left
                    await each
            await feeder
        finally:
            promises.clear()  # as above
            del shares, feeder, each

    async def _feed(
        self, jobs: Channel[tuple[int, Any]], done: Channel[tuple[int, Any]], free_places: Semaphore
    ) -> None:
        count = 0
        try:
            for item in self._items:
                await free_places.acquire()
                await jobs.send((count, item))
                count += 1
        except (ChannelClosed, ItemLost):
            # No more values are wanted, or a drone has died, as the promise of its share reports.
            return
        except StopAsyncIteration as stop:
            raise stop_as_error(stop, f"the input of {self._place_of(count)}") from stop
        await done.send((_END_INDEX, count))


_END_INDEX = -1
"""Sent in place of an index, with the number of items in place of a value."""


async def share_of_map(
    fn: Callable[[Any], Any], jobs: Channel[Any], done: Channel[Any], width: int
) -> None:
    """In a drone: take items from `jobs` in `width` green threads, until none is left."""
    from ..wire.functions import label

    apply = awaiting(fn)

    async def task() -> None:
        async for index, item in jobs:
            try:
                value = await apply(item)
            except Cancelled as error:
                if scheduler.current.cancel_count:
                    raise
                # The call itself was cancelled, not this green thread.
                raise CancelledError(f"a call of {label(fn)} was cancelled") from error
            except StopAsyncIteration as stop:  # would end the `async for` in the caller's process
                raise stop_as_error(stop, f"green.map({label(fn)}, ...), item {index}") from stop
            with suppress(ChannelClosed):  # the value is no longer wanted
                await done.send((index, value))

    await run_workers(task, width)


async def _drain(done: Channel[Any]) -> None:
    """Receive and drop unwanted values, because a channel that drones know is kept until it is
    closed and empty.
    """
    while True:
        try:
            await done.receive()
        except (ChannelClosed, Deadlock):
            return
        except Exception:  # an item's own error
            pass


def _close_after_an_error(done: Channel[Any], ended: Promise[Any]) -> None:
    if ended.cancelled() or ended.exception() is not None:
        done.close()
