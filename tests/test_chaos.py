"""Chaos and soak in their short forms; memory, descriptors and disks that run out; consumers and
peers that are slow.

In full length: `python tests/chaos.py`, `python tests/soak.py`.
"""

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import pytest
from faults import (
    FAULTS,
    Killer,
    append,
    exit_hard,
    fill_disk,
    hold_until,
    limit,
    limit_descriptors,
    limit_memory,
    small_disk,
    take_all_descriptors,
    take_memory,
    wait_for,
)
from scripts import Script, run_script

import polycephaly as poly

MIB = 1 << 20
SOON = 60.0  # seconds


def sleep(seconds, i):
    time.sleep(seconds)
    return i


def write_to(path):
    with open(path, "w") as file:
        file.write("x" * 100_000)


def pids(pool):
    return {drone.pid for drone in pool.drones}


@pytest.fixture
def full_disk(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    with ExitStack() as ends:
        try:
            path = ends.enter_context(small_disk(folder))
        except OSError as error:
            pytest.skip(f"no file system of our own: {error}")
        with pytest.raises(OSError, match="No space"):
            fill_disk(os.path.join(path, "filling"))
        yield path


# -- short forms of the long runs ------------------------------------------------------------------


def run_main(module, *args):
    done = run_script(
        f"import sys, {module}\nsys.exit({module}.main(sys.argv[1:]))", *args, timeout=50
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_all_is_accounted_for_while_drones_are_killed():
    run_main(
        "chaos", "--minutes", "0.14", "--tasks", "400", "--seed", str(random.randrange(1 << 32))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        "tasks",
        "arrays --scale 0.005",
        "pools --scale 0.015",
        "lambdas shared",
        "kept maps",
        "clients --clients 20",
        "results --results 20",
    ],
)
def test_nothing_grows(parts):
    slack = "8" if parts.startswith(("clients", "results")) else "96"
    run_main(
        "soak", "--scale", "0.01", "--samples", "20", "--slack", slack, "--only", *parts.split()
    )


# -- the killer itself -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_each_fault_is_survived(fault):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    with poly.Pool(2, retries=1000, output="discard") as pool:
        before, done = pids(pool), []
        with Killer(
            pool, seconds=0.03, faults=(fault,), hold=0.03, seed=seed, done=lambda: len(done)
        ) as killer:
            while killer.did[fault] < 10:
                for i, promise in enumerate([pool.promise(sleep, 0.002, i) for i in range(50)]):
                    done.append(promise.result(SOON))
                    assert done[-1] == i
        assert set(killer.did) == {fault}
        assert (pids(pool) == before) == (fault == "stop and continue")


def test_a_stopped_drone_goes_on_when_the_block_has_ended():
    with poly.Pool(1) as pool:
        with Killer(pool, seconds=0.01, faults=("stop and continue",), hold=1000) as killer:
            wait_for(lambda: killer.did)
            promise = pool.promise(abs, -1)
        assert promise.result(SOON) == 1


# -- exhausted memory ------------------------------------------------------------------------------


def check_neighbours(pool, work, *args):
    """Runs `work` among others on drones that stay what they are; gives its error."""
    before = pids(pool)
    first = [pool.promise(abs, -i) for i in range(50)]
    promise = pool.promise(work, *args)
    last = [pool.promise(abs, -i) for i in range(50)]
    error = promise.exception(SOON)
    assert [p.result(SOON) for p in first + last] == [*range(50), *range(50)]
    assert pids(pool) == before
    return error


def give_text(mib):
    return "\xe9" * (mib * MIB)  # two bytes each in a pickle


def length_of(thing):
    return len(thing)


@pytest.fixture(scope="module")
def large():
    return np.ones(200 * MIB, np.int8)


def test_memory_that_runs_out_in_a_drone_is_the_error_of_what_took_it():
    with poly.Pool(2, initializer=limit_memory, initargs=(64 * MIB,)) as pool:
        for _ in range(5):
            assert isinstance(check_neighbours(pool, take_memory, 1000 * MIB), MemoryError)
        assert pool.doit(take_memory, 10 * MIB) == 10 * MIB


def test_a_result_for_whose_pickle_there_is_no_memory_is_an_error():
    with poly.Pool(2, initializer=limit_memory, initargs=(64 * MIB,)) as pool:
        for _ in range(3):
            assert isinstance(check_neighbours(pool, give_text, 40), MemoryError)
        assert len(pool.doit(give_text, 5)) == 5 * MIB


def test_an_argument_for_which_there_are_no_addresses_is_an_error(large):
    with poly.Pool(2, initializer=limit_memory, initargs=(64 * MIB,)) as pool:
        for _ in range(3):
            error = check_neighbours(pool, length_of, large)
            assert isinstance(error, MemoryError) or getattr(error, "errno", 0) == errno.ENOMEM, (
                repr(error)
            )
        assert pool.doit(length_of, large[:MIB]) == MIB


def take_all_memory(path):
    """And holds it for as long as that file is not there."""
    held, size = [], MIB
    while size > 64:
        try:
            held.append(bytearray(size))
        except MemoryError:
            size //= 2
    while True:
        try:
            if os.path.exists(path):
                return len(held) > 0
            time.sleep(0.002)
        except MemoryError:  # the drone's own threads need some now and then
            continue


@pytest.mark.xfail(
    sys.version_info[:3] == (3, 15, 0),
    reason="CPython 3.15.0 itself crashes where memory is out",
    strict=False,
)
def test_while_a_task_holds_all_the_memory_that_its_drone_may_have_others_go_on(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(2, initializer=limit_memory, initargs=(48 * MIB,)) as pool:
        holding = pool.promise(take_all_memory, gate)
        wait_for(holding.running)
        mine = [pool.promise(length_of, b"x" * 30_000) for _ in range(50)]
        assert [p.result(SOON) for p in mine] == [30_000] * 50
        append(gate, "open")
        assert holding.result(SOON)
        assert [p.result(SOON) for p in pool.everywhere(abs, -1)] == [1, 1]


def test_an_initializer_that_leaves_no_memory_is_no_hang():
    with poly.Pool(1, initializer=limit_memory, initargs=(0,), output="discard") as pool:
        error = pool.promise(take_memory, 100 * MIB).exception(30)
        assert isinstance(error, MemoryError | BrokenProcessPool)


# -- exhausted descriptors -------------------------------------------------------------------------


def leak_descriptors():
    leaked.append(os.open(os.devnull, os.O_RDONLY))
    return len(leaked)


leaked = []


def test_descriptors_that_run_out_in_a_drone_are_the_error_of_what_opens_more():
    with poly.Pool(2, initializer=limit_descriptors, initargs=(10,)) as pool:
        for _ in range(3):
            error = check_neighbours(pool, take_all_descriptors)
            assert isinstance(error, OSError) and error.errno == errno.EMFILE
        assert pool.doit("open('/dev/null').close()") is None


def test_a_drone_without_descriptors_takes_and_gives_what_it_is_given():
    with poly.Pool(1, initializer=limit_descriptors, initargs=(10,)) as pool:
        with pytest.raises(OSError, match="Too many open files"):
            while pool.doit(leak_descriptors):
                pass
        before = pids(pool)
        assert isinstance(pool.promise(open, os.devnull).exception(SOON), OSError)
        sent = np.arange(100_000)
        for _ in range(20):
            assert (pool.doit(np.negative, sent) == -sent).all()
            assert len(pool.doit(bytes, 3 * MIB)) == 3 * MIB
        assert [p.value for p in [pool.promise(abs, -i) for i in range(1000)]] == list(range(1000))
        assert pids(pool) == before


def test_a_result_for_which_a_drone_has_neither_shared_memory_nor_descriptors_harms_no_other():
    with poly.Pool(2, initializer=limit_descriptors, initargs=(10,), output="discard") as pool:
        pool.doit(abs, -1)

        def give():
            limit("FSIZE", 1000)
            while True:
                leaked.append(os.open(os.devnull, os.O_RDONLY))

        assert [p.exception(SOON).errno for p in pool.everywhere(give)] == [errno.EMFILE] * 2
        results = [pool.promise(bytes, MIB) for _ in range(4)]
        others = [pool.promise(abs, -i) for i in range(100)]
        for each in results:
            error = each.exception(SOON)
            assert error is None or isinstance(error, poly.DroneDied | OSError | MemoryError), repr(
                error
            )
        assert [p.result(SOON) for p in others] == list(range(100))


def test_a_dead_drone_that_cannot_be_replaced_for_want_of_descriptors_is_told_by_that_name(
    tmp_path,
):
    text = """
        import os, sys
        import polycephaly as poly
        from faults import exit_hard, hold_until, limit_descriptors
        def die_when(path):
            hold_until(path)
            exit_hard(3)
        with poly.Pool(1, output="discard") as pool:
            pool.doit(abs, -1)
            limit_descriptors(0)
            died = pool.promise(die_when, sys.argv[1])
            others = [pool.promise(abs, -i) for i in range(100)]
            os.mkdir(sys.argv[1])  # which takes no descriptor
            print(type(died.exception(60)).__name__)
            print({str(p.exception(60)) for p in others})
    """
    done = run_script(text, str(tmp_path / "go"))
    assert done.stdout.startswith("DroneDied\n") and "RLIMIT_NOFILE" in done.stdout, (
        done.stdout + done.stderr
    )


# -- full disks ------------------------------------------------------------------------------------


def test_a_full_disk_is_the_error_of_what_writes(full_disk):
    with poly.Pool(2) as pool:
        for _ in range(3):
            error = check_neighbours(pool, write_to, os.path.join(full_disk, "file"))
            assert isinstance(error, OSError) and error.errno == errno.ENOSPC


def test_a_working_directory_on_a_full_disk_harms_nothing(full_disk):
    with poly.Pool(2, cwd=full_disk) as pool:
        error = check_neighbours(pool, write_to, "file")
        assert isinstance(error, OSError) and error.errno == errno.ENOSPC
        sent = np.arange(100_000)
        assert (pool.doit(np.negative, sent) == -sent).all()


def test_a_temporary_directory_on_a_full_disk_harms_nothing_or_is_told(full_disk, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", full_disk)
    try:
        with poly.Pool(2) as pool:
            assert pool.doit(abs, -1) == 1
            assert isinstance(pool.promise(exit_hard, 3).exception(SOON), poly.DroneDied)
            assert len(pool.doit(bytes, 3 * MIB)) == 3 * MIB
    except OSError as error:
        assert error.errno == errno.ENOSPC
    assert os.listdir(full_disk) == ["filling"]


@pytest.mark.parametrize("descriptor", [1, 2])
def test_a_full_disk_behind_a_drones_stream_is_the_error_of_what_prints(descriptor):
    def redirect():
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)

    def say():
        print("x", file=sys.stdout if descriptor == 1 else sys.stderr, flush=True)

    with poly.Pool(2, initializer=redirect) as pool:
        error = check_neighbours(pool, say)
        assert isinstance(error, OSError) and error.errno == errno.ENOSPC
        assert len(pool.doit(bytes, 3 * MIB)) == 3 * MIB


def test_a_drone_that_may_write_no_files_sends_its_arrays_all_the_same(tmp_path):
    sent = np.arange(100_000)
    with (
        poly.Pool(2, initializer=limit, initargs=("FSIZE", 1000)) as pool,
        pytest.warns(RuntimeWarning, match="room"),
    ):
        for _ in range(5):
            assert (pool.doit(np.negative, sent) == -sent).all()
            error = check_neighbours(pool, write_to, str(tmp_path / "file"))
            assert isinstance(error, OSError) and error.errno == errno.EFBIG


def test_a_controller_whose_stdout_is_on_a_full_disk_goes_on():
    done = run_script("""
        import os, sys, polycephaly as poly
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        with poly.Pool(2) as pool:
            for _ in range(3): pool.doit(print, "x")
            print(pool.doit(abs, -1), file=sys.stderr)
        os._exit(0)
    """)
    assert done.stderr == "1\n"


def test_a_full_dev_shm_is_nothing_to_us(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import numpy as np, polycephaly as poly
        from faults import fill_disk, small_disk
        if __name__ == "__main__":
            with small_disk("/dev/shm"):
                try:
                    fill_disk("/dev/shm/filling")
                except OSError as error:
                    print(error.strerror, flush=True)
                for start in ("fork", "spawn"):
                    with (
                        poly.Pool(2, start=start) as pool,
                        pool.share(np.arange(1_000_000)) as shared,
                    ):
                        print(
                            pool.doit(np.sum, shared), len(pool.doit(bytes, 3_000_000)), flush=True
                        )
    """)
    )
    tests = os.path.dirname(os.path.abspath(__file__))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.path.dirname(tests)])}
    try:
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
            pytest.skip("no mounts of our own")
    except FileNotFoundError:
        pytest.skip("no unshare")
    # A mount of its own name space: nobody else sees it.
    command = ["unshare", "-m", sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=30)
    assert done.stdout == "No space left on device\n" + "499999500000 3000000\n" * 2, (
        done.stdout + done.stderr
    )


# -- slow consumers, slow peers --------------------------------------------------------------------


def talk(n):
    for i in range(n):
        print(i, "x" * 1000)
    return n


def test_an_output_callable_that_is_slow_gets_every_line_in_order():
    heard = {}

    def slow(line):
        time.sleep(0.0005)
        heard.setdefault((line.drone, line.stream), []).append(int(line.text.split()[0]))

    with poly.Pool(2, output=slow) as pool:
        promises = [pool.promise(talk, 500) for _ in range(2)]
        assert [p.result(SOON) for p in promises] == [500, 500]
    told = [i for some in heard.values() for i in some]
    assert sorted(told) == sorted([*range(500), *range(500)])
    assert all(b == a + 1 or b == 0 for some in heard.values() for a, b in pairwise(some))


def test_a_slow_callback_delays_others_and_loses_none():
    called = []

    def slow(promise):
        time.sleep(0.002)
        called.append(promise.value)

    with poly.Pool(2) as pool:
        promises = [pool.promise(abs, -i) for i in range(300)]
        for each in promises:
            each.add_done_callback(slow)
        assert [p.result(SOON) for p in promises] == list(range(300))
        wait_for(lambda: len(called) == 300)
    assert sorted(called) == list(range(300))


def test_results_that_are_fetched_late_are_all_there(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(2) as pool:
        first = [pool.promise(hold_until, gate) for _ in range(2)]
        promises = [
            pool.promise(bytes, size)
            for size in (0, 10_000, 60_000, 100_000, MIB)
            for _ in range(100)
        ]
        append(gate, "open")
        wait_for(promises[-1].done)  # nobody waits for it
        assert [len(p.result(SOON)) for p in promises] == [
            size for size in (0, 10_000, 60_000, 100_000, MIB) for _ in range(100)
        ]
        assert [p.value for p in first] == ["held", "held"]


def test_a_drone_that_does_not_read_for_a_while_gets_all_when_it_does():
    with poly.Pool(1) as pool:
        (drone,) = pool.drones
        pool.doit(length_of, b"")
        os.kill(drone.pid, signal.SIGSTOP)
        sizes = [random.randrange(70_000) for _ in range(500)]
        promises = [drone.promise(length_of, b"x" * size) for size in sizes]
        time.sleep(0.2)  # it is sent as much as its socket takes, and more
        os.kill(drone.pid, signal.SIGCONT)
        assert [p.result(SOON) for p in promises] == sizes


@pytest.mark.slow
def test_a_controller_that_does_not_read_for_a_while_gets_all_when_it_does():
    with Script("""
        import os, polycephaly as poly
        with poly.Pool(2) as pool:
            pool.doit(bytes, 1)
            sizes = [(i * 7919) % 40_000 for i in range(20_000)]
            promises = [pool.promise(bytes, size) for size in sizes]
            print("under way", flush=True)
            print([len(p.result(30)) for p in promises] == sizes)
    """) as script:
        script.read_until("under way")
        for _ in range(5):
            script.signal(signal.SIGSTOP)
            time.sleep(0.2)
            script.signal(signal.SIGCONT)
            time.sleep(0.05)
        assert script.read_line() == "True"
        assert script.wait() == 0


def test_a_program_whose_stdout_is_not_read_for_a_while_loses_no_line():
    with Script("""
        import polycephaly as poly
        def talk(n):
            for i in range(n): print(i, "x" * 1000)
            return n
        with poly.Pool(2, name="p") as pool:
            print("up", flush=True)
            print([p.result(30) for p in [pool.promise(talk, 400) for _ in range(2)]], flush=True)
    """) as script:
        script.read_until("up")
        time.sleep(0.5)  # all buffers are full
        told = []
        while not (line := script.read_line()).startswith("[400"):
            told.append(int(line.split()[1]))
        assert sorted(told) == sorted([*range(400), *range(400)])
        assert script.wait() == 0


def test_many_threads_with_slow_consumers_of_maps_get_all():
    wrong = []

    def consume(pool, n):
        for i, value in enumerate(pool.map(abs, range(0, -2000, -1))):
            if i % 200 == n:
                time.sleep(0.02)
            if value != i:
                wrong.append((n, i, value))

    with poly.Pool(2) as pool:
        threads = [threading.Thread(target=consume, args=(pool, n)) for n in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong


# -- the control thread ----------------------------------------------------------------------------


def use_up_descriptors():
    while True:
        leaked.append(os.open(os.devnull, os.O_RDONLY))


def let_the_control_thread_find_a_full_socket_once():
    from polycephaly.wire.message_socket import MessageSocket

    real, times = MessageSocket._send_packet, []

    def send_packet(self, packet):
        if threading.current_thread().name == "polycephaly-control" and not times:
            times.append(1)
            return False
        return real(self, packet)

    MessageSocket._send_packet = send_packet


def short_or_long(i):
    if i == 1:
        time.sleep(0.1)
    return i


def test_what_the_control_thread_could_not_send_is_not_lost():
    with poly.Pool(1, initializer=limit_descriptors, initargs=(10,), output="discard") as pool:
        pool.doit(let_the_control_thread_find_a_full_socket_once)
        assert pool.promise(use_up_descriptors).exception(SOON).errno == errno.EMFILE
        asked = [(-1, pool.promise(short_or_long, -1)) for _ in range(300)]
        for _, each in asked:
            each.exception(SOON)
        asked += [(i, pool.promise(short_or_long, i)) for i in (-1, 0, 1, 2, 3)]
        assert [each.result(SOON) for _, each in asked] == [i for i, _ in asked]
        assert pool.promise(abs, -1).result(SOON) == 1
