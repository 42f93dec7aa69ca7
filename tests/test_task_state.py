"""The check of the states of tasks finds each of these faults, and none in a pool that has none."""

import pytest
from in_time import dispatcher_of, give, submitted

from polycephaly import Promise
from polycephaly.pool.interfaces import TaskOptions
from polycephaly.pool.retry import Retry
from polycephaly.pool.task_state import DELAYED, ENDING, LEASED, PARKED, QUEUED, SENT
from polycephaly.pool.validation import validate

DB = (("db", 1),)


def act(x):
    raise AssertionError("nothing is run here")


@pytest.fixture
def dispatcher(reactor):
    """Two drones that are busy, and tasks in most of the states."""
    dispatcher = dispatcher_of(reactor, 2, resources=DB)
    first, _ = dispatcher.handles
    give(dispatcher, act, 1, target=first)
    submitted(dispatcher, act, 2, task_options=TaskOptions(resources=DB))
    reactor.turn()
    for each in (None, first):
        submitted(dispatcher, act, 3, target=each)
    submitted(dispatcher, act, 4, task_options=TaskOptions(resources=DB))
    submitted(dispatcher, act, Promise())
    again = submitted(dispatcher, act, 5, task_options=TaskOptions(retries=Retry(2, delay=9)))
    reactor.turn()
    dispatcher.assignment.queue.remove(again)
    dispatcher.assignment.leave_queue(again)
    dispatcher.on_failed(again, ValueError("once"))
    reactor.turn()
    validate(dispatcher)
    return dispatcher


def one(dispatcher, state):
    return next(task for task in dispatcher.unsettled if task.state is state)


def sent_twice(dispatcher):
    first, second = dispatcher.handles
    second.in_flight |= first.in_flight


def queued_twice(dispatcher):
    dispatcher.assignment.queue.append(dispatcher.assignment.queue[0])


def queued_and_sent(dispatcher):
    dispatcher.assignment.queue.append(one(dispatcher, SENT))


def forgotten_in_flight(dispatcher):
    dispatcher.handles[0].in_flight.clear()


def dropped_from_the_queue_of_a_drone(dispatcher):
    dispatcher.handles[0].dedicated.clear()


def dropped_from_the_queue_of_a_resource(dispatcher):
    dispatcher.assignment.resources.queues.clear()


def a_delay_without_a_timer(dispatcher):
    dispatcher.state.delayed.clear()


def a_delay_that_is_not_parked(dispatcher):
    dispatcher.state.parked.clear()


def inputs_that_nothing_waits_for(dispatcher):
    dispatcher.state.awaiting_inputs.clear()


def an_end_in_the_queue(dispatcher):
    dispatcher.assignment.queue[0].state = ENDING


def a_lease_in_the_queue(dispatcher):
    dispatcher.assignment.queue[0].state = LEASED


def parked_while_it_runs(dispatcher):
    one(dispatcher, SENT).state = PARKED


def delayed_while_it_waits(dispatcher):
    one(dispatcher, QUEUED).state = DELAYED


def sent_to_another_drone_than_its_own(dispatcher):
    first, second = dispatcher.handles
    next(iter(first.in_flight.values())).sending.handle = second.reference


def one_more_queued(dispatcher):
    dispatcher.assignment.queued += 1


def one_less_queued_for_a_drone(dispatcher):
    dispatcher.handles[0].queued -= 1


def a_resource_that_is_never_free_again(dispatcher):
    dispatcher.assignment.resources._free["db"] -= 1


def a_resource_that_two_have(dispatcher):
    dispatcher.assignment.resources._free["db"] += 1


def an_unknown_time_too_many(dispatcher):
    dispatcher.handles[0].unknown += 1


def an_overlap_too_many(dispatcher):
    dispatcher.handles[0].overlapping += 1


def a_load_below_nothing(dispatcher):
    dispatcher.handles[0].load = -1.0


def out_of_order(dispatcher):
    handle = dispatcher.handles[0]
    [task] = handle.in_flight.values()
    handle.in_flight[0] = other = submitted(dispatcher, act, 6)
    other.sending, other.state, other.position = task.sending, SENT, task.position - 1
    handle.unknown += 1
    dispatcher.inbound.clear()


FAULTS = [
    sent_twice,
    queued_twice,
    queued_and_sent,
    forgotten_in_flight,
    dropped_from_the_queue_of_a_drone,
    dropped_from_the_queue_of_a_resource,
    a_delay_without_a_timer,
    a_delay_that_is_not_parked,
    inputs_that_nothing_waits_for,
    an_end_in_the_queue,
    a_lease_in_the_queue,
    parked_while_it_runs,
    delayed_while_it_waits,
    sent_to_another_drone_than_its_own,
    one_more_queued,
    one_less_queued_for_a_drone,
    a_resource_that_is_never_free_again,
    a_resource_that_two_have,
    an_unknown_time_too_many,
    an_overlap_too_many,
    a_load_below_nothing,
    out_of_order,
]


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_found(dispatcher, plant):
    plant(dispatcher)
    with pytest.raises(AssertionError):
        validate(dispatcher)


def test_what_any_thread_has_settled_is_no_fault(dispatcher):
    for task in [*dispatcher.unsettled]:
        task.promise.cancel()
    validate(dispatcher)
