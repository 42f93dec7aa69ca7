import os
import types
from concurrent import futures
from unittest import mock

import pytest
import stand_in

import polycephaly as poly

util = pytest.importorskip("test.test_concurrent_futures.util")
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


class ForkMixin(util.ProcessPoolForkMixin):
    executor_type = stand_in.ProcessPoolExecutor
class SpawnMixin(util.ProcessPoolSpawnMixin):
    executor_type = stand_in.ProcessPoolExecutor

for mod, mixin in [(test_process_pool, test_process_pool.ProcessPoolExecutorTest),(test_shutdown, test_shutdown.ProcessPoolShutdownTest),
   (test_init, test_init.InitializerMixin),(test_init, test_init.FailingInitializerMixin),(test_deadlock, test_deadlock.ExecutorDeadlockTest),
   (test_wait, test_wait.WaitTests),(test_as_completed, test_as_completed.AsCompletedTests)]:
    for m in (ForkMixin, SpawnMixin):
        name = m.__name__[:-5] + mixin.__name__
        globals()[name] = type(name, (mixin, m, util.BaseTestCase), {"__module__": __name__})

def promise_in(state=util.PENDING, exception=None, result=None):
    p = poly.Promise()
    if state == util.RUNNING: p.set_running_or_notify_cancel()
    elif state in (util.CANCELLED, util.CANCELLED_AND_NOTIFIED): p.cancel()
    elif exception is not None: p.set_exception(exception)
    elif state == util.FINISHED: p.set_result(result)
    return p

class PromiseTests(test_future.FutureTests):
    def setUp(self):
        super().setUp()
        patch = mock.patch.multiple(test_future, Future=poly.Promise, create_future=promise_in, PENDING_FUTURE=promise_in(), RUNNING_FUTURE=promise_in(util.RUNNING), CANCELLED_FUTURE=promise_in(util.CANCELLED), CANCELLED_AND_NOTIFIED_FUTURE=promise_in(util.CANCELLED), EXCEPTION_FUTURE=promise_in(exception=OSError()), SUCCESSFUL_FUTURE=promise_in(util.FINISHED, None, 42))
        patch.start(); self.addCleanup(patch.stop)

def ours(*args):
    here = os.path.dirname(os.path.abspath(__file__))
    script = f"import multiprocessing, sys; sys.path[:0] = [{here!r}, {os.path.dirname(here)!r}]\n" + args[-1].replace("from concurrent.futures import", "from stand_in import")
    return script_helper.assert_python_ok(*args[:-1], script)

@pytest.fixture(autouse=True)
def scripts():
    fake = types.SimpleNamespace(**vars(futures))
    fake.ProcessPoolExecutor = type("ProcessPoolExecutor", (stand_in.ProcessPoolExecutor,), {})
    with mock.patch.object(test_shutdown, "assert_python_ok", ours), mock.patch.object(test_shutdown, "futures", fake):
        yield
