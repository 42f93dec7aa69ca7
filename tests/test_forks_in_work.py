"""A child that work forks has nothing of its drone's: it ends with the code that forked it, its
exit status its own."""

import atexit
import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

import polycephaly as poly
from polycephaly import green

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")

ENDS = {
    "returns": 0,
    "returns what cannot be pickled": 0,
    "sys.exit(3)": 3,
    "sys.exit('text')": 1,
    "raises": 1,
}


def ends(how):
    if how == "sys.exit(3)":
        sys.exit(3)
    if how == "sys.exit('text')":
        sys.exit("text")
    if how == "raises":
        raise ValueError("in the child")
    return threading.Lock() if how == "returns what cannot be pickled" else "of the child"


def status_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def forks(how, *_):
    pid = os.fork()
    return status_of(pid) if pid else ends(how)


def forks_with_terminal(how):
    pid, terminal = os.forkpty()
    if pid == 0:
        return ends(how)
    try:
        return status_of(pid)
    finally:
        os.close(terminal)


async def in_coroutine(how):
    return forks(how)


async def in_bound_thread(how):
    return await green.spawn(in_coroutine, how, bound=True)


async def in_call(how):
    return await green.call(forks, how)


async def in_long_call(how):
    return await green.call_long(forks, how)


async def in_plain_function(how):
    return await green.spawn(forks, how)


class ForksWhenPickled:
    def __init__(self, how):
        self.how = how

    def __reduce__(self):
        pid = os.fork()
        if pid == 0:
            ends(self.how)
        return int, (str(status_of(pid)),)


def in_pickling(how):
    return ForksWhenPickled(how)


WORK = [
    forks,
    forks_with_terminal,
    in_coroutine,
    in_bound_thread,
    in_call,
    in_long_call,
    in_plain_function,
]


@pytest.fixture(params=[1, 3], ids=["width 1", "width 3"], scope="module")
def pool(request):
    with poly.Pool(1, width=request.param, output="discard") as pool:
        yield pool


@pytest.mark.guarantee("work-5")
@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("work", WORK)
def test_a_forked_child_ends_with_the_status_of_its_own_end_and_the_drone_goes_on(pool, work, how):
    drone = pool.doit(os.getpid)
    assert pool.promise(work, how).result(60) == ENDS[how]
    assert pool.submit(forks, how, ["by itself"]).result(60) == ENDS[how]
    assert [each.result(60) for each in [pool.submit(abs, -i) for i in range(50)]] == list(
        range(50)
    )
    assert pool.doit(os.getpid) == drone


@pytest.mark.parametrize("how", ["returns", "sys.exit(3)"])
def test_a_child_forked_where_a_result_is_pickled_ends_too(pool, how):
    assert pool.promise(in_pickling, how).result(60) == ENDS[how]
    assert pool.doit(abs, -1) == 1


@pytest.mark.parametrize("how", ENDS)
def test_a_call_of_a_map_that_forks_is_answered_once_and_its_child_runs_no_other(
    pool, how, tmp_path
):
    ran = tmp_path / "ran"

    def call(i):
        with open(ran, "a") as file:
            file.write(f"{i}\n")
        return forks(how) if i == 2 else i

    assert list(pool.map(call, range(8))) == [0, 1, ENDS[how], 3, 4, 5, 6, 7]
    assert sorted(ran.read_text().split()) == [str(i) for i in range(8)]


def test_a_code_string_that_forks(pool):
    assert (
        pool.doit("import os, sys\npid = os.fork()\npid or sys.exit(7)\nos.waitpid(pid, 0)[1] >> 8")
        == 7
    )


def test_a_traceback_of_a_child_is_printed_and_comes_home():
    printed = []
    with poly.Pool(1, output=printed.append) as pool:
        assert pool.submit(forks, "raises").result(60) == 1
        assert pool.submit(forks, "sys.exit('text')").result(60) == 1
    told = [each.text for each in printed]
    assert "ValueError: in the child" in told and "text" in told


def test_a_child_that_goes_on_beside_its_drone_says_nothing_in_its_name():
    """The drone answers hundreds of calls while the child waits, and the child ends when it is told
    to."""
    with poly.Drone() as drone:
        drone.doit(goes_on, "child")
        assert [each.value for each in [drone.promise(pow, i, 2) for i in range(300)]] == [
            i * i for i in range(300)
        ]
        assert drone.doit(ends_now) == 5
        assert drone.doit(abs, -1) == 1


def goes_on(_):
    global child, gate
    reader, gate = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(gate)
        os.read(reader, 1)
        sys.exit(5)
    os.close(reader)


def ends_now():
    os.close(gate)
    return status_of(child)


def lanes():
    """Sockets of the kind that a drone speaks with its controller by."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as each:
            found += [name] if each.type == socket.SOCK_SEQPACKET else []
    return len(found)


def lanes_of_child():
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, str(lanes()).encode())
        os._exit(0)
    os.close(writer)
    os.wait()
    with open(reader) as file:
        return lanes(), int(file.read())


@pytest.mark.guarantee("work-5")
def test_a_child_has_no_connection_of_its_drones():
    with poly.Pool(1) as pool:
        assert pool.doit(lanes_of_child) == (2, 0)


def writes(path, text):
    with open(path, "a") as file:
        file.write(text)


def handlers_run(path):
    atexit.register(writes, path, "the drone's ")
    pid = os.fork()
    if pid == 0:
        atexit.register(writes, path, "the child's ")
        threading.Thread(target=writes, args=(path, "a thread's ")).start()
        return
    status_of(pid)


@pytest.mark.guarantee("work-5", "work-8")
def test_threads_and_exit_handlers_of_a_child_run_and_its_drones_handlers_do_not(tmp_path):
    told = tmp_path / "told"
    with poly.Pool(1) as pool:
        pool.doit(handlers_run, str(told))
        assert told.read_text() == "a thread's the child's "
    assert told.read_text() == "a thread's the child's the drone's "


def has_pool():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with poly.Pool(2) as pool:
            os.write(writer, str(sum(pool.map(abs, range(-10, 0)))).encode())
        sys.exit(4)
    os.close(writer)
    with open(reader) as file:
        return file.read(), status_of(pid)


@pytest.mark.guarantee("work-5")
def test_a_child_may_have_a_pool_of_its_own():
    with poly.Pool(1) as pool:
        assert pool.doit(has_pool) == ("55", 4)


def interrupted():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, b"ready")
        while True:  # not `signal.pause`, before which the signal may come
            pass
    os.read(reader, 5)
    os.kill(pid, signal.SIGINT)
    os.close(reader)
    os.close(writer)
    return status_of(pid)


def test_an_interrupt_ends_a_child_as_it_ends_any_program():
    with poly.Pool(1, output="discard") as pool:
        assert pool.promise(interrupted).result(60) == 1


def others():
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(6,))
    process.start()
    process.join()
    program = subprocess.run(
        [sys.executable, "-c", "raise SystemExit(8)"], preexec_fn=os.getpid, check=False
    )
    told = []
    thread = threading.Thread(target=lambda: told.append(forks("returns")))
    thread.start()
    thread.join()
    return process.exitcode, program.returncode, told


def test_processes_of_multiprocessing_and_programs_and_forks_in_threads_are_what_they_are():
    with poly.Pool(1) as pool:
        assert pool.doit(others) == (6, 8, [0])


def test_work_of_a_served_pools_client_may_fork(tmp_path):
    card = str(tmp_path / "pool.json")
    with (
        poly.Pool(1, output="discard") as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        for how, status in ENDS.items():
            assert remote.promise(forks, how).result(60) == status
        assert remote.doit(abs, -1) == 1
