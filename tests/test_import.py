"""`import polycephaly` costs little: a name is loaded when it is first used, with what it needs and
no more."""

from __future__ import annotations

import subprocess
import sys
from pkgutil import iter_modules

import pytest

import polycephaly

SERVED = ["polycephaly.green", "polycephaly.server", "polycephaly.engines.remote"]
BY_VALUE = ["cloudpickle", "dataclasses", "inspect"]  # only for what is pickled by value
PARTS = [f"polycephaly.{each.name}" for each in iter_modules(polycephaly.__path__)]
PARTS.remove("polycephaly.runtime")  # one module of it registers an at-fork handler
HEAVY = [
    "asyncio",
    "cloudpickle",
    "concurrent",
    "httpx",
    "multiprocessing",
    "numpy",
    "rich",
    "threading",
    "zmq",
]


@pytest.mark.parametrize(
    "statement, unused",
    [
        ("import polycephaly", [*PARTS, *HEAVY]),
        (
            "from polycephaly import Promise",
            ["asyncio", "cloudpickle", "httpx", "numpy", "rich", "zmq"],
        ),
        ("from polycephaly import Pool", [*BY_VALUE, "asyncio", "httpx", "numpy", "rich", *SERVED]),
        (
            "def f(): return 1\n"
            "import polycephaly\n"
            "with polycephaly.Pool(1) as pool: assert pool.doit(f) == 1",
            [*BY_VALUE, "asyncio", "httpx", "numpy", "rich", *SERVED],
        ),
        (
            "from polycephaly import green",
            ["cloudpickle", "httpx", "numpy", "rich", "zmq", "polycephaly.pool.pool"],
        ),
    ],
)
def test_an_import_loads_what_it_needs_and_no_more(statement: str, unused: list[str]) -> None:
    code = (
        f"import sys; before = set(sys.modules)\n{statement}\n"
        "print(*sorted(set(sys.modules) - before), sep='\\n')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.splitlines()
    assert "polycephaly" in loaded
    assert [name for name in loaded if name.startswith(tuple(unused))] == []


@pytest.mark.parametrize(
    ("other", "where"),
    [
        ("sys.platform = 'darwin'", "cpython on darwin"),
        ("sys.platform = 'emscripten'; del os.register_at_fork", "cpython on emscripten"),
        ("sys.implementation.name = 'pypy'", "pypy on linux"),
    ],
)
def test_elsewhere_it_is_imported_and_what_does_not_work_says_so_in_one_sentence(
    other: str, where: str
) -> None:
    code = (
        f"import importlib, os, sys, asyncio, logging, subprocess, tempfile\n{other}\n"
        "import polycephaly as poly\n"
        "for name in dir(poly):\n"
        "    try: getattr(poly, name)\n"
        "    except ImportError as error: print(name, error)\n"
        "for name in ('joblib', 'cli', 'server.join', 'engines.remote.client'):\n"
        "    try: importlib.import_module('polycephaly.' + name)\n"
        "    except (ImportError, SystemExit) as error: print(name, error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    refused = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    assert {"Pool", "Drone", "doit", "promise", "connect", "serve", "Pore", "cli"} <= refused.keys()
    assert refused.keys().isdisjoint({"Promise", "gather", "race", "Timeline", "DroneDied"})
    assert ("green" in refused) is ("darwin" not in where)
    for text in refused.values():
        assert f"and this is {where}: use a Linux machine or container" in text


def test_a_python_without_the_lock_is_refused_in_one_sentence() -> None:
    fake = "import sys; sys.abiflags += 't'\n"
    run = subprocess.run(
        [sys.executable, "-c", fake + "import polycephaly"], capture_output=True, text=True
    )
    last = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and last.startswith(
        "ImportError: polycephaly needs a CPython with the global inter"
    )
    assert "free-threaded" in last and "usual build" in last
