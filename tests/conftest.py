"""Around every test: a census. Whatever a test left behind fails it. And how the suite is run: side
by side.

  pytest ──> this process                  where one file, or one test, is asked for, or -n 0
         └─> this process ──> workers      else: most tests wait rather than compute, so twice as
                                           many workers as cores
             (xdist's)        each with a marker, a TMPDIR and a /dev/shm of its own, so that its
                              census is its own

The contract is tested on each engine: tests on Ray come last, all in one worker, with one Ray
(engines.py)."""

from __future__ import annotations

import compileall
import faulthandler
import gc
import multiprocessing.resource_tracker
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any
from zlib import crc32

import census
import pytest
import pytest_timeout
import tiers
from engines import ENGINES, RAY, poly, running

import polycephaly
from polycephaly.green.testing import Clock, virtual_time
from polycephaly.runtime.tuning import tuning
from polycephaly.server.join import join

TESTS = Path(__file__).parent

# Tests at once to a worker: neighbours, as they share fixtures; not more, so that no worker is last
# for long.
A_FEW = 8

_folder = ""
_not_to_be_kept: list[Path] = []
_real_stderr = sys.stderr
# Seconds that it may take: pytest-timeout ends a test that hangs, a deadline a teardown that does.
_TEARDOWN = 90.0
_UNDER_NOHUP = "POLYCEPHALY_TESTS_UNDER_NOHUP"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--switches", type=int, metavar="SEED", help="force thread switches at random bytecodes"
    )
    parser.addoption(
        "--lines", type=int, metavar="SEED", help="have a line tracer sleep at random lines"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    # The pools of fixtures too: a thread or drone has the tracer that was there when it began.
    with _line_tracer(item, told=True):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    switching = item.config.getoption("--switches")
    if switching is None:
        with _line_tracer(item):
            return (yield)
    import switches

    with switches.at_random(crc32(f"{switching} {item.nodeid}".encode())):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    with _line_tracer(item):
        return (yield)


def _line_tracer(item: pytest.Item, told: bool = False) -> AbstractContextManager[None]:
    lines = item.config.getoption("--lines")
    if lines is None or item.config.getoption("--switches") is not None:
        return nullcontext()
    from line_tracer import at_lines

    # Of one test, all seeds differ by an even number: `--lines` chooses the kind of tracer.
    seed = lines + 2 * crc32(item.nodeid.encode())
    if told:  # where the test fails; not printed, because a test may look at what is
        item.add_report_section("setup", "by the line tracer", f"seed {seed}\n")
    return at_lines(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Decides how many workers, where nobody has said it."""
    option = config.option
    if not config.pluginmanager.hasplugin("xdist") or _is_worker(config) or option.tx:
        return
    one_file = len(config.args) == 1 and not os.path.isdir(config.args[0])
    if option.numprocesses is None and not (one_file or option.usepdb or option.capture == "no"):
        option.numprocesses = min(2 * len(os.sched_getaffinity(0)), 16)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A few tests at a time, to whoever is free. But those on Ray go to one worker, which ends
    then: one Ray is enough, and what it leaves in its process (threads of its own) no fork of a
    later test should meet."""
    from xdist.scheduler import LoadScheduling

    class Scheduling(LoadScheduling):
        def _send_tests(self, node: Any, num: int) -> None:
            on_ray = [_is_on_ray(self.collection[each]) for each in self.pending]
            if not any(on_ray) or len(self.nodes) == 1:
                super()._send_tests(node, num)
                return
            self.pending[:] = [
                *compress(self.pending, on_ray),
                *compress(self.pending, map(not_, on_ray)),
            ]
            super()._send_tests(node, sum(on_ray))
            node.shutdown()  # when it has done them

    if config.option.dist != "load":
        return None
    config.option.maxschedchunk = config.option.maxschedchunk or A_FEW
    return Scheduling(config, log)


@cache
def _is_on_ray(test: str) -> bool:
    """With that engine for a parameter, or in a file of its own."""
    return re.search(r"[\[-]ray[\]-]|/test_ray", test) is not None


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _has_workers(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "tx", None)) and not _is_worker(config)


def pytest_configure(config: pytest.Config) -> None:
    global _folder, _real_stderr
    _real_stderr = os.fdopen(os.dup(2), "w")
    _let_signals_come()
    # Nor is a drone killed that does not heed an interrupt within a second: see `short_grace`.
    tuning.grace_seconds = 60.0
    for each in (polycephaly.connect, join):  # else a server that stands still for 5 s is lost
        each.__kwdefaults__["timeout"] = 60.0
    config.addinivalue_line("markers", "guarantee(*ids): shows these rows of docs/guarantees.md")
    config.addinivalue_line(
        "markers", "local_only(reason): not on other engines; with a reason, skipped"
    )
    config.addinivalue_line("markers", "unit: starts no process")
    config.addinivalue_line("markers", "process: forks drones from the process of the tests")
    config.addinivalue_line("markers", "script: starts fresh interpreters")
    config.addinivalue_line("markers", "tracer: works under a line tracer that sleeps (--lines)")
    config.addinivalue_line("markers", "timed: has a timing of its own, so it does not")
    config.addinivalue_line("markers", "slow: a long program, a build, a whole other suite")
    config.addinivalue_line("markers", "ray: needs a Ray, which is started for them")
    config.addinivalue_line("markers", "xdist_group(name): all run by one worker")
    # A temporary directory of this run alone: what other runs leave or make is not counted here.
    if _is_worker(config):
        _folder = os.path.join(tempfile.gettempdir(), config.workerinput["workerid"])
        os.mkdir(_folder, 0o700)
    else:
        _folder = tempfile.mkdtemp(prefix="pct-")
    os.environ["TMPDIR"] = _folder
    tempfile.tempdir = None
    own = census.own_shared_memory(among_others=_is_worker(config))
    if _has_workers(config):
        _compile_all()
        if not own:
            config.pluginmanager.register(WholeRun())
        return
    census.mark_this_process()
    tiers.watch_starts()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # The standard library keeps this process once anything is spawned: it is there before every
    # census.
    multiprocessing.resource_tracker.ensure_running()


def _let_signals_come() -> None:
    """Under `nohup`, and in a background job of a script, SIGHUP or SIGINT is ignored, also by all
    that is started. Tests send both. The suite itself survives SIGHUP, as whoever started it so
    wants."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN or _UNDER_NOHUP in os.environ:
        os.environ[_UNDER_NOHUP] = (
            "1"  # for the workers: no handler is inherited by what is started
        )
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        # In C: a handler in Python might wake a green thread, so that there would be no deadlocks.
        faulthandler.register(signal.SIGHUP, open(os.devnull, "w"))  # noqa: SIM115


def _compile_all() -> None:
    """The suite starts some thousand fresh interpreters, and where Python is told to keep no
    bytecode (PYTHONDONTWRITEBYTECODE), each would compile the package anew: so it is kept, but not
    beyond this run. The tests themselves are compiled by pytest, for ten seconds: here once, and
    not by each worker."""
    if sys.dont_write_bytecode:
        for folder in {
            TESTS,
            *(path.parent for path in (TESTS.parent / "polycephaly").rglob("*.py")),
        }:
            if not (folder / "__pycache__").exists() and compileall.compile_dir(
                folder, maxlevels=0, quiet=2
            ):
                _not_to_be_kept.append(folder / "__pycache__")
    files = sorted(map(str, TESTS.glob("test_*.py")))
    if len(
        list(TESTS.glob(f"__pycache__/test_*{sys.implementation.cache_tag}-pytest-*.pyc"))
    ) < len(files):
        own = ("PYTHONDONTWRITEBYTECODE", "PYTEST_ADDOPTS")
        writing = {name: value for name, value in os.environ.items() if name not in own}
        collect = [
            sys.executable,
            "-m",
            "pytest",
            "-qq",
            "--collect-only",
            "-n0",
            "-p",
            "no:cacheprovider",
        ]
        halves = [
            subprocess.Popen(
                [*collect, *half], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=writing
            )
            for half in (files[::2], files[1::2])
        ]
        for half in halves:
            half.wait()


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in (_folder, *_not_to_be_kept):
        shutil.rmtree(folder, ignore_errors=True)
    _real_stderr.close()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A worker's stdout leads nowhere: what is said of a test that hangs, its output and the
    stacks, goes to stderr."""
    if not _is_worker(item.config):
        return None

    def tell_and_exit() -> None:
        item.config.get_terminal_writer()._file = _real_stderr
        pytest_timeout.timeout_timer(item, settings)

    tell_and_exit.__module__ = (
        pytest_timeout.__name__
    )  # by that the verdict of a deadlock knows it for a time limit
    timer = threading.Timer(settings.timeout, tell_and_exit)

    def cancel() -> None:
        timer.cancel()
        timer.join()

    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    timer.start()
    return True


@pytest.hookimpl(wrapper=True)
def pytest_timeout_cancel_timer(item: pytest.Item) -> Generator[None, Any, Any]:
    """pytest keeps each test's timer, a thread that has ended, to the end of the run, and a fork
    goes through all thread objects that there are: after 300 tests it took twice as long."""
    done = yield
    item.cancel_timeout = None  # type: ignore[attr-defined]
    return done


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """What a worker tells travels as UTF-8, and a test may have printed what is none."""
    return _as_utf8((yield))


def _as_utf8(told: Any) -> Any:
    if isinstance(told, str):
        return told.encode("utf-8", "backslashreplace").decode()
    if isinstance(told, dict):
        return {key: _as_utf8(each) for key, each in told.items()}
    if isinstance(told, list | tuple):
        return type(told)(map(_as_utf8, told))
    return told


def pytest_collection() -> None:
    gc.disable()  # a third of the time it takes


def pytest_collection_finish() -> None:
    """Some hundred thousand objects that stay: no collection, in a test or between tests, need look
    at them again."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    census.wait_for_actors()
    census.wait_for_drones()
    before = census.Census.take()
    _set_hard_deadline(request.node)
    tiers.started.clear()
    yield
    if tiers.started and request.node.get_closest_marker("unit"):
        pytest.fail(
            f"a unit test that starts a process ({tiers.started[0]}): tests/tiers.py has to know"
        )
    faulthandler.cancel_dump_traceback_later()
    left = census.wait_until_clean(before)
    if left:
        pytest.fail("left behind after the test:\n  " + "\n  ".join(left))


def _set_hard_deadline(test: pytest.Item) -> None:
    own = test.get_closest_marker("timeout")
    limit = own.args[0] if own is not None else float(test.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + _TEARDOWN, exit=True, file=_real_stderr)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: Any, call: pytest.CallInfo[Any]) -> None:
    """pytest takes all such deadlines back when a test has failed. But it is such a test that
    leaves work behind, for which the end of its pool may wait for ever."""
    if call.when == "call":
        _set_hard_deadline(node)


@pytest.fixture
def clock() -> Iterator[Clock]:
    """Virtual time for the test's green threads: sleeps and time limits take none, and are exact.
    While a promise of others or asyncio code is waited for, the test has to `advance` it."""
    with virtual_time() as clock:
        yield clock


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not heed an interrupt is killed soon. For tests in which nothing else is
    interrupted."""
    monkeypatch.setattr("polycephaly.runtime.tuning.tuning.grace_seconds", 0.1)


@pytest.fixture
def later() -> Callable[[polycephaly.Pool, float], None]:
    """Moves on the time of a pool that ends with the test: a time limit is over then, and not
    because the machine stood still. What is due by then has happened when this returns, but
    where the caller holds the reactor's lock."""

    def move(pool: polycephaly.Pool, seconds: float) -> None:
        reactor = pool._dispatcher.reactor
        now = reactor.timers.now
        reactor.timers.now = lambda: now() + seconds
        all_fired = threading.Event()  # timers fire in the order of their times
        reactor.post(lambda: reactor.call_later(0, all_fired.set))
        assert reactor._lock.is_held_here() or all_fired.wait(60)

    return move


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools that are made after this report a drone without signs of life sooner."""
    monkeypatch.setattr("polycephaly.runtime.tuning.tuning.health_check_seconds", 0.1)
    monkeypatch.setattr("polycephaly.runtime.tuning.tuning.stalled_seconds", 0.6)
    # For its last words, on a busy machine.
    monkeypatch.setattr("polycephaly.runtime.tuning.tuning.abort_seconds", 60.0)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory without use is given back sooner than after a second."""
    monkeypatch.setattr("polycephaly.runtime.tuning.tuning.warm_seconds", 0.05)


@pytest.fixture
def reactor() -> Any:
    """For decisions by a clock that the test moves."""
    from in_time import FakeReactor

    return FakeReactor()


@pytest.fixture
def started(tmp_path: Path) -> str:
    """The file that work writes to when it has begun."""
    return str(tmp_path / "started")


@pytest.fixture
def pool() -> Iterator[polycephaly.Pool]:
    """Two drones, for one test. A file that needs another pool has its own `pool`."""
    with poly.Pool(2, output="discard") as pool:
        yield pool


@pytest.fixture(scope="module")
def drone(engine: str) -> Iterator[polycephaly.Drone]:
    """One drone for all tests of a file."""
    with poly.Drone() as drone:
        yield drone


@pytest.fixture
def card(tmp_path: Path) -> str:
    """The connection file of `server`."""
    return str(tmp_path / "pool.json")


@pytest.fixture
def server(pool: polycephaly.Pool, card: str) -> Iterator[Any]:
    """The file's `pool`, served."""
    with polycephaly.serve(pool, file=card) as server:
        yield server


@pytest.fixture
def remote(server: Any, card: str) -> Iterator[Any]:
    with polycephaly.connect(card) as remote:
        yield remote


@pytest.fixture(scope="session", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


@pytest.fixture(scope="module", params=["local", "inline", RAY])
def any_engine(request: pytest.FixtureRequest) -> Iterator[str]:
    with running(request.param):
        yield request.param


@pytest.hookimpl(tryfirst=True)  # before `-m` is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Each test gets the mark of its tier. Tests on other engines than the local one come last;
    those that make no sense there are left out or skipped."""
    local, other, left_out = [], [], []
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("ray") is None:
            tier = tiers.tier_of(item)
            item.add_marker(tier)
            shows_guarantee = item.get_closest_marker("guarantee") is not None
            left = tier == "script" or item.get_closest_marker("timed") is not None
            if shows_guarantee and not (left or tiers.has_tracer(item.function)):
                item.add_marker("tracer")
        if (
            getattr(item, "callspec", None) is None
            or item.callspec.params.get("engine", "local") == "local"
        ):
            local.append(item)
        elif (mark := item.get_closest_marker("local_only")) is None:
            other.append(item)
        elif mark.args:
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
            other.append(item)
        else:
            left_out.append(item)
    items[:] = local + other
    config.hook.pytest_deselected(items=left_out)


class WholeRun:
    """The census of /dev/shm where the workers have to share it."""

    def __init__(self) -> None:
        self.before = census.shared_memory()
        self.left: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.left = census.shared_memory() - self.before
        if self.left and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name in sorted(self.left):
            terminalreporter.write_line(
                f"left behind after the run: /dev/shm/{name} (-n 0 tells by which test)"
            )
