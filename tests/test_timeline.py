"""Timelines hold what drones and green threads did: all of it, with true times, for little, and
after the end."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from faults import exit_hard, hold_until, wait_for
from work import double, fail

import polycephaly as poly
from polycephaly import green
from polycephaly.pool import collecting
from polycephaly.pool.record import TraceBuffer
from polycephaly.pool.task_promise import facts_of
from polycephaly.runtime.tuning import tuning
from polycephaly.timeline import Span, Sums, event_log
from polycephaly.timeline.page import contents
from polycephaly.timeline.plain import pack_timeline, unpack_timeline
from polycephaly.timeline.trace import json_of

ROOT = Path(__file__).parents[1]


def noop(x):
    return x


def nap(seconds):
    time.sleep(seconds)


def spin(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def calls(timeline):
    return Counter({name: sums.calls for (_, name), sums in sums_by_function(timeline).items()})


def sums_by_function(timeline):
    found = {}
    for (_, name), sums in timeline.sums().items():
        found["", name] = sums + found.get(("", name), Sums())
    return found


def of_work(timeline):
    return [span for span in timeline.spans if not span.thread]


# -- what drones did -------------------------------------------------------------------------------


def test_a_call_has_the_times_that_its_promise_has_and_how_it_ended():
    with poly.Drone(name="one") as drone:
        promise = drone.promise(nap, 0.002)
        promise.result()
        [span] = drone.timeline.spans
    spans = promise.spans
    assert (span.name, span.drone, span.status, span.calls) == ("nap", "one", "done", 1)
    assert (span.queued, span.sent, span.started, span.finished, span.received) == (
        spans.queued, spans.sent, spans.started, spans.finished, spans.received,
    )  # fmt: skip
    assert span.seconds >= 0.002


def test_times_are_in_their_order_and_work_of_one_drone_does_not_overlap():
    with poly.Pool(2) as pool:
        for promise in [pool.promise(noop, i) for i in range(3000)]:
            promise.result()
        assert list(pool.map(double, range(3000))) == [2 * x for x in range(3000)]
        pool.doit(noop, [0] * 100)
        timeline = pool.timeline
    for span in of_work(timeline):
        assert span.queued <= span.sent <= span.started <= span.finished <= span.received, span
    for drone in timeline.drones:
        mine = [span for span in of_work(timeline) if span.drone == drone]
        mine.sort(key=lambda span: (span.started, -span.finished))
        before = None  # a drone may have had nothing to do
        for span in mine:
            if before is None or before.finished <= span.started + 1e-6:
                before = span
                continue
            # A span of many short tasks may contain one that was answered by itself.
            assert not before.number and span.finished <= before.finished + 1e-6, (before, span)


@pytest.mark.guarantee("log-5")
def test_every_call_is_counted_and_short_ones_that_came_together_are_one_span(monkeypatch):
    # So that they come together, however slow this machine is.
    monkeypatch.setattr(tuning, "batch_seconds", 60.0)
    monkeypatch.setattr(tuning, "flush_seconds", 60.0)
    monkeypatch.setattr("polycephaly.pool.map_source.CHUNK_SECONDS", 1.0)
    with poly.Pool(2) as pool:
        for promise in [pool.promise(noop, i) for i in range(5000)]:
            promise.result()
        list(pool.map(double, range(5000)))
        timeline = pool.timeline
    assert calls(timeline) == {"noop": 5000, "double": 5000}
    assert len(timeline.spans) < 5000


def test_calls_of_several_functions_that_came_together_are_told_apart():
    with poly.Pool(1) as pool:
        pool.doit(noop, 0), pool.doit(double, 0)
        for promise in [pool.promise((noop, double)[i % 2], i) for i in range(2000)]:
            promise.result()
        timeline = pool.timeline
    assert calls(timeline) == {"noop": 1001, "double": 1001}


def test_bytes_are_those_that_travelled():
    with poly.Drone() as drone:
        drone.doit(len, bytes(10_000))
        drone.doit(bytes, 20_000)
        there, back = drone.timeline.spans
    assert 10_000 <= there.bytes_sent < 11_000 and there.bytes_received < 1000
    assert back.bytes_sent < 1000 and 20_000 <= back.bytes_received < 21_000


def test_bytes_that_are_only_referred_to_are_not_counted():
    size = 1 << 20
    with poly.Pool(1) as pool:
        with pool.share(bytes(size)) as shared:
            for _ in range(3):
                assert pool.doit(len, shared) == size
        kept = pool.promise(bytes, size, keep=True)
        for _ in range(3):
            assert pool.doit(len, kept) == size
        node = poly.flow(bytes)(size)
        assert poly.flow(len)(node).value == size
        assert pool.doit(len, bytes(size)) == size
        sent = [span.bytes_sent for span in pool.timeline.spans if span.name == "len"]
    assert len(sent) == 8 and max(sent[:7]) < 1000 and size < sent[7] < size + 1000


def test_what_failed_was_cancelled_ran_out_of_time_or_died_is_marked_so(tmp_path):
    with poly.Pool(1, output="discard") as pool:
        pool.promise(fail, 1).exception()
        begun = tmp_path / "begun too late"
        never, limit = tmp_path / "never", 0.05
        while not begun.exists():  # if the machine stood still, it may end before it begins
            pool.options(timeout=limit).promise(hold_until, never, begun).exception()
            limit *= 2
        begun = tmp_path / "begun"
        cancelled = pool.promise(hold_until, tmp_path / "never", begun)
        wait_for(begun.exists)
        cancelled.cancel()
        pool.promise(exit_hard, 3).exception()
        assert pool.doit(noop, 1) == 1
    found = [(span.name, span.status) for span in pool.timeline.spans]
    assert [each for each, _ in groupby(found)] == [
        ("fail", "error"),
        ("hold_until", "timeout"),
        ("hold_until", "cancelled"),
        ("exit_hard", "died"),
        ("noop", "done"),
    ]
    failed = {name: sums.failed for (_, name), sums in pool.timeline.sums().items() if sums.failed}
    assert failed == {"fail": 1, "hold_until": len(found) - 3, "exit_hard": 1}


def test_what_runs_is_shown_as_running_and_what_waits_behind_it_is_counted(tmp_path):
    begun, end = tmp_path / "begun", tmp_path / "end"
    with poly.Pool(1) as pool:
        held = pool.promise(hold_until, end, begun)
        waiting = [pool.promise(noop, i) for i in range(3)]
        wait_for(begun.exists)
        timeline = pool.timeline
        end.touch()
        held.result()
        for each in waiting:
            each.result()
    [span] = timeline.spans
    assert (span.name, span.status, span.received) == ("hold_until", "running", None)
    assert span.sent <= span.started <= span.finished
    assert timeline.waiting == 3
    assert "3 more in the queue" in str(timeline)


def test_it_can_be_read_when_the_pool_has_ended_and_has_idle_drones_too():
    with poly.Pool(3, name="three") as pool:
        pool.drones[1].doit(nap, 0.001)
    timeline = pool.timeline
    assert timeline.drones == ["three.0", "three.1", "three.2"]
    assert [span.drone for span in timeline.spans] == ["three.1"]


def test_a_drone_of_a_pool_has_its_own():
    with poly.Pool(2, name="two") as pool:
        pool.drones[0].doit(noop, 1)
        pool.drones[1].doit(double, 1)
        timeline = pool.drones[1].timeline
    assert timeline.drones == ["two.1"]
    assert [span.name for span in timeline.spans] == ["double"]


@pytest.mark.guarantee("log-5")
def test_what_falls_out_of_the_bound_is_counted(monkeypatch):
    monkeypatch.setattr(tuning, "trace_spans", 40)
    with poly.Drone() as drone:
        for _ in range(150):
            drone.doit(noop, [1])
        timeline = drone.timeline
    assert len(timeline.spans) == 40
    assert timeline.spans_lost == 110
    assert calls(timeline) == {"noop": 40}
    assert "110 earlier spans not kept" in str(timeline)
    assert unpack_timeline(pack_timeline(timeline)).spans_lost == 110
    assert (timeline + timeline).spans_lost == 220


@pytest.mark.guarantee("log-6")
def test_nothing_of_a_call_is_kept_but_numbers():
    class Large(bytearray):
        pass

    with poly.Drone() as drone:
        promise = drone.promise(len, Large(10))
        promise.result()
        timeline = drone.timeline
    assert not any(span.needed for span in timeline.spans)
    kept = {type(value) for span in timeline.spans for value in span._replace(needed=None)}
    assert kept <= {str, int, float, bool, type(None)}


@pytest.mark.guarantee("log-6")
@pytest.mark.parametrize("describes", [True, False])
def test_a_pool_that_describes_no_items_keeps_none_of_green_code_in_its_drones(describes, tmp_path):
    async def slow(item):
        await green.sleep(0.001)

    async def items_and_calls():
        await green.map(slow, ["a secret", 424242424242])
        await green.call_long(time.sleep, 0.0016180339)

    with poly.Pool(1, describe_items=describes) as pool:
        pool.doit(items_and_calls)
        pool.timeline.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for item in ("a secret", "424242424242", "0.0016180339"):
        assert (item in page) == describes


def test_two_are_one_and_names_that_both_have_are_numbered():
    both = []
    for _ in range(2):
        with poly.Drone(name="same") as drone:
            drone.doit(nap, 0.001)
        both.append(drone.timeline)
    together = both[0] + both[1]
    assert together.drones == ["same", "same (2)"]
    assert [span.drone for span in together.spans] == ["same", "same (2)"]
    assert sum(both, poly.Timeline()).drones == together.drones
    assert len(together.sums()) == 2


def test_overlapped_coroutines_lie_in_lanes(tmp_path):
    async def meet(n):
        (tmp_path / str(n)).touch()
        while len(os.listdir(tmp_path)) < 4:
            await green.sleep(0.001)

    with poly.Pool(1, width=4) as pool:
        for promise in [pool.promise(meet, n) for n in range(4)]:
            promise.result()
        timeline = pool.timeline
    from polycephaly.timeline.rows import rows

    [row] = [row for row in rows(timeline) if not row.thread]
    assert len(row.spans) == 4 and len(row.lanes) > 1
    for lane in row.lanes:
        assert all(one.finished <= other.started for one, other in pairwise(lane))


# -- what green threads did ------------------------------------------------------------------------


def mapped(width):
    """Each of `width` threads takes one at least: the longer ones wait for each other."""
    met = threading.Barrier(width)

    def nap(seconds):
        time.sleep(seconds)
        if seconds > 0.01:
            met.wait(30)

    return green.map(nap, [0.01, 0.02, 0.03, 0.01], width=width)


def test_green_threads_of_a_drone_come_home_with_its_result():
    with poly.Drone(name="d") as drone:
        drone.doit(mapped, 2)
        timeline = drone.timeline
    [work] = of_work(timeline)
    items = [span for span in timeline.spans if span.thread and not span.whole]
    assert sorted(span.note for span in items) == ["0.01", "0.01", "0.02", "0.03"]
    assert {span.name for span in items} == {"nap"} and {span.drone for span in items} == {"d"}
    assert len({span.thread for span in items}) == 2
    assert all(work.started <= span.started < span.finished <= work.finished for span in items)
    lives = {span.thread: span for span in timeline.spans if span.whole}
    for item in items:
        assert (
            lives[item.thread].started <= item.started
            and item.finished <= lives[item.thread].finished
        )


def test_what_waits_and_what_computes_are_told_apart():
    with poly.Drone() as drone:
        drone.doit(nap, 0.1)
        drone.doit(spin, 0.1)
        waited, computed = drone.timeline.spans
    assert waited.cpu < 0.5 * waited.seconds
    assert computed.cpu >= 0.1


def test_this_images_green_threads_have_a_timeline():
    async def main():
        await green.call(nap, 0.05)  # in place, until the watchdog has another thread drive
        await green.call_long(nap, 0.01)

    async def item(n):
        await green.sleep(0.001)

    began = time.monotonic()
    green.run(main)
    green.spawn(nap, 0.01, name="native").result()
    green.map(item, [71, 72], width=1)
    spans = [
        span for span in green.timeline().spans if span.started >= began
    ]  # others have a `main`, too
    of_main = [span for span in spans if span.thread.startswith("main #")]
    assert [(span.name, span.note) for span in of_main if not span.whole] == [
        ("nap", "0.05"),
        ("nap", "0.01"),
    ]
    assert [span.whole for span in of_main] == [False, False, True]
    assert [span.name for span in spans if span.thread.startswith("native")] == ["nap", "native"]
    assert {span.note for span in spans} >= {"71", "72"}


def test_a_green_thread_that_lives_is_shown_and_an_error_is_marked():
    async def main():
        gate = green.Event()
        waits = green.spawn(gate.wait, name="is seen while it waits")
        with pytest.raises(ZeroDivisionError):
            await green.call_long(divide, 0)
        now = green.timeline()
        gate.set()
        await waits
        return now

    began = time.monotonic()
    spans = [span for span in green.run(main).spans if span.started >= began]
    assert [span.status for span in spans if span.thread.startswith("is seen while it waits")] == [
        "running"
    ]
    assert [span.status for span in spans if span.name == "divide"] == ["error"]


def test_names_that_fail_to_be_told_harm_nothing():
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError("not to be asked")

        def __call__(self, x):
            time.sleep(0.001)
            return x

    async def main():
        return await green.call_long(Odd(), 7)

    assert green.run(main) == 7
    assert [span.note for span in green.timeline().spans if span.name.endswith("Odd")] == ["7"]


def divide(n):
    time.sleep(0.001)
    return 1 / n


def test_a_drone_forgets_what_its_controller_did():
    green.map(nap, [0.001], width=1)
    assert event_log.event_log.events
    with poly.Drone() as drone:
        assert drone.doit(lambda: len(green.timeline().spans)) == 0
        assert not [span for span in drone.timeline.spans if span.thread]


def test_many_green_threads_are_counted_where_they_are_too_many_to_be_kept():
    def many():
        async def quick(n):
            await green.sleep(0.0001)

        green.map(quick, range(6000), width=200)

    with poly.Drone() as drone:
        drone.doit(many)
        timeline = drone.timeline
    items = [span for span in timeline.spans if span.name == "quick" and not span.whole]
    assert items
    assert len(items) + timeline.threads_lost <= 6000 + 200
    assert all(span.finished - span.started >= event_log.MIN_EVENT_SECONDS - 2e-6 for span in items)


@pytest.mark.parametrize(
    "sent",
    [
        b"", b"{", b"[]", b"null", b'{"names": []}',
        b'{"names": [1], "events": [[1]], "lost": 0}',
        b'{"names": ["a"], "events": [[0, 7, 1, 1, 1, 0, ""]], "lost": 0}',
        b'{"names": ["a"], "events": [[0, 0, "x", 1, 1, 0, ""]], "lost": 0}',
        b'{"names":[],"events":[],"lost":"x"}',
        b'{"names": ["a"], "events": [[0, 0, NaN, 1, 1, 0, ""]], "lost": 0}',
        b'{"names": ["a"], "events": [[0, 0, 1e300, 1, 1, 0, ""]], "lost": 0}',
        b"\xff\xfe", b'{"names": ["a"], "events": 5, "lost": 0}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_trail_that_is_none_is_refused(sent):
    with pytest.raises(ValueError):
        event_log.unpack_events(sent, "")


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_processor_time_that_cannot_be_is_not_kept(seconds):
    record = TraceBuffer()
    record.note_processor_time(1, seconds)
    assert not record._cpu


def test_a_malformed_trail_is_told_and_harms_nothing(caplog):
    def tell():
        event_log.event_log.pop_packed = lambda: b"no trail"
        return 42

    with poly.Drone(name="teller") as drone:
        assert drone.doit(tell) == 42
    assert {record.message.partition(":")[0] for record in caplog.records} == {"drone teller"}


def test_times_that_cannot_be_are_held_against_what_is_known():
    def tell():
        from polycephaly.engines.local import drone as main

        moments = [float("nan"), float("inf"), -1e300, 0.0]
        main.monotonic = lambda: moments.pop() if moments else float("nan")

    with poly.Drone(name="liar") as drone:
        drone.doit(noop, 1)
        drone.doit(tell)
        for _ in range(5):
            drone.doit(noop, [1])
        timeline = drone.timeline
    assert all(s.queued <= s.sent <= s.started <= s.finished <= s.received for s in timeline.spans)
    assert "nan" not in str(timeline)


# -- how it is written -----------------------------------------------------------------------------


def made_up(name="f", drone="d", start=1.0, end=2.0, **more):
    return Span(name, drone, start, end, start - 0.2, start - 0.1, end + 0.1, **more)


def test_the_text_has_a_row_for_each_drone_a_table_and_the_bottleneck():
    timeline = poly.Timeline(
        [
            made_up("load", "one"),
            made_up("parse", "two", 1.0, 1.25),
            made_up("page", "one", 1.1, 1.9, thread="t #1"),
        ]
    )
    lines = timeline.text(100).splitlines()
    assert lines[0] == "Timeline: 1.3 s, 2 drones, 2 calls"
    [one] = [line for line in lines if line.startswith("one ")]
    [two] = [line for line in lines if line.startswith("two ")]
    assert one.endswith(" 77 %") and one.count("█") > 60
    assert two.endswith(" 19 %") and two.count("█") in range(12, 20)
    assert [line.split() for line in lines if line.startswith("load")] == [
        ["load", "1", "1", "s", "1", "s", "100", "ms", "100", "ms", "100", "ms", "0", "B", "0", "B"]
    ]
    assert "green: page" in str(timeline)
    assert lines[-2].startswith("The busiest drone, one, was busy 77 % of the time with load")


def test_the_text_keeps_its_width_whatever_names_are_like():
    names = ["long" * 50, "a\nb\x1b[31m\tc", "name of a thread that is quite long #17"]
    timeline = poly.Timeline(
        [
            made_up(names[0], names[1]),
            made_up(names[1], names[0], 1.5, 3.0),
            made_up(drone=names[0], thread=names[2]),
        ]
    )
    for width in (60, 80, 133):
        text = timeline.text(width)
        assert max(map(len, text.splitlines())) <= width
        assert "\x1b" not in text
    assert "… #17 " in timeline.text(80)


def test_nothing_done_is_no_error(tmp_path):
    empty = poly.Timeline()
    assert str(empty) == "Timeline: nothing has run yet."
    assert not empty and empty.bottleneck == "No tasks have run."
    for suffix in ("html", "svg", "json"):
        empty.save(tmp_path / f"empty.{suffix}")
    with poly.Pool(2) as pool:
        assert (
            "0 calls" in repr(pool.timeline)
            or repr(pool.timeline) == "<Timeline of 2 drones, 0 spans>"
        )
        pool.timeline.save(tmp_path / "idle.svg")


def test_a_suffix_that_says_nothing_names_those_that_do(tmp_path):
    with pytest.raises(ValueError, match=r"\.html, \.svg or \.json, not as 'run\.png'"):
        poly.Timeline([made_up()]).save(tmp_path / "run.png")
    with pytest.raises(ValueError, match="not as 'run'"):
        poly.Timeline([made_up()]).save(tmp_path / "run")
    with pytest.raises(FileNotFoundError):
        poly.Timeline([made_up()]).save(tmp_path / "no such directory" / "run.svg")


def test_pictures_show_every_row_and_escape_names(tmp_path):
    from xml.etree import ElementTree

    nasty = "</title><script>alert(1)</script>&\x00"
    timeline = poly.Timeline(
        [
            made_up(nasty, "<b>"),
            made_up("g", "two", cpu=0.25),
            made_up("h", "two", 3.0, 4.0, status="died"),
        ]
    )
    timeline.save(tmp_path / "run.svg", title="a <title>")
    root = ElementTree.parse(tmp_path / "run.svg").getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a <title>", "<b>", "two"} <= set(texts)
    assert not list(root.iter("{http://www.w3.org/2000/svg}script"))
    colours = {each.get("fill") for each in root.iter("{http://www.w3.org/2000/svg}rect")}
    assert {"#4477aa", "var(--alarm)"} <= colours


def test_the_trace_keeps_the_rules_of_its_format(tmp_path):
    with poly.Pool(2) as pool:
        list(pool.map(double, range(1000)))
        pool.doit(mapped, 2)
        pool.promise(fail, 1).exception()
    pool.timeline.save(tmp_path / "run.json")
    trace = json.loads((tmp_path / "run.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f", "C"}
    assert all(
        isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        for event in events
    )
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in slices} <= named
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)
    for track in named:  # slices of one thread lie one after the other, or one in the other
        open_until = []
        for event in sorted(
            (e for e in slices if (e["pid"], e["tid"]) == track), key=lambda e: (e["ts"], -e["dur"])
        ):
            if track[0] == 0:  # moments of the controller, drawn a microsecond long
                continue
            while open_until and open_until[-1] <= event["ts"] + 0.01:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 0.01, event
            open_until.append(end)
    ends = Counter((event["ph"], event["id"]) for event in events if event["ph"] in "sf")
    assert set(ends.values()) == {1}
    assert {number for ph, number in ends if ph == "s"} == {
        number for ph, number in ends if ph == "f"
    }
    work = [event for event in slices if event["cat"] == "work"]
    assert sum(event["args"]["calls"] for event in work) == 1002
    assert [event["args"]["status"] for event in work if event["name"] == "fail"] == ["error"]
    counters = [event["args"]["pieces"] for event in events if event["ph"] == "C"]
    assert min(counters) == counters[-1] == 0


def test_what_a_call_needed_is_an_arrow_in_the_trace_and_on_the_page(tmp_path):
    with poly.Pool(1) as pool:
        first = pool.promise(naps, 0)
        second = pool.promise(naps, [first, first])
        last = pool.promise(lambda pair, one: naps(0), [first, second], first)
        last.result()
    spans = {span.number: span for span in pool.timeline.spans}
    one, two, three = (facts_of(promise).number for promise in (first, second, last))
    assert {number: set(span.needed) for number, span in spans.items()} == {
        one: set(), two: {one}, three: {one, two},
    }  # fmt: skip
    assert (
        unpack_timeline(json.loads(json.dumps(pack_timeline(pool.timeline)))).spans
        == pool.timeline.spans
    )
    events = json.loads(json_of(pool.timeline, ""))["traceEvents"]
    arrows = [(event["ph"], event["id"]) for event in events if event.get("cat") == "flow"]
    pairs = [(one, two), (one, three), (two, three)]
    assert sorted(arrows) == sorted((ph, f"{a} {b}") for a, b in pairs for ph in "sf")
    assert len(contents(pool.timeline)["part"]["arrows"]) == 3


def test_a_span_of_a_map_says_which_item_it_is(tmp_path):
    with poly.Pool(2) as pool:
        list(pool.map(naps, range(5)))
        pool.doit(naps, 0)
        [*pool.map(len, ["a"] * 5000)]
        timeline = pool.timeline
    spans = [span for span in timeline.spans if span.name == "naps"]
    assert sorted(span.item for span in spans if span.item is not None) == [0, 1, 2, 3, 4]
    assert len(spans) == 6
    first = 0
    for span in sorted(
        (span for span in timeline.spans if span.name == "len" and span.item is not None),
        key=lambda span: span.item,
    ):
        assert first <= span.item  # spans of short calls that came together have no item
        first = span.item + span.calls
    assert unpack_timeline(json.loads(json.dumps(pack_timeline(timeline)))).spans == timeline.spans
    assert {0, 4, None} <= {*contents(timeline)["part"]["spans"]["item"]}
    events = json.loads(json_of(timeline, ""))["traceEvents"]
    assert {4, None} <= {event["args"].get("item") for event in events if "args" in event}


def naps(_):
    time.sleep(0.001)
    return 0


def test_a_number_too_long_to_be_told_harms_nothing():
    assert green.map(lambda n: time.sleep(0.001), [10**5000], width=1) == [None]


def test_a_task_answered_while_the_timeline_is_taken_is_not_shown_twice(monkeypatch, tmp_path):
    under_way = collecting._under_way

    def and_then_it_is_answered(dispatcher, now):
        spans = list(under_way(dispatcher, now))
        gate.touch()
        assert promise.result(30) == "held"
        return spans

    gate = tmp_path / "gate"
    with poly.Pool(1) as pool:
        promise = pool.promise(hold_until, str(gate))
        wait_for(promise.running)
        monkeypatch.setattr(collecting, "_under_way", and_then_it_is_answered)
        assert [span.status for span in pool.timeline.spans] == ["running"]
