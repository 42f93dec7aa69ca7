"""What only an engine on a cluster has: its ends, its errors, its placement, values that pass the
controller by."""

import marshal
import math
import os
import signal
import sys
import threading
from pathlib import Path
from time import monotonic

import pytest
from engines import DIFFERENCES, on_ray, poly, pool_of_file
from faults import append, lines, wait_for
from scripts import Script, run_script

from polycephaly import green
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.ring import FORMAT, HEADER_BYTES, next_key
from polycephaly.wire.status_page import PAGE_BYTES

NUMBERS = 4_000_000


def make(size):
    return bytearray(size)


pool = pool_of_file(2, output="discard")


def answers_of(folder, text, *args, timeout):
    """What the script gave to `answer`, a line each, and what was printed beside. Ray's threads
    print of a lost node when they hear of it, in the middle of a script's own lines too."""
    answers = folder / "answers"
    done = run_script(text, *args, timeout=timeout, env={"ANSWERS": str(answers)})
    given = answers.read_text().splitlines() if answers.exists() else []
    return given, done.stdout + done.stderr


def gone(pid):
    return not os.path.exists(f"/proc/{pid}")


def test_every_known_difference_is_in_the_documentation():
    page = (Path(__file__).parents[1] / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert [each for each in DIFFERENCES if each not in page] == []


# -- where there is no Ray, or none that answers ---------------------------------------------------


def test_without_ray_one_line_names_the_extra():
    done = run_script("""
        import sys
        sys.modules["ray"] = None  # as if it were not installed
        import polycephaly as poly
        try:
            poly.Pool(2, engine="ray")
        except ImportError as error:
            print(error)
    """)
    assert "pip install 'ray>=2.40'" in done.stdout and done.stdout.count("\n") == 1, done.stderr


def test_an_engine_that_there_is_not_is_named():
    with pytest.raises(ValueError, match="'dask'"):
        poly.Pool(1, engine="dask")
    with pytest.raises(TypeError, match="num_cpus"):
        poly.Pool(1, num_cpus=2)


def test_a_cluster_that_does_not_answer_is_named_before_ray_tries():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    done = run_script(
        """
        import ray
        import polycephaly as poly
        ray.init = None  # which would try for minutes
        try:
            poly.Pool(1, engine="ray", address="127.0.0.1:1")
        except ConnectionError as error:
            print(error)
    """
    )
    assert "127.0.0.1:1" in done.stdout, done.stderr


@on_ray
def test_what_no_node_has_is_said_at_once_with_what_there_is():
    with pytest.raises(ValueError, match=r"unobtainium.*CPU"):
        poly.Pool(1, resources={"unobtainium": 1})
    with pytest.raises(ValueError, match="1,000,000 CPU fits into a node"):
        poly.Drone(num_cpus=1_000_000)
    with pytest.raises(ValueError, match=r"accelerator_type:H2000 fits into a node.*CPU"):
        poly.Drone(accelerator_type="H2000")
    with pytest.raises(ValueError, match=r"label_selector=.*mars.*ray.io/node-id="):
        poly.Drone(label_selector={"zone": "mars"})


@pytest.mark.parametrize(
    "wanted, fits",
    [
        ("a", True),
        ("b", False),
        ("!a", False),
        ("!b", True),
        ("in(a, b)", True),
        ("in(b)", False),
        ("!in(b,c)", True),
    ],
)
def test_labels_are_matched_as_ray_does_it(wanted, fits):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray.cluster import _matches

    assert _matches({"zone": "a"}, {"zone": wanted}) is fits
    assert _matches({}, {"zone": wanted}) is wanted.startswith("!")


@pytest.mark.parametrize(
    "name, there, amount, drones",
    [
        ("x", 17, 0.68, 25), ("x", 1, 0.3, 3), ("x", 0, 1, 0), ("x", 1, 0.00001, 10_000),
        ("memory", 1e12, 1e9, 1000), ("GPU", 2, 0.6, 2), ("GPU", 2, 0.5, 4), ("GPU", 8, 2, 4),
    ],
)  # fmt: skip
def test_amounts_are_counted_as_ray_does_it(name, there, amount, drones):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray.cluster import _count_fitting

    assert _count_fitting(name, there, amount) == drones


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_cluster_that_runs_on_this_machine_is_not_joined_unasked(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    answers, printed = answers_of(
        tmp_path,
        """
        import os
        os.environ.pop("RAY_ADDRESS", None)
        import ray
        import polycephaly as poly
        from faults import answer
        from benchmarks.scale import cluster

        def joined(**how):
            with poly.Pool(1, engine="ray", **how) as pool:
                pool.doit("1")
                joined = ray.get_runtime_context().gcs_address == address
            ray.shutdown()
            return joined

        with cluster(1, 1):
            address = ray.get_runtime_context().gcs_address
            ray.shutdown()
            answer(joined(), joined(address="auto"))
            os.environ["RAY_ADDRESS"] = address
            answer(joined())
    """,
        timeout=150,
    )
    assert answers == ["False True", "True"], printed


def test_ray_client_is_refused_with_the_cure():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    with pytest.raises(ValueError, match=r"ray://head:10001.*address='auto' or the HOST:PORT"):
        poly.Pool(1, engine="ray", address="ray://head:10001")


# -- placement -------------------------------------------------------------------------------------


@on_ray
def test_drones_take_what_they_are_said_to_take():
    import ray

    with poly.Pool(2, num_cpus=1.5) as pool:
        assert len({p.value for p in pool.everywhere(os.getpid)}) == 2
        wait_for(
            lambda: ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0) >= 3
        )


@on_ray
def test_a_runtime_environment_reaches_the_drones():
    with poly.Drone(runtime_env={"env_vars": {"POLY_TEST": "b"}}) as drone:
        assert drone.doit("import os; os.environ['POLY_TEST']") == "b"


class PlaceTaker:
    def ping(self):
        return True


@on_ray
def test_drones_for_which_there_is_no_room_are_told_of_replacements_too(monkeypatch, caplog):
    import ray

    from polycephaly.engines.ray.engine import RayEngine

    monkeypatch.setattr(tuning, "start_report_seconds", 0.2)
    other = ray.remote(num_cpus=1)(PlaceTaker)
    others = [other.remote() for _ in range(int(ray.cluster_resources()["CPU"]) - 1)]
    with poly.Pool(1, num_cpus=1) as pool:
        assert pool.doit(abs, -1) == 1 and ray.get([each.ping.remote() for each in others])
        others.append(other.remote())
        start = RayEngine.start

        def start_after_the_other(engine, *args):
            ray.get(others[-1].ping.remote())  # or Ray gives the place to either of them
            return start(engine, *args)

        monkeypatch.setattr(RayEngine, "start", start_after_the_other)
        pool.drones[0].kill()
        (replacement,) = wait_for(lambda: pool.drones)
        said = f"waits for {replacement.name}; the cluster has"
        wait_for(lambda: any(said in each.message for each in caplog.records))
        others.clear()  # Ray ends whom nobody has any more
        assert pool.doit(abs, -3) == 3


@on_ray
def test_a_drone_for_which_there_is_no_room_is_told_of_once_it_waits_so_long(monkeypatch, caplog):
    import ray

    monkeypatch.setattr(tuning, "start_report_seconds", 6.0)
    other = ray.remote(num_cpus=1)(PlaceTaker)
    others = [other.remote() for _ in range(int(ray.cluster_resources()["CPU"]) - 1)]
    ray.get([each.ping.remote() for each in others])

    def make_room_when_it_is_told():
        wait_for(lambda: any("still waits for " in each.message for each in caplog.records))
        seconds.append(monotonic() - began)
        others.clear()  # Ray ends whom nobody has any more

    began, seconds = monotonic(), []
    thread = threading.Thread(target=make_room_when_it_is_told)
    thread.start()
    with poly.Pool(2, num_cpus=1):  # the first has room
        thread.join()
    assert seconds[0] >= 6.0


@on_ray
def test_a_placement_group_without_room_is_said_at_once():
    import ray
    from ray.util import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"CPU": 1}, {"CPU": 0.5}])
    ray.get(group.ready())
    anywhere, second = (PlacementGroupSchedulingStrategy(group, index) for index in (-1, 1))
    with poly.Pool(1, num_cpus=1, scheduling_strategy=anywhere) as pool:
        assert pool.doit("1 + 1") == 2
    with pytest.raises(
        ValueError, match=r"2 drones of 1 CPU each.* placement group, which has: 1 CPU; 0\.5 CPU"
    ):
        poly.Pool(2, num_cpus=1, scheduling_strategy=anywhere)
    with pytest.raises(ValueError, match=r"no drone of 1 CPU fits .* bundle .*: 0\.5 CPU$"):
        poly.Drone(num_cpus=1, scheduling_strategy=second)
    with pytest.raises(ValueError, match="2 bundles, and none of index 2"):
        poly.Drone(num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, 2))
    remove_placement_group(group)
    wait_for(lambda: placement_group_table(group)["state"] == "REMOVED")
    with pytest.raises(ValueError, match=f"no placement group {group.id.hex()}"):
        poly.Drone(scheduling_strategy=anywhere)


@on_ray
@pytest.mark.parametrize(
    "wrong",
    [{"resources": {"disk": "a lot"}}, {"num_gpus": -1}, {"num_cpus": True}, {"memory": math.nan}],
)
def test_amounts_that_are_none_are_named(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}.* is a number from 0 on, not"):
        poly.Pool(1, **wrong)


@on_ray
def test_processors_and_devices_may_stand_among_resources():
    """Ray refuses them there."""
    assigned = "import ray; ray.get_runtime_context().get_assigned_resources()"
    with poly.Drone(resources={"CPU": 1}) as drone:
        assert drone.doit(assigned)["CPU"] == 1
    with poly.Drone(resources={"CPU": 1}, num_cpus=1) as drone:
        assert drone.doit(assigned)["CPU"] == 1
    with pytest.raises(ValueError, match="no drone of 1,000 GPU fits into a node"):
        poly.Pool(1, resources={"GPU": 1000})
    with pytest.raises(
        ValueError, match=r"num_cpus=2 and resources=\{'CPU': 1\} are the same option"
    ):
        poly.Pool(1, resources={"CPU": 1}, num_cpus=2)


def test_a_device_among_resources_is_a_device_to_ray():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray.cluster import _normalize_resources

    given = {"resources": {"GPU": 1, "disk": 2, "memory": 5}, "num_cpus": 3}
    assert _normalize_resources(given) == {
        "resources": {"disk": 2},
        "num_gpus": 1,
        "memory": 5,
        "num_cpus": 3,
    }
    assert _normalize_resources({"num_cpus": 3}) == {"num_cpus": 3}


@on_ray
def test_a_death_has_rays_own_error_for_its_cause():
    from ray.exceptions import RayActorError

    with poly.Pool(1, output="discard") as pool:
        died = pool.promise(os._exit, 1).exception()
    assert isinstance(died, poly.DroneDied)
    assert isinstance(died.__cause__, RayActorError)


# -- values that pass the controller by ------------------------------------------------------------


@on_ray
def test_an_object_reference_of_rays_travels(pool):
    import ray

    one, other = pool.drones
    ref = ray.put(list(range(9)))
    assert pool.doit(lambda refs: sum(ray.get(refs[0])), [ref]) == 36
    assert pool.doit(lambda: sum(ray.get(ref))) == 36
    one["ref"] = ref
    assert one.doit("import ray; sum(ray.get(ref))") == 36
    made = other.doit(lambda: {"made": ray.put(b"x" * 200_000)})["made"]
    assert len(ray.get(made)) == one.doit(lambda: len(ray.get(made))) == 200_000


@on_ray
def test_a_promise_as_an_argument_does_not_pass_through_the_controller(pool):
    one, other = pool.drones
    made = one.promise(make, NUMBERS)
    taken = other.promise(len, made)
    assert taken.value == NUMBERS
    assert made.exception() is None and "list" not in repr(made)  # nobody has opened it here
    assert len(made.value) == NUMBERS


@on_ray
def test_large_arrays_arrive_read_only_and_a_copy_can_be_written_into(pool):
    np = pytest.importorskip("numpy", reason="numpy is not installed")
    array = np.zeros(500_000)
    assert pool.doit(lambda a: (a.flags.writeable, a.copy().flags.writeable), array) == (
        False,
        True,
    )
    assert not pool.doit(np.zeros, 500_000).flags.writeable
    assert array.flags.writeable


@on_ray
def test_large_results_of_a_map_are_each_their_own(pool):
    for _ in range(3):
        assert [len(each) for each in pool.map(make, range(1_500_000, 1_500_024))] == [
            *range(1_500_000, 1_500_024)
        ]
        assert len(next(pool.map(make, [NUMBERS]))) == NUMBERS


# -- ends ------------------------------------------------------------------------------------------

OWNER = """
    import os, signal, subprocess, sys, time
    import polycephaly as poly

    def start_a_program():
        return os.getpid(), subprocess.Popen(["sleep", "1000"]).pid

    pool, drone = poly.Pool(2, engine="ray"), poly.Drone(engine="ray")
    pids = [drone.pid, *(pid for p in pool.everywhere(start_a_program) for pid in p.value)]
    pool.promise(time.sleep, 1000), pool.promise("while True: pass")
    print(*pids, flush=True)
    sys.stdin.read()
    {how}
"""


@on_ray
@pytest.mark.parametrize("how", ["1 / 0", "os._exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_nothing_is_left_of_a_controller_that_ends(how):
    with Script(OWNER.format(how=how)) as script:
        pids = [int(pid) for pid in script.read_line().split()]
        assert len(pids) == 5
        script.wait()
        wait_for(lambda: all(map(gone, pids)))


@on_ray
def test_ctrl_c_ends_the_wait_and_then_the_drones():
    with Script("""
        import polycephaly as poly
        with poly.Pool(1, engine="ray") as pool:
            print(pool.doit("import os; os.getpid()"), flush=True)
            pool.doit("import time; time.sleep(1000)")
    """) as script:
        pid = int(script.read_line())
        script.signal(signal.SIGINT)
        assert script.wait() != 0
        assert "KeyboardInterrupt" in script.process.stderr.read()
        wait_for(lambda: gone(pid))


async def sleep_long(path):
    append(path, "begun")
    await green.sleep(1000)


@on_ray
def test_the_death_of_a_drone_that_only_waits_for_what_it_overlaps_is_noticed(tmp_path):
    path = str(tmp_path / "begun")
    with poly.Pool(1, width=2, output="discard") as pool:
        tasks = [pool.promise(sleep_long, path) for _ in range(2)]
        wait_for(lambda: len(lines(path)) == 2)
        wait_for(lambda: pool.drones[0].pid)
        wait_for(
            lambda: not pool._dispatcher.handles[0].unanswered_calls
        )  # so that no answer is due
        os.kill(pool.drones[0].pid, signal.SIGKILL)
        assert [type(each.exception(30)) for each in tasks] == [poly.DroneDied] * 2


def drone_with_a_page(diary, lives):
    """A forked child that has begun work 7; it ends, or waits to be killed. Its pid, and its
    folder."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        folder = diary.open_folder()
        diary.ExitRecord(folder).page.mark_started(7)
        os.write(writes, folder.encode())
        while lives:
            signal.pause()
        os._exit(0)
    os.close(writes)
    folder = os.read(reads, 4096).decode()
    os.close(reads)
    return child, folder


def test_what_is_too_large_is_left_out_be_it_data_or_what_a_function_holds():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    done = run_script("""
        from polycephaly.wire.main_snapshot import take_snapshot

        large = bytes(17 << 20)
        small = 1

        def heavy(table=bytes(17 << 20)):
            return small

        def light():
            return small

        taken = take_snapshot()
        print(sorted(taken.left_out), taken.names[:1], "small" in taken.names)
        print({why.partition("(")[0] for why in taken.left_out.values()})
    """)
    first, second = done.stdout.splitlines()
    assert first == "['heavy', 'large'] ['light'] True", done.stderr
    assert second == "{'the value is too large to be copied to every drone '}"


@pytest.mark.guarantee("cluster-2")
def test_a_page_holds_what_no_acknowledged_report_has_brought(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray import exit_record as diary

    record = diary.ExitRecord(str(tmp_path))

    def kept():
        """As read after a death."""
        with open(tmp_path / "page", "rb") as file:
            memory = bytearray(file.read())
        unread = diary._unread(memoryview(memory)[PAGE_BYTES:])
        return "".join(text for (text,) in unread.values())

    def keep(text):
        record.keep(next_key() + marshal.dumps((text,), FORMAT))

    keep("a")
    keep("b")
    record.add_report(1)
    record.add_report(2)
    keep("c")
    record.acknowledge(0)
    assert kept() == "abc"
    record.acknowledge(1)
    assert kept() == "c"
    keep("d")
    record.acknowledge(2)
    assert kept() == "cd"
    keep("x" * 20_000)  # for which there is no room
    record.add_report(3)
    record.acknowledge(3)
    assert kept() == ""
    for _ in range(2000):  # it goes round
        keep("e" * 100)
        record.add_report(4)
        record.acknowledge(4)
    keep("f")
    assert kept() == "f"


@pytest.mark.guarantee("cluster-2")
def test_what_a_dead_drone_has_scribbled_over_its_ring_is_nothing(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray import exit_record as diary

    record = diary.ExitRecord(str(tmp_path))
    record.keep(next_key() + marshal.dumps(("a",), FORMAT))
    with open(tmp_path / "page", "rb") as file:
        memory = bytearray(file.read())
    memory[PAGE_BYTES + HEADER_BYTES + 3] ^= 1
    assert diary._unread(memoryview(memory)[PAGE_BYTES:]) == {}


def print_much(times):
    for _ in range(times):
        print("x" * ((1 << 20) - 1))
    sys.stdout.flush()
    file = os.fstat(1)
    return file.st_size >> 20, file.st_blocks * 512 >> 20


@on_ray
def test_what_was_printed_and_read_is_not_kept_on_the_node():
    with poly.Pool(1, output="discard") as pool:
        for _ in range(3):
            pool.doit(print_much, 20)
        size, kept = pool.doit(print_much, 1)
        assert size == 61 and kept <= 12


def test_of_a_dead_drones_output_is_told_what_is_there(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray import exit_record as diary

    with open(tmp_path / diary.OUT, "ab", buffering=0) as file:
        printed = diary.OutputFile(str(tmp_path), diary.OUT)
        lengths = []
        for _ in range(15):
            file.write(b"x" * (1 << 20))
            lengths.append(len(printed.read(-1)))
        assert lengths == [1 << 20] * 15 and not printed.has_more()
        file.write(b"y")
        assert printed.has_more() and (printed.read(10), printed.read(10)) == (b"y", b"")
    end = 15 << 20
    tail = diary._read_final_output(str(tmp_path), diary.OUT, 5)
    assert tail == b"x" * diary.MAX_FINAL_OUTPUT_BYTES  # not what is in a hole
    assert (
        diary._read_final_output(str(tmp_path), diary.OUT, end) == b"y"
        and diary._read_final_output(str(tmp_path), diary.OUT, end + 1) == b""
    )
    printed._file.close()


@pytest.mark.guarantee("cluster-2")
def test_what_a_dead_drone_has_left_is_not_swept_away_before_its_driver_reads_it(
    tmp_path, monkeypatch
):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray import exit_record as diary

    monkeypatch.setattr(diary, "_session_dir", lambda: str(tmp_path))
    child, folder = drone_with_a_page(diary, lives=False)
    os.waitpid(child, 0)
    own = diary.open_folder()  # of the next drone on that node
    remains = diary.read_exit_record(folder, 0, 0)
    assert remains is not None and remains.started == 7
    assert diary.read_exit_record(folder, 0, 0) is None  # then nobody can tell what had begun
    os.rmdir(own)


@pytest.mark.guarantee("cluster-2")
def test_a_drone_that_ray_has_lost_though_it_lives_runs_nothing_after_its_page_was_read(
    tmp_path, monkeypatch
):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    from polycephaly.engines.ray import exit_record as diary

    monkeypatch.setattr(diary, "_session_dir", lambda: str(tmp_path))
    child, folder = drone_with_a_page(diary, lives=True)
    remains = diary.read_exit_record(folder, 0, 0)
    assert os.waitpid(child, os.WNOHANG) == (child, signal.SIGKILL)
    assert remains is not None and remains.started == 7


@on_ray
def test_a_drone_is_killed_before_ray_could_kill_the_zygotes_of_its_own_pools(monkeypatch):
    import ray

    from polycephaly.engines.ray import engine as module

    calls = []
    monkeypatch.setattr(module, "kill_owner", lambda folder: calls.append("the drone, by us"))
    by_ray = ray.kill
    monkeypatch.setattr(ray, "kill", lambda actor: (calls.append("by Ray"), by_ray(actor)))
    drone = poly.Drone()
    drone.doit(abs, -1)
    waiting = drone.promise("import time; time.sleep(1000)")
    drone.kill()
    assert isinstance(waiting.exception(30), poly.DroneDied)
    assert calls[:2] == ["the drone, by us", "by Ray"]


@on_ray
def test_the_switch_has_room_for_more_drones_than_it_may_have_calls():
    import ray

    from polycephaly.engines.ray.switch import Switch

    switch = ray.remote(Switch).options(num_cpus=0, max_concurrency=2).remote()
    for number in range(4):
        waiting = switch.get_orders.remote(number)
        ray.get(switch.forget.remote(number), timeout=30)
        assert ray.get(waiting, timeout=30) == []
    ray.kill(switch)


@pytest.mark.ray
def test_a_pool_whose_ray_was_shut_down_rejects_its_work_and_starts_no_other_ray():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    done = run_script(
        """
        import os
        os.environ.pop("RAY_ADDRESS", None)
        import ray
        import polycephaly as poly
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=100 << 20,
        )
        with poly.Pool(1, engine="ray") as pool:
            print(pool.doit("1+1"))
            promise = pool.promise("import time; time.sleep(1000)")
            ray.shutdown()
            print("Ray was shut down" in str(promise.exception(30)))
        print(ray.is_initialized())
    """,
        timeout=100,
    )
    assert done.stdout.split() == ["2", "True", "False"], done.stdout + done.stderr


@pytest.mark.ray
def test_what_was_of_an_earlier_connection_to_ray_is_lost_and_nothing_else(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    answers, printed = answers_of(
        tmp_path,
        """
        import ray
        import polycephaly as poly
        from benchmarks.scale import cluster
        from faults import answer, wait_for

        def fate(act):
            try:
                return act()
            except Exception as error:
                return type(error).__name__, "was shut down" in str(error)

        with cluster(1, 4):
            address = ray.get_runtime_context().gcs_address
            first = poly.Pool(1, engine="ray")
            made, shared, small = (
                first.promise(bytes, 300_000), first.share(bytes(300_000)), first.share(7)
            )
            wait_for(made.done, 20)  # and nobody looks at it
            running = first.promise("import time; time.sleep(1000)")
            ray.shutdown()
            answer({fate(lambda: made.value), fate(lambda: shared.value)})
            answer(fate(lambda: first.share(bytes(300_000)))[1], ray.is_initialized(), small.value)
            ray.init(address, log_to_driver=False, logging_level="CRITICAL")
            with poly.Pool(1, engine="ray") as second:
                answer({
                    fate(second.promise(len, each).result)
                    for each in (made, shared, [made], [shared])
                })
                answer(second.doit(abs, small), second.doit(len, second.share(bytes(300_000))))
                answer({fate(lambda: first.promise("1").result()), fate(running.result)})
                first.shutdown()
                answer(second.doit("1+1"))
            third = poly.Pool(1, engine="ray")
            third.doit("1")
            ray.shutdown()
            ray.init(address, log_to_driver=False, logging_level="CRITICAL")
            third.shutdown()  # it does not know yet
    """,
        timeout=100,
    )
    assert answers == [
        "{('Lost', True)}",
        "True False 7",
        "{('Lost', True)}",
        "7 300000",
        "{('RuntimeError', True)}",
        "2",
    ], printed


@pytest.mark.ray
def test_a_message_that_ray_does_not_take_is_the_failure_of_its_work_alone(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    answers, printed = answers_of(
        tmp_path,
        """
        import os
        os.environ.pop("RAY_ADDRESS", None)
        import ray
        import polycephaly as poly
        from faults import answer
        # No disk for what does not fit into the store.
        full = {"local_fs_capacity_threshold": 0.0001}
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False,
            object_store_memory=80 << 20, _system_config=full,
        )
        with poly.Pool(1, engine="ray") as pool:
            large = pool.promise(len, bytes(150 << 20))
            answer(type(large.exception(40)).__name__)
            answer(pool.doit(len, "abc"), pool._dispatcher.handles[0].load)
        ray.shutdown()
    """,
        timeout=100,
    )
    assert answers == ["OutOfDiskError", "3 0.0"], printed


# -- the loss of a node ----------------------------------------------------------------------------


@pytest.mark.guarantee("cluster-2")
@pytest.mark.ray
def test_the_loss_of_a_node_rejects_what_it_ran_and_the_rest_is_done_once(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    answers, printed = answers_of(
        tmp_path,
        """
        import os, signal, sys, time
        import polycephaly as poly
        from benchmarks.scale import cluster, pool_of, processes
        from faults import answer, append, lines, wait_for

        def note(path, i):
            append(path, str(i))
            time.sleep(0.005)
            return i

        path = sys.argv[1]
        with cluster(2, 4) as nodes, pool_of(4) as pool:
            drones = {p.value for p in pool.everywhere(os.getpid)}
            work = [pool.promise(note, path, i) for i in range(600)]
            work[100].result()
            lost = processes(nodes[-1])
            for pid in lost:
                os.kill(pid, signal.SIGKILL)
            errors = [p.exception() for p in work]
            wait_for(lambda: len(pool.drones) == 4 and all(d.alive for d in pool.drones), 30)
            answer(
                len(drones & set(lost)), {p.value for p in pool.everywhere(os.getpid)} & set(lost)
            )
        died = {i for i, error in enumerate(errors) if isinstance(error, poly.DroneDied)}
        ran = list(map(int, lines(path)))
        answer(
            len(died) < 30,
            [e for e in errors if e is not None and not isinstance(e, poly.DroneDied)],
        )
        answer({*ran, *died} == set(range(600)), len(ran) == len(set(ran)))
    """,
        str(tmp_path / "ran"),
        timeout=100,
    )
    assert answers == ["2 set()", "True []", "True True"], printed


@pytest.mark.guarantee("cluster-3")
@pytest.mark.ray
@pytest.mark.timeout(180)
def test_values_that_lay_with_a_lost_node_are_computed_again_where_retries_allow_it(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    answers, printed = answers_of(
        tmp_path,
        """
        import os, signal
        import polycephaly as poly
        from benchmarks.scale import cluster, pool_of, processes
        from faults import answer, wait_for

        def make(n):
            return bytes([n]) * 300_000, os.getpid()

        def look(made):
            return made[0][0], len(made[0])

        with cluster(2, 4) as nodes, pool_of(4) as pool:
            again = [
                drone.options(retries=2).promise(make, n) for n, drone in enumerate(pool.drones)
            ]
            once = [drone.promise(make, n) for n, drone in enumerate(pool.drones)]
            # And nobody looks at them.
            wait_for(lambda: all(each.done() for each in [*again, *once]), 40)
            lost = processes(nodes[-1])
            for pid in lost:
                os.kill(pid, signal.SIGKILL)
            # What is given to a drone of the lost node is run by another.
            sure = pool.options(retries=3)
            answer([sure.doit(look, each) for each in again] == [(n, 300_000) for n in range(4)])
            answer([look(each.value) for each in again] == [(n, 300_000) for n in range(4)])
            fates = set()
            for each in once:
                try:
                    fates.add(each.value[1] in lost)
                except poly.Lost:
                    fates.add("lost")
            answer(fates == {False, "lost"})
            answer(
                {type(sure.promise(look, each).exception()).__name__ for each in once}
                == {"NoneType", "Lost"}
            )
    """,
        timeout=150,
    )
    assert answers == ["True"] * 4, printed


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_a_node_killed_in_the_middle_of_the_demo_changes_none_of_the_five_lists(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
    answers, printed = answers_of(
        tmp_path,
        """
        import contextlib, os, signal, threading, time
        import ray
        from benchmarks.scale import cluster, processes
        from faults import answer
        from polycephaly.demos.securities import experiments
        from polycephaly.demos.securities.server import loopback

        killed = []

        def runs_work(pid):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as told:
                return told.read().startswith("ray::DroneActor.handle_message")

        def kill_in_the_middle(node):
            while not any(map(runs_work, processes(node))):
                time.sleep(0.01)
            for pid in processes(node):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

        with (
            cluster(2, 4) as nodes,
            loopback(latency=0.15, host=ray.util.get_node_ip_address()) as site,
        ):
            everywhere = {"engine": "ray", "retries": 3, "scheduling_strategy": "SPREAD"}
            planned = experiments.plan([4], [], pool_options=everywhere)
            plan = [each for each in planned if each.name in ("sequential", "II")]
            outcomes = []
            for outcome in experiments.run(site, plan):
                outcomes.append(outcome)
                if not killed:
                    threading.Thread(
                        target=kill_in_the_middle, args=nodes[-1:], daemon=True
                    ).start()
        answer(len(killed) > 2, [(each.experiment.name, each.differing) for each in outcomes])
    """,
        timeout=150,
    )
    assert answers == ["True [('sequential', ()), ('II', ())]"], printed


@on_ray
def test_the_exit_handlers_of_a_drone_do_not_end_its_connection_to_ray():
    """They run in its last call, whose answer Ray has to carry."""
    with poly.Pool(1) as pool:
        code = "import atexit, ray; atexit._run_exitfuncs(); ray.is_initialized()"
        assert pool.doit(code) is True
        assert pool.doit(abs, -1) == 1
