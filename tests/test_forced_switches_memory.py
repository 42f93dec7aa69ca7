"""Shared memory is taken, given back and ended by two threads, with a switch at every bytecode of
either: nothing is lost, and nothing is freed twice, or while somebody reads it."""

import mmap
import os
from contextlib import suppress
from types import SimpleNamespace

import pytest
from switches import Telling, every_meeting, telling_locks

from polycephaly.memory import arena as arenas
from polycephaly.memory import blocks, references
from polycephaly.memory.arena import REGION_BYTES, Arena, Full, view
from polycephaly.memory.blocks import Store
from polycephaly.memory.references import ObjectRef, RefTable

pytestmark = pytest.mark.usefixtures("telling_locks")
__all__ = ["telling_locks"]

SIZE = 100_000
BOTH = pytest.mark.parametrize("turned", [False, True])


def new_store():
    store = Store(Arena(1 << 30), 0)
    store._lock = Telling(store._lock)
    return store


def places(pair, *modules, anywhere=True):
    """Where they met. At last they do not: one has ended before the other began."""
    yield from (place for *_, place in every_meeting(pair, *modules, anywhere=anywhere))
    yield "nowhere"


def put(store, fill):
    segment, _ = store.put([[fill * SIZE]])
    return segment


def resident(block):
    return -(-block.resident_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def assert_whole(store, living, place):
    """Each block is in one place, with the memory that it is said to have."""
    store.free_idle_memory(1000.0)  # the returned ones are taken back
    free = [block for each in store._free.values() for block in each]
    every = free + [segment._block for segment in living.values()]
    assert len({block.offset for block in every}) == len(every), place
    assert sum(block.capacity for block in every) == store._top, place
    assert store._warm_bytes == sum(block.resident_bytes for block in free), place
    assert store.arena.used() == sum(map(resident, every)), place
    shown = {fill: bytes(view(segment)[:SIZE]) for fill, segment in living.items()}
    assert shown == {fill: fill * SIZE for fill in living}, place
    every.clear()
    living.clear()
    store.arena.end()
    assert not store.arena._open_fds, place


@BOTH
@pytest.mark.parametrize("other", ["the other", "the giving back", "the clearing"])
def test_a_block_that_is_taken_has_one_owner(other, turned):
    store, living = None, {}

    def pair():
        nonlocal store
        store = new_store()
        living.update({fill: put(store, fill) for fill in (b"a", b"b")})
        del living[b"b"]  # so that there is a free block

        def take(fill):
            living[fill] = put(store, fill)

        others = {
            "the other": lambda: take(b"2"),
            "the giving back": lambda: living.pop(b"a") and None,
            "the clearing": lambda: store.free_idle_memory(0.0),
        }
        both = (lambda: take(b"1")), others[other]
        return both[::-1] if turned else both

    for place in places(pair, blocks, arenas):
        assert_whole(store, living, place)


@BOTH
def test_a_block_that_is_given_back_is_cleared_once(turned):
    store, living = None, {}

    def pair():
        nonlocal store
        store = new_store()
        living.update({fill: put(store, fill) for fill in (b"a", b"b")})
        both = (lambda: living.pop(b"a") and None), (lambda: store.free_idle_memory(0.0))
        return both[::-1] if turned else both

    for place in places(pair, blocks, arenas):
        assert_whole(store, living, place)


@pytest.fixture
def no_foreign_file(monkeypatch):
    """Pages are freed of an open arena only: its descriptor's number may be another file's next."""

    def fallocate(fd, *args):
        if os.readlink(f"/proc/self/fd/{fd}") != "/memfd:polycephaly-arena (deleted)":
            wrong.append(fd)
        return libc.fallocate(fd, *args)

    wrong, libc = [], arenas._libc
    monkeypatch.setattr(arenas, "_libc", SimpleNamespace(mmap=libc.mmap, fallocate=fallocate))
    yield
    assert not wrong


@BOTH
@pytest.mark.parametrize("other", ["a put", "a giving back", "another's giving back"])
def test_an_arena_that_ends_is_freed_and_closed_once(other, turned, no_foreign_file):
    """Where CPython switches: `Arena.close_if_unused` relies on that."""
    store, living = None, {}

    def pair():
        nonlocal store
        store = new_store()
        living.update({fill: put(store, fill) for fill in (b"a", b"b")})

        def take():
            with suppress(Full):
                living[b"1"] = put(store, b"1")

        if other == "a put":
            both = store.arena.end, take
        elif other == "a giving back":
            both = store.arena.end, lambda: living.pop(b"a") and None
        else:
            store.arena.end()
            both = (lambda: living.pop(b"a") and None), (lambda: living.pop(b"b") and None)
        return both[::-1] if turned else both

    for place in places(pair, arenas, blocks, anywhere=False):
        if living:
            used = sum(resident(segment._block) for segment in living.values())
            assert store.arena.used() == used, place
        living.clear()
        assert not store.arena._open_fds, place  # with it, the system frees all that is left


@BOTH
def test_what_a_dead_process_had_lent_is_freed(turned):
    table, held = None, []

    def pair():
        nonlocal table
        arena = Arena(1 << 30)
        table = RefTable(arena, 7, lambda: None)
        os.pwrite(arena.fd, b"a" * SIZE, 7 * REGION_BYTES)
        held.append(ObjectRef(table, 1, 7 * REGION_BYTES, SIZE))
        both = table.close, held.clear
        return both[::-1] if turned else both

    for place in places(pair, references, arenas):
        assert table.arena.used() == 0, place
        assert table.take_returned() in ([], [1]), place
        table.arena.end()
        assert not table.arena._open_fds, place
