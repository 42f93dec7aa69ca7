"""Who comes first: priorities, and resources that are scarce."""

import time
from collections import deque
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from faults import append, hold_until, lines, wait_for
from in_time import FakeReactor, brief, dispatcher_of, lasting, submitted

import polycephaly as poly
from polycephaly.errors import DroneDied
from polycephaly.pool.interfaces import TaskOptions
from polycephaly.pool.pool_state import MAX_UNSWEPT_TASKS
from polycephaly.pool.reactor import Reactor
from polycephaly.pool.retry import Retry
from polycephaly.pool.task import Recipe, Task
from polycephaly.promises.promise import Promise
from polycephaly.server.fairness import FairOrder
from polycephaly.wire.functions import RemoteFunction

DB = (("db", 1),)


@pytest.fixture
def reactor(monkeypatch):
    """With calls of unknown length, of which a drone is given one at a time."""
    monkeypatch.setattr(RemoteFunction, "record_duration", lambda *args: None)
    return FakeReactor()


def submit(dispatcher, key, priority=0, resources=(), *, inputs=(), target=None, **options):
    task_options = TaskOptions(priority=priority, resources=resources, **options)
    return submitted(dispatcher, lasting, key, *inputs, target=target, task_options=task_options)


def running(dispatcher):
    """The keys of the calls in flight, by drone."""
    dispatcher.reactor.turn()
    in_flight = [task for handle in dispatcher.handles for task in handle.in_flight.values()]
    return [task.args[0] for task in in_flight]


def end_one(dispatcher):
    """The first call in flight ends. Its key."""
    handle = next(each for each in dispatcher.handles if each.in_flight)
    task = next(iter(handle.in_flight.values()))
    handle.answers(task)
    return task.args[0]


def end_all(dispatcher):
    dispatcher.reactor.turn()
    ended = []
    while any(handle.in_flight for handle in dispatcher.handles):
        ended.append(end_one(dispatcher))
    return ended


# -- priorities ------------------------------------------------------------------------------------


def test_a_lost_value_is_computed_again_by_its_priority(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    lost = submit(dispatcher, "lost", priority=2, retries=1)
    end_all(dispatcher)
    lost.recompute_payload = b""  # as of a value on a node of a cluster
    submit(dispatcher, "running")
    reactor.turn()
    submit(dispatcher, "other", priority=1)
    assert not Recipe(lost).compute(dispatcher).done()
    assert end_all(dispatcher) == ["running", "lost", "other"]


@pytest.mark.guarantee("pool-13")
def test_of_what_waits_the_highest_priority_is_sent_first_and_equals_in_order(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    for key, priority in enumerate((0, 0, -1, 5, 3, 5, 0, -1)):
        submit(dispatcher, key, priority)
    # The first was sent at once: until then no other was known.
    assert end_all(dispatcher) in ([0, 3, 5, 4, 1, 6, 2, 7], [3, 5, 4, 0, 1, 6, 2, 7])


def test_what_was_queued_before_the_first_priority_is_overtaken_too(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    plain = [submitted(dispatcher, lasting, key) for key in range(3)]
    assert running(dispatcher) == [0]
    submit(dispatcher, 9, 1)
    dispatcher.submit(lasting, (3,), {})
    assert end_all(dispatcher) == [0, 9, 1, 2, 3]
    assert all(task.promise.done() for task in plain)


def test_what_was_given_back_comes_first_among_its_equals_only(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    submit(dispatcher, 0, retries=1)
    assert running(dispatcher) == [0]
    submit(dispatcher, 1)
    submit(dispatcher, 2, 1)
    dispatcher.handles[0].dies()
    (fresh,) = dispatcher.handles
    fresh.starts()
    fresh.says_hello()
    assert end_all(dispatcher) == [2, 0, 1]


def test_the_priority_of_a_call_for_one_drone_is_among_the_calls_for_that_drone(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    (handle,) = dispatcher.handles
    for key, priority in enumerate((0, 0, 1)):
        submit(dispatcher, key, priority, target=handle)
        reactor.turn()
    assert end_all(dispatcher) == [0, 2, 1]


def test_a_call_whose_input_comes_late_is_queued_by_its_priority(reactor):
    dispatcher, late = dispatcher_of(reactor, 1), Promise()
    submit(dispatcher, 0)
    assert running(dispatcher) == [0]
    submit(dispatcher, 1)
    submit(dispatcher, 2, 1, inputs=[late])
    reactor.turn()
    late.set_result(7)
    assert end_all(dispatcher) == [0, 2, 1]


def test_clients_take_turns_within_a_priority(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    submit(dispatcher, "running")
    reactor.turn()
    for key, priority in (("a1", 0), ("a2", 0), ("a3", 0), ("b1", 0), ("b2", 1)):
        submit(dispatcher, key, priority).client_tag = key[0]
    FairOrder(dispatcher)._order()  # of calls that have just come, too
    assert end_all(dispatcher) == ["running", "b2", "a1", "b1", "a2", "a3"]


def test_the_turns_of_many_calls_take_no_time_for_each_pair_of_them(reactor):
    """The reactor waits meanwhile. An index into a deque takes the longer the longer that is."""

    class Queue(deque):
        def __getitem__(self, index):
            raise AssertionError("an index")

        __setitem__ = __getitem__

    dispatcher = dispatcher_of(reactor, 1)
    dispatcher.assignment.queue = queue = Queue(
        SimpleNamespace(client_tag=tag, priority=0) for tag in ["a"] * 1_000 + ["b", "c"]
    )
    first, *_, b, c = queue
    FairOrder(dispatcher)._order()
    assert len(queue) == 1_002 and [queue.popleft() for _ in range(3)] == [first, b, c]
    queue.clear()


def test_a_cancelled_call_and_a_closed_pool_leave_nothing_behind(reactor):
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    tasks = [submit(dispatcher, key, key % 3, DB * (key % 2)) for key in range(8)]
    tasks[5].promise.cancel()  # before it is queued
    reactor.turn()
    tasks[3].promise.cancel()
    tasks[4].promise.cancel()
    dispatcher.close()
    assert sorted(end_all(dispatcher)) == [0, 1, 2, 6, 7]
    assert dispatcher.pending() == 0 and not any(dispatcher.assignment.resources.queues.values())


def test_tasks_that_are_still_to_be_queued_take_up_room(reactor):
    dispatcher = dispatcher_of(reactor, 1, max_queued=2)
    submit(dispatcher, 0, 1)
    reactor.turn()
    assert dispatcher.has_room()
    submit(dispatcher, 1, 1)
    submit(dispatcher, 2, 1)
    assert not dispatcher.has_room()  # though the reactor has queued neither
    assert end_all(dispatcher) == [0, 1, 2] and dispatcher.has_room()


# -- resources -------------------------------------------------------------------------------------


@pytest.mark.guarantee("pool-13")
def test_no_more_run_at_once_than_the_resource_allows_and_others_overtake(reactor):
    dispatcher = dispatcher_of(reactor, 4, resources=(("db", 2),))
    for key in range(4):
        submit(dispatcher, key, resources=DB)
    for key in range(4, 7):
        submit(dispatcher, key)
    assert sorted(running(dispatcher)) == [0, 1, 4, 5]
    assert dispatcher.assignment.resources.free() == {"db": 0}
    ended = end_all(dispatcher)
    assert sorted(ended) == list(range(7)) and dispatcher.assignment.resources.free() == {"db": 2}


def test_what_waits_for_a_resource_keeps_its_place_when_that_is_free(reactor):
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    for key, resources in enumerate(((), DB, (), DB, ())):
        submit(dispatcher, key, resources=resources)
        reactor.turn()
    assert end_all(dispatcher) == [0, 1, 2, 3, 4]


def test_the_highest_priority_gets_the_resource_first(reactor):
    dispatcher = dispatcher_of(reactor, 2, resources=DB)
    for key, priority in enumerate((0, 0, 1)):
        submit(dispatcher, key, priority, DB)
        reactor.turn()
    assert end_all(dispatcher) == [0, 2, 1]


def test_a_call_that_needs_several_takes_all_or_none(reactor):
    sizes = (("db", 1), ("gpu", 1))
    dispatcher = dispatcher_of(reactor, 3, resources=sizes)
    submit(dispatcher, 0, resources=DB)
    submit(dispatcher, 1, resources=sizes)
    submit(dispatcher, 2, resources=(("gpu", 1),))
    submit(dispatcher, 3)
    assert sorted(running(dispatcher)) == [0, 3]  # what 1 will need is kept free for it
    assert [key for key in end_all(dispatcher) if key != 3] == [0, 1, 2]


def test_a_call_that_needs_much_is_not_overtaken_for_ever_by_calls_that_need_little(reactor):
    dispatcher = dispatcher_of(reactor, 2, resources=(("db", 2),))
    submit(dispatcher, "first", resources=DB)
    reactor.turn()
    submit(dispatcher, "much", resources=(("db", 2),))
    for key in range(5):
        submit(dispatcher, key, resources=DB)
    assert running(dispatcher) == ["first"]
    assert end_all(dispatcher)[:2] == ["first", "much"]


def test_a_call_with_resources_is_sent_where_it_begins_at_once(reactor):
    """Behind another in a busy drone it would hold what others could use."""
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    definition = dispatcher.registry.define(lasting)
    definition.seconds = 1e-5  # so short that a busy drone would be given it
    submit(dispatcher, 0)
    reactor.turn()
    submit(dispatcher, 1, resources=DB)
    submit(dispatcher, 2, resources=DB, target=dispatcher.handles[0])
    assert running(dispatcher) == [0] and dispatcher.assignment.resources.free() == {"db": 1}
    assert end_all(dispatcher) == [0, 1, 2]


def test_a_stream_of_short_calls_does_not_keep_a_call_with_resources_waiting_for_ever(reactor):
    """A drone is sent the next ones before it is idle, which it therefore never is."""
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    (handle,) = dispatcher.handles
    dispatcher.registry.define(brief).seconds = 1e-4
    stream = [submitted(dispatcher, brief, key) for key in range(3)]
    reactor.turn()
    waiting = submit(dispatcher, "db", resources=DB)
    for key in range(3, 200):
        stream.append(submitted(dispatcher, brief, key))
        handle.answers(next(iter(handle.in_flight.values())))
        if waiting.sending:
            break
    assert key < 20
    end_all(dispatcher)
    assert all(each.promise.done() for each in (waiting, *stream))


def test_when_a_call_that_claims_a_resource_is_cancelled_the_next_one_is_sent(reactor):
    dispatcher = dispatcher_of(reactor, 3, resources=(("db", 2),))
    submit(dispatcher, "first", resources=DB)
    reactor.turn()
    much = submit(dispatcher, "much", resources=(("db", 2),))
    submit(dispatcher, "little", resources=DB)
    assert running(dispatcher) == ["first"]
    much.promise.cancel()
    assert running(dispatcher) == ["first", "little"]


def test_a_call_that_does_not_overlap_goes_to_a_drone_that_is_idle(reactor):
    async def overlapped(key):
        return key

    dispatcher = dispatcher_of(reactor, 2, width=4, resources=DB)
    dispatcher.submit(overlapped, (0,), {})
    reactor.turn()
    busy = next(each for each in dispatcher.handles if each.in_flight)
    task = submit(dispatcher, 1, resources=DB)
    reactor.turn()
    assert task.sending and task.sending.handle is not busy


def test_clients_take_turns_at_a_resource_too(reactor):
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    submit(dispatcher, "running", resources=DB)
    reactor.turn()
    for key in ("a1", "a2", "a3", "b1"):
        submit(dispatcher, key, resources=DB).client_tag = key[0]
    reactor.turn()
    FairOrder(dispatcher)._order()
    assert end_all(dispatcher) == ["running", "a1", "b1", "a2", "a3"]


def test_calls_for_one_drone_that_wait_for_a_resource_take_up_its_room_only(reactor):
    dispatcher = dispatcher_of(reactor, 1, max_queued=2, resources=DB)
    (handle,) = dispatcher.handles
    for key in range(3):
        dispatcher.needs_checks = False  # this thread would wait for room
        submit(dispatcher, key, resources=DB, target=handle)
    assert dispatcher.backlog(handle) == 3 and dispatcher.has_room()  # posted
    reactor.turn()
    assert dispatcher.backlog(handle) == 2 and dispatcher.has_room()  # one was sent
    assert end_all(dispatcher) == [0, 1, 2] and dispatcher.backlog(handle) == 0


@pytest.mark.parametrize("retries", [0, Retry(1, on=DroneDied, delay=0, jitter=False)])
def test_what_is_lost_with_a_drone_frees_its_resource(reactor, retries):
    dispatcher = dispatcher_of(reactor, 2, resources=DB)
    first = submit(dispatcher, 0, resources=DB, retries=retries)
    assert running(dispatcher) == [0]
    submit(dispatcher, 1, resources=DB)
    reactor.turn()
    next(each for each in dispatcher.handles if each.in_flight).dies()
    reactor.turn()
    assert end_all(dispatcher) == ([1] if retries == 0 else [1, 0])
    assert isinstance(first.promise.exception(), DroneDied) is (retries == 0)


def test_a_cancelled_call_holds_the_resource_until_its_drone_has_stopped_it(reactor):
    dispatcher = dispatcher_of(reactor, 2, resources=DB)
    first = submit(dispatcher, 0, resources=DB)
    second = submit(dispatcher, 1, resources=DB)
    assert running(dispatcher) == [0]
    assert first.promise.cancel()
    assert running(dispatcher) == [0] and not second.promise.running()
    end_one(dispatcher)  # the drone tells that it was stopped
    assert running(dispatcher) == [1]


def test_what_only_a_drone_may_run_dies_with_it(reactor):
    dispatcher = dispatcher_of(reactor, 2, resources=DB)
    first, second = dispatcher.handles
    submit(dispatcher, 0, resources=DB, target=second)
    assert running(dispatcher) == [0]
    waiting = submit(dispatcher, 1, resources=DB, target=first)
    reactor.turn()
    first.dies()
    assert isinstance(waiting.promise.exception(), DroneDied)
    with pytest.raises(DroneDied):
        submit(dispatcher, 2, resources=DB, target=first)
    assert dispatcher.assignment.resources.free() == {"db": 0}


def test_a_pool_that_ends_rejects_what_waits_for_a_resource(reactor):
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    running_task, waiting = (submit(dispatcher, key, resources=DB) for key in range(2))
    reactor.turn()
    dispatcher.kill()
    reactor.turn()
    assert waiting.promise.cancelled()
    dispatcher.handles[0].dies()
    assert running_task.promise.exception() is not None and dispatcher.has_ended


def test_a_call_after_the_end_is_rejected(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    submit(dispatcher, 0, 1)
    end_all(dispatcher)
    dispatcher.close()
    reactor.turn()
    dispatcher.handles[0].dies()
    assert dispatcher.has_ended
    monkeypatch.setattr(dispatcher, "check_open", lambda: None)  # it was open when that was checked
    task = submit(dispatcher, 1, 1)
    assert isinstance(task.promise.exception(), RuntimeError)


# -- what users see --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "error", "told"),
    [
        ({"gpu": 1}, ValueError, "no resource 'gpu' here: the pool has 'db'"),
        ({"db": 3}, ValueError, "would never run: the pool has 2"),
        ({"db": 0}, ValueError, "must be at least 1, not 0"),
        ({"db": 0.5}, TypeError, "whole number, not 0.5"),
        ({"db": True}, TypeError, "whole number, not True"),
        ("db", TypeError, "as in {'db': 2}, not 'db'"),
    ],
)
def test_resources_that_never_are_free_are_refused_at_the_call(wrong, error, told):
    with (
        poly.Pool(1, resources={"db": 2}, engine="inline") as pool,
        pytest.raises(error, match=told),
    ):
        pool.options(resources=wrong)


@pytest.mark.parametrize("wrong", [1.5, "1", True, 1 << 40])
def test_what_is_no_priority_is_refused(wrong):
    with (
        poly.Pool(1, engine="inline") as pool,
        pytest.raises((TypeError, ValueError), match="priority"),
    ):
        pool.options(priority=wrong)


def test_a_pool_without_resources_says_how_to_have_some():
    with (
        poly.Pool(1, engine="inline") as pool,
        pytest.raises(ValueError, match=r"has none.*, as in Pool\(resources=\{'db': 1\}\)"),
    ):
        pool.options(resources={"db": 1})


def test_options_are_added_up():
    with poly.Pool(1, resources={"db": 2}, engine="inline") as pool:
        given = pool.options(priority=2).options(resources={"db": 1}).options(timeout=3)
        assert given._task_options == TaskOptions(3, 0, 2, DB)
        assert given.options(resources={}, priority=0)._task_options == TaskOptions(3)
        assert given.promise(abs, -1).value == 1
        assert list(given.map(abs, [-1, -2])) == [1, 2]


def test_a_lone_drone_takes_priorities():
    with poly.Drone(engine="inline") as drone:
        assert drone.options(priority=1).promise(abs, -1).value == 1


def test_brief_calls_with_resources_go_one_by_one(reactor):
    dispatcher = dispatcher_of(reactor, 2, resources=DB)
    tasks = [
        submitted(dispatcher, brief, key, task_options=TaskOptions(resources=DB))
        for key in range(3)
    ]
    reactor.turn()
    assert [task.args[0] for task in tasks if task.sending] == [0]
    tasks[0].definition.seconds = 1e-5
    assert end_all(dispatcher) == [0, 1, 2]


# -- with processes --------------------------------------------------------------------------------


def held_for_a_moment(path):
    """How many run at this moment, this one among them."""
    append(path, "+")
    most = sum(1 if line == "+" else -1 for line in lines(path))
    time.sleep(0.05)
    append(path, "-")
    return most


def test_clients_have_priorities_and_share_the_resources_of_a_served_pool(tmp_path):
    path, gate, card = (str(tmp_path / name) for name in ("path", "gate", "pool.json"))
    with (
        poly.Pool(3, resources={"db": 2}) as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        with pytest.raises(ValueError, match="would never run: the pool has 2"):
            remote.options(resources={"db": 3})
        theirs = remote.options(resources={"db": 1})
        ours = pool.options(resources={"db": 1})
        calls = [each.promise(held_for_a_moment, path) for each in (ours, theirs) * 4]
        assert max(poly.gather(*calls).result()) <= 2
        assert list(theirs.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
        assert pool.status()["resources"] == {"db": {"size": 2, "free": 2}}
        assert remote.status()["resources"] == {"db": {"size": 2, "free": 2}}
        held = [pool.promise(hold_until, gate) for _ in range(3)]
        wait_for(lambda: all(each.running() for each in held))
        for key, priority in (("low", -1), ("usual", 0), ("high", 1)):
            remote.options(priority=priority).promise(append, path + "2", key)
        wait_for(lambda: pool.status()["queued"] == 3)
        pool.resize(1)
        append(gate, "")
    assert lines(path + "2") == ["high", "usual", "low"]


def test_an_error_while_a_task_is_queued_rejects_it(reactor, monkeypatch):
    dispatcher = dispatcher_of(reactor, 1)
    task = Task(dispatcher)
    task.definition, task.args = dispatcher.registry.define(brief), (1,)
    monkeypatch.setattr(dispatcher.state, "_place", Mock(side_effect=MemoryError))
    task.priority = 1
    dispatcher.unsettled[task] = None
    dispatcher._enqueue(task)
    with pytest.raises(MemoryError):
        dispatcher.queue_inbound()
    monkeypatch.undo()
    dispatcher.break_pool(ValueError("no memory"))  # as the reactor does then
    reactor.turn()
    assert isinstance(task.promise.exception(), ValueError)


def test_a_task_that_ctrl_c_left_before_the_queue_does_not_keep_its_pool(reactor):
    dispatcher = dispatcher_of(reactor, 1)
    task = Task(dispatcher)
    task.definition, task.args = dispatcher.registry.define(brief), (1,)
    dispatcher.inbound.append(task)  # Ctrl-C came after this
    dispatcher.close()
    reactor.turn()
    task.promise.cancel()  # as `submit` does then
    reactor.turn()
    dispatcher.handles[0].dies()
    assert dispatcher.has_ended


@pytest.mark.parametrize("where", ["any drone", "one drone", "a resource"])
def test_cancelled_tasks_do_not_pile_up_behind_those_that_wait(reactor, where):
    dispatcher = dispatcher_of(reactor, 1, resources=DB)
    [handle] = dispatcher.handles
    options = {"any drone": {}, "one drone": {"target": handle}, "a resource": {"resources": DB}}[
        where
    ]
    submit(dispatcher, 0, **options)
    assert running(dispatcher) == [0]
    waiting = [submit(dispatcher, key, **options) for key in (1, 2)]
    for _ in range(3 * MAX_UNSWEPT_TASKS):
        task = submit(dispatcher, 3, **options)
        reactor.turn()
        task.promise.cancel()
    reactor.turn()
    queues = (
        dispatcher.assignment.queue,
        handle.dedicated,
        *dispatcher.assignment.resources.queues.values(),
    )
    assert sum(map(len, queues)) < len(waiting) + 1.5 * MAX_UNSWEPT_TASKS
    assert end_all(dispatcher) == [0, 1, 2]


def test_each_pool_gets_the_time_of_its_own_turn():
    """That of another one may take long: time limits count from when a task is sent."""
    now, turns = iter([1.0, 2.0]), []
    pools = [Mock(take_turn=turns.append), Mock(take_turn=turns.append)]
    Reactor._run_tenants(SimpleNamespace(tenants=pools, timers=Mock(now=lambda: next(now))))
    assert turns == [1.0, 2.0]
