"""Points of a pool's processes at which a test can have something happen: the process is killed, or
is late.

    with at_point("drone sends", AFTER, hit=2, do=die):      this process and all that are forked
        with Pool(2) as pool: ...                            meanwhile count how often one comes
                                                             there; who is the second does it

A point is a function of the package, before it is called or after it has returned. It is wrapped
before the fork, so the package has nothing of it, and it costs nothing where no test asks for it.

A fork has the points of its parent. A fresh interpreter (a spawned drone's, the command line's, a
joined host's) is told by its environment:

    env, hits = armed(page, "drone sends", AFTER)            an interpreter with this environment,
    with Script(text, env=env): ...                          and all that it starts, counts there

`env` puts `tests/armed` on PYTHONPATH, where `sitecustomize.py` calls `arm_from_environment`. The
function is wrapped when its module has been imported, so that all is imported when it always is.
Other interpreters know nothing of that directory.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce, wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

BEFORE, AFTER = "before", "after"

POINTS = {
    f"{who} {what}": (who, f"polycephaly.{place}")
    for who, what, place in (
        ("controller", "makes its directory", "wire.private_directory:PrivateDirectory.open"),
        ("controller", "makes a zygote", "engines.local.launcher:Launcher.__init__"),
        ("controller", "forks", "engines.local.launcher:Launcher._fork"),
        ("controller", "reads reports", "engines.local.engine:LocalEngine._read_reports"),
        ("controller", "orders a drone", "engines.local.launcher:Launcher.start"),
        ("controller", "has a drone", "pool.supervisor:Supervisor.on_started"),
        ("controller", "is greeted", "pool.supervisor:Supervisor.on_hello"),
        ("controller", "has what it needs", "pool.supervisor:Supervisor._mark_ready"),
        ("controller", "takes a call", "pool.dispatcher:Dispatcher.submit"),
        ("controller", "takes a turn", "pool.dispatcher:Dispatcher.take_turn"),
        ("controller", "packs a batch", "pool.drone_handle:DroneHandle.pack"),
        ("controller", "sends a batch", "engines.local.handle:LocalHandle.send"),
        ("controller", "hears", "engines.local.handle:handle_records"),
        ("controller", "divides a chunk", "pool.pool_state:PoolState._divided"),
        ("controller", "delivers", "promises.event_loop:EventLoop._deliver"),
        ("controller", "writes into shared memory", "memory.blocks:Store.put"),
        ("controller", "takes a loan", "memory.references:RefTable.receive"),
        ("controller", "is asked to end", "pool.dispatcher:Dispatcher._close"),
        ("controller", "ends a pool", "pool.dispatcher:Dispatcher._end"),
        ("controller", "ends a zygote", "engines.local.launcher:Launcher.end"),
        ("controller", "ends its reactor", "pool.reactor:Reactor._end"),
        ("zygote", "begins to serve", "engines.local.zygote:Zygote.serve"),
        ("zygote", "obeys", "engines.local.zygote:Zygote._handle_order"),
        ("zygote", "receives descriptors", "runtime.parent_death:receive_fds"),
        ("zygote", "starts a drone", "engines.local.zygote:Zygote._start"),
        ("zygote", "reports", "engines.local.zygote:Zygote._report"),
        ("zygote", "sends reports", "engines.local.zygote:Zygote._send_reports"),
        ("zygote", "reaps", "engines.local.zygote:Zygote._reap"),
        ("zygote", "ends a group", "runtime.parent_death:end_process_group"),
        ("zygote", "ends everything", "engines.local.zygote:Zygote.end_everything"),
        ("drone", "is tied to its parent", "runtime.parent_death:die_with_parent"),
        ("drone", "enters the arena", "memory.arena:Arena.adopt"),
        ("drone", "is hatched", "engines.local.drone:prepare_child"),
        ("drone", "opens its console", "drone.executor:open_console"),
        ("drone", "sends its logs home", "drone.executor:install_log_forwarding"),
        ("drone", "is made", "engines.local.drone:LocalDrone.__init__"),
        ("drone", "makes its control thread", "engines.local.drone:ControlThread.__init__"),
        ("drone", "serves", "engines.local.drone:LocalDrone.serve"),
        ("drone", "listens", "engines.local.drone:LocalDrone._receive"),
        ("drone", "sleeps", "engines.local.drone:LocalDrone._wait"),
        ("drone", "hears all", "engines.local.drone:LocalDrone.receive_all"),
        ("drone", "receives", "wire.message_socket:MessageSocket.receive"),
        ("drone", "hears", "drone.executor:DroneExecutor._handle_message"),
        ("drone", "takes the next", "drone.executor:DroneExecutor._run_next"),
        ("drone", "does calls", "drone.executor:DroneExecutor._run_calls"),
        ("drone", "does one", "drone.executor:DroneExecutor._run_task"),
        ("drone", "says what it starts", "wire.status_page:StatusPage.mark_started"),
        ("drone", "opens its function", "drone.functions:LoadedFunction.function"),
        ("drone", "runs a chunk", "drone.chunk_run:ChunkRun.run"),
        ("drone", "ends a chunk", "drone.executor:DroneExecutor._add_last_answers"),
        ("drone", "gives back of a chunk", "drone.chunk_run:ChunkRun.give_back"),
        ("drone", "packs a value", "drone.outcomes:Outcomes.pack"),
        ("drone", "packs an error", "drone.outcomes:Outcomes.pack_error"),
        ("drone", "notes", "drone.outcomes:Outcomes.add"),
        ("drone", "notes a value", "drone.outcomes:Outcomes.add_value"),
        ("drone", "writes an outcome", "engines.local.drone:LocalDrone._put"),
        ("drone", "writes into its ring", "wire.ring:RingWriter.write"),
        ("drone", "writes of a chunk", "drone.executor:DroneExecutor._put_done"),
        ("drone", "writes reports", "drone.outcomes:Outcomes.put_reports"),
        ("drone", "flushes", "drone.executor:DroneExecutor._flush"),
        ("drone", "rings", "engines.local.drone:LocalDrone._tell"),
        ("drone", "sends", "drone.executor:DroneExecutor._send"),
        ("drone", "beats", "drone.executor:DroneExecutor.beat"),
        ("drone", "obeys", "engines.local.drone:LocalDrone.obey"),
        ("drone", "keeps a value", "drone.store:DroneStore.keep"),
        ("drone", "gives a kept value", "drone.store:DroneStore.value"),
        ("drone", "packs what is wanted", "drone.executor:DroneExecutor.send_requested_values"),
        ("drone", "writes into shared memory", "memory.blocks:Store.put"),
        ("drone", "takes a block", "memory.blocks:Store._take_block"),
        ("drone", "lends", "memory.references:RefTable.lend"),
        ("drone", "takes a loan", "memory.references:RefTable.receive"),
        ("drone", "gets a loan back", "memory.references:RefTable.release"),
        ("drone", "tells what it gives back", "memory.references:RefTable.take_returned"),
        ("drone", "closes", "engines.local.drone:LocalDrone.close"),
    )
}


ONCE = {
    "zygote begins to serve", "zygote starts a drone", "zygote reaps", "zygote ends a group",
    "zygote ends everything", "drone is tied to its parent", "drone enters the arena",
    "drone is hatched", "drone opens its console", "drone sends its logs home", "drone is made",
    "drone makes its control thread", "drone serves", "drone closes",
    "drone tells what it gives back",
}  # fmt: skip
"""Where no process comes a third time, or not in every run."""

SERVED = {
    f"{who} {what}": ("controller", f"polycephaly.server.{place}")
    for who, what, place in (
        ("server", "reads calls", "server:Server._handle_work"),
        ("server", "submits a call", "server:Server._submit_call"),
        ("server", "lends", "joined:JoinedHosts._send_calls"),
        ("server", "hears a host", "joined:JoinedHosts.handle_message"),
        ("server", "has an outcome", "server:Server._add_outcome"),
        ("server", "sends", "server:Server._send"),
        ("host", "reads calls", "join:Joined._handle_work"),
        ("host", "submits a call", "join:Joined._submit_call"),
        ("host", "has an outcome", "join:Joined._on_settled"),
        ("host", "sends outcomes", "join:Joined._send_outcomes"),
    )
}
"""Of a controller whose pool is served, or has joined one that is."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def be_late() -> None:
    time.sleep(0.05)


class Hits:
    """Counted by all processes that are forked from here. Two that come at once may both be the
    last."""

    def __init__(self) -> None:
        self._page = mmap.mmap(-1, mmap.PAGESIZE)

    def come(self) -> int:
        self._page[0] = min(self._page[0] + 1, 255)
        return self._page[0]

    def __int__(self) -> int:
        return self._page[0]


class HitsInFile(Hits):
    """Counted by all processes that know the file: its length. No descriptor of it stays open."""

    def __init__(self, file: str) -> None:
        self._file = file
        Path(file).touch()

    def come(self) -> int:
        with open(self._file, "ab", buffering=0) as file:
            file.write(b".")
            return file.tell()

    def __int__(self) -> int:
        return os.stat(self._file).st_size


@contextmanager
def at_point(name: str, when: str, hit: int = 1, do: Callable[[], object] = die) -> Iterator[Hits]:
    """Gives how often a process came there, to the one that did it."""
    who, place = POINTS[name]
    hits, here = Hits(), os.getpid()
    module, _, path = place.partition(":")
    restore = _wrap(
        import_module(module), path, when, _Come(hits, hit, do, lambda: who == _role(here))
    )
    try:
        yield hits
    finally:
        restore()


def _role(controller: int) -> str:
    from polycephaly.drone import executor  # not before a fresh interpreter would import it itself

    if os.getpid() == controller:
        return "controller"
    return "zygote" if os.getppid() == controller and not executor._executors else "drone"


class _Come:
    def __init__(
        self, hits: Hits, hit: int, do: Callable[[], object], is_meant: Callable[[], bool]
    ) -> None:
        self._hits, self._hit, self._do, self._is_meant = hits, hit, do, is_meant

    def __call__(self) -> None:
        if self._is_meant() and int(self._hits) < self._hit and self._hits.come() >= self._hit:
            self._do()


def _wrap(module: ModuleType, path: str, when: str, come: Callable[[], None]) -> Callable[[], None]:
    """Have `come` called before or after the function at `path`; how to undo it."""
    *outer, attribute = path.split(".")
    owner: Any = reduce(getattr, outer, module)
    original = vars(owner)[attribute]

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
    return lambda: setattr(owner, attribute, original)


# -- fresh interpreters ----------------------------------------------------------------------------

VARIABLE = "POLYCEPHALY_TEST_FAILPOINT"
TESTS = Path(__file__).parent
PATH = os.pathsep.join(map(str, (TESTS / "armed", TESTS, TESTS.parent)))


def armed(
    page: Path, name: str, when: str, hit: int = 1, do: Callable[[], object] = die
) -> tuple[dict[str, str], Hits]:
    """What an interpreter needs in its environment, and how often a process came there. `page` is a
    new file, in which they are counted."""
    told = json.dumps([name, when, hit, do.__name__, str(page)])
    return {"PYTHONPATH": PATH, VARIABLE: told}, HitsInFile(str(page))


def arm_from_environment() -> None:
    name, when, hit, do, page = json.loads(os.environ[VARIABLE])
    who, place = (POINTS | SERVED)[name]
    # A daemon is a fork of what was armed, and a zygote may be an interpreter of its own. So no pid
    # is known here: a process is a zygote by what it does, and what a zygote forks is a drone.
    zygotes: list[int] = []

    def role() -> str:
        if not zygotes:
            return "controller"
        return "zygote" if os.getpid() == zygotes[-1] else "drone"

    come = _Come(HitsInFile(page), hit, {"die": die, "be_late": be_late}[do], lambda: who == role())
    module, _, path = place.partition(":")
    sys.meta_path[:0] = [
        _Import(module, lambda it: _wrap(it, path, when, come)),
        _Import(
            "polycephaly.engines.local.zygote",
            lambda it: _wrap(it, "Zygote.run", BEFORE, lambda: zygotes.append(os.getpid())),
        ),
    ]


class _Import(MetaPathFinder):
    """Has `then` called with a module as soon as it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], object]) -> None:
        self._name, self._then = name, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(name)  # as all others find it
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self._then(module)

        spec.loader.exec_module = exec_module
        return spec
