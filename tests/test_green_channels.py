"""Channels: every item arrives exactly once, in order, or its sender is told that it did not."""

import asyncio
import os
import random
import signal
import threading
import time
from concurrent.futures import CancelledError

import pytest
from greens import nobody_waits, outcome, run, turns

from polycephaly import green
from polycephaly.green import Channel, ChannelClosed, select
from polycephaly.promises import promise as promises

CAPACITIES = pytest.mark.parametrize("capacity", [0, 1, 3])


async def send_all(ch, items):
    for item in items:
        await ch.send(item)


async def receive_into(ch, got, n=None):
    """Receives `n` items, or for ever."""
    while n is None or n > 0:
        got.append(await ch.receive())
        if n is not None:
            n -= 1


def in_order(items):
    """Whether of each sender, a receiver got what it sent in the order of sending."""
    senders = {who for who, _ in items}
    return all(
        mine == sorted(mine) for mine in ([n for who, n in items if who == i] for i in senders)
    )


def in_a_thread(fn, *args):
    """Runs ``fn(*args)`` in a plain thread; a function that joins it and gives its value or
    error."""
    told = []

    def go():
        try:
            told.append(fn(*args))
        except BaseException as error:
            told.append(type(error))

    thread = threading.Thread(target=go)
    thread.start()

    def join():
        thread.join(30)
        assert not thread.is_alive()
        return told[0]

    return join


# -- meeting, and buffers --------------------------------------------------------------------------


def test_a_send_without_room_returns_when_a_receiver_has_the_item():
    async def main():
        ch, log = Channel(), []

        async def sender():
            await ch.send("x")
            log.append("sent")

        green.spawn(sender)
        await turns()
        assert log == []
        assert await ch.receive() == "x"
        await turns()
        assert log == ["sent"]
        assert nobody_waits(ch)

    run(main)


def test_a_receive_waits_for_a_send():
    async def main():
        ch, got = Channel(), []
        green.spawn(receive_into, ch, got, 1)
        await turns()
        assert got == []
        await ch.send("x")
        await turns()
        assert got == ["x"] and nobody_waits(ch)

    run(main)


@CAPACITIES
def test_a_channel_takes_as_many_items_as_its_capacity_before_a_send_waits(capacity):
    async def main():
        ch, sent = Channel(capacity), []
        assert ch.capacity == capacity

        async def sender():
            for i in range(10):
                await ch.send(i)
                sent.append(i)

        green.spawn(sender)
        await turns(15)
        assert len(sent) == capacity
        assert await ch.receive() == 0
        await turns()
        assert len(sent) == capacity + 1

    run(main)


@pytest.mark.guarantee("green-8")
@CAPACITIES
def test_items_arrive_in_the_order_of_sending(capacity):
    async def main():
        ch = Channel(capacity)
        green.spawn(send_all, ch, range(100))
        assert [await ch.receive() for _ in range(100)] == list(range(100))

    run(main)


def test_none_and_errors_are_items_like_others():
    async def main():
        for capacity in (0, 2):
            ch = Channel(capacity)
            items = [None, ValueError("an item"), ..., ChannelClosed("an item")]
            green.spawn(send_all, ch, items)
            assert [await ch.receive() for _ in items] == items

    run(main)


@pytest.mark.guarantee("green-8")
@CAPACITIES
def test_who_waits_to_send_is_served_in_the_order_of_coming(capacity):
    async def main():
        ch = Channel(capacity)
        for i in range(20):
            green.spawn(ch.send, i)
        await turns()
        assert [await ch.receive() for _ in range(20)] == list(range(20))

    run(main)


@pytest.mark.guarantee("green-8")
@CAPACITIES
def test_who_waits_to_receive_is_served_in_the_order_of_coming(capacity):
    async def main():
        ch = Channel(capacity)
        receivers = [green.spawn(ch.receive) for _ in range(20)]
        await turns()
        await send_all(ch, range(20))
        assert [await each for each in receivers] == list(range(20))

    run(main)


@pytest.mark.guarantee("green-8")
@CAPACITIES
def test_any_number_of_threads_may_hold_either_end(capacity):
    async def main():
        ch, got = Channel(capacity), [[] for _ in range(5)]
        async with green.Group() as group:
            for i in range(7):
                group.spawn(send_all, ch, [(i, n) for n in range(15)])
            for mine in got:
                group.spawn(receive_into, ch, mine, 21)
        assert sorted([item for mine in got for item in mine]) == [
            (i, n) for i in range(7) for n in range(15)
        ]
        assert all(in_order(mine) for mine in got)
        assert nobody_waits(ch)

    run(main)


def test_bound_green_threads_use_channels_like_others():
    async def main():
        there, back = Channel(), Channel(1)

        async def echo():
            async for item in there:
                await back.send(item)

        echo_thread = green.spawn(echo, bound=True)
        for i in range(20):
            await there.send(i)
            assert await back.receive() == i
        there.close()
        await echo_thread

    run(main)


def test_a_negative_capacity_is_a_value_error():
    with pytest.raises(ValueError, match="-1"):
        Channel(-1)


@pytest.mark.parametrize("capacity", [1.0, "1", None, True])
def test_a_capacity_that_is_no_whole_number_is_a_type_error(capacity):
    with pytest.raises(TypeError, match="capacity"):
        Channel(capacity)


def test_a_channel_may_be_given_a_type():
    ch = Channel[int](2)
    ch.put(1)
    assert ch.get() == 1


def test_a_derived_class_may_have_a_capacity():
    class Mine(Channel):
        pass

    assert (Mine().capacity, Mine(3).capacity) == (0, 3)


# -- closing ---------------------------------------------------------------------------------------


@CAPACITIES
def test_async_for_gives_all_items_until_the_channel_is_closed(capacity):
    async def main():
        ch = Channel(capacity)

        async def sender():
            await send_all(ch, range(10))
            ch.close()

        green.spawn(sender)
        assert [i async for i in ch] == list(range(10))
        assert [i async for i in ch] == []

    run(main)


@pytest.mark.guarantee("green-9")
def test_closing_ends_everybody_who_waits_to_receive():
    async def main():
        for waiters in (1, 3):
            ch = Channel()
            receivers = [green.spawn(ch.receive) for _ in range(waiters)]

            async def iterate(ch=ch):
                return [i async for i in ch]

            iterator = green.spawn(iterate)
            await turns()
            ch.close()
            for each in receivers:
                with pytest.raises(ChannelClosed):
                    await each
            assert await iterator == []
            assert nobody_waits(ch)

    run(main)


@pytest.mark.guarantee("green-8", "green-9")
@CAPACITIES
def test_of_a_closed_channel_each_item_arrives_or_its_sender_is_told(capacity):
    async def main():
        ch = Channel(capacity)
        senders = [green.spawn(ch.send, i) for i in range(6)]
        await turns()
        ch.close()
        unsent = [i for i, each in enumerate(senders) if await outcome(each) is ChannelClosed]
        got = [i async for i in ch]
        assert got == list(range(capacity)) and unsent == list(range(capacity, 6))
        assert nobody_waits(ch)

    run(main)


@pytest.mark.guarantee("green-9")
@CAPACITIES
def test_a_closed_channel_can_neither_be_sent_to_nor_received_from(capacity):
    async def main():
        ch = Channel(capacity)
        assert not ch.closed and "closed" not in repr(ch)
        ch.close()
        ch.close()
        assert ch.closed and "closed" in repr(ch)
        for use in (ch.send(1), ch.receive(), select(ch.receiving()), select(ch.sending(1))):
            with pytest.raises(ChannelClosed):
                await use
        for use in (lambda: ch.put(1), ch.get, lambda: ch.get(5)):
            with pytest.raises(ChannelClosed):
                await green.call_long(use)
        assert nobody_waits(ch)

    run(main)


@pytest.mark.guarantee("green-9")
def test_a_second_close_leaves_what_is_in_the_buffer():
    ch = Channel(2)
    ch.put(1)
    ch.close()
    ch.close()
    assert ch.get() == 1
    with pytest.raises(ChannelClosed):
        ch.get()


def test_a_channel_may_be_closed_from_a_plain_thread():
    async def main():
        ch = Channel()
        receiver = green.spawn(ch.receive)
        await turns()
        await green.spawn(ch.close)
        assert await outcome(receiver) is ChannelClosed

    run(main)


@CAPACITIES
def test_a_finalizer_that_closes_the_channel_while_that_is_closed_wakes_nobody_twice(
    capacity, monkeypatch
):
    error = Channel._closed_error

    def collected(ch):
        ch.close()
        return error(ch)

    async def receiver(ch, still_waits):
        with pytest.raises(ChannelClosed):
            await ch.receive()
        await still_waits.wait()
        return still_waits.is_set()

    async def main():
        ch, still_waits = Channel(capacity), green.Event()
        threads = [green.spawn(receiver, ch, still_waits) for _ in range(4)]
        await turns()
        monkeypatch.setattr(Channel, "_closed_error", collected)
        ch.close()
        await turns()
        still_waits.set()
        assert [await each for each in threads] == [True] * 4

    run(main)


# -- claims ----------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-10")
@CAPACITIES
def test_messages_of_who_holds_the_sending_end_are_not_mixed_with_others(capacity):
    async def main():
        ch = Channel(capacity)

        async def three(name):
            async with ch.claim("send") as end:
                for i in range(3):
                    await end.send((name, i))
                    await turns(1)

        async with green.Group() as group:
            for name in range(5):
                group.spawn(three, name)
                group.spawn(ch.send, ("alone", name))
            got = [await ch.receive() for _ in range(20)]
        for name in range(5):
            first = got.index((name, 0))
            assert got[first : first + 3] == [(name, i) for i in range(3)]
        assert sorted(n for who, n in got if who == "alone") == list(range(5))
        assert nobody_waits(ch)

    run(main)


@pytest.mark.guarantee("green-10")
@CAPACITIES
def test_who_holds_the_receiving_end_gets_what_comes_and_others_wait_on(capacity):
    async def main():
        ch = Channel(capacity)
        others = [green.spawn(ch.receive) for _ in range(2)]
        await turns()
        async with ch.claim("receive") as end:
            others.append(green.spawn(ch.receive))
            green.spawn(send_all, ch, range(7))
            assert [await end.receive() for _ in range(4)] == [0, 1, 2, 3]
        assert [await each for each in others] == [4, 5, 6]
        assert nobody_waits(ch)

    run(main)


def test_claims_are_served_in_the_order_of_coming():
    async def main():
        ch, order = Channel(), []

        async def claimer(i):
            async with ch.claim("send"):
                order.append(i)
                await turns(2)

        async with green.Group() as group:
            for i in range(5):
                group.spawn(claimer, i)
        assert order == list(range(5)) and nobody_waits(ch)

    run(main)


def test_an_item_that_is_given_back_goes_to_the_holder_and_not_to_those_put_aside():
    async def claim(ch, got):
        async with ch.claim("receive") as end:
            got.append(await end.receive())

    async def play():
        ch, got = Channel(), []
        aside = green.spawn(receive_into, ch, got)
        await turns()
        holder = green.spawn(claim, ch, got)
        await turns()
        ch.return_item_here("given back")  # as if its receiver had been cancelled
        await holder
        assert got == ["given back"]
        ch.close()
        with pytest.raises(ChannelClosed):
            await aside

    run(play)


def test_without_an_argument_the_end_is_claimed_that_is_used_first():
    async def main():
        ch = Channel(5)
        async with ch.claim() as end:
            await end.send(1)
            with pytest.raises(RuntimeError, match="'send'"):
                await end.receive()
            sender = green.spawn(ch.send, 2)
            await turns()
            assert not sender.done()
            assert await ch.receive() == 1
        await sender
        async with ch.claim():
            pass
        async with ch.claim("receive") as end:
            with pytest.raises(RuntimeError, match="'receive'"):
                await end.send(1)
            assert await end.receive() == 2
        assert nobody_waits(ch)

    run(main)


def test_a_thread_cannot_claim_an_end_twice():
    async def main():
        ch = Channel()
        async with ch.claim("send"):
            with pytest.raises(RuntimeError, match="already"):
                async with ch.claim("send"):
                    pass
            async with ch.claim("receive"):  # the other end is another matter
                pass
        assert nobody_waits(ch)

    run(main)


def test_a_claim_is_refused_outside_of_its_block_where_it_would_never_end():
    async def main():
        ch = Channel(2)
        claim = ch.claim()
        async with claim as end:
            await end.send(1)
        for unusable in (claim, ch.claim()):
            for use in (unusable.send(2), unusable.receive()):
                with pytest.raises(RuntimeError, match="inside its `async with` block"):
                    await use
        await green.spawn(ch.send, 3)
        return [await ch.receive(), await ch.receive()]

    assert run(main) == [1, 3]


def test_a_claim_is_for_one_of_the_two_ends():
    with pytest.raises(ValueError, match="'both'"):
        Channel().claim("both")


def test_who_waits_for_a_claim_may_be_cancelled():
    async def main():
        ch = Channel()

        async def claimer():
            async with ch.claim("send") as end:
                await end.send("x")

        async with ch.claim("send"):
            first, second = green.spawn(claimer), green.spawn(claimer)
            await turns()
            first.cancel()
            assert await outcome(first) is CancelledError
        assert await ch.receive() == "x"
        await second
        assert nobody_waits(ch)

    run(main)


def test_a_holder_that_fails_or_is_cancelled_gives_the_end_back():
    async def main():
        ch = Channel()

        async def holder():
            async with ch.claim("send") as end:
                await end.send("never received")

        held = green.spawn(holder)
        await turns()
        other = green.spawn(ch.send, "other")
        await turns()
        held.cancel()
        await turns()
        assert await ch.receive() == "other"
        await other
        assert nobody_waits(ch)

    run(main)


@pytest.mark.parametrize("end", ["send", "receive"])
def test_a_select_waits_while_somebody_else_holds_the_end(end):
    async def main():
        ch = Channel()
        guard = ch.sending("theirs") if end == "send" else ch.receiving()
        async with ch.claim(end) as mine:
            selecting = green.spawn(select, guard)
            await turns()
            if end == "send":
                got = []
                green.spawn(receive_into, ch, got, 2)
                await mine.send("mine")
                await turns()
                assert got == ["mine"]
            else:
                green.spawn(send_all, ch, ["mine", "theirs"])
                assert await mine.receive() == "mine"
            await turns()
            assert not selecting.done()
        assert await selecting == (0, None if end == "send" else "theirs")
        await turns()
        assert nobody_waits(ch)

    run(main)


def test_a_select_with_both_ends_does_not_meet_itself():
    async def main():
        ch = Channel()
        async with ch.claim("send"), ch.claim("receive"):
            alone = green.spawn(select, ch.sending("own"), ch.receiving())
            await turns()
        await turns()
        assert not alone.done()
        other = green.spawn(select, ch.receiving())
        assert await other == (0, "own") and await alone == (0, None)
        assert nobody_waits(ch)

    run(main)


def test_a_select_that_waits_for_both_ends_of_a_full_channel_receives_or_sends_but_not_both():
    async def main():
        ch = Channel(1)
        async with ch.claim("receive"):
            await ch.send("first")
            selecting = green.spawn(select, ch.receiving(), ch.sending("own"))
            sender = green.spawn(ch.send, "second")
            await turns()
        assert await selecting == (0, "first")
        await sender
        assert await ch.receive() == "second" and nobody_waits(ch)

    run(main)


def test_selects_with_both_ends_that_waited_for_a_claim_meet_in_pairs():
    async def main():
        ch = Channel()
        async with ch.claim("send"), ch.claim("receive"):
            all_ = [green.spawn(select, ch.sending(i), ch.receiving()) for i in range(7)]
            await turns()
        await turns()
        done = {i: each.value for i, each in enumerate(all_) if each.done()}
        sent = {i for i, chosen in done.items() if chosen.index == 0}
        got = [chosen.value for chosen in done.values() if chosen.index == 1]
        assert len(done) == 6 and sorted(got) == sorted(sent)
        assert all(chosen.value != i for i, chosen in done.items())

    run(main)


def test_of_a_closed_channel_who_waited_for_a_holder_gets_what_is_left_over():
    async def main():
        ch = Channel(3)
        await send_all(ch, range(3))
        async with ch.claim("receive") as end:
            others = [green.spawn(ch.receive) for _ in range(3)]
            await turns()
            assert await end.receive() == 0
            ch.close()
            late = green.spawn(ch.receive)
            await turns()
            assert not any(each.done() for each in [*others, late])
        assert [await outcome(each) for each in [*others, late]] == [
            1,
            2,
            ChannelClosed,
            ChannelClosed,
        ]
        assert nobody_waits(ch)

    run(main)


def test_closing_tells_those_who_wait_for_a_holder():
    async def main():
        ch = Channel()
        async with ch.claim("send"), ch.claim("receive"):
            others = [green.spawn(ch.receive), green.spawn(ch.send, 1)]
            await turns()
            ch.close()
            assert [await outcome(each) for each in others] == [ChannelClosed] * 2
        assert nobody_waits(ch)

    run(main)


# -- plain threads ---------------------------------------------------------------------------------


@CAPACITIES
def test_plain_threads_put_and_get(capacity):
    ch = Channel(capacity)
    joins = [in_a_thread(lambda i=i: [ch.put((i, n)) for n in range(30)]) for i in range(4)]
    gets = [in_a_thread(lambda: [ch.get() for _ in range(40)]) for _ in range(3)]
    got = [get() for get in gets]
    for join in joins:
        join()
    assert sorted([item for mine in got for item in mine]) == [
        (i, n) for i in range(4) for n in range(30)
    ]
    assert all(in_order(each) for each in got)
    assert nobody_waits(ch)


def test_plain_functions_as_green_threads_put_and_get():
    def producer(ch):
        for i in range(50):
            ch.put(i)
        ch.close()

    def consumer(ch):
        got = []
        try:
            while True:
                got.append(ch.get())
        except ChannelClosed:
            return got

    async def main():
        ch, other = Channel(), Channel(4)
        promise = green.spawn(consumer, ch)
        green.spawn(producer, other)
        async for item in other:
            await ch.send(item)
        ch.close()
        assert await promise == list(range(50))

    run(main)


def test_put_and_get_block_a_foreign_call_and_nobody_else():
    async def main():
        ch = Channel()
        getting, putting = green.spawn(green.call, ch.get), green.spawn(green.call, ch.put, "x")
        assert [await getting, await putting] == ["x", None]

    run(main)


def test_a_get_that_times_out_has_taken_nothing():
    ch = Channel()
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="no item"):
            ch.get(timeout)
    assert nobody_waits(ch)
    join = in_a_thread(ch.put, "x")
    assert ch.get(30) == "x"
    assert join() is None


@CAPACITIES
def test_a_put_that_times_out_has_sent_nothing(capacity):
    ch = Channel(capacity)
    for i in range(capacity):
        ch.put(i, timeout=30)
    for timeout in (0, 0.01):
        with pytest.raises(TimeoutError, match="took"):
            ch.put("late", timeout)
    ch.close()
    left = []
    with pytest.raises(ChannelClosed):
        while True:
            left.append(ch.get())
    assert left == list(range(capacity)) and nobody_waits(ch)


@CAPACITIES
def test_when_put_and_get_time_out_at_random_no_item_is_lost_or_doubled(capacity):
    ch = Channel(capacity)

    def putter(who):
        rng, sent = random.Random(who), []
        for n in range(60):
            try:
                ch.put((who, n), rng.choice((0, 0.0005, 0.001)))
            except TimeoutError:
                continue
            sent.append((who, n))
        return sent

    def getter(who):
        rng, got = random.Random(who), []
        while True:
            try:
                got.append(ch.get(rng.choice((0, 0.0005, 0.001))))
            except TimeoutError:
                continue
            except ChannelClosed:
                return got

    getters = [in_a_thread(getter, i) for i in range(3)]
    putters = [in_a_thread(putter, i) for i in range(3)]
    sent = [item for join in putters for item in join()]
    ch.close()
    got = [item for join in getters for item in join()]
    assert sorted(got) == sorted(sent)


def test_put_and_get_inside_a_coroutine_say_what_to_use_instead():
    async def main():
        ch = Channel(1)
        with pytest.raises(RuntimeError, match=r"await channel\.send"):
            ch.put(1)
        with pytest.raises(RuntimeError, match=r"await channel\.receive"):
            ch.get()

    run(main)


def test_send_in_plain_code_says_what_to_use_instead():
    with pytest.raises(RuntimeError, match="put and get"):
        Channel().send(1).send(None)


def test_a_plain_function_that_waits_for_a_channel_can_be_cancelled():
    async def main():
        ch = Channel()
        for use in (ch.get, lambda: ch.put(1)):
            waits = green.spawn(use)
            while nobody_waits(ch):
                await green.sleep(0.001)
            assert waits.cancel()
            assert await outcome(waits) is CancelledError
            assert nobody_waits(ch)

    run(main)


@pytest.mark.parametrize("timeout", [None, 30])
def test_ctrl_c_ends_a_get_and_a_put_and_nothing_is_lost(timeout):
    ch = Channel()

    def when_it_waits():
        while threading.main_thread().ident not in promises.waiting_threads:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    for use in (lambda: ch.get(timeout), lambda: ch.put("x", timeout)):
        interrupting = threading.Thread(target=when_it_waits)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            use()
        interrupting.join()
    join = in_a_thread(ch.put, "y")
    assert ch.get(30) == "y" and join() is None
    assert nobody_waits(ch)


# -- asyncio ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-18")
@CAPACITIES
def test_asyncio_code_sends_and_receives(capacity):
    async def main():
        there, back = Channel(capacity), Channel(capacity)

        async def echo():
            async for item in there:
                await back.send(item)
            back.close()

        green.spawn(echo)

        async def feed():
            for i in range(50):
                await there.send(i)
            there.close()

        feeding = asyncio.create_task(feed())
        got = [item async for item in back]
        await feeding
        return got

    assert asyncio.run(main()) == list(range(50))


def test_asyncio_tasks_meet_each_other():
    async def main():
        ch = Channel()
        got = await asyncio.gather(
            *(ch.receive() for _ in range(10)), *(ch.send(i) for i in range(10))
        )
        return sorted(got[:10])

    assert asyncio.run(main()) == list(range(10))


def test_asyncio_code_learns_of_a_closed_channel():
    async def main():
        ch = Channel()
        waiting = [asyncio.create_task(use) for use in (make(ch.receive()), make(ch.receive()))]
        await asyncio.sleep(0)
        ch.close()
        for each in waiting:
            with pytest.raises(ChannelClosed):
                await each
        with pytest.raises(ChannelClosed):
            await ch.send(1)

    async def make(awaitable):
        return await awaitable

    asyncio.run(main())


@CAPACITIES
def test_items_are_not_lost_on_asyncio_code_that_times_out(capacity):
    items = 150
    limits = 0, 0.0001, 0.0005, 0.05  # with the last one also a slow machine gets on

    async def main():
        ch, got = Channel(capacity), []
        rng = random.Random(capacity)
        sending = green.spawn(send_all, ch, range(items))
        while len(got) < items:
            try:
                got.append(await asyncio.wait_for(ch.receive(), rng.choice(limits)))
            except TimeoutError:
                pass
        await sending
        return got

    assert sorted(asyncio.run(main())) == list(range(items))


@CAPACITIES
def test_items_are_not_lost_on_asyncio_tasks_that_are_cancelled(capacity):
    items = 150

    async def main():
        ch, got = Channel(capacity), []
        rng = random.Random(capacity)

        async def receiver():
            while True:
                got.append(await ch.receive())

        sending = green.spawn(send_all, ch, range(items))
        tasks = [asyncio.create_task(receiver()) for _ in range(3)]
        for _ in range(100):
            await asyncio.sleep(rng.choice((0, 0, 0.0005)))
            i = rng.randrange(3)
            tasks[i].cancel()
            await asyncio.gather(tasks[i], return_exceptions=True)
            tasks[i] = asyncio.create_task(receiver())
        await sending
        while len(got) < items:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return got

    assert sorted(asyncio.run(asyncio.wait_for(main(), 30))) == list(range(items))


def test_an_asyncio_send_that_is_cancelled_sends_once_or_never():
    async def main():
        ch = Channel()
        got = []
        receiving = green.spawn(receive_into, ch, got)
        sent = []
        for i in range(100):
            task = asyncio.create_task(send(ch, i, sent))
            for _ in range(i % 4):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await ch.send("last")
        while "last" not in got:
            await asyncio.sleep(0.001)
        receiving.cancel()
        got.remove("last")
        assert len(set(got)) == len(got) and set(sent) <= set(got)

    async def send(ch, i, sent):
        await ch.send(i)
        sent.append(i)

    asyncio.run(main())


def test_an_asyncio_coroutine_that_is_thrown_away_leaves_nobody_in_the_channel():
    async def receive(ch):
        return await ch.receive()

    loop = asyncio.new_event_loop()
    ch = Channel(1)
    try:
        waiting = receive(ch)

        async def begin():
            waiting.send(None)

        loop.run_until_complete(begin())
        waiting.close()
    finally:
        loop.close()
    ch.put("x")
    assert ch.get(30) == "x"


def test_asyncio_code_inside_a_foreign_call_may_use_channels():
    async def main():
        ch = Channel()

        async def there():
            await ch.send(5)
            return await ch.receive()

        async def here():
            await ch.send(await ch.receive() + 1)

        green.spawn(here)
        return await green.call(lambda: asyncio.run(there()))

    assert run(main) == 6


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-12")
@CAPACITIES
def test_a_cancelled_receiver_leaves_the_queue(capacity):
    async def main():
        ch = Channel(capacity)
        receivers = [green.spawn(ch.receive) for _ in range(3)]
        await turns()
        for each in receivers[:2]:
            each.cancel()
        await turns()
        await ch.send("x")
        assert [await outcome(each) for each in receivers] == [CancelledError, CancelledError, "x"]
        assert nobody_waits(ch)

    run(main)


@pytest.mark.guarantee("green-12")
@CAPACITIES
def test_a_cancelled_sender_takes_its_item_back(capacity):
    async def main():
        ch = Channel(capacity)
        senders = [green.spawn(ch.send, i) for i in range(capacity + 3)]
        await turns()
        for each in senders[capacity : capacity + 2]:
            each.cancel()
        await turns()
        got = [await ch.receive() for _ in range(capacity + 1)]
        assert got == [*range(capacity), capacity + 2]
        assert nobody_waits(ch)

    run(main)


@pytest.mark.guarantee("green-12")
def test_who_is_cancelled_with_an_item_on_its_way_gets_the_item_first():
    async def main():
        for waiters in (1, 2):
            ch, got = Channel(), []
            threads = [green.spawn(receive_into, ch, got) for _ in range(waiters)]
            await turns()
            await ch.send("x")
            threads[0].cancel()
            assert await outcome(threads[0]) is CancelledError
            assert got == ["x"]
            for each in threads:
                each.cancel()

    run(main)


@pytest.mark.guarantee("green-12")
def test_who_is_cancelled_with_its_item_taken_is_told_first():
    async def main():
        ch, sent = Channel(), []

        async def sender():
            for i in range(5):
                await ch.send(i)
                sent.append(i)

        thread = green.spawn(sender)
        await turns()
        assert await ch.receive() == 0
        thread.cancel()
        assert await outcome(thread) is CancelledError
        assert sent == [0] and nobody_waits(ch)

    run(main)


def test_who_leaves_from_the_middle_of_a_long_queue_leaves_the_others_in_their_order():
    async def main():
        for end in ("send", "receive"):
            rng, ch, got = random.Random(2), Channel(), {}

            async def receive(i, ch=ch, got=got):
                got[i] = await ch.receive()

            threads = [
                green.spawn(ch.send, i) if end == "send" else green.spawn(receive, i)
                for i in range(500)
            ]
            await turns()
            gone = rng.sample(range(500), 400)
            for i in gone:
                threads[i].cancel()
            await turns()
            stay = [i for i in range(500) if i not in gone]
            if end == "send":
                assert [await ch.receive() for _ in stay] == stay
            else:
                await send_all(ch, stay)
                await turns()
                assert got == {i: i for i in stay}
            assert nobody_waits(ch)

    run(main)


@CAPACITIES
def test_when_senders_and_receivers_are_cancelled_at_random_nothing_is_lost_or_doubled(
    capacity, clock
):
    async def main(seed):
        rng = random.Random(seed)
        ch, got, sent, threads = Channel(capacity), [], [], []

        async def sender(who):
            n = 0
            while True:
                await ch.send((who, n))
                sent.append((who, n))
                n += 1
                if rng.random() < 0.2:
                    await green.sleep(0)

        async def receiver(_):
            while True:
                if rng.random() < 0.3:
                    got.append(await ch.receive())
                else:
                    chosen = await select(ch.receiving(), green.after(rng.choice((1, 1e6))))
                    if chosen.index == 0:
                        got.append(chosen.value)

        for i in range(120):
            threads.append(green.spawn(rng.choice((sender, receiver)), i))
            await turns(rng.randrange(3))
            if rng.random() < 0.3:
                clock.advance(1)
            if len(threads) > 5:
                threads.pop(rng.randrange(len(threads))).cancel()
        for each in threads:
            each.cancel()
            await outcome(each)
        left = []
        while (chosen := await select(ch.receiving(), default=None)) is not None:
            left.append(chosen.value)
        assert sorted(got + left) == sorted(sent)
        assert len(left) <= capacity and nobody_waits(ch)

    for seed in range(10):
        run(main, seed, seconds=1e9)


@CAPACITIES
def test_a_timeout_around_receive_loses_nothing(capacity, clock):
    async def main():
        ch, got, rng = Channel(capacity), [], random.Random(1)

        async def sender():
            for i in range(200):
                await ch.send(i)
                if rng.random() < 0.3:
                    clock.advance(3)  # the limit expires with the item on its way
                    await green.sleep(0)
                if rng.random() < 0.3:
                    await green.sleep(2)
            ch.close()

        async def receiver():
            while True:
                item = None
                try:
                    async with green.timeout(rng.choice((0, 1, 3))):
                        item = await ch.receive()
                except TimeoutError:
                    pass
                except ChannelClosed:
                    return
                if item is not None:
                    got.append(item)

        await green.par(sender, receiver, receiver)
        assert sorted(got) == list(range(200))

    run(main, seconds=1e6)
