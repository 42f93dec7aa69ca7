"""Who holds an end of a channel: reports of processes in each order in which they may arrive."""

import random
from itertools import permutations
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from polycephaly.errors import ChannelClosed
from polycephaly.green import Channel, run, sleep, testing
from polycephaly.green.distributed import ends, handlers
from polycephaly.green.distributed.owner import make_owned
from polycephaly.green.distributed.transport import PeerEnding
from polycephaly.runtime.tuning import tuning

HERE = None  # the process that owns the channel


class Peer:
    def __init__(self, name):
        self.name = name
        self.ending = PeerEnding("was killed", None)

    def __str__(self):
        return self.name


def merged(streams, order):
    """The items of all streams, each next one from the stream that `order` names."""
    left = {name: iter(stream) for name, stream in streams.items()}
    return [(name, next(left[name])) for name in order]


def after_reports(reports):
    """A channel, and the record of its only end in its process, when these reports have arrived and
    enough time has gone by.
    """
    ch = Channel()
    number = ends.new_end(ch, "send")._number
    peers = {HERE: HERE} | {name: Peer(name) for name in "ABC"}

    async def arrive():
        make_owned(ch, SimpleNamespace(forget_channel=lambda *_: None), 1)
        for place, (kind, *tokens) in reports:
            if kind == "opened":
                ends._on_opened(ch, number, peers[place], ends._Report(*tokens))
            elif kind == "dropped":
                ends._on_dropped(ch, number, peers[place], ends._Report(*tokens))
            elif kind == "pause":
                clock.advance(1000.0)
                await sleep(0)
            else:
                ends.on_loss(peers[place])

    with testing.virtual_time(jumps=False) as clock:
        run(arrive)
        for _ in range(ends.GRACE_STEPS):
            clock.advance(tuning.next_holder_seconds)
            run(sleep, 0)  # timers that are due go off, in this turn
    return ch, ends._find_end(ch, number)


@pytest.mark.parametrize("fate", ["lost", "dropped"])
def test_an_end_goes_with_its_last_holder_in_whatever_order_the_reports_arrive(fate):
    """The end was sent to one process, came back, was sent there again, and on to another one,
    which is gone before the first one has reported.
    """
    streams = {
        HERE: [("opened", 2, 1)],
        "A": [("opened", 1, 0), ("opened", 3, 2)],
        "B": [("opened", 4, 3), (fate, 4)],
    }
    orders = set(permutations(name for name, stream in streams.items() for _ in stream))
    assert len(orders) == 30
    for order in orders:
        ch, end = after_reports(merged(streams, order))
        assert end is None, order
        with pytest.raises(ChannelClosed) as closed:
            ch.get(60)
        reason = "the last end that could send was in B, which was killed"
        assert str(closed.value.__cause__) == (reason if fate == "lost" else "None"), order


@pytest.mark.parametrize("pauses", range(1, ends.GRACE_STEPS + 1))
def test_a_pause_of_the_machine_takes_one_step_of_the_time_in_which_the_next_holder_reports(pauses):
    """The next holder had no time to say so."""
    lost = [("A", ("opened", 1, 0)), ("A", ("lost",))]
    _, end = after_reports([*lost, *[(HERE, ("pause",))] * pauses, ("B", ("opened", 2, 1))])
    assert (end is None) == (pauses == ends.GRACE_STEPS)


def test_an_end_that_goes_about_is_counted_where_it_is():
    """Processes that had it before may die, too."""
    for seed in range(200):
        luck = random.Random(seed)
        streams = {place: [] for place in (HERE, "A", "B", "C")}
        token, place = 0, HERE
        for hop in range(1, luck.randrange(2, 8)):
            place = luck.choice([each for each in streams if each != place])
            streams[place].append(("opened", hop, token))
            token = hop
        fate = luck.choice(["stays", "dropped"] if place is HERE else ["stays", "dropped", "lost"])
        if fate != "stays":
            streams[place].append((fate, token))
        for other in "ABC":
            if other != place and luck.random() < 0.4:
                streams[other].append(("lost",))
        order = [name for name, stream in streams.items() for _ in stream]
        luck.shuffle(order)
        ch, end = after_reports(merged(streams, order))
        if fate == "stays":
            assert list(end.holders) == [token] and not ch.closed, seed
        else:
            assert end is None and ch.closed, seed


def test_an_error_in_one_answer_at_a_loss_leaves_the_channels_in_use():
    channel = Mock(rare_state=Mock(is_matching=False))
    fails = Mock(channel=channel, answer=Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        handlers.on_loss(Mock(operations={1: fails}, accounts={}))
    assert not channel.rare_state.is_matching
