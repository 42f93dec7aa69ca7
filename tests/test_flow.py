"""`flow`: calls inside a pool's block are nodes of a graph, each of which runs when its inputs are
there."""

import asyncio
import contextlib
import contextvars
import gc
import inspect
import os
import subprocess
import sys
import threading
import time
import traceback
import weakref
from concurrent.futures import CancelledError

import pytest
from faults import append, hold_until, lines, wait_for

import polycephaly as poly
from polycephaly import Promise, green
from polycephaly.pool import stall_detection
from polycephaly.pool.task_promise import TaskPromise, facts_of
from polycephaly.runtime.tuning import tuning


@poly.flow
def add(a, b=0):
    "The sum."
    return a + b


@poly.flow
def where(*_):
    return os.getpid()


@poly.flow
def fail(x):
    return 1 // (x * 0)


@poly.flow
def total(values):
    return sum(values)


@poly.flow
async def later(x):
    await green.sleep(0)
    return x


class Account:
    def __init__(self, balance):
        self.balance = balance

    @poly.flow
    def after(self, change):
        return self.balance + change

    @staticmethod
    @poly.flow
    def double(x):
        return 2 * x


# -- where a call is a node ------------------------------------------------------------------------


def test_inside_a_block_a_call_is_a_promise_and_outside_it_is_the_function():
    assert add(1, 2) == 3
    with poly.Pool(2):
        p = add(add(1, 2), b=add(3))
        assert isinstance(p, Promise) and p.value == 6
        assert where().value != os.getpid()
    assert where() == os.getpid()


def test_the_innermost_block_of_this_thread_counts():
    def drone_of(promise):
        return promise.spans.drone

    with poly.Pool(1, name="outer"):
        with poly.Pool(1, name="inner"):
            inner = where()
            assert isinstance(inner.value, int) and drone_of(inner).startswith("inner")
        outer = where()
        assert isinstance(outer.value, int) and drone_of(outer).startswith("outer")
        found = []
        threads = [
            threading.Thread(target=lambda: found.append(where())),
            threading.Thread(
                target=contextvars.copy_context().run, args=[lambda: found.append(where().value)]
            ),
        ]
        for each in threads:
            each.start()
            each.join()
        assert found[0] == os.getpid() and found[1] == outer.value


def test_a_block_that_ends_by_an_error_is_left_too():
    with contextlib.suppress(KeyError), poly.Pool(1):
        raise KeyError
    assert add(1, 1) == 2


def test_in_asyncio_and_in_green_threads():
    async def main():
        async with poly.Pool(1):
            return await add(add(1), await add(2)), await asyncio.create_task(other())

    async def other():
        return await add(4)

    assert asyncio.run(main()) == (3, 4)
    assert green.run(main_of_green) == (3, 5)
    assert add(1) == 1


async def main_of_green():
    async with poly.Pool(1):
        return await add(add(1), 2), await green.spawn(in_another)


async def in_another():
    return await add(2, 3)


def test_a_served_pool_runs_graphs_too(tmp_path):
    card = tmp_path / "card.json"
    with poly.Pool(2) as pool, poly.serve(pool, file=card), poly.connect(card):
        assert total([local(1), local(2), local(local(3))]).value == 6
        error = add(local_failure()).exception(60)
        assert isinstance(error, ZeroDivisionError)


@poly.flow
def local(x):
    return x


@poly.flow
def local_failure():
    return 1 // 0


def test_a_node_in_a_drone_calls_others_as_plain_functions(pool):
    @poly.flow
    def twice(x):
        return add(add(x, x), 0)

    with poly.Pool(1):
        assert twice(twice(1)).value == 4


def test_a_node_may_have_a_pool_of_its_own():
    @poly.flow
    def nested(x):
        with poly.Pool(1):
            return add(x, 1).value

    with poly.Pool(1):
        assert nested(nested(1)).value == 3


# -- what can be a node ----------------------------------------------------------------------------


def test_it_looks_like_the_function():
    assert add.__name__ == "add" and add.__doc__ == "The sum." and add.__module__ == __name__
    assert str(inspect.signature(add)) == "(a, b=0)" and add.__wrapped__(1, 2) == 3


def test_closures_lambdas_methods_coroutine_functions_classes_and_builtins():
    k = 10
    with poly.Pool(2, width=4):
        assert poly.flow(lambda x: x + k)(add(1)).value == 11
        assert Account(100).after(add(5)).value == 105 and Account.double(add(5)).value == 10
        assert later(later(3)).value == 3
        assert poly.flow(complex)(1, add(2)).value == 1 + 2j
        assert poly.flow(max)(add(1), add(2)).value == 2
        with poly.Drone() as drone:
            assert poly.flow(len)([drone.promise("1"), add(1)]).value == 2
    assert green.run(later, 4) == 4


def test_functions_defined_after_the_snapshot_that_call_each_other(pool, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import polycephaly as poly\n"
        "with poly.Pool(1) as pool:\n"
        "    @poly.flow\n"
        "    def one(n): return 1\n"
        "    @poly.flow\n"
        "    def count(n): return one(n) + (count(n - 1) if n else 0)\n"
        "    print(count(count(3)).value, one(one).value)\n"
    )
    run = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (run.stdout, run.stderr) == ("5 1\n", "")


def test_its_options_are_those_of_the_pool(tmp_path):
    marks = str(tmp_path / "marks")

    @poly.flow(retries=1, timeout=30)
    def dies_once(path):
        append(path, "x")
        if len(lines(path)) == 1:
            os._exit(3)
        return len(lines(path))

    @poly.flow(timeout=0.05)
    def hangs(x):
        threading.Event().wait()

    with poly.Pool(1, output="discard"):
        assert dies_once(marks).value == 2
        assert isinstance(add(hangs(1)).exception(30), TimeoutError)


@pytest.mark.parametrize(
    "wrong", [3, None, classmethod(print), property(print), staticmethod(print)]
)
def test_what_is_no_callable_is_refused(wrong):
    if wrong is None:
        assert callable(poly.flow())
        return
    with pytest.raises(TypeError, match="flow takes a callable"):
        poly.flow(wrong)


def test_wrong_options_are_refused():
    for options in ({"timeout": 0}, {"timeout": "1"}, {"retries": -1}, {"retries": 1.5}):
        with pytest.raises((TypeError, ValueError)):
            poly.flow(**options)


def test_a_call_in_the_block_of_a_pool_that_was_shut_down_is_refused():
    with poly.Pool(1) as pool:
        pool.shutdown()
        with pytest.raises(RuntimeError, match="shutdown"):
            add(1)


# -- the graph -------------------------------------------------------------------------------------


def test_a_block_ends_when_its_graph_is_done():
    with poly.Pool(2):
        layer = [add(i) for i in range(64)]
        while len(layer) > 1:
            layer = [add(a, b) for a, b in zip(layer[::2], layer[1::2], strict=True)]
    assert layer[0].done() and layer[0].value == sum(range(64))


def test_a_graph_of_many_nodes_is_right():
    side = 60
    with poly.Pool(2):
        row = [add(1) for _ in range(side)]
        for _ in range(side - 1):
            new = [row[0]]
            for above in row[1:]:
                new.append(add(new[-1], above))
            row = new
    paths = [1] * side
    for _ in range(side - 1):
        for i in range(1, side):
            paths[i] += paths[i - 1]
    assert [p.value for p in row] == paths


def test_no_node_runs_before_its_inputs_are_there(tmp_path):
    ran = str(tmp_path / "ran")

    @poly.flow
    def note(name, *inputs):
        append(ran, name)
        return name

    with poly.Pool(2):
        late = Promise()
        a, b = note("a"), note("b", late)
        c = note("c", [a, {"b": b}])
        assert a.value == "a" and not c.done()
        late.set_result(1)
        assert c.value == "c"
    assert lines(ran) == ["a", "b", "c"]


# -- rejection and cancelling ----------------------------------------------------------------------


@pytest.mark.guarantee("graph-2")
def test_what_depends_on_a_node_that_fails_is_rejected_with_its_error_and_its_name():
    with poly.Pool(2):
        good = add(1)
        bad = fail(good)
        path = [add(bad), total([1, {"x": 2} and bad])]
        for _ in range(500):
            path.append(add(path[-1], path[-2]))
        error = path[-1].exception(30)
        assert isinstance(error, ZeroDivisionError) and error.__cause__ is bad.exception().__cause__
        (note,) = [note for note in error.__notes__ if note.startswith("failed input: ")]
        assert "fail #" in note
        assert good.value == 1 and add(good, 1).value == 2


class OfItsCode(Exception):
    """Its constructor takes something else than it hands on."""

    def __init__(self, code):
        super().__init__(f"failed with {code}")
        self.code = code


def refuse(code):
    raise OfItsCode(code)


def locals_in(error):
    """Of the frames in its traceback that are of this file."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_locals for frame in frames if frame.f_code.co_filename == __file__]


@pytest.mark.parametrize("wrong", [lambda x: 1 // x, refuse])
def test_each_that_depends_on_a_node_that_fails_has_an_error_of_its_own(wrong):
    with poly.Pool(1):
        bad = poly.flow(wrong)(0)
        rest = [add(bad, n) for n in range(5)]
        errors = [bad.exception(), *(each.exception() for each in rest)]
        assert (
            len(set(map(id, errors))) == 6
            and len({(type(each), str(each)) for each in errors}) == 1
        )

        def ask(node, number):
            with pytest.raises(type(errors[0])) as caught:
                _ = node.value
            return caught.value

        for number, node in enumerate([bad, *rest]):
            error = ask(node, number)
            assert error is errors[number]
            assert [each["number"] for each in locals_in(error) if "node" in each] == [number]
            shown = "".join(traceback.format_exception(error))
            assert "_RemoteTraceback" in shown and ("1 // x" in shown or "raise OfItsCode" in shown)
        assert not getattr(errors[0], "__notes__", ()) and "failed input" in errors[1].__notes__[0]
        assert getattr(errors[1], "code", 0) == 0


def test_the_lines_of_an_error_that_was_raised_here_stay_with_all_that_depend_on_it():
    with poly.Pool(1):
        start = Promise()
        node = add(add(start.then(lambda x: refuse(x))))
        start.set_result(5)
        with pytest.raises(OfItsCode, match="failed with 5") as caught:
            _ = node.value
    assert caught.value.code == 5 and "raise OfItsCode(code)" in "".join(
        traceback.format_exception(caught.value)
    )


def test_a_node_that_cannot_be_pickled_rejects_its_path_as_any_does():
    lock = threading.Lock()
    with poly.Pool(1):
        bad = poly.flow(lambda x: lock)(1)
        rest = add(bad, 1)
        error = rest.exception(30)
    assert isinstance(error, TypeError) and "while pickling the function itself" in str(
        error.__notes__
    )
    assert f"#{facts_of(bad).number}" in error.__notes__[-1]
    assert {node.state for node in poly.Graph(rest).nodes} == {"rejected"}


def test_a_drone_that_dies_under_a_node_rejects_the_rest_of_its_path_only(tmp_path):
    with poly.Pool(1, output="discard"):
        died = poly.flow(os._exit)(add(3))
        rest, other = add(died, 1), add(1, 1)
        assert isinstance(rest.exception(30), poly.DroneDied) and other.value == 2
        assert any("_exit #" in note for note in rest.exception().__notes__)


@pytest.mark.guarantee("graph-2")
def test_cancelling_a_node_cancels_what_only_led_to_it_and_rejects_what_depends_on_it(tmp_path):
    with poly.Pool(2):
        late = Promise()
        shared, mine = add(late, 1), add(late, 2)
        deeper = add(mine, 3)
        node = total([shared, deeper])
        after = add(add(node))
        other = add(shared, 10)
        assert node.cancel()
        assert [p.cancelled() for p in (deeper, mine, shared, other)] == [True, True, False, False]
        assert not late.done()
        with pytest.raises(CancelledError, match=r"total #.*was cancelled"):
            after.result(30)
        late.set_result(0)
        assert (shared.value, other.value) == (1, 11)


class Panel:
    """Has attributes that are called as ours are."""

    _state = "waiting for data"

    def __init__(self, told):
        self.told = told

    def show(self, promise):
        self.told.append(promise.result())


def test_what_somebody_waits_for_is_not_cancelled_with_what_needs_it():
    with poly.Pool(1):
        late = Promise()
        asked = [add(late, i) for i in range(3)]
        told = []
        asked[0].add_done_callback(Panel(told).show)
        text = asked[1].then(str)
        assert total(asked).cancel()
        assert [p.cancelled() for p in asked] == [False, False, True]
        late.set_result(5)
        assert text.value == "6"
    assert told == [5]


def test_what_was_cancelled_is_not_looked_at_again():
    with poly.Pool(1):
        source = add(Promise())
        nodes = [add(source) for _ in range(10)]
        for each in nodes[5:] + nodes[1:5]:
            assert each.cancel() and not source.done()
        assert len(source._hooks) == 1
        assert nodes[0].cancel() and source.cancelled()


@pytest.mark.guarantee("graph-2")
def test_only_nodes_are_cancelled_with_a_node(pool):
    late = Promise()
    plain = pool.promise(abs, late)
    with poly.Pool(1):
        node = add(plain)
        assert node.cancel()
    assert not plain.cancelled()
    late.set_result(-1)
    assert plain.value == 1


def test_cancelling_goes_up_to_what_runs(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    with poly.Pool(1, output="discard"):
        running = poly.flow(hold_until)(gate, started)
        node = add(running)
        wait_for(lambda: lines(started))
        assert node.cancel() and running.cancelled()
        assert add(1, 1).value == 2


def test_a_whole_graph_is_cancelled_from_its_end():
    with poly.Pool(1):
        late = Promise()
        layer = everyone = [add(late, i) for i in range(40)]
        for _ in range(40):
            layer = [total([a, b]) for a, b in zip(layer, layer[1:] + layer[:1], strict=True)]
            everyone = everyone + layer
        end = total(layer)
        assert end.cancel() and all(p.cancelled() for p in everyone)
        assert add(1, 1).value == 2


# -- what would wait for itself --------------------------------------------------------------------


def test_a_promise_by_hand_that_the_node_which_needs_it_is_to_settle_is_refused():
    with poly.Pool(1):
        p = Promise()
        node = add(total([1, {"x": [p]}["x"][0]]))
        with pytest.raises(
            poly.Deadlock, match=r"circle: add #\d+ -> total #\d+ -> <Promise pending.* -> add #"
        ):
            node.then(p.set_result)
        p.set_result(4)
        assert node.value == 5


def test_a_circle_of_several_promises_by_hand_is_found_when_it_is_closed():
    with poly.Pool(1):
        first, second = Promise(), Promise()
        a = add(first)
        a.then(second.set_result)
        b = add(poly.gather(second, add(1)).then(sum))
        with pytest.raises(poly.Deadlock):
            b.then(first.set_result)
        first.set_result(1)
        assert b.value == 2


def test_what_then_gives_may_not_wait_for_what_then_gave():
    late = Promise()
    with poly.Pool(1):
        itself = late.then(lambda _: add(itself))
        late.set_result(1)
        error = itself.exception(60)
        assert isinstance(error, poly.Deadlock) and "add #" in str(error)
        assert isinstance(add(itself).exception(60), poly.Deadlock)


def test_a_long_circle_is_named_shortly():
    first = Promise()
    p = first
    for _ in range(50):
        p = p.then(abs)
    with pytest.raises(poly.Deadlock, match=r"\(\d+ more\)") as caught:
        p.then(first.set_result)
    assert len(str(caught.value)) < 1000
    first.set_result(1)


def test_a_program_that_hangs_by_what_nobody_can_know_is_told_so(monkeypatch):
    monkeypatch.setattr(tuning, "stall_report_seconds", 0.05)
    told = threading.Event()
    monkeypatch.setattr("warnings.warn", lambda message, *_: (said.append(message), told.set()))
    said = []
    with poly.Pool(1, name="stuck"):
        p = Promise()
        node = add(p)
        node.add_done_callback(lambda done: None)

        def settle():
            told.wait(30)
            p.set_result(1)

        thread = threading.Thread(target=settle)
        thread.start()
        assert node.value == 1
        thread.join()
    assert "stuck has nothing to run: add #" in said[0] and "<Promise pending" in said[0]


def test_looking_who_waits_for_what_visits_each_node_once(monkeypatch):
    """In a turn of the reactor: a long chain must not keep it for minutes."""
    visited = []
    waits_for = TaskPromise._dependencies
    monkeypatch.setattr(
        TaskPromise, "_dependencies", lambda node: visited.append(node) or waits_for(node)
    )
    with poly.Pool(1) as pool:
        last = first = poly.flow(time.sleep)(1000)
        for _ in range(300):
            last = add(last)
        seen = set()
        assert all(
            stall_detection.unsettled_root(each, seen) is None
            for each in [*pool._dispatcher.state.awaiting_inputs]
        )
        assert len(visited) == len(seen) == 301
        first.cancel()
        assert isinstance(last.exception(60), CancelledError)


def test_a_node_that_has_an_end_of_a_channel_is_cancelled_with_what_it_led_to():
    @poly.flow
    def produce(end, value):
        return value

    with poly.Pool(1):
        for end in (None, green.Channel().sender()):
            node = produce(end, Promise())
            assert add(node).cancel() and node.cancelled()


# -- its picture -----------------------------------------------------------------------------------


def test_a_graph_shows_what_waits_and_what_was_done(tmp_path):
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")
    late = Promise()
    with poly.Pool(1, name="drawn"):
        running = poly.flow(hold_until)(gate, started)
        wait_for(lambda: lines(started))
        ready = add(1)
        end = total([ready, add(late), running])
        states = {node.label: node.state for node in poly.Graph(end).nodes}
        assert states == {
            "promise": "waiting",
            "hold_until": "running",
            "add": "waiting",
            "total": "waiting",
        }
        open(gate, "w").close()
        late.set_exception(KeyError("late"))
        end.exception()
        assert (ready.value, running.done()) == (1, True)
    graph = poly.Graph(end, ready)
    found = {node.label: (node.state, len(node.inputs)) for node in graph.nodes}
    assert found["total"] == ("rejected", 3) and found["hold_until"] == ("done", 0)
    assert found["add"] == ("rejected", 0) and graph.whole
    assert {node.drone for node in graph.nodes} == {"drawn.0", ""}


def test_a_graph_knows_a_node_whose_input_had_failed_before_it_was_made():
    with poly.Pool(1):
        failed = fail(1)
        failed.exception()
        end = add(add(failed))  # nobody keeps the one in the middle
        assert isinstance(end.exception(), ZeroDivisionError)
    assert [node.state for node in poly.Graph(end).nodes] == ["rejected"] * 3


def test_a_graph_does_not_keep_a_node_that_had_failed_before_it_was_made():
    with poly.Pool(1):
        failed = fail(1)
        failed.exception()
        node = add(failed)
        assert node.done()
        kept = weakref.ref(node)
        del node
        gc.collect()
        assert kept() is None


def test_a_node_whose_function_does_not_pickle_is_rejected_with_why():
    lock = threading.Lock()
    with poly.Pool(1):
        node = poly.flow(lambda: lock)()
        end = add(node)
        assert (
            isinstance(node.exception(), TypeError)
            and end.exception().args == node.exception().args
        )
        assert [each.state for each in poly.Graph(end).nodes] == ["rejected", "rejected"]


def test_a_graphs_texts_are_what_mermaid_and_graphviz_take():
    with poly.Pool(1):
        one = add(1)
        two = poly.flow(lambda x: [x])(one)
        assert two.value == [1]
    graph = poly.Graph(two)
    first, second = facts_of(one).number, facts_of(two).number
    assert f"n{first} --> n{second}" in graph.mermaid()
    assert f'n{second}["&lt;lambda&gt; {second} on' in str(graph)
    assert f"n{first} -> n{second};" in graph.dot() and graph.dot().endswith("}")
    assert "```mermaid" in graph._repr_markdown_() and "2 done" in repr(graph)


def test_a_graph_is_bounded_and_keeps_no_value():
    with poly.Pool(1):
        first = p = poly.flow(bytes)(10)
        kept = weakref.ref(first)
        for _ in range(300):
            p = poly.flow(len)([p])
        del first
        assert p.value == 1
    wait_for(lambda: kept() is None)
    graph = poly.Graph(p, many=50)
    assert len(graph.nodes) == 50 and not graph.whole and "..." in graph.mermaid()
    assert len(poly.Graph(p, many=1000).nodes) == 301
    assert {node.state for node in graph.nodes} == {"done"}


def test_a_graph_of_nothing_and_of_what_is_no_promise():
    assert poly.Graph().nodes == []
    with pytest.raises(TypeError, match="promises"):
        poly.Graph(3)
    with pytest.raises(ValueError, match="many"):
        poly.Graph(many=0)
