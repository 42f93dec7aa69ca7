"""Random numbers that can be repeated: `seed=`, and `poly.rng()`. A call draws the same numbers on
any number of drones and any engine, in any order, after deaths and retries."""

import asyncio
import random
import sys
import threading
from types import SimpleNamespace

import pytest
from engines import local_only, on_each_engine, poly
from faults import append, hold_until, kill_myself, lines
from hypothesis import given
from hypothesis import strategies as st
from scripts import output_of

import polycephaly
from polycephaly import green
from polycephaly.pool.task_promise import facts_of
from polycephaly.runtime.random_numbers import state_words

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("numpy.random")

pytestmark = on_each_engine


def draw(_=None):
    """Numbers of each of the generators that are seeded."""
    own = polycephaly.rng()
    return (
        random.random(),
        random.gauss(),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        float(own.random()),
        float(polycephaly.rng().random()),
    )


async def draw_in_a_coroutine(_=None):
    first = draw()
    await green.sleep(0)
    return first, draw()


def expected(entropy, index, spawn_key=()):
    """What `draw` gives in call `index`, by NumPy's own means."""
    sequence = np.random.SeedSequence(entropy, spawn_key=(*spawn_key, index))
    words = [int(word) for word in sequence.generate_state(8)]
    plain, legacy = random.Random(), np.random.RandomState(words[4:])
    plain.seed(sum(word << 32 * i for i, word in enumerate(words[:4])))
    own = np.random.default_rng(sequence)
    numbers = (legacy.rand(), legacy.standard_normal(), own.random(), own.random())
    return (plain.random(), plain.gauss(), *map(float, numbers))


def seeded_numbers(count, seed=42, **how):
    with poly.Pool(**how) as pool:
        return list(pool.map(draw, range(count), seed=seed))


EXPECTED = [expected(42, i) for i in range(30)]


# -- the same numbers ------------------------------------------------------------------------------


@pytest.mark.guarantee("work-24")
@pytest.mark.parametrize("drones", [1, 2, 5])
def test_call_i_draws_the_same_numbers_on_any_number_of_drones(drones):
    with poly.Pool(drones) as pool:
        drawn = list(pool.map(draw, range(600), seed=42))
        assert drawn[:30] == EXPECTED
        assert len(set(drawn)) == 600
        assert drawn == list(pool.map(draw, iter(range(600)), seed=42))
        unordered = pool.map(lambda i: (i, draw()), range(600), seed=42, ordered=False)
        assert [numbers for _, numbers in sorted(unordered)] == drawn
        errors = pool.map(draw, range(30), seed=42, return_exceptions=True)
        assert list(errors) == EXPECTED


@pytest.mark.guarantee("work-24")
def test_rows_of_several_iterables_large_items_and_what_is_pickled_alone_have_indices_too():
    def draw_beside(*row):
        return draw()

    captured = [0]  # may change, so each call gets a function of its own

    def draw_and_change(_):
        captured.append(0)
        return len(captured), draw()

    items = [bytes(200_000) if i % 3 else {"i": i} for i in range(30)]
    with poly.Pool(2) as pool:
        assert list(pool.map(draw_beside, range(30), items, "x" * 30, seed=42)) == EXPECTED
        assert list(pool.map(draw_and_change, items, seed=42)) == [(2, each) for each in EXPECTED]
        assert list(pool.map(draw, seed=42)) == []
        promises = [pool.promise(abs, i) for i in range(30)]
        assert list(pool.map(draw, promises, seed=42)) == EXPECTED


@pytest.mark.guarantee("work-24")
def test_a_call_that_is_run_again_draws_the_same_numbers(tmp_path):
    died, failed = str(tmp_path / "died"), str(tmp_path / "failed")

    def draw_at_last(i):
        drawn = draw()
        if i in (7, 300) and lines(died).count(str(i)) < 1:
            append(died, str(i))
            kill_myself()
        if i == 9 and len(lines(failed)) < 2:
            append(failed, "once")
            raise ConnectionError
        return drawn

    retry = poly.Retry(5, on=ConnectionError, delay=0.01)
    with poly.Pool(2) as pool:
        drawn = list(pool.options(retries=retry).map(draw_at_last, range(30), seed=42))
        assert drawn == EXPECTED
        assert sorted(lines(died)) == ["7"] and len(lines(failed)) == 2
        # In chunks: those that the dead drone had are run again.
        drawn = list(pool.options(retries=5).map(draw_at_last, range(600), seed=42))
        assert drawn[:30] == EXPECTED and drawn[300] == expected(42, 300)
        assert drawn[299:302] == [expected(42, i) for i in (299, 300, 301)]
        assert sorted(lines(died)) == ["300", "7"]


@pytest.mark.guarantee("work-24")
def test_the_rest_of_a_chunk_that_was_cut_draws_the_same_numbers(tmp_path):
    gate, others = str(tmp_path / "gate"), str(tmp_path / "others")

    def draw_held(i):
        drawn = draw()
        if i == 300:
            hold_until(gate)
        elif i == 599:
            append(others, "done")
            hold_until(gate)
        return drawn, draw()

    with poly.Pool(2) as pool:
        want = list(pool.map(lambda _: (draw(), draw()), range(600), seed=42))
        held = pool.map(draw_held, range(600), seed=42)
        drawn = [next(held) for _ in range(300)]
        append(gate, "open")
        drawn += held
    assert drawn == want and lines(others) == ["done"]


@pytest.mark.guarantee("work-24")
def test_coroutine_functions_draw_the_same_numbers():
    with poly.Pool(2) as pool:
        drawn = list(pool.map(draw_in_a_coroutine, range(30), seed=42))
        assert [first for first, _ in drawn] == EXPECTED
        assert drawn == list(pool.map(lambda i: draw_in_a_coroutine(i), range(30), seed=42))
    with poly.Pool(2, width=4) as pool:  # those that run beside others: with `rng` alone
        beside = list(pool.map(draw_in_a_coroutine, range(30), seed=42))
    assert [[each[4:] for each in both] for both in beside] == [
        [each[4:] for each in both] for both in drawn
    ]


@local_only
@pytest.mark.guarantee("work-24")
def test_clients_of_a_served_pool_draw_the_same_numbers(tmp_path):
    card = str(tmp_path / "pool.json")
    with poly.Pool(2) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
        assert list(remote.map(draw, range(30), seed=42)) == EXPECTED
        options = remote.options(seed=42)
        assert [options.promise(draw).value for _ in range(3)] == EXPECTED[:3]
        assert options.drones[0].doit("import random; random.random()") == EXPECTED[3][0]
        assert not set(remote.map(draw, range(30))) & set(EXPECTED)


@local_only
@pytest.mark.guarantee("work-24")
def test_fresh_interpreters_draw_the_same_numbers_with_or_without_numpy(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""if True:
        import random, sys
        if "without" in sys.argv:
            sys.modules["numpy"] = None
        import polycephaly as poly
        def draw(_):
            return random.random()
        if __name__ == "__main__":
            with poly.Pool(2, start="spawn" if "spawn" in sys.argv else None) as pool:
                print(list(pool.map(draw, range(30), seed=42)))
                loaded = "numpy" in sys.modules, pool.doit("import sys; 'numpy' in sys.modules")
                print(loaded if "without" not in sys.argv else (False, False))
    """)
    want = f"{[each[0] for each in EXPECTED]}\n(False, False)\n"
    for how in ([], ["spawn"], ["without"]):
        assert output_of(program.read_text(), *how) == want


# -- one call at a time: `options` -----------------------------------------------------------------


@pytest.mark.guarantee("work-24")
def test_the_nth_call_through_options_is_call_n():
    with poly.Pool(2) as pool:
        options = pool.options(seed=42)
        calls = [options.promise(draw), options.submit(draw), options.promise(draw, keep=True)]
        assert [calls[0].value, calls[1].value, calls[2].value.value] == EXPECTED[:3]
        assert options.doit("import random; random.random()") == EXPECTED[3][0]
        assert options.doit(draw, _=None) == EXPECTED[4]
        # An object that is made of this one goes on with its numbers; a `map` has its own.
        assert list(options.map(draw, range(30))) == EXPECTED
        assert options.options(timeout=60).doit(draw) == EXPECTED[5]
        assert list(options.map(draw, range(3), seed=7)) == [expected(7, i) for i in range(3)]
        drone = options.drones[0]
        drone["x"] = 1
        assert drone["x"] == 1 and "x" in drone
        assert drone.doit(draw) == EXPECTED[6]
        assert sorted(each.value for each in options.everywhere(draw)) == sorted(EXPECTED[7:9])
        assert pool.options(seed=42).doit(draw) == EXPECTED[0]
        with pool.options(seed=42):
            assert poly.flow(draw)().value == EXPECTED[0]


@local_only
@pytest.mark.guarantee("work-24")
def test_many_threads_give_each_call_a_number_of_its_own():
    with poly.Pool(2) as pool:
        options, promises = pool.options(seed=42), []

        def submit():
            promises.extend([options.promise(draw) for _ in range(50)])

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        drawn = {each.value for each in promises}
        assert drawn == {expected(42, i) for i in range(200)}


@local_only
def test_an_error_names_the_item_and_not_the_index_and_no_frame_of_ours():
    def fail(a, b=None):
        raise ValueError(a)

    with poly.Pool(2) as pool:
        for items in (["x"], [["x"]]):
            (error,) = pool.map(fail, items, seed=1, return_exceptions=True)
            assert error.__notes__[-1].endswith(f"fail, ...), item 0: {items[0]!r}")
            assert "run_seeded" not in str(error.__cause__)
        with pytest.raises(ValueError, match="150") as raised:
            list(pool.map(lambda i: i if i < 150 else fail(i), range(600), seed=1))
        assert raised.value.__notes__[-1].endswith("item 150: 150")
        promise = pool.options(seed=1).promise(fail, 1)
        assert facts_of(promise).label.endswith("fail")
        assert facts_of(pool.options(seed=1).promise("1 / 0")).label == "code '1 / 0'"


# -- what is left afterwards -----------------------------------------------------------------------


@pytest.mark.guarantee("work-3")
def test_a_call_without_a_seed_draws_numbers_of_its_drone_again():
    with poly.Pool(1) as pool:
        pool.doit("import random; random.seed(5); here = random.getstate()")
        pool.doit("import numpy.random; numpy.random.seed(5)")
        for _ in range(2):
            assert list(pool.map(draw, range(200), seed=42))[:30] == EXPECTED
        assert pool.doit("random.getstate() == here")
        assert pool.doit(lambda: float(np.random.rand())) == float(np.random.RandomState(5).rand())
        assert pool.options(seed=42).doit(draw) == EXPECTED[0]
        own = {pool.doit(lambda: float(polycephaly.rng().random())) for _ in range(3)}
        assert len(own | {EXPECTED[0][4]}) == 4


@pytest.fixture
def restored():
    own = random.getstate(), np.random.get_state()
    yield
    random.setstate(own[0])
    np.random.set_state(own[1])


@local_only
@pytest.mark.guarantee("work-24")
def test_the_inline_engine_draws_the_same_numbers_and_gives_the_callers_own_back(restored):
    random.seed(1)
    np.random.seed(1)
    want = random.Random(1), np.random.RandomState(1)

    def draw_once_or_fail(i):
        if i == 1:
            raise ValueError
        return draw()

    def drawn_here():
        assert (random.random(), np.random.rand()) == (want[0].random(), want[1].rand())

    with polycephaly.Pool(2, engine="inline") as pool:
        assert list(pool.map(draw, range(600), seed=42))[:30] == EXPECTED
        drawn_here()
        for i in range(3):
            pool.options(seed=42).promise(draw_once_or_fail, i).exception()
            drawn_here()
        assert [each for each, _ in pool.map(draw_in_a_coroutine, range(3), seed=42)] == EXPECTED[
            :3
        ]
        drawn_here()


@local_only
def test_an_inline_pool_in_a_seeded_call_does_not_disturb_it():
    def draw_below(_):
        with polycephaly.Pool(1, engine="inline") as pool:
            below = list(pool.map(draw, range(3), seed=7))
        return below, draw()

    with poly.Pool(2) as pool:
        drawn = list(pool.map(draw_below, range(3), seed=42))
    assert drawn == [([expected(7, i) for i in range(3)], each) for each in EXPECTED[:3]]


@local_only
def test_another_global_generator_and_torchs_default_one_are_seeded(monkeypatch):
    class Generator:  # as that of torch
        state = "own"

        def manual_seed(self, number):
            self.state = number

        def get_state(self):
            return self.state

        def set_state(self, state):
            self.state = state

    torch = SimpleNamespace(default_generator=Generator())
    monkeypatch.setitem(sys.modules, "torch", torch)
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    own = str(np.random.get_state(legacy=False))

    def seeded(_):
        return sys.modules["torch"].default_generator.state, float(np.random.rand())

    try:
        with polycephaly.Pool(engine="inline") as pool:
            drawn = list(pool.map(seeded, range(3), seed=42))
        assert torch.default_generator.state == "own"
        assert str(np.random.get_state(legacy=False)) == own
    finally:
        np.random.set_bit_generator(before)
    for i, (state, number) in enumerate(drawn):
        words = state_words(42, (), i)
        assert state == words[8] | words[9] << 32
        assert number == np.random.Generator(np.random.PCG64(words[4:8])).random()


# -- `poly.rng()` ----------------------------------------------------------------------------------


@local_only
def test_a_generator_belongs_to_its_call_and_spawns_as_that_of_numpy():
    def spawned(_):
        assert polycephaly.rng() is polycephaly.rng()
        drawn = []
        thread = threading.Thread(target=lambda: drawn.append(polycephaly.rng().random()))
        thread.start()
        thread.join()
        return [float(each.random()) for each in polycephaly.rng().spawn(2)], float(drawn[0])

    async def in_green_threads(_):
        own = polycephaly.rng()
        assert all(each is own for each in await green.par(polycephaly.rng, polycephaly.rng))
        assert await green.call(polycephaly.rng) is own
        return float(own.random())

    with poly.Pool(1) as pool:
        ((first, alone),) = pool.map(spawned, [0], seed=42)
        assert list(pool.map(in_green_threads, [0], seed=42)) == [EXPECTED[0][4]]
    children = np.random.SeedSequence(42, spawn_key=(0,)).spawn(2)
    assert first == [float(np.random.default_rng(each).random()) for each in children]
    assert alone != EXPECTED[0][4]


@local_only
def test_elsewhere_each_generator_is_new():
    assert len({polycephaly.rng().random() for _ in range(3)}) == 3
    assert isinstance(polycephaly.rng(), np.random.Generator)
    assert asyncio.run(asyncio.to_thread(polycephaly.rng)) is not polycephaly.rng()


@local_only
def test_without_numpy_an_error_names_the_requirement(monkeypatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'numpy>=1\.26'") as raised:
        polycephaly.rng()
    assert raised.value.name == "numpy"


# -- what a seed may be ----------------------------------------------------------------------------

NUMBERS = st.integers(0, 2**130)


@local_only
@given(st.one_of(NUMBERS, st.lists(NUMBERS, min_size=1).map(tuple)), st.lists(NUMBERS), NUMBERS)
def test_the_words_are_those_of_numpys_own_seed_sequence(entropy, spawn_key, index):
    given = entropy if isinstance(entropy, int) else list(entropy)
    sequence = np.random.SeedSequence(given, spawn_key=(*spawn_key, index))
    assert state_words(entropy, tuple(spawn_key), index) == list(sequence.generate_state(10))


@local_only
@pytest.mark.parametrize(
    "seed, entropy",
    [
        (np.int64(42), 42),
        (np.array(42), 42),
        (0, 0),
        (2**200, 2**200),
        ([1, 2], [1, 2]),
        ((2**70, 0), [2**70, 0]),
        (np.array([1, 2], dtype="uint8"), [1, 2]),
        (range(6), [0, 1, 2, 3, 4, 5]),
        (np.random.SeedSequence([1, 2]), [1, 2]),
    ],
)
def test_a_seed_is_what_numpy_takes_for_one(seed, entropy):
    with polycephaly.Pool(engine="inline") as pool:
        assert list(pool.map(draw, [0], seed=seed)) == [expected(entropy, 0)]


@local_only
def test_a_seed_sequence_is_left_as_it_is_and_a_child_of_it_is_another_seed():
    sequence = np.random.SeedSequence(42)
    (child,) = sequence.spawn(1)
    with polycephaly.Pool(engine="inline") as pool:
        for _ in range(2):
            assert list(pool.map(draw, range(2), seed=sequence)) == EXPECTED[:2]
        assert list(pool.map(draw, [0], seed=child)) == [expected(42, 0, (0,))]
    assert sequence.n_children_spawned == 1


WHAT = "seed is a whole number, a sequence of them, or a numpy.random.SeedSequence, not "


@local_only
@pytest.mark.parametrize(
    "seed, kind, text",
    [
        (-1, ValueError, "must not be negative, and is -1: use abs"),
        ([3, -1], ValueError, r"must not be negative, and is \[3, -1\]"),
        ([], ValueError, "an empty list: give at least one number"),
        (1.5, TypeError, f"{WHAT}1.5: use int"),
        ([1.5], TypeError, f"{WHAT}1.5"),
        (True, TypeError, f"{WHAT}True"),
        ("text", TypeError, f"{WHAT}'text': .*list\\(text.encode\\(\\)\\)"),
        ({1}, TypeError, f"{WHAT}{{1}}"),
        (np.zeros((2, 2), int), TypeError, f"{WHAT}array"),
        (np.random.default_rng(1), TypeError, r"a Generator.*int\(rng.integers\(2\*\*63\)\)"),
        (random.Random(1), TypeError, r"a Random.*rng.getrandbits\(64\)"),
        (np.random.SeedSequence(1, pool_size=8), ValueError, "pool_size=8.*without pool_size"),
    ],
)
def test_what_is_no_seed_is_refused_at_the_call(seed, kind, text):
    with polycephaly.Pool(engine="inline") as pool:
        for use in (pool.options, lambda **how: pool.map(draw, [1], **how)):
            with pytest.raises(kind, match=text):
                use(seed=seed)
