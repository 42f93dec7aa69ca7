"""The experiments load the same lists, in less time with more heads, and say so when they do
not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Condition, Thread
from typing import Any

import psutil
import pytest

from polycephaly import green
from polycephaly.demos.securities import generate, parse, report, server
from polycephaly.demos.securities.experiments import (
    FUND_THREADS,
    Experiment,
    ExperimentOutcome,
    computing,
    indicators,
    load_funds,
    parse_symbols,
    plan,
    run,
    sequential,
    threads_drain,
)
from polycephaly.demos.securities.model import LISTS, PAGES, Lists, Security
from polycephaly.demos.securities.parse import FUNDS, Document, SourceError
from polycephaly.demos.securities.server import loopback
from polycephaly.demos.securities.site import LiveSite, Site

NOWHERE = Site("http://127.0.0.1:9")


def lists(*funds: str) -> Lists:
    return {
        **dict.fromkeys(LISTS, ()),
        "funds": [Security(symbol, "Some Fund") for symbol in funds],
    }


def loads(*funds: str) -> Experiment:
    return Experiment("fixed", drones=2, threads=1, load=lambda site: lists(*funds))


def outcome(
    name: str, seconds: float, drones: int, astray: Sequence[str] = (), threads: int = 1
) -> ExperimentOutcome:
    experiment = Experiment(name, drones, threads, load=sequential)
    return ExperimentOutcome(experiment, seconds, dict.fromkeys(LISTS, 1000), tuple(astray))


@contextmanager
def serving(handler: type[server.Handler], latency: float) -> Iterator[str]:
    """The generated files, served by a thread of this process: the URL."""
    with server.FixtureServer(server.contents(generate.symbol_directory()), latency) as serves:
        serves.daemon_threads = False
        serves.RequestHandlerClass = handler
        thread = Thread(target=serves.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{serves.server_port}"
        finally:
            serves.shutdown()
            thread.join()


@pytest.fixture
def counted() -> Iterator[tuple[str, list[str]]]:
    """The generated files, served by a thread of this process: the URL, and the paths that were
    asked for."""
    asked: list[str] = []

    class Handler(server.Handler):
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    with serving(Handler, latency=0.05) as url:
        yield url, asked


def test_the_plan_starts_with_the_baseline_and_has_ii_and_iii_once_per_number() -> None:
    planned = [
        (experiment.name, experiment.drones, experiment.threads)
        for experiment in plan([1, 8], [13, 26])
    ]
    assert planned == [
        ("sequential", 0, 1),
        ("I", 5, 1),
        ("II", 1, 1),
        ("II", 8, 1),
        ("III", 0, 13),
        ("III", 0, 26),
        ("combined", 5, FUND_THREADS),
    ]


@pytest.mark.slow
def test_every_experiment_loads_the_same_lists() -> None:
    with loopback() as site:
        outcomes = list(run(site, plan([1, 3, 20], [1, 13, 26])))
    assert len(outcomes) == 9
    assert all(outcome.rows == outcomes[0].rows for outcome in outcomes)
    assert report.equal(outcomes)


@pytest.mark.slow
def test_what_more_heads_wait_for_overlaps() -> None:
    under_way, most, meeting = 0, 0, 1
    counting = Condition()

    class Handler(server.Handler):
        def do_GET(self) -> None:
            nonlocal under_way, most
            with counting:
                under_way += 1
                most = max(most, under_way)
                counting.notify_all()
                assert counting.wait_for(lambda: most >= meeting, 30), (
                    f"only {most} of {meeting} have met"
                )
            super().do_GET()

        def send_response(
            self, *args: Any
        ) -> None:  # when it has waited, and before anybody can ask for more
            nonlocal under_way
            with counting:
                under_way -= 1
            super().send_response(*args)

    overlaps = {}
    with serving(Handler, latency=0.01) as url:
        for experiment in plan([8], [13]):
            most, meeting = (
                0,
                {"sequential": 1, "I": 1}.get(experiment.name, 3),
            )  # the first wait for so many
            list(run(Site(url), [experiment]))
            overlaps[experiment.name] = most
    assert overlaps["sequential"] == 1
    assert min(overlaps["II"], overlaps["III"], overlaps["combined"]) >= 3


@pytest.mark.guarantee("green-25")
def test_threads_of_one_image_download_each_page_once(counted: tuple[str, list[str]]) -> None:
    url, asked = counted
    threads_drain(13, Site(url))
    pages = [path for path in asked if path.startswith("/funds/")]
    assert Counter(pages) == Counter(f"/funds/{page}" for page in PAGES)


def test_threads_of_one_image_share_the_live_sites_one_download(
    counted: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, asked = counted
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    live = LiveSite(url)
    try:
        assert load_funds(13, live) == Site(url).load_funds()
        assert asked.count(f"/{FUNDS}") == 1
        live.clear_cache()
        load_funds(2, live)
        assert asked.count(f"/{FUNDS}") == 2
    finally:
        live.clear_cache()


def test_threads_that_share_a_download_that_fails_all_have_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[str] = []
    waiting = green.Channel[None]()

    def fail(site: Site, path: str) -> Any:
        attempts.append(path)
        waiting.get()
        raise SourceError(path, "no answer")

    monkeypatch.setattr(LiveSite, "get", fail)
    live = LiveSite("http://nowhere.invalid")

    async def main() -> list[BaseException | None]:
        loads = [green.spawn(live.load_letter, "A") for _ in range(5)]
        while (
            sum(
                each.doing.startswith("Promise.") for each in green.threads() if "load" in each.name
            )
            < 5
        ):
            await green.sleep(0.001)  # four wait for the fifth, and that one for the channel
        await waiting.send(None)
        return [await green.call(load.exception) for load in loads]

    errors = green.run(main)
    assert [type(error) for error in errors] == [SourceError] * 5
    assert attempts == [FUNDS]


@pytest.mark.guarantee("green-16")
def test_no_more_threads_load_at_once_than_said(counted: tuple[str, list[str]]) -> None:
    url, _ = counted
    inside, most = 0, 0
    counting = Condition()

    class Watched(Site):
        def get(self, path: str) -> Any:
            nonlocal inside, most
            with counting:
                inside += 1
                most = max(most, inside)
                counting.notify_all()
                assert counting.wait_for(
                    lambda: most >= 5, 30
                )  # the first wait for the fifth; a sixth would show
            try:
                return Site.get(self, path)
            finally:
                with counting:
                    inside -= 1

    threads_drain(5, Watched(url))
    assert most == 5


@pytest.mark.slow
def test_an_experiment_leaves_no_drone_behind() -> None:
    with loopback() as site:
        before = set(psutil.Process().children(recursive=True))
        for _ in run(site, plan([4], [4])):
            assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_source_that_fails_in_any_head_is_named_here(number: int) -> None:
    with pytest.raises(SourceError, match="no answer"):
        list(run(NOWHERE, [plan([2], [2])[number]]))


@pytest.mark.parametrize("funds", [["A"], ["A", "C"], ["B", "A"], ["A", "B", "B"]])
def test_a_list_that_differs_in_any_row_or_in_order_is_astray(funds: list[str]) -> None:
    same, differing = run(NOWHERE, [loads("A", "B"), loads(*funds)])
    assert (same.differing, differing.differing) == ((), ("funds",))


def test_the_report_has_speed_ups_and_bars_against_the_baseline() -> None:
    baseline, faster = outcome("sequential", 10.0, 0), outcome("II", 2.5, 8)
    assert report.row(baseline, baseline).split() == [
        "sequential",
        "0",
        "1",
        "10.000",
        "1.0x",
        "#" * 30,
    ]
    assert report.row(faster, baseline).split() == ["II", "8", "1", "2.500", "4.0x", "#" * 8]


def test_a_run_slower_than_the_baseline_keeps_its_bar_inside_the_table() -> None:
    assert (
        report.row(outcome("II", 99.0, 1), outcome("sequential", 1.0, 0)).count("#")
        == report.BAR_WIDTH
    )


def test_the_summary_names_the_best_numbers_and_the_talks_figures() -> None:
    summary = report.summary(
        [
            outcome("sequential", 9, 0),
            outcome("II", 3, 2),
            outcome("II", 2, 8),
            outcome("III", 1, 0, threads=13),
            outcome("III", 4, 0, threads=2),
        ]
    )
    assert "1,000 NYSE, 1,000 AMEX, 1,000 NASDAQ, 1,000 ETFs, 1,000 funds" in summary
    assert "the same in all 5 runs" in summary
    assert "II was best with 8 drones: 2.00 s" in summary
    assert "III was best with 13 threads: 1.00 s" in summary
    for figure in "114 s sequential", "15 s", "35 s combined":
        assert figure in summary


def test_the_summary_counts_one_thread_and_one_drone_as_one() -> None:
    summary = report.summary(
        [outcome("sequential", 9, 0), outcome("II", 8, 1), outcome("III", 7, 0, threads=1)]
    )
    assert "II was best with 1 drone: 8.00 s" in summary
    assert "III was best with 1 thread: 7.00 s" in summary


def test_the_summary_names_what_differs() -> None:
    combined = outcome("combined", 2, 5, ["amex"], threads=13)
    summary = report.summary(
        [outcome("sequential", 9, 0), outcome("II", 3, 2, ["etfs", "funds"]), combined]
    )
    assert "THE LISTS DIFFER" in summary
    assert "II with 2 drones (ETFs, funds); combined with 5 drones and 13 threads (AMEX)" in summary


def test_the_json_has_sizes_equality_and_one_entry_per_run() -> None:
    pooled, threaded = outcome("II", 3.0, 2, ["funds"]), outcome("III", 1.0, 0, threads=8)
    result = report.as_json([outcome("sequential", 9.0, 0), pooled, threaded])
    assert result == {
        "lists": dict.fromkeys(LISTS, 1000),
        "equal": False,
        "experiments": [
            {"name": "sequential", "seconds": 9.0, "drones": 0, "threads": 1},
            {"name": "II", "seconds": 3.0, "drones": 2, "threads": 1},
            {"name": "III", "seconds": 1.0, "drones": 0, "threads": 8},
        ],
        "computing": [],
    }


def test_the_same_pages_are_parsed_and_computed_in_three_ways() -> None:
    with loopback() as site:
        pages = site.load_pages()
        symbols = [each.symbol for name in LISTS for each in sequential(site)[name]]
    parsed = [symbol for page in pages for symbol in parse_symbols(page)]
    assert set(symbols) <= set(parsed) and len(pages) == 2 + len(PAGES)
    pages = [
        (parse.nasdaq_listed, Document("q", "Symbol|Security Name|Test Issue\nA|a|N\nB|b|N")),
        (parse.funds, Document("f", "Fund Symbol|Fund Name\nC|c\nD|d")),
    ]
    planned = computing(pages, 2)
    computations = list(run(NOWHERE, planned))
    assert [(each.experiment.name, each.experiment.drones) for each in computations] == [
        ("sequential", 0), ("threads", 0), ("drones", 2),
    ]  # fmt: skip
    expected = [indicators(symbol) for symbol in "ABCD"]
    assert len(set(expected)) == 4
    assert all(each.load(NOWHERE) == {"indicators": expected} for each in planned)
    assert report.equal(computations)
    result = report.as_json([outcome("sequential", 9.0, 0)], computations)["computing"]
    assert [each["name"] for each in result] == ["sequential", "threads", "drones"]


@pytest.mark.parametrize(
    ("waiting", "threads", "drones", "said"),
    [
        (1.0, 2.0, 1.0, "Threads for waiting (9.0 times as fast), drones for computing (2.0 times; "
         "threads: 1.0), both for both."),
        (1.0, 2.0, 2.2, "drones did not win at computing (0.9 times as fast; threads: 1.0): each "
         "needs a processor that is free."),
        (1.0, 1.6, 1.5, "drones did not win at computing (1.3 times as fast; threads: 1.2)"),
        (1.0, 1.0, 1.0, "Threads cannot compute 2.0 times as fast as one: other programs have"),
        (8.5, 2.0, 1.0, "conclusion: threads did not win at waiting (1.1 times as fast)"),
        (9.0, 2.0, 2.0, "threads did not win at waiting (1.0 times as fast): they win if there are "
         "several, and answers take time; drones did not win"),
    ],
)  # fmt: skip
def test_the_closing_line_says_what_the_run_has_shown(
    waiting: float, threads: float, drones: float, said: str
) -> None:
    outcomes = [
        outcome("sequential", 9.0, 0),
        outcome("III", 9.5, 0, threads=1),
        outcome("III", waiting, 0, threads=13),
    ]
    seconds = {"sequential": 2.0, "threads": threads, "drones": drones}
    line = report.conclusion(outcomes, [outcome(name, seconds[name], 0) for name in seconds])
    assert said in line
    assert ("does not show" in line) == ("did not win" in said)
