"""`green.call`: blocking code that stops nobody; in place where it is short, else on another native
thread."""

import contextvars
import ctypes
import hashlib
import itertools
import logging
import os
import random
import re
import signal
import sqlite3
import threading
import time
from concurrent.futures import CancelledError

import pytest
from faults import wait_for
from greens import forever
from scripts import Script

import polycephaly as poly
from polycephaly import green
from polycephaly.green.history import history
from polycephaly.green.scheduler import MAX_NATIVE_THREADS, scheduler
from polycephaly.green.testing import all_waiting
from polycephaly.green.watchdog import watchdog

var = contextvars.ContextVar("var", default="unset")


@pytest.fixture(autouse=True)
def as_it_was():
    """What calls have taught, and what tests configure, is forgotten."""
    history.records.clear()
    yield
    history.records.clear()
    green.configure(window=0.001, native_threads=MAX_NATIVE_THREADS)


async def spin(until):
    """Others are ready all the time."""
    turns = 0
    while not until():
        turns += 1
        await green.sleep(0)
    return turns


class Gate:
    """Blocks a native thread until it is opened; tells when somebody is in it."""

    def __init__(self):
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.ident = 0

    def enter(self, *_):
        self.ident = threading.get_ident()
        self.entered.set()
        assert self.opened.wait(30)
        return "through"


# -- in place, and taken over ----------------------------------------------------------------------


def test_a_short_call_is_run_in_place():
    async def main():
        here = threading.get_ident()
        return [await green.call(threading.get_ident) == here for _ in range(100)]

    green.configure(window=5)
    assert all(green.run(main))


@pytest.mark.guarantee("green-4")
def test_a_long_call_is_taken_over_when_others_are_ready():
    gate = Gate()

    async def calls():
        before = threading.get_ident()
        assert await green.call(gate.enter) == "through"
        return before, gate.ident, threading.get_ident()

    async def main():
        thread = green.spawn(calls)
        await spin(gate.entered.is_set)
        there = threading.get_ident()
        gate.opened.set()
        return there, *await thread

    handovers = watchdog.handovers
    there, before, during, _ = green.run(main)
    assert before == during != there
    assert watchdog.handovers > handovers


@pytest.mark.guarantee("green-4")
def test_a_long_call_is_taken_over_for_those_who_become_ready_later():
    gate = Gate()

    async def calls():
        return await green.call(gate.enter)

    thread = green.spawn(calls)
    assert gate.entered.wait(30)
    assert green.run(_answer) == "answer"
    gate.opened.set()
    assert thread.value == "through"


async def _answer():
    await green.sleep(0.001)
    return "answer"


def test_many_long_calls_overlap():
    gates = [Gate() for _ in range(100)]

    async def calls(gate):
        return await green.call(gate.enter)

    async def main():
        threads = [green.spawn(calls, gate) for gate in gates]
        await spin(lambda: all(gate.entered.is_set() for gate in gates))
        for gate in gates:
            gate.opened.set()
        return [await thread for thread in threads]

    assert green.run(main) == ["through"] * 100
    assert len({gate.ident for gate in gates}) == 100


@pytest.mark.guarantee("green-5")
def test_a_call_that_was_taken_over_goes_to_the_end_of_the_queue_and_loses_nothing():
    async def calls(i):
        told = []
        for k in range(20):
            told.append((k, await green.call(_slow_echo, i * 100 + k)))
        return told == [(k, i * 100 + k) for k in range(20)]

    async def main():
        return await green.par(*(calls(i) for i in range(20)))

    green.configure(window=0.0002)
    assert all(green.run(main))


def _slow_echo(x):
    time.sleep(0.0005)
    return x


@pytest.mark.guarantee("green-5")
def test_errors_come_out_of_a_call_in_place_taken_over_and_sent_away():
    async def fails(call, seconds):
        try:
            await call(_fail_after, seconds)
        except KeyError as error:
            names, at = [], error.__traceback__
            while at is not None:
                names.append(at.tb_frame.f_code.co_name)
                at = at.tb_next
            return names[0] == "fails" and names[-1] == "_fail_after"

    async def main():
        done = False
        others = green.spawn(spin, lambda: done)
        told = [
            await fails(green.call, 0),
            await fails(green.call, 0.05),
            await fails(green.call_long, 0),
        ]
        done = True
        await others
        return told

    assert green.run(main) == [True] * 3


def _fail_after(seconds):
    if seconds:
        time.sleep(seconds)
    raise KeyError(seconds)


def test_keyword_arguments_are_passed_on():
    async def main():
        return await green.call(int, "ff", base=16), await green.call_long(int, "11", base=2)

    assert green.run(main) == (255, 3)


def test_wrong_calls_raise_where_they_are_made():
    async def main():
        for call in (green.call, green.call_long):
            with pytest.raises(TypeError, match="not callable"):
                await call(5)
            with pytest.raises(TypeError):
                await call(abs)
        return "on"

    assert green.run(main) == "on"


def test_system_exit_in_a_call_is_the_green_threads():
    async def main(call):
        await call(_exit)

    for call in (green.call, green.call_long):
        with pytest.raises(SystemExit):
            green.run(main, call)
    assert green.run(_answer) == "answer"


def _exit():
    raise SystemExit(4)


def test_thousands_of_short_calls_let_the_others_have_turns():
    async def calls():
        for _ in range(3200):
            await green.call(os.getpid)

    async def main():
        thread = green.spawn(calls)
        return await spin(thread.done)

    assert green.run(main) >= 100


# -- what is known to be long ----------------------------------------------------------------------


def test_call_long_goes_to_another_native_thread_at_once():
    async def main():
        here = threading.get_ident()
        return await green.call_long(threading.get_ident) != here and threading.get_ident() == here

    green.configure(window=5)
    assert green.run(main)


def test_a_function_that_was_long_goes_away_at_once_and_comes_back_when_it_is_short_again():
    async def main():
        done = False
        others = green.spawn(spin, lambda: done)
        while history.predict_long(_where_after) is False:
            await green.call(_where_after, 0.02)
        away = await green.call(_where_after, 0.02) != threading.get_ident()
        while history.predict_long(_where_after) is not False:
            await green.call(_where_after, 0)
        here = threading.get_ident()
        back = await green.call(_where_after, 0) == here
        done = True
        await others
        return away, back

    assert green.spawn(main).result(30) == (True, True)


def _where_after(seconds):
    time.sleep(seconds)
    return threading.get_ident()


def test_functions_are_known_by_what_they_are_and_not_by_the_name_they_are_called_by():
    import functools

    class Slow:
        def method(self):
            pass

        def __call__(self):
            pass

    for fn, again in (
        (_slow_echo, _slow_echo),
        (Slow().method, Slow().method),
        (time.sleep, time.sleep),
        ([].append, [].append),
        (functools.partial(_slow_echo, 1), functools.partial(_slow_echo, 2)),
        (ctypes.CDLL(None).getpid, None),
        (Slow(), None),
    ):
        for _ in range(2):
            history.record_long(fn)
        assert history.predict_long(again or fn)
        for _ in range(2):
            history.record_short(fn)
        assert not history.predict_long(again or fn)
    assert not history.predict_long(Slow())


def test_what_calls_have_taught_does_not_grow_without_end():
    for i in range(5000):
        history.record_long(eval(f"lambda: {i}"))
    assert len(history.records) <= 1000


# -- hand-over or not ------------------------------------------------------------------------------


def test_a_call_that_computes_under_the_interpreters_lock_is_not_taken_over_in_vain():
    """It may be, now and then, where the processor is taken away from it; most often it is not."""

    def compute():
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            sum(range(20000))  # long pieces without a look at who else wants the lock

    async def main():
        done = False
        others = green.spawn(spin, lambda: done)
        for _ in range(20):
            await green.call(compute)
        done = True
        await others

    handovers = watchdog.handovers
    green.run(main)
    assert watchdog.handovers - handovers < 15


def test_a_call_that_computes_without_the_interpreters_lock_is_handed_over():
    data = bytes(20_000_000)
    begun, others_had_turns = threading.Event(), threading.Event()

    def compute():
        begun.set()
        while not others_had_turns.is_set():
            hashlib.sha512(data)
        return "hashed"

    async def calls():
        return await green.call(compute)

    async def main():
        thread = green.spawn(calls)
        await spin(begun.is_set)
        for _ in range(10):
            await green.sleep(0)
        others_had_turns.set()
        return await thread

    handovers = watchdog.handovers
    assert green.spawn(main).result(30) == "hashed" and watchdog.handovers > handovers


# -- callbacks, and calls in calls -----------------------------------------------------------------

COMPARE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))


def _sorted_by(compare, numbers):
    array = (ctypes.c_int * len(numbers))(*numbers)
    ctypes.CDLL(None).qsort(array, len(numbers), ctypes.sizeof(ctypes.c_int), COMPARE(compare))
    return list(array)


@pytest.mark.guarantee("green-5")
@pytest.mark.parametrize("call", [green.call, green.call_long], ids=["call", "call_long"])
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_native_code_that_calls_back_may_spawn_settle_and_send(call, long):
    numbers = [5, 3, 9, 1, 7, 2]

    async def main():
        spawned, sent, settled = [], green.Channel(), poly.Promise()

        def compare(a, b):
            if not spawned:
                settled.set_result("settled")
                sent.put("sent")
                if long:
                    time.sleep(0.02)
            spawned.append(green.spawn(_difference, a[0], b[0]))
            return spawned[-1].value

        async def receives():
            return await sent.receive(), await settled

        receiver = green.spawn(receives)
        done = False
        others = green.spawn(spin, lambda: done)
        told = await call(_sorted_by, compare, numbers)
        done = True
        await others
        return told, await receiver, len(spawned) > 4

    assert green.run(main) == (sorted(numbers), ("sent", "settled"), True)


async def _difference(a, b):
    return a - b


def test_a_call_may_run_green_code_that_makes_calls_that_run_green_code():
    def down(depth):
        return green.run(deeper, depth)

    async def deeper(depth):
        return 1 + await green.call(down, depth - 1) if depth else 0

    assert green.run(deeper, 12) == 12


def test_a_call_may_use_map_and_par_and_plain_channels():
    def inside(channel):
        channel.put(green.map(lambda x: x + 1, range(5)))
        return green.par(lambda: 1, _answer)

    async def main():
        channel = green.Channel(1)
        told = await green.call(inside, channel)
        return told, await channel.receive()

    assert green.run(main) == ([1, "answer"], [1, 2, 3, 4, 5])


def test_a_callback_of_a_promise_that_green_code_settles_may_spawn():
    values = []
    promise = poly.Promise()
    promise.add_done_callback(lambda p: values.append(green.spawn(_difference, p.value, 1)))

    async def main():
        promise.set_result(8)
        return await values[0]

    assert green.run(main) == 7


def test_a_finalizer_may_spawn_and_post_whoever_it_interrupts():
    values = []

    class Dropped:
        def __del__(self):
            values.append(green.spawn(_difference, 1, 0))

    async def main():
        for _ in range(50):
            Dropped()
            await green.call(Dropped)
            await green.sleep(0)
        return sum([await each for each in values])

    assert green.run(main) == 100


# -- cancelling ------------------------------------------------------------------------------------


async def cancel_in_call(gate, calls, bound, told):
    """Cancel a thread in its first call, before it has told anything. It ends as cancelled."""
    thread = green.spawn(calls, bound=bound)
    await spin(gate.entered.is_set)
    assert thread.cancel()
    for _ in range(10):  # the scheduler goes on meanwhile
        await green.sleep(0)
    assert not thread.done() and not told
    gate.opened.set()
    with pytest.raises(CancelledError):
        await thread


@pytest.mark.parametrize("call", [green.call, green.call_long], ids=["call", "call_long"])
@pytest.mark.parametrize("bound", [False, True], ids=["free", "bound"])
def test_a_thread_cancelled_during_a_call_has_its_result_and_is_cancelled_at_its_next_await(
    call, bound
):
    gate = Gate()
    told = []

    async def calls():
        told.append(await call(gate.enter))
        try:
            await green.sleep(0)
        except green.Cancelled:
            told.append("cancelled")
            raise
        told.append("never")

    green.spawn(cancel_in_call, gate, calls, bound, told).result(30)
    assert told == ["through", "cancelled"]


@pytest.mark.parametrize("call", [green.call, green.call_long], ids=["call", "call_long"])
@pytest.mark.parametrize("bound", [False, True], ids=["free", "bound"])
def test_a_cancelled_thread_makes_no_further_call_but_those_of_its_cleaning_up(call, bound):
    gate = Gate()
    made = []

    async def calls():
        try:
            await call(gate.enter)
            made.append("first")
            await call(made.append, "never")
        finally:
            await call(made.append, "cleaned up")

    green.spawn(cancel_in_call, gate, calls, bound, made).result(30)
    assert made == ["first", "cleaned up"]


@pytest.mark.parametrize("call", [green.call, green.call_long], ids=["call", "call_long"])
def test_a_time_limit_ends_a_loop_of_calls(call, clock):
    made = []

    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(1) as limit:
                while True:
                    made.append(await call(_return_too_late, limit, clock))

    green.spawn(main).result(30)
    assert made == ["too late"]


def test_the_first_error_of_a_map_of_a_plain_function_stops_its_calls():
    def fail_first(n):
        time.sleep(0.001)
        if not n:
            raise ValueError("the first one")

    with pytest.raises(ValueError, match="the first one"):
        green.map(fail_first, itertools.count(), width=4)


def test_ctrl_c_stops_a_map_of_a_plain_function():
    with Script("""
        import time
        from polycephaly import green
        called = []
        def nap(n):
            called.append(n)
            if n == 10:
                print("ready", flush=True)
            time.sleep(0.001)
        try:
            green.map(nap, range(1_000_000), width=2)
        except KeyboardInterrupt:
            print("interrupted", len(called) < 500_000, flush=True)
    """) as script:
        script.read_until("ready")
        script.signal(signal.SIGINT)
        assert script.read_line() == "interrupted True"
        assert script.wait() == 0


def test_the_scheduler_rests_while_a_cancelled_thread_is_in_a_call():
    gate = Gate()

    async def calls():
        await green.call_long(gate.enter)
        await green.sleep(0)

    async def main():
        thread = green.spawn(calls)
        await spin(gate.entered.is_set)
        thread.cancel()
        await green.sleep(0.02)
        used = time.process_time()
        await green.call_long(time.sleep, 0.3)
        used = time.process_time() - used
        gate.opened.set()
        with pytest.raises(CancelledError):
            await thread
        return used

    assert green.run(main) < 0.2  # seconds of the processor, not of the clock: spinning takes 0.3


@pytest.mark.parametrize("call", [green.call, green.call_long], ids=["call", "call_long"])
def test_a_timeout_around_a_call_ends_the_block_when_the_call_has_returned(call, clock):
    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(1) as limit:
                value = await call(_return_too_late, limit, clock)
                await green.sleep(100)
        return value, clock.time()

    assert green.spawn(main).result(30) == ("too late", 1)


def _return_too_late(limit, clock):
    clock.advance(1)
    wait_for(lambda: limit.expired)
    return "too late"


@pytest.mark.parametrize("call", [green.call, green.call_long], ids=["call", "call_long"])
def test_a_block_whose_last_await_is_a_call_that_came_too_late_times_out(call, clock):
    async def main():
        with pytest.raises(TimeoutError):
            async with green.timeout(1) as limit:
                await call(_return_too_late, limit, clock)
        await green.sleep(0)
        return "on"

    assert green.spawn(main).result(30) == "on"


# -- context variables -----------------------------------------------------------------------------


@pytest.mark.guarantee("green-5")
@pytest.mark.parametrize("seconds", [0, 0.02], ids=["short", "long"])
@pytest.mark.parametrize("call", [green.call, green.call_long], ids=["call", "call_long"])
def test_context_variables_are_seen_by_calls_and_set_in_them(call, seconds):
    def look_and_set(value):
        before = var.get()
        time.sleep(seconds)
        var.set(value)
        return before

    async def calls(i):
        told = [await call(look_and_set, (i, k)) for k in range(3)]
        return told == ["unset", (i, 0), (i, 1)] and var.get() == (i, 2)

    async def main():
        threads = [green.spawn(calls, i) for i in range(5)]
        return [await thread for thread in threads], var.get()

    assert green.run(main) == ([True] * 5, "unset")


# -- bound -----------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-7")
def test_a_bound_thread_uses_objects_of_its_native_thread():
    async def uses():
        database = sqlite3.connect(":memory:")  # refuses any other native thread
        await green.call(database.execute, "create table t (x)")
        for i in range(5):
            await green.call(database.execute, "insert into t values (?)", (i,))
            await green.sleep(0)
            database.execute("insert into t values (?)", (i,))
            await green.call_long(time.sleep, 0.001)
        rows = await green.call(lambda: database.execute("select sum(x) from t").fetchone())
        database.close()
        return rows[0], threading.get_ident()

    async def main():
        threads = [green.spawn(uses, bound=True) for _ in range(5)]
        return [await thread for thread in threads]

    told = green.run(main)
    assert [total for total, _ in told] == [20] * 5
    assert len({ident for _, ident in told}) == 5


def test_a_bound_thread_that_calls_stops_nobody():
    gate = Gate()

    async def calls():
        return await green.call(gate.enter)

    async def main():
        thread = green.spawn(calls, bound=True)
        await spin(gate.entered.is_set)
        gate.opened.set()
        return await thread

    assert green.run(main) == "through"


def test_bound_threads_talk_with_others_and_start_others():
    async def pong(channel):
        for _ in range(50):
            await channel.send(await channel.receive() + 1)

    async def ping(channel):
        other = green.spawn(pong, channel, bound=True)
        value = 0
        for _ in range(50):
            await channel.send(value)
            value = await channel.receive()
        await other
        return value

    assert green.run(ping, green.Channel()) == 50
    assert green.spawn(ping, green.Channel(), bound=True).value == 50


def test_errors_and_cancellation_reach_bound_threads():
    async def fails():
        await green.sleep(0)
        raise KeyError("bound")

    async def main():
        with pytest.raises(KeyError, match="bound"):
            await green.spawn(fails, bound=True)
        thread = green.spawn(forever, bound=True)
        await all_waiting()
        thread.cancel()
        with pytest.raises(CancelledError):
            await thread
        never = green.spawn(forever, bound=True)
        never.cancel()
        with pytest.raises(CancelledError):
            await never
        async with green.Group() as group:
            return await group.spawn(_answer, bound=True)

    assert green.run(main) == "answer"


# -- how many --------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-6")
def test_no_more_native_threads_than_configured_run_calls_and_plain_functions():
    now = most = 0
    lock = threading.Lock()

    def work(i):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1
        return i

    async def calls(i):
        return await green.call_long(work, i)

    green.configure(native_threads=3)
    green.run(_answer)
    threads = [green.spawn(work if i % 2 else calls, i) for i in range(60)]
    assert [thread.value for thread in threads] == list(range(60))
    assert 1 <= most <= 3


@pytest.mark.parametrize("ceiling", [1, 2])
def test_calls_are_run_however_low_the_ceiling_and_however_busy_the_others(ceiling):
    green.configure(native_threads=ceiling)

    async def main():
        done = False
        others = green.spawn(spin, lambda: done)
        try:
            return [await green.call_long(pow, 2, i) for i in range(3)] + [
                await green.spawn(pow, 3, 2)
            ]
        finally:
            done = True
            others.cancel()

    thread = green.spawn(main)
    try:
        assert thread.result(30) == [1, 2, 4, 9]
    finally:
        thread.cancel()


def test_a_bound_thread_begins_although_all_native_threads_are_taken():
    green.configure(native_threads=2)
    gate = Gate()
    blocked = [green.spawn(gate.enter) for _ in range(3)]
    try:
        assert gate.entered.wait(30)
        assert green.spawn(_answer, bound=True).result(30) == "answer"
    finally:
        gate.opened.set()
        for each in blocked:
            each.result(30)


def test_calls_that_wait_for_each_other_all_run():
    meet = threading.Barrier(64)

    async def calls():
        return await green.call(meet.wait)

    assert sorted(green.par(*(calls() for _ in range(64)))) == list(range(64))


# -- the watchdog ----------------------------------------------------------------------------------


class Reports(logging.Handler):
    """What the watchdog says, while it is attached, of those who are at `place`. On a busy machine
    it may be others."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.texts = []
        self.told = threading.Event()

    def emit(self, record):
        if re.search(self.place, record.getMessage()):
            self.texts.append((record.levelname, record.getMessage()))
            self.told.set()

    def __enter__(self):
        logging.getLogger("polycephaly.green").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("polycephaly.green").removeHandler(self)


@pytest.mark.guarantee("green-22")
@pytest.mark.parametrize("bound", [False, True], ids=["free", "bound"])
def test_the_watchdog_reports_who_holds_the_scheduler_where_and_for_how_long(bound):
    def computes():
        while not reports.told.is_set():
            sum(range(1000))

    async def holds():
        await green.sleep(0)
        computes()

    first = computes.__code__.co_firstlineno
    with Reports(rf"{re.escape(__file__)}:({first + 1}|{first + 2}), in .*computes") as reports:
        green.spawn(holds, name="the holder", bound=bound).result(30)
    level, text = reports.texts[0]
    assert level == "WARNING" and "'the holder'" in text and "green.call" in text
    assert float(re.search(r"for (\d+\.\d+) s", text)[1]) >= 0.1


def test_the_report_names_the_users_line_where_he_waits_in_our_code():
    promise = poly.Promise()

    class Settles(Reports):
        def emit(self, record):
            super().emit(record)
            if self.told.is_set():
                promise.set_result(None)

    async def holds():
        return promise.value

    with Settles(rf"{re.escape(__file__)}:{holds.__code__.co_firstlineno + 1}, in"):
        green.spawn(holds).result(30)


def test_a_thread_that_holds_the_scheduler_for_long_is_reported_again():
    async def holds():
        while len(reports.texts) < 3:
            sum(range(1000))

    with Reports("holds") as reports:
        green.spawn(holds).result(30)
    seconds = [float(re.search(r"for (\d+\.\d+) s", text)[1]) for _, text in reports.texts]
    assert seconds[1] >= 1.9 * seconds[0] and seconds[2] >= 1.9 * seconds[1]


def test_calls_and_quiet_threads_are_not_reported():
    """On a busy machine others may be, between two awaits."""

    async def calls():
        await green.call(time.sleep, 0.4)  # HERE

    async def main():
        thread = green.spawn(calls)
        await green.call_long(time.sleep, 0.3)  # HERE
        await green.sleep(0.05)  # HERE
        await thread  # HERE

    with open(__file__) as file:
        here = [i for i, line in enumerate(file, 1) if line.endswith("# HERE\n")]
    with Reports(rf"{re.escape(__file__)}:({'|'.join(map(str, here))}), in") as reports:
        green.run(main)
    assert len(here) == 4 and not reports.texts


# -- all at once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_hand_overs_spawns_and_settlings_lose_nothing(seed):
    seed = seed or random.randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)
    green.configure(window=0.0001)
    plans = [[dice.random() for _ in range(40)] for _ in range(60)]
    promises = [poly.Promise() for _ in range(60)]
    from_outside = []

    def nap(seconds, value):
        time.sleep(seconds)
        return value

    async def child(value):
        await green.sleep(0)
        return value

    async def works(k):
        var.set(k)
        total = 0
        for i, roll in enumerate(plans[k]):
            if roll < 0.6:
                value = await green.call(nap, roll * 0.0006, i)
            elif roll < 0.7:
                value = await green.call_long(nap, 0, i)
            elif roll < 0.8:
                value = await green.spawn(child, i)
            elif roll < 0.85:
                value = await green.call(lambda i=i: green.spawn(child, i).value)
            elif roll < 0.9:
                value = await green.spawn(nap, 0.0001, i)
            else:
                await green.sleep(roll * 0.0005)
                value = i
            assert value == i and var.get() == k
            total += value
        return total + await promises[k]

    def settles(part):
        for k in range(part, 60, 3):
            from_outside.append(green.spawn(child, k))
            promises[k].set_result(k)
            time.sleep(0.001)

    async def main():
        async with green.Group() as group:
            threads = [group.spawn(works, k) for k in range(60)]
        return [await thread for thread in threads]

    natives = [threading.Thread(target=settles, args=[part]) for part in range(3)]
    thread = green.spawn(main)
    for each in natives:
        each.start()
    for each in natives:
        each.join()
    assert thread.result(45) == [sum(range(40)) + k for k in range(60)]
    assert sorted(each.result(30) for each in from_outside) == list(range(60))
    assert scheduler.native_calls == 0 and scheduler.external_waits == 0


def test_cancellations_at_random_moments_of_calls_lose_no_thread():
    seed = random.randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)
    green.configure(window=0.0001)

    async def calls():
        for _ in range(20):
            await green.call(time.sleep, dice.random() * 0.0004)
            if dice.random() < 0.2:
                await green.call_long(time.sleep, 0.0001)

    async def main():
        threads = [green.spawn(calls, bound=dice.random() < 0.1) for _ in range(100)]
        while not all(thread.done() for thread in threads):
            dice.choice(threads).cancel()
            await green.sleep(dice.choice([0, 0, 0, 0.001]))
        return [thread.exception() if not thread.cancelled() else None for thread in threads]

    assert green.spawn(main).result(30) == [None] * 100
    assert scheduler.native_calls == 0
