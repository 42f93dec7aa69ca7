"""The `polycephaly` command: what it prints, how it ends, and what it leaves when it is stopped
(nothing)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from faults import wait_for_ends

import polycephaly
from polycephaly.cli.demo import securities
from polycephaly.cli.journal import Journal, log_path
from polycephaly.cli.reach import error_text
from polycephaly.cli.serving import EndNow, EndRequest
from polycephaly.demos.securities.generate import symbol_directory
from polycephaly.demos.securities.model import LISTS

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "polycephaly"]
DEMO = [*COMMAND, "demo", "securities"]


def polycephaly_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, cwd=ROOT)


def test_if_no_log_can_be_written_the_error_names_the_cure(monkeypatch, tmp_path):
    cure = "set XDG_STATE_HOME to a directory that you may write into"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="file") as caught:
        Journal("lab", in_background=False)
    assert error_text(caught.value).endswith(
        f"Not a directory, so the log cannot be written: {cure}"
    )
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "~")  # as if there were neither HOME nor an entry in passwd
    with pytest.raises(RuntimeError, match=f"without a home directory.*{cure}"):
        log_path("lab")


def test_a_signal_may_come_while_the_main_thread_begins_to_wait(monkeypatch):
    ending = EndRequest()

    def get():
        ending._on_signal(signal.SIGTERM, None)
        return requested.get()

    requested = ending._requested
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(ending, "_requested", SimpleNamespace(get=get, put=requested.put))
    ending.wait()
    assert ending.reason == "SIGTERM"
    with pytest.raises(EndNow):
        ending._on_signal(signal.SIGTERM, None)


STATUSES = {
    # To a shell both are 130. Under `-m`, CPython ends itself by the signal if the interrupt came
    # out of an `exec` of text, as where a module that is imported makes a dataclass, though caught.
    signal.SIGINT: (130, -signal.SIGINT),
    signal.SIGTERM: (-signal.SIGTERM,),
    signal.SIGKILL: (-signal.SIGKILL,),
}


def start(*arguments: str) -> subprocess.Popen[str]:
    """A demo that will not end by itself for a while, as far as its table's header."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([*DEMO, *arguments], stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    assert process.stdout is not None
    while not process.stdout.readline().startswith("experiment"):
        assert process.poll() is None
    return process


def family(process: subprocess.Popen[str]) -> list[int]:
    """A pidfd for each descendant; it tells the end even of a process that nobody reaps."""
    pidfds = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(ProcessLookupError):
            pidfds.append(os.pidfd_open(child.pid))
    return pidfds


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "symdir"
    directory.mkdir()
    for name, document in symbol_directory().items():
        (directory / name).write_bytes(document.text.encode())
    return directory


def test_version_is_the_packages() -> None:
    done = polycephaly_command("--version")
    assert (done.returncode, done.stdout) == (0, f"polycephaly {polycephaly.__version__}\n")


def test_help_shows_examples_and_loads_neither_httpx_nor_zmq() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "polycephaly", "demo", "securities", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0
    assert "polycephaly demo securities --data ./symdir" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in loaded
    assert loaded.isdisjoint({"httpx", "zmq", "cloudpickle"})


def test_the_demo_shows_a_table_writes_json_and_draws_its_run(tmp_path: Path) -> None:
    path, picture = tmp_path / "result.json", tmp_path / "run.svg"
    numbers = "--drones", "1,3", "--threads", "2,13"
    done = polycephaly_command(
        "demo", "securities", "--latency", "0.01", *numbers, "--json", path, "--plot", picture
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the same in all 7 runs" in done.stdout
    result = json.loads(path.read_text())
    assert tuple(result["lists"]) == LISTS
    assert result["equal"] is True
    shape = [(run["name"], run["drones"], run["threads"]) for run in result["experiments"]]
    assert shape == [
        ("sequential", 0, 1),
        ("I", 5, 1),
        ("II", 1, 1),
        ("II", 3, 1),
        ("III", 0, 2),
        ("III", 0, 13),
        ("combined", 5, 13),
    ]
    assert all(run["seconds"] > 0 for run in result["experiments"])
    assert "\nTimeline: " in done.stdout and "\ngreen: Site.load" in done.stdout
    drawn = picture.read_text()
    assert "II, 3 drones" in drawn and "map Site.load_letter #13" in drawn


def test_the_demo_serves_the_files_of_a_directory(directory: Path) -> None:
    quick = "--latency", "0", "--drones", "2", "--threads", "2"
    done = polycephaly_command("demo", "securities", "--data", directory, *quick)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("content", "what"),
    [(None, "no such file"), ("", "empty"), ("<!DOCTYPE html>\n<html>", "an HTML page")],
)
def test_a_file_that_is_none_gives_one_line_and_status_1(
    content: str | None, what: str, directory: Path
) -> None:
    path = directory / "otherlisted.txt"
    path.unlink()
    if content is not None:
        path.write_text(content)
    done = polycephaly_command("demo", "securities", "--data", directory)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert str(path) in line
    assert what in line


def test_a_missing_directory_gives_one_line_and_status_1(tmp_path: Path) -> None:
    done = polycephaly_command("demo", "securities", "--data", tmp_path / "nowhere")
    assert (done.returncode, done.stderr) == (
        1,
        f"Error: {tmp_path / 'nowhere'}: no such directory\n",
    )


def test_a_live_site_out_of_reach_gives_one_line_and_status_1() -> None:
    # A proxy that refuses makes the real site unreachable on any machine.
    environment = os.environ | {
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    done = subprocess.run(
        [*DEMO, "--live"], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "nasdaqtrader.com" in line
    assert "no answer" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("--drones", "0"),
        ("--drones", "1,,2"),
        ("--drones", "many"),
        ("--threads", "0"),
        ("--threads", "13;26"),
        ("--latency", "-1"),
        ("--latency", "nan"),
        ("--latency", "inf"),
        ("--live", "--data", "symdir"),
        ("--live", "--latency", "1"),
        ("--json", "no/such/directory/file.json"),
        ("--plot", "no/such/directory/run.html"),
        ("--plot", "run.gif"),
        ("--what",),
    ],
)
def test_a_wrong_option_is_a_usage_error_without_a_run(arguments: tuple[str, ...]) -> None:
    done = polycephaly_command("demo", "securities", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage:" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_demo_stopped_in_the_baseline_leaves_nothing(signum: signal.Signals) -> None:
    with start("--latency", "5") as demo:
        pidfds = family(demo)
        demo.send_signal(signum)
        _, errors = demo.communicate()
    assert pidfds
    wait_for_ends(pidfds)
    assert demo.returncode in STATUSES[signum]
    assert "Traceback" not in errors


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_demo_stopped_while_its_drones_work_leaves_nothing(signum: signal.Signals) -> None:
    with start("--latency", "0.05") as demo:
        assert demo.stdout is not None
        while not demo.stdout.readline().startswith("sequential"):
            assert demo.poll() is None
        # Experiment I has begun: its zygote and first drone show beside those of the server.
        while len(pidfds := family(demo)) < 4:
            assert demo.poll() is None
            for pidfd in pidfds:
                os.close(pidfd)
        demo.send_signal(signum)
        _, errors = demo.communicate()
    wait_for_ends(pidfds)
    assert demo.returncode in STATUSES[signum]
    assert "Traceback" not in errors


def test_a_reader_that_leaves_ends_the_demo_quietly() -> None:
    with start("--latency", "0.02", "--drones", "1", "--threads", "1") as demo:
        pidfds = family(demo)
        assert demo.stdout is not None
        assert demo.stderr is not None
        demo.stdout.close()
        assert demo.stderr.read() == ""
    wait_for_ends(pidfds)
    assert demo.returncode == 1


def test_ctrl_c_while_green_threads_load_ends_the_demo_and_leaves_nothing() -> None:
    # Several times III, one of which is then met by who was kept from looking for a second.
    with start("--latency", "0.04", "--drones", "4", "--threads", "1,2,3,4,5,6,7,8") as demo:
        assert demo.stdout is not None
        process = psutil.Process(demo.pid)
        idle = process.num_threads()
        while not demo.stdout.readline().startswith("II "):
            assert demo.poll() is None
        # Experiment III has begun: its native threads show in this one process, and no drone any
        # more but the server.
        while process.num_threads() <= idle or len(process.children(recursive=True)) > 2:
            assert demo.poll() is None
        pidfds = family(demo)
        demo.send_signal(signal.SIGINT)
        _, errors = demo.communicate()
    wait_for_ends(pidfds)
    assert demo.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "drones", "threads"),
    [((), (1, 2, 3, 5, 8, 13, 20), (1, 2, 3, 5, 8, 13, 20, 26)), (("--live",), (8,), (13,))],
)
def test_fewer_heads_go_to_the_exchanges_own_site(
    arguments: tuple[str, ...], drones: tuple[int, ...], threads: tuple[int, ...]
) -> None:
    with securities.make_context("securities", list(arguments)) as context:
        assert (context.params["drones"], context.params["threads"]) == (drones, threads)
