"""Which tier a test is of, by what it and its fixtures use; `conftest.py` marks it so.

    unit      starts no process: that is checked as it runs
    process   forks drones from the process of the tests
    script    starts fresh interpreters
    slow      marked by hand: a long program, a build, a whole other suite
    ray       on the other engine

    pytest              unit, process, and what shows a guarantee
    pytest -m ""        all

What a test uses is looked up in the code of its function, of the functions of `tests/` that it
names, and of its fixtures. What a test starts under other names (the demo's servers, say) is not
found so: its file is in `MARKED`."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import scripts

HERE = str(Path(__file__).parent)
FRESH = frozenset({subprocess, subprocess.run, subprocess.Popen, subprocess.check_output, scripts})
"""Who uses one of these starts a fresh interpreter, or another program."""
DRONES = (
    "Pool",
    "Drone",
    "promise",
    "doit",
    "serve",
    "connect",
    "Parallel",
    "Process",
    "ProcessPoolExecutor",
)
MARKED = {
    "test_demo_experiments": "process",
    "test_demo_real_files": "process",
    "test_demo_server": "process",
    "test_forks_of_libraries": "script",
    "test_fuzz": "process",
    "test_green_fork": "process",
    "test_hostile": "process",
    "test_joblib": "process",
    "test_ring": "process",
    "test_jupyter": "script",
    "test_timeline_page": "script",
}
PACKAGES = ("polycephaly", "joblib", "multiprocessing", "concurrent")
"""Names under which this package, joblib and the standard library start processes."""


def tier_of(test: pytest.Function) -> str:
    if test.module.__name__ in MARKED:
        return MARKED[test.module.__name__]
    # Of those of one name, the last is in use: the others it overrides.
    fixtures = [known[-1].func for known in test._fixtureinfo.name2fixturedefs.values()]
    fixtures = [each for each in fixtures if each.__name__ != "nothing_is_left" and _is_ours(each)]
    return _tier_of(test.function, *fixtures)


@cache
def has_tracer(fn: Callable[..., Any]) -> bool:
    """Return whether the test `fn` has a tracer of its own: that of `switches.meet`. Two tracers
    crash CPython 3.12.1, where one switches on and off the bytecodes of a function that the other
    is in."""
    return any((each.__module__, each.__name__) == ("switches", "meet") for each in _reached([fn]))


@cache  # of the many cases of a test
def _tier_of(*fns: Callable[..., Any]) -> str:
    tier = "unit"
    for fn in _reached(list(fns)):
        for value, name in _used(fn):
            if _is_in(value, FRESH) or getattr(value, "__module__", None) == scripts.__name__:
                return "script"
            if _starts_drones(value, name):
                tier = "process"
    return tier


def _reached(fns: list[Callable[..., Any]]) -> Iterator[types.FunctionType]:
    """These functions, and those of the tests that they name, to any depth."""
    seen: set[int] = set()
    while fns:
        fn: Any = fns.pop()
        if id(fn) in seen:
            continue
        seen.add(id(fn))
        fn = getattr(fn, "__wrapped__", fn)
        if isinstance(fn, type):
            fns += [each for each in vars(fn).values() if isinstance(each, types.FunctionType)]
        elif isinstance(fn, types.FunctionType):
            yield fn
            values = [value for value, _ in _used(fn)]
            fns += [each for each in values if callable(each) and _is_ours(each)]


def _is_ours(value: Any) -> bool:
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    return str(getattr(module, "__file__", None)).startswith(HERE)


def _used(fn: types.FunctionType) -> Iterator[tuple[Any, str]]:
    """What the names in a function's code stand for: globals, and attributes of modules."""
    codes = [fn.__code__]
    cells = [cell.cell_contents for cell in fn.__closure__ or () if not _is_empty(cell)]
    yield from ((value, "") for value in cells)
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        values = [fn.__globals__[name] for name in code.co_names if name in fn.__globals__]
        for value in values:
            yield value, ""
            if isinstance(value, types.ModuleType) or type(value).__name__ == "OnEngine":
                yield from ((value, name) for name in code.co_names)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return True
    return False


def _is_in(value: Any, these: frozenset[Any]) -> bool:
    return any(value is each for each in these)


def _starts_drones(value: Any, name: str) -> bool:
    if name:
        package = getattr(value, "__name__", "polycephaly").partition(".")[0]
        return (package in PACKAGES and name in DRONES) or (value is os and "fork" in name)
    return getattr(value, "__name__", None) in DRONES and str(
        getattr(value, "__module__", "")
    ).startswith(PACKAGES)


# -- a unit test starts no process -----------------------------------------------------------------

_STARTS = ("os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "subprocess.Popen", "os.system")
started: list[str] = []


def watch_starts() -> None:
    """From now on, note each process that this one starts. For good: an audit hook cannot be taken
    away."""

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event in _STARTS:
            started.append(event)

    sys.addaudithook(note)
