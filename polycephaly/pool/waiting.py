"""`Waiting`: where a drone has been waiting for some time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from .items import with_item


@dataclass(frozen=True)
class Waiting:
    """Where a drone has waited without processor time: see `Drone.waiting`. ``str()`` gives one
    line.

    Attributes
    ----------
    since : float
        When the wait began, in seconds since 1970 (`time.time`), up to half a second late.
    task : str or None
        The task of the drone, named as in errors. None if the drone does not run any yet.
    item : int or None
        The index in a `map`, if it runs one of its calls; None if that may be one of several.
    file, line, function : str, int and str, or None
        The innermost Python frame of the task that belongs neither to the standard library nor to
        this package. For a coroutine, the line of its `await`, and the awaitable there. None while
        C code keeps the interpreter.
    system_call : str or None
        The system call in which the drone's main thread is. None if the kernel does not tell.

    Notes
    -----
    A wait cannot be told from a hang, so neither is ended: this class only reports the known facts.

    Examples
    --------
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
        """Seconds from the beginning of the wait until now."""
        return max(0.0, time.time() - self.since)

    @property
    def where(self) -> str | None:
        """``file:line in function``, or None if these are unknown."""
        return None if self.file is None else f"{self.file}:{self.line} in {self.function}"

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data.

        Returns
        -------
        dict
            Keyword arguments with which `Waiting` makes an equal object.
        """
        return dict(self.__dict__)

    def __str__(self) -> str:
        at = f" at {self.where}" if self.file is not None else ""
        call = f" in the system call {self.system_call}" if self.system_call else ""
        began = time.strftime("%H:%M:%S", time.localtime(self.since))
        length = f"{self.seconds:.{1 if self.seconds < 10 else 0}f} s"
        task = with_item(self.task or "its start", self.item)
        return f"{task} has waited for {length} (since {began}){at}{call}"
