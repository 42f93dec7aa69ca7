"""joblib, and scikit-learn by it, run on pools."""

import multiprocessing
import os
import sys
import threading
import time
import warnings

import pytest
from faults import append, hold_until, lines, wait_for
from scripts import Script, output_of, run_script
from work import double, invert

import polycephaly as poly

joblib = pytest.importorskip("joblib")
numpy = pytest.importorskip("numpy")
from joblib import Parallel, delayed, parallel_config  # noqa: E402

poly.joblib.register()


def pid(_=None):
    return os.getpid()


def backend():
    return joblib.parallel.get_active_backend()[0]


def numbers(n=3):
    return (delayed(double)(i) for i in range(n))


# -- calls of Parallel -----------------------------------------------------------------------------


@pytest.mark.guarantee("pool-5")
def test_results_are_those_of_sequential_calls_in_their_order():
    with parallel_config("polycephaly", n_jobs=2):
        assert Parallel()(numbers(1000)) == [2 * i for i in range(1000)]
        assert Parallel(batch_size=7)(numbers(50)) == [2 * i for i in range(50)]
        assert Parallel()([]) == []
        pids = set(Parallel(batch_size=1)(delayed(pid)(i) for i in range(50)))
    assert os.getpid() not in pids and 1 <= len(pids) <= 2


def test_results_may_be_had_as_they_come():
    with parallel_config("polycephaly", n_jobs=2):
        assert list(Parallel(return_as="generator")(numbers(20))) == [2 * i for i in range(20)]
        assert sorted(Parallel(return_as="generator_unordered")(numbers(20))) == [
            2 * i for i in range(20)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # joblib's, of tasks that nobody asked for
            some = Parallel(return_as="generator")(numbers(100))
            assert next(some) == 0
            del some
        assert Parallel()(numbers()) == [0, 2, 4]


def test_n_jobs_counts_usable_cores():
    one = poly.joblib.PolycephalyBackend()
    cores = joblib.cpu_count()
    assert [one.effective_n_jobs(n) for n in (3, -1, -2, -1000, None)] == [
        3,
        cores,
        max(1, cores - 1),
        1,
        1,
    ]
    with pytest.raises(ValueError, match="n_jobs == 0 in Parallel has no meaning"):
        Parallel(n_jobs=0, backend="polycephaly")(numbers())
    with parallel_config("polycephaly", n_jobs=1):
        assert Parallel()(delayed(pid)() for _ in range(2)) == [os.getpid()] * 2
    assert Parallel(n_jobs=-1, backend="polycephaly")(numbers()) == [0, 2, 4]


# -- its pool --------------------------------------------------------------------------------------


def test_one_pool_serves_the_calls_under_one_configuration_and_ends_with_it():
    with parallel_config("polycephaly", n_jobs=2):
        Parallel()(numbers())
        drones = {drone.pid for drone in backend()._pool.drones}
        for _ in range(3):
            assert set(Parallel()(delayed(pid)() for _ in range(4))) <= drones
    # The census after the test finds them gone.


def test_calls_that_see_nothing_of_main_that_could_change_share_the_drones():
    assert (
        output_of("""
        import os
        import joblib
        from joblib import Parallel, delayed
        import polycephaly as poly
        poly.joblib.register()
        def pid(_): return os.getpid()
        def main():
            with joblib.parallel_config("polycephaly", n_jobs=2):
                seen = set()
                for _ in range(5):
                    seen.update(Parallel()(delayed(pid)(i) for i in range(4)))
            print(len(seen) <= 2)
        main()
    """)
        == "True\n"
    )


@pytest.mark.guarantee("pool-5")
def test_outside_of_one_the_pool_ends_with_the_call():
    parallel = Parallel(n_jobs=2, backend="polycephaly")
    assert parallel(numbers()) == [0, 2, 4]
    assert parallel._backend._pool is None
    with parallel:
        first, second = (set(parallel(delayed(pid)() for _ in range(50))) for _ in range(2))
        assert len(first | second) <= 2


def test_another_n_jobs_is_another_pool():
    with parallel_config("polycephaly"):
        for n in (2, 3, 2):
            Parallel(n_jobs=n)(numbers())
            assert len(backend()._pool.drones) == n


def test_options_of_a_pool_pass_through():
    with parallel_config(
        "polycephaly", n_jobs=2, name="of joblib", env={"WHO": "me"}, initializer=set_a_variable
    ):
        assert Parallel()(delayed(os.getenv)(name) for name in ("WHO", "SET_BY_INITIALIZER")) == [
            "me",
            "yes",
        ]
        assert "of joblib" in repr(backend()._pool)
    with parallel_config("polycephaly", n_jobs=2, start="spawn"):
        assert Parallel()(numbers()) == [0, 2, 4]
    with (
        parallel_config("polycephaly", n_jobs=2, colour="red"),
        pytest.raises(TypeError, match="colour"),
    ):
        Parallel()(numbers())


def set_a_variable():
    os.environ["SET_BY_INITIALIZER"] = "yes"


def test_what_main_defines_binds_or_changes_between_two_calls_is_seen_by_the_second():
    assert (
        output_of("""
        import joblib
        from joblib import Parallel, delayed
        import polycephaly as poly
        poly.joblib.register()
        factor = 2
        def times(x): return factor * x
        joblib.parallel_config("polycephaly", n_jobs=2)
        print(Parallel()(delayed(times)(i) for i in range(3)))
        factor = 3
        print(Parallel()(delayed(times)(i) for i in range(3)))
        def plus(x): return times(x) + 1
        print(Parallel()(delayed(plus)(i) for i in range(3)))
        table = [5]
        def look(i): return table[i]
        print(Parallel()(delayed(look)(0) for i in range(2)))
        table[0] = 6
        print(Parallel()(delayed(look)(0) for i in range(2)))
        class Reader:
            def read(self, i): return table[i]
        reader = Reader()
        table[0] = 7
        print(Parallel()(delayed(reader.read)(0) for i in range(2)))
        late = 10
        print(Parallel()(delayed(lambda i: plus(i) * late)(i) for i in range(3)))
    """)
        == "[0, 2, 4]\n[0, 3, 6]\n[1, 4, 7]\n[5, 5]\n[6, 6]\n[7, 7]\n[10, 40, 70]\n"
    )


# -- nesting ---------------------------------------------------------------------------------------


def inner(n):
    made = Parallel(n_jobs=2)
    return type(made._backend).__name__, made(delayed(inner)(n - 1) for _ in range(2)) if n else []


def test_parallel_in_a_drone_uses_threads_and_below_these_is_sequential():
    with parallel_config("polycephaly", n_jobs=2):
        for name, below in Parallel()(delayed(inner)(2) for _ in range(2)):
            assert name == "ThreadingBackend"
            assert [name for name, _ in below] == ["SequentialBackend"] * 2


def in_drones_of_its_own(i):
    with parallel_config("polycephaly", n_jobs=2):
        return Parallel()(delayed(pow)(i, k) for k in range(3))


def test_a_drone_may_have_a_pool_of_its_own():
    assert Parallel(n_jobs=2, backend="polycephaly")(
        delayed(in_drones_of_its_own)(i) for i in range(3)
    ) == [[1, 0, 0], [1, 1, 1], [1, 2, 4]]


def test_an_outer_parallel_goes_on_when_an_inner_one_of_its_backend_has_gone():
    """scikit-learn's search does so where its candidates come from another search."""
    with parallel_config("polycephaly", n_jobs=2), Parallel() as outer:
        assert outer(numbers(50)) == Parallel()(numbers(50))
        assert outer(numbers(2000)) == [2 * i for i in range(2000)]


def limits():
    return os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"]


def test_threads_of_native_libraries_are_limited():
    with parallel_config("polycephaly", n_jobs=joblib.cpu_count() + 1, inner_max_num_threads=3):
        assert Parallel()(delayed(limits)() for _ in range(2)) == [("3", "3")] * 2
    pools = pytest.importorskip("threadpoolctl").threadpool_info
    with parallel_config("polycephaly", n_jobs=joblib.cpu_count() + 1):
        numpy.ones((2, 2)) @ numpy.ones((2, 2))
        for found in Parallel()(delayed(pools)() for _ in range(2)):
            assert found and all(pool["num_threads"] == 1 for pool in found)


# -- errors ----------------------------------------------------------------------------------------


def test_errors_come_home_with_their_remote_traceback_and_the_pool_goes_on():
    with parallel_config("polycephaly", n_jobs=2):
        with pytest.raises(ZeroDivisionError) as caught:
            Parallel()(delayed(invert)(i) for i in range(5))
        assert "return 1 / x" in str(caught.value.__cause__)
        assert Parallel()(numbers()) == [0, 2, 4]


def bad_source():
    yield delayed(double)(1)
    raise LookupError("no more")


def test_an_error_of_the_source_is_raised():
    with parallel_config("polycephaly", n_jobs=2), pytest.raises(LookupError, match="no more"):
        Parallel()(bad_source())


class Torn:
    """A stderr that fails where joblib's callbacks run, when they tell the progress."""

    def write(self, text):
        if threading.current_thread() is not threading.main_thread():
            raise BrokenPipeError("nobody reads this")

    def flush(self):
        pass


@pytest.mark.parametrize("return_as", ["list", "generator_unordered"])
def test_an_error_in_the_callback_that_dispatches_the_next_calls_is_raised(monkeypatch, return_as):
    with parallel_config("polycephaly", n_jobs=2):
        with (
            monkeypatch.context() as patch,
            pytest.raises(BrokenPipeError, match="nobody reads this"),
        ):
            patch.setattr(sys, "stderr", Torn())
            list(Parallel(verbose=49, return_as=return_as)(numbers(2000)))
        assert Parallel()(numbers()) == [0, 2, 4]


def test_an_error_of_each_report_of_the_batch_size_is_raised(monkeypatch):
    """joblib reports a new size of its batches from within each dispatch, that which tells of the
    error included."""

    def reported(backend):
        if backend.parallel.verbose:
            backend.parallel._print("a new size")
        return 1

    monkeypatch.setattr(poly.joblib.PolycephalyBackend, "compute_batch_size", reported)
    with parallel_config("polycephaly", n_jobs=2):
        with (
            monkeypatch.context() as patch,
            pytest.raises(BrokenPipeError, match="nobody reads this"),
        ):
            patch.setattr(sys, "stderr", Torn())
            Parallel(verbose=49)(numbers(2000))
        assert Parallel()(numbers()) == [0, 2, 4]


def source_that_ends_the_pool(of):
    for i in range(2000):
        if i == 500:
            of._pool.shutdown(wait=False)
        yield delayed(double)(i)


def test_calls_that_cannot_be_submitted_any_more_are_told():
    with parallel_config("polycephaly", n_jobs=2):
        with pytest.raises(RuntimeError, match="shutdown"):
            Parallel(batch_size=4)(source_that_ends_the_pool(backend()))
        assert Parallel()(numbers()) == [0, 2, 4]


@pytest.mark.guarantee("pool-5")
def test_an_error_stops_what_runs_beside_it(tmp_path):
    """Which would go on for ever."""
    gate, started = str(tmp_path / "gate"), str(tmp_path / "started")

    def fail():
        wait_for(lambda: lines(started))
        raise LookupError("enough")

    with parallel_config("polycephaly", n_jobs=2):
        with pytest.raises(LookupError):
            Parallel(pre_dispatch="all", batch_size=1)(
                [delayed(hold_until)(gate, started), delayed(fail)()]
            )
        assert Parallel()(numbers()) == [0, 2, 4]


def test_a_time_limit_is_kept():
    with parallel_config("polycephaly", n_jobs=2), pytest.raises(multiprocessing.TimeoutError):
        Parallel(timeout=0.1)(delayed(time.sleep)(1000) for _ in range(2))


def die(path, i):
    if i == 5 and not lines(path):
        append(path, "died")
        os._exit(7)
    return i


def test_the_death_of_a_drone_is_told_and_the_pool_goes_on(tmp_path):
    path = str(tmp_path / "deaths")
    with parallel_config("polycephaly", n_jobs=2):
        with pytest.raises(poly.DroneDied, match="exit status 7"):
            Parallel()(delayed(die)(path, i) for i in range(20))
        assert Parallel()(numbers()) == [0, 2, 4]


def test_what_a_dead_drone_ran_is_run_again_where_retries_are_asked_for(tmp_path):
    path = str(tmp_path / "deaths")
    with parallel_config("polycephaly", n_jobs=2, retries=1):
        assert Parallel()(delayed(die)(path, i) for i in range(20)) == list(range(20))
    assert lines(path) == ["died"]


def test_ctrl_c_ends_the_call_and_leaves_nothing(tmp_path):
    started = tmp_path / "started"
    with Script("""
        import sys
        from joblib import Parallel, delayed
        import polycephaly as poly
        from faults import hold_until
        poly.joblib.register()
        try:
            Parallel(n_jobs=2, backend="polycephaly")(
                delayed(hold_until)("/nowhere", sys.argv[1]) for _ in range(4)
            )
        except KeyboardInterrupt:
            print("free", flush=True)
    """, str(started)) as script:  # fmt: skip
        wait_for(lambda: len(lines(started)) == 2)
        script.signal(2)
        assert script.read_line() == "free"
        assert script.wait() == 0
        assert not script.left()


# -- large arrays ----------------------------------------------------------------------------------


def scribble(array, i):
    was = float(array[i])
    array[:] = -1
    return was


def test_large_arrays_are_shared_and_what_a_call_writes_is_its_own():
    array = numpy.arange(300_000.0)
    with parallel_config("polycephaly", n_jobs=2):
        seen = Parallel(batch_size=1)(delayed(scribble)(array, i=i) for i in range(20))
        assert seen == list(range(20)) and array[5] == 5
        array += 1  # between two calls of Parallel: seen
        assert Parallel(batch_size=1)(delayed(scribble)(array, i) for i in range(20)) == list(
            range(1, 21)
        )
        assert Parallel(batch_size=1, max_nbytes=None)(
            delayed(scribble)(array, i) for i in range(9)
        ) == list(range(1, 10))


class Table:
    def __init__(self, array):
        self.columns = {"first": [array]}
        self.whole = self


def read_and_scribble(table, i):
    return scribble(table.columns["first"][0], i)


@pytest.mark.parametrize("local", [False, True], ids=["plain", "by value"])
def test_an_array_is_shared_once_wherever_it_stands_in_a_call(monkeypatch, local):
    """As in a data frame, a sparse matrix, an estimator, or captured by a function."""
    shared, share = [], poly.Pool.share
    monkeypatch.setattr(
        poly.Pool, "share", lambda pool, value: shared.append(value) or share(pool, value)
    )
    array = numpy.arange(300_000.0)
    table, fn = Table(array), read_and_scribble
    if local:
        fn = lambda table, i: read_and_scribble(table, i)  # noqa: E731
    with parallel_config("polycephaly", n_jobs=2):
        seen = Parallel(batch_size=1)(delayed(fn)(table, i) for i in range(20))
        seen += Parallel(batch_size=1)(delayed(lambda i: float(array[i]))(i) for i in range(20))
    assert seen == 2 * list(map(float, range(20))) and array[5] == 5
    assert [each is array for each in shared] == [True, True]  # once in each call of Parallel


def test_an_array_whose_objects_refer_to_it_stays_one_with_them():
    cells = numpy.empty(200_000, object)
    cells[0] = Table(cells)
    with parallel_config("polycephaly", n_jobs=2):
        (same,) = Parallel()(
            delayed(lambda cells: cells[0].columns["first"][0] is cells)(cells) for _ in range(1)
        )
    assert same


def test_arrays_of_one_call_each_do_not_stay():
    """More of them than there may be at a time: 30 of 2 MB, of which 8 are kept and some are under
    way."""
    with parallel_config("polycephaly", n_jobs=2):
        arrays = [numpy.full(250_000, float(i)) for i in range(30)]
        most = []

        def source():
            for i, array in enumerate(arrays):
                most.append(len(backend_of._arrays._shared))
                yield delayed(scribble)(array, i)

        backend_of = backend()
        assert Parallel(batch_size=1)(source()) == list(range(30))
        assert max(most) <= poly.joblib.MAX_BATCHES
        assert not backend_of._arrays._shared


def square_into(array, i, out):
    out[i] = array[i] ** 2
    return type(array).__name__


@pytest.mark.parametrize("max_nbytes", ["1M", None])
def test_what_is_written_into_a_memory_map_of_a_file_is_in_the_file(tmp_path, max_nbytes):
    table = numpy.memmap(tmp_path / "in", float, "w+", shape=(200_000,))
    table[:] = numpy.arange(200_000.0)
    table.flush()
    read = numpy.memmap(tmp_path / "in", float, "r")
    out = numpy.memmap(tmp_path / "out", float, "w+", shape=(60,))
    with parallel_config("polycephaly", n_jobs=2):
        calls = (
            delayed(square_into)(read[::2] if i % 2 else read, i, out=out[10:]) for i in range(50)
        )
        assert set(Parallel(max_nbytes=max_nbytes)(calls)) <= {"memmap", "ndarray"}
    assert [out[10 + i] for i in range(50)] == [float(i * (1 + i % 2)) ** 2 for i in range(50)]
    assert not out[:10].any()


# -- scikit-learn ----------------------------------------------------------------------------------


@pytest.mark.guarantee("pool-5")
def test_a_grid_search_gives_what_it_gives_sequentially():
    svm = pytest.importorskip("sklearn.svm")
    from sklearn.datasets import make_classification
    from sklearn.ensemble import BaggingClassifier
    from sklearn.model_selection import GridSearchCV, cross_val_score

    x, y = make_classification(200, random_state=0)
    grid = {"C": [0.1, 1, 10], "gamma": [0.01, 0.1]}
    one = GridSearchCV(svm.SVC(), grid, cv=3).fit(x, y)
    with parallel_config("polycephaly", n_jobs=2):
        two = GridSearchCV(svm.SVC(), grid, cv=3).fit(x, y)
        # Nested: the search in drones, its estimators in threads of theirs.
        nested = cross_val_score(
            BaggingClassifier(n_estimators=4, n_jobs=2, random_state=0), x, y, cv=3
        )
    assert (one.cv_results_["mean_test_score"] == two.cv_results_["mean_test_score"]).all()
    assert one.best_params_ == two.best_params_
    assert (
        nested == cross_val_score(BaggingClassifier(n_estimators=4, random_state=0), x, y, cv=3)
    ).all()


@pytest.mark.slow
def test_openmp_that_was_used_before_does_not_hang_in_drones():
    """GNU's OpenMP, used in a process, hangs in a fork of it as soon as that would use two threads.
    In a script, as its threads stay: no test after it could fork its drones."""
    pytest.importorskip("sklearn")
    pytest.importorskip("threadpoolctl")
    code = """
        import numpy
        import polycephaly as poly
        from joblib import parallel_config
        from sklearn.ensemble import HistGradientBoostingClassifier
        from sklearn.model_selection import cross_val_score

        poly.joblib.register()
        x = numpy.random.default_rng(0).normal(size=(300, 5))
        y = x[:, 0] > 0
        model = HistGradientBoostingClassifier(max_iter=3)
        model.fit(x, y)
        with parallel_config("polycephaly", n_jobs=2, inner_max_num_threads=2):
            print(cross_val_score(model, x, y, cv=2).mean() > 0.5)
    """
    done = run_script(code)
    assert done.stdout == "True\n", done.stderr


def test_without_joblib_the_error_says_what_to_install():
    code = """
        import sys
        sys.modules["joblib"] = None
        import polycephaly as poly
        try:
            poly.joblib
        except ImportError as error:
            print(error)
    """
    assert "pip install 'joblib>=1.5'\n" in output_of(code)
    assert "joblib" in sys.modules


def test_a_warning_points_at_the_line_of_the_user_and_not_into_what_is_built_on_joblib(tmp_path):
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    (folder / "built.py").write_text(
        "from joblib import Parallel, delayed\n"
        "def fit():\n"
        "    return Parallel()(delayed(abs)(i) for i in range(3))\n"
    )
    text = f"""
        import ctypes, sys, warnings
        from joblib import Parallel, delayed, parallel_config
        import polycephaly as poly
        sys.path.append({str(folder)!r})
        import built
        poly.joblib.register()
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)
        def use(fit):
            from polycephaly.engines.local import native_threads
            native_threads._warned_causes.clear()
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                with parallel_config("polycephaly", n_jobs=2):
                    fit()  # here
            (line,) = (each.lineno for each in told if "does not fork" in str(each.message))
            return open(__file__).read().splitlines()[line - 1].strip()
        print(use(built.fit))
        print(use(lambda: Parallel()(delayed(abs)(i) for i in range(3))))  # and here
    """
    first, second = output_of(text).splitlines()
    assert first == "fit()  # here"
    assert second.endswith("# and here")
