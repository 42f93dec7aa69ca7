"""Scripts run as a user runs them: a real file, a fresh interpreter, `__main__` being the
script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from types import TracebackType

from census import LEAK_SECONDS, MARKER, Patience, homes, wait_until_gone
from faults import wait_for

from polycephaly.runtime.procfs import state_of

TIMEOUT = 90.0  # less than the limit of a test


class Script:
    """A running script. What it starts carries the marker `run`, so that it is found wherever it
    is."""

    def __init__(
        self,
        text: str,
        *args: str,
        python_args: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ):
        self.folder = tempfile.TemporaryDirectory(prefix="s-")
        self.path = os.path.join(self.folder.name, "script.py")
        with open(self.path, "w") as file:
            file.write(textwrap.dedent(text))
        self.run = f"script-{os.urandom(8).hex()}"
        tests = os.path.dirname(os.path.abspath(__file__))
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([tests, os.path.dirname(tests)]),
            "TMPDIR": self.folder.name,
            **(env or {}),
            MARKER: self.run,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-u", *python_args, self.path, *args],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environ, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Script:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.folder.cleanup()

    def read_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            assert self.process.stderr is not None
            raise AssertionError(f"the script ended early: {self.process.stderr.read()}")
        return line.rstrip("\n")

    def read_until(self, wanted: str) -> None:
        while self.read_line() != wanted:
            pass

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait_until_stopped(self) -> None:
        """By itself: with SIGSTOP."""
        wait_for(lambda: state_of(self.process.pid) == "T")

    def stand_still(self, seconds: float) -> None:
        """It stops itself: for so long."""
        self.wait_until_stopped()
        time.sleep(seconds)
        self.signal(signal.SIGCONT)

    def wait(self, timeout: float = TIMEOUT) -> int:
        return self.process.wait(timeout)

    def left(self, seconds: float = LEAK_SECONDS) -> list[str]:
        """What is left of it and of all that it started, `seconds` after now: processes and
        directories."""
        patience = Patience(seconds)
        left = wait_until_gone(self.run, patience)
        while (found := homes(self.folder.name)) and not patience.over:
            patience.nap()
        return left + sorted(found)


def run_script(
    text: str,
    *args: str,
    timeout: float = TIMEOUT,
    python_args: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs `text` to its end and checks that nothing of it is left."""
    with Script(text, *args, python_args=python_args, env=env) as script:
        try:
            out, err = script.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            script.signal(signal.SIGABRT)
            script.process.kill()
            out, err = script.process.communicate(timeout=5)
            raise AssertionError(
                f"the script did not end within {timeout} s\n{out}\n{err}"
            ) from None
        left = script.left()
        assert not left, left
        return subprocess.CompletedProcess(script.path, script.process.returncode, out, err)


def output_of(
    text: str, *args: str, timeout: float = TIMEOUT, python_args: tuple[str, ...] = ()
) -> str:
    """What the script printed; it must end well and say nothing on stderr."""
    done = run_script(text, *args, timeout=timeout, python_args=python_args)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", done.stderr
    return done.stdout
