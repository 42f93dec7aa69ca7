"""Served pools: other processes use a pool by TCP, with a key; who has none gets nothing."""

import asyncio
import gc
import os
import pickle
import random
import re
import signal
import socket
import stat
import struct
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from unittest.mock import Mock

import pytest
import zmq
from faults import Bomb, append, block_for_ever, hold_until, lines, spin_for_ever, wait_for
from scripts import Script, run_script
from work import slow

import polycephaly as poly
from polycephaly.engines.remote import connection as connection_module
from polycephaly.engines.remote import messages, pool_registry, server_connection
from polycephaly.engines.remote.keys import Card, new_key_pair
from polycephaly.engines.remote.messages import Item
from polycephaly.errors import Malformed
from polycephaly.pool import handlers
from polycephaly.runtime.tuning import tuning
from polycephaly.server import server as server_module
from polycephaly.wire.messages import CALL, DEFINE_CALLABLE

np = pytest.importorskip("numpy")

SOON = 60.0


class Point:
    def __init__(self, x):
        self.x = x


def refuse(x):
    raise ValueError("not this one", x)


# -- work ------------------------------------------------------------------------------------------


@pytest.mark.guarantee("remote-10")
def test_work_of_every_kind_is_done(remote):
    assert remote.doit(pow, 2, 8) == 256
    assert remote.doit("6 * 7") == 42
    assert remote.doit("x = 5") is None
    assert remote.doit(lambda a, *, b: a + b, 1, b=2) == 3
    assert remote.submit(sorted, [3, 1, 2], reverse=True).result() == [3, 2, 1]
    assert remote.doit(Point, 4).x == 4

    async def later(x):
        return x + 1

    assert remote.doit(later, 1) == 2
    assert list(remote.map(pow, range(5), range(5))) == [1, 1, 4, 27, 256]


def test_large_values_travel_whole(remote):
    table = np.arange(2_000_000.0)
    assert (remote.doit(lambda a: a * 2, table) == table * 2).all()
    assert remote.doit(len, b"x" * 5_000_000) == 5_000_000
    assert remote.doit(bytes, 3_000_000) == bytes(3_000_000)


def test_errors_come_home_as_what_they_are(remote):
    with pytest.raises(ValueError, match="not this one") as caught:
        remote.doit(refuse, 3)
    assert caught.value.args == ("not this one", 3)
    assert "refuse" in str(caught.value.__cause__)
    assert isinstance(remote.promise(len, threading.Lock()).exception(), TypeError)
    assert isinstance(remote.promise(threading.Lock).exception(), TypeError)
    with pytest.raises(poly.DroneDied, match="exit status 3"):
        remote.doit(os._exit, 3)
    with pytest.raises(TypeError):
        remote.promise(5)


def test_what_is_main_travels_by_value(server, card):
    done = run_script("""
        import sys
        import polycephaly as poly

        class Mine:
            def __init__(self, x):
                self.x = x

        def double(mine):
            if mine.x < 0:
                raise Wrong(mine.x)
            return Mine(factor * mine.x)

        class Wrong(Exception):
            pass

        factor = 2
        with poly.connect(sys.argv[1]) as pool:
            got = pool.doit(double, Mine(4))
            print(type(got) is Mine, got.x)
            factor = 3
            print(pool.doit(double, Mine(4)).x)
            try:
                pool.doit(double, Mine(-1))
            except Wrong as error:
                print("Wrong", error.args)
    """, card)  # fmt: skip
    assert done.stdout == "True 8\n12\nWrong (-1,)\n", done.stderr


def test_promises_are_promises(remote):
    promises = [remote.promise(abs, -i) for i in range(3000)]
    assert poly.gather(*promises).value == list(range(3000))
    assert remote.promise(pow, remote.promise(abs, -3), remote.promise(abs, -2)).value == 9
    assert remote.promise(abs, -3).then(lambda x: x + 1).value == 4

    async def main():
        return await asyncio.gather(*(remote.promise(abs, -i) for i in range(10)))

    assert asyncio.run(main()) == list(range(10))


def test_map_is_lazy_and_ends_with_its_error(remote):
    taken = []

    def inputs():
        for i in range(1_000_000):
            taken.append(i)
            yield i

    results = remote.map(abs, inputs(), buffersize=10)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(taken) <= 16
    results.close()
    results = remote.map(refuse, range(3))
    with pytest.raises(ValueError, match="not this one"):
        next(results)


@pytest.mark.guarantee("remote-10")
def test_cancelled_work_is_interrupted_and_neighbours_are_not(remote, pool, tmp_path):
    started = str(tmp_path / "started")
    drones = {drone.pid for drone in pool.drones}
    spinning = [remote.promise(spin_for_ever, started) for _ in range(2)]
    behind = [remote.promise(append, str(tmp_path / "behind"), str(i)) for i in range(10)]
    wait_for(lambda: len(lines(started)) == 2)
    assert all(p.cancel() for p in behind[::2])
    assert all(p.cancel() for p in spinning)
    for each in behind[1::2]:
        each.result(SOON)
    assert sorted(lines(tmp_path / "behind")) == ["1", "3", "5", "7", "9"]
    assert {drone.pid for drone in pool.drones} == drones
    with pytest.raises(CancelledError):
        spinning[0].result()


def test_options_hold_for_single_pieces_of_work(remote, tmp_path):
    with pytest.raises(TimeoutError, match=r"more than 0\.2 s"):
        remote.options(timeout=0.2).doit(slow, 100)
    path = str(tmp_path / "tries")

    def die_once(path):
        append(path, "x")
        if len(lines(path)) == 1:
            os._exit(1)
        return len(lines(path))

    assert remote.options(retries=2).doit(die_once, path) == 2


@pytest.mark.slow
def test_several_clients_at_once_do_not_meet(server, card):
    with poly.connect(card) as one, poly.connect(card) as two:
        mine = [one.promise(lambda i: ("one", i), i) for i in range(500)]
        its = [two.promise(lambda i: ("two", i), i) for i in range(500)]
        assert [p.value for p in mine] == [("one", i) for i in range(500)]
        assert [p.value for p in its] == [("two", i) for i in range(500)]
        assert server.clients == 2
        one.shutdown()
        assert two.doit(abs, -1) == 1


def test_many_threads_use_one_connection(remote):
    got = {}

    def use(n):
        got[n] = [p.value for p in [remote.promise(pow, n, i) for i in range(200)]]

    threads = [threading.Thread(target=use, args=(n,)) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == {n: [n**i for i in range(200)] for n in range(5)}


def test_a_definition_is_given_to_the_pool_once(remote, pool):
    table = os.urandom(300_000)

    def look(i):
        return table[i]

    assert [remote.doit(look, i) for i in range(20)] == list(table[:20])
    known = [each.definition.label for each in pool._dispatcher.registry._entries.values()]
    assert len(known) == 1 and known[0].endswith("look")


@pytest.mark.slow
def test_more_definitions_than_the_server_keeps(remote):
    for i in range(600):
        assert remote.doit(lambda i=i: i) == i
    assert remote.doit(abs, -1) == 1


# -- endings ---------------------------------------------------------------------------------------

CLIENT = """
    import sys
    import polycephaly as poly
    from faults import block_for_ever
    remote = poly.connect(sys.argv[1])
    promises = [remote.promise(block_for_ever, sys.argv[2]) for _ in range(5)]
    print("up", flush=True)
    promises[0].result()
"""


@pytest.mark.guarantee("remote-3")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_clients_end_cancels_its_own_work_only(number, server, card, pool, tmp_path):
    started = str(tmp_path / "started")
    with poly.connect(card) as other, Script(CLIENT, card, started) as script:
        script.read_until("up")
        wait_for(lambda: len(lines(started)) == 2)
        behind = [other.promise(abs, -i) for i in range(5)]
        script.signal(number)
        script.wait()
        assert [p.result(SOON) for p in behind] == list(range(5))
        wait_for(lambda: server.clients == 1 and not pool._dispatcher.pending())


def test_a_client_that_is_silent_is_let_go(server, card, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "client_check_seconds", 0.2)
    with Script(CLIENT, card, str(tmp_path / "started")) as script:
        script.read_until("up")
        wait_for(lambda: len(lines(tmp_path / "started")) == 2)
        script.signal(signal.SIGSTOP)
        monkeypatch.setattr(tuning, "client_silence_seconds", 1.0)
        wait_for(lambda: server.clients == 0 and not pool._dispatcher.pending())
        script.signal(signal.SIGCONT)


@pytest.mark.slow
def test_a_client_to_which_much_is_on_its_way_is_no_silent_one(server, card, monkeypatch):
    """The server's PINGs lie behind a large result, on a slow way: none comes back."""
    monkeypatch.setattr(tuning, "client_check_seconds", 0.05)
    monkeypatch.setattr(tuning, "client_sign_seconds", 1e-3)
    context = zmq.Context()
    with of_a_key_holder(context, card) as end:
        end.send_multipart(messages.pack_hello())
        wait_for(lambda: server.clients == 1)
        (client,) = server._clients.values()
        monkeypatch.setattr(tuning, "client_silence_seconds", 2.0)  # 40 looks
        for sign in range(60):
            wait_for(lambda: client.silent_checks or not server.clients)
            end.send_multipart([messages.ALIVE], zmq.NOBLOCK)
            wait_for(lambda sign=sign: client._alive_count > sign or not server.clients)
        assert server.clients == 1
    context.term()


def test_a_client_tells_by_itself_that_it_lives(server, card, monkeypatch):
    monkeypatch.setattr(tuning, "client_sign_seconds", 1e-3)
    with poly.connect(card):
        (client,) = server._clients.values()
        wait_for(lambda: client._alive_count > 3)


def test_a_server_ends_though_its_last_turn_fails(pool, monkeypatch, caplog):
    server = poly.serve(pool)
    monkeypatch.setattr(server, "_send_outcomes", lambda: 1 / 0)
    server.close()
    assert "the last turn of the server failed" in caplog.text
    with socket.socket() as free:
        free.bind(("127.0.0.1", server.port))


def test_a_check_of_the_connections_that_fails_is_not_the_last(server, remote, monkeypatch):
    checks = []

    def check():
        checks.append(None)
        raise LookupError

    monkeypatch.setattr(server, "_check_connections", check)
    wait_for(lambda: len(checks) > 2)


def test_an_error_in_a_turn_of_a_connection_ends_it_and_no_caller_waits(server, card, monkeypatch):
    remote = poly.connect(card)
    monkeypatch.setattr(remote._dispatcher, "_send_queued", lambda: 1 / 0)
    with pytest.raises(ConnectionError, match="a bug in polycephaly"):
        remote.promise(abs, -1).result(SOON)
    remote.shutdown()


def test_a_client_that_was_let_go_is_told_and_waits_for_nothing(server, card, monkeypatch):
    monkeypatch.setattr(tuning, "client_check_seconds", 0.1)

    def hold_the_connection():
        monkeypatch.setattr(tuning, "client_silence_seconds", 0.5)
        wait_for(lambda: server.clients == 0)

    remote = poly.connect(card)
    assert remote.doit(abs, -1) == 1
    held = poly.Promise()
    remote._dispatcher.run_outside_lock(lambda: held.set_result(hold_the_connection()))
    held.result(30)
    with pytest.raises((ConnectionError, RuntimeError), match="received no message for"):
        for _ in range(1000):
            remote.promise(abs, -2).result(SOON)
    remote.shutdown()


def test_shutdown_with_cancel_futures_leaves_what_runs(server, card, tmp_path):
    started, gate = str(tmp_path / "started"), str(tmp_path / "gate")
    remote = poly.connect(card)

    def run(i):
        append(started, str(i))
        hold_until(gate)
        return i

    promises = [remote.promise(run, i) for i in range(20)]
    wait_for(lambda: len(lines(started)) == 2)
    remote.shutdown(wait=False, cancel_futures=True)
    wait_for(promises[-1].cancelled)
    append(gate, "open")
    remote.shutdown()
    assert {p.cancelled() for p in promises} == {True, False}
    assert all(p.cancelled() or p.result() == i for i, p in enumerate(promises))
    assert not promises[int(lines(started)[0])].cancelled()


def test_a_pool_that_ends_cancels_its_clients_promises_too(card, tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    pool = poly.Pool(1)
    with poly.serve(pool, file=card), poly.connect(card) as remote:
        running = remote.promise(hold_until, gate, started)
        waiting = [remote.promise(slow, 0.5) for _ in range(5)]
        wait_for(lambda: lines(started) and pool._dispatcher.pending() == 6)
        pool.shutdown(wait=False, cancel_futures=True)
        for each in waiting:
            with pytest.raises(CancelledError):
                each.result(SOON)
        append(gate, "open")
        assert running.result(SOON) == "held"
        pool.shutdown()


def test_a_callback_that_raises_what_it_should_not_leaves_nobody_waiting(server, card):
    remote = poly.connect(card)
    promises = [remote.promise(time.sleep, 1000) for _ in range(20)]
    for each in promises:
        each.add_done_callback(lambda _: sys.exit(3))
    server.close()
    for each in promises:
        assert isinstance(each.exception(SOON), ConnectionError)
    remote.shutdown()


SERVER = """
    import sys
    import polycephaly as poly
    if __name__ == "__main__":
        with poly.Pool(2) as pool, poly.serve(pool, file=sys.argv[1]):
            print("up", flush=True)
            sys.stdin.read()
            import time
            time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_servers_end_rejects_what_was_not_answered(number, card, tmp_path):
    with Script(SERVER, card) as script:
        script.read_until("up")
        remote = poly.connect(card)
        running = remote.promise(block_for_ever, str(tmp_path / "started"))
        queued = [remote.promise(abs, -i) for i in range(5)]
        wait_for(lambda: lines(tmp_path / "started"))
        done = [p.result(SOON) for p in queued]  # the other drone does them
        script.signal(number)
        error = running.exception(SOON)
        assert isinstance(error, (ConnectionError, CancelledError)), error
        script.wait()
        assert not script.left()
        with pytest.raises((ConnectionError, RuntimeError)):
            for _ in range(1000):
                remote.doit(abs, -1)
        remote.shutdown()
    assert done == list(range(5))


def test_a_shut_connection_takes_no_more_and_finishes_what_it_has(server, card):
    remote = poly.connect(card)
    promises = [remote.promise(slow, 0.01) for _ in range(50)]
    remote.shutdown()
    assert [p.value for p in promises] == [0.01] * 50
    with pytest.raises(RuntimeError, match="after shutdown"):
        remote.promise(abs, 1)
    remote.shutdown()
    with pytest.raises(ZeroDivisionError), poly.connect(card) as remote:
        left = remote.promise(time.sleep, 1000)
        raise ZeroDivisionError
    assert left.cancelled()


def test_a_closed_server_lets_go_of_its_port_though_the_pool_has_drones_since(pool, card):
    server = poly.serve(pool, file=card)
    with poly.connect(card) as remote:
        pool.refresh()  # a new zygote, which inherits all that is open
        assert remote.doit(abs, -1) == 1
        with poly.Pool(1) as another:
            assert another.doit(abs, -2) == 2
            port = server.port
            server.close()
            lost = wait_for(lambda: remote._dispatcher.has_ended)
            assert lost
            with poly.serve(pool, f"tcp://127.0.0.1:{port}") as again:
                assert again.port == port
    server.close()


def test_a_pool_that_has_ended_refuses_its_clients_work(card):
    with poly.Pool(1) as pool:
        server = poly.serve(pool, file=card)
        remote = poly.connect(card)
    with server, remote, pytest.raises(RuntimeError, match="shutdown"):
        remote.promise(abs, 1).result(SOON)
    with pytest.raises(RuntimeError, match="shutdown"):
        poly.serve(pool)


def test_a_full_queue_does_not_stop_the_server(card):
    with (
        poly.Pool(1, max_queued=1) as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        assert [p.value for p in [remote.promise(abs, -i) for i in range(500)]] == list(range(500))


# -- who may ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("remote-6")
def test_the_connection_file_is_for_its_owner_alone(server, card):
    assert stat.S_IMODE(os.stat(card).st_mode) == 0o600
    found = Card.read(card)
    assert found.secret not in repr(found)
    os.chmod(card, 0o640)
    with pytest.raises(PermissionError, match="0600, not 0640"):
        poly.connect(card)
    with pytest.raises(PermissionError):
        Card.read(card)


@pytest.mark.guarantee("remote-6")
def test_its_directory_gets_no_other_file_and_an_old_one_is_replaced(pool, card, tmp_path):
    (tmp_path / "pool.json").write_text("old")
    os.chmod(card, 0o666)
    with poly.serve(pool, file=card), poly.connect(card) as remote:
        assert remote.doit(abs, -1) == 1
        assert os.listdir(tmp_path) == ["pool.json"]
        assert stat.S_IMODE(os.stat(card).st_mode) == 0o600


def test_a_key_on_the_allow_list_comes_in_until_it_is_taken_off(pool):
    public, secret = new_key_pair()
    with poly.serve(pool, allow=[public]) as server:
        where = {"server_key": server.key, "keys": (public, secret)}
        with poly.connect(server.address, **where) as remote:
            assert remote.doit(abs, -1) == 1
            server.forbid(public)
            assert remote.doit(abs, -2) == 2
        with pytest.raises(ConnectionError, match="does not allow the key of this process"):
            poly.connect(server.address, **where)
        server.allow(public)
        with poly.connect(server.address, **where) as remote:
            assert remote.doit(abs, -3) == 3


@pytest.mark.guarantee("remote-1", "command-3")
def test_a_key_that_is_not_on_the_list_is_told_so(server):
    with pytest.raises(ConnectionError, match="does not allow the key of this process"):
        poly.connect(server.address, server_key=server.key, keys=new_key_pair())


def test_a_key_that_is_refused_at_once_leaves_nobody_waiting(pool, monkeypatch):
    """libzmq gives a connection up whose handshake has failed: what is sent by it then would wait
    for ever."""
    with poly.serve(pool) as server:
        hello = messages.pack_hello

        def late(**who):
            wait_for(lambda: server._refused_connections)
            time.sleep(0.1)  # for libzmq to do so, of which it tells nothing
            return hello(**who)

        monkeypatch.setattr(server, "_log_refusals", lambda: None)  # and count anew
        monkeypatch.setattr(connection_module, "pack_hello", late)
        with pytest.raises(ConnectionError, match="does not allow the key of this process"):
            poly.connect(server.address, server_key=server.key, keys=new_key_pair())


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ([zmq.EVENT_HANDSHAKE_FAILED_AUTH], "does not allow the key"),
        ([zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL], "does not hold the expected server key"),
        ([], "the handshake failed"),
    ],
)
def test_a_key_that_is_refused_before_anything_was_sent_is_told_so(told, reason, monkeypatch):
    """libzmq takes no message then. On a slow machine, even the first one is too late."""
    events = [{"event": event} for event in told]
    monkeypatch.setattr(server_connection, "has_input", lambda _: bool(events))
    monkeypatch.setattr(server_connection, "recv_monitor_message", lambda *_: events.pop())
    end = object.__new__(server_connection.ServerConnection)
    end.has_ended, end._monitor = False, "monitor"
    end._socket = Mock(send_multipart=Mock(side_effect=zmq.Again))
    end.send(messages.pack_hello())
    assert reason in end.loss_reason


def test_a_server_that_is_another_gets_nothing_of_ours(server, card):
    found = Card.read(card)
    keys = (found.public, found.secret)
    with pytest.raises(ConnectionError, match="does not hold the expected server key"):
        poly.connect(server.address, server_key=new_key_pair()[0], keys=keys)


def test_nobody_there_is_told_with_the_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=f"no server answered at {where} within 0.3 s"):
            poly.connect(where, server_key=new_key_pair()[0], keys=new_key_pair(), timeout=0.3)


@pytest.mark.guarantee("remote-12", "command-3")
@pytest.mark.parametrize("version", [1, 77])
def test_another_version_is_told_by_which(version, server, card, monkeypatch, caplog):
    monkeypatch.setattr(messages, "PROTOCOL", version)
    hello = messages.pack_hello()
    monkeypatch.undo()
    monkeypatch.setattr(connection_module, "pack_hello", lambda **who: hello)
    which = f"the client speaks protocol {version} and the server protocol {messages.PROTOCOL}"
    older, newer = sorted(
        [("the client", version), ("the server", messages.PROTOCOL)], key=lambda each: each[1]
    )
    with pytest.raises(ConnectionError) as caught:
        poly.connect(card)
    line = str(caught.value)
    assert (
        which in line
        and f"of {older[0]} is older than that of {newer[0]}" in line
        and "\n" not in line
    )
    wait_for(lambda: which in caplog.text)


@pytest.mark.guarantee("remote-12")
def test_a_server_of_another_version_is_told_by_which(server, card, monkeypatch):
    monkeypatch.setattr(messages, "PROTOCOL", 1)
    hello = messages.pack_hello()
    monkeypatch.undo()
    monkeypatch.setattr(server_module, "pack_hello", lambda *drones, **who: hello)
    told = f"the server speaks protocol 1 and this client protocol {messages.PROTOCOL}"
    with pytest.raises(ConnectionError, match=told):
        poly.connect(card)


@pytest.mark.parametrize(
    "wrong",
    ["", "127.0.0.1:5", "tcp://", "tcp://host", "tcp://host:port", "ipc:///x", "tcp://h:99999"],
)
def test_an_address_that_is_none_is_refused(pool, wrong):
    with pytest.raises(ValueError, match="an address is tcp://HOST:PORT"):
        poly.serve(pool, wrong)


@pytest.mark.parametrize("wrong", ["tcp://127.0.0.1:*", "tcp://a b:80", "tcp://-:5"])
def test_an_address_to_which_nothing_can_connect_is_a_value_error_with_it(wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        poly.connect(wrong, server_key=new_key_pair()[0], keys=new_key_pair())


def test_an_address_that_is_taken_is_an_error_and_leaves_nothing(pool, server):
    with pytest.raises(OSError, match="in use"):
        poly.serve(pool, server.address)


@pytest.mark.parametrize("wrong", ["", "short", "x" * 39 + "~", 5])
def test_a_key_that_is_none_is_refused(pool, wrong):
    with pytest.raises(ValueError, match="40 characters of Z85"):
        poly.serve(pool, allow=[wrong])


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"address": "tcp://h:1"}', "null", '{"address": 5, "server": 1}']
)
def test_a_file_that_is_no_connection_file_is_told(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="is not a connection file"):
        poly.connect(path)
    with pytest.raises(FileNotFoundError):
        poly.connect(tmp_path / "none")
    with pytest.raises(ValueError, match="server_key"):
        poly.connect("tcp://127.0.0.1:5")


WAITS_FOR_NOBODY = """
    import os, sys
    import polycephaly as poly
    for where in sys.argv[1:]:
        try:
            poly.connect(where, timeout=2)
        except (ValueError, ConnectionError) as error:
            print(type(error).__name__, error)
"""


@pytest.mark.parametrize("mode", [0o600, 0o666])
def test_a_connection_file_that_is_a_pipe_or_has_no_end_keeps_nobody_waiting(
    tmp_path, mode, monkeypatch
):
    """Whoever may write into a directory may have put them there; nobody writes into the pipe."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pool_registry.registry_directory(make=True)
    for pipe in (tmp_path / "card", pool_registry.card_path("lab")):
        os.mkfifo(pipe)
        pipe.chmod(mode)
    long = tmp_path / "long"
    long.touch(0o600)
    os.truncate(long, 1 << 40)
    done = run_script(WAITS_FOR_NOBODY, str(tmp_path / "card"), "/dev/zero", str(long), "lab")
    pipe, zeros, end, name = done.stdout.splitlines()
    assert pipe.startswith(f"ValueError {tmp_path / 'card'} is not a regular file (p"), done.stderr
    assert zeros.startswith("ValueError /dev/zero is not a regular file (c")
    assert end == f"ValueError {long} has more than 1,048,576 bytes"
    assert name.startswith("ValueError") and "is not a regular file" in name
    assert pool_registry.running_cards() == []


# -- strangers -------------------------------------------------------------------------------------


def note_pid(path):
    append(path, str(os.getpid()))
    return KeyboardInterrupt()


@pytest.mark.guarantee("remote-2")
def test_what_a_client_raises_is_not_rebuilt_by_the_server(remote, tmp_path, monkeypatch):
    def interrupt(path):
        class Mine(KeyboardInterrupt):
            def __reduce__(self):
                return note_pid, (path,)

        raise Mine

    unpacked = []  # by the client: client and server are both in this process

    def unpack(payload):
        unpacked.append(payload)
        return LookupError(len(payload))

    monkeypatch.setattr(handlers, "unpack_exception", unpack)
    assert isinstance(remote.promise(interrupt, str(tmp_path / "by")).exception(SOON), LookupError)
    assert len(unpacked) == 1
    assert str(os.getpid()) not in lines(tmp_path / "by")  # the server is in this process


def zmtp(mechanism):
    """A ZeroMQ greeting (RFC 23): signature, version, mechanism."""
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def ready():
    body = b"\x05READY" + b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
    return b"\x04" + bytes([len(body)]) + body


def message(*parts):
    return b"".join(
        bytes([i < len(parts) - 1, len(p)]) + p for i, p in enumerate(parts) if len(p) < 256
    )


def what_it_gets(server, sent):
    """All that the server sends to somebody who sends this, until it closes."""
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(SOON)
        got = b""
        try:
            for piece in sent:
                stranger.sendall(piece)
            while piece := stranger.recv(4096):
                got += piece
        except (ConnectionResetError, BrokenPipeError):  # it had enough of it
            pass
        return got


@pytest.mark.guarantee("remote-1")
def test_a_stranger_gets_the_greeting_of_every_zeromq_socket_and_nothing_else(
    server, remote, tmp_path
):
    fuse = str(tmp_path / "exploded")
    bomb = pickle.dumps(Bomb(fuse))
    definition = Item(1, 0, DEFINE_CALLABLE, bomb, extra=messages.pack_extra({"label": "x"}))
    work = messages.pack_work([definition, Item(2, 1, CALL, bomb)])
    speech = [message(*messages.pack_hello()), message(*work), message(b"C", b"12345678")]
    curve = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + os.urandom(32 + 8 + 80)
    greeting = {
        "NULL": [zmtp(b"NULL"), ready(), *speech],
        "PLAIN": [zmtp(b"PLAIN"), b"\x04\x10\x05HELLO\x04user\x04pass", *speech],
        "CURVE, and then in the clear": [zmtp(b"CURVE"), *speech],
        "CURVE with a made-up hello": [zmtp(b"CURVE"), curve, *speech],
        "HTTP": [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        "noise": [os.urandom(5000)],
        "a very long frame": [zmtp(b"CURVE"), b"\x06" + struct.pack(">Q", 1 << 62)],
    }
    for name, sent in greeting.items():
        got = what_it_gets(server, sent)
        assert len(got) <= 64, (name, got)
        assert zmtp(b"CURVE")[:1] == got[:1] or not got, (name, got)
        assert b"pool" not in got and server.key.encode() not in got, (name, got)
        assert remote.doit(abs, -1) == 1
    assert not os.path.exists(fuse)
    assert server.clients == 1


def test_one_who_says_nothing_is_put_out(pool, monkeypatch):
    monkeypatch.setattr(tuning, "handshake_seconds", 0.3)
    with poly.serve(pool) as server:
        got = what_it_gets(server, [])
        assert len(got) <= 64


@pytest.mark.guarantee("remote-1")
def test_one_with_the_servers_key_alone_gets_no_answer(server, tmp_path):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    public, secret = zmq.curve_keypair()
    stranger.curve_serverkey, stranger.curve_publickey, stranger.curve_secretkey = (
        server.key.encode(),
        public,
        secret,
    )
    stranger.linger = 0
    monitor = stranger.get_monitor_socket(
        zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    )
    stranger.connect(server.address)
    with suppress(zmq.Again):  # it may have been refused by now
        stranger.send_multipart(messages.pack_hello(), zmq.NOBLOCK)
    from zmq.utils.monitor import recv_monitor_message

    assert monitor.poll(10_000)
    assert recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
    assert not stranger.poll(300)
    assert server.clients == 0
    stranger.disable_monitor()
    monitor.close()
    stranger.close()
    context.term()


@pytest.mark.guarantee("wire-1")
def test_malformed_messages_of_a_client_harm_nobody(server, card, remote):
    """It has a key, so it could do anything; but by mistake it breaks nothing."""
    context = zmq.Context()
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rnd = random.Random(seed)
    good = [
        messages.pack_hello(),
        messages.pack_work(
            [
                Item(1, 0, DEFINE_CALLABLE, b"not a pickle", extra=b'{"label": "x"}'),
                Item(2, 1, CALL, b"nor this", 0, 0.5, 3),
            ]
        ),
        messages.pack_json(messages.REQUEST, {"id": 1, "what": "drones"}),
        messages.pack_json(messages.REQUEST, {"id": 2, "what": "kill", "drone": 99}),
        messages.pack_json(messages.REQUEST, {"id": [], "what": {}, "drone": ""}),
        messages.pack_hello(1, role="worker", name="far", host="x"),
        messages.pack_json(
            messages.HOST_STATUS, {"drones": [{"number": 1, "name": "x", "pid": 1, "host": "x"}]}
        ),
        messages.pack_json(messages.HOST_STATUS, {"drones": [{"number": ""}]}),
        messages.pack_json(messages.REPLY, {"id": 1}),
        messages.pack_json(messages.OUTPUT, {"lines": [["x", "far.0", "stdout", ""]]}),
        messages.pack_numbers(messages.OUTPUT_ACK, [1 << 40]),
        messages.pack_shared_value(2, [b"a pickle", bytes(100)]),
        messages.pack_work([Item(3, 1, CALL, b"x", extra=b'{"shared": [1, 5]}')]),
        messages.pack_numbers(messages.RELEASE, [1]),
        messages.pack_numbers(messages.WINDOW, [5]),
        messages.pack_numbers(messages.RETURNED, [1, 2]),
        messages.pack_results([(1, 1, b"x", "said")]),
        messages.pack_numbers(messages.CANCEL, [1, 2, 1 << 60]),
        messages.pack_numbers(messages.PING, [0]),
        [messages.PART, b"x"],
        [messages.BYE],
    ]
    for number in range(2000):
        if number % 20 == 0:
            fool = of_a_key_holder(context, card)
            over = fool.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        sent = [bytearray(part) for part in rnd.choice(good)]
        for _ in range(rnd.randrange(4)):
            part = rnd.choice(sent)
            if part and rnd.random() < 0.7:
                part[rnd.randrange(len(part))] ^= 1 << rnd.randrange(8)
            elif rnd.random() < 0.5:
                del part[rnd.randrange(len(part) + 1) :]
            else:
                sent.insert(
                    rnd.randrange(len(sent) + 1), bytearray(rnd.randbytes(rnd.randrange(40)))
                )
        with suppress(zmq.Again):  # it is out already
            fool.send_multipart([bytes(part) for part in sent], zmq.NOBLOCK)
        if number % 20 == 19:
            with suppress(zmq.Again):
                fool.send_multipart([b"?"], zmq.NOBLOCK)  # whatever the others were, this is none
            wait_until_put_out(fool, over)
    assert remote.doit(abs, -5) == 5
    context.term()
    wait_for(lambda: server.clients == 1)
    assert remote.doit(abs, -6) == 6


def wait_until_put_out(end, over):
    """By REFUSED, or by the end of the connection (`over`), which may overtake that."""
    poller = zmq.Poller()
    poller.register(end, zmq.POLLIN)
    poller.register(over, zmq.POLLIN)
    kind = b""
    while kind != messages.REFUSED:
        ready = dict(poller.poll(30_000))
        assert ready, "not within 30 s"
        if end not in ready:
            break
        kind = end.recv_multipart()[0]
    end.disable_monitor()
    over.close()
    end.close()


def of_a_key_holder(context, card):
    """A socket of one who may come in, and says whatever he likes."""
    found = Card.read(card)
    end = context.socket(zmq.DEALER)
    end.linger, end.rcvtimeo, end.sndhwm = 0, 30_000, 0
    end.reconnect_ivl = -1
    end.curve_serverkey, end.curve_publickey, end.curve_secretkey = (
        key.encode() for key in (found.server, found.public, found.secret)
    )
    end.connect(found.address)
    return end


@pytest.mark.parametrize(
    "reader",
    [
        messages.read_work,
        messages.read_results,
        messages.read_numbers,
        messages.read_json,
        messages.read_shared_value,
        lambda parts: messages.read_lines(parts, 3),
        lambda parts: messages.read_hello(parts, "it", "we"),
    ],
)
def test_the_readers_refuse_every_other_shape(reader):
    rnd = random.Random(5)
    for _ in range(20_000):
        parts = [
            rnd.randbytes(rnd.choice([0, 1, 8, 9, 29, 58, 100])) for _ in range(rnd.randrange(5))
        ]
        try:
            result = reader(parts)
            if not isinstance(result, (list, tuple, dict)):
                list(result)
        except Malformed:
            pass


def test_a_connection_that_nobody_has_any_more_is_closed(server, card):
    remote = poly.connect(card)
    limited = remote.options(timeout=1000)
    last = remote.promise(slow, 0.1)
    del remote
    gc.collect()
    assert limited.doit(abs, -1) == 1
    del limited
    gc.collect()
    assert last.result(SOON) == 0.1
    wait_for(lambda: server.clients == 0)


def test_connections_do_not_cross_forks(server, card, remote):
    """What a script forks by itself has no part in them."""
    assert remote.doit(abs, -1) == 1
    pid = os.fork()
    if pid == 0:
        try:
            remote.promise(abs, 1)
        except RuntimeError as error:
            os._exit(0 if "another process" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert remote.doit(abs, -2) == 2


def test_a_client_in_a_drone_uses_its_own_pool(server, card):
    """Connections work in drones: here one gives work to the pool that runs it, of which another
    drone is free."""

    def inside(card):
        with poly.connect(card) as remote:
            return remote.doit(abs, -9)

    with poly.connect(card) as remote:
        assert remote.doit(inside, card) == 9


def test_it_is_an_executor_for_asyncio(remote):
    async def main():
        return await asyncio.get_running_loop().run_in_executor(remote, pow, 2, 5)

    assert asyncio.run(main()) == 32


def test_python_starts_without_it():
    done = run_script(
        "import sys, polycephaly; polycephaly.Pool; print('polycephaly.server' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


def test_a_forked_child_leaves_the_server_to_its_parent(pool, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with poly.serve(pool, name="of-the-parent") as server:
        pid = os.fork()
        if not pid:
            try:
                server.close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        with poly.connect("of-the-parent") as remote:
            assert remote.doit(abs, -3) == 3


@pytest.mark.slow
def test_a_client_that_was_stopped_for_a_while_goes_on(server, card, tmp_path):
    script = """
        import sys, polycephaly as poly
        with poly.connect(sys.argv[1]) as remote:
            task = remote.promise("import time; time.sleep(9); 7")
            print("sent", flush=True)
            print(task.value)
    """
    with Script(script, card) as client:
        assert client.process.stdout.readline() == "sent\n"
        client.signal(signal.SIGSTOP)
        time.sleep(8)
        client.signal(signal.SIGCONT)
        assert client.process.communicate(timeout=60)[0] == "7\n"


def test_a_server_that_ends_right_after_its_hello_is_lost(monkeypatch):
    events, arrived = [{"event": zmq.EVENT_DISCONNECTED}], [[messages.HELLO]]
    monkeypatch.setattr(
        server_connection, "has_input", lambda end: bool(events if end == "monitor" else arrived)
    )
    monkeypatch.setattr(server_connection, "recv_monitor_message", lambda *_: events.pop())
    end = object.__new__(server_connection.ServerConnection)
    end._monitor, end._socket = "monitor", Mock(recv_multipart=lambda *_: arrived.pop())
    end._check_connection()  # before the loop has had time to read the HELLO
    for frames in end._received_messages():
        assert frames == [messages.HELLO] and not end.loss_reason
        end.hello_received = True
    assert "has ended" in end.loss_reason


def test_a_loss_behind_as_many_messages_as_a_turn_reads_is_noticed(monkeypatch):
    arrived = [[messages.HELLO]] * server_connection.MAX_MESSAGES_PER_TURN
    monkeypatch.setattr(server_connection, "has_input", lambda _: bool(arrived))
    end = object.__new__(server_connection.ServerConnection)
    end._socket = Mock(recv_multipart=lambda *_: arrived.pop())
    end.hello_received, end._end_reason = True, "the server has ended"
    assert sum(1 for _ in end._received_messages()) == server_connection.MAX_MESSAGES_PER_TURN
    assert end.loss_reason == "the server has ended"
