"""Whatever dies, or is late, at each point of its life: all is answered, nothing is run twice, and
nothing is left."""

import functools
import signal
import time
from collections import Counter
from concurrent.futures import CancelledError, wait
from unittest import mock

import numpy
import pytest
from failpoints import AFTER, BEFORE, ONCE, POINTS, at_point, be_late, die
from faults import append, lines, wait_for
from scripts import run_script

import polycephaly as poly

pytestmark = pytest.mark.slow

PATIENCE = 60.0
OURS = [point for point in POINTS if point.startswith("controller")]
THEIRS = [point for point in POINTS if point not in OURS]
LARGE = 300_000


def note(path, i):
    append(path, str(i))
    if i % 10 == 7:
        time.sleep(0.012)  # longer than a drone's control thread waits, so that it sends
    return i


def noted_array(path, i):
    append(path, str(i))
    return numpy.full(LARGE, i, dtype="u1")


def noted_sum(path, i, array):
    append(path, str(i))
    return int(array.sum()) // LARGE


def noted_text(path, i):
    append(path, str(i))
    return "x" * 40_000 + str(i)


def fail(path, i):
    append(path, str(i))
    raise ValueError(i, "more than goes in a packet" * 50_000)


def of_all_kinds(pool, path):
    """Work of each kind, by number; which number is given back, if any is."""
    given = {i: pool.promise(note, path, i) for i in range(20)}
    given |= {i: pool.promise(noted_array, path, i) for i in range(20, 24)}
    given |= {
        i: pool.promise(noted_sum, path, i, numpy.full(LARGE, i, dtype="u1")) for i in range(24, 28)
    }
    given |= {i: pool.promise(noted_text, path, i) for i in range(28, 36)}
    for each in range(28, 36):  # opened as they come, so that the drone gets its memory back
        given[each].add_done_callback(lambda done: done.cancelled() or done.exception())
    given |= {i: pool.promise(fail, path, i) for i in range(36, 40)}
    kept = {i: pool.promise(noted_array, path, i, keep=True) for i in range(40, 44)}
    given |= {i + 10: pool.promise(noted_sum, path, i + 10, each) for i, each in kept.items()}
    return given | kept


def mapped(pool, path, numbers):
    """What came of a map, and whether a death broke it off. It goes in large chunks, of an input
    without a length, however slow this machine is: so one is divided while the other drone is idle.
    """
    got = []
    try:
        with mock.patch("polycephaly.pool.map_source.CHUNK_SECONDS", 1.0):
            fn = functools.partial(note, path)
            for value in pool.map(fn, iter(numbers), timeout=PATIENCE):
                got.append(value)
    except poly.DroneDied:
        return got, True
    return got, False


def use(pool, path):
    """All is settled, nothing is run twice, and what is given back has run. Whether a death was
    told."""
    short = [
        pool.promise(note, path, -1) for _ in range(300)
    ]  # so that the next calls go in chunks
    given = of_all_kinds(pool, path)
    got, died = mapped(pool, path, range(100, 400))
    assert not wait([*short, *given.values()], PATIENCE).not_done
    assert got == list(range(100, 100 + len(got)))
    ran = Counter(map(int, lines(path)))
    del ran[-1]
    assert set(ran.values()) == {1}
    assert set(got) <= set(ran)
    lost = 0
    for number, promise in given.items():
        error = promise.exception()
        if isinstance(error, poly.DroneDied | CancelledError):
            died = True
            lost += number not in ran
        elif 36 <= number < 40:
            assert isinstance(error, ValueError) and number in ran
        else:
            assert error is None and number in ran
    assert lost <= 4  # what two drones had begun, and what takes that: all else has moved
    return died


@pytest.mark.guarantee("death-2")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize(
    "point, hit",
    [*((each, 1) for each in THEIRS), *((each, 3) for each in THEIRS if each not in ONCE)],
)
def test_a_death_at_any_point(point, hit, when, tmp_path):
    with at_point(point, when, hit) as hits:
        try:
            with poly.Pool(2, output="discard") as pool:
                for turn in range(10):  # into how many chunks calls go, their measured times decide
                    use(pool, str(tmp_path / f"ran{turn}"))
                    if int(hits) >= hit:
                        break
                wait_for(lambda: pool.doit(abs, -1) == 1)
                wait_for(lambda: len(pool.drones) == 2)
        except RuntimeError as error:
            assert "before it was ready" in str(error) and point.startswith("zygote")
    assert int(hits) >= hit
    with poly.Pool(1) as pool:
        assert pool.doit(abs, -1) == 1


@pytest.mark.guarantee("end-1")
@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("point", OURS)
def test_a_controllers_death_at_any_point_leaves_nothing(point, when, tmp_path):
    ended = run_script(
        """
        import sys
        from failpoints import at_point
        from test_failpoints import use
        import polycephaly as poly

        point, when, path = sys.argv[1:]
        with at_point(point, when), poly.Pool(2, output="discard") as pool:
            use(pool, path)
        """,
        point, when, str(tmp_path / "ran"),
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.parametrize("when", [BEFORE, AFTER])
@pytest.mark.parametrize("point", POINTS)
def test_a_process_that_is_late_at_any_point(point, when, tmp_path):
    with at_point(point, when, do=be_late) as hits:
        with poly.Pool(2, output="discard") as pool:
            assert not use(pool, str(tmp_path / "ran"))
        assert int(hits) >= 1


def test_a_point_is_reached_once_and_leaves_nothing_behind(tmp_path):
    with (
        at_point("drone says what it starts", AFTER, do=die) as hits,
        poly.Pool(1, output="discard") as pool,
    ):
        with pytest.raises(poly.DroneDied):
            pool.doit(abs, -1)
        assert pool.doit(abs, -1) == 1
    assert int(hits) == 1
    with poly.Pool(1) as pool:
        assert pool.doit(abs, -1) == 1
