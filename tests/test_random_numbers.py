"""Each drone draws random numbers of its own, though it is a copy: with `random` and NumPy's global
functions."""

import random
import threading

import pytest
from scripts import output_of

import polycephaly as poly

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip(
    "numpy.random"
)  # it is loaded lazily; here the drones are to have it from the image


def draw(_=None):
    return random.random(), float(np.random.rand())


def draw_below(_=None):
    with poly.Drone() as drone:
        return drone.doit(draw)


def differ(drawn):
    return all(len(set(numbers)) == len(drawn) for numbers in zip(*drawn, strict=True))


@pytest.fixture
def seeded():
    """What is copied is a state that somebody has set."""
    random.seed(1)
    np.random.seed(1)
    yield
    random.seed()
    np.random.seed()


@pytest.mark.guarantee("work-3")
def test_drones_replacements_and_fresh_drones_draw_numbers_of_their_own(seeded):
    with poly.Pool(2, max_tasks=1) as pool:
        drawn = [each.value for _ in range(3) for each in pool.everywhere(draw)]
    drawn += [poly.doit(draw) for _ in range(3)]
    assert differ(drawn)
    assert differ([*drawn, draw()])


@pytest.mark.guarantee("work-3")
def test_drones_of_drones_do_too(seeded):
    with poly.Pool(2) as pool:
        assert differ(
            [
                each.value
                for work in (draw, draw_below, draw_below)
                for each in pool.everywhere(work)
            ]
        )


def test_forks_of_a_spawned_image_do_too():
    assert (
        output_of("""
        import numpy.random
        import polycephaly as poly
        def draw():
            return float(numpy.random.rand())
        if __name__ == "__main__":
            with poly.Pool(2, start="spawn", max_tasks=1) as pool:
                print(len({each.value for _ in range(2) for each in pool.everywhere(draw)}))
    """)
        == "4\n"
    )


def test_what_an_initializer_seeds_stays_seeded():
    with poly.Pool(2, initializer=np.random.seed, initargs=(7,)) as pool:
        drawn = {each.value[1] for each in pool.everywhere(draw)}
    assert drawn == {np.random.RandomState(7).rand()}


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="this NumPy has only one")
def test_another_global_generator_is_seeded_too():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with poly.Pool(2) as pool:
            assert differ([each.value for _ in range(2) for each in pool.everywhere(draw)])
    finally:
        np.random.set_bit_generator(before)


def test_a_drone_starts_though_a_thread_of_the_main_image_was_drawing():
    """That thread holds NumPy's lock, of which the drone has a copy that nobody releases."""
    held, over = threading.Event(), threading.Event()

    def hold():
        with np.random.mtrand._rand._bit_generator.lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with poly.Pool(1) as pool:
            assert pool.promise(abs, -1).result(30) == 1
    finally:
        over.set()
        thread.join()
