"""The native threads that a fork may lack, because their library works on in the fork without them.

An entry is made of a library, its lowest version, and where its threads come from. All other
threads make a fork unsafe: those that the same wheel starts in another way, and those of older
versions. An entry is added only if the library itself provides for forks, and if each of many forks
went well that were made while its threads worked: `python -m benchmarks.forks` makes them, and
`tests/test_forks_of_libraries.py` makes some of them again.
"""

from __future__ import annotations

import re
import sys
from typing import NamedTuple

from .thread_origin import Origin


class Survivor(NamedTuple):
    package: str
    """The name of the Python package whose version counts."""
    lowest: tuple[int, ...]
    """The lowest version that was measured."""
    library: re.Pattern[str]
    """The end of the path of the library that started the threads."""
    starts: frozenset[str]
    """The `Origin.start` of its threads: empty where the library does not export the name."""

    def is_origin(self, origin: Origin) -> bool:
        return (
            origin.start in self.starts
            and self.library.search(origin.path) is not None
            and _version_of(self.package) >= self.lowest
        )


SURVIVORS = (
    # Its at-fork handlers give the child new pools, and have it start its own thread that waits for
    # Ctrl-C while a file is read (`SelfPipe`).
    Survivor(
        "pyarrow",
        (12,),
        re.compile(r"/libarrow\.so\.\d+$"),
        frozenset(
            {"arrow::internal::ThreadPool::LaunchWorkersUnlocked", "arrow::internal::SelfPipe"}
        ),
    ),
    # It starts threads, and makes its locks anew, where it finds itself in another process.
    Survivor(
        "numexpr", (2, 11), re.compile(r"/numexpr/interpreter\.[^/]*$"), frozenset({"th_worker"})
    ),
    # Its at-fork handler forgets the threads and their queues. The library has no other threads.
    Survivor(
        "numba", (0, 57, 1), re.compile(r"/numba/np/ufunc/workqueue\.[^/]*$"), frozenset({""})
    ),
)


def survives_fork(origin: Origin) -> bool:
    """Return whether the library of a thread works on in a fork that lacks the thread."""
    return any(each.is_origin(origin) for each in SURVIVORS)


def _version_of(package: str) -> tuple[int, ...]:
    """Return the numbers of an imported package's version; none if it is not imported."""
    version = getattr(sys.modules.get(package), "__version__", None)
    found = re.match(r"\d+(\.\d+)*", version) if isinstance(version, str) else None
    return tuple(map(int, found[0].split("."))) if found else ()
