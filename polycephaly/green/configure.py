"""`configure`: the settings of green threads."""

from __future__ import annotations

from .scheduler import scheduler
from .watchdog import watchdog


def configure(*, window: float | None = None, native_threads: int | None = None) -> None:
    """Change settings of green threads in this process. Arguments left out change nothing.

    Parameters
    ----------
    window
        Seconds after which a foreign call that runs in place is handed over if other green threads
        could run. At first 0.001.
    native_threads
        The largest number of native threads for plain functions and foreign calls; further ones
        queue. At first 16384.

    Raises
    ------
    ValueError
        If an argument is not positive.
    TypeError
        If `native_threads` is not an int.
    """
    for name, value in (("window", window), ("native_threads", native_threads)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, not {value!r}")
    if native_threads is not None and not isinstance(native_threads, int):
        raise TypeError(f"native_threads is a number of threads, not {native_threads!r}")
    if window is not None:
        watchdog.window = window
    if native_threads is not None:
        scheduler.workers.max_threads = native_threads
        scheduler.workers.start_queued()
