"""The talk's experiments: the same five lists, loaded by ever more heads.

    sequential  this image loads one list after another
    I           five drones, one code string each
    II          n drones drain the pages of funds, and the other four lists beside them

To add one, write what loads the lists from a site and give it a place in `plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import polycephaly as poly
from polycephaly.demos.securities.model import LISTS, PAGES, Lists
from polycephaly.demos.securities.site import Site


@dataclass(frozen=True, slots=True)
class Experiment:
    """A way to load the five lists: with how many drones, and how many threads in each."""

    name: str
    drones: int
    threads: int
    load: Callable[[Site], Lists]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an experiment; `astray` names the lists that are not exactly the first experiment's."""

    experiment: Experiment
    seconds: float
    rows: dict[str, int]
    astray: tuple[str, ...]


def plan(drones: Sequence[int]) -> list[Experiment]:
    """All experiments in the order of their running, baseline first; II once for each number of drones."""
    return [
        Experiment("sequential", drones=0, threads=1, load=sequential),
        Experiment("I", drones=len(LISTS), threads=1, load=drone_per_list),
        *(Experiment("II", drones=n, threads=1, load=partial(drain_pages, n)) for n in drones),
    ]


def run(site: Site, experiments: Sequence[Experiment]) -> Iterator[Outcome]:
    """Run one experiment after another; each outcome comes as soon as it is there.

    The time includes the start of the drones, the transport of the lists to this image, and the end of the
    drones.
    """
    baseline: Lists | None = None
    for experiment in experiments:
        site.forget()
        start = perf_counter()
        lists = experiment.load(site)
        seconds = perf_counter() - start
        if baseline is None:
            baseline = lists
        # Row for row, order included: however many heads loaded a list, it is the one that one head loads.
        astray = tuple(name for name in LISTS if lists[name] != baseline[name])
        yield Outcome(experiment, seconds, {name: len(lists[name]) for name in LISTS}, astray)


def sequential(site: Site) -> Lists:
    """The baseline: all lists one after another, in this image."""
    return {
        "nyse": site.load_nyse(),
        "amex": site.load_amex(),
        "nasdaq": site.load_nasdaq(),
        "etfs": site.load_etfs(),
        "funds": site.load_funds(),
    }


def drone_per_list(site: Site) -> Lists:
    """Experiment I: five drones get a code string each, as the talk's `Security loadNYSE`."""
    with ExitStack() as drones:
        promises = {}
        for name in LISTS:
            drone = drones.enter_context(poly.Drone(name=name))
            # The import gives the drone's __main__ the names; the repr of a site makes that site anew.
            promises[name] = drone.promise(f"from {Site.__module__} import LiveSite, Site; {site!r}.load_{name}()")
        return {name: promise.value for name, promise in promises.items()}


def drain_pages(drones: int, site: Site) -> Lists:
    """Experiment II: a pool drains the pages of funds; the other four lists are four pieces more."""
    with poly.Pool(drones) as pool:
        promises = {
            "nyse": pool.promise(site.load_nyse),
            "amex": pool.promise(site.load_amex),
            "nasdaq": pool.promise(site.load_nasdaq),
            "etfs": pool.promise(site.load_etfs),
        }
        funds = [fund for page in pool.map(site.load_letter, PAGES) for fund in page]
        return {name: promise.value for name, promise in promises.items()} | {"funds": funds}
