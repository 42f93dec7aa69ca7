"""`Spans`: the times of one task. Loaded when asked for, because dataclasses take milliseconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spans:
    """The times of one task, in ``time.monotonic`` seconds. None: not reached yet.

    Attributes
    ----------
    queued
        The call was made, or the last promise among its arguments got its value.
    sent
        The reactor sent the task.
    started
        The drone started the task.
    finished
        The drone finished the task.
    received
        The reactor received the result.
    bytes_sent
        Size of the pickled arguments.
    bytes_received
        Size of the pickled result.
    bytes
        The sum of both sizes.
    drone
        Name of the drone.
    """

    queued: float | None = None
    sent: float | None = None
    started: float | None = None
    finished: float | None = None
    received: float | None = None
    bytes_sent: int = 0
    bytes_received: int = 0
    drone: str | None = None

    @property
    def bytes(self) -> int:
        return self.bytes_sent + self.bytes_received
