"""`Pool(fresh=True)`: the first call after the pool was idle takes a new snapshot.

    a call ──> is any call unsettled, or any map unfinished? ── no ──> new snapshot ──> the call

The snapshot is taken in the calling thread, before anything of the call is pickled. Calls of other
threads that arrive meanwhile wait for it, and share it, because the pool is not idle then.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable

from .._compat import caller_stacklevel
from ..runtime.prompt import running_input


class Freshness:
    """The snapshots of one pool, and a context in which calls are made. For any thread."""

    def __init__(
        self,
        pool: str,
        is_idle: Callable[[], bool],
        obstacle: Callable[[], str | None],
        take_snapshot: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._is_idle = is_idle
        self._obstacle = obstacle  # why a snapshot would lose something
        self._take_snapshot = take_snapshot
        # Held by the thread that decides, and during its snapshot. The loop never takes it.
        self._lock = threading.RLock()
        self._calling = threading.local()
        self._is_taking = False
        self._begun = 0  # snapshots
        self._calls = 0  # that are being made
        self._input = running_input()  # at the last snapshot
        self._has_warned = False

    def is_calling(self) -> bool:
        """Return whether this thread makes a call of the pool."""
        return getattr(self._calling, "depth", 0) > 0

    def __enter__(self) -> None:
        """Begin to make a call: take a snapshot if the pool is idle, which it is not until the end
        of the ``with`` block. Raises the errors of taking a snapshot.
        """
        arrived = self._begun
        with self._lock:
            # A snapshot that was begun after this call has the data of this call, too. A signal's
            # handler may call while this thread takes one.
            if self._begun == arrived and not (self._calls or self._is_taking):
                self._renew()
            self._calls += 1
        self._calling.depth = getattr(self._calling, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        self._calling.depth -= 1
        with self._lock:
            self._calls -= 1

    def _renew(self) -> None:
        now = running_input()
        if (now is not None and now is self._input) or not self._is_idle():
            return
        obstacle = self._obstacle()
        if obstacle is not None:
            self._warn(obstacle)
            return
        self._is_taking, self._input = True, now
        self._begun += 1
        try:
            self._take_snapshot()
        finally:
            self._is_taking = False

    def _warn(self, obstacle: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self._pool} (fresh=True) takes no new snapshot while it keeps {obstacle}, which "
                "a snapshot would lose: its drones see the data of before",
                RuntimeWarning,
                stacklevel=caller_stacklevel(),
            )
