"""`Retry`: tasks that run again after an exception. First the decision alone, then the pool's part
in a time that the tests move (in_time.py), then each engine."""

import abc
import gc
import os
import pickle
import signal
import time
import weakref
from concurrent.futures import CancelledError
from contextlib import ExitStack
from pickle import dumps
from unittest import mock

import numpy
import pytest
from engines import RAY, poly
from faults import append, hold_until, lines, wait_for
from in_time import dispatcher_of, give

from polycephaly import DroneDied, Retry
from polycephaly.engines.remote.connection import Connection
from polycephaly.pool.handlers import handle_records
from polycephaly.pool.limits import GRACE_STEPS
from polycephaly.pool.retry import MAX_DELAY_SECONDS
from polycephaly.pool.task_promise import facts_of
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.exceptions import pack_exception
from polycephaly.wire.messages import (
    CANCEL,
    ERROR,
    RETURNED,
    WITHDRAWN,
    message_type,
    pack_returned,
)

GRACE = tuning.grace_seconds
STEP = GRACE / GRACE_STEPS

# -- the decision ----------------------------------------------------------------------------------


def delays(retry, error, attempts, random=lambda: 1.0):
    with mock.patch("polycephaly.pool.retry._random", random):
        return [retry.next_delay(error, n) for n in range(1, attempts + 1)]


def test_delays_grow_and_end():
    retry = Retry(4, delay=0.5, factor=3, jitter=False)
    assert delays(retry, ValueError(), 6) == [0.5, 1.5, 4.5, 13.5, None, None]
    assert delays(Retry(0), ValueError(), 1) == [None]


def test_jitter_takes_up_to_half_of_a_delay():
    retry = Retry(2, delay=4)
    assert delays(retry, ValueError(), 2, lambda: 0.0) == [2, 4]
    assert delays(retry, ValueError(), 2, lambda: 0.5) == [3, 6]
    assert delays(retry, ValueError(), 2, lambda: 1.0) == [4, 8]
    assert 2 <= retry.next_delay(ValueError(), 1) <= 4


def test_no_delay_is_longer_than_a_day_and_none_overflows():
    retry = Retry(10_000, delay=1, factor=10, jitter=False)
    assert {*delays(retry, OSError(), 10_000)[5:]} == {MAX_DELAY_SECONDS}
    assert {*delays(Retry(10_000, delay=0, factor=10), OSError(), 10_000)} == {0}
    assert Retry(9, delay=1e300, jitter=False).next_delay(OSError(), 9) == MAX_DELAY_SECONDS


def test_errors_match_as_in_an_except_clause():
    class Virtual(abc.ABC, Exception):
        pass

    Virtual.register(KeyError)
    retry = Retry(1, on=(LookupError, Virtual))
    assert retry.covers(KeyError()) and retry.covers(IndexError())
    assert not retry.covers(ValueError()) and not Retry(1, on=Virtual).covers(KeyError())
    for error in (KeyboardInterrupt(), SystemExit(), GeneratorExit()):
        assert not Retry(1).covers(error)
    assert Retry(1).covers(TimeoutError()) and not retry.covers(TimeoutError())
    assert Retry(1, on=()).covers(DroneDied("it died")) and not Retry(1, on=()).covers(OSError())


def test_a_policy_is_a_value():
    retry = Retry(2, on=ValueError, delay=1)
    assert retry == Retry(2, on=(ValueError,), delay=1.0) != Retry(2)
    assert len({retry, pickle.loads(dumps(retry)), Retry(2)}) == 2
    with pytest.raises(AttributeError):
        retry.times = 3


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ({"times": -1}, ValueError, "times must be at least 0, not -1"),
        ({"times": 1.0}, TypeError, "times is a whole number, not 1.0"),
        ({"times": True}, TypeError, "times is a whole number, not True"),
        ({"delay": -0.5}, ValueError, "delay must be finite and at least 0, not -0.5"),
        ({"delay": float("inf")}, ValueError, "delay must be finite and at least 0, not inf"),
        ({"delay": "1"}, TypeError, "delay is a number, not '1'"),
        ({"factor": 0.9}, ValueError, "factor must be finite and at least 1, not 0.9"),
        ({"factor": float("nan")}, ValueError, "factor must be finite and at least 1, not nan"),
        ({"jitter": 0.5}, TypeError, "jitter is True or False, not 0.5"),
        ({"on": ValueError()}, TypeError, r"on is an exception class or a tuple .* ValueError\(\)"),
        ({"on": [ValueError]}, TypeError, "on is an exception class or a tuple of them"),
        ({"on": (ValueError, int)}, TypeError, "on is an exception class .* <class 'int'>"),
        ({"on": KeyboardInterrupt}, TypeError, "KeyboardInterrupt, which is no Exception: "),
        ({"on": (OSError, BaseException)}, TypeError, "BaseException, which is no Exception: "),
    ],
)
def test_wrong_input_is_refused_with_its_value(wrong, kind, message):
    with pytest.raises(kind, match=message):
        Retry(**{"times": 1} | wrong)


@pytest.mark.parametrize("wrong", [ValueError, 1.5, (ValueError,)])
def test_what_is_neither_a_number_nor_a_policy_is_refused(wrong):
    with pytest.raises(TypeError, match=r"whole number or a polycephaly\.Retry, not "):
        poly.flow(retries=wrong)


# -- in a pool -------------------------------------------------------------------------------------

TWICE = Retry(2, on=(OSError, TimeoutError), delay=1, factor=3, jitter=False)  # after 1 s and 3 s
FAILED_TWICE = ["failed 2 times; this is the last error"]


@pytest.fixture
def dispatcher(reactor):
    return dispatcher_of(reactor, 1)


@pytest.fixture
def handle(dispatcher):
    return dispatcher.handles[0]


def error_of(task, error):
    return (task.number, ERROR, 0.0, 0.0, pack_exception(error, dumps), b"")


def fail(handle, task, error=None):
    entry = error_of(task, OSError("out of order") if error is None else error)
    handle_records(handle.dispatcher, handle, {0: entry})
    handle.dispatcher.reactor.turn()


def is_idle(dispatcher):
    return not (dispatcher.pending() or dispatcher.state.delayed)


def test_a_failed_task_is_sent_again_after_its_delays(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, retries=TWICE)
    for delay in (1, 3):
        fail(handle, task)
        assert not task.promise.done() and not handle.in_flight and not task.promise.running()
        reactor.pass_(delay - 0.01)
        assert not handle.in_flight
        reactor.pass_(0.02)
        assert [*handle.in_flight.values()] == [task] and task.args == (-1,)
    handle.answers(task, 1)
    assert task.promise.result() == 1


def test_the_delay_holds_no_drone(reactor, dispatcher, handle):
    first = give(dispatcher, abs, -1, retries=TWICE)
    fail(handle, first)
    second = give(dispatcher, abs, -2)
    handle.answers(second, 2)
    assert second.promise.result() == 2 and not first.promise.done() and dispatcher.pending() == 1


def test_the_last_error_tells_how_often_the_task_has_failed(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, retries=TWICE)
    for number in range(3):
        fail(handle, task, OSError(number))
        reactor.pass_(3)
    assert task.promise.exception().args == (2,)
    assert task.promise.exception().__notes__ == ["failed 3 times; this is the last error"]
    assert task.payload == b"" and is_idle(dispatcher)


def test_an_error_that_does_not_match_is_final(reactor, dispatcher, handle):
    first, second = (give(dispatcher, abs, -n, retries=TWICE) for n in (1, 2))
    fail(handle, first, ValueError("wrong"))
    assert isinstance(first.promise.exception(), ValueError)
    assert not hasattr(first.promise.exception(), "__notes__")
    fail(handle, second)
    reactor.pass_(1)
    fail(handle, second, KeyboardInterrupt())
    assert isinstance(second.promise.exception(), KeyboardInterrupt)
    assert second.promise.exception().__notes__ == FAILED_TWICE
    assert is_idle(dispatcher)


def test_only_a_task_with_a_policy_keeps_its_arguments(reactor, dispatcher, handle):
    argument = [1]
    plain, retried = (give(dispatcher, len, argument, retries=each) for each in (2, TWICE))
    packed = retried.payload
    assert packed
    fail(handle, plain)
    assert isinstance(plain.promise.exception(), OSError)
    assert plain.payload == b"" and plain.recompute_payload is None
    argument.append(2)
    fail(handle, retried)
    assert retried.payload is packed
    reactor.pass_(1)
    fail(handle, retried, ValueError())
    assert retried.payload == b"" and retried.recompute_payload is None


def test_a_cancelled_task_is_not_repeated(reactor, dispatcher, handle):
    delayed, running = (give(dispatcher, abs, -n, retries=TWICE) for n in (1, 2))
    fail(handle, delayed)
    assert delayed.promise.cancel(running=False)
    reactor.turn()
    assert running.promise.cancel()
    fail(handle, running)
    reactor.pass_(10)
    assert delayed.promise.cancelled() and running.promise.cancelled()
    assert not handle.in_flight and not handle.kills
    assert is_idle(dispatcher)


def test_a_task_that_is_cancelled_before_its_failure_is_known_stays_cancelled(
    reactor, dispatcher, handle
):
    task = give(dispatcher, abs, -1, retries=TWICE)
    handle_records(dispatcher, handle, {0: error_of(task, OSError())})
    assert task.promise.cancel()
    reactor.turn()
    assert task.promise.cancelled() and is_idle(dispatcher)


@pytest.mark.guarantee("death-6")
def test_a_pool_that_closes_waits_for_the_repetition(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, retries=TWICE)
    dispatcher.close()
    handle_records(dispatcher, handle, {0: error_of(task, OSError())})
    reactor.critical_section()  # when the drone is idle, and the error not yet opened
    assert dispatcher.handles == [handle] and handle.state.name == "READY"
    reactor.pass_(1)
    handle.answers(task, 1)
    assert task.promise.result() == 1
    handle.dies()
    assert dispatcher.has_ended


@pytest.mark.parametrize("how", ["cancelling", "killing", "breaking"])
def test_a_pool_that_ends_at_once_settles_delayed_tasks(reactor, dispatcher, handle, how):
    task = give(dispatcher, abs, -1, retries=TWICE)
    fail(handle, task)
    if how == "cancelling":
        dispatcher.close(cancel=True)
    elif how == "killing":
        dispatcher.kill()
    else:
        dispatcher.break_pool(RuntimeError("broken"))
    reactor.turn()
    with pytest.raises(RuntimeError if how == "breaking" else CancelledError):
        task.promise.result(0)
    assert not dispatcher.state.delayed and not dispatcher.state.parked
    handle.dies()
    assert dispatcher.has_ended


def test_a_delayed_task_takes_up_room_in_the_queue(reactor):
    dispatcher = dispatcher_of(reactor, 1, max_queued=1)
    task = give(dispatcher, abs, -1, retries=TWICE)
    assert dispatcher.has_room()
    fail(dispatcher.handles[0], task)
    assert not dispatcher.has_room()
    reactor.pass_(1)
    assert dispatcher.has_room()


def test_the_answer_to_one_attempt_does_not_settle_the_next(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, retries=TWICE)
    answer = handle.answer(task, "late")
    fail(handle, task)
    reactor.pass_(1)
    handle_records(dispatcher, handle, answer)
    reactor.turn()
    assert not task.promise.done() and [*handle.in_flight.values()] == [task]


def test_a_task_whose_drone_dies_waits_like_one_that_fails(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    task = give(dispatcher, abs, -1, retries=Retry(1, on=(), delay=1, jitter=False))
    one, two = dispatcher.handles
    one.dies()
    reactor.pass_(0.9)
    assert not two.in_flight
    reactor.pass_(0.2)
    assert [*two.in_flight.values()] == [task]
    two.dies()
    assert (
        isinstance(task.promise.exception(), DroneDied)
        and task.promise.exception().__notes__ == FAILED_TWICE
    )


def test_a_task_for_one_drone_is_repeated_there_only(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    one, two = dispatcher.handles
    tasks = [give(dispatcher, abs, -n, retries=Retry(9, delay=1), target=one) for n in range(3)]
    fail(one, tasks[0])
    reactor.pass_(1)
    assert tasks[0].number in one.in_flight or tasks[0] in one.dedicated
    while not one.is_running(tasks[2].number):
        one.answers(one.in_flight[one.last_started()])
    fail(one, tasks[2])
    dispatcher.supervisor.retire(one)
    reactor.turn()
    assert one.state.name == "RETIRING"  # for the delayed one
    one.dies()
    reactor.pass_(1)
    assert isinstance(tasks[2].promise.exception(), DroneDied) and not two.in_flight


@pytest.mark.parametrize("is_late", [False, True])
def test_a_task_for_one_drone_is_not_repeated_after_the_death_of_that(reactor, handle, is_late):
    task = give(handle.dispatcher, abs, -1, timeout=1, retries=TWICE, target=handle)
    reactor.pass_(is_late)
    handle.dies()
    assert isinstance(task.promise.exception(0), TimeoutError if is_late else DroneDied)
    assert is_idle(handle.dispatcher)


@pytest.mark.parametrize("on_death", ["replace", "end"])
def test_a_task_that_is_delayed_when_its_only_drone_dies_is_rejected_at_once(reactor, on_death):
    dispatcher = dispatcher_of(reactor, 1, on_death=on_death)
    [handle] = dispatcher.handles
    task = give(dispatcher, pow, 2, 3, retries=Retry(2, delay=3600), target=handle)
    fail(handle, task)
    handle.dies()
    assert isinstance(task.promise.exception(0), DroneDied)
    assert not dispatcher.state.parked and not dispatcher.state.delayed
    assert dispatcher.has_ended == (on_death == "end")


def test_an_input_is_there_when_its_task_has_succeeded(reactor, dispatcher, handle):
    first = give(dispatcher, abs, -1, retries=TWICE)
    second = give(dispatcher, abs, first.promise)
    number = first.call_number
    fail(handle, first)
    assert not second.promise.done()
    reactor.pass_(1)
    handle.answers(first, 7)
    handle.answers(second, 7)
    assert second.promise.result() == 7
    assert second.input_numbers == (number,) and first.number != number == first.call_number


# -- time limits -----------------------------------------------------------------------------------


@pytest.mark.guarantee("death-6")
def test_a_task_that_is_out_of_time_runs_again_when_it_has_stopped(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, timeout=1, retries=TWICE)
    reactor.pass_(1)
    assert handle.got(CANCEL) == [task.number] and not task.promise.done() and handle.in_flight
    fail(handle, task, KeyboardInterrupt())
    assert not handle.in_flight
    reactor.pass_(1)
    assert task.number in handle.in_flight
    reactor.pass_(0.9)
    assert len(handle.got(CANCEL)) == 1  # the limit begins anew
    handle.answers(task, 1)
    assert task.promise.result() == 1


def test_the_last_attempt_is_rejected_at_its_limit(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, timeout=1, retries=Retry(1, delay=0))
    reactor.pass_(1)
    fail(handle, task, KeyboardInterrupt())
    reactor.pass_(1)
    assert isinstance(task.promise.exception(0), TimeoutError)
    assert task.promise.exception().__notes__ == FAILED_TWICE


def test_without_timeout_error_in_the_policy_the_limit_is_final(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, timeout=1, retries=Retry(1, on=ValueError))
    reactor.pass_(1)
    assert isinstance(task.promise.exception(0), TimeoutError)


def test_an_answer_that_is_handled_before_the_rejection_is_recorded_as_out_of_time(
    reactor, dispatcher, handle, monkeypatch
):
    task, send = give(dispatcher, abs, -1, timeout=1), handle.send

    def stop_at_once(frames, tasks=()):
        send(frames, tasks)
        if message_type(frames) == CANCEL:
            entry = error_of(task, KeyboardInterrupt())
            handle_records(dispatcher, handle, {0: entry})

    monkeypatch.setattr(handle, "send", stop_at_once)
    reactor.pass_(1)
    assert isinstance(task.promise.exception(0), TimeoutError)
    assert [each.status for _, each in dispatcher.record.entries] == ["timeout"]


def test_a_value_that_comes_in_spite_of_the_interrupt_counts(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, timeout=1, retries=TWICE)
    reactor.pass_(1)
    handle.answers(task, 1)
    assert task.promise.result(0) == 1 and is_idle_after_grace(reactor, dispatcher)


def is_idle_after_grace(reactor, dispatcher):
    reactor.pass_(2 * GRACE)
    return is_idle(dispatcher)


def test_the_grace_of_one_attempt_does_not_kill_the_next(reactor, dispatcher, handle):
    task = give(dispatcher, abs, -1, timeout=1, retries=Retry(1, delay=0))
    reactor.pass_(1)
    reactor.pass_(GRACE - STEP)
    fail(handle, task, KeyboardInterrupt())
    reactor.pass_(0.9)
    assert task.number in handle.in_flight and not handle.kills


@pytest.mark.parametrize("width", [1, 3])
def test_a_task_that_does_not_stop_is_killed_with_its_drone_and_repeated(reactor, width):
    dispatcher = dispatcher_of(reactor, 2, width=width)

    async def sleep_on():
        raise AssertionError("nothing is run here")

    task = give(dispatcher, sleep_on, timeout=1, retries=TWICE)
    one, two = dispatcher.handles
    reactor.pass_(1 + GRACE + STEP)
    assert one.kills and not task.promise.done()
    one.dies()
    reactor.pass_(1)
    assert [*two.in_flight.values()] == [task]


@pytest.mark.parametrize("how", [WITHDRAWN, RETURNED])
def test_a_task_whose_time_is_over_before_it_begins_has_another_try(
    reactor, dispatcher, handle, how
):
    task = give(dispatcher, abs, -1, timeout=1, retries=TWICE)
    reactor.pass_(1)
    returned = (pack_returned([(task.number, 0)]),)
    withdrawn = (task.number, WITHDRAWN, 0.0, 0.0, b"", b"")
    handle_records(dispatcher, handle, {0: returned if how == RETURNED else withdrawn})
    reactor.pass_(0.9)
    assert not task.promise.done() and not handle.in_flight
    reactor.pass_(0.1)
    assert task.number in handle.in_flight
    reactor.pass_(0.9)
    handle.answers(task, 1)
    assert (
        task.promise.result() == 1 and is_idle_after_grace(reactor, dispatcher) and not handle.kills
    )


# -- on each engine --------------------------------------------------------------------------------

on_three_engines = pytest.mark.parametrize("engine", ["local", "inline", RAY], indirect=True)
AT_ONCE = {"delay": 0.001}


def fail_until(path, times, *args):
    """Raise `ConnectionError` in all calls but the last of `times`."""
    append(path, "called")
    if len(lines(path)) < times:
        raise ConnectionError(len(lines(path)))
    return len(lines(path)), *args


def change_and_fail(path, array, numbers):
    array += 1
    numbers.append(1)
    fail_until(path, 3)
    return float(array.sum()), len(numbers)


@pytest.mark.guarantee("death-6")
@on_three_engines
def test_a_task_that_fails_at_first_succeeds(engine, tmp_path):
    retry = poly.Retry(3, on=ConnectionError, **AT_ONCE)
    with poly.Pool(2, retries=retry) as pool:
        assert pool.doit(fail_until, str(tmp_path / "a"), 3, "x") == (3, "x")
        failed = pool.promise(fail_until, str(tmp_path / "b"), 9).exception()
        assert isinstance(failed, ConnectionError) and failed.args == (4,)
        assert failed.__notes__ == ["failed 4 times; this is the last error"]
        with pytest.raises(ConnectionError):
            pool.options(retries=0).doit(fail_until, str(tmp_path / "c"), 2)
        path = str(tmp_path / "kept")
        kept = pool.promise(fail_until, path, 2, keep=True).value
        assert kept.value == (2,)
        assert pool.doit(fail_until, str(tmp_path / "d"), 2, kept) == (2, (2,))
        inputs = [pool.promise(fail_until, str(tmp_path / f"{n}"), 2) for n in range(3)]
        assert pool.promise(len, inputs).value == 3
        drone = pool.drones[0]
        assert drone.doit(fail_until, str(tmp_path / "one drone"), 3) == (3,)


@on_three_engines
def test_a_map_repeats_the_call_that_failed(engine, tmp_path):
    with poly.Pool(2) as pool:
        pool.doit(abs, -1)
        paths = [str(tmp_path / f"{n}") for n in range(20)]
        results = pool.options(retries=poly.Retry(1, **AT_ONCE)).map(
            fail_until, paths, [1 + n % 2 for n in range(20)]
        )
        assert list(results) == [(1 + n % 2,) for n in range(20)]
        assert [len(lines(path)) for path in paths] == [1 + n % 2 for n in range(20)]


@pytest.mark.parametrize("engine", ["local", "inline"], indirect=True)
def test_each_attempt_gets_the_arguments_of_the_call(engine, tmp_path):
    array, numbers = numpy.zeros(1_000_000), []
    with poly.Pool(1) as pool:
        retried = pool.options(retries=poly.Retry(2, **AT_ONCE))
        promise = retried.promise(change_and_fail, str(tmp_path / "a"), array, numbers)
        array += 7
        numbers.append(7)
        assert promise.value == (1_000_000, 1)


@pytest.mark.parametrize("engine", ["local", "inline"], indirect=True)
def test_a_block_ends_after_the_last_attempt(engine, tmp_path):
    with poly.Pool(1) as pool:
        promise = pool.options(retries=poly.Retry(2, delay=0.2)).promise(
            fail_until, str(tmp_path / "a"), 3
        )
        with poly.Drone(retries=poly.Retry(2, delay=0.2)) as drone:
            other = drone.promise(fail_until, str(tmp_path / "b"), 3)
    assert promise.done() and other.done() and promise.value == other.value == (3,)


def die_until(path, times):
    append(path, "called")
    if len(lines(path)) < times:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    return len(lines(path))


def fail_differently(path, times):
    """Fall silent in the first of `times` calls, and die in the others but the last."""
    append(path, "called")
    if len(lines(path)) < times:
        if len(lines(path)) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(100)
    return len(lines(path))


@pytest.mark.parametrize("engine", ["local", RAY], indirect=True)
def test_deaths_and_limits_and_errors_are_counted_together(engine, tmp_path):
    with poly.Pool(2, output="discard") as pool:
        retried = pool.options(timeout=0.5, retries=poly.Retry(2, **AT_ONCE))
        one, other = (
            retried.promise(fail_differently, str(tmp_path / name), times)
            for name, times in (("a", 3), ("b", 9))
        )
        # A limit strikes any attempt during which the machine stood still, perhaps before its line.
        error = one.exception()
        attempts = len(lines(str(tmp_path / "a")))
        assert error is None or isinstance(error, TimeoutError) or attempts < 3
        assert isinstance(other.exception(), (DroneDied, TimeoutError))
        assert other.exception().__notes__ == ["failed 3 times; this is the last error"]
        assert len(lines(str(tmp_path / "b"))) <= 3


def test_each_attempt_is_in_the_timeline_and_the_graph_has_one_node(tmp_path):
    flaky = poly.flow(retries=poly.Retry(2, **AT_ONCE))(fail_until)
    with poly.Pool(1) as pool:
        first = flaky(str(tmp_path / "a"), 3)
        second = flaky(str(tmp_path / "b"), 2, first)
        assert second.value == (2, (3,))
        spans = pool.timeline.spans
    assert sorted(span.status for span in spans) == ["done", "done", "error", "error", "error"]
    one, two = poly.Graph(second).nodes
    assert two.inputs == (one.number,) and {one.state, two.state} == {"done"}


# -- in a served pool ------------------------------------------------------------------------------


def test_a_client_repeats_calls_of_a_served_pool(remote, tmp_path):
    retried = remote.options(retries=poly.Retry(2, **AT_ONCE))
    assert retried.doit(fail_until, str(tmp_path / "a"), 3) == (3,)
    failed = retried.promise(fail_until, str(tmp_path / "b"), 9).exception()
    assert failed.args == (3,)
    assert failed.__notes__ == ["failed 3 times; this is the last error"]
    assert retried.doit(die_until, str(tmp_path / "c"), 3) == 3
    assert len(lines(tmp_path / "c")) == 3
    died = retried.promise(die_until, str(tmp_path / "d"), 9).exception()
    assert isinstance(died, DroneDied) and len(lines(tmp_path / "d")) == 3
    on_one = remote.drones[0].options(retries=poly.Retry(2, **AT_ONCE))
    assert isinstance(on_one.promise(die_until, str(tmp_path / "e"), 9).exception(), DroneDied)
    assert len(lines(tmp_path / "e")) == 1
    with remote.share(bytearray(1_000_000)) as shared:
        path = str(tmp_path / "f")
        assert retried.promise(fail_until, path, 3, shared).then(lambda v: len(v[1])).value == 10**6


def test_a_client_that_closes_waits_for_the_repetition_or_cancels_it(tmp_path):
    card = str(tmp_path / "pool.json")
    with poly.Pool(1) as pool, poly.serve(pool, file=card):
        with poly.connect(card) as remote:
            retried = remote.options(retries=poly.Retry(2, delay=0.1))
            waited_for = retried.promise(fail_until, str(tmp_path / "a"), 3)
        assert waited_for.result(60) == (3,)
        with poly.connect(card) as remote:
            late = remote.options(retries=poly.Retry(2, delay=1000))
            cancelled, left = (late.promise(fail_until, str(tmp_path / n), 9) for n in "bc")
            connection: Connection = remote._dispatcher
            wait_for(lambda: len(connection._waiting) == 2 and not connection._in_flight)
            wait_for(lambda: facts_of(cancelled).first_number)
            assert cancelled.cancel(running=False)
            remote.shutdown(cancel_futures=True)
        assert left.cancelled()


@pytest.mark.parametrize("served", [False, True])
def test_waiting_repetitions_are_cancelled_with_the_queue(tmp_path, served):
    policy = poly.Retry(100, delay=0.0, jitter=False)
    log = tmp_path / "log"

    def fail_when_told():
        append(str(log), "run")
        hold_until(str(tmp_path / "go"))
        raise KeyError("x")

    with poly.Pool(1, output="discard") as local, ExitStack() as stack:
        pool = local
        if served:
            card = str(tmp_path / "card.json")
            stack.enter_context(poly.serve(local, "tcp://127.0.0.1:0", file=card))
            pool = stack.enter_context(poly.connect(card))
        failing = pool.options(retries=policy).promise(fail_when_told)
        wait_for(lambda: log.exists())
        pool.shutdown(wait=False, cancel_futures=True)
        end = pool._dispatcher  # or the connection
        wait_for(lambda: end._recall_sent if served else end.state.has_cancelled)
        (tmp_path / "go").touch()
        assert isinstance(failing.exception(30), KeyError)
        assert log.read_text().count("run") == 1


def test_a_cancelled_delay_gives_up_the_arguments(tmp_path):
    card = str(tmp_path / "card.json")
    with poly.Pool(1, output="discard") as local, ExitStack() as stack:
        stack.enter_context(poly.serve(local, "tcp://127.0.0.1:0", file=card))
        pool = stack.enter_context(poly.connect(card))
        policy = poly.Retry(3, delay=1000)
        promise = pool.options(retries=policy).promise("1 / 0")
        wait_for(lambda: pool._dispatcher._delayed)
        dropped = weakref.ref(promise)
        promise.cancel()
        del promise
        wait_for(lambda: gc.collect() is not None and dropped() is None)
