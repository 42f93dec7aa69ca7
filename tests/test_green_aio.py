"""The bridges: asyncio's things in green threads, green things in asyncio."""

import asyncio
import contextvars
import http.server
import inspect
import re
import sys
import threading
from concurrent.futures import CancelledError
from functools import partial

import httpx
import pytest
from faults import append, lines, wait_for
from greens import fail, run
from scripts import output_of

import polycephaly as poly
from polycephaly import green
from polycephaly.green.aio import close_loop

var = contextvars.ContextVar("var", default="unset")


@pytest.fixture(autouse=True)
def no_loop_is_left():
    yield
    close_loop()


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


async def green_double(x):
    await green.sleep(0)
    return 2 * x


# -- asyncio in green threads ----------------------------------------------------------------------


@pytest.mark.guarantee("green-17")
def test_a_coroutine_of_asyncio_gives_its_value():
    async def main():
        return await green.aio(double(4)), await green.aio(asyncio.sleep(0.001, "slept"))

    assert run(main) == (8, "slept")


def test_what_green_threads_give_to_asyncio_runs_at_the_same_time():
    async def main():
        met = asyncio.Barrier(50)
        return await green.par(*(one(met) for _ in range(50)))

    async def one(met):
        return await green.aio(met.wait())

    assert sorted(run(main)) == list(range(50))


def test_all_of_it_runs_on_one_loop_on_one_native_thread():
    async def where():
        return id(asyncio.get_running_loop()), threading.get_ident()

    async def main():
        return {await green.aio(where()) for _ in range(5)}, threading.get_ident()

    places, here = run(main)
    assert len(places) == 1 and next(iter(places))[1] != here


def test_errors_come_through():
    async def main(error):
        with pytest.raises(type(error)) as caught:
            await green.aio(fail(error))
        return caught.value is error

    for error in (KeyError("x"), TimeoutError(), StopAsyncIteration()):
        assert run(main, error)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_what_would_end_the_loop_ends_only_the_thread_that_awaits_it(error):
    async def set_event(event):
        event.set()

    async def main():
        event = asyncio.Event()
        neighbour = green.spawn(green.aio(event.wait()))
        with pytest.raises(type(error)) as caught:
            await green.aio(fail(error))
        await green.aio(set_event(event))
        return await neighbour, caught.value is error

    assert run(main) == (True, True)


def test_the_loop_is_closed_though_code_exits_in_its_last_turn():
    async def make_stop_exit():
        loop = asyncio.get_running_loop()
        stop = loop.stop

        def stop_and_exit():
            loop.stop = stop
            stop()
            sys.exit()

        loop.stop = stop_and_exit

    async def main():
        await green.aio(make_stop_exit())

    run(main)
    close_loop()


def test_an_asyncio_task_that_is_cancelled_by_itself_is_an_error_or_cancellation_of_the_thread():
    async def main():
        await green.aio(fail(asyncio.CancelledError()))

    with pytest.raises((CancelledError, asyncio.CancelledError)):
        run(main)


def test_what_cannot_be_awaited_is_a_type_error():
    async def main(wrong):
        await green.aio(wrong)

    for wrong in (5, None, abs, [double]):
        with pytest.raises(TypeError, match=r"green\.aio takes an asyncio awaitable"):
            run(main, wrong)


@pytest.mark.guarantee("green-17")
def test_a_cancelled_thread_cancels_what_it_awaits_there_and_waits_for_its_end():
    told = []
    begun = threading.Event()

    async def slow_to_end():
        try:
            begun.set()
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            told.append("cancelled")
            await asyncio.sleep(0.02)
            raise
        finally:
            told.append("ended")

    async def waits():
        try:
            await green.aio(slow_to_end())
        finally:
            told.append("green")

    async def main():
        thread = green.spawn(waits)
        await green.call_long(begun.wait)
        thread.cancel()
        with pytest.raises(CancelledError):
            await thread
        return thread.cancelled()

    assert run(main) and told == ["cancelled", "ended", "green"]


def test_what_ends_with_a_value_although_it_was_cancelled_is_not_lost():
    begun = threading.Event()
    told = []

    async def stubborn():
        begun.set()
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            return "all the same"

    async def waits():
        told.append(await green.aio(stubborn()))
        await green.sleep(0)
        told.append("never")

    async def main():
        thread = green.spawn(waits)
        await green.call_long(begun.wait)
        thread.cancel()
        with pytest.raises(CancelledError):
            await thread

    run(main)
    assert told == ["all the same"]


def test_a_timeout_ends_what_runs_in_asyncio(clock):
    ended = []

    async def sleeps():
        clock.advance(1)
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(1)

    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(1):
                await green.aio(sleeps())

    run(main)
    assert ended == [1]


async def _ends_after(limit, clock):
    """Asyncio code that is slow to be cancelled: `limit` expires meanwhile."""
    try:
        await asyncio.sleep(1000)
    finally:
        clock.advance(1)
        while not limit.expired:
            await asyncio.sleep(0)


def test_two_timeouts_that_expire_around_the_same_await_both_do(clock):
    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(2) as outer, green.timeout(1):
                await green.aio(runs(outer))
        await green.sleep(0)
        return "on", clock.time()

    async def runs(outer):
        clock.advance(1)  # the inner one expires
        await _ends_after(outer, clock)

    assert run(main) == ("on", 2)


def test_a_cancel_is_not_lost_to_a_timeout_that_comes_after_it(clock):
    begun = poly.Promise()

    async def waits():
        try:
            async with green.timeout(1) as limit:
                await green.aio(runs(limit))
        except TimeoutError:
            pass
        await green.sleep(0)
        return "was never cancelled"

    async def runs(limit):
        begun.set_result(None)
        await _ends_after(limit, clock)

    async def main():
        thread = green.spawn(waits)
        await begun
        thread.cancel()
        with pytest.raises(CancelledError):
            await thread
        assert clock.time() == 1

    run(main)


def test_context_variables_of_the_thread_are_seen_in_asyncio():
    async def ask():
        await asyncio.sleep(0)
        return var.get()

    async def one(i):
        var.set(i)
        await green.sleep(0)
        return await green.aio(ask()) == i

    async def main():
        return await green.par(*(one(i) for i in range(10)))

    assert all(run(main))


def test_generators_timeouts_and_groups_of_asyncio_work_there():
    async def items():
        for i in range(3):
            await asyncio.sleep(0)
            yield i

    async def uses():
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            task = group.create_task(double(2))
        return [i async for i in items()], task.result(), await asyncio.to_thread(abs, -1)

    async def main():
        return await green.aio(uses())

    assert run(main) == ([0, 1, 2], 4, 1)


def test_httpx_talks_to_a_server_beside_the_green_threads():
    httpx = pytest.importorskip("httpx")
    meet = threading.Barrier(10)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            meet.wait(30)  # so all of them are under way at once
            body = self.path.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 10  # or who is not accepted at once tries again after a second

    server = Server(("127.0.0.1", 0), Handler)
    native = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    native.start()
    try:

        async def load(client, i):
            response = await green.aio(client.get(f"http://127.0.0.1:{server.server_port}/{i}"))
            return response.text

        async def main():
            client = httpx.AsyncClient(trust_env=False, timeout=20)
            try:
                return await green.par(*(load(client, i) for i in range(10)))
            finally:
                await green.aio(client.aclose())

        assert run(main) == [f"/{i}" for i in range(10)]
    finally:
        server.shutdown()
        native.join()
        server.server_close()


def test_a_loop_that_was_closed_is_made_anew():
    async def main():
        return await green.aio(double(1))

    for _ in range(5):
        assert run(main) == 2
        close_loop()
    close_loop()
    assert "polycephaly-asyncio" not in [each.name for each in threading.enumerate()]


def test_closing_the_loop_ends_what_runs_on_it():
    begun, ended = threading.Event(), []

    async def sleeps():
        begun.set()
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(1)

    async def waits():
        await green.aio(sleeps())

    thread = green.spawn(waits)
    assert begun.wait(30)
    close_loop()
    with pytest.raises((CancelledError, asyncio.CancelledError)):
        thread.result(30)
    assert ended == [1]


def test_a_program_that_used_asyncio_ends_by_itself():
    assert output_of("""
        import asyncio
        from polycephaly import green
        async def main(): return await green.aio(asyncio.sleep(0.01, "end"))
        print(green.run(main))
    """) == "end\n"  # fmt: skip


# -- green things in asyncio -----------------------------------------------------------------------


@pytest.mark.guarantee("green-18")
def test_a_green_thread_is_awaited_in_asyncio():
    async def main():
        assert await green.spawn(green_double, 4) == 8
        assert await green.spawn(abs, -1) == 1
        assert await asyncio.gather(*(green.spawn(green_double, i) for i in range(20))) == list(
            range(0, 40, 2)
        )
        with pytest.raises(KeyError):
            await green.spawn(fail, KeyError())
        return "on"

    assert asyncio.run(main()) == "on"


def test_an_asyncio_task_that_is_cancelled_cancels_the_green_thread_it_awaits():
    begun, ended = threading.Event(), threading.Event()

    async def forever():
        try:
            begun.set()
            await green.sleep(1000)
        finally:
            ended.set()

    async def main():
        thread = green.spawn(forever)
        await asyncio.to_thread(begun.wait, 20)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await thread
        return thread

    thread = asyncio.run(main())
    assert ended.wait(30)
    with pytest.raises(CancelledError):
        thread.result(30)


def test_a_cancelled_green_thread_cancels_who_awaits_it_in_asyncio():
    async def main():
        thread = green.spawn(green.sleep, 1000)
        thread.cancel()
        with pytest.raises(asyncio.CancelledError):
            await thread
        return "on"

    assert asyncio.run(main()) == "on"


def test_map_and_par_are_awaited_in_asyncio():
    async def main():
        values = [value async for value in green.map(green_double, range(10), width=3)]
        return (
            values,
            await green.map(green_double, range(3)),
            await _spawned(lambda: green.par(lambda: 1)),
        )

    assert asyncio.run(main()) == (list(range(0, 20, 2)), [0, 2, 4], [1])


async def _spawned(fn):
    return await green.spawn(fn)


def test_par_is_awaited_in_asyncio_and_takes_itself():
    async def main():
        both = asyncio.create_task(green.par(lambda: 1, partial(green_double, 2)))
        nested = green.par(green.par(partial(green_double, 3), lambda: 4), green_double(5))
        with pytest.raises(ExceptionGroup) as told:
            await green.par(
                partial(green.sleep, 1000), partial(fail, KeyError("x")), fail(KeyError("y"))
            )
        return await both, await nested, [repr(each) for each in told.value.exceptions]

    assert asyncio.run(main()) == ([1, 4], [[6, 4], 10], ["KeyError('x')"])


def test_par_and_map_over_a_pool_are_awaited_in_asyncio():
    async def main(pool):
        with pytest.raises(ExceptionGroup) as told:
            await green.par(partial(green.sleep, 1000), partial(fail, KeyError("x")), over=pool)
        squares = await green.map(lambda n: n * n, range(5), over=pool)
        return await green.par(int, list, over=pool), squares, repr(told.value.exceptions[0])

    with poly.Pool(2) as pool:
        assert asyncio.run(main(pool)) == ([0, []], [0, 1, 4, 9, 16], "KeyError('x')")


def test_a_green_thread_that_is_cancelled_as_it_leaves_a_pool_ends_the_pool():
    pools = []

    async def inner():
        async with poly.Pool(2) as pool:
            pools.append((pool, pool.promise("import time; time.sleep(1000)")))

    async def main():
        thread = green.spawn(inner)
        while not (pools and pools[0][1].running()):
            await green.sleep(0.01)
        await green.sleep(0.1)
        thread.cancel()
        with pytest.raises(CancelledError):
            await thread
        pool, sleeping = pools[0]
        return pool._dispatcher.has_ended, pool._dispatcher.ended.cancelled(), sleeping.cancelled()

    assert run(main) == (True, False, True)


def test_an_asyncio_task_that_is_cancelled_cancels_the_par_it_awaits():
    began, ended = threading.Event(), threading.Event()

    async def waits():
        began.set()
        try:
            await green.sleep(1000)
        finally:
            ended.set()

    async def main():
        task = asyncio.create_task(green.par(waits, waits))
        await asyncio.to_thread(began.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await asyncio.to_thread(ended.wait, 20)

    assert asyncio.run(main())


@pytest.mark.parametrize("where", [asyncio.run, green.run])
def test_map_that_is_taken_for_a_list_says_what_to_do(where):
    def helper():
        return sorted(green.map(green_double, range(3)))

    def unpack(mapped):
        _first, *_rest = mapped

    async def main():
        mapped = green.map(green_double, range(3))
        assert "green_double" in repr(mapped) and "await" in repr(mapped)
        for use in (list, unpack, lambda _: helper()):
            with pytest.raises(
                TypeError,
                match=r"green_double.* `await green.map\(\.\.\.\)`.* `await green.spawn\(",
            ):
                use(mapped)
        return await mapped, await green.spawn(helper)

    assert where(main()) == ([0, 2, 4], [0, 2, 4])


@pytest.mark.guarantee("green-18")
def test_channels_are_used_by_asyncio_and_green_threads_together():
    async def squares(source, target):
        async for x in source:
            await target.send(x * x)
        target.close()

    async def main():
        source, target = green.Channel(), green.Channel(2)
        green.spawn(squares, source, target)

        async def feeds():
            for i in range(20):
                await source.send(i)
            source.close()

        feeder = asyncio.create_task(feeds())
        values = [value async for value in target]
        await feeder
        return values

    assert asyncio.run(main()) == [i * i for i in range(20)]


def test_green_threads_and_asyncio_call_each_other_in_turns():
    async def there(depth):
        return 1 + await green.spawn(here, depth - 1) if depth else 0

    async def here(depth):
        return 1 + await green.aio(there(depth - 1)) if depth else 0

    assert run(here, 21) == 21


# -- drones ----------------------------------------------------------------------------------------


all_three = asyncio.Barrier(3)  # of one drone's loop


async def meet(n):
    await all_three.wait()
    return n


@green.aio
async def decorated(n, /, step=1):
    """Count."""
    await asyncio.sleep(0)
    return n + step


async def sleep_long(path):
    append(path, "begun")
    try:
        await asyncio.sleep(1000)
    finally:
        append(path, "ended")


@pytest.mark.guarantee("green-17")
def test_a_coroutine_function_of_asyncio_is_given_to_a_pool():
    @green.aio
    async def local(n):
        return await double(n)

    for width in (1, 3):
        with poly.Pool(1, width=width, timeout=60) as pool:
            assert list(pool.map(decorated, range(3))) == [1, 2, 3]
            assert pool.promise(decorated, 1, step=2).value == pool.doit(decorated, 2) == 3
            assert pool.submit(local, 2).result() == 4
            assert list(pool.map(green.aio(double), range(3))) == [0, 2, 4]
            assert pool.doit(green.aio(asyncio.sleep), 0, "slept") == "slept"
            assert pool.doit(green.aio(partial(asyncio.sleep, 0)), "slept") == "slept"
            with pytest.raises(LookupError, match="this"):
                pool.doit(green.aio(fail), LookupError("this"))
            assert green.map(decorated, range(3), over=pool) == [1, 2, 3]


def test_coroutine_functions_of_asyncio_overlap_in_a_drone():
    with poly.Pool(1, width=3, timeout=60) as pool:
        assert list(pool.map(green.aio(meet), range(3))) == [0, 1, 2]


def test_the_asyncio_task_in_a_drone_is_cancelled_with_its_promise(tmp_path):
    path = str(tmp_path / "book")
    with poly.Pool(1, width=2) as pool:
        promise = pool.promise(green.aio(sleep_long), path)
        wait_for(lambda: lines(path))
        assert promise.cancel()
        wait_for(lambda: lines(path) == ["begun", "ended"])


def test_a_coroutine_function_of_asyncio_is_one_for_green_threads():
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Count.")
    assert inspect.signature(decorated) == inspect.signature(decorated.__wrapped__)
    assert run(decorated, 1) == green.spawn(decorated, 1).value == 2
    assert green.map(decorated, range(3), width=2) == [1, 2, 3]
    with pytest.raises(TypeError, match="or a coroutine function, not <built-in function abs>"):
        green.aio(abs)


def test_asyncio_code_given_to_a_drone_as_it_is_names_the_cure():
    with poly.Pool(1) as pool, pytest.raises(TypeError, match=r"green\.aio\(fn\)"):
        pool.doit(double, 1)


def test_promises_and_what_gathers_them_are_awaited_in_green_threads():
    async def main():
        promise = poly.Promise()
        both = poly.gather(promise, green.spawn(green_double, 2))
        first = poly.race(green.spawn(green_double, 3), poly.Promise())
        in_order = [p.value async for p in poly.as_completed([green.spawn(abs, -1)])]
        promise.set_result(1)
        return await both, await first, await promise, in_order, await promise.then(lambda v: v + 1)

    assert run(main) == ([1, 4], 6, 1, [1], 2)


def test_a_library_that_needs_an_event_loop_is_told_how_to_get_one():
    async def fetch():
        async with httpx.AsyncClient(trust_env=False) as client:
            return await client.get("http://127.0.0.1:1/")

    with pytest.raises(TypeError, match=r"`await green\.aio\(coro\)` runs asyncio code") as raised:
        green.run(fetch)
    # Of anyio, or of sniffio where that is installed.
    assert re.search("event loop|async library", str(raised.value.__cause__))

    async def fetch_on_the_loop():
        return await green.aio(fetch())

    with pytest.raises(httpx.ConnectError):
        green.run(fetch_on_the_loop)
