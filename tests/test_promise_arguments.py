"""A promise given as an argument is resolved first; its work runs when the last of its inputs is
there."""

import operator
import os
import sys
import threading

import pytest
from engines import on_each_engine, poly, pool_of_file
from faults import append, hold_until, lines, wait_for

from polycephaly import Promise

pytestmark = on_each_engine


pool = pool_of_file(2)


@pytest.mark.guarantee("promise-8")
def test_a_promises_value_takes_its_place(pool):
    a, b = pool.promise(pow, 2, 3), pool.promise(pow, 3, 2)
    assert pool.promise(operator.add, a, b).value == 17
    assert pool.promise(int, "ff", base=pool.promise(pow, 4, 2)).value == 255
    assert pool.promise(lambda x, y=0: (x, y), a, y=a).value == (8, 8)


def test_chains_and_trees_of_promises_are_computed(pool):
    p = pool.promise(abs, 0)
    for _ in range(50):
        p = pool.promise(operator.add, p, 1)
    assert p.value == 50
    level = [pool.promise(abs, -i) for i in range(64)]
    while len(level) > 1:
        level = [
            pool.promise(operator.add, a, b) for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    assert level[0].value == sum(range(64))


@pytest.mark.guarantee("promise-8")
def test_work_starts_only_when_its_last_input_is_there(pool, tmp_path):
    ran = str(tmp_path / "ran")
    inputs = [Promise() for _ in range(3)]
    p = pool.promise(lambda path, *values: (append(path, "ran"), values)[1], ran, *inputs)
    for i in (2, 0):
        inputs[i].set_result(i)
    assert pool.doit(abs, -1) == 1 and not lines(ran) and not p.done()
    inputs[1].set_result(1)
    assert p.value == (0, 1, 2) and len(lines(ran)) == 1


def test_waiting_for_inputs_holds_no_drone(tmp_path):
    with poly.Pool(1) as pool:
        late = Promise()
        waiting = [pool.promise(abs, late) for _ in range(20)]
        assert pool.doit(abs, -5) == 5
        late.set_result(-3)
        assert [p.value for p in waiting] == [3] * 20


@pytest.mark.guarantee("promise-8")
def test_a_rejected_input_rejects_with_its_error_and_the_work_never_runs(pool, tmp_path):
    ran = str(tmp_path / "ran")
    bad = pool.promise("1 / 0")
    p = pool.promise(append, ran, bad)
    assert isinstance(p.exception(), ZeroDivisionError)
    assert isinstance(pool.promise(abs, p).exception(), ZeroDivisionError)
    never = Promise()
    assert isinstance(pool.promise(operator.add, never, bad).exception(30), ZeroDivisionError)
    assert not lines(ran)


def test_a_cancelled_input_rejects(pool):
    late = Promise()
    p = pool.promise(abs, late)
    late.cancel()
    assert isinstance(p.exception(30), BaseException)


def test_cancelling_work_that_waits_for_inputs(pool, tmp_path):
    ran = str(tmp_path / "ran")
    late = Promise()
    p = pool.promise(append, ran, late)
    assert p.cancel() and p.cancelled()
    late.set_result("x")
    assert pool.doit(abs, -1) == 1 and not lines(ran) and late.value == "x"


@pytest.mark.parametrize("ended", ["cancelled", "rejected"])
def test_a_promise_that_stays_pending_does_not_keep_all_that_waited_for_it_once(pool, ended):
    late = Promise()
    stays = []
    for i in range(300):
        stays.append(pool.promise(operator.add, late, i))
        for _ in range(5):
            other = Promise()
            p = pool.promise(operator.add, late, [other])
            p.cancel() if ended == "cancelled" else other.set_exception(ValueError())
    assert len(late._hooks) < 700
    for each in stays[50:]:
        each.cancel()
    assert len(late._hooks) < 150
    late.set_result(1)
    assert [each.value for each in stays[:50]] == list(range(1, 51))


def test_other_arguments_are_captured_at_the_call_not_when_the_input_comes(pool):
    late, names = Promise(), ["then"]
    p = pool.promise(lambda a, b: (a, b), names, late)
    names[0] = "now"
    late.set_result(1)
    assert p.value == (["then"], 1)


def test_promises_of_other_pools_and_drones_are_inputs_too(pool):
    with poly.Drone() as drone:
        assert pool.promise(abs, drone.promise("-4")).value == 4
        assert drone.promise(abs, pool.promise(operator.neg, 3)).value == 3
        assert (
            pool.promise(max, poly.gather(pool.promise(abs, 1), drone.promise(abs, 9))).value == 9
        )


def test_an_inputs_value_that_does_not_pickle_rejects_and_says_so(pool):
    p = Promise()
    p.set_result(threading.Lock())
    error = pool.promise(str, p).exception(30)
    assert isinstance(error, TypeError) and any("promise" in note for note in error.__notes__)


def test_a_closed_pool_still_does_the_work_whose_inputs_come_late():
    pool = poly.Pool(1)
    late = Promise()
    p = pool.promise(abs, late)
    pool.shutdown(wait=False)
    late.set_result(-2)
    assert p.result(30) == 2
    pool.shutdown()


def test_work_with_inputs_survives_the_death_of_the_drone_it_was_queued_on(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1, output="discard") as pool:
        holder = pool.promise(hold_until, gate, started)
        wait_for(lambda: lines(started))
        p = pool.promise(operator.add, pool.promise(abs, -1), 1)
        os.kill(int(lines(started)[0]), 9)
        assert p.result(30) == 2 and holder.exception() is not None


def test_many_inputs_settled_by_many_threads_run_the_work_once(pool, tmp_path):
    ran = str(tmp_path / "ran")
    for k in range(20):
        inputs = [Promise() for _ in range(8)]
        p = pool.promise(lambda path, *v: (append(path, "x"), sum(v))[1], ran, *inputs)
        threads = [threading.Thread(target=each.set_result, args=[1]) for each in inputs]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert p.result(30) == 8 and len(lines(ran)) == k + 1


def test_two_inputs_settled_at_the_same_moment_run_the_work_once(pool, tmp_path):
    count = 300
    firsts, seconds = ([poly.Promise() for _ in range(count)] for _ in range(2))
    calls = [
        pool.promise(noted_sum, str(tmp_path / "ran"), *each)
        for each in zip(firsts, seconds, strict=True)
    ]
    gate = threading.Barrier(2)

    def settle(promises):
        for i, p in enumerate(promises):
            if i % 10 == 0:
                gate.wait()
            p.set_result(i)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=settle, args=(each,)) for each in (firsts, seconds)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert [p.result(30) for p in calls] == [2 * i for i in range(count)]
    assert len((tmp_path / "ran").read_text()) == count


def noted_sum(path, a, b):
    with open(path, "a") as file:
        file.write("x")
    return a + b


def test_a_value_whose_pickling_ends_the_interpreter_rejects_the_call():
    main = os.getpid()

    class Odd:
        def __reduce__(self):
            if os.getpid() == main:
                raise SystemExit
            return Odd, ()

    with poly.Pool(1) as pool:
        odd = pool.promise(Odd)
        assert isinstance(odd.value, Odd)  # so it must be pickled again
        assert isinstance(pool.promise(id, odd).exception(60), SystemExit)
