"""The private parts of others that this package uses exist, and behave as it expects."""

import _thread
import io
import os
import pickle
import sys
import threading
from multiprocessing import spawn
from types import FunctionType

import cloudpickle
import pytest
from scripts import run_script

from polycephaly import _compat
from polycephaly.runtime.fork_guard import GuardedLock
from polycephaly.wire import by_value
from polycephaly.wire.main_names import MainSnapshot


def test_exit_handlers_are_run_and_dropped():
    done = run_script("""
        import atexit, os, sys
        from multiprocessing import process, util
        from polycephaly import _compat
        atexit.register(print, "handler")
        _compat.run_exit_handlers()
        print("ran")
        atexit.register(print, "dropped")
        process._children.add("of the parent")
        _compat.clear_exit_handlers()
        atexit.register(print, "kept")
        print(process._children, atexit._ncallbacks())
    """)
    assert done.stdout.splitlines() == ["handler", "ran", "set() 2", "kept"]


def test_a_python_without_sub_interpreters_has_none(monkeypatch):
    assert _compat.count_sub_interpreters() == 0
    for name in ("_interpreters", "_xxsubinterpreters"):
        monkeypatch.setitem(sys.modules, name, None)  # so that its import fails
    assert _compat.count_sub_interpreters() == 0


def test_the_state_of_multiprocessing_is_that_of_a_new_process():
    done = run_script("""
        import multiprocessing
        from multiprocessing import util
        from polycephaly import _compat
        class Held:
            pass
        held = Held()
        util.Finalize(held, print, args=("of the parent",), exitpriority=1)
        util.register_after_fork(held, lambda held: print("forked"))
        _compat.reset_multiprocessing("drone")
        print(multiprocessing.current_process().name)
    """)
    assert done.stdout.splitlines() == ["forked", "drone"]


def test_logging_forgets_its_handlers():
    done = run_script("""
        import logging
        from polycephaly import _compat
        class Told(logging.Handler):
            def flush(self):
                print("flushed")
        logging.getLogger().addHandler(Told())
        references = _compat.detach_log_handlers()
        logging.shutdown()
        print(len(references[0]) >= 1)
    """)
    assert done.stdout.splitlines() == ["True"]


def test_numpy_is_seeded_anew():
    np = pytest.importorskip("numpy")
    before = np.random.get_state()
    try:
        np.random.seed(1)
        expected = np.random.random()
        np.random.seed(1)
        _compat.seed_numpy()
        assert np.random.random() != expected
    finally:
        np.random.set_state(before)


def test_a_process_that_imports_its_main_module_is_told_to_start_no_others():
    with _compat.importing_main(), pytest.raises(RuntimeError, match="bootstrapping"):
        spawn.get_preparation_data("another")
    spawn.get_preparation_data("another")


def test_a_lock_knows_who_holds_it():
    lock, elsewhere = GuardedLock(), []
    is_held_here = lock.is_held_here
    with lock:
        assert is_held_here()
        thread = threading.Thread(target=lambda: elsewhere.append(is_held_here()))
        thread.start()
        thread.join()
    assert not is_held_here() and elsewhere == [False]


def test_a_lock_that_knows_who_holds_it_is_taken_by_code_of_c():
    names = "__enter__", "__exit__", "acquire", "release", "is_held_here"
    assert not any(isinstance(getattr(GuardedLock, name), FunctionType) for name in names)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_lock_that_is_renewed_is_free_in_a_forked_child():
    lock = threading.Lock()
    _compat.renew_in_child(lock)
    with lock:
        child = os.fork()
        if child == 0:
            os._exit(not lock.acquire(blocking=False))
        assert lock.locked()
    assert os.waitpid(child, 0)[1] == 0


def test_the_frames_of_all_threads_are_known():
    assert _compat.current_frames()[threading.get_ident()] is sys._getframe()


def test_a_thread_that_threading_has_not_started_leaves_no_entry():
    ended, idents = threading.Event(), []

    def run():
        idents.append(threading.current_thread().ident)
        _compat.forget_dummy_thread()
        ended.set()

    _thread.start_new_thread(run, ())
    assert ended.wait(30)
    assert idents[0] not in threading._active or not isinstance(
        threading._active[idents[0]], threading._DummyThread
    )


def test_a_remote_traceback_shows_its_text():
    error = ValueError("wrong")
    error.__cause__ = _compat.remote_traceback_type()("the remote lines")
    assert str(error.__cause__) == "the remote lines"


def test_a_code_object_keeps_the_name_of_its_file():
    def inner():
        return lambda x: 1 // x

    for code in (inner.__code__, inner().__code__):
        make, args = _compat.reduce_code(code)
        assert make(*args) == code and make(*args).co_filename == __file__


def test_a_definition_that_is_copied_to_a_drone_keeps_the_name_of_its_file():
    file = io.BytesIO()
    by_value.DefinitionPickler(file, MainSnapshot(()), lambda buffer: True).dump(lambda: 1 // 0)
    assert pickle.loads(file.getvalue()).__code__.co_filename == __file__


def test_cloudpickle_fills_a_class_with_that_function():
    def make():
        class Local:
            pass

        return Local

    assert _compat.class_setstate().__name__.encode() in cloudpickle.dumps(make())


def test_cloudpickle_knows_a_class_by_a_number_in_all_processes():
    class Local:
        pass

    class Another:
        pass

    number = _compat.class_number(Local)
    assert number.encode() in cloudpickle.dumps(Local)
    assert _compat.class_of_number(number) is Local
    assert _compat.number_class(number, Another) is Local
    assert _compat.number_class("a number of the test", Another) is Another
    assert _compat.class_of_number("unknown") is None


def test_cloudpickle_fills_a_function_with_that_function():
    assert _compat.function_setstate().__name__.encode() in cloudpickle.dumps(lambda: 1)


@pytest.mark.ray
def test_ray_has_the_switch_and_the_session():
    ray = pytest.importorskip("ray")
    from ray._private import auto_init_hook

    assert isinstance(auto_init_hook.enable_auto_connect, bool)
    assert hasattr(ray._private.worker, "_global_node")


def test_a_kernel_tells_whether_its_user_can_be_asked():
    kernelbase = pytest.importorskip("ipykernel.kernelbase")
    assert kernelbase.Kernel._allow_stdin.default_value is False
    kernel = kernelbase.Kernel.__new__(kernelbase.Kernel)
    assert not _compat.allows_input(kernel.raw_input) and not _compat.allows_input(input)
    kernel._allow_stdin = True
    assert _compat.allows_input(kernel.raw_input)
