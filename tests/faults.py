"""What can go wrong with a process, as work to be given to a drone, and as things to do to one."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable


def segfault() -> None:
    ctypes.string_at(0)


def exit_hard(status: int) -> None:
    os._exit(status)


def kill_myself(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


def say_and_die(text: str, status: int) -> None:
    print(text, file=sys.stderr, flush=True)
    os._exit(status)


def append(path: str, text: str) -> None:
    """A side effect that can be counted: one line, written at once."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def lines(path: object) -> list[str]:
    try:
        with open(str(path)) as file:
            return file.read().split()
    except FileNotFoundError:
        return []


def block_for_ever(started: str | None = None) -> None:
    if started:
        append(started, str(os.getpid()))
    threading.Event().wait()


def hold_until(path: str, started: str | None = None) -> str:
    """Runs until the file `path` is there."""
    if started:
        append(started, str(os.getpid()))
    while not os.path.exists(path):
        time.sleep(0.002)
    return "held"


def sleep_holding_the_gil(started: str, seconds: int = 30) -> None:
    append(started, str(os.getpid()))
    ctypes.PyDLL(None).sleep(seconds)


def spin_for_ever(started: str) -> None:
    append(started, str(os.getpid()))
    while True:
        pass


def wait_for(condition: Callable[[], object], seconds: float = 10.0) -> object:
    """Polls until `condition` holds; fails after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(0.003)
    return value


# -- ways to fail, wherever code of users runs ----------------------------------------------------------


class Failed(Exception):
    """What `fail("raise")` raises."""


HOWS = ("raise", "sys.exit", "os._exit", "segfault", "SIGKILL")
ENDS_A_PROCESS = ("os._exit", "segfault", "SIGKILL")
STATUS = {"os._exit": 7, "segfault": -signal.SIGSEGV, "SIGKILL": -signal.SIGKILL}


def fail(how: str) -> None:
    if how == "raise":
        raise Failed(how)
    if how == "sys.exit":
        sys.exit(7)
    if how == "os._exit":
        os._exit(7)
    if how == "segfault":
        segfault()
    kill_myself()


class FailsToPickle:
    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> tuple[object, ...]:
        fail(self.how)
        raise AssertionError


class FailsToUnpickle:
    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> tuple[object, ...]:
        return fail, (self.how,)


class FailsWhenCollected:
    def __init__(self, how: str) -> None:
        self.how = how
        self.me = self

    def __del__(self) -> None:
        fail(self.how)


def take(thing: object) -> str:
    return "taken"


def give_what_fails_to_pickle(how: str) -> FailsToPickle:
    return FailsToPickle(how)


def give_what_fails_to_unpickle(how: str) -> FailsToUnpickle:
    return FailsToUnpickle(how)


def collect_what_fails(how: str) -> str:
    FailsWhenCollected(how)
    gc.collect()
    return "collected"
