"""The experiments load the same lists, in less time with more heads, and say so when they do not."""

from __future__ import annotations

from collections.abc import Sequence

import psutil
import pytest

from polycephaly.demos.securities import report
from polycephaly.demos.securities.experiments import Experiment, Outcome, plan, run, sequential
from polycephaly.demos.securities.model import LISTS, Lists, Security
from polycephaly.demos.securities.parse import SourceError
from polycephaly.demos.securities.site import Site
from polycephaly.demos.securities.source import loopback

NOWHERE = Site("http://127.0.0.1:9")


def lists(*funds: str) -> Lists:
    return {**dict.fromkeys(LISTS, ()), "funds": [Security(symbol, "Some Fund") for symbol in funds]}


def loads(*funds: str) -> Experiment:
    return Experiment("fixed", drones=2, threads=1, load=lambda site: lists(*funds))


def outcome(name: str, seconds: float, drones: int, astray: Sequence[str] = ()) -> Outcome:
    experiment = Experiment(name, drones, threads=1, load=sequential)
    return Outcome(experiment, seconds, dict.fromkeys(LISTS, 1000), tuple(astray))


def test_the_plan_starts_with_the_baseline_and_has_ii_once_per_number_of_drones() -> None:
    planned = [(experiment.name, experiment.drones) for experiment in plan([1, 8])]
    assert planned == [("sequential", 0), ("I", 5), ("II", 1), ("II", 8)]


def test_every_experiment_loads_the_same_lists() -> None:
    with loopback() as site:
        outcomes = list(run(site, plan([1, 3, 20])))
    assert all(outcome.rows == outcomes[0].rows for outcome in outcomes)
    assert report.equal(outcomes)


def test_more_heads_load_sooner() -> None:
    with loopback(latency=0.05) as site:
        one, _, eight = run(site, plan([8]))
    assert eight.seconds < one.seconds / 2


def test_an_experiment_leaves_no_drone_behind() -> None:
    with loopback() as site:
        before = set(psutil.Process().children(recursive=True))
        for _ in run(site, plan([4])):
            assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize("number", [1, 2])
def test_a_source_that_fails_in_a_drone_is_named_here(number: int) -> None:
    with pytest.raises(SourceError, match="no answer"):
        list(run(NOWHERE, [plan([2])[number]]))


@pytest.mark.parametrize("funds", [["A"], ["A", "C"], ["B", "A"], ["A", "B", "B"]])
def test_a_list_that_differs_in_any_row_or_in_order_is_astray(funds: list[str]) -> None:
    same, differing = run(NOWHERE, [loads("A", "B"), loads(*funds)])
    assert (same.astray, differing.astray) == ((), ("funds",))


def test_the_report_has_speed_ups_and_bars_against_the_baseline() -> None:
    baseline, faster = outcome("sequential", 10.0, 0), outcome("II", 2.5, 8)
    assert report.row(baseline, baseline).split() == ["sequential", "0", "1", "10.000", "1.0x", "#" * 50]
    assert report.row(faster, baseline).split() == ["II", "8", "1", "2.500", "4.0x", "#" * 12]


def test_a_run_slower_than_the_baseline_keeps_its_bar_inside_the_table() -> None:
    assert report.row(outcome("II", 99.0, 1), outcome("sequential", 1.0, 0)).count("#") == report.BAR_WIDTH


def test_the_summary_names_the_best_pool_and_the_talks_figures() -> None:
    summary = report.summary([outcome("sequential", 9, 0), outcome("II", 3, 2), outcome("II", 2, 8)])
    assert "1,000 NYSE, 1,000 AMEX, 1,000 NASDAQ, 1,000 ETFs, 1,000 funds" in summary
    assert "the same in all 3 runs" in summary
    assert "II was best with 8 drones: 2.00 s" in summary
    assert "114 s sequential, 35 s combined" in summary


def test_the_summary_names_what_differs() -> None:
    summary = report.summary([outcome("sequential", 9, 0), outcome("II", 3, 2, ["etfs", "funds"])])
    assert "THE LISTS DIFFER" in summary
    assert "II with 2 drones (ETFs, funds)" in summary


def test_the_json_has_sizes_equality_and_one_entry_per_run() -> None:
    result = report.as_json([outcome("sequential", 9.0, 0), outcome("II", 3.0, 2, ["funds"])])
    assert result == {
        "lists": dict.fromkeys(LISTS, 1000),
        "equal": False,
        "experiments": [
            {"name": "sequential", "seconds": 9.0, "drones": 0, "threads": 1},
            {"name": "II", "seconds": 3.0, "drones": 2, "threads": 1},
        ],
    }
