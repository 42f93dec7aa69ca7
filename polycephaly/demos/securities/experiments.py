"""The talk's experiments: the same five lists, loaded by ever more heads and hands.

    sequential  this image loads one list after another
    I           five drones, one code string each
    II          n drones drain the pages of funds, and the other four lists beside them
    III         n green threads of this image drain the same
    combined    five drones, one list each; in its drone, 13 green threads drain the pages of funds

To add one, write what loads the lists from a site and give it a place in `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import polycephaly as poly

from ... import green
from .model import LISTS, PAGES, Fund, Lists
from .site import Site

FUND_THREADS = 13
"""The green threads that load funds in experiment *combined*: as many as were best in the talk's
III."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """A way to load the five lists: with how many drones, and how many threads in the image that
    loads the funds."""

    name: str
    drones: int
    threads: int
    load: Callable[[Site], Lists]


@dataclass(frozen=True, slots=True)
class ExperimentOutcome:
    """What came of an experiment; `astray` names the lists that are not exactly the first
    experiment's."""

    experiment: Experiment
    seconds: float
    rows: dict[str, int]
    astray: tuple[str, ...]


def plan(
    drones: Sequence[int],
    threads: Sequence[int],
    timelines: list[poly.Timeline] | None = None,
    how: Mapping[str, Any] | None = None,
) -> list[Experiment]:
    """All experiments in the order of their running, baseline first.

    II comes once for each number of drones, III once for each number of threads. The combined one
    leaves its timeline in `timelines`. `how`: options of all pools, such as their engine."""
    combined = partial(drones_and_threads, timelines=timelines, how=how)
    return [
        Experiment("sequential", drones=0, threads=1, load=sequential),
        Experiment("I", drones=len(LISTS), threads=1, load=partial(drone_per_list, how=how)),
        *(
            Experiment("II", drones=n, threads=1, load=partial(drones_drain, n, how=how))
            for n in drones
        ),
        *(Experiment("III", drones=0, threads=n, load=partial(threads_drain, n)) for n in threads),
        Experiment("combined", drones=len(LISTS), threads=FUND_THREADS, load=combined),
    ]


def run(site: Site, experiments: Sequence[Experiment]) -> Iterator[ExperimentOutcome]:
    """Run one experiment after another; each outcome comes as soon as it is there.

    The time includes the start of the drones, the transport of the lists to this image, and the end
    of the drones."""
    baseline: Lists | None = None
    for experiment in experiments:
        site.forget()
        start = perf_counter()
        lists = experiment.load(site)
        seconds = perf_counter() - start
        if baseline is None:
            baseline = lists
        # Row for row, order included: however many heads loaded a list, it is the one that one head
        # loads.
        astray = tuple(name for name in LISTS if lists[name] != baseline[name])
        yield ExperimentOutcome(
            experiment, seconds, {name: len(lists[name]) for name in LISTS}, astray
        )


def sequential(site: Site) -> Lists:
    """The baseline: all lists one after another, in this image."""
    return {
        "nyse": site.load_nyse(),
        "amex": site.load_amex(),
        "nasdaq": site.load_nasdaq(),
        "etfs": site.load_etfs(),
        "funds": site.load_funds(),
    }


def drone_per_list(site: Site, how: Mapping[str, Any] | None = None) -> Lists:
    """Experiment I: five drones get a code string each, as the talk's `Security loadNYSE`."""
    with _a_drone_for_each_list(how) as drones:
        promises = {}
        for name, drone in drones.items():
            # The import gives the drone's __main__ the names; the repr of a site makes that site
            # anew.
            promises[name] = drone.promise(
                f"from {Site.__module__} import LiveSite, Site; {site!r}.load_{name}()"
            )
        return {name: promises[name].value for name in LISTS}


@contextmanager
def _a_drone_for_each_list(
    how: Mapping[str, Any] | None,
) -> Iterator[dict[str, poly.Drone | poly.Pool]]:
    """The longest list, funds, first. With options: a pool of as many, which may run again what a
    lost drone ran."""
    with ExitStack() as stack:
        if how:
            pool = stack.enter_context(poly.Pool(len(LISTS), **how))
            yield dict.fromkeys(reversed(LISTS), pool)
        else:
            yield {name: stack.enter_context(poly.Drone(name=name)) for name in reversed(LISTS)}


def drones_drain(drones: int, site: Site, how: Mapping[str, Any] | None = None) -> Lists:
    """Experiment II: a pool drains the pages of funds; the other four lists are four pieces
    more."""
    with poly.Pool(drones, **how or {}) as pool:
        promises = {
            "nyse": pool.promise(site.load_nyse),
            "amex": pool.promise(site.load_amex),
            "nasdaq": pool.promise(site.load_nasdaq),
            "etfs": pool.promise(site.load_etfs),
        }
        funds = [fund for page in pool.map(site.load_letter, PAGES) for fund in page]
        return {name: promise.value for name, promise in promises.items()} | {"funds": funds}


def threads_drain(threads: int, site: Site) -> Lists:
    """Experiment III: green threads of this image drain the pages of funds, and the other four
    lists."""
    loads: list[Callable[[], Sequence[Any]]] = [
        site.load_nyse,
        site.load_amex,
        site.load_nasdaq,
        site.load_etfs,
        *(partial(site.load_letter, page) for page in PAGES),
    ]
    # One map for all: so at no time there are more threads than said, and none is idle while there
    # is a piece left.
    nyse, amex, nasdaq, etfs, *pages = green.map(_call, loads, width=threads)
    funds = [fund for page in pages for fund in page]
    return {"nyse": nyse, "amex": amex, "nasdaq": nasdaq, "etfs": etfs, "funds": funds}


def drones_and_threads(
    site: Site, timelines: list[poly.Timeline] | None = None, how: Mapping[str, Any] | None = None
) -> Lists:
    """Experiment *combined*: five drones as in I; the longest list is loaded by green threads in
    its drone."""
    promises = {}
    with _a_drone_for_each_list(how) as drones:
        for name, drone in drones.items():
            if name == "funds":
                promises[name] = drone.promise(load_funds, FUND_THREADS, site)
            else:
                promises[name] = drone.promise(getattr(site, f"load_{name}"))
        lists = {name: promises[name].value for name in LISTS}
    if timelines is not None:
        timelines.append(
            sum((drone.timeline for drone in dict.fromkeys(drones.values())), poly.Timeline())
        )
    return lists


def load_funds(threads: int, site: Site) -> list[Fund]:
    """All funds, as `Site.load_funds` gives them, with so many pages at a time."""
    return [fund for page in green.map(site.load_letter, PAGES, width=threads) for fund in page]


def _call(load: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    return load()
