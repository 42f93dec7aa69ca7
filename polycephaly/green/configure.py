"""The few numbers of green threads that can be set."""

from __future__ import annotations

from .scheduler import scheduler
from .watchdog import watchdog

__all__ = ["configure"]


def configure(*, window: float | None = None, native_threads: int | None = None) -> None:
    """Sets what is given, for this image.

    `window`: seconds after which a foreign call that runs in place is handed over if others could
    go on (0.001). `native_threads`: how many there may be for plain functions and foreign calls;
    what comes beyond waits (16384). Raises `ValueError` for what is not positive."""
    for name, value in (("window", window), ("native_threads", native_threads)):
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be positive, not {value!r}")
    if native_threads is not None and not isinstance(native_threads, int):
        raise TypeError(f"native_threads is a number of threads, not {native_threads!r}")
    if window is not None:
        watchdog.window = window
    if native_threads is not None:
        scheduler.workers.ceiling = native_threads
        scheduler.workers.admit()
