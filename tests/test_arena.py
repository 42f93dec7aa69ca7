"""The arena, stores, ledgers and waybills by themselves, without any drone."""

import gc
import mmap
import os
import random
import threading
import tracemalloc
import warnings
import weakref
from pickle import PickleBuffer, loads
from struct import Struct
from types import SimpleNamespace

import numpy as np
import pytest

from polycephaly.errors import Malformed
from polycephaly.memory import arena as arena_module
from polycephaly.memory import blocks as store_module
from polycephaly.memory.arena import Arena, Full, view
from polycephaly.memory.blocks import Store, find_place, pristine_view
from polycephaly.memory.references import (
    ObjectRef,
    Received,
    RefTable,
    Serialized,
    load,
    load_joined,
    load_with_buffers,
)
from polycephaly.wire.main_names import MainSnapshot
from polycephaly.wire.pickling import (
    MIN_LARGE_BUFFER_BYTES,
    capture,
    join_payloads,
    pack,
    pack_strictly,
    pickled_size,
    store_pickle,
)

PAGE = mmap.PAGESIZE


@pytest.fixture
def arena():
    made = Arena(1 << 30)
    yield made
    made.end()
    gc.collect()
    assert not made._open_fds, "something still looks at it"


@pytest.fixture
def store(arena):
    return Store(arena, 0)


def whole(length):
    return -(-length // PAGE) * PAGE


def tidy(store):
    store.free_idle_memory(0.0)
    return store.free_idle_memory(0.0)


def refuse(*_):
    raise OSError(12, "no")


def test_what_is_put_is_seen_and_in_its_place(store):
    runs = [[b"abc", b"def"], [bytearray(b"x" * 5000)], [memoryview(b"y" * 100), b"z"], [b""]]
    segment, places = store.put(runs)
    seen = view(segment)
    for run, (at, length) in zip(runs, places, strict=True):
        assert at % 64 == 0 and bytes(seen[at : at + length]) == b"".join(run)
    seen.release()


def test_what_is_written_into_a_view_no_other_view_shows(store):
    segment, _ = store.put([[b"a" * 100_000]])
    one, two = view(segment), view(segment)
    one[:] = b"b" * len(one)
    assert bytes(two[:100_000]) == b"a" * 100_000 == bytes(view(segment)[:100_000])
    assert bytes(one[:3]) == b"bbb"


def test_a_block_is_used_again_only_when_its_segment_is_gone(store):
    one, _ = store.put([[b"1" * 70_000]])
    offset = one.offset
    two, _ = store.put([[b"2" * 70_000]])
    assert two.offset >= offset + 70_000
    seen = view(one)
    del one
    gc.collect()
    three, _ = store.put([[b"3" * 70_000]])
    assert three.offset not in (offset, two.offset) and bytes(seen[:70_000]) == b"1" * 70_000
    del seen
    gc.collect()
    four, _ = store.put([[b"4" * 70_000]])
    assert four.offset == offset and bytes(view(four)[:70_000]) == b"4" * 70_000


@pytest.mark.parametrize(
    "size", [1, 63, 64, 65, 4095, 4096, 4097, 70_000, (1 << 20) - 1, 1 << 20, 5 << 20]
)
def test_a_block_that_is_used_again_shows_only_the_new_content(store, size):
    for fill in (b"1", b"2", b"3"):
        for length in (size, max(1, size - size // 40), size):
            segment, [(at, there)] = store.put([[fill * length]])
            assert bytes(view(segment)[at : at + there]) == fill * length
            del segment


def test_memory_in_use_is_counted_and_given_back_when_idle(arena, store):
    segments = [store.put([[bytes([i]) * 100_000]])[0] for i in range(5)]
    assert 500_000 <= arena.used() <= 5 * whole(100_000)
    del segments[1:]
    assert store.free_idle_memory(1000.0)
    assert arena.used() >= 500_000
    assert not tidy(store)
    assert 100_000 <= arena.used() <= whole(100_000)
    assert bytes(view(segments[0])[:5]) == bytes(5)
    segments.clear()
    assert not tidy(store) and arena.used() == 0


def test_no_more_than_an_eighth_of_the_ceiling_stays_warm():
    arena = Arena(8_000_000)
    store = Store(arena, 0)
    segments = [store.put([[bytes(400_000)]])[0] for _ in range(10)]
    segments.clear()
    store.put([[b"1"]])
    assert arena.used() <= 1_000_000 + 2 * PAGE
    arena.end()


def test_beyond_the_ceiling_it_is_full_and_below_it_not():
    arena = Arena(1_000_000)
    store, other = Store(arena, 0), Store(arena, 5)
    one, _ = store.put([[bytes(600_000)]])
    for each in (store, other):
        with pytest.raises(Full, match="1,000,000"):
            each.put([[bytes(600_000)]])
    two, _ = other.put([[bytes(300_000)]])
    del one
    three, _ = store.put([[b"3" * 650_000]])  # what is warm makes room
    assert bytes(view(three)[:650_000]) == b"3" * 650_000
    assert issubclass(Full, MemoryError)
    del two, three
    arena.end()
    gc.collect()
    assert not arena._open_fds


def test_a_ceiling_of_nothing():
    arena = Arena(0)
    store = Store(arena, 0)
    for _ in range(3):
        with pytest.raises(Full):
            store.put([[b"1" * 100_000]])
    assert arena.used() == 0
    arena.end()


def test_what_could_not_be_filled_is_not_lost_and_shows_nothing_old(arena, store, monkeypatch):
    store.put([[b"1" * 100_000]])
    write, calls = store_module._write, []

    def half(fd, offset, piece):
        calls.append(1)
        write(fd, offset, piece[: len(piece) // 2])
        raise OSError(28, "no space")

    monkeypatch.setattr(store_module, "_write", half)
    for _ in range(3):
        with pytest.raises(OSError, match="no space"):
            store.put([[b"2" * 100_000]])
    monkeypatch.setattr(store_module, "_write", write)
    assert calls
    top = store._top
    segment, _ = store.put([[b"3" * 100_000]])
    assert bytes(view(segment)[:100_000]) == b"3" * 100_000 and store._top == top
    del segment
    tidy(store)
    assert arena.used() == 0


def test_short_writes_and_reads_are_gone_on_with(arena, store, monkeypatch):
    content = random.Random(1).randbytes(100_032)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: preadv(fd, [parts[0][:777]], at))
    segment, _ = store.put([[content]])
    monkeypatch.setattr(arena_module, "map_range", refuse)
    assert bytes(view(segment)) == content


@pytest.mark.parametrize("size", [100_000, 100_001, 98_304])
def test_where_nothing_can_be_mapped_it_is_copied_also_at_the_end_of_the_file(
    arena, store, monkeypatch, size
):
    preadv, empty = os.preadv, []

    def something(*args):
        done = preadv(*args)
        if not done:
            empty.append(args)
        assert len(empty) < 100, "nothing there, for ever"
        return done

    segment, _ = store.put([[b"1" * size]])
    monkeypatch.setattr(os, "preadv", something)
    monkeypatch.setattr(arena_module, "map_range", refuse)
    for look in (view, pristine_view):
        assert bytes(look(segment)[:size]) == b"1" * size
    assert find_place(view(segment), arena) is None


def test_a_range_that_is_not_there_is_an_error(arena, store):
    store.put([[b"1" * 100]])
    ref_table = RefTable(arena, 0, lambda: None)
    for offset, length in ((1 << 50, 100), (0, 100_000), (PAGE, 1)):
        reference = ObjectRef(ref_table, 1, offset, length)
        with pytest.raises(ValueError, match="beyond"):
            view(reference)
        del reference


def test_each_writer_has_a_region_of_its_own(arena):
    stores = [Store(arena, number) for number in (0, 1, 7, 100_000)]
    segments = [store.put([[bytes([n]) * 100_000]])[0] for n, store in enumerate(stores)]
    for n, segment in enumerate(segments):
        assert bytes(view(segment)[:100_000]) == bytes([n]) * 100_000
    assert arena.used() <= 4 * whole(100_000)
    del segment
    arena.clear(7 * arena_module.REGION_BYTES, 8 * arena_module.REGION_BYTES)
    assert [bytes(view(each)[:1]) for each in segments] == [
        b"\0",
        b"\1",
        b"\2",
        b"\3",
    ]  # it looks at it


def test_the_end_leaves_what_is_looked_at_and_the_last_view_closes_it():
    arena = Arena(1 << 30)
    store = Store(arena, 0)
    kept, _ = store.put([[b"1" * 100_000]])
    gone, _ = store.put([[b"2" * 100_000]])
    seen = view(kept)
    del kept, gone
    arena.end()
    assert arena.used() <= whole(100_000) and bytes(seen[:100_000]) == b"1" * 100_000
    with pytest.raises(Full):
        store.put([[b"3"]])
    assert arena._open_fds
    del seen
    gc.collect()
    assert not arena._open_fds


def clear_all(go, views):
    go.wait()
    for each in views:
        each.clear()


def test_views_that_end_while_the_arena_ends_in_any_thread():
    for _ in range(30):
        arena = Arena(1 << 30)
        store = Store(arena, 0)
        views = [[view(store.put([[b"1" * 5000]])[0])] for _ in range(40)]
        go = threading.Barrier(3)
        threads = [
            threading.Thread(target=clear_all, args=(go, part))
            for part in (views[::2], views[1::2])
        ]
        for thread in threads:
            thread.start()
        go.wait()
        arena.end()
        for thread in threads:
            thread.join()
        gc.collect()
        assert not arena._open_fds
        with pytest.raises(OSError):
            os.fstat(arena.fd)


# -- ledgers and waybills --------------------------------------------------------------------------


class Link:
    """Both ends of one, in this image; what is sent lies in region `number`."""

    def __init__(self, arena, number=0):
        self.rung = 0
        self.number = number
        self.sender = RefTable(arena, 99, lambda: None)
        self.receiver = RefTable(arena, number, self.ring)

    def ring(self):
        self.rung += 1

    def carry(self, serialized):
        return Received(serialized.pack_header(self.sender), self.receiver)

    def tell(self):
        for number in self.receiver.take_returned():
            self.sender.release(number)


@pytest.fixture
def link(arena):
    made = Link(arena)
    yield made
    gc.collect()
    made.tell()
    assert not made.sender.lent


@pytest.fixture
def snapshot():
    return MainSnapshot()


def test_a_value_there_and_its_reference_back(arena, store, link, snapshot):
    sent = {"a": np.arange(50_000), "b": bytes(200_000), "c": [1, 2]}
    serialized = pack(sent, snapshot, store)
    assert isinstance(serialized, Serialized) and len(serialized) > 600_000 - 200
    arrived = link.carry(serialized)
    assert len(arrived) == len(serialized)
    got = load(arrived)
    assert (got["a"] == sent["a"]).all() and got["b"] == sent["b"] and got["c"] == [1, 2]
    del serialized, arrived
    assert len(link.sender.lent) == 1 and not link.rung
    got["a"][:] = 0
    part = got["a"][5:10]
    del got
    assert not link.rung
    del part
    gc.collect()
    assert link.rung == 1
    link.tell()
    assert not link.sender.lent
    tidy(store)
    assert arena.used() == 0


def test_one_segment_lent_twice_is_held_until_both_are_back(arena, store, link, snapshot):
    serialized = pack(np.arange(50_000), snapshot, store)
    one, two = load(link.carry(serialized)), load(link.carry(serialized))
    del serialized
    one[:] = 1
    assert two[7] == 7
    del one
    link.tell()
    store.put([[bytes(400_000)]])
    assert two[-1] == 49_999
    del two
    link.tell()
    assert not link.sender.lent


def test_what_arrives_and_is_never_opened_comes_back(store, link, snapshot):
    link.carry(pack(np.arange(50_000), snapshot, store))
    gc.collect()
    link.tell()
    assert not link.sender.lent


def test_of_an_end_that_has_died_only_what_is_looked_at_stays(arena, snapshot):
    link = Link(arena, 3)
    there = Arena(1 << 30, os.dup(arena.fd))  # the other image's
    its, link.sender = Store(there, link.number), RefTable(there, 0, lambda: None)
    held, lost = (load(link.carry(pack(np.full(50_000, n), snapshot, its))) for n in (1, 2))
    unopened = link.carry(pack(np.full(50_000, 3), snapshot, its))
    del lost
    link.receiver.close()
    assert arena.used() <= 2 * whole(400_000) and (held == 1).all()
    assert (load(unopened) == 3).all()
    del unopened
    gc.collect()
    assert arena.used() <= whole(400_000) and (held == 1).all()
    del held
    gc.collect()
    assert arena.used() == 0
    os.close(there.fd)


def test_small_things_take_no_shared_memory_and_large_ones_do(arena, store, snapshot):
    for small in (
        1,
        "x" * 1000,
        np.arange(1000),
        bytes(20_000),
        np.zeros(MIN_LARGE_BUFFER_BYTES // 2, np.uint8)[:100],
    ):
        assert isinstance(pack(small, snapshot, store), bytes)
    assert arena.used() == 0
    below = np.zeros(MIN_LARGE_BUFFER_BYTES - 1, np.uint8)
    at = np.zeros(MIN_LARGE_BUFFER_BYTES, np.uint8)
    serialized = pack(at, snapshot, store)
    assert isinstance(serialized, Serialized) and serialized.inline and len(serialized.places) == 1
    serialized = pack(below, snapshot, store)
    assert (
        isinstance(serialized, Serialized) and not serialized.inline
    )  # its pickle is large, so it lies there itself
    assert isinstance(store_pickle(bytes(31_000), store), bytes) and isinstance(
        store_pickle(bytes(33_000), store), Serialized
    )


def test_what_is_part_of_a_pristine_view_is_not_copied(arena, store, link, snapshot):
    serialized = pack_strictly(np.arange(50_000), snapshot, store)
    segment, at, length = serialized.places[0]
    whole_view = pristine_view(segment)
    before = arena.used()
    again = pack(PickleBuffer(whole_view[at + 800 : at + 320_000]), snapshot, store)
    assert (
        arena.used() == before and again.places[0][0] is segment and again.places[0][1] == at + 800
    )
    assert (np.frombuffer(load(link.carry(again)), np.int64) == np.arange(100, 40_000)).all()
    copied = pack(PickleBuffer(view(segment)[at : at + length]), snapshot, store)
    assert copied.places[0][0] is not segment
    other = Arena(1 << 30)
    assert find_place(whole_view, other) is None and find_place(memoryview(bytes(5)), arena) is None
    other.end()
    del again, copied, whole_view, serialized, segment


def test_values_joined_and_taken_apart(store, link, snapshot):
    values = [
        np.arange(50_000),
        {"small": 1},
        bytes(100_000),
        [np.full(9_000, 1.0), np.full(9_000, 2.0)],
    ]
    for head in ("head", ["x" * 100_000]):
        joined = join_payloads(head, [pack(value, snapshot, store) for value in values], store)
        got_head, parts = load_joined(link.carry(joined))
        got = [load_with_buffers(*part) for part in parts]
        assert got_head == head and (got[0] == values[0]).all() and got[1:3] == values[1:3]
        assert (got[3][0] == 1).all() and (got[3][1] == 2).all()
        del got, parts
    head, parts = load_joined(
        join_payloads(5, [pack(1, snapshot, store), pack("a", snapshot, store)], store)
    )
    assert head == 5 and [load_with_buffers(*part) for part in parts] == [1, "a"]


def test_without_room_a_pickle_and_one_warning(snapshot):
    arena = Arena(0)
    store = Store(arena, 0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for sent in (np.arange(50_000), bytes(100_000), {"a": np.zeros(100_000)}):
            packed = pack(sent, snapshot, store)
            assert isinstance(packed, bytes)
            assert str(load(packed)) == str(sent)
        assert store_pickle(bytes(100_000), store) == bytes(100_000)
        with pytest.raises(Full):
            pack_strictly(np.arange(50_000), snapshot, store)
    assert [each.category for each in said] == [RuntimeWarning]
    arena.end()


LOAN, PLACE, COUNTS = Struct("<QQQ"), Struct("<IQQ"), Struct("<II")


@pytest.mark.parametrize(
    "waybill",
    [
        b"",
        b"\0" * 5,
        COUNTS.pack(0, 0),  # no pickle at all
        COUNTS.pack(1, 0) + b"x",
        COUNTS.pack(0, 1) + b"x",
        COUNTS.pack((1 << 32) - 1, (1 << 32) - 1) + b"x",
        COUNTS.pack(1, 0) + LOAN.pack(1, 1, 10) + b"x",  # not at a page
        COUNTS.pack(1, 0) + LOAN.pack(1, 0, 0) + b"x",
        COUNTS.pack(1, 0) + LOAN.pack(1, 1 << 62, 10) + b"x",
        COUNTS.pack(1, 0) + LOAN.pack(1, 0, (1 << 64) - 1) + b"x",
        COUNTS.pack(1, 0) + LOAN.pack(1, arena_module.REGION_BYTES, 10) + b"x",  # not in its region
        COUNTS.pack(1, 0) + LOAN.pack(1, arena_module.REGION_BYTES - PAGE, PAGE + 1) + b"x",
        COUNTS.pack(1, 1)
        + LOAN.pack(1, 0, 10)
        + PLACE.pack(1, 0, 1)
        + b"x",  # of a loan that there is not
        COUNTS.pack(1, 1) + LOAN.pack(1, 0, 10) + PLACE.pack(0, 5, 6) + b"x",
        COUNTS.pack(1, 1) + LOAN.pack(1, 0, 10) + PLACE.pack(0, (1 << 64) - 1, 2) + b"x",
    ],
)
def test_a_waybill_that_makes_no_sense_is_refused(arena, waybill):
    returned = RefTable(arena, 0, lambda: None)
    with pytest.raises(Malformed):
        Received(waybill, returned)
    assert not returned.returned


def test_a_value_may_lie_in_more_than_65536_ranges(arena):
    ranges = [SimpleNamespace(offset=0, length=10) for _ in range(1 << 16 | 1)]
    sent = Serialized(b"pickle", [(each, 1, 2) for each in ranges])
    header = sent.pack_header(RefTable(arena, 3, lambda: None))
    received = Received(header, RefTable(arena, 0, lambda: None))
    assert received.to_serialized().inline == b"pickle"
    places = received.to_serialized().places
    assert [place[1:] for place in places] == [(1, 2)] * len(ranges)
    assert len({each.number for each, *_ in places}) == len(ranges)


def test_random_traffic_between_two_ends_changes_nobodys_data(arena, snapshot):
    seed = int(os.environ.get("POLYCEPHALY_SEED", random.SystemRandom().randrange(1 << 32)))
    print("seed", seed)
    rng = random.Random(seed)
    ways = [
        (Store(arena, 0), Link(arena)),
        (Store(arena, 3), Link(arena, 3)),
        (Store(arena, 4), Link(arena, 4)),
    ]
    held = []
    for value in range(1, 1500):
        store, link = rng.choice(ways)
        action = rng.random()
        if action < 0.5:
            sent = np.full(rng.choice((100, 70_000, 150_000, 1_100_000)), value % 251, np.uint8)
            packed = pack([sent, bytes(sent)] if rng.random() < 0.3 else sent, snapshot, store)
            sent[:] = 255
            got = load(link.carry(packed) if isinstance(packed, Serialized) else packed)
            got = got[0] if isinstance(got, list) else got
            held.append([got, value % 251])
        elif action < 0.6 and held:
            each = rng.choice(held)
            each[1] = 252
            each[0][:] = 252
        elif action < 0.7 and held:
            each = rng.choice(held)
            each[0] = each[0][rng.randrange(50) :][::-1]
        elif action < 0.9:
            while len(held) > rng.randrange(12, 25):
                got, wanted = held.pop(rng.randrange(len(held)))
                assert (got == wanted).all(), seed
            got = None
        elif action < 0.95:
            link.tell()
        else:
            store.free_idle_memory(0.0)
    for got, wanted in held:
        assert (got == wanted).all(), seed
    held.clear()
    del got, each, sent, packed
    gc.collect()
    for store, link in ways:
        link.tell()
        assert not link.sender.lent
        tidy(store)
    assert arena.used() == 0
    assert all(
        store._top - link.number * arena_module.REGION_BYTES < 200 << 20 for store, link in ways
    )


def test_nothing_keeps_an_arena_that_has_ended():
    arena = Arena(1 << 20)
    store = Store(arena, 0)
    store.put([[b"1" * 1000]])
    arena.end()
    known = weakref.ref(arena)
    del arena, store
    gc.collect()
    assert known() is None


@pytest.mark.parametrize("kind", [bytes, bytearray, np.zeros, lambda size: {"a": [b"x" * size]}])
def test_the_size_of_a_pickle_is_found_out_without_a_copy(kind, snapshot):
    value = kind(32 << 20)
    tracemalloc.start()
    try:
        size = pickled_size(value, snapshot)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert abs(size - len(capture(value, snapshot))) < 1000
    assert pickled_size([1, "a"], snapshot) == len(capture([1, "a"], snapshot))


class Extends:
    """Adds to a bytearray when it is pickled."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        self.content += bytes(10)
        return int, ()


@pytest.mark.parametrize("more", [None, lambda: 3])  # which plain pickle refuses
def test_a_large_bytearray_that_is_resized_while_it_is_pickled_arrives_whole(snapshot, more):
    content = bytearray(100_000)
    arrived, *_ = loads(capture([content, Extends(content), more], snapshot))
    assert len(arrived) in range(100_000, len(content), 10) and not any(arrived)
