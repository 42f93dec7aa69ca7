"""Every Python block of the README runs as a script, and prints what its comments say."""

from __future__ import annotations

from pathlib import Path

import pytest
from blocks import ROOT, Block, blocks_of, run_block

README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", blocks_of("README.md"), ids=str)
def test_a_block_prints_what_its_comments_say(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)


def test_the_five_names_are_there() -> None:
    import polycephaly as poly

    for name in ("Drone", "Pool", "promise", "Promise", "green"):
        assert hasattr(poly, name)
        assert f"`{name}`" in README


@pytest.mark.parametrize("what", ["polycephaly demo securities", "pytest"])
def test_each_command_starts_from_nothing_and_is_one_line(what: str) -> None:
    commands = [
        line for line in README.splitlines() if line.startswith("python3 -m venv ") and what in line
    ]
    assert len(commands) == 1
