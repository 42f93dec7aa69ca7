"""A line tracer that sleeps up to 200 us at one line of the package in a hundred:
`pytest -m "tracer and not ray" --lines 7`.

    at_lines ──> this process ──fork──> zygotes and drones, which have a copy of the tracer
                      └──spawn──> fresh interpreters: `begin` comes first in their `-c` code

So this imports nothing but the standard library, and nothing of it is in the package."""

import os
import sys
import threading
from _thread import get_ident
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import spawn
from pathlib import Path
from random import Random
from time import sleep
from types import CodeType, FrameType
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent

lines: Counter[int] = Counter()
"""By `get_ident()`: how many lines of the package were traced. A fork has a copy."""


def uses_monitoring(seed: int) -> bool:
    return sys.version_info >= (3, 12) and seed % 2 == 0


@contextmanager
def at_lines(seed: int) -> Iterator[None]:
    """All threads that begin meanwhile, and the processes that are forked or spawned, are under a
    line tracer, as of a debugger or of coverage. From CPython 3.12 on, that is `sys.monitoring` for
    even seeds, and then of all threads of this process."""
    import polycephaly

    # A test may have put the tree into `sys.path`, and a fresh interpreter imports from there then.
    places = os.path.dirname(polycephaly.__file__), str(HERE.parent / "polycephaly")
    package = tuple(place + os.sep for place in places)
    plain, before = spawn.get_command_line, sys.gettrace()

    def traced_command(**kwds: Any) -> list[str]:
        command = plain(**kwds)
        at = command.index("-c") + 1
        command[at] = (
            f"import sys; sys.path.insert(0, {str(HERE)!r}); import line_tracer; "
            f"del sys.path[0]; line_tracer.begin({seed}, {package!r}); {command[at]}"
        )
        return command

    with mock.patch.object(spawn, "get_command_line", traced_command):
        begin(seed, package)
        try:
            yield
        finally:
            if uses_monitoring(seed):
                _end_monitoring()
            else:
                sys.settrace(before)
                threading.settrace(before)  # type: ignore[arg-type]  # None is what there was


def begin(seed: int, package: tuple[str, ...]) -> None:
    """Trace the code in the folders `package` from now on."""
    random = Random(seed).random

    def pause() -> None:
        lines[get_ident()] += 1
        if random() < 0.01:
            sleep(random() * 200e-6)

    def traced(frame: FrameType, event: str, arg: object) -> Any:
        if event == "call":
            return traced if frame.f_code.co_filename.startswith(package) else None
        if event == "line":
            pause()
        return traced

    def on_line(code: CodeType, line: int) -> Any:
        if not code.co_filename.startswith(package):
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        pause()
        return None

    # As if they were the package's: else `stacks` shows each thread that they stop as one that runs
    # code of the user.
    for each in (pause, traced, on_line):
        each.__code__ = each.__code__.replace(co_filename=f"{package[0]}line_tracer.py")
    if uses_monitoring(seed):
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # from CPython 3.12 on
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "line tracer of the tests")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, on_line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
    else:
        threading.settrace(traced)
        sys.settrace(traced)


def _end_monitoring() -> None:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
    tool = monitoring.COVERAGE_ID
    monitoring.set_events(tool, monitoring.events.NO_EVENTS)
    monitoring.register_callback(tool, monitoring.events.LINE, None)
    monitoring.free_tool_id(tool)
