"""What has gone wrong between callers, drones, messages and time, each with its own test: most was
found by walks through such interleavings (test_pool_state.py has those of today).
"""

from collections import deque
from types import SimpleNamespace

import pytest
from in_time import (
    brief,
    dispatcher_of,
    give,
    give_chunk,
    lasting,
    make_ready,
    overlapped,
    submitted,
)

from polycephaly import DroneDied, Promise
from polycephaly.errors import Malformed
from polycephaly.pool.collecting import take_timeline
from polycephaly.pool.handlers import handle_message, handle_records
from polycephaly.pool.interfaces import TaskOptions
from polycephaly.pool.task import Task
from polycephaly.wire.map_chunks import answers_head, pack_answers
from polycephaly.wire.messages import (
    ANSWERS,
    CALLS,
    RECALL,
    pack_returned,
    unpack_lists,
    unpack_work,
)


def test_a_call_that_waits_for_a_promise_gets_the_error_of_the_pool_that_breaks(reactor):
    dispatcher = dispatcher_of(reactor, 1, on_death="break")
    waiting = give(dispatcher, brief, Promise())
    dispatcher.handles[0].dies()
    assert isinstance(waiting.promise.exception(), DroneDied)


def test_a_caller_gets_the_error_of_queueing_a_task_whose_inputs_are_settled(reactor, monkeypatch):
    """As a hook of the input, the queueing would have its error logged, and the task would never
    be settled."""

    def no_memory(task):
        raise MemoryError

    dispatcher, value = dispatcher_of(reactor, 1), Promise()
    value.set_result(1)
    monkeypatch.setattr(dispatcher, "_enqueue", no_memory)
    with pytest.raises(MemoryError):
        dispatcher.submit(brief, (value,), {})


def answer(handle, number, first, values):
    payload = answers_head(first, len(values), False) + pack_answers(values, False, None, None)
    now = handle.dispatcher.reactor.now
    outcome = (number, ANSWERS, now, now + 0.001 * len(values), payload, b"")
    handle_records(handle.dispatcher, handle, {0: outcome})


def test_what_a_drone_answers_after_its_pool_broke_is_ignored(reactor):
    dispatcher = dispatcher_of(reactor, 2, on_death="break")
    first, second = dispatcher.handles
    chunk = give_chunk(dispatcher, brief, "abc")
    busy, other = (first, second) if first.in_flight else (second, first)
    other.dies()
    answer(busy, chunk.number, 0, "a")
    handle_message(dispatcher, busy, pack_returned([(chunk.number, 1)]))
    reactor.turn()
    assert isinstance(chunk.promise.exception(), DroneDied) and not chunk.rests


def test_each_part_of_a_chunk_has_a_span_of_its_own(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    chunk = give_chunk(dispatcher, brief, "abc")
    handle_message(dispatcher, handle, pack_returned([(chunk.number, 2)]))
    answer(handle, chunk.number, 0, "a")
    reactor.turn()
    [rest] = handle.in_flight.values()
    answer(handle, rest.number, 0, "b")
    answer(handle, rest.number, 1, "c")
    spans = take_timeline(dispatcher).spans
    assert [(span.item, span.calls) for span in spans] == [(10, 1), (11, 1), (12, 1)]


def test_what_a_dead_drone_has_kept_of_a_chunk_is_given_once(reactor):
    """Answers are kept in its page some at a time, and then sent together."""
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    chunk = give_chunk(dispatcher, brief, "abcdef")
    for first, values in ((0, "ab"), (2, "c"), (0, "abcd"), (1, "bcde"), (0, "abcde")):
        answer(handle, chunk.number, first, [*values])
    reactor.turn()
    given = [value for part in chunk.parts for value in part.answers]
    assert given == [*"abcde"] and [part.item for part in chunk.parts] == [10, 12, 13, 14]
    assert chunk.calls_left == 1


@pytest.mark.parametrize(
    ("first", "count", "returned"), [(1, 1, 0), (0, 4, 0), (0, 0, 4), (0, 2, 2)]
)
def test_answers_and_calls_that_a_chunk_does_not_have_are_malformed(
    reactor, first, count, returned
):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    chunk = give_chunk(dispatcher, brief, "abc")
    with pytest.raises(Malformed, match=f"of task {chunk.number}"):
        answer(handle, chunk.number, first, "abcd"[:count])
        handle_message(dispatcher, handle, pack_returned([(chunk.number, returned)]))


def test_what_waits_behind_a_long_call_of_a_chunk_is_divided_among_the_idle_drones(reactor):
    dispatcher = dispatcher_of(reactor, 3)
    chunk = give_chunk(dispatcher, brief, range(100))
    busy = chunk.handle
    reactor.pass_(1.0)
    assert RECALL in [kind for kind, _ in busy.sent_to_it]
    answer(busy, chunk.number, 0, [*range(9)])
    handle_message(dispatcher, busy, pack_returned([(chunk.number, 90)]))
    reactor.turn()
    assert chunk.calls_left == 1
    assert [(rest.first_item, rest.count) for rest in chunk.rests] == [(20, 30), (50, 30), (80, 30)]
    sent = {task for each in dispatcher.handles for task in each.in_flight.values()}
    assert sent == {chunk, *chunk.rests}  # one of them behind another


def test_a_dead_drones_chunk_is_lost_as_far_as_it_had_begun(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    chunk = give_chunk(dispatcher, brief, range(10))
    answer(handle, chunk.number, 0, [*range(3)])
    handle.last_started = lambda: chunk.number
    handle.status_page = SimpleNamespace(call=6 | 1 << 32)
    handle.dies()
    reactor.turn()
    assert "item 15" in str(chunk.promise.exception())
    [rest] = chunk.rests
    assert (rest.first_item, rest.count, rest.promise.done()) == (16, 4, False)


def test_a_lost_answer_of_a_call_beside_others_ends_its_drone(reactor):
    dispatcher = dispatcher_of(reactor, 1, width=2)
    [handle] = dispatcher.handles
    task = give(dispatcher, overlapped)
    dispatcher.watch_for_lost_answer(handle)
    reactor.pass_(2.0)
    assert "malformed" in handle.kill_reason
    handle.dies()
    assert isinstance(task.promise.exception(), DroneDied)


def test_a_call_whose_answer_may_be_lost_does_not_run_again(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    task = give(dispatcher, lasting)
    handle = task.handle
    dispatcher.watch_for_lost_answer(handle)
    handle.last_started = lambda: task.number + 1  # which was answered, so it is not in flight
    handle.dies()
    assert isinstance(task.promise.exception(), DroneDied)


def test_a_call_whose_answer_a_drone_has_not_sent_as_a_whole_is_lost_and_not_computed_again(
    reactor,
):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    handle.answers(give(dispatcher, brief))  # known as short, two are sent at once
    small, large, last = [submitted(dispatcher, brief, each) for each in range(3)]
    reactor.turn()
    assert [*handle.in_flight.values()] == [small, large, last]
    handle.unread.append(handle.answer(small))
    handle.last_started = lambda: large.number
    handle.dies()
    assert isinstance(large.promise.exception(), DroneDied)
    assert small.promise.done() and not last.promise.done()


def test_calls_of_one_function_go_in_order_whatever_their_arguments_are(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    handle.answers(give(dispatcher, brief))  # known as short, many are sent at once
    tasks = [submitted(dispatcher, brief, x) for x in (1, {2: 2}, 3, 4, {5: 5}, {6: 6}, "7" * 99)]
    messages = []
    monkeypatch.setattr(handle, "send", lambda frames, tasks: messages.append(frames))
    reactor.turn()
    numbers = []
    for frames in messages:
        for number, kind, _, payload in unpack_work(frames):
            if kind == CALLS:
                some, calls = unpack_lists(payload)
                assert set(map(type, calls)) == {tuple}
                numbers += some
            else:
                numbers.append(number)
    assert numbers == [task.number for task in tasks]


def test_a_task_for_one_drone_that_comes_as_the_inbox_is_emptied_is_that_drones(reactor):
    dispatcher = dispatcher_of(reactor, 2)
    one, _ = dispatcher.handles
    give(dispatcher, brief, 0, target=one)  # it takes no other task meanwhile

    class Inbox(deque):
        def append(self, task):
            reactor.turn()
            super().append(task)

    submitted(dispatcher, brief, 1, task_options=TaskOptions(priority=1))
    dispatcher.inbound = dispatcher.state.inbound = Inbox(dispatcher.inbound)
    late = submitted(dispatcher, brief, 2, target=one)
    reactor.turn()
    assert [*one.dedicated] == [late]


@pytest.mark.parametrize("why", ["", "it is too large"])
def test_a_drone_that_is_being_killed_gets_no_task(reactor, why):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    handle.kill(why)
    queued, own = submitted(dispatcher, brief, 1), submitted(dispatcher, brief, 2, target=handle)
    reactor.turn()
    assert not handle.in_flight
    handle.dies()
    make_ready(dispatcher)
    assert [*dispatcher.handles[0].in_flight.values()] == [queued]
    assert why in str(own.promise.exception())


def test_no_timer_keeps_a_pool_that_has_ended(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    give(dispatcher, lasting, timeout=1000).promise.cancel()
    dispatcher.close()
    reactor.turn()
    dispatcher.handles[0].dies()
    assert dispatcher.has_ended
    assert [alarm for _, _, alarm in reactor.timers.heap if not alarm.is_over] == []


def test_a_request_for_a_kept_value_that_is_lost_keeps_no_drone_from_its_end(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    handle.packing.add(7)
    dispatcher.watch_for_lost_answer(handle)
    reactor.pass_(2.0)
    assert "malformed" in handle.kill_reason


def test_a_kept_value_that_is_computed_again_while_the_pool_ends_gets_a_drone(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    dispatcher.close()
    reactor.turn()
    again = Task(dispatcher)
    again.definition, again.args = dispatcher.registry.define(brief), (1,)
    dispatcher.unsettled[again] = None
    reactor.post(lambda: dispatcher.supervisor.on_died(handle, 0))
    reactor.post(lambda: dispatcher.resume(again))
    reactor.turn()
    make_ready(dispatcher)
    dispatcher.handles[0].answers(again, "again")
    assert again.promise.result() == "again"
    dispatcher.handles[0].dies()
    assert dispatcher.has_ended


def test_a_task_for_one_drone_gets_the_error_of_the_pool_that_broke_meanwhile(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1)
    [handle] = dispatcher.handles
    dispatcher.break_pool(ValueError("no disk"))
    monkeypatch.setattr(dispatcher, "check_open", lambda: None)  # as just before
    with pytest.raises(ValueError, match="no disk"):
        dispatcher.submit(brief, (1,), {}, handle)
    late = Task(dispatcher)
    late.definition, late.args = dispatcher.registry.define(brief), (1,)
    late.target = handle
    dispatcher.inbound.append(late)  # by a thread that has seen the drone ready just before
    dispatcher.queue_inbound()
    reactor.turn()
    assert isinstance(late.promise.exception(), ValueError)


def test_a_task_that_is_queued_just_after_its_pool_broke_gets_the_error(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    dispatcher.break_pool(ValueError("no disk"))
    late = Task(dispatcher)
    late.definition, late.args = dispatcher.registry.define(brief), (1,)
    dispatcher.inbound.append(late)  # by a thread that has seen the pool whole just before
    dispatcher.queue_inbound()
    reactor.turn()
    assert isinstance(late.promise.exception(), ValueError)
