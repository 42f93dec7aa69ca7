"""`select`: of several things exactly one happens, chosen fairly, and nothing is left behind of the
others."""

import asyncio
import gc
import random
import weakref
from concurrent.futures import CancelledError
from decimal import Decimal

import pytest
from greens import nobody_waits, outcome, run, turns

from polycephaly import Promise, green
from polycephaly.green import Channel, ChannelClosed, Chosen, after, select, settled, skip
from polycephaly.green.scheduler import scheduler
from polycephaly.green.testing import all_waiting

CAPACITIES = pytest.mark.parametrize("capacity", [0, 2])


def timers_set():
    return sum(not timer.is_over for _, _, timer in scheduler.timers.heap)


# -- what may be waited for ------------------------------------------------------------------------


@CAPACITIES
def test_an_item_is_received_from_whoever_has_one(capacity):
    async def main():
        a, b = Channel(capacity), Channel(capacity)
        green.spawn(b.send, "b")
        await turns()
        assert await select(a.receiving(), b.receiving()) == Chosen(1, "b")
        selecting = green.spawn(select, a.receiving(), b.receiving())
        await turns()
        await a.send("a")
        assert await selecting == (0, "a")
        assert nobody_waits(a, b)

    run(main)


@CAPACITIES
def test_an_item_is_sent_to_whoever_takes_it(capacity):
    async def main():
        a, b = Channel(capacity), Channel(capacity)
        for ch in (a, b):
            for i in range(capacity):
                await ch.send(i)
        selecting = green.spawn(select, a.sending("a"), b.sending("b"))
        await turns()
        assert not selecting.done()
        got = [await b.receive() for _ in range(capacity + 1)]
        assert got == [*range(capacity), "b"]
        assert await selecting == (1, None)
        assert [await a.receive() for _ in range(capacity)] == list(range(capacity))
        assert nobody_waits(a, b)

    run(main)


def test_a_receiver_that_waits_is_sent_to_at_once():
    async def main():
        a, b = Channel(), Channel()
        receiving = green.spawn(b.receive)
        await turns()
        assert await select(a.sending(1), b.sending(2)) == (1, None)
        assert await receiving == 2 and nobody_waits(a, b)

    run(main)


def test_a_timeout_is_chosen_when_nothing_else_happens(clock):
    async def main():
        ch = Channel()
        assert await select(ch.receiving(), after(1)) == (1, None) and clock.time() == 1
        assert await select(ch.receiving(), after(0)) == (1, None) and clock.time() == 1
        assert await select(after(30), after(1), after(float("inf"))) == (1, None)
        assert clock.time() == 2
        assert nobody_waits(ch) and timers_set() == 1  # that of `run`

    run(main)


@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_timeout_is_a_number_from_zero_on(seconds):
    with pytest.raises(ValueError, match="seconds, not "):
        after(seconds)


def test_a_promise_is_a_guard_with_or_without_settled():
    async def main():
        ch, promise = Channel(), Promise()
        selecting = [
            green.spawn(select, ch.receiving(), guard) for guard in (promise, settled(promise))
        ]
        await turns()
        promise.set_result("value")
        assert [await each for each in selecting] == [(1, "value")] * 2
        assert await select(ch.receiving(), promise) == (1, "value")
        assert nobody_waits(ch)

    run(main)


def test_the_end_of_a_green_thread_can_be_chosen(clock):
    async def main():
        async def worker():
            await green.sleep(1)
            return "done"

        assert await select(Channel().receiving(), green.spawn(worker)) == (1, "done")

    run(main)


def test_the_error_of_a_rejected_promise_is_raised():
    async def main():
        ch = Channel()
        before, later = Promise(), Promise()
        before.set_exception(KeyError("before"))
        with pytest.raises(KeyError, match="before"):
            await select(ch.receiving(), before)
        selecting = green.spawn(select, ch.receiving(), later)
        await turns()
        later.set_exception(KeyError("later"))
        with pytest.raises(KeyError, match="later"):
            await selecting
        gone = Promise()
        gone.cancel()
        with pytest.raises(CancelledError):
            await select(ch.receiving(), gone)
        assert nobody_waits(ch)

    run(main)


def test_a_promise_that_is_not_chosen_is_left_alone(clock):
    async def main():
        promise = Promise()
        for _ in range(3):
            selecting = green.spawn(select, promise, after(1))
            await all_waiting()
            assert not selecting.done()
            clock.advance(1)
            assert await selecting == (1, None)
        assert not promise.done() and not promise._hooks
        selecting = green.spawn(select, promise)
        await turns()
        selecting.cancel()
        assert await outcome(selecting) is CancelledError
        assert not promise.done() and not promise._hooks
        assert scheduler.external_waits == 0

    run(main)


def test_skip_can_always_be_chosen():
    async def main():
        ch = Channel()
        assert await select(skip()) == (0, None)
        assert await select(ch.receiving(), skip(), priority=True) == (1, None)
        assert await select(ch.receiving(), skip(when=False), after(0)) == (2, None)
        assert nobody_waits(ch)

    run(main)


def test_a_guard_without_its_precondition_is_left_out_and_keeps_its_number():
    async def main():
        a, b = Channel(1), Channel(1)
        await a.send("a"), await b.send("b")
        for _ in range(5):
            assert await select(a.receiving(when=False), b.receiving(when=True)) == (1, "b")
            await b.send("b")
        assert await select(a.sending(1, when=0), after(0, when=False), a.receiving()) == (2, "a")
        assert await select(settled(Promise(), when=False), after(0)) == (1, None)

    run(main)


def test_a_precondition_may_be_a_function_which_is_asked_each_time():
    async def main():
        a, b = Channel(9), Channel(9)
        for _ in range(5):
            await a.send("a"), await b.send("b")
        may = []
        guards = a.receiving(when=lambda: may), b.receiving(when=lambda: not may)
        assert [await select(*guards) for _ in range(2)] == [(1, "b")] * 2
        may.append(1)
        assert [await select(*guards) for _ in range(2)] == [(0, "a")] * 2
        with pytest.raises(ValueError, match="precondition"):
            await select(after(0, when=lambda: 0))

    run(main)


def test_with_a_default_nothing_is_waited_for():
    async def main():
        ch = Channel(1)
        assert await select(ch.receiving(), default=None) is None
        assert await select(ch.receiving(), Promise(), after(5), default="nothing") == "nothing"
        assert await select(ch.receiving(when=False), default="nothing") == "nothing"
        await ch.send("x")
        assert await select(ch.sending("y"), ch.receiving(), default=None) == (1, "x")
        assert await select(ch.sending("y"), default=None) == (0, None)
        assert await select(ch.sending("z"), default="full") == "full"
        assert nobody_waits(ch)

    run(main)


def test_what_could_never_happen_is_a_value_error():
    async def main():
        with pytest.raises(ValueError, match="without guards"):
            await select()
        with pytest.raises(ValueError, match="precondition"):
            await select(Channel().receiving(when=False), skip(when=False))

    run(main)


def test_what_is_no_guard_is_a_type_error():
    async def main():
        for wrong in (Channel(), 5, "x", None):
            with pytest.raises(TypeError, match="guards"):
                await select(after(0), wrong)

    run(main)


def test_select_outside_of_green_threads_says_so():
    with pytest.raises(RuntimeError, match=r"green\.select"):
        select(skip()).send(None)


def test_what_asyncio_code_is_told_to_do_instead_works_there():
    async def main():
        buffered, event = Channel(1), green.Event()
        await buffered.send("x")
        for made in (select(buffered.receiving()), event.wait(), green.Group().__aenter__()):
            with pytest.raises(RuntimeError, match=r"in asyncio `await green\.spawn\(\.\.\.\)`"):
                await made
        assert await green.spawn(select(buffered.receiving(), after(10))) == (0, "x")
        event.set()
        await green.spawn(event.wait)

    asyncio.run(main())


# -- which one -------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-11")
def test_with_priority_the_first_that_can_happen_is_chosen():
    async def main():
        a, b, c = Channel(1), Channel(1), Channel(1)
        await b.send("b"), await c.send("c")
        for _ in range(10):
            assert await select(a.receiving(), b.receiving(), c.receiving(), priority=True) == (
                1,
                "b",
            )
            await b.send("b")

    run(main)


@pytest.mark.guarantee("green-11")
@pytest.mark.parametrize("ready", [(0, 1), (0, 2), (0, 1, 2), (1, 2, 4)])
def test_without_priority_those_that_can_happen_are_chosen_about_equally(ready):
    async def main():
        channels = [Channel(1) for _ in range(5)]
        for i in ready:
            await channels[i].send(i)
        counts = dict.fromkeys(ready, 0)
        for _ in range(3000):
            chosen = await select(*(ch.receiving() for ch in channels))
            counts[chosen.index] += 1
            await channels[chosen.index].send(chosen.index)
        assert sum(counts.values()) == 3000
        assert all(0.85 < count * len(ready) / 3000 < 1.15 for count in counts.values()), counts

    run(main)


def test_two_producers_that_always_have_something_are_served_about_equally():
    async def main():
        a, b = Channel(), Channel()

        async def produce(ch):
            while True:
                await ch.send(None)

        for ch in (a, b):
            green.spawn(produce, ch)
        await turns()
        counts = [0, 0]
        for _ in range(1000):
            counts[(await select(a.receiving(), b.receiving())).index] += 1
            await green.sleep(0)
        assert min(counts) > 400

    run(main)


def test_the_same_program_chooses_the_same_each_time():
    async def main():
        a, b, c = Channel(1), Channel(1), Channel(1)
        chosen = []
        for ch in (a, b, c):
            await ch.send(None)
        for _ in range(100):
            index = (await select(a.receiving(), b.receiving(), c.receiving())).index
            chosen.append(index)
            await (a, b, c)[index].send(None)
        return chosen

    runs = []
    luck = scheduler._random_state
    for _ in range(2):
        scheduler._random_state = luck
        runs.append(run(main))
    assert runs[0] == runs[1] and set(runs[0]) == {0, 1, 2}


# -- exactly one -----------------------------------------------------------------------------------


@pytest.mark.guarantee("green-11")
def test_both_sides_may_select():
    async def main():
        a, b = Channel(), Channel()
        sender = green.spawn(select, a.sending("a"), b.sending("b"))
        await turns()
        index, item = await select(b.receiving(), a.receiving())
        assert item == ("b", "a")[index]
        assert await sender == (1 - index, None)
        assert nobody_waits(a, b)

    run(main)


def test_a_channel_may_be_in_one_select_more_than_once():
    async def main():
        ch = Channel()
        sender = green.spawn(select, ch.sending(1), ch.sending(2))
        await turns()
        item = await ch.receive()
        assert item in (1, 2) and await sender == (item - 1, None)
        receiver = green.spawn(select, ch.receiving(), ch.receiving())
        await turns()
        await ch.send("x")
        assert (await receiver).value == "x"
        assert nobody_waits(ch)

    run(main)


def test_a_guard_may_be_used_again_and_in_several_selects_at_a_time(clock):
    async def main():
        a, b, promise = Channel(), Channel(), Promise()
        for shared, happens in (
            (after(1), lambda: clock.advance(1)),
            (settled(promise), lambda: promise.set_result(None)),
        ):
            first = green.spawn(select, a.receiving(), shared)
            second = green.spawn(select, b.receiving(), shared, shared)
            third = green.spawn(select, b.receiving(), shared)
            await turns()
            await a.send("a")
            assert await first == (0, "a")
            third.cancel()
            await turns()
            happens()
            assert (await second).index in (1, 2)
            assert nobody_waits(a, b)
        assert timers_set() == 1 and scheduler.external_waits == 0

    run(main)


@pytest.mark.guarantee("green-11")
@CAPACITIES
def test_when_many_select_against_each_other_each_item_changes_hands_once(capacity, clock):
    async def main(seed):
        rng = random.Random(seed)
        channels = [Channel(capacity) for _ in range(3)]
        sent, got = [], []

        async def player(who):
            for n in range(40):
                guards = [
                    ch.sending((who, n, i, j)) if rng.random() < 0.5 else ch.receiving()
                    for i, ch in enumerate(rng.sample(channels, 2))
                    for j in range(rng.choice((1, 1, 2)))
                ]
                guards.append(after(rng.choice((0, 1, 3))))
                index, value = await select(*guards, priority=rng.random() < 0.3)
                guard = guards[index]
                if index < len(guards) - 1:
                    if guard.end == "send":
                        sent.append(guard.item)
                    else:
                        got.append(value)
                if rng.random() < 0.1:
                    clock.advance(1)  # with items on their way
                if rng.random() < 0.3:
                    await green.sleep(0)

        async with green.Group() as group:
            for who in range(12):
                group.spawn(player, who)
        for ch in channels:
            while (chosen := await select(ch.receiving(), default=None)) is not None:
                got.append(chosen.value)
        assert sorted(got) == sorted(sent) and len(sent) > 30
        assert nobody_waits(*channels) and timers_set() == 1

    for seed in range(6):
        run(main, seed, seconds=1e6)


# -- closed channels -------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["send", "receive"])
def test_a_channel_that_is_closed_ends_the_selects_that_wait_for_it(end):
    async def main():
        ch, other = Channel(), Channel()
        guard = ch.sending(1) if end == "send" else ch.receiving()
        selecting = [green.spawn(select, other.receiving(), guard) for _ in range(3)]
        await turns()
        ch.close()
        assert [await outcome(each) for each in selecting] == [ChannelClosed] * 3
        with pytest.raises(ChannelClosed):
            await select(guard, other.receiving())
        assert nobody_waits(ch, other)

    run(main)


def test_what_is_left_in_a_closed_channel_can_be_selected():
    async def main():
        ch, other = Channel(2), Channel()
        await ch.send(1), await ch.send(2)
        ch.close()
        assert await select(other.receiving(), ch.receiving()) == (1, 1)
        assert await select(ch.receiving(), default=None) == (0, 2)
        with pytest.raises(ChannelClosed):
            await select(ch.receiving(), default=None)

    run(main)


def test_a_closed_channel_may_be_left_out_by_its_precondition():
    async def main():
        ch = Channel()
        ch.close()
        assert await select(ch.receiving(when=not ch.closed), after(0)) == (1, None)

    run(main)


# -- nothing is left behind ------------------------------------------------------------------------


@pytest.mark.guarantee("green-12")
def test_a_cancelled_select_leaves_no_offer_behind():
    async def main():
        a, b, promise = Channel(), Channel(), Promise()
        selecting = green.spawn(select, a.receiving(), b.sending("b"), after(30), promise)
        await turns()
        assert (
            not nobody_waits(a)
            and not nobody_waits(b)
            and timers_set() == 2
            and scheduler.external_waits == 1
        )
        selecting.cancel()
        assert await outcome(selecting) is CancelledError
        assert nobody_waits(a, b) and not promise._hooks
        assert timers_set() == 1 and scheduler.external_waits == 0

    run(main)


@pytest.mark.guarantee("green-12")
def test_a_select_with_a_guard_that_raises_leaves_no_offer_behind():
    async def main():
        a, b, promise = Channel(), Channel(), Promise()
        with pytest.raises(TypeError):
            guards = a.receiving(), promise, after(Decimal(30)), b.sending("b")
            await select(*guards, priority=True)  # tried, and so registered, in this order
        assert nobody_waits(a, b) and not promise._hooks
        assert timers_set() == 1 and scheduler.external_waits == 0

    run(main)


@pytest.mark.guarantee("green-12")
def test_a_select_that_is_cancelled_with_an_item_on_its_way_gets_the_item_first():
    async def main():
        ch, other, got = Channel(), Channel(), []

        async def selector():
            while True:
                got.append(await select(ch.receiving(), other.receiving()))

        thread = green.spawn(selector)
        await turns()
        await ch.send("x")
        thread.cancel()
        assert await outcome(thread) is CancelledError
        assert got == [(0, "x")] and nobody_waits(ch, other)

    run(main)


def test_a_timeout_around_a_select_leaves_no_offer_behind(clock):
    async def main():
        ch = Channel()
        for _ in range(3):
            with pytest.raises(TimeoutError):
                async with green.timeout(1):
                    await select(ch.receiving(), ch.sending(1), after(30))
        assert nobody_waits(ch) and timers_set() == 1 and clock.time() == 3

    run(main)


def test_a_guard_that_never_fires_in_a_long_loop_costs_no_memory():
    async def main():
        fast, never, promise = Channel(), Channel(), Promise()

        async def feed():
            for i in range(3000):
                await fast.send(i)

        green.spawn(feed)
        for i in range(3000):
            chosen = await select(
                never.receiving(), never.receiving(), after(3600), fast.receiving(), promise
            )
            assert chosen == (3, i)
        assert nobody_waits(fast, never) and not promise._hooks
        assert len(scheduler.timers.heap) < 300 and scheduler.external_waits == 0

    run(main)


def test_a_select_keeps_nothing_once_it_is_over():
    class Item:
        pass

    async def main():
        ch, promise = Channel(), Promise()
        item = Item()
        gone = weakref.ref(item)
        selecting = green.spawn(
            select, ch.receiving(), Channel().sending(item), after(3600), promise
        )
        await turns()
        del item
        gc.disable()
        try:
            await ch.send("x")
            assert await selecting == (0, "x")
            del selecting
            await turns()
            assert gone() is None
        finally:
            gc.enable()

    run(main)
