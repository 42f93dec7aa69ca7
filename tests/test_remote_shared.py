"""Values that a client gives to a served pool once: in its shared memory, for as long as the client
has the handle."""

import gc
import os
import pickle
import signal
import threading
from functools import partial

import pytest
from faults import append, hold_until, lines, wait_for
from scripts import Script

import polycephaly as poly
from polycephaly.engines.remote import messages
from polycephaly.server.join import join

np = pytest.importorskip("numpy")

SOON = 60.0


def held(server):
    return sum(len(client.session.shared) for client in server._clients.values())


def used(pool):
    pool._dispatcher.registry.store.free_idle_memory(0.0)
    return pool._dispatcher.registry.store.arena.used()


@pytest.mark.parametrize("is_settled", [True, False])
def test_the_value_of_a_promise_may_be_a_shared_one(remote, server, is_settled):
    """Also beside others, and in containers."""

    def total(a, within, c):
        return a + within["x"] + c

    ones, twos = remote.share([1]), remote.share([2])
    alone, within = poly.Promise(), poly.Promise()
    if is_settled:
        alone.set_result(ones)
        within.set_result(twos)
    promises = [remote.promise(len, alone), remote.promise(total, ones, {"x": within}, alone)]
    if not is_settled:
        alone.set_result(ones)
        within.set_result(twos)
    assert [promise.result(SOON) for promise in promises] == [1, [1, 2, 1]]
    del ones, twos, alone, within
    wait_for(lambda: not held(server))


def test_a_shared_array_arrives_as_the_value_and_is_each_calls_own(remote, server):
    table = np.arange(1_000_000.0)

    def spoil(array, i):
        before = array[i]
        array[i] = -1
        return before

    with remote.share(table) as shared:
        assert shared.nbytes > table.nbytes
        assert [remote.doit(spoil, shared, 5) for _ in range(4)] == [5.0] * 4
        assert remote.doit(
            lambda pair, *, again: pair["a"][1] is again, {"a": (1, shared)}, again=shared
        )
        assert [p.value for p in remote.everywhere(len, shared)] == [1_000_000] * 2
        assert list(remote.map(lambda a, i: a[i], [shared] * 50, range(50))) == list(range(50))
        assert (shared.value == table).all()
        assert held(server) == 1
    wait_for(lambda: held(server) == 0)
    with pytest.raises(ValueError, match="was released"):
        remote.doit(len, shared)
    assert "released" in repr(shared)


def test_small_values_and_classes_of_main_are_shared_too(remote):
    class Mine:
        def __init__(self, x):
            self.x = x

    for value in ({"a": [1, 2]}, "text", 5, Mine(3), b"x" * 5_000_000):
        with remote.share(value) as shared:
            got = remote.doit(lambda v: v, shared)
            assert got.x == 3 if isinstance(value, Mine) else got == value


@pytest.mark.guarantee("remote-9")
def test_it_goes_once_and_lies_there_once(remote, pool):
    table = np.ones(8_000_000)
    before = used(pool)
    shared = remote.share(table)
    for _ in range(20):
        assert remote.doit(np.sum, shared) == 8_000_000.0
    assert used(pool) - before < 1.5 * table.nbytes
    del shared
    gc.collect()
    wait_for(lambda: used(pool) - before < table.nbytes / 2)


def test_a_call_that_waits_has_it_though_the_handle_is_lost(remote, server, tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    busy = [remote.promise(hold_until, gate, started) for _ in range(2)]
    wait_for(lambda: len(lines(started)) == 2)
    shared = remote.share(np.arange(100_000))
    behind = [remote.promise(len, shared) for _ in range(5)]
    shared.release()
    del shared
    append(gate, "open")
    assert [p.result(SOON) for p in (*busy, *behind)] == ["held"] * 2 + [100_000] * 5
    wait_for(lambda: held(server) == 0)


def test_a_handle_goes_nowhere_else(remote, card):
    with remote.share([1]) as shared, poly.connect(card) as another:
        for use in (
            lambda: pickle.dumps(shared),
            lambda: another.doit(len, shared),
            lambda: another.doit(lambda: shared),
            lambda: poly.doit(len, shared),
        ):
            with pytest.raises(TypeError, match="can be pickled only for calls of its own pool"):
                use()
        assert remote.doit(len, shared) == 1
        assert remote.doit(lambda: len(shared)) == 1
        assert remote.doit(partial(len, shared)) == 1
        assert list(remote.map(lambda n: n + len(shared), range(3))) == [1, 2, 3]


class Submits:
    """Its pickling is a call of its own."""

    def __init__(self, submit):
        self.submit = submit

    def __reduce__(self):
        self.submit()
        return int, ()


def test_a_call_made_while_another_one_is_pickled_takes_no_handle_from_it(remote, card):
    inner = []
    with remote.share([1]) as shared, poly.connect(card) as another:
        for pool, *args in ((remote, shared), (remote, [2]), (another, [3])):
            first = Submits(lambda pool=pool, args=args: inner.append(pool.promise(sum, *args)))
            assert remote.doit(lambda _, b, c: b + c, first, shared, shared) == [1, 1]
        with pytest.raises(TypeError, match="can be pickled only for calls of its own pool"):
            pickle.dumps(shared)
    assert [promise.result(SOON) for promise in inner] == [1, 2, 3]


def test_what_is_too_large_is_refused_and_what_cannot_be_pickled_too(remote, monkeypatch, pool):
    monkeypatch.setattr(pool._dispatcher.registry.store.arena, "ceiling", 1 << 20)
    with pytest.raises(MemoryError, match="shared memory is full"):
        remote.share(bytes(2 << 20))
    with pytest.raises(TypeError, match="cannot pickle"):
        remote.share(threading.Lock())
    assert remote.doit(abs, -1) == 1


def test_a_call_with_more_shared_values_than_it_may_have_is_refused(remote, monkeypatch):
    monkeypatch.setattr(messages, "MAX_SHARED_VALUES", 2)
    handles = [remote.share(n) for n in range(3)]
    with pytest.raises(ValueError, match="at most 2 shared values, not 3"):
        remote.doit(sum, handles)
    assert remote.doit(sum, handles[1:]) == 3


def test_as_many_shared_values_as_a_call_may_have_fit_into_its_rare_fields():
    numbers = [10**9] * messages.MAX_SHARED_VALUES
    assert len(messages.pack_extra({"shared": numbers})) < messages.MAX_EXTRA_BYTES


CLIENT = """
    import sys
    import polycephaly as poly
    remote = poly.connect(sys.argv[1])
    shared = remote.share(bytearray(10_000_000))
    print(remote.doit(len, shared), flush=True)
    print("up", flush=True)
    import threading
    threading.Event().wait()
"""


@pytest.mark.guarantee("remote-9")
def test_it_goes_with_its_client(server, card, pool):
    before = used(pool)
    with Script(CLIENT, card) as script:
        assert script.read_line() == "10000000"
        script.read_until("up")
        assert used(pool) - before >= 10_000_000
        script.signal(signal.SIGKILL)
        script.wait()
        wait_for(lambda: used(pool) - before < 5_000_000)


def test_calls_that_share_are_run_by_the_servers_own_drones(remote, server, card, pool):
    with poly.Pool(1) as far, join(far, card):
        wait_for(lambda: len(remote.drones) == 3)
        with remote.share(bytes(1_000_000)) as shared:
            promises = [remote.promise(lambda s: (len(s), os.getpid()), shared) for _ in range(100)]
            assert {p.result(SOON)[1] for p in promises} <= {drone.pid for drone in pool.drones}
            with pytest.raises(RuntimeError, match="the shared value is in the memory of"):
                remote.drones[-1].doit(len, shared)
