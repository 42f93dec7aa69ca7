"""Points of a pool's processes at which a test can have something happen: the process is killed, or is late.

    with at_point("drone sends", AFTER, hit=2, do=die):      this process and all that are forked meanwhile count how
        with Pool(2) as pool: ...                            often one comes there; who is the second does it

A point is a function of the package, before it is called or after it has returned. It is wrapped before the fork, so
the package has nothing of it, and it costs nothing where no test asks for it.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

from polycephaly.drone import executor

BEFORE, AFTER = "before", "after"

POINTS = {
    f"{who} {what}": (who, f"polycephaly.{place}")
    for who, what, place in (
        ("controller", "opens its endpoint", "hub:Hub.open_endpoint"),
        ("controller", "makes a zygote", "launch.launcher:Launcher.__init__"),
        ("controller", "forks", "launch.launcher:Launcher._fork"),
        ("controller", "reads reports", "local.engine:LocalEngine._read_reports"),
        ("controller", "orders a drone", "launch.launcher:Launcher.start"),
        ("controller", "has a drone", "roster:Roster.started"),
        ("controller", "is greeted", "roster:Roster.hello"),
        ("controller", "has what it needs", "roster:Roster._ready"),
        ("controller", "takes a call", "crew:Crew.submit"),
        ("controller", "dispatches", "crew:Crew.dispatch"),
        ("controller", "loads a batch", "link:Link.load_batch"),
        ("controller", "sends a batch", "local.link:LocalLink.send"),
        ("controller", "hears", "hub:hear"),
        ("controller", "splits a slice", "crew:Crew.split"),
        ("controller", "receives by bulk", "hub:Hub.receive"),
        ("controller", "delivers", "hub:Hub._deliver"),
        ("controller", "writes into shared memory", "wire.store:Store.put"),
        ("controller", "takes a loan", "wire.loans:Ledger.arrived"),
        ("controller", "is asked to end", "crew:Crew._close"),
        ("controller", "ends a crew", "crew:Crew._end"),
        ("controller", "ends a zygote", "launch.launcher:Launcher.end"),
        ("controller", "ends its hub", "hub:Hub._end"),
        ("zygote", "begins to serve", "launch.zygote:_Zygote.serve"),
        ("zygote", "obeys", "launch.zygote:_Zygote._obey"),
        ("zygote", "receives descriptors", "launch.lifeline:receive_fds"),
        ("zygote", "starts a drone", "launch.zygote:_Zygote._start"),
        ("zygote", "clears a page", "launch.page:RunningPage.clear"),
        ("zygote", "reports", "launch.zygote:_Zygote._report"),
        ("zygote", "sends reports", "launch.zygote:_Zygote._send_reports"),
        ("zygote", "reaps", "launch.zygote:_Zygote._reap"),
        ("zygote", "ends a group", "launch.lifeline:end_process_group"),
        ("zygote", "ends everything", "launch.zygote:_Zygote.end_everything"),
        ("drone", "is tied to its parent", "launch.lifeline:die_with_parent"),
        ("drone", "enters the arena", "wire.arena:Arena.enter"),
        ("drone", "is hatched", "image.main:become_child"),
        ("drone", "opens its console", "image.main:open_console"),
        ("drone", "sends its logs home", "image.main:send_logs_home"),
        ("drone", "is made", "image.main:Drone.__init__"),
        ("drone", "makes its ear", "image.ear:Ear.__init__"),
        ("drone", "serves", "image.main:Drone.serve"),
        ("drone", "listens", "image.main:Drone._listen"),
        ("drone", "sleeps", "image.main:Drone._sleep"),
        ("drone", "hears all", "image.main:Drone.hear_all"),
        ("drone", "receives", "wire.lane:Lane.receive"),
        ("drone", "hears", "image.runner:Runner._hear"),
        ("drone", "takes the next", "image.runner:Runner._take_next"),
        ("drone", "runs", "image.runner:Runner._run"),
        ("drone", "does calls", "image.runner:Runner._do_calls"),
        ("drone", "does one", "image.runner:Runner._do"),
        ("drone", "says what it starts", "launch.page:Row.start"),
        ("drone", "opens its function", "image.definitions:_Callable.function"),
        ("drone", "runs a slice", "image.slices:Slice.run"),
        ("drone", "ends a slice", "image.runner:Runner._end_slice"),
        ("drone", "cuts a slice", "image.slices:Slice.cut"),
        ("drone", "packs a value", "image.outcomes:Outcomes.pack"),
        ("drone", "packs an error", "image.outcomes:Outcomes.pack_error"),
        ("drone", "makes an entry", "image.outcomes:Outcomes.entry"),
        ("drone", "notes", "image.outcomes:Outcomes.note"),
        ("drone", "notes a value", "image.outcomes:Outcomes.note_value"),
        ("drone", "keeps an outcome on its page", "launch.page:Row.keep"),
        ("drone", "takes outcomes", "image.outcomes:Outcomes.take"),
        ("drone", "sends outcomes", "image.runner:Runner._send_outcomes"),
        ("drone", "flushes", "image.runner:Runner._flush"),
        ("drone", "says what it has sent", "launch.page:Row.sent"),
        ("drone", "sends", "image.main:Drone._send"),
        ("drone", "sends by its lane", "wire.lane:Lane.send"),
        ("drone", "sends by bulk", "image.main:Drone._send_by_bulk"),
        ("drone", "opens bulk", "image.main:Drone.open_bulk"),
        ("drone", "beats", "image.runner:Runner.beat"),
        ("drone", "looks with its ear", "image.main:Drone.hear_if_free"),
        ("drone", "keeps a value", "image.shelf:Shelf.keep"),
        ("drone", "gives a kept value", "image.shelf:Shelf.value"),
        ("drone", "packs what is wanted", "image.runner:Runner.pack_wanted"),
        ("drone", "writes into shared memory", "wire.store:Store.put"),
        ("drone", "takes a block", "wire.store:Store._take"),
        ("drone", "lends", "wire.loans:Ledger.lend"),
        ("drone", "takes a loan", "wire.loans:Ledger.arrived"),
        ("drone", "gets a loan back", "wire.loans:Ledger.came_back"),
        ("drone", "tells what it gives back", "wire.loans:Ledger.take_returned"),
        ("drone", "closes", "image.main:Drone.close"),
    )
}


ONCE = {
    "zygote begins to serve", "zygote starts a drone", "zygote clears a page", "zygote reaps", "zygote ends a group",
    "zygote ends everything", "drone is tied to its parent", "drone enters the arena", "drone is hatched",
    "drone opens its console", "drone sends its logs home", "drone is made", "drone makes its ear", "drone serves",
    "drone opens bulk", "drone closes",
}  # fmt: skip
"""Where no process comes a third time, or not in every run."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_late() -> None:
    time.sleep(0.05)


class Hits:
    """Counted by all processes that are forked from here. Two that come at once may both be the last."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def come(self) -> int:
        self._page[0] = min(self._page[0] + 1, 255)
        return self._page[0]

    def __int__(self) -> int:
        return self._page[0]


@contextmanager
def at_point(name: str, when: str, hit: int = 1, do: Callable[[], object] = die) -> Iterator[Hits]:
    """Gives how often a process came there, to the one that did it."""
    who, place = POINTS[name]
    module, _, path = place.partition(":")
    owner: Any = resolve_name(f"{module}:{path.rpartition('.')[0]}") if "." in path else import_module(module)
    attribute = path.rpartition(".")[2]
    original = vars(owner)[attribute]
    hits, here = Hits(), os.getpid()

    def come() -> None:
        if who == _role(here) and int(hits) < hit and hits.come() >= hit:
            do()

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when == BEFORE:
            come()
        try:
            return original(*args, **kwargs)
        finally:
            if when == AFTER:
                come()

    setattr(owner, attribute, wrapped)
    try:
        yield hits
    finally:
        setattr(owner, attribute, original)


def _role(controller: int) -> str:
    if os.getpid() == controller:
        return "controller"
    return "zygote" if os.getppid() == controller and not executor._runners else "drone"
