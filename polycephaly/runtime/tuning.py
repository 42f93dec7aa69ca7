"""Times and sizes that are not part of the interface: users need not set them, and tests do."""

from __future__ import annotations


class Tuning:
    """The values. They are read when used, unless a comment says otherwise.

    Drones have the values that held when they were forked.
    """

    # Pools
    batch_seconds: float = 0.005
    """Work that a drone may hold ahead: enough to hide a round trip, little for another task to
    wait for.
    """
    grace_seconds: float = 1.0
    """Time between the interrupt of a task and the kill of its drone."""
    abort_seconds: float = 5.0
    """Time for a drone that does not respond to write its stack, before SIGKILL."""
    health_check_seconds: float = 0.5
    """Time between two checks that drones make progress. Read when a pool is made."""
    stalled_seconds: float = 2.0
    """Time without progress, after which a drone is reported as unresponsive. Read when a pool is
    made.
    """
    stopped_zygote_seconds: float = 5.0
    """Time that a stopped zygote may delay a start or a death, before it is continued."""
    stall_report_seconds: float = 5.0
    """Time with nothing to run, after which a pool warns that a thread waits for a promise that no
    task will settle.
    """
    start_report_seconds: float = 10.0
    """Time for a start, before a warning says where the zygote hangs, or what is awaited on Ray."""
    import_wait_seconds: float = 5.0
    """Time that a fork waits for the imports of other threads."""
    thread_settle_seconds: float = 0.25
    """Processor time of this process in which a running native thread ends or waits.

    On a busy machine that may take long. A thread that was just joined may still be about to end,
    and threads of LLVM's and Intel's OpenMP spin for 200 ms (`KMP_BLOCKTIME`) before they wait.
    """

    # Messages of drones
    flush_seconds: float = 0.001
    """Time that an outcome may wait in its ring until the controller is told of it."""
    next_holder_seconds: float = 0.1
    """Time for the next holder of a channel's end to report, after the last one has died."""

    # Waits
    signal_check_seconds: float = 2.0
    """Interval at which a waiting main thread checks for a signal that came just before the wait,
    too late to end it.
    """
    settled_check_seconds: float = 1.0
    """Interval at which any other waiting thread looks up: only then it meets an asynchronous
    exception. A Ctrl-C between settling and the hooks may leave the hooks uncalled, too.
    """

    # Memory
    warm_seconds: float = 1.0
    """Time that a free block of shared memory keeps its pages for the next value."""
    trace_spans: int = 30_000
    """Spans that are kept of a pool for its timeline, about: 15 MB at most."""

    # Profiles and logs
    profile_answer_seconds: float = 5.0
    """Time for the drones to report their samples."""
    sampled_frames: int = 200
    """Innermost frames of one sampled stack: a deep recursion would fill megabytes."""
    sampled_stacks: int = 2000
    """Distinct stacks of one process in a profile. The samples of others are added up together."""
    log_bytes: int = 8 << 20
    """Size at which the log of a pool is rotated."""

    # Served pools
    client_check_seconds: float = 1.0
    """Time between two checks for silent clients."""
    client_silence_seconds: float = 15.0
    """Time, counted in these checks, after which a silent client is dropped."""
    client_sign_seconds: float = 2.0
    """Time between two heartbeats (ALIVE) of a client."""
    card_check_seconds: float = 5.0
    """Time between two checks whether the connection file of a named pool is still there."""
    handshake_seconds: float = 5.0
    """Time for a connection to prove that its key is allowed. Read when a server is made."""
    reply_seconds: float = 1.0
    """Time that closing a server waits for each reply in preparation."""
    unread_bytes: int = 64 << 20
    """Bytes that may lie ready in libzmq for a client, beside the message that exceeds this."""
    unseen_bytes: int = 8 << 20
    """Bytes of output that may be under way to a client. Further lines are counted and left out."""


tuning = Tuning()
