"""A server's decision that a client or a joined host is silent, in a time that the tests move
(in_time.py), without a peer, a process or a thread.

test_network.py and test_remote_join.py show it on real processes.
"""

import socket
from collections import defaultdict, deque
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from in_time import FakeLoop, FakeReactor, dispatcher_of

from polycephaly.engines.remote.messages import (
    ALIVE,
    PART,
    PING,
    REFUSED,
    REQUEST,
    Item,
    pack_extra,
    pack_hello,
    pack_json,
    pack_shared_value,
    pack_work,
    read_json,
)
from polycephaly.runtime.fork_guard import OwnThread
from polycephaly.runtime.tuning import tuning
from polycephaly.server import server as server_module
from polycephaly.server.server import Server
from polycephaly.wire.messages import CALL, DEFINE_CALLABLE

CHECK, SILENCE = tuning.client_check_seconds, tuning.client_silence_seconds
A_MOMENT = 2**-10
HOUR = 3600

ROLES = pytest.mark.parametrize("role", ["client", "worker"])


class UnconnectedServer(Server):
    """The test carries its messages, and moves its time."""

    def __init__(self):
        self.arrived, self.sent = deque(), defaultdict(list)
        pool = SimpleNamespace(_dispatcher=dispatcher_of(FakeReactor(), 2))
        super().__init__(pool, "tcp://127.0.0.1:0", ())
        self.time = self._loop

    def _receive(self):
        while self.arrived:
            self._handle_message(*self.arrived.popleft())

    def _send(self, identity, frames):
        self.sent[identity].append(frames)
        return True


class Peer:
    """A client, or a host that has joined (a "worker"): it says what the test has it say."""

    def __init__(self, server, name, role="client"):
        self.server, self.identity = server, name.encode()
        self.told = server.sent[self.identity]
        self.says(pack_hello(pid=name, host="host", name=name, role=role))
        server.time.turn()

    def says(self, frames):
        self.server.arrived.append((self.identity, "key", frames))

    def calls(self):
        """The promise of a call, which runs until it is cancelled."""
        definition = Item(1, 0, DEFINE_CALLABLE, b"", extra=pack_extra({"label": "runs"}))
        self.says(pack_work([definition, Item(2, 1, CALL, b"")]))
        self.server.time.turn()
        self.server._dispatcher.reactor.turn()
        return self.server._clients[self.identity].session.calls[2].promise

    def is_here(self):
        server = self.server
        return bool(server._clients.get(self.identity) or server._joined_hosts.get(self.identity))


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(server_module, "EventLoop", FakeLoop)
    # No sum of these is rounded.
    monkeypatch.setattr(server_module, "CONNECTION_CHECK_SECONDS", CHECK / 4)
    monkeypatch.setattr(server_module, "HOST_CHECK_SECONDS", CHECK / 8)
    server = UnconnectedServer()
    yield server
    server._loop.post(server._close)
    server.time.turn()
    server._loop.release_resources()


@ROLES
def test_a_silent_peer_is_let_go_at_the_first_check_after_its_time(server, role):
    peer = Peer(server, "peer", role)
    server.time.pass_(SILENCE + CHECK - A_MOMENT)
    assert peer.is_here()
    server.time.pass_(A_MOMENT)
    assert not peer.is_here()


@pytest.mark.guarantee("remote-3")
def test_a_silent_client_is_told_and_loses_its_own_calls_only(server):
    silent, other = Peer(server, "silent"), Peer(server, "other")
    its_call, of_other = silent.calls(), other.calls()
    server.time.pass_(SILENCE)
    other.says([ALIVE])
    assert its_call.running() and of_other.running()
    server.time.pass_(CHECK)
    assert its_call.cancelled() and of_other.running()
    assert other.is_here() and not silent.is_here()
    assert silent.told[-1] == [REFUSED, b"the server received no message for 15 s"]


@ROLES
def test_a_peer_that_holds_too_much_is_told_why(server, role):
    peer = Peer(server, "large", role)
    server._max_held_bytes = 10
    peer.says([PART, bytes(100)])
    server.time.pass_(CHECK)
    assert not peer.is_here()
    kind, reason = peer.told[-1]
    assert kind == REFUSED and b"the server holds more than 10 bytes" in reason


@ROLES
@pytest.mark.parametrize("sign", ["part of a message", "ping"])
def test_a_slow_peer_that_lives_stays(server, role, sign):
    """Each sign of life comes as late as it may."""
    peer = Peer(server, "slow", role)
    for _ in range(20):
        server.time.pass_(SILENCE)
        pings = [frames for frames in peer.told if frames[0] == PING]
        assert len(pings) >= SILENCE / CHECK  # there was something to answer
        if sign == "ping":
            peer.says(pings[0])
            peer.told.remove(pings[0])
        else:
            peer.says([PART, b"x"])
        server.time.turn()
        assert peer.is_here()
    server.time.pass_(SILENCE + CHECK)
    assert not peer.is_here()


def test_a_client_that_only_says_that_it_lives_stays(server):
    peer = Peer(server, "client")
    for _ in range(20):
        server.time.pass_(SILENCE)
        peer.says([ALIVE])
    server.time.pass_(SILENCE)
    assert peer.is_here()


@ROLES
def test_a_server_that_stood_still_counts_that_as_one_check(server, role):
    peer = Peer(server, "peer", role)
    for _ in range(int(SILENCE / CHECK)):
        server.time.stand_still(HOUR)
        assert peer.is_here()
    server.time.pass_(CHECK)
    assert not peer.is_here()


@ROLES
def test_a_server_that_stood_still_hears_first_what_came_meanwhile(server, role):
    peer = Peer(server, "peer", role)
    server.time.pass_(SILENCE)  # one more check would be one too many
    server.time.now += HOUR
    peer.says([PART, b"x"])
    server.time.turn()
    assert peer.is_here()


def test_the_end_of_another_connection_is_no_check(server):
    """It has the server look for who has gone, at any time and as often as strangers like."""
    peer = Peer(server, "client")
    for _ in range(100):
        server._check_silence(is_check_due=False)
    server.time.pass_(SILENCE)
    assert peer.is_here()


@pytest.mark.guarantee("remote-4")
@pytest.mark.parametrize("let_in", [False, True])
def test_the_end_of_a_stranger_has_the_server_ask_nobody(server, let_in):
    """The end of a peer that was let in has it ask each whether it is still there."""
    client = Peer(server, "client")
    with socket.create_connection(("127.0.0.1", server.port)):
        assert server._monitor.poll(60_000)
        server._check_monitor()
        (fd,) = server._accepted._tcps
        if let_in:
            server._accepted.record_message(fd)
    assert server._monitor.poll(60_000)
    server._check_monitor()
    assert not len(server._accepted)
    assert [frames[0] for frames in client.told].count(PING) == let_in


def test_a_message_that_is_read_after_its_connection_lets_in_no_later_one(server):
    server._accepted.record_message(5)
    server._accepted.add(5)
    assert not server._accepted.discard(5)


@pytest.mark.parametrize("at", ["before", "after"])
def test_what_is_posted_at_the_end_of_a_server_is_done_or_dropped(server, at):
    """As a reply, or a shared value, of a thread that ends late."""
    done = Mock()
    if at == "before":
        server._post(done)
    server._loop.post(server._close)
    server.time.turn()
    if at == "after":
        server._post(done)
    assert done.called == (at == "before") and not server._loop._inbox


@pytest.mark.parametrize(
    "request_", [pack_json(REQUEST, {"id": 7, "what": "status"}), pack_shared_value(7, [b"a"])]
)
def test_a_request_that_gets_no_thread_is_answered(server, request_, monkeypatch):
    monkeypatch.setattr(OwnThread, "start", Mock(side_effect=RuntimeError("no new thread")))
    client = Peer(server, "client")
    client.says(request_)
    server.time.turn()
    assert read_json(client.told[-1]) == {"id": 7, "error": "no new thread"}
