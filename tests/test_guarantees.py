"""docs/guarantees.md and the tests name each other: each guarantee has an ID, and the tests that
show it name that.

Under "shown by" stand just the files with such tests, or a command that runs all of them (`pytest
-m ray`). All is read as text, and nothing is imported or started."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = "docs/guarantees.md"
KEPT = "docs/guarantees-kept.md"  # each in full, under its ID


def rows_of(page: str) -> Iterator[list[str]]:
    for line in page.splitlines():
        if line.startswith("|") and not line.startswith(("| ID |", "| --- |")):
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def named_in(source: str) -> Iterator[str]:
    """The IDs in all `pytest.mark.guarantee(...)`: of tests, of single parameters, of whole
    files."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "guarantee"
        ):
            yield from (ast.literal_eval(each) for each in node.args)


def wrong_in(page: str, sources: dict[str, str]) -> list[str]:
    wrong, shown_by = [], dict[str, list[str]]()
    for link, *cells in rows_of(page):
        name = link.removeprefix("[").partition("]")[0]
        if (
            not re.fullmatch(r"[a-z]+-[1-9]\d*", name)
            or link != f"[{name}](guarantees-kept.md#{name})"
            or len(cells) != 2
        ):
            wrong.append(f"{name}: no ID with its link and two more cells, in a row of {PAGE}")
        elif name in shown_by:
            wrong.append(f"{name}: in more than one row of {PAGE}")
        else:
            shown_by[name] = re.findall(r"`([^`]+)`", cells[-1])
            if not shown_by[name]:
                wrong.append(f"{name}: shown by nothing, says {PAGE}")
    names = {file: set(named_in(source)) for file, source in sources.items()}
    for name, shows in shown_by.items():
        for file in shows:
            if name not in names.get(file, ()) and not file.startswith("pytest -m "):
                wrong.append(f"{name}: {PAGE} says that {file} shows it, where no test names it")
    for file, named in names.items():
        for name in sorted(named - shown_by.keys()):
            wrong.append(f"{name}: {file} names it, and {PAGE} has no such row")
        for name in sorted(name for name in named & shown_by.keys() if file not in shown_by[name]):
            wrong.append(
                f"{name}: {file} names it, and {PAGE} does not say that this file shows it"
            )
    return wrong


def test_each_guarantee_is_named_by_the_tests_that_show_it_and_each_name_is_a_guarantee() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    kept = (ROOT / KEPT).read_text(encoding="utf-8")
    names = [cells[0].removeprefix("[").partition("]")[0] for cells in rows_of(page)]
    assert len(names) > 100
    assert re.findall(r"^### (.*)$", kept, re.MULTILINE) == names
    assert kept.count("\nKept by: ") == len(names)
    wrong = wrong_in(page, sources)
    assert not wrong, "\n".join(wrong)


ROW = "| [end-1](guarantees-kept.md#end-1) | all ends | `tests/test_a.py` |\n"
TEST = "@pytest.mark.guarantee('end-1')\ndef test_it(): pass\n"


@pytest.mark.parametrize(
    ("rows", "source", "wrong"),
    [
        (ROW, TEST, []),
        (ROW.replace("tests/test_a.py", "pytest -m ray"), "", []),
        (ROW, "", ["end-1: docs/guarantees.md says that tests/test_a.py shows it"]),
        (
            ROW,
            TEST.replace("end-1", "end-2"),
            ["end-1: docs/guarantees.md says", "end-2: tests/test_a.py names it"],
        ),
        (
            ROW.replace("test_a", "test_b"),
            TEST,
            ["end-1: docs/guarantees.md says", "end-1: tests/test_a.py names it"],
        ),
        (ROW + ROW, TEST, ["end-1: in more than one row"]),
        (ROW.replace("`", ""), "", ["end-1: shown by nothing"]),
        (ROW.replace("end-1", "End"), "", ["End: no ID"]),
        (ROW.replace("| [end-1](guarantees-kept.md#end-1) ", ""), "", ["all ends: no ID"]),
        (ROW.replace("#end-1", "#end-2"), "", ["end-1: no ID"]),
    ],
    ids=[
        "right",
        "a command",
        "no test",
        "no row",
        "another file",
        "two rows",
        "no file",
        "an odd ID",
        "no ID",
        "another link",
    ],
)
def test_what_is_wrong_is_told_with_the_id_and_the_file(
    rows: str, source: str, wrong: list[str]
) -> None:
    head = "| ID | guarantee | shown by |\n| --- | --- | --- |\n"
    told = wrong_in(head + rows, {"tests/test_a.py": source})
    assert [each[: len(start)] for each, start in zip(told, wrong, strict=True)] == wrong
