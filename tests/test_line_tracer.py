"""`pytest --lines` traces what it says: see line_tracer.py."""

import sys
import threading
from time import monotonic, sleep

import line_tracer
import pytest

import polycephaly as poly

TRACE, MONITORING = 7, 8


def lines_of_threads():
    """In a drone: by the name of each thread, how many of its lines of the package were traced."""
    return {each.name: line_tracer.lines[each.ident] for each in threading.enumerate()}


def more_lines(before):
    """In a drone, once its control thread has gone on: the same, and the kind of tracer."""
    until = monotonic() + 60
    control = "polycephaly-control"
    while (now := lines_of_threads())[control] <= before[control] and monotonic() < until:
        sleep(0.001)
    return now, sys.gettrace() is not None


@pytest.fixture(params=[TRACE, MONITORING], ids=["settrace", "monitoring"])
def traced(request):
    if request.config.getoption("--lines") is not None:
        pytest.skip("one line tracer is enough")
    if request.param == MONITORING and sys.version_info < (3, 12):
        pytest.skip("CPython 3.11 has no sys.monitoring")
    with line_tracer.at_lines(request.param):
        yield request.param


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_both_threads_of_a_drone_are_traced(traced, start):
    with poly.Pool(1, start=start) as pool:
        for _ in range(2):
            before = pool.doit(lines_of_threads)
            now, is_trace = pool.doit(more_lines, before)
            assert set(now) == {"MainThread", "polycephaly-control"}
            assert all(now[name] > before[name] for name in now), (before, now)
            assert is_trace == (traced == TRACE)
            pool.refresh()


@pytest.fixture
def pool():
    with poly.Pool(1) as pool:
        yield pool


@pytest.mark.tracer
def test_the_pool_of_a_fixture_is_traced_too(request, pool):
    if request.config.getoption("--lines") is None:
        pytest.skip("pytest --lines SEED")
    loop = pool._dispatcher.reactor.thread.ident
    of_loop = line_tracer.lines[loop]
    before = pool.doit(lines_of_threads)
    now, _ = pool.doit(more_lines, before)
    assert all(now[name] > before[name] for name in now), (before, now)
    assert line_tracer.lines[loop] > of_loop
