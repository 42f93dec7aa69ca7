"""Ctrl-C at the controller: the first ends the wait and cancels what it was for; a second one ends
everything."""

import os
import signal
import sys
import threading

import pytest
from faults import lines, wait_for
from scripts import Script, run_script
from terminal import Terminal

from polycephaly.runtime.deferred_sigint import DeferredSigint
from polycephaly.runtime.procfs import state_of

WAITS = {
    "value": ("p = pool.promise(block_for_ever, up)", "p.value", "p.cancelled()"),
    "doit": ("pass", "pool.doit(block_for_ever, up)", "True"),
    "result with timeout": (
        "p = pool.promise(block_for_ever, up)", "p.result(50)", "p.cancelled()",
    ),
    "exception": ("p = pool.promise(block_for_ever, up)", "p.exception()", "p.cancelled()"),
    "gather": (
        "ps = [pool.promise(block_for_ever, up) for _ in range(5)]",
        "poly.gather(*ps).value", "all(p.cancelled() for p in ps)",
    ),
    "race": (
        "ps = [pool.promise(block_for_ever, up) for _ in range(5)]",
        "poly.race(*ps).value", "all(p.cancelled() for p in ps)",
    ),
    "then": (
        "p = pool.promise(block_for_ever, up)", "p.then(abs).then(abs).value", "p.cancelled()",
    ),
    "as_completed": (
        "ps = [pool.promise(abs, 1), *(pool.promise(block_for_ever, up) for _ in range(5))]; "
        "ps[0].result()",
        "list(poly.as_completed(ps))",
        "not ps[0].cancelled() and all(p.cancelled() for p in ps[1:])",
    ),
    "map": ("pass", "list(pool.map(block_for_ever, [up] * 5))", "True"),
    "map, as they come": (
        "pass", "list(pool.map(block_for_ever, [up] * 5, ordered=False))", "True",
    ),
}  # fmt: skip


@pytest.mark.guarantee("promise-5")
@pytest.mark.parametrize("wait", WAITS)
def test_the_first_one_ends_the_wait_and_cancels_and_the_pool_goes_on(wait, tmp_path):
    given, waits, cancelled = WAITS[wait]
    up = str(tmp_path / "up")
    with Script(f"""
        import sys
        import polycephaly as poly
        from polycephaly.runtime.tuning import tuning
        from faults import block_for_ever
        tuning.grace_seconds = 100.0  # no drone is killed for being slow
        up = sys.argv[1]
        with poly.Pool(2) as pool:
            drones = [d.pid for d in pool.drones]
            {given}
            while True:
                try:
                    print("waits", flush=True)
                    {waits}
                except KeyboardInterrupt:
                    if {cancelled}:
                        break  # else it came before the wait
            print(
                "interrupted", [d.pid for d in pool.drones] == drones, pool.doit(abs, -3),
                flush=True,
            )
    """, up) as script:  # fmt: skip
        running = 2 if wait in ("gather", "race", "as_completed") or "map" in wait else 1
        while (line := script.read_line()) == "waits":
            wait_for(lambda: len(lines(up)) >= running)
            script.signal(signal.SIGINT)
        assert line == "interrupted True 3"
        assert script.wait() == 0
        assert not script.left()


def test_one_that_comes_into_the_call_leaves_no_work_that_nobody_has(tmp_path):
    done = run_script("""
        import os, signal, sys, threading, time
        import polycephaly as poly

        with poly.Pool(1) as pool:
            pool.doit(abs, 1)
            came = 0
            for i in range(100):
                timer = threading.Timer(0.0002, os.kill, (os.getpid(), signal.SIGINT))
                promises = []  # before it is started: that may take as long
                try:
                    timer.start()
                    while True:
                        promises.append(pool.promise(time.sleep, 1000))
                        if len(promises) >= 100:
                            time.sleep(0.001)  # not long: a signal may come just before it begins
                except KeyboardInterrupt:
                    came += 1
                timer.join()
                for each in promises:
                    each.cancel()
                assert pool.doit(abs, -i) == i
            print(came)
    """)
    assert done.stdout == "100\n", done.stderr


def test_a_promise_that_nobody_works_on_is_not_cancelled():
    done = run_script("""
        import os, signal, threading
        import polycephaly as poly
        p = poly.Promise()
        try:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            p.value
        except KeyboardInterrupt:
            p.set_result(5)
        print(p.value)
    """)
    assert done.stdout == "5\n", done.stderr


@pytest.mark.guarantee("promise-5")
@pytest.mark.parametrize(
    "ends", ["the end of a with block", "pool.shutdown()", "an exception in a with block"]
)
def test_at_the_end_of_a_pool_the_first_one_cancels_what_is_left(ends, tmp_path):
    up = str(tmp_path / "up")
    end = {
        "pool.shutdown()": "pool.shutdown()",
        "an exception in a with block": "raise ZeroDivisionError",
    }
    with Script(f"""
        import sys
        import polycephaly as poly
        from faults import block_for_ever
        with poly.Pool(2) as pool:
            ps = [pool.promise(block_for_ever, sys.argv[1]) for _ in range(5)]
            {end.get(ends, "pass")}
    """, up) as script:  # fmt: skip
        if "exception" not in ends:
            wait_for(lambda: len(lines(up)) == 2)
            script.signal(signal.SIGINT)
            assert script.wait() == -signal.SIGINT
        else:
            assert script.wait() == 1
        assert not script.left()


@pytest.mark.parametrize("ends", ["pass", "sys.exit(3)"])
def test_one_in_the_wait_at_the_end_of_a_script_ends_it_by_the_signal(ends, tmp_path):
    done = run_script(f"""
        import atexit, signal, sys
        import polycephaly as poly
        from faults import block_for_ever

        atexit.register(print, "handler")
        sys.stdout = open(sys.argv[1], "w")  # with a buffer
        pool = poly.Pool(1)
        promises = [pool.submit(block_for_ever, sys.argv[2]) for _ in range(3)]
        dispatcher, wait_ended = pool._dispatcher, pool._dispatcher.wait_ended
        def interrupted():
            dispatcher.wait_ended = wait_ended
            signal.raise_signal(signal.SIGINT)
        dispatcher.wait_ended = interrupted
        left_open = open(sys.argv[2] + "-", "w")
        left_open.write("end\\n")
        print("said")
        {ends}
    """, str(tmp_path / "out"), str(tmp_path / "up"))  # fmt: skip
    assert done.stderr == "" and done.returncode == -signal.SIGINT
    assert lines(tmp_path / "out") == ["said", "handler"]
    assert lines(tmp_path / "up-") == ["end"]


@pytest.mark.guarantee("promise-5")
@pytest.mark.parametrize("ends", ["the end of a with block", "pool.shutdown()", "drone.release()"])
def test_a_second_one_ends_everything_at_once(ends, tmp_path):
    up = str(tmp_path / "up")
    made = "drone = poly.Drone()" if "drone" in ends else "pool = drone = poly.Pool(2)"
    end = "with pool: pass" if "with" in ends else ends
    with Script(f"""
        import signal, sys, threading, time, traceback
        import polycephaly as poly
        from polycephaly.runtime.tuning import tuning
        from faults import append
        tuning.grace_seconds = 100.0  # what does not want to end has all the time in the world

        def refuse_to_end(started):
            sign = "up"
            while True:
                try:
                    append(started, sign)
                    time.sleep(1000)
                except KeyboardInterrupt:
                    sign = "interrupted"

        {made}
        def tell_when_it_waits(main=threading.get_ident()):
            while not any(
                "wait_ended" in each.name
                for each in traceback.extract_stack(sys._current_frames()[main])
            ):
                time.sleep(0.01)
            append(sys.argv[1], "waits")

        p = drone.promise(refuse_to_end, sys.argv[1])
        threading.Thread(target=tell_when_it_waits).start()
        {end}
    """, up) as script:  # fmt: skip
        wait_for(lambda: sorted(lines(up)) == ["up", "waits"])
        script.signal(signal.SIGINT)
        wait_for(lambda: "interrupted" in lines(up))
        assert script.process.poll() is None
        script.signal(signal.SIGINT)
        assert script.wait() == -signal.SIGINT
        assert not script.left()


ENDS_BY = (0, -signal.SIGINT) if sys.version_info >= (3, 14) else (0,)
"""How a prompt ends after a Ctrl-C: that of CPython 3.14, without readline, says that it was
interrupted once."""


def test_in_a_terminals_repl_the_pool_stays_usable(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.type("import polycephaly as poly, threading, time\n")
        terminal.type("from polycephaly.promises import promise as promises\n")
        terminal.type("from polycephaly.runtime.tuning import tuning\n")
        terminal.type("tuning.grace_seconds = 100.0\n")  # no drone is killed for being slow
        terminal.type("pool = poly.Pool(2); pids = [d.pid for d in pool.drones]\n")
        terminal.type("def tell_when_it_waits(main=threading.get_ident()):\n")
        terminal.type("  while main not in promises.waiting_threads: time.sleep(0.01)\n")
        terminal.type("  print('up' + '!')\n\n")
        for _ in range(3):
            terminal.type("p = pool.promise(time.sleep, 1000)\n")
            terminal.type("threading.Thread(target=tell_when_it_waits).start(); p.value\n")
            terminal.read_until("up!")
            terminal.type("\x03")
            terminal.read_until("KeyboardInterrupt")
            terminal.type(
                "print('is', p.cancelled(), pool.doit(abs, -3), "
                "[d.pid for d in pool.drones] == pids)\n"
            )
            terminal.read_until("is True 3 True")
        terminal.type("pool.shutdown(); print('en' + 'ded')\n")
        terminal.read_until("ended")
        terminal.read_until(">>> ")
        terminal.type("\x04")
        assert terminal.process.wait(30) in ENDS_BY


def test_at_a_terminals_prompt_it_harms_nothing(tmp_path):
    with Terminal(tmp_path) as terminal:
        terminal.type("import polycephaly as poly, time\n")
        terminal.type("pool = poly.Pool(2); p = pool.promise('import time; time.sleep(1); 42')\n")
        terminal.type("print('up' + '!')\n")
        terminal.read_until("up!")
        terminal.read_until(">>> ")
        # CPython hears of a signal that comes just before its wait for a key only with the next
        # one.
        wait_for(lambda: state_of(terminal.process.pid) == "S")
        terminal.type("\x03")
        terminal.read_until("KeyboardInterrupt")
        terminal.type("print('got', p.value)\n")
        terminal.read_until("got 42")
        terminal.type("exit()\n")
        assert terminal.process.wait(30) in ENDS_BY


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_that_another_thread_forks_while_sigint_is_deferred_has_the_usual_handler():
    ended = []

    def fork():
        child = os.fork()
        if child == 0:
            try:
                os._exit(signal.getsignal(signal.SIGINT) is not usual)
            finally:
                os._exit(2)
        ended.append(os.waitpid(child, 0)[1])

    usual = signal.getsignal(signal.SIGINT)
    with DeferredSigint(), DeferredSigint():
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
    assert ended == [0]
    assert signal.getsignal(signal.SIGINT) is usual


def test_a_handler_that_is_installed_while_sigint_is_deferred_stays():
    from polycephaly.runtime.deferred_sigint import DeferredSigint

    before = signal.getsignal(signal.SIGINT)
    try:
        with DeferredSigint():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
