"""Code strings run in the drone's `__main__`, as in an interactive session."""

import linecache
import sys
import traceback

import pytest
from engines import local_only, on_each_engine, poly
from scripts import output_of

pytestmark = on_each_engine


@pytest.fixture(scope="module")
def code():
    return [
        ("1 + 1", 2),
        ("x = 41", None),
        ("x = 41\nx + 1", 42),
        ("", None),
        ("   ", None),
        ("# only a comment", None),
        ("'''a string'''", "a string"),
        ("def f(): return 5\nf()", 5),
        ("[i * i for i in range(3)]", [0, 1, 4]),
        ("y = 3; y * 2", 6),
        ("for i in range(3):\n    z = i\nz", 2),
        ("import math; math.floor(2.5)", 2),
        ("n = 1\n(lambda: n)()", 1),
        ("n = 2\n[n for _ in range(2)]", [2, 2]),
        ("if True:\n    7", None),
        ("(w := 5)", 5),
        ("'größe \u2192'", "größe →"),
        ("None", None),
        ("__name__", "__main__"),
        ("class A:\n    b = 3\nA.b", 3),
        ("q = 1\n\nq\n\n", 1),
        ("  1 + 1", 2),
        ("\n        r = 1\n        if r:\n            r = 2\n        r\n    ", 2),
        ("\ns = '''\n  a\n   \n'''\ns", "\n  a\n   \n"),
        ("  # only a comment\n'''   \n   '''", "   \n   "),
    ]


@pytest.mark.guarantee("work-9")
def test_statements_run_and_a_last_expressions_value_comes_back(drone, code):
    for source, value in code:
        assert drone.doit(source) == value, source


def test_the_namespace_stays_between_calls(drone):
    drone.doit("x = 41")
    drone.doit("def add(n):\n    return x + n")
    assert drone.doit("add(1)") == 42
    drone.doit("x = 1")
    assert drone.doit("add(1)") == 2
    drone.doit("del x")
    assert isinstance(drone.promise("x").exception(), NameError)


def test_drones_have_namespaces_of_their_own():
    with poly.Pool(3) as pool:
        for i, drone in enumerate(pool.drones):
            drone.doit(f"mine = {i}")
        assert [d.doit("mine") for d in pool.drones] == [0, 1, 2]


def test_everywhere_runs_once_on_each_drone():
    with poly.Pool(3) as pool:
        pids = [
            p.value
            for p in pool.everywhere("import os; n = globals().get('n', 0) + 1; os.getpid()")
        ]
        assert sorted(pids) == sorted(d.pid for d in pool.drones)
        assert [p.value for p in pool.everywhere("n")] == [1, 1, 1]


def test_a_code_string_takes_no_arguments(drone):
    with pytest.raises(TypeError):
        drone.doit("x", 1)
    with pytest.raises(TypeError):
        drone.promise("x", a=1)


@pytest.mark.guarantee("work-9")
def test_tracebacks_of_later_calls_show_the_lines_of_the_string_that_defined_the_function(drone):
    drone.doit("def fail():\n    raise ValueError('here')  # line of the first string")
    text = "".join(traceback.format_exception(drone.promise("fail()").exception()))
    assert "# line of the first string" in text and "fail()" in text and "<doit " in text
    assert not any(name.startswith("<doit") for name in linecache.cache)


@pytest.mark.guarantee("work-9")
def test_an_indented_string_has_the_errors_of_the_same_string_without_its_margin(drone):
    text = "".join(
        traceback.format_exception(
            drone.promise("\n    a = 0\n    1 / a  # here\n    ").exception()
        )
    )
    assert "line 3" in text and "    1 / a  # here\n" in text
    for wrong, line in (
        ("  if 1:\n  pass", 2),
        ("  a\n    b", 2),
        ("\nif 1:\npass", 3),
        ("a\n  b", 2),
    ):
        error = drone.promise(wrong).exception()
        assert (
            type(error) is IndentationError and error.lineno == line and error.__context__ is None
        )


@pytest.mark.guarantee("work-9")
def test_future_statements_hold_for_what_comes_after_as_at_a_prompt():
    asks = "def f(x: nowhere): pass\nf.__annotations__"
    with poly.Drone() as drone:
        assert isinstance(drone.promise(asks).exception(), NameError)
        drone.doit("from __future__ import annotations")
        assert drone.doit(asks + "  # once more") == {"x": "nowhere"}
    with poly.Drone() as other:
        assert isinstance(other.promise(asks).exception(), NameError)


def test_the_same_string_many_times_counts_up(drone):
    drone.doit("n = 0")
    for p in [drone.promise("n += 1\nn") for _ in range(500)]:
        last = p.value
    assert last == 500


@pytest.mark.guarantee("work-1")
def test_a_script_s_drone_is_an_instance_of_the_live_image():
    assert (
        output_of(
            """
        import sys
        import polycephaly as poly
        class Security:
            @classmethod
            def load(cls): return ["A", "B"] + table
        table = ["C"]
        with poly.Drone(engine=sys.argv[1]) as drone:
            print(drone.promise("Security.load()").value)
        table.append("D")
        with poly.Drone(engine=sys.argv[1]) as drone:
            print(drone.promise("Security.load()").value, drone.doit("len(table)"))
    """,
            poly.engine,
        )
        == "['A', 'B', 'C']\n['A', 'B', 'C', 'D'] 2\n"
    )


def lose_all_files():  # as `os.chroot` does, which only root may call
    sys.modules.pop("ast", None)
    sys.path.clear()
    sys.path_importer_cache.clear()


@local_only
def test_code_runs_in_a_drone_that_can_import_no_file_any_more():
    with poly.Pool(1, initializer=lose_all_files) as pool:
        assert pool.doit("x = 3; x * 2") == 6
