"""Times and sizes that are no part of the interface: no user has to set them, and tests do."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tuning", "tuning"]


@dataclass(slots=True)
class Tuning:
    """Read when they are used, unless said otherwise. Drones have those that held when they were
    forked."""

    # Pools
    batch_seconds: float = 0.005
    """Of work that a drone may hold ahead: enough to hide the way there and back, little to wait
    behind."""
    grace_seconds: float = 1.0
    """Between the interrupt of a task and the kill of its drone."""
    health_check_seconds: float = 0.5
    """Between two looks at whether drones make progress. Read when a pool is made."""
    stalled_seconds: float = 2.0
    """Without progress, after which a drone is reported as unresponsive. Read when a pool is
    made."""
    stopped_zygote_seconds: float = 5.0
    """That a stopped zygote may keep a start or a death waiting, before it is continued."""
    stall_report_seconds: float = 5.0
    """Without anything to run, after which a pool warns that somebody waits for a promise that
    nobody will settle."""
    start_report_seconds: float = 10.0
    """That a drone may take to start on Ray, before a warning tells for which resources it
    waits."""
    thread_settle_seconds: float = 0.25
    """Of its own processor time in which a native thread that runs ends or waits: on a busy machine
    that may take long. One that was joined a moment ago may still be about to end, and those of
    LLVM's and Intel's OpenMP spin for 200 ms (`KMP_BLOCKTIME`) before they wait."""

    # Waits
    signal_check_seconds: float = 0.5
    """After which a waiting main thread looks for a signal that came just before the wait, too late
    to end it."""
    settled_check_seconds: float = 5.0
    """After which any other waiting thread looks whether the promise was settled: a Ctrl-C between
    that and its hooks may leave these uncalled."""

    # Memory
    warm_seconds: float = 1.0
    """That a free block of shared memory keeps its pages for the next value."""
    trace_spans: int = 30_000
    """Kept of a pool for its timeline, about: 15 MB at most."""
    trace_segments: int = 100
    """In which they are kept; the oldest one is summed up when there are more."""
    trace_names: int = 1000
    """Of functions on drones, in these sums. The rest, as every code string has a name, is added up
    together."""

    # Served pools
    client_check_seconds: float = 1.0
    """Between two looks at whether clients are silent."""
    client_silence_seconds: float = 15.0
    """Counted in these looks, after which a client is let go."""
    client_sign_seconds: float = 2.0
    """Between two signs of life (LIVES) of a client."""
    handshake_seconds: float = 5.0
    """For a connection to prove that it has an allowed key. Read when a server is made."""
    unread_bytes: int = 64 << 20
    """That lie ready in libzmq for a client, beside the message that passes this."""
    unseen_bytes: int = 8 << 20
    """Of output that a client may have before it; the lines after these are counted and left
    out."""


tuning = Tuning()
