"""Where native threads make a fork unsafe: drones are fresh interpreters with `__main__` by value,
and it is said."""

import _thread
import ctypes
import faulthandler
import multiprocessing
import os
import subprocess
import sys
import threading
import types
import warnings

import pytest
import zmq
from scripts import output_of, run_script

import polycephaly as poly
from polycephaly.engines.local import native_threads, thread_origin
from polycephaly.engines.local.fork_survivors import survives_fork
from polycephaly.engines.local.thread_origin import Origin, find_origin
from polycephaly.runtime.tuning import tuning

NATIVE = """
import ctypes, warnings
libc = ctypes.CDLL(None)
def start_a_native_thread():
    thread = ctypes.c_ulong()
    libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
"""
"""For scripts: a thread of the C library's own, which Python knows nothing of."""

FITTED = """
import numpy as np
import polycephaly as poly
from sklearn.ensemble import HistGradientBoostingClassifier
X = np.random.default_rng(0).random((500, 4))
y = (X[:, 0] > 0.5).astype(int)
def fit(rounds):
    return HistGradientBoostingClassifier(max_iter=rounds).fit(X, y).n_iter_
fit(2)
"""
"""For scripts: GNU's OpenMP has been used, by scikit-learn."""

QUIET = ("-W", "ignore::RuntimeWarning")


def script(text: str, before: str = NATIVE) -> str:
    """With `before` in front, so that both are indented alike."""
    return before + "\n".join(line[8:] for line in text.split("\n"))


# -- the decision ----------------------------------------------------------------------------------


@pytest.mark.guarantee("wire-5")
@pytest.mark.slow
def test_after_openmp_was_used_a_pool_does_not_hang_and_says_why():
    done = run_script(script("""
        with poly.Pool(2) as pool:
            print(list(pool.map(fit, [1, 2, 3])))
    """, FITTED), timeout=100)  # fmt: skip
    assert done.stdout == "[1, 2, 3]\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1 and "libgomp" in done.stderr
    assert "start='fork'" in done.stderr and "start='spawn'" in done.stderr


def test_numpy_that_has_computed_is_forked():
    assert (
        output_of("""
        import numpy as np
        import polycephaly as poly
        try:
            import pandas
        except ImportError:
            pass
        a = np.ones((600, 600))
        a @ a
        only_forks_have = (_ for _ in ())
        with poly.Pool(2) as pool:
            a @ a
            pool.refresh()
            print(pool.doit("type(only_forks_have).__name__, float((a @ a)[0, 0])"))
    """)
        == "('generator', 600.0)\n"
    )


@pytest.mark.guarantee("wire-5")
def test_one_warning_for_each_cause_and_none_where_fork_is_insisted_on():
    text = script("""
        import polycephaly as poly
        only_forks_have = (_ for _ in ())
        with poly.Pool(1) as pool:
            start_a_native_thread()
            print(pool.doit("only_forks_have is None"))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                pool.refresh()
                with poly.Pool(1) as other, poly.Drone() as drone:
                    kinds = [
                        type(each.promise("only_forks_have").exception())
                        for each in (pool, other, drone)
                    ]
                kinds.append(type(poly.promise("only_forks_have").exception()))
                with poly.Pool(1, start="fork") as forked:
                    print(forked.doit("only_forks_have is None"))
            print([kind.__name__ for kind in kinds])
            text = str(told[0].message)
            print(
                len(told), told[0].category.__name__, "1 of libc.so.6 (pause))" in text
            )
            print(told[0].filename == __file__)
    """)
    assert output_of(text) == (
        "False\nFalse\n['NameError', 'NameError', 'NameError', 'NameError']\n"
        "1 RuntimeWarning True\nTrue\n"
    )


def test_a_warning_that_is_made_an_error_leaves_nothing_behind():
    text = script("""
        import polycephaly as poly
        start_a_native_thread()
        for _ in range(2):
            try:
                poly.Pool(1)
            except RuntimeWarning as error:
                print(str(error).partition(",")[0])
    """)
    done = run_script(text, python_args=("-W", "error::RuntimeWarning"))
    assert (
        done.stdout == "pool-1 does not fork this process\npool-2 does not fork this process\n"
    ), done.stderr


def test_threads_of_python_are_known_for_such():
    end = threading.Event()
    begun = threading.Semaphore(0)

    def live():
        begun.release()
        end.wait()

    threading.Thread(target=live).start()
    _thread.start_new_thread(live, ())
    faulthandler.dump_traceback_later(1000)
    begun.acquire()
    begun.acquire()
    try:
        native_threads.check_before_fork()
        if (pid := os.fork()) == 0:  # which ends the threads of OpenBLAS, if another test used it
            os._exit(0)
        os.waitpid(pid, 0)
        native_threads.check_after_fork()
        with warnings.catch_warnings(), poly.Pool(1) as pool:
            warnings.simplefilter("error", RuntimeWarning)
            with zmq.Context() as context, context.socket(zmq.PUSH):  # it starts threads
                pool.refresh()
                assert pool.doit(abs, -1) == 1
    finally:
        end.set()


def test_where_no_origin_is_told_as_many_threads_are_allowed_as_python_has_raw_ones(monkeypatch):
    raw_threads, mine = native_threads._raw_threads, set()
    # Those of other tests may be ending.
    monkeypatch.setattr(native_threads, "_raw_threads", lambda: raw_threads() & mine)
    monkeypatch.setattr(native_threads, "find_origin", lambda thread: None)
    monkeypatch.setattr(native_threads, "_suspect_threads", lambda: {1: "a"})
    monkeypatch.setattr(tuning, "thread_settle_seconds", 0.0)
    with pytest.raises(native_threads.UnsafeFork, match="of an unknown library"):
        native_threads.check_after_fork()
    end, begun = threading.Event(), threading.Event()

    def live():
        begun.set()
        end.wait()

    mine.add(_thread.start_new_thread(live, ()))
    begun.wait()
    try:
        native_threads.check_after_fork()
    finally:
        end.set()


ARROW = "arrow::internal::ThreadPool::LaunchWorkersUnlocked"


@pytest.mark.parametrize(
    "library, start, name, before, after",
    [
        # Its handler ends it: if not, it is no such thread.
        ("numpy.libs/libopenblasp-r0.so", "", "other", False, True),
        ("libiomp5.so", "", "other", False, False),
        ("libomp.so.5", "", "python", False, False),
        ("pyzmq.libs/libzmq-2f02442c.so.5.2.5", "", "python", False, False),  # before its own name
        ("_polars_runtime.abi3.so", "", "polars-0", True, True),
        ("libgomp.so.1", "", "python", False, True),
        ("pyarrow/libarrow.so.2600", ARROW, "python", False, False),
        ("pyarrow/libarrow.so.2600", ARROW, "other", False, False),
        ("lib/libarrow.so.2600", "arrow::internal::SelfPipe", "python", False, False),
        ("pyarrow/libarrow.so.2600", "", "AwsEventLoop1", True, True),
        ("pyarrow/libarrow.so.2600", "Azure::CurlConnectionPool", "other", True, True),
        ("pyarrow/libarrow_s3.so.2600", ARROW, "python", False, True),
        ("other/other.so", ARROW, "python", False, True),
        ("numexpr/interpreter.cpython-311-x86_64-linux-gnu.so", "th_worker", "a", False, False),
        ("numexpr/interpreter.cpython-311-x86_64-linux-gnu.so", "", "a", True, True),
        ("other/interpreter.so", "th_worker", "a", True, True),
        ("numba/np/ufunc/workqueue.cpython-311-x86_64-linux-gnu.so", "", "a", False, False),
        ("numba/np/ufunc/omppool.cpython-311-x86_64-linux-gnu.so", "", "a", True, True),
    ],
)
def test_what_makes_a_fork_unsafe(monkeypatch, library, start, name, before, after):
    origin = Origin(os.path.basename(library), start, "/site-packages/" + library)
    for package, version in {"pyarrow": "26.0.1", "numexpr": "2.14.2", "numba": "1.0"}.items():
        monkeypatch.setitem(sys.modules, package, types.SimpleNamespace(__version__=version))
    monkeypatch.setattr(native_threads, "find_origin", lambda thread: origin)
    monkeypatch.setattr(native_threads, "_suspect_threads", lambda: {1: name})
    monkeypatch.setattr(
        native_threads, "_name_of", lambda thread: name if thread == 1 else "python"
    )
    for check, refuses in (
        (native_threads.check_before_fork, before),
        (native_threads.check_after_fork, after),
    ):
        if refuses:
            with pytest.raises(native_threads.UnsafeFork, match="1 of "):
                check()
        else:
            check()
    ends_by_itself = "openblas" in library
    assert native_threads.would_lack_threads() is (after and not ends_by_itself)


@pytest.mark.parametrize("version, survives", [("2.10.2", False), ("2.11.0", True)])
def test_forks_of_a_busy_numexpr_hang_before_2_11(monkeypatch, version, survives):
    monkeypatch.setitem(sys.modules, "numexpr", types.SimpleNamespace(__version__=version))
    origin = Origin("interpreter.so", "th_worker", "/numexpr/interpreter.so")
    assert native_threads.survives_fork(origin) is survives


@pytest.mark.parametrize(
    "version, survives",
    [("26.0.1", True), ("12.0.0", True), ("12.0.0.dev3", True), ("11.0.0", False), ("9.1", False),
     ("unknown", False), (None, False)],
)  # fmt: skip
def test_a_thread_survives_in_a_version_that_was_measured_or_a_later_one(
    monkeypatch, version, survives
):
    origin = Origin("libarrow.so.2600", ARROW, "/lib/libarrow.so.2600")
    monkeypatch.setitem(sys.modules, "pyarrow", types.SimpleNamespace(__version__=version))
    assert survives_fork(origin) is survives
    monkeypatch.delitem(sys.modules, "pyarrow")
    assert not survives_fork(origin)


def test_the_origin_of_a_native_thread_that_waits():
    libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
    fd = os.eventfd(0)
    before = {int(each) for each in os.listdir("/proc/self/task")}
    libc.pthread_create(ctypes.byref(thread), None, libc.eventfd_read, ctypes.c_void_p(fd))
    (its,) = {int(each) for each in os.listdir("/proc/self/task")} - before
    while (origin := find_origin(its)) is None:  # it has only just begun
        pass
    assert origin.library.startswith("libc.so") and origin.start == "eventfd_read"
    assert origin.identity == thread.value
    libc.pthread_cancel(thread)
    libc.pthread_join(thread, None)
    os.close(fd)


def test_the_origin_of_a_thread_of_cpp_that_runs():
    """The kernel does not tell where the stack of such a thread is."""
    pytest.importorskip("scipy.fft")
    text = """
        import threading
        import numpy as np, scipy.fft
        from polycephaly.engines.local import native_threads
        from polycephaly.engines.local.thread_origin import find_origin
        from polycephaly.runtime.procfs import read_text
        end, a = threading.Event(), np.ones((200, 5000))
        def work():
            while not end.is_set():
                scipy.fft.fft(a, workers=4)
        thread = threading.Thread(target=work)
        thread.start()
        found = None
        while found is None or "openblas" in found.library:
            for each in native_threads._suspect_threads():
                origin = find_origin(each)
                if read_text(f"/proc/self/task/{each}/syscall") == "running\\n" and origin:
                    found = origin
        end.set()
        thread.join()
        print(str(found).partition("/")[0], bool(found.start), "std" in found.start)
    """
    assert output_of(text) == "scipy True False\n"


def test_origins_are_those_of_the_threads_of_python_too():
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        origin = find_origin(thread.native_id)
        assert origin.library == thread_origin.PYTHON and origin.identity == thread.ident
    finally:
        end.set()
    thread.join()
    assert find_origin(1 << 22) is None  # no thread of this process


@pytest.mark.parametrize(
    "mangled, name",
    [
        ("_Z9th_workerPv", "th_worker"),
        (
            "*NSt6thread11_State_implINS_8_InvokerISt5tupleIJZN5arrow8internal10ThreadPool"
            "21LaunchWorkersUnlockedEiEUlvE_EEEEEE",
            ARROW,
        ),
        (
            "NSt6thread11_State_implINS_8_InvokerISt5tupleIJPFvSt10shared_ptrIN5arrow8internal8"
            "SelfPipeEEES7_EEEEEE",
            "arrow::internal::SelfPipe",
        ),
        ("_ZN12_GLOBAL__N_14loopEv", "loop"),
        ("NSt6thread11_State_implINS_8_InvokerISt5tupleIJPFvvEEEEEE", ""),
        ("thread_main", "thread_main"),
        ("", ""),
    ],
)
def test_the_name_in_a_cpp_name(mangled, name):
    assert thread_origin.qualified_name(mangled) == name


def test_an_origin_is_told_with_the_package_that_it_was_installed_with():
    path = "/v/lib/python3.11/site-packages/numpy/_core/../../numpy.libs/libfoo-1.so"
    assert str(Origin("libfoo-1.so", path=path)) == "numpy.libs/libfoo-1.so"
    assert str(Origin("libgomp.so.1", "work", "/usr/lib/libgomp.so.1")) == "libgomp.so.1 (work)"


# -- what fresh drones have ------------------------------------------------------------------------


@pytest.mark.guarantee("wire-5")
def test_fresh_drones_have_what_main_holds_by_value():
    text = script("""
        import os.path
        import array
        import polycephaly as poly
        large = array.array("d", bytes(40 << 20))
        large[-1] = 7.0
        small = {"a": [1, 2]}
        class Point:
            def __init__(self, x): self.x = x
            def moved(self): return Point(self.x + offset)
        class Far(Point):
            pass
        offset = 10
        origin = Point(1)
        def look(): return large[-1], small, os.path.basename(__file__), type(origin) is Point
        def change():
            large[0] += 1
            return large[0]
        start_a_native_thread()
        with poly.Pool(2) as pool:
            print(pool.doit(look), pool.doit("offset + 1"))
            moved = pool.doit(Far.moved, Far(5))
            print(type(moved) is Point, moved.x, pool.doit(lambda: origin.moved().x))
            print({p.value for p in pool.everywhere(change)}, large[0])
            pool.drones[0].kill()
            print(len([p.value for p in pool.everywhere(look)]))
            offset = 20
            pool.refresh()
            print(pool.doit("offset"))
    """)
    assert output_of(text, python_args=QUIET) == (
        "(7.0, {'a': [1, 2]}, 'script.py', True) 11\nTrue 15 11\n{1.0} 0.0\n2\n20\n"
    )


@pytest.mark.guarantee("wire-6")
def test_what_cannot_be_pickled_is_named_when_it_is_needed_with_the_cure():
    text = script("""
        import threading
        import polycephaly as poly
        lock = threading.Lock()
        def use(): return lock.locked()
        start_a_native_thread()
        with poly.Pool(1) as pool:
            error = pool.promise(use).exception()
            print(type(error).__name__, error)
            late = 1
            print(pool.promise("late").exception())
    """)
    first, second = output_of(text, python_args=QUIET).splitlines()
    assert first.startswith(
        "NameError name 'lock' is not defined: the drones do not have this name, because they are "
        "not forks"
    )
    assert (
        "cannot pickle '_thread.lock' object" in first
        and "initializer" in first
        and "start='fork'" in first
    )
    assert "pool.refresh() takes a new snapshot" in second


@pytest.mark.guarantee("wire-6")
def test_a_name_that_a_drone_cannot_load_is_said_to_be_that_and_no_refresh_is_advised():
    text = script("""
        import os
        import polycephaly as poly
        class Here:
            def __setstate__(self, state):
                if os.getpid() != state["pid"]:
                    raise ValueError("only here")
        here = Here()
        here.pid = os.getpid()
        def function(value=here): return value
        start_a_native_thread()
        with poly.Pool(1, output="discard") as pool:
            print(pool.promise("here").exception())
            print(pool.promise(function).exception())
    """)
    for name, line in zip(
        ("here", "function"), output_of(text, python_args=QUIET).splitlines(), strict=True
    ):
        assert repr(name) in line and "could not be loaded when the drone started" in line
        assert "refresh" not in line


SHARING = """
import sys, threading
import polycephaly as poly
class Config: pass
class Table:
    def __getstate__(self): return vars(self)
    def __setstate__(self, state):
        vars(self).update(state, opened=helper(config))
def helper(config): return type(config).__name__
config = Config()
config.large = bytearray(100_000)
class Service:
    default = config
service = Service()
service.config, service.large = config, config.large
table = Table()
table.config = config
def is_default(given=config): return given is config
lock = threading.Lock()
"""


def test_two_names_of_one_object_are_two_names_of_one_object_in_fresh_drones():
    text = script("""
        start_a_native_thread()
        with poly.Pool(1) as pool:
            print(pool.doit("service.config is config, service.large is config.large"))
            print(pool.doit("table.config is config, Service.default is config, is_default()"))
            print(pool.doit("table.opened, type(config) is Config"))
            print(type(pool.promise("lock").exception()).__name__)
    """, NATIVE + SHARING)  # fmt: skip
    assert output_of(text, python_args=QUIET) == (
        "(True, True)\n(True, True, True)\n('Config', True)\nNameError\n"
    )


@pytest.mark.guarantee("wire-6")
@pytest.mark.parametrize("how", ["sys.exit(3)", "raise ValueError('no')", "Config.missing()"])
def test_an_object_that_cannot_be_opened_is_left_out_and_no_other(how):
    text = script(f"""
        class Broken:
            def __setstate__(self, state): {how}
        broken = Broken()
        broken.config = config
        holder = [config, broken]
        last = config
        start_a_native_thread()
        with poly.Pool(1, output="discard") as pool:
            print(pool.doit("service.config is config is table.config is last, is_default()"))
            print(pool.doit("service.large is config.large, len(config.large), table.opened"))
            for name in ("broken", "holder"):
                print(type(pool.promise(name).exception()).__name__)
    """, NATIVE + SHARING)  # fmt: skip
    assert output_of(text, python_args=QUIET) == (
        "(True, True)\n(True, 100000, 'Config')\nNameError\nNameError\n"
    )


def test_an_object_of_a_module_that_the_drones_lack_is_left_out_and_no_other():
    text = script("""
        import types
        made = types.ModuleType("made")
        sys.modules["made"] = made
        exec("class Thing: pass", vars(made))
        thing = made.Thing()
        thing.config = config
        del made
        last = config
        start_a_native_thread()
        with poly.Pool(1, output="discard") as pool:
            print(pool.doit("service.config is config is last"))
            print(type(pool.promise("thing").exception()).__name__)
    """, NATIVE + SHARING)  # fmt: skip
    assert output_of(text, python_args=QUIET) == "True\nNameError\n"


def test_names_that_begin_with_two_underscores_are_there_too():
    text = script("""
        import polycephaly as poly
        __version__ = "1.0"
        def __twice(x): return 2 * x
        def work(x): return __twice(x), __version__, __name__
        start_a_native_thread()
        with poly.Pool(1) as pool:
            print(pool.doit(work, 3))
    """)
    assert output_of(text, python_args=QUIET) == "(6, '1.0', '__main__')\n"


def test_a_name_that_was_left_out_counts_as_changed_only_when_it_is():
    """Or joblib's backend would start all drones anew for each call of `Parallel`."""
    text = script("""
        import threading
        import polycephaly as poly
        lock = threading.Lock()
        def look():
            global lock
            with poly.Pool(1) as pool:
                taken = pool._dispatcher.registry.snapshot
                print(taken.has("lock"), taken.is_current())
                lock = threading.Lock()
                print(taken.is_current())
        start_a_native_thread()
        look()
    """)
    assert output_of(text, python_args=QUIET) == "False True\nFalse\n"


def test_a_fork_is_given_up_where_the_kernel_reaps_children():
    text = """
        import signal
        import polycephaly as poly
        from polycephaly.engines.local import launcher, native_threads as native
        def refuse(): raise native.UnsafeThreads([(None, "x")])
        launcher.check_after_fork = refuse
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        with poly.Pool(1) as pool:
            print(pool.doit(abs, -1))
    """
    assert output_of(text, python_args=QUIET) == "1\n"


SUB_INTERPRETER = """
import sys
if sys.version_info >= (3, 13):
    import _interpreters as interpreters
else:
    import _xxsubinterpreters as interpreters
import polycephaly as poly
living = interpreters.create()
"""
"""For scripts: a sub-interpreter, idle, as those of an `InterpreterPoolExecutor` are."""


@pytest.mark.guarantee("wire-5")
def test_while_a_sub_interpreter_lives_drones_are_fresh_interpreters_and_it_is_said():
    text = script("""
        only_forks_have = (_ for _ in ())
        with poly.Pool(1) as pool:
            print(pool.promise("only_forks_have").exception())
            interpreters.destroy(living)
            pool.refresh()
            print(pool.doit("type(only_forks_have).__name__"))
            living = interpreters.create()
            pool.refresh()
            print(pool.doit(abs, -1))
        interpreters.destroy(living)  # CPython 3.14 and later warn of one that is left
    """, SUB_INTERPRETER)  # fmt: skip
    done = run_script(text)
    first, second, third = done.stdout.splitlines()
    assert "not forks" in first and "sub-interpreters live (1 here)" in first
    assert "start='fork'" not in first
    assert (second, third) == ("generator", "1")
    assert done.stderr.count("RuntimeWarning") == 1
    assert "InterpreterPoolExecutor" in done.stderr and "libraries" not in done.stderr


@pytest.mark.guarantee("wire-5")
def test_a_fork_that_is_insisted_on_beside_a_sub_interpreter_is_refused():
    text = script("""
        for make in (poly.Pool, lambda n, **options: poly.Drone(**options)):
            try:
                make(1, start="fork")
            except RuntimeError as error:
                print(error)
        interpreters.destroy(living)
        with poly.Pool(1, start="fork") as pool:
            living = interpreters.create()
            try:
                pool.refresh()
            except RuntimeError as error:
                print(error)
            print(pool.doit(abs, -1))
        interpreters.destroy(living)
    """, SUB_INTERPRETER)  # fmt: skip
    *errors, last = output_of(text).splitlines()
    assert len(errors) == 3 and last == "1"
    assert all("cannot fork" in each and "shut down the Interp" in each for each in errors)


def test_an_error_is_answered_though_a_sub_interpreter_forbids_to_keep_its_frames():
    text = script("""
        def fails():
            interpreters.create()
            1 / 0
        interpreters.destroy(living)
        with poly.Pool(1, post_mortem=True) as pool:
            print(type(pool.promise(fails).exception()).__name__, pool.doit(abs, -1))
    """, SUB_INTERPRETER)  # fmt: skip
    assert output_of(text) == "ZeroDivisionError 1\n"


def test_drones_of_fresh_drones_decide_for_themselves():
    text = script("""
        import polycephaly as poly
        class Point:
            def __init__(self, x): self.x = x
        def inner(x): return Point(x)
        def outer(x):
            only_forks_have.append(x)
            with poly.Pool(1) as pool:
                point = pool.doit(inner, x)
                return type(point) is Point, point, pool.doit("only_forks_have")
        only_forks_have = []
        start_a_native_thread()
        with poly.Pool(1) as pool:
            same, point, seen = pool.doit(outer, 3)
            print(same, type(point) is Point, point.x, seen)
    """)
    assert output_of(text, python_args=QUIET) == "True True 3 [3]\n"


@pytest.mark.parametrize("start", ["fork", "spawn", None])
def test_queues_and_locks_in_initargs_reach_every_drone(start):
    text = script(f"""
        import multiprocessing, os, sys
        import polycephaly as poly
        context = multiprocessing.get_context("spawn")
        def begin(queue, lock):
            with lock:
                queue.put(os.getpid())
        if __name__ == "__main__":
            queue, lock = context.Queue(), context.Lock()
            start_a_native_thread()
            with poly.Pool(2, start={start!r}, initializer=begin, initargs=(queue, lock)) as pool:
                pids = {{p.value for p in pool.everywhere(os.getpid)}}
                print({{queue.get(), queue.get()}} == pids, len(pids))
    """)
    assert output_of(text, python_args=QUIET) == "True 2\n"


def test_a_lock_that_only_forks_can_have_is_refused_with_the_cure():
    lock = multiprocessing.get_context("fork").Lock()
    with pytest.raises(RuntimeError) as refused:
        poly.Pool(1, start="spawn", initializer=str, initargs=(lock,))
    assert "get_context('spawn')" in "".join(refused.value.__notes__)


# -- one fresh interpreter a drone -----------------------------------------------------------------


@pytest.mark.guarantee("wire-7")
@pytest.mark.slow
def test_spawned_drones_import_the_main_module_each_for_itself():
    """So a main module may use such a library when it is imported, and `env` is there before."""
    done = run_script(script("""
        import os
        importer, seen = os.getpid(), os.environ.get("SEEN_AT_IMPORT")
        def who(): return importer == os.getpid(), seen
        if __name__ == "__main__":
            with poly.Pool(2, start="spawn", env={"SEEN_AT_IMPORT": "yes"}) as pool:
                print([p.value for p in pool.everywhere(who)], list(pool.map(fit, [1, 2])))
    """, FITTED), timeout=100)  # fmt: skip
    assert done.stdout == "[(True, 'yes'), (True, 'yes')] [1, 2]\n", done.stderr
    assert "RuntimeWarning" not in done.stderr


def test_a_main_module_that_can_no_longer_be_imported_breaks_the_pool(tmp_path):
    done = run_script("""
        import os, sys
        import polycephaly as poly
        if os.path.exists(sys.argv[1]):
            raise ValueError("not any more")
        if __name__ == "__main__":
            with poly.Pool(1, start="spawn", output="discard") as pool:
                print(pool.doit(abs, -1))
                open(sys.argv[1], "w").close()
                pool.drones[0].kill()
                error = pool.promise(abs, -2).exception()
                print(type(error).__name__, "not any more" in str(error))
    """, str(tmp_path / "flag"))  # fmt: skip
    assert done.stdout == "1\nBrokenProcessPool True\n", done.stderr


def run_code(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_name_that_spawned_drones_cannot_have_is_told_with_a_cure_that_helps():
    told = run_code(
        "import polycephaly as poly\nx = 1\n"
        "with poly.Pool(1, start='spawn') as pool:\n    print(pool.promise('x').exception())"
    )
    assert (
        "python -c" in told
        and "push it" in told
        and "start='fork'" in told
        and "refresh" not in told
    )
    told = output_of("""
        import polycephaly as poly
        if __name__ == "__main__":
            x = 1
            with poly.Pool(1, start="spawn") as pool:
                print(pool.promise("x").exception())
    """)
    assert "if __name__ == '__main__':" in told and "push it" in told and "refresh" not in told


def test_a_package_that_is_run_is_no_module_to_be_imported(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(
        "import polycephaly as poly\nx = 1\n"
        "with poly.Pool(1, start='spawn') as pool:\n    print(pool.promise('x').exception())"
    )
    done = subprocess.run(
        [sys.executable, "-m", "package"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "python -m" in done.stdout and "push it" in done.stdout, done.stderr


class Thread:
    """One of which nothing is told, as it runs; after so many `looks` it has ended."""

    def __init__(self, monkeypatch, state, uses, looks=10**9):
        self.looks, self.left = 0, looks
        for name, stand_in in {
            "_suspect_threads": self.others, "find_origin": lambda thread: None,
            "_raw_threads": set, "state_of": lambda pid, thread: state,
            "processor_times": lambda pid, thread: (uses * self.looks, 0.0),
            "sleep": lambda seconds: None,
        }.items():  # fmt: skip
            monkeypatch.setattr(native_threads, name, stand_in)

    def others(self):
        self.looks += 1
        return {7: "python"} if self.looks <= self.left else {}


def test_a_thread_that_is_about_to_end_is_waited_for_however_busy_the_machine_is(monkeypatch):
    thread = Thread(monkeypatch, "R", uses=0.0, looks=100_000)
    native_threads.check_after_fork()
    assert thread.looks == 100_001


@pytest.mark.parametrize(
    ("state", "uses", "looks"), [("R", 0.01, 26), ("S", 0.0, native_threads.MAX_ASLEEP_CHECKS)]
)
def test_a_thread_that_neither_ends_nor_tells_its_library_makes_a_fork_unsafe(
    monkeypatch, state, uses, looks
):
    thread = Thread(monkeypatch, state, uses)
    with pytest.raises(native_threads.UnsafeFork, match=r"1 of an unknown library\)"):
        native_threads.check_after_fork()
    assert abs(thread.looks - looks) <= 1  # of sums of floats
