"""A start that hangs in somebody's at-fork handler: it is reported, and ends with its program."""

import os
import signal

import pytest
from faults import wait_for
from scripts import Script, run_script

import polycephaly as poly
from polycephaly.runtime.procfs import descendants

HANGING = """
    import os, signal, sys, threading, warnings, polycephaly as poly
    from polycephaly.runtime.tuning import tuning
    lock = threading.Lock()
    def waits_for_ever(): lock.acquire()
    os.register_at_fork(after_in_child=waits_for_ever)
    lock.acquire()
"""


@pytest.mark.guarantee("end-1")
def test_a_zygote_that_hangs_in_an_at_fork_handler_ends_with_its_program():
    with Script(HANGING + """
    print("up", flush=True)
    poly.Pool(1)
    """) as script:  # fmt: skip
        script.read_until("up")
        (zygote,) = wait_for(lambda: descendants(script.process.pid))
        wait_for(lambda: waits(zygote))
        script.signal(signal.SIGKILL)
        assert not script.left()


def waits(pid):
    """In a system call, for good: the handler waits for its lock."""
    with open(f"/proc/{pid}/wchan") as channel:
        return "futex" in channel.read()


def test_a_start_that_hangs_is_reported_once_with_its_stack_and_can_be_interrupted():
    done = run_script(
        HANGING
        + """
    tuning.start_report_seconds = 0.1
    shown = []
    def show(message, category, *_):
        shown.append((str(message), category))
        os.kill(os.getpid(), signal.SIGINT)
    warnings.showwarning = show
    try:
        poly.Pool(1, name="lab")
    except KeyboardInterrupt:
        (text, category), = shown
        print(category.__name__, text.partition(" (process ")[0])
        print("is not ready after 0.1 seconds" in text, "in waits_for_ever" in text)
    """
    )
    lines = done.stdout.splitlines()
    assert lines == ["RuntimeWarning the zygote of lab", "True True"], done.stderr


def test_a_zygote_that_is_ready_survives_a_late_question_for_its_stack():
    with poly.Pool(1) as pool:
        zygote = pool.doit(os.getppid)
        os.kill(zygote, signal.SIGSTKFLT)
        pool.resize(2)
        assert [each.result() for each in pool.everywhere(os.getppid)] == [zygote, zygote]


def test_the_handler_for_the_stack_is_gone_after_the_start():
    done = run_script("""
        import os, re, signal, polycephaly as poly
        def handled():
            with open("/proc/self/status") as status:
                masks = re.findall(r"Sig(?:Cgt|Ign|Blk):\\s*(\\w+)", status.read())
            return [int(each, 16) >> (signal.SIGSTKFLT - 1) & 1 for each in masks]
        with poly.Pool(1) as pool:
            print(handled(), pool.doit(handled))
    """)
    assert done.stdout == "[0, 0, 0] [0, 0, 0]\n", done.stderr
