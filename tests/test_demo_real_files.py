"""The exchange's own files load exactly, clean and dirty; skipped where they do not lie beside this
tree."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from polycephaly.demos.securities import experiments, parse
from polycephaly.demos.securities.model import LISTS, PAGES, Fund, page_of
from polycephaly.demos.securities.parse import (
    FUNDS,
    NASDAQ_LISTED,
    Document,
    SourceError,
    read_directory,
)
from polycephaly.demos.securities.server import loopback

DATA = Path(__file__).parents[2] / "shared" / "data"
SYMDIR = DATA / "symdir-2022-06-02"
FUNDS_2015 = DATA / "dirty" / "mfundslist-2015.txt.gz"
HTML = DATA / "dirty" / "nasdaqlisted-is-html.txt.gz"

ROWS = {"nyse": 3689, "amex": 310, "nasdaq": 5226, "etfs": 2863, "funds": 35201}

pytestmark = pytest.mark.skipif(
    not SYMDIR.is_dir(), reason="the real symbol-directory files are not here"
)


def unpacked(path: Path) -> Document:
    return Document.decode(path.name, gzip.decompress(path.read_bytes()))


@pytest.fixture(scope="module")
def funds_2015() -> dict[str, Fund]:
    return {fund.symbol: fund for fund in parse.funds(unpacked(FUNDS_2015))}


@pytest.mark.slow
def test_every_experiment_loads_exactly_the_files_rows() -> None:
    with loopback(SYMDIR) as site:
        outcomes = list(experiments.run(site, experiments.plan([1, 4], [1, 13])))
    assert [outcome.rows for outcome in outcomes] == [ROWS] * 7
    assert [outcome.differing for outcome in outcomes] == [()] * 7


@pytest.mark.slow
def test_the_talks_gain_is_there_again() -> None:
    """114 s to 35 s for *combined* in 2009: 3.3 times."""
    planned = {experiment.name: experiment for experiment in experiments.plan([], [13])}
    # More than by default: what overlaps is waiting, and on a busy machine computing takes its
    # share of so short a run.
    latency = 1.5
    one_after_the_other = latency * (
        len(PAGES) + len(LISTS) - 1
    )  # seconds of waiting alone; so it need not be run
    with loopback(SYMDIR, latency=latency) as site:
        threads, combined = experiments.run(site, [planned[name] for name in ("III", "combined")])
    assert combined.seconds < one_after_the_other / 3.3
    assert threads.seconds < one_after_the_other / 3.3


def test_one_head_loads_exactly_the_files_rows() -> None:
    with loopback(SYMDIR) as site:
        lists = experiments.sequential(site)
    assert {name: len(rows) for name, rows in lists.items()} == ROWS


def test_no_fund_is_lost_between_the_pages() -> None:
    pages = Counter(page_of(fund.name) for fund in parse.funds(read_directory(SYMDIR)[FUNDS]))
    assert (pages["0-9"], pages["X"], pages["F"]) == (241, 4, 7219)
    assert pages.total() == ROWS["funds"]


def test_every_row_of_the_dirty_funds_file_arrives(funds_2015: dict[str, Fund]) -> None:
    assert len(funds_2015) == 34554
    assert "ZZZZX" in funds_2015
    assert not any(page_of(fund.name) == "X" for fund in funds_2015.values())


@pytest.mark.parametrize("symbol", ["METAX", "METCX", "METIX"])
def test_real_pipes_inside_names_stay_there(symbol: str, funds_2015: dict[str, Fund]) -> None:
    fund = funds_2015[symbol]
    assert fund.name.casefold().startswith("alps | metis global micro cap fund class ")
    assert (fund.family, fund.kind, fund.category) == ("Financial Investors Trust", "MS", "O")
    assert fund.agent == "Alps Distributors, Inc."


def test_the_sites_answer_for_a_missing_file_is_told_to_be_html(tmp_path: Path) -> None:
    for real in SYMDIR.iterdir():
        (tmp_path / real.name).write_bytes(real.read_bytes())
    (tmp_path / f"{NASDAQ_LISTED}.gz").write_bytes(HTML.read_bytes())
    with (
        pytest.raises(SourceError, match=r"nasdaqlisted\.txt\.gz: .* got an HTML page"),
        loopback(tmp_path),
    ):
        pytest.fail("the block must not be entered")
