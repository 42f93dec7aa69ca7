"""``map(..., progress=True)``: what the bar says, and that nothing of it stays."""

import itertools
import re
import sys
import threading

import pytest
from engines import on_each_engine, poly
from faults import fail_at_seven
from work import double

from polycephaly import green
from polycephaly.runtime.progress import Progress

pytestmark = on_each_engine


def last_state(capsys):
    """What the bar said last: label, done, of how many ("?" where that is not known)."""
    text = capsys.readouterr().err.replace("\r", "\n").strip()
    lines = [line for line in text.splitlines() if line.strip()]
    found = re.search(r"(\d+)/(\d+)", lines[-1]) or re.search(r"(\d+)\s*\[", lines[-1])
    return lines[-1].split(":")[0], int(found[1]), found[2] if found.lastindex == 2 else "?"


def test_a_pools_map(capsys):
    with poly.Pool(2) as pool:
        assert list(pool.map(double, range(3000), progress=True)) == [2 * n for n in range(3000)]
    assert last_state(capsys) == ("double", 3000, "3000")
    assert not [t for t in threading.enumerate() if "tqdm" in t.name.lower()]


def test_without_a_terminal_there_is_a_line_each_ten_seconds_and_one_at_the_end(
    capsys, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr("polycephaly.runtime.clock.monotonic", lambda: now[0])
    progress = Progress("parse", 40)
    for second in range(1, 26):
        now[0] += 1.0
        progress.show(second)
        progress.show(second)  # nothing new, as while a call takes long
    progress.close()
    progress.close()
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" [")[0] for line in said] == [
        "parse: 10/40 (25%)", "parse: 20/40 (50%)", "parse: 25/40 (62%)",
    ]  # fmt: skip


def test_in_a_terminal_the_bar_is_drawn_anew(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = Progress("parse", 2)
    progress.step()
    progress.step()
    progress.close()
    assert capsys.readouterr().err.count("\r") >= 2


def test_the_shortest_input_tells_how_many_there_will_be(capsys):
    with poly.Pool(1) as pool:
        list(pool.map(pow, itertools.count(), range(50), itertools.repeat(7), progress=True))
    assert last_state(capsys)[1:] == (50, "50")


def test_inputs_of_unknown_length(capsys):
    with poly.Pool(1) as pool:
        list(pool.map(double, (n for n in range(40)), progress=True, ordered=False))
    assert last_state(capsys)[1:] == (40, "?")


def test_one_that_fails_or_is_closed_leaves_the_bar_where_it_was(capsys):
    with poly.Pool(1) as pool:
        with pytest.raises(ValueError):
            list(pool.map(fail_at_seven, range(100), progress=True, buffersize=1))
        assert last_state(capsys)[1] in range(7, 9)
        results = pool.map(double, range(10), progress=True, buffersize=1)
        next(results)
        results.close()
        assert last_state(capsys)[1] in range(1, 4)


def test_calls_that_are_done_count_before_their_turn(capsys):
    """The first one holds up the results of the others, not the bar."""
    gate = threading.Event()
    seen = []

    class Watched(Progress):
        def show(self, done):
            seen.append(done)
            if done == 5:
                gate.set()
            super().show(done)

    with poly.Pool(2) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr("polycephaly.pool.base.Progress", Watched)
        first = poly.Promise()
        results = pool.map(lambda n: n, [first, *range(5)], progress=True)
        opener = threading.Thread(target=lambda: (gate.wait(), first.set_result(-1)))
        opener.start()
        assert list(results) == [-1, *range(5)]
        opener.join()
    assert 5 in seen and last_state(capsys)[1:] == (6, "6")


def test_green_map(capsys):
    assert green.map(double, range(30), width=3, progress=True) == [2 * n for n in range(30)]
    assert last_state(capsys) == ("double", 30, "30")

    async def main():
        async def triple(n):
            return 3 * n

        return [x async for x in green.map(triple, range(20), progress=True)]

    assert green.run(main) == [3 * n for n in range(20)]
    assert last_state(capsys)[1:] == (20, "20")


def test_in_a_drone_the_bar_comes_home_with_its_output():
    lines = []
    with poly.Pool(1, output=lines.append) as pool:
        assert pool.doit(lambda: green.map(double, range(5), progress=True)) == [0, 2, 4, 6, 8]
    assert any("5/5" in line for line in lines)
