"""Fresh interpreters die at points that their environment names: spawned drones, servers of the
command line, joined hosts. Every call is answered once, or its caller is told; nothing is left."""

import signal
from collections import Counter
from concurrent.futures import wait
from contextlib import contextmanager, suppress

import pytest
from failpoints import AFTER, BEFORE, ONCE, POINTS, SERVED, armed
from faults import lines, wait_for
from scripts import run_script
from test_cli_pools import shell
from test_failpoints import PATIENCE, fail, note, noted_text

import polycephaly as poly

__all__ = ["shell"]


def test_what_happens_once_happens_at_a_point():
    assert set(POINTS) >= ONCE and not POINTS.keys() & SERVED.keys()


@pytest.mark.guarantee("death-2")
@pytest.mark.parametrize("is_armed", [True, False])
def test_a_spawned_drone_dies_at_the_point_that_its_environment_names(is_armed, tmp_path):
    env, hits = armed(tmp_path / "hits", "drone says what it starts", AFTER)
    ended = run_script(
        """
        import sys
        import polycephaly as poly

        if __name__ == "__main__":
            with poly.Pool(1, start="spawn", output="discard") as pool:
                print(repr(pool.promise(abs, -1).exception()).partition("(")[0])
                print(pool.doit(abs, -1), "failpoints" in sys.modules)
        """,
        env=env if is_armed else None,
    )
    assert ended.stdout == ("DroneDied\n1 True\n" if is_armed else "None\n1 False\n"), ended.stderr
    assert int(hits) == is_armed


@pytest.mark.slow
@pytest.mark.guarantee("death-2")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize(
    "point, hit",
    [
        ("zygote begins to serve", 1),
        ("zygote starts a drone", 1),
        ("zygote reports", 2),
        ("drone is tied to its parent", 1),
        ("drone enters the arena", 1),
        ("drone is made", 1),
        ("drone hears", 3),
        ("drone does one", 3),
        ("drone writes into its ring", 3),
        ("drone rings", 3),
        ("drone writes into shared memory", 1),
        ("drone closes", 1),
    ],
)
def test_a_death_of_what_was_spawned(point, hit, when, tmp_path):
    env, hits = armed(tmp_path / "hits", point, when, hit)
    ended = run_script(
        """
        import sys
        from faults import wait_for
        from test_failpoints import use
        import polycephaly as poly
        from polycephaly.runtime.tuning import tuning

        if __name__ == "__main__":
            tuning.grace_seconds = 60.0
            with poly.Pool(2, start="spawn", output="discard") as pool:
                use(pool, sys.argv[1])
                wait_for(lambda: pool.doit(abs, -1) == 1)
                wait_for(lambda: len(pool.drones) == 2)
        """,
        str(tmp_path / "ran"), env=env,
    )  # fmt: skip
    if ended.returncode:  # the first drone has not begun: there is no pool
        assert "before it was ready" in ended.stderr or "importing the main" in ended.stderr
        assert hit < 3 and point != "drone closes", ended.stderr
    assert int(hits) >= hit


@pytest.mark.slow
@pytest.mark.guarantee("end-1")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("point", ["controller has a drone", "controller delivers"])
def test_a_death_of_who_has_spawned(point, when, tmp_path):
    env, hits = armed(tmp_path / "hits", point, when)
    ended = run_script(
        """
        import sys
        from test_failpoints import use
        import polycephaly as poly

        if __name__ == "__main__":
            with poly.Pool(2, start="spawn", output="discard") as pool:
                use(pool, sys.argv[1])
        """,
        str(tmp_path / "ran"), env=env,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert int(hits) >= 1


# -- served pools, and hosts that have joined them -------------------------------------------------


def call_until(come, remote, path, lost):
    """Calls until some process has come there: each call has run once, or has the error `lost` and
    has run at most once."""
    promises = {}
    for turn in range(0, 10_000, 100):
        with suppress(ConnectionError):  # the server has died meanwhile
            for i in range(turn, turn + 40):
                promises[i] = remote.promise(note, path, i)
            for i in range(turn + 40, turn + 44):
                promises[i] = remote.promise(noted_text, path, i)
                promises[i + 10] = remote.promise(fail, path, i + 10)
        assert not wait(promises.values(), PATIENCE).not_done
        if come():
            break
    ran = Counter(map(int, lines(path)))
    assert set(ran.values()) <= {1}
    for i, promise in promises.items():
        error = promise.exception()
        if isinstance(error, lost):
            continue
        assert i in ran
        if i % 100 < 50:
            assert str(promise.result()).endswith(str(i))
        else:
            assert isinstance(error, ValueError)


def end_well(process):
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0


@contextmanager
def started(shell, env, *words):
    """A command that is armed, when it has said that it is up."""
    shell.env |= env
    with shell.running(*words) as process:
        assert "drones" in process.stdout.readline()
        yield process


def connect(shell):
    return poly.connect(str(shell.runtime / "polycephaly" / "lab.json"))


OF_DRONES = [
    ("drone hears", 3),
    ("drone does one", 5),
    ("drone notes", 5),
    ("drone rings", 3),
    ("drone flushes", 3),
]


@pytest.mark.slow
@pytest.mark.guarantee("death-2")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("point, hit", OF_DRONES)
def test_a_drone_of_a_server_dies(point, hit, when, shell, tmp_path):
    env, hits = armed(tmp_path / "hits", point, when, hit)
    with started(shell, env, "start", "lab", "-n", "2") as server:
        with connect(shell) as remote:
            call_until(lambda: int(hits) >= hit, remote, str(tmp_path / "ran"), poly.DroneDied)
            wait_for(lambda: len(remote.drones) == 2)
        end_well(server)


@pytest.mark.slow
@pytest.mark.guarantee("end-1")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize(
    "point, hit",
    [
        ("server reads calls", 2),
        ("server submits a call", 50),
        ("controller sends a batch", 5),
        ("controller hears", 5),
        ("server has an outcome", 50),
        ("server sends", 5),
    ],
)
def test_a_server_dies(point, hit, when, shell, tmp_path):
    env, hits = armed(tmp_path / "hits", point, when, hit)
    with started(shell, env, "start", "lab", "-n", "2") as server:
        with connect(shell) as remote:
            call_until(lambda: int(hits) >= hit, remote, str(tmp_path / "ran"), ConnectionError)
        assert server.wait(PATIENCE) == -signal.SIGKILL


@pytest.fixture
def remote(tmp_path):
    """The client of a pool that serves the hosts of the tests below, with a drone of its own."""
    card = str(tmp_path / "pool.json")
    with poly.Pool(1, name="lab") as pool, poly.serve(pool, file=card), poly.connect(card) as made:
        yield made


@contextmanager
def joined(shell, env, tmp_path, remote):
    with started(shell, env, "join", tmp_path / "pool.json", "-n", "2") as host:
        wait_for(lambda: len(remote.drones) == 3)
        yield host


@pytest.mark.slow
@pytest.mark.guarantee("remote-11")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("point, hit", OF_DRONES)
def test_a_drone_of_a_joined_host_dies(point, hit, when, shell, remote, tmp_path):
    env, hits = armed(tmp_path / "hits", point, when, hit)
    with joined(shell, env, tmp_path, remote) as host:
        call_until(lambda: int(hits) >= hit, remote, str(tmp_path / "ran"), poly.DroneDied)
        wait_for(lambda: len(remote.drones) == 3)
        end_well(host)


@pytest.mark.slow
@pytest.mark.guarantee("remote-11")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize(
    "point, hit",
    [
        ("host reads calls", 2),
        ("host submits a call", 5),
        ("controller sends a batch", 3),
        ("controller hears", 3),
        ("host has an outcome", 5),
        ("host sends outcomes", 5),
    ],
)
def test_a_joined_host_dies(point, hit, when, shell, remote, tmp_path):
    env, hits = armed(tmp_path / "hits", point, when, hit)
    with joined(shell, env, tmp_path, remote) as host:
        call_until(lambda: int(hits) >= hit, remote, str(tmp_path / "ran"), poly.DroneDied)
        assert host.wait(PATIENCE) == -signal.SIGKILL
    wait_for(lambda: len(remote.drones) == 1)
    assert remote.doit(abs, -1) == 1
