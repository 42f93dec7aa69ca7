"""`green.testing`: a test's own time."""

from __future__ import annotations

import threading
import time

import pytest

from polycephaly import Promise, green
from polycephaly.green import testing


def test_hours_pass_at_once_and_in_order():
    seen = []

    async def tell(seconds):
        await green.sleep(seconds)
        seen.append((seconds, clock.time()))

    async def main():
        async with green.Group() as group:
            for hours in (3, 1, 2):
                group.spawn(tell, hours * 3600.0)

    with testing.virtual_time() as clock:
        green.run(main)
        assert clock.time() == 3 * 3600
    assert [seconds for seconds, _ in seen] == [3600, 7200, 10800]
    assert [at for _, at in seen] == [3600, 7200, 10800]


def test_time_limits_and_alternatives_keep_to_it():
    async def main():
        channel = green.Channel()
        with pytest.raises(TimeoutError):
            async with green.timeout(100):
                await channel.receive()
        chosen = await green.select(channel.receiving(), green.after(50))
        return chosen.index

    with testing.virtual_time() as clock:
        assert green.run(main) == 1
        assert clock.time() == 150


def test_it_stands_still_while_a_plain_function_runs():
    gate = threading.Event()

    def plain():
        assert gate.wait(30)
        return clock.time()

    async def main():
        slept = green.spawn(green.sleep, 1000)
        called = green.spawn(green.call, plain)
        await green.call(time.sleep, 0.05)
        assert clock.time() == 0 and not slept.done()
        gate.set()
        assert await called == 0
        await slept
        return clock.time()

    with testing.virtual_time() as clock:
        assert green.run(main) == 1000


def test_it_goes_on_while_a_plain_function_waits_for_green_threads():
    async def late(channel):
        await green.sleep(1000)
        await channel.send("late")

    async def main():
        channel = green.Channel()
        green.spawn(late, channel)
        return await green.call(channel.get)

    with testing.virtual_time() as clock:
        assert green.run(main) == "late"
        assert clock.time() == 1000


def test_it_stands_still_for_a_promise_that_others_settle():
    promise = Promise()

    async def main():
        slept = green.spawn(green.sleep, 1000)
        waits = green.spawn(wait)
        await green.call(time.sleep, 0.05)
        assert clock.time() == 0
        promise.set_result("settled")
        assert await waits == "settled"
        await slept

    async def wait():
        return await promise

    with testing.virtual_time() as clock:
        green.run(main)


def test_by_hand_it_moves_when_it_is_told():
    async def main():
        await green.sleep(10)
        return clock.time()

    with testing.virtual_time(jumps=False) as clock:
        slept = green.spawn(main)
        green.run(testing.all_waiting)
        clock.advance(9)
        green.run(testing.all_waiting)
        assert not slept.done() and clock.time() == 9
        clock.advance(2)
        assert slept.result(30) == 11
        with pytest.raises(ValueError, match="-1"):
            clock.advance(-1)


def test_what_sleeps_on_when_the_block_ends_sleeps_for_what_is_left():
    with testing.virtual_time(jumps=False) as clock:
        slept = green.spawn(green.sleep, 1000.05)
        green.run(testing.all_waiting)
        clock.advance(1000)
    slept.result(30)
    assert green.run(green.sleep, 0) is None


def test_it_is_not_nested_and_is_real_time_after_an_error():
    with (
        pytest.raises(RuntimeError, match="nested"),
        testing.virtual_time(),
        testing.virtual_time(),
    ):
        pass
    began = time.monotonic()
    green.run(green.sleep, 0.02)
    assert time.monotonic() - began >= 0.02


def test_a_deadlock_is_told_also_in_virtual_time():
    async def main():
        await green.sleep(5)
        await green.Channel().receive()

    with testing.virtual_time(), pytest.raises(green.Deadlock):
        green.run(main)


def test_all_waiting_returns_when_the_others_have_done_what_they_can():
    done = []

    async def steps(event):
        for i in range(5):
            await green.sleep(0)
            done.append(i)
        await event.wait()

    async def main():
        event = green.Event()
        others = green.spawn(steps, event)
        await testing.all_waiting()
        assert done == [0, 1, 2, 3, 4]
        event.set()
        await others

    green.run(main)


def test_two_threads_may_wait_until_all_others_wait():
    async def main():
        waiting = green.spawn(green.Event().wait)
        both = [green.spawn(testing.all_waiting) for _ in range(2)]
        for each in both:
            await each
        waiting.cancel()

    green.run(main)
