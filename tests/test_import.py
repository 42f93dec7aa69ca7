"""`import polycephaly` costs little: a name is loaded when it is first used, with what it needs and
no more."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from pkgutil import iter_modules

import pytest

import polycephaly

ROOT = Path(__file__).parent.parent

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
            "import polycephaly\n"
            "with polycephaly.Pool(1) as pool: assert [*pool.map(abs, [-1])] == [1]",
            [*BY_VALUE, "sqlite3", "polycephaly.pool.resume", "polycephaly.store.resume", *SERVED],
        ),
        (
            "from polycephaly import green",
            ["cloudpickle", "httpx", "numpy", "rich", "zmq", "polycephaly.pool.pool"],
        ),
    ],
)
def test_an_import_loads_what_it_needs_and_no_more(statement: str, unused: list[str]) -> None:
    code = (
        "import sys, logging\n"  # which takes `inspect` and `dataclasses` with it from 3.14 on
        f"before = set(sys.modules)\n{statement}\n"
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


@pytest.mark.parametrize(
    "beside", ["Polycephaly-2019.11a5.dist-info", "polycephaly_drones-0.1.0.dist-info"]
)
def test_another_projects_distribution_of_this_name_is_warned_of(
    tmp_path: Path, beside: str
) -> None:
    (tmp_path / "polycephaly").symlink_to(ROOT / "polycephaly")
    (tmp_path / beside).mkdir()
    (tmp_path / "program.py").write_text("import polycephaly\n")
    run = subprocess.run(
        [sys.executable, "program.py"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    if "drones" in beside:
        assert run.stderr == ""
    else:
        assert re.match(
            r".*program.py:1: RuntimeWarning: Polycephaly-2019.11a5 is another project's .*"
            r"pip uninstall polycephaly && pip install .* polycephaly-drones",
            run.stderr,
        )


def test_no_advice_installs_the_other_project_of_this_name() -> None:
    """`pip install polycephaly` would replace this package by a stranger's."""
    advice = re.compile(r"\binstall (?:-\S+ )*'?polycephaly\b(?!-drones)|polycephaly\[\w")
    pages = [ROOT / "README.md", ROOT / "pyproject.toml", *ROOT.glob("docs/**/*.md")]
    for path in [*pages, *ROOT.glob("polycephaly/**/*.py"), *ROOT.glob("examples/*")]:
        if path.is_file():
            assert not advice.findall(path.read_text()), path


def test_advice_for_what_is_missing_names_the_requirements_of_the_extra() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    known = {each.partition(";")[0] for needed in extras.values() for each in needed}
    named = {
        requirement
        for path in ROOT.glob("polycephaly/**/*.py")
        for line in re.findall(r"pip install ('[^\n\"`]*)", path.read_text())
        for requirement in re.findall(r"'([^']*)'", line)
    }
    assert len(named) >= 6 and named <= known


LATE = """
import sys, threading
import polycephaly as poly
def make_a_pool():
    threading.main_thread().join()
    try:
        with poly.Pool(1) as pool:
            print(pool.doit(abs, -1))
    except RuntimeError as error:
        print(error)
if sys.argv[1:]:
    poly.Pool
threading.Thread(target=make_a_pool).start()
"""


@pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2),
    reason="no thread starts once the main one has ended: cpython#113964",
)
def test_a_pool_after_the_end_of_the_main_thread_works_if_its_name_was_used_before() -> None:
    late, early = (
        subprocess.run([sys.executable, "-c", LATE, *args], capture_output=True, text=True)
        for args in ([], ["early"])
    )
    assert "the main thread has ended" in late.stdout and "polycephaly.Pool" in late.stdout
    assert early.stdout == "1\n", early.stderr
