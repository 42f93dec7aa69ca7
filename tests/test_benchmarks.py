"""The benchmarks in their short form: they run, and take every figure. How large it is, is not
tested."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.pairs import interval, verdict
from benchmarks.suite import SUITE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]

WITH_A_LIBRARY = {"array", "share", "search", "values"}
OF_A_PEER = {
    "gather", "main_function", "trip", "map", "values", "mixed", "array", "first", "script",
    "image", "calls", "one_core", "threads",
}  # fmt: skip
OF_OURS = OF_A_PEER | {"main_lambda", "share", "start", "imports", "search"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *args],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip


def test_every_measurement_gives_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    here = [name for name in SUITE if name != "on_ray"]  # which has a test of its own
    done = run(
        "--quick", "--peers", "multiprocessing", "--only", ",".join(here), "--json", str(file)
    )
    assert done.returncode == 0, done.stderr
    everything: dict[str, Any] = json.loads(file.read_text())
    assert everything["machine"]["python"] == sys.version.split()[0]

    (figures,) = everything["runs"]
    notes = everything["notes"]
    skipped = {note.partition(",")[0] for note in notes}
    assert all(": skipped, " in note for note in notes) and skipped <= WITH_A_LIBRARY, (
        notes
    )  # which is not installed, or has no memory
    assert {name for name, of in figures.items() if "polycephaly" in of} == OF_OURS - skipped
    assert {name for name, of in figures.items() if "multiprocessing" in of} == OF_A_PEER - skipped
    assert set(figures["trip"]) == {"polycephaly", "multiprocessing", "zeromq", "seqpacket"}
    differences = {"package_ms", "pool_ms", "growth_mib"}  # may be nothing at sizes so small
    for name, of in figures.items():
        for peer, taken in of.items():
            for figure, value in taken.items():
                assert math.isfinite(value), (name, peer, figure)
                assert value > 0 or figure in differences, (name, peer, figure)

    assert "round trip, µs" in done.stdout
    assert "times ours" in done.stdout


@pytest.mark.ray
def test_tasks_on_ray_are_measured_beside_rays_own(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    file = tmp_path / "figures.json"
    done = run("--quick", "--only", "on_ray", "--peers", "ray", "--json", str(file))
    assert done.returncode == 0, done.stderr
    (figures,) = json.loads(file.read_text())["runs"]
    assert set(figures["on_ray"]) == {"polycephaly", "ray"}


SLOW_SUBMIT = """

def _slow(self, *args, submit=Pool.submit, **kwargs):
    __import__("time").sleep(0.02)
    return submit(self, *args, **kwargs)


Pool.submit = _slow
"""


def test_another_checkout_is_measured_with_its_own_code(tmp_path: Path) -> None:
    package = tmp_path / "other" / "polycephaly"
    shutil.copytree(ROOT / "polycephaly", package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "pool" / "pool.py").open("a") as file:
        file.write(SLOW_SUBMIT)
    figures = tmp_path / "figures.json"
    done = run(
        "--quick", "--runs", "6", "--only", "trip", "--against", str(package.parent),
        "--json", str(figures),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    runs = json.loads(figures.read_text())["runs"]
    assert [set(of["trip"]) for of in runs] == [{"polycephaly", "checkout"}] * 6
    assert all(of["trip"]["checkout"]["us"] > 20_000 for of in runs)
    row = next(line for line in done.stdout.splitlines() if line.startswith("| round trip"))
    assert row.rstrip("| ").endswith("faster")


def test_what_is_compared_with_must_be_a_checkout_or_a_peer(tmp_path: Path) -> None:
    done = run("--against", str(tmp_path))
    assert done.returncode == 2
    assert f"'{tmp_path}' is neither a checkout of this project nor one of multi" in done.stderr


def test_a_row_is_judged_by_the_interval_of_its_median() -> None:
    assert interval([1.0] * 5) is None and verdict([9.0] * 5) == "too few pairs"
    assert interval([6, 5, 4, 3, 2, 1]) == (1, 6)
    assert interval(range(1, 16)) == (4, 12)  # the ranks that tables of the sign test have
    assert verdict([0.9] * 12 + [2.0] * 3) == "faster"
    assert verdict([1.02] * 15) == "as fast"
    assert verdict([0.9] * 8 + [1.2] * 7) == "open"
    assert verdict([0.9] * 3 + [1.1] * 12) == "slower"


@pytest.mark.parametrize("option", ["--only", "--peers"])
def test_what_is_not_there_is_told(option: str) -> None:
    done = run(option, "nothing")
    assert done.returncode == 2
    assert "'nothing'; there are" in done.stderr


def test_the_steps_of_a_task_are_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.steps", "--runs", "1"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = {line[:50].strip() for line in done.stdout.splitlines()[1:]}
    assert {
        "the burst",
        "submitting, waiting",
        "packing",
        "unpacking",
        "settling",
        "a drone",
        "the map",
    } <= steps


def test_what_channels_cost_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.channels", "--runs", "1", "--items", "10"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    figures = {
        line[:62].strip(): float(line[62:].split()[0]) for line in done.stdout.splitlines()[1:]
    }
    assert len(figures) == 17
    assert all(figure > 0 for figure in figures.values())


def test_our_behaviour_is_what_the_readme_says() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.behaviour", "polycephaly"],
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [said for _, said in rows] == [
        "yes", "shared", "1 of 10 tasks lost, the pool goes on", "yes", "nothing is left",
    ]  # fmt: skip


def test_a_page_has_a_picture_of_each_row_and_the_table(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, pictures = tmp_path / "page.html", tmp_path / "pictures.svg"
    for file in (page, pictures):
        done = run("--quick", "--only", "trip,imports", "--peers", "futures", "--html", str(file))
        assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.count("<svg") == 1  # `imports` has no peer
    for name in ("round trip, µs", "polycephaly.Pool", "ProcessPoolExecutor", "a ZeroMQ echo"):
        assert f">{name}</text>" in text and f">{name}</text>" in pictures.read_text()
    assert "import polycephaly, ms" in text  # in the table
