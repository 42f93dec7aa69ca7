"""The progress of ``map(..., progress=True)``: a bar in terminals and notebooks, else lines."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from contextlib import suppress
from operator import length_hint
from typing import Any

from . import clock
from .prompt import running_shell

REFRESH_INTERVAL_SECONDS = 0.1  # seconds between two updates of the bar
LINE_INTERVAL_SECONDS = 10.0  # seconds between two lines where nothing is drawn anew


def total_of(iterables: Iterable[Iterable[Any]]) -> int | None:
    """Return the number of rows, or None if it is unknown."""
    known = []  # an iterable without a hint may be endless: the others end the iteration
    for each in iterables:
        with suppress(Exception):  # an endless `repeat`, for example, or an error of user code
            known.append(length_hint(each, -1))
    return min((size for size in known if size >= 0), default=None)


class Progress:
    """One bar, on stderr: a terminal or a notebook draws it anew, anything else gets a line each
    ten seconds, and one at the end. Any thread may update it, one thread at a time.
    """

    def __init__(self, label: str, total: int | None) -> None:
        bar = _bar_type()
        is_terminal = hasattr(sys.stderr, "isatty") and sys.stderr.isatty()
        if is_terminal or running_shell() is not None or "TQDM_DISABLE" in os.environ:
            self._bar = bar(total=total, desc=label, unit="")
        else:
            self._bar = Lines(total=total, desc=label, unit="")

    def show(self, done: int) -> None:
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)
        else:
            self._bar.refresh()

    def step(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


class Lines:
    """Progress for a log: as much of tqdm's interface as `Progress` uses."""

    def __init__(self, *, total: int | None, desc: str, unit: str) -> None:
        self.n = 0
        self._of, self._label = total, desc
        self._began = self._told = clock.monotonic()
        self._is_open = True

    def update(self, more: int = 1) -> None:
        self.n += more
        self.refresh()

    def refresh(self) -> None:
        if clock.monotonic() - self._told >= LINE_INTERVAL_SECONDS:
            self._tell()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._tell()

    def _tell(self) -> None:
        from tqdm import tqdm

        self._told = clock.monotonic()
        text = tqdm.format_meter(
            self.n, self._of, self._told - self._began, prefix=self._label, unit="",
            bar_format=_WITH_TOTAL if self._of else None,
        )  # fmt: skip
        print(text, file=sys.stderr, flush=True)


_WITH_TOTAL = "{desc}: {n_fmt}/{total_fmt} ({percentage:.0f}%) [{elapsed}<{remaining}, {rate_fmt}]"


def _bar_type() -> Any:
    from tqdm.auto import tqdm

    class ProgressBar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        """A bar without tqdm's own thread and without its lock for several processes, because
        neither works with forks.
        """

        monitor_interval = 0

    ProgressBar.set_lock(threading.RLock())
    return ProgressBar
