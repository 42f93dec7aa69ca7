"""Bad input is refused at the call, with the value; a limit of the machine is named and nothing is
left."""

import inspect
import math
import os
import resource
import time
from concurrent.futures import Future
from fractions import Fraction

import numpy as np
import pytest
from engines import local_only, on_each_engine, poly
from scripts import output_of, run_script

import polycephaly
from polycephaly.pool.config import check_timeout
from polycephaly.runtime.system_limits import check_processes

pytestmark = on_each_engine


@pytest.fixture(scope="module")
def nonsense():
    return [5, None, [abs], {"a": 1}, b"1 + 1", 1.5, object()]


@pytest.mark.guarantee("work-19")
def test_work_that_is_neither_code_nor_callable_is_a_type_error_at_the_call(nonsense):
    with poly.Pool(1) as pool, poly.Drone() as drone:
        for work in nonsense:
            for call in (
                pool.promise,
                pool.doit,
                pool.submit,
                pool.everywhere,
                drone.promise,
                drone.doit,
            ):
                with pytest.raises(TypeError, match="code string, a callable"):
                    call(work)
            with pytest.raises(TypeError):
                poly.promise(work)
            with pytest.raises(TypeError):
                poly.doit(work)
        assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("work-19")
@pytest.mark.parametrize("number", [0, -1, -100])
def test_a_pool_of_no_drones_is_a_value_error_with_the_value(number):
    with pytest.raises(ValueError, match=str(number)):
        poly.Pool(number)


@pytest.mark.parametrize("number", [1.5, "2", True, [1]])
def test_a_number_of_drones_that_is_no_number_is_a_type_error(number):
    with pytest.raises(TypeError):
        poly.Pool(number)


@pytest.mark.guarantee("work-19")
@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"start": "forkserver"}, "forkserver"),
        ({"start": ""}, "start method"),
        ({"on_death": "weep"}, "weep"),
        ({"output": "paper"}, "paper"),
        ({"retries": -1}, "-1"),
        ({"max_tasks": 0}, "0"),
        ({"timeout": 0}, "0"),
        ({"timeout": -2.5}, "-2.5"),
    ],
)
def test_options_that_make_no_sense_are_value_errors_with_the_value(how, text):
    with pytest.raises(ValueError, match=text):
        poly.Pool(1, **how)


@pytest.mark.guarantee("work-19")
@pytest.mark.parametrize("name", ["timeout", "hang_timeout", "report_waiting"])
def test_seconds_that_are_too_many_for_a_clock_are_a_value_error(name):
    """The clock would refuse them later, in the thread that serves all."""
    for seconds in (10**400, Fraction(10**400), 10**5000, -(10**400)):
        with pytest.raises(ValueError, match=f"{name} must be less than 1e308"):
            poly.Pool(1, **{name: seconds})
    for allowed in (1e300, math.inf, Fraction(1, 3), 10**9):
        assert check_timeout(allowed) == float(allowed)


def test_seconds_and_counts_may_be_scalars_of_numpy():
    """The clocks, epoll and messages refused them later, in the thread that serves all."""
    two, soon, late = np.int64(2), np.float32(0.1), np.float32(100)
    with poly.Pool(
        np.int64(1), width=two, timeout=late, hang_timeout=late, report_waiting=soon,
        max_tasks=np.int64(50), max_queued=np.int64(50), max_memory=np.int64(1 << 40),
    ) as pool:  # fmt: skip
        again = poly.Retry(two, on=ZeroDivisionError, delay=np.float32(0.01), factor=np.float32(1))
        for retries in (two, again):
            limited = pool.options(timeout=soon, retries=retries, priority=two)
            with pytest.raises(TimeoutError):
                limited.promise(time.sleep, 1000).result(np.float32(100))
        with pytest.raises(ZeroDivisionError) as caught:
            pool.options(retries=again).doit(divmod, 1, 0)
        assert "failed 3 times; this is the last error" in caught.value.__notes__
        with pytest.raises(TimeoutError):
            list(pool.map(time.sleep, [1000], timeout=soon, chunksize=two, buffersize=two))
        assert len(pool.stacks(timeout=late)) == 1
        pool.resize(two)
        assert pool.status()["size"] == 2 and pool.doit(abs, -1) == 1


@pytest.mark.guarantee("work-19")
def test_seconds_that_are_not_a_number_are_a_value_error_at_the_call():
    with poly.Pool(1) as pool:
        for call in (
            lambda: poly.Pool(1, timeout=math.nan),
            lambda: poly.Retry(1, delay=np.float32("nan")),
            lambda: pool.options(timeout=math.nan),
            lambda: pool.map(abs, [1], timeout=math.nan),
            lambda: pool.stacks(timeout=np.float32("nan")),
            lambda: pool.promise(time.sleep, 0.1).result(math.nan),
        ):
            with pytest.raises(ValueError, match="nan"):
                call()


@pytest.mark.parametrize("how", [{"env": 5}, {"initializer": 5}, {"env": ["a"]}])
def test_options_of_the_wrong_type_are_type_errors(how):
    with pytest.raises(TypeError):
        poly.Pool(1, **how)
    with pytest.raises(TypeError):
        poly.Drone(**how)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("mp_context", "`start`"),
        ("max_tasks_per_child", "`max_tasks`"),
        ("workers", "`drones`"),
        ("size", "`drones`"),
    ],
)
def test_an_option_that_another_library_has_is_a_type_error_that_names_ours(theirs, ours):
    for make in (poly.Pool, poly.Drone):
        with pytest.raises(TypeError, match=f"instead of {theirs}, use {ours}"):
            make(**{theirs: 4})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("starmap", "map(f, *zip"), ("join", "shutdown()"), ("terminate", "or kill_workers()")],
)
def test_a_method_that_multiprocessing_has_is_an_error_that_names_ours(theirs, ours):
    with polycephaly.Pool(1) as pool:
        with pytest.raises(AttributeError, match=f"multiprocessing's {theirs}, use ") as caught:
            getattr(pool, theirs)
        assert ours in str(caught.value)
        assert not hasattr(pool, "nothing_at_all")
    assert "keep: 'bool' = False" in str(inspect.signature(polycephaly.Pool.promise))


def test_a_property_of_a_class_of_pools_raises_its_own_error():
    class Mine(polycephaly.Pool):
        @property
        def mine(self):
            return self.typo

    with Mine(1) as pool, pytest.raises(AttributeError, match="no attribute 'typo'"):
        _ = pool.mine


@local_only
def test_an_option_of_rays_is_a_type_error_that_names_its_engine():
    with pytest.raises(TypeError, match=r"unexpected num_gpus: .*engine='ray'"):
        poly.Pool(1, num_gpus=1)
    with pytest.raises(TypeError, match=r"unexpected drnes: the local engine has no such option$"):
        poly.Pool(drnes=1)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        poly.Pool(1, cwd=tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="file"):
        poly.Drone(cwd=str(tmp_path / "file"))


@pytest.mark.parametrize("cwd", [b"/tmp", 0, ["/tmp"]])
def test_a_directory_that_is_no_path_of_text_is_a_type_error(cwd):
    for make in (poly.Pool, poly.Drone):
        with pytest.raises(TypeError, match=r"cwd is a str or a pathlib\.Path, not "):
            make(cwd=cwd)


@pytest.mark.guarantee("work-19")
@pytest.mark.parametrize(
    ("variables", "kind", "message"),
    [
        ({"A=B": "1"}, ValueError, "has the name 'A=B': .* no = or NUL"),
        ({"": "1"}, ValueError, "has the name '': .* at least one character"),
        ({"A\0": "1"}, ValueError, r"has the name 'A\\x00': "),
        ({1: "1"}, TypeError, "has the name 1: names of variables are str"),
        ({"A": "secret\0"}, ValueError, r"\['A'\] has a NUL"),
        ({"A": "secret\ud800"}, ValueError, r"\['A'\] cannot be encoded: surrogates not allowed"),
        ({"A": None}, TypeError, r"\['A'\] is a NoneType, .* leave the variable out"),
        ({"A": 1}, TypeError, r"\['A'\] is an int, .* {'A': str\(\.\.\.\)}"),
    ],
)
def test_variables_that_no_process_can_have_are_refused_at_the_call(variables, kind, message):
    """The first drone died of them, or had the text of a None."""
    for make in (poly.Pool, poly.Drone):
        with pytest.raises(kind, match=message) as got:
            make(env=variables)
        assert "secret" not in str(got.value)
    with pytest.raises(kind, match=r"^env\(1\)"):
        poly.Pool(2, env=lambda index: variables if index else {})


@local_only
def test_more_drones_than_the_machine_can_have_are_refused_before_anything_is_made():
    def env(index):
        asked.append(index)
        return {}

    asked = []
    with pytest.raises(OSError, match="10,000,000 drones"):
        poly.Pool(10_000_000, env=env)
    assert not asked
    with poly.Pool(1, env=env) as pool:
        with pytest.raises(OSError, match="10,000,000 drones"):
            pool.resize(10**7)
        assert asked == [0] and pool.doit(abs, -1) == 1


@local_only
def test_the_number_of_processes_that_the_kernel_can_have_is_named():
    check_processes(1000)
    with pytest.raises(OSError, match=r"10,000,000 drones .* \(kernel.pid_max\)"):
        check_processes(10_000_000)


def test_an_env_callable_that_gives_no_mapping_is_a_type_error_that_says_which_drones():
    with pytest.raises(TypeError, match=r"env\(1\) returned None, not a mapping"):
        poly.Pool(2, env=lambda index: None if index else {"A": "0"})


def test_an_env_callable_that_fails_raises_its_error_and_leaves_nothing():
    def env(index):
        return {"A": str(1 // (1 - index))}

    with pytest.raises(ZeroDivisionError):
        poly.Pool(3, env=env)


@pytest.mark.guarantee("work-19")
def test_work_on_a_released_drone_or_closed_pool_is_a_runtime_error():
    drone, pool = poly.Drone(), poly.Pool(1)
    kept = pool.drones[0]
    drone.release()
    pool.shutdown()
    for call in (drone.doit, drone.promise, pool.doit, pool.submit, kept.doit, kept.promise):
        with pytest.raises(RuntimeError):
            call(abs, 1)
    with pytest.raises(RuntimeError):
        drone["x"]
    with pytest.raises(RuntimeError):
        drone["x"] = 1


@local_only
def test_a_file_descriptor_limit_is_named_and_everything_started_ended():
    done = run_script("""
        import os, resource
        import polycephaly as poly
        from faults import wait_for
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        before = len(os.listdir("/proc/self/fd"))
        try:
            poly.Pool(200)
        except OSError as error:
            print("file descriptor" in str(error) and "RLIMIT_NOFILE" in str(error))
        # The reactor's thread closes its own.
        wait_for(lambda: len(os.listdir("/proc/self/fd")) == before)
        with poly.Pool(2) as pool:
            print(pool.doit(abs, -1))
    """)
    assert done.stdout == "True\n1\n", done.stderr


@local_only
def test_a_file_size_limit_too_low_for_a_drone_is_named():
    done = run_script("""
        import resource
        import polycephaly as poly
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        try:
            poly.Pool(1)
        except OSError as error:
            print("file size limit" in str(error) and "RLIMIT_FSIZE" in str(error))
    """)
    assert done.stdout == "True\n", done.stderr


@local_only
def test_descriptors_that_run_out_while_drones_start_are_named_too():
    done = run_script("""
        import os, resource
        import polycephaly as poly
        with poly.Pool(1) as pool: pool.doit(abs, -1)
        used = len(os.listdir("/proc/self/fd"))
        outcomes = set()
        for room in range(0, 60, 2):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + room, 4096))
            try:
                with poly.Pool(6) as pool:
                    outcomes.add(pool.doit(abs, -1))
            except OSError as error:
                outcomes.add("named" if "file descriptor limit" in str(error) else repr(error))
            except BaseException as error:
                outcomes.add(repr(error))
        print(sorted(map(str, outcomes)))
    """)
    assert done.stdout == "['1', 'named']\n", done.stderr
    assert done.returncode == 0


@pytest.mark.guarantee("death-9")
@local_only
@pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root to run as a user that the process limit counts"
)
def test_a_process_limit_is_named_and_everything_started_ended(tmp_path):
    done = run_script("""
        import os, resource
        from concurrent.futures.process import BrokenProcessPool
        import polycephaly as poly
        # That user may not read them.
        import polycephaly.pool.pool, polycephaly.engines.local.engine
        os.setgroups([]); os.setgid(54321); os.setuid(54321)
        resource.setrlimit(resource.RLIMIT_NPROC, (12, 12))
        import tempfile; tempfile.tempdir = "/tmp"
        try:
            with poly.Pool(30) as pool:  # begins with the first drone
                while True:
                    pool.submit(os.getpid).result()
        except (OSError, BrokenProcessPool) as error:
            print("process limit" in str(error) and "RLIMIT_NPROC" in str(error), error)
    """)
    assert done.stdout.startswith("True"), (done.stdout, done.stderr)


@local_only
def test_an_environment_too_large_to_hand_over_is_named():
    with pytest.raises((ValueError, OSError), match="env"):
        poly.Pool(1, env={"A": "x" * 1_000_000})


@local_only
def test_limits_of_this_process_are_untouched():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with poly.Pool(1):
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_map_takes_no_code_string():
    with poly.Pool(1) as pool, pytest.raises(TypeError, match="code string"):
        pool.map("x", [1])


@pytest.mark.parametrize(
    "call",
    [
        lambda pool: pool.options(timeout="3"),
        lambda pool: pool.map(abs, [1], timeout="3"),
        lambda pool: poly.Pool(1, timeout="3"),
        lambda pool: poly.Pool(1, hang_timeout="3"),
        lambda pool: poly.Pool(1, initializer="3"),
        lambda pool: poly.serve("3"),
        lambda pool: poly.connect(3),
    ],
)
def test_what_is_of_the_wrong_type_is_named(call):
    with poly.Pool(1) as pool, pytest.raises(TypeError, match=r"not (by )?'?3"):
        call(pool)


@pytest.mark.guarantee("death-9")
@local_only("it is of the local engine")
@pytest.mark.skipif(
    os.getuid() != 0, reason="takes the right to become another user, for whom the limit counts"
)
def test_a_process_limit_that_has_no_room_for_zeromq_is_named():
    assert (
        output_of("""
        import ctypes, os, resource, tempfile
        import polycephaly as poly
        # What the other user may not read.
        import polycephaly.pool.pool, polycephaly.engines.local.engine, polycephaly.server.server
        tempfile.tempdir = tempfile.mkdtemp(dir="/tmp")  # which the other user may enter
        user = 100_000 + os.getpid()  # who has no other processes
        os.chown(tempfile.tempdir, user, user)
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        # PR_SET_DUMPABLE: or it could not read its own /proc.
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
        with poly.Pool(1) as pool:
            pool.doit(abs, -1)
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))  # not of the drones, which are there
            try:
                poly.serve(pool, file=f"{tempfile.tempdir}/card")
            except OSError as error:
                print("RLIMIT_NPROC" in str(error), "ZeroMQ" in str(error))
            print(pool.doit(abs, -2))
        print(os.listdir(tempfile.tempdir))
        os.rmdir(tempfile.tempdir)
    """)
        == "True True\n2\n[]\n"
    )


@pytest.mark.guarantee("death-9")
@local_only
def test_zeromq_is_not_started_without_room_for_its_descriptors():
    """libzmq would abort the process."""
    assert (
        output_of("""
        import contextlib, os, resource, zmq
        from polycephaly.wire.endpoint import open_socket
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, used + 4))
        try:
            open_socket(contextlib.ExitStack(), zmq.ROUTER, {})
        except OSError as error:
            print("RLIMIT_NOFILE" in str(error), "ZeroMQ" in str(error), "drone" in str(error))
    """)
        == "True True False\n"
    )


def test_a_number_of_drones_given_twice_is_refused():
    with pytest.raises(TypeError, match="drones=2 and max_workers=3 are the same: give one"):
        poly.Pool(2, max_workers=3)
    with pytest.raises(ValueError, match="drones must be at least 1, not 0"):
        poly.Pool(max_workers=0)
    with poly.Pool(max_workers=2) as pool:
        assert len(pool.drones) == 2


@local_only
@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]"])
def test_a_connection_file_is_refused_an_address_that_names_no_host(tmp_path, host):
    with poly.Pool(1) as pool:
        with pytest.raises(ValueError, match="would be of no use to other hosts: give this host's"):
            poly.serve(pool, f"tcp://{host}:0", file=tmp_path / "pool.json")
        assert not (tmp_path / "pool.json").exists()


def test_a_refused_value_is_shown_in_a_line():
    promises = [Future() for _ in range(3000)]
    for refuse in (
        lambda: polycephaly.gather(promises),
        lambda: polycephaly.Graph(promises),
        lambda: polycephaly.Retry(promises),
        lambda: polycephaly.green.spawn(promises),
        lambda: polycephaly.green.run(polycephaly.green.select, promises),
    ):
        with pytest.raises(TypeError, match=r"not \[<Future at .*, \.\.\.\]") as told:
            refuse()
        assert len(str(told.value)) < 700
    with pytest.raises(TypeError, match="use gather\\(\\*promises\\)"):
        polycephaly.gather(promises)
