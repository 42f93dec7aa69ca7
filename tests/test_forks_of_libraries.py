"""Libraries of every day in forks that are made while their threads work: those that are installed
of the cases of `benchmarks.forks`."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import forks

pytestmark = pytest.mark.slow

SURVIVE = [
    "pyarrow, CPU pool", "pyarrow, I/O pool", "pyarrow, Parquet", "pyarrow, CSV",
    "pyarrow, dataset", "pandas, read_parquet", "pandas", "numexpr", "numba, workqueue",
]  # fmt: skip
"""Their threads, or those that they have others start, are on the list of `fork_survivors`."""

WITHOUT_THREADS = [
    "h5py", "Pillow", "lxml", "orjson", "SQLAlchemy, sqlite3", "requests", "httpx", "matplotlib",
    "tqdm",
]  # fmt: skip

UNSAFE = ["scikit-learn", "polars", "numba, omp", "xgboost", "lightgbm", "blosc2", "opencv"]


def take(name, busy, number):
    for module in forks.CASES[name].needs:  # not imported: its threads would stay in this process
        if find_spec(module.partition(".")[0]) is None:
            pytest.skip(f"{module} is not installed")
    found = forks.take_apart(name, busy, number)
    if "absent" in found:
        pytest.skip(found["absent"])
    return found


@pytest.mark.parametrize(
    "name, busy",
    [
        *((name, busy) for name in SURVIVE for busy in (False, True)),
        # While a thread of Python works with these, a fork may lack the holder of a lock.
        *((name, False) for name in WITHOUT_THREADS),
    ],
)
def test_a_library_works_on_in_a_fork_and_pools_fork(name, busy):
    found = take(name, busy, 20)
    assert found.get("right") == found.get("forks") == 20, found
    assert found["same"] and not found["parent_errors"], found
    assert found["pool"] == "fork", found
    if name in SURVIVE:
        assert found["threads"] and (name == "pandas" or not busy or found["working"]), found


@pytest.mark.parametrize("name", UNSAFE)
def test_a_library_whose_threads_a_fork_would_lack_gets_fresh_interpreters(name):
    found = take(name, False, 0)
    assert found["threads"] and "does not fork" in found["pool"], found
