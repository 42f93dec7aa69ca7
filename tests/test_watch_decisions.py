"""The watch: what it decides by the clock and by what it is told, in a time that the tests move
(in_time.py).

What the kernel and a drone's page tell of a real one is shown by test_watch.py.
"""

import logging
import math
import time
from concurrent.futures.process import BrokenProcessPool
from unittest.mock import Mock

import pytest
from in_time import WHY, FakeReactor, FakeZygote, dispatcher_of, give, make_ready

from polycephaly.pool import health
from polycephaly.pool.health import BUSY_FRACTION, MEMORY_CHECK_SECONDS, NEAR_LIMIT_FRACTION
from polycephaly.pool.interfaces import State, TaskOptions
from polycephaly.pool.supervisor import MAX_FAILED_STARTS
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.messages import FRAMES, STOP, Malformed

LOOK, QUIET, STOPPED = (
    tuning.health_check_seconds,
    tuning.stalled_seconds,
    tuning.stopped_zygote_seconds,
)
FIRST = LOOK  # when the first pulse of what is begun at 0 is felt
LIMIT = 1000 << 20
A_MOMENT = 1e-6
HOUR = 3600


@pytest.fixture
def reactor():
    return FakeReactor()


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO, "polycephaly.pool.health")


@pytest.fixture
def zygote(monkeypatch):
    zygote = FakeZygote()
    monkeypatch.setattr(health, "state_of", lambda pid: zygote.state if pid == zygote.pid else "")
    return zygote


def busy(reactor, **plan):
    """The one drone of a crew, and what it runs."""
    dispatcher = dispatcher_of(reactor, 1, **plan)
    return dispatcher.handles[0], give(dispatcher, sleep, 1)


def sleep(seconds):
    raise AssertionError("nothing is run here")


async def overlapped(x):
    return x


async def overlapped_too(x):
    return x


def told(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


def about(*times):
    return pytest.approx([*times], abs=A_MOMENT)


def times_of_looks(every, until):
    return about(*(every * step for step in range(1, int(until / every) + 1)))


# -- when it looks ---------------------------------------------------------------------------------


def test_no_timer_runs_while_there_is_nothing_to_look_at(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    reactor.pass_(LOOK)  # the last look at their start
    assert not reactor.timers.heap
    reactor.pass_(HOUR)
    work = give(dispatcher, sleep, 1)
    assert len(reactor.timers.heap) == 1
    work.handle.answers(work)
    reactor.pass_(LOOK)
    assert not reactor.timers.heap and len(dispatcher.handles[0].felt) == 0


@pytest.mark.parametrize(
    ("plan", "every"),
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
def test_a_busy_drone_is_looked_at_every_so_often(plan, every, reactor):
    link, _ = busy(reactor, **plan)
    reactor.pass_(4.01)
    assert link.felt == times_of_looks(every, 4.01)


def test_more_work_sets_no_more_timers(reactor):
    dispatcher = dispatcher_of(reactor, 1, width=9)
    (link,) = dispatcher.handles
    for each in range(9):
        give(dispatcher, overlapped, each)
        reactor.pass_(0.7 * LOOK)
    assert link.felt == times_of_looks(LOOK, 0.7 * LOOK * 9) and len(reactor.timers.heap) == 1


def test_only_who_has_work_is_felt_for_a_pulse(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    work = give(dispatcher, sleep, 1)
    reactor.pass_(3)
    idle = next(link for link in dispatcher.handles if link is not work.handle)
    assert work.handle.felt and not idle.felt


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
    link, work = busy(reactor)
    dispatcher = link.dispatcher
    del dispatcher.fail  # that of the class, which raises nothing
    link.heartbeat = Mock(side_effect=ValueError("its clock is wrong"))
    reactor.pass_(HOUR)
    with pytest.raises(BrokenProcessPool, match="its clock is wrong"):
        dispatcher.submit(sleep, (1,), {})
    with pytest.raises(BrokenProcessPool, match="its clock is wrong"):
        work.result(0)
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
    link, _ = busy(reactor)
    link.quiet = True
    reactor.pass_(FIRST + QUIET - A_MOMENT)
    assert link.unresponsive is None and not told(caplog)
    reactor.pass_(2 * A_MOMENT)
    assert link.unresponsive == WHY
    reactor.pass_(HOUR)
    assert told(caplog) == [
        f"drone pool.0 (pid {link.pid}) does not respond: {WHY}; its running task is sleep"
    ]


def test_of_several_tasks_the_warning_names_the_one_that_was_begun_last(
    reactor, monkeypatch, caplog
):
    dispatcher = dispatcher_of(reactor, 1, width=3)
    (link,) = dispatcher.handles
    _, last = [give(dispatcher, what, 1) for what in (overlapped, overlapped_too)]
    monkeypatch.setattr(link, "last_started", lambda: last.number)
    link.quiet = True
    reactor.pass_(3)
    assert told(caplog)[0].endswith("; its running task is overlapped_too")


def test_one_that_runs_nothing_yet_is_told_without_what_it_was_running(reactor, caplog):
    (link,) = dispatcher_of(reactor, 1, ready=False).handles
    link.starts()
    link.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    assert told(caplog) == [f"drone pool.0 (pid {link.pid}) does not respond: {WHY}"]


def test_who_has_a_pulse_now_and_then_is_not_told(reactor, caplog):
    link, _ = busy(reactor)
    for _ in range(100):
        link.quiet = True
        reactor.pass_(QUIET - LOOK)
        link.quiet = False
        reactor.pass_(LOOK)
    assert link.unresponsive is None and not caplog.records


def test_one_that_is_idle_is_not_told_whatever_it_does(reactor, caplog):
    (link,) = dispatcher_of(reactor, 1).handles
    link.quiet = True
    reactor.pass_(HOUR)
    assert not link.felt and not caplog.records


def test_one_that_is_quiet_is_given_nothing_till_it_has_a_pulse_again(reactor, caplog):
    link, _ = busy(reactor)
    link.dispatcher.registry.define(sleep).record_duration(
        1e-4, 1
    )  # known to be short: it would be sent ahead
    link.load, link.unknown = 1e-4, 0
    link.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    waiting = give(link.dispatcher, sleep, 2, target=link)
    reactor.pass_(10)
    assert waiting.number not in link.in_flight
    link.quiet = False
    reactor.pass_(LOOK)
    assert link.unresponsive is None and waiting.number in link.in_flight
    reactor.pass_(HOUR)
    assert told(caplog, logging.INFO) == [f"drone pool.0 (pid {link.pid}) responds again"]
    assert len(told(caplog)) == 1


def test_each_silence_is_told(reactor, caplog):
    link, _ = busy(reactor)
    for _ in "12":
        link.quiet = True
        reactor.pass_(QUIET + 2 * LOOK)
        link.quiet = False
        reactor.pass_(LOOK)
    assert len(told(caplog)) == len(told(caplog, logging.INFO)) == 2


def test_one_that_answers_and_has_nothing_more_to_do_counts_as_responsive(reactor, caplog):
    link, work = busy(reactor)
    link.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    waiting = give(link.dispatcher, sleep, 2, target=link)
    link.answers(work)
    assert link.unresponsive and not link.in_flight
    reactor.pass_(LOOK)
    assert link.unresponsive is None and waiting.number in link.in_flight


def test_what_is_queued_goes_to_others_while_one_is_quiet(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    # Known to be short: it would be sent ahead.
    dispatcher.registry.define(abs).record_duration(1e-4, 1)
    held, other = (give(dispatcher, abs, each) for each in "12")
    held.handle.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    other.handle.answers(other)
    queued = [give(dispatcher, abs, each) for each in "123"]
    assert all(work.handle is other.handle for work in queued)
    held.handle.answers(held)
    reactor.pass_(LOOK)
    assert give(dispatcher, abs, 1).handle is held.handle


@pytest.mark.parametrize("heard", ["before the look", "after the look"])
def test_what_waits_for_one_that_answered_while_this_process_stood_still_is_sent(heard, reactor):
    link, work = busy(reactor)
    link.quiet = True
    reactor.pass_(FIRST + QUIET + A_MOMENT)
    waiting = give(link.dispatcher, sleep, 2, target=link)
    assert link.unresponsive
    if heard == "before the look":
        link.answers(work)
        reactor.stand_still(HOUR)
    else:
        reactor.stand_still(HOUR)
        link.answers(work)
        reactor.pass_(LOOK)
    assert waiting.number in link.in_flight


def test_its_silence_is_counted_anew_with_new_work(reactor, caplog):
    """Also where it was looked on meanwhile, as another one had work."""
    dispatcher = dispatcher_of(reactor, 2)
    work, _ = [give(dispatcher, sleep, each) for each in "12"]
    link = work.handle
    link.quiet = True
    reactor.pass_(QUIET)
    link.answers(work)
    reactor.pass_(2 * LOOK)
    give(dispatcher, sleep, 1)
    assert link.in_flight
    reactor.pass_(FIRST + QUIET - A_MOMENT)
    assert not told(caplog)
    reactor.pass_(2 * A_MOMENT)
    assert told(caplog)


def test_what_was_seen_before_an_idle_time_counts_for_nothing(reactor, caplog):
    """Nobody looks meanwhile; and that is no standstill of ours."""
    link, work = busy(reactor)
    link.quiet = True
    reactor.pass_(FIRST)
    link.answers(work)
    reactor.pass_(HOUR + LOOK / 2)
    give(link.dispatcher, sleep, 1)
    reactor.pass_(2 * LOOK)
    assert not told(caplog)
    reactor.pass_(QUIET)
    assert told(caplog)


def test_it_looks_on_where_one_is_quiet_and_another_ends(reactor, caplog):
    dispatcher = dispatcher_of(reactor, 2)
    works = [give(dispatcher, sleep, each) for each in (1, 2)]
    works[0].handle.quiet = True
    reactor.pass_(FIRST + QUIET - LOOK)
    works[1].handle.answers(works[1])
    reactor.pass_(LOOK + A_MOMENT)
    assert works[0].handle.unresponsive and not works[1].handle.unresponsive


@pytest.mark.parametrize("hang", [None, 3.0])
def test_only_with_hang_timeout_it_is_killed_and_after_that(hang, reactor):
    link, _ = busy(reactor, hang_timeout=hang)
    link.quiet = True
    reactor.pass_(FIRST + 3.0 - A_MOMENT)
    assert link.unresponsive and not link.kills
    reactor.pass_(HOUR)
    if hang is None:
        assert not link.kills
    else:
        assert (
            link.kills == about(FIRST + 3.0)
            and link.kill_reason == f"the drone did not respond for 3.0 s: {WHY}"
        )


def test_with_a_short_hang_timeout_it_is_told_and_killed_at_one_look(reactor, caplog):
    link, _ = busy(reactor, hang_timeout=1.0)
    link.quiet = True
    reactor.pass_(1.25 - A_MOMENT)  # it is looked at four times as often
    assert not told(caplog) and not link.kills
    reactor.pass_(2 * A_MOMENT)
    assert len(told(caplog)) == 1 and link.kills == about(1.25)


def test_one_that_is_being_killed_gets_no_more_work_if_it_responds_again(reactor):
    link, work = busy(reactor, hang_timeout=3.0)
    link.quiet = True
    reactor.pass_(FIRST + 3.0 + A_MOMENT)
    link.quiet = False
    work.handle.answers(work)
    reactor.pass_(LOOK + A_MOMENT)
    assert link.kills and not link.unresponsive and not link.can_take()


def test_one_that_is_being_killed_for_something_else_keeps_its_verdict(reactor):
    link, _ = busy(reactor, hang_timeout=3.0)
    link.quiet = True
    link.kill("it held too much")
    reactor.pass_(HOUR)
    assert len(link.kills) == 1 and link.kill_reason == "it held too much"


def test_one_whose_start_hangs_is_killed_too(reactor, zygote):
    (link,) = dispatcher_of(reactor, 1, ready=False, spawner=zygote, hang_timeout=3.0).handles
    link.quiet = True
    reactor.pass_(HOUR)
    assert not link.felt  # it has no pid
    link.starts()
    reactor.pass_(3.0 + 2 * LOOK)
    assert len(link.kills) == 1


# -- this process itself does not run --------------------------------------------------------------


def test_a_standstill_of_this_process_is_not_held_against_drones(reactor, caplog):
    link, _ = busy(reactor, hang_timeout=3.0)
    link.quiet = True
    reactor.pass_(FIRST + LOOK)
    reactor.stand_still(2 * LOOK + QUIET / 4 + 0.01)
    reactor.pass_(QUIET - A_MOMENT)
    assert not told(caplog)
    reactor.stand_still(HOUR)
    reactor.pass_(QUIET - A_MOMENT)
    assert not told(caplog) and not link.kills
    reactor.pass_(1 + LOOK)
    assert told(caplog) and link.kills


@pytest.mark.parametrize("hang_timeout", [None, 1.0])
def test_one_whose_answer_was_not_read_yet_is_not_told(hang_timeout, reactor, caplog):
    link, work = busy(reactor, hang_timeout=hang_timeout)
    link.quiet = True  # with nothing to do
    link.unread.append(link.answer(work, 7))
    reactor.pass_(HOUR)
    assert not told(caplog) and not link.kills and work.result(0) == 7


def test_one_that_is_quiet_still_is_after_a_standstill_of_this_process(reactor, caplog):
    link, _ = busy(reactor, hang_timeout=10.0)
    link.quiet = True
    link.threads = {"looks up": (1.0, 0.0)}
    reactor.pass_(QUIET + FIRST + LOOK)
    assert len(told(caplog)) == 1
    link.threads = {"looks up": (2.0, 0.0)}  # in all that time
    reactor.stand_still(100.0)
    reactor.pass_(3 * QUIET)
    assert link.unresponsive and len(told(caplog)) == 1 and not link.kills
    reactor.pass_(10.0)
    assert len(link.kills) == 1


def test_a_start_that_hangs_where_no_zygote_could_tell_of_it_is_seen(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, hang_timeout=3.0)
    (link,) = dispatcher.handles
    reactor.pass_(60.0)
    link.starts()
    link.quiet = True
    reactor.pass_(60.0)
    assert len(link.kills) == 1


def test_a_look_that_is_late_on_a_busy_machine_is_no_standstill(reactor, caplog):
    link, _ = busy(reactor)
    link.quiet = True
    reactor.pass_(FIRST + LOOK)
    reactor.stand_still(2 * LOOK + QUIET / 4 - 0.01)  # after that look
    reactor.pass_(QUIET - 4 * LOOK + LOOK)
    assert told(caplog)


# -- threads ---------------------------------------------------------------------------------------


def compute(reactor, link, seconds, ran, waited=0.0):
    """As long as `seconds`, a thread of it runs and waits for a processor such a part of the
    time."""
    link.quiet = True
    for _ in range(int(seconds / LOOK)):
        before = link.threads.get("7", (5.0, 5.0))
        link.threads["7"] = before[0] + ran * LOOK, before[1] + waited * LOOK
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
    link, _ = busy(reactor)
    compute(reactor, link, 10 * QUIET, ran, waited)
    assert (link.unresponsive is None) == lives


def test_what_a_thread_has_computed_is_reckoned_since_the_last_sign_of_life(reactor):
    link, _ = busy(reactor)
    link.threads["7"] = (50.0, 50.0)
    compute(reactor, link, 10, 0.0)
    assert link.unresponsive
    compute(reactor, link, LOOK, 1.0)
    assert link.unresponsive
    compute(reactor, link, QUIET, 1.0)  # by now it is a tenth
    assert link.unresponsive is None
    compute(reactor, link, QUIET + LOOK, 0.0)
    assert link.unresponsive


def test_a_new_thread_that_computes_is_a_sign_of_life(reactor):
    link, _ = busy(reactor)
    link.quiet = True
    reactor.pass_(3 * LOOK)
    link.threads["8"] = (LOOK, 0.0)
    reactor.pass_(QUIET)
    assert link.unresponsive is None
    reactor.pass_(LOOK)
    assert link.unresponsive


# -- zygotes ---------------------------------------------------------------------------------------


def test_who_is_being_started_is_awaited_by_its_zygote(reactor, zygote, caplog):
    (link,) = dispatcher_of(reactor, 1, ready=False, spawner=zygote).handles
    zygote.state = "T"
    reactor.pass_(FIRST + QUIET - A_MOMENT)
    assert not told(caplog) and not link.felt
    reactor.pass_(2 * A_MOMENT)
    reactor.pass_(1.0)
    assert told(caplog) == ["the zygote of pool (pid 6000) does not respond: it is stopped"]


@pytest.mark.parametrize("state", ["S", "R", "D", ""])
def test_a_zygote_that_is_not_stopped_may_do_nothing_for_ever(state, reactor, zygote, caplog):
    dispatcher_of(reactor, 1, ready=False, spawner=zygote, hang_timeout=3.0)
    zygote.state = state
    reactor.pass_(HOUR)
    assert not zygote.told and not caplog.records


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_zygote_is_let_go_on(state, reactor, zygote):
    dispatcher_of(reactor, 1, ready=False, spawner=zygote, hang_timeout=60.0)
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
    dispatcher_of(reactor, 1, ready=False, spawner=zygote)
    for state in "TSTS":
        zygote.state = state
        reactor.pass_(QUIET + 3 * LOOK)
    assert len(told(caplog)) == 2


def test_without_hang_timeout_a_stopped_zygote_is_never_killed(reactor, zygote):
    dispatcher_of(reactor, 1, ready=False, spawner=zygote)
    zygote.state = "T"
    reactor.pass_(HOUR)
    assert {what for what, _ in zygote.told} == {"continued"}


def test_with_a_short_hang_timeout_a_stopped_zygote_is_killed(reactor, zygote, caplog):
    dispatcher_of(reactor, 1, ready=False, spawner=zygote, hang_timeout=3.0)
    zygote.state = "T"
    reactor.pass_(FIRST + 3.0 - A_MOMENT)
    assert told(caplog) and not zygote.told
    reactor.pass_(2 * A_MOMENT)
    assert zygote.told == [("killed", pytest.approx(FIRST + 3.0))]


def test_a_zygote_that_was_stopped_for_moments_is_not_told(reactor, zygote, caplog):
    dispatcher_of(reactor, 1, ready=False, spawner=zygote)
    for state in "TSTSTST":
        zygote.state = state
        reactor.pass_(QUIET - LOOK)
    assert not zygote.told and not caplog.records


@pytest.mark.parametrize("why", ["it is quiet", "it is killed", "it is to stop"])
def test_a_zygote_is_looked_at_where_it_has_to_tell_of_an_end(why, reactor, zygote, caplog):
    dispatcher = dispatcher_of(reactor, 1, spawner=zygote)
    (link,) = dispatcher.handles
    zygote.state = "T"
    reactor.pass_(LOOK + QUIET)
    work = give(dispatcher, sleep, 1)
    reactor.pass_(10)
    assert not caplog.records and not zygote.told  # nobody waits for it
    if why == "it is quiet":
        link.quiet = True
    elif why == "it is killed":
        link.kill("it held too much")
    else:
        dispatcher.supervisor.retire(link)
        link.answers(work)
        assert link.state is State.STOPPING
        dispatcher.handles[-1].starts()
        dispatcher.handles[-1].says_hello()
    reactor.pass_(2 * QUIET + 2 * LOOK)
    assert any("the zygote" in each for each in told(caplog))


# -- memory ----------------------------------------------------------------------------------------


def worked(reactor, **plan):
    """The one drone of a crew, that has done something and is idle."""
    link, work = busy(reactor, max_memory=LIMIT, **plan)
    link.answers(work)
    return link


@pytest.mark.parametrize("on_death", ["replace", "break", "end"])
@pytest.mark.parametrize("idle", [False, True])
def test_who_holds_more_than_its_limit_is_killed(idle, on_death, reactor):
    link = worked(reactor, on_death=on_death)
    if not idle:
        give(link.dispatcher, sleep, 1)
    link.held = LIMIT + 1
    reactor.pass_(MEMORY_CHECK_SECONDS - A_MOMENT)
    assert not link.kills
    reactor.pass_(10)
    assert link.kills == about(MEMORY_CHECK_SECONDS)
    assert link.kill_reason == (
        "the drone and the processes that it started held 1,000 MiB, "
        "more than max_memory=1,048,576,000 bytes"
    )


def test_one_that_is_being_started_is_killed_too_if_it_holds_too_much(reactor):
    (link,) = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT).handles
    link.held = LIMIT + 1
    reactor.pass_(1)
    assert not link.kills  # it has no pid yet
    link.starts()
    reactor.pass_(1)
    assert len(link.kills) == 1 and link.dispatcher.supervisor.too_large_in_a_row == 0


@pytest.mark.parametrize("held", [math.ceil(LIMIT * NEAR_LIMIT_FRACTION), LIMIT])
def test_who_comes_near_its_limit_is_replaced(held, reactor, caplog):
    link = worked(reactor)
    link.held = held
    reactor.pass_(MEMORY_CHECK_SECONDS + A_MOMENT)
    assert not link.kills and link.state is State.STOPPING
    (new,) = [each for each in link.dispatcher.handles if each is not link]
    assert told(caplog, logging.INFO) == [
        f"drone {link.name} is replaced: it holds {held >> 20:,} MiB"
    ]
    assert new.name == link.name and new.state is State.STARTING
    reactor.pass_(2)
    assert not link.kills and len(caplog.records) == 1
    assert [timer.fire.args[0] for *_, timer in reactor.timers.heap].count(
        link.dispatcher.health_monitor._check
    ) == 1  # though two asked for one


def test_who_comes_near_while_it_works_is_replaced_after_its_work(reactor):
    link, work = busy(reactor, max_memory=LIMIT)
    link.held = LIMIT
    reactor.pass_(10)
    assert link.state is State.RETIRING and not link.kills and (STOP, ()) not in link.sent_to_it
    link.answers(work, "done")
    assert work.value == "done" and link.state is State.STOPPING


def test_who_is_not_near_its_limit_stays(reactor, caplog):
    link = worked(reactor)
    link.held = math.ceil(LIMIT * NEAR_LIMIT_FRACTION) - 1
    reactor.pass_(10)
    assert link.state is State.READY and not caplog.records


def test_one_that_is_near_and_not_ready_yet_is_let_be(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT)
    (link,) = dispatcher.handles
    link.starts()
    link.held = LIMIT
    reactor.pass_(10)
    assert link.state is State.STARTING and not link.kills and dispatcher.handles == [link]


@pytest.mark.parametrize("done", [False, True])
def test_a_lone_drone_that_is_near_stays(done, reactor, caplog):
    """Nothing would be there in its place."""
    dispatcher = dispatcher_of(reactor, 1, max_memory=LIMIT, on_death="end")
    (link,) = dispatcher.handles
    if done:
        link.answers(give(dispatcher, sleep, 1))
    link.held = LIMIT
    reactor.pass_(10)
    assert link.state is State.READY and not link.kills and not caplog.records


def test_the_dead_are_not_measured(reactor):
    """Their number may be another's by now."""
    link = worked(reactor)
    link.state, link.held = State.DEAD, LIMIT + 1  # and its last answers are on their way
    reactor.pass_(1)
    assert not link.kills


def test_no_more_is_measured_than_is_needed(reactor):
    link = worked(reactor)
    asked = []
    link.memory = lambda enough: asked.append(enough) or 0
    reactor.pass_(MEMORY_CHECK_SECONDS)
    assert asked == [int(LIMIT * NEAR_LIMIT_FRACTION)]


def too_large(reactor, dispatcher, held=LIMIT):
    """The newest drone of that crew is ready, holds so much, and has died if it was killed."""
    link = dispatcher.handles[-1]
    make_ready(dispatcher)
    link.held = held
    reactor.pass_(MEMORY_CHECK_SECONDS + A_MOMENT)
    if link.kills:
        link.dies()
    return link


def test_a_limit_that_no_drone_keeps_breaks_the_pool(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT)
    for _ in range(MAX_FAILED_STARTS):
        assert dispatcher.refusal is None
        assert (
            "before its first task; the limit is max_memory=1,048,576,000 bytes"
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
    assert dispatcher.supervisor.too_large_in_a_row == 0 and not kept.kills
    kept.dies()
    for _ in range(MAX_FAILED_STARTS - 1):
        too_large(reactor, dispatcher)
    assert dispatcher.refusal is None


def test_one_that_is_being_started_or_killed_does_not_show_that_the_limit_can_be_kept(reactor):
    dispatcher = dispatcher_of(reactor, 1, ready=False, max_memory=LIMIT)
    too_large(reactor, dispatcher)
    (link,) = dispatcher.handles
    link.starts()
    reactor.pass_(2)
    assert dispatcher.supervisor.too_large_in_a_row == 1
    link.kill("it held too much")
    link.says_hello()
    reactor.pass_(2)
    assert dispatcher.supervisor.too_large_in_a_row == 1


# -- waits -----------------------------------------------------------------------------------------

PLACE = ["file.py", 17, "sleep"]


def waiting(reactor, **plan):
    """One that runs something and does nothing, as far as the kernel tells; since the first
    look."""
    link, work = busy(reactor, report_waiting=60.0, **plan)
    link.did = "started 1"
    reactor.pass_(FIRST)
    return link, work


def test_a_wait_is_told_by_the_look_after_its_place_was_asked_for(reactor, caplog):
    link, work = waiting(reactor)
    reactor.pass_(60.0 - A_MOMENT)
    assert not link.got(FRAMES)
    reactor.pass_(2 * A_MOMENT)
    (request,) = link.got(FRAMES)
    assert link.waiting is None and not caplog.records
    link.tells_frames(request, {str(work.number): PLACE})
    link.call = "futex"
    reactor.pass_(LOOK - 2 * A_MOMENT)
    assert link.waiting is None
    reactor.pass_(2 * A_MOMENT)
    assert (link.waiting.task, link.waiting.where) == ("sleep", "file.py:17 in sleep")
    assert link.waiting.system_call == "futex" and link.waiting.item is None
    reactor.pass_(HOUR)
    assert link.got(FRAMES) == [request]
    (said,) = told(caplog)
    assert (
        said.startswith(f"drone pool.0 (pid {link.pid}): sleep has waited for ")
        and "file.py:17" in said
    )
    assert link.waiting.since == pytest.approx(time.time() - 60.5, abs=30)  # and no hour
    assert not link.kills and link.unresponsive is None


def test_nothing_is_asked_or_told_where_nobody_wants_it(reactor, caplog):
    link, _ = busy(reactor)
    link.did = "started 1"
    reactor.pass_(HOUR)
    assert not link.got(FRAMES) and not caplog.records


def test_nothing_is_told_of_one_of_which_it_is_not_known_what_it_does(reactor, caplog):
    busy(reactor, report_waiting=1.0)
    reactor.pass_(HOUR)
    assert not caplog.records


def test_one_that_does_something_now_and_then_does_not_wait(reactor, caplog):
    link, _ = waiting(reactor)
    for step in range(20):
        link.did = f"step {step}"
        reactor.pass_(59)
    assert not link.got(FRAMES) and not caplog.records


def test_one_whose_programs_do_something_now_and_then_does_not_wait(reactor, caplog):
    link, _ = waiting(reactor)
    for step in range(20):
        link.others = step
        reactor.pass_(59)
    assert not link.got(FRAMES) and not caplog.records
    reactor.pass_(3)
    assert link.got(FRAMES)


def test_one_that_works_again_before_it_is_told_is_not_told(reactor, caplog):
    link, work = waiting(reactor)
    reactor.pass_(60.0 + A_MOMENT)
    (request,) = link.got(FRAMES)
    link.tells_frames(request, {str(work.number): PLACE})
    link.did = "started 2"
    reactor.pass_(LOOK)
    assert link.waiting is None
    reactor.pass_(60 - LOOK)
    assert not caplog.records and len(link.got(FRAMES)) == 1
    reactor.pass_(LOOK)
    assert len(link.got(FRAMES)) == 2
    reactor.pass_(LOOK)
    assert link.waiting.where is None  # its ear has not answered this time


def test_a_wait_that_was_told_is_over_when_it_works_again_and_the_next_is_told_too(reactor, caplog):
    link, work = waiting(reactor)
    for step in "12":
        reactor.pass_(62)
        link.tells_frames(link.got(FRAMES)[-1], {str(work.number): PLACE})
        assert link.waiting.where
        link.did = f"step {step}"
        reactor.pass_(LOOK)
        assert link.waiting is None
    assert len(told(caplog)) == 2
    assert told(caplog, logging.INFO) == [f"drone pool.0 (pid {link.pid}) no longer waits"] * 2
    first, second = link.got(FRAMES)
    assert first != second


def test_a_wait_is_over_when_it_owes_nothing_any_more(reactor, caplog):
    link, work = waiting(reactor)
    reactor.pass_(62)
    assert link.waiting
    link.answers(work)
    assert link.waiting is None and link.reported_wait
    reactor.pass_(LOOK)
    assert link.reported_wait is None and not reactor.timers.heap
    assert told(caplog, logging.INFO) == [f"drone pool.0 (pid {link.pid}) no longer waits"]
    give(link.dispatcher, sleep, 1)
    reactor.pass_(60)
    assert len(link.got(FRAMES)) == 1  # counted anew
    reactor.pass_(2)
    assert len(link.got(FRAMES)) == 2


def test_one_that_only_has_to_wait_for_a_processor_is_not_told(reactor, caplog):
    link, _ = waiting(reactor)
    link.asleep = False
    reactor.pass_(HOUR)
    assert len(link.got(FRAMES)) == 1 and not caplog.records
    link.asleep = True
    reactor.pass_(LOOK)
    assert len(told(caplog)) == 1


def test_an_ear_that_answers_late_completes_what_was_told(reactor, caplog):
    link, work = waiting(reactor)
    reactor.pass_(70)
    assert link.waiting.task == "sleep" and link.waiting.where is None
    since = link.waiting.since
    (request,) = link.got(FRAMES)
    link.tells_frames(request, {str(work.number): PLACE})
    assert link.waiting.where == "file.py:17 in sleep" and link.waiting.since == since
    assert len(told(caplog)) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_answer_to_another_request_is_passed_over(when, reactor):
    link, work = waiting(reactor)
    reactor.pass_(60.0 + A_MOMENT if when == "before" else 70)
    (request,) = link.got(FRAMES)
    link.tells_frames(request + 1, {str(work.number): PLACE})
    reactor.pass_(LOOK)
    assert link.waiting and link.waiting.where is None


def test_an_answer_about_one_that_does_not_wait_is_passed_over(reactor):
    link, work = busy(reactor)
    link.tells_frames(1, {str(work.number): PLACE})
    assert link.waiting is None


@pytest.mark.parametrize("places", [None, [], "file.py"])
def test_an_answer_that_tells_no_places_is_malformed(places, reactor):
    link, _ = waiting(reactor)
    with pytest.raises(Malformed, match=r"drone pool\.0 did not report where its tasks are"):
        link.tells_frames(1, places)


@pytest.mark.parametrize(
    "place", [None, "file.py", ["file.py", 17], ["file.py", "17", "sleep"], [17, 17, "sleep"]]
)
def test_a_place_that_is_none_is_left_out(place, reactor):
    link, work = waiting(reactor)
    reactor.pass_(70)
    link.tells_frames(link.got(FRAMES)[0], {str(work.number): place})
    assert link.waiting.task == "sleep" and link.waiting.where is None


def test_of_several_tasks_the_one_is_told_that_was_begun_last(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1, width=3, report_waiting=60.0)
    (link,) = dispatcher.handles
    works = [give(dispatcher, overlapped, each) for each in "123"]
    link.did = 1
    monkeypatch.setattr(link, "last_started", lambda: works[1].number)
    reactor.pass_(70)
    assert link.reported_wait[0] == works[1].number
    link.tells_frames(
        link.got(FRAMES)[0], {str(work.number): ["f", work.number, "x"] for work in works}
    )
    assert link.waiting.line == works[1].number


def test_where_it_is_not_known_what_was_begun_last_the_first_is_told(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1, width=3, report_waiting=60.0)
    (link,) = dispatcher.handles
    works = [give(dispatcher, overlapped, each) for each in "12"]
    link.did = 1
    monkeypatch.setattr(link, "last_started", lambda: 0)
    reactor.pass_(70)
    assert link.reported_wait[0] == works[0].number


@pytest.mark.parametrize(("count", "item"), [(1, 5), (2, None)])
def test_the_item_of_a_map_is_told_where_it_is_one(count, item, reactor):
    link, work = waiting(reactor)
    work.first_item, work.count = 5, count
    reactor.pass_(70)
    assert link.waiting.item == item


def test_one_whose_start_waits_is_told_without_a_task(reactor, caplog):
    (link,) = dispatcher_of(reactor, 1, ready=False, report_waiting=60.0).handles
    link.up, link.did = False, 0  # nobody is there yet to be asked
    link.starts()
    reactor.pass_(70)
    assert not link.got(FRAMES) and link.reported_wait[0] == 0
    assert "its start has waited for" in told(caplog)[0]
    link.says_hello()
    reactor.pass_(LOOK)
    assert link.reported_wait is None


# -- all of them wait ------------------------------------------------------------------------------


def all_wait(reactor, size=2):
    dispatcher = dispatcher_of(reactor, size, report_waiting=60.0)
    works = [give(dispatcher, sleep, each) for each in range(size)]
    for link in dispatcher.handles:
        link.did = 0
    reactor.pass_(70)
    assert all(link.waiting for link in dispatcher.handles)
    return dispatcher, works


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
    assert len(deadlocks(caplog)) == 1 and not any(work.done() for work in queued)


def test_what_only_one_of_them_may_run_is_queued_too(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    give(dispatcher, abs, 1, target=dispatcher.handles[1])
    dispatcher.locality.add(give_to_none(dispatcher), dispatcher.handles[0])
    reactor.pass_(LOOK)
    (said,) = deadlocks(caplog)
    assert "(2, the first is " in said


def give_to_none(dispatcher):
    """A call that is in no queue."""
    work = give(dispatcher, abs, 1)
    dispatcher.queue.remove(work)
    return work


def test_what_was_cancelled_is_not_queued(reactor, caplog):
    dispatcher, _ = all_wait(reactor)
    give(dispatcher, abs, 1).cancel()
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
    later = handle.dispatcher.submit(sleep, (1,), {}, task_options=TaskOptions(None, 0))
    handle.dies()
    assert [*handle.dispatcher.queue] == [*begun, later]
