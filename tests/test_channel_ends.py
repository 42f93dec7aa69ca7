"""Who holds an end of a channel: reports of processes in each order in which they may arrive."""

from itertools import permutations
from types import SimpleNamespace
from weakref import WeakSet

import pytest

from polycephaly.errors import ChannelClosed
from polycephaly.green import Channel, run, testing
from polycephaly.green.distributed import ends
from polycephaly.green.distributed.connection import PeerEnding
from polycephaly.green.distributed.owner import make_owned
from polycephaly.runtime.tuning import tuning

HERE = None
BACK_HERE, AT_FIRST, AT_SECOND, AT_LAST = range(1, 5)  # tokens


class Peer:
    def __init__(self, name):
        self.name = name
        self.ends = WeakSet()
        self.ending = PeerEnding("was killed", None)

    def __str__(self):
        return self.name


def orders(*streams):
    """Return all orders of the items of all streams that keep the order of each stream."""
    places = [place for place, stream in enumerate(streams) for _ in stream]
    for order in sorted(set(permutations(places))):
        left = [iter(stream) for stream in streams]
        yield [next(left[place]) for place in order]


@pytest.mark.parametrize("goes", ["killed", "dropped"])
def test_an_end_goes_with_its_last_holder_in_whatever_order_the_reports_arrive(goes):
    """The end was sent to one process, came back, was sent there again, and on to another one,
    which is gone before the first one has reported.
    """

    def opened(token, previous):
        return lambda holder: ends._on_opened(
            ch, number, holder, ends._Report(token=token, previous=previous)
        )

    def last_is_gone(holder):
        if goes == "killed":
            ends.on_loss(holder)
        else:
            ends._on_dropped(ch, number, holder, ends._Report(token=AT_LAST))

    here = [(HERE, opened(BACK_HERE, AT_FIRST))]
    first = [("first", opened(AT_FIRST, ends._NO_TOKEN)), ("first", opened(AT_SECOND, BACK_HERE))]
    last = [("last", opened(AT_LAST, AT_SECOND)), ("last", last_is_gone)]
    tried = 0
    for order in orders(here, first, last):
        tried += 1
        peers = {HERE: HERE, "first": Peer("the first"), "last": Peer("the last")}
        ch = Channel()
        number = ends._count_end(ch, "send")
        with testing.virtual_time(jumps=False) as clock:

            def receive_all(order=order, peers=peers, ch=ch):
                make_owned(ch, SimpleNamespace(forget_channel=lambda *_: None), 1)
                for place, handle in order:
                    assert not ch.closed
                    handle(peers[place])

            run(receive_all)
            for _ in range(ends.GRACE_STEPS):
                clock.advance(tuning.next_holder_seconds)
            with pytest.raises(ChannelClosed) as closed:
                ch.get(20)
        killed = "the last end that could send was in the last, which was killed"
        assert str(closed.value.__cause__) == (killed if goes == "killed" else "None"), order
        assert not peers["first"].ends
    assert tried == 30


def test_orders_keeps_the_order_of_each_stream():
    assert list(orders("ab", "c")) == [["a", "b", "c"], ["a", "c", "b"], ["c", "a", "b"]]
