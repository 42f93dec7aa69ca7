"""`start="spawn"`: a fresh interpreter that imports the main module, as the standard library's
does."""

import os
import sys
from importlib.metadata import entry_points
from subprocess import run
from types import ModuleType

import pytest
from scripts import output_of, run_script

import polycephaly as poly
from polycephaly.engines.local.bare import main_and_settings


@pytest.mark.guarantee("wire-7")
def test_a_spawned_pool_works_and_shares_nothing_with_the_live_image():
    assert (
        output_of("""
        import os, sys
        import polycephaly as poly
        table = [1]
        def look(): return table
        class Point:
            def __init__(self, x): self.x = x
        if __name__ == "__main__":
            table.append(2)
            late = 5
            with poly.Pool(2, start="spawn") as pool:
                pids = {p.value for p in pool.everywhere(os.getpid)}
                print(pool.doit(look), pool.doit("table"), len(pids))
                print(pool.doit(lambda: late), type(pool.doit(Point, 3)) is Point)
                print(list(pool.map(abs, range(-3, 0))))
                error = pool.promise("late").exception()
                print(type(error).__name__, pool.promise("1/0").exception())
    """)
        == "[1] [1] 2\n5 True\n[3, 2, 1]\nNameError division by zero\n"
    )


@pytest.mark.guarantee("wire-7")
def test_a_spawned_drone_keeps_its_namespace_is_replaced_and_tells_its_death():
    done = run_script("""
        import os
        import polycephaly as poly
        from faults import exit_hard
        if __name__ == "__main__":
            with poly.Drone(start="spawn") as drone:
                drone["x"] = 41
                print(drone.doit("x + 1"), drone.doit("import sys; sys.stdin.read() == ''"))
            with poly.Pool(1, start="spawn", env={"A": "b"}) as pool:
                error = pool.promise(exit_hard, 3).exception()
                print(error.exitcode, pool.doit("import os; os.environ['A']"))
                pool.refresh()
                print(pool.doit(abs, -1))
    """)
    assert done.stdout == "42 True\n3 b\n1\n", done.stderr


def test_variables_that_an_interpreter_reads_at_its_start_have_effect():
    done = run_script("""
        import sys
        import polycephaly as poly
        def look():
            added = [each for each in sys.path if each.startswith("/added")]
            return sys.flags.dev_mode, sys.get_int_max_str_digits(), added
        if __name__ == "__main__":
            def env(index):
                return {"PYTHONINTMAXSTRDIGITS": "5000", "PYTHONPATH": "/added:/added/too",
                        "PYTHONDEVMODE": str(index)}  # differs: a drone's interpreter is one of two
            with poly.Pool(2, start="spawn", env=env) as pool:
                found = [each.value for each in pool.everywhere(look)]
                print(found)
                pool.refresh()
                print([each.value for each in pool.everywhere(look)] == found)
            print(look())
    """)
    each = (False, 5000, ["/added", "/added/too"])
    assert done.stdout == f"{[each] * 2}\nTrue\n{(False, 4300, [])}\n", done.stderr


def test_a_main_module_may_lack_a_spec(monkeypatch):
    """As under `python -m pdb`, in CPython 3.11."""
    main = ModuleType("__main__")
    del main.__spec__
    main.__file__ = "/folder/script.py"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert main_and_settings()["init_main_from_path"] == "/folder/script.py"
    assert not hasattr(main, "__spec__")


def test_work_finds_the_globals_that_an_initializer_of_the_main_module_has_set():
    assert (
        output_of("""
        import socket
        import polycephaly as poly
        number, kept = None, {}
        def begin(given, end=None):
            global number
            number = kept["given"] = given
        def look(): return number, kept
        if __name__ == "__main__":
            end, other = socket.socketpair()
            for initargs in (3,), (4, end):
                with poly.Pool(1, start="spawn", initializer=begin, initargs=initargs) as pool:
                    print(pool.doit(look))
    """)
        == "(3, {'given': 3})\n(4, {'given': 4})\n"
    )


def test_functions_of_the_main_module_see_what_is_set_in_its_namespace():
    assert (
        output_of("""
        import polycephaly as poly
        x = 1
        def look(): return x, __name__
        if __name__ == "__main__":
            with poly.Drone(start="spawn") as drone:
                drone["x"] = 2
                print(drone.doit(look), drone.doit("x"))
    """)
        == "(2, '__mp_main__') 2\n"
    )


@pytest.mark.parametrize("way", ["-m package.part", "folder"])
def test_a_main_module_is_imported_from_wherever_it_was_run(way, tmp_path):
    code = """
import polycephaly as poly
from {}other import y
x = 1
def look(): return x, y, __package__
if __name__ == "__main__":
    with poly.Drone(start="spawn") as drone:
        print(drone.doit(look))
"""
    folder = tmp_path / way.split()[-1].partition(".")[0]
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "other.py").write_text("y = 2")
    (folder / "part.py").write_text(code.format("."))
    (folder / "__main__.py").write_text(code.format(""))
    done = run(
        [sys.executable, *way.split()], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == f"(1, 2, {'package' if way[0] == '-' else ''!r})\n", done.stderr


def test_a_script_that_cannot_be_imported_again_gets_an_error_that_says_how():
    done = run_script("""
        import polycephaly as poly
        with poly.Pool(1, start="spawn") as pool:
            print(pool.doit(abs, -1))
    """)
    assert done.returncode == 1 and "__main__" in done.stderr and "importable" in done.stderr


def test_a_spawned_pool_within_the_test_process():
    with poly.Pool(2, start="spawn") as pool:
        assert list(pool.map(abs, range(-20, 0))) == list(range(20, 0, -1))
        assert pool.doit("import os; os.getpid()") != os.getpid()


# -- frozen programs -------------------------------------------------------------------------------

FROZEN = """
import ctypes, multiprocessing, os, sys
import polycephaly as poly

def square(x):
    return x * x

async def two():
    return 2

if __name__ == "__main__":
    if "CARELESS" not in os.environ:
        multiprocessing.freeze_support()
    print("begins", flush=True)
    if sys.argv[1] != "fork":
        libc = ctypes.CDLL(None)
        libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.pause, None)
    with poly.Pool(2, start="spawn" if sys.argv[1] == "spawn" else None) as pool:
        print(list(pool.map(square, range(4))), poly.green.run(two()), flush=True)
"""
NOT_FROZEN = (
    "IPython", "PIL", "_pytest", "dask", "httpx", "hypothesis", "joblib", "matplotlib", "numpy",
    "pandas", "playwright", "pyarrow", "pytest", "ray", "scipy", "setuptools", "sklearn",
    "starlette", "tkinter", "torch", "trio", "uvicorn",
)  # fmt: skip
"""What this package uses if it is there: without them, the build takes half a minute of work."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_program_that_pyinstaller_has_frozen_has_pools(tmp_path, monkeypatch):
    pytest.importorskip("PyInstaller", reason="PyInstaller is not installed")
    hooks = entry_points(group="pyinstaller40", name="hook-dirs")
    if not any(each.value.startswith("polycephaly.") for each in hooks):
        pytest.skip("the package was installed before it had a hook: install it again")
    (tmp_path / "app.py").write_text(FROZEN)
    excluded = [arg for name in NOT_FROZEN for arg in ("--exclude-module", name)]
    build = [sys.executable, "-m", "PyInstaller", "--log-level", "WARN", *excluded, "app.py"]
    run(build, cwd=tmp_path, check=True, timeout=1500)

    def start(how):
        command = [tmp_path / "dist" / "app" / "app", how]
        return run(command, capture_output=True, text=True, timeout=100)

    monkeypatch.delenv("CARELESS", raising=False)
    for how in ("fork", "spawn", "fresh"):
        done = start(how)
        assert done.stdout == "begins\n[0, 1, 4, 9] 2\n", done.stderr
        assert ("RuntimeWarning" in done.stderr) == (how == "fresh")
    monkeypatch.setenv("CARELESS", "1")
    done = start("fresh")
    assert done.returncode == 1
    # The program, the zygote, and the resource tracker of `multiprocessing`: no further ones.
    assert 2 <= done.stdout.count("begins") <= 3 and "[0, 1" not in done.stdout
    assert "call multiprocessing.freeze_support() first" in done.stderr


def test_a_frozen_program_that_was_started_again_is_refused_a_fresh_interpreter(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    for argv in (
        ["app", "--multiprocessing-fork", "tracker_fd=12", "pipe_handle=11"],
        ["app", "-B", "-c", "from multiprocessing.resource_tracker import main;main(11)"],
    ):
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(RuntimeError, match=r"freeze_support\(\) first"):
            poly.Pool(1, start="spawn")
