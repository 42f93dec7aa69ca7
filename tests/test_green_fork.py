"""Forks while green threads run: the child has none of them, and can have its own."""

import asyncio
import contextlib
import ctypes
import gc
import itertools
import os
import sys
import threading
import time
from concurrent.futures import CancelledError, wait

import pytest
from faults import wait_for
from scripts import output_of

import polycephaly as poly
from polycephaly import green
from polycephaly.green.aio import close_loop
from polycephaly.green.distributed.transport import ChannelTransport
from polycephaly.green.scheduler import scheduler
from polycephaly.green.watchdog import watchdog
from polycephaly.runtime import fork_guard

STRICT = (
    "-W",
    "always::DeprecationWarning",
)  # not "error": CPython 3.12 to 3.14 drop what this warning raises
forks_itself = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")


async def double(x):
    await green.sleep(0)
    return 2 * x


def in_child(work, fork=os.fork):
    """What `work()` gives in a forked child, as text."""
    r, w = os.pipe()
    pid = fork()
    if pid == 0:
        try:
            try:
                told = repr(work())
            except BaseException as error:
                told = f"raised {error!r}"
            os.write(w, told.encode())
        finally:
            os._exit(0)
    os.close(w)
    with open(r, "rb") as file:
        told = file.read().decode()
    os.waitpid(pid, 0)
    return told


class Busy:
    """Green threads of all sorts, for as long as the block lasts."""

    def __enter__(self):
        self.end = threading.Event()
        self.channel = green.Channel()
        self.finals = []
        self.threads = [
            green.spawn(fn)
            for fn in (self.runs, self.sleeps, self.waits, self.calls, self.calls_long)
        ]
        self.threads += [green.spawn(self.end.wait), green.spawn(self.channel.get)]
        self.threads += [green.spawn(self.sleeps, bound=True)]
        green.run(green.sleep, 0.01)
        return self

    def __exit__(self, *_):
        self.end.set()
        for each in self.threads:
            each.cancel()
        wait(self.threads, 30)
        assert all(each.done() for each in self.threads)
        for each in self.threads:
            with contextlib.suppress(CancelledError):
                each.exception(0)

    async def runs(self):
        """Now and then it lets other native threads have the interpreter. One that computes without
        end makes every system call of theirs cost a switch interval (5 ms), and a pool is made by a
        thousand of these."""
        for turn in itertools.count():
            if self.end.is_set():
                break
            if not turn % 100:
                time.sleep(1e-4)
            await green.sleep(0)

    async def sleeps(self):
        try:
            await green.sleep(1000)
        finally:
            self.finals.append(os.getpid())

    async def waits(self):
        try:
            await self.channel.receive()
        finally:
            self.finals.append(os.getpid())

    async def calls(self):
        while not self.end.is_set():
            await green.call(time.sleep, 0.003)

    async def calls_long(self):
        await green.call_long(self.end.wait)


def state():
    return (
        len(green.threads()), len(scheduler.live), len(scheduler.ready), scheduler.workers.count,
        scheduler.owner, scheduler.native_calls, scheduler.external_waits,
        len(scheduler.timers.heap), len(scheduler.drivers),
    )  # fmt: skip


def test_a_fork_waits_for_the_destructors_of_native_threads_that_have_ended():
    """OpenSSL's takes a lock, which a fork meanwhile would copy as taken."""
    libc = ctypes.CDLL(None)
    key = ctypes.c_uint()
    libc.pthread_key_create(ctypes.byref(key), ctypes.cast(libc.usleep, ctypes.c_void_p))

    def linger():
        libc.pthread_setspecific(key, ctypes.c_void_p(200_000))  # µs, when the thread has ended
        return threading.get_native_id()

    ended = green.spawn(linger).value
    wait_for(lambda: ended in scheduler.workers.ending)
    with scheduler.paused_for_fork():
        assert not os.path.exists(f"/proc/self/task/{ended}")
    libc.pthread_key_delete(key)


def test_a_fork_that_is_broken_off_lets_the_green_threads_go_on(monkeypatch):
    """By the handler of a signal that comes while the fork waits."""
    gate = threading.Event()

    async def step():
        gate.wait()

    def break_off(seconds):
        gate.set()
        raise TimeoutError

    running = green.spawn(step)
    wait_for(lambda: scheduler.current is running)  # so no owner sleeps
    monkeypatch.setattr(scheduler.workers, "wait_for_ending", break_off)
    with pytest.raises(TimeoutError), scheduler.paused_for_fork():
        pass
    assert green.spawn(double, 21).result(30) == 42


@pytest.fixture
def endless_window():
    """The watchdog leaves each foreign call alone."""
    window = watchdog.window
    green.configure(window=1000)
    yield
    green.configure(window=window)


@pytest.mark.guarantee("green-24")
def test_no_step_runs_while_a_foreign_call_forks(endless_window):
    """The watchdog, which would let another native thread run the others, can do so afterwards."""
    others_ran = threading.Event()

    async def another():
        others_ran.set()

    def forks():
        with scheduler.paused_for_fork():
            handovers = watchdog.handovers
            watchdog._take_over(scheduler.drivers[threading.get_ident()], 0.0)
        return watchdog.handovers - handovers, others_ran.wait(30)

    async def main():
        other = green.spawn(another)
        outcome = await green.call(forks)
        await other
        return outcome

    assert green.run(main) == (0, True)


@pytest.mark.guarantee("green-24")
def test_a_step_that_sends_a_channel_away_does_not_wait_for_the_fork_that_waits_for_it(tmp_path):
    transport, channel = ChannelTransport(str(tmp_path / "1.c")), green.Channel()

    async def sends_and_closes():
        transport.forget_channel(transport.number_of(channel), None)

    try:
        with fork_guard.guard:
            step = green.spawn(sends_and_closes)
            wait_for(step.done)  # whoever holds the guard is refused to wait for a promise
        step.result()
    finally:
        transport.close()
        green.run(green.sleep, 0)


@pytest.mark.guarantee("green-24")
@forks_itself
def test_a_forked_child_has_no_green_threads():
    with Busy():
        for _ in range(5):
            assert in_child(state) == repr((0,) * 9)


@pytest.mark.guarantee("green-24")
@forks_itself
def test_a_forked_child_starts_its_own_and_the_parents_go_on():
    async def main():
        async with green.timeout(20), green.Group() as group:
            threads = [
                group.spawn(double, 2),
                group.spawn(pow, 2, 3),
                group.spawn(double, 3, bound=True),
            ]
            called = await green.call(abs, -5), await green.call_long(abs, -6)
        return *called, *[thread.value for thread in threads]

    def work():
        return green.run(main), green.map(double, range(3)), green.spawn(time.sleep, 0).result(30)

    with Busy() as busy:
        for _ in range(5):
            assert in_child(work) == repr(((5, 6, 4, 8, 6), [0, 2, 4], None))
            assert green.run(main) == (5, 6, 4, 8, 6)
    assert set(busy.finals) == {os.getpid()}


@forks_itself
def test_the_childs_end_runs_nothing_of_the_parents_green_threads():
    r, w = os.pipe()

    async def waits():
        try:
            await green.sleep(1000)
        finally:
            os.write(w, f"{os.getpid()} ".encode())

    threads = [green.spawn(waits), green.spawn(waits, bound=True)]
    green.run(green.sleep, 0.02)

    def work():
        with pytest.raises(green.Deadlock):
            green.run(green.Channel().receive)
        threads.clear()
        gc.collect()
        return "done"

    assert in_child(work) == "'done'"
    for each in threads:
        each.cancel()
        with pytest.raises(CancelledError):
            each.result(30)
    os.close(w)
    with open(r) as file:
        assert set(file.read().split()) == {str(os.getpid())}


@forks_itself
def test_a_deadlock_in_the_child_of_a_plain_function_does_not_reach_the_parents_threads():
    finals = []

    async def main():
        try:
            await green.sleep(0.05)
            return await green.spawn(forks)
        finally:
            finals.append(1)

    def forks():
        time.sleep(0.05)
        return in_child(work)

    def work():
        with pytest.raises(green.Deadlock):
            green.run(green.Channel().receive)
        return finals

    assert green.run(main) == "[]" and finals == [1]


@forks_itself
@pytest.mark.parametrize("how", ["coroutine", "call", "call_long", "plain", "bound"])
def test_a_fork_from_inside_a_green_thread(how):
    def work():
        return green.run(double, 4), green.map(double, [1]), len(green.threads())

    def forks():
        return in_child(work)

    async def main():
        if how in ("coroutine", "bound"):
            return forks()
        return await getattr(green, how)(forks)

    told = (
        green.spawn(forks).value
        if how == "plain"
        else green.spawn(main, bound=how == "bound").value
    )
    assert told == "(8, [2], 0)"
    assert green.run(double, 5) == 10


@forks_itself
def test_a_child_forked_inside_a_coroutine_that_goes_on_there_is_told_that_it_has_no_scheduler():
    async def main():
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                try:
                    await green.sleep(0)
                except RuntimeError as error:
                    os.write(w, str(error).encode())
            finally:
                os._exit(0)
        os.close(w)
        with open(r) as file:
            told = file.read()
        os.waitpid(pid, 0)
        return told

    assert "green threads" in green.run(main)


@forks_itself
def test_a_child_has_an_asyncio_loop_of_its_own():
    async def main():
        return await green.aio(asyncio.sleep(0.001, "slept"))

    def work():
        return green.run(main)

    try:
        assert green.run(main) == "slept"
        assert in_child(work) == "'slept'"
        assert green.run(main) == "slept"
    finally:
        close_loop()


@pytest.mark.slow
def test_drones_and_pools_are_made_while_green_threads_are_busy():
    with Busy():
        for _ in range(3):
            with poly.Drone() as drone, poly.Pool(2) as pool:
                assert drone.doit(abs, -1) == 1 and list(pool.map(abs, range(-5, 0))) == [
                    5,
                    4,
                    3,
                    2,
                    1,
                ]
                assert poly.doit(abs, -3) == 3


@pytest.mark.parametrize("how", ["coroutine", "call", "call_long", "plain"])
def test_drones_and_pools_are_made_inside_green_threads(how):
    def uses():
        with poly.Drone() as drone, poly.Pool(1) as pool:
            return drone.doit(abs, -1), pool.doit(abs, -2)

    async def main():
        return uses() if how == "coroutine" else await getattr(green, how)(uses)

    with Busy():
        for _ in range(2):
            assert green.spawn(uses if how == "plain" else main).result(30) == (1, 2)


def green_work(n):
    return green.map(double, range(n), width=5)


def green_states():
    return len(green.threads()), scheduler.workers.count


def test_drones_run_green_threads_of_their_own():
    with Busy(), poly.Pool(2) as pool:
        assert [p.value for p in pool.everywhere(green_states)] == [(0, 0)] * 2
        assert list(pool.map(green_work, [3, 4, 5])) == [
            [2 * i for i in range(n)] for n in (3, 4, 5)
        ]
        assert [p.value[0] for p in pool.everywhere(green_states)] == [0, 0]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="this Python does not warn")
def test_no_warning_of_forks_because_of_green_threads():
    assert output_of("""
        import asyncio, itertools, time, warnings, polycephaly as poly
        from polycephaly import green
        async def runs():
            for turn in itertools.count():
                turn % 100 or time.sleep(1e-4)  # leaves the interpreter to others
                await green.sleep(0)
        async def sleeps(): await green.sleep(1000)
        async def calls(): await green.call(time.sleep, 1000)
        async def aio(): await green.aio(asyncio.sleep(1000))
        for fn in (runs, sleeps, calls, aio): green.spawn(fn)
        green.spawn(time.sleep, 1000)
        def uses():
            with poly.Pool(2) as pool, poly.Drone() as drone:
                return pool.doit(abs, -1), drone.doit(abs, -2), poly.doit(abs, -3)
        async def inside(): return await green.call(uses)
        print(uses(), flush=True)
        warnings.simplefilter("ignore")  # in another thread than the main one, that one counts
        print(green.run(inside), green.run(uses), flush=True)
        import os; os._exit(0)
    """, python_args=STRICT) == "(1, 2, 3)\n(1, 2, 3) (1, 2, 3)\n"  # fmt: skip


@forks_itself
@pytest.mark.slow
def test_forks_at_random_moments_of_busy_green_threads():
    with Busy():
        for i in range(30):
            assert in_child(lambda i=i: green.run(double, i)) == repr(2 * i)
