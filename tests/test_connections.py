"""Connections of the main image stay behind: what it closes is closed, whatever pools are open."""

import multiprocessing
import os
import select
import socket
import subprocess
import tempfile

import pytest

import polycephaly as poly

work = None


def inherited(function):
    """A pool that has `function`, and what it refers to, with the fork."""
    global work
    work = function
    return poly.Pool(1)


def use():
    return work()


@pytest.fixture
def served():
    """A listening socket, the server's end of a connection, and the client's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        end, _ = listener.accept()
        with end:
            client.settimeout(30)
            yield listener, end, client


@pytest.mark.guarantee("work-4")
def test_a_connection_that_is_closed_beside_a_pool_has_ended_and_its_port_is_free(served):
    listener, end, client = served
    with poly.Pool(2) as pool:
        assert pool.doit(abs, -1) == 1
        end.close()
        assert client.recv(1) == b""
        address = listener.getsockname()
        listener.close()
        socket.create_server(address).close()


@pytest.mark.guarantee("work-4")
def test_a_unix_connection_with_a_name_ends_too(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        client.connect(str(tmp_path / "s"))
        end, _ = listener.accept()
        client.settimeout(30)
        with poly.Drone() as drone:
            assert drone.doit(abs, -1) == 1
            end.close()
            assert client.recv(1) == b""


@pytest.mark.guarantee("work-4")
def test_a_drone_finds_an_inherited_connection_closed_and_may_close_it(served):
    _, end, client = served

    def uses():
        told = end.recv(1)
        fd = end.fileno()
        with pytest.raises(BrokenPipeError):
            end.send(b"x")
        end.close()
        again = os.open(os.devnull, os.O_RDONLY)  # nobody else had got the number
        os.close(again)
        return told, fd == again

    with inherited(uses) as pool:
        assert pool.doit(use) == (b"", True)
    end.send(b"y")
    assert client.recv(1) == b"y"


@pytest.mark.guarantee("work-4")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_socket_among_the_initargs_is_given(served, start):
    _, end, client = served
    with poly.Pool(1, initializer=keep, initargs=(end,), start=start) as pool:
        assert pool.doit(says, b"from a drone") == 12
        assert client.recv(100) == b"from a drone"


def test_a_socket_beside_a_lock_in_one_of_the_initargs_is_given_too(served):
    _, end, client = served
    box = {"lock": multiprocessing.Lock(), "queue": multiprocessing.Queue(), "end": end}
    with poly.Pool(1, initializer=keep_of, initargs=(box,)) as pool:
        assert pool.doit(says, b"from a drone") == 12
        assert client.recv(100) == b"from a drone"


def keep_of(box):
    keep(box["end"])


def keep(end):
    global kept
    kept = end


def says(text):
    return kept.send(text)


@pytest.mark.guarantee("work-4")
def test_pairs_of_sockets_and_pipes_of_multiprocessing_cross():
    mine, its = multiprocessing.Pipe()
    reader, writer = multiprocessing.Pipe(duplex=False)
    one, other = socket.socketpair()

    def speaks():
        its.send("a")
        writer.send("b")
        other.send(b"c")

    with mine, its, reader, writer, one, other, inherited(speaks) as pool:
        pool.doit(use)
        assert (mine.recv(), reader.recv(), one.recv(1)) == ("a", "b", b"c")


@pytest.mark.guarantee("work-4")
def test_a_program_learns_that_its_pipes_are_closed():
    with (
        subprocess.Popen(["cat"], stdin=subprocess.PIPE) as reads,
        subprocess.Popen(["yes"], stdout=subprocess.PIPE) as writes,
        poly.Pool(1) as pool,
    ):
        assert pool.doit(abs, -1) == 1
        reads.stdin.close()
        assert reads.wait(30) == 0
        writes.stdout.close()
        assert writes.wait(30) != 0


@pytest.mark.guarantee("work-4")
def test_a_datagram_socket_is_another_of_its_kind_in_a_drone():
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as hears,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as speaks,
    ):
        hears.bind(("127.0.0.1", 0))
        hears.settimeout(30)
        speaks.connect(address := hears.getsockname())

        def tells():
            speaks.send(b"x")
            return hears.getsockname()[1]

        with inherited(tells) as pool:
            assert pool.doit(use) != address[1]
            assert hears.recv(1) == b"x"
            hears.close()
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as again:
                again.bind(address)


@pytest.mark.guarantee("work-4")
def test_an_epoll_of_the_main_image_is_not_a_drones():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end, select.epoll() as epoll:
        end.bind(("127.0.0.1", 0))
        pair = socket.socketpair()
        epoll.register(pair[0], select.EPOLLIN)

        def leaves():
            with pytest.raises(FileNotFoundError):
                epoll.unregister(pair[0])

        with pair[0], pair[1], inherited(leaves) as pool:
            pool.doit(use)
            pair[1].send(b"x")
            assert epoll.poll(30)


def test_a_connection_of_multiprocessing_is_refused_in_both_directions():
    """Its number would arrive, and its end would close another's file."""
    mine, other = multiprocessing.Pipe()
    with mine, other, poly.Pool(1) as pool:
        for work, *args in [(len, mine), (len, [mine, lambda: 0]), (multiprocessing.Pipe,)]:
            with pytest.raises(TypeError, match="initargs"):
                pool.promise(work, *args).result()
        assert pool.doit(abs, -1) == 1


@pytest.mark.parametrize("mode", ["r", "w", "w+b"])
def test_a_temporary_file_is_refused_and_stays(mode):
    with tempfile.NamedTemporaryFile(mode) as file, poly.Pool(1) as pool:
        with pytest.raises(TypeError, match="temporary file"):
            pool.doit(len, file)
        assert os.path.exists(file.name)


def test_the_environment_is_the_drones_own():
    with poly.Pool(1, initializer=os.environ.update, initargs=({"POLY_A": "1"},)) as pool:
        assert pool.doit(os.environ.get, "POLY_A") == "1"
        pool.doit(os.environb.__setitem__, b"POLY_B", b"2")
        assert pool.doit("import os; os.getenv('POLY_B')") == "2"
    assert "POLY_A" not in os.environ
