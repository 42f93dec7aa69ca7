"""joblib's own tests, with this library in the place of loky.

They come with joblib and are taken from there: nothing of them is here but the names of those that
do not hold, with the reason (`joblib_in_place.py`). These are run too, and must fail. Of the others
some are run."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("joblib.test")
pytest.importorskip("numpy")


@pytest.mark.timeout(300)
def test_joblibs_own_tests_hold_but_for_those_that_are_listed(tmp_path):
    tests = os.path.dirname(os.path.abspath(__file__))
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "joblib_in_place", "-p", "no:cacheprovider",
         "-c", os.devnull, "-q", "--tb=native", f"--basetemp={tmp_path / 'base'}",
         "--pyargs", "joblib.test.test_parallel", "joblib.test.test_memmapping"],
        cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.path.dirname(tests)])},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout
