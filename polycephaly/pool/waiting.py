"""`Waiting`: in what a drone has waited for a while."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Waiting"]


@dataclass(frozen=True)
class Waiting:
    """In what a drone has waited without processor time: see `Drone.waiting`. It prints as one
    line.

    A wait cannot be told from a hang, so nothing is done about either: this only says what is
    known.

    Attributes
    ----------
    since : float
        When the wait began, in seconds since 1970 (`time.time`), up to half a second late.
    task : str or None
        What the drone runs, as errors name it; None where it runs nothing yet.
    item : int or None
        The index in a `map`, if the task is one of its calls.
    file, line, function : str, int and str, or None
        The innermost Python frame of the task that belongs neither to the standard library nor to this package; of a
        coroutine, the line of its `await`, and what it awaits there. None while C code keeps the interpreter.
    system_call : str or None
        The system call in which the drone's main thread is; None where the kernel does not tell.

    >>> import polycephaly as poly
    >>> with poly.Drone() as drone:
    ...     print(drone.waiting)
    None
    """

    since: float
    task: str | None = None
    item: int | None = None
    file: str | None = None
    line: int | None = None
    function: str | None = None
    system_call: str | None = None

    @property
    def seconds(self) -> float:
        """For how long, until now."""
        return max(0.0, time.time() - self.since)

    @property
    def where(self) -> str | None:
        """``file:line in function``, if these are known."""
        return None if self.file is None else f"{self.file}:{self.line} in {self.function}"

    def as_dict(self) -> dict[str, Any]:
        """Plain data, of which `Waiting` with these as keywords makes the same again."""
        return dict(self.__dict__)

    def __str__(self) -> str:
        item = f", item {self.item}" if self.item is not None else ""
        at = f" at {self.where}" if self.file is not None else ""
        call = f" in the system call {self.system_call}" if self.system_call else ""
        began = time.strftime("%H:%M:%S", time.localtime(self.since))
        length = f"{self.seconds:.{1 if self.seconds < 10 else 0}f} s"
        return f"{self.task or 'its start'}{item} has waited for {length} (since {began}){at}{call}"
