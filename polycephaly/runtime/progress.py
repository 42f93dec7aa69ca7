"""The progress bar of ``map(..., progress=True)``: tqdm's, in terminals and notebooks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from operator import length_hint
from typing import Any

REFRESH_INTERVAL_SECONDS = 0.1  # seconds between two updates of the bar


def total_of(iterables: Iterable[Iterable[Any]]) -> int | None:
    """Return the number of rows, or None if it is unknown."""
    known = []  # an iterable without a hint may be endless: the others end the iteration
    for each in iterables:
        with suppress(Exception):  # an endless `repeat`, for example, or an error of user code
            known.append(length_hint(each, -1))
    return min((size for size in known if size >= 0), default=None)


class Progress:
    """One bar, on stderr. Any thread may update it, one thread at a time."""

    def __init__(self, label: str, total: int | None) -> None:
        self._bar = _bar_type()(total=total, desc=label, unit="")

    def show(self, done: int) -> None:
        if done > self._bar.n:
            self._bar.update(done - self._bar.n)
        else:
            self._bar.refresh()

    def step(self) -> None:
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _bar_type() -> Any:
    from tqdm.auto import tqdm

    class ProgressBar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        """A bar without tqdm's own thread and without its lock for several processes, because
        neither works with forks.
        """

        monitor_interval = 0

    ProgressBar.set_lock(threading.RLock())
    return ProgressBar
