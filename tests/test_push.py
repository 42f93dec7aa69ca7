"""`Pool.push`: names for all drones, and for those that start later."""

import os
import sys
import threading
from concurrent.futures.process import BrokenProcessPool

import pytest
from engines import local_only, on_each_engine, poly
from faults import exit_hard, hold_until, wait_for
from scripts import output_of

pytestmark = on_each_engine


class OnlyHere:
    """A value that can be pickled, and unpickled in this process only."""

    def __init__(self):
        self.pid = os.getpid()

    def __reduce__(self):
        return _only_in, (self.pid,)


def _only_in(pid):
    if os.getpid() != pid:
        raise LookupError("not on this machine")


def everywhere(pool, code):
    return [promise.result(60) for promise in pool.everywhere(code)]


@pytest.mark.guarantee("work-22")
def test_all_drones_have_the_names_and_replacements_have_them_too():
    with poly.Pool(2, output="discard") as pool:
        pool.push({"rate": 2, "names": ["a"]})
        pool.push({"rate": 3})
        assert everywhere(pool, "rate, names") == [(3, ["a"])] * 2
        pool.promise(exit_hard, 1).exception(60)
        pool.resize(3)
        assert everywhere(pool, "rate, names") == [(3, ["a"])] * 3
        pool.refresh()
        assert everywhere(pool, "rate, names") == [(3, ["a"])] * 3


@pytest.mark.guarantee("work-22")
def test_functions_of_main_find_them_as_globals():
    assert output_of("""
        import sys
        import polycephaly as poly
        rate = 1
        def times(n): return n * rate
        with poly.Pool(2, engine=sys.argv[1]) as pool:
            print(list(pool.map(times, [1, 2])))
            pool.push({"rate": 10, "late": 5})
            def later(n): return n * rate + late
            print(list(pool.map(times, [1, 2])), list(pool.map(later, [1, 2])))
            print(list(pool.map(lambda n: n + late, [1, 2])), rate)
    """, poly.engine).splitlines() == ["[1, 2]", "[10, 20] [15, 25]", "[6, 7] 1"]  # fmt: skip


def test_a_function_that_came_later_does_not_bring_what_was_pushed():
    assert output_of("""
        import sys, warnings
        import polycephaly as poly
        warnings.simplefilter("error")
        with poly.Pool(1, engine=sys.argv[1]) as pool:
            table = {0: bytes(20_000_000)}
            pool.push({"table": table})
            def size(key): return len(table[key])
            print(pool.doit(size, 0))
    """, poly.engine) == "20000000\n"  # fmt: skip


@pytest.mark.guarantee("work-22")
def test_calls_after_it_see_it_whatever_the_drones_do_meanwhile(tmp_path):
    """Short calls are sent ahead, and a drone may be busy: none overtakes."""
    with poly.Pool(2) as pool:
        pool.push({"n": -1})
        for n in range(30):
            pool.push({"n": n})
            assert all(p.result(60) == n for p in [pool.promise("n") for _ in range(50)])


@pytest.mark.guarantee("work-22")
def test_it_does_not_wait_for_calls_that_run(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1) as pool:
        running = pool.promise(hold_until, gate, started)
        wait_for(lambda: os.path.exists(started))
        pool.push({"n": 1})
        after = pool.promise("n")
        assert not (running.done() or after.done())
        with open(gate, "a") as file:
            file.write("open\n")
        assert (running.result(60), after.result(60)) == ("held", 1)


def test_pushes_of_several_threads_come_in_one_order():
    with poly.Pool(3) as pool:

        def push(first):
            for n in range(first, first + 5):
                pool.push({"n": n})

        threads = [threading.Thread(target=push, args=(100 * i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(set(everywhere(pool, "n"))) == 1


def test_with_coroutines_that_overlap_it_waits_for_its_turn():
    from polycephaly import green

    async def read(n):
        await green.sleep(0.001)
        return n, sys.modules["__main__"].pushed

    with poly.Pool(2, width=4) as pool:
        pool.push({"pushed": 1})
        first = [pool.promise(read, n) for n in range(20)]
        pool.push({"pushed": 2})
        second = [pool.promise(read, n) for n in range(20)]
        assert {p.result(60)[1] for p in first} <= {1, 2}
        assert {p.result(60)[1] for p in second} == {2}


@pytest.mark.guarantee("work-22")
def test_they_are_the_values_of_the_moment_and_come_after_the_initializer():
    def set_up():
        sys.modules["__main__"].n = "initializer"

    names = [1]
    with poly.Pool(1, initializer=set_up) as pool:
        assert pool.doit("n") == "initializer"
        pool.push({"n": names})
        names.append(2)
        assert pool.doit("n") == [1]
        pool.refresh()
        assert pool.doit("n") == [1]


def test_a_value_that_cannot_be_pickled_is_named_and_nothing_is_pushed():
    with poly.Pool(1) as pool:
        with pytest.raises(TypeError) as raised:
            pool.push({"fine": 1, "guard": threading.Lock()})
        assert any("guard, a lock" in note for note in raised.value.__notes__)
        assert isinstance(pool.promise("fine").exception(60), NameError)
        with pytest.raises(TypeError, match="is a string, not 3"):
            pool.push({3: 1})


def test_a_value_that_no_drone_can_load_is_the_callers_error():
    with poly.Pool(2) as pool:
        pool.push({"n": 1})
        with pytest.raises(LookupError, match="not on this machine"):
            pool.push({"n": 2, "value": OnlyHere()})
        assert everywhere(pool, "n") == [1, 1]
        pool.refresh()
        assert everywhere(pool, "n") == [1, 1]


def test_if_only_a_later_drone_finds_that_out_the_pool_breaks_with_the_reason(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1, output="discard") as pool:
        pool.promise(hold_until, gate, started)
        wait_for(lambda: os.path.exists(started))
        pool.push({"value": OnlyHere()})
        after = pool.promise("value")
        with open(gate, "a") as file:
            file.write("open\n")
        error = after.exception(60)
    assert isinstance(error, BrokenProcessPool)
    assert "the push of 'value' failed" in str(error) and "not on this machine" in str(error)


def test_promises_and_kept_values_are_refused_and_shared_ones_arrive():
    with poly.Pool(1) as pool:
        kept = pool.promise("7", keep=True).result(60)
        for value in (poly.Promise(), [pool.promise("1")], kept):
            with pytest.raises(TypeError, match="the values of 'n' contain a promise"):
                pool.push({"n": value})


@local_only
def test_a_shared_value_arrives_as_what_it_stands_for():
    with poly.Pool(2) as pool:
        shared = pool.share({"a": bytes(2_000_000)})
        pool.push({"table": shared})
        del shared
        pool.refresh()
        assert everywhere(pool, "len(table['a'])") == [2_000_000] * 2


def test_it_is_none_of_the_tasks_after_which_a_drone_is_replaced():
    with poly.Pool(1, max_tasks=2) as pool:
        pids = []
        for n in range(4):
            pool.push({"n": n})
            pids.append(pool.promise("import os; os.getpid()").result(60))
    assert [pids.count(each) for each in dict.fromkeys(pids)] == [2, 2]
    assert pool.status()["tasks_done"] == 4


def test_nothing_can_be_pushed_to_a_closed_pool():
    pool = poly.Pool(1)
    pool.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.push({"n": 1})


def test_a_callback_may_push():
    with poly.Pool(1) as pool:
        seen = []
        pool.promise("1").then(lambda n: (pool.push({"n": n}), seen.append(n))).result(60)
        wait_for(lambda: pool.promise("n").exception(60) is None)
        assert seen == [1]


@local_only
@pytest.mark.script
@pytest.mark.parametrize("how", ["start='spawn'", "engine='inline'"])
def test_other_drones_have_it_too(how):
    assert output_of(f"""
        import polycephaly as poly
        def times(n): return n * rate
        if __name__ == "__main__":
            with poly.Pool(2, {how}) as pool:
                pool.push({{"rate": 3}})
                print(list(pool.map(times, [1, 2])), pool.doit("rate"))
                pool.refresh()
                print(list(pool.map(times, [1, 2])), pool.doit("rate"))
    """) == "[3, 6] 3\n[3, 6] 3\n"  # fmt: skip


@local_only
def test_a_client_of_a_served_pool_is_told_that_it_cannot_push_yet(tmp_path):
    card = str(tmp_path / "pool.json")
    with poly.Pool(1) as pool, poly.serve(pool, file=card):
        pool.push({"n": 1})
        with poly.connect(card) as remote:
            assert remote.doit("n") == 1
            with pytest.raises(RuntimeError, match="cannot push names to all drones yet"):
                remote.push({"n": 2})


def test_the_cure_of_a_name_error_works():
    assert output_of("""
        import sys
        import polycephaly as poly
        with poly.Pool(1, engine=sys.argv[1]) as pool, poly.Drone(engine=sys.argv[1]) as drone:
            late = 1
            for place, name in ((pool, "pool"), (drone, "drone")):
                error = str(place.promise("late + 1").exception())
                _, found, cure = error.partition(", or ")
                print(cure)
                exec(cure.partition(" ")[0])
                print(place.doit("late + 1"))
    """, poly.engine).splitlines() == [
        "pool.push({'late':late}) sends this one name", "2",
        "drone.push({'late':late}) sends this one name", "2",
    ]  # fmt: skip
