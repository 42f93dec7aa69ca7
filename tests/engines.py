"""The engines that the contract is tested on, and `poly`: polycephaly, with pools and drones of the
engine under test.

    from engines import local_only, on_each_engine, poly

    pytestmark = on_each_engine             every test of this file runs once on each engine

    @local_only             looks into the local engine's own parts, or at what both have in common:
    not run on another @local_only(NO_FORK)    a known difference, which docs/cluster.md has in its
    table: skipped, and says why

All tests on Ray (`-m ray`) are run last, with one Ray for all of them (`conftest.py`), so the local
engine's never see a process with Ray's threads in it. What is run *in* a drone finds the package as
it is: drones of drones are local."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import polycephaly

RAY = pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.xdist_group("ray")])
ENGINES = ("local", RAY)

on_each_engine = pytest.mark.usefixtures("engine")
local_only = pytest.mark.local_only

# What docs/cluster.md says, in these words.
NO_FORK = "a fresh interpreter, with a copy of what `__main__` holds and can be pickled"
NO_STATUS = "`exitcode` is None, unless we have killed it: Ray does not tell how a process ended"
READ_ONLY = "large ones arrive read-only: they lie in Ray's object store"
LEFT = "Ray does not look after what a killed one leaves"
DIFFERENCES = (NO_FORK, NO_STATUS, READ_ONLY, LEFT)


def on_ray(test: Callable[..., None]) -> Callable[..., None]:
    """A test of Ray alone."""
    return on_each_engine(pytest.mark.parametrize("engine", [RAY], indirect=True)(test))


class OnEngine:
    """`polycephaly`, but its `Pool` and `Drone` are of one engine."""

    engine = "local"

    def __getattr__(self, name: str) -> Any:
        return getattr(polycephaly, name)

    def __reduce__(self) -> str:
        return "poly"

    def Pool(self, *args: Any, **how: Any) -> polycephaly.Pool:
        return polycephaly.Pool(*args, **self._own, **how)

    def Drone(self, **how: Any) -> polycephaly.Drone:
        return polycephaly.Drone(**self._own, **how)

    @property
    def _own(self) -> dict[str, Any]:
        return {} if self.engine == "local" else {"engine": self.engine}


poly = OnEngine()


def pool_of_file(size: int, **how: Any) -> Any:
    """A fixture: `pool = pool_of_file(2)` at the top of a file has all its tests share one pool, on
    each engine."""

    @pytest.fixture(scope="module")
    def pool(engine: str) -> Iterator[polycephaly.Pool]:
        with poly.Pool(size, **how) as pool:
            yield pool

    return pool


def rounds(times: int) -> range:
    """How often something is done that starts drones: a second each on Ray, milliseconds here."""
    return range(times if poly.engine == "local" else max(2, times // 8))


def told(status: int) -> int | None:
    """What is told of a process that ended with `status`."""
    return status if poly.engine == "local" else None


@contextmanager
def running(engine: str) -> Iterator[None]:
    """With what `engine` needs, while the block lasts; `poly` is of it."""
    with _ray() if engine == "ray" else warnings.catch_warnings():
        poly.engine = engine
        try:
            yield
        finally:
            poly.engine = "local"


CPUS = 4  # Ray starts so many workers at once; drones that ask for nothing are not counted


@contextmanager
def _ray() -> Iterator[None]:
    """A Ray of one node, for this process and, by `RAY_ADDRESS`, for the scripts it runs."""
    tests = os.path.dirname(os.path.abspath(__file__))
    known = os.pathsep.join(
        [tests, os.path.dirname(tests)]
    )  # Ray's workers know the script's own folder only
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.40'")
        with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
            ray.init(
                "local", num_cpus=CPUS, object_store_memory=400 << 20, include_dashboard=False,
                _temp_dir=folder, configure_logging=False, log_to_driver=False,
            )  # fmt: skip
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
            try:
                yield
            finally:
                del os.environ["RAY_ADDRESS"]
                ray.shutdown()
