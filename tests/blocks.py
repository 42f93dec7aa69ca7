"""Blocks of Python in pages: each runs as a script, and prints what the page says.

What it prints stands in comments (`print(x)  # what`), or in a ```text block right below it. Times
("0.41 s") differ from run to run, and are not compared. stderr stays empty, unless the block shows
progress there. The blocks of a page that says that they
"build on each other" are run as one script. A block under `<!-- needs: joblib -->` is skipped where
that is missing. Blocks of ```ipython are the cells of one notebook, with what a kernel shows below
each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

BLOCK = re.compile(
    r"(?:^<!-- needs: (?P<needs>[\w, ]+) -->\n+)?^```python\n(?P<code>.*?)^```$"
    r"(?:\s*^```text\n(?P<text>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
CELL = re.compile(
    r"^```ipython\n(?P<code>.*?)^```$(?:\s*^```text\n(?P<text>.*?)^```$)?", re.DOTALL | re.MULTILINE
)
PRINTED = re.compile(r"print\(.*\)  # (?P<line>.*)$", re.MULTILINE)
SECONDS = re.compile(r"\b\d+\.\d+ (?=m?s\b)")

NOTEBOOK = """
import json, sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
shown = []
def take(message):
    kind, content = message["msg_type"], message["content"]
    if kind == "stream":
        shown[-1] += content["text"]
    elif kind == "execute_result":
        shown[-1] += content["data"]["text/plain"] + "\\n"
    elif kind == "error":
        shown[-1] += f"{content['ename']}: {content['evalue']}"
for code in json.load(sys.stdin):
    shown.append("")
    client.execute_interactive(code, output_hook=take, allow_stdin=False, timeout=60)
client.stop_channels()
manager.shutdown_kernel()
json.dump(shown, sys.stdout)
"""


@dataclass(frozen=True)
class Block:
    page: str
    title: str
    code: str
    said: list[str]
    needs: list[str]

    def __str__(self) -> str:
        return f"{self.page.removeprefix('docs/')}: {self.title}"


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    above, said, blocks = "", [], []
    for match in BLOCK.finditer(text):
        title = re.findall(
            r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text[: match.start()], flags=re.S | re.M), re.M
        )[-1]
        own = [found["line"] for found in PRINTED.finditer(match["code"])]
        own = own if match["text"] is None else match["text"].splitlines()
        if "build on each other" in text:
            above, said = f"{above}\n{match['code']}", said + own
            continue
        blocks.append(
            Block(page, title, match["code"], own, re.findall(r"\w+", match["needs"] or ""))
        )
    if above:
        needs = re.findall(r"\w+", " ".join(match["needs"] or "" for match in BLOCK.finditer(text)))
        blocks.append(Block(page, "all its blocks", above, said, needs))
    return blocks


def run_block(block: Block, folder: Path) -> None:
    for name in block.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    (folder / "block.py").write_text(block.code, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        env={
            **os.environ, "COLUMNS": "100",
            "XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder),
            "RAY_AUTH_MODE": "disabled",  # with a token it says so, on stderr
        },
    )  # fmt: skip
    unexpected = "" if "progress=True" in block.code else run.stderr
    assert (run.returncode, unexpected) == (0, "")
    assert block.said, "a block that says nothing shows nothing"
    printed = run.stdout.replace(f"{folder}/", "").rstrip("\n")
    assert SECONDS.sub("# ", printed) == SECONDS.sub("# ", "\n".join(block.said))


def needs_of(page: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"\w+", " ".join(re.findall(r"^<!-- needs: (.*) -->$", text, re.MULTILINE)))


def cells_of(page: str) -> list[tuple[str, str]]:
    """The ```ipython blocks of a page: cells of one notebook, and what stands below each."""
    return [
        (match["code"], match["text"] or "")
        for match in CELL.finditer((ROOT / page).read_text(encoding="utf-8"))
    ]


def run_cells(codes: list[str], folder: Path, needs: Iterable[str] = ()) -> list[str]:
    """What a real kernel shows under each."""
    for name in ("jupyter_client", "ipykernel", *needs):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    own = dict.fromkeys(("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_RUNTIME_DIR"), str(folder))
    run = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        cwd=folder, input=json.dumps(codes), capture_output=True, text=True,
        env={**os.environ, **own},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    shown: list[str] = json.loads(run.stdout)
    return shown
