"""The census itself: it sees what tests must not leave, wherever it went, and is quick."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from census import MARKER, Census, marked, shared_memory_is_counted, wait_until_clean
from faults import wait_for

ORPHAN_MAKER = """
import os, time
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    os.write(w, str(os.getpid()).encode()); os.close(w); os.close(1); time.sleep(30); os._exit(0)
print(os.read(r, 20).decode(), flush=True)
os._exit(0)
"""


def test_what_another_worker_has_is_not_counted():
    before = Census.take()
    elsewhere = {**os.environ, MARKER: "another worker"}
    command = [sys.executable, "-c", ORPHAN_MAKER.replace("sleep(30)", "sleep(1000)")]
    orphan = int(subprocess.run(command, stdout=subprocess.PIPE, check=True, env=elsewhere).stdout)
    try:
        assert not wait_until_clean(before, 0)
        assert orphan in marked("another worker")
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.guarantee("end-8")
def test_an_orphan_of_an_executed_program_is_seen():
    before = Census.take()
    orphan = int(
        subprocess.run(
            [sys.executable, "-c", ORPHAN_MAKER], stdout=subprocess.PIPE, check=True
        ).stdout
    )
    try:
        assert any(f"process {orphan} " in each for each in wait_until_clean(before, 0))
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.guarantee("end-8")
def test_an_orphan_of_a_forked_child_is_seen():
    before = Census.take()
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if (grandchild := os.fork()) == 0:
                time.sleep(30)
            os.write(w, str(grandchild).encode())
        finally:
            os._exit(0)
    os.close(w)
    orphan = int(os.read(r, 20))
    os.close(r)
    os.waitpid(child, 0)
    try:
        assert any(f"process {orphan} " in each for each in wait_until_clean(before, 0))
    finally:
        os.kill(orphan, signal.SIGKILL)


@pytest.mark.guarantee("end-8")
def test_threads_descriptors_and_shared_memory_are_seen():
    before = Census.take()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-over")
    thread.start()
    r, w = os.pipe()
    shm = f"/dev/shm/left-over-{os.getpid()}"
    with open(shm, "w"):
        pass
    left = "\n".join(wait_until_clean(before, 0))
    end.set()
    thread.join()
    os.close(r)
    os.close(w)
    os.unlink(shm)
    assert "thread left-over" in left and f"descriptor {w}" in left
    assert shm in left or not shared_memory_is_counted()
    wait_for(lambda: not Census.take().left_since(before))
