"""Seeing what green threads do, and the verdict that nobody can wake anybody."""

import concurrent.futures
import signal
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from scripts import output_of, run_script

import polycephaly as poly
from polycephaly import green
from polycephaly.green import report
from polycephaly.green.aio import close_loop
from polycephaly.green.scheduler import scheduler


@pytest.fixture(autouse=True)
def nobody_is_left():
    yield
    for thread in list(scheduler.live):
        thread.cancel()
    for thread in list(scheduler.live):
        concurrent.futures.wait([thread], timeout=30)
    close_loop()


def line_of(mark):
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if line.rstrip().endswith(f"# {mark}"))


async def receives(channel):
    return await channel.receive()  # RECEIVES


async def sleeps():
    await green.sleep(1000)  # SLEEPS


# -- threads() -------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-21")
def test_threads_lists_everybody_with_state_file_and_line():
    gate = threading.Lock()  # to wait for it adds no frame of Python's
    gate.acquire()

    def blocks():
        with gate:  # BLOCKS
            pass

    async def calls():
        await green.call(blocks)  # CALLS

    async def calls_long():
        await green.call_long(blocks)  # CALLS LONG

    async def never():
        pass

    def all_are_there(threads):
        blocked = any((each.file, each.line) == (__file__, line_of("BLOCKS")) for each in threads)
        return blocked and [each.state for each in threads].count("calling") == 3

    async def main():
        green.spawn(receives, green.Channel(), name="receiver")
        green.spawn(sleeps, name="sleeper")
        green.spawn(blocks, name="plain")
        green.spawn(calls_long, name="long caller")
        green.spawn(calls, name="caller")
        green.spawn(calls, name="bound caller", bound=True)
        while not all_are_there(green.threads()):
            await green.sleep(0.001)
        green.spawn(never, name="new")
        seen = {each.name: each for each in green.threads()}  # MAIN
        gate.release()
        return seen

    seen = green.run(main)
    states = {name: each.state for name, each in seen.items()}
    main_name = next(name for name in states if name.endswith("main"))
    assert states == {
        main_name: "running", "receiver": "parked", "sleeper": "parked", "plain": "native",
        "caller": "calling", "long caller": "calling", "bound caller": "calling", "new": "ready",
    }  # fmt: skip
    lines = {"receiver": "RECEIVES", "sleeper": "SLEEPS", "plain": "BLOCKS", "caller": "CALLS"}
    lines |= {"long caller": "CALLS LONG", "bound caller": "CALLS", main_name: "MAIN"}
    for name, mark in lines.items():
        assert (seen[name].file, seen[name].line) == (__file__, line_of(mark)), name
    assert "receive" in seen["receiver"].doing and "receiver: parked in" in str(seen["receiver"])
    assert f"{__file__}:{line_of('RECEIVES')}" in str(seen["receiver"])


def test_threads_is_asked_from_plain_code_and_knows_who_has_ended():
    thread = green.spawn(receives, green.Channel(), name="waits")
    green.run(green.sleep, 0)
    assert [each.name for each in green.threads()] == ["waits"]
    thread.cancel()
    with pytest.raises(CancelledError):
        thread.result(30)
    assert green.threads() == []


def test_threads_may_be_asked_at_any_time_from_anywhere():
    end = threading.Event()
    failures = []

    def asks():
        try:
            while not end.is_set():
                time.sleep(0.0002)
                for each in green.threads():
                    assert (
                        each.state in ("running", "ready", "parked", "calling", "native")
                        and each.name
                    )
        except BaseException as error:
            failures.append(error)

    async def works():
        for i in range(30):
            await green.sleep(0)
            await green.call(time.sleep, 0.0001 * (i % 3))
            await green.spawn(abs, -1)

    natives = [threading.Thread(target=asks) for _ in range(2)]
    for each in natives:
        each.start()
    try:
        green.par(*[works] * 20)
    finally:
        end.set()
        for each in natives:
            each.join()
    assert not failures, failures


# -- deadlocks -------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-23")
def test_a_deadlock_is_raised_where_plain_code_waits():
    channel = green.Channel()
    thread = green.spawn(receives, channel)
    for wait in (
        lambda: green.run(receives, channel),
        lambda: green.run(channel.receive),
        lambda: channel.get(),
        lambda: green.Channel().put(1),
        lambda: thread.value,
        lambda: green.par(sleeps_for_nobody, lambda: receives(channel)),
    ):
        with pytest.raises((green.Deadlock, ExceptionGroup)) as caught:
            wait()
        assert (
            isinstance(caught.value, green.Deadlock)
            or caught.value.split(green.Deadlock)[1] is None
        )


async def sleeps_for_nobody():
    await green.Event().wait()


@pytest.mark.guarantee("green-23")
def test_a_deadlock_is_raised_at_the_await_and_finally_clauses_run():
    told = []

    async def main():
        try:
            await green.Channel().receive()
        except green.Deadlock:
            told.append("here")
            raise
        finally:
            await green.sleep(0)
            told.append("finally")

    with pytest.raises(green.Deadlock):
        green.run(main)
    assert told == ["here", "finally"]


def test_a_deadlock_lists_who_waits_where():
    channel = green.Channel()

    async def main():
        for i in range(30):
            green.spawn(receives, channel, name=f"waits {i}")
        green.spawn(sleeps_for_nobody, name="event")
        await channel.send(1)
        await green.spawn(receives, channel)

    with pytest.raises(green.Deadlock, match="nothing can wake") as caught:
        green.run(main)
    text = str(caught.value)
    assert f", {__file__}:{line_of('RECEIVES')}" in text
    assert "more" in text.splitlines()[-1]
    assert len(text.splitlines()) == 22


def test_after_a_deadlock_the_others_and_the_scheduler_go_on():
    channel = green.Channel()
    other = green.spawn(receives, channel)
    with pytest.raises(green.Deadlock):
        green.run(receives, green.Channel())
    assert not other.done()
    channel.put("later")
    assert other.value == "later"


def test_plain_functions_that_wait_for_each_other_are_a_deadlock_too():
    a, b = green.Channel(), green.Channel()

    def first():
        a.put(b.get())

    def second():
        b.put(a.get())

    async def main():
        await green.par(first, second)

    with pytest.raises((green.Deadlock, ExceptionGroup)) as caught:
        green.run(main)
    assert "Deadlock" in repr(caught.value)


def test_lock_and_barrier_and_awaiting_oneself_are_deadlocks_too():
    async def locks():
        lock = green.Lock()
        async with lock:
            await lock.acquire()

    async def meets():
        await green.Barrier(2).sync()

    async def awaits_itself():
        await green.current()

    for fn in (locks, meets, awaits_itself):
        with pytest.raises(green.Deadlock):
            green.run(fn)


@pytest.mark.guarantee("green-23")
def test_what_got_ready_while_the_scheduler_asked_is_no_deadlock(monkeypatch):
    """As a foreign call that has lost the ownership: it returns after the scheduler has looked for
    threads that are ready, and before it looks which native threads are idle."""
    channel = green.Channel()

    def act_and_end(waiting):
        green.spawn(channel.send("woken"))
        return False

    async def main():
        return await green.spawn(channel.receive())

    monkeypatch.setattr(report, "can_other_threads_act", act_and_end)
    assert green.run(main) == "woken"


def wakes_later(channel, word="woken"):
    time.sleep(LONGER)
    channel.put(word)


# Seconds: longer than the silence after which the scheduler asks, and after which it gives up.
LONGER = 0.2


@pytest.mark.guarantee("green-23")
def test_who_waits_for_somebody_that_can_still_wake_him_is_woken():
    """Each of these wakes after a silence in which a hasty verdict would have fallen."""
    inside = [green.Channel()]

    def wake_global():
        inside[0].put("woken")

    def user_thread(channel):
        threading.Thread(target=wakes_later, args=[channel]).start()

    def timer(channel):
        threading.Timer(LONGER, channel.put, ["woken"]).start()

    def timer_with_a_closure(channel):
        threading.Timer(LONGER, lambda: channel.put("woken")).start()

    def timer_with_a_list(channel):
        channels = [channel]
        threading.Timer(LONGER, lambda: channels[0].put("woken")).start()

    def timer_with_a_function_that_calls_another(channel):
        inside[0] = channel
        threading.Timer(LONGER, lambda: wake_global()).start()

    def timer_with_an_object(channel):
        class Holds:
            def __init__(self):
                self.within = {"channel": channel}

            def wake(self):
                self.within["channel"].put("woken")

        threading.Timer(LONGER, Holds().wake).start()

    def executors_thread(channel):
        with_executor(channel, lambda executor: executor.submit(wakes_later, channel))

    def callback_of_a_builtin_in_an_executor(channel):
        with_executor(
            channel,
            lambda executor: executor.submit(time.sleep, LONGER).add_done_callback(
                lambda _: channel.put("woken")
            ),
        )

    def with_executor(channel, submit):
        executor = ThreadPoolExecutor(1)
        submit(executor)
        executor.shutdown(wait=False)

    def green_sleeper(channel):
        async def wakes():
            await green.sleep(LONGER)
            await channel.send("woken")

        green.spawn(wakes)

    def plain_green_thread(channel):
        green.spawn(wakes_later, channel)

    def plain_green_thread_in_a_builtin(channel):
        async def wakes():
            await green.spawn(time.sleep, LONGER)
            await channel.send("woken")

        green.spawn(wakes)

    def foreign_call(call):
        def starts(channel):
            async def wakes():
                await call(time.sleep, LONGER)
                await channel.send("woken")

            green.spawn(wakes)

        return starts

    def bound_call(channel):
        async def wakes():
            await green.call(time.sleep, LONGER)
            await channel.send("woken")

        green.spawn(wakes, bound=True)

    def outside_promise(channel):
        promise = poly.Promise()

        async def wakes():
            await promise
            await channel.send("woken")

        green.spawn(wakes)
        threading.Timer(LONGER, promise.set_result, [None]).start()

    def asyncio_code(channel):
        import asyncio

        async def wakes():
            await green.aio(asyncio.sleep(LONGER))
            await channel.send("woken")

        green.spawn(wakes)

    for start in (
        user_thread, timer, timer_with_a_closure, timer_with_a_list,
        timer_with_a_function_that_calls_another, timer_with_an_object, executors_thread,
        callback_of_a_builtin_in_an_executor, green_sleeper, plain_green_thread,
        plain_green_thread_in_a_builtin, foreign_call(green.call), foreign_call(green.call_long),
        bound_call, outside_promise, asyncio_code,
    ):  # fmt: skip
        channel = green.Channel()
        start(channel)
        try:
            assert green.run(receives, channel) == "woken"
        except green.Deadlock:
            raise AssertionError(f"a hasty verdict: {start.__name__}") from None


def test_a_signal_handler_that_may_wake_somebody_counts():
    channels = [green.Channel(1)]

    def handler(*_):
        threading.Thread(target=channels[0].put, args=["woken"]).start()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, LONGER)
        assert green.run(receives, channels[0]) == "woken"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_drone_that_works_for_a_green_thread_counts():
    with poly.Pool(1) as pool:

        async def main():
            return await pool.promise(f"import time; time.sleep({LONGER}); 7")

        assert green.run(main) == 7


def test_a_wait_with_a_timeout_times_out_and_is_no_deadlock():
    channel = green.Channel()
    for wait in (
        lambda: channel.get(timeout=LONGER),
        lambda: green.spawn(receives, channel).result(LONGER),
    ):
        with pytest.raises(TimeoutError):
            wait()


def test_green_threads_for_which_nobody_waits_are_left_alone():
    thread = green.spawn(receives, green.Channel())
    time.sleep(LONGER)
    assert not thread.done()


def test_a_deadlock_is_found_when_the_last_users_thread_that_might_have_woken_somebody_has_ended():
    assert output_of("""
        import threading, time
        from polycephaly import green
        threading.Thread(target=lambda: time.sleep(0.3)).start()
        try:
            green.run(green.Channel().receive)
        except green.Deadlock:
            print("Deadlock")
    """) == "Deadlock\n"  # fmt: skip


def test_a_program_that_deadlocks_says_so_and_ends():
    done = run_script("""
        from polycephaly import green
        async def philosopher(mine, other):
            await mine.acquire()
            await green.sleep(0)
            await other.acquire()
        async def main():
            forks = [green.Lock() for _ in range(5)]
            async with green.Group() as table:
                for i in range(5):
                    table.spawn(philosopher, forks[i], forks[(i + 1) % 5], name=f"philosopher {i}")
        green.run(main)
    """)
    assert done.returncode == 1 and "Deadlock" in done.stderr
    for i in range(5):
        assert f"philosopher {i}: parked in" in done.stderr


def test_a_program_that_deadlocks_in_plain_code_says_so():
    assert output_of("""
        from polycephaly import green
        channel = green.Channel()
        for wait in (channel.get, lambda: channel.put(1), lambda: green.run(channel.receive)):
            try:
                wait()
            except green.Deadlock as error:
                print(str(error).splitlines()[1].partition(" in ")[0])
    """).splitlines() == [
        "  Channel.get: parked",
        "  Channel.put: parked",
        "  Channel.receive: parked",
    ]  # fmt: skip
