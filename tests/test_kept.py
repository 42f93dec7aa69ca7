"""Kept results: the value stays in its drone, the handle stands for it, and the last handle frees
it."""

import copy
import functools
import gc
import os
import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from faults import PackedSlowly, append, hold_until, lines, wait_for

import polycephaly as poly
from polycephaly import Kept, Lost, Promise
from polycephaly.wire import placeholders
from polycephaly.wire.messages import DROP, TaskBatch


def filled(n, value=1.0):
    return np.full(n, value)


def total(*arrays):
    return float(sum(each.sum() for each in arrays))


def summed(*arrays):
    return np.array([total(*arrays)])


def here(*_):
    return os.getpid()


def whose(_):
    return id(_), os.getpid()


def deep(value):
    return value["a"][0][1].sum()


def on_shelf():
    """In a drone: the types of what it keeps."""
    store = placeholders.local_store
    values = [*store._values.values(), *store._packed.values()]
    return sorted(type(each).__name__ for each in values)


def drone_of(pool, kept):
    return next(each for each in pool.drones if each.name == kept.drone)


def nothing_is_kept(pool):
    asked = pool.everywhere(on_shelf)  # a drone that has just been killed keeps nothing
    return not any(promise.value for promise in asked if promise.exception() is None)


def parts(n, k):
    whole = np.arange(n)
    return [Kept(whole[start::k].copy()) for start in range(k)]


# -- the handle ------------------------------------------------------------------------------------


def test_among_many_short_calls_of_one_function_those_are_kept_that_should_be():
    with poly.Pool(1) as pool:
        pool.doit(abs, -1)  # so that its time is known, and many go in one message
        promises = [pool.promise(abs, -n, keep=bool(n % 2)) for n in range(1000)]
        assert [isinstance(promise.value, poly.Kept) for promise in promises] == [
            bool(n % 2) for n in range(1000)
        ]


def test_what_waited_for_an_empty_text_is_kept_among_short_calls_too(tmp_path):
    with poly.Pool(1) as pool:
        pool.doit(abs, -1)
        pool.doit(bool, 1)
        go, text = str(tmp_path / "go"), poly.Promise()
        held = pool.promise(hold_until, go)
        first = pool.promise(bool, 1)
        kept = pool.promise(bool, text, keep=True)
        text.set_result("")  # with that it is as small as the others are
        open(go, "w").close()
        assert (held.value, first.value) == ("held", True)
        assert isinstance(kept.value, Kept) and kept.value.value is False


def test_a_handle_tells_what_is_where_and_fetches_it(pool):
    kept = pool.promise(filled, 1000, keep=True).value
    assert (
        isinstance(kept, Kept)
        and kept.nbytes == 8000
        and kept.drone in {each.name for each in pool.drones}
    )
    assert f"ndarray, 8,000 bytes in {kept.drone}" in repr(kept)
    assert (kept.value == 1).all()
    kept.value[:] = 5
    assert (kept.value == 1).all(), "what is written into it is the writer's alone"
    assert copy.copy(kept) is kept and copy.deepcopy([kept])[0] is kept


def test_code_strings_coroutines_and_single_drones_keep_too(pool):
    async def green():
        return [1, 2]

    assert pool.doit(sum, pool.promise("[1, 2, 3]", keep=True)) == 6
    assert pool.doit(sum, pool.promise(green, keep=True)) == 3
    drone = pool.drones[1]
    kept = drone.promise(list, "ab", keep=True).value
    assert kept.drone == drone.name and kept.value == ["a", "b"]
    with poly.Drone() as alone:
        assert alone.doit(len, alone.promise(list, "abc", keep=True)) == 3


def test_coroutines_that_overlap_keep_too():
    async def green(n):
        from polycephaly import green

        await green.sleep(0)
        return [n]

    with poly.Pool(1, width=4) as pool:
        handles = [pool.promise(green, n, keep=True) for n in range(8)]
        assert [pool.doit(sum, each) for each in handles] == list(range(8))


def test_the_value_is_never_pickled_where_it_is(pool):
    lock = pool.promise(threading.Lock, keep=True).value
    assert pool.doit(lambda each: each.acquire(timeout=0), lock) is True
    assert pool.doit(lambda each: each.locked(), lock) is True, "it is the same object"
    with pytest.raises(TypeError, match="pickle"):
        _ = lock.value
    elsewhere = next(each for each in pool.drones if each.name != lock.drone)
    with pytest.raises(TypeError, match="pickle"):
        elsewhere.doit(here, lock)
    assert pool.doit(lambda each: each.locked(), lock) is True


def test_keep_is_a_word_of_promise_alone(pool):
    def given(keep):
        return keep

    with pytest.raises(TypeError, match=r"keep is True or False, not 5.*functools.partial"):
        pool.promise(given, keep=5)
    with pytest.raises(TypeError, match=r"keep is True or False, not False.*functools.partial"):
        pool.promise(given, keep=False)  # as of pandas' drop_duplicates: whose is it?
    assert pool.promise(functools.partial(given, keep=False)).value is False
    assert pool.promise(abs, -1, keep=False).value == 1
    assert pool.doit(given, keep=5) == pool.submit(given, keep=5).result() == 5
    assert [each.value for each in pool.everywhere(given, keep=True)] == [True, True]


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        (b"x" * 1000, 1000, 1100),
        ([bytes(1000)] * 3, 3000, 3300),
        ([bytes([i % 256]) * 100 for i in range(10_000)], 1_000_000, 2_000_000),
        ({i: str(i) for i in range(5000)}, 250_000, 1_500_000),
        (SimpleNamespace(x=np.ones(1000), y=[1]), 8000, 8300),
        (np.ones((10, 10)), 800, 800),
        (None, 1, 100),
    ],
)
def test_bytes_are_told_about(pool, value, least, most):
    assert least <= pool.promise(lambda: value, keep=True).value.nbytes <= most


def test_what_lies_about_its_size_is_kept_all_the_same(pool):
    class Liar:
        nbytes = property(lambda self: 1 / 0)

        def __sizeof__(self):
            return -5

    assert pool.promise(Liar, keep=True).value.nbytes == 0


# -- as an argument --------------------------------------------------------------------------------


def test_as_an_argument_it_arrives_as_the_value_at_any_depth(pool):
    promise = pool.promise(filled, 10, keep=True)
    kept = promise.value
    assert (
        pool.doit(total, kept)
        == pool.doit(total, promise)
        == pool.doit(total, kept, kept) / 2
        == 10
    )
    assert pool.doit(deep, {"a": [(0, kept)]}) == 10
    assert pool.doit(lambda *, x: x.sum(), x=kept) == 10
    assert pool.doit(lambda: kept.sum()) == 10, "captured by a function"
    assert pool.doit(lambda a, b: a + b.sum(), pool.promise(abs, -1), kept) == 11
    assert list(pool.map(total, [kept] * 3)) == [10] * 3
    assert list(pool.map(lambda i: kept.sum() + i, range(3))) == [10, 11, 12]
    assert drone_of(pool, kept).doit(total, kept) == 10


def test_work_goes_to_the_drone_that_holds_most(pool):
    small, large = [
        each.promise(filled, n, keep=True).value
        for each, n in zip(pool.drones, (10, 1000), strict=True)
    ]
    assert small.drone != large.drone
    for _ in range(5):
        assert pool.doit(here, small, large) == pool.doit(here, large) == drone_of(pool, large).pid
    assert pool.doit(whose, large) == pool.doit(whose, large), "the same object each time"


def test_a_busy_drones_values_go_to_an_idle_one(pool, tmp_path):
    """Packed by the drone's second thread, while the first one runs something else."""
    kept = pool.promise(filled, 100_000, keep=True).value
    holder = drone_of(pool, kept)
    go = str(tmp_path / "go")
    busy = holder.promise(hold_until, go)
    wait_for(busy.running)
    ran = {pool.doit(here, kept) for _ in range(3)}
    assert holder.pid not in ran and len(ran) == 1 and not busy.done()
    assert (kept.value == 1).all()
    (tmp_path / "go").touch()
    assert busy.value == "held"


def test_work_that_was_cancelled_before_a_busy_drone_took_it_takes_no_room(tmp_path):
    go, started = str(tmp_path / "go"), str(tmp_path / "started")
    with poly.Pool(1, max_queued=1) as pool:
        kept = pool.promise(filled, 10, keep=True).value
        held = pool.promise(hold_until, go, started)
        wait_for(lambda: lines(started))
        assert pool.promise(total, kept).cancel()
        after = pool.promise(total, kept)  # or it would wait for what comes after it here
        open(go, "w").close()
        assert (held.value, after.value) == ("held", 10)


def test_a_chain_of_kept_results_runs_where_the_first_is(pool):
    step = pool.promise(filled, 1000, keep=True)
    pids = set()
    for _ in range(10):
        step = pool.promise(np.add, step, 1, keep=True)
        pids.add(
            pool.doit(here, step)
        )  # one by one: what waits for a busy drone, another may take over
    assert len(pids) == 1
    assert (step.value.value == 11).all()


# -- who frees it ----------------------------------------------------------------------------------


@pytest.mark.guarantee("graph-3")
def test_the_last_handle_frees_it(pool):
    promise = pool.promise(filled, 10, keep=True)
    kept = promise.value
    again = pool.promise(total, kept)
    assert again.value == 10 and not nothing_is_kept(pool)
    del kept
    assert not nothing_is_kept(pool), "the promise still has its handle"
    del promise
    wait_for(lambda: nothing_is_kept(pool))


@pytest.mark.guarantee("graph-3")
def test_it_is_freed_everywhere(pool):
    kept = pool.promise(filled, 100_000, keep=True).value
    for each in pool.drones:
        assert each.doit(total, kept) == 100_000
    assert all(each.value for each in pool.everywhere(on_shelf))
    with kept:
        pass
    wait_for(lambda: nothing_is_kept(pool))
    kept.release()
    for use in (
        lambda: kept.value,
        lambda: kept.nbytes,
        lambda: kept.drone,
        lambda: pool.doit(total, kept),
    ):
        with pytest.raises(ValueError, match="released"):
            use()
    assert "released" in repr(kept)


def test_a_call_under_way_has_what_it_was_given(pool, tmp_path):
    kept = pool.promise(filled, 100_000, keep=True).value
    go = str(tmp_path / "go")
    held = [each.promise(hold_until, go) for each in pool.drones]
    later = [
        pool.promise(total, kept),
        pool.promise(lambda: kept.sum()),
        pool.drones[0].promise(total, kept),
    ]
    kept.release()
    (tmp_path / "go").touch()
    assert [each.value for each in later] == [100_000] * 3
    assert all(each.value for each in held)
    wait_for(lambda: nothing_is_kept(pool))


def test_work_that_is_cancelled_or_fails_keeps_nothing(pool, tmp_path):
    assert isinstance(pool.promise(int, "x", keep=True).exception(), ValueError)
    go = str(tmp_path / "go")
    held = pool.promise(hold_until, go, keep=True)
    wait_for(held.running)
    held.cancel()
    queued = [pool.promise(filled, 10, keep=True) for _ in range(50)]
    for each in queued:
        each.cancel()
    del queued, each
    wait_for(lambda: nothing_is_kept(pool))


# -- made in a drone -------------------------------------------------------------------------------


def test_work_may_keep_several_values_itself(pool):
    odd_even = pool.doit(parts, 10, 2)
    assert [list(each.value) for each in odd_even] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert pool.doit(total, *odd_even) == 45
    assert pool.doit(here, *odd_even) == drone_of(pool, odd_even[0]).pid
    del odd_even
    wait_for(lambda: nothing_is_kept(pool))


def test_a_kept_value_with_handles_in_it_stays_where_it_is_and_says_so(pool):
    kept = pool.promise(parts, 10, 2, keep=True).value
    for refused in (
        lambda kept: kept.value,
        lambda kept: [drone.doit(len, kept) for drone in pool.drones],
    ):
        with pytest.raises(TypeError, match="contains the handle of another"):
            refused(kept)
    assert pool.doit(len, kept) == 2
    odd_even = pool.doit(list, kept)
    assert pool.doit(total, *odd_even) == 45
    del kept, odd_even
    wait_for(lambda: nothing_is_kept(pool))


def test_a_shuffle_between_drones(pool):
    rows = [pool.promise(parts, 100, 4) for _ in range(4)]
    columns = zip(*[each.value for each in rows], strict=True)
    assert [pool.doit(total, *column) for column in columns] == [
        4 * sum(range(k, 100, 4)) for k in range(4)
    ]
    del rows, columns
    wait_for(lambda: nothing_is_kept(pool))


@pytest.mark.guarantee("graph-3")
def test_handles_are_counted_across_images(pool):
    drone = pool.drones[0]
    drone.doit("import polycephaly as poly; one = poly.Kept([1, 2])")
    first, second = drone.doit("one"), drone.doit("one")
    assert first.value == second.value == drone.doit("one.value") == [1, 2]
    first.release()
    assert pool.doit(sum, second) == 3
    del second
    third = drone.doit("one")
    assert pool.doit(sum, third) == 3, "the drone has a handle of its own"
    drone.doit("del one")
    assert pool.doit(sum, third) == 3
    third.release()
    wait_for(lambda: nothing_is_kept(pool))


def test_a_handle_given_away_while_an_older_one_is_dropped_is_worth_something(pool):
    drone = pool.drones[0]
    drone.doit("import polycephaly as poly; one = poly.Kept([1, 2])")
    for _ in range(200):
        kept = drone.doit("one")
        answers = [pool.promise(sum, kept), pool.drones[1].promise(sum, kept)]
        del kept
        assert [each.value for each in answers] == [3, 3]


def test_handles_in_the_results_of_a_map(pool):
    handles = list(pool.map(lambda i: Kept([i]), range(500)))
    assert list(pool.map(sum, handles)) == list(range(500))
    del handles
    wait_for(lambda: nothing_is_kept(pool))


def test_a_handle_made_where_no_drone_runs_is_refused():
    with pytest.raises(RuntimeError, match=r"no drone: .*pool.share\(value\)"):
        Kept(3)


# -- bad input -------------------------------------------------------------------------------------


def test_a_handle_of_another_pool_is_refused_with_what_and_where(pool):
    kept = pool.promise(filled, 10, keep=True).value
    with poly.Pool(1, name="other") as other:
        with pytest.raises(
            TypeError, match=f"value of filled in pool-.* is kept in {kept.drone}.*a call of other"
        ) as e:
            other.doit(total, [kept])
        assert "while pickling the arguments of total: argument 0, a list" in str(e.value.__notes__)
        with pytest.raises(TypeError, match="a call of other"):
            other.doit(lambda: kept.sum())
        with pytest.raises(TypeError, match="a call of other"):
            list(other.map(total, [kept]))
    with pytest.raises(TypeError, match="was pickled outside a call"):
        pickle.dumps(kept)


def test_a_drones_own_handle_does_not_go_to_its_own_pools(pool):
    def nested():
        with poly.Pool(1, name="inner") as inner:
            return str(inner.promise(len, Kept([1])).exception())

    assert "was passed to a call of inner" in pool.doit(nested)


def test_a_served_pool_keeps_nothing_and_says_so(pool, tmp_path):
    card = str(tmp_path / "card.json")
    with poly.serve(pool, file=card), poly.connect(card) as remote:
        with pytest.raises(TypeError, match=r"served by another process.*without keep=True"):
            remote.promise(filled, 10, keep=True)
        with pytest.raises(LookupError, match="a pool of another process"):
            remote.doit(parts, 10, 2)
    wait_for(lambda: nothing_is_kept(pool))


# -- lost ------------------------------------------------------------------------------------------


@pytest.mark.guarantee("graph-3")
def test_when_its_drone_dies_the_value_is_lost(pool):
    kept = pool.promise(filled, 10, keep=True).value
    holder = drone_of(pool, kept)
    holder.kill()
    with pytest.raises(
        Lost, match=rf"the value of filled was lost: drone {holder.name} .*SIGKILL"
    ) as lost:
        _ = kept.value
    assert (
        isinstance(lost.value, poly.DroneDied)
        and lost.value.drone == holder.name
        and lost.value.exitcode == -9
    )
    assert (
        isinstance(lost.value.__cause__, poly.DroneDied)
        and kept.drone is None
        and "lost" in repr(kept)
    )
    for use in (lambda: pool.doit(total, kept), lambda: pool.doit(lambda: kept.sum())):
        with pytest.raises(Lost):
            use()


def test_what_others_asked_for_outlives_its_drone(pool):
    kept = pool.promise(filled, 100_000, keep=True).value
    assert (kept.value == 1).all()
    drone_of(pool, kept).kill()
    wait_for(lambda: kept.drone is None)
    assert (kept.value == 1).all() and pool.doit(total, kept) == 100_000


def test_what_was_given_with_retries_is_computed_again(pool):
    again = pool.options(retries=3)
    base = again.promise(filled, 1000, keep=True).value
    kept = again.promise(np.add, base, 1, keep=True).value
    del base
    for use in (lambda: kept.value.sum(), lambda: pool.doit(total, kept)):
        drone_of(pool, kept).kill()
        wait_for(lambda: kept.drone is None)
        assert use() == 2000


def test_retries_are_used_up(pool):
    kept = pool.options(retries=1).promise(filled, 10, keep=True).value
    for _ in range(2):
        drone_of(pool, kept).kill()
        wait_for(lambda: kept.drone is None)
        if _ == 0:
            assert pool.doit(total, kept) == 10
    with pytest.raises(Lost):
        _ = kept.value


def test_a_value_that_cannot_be_computed_again_says_why(pool, tmp_path):
    path = tmp_path / "input"
    path.write_text("3")
    kept = pool.options(retries=5).promise(lambda: int(path.read_text()), keep=True).value
    path.unlink()
    drone_of(pool, kept).kill()
    wait_for(lambda: kept.drone is None)
    with pytest.raises(Lost, match=r"computing it again failed: FileNotFoundError.*input") as lost:
        _ = kept.value
    assert isinstance(lost.value.__cause__, FileNotFoundError)


def test_the_time_that_a_call_may_take_holds_when_it_is_computed_again_too(pool, tmp_path, later):
    ran, never = tmp_path / "ran", tmp_path / "never"

    def first_at_once():
        append(ran, "ran")
        return 1 if len(lines(ran)) == 1 else hold_until(never)

    kept = pool.options(retries=1, timeout=1000).promise(first_at_once, keep=True).value
    drone_of(pool, kept).kill()
    wait_for(lambda: kept.drone is None)
    asked = pool.promise(here, kept)
    wait_for(lambda: len(lines(ran)) == 2)
    later(pool, 1000)
    with pytest.raises(Lost, match=r"computing it again failed: TimeoutError") as lost:
        asked.result(30)
    assert isinstance(lost.value.__cause__, TimeoutError) and len(lines(ran)) == 2


def test_drones_that_end_in_order_leave_what_they_keep(pool):
    kept, lock = (
        pool.promise(filled, 10, keep=True).value,
        pool.promise(threading.Lock, keep=True).value,
    )
    pool.refresh()
    assert (kept.value == 1).all() and pool.doit(total, kept) == 10
    wait_for(lambda: lock.drone is None)
    with pytest.raises(Lost, match="replaced") as lost:
        _ = lock.value
    assert isinstance(lost.value.__cause__, TypeError)
    with poly.Pool(1, max_tasks=2) as short:
        handles = [short.promise(filled, n, keep=True).value for n in range(7)]
        assert [each.value.size for each in handles] == list(range(7))


def test_what_a_message_was_to_bring_or_to_drop_is_said_again_where_it_did_not_arrive(pool):
    kept, dropped = (
        pool.promise(filled, 10, keep=True).value,
        pool.promise(filled, 20, keep=True).value,
    )
    assert (kept.value == 1).all()  # so it is packed
    (other,) = [each for each in pool.drones if each.name != kept.drone]
    handle = other._handle
    custody = kept._content
    number, nothing = dropped._content.number, []

    def lose():
        message = TaskBatch()
        handle._add_kept_values([custody], message)
        message.add(number, DROP, 2, b"")
        handle.drop = lambda *said: nothing.append(said)
        handle.undo_batch(message.frames())
        del handle.drop

    pool._dispatcher.reactor.post(lose)
    wait_for(lambda: nothing == [(number, 2)])
    assert handle not in custody.holders
    assert other.doit(total, kept) == 10


def test_a_drone_that_retires_waits_for_what_its_own_work_takes(pool, tmp_path):
    gate = str(tmp_path / "gate")
    kept = pool.promise(lambda: PackedSlowly(gate), keep=True).value
    (other,) = [each for each in pool.drones if each.name != kept.drone]
    by_hand = [poly.Promise() for _ in range(3)]
    work = [other.promise(str, kept), *(other.promise(abs, each) for each in by_hand)]
    pool.refresh()
    assert work[3].cancel() and not any(each.done() for each in work[:3])
    append(gate, "open")
    assert work[0].result(30) == "packed" and other.alive
    by_hand[0].set_result(-1)
    assert work[1].result(30) == 1 and other.alive
    by_hand[1].set_exception(KeyError("none"))
    assert isinstance(work[2].exception(30), KeyError)
    wait_for(lambda: not other.alive)


def test_a_drone_that_retires_ends_when_its_own_work_is_withdrawn(pool):
    lock = pool.promise(threading.Lock, keep=True).value
    (other,) = [each for each in pool.drones if each.name != lock.drone]
    refused, withdrawn = other.promise(id, lock), other.promise(abs, poly.Promise())
    pool.refresh()
    assert withdrawn.cancel()
    assert isinstance(
        refused.exception(30), (TypeError, Lost)
    )  # by then, who had the lock may have ended
    wait_for(lambda: not other.alive)


def test_after_the_pools_end_only_what_was_fetched_is_there():
    with poly.Pool(1) as pool:
        fetched, not_fetched = [pool.promise(filled, 100_000, keep=True).value for _ in range(2)]
        assert (fetched.value == 1).all()
    assert (fetched.value == 1).all()
    with pytest.raises(Lost, match=r"lost when pool-.* ended: read `value` before"):
        _ = not_fetched.value
    not_fetched.release()


def test_who_waits_for_a_value_as_the_pool_is_killed_is_told(tmp_path):
    pool = poly.Pool(1)
    kept = pool.promise(threading.Lock, keep=True).value
    with pytest.raises(RuntimeError), pool:
        held = pool.promise(hold_until, str(tmp_path / "go"))
        wait_for(held.running)
        waiting = pool.promise(here, kept)
        raise RuntimeError
    assert waiting.cancelled()
    with pytest.raises(Lost, match=r"lost when pool-.* ended"):
        _ = kept.value


def walk(pool, chance, given, steps):
    """Makes, combines, sends on, drops and fetches handles, and kills drones. How many were lost,
    of how many."""
    handles = []  # promises of them, with the sums that they are to have
    checked = lost = 0

    def check(promise, expected, how):
        nonlocal checked, lost
        checked += 1
        try:
            got = how(promise.value)
        except poly.DroneDied:  # or Lost, which is one
            lost += 1
        else:
            assert got == expected

    def fetched(kept):
        return kept.value.sum()

    for _ in range(steps):
        act = chance.random()
        if act < 0.4 or len(handles) < 2:
            n = chance.choice([3, 20_000])
            handles.append((given.promise(filled, n, n, keep=True), n * n))
        elif act < 0.6:
            (a, x), (b, y) = chance.sample(handles, 2)
            handles.append((given.promise(summed, a, b, keep=True), x + y))
        elif act < 0.75:
            handles.pop(chance.randrange(len(handles)))
        elif act < 0.9:
            check(
                *chance.choice(handles),
                chance.choice([fetched, lambda kept: given.doit(total, kept)]),
            )
        else:
            chance.choice(pool.drones).kill()
    for promise, expected in handles:
        check(promise, expected, fetched)
    return lost, checked


@pytest.mark.parametrize("retries", [0, 100])
@pytest.mark.slow
def test_killed_at_random_every_value_is_right_or_lost(retries):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with poly.Pool(3, output="discard") as pool:
        with ThreadPoolExecutor(2) as threads:
            walks = [
                threads.submit(
                    walk, pool, random.Random(seed + n), pool.options(retries=retries), 75
                )
                for n in range(2)
            ]
        lost, checked = (
            sum(counts) for counts in zip(*[each.result() for each in walks], strict=True)
        )
        del walks
        assert checked and not (retries and lost), (
            f"{lost} of {checked} lost, though all could be computed again"
        )
        arena = pool._dispatcher.supervisor.engine._arena

        def nothing_is_used():
            # The error of a promise holds the frames it went through, and `check` holds the
            # promise. The last errors may arrive, and with them such cycles, at any time.
            gc.collect()
            return nothing_is_kept(pool) and not arena.range_refs and arena.used() == 0

        wait_for(nothing_is_used)


def test_where_shared_memory_is_full_values_travel_as_bytes(monkeypatch):
    monkeypatch.setattr("polycephaly.engines.local.engine.shared_memory_ceiling", lambda: 0)
    with poly.Pool(2, output="discard") as full:
        kept = full.promise(filled, 100_000, keep=True).value
        with pytest.warns(RuntimeWarning, match="is sent through a socket"):
            assert [each.doit(total, kept) for each in full.drones] == [100_000] * 2
        assert (kept.value == 1).all()
        kept.release()
        wait_for(lambda: nothing_is_kept(full))


def test_what_is_waiting_for_a_busy_drone_is_counted_where_queues_have_a_limit(tmp_path):
    with poly.Pool(1, max_queued=2) as pool:
        kept = pool.promise(filled, 10, keep=True).value
        go = str(tmp_path / "go")
        held = pool.promise(hold_until, go)
        wait_for(held.running)
        waiting = [pool.promise(total, kept) for _ in range(2)]
        third = threading.Thread(target=lambda: waiting.append(pool.promise(total, kept)))
        third.start()
        wait_for(lambda: pool._dispatcher.backpressure)
        assert len(waiting) == 2, "the third caller waits for room"
        (tmp_path / "go").touch()
        third.join()
        assert [each.value for each in waiting] == [10] * 3


def test_a_function_that_captures_a_handle_waits_for_promises_as_any(pool):
    def calls(kept):
        def add(x, *more):
            return len(kept) + x + len(more)

        one, three = pool.promise(abs, -1), pool.promise(abs, -3)
        assert pool.promise(add, one).value == 4
        assert pool.promise(add, 5).value == 8
        assert pool.promise(add, x=one).value == 4
        assert pool.promise(add, one, [three]).value == 5
        assert pool.promise(add, one, pool.promise(filled, 100_000)).value == 5
        assert pool.promise(add, one, kept, three).value == 6
        assert poly.flow(add)(one).value == 4
        held = Promise()
        cancelled, failed = pool.promise(add, held), pool.promise(add, held)
        cancelled.cancel()
        held.set_exception(KeyError("x"))
        return cancelled, failed

    cancelled, failed = calls(pool.promise(list, range(3), keep=True).value)
    assert cancelled.cancelled() and isinstance(failed.exception(), KeyError)
    gc.collect()
    wait_for(lambda: nothing_is_kept(pool))  # they are held here, and hold nothing


def test_a_value_that_is_computed_again_has_the_resources_that_its_task_needs(tmp_path):
    path = str(tmp_path / "lines")

    def work():
        append(path, "begins")
        time.sleep(0.1)
        append(path, "ends")
        return 1

    with poly.Pool(2, resources={"db": 1}, output="discard") as pool:
        alone = pool.options(resources={"db": 1}, retries=3)
        kept = alone.promise(work, keep=True).value
        next(drone for drone in pool.drones if drone.name == kept.drone).kill()
        other = alone.promise(work)
        assert kept.value == other.value == 1
    assert lines(path) == ["begins", "ends"] * 3
