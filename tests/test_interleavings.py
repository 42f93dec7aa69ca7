"""Callers and turns that meet, each held at the very place where the other comes between."""

import threading
from collections import deque

import pytest
from faults import PackedSlowly, append, wait_for

import polycephaly as poly


class Held:
    """An argument that is being pickled until it is let go."""

    def __init__(self):
        self.begun, self.let_go = threading.Event(), threading.Event()

    def __reduce__(self):
        self.begun.set()
        self.let_go.wait(30)
        return int, (3,)


@pytest.mark.parametrize("inputs", [0, 1])
@pytest.mark.parametrize("how", ["kill", "break"])
def test_a_pool_ends_though_work_comes_when_all_others_was_called_off(how, inputs):
    pool, held, given = poly.Pool(1), Held(), []
    crew = pool._crew
    by_hand = [poly.Promise() for _ in range(inputs)]
    late = threading.Thread(target=lambda: given.append(pool.promise(pow, held, 2, *by_hand)))
    late.start()
    held.begun.wait(30)
    called_off = threading.Event()
    if how == "kill":
        crew.kill()
    else:
        crew.hub.post(lambda: crew.break_(RuntimeError("broken")))

    def let_go():  # in the same turn: its drone is not known to be dead
        called_off.set()
        held.let_go.set()
        late.join(30)

    crew.hub.post(let_go)
    called_off.wait(30)
    crew.ended.result(30)
    late.join()
    assert isinstance(given[0].exception(30), RuntimeError)


def test_who_submits_while_it_is_looked_whether_all_are_stuck_breaks_nothing(monkeypatch):
    monkeypatch.setattr("polycephaly.stuck.STUCK", 0.01)
    looked = threading.Event()

    class Elsewhere(poly.Promise):
        """Of something that is not settled by hand."""

        def _waits_for(self):
            if not looked.is_set():
                works.append(pool.promise(abs, self))
                looked.set()
            return ()

    with poly.Pool(1) as pool:
        pool.doit(abs, -1)
        elsewhere = Elsewhere()
        works = [pool.promise(abs, elsewhere) for _ in range(3)]
        waiter = threading.Thread(target=works[0].exception)
        waiter.start()
        assert looked.wait(30)
        pool.doit(abs, -1)
        elsewhere.set_result(-7)
        assert [work.result(30) for work in works] == [7, 7, 7, 7]
        waiter.join()


def test_work_that_waits_for_promises_and_then_for_what_it_takes_is_called_off_with_all(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(2) as pool:
        kept = pool.promise(lambda: PackedSlowly(gate), keep=True).value
        (holder,) = [each for each in pool.drones if each.name == kept.drone]
        holder.release(wait=False)
        retires = threading.Event()
        pool._crew.hub.post(retires.set)
        assert retires.wait(30)  # or what comes now could be sent there, where it waits for the packing
        pool.doit(abs, -1)
        wait_for(lambda: pool._crew.hungry)
        by_hand = poly.Promise()
        work = pool.promise(lambda *both: both, kept, by_hand)
        by_hand.set_result([1])
        wait_for(lambda: work not in pool._crew.queue)
        pool.shutdown(wait=False, cancel_futures=True)
        try:
            wait_for(work.cancelled)
        finally:
            append(gate, "open")


def test_work_for_a_drone_is_seen_that_is_given_while_another_gets_ready():
    class Meanwhile(deque):
        def __len__(self):
            crew.pinned_waiting = True  # as a caller's thread says it
            return 0

    with poly.Pool(2) as pool:
        pool.doit(abs, -1)
        crew, seen = pool._crew, poly.Promise()

        def turn():
            link = crew.links[0]
            before, link.pinned = link.pinned, Meanwhile()
            crew.pinned_waiting = False
            crew.roster._ready(link)
            link.pinned = before
            said = crew.pinned_waiting
            crew.hub.deliver(lambda: seen.set_result(said))

        crew.hub.post(turn)
        assert seen.result(30)
