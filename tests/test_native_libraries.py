"""The native libraries of drones, such as BLAS, share the cores; those of the controller stay as
they are."""

import json
import os
import sys
from types import ModuleType

import numpy
import pytest
import threadpoolctl
from scripts import output_of, run_script

import polycephaly as poly
from polycephaly.engines.local import launcher, native_libraries
from polycephaly.engines.local.native_libraries import VARIABLES, make_limit
from polycephaly.runtime.system_limits import usable_processors

pytestmark = pytest.mark.guarantee("pool-14")

numpy.ones((2, 2)) @ numpy.ones((2, 2))  # its BLAS is loaded before any drone is forked


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """The environment of the tests has none of the variables."""
    for name in (*VARIABLES, "GOTO_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(native_libraries, "usable_processors", lambda: 8)


def blas_threads():
    """How many threads BLAS uses in this process."""
    found = threadpoolctl.threadpool_info()
    (number,) = {each["num_threads"] for each in found if each["user_api"] == "blas"}
    return number


def variables():
    """The variables of native libraries in this process."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def all_variables(threads):
    return dict.fromkeys(VARIABLES, str(threads))


# -- the number ------------------------------------------------------------------------------------


def test_by_default_the_drones_share_the_usable_cores(eight_cores):
    for drones, threads in [(1, 8), (3, 2), (5, 1)]:
        with poly.Pool(drones) as pool:
            assert pool.status()["native_threads"] == threads
            assert pool.doit(variables) == all_variables(threads)


def test_more_drones_than_cores_have_one_thread_each():
    with poly.Pool(usable_processors() + 1) as pool:
        assert pool.status()["native_threads"] == 1
        assert {each.value for each in pool.everywhere(blas_threads)} == {1}


def test_a_number_holds_for_libraries_that_are_loaded_and_for_later_ones_but_not_here():
    before = blas_threads()
    with poly.Pool(2, native_threads=before + 1) as pool:
        assert {each.value for each in pool.everywhere(blas_threads)} == {before + 1}
        assert pool.doit(variables) == all_variables(before + 1)
        assert json.loads(json.dumps(pool.status()))["native_threads"] == before + 1
        assert (blas_threads(), variables()) == (before, {})
    assert (blas_threads(), variables()) == (before, {})


def test_0_leaves_them_alone_and_so_do_a_lone_drone_and_a_promise():
    more = blas_threads() + 1
    with threadpoolctl.threadpool_limits(more):
        untouched = more, {}
        with poly.Pool(2, native_threads=0) as pool:
            assert pool.status()["native_threads"] == 0
            assert (pool.doit(blas_threads), pool.doit(variables)) == untouched
        with poly.Drone() as drone:
            assert (drone.doit(blas_threads), drone.doit(variables)) == untouched
        assert poly.promise(blas_threads).value == more


def test_the_default_only_lowers_what_a_library_uses_and_a_number_does_not(eight_cores):
    with threadpoolctl.threadpool_limits(1):
        with poly.Pool(2) as pool:
            assert pool.doit(blas_threads) == 1
        with poly.Pool(2, native_threads=2) as pool:
            assert pool.doit(blas_threads) == 2


@pytest.mark.parametrize("number", [-1, 1.5, "2"])
def test_a_wrong_number_is_refused(number):
    with pytest.raises((TypeError, ValueError), match="native_threads"):
        poly.Pool(1, native_threads=number)


def test_engines_that_cannot_limit_refuse_a_number():
    for engine in ("inline", "ray"):
        with pytest.raises(ValueError, match=f"'local', not '{engine}'"):
            poly.Pool(1, engine=engine, native_threads=1)


def test_in_this_process_nothing_is_limited():
    before = blas_threads()
    with poly.Pool(1, engine="inline") as pool:
        assert pool.status()["native_threads"] is None
        assert (pool.doit(blas_threads), pool.doit(variables)) == (before, {})


# -- what the user has set -------------------------------------------------------------------------


def test_what_the_environment_has_stays(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "7")
    before = blas_threads()
    with poly.Pool(2, native_threads=before + 1) as pool:
        assert pool.doit(variables) == all_variables(before + 1) | {"OPENBLAS_NUM_THREADS": "7"}
        assert pool.doit(blas_threads) == before


def test_what_env_has_stays_and_holds_for_loaded_libraries_too():
    with poly.Pool(2, native_threads=1, env={"OPENBLAS_NUM_THREADS": "3"}) as pool:
        assert pool.doit(variables) == all_variables(1) | {"OPENBLAS_NUM_THREADS": "3"}
        assert pool.doit(blas_threads) == 3


def test_each_drone_has_its_own_env():
    with poly.Pool(2, env=lambda index: {"OPENBLAS_NUM_THREADS": str(2 + index)}) as pool:
        assert [drone.doit(blas_threads) for drone in pool.drones] == [2, 3]


def test_a_library_that_would_ask_openmp_is_left_to_what_the_user_has_told_openmp():
    asks_openmp = {name for name, others in VARIABLES.items() if "OMP_NUM_THREADS" in others}
    limit = make_limit(2, False, {"OMP_NUM_THREADS"}, {})
    assert {*limit.environment()} == VARIABLES.keys() - {"OMP_NUM_THREADS"} - asks_openmp
    assert limit.number("OPENBLAS_NUM_THREADS", 8) == 8
    limit = make_limit(2, False, (), {"OMP_NUM_THREADS": "5,3", "MKL_NUM_THREADS": "many"})
    assert not limit.environment().keys() & {"OMP_NUM_THREADS", *asks_openmp}
    assert limit.number("OPENBLAS_NUM_THREADS", 8) == 5  # the outermost level of OpenMP
    assert limit.number("MKL_NUM_THREADS", 8) == 8


# -- drones that come later ------------------------------------------------------------------------


def test_a_replacement_and_a_new_snapshot_have_the_limit_too():
    with poly.Pool(1, native_threads=3) as pool:
        (drone,) = pool.drones
        drone.kill()
        assert pool.doit(blas_threads) == 3 and pool.drones[0].pid != drone.pid
        pool.refresh()
        assert (pool.doit(blas_threads), pool.doit(variables)) == (3, all_variables(3))


def test_drones_that_a_pool_gets_later_have_their_share_of_the_cores_then(eight_cores):
    with threadpoolctl.threadpool_limits(8), poly.Pool(2) as pool:
        pool.resize(4)
        assert [drone.doit(blas_threads) for drone in pool.drones] == [4, 4, 2, 2]
        assert pool.drones[-1].doit(variables) == all_variables(2)
        assert pool.status()["native_threads"] == 2
        pool.resize(1)
        pool.drones[0].kill()
        assert pool.doit(blas_threads) == 8  # not less, because the one before had less


def nested(drones, **how):
    with poly.Pool(drones, **how) as pool:
        return pool.status()["native_threads"], pool.doit(variables), pool.doit(blas_threads)


def test_the_drones_of_a_drone_share_what_that_may_use(eight_cores):
    with threadpoolctl.threadpool_limits(8), poly.Pool(2) as pool:
        assert pool.doit(nested, 2) == (2, all_variables(2), 2)
        assert pool.doit(nested, 1, native_threads=3) == (3, all_variables(3), 3)


@pytest.mark.parametrize("start", ["spawn", None])
def test_fresh_interpreters_start_with_the_variables(start):
    """Before anything else of theirs could be loaded."""
    code = f"""
        import ctypes, os, warnings
        warnings.simplefilter("ignore")
        import polycephaly as poly

        def blas():
            import numpy, threadpoolctl
            initial = open(f"/proc/{{os.getpid()}}/environ").read().split("\\0")
            counts = [library["num_threads"] for library in threadpoolctl.threadpool_info()]
            return "OPENBLAS_NUM_THREADS=1" in initial, "RAYON_NUM_THREADS=9" in initial, counts

        if __name__ == "__main__":
            thread, libc = ctypes.c_ulong(), ctypes.CDLL(None)
            libc.pthread_create(ctypes.byref(thread), None, libc.pause, None)  # forbids a fork
            env = {{"RAYON_NUM_THREADS": "9"}}
            with poly.Pool(2, start={start!r}, native_threads=1, env=env) as pool:
                print(pool.doit(blas))
    """
    assert output_of(code) == "(True, True, [1])\n"


# -- libraries with functions of their own ---------------------------------------------------------


class Library(ModuleType):
    """A stand-in for a library, with its functions for the number of its threads."""

    def __init__(self, name, getter, setter):
        super().__init__(name)
        self.threads = 8
        setattr(self, getter, lambda: self.threads)
        setattr(self, setter, self._set)

    def _set(self, threads):
        self.threads = threads


@pytest.fixture
def libraries(monkeypatch):
    found = {
        "torch": Library("torch", "get_num_threads", "set_num_threads"),
        "pyarrow": Library("pyarrow", "cpu_count", "set_cpu_count"),
        "cv2": Library("cv2", "getNumThreads", "setNumThreads"),
        "numba": Library("numba", "get_num_threads", "set_num_threads"),
    }
    found["numba"].config = ModuleType("numba.config")
    found["numba"].config.NUMBA_NUM_THREADS = 8
    for name, library in found.items():
        monkeypatch.setitem(sys.modules, name, library)
    return found


def numbers():
    return {name: sys.modules[name].threads for name in ("torch", "pyarrow", "cv2", "numba")}


def test_libraries_that_are_imported_are_limited_by_their_own_functions(libraries):
    with poly.Pool(2, native_threads=3) as pool:
        assert pool.doit(numbers) == dict.fromkeys(libraries, 3)
    assert numbers() == dict.fromkeys(libraries, 8)


def test_a_library_that_refuses_harms_no_other(libraries):
    def refuse(*_):
        raise RuntimeError("no")

    libraries["torch"].set_num_threads = refuse
    with poly.Pool(2, native_threads=3) as pool:
        assert pool.doit(numbers) == {**dict.fromkeys(libraries, 3), "torch": 8}


def test_numba_whose_threads_are_not_there_yet_is_told_without_starting_them(
    libraries, monkeypatch
):
    parallel = ModuleType("numba.np.ufunc.parallel")
    parallel.NUM_THREADS, parallel._is_initialized = 8, False
    monkeypatch.setitem(sys.modules, "numba.np.ufunc.parallel", parallel)

    def told():
        numba, parallel = sys.modules["numba"], sys.modules["numba.np.ufunc.parallel"]
        return numba.threads, numba.config.NUMBA_NUM_THREADS, parallel.NUM_THREADS

    with poly.Pool(2, native_threads=3) as pool:
        assert pool.doit(told) == (8, 3, 3)


def test_in_a_fork_that_lacks_threads_of_libraries_none_is_waited_for(libraries, monkeypatch):
    monkeypatch.setattr(launcher, "would_lack_threads", lambda: True)
    with poly.Pool(2, native_threads=3, start="fork") as pool:
        assert pool.doit(numbers) == {"torch": 1, "pyarrow": 3, "cv2": 8, "numba": 3}


# -- where nothing is to be limited ----------------------------------------------------------------


@pytest.mark.parametrize("before", ["", "import numpy"])
def test_threadpoolctl_is_imported_only_if_such_a_library_is_loaded(before):
    done = run_script(f"""
        import sys
        {before}
        import polycephaly as poly
        def imported():
            return "threadpoolctl" in sys.modules
        with poly.Drone() as drone:
            print(drone.doit(imported))
        with poly.Pool(1, native_threads=0) as pool:
            print(pool.doit(imported))
        with poly.Pool(1) as pool:
            print(pool.doit(imported))
    """)
    assert done.stdout.split() == ["False", "False", str(bool(before))], done.stderr


def test_a_served_pool_tells_its_clients(tmp_path):
    card = str(tmp_path / "pool.json")
    with (
        poly.Pool(1, native_threads=3) as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        assert remote.doit(blas_threads) == 3
        assert remote.status()["native_threads"] == remote.timeline.native_threads == 3
