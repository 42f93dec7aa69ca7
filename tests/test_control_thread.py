"""The control socket of a drone: what goes there, and how it comes behind what it is about."""

import os
import sys
import threading
import time
from collections import deque
from types import SimpleNamespace
from unittest import mock

import pytest

import polycephaly as poly
from polycephaly.engines.local import handle as local_handle
from polycephaly.engines.local.drone import ControlThread, LocalDrone
from polycephaly.engines.local.handle import LocalHandle
from polycephaly.runtime import fork_guard
from polycephaly.wire.message_socket import MessageSocket
from polycephaly.wire.messages import (
    CANCEL,
    POSITION,
    RECALL,
    STOP,
    TELL,
    WORK,
    message_type,
    pack_numbers,
)
from polycephaly.wire.status_page import PAGE_BYTES, StatusPage

CANCELS, RECALLS, TELLS = pack_numbers(CANCEL, (1,)), pack_numbers(RECALL), pack_numbers(TELL)


def work(text):
    return [WORK + text, b""]


@pytest.fixture
def controllers_end():
    mine, its = MessageSocket.pair()
    with mine, its:
        yield SimpleNamespace(socket=MessageSocket(mine), its=MessageSocket(its))


@pytest.fixture
def drone(controllers_end):
    """One without a process, which notes what it has handled."""
    drone = LocalDrone.__new__(LocalDrone)
    drone._socket, drone._received, drone._put_off = controllers_end.its, 0, deque()
    drone.socket_lock, drone._waiting, drone._stopping = threading.Lock(), False, False
    drone._todo, drone._overlap = [], SimpleNamespace(running={})
    drone._drone_store = SimpleNamespace(requested=[])
    drone.handled, drone.woken, drone.beats = [], 0, 0
    drone._handle_message = drone.handled.append
    drone.send_requested_values = lambda: drone.handled.append("values")

    def beat():
        drone.beats += 1

    def wake():
        drone.woken += 1

    drone.beat, drone._wake_in_any_case = beat, wake
    return drone


def test_what_was_sent_through_the_work_socket_before_is_handled_first(drone, controllers_end):
    controllers_end.socket.send(work(b"1"))
    controllers_end.socket.send(work(b"2"))
    drone.obey([*CANCELS, POSITION.pack(2)])
    assert drone.handled == [work(b"1"), work(b"2"), CANCELS, "values"] and drone.beats == 1


def test_a_message_is_put_off_until_what_was_sent_before_has_come(drone, controllers_end):
    controllers_end.socket.send(work(b"1"))
    drone.obey([*CANCELS, POSITION.pack(2)])
    drone.obey([*RECALLS, POSITION.pack(2)])
    assert drone.handled == [work(b"1"), "values", "values"]
    drone.obey([*TELLS, POSITION.pack(0)])  # it is about nothing that was sent
    assert drone.handled[3:] == [TELLS, "values"]
    for text in (b"2", b"3"):
        controllers_end.socket.send(work(text))
    drone.receive_all()  # as the main thread does, too
    assert drone.handled[5:] == [work(b"2"), CANCELS, RECALLS, work(b"3")]


def test_and_is_not_overtaken_by_another(drone, controllers_end):
    drone.obey([*CANCELS, POSITION.pack(2)])
    controllers_end.socket.send(work(b"1"))
    drone.obey([*RECALLS, POSITION.pack(1)])
    controllers_end.socket.send(work(b"2"))
    drone.receive_all()
    handled = [each for each in drone.handled if each != "values"]
    assert handled == [work(b"1"), work(b"2"), CANCELS, RECALLS]


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # by which its thread ends
def test_the_control_thread_reads_the_work_socket_for_what_is_put_off(drone, controllers_end):
    handled = threading.Event()
    note = drone._handle_message

    def handle(frames):
        note(frames)
        if frames == CANCELS:
            handled.set()
            raise SystemExit  # of the thread

    drone._handle_message = handle
    mine, its = MessageSocket.pair()
    with mine, its, mock.patch.object(os, "_exit", lambda status: sys.exit()):
        thread = ControlThread(drone, MessageSocket(its)).thread
        try:
            urgent = MessageSocket(mine)
            urgent.send([*CANCELS, POSITION.pack(1)])
            urgent.send([*TELLS, POSITION.pack(0)])
            while TELLS not in drone.handled:
                time.sleep(0.001)
            assert not handled.is_set()
            controllers_end.socket.send(work(b"1"))
            assert handled.wait(30)
            thread.join(30)
        finally:
            fork_guard.remove_thread_lock(thread)
    assert [each for each in drone.handled if each != "values"] == [TELLS, work(b"1"), CANCELS]


def test_what_the_main_thread_has_received_is_not_waited_for(drone, controllers_end):
    controllers_end.socket.send(work(b"1"))
    drone.receive_all()
    drone.obey([*CANCELS, POSITION.pack(1)])
    assert drone.handled == [work(b"1"), CANCELS, "values"]


@pytest.mark.parametrize("frames", [[b"1234567"], [*CANCELS, b""], [*CANCELS, bytes(9)]])
def test_a_message_without_a_position_is_dropped(drone, frames, caplog):
    drone.obey(frames)
    assert not drone.handled and "malformed" in caplog.text


def test_a_main_thread_that_sleeps_is_woken_for_what_has_come(drone):
    drone._waiting = True
    drone.obey([*CANCELS, POSITION.pack(0)])
    assert drone.handled == [CANCELS] and not drone.woken
    drone._todo.append("a task")
    drone.obey([*CANCELS, POSITION.pack(0)])
    assert drone.woken == 1
    drone._todo.clear()
    drone._drone_store.requested.append(7)  # it packs them itself
    drone.obey([*CANCELS, POSITION.pack(0)])
    assert drone.woken == 2 and drone.handled == [CANCELS] * 3


class Line:
    socket = None

    def __init__(self):
        self.sent = []

    def send(self, frames):
        self.sent.append(frames)


class FakeTask:
    def __init__(self, calls_left=1):
        self.calls_left = calls_left


@pytest.fixture
def handle():
    """One of a drone with two calls, whose time is set by the test."""
    handle = LocalHandle.__new__(LocalHandle)
    handle.work, handle.control = Line(), Line()
    handle._works, handle._beats_seen, handle._listens = 0, -1, False
    handle.status_page = StatusPage(memoryview(bytearray(PAGE_BYTES)))
    handle.in_flight, handle.last_contact_at = {1: FakeTask(), 2: FakeTask()}, 100.0
    handle.timers = []
    clock = SimpleNamespace(now=lambda: handle.now)
    handle.now = 100.0
    handle.dispatcher = SimpleNamespace(
        reactor=SimpleNamespace(timers=clock),
        call_later=lambda seconds, callback: handle.timers.append((seconds, callback)),
    )
    return handle


def pass_time(handle, seconds):
    handle.now += seconds
    [(_, callback)] = handle.timers
    handle.timers.clear()
    callback()


def test_an_urgent_message_tells_how_many_others_were_sent_before(handle):
    for frames in (work(b"1"), CANCELS, work(b"2"), pack_numbers(STOP), CANCELS):
        handle.send(frames)
    assert handle.work.sent == [work(b"1"), work(b"2"), pack_numbers(STOP)]
    assert handle.control.sent == [[*CANCELS, POSITION.pack(1)], [*CANCELS, POSITION.pack(3)]]
    handle.send(TELLS)
    assert handle.control.sent[2:] == [[*TELLS, POSITION.pack(0)]]


def test_a_drone_with_several_calls_that_is_silent_is_asked_once(handle):
    handle.send(work(b"2"))
    handle.send(work(b"2"))
    [(seconds, _)] = handle.timers
    assert seconds == local_handle.SILENT_SECONDS
    pass_time(handle, seconds)
    assert [message_type(each) for each in handle.control.sent] == [TELL] and not handle.timers


def test_one_that_has_answered_meanwhile_is_listened_to_again(handle):
    handle.send(work(b"2"))
    handle.last_contact_at += local_handle.SILENT_SECONDS / 2
    pass_time(handle, local_handle.SILENT_SECONDS)
    assert not handle.control.sent
    pass_time(handle, local_handle.SILENT_SECONDS)
    assert len(handle.control.sent) == 1


@pytest.mark.parametrize("left", [{}, {2: FakeTask()}])
def test_one_that_has_at_most_one_call_left_is_not_asked(handle, left):
    handle.send(work(b"2"))
    handle.in_flight = left
    pass_time(handle, local_handle.SILENT_SECONDS)
    assert not handle.control.sent and not handle.timers
    handle.send(work(b"3"))
    assert not handle.timers


def test_one_that_runs_a_chunk_has_several_calls(handle):
    handle.in_flight = {1: FakeTask(calls_left=2)}
    handle.send(work(b"1"))
    assert handle.timers


def test_no_other_question_is_asked_before_the_last_one_was_heard(handle):
    assert handle.ask_for_beat() and not handle.ask_for_beat()
    assert len(handle.control.sent) == 1
    handle.status_page.beats += 1
    assert handle.ask_for_beat()
    assert len(handle.control.sent) == 2


def test_an_interrupt_hits_no_task_that_is_submitted_after_it():
    with poly.Drone() as drone:
        for number in range(200):
            drone.interrupt()
            assert drone.promise(abs, -number).result() == number


def test_what_code_of_a_task_writes_to_the_control_socket_is_dropped(handle):
    mine, its = MessageSocket.pair()
    unwatched = []
    handle.dispatcher.reactor.unwatch = unwatched.append
    with mine, its:
        handle.control.socket = MessageSocket(mine)
        for packet in (b"!", b"anything"):
            its.send(packet)
            handle._on_control()
        assert not unwatched
        its.close()
        handle._on_control()
        assert unwatched == [mine.fileno()]


def hold(seconds):
    time.sleep(seconds)
    return threading.current_thread() is threading.main_thread()


def test_a_busy_drone_gives_a_kept_value_and_its_stack_and_takes_a_recall():
    with poly.Pool(1) as pool:
        kept = pool.promise(list, "abc", keep=True).value
        held = pool.promise(hold, 1000)
        while not held.running():
            time.sleep(0.001)
        assert kept.value == ["a", "b", "c"]
        assert "hold" in str(pool.drones[0].stack())
        pool.resize(2)
        assert pool.doit(abs, -1) == 1
        assert held.cancel(running=True)
