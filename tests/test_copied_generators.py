"""A generator of random numbers that a function reads is a copy in each drone, which draws what the
others draw: one warning says so, and names it and the cures."""

import random
import re
import warnings
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
from scripts import output_of

import polycephaly as poly

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("numpy.random")

pytestmark = pytest.mark.guarantee("work-25")

rng = np.random.default_rng(5)
old = np.random.RandomState(5)
plain = random.Random(5)
settings = ModuleType("settings")
settings.rng = np.random.default_rng(5)


def draw(_=None):
    return float(rng.random())


def draw_by_another(_=None):
    return [draw_by_a_third() for _ in range(2)]


def draw_by_a_third():
    return old.rand()


def draw_by_default(_=None, own=plain):
    return own.random()


def draw_by_keyword(_=None, *, own=plain):
    return own.random()


def draw_from_module(_=None):
    return float(settings.rng.random())


def draw_in_a_comprehension(_=None):
    return [rng.random() for _ in range(2)]


def draw_from(own, _=None):
    return float(own.random())


def in_a_closure():
    own = np.random.default_rng(5)
    return lambda _=None: float(own.random())


class Simulation:
    def __init__(self):
        self.own = np.random.default_rng(5)

    def step(self, _=None):
        return float(self.own.random())

    def __call__(self, _=None):
        return self.step()


class Dice(random.Random):
    pass


def warnings_of(*fns, **how):
    with warnings.catch_warnings(record=True) as caught, poly.Pool(2, **how) as pool:
        warnings.simplefilter("always")
        for fn in fns:
            pool.promise(fn).exception()
            list(pool.map(fn, range(2), return_exceptions=True))
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    "fn, text",
    [
        (draw, "draw reads rng, a Generator, "),
        (draw_by_another, "draw_by_another reads old, a RandomState, "),
        (draw_by_default, "draw_by_default reads own, a Random, "),
        (draw_by_keyword, "draw_by_keyword reads own, a Random, "),
        (draw_from_module, "draw_from_module reads settings.rng, a Generator, "),
        (draw_in_a_comprehension, "draw_in_a_comprehension reads rng, a Generator, "),
        (in_a_closure(), "in_a_closure.<locals>.<lambda> reads own, a Generator, "),
        (partial(draw_from, Dice(5)), "draw_from reads argument 0, a Dice, "),
        (partial(draw_from, own=rng), "draw_from reads own, a Generator, "),
        (Simulation().step, "Simulation.step reads self.own, a Generator, "),
        (Simulation(), "a Simulation reads self.own, a Generator, "),
        (rng.normal, "Generator.normal is a method of a Generator, "),
        (plain.uniform, "Random.uniform is a method of a Random, "),
        (random.random, "Random.random is a method of a Random, "),
        (np.random.rand, "RandomState.rand is a method of a RandomState, "),
    ],
)
def test_one_warning_names_the_generator_and_the_cures(fn, text):
    (said,) = warnings_of(fn)
    assert said.startswith(text)
    assert "each drone has a copy, so drones draw the same numbers" in said
    assert "polycephaly.rng()" in said and "map(..., seed=42)" in said
    cure = re.search(r"a generator of its own: map\(f, (.*)\)$", said)[1]
    generators = eval(cure, {"rng": rng, "numpy": np, "random": random, "n": 2})
    assert len({own.random() for own in generators}) == 2


def test_what_is_said_is_true():
    with warnings.catch_warnings(), poly.Pool(3) as pool:
        warnings.simplefilter("ignore")
        assert len({each.value for each in pool.everywhere(draw)}) == 1


def test_a_generator_is_told_of_once_and_another_one_too():
    assert len(warnings_of(draw, draw_in_a_comprehension, draw)) == 1
    assert len(warnings_of(draw, draw_by_another)) == 2


def test_the_warning_points_at_the_users_line():
    with warnings.catch_warnings(record=True) as caught, poly.Pool(1) as pool:
        warnings.simplefilter("always")
        pool.map(draw, [1], seed=42).close()
    assert [each.filename for each in caught] == [__file__]


def draw_without_copies(_=None):
    own = poly.rng() or np.random.default_rng(5) or random.Random(5)
    uniform = random.SystemRandom().random()
    return own.random(), random.random(), np.random.rand(), uniform, np.mean([1])


def take_another_name(_=None):
    return SimpleNamespace(rng=1).rng


def read_another_name(_=None):
    return settings.__name__, poly.rng().random()


class Touchy:
    """An object that cannot be looked into."""

    def __getattr__(self, name):
        raise RuntimeError(name)


def test_what_drones_seed_anew_and_what_a_call_makes_or_is_given_is_no_copy():
    touchy = Touchy()
    fns = draw_without_copies, take_another_name, read_another_name, lambda _=None: touchy is None
    assert warnings_of(*fns, abs) == []
    with warnings.catch_warnings(), poly.Pool(2) as pool:
        warnings.simplefilter("error")
        drawn = list(pool.map(draw_from, np.random.default_rng(5).spawn(4)))
        assert len(set(drawn)) == 4


def test_functions_that_main_has_imported_from_random_are_those_of_the_drone():
    assert (
        output_of("""
        from random import random, uniform
        from numpy.random import rand
        import warnings
        import polycephaly as poly
        def draw(_=None):
            return random() + uniform(0, 1) + rand()
        if __name__ == "__main__":
            with warnings.catch_warnings(record=True) as caught, poly.Pool(2) as pool:
                warnings.simplefilter("always")
                print(len({promise.value for promise in pool.everywhere(draw)}), len(caught))
                from random import gauss  # after the snapshot: it travels, with its generator
                pool.doit(lambda: gauss())
                print(len(caught), str(caught[0].message)[:42])
    """)
        == "2 0\n1 <lambda> reads gauss, a Random, of which e\n"
    )


def test_drones_that_are_this_process_have_its_own_objects():
    program = """
        import warnings, numpy as np, polycephaly as poly
        rng = np.random.default_rng(5)
        def draw(_=None):
            return float(rng.random())
        if __name__ == "__main__":
            with warnings.catch_warnings(record=True) as caught, poly.Pool(engine="inline") as pool:
                warnings.simplefilter("always")
                print(pool.doit(draw) == pool.doit(draw), len(caught))
                own = np.random.default_rng(5)
                closure = (lambda own: lambda: float(own.random()))(own)
                print(pool.doit(closure) == pool.doit(closure), len(caught))
    """
    assert output_of(program) == "False 0\nTrue 1\n"
