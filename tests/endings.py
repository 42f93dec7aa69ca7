"""How a controller may end, what may be going on then, and whether anything is left: the matrix,
and random moments.

    python tests/endings.py --moments 100 --seed 7

runs every ending with every load, then a script that starts pools, works, nests, starts programs
and stops again, and that is ended at random moments from its first line to its last. It prints what
was left, if anything, with the moment, and then its exit status is 1. What is new in /dev/shm
counts, whoever made it: so nothing else should use that meanwhile. `tests/test_endings.py` runs a
part of both."""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TextIO

from census import DEADLINE, MARKER, Patience, alive, describe, homes, marked, pids, shared_memory
from faults import lines
from scripts import Script

# Seconds: from its ending to the controller's end; it may wait for what its drones do at exit.
ENDS_WITHIN = 30.0
GOES_ON_FOR = 40.0  # seconds for a script whose zygote was killed to come to its end by itself

# -- the matrix ------------------------------------------------------------------------------------

CONTROLLER = """
    import ctypes, faulthandler, logging, os, signal, subprocess, sys, threading, time
    import polycephaly as poly
    from faults import (
        append, block_for_ever, hold_until, lines, sleep_holding_the_gil, spin_for_ever, wait_for
    )

    start, load, ending, *terminal = sys.argv[1:]
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    up, up_within, go, out = (os.path.join(here, n) for n in ("up", "up-within", "go", "out"))

    def nest():
        global inner
        inner = poly.Pool(2)
        inner.promise(block_for_ever, up_within)
        inner.promise(deeper)
        # Not before they have begun may this drone, their controller, get work that holds its
        # interpreter.
        wait_for(lambda: len(lines(up_within)) == 2)
        append(up, "nested")

    def deeper():
        global deepest
        deepest = poly.Drone()
        deepest.promise("import subprocess; child = subprocess.Popen(['sleep', '1000'])").value
        deepest.doit(spin_for_ever, up_within)

    def programs():
        children.append(subprocess.Popen(["sleep", "1000"]))
        children.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))
        children.append(subprocess.Popen("sleep 1000 & exec setsid sleep 1000", shell=True))
        append(up, "programs")

    def look_at_memory(buffer):
        global kept
        kept = buffer, bytes(500_000)
        append(up, "memory")
        hold_until("/nowhere", up)

    def tell():
        for i in range(10):
            print("line", i)
            logging.warning("record")
        append(up, "told")

    def note(what):
        time.sleep(0.02)
        append(out, what)

    class Handler(logging.Handler):
        def emit(self, record):
            note("record")

    children = []

    LOADS = {
        "idle": [],
        "busy": [(block_for_ever, up), (spin_for_ever, up)],
        "nested": [(nest,)],
        "programs": [(programs,)],
        "gil": [(sleep_holding_the_gil, up), (sleep_holding_the_gil, up)],
        "memory": [(look_at_memory, bytes(1_000_000))],
        "outstanding": [(tell,)],
        "all": [(spin_for_ever, up), (nest,), (programs,), (sleep_holding_the_gil, up)],
    }
    SIGNS = {
        "idle": 0, "busy": 2, "nested": 1, "programs": 1, "gil": 2, "memory": 2, "outstanding": 1,
        "all": 4,
    }

    def wait_until_up(drones):
        try:
            wait_for(lambda: len(lines(up)) >= SIGNS[load])
        except AssertionError:
            print("only these are up:", lines(up), drones, file=sys.stderr)
            raise

    def begin():
        if ending == "drone's thread":
            drones = [poly.Drone(start=start) for _ in LOADS[load] or "1"]
            going = [drone.promise(*work) for drone, work in zip(drones, LOADS[load])]
            wait_until_up(drones)
            return drones, going
        global pool, shared
        output = (lambda line: note("line")) if load == "outstanding" else "forward"
        logging.getLogger().addHandler(Handler())
        pool = poly.Pool(len(LOADS[load]) + 1, start=start, output=output)  # one is free
        pool.doit(abs, 1)
        shared = pool.share(bytes(300_000)) if load == "memory" else None
        # Those that are submitted are finished at the end of the program.
        submit = pool.submit if load == "outstanding" else pool.promise
        going = [submit(*work) for work in LOADS[load]]
        for each in going:
            each.add_done_callback(lambda done: note("callback"))
        wait_until_up(pool.drones)
        return pool, going

    def go_on_without_the_main_thread():
        def state():
            with open(f"/proc/self/task/{os.getpid()}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0]
        wait_for(lambda: state() == "Z")
        os._exit(4 if pool.doit(abs, -4) == 4 else 99)

    def end():
        if ending == "exception":
            raise ZeroDivisionError("the script's own")
        elif ending == "with":
            with pool:
                1 / 0
        elif ending == "sys.exit":
            sys.exit(3)
        elif ending == "os._exit":
            os._exit(4)
        elif ending == "os._exit in a thread":
            threading.Thread(target=os._exit, args=(4,)).start()
            threading.Event().wait()
        elif ending == "segfault":
            ctypes.string_at(0)
        elif ending == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif ending == "main thread":
            threading.Thread(target=go_on_without_the_main_thread).start()
            ctypes.CDLL(None).pthread_exit(None)
        elif ending in ("zygote", "drone's thread"):
            hold_until(go)
            if ending == "zygote":
                assert pool.doit(abs, -1) == 1
        elif ending != "return":
            pool.promise(block_for_ever).value

    def owner():
        its = begin()
        print("zygote 0")
        print("up", flush=True)
        hold_until(go)

    if __name__ == "__main__":
        faulthandler.register(signal.SIGUSR1)  # tells where it hangs, should it do so
        if terminal:
            # It leads a session without one: this is its terminal now.
            os.close(os.open(terminal[0], os.O_RDWR))
        if ending == "drone's thread":
            thread = threading.Thread(target=owner)
            thread.start()
            thread.join()
            os.remove(go)
            print("over", flush=True)
        else:
            its = begin()
            print("zygote", pool.doit(os.getppid))
            print("up", flush=True)
        end()
"""

LOADS = ("idle", "busy", "nested", "programs", "gil", "memory", "outstanding", "all")
FINISHING = ("return", "sys.exit")
"""Ends at which what a pool has to tell is told: of the load `outstanding`, 10 lines, as many
records, and a callback.
"""

STATUS = {
    "return": 0, "exception": 1, "with": 1, "sys.exit": 3, "os._exit": 4, "os._exit in a thread": 4,
    "segfault": -signal.SIGSEGV, "SIGKILL": -signal.SIGKILL, "SIGTERM": -signal.SIGTERM,
    "SIGINT": -signal.SIGINT, "SIGHUP": -signal.SIGHUP, "hang-up": -signal.SIGHUP,
    "SIGTERM to all": -signal.SIGTERM,
    "main thread": 4, "drone's thread": 0, "zygote": 0, "zygote and controller": -signal.SIGKILL,
}  # fmt: skip
"""How a controller may end, and its exit status then. `hang-up`: its terminal is closed. `SIGTERM
to all`: to it, its zygotes and its drones at once, as `pkill -f` does. Of the last four, the first
two are not its end, but that of one of its threads, and `zygote` is SIGKILL for that: what hung on
those goes at once, and the controller goes on."""

OF_SPAWN = (
    "return",
    "exception",
    "os._exit",
    "segfault",
    "SIGKILL",
    "SIGTERM",
    "SIGINT",
    "drone's thread",
    "zygote",
)


@dataclass
class Ended:
    """How a script ended: `seconds` from then until nothing of it was left."""

    status: int | None = None
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    said: str = ""


def run_ending(ending: str, load: str, start: str = "fork") -> Ended:
    """A script with this load that ends in this way. All that is wrong with it is told, and taken
    away."""
    ended, memory = Ended(), shared_memory()
    terminal, its_end = os.openpty() if ending == "hang-up" else (-1, -1)
    name = [os.ttyname(its_end)] if its_end >= 0 else []
    try:
        with Script(CONTROLLER, start, load, ending, *name) as script:
            while not (line := script.read_line()).startswith("zygote"):
                pass
            controller, zygote = script.process.pid, int(line.split()[1])
            script.read_until("up")
            if ending in ("SIGTERM", "SIGINT", "SIGHUP"):
                script.signal(getattr(signal, ending))
            elif ending == "hang-up":
                os.close(terminal)
                terminal = -1
            elif ending == "SIGTERM to all":
                kill_all([controller, *images_of(script)], signal.SIGTERM)
            elif ending == "zygote and controller":
                kill_all([zygote, controller], signal.SIGKILL)
            elif ending in ("zygote", "drone's thread"):
                if ending == "zygote":
                    below = tree(zygote)
                    kill_all([zygote], signal.SIGKILL)
                else:
                    below = below_of(script)
                    open(go_file(script), "w").close()
                    script.read_until("over")
                wait_until_dead(below, ended)
                open(go_file(script), "w").close()
            wait_until_clean(script, memory, ended, ENDS_WITHIN)
            if load == "outstanding" and ending in FINISHING:
                told = lines(os.path.join(script.folder.name, "out"))
                if sorted(told) != ["callback", *["line"] * 10, *["record"] * 10]:
                    ended.wrong.append(f"told before the end: {told}")
            if ended.status != STATUS[ending]:
                ended.wrong.append(f"exit status {ended.status}, not {STATUS[ending]}")
    finally:
        for fd in (terminal, its_end):
            if fd >= 0:
                os.close(fd)
    return ended


def go_file(script: Script) -> str:
    return os.path.join(script.folder.name, "go")


# -- random moments --------------------------------------------------------------------------------

FROM_START_TO_STOP = """
    print("now", flush=True)
    import ctypes, faulthandler, os, signal, subprocess, sys, threading
    from concurrent.futures import CancelledError
    from concurrent.futures.process import BrokenProcessPool

    def bomb(ending, delay):
        threading.Event().wait(delay)
        os._exit(4) if ending == "os._exit" else ctypes.string_at(0)

    if __name__ == "__main__":
        faulthandler.register(signal.SIGUSR1)
        start, ending, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
        if ending in ("os._exit", "segfault"):
            threading.Thread(target=bomb, args=(ending, delay), daemon=True).start()

    import polycephaly as poly

    def programs():
        global children
        children = [
            subprocess.Popen(["sleep", "1000"]),
            subprocess.Popen(["sleep", "1000"], start_new_session=True),
            subprocess.Popen("sleep 1000 & exec setsid sleep 1000", shell=True),
        ]

    def nest():
        global kept
        kept = poly.Drone()
        kept.doit(programs)
        with poly.Pool(2) as inner:
            inner.promise(programs)
            return sum(inner.map(abs, range(-100, 0)))

    def thread():
        poly.Drone().doit(programs)

    def work(pool):
        some = [pool.promise(abs, -n) for n in range(20)]
        others = [pool.promise(nest), pool.promise(programs)]
        with pool.share(bytes(300_000)) as shared:
            pool.doit(len, shared)
        pool.doit(bytes, 500_000)
        list(pool.map(abs, range(-2000, 0)))
        for each in some + others:
            each.value

    def steps():
        with poly.Pool(2, start=start) as pool:
            work(pool)
        pool = poly.Pool(2)
        pool.promise(programs)
        pool.refresh()
        owner = threading.Thread(target=thread)
        owner.start()
        work(pool)
        owner.join()
        poly.doit(abs, -1)
        del pool

    if __name__ == "__main__":
        try:
            steps()
        except (poly.DroneDied, BrokenProcessPool, CancelledError, RuntimeError) as error:
            if ending != "zygote":
                raise
            print(f"without its zygote: {error!r}", file=sys.stderr)
"""

OF_MOMENTS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "zygote", "os._exit", "segfault")
ENDED_ITSELF = 0


@dataclass(frozen=True)
class Moment:
    """When, as a part of the time from the script's first line to its end, and how."""

    ending: str
    start: str
    part: float
    pick: float  # which of the zygotes there are, or of the drones that have some themselves

    def __str__(self) -> str:
        return f"{self.ending} ({self.start}) at {self.part:.4f} of the way (pick {self.pick:.4f})"


def moments(count: int, seed: int, endings: tuple[str, ...] = OF_MOMENTS) -> Iterator[Moment]:
    chance = random.Random(seed)
    for _ in range(count):
        start = "spawn" if chance.random() < 0.25 else "fork"
        yield Moment(chance.choice(endings), start, chance.random(), chance.random())


def seconds_from_start_to_stop(start: str, runs: int = 3) -> float:
    """Of a script that nobody disturbs: the median of some runs."""
    taken = []
    for _ in range(runs):
        with Script(FROM_START_TO_STOP, start, "none", "0") as script:
            script.read_until("now")
            begun, ended = time.monotonic(), Ended()
            wait_until_clean(script, shared_memory(), ended, GOES_ON_FOR)
            taken.append(time.monotonic() - begun - ended.seconds)
            if ended.status or ended.wrong:
                raise AssertionError(f"exit status {ended.status}; {ended.wrong}\n{ended.said}")
    return statistics.median(taken)


def run_moment(moment: Moment, seconds: float) -> Ended:
    """`seconds` is how long the script takes from start to stop."""
    ended, memory, delay = Ended(), shared_memory(), moment.part * seconds
    with Script(FROM_START_TO_STOP, moment.start, moment.ending, str(delay)) as script:
        script.read_until("now")
        until = time.monotonic() + delay
        if moment.ending.startswith("SIG"):
            if not has_ended(script, until - time.monotonic()):
                script.signal(getattr(signal, moment.ending))
        elif moment.ending == "zygote":
            has_ended(script, until - time.monotonic())
            while not (those := parents_of(script)) and not has_ended(script, 0):
                pass
            if those:
                chosen = those[int(moment.pick * len(those))]
                below = tree(chosen)
                kill_all([chosen], signal.SIGKILL)
                wait_until_dead(below, ended)
        wait_until_clean(
            script, memory, ended, GOES_ON_FOR if moment.ending == "zygote" else ENDS_WITHIN + delay
        )
    if ended.status not in ALLOWED[moment.ending]:
        ended.wrong.append(f"exit status {ended.status}\n{ended.said}")
    return ended


ALLOWED = {
    **{
        name: (-getattr(signal, name), ENDED_ITSELF)
        for name in OF_MOMENTS
        if name.startswith("SIG")
    },
    "zygote": (ENDED_ITSELF,),
    "os._exit": (4, ENDED_ITSELF),
    "segfault": (-signal.SIGSEGV, ENDED_ITSELF),
}
"""The exit statuses that an ending may have: its own, or that of a script which was at its end
already."""


# -- who is there ----------------------------------------------------------------------------------


def parent(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return int(stat.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def tree(root: int) -> list[int]:
    """`root` and all below it."""
    parents = {pid: parent(pid) for pid in pids()}
    found = [root]
    for each in found:
        found += [pid for pid, its in parents.items() if its == each]
    return found


def below_of(script: Script) -> list[int]:
    """All below it, without what multiprocessing has for itself."""
    return [pid for pid in tree(script.process.pid)[1:] if "resource_tracker" not in describe(pid)]


def images_of(script: Script) -> list[int]:
    """Its zygotes and drones, the outermost first."""
    return [pid for pid in below_of(script) if "python" in describe(pid)]


def parents_of(script: Script) -> list[int]:
    """From which of its images others come: zygotes, and drones that have some of their own."""
    images = images_of(script)
    parents = {parent(pid) for pid in images}
    return [pid for pid in images if pid in parents or parent(pid) == script.process.pid]


def kill_all(chosen: list[int], number: int) -> None:
    for pid in chosen:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


# -- what is left ----------------------------------------------------------------------------------


def has_ended(script: Script, seconds: float) -> bool:
    """Waits so long at most."""
    pidfd = os.pidfd_open(script.process.pid)
    try:
        return bool(select.select([pidfd], [], [], max(0.0, seconds))[0])
    finally:
        os.close(pidfd)


def wait_until_dead(those: list[int], ended: Ended) -> None:
    """They should go, and be gone, though their controller goes on."""
    begun, patience = time.monotonic(), Patience(DEADLINE)
    while left := [pid for pid in those if alive(pid)]:
        if patience.over:
            ended.wrong += [f"left while the controller goes on: {describe(pid)}" for pid in left]
            kill_all(left, signal.SIGKILL)
            break
        patience.nap()
    ended.seconds = time.monotonic() - begun


def wait_until_clean(script: Script, memory: set[str], ended: Ended, limit: float) -> None:
    """Waits for the script's end, and then until nothing is left of it: tells in `ended` how that
    went."""
    if not has_ended(script, limit):
        script.signal(signal.SIGUSR1)  # faulthandler says on stderr where it is
        has_ended(script, 1)
        ended.wrong.append(f"it has not ended within {limit:.1f} s")
        script.process.kill()
    begun = time.monotonic()
    ended.status = script.wait()
    patience = Patience(DEADLINE)
    while left := left_of(script, memory):
        if patience.over:
            ended.wrong += left
            kill_all(list(marked(script.run)), signal.SIGKILL)
            break
        patience.nap()
    ended.seconds = max(ended.seconds, time.monotonic() - begun)
    ended.said = what_there_is(script.process.stderr).strip()


def what_there_is(stream: TextIO | None) -> str:
    """What can be read of it; who is left may hold its other end, so there may be no end."""
    assert stream is not None
    os.set_blocking(stream.fileno(), False)
    said = b""
    while True:
        try:
            some = os.read(stream.fileno(), 1 << 16)
        except BlockingIOError:
            some = b""
        if not some:
            return said.decode(errors="replace")
        said += some


def left_of(script: Script, memory: set[str]) -> list[str]:
    """Processes, directories and files (of sockets too), shared memory."""
    folder = script.folder.name
    own = {"script.py", "up", "up-within", "go", "out"}
    files = {os.path.join(folder, name) for name in os.listdir(folder) if name not in own} | homes(
        folder
    )
    left = [f"process {describe(pid)}" for pid in sorted(marked(script.run))]
    for path in sorted(files):
        with suppress(FileNotFoundError):  # it goes just now
            left.append(f"{path} {sorted(os.listdir(path)) if os.path.isdir(path) else ''}")
    return left + [f"/dev/shm/{name}" for name in sorted(shared_memory() - memory)]


# -- the program -----------------------------------------------------------------------------------


@dataclass
class Tally:
    runs: int = 0
    findings: int = 0
    slowest: float = 0.0
    slowest_of: str = ""
    statuses: dict[str, int] = field(default_factory=dict)

    def take(self, what: str, ended: Ended) -> None:
        self.runs += 1
        if not ended.wrong and ended.seconds >= self.slowest:
            self.slowest, self.slowest_of = ended.seconds, what
        if ended.wrong:
            self.findings += 1
            print(
                f"FINDING: {what}: exit status {ended.status}",
                *ended.wrong,
                sep="\n    ",
                flush=True,
            )

    def tell(self, name: str, seconds: float) -> None:
        print(
            f"{name}: {self.runs} runs in {seconds:.0f} s, {self.findings} with findings; "
            f"slowest clean-up {self.slowest:.3f} s ({self.slowest_of})",
            flush=True,
        )


def main() -> int:
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background jobs ignore it, and what they start
    asked = argparse.ArgumentParser(
        description="Ends controllers in many ways, and looks for what is left."
    )
    asked.add_argument("--moments", type=int, default=100, help="how many random moments")
    asked.add_argument(
        "--seed", type=int, default=None, help="of the moments; by default another each time"
    )
    asked.add_argument("--no-matrix", action="store_true", help="the random moments only")
    asked.add_argument(
        "--endings", default="", help="only those whose name is here, separated by commas"
    )
    asked.add_argument("--loads", default="", help="in the matrix, only those")
    options = asked.parse_args()
    os.environ.setdefault(MARKER, "endings")
    seed = random.randrange(1 << 30) if options.seed is None else options.seed
    only = set(filter(None, options.endings.split(",")))
    loads = set(filter(None, options.loads.split(",")))
    print(f"seed {seed}", flush=True)
    findings = 0
    if not options.no_matrix:
        matrix, begun = Tally(), time.monotonic()
        promised = tuple(name for name in STATUS if name != "zygote and controller" or name in only)
        for start, endings in (("fork", promised), ("spawn", OF_SPAWN)):
            for ending in endings:
                for load in LOADS:
                    if (not only or ending in only) and (not loads or load in loads):
                        try:
                            ended = run_ending(ending, load, start)
                        except AssertionError as error:  # it did not even begin
                            ended = Ended(wrong=[str(error)])
                        matrix.take(f"{ending} x {load}, {start}", ended)
        matrix.tell("matrix", time.monotonic() - begun)
        findings += matrix.findings
    if options.moments:
        those = tuple(ending for ending in OF_MOMENTS if not only or ending in only)
        times = {start: seconds_from_start_to_stop(start) for start in ("fork", "spawn")}
        print(
            "from start to stop:",
            ", ".join(f"{time:.2f} s ({start})" for start, time in times.items()),
            flush=True,
        )
        random_ones, begun, by_itself = Tally(), time.monotonic(), 0
        counts = dict.fromkeys(those, 0)
        for number, moment in enumerate(moments(options.moments, seed, those)):
            ended = run_moment(moment, times[moment.start])
            counts[moment.ending] += 1
            by_itself += moment.ending != "zygote" and ended.status == ENDED_ITSELF
            random_ones.take(f"moment {number}: {moment}", ended)
        random_ones.tell("moments", time.monotonic() - begun)
        print(
            ", ".join(f"{count} {name}" for name, count in counts.items()),
            f"({by_itself} had ended before)",
        )
        findings += random_ones.findings
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
