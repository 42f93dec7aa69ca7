"""A terminal with a Python in its foreground."""

import os
import pty
import select
import subprocess
import sys
import time


class Terminal:
    """A Python at a terminal of its own, as a user has it: a prompt, or a script."""

    def __init__(self, folder, *command):
        tests = os.path.dirname(os.path.abspath(__file__))
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([tests, os.path.dirname(tests)]),
            "TMPDIR": str(folder),
        }
        env |= {"TERM": "dumb", "PYTHON_BASIC_REPL": "1"}
        self.keys, its = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, *(command or ["-q"])], stdin=its, stdout=its, stderr=its, env=env,
            start_new_session=True, preexec_fn=_take_terminal,
        )  # fmt: skip
        os.close(its)
        self.said = ""

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.keys)

    def type(self, text):
        os.write(self.keys, text.encode())

    def read_until(self, wanted, seconds=60.0):
        end = time.monotonic() + seconds
        while wanted not in self.said:
            assert time.monotonic() < end, f"{wanted!r} did not come, but {self.said!r}"
            if select.select([self.keys], [], [], 0.1)[0]:
                try:
                    self.said += os.read(self.keys, 4096).decode()
                except OSError:  # its other end is closed
                    assert wanted in self.said, self.said
        said, _, self.said = self.said.partition(wanted)
        return said


def _take_terminal():
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
