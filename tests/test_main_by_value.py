"""Definitions of `__main__` by value, pickled in one `__main__` and called in another."""

import sys
from pickle import loads
from types import ModuleType

import pytest

from polycephaly.drone.functions import define
from polycephaly.wire import by_value
from polycephaly.wire.main_names import MainSnapshot
from polycephaly.wire.main_snapshot import restore_snapshot, take_snapshot
from polycephaly.wire.messages import CALL, DEFINE_CALLABLE
from polycephaly.wire.pickling import capture


class Mains:
    """The main modules of a controller and of a drone, in one process."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.controller, self.drone = ModuleType("__main__"), ModuleType("__main__")

    def enter(self, main):
        self._monkeypatch.setitem(sys.modules, "__main__", main)
        by_value._mark_sent_as_received()  # as in a forked child

    def run(self, source):
        """As the controller."""
        self.enter(self.controller)
        exec(source, vars(self.controller))

    def send(self, expression):
        """The controller's value, as the drone has it."""
        self.enter(self.controller)
        pickled = capture(eval(expression, vars(self.controller)), MainSnapshot(()))
        self.enter(self.drone)
        return loads(pickled)

    def copy(self):
        """The controller's `__main__`, as a drone that is no fork makes it."""
        self.enter(self.controller)
        taken = take_snapshot()
        assert not taken.left_out
        self.enter(self.drone)
        restore_snapshot(taken)
        return self.drone

    def define(self, expression):
        """The controller's function, as the drone calls it."""
        self.enter(self.controller)
        pickled = capture(eval(expression, vars(self.controller)), MainSnapshot(()))
        self.enter(self.drone)
        definition = define(DEFINE_CALLABLE, pickled)
        return lambda: definition.call(CALL, b"")


@pytest.fixture
def mains(monkeypatch):
    return Mains(monkeypatch)


WAYS = """
import functools

def get(): return pushed

def decorator(function):
    @functools.wraps(function)
    def wrapper(): return function()
    return wrapper

def default(function=get): return function()

class Getter:
    def get(self): return pushed
    def __call__(self): return pushed
"""


@pytest.mark.parametrize(
    "function",
    [
        "get",
        "decorator(get)",
        "functools.partial(get)",
        "functools.cache(get)",
        "(lambda function: lambda: function())(lambda: pushed)",
        "default",
        "Getter().get",
        "Getter()",
        "lambda: Getter().get()",
    ],
)
def test_a_name_that_only_the_drone_has_is_found_however_the_function_is_wrapped(mains, function):
    mains.run(WAYS)
    call = mains.define(function)
    with pytest.raises(NameError, match="pushed"):
        call()
    mains.drone.pushed = 1
    assert call() == 1
    mains.drone.pushed = 2
    assert call() == (1 if "cache" in function else 2)


def test_a_function_among_the_arguments_finds_a_name_that_only_the_drone_has(mains):
    mains.run(WAYS)
    mains.drone.pushed = 1
    assert [each() for each in mains.send("[get, decorator(get)]")] == [1, 1]


def test_a_name_that_was_captured_is_not_replaced_by_the_drones(mains):
    mains.run("def get(): return own\ndef other(): return get().own\nown = 'captured'")
    mains.drone.own = "the drone's"
    assert mains.define("get")() == "captured"
    for function in mains.send("[other, get]"):  # of `other`, it is an attribute only
        assert function.__globals__["own"] == "captured"


def test_a_copied_main_has_what_functools_makes_of_its_functions_and_methods(mains):
    mains.run("""
import functools

@functools.cache
def cached(): return state

@functools.singledispatch
def dispatching(value): return state

@dispatching.register
def _(value: int): return state + value

class Some:
    @functools.cache
    def cached(self): return state

    @functools.cached_property
    def once(self): return state

    @functools.singledispatchmethod
    def dispatching(self, value): return state

    @dispatching.register
    def _(self, value: int): return state + value
""")
    drone = mains.copy()
    drone.state = 1  # as an initializer sets it
    some = drone.Some()
    assert [drone.cached(), drone.dispatching(""), drone.dispatching(1)] == [1, 1, 2]
    assert [some.cached(), some.once, some.dispatching(""), some.dispatching(1)] == [1, 1, 1, 2]
    assert drone.cached is not mains.controller.cached


@pytest.mark.parametrize(
    "before, after",
    [
        ("0.0", "-0.0"),
        ("1 + 0j", "complex(1, -0.0)"),
        ("1", "1.0"),
        ("0", "False"),
        ("N(1)", "N(1)"),
        ("1", "2"),
    ],
)
def test_a_name_that_was_bound_to_another_value_has_changed(mains, before, after):
    mains.run(f"class N(int): pass\nname = {before}")
    snapshot = MainSnapshot()
    mains.run(f"name = {after}")
    assert not snapshot.unchanged("name", mains.controller.name)
    assert not snapshot.is_current()


@pytest.mark.parametrize("value", ["-0.0", "1000", "float('1.5')", "'a' * 50", "b'abc'", "None"])
def test_a_name_that_was_bound_to_the_same_value_has_not_changed(mains, value):
    mains.run(f"name = {value}")
    snapshot = MainSnapshot()
    mains.run(f"name = {value}")
    assert snapshot.is_current()
