"""Random programs of channels: each item arrives exactly once, or its sender is told that it did
not; nobody hangs.

`POLYCEPHALY_SOAK=seconds` has the last test run for longer. It prints the seed of each round that
it begins; one that failed is run again with `POLYCEPHALY_SEED=seed`."""

import asyncio
import os
import random
import threading
import time
from concurrent.futures import CancelledError
from dataclasses import dataclass, field

import pytest
from greens import run, turns
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from polycephaly import green
from polycephaly.green import Channel, ChannelClosed
from polycephaly.green.waiting import WaitQueue
from polycephaly.green.watchdog import watchdog

SOAK = float(os.environ.get("POLYCEPHALY_SOAK", "2"))
SEED = os.environ.get("POLYCEPHALY_SEED")

SOON = (0, 0.0002, 0.001)  # seconds

# A program is a list of capacities and a list of threads; a thread is its kind and a list of steps,
# as tuples:
#   ("send", channel)  ("receive", channel)
#   ("send within", channel, seconds)  ("receive within", channel, seconds)
#   ("select", ((end, channel), ...), seconds or None, priority)  ("claim", end, channel, times)
#   ("let go first", times)  ("cancel", thread)  ("close", channel)  ("nap", seconds)


@dataclass
class Tally:
    """What one thread did."""

    sent: list = field(default_factory=list)
    unsent: list = field(default_factory=list)
    got: list = field(default_factory=list)


class Play:
    """A run of a program."""

    def __init__(self, capacities, program):
        self.channels = [Channel(capacity) for capacity in capacities]
        self.program = program
        self.tallies = [Tally() for _ in program]
        self.threads = []
        self.made = [0] * len(program)

    async def main(self, patience):
        for who, (kind, steps) in enumerate(self.program):
            play = {"green": self.green, "plain": self.plain, "asyncio": self.in_asyncio}[kind]
            self.threads.append(green.spawn(play, who, steps, name=f"{kind} {who}", bound=False))
        await turns(20)
        end = time.monotonic() + patience
        while time.monotonic() < end and not all(each.done() for each in self.threads):
            self.nobody_is_forgotten()
            await green.sleep(0.0005)
        for ch in self.channels:
            ch.close()
        for each in self.threads:
            try:
                await each
            except CancelledError:
                pass
        await self.check()

    def item(self, who, channel):
        self.made[who] += 1
        return who, channel, self.made[who]

    # -- the kinds of threads ----------------------------------------------------------------------

    async def green(self, who, steps):
        tally, item = self.tallies[who], None
        for name, *args in steps:
            try:
                if name in ("send", "send within"):
                    item = self.item(who, args[0])
                    async with green.timeout(args[1] if name == "send within" else None):
                        await self.channels[args[0]].send(item)
                        tally.sent.append(item)
                        item = None
                elif name in ("receive", "receive within"):
                    async with green.timeout(args[1] if name == "receive within" else None):
                        tally.got.append(await self.channels[args[0]].receive())
                elif name == "select":
                    await self.select(who, *args)
                elif name == "claim":
                    end, channel, times = args
                    async with self.channels[channel].claim(end) as held:
                        for _ in range(times):
                            if end == "send":
                                item = self.item(who, channel)
                                await held.send(item)
                                tally.sent.append(item)
                                item = None
                            else:
                                tally.got.append(await held.receive())
                elif name == "let go first":
                    await turns(args[0])
                elif name == "nap":
                    await green.call(time.sleep, args[0])
                else:
                    self.act(name, args[0])
            except (ChannelClosed, TimeoutError):
                pass
            finally:
                if item is not None:
                    tally.unsent.append(item)
                    item = None
            self.nobody_is_forgotten()

    async def select(self, who, ends, seconds, priority):
        tally = self.tallies[who]
        items = [self.item(who, channel) if end == "send" else None for end, channel in ends]
        guards = [
            self.channels[channel].sending(item) if item else self.channels[channel].receiving()
            for (_, channel), item in zip(ends, items, strict=True)
        ]
        if seconds is not None:
            guards.append(green.after(seconds))
        sent = None
        try:
            index, value = await green.select(*guards, priority=priority)
            if index < len(ends):
                if items[index]:
                    sent = items[index]
                    tally.sent.append(sent)
                else:
                    tally.got.append(value)
        finally:
            tally.unsent += [item for item in items if item and item is not sent]

    def plain(self, who, steps):
        tally = self.tallies[who]
        for name, *args in steps:
            try:
                if name in ("send", "send within"):
                    item = self.item(who, args[0])
                    try:
                        self.channels[args[0]].put(item, args[1] if name == "send within" else None)
                        tally.sent.append(item)
                    except BaseException:
                        tally.unsent.append(item)
                        raise
                elif name in ("receive", "receive within"):
                    tally.got.append(
                        self.channels[args[0]].get(args[1] if name == "receive within" else None)
                    )
                elif name in ("cancel", "close"):
                    self.act(name, args[0])
                elif name == "nap":
                    time.sleep(args[0])
            except (ChannelClosed, TimeoutError):
                pass

    def in_asyncio(self, who, steps):
        asyncio.run(self.asyncio_steps(who, steps))

    async def asyncio_steps(self, who, steps):
        tally = self.tallies[who]

        async def receive(channel):
            return await self.channels[channel].receive()

        for name, *args in steps:
            try:
                if name in (
                    "send",
                    "send within",
                ):  # one that is cancelled cannot tell whether it has sent
                    item = self.item(who, args[0])
                    try:
                        await self.channels[args[0]].send(item)
                        tally.sent.append(item)
                    except ChannelClosed:
                        tally.unsent.append(item)
                elif name == "receive":
                    tally.got.append(await receive(args[0]))
                elif name == "receive within":
                    tally.got.append(await asyncio.wait_for(receive(args[0]), args[1]))
                elif name in ("cancel", "close"):
                    self.act(name, args[0])
                elif name in ("let go first", "nap"):
                    await asyncio.sleep(0)
            except (ChannelClosed, TimeoutError):
                pass

    def act(self, name, arg):
        if name == "close":
            self.channels[arg].close()
        elif self.threads:  # plain functions may run before all have been started
            self.threads[arg % len(self.threads)].cancel()

    # -- what must hold ----------------------------------------------------------------------------

    def nobody_is_forgotten(self):
        """Between two steps nobody waits for what is there."""
        for ch in self.channels:
            if ch.closed:
                continue
            senders, receivers = waiting(ch, "send"), waiting(ch, "receive")
            assert not any(s is not r for s in senders for r in receivers), (
                f"both ends of {ch} have somebody waiting"
            )
            if ch.capacity:
                buffered = len(ch.buffer)
                assert buffered <= ch.capacity
                assert not (receivers and buffered), f"somebody waits for {ch}: {buffered}"
                assert not (senders and buffered < ch.capacity), (
                    f"somebody waits for room in {ch}: {buffered}"
                )

    async def check(self):
        left = []
        for ch in self.channels:
            with pytest.raises(ChannelClosed):
                while True:
                    left.append(await ch.receive())
            assert ch._sender is None and ch._receiver is None and ch.rare_state is None
        sent = [item for tally in self.tallies for item in tally.sent]
        unsent = [item for tally in self.tallies for item in tally.unsent]
        arrived = [item for tally in self.tallies for item in tally.got] + left
        assert len(set(arrived)) == len(arrived), "doubled"
        assert set(sent) <= set(arrived), f"lost: {set(sent) - set(arrived)}"
        assert set(sent) >= set(arrived), f"arrived, but not sent: {set(arrived) - set(sent)}"
        assert not set(unsent) & set(sent)
        for (kind, _), tally in zip(self.program, self.tallies, strict=True):
            if kind != "asyncio":  # what one of those gave back may come late
                self.in_order(tally.got)

    def in_order(self, got):
        last = {}
        given_back = any(kind == "asyncio" for kind, _ in self.program)
        for who, channel, n in got:
            assert given_back or last.get((who, channel), 0) < n, (
                f"of thread {who}, {n} came late on channel {channel}"
            )
            last[who, channel] = n


def waiting(channel, end):
    """The threads that wait at the end of a channel, but for those that a claim puts aside."""
    queue = channel._sender if end == "send" else channel._receiver
    if queue is None:
        return []
    threads = [each.thread for each in queue] if isinstance(queue, WaitQueue) else [queue]
    return [each for each in threads if not channel._is_claimed(end, each)]


def test_a_queue_keeps_the_order_though_waiters_leave_it_and_are_put_back():
    for seed in range(100):
        rng, queue, expected = random.Random(seed), WaitQueue(), []
        for number in range(300):
            act = rng.choice(("come", "come", "come", "serve", "leave", "leave"))
            if act == "come":
                queue.append(number)
                expected.append(number)
            elif expected and act == "serve":
                assert queue.popleft() == expected.pop(0)
            elif expected:
                gone = expected.pop(rng.randrange(len(expected)))
                queue.remove(gone)
                if rng.random() < 0.3:  # first, or where it was
                    queue.appendleft(gone)
                    assert [each for each in queue if each != gone] == expected
                    expected = list(queue)
                    assert gone in expected
            assert list(queue) == expected, seed
            assert (len(queue), bool(queue)) == (len(expected), bool(expected)), seed


# -- by hypothesis ---------------------------------------------------------------------------------

seconds = st.sampled_from(SOON)
channel = st.shared(st.integers(1, 3), key="channels").flatmap(lambda n: st.integers(0, n - 1))
end = st.sampled_from(("send", "receive"))
use = st.one_of(
    st.tuples(st.sampled_from(("send", "receive")), channel),
    st.tuples(st.sampled_from(("send within", "receive within")), channel, seconds),
)
act = st.one_of(
    st.tuples(st.just("cancel"), st.integers(0, 6)), st.tuples(st.just("close"), channel)
)
choose = st.tuples(
    st.just("select"),
    st.lists(st.tuples(end, channel), min_size=1, max_size=4).map(tuple),
    st.one_of(st.none(), seconds),
    st.booleans(),
)
claim = st.tuples(st.just("claim"), end, channel, st.integers(1, 3))
wait = st.tuples(st.just("let go first"), st.integers(1, 3))
green_steps = st.lists(
    st.one_of(use, use, choose, choose, claim, wait, act), min_size=1, max_size=8
)
plain_steps = st.lists(st.one_of(use, use, use, act), min_size=1, max_size=5)
thread = st.one_of(
    *[st.tuples(st.just("green"), green_steps)] * 4, st.tuples(st.just("plain"), plain_steps)
)
capacities = st.shared(st.integers(1, 3), key="channels").flatmap(
    lambda n: st.lists(st.sampled_from((0, 0, 1, 3)), min_size=n, max_size=n)
)


@pytest.mark.guarantee("green-8", "green-11", "green-12")
@settings(
    max_examples=150,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(capacities, st.lists(thread, min_size=1, max_size=7))
def test_in_any_program_each_item_arrives_once_or_is_reported_unsent_and_nobody_hangs(
    capacities, program
):
    note(f"run(Play({capacities!r}, {program!r}).main, 0.01)")
    run(Play(capacities, program).main, 0.01, seconds=20)


@settings(
    max_examples=100,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    st.integers(0, 4),
    st.lists(st.integers(0, 7), max_size=5),
    st.lists(st.integers(0, 7), max_size=5),
    st.integers(1, 3),
)
def test_with_as_many_receivers_as_items_all_end_by_themselves(capacity, counts, waits, width):
    async def main():
        ch, got = Channel(capacity), []

        async def sender(who, n):
            await turns(waits[who % len(waits)] if waits else 0)
            for i in range(n):
                await ch.send((who, i))

        async def receiver(n):
            for i in range(n):
                got.append(
                    (await green.select(ch.receiving())).value if i % 2 else await ch.receive()
                )

        total = sum(counts)
        async with green.Group() as group:
            for who, n in enumerate(counts):
                group.spawn(sender, who, n)
            for i in range(width):
                group.spawn(receiver, total // width + (i < total % width))
        assert sorted(got) == [(who, i) for who, n in enumerate(counts) for i in range(n)]

    run(main, seconds=20)


# -- for as long as you like -----------------------------------------------------------------------


def random_program(rng):
    n = rng.randint(1, 3)
    capacities = [rng.choice((0, 0, 1, 4)) for _ in range(n)]

    def channel():
        return rng.randrange(n)

    def end():
        return rng.choice(("send", "receive"))

    steps = {
        "send": lambda: ("send", channel()),
        "receive": lambda: ("receive", channel()),
        "send within": lambda: ("send within", channel(), rng.choice(SOON)),
        "receive within": lambda: ("receive within", channel(), rng.choice(SOON)),
        "select": lambda: (
            "select",
            tuple((end(), channel()) for _ in range(rng.randint(1, 4))),
            rng.choice((None, *SOON)),
            rng.random() < 0.3,
        ),
        "claim": lambda: ("claim", end(), channel(), rng.randint(1, 3)),
        "let go first": lambda: ("let go first", rng.randint(1, 3)),
        "nap": lambda: ("nap", rng.random() * 0.0006),
        "cancel": lambda: ("cancel", rng.randrange(30)),
        "close": lambda: ("close", channel()),
    }
    weights = {"cancel": 0.15, "close": 0.01, "claim": 0.3, "let go first": 0.5, "nap": 0.7}

    def steps_of(kind):
        names = [name for name in steps if kind == "green" or name not in ("select", "claim")]
        count = rng.randint(1, 30 if kind == "green" else 10)
        return [
            steps[name]()
            for name in rng.choices(names, [weights.get(name, 1) for name in names], k=count)
        ]

    kinds = rng.choices(
        ("green", "plain", "asyncio"), (10, 3, 1 if rng.random() < 0.3 else 0), k=rng.randint(2, 16)
    )
    return capacities, [(kind, steps_of(kind)) for kind in kinds]


def soak(seconds):
    window = watchdog.window
    green.configure(window=0.0001)
    end = time.monotonic() + seconds
    seed = int(SEED) if SEED else random.randrange(1 << 32)
    try:
        while time.monotonic() < end:
            print(f"seed {seed}", flush=True)
            capacities, program = random_program(random.Random(seed))
            run(Play(capacities, program).main, 0.02, seconds=20)
            seed += not SEED
    finally:
        green.configure(window=window)


def test_soak():
    before = watchdog.handovers
    soak(SOAK)
    assert watchdog.handovers > before  # some calls were handed over, at random places


def test_soak_beside_a_busy_plain_thread():
    """Which takes the interpreter away at random places."""
    over = threading.Event()

    def busy():
        while not over.is_set():
            sum(range(100))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        soak(SOAK / 4)
    finally:
        over.set()
        thread.join()
