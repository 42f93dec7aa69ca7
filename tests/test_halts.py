"""Time limits, interrupts and kills: what is decided by the clock, in a time that the tests move
(in_time.py).

That a drone heeds an interrupt, and that it can be killed, is shown by test_cancel.py and
test_options.py."""

import math
from types import SimpleNamespace

import pytest
from in_time import A_MOMENT, about, dispatcher_of, give, overlapped

from polycephaly.pool.handlers import handle_message
from polycephaly.pool.interfaces import State
from polycephaly.pool.limits import GRACE_STEPS, STACK_SECONDS
from polycephaly.runtime.tuning import tuning
from polycephaly.wire.messages import CANCEL, FRAMES, pack_frames

GRACE = tuning.grace_seconds
STEP = GRACE / GRACE_STEPS


@pytest.fixture
def alone(reactor):
    """The one drone of a pool."""
    return dispatcher_of(reactor, 1).handles[0]


@pytest.fixture
def wide(reactor):
    """One that runs several coroutines at once."""
    return dispatcher_of(reactor, 1, width=9).handles[0]


def run(handle, timeout=None, what=abs):
    """What that drone has begun, or was sent to be run next."""
    task = give(handle.dispatcher, what, -1, timeout=timeout)
    assert task.number in handle.in_flight
    return task


def known_to_be_short(handle):
    """So that several calls are sent at once."""
    handle.dispatcher.registry.define(abs).record_duration(1e-4, 1)


# -- limits ----------------------------------------------------------------------------------------


def test_a_limit_strikes_at_its_time_and_not_before(reactor, alone):
    task = run(alone, timeout=3.0)
    reactor.pass_(3.0 - A_MOMENT)
    assert not task.promise.done() and not alone.got(CANCEL)
    reactor.pass_(A_MOMENT)
    assert isinstance(task.promise.exception(), TimeoutError) and alone.got(CANCEL) == [task.number]
    assert alone.looks == [3.0] and alone.timer_at == math.inf and not alone.deadlines


def test_the_error_names_the_call_the_limit_and_the_drone(reactor, alone):
    task = run(alone, timeout=0.25)
    reactor.pass_(0.25)
    assert str(task.promise.exception()) == "abs ran for more than 0.25 s on pool.0"


FRAMES_OF_A_TASK = [["file.py", 3, "inner", "wait()"], ["file.py", 9, "outer", "inner()"]]


def tells_its_frames(handle, task):
    [request] = handle.got(FRAMES)
    tasks = {task.number: FRAMES_OF_A_TASK}
    answer = {"current": task.number, "tasks": tasks, "threads": [], "places": {}}
    handle_message(handle.dispatcher, handle, pack_frames(request, answer))
    handle.dispatcher.reactor.turn()


def test_the_frames_at_which_the_limit_struck_are_the_cause_of_the_error(reactor, alone):
    task = run(alone, timeout=3.0)
    reactor.pass_(3.0 - STACK_SECONDS - A_MOMENT)
    assert not alone.got(FRAMES)
    reactor.pass_(2 * A_MOMENT)
    tells_its_frames(alone, task)
    assert not task.promise.done() and not alone.got(CANCEL)
    reactor.pass_(STACK_SECONDS)
    lines = str(task.promise.exception().__cause__).splitlines()
    assert [line.strip() for line in lines if "File" in line] == [
        'File "file.py", line 9, in outer',
        'File "file.py", line 3, in inner',
    ]
    assert not alone.deadlines


def test_a_limit_does_not_wait_for_frames(reactor, alone):
    task = run(alone, timeout=3.0)
    reactor.pass_(3.0)
    assert (
        isinstance(task.promise.exception(), TimeoutError)
        and task.promise.exception().__cause__ is None
    )
    tells_its_frames(alone, task)  # too late
    assert task.promise.exception().__cause__ is None


def test_a_limit_shorter_than_the_time_for_frames_has_them_too(reactor, alone):
    task = run(alone, timeout=STACK_SECONDS / 2)
    reactor.turn()
    tells_its_frames(alone, task)
    reactor.pass_(STACK_SECONDS)
    assert task.promise.exception().__cause__ is not None


@pytest.mark.guarantee("promise-4")
def test_time_in_the_queue_does_not_count(reactor, alone):
    """Also of one that would be sent ahead if it had no limit."""
    known_to_be_short(alone)
    holding = run(alone)
    limited = give(alone.dispatcher, abs, -1, timeout=3.0)
    reactor.pass_(100)
    alone.answers(holding)
    reactor.pass_(3.0 - A_MOMENT)
    assert not limited.promise.done()
    reactor.pass_(A_MOMENT)
    assert isinstance(limited.promise.exception(), TimeoutError)


def test_a_limit_waits_for_the_end_of_a_debuggers_session(reactor, alone):
    task = run(alone, timeout=3.0)
    alone.status_page = SimpleNamespace(stands_still=True)
    reactor.pass_(100)
    alone.status_page.stands_still = False
    assert not task.promise.done()
    reactor.pass_(3.0)
    assert isinstance(task.promise.exception(), TimeoutError) and alone.got(CANCEL) == [task.number]


@pytest.mark.parametrize("together", [False, True])
def test_what_is_answered_in_time_is_not_halted(together, reactor, alone):
    task = run(alone, timeout=3.0)
    reactor.pass_(2.9)
    alone.answers(task, 1, together)
    reactor.pass_(10)
    assert task.promise.value == 1 and not alone.got(CANCEL) and not alone.kills
    assert not alone.deadlines and not reactor.timers.heap


def test_what_was_answered_in_time_while_this_process_stood_still_is_not_halted(reactor, alone):
    task = run(alone, timeout=3.0)
    alone.unread.append(alone.answer(task, 1))
    reactor.stand_still(1000)
    assert task.promise.value == 1 and not alone.sent_to_it


def test_what_was_not_answered_while_this_process_stood_still_is_halted(reactor, alone):
    task = run(alone, timeout=3.0)
    reactor.stand_still(1000)
    assert isinstance(task.promise.exception(), TimeoutError) and alone.got(CANCEL) == [task.number]


def test_what_was_cancelled_is_not_halted_again_by_its_limit(reactor, alone):
    task = run(alone, timeout=0.5 * GRACE)
    assert task.promise.cancel()
    reactor.pass_(GRACE - STEP / 2)
    assert alone.got(CANCEL) == [task.number] and task.promise.cancelled() and not alone.deadlines
    reactor.pass_(STEP)
    assert alone.kills == about(GRACE)


def test_the_first_of_several_limits_sets_the_timer_and_each_the_next(reactor, wide):
    tasks = [run(wide, timeout, overlapped) for timeout in (1.0, 2.5, 4.0)]
    assert wide.timer_at == reactor.now + 1.0 - STACK_SECONDS
    assert len(reactor.timers.heap) == 2  # with that of the watch
    wide.answers(tasks[0])
    reactor.pass_(2.0)
    assert wide.timer_at == reactor.now + 0.5 - STACK_SECONDS
    assert list(wide.deadlines) == [task.number for task in tasks[1:]]
    wide.answers(tasks[1])
    wide.answers(tasks[2])
    reactor.pass_(10)
    assert not wide.looks and wide.timer_at == math.inf and not wide.sent_to_it


def test_one_that_was_answered_while_another_ones_answers_were_read_is_not_stopped(reactor, wide):
    stopped, answered = (run(wide, timeout, overlapped) for timeout in (1.0, 1.005))
    receive_all = wide.receive_all

    def take_long():
        receive_all()
        if reactor.passed < 1.001:
            reactor.now += 0.003
            wide.unread.append(wide.answer(answered, "in time"))
            reactor.now += 0.007

    wide.receive_all = take_long
    reactor.pass_(2.0)
    assert answered.promise.value == "in time" and wide.got(CANCEL) == [stopped.number]


def test_of_several_limits_only_those_that_are_over_strike(reactor, wide):
    tasks = [run(wide, timeout, overlapped) for timeout in (1.0, 1.0, 1.5, 3.0)]
    reactor.pass_(1.0)
    assert wide.got(CANCEL) == [task.number for task in tasks[:2]] and wide.looks == [1.0]
    assert [task.promise.done() for task in tasks] == [True, True, False, False]
    reactor.pass_(0.5)
    assert [task.promise.done() for task in tasks] == [True, True, True, False]


def test_a_later_but_shorter_limit_sets_an_earlier_timer(reactor, wide):
    long, short = run(wide, 5.0, overlapped), run(wide, 2.0, overlapped)
    reactor.pass_(2.0)
    assert short.promise.done() and not long.promise.done()
    wide.answers(short)
    reactor.pass_(3.0 - A_MOMENT)
    assert not long.promise.done()
    reactor.pass_(A_MOMENT)
    assert isinstance(long.promise.exception(), TimeoutError)


def test_a_timer_that_another_comes_before_is_called_off(reactor, wide):
    for task in [run(wide, 5.0, overlapped), run(wide, 2.0, overlapped)]:
        wide.answers(task)
    reactor.pass_(20.0)
    assert not wide.looks and wide.timer_at == math.inf


def test_limits_beside_a_long_one_leave_no_timers(reactor, wide):
    run(wide, 3600.0, overlapped)
    for _ in range(300):
        wide.answers(run(wide, 1.0, overlapped))
        reactor.pass_(1.5)
    assert len(reactor.timers.heap) < 100  # those that were called off are swept together


def test_a_limit_keeps_no_dispatcher_that_has_ended(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    (handle,) = dispatcher.handles
    handle.answers(give(dispatcher, abs, 1, timeout=1e6))
    dispatcher.kill()
    reactor.turn()
    handle.dies()
    assert all(timer.is_over for at, _, timer in reactor.timers.heap if at > reactor.now + 1e5)


def test_no_limit_at_all_and_one_that_never_comes_set_no_timer(reactor, wide):
    run(wide, None, overlapped)
    endless = run(wide, math.inf, overlapped)
    assert wide.timer_at == math.inf and len(reactor.timers.heap) == 1  # that of the watch
    assert list(wide.deadlines) == [endless.number]
    reactor.pass_(100)
    assert not wide.looks


def test_limits_of_what_is_done_are_forgotten_with_the_next_work(reactor, alone):
    for _ in range(100):
        task = run(alone, timeout=3600.0)
        assert list(alone.deadlines) == [task.number]
        alone.answers(task, together=True)  # which leaves its deadline where it is
    assert len(reactor.timers.heap) == 2  # with that of the watch


def test_limits_of_overlapped_work_are_kept_when_more_is_sent(reactor, wide):
    tasks = [run(wide, 5.0, overlapped), run(wide, None, overlapped), run(wide, 6.0, overlapped)]
    assert list(wide.deadlines) == [tasks[0].number, tasks[2].number]


# -- interrupts ------------------------------------------------------------------------------------


def test_who_does_not_heed_an_interrupt_is_killed_after_grace_in_steps(reactor, alone):
    reactor.pass_(5.0)
    task = run(alone)
    assert task.promise.cancel()
    reactor.pass_(0)
    assert alone.got(CANCEL) == [task.number]
    reactor.pass_(GRACE - STEP / 2)
    assert not alone.kills
    reactor.pass_(STEP)
    assert alone.looks == about(*(5.0 + STEP * step for step in range(1, GRACE_STEPS + 1)))
    assert (
        alone.kills == about(5.0 + GRACE) and "was told to stop, and went on" in alone.kill_reason
    )
    reactor.pass_(10 * GRACE)
    assert len(alone.kills) == 1


@pytest.mark.guarantee("promise-3")
def test_a_pause_of_this_process_takes_one_step_of_grace(reactor, alone):
    run(alone).promise.cancel()
    reactor.stand_still(1000 * GRACE)
    assert len(alone.looks) == 1 and not alone.kills
    reactor.pass_(GRACE - STEP * 3 / 2)
    assert not alone.kills
    reactor.pass_(STEP)
    assert alone.kills == about(1000 * GRACE + GRACE - STEP)


def test_who_answers_within_grace_lives(reactor, alone):
    task = run(alone)
    task.promise.cancel()
    reactor.pass_(GRACE - STEP / 2)
    alone.answers(task)
    reactor.pass_(10 * GRACE)
    assert not alone.kills and len(alone.looks) == GRACE_STEPS


def test_an_answer_that_was_not_read_yet_counts(reactor, alone):
    task = run(alone)
    task.promise.cancel()
    reactor.pass_(GRACE - STEP / 2)
    alone.unread.append(alone.answer(task))
    reactor.pass_(STEP)
    assert not alone.kills and not alone.in_flight


def test_the_dead_are_not_killed(reactor, alone):
    task = run(alone)
    task.promise.cancel()
    reactor.pass_(0)
    alone.dies()
    alone.in_flight[task.number] = task  # as where it had sent answers that are still on their way
    reactor.pass_(10 * GRACE)
    assert not alone.kills and len(alone.looks) <= 2


def test_what_its_limit_has_interrupted_is_killed_after_grace(reactor, alone):
    run(alone, timeout=3.0)
    reactor.pass_(3.0 + GRACE + A_MOMENT)
    assert alone.kills == about(3.0 + GRACE)


def test_what_waits_behind_other_work_in_its_drone_holds_nobody_up(reactor, alone):
    known_to_be_short(alone)
    running, behind = run(alone), run(alone)
    behind.promise.cancel()
    reactor.pass_(10 * GRACE)
    assert alone.got(CANCEL) == [behind.number] and not running.promise.done()
    assert not alone.kills and len(alone.looks) == GRACE_STEPS


def test_what_holds_up_work_behind_it_is_killed(reactor, alone):
    """The work behind it was not begun, so that loses nothing."""
    known_to_be_short(alone)
    running, behind = run(alone), run(alone)
    running.promise.cancel()
    reactor.pass_(GRACE + A_MOMENT)
    assert alone.kills == about(GRACE)
    alone.dies()
    (new,) = alone.dispatcher.handles
    assert not behind.promise.done() and new is not alone
    new.starts()
    new.says_hello()
    assert behind.number in new.in_flight


# -- beside overlapped work ------------------------------------------------------------------------


def test_beside_work_that_somebody_waits_for_the_hung_one_is_noted_and_looked_at_again(
    reactor, wide
):
    hung, wanted = run(wide, None, overlapped), run(wide, None, overlapped)
    hung.promise.cancel()
    reactor.pass_(GRACE - STEP / 2)
    assert not wide.hung and wide.can_take()
    reactor.pass_(STEP)
    assert wide.hung == {hung.number} and not wide.can_take()
    reactor.pass_(10 * GRACE)
    assert not wide.kills and not wanted.promise.done()
    assert wide.looks == about(*(STEP * step for step in range(1, 11 * GRACE_STEPS + 1)))


@pytest.mark.parametrize(
    ("how", "killed"),
    [
        ("answered", 3 * GRACE),
        ("cancelled", 2.5 * GRACE),
    ],  # then it is the first of these whose own grace is over
)
def test_the_hung_one_is_killed_when_all_beside_it_are_done(how, killed, reactor, wide):
    hung, *beside = [run(wide, None, overlapped) for _ in "123"]
    hung.promise.cancel()
    for task, at in zip(beside, (1.5 * GRACE, 2.2 * GRACE), strict=True):
        reactor.pass_(at - reactor.passed)
        assert not wide.kills
        if how == "answered":
            wide.answers(task)
        else:
            task.promise.cancel()
    reactor.pass_(GRACE)
    assert wide.kills[:1] == about(killed)


def test_the_hung_one_is_killed_with_those_beside_it_that_it_keeps_from_running(reactor, wide):
    hung, wanted = run(wide, None, overlapped), run(wide, None, overlapped)
    hung.promise.cancel()
    wide.status_page = SimpleNamespace(holder=wanted.number)  # which may end soon
    reactor.pass_(GRACE + STEP / 2)
    assert not wide.kills
    wide.status_page.holder = hung.number
    reactor.pass_(GRACE)
    assert wide.kills == about(2 * GRACE) and "overlapped was told to stop" in wide.kill_reason


def test_the_hung_one_may_still_come_back(reactor, wide):
    hung, wanted = run(wide, None, overlapped), run(wide, None, overlapped)
    hung.promise.cancel()
    reactor.pass_(GRACE + STEP / 2)
    waits = give(wide.dispatcher, overlapped, 1)
    assert waits.number not in wide.in_flight
    wide.answers(hung)
    assert not wide.hung and waits.number in wide.in_flight
    wide.answers(wanted)
    reactor.pass_(10 * GRACE)
    assert not wide.kills and wide.state is State.READY
