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
        pytest.skip("mypy is not installed: pip install '.[dev]'")
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path, PROGRAM],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (0, "Success: no issues found in 1 source file\n"), (
        found.stdout
    )


PROGRAMS = [ROOT / "tests" / "typing" / name for name in ("arguments.py", "planted.py")]
CHECKERS = {
    "mypy": ["--strict", "--cache-dir=cache"],
    "basedpyright": ["--level", "error"],  # pyright, with a Node of its own
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", CHECKERS)
def test_errors_of_a_users_program_are_reported_where_they_are(
    checker: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(checker) is None:
        pytest.skip(f"{checker} is not installed: pip install 'polycephaly[dev]'")
    (tmp_path / "polycephaly").symlink_to(ROOT / "polycephaly")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
    wrong = set()
    for program in PROGRAMS:
        text = program.read_text(encoding="utf-8")
        (tmp_path / program.name).write_text(text, encoding="utf-8")
        for number, line in enumerate(text.splitlines(), 1):
            if line.endswith("# wrong"):
                wrong.add((program.name, number))
    assert len([name for name, _ in wrong if name == "planted.py"]) == 11
    found = subprocess.run(
        [sys.executable, "-m", checker, *CHECKERS[checker], *(each.name for each in PROGRAMS)],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    reported = re.findall(r"(arguments\.py|planted\.py):(\d+):.* error", found.stdout)
    assert {(name, int(number)) for name, number in reported} == wrong, found.stdout


def test_it_runs(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", PROGRAM],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (0, "all of it works\n", "")
