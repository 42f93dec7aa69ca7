"""What green.py measures: each contender is run in a process of its own, and prints its figures as
JSON.

    python benchmarks/green_contenders.py "commstime trio" 20000

What only some of them need is imported by those.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import coroutine
from typing import Any

Figures = dict[str, float]
Send = Callable[[int], Awaitable[object]]
Receive = Callable[[], Awaitable[int]]

CONTENDERS: dict[str, Callable[[int], Figures]] = {}


def contender(name: str) -> Callable[[Callable[..., Figures]], Callable[..., Figures]]:
    def enter(fn: Callable[..., Figures]) -> Callable[..., Figures]:
        CONTENDERS[name] = fn
        return fn

    return enter


# -- CommsTime: four processes hand a number around, and it counts up ------------------------------

WARM = 100


async def prefix(receive: Receive, send: Send) -> None:
    await send(0)
    while True:
        await send(await receive())


async def delta(receive: Receive, send_one: Send, send_other: Send) -> None:
    while True:
        x = await receive()
        await send_one(x)
        await send_other(x)


async def successor(receive: Receive, send: Send) -> None:
    while True:
        await send(await receive() + 1)


async def commstime(
    channel: Callable[[], tuple[Send, Receive]], start: Callable[..., object], n: int
) -> Figures:
    """`channel` makes the two ends of one, `start` has a coroutine function run beside this one."""
    (to_delta, at_delta), (to_successor, at_successor), (to_prefix, at_prefix), (to_us, at_us) = (
        channel() for _ in range(4)
    )
    start(prefix, at_prefix, to_delta)
    start(delta, at_delta, to_successor, to_us)
    start(successor, at_successor, to_prefix)
    for _ in range(WARM):
        await at_us()
    began = time.perf_counter()
    for _ in range(n):
        await at_us()
    seconds = time.perf_counter() - began
    assert await at_us() == WARM + n
    return {"us": seconds / n * 1e6}


@contender("commstime polycephaly")
def commstime_polycephaly(n: int) -> Figures:
    from polycephaly import green

    def channel() -> tuple[Send, Receive]:
        it: green.Channel[int] = green.Channel()
        return it.send, it.receive

    return green.run(commstime, channel, green.spawn, n)


@contender("commstime floor")
def commstime_floor(n: int) -> Figures:
    """The least there can be: one queue, one waiter per channel; no cancelling, closing, select,
    other threads."""
    ready: deque[Any] = deque()
    current: Any = None

    class Rendezvous:
        __slots__ = ("item", "waits")
        waits: Any

        def __init__(self) -> None:
            self.waits = None

        @coroutine
        def send(self, item: int) -> Any:
            self.item = item
            if self.waits is None:
                self.waits = current
                yield
            else:
                ready.append(self.waits)
                self.waits = None

        @coroutine
        def receive(self) -> Any:
            if self.waits is None:
                self.waits = current
                yield
            else:
                ready.append(self.waits)
                self.waits = None
            return self.item

    def channel() -> tuple[Send, Receive]:
        it = Rendezvous()
        return it.send, it.receive

    ready.append(commstime(channel, lambda fn, *args: ready.append(fn(*args)), n))
    while True:
        current = ready.popleft()
        try:
            current.send(None)
        except StopIteration as stop:
            return stop.value


async def commstime_in_asyncio(channel: Callable[[], tuple[Send, Receive]], n: int) -> Figures:
    tasks: list[asyncio.Task[object]] = []
    return await commstime(
        channel, lambda fn, *args: tasks.append(asyncio.create_task(fn(*args))), n
    )


@contender("commstime asyncio queue")
def commstime_asyncio_queue(n: int) -> Figures:
    def channel() -> tuple[Send, Receive]:
        it: asyncio.Queue[int] = asyncio.Queue(1)
        return it.put, it.get

    return asyncio.run(commstime_in_asyncio(channel, n))


@contender("commstime asyncio rendezvous")
def commstime_asyncio_rendezvous(n: int) -> Figures:
    class Rendezvous:
        """By hand, for one at each end."""

        __slots__ = ("item", "waits")
        waits: asyncio.Future[Any] | None

        def __init__(self) -> None:
            self.waits = None

        async def send(self, item: int) -> None:
            waits, self.waits = self.waits, None
            if waits is None:
                self.item = item
                waits = self.waits = asyncio.get_running_loop().create_future()
                await waits
            else:
                waits.set_result(item)

        async def receive(self) -> int:
            waits, self.waits = self.waits, None
            if waits is None:
                waits = self.waits = asyncio.get_running_loop().create_future()
                return await waits
            waits.set_result(None)
            return self.item

    def channel() -> tuple[Send, Receive]:
        it = Rendezvous()
        return it.send, it.receive

    return asyncio.run(commstime_in_asyncio(channel, n))


@contender("commstime trio")
def commstime_trio(n: int) -> Figures:
    import trio

    def channel() -> tuple[Send, Receive]:
        sender, receiver = trio.open_memory_channel[int](0)
        return sender.send, receiver.receive

    async def main() -> Figures:
        async with trio.open_nursery() as nursery:
            figures = await commstime(channel, nursery.start_soon, n)
            nursery.cancel_scope.cancel()
        return figures

    return trio.run(main)


@contender("commstime gevent")
def commstime_gevent(n: int) -> Figures:
    import gevent
    from gevent.queue import Channel

    a, b, c, d = (Channel() for _ in range(4))

    def prefix() -> None:
        a.put(0)
        while True:
            a.put(c.get())

    def delta() -> None:
        while True:
            x = a.get()
            b.put(x)
            d.put(x)

    def successor() -> None:
        while True:
            c.put(b.get() + 1)

    def consume() -> Figures:
        for _ in range(WARM):
            d.get()
        began = time.perf_counter()
        for _ in range(n):
            d.get()
        return {"us": (time.perf_counter() - began) / n * 1e6}

    others = [gevent.spawn(fn) for fn in (prefix, delta, successor)]
    figures = gevent.spawn(consume).get()
    gevent.killall(others)
    return figures


# -- bytes for each that waits, and then all answer ------------------------------------------------


def resident() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Parking:
    """Figures of `n` that are started, wait all at the same time, and are woken."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.before = resident()
        self.began = time.perf_counter()

    def all_wait(self) -> None:
        self.bytes = (resident() - self.before) / self.n
        self.park_s = time.perf_counter() - self.began
        self.began = time.perf_counter()

    def all_answered(self, answers: int) -> Figures:
        assert answers == self.n
        answer_s = time.perf_counter() - self.began
        return {
            "bytes": self.bytes, "park_s": self.park_s,
            "answer_s": answer_s, "answer_us": answer_s / self.n * 1e6,
        }  # fmt: skip


async def park_green(
    n: int, make_wait: Callable[[], Callable[..., Awaitable[object]]], wake: Any
) -> Figures:
    """`make_wait()` gives what each calls to wait; then `wake` is awaited."""
    from polycephaly import green

    async def one(wait: Callable[[], Awaitable[object]]) -> int:
        await wait()
        return 1

    parking = Parking(n)
    threads = [green.spawn(one, make_wait()) for _ in range(n)]
    await green.sleep(0)  # the queue is first in, first out: all of them have begun, and wait
    parking.all_wait()
    await wake()
    answers = 0
    for thread in threads:
        answers += await thread
    return parking.all_answered(answers)


@contender("parked event")
def parked_event(n: int) -> Figures:
    from polycephaly import green

    async def main() -> Figures:
        event = green.Event()
        wait = event.wait

        async def wake() -> None:
            event.set()

        return await park_green(n, lambda: wait, wake)

    return green.run(main)


@contender("parked large")
def parked_large(n: int) -> Figures:
    """As `parked event`, without the cyclic garbage collector, which would walk through all of them
    again and again."""
    gc.disable()
    return parked_event(n)


@contender("parked channel")
def parked_channel(n: int) -> Figures:
    from polycephaly import green

    async def main() -> Figures:
        channel: green.Channel[int] = green.Channel()
        receive = channel.receive

        async def wake() -> None:
            for _ in range(n):
                await channel.send(1)

        return await park_green(n, lambda: receive, wake)

    return green.run(main)


@contender("parked channels")
def parked_channels(n: int) -> Figures:
    from polycephaly import green

    channels: deque[green.Channel[int]] = deque()

    def another() -> Callable[[], Awaitable[int]]:
        channels.append(green.Channel())
        return channels[-1].receive

    async def wake() -> None:
        while channels:
            await channels.popleft().send(1)

    return green.run(park_green, n, another, wake)


@contender("parked sleep")
def parked_sleep(n: int) -> Figures:
    from polycephaly import green

    nap = partial(
        green.sleep, 1 + n * 10e-6
    )  # long enough that all of them sleep before the first one wakes

    async def wake() -> None:
        pass

    return green.run(park_green, n, lambda: nap, wake)


@contender("parked asyncio")
def parked_asyncio(n: int) -> Figures:
    async def main() -> Figures:
        event = asyncio.Event()

        async def one() -> int:
            await event.wait()
            return 1

        parking = Parking(n)
        tasks = [asyncio.create_task(one()) for _ in range(n)]
        await asyncio.sleep(0)
        parking.all_wait()
        event.set()
        answers = 0
        for task in tasks:
            answers += await task
        return parking.all_answered(answers)

    return asyncio.run(main())


@contender("parked trio")
def parked_trio(n: int) -> Figures:
    import trio

    async def main() -> Figures:
        event = trio.Event()
        waiting = answers = 0

        async def one() -> None:
            nonlocal waiting, answers
            waiting += 1
            await event.wait()
            answers += 1

        parking = Parking(n)
        async with trio.open_nursery() as nursery:
            for _ in range(n):
                nursery.start_soon(one)
            while waiting < n:
                await trio.sleep(0)
            parking.all_wait()
            event.set()
        return parking.all_answered(answers)

    return trio.run(main)


@contender("parked gevent")
def parked_gevent(n: int) -> Figures:
    import gevent
    from gevent.event import Event

    event = Event()
    waiting = 0

    def one() -> int:
        nonlocal waiting
        waiting += 1
        event.wait()
        return 1

    parking = Parking(n)
    greenlets = [gevent.spawn(one) for _ in range(n)]
    while waiting < n:
        gevent.sleep(0)
    parking.all_wait()
    event.set()
    return parking.all_answered(sum(each.get() for each in greenlets))


# -- short foreign calls ---------------------------------------------------------------------------

getpid = ctypes.CDLL(None).getpid


@contender("calls bare")
def calls_bare(n: int) -> Figures:
    call = getpid
    began = time.perf_counter()
    for _ in range(n):
        call()
    return {"us": (time.perf_counter() - began) / n * 1e6}


@contender("calls polycephaly")
def calls_polycephaly(n: int, others: int = 0) -> Figures:
    from polycephaly import green

    over = False

    async def other() -> None:
        while not over:
            await green.sleep(0)

    async def main() -> Figures:
        nonlocal over
        for _ in range(others):
            green.spawn(other)
        call, fn = green.call, getpid
        began = time.perf_counter()
        for _ in range(n):
            await call(fn)
        seconds = time.perf_counter() - began
        over = True
        return {"us": seconds / n * 1e6}

    return green.run(main)


@contender("calls polycephaly in company")
def calls_in_company(n: int) -> Figures:
    return calls_polycephaly(n, others=10)


@contender("calls asyncio")
def calls_asyncio(n: int) -> Figures:
    async def main() -> Figures:
        began = time.perf_counter()
        for _ in range(n):
            await asyncio.to_thread(getpid)
        return {"us": (time.perf_counter() - began) / n * 1e6}

    return asyncio.run(main())


# -- blocking calls that overlap -------------------------------------------------------------------


def timed(main: Callable[[], Coroutine[Any, Any, None]], run: Callable[..., Any]) -> Figures:
    async def timed() -> Figures:
        began = time.perf_counter()
        await main()
        return {"s": time.perf_counter() - began}

    return run(timed())


@contender("sleeps call")
def sleeps_call(n: int) -> Figures:
    from polycephaly import green

    async def nap() -> None:
        await green.call(time.sleep, 1)

    async def main() -> None:
        for thread in [green.spawn(nap) for _ in range(n)]:
            await thread

    return timed(main, green.run)


@contender("sleeps spawn")
def sleeps_spawn(n: int) -> Figures:
    from polycephaly import green

    async def main() -> None:
        for thread in [green.spawn(time.sleep, 1) for _ in range(n)]:
            await thread

    return timed(main, green.run)


@contender("sleeps asyncio")
def sleeps_asyncio(n: int) -> Figures:
    async def main() -> None:
        await asyncio.gather(*(asyncio.to_thread(time.sleep, 1) for _ in range(n)))

    return timed(main, asyncio.run)


if __name__ == "__main__":
    print(json.dumps(CONTENDERS[sys.argv[1]](int(sys.argv[2]))))
