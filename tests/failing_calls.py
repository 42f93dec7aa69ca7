"""System calls that fail: by hand, where strace can attach to processes of the same user.

    python tests/failing_calls.py                   all calls and errors
    python tests/failing_calls.py --only epoll_wait,kill

A program makes a pool, and uses and ends it. Before that, strace attaches to it, and to all that it
starts, and has one system call fail: the first, third or twentieth of a kind in each thread. Then
whatever happens must be a result or an error, and the program must end: "hangs" is a bug, and so is
a process that is left. Ends with status 1 where there was one."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARKER = "POLYCEPHALY_FAILING_CALL"
SECONDS = 60.0
ABORTED = "Fatal Python error: Aborted"
ERRORS = {
    "epoll_wait": "EBADF ENOMEM EINTR",
    "epoll_ctl": "ENOMEM ENOSPC",
    "epoll_create1": "EMFILE ENOMEM",
    "poll": "ENOMEM EINTR",
    "sendto": "ENOBUFS EPIPE ECONNRESET EAGAIN",
    "sendmsg": "ENOBUFS EPIPE ECONNRESET EAGAIN ETOOMANYREFS",
    "recvfrom": "ENOMEM ECONNRESET EAGAIN",
    "recvmsg": "ENOMEM EMFILE ECONNRESET",
    "read": "EIO EAGAIN",
    "write": "EIO ENOSPC EAGAIN",
    "wait4": "ECHILD EINTR",
    "waitid": "ECHILD EINTR",
    "kill": "ESRCH EPERM",
    "tgkill": "ESRCH",
    "pidfd_open": "EMFILE ESRCH",
    "pidfd_send_signal": "ESRCH EPERM",
    "rt_sigaction": "EINVAL",
    "clone": "EAGAIN ENOMEM",
    "clone3": "EAGAIN ENOMEM",
    "mmap": "ENOMEM",
    "madvise": "ENOMEM EINVAL",
    "memfd_create": "EMFILE ENOMEM",
    "ftruncate": "ENOSPC",
    "fcntl": "EMFILE EINVAL",
    "socketpair": "EMFILE ENFILE",
    "pipe2": "EMFILE ENFILE",
    "eventfd2": "EMFILE ENFILE",
    "openat": "EMFILE ENOSPC",
    "mkdir": "ENOSPC EACCES",
    "prctl": "EINVAL",
    "setsid": "EPERM",
}
WHICH = (1, 3, 20)

PROGRAM = """
import os
import sys
import time

import numpy

import polycephaly as poly

print("ready", flush=True)
sys.stdin.readline()


def told(call, *args):
    try:
        call(*args)
    except Exception as error:
        print(type(error).__name__, str(error).partition("\\n")[0][:100])


def use():
    with poly.Pool(2) as pool:
        told(pool.doit, "6 * 7")
        told(lambda: list(pool.map(abs, range(3000))))
        told(pool.doit, numpy.negative, numpy.ones(300_000))
        told(pool.doit, print, "a line")
        told(lambda: pool.promise(time.sleep, 100).cancel())
        told(lambda: pool.options(timeout=0.2).doit(time.sleep, 100))
        told(pool.doit, os._exit, 1)
        told(pool.refresh)
        told(pool.doit, "6 * 7")


told(use)
told(use)
print("over", flush=True)
"""


def cases(only: list[str]) -> Iterator[tuple[str, str, int]]:
    for call, errors in ERRORS.items():
        if not only or call in only:
            for error in errors.split():
                for which in WHICH:
                    yield call, error, which


def run(script: Path, call: str, error: str, which: int) -> tuple[str, list[str]]:
    """Return what happened, in a word, and what the program printed."""
    mark = os.urandom(8).hex()
    program = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, MARKER: mark},
        text=True,
    )
    assert program.stdin is not None and program.stdout is not None
    program.stdout.readline()
    tracer = subprocess.Popen(
        f"strace -f -qq -o {os.devnull} -p {program.pid} -e trace={call} "
        f"-e inject={call}:error={error}:when={which}".split()
    )
    time.sleep(0.3)
    try:
        output, _ = program.communicate("go\n", timeout=SECONDS)
        word = "ends" if program.returncode == 0 and "over" in output else "fails"
    except subprocess.TimeoutExpired:
        word = "hangs"
    tracer.terminate()
    tracer.wait()
    if word == "hangs":
        program.send_signal(signal.SIGABRT)  # it writes its stacks
        output, _ = program.communicate()
    time.sleep(0.5)
    left = [
        pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_ours(pid, mark)
    ]
    for pid in left:
        os.kill(pid, 9)
    return "leaves processes" if left and word != "hangs" else word, output.splitlines()


def _is_ours(pid: int, mark: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return f"{MARKER}={mark}".encode() in environ.split(b"\0") and state not in "ZX"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="calls, separated by commas")
    only = [each for each in parser.parse_args().only.split(",") if each]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(PROGRAM)
        for call, error, which in cases(only):
            began = time.monotonic()
            word, lines = run(script, call, error, which)
            wrong += word in ("hangs", "leaves processes")
            seconds = time.monotonic() - began
            stacks = lines.index(ABORTED) if ABORTED in lines else len(lines)
            told = [line for line in lines[:stacks] if line not in ("a line", "over")]
            print(f"{call:18} {error:12} {which:3} {word:6} {seconds:5.1f} s", *told[:3], sep="  ")
            if lines[stacks:]:
                print(*lines[stacks:], sep="\n    ")
            sys.stdout.flush()
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
