"""A user's program that uses the whole public interface: type-checked (`mypy --strict`) and run by
test_typing.py.

What is given back must be known to the type checker: `assert_type` says what as. Code strings,
names of a namespace and what lambdas with arguments give are `Any`: nobody could know."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, assert_type

import polycephaly as poly
from polycephaly import green
from polycephaly.wire.output import Line

heard: list[str] = []


def half(n: int) -> float:
    return n / 2


def half_each(numbers: list[int]) -> list[float]:
    return [half(n) for n in numbers]


async def name_of(n: int) -> str:
    await green.sleep(0)
    return f"number {n}"


def hear(line: Line) -> None:
    heard.append(f"{line.drone} {line.stream} {line.text}")


def one_piece_of_work() -> None:
    assert_type(poly.promise("6 * 7"), poly.Promise[Any])
    assert_type(poly.promise(lambda: 42), poly.Promise[int])
    assert_type(poly.promise(name_of, 1), poly.Promise[str])
    assert_type(poly.doit(half, 3), float)
    assert_type(poly.doit(name_of, 3), str)


def drones() -> None:
    with poly.Drone(
        name="one", cwd="/", env={"A": "1"}, initializer=half, initargs=(1,), timeout=60
    ) as drone:
        assert_type(drone.promise(half, 3), poly.Promise[float])
        assert_type(drone.doit(name_of, 3), str)
        drone["x"] = 41
        drone.push({"y": 1})
        x, y = drone.pull("x", "y")
        assert (drone["x"], x + y) == (41, 42)
        assert_type(drone.options(timeout=5), poly.Drone)
        assert_type((drone.name, drone.pid, drone.alive), tuple[str, int, bool])
        assert_type(drone.unresponsive, str | None)
        assert_type(drone.waiting, poly.Waiting | None)
        assert_type(drone.stack(), poly.Stack)
        drone.interrupt()
        drone.release()
        assert_type(drone.exitcode, int | None)
    killed = poly.Drone(detached=True)
    killed.kill()
    killed.release(wait=False)


def pools() -> None:
    with poly.Pool(
        2, name="p", env=lambda index: {"INDEX": str(index)}, output=hear, retries=1,
        timeout=60, hang_timeout=60, max_tasks=1000, max_memory=1 << 30, max_queued=10_000,
        on_death="replace", start="fork",
    ) as pool:  # fmt: skip
        assert_type(pool.promise(half, 3).value, float)
        assert_type(pool.submit(half, 3).result(timeout=5), float)
        assert_type(pool.submit(name_of, 3).result(), str)
        assert_type(list(pool.map(half, range(3), chunksize=1, buffersize=5)), list[float])
        assert_type(list(pool.map(half, range(3), seed=42)), list[float])
        assert_type(pool.options(seed=[4, 2]).promise(half, 3), poly.Promise[float])
        assert 0 <= poly.rng().random() < 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "run.db")
            stored = pool.map(half, range(3), resume=path, key=str, changed="keep")
            assert_type(list(stored), list[float])
            assert_type(poly.resumed(path).finished, int)
            assert_type([each.error for each in poly.resumed(str(path)).failures], list[str])
        assert_type(list(pool.map(name_of, range(3), timeout=5, ordered=False)), list[str])
        assert_type(pool.everywhere(os.getpid), list[poly.Promise[int]])
        assert_type(pool.options(timeout=5, retries=0), poly.Pool)
        retry = poly.Retry(3, on=(OSError, ValueError), delay=0.5, factor=1.5, jitter=False)
        assert_type(pool.options(retries=retry), poly.Pool)
        assert_type(pool.drones, list[poly.Drone])
        shared = assert_type(pool.share([1, 2, 3]), poly.Shared[list[int]])
        assert_type(shared.value, list[int])
        assert_type(shared.nbytes, int)
        assert pool.doit(len, shared) == 3
        shared.release()
        pool.doit(print, "hello")
        pool.refresh()
        pool.shutdown(wait=True, cancel_futures=False)
    assert heard and heard[0].endswith("stdout hello")
    with poly.Pool(1, width=4) as pool:
        assert_type(list(pool.map(name_of, range(3))), list[str])


def promises() -> None:
    with poly.Pool(2) as pool:
        number, name = pool.promise(half, 3), pool.promise(name_of, 3)
        assert_type(number.then(str), poly.Promise[str])
        assert_type(number.then(lambda value: pool.promise(half, int(value))), poly.Promise[float])
        assert_type(poly.gather(number, name).value, list[float | str])
        assert_type(poly.gather(*[number, number]).value, list[float])
        assert_type(poly.race(number, name).value, float | str)
        for done in poly.as_completed([number, number], timeout=60):
            assert_type(done, poly.Promise[float])
        assert_type(number.exception(timeout=5), BaseException | None)
        assert_type(
            (number.done(), number.cancelled(), number.running(), number.cancel()),
            tuple[bool, bool, bool, bool],
        )
        assert_type((number.spans.started, number.spans.bytes_sent), tuple[float | None, int])
        assert_type(number.output, str)
        own: poly.Promise[int] = poly.Promise()
        own.add_done_callback(lambda future: None)
        own.set_result(1)


def timelines(folder: str) -> None:
    with poly.Pool(1) as pool, poly.Drone() as drone:
        pool.doit(half, 3)
        both: poly.Timeline = pool.timeline + drone.timeline + green.timeline()
        assert_type([(span.name, span.drone) for span in both.spans], list[tuple[str, str]])
        assert_type((both.bottleneck, both.text(80), str(both)), tuple[str, str, str])
        both.save(os.path.join(folder, "run.json"))


def errors() -> None:
    with poly.Pool(1) as pool:
        try:
            pool.doit(os._exit, 3)
        except poly.DroneDied as died:
            assert_type(
                (died.drone, died.exitcode, died.running), tuple[str, int | None, str | None]
            )
            assert_type((died.stderr, died.stack), tuple[str, str])
        try:
            pool.doit("import threading; raise LookupError(threading.Lock())")
        except poly.RemoteError as error:
            assert_type((error.type_name, error.message, error.traceback), tuple[str, str, str])


def other_processes() -> None:
    card = os.path.join(tempfile.mkdtemp(), "pool.json")
    with poly.Pool(1) as pool, poly.serve(pool, "tcp://127.0.0.1:0", file=card, allow=()) as server:
        assert_type(
            (server.address, server.key, server.port, server.clients), tuple[str, str, int, int]
        )
        with poly.connect(card, timeout=30, output="discard") as remote:
            drone = remote.drones[0]
            assert_type(
                (drone.name, drone.host, drone.pid, drone.alive), tuple[str, str, int, bool]
            )
            assert_type(drone.doit(half, 3), float)
            assert_type(remote.everywhere(half, 3), list[poly.Promise[float]])
            with remote.share([1, 2, 3]) as shared:
                assert remote.doit(len, shared) == 3
            assert_type(remote.status(), dict[str, Any])
            remote.refresh()
            assert_type(remote.promise(half, 3).value, float)
            assert_type(remote.doit(name_of, 3), str)
            assert_type(list(remote.map(name_of, range(3))), list[str])
            remote.options(timeout=5).submit(half, 3).result()


async def in_asyncio() -> None:
    async with poly.Pool(1) as pool:
        assert_type([each async for each in pool.map(name_of, range(3))], list[str])
        assert_type(await pool.promise(half, 3), float)
        async for done in poly.as_completed([pool.promise(half, 3)]):
            assert_type(done.value, float)


async def nap() -> int:
    async with green.timeout(60):
        await green.call(time.sleep, 0)
        await green.call_long(time.sleep, 0)
    return 1


@poly.flow
def add(a: float, b: float) -> float:
    return a + b


def graphs_and_kept_results() -> None:
    with poly.Pool(1) as pool:
        end = add(add(1, 2), 3)
        assert isinstance(end, poly.Promise)
        end.result()
        graph = poly.Graph(end)
        assert_type(graph.mermaid(), str)
        assert_type(graph.dot(), str)
        kept = pool.promise(half, 3, keep=True).value
        assert_type(kept, poly.Kept[float])
        try:
            assert_type(kept.value, float)
        except poly.Lost as lost:
            assert isinstance(lost, poly.DroneDied)
        kept.release()


def pores() -> None:
    with poly.Drone() as drone, poly.Pore(100, name="bytes") as pore:
        drone.doit(pore.tell, "hello")
        message = pore.get(timeout=5)
        assert_type(message.sender, str)
        assert_type(pore.write(0, b"abc"), bool)
        assert_type(pore.memory, memoryview)
        assert_type([each.kind for each in [pore.get()]], list[str])
    try:
        pore.tell("too late", wait=False)
    except poly.PoreClosed as closed:
        assert_type((closed.pore, closed.owner, closed.ended), tuple[str, int, bool])


async def threads() -> None:
    assert_type(await green.spawn(nap), int)
    assert_type(green.spawn(half, 3, name="plain"), green.GreenThread[float])
    assert_type(await green.spawn(name_of(3)), str)
    assert_type(await green.call(half, 3), float)
    halves = green.call.batch(half_each, limit=100)
    assert_type(halves, green.Batch[int, float])
    assert_type(await halves(3), float)
    async with green.call.batch(half_each) as closed:
        assert_type(await closed(3), float)
    assert_type(await green.aio(asyncio.sleep(0, "slept")), str)
    assert_type(await green.par(nap, nap), list[int])
    assert_type(await green.map(name_of, range(3)), list[str])
    assert_type([each async for each in green.map(half, range(3), width=2)], list[float])
    async with green.Group() as group:
        child = assert_type(group.spawn(name_of, 3), green.GreenThread[str])
        group.spawn(half, 3)
    assert_type(child.value, str)
    assert_type(green.current().name, str)
    assert_type(green.threads(), list[green.ThreadInfo])

    sleeper = green.spawn(green.sleep, 60)
    sleeper.cancel()
    try:
        await sleeper
    except asyncio.CancelledError as error:
        assert not isinstance(error, green.Cancelled)
    except BaseException:
        assert sleeper.cancelled()


async def channels() -> None:
    numbers: green.Channel[int] = green.Channel(2)
    words = green.Channel[str](1)
    await numbers.send(1)
    assert_type(await numbers.receive(), int)
    async with words.claim() as end:
        await end.send("first")
    promise: poly.Promise[float] = poly.Promise()

    chosen = await green.select(numbers.receiving(when=False), words.receiving(), green.after(60))
    assert_type(chosen.value, int | str | None)
    assert_type(await green.select(words.receiving(), default=None), green.Chosen[str] | None)
    guards: list[green.Guard[int]] = [numbers.receiving()]
    assert_type(await green.select(*guards, default=0), green.Chosen[int] | int)
    assert_type(
        (await green.select(green.settled(promise), green.skip(), priority=True)).value,
        float | None,
    )
    await green.select(words.sending("second"))
    words.close()
    assert_type([word async for word in words], list[str])
    try:
        await words.receive()
    except green.ChannelClosed as error:
        assert isinstance(error, poly.ChannelClosed)


async def locks() -> None:
    lock, two, event, barrier = green.Lock(), green.Semaphore(2), green.Event(), green.Barrier(2)
    async with lock, two:
        assert_type((lock.locked(), two.value), tuple[bool, int])
    event.set()
    await event.wait()
    assert_type(await green.par(barrier.sync, barrier.sync), list[int])
    barrier.enroll()
    barrier.resign()
    assert_type((barrier.enrolled, barrier.waiting, event.is_set()), tuple[int, int, bool])


def a_database() -> list[tuple[str]]:
    async def rows() -> list[tuple[str]]:
        with closing(sqlite3.connect(":memory:")) as connection:
            found: list[tuple[str]] = await green.call(connection.execute("select 'IBM'").fetchall)
            return found

    return green.spawn(rows, bound=True).value


def plain_code() -> None:
    green.configure(window=0.001, native_threads=1000)
    channel: green.Channel[int] = green.Channel(1)
    channel.put(1, timeout=5)
    assert_type(channel.get(timeout=5), int)
    assert_type(green.run(nap), int)
    assert_type(green.map(half, range(3)), green.mapping.ListOrAwaitable[float])
    assert sum(green.map(half, range(3))) == 1.5
    try:
        green.run(channel.receive)
    except green.Deadlock as error:
        assert isinstance(error, poly.Deadlock)


async def send_halves(end: green.Sender[float], n: int) -> None:
    with end:
        for i in range(n):
            try:
                await end.send(i / 2)
            except green.ItemLost as error:
                assert isinstance(error, poly.ItemLost)


async def receive_all(end: green.Receiver[float]) -> list[float]:
    return [item async for item in end]


def several_images() -> None:
    with poly.Pool(2) as pool:
        halves: green.Channel[float] = green.Channel()
        sent = pool.promise(send_halves, halves.sender(), 3)
        assert_type(green.run(receive_all, halves.receiver()), list[float])
        sent.result()
        assert_type(green.map(half, range(3), over=pool), green.mapping.ListOrAwaitable[float])
        assert sum(green.map(half, range(3), width=2, over=pool)) == 1.5
        assert green.par(nap, nap, over=pool) == [1, 1]


if __name__ == "__main__":
    parts = (
        one_piece_of_work,
        drones,
        pools,
        promises,
        errors,
        other_processes,
        plain_code,
        several_images,
    )
    for part in (*parts, graphs_and_kept_results, pores):
        part()
    timelines(tempfile.mkdtemp())
    asyncio.run(in_asyncio())
    for main in (threads, channels, locks):
        green.run(main)
    assert a_database() == [("IBM",)]
    print("all of it works")
