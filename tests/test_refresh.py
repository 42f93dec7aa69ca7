"""`pool.refresh()` takes a new snapshot; without it, drones are of the old one and say so."""

import os
import threading
from unittest import mock

import pytest
from census import children
from engines import NO_FORK, local_only, on_each_engine, poly, rounds
from faults import act_without_room, append, hold_until, lines, wait_for
from scripts import output_of, run_script

pytestmark = on_each_engine


@pytest.mark.guarantee("work-1", "work-21")
def test_drones_are_of_the_snapshot_until_refreshed():
    assert (
        output_of(
            """
        import sys
        import polycephaly as poly
        table = [1]
        with poly.Pool(2, engine=sys.argv[1]) as pool:
            table.append(2)
            late = "late"
            print(pool.doit("table"))
            pool.refresh()
            print(pool.doit("table"), pool.doit("late"))
            print([p.value for p in pool.everywhere("table")])
    """,
            poly.engine,
        )
        == "[1]\n[1, 2] late\n[[1, 2], [1, 2]]\n"
    )


@pytest.mark.guarantee("work-2")
def test_a_name_of_after_the_snapshot_is_an_error_that_names_the_cure():
    assert output_of("""
        import sys
        import polycephaly as poly
        with poly.Pool(1, engine=sys.argv[1]) as pool, poly.Drone(engine=sys.argv[1]) as drone:
            late = 1
            for place in (pool, drone):
                for work in ("late + 1", "never"):
                    error = place.promise(work).exception()
                    print(type(error).__name__, error.name, "snapshot" in str(error),
                          "pool.refresh()" in str(error), "new Drone" in str(error))
    """, poly.engine).splitlines() == [
        "NameError late True True False", "NameError never False False False",
        "NameError late True True True", "NameError never False False False",
    ]  # fmt: skip


@pytest.mark.guarantee("work-1")
@local_only(NO_FORK)
def test_each_lone_drone_is_of_the_image_as_it_is_at_that_moment():
    assert (
        output_of("""
        import polycephaly as poly
        for n in range(3):
            with poly.Drone() as drone:
                print(drone.doit("n"), poly.doit("n"))
    """)
        == "0 0\n1 1\n2 2\n"
    )


@pytest.mark.guarantee("death-5", "work-1")
@local_only(NO_FORK)
def test_replacements_are_of_the_pools_snapshot_not_of_now():
    done = run_script("""
        import os, polycephaly as poly
        n = 1
        with poly.Pool(1, output="discard") as pool:
            n = 2
            pool.promise(os._exit, 1).exception()
            print(pool.doit("n"))
    """)
    assert done.stdout == "1\n", done.stderr


@pytest.mark.guarantee("work-21")
def test_running_work_is_finished_by_the_old_drones_and_waiting_work_done_by_the_new(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(2) as pool:
        running = [pool.promise(hold_until, gate, started) for _ in range(2)]
        wait_for(lambda: len(lines(started)) == 2)
        old = {int(pid) for pid in lines(started)}
        waiting = [pool.promise(os.getpid) for _ in range(5)]
        pool.refresh()
        assert not old & {p.result(30) for p in waiting}
        assert not any(p.done() for p in running)
        append(gate, "open")
        assert [p.result(30) for p in running] == ["held", "held"]
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in old))
        assert len(pool.drones) == 2


@pytest.mark.slow
def test_work_goes_on_through_many_refreshes():
    with poly.Pool(2) as pool:
        work = []
        for i in rounds(10):
            work += [pool.promise(abs, -i) for _ in range(100)]
            pool.refresh()
        assert [p.result(30) for p in work] == [i for i in rounds(10) for _ in range(100)]


@local_only(NO_FORK)
def test_functions_defined_before_the_refresh_go_by_reference_after_it():
    assert (
        output_of("""
        import polycephaly as poly
        with poly.Pool(1) as pool:
            big = list(range(50_000))
            def look(i): return big[i]
            first = pool.promise(look, 3)
            print(first.value)
            pool.refresh()
            print(pool.doit(look, 4))
            big[4] = "changed here"
            print(pool.doit(look, 4))
    """)
        == "3\n4\n4\n"
    )


def test_old_snapshots_leave_no_process_and_no_descriptor():
    with poly.Pool(1) as pool:
        pool.refresh()
        assert pool.doit(abs, -1) == 1
        before = len(children()), len(os.listdir("/proc/self/fd"))
        for _ in rounds(10):
            pool.refresh()
            assert pool.doit(abs, -1) == 1
        wait_for(lambda: (len(children()), len(os.listdir("/proc/self/fd"))) <= before)


def test_refreshes_from_several_threads_all_return():
    with poly.Pool(2) as pool:
        threads = [threading.Thread(target=pool.refresh) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert pool.doit(abs, -1) == 1


@local_only
def test_a_name_below_the_pool_in_a_module_is_an_error_that_names_the_cure(tmp_path):
    (tmp_path / "halfway.py").write_text(
        "import polycephaly as poly\npool = poly.Pool(1)\ndef later(n): return n + 1\n"
    )
    assert output_of(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import halfway
        with halfway.pool as pool:
            error = pool.promise(halfway.later, 1).exception()
            print(type(error).__name__, "pool.refresh() takes a new snapshot" in str(error))
            print("make the pool below the definition" in str(error))
            pool.refresh()
            print(pool.doit(halfway.later, 1))
    """) == ("AttributeError True\nTrue\n2\n")


@local_only
def test_a_program_that_has_become_another_user_keeps_its_old_drones():
    """New drones could not enter the directory of the first user, and would break the pool."""
    with poly.Pool(1) as pool:
        drone = pool.doit(os.getpid)
        with mock.patch("os.geteuid", return_value=os.geteuid() + 65534):
            for call in (pool.refresh, poly.Pool):
                with pytest.raises(RuntimeError, match=r"become user \d+ since .* shut down first"):
                    call()
        assert pool.doit(os.getpid) == drone
        pool.refresh()
        assert pool.doit(os.getpid) != drone


@pytest.mark.guarantee("work-2")
def test_a_key_or_attribute_of_after_the_snapshot_is_an_error_that_names_the_cure():
    assert output_of("""
        import sys
        import polycephaly as poly
        class Frame(dict):
            def __getattr__(self, name):
                if name in self: return self[name]
                raise AttributeError(f"'Frame' object has no attribute {name!r}", name=name)
        table, frame, other = {"a": 1}, Frame(), {"b": 1}
        def look(name):
            return table[name]
        def look_elsewhere():
            return other["a"]
        def read(): return frame.late
        with poly.Pool(1, engine=sys.argv[1]) as pool:
            table["late"] = frame["late"] = 1
            for work in ((look, "late"), (read,), ("table['late'] + 1",), (look_elsewhere,),
                         (look, "no")):
                error = pool.promise(*work).exception()
                print(type(error).__name__, *error.args[:1],
                      *(each.partition(",")[0] for each in getattr(error, "__notes__", ())))
                assert all("pool.refresh()" in note for note in getattr(error, "__notes__", ()))
    """, poly.engine).splitlines() == [
        "KeyError late the controller process has table['late']",
        "AttributeError 'Frame' object has no attribute 'late' "
        "the controller process has frame.late",
        "KeyError late the controller process has table['late']",
        "KeyError a",
        "KeyError no",
    ]  # fmt: skip


def test_it_waits_for_the_room_of_drones_that_are_about_to_end(monkeypatch):
    seen = []
    with poly.Pool(2, output="discard") as pool:

        def refresh():
            pool.refresh()
            seen.append(len(pool.drones))

        act_without_room(pool, monkeypatch, refresh)
    assert seen == [2]
