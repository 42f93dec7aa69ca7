"""Sample the Python stacks of threads of this process, many times a second.

    own thread ── every 1/hertz s: sys._current_frames ──> _counts, by stack ──report──> plain data

The thread takes no lock of another thread, and keeps no frame from one sample to the next, so that
the objects of the sampled code are freed as they would be without it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from .._compat import current_frames
from .clock import monotonic
from .fork_guard import OwnThread
from .tuning import tuning

MAX_HERTZ = 1000
OTHERS = ("others", "", 0)
"""The frame of samples whose stacks are not known."""
C_CODE = ("C code of a task", "", 0)
"""The frame of samples in which no Python function of a task is running."""
SWITCH_SECONDS = 0.0005
"""After this time, a task that computes lets the sampler run. By Python's default of 5 ms, shorter
tasks would only be sampled after their end, that is, never.
"""

Frame = tuple[str, str, int]
"""Function, file and line."""
Targets = Callable[[], Iterable[tuple[int, str]]]
_Key = tuple[int, ...]  # id of the code and line, in turns, innermost first


class StackSampler:
    """A thread that samples until `stop`.

    Parameters
    ----------
    hertz
        Samples a second. A sample that was delayed, because C code held the interpreter, counts as
        many times as samples were due.
    targets
        Returns the threads to sample now, each with the file of the functions that run its tasks.
        Only stacks that contain such a function are counted, without that frame and the outer ones;
        "": all stacks are counted, whole.
    switch_seconds
        The interpreter's switch interval until `stop`, if shorter than the present one; 0: as is.

    Raises
    ------
    RuntimeError
        If no thread can be started.
    """

    def __init__(self, hertz: int, targets: Targets, switch_seconds: float = 0.0) -> None:
        self._hertz, self._targets = hertz, targets
        self._counts: dict[_Key, int] = {}
        self._codes: dict[int, CodeType] = {}  # by id: hashing a code object takes long
        self._others = 0
        self._running = threading.Lock()  # released by `stop`; an Event costs more at each wait
        self._running.acquire()
        self._thread = OwnThread("polycephaly-sampler", self._run)
        self._thread.start()
        self._switch_interval = sys.getswitchinterval()
        if switch_seconds:
            sys.setswitchinterval(min(switch_seconds, self._switch_interval))
        self._switch_interval_set = sys.getswitchinterval()

    def stop(self, wait: bool = False) -> None:
        """End the thread within one interval. If `wait` is true, return when it has ended."""
        self._running.release()
        if sys.getswitchinterval() == self._switch_interval_set:  # else a task has changed it
            sys.setswitchinterval(self._switch_interval)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        begun, seen, hertz = monotonic(), 0, self._hertz
        while not self._running.acquire(timeout=max(0.0, begun + (seen + 1) / hertz - monotonic())):
            due = max(seen + 1, int((monotonic() - begun) * hertz))
            self._sample(due - seen)
            seen = due

    def _sample(self, count: int) -> None:
        frames = current_frames()
        for thread, boundary in self._targets():
            key = self._key(frames.get(thread), boundary)
            if key in self._counts or (key and len(self._counts) < tuning.sampled_stacks):
                self._counts[key] = self._counts.get(key, 0) + count
            elif key:
                self._others += count

    def _key(self, frame: FrameType | None, boundary: str) -> _Key:
        """Return the key of the stack; () if no task runs there."""
        codes = self._codes
        entries: list[int] = []
        while frame is not None and len(entries) < 2 * tuning.sampled_frames:
            code = frame.f_code
            if code.co_filename == boundary:
                return tuple(entries)
            number = id(code)
            codes[number] = code
            entries += (number, frame.f_lineno or 0)
            frame = frame.f_back
        return () if boundary and frame is None else tuple(entries)

    def report(self, outside: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the samples so far as plain data for JSON. Any thread may call this.

        Parameters
        ----------
        outside
            Directories and files. The outermost frames of each stack are left out as long as their
            files are among these.

        Returns
        -------
        dict
            ``frames``: function, file and line of each frame; ``stacks``: of each stack the indices
            of its frames, outermost first, and the number of its samples.
        """
        frames: dict[Frame, int] = {}
        stacks = []
        for key, count in list(self._counts.items()):
            stack = [
                (self._codes[code].co_qualname, self._codes[code].co_filename, line)
                for code, line in zip(key[::2], key[1::2], strict=True)
            ]
            while stack and stack[-1][1].startswith(outside):
                stack.pop()
            stack = stack[::-1] or [C_CODE]
            stacks.append(([frames.setdefault(each, len(frames)) for each in stack], count))
        if self._others:
            stacks.append(([frames.setdefault(OTHERS, len(frames))], self._others))
        return {"frames": list(frames), "stacks": stacks}
