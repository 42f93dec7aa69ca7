"""Channels in several images: what is sent arrives once, or its sender is told; and nobody waits
for who is gone."""

import asyncio
import gc
import os
import pickle
import random
import select as select_module
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from itertools import pairwise, product
from time import monotonic

import psutil
import pytest
from faults import StopsTheLoop, Unreadable, append, hold_until, lines, wait_for
from greens import nobody_waits, run, turns
from scripts import Script, output_of, run_script

import polycephaly as poly
from polycephaly import green
from polycephaly.errors import ItemLost
from polycephaly.green import Channel, ChannelClosed, select, testing
from polycephaly.green.distributed.packed import pack_item
from polycephaly.green.distributed.transport import get_transport
from polycephaly.runtime.tuning import tuning

CAPACITIES = pytest.mark.parametrize("capacity", [0, 1, 4])


@pytest.fixture
def pool():
    with poly.Pool(3, output="discard") as pool:
        yield pool


def made_in(drone, capacity=0):
    return drone.promise(Channel, capacity).value


def homes(pool):
    """A channel that lives here, and two that live in drones."""
    return [None, pool.drones[0], pool.drones[1]]


def channel_in(home, capacity=0):
    return Channel(capacity) if home is None else made_in(home, capacity)


async def send_all(ch, items, close=False):
    for item in items:
        await ch.send(item)
    if close:
        ch.close()
    return len(items)


async def receive_n(ch, n):
    return [await ch.receive() for _ in range(n)]


async def receive_all(ch):
    return [item async for item in ch]


def put_all(ch, items):
    for item in items:
        ch.put(item)


# -- how a channel travels -------------------------------------------------------------------------


@CAPACITIES
def test_a_channel_given_to_two_drones_connects_them(pool, capacity):
    ch = Channel(capacity)
    one, other, _ = pool.drones
    got = one.promise(receive_all, ch)
    assert other.promise(send_all, ch, range(50), True).value == 50
    assert got.value == list(range(50))


def test_one_that_lives_in_a_drone_connects_the_others(pool):
    one, other, third = pool.drones
    ch = made_in(third)
    got = one.promise(receive_all, ch)
    other.promise(send_all, ch, range(50), True).value  # noqa: B018
    assert got.value == list(range(50))


def test_it_may_be_captured_in_a_closure(pool):
    ch = Channel()
    p = pool.promise(lambda: ch.put("captured"))
    assert ch.get() == "captured"
    p.value  # noqa: B018


def test_it_may_go_over_another_channel_and_comes_home_as_itself(pool):
    async def forward(outer):
        inner = await outer.receive()
        await inner.send(inner)

    async def main():
        outer, inner = Channel(), Channel()
        p = pool.promise(forward, outer)
        await outer.send(inner)
        assert await inner.receive() is inner
        await p

    run(main)


def test_in_one_image_it_is_one_object(pool):
    def same(one, others):
        return one is others["a"][0]

    ch = Channel()
    assert pool.doit(same, ch, {"a": [ch]})


def test_it_goes_on_to_a_drones_own_drones(pool):
    def nested(ch, mine):
        with poly.Drone() as below:
            below.doit(ch.put, "from below")
            p = below.promise(mine.put, "to the one between")
            assert mine.get() == "to the one between"
            p.result()
        ch.put("again")  # its own drones are gone, its parent is not
        return mine

    ch = Channel()
    p = pool.promise(nested, ch, Channel())
    assert [ch.get(), ch.get()] == ["from below", "again"]
    kept = pool.drones[0].doit(Channel, 1)
    pool.drones[0].doit("import polycephaly\nwith polycephaly.Drone() as d: d.doit('1')")
    pool.drones[1].doit(kept.put, "still there")
    assert kept.get() == "still there"
    p.value  # noqa: B018


def test_spawned_images_have_it_too():
    with poly.Pool(1, start="spawn") as pool:
        ch = Channel()
        p = pool.promise(ch.put, 1)
        assert ch.get() == 1
        p.value  # noqa: B018


def test_asyncio_code_of_a_drone_can_use_it(pool):
    def in_asyncio(ch):
        async def main():
            await ch.send(await ch.receive() + 1)

        asyncio.run(main())

    async def main():
        ch = Channel()
        p = pool.promise(in_asyncio, ch)
        await ch.send(1)
        assert await ch.receive() == 2
        await p

    run(main)


SNAPSHOT = """
import os
import polycephaly as poly
from polycephaly import green

plain, buffered, closed, ring = (
    green.Channel(), green.Channel(3), green.Channel(), [green.Channel() for _ in range(3)]
)
closed.close()
dropped = [green.Channel()]

async def consume():
    return await plain.receive()

def by_name():
    plain.put("by name")

async def pass_on(i):
    await ring[i + 1].send(await ring[i].receive() + 1)

async def fill():
    for i in range(20):
        await buffered.send(i)
    buffered.close()

def try_closed():
    try:
        closed.put(1)
    except green.ChannelClosed:
        return "closed"

def below():
    own = green.Channel()
    def nested():
        plain.put("from below")
        own.put("own")
    with poly.Drone() as mine:
        p = mine.promise(nested)
        got = own.get()
        p.value
        return got

async def everything():
    return [item async for item in buffered]

if __name__ == "__main__":
    waits = green.spawn(consume)  # it stands in the channel while the drones are forked
    green.run(green.sleep, 0.01)
    with poly.Pool(3) as pool:
        p = pool.promise(by_name)
        print(waits.value, p.value)
        p = pool.promise(lambda: plain.put("captured"))
        print(plain.get(), p.value)
        ps = [pool.promise(pass_on, i) for i in (0, 1)]
        ring[0].put(0)
        print(ring[2].get(), [p.value for p in ps])
        p = pool.promise(fill)
        print(green.run(everything) == list(range(20)), p.value)
        print(pool.doit(try_closed))
        p = pool.promise(below)
        print(plain.get(), p.value)
        dropped.clear()
        print(
            str(pool.promise("dropped[0].get()").exception())
            .partition(" (pid ")[2].partition("> ")[2]
        )
    pid = os.fork()
    if pid == 0:
        waits = green.spawn(consume)
        plain.put("a channel of its own")
        print(waits.value, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_what_a_drone_has_from_the_snapshot_is_the_same_channel(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SNAPSHOT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", script],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stderr, done.stdout.splitlines()) == (
        "",
        [
            "by name None",
            "captured None",
            "2 [None, None]",
            "True None",
            "closed",
            "from below own",
            "was closed, or its owning process has released it",
            "a channel of its own",
        ],
    )


def test_large_items_and_many_small_ones(pool):
    async def echo(ch, back):
        async for item in ch:
            await back.send(item)

    async def main():
        ch, back = Channel(), Channel()
        p = pool.promise(echo, ch, back)
        for item in (bytes(20_000_000), b"", "x" * 300_000, list(range(100_000))):
            await ch.send(item)
            assert await back.receive() == item
        ch.close()
        await p

    run(main)


# -- rendezvous, buffers, credit -------------------------------------------------------------------


@pytest.mark.guarantee("channel-1")
def test_a_send_to_another_image_returns_when_a_receiver_has_the_item(pool):
    async def receiver(ch, begin):
        await begin.receive()
        return await ch.receive()

    async def main():
        for home in homes(pool):
            ch, begin, log = channel_in(home), Channel(), []
            p = pool.drones[2].promise(receiver, ch, begin)

            async def sender(ch=ch, log=log):
                await ch.send("x")
                log.append("sent")

            sending = green.spawn(sender)
            await turns()
            assert log == []
            await begin.send(None)
            await sending
            assert log == ["sent"]
            assert await p == "x"

    run(main)


def test_a_buffer_holds_what_it_may_and_no_more(pool, tmp_path):
    def fill(ch, path):
        """Until it holds five, however long that takes; and then tries once more."""
        sent, last = 0, False
        while True:
            last = last or len(lines(path)) >= 5
            try:
                ch.put(sent, timeout=0.2)
            except TimeoutError:
                if last:
                    return sent
            else:
                append(path, "sent")
                sent += 1

    for number, home in enumerate(homes(pool)):
        ch, path = channel_in(home, 5), str(tmp_path / f"sent-{number}")
        filled = [pool.drones[1].promise(fill, ch, path), pool.drones[2].promise(fill, ch, path)]
        assert sum(each.value for each in filled) == 5
        assert len({ch.get() for _ in range(5)}) >= 3  # each has sent 0, 1, ...
        with pytest.raises(TimeoutError):
            ch.get(timeout=0)


def test_places_granted_to_who_does_not_use_them_go_to_others(pool):
    ch = Channel(8)
    pool.drones[0].doit(put_all, ch, ["a"])  # it is granted some for more
    pool.drones[1].doit(put_all, ch, "bcdefg")
    ch.put("h")
    assert sorted(ch.get() for _ in range(8)) == list("abcdefgh")


@pytest.mark.guarantee("channel-1")
@pytest.mark.parametrize("closer", ["here", "there"])
def test_what_was_sent_before_the_close_is_received(pool, closer):
    async def send_until_closed(ch):
        sent = 0
        with suppress(ChannelClosed):
            while True:
                await ch.send(sent)
                sent += 1
        return sent

    async def main():
        for home in homes(pool):
            ch = channel_in(home, 16)
            p = pool.drones[2].promise(send_until_closed, ch)
            got = [await ch.receive() for _ in range(40)]
            if closer == "here":
                ch.close()
            else:
                await pool.drones[0].promise(ch.close)
            got += [item async for item in ch]
            assert got == list(range(await p))

    run(main)


@pytest.mark.slow
def test_many_threads_of_many_images_at_once(pool):
    async def senders(ch, me):
        await green.par(*(send_all(ch, [(me, k, i) for i in range(10)]) for k in range(20)))

    async def main():
        for capacity in (0, 7):
            for home in homes(pool):
                ch = channel_in(home, capacity)
                got = [pool.drones[2].promise(receive_n, ch, 300), green.spawn(receive_n, ch, 300)]
                sent = [pool.drones[k].promise(senders, ch, k) for k in (0, 1)] + [
                    green.spawn(senders, ch, 2)
                ]
                for each in sent:
                    await each
                lists = [await each for each in got]
                assert sorted(lists[0] + lists[1]) == list(product(range(3), range(20), range(10)))
                for each in lists:
                    for who in {item[:2] for item in each}:
                        mine = [item[2] for item in each if item[:2] == who]
                        assert mine == sorted(mine)

    run(main)


# -- select ----------------------------------------------------------------------------------------


async def choose(outs, ins, n, me):
    """Sends n items by any of `outs`, and receives n by any of `ins`, as it comes."""
    sent, got = [], []
    while len(sent) < n or len(got) < n:
        guards = [c.sending((me, len(sent)), when=len(sent) < n) for c in outs]
        guards += [c.receiving(when=len(got) < n) for c in ins]
        index, value = await select(*guards)
        if index < len(outs):
            sent.append((me, len(sent)))
        else:
            got.append(value)
    return sent, got


@pytest.mark.guarantee("channel-1")
@CAPACITIES
def test_a_select_over_channels_of_several_images(pool, capacity):
    async def chooser(channels, n):
        return [await select(*(c.receiving() for c in channels)) for _ in range(n)]

    async def main():
        one, other, third = pool.drones
        for first, second in ((None, None), (one, None), (one, other), (third, third)):
            a, b = channel_in(first, capacity), channel_in(second, capacity)
            chosen = third.promise(chooser, [a, b], 60)
            sent = one.promise(send_all, a, range(30)), other.promise(send_all, b, range(30))
            for each in sent:
                await each
            for index in (0, 1):
                assert [c.value for c in await chosen if c.index == index] == list(range(30))

    run(main)


@pytest.mark.guarantee("channel-1")
def test_both_sides_in_a_select_with_choices_of_both_kinds(pool):
    async def main():
        one, other, third = pool.drones
        for first, second in (
            (None, None),
            (one, other),
            (other, one),
            (third, third),
            (None, third),
        ):
            a, b = channel_in(first), channel_in(second)
            p = one.promise(choose, [a], [b], 40, "p")
            q = other.promise(choose, [b], [a], 40, "q")
            (sent_p, got_p), (sent_q, got_q) = await p, await q
            assert (got_p, got_q) == (sent_q, sent_p)

    run(main)


def test_a_circle_of_selects_each_held_for_the_next_does_not_stand_still(pool):
    async def main():
        for order in ((0, 1, 2), (1, 2, 0), (2, 1, 0)):
            a, b, c = (made_in(pool.drones[i]) for i in order)
            one, other, _ = pool.drones
            ps = one.promise(choose, [a], [c], 30, 1), other.promise(choose, [b], [a], 30, 2)
            sent, got = await green.spawn(choose, [c], [b], 30, 3)
            (sent_1, got_1), (sent_2, got_2) = await ps[0], await ps[1]
            assert (got_1, got_2, got) == (sent, sent_1, sent_2)

    run(main)


def test_many_choosers_on_two_channels(pool):
    async def senders(a, b, me):
        async def one(k):
            for i in range(8):
                await select(a.sending((me, k, i)), b.sending((me, k, i)))

        await green.par(*(one(k) for k in range(5)))

    async def receivers(a, b, got):
        async def one():
            for _ in range(8):
                got.append((await select(a.receiving(), b.receiving())).value)

        await green.par(*(one() for _ in range(5)))
        return got

    async def main():
        for first, second in (
            (None, pool.drones[2]),
            (pool.drones[0], pool.drones[1]),
            (None, None),
        ):
            a, b = channel_in(first), channel_in(second)
            sent = pool.drones[0].promise(senders, a, b, 0), green.spawn(senders, a, b, 1)
            got = pool.drones[1].promise(receivers, a, b, []), green.spawn(receivers, a, b, [])
            for each in sent:
                await each
            assert sorted([*await got[0], *await got[1]]) == list(
                product(range(2), range(5), range(8))
            )

    run(main)


@pytest.mark.parametrize(
    "way", ["receive", "receive from a buffer", "close", "send", "send to a closed one"]
)
def test_a_select_that_was_held_in_vain_finds_what_came_to_its_own_channels_meanwhile(
    pool, way, tmp_path
):
    offered, blocked, go = (str(tmp_path / name) for name in ("offered", "blocked", "go"))

    async def until(path):
        while not os.path.exists(path):
            await green.sleep(0)

    def touch(path):
        with open(path, "w"):
            pass

    async def other(far, tag):
        """Its offer stands, and it hears nothing, and has chosen something else before it does."""
        mine = Channel()

        async def choose():
            await until(offered + tag)
            touch(blocked + tag)
            while not os.path.exists(go + tag):
                pass
            await mine.send("mine")

        green.spawn(choose)
        return (await select(far.sending(1), mine.receiving())).value

    async def home(far, tag):
        while far._sender is None:
            await green.sleep(0)
        touch(offered + tag)
        await until(blocked + tag)
        local = Channel(1 if "buffer" in way else 0)
        guard = local.sending("sent") if "send" in way else local.receiving()
        chosen = green.spawn(lambda: select(far.receiving(), guard))
        await turns()
        if "close" in way:
            local.close()
        else:
            end = (
                green.spawn(local.receive) if "send" in way else green.spawn(local.send, "received")
            )
            await turns()
        touch(go + tag)
        try:
            value = (await chosen).value
        except ChannelClosed:
            return "closed"
        return (await end) if "send" in way else value

    async def main():
        one, two = pool.drones[:2]
        for tag, here, there in (
            ("a", one, two),
            ("b", two, one),
        ):  # in one of them the home's select is held first
            far = made_in(here)
            told = there.promise(other, far, tag)
            expected = "closed" if "close" in way else "sent" if way == "send" else "received"
            assert await here.promise(home, far, tag) == expected
            assert await told == "mine"

    run(main)


def test_time_limits_and_promises_beside_remote_channels(pool):
    async def main():
        ch = made_in(pool.drones[0])
        assert (await select(ch.receiving(), green.after(0.01))).index == 1
        assert (await select(ch.sending(1), pool.promise("2"))) == (1, 2)
        p = pool.drones[1].promise(receive_n, ch, 1)
        assert (await select(ch.sending("x"), green.after(20))).index == 0
        assert await p == ["x"]

    run(main)


def test_a_select_with_a_default_cannot_ask_another_image(pool):
    async def main():
        await select(made_in(pool.drones[0]).receiving(), default=None)

    with pytest.raises(ValueError, match="lives in another process"):
        run(main)


def test_a_select_with_a_skip_cannot_ask_another_image_either(pool):
    async def main(*guards, **how):
        return await select(*guards, green.skip(), **how)

    ch = made_in(pool.drones[0])
    for priority in (False, True):
        with pytest.raises(ValueError, match="lives in another process"):
            run(partial(main, ch.receiving(), Channel().receiving(), priority=priority))
    assert run(main, ch.receiving(when=False), Channel().receiving(when=False)).index == 2


# -- being cancelled -------------------------------------------------------------------------------


def test_a_send_that_was_broken_off_is_received_by_nobody(pool):
    async def main():
        for home in homes(pool):
            ch = channel_in(home)
            await pool.drones[2].promise(give_up, ch)
            p = pool.drones[1].promise(receive_n, ch, 1)
            await ch.send("kept")
            assert await p == ["kept"]

    async def give_up(ch):
        try:
            async with green.timeout(0.05):
                await ch.send("never")
        except TimeoutError:
            return
        raise AssertionError("it was sent")

    run(main)


def test_a_receive_that_was_broken_off_takes_nothing(pool):
    async def give_up(ch):
        for _ in range(20):
            with suppress(TimeoutError):
                async with green.timeout(0.001):
                    await ch.receive()
                    return False
        return True

    async def main():
        for home in homes(pool):
            ch = channel_in(home)
            assert await pool.drones[2].promise(give_up, ch)
            got = green.spawn(receive_n, ch, 3)
            await pool.drones[1].promise(send_all, ch, range(3))
            assert await got == [0, 1, 2]

    run(main)


@pytest.mark.slow
def test_receivers_and_senders_that_give_up_at_random_lose_nothing(pool):
    """Each item is received once, or its `send` was broken off."""

    async def impatient(ch, me, n, seed, way):
        luck, done = random.Random(seed), []
        for i in range(n):
            with suppress(TimeoutError):
                async with green.timeout(luck.random() * 0.002):
                    if way == "send":
                        await ch.send((me, i))
                        done.append((me, i))
                    else:
                        done.append(await ch.receive())
        return done

    async def main():
        for capacity in (0, 3):
            for home in homes(pool):
                ch = channel_in(home, capacity)
                sent = [pool.drones[k].promise(impatient, ch, k, 150, k, "send") for k in (0, 1)]
                got = [pool.drones[2].promise(impatient, ch, 2, 150, 2, "receive")]
                got += [green.spawn(impatient, ch, 3, 150, 3, "receive")]
                sent = [item for each in sent for item in await each]
                received = [item for each in got for item in await each]
                ch.close()
                with suppress(ChannelClosed):
                    while True:
                        received.append(await ch.receive())
                assert sorted(received) == sorted(sent)

    run(main)


def test_nothing_is_kept_of_channels_and_ends_that_are_closed(pool):
    async def use(requests):
        before = kept()
        async for ch, end in requests:
            await send_all(ch, range(3), close=True)
            end.close()
        await nothing_more_than(before)

    def kept():
        from polycephaly.green.distributed.ends import _open_ends
        from polycephaly.green.distributed.transport import get_transport

        peers = get_transport().peers.values()
        held = sum(len(end.holders) for ends in _open_ends.values() for end in ends.values())
        return held + sum(len(each.credits) + len(each.accounts) for each in peers)

    async def nothing_more_than(before):
        while kept() > before:
            await green.sleep(0.001)  # the other image's last words are on their way

    async def main():
        before = kept()
        requests = Channel()
        used = pool.promise(use, requests)
        for _ in range(20):
            ch, other = Channel(8), Channel()
            await requests.send((ch, other.sender()))
            assert await receive_all(ch) + await receive_all(other) == [0, 1, 2]
        requests.close()
        await used
        await nothing_more_than(before)

    run(main)


@pytest.mark.parametrize("capacity", [0, 4])
@pytest.mark.slow
def test_asyncio_code_that_gives_up_at_random_loses_nothing(pool, capacity):
    def impatient(ch, n):
        async def main():
            luck, got = random.Random(5), []
            while len(got) < n:
                task = asyncio.ensure_future(ch.receive())
                await asyncio.sleep(luck.random() * 0.0005)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    got += [item for item in [await task] if item is not None]
            return got

        return asyncio.run(main())

    async def main():
        ch = Channel(capacity)
        got = pool.promise(impatient, ch, 300)
        await send_all(ch, range(300))
        while not got.done():  # so that it can go on where it has given the last ones back
            await select(ch.sending(None), got)
        assert sorted(await got) == list(range(300))

    run(main)


# -- endings ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("channel-2", "channel-3")
def test_the_death_of_the_home_is_told_to_all_who_wait_with_its_cause():
    with poly.Pool(2) as pool:
        a, b = pool.drones
        ch = made_in(a)

        async def wait_in(ch, ready):
            await select(ready.sending(1), green.after(20))
            try:
                await ch.receive()
            except ChannelClosed as error:
                return str(error), type(error.__cause__).__name__, error.__cause__.exitcode

        async def all_wait():
            ready = Channel()
            there = b.promise(wait_in, ch, ready)
            await ready.receive()
            here = green.spawn(ch.receive())
            choosing = green.spawn(select(ch.receiving(), green.after(20)))
            sending = green.spawn(made_in(a).send("perhaps"))
            await turns()
            os.kill(a.pid, signal.SIGKILL)
            text, cause, code = await there
            assert (cause, code) == ("DroneDied", -signal.SIGKILL)
            assert "was killed by SIGKILL" in text
            assert "pool-" in text
            for each in (here, choosing):
                with pytest.raises(ChannelClosed, match="was killed by SIGKILL") as told:
                    await each
                assert isinstance(told.value.__cause__, poly.DroneDied)
            with pytest.raises(ItemLost, match="may be lost, or may have arrived"):
                await sending
            with pytest.raises(ChannelClosed, match="was killed by SIGKILL"):
                await ch.send(1)

        run(all_wait)


class WhereItIsOpened:
    def __reduce__(self):
        return threading.get_ident, ()


class Stops(BaseException):
    pass


def stop():
    raise Stops("from the item")


class StopsWhenOpened:
    def __reduce__(self):
        return stop, ()


def put_made(ch, make, count=1):
    put_all(ch, [make() for _ in range(count)])


@pytest.mark.guarantee("green-7")
def test_an_item_is_opened_in_the_thread_that_receives_it():
    async def receive(ch):
        return await ch.receive() == threading.get_ident()

    with poly.Pool(1) as pool:
        ch = made_in(pool.drones[0])
        sent = pool.drones[0].promise(put_made, ch, WhereItIsOpened)
        assert green.spawn(receive, ch, bound=True).result()
        sent.result()


def test_whatever_the_opening_of_an_item_raises_is_raised_by_receive_and_select():
    with poly.Pool(1) as pool:
        ch = made_in(pool.drones[0])
        sent = pool.drones[0].promise(put_made, ch, StopsWhenOpened, 2)

        async def both():
            with pytest.raises(Stops):
                await ch.receive()
            with pytest.raises(Stops):
                await select(ch.receiving())

        run(both)
        sent.result()


class StopsWhenPickled:
    def __reduce__(self):
        stop()


def test_whatever_the_opening_of_an_item_raises_is_raised_in_who_waits_for_it():
    with poly.Pool(1) as pool:

        async def main():
            for wait in Channel.receive, lambda ch: select(ch.receiving()):
                ch = Channel()
                waiting = green.spawn(wait(ch))
                await turns()
                sent = pool.promise(put_made, ch, StopsWhenOpened)
                with pytest.raises(Stops):
                    await waiting
                await sent

        run(main)


def test_whatever_the_pickling_of_an_item_raises_is_raised_by_its_sender_alone():
    with poly.Pool(1) as pool:
        there = made_in(pool.drones[0])

        async def main():
            here = Channel()
            with pytest.raises(Stops):
                await there.send(StopsWhenPickled())
            taken = pool.promise(Channel.get, here, 30)
            while nobody_waits(here):
                await green.sleep(0.001)
            with pytest.raises(Stops):
                await here.send(StopsWhenPickled())
            await here.send("next")
            return await taken

        assert run(main) == "next"


@pytest.mark.guarantee("channel-3")
def test_the_death_of_the_home_is_told_to_those_behind_a_select_on_two_of_its_channels():
    with poly.Pool(1) as pool:
        (drone,) = pool.drones
        one, two = made_in(drone), made_in(drone)

        async def both_wait():
            choosing = green.spawn(select(one.receiving(), two.receiving()))
            await turns()
            behind = green.spawn(two.receive())
            await turns()
            os.kill(drone.pid, signal.SIGKILL)
            async with green.timeout(30):  # without the error, a wait that does not end
                for each in (choosing, behind):
                    with pytest.raises(ChannelClosed, match="was killed by SIGKILL"):
                        await each

        run(both_wait)


def test_the_end_of_the_home_is_told_too():
    with poly.Drone() as drone:
        ch, other = made_in(drone), made_in(drone)
        waits = green.spawn(ch.receive())
        green.run(testing.all_waiting())  # it has asked, so there is a connection to be lost
        assert not ch.closed
    with pytest.raises(ChannelClosed, match="has ended"):
        waits.result(30)
    assert ch.closed and "closed" in repr(ch)
    wait_for(lambda: other.closed)  # nobody has asked


@pytest.mark.parametrize("how", ["get", "put", "select"])
def test_who_asks_when_the_home_and_all_drones_have_ended_is_told_so(how):
    """In a process of its own, which has not spoken to the home while that was there."""
    told = output_of(
        """
        import sys
        import polycephaly as poly
        from polycephaly import green

        async def chosen():
            return await green.select(ch.receiving(), green.after(20))

        with poly.Drone() as drone:
            ch = drone.doit(green.Channel)
        ask = {
            "get": ch.get, "put": lambda: ch.put(1), "select": lambda: green.run(chosen)
        }[sys.argv[1]]
        try:
            ask()
        except green.ChannelClosed as closed:
            print("has ended" in str(closed), ch.closed)
    """,
        how,
    )
    assert told == "True True\n"


@CAPACITIES
def test_who_was_told_that_a_channel_is_closed_sees_that_it_is_and_which(pool, capacity):
    def use(how, ch, go):
        go.get()
        before = ch.closed
        ask = {"get": ch.get, "put": partial(ch.put, 1), "select": partial(run, chosen, ch)}[how]
        error_of(ask)
        return before, ch.closed, repr(ch), error_of(ask)

    async def chosen(ch):
        return await select(ch.receiving(), green.after(20))

    def error_of(ask):
        with pytest.raises(ChannelClosed) as told:
            ask()
        return str(told.value)

    for how in ("get", "put", "select"):
        ch, go = Channel(capacity), Channel()
        asked = pool.drones[0].promise(use, how, ch, go)
        ch.close()
        go.put(None, 30)
        before, after, name, error = asked.result(30)
        assert (before, after) == (False, True)
        size = f" of {capacity}" if capacity else ""
        assert name == f"<Channel{size} closed made in the controller process>"
        assert error == f"{name} was closed, or its owning process has released it"


@pytest.mark.guarantee("channel-2")
@CAPACITIES
def test_an_image_that_dies_takes_its_offers_and_demands_along(capacity):
    async def wait_for_ever(ch, ready, way):
        green.spawn(ready.send(None))
        await green.par(
            *(
                ch.receive() if way == "receive" else ch.send("of the dead")
                for _ in range(capacity + 5)
            )
        )

    async def main(pool):
        for way in ("receive", "send"):
            ch, ready = Channel(capacity), Channel()
            p = pool.promise(wait_for_ever, ch, ready, way)
            await ready.receive()
            await pool.promise(
                send_all, other := Channel(1), ["x"]
            )  # so that what it said before has come
            os.kill(pool.drones[0].pid, signal.SIGKILL)
            with pytest.raises(poly.DroneDied):
                await p
            await other.receive()
            if way == "receive":
                got = green.spawn(ch.receive())
                await ch.send("of the living")
                assert await got == "of the living"

    with poly.Pool(1, width=2) as pool:
        run(main, pool)


@pytest.mark.guarantee("channel-3")
def test_the_last_sender_that_is_closed_closes_the_channel(pool):
    async def count(end, me):
        with end:
            for i in range(5):
                await end.send((me, i))

    async def main():
        ch = Channel()
        for k, drone in enumerate(pool.drones):
            drone.promise(count, ch.sender(), k)
        assert sorted([item async for item in ch]) == [(k, i) for k in range(3) for i in range(5)]

    run(main)


def test_async_for_does_not_take_a_death_for_the_end(pool):
    """What was lost with it would be missing, and nobody would know."""

    async def receive_and_kill(ch, home):
        async for item in ch:
            if item == 2:
                os.kill(home, signal.SIGKILL)

    one, other, reading = pool.drones
    for home, receiver in ((one, None), (other, reading)):
        ch = made_in(home, 16)
        home.doit(put_all, ch, range(10))
        with pytest.raises(ChannelClosed, match="was killed by SIGKILL"):
            if receiver is None:
                run(receive_and_kill, ch, home.pid)
            else:
                receiver.doit(receive_and_kill, ch, home.pid)


@pytest.mark.guarantee("channel-3")
def test_the_death_of_the_last_sender_closes_the_channel_with_the_cause(pool):
    async def die(end):
        await end.send("last")
        os.kill(os.getpid(), signal.SIGKILL)

    async def main():
        ch = Channel()
        p = pool.promise(die, ch.sender())
        assert await ch.receive() == "last"
        with pytest.raises(ChannelClosed) as told:
            await ch.receive()
        assert "was killed by SIGKILL" in str(told.value.__cause__)
        assert isinstance(told.value.__cause__.__cause__, poly.DroneDied)
        with pytest.raises(ChannelClosed):
            await receive_all(ch)
        await green.par(lambda: p.exception())

    run(main)


@pytest.mark.guarantee("channel-1")
def test_what_a_process_was_not_sent_before_it_was_killed_keeps_its_order():
    async def take(ch, ready):
        receivers = [green.spawn(ch.receive) for _ in range(40)]
        await green.sleep(0)
        await ready.send(os.getpid())  # behind the demands
        os.kill(os.getpid(), signal.SIGSTOP)
        await receivers[0]

    async def main(pool):
        ch, ready = Channel(), Channel()
        pool.promise(take, ch, ready)
        pid = await ready.receive()
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        senders = [green.spawn(ch.send, (i, bytes(100_000))) for i in range(40)]
        here = [green.spawn(ch.receive) for _ in range(40)]
        await testing.all_waiting()
        os.kill(pid, signal.SIGKILL)
        kept = []
        for i, sender in enumerate(senders):
            with suppress(ItemLost):  # most did not fit into the socket
                await sender
                kept.append(i)
        got = [(await here[k])[0] for k in range(len(kept))]
        for each in here:
            each.cancel()
        return kept, got

    with poly.Pool(1, output="discard") as pool:
        kept, got = run(lambda: main(pool))
    assert kept and got == kept


def produce_and_die(end):
    end.put(1)
    os._exit(3)


def forward(ends, to):
    to.put(ends.get())


def take_one_and_die(ends):
    end = ends.get()
    end.put(1)
    os._exit(3)


def test_an_end_that_was_handed_on_goes_with_whoever_has_it_then(pool):
    one, other, third = pool.drones

    def ends_with_a_death(ch, home=None):
        seen = home.doit(items_and_error, ch) if home else items_and_error(ch)
        return (
            seen[:-1] == [1]
            and seen[-1].startswith("ChannelClosed")
            and "exit status 3" in seen[-1]
        )

    ch = made_in(other)  # home is a drone, and the end comes by way of the main image
    one.promise(produce_and_die, other.doit(ch.sender))
    assert ends_with_a_death(ch, other)
    ch, ends, more = Channel(), Channel(), Channel()  # from drone to drone, by a channel
    other.promise(forward, ends, more)
    third.promise(take_one_and_die, more)
    ends.put(ch.sender())
    assert ends_with_a_death(ch)
    ch = Channel()  # there, back, and to another
    other.promise(produce_and_die, pool.drones[0].doit(lambda end: end, ch.sender()))
    assert ends_with_a_death(ch)


def items_and_error(ch):
    seen = []
    try:
        while True:
            seen.append(ch.get(60))
    except Exception as error:
        return [*seen, causes(error)]


AT_HAND = {}


def keep(end):
    AT_HAND["end"] = end


def give():
    return AT_HAND.pop("end")


def give_by(way):
    way.put(AT_HAND.pop("end"))


def keep_from(way):
    AT_HAND["end"] = way.get(60)


def put_here(item):
    AT_HAND["end"].put(item, 60)


def close_here():
    AT_HAND["end"].close()


def first_of(ch):
    return ch.get(60)


@pytest.mark.parametrize("seed", range(6))
def test_an_end_goes_with_the_last_who_had_it_whatever_its_way(seed):
    luck = random.Random(seed)
    print("seed", seed)

    def at(place, fn, *args):
        return fn(*args) if place is None else drones[place].doit(fn, *args)

    with poly.Pool(3, output="discard") as pool:
        for round_ in range(4):
            wait_for(lambda: len(pool.drones) == 3)
            drones = pool.drones
            home = luck.choice([None, 0])
            ch = at(home, Channel, 4)
            at(home, keep, at(home, ch.sender))
            place = home
            for _ in range(luck.randrange(1, 6)):
                before, place = (
                    place,
                    luck.choice([each for each in (None, 0, 1, 2) if each != place]),
                )
                if None in (before, place) or luck.random() < 0.3:  # as an argument, or a result
                    at(place, keep, at(before, give))
                else:  # from one to the other, as an item
                    way = Channel()
                    given = drones[before].promise(give_by, way)
                    at(place, keep_from, way)
                    given.result(60)
            at(place, put_here, 1)
            assert at(home, first_of, ch) == 1
            victim = luck.choice([each for each in (0, 1, 2) if each != home])
            print("round", round_, "home", home, "end at", place, "killed", victim)
            drones[victim].kill()
            if victim == place:
                with pytest.raises(ChannelClosed):
                    at(home, first_of, ch)
            else:
                at(place, put_here, 2)
                assert at(home, first_of, ch) == 2
                at(place, close_here)
                with pytest.raises(ChannelClosed):
                    at(home, first_of, ch)


def kill_the_sender_while_its_zygote_is_stopped(pool, ch):
    """The pid of the zygote, which does not see the death before somebody lets it go on."""
    (drone,) = pool.drones
    zygote = pool._dispatcher.supervisor.engine._launcher.pid
    drone.doit(keep, ch.sender())
    os.kill(zygote, signal.SIGSTOP)
    os.kill(drone.pid, signal.SIGKILL)
    return zygote


def test_how_an_image_ended_is_told_though_the_machine_stood_still_meanwhile():
    with Script("""
        import os, signal, time
        import polycephaly as poly
        from polycephaly.green import Channel, ChannelClosed
        from test_far_channels import kill_the_sender_while_its_zygote_is_stopped

        with poly.Pool(1, output="discard") as pool:
            ch = Channel()
            zygote = kill_the_sender_while_its_zygote_is_stopped(pool, ch)
            time.sleep(0.1)
            print(zygote, flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                ch.get(60)
            except ChannelClosed as error:
                while error.__cause__ is not None:
                    error = error.__cause__
                print(type(error).__name__, flush=True)
    """) as script:
        zygote = int(script.read_line())
        script.wait_until_stopped()
        os.kill(zygote, signal.SIGCONT)
        time.sleep(0.5)
        script.signal(signal.SIGCONT)
        assert script.read_line() == "DroneDied"
        assert script.wait() == 0


def test_how_an_image_ended_is_told_however_long_its_parent_takes_to_see_it():
    with poly.Pool(1, output="discard") as pool:
        ch = Channel()
        zygote = kill_the_sender_while_its_zygote_is_stopped(pool, ch)
        try:
            with pytest.raises(TimeoutError):
                ch.get(1)
        finally:
            os.kill(zygote, signal.SIGCONT)
        assert "DroneDied" in items_and_error(ch)[-1]


def test_how_an_image_ended_is_told_though_its_zygote_was_killed_and_nobody_reaps_it():
    """The drone inherits what its own zygote leaves, and does not wait for strangers."""

    def inner():
        with poly.Pool(1, output="discard") as pool:
            (drone,) = pool.drones
            ch = Channel()
            drone.doit(keep, ch.sender())
            os.kill(pool._dispatcher.supervisor.engine._launcher.pid, signal.SIGKILL)
            return items_and_error(ch)[-1]

    with poly.Pool(1, output="discard") as pool:
        assert "was killed by SIGKILL" in pool.doit(inner)


def hold_the_owner():
    async def step():
        time.sleep(1.2)

    green.spawn(step)


def test_an_end_is_gone_with_a_drone_that_dies_as_soon_as_the_call_with_it_is_answered():
    """It has said that it has the end before it answers, though its green threads are in the middle
    of a step."""
    with poly.Pool(1, output="discard") as pool:
        for held in (True, False, False):
            (drone,) = pool.drones
            if held:
                drone.doit(hold_the_owner)
            ch = Channel()
            drone.doit(keep, ch.sender())
            drone.kill()
            assert "DroneDied" in items_and_error(ch)[-1]


def fail_or_keep(given):
    if given == "die":
        os._exit(3)
    if given:  # another call of the map, which may come after it, is not to let it go
        AT_HAND["end"] = given


@pytest.mark.parametrize("known", [0, 300])
def test_an_end_in_a_map_is_gone_with_the_call_that_it_went_with(known):
    """Though calls that are known to be short travel many at once."""
    with poly.Pool(1, output="discard") as pool:
        ch = Channel()
        with pytest.raises(poly.DroneDied):
            list(pool.map(fail_or_keep, [0] * known + ["die", (ch.sender(),)]))
        pool.drones[0].kill()  # it may have been given the last call before that was cancelled
        assert (
            "the last end that could send was" in items_and_error(ch)[-1]
        )  # with a drone, or a call that never ran


def test_an_end_in_a_map_is_not_opened_again_to_name_its_item():
    with poly.Pool(1) as pool:
        ch = Channel()
        (error,) = pool.map(len, [ch.sender()], return_exceptions=True)
        assert error.__notes__ == ["in map(len, ...), item 0"]
        assert "was closed" in items_and_error(ch)[-1]


async def put_and_spin(ch):
    await ch.send(1)
    while True:
        pass


def test_a_closed_channel_tells_though_the_last_pool_went_with_who_had_places_in_it():
    for _ in range(6):
        ch = Channel(8)
        with poly.Pool(1, output="discard") as pool:
            pool.promise(put_and_spin, ch)
            assert ch.get(60) == 1
            pool._dispatcher.kill()
        ch.close()
        with pytest.raises(ChannelClosed):
            ch.get(60)


def test_two_to_whom_an_end_was_given_hold_it_both(pool, tmp_path):
    def put(end, number, gate):
        end.put(number)
        while not os.path.exists(gate):
            green.run(green.sleep, 0.01)
        os._exit(3)

    ch, gates = Channel(), [str(tmp_path / "one"), str(tmp_path / "other")]
    end = ch.sender()
    died = [
        drone.promise(put, end, k, gate)
        for k, (drone, gate) in enumerate(zip(pool.drones, gates, strict=False))
    ]
    assert {ch.get(60), ch.get(60)} == {0, 1}
    append(gates[0], "")
    assert isinstance(died[0].exception(60), poly.DroneDied)
    with pytest.raises(TimeoutError):
        ch.get(0.05)
    append(gates[1], "")
    with pytest.raises(ChannelClosed, match=r"exit status 3|was closed"):
        ch.get(60)


stored = []


def store(end):
    stored.append(end)


def forget_all():
    stored.clear()


# -- ends that are let go with their call ----------------------------------------------------------


def put_three(end, fails=False):
    for number in range(3):
        end.put(number)
    if fails:
        raise KeyError("after three")


async def send_three(end, fails=False):
    for number in range(3):
        await end.send(number)
    if fails:
        raise KeyError("after three")


@pytest.mark.guarantee("channel-4")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("work", [put_three, send_three])
@CAPACITIES
def test_an_end_that_a_call_has_not_stored_is_let_go_with_it(work, capacity, width, fails):
    """So the channel is closed as by hand, whether the call returns or fails: all is received, then
    there is an end."""
    with poly.Pool(1, width=width) as pool:
        ch = Channel(capacity)
        end = ch.sender()
        promised = pool.promise(work, end, fails)
        assert list(ch) == [0, 1, 2]
        assert isinstance(promised.exception(), KeyError if fails else type(None))
        with pytest.raises(ChannelClosed):
            end.put(1)


async def send_three_in_a_cycle(end):
    cycle = [end]
    cycle.append(cycle)
    await send_three(end)


@pytest.mark.guarantee("channel-4")
def test_an_end_in_a_cycle_is_let_go_with_an_overlapped_call():
    """Also if the drone was idle during the call, when it may have searched for ends."""

    async def nothing():
        pass

    with poly.Pool(1, width=2) as pool:
        ch = Channel()
        pool.promise(send_three_in_a_cycle, ch.sender())
        assert ch.get(60) == 0
        for _ in range(3):  # between two of them it is idle
            pool.doit(nothing)
        assert list(ch) == [1, 2]


@pytest.mark.parametrize(
    "way", ["captured", "in a partial", "by keyword", "in a map", "home in a drone"]
)
def test_an_end_is_let_go_however_it_came_to_the_call(pool, way):
    ch = made_in(pool.drones[0]) if way == "home in a drone" else Channel()
    end = pool.drones[0].doit(lambda: ch.sender()) if way == "home in a drone" else ch.sender()
    if way == "captured":
        pool.promise(lambda: put_three(end))
    elif way == "in a partial":
        pool.promise(partial(put_three, end))
    elif way == "by keyword":
        pool.promise(put_three, end=end)
    elif way == "in a map":
        results = pool.map(put_three, [end])
    else:
        pool.drones[1].promise(put_three, end)
    assert list(ch) == [0, 1, 2]
    if way == "in a map":
        assert list(results) == [None]


def test_stages_that_close_nothing_end_one_after_the_other(pool):
    def double(numbers, out):
        for number in numbers:
            out.put(2 * number)

    async def increment(numbers, out):
        async for number in numbers:
            await out.send(number + 1)

    one, two, three = Channel(2), Channel(), Channel(8)
    pool.promise(put_three, one.sender())
    pool.promise(double, one.receiver(), two.sender())
    pool.promise(increment, two.receiver(), three.sender())
    assert list(three) == [1, 3, 5]


def test_a_sender_is_told_that_the_call_of_the_receiver_has_ended(pool):
    ch = Channel()
    first = pool.promise(lambda end: end.get(), ch.receiver())
    ch.put("an item")
    assert first.result(60) == "an item"
    with pytest.raises(ChannelClosed):
        while True:
            ch.put("another")


def in_a_global(end):
    store(end)


def in_the_namespace(end):
    sys.modules["__main__"].__dict__["end_that_stays"] = end


def in_a_thread(end):
    threading.Thread(target=lambda: (threading.Event().wait(), end), daemon=True).start()


def in_an_iterator(end):
    stored.append(iter(end))


def in_an_async_iterator(end):
    stored.append(aiter(end))


@pytest.mark.guarantee("channel-4")
@pytest.mark.parametrize(
    "keep",
    [in_a_global, in_the_namespace, in_a_thread, in_an_iterator, in_an_async_iterator],
    ids=lambda f: f.__name__,
)
def test_an_end_that_its_call_has_stored_stays(pool, keep):
    ch, behind = Channel(), Channel()
    drone = pool.drones[0]
    drone.doit(keep, ch.receiver() if "iterator" in keep.__name__ else ch.sender())
    drone.promise(put_three, behind.sender())
    assert list(behind) == [0, 1, 2]  # so what the drone would have said before has been heard
    assert not ch.closed
    drone.kill()
    wait_for(lambda: ch.closed)


def test_an_end_that_came_twice_is_let_go_with_the_last_reference(pool):
    ch, behind = Channel(), Channel()
    drone = pool.drones[0]
    end = ch.sender()
    drone.doit(store, end)
    assert drone.promise(put_three, end) and [ch.get(60) for _ in range(3)] == [0, 1, 2]
    drone.promise(put_three, behind.sender())
    assert list(behind) == [0, 1, 2] and not ch.closed
    drone.doit(forget_all)
    wait_for(lambda: ch.closed)


def test_an_end_waits_for_the_other_calls_that_it_was_given_to(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(1) as pool:
        ch = Channel(16)
        end = ch.sender()
        pool.promise(hold_until, gate)  # until all three are on their way
        for _ in range(3):
            pool.promise(put_three, end)
        append(gate, "open")
        assert list(ch) == [0, 1, 2] * 3


@pytest.mark.guarantee("channel-4")
def test_an_end_that_a_call_has_handed_on_is_its_next_holders(pool):
    ch = Channel()
    one, other, _ = pool.drones
    back = one.doit(lambda end: end, ch.sender())  # comes home
    again = other.promise(lambda end: (end.put("an item"), end)[1], back)
    assert ch.get(60) == "an item"
    held = again.result(60)
    green.spawn(held.send, "from home")
    assert ch.get(60) == "from home" and not ch.closed
    held.close()
    assert list(ch) == []


@pytest.mark.guarantee("channel-4")
@pytest.mark.parametrize("way", ["argument", "captured", "item", "result", "error"])
def test_an_end_that_a_call_could_not_hand_on_is_let_go_with_it(pool, way):
    def hand_on_beside_a_generator(end, other):
        unpicklable = (number for number in range(3))
        if way == "item":
            other.put((end, unpicklable))
            return None
        if way == "result":
            return [end, unpicklable]
        if way == "error":
            raise ValueError(end, unpicklable)
        with poly.Pool(1) as inner:
            if way == "argument":
                inner.doit(put_three, end, unpicklable)
            else:
                inner.doit(lambda: put_three(end, unpicklable))

    ch, other = Channel(), Channel(1)
    call = pool.promise(hand_on_beside_a_generator, ch.sender(), other)
    assert "generator" in str(call.exception())
    with pytest.raises(ChannelClosed):
        ch.get(60)


def put_in_vain(end, other):
    with pytest.raises(TimeoutError):
        other.put(end, 0.1)


def offer_in_vain(end, other):
    assert run(lambda: select(other.sending(end), green.after(0.1))).index == 1


def put_when_closed(end, other):
    other.put(None)
    with pytest.raises(ChannelClosed):
        other.put(end)


def put_to_one_who_dies(end, other):
    with pytest.raises(ItemLost):
        other.put(end)


def die_at_give():
    from polycephaly.green.distributed import opcodes, transport

    transport.HANDLERS[opcodes.GIVE] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.guarantee("channel-4")
@pytest.mark.parametrize("at_home", [True, False])
@pytest.mark.parametrize("send", [put_in_vain, offer_in_vain, put_when_closed, put_to_one_who_dies])
def test_an_end_in_an_item_that_no_process_receives_is_still_its_senders(pool, send, at_home):
    def send_in_vain(end, other):
        send(end, other)
        end.put("still mine")

    one, another, _ = pool.drones
    ch, other = Channel(), made_in(one) if at_home else Channel()
    call = one.promise(send_in_vain, ch.sender(), other)
    if send is put_when_closed:
        other.get(20)
        other.close()
    elif send is put_to_one_who_dies:
        another.doit(die_at_give)
        another.promise(receive_n, other, 1)
    assert ch.get(20) == "still mine"
    with pytest.raises(ChannelClosed):
        ch.get(20)
    call.result(20)


def send_while_it_comes_again(end):
    sent = pack_item(end)
    end.arrive(12345)
    pack_item(end)  # to be sent in vain
    sent.hand_on_ends()
    return end.is_held()


def test_an_end_that_has_come_again_is_not_handed_on_by_what_was_sent_before(pool):
    assert pool.drones[0].doit(send_while_it_comes_again, Channel().sender())


def send_to_oneself(end, other):
    receiving = green.spawn(other.receive())
    other.put(end)
    store(receiving.result())


def test_an_end_that_was_sent_to_the_same_drone_is_let_go_with_the_last_reference(pool):
    ch, behind, other = Channel(), Channel(), Channel()
    drone = pool.drones[0]
    drone.doit(send_to_oneself, ch.sender(), other)
    drone.promise(put_three, behind.sender())
    assert list(behind) == [0, 1, 2] and not ch.closed
    drone.doit(forget_all)
    wait_for(lambda: ch.closed)


def test_a_fork_of_a_drone_lets_nothing_go(pool):
    def fork(end):
        pid = os.fork()
        if not pid:
            del end
            os._exit(0)
        os.waitpid(pid, 0)
        end.put("still mine")

    ch = Channel()
    pool.promise(fork, ch.sender())
    assert list(ch) == ["still mine"]


def test_a_forks_copy_of_a_channel_gives_items_that_came_from_elsewhere(pool):
    home = pool.drones[0]
    ch = home.doit("from polycephaly.green import Channel; kept = Channel(2)\nkept")
    ch.put(["an item"])
    assert (
        home.doit("""
import os
pid = os.fork()
if not pid:
    try:
        os._exit(kept.get(60) != ["an item"])
    finally:
        os._exit(2)
os.waitpid(pid, 0)[1]
""")
        == 0
    )
    assert ch.get(60) == ["an item"]  # the original still has it


def os_exit_with(end):
    os._exit(3)


@pytest.mark.parametrize("capacity", [0, 2])
def test_a_channel_that_comes_home_after_its_end_still_tells_why(pool, capacity):
    wait_for(lambda: len(pool.drones) == 3)
    home, one, other = pool.drones
    ch = made_in(home, capacity)
    died = one.promise(os_exit_with, home.doit(ch.sender))
    assert isinstance(died.exception(60), poly.DroneDied)
    assert (
        "exit status 3" in items_and_error(ch)[-1]
    )  # now it is closed, and its home has forgotten it
    for place in (home, other):
        for _ in range(2):
            assert "exit status 3" in place.doit(items_and_error, ch)[-1]
            assert "exit status 3" in causes(place.promise(ch.put, 1).exception(60))
    assert home.doit(lambda: ch.closed)


@pytest.mark.parametrize("captured", [False, True])
def test_a_call_that_comes_to_nothing_takes_the_ends_that_went_with_it(captured, monkeypatch, pool):
    monkeypatch.setattr(tuning, "next_holder_seconds", 0.01)  # there is none

    def call(drone, fn, *args):
        """With the end among its arguments, or captured by the function."""
        ch = Channel()
        end = ch.sender()
        return ch, drone.promise(partial(fn, end), *args) if captured else drone.promise(
            fn, end, *args
        )

    for _ in range(20):  # it may die before it has said that it has the end, or after
        ch, died = call(pool, lambda end: os._exit(3))
        assert "DroneDied" in items_and_error(ch)[-1] and isinstance(
            died.exception(60), poly.DroneDied
        )
    wait_for(lambda: len(pool.drones) == 3)
    home = pool.drones[2]
    for _ in range(5):
        wait_for(lambda: len(pool.drones) == 3)
        ch = made_in(home)
        end = home.doit(ch.sender)
        one = next(each for each in pool.drones if each.pid != home.pid)
        died = (
            one.promise(partial(os_exit_with, end)) if captured else one.promise(os_exit_with, end)
        )
        assert "exit status 3" in home.doit(items_and_error, ch)[-1] and isinstance(
            died.exception(60), poly.DroneDied
        )
    unborn = poly.Promise()
    ch, rejected = call(pool, lambda end, value: value, unborn)
    unborn.set_exception(KeyError("of its input"))
    assert "of its input" in items_and_error(ch)[-1] and isinstance(
        rejected.exception(60), KeyError
    )
    ch, cancelled = call(pool, lambda end, value: value, poly.Promise())
    cancelled.cancel()
    assert "was cancelled" in items_and_error(ch)[-1]

    def put_and_close(end):
        end.put(1)
        end.close()

    ch, fine = call(pool, put_and_close)
    assert list(ch) == [1] and fine.result(60) is None


def hand_on_and_die(end, to):
    to.put(end, 60)
    os._exit(3)


def test_an_end_that_was_handed_on_while_its_home_computes_is_where_it_is(pool):
    """The home hears of the death of who handed it on before it reads who has it."""

    async def main():
        ch = Channel(1)
        one, other, _ = pool.drones
        way = other.doit(Channel)
        kept = other.promise(keep_from, way)
        dead = one.promise(hand_on_and_die, ch.sender(), way)
        until = monotonic() + 20
        while not (dead.done() and kept.done()) and monotonic() < until:
            pass  # a step that computes, and hears nothing
        await kept
        assert isinstance(dead.exception(), poly.DroneDied)
        await green.sleep(0.3)  # longer than it takes to be counted as gone
        await other.promise(put_here, 1)
        assert await ch.receive() == 1

    run(main)


def test_a_finalizer_that_closes_a_channel_while_its_thread_writes_holds_nobody_up(pool):
    class Closes:
        def __init__(self, ch):
            self.ch, self.me = ch, self  # a cycle: the collector finds it, at any moment

        def __del__(self):
            self.ch.close()

    async def drain(data, others, ready):
        waiting = [green.spawn(each.receive()) for each in others]
        await ready.send(None)
        came = len(await receive_all(data))
        return came, [type(each.exception()).__name__ async for each in poly.as_completed(waiting)]

    async def main():
        data, ready, others = Channel(64), Channel(), [Channel() for _ in range(400)]
        drained = pool.promise(drain, data, others, ready)
        await ready.receive()
        while others:
            Closes(others.pop())
            await data.send(bytes(300_000))
            end = monotonic() + 0.0003
            while monotonic() < end:  # so that it is written at once
                pass
        gc.collect()
        data.close()
        came, raised = await drained
        assert came == 400 and set(raised) == {"ChannelClosed"}

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        run(main)
    finally:
        gc.set_threshold(*before)


def test_an_end_that_goes_with_many_calls_is_counted_once_for_each_drone(pool):
    from polycephaly.green.distributed.ends import _open_ends

    ch = Channel()
    end = ch.sender()
    drone = pool.drones[0]
    for _ in range(30):
        drone.doit(store, end)
    (counted,) = _open_ends[ch].values()
    wait_for(lambda: len(counted.holders) == 1)
    drone.kill()
    with pytest.raises(ChannelClosed):
        ch.get(60)


def short_or_not(end, free=None):
    stored.append(end)
    return hold_until(free) if free else 1


@pytest.mark.parametrize("dies", [False, True])
def test_a_call_that_its_drone_has_and_has_not_begun_takes_its_ends_when_it_is_cancelled(
    tmp_path, monkeypatch, dies
):
    monkeypatch.setattr(
        tuning, "batch_seconds", 60.0
    )  # so that what has taken less is sent while it is busy
    with poly.Pool(1, output="discard") as pool:
        drone = pool.drones[0]
        assert drone.doit(short_or_not, None) == 1
        held = drone.promise(short_or_not, None, str(tmp_path / "free"))
        wait_for(held.running)
        if dies:  # before it can answer
            os.kill(drone.pid, signal.SIGSTOP)
        kept, ch = Channel(), Channel()
        keeps, goes = kept.sender(), ch.sender()
        calls = [drone.promise(short_or_not, keeps), drone.promise(short_or_not, goes)]
        wait_for(lambda: all(each.spans.sent is not None for each in calls))
        assert calls[1].cancel()
        assert "was cancelled" in items_and_error(ch)[-1]
        if dies:  # and shows only later that it has not begun
            os.kill(drone.pid, signal.SIGKILL)
            assert items_and_error(kept)[-1].startswith("ChannelClosed")
        else:
            (tmp_path / "free").touch()
            assert calls[0].result(60) == 1 and held.result(60) == "held"
            with pytest.raises(TimeoutError):
                kept.get(0.3)
            assert not kept.closed


def store_and_sleep(end):
    store(end)
    end.put("began")
    time.sleep(60)


def store_and_fail(end):
    store(end)
    end.put("began")
    raise KeyError("after that")


@pytest.mark.parametrize("work", [store_and_sleep, store_and_fail])
def test_an_end_that_a_call_has_stored_stays_though_the_call_comes_to_nothing(pool, work):
    ch, drone = Channel(), pool.drones[0]
    begun = drone.promise(work, ch.sender())
    assert ch.get(60) == "began"
    if work is store_and_sleep:
        assert begun.cancel()
    else:
        assert isinstance(begun.exception(60), KeyError)
    with pytest.raises(TimeoutError):
        ch.get(3 * tuning.next_holder_seconds)
    drone.doit(forget_all)
    assert list(ch) == []


def test_an_end_behind_an_argument_that_cannot_be_unpickled_is_gone_with_its_call(pool):
    ch = Channel()
    failed = pool.promise(lambda *args: None, Unreadable(), ch.sender())
    assert "lost with its call: invalid literal" in items_and_error(ch)[-1]
    assert isinstance(failed.exception(20), ValueError)


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_call_whose_time_is_over_before_its_drone_began_takes_its_ends_too(goes_on):
    with poly.Pool(1, output="discard") as pool:
        drone = pool.drones[0]
        drone.doit(abs, 1)
        os.kill(drone.pid, signal.SIGSTOP)
        ch = Channel()
        late = pool.options(timeout=0.5).promise(short_or_not, ch.sender())
        assert isinstance(late.exception(30), TimeoutError)
        assert "ran for more than" in items_and_error(ch)[-1]  # while the drone stands still
        os.kill(drone.pid, signal.SIGCONT if goes_on else signal.SIGKILL)
        assert pool.doit(abs, -1) == 1


def die_then_send(end, path, tries):
    append(path, "try")
    end.put(len(lines(path)))
    if len(lines(path)) < tries:
        os.kill(os.getpid(), signal.SIGKILL)
    end.close()


def begin_slowly(path):
    if lines(path):
        time.sleep(3 * tuning.next_holder_seconds)


@pytest.mark.parametrize("tries", [2, 5])
def test_an_end_is_there_for_a_call_that_runs_again(tmp_path, tries):
    """However long the start of the next drone takes."""
    path = str(tmp_path / "tries")
    with poly.Pool(1, initializer=begin_slowly, initargs=(path,), output="discard") as pool:
        ch = Channel(10)
        sending = pool.options(retries=2).promise(die_then_send, ch.sender(), path, tries)
        if tries == 2:
            assert list(ch) == [1, 2] and sending.result(30) is None
        else:
            assert "DroneDied" in items_and_error(ch)[-1]
            assert isinstance(sending.exception(30), poly.DroneDied) and len(lines(path)) == 3


def test_a_call_that_comes_to_nothing_harms_no_end_that_is_somewhere_else(pool):
    ch = Channel()
    end = ch.sender()
    unborn = poly.Promise()
    rejected = pool.promise(lambda end, value: value, end, unborn)
    assert pool.promise(lambda end: store(end) or end.put(1), end) and ch.get(60) == 1
    unborn.set_exception(KeyError("of its input"))
    assert isinstance(rejected.exception(60), KeyError)
    with pytest.raises(TimeoutError):
        ch.get(0.05)
    end.close()
    assert list(ch) == []


def test_who_is_given_a_channel_that_a_death_has_closed_is_told_the_cause_too(pool):
    def put_and_die(end):
        end.put(1)
        os.kill(os.getpid(), signal.SIGKILL)

    ch = Channel()
    dead = pool.promise(put_and_die, ch.sender())
    assert ch.get(60) == 1 and isinstance(dead.exception(60), poly.DroneDied)
    with pytest.raises(ChannelClosed, match=r"was killed by SIGKILL|was closed"):
        for _ in ch:
            raise AssertionError("something came")
    for _ in range(2):
        told = pool.promise(receive_all, ch).exception(60)
        assert isinstance(told, ChannelClosed) and "DroneDied" in causes(told)


def test_who_sends_again_is_told_the_cause_again(pool):
    def take_and_die(end):
        end.get()
        os._exit(3)

    def put_until_told(ch):
        told = []
        while len(told) < 3:
            try:
                ch.put("x", 20)
            except ItemLost:
                pass  # it had it, and had not said so
            except ChannelClosed as error:
                told.append(causes(error))
        return told

    for capacity in (0, 4):
        ch = Channel(capacity)
        pool.promise(take_and_die, ch.receiver())
        assert all("exit status 3" in each for each in pool.promise(put_until_told, ch).result(60))


def causes(error):
    """The names of their types, and what a remote traceback says."""
    named = []
    while error is not None:
        named.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return " ".join(named)


def test_plain_code_iterates_over_a_channel_and_its_end(pool):
    for capacity in (0, 4):
        ch = Channel(capacity)
        sent = pool.promise(send_all, ch, range(10), close=True)
        assert list(ch) == list(range(10)) and sent.result(60) == 10
        ch = Channel(capacity)
        pool.promise(send_all, ch, range(10), close=True)
        with ch.receiver() as end:
            assert list(end) == list(range(10))


class Exits:
    def __setstate__(self, state):
        raise SystemExit(3)

    def __getstate__(self):
        return {"x": 1}


def test_an_item_whose_opening_raises_stop_async_iteration_does_not_end_the_loop_in_silence():
    async def read(ch):
        with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
            async for _ in ch:
                pass
        return await ch.receive()

    def put_all(ch):
        for item in StopsTheLoop(), 2:
            ch.put(item)

    with poly.Pool(1) as pool:
        ch = Channel(4)
        sent = pool.promise(put_all, ch)
        assert run(read, ch) == 2
        sent.result(60)


def test_an_item_whose_opening_exits_ends_nobody_and_is_heard_once():
    with poly.Pool(1) as pool:
        ch = Channel(8)

        def put_all(ch):
            for item in [1, Exits(), 2, 3]:
                ch.put(item)

        put = pool.promise(put_all, ch)
        got = []
        while len(got) < 4:
            try:
                got.append(ch.get(60))
            except RuntimeError as error:
                got.append(error.__cause__.code)
        assert got == [1, 3, 2, 3] and put.result(60) is None


def test_senders_are_told_that_no_receiver_is_left(pool):
    async def take_one(end):
        with end:
            return await end.receive()

    async def main():
        ch = Channel()
        p = pool.promise(take_one, ch.receiver())
        await ch.send(1)
        with pytest.raises(ChannelClosed):
            await ch.send(2)
        assert await p == 1

    run(main)


# -- exactly once, or told: drones killed at random ------------------------------------------------


@pytest.mark.parametrize("selecting", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_with_drones_killed_at_random_each_item_is_received_once_or_told(seed, selecting, tmp_path):
    """Each drone writes down what it has done. Of a drone that was killed, what it did last may not
    be written."""
    luck = random.Random(seed)
    capacity = 3 if seed == 3 else 0
    log = tmp_path / "log"
    log.touch()

    def note(*what):
        with open(log, "a") as file:
            print(*what, file=file)

    async def sender(ch, other, me):
        for i in range(120):
            try:
                if selecting:
                    await select(ch.sending((me, i)), other.sending((me, i)))
                else:
                    await ch.send((me, i))
                note("sent", me, i)
            except ItemLost:
                note("lost", me, i)

    async def receiver(ch, other):
        with suppress(ChannelClosed):
            while selecting:
                note("got", *(await select(ch.receiving(), other.receiving())).value)
        for each in (
            ch,
            other,
        ):  # the rest, of which a select says nothing once one of the two is closed
            async for item in each:
                note("got", *item)

    async def main(pool):
        drones = list(pool.drones)
        both = Channel(capacity) if seed % 2 else made_in(drones[6], capacity), Channel(capacity)
        sending = [drones[k].promise(sender, *both, k) for k in range(3)]
        receiving = [drones[k].promise(receiver, *both) for k in range(3, 6)]
        victims = [drones[luck.randrange(3)], drones[luck.randrange(3, 6)]]
        for victim in victims:
            enough = log.stat().st_size + luck.randrange(1, 1500)
            while log.stat().st_size < enough and not all(each.done() for each in sending):
                await green.sleep(0.0005)
            os.kill(victim.pid, signal.SIGKILL)
        for each in sending:
            with suppress(poly.DroneDied):
                await each
        for ch in both:
            ch.close()
        for each in receiving:
            with suppress(poly.DroneDied):
                await each

    with poly.Pool(7, output="discard") as pool:
        run(main, pool)
    did = [tuple(line.split()) for line in log.read_text().splitlines()]
    got = [what[1:] for what in did if what[0] == "got"]
    sent = {what[1:] for what in did if what[0] == "sent"}
    lost = {what[1:] for what in did if what[0] == "lost"}
    assert len(got) == len(set(got)), "received twice"
    assert not lost & sent
    missing = sent - set(got)
    assert len(missing) <= 1 + (capacity > 0), f"said to be sent, and nobody has got it: {missing}"
    finished = [who for who in "012" if (who, "119") in sent | lost]
    assert len(finished) >= 2
    for who in finished:
        assert {i for me, i in sent | lost if me == who} == {str(i) for i in range(120)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_where_the_home_is_killed_at_random_what_was_sent_was_received(seed, tmp_path):
    log = tmp_path / "log"
    log.touch()

    def note(*what):
        with open(log, "a") as file:
            print(*what, file=file)

    async def sender(both, me):
        i = 0
        try:
            while True:
                await select(*(ch.sending((me, i)) for ch in both)) if seed % 2 else await both[
                    0
                ].send((me, i))
                note("sent", me, i)
                i += 1
        except (ItemLost, ChannelClosed) as error:
            return str(error)

    async def receiver(both):
        try:
            while True:
                got = (
                    (await select(*(ch.receiving() for ch in both))).value
                    if seed % 2
                    else await both[0].receive()
                )
                note("got", *got)
        except ChannelClosed as error:
            return str(error)

    async def main(pool):
        *others, home = pool.drones
        both = made_in(home), made_in(others[0])
        told = [drone.promise(sender, both, k) for k, drone in enumerate(others[:2])]
        told += [drone.promise(receiver, both) for drone in others[2:]]
        while log.stat().st_size < 300 * (seed + 1):
            await green.sleep(0.0005)
        os.kill(home.pid, signal.SIGKILL)
        return [await each for each in told]

    with poly.Pool(5) as pool:
        told = run(main, pool)
    assert all("was killed by SIGKILL" in text for text in told), told
    did = [tuple(line.split()) for line in log.read_text().splitlines()]
    got = [what[1:] for what in did if what[0] == "got"]
    assert len(got) == len(set(got))
    assert {what[1:] for what in did if what[0] == "sent"} <= set(got)


# -- green threads spread over drones --------------------------------------------------------------


def test_par_over_a_pool_runs_all_at_once_and_gives_the_values_in_order(pool):
    async def swap(mine, come, go):
        await green.par(go.send(mine), meet())
        return await come.receive(), os.getpid()

    async def meet():
        await green.sleep(0)

    ring = [Channel(1) for _ in range(7)]
    told = green.par(*(partial(swap, i, ring[i - 1], ring[i]) for i in range(7)), over=pool)
    assert [value for value, _ in told] == [6, 0, 1, 2, 3, 4, 5]
    assert len({pid for _, pid in told}) == 3
    assert [pid for _, pid in told] == sorted(
        (pid for _, pid in told), key=[pid for _, pid in told].index
    )


def test_par_over_a_pool_raises_what_failed_and_ends_the_others(pool):
    async def fail():
        raise KeyError("x")

    async def wait_for_ever(ch):
        await ch.receive()

    with pytest.raises(ExceptionGroup) as told:
        green.par(
            partial(wait_for_ever, Channel()), fail, partial(wait_for_ever, Channel()), over=pool
        )
    assert [repr(each) for each in told.value.exceptions] == ["KeyError('x')"]
    assert pool.doit("1 + 1") == 2


def test_map_over_a_pool_keeps_the_order_and_every_drone_at_work(pool, tmp_path):
    met = str(tmp_path / "met")

    async def slow(n):
        append(met, str(os.getpid()))
        while len(set(lines(met))) < 3:
            await green.sleep(0.01 if n % 3 else 0.03)
        return n, os.getpid()

    told = green.map(slow, range(60), width=5, over=pool)
    assert [n for n, _ in told] == list(range(60))
    assert len({pid for _, pid in told}) == 3
    assert green.map(lambda n: n * n, range(5), over=pool) == [0, 1, 4, 9, 16]
    assert green.map(slow, [], over=pool) == []


def test_map_over_a_pool_is_lazy_and_can_be_left(pool):
    taken = []

    def items():
        while True:
            taken.append(None)
            yield len(taken)

    async def main():
        async for value in green.map(lambda n: -n, items(), width=2, over=pool):
            if value == -20:
                return

    run(main)
    assert 20 <= len(taken) <= 20 + 3 * 2 * 4 + 1
    assert pool.doit("1 + 1") == 2


def test_map_over_a_pool_raises_the_error_of_a_call_of_the_items_and_of_a_drone(pool):
    def bad(n):
        if n == 7:
            raise LookupError(n)
        return n

    def items():
        yield 1
        raise ZeroDivisionError

    def die(n):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(LookupError, match="7") as raised:
        green.map(bad, range(100), over=pool)
    assert "in bad" in str(raised.value.__cause__)  # the remote traceback
    with pytest.raises(ZeroDivisionError):
        green.map(bad, items(), over=pool)
    with pytest.raises(poly.DroneDied):
        green.map(die, range(100), over=pool)


def test_a_call_of_a_map_over_a_pool_that_is_cancelled_from_within_is_an_error_as_without_a_pool(
    pool,
):
    async def give_up(n):
        if n == 2:
            raise green.Cancelled
        return n

    for where in ({}, {"over": pool}):
        with pytest.raises(CancelledError, match=r"a call of .*give_up was cancelled"):
            run(lambda where=where: green.map(give_up, range(6), width=2, **where))


def test_a_map_over_a_pool_that_is_left_leaves_nothing(pool):
    def big(n):
        return bytes(100_000)

    async def leave():
        async for _ in green.map(big, range(100), width=4, over=pool):
            await green.sleep(0.05)
            return

    known = len(get_transport().channels)
    for _ in range(3):
        green.run(leave)
    wait_for(lambda: len(get_transport().channels) <= known)


class Kills:
    """Is pickled when that drone is dead."""

    def __init__(self, drone):
        self.drone = drone

    def __reduce__(self):
        self.drone.kill()
        wait_for(lambda: not self.drone.alive)
        return int, ()


def test_functions_over_a_pool_of_which_a_drone_dies_as_they_are_dealt_out_are_not_left_waiting():
    async def wait(ch, _=None):
        return await ch.receive()

    with poly.Pool(2, output="discard") as pool:
        first, second = pool.drones
        ch = Channel()
        with pytest.raises((poly.DroneDied, RuntimeError)):
            green.par(partial(wait, ch, Kills(second)), partial(wait, ch), over=pool)
        assert first.doit("1 + 1") == 2
        known = len(get_transport().channels)

        async def main():
            spread = green.map(abs, range(3), over=pool)
            pool.drones[1].kill()
            wait_for(lambda: not spread._drones[1].alive)
            await spread

        with pytest.raises((poly.DroneDied, RuntimeError)):
            run(main)
        wait_for(lambda: len(get_transport().channels) <= known)


def test_map_over_a_pool_does_not_wait_for_a_drone_that_has_never_begun(pool, tmp_path):
    go, began = tmp_path / "go", str(tmp_path / "began")
    busy = pool.drones[0]
    held = busy.promise(hold_until, str(go), began)
    wait_for(lambda: lines(began))

    async def main():
        listed = await green.map(lambda n: n * n, range(20), width=2, over=pool)
        iterated = [value async for value in green.map(lambda n: -n, range(20), over=pool)]
        return listed, iterated, await green.map(lambda n: n, [], over=pool)

    try:
        assert run(main) == ([n * n for n in range(20)], [-n for n in range(20)], [])
        assert not held.done()
    finally:
        go.touch()
    assert held.value == "held" and busy.doit(os.getpid) == busy.pid == int(lines(began)[0])


def test_a_pool_that_has_ended_says_so_of_green_threads_as_of_other_work():
    with poly.Pool(1) as pool:
        pass
    for begin in (
        lambda: pool.submit(int),
        lambda: green.map(abs, [1], over=pool),
        lambda: green.par(int, over=pool),
    ):
        with pytest.raises(RuntimeError, match="after shutdown of pool-"):
            begin()


def test_what_cannot_be_spread_is_said_to_be_so(pool):
    async def coro():
        pass

    with pytest.raises(TypeError, match="takes functions"):
        green.par(coro(), over=pool)
    with pytest.raises(TypeError, match="a pool that has drones"):
        green.par(coro, over=3)


# -- items that cannot travel, and other bad input -------------------------------------------------


class Ends:
    def __reduce__(self):
        raise SystemExit(4)


def test_an_item_whose_pickling_ends_its_image_ends_nobody(pool):
    ch = Channel()
    told = pool.promise(items_and_error, ch)
    wait_for(told.running)
    with pytest.raises(RuntimeError, match="pickling an item of a channel raised SystemExit: 4"):
        ch.put(Ends(), 20)
    ch.put("another", 20)
    ch.close()
    assert told.result(60)[0] == "another"


def test_the_handle_of_what_a_drone_keeps_does_not_go_through_a_channel(pool):
    def send(ch):
        ch.put(poly.Kept([7]))

    ch = Channel()
    with pytest.raises(
        TypeError, match=r"was sent through a channel: pass the handle .* in a result"
    ):
        pool.doit(send, ch)


def test_what_cannot_be_pickled_is_told_to_its_sender_and_nobody_has_it(pool):
    async def main():
        for home in homes(pool):
            ch = channel_in(home)
            p = pool.drones[2].promise(receive_n, ch, 1)
            with pytest.raises(TypeError, match="pickle"):
                await ch.send(x for x in ())
            await ch.send("next")
            assert await p == ["next"]

    run(main)


def test_what_cannot_be_unpickled_is_told_to_its_receiver(pool):
    async def receiver(ch):
        told = []
        for _ in range(2):
            try:
                told.append(await ch.receive())
            except ValueError as error:
                told.append(error.__notes__[0])
        return told

    async def main():
        for home in homes(pool):
            ch = channel_in(home)
            p = pool.drones[2].promise(receiver, ch)
            await ch.send(Unreadable())
            await ch.send("next")
            assert await p == [
                "while unpickling an item that another process sent through a channel",
                "next",
            ]

    run(main)


def test_without_a_pool_a_channel_can_go_nowhere():
    with pytest.raises(RuntimeError, match=r"the local drones of a pool.*on Ray, cannot reach it"):
        pickle.dumps(Channel())


def test_a_class_derived_from_channel_stays_at_home(pool):
    class Mine(Channel):
        pass

    with pytest.raises(TypeError, match="only Channel itself"):
        pool.doit(print, Mine())


def test_an_end_is_claimed_where_the_channel_lives(pool):
    def claim(ch):
        ch.claim()

    with pytest.raises(RuntimeError, match="only in the process that made the channel"):
        pool.doit(claim, Channel())


def test_places_granted_to_other_images_are_taken_back_before_a_claimers_first_item(pool):
    def flood(ch):
        with suppress(ChannelClosed):
            while True:
                ch.put("theirs")

    async def pair(ch):
        async with ch.claim("send") as end:
            await end.send("first")
            await green.sleep(0.01)  # the other image would send into the granted places
            await end.send("second")

    async def go():
        ch = Channel(16)
        flooding = pool.promise(flood, ch)
        got = [await ch.receive() for _ in range(50)]
        for _ in range(5):
            sending = green.spawn(pair, ch)
            while "second" not in got[-1:]:
                got.append(await ch.receive())
            await sending
            got += [await ch.receive() for _ in range(50)]  # and the other image goes on
        ch.close()
        await flooding
        return got

    got = run(go)
    assert got.count("first") == got.count("second") == 5
    assert all(after == "second" for item, after in pairwise(got) if item == "first")


def test_a_claimed_end_is_not_given_to_other_images(pool):
    async def main():
        ch = Channel()
        got = green.spawn(receive_n, ch, 4)
        async with ch.claim("send") as end:
            p = pool.promise(send_all, ch, ["there", "there"])
            await end.send("here")
            await green.sleep(0.05)
            await end.send("here")
        await p
        assert await got == ["here", "here", "there", "there"]

    run(main)


def test_who_waits_for_another_image_is_in_no_deadlock(pool):
    async def slow(ch, begin):
        await green.sleep(0.2)
        await ch.send("at last")

    async def main():
        ch = Channel()
        p = pool.promise(slow, ch, None)
        got = await ch.receive()
        await p
        return got

    assert green.run(main) == "at last"


# -- found by a review -----------------------------------------------------------------------------


async def both_ways(ch, name, n):
    sent, got = [], []
    for i in range(n):
        chosen, value = await select(ch.receiving(), ch.sending((name, i)), green.after(0.005))
        if chosen == 0:
            got.append(value)
        elif chosen == 1:
            sent.append((name, i))
    return sent, got


def test_a_select_may_send_and_receive_on_one_channel(pool):
    async def main():
        ch = Channel(1)
        far = [drone.promise(both_ways, ch, drone.name, 300) for drone in pool.drones]
        here = [green.spawn(both_ways(ch, i, 300)) for i in range(3)]
        ends = [await each for each in far + here]
        ch.close()
        left = [item async for item in ch]
        sent = [str(item) for sent, _ in ends for item in sent]
        assert sorted(sent) == sorted(
            str(item) for got in [left, *(got for _, got in ends)] for item in got
        )

    run(main)


def test_what_an_image_said_before_it_ended_is_heard_by_who_writes_to_it():
    async def hear(back):
        async for _ in back:
            pass

    async def produce(ch, back):
        from polycephaly.green.distributed.transport import get_transport

        green.spawn(hear, back)
        await ch.send(-1)  # this one asks, and brings credit
        while not any(peer.credits for peer in get_transport().peers.values()):
            await green.sleep(0.001)
        for i in range(20):
            await ch.send(i)
        while any(peer.sent < peer.queued for peer in get_transport().peers.values()):
            await green.sleep(0.001)
        os._exit(0)

    async def main(pool):
        ch, back = Channel(64), Channel(64)
        ended = os.pidfd_open(pool.drones[0].pid)
        p = pool.promise(produce, ch, back)
        got = await receive_n(ch, 3)
        await back.send("said, and not written yet")
        select_module.select([ended], [], [])  # a long step: it ends meanwhile
        os.close(ended)
        got += await receive_n(ch, 18)
        assert got == list(range(-1, 20))
        with suppress(poly.DroneDied):
            await p

    with poly.Pool(1, output="discard") as pool:
        run(main, pool)


def test_a_select_that_sends_is_told_that_its_item_may_be_lost_with_the_home(pool):
    def die_at_take():
        from polycephaly.green.distributed import opcodes, transport

        transport.HANDLERS[opcodes.TAKE] = lambda *_: os.kill(os.getpid(), signal.SIGKILL)

    async def main():
        home, receiver, _ = pool.drones
        ch = made_in(home)
        home.doit(die_at_take)
        got = receiver.promise(receive_n, ch, 1)
        with pytest.raises(ItemLost):
            await select(ch.sending("precious"), green.after(30))
        assert await got == ["precious"]

    run(main)


INHERITED = Channel(64)
INHERITED_SENDER = INHERITED.sender()


def test_an_end_from_the_snapshot_goes_with_the_drone_that_used_it():
    def die():
        assert not INHERITED_SENDER.put(1)
        os._exit(3)

    async def main(pool):
        with suppress(poly.DroneDied):
            await pool.promise(die)
        assert await INHERITED.receive() == 1
        with pytest.raises(ChannelClosed):
            await receive_all(INHERITED)

    with poly.Pool(1, output="discard") as pool:
        run(main, pool)


def test_a_channel_from_the_snapshot_works_in_each_pool_that_there_is():
    for number in range(3):
        with poly.Pool(1, output="discard") as pool:
            put = pool.promise(lambda n: INHERITED_ALWAYS.put(n), number)
            assert INHERITED_ALWAYS.get(60) == number and put.result(60) is None


INHERITED_ALWAYS = Channel(4)


def test_a_channel_from_the_snapshot_is_found_though_it_was_frozen():
    run_script("""
        import gc
        import polycephaly as poly
        from polycephaly import green

        def put():
            ch.put(1)

        if __name__ == "__main__":
            ch = green.Channel()
            gc.freeze()  # as the documentation of `gc` advises before a fork
            with poly.Pool(1) as pool:
                done = pool.promise(put)
                assert ch.get(60) == 1 and done.result(60) is None
    """)


@pytest.mark.parametrize("capacity", [0, 64])
def test_a_step_that_goes_on_for_long_keeps_nothing_back(pool, tmp_path, capacity):
    """What was sent goes, and what was received is said to be, though the coroutine computes and
    does not await."""
    gate = str(tmp_path / "gate")

    async def send_and_compute(ch, own):
        for item in range(3):
            await own.send(item)
        assert await ch.receive() == "x"
        while not os.path.exists(gate):
            pass
        return True

    for home in (None, pool.drones[1]):
        with suppress(FileNotFoundError):
            os.unlink(gate)
        ch, own = channel_in(home), channel_in(home, capacity)
        computing = pool.drones[0].promise(send_and_compute, ch, own)
        receiver = pool.drones[2].promise(receive_n, own, 3)
        ch.put("x", 10)
        assert receiver.result(60) == [0, 1, 2]
        append(gate, "")
        assert computing.result(60)


def test_an_end_that_has_come_home_outlives_the_drone_where_it_was(pool):
    async def main():
        ch = Channel(1)
        drone = pool.drones[0]
        end = await drone.promise(lambda end: end, ch.sender())
        with suppress(poly.DroneDied):
            await drone.promise(os._exit, 1)
        await end.send(1)
        end.close()
        assert await receive_all(ch) == [1]

    run(main)


CREDITED = Channel(64)


def test_a_channel_from_the_snapshot_has_credit_and_is_one_with_itself_as_an_argument():
    async def sends(n):
        from polycephaly.green.distributed.transport import get_transport

        for i in range(n):
            await CREDITED.send(i)
        return CREDITED.rare_state.number in {
            number for peer in get_transport().peers.values() for number in peer.credits
        }

    async def main(pool):
        p = pool.promise(sends, 100)
        assert await receive_n(CREDITED, 100) == list(range(100))
        assert await p
        assert await pool.promise(lambda ch: ch is CREDITED, CREDITED)

    with poly.Pool(1, output="discard") as pool:
        run(main, pool)


def test_who_has_no_descriptor_for_a_caller_lets_it_in_later(pool):
    async def without_descriptors(ready):
        import resource

        from polycephaly.green.distributed.transport import ACCEPT_RETRY_SECONDS, get_transport

        post, calls = get_transport(), []
        accept = post._accept
        await ready.send("this opens a connection")
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        post._accept = lambda: (calls.append(monotonic()), accept())
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        try:
            await ready.send("call me")
            while len(calls) < 3:
                await green.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            post._accept = accept
        return all(later - call >= ACCEPT_RETRY_SECONDS for call, later in pairwise(calls))

    async def main():
        home, caller, _ = pool.drones
        ch, ready = made_in(home), Channel()
        waits = home.promise(without_descriptors, ready)
        await receive_n(ready, 2)
        sent = caller.promise(ch.put, "at last")
        let_it_rest = await waits
        assert await ch.receive() == "at last"
        await sent
        assert let_it_rest

    run(main)


def test_who_calls_a_home_with_a_full_backlog_calls_again():
    async def send_to(home, address, ch):
        from polycephaly.green.distributed import transport as post

        def sleep(seconds):
            while callers:
                callers.pop().close()
            os.kill(home, signal.SIGCONT)
            real(seconds)

        callers, real = [], post.sleep
        with suppress(BlockingIOError):
            while True:
                callers.append(socket.socket(socket.AF_UNIX))
                callers[-1].setblocking(False)
                callers[-1].connect(address)
        post.sleep = sleep
        await ch.send("at last")

    async def main(pool):
        home, caller = pool.drones
        ch = made_in(home, 1)
        os.kill(home.pid, signal.SIGSTOP)
        try:
            await caller.promise(send_to, home.pid, ch.rare_state.owner_address, ch)
        finally:
            os.kill(home.pid, signal.SIGCONT)
        assert await ch.receive() == "at last"

    with poly.Pool(2, output="discard") as pool:
        run(main, pool)


def test_who_first_calls_a_home_that_was_killed_just_now_is_told_that():
    async def send_to(home, ch):
        ended = os.pidfd_open(home)
        os.kill(home, signal.SIGKILL)
        select_module.select([ended], [], [])
        os.close(ended)
        await ch.send("too late")

    async def main(pool):
        home, caller = pool.drones
        ch = made_in(home)
        with pytest.raises(ChannelClosed, match="was killed by SIGKILL"):
            await caller.promise(send_to, home.pid, ch)

    with poly.Pool(2, output="discard") as pool:
        run(main, pool)


def test_a_drone_gives_a_channel_on_that_it_has_from_the_snapshot_and_has_not_used(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import polycephaly as poly
from polycephaly import green

plain = green.Channel()

def below():
    with poly.Drone() as mine:
        return mine.promise(lambda: plain.put("from below")).value

if __name__ == "__main__":
    with poly.Pool(1) as pool:
        p = pool.promise(below)
        print(plain.get(), p.value)
""")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert (done.stderr, done.stdout) == ("", "from below None\n")


def test_a_captured_end_is_released_also_if_the_call_waits_for_a_promise(pool):
    def start(ch):
        end = ch.sender()
        later = pool.promise("__import__('time').sleep(0.1) or 7")
        return pool.promise(lambda item: end.put(item), later)

    ch = Channel(4)
    sent = start(ch)
    assert list(ch) == [7]
    assert sent.value is None
