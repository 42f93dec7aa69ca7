"""What a client's work prints comes to that client, in time, and to nobody else."""

import os

import pytest
from faults import append, hold_until, wait_for
from scripts import Script, run_script

import polycephaly as poly
from polycephaly.runtime.tuning import tuning
from polycephaly.server.join import join

SOON = 60.0


@pytest.fixture
def owners():
    return []


@pytest.fixture
def pool(owners):
    with poly.Pool(1, name="lab", output=owners.append) as pool:
        yield pool


def said(lines):
    return [(line.stream, line.text) for line in lines]


def test_each_client_gets_what_its_own_work_prints(server, pool, card, owners):
    mine, its = [], []
    with (
        poly.connect(card, output=mine.append) as one,
        poly.connect(card, output=its.append) as two,
    ):
        for i in range(20):
            one.doit("import sys; print('mine'); print('my trouble', file=sys.stderr)")
            assert len(mine) == 2 * (i + 1)  # before its promise settles
            two.doit(print, "its")
            pool.doit(print, "owner's")
        assert mine[0] == "[lab.0] mine" and mine[0].drone == "lab.0"
        assert sorted(set(said(mine))) == [("stderr", "my trouble"), ("stdout", "mine")]
        assert said(its) == [("stdout", "its")] * 20
    wait_for(lambda: len(owners) == 20)
    assert said(owners) == [("stdout", "owner's")] * 20


def test_what_other_programs_print_comes_too(server, card):
    lines = []
    with poly.connect(card, output=lines.append) as remote:
        remote.doit(
            "import subprocess as s, os; s.run(['echo', 'from a program']); "
            "os.write(1, b'by descriptor\\n')"
        )
        assert said(lines) == [("stdout", "from a program"), ("stdout", "by descriptor")]


def test_a_line_without_an_end_comes_with_its_work(server, pool, card, owners):
    lines = []
    with poly.connect(card, output=lines.append) as remote:
        remote.doit("print('no end', end='')")
        assert said(lines) == [("stdout", "no end")]
        pool.doit("print('the owner')")
        wait_for(lambda: owners)
        assert said(owners) == [("stdout", "the owner")]


def test_many_lines_come_whole_and_in_order(server, card):
    lines = []
    with poly.connect(card, output=lines.append) as remote:
        remote.doit("for i in range(20_000): print(i)")
        assert [line.text for line in lines] == [str(i) for i in range(20_000)]


def test_forwarded_lines_go_to_the_clients_streams(server, card, owners):
    done = run_script("""
        import sys
        import polycephaly as poly
        with poly.connect(sys.argv[1]) as remote:
            remote.doit("import sys; print('out'); print('err', file=sys.stderr)")
            remote.doit(print, "again")
    """, card)  # fmt: skip
    assert done.stdout == "[lab.0] out\n[lab.0] again\n" and done.stderr == "[lab.0] err\n"
    assert not owners


def test_discarded_lines_go_nowhere(server, card, owners, capsys):
    with poly.connect(card, output="discard") as remote:
        remote.doit(print, "nothing")
    with pytest.raises(ValueError, match="output is 'forward', 'discard' or a callable, not 'no'"):
        poly.connect(card, output="no")
    assert not owners and capsys.readouterr().out == ""


def test_each_promise_keeps_the_tail_of_what_its_work_printed(server, card):
    with poly.connect(card, output="discard") as remote, poly.Pool(1) as far, join(far, card):
        wait_for(lambda: len(remote.drones) == 2)
        for drone in remote.drones:
            promise = drone.promise("print('é' * 5000); print('end'); 1 / 0")
            assert isinstance(promise.exception(SOON), ZeroDivisionError)
            assert promise.output.endswith("é\nend\n") and 4000 < len(promise.output) <= 4096
            assert drone.promise(abs, -1).result(SOON) == 1


def test_an_output_callable_that_fails_disturbs_nothing(server, card, caplog):
    def fail(line):
        raise OSError("full")

    with poly.connect(card, output=fail) as remote:
        assert [remote.doit("print('x'); 5") for _ in range(3)] == [5] * 3
    assert "the output callable of lab failed" in caplog.text


def speak(path):
    print("first")
    hold_until(path)
    for i in range(5000):
        print(i)


def lines_of_a_client_that_does_not_read(card, go, blocked, gate):
    lines = []

    def block(line):
        if not lines:
            append(blocked, "yes")
            hold_until(gate)
        lines.append(line.text)

    with poly.connect(card, output=block) as remote:
        remote.promise(speak, go).result(SOON)
        remote.doit("print('last')")
    return lines


def test_a_client_that_does_not_read_is_left_out_of_some_and_told_how_many(
    server, card, tmp_path, monkeypatch
):
    monkeypatch.setattr(tuning, "unseen_bytes", 10_000)
    go, blocked, gate = (str(tmp_path / name) for name in ("go", "blocked", "gate"))
    with poly.Drone() as client:
        promise = client.promise(lines_of_a_client_that_does_not_read, card, go, blocked, gate)
        wait_for(lambda: os.path.exists(blocked))
        append(go, "on")
        wait_for(lambda: any(client.omitted_lines for client in server._clients.values()))
        append(gate, "on")
        lines = promise.result(SOON)
    assert lines[0] == "first" and lines[-1] == "last"
    told = [line for line in lines if "lines were omitted here" in line]
    left_out = sum(int(line[1:].split()[0]) for line in told)
    assert left_out and len(lines) - len(told) + left_out == 5002


def test_lines_of_joined_drones_come_too_and_only_to_their_client(server, pool, card, owners):
    far_owners, mine, its = [], [], []
    with poly.Pool(1, name="far", output=far_owners.append) as far, join(far, card):
        wait_for(lambda: len(server.status()["drones"]) == 2)
        with (
            poly.connect(card, output=mine.append) as one,
            poly.connect(card, output=its.append) as two,
        ):
            for _ in range(5):
                for promise in one.everywhere("print('mine')"):
                    promise.result(SOON)
                two.drones[1].doit(print, "its")
                far.doit(print, "owner's")
            wait_for(lambda: len(mine) == 10 and len(its) == 5)
            assert {line.drone for line in mine} == {"lab.0", "far.0"}
            assert {line.text for line in mine} == {"mine"} and {line.text for line in its} == {
                "its"
            }
        wait_for(lambda: len(far_owners) == 5)
    assert not owners and {line.text for line in far_owners} == {"owner's"}


def test_what_a_client_that_is_gone_leaves_running_says_is_the_owners(server, pool, card, owners):
    """Here a thread that its work has left behind."""
    with Script("""
        import sys
        import polycephaly as poly
        with poly.connect(sys.argv[1]) as remote:
            remote.doit('''if True:
                import threading
                gate = threading.Event()
                def speak():
                    gate.wait()
                    print("from beyond")
                threading.Thread(target=speak).start()
            ''')
    """, card) as script:  # fmt: skip
        assert script.wait() == 0
    wait_for(lambda: server.clients == 0)
    pool.doit("gate.set()")
    wait_for(lambda: said(owners) == [("stdout", "from beyond")])
