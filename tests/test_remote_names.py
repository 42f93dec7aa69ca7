"""Pools by name: one living server for each, found by everybody of this user, and by nobody after
its end."""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from dataclasses import replace

import pytest
from faults import wait_for
from in_time import FakeLoop
from scripts import Script

import polycephaly as poly
from polycephaly.engines.remote import pool_registry
from polycephaly.engines.remote.keys import Card, new_key_pair
from polycephaly.runtime.procfs import start_time_of
from polycephaly.runtime.tuning import tuning
from polycephaly.server import server as server_module
from polycephaly.server.join import join


@pytest.fixture(autouse=True)
def runtime(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def pool():
    with poly.Pool(1) as pool:
        yield pool


def a_card(name, pid=None):
    key = new_key_pair()[0]
    pid = os.getpid() if pid is None else pid
    pair, birth = new_key_pair(), start_time_of(pid)
    return Card("tcp://127.0.0.1:1", key, *pair, name=name, pid=pid, birth=birth)


SERVER = """
    import sys, threading
    import polycephaly as poly
    if __name__ == "__main__":
        with poly.Pool(1) as pool:
            try:
                server = poly.serve(pool, name="lab")
            except FileExistsError as error:
                print("refused", error, flush=True)
            else:
                print("up", flush=True)
                threading.Event().wait()
"""


def test_a_served_pool_is_found_by_its_name(pool, runtime):
    with poly.serve(pool, name="lab") as server, poly.connect("lab") as remote:
        assert remote.doit("6 * 7") == 42
        assert [card.name for card in pool_registry.running_cards()] == ["lab"]
        assert server.card.pid == os.getpid()
        assert pool_registry.card_path("lab") == runtime / "polycephaly" / "lab.json"
        assert stat.S_IMODE(os.stat(pool_registry.card_path("lab")).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(pool_registry.registry_directory()).st_mode) == 0o700
    assert pool_registry.running_cards() == []
    assert os.listdir(pool_registry.registry_directory()) == [".lock"]


def test_a_pool_that_has_a_name_here_is_found_by_its_address_too(pool):
    with poly.serve(pool, name="lab") as server:
        with poly.connect(server.card.address) as remote:
            assert remote.doit("6 * 7") == 42
        with poly.Pool(2) as more, join(more, server.card.address) as joined:
            assert joined.name == "lab"
    with pytest.raises(
        ValueError, match=r"no pool of yours .* is at tcp://127\.0\.0\.1:1, .*server_key="
    ):
        poly.connect("tcp://127.0.0.1:1")
    with pytest.raises(ValueError, match="an address is tcp://HOST:PORT"):
        poly.connect("tcp://lab")


def test_an_unknown_name_is_told_with_those_that_run(pool, tmp_path, monkeypatch):
    with pytest.raises(ConnectionError, match=r"^no pool named 'x' is running; running: none$"):
        poly.connect("x")
    with poly.serve(pool, name="b"), poly.serve(pool, name="a.1"):
        with pytest.raises(
            ConnectionError, match=r"^no pool named 'x' is running; running: a\.1, b$"
        ):
            poly.connect("x")
        monkeypatch.chdir(tmp_path)
        (tmp_path / "pool.json").write_text("")
        with pytest.raises(ConnectionError, match=r"connect\('\./pool\.json'\)"):
            poly.connect("pool.json")


@pytest.mark.parametrize("wrong", ["", ".lab", "-lab", "../lab", "a b", "ä", "x" * 65, "a\n"])
def test_a_name_that_is_none_is_refused(pool, wrong):
    with pytest.raises(ValueError, match="a pool's name is"):
        poly.serve(pool, name=wrong)
    with pytest.raises(ValueError, match="a pool's name is"):
        pool_registry.card_path(wrong)


@pytest.mark.guarantee("remote-7")
def test_a_second_start_is_refused_while_the_first_lives(pool):
    with Script(SERVER) as script:
        script.read_until("up")
        with pytest.raises(
            FileExistsError, match=f"'lab' is running already, as process {script.process.pid}"
        ):
            poly.serve(pool, name="lab")
        with poly.connect("lab") as remote:  # the first is not disturbed
            assert remote.status()["pid"] == script.process.pid
        script.signal(signal.SIGKILL)
        script.wait()
        with poly.serve(pool, name="lab"), poly.connect("lab") as remote:
            assert remote.status()["pid"] == os.getpid()
        assert not script.left()


@pytest.mark.guarantee("remote-7")
def test_what_a_killed_server_has_left_is_dropped(pool):
    with Script(SERVER) as script:
        script.read_until("up")
        assert [card.pid for card in pool_registry.running_cards()] == [script.process.pid]
        script.signal(signal.SIGKILL)
        script.wait()
        assert pool_registry.card_path("lab").exists()
        with pytest.raises(ConnectionError, match="no pool named 'lab' is running"):
            poly.connect("lab")
        assert not pool_registry.card_path("lab").exists()
        assert not script.left()


@pytest.mark.guarantee("remote-7")
def test_a_pid_that_another_process_has_got_since_misleads_nobody():
    stale = replace(a_card("lab"), birth="another boot:12345")
    pool_registry.register(stale)
    assert pool_registry.running_cards() == []
    assert not pool_registry.card_path("lab").exists()


def test_an_old_server_that_closes_late_leaves_the_new_ones_file():
    old, new = replace(a_card("lab"), birth="gone"), a_card("lab")
    path = pool_registry.register(old)
    pool_registry.register(new)
    pool_registry.unregister(old, path)
    assert pool_registry.running_cards() == [new]
    pool_registry.unregister(new, path)
    pool_registry.unregister(new, path)
    assert pool_registry.running_cards() == []


@pytest.fixture
def watching(pool, runtime, monkeypatch):
    """A server of the pool "lab" whose time the test moves, after its card was registered."""
    monkeypatch.setattr(server_module, "EventLoop", FakeLoop)
    server = poly.serve(pool, name="lab")
    monkeypatch.setattr(server._loop.thread, "join", server._loop.turn)
    yield server
    server.close()
    server._loop.release_resources()


def log_out_and_in(runtime):
    shutil.rmtree(runtime)
    runtime.mkdir(mode=0o700)


@pytest.mark.guarantee("remote-7")
def test_a_pool_is_found_again_after_its_runtime_directory_was_removed_and_made_again(
    pool, runtime, monkeypatch
):
    """Removed and made again in one step, by a link: the server looks all the time."""
    monkeypatch.setattr(tuning, "card_check_seconds", 0.01)
    link, next_link = runtime / "link", runtime / "next"
    for path, target in (link, runtime / "before"), (next_link, runtime / "after"):
        target.mkdir(mode=0o700)
        path.symlink_to(target)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(link))
    with poly.serve(pool, name="lab") as server:
        next_link.replace(link)
        wait_for(lambda: pool_registry.running_cards() == [server.card])
        with poly.connect("lab") as remote:
            assert remote.doit("6 * 7") == 42
        with pytest.raises(FileExistsError, match="'lab' is running already"):
            poly.serve(pool, name="lab")
    assert os.listdir(pool_registry.registry_directory()) == [".lock"]


@pytest.mark.guarantee("remote-7")
def test_a_connection_file_that_is_gone_is_written_again_at_the_next_check(
    watching, runtime, caplog
):
    caplog.set_level("INFO", "polycephaly")
    path = pool_registry.card_path("lab")
    before = path.read_bytes()
    for remove in (path.unlink, lambda: log_out_and_in(runtime)):
        remove()
        watching._loop.pass_(tuning.card_check_seconds)
        assert path.read_bytes() == before
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert f"of lab was gone, and is written again: {path}" in caplog.text
        caplog.clear()
    written = path.stat()
    watching._loop.pass_(tuning.card_check_seconds)
    assert path.stat() == written and not caplog.records  # a file that is there is left alone


@pytest.mark.guarantee("remote-7")
def test_while_there_is_no_runtime_directory_a_pool_is_found_where_others_look(
    watching, runtime, monkeypatch, tmp_path_factory
):
    other = tmp_path_factory.mktemp("other")
    before = pool_registry.card_path("lab")
    shutil.rmtree(runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    watching._loop.pass_(tuning.card_check_seconds)
    assert pool_registry.running_cards() == [watching.card]
    assert pool_registry.card_path("lab").parent == other / "polycephaly"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    watching._loop.pass_(tuning.card_check_seconds)
    assert before.exists()
    watching.close()
    assert not before.exists()
    assert os.listdir(other / "polycephaly") == [".lock"]


@pytest.mark.guarantee("remote-7")
def test_a_pool_whose_name_another_has_taken_meanwhile_warns_once_and_waits(
    watching, runtime, caplog
):
    log_out_and_in(runtime)
    other = a_card("lab")
    path = pool_registry.register(other)
    caplog.set_level("INFO", "polycephaly")
    watching._loop.pass_(10 * tuning.card_check_seconds)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.getMessage() == (
        "this pool is not found by its name lab: its connection file is gone, and "
        f"a pool named 'lab' is running already, as process {os.getpid()}: stop it first"
    )
    assert pool_registry.running_cards() == [other]
    pool_registry.unregister(other, path)
    watching._loop.pass_(tuning.card_check_seconds)
    assert pool_registry.running_cards() == [watching.card]


def test_a_server_waits_for_no_process_that_writes_a_connection_file(watching, runtime, caplog):
    log_out_and_in(runtime)
    lock = os.open(pool_registry.registry_directory(make=True) / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        watching._loop.pass_(tuning.card_check_seconds)
        assert pool_registry.running_cards() == [] and not caplog.records
    finally:
        os.close(lock)
    watching._loop.pass_(tuning.card_check_seconds)
    assert pool_registry.running_cards() == [watching.card]


def test_what_is_being_written_stays_and_what_a_dead_one_began_goes():
    dead = subprocess.Popen(["true"])
    dead.wait()
    living, left = (
        pool_registry.registry_directory(make=True) / f".lab.json.{pid}"
        for pid in (os.getpid(), dead.pid)
    )
    living.touch()
    left.touch()
    pool_registry.running_cards()
    assert living.exists() and not left.exists()


def test_what_a_killed_process_of_the_same_pid_began_is_in_nobodys_way(tmp_path):
    card, target = a_card("lab"), tmp_path / "lab.json"
    (tmp_path / f".lab.json.{os.getpid()}").touch()
    card.write(target)
    assert Card.read(target) == card


def test_what_is_written_bears_the_pid_of_its_writer(monkeypatch, tmp_path):
    """A test above: for as long as that lives, it stays."""
    names = []
    monkeypatch.setattr(os, "replace", lambda new, _: names.append(new))
    for _ in range(2):
        a_card("lab").write(tmp_path / "lab.json")
    assert len({*names}) == 2
    for name in names:
        assert os.stat(name).st_mode & 0o777 == 0o600
        assert os.path.basename(name).startswith(".lab.json.")
        assert name.endswith(f".{os.getpid()}")


RACER = """
    import sys
    from dataclasses import replace
    sys.path.insert(0, sys.argv[1])
    from test_remote_names import a_card
    from polycephaly.engines.remote import pool_registry as places
    mine = a_card("none")
    print("up", flush=True)
    for line in sys.stdin:
        card = replace(mine, name=line.strip())
        try:
            places.register(card)
            print("won", flush=True)
        except FileExistsError as error:
            assert "running already" in str(error)
            print("lost", flush=True)
"""


@pytest.mark.guarantee("remote-7")
def test_of_those_that_start_at_once_under_one_name_one_wins():
    """On top of a stale file, while somebody else lists them and so cleans up."""
    import textwrap

    here = os.path.dirname(__file__)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.path.dirname(here)])}
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(RACER), here],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=env,
        )
        for _ in range(3)
    ]  # fmt: skip
    try:
        for racer in racers:
            assert racer.stdout.readline() == "up\n"
        stale = replace(a_card("stale"), birth="long gone")
        for turn in range(50):
            name = f"race-{turn}"
            pool_registry.register(replace(stale, name=name))
            for racer in racers:
                racer.stdin.write(f"{name}\n")
            pool_registry.running_cards()
            said = [racer.stdout.readline().strip() for racer in racers]
            assert sorted(said) == ["lost", "lost", "won"], (turn, said)
            winner = racers[said.index("won")]
            assert (
                next(card.pid for card in pool_registry.running_cards() if card.name == name)
                == winner.pid
            )
            if turn < 45:  # or each turn would read all those before it
                pool_registry.card_path(name).unlink()
    finally:
        for racer in racers:
            racer.communicate()
    wait_for(lambda: not pool_registry.running_cards())


def test_the_directory_is_ours_alone_or_refused(runtime):
    with pytest.raises(ConnectionError):
        poly.connect("lab")
    assert not pool_registry.registry_directory().exists()  # who looks for a pool makes nothing
    place = pool_registry.registry_directory(make=True)
    place.chmod(0o770)
    with pytest.raises(
        PermissionError, match="must be a directory of yours and of mode 0700, not drwxrwx---"
    ):
        pool_registry.running_cards()
    place.rmdir()
    place.symlink_to(tempfile.gettempdir())
    with pytest.raises(PermissionError, match="must be a directory of yours"):
        poly.connect("lab")


def test_where_no_runtime_directory_is_a_private_one_in_the_temporary_directory_serves(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    if os.path.isdir(f"/run/user/{os.getuid()}"):
        assert pool_registry.registry_directory(make=True) == pool_registry.Path(
            f"/run/user/{os.getuid()}/polycephaly"
        )
        return
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert pool_registry.registry_directory(make=True) == tmp_path / f"polycephaly-{os.getuid()}"
    assert stat.S_IMODE(pool_registry.registry_directory().stat().st_mode) == 0o700


@pytest.mark.guarantee("remote-8")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_the_runtime_directory_of_another_user_is_not_used(runtime, monkeypatch, tmp_path_factory):
    """sudo may leave his in the environment."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("temporary")))
    os.chown(runtime, 12345, 12345)
    assert runtime not in pool_registry.registry_directory(make=True).parents
    assert os.listdir(runtime) == []


@pytest.mark.guarantee("remote-8")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_the_files_of_another_user_are_refused_and_left_alone(pool, runtime):
    card = a_card("lab")
    pool_registry.register(card)
    os.chown(pool_registry.card_path("lab"), 12345, 12345)
    with pytest.raises(
        PermissionError, match="must be yours and of mode 0600, not 0600 of user 12345"
    ):
        poly.connect("lab")
    with pytest.raises(PermissionError, match="user 12345"):
        poly.serve(pool, name="lab")
    assert pool_registry.running_cards() == []
    assert pool_registry.card_path("lab").exists()
    os.chown(pool_registry.registry_directory(), 12345, 12345)
    with pytest.raises(PermissionError, match="user 12345"):
        poly.connect("lab")
