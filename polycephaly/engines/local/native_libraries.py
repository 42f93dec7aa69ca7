"""How many threads the native libraries of one drone may use: BLAS, OpenMP and the like.

    Pool(native_threads=) ──> ThreadLimit ──> Order ──┬─ variables ──> libraries that a drone loads
                                                      └─ LoadedLibraries ──> those of the snapshot

Each such library uses a thread for each core, in each drone. So small products of two drones on two
cores take several times as long as with one thread each, because each drone's threads wait for
cores on which the other drone's threads run.

Limits are set in zygotes and drones only: the controller's own libraries stay as they are. (Whether
threads that are there already allow a fork is another question: see native_threads.py.)

Limits by variables are those of loky and joblib. They come too late for libraries that were loaded
before a fork, so those are limited by threadpoolctl, and by functions of their own.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..._compat import numba_threads, set_numba_threads
from ...runtime.procfs import read_text
from ...runtime.system_limits import usable_processors

VARIABLES: dict[str, tuple[str, ...]] = {
    "OMP_NUM_THREADS": (),
    "OPENBLAS_NUM_THREADS": ("GOTO_NUM_THREADS", "OMP_NUM_THREADS"),
    "MKL_NUM_THREADS": ("OMP_NUM_THREADS",),
    "BLIS_NUM_THREADS": ("OMP_NUM_THREADS",),
    "NUMEXPR_NUM_THREADS": ("OMP_NUM_THREADS",),
    "NUMBA_NUM_THREADS": (),
    "POLARS_MAX_THREADS": (),
    "RAYON_NUM_THREADS": (),
    "OPENCV_FOR_THREADS_NUM": (),
}
"""The variables of the libraries, each with those that its library reads in its absence."""

_NAMES = {*VARIABLES, *(other for others in VARIABLES.values() for other in others)}


class ThreadLimit(NamedTuple):
    """How many threads the native libraries of one drone may use. It is JSON as it is."""

    threads: int  # 0: the libraries are left alone
    variables: Sequence[str] = ()  # those that the user has not set: they become `threads`
    given: Mapping[str, int] = {}  # by variable, what the user has set in `env=`
    at_most: bool = False  # a smaller number that a library has in the snapshot stays

    def environment(self) -> dict[str, str]:
        return dict.fromkeys(self.variables, str(self.threads))

    def number(self, variable: str, first: int) -> int:
        """Return the number for a library of `variable` that has `first` in the snapshot."""
        if variable in self.given:
            return self.given[variable]
        if variable not in self.variables:
            return first
        return min(first, self.threads) if self.at_most else self.threads


NO_LIMIT = ThreadLimit(0)

_own_limit = NO_LIMIT
"""The limit of this process, if it is a drone or a zygote."""


# -- in the controller -----------------------------------------------------------------------------


def threads_to_share() -> int:
    """Return how many threads the native libraries of all drones of a pool should use together.

    As many as there are usable cores; in a drone, as many as it may use itself.
    """
    return _own_limit.threads or usable_processors()


def names_set_by_user() -> frozenset[str]:
    """Return the variables in the environment that the user has set.

    The others are those that this process, as a drone, has from its own limit.
    """
    own = _own_limit.environment()
    return frozenset(
        name for name in _NAMES & os.environ.keys() if os.environ[name] != own.get(name)
    )


def make_limit(
    threads: int, at_most: bool, set_by_user: Collection[str], env: Mapping[str, str]
) -> ThreadLimit:
    """Return the limit of a drone for which the user has set the variables `env`."""
    if not threads:
        return NO_LIMIT
    free: list[str] = []
    given: dict[str, int] = {}
    for variable, others in VARIABLES.items():
        names = variable, *others
        name = next((each for each in names if each in env), None)
        if name is not None:
            with suppress(ValueError):  # what that means, its library knows
                given[variable] = int(env[name].partition(",")[0])
        elif not any(each in set_by_user for each in names):
            free.append(variable)
    return ThreadLimit(threads, free, given, at_most)


_LIBRARY_FILE = re.compile(r"/lib(\w*(blas|blis)|mkl_rt|[gi]?omp)[^/\n]*$", re.MULTILINE)
"""A line of /proc/self/maps with a library that threadpoolctl knows."""


def prepare_to_limit() -> None:
    """Import `threadpoolctl` for the zygotes that this process forks, if they will need it.

    Nothing else imports it, because that may take half as long as the start of a drone.
    """
    if _LIBRARY_FILE.search(read_text("/proc/self/maps")):
        with suppress(ImportError):
            import threadpoolctl  # noqa: F401


# -- in a zygote -----------------------------------------------------------------------------------


class LoadedLibraries:
    """The libraries that a zygote has loaded. Its drones inherit their numbers of threads."""

    def __init__(self, lacks_threads: bool = False) -> None:
        """Take whether this process may be a fork that lacks threads of these libraries."""
        self._lacks_threads = lacks_threads
        self._libraries: list[_Library] | None = None  # None: not looked for yet

    def limit(self, limit: ThreadLimit) -> None:
        """Have drones that are forked from now on obey `limit`."""
        global _own_limit
        if not limit.threads or limit == _own_limit:
            return
        if self._libraries is None:
            self._libraries = [*_of_threadpoolctl(), *_of_modules()]
            if self._lacks_threads:
                self._libraries = [*filter(None, map(_after_unsafe_fork, self._libraries))]
        for library in self._libraries:
            with suppress(Exception):  # a drone with too many threads is better than none
                library.set_number(limit.number(library.variable, library.first))
        _own_limit = limit


class _Library(NamedTuple):
    name: str
    variable: str  # see `VARIABLES`
    first: int  # its number of threads in the snapshot
    set_number: Callable[[int], object]


def _of_threadpoolctl() -> Iterator[_Library]:
    threadpoolctl: Any = sys.modules.get("threadpoolctl")
    if threadpoolctl is not None:
        with warnings.catch_warnings(action="ignore"):  # of libraries that may not fit each other
            found = threadpoolctl.ThreadpoolController().lib_controllers
        for each in found:
            variable = f"{each.internal_api.upper()}_NUM_THREADS"
            if variable not in VARIABLES:  # OpenMP itself, or a library that asks it
                variable = "OMP_NUM_THREADS"
            yield _Library(each.prefix, variable, each.num_threads, each.set_num_threads)


_FUNCTIONS = {
    "torch": ("OMP_NUM_THREADS", "get_num_threads", "set_num_threads"),
    "pyarrow": ("OMP_NUM_THREADS", "cpu_count", "set_cpu_count"),
    "cv2": ("OPENCV_FOR_THREADS_NUM", "getNumThreads", "setNumThreads"),
}


def _of_modules() -> Iterator[_Library]:
    """Yield the libraries that threadpoolctl does not know."""
    for name, (variable, get_number, set_number) in _FUNCTIONS.items():
        with suppress(KeyError, AttributeError):  # not imported, or only half
            module = sys.modules[name]
            first: int = getattr(module, get_number)()
            yield _Library(name, variable, first, getattr(module, set_number))
    first = numba_threads()
    if first:
        yield _Library("numba", "NUMBA_NUM_THREADS", first, set_numba_threads)


def _after_unsafe_fork(library: _Library) -> _Library | None:
    """Return what may be done with `library` in a fork that lacks its threads; None if nothing.

    When GNU's OpenMP needs a second thread, it would wait for ever. OpenCV would do so when it is
    told any number.
    """
    if library.name == "cv2":
        return None
    if library.name in ("libgomp", "torch"):
        set_number = library.set_number
        return library._replace(set_number=lambda number: set_number(1))
    return library
