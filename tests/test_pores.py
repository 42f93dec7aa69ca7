"""Pores: one owner, the same pages for all, messages to the owner, and an end that everybody hears
of."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import pickle
import random
import resource
import signal
import socket
import threading
import time
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
from census import alive, descriptors
from faults import StopsTheLoop, wait_for
from greens import run
from scripts import output_of, run_script

import polycephaly as poly
from polycephaly import green
from polycephaly.store.pores import Message
from polycephaly.store.pores import io_thread as io
from polycephaly.store.pores.frames import (
    HEAD,
    MAX_MESSAGE_BYTES,
    TOLD,
    WROTE,
    message_of,
    split_frames,
)
from polycephaly.store.pores.inbox import Inbox

np = pytest.importorskip("numpy")


@pytest.fixture(autouse=True)
def no_pore_is_left():
    yield
    gc.collect()
    if io.io_thread is not None:
        io.io_thread.thread.join(30)
    assert io.io_thread is None


@pytest.fixture(scope="module")
def pool():
    with poly.Pool(2) as pool:
        yield pool


def fill(pore, row):
    pore.array[row] = row
    return os.getpid()


def tell_all(pore, messages):
    for each in messages:
        pore.tell(each)


def tell_until_full(pore):
    """By the owner, who does not receive meanwhile."""
    told = 0
    while True:
        stopped = pore._inbox.is_paused  # nothing more is read from the senders' buffers
        if pore.tell(told, wait=False):
            told += 1
        elif stopped:
            return told


def told_by(pore):
    """What is told, until somebody says that it is enough."""
    told = []
    for message in pore:
        if message.value == "enough":
            return told
        told.append(message)
    raise AssertionError("closed")


def until_no_pore_is_here():
    wait_for(lambda: io.io_thread is None)


def error_of(fn, *args):
    try:
        return fn(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# -- the same pages --------------------------------------------------------------------------------


def test_what_one_writes_all_see(pool):
    with poly.Pore((4, 1000), "i4") as pore:
        assert pore.array.shape == (4, 1000) and pore.array.dtype == "i4" and not pore.array.any()
        pids = list(pool.map(fill, [pore] * 4, range(4)))
        assert os.getpid() not in pids
        assert pore.array.sum(axis=1).tolist() == [0, 1000, 2000, 3000]
        pore.array[:] = 7
        assert pool.doit(lambda: int(pore.array.sum())) == 7 * 4000


def test_a_pore_without_a_type_is_bytes(pool):
    with poly.Pore(10) as pore:
        pool.doit(lambda: pore.memory.__setitem__(slice(2, 5), b"abc"))
        assert bytes(pore.memory) == b"\0\0abc\0\0\0\0\0" and pore.nbytes == len(pore.memory) == 10
        assert pore.array.tolist() == list(pore.memory)


def test_however_it_arrives_it_is_the_same_one(pool):
    with poly.Pore(10) as pore:
        assert (
            pool.doit(lambda p, nested: p is pore is nested[0]["pore"], pore, [{"pore": pore}])
            is True
        )
        assert pool.doit(lambda: pore) is pore
        assert pickle.loads(pickle.dumps(pore)) is pore


def test_a_drone_owns_one_and_others_look_at_it():
    with poly.Drone() as owner, poly.Drone() as other:
        owner.doit("import polycephaly as poly; pore = poly.Pore(8, 'i8', name='counts')")
        pore = owner["pore"]
        assert pore.owner == owner.pid and pore.name == "counts"
        pore.array[0] = 5
        other.doit(fill, pore, 1)
        assert owner.doit("pore.array[:3].tolist()") == [5, 1, 0]
        pore.tell("from here")
        assert other.doit(pore.tell, "from there") is True
        told = owner.doit(lambda pore: [pore.get()[:3], pore.get()[:3]], pore)
        assert told == [("MainProcess", "told", "from here"), (other.name, "told", "from there")]


def test_a_spawned_drone_looks_at_it_too():
    with poly.Pore(4, "i8") as pore, poly.Drone(start="spawn") as drone:
        assert drone.doit(put_and_tell, pore) is True
        assert pore.get(30).value == pore.name and pore.array[2] == 6


def put_and_tell(pore):
    pore.array[2] = 6
    return pore.tell(pore.name)


# -- messages --------------------------------------------------------------------------------------


def test_what_travels_as_an_argument_can_be_told(pool):
    with poly.Pore(1) as pore:
        n = 5
        assert pool.doit(lambda: pore.tell(lambda: n + 1)) is True
        assert pore.get(30).value() == 6
        pore.tell(lambda: n + 2)
        assert pore.get(30).value() == 7


def test_the_owner_is_told_who_wrote_how_much_and_where(pool):
    with poly.Pore(100) as pore:
        pool.doit(
            lambda: (
                pore.write(10, b"abc")
                and pore.write(20, np.arange(3, dtype="i4"))
                and pore.tell({"a": 1})
            )
        )
        first, second, third = (pore.get(30) for _ in range(3))
        assert first == Message(first.sender, "wrote", None, 10, 3)
        assert second[1:] == ("wrote", None, 20, 12)
        assert third[1:] == ("told", {"a": 1}, 0, 0)
        assert first.sender in {drone.name for drone in pool.drones}
        assert bytes(pore.memory[10:13]) == b"abc" and bytes(pore.memory[20:32]) == bytes(
            np.arange(3, dtype="i4")
        )


@pytest.mark.guarantee("graph-5")
def test_each_senders_messages_come_in_its_order_and_each_once(pool):
    with poly.Pore(1) as pore:
        done = [pool.promise(tell_all, pore, range(start, start + 5000)) for start in (0, 10_000)]
        values = [pore.get(30).value for _ in range(10_000)]
        assert [value for value in values if value < 10_000] == list(range(5000))
        assert [value for value in values if value >= 10_000] == list(range(10_000, 15_000))
        assert [each.value for each in done] == [None, None]


def test_a_message_whose_unpickling_raises_stop_async_iteration_is_an_error():
    async def read(pore):
        async for _ in pore:
            pass

    with poly.Pore(1) as pore:
        pore.tell(StopsTheLoop())
        with pytest.raises(RuntimeError, match=r"a message of .* raised StopAsyncIteration"):
            asyncio.run(read(pore))


def test_plain_code_green_threads_and_asyncio_receive(pool):
    async def received(pore, done):
        told = []
        async for message in pore:
            told.append(message.value)
            if message.value == 999:
                await done
                pore.close()
        return told

    def plain(pore, done):
        told = []
        for message in pore:
            told.append(message.value)
            if message.value == 999:
                done.result()
                pore.close()
        return told

    for receive in (
        plain,
        lambda pore, done: run(received, pore, done),
        lambda pore, done: asyncio.run(received(pore, done)),
    ):
        pore = poly.Pore(1)
        done = pool.promise(tell_all, pore, range(1000))
        assert receive(pore, done) == list(range(1000))


def test_a_green_driver_lets_the_others_have_turns():
    async def main():
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await green.sleep(0)

        with poly.Pore(1) as pore:
            beside = green.spawn(other)
            for _ in range(10):
                for n in range(100):
                    pore.tell(n)
                for n in range(100):
                    assert (await pore.receive()).value == n
            beside.cancel()
            return turns

    assert run(main) > 5


def test_a_driver_that_is_cancelled_loses_nothing():
    async def main():
        with poly.Pore(1) as pore:
            driver = green.spawn(pore.receive)
            await green.sleep(0)
            driver.cancel()
            with pytest.raises(CancelledError):
                await driver
            await green.call(pore.tell, "still there")
            return (await pore.receive()).value

    assert run(main) == "still there"


def test_a_driver_that_is_cancelled_wherever_it_is_has_no_message_in_hand():
    async def main():
        with poly.Pore(1) as pore:
            for n in range(200):
                pore.tell(n)
            got = []

            async def driver():
                while True:
                    got.append((await pore.receive()).value)

            while len(got) < 200:
                thread = green.spawn(driver)
                await green.sleep(0)
                thread.cancel()
                with pytest.raises(CancelledError):
                    await thread
            return got

    assert run(main) == list(range(200))


def test_plain_get_does_not_stop_the_green_threads():
    async def main():
        with (
            poly.Pore(1) as pore,
            pytest.raises(RuntimeError, match=r"use `await pore\.receive\(\)`"),
        ):
            pore.get()

    run(main)


def test_threads_that_begin_to_use_it_together_share_one_connection():
    with poly.Drone() as owner:
        for _ in range(20):
            owner.doit("import polycephaly as poly; pore = poly.Pore(1)")
            pore = owner["pore"]
            together = threading.Barrier(8)
            threads = [green.spawn(tell_together, pore, together) for _ in range(8)]
            for each in threads:
                each.result(30)
            assert owner.doit("[pore.get().value for _ in range(8)], len(pore._inbox.holders)") == (
                [1] * 8,
                1,
            )


def tell_together(pore, together):
    together.wait(30)
    pore.tell(1)


def test_a_wait_has_a_limit():
    with poly.Pore(1, name="quiet") as pore:
        with pytest.raises(
            TimeoutError, match=r"no message arrived at the pore 'quiet' within 0\.01 s"
        ):
            pore.get(0.01)
        assert not pore._inbox.waiters


def test_what_cannot_be_unpickled_is_that_messages_error_only():
    with poly.Pore(1) as pore:
        pore.tell(_Bad())
        pore.tell("good")
        with pytest.raises(ValueError, match="not here"):
            pore.get()
        assert pore.get().value == "good"


class _Bad:
    def __reduce__(self):
        return _raise, ()


def _raise():
    raise ValueError("not here")


# -- credit ----------------------------------------------------------------------------------------


def test_who_tells_waits_for_room_or_is_told_that_there_is_none():
    with poly.Pore(1) as pore:
        told = tell_until_full(pore)
        assert told > 1000
        waits = green.spawn(tell_all, pore, ["later", "enough"])  # on a native thread
        assert pore.tell("now", wait=False) is False
        assert [message.value for message in told_by(pore)] == [*range(told), "later"]
        assert waits.value is None


def test_green_code_does_not_wait_where_it_would_stop_all():
    async def main():
        with poly.Pore(1, name="slow") as pore:
            told = tell_until_full(pore)
            with pytest.raises(
                RuntimeError, match=r"pore 'slow' has no room .*await green\.call\(pore\.tell"
            ):
                pore.tell("in a step")
            teller = green.spawn(tell_in_call, pore)
            values = [(await pore.receive()).value for _ in range(told + 1)]
            await teller
            return values == [*range(told), "in a call"]

    assert run(main)


async def tell_in_call(pore):
    return await green.call(pore.tell, "in a call")


def test_a_tell_that_is_interrupted_while_it_waits_spoils_nothing(pool):
    with poly.Pore(1) as pore:
        blocked = [
            pool.promise(tell_large, pore) for _ in range(2)
        ]  # there is no room for all of these
        while not pore._inbox.is_paused:
            os.sched_yield()
        assert all(each.cancel() for each in blocked)
        last = pool.everywhere(lambda: pore.tell("enough"))
        values = [message.value for message in told_by(pore)]
        values += [message.value for message in told_by(pore)]
        assert set(values) == {"x" * (MAX_MESSAGE_BYTES - 100)}
        assert [each.value for each in last] == [True, True]


def tell_large(pore):
    while True:
        pore.tell("x" * (MAX_MESSAGE_BYTES - 100))


# -- closing ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("graph-5")
def test_what_was_told_before_the_close_is_received_and_then_no_more(pool):
    pore = poly.Pore(1, name="short")
    pool.doit(tell_all, pore, range(300))
    pore.close()
    assert [message.value for message in pore] == list(range(300))
    with pytest.raises(
        poly.PoreClosed, match=rf"pore 'short' is closed: its owner, process {os.getpid()} \(MainP"
    ):
        pore.get()
    assert pore.closed and "closed" in repr(pore)
    for use in (
        lambda: pore.memory,
        lambda: pore.array,
        lambda: pore.tell(1),
        lambda: pore.write(0, b"x"),
    ):
        with pytest.raises(poly.PoreClosed):
            use()
    pore.close()


def keep_in_the_drone(pore):
    global kept_in_the_drone
    kept_in_the_drone = pore  # or it would go with the call that brought it
    return pore.array[0]


def test_a_holder_is_told_at_its_next_operation_what_and_whose_it_was(pool):
    pore = poly.Pore(4, "i8", name="prices")
    for each in pool.everywhere(keep_in_the_drone, pore):
        each.result()
    pore.close()
    list(pore)  # until it is
    said = pool.everywhere(
        lambda: [error_of(getattr, pore, "array"), error_of(pore.tell, 1), pore.closed]
    )
    text = (
        "PoreClosed: the pore 'prices' is closed: its owner, "
        f"process {os.getpid()} (MainProcess), has closed it"
    )
    assert [each.value for each in said] == [[text, text, True]] * 2


def test_one_that_its_owner_has_let_go_of_says_what_would_have_kept_it(pool):
    drone = pool.drones[0]
    pore = drone.doit(lambda: poly.Pore(4, name="returned"))
    drone.doit(until_no_pore_is_here)
    for _ in range(2):
        with pytest.raises(
            poly.PoreClosed, match="kept no reference to the pore: the owner must keep one"
        ) as told:
            pore.tell(1)
        assert (told.value.pore, told.value.owner, told.value.ended) == (
            "returned",
            drone.pid,
            False,
        )


def test_mapped_after_the_close_it_says_what_and_whose_it_was():
    pore = poly.Pore(4, name="gone")
    pore.close()
    list(pore)
    with poly.Drone() as drone:
        promise = drone.promise(lambda: pore.memory[0])
        with pytest.raises(
            poly.PoreClosed, match=r"the pore 'gone' is closed: its owner, process \d+"
        ) as caught:
            promise.result()
    assert (caught.value.pore, caught.value.owner, caught.value.ended) == (
        "gone",
        os.getpid(),
        False,
    )


def test_who_waits_in_the_owner_is_told_of_the_close():
    pore = poly.Pore(1)
    waiting = green.spawn(lambda: [message.value for message in pore])
    async_waiting = green.spawn(pore.receive)
    while len(pore._inbox.waiters) < 2:
        os.sched_yield()
    pore.close()
    assert waiting.result(30) == []
    assert isinstance(async_waiting.exception(30), poly.PoreClosed)


def test_who_waits_for_room_is_told_of_the_close(pool):
    pore = poly.Pore(1)
    waits = [pool.promise(tell_for_ever, pore) for _ in range(2)]
    while (
        not pore._inbox.is_paused
        or sum(each.name is not None for each in list(pore._inbox.holders.values())) < 2
    ):
        time.sleep(0.001)  # they have been let in
    pore.close()
    closed = str(pore._identity.closed_error(ended=False))
    assert [str(each.exception(30)) for each in waits] == [closed] * 2
    assert {message.value for message in pore} == {"x" * 1000}


def tell_for_ever(pore):
    while True:
        pore.tell("x" * 1000)


@pytest.mark.guarantee("graph-6")
def test_views_stay_what_they_are_when_the_pore_is_closed(pool):
    pore = poly.Pore((2, 3), "i8")
    mine = pore.array
    fill(pore, 1)
    pore.close()
    del pore
    gc.collect()
    assert mine.tolist() == [[0, 0, 0], [1, 1, 1]]
    mine[0] = 9
    assert mine.sum() == 30


def test_the_loss_of_the_owners_last_reference_closes_it(pool):
    pore = poly.Pore(4)
    keep = pool.promise(hold, pore)
    keep.result()
    del pore
    gc.collect()
    if io.io_thread is not None:
        io.io_thread.thread.join(30)
    said = [each.value for each in pool.everywhere(let_go)]
    assert sorted(said) == [[], [True]]


held: list[poly.Pore] = []


def hold(pore):
    held.append(pore)
    return bytes(pore.memory)


def let_go():
    closed = [each.closed for each in held]
    held.clear()
    return closed


def hold_again():
    return error_of(hold, held[0])


# -- deaths ----------------------------------------------------------------------------------------


@pytest.mark.guarantee("graph-6")
@pytest.mark.parametrize("how", [signal.SIGKILL, "os._exit", "release"])
def test_the_owners_end_is_told_to_all_who_hold_it(how):
    with poly.Drone(name="other") as other:
        owner = poly.Drone(name="owner")
        owner.doit("import polycephaly as poly; pore = poly.Pore((2, 100), 'i8', name='table')")
        pore = owner["pore"]
        fill(pore, 1)
        view = pore.array
        other.doit(hold, pore)
        waits = green.spawn(tell_for_ever, pore)  # on a native thread
        pid = owner.pid
        if how == signal.SIGKILL:
            os.kill(pid, signal.SIGKILL)
        elif how == "os._exit":
            owner.promise(os._exit, 3).exception()
        else:
            owner.release()
        text = f"the pore 'table' is closed: its owner, process {pid} (owner), has ended"
        assert str(waits.exception(30)) == text
        for use in (
            lambda: pore.array,
            lambda: pore.tell(1),
            lambda: pore.write(0, b"x"),
            lambda: pore.memory,
        ):
            with pytest.raises(poly.PoreClosed) as caught:
                use()
            assert str(caught.value) == text and caught.value.ended
        wait_for(lambda: other.doit(hold_again) == f"PoreClosed: {text}")
        owner.release()
        with poly.Drone() as late:
            assert late.doit(error_of, hold, pore) == f"PoreClosed: {text}"
        assert view.sum() == 100  # what was handed out is still there


@pytest.mark.guarantee("graph-5")
def test_a_holders_death_frees_its_place_and_changes_nothing_else(pool):
    with poly.Pore(8) as pore:
        with poly.Pool(2, on_death="replace") as mortal:
            pool.doit(fill, pore, 1)
            for _ in range(5):
                assert isinstance(mortal.promise(tell_and_die, pore).exception(), poly.DroneDied)
            told = [pore.get(30).value for _ in range(5)]
            assert told == ["last words"] * 5
            mortal.doit(fill, pore, 2)
        pool.doit(tell_all, pore, ["enough"])
        assert told_by(pore) == []
        assert list(pore.memory[:3]) == [0, 1, 2]
        wait_for(lambda: len(pore._inbox.holders) <= 2 + 2)


def tell_and_die(pore):
    pore.tell("last words")
    os.kill(os.getpid(), signal.SIGKILL)


# -- forks -----------------------------------------------------------------------------------------


def test_a_drone_forked_from_the_owner_is_a_holder():
    with poly.Pore(8, name="forked") as pore:
        pore.array[0] = 4
        with poly.Drone() as drone:
            assert drone.doit(use_inherited, pore) == [4, 5, True]
            said = drone.doit(error_of, pore.get)
            assert said.startswith(
                f"RuntimeError: `get` is for the owner of the pore 'forked', process {os.getpid()}"
            )
            drone.doit(pore.close)
        assert pore.get(30).value == "from the child"
        assert pore.array[1] == 5 and not pore.closed


def use_inherited(pore):
    pore.array[1] = 5
    return [int(pore.array[0]), int(pore.array[1]), pore.tell("from the child")]


def test_a_drone_forked_from_a_holder_is_a_holder_of_its_own():
    with poly.Pore(8) as pore, poly.Drone() as middle:
        middle.doit(hold, pore)
        assert middle.doit(tell_from_below) is None
        first, second = pore.get(30), pore.get(30)
        assert {first.value, second.value} == {"below", "middle"} and first.sender != second.sender


def tell_below():
    held[0].tell("below")


def tell_from_below():
    with poly.Drone() as below:
        below.doit(tell_below)
    held[0].tell("middle")


@contextmanager
def told_by_a_forks_child(pore, use, fail):
    """What `use` gives in a forked child, who tells it. After the block the pore is closed, and
    `fail` fails there."""
    come, go = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.close(go)
            pore.tell(use())
            os.read(come, 1)  # the parent has closed it
            status = 0 if error_of(fail).startswith("PoreClosed") and pore.closed else 2
        finally:
            os._exit(status)
    os.close(come)
    yield pore.get(30).value
    pore.close()
    list(pore)
    os.close(go)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_plain_forks_child_neither_closes_it_nor_keeps_it_open():
    pore = poly.Pore(8)

    def write():
        pore.array[0] = 3
        return "child"

    with told_by_a_forks_child(pore, write, lambda: pore.tell(1)) as told:
        assert told == "child"
        assert pore.array[0] == 3


# -- open files ------------------------------------------------------------------------------------


def read_at(pore, offset, size):
    return os.pread(pore.fileno(), size, offset), os.lseek(pore.fileno(), 0, os.SEEK_CUR)


@pytest.mark.guarantee("work-4")
def test_an_open_file_is_the_same_open_file_in_every_image(pool, tmp_path):
    path = tmp_path / "table"
    path.write_bytes(b"0123456789")
    with open(path, "rb") as file:
        pore = poly.Pore(file=file, name="table")
    assert file.closed  # the pore has a descriptor of its own
    with pore:
        os.lseek(pore.fileno(), 7, os.SEEK_SET)
        path.unlink()  # its name is not needed
        assert pool.doit(read_at, pore, 2, 3) == (b"234", 7)
        assert poly.doit(read_at, pore, 0, 1) == (b"0", 7)
        assert pore.nbytes == 0 and "a file" in repr(pore)


def answer_one(pore):
    with socket.fromfd(pore.fileno(), socket.AF_INET, socket.SOCK_STREAM) as listener:
        end, _ = listener.accept()
        with end:
            end.sendall(str(os.getpid()).encode())
    pore.tell(os.getpid())


def test_drones_accept_connections_of_one_listening_socket():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        pore = poly.Pore(file=listener)
    with pore, poly.Pool(3) as pool:
        served = pool.everywhere(answer_one, pore)
        answers = []
        for _ in served:
            with socket.create_connection(address, 30) as end:
                answers.append(int(end.recv(100)))
        assert sorted(answers) == sorted(drone.pid for drone in pool.drones)
        assert sorted(pore.get(30).value for _ in served) == sorted(answers)


def test_a_pipe_of_a_drones_ends_with_it():
    with poly.Drone(name="keeper") as drone:
        drone.doit("import os, polycephaly as poly; ends = os.pipe(); os.write(ends[1], b'there')")
        drone.doit("pore = poly.Pore(file=ends[0], name='pipe')")
        pore = drone["pore"]
        fd = pore.fileno()
        pipe = os.readlink(f"/proc/self/fd/{fd}")
        assert os.read(fd, 100) == b"there"
        drone.kill()
        wait_for(partial(poly.Pore.closed.fget, pore))
        assert error_of(pore.fileno) == error_of(pore.tell, 1)
        with pytest.raises(poly.PoreClosed) as caught:
            pore.fileno()
        assert caught.value.ended and caught.value.pore == "pipe"
        assert os.read(fd, 100) == b""  # the number stays ours for as long as we have the pore
        del pore, caught
        gc.collect()
        assert pipe not in descriptors().values()


def open_files():
    gc.collect()
    return len(descriptors())


def use_and_drop(pore):
    before = open_files()
    first = pore.fileno()
    pore.close()
    second = pore.fileno()  # it is brought once more
    os.fstat(second)
    pore.close()
    assert not os.get_inheritable(pore.fileno())
    return open_files() - before, first >= 0


def test_a_holder_has_no_more_descriptors_than_it_needs(pool, tmp_path):
    drone = pool.drones[0]
    before = drone.doit(open_files)
    with open(tmp_path / "file", "wb") as file, poly.Pore(file=file) as pore:
        assert drone.doit(use_and_drop, pore) == (
            3,
            True,
        )  # the connection, the owner's pidfd, the file
        assert drone.doit(open_files) == before


def test_a_forked_child_is_brought_the_file_anew(tmp_path):
    (tmp_path / "file").write_bytes(b"content")
    with open(tmp_path / "file", "rb") as file, poly.Pore(file=file) as pore, poly.Drone() as drone:
        assert drone.doit(read_at, pore, 0, 7)[0] == b"content"
        assert (
            drone.doit(lambda: poly.doit(read_at, pore, 3, 4)[0]) == b"tent"
        )  # a drone of a holder's
        with told_by_a_forks_child(pore, lambda: read_at(pore, 0, 7)[0], pore.fileno) as told:
            assert told == read_at(pore, 0, 7)[0] == b"content"


def use_in_threads(pore, rounds):
    """Threads that use it, while one closes it again and again."""
    wrong, numbers = [], []

    def use():
        for _ in range(rounds):
            try:
                numbers.append(pore.fileno())
                pore.tell("used")
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        pore.close()
    for thread in threads:
        thread.join()
    return len(numbers), wrong, os.fstat(pore.fileno()).st_size


def test_threads_that_use_and_close_a_file_keep_their_way_to_it(pool, tmp_path):
    with open(tmp_path / "file", "wb") as file, poly.Pore(file=file) as pore:
        told = pool.promise(use_in_threads, pore, 300)
        received = green.spawn(lambda: sum(message.value == "used" for message in pore))
        assert told.result() == (900, [], 0)
        pore.close()
        assert received.value == 900


def test_when_the_owner_has_closed_it_its_socket_is_closed():
    for _ in range(50):
        with socket.create_server(("127.0.0.1", 0)) as listener, poly.Pore(file=listener):
            address = listener.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)


def test_when_the_owner_has_closed_it_no_other_process_can_tell_it_anything(monkeypatch):
    shut_down = Inbox.shut_down

    def shut_down_late(self):
        time.sleep(0.3)
        shut_down(self)

    monkeypatch.setattr(Inbox, "shut_down", shut_down_late)
    pore = poly.Pore(1)
    with poly.Drone() as holder:
        holder["pore"] = pore
        holder.doit("pore.tell(0)")
        pore.close()
        with pytest.raises(poly.PoreClosed):
            holder.doit("pore.tell(1)")
    assert [message.value for message in pore] == [0]


def test_a_file_has_no_memory_and_memory_no_file(tmp_path):
    with (
        open(tmp_path / "file", "wb") as file,
        poly.Pore(file=file, name="log") as pore,
        poly.Pore(8, name="m") as m,
    ):
        for use in (lambda: pore.memory, lambda: pore.array, lambda: pore.write(0, b"x")):
            with pytest.raises(TypeError, match=r"the pore 'log' is an open file .*its `fileno"):
                use()
        with pytest.raises(OSError, match="the pore 'm' is memory and has no file descriptor"):
            m.fileno()
    assert error_of(pore.fileno).startswith("PoreClosed")


def test_what_is_no_file_is_told(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        for how in ({}, {"shape": 8, "file": file}, {"dtype": "i8", "file": file}):
            with pytest.raises(TypeError, match=r"Pore\(shape, dtype\) or Pore\(file=file\)"):
                poly.Pore(**how)
    with pytest.raises(ValueError, match="closed file"):
        poly.Pore(file=file)
    for no_file in ("table", True, 1.5):
        with pytest.raises(TypeError, match=f"not {no_file!r}"):
            poly.Pore(file=no_file)
    for number in (-1, 9999, 1 << 40):
        with pytest.raises(
            ValueError, match=f"{number} is no open file: descriptor {number} does not exist"
        ):
            poly.Pore(file=number)


INTERRUPTED = """
    import gc, os, random, signal, sys, threading, time
    import polycephaly as poly
    from census import descriptors

    dice = random.Random(int(sys.argv[1]))
    over, armed = threading.Event(), False

    def once(*_):
        global armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, once)

    def interrupt():
        while not over.wait(dice.uniform(0.0005, 0.003)):
            os.kill(os.getpid(), signal.SIGINT)

    def use(pore):
        pore.fileno(), pore.tell("used", wait=False), pore.close()

    def make(file):
        with poly.Pore(file=file) as pore:
            pore.fileno()

    def through_interrupts(fn, *args):
        global armed
        over.clear()
        thread = threading.Thread(target=interrupt)
        seen = 0
        thread.start()
        while seen < 200:
            try:
                armed = True
                fn(*args)
                armed = False
            except KeyboardInterrupt:
                seen += 1
        over.set()
        thread.join()

    with poly.Drone() as drone, open(os.devnull) as file:
        drone.doit(
            "import os, polycephaly as poly; ends = os.pipe(); pore = poly.Pore(file=ends[0])"
        )
        pore = drone["pore"]
        use(pore), make(file), gc.collect()
        before = len(descriptors())
        through_interrupts(use, pore)
        through_interrupts(make, file)
        use(pore), make(file), gc.collect()
        while len(descriptors()) > before:  # the io_thread ends
            time.sleep(0.001)
        print("whole", end="")
"""


def test_an_interrupt_at_any_moment_leaves_every_pore_usable():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    done = run_script(
        INTERRUPTED, str(seed)
    )  # on stderr are those that came in a finalizer, where nothing is raised
    assert done.stdout == "whole", done.stderr


# -- who may ---------------------------------------------------------------------------------------


def connect(pore, hello):
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    end.settimeout(30)
    end.connect("\0" + pore._identity.address)
    end.sendall(hello)
    return end


def test_who_does_not_know_the_secret_is_not_let_in_and_nothing_of_his_is_opened():
    with poly.Pore(8) as pore:
        frame = pickle.dumps(_Bad())
        for hello in (b"x" * 16 + b"name", b"x", HEAD.pack(TOLD, len(frame), 0) + frame):
            with connect(pore, hello) as end:
                try:
                    assert end.recv(1) == b""
                except ConnectionResetError:
                    pass
        pore.tell("good")
        assert pore.get().value == "good"


@pytest.mark.parametrize(
    "frame", [HEAD.pack(9, 0, 0), HEAD.pack(TOLD, MAX_MESSAGE_BYTES + 1, 0), os.urandom(1000)]
)
def test_a_malformed_frame_is_dropped_and_harms_nobody_else(frame, caplog):
    with poly.Pore(8) as pore, connect(pore, pore._identity.secret + b"odd one") as end:
        _, fds, _, _ = socket.recv_fds(end, 1, 1)
        os.close(fds[0])
        end.sendall(frame)
        while "odd one" not in caplog.text:
            try:
                pore.get(0.01)
            except TimeoutError:
                pass
        pore.tell("good")
        assert pore.get(30).value == "good"


def test_a_pore_does_not_go_to_a_served_pool(pool, tmp_path):
    card = tmp_path / "pool.json"
    with (
        poly.Pore(8, name="here") as pore,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        promise = remote.promise(len, [pore])
        with pytest.raises(TypeError, match="the pore 'here' is for processes of this machine"):
            promise.result()


def test_a_pore_of_another_machine_says_so():
    with poly.Pore(8, name="far") as pore:
        elsewhere = poly.Pore.__new__(poly.Pore)
        elsewhere._set(
            replace(pore._identity, address="none", owner_start_time="another:1"), (8,), None, 8
        )
        with pytest.raises(
            RuntimeError, match="the pore 'far' is on another machine, in MainProcess"
        ):
            elsewhere.tell(1)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "said"),
    [
        (0, None, ValueError, "a pore of the shape 0 would hold nothing"),
        (-1, None, ValueError, "a pore of the shape -1 would hold nothing"),
        ((3, 0), "i4", ValueError, r"a pore of the shape \(3, 0\) would hold nothing"),
        ((), "i4", TypeError, r"a number of items, or a tuple of numbers, not \(\)"),
        ("10", None, TypeError, "not '10'"),
        (True, None, TypeError, "not True"),
        (1.5, None, TypeError, "not 1.5"),
        (
            (1 << 20, 1 << 30),
            "i8",
            MemoryError,
            "a pore of 9,007,199,254,740,992 bytes is larger than half of this mach",
        ),
        (3, object, TypeError, "a pore cannot hold object"),
        (3, "no such type", TypeError, "no such type"),
    ],
)
def test_what_cannot_be_its_shape_is_told(shape, dtype, error, said):
    with pytest.raises(error, match=said):
        poly.Pore(shape, dtype)


def test_a_shape_may_be_what_numpy_takes_for_one():
    np = pytest.importorskip("numpy")
    for shape in ([2, 3], (np.int64(2), 3), np.zeros((2, 3)).shape):
        with poly.Pore(shape, "f8") as pore:
            assert pore.array.shape == (2, 3)
    with poly.Drone() as drone, poly.Pore(np.int64(4)) as pore:
        assert pore.nbytes == 4 and drone.doit(lambda pore: pore.array.shape, pore) == (4,)


def test_a_pore_for_which_there_is_no_descriptor_leaves_nothing_behind():
    told = output_of("""
        import ctypes, os, resource  # Debian's ctypes keeps a file open from 3.14 on
        import polycephaly as poly

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        before = descriptors()
        poly.Pore(1).close()
        while descriptors() > before:  # the io_thread ends when it has no more to serve
            os.sched_yield()
        for more in range(5):  # it needs four, and then the io_thread has to accept
            resource.setrlimit(
                resource.RLIMIT_NOFILE,
                (before + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),
            )
            try:
                poly.Pore(1)
            except OSError as error:
                print(error.strerror)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, [resource.getrlimit(resource.RLIMIT_NOFILE)[1]] * 2
        )
        while descriptors() > before:
            os.sched_yield()
        with poly.Pore(1) as pore:
            pore.tell("again")
            print(pore.get().value)
    """)
    *errors, last = told.splitlines()
    assert (set(errors), last) == ({"Too many open files"}, "again")


def test_who_finds_no_descriptor_left_with_the_owner_waits_until_there_is_one():
    told = output_of("""
        import os, resource
        import polycephaly as poly

        with poly.Drone() as drone, poly.Pore(1) as pore:
            limits = resource.getrlimit(resource.RLIMIT_NOFILE)
            drone.doit(int)
            taken = [os.dup(0) for _ in range(64)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, limits[1]))
            telling = drone.promise(pore.tell, "late")
            from polycephaly.store.pores import io_thread as io
            while not io.io_thread.timers.heap:
                os.sched_yield()
            os.close(taken.pop())
            print(pore.get(30).value, telling.value)
    """)
    assert told == "late True\n"


def tell_with_no_descriptor_left_but(free, pore):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(64)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, limits[1]))
    try:
        for _ in range(free):
            os.close(taken.pop())
        pore.tell("too early")
    except OSError as error:
        return error.strerror
    finally:
        for each in taken:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("free", [0, 1])
def test_who_has_no_descriptor_left_itself_is_told_and_may_try_again(free):
    with poly.Drone() as drone, poly.Pore(1, name="mine") as pore:
        drone.doit(int)
        told = drone.doit(tell_with_no_descriptor_left_but, free, pore)
        assert (
            told == "Too many open files"
            or "no file descriptor is left for the pore 'mine'" in told
        )
        drone.doit(pore.tell, "now")
        assert pore.get(30).value == "now"


def test_what_is_not_inside_or_too_large_is_told():
    with poly.Pore(8, name="small") as pore:
        for offset, data in ((-1, b"x"), (8, b"x"), (0, b"x" * 9)):
            with pytest.raises(ValueError, match="not inside the pore 'small' of 8"):
                pore.write(offset, data)
        with pytest.raises(ValueError, match="too large for the pore 'small', which takes 32,000"):
            pore.tell(bytes(MAX_MESSAGE_BYTES))
        with pytest.raises(TypeError, match="the name of a pore is a string, not 5"):
            poly.Pore(8, name=5)


@pytest.mark.parametrize(
    "data",
    [
        np.arange(20)[::3],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.zeros((0, 3)),
        np.ones(3, "i2,f8"),
        np.array(5, ">i4"),
        memoryview(b"abcdef")[::-2],
        b"",
    ],
    ids=["strided", "Fortran", "no items", "structured", "one item", "backwards", "empty"],
)
def test_any_buffer_can_be_written(data):
    with poly.Pore(100) as pore:
        assert pore.write(1, data)
        size = memoryview(data).nbytes
        assert pore.get(30) == Message("MainProcess", "wrote", None, 1, size)
        assert bytes(pore.memory[1 : 1 + size]) == memoryview(data).tobytes()


def test_a_write_of_more_than_four_gibibytes_can_be_told():
    frame = HEAD.pack(WROTE, 5 << 30, 1 << 40)
    (split,), rest = split_frames(b"", frame)
    assert message_of("a", split) == Message("a", "wrote", None, 1 << 40, 5 << 30) and not rest


# -- all at once -----------------------------------------------------------------------------------


def count_up(pore, cell, start):
    """Writes a number, tells it, and the next."""
    numbers = pore.array
    n = start
    while True:
        n += 1
        numbers[cell] = n
        pore.tell((cell, n))


@pytest.mark.slow
def test_writers_killed_at_random_lose_no_more_than_what_they_were_about_to_tell():
    seed = random.randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)

    def hear():
        cell, n = pore.get(30).value
        assert n == last[cell] + 1, "lost, doubled or out of order"
        last[cell] = n

    with poly.Pore(3, "i8") as pore, ExitStack() as living:
        drones = [living.enter_context(poly.Drone()) for _ in range(3)]
        counting = [drone.promise(count_up, pore, cell, 0) for cell, drone in enumerate(drones)]
        last = [0, 0, 0]
        for _ in range(10):
            for _ in range(dice.randrange(1, 400)):
                hear()
            cell = dice.randrange(3)
            os.kill(drones[cell].pid, signal.SIGKILL)
            assert isinstance(counting[cell].exception(30), poly.DroneDied)
            while drones[cell].name in [
                member.name for member in list(pore._inbox.holders.values())
            ]:
                hear()  # the others go on telling
            # With all that the dead one has told; the others may never let it be empty.
            for _ in range(len(pore._inbox.frames)):
                hear()
            assert last[cell] in (int(pore.array[cell]), int(pore.array[cell]) - 1)
            last[cell] = pore.array[cell] = 0
            drones[cell] = living.enter_context(poly.Drone())
            counting[cell] = drones[cell].promise(count_up, pore, cell, 0)
        for drone in drones:
            drone.kill()


def tell_until_closed(pore, who, large):
    """How many were told."""
    for n in itertools.count():
        try:
            pore.tell((who, n, "x" * large))
        except poly.PoreClosed:
            return n
    raise AssertionError


def test_closed_at_a_random_moment_every_tell_was_received_or_refused(pool):
    seed = random.randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)
    for _ in range(15):
        large = dice.choice([1, 100, 30_000])
        pore = poly.Pore(1)
        tellers = {who: pool.promise(tell_until_closed, pore, who, large) for who in ("a", "b")}
        tellers["here"] = green.spawn(tell_until_closed, pore, "here", large)
        tellers["there"] = green.spawn(tell_until_closed, pore, "there", large)
        values = [pore.get(30).value for _ in range(dice.randrange(1, 200))]
        pore.close()
        values += [message.value for message in pore]
        told = {who: [n for name, n, _ in values if name == who] for who in tellers}
        for who, numbers in told.items():
            assert numbers == list(range(tellers[who].result(30))), (who, large)


@pytest.mark.slow
def test_whenever_the_owner_is_killed_all_its_holders_hear_of_it():
    seed = random.randrange(10**9)
    print("seed", seed)
    dice = random.Random(seed)
    with poly.Pool(2) as writers:
        for _ in range(6):
            owner = poly.Drone()
            owner.doit("import polycephaly as poly; pore = poly.Pore(3, 'i8')")
            pore = owner["pore"]
            if dice.random() < 0.5:
                owner.promise(
                    "for message in pore: pass"
                )  # else nobody receives, and all will wait for room
            counting = [writers.promise(count_up, pore, cell, 0) for cell in range(2)]
            here = threading.Thread(target=error_of, args=(count_up, pore, 2, 0))
            here.start()
            until = dice.randrange(1, 100)
            while min(pore.array) < until and not all(each.done() for each in counting):
                os.sched_yield()
            os.kill(owner.pid, signal.SIGKILL)
            assert [type(each.exception(30)) for each in counting] == [poly.PoreClosed] * 2
            here.join(30)
            assert not here.is_alive() and pore.closed
            owner.kill()
            assert not alive(owner.pid)


def test_a_finalizer_may_make_one_while_the_first_is_made(monkeypatch):
    def start(thread):
        if not made:
            made.append(None)
            made[0] = poly.Pore(1)
        begin(thread)

    made, begin = [], io.PoreIOThread.start
    monkeypatch.setattr(io.PoreIOThread, "start", start)
    with poly.Pore(1) as pore, made[0] as other:
        for each in (pore, other, poly.Pore(1)):
            each.tell("here")
            assert each.get(30).value == "here"
    other._inbox.loop.thread.join(30)


def test_a_finalizer_may_close_it_at_the_end_of_the_interpreter():
    """The I/O thread, a daemon, does not run then."""
    assert output_of("""
        import sys

        import polycephaly as poly

        class Holder:
            pore = poly.Pore(1)

            def __del__(self, is_finalizing=sys.is_finalizing):
                self.pore.close()
                print(is_finalizing())

        holder = Holder()
    """) == "True\n"  # fmt: skip


def test_a_message_to_a_pore_that_was_closed_is_an_error_whatever_sigpipe_does():
    assert output_of("""
        import signal
        import polycephaly as poly
        from polycephaly import green
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with poly.Pool(1) as pool:
            (drone,) = pool.drones
            pore = drone.doit("import polycephaly as poly; pore = poly.Pore(10); pore")
            pore.tell(1)
            drone.doit("pore.close()")
            try:
                pore.tell(2)
            except poly.PoreClosed:
                print("closed")
    """).split() == ["closed"]
