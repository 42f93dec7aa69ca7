"""The bottleneck of a run is named by its numbers: on made-up runs of each kind, and on real
ones."""

from __future__ import annotations

import json
import time

import pytest

import polycephaly as poly
from polycephaly.runtime.system_limits import usable_processors
from polycephaly.timeline import Span
from polycephaly.timeline.bottleneck import Figures, sentence
from polycephaly.timeline.plain import pack_timeline, unpack_timeline

CORES = usable_processors()
LIMIT = f"the {CORES} cores are" if CORES > 1 else "the one core is"


def work(
    drone, start, end, name="load", queued=0.0, calls=1, bytes_sent=10, cpu=None, on_the_way=0.001
):
    sent = max(queued, start - on_the_way)
    return Span(
        name, drone, start, end, queued, sent, end + on_the_way, "done", calls, bytes_sent, cpu=cpu
    )


def one_long(cpu=None):
    return [
        work("a", 0.0, 9.7, "load_funds", cpu=cpu),
        *(work(name, 0.0, 2.0, cpu=cpu) for name in "bcd"),
    ]


def full(drones, cpu=None):
    """Each drone does thirty pieces of a tenth of a second without a pause."""
    return [
        work(f"d{drone}", n / 10, n / 10 + 0.099, cpu=cpu)
        for drone in range(drones) for n in range(30)
    ]  # fmt: skip


THREADS = [Span("page", "a", n, n + 1.0, thread=f"map page #{n}") for n in range(4)]

RUNS = {
    "one call takes all the time": (
        one_long(),
        "The busiest drone, a, was busy 100 % of the time with load_funds: more drones will "
        "not help; split the call.",
    ),
    "one call waits all the time": (
        one_long(cpu=0.1),
        "The busiest drone, a, was busy 100 % of the time with load_funds, and computed in 1 % of "
        "that: more drones will not help; split the call, or overlap its waiting by green threads "
        "(green.map).",
    ),
    "its green threads wait": (
        [*one_long(cpu=0.1), *THREADS],
        "The busiest drone, a, was busy 100 % of the time with load_funds, and computed in 1 % of "
        "that: more drones will not help; split the call, or let more than its 4 green threads "
        "wait at once.",
    ),
    "all wait": (
        full(3, cpu=0.001),
        "All 3 drones were busy 99 % of the time, mostly with load, but computed in 1 % of that: "
        "the calls wait most of the time; green threads (green.map) or more drones would overlap "
        "the waiting.",
    ),
    "all compute on all cores": (
        full(CORES, cpu=0.099),
        "busy 99 % of the time, mostly with load, and computed in 100 % of that: "
        f"{LIMIT} the limit.",
    ),
    "fewer drones than cores": (
        full(1, cpu=0.099),
        "d0 was busy 99 % of the time, mostly with load: more drones would help"
        if CORES > 1
        else "d0 was busy 99 % of the time, mostly with load, and computed in 100 % of that: "
        "the one core is",
    ),
    "too few pieces": (
        [work("a", 0.0, 1.0), work("b", 0.0, 0.5), work("a", 1.0, 1.9), work("c", 0.0, 0.2)],
        "4 tasks are too few to keep 3 drones busy (46 % of the time): smaller tasks would be "
        "shared more evenly.",
    ),
    "the queue was empty": (
        [work(f"d{n % 2}", n, n + 0.4, queued=n - 0.2) for n in range(20)],
        "The queue was empty 80 % of the time, and the drones were busy in 20 %: they waited for "
        "the program to submit more tasks.",
    ),
    "too large": (
        [work("a", n, n + 0.1, bytes_sent=50_000_000, on_the_way=0.45) for n in range(20)],
        "Transport: a call moved 50 MB in 877 ms, and ran for 100 ms: send less data, or share the "
        "data once (pool.share).",
    ),
    "too short": (
        [work("a", n / 1000, n / 1000 + 2e-5, calls=20) for n in range(400)],
        "The controller: calls of 1 µs are too short for the controller to keep the drones busy "
        "(2 % of the time): send many at once with pool.map, or make the calls larger.",
    ),
}  # fmt: skip


def test_a_program_that_pickles_much_is_told_from_one_that_submits_late():
    late = [work("a", n, n + 0.01, queued=n - 0.01) for n in range(10)]
    pickling = [span._replace(bytes_sent=4_000_000) for span in late]
    waited = "they waited for the program to submit more tasks"
    assert poly.Timeline(late).bottleneck.endswith(f"{waited}.")
    assert poly.Timeline(pickling).bottleneck.endswith(
        f"{waited}, which pickled 4 MB a call: send less data, or share the data once (pool.share)."
    )


@pytest.mark.parametrize("kind", RUNS)
def test_the_sentence_says_what_the_numbers_say(kind):
    spans, said = RUNS[kind]
    assert said in here(spans).bottleneck


def here(spans):
    timeline = poly.Timeline(spans)
    timeline.cores = CORES
    return timeline


def test_the_cores_are_those_of_the_drones_machine_not_the_readers():
    busy = full(32, cpu=0.09)
    elsewhere = here(busy)
    elsewhere.cores = 64
    sent = unpack_timeline(json.loads(json.dumps(pack_timeline(elsewhere))))
    assert sent.bottleneck.endswith("more drones would help, as their machine has 64 cores.")
    elsewhere.cores = 32
    assert elsewhere.bottleneck.endswith("the 32 cores are the limit.")
    unknown = (here(busy) + here(busy)).bottleneck  # perhaps of two machines
    assert "core" not in unknown and unknown.endswith("the calls themselves take the time.")


@pytest.mark.parametrize("threads, said", [(1, "1 thread"), (3, "3 threads"), (0, None)])
def test_where_calls_compute_the_limit_of_native_libraries_is_told(threads, said):
    told = f" (native libraries: {said} a drone)." if said else "."
    for spans, ending in [
        (full(32, cpu=0.09), f"{LIMIT} the limit"),
        (one_long(cpu=9.0), "more drones will not help; split the call"),
        (full(1, cpu=0.09), f"as their machine has {CORES + 1} cores"),
    ]:
        timeline = here(spans)
        timeline.native_threads = threads
        if len({span.drone for span in spans}) == 1:
            timeline.cores = CORES + 1
        sent = unpack_timeline(json.loads(json.dumps(pack_timeline(timeline))))
        assert sent.bottleneck.endswith(f"{ending}{told}")
        assert sent.of_drone("d0").native_threads == (sent + sent).native_threads == threads
        assert (sent + here(spans)).native_threads is None  # they may differ


def test_each_reason_is_another_sentence():
    sentences = {here(spans).bottleneck for spans, _ in RUNS.values()}
    assert len(sentences) == len(RUNS) - (CORES == 1)  # where no fewer drones than cores can be


def test_idle_drones_count():
    some = Figures(poly.Timeline(full(2), ["d0", "d1", "idle", "idle too"]))
    assert some.drones == 4
    assert some.utilisation == pytest.approx(0.495, abs=0.01)


def test_a_real_run_with_one_long_call_names_it(tmp_path):
    def long_one(
        begun,
    ):  # most of the run, however slow the start of the drones and the short calls
        while not (tmp_path / "the others are done").exists():
            time.sleep(0.01)
        time.sleep(0.4 + 5 * (time.monotonic() - begun))

    with poly.Pool(2) as pool:
        held = pool.promise(long_one, time.monotonic())
        for each in [pool.promise(abs, -1) for _ in range(5)]:
            each.result()
        (tmp_path / "the others are done").touch()
        held.result()
    # Without the way home, on which the machine may have stood still.
    spans = [span._replace(received=span.finished) for span in pool.timeline.spans]
    said = poly.Timeline(spans).bottleneck
    assert "with long_one, and computed in" in said
    assert said.endswith("split the call, or overlap its waiting by green threads (green.map).")


def test_no_figures_no_sentence():
    assert sentence(Figures(poly.Timeline())) == "No tasks have run."
