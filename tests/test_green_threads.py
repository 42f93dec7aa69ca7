"""Green threads by themselves: starting, running, ending, being cancelled; what is said when it
goes wrong."""

import asyncio
import contextvars
import gc
import inspect
import itertools
import signal
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from contextlib import nullcontext, suppress
from functools import partial
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from faults import wait_for
from greens import double, fail, forever
from scripts import Script, output_of, run_script

import polycephaly as poly
from polycephaly import Promise, green
from polycephaly.green.aio import close_loop
from polycephaly.green.scheduler import scheduler
from polycephaly.green.testing import all_waiting, virtual_time
from polycephaly.promises.promise import Signal

var = contextvars.ContextVar("var", default="unset")


# -- starting and ending ---------------------------------------------------------------------------


def test_run_gives_the_value_of_a_coroutine_function_a_coroutine_and_a_plain_function():
    assert green.run(double, 4) == 8
    assert green.run(double(5)) == 10
    assert green.run(pow, 2, 8) == 256


def test_run_raises_the_error_itself():
    error = KeyError("mine")
    with pytest.raises(KeyError) as caught:
        green.run(fail, error)
    assert caught.value is error


def test_the_traceback_of_an_error_begins_in_the_users_code():
    def names(error):
        at, found = error.__traceback__, []
        while at is not None:
            found.append(at.tb_frame.f_code.co_name)
            at = at.tb_next
        return found

    for thread in (green.spawn(fail, ValueError(1)), green.spawn(fail(ValueError(1)), bound=True)):
        assert names(thread.exception())[-1] == "fail"
    assert "_loop" not in names(green.spawn(fail, ValueError(1)).exception())


@pytest.mark.guarantee("green-2")
def test_a_spawned_thread_is_a_promise():
    thread = green.spawn(double, 4)
    assert isinstance(thread, poly.Promise) and isinstance(thread, green.GreenThread)
    assert thread.value == thread.result() == thread.result(timeout=1) == 8
    assert (
        thread.done()
        and not thread.cancelled()
        and not thread.running()
        and thread.exception() is None
    )
    assert thread.then(lambda v: v + 1).value == 9
    assert poly.gather(green.spawn(double, 1), green.spawn(pow, 3, 2)).value == [2, 9]


@pytest.mark.guarantee("green-1")
def test_threads_run_in_the_order_of_their_start():
    order = []

    async def note(i):
        order.append(i)
        await green.sleep(0)
        order.append(i)

    async def main():
        for thread in [green.spawn(note, i) for i in range(5)]:
            await thread

    green.run(main)
    assert order == [*range(5), *range(5)]


@pytest.mark.guarantee("green-1")
def test_what_a_thread_does_between_two_awaits_nobody_interrupts():
    counter = 0

    async def add():
        nonlocal counter
        for _ in range(50):
            before = counter
            sum(range(100))
            counter = before + 1
            await green.sleep(0)

    async def main():
        await green.par(*[add] * 50)

    green.run(main)
    assert counter == 2500


@pytest.mark.guarantee("green-2")
def test_threads_are_started_from_many_native_threads_at_once():
    values = []

    def start(k):
        values.extend(
            thread.value for thread in [green.spawn(double, k * 1000 + i) for i in range(300)]
        )

    natives = [threading.Thread(target=start, args=[k]) for k in range(6)]
    for each in natives:
        each.start()
    for each in natives:
        each.join()
    assert sorted(values) == sorted(2 * (k * 1000 + i) for k in range(6) for i in range(300))


def test_a_thread_outlives_the_run_in_which_it_was_started():
    goes_on = poly.Promise()

    async def late():
        return await goes_on

    async def main():
        return green.spawn(late)

    thread = green.run(main)
    goes_on.set_result(7)
    assert thread.value == 7


def test_a_callable_object_and_a_partial_of_a_coroutine_function_are_coroutine_functions():
    import functools

    class Doubler:
        async def __call__(self, x):
            return 2 * x

        async def method(self, x):
            return 3 * x

    assert green.run(Doubler(), 2) == 4
    assert green.run(Doubler().method, 2) == 6
    assert green.run(functools.partial(double, 2)) == 4


class HasEachAttribute:
    """As a `Mock`, or what stands for a function or an object of another computer."""

    def __getattr__(self, name):
        return HasEachAttribute()

    def __call__(self, n):
        return n


def test_a_plain_function_or_value_that_has_each_attribute_is_no_coroutine():
    anything = HasEachAttribute()
    assert green.spawn(anything, 1).value == 1
    assert green.map(anything, range(3)) == [0, 1, 2]
    for mock in (Mock(return_value=3), AsyncMock(return_value=3)):
        assert green.map(mock, range(2)) == [3, 3]
    assert green.run(lambda: anything) is anything


def test_a_thread_can_be_awaited_by_many():
    async def main():
        thread = green.spawn(double, 4)
        return await green.par(*[thread_of(thread) for _ in range(10)])

    async def thread_of(thread):
        return await thread

    assert green.run(main) == [8] * 10


def test_system_exit_and_other_base_exceptions_arrive_too():
    for error in (SystemExit(3), KeyboardInterrupt(), BaseException("odd"), StopAsyncIteration()):
        with pytest.raises(type(error)):
            green.run(fail, error)


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_select", [False, True])
def test_a_thread_leaves_a_promise_that_many_await_without_a_search_among_them(in_select, clock):
    n, woken = 500, []
    promise = Signal()  # which is not cancelled with a waiter

    async def wait(i):
        await (green.select(green.after(1000), promise) if in_select else promise)
        woken.append(i)

    async def main():
        threads = [green.spawn(wait, i) for i in range(n)]
        await all_waiting()
        searched = len(promise._hooks)
        for thread in threads[::2]:
            thread.cancel()
        await all_waiting()
        promise.set_result(None)
        await all_waiting()
        return searched, all(thread.done() for thread in threads)

    searched, ended = green.run(main)
    assert searched < 100 and ended and woken == [*range(1, n, 2)]


def test_the_error_of_a_thread_that_many_have_waited_for_in_vain_is_printed(clock, capfd):
    async def fail_late():
        await green.sleep(2)
        raise KeyError("late")

    async def main():
        thread = green.spawn(fail_late)
        await green.par(*(green.select(thread, green.after(1)) for _ in range(200)))
        del thread
        await green.sleep(2)
        gc.collect()

    green.run(main)
    assert "KeyError: 'late'" in capfd.readouterr().err


def test_a_thread_has_a_name():
    unnamed, named = green.spawn(double, 1), green.spawn(double, 1, name="two")
    plain = green.spawn(abs, -1, name="abs!")
    assert [t.name for t in (unnamed, named, plain)] == ["double", "two", "abs!"]
    for each in (unnamed, named, plain):
        _ = each.value
    assert [t.name for t in (unnamed, named, plain)] == ["double", "two", "abs!"]  # afterwards too
    assert "two" in repr(named) and "fulfilled" in repr(named)
    assert green.spawn(double(1), name="three", bound=True).name == "three"


def test_a_thread_knows_itself():
    async def main():
        return green.current()

    thread = green.spawn(main)
    assert thread.value is thread
    with pytest.raises(RuntimeError, match="no green thread"):
        green.current()


# -- context variables -----------------------------------------------------------------------------


def test_a_thread_has_the_context_variables_of_who_started_it():
    async def ask():
        return var.get()

    def start():
        var.set("starter")
        return (
            green.spawn(ask).value,
            green.spawn(var.get).value,
            green.spawn(ask, bound=True).value,
        )

    assert contextvars.copy_context().run(start) == ("starter",) * 3
    assert green.run(ask) == "unset"


@pytest.mark.parametrize("bound", [False, True])
def test_what_a_thread_sets_is_its_own_and_stays_over_awaits_and_calls(bound):
    async def one(i):
        assert var.get() == "unset"
        await green.sleep(0)
        token = var.set(i)
        for _ in range(3):
            await green.sleep(0)
            await green.call(abs, -1)
            await green.call_long(abs, -1)
            assert var.get() == i
            assert await green.spawn(child) == (i, "child")
        var.reset(token)
        assert var.get() == "unset"

    async def child():
        before = var.get()
        var.set("child")
        await green.sleep(0)
        return before, var.get()

    async def main():
        for thread in [green.spawn(one, i, bound=bound) for i in range(10)]:
            await thread
        return var.get()

    assert green.run(main) == "unset"


def test_a_variable_that_is_set_and_left_in_the_last_step_hits_nobody_else():
    async def setter():
        var.set("leaked")

    async def ask():
        return var.get()

    async def main():
        threads = []
        for _ in range(20):
            green.spawn(setter)
            threads.append(green.spawn(ask))
        return {await thread for thread in threads}

    assert green.run(main) == {"unset"}


# -- cancelling ------------------------------------------------------------------------------------


def test_a_cancelled_thread_ends_where_it_waits_and_its_finally_clauses_run():
    ended = []

    async def waits():
        try:
            await green.Channel().receive()
        except green.Cancelled as error:
            assert isinstance(error, asyncio.CancelledError)
            ended.append("caught")
            raise
        finally:
            ended.append("finally")

    async def main():
        thread = green.spawn(waits)
        await green.sleep(0)
        assert thread.cancel() and not thread.done()
        with pytest.raises(CancelledError):
            await thread
        assert thread.cancelled() and thread.cancel()

    green.run(main)
    assert ended == ["caught", "finally"]


def test_a_thread_that_has_not_begun_never_does():
    begun = []

    async def begin():
        begun.append(1)

    async def main():
        thread = green.spawn(begin)
        thread.cancel()
        with pytest.raises(CancelledError):
            await thread

    green.run(main)
    assert not begun


def test_a_thread_may_finish_although_it_is_cancelled():
    async def stubborn():
        try:
            await forever()
        except green.Cancelled:
            await green.sleep(0)
            return "all the same"

    async def main():
        thread = green.spawn(stubborn)
        await green.sleep(0)
        thread.cancel()
        return await thread, thread.cancelled()

    assert green.run(main) == ("all the same", False)


def test_each_cancel_is_one_interruption():
    async def counts(told):
        for i in range(3):
            try:
                told.append(i)
                await forever()
            except green.Cancelled:
                pass
        return "three"

    async def main():
        told = []
        thread = green.spawn(counts, told)
        for i in range(3):
            while len(told) == i:
                await green.sleep(0)
            thread.cancel()
        return await thread

    assert green.run(main) == "three"


def test_a_thread_is_cancelled_from_plain_code():
    thread = green.spawn(forever)
    assert thread.cancel()
    with pytest.raises(CancelledError):
        _ = thread.value
    assert not green.spawn(double, 1).value or not green.run(_cancel_ended)


async def _cancel_ended():
    thread = green.spawn(double, 1)
    await thread
    return thread.cancel()


def test_a_thread_cancels_itself_at_its_next_await():
    after = []

    async def main():
        green.current().cancel()
        after.append("this step goes on")
        await green.sleep(0)
        after.append("never")

    with pytest.raises(CancelledError):
        green.run(main)
    assert after == ["this step goes on"]


def test_a_cancelled_thread_cancels_the_one_it_awaits():
    async def outer(inner):
        await inner

    async def main():
        inner = green.spawn(forever)
        middle = green.spawn(outer, inner)
        thread = green.spawn(outer, middle)
        await green.sleep(0)
        await green.sleep(0)
        thread.cancel()
        for each in (thread, middle, inner):
            with pytest.raises(CancelledError):
                await each

    green.run(main)


@pytest.mark.guarantee("green-19")
def test_the_promise_of_a_drone_that_a_cancelled_thread_awaits_is_cancelled():
    with poly.Pool(1) as pool:
        work = pool.promise("import time; time.sleep(100)")

        async def waits():
            await work

        async def main():
            thread = green.spawn(waits)
            await green.sleep(0.01)
            thread.cancel()
            with pytest.raises(CancelledError):
                await thread

        green.run(main)
        assert work.cancelled()
        assert pool.doit(abs, -3) == 3


def test_to_await_a_cancelled_thread_is_an_error_and_no_cancellation():
    async def main():
        thread = green.spawn(forever)
        thread.cancel()
        try:
            await thread
        except CancelledError as error:
            return not isinstance(error, asyncio.CancelledError), await double(1)

    assert green.run(main) == (True, 2)


# -- sleeping, timeouts ----------------------------------------------------------------------------


def test_sleepers_wake_in_the_order_of_their_times(clock):
    woken = []

    async def sleeper(i):
        await green.sleep(i)
        woken.append((i, clock.time()))

    green.par(*(sleeper(i) for i in (3, 1, 2)))
    assert woken == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.guarantee("green-15")
def test_a_timeout_becomes_an_error_at_the_end_of_its_block(clock):
    async def main():
        with pytest.raises(TimeoutError, match=r"0\.01 s"):
            async with green.timeout(0.01) as limit:
                await forever()
        assert limit.expired and clock.time() == 0.01
        async with green.timeout(100) as limit:
            await green.sleep(0)
        async with green.timeout(None):
            await green.sleep(0)
        assert not limit.expired
        return "on"

    assert green.run(main) == "on"


@pytest.mark.guarantee("green-15")
@pytest.mark.parametrize(
    ("outer", "inner", "whose"), [(1, 100, "outer"), (100, 1, "inner"), (1, 1, "outer")]
)
def test_nested_timeouts_each_end_their_own_block(outer, inner, whose, clock):
    async def main():
        try:
            async with green.timeout(outer):
                try:
                    async with green.timeout(inner):
                        await forever()
                except TimeoutError:
                    return "inner"
        except TimeoutError:
            return "outer"

    assert green.run(main) == whose and clock.time() == 1


@pytest.mark.guarantee("green-15")
def test_a_timeout_that_comes_at_the_very_end_hits_nothing_after_the_block(clock):
    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(1):
                await green.sleep(0)
                clock.advance(2)  # it expires within this step
                await green.sleep(0)
        await green.sleep(0)
        return "on"

    assert green.run(main) == "on"


def test_a_block_that_caught_the_interruption_of_its_timeout_ends(clock):
    async def main():
        try:
            async with green.timeout(1):
                try:
                    await forever()
                except green.Cancelled:
                    pass
        except TimeoutError:
            pass
        return "on"

    assert green.spawn(main).result(30) == "on" and clock.time() == 1


def test_an_error_from_a_finally_clause_passes_a_timeout(clock):
    async def main():
        async with green.timeout(1):
            try:
                await forever()
            finally:
                raise KeyError("cleanup")

    with pytest.raises(KeyError, match="cleanup"):
        green.spawn(main).result(30)
    assert clock.time() == 1


def test_an_outer_cancel_passes_a_timeout():
    async def waits():
        async with green.timeout(100):
            await forever()

    thread = green.spawn(waits)
    green.run(all_waiting)
    thread.cancel()
    with pytest.raises(CancelledError):
        thread.result(30)


# -- par and map -----------------------------------------------------------------------------------


def test_par_gives_the_values_in_order_from_plain_code_and_from_coroutines():
    async def main():
        return await green.par(double(1), lambda: 2, double(4))

    assert green.par(double(1), lambda: 2, double(4)) == green.run(main) == [2, 2, 8]
    assert green.par() == []


def test_par_cancels_the_others_at_the_first_error():
    ended = []

    async def other():
        try:
            await forever()
        finally:
            ended.append(1)

    async def fails():
        await green.sleep(0)
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:
        green.par(other, fails, other)
    assert [type(e) for e in caught.value.exceptions] == [ZeroDivisionError] and ended == [1, 1]


@pytest.mark.guarantee("green-16")
def test_map_gives_values_in_order_and_runs_as_many_at_once_as_its_width(clock):
    now = most = 0

    async def slow(i):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await green.sleep(i % 3)
        now -= 1
        return i * i

    assert green.map(slow, range(50), width=7) == [i * i for i in range(50)]
    assert most == 7
    assert green.map(lambda i: i * i, range(20)) == [i * i for i in range(20)]
    assert green.map(slow, []) == []
    assert green.map(slow, (i for i in range(3)), width=100) == [0, 1, 4]


def test_map_in_a_coroutine_is_awaited_or_iterated():
    async def main():
        listed = await green.map(double, range(30), width=4)
        iterated = [value async for value in green.map(double, range(30), width=4)]
        return listed, iterated

    assert green.run(main) == (list(range(0, 60, 2)),) * 2


def test_map_raises_the_first_error_itself_and_cancels_the_rest(clock):
    begun = []

    async def third_fails(i):
        begun.append(i)
        if i == 3:
            raise KeyError(i)
        await green.sleep(1)

    with pytest.raises(KeyError):
        green.map(third_fails, range(10000), width=3)
    assert begun == [0, 1, 2, 3, 4, 5] and clock.time() == 1

    async def main():
        async for _ in green.map(third_fails, range(10000), width=3):
            pass

    with pytest.raises(KeyError):
        green.run(main)


def test_map_refuses_an_asynchronous_input_with_the_cure():
    async def count():
        yield 1

    with pytest.raises(TypeError, match="which is asynchronous: collect its items before"):
        green.map(double, count())


@pytest.mark.parametrize("bound", [False, True])
def test_a_dropped_asynchronous_generator_is_closed_by_a_thread_of_its_own(bound, capfd):
    closed_by = []

    async def generate():
        try:
            yield 1
            yield 2
        finally:
            await green.sleep(0)
            closed_by.append(green.current().name)

    async def send_late(channel):
        await all_waiting()
        await channel.send("item")

    async def main():
        async for _ in generate():
            break
        gc.collect()
        channel = green.Channel()
        green.spawn(send_late, channel)
        return await channel.receive()

    assert green.spawn(main, bound=bound).result(30) == "item"
    wait_for(lambda: closed_by)
    assert "close of" in closed_by[0] and "generate" in closed_by[0]
    assert not capfd.readouterr().err


def test_a_generator_that_is_dropped_at_the_end_of_a_program_is_closed_and_its_error_told():
    done = run_script(
        """
        from polycephaly import green

        async def generate(name):
            try:
                yield 1
            finally:
                await green.sleep(0.01)
                print("closed", name)
                raise KeyError(name)

        async def main():
            async for _ in generate("a"):
                break

        green.run(main)
        """
    )
    assert done.stdout == "closed a\n" and done.returncode == 0
    assert "error of green thread 'close of" in done.stderr and "KeyError: 'a'" in done.stderr


@pytest.mark.parametrize("width", [1, 3])
def test_a_call_of_a_map_that_is_cancelled_by_itself_is_an_error_of_its_reader(width):
    async def cancelled_at_1(n):
        if n == 1:
            raise asyncio.CancelledError
        return n

    async def iterate():
        return [n async for n in green.map(cancelled_at_1, range(3), width)]

    async def collect():
        return await green.map(cancelled_at_1, range(3), width)

    for fn in (iterate, collect):
        thread = green.spawn(fn)
        assert isinstance(thread.exception(30), CancelledError) and not thread.cancelled()
        assert "cancelled_at_1 was cancelled" in str(thread.exception())


def test_an_error_of_the_items_is_raised_by_map():
    def items():
        yield 1
        raise ValueError("items")

    async def main():
        return [value async for value in green.map(double, items())]

    for fn in (lambda: green.map(double, items()), lambda: green.run(main)):
        with pytest.raises(ValueError, match="items"):
            fn()


def test_a_map_that_was_read_refuses_a_second_reader():
    async def iterate(mapped):
        return [value async for value in mapped]

    async def collect(mapped):
        return await mapped

    async def read_twice(first, second, **options):
        mapped = green.map(abs, range(3), **options)
        assert await first(mapped) == [0, 1, 2]
        with pytest.raises(RuntimeError, match=r"green.map of .*abs.* was read before"):
            await second(mapped)

    with poly.Pool(1) as pool:
        for options in {}, {"over": pool}:
            for first, second in (iterate, iterate), (iterate, collect), (collect, collect):
                green.run(read_twice(first, second, **options))


def raise_at_two(error, n):
    if n == 2:
        raise error
    return n


async def await_and_raise_at_two(error, n):
    return raise_at_two(error, n)


def items_up_to(error):
    yield from range(2)
    raise error


@pytest.mark.parametrize("run", [asyncio.run, green.run])
@pytest.mark.parametrize("over", [False, True])
def test_a_stop_async_iteration_of_users_is_an_error_in_async_for(run, over):
    stop = StopAsyncIteration("mine")

    async def read(fn, items, **options):
        async for _ in green.map(fn, items, **options):
            pass

    with poly.Pool(1) if over else nullcontext() as pool:
        options = {"over": pool} if over else {}
        for fn in raise_at_two, await_and_raise_at_two:
            with pytest.raises(RuntimeError, match=r"map\(.*item 2 raised Stop") as raised:
                run(read(partial(fn, stop), range(9), **options))
            assert over or raised.value.__cause__ is stop
        with pytest.raises(RuntimeError, match=r"the input of .*\(double.*item 2 raised Stop"):
            run(read(double, items_up_to(stop), **options))


def test_an_error_of_a_map_keeps_its_cause_and_context():
    async def fail(error_has_cause):
        try:
            raise LookupError("first")
        except LookupError as first:
            if error_has_cause:
                raise ValueError("second") from first
            raise ValueError("second")  # noqa: B904 - with a context

    for has_cause in (True, False):
        with pytest.raises(ValueError, match="second") as raised:
            green.map(fail, [has_cause])
        assert isinstance(raised.value.__context__, LookupError)
        assert (raised.value.__cause__ is raised.value.__context__) is has_cause
        assert raised.value.__suppress_context__ is has_cause


def test_map_takes_items_only_as_they_are_asked_for():
    taken = []

    def items():
        for i in range(10**9):
            taken.append(i)
            yield i

    async def main():
        values = green.map(double, items(), width=2)
        got = []
        async for value in values:
            got.append(value)
            if len(got) == 5:
                break
        return got

    assert green.run(main) == [0, 2, 4, 6, 8]
    assert len(taken) < 30


def test_the_workers_of_a_map_that_is_left_end():
    async def main():
        async for _ in green.map(double, range(1000), width=2):
            break
        gc.collect()
        for _ in range(20):
            await green.sleep(0)
        return [each.name for each in green.threads()]

    assert not [name for name in green.run(main) if name.endswith("_work")]


def test_a_reader_that_is_cancelled_ends_a_map_in_silence(capfd):
    async def reader():
        async for _ in green.map(lambda i: green.sleep(1000), range(10), width=2):
            pass

    thread = green.spawn(reader)
    green.run(all_waiting)
    thread.cancel()
    with pytest.raises(CancelledError):
        thread.result(30)
    green.run(all_waiting)
    gc.collect()
    assert capfd.readouterr().err == ""
    assert not [each for each in green.threads() if each.name.endswith("_work")]


# -- wrong use -------------------------------------------------------------------------------------


def test_wrong_arguments_are_said_at_once():
    with pytest.raises(TypeError, match="missing 1 required"):
        green.spawn(double)
    for wrong in (5, None, "double"):
        with pytest.raises(TypeError, match="a function or a coroutine"):
            green.spawn(wrong)
        with pytest.raises(TypeError, match="a function or a coroutine"):
            green.run(wrong)
    coro = double(1)
    with pytest.raises(TypeError, match="takes no arguments"):
        green.spawn(coro, 2)
    coro.close()
    with pytest.raises(TypeError, match="takes a function"):
        green.map(None, [1])
    with pytest.raises(TypeError, match="not iterable"):
        green.map(double, 5)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="at least 1 green thread"):
            green.map(double, [1], width=wrong)
    for wrong in (1.5, True, "3"):
        with pytest.raises(TypeError, match="width"):
            green.map(double, [1], width=wrong)
    for wrong in (-1, float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            green.timeout(wrong)
        with pytest.raises(ValueError, match="seconds"):
            green.run(green.sleep, wrong)
    for wrong in ("1", True, None):
        with pytest.raises(TypeError, match="is a number of seconds, not "):
            green.run(green.sleep, wrong)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="native_threads"):
            green.configure(native_threads=wrong)
        with pytest.raises(ValueError, match="window"):
            green.configure(window=wrong)


@pytest.mark.parametrize(
    "wait",
    [
        lambda thread, seconds: thread.result(seconds),
        lambda _, seconds: green.Channel().get(timeout=seconds),
        lambda _, seconds: green.Channel().put("item", timeout=seconds),
    ],
)
def test_a_wait_of_plain_code_takes_any_number_of_seconds_and_refuses_nan(wait):
    thread = green.spawn(forever)
    with pytest.raises(TimeoutError):
        wait(thread, np.float32(0.01))
    with pytest.raises(ValueError, match="timeout is a number of seconds, not nan"):
        wait(thread, float("nan"))  # it would never end
    thread.cancel()


def test_a_channel_refuses_a_wrong_time_limit_also_where_nothing_has_to_wait():
    channel = green.Channel(1)
    with pytest.raises(ValueError, match="not nan"):
        channel.put("lost", timeout=float("nan"))
    channel.put("item")
    with pytest.raises(TypeError, match="not '1'"):
        channel.get(timeout="1")
    assert channel.get() == "item"


def test_seconds_and_counts_may_be_scalars_of_numpy():
    """Such seconds ended the scheduler's sleep with an error, and the next one, too."""
    soon, two = np.float32(0.001), np.int64(2)

    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(soon):
                await green.sleep(np.float32(1000))
        return await green.select(green.after(soon), green.after(1000))

    assert green.run(main).index == 0
    assert green.run(green.sleep, soon) is None
    assert green.map(double, [1, 2], width=two) == [2, 4]
    assert green.Channel(two).capacity == 2
    assert "2" in repr(green.Semaphore(two)) and green.Barrier(two).enrolled == 2
    with virtual_time(jumps=False) as clock:
        clock.advance(np.float32(2))
        assert type(clock.time()) is float


def test_after_an_error_in_its_sleep_the_scheduler_is_as_before(monkeypatch, caplog):
    """The waker of that sleep was left in the bell, and later called in vain."""
    errors = [RuntimeError("from a clock"), RuntimeError("from a clock")]
    seconds_left = scheduler.timers.seconds_left

    def fail_first():
        if errors:
            raise errors.pop()
        return seconds_left()

    monkeypatch.setattr(scheduler.timers, "seconds_left", fail_first)
    for _ in range(10):
        assert green.run(double, 1) == 2
        green.run(green.sleep, 0.001)
    assert not errors and len(scheduler.bell) <= 1
    assert [str(record.exc_info[1]) for record in caplog.records] == ["from a clock"] * 2


def test_run_and_waiting_inside_a_coroutine_are_errors_that_say_what_to_do():
    async def runs():
        green.run(double, 1)

    async def runs_a_coroutine():
        green.run(double(1))

    async def waits():
        _ = green.spawn(forever).value

    async def waits_for_combined():
        poly.gather(Promise(), green.spawn(forever).then(str)).result(30)

    async def iterates():
        list(poly.as_completed([Promise(), green.spawn(forever)], timeout=30))

    from polycephaly.green.scheduler import scheduler

    before = set(scheduler.live)
    for wrong in (runs, runs_a_coroutine, waits, waits_for_combined, iterates):
        with pytest.raises(RuntimeError, match="await"):
            green.run(wrong)
    left = scheduler.live - before
    assert {each.name for each in left} <= {"forever"}
    for thread in left:
        thread.cancel()


@pytest.mark.guarantee("green-17")
@pytest.mark.parametrize(
    "foreign",
    [
        lambda: asyncio.sleep(0),
        lambda: asyncio.sleep(1),
        lambda: asyncio.Event().wait(),
        lambda: _yields("odd"),
    ],
    ids=["bare yield", "no loop", "future", "odd"],
)
def test_a_foreign_awaitable_is_a_type_error_that_names_green_aio(foreign):
    async def main():
        await foreign()

    with pytest.raises(TypeError, match=r"green\.aio"):
        green.run(main)


def test_a_foreign_awaitable_is_told_where_it_is_awaited_and_may_be_caught():
    async def main():
        try:
            await asyncio.sleep(0)
        except TypeError as error:
            await green.sleep(0)
            return str(error)

    assert "green.aio" in green.run(main)


class _yields:
    def __init__(self, what):
        self.what = what

    def __await__(self):
        yield self.what


def test_green_things_awaited_in_asyncio_say_that_they_are_for_green_threads():
    async def main():
        for awaitable in (
            green.sleep(1),
            green.call(abs, 1),
            green.call_long(abs, 1),
            green.aio(double(1)),
        ):
            try:
                await awaitable
            except RuntimeError as error:
                assert "green threads" in str(error)
            else:
                raise AssertionError(awaitable)

    asyncio.run(main())


# -- errors nobody looked at -----------------------------------------------------------------------


@pytest.mark.guarantee("green-2")
def test_an_error_nobody_looked_at_is_printed_with_the_name(capfd):
    async def main():
        green.spawn(fail, ValueError("lost"), name="the one that fails")
        green.spawn(fail, ValueError("lost too"))
        green.spawn(lambda: 1 / 0, name="plain")
        await all_waiting()

    printed = ""

    def all_is_printed():
        nonlocal printed
        gc.collect()
        printed += capfd.readouterr().err
        words = (
            "'the one that fails'",
            "lost",
            "'fail'",
            "lost too",
            "'plain'",
            "ZeroDivisionError",
            "in fail",
        )
        return all(each in printed for each in words)

    green.run(main)
    wait_for(all_is_printed)


def test_an_error_somebody_looked_at_is_not_printed(capfd):
    async def looks():
        with pytest.raises(ValueError):
            await green.spawn(fail, ValueError())
        ended = green.spawn(fail, ValueError())
        await green.sleep(0)
        with pytest.raises(ValueError):
            await ended

    green.run(looks)
    green.spawn(fail, ValueError()).exception()
    with pytest.raises(ValueError):
        green.spawn(fail, ValueError()).then(print).result()
    with pytest.raises(ValueError):
        poly.gather(green.spawn(fail, ValueError())).result()
    gc.collect()
    assert capfd.readouterr().err == ""


def test_an_error_is_printed_although_somebody_had_waited_in_vain(capfd):
    goes_on = poly.Promise()

    async def late():
        await goes_on
        raise ValueError("after the wait")

    def wait():
        thread = green.spawn(late)
        with pytest.raises(TimeoutError):
            thread.result(0.01)
        goes_on.set_result(None)

    wait()
    green.run(all_waiting)
    gc.collect()
    assert "after the wait" in capfd.readouterr().err


def test_a_cancelled_thread_is_no_error(capfd):
    green.spawn(forever).cancel()
    green.run(all_waiting)
    gc.collect()
    assert capfd.readouterr().err == ""


@pytest.mark.guarantee("green-2")
def test_errors_nobody_looked_at_are_printed_when_the_program_ends():
    done = run_script("""
        from polycephaly import green
        async def fail(): raise ValueError("at the end")
        keep = green.spawn(fail, name="kept")
        green.run(green.sleep, 0.02)
    """)
    assert done.returncode == 0 and "'kept'" in done.stderr and "at the end" in done.stderr


def test_identical_errors_that_no_code_has_looked_at_are_printed_twenty_times_and_then_counted():
    printed = run_script("""
        from polycephaly import green
        from polycephaly.green.testing import all_waiting
        async def fail(error):
            raise error
        async def main():
            for i in range(50):
                green.spawn(fail, ValueError("the same"), name=f"thread-{i}")
                green.spawn(fail, ValueError(f"{i // 10}"))
            await all_waiting()
        green.run(main)
    """).stderr
    assert printed.count("No code looked at the error of green thread 'thread-") == 20
    assert printed.count("\nValueError: the same") == 21
    # Which one is last is the affair of the finalizers.
    assert "the errors of 30 more green threads, the last one 'thread-" in printed
    assert [printed.count(f"\nValueError: {i}\n") for i in range(5)] == [10] * 5


# -- the program around them -----------------------------------------------------------------------


@pytest.mark.guarantee("green-3")
def test_ctrl_c_in_run_ends_the_thread_first_and_then_is_raised():
    with Script("""
        from polycephaly import green
        async def main():
            try:
                print("ready", flush=True)
                await green.Channel().receive()
            finally:
                await green.sleep(0.01)
                print("cleaned up", flush=True)
        green.spawn(green.sleep, 100)
        try:
            green.run(main)
        except KeyboardInterrupt:
            print("interrupted", green.run(green.call, abs, -1), flush=True)
    """) as script:
        script.read_until("ready")
        script.signal(signal.SIGINT)
        assert (script.read_line(), script.read_line()) == ("cleaned up", "interrupted 1")
        assert script.wait() == 0


def interrupt_main_thread():
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)


@pytest.fixture
def handled():
    """The errors that a signal handler raises, one at each signal."""
    errors = []

    def handle(*_):
        raise errors.pop(0)

    before = signal.signal(signal.SIGUSR1, handle)
    yield errors
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.guarantee("green-3")
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), TimeoutError("an alarm")])
@pytest.mark.parametrize("kind", ["run", "map", "par"])
def test_an_error_of_a_signal_handler_is_raised_after_the_clean_up_of_what_ran(
    kind, error, handled
):
    handled.append(error)
    begun, ended = [], []

    async def work(item):
        begun.append(item)
        try:
            if len(begun) == number:
                interrupt_main_thread()
            await forever()
        finally:
            await green.sleep(0.001)
            ended.append(item)

    start, number = {
        "run": (lambda: green.run(work, 0), 1),
        "map": (lambda: green.map(work, range(100), width=2), 2),
        "par": (lambda: green.par(*(partial(work, item) for item in range(2))), 2),
    }[kind]
    with pytest.raises(type(error)) as raised:
        start()
    assert raised.value is error
    assert sorted(begun) == sorted(ended) == list(range(number))


def with_a_signal_at_each_call(operation, handled):
    """Perform `operation` again and again: with a signal at the first call or return of this thread
    in `polycephaly.green`, then at the second, and so on. Yield after each."""
    # At whose return a value, or a generator, is lost. CPython runs no handler there, nor before a
    # call of C.
    outermost = ("get", "wait_in_proxy", "paused_for_fork")
    of_sigint = signal.getsignal(signal.SIGINT)
    for place in itertools.count():
        wait_for(lambda: scheduler.bell)  # the scheduler sleeps
        left, error = place, ZeroDivisionError(place)

        def interrupt_at_place(frame, event, arg, error=error):
            nonlocal left
            code = frame.f_code
            if "/polycephaly/green/" not in code.co_filename:
                return
            if event in ("return", "c_call") and code.co_name in outermost:
                return
            left -= 1
            if left < 0:
                sys.setprofile(None)
                handled.append(error)
                interrupt_main_thread()

        sys.setprofile(interrupt_at_place)
        try:
            operation()
            return
        except ZeroDivisionError as raised:
            assert raised is error
        finally:
            sys.setprofile(None)
        assert signal.getsignal(signal.SIGINT) == of_sigint
        yield


@pytest.mark.guarantee("green-3")
def test_green_run_works_after_an_error_of_a_signal_handler_at_any_of_its_calls(handled):
    work = partial(pow, 2, 1)
    for _ in with_a_signal_at_each_call(lambda: green.run(work), handled):
        assert green.run(work) == 2
    wait_for(lambda: not scheduler.live and not scheduler.native_calls)


@pytest.mark.guarantee("green-3")
def test_get_loses_no_item_to_an_error_of_a_signal_handler_at_any_of_its_calls(handled):
    channel = green.Channel(1)
    channel.put(1)
    for _ in with_a_signal_at_each_call(channel.get, handled):
        assert channel.get(10) == 1
        channel.put(1)
    wait_for(lambda: not scheduler.live)


@pytest.mark.guarantee("green-3")
def test_green_threads_run_after_an_error_of_a_signal_handler_at_any_call_of_a_forks_pause(handled):
    def pause():
        with scheduler.paused_for_fork():
            pass

    work = partial(pow, 2, 1)
    for _ in with_a_signal_at_each_call(pause, handled):
        assert green.spawn(work).result(10) == 2
    wait_for(lambda: not scheduler.live and not scheduler.native_calls)


def test_a_second_signal_ends_the_wait_for_a_clean_up(handled):
    handled += [KeyboardInterrupt("first"), KeyboardInterrupt("second")]
    goes_on = threading.Event()
    threads = []

    async def main():
        threads.append(green.current())
        try:
            interrupt_main_thread()
            await forever()
        finally:
            interrupt_main_thread()
            await green.call(goes_on.wait)

    with pytest.raises(KeyboardInterrupt, match="second"):
        green.run(main)
    goes_on.set()
    wait_for(threads[0].done)


@pytest.mark.parametrize("timeout", [None, 1000])
def test_a_time_out_error_of_a_signal_handler_is_raised_by_get_and_put_as_it_is(timeout, handled):
    async def interrupt():
        await all_waiting()
        interrupt_main_thread()

    for operation in (
        lambda: green.Channel().get(timeout),
        lambda: green.Channel().put(1, timeout),
    ):
        handled.append(error := TimeoutError("of the handler"))
        with pytest.raises(TimeoutError) as raised:
            green.spawn(interrupt)
            operation()
        assert raised.value is error


def test_a_coroutine_that_is_refused_is_closed():
    async def in_asyncio():
        coro = double(1)
        with pytest.raises(RuntimeError, match=r"green\.run waits"):
            green.run(coro)
        assert inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED
        coro = double(1)
        with pytest.raises(RuntimeError, match=r"green\.aio is for green threads"):
            await green.aio(coro)
        assert inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED

    asyncio.run(in_asyncio())
    coro = double(1)
    with pytest.raises(TypeError, match="takes no arguments"):
        green.spawn(coro, 1)
    assert inspect.getcoroutinestate(coro) == inspect.CORO_CLOSED


def test_ctrl_c_arrives_while_a_green_thread_computes_and_while_one_is_in_a_call():
    for body in ("while True: await green.sleep(0)", "await green.call(time.sleep, 100)"):
        with Script(f"""
            import time
            from polycephaly import green
            async def main():
                print("ready", flush=True)
                {body}
            async def other():
                await main()
            try:
                green.spawn(other)
                green.run(green.sleep, 100)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        """) as script:
            script.read_until("ready")
            script.signal(signal.SIGINT)
            assert script.read_line() == "interrupted"
            assert script.wait() == 0


def test_ctrl_c_uncaught_ends_the_program_as_always():
    with Script("""
        from polycephaly import green
        async def main():
            print("ready", flush=True)
            await green.sleep(100)
        green.run(main)
    """) as script:
        script.read_until("ready")
        script.signal(signal.SIGINT)
        assert script.wait() == -signal.SIGINT
        assert script.process.stderr.read().rstrip().endswith("KeyboardInterrupt")


def test_a_program_ends_in_silence_whatever_green_threads_it_leaves():
    assert output_of("""
        import asyncio, time
        from polycephaly import green
        async def sleeps(): await green.sleep(100)
        async def group():
            async with green.Group() as g:
                g.spawn(sleeps); await sleeps()
        async def times():
            async with green.timeout(50): await green.Channel().receive()
        async def calls(): await green.call(time.sleep, 100)
        async def calls_long(): await green.call_long(time.sleep, 100)
        async def aio(): await green.aio(asyncio.sleep(100))
        async def awaits(): await green.spawn(sleeps)
        async def par(): await green.par(sleeps, sleeps)
        async def maps():
            async for _ in green.map(lambda _: time.sleep(100), range(100)): pass
        async def selects(): await green.select(green.Channel().receiving(), green.after(100))
        for fn in (sleeps, group, times, calls, calls_long, aio, awaits, par, maps, selects):
            green.spawn(fn)
        green.spawn(time.sleep, 100), green.spawn(green.Channel().get)
        green.spawn(sleeps, bound=True), green.spawn(calls, bound=True)
        green.run(green.sleep, 0.1)
        print("end")
    """) == "end\n"  # fmt: skip


def test_an_image_that_imports_green_threads_starts_nothing():
    assert output_of("""
        import os
        from polycephaly import green
        print(len(os.listdir("/proc/self/task")))
    """) == "1\n"  # fmt: skip


def test_native_threads_are_gone_soon_after_the_last_green_thread():
    assert output_of("""
        import os, time
        from polycephaly import green
        green.par(*[lambda: time.sleep(0.01)] * 50)
        end = time.monotonic() + 25
        while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:
            time.sleep(0.01)
        print(len(os.listdir("/proc/self/task")))
    """) == "1\n"  # fmt: skip


def test_what_our_own_functions_give_may_be_started_and_awaited_once():
    async def main():
        lock = green.Lock()
        await green.spawn(green.sleep(0.001))
        await green.par(green.sleep(0.001), lock.acquire())
        again = green.Event()
        again.set()
        waiting = again.wait()
        await waiting
        assert await green.sleep(0) is None
        lock.release()
        acquiring = lock.acquire()
        await acquiring
        with pytest.raises(RuntimeError, match="again"):
            await acquiring

    green.run(main)
    with poly.Pool(1, width=2) as pool:
        assert pool.doit(green.sleep, 0.001) is None


def test_a_callback_that_ends_its_caller_costs_no_native_thread(caplog):
    def end(_):
        raise SystemExit("of a callback")

    green.configure(native_threads=1)
    try:
        gate = threading.Event()
        green.spawn(gate.wait).add_done_callback(end)
        gate.set()
        assert green.spawn(int).result(30) == 0
    finally:
        green.configure(native_threads=16384)


def test_a_callback_of_a_member_that_ends_its_caller_is_told_as_a_callback(caplog):
    def end(_):
        raise SystemExit("of a callback")

    async def main():
        gate = green.Event()

        async def coroutine():
            await gate.wait()

        def plain():
            green.run(gate.wait)

        async with green.Group() as group:
            for fn in (plain, coroutine):
                group.spawn(fn).add_done_callback(end)
            gate.set()

    green.run(main)
    assert [each.message for each in caplog.records] == ["a callback of a green thread failed"] * 2


def test_a_cancelled_wait_for_a_value_of_map_loses_no_value(clock):
    async def main():
        gate = green.Event()

        async def slow(i):
            await gate.wait()
            return i

        values = aiter(green.map(slow, range(10), width=3))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with green.timeout(1):
                    await anext(values)
        assert clock.time() == 3
        gate.set()
        return [value async for value in values]

    assert green.run(main) == list(range(10))


def test_several_readers_of_one_map_get_each_value_once(clock):
    async def main():
        async def slow(i):
            await green.sleep(1)
            return i

        values, got = aiter(green.map(slow, range(12), width=3)), []

        async def read():
            async for value in values:
                got.append(value)

        for reader in [green.spawn(read) for _ in range(3)]:
            await reader
        return got

    assert sorted(green.run(main)) == list(range(12))


# -- nothing is kept alive by a cycle --------------------------------------------------------------


class Held:
    """An argument or a local variable of code that ends by an error."""

    def __init__(self):
        held.append(weakref.ref(self))


held = []


def blame(argument):
    local = Held()
    raise ValueError(argument is local)


async def blame_later(argument):
    await green.sleep(0)
    blame(argument)


async def hold(wait, argument):
    local = Held()
    await wait()
    return argument, local


def long_sleep(_=None):
    return green.sleep(1000)


async def for_result(awaitables):
    await awaitables.pop()


async def for_all(values):
    async for _ in values:
        pass


async def in_lock():
    async with (lock := green.Lock()):
        await lock.acquire()


async def in_claim():
    async with (channel := green.Channel()).claim("send"):
        await green.spawn(hold, channel.claim("send").__aenter__, Held())


async def in_asyncio():
    await green.aio(hold(partial(asyncio.sleep, 1000), Held()))


async def in_group():
    async with green.Group() as group:
        group.spawn(hold, long_sleep, Held())
        await long_sleep()


async def in_timeout():
    async with green.timeout(1000) as limit:
        await long_sleep()
    return limit


async def after_call(call):
    await call(len, "")
    await long_sleep()


WAITS = {
    "sleep": long_sleep,
    "event": lambda: green.Event().wait(),
    "lock": in_lock,
    "semaphore": lambda: green.Semaphore(0).acquire(),
    "barrier": lambda: green.Barrier(2).sync(),
    "send": lambda: green.Channel().send(Held()),
    "receive": lambda: green.Channel().receive(),
    "claim": in_claim,
    "select": lambda: green.select(
        Promise(), green.Channel().sending(Held()), green.Channel().receiving(), green.after(1000)
    ),
    "promise": lambda: for_result([Promise()]),
    "then": lambda: for_result([Promise().then(blame)]),
    "thread": lambda: for_result([green.spawn(hold, long_sleep, Held())]),
    "aio": in_asyncio,
    "group": in_group,
    "timeout": in_timeout,
    "call": partial(after_call, green.call),
    "call_long": partial(after_call, green.call_long),
    "map": lambda: for_result([green.map(long_sleep, [Held(), Held()])]),
    "async for map": lambda: for_all(green.map(long_sleep, [Held(), Held()])),
    "par": lambda: green.par(long_sleep, partial(hold, long_sleep, Held())),
}


def cancel(wait, clock):
    async def main():
        threads = [green.spawn(hold, wait, Held(), bound=bound) for bound in (False, False, True)]
        await all_waiting()
        for thread in threads:
            thread.cancel()
        for thread in threads:
            with suppress(CancelledError):
                await thread
        raise ValueError

    green.run(main)


def limit(wait, clock):
    async def main(argument):
        green.spawn(expire)
        async with green.timeout(1) as limit:
            await hold(wait, Held())
        return argument, limit

    async def expire():
        await all_waiting()
        clock.advance(1)

    green.run(main, Held())


def cancel_by_group(wait, clock):
    async def main(argument):
        async with green.Group() as group:
            group.spawn(hold, wait, Held())
            await all_waiting()
            raise ValueError(argument)

    green.run(main, Held())


# No frame of these functions holds a promise when its error is raised: that would be a cycle of the
# user's own, as with any future.


def settled(promises, error=None):
    promise = promises.pop()
    if error is None:
        promise.set_result(Held())
    else:
        promise.set_exception(error)
    return promise


def result_of(derive):
    promises = [Promise()]
    results = [derive(promises[0])]
    settled(promises)
    return results.pop().result()


async def select_of_rejected(argument, later):
    local = Held()
    promises = [Promise()]
    if later:
        green.spawn(settled, promises[:], ValueError(argument is local))
    else:
        settled(promises[:], ValueError(argument is local))
    await green.select(promises.pop(), green.Channel().receiving())


async def of_closed(operation, later, argument):
    local = Held()
    channel = green.Channel()
    if later:
        green.spawn(channel.close)
    else:
        channel.close()
    await operation(channel)
    return argument, local


async def call_of_blame(call):
    await call(blame, Held())


def cancelled():
    promise = Promise()
    promise.cancel()
    return promise


ERRORS = {
    "run": lambda: green.run(blame_later, Held()),
    "run plain": lambda: green.run(blame, Held()),
    "spawn": lambda: green.spawn(blame_later, Held()).result(),
    "spawn plain": lambda: green.spawn(blame, Held()).result(),
    "spawn bound": lambda: green.spawn(blame_later, Held(), bound=True).result(),
    "spawn lambda": lambda: green.spawn(lambda held: blame_later(held), Held()).result(),
    "map": lambda: green.map(blame_later, [Held(), Held()]),
    "map plain": lambda: green.map(blame, [Held(), Held()]),
    "map of bad items": lambda: green.map(abs, (blame(each) for each in [Held()])),
    "async for map": lambda: green.run(lambda: for_all(green.map(blame, [Held(), Held()]))),
    "par": lambda: green.par(partial(blame_later, Held()), partial(blame_later, Held())),
    "par plain": lambda: green.par(partial(blame, Held()), partial(blame, Held())),
    "call": lambda: green.run(call_of_blame, green.call),
    "call bound": lambda: green.spawn(call_of_blame, green.call, bound=True).result(),
    "call_long": lambda: green.run(call_of_blame, green.call_long),
    "batch": lambda: green.run(green.call.batch(blame), Held()),
    "aio": lambda: green.run(green.aio(hold), partial(asyncio.wait_for, None, "no time"), Held()),
    "unsupported await": lambda: green.run(hold, partial(asyncio.sleep, 0), Held()),
    "select": lambda: green.run(select_of_rejected, Held(), False),
    "select later": lambda: green.run(select_of_rejected, Held(), True),
    "send, closed": lambda: green.run(of_closed, lambda ch: ch.send(1), False, Held()),
    "send, closed later": lambda: green.run(of_closed, lambda ch: ch.send(1), True, Held()),
    "receive, closed": lambda: green.run(of_closed, lambda ch: ch.receive(), False, Held()),
    "receive, closed later": lambda: green.run(of_closed, lambda ch: ch.receive(), True, Held()),
    "select, closed": lambda: green.run(
        of_closed, lambda ch: green.select(ch.receiving()), False, Held()
    ),
    "put": lambda: green.Channel().put(Held(), timeout=0),
    "get": lambda: blame(green.Channel().get(timeout=0)),
    "then": lambda: result_of(lambda promise: promise.then(blame)),
    "then, of three": lambda: result_of(lambda p: [p.then(blame) for _ in range(3)][1]),
    "then, settled": lambda: settled([Promise()]).then(blame).result(),
    "then, followed": lambda: result_of(lambda p: p.then(blame).then(abs).then(abs)),
    "then, cancelled": lambda: cancelled().then(blame).result(),
    "deadlock": lambda: green.run(hold, WAITS["event"], Held()),
}

ENDS = {
    **{
        f"{name}: {end.__name__}": partial(end, wait)
        for name, wait in WAITS.items()
        for end in (cancel, limit, cancel_by_group)
    },
    **{name: lambda clock, fail=fail: fail() for name, fail in ERRORS.items()},
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_error_keeps_no_argument_and_no_local_variable_alive_without_the_collector(end, clock):
    held.clear()
    gc.collect()
    gc.disable()
    try:
        with suppress(Exception):
            end(clock)
            pytest.fail("there was no error")
        wait_for(lambda: not any(each() for each in held), seconds=20.0)
    finally:
        gc.enable()
        close_loop()
