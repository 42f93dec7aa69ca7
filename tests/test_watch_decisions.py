"""The watch: what it decides by the clock and by what it is told, in a time that the tests move
(in_time.py).

What the kernel and a drone's page tell of a real one is shown by test_watch.py.
"""

import logging
import math
import pickle
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from in_time import (
    A_MOMENT,
    WHY,
    FakeZygote,
    about,
    dispatcher_of,
    give,
    give_chunk,
    make_ready,
    overlapped,
    submitted,
)

from polycephaly.pool import health
from polycephaly.pool.dispatcher_base import pool_error
from polycephaly.pool.health import BUSY_FRACTION, MEMORY_CHECK_SECONDS, NEAR_LIMIT_FRACTION
from polycephaly.pool.interfaces import State, TaskOptions
from polycephaly.pool.items import with_item
from polycephaly.pool.population import MAX_FAILED_STARTS, MAX_KILLED_STARTS
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.messages import FRAMES, STOP
from polycephaly.wire.output import Line

LOOK, QUIET, STOPPED = (
    tuning.health_check_seconds,
    tuning.stalled_seconds,
    tuning.stopped_zygote_seconds,
)
FIRST = LOOK  # when the first pulse of what is begun at 0 is felt
LIMIT = 1000 << 20
HOUR = 3600


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO, "polycephaly.pool.health")


@pytest.fixture
def zygote(monkeypatch):
    zygote = FakeZygote()
    monkeypatch.setattr(health, "state_of", lambda pid: zygote.state if pid == zygote.pid else "")
    return zygote


def busy(reactor, given=None, **config):
    """The one drone of a pool, and its running task."""
    dispatcher = dispatcher_of(reactor, 1, **config)
    task = give(dispatcher, sleep, 1) if given is None else given(dispatcher)
    return dispatcher.handles[0], task


def sleep(seconds):
    raise AssertionError("nothing is run here")


async def overlapped_too(x):
    return x


def told(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def times_of_looks(every, until):
    return about(*(every * step for step in range(1, int(until / every) + 1)))


# -- when it looks ---------------------------------------------------------------------------------


def test_no_timer_runs_while_there_is_nothing_to_look_at(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    reactor.pass_(LOOK)  # the last look at their start
    assert not reactor.timers.heap
    reactor.pass_(HOUR)
    task = give(dispatcher, sleep, 1)
    assert len(reactor.timers.heap) == 1
    task.handle.answers(task)
    reactor.pass_(LOOK)
    assert not reactor.timers.heap and len(dispatcher.handles[0].felt) == 0


@pytest.mark.parametrize(
    ("config", "every"),
    [
        ({}, LOOK),
        ({"hang_timeout": 4 * LOOK + 1}, LOOK),
        ({"hang_timeout": 1.0}, 0.25),
        ({"report_waiting": 60.0}, LOOK),
        ({"report_waiting": 0.4}, 0.1),
        ({"max_memory": LIMIT}, MEMORY_CHECK_SECONDS),
        ({"max_memory": LIMIT, "hang_timeout": 60.0, "report_waiting": 60.0}, MEMORY_CHECK_SECONDS),
        ({"hang_timeout": 1.0, "report_waiting": 0.4}, 0.1),
        ({"hang_timeout": 0.5, "report_waiting": 4.0}, 0.125),
    ],
)
def test_a_busy_drone_is_looked_at_every_so_often(config, every, reactor):
    handle, _ = busy(reactor, **config)
    reactor.pass_(4.01)
    assert handle.felt == times_of_looks(every, 4.01)


def test_more_work_sets_no_more_timers(reactor):
    dispatcher = dispatcher_of(reactor, 1, width=9)
    (handle,) = dispatcher.handles
    for each in range(9):
        give(dispatcher, overlapped, each)
        reactor.pass_(0.7 * LOOK)
    assert handle.felt == times_of_looks(LOOK, 0.7 * LOOK * 9) and len(reactor.timers.heap) == 1


def test_only_who_has_work_is_felt_for_a_pulse(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    task = give(dispatcher, sleep, 1)
    reactor.pass_(3)
    idle = next(handle for handle in dispatcher.handles if handle is not task.handle)
    assert task.handle.felt and not idle.felt


def test_with_a_limit_of_memory_idle_drones_are_looked_at_too_till_the_dispatcher_has_ended(
    reactor,
):
    dispatcher = dispatcher_of(reactor, 1, max_memory=LIMIT)
    reactor.pass_(60)
    assert len(reactor.timers.heap) == 1 and not dispatcher.handles[0].felt
    dispatcher.kill()
    reactor.turn()
    dispatcher.handles[0].dies()
    assert dispatcher.has_ended
    reactor.pass_(60)
    assert not reactor.timers.heap


def test_a_bug_in_a_look_breaks_its_dispatcher(reactor, caplog):
    handle, task = busy(reactor)
    dispatcher = handle.dispatcher
    del dispatcher.fail  # that of the class, which raises nothing
    handle.heartbeat = Mock(side_effect=ValueError("its clock is wrong"))
    reactor.pass_(HOUR)
    with pytest.raises(BrokenProcessPool, match="its clock is wrong"):
        dispatcher.submit(sleep, (1,), {})
    with pytest.raises(BrokenProcessPool, match="its clock is wrong"):
        task.promise.result(0)
    assert [each.getMessage() for each in caplog.records] == ["a bug in polycephaly breaks pool"]


def test_an_error_breaks_the_pool_with_the_reason_of_an_engine_that_is_lost(reactor, caplog):
    dispatcher = dispatcher_of(reactor, 1)
    del dispatcher.fail
    dispatcher.supervisor.engine.loss = lambda: RuntimeError("the cluster is gone")
    dispatcher.post(lambda: {}["it"])
    reactor.turn()
    with pytest.raises(RuntimeError, match="the cluster is gone"):
        dispatcher.submit(sleep, (1,), {})
    assert not caplog.records


# -- signs of life ---------------------------------------------------------------------------------


def test_one_without_a_pulse_is_told_once_when_it_was_quiet_for_so_long(reactor, caplog):
    handle, _ = busy(reactor)
    handle.quiet = True
    reactor.pass_(FIRST + QUIET - A_MOMENT)
    assert handle.unresponsive is None and not told(caplog)
    reactor.pass_(2 * A_MOMENT)
    assert handle.unresponsive == WHY
    reactor.pass_(HOUR)
    assert told(caplog) == [
        f"drone pool.0 (pid {handle.pid}) does not respond: {WHY}; its running task is sleep"
    ]


def test_of_several_tasks_the_warning_names_the_one_that_was_begun_last(
    reactor, monkeypatch, caplog
):
    dispatcher = dispatcher_of(reactor, 1, width=3)
    (handle,) = dispatcher.handles
    _, last = [give(dispatcher, what, 1) for what in (overlapped, overlapped_too)]
    monkeypatch.setattr(handle, "last_started", lambda: last.number)
    handle.quiet = True
    reactor.pass_(3)
    assert told(caplog)[0].endswith("; its running task is overlapped_too")


def test_one_that_runs_nothing_yet_is_told_without_what_it_was_running(reactor, caplog):
    (handle,) = dispatcher_of(reactor, 1, ready=False).handles
    handle.starts()
    handle.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    assert told(caplog) == [f"drone pool.0 (pid {handle.pid}) does not respond: {WHY}"]


def test_who_has_a_pulse_now_and_then_is_not_told(reactor, caplog):
    handle, _ = busy(reactor)
    for _ in range(100):
        handle.quiet = True
        reactor.pass_(QUIET - LOOK)
        handle.quiet = False
        reactor.pass_(LOOK)
    assert handle.unresponsive is None and not caplog.records


def test_one_that_is_idle_is_not_told_whatever_it_does(reactor, caplog):
    (handle,) = dispatcher_of(reactor, 1).handles
    handle.quiet = True
    reactor.pass_(HOUR)
    assert not handle.felt and not caplog.records


@pytest.mark.parametrize("waits", [True, False])
def test_one_with_a_beat_is_felt_only_for_its_waits(reactor, waits, monkeypatch):
    handle, _ = busy(reactor, report_waiting=60.0 if waits else None)
    monkeypatch.setattr(handle, "beat", lambda: reactor.now)
    monkeypatch.setattr(handle, "activity", lambda threads: (reactor.now, threads))
    reactor.pass_(31)
    assert handle.felt == (about(FIRST, FIRST + 15, FIRST + 30) if waits else [])
    monkeypatch.setattr(handle, "beat", lambda: "none any more")
    handle.quiet = True
    reactor.pass_(31 + LOOK + QUIET - reactor.passed - A_MOMENT)
    assert not handle.unresponsive
    reactor.pass_(LOOK)
    assert handle.unresponsive == WHY


def test_one_whose_main_thread_computes_is_not_felt_for_its_waits(reactor, monkeypatch):
    handle, _ = busy(reactor, report_waiting=60.0)
    handle.did, computes = "started 1", True
    monkeypatch.setattr(handle, "beat", lambda: reactor.now)
    monkeypatch.setattr(handle, "main_seconds", lambda: reactor.now if computes else 1.0)
    reactor.pass_(10 * 60 + FIRST)
    assert handle.felt == about(FIRST, FIRST + 15)
    computes = False
    reactor.pass_(60 - A_MOMENT)
    assert not handle.got(FRAMES) and len(handle.felt) > 2
    reactor.pass_(15)  # since it was last seen to compute
    assert handle.got(FRAMES)


def test_one_that_is_quiet_is_given_nothing_till_it_has_a_pulse_again(reactor, caplog):
    handle, running = busy(reactor)
    handle.dispatcher.registry.define(sleep).record_duration(
        1e-4, 1
    )  # known to be short: it would be sent ahead
    handle.load, handle.unknown = 1e-4, 0
    handle.changed()
    running.sending.estimate = 1e-4
    handle.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    waiting = give(handle.dispatcher, sleep, 2, target=handle)
    reactor.pass_(10)
    assert waiting.number not in handle.in_flight
    handle.quiet = False
    reactor.pass_(LOOK)
    assert handle.unresponsive is None and waiting.number in handle.in_flight
    reactor.pass_(HOUR)
    assert told(caplog, logging.INFO) == [f"drone pool.0 (pid {handle.pid}) responds again"]
    assert len(told(caplog)) == 1


def test_each_silence_is_told(reactor, caplog):
    handle, _ = busy(reactor)
    for _ in "12":
        handle.quiet = True
        reactor.pass_(QUIET + 2 * LOOK)
        handle.quiet = False
        reactor.pass_(LOOK)
    assert len(told(caplog)) == len(told(caplog, logging.INFO)) == 2


def test_one_that_answers_and_has_nothing_more_to_do_counts_as_responsive(reactor, caplog):
    handle, task = busy(reactor)
    handle.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    waiting = give(handle.dispatcher, sleep, 2, target=handle)
    handle.answers(task)
    assert handle.unresponsive and not handle.in_flight
    reactor.pass_(LOOK)
    assert handle.unresponsive is None and waiting.number in handle.in_flight


def test_what_is_queued_goes_to_others_while_one_is_quiet(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    # Known to be short: it would be sent ahead.
    dispatcher.registry.define(abs).record_duration(1e-4, 1)
    held, other = (give(dispatcher, abs, each) for each in "12")
    held.handle.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    other.handle.answers(other)
    queued = [give(dispatcher, abs, each) for each in "123"]
    assert all(task.handle is other.handle for task in queued)
    held.handle.answers(held)
    reactor.pass_(LOOK)
    assert give(dispatcher, abs, 1).handle is held.handle


@pytest.mark.parametrize("heard", ["before the look", "after the look"])
def test_what_waits_for_one_that_answered_while_this_process_stood_still_is_sent(heard, reactor):
    handle, task = busy(reactor)
    handle.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    waiting = give(handle.dispatcher, sleep, 2, target=handle)
    assert handle.unresponsive
    if heard == "before the look":
        handle.answers(task)
        reactor.stand_still(HOUR)
    else:
        reactor.stand_still(HOUR)
        handle.answers(task)
        reactor.pass_(LOOK)
    assert waiting.number in handle.in_flight


def test_its_silence_is_counted_anew_with_new_work(reactor, caplog):
    """Also where it was looked on meanwhile, as another one had work."""
    dispatcher = dispatcher_of(reactor, 2)
    task, _ = [give(dispatcher, sleep, each) for each in "12"]
    handle = task.handle
    handle.quiet = True
    reactor.pass_(QUIET)
    handle.answers(task)
    reactor.pass_(2 * LOOK)
    give(dispatcher, sleep, 1)
    assert handle.in_flight
    reactor.pass_(FIRST + QUIET - A_MOMENT)
    assert not told(caplog)
    reactor.pass_(2 * A_MOMENT)
    assert told(caplog)


def test_what_was_seen_before_an_idle_time_counts_for_nothing(reactor, caplog):
    """Nobody looks meanwhile; and that is no standstill of ours."""
    handle, task = busy(reactor)
    handle.quiet = True
    reactor.pass_(FIRST)
    handle.answers(task)
    reactor.pass_(HOUR + LOOK / 2)
    give(handle.dispatcher, sleep, 1)
    reactor.pass_(2 * LOOK)
    assert not told(caplog)
    reactor.pass_(QUIET)
    assert told(caplog)


def test_it_looks_on_where_one_is_quiet_and_another_ends(reactor, caplog):
    dispatcher = dispatcher_of(reactor, 2)
    tasks = [give(dispatcher, sleep, each) for each in (1, 2)]
    tasks[0].handle.quiet = True
    reactor.pass_(FIRST + QUIET - LOOK)
    tasks[1].handle.answers(tasks[1])
    reactor.pass_(LOOK + A_MOMENT)
    assert tasks[0].handle.unresponsive and not tasks[1].handle.unresponsive


@pytest.mark.parametrize("hang", [None, 3.0])
def test_only_with_hang_timeout_it_is_killed_and_after_that(hang, reactor):
    handle, _ = busy(reactor, hang_timeout=hang)
    handle.quiet = True
    reactor.pass_(FIRST + 3.0 - A_MOMENT)
    assert handle.unresponsive and not handle.kills
    reactor.pass_(HOUR)
    if hang is None:
        assert not handle.kills
    else:
        assert (
            handle.kills == about(FIRST + 3.0)
            and handle.kill_reason == f"the drone did not respond for 3.0 s: {WHY}"
        )


def test_with_a_short_hang_timeout_it_is_told_and_killed_at_one_look(reactor, caplog):
    handle, _ = busy(reactor, hang_timeout=1.0)
    handle.quiet = True
    reactor.pass_(1.25 - A_MOMENT)  # it is looked at four times as often
    assert not told(caplog) and not handle.kills
    reactor.pass_(2 * A_MOMENT)
    assert len(told(caplog)) == 1 and handle.kills == about(1.25)


def test_one_that_is_being_killed_gets_no_more_work_if_it_responds_again(reactor):
    handle, task = busy(reactor, hang_timeout=3.0)
    handle.quiet = True
    reactor.pass_(FIRST + 3.0 + A_MOMENT)
    handle.quiet = False
    task.handle.answers(task)
    reactor.pass_(LOOK + A_MOMENT)
    assert handle.kills and not handle.unresponsive and not handle.can_take()


def test_one_that_is_being_killed_for_something_else_keeps_its_verdict(reactor):
    handle, _ = busy(reactor, hang_timeout=3.0)
    handle.quiet = True
    handle.kill("it held too much")
    reactor.pass_(HOUR)
    assert len(handle.kills) == 1 and handle.kill_reason == "it held too much"


def test_one_whose_start_hangs_is_killed_too(reactor, zygote):
    (handle,) = dispatcher_of(reactor, 1, ready=False, launcher=zygote, hang_timeout=3.0).handles
    handle.quiet = True
    reactor.pass_(HOUR)
    assert not handle.felt  # it has no pid
    handle.starts()
    reactor.pass_(3.0 + 2 * LOOK)
    assert len(handle.kills) == 1


# -- this process itself does not run --------------------------------------------------------------


def test_a_standstill_of_this_process_is_not_held_against_drones(reactor, caplog):
    handle, _ = busy(reactor, hang_timeout=3.0)
    handle.quiet = True
    reactor.pass_(FIRST + LOOK)
    reactor.stand_still(2 * LOOK + QUIET / 4 + 0.01)
    reactor.pass_(QUIET - A_MOMENT)
    assert not told(caplog)
    reactor.stand_still(HOUR)
    reactor.pass_(QUIET - A_MOMENT)
    assert not told(caplog) and not handle.kills
    reactor.pass_(1 + LOOK)
    assert told(caplog) and handle.kills


@pytest.mark.parametrize("hang_timeout", [None, 1.0])
def test_one_whose_answer_was_not_read_yet_is_not_told(hang_timeout, reactor, caplog):
    handle, task = busy(reactor, hang_timeout=hang_timeout)
    handle.quiet = True  # with nothing to do
    handle.unread.append(handle.answer(task, 7))
    reactor.pass_(HOUR)
    assert not told(caplog) and not handle.kills and task.promise.result(0) == 7


def test_one_that_is_quiet_still_is_after_a_standstill_of_this_process(reactor, caplog):
    handle, _ = busy(reactor, hang_timeout=10.0)
    handle.quiet = True
    handle.threads = {"looks up": (1.0, 0.0)}
    reactor.pass_(QUIET + FIRST + LOOK)
    assert len(told(caplog)) == 1
    handle.threads = {"looks up": (2.0, 0.0)}  # in all that time
    reactor.stand_still(100.0)
    reactor.pass_(3 * QUIET)
    assert handle.unresponsive and len(told(caplog)) == 1 and not handle.kills
    reactor.pass_(10.0)
    assert len(handle.kills) == 1


def test_a_start_that_hangs_where_no_zygote_could_tell_of_it_is_seen(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, hang_timeout=3.0)
    (handle,) = dispatcher.handles
    reactor.pass_(60.0)
    handle.starts()
    handle.quiet = True
    reactor.pass_(60.0)
    assert len(handle.kills) == 1


def test_a_look_that_is_late_on_a_busy_machine_is_no_standstill(reactor, caplog):
    handle, _ = busy(reactor)
    handle.quiet = True
    reactor.pass_(FIRST + LOOK)
    reactor.stand_still(2 * LOOK + QUIET / 4 - 0.01)  # after that look
    reactor.pass_(QUIET - 4 * LOOK + LOOK)
    assert told(caplog)


# -- threads ---------------------------------------------------------------------------------------


def compute(reactor, handle, seconds, ran, waited=0.0):
    """As long as `seconds`, a thread of it runs and waits for a processor such a part of the
    time."""
    handle.quiet = True
    for _ in range(int(seconds / LOOK)):
        before = handle.threads.get("7", (5.0, 5.0))
        handle.threads["7"] = before[0] + ran * LOOK, before[1] + waited * LOOK
        reactor.pass_(LOOK)


@pytest.mark.parametrize(
    ("ran", "waited", "lives"),
    [
        (1.0, 0.0, True),
        (BUSY_FRACTION * 1.05, 0.0, True),
        (BUSY_FRACTION * 0.95, 0.0, False),  # it looks up for the interpreter
        (0.0, 0.0, False),
        (BUSY_FRACTION * 0.55, 0.5, True),  # of what other processes have left it
        (BUSY_FRACTION * 0.45, 0.5, False),
        (0.01, 0.99, True),
        (0.0, 1.0, False),
        (0.01, 1.5, True),  # reckoned by two clocks
        (0.0, 1.5, False),
    ],
)
def test_a_thread_that_computes_is_a_sign_of_life_and_one_that_looks_up_is_none(
    ran, waited, lives, reactor
):
    handle, _ = busy(reactor)
    compute(reactor, handle, 10 * QUIET, ran, waited)
    assert (handle.unresponsive is None) == lives


def test_what_a_thread_has_computed_is_reckoned_since_the_last_sign_of_life(reactor):
    handle, _ = busy(reactor)
    handle.threads["7"] = (50.0, 50.0)
    compute(reactor, handle, 10, 0.0)
    assert handle.unresponsive
    compute(reactor, handle, LOOK, 1.0)
    assert handle.unresponsive
    compute(reactor, handle, QUIET, 1.0)  # by now it is a tenth
    assert handle.unresponsive is None
    compute(reactor, handle, QUIET + LOOK, 0.0)
    assert handle.unresponsive


def test_a_new_thread_that_computes_is_a_sign_of_life(reactor):
    handle, _ = busy(reactor)
    handle.quiet = True
    reactor.pass_(3 * LOOK)
    handle.threads["8"] = (LOOK, 0.0)
    reactor.pass_(QUIET)
    assert handle.unresponsive is None
    reactor.pass_(LOOK)
    assert handle.unresponsive


# -- zygotes ---------------------------------------------------------------------------------------


def test_who_is_being_started_is_awaited_by_its_zygote(reactor, zygote, caplog):
    (handle,) = dispatcher_of(reactor, 1, ready=False, launcher=zygote).handles
    zygote.state = "T"
    reactor.pass_(FIRST + QUIET - A_MOMENT)
    assert not told(caplog) and not handle.felt
    reactor.pass_(2 * A_MOMENT)
    reactor.pass_(1.0)
    assert told(caplog) == ["the zygote of pool (pid 6000) does not respond: it is stopped"]


@pytest.mark.parametrize("state", ["S", "R", "D", ""])
def test_a_zygote_that_is_not_stopped_may_do_nothing_for_ever(state, reactor, zygote, caplog):
    dispatcher_of(reactor, 1, ready=False, launcher=zygote, hang_timeout=3.0)
    zygote.state = state
    reactor.pass_(HOUR)
    assert not zygote.told and not caplog.records


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_zygote_is_let_go_on(state, reactor, zygote):
    dispatcher_of(reactor, 1, ready=False, launcher=zygote, hang_timeout=60.0)
    zygote.state = state
    reactor.pass_(FIRST + STOPPED - A_MOMENT)
    assert not zygote.told
    reactor.pass_(2 * A_MOMENT)
    assert zygote.told == [("continued", pytest.approx(FIRST + STOPPED))]
    reactor.pass_(60.0 - STOPPED - 2 * LOOK)  # where that does not help
    assert {what for what, _ in zygote.told} == {"continued"}
    reactor.pass_(2 * LOOK)
    assert zygote.told[-1] == ("killed", pytest.approx(FIRST + 60.0))


def test_each_stop_of_a_zygote_is_told(reactor, zygote, caplog):
    dispatcher_of(reactor, 1, ready=False, launcher=zygote)
    for state in "TSTS":
        zygote.state = state
        reactor.pass_(QUIET + 3 * LOOK)
    assert len(told(caplog)) == 2


def test_without_hang_timeout_a_stopped_zygote_is_never_killed(reactor, zygote):
    dispatcher_of(reactor, 1, ready=False, launcher=zygote)
    zygote.state = "T"
    reactor.pass_(HOUR)
    assert {what for what, _ in zygote.told} == {"continued"}


def test_with_a_short_hang_timeout_a_stopped_zygote_is_killed(reactor, zygote, caplog):
    dispatcher_of(reactor, 1, ready=False, launcher=zygote, hang_timeout=3.0)
    zygote.state = "T"
    reactor.pass_(FIRST + 3.0 - A_MOMENT)
    assert told(caplog) and not zygote.told
    reactor.pass_(2 * A_MOMENT)
    assert zygote.told == [("killed", pytest.approx(FIRST + 3.0))]


def test_a_zygote_that_was_stopped_for_moments_is_not_told(reactor, zygote, caplog):
    dispatcher_of(reactor, 1, ready=False, launcher=zygote)
    for state in "TSTSTST":
        zygote.state = state
        reactor.pass_(QUIET - LOOK)
    assert not zygote.told and not caplog.records


@pytest.mark.parametrize("why", ["it is quiet", "it is killed", "it is to stop"])
def test_a_zygote_is_looked_at_where_it_has_to_tell_of_an_end(why, reactor, zygote, caplog):
    dispatcher = dispatcher_of(reactor, 1, launcher=zygote)
    (handle,) = dispatcher.handles
    zygote.state = "T"
    reactor.pass_(LOOK + QUIET)
    task = give(dispatcher, sleep, 1)
    reactor.pass_(10)
    assert not caplog.records and not zygote.told  # nobody waits for it
    if why == "it is quiet":
        handle.quiet = True
    elif why == "it is killed":
        handle.kill("it held too much")
    else:
        dispatcher.supervisor.retire(handle)
        handle.answers(task)
        assert handle.state is State.STOPPING
        dispatcher.handles[-1].starts()
        dispatcher.handles[-1].says_hello()
    reactor.pass_(2 * QUIET + 2 * LOOK)
    assert any("the zygote" in each for each in told(caplog))


# -- memory ----------------------------------------------------------------------------------------


def worked(reactor, **config):
    """The one drone of a pool, that has done something and is idle."""
    handle, task = busy(reactor, max_memory=LIMIT, **config)
    handle.answers(task)
    return handle


@pytest.mark.parametrize("on_death", ["replace", "break", "end"])
@pytest.mark.parametrize("idle", [False, True])
def test_who_holds_more_than_its_limit_is_killed(idle, on_death, reactor):
    handle = worked(reactor, on_death=on_death)
    if not idle:
        give(handle.dispatcher, sleep, 1)
    handle.held = LIMIT + 1
    reactor.pass_(MEMORY_CHECK_SECONDS - A_MOMENT)
    assert not handle.kills
    reactor.pass_(10)
    assert handle.kills == about(MEMORY_CHECK_SECONDS)
    assert handle.kill_reason == (
        "the drone and the processes that it started held 1,000 MiB, more than max_memory=1,000 MiB"
    )


def test_one_that_is_being_started_is_killed_too_if_it_holds_too_much(reactor):
    (handle,) = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT).handles
    handle.held = LIMIT + 1
    reactor.pass_(1)
    assert not handle.kills  # it has no pid yet
    handle.starts()
    reactor.pass_(1)
    assert len(handle.kills) == 1 and handle.dispatcher.state.population.too_large_in_a_row == 0


@pytest.mark.parametrize("held", [math.ceil(LIMIT * NEAR_LIMIT_FRACTION), LIMIT])
def test_who_comes_near_its_limit_is_replaced(held, reactor, caplog):
    handle = worked(reactor)
    handle.held = held
    reactor.pass_(MEMORY_CHECK_SECONDS + A_MOMENT)
    assert not handle.kills and handle.state is State.STOPPING
    (new,) = [each for each in handle.dispatcher.handles if each is not handle]
    assert told(caplog, logging.INFO) == [
        f"drone {handle.name} is replaced: it holds {held >> 20:,} MiB"
    ]
    assert new.name == handle.name and new.state is State.STARTING
    reactor.pass_(2)
    assert not handle.kills and len(caplog.records) == 1
    assert [timer.fire.args[0] for *_, timer in reactor.timers.heap].count(
        handle.dispatcher.health_monitor._check
    ) == 1  # though two asked for one


def test_who_comes_near_while_it_works_is_replaced_after_its_work(reactor):
    handle, task = busy(reactor, max_memory=LIMIT)
    handle.held = LIMIT
    reactor.pass_(10)
    assert (
        handle.state is State.RETIRING and not handle.kills and (STOP, ()) not in handle.sent_to_it
    )
    handle.answers(task, "done")
    assert task.promise.value == "done" and handle.state is State.STOPPING


def test_who_is_not_near_its_limit_stays(reactor, caplog):
    handle = worked(reactor)
    handle.held = math.ceil(LIMIT * NEAR_LIMIT_FRACTION) - 1
    reactor.pass_(10)
    assert handle.state is State.READY and not caplog.records


def test_one_that_is_near_and_not_ready_yet_is_let_be(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT)
    (handle,) = dispatcher.handles
    handle.starts()
    handle.held = LIMIT
    reactor.pass_(10)
    assert handle.state is State.STARTING and not handle.kills and dispatcher.handles == [handle]


@pytest.mark.parametrize("done", [False, True])
def test_a_lone_drone_that_is_near_stays(done, reactor, caplog):
    """Nothing would be there in its place."""
    dispatcher = dispatcher_of(reactor, 1, max_memory=LIMIT, on_death="end")
    (handle,) = dispatcher.handles
    if done:
        handle.answers(give(dispatcher, sleep, 1))
    handle.held = LIMIT
    reactor.pass_(10)
    assert handle.state is State.READY and not handle.kills and not caplog.records


def test_the_dead_are_not_measured(reactor):
    """Their number may be another's by now."""
    handle = worked(reactor)
    handle.become(State.DEAD)
    handle.held = LIMIT + 1  # and its last answers are on their way
    reactor.pass_(1)
    assert not handle.kills


def test_no_more_is_measured_than_is_needed(reactor):
    handle = worked(reactor)
    asked = []
    handle.memory = lambda enough: asked.append(enough) or 0
    reactor.pass_(MEMORY_CHECK_SECONDS)
    assert asked == [int(LIMIT * NEAR_LIMIT_FRACTION)]


def too_large(reactor, dispatcher, held=LIMIT):
    """The newest drone of that pool is ready, holds so much, and has died if it was killed."""
    handle = dispatcher.handles[-1]
    make_ready(dispatcher)
    handle.held = held
    reactor.pass_(MEMORY_CHECK_SECONDS + A_MOMENT)
    if handle.kills:
        handle.dies()
    return handle


def test_a_limit_that_no_drone_keeps_breaks_the_pool(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT)
    for _ in range(MAX_FAILED_STARTS):
        assert dispatcher.refusal is None
        assert (
            "before its first task; the limit is max_memory=1,000 MiB"
            in too_large(reactor, dispatcher).kill_reason
        )
    assert isinstance(dispatcher.refusal, BrokenProcessPool)
    assert str(dispatcher.refusal).startswith(
        "no drone of pool fits: the drone and the processes that it started held 1,000 MiB before"
    )


def test_one_that_keeps_the_limit_shows_that_it_can_be_kept(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT)
    for held in [LIMIT, LIMIT, 0]:
        kept = too_large(reactor, dispatcher, held)
    assert dispatcher.state.population.too_large_in_a_row == 0 and not kept.kills
    kept.dies()
    for _ in range(MAX_FAILED_STARTS - 1):
        too_large(reactor, dispatcher)
    assert dispatcher.refusal is None


def test_one_that_is_being_started_or_killed_does_not_show_that_the_limit_can_be_kept(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT)
    too_large(reactor, dispatcher)
    (handle,) = dispatcher.handles
    handle.starts()
    reactor.pass_(2)
    assert dispatcher.state.population.too_large_in_a_row == 1
    handle.kill("it held too much")
    handle.says_hello()
    reactor.pass_(2)
    assert dispatcher.state.population.too_large_in_a_row == 1


# -- SIGTERM before the first call -----------------------------------------------------------------


def get_sigterm(dispatcher, times, ready):
    """That many drones in a row get SIGTERM, in an initializer or after it."""
    for _ in range(times):
        assert dispatcher.refusal is None
        if ready:
            make_ready(dispatcher)
        dispatcher.handles[-1].dies(-signal.SIGTERM)


@pytest.mark.parametrize("on_request", [True, False])
def test_kills_on_request_do_not_show_that_drones_cannot_start(reactor, on_request):
    dispatcher = dispatcher_of(reactor, 1, ready=False)
    for _ in range(MAX_FAILED_STARTS):
        assert dispatcher.refusal is None
        handle = dispatcher.handles[-1]
        handle.starts()
        handle.kill("it was told to", on_request)
        handle.dies()
        handle.kill("it is dead")
        assert handle.kill_reason == "it was told to" and len(handle.kills) == 1
    assert (dispatcher.refusal is None) == on_request


@pytest.mark.guarantee("end-3")
@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize("on_death", ["replace", "break"])
def test_drones_that_always_get_sigterm_before_a_call_break_the_pool(reactor, on_death, ready):
    dispatcher = dispatcher_of(reactor, 1, ready=False, on_death=on_death)
    get_sigterm(dispatcher, MAX_KILLED_STARTS, ready)
    assert isinstance(dispatcher.refusal, BrokenProcessPool)
    assert str(dispatcher.refusal).startswith("drones of pool get SIGTERM before their first call")


def test_a_call_that_is_done_shows_that_drones_can_work(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    get_sigterm(dispatcher, MAX_KILLED_STARTS - 1, True)
    make_ready(dispatcher)
    task = give(dispatcher, sleep, 1)
    dispatcher.handles[0].answers(task)
    get_sigterm(dispatcher, MAX_KILLED_STARTS - 1, True)
    assert dispatcher.refusal is None


# -- waits -----------------------------------------------------------------------------------------

PLACE = ["file.py", 17, "sleep"]


def waiting(reactor, given=None, **config):
    """One that runs something and does nothing, as far as the kernel tells; since the first
    look."""
    handle, task = busy(reactor, given, report_waiting=60.0, **config)
    handle.did = "started 1"
    reactor.pass_(FIRST)
    return handle, task


def test_a_wait_is_told_by_the_look_after_its_place_was_asked_for(reactor, caplog):
    handle, task = waiting(reactor)
    reactor.pass_(60.0 - A_MOMENT)
    assert not handle.got(FRAMES)
    reactor.pass_(2 * A_MOMENT)
    (request,) = handle.got(FRAMES)
    assert handle.waiting is None and not caplog.records
    handle.tells_frames(request, {str(task.number): PLACE})
    handle.call = "futex"
    reactor.pass_(LOOK - 2 * A_MOMENT)
    assert handle.waiting is None
    reactor.pass_(2 * A_MOMENT)
    assert (handle.waiting.task, handle.waiting.where) == ("sleep", "file.py:17 in sleep")
    assert handle.waiting.system_call == "futex" and handle.waiting.item is None
    reactor.pass_(HOUR)
    assert handle.got(FRAMES) == [request]
    (said,) = told(caplog)
    assert (
        said.startswith(f"drone pool.0 (pid {handle.pid}): sleep has waited for ")
        and "file.py:17" in said
    )
    assert handle.waiting.since == pytest.approx(time.time() - 60.5, abs=30)  # and no hour
    assert not handle.kills and handle.unresponsive is None


def test_nothing_is_asked_or_told_where_nobody_wants_it(reactor, caplog):
    handle, _ = busy(reactor)
    handle.did = "started 1"
    reactor.pass_(HOUR)
    assert not handle.got(FRAMES) and not caplog.records


def test_nothing_is_told_of_one_of_which_it_is_not_known_what_it_does(reactor, caplog):
    busy(reactor, report_waiting=1.0)
    reactor.pass_(HOUR)
    assert not caplog.records


def test_one_that_does_something_now_and_then_does_not_wait(reactor, caplog):
    handle, _ = waiting(reactor)
    for step in range(20):
        handle.did = f"step {step}"
        reactor.pass_(59)
    assert not handle.got(FRAMES) and not caplog.records


def test_one_whose_programs_do_something_now_and_then_does_not_wait(reactor, caplog):
    handle, _ = waiting(reactor)
    for step in range(20):
        handle.others = step
        reactor.pass_(59)
    assert not handle.got(FRAMES) and not caplog.records
    reactor.pass_(3)
    assert handle.got(FRAMES)


def test_one_that_works_again_before_it_is_told_is_not_told(reactor, caplog):
    handle, task = waiting(reactor)
    reactor.pass_(60.0 + A_MOMENT)
    (request,) = handle.got(FRAMES)
    handle.tells_frames(request, {str(task.number): PLACE})
    handle.did = "started 2"
    reactor.pass_(LOOK)
    assert handle.waiting is None
    reactor.pass_(60 - LOOK)
    assert not caplog.records and len(handle.got(FRAMES)) == 1
    reactor.pass_(LOOK)
    assert len(handle.got(FRAMES)) == 2
    reactor.pass_(LOOK)
    assert handle.waiting.where is None  # its control thread has not answered this time


def test_a_wait_that_was_told_is_over_when_it_works_again_and_the_next_is_told_too(reactor, caplog):
    handle, task = waiting(reactor)
    for step in "12":
        reactor.pass_(62)
        handle.tells_frames(handle.got(FRAMES)[-1], {str(task.number): PLACE})
        reactor.pass_(LOOK)
        assert handle.waiting.where
        handle.did = f"step {step}"
        reactor.pass_(LOOK)
        assert handle.waiting is None
    assert len(told(caplog)) == 2
    assert told(caplog, logging.INFO) == [f"drone pool.0 (pid {handle.pid}) no longer waits"] * 2
    first, second = handle.got(FRAMES)
    assert first != second


def test_a_wait_is_over_when_it_owes_nothing_any_more(reactor, caplog):
    handle, task = waiting(reactor)
    reactor.pass_(62)
    assert handle.waiting
    handle.answers(task)
    assert handle.waiting is None and handle.reported_wait
    reactor.pass_(LOOK)
    assert handle.reported_wait is None and not reactor.timers.heap
    assert told(caplog, logging.INFO) == [f"drone pool.0 (pid {handle.pid}) no longer waits"]
    give(handle.dispatcher, sleep, 1)
    reactor.pass_(60)
    assert len(handle.got(FRAMES)) == 1  # counted anew
    reactor.pass_(2)
    assert len(handle.got(FRAMES)) == 2


def test_one_that_only_has_to_wait_for_a_processor_is_not_told(reactor, caplog):
    handle, _ = waiting(reactor)
    handle.asleep = False
    reactor.pass_(HOUR)
    assert len(handle.got(FRAMES)) == 1 and not caplog.records
    handle.asleep = True
    reactor.pass_(LOOK)
    assert len(told(caplog)) == 1


def test_a_control_thread_that_answers_late_completes_what_was_told(reactor, caplog):
    handle, task = waiting(reactor)
    reactor.pass_(70)
    assert handle.waiting.task == "sleep" and handle.waiting.where is None
    since = handle.waiting.since
    (request,) = handle.got(FRAMES)
    handle.tells_frames(request, {str(task.number): PLACE})
    reactor.pass_(LOOK)
    assert handle.waiting.where == "file.py:17 in sleep" and handle.waiting.since == since
    assert len(told(caplog)) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_answer_to_another_request_is_passed_over(when, reactor):
    handle, task = waiting(reactor)
    reactor.pass_(60.0 + A_MOMENT if when == "before" else 70)
    (request,) = handle.got(FRAMES)
    handle.tells_frames(request + 1, {str(task.number): PLACE})
    reactor.pass_(LOOK)
    assert handle.waiting and handle.waiting.where is None


def test_an_answer_about_one_that_does_not_wait_is_passed_over(reactor):
    handle, task = busy(reactor)
    handle.tells_frames(1, {str(task.number): PLACE})
    assert handle.waiting is None


@pytest.mark.parametrize(
    "place", [None, "file.py", ["file.py", 17], ["file.py", "17", "sleep"], [17, 17, "sleep"]]
)
def test_a_place_that_is_none_is_left_out(place, reactor):
    handle, task = waiting(reactor)
    reactor.pass_(70)
    handle.tells_frames(handle.got(FRAMES)[0], {str(task.number): place})
    reactor.pass_(LOOK)
    assert handle.waiting.task == "sleep" and handle.waiting.where is None


def test_of_several_tasks_the_one_is_told_that_was_begun_last(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1, width=3, report_waiting=60.0)
    (handle,) = dispatcher.handles
    tasks = [give(dispatcher, overlapped, each) for each in "123"]
    handle.did = 1
    monkeypatch.setattr(handle, "last_started", lambda: tasks[1].number)
    reactor.pass_(70)
    assert handle.reported_wait[0] == tasks[1].number
    handle.tells_frames(
        handle.got(FRAMES)[0], {str(task.number): ["f", task.number, "x"] for task in tasks}
    )
    reactor.pass_(LOOK)
    assert handle.waiting.line == tasks[1].number


def test_where_it_is_not_known_what_was_begun_last_the_first_is_told(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1, width=3, report_waiting=60.0)
    (handle,) = dispatcher.handles
    tasks = [give(dispatcher, overlapped, each) for each in "12"]
    handle.did = 1
    monkeypatch.setattr(handle, "last_started", lambda: 0)
    reactor.pass_(70)
    assert handle.reported_wait[0] == tasks[0].number


FATAL = """Fatal Python error: Aborted

Thread 0x1 (most recent call first):
  File "/x/polycephaly/engines/local/drone.py", line 73 in _run
  File "/x/threading.py", line 982 in run

Current thread 0x2 (most recent call first):
  File "/no/such/a.py", line 7 in hold
  File "/no/such/b.py", line ??? in between
  File "/no/such/b.py", line 9 in outer
  File "/x/polycephaly/drone/chunk_run.py", line 70 in _run_items
  File "/x/polycephaly/drone/executor.py", line 284 in _run_task
  File "/no/such/main.py", line 14 in <module>

Extension modules: zmq (total: 1)"""


@pytest.mark.parametrize("status", [-6, -9])
@pytest.mark.parametrize("why", ["", WHY])
@pytest.mark.parametrize("known", [True, False])
def test_a_drone_that_was_told_to_end_tells_the_frames_of_its_task(reactor, status, why, known):
    handle, task = busy(reactor)
    text = FATAL if known else FATAL.replace("/drone/", "/")
    handle.keep_stderr_lines([Line(each, "pool.0", "stderr") for each in text.splitlines()])
    assert ("executor.py" in "\n".join(handle.stack)) == (not known)
    handle.kill_reason = why
    handle.dispatcher.supervisor.on_died(handle, status)
    reactor.turn()
    error = task.promise.exception()
    assert "in hold" in error.stack
    if known and why and status == -6:
        assert error.stack not in str(error)
        frames = ['"/no/such/b.py", line 9, in outer', '"/no/such/a.py", line 7, in hold']
        lines = ["Traceback (most recent call last):", *(f"  File {each}" for each in frames)]
        last = f"polycephaly.errors.DroneDied: {error}"
        assert str(error.__cause__).strip('\n"').splitlines() == [*lines, last]
        assert str(pickle.loads(pickle.dumps(error.__cause__))) == str(error.__cause__)
    else:
        assert error.stack in str(error) and error.__cause__ is None


@pytest.mark.parametrize(("count", "item"), [(1, 5), (2, None)])
def test_the_item_of_a_map_is_told_where_it_is_one(count, item, reactor):
    handle, _ = waiting(reactor, lambda dispatcher: give_chunk(dispatcher, sleep, range(count), 5))
    reactor.pass_(70)
    assert handle.waiting.item == item


@pytest.mark.parametrize(
    ("count", "begun", "run_length", "items"),
    [
        (1, 0, 0, ", item 5"),
        (3, 0, 0, ", one of the items 5 to 7"),
        (3, 2, 1, ", item 6"),
        (3, 2, 2, ", one of the items 5 to 6"),
    ],
)
def test_the_log_tells_with_which_items_a_drone_died_or_did_not_respond(
    count, begun, run_length, items, reactor, caplog
):
    caplog.set_level(logging.INFO, "polycephaly.pool.supervisor")
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    task = give_chunk(dispatcher, sleep, range(count), 5)
    handle.status_page = SimpleNamespace(call=begun | run_length << 32)
    handle.quiet = True
    reactor.pass_(FIRST + QUIET + LOOK)
    handle.dies()
    (stalled,), (death,) = told(caplog), told(caplog, logging.INFO)
    among = with_item("sleep", 6, 1) if run_length == 1 else with_item("sleep", 5, count)
    assert stalled.endswith(f"its running task is {among}")
    by_whom = " (by another process, or by the kernel because memory ran out)"
    assert death.endswith(f"while running sleep{items}{by_whom}")
    assert str(task.promise.exception()) == death and task.promise.exception().running == "sleep"


def test_a_task_that_runs_again_may_be_at_any_of_its_items(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    (handle,) = dispatcher.handles
    task = give_chunk(dispatcher, sleep, range(3), 5, retries=1)
    handle.status_page = SimpleNamespace(call=2 | 1 << 32)
    handle.dies()
    assert not task.promise.done() and task.items == (5, 2)  # the third was not begun


def test_one_whose_start_waits_is_told_without_a_task(reactor, caplog):
    (handle,) = dispatcher_of(reactor, 1, ready=False, report_waiting=60.0).handles
    handle.up, handle.did = False, 0  # nobody is there yet to be asked
    handle.starts()
    reactor.pass_(70)
    assert not handle.got(FRAMES) and handle.reported_wait[0] == 0
    assert "its start has waited for" in told(caplog)[0]
    handle.says_hello()
    reactor.pass_(LOOK)
    assert handle.reported_wait is None


# -- all of them wait ------------------------------------------------------------------------------


def all_wait(reactor, size=2):
    dispatcher = dispatcher_of(reactor, size, report_waiting=60.0)
    tasks = [give(dispatcher, sleep, each) for each in range(size)]
    for handle in dispatcher.handles:
        handle.did = 0
    reactor.pass_(70)
    assert all(handle.waiting for handle in dispatcher.handles)
    return dispatcher, tasks


def deadlocks(caplog):
    return [each for each in told(caplog) if "deadlock" in each]


def test_where_all_wait_and_calls_are_queued_that_is_told_once(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    assert not deadlocks(caplog)
    queued = [give(dispatcher, abs, each) for each in "123"]
    reactor.pass_(LOOK)
    (said,) = deadlocks(caplog)
    assert said.startswith("all drones of pool (2) wait, and tasks are queued")
    assert "(3, the first is abs)" in said and said.endswith("use a Pool of at least 5 drones")
    reactor.pass_(HOUR)
    assert len(deadlocks(caplog)) == 1 and not any(task.promise.done() for task in queued)


def test_what_only_one_of_them_may_run_is_queued_too(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    give(dispatcher, abs, 1, target=dispatcher.handles[1])
    dispatcher.handles[0].preferred.append(give_to_none(dispatcher))
    dispatcher.handles[0].changed()
    reactor.pass_(LOOK)
    (said,) = deadlocks(caplog)
    assert "(2, the first is " in said


def give_to_none(dispatcher):
    """A call that is in no queue."""
    task = give(dispatcher, abs, 1)
    dispatcher.assignment.queue.remove(task)
    return task


def test_what_was_cancelled_is_not_queued(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    give(dispatcher, abs, 1).promise.cancel()
    reactor.pass_(LOOK)
    assert not deadlocks(caplog)


def test_where_one_does_not_wait_nothing_is_told(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    dispatcher.handles[1].did = "something"
    reactor.pass_(LOOK)
    give(dispatcher, abs, 1)
    reactor.pass_(30)
    assert not deadlocks(caplog)
    reactor.pass_(32)
    assert len(deadlocks(caplog)) == 1


def test_each_deadlock_is_told(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    give(dispatcher, abs, 1)
    reactor.pass_(LOOK)
    dispatcher.handles[0].did = "something"
    reactor.pass_(LOOK)
    assert len(deadlocks(caplog)) == 1
    reactor.pass_(62)
    assert len(deadlocks(caplog)) == 2


def test_the_dead_are_not_waited_for(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    give(dispatcher, abs, 1)
    dispatcher.handles[1].state = State.DEAD
    reactor.pass_(LOOK)
    (said,) = deadlocks(caplog)
    assert "all drones of pool (1) wait" in said


def test_the_dead_do_not_wait_and_none_is_no_deadlock(reactor, caplog):
    dispatcher, _ = all_wait(reactor, 1)
    give(dispatcher, abs, 1)
    dispatcher.handles[0].state = State.DEAD  # and its last answers are on their way
    reactor.pass_(LOOK)
    assert not deadlocks(caplog)


# -- a drone dies ----------------------------------------------------------------------------------


def test_what_is_retried_keeps_its_order_and_goes_before_what_was_queued_later(reactor):
    handle = dispatcher_of(reactor, 1, width=9).handles[0]
    begun = [give(handle.dispatcher, overlapped, each, retries=1) for each in range(4)]
    assert [*handle.in_flight] == [task.number for task in begun]
    handle.highest_answered = len(begun)
    later = submitted(handle.dispatcher, sleep, 1, task_options=TaskOptions(None, 0))
    handle.dies()
    assert [*handle.dispatcher.assignment.queue] == [*begun, later]


def test_the_reason_of_a_broken_pool_ends_with_the_type_of_an_error_without_text():
    assert str(pool_error("it failed", KeyboardInterrupt())) == "it failed: KeyboardInterrupt"
    assert str(pool_error("it failed", ValueError("why"))) == "it failed: ValueError: why"
