"""`Stack`: the activity of a drone at one moment. Loaded when asked for (see stack_requests.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from traceback import StackSummary
from typing import Any

from .items import with_item


@dataclass(frozen=True)
class Stack:
    """The activity of a drone at one moment: see `Drone.stack`.

    ``str()`` gives a text like a traceback.

    Attributes
    ----------
    drone : str
        The name of the drone.
    pid : int or None
        The process id. None if the drone has none yet.
    state : str
        "busy", "idle", "between two tasks", "starting", or why the drone did not answer.
    task : str or None
        The running task, named as in errors.
    number : int or None
        The number of the task, as in its time in a timeline.
    item : int or None
        The index in a `map`, if it runs one of its calls; None if that may be one of several.
    seconds : float or None
        Seconds since the task was sent to the drone.
    frames : list
        The Python frames of the task, at most 200, as a ``traceback.StackSummary``: the innermost
        one comes last. Empty if the task is a function of C that was called directly.
    threads : tuple of pairs
        The name and the frames of each other thread that runs code from outside the standard
        library, and of each task that runs beside others (``width=``).
    system_call : str or None
        The system call in which the drone's main thread, which runs the task, waits. None if that
        thread computes, runs no task, or the kernel does not tell. Always None for drones of Ray.

    Examples
    --------
    >>> import polycephaly as poly
    >>> with poly.Drone(name="lab") as drone:
    ...     str(drone.stack()) == f"lab (pid {drone.pid}): idle"
    True
    """

    drone: str
    pid: int | None
    state: str
    task: str | None = None
    number: int | None = None
    item: int | None = None
    seconds: float | None = None
    frames: StackSummary = field(default_factory=StackSummary)
    threads: tuple[tuple[str, StackSummary], ...] = ()
    system_call: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as plain data.

        Returns
        -------
        dict
            Each frame is a list of file, line, function and source line.
        """
        threads = [(name, _plain(frames)) for name, frames in self.threads]
        return {**self.__dict__, "frames": _plain(self.frames), "threads": threads}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Stack:
        """Return the stack of which `as_dict` gave these fields."""
        frames = StackSummary.from_list(fields["frames"])
        threads = tuple((name, StackSummary.from_list(each)) for name, each in fields["threads"])
        return cls(**{**fields, "frames": frames, "threads": threads})

    def __str__(self) -> str:
        doing = []
        if self.task is not None:
            doing.append(with_item(f"{self.task} #{self.number}", self.item))
        if self.seconds is not None:
            doing.append(f"for {self.seconds:.1f} s")
        if self.system_call is not None:
            doing.append(f"in the system call {self.system_call}")
        state = "" if self.task is not None and self.state == "busy" else self.state
        what = ": ".join(filter(None, (", ".join(doing), state)))
        lines = [f"{self.drone} (pid {self.pid}): {what}\n"]
        if self.task is not None and self.state == "busy" and not self.frames:
            lines.append("  no Python frames: the task is a function of C\n")
        lines += self.frames.format()
        for name, frames in self.threads:
            lines += [f" beside it, {name}:\n", *frames.format()]
        return "".join(lines).rstrip("\n")

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


class Stacks(list[Stack]):
    """The stacks of several drones. ``str()`` gives all their texts."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def _plain(frames: StackSummary) -> list[list[Any]]:
    return [[each.filename, each.lineno, each.name, each.line] for each in frames]
