"""CPython's own tests of its executors and futures, run against `Pool` and `Promise`.

They come with the interpreter (3.13 and later; others may not have them) and are taken from there:
nothing of them is here but the names of those that do not hold, with the reason. These are run too,
and must fail. What takes long by CPython's own word (its resource "walltime") is not run."""

import contextlib
import os
import sys
import types
import unittest
from concurrent import futures
from functools import wraps
from unittest import mock

import pytest
import stand_in

import polycephaly as poly

support = pytest.importorskip(
    "test.support", reason="this interpreter came without CPython's tests"
)
with mock.patch.object(support, "use_resources", []):
    util = pytest.importorskip(
        "test.test_concurrent_futures.util", reason="it came without those of executors"
    )
    from test.support import script_helper
    from test.test_concurrent_futures import (
        test_as_completed,
        test_deadlock,
        test_future,
        test_init,
        test_process_pool,
        test_shutdown,
        test_wait,
    )

LIMIT_WITH_FORK = (
    "a forked drone may have a limit of tasks as well, so nothing is refused, "
    "and no context chosen for it"
)
THAT_ONE = (
    "what cannot be unpickled rejects that one promise, with the real error; the pool is not broken"
)
PRIVATE_QUEUE = (
    "asks for the queue between the executor's thread and its processes, which a pool has not"
)
ITS_NAME = "a promise's repr, here in an error's text, says `Promise`"

DIFFERENT = {
    "ForkProcessPoolExecutor.test_max_tasks_per_child": LIMIT_WITH_FORK,
    "ForkProcessPoolExecutor.test_max_tasks_per_child_defaults_to_spawn_context": LIMIT_WITH_FORK,
    "ForkProcessPoolExecutor.test_max_workers_negative": (
        "the error's text: drones must be at least 1, not 0"
    ),
    "ForkProcessPoolExecutor.test_python_finalization_error": (
        "breaks without a second thread: we have one"
    ),
    "SpawnProcessPoolShutdown.test_processes_terminate": (
        "all are started with the pool, not one by one"
    ),
    "ForkProcessPoolShutdown.test_del_shutdown": PRIVATE_QUEUE,
    "SpawnProcessPoolShutdown.test_del_shutdown": PRIVATE_QUEUE,
    "ForkProcessPoolShutdown.test_shutdown_no_wait": PRIVATE_QUEUE,
    "SpawnProcessPoolShutdown.test_shutdown_no_wait": PRIVATE_QUEUE,
    "ForkExecutorDeadlock.test_error_at_task_unpickle": THAT_ONE,
    "ForkExecutorDeadlock.test_exit_at_task_unpickle": THAT_ONE,
    "ForkExecutorDeadlock.test_error_during_result_unpickle_in_result_handler": THAT_ONE,
    "ForkExecutorDeadlock.test_exit_during_result_unpickle_in_result_handler": THAT_ONE,
    "PromiseFuture.test_cancel": (
        "a cancelled promise is at once in the state that the library's waiters count as done"
    ),
    "PromiseFuture.test_multiple_set_exception": ITS_NAME,
    "PromiseFuture.test_multiple_set_result": ITS_NAME,
    "PromiseFuture.test_repr": ITS_NAME,
}

LEFT_OUT = {
    "AsCompleted.test_future_times_out": (
        "a task of 1 s must not be done after 0.1 s, which on a machine that stood still it may be"
    ),
    "ExecutorDeadlock.test_gh105829_should_not_deadlock_if_wakeup_pipe_full": (
        "mocks parts of the library's executor"
    ),
    "ProcessPoolShutdown.test_cancel_futures": (
        "one task must have begun at once: a pool may not be up by then"
    ),
    "Wait.test_timeout": (
        "a task of 0.5 s must not be done after a wait of 0.05 s, which on a busy machine it may be"
    ),
}

ITS_OWN_PART = "replaces a private method of the library's executor, which a pool has not"
ITS_TEXT = "the error's text; several checks in one test, which cannot fail one by one"
SHARED_THREAD = "waits for the thread of its executor, which all pools of a process share"
if sys.version_info >= (3, 14):
    DIFFERENT |= {
        "ForkProcessPoolExecutor.test_force_shutdown_workers_invalid_op": ITS_OWN_PART,
        "ForkProcessPoolExecutor.test_kill_workers": ITS_OWN_PART,
        "ForkProcessPoolExecutor.test_terminate_workers": ITS_OWN_PART,
    }
    LEFT_OUT |= {
        "ProcessPoolExecutor.test_force_shutdown_workers": (
            "mocks the objects of processes, which a pool does not ask to end"
        ),
        "ProcessPoolExecutor.test_map_buffersize_type_validation": ITS_TEXT,
        "ProcessPoolExecutor.test_map_buffersize_value_validation": ITS_TEXT,
        "ProcessPoolShutdown.test_shutdown_gh_132969_case_1": SHARED_THREAD,
        "ProcessPoolShutdown.test_shutdown_gh_132969_case_2": SHARED_THREAD,
    }

if sys.version_info >= (3, 15):
    DIFFERENT["ForkProcessPoolExecutor.test_traceback_when_child_process_terminates_abruptly"] = (
        "the error itself says how the process ended, not its cause"
    )


class Fork(util.ProcessPoolForkMixin):
    executor_type = stand_in.ProcessPoolExecutor


class Spawn(util.ProcessPoolSpawnMixin):
    executor_type = stand_in.ProcessPoolExecutor


class FailingInitializer(test_init.FailingInitializerMixin):
    @contextlib.contextmanager
    def _assert_logged(self, message):
        """Ours is not logged in the process that fails: it is the cause of `BrokenProcessPool`."""
        yield

    def tearDown(self):
        super().tearDown()
        self.log_queue.close()
        self.log_queue = self.executor_kwargs = None


def promise_in(state=util.PENDING, exception=None, result=None):
    promise = poly.Promise()
    if state == util.RUNNING:
        promise.set_running_or_notify_cancel()
    elif state in (util.CANCELLED, util.CANCELLED_AND_NOTIFIED):
        promise.cancel()
    elif exception is not None:
        promise.set_exception(exception)
    elif state == util.FINISHED:
        promise.set_result(result)
    return promise


class OfPromises(test_future.FutureTests):
    __test__ = False  # but as `PromiseFuture`

    def setUp(self):
        super().setUp()
        ours = {
            "PENDING_FUTURE": promise_in(),
            "RUNNING_FUTURE": promise_in(util.RUNNING),
            "CANCELLED_FUTURE": promise_in(util.CANCELLED),
            "CANCELLED_AND_NOTIFIED_FUTURE": promise_in(util.CANCELLED_AND_NOTIFIED),
            "EXCEPTION_FUTURE": promise_in(util.FINISHED, exception=OSError()),
            "SUCCESSFUL_FUTURE": promise_in(util.FINISHED, result=42),
        }
        self.enterContext(
            mock.patch.multiple(test_future, Future=poly.Promise, create_future=promise_in, **ours)
        )
        # Where pytest listens to the log, the handler of last resort, which writes to stderr, is
        # not asked.
        self.enterContext(mock.patch("logging.root.handlers", []))


def that_differs(test, why):
    @pytest.mark.xfail(strict=True, reason=why)
    @wraps(test)
    def differs(self):
        test(self)

    return differs


def case(name, tests, *bases):
    """A test case of `tests`, with those that differ marked, and without those that are left
    out."""
    names = unittest.TestLoader().getTestCaseNames(tests)
    namespace = {"__module__": __name__, "__test__": True}
    for test in names:
        if f"{tests.__name__.removesuffix('s').removesuffix('Test')}.{test}" in LEFT_OUT:
            namespace[test] = None
        elif f"{name}.{test}" in DIFFERENT:
            namespace[test] = that_differs(getattr(tests, test), DIFFERENT[f"{name}.{test}"])
    return type(name, (tests, *bases), namespace)


BOTH_WAYS = {
    "ProcessPoolShutdown": test_shutdown.ProcessPoolShutdownTest,
    "Initializer": test_init.InitializerMixin,
    "FailingInitializer": FailingInitializer,
}
FORKED = {
    "ProcessPoolExecutor": test_process_pool.ProcessPoolExecutorTest,
    "ExecutorDeadlock": test_deadlock.ExecutorDeadlockTest,
    "Wait": test_wait.WaitTests,
    "AsCompleted": test_as_completed.AsCompletedTests,
}

for which, tests in BOTH_WAYS.items():
    globals()[f"Fork{which}"] = case(f"Fork{which}", tests, Fork, util.BaseTestCase)
    globals()[f"Spawn{which}"] = case(f"Spawn{which}", tests, Spawn, util.BaseTestCase)
for which, tests in FORKED.items():
    globals()[f"Fork{which}"] = pytest.mark.guarantee("pool-3")(
        case(f"Fork{which}", tests, Fork, util.BaseTestCase)
    )
PromiseFuture = pytest.mark.guarantee("pool-3")(case("PromiseFuture", OfPromises))


@pytest.fixture(autouse=True)
def ours_in_their_place(monkeypatch):
    """Also where these tests name the library's executor: in this process, and in scripts that they
    run."""
    here = os.path.dirname(os.path.abspath(__file__))
    where = f"import multiprocessing, sys; sys.path[:0] = [{here!r}, {os.path.dirname(here)!r}]\n"

    def run_script(*args):
        *options, script = args
        script = script.replace("from concurrent.futures import", "from stand_in import")
        return script_helper.assert_python_ok(*options, where + script)

    library = types.SimpleNamespace(**vars(futures))
    # Not the same as `executor_type`: where they are the same, a test knows that the library's own
    # would hang.
    library.ProcessPoolExecutor = type("ProcessPoolExecutor", (stand_in.ProcessPoolExecutor,), {})
    monkeypatch.setattr(test_shutdown, "assert_python_ok", run_script)
    monkeypatch.setattr(test_shutdown, "futures", library)
    # It waits for threads that end with a test's own objects. Our census looks at threads when
    # these are gone.
    monkeypatch.setattr(util.threading_helper, "threading_cleanup", lambda *_: None)


def test_the_lists_name_tests_that_there_are():
    for name in DIFFERENT:
        of, test = name.split(".")
        assert callable(getattr(globals()[of], test)), name
    for name in LEFT_OUT:
        of, test = name.split(".")
        assert callable(getattr({**BOTH_WAYS, **FORKED}[of], test)), name
