"""The documentation: blocks of Python and examples of docstrings run and print what is said, links
lead somewhere, and the whole is built without a warning."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from blocks import ROOT, Block, blocks_of, cells_of, needs_of, run_block, run_cells

PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "docs").rglob("*.md")
    if "_build" not in page.parts
)
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
EXAMPLES = sorted(
    ".".join(module.relative_to(ROOT).with_suffix("").parts)
    for module in (ROOT / "polycephaly").rglob("*.py")
    if ">>> " in module.read_text(encoding="utf-8")
)


ON_RAY = [
    pytest.mark.ray,
    pytest.mark.timeout(180),
]  # a Ray that starts beside other tests may take a minute


def _run(block: Block) -> Any:
    return pytest.param(block, id=str(block), marks=ON_RAY if "ray" in block.needs else [])


@pytest.mark.slow
@pytest.mark.parametrize("block", [_run(block) for block in BLOCKS])
def test_a_block_prints_what_the_page_says(block: Block, tmp_path: Path) -> None:
    run_block(block, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if cells_of(page)])
def test_a_kernel_shows_what_the_page_says(page: str, tmp_path: Path) -> None:
    codes, said = zip(*cells_of(page), strict=True)
    assert run_cells(list(codes), tmp_path, needs_of(page)) == list(said)


@pytest.mark.parametrize("module", EXAMPLES)
def test_the_examples_of_docstrings_run(module: str) -> None:
    code = "import doctest, importlib, sys; module = importlib.import_module(sys.argv[1])"
    code += "\nprint(doctest.testmod(module, optionflags=doctest.ELLIPSIS))"
    command = [sys.executable, "-W", "error", "-c", code, module]
    run = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(r"TestResults\(failed=0, attempted=[1-9]\d*\)\n", run.stdout), run.stdout


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *PAGES])
def test_links_and_named_test_files_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link
    ]
    missing = [link for link in links if link and not ((ROOT / page).parent / link).exists()]
    missing += [
        name for name in re.findall(r"`(tests/\w+\.py)`", text) if not (ROOT / name).exists()
    ]
    assert missing == []


@pytest.mark.slow
@pytest.mark.timeout(180)  # twenty seconds, where nothing else runs
def test_it_is_built_without_a_warning(tmp_path: Path) -> None:
    for needed in ("sphinx", "myst_parser", "furo", "joblib"):  # its backend is in the reference
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install '.[docs,joblib]'")
    build = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        tmp_path / "trees",
    ]
    run = subprocess.run(
        [*build, "docs", tmp_path / "html"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    index = (tmp_path / "html" / "reference" / "pools.html").read_text(encoding="utf-8")
    assert 'id="polycephaly.Pool.map"' in index
