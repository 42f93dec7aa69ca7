"""The loop's thread ends: its pools break with the cause, and the next one works."""

import errno
from collections import deque

import pytest
from scripts import run_script

import polycephaly as poly
from polycephaly.engines.local import zygote as zygote_module
from polycephaly.pool import reactor

ENDS = {
    "an asynchronous exception": """
        loop = next(each for each in threading.enumerate() if each.name == "polycephaly-reactor")
        raised = ctypes.py_object(SystemExit)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(loop.ident), raised)
    """,
    "no memory": """
        from polycephaly.pool import reactor

        def poll(timeout):
            raise MemoryError("none left")

        reactor._reactor._poll = poll
        reactor._reactor.wake()
    """,
    "its epoll is closed": """
        for name in os.listdir("/proc/self/fd"):
            if os.path.realpath("/proc/self/fd/" + name).endswith("[eventpoll]"):
                os.close(int(name))
    """,
    "all descriptors are closed": """
        os.closerange(3, 256)
    """,
}
CAUSES = {
    "an asynchronous exception": "SystemExit",
    "no memory": "MemoryError: none left",
    "its epoll is closed": "OSError: [Errno 9] Bad file descriptor",
    "all descriptors are closed": "OSError: [Errno 9] Bad file descriptor",
}

PROGRAM = """
import ctypes
import os
import threading
import time

import polycephaly as poly


def nothing_runs(pids):
    for pid in pids:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] not in "ZX":
                    return False
        except OSError:
            pass
    return True


pool, drone = poly.Pool(2), poly.Drone()
pids = [each.pid for each in pool.drones] + [drone.pid]
assert pool.doit("6 * 7") == drone.doit("6 * 7") == 42
running, alone = pool.promise(time.sleep, 1000), drone.promise(time.sleep, 1000)
queued = [pool.promise(time.sleep, 1000) for _ in range(5)]
after = running.then(str)
called, waited = [], []
queued[0].add_done_callback(called.append)
waiter = threading.Thread(target=lambda: waited.append(running.exception()))
waiter.start()
while not (running.running() and alone.running()):
    time.sleep(0.01)


def end_the_loop():
{act}

end_the_loop()
waiter.join()
errors = [each.exception(60) for each in [running, alone, after, *queued]]
print(*sorted(set(map(str, [*waited, *errors]))), sep="\\n")
assert called == queued[:1]
for call in (pool.doit, pool.promise, drone.doit, drone.promise):
    try:
        call("1")
        print("taken by", call)
    except Exception as error:
        refusal = str(error)
        assert refusal in map(str, errors), refusal
pool.shutdown()
drone.release()
while not nothing_runs(pids):
    time.sleep(0.01)
threads = [each.name for each in threading.enumerate() if "reactor" in each.name]
with poly.Pool(2) as next_pool:
    print(threads, next_pool.doit("6 * 7"))
"""


@pytest.mark.guarantee("death-14")
@pytest.mark.parametrize("how", ENDS)
def test_pools_break_with_the_cause_and_the_next_one_works(how):
    done = run_script(PROGRAM.replace("{act}", ENDS[how]))
    assert done.stdout.splitlines() == [
        f"the thread that serves the pools has ended: {CAUSES[how]}",
        "[] 42",
    ], done.stderr
    assert done.returncode == 0, done.stderr


SERVED = """
import ctypes
import threading
import time

import polycephaly as poly


def end_thread(name):
    loop = next(each for each in threading.enumerate() if each.name == name)
    raised = ctypes.py_object(SystemExit)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(loop.ident), raised)


card = __file__ + ".card"
with poly.Pool(1) as pool, poly.serve(pool, "tcp://127.0.0.1:0", file=card) as server:
    for name in ("polycephaly-client", "polycephaly-server"):
        with poly.connect(card) as client:
            assert client.doit("6 * 7") == 42
            promise = client.promise(time.sleep, 0.5)
            end_thread(name)
            print(str(promise.exception(60)).partition(" is lost: ")[2])
"""


@pytest.mark.guarantee("death-14")
def test_clients_of_a_served_pool_are_told():
    done = run_script(SERVED)
    assert done.stdout.splitlines() == [
        "the thread that serves it has ended: SystemExit",
        "the server was closed",
    ], done.stderr
    assert done.returncode == 0, done.stderr


def test_a_wait_for_what_only_that_thread_could_tell_is_refused():
    with poly.Pool(1) as pool:
        signal = reactor.ReactorSignal(pool._dispatcher.reactor)
    with pytest.raises(RuntimeError, match=r"never settled.*has ended"):
        signal.result(10)


def test_a_report_of_the_zygote_that_the_kernel_refuses_is_sent_later(monkeypatch):
    class Control:
        def send(self, message, flags):
            if self.errors:
                raise OSError(self.errors.pop(0), "")
            self.sent.append(message)

    monkeypatch.setattr(zygote_module.time, "sleep", lambda _: None)
    zygote, control = object.__new__(zygote_module.Zygote), Control()
    zygote.control, zygote._reports = control, deque([b"one", b"two"])
    control.errors, control.sent = [errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN], []
    for _ in range(3):
        zygote._send_reports()
        assert not control.sent and len(zygote._reports) == 2
    zygote._send_reports()
    assert control.sent == [b"one", b"two"] and not zygote._reports
    zygote._reports, control.errors = deque([b"three"]), [errno.EPIPE]
    zygote._send_reports()
    assert not zygote._reports  # there is nobody to get it


def test_a_caller_that_waits_for_room_is_told_of_the_death_of_the_loop():
    done = run_script(
        """
        import ctypes, threading, time
        import polycephaly as poly

        def submit():
            try:
                for _ in range(20):
                    pool.promise(time.sleep, 1000)
            except BaseException as error:
                print(type(error).__name__)

        if __name__ == "__main__":
            pool = poly.Pool(1, max_queued=2)
            thread = threading.Thread(target=submit)
            thread.start()
            while not pool._dispatcher.backpressure._waiting:
                time.sleep(0.01)
            loop = pool._dispatcher.reactor.thread
            raised = ctypes.py_object(SystemExit)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(loop.ident), raised)
            pool._dispatcher.reactor.wake()
            thread.join(60)
            print(thread.is_alive())
        """
    )
    assert done.stdout.split() == ["BrokenProcessPool", "False"], done


NO_MEMORY = """
import sys
from concurrent.futures import BrokenExecutor
from contextlib import suppress
from functools import partial

import polycephaly as poly
from polycephaly.pool import dispatcher

dispatcher.END_AFTER_BUG_SECONDS = 0.1


def fail(text):
    raise ValueError(text)


def give_back(value):
    return value


class Nth:
    \"\"\"A profiler that raises in place of the `at`th call that the thread makes, unless a block
    of the package ends there (`__exit__`), a pool, or the thread, or a hook of a promise begins.
    \"\"\"

    def __init__(self, at):
        self.left = at

    def __call__(self, frame, event, of):
        if event not in ("call", "c_call") or getattr(of, "__name__", "") == "__exit__":
            return
        if "_call_hooks" in (frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name):
            return
        within = frame
        while within is not None:
            if within.f_code.co_name in ("__exit__", "__del__", "_end", "end", "_end_by"):
                return
            within = within.f_back
        self.left -= 1
        if self.left == 0:
            raise MemoryError(f"at {frame.f_code.co_qualname}, line {frame.f_lineno}")


at, is_reached, again = {stride}, True, poly.Retry(2, delay=0)
while is_reached:
    nth = Nth(at)
    pool = poly.Pool(1)
    pool._dispatcher.reactor.post(partial(sys.setprofile, nth))
    promises = []
    with suppress(BrokenExecutor):
        for _ in "123":
            promises.append(pool.submit(abs, -7))
            promises.append(pool.submit(abs, promises[-1]))
            promises.append(pool.submit(give_back, {7: 7}))
            promises.append(pool.submit(fail, "as asked"))
            promises.append(pool.options(timeout=1000).submit(abs, -7))
            promises.append(pool.options(retries=again).submit(fail, "as asked"))
    for each in promises:
        error = each.exception(30)
        if error is None:
            assert each.result() in (7, {7: 7})
        else:
            assert isinstance(error, BrokenExecutor | MemoryError) or "as asked" in str(error)
    is_reached, nth.left = nth.left <= 0, 0  # none is raised from here on
    pool.shutdown()
    at += {stride}
print("tried", at // {stride})
"""


@pytest.mark.guarantee("death-14")
@pytest.mark.parametrize("stride", [61, pytest.param(7, marks=pytest.mark.slow)])
def test_no_memory_anywhere_within_the_loop_leaves_no_task_unsettled(stride):
    """The pool breaks with that error, or goes on; the next one works."""
    done = run_script(NO_MEMORY.replace("{stride}", str(stride)))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.removeprefix("tried ")) > 20
