"""The types that users see: a program that uses the whole public interface is clean under `mypy
--strict`, and runs."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import polycephaly as poly
from polycephaly import green

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "typing" / "user_program.py"


def test_it_uses_every_public_name() -> None:
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(PROGRAM.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert {name for name in poly.__all__ if ("poly", name) not in used} == {"green"}
    assert {name for name in green.__all__ if ("green", name) not in used} == set()


@pytest.mark.slow
@pytest.mark.timeout(100)  # mypy without a cache takes all that a busy machine gives it
def test_it_is_clean_under_mypy_strict(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: pip install 'polycephaly[dev]'")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, PROGRAM],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (0, "Success: no issues found in 1 source file\n"), (
        found.stdout
    )


WRONG = """import polycephaly as poly


def half(number: int) -> float:
    return number / 2


with poly.Pool(1) as pool:
    pool.submit(half, 3)
    pool.submit(half, number=3)
    pool.submit(half, "three")
    pool.submit(half)
    pool.promise(half, pool.promise(abs, -1))
"""


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_the_arguments_of_submit_are_checked(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed: pip install 'polycephaly[dev]'")
    program = tmp_path / "wrong.py"
    program.write_text(WRONG)
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", program],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line.split(":")[1] for line in found.stdout.splitlines() if ": error: " in line]
    assert lines == ["11", "12"], found.stdout


def test_it_runs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "all of it works\n", "")
