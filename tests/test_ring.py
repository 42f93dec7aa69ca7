"""The ring by which a drone answers (wire/ring.py), in pools: kills at each store, rings that are
full, controllers that stand still. Its format is in test_wire.py."""

import os
import signal
import time
from types import SimpleNamespace

import exactly_once
import pytest
from fuzz import this_drone
from scripts import Script

import polycephaly as poly
from polycephaly.engines.local import drone as local_drone
from polycephaly.engines.local.drone import LocalDrone
from polycephaly.memory.arena import Full
from polycephaly.pool.drone_record import DroneRecord
from polycephaly.wire.ring import RING_BYTES


class KillingMemory:
    """The memory of a ring in a drone. The process is killed at one of the stores into it."""

    stores = 0

    def __init__(self, memory, store, after):
        self.memory, self.store, self.after = memory, store, after

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, at):
        return self.memory[at]

    def __setitem__(self, at, value):
        KillingMemory.stores += 1
        is_it = KillingMemory.stores == self.store
        if is_it and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.memory[at] = value
        if is_it:
            os.kill(os.getpid(), signal.SIGKILL)


def kill_at(store, after):
    drone = this_drone()
    drone._outcomes.add_processor_time = lambda *call: None  # a record of calls that take long
    ring = drone._ring
    ring._cells = KillingMemory(ring._cells, store, after)
    ring._bytes = KillingMemory(ring._bytes, store, after)


def note(path, number, kind):
    with open(path, "a") as file:
        file.write(f"{number}\n")
    return number if kind == "small" else [number]


@pytest.mark.guarantee("death-2")
@pytest.mark.parametrize("kind", ["small", "pickled"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("store", range(3, 9))
def test_a_drone_that_is_killed_at_a_store_loses_the_call_whose_end_was_not_stored(
    store, after, kind, tmp_path
):
    """Of each record, the first store is of its bytes, the second of its end. The first record is
    that of `kill_at`."""
    path = str(tmp_path / "calls")
    with poly.Pool(1, output="discard") as pool:
        pool.doit(note, path, -1, kind)
        pool.doit(kill_at, store, after)
        calls = [pool.promise(note, path, number, kind) for number in range(12)]
        errors = [each.exception(60) for each in calls]
        assert pool.doit(abs, -1) == 1
    lost = [number for number, error in enumerate(errors) if error is not None]
    is_stored = store % 2 == 0 and after
    killed_in = (store - 3) // 2
    assert lost == [] if is_stored else lost == [killed_in]
    assert all(isinstance(errors[number], poly.DroneDied) for number in lost)
    values = [each.value for each, error in zip(calls, errors, strict=True) if error is None]
    kept = [number for number in range(12) if number not in lost]
    assert values == (kept if kind == "small" else [[number] for number in kept])
    with open(path) as file:
        assert sorted(map(int, file)) == [-1, *range(12)]


def many_bytes(size):
    return os.urandom(16) * (size // 16)


def refuse_shared_memory():
    """On a drone: so that large values go through the ring."""
    this_drone()._store.put = this_drone()._store.put_pickle = _no_room


def _no_room(*args):
    raise Full("no room")


@pytest.mark.filterwarnings("ignore:no shared memory")
@pytest.mark.parametrize("size", [RING_BYTES // 4, RING_BYTES, 16 * RING_BYTES + 5])
def test_a_value_that_is_longer_than_the_ring_comes_in_pieces(size):
    with poly.Pool(2, output="discard") as pool:
        for each in pool.everywhere(refuse_shared_memory):
            each.result(60)
        values = [pool.promise(many_bytes, size) for _ in range(6)]
        for each in values:
            value = each.result(60)
            assert len(value) == size // 16 * 16 and value == value[:16] * (size // 16)
        assert [*pool.map(abs, range(-20_000, 0))] == [*range(20_000, 0, -1)]


def fork_after(seconds, value):
    end = time.monotonic() + seconds
    os.fork()
    while time.monotonic() < end:
        pass
    return value


@pytest.mark.parametrize("value", [None, 7, [7]], ids=["none", "small", "pickled"])
@pytest.mark.parametrize("keywords", [False, True], ids=["small arguments", "a pickle"])
def test_a_child_that_a_task_has_forked_writes_nothing_into_the_ring(value, keywords):
    with poly.Pool(1, output="discard") as pool:
        for _ in range(40):
            if keywords:
                call = pool.promise(fork_after, 0.003, value=value)
            else:
                call = pool.promise(fork_after, 0.003, value)
            assert call.result(30) == value
        assert pool.doit(abs, -1) == 1


def huge(seconds):
    time.sleep(seconds)
    return 1 << 30_000_000


def test_a_call_that_has_ended_in_time_is_not_out_of_time_while_its_answer_waits_for_room():
    code = """
        import polycephaly as poly
        from test_ring import huge, refuse_shared_memory

        with poly.Pool(1) as pool:
            pool.doit(refuse_shared_memory)
            call = pool.options(timeout=2).promise(huge, 0.3)
            print("sent", flush=True)
            print(call.value.bit_length(), flush=True)
    """
    with Script(code) as script:
        script.read_until("sent")
        time.sleep(0.1)
        os.kill(script.process.pid, signal.SIGSTOP)
        time.sleep(3)
        os.kill(script.process.pid, signal.SIGCONT)
        script.read_until("30000001")


def test_a_drone_may_wait_for_room_for_long(monkeypatch):
    waited = []
    monkeypatch.setattr(local_drone, "sleep", waited.append)
    drone = LocalDrone.__new__(LocalDrone)
    drone._status_page = SimpleNamespace(full=0)
    drone._socket = SimpleNamespace(ring=bool, is_open=lambda: True)
    drone.beat = bool
    for waits in (0, 1, 5000):
        drone._wait_for_room(waits)
    assert waited[:2] == [0.0002, 0.0004] and 0.01 < waited[2] < 0.1


def close_all_and_open_files(folder):
    os.closerange(3, 4096)
    for number in range(40):
        os.open(f"{folder}/{number}", os.O_CREAT | os.O_WRONLY)
    return 5


def test_a_drone_whose_descriptors_are_closed_writes_into_no_other_file(tmp_path):
    with poly.Pool(1, output="discard") as pool:
        pool.promise(close_all_and_open_files, str(tmp_path)).exception(60)
        assert pool.promise(abs, -1).result(60) == 1
    assert {each.stat().st_size for each in tmp_path.iterdir()} == {0}


def test_drones_wait_for_a_controller_that_stands_still_and_lose_nothing():
    code = """
        import os, signal, sys, time
        import polycephaly as poly

        def value(number):
            return str(number) * 40

        with poly.Pool(2) as pool:
            pool.doit(abs, -1)
            print("ready", flush=True)
            calls = [pool.promise(value, i) for i in range(40_000)]
            print([each.value for each in calls] == [value(i) for i in range(40_000)], flush=True)
    """
    with Script(code) as script:
        script.read_until("ready")
        for _ in range(5):
            time.sleep(0.05)
            os.kill(script.process.pid, signal.SIGSTOP)
            time.sleep(0.4)
            os.kill(script.process.pid, signal.SIGCONT)
        script.read_until("True")


@pytest.mark.guarantee("death-2")
def test_of_many_calls_each_runs_once_or_is_reported():
    counts = exactly_once.run(300_000, seed=5)
    assert counts["done"] + counts["cancelled"] + counts["lost"] == 300_000
    assert counts["deaths"]


def test_calls_that_ran_twice_are_found(monkeypatch):
    """A planted fault: of a dead drone, nothing is known to have begun."""
    take_fates = DroneRecord.take_fates
    monkeypatch.setattr(
        DroneRecord, "take_fates", lambda self, begun, call=0: take_fates(self, (), call)
    )
    with pytest.raises(AssertionError, match=r"ha(s|ve) run"):
        exactly_once.run(3_000_000, seed=5)
