"""A plugin for pytest: joblib's own tests, with this library in the place of loky. See
`test_joblib_suite.py`."""

import sys

import joblib.parallel
import joblib.testing
import pytest

import polycephaly as poly

joblib.parallel.BACKENDS["loky"] = joblib._parallel_backends.LokyBackend = (
    poly.joblib.PolycephalyBackend
)

IN_THEIR_PLACE = """import joblib.parallel, polycephaly as poly
joblib.parallel.BACKENDS["loky"] = poly.joblib.PolycephalyBackend
"""

NO_FILES = (
    "a large array arrives in shared memory that a call may write into, "
    "not as a memory map of a file"
)
IT_RUNS = (
    "where loky would run the calls one after the other, and warn of that, they run in parallel"
)
ITS_OWN_POOL = (
    "each `Parallel` outside of a `parallel_config` has a pool of its own, which ends with the call"
)

DIFFERENT = {
    "test_auto_memmap_on_arrays_from_generator[loky]": NO_FILES,
    "test_error_capture[loky]": (
        "a call that fails leaves the pool as it is: nothing has to be started again"
    ),
    "test_initializer_reused[2]": ITS_OWN_POOL,
    "test_initializer_reused[4]": ITS_OWN_POOL,
    "test_managed_backend_reuse_temp_folder[loky]": NO_FILES,
    "test_memmap_returned_as_regular_array[loky]": NO_FILES,
    "test_memmapping_leaks[loky]": NO_FILES,
    "test_memmapping_temp_folder_thread_safety": NO_FILES,
    **{
        f"test_multiple_generator_call_separated_gc[{first}-{second}-loky-True]": ITS_OWN_POOL
        for first in ("generator", "generator_unordered")
        for second in ("generator", "generator_unordered")
    },
    "test_nested_parallel_warnings[loky-multiprocessing-True]": IT_RUNS,
    # From 3.14 on, these workers are fresh interpreters, in which loky is in its own place.
    **(
        {"test_nested_parallel_warnings[multiprocessing-loky-True]": IT_RUNS}
        if sys.version_info < (3, 14)
        else {}
    ),
    "test_nested_parallel_warnings[threading-loky-True]": IT_RUNS,
    "test_nested_parallelism_limit[parallel_backend-loky]": (
        "asks for a class of the name LokyBackend"
    ),
    "test_nested_parallelism_limit[parallel_config-loky]": (
        "asks for a class of the name LokyBackend"
    ),
    "test_parallel_isolated_temp_folders[loky]": NO_FILES,
    "test_parallel_with_interactively_defined_bound_method_loky": (
        "asks for processes of the name LokyProcess"
    ),
    "test_parallel_pickling": (
        "the error is the one that the object raised, not a PicklingError made of it"
    ),
}

HOLD = (
    "test_invalid_njobs",
    "test_nested_loop_with_exception_with_loky",
    "test_nested_parallel_warnings",
    "test_parallel_with_interactively_defined_functions",
    "test_parallel_with_interactively_defined_functions_loky",
    "test_parallel_with_unpicklable_functions_in_args",
)
"""What is run beside those that differ. All of both files would take minutes."""


def pytest_configure(config: pytest.Config) -> None:
    for name in ("thread_unsafe", "no_cover"):
        config.addinivalue_line("markers", f"{name}: joblib's")


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    items[:] = [
        item
        for item in items
        if item.name in DIFFERENT or (item.originalname in HOLD and "loky" in item.nodeid)
    ]
    assert {item.name for item in items} >= DIFFERENT.keys()
    for item in items:
        if item.name in DIFFERENT:
            item.add_marker(pytest.mark.xfail(strict=True, reason=DIFFERENT[item.name]))


@pytest.fixture(autouse=True)
def ours_in_scripts_too(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In those that a test writes and runs."""
    run = joblib.testing.check_subprocess_call

    def run_script(command: list[str], timeout: float | None = None, **expected: str) -> None:
        """Without the time limit, which on a busy machine is shorter than the imports."""
        *options, script = command
        if options[-1] == "-c":
            script = IN_THEIR_PLACE + script
        else:
            with open(script, encoding="utf-8") as file:
                text = file.read()
            with open(script, "w", encoding="utf-8") as file:
                file.write(IN_THEIR_PLACE + text)
        run([*options, script], timeout=None, **expected)

    monkeypatch.setattr(request.module, "check_subprocess_call", run_script, raising=False)
