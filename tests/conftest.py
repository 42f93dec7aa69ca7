"""Around every test: a census. Whatever a test left behind fails it."""

from __future__ import annotations

import faulthandler
import multiprocessing.resource_tracker
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator

import census
import pytest

_session_folder = ""
_real_stderr = sys.stderr
_HARD_DEADLINE = 100.0  # seconds: pytest-timeout ends a test that hangs, this one a teardown that hangs after it


def pytest_configure(config: pytest.Config) -> None:
    global _session_folder, _real_stderr
    _real_stderr = os.fdopen(os.dup(2), "w")
    # A temporary directory of this run alone: what other runs leave or make is not counted here.
    _session_folder = tempfile.mkdtemp(prefix="pct-")
    os.environ["TMPDIR"] = _session_folder
    tempfile.tempdir = None
    census.mark_this_process()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # The standard library keeps this process once anything is spawned: it is there before every census.
    multiprocessing.resource_tracker.ensure_running()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_session_folder, ignore_errors=True)
    _real_stderr.close()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = census.Census.take()
    faulthandler.dump_traceback_later(_HARD_DEADLINE, exit=True, file=_real_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    left = census.wait_until_clean(before)
    if left:
        pytest.fail("left behind after the test:\n  " + "\n  ".join(left))
