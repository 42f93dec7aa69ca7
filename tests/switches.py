"""Two operations that meet, with a thread switch forced at every bytecode.

`meet` runs `first` in a thread of its own and stops it before the bytecode number `at` of the
traced files. Then `second` runs in another thread until it has returned, or until it is about to
wait for a lock that is taken; then `first` goes on. `every_meeting` does so for every `at`, with
new operations each time, until `first` ends unstopped.

CPython itself switches threads at calls, at the ends of loops and where functions begin, so this
forces more than an interpreter with its global lock does: what holds here does not depend on where
that one switches. What does depend on it, and says so, meets with `anywhere=False`: only where
CPython itself may switch.

That a thread is about to wait is told by the locks (`telling_locks`), not guessed from the time
that has passed. If the first is before it was stopped, the second begins, and nothing is left to be
stopped: the rest comes after the second.

`at_random` is for all other tests: `pytest --switches 7` forces switches in whatever they run, at
random places (but in `test_profile.py`: a profile and this both set the switch interval).
line_tracer.py is for tests with the mark `tracer`."""

import _thread
import dis
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from random import Random
from time import sleep
from types import CodeType, FrameType, ModuleType
from typing import Any
from unittest import mock

import pytest

import polycephaly
from polycephaly.promises import promise
from polycephaly.runtime.tuning import tuning

PATIENCE = 60
"""Seconds after which an operation that has not returned is taken to hang. Reached only where a
test fails."""
SELDOM = 0.1
"""Seconds that a thread which computes keeps the interpreter, where switches are forced."""

PACKAGE = os.path.dirname(str(polycephaly.__file__)) + os.sep

_this_thread = threading.local()


def about_to_wait() -> None:
    """To be called by this thread before it waits for another."""
    tell = getattr(_this_thread, "about_to_wait", None)
    if tell is not None:
        tell()


class Telling:
    """A lock that tells before a thread waits for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(False):
            return True
        if not blocking or timeout == 0:
            return False
        about_to_wait()
        return bool(self._lock.acquire(True, timeout))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


@pytest.fixture
def telling_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks that are made from now on tell, and a waiter relies on being woken: it does not look up
    now and then."""
    plain, reentrant = _thread.allocate_lock, _thread.RLock
    monkeypatch.setattr(promise, "allocate_lock", lambda: Telling(plain()))
    for name in ("Lock", "_allocate_lock"):
        monkeypatch.setattr(threading, name, lambda: Telling(plain()))
    monkeypatch.setattr(threading, "RLock", lambda: Telling(reentrant()))
    for name in ("signal_check_seconds", "settled_check_seconds"):
        monkeypatch.setattr(tuning, name, 10 * PATIENCE)


class _Operation:
    """A call in a thread of its own, with what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.value: Any = None
        self.error: BaseException | None = None
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def begin(self) -> None:
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.release()

    def outcome(self, what: str) -> Any:
        if not self._ended.acquire(timeout=PATIENCE):
            raise AssertionError(f"{what} has not returned: it was never told")
        if self.error is not None:
            raise self.error
        return self.value


def meet(
    first: Callable[[], Any],
    second: Callable[[], Any],
    at: int,
    files: frozenset[str],
    anywhere: bool = True,
) -> tuple[Any, Any, str | None]:
    """The two values, and where `first` was stopped: None if it ended or waited before that."""
    seen = 0
    place: str | None = None
    let_go = _thread.allocate_lock()
    let_go.acquire()

    begun = False

    def end_of_turn() -> None:
        if let_go.locked():
            let_go.release()

    def begin_second() -> None:
        nonlocal begun
        if not begun:
            begun = True
            other.begin()

    def run_second() -> Any:
        _this_thread.about_to_wait = end_of_turn
        try:
            return second()
        finally:
            end_of_turn()

    other = _Operation(run_second)

    def traced(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen, place
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace = traced  # CPython 3.13 heeds the next line only after this one
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        # Of a function's beginning, CPython 3.11 tells as a call, not as a bytecode.
        if event == "opcode" if anywhere else _may_switch(frame, event):
            if seen == at and not begun:
                place = (
                    f"{frame.f_code.co_qualname}, line {frame.f_lineno}, bytecode {frame.f_lasti}"
                )
                begin_second()
                if not let_go.acquire(timeout=PATIENCE):
                    raise AssertionError(
                        f"the second neither ends nor waits for a lock, from {place}"
                    )
            seen += 1
        return traced

    def run_first() -> Any:
        _this_thread.about_to_wait = begin_second
        sys._getframe().f_trace_opcodes = (
            True  # CPython 3.12 looks here whether opcodes are to be traced
        )
        sys.settrace(traced)
        try:
            return first()
        finally:
            sys.settrace(None)

    one = _Operation(run_first)
    one.begin()
    value = one.outcome(f"the first, stopped at {place},")
    begin_second()
    return value, other.outcome(f"the second, begun at {place},"), place


def every_meeting(
    make: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]],
    *modules: ModuleType,
    anywhere: bool = True,
) -> Iterator[tuple[Any, Any, str]]:
    """What both operations of each pair that `make` gives returned, and where the first was
    stopped."""
    files = frozenset(str(module.__file__) for module in modules)
    for at in count():
        first, second, place = meet(*make(), at, files, anywhere)
        if place is None:
            assert at > 0, f"nothing of {sorted(files)} was run"
            return
        yield first, second, place


@cache
def _where_it_may_switch(code: CodeType) -> set[int]:
    """Before these bytecodes: where a function begins or goes on, at the end of a loop, after a
    call, and in `with`."""
    places, called = set(), False
    for each in dis.get_instructions(code):
        if called or each.opname in ("RESUME", "JUMP_BACKWARD"):
            places.add(each.offset)
        called = each.opname.startswith(
            ("CALL", "BEFORE_WITH", "BEFORE_ASYNC_WITH", "LOAD_SPECIAL")
        )
    return places


def _may_switch(frame: FrameType, event: str) -> bool:
    return event == "call" or (
        event == "opcode" and frame.f_lasti in _where_it_may_switch(frame.f_code)
    )


@contextmanager
def at_random(seed: int) -> Iterator[None]:
    """All threads, and the processes that are forked meanwhile, switch at places of the package,
    chosen at random of those where CPython may switch."""
    chance = Random(seed).random

    def traced(frame: FrameType, event: str, arg: object) -> Any:
        if event == "call" and (chance() > 0.1 or not frame.f_code.co_filename.startswith(PACKAGE)):
            return None
        frame.f_trace = traced
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if (
            event == "opcode"
            and chance() < 0.1
            and frame.f_lasti in _where_it_may_switch(frame.f_code)
        ):
            sleep(2e-5)  # a thread that waits for the interpreter gets it
        return traced

    # As if it were the package's: else `stacks` shows each thread that it stops as one that runs
    # code of the user.
    traced.__code__ = traced.__code__.replace(co_filename=f"{PACKAGE}switches.py")
    before, interval = sys.gettrace(), sys.getswitchinterval()
    # What traces has bytecodes of its own, at which the interpreter may switch, and so where it
    # never would without it. So that is made rare, also where a test sets the interval. A failure
    # is to be thought through all the same.
    sys.setswitchinterval(SELDOM)
    threading.settrace(traced)
    sys.settrace(traced)
    try:
        with mock.patch.object(sys, "setswitchinterval"):
            yield
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]  # None is what there was
        sys.setswitchinterval(interval)
