"""The types that users see: a program that uses the whole public interface is clean under `mypy
--strict`, and runs."""

from __future__ import annotations

import ast
import importlib.util
import re
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


ARGUMENTS = ROOT / "tests" / "typing" / "arguments.py"
CHECKERS = {"mypy": ["--strict", "--cache-dir=cache"], "pyright": []}


@pytest.mark.slow
@pytest.mark.timeout(100)
@pytest.mark.parametrize("checker", CHECKERS)
def test_arguments_are_compared_with_parameters(checker: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed")
    (tmp_path / "polycephaly").symlink_to(ROOT / "polycephaly")
    program = tmp_path / "arguments.py"
    program.write_bytes(ARGUMENTS.read_bytes())
    found = subprocess.run(
        [sys.executable, "-m", checker, *CHECKERS[checker], program.name],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    reported = {int(n) for n in re.findall(r"arguments\.py:(\d+):.* error", found.stdout)}
    lines = enumerate(ARGUMENTS.read_text(encoding="utf-8").splitlines(), 1)
    wrong = {number for number, line in lines if line.endswith("# wrong")}
    assert reported == wrong, found.stdout


def test_it_runs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "all of it works\n", "")
