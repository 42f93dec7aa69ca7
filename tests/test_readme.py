"""Every Python block of the README runs as a script, and prints what its comments say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md"))]

BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
PRINTED = re.compile(r"print\(.*\)  # (?P<line>.*)$", re.MULTILINE)


def title(block: str) -> str:
    """The heading above a block."""
    return re.findall(r"^#+ (.*)$", README[: README.index(block)], re.MULTILINE)[-1]


@pytest.mark.parametrize("block", BLOCKS, ids=title)
def test_a_block_prints_what_its_comments_say(block: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-W", "error", script],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    said = [match["line"] for match in PRINTED.finditer(block)]
    assert said, "a block that says nothing shows nothing"
    assert run.stdout.splitlines() == said


def test_the_five_names_are_there() -> None:
    import polycephaly as poly

    for name in ("Drone", "Pool", "promise", "Promise", "green"):
        assert hasattr(poly, name)
        assert f"`{name}`" in README


@pytest.mark.parametrize("what", ["polycephaly demo securities", "pytest"])
def test_each_command_starts_from_nothing_and_is_one_line(what: str) -> None:
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv ") and what in line]
    assert len(commands) == 1


@pytest.mark.parametrize("page", PAGES)
def test_links_and_named_test_files_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    missing = [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    missing += [name for name in re.findall(r"`(tests/\w+\.py)`", text) if not (ROOT / name).exists()]
    assert missing == []
