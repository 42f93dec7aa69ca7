"""Run a command on a machine that stands still at random: all of its processes are frozen, and let
go on.

    python tests/freezer.py --seed 1 -- python -m pytest

Needs root and a cgroup freezer (version 1 or 2). Unlike SIGSTOP, a freeze cannot be seen: the
parent is not told, and no call is interrupted. So it is as if the machine had no processor for
these processes."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

OLD = Path("/sys/fs/cgroup/freezer")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--frozen",
        type=float,
        nargs=2,
        default=(0.005, 1.2),
        metavar="SECONDS",
        help="least and most",
    )
    parser.add_argument(
        "--running",
        type=float,
        nargs=2,
        default=(0.05, 1.5),
        metavar="SECONDS",
        help="least and most",
    )
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    group = (OLD if OLD.is_dir() else Path("/sys/fs/cgroup")) / f"polycephaly-freezer-{os.getpid()}"
    switch, on, off = (
        ("freezer.state", "FROZEN", "THAWED") if OLD.is_dir() else ("cgroup.freeze", "1", "0")
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen, times, seconds = Random(options.seed), 0, 0.0
    group.mkdir()
    procs = group / "cgroup.procs"
    try:
        with subprocess.Popen(
            options.command, preexec_fn=lambda: procs.write_text(str(os.getpid()))
        ) as command:
            try:
                while not ended_within(command, chosen.uniform(*options.running)):
                    times, frozen = times + 1, chosen.uniform(*options.frozen)
                    (group / switch).write_text(on)
                    ended_within(command, frozen)
                    (group / switch).write_text(off)
                    seconds += frozen
            except BaseException:  # Ctrl-C, or SIGTERM
                (group / switch).write_text(off)
                command.terminate()
                raise
    finally:
        (group / switch).write_text(off)
        end = time.monotonic() + 10
        while procs.read_text() and time.monotonic() < end:  # multiprocessing's tracker, say
            time.sleep(0.01)
        group.rmdir()
    print(f"frozen {times} times, {seconds:.0f} s altogether (seed {options.seed})", flush=True)
    return command.returncode


def ended_within(command: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        command.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
