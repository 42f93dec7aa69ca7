"""Pools from the shell: started, used, watched and ended by name, each command as a user types
it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from faults import wait_for
from rich.console import Console

import polycephaly as poly
from polycephaly.cli import main
from polycephaly.cli.join import _work_for
from polycephaly.cli.top import _ORDERS, Keys, Rates, _move, _render, _sort
from polycephaly.engines.remote import messages
from polycephaly.engines.remote.client import RemotePool
from polycephaly.engines.remote.keys import Card
from polycephaly.runtime.procfs import descendants

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "polycephaly"]

Run = Callable[..., subprocess.CompletedProcess[str]]


class Shell:
    """Somebody at a shell, with a runtime directory of his own; in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runtime = folder / "run"
        self.state = folder / "state"
        self.runtime.mkdir(mode=0o700)
        own = {
            "XDG_RUNTIME_DIR": str(self.runtime),
            "XDG_STATE_HOME": str(self.state),
            "PYTHONPATH": str(ROOT),
        }
        self.env = {**os.environ, **own, "COLUMNS": "80"}

    def run(self, *words: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *map(str, words)]
        return subprocess.run(
            command, input=stdin, capture_output=True, text=True, env=self.env, cwd=self.folder
        )

    def say(self, *words: object, stdin: str = "") -> str:
        """What it printed; it must end well and say nothing on stderr."""
        done = self.run(*words, stdin=stdin)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    def complaint(self, *words: object) -> str:
        """The one line on stderr of a command that fails with status 1 and prints nothing else."""
        done = self.run(*words)
        assert (done.returncode, done.stdout) == (1, ""), done.stderr
        (line,) = done.stderr.splitlines()
        return line

    @contextmanager
    def running(self, *words: object, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*COMMAND, *map(str, words)],
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=self.env,
            cwd=cwd or self.folder,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()

    @contextmanager
    def pool(self, *words: object, name: str = "lab") -> Iterator[Card]:
        """One in the background."""
        self.say("start", *([name] if name != "default" else []), "--daemonize", *words)
        card = self.card(name)
        try:
            yield card
        finally:
            end(card)

    def card(self, name: str = "lab") -> Card:
        return Card.read(self.runtime / "polycephaly" / f"{name}.json")


def end(card: Card) -> None:
    """However the test went."""
    with suppress(ProcessLookupError):  # it may just be ending by itself
        pidfd = os.pidfd_open(card.pid)
        try:
            if card.is_server_alive():
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [])
        finally:
            os.close(pidfd)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A pool of two drones that many tests use; none of them may harm a drone."""
    shell = Shell(tmp_path_factory.mktemp("lab"))
    (shell.folder / "setup.py").write_text("import math\n\n\ndef half(x):\n    return x / 2\n")
    with shell.pool("-n", "2", "--file", "setup.py", "--import", "json.decoder"):
        # The command returns when the first drone is there; a test's census would find the second.
        wait_for(lambda: _states(shell) == ["idle", "idle"])
        yield shell


def _states(lab: Shell) -> list[str]:
    return [drone["state"] for drone in json.loads(lab.say("ps", "lab", "--json"))["drones"]]


def words_of(line: str) -> list[str]:
    return line.split()


# -- start and stop --------------------------------------------------------------------------------


@pytest.mark.guarantee("command-1")
def test_a_pool_in_the_background_outlives_its_shell_and_ends_when_told_to(shell: Shell) -> None:
    said = shell.say("start", "lab", "-n", "1", "-d")
    card = shell.card()
    try:
        assert said == f"lab: 1 drone, process {card.pid}, log {shell.state}/polycephaly/lab.log\n"
        assert shell.say("doit", "lab", "6 * 7") == "42\n"
        done = shell.run("stop", "lab")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "lab has ended\n")
        assert not card.is_server_alive()
        assert "no pool is running" in shell.run("list").stderr
    finally:
        end(card)


def is_fifo(path: str) -> bool:
    with suppress(FileNotFoundError):
        return stat.S_ISFIFO(os.stat(path).st_mode)
    return False


@pytest.mark.guarantee("command-1")
def test_the_daemon_has_a_session_of_its_own_no_terminal_and_no_foreign_descriptor(
    shell: Shell,
) -> None:
    with shell.pool("-n", "1") as card:
        pid = card.pid
        log = shell.state / "polycephaly" / "lab.log"
        assert os.getsid(pid) not in (os.getsid(0), pid)  # not its leader: it can get no terminal
        targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (0, 1, 2)]
        assert targets == ["/dev/null", str(log), str(log)]
        # The command has returned when the daemon has written to its pipe, and closes that soon.
        wait_for(lambda: not is_fifo(f"/proc/{pid}/fd/3"))
        assert stat.S_IMODE(log.stat().st_mode) == 0o600
        assert stat.S_IMODE(log.parent.stat().st_mode) == 0o700


def test_the_number_of_drones_can_be_changed(shell: Shell) -> None:
    with shell.pool("-n", "1"):
        assert shell.say("resize", "lab", "3") == ""
        assert len(shell.say("doit", "lab", "-e", "1").splitlines()) == 3
        assert "0 is not in the range x>=1" in shell.run("resize", "lab", "0").stderr
    assert shell.complaint("resize", "lab", "2").startswith("Error: no pool named 'lab' is running")


def test_without_a_name_the_pool_is_the_one_that_start_makes_without_a_name(shell: Shell) -> None:
    with shell.pool("-n", "1", name="default"):
        assert shell.say("doit", "6 * 7") == "42\n"
        assert "default.0" in shell.say("ps")
        assert shell.say("stacks").startswith("default.0 (pid ")
        assert "default serves 1 drone" in shell.say("logs")
        assert shell.run("stop").returncode == 0
    assert shell.complaint("ps").startswith("Error: no pool named 'default' is running")


def test_a_pool_from_the_shell_has_resources(shell: Shell) -> None:
    with shell.pool("-n", "1", "--resource", "db=2", "--resource", "gpu=1"):
        status = json.loads(shell.say("ps", "lab", "--json"))
        assert status["resources"] == {"db": {"size": 2, "free": 2}, "gpu": {"size": 1, "free": 1}}
    wrong = shell.run("start", "lab", "--resource", "db=no")
    assert wrong.returncode == 2 and "'db=no' is not a resource and its size" in wrong.stderr


def test_a_pool_from_the_shell_may_leave_out_the_items_of_errors(shell: Shell) -> None:
    with (
        shell.pool("-n", "1", "--no-describe-items"),
        poly.connect(shell.runtime / "polycephaly/lab.json") as client,
    ):
        (error,) = client.map(int, ["secret"], return_exceptions=True)
        assert error.__notes__ == ["in map(int, ...), item 0"]


def test_running_tasks_are_interrupted_and_drones_replaced_from_the_shell(shell: Shell) -> None:
    with shell.pool("-n", "2"):
        shell.say("doit", "lab", "-e", "old = 1")
        with shell.running("doit", "lab", "import time; time.sleep(1000)") as sleeping:
            wait_for(lambda: "sleep" in shell.say("ps", "lab"))
            assert shell.complaint("interrupt", "lab", "lab.7").endswith("lab.0, lab.1")
            assert shell.say("interrupt", "lab") == ""
            assert "KeyboardInterrupt" in sleeping.communicate()[1]
        assert shell.say("refresh", "lab") == ""
        assert shell.say("doit", "lab", "'old' in globals()") == "False\n"


def test_a_drone_that_has_just_ended_keeps_no_other_from_being_interrupted(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shell.runtime))
    with poly.Pool(2) as pool, poly.serve(pool, name="lab"), poly.connect("lab") as remote:
        known = remote.drones
        known[0].kill()
        sleeping = known[1].promise("import time; time.sleep(1000)")
        wait_for(sleeping.running)
        monkeypatch.setattr(RemotePool, "drones", known)
        done = CliRunner().invoke(main, ["interrupt", "lab"])
        assert done.exit_code == 1 and done.output.startswith(f"Error: {known[0].name}: ")
        assert isinstance(sleeping.exception(30), KeyboardInterrupt)


def test_a_clients_tasks_are_cancelled_from_the_shell_though_it_is_stopped(shell: Shell) -> None:
    with shell.pool("-n", "1"), poly.connect(shell.runtime / "polycephaly/lab.json") as watch:
        with shell.running("doit", "lab", "import time; time.sleep(1000)") as sleeping:
            wait_for(lambda: watch.status()["drones"][0]["client"] == str(sleeping.pid))
            assert "has no client 1, but " in shell.complaint("cancel", "lab", "1")
            sleeping.send_signal(signal.SIGSTOP)
            done = shell.run("cancel", "lab", sleeping.pid)
            # Not later: the server drops a client from which it hears nothing for long.
            wait_for(lambda: watch.status()["drones"][0]["state"] == "idle")
            sleeping.send_signal(signal.SIGCONT)
            assert done.stderr == f"cancelled the tasks of {sleeping.pid}\n", done
            assert sleeping.communicate()[1].endswith("cancelled\n") and sleeping.returncode == 1
        assert shell.run("cancel", "lab").stderr == "cancelled the tasks of no client\n"


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_daemon_comes_up_where_streams_are_closed(shell: Shell, closed: str) -> None:
    command = [
        "sh",
        "-c",
        f'exec "$@" {closed}',
        "sh",
        *COMMAND,
        "start",
        "lab",
        "-n",
        "1",
        "--daemonize",
    ]
    assert subprocess.run(command, env=shell.env, cwd=shell.folder, timeout=60).returncode == 0
    assert shell.say("doit", "lab", "6 * 7") == "42\n"
    assert shell.run("stop", "lab").returncode == 0


def test_work_has_the_umask_and_the_directory_of_the_shell(lab: Shell) -> None:
    assert lab.say(
        "doit", "lab", "import os; old = os.umask(0); os.umask(old); (old, os.getcwd())"
    ) == (f"{(_umask(), str(lab.folder))!r}\n")


def _umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


def test_a_second_pool_of_that_name_is_refused(lab: Shell) -> None:
    expected = (
        f"Error: a pool named 'lab' is running already, as process {lab.card().pid}: stop it first"
    )
    assert lab.complaint("start", "lab") == lab.complaint("start", "lab", "-d") == expected


def test_of_two_that_start_at_once_one_is_refused(shell: Shell) -> None:
    with (
        shell.running("start", "lab", "-n", "1", "-d") as one,
        shell.running("start", "lab", "-n", "1", "-d") as other,
    ):
        said = sorted((each.wait(), *each.communicate()) for each in (one, other))
    card = shell.card()
    end(card)
    assert [status for status, _, _ in said] == [0, 1]
    assert (
        said[1][2]
        == f"Error: a pool named 'lab' is running already, as process {card.pid}: stop it first\n"
    )


def test_the_name_of_a_killed_pool_is_free_and_its_drones_are_gone(shell: Shell) -> None:
    with shell.pool("-n", "1") as card:
        drone = int(shell.say("doit", "lab", "import os; os.getpid()"))
        pidfd = os.pidfd_open(drone)
        end(card)
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)
        assert (
            shell.complaint("ps", "lab") == "Error: no pool named 'lab' is running; running: none"
        )
        assert json.loads(shell.say("list", "--json")) == []
        with shell.pool("-n", "1"):
            assert shell.say("doit", "lab", "1 + 1") == "2\n"


@pytest.mark.parametrize("where", [(), ("-d",)])
def test_what_cannot_be_loaded_shows_its_traceback_from_the_first_line_of_ones_own(
    shell: Shell, where: tuple[str, ...]
) -> None:
    (shell.folder / "bad.py").write_text("def broken():\n    return 1 / 0\n\n\nbroken()\n")
    done = shell.run("start", "lab", *where, "--file", "bad.py")
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[:2] == [
        "Traceback (most recent call last):",
        '  File "bad.py", line 5, in <module>',
    ]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    done = shell.run("start", "lab", *where, "--import", "no_such_module")
    assert (done.returncode, done.stderr) == (
        1,
        "ModuleNotFoundError: No module named 'no_such_module'\n",
    )


def test_of_a_start_that_ends_the_process_the_log_is_named(shell: Shell) -> None:
    (shell.folder / "bad.py").write_text("import os\n\nos._exit(3)\n")
    line = shell.complaint("start", "lab", "-d", "--file", "bad.py")
    assert line.endswith("ended during its start; see its log (polycephaly logs lab)")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--max-memory", "3X"), "'3X' is not a size such as 500M or 2G"),
        (("--tcp", "here"), "'here' is not HOST:PORT"),
        (("--tcp", "0.0.0.0:80"), "is not an address that other hosts can reach"),
        (("-n", "0"), "0 is not in the range"),
    ],
)
def test_a_wrong_option_is_a_usage_error(shell: Shell, options: tuple[str, ...], what: str) -> None:
    done = shell.run("start", "lab", *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert what in done.stderr


@pytest.mark.parametrize("number", ["nan", "-1", "0", "soon"])
@pytest.mark.parametrize("command", [("doit", "lab", "1 + 1"), ("start", "lab")])
def test_a_time_limit_that_is_no_number_of_seconds_is_a_usage_error(
    shell: Shell, command: tuple[str, ...], number: str
) -> None:
    done = shell.run(*command, "--timeout", number)
    assert (done.returncode, done.stdout) == (2, "")
    assert "'--timeout'" in done.stderr


def test_a_wrong_name_or_limit_is_one_line(shell: Shell) -> None:
    assert "a pool's name is" in shell.complaint("start", "x y")
    assert shell.complaint("start", "lab", "--hang-timeout", "0.1", "-d").endswith(
        "because a drone, which is asked for a sign of life four times in it, may be slow"
    )


SLOW = (
    "open('begun', 'w').close()\nimport time\n"
    "while not __import__('os').path.exists('go'): time.sleep(0.01)\n'done'"
)
STUCK = "open('begun', 'w').close()\nimport time\ntime.sleep(1000)"


def test_a_pool_asked_to_end_finishes_what_runs_and_its_client_gets_it(shell: Shell) -> None:
    with shell.running("start", "lab", "-n", "1") as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("lab: 1 drone")
        with shell.running("doit", "lab", SLOW) as client:
            wait_for((shell.folder / "begun").exists)
            server.send_signal(signal.SIGTERM)
            log = shell.state / "polycephaly" / "lab.log"
            wait_for(lambda: "lab ends: SIGTERM" in log.read_text())
            (shell.folder / "go").touch()
            assert client.communicate() == ("'done'\n", "")
        assert server.wait() == 0


@pytest.mark.guarantee("end-3")
def test_a_pool_whose_processes_all_get_sigterm_finishes_what_runs(shell: Shell) -> None:
    with shell.running("start", "lab", "-n", "2") as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("lab: 2 drones")
        with shell.running("doit", "lab", SLOW) as client:
            wait_for((shell.folder / "begun").exists)
            for pid in (server.pid, *descendants(server.pid)):
                os.kill(pid, signal.SIGTERM)
            log = shell.state / "polycephaly" / "lab.log"
            wait_for(lambda: "lab ends: SIGTERM" in log.read_text())
            (shell.folder / "go").touch()
            assert client.communicate() == ("'done'\n", "")
        assert server.wait() == 0


def test_a_hangup_that_it_was_told_to_ignore_does_not_end_a_pool(shell: Shell) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        process = subprocess.Popen(
            [*COMMAND, "start", "lab", "-n", "1"], env=shell.env, cwd=shell.folder
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        wait_for(lambda: shell.run("doit", "lab", "0").returncode == 0, 30)
        os.kill(process.pid, signal.SIGHUP)
        assert shell.say("doit", "lab", "6 * 7") == "42\n"
    finally:
        process.terminate()
        assert process.wait() == 0


def test_of_several_pools_one_that_cannot_be_ended_leaves_no_other_running(shell: Shell) -> None:
    with shell.pool("-n", "1") as card:
        done = shell.run("stop", "nosuch", "lab")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == (
            "Error: no pool named 'nosuch' is running; running: lab\nlab has ended\n"
        )
        assert not card.is_server_alive()


@pytest.mark.parametrize("how", ["twice", "stop --now"])
def test_a_pool_can_be_ended_at_once(shell: Shell, how: str) -> None:
    with shell.running("start", "lab", "-n", "1") as server:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("lab: 1 drone")
        with shell.running("doit", "lab", STUCK) as client:
            wait_for((shell.folder / "begun").exists)
            if how == "twice":
                server.send_signal(signal.SIGINT)
                log = shell.state / "polycephaly" / "lab.log"
                wait_for(lambda: "lab ends: SIGINT" in log.read_text())
                server.send_signal(signal.SIGINT)
            else:
                assert shell.run("stop", "lab", "--now").returncode == 0
            output, errors = client.communicate()
            assert (client.returncode, output, len(errors.splitlines())) == (1, "", 1)
        assert server.wait() == 0


def test_a_daemon_whose_shell_did_not_wait_ends(shell: Shell) -> None:
    os.mkfifo(shell.folder / "gate")
    (shell.folder / "slow.py").write_text("open('gate').close()\n")
    with shell.running("start", "lab", "-d", "--file", "slow.py") as waiting:
        log = shell.state / "polycephaly" / "lab.log"
        wait_for(log.exists)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait() == 130
    open(shell.folder / "gate", "w").close()  # the census sees whether it ends


def test_a_pool_that_can_keep_no_drone_ends_and_its_log_says_why(shell: Shell) -> None:
    shell.say("start", "lab", "--daemonize", "-n", "1", "--max-memory", "1M")
    try:
        wait_for(
            lambda: (
                " ERROR lab ends: its drones have ended: " in shell.say("logs", "lab", "-n", "1")
            )
        )
        wait_for(lambda: json.loads(shell.say("list", "--json")) == [])
    finally:
        with suppress(FileNotFoundError):  # it has ended, as it should
            end(shell.card())


# -- doit ------------------------------------------------------------------------------------------


@pytest.mark.guarantee("command-2")
@pytest.mark.parametrize(
    ("code", "status", "printed"),
    [
        ("1 + 1", 0, "2\n"),
        ("'text'", 0, "'text'\n"),
        ("None", 0, ""),
        ("x = 5", 0, ""),
        ("half(5)", 0, "2.5\n"),
        ("json.decoder.__name__", 0, "'json.decoder'\n"),
        ("import sys; sys.argv", 0, "['-c', 'a', '--b']\n"),
        ("import sys; sys.exit(7)", 7, ""),
        ("raise SystemExit", 0, ""),
        ("__name__", 0, "'__main__'\n"),
        ("async def f(): return 3\nf()", 0, "3\n"),
    ],
)
def test_code_has_the_status_and_prints_the_value_that_a_prompt_would(
    lab: Shell, code: str, status: int, printed: str
) -> None:
    done = lab.run("doit", "lab", code, "--", "a", "--b")
    assert (done.returncode, done.stdout, done.stderr) == (status, printed, "")


@pytest.mark.guarantee("command-2")
def test_an_error_shows_its_own_traceback_and_has_status_1(lab: Shell) -> None:
    done = lab.run("doit", "lab", "def f():\n    return [][1]\nf()")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith('Traceback (most recent call last):\n  File "<doit ')
    assert "return [][1]" in done.stderr
    assert done.stderr.endswith("IndexError: list index out of range\n")
    assert "polycephaly" not in done.stderr


def test_a_syntax_error_shows_the_line_alone(lab: Shell) -> None:
    done = lab.run("doit", "lab", "1 +")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == ["    1 +", "       ^", "SyntaxError: invalid syntax"]


def test_a_message_for_sys_exit_is_printed_and_has_status_1(lab: Shell) -> None:
    assert lab.complaint("doit", "lab", "import sys; sys.exit('no data')") == "no data"


def test_a_file_has_its_arguments_and_name_and_prints_no_value(lab: Shell) -> None:
    path = lab.folder / "script.py"
    path.write_text("import sys\nseen = (sys.argv, __file__)\nseen\nraise KeyError(seen)\n")
    done = lab.run("doit", "lab", "-f", path, "--", "--year", "3")
    assert (done.returncode, done.stdout) == (1, "")
    assert f'  File "{path}", line 4, in <module>\n' in done.stderr
    assert done.stderr.endswith(f"KeyError: ({[str(path), '--year', '3']!r}, {str(path)!r})\n")


def test_code_runs_in_a_pool_that_its_file_or_its_address_names(lab: Shell) -> None:
    card = lab.card()
    lab_file = lab.folder / "copied.json"
    shutil.copyfile(lab.runtime / "polycephaly" / "lab.json", lab_file)
    lab_file.chmod(0o600)
    try:
        for where in "./copied.json", lab_file, card.address:
            assert lab.say("doit", where, "6 * 7") == "42\n"
    finally:
        lab_file.unlink()


def test_a_file_is_read_in_the_encoding_that_it_declares(lab: Shell) -> None:
    path = lab.folder / "script.py"
    path.write_bytes(b"# coding: latin-1\nprint(ascii('\xe9'))\n")
    assert lab.say("doit", "lab", "-f", path) == "'\\xe9'\n"
    for content in (b"'\xe9'\n", b"\n\n'\xe9'\n", b"# coding: none-such\n"):
        path.write_bytes(content)
        assert lab.complaint("doit", "lab", "-f", path).startswith(f"Error: {path}: ")


def test_code_from_the_standard_input(lab: Shell) -> None:
    assert lab.say("doit", "lab", "-", stdin="a = 20\na + 1\n") == "21\n"


def test_everywhere_is_once_in_each_drone(lab: Shell) -> None:
    printed = lab.say("doit", "lab", "-e", "import os; os.getpid()")
    pids = {
        drone["name"]: drone["pid"]
        for drone in json.loads(lab.say("ps", "lab", "--json"))["drones"]
    }
    assert sorted(printed.splitlines()) == sorted(f"[{name}] {pid}" for name, pid in pids.items())


def test_json_of_a_value_and_of_an_error(lab: Shell) -> None:
    assert json.loads(lab.say("doit", "lab", "--json", "print('a'); 2 ** 70")) == {
        "value": str(2**70), "status": 0, "error": None, "stdout": "a\n", "stderr": "",
    }  # fmt: skip
    done = lab.run("doit", "lab", "--json", "import sys; print('b', file=sys.stderr); 1 / 0")
    found = json.loads(done.stdout)
    assert (done.returncode, done.stderr, found["status"], found["value"]) == (1, "", 1, None)
    assert (found["error"]["type"], found["error"]["message"]) == (
        "ZeroDivisionError",
        "division by zero",
    )
    assert found["stderr"] == "b\n"
    found = json.loads(lab.run("doit", "lab", "--json", "import sys; sys.exit('why')").stdout)
    assert (found["status"], found["error"]["message"]) == (1, "why")


def test_what_it_prints_comes_while_it_runs_without_a_prefix(lab: Shell) -> None:
    os.mkfifo(lab.folder / "gate")
    code = (
        "import sys; print('out'); print('err', file=sys.stderr); open('gate').read(); print('end')"
    )
    with lab.running("doit", "lab", code) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        assert client.stdout.readline() == "out\n"
        assert client.stderr.readline() == "err\n"
        open(lab.folder / "gate", "w").close()
        assert client.communicate() == ("end\n", "")


def test_a_reader_that_is_slow_loses_nothing_and_one_that_leaves_is_no_error(lab: Shell) -> None:
    code = "for i in range(30_000): print('line', i)\nopen('printed', 'w').close()"
    with lab.running("doit", "lab", code) as client:
        wait_for(
            (lab.folder / "printed").exists
        )  # far more than a pipe holds, and nobody has read any
        assert client.communicate() == ("".join(f"line {i}\n" for i in range(30_000)), "")
    with lab.running(
        "doit", "lab", "import time\nwhile True: print('more'); time.sleep(0.001)"
    ) as client:
        assert client.stdout is not None
        assert client.stderr is not None
        client.stdout.readline()
        client.stdout.close()
        client.stdout = None
        assert (client.stderr.read(), client.wait()) == ("", 1)


def test_a_limit_of_time_interrupts_it(lab: Shell) -> None:
    done = lab.run("doit", "lab", "--timeout", "0.2", "import time; time.sleep(1000)")
    assert done.stderr.splitlines()[-1].startswith(  # behind the lines where it was, mostly
        "TimeoutError: code 'import time; time.sleep(1000)' ran for more than 0.2 s"
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_ctrl_c_interrupts_the_work_and_has_status_130(lab: Shell) -> None:
    code = (
        "open('b', 'w').close()\n"
        "try: __import__('time').sleep(1000)\n"
        "except KeyboardInterrupt: open('c', 'w').close()"
    )
    with lab.running("doit", "lab", code) as client:
        wait_for((lab.folder / "b").exists)
        client.send_signal(signal.SIGINT)
        assert (client.wait(), client.communicate()) == (130, ("", "interrupted\n"))
    wait_for((lab.folder / "c").exists)


def test_a_drone_that_dies_is_one_line(shell: Shell) -> None:
    with shell.pool("-n", "1"):
        line = shell.complaint("doit", "lab", "import os; os._exit(3)")
        assert "ended with exit status 3 while running code 'import os; os._exit(3)'" in line


def test_python_finds_the_pool_by_the_same_name(
    lab: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(lab.runtime))
    with poly.connect("lab") as pool:
        assert pool.doit("half(3)") == 1.5
        assert pool.submit(pow, 2, 5).result() == 32


STATUS = {
    "name": "lab", "pid": 1, "host": "h", "started": 0.0, "clients": 1, "queued": 0,
    "tasks_done": 3,
}  # fmt: skip
DRONE = {"pid": 2, "host": "h", "state": "busy", "seconds": 1.0, "running": "work", "waiting": None}

# -- list, ps, top ---------------------------------------------------------------------------------


def wait_until_idle(lab: Shell) -> None:
    """Clients of other tests have gone, and their work has ended: the server hears of both a little
    later."""

    def idle() -> bool:
        (found,) = json.loads(lab.say("list", "--json"))
        return found["clients"] == 0 and set(_states(lab)) == {"idle"}

    wait_for(idle)


def test_tables_in_a_pipe_are_plain_and_aligned(lab: Shell) -> None:
    wait_until_idle(lab)
    head, *rows = lab.say("ps", "lab").splitlines()
    assert words_of(head) == ["DRONE", "PID", "STATE", "FOR", "MEMORY", "DONE", "CLIENT", "RUNNING"]
    assert [row[: len("lab.0")] for row in rows] == ["lab.0", "lab.1"]
    assert all(row[head.index("STATE") :].startswith("idle") for row in rows)
    head, row = lab.say("list").splitlines()
    assert words_of(row)[:3] == ["lab", str(lab.card().pid), "2"]
    assert "\x1b" not in head + row


def test_json_tells_what_is_running(lab: Shell) -> None:
    wait_until_idle(lab)
    os.mkfifo(lab.folder / "door")
    with lab.running("doit", "lab", "open('now', 'w').close(); open('door').read()") as client:
        wait_for((lab.folder / "now").exists)
        (found,) = json.loads(lab.say("list", "--json"))
        assert (found["name"], found["clients"], len(found["drones"])) == ("lab", 1, 2)
        busy = [
            drone
            for drone in json.loads(lab.say("ps", "lab", "--json"))["drones"]
            if drone["state"] == "busy"
        ]
        assert [drone["running"] for drone in busy] == [
            "code \"open('now', 'w').close(); open('door').read()\""
        ]
        assert busy[0]["seconds"] >= 0
        open(lab.folder / "door", "w").close()
        assert client.communicate() == ("''\n", "")


@pytest.mark.guarantee("death-11")
def test_ps_tells_in_what_a_drone_waits(shell: Shell) -> None:
    with shell.pool("-n", 1, "--report-waiting", 0.3):
        os.mkfifo(shell.folder / "door")
        with shell.running("doit", "lab", "open('door').read()") as client:
            waiting: Any = wait_for(
                lambda: json.loads(shell.say("ps", "lab", "--json"))["drones"][0]["waiting"],
                60,  # seconds: it counts anew when the machine stood still
            )
            assert (
                waiting["task"] == "code \"open('door').read()\""
                and waiting["system_call"] == "openat"
            )
            assert (
                waiting["file"].startswith("<doit ")
                and waiting["line"] == 1
                and waiting["seconds"] >= 0.3
            )
            wait_for(
                lambda: re.search(
                    r"code \"open\('door'\)\.read\(\)\" has waited for .* "
                    r"in the system call openat$",
                    shell.say("ps", "lab").rstrip(),
                ),
                60,
            )
            open(shell.folder / "door", "w").close()
            assert client.communicate() == ("''\n", "")


SLEEPS = """
def sleeps():
    import time

    time.sleep(1000)


sleeps()
"""


def test_stacks_shows_the_lines_of_each_drone(shell: Shell) -> None:
    with shell.pool("-n", 2), shell.running("doit", "lab", SLEEPS):
        wait_for(lambda: "in the system call clock_nanosleep\n" in shell.say("stacks", "lab"))
        busy, idle = shell.say("stacks", "lab").rstrip().split("\n\n")
        if "idle" in busy:
            busy, idle = idle, busy
        first, *lines = busy.splitlines()
        assert re.fullmatch(
            r"lab\.\d \(pid \d+\): code .* #\d+, for \d+\.\d s, in the system call \w+", first
        )
        assert [line.strip() for line in lines] == [
            'File "<doit 1>", line 8, in <module>',
            "sleeps()",
            'File "<doit 1>", line 5, in sleeps',
            "time.sleep(1000)",
        ]
        assert re.fullmatch(r"lab\.\d \(pid \d+\): idle", idle)
        as_data = json.loads(shell.say("stacks", "lab", "--json"))
        told = {each["state"]: each["system_call"] for each in as_data}
        assert told == {"busy": "clock_nanosleep", "idle": None}


def test_native_stacks_follow_the_usual_ones(lab: Shell, tmp_path: Path) -> None:
    py_spy = tmp_path / "py-spy"
    lab.env["PATH"], path = f"{tmp_path}:{lab.env['PATH']}", lab.env["PATH"]
    try:
        py_spy.write_text('#!/bin/sh\necho "$@"\n')
        py_spy.chmod(0o700)
        drones = json.loads(lab.say("ps", "lab", "--json"))["drones"]
        expected = "".join(
            f"{drone['name']} (pid {drone['pid']}): idle\n\ndump --native --pid {drone['pid']}\n\n"
            for drone in drones
        )
        assert lab.say("stacks", "lab", "--native") == expected
        py_spy.write_text("#!/bin/sh\nexit 1\n")
        done = lab.run("stacks", "lab", "--native")
        assert done.returncode == 1
        assert done.stderr == "Error: py-spy failed for lab.0, lab.1\n"
        assert lab.run("stacks", "lab", "--native", "--json").returncode == 2
    finally:
        lab.env["PATH"] = path


def test_native_stacks_without_py_spy_say_how_to_get_it(lab: Shell) -> None:
    if shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"):
        pytest.skip("py-spy is installed")
    assert (
        lab.complaint("stacks", "lab", "--native")
        == "Error: --native needs py-spy, which is not installed: pip install py-spy"
    )


@contextmanager
def terminal(
    shell: Shell, *words: str, **env: str
) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A command on a terminal of its own, with both ends of that."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    without = {name: value for name, value in shell.env.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [*COMMAND, *words], stdin=slave, stdout=slave, stderr=slave, cwd=shell.folder,
        env={**without, "TERM": "xterm", **env}, start_new_session=True,
    )  # fmt: skip
    try:
        yield process, master, slave
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


def read_until(master: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        assert select.select([master], [], [], 20)[0], seen
        seen += os.read(master, 65536)
    return seen


def drain(master: int) -> None:
    """A terminal that nobody reads is full at some time, and stops the command."""
    while select.select([master], [], [], 0)[0]:
        os.read(master, 65536)


def test_a_terminal_gets_colours_unless_they_are_not_wanted(lab: Shell) -> None:
    with terminal(lab, "list") as (process, master, _):
        assert b"\x1b[1m" in read_until(master, b"tcp://")
        assert process.wait() == 0
    with terminal(lab, "ps", "lab", NO_COLOR="1") as (process, master, _):
        assert b"\x1b[3" not in read_until(master, b"lab.1")
        assert process.wait() == 0


@pytest.mark.parametrize(("how", "status"), [("q", 0), ("ctrl-c", 0), ("sigterm", 143)])
def test_top_leaves_the_terminal_as_it_was(lab: Shell, how: str, status: int) -> None:
    with terminal(lab, "top", "lab", "--every", "0.1") as (process, master, slave):
        before = termios.tcgetattr(slave)
        read_until(master, b"lab.1")
        read_until(master, b"lab.1")  # it goes on
        assert termios.tcgetattr(slave) != before
        if how == "q":
            os.write(master, b"q")
        else:
            process.send_signal(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        read_until(master, b"\x1b[?1049l")  # back from the other screen
        assert process.wait() == status
        assert termios.tcgetattr(slave) == before


def test_top_puts_first_the_drones_that_use_most() -> None:
    rates, now = Rates(), [100.0]

    def picture(order: str, *drones: tuple[float | None, int, int]) -> list[str]:
        """The names and shares of drones that have used so much processor, memory, and tasks."""
        status = STATUS | {
            "drones": [
                DRONE | {"number": n, "name": f"lab.{n}"}
                | dict(zip(("processor", "memory", "tasks_done"), drone, strict=True))
                for n, drone in enumerate(drones)
            ]
        }  # fmt: skip
        rates.update(status, now[0])
        console = Console(width=100, height=24, file=io.StringIO())
        drones = _sort(status["drones"], _ORDERS[order])
        console.print(_render(status, drones, rates.tasks, None, console.width))
        lines = [line.split() for line in console.file.getvalue().splitlines() if "lab." in line]
        return [f"{line[0]} {line[7]}" if "%" in line[7] else line[0] for line in lines]

    assert picture("c", (5.0, 1, 1), (7.0, 1, 1)) == ["lab.0", "lab.1"]  # nothing to compare with
    now[0] += 2.0
    assert picture("c", (5.0, 2, 1), (8.0, 1, 2)) == ["lab.1 50%", "lab.0 0%"]
    now[0] += 0.01  # too soon
    assert picture("c", (5.01, 2, 1), (8.0, 1, 2)) == ["lab.1 50%", "lab.0 0%"]
    now[0] += 0.99
    assert picture("m", (5.25, 2, 1), (8.0, 1, 2)) == ["lab.0 25%", "lab.1 0%"]
    assert picture("d", (None, 2, 1), (8.0, 1, 2)) == ["lab.1 0%", "lab.0 25%"]
    assert picture("n", (None, 2, 1), (8.0, 1, 2)) == ["lab.0 25%", "lab.1 0%"]


def test_top_in_a_narrow_terminal_keeps_what_runs_and_tells_its_keys() -> None:
    measured = {"processor": None, "memory": 1 << 20, "tasks_done": 3, "cpu": 0.5}
    drone = (
        DRONE
        | measured
        | {"name": "lab.0", "number": 0, "state": "busy", "running": "parse_prices"}
    )
    console = Console(width=60, height=24, file=io.StringIO())
    console.print(_render(STATUS | {"drones": [drone]}, [drone], 0.0, None, console.width))
    text = console.file.getvalue()
    assert "parse_prices" in text and "k: kill" in text
    assert max(map(len, text.splitlines())) <= 60


def test_the_keys_of_top() -> None:
    reader, writer = os.pipe()
    keys = Keys(reader)
    try:
        assert keys.next(0.0) == ""
        others = [b"\x1b[C", b"\x1bOQ", b"\x1bk", b"\x1b[1;5C", b"\x1b[15~"]
        os.write(writer, b"xM\x1b[A" + b"".join(others) + b"\x1bOBq\x03")
        typed = [keys.next(60) for _ in range(11)]
        assert typed[:3] == ["x", "m", "\x1b[A"] and keys.next(0.0) == ""
        assert typed[3:8] == [each.decode().lower() for each in others]
        assert typed[8:] == ["\x1bOB", "q", "\x03"]
    finally:
        os.close(writer)
    assert keys.next(60) == "q"  # the terminal is gone
    os.close(reader)


def test_top_selects_the_drone_above_or_below() -> None:
    drones = [{"number": number} for number in (7, 5, 9)]
    chosen, seen = None, []
    for step in (1, 1, 1, 1, -1):
        chosen = _move(drones, chosen, step)
        seen.append(chosen)
    assert seen == [7, 5, 9, 9, 5]
    assert _move(drones, 1, 1) == 7  # the selected one has ended


def test_top_interrupts_and_kills_the_selected_drone(shell: Shell) -> None:
    with shell.pool("-n", "2"), terminal(shell, "top", "lab", "--every", "0.1") as (_, master, _):
        read_until(master, b"lab.1")
        with shell.running("doit", "lab", "import time; time.sleep(1000)") as sleeping:
            read_until(master, b"sleep")
            os.write(master, b"\x1b[BI\x1b[BI")
            wait_for(lambda: drain(master) or sleeping.poll() is not None)
            assert "KeyboardInterrupt" in sleeping.communicate()[1]
        (_, killed) = json.loads(shell.say("ps", "lab", "--json"))["drones"]
        os.write(master, b"k")
        wait_for(lambda: drain(master) or not os.path.exists(f"/proc/{killed['pid']}"))


def test_top_ends_with_its_pool(shell: Shell) -> None:
    with (
        shell.pool("-n", "1") as card,
        terminal(shell, "top", "lab", "--every", "0.1") as (process, master, _),
    ):
        read_until(master, b"lab.0")
        end(card)
        assert b"is lost" in read_until(master, b"reached")
        assert process.wait() == 1


def test_top_without_a_terminal_says_what_to_do(lab: Shell) -> None:
    assert (
        lab.complaint("top", "lab")
        == "Error: top needs a terminal; for a single report use: polycephaly ps lab"
    )


@pytest.mark.parametrize("seconds", ["nan", "0", "3601"])
def test_top_refuses_an_interval_that_is_none(lab: Shell, seconds: str) -> None:
    done = lab.run("top", "lab", "--every", seconds)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Invalid value for '--every'" in done.stderr


def test_a_reader_that_leaves_is_no_error_to_be_told(lab: Shell) -> None:
    with lab.running("ps", "lab", "--json") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        process.stdout = None


# -- logs ------------------------------------------------------------------------------------------


def test_the_log_stays_when_the_pool_has_ended_and_follows_while_it_runs(shell: Shell) -> None:
    (shell.folder / "setup.py").write_text(
        "print('loading')\nimport logging\nlogging.warning('careful')\n"
    )
    with (
        shell.pool("-n", "1", "--file", "setup.py"),
        shell.running("logs", "lab", "-f") as following,
    ):
        assert following.stdout is not None
        assert following.stdout.readline() == "loading\n"
        shell.run("doit", "lab", "import os; os._exit(9)")
        while "exit status 9" not in following.stdout.readline():
            assert following.poll() is None
        shell.run("stop", "lab")
        assert following.communicate()[0].endswith(" INFO lab ends: stop\n")
        assert following.returncode == 0
    lines = shell.say("logs", "lab").splitlines()
    assert lines[1].endswith(" WARNING careful")
    assert shell.say("logs", "lab", "-n", "1").splitlines() == lines[-1:]


FILL = """
import sys
from polycephaly.cli import journal
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.output import Line
tuning.log_bytes = 4000
one = journal.Journal("lab", in_background=True)
for number in range(300):
    one.write_line(Line(f"line {number}", "lab.0", "stdout"))
print("to descriptor 1", flush=True)
"""


def test_a_log_is_bounded_and_has_one_older_generation(shell: Shell) -> None:
    done = subprocess.run([sys.executable, "-c", FILL], env=shell.env, cwd=shell.folder)
    assert done.returncode == 0
    files = sorted((shell.state / "polycephaly").iterdir())
    assert [file.name for file in files] == ["lab.log", "lab.log.1"]
    assert all(
        file.stat().st_size <= 4000 and stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files
    )
    *lines, last = shell.say("logs", "lab", "-n", "1000").splitlines()
    assert last == "to descriptor 1"
    numbers = [int(line.rpartition(" ")[2]) for line in lines]
    assert numbers == list(range(numbers[0], 300))
    assert len(numbers) > 4000 // len(lines[0]) - 2


# -- join ------------------------------------------------------------------------------------------


def test_drones_that_join_work_for_the_pool_until_they_leave(shell: Shell) -> None:
    (shell.folder / "here.py").write_text("where = 'with the joined'\n")
    with shell.pool("-n", "1", "--tcp", "127.0.0.1:0"):
        path = shell.folder / "copied.json"
        path.write_bytes((shell.runtime / "polycephaly" / "lab.json").read_bytes())
        path.chmod(0o600)
        with shell.running("join", "./copied.json", "-n", "1", "--file", "here.py") as joined:
            assert joined.stdout is not None
            assert joined.stdout.readline().startswith(
                "1 drone of this host joined lab at tcp://127.0.0.1:"
            )
            said = shell.say("doit", "lab", "-e", "globals().get('where')").splitlines()
            assert [line.partition(" ")[2] for line in said] == ["'with the joined'"]
            joined.send_signal(signal.SIGTERM)
            assert (joined.wait(), joined.communicate()[1]) == (0, "the drones have left\n")
        assert shell.say("doit", "lab", "1 + 1") == "2\n"


@pytest.mark.guarantee("remote-5")
def test_drones_that_join_have_loaded_what_the_pool_was_started_with(shell: Shell) -> None:
    """Though neither the file nor its directory is where they are."""
    (shell.folder / "setup.py").write_text(
        "import json\ndef whence():\n    return where\nwhere = json.dumps('pool')\n"
    )
    elsewhere = shell.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "more.py").write_text("where += ' and join'\n")
    with shell.pool("-n", "1", "--import", "statistics", "--file", "setup.py"):
        card = str(shell.runtime / "polycephaly" / "lab.json")
        (shell.folder / "setup.py").unlink()
        with (
            poly.connect(card) as remote,
            shell.running(
                "join", "lab", "-n", "1", "--file", str(elsewhere / "more.py"), cwd=elsewhere
            ) as joined,
        ):
            assert joined.stdout is not None
            joined.stdout.readline()
            wait_for(lambda: len(remote.drones) == 2)
            ask = "whence(), statistics.mean([1, 3]), 'more.py' in __file__"
            said = sorted(drone.doit(ask) for drone in remote.drones)
            assert said == [('"pool"', 2, False), ('"pool" and join', 2, True)]


def test_a_joined_process_ends_with_the_pool(shell: Shell) -> None:
    with shell.pool("-n", "1") as card, shell.running("join", "lab", "-n", "1") as joined:
        assert joined.stdout is not None
        joined.stdout.readline()
        end(card)
        assert joined.wait() == 1
        (line,) = joined.communicate()[1].splitlines()
        assert line.startswith("Error: the connection to tcp://127.0.0.1:")


def test_a_process_that_reconnects_joins_the_next_pool_of_that_name(shell: Shell) -> None:
    (shell.folder / "other.py").write_text("x = 1")
    with shell.running("join", "lab", "--reconnect", "-n", "1") as refused:
        assert (refused.wait(), refused.communicate()[0]) == (1, "")  # there is none yet
    with ExitStack() as stack:
        with shell.pool("-n", "1") as card:
            joined = stack.enter_context(shell.running("join", "lab", "--reconnect", "-n", "1"))
            assert joined.stdout is not None and joined.stderr is not None
            assert joined.stdout.readline().startswith("1 drone of this host joined lab")
            end(card)
        assert joined.stderr.readline().endswith("trying again\n")
        assert "no pool named 'lab'" in joined.stderr.readline()
        with shell.pool("-n", "1") as card:
            assert joined.stdout.readline().startswith("1 drone of this host joined lab")
            end(card)
        while not joined.stderr.readline().endswith("trying again\n"):
            pass
        with shell.pool("-n", "1", "--file", "other.py"):
            assert joined.wait() == 1
        assert "join anew, too" in joined.communicate()[1]


def test_a_pool_whose_file_is_gone_or_half_copied_for_a_moment_is_joined_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lab.json"
    with poly.Pool(1) as pool:
        _work_for(pool, str(file), reconnect=True)
        file.touch(0o600)
        _work_for(pool, str(file), reconnect=True)
    assert capsys.readouterr().err.count("trying again\n") == 2


# -- who may not, and what there is not ------------------------------------------------------------


@pytest.mark.guarantee("command-3")
@pytest.mark.parametrize(
    "words",
    [
        ("ps", "x"),
        ("doit", "x", "1"),
        ("stop", "x"),
        ("logs", "x"),
        ("logs", "x", "-f"),
        ("join", "x"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_names_there_are(
    lab: Shell, words: tuple[str, ...]
) -> None:
    assert lab.complaint(*words) == "Error: no pool named 'x' is running; running: lab"


@pytest.mark.guarantee("command-3")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize("words", [("stop", "lab"), ("ps", "lab"), ("doit", "lab", "1")])
def test_the_pool_of_another_user_is_refused(shell: Shell, words: tuple[str, ...]) -> None:
    with shell.pool("-n", "1") as card:
        os.chown(shell.runtime / "polycephaly" / "lab.json", 65534, 65534)
        assert "must be yours and of mode 0600" in shell.complaint(*words)
        assert card.is_server_alive()


def test_a_command_of_another_python_looks_at_a_pool_and_stops_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shell.runtime))
    with shell.pool("-n", "1") as card:
        monkeypatch.setattr(messages, "sys", SimpleNamespace(version_info=(3, 99)))
        with pytest.raises(ConnectionError, match=r"the client runs Python 3\.99"):
            poly.connect("lab")
        shown = CliRunner().invoke(main, ["ps", "lab", "--json"])
        assert (shown.exit_code, len(json.loads(shown.stdout)["drones"])) == (0, 1)
        stopped = CliRunner().invoke(main, ["stop", "lab"])
        assert (stopped.exit_code, card.is_server_alive()) == (0, False)


def test_a_pool_that_does_not_answer_is_told_with_what_ends_it(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shell.pool("-n", "1") as card:
        os.kill(card.pid, signal.SIGSTOP)
        try:
            assert shell.complaint("stop", "lab").endswith(
                f"(kill {card.pid} asks its process to end; "
                f"kill -9 {card.pid} ends the pool and its drones)"
            )
        finally:
            os.kill(card.pid, signal.SIGCONT)


# -- help and completion ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["start", "list", "ps", "top", "stacks", "doit", "logs", "stop", "join"]
)
def test_each_command_helps_with_examples(shell: Shell, name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "polycephaly", name, "--help"],
        capture_output=True, text=True, env=shell.env,
    )  # fmt: skip
    assert done.returncode == 0
    assert f"Examples:\n    polycephaly {name}" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert loaded.isdisjoint({"rich", "zmq", "cloudpickle", "httpx", "logging.handlers"})


def test_the_shell_completes_names_of_running_pools(lab: Shell) -> None:
    env: dict[str, Any] = {**lab.env, "_POLYCEPHALY_COMPLETE": "bash_complete", "COMP_CWORD": "2"}
    for words, expected in (
        ("polycephaly ps ", ["lab"]),
        ("polycephaly doit z", []),
        ("polycephaly stop l", ["lab"]),
    ):
        done = subprocess.run(
            COMMAND, env={**env, "COMP_WORDS": words}, capture_output=True, text=True
        )
        assert [line.partition(",")[2] for line in done.stdout.splitlines() if line] == expected
    script = lab.say("completion", "zsh")
    assert script.startswith("#compdef polycephaly")


def test_a_command_that_is_gone_names_what_to_use(shell: Shell) -> None:
    done = shell.run("bench", "--runs", "3")
    assert done.returncode == 2
    assert "run `python -m benchmarks` in a clone" in done.stderr
