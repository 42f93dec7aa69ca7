"""The experiments of the talk: the same five lists, loaded by more and more drones and threads.

    sequential  this process loads one list after another
    I           five drones, one code string each
    II          a pool of n drones loads the pages of funds and the other four lists
    III         n green threads of this process do the same
    combined    five drones, one list each; the drone of funds uses 13 green threads

These wait for pages. The second part computes: the experiments of `computing` parse the same pages,
which are in memory by then, and compute indicators of their securities, in this process, by green
threads, and by drones.

To add an experiment, write a function that loads the lists from a site, and add it to `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import call
from random import Random
from statistics import fmean, stdev
from time import perf_counter
from typing import Any

import polycephaly as poly

from ... import green
from .model import LISTS, PAGES, Fund, Lists
from .site import Page, Site

FILE_LISTS = LISTS[:-1]
"""The lists that are one file each; the last one has a page for each letter."""
MAX_COMPUTED = 5000
"""Securities whose indicators are computed, at most: two seconds of work."""
COMPUTING_TURNS = 2
FUND_THREADS = 13
"""The green threads that load funds in experiment *combined*: the best number in the talk's III."""
DAYS = 250
"""Days of trading in a year."""
WINDOW_DAYS = 20
"""Days of a moving average."""

Indicators = tuple[float, float, float]
"""Volatility of a day, greatest fall from a previous maximum, and share of the days whose price is
above the moving average.
"""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A way to load the five lists, or to compute the list of indicators.

    `drones` is the number of drones, `threads` the number of threads in the process that loads the
    funds, or in this one.
    """

    name: str
    drones: int
    threads: int
    load: Callable[[Site], Mapping[str, Sequence[Any]]]


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """The result of an experiment.

    `differing` names the lists that differ from those of the first experiment.
    """

    experiment: Experiment
    seconds: float
    rows: dict[str, int]
    differing: tuple[str, ...]


def plan(
    drones: Sequence[int],
    threads: Sequence[int],
    timelines: list[poly.Timeline] | None = None,
    pool_options: Mapping[str, Any] | None = None,
) -> list[Experiment]:
    """Return all experiments in the order in which they run, baseline first.

    II comes once for each number of drones, III once for each number of threads. The combined one
    appends its timeline to `timelines`. `pool_options` has options of all pools, such as their
    engine.
    """
    one_each = partial(drone_per_list, pool_options=pool_options)
    drain = partial(drones_drain, pool_options=pool_options)
    combined = partial(drones_and_threads, timelines=timelines, pool_options=pool_options)
    return [
        Experiment("sequential", drones=0, threads=1, load=sequential),
        Experiment("I", drones=len(LISTS), threads=1, load=one_each),
        *(Experiment("II", drones=n, threads=1, load=partial(drain, n)) for n in drones),
        *(Experiment("III", drones=0, threads=n, load=partial(threads_drain, n)) for n in threads),
        Experiment("combined", drones=len(LISTS), threads=FUND_THREADS, load=combined),
    ]


def run(site: Site, experiments: Sequence[Experiment]) -> Iterator[ExperimentOutcome]:
    """Run one experiment after another, and yield each outcome as soon as it is known.

    The time includes the start of the drones, the transport of the lists to this process, and the
    end of the drones.
    """
    baseline: Mapping[str, Sequence[Any]] | None = None
    for experiment in experiments:
        site.clear_cache()
        start = perf_counter()
        lists = experiment.load(site)
        seconds = perf_counter() - start
        if baseline is None:
            baseline = lists
        # Row for row, order included: the lists must not depend on the number of drones or threads.
        differing = tuple(name for name in baseline if lists[name] != baseline[name])
        rows = {name: len(lists[name]) for name in baseline}
        yield ExperimentOutcome(experiment, seconds, rows, differing)


def run_in_turns(
    site: Site, experiments: Sequence[Experiment], turns: int
) -> list[ExperimentOutcome]:
    """Run all experiments, all of them again, and so on; return the fastest outcome of each."""
    taken = [*run(site, [*experiments] * turns)]
    return [
        min(taken[place :: len(experiments)], key=lambda outcome: outcome.seconds)
        for place in range(len(experiments))
    ]


def sequential(site: Site) -> Lists:
    """Load all lists one after another, in this process: the baseline."""
    return {name: getattr(site, f"load_{name}")() for name in LISTS}


def drone_per_list(site: Site, pool_options: Mapping[str, Any] | None = None) -> Lists:
    """Run experiment I: five drones get a code string each, as the talk's `Security loadNYSE`."""
    # The import defines the names in the drone's __main__; the repr of a site recreates the site.
    load = f"from {Site.__module__} import LiveSite, Site; {site!r}.load_"
    return _five_drones_load({name: (f"{load}{name}()",) for name in LISTS}, pool_options)


def _five_drones_load(
    tasks: Mapping[str, tuple[Any, ...]],
    pool_options: Mapping[str, Any] | None,
    timelines: list[poly.Timeline] | None = None,
) -> Lists:
    """Run one task for each list in a drone of its own, that of the longest list, funds, first.

    With options, a pool of as many drones is used, which may run tasks of a lost drone again.
    """
    drones: dict[str, poly.Drone | poly.Pool]
    with ExitStack() as stack:
        if pool_options:
            pool = stack.enter_context(poly.Pool(len(LISTS), **pool_options))
            drones = dict.fromkeys(reversed(LISTS), pool)
        else:
            drones = {name: stack.enter_context(poly.Drone(name=name)) for name in reversed(LISTS)}
        promises = {name: drone.promise(*tasks[name]) for name, drone in drones.items()}
        lists = {name: promises[name].value for name in LISTS}
    if timelines is not None:
        each_once = dict.fromkeys(drones.values())
        timelines.append(sum((drone.timeline for drone in each_once), poly.Timeline()))
    return lists


def drones_drain(drones: int, site: Site, pool_options: Mapping[str, Any] | None = None) -> Lists:
    """Run experiment II: a pool loads the pages of funds; the other lists are four more tasks."""
    with poly.Pool(drones, **pool_options or {}) as pool:
        promises = {name: pool.promise(getattr(site, f"load_{name}")) for name in FILE_LISTS}
        funds = [fund for page in pool.map(site.load_letter, PAGES) for fund in page]
        return {name: promise.value for name, promise in promises.items()} | {"funds": funds}


def threads_drain(threads: int, site: Site) -> Lists:
    """Run experiment III: green threads load the pages of funds and the other four lists."""
    loads: list[Callable[[], Sequence[Any]]] = [
        *(getattr(site, f"load_{name}") for name in FILE_LISTS),
        *(partial(site.load_letter, page) for page in PAGES),
    ]
    # One map for all: so there are never more threads than `threads`, and none is idle while a task
    # is left.
    rows = iter(green.map(call, loads, width=threads))
    lists = {name: next(rows) for name in FILE_LISTS}
    return lists | {"funds": [fund for page in rows for fund in page]}


def drones_and_threads(
    site: Site,
    timelines: list[poly.Timeline] | None = None,
    pool_options: Mapping[str, Any] | None = None,
) -> Lists:
    """Run experiment *combined*: as I, but green threads load the longest list in its drone."""
    tasks = {name: (getattr(site, f"load_{name}"),) for name in FILE_LISTS}
    funds = {"funds": (load_funds, FUND_THREADS, site)}
    return _five_drones_load(tasks | funds, pool_options, timelines)


def load_funds(threads: int, site: Site) -> list[Fund]:
    """Return all funds, as `Site.load_funds` does, loading `threads` pages at a time."""
    return [fund for page in green.map(site.load_letter, PAGES, width=threads) for fund in page]


# -- the second part -------------------------------------------------------------------------------


def computing(
    pages: Sequence[Page], drones: int, pool_options: Mapping[str, Any] | None = None
) -> list[Experiment]:
    """Return three ways to compute the same indicators, the baseline first. Nothing waits."""

    def alone(site: Site) -> dict[str, list[Indicators]]:
        return _compute(map, pages)

    def by_threads(site: Site) -> dict[str, list[Indicators]]:
        return _compute(partial(green.map, width=FUND_THREADS), pages)

    def by_drones(site: Site) -> dict[str, list[Indicators]]:
        with poly.Pool(drones, **pool_options or {}) as pool:
            return _compute(pool.map, pages)

    return [
        Experiment("sequential", drones=0, threads=1, load=alone),
        Experiment("threads", drones=0, threads=FUND_THREADS, load=by_threads),
        Experiment("drones", drones=drones, threads=1, load=by_drones),
    ]


def _compute(
    map_: Callable[..., Iterable[Any]], pages: Sequence[Page]
) -> dict[str, list[Indicators]]:
    symbols = [symbol for page in map_(parse_symbols, pages) for symbol in page]
    return {"indicators": [*map_(indicators, symbols[:MAX_COMPUTED])]}


def indicators(symbol: str) -> Indicators:
    """Return the indicators of the security with this symbol.

    The prices are simulated, the same for a symbol at every run, because price histories are not
    free.
    """
    random = Random(symbol)
    prices = [100.0]
    for _ in range(DAYS):
        prices.append(prices[-1] * random.gauss(1.0003, 0.015))
    changes = [after / before - 1 for before, after in pairwise(prices)]
    highest, fall = prices[0], 0.0
    for price in prices:
        highest = max(highest, price)
        fall = max(fall, 1 - price / highest)
    averages = [fmean(prices[day - WINDOW_DAYS : day]) for day in range(WINDOW_DAYS, len(prices))]
    above = sum(map(float.__gt__, prices[WINDOW_DAYS:], averages))
    return stdev(changes), fall, above / len(averages)


def parse_symbols(page: Page) -> list[str]:
    parse, document = page
    return [security.symbol for security in parse(document)]
