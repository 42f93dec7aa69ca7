"""What can go wrong with a process, as work to be given to a drone, and as things to do to one."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


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


def note(path: str, i: int) -> int:
    """A call whose runs can be counted."""
    append(path, str(i))
    return i


def answer(*values: object) -> None:
    """For a test that judges a script by more than what it prints."""
    append(os.environ["ANSWERS"], " ".join(map(str, values)))


def lines(path: object) -> list[str]:
    """Those that are whole: of one that crosses a page of memory, a reader may see the first half
    alone."""
    try:
        with open(str(path)) as file:
            return file.read().rpartition("\n")[0].split()
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


def wait_holding_the_gil(pipe: str) -> None:
    """Until somebody writes into that pipe, which has a name in the file system."""
    ctypes.PyDLL(None).open(pipe.encode(), os.O_RDONLY)


def spin_for_ever(started: str) -> None:
    append(started, str(os.getpid()))
    while True:
        pass


class PackedSlowly:
    """Is pickled when the file `gate` is there, as a word."""

    def __init__(self, gate: str) -> None:
        self.gate = gate

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        hold_until(self.gate)
        return str, ("packed",)


def stack_of(thread: threading.Thread) -> str:
    """Where that thread is now, in lines to print after its name."""
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(["\n", *traceback.format_stack(frame)]) if frame else ""


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> object:
    """Polls until `condition` holds; fails after `seconds`: long, as a machine that others use too
    may stand still."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= end:
            stacks = [each.name + stack_of(each) for each in threading.enumerate()]
            raise AssertionError("\n".join([f"not within {seconds} s: {condition}", *stacks]))
        time.sleep(0.003)
    return value


def act_without_room(pool: Any, monkeypatch: Any, act: Callable[[], object]) -> None:
    """Call `act`, which replaces the drones. New ones have room only when the old have ended."""
    dispatcher = pool._dispatcher
    engine, has_room = dispatcher.supervisor.engine, dispatcher.supervisor.engine.can_start
    wait_for(lambda: all(drone.pid for drone in pool.drones))
    monkeypatch.setattr(engine, "can_start", lambda: False)
    thread = threading.Thread(target=act)
    thread.start()
    wait_for(lambda: not dispatcher.handles)
    thread.join(0.1)
    monkeypatch.setattr(engine, "can_start", has_room)
    dispatcher.post(dispatcher.supervisor.start_missing)
    thread.join()


def wait_for_ends(pidfds: list[int]) -> None:
    """Waits for each of these processes, and closes its pidfd. A zombie counts as ended."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 60.0)[0], "still running"
        os.close(pidfd)


class Counting:
    """An iterator that knows how far it was taken."""

    def __init__(self, items: Iterable[object]) -> None:
        self.items = iter(items)
        self.taken = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> object:
        item = next(self.items)
        self.taken += 1
        return item


# -- ways to fail, wherever code of users runs -----------------------------------------------------


def fail_at_seven(n: int) -> int:
    if n == 7:
        raise ValueError(n)
    return n


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


class Unreadable:
    """Is pickled, but not unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


class StopsTheLoop:
    """Its unpickling raises what ends an `async for`."""

    def __reduce__(self) -> tuple[object, ...]:
        return _stop_the_loop, ()


def _stop_the_loop() -> None:
    raise StopAsyncIteration


class Bomb:
    """Tells in a file that it was unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return append, (self.path, "exploded")


def failing_source() -> Iterator[int]:
    """An input that breaks off."""
    yield 1
    raise LookupError("no more")


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


# -- faults from outside, at random points of a drone's life ---------------------------------------

FAULTS = ("kill", "stop and continue", "stop and kill")


class Killer:
    """Every `seconds` one of `faults`, drawn at random, befalls a random drone of `pool`, while its
    block lasts.

    What a "stop" holds is held for up to `hold` seconds, beside the faults that follow; at the end
    of the block it goes on. What is drawn, and in which order, follows from `seed` alone. `did`
    counts what was done.

        with Killer(pool, seconds=0.2, seed=7) as killer:
            ...
        print(killer.did)
    """

    def __init__(
        self,
        pool: object,
        *,
        seconds: float = 0.2,
        faults: tuple[str, ...] = FAULTS,
        hold: float = 0.5,
        seed: object = None,
        done: Callable[[], int] | None = None,
    ) -> None:
        assert set(faults) <= set(FAULTS), faults
        self.seed = random.randrange(1 << 32) if seed is None else seed
        self.did: Counter[str] = Counter()
        self._pool = pool
        self._seconds = seconds
        self._faults = faults
        self._hold = hold
        self._done = done
        self._had_done = -1
        self._dice = random.Random(f"{self.seed}")
        self._held: list[tuple[float, int, int]] = []  # until when, who, and by what signal it ends
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name="killer")

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _live(self) -> None:
        due = time.monotonic() + self._seconds
        while not self._over.wait(
            max(0.0, min([due, *(each[0] for each in self._held)]) - time.monotonic())
        ):
            now = time.monotonic()
            self._let_go(now)
            if now >= due:
                due = now + self._seconds
                done = self._done() if self._done else 0
                if done > self._had_done or not self._done:
                    self._had_done = done
                    self._strike(now)
        self._let_go(None)

    def _strike(self, now: float) -> None:
        fault, place, held_for = (
            self._dice.choice(self._faults),
            self._dice.random(),
            self._dice.random() * self._hold,
        )
        drones = self._pool.drones
        if not drones:
            return
        drone = drones[int(place * len(drones))]
        try:
            victim = os.pidfd_open(drone.pid)  # from now on the number is surely its own
        except (OSError, RuntimeError):  # it has just ended, or never began
            return
        if not drone.alive:
            os.close(victim)
            return
        self.did[fault] += 1
        if fault == "kill":
            _send(victim, signal.SIGKILL)
            os.close(victim)
        else:
            _send(victim, signal.SIGSTOP)
            self._held.append(
                (
                    now + held_for,
                    victim,
                    signal.SIGKILL if fault == "stop and kill" else signal.SIGCONT,
                )
            )

    def _let_go(self, now: float | None) -> None:
        """Of those whose time has come; without `now`, of all."""
        for each in self._held[:]:
            until, victim, number = each
            if now is None or until <= now:
                _send(victim, number)
                os.close(victim)
                self._held.remove(each)


def _send(pidfd: int, number: int) -> None:
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)


# -- limits: for a pool's `initializer`, as work, or at the head of a script -----------------------


def limit(what: str, most: int) -> None:
    """From now on this process, and what it forks, may have at most so many of AS, NOFILE, FSIZE,
    ...; until `limit` is called again."""
    number = getattr(resource, f"RLIMIT_{what}")
    resource.setrlimit(number, (most, resource.getrlimit(number)[1]))


def limit_memory(more: int) -> None:
    """So many bytes of addresses more than this process has now."""
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    limit("AS", pages * resource.getpagesize() + more)


def limit_descriptors(more: int) -> None:
    """So many descriptors more than are open now: those that are stay."""
    taken = {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}
    most = 0
    while more or most in taken:
        more -= most not in taken
        most += 1
    limit("NOFILE", most)


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


@contextmanager
def small_disk(folder: object, size: str = "64k") -> Iterator[str]:
    """A file system of so many bytes at `folder`. Raises `OSError` where that takes a right that we
    have not got."""
    path = str(folder)
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True
        )
    except FileNotFoundError as error:
        raise OSError(f"no mount: {error}") from error
    if done.returncode:
        raise OSError(done.stderr.decode().strip())
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


# -- what uses up what there is, as work -----------------------------------------------------------


def take_memory(size: int) -> int:
    return len(bytearray(size))


def take_all_descriptors(then: Callable[[], object] | None = None) -> object:
    """Opens files until no more can be; `then` is called while they are open."""
    held: list[int] = []
    try:
        while True:
            try:
                held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                if then is None:
                    raise
                return then()
    finally:
        for fd in held:
            os.close(fd)


def fill_disk(path: str) -> None:
    """Writes until there is no more room."""
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
