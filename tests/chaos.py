"""Chaos: mixed work while drones are killed, stopped and crash, and an account of every piece of
it.

    python tests/chaos.py --minutes 10 --tasks 20000 --seed 7
    python tests/chaos.py --minutes 10 --threads 32 --switch-interval 1e-6 --collect-every 1 --forks

Tasks of 0 to 50 ms, arrays, errors, cancels, prints, crashes, and chunks of a map, while every 0.2
s a random drone is killed, stopped and let go, or stopped and killed. `--threads` says how many
threads submit and wait. With `--forks` a thread of this process forks it all the time, and tasks
fork their drones. Each task appends its number to a file as its first act; so it is known how often
it ran. Two phases of half the time and half the tasks each (more tasks, where there is time for
more):

    without retries   value, or its own error      it ran exactly once
                      DroneDied                    it ran at most once; a death takes along one
                                                   task, not more
                      cancelled                    it ran at most once
    with retries      not cancelled                its value, or its own error; it ran at least once

What a task returned is looked at when it arrives, and arrays once more some time later. A promise
that is not settled within a minute is a violation: who waits where is told. Descriptors, threads
and memory of this process are sampled each second. All that is drawn follows from the seed (which
thread is how fast does not). Ends with status 1 on a violation, with 3 where nothing moves any
more."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import queue
import random
import re
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, wait

import numpy as np
from faults import Killer, append, fail, lines, wait_for

import polycephaly as poly
from polycephaly.pool.task import Task

HANG = 60.0  # seconds without anything settled
KINDS = ("sleep", "quick", "spin", "array", "err", "cancel", "print", "crash", "fork")
WEIGHTS = (40, 20, 8, 12, 8, 10, 1, 1, 0)
FORK_WEIGHT = 2
OPEN, VALUE, OWN_ERROR, DIED, WAS_CANCELLED = range(5)
OUTCOMES = ("open", "value", "own error", "DroneDied", "cancelled")
CRASHES = ("os._exit", "segfault", "SIGKILL")
CHILDREN_END_BY = ("os._exit", "sys.exit", "return")
KEPT_ARRAYS = 20
TOLD = 20  # violations

# -- the work --------------------------------------------------------------------------------------


def sleep(path: str, i: int, seconds: float) -> int:
    append(path, str(i))
    time.sleep(seconds)
    return i


def quick(path: str, i: int) -> int:
    append(path, str(i))
    return i


def spin(path: str, i: int, seconds: float) -> int:
    append(path, str(i))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return i


def double(path: str, i: int, array: np.ndarray) -> np.ndarray:
    append(path, str(i))
    return array * 2


def err(path: str, i: int) -> None:
    append(path, str(i))
    raise ValueError(i)


def say(path: str, i: int) -> int:
    append(path, str(i))
    print("x" * 1000)
    return i


def crash(path: str, i: int, how: str) -> int:
    """The first time."""
    append(path, str(i))
    try:
        os.close(os.open(f"{path}.crashed.{i}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return i
    fail(how)
    raise AssertionError("it lives")


def fork(path: str, i: int, how: str) -> int:
    """Whatever way the child ends, it must not go on as a second drone."""
    append(path, str(i))
    parent = os.getpid()
    if pid := os.fork():
        return i if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0 else -1
    if how == "sys.exit":
        sys.exit(0)
    if how == "os._exit":
        os._exit(0)
    return parent  # "return"


def numbers(i: int, size: int) -> np.ndarray:
    return np.arange(i, i + size, dtype=np.int64)


def is_twice(array: np.ndarray, i: int, size: int) -> bool:
    return array.shape == (size,) and bool((array == numbers(i, size) * 2).all())


# -- a phase ---------------------------------------------------------------------------------------


class Submitter:
    """One thread that gives tasks to the pool of `phase`, and takes what they come to."""

    def __init__(self, phase: Phase, number: int) -> None:
        self.open: deque[tuple[int, Task, object]] = deque()
        self.settled = 0
        self._phase = phase
        self._dice = random.Random(f"{phase.options.seed}-{phase.retries}-{number}")
        self._arrays: deque[tuple[np.ndarray, int, int]] = deque()
        self._weights = (*WEIGHTS[:-1], FORK_WEIGHT if phase.options.forks else 0)

    def run(self, until: float, tasks: int) -> None:
        phase = self._phase
        try:
            while (time.monotonic() < until or len(phase.kinds) < tasks) and len(
                phase.wrong
            ) < TOLD:
                self._submit(self._share(self._dice.choice((1, 10, 50, 200))))
                self._settle(self._share(self._dice.choice((0, 0, 50, 200))))
            self._settle(0)
        except BaseException as error:
            phase.wrong.append(f"{phase.name}: a thread that submits ended with {error!r}")
            raise

    def _share(self, count: int) -> int:
        """All threads together have no more open than one would: a minute must be enough for the
        last of them."""
        return -(-count // self._phase.options.threads)

    def _submit(self, count: int) -> None:
        dice, pool, path = self._dice, self._phase.pool, self._phase.path
        assert pool is not None
        for kind in dice.choices(KINDS, self._weights, k=count):
            i = self._phase.add_task(kind)
            wanted: object = i
            if kind in ("sleep", "cancel"):
                promise = pool.promise(sleep, path, i, dice.random() * 0.05)
            elif kind == "quick":
                promise = pool.promise(quick, path, i)
            elif kind == "spin":
                promise = pool.promise(spin, path, i, dice.random() * 0.005)
            elif kind == "array":
                wanted = size = dice.randrange(1000, 100_000)
                promise = pool.promise(double, path, i, numbers(i, size))
            elif kind == "err":
                promise = pool.promise(err, path, i)
            elif kind == "print":
                promise = pool.promise(say, path, i)
            elif kind == "fork":
                promise = pool.promise(fork, path, i, dice.choice(CHILDREN_END_BY))
            else:
                promise = pool.promise(crash, path, i, dice.choice(CRASHES))
            if kind == "cancel":
                self._phase.cancel_soon(promise)
            self.open.append((i, promise, wanted))

    def _settle(self, most: int) -> None:
        """Until at most so many are open; waits in one of several ways."""
        how = self._dice.choice(("result", "as_completed", "wait"))
        while len(self.open) > most:
            if how == "result":
                self._take(*self.open.popleft())
                continue
            batch = {promise: (i, promise, wanted) for i, promise, wanted in self.open}
            some = (
                wait(batch, HANG, FIRST_COMPLETED).done
                if how == "wait"
                else [next(poly.as_completed(batch, timeout=HANG))]
            )
            for each in some:
                self._take(*batch.pop(each))
            self.open = deque(batch.values())
            how = "result"

    def _take(self, i: int, promise: Task, wanted: object) -> None:
        phase = self._phase
        kind = KINDS[phase.kinds[i]]
        try:
            value = promise.result(HANG)
        except CancelledError:
            phase.outcomes[i] = WAS_CANCELLED
            phase.expect(kind == "cancel", i, "was cancelled, which nobody did")
        except poly.DroneDied as died:
            phase.outcomes[i] = DIED
            # By its process: a promise keeps nothing of its drone.
            phase.lost_by[died.drone, *re.findall(r"\(pid \d+\)", str(died))].append(i)
            phase.expect(not phase.retries, i, f"was not run again: {died}")
        except BaseException as error:
            phase.outcomes[i] = OWN_ERROR
            if not promise.done():
                tell_of(phase)
                raise
            right = kind == "err" and type(error) is ValueError and error.args == (i,)
            phase.expect(right, i, f"ended with {error!r}")
        else:
            phase.outcomes[i] = VALUE
            if kind == "array":
                assert isinstance(value, np.ndarray) and isinstance(wanted, int)
                phase.expect(is_twice(value, i, wanted), i, "has a wrong array")
                self._arrays.append((value, i, wanted))
                self.look_at_arrays(KEPT_ARRAYS)
            else:
                phase.expect(value == wanted and kind != "err", i, f"gave {value!r}")
            phase.expect(phase.retries > 0 or kind != "crash", i, "lives")
        self.settled += 1

    def look_at_arrays(self, kept: int) -> None:
        while len(self._arrays) > kept:
            array, i, size = self._arrays.popleft()
            self._phase.expect(
                is_twice(array, i, size), i, "has an array that was changed under its owner"
            )


class Phase:
    """One pool, and the account of what it was given."""

    def __init__(self, options: argparse.Namespace, retries: int, folder: str) -> None:
        self.retries = retries
        self.name = "with retries" if retries else "without retries"
        self.path = os.path.join(folder, f"ran-{retries}")
        self.map_path = os.path.join(folder, f"mapped-{retries}")
        self.kinds = bytearray()
        self.outcomes = bytearray()
        self.wrong: list[str] = []
        self.lost_by: dict[tuple[str, ...], list[int]] = defaultdict(list)  # by which death
        self.mapped: list[tuple[int, int, int]] = []  # from, to, and so many were yielded
        self.maps_ended = 0
        self.options = options
        self.submitters = [Submitter(self, number) for number in range(options.threads)]
        self._lock = threading.Lock()
        self._to_cancel: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._over = threading.Event()
        self.pool: poly.Pool | None = None
        self.killer: Killer | None = None

    def run(self, until: float, tasks: int) -> None:
        options = self.options
        with poly.Pool(options.drones, retries=self.retries, output=lambda line: None) as self.pool:
            helpers = [threading.Thread(target=each) for each in (self._cancel, self._map)]
            if options.forks:
                helpers.append(threading.Thread(target=self._fork))
            submitting = [
                threading.Thread(target=each.run, args=(until, tasks)) for each in self.submitters
            ]
            for each in helpers:
                each.start()
            try:
                with Killer(
                    self.pool, seconds=options.every, seed=f"{options.seed}-{self.retries}"
                ) as self.killer:
                    for each in submitting:
                        each.start()
                    for each in submitting:
                        each.join()
            finally:
                self._over.set()
                self._to_cancel.put(None)
                for each in helpers:
                    each.join()
        for submitter in self.submitters:
            submitter.look_at_arrays(0)

    @property
    def settled(self) -> int:
        """It grows while anything moves."""
        return self.maps_ended + sum(each.settled for each in self.submitters)

    def add_task(self, kind: str) -> int:
        """Its number."""
        with self._lock:
            self.kinds.append(KINDS.index(kind))
            self.outcomes.append(OPEN)
            return len(self.kinds) - 1

    def cancel_soon(self, promise: Task) -> None:
        self._to_cancel.put(promise)

    def expect(self, right: bool, i: int, what: str) -> None:
        if not right:
            self.wrong.append(f"{self.name}: task {i} ({KINDS[self.kinds[i]]}) {what}")

    # -- beside it ---------------------------------------------------------------------------------

    def _cancel(self) -> None:
        """In a thread: cancels some while they wait, some while they run, some when it is too
        late."""
        dice = random.Random(f"{self.options.seed}-{self.retries}-cancel")
        while (promise := self._to_cancel.get()) is not None:
            if dice.random() < 0.5:
                end = time.monotonic() + 1
                while not (promise.running() or promise.done()) and time.monotonic() < end:
                    time.sleep(0.001)
            time.sleep(dice.random() * 0.02)  # where in its life it is hit, not a synchronization
            promise.cancel()

    def _map(self) -> None:
        """In a thread: chunks of short calls."""
        dice = random.Random(f"{self.options.seed}-{self.retries}-map")
        assert self.pool is not None
        start = 0
        while not self._over.wait(dice.random() * 0.2):
            stop = start + dice.choice((1, 30, 500))
            got = start
            try:
                for value in self.pool.map(
                    quick, [self.map_path] * (stop - start), range(start, stop)
                ):
                    if value != got:
                        self.wrong.append(f"{self.name}: call {got} of a map gave {value!r}")
                    got += 1
                if got != stop:
                    self.wrong.append(
                        f"{self.name}: a map of {stop - start} calls gave {got - start}"
                    )
            except poly.DroneDied as died:
                if self.retries:
                    self.wrong.append(f"{self.name}: a map was not run again: {died}")
            except BaseException as error:
                self.wrong.append(f"{self.name}: a map ended with {error!r}")
            self.mapped.append((start, stop, got))
            start = stop
            self.maps_ended += 1

    def _fork(self) -> None:
        """In a thread: forks this process while the others are at work. The child has no pool, and
        ends."""
        dice = random.Random(f"{self.options.seed}-{self.retries}-fork")
        while not self._over.wait(dice.random() * 0.2):
            if (pid := os.fork()) == 0:
                os._exit(0)
            os.waitpid(pid, 0)

    # -- the account -------------------------------------------------------------------------------

    def judge(self) -> None:
        ran = Counter(map(int, lines(self.path)))
        for i, (kind, outcome) in enumerate(zip(self.kinds, self.outcomes, strict=True)):
            times = ran.pop(i, 0)
            if self.retries:
                right = times >= 1 or outcome == WAS_CANCELLED
            elif outcome in (VALUE, OWN_ERROR):
                right = times == 1
            else:
                right = times <= 1
            if not right or outcome == OPEN:
                self.wrong.append(
                    f"{self.name}: task {i} ({KINDS[kind]}) ran {times} times, {OUTCOMES[outcome]}"
                )
        for drone, lost in self.lost_by.items():
            if len(lost) > 1:
                kinds = [f"{i} ({KINDS[self.kinds[i]]})" for i in lost]
                self.wrong.append(f"{self.name}: the death of {' '.join(drone)} took along {kinds}")
        mapped = Counter(map(int, lines(self.map_path)))
        for start, stop, got in self.mapped:
            for i in range(start, stop):
                times = mapped.pop(i, 0)
                right = times >= 1 if self.retries else times == 1 if i < got else times <= 1
                if not right:
                    self.wrong.append(f"{self.name}: call {i} of a map ran {times} times")
        if ran or mapped:
            self.wrong.append(f"{self.name}: ran without being asked: {[*ran, *mapped][:10]}")

    def summary(self) -> str:
        count = Counter(OUTCOMES[each] for each in self.outcomes)
        calls = sum(stop - start for start, stop, _ in self.mapped)
        again = len(lines(self.path)) - len(set(lines(self.path)))
        did = dict(self.killer.did) if self.killer is not None else {}
        tasks = f"{len(self.kinds):,} tasks {dict(count)}, {again} runs again"
        return f"{self.name}: {tasks}; {calls:,} calls of maps; {did}"


def tell_of(phase: Phase) -> None:
    """Who waits for what, for whoever looks for the reason."""
    print(f"nothing moves any more, {phase.name}: {phase.pool!r}", file=sys.stderr)
    for i, promise, _ in [each for submitter in phase.submitters for each in submitter.open][:10]:
        print(f"  task {i} ({KINDS[phase.kinds[i]]}): {promise!r} {promise.spans}", file=sys.stderr)
    if phase.pool is not None:
        dispatcher = phase.pool._dispatcher
        queued = len(dispatcher.assignment.queue)
        print(f"  {queued} in the queue, wants tasks {dispatcher.wants_tasks}", file=sys.stderr)
        for handle in dispatcher.handles:
            print(
                f"  {handle.name} pid {handle.pid} {handle.state!r} "
                f"in flight {list(handle.in_flight)[:10]}",
                file=sys.stderr,
            )
    faulthandler.dump_traceback(all_threads=True)


# -- samples ---------------------------------------------------------------------------------------


class Samples:
    """What this process holds, each second; and a look whether anything moves."""

    def __init__(self, phases: list[Phase]) -> None:
        self._phases = phases
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live)
        self.taken: list[tuple[int, int, int]] = []

    def __enter__(self) -> Samples:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _live(self) -> None:
        moved, last = time.monotonic(), -1
        while not self._over.wait(1.0):
            if self._phases and self._phases[-1].settled:  # before that its pool is not up
                self.taken.append(
                    (own_memory(), len(os.listdir("/proc/self/fd")), threading.active_count())
                )
            settled = sum(each.settled for each in self._phases)
            if settled != last:
                moved, last = time.monotonic(), settled
                faulthandler.dump_traceback_later(
                    2 * HANG, exit=True
                )  # should this thread be held up too
            elif time.monotonic() - moved > HANG:
                tell_of(self._phases[-1])
                os._exit(3)

    def quarters(self, since: int) -> Iterator[tuple[str, float, float, float]]:
        """Of each thing: its name, the medians of the first and last quarters, and what the last
        may be."""
        taken = self.taken[since:]
        if not taken:
            return
        quarter = max(1, len(taken) // 4)
        names = ("own memory, MiB", "descriptors", "threads")
        # The timeline remembers 30,000 tasks, of 0.6 KiB each; a short run has warmed up in its
        # last quarter only.
        warming = 32 if len(taken) >= 120 else 64
        allowed: tuple[Callable[[float], float], ...] = (
            lambda f: 1.1 * f + warming,
            lambda f: f + 8,
            lambda f: f + 2,
        )
        for name, values, most in zip(names, zip(*taken, strict=True), allowed, strict=True):
            scale = 1 << 20 if "MiB" in name else 1
            first, last = (
                statistics.median(part) / scale for part in (values[:quarter], values[-quarter:])
            )
            yield name, first, last, most(first)


def own_memory() -> int:
    """Bytes. Of arrays that came home and are still looked at there are now more and now fewer:
    they do not count."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--tasks", type=int, default=20_000, help="at least so many, both phases together"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--retries", type=int, default=1000, help="of the second phase")
    parser.add_argument("--drones", type=int, default=4)
    parser.add_argument(
        "--phase", type=int, choices=(1, 2), help="only the one without retries, or with"
    )
    parser.add_argument("--every", type=float, default=0.2, help="seconds between two faults")
    parser.add_argument("--threads", type=int, default=1, help="that submit")
    parser.add_argument(
        "--forks", action="store_true", help="by a thread of this process, and by tasks"
    )
    parser.add_argument(
        "--switch-interval", type=float, help="seconds, of this interpreter's threads"
    )
    parser.add_argument("--collect-every", type=int, help="so many new objects, the cyclic garbage")
    options = parser.parse_args(args)
    if options.switch_interval is not None:
        sys.setswitchinterval(options.switch_interval)
    if options.collect_every is not None:
        gc.set_threshold(options.collect_every)
    print(f"seed {options.seed}", flush=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    poly.doit(abs, 1)  # what is loaded once is loaded
    began, open_before, threads_before = (
        time.monotonic(),
        len(os.listdir("/proc/self/fd")),
        threading.active_count(),
    )
    phases: list[Phase] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder, Samples(phases) as samples:
        which = (
            (0, options.retries)
            if options.phase is None
            else ((0, options.retries)[options.phase - 1],)
        )
        for number, retries in enumerate(which, 1):
            since = len(samples.taken)
            phases.append(Phase(options, retries, folder))
            phases[-1].run(
                began + number * options.minutes * 60 / len(which), options.tasks // len(which)
            )
            quarters = list(samples.quarters(since))  # before the account, which takes memory
            phases[-1].judge()
            print(phases[-1].summary())
            for name, first, last, most in quarters:
                print(
                    f"  {name}: {first:.1f} in the first quarter, {last:.1f} in the last "
                    f"(at most {most:.1f})",
                    flush=True,
                )
                if last > most:
                    phases[-1].wrong.append(
                        f"{phases[-1].name}: {last:.1f} {name}, and {first:.1f} at first"
                    )
    faulthandler.cancel_dump_traceback_later()
    wrong = [each for phase in phases for each in phase.wrong]
    try:
        wait_for(lambda: len(os.listdir("/proc/self/fd")) <= open_before)
        wait_for(lambda: threading.active_count() <= threads_before)
    except AssertionError:
        wrong.append(
            f"left open: {os.listdir('/proc/self/fd')}, {threading.enumerate()}; "
            f"before {open_before}"
        )
    for each in wrong[:TOLD]:
        print(f"WRONG {each}")
    print(f"{time.monotonic() - began:.0f} s, {len(wrong)} violations, seed {options.seed}")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
