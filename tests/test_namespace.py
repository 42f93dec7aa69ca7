"""A drone's namespace: push, pull and indexing."""

import pytest
from engines import on_each_engine, poly

pytestmark = on_each_engine


@pytest.mark.guarantee("work-10")
def test_what_is_pushed_can_be_used_and_pulled(drone):
    drone.push({"a": 1, "b": [2, 3]})
    assert drone.doit("a + len(b)") == 3
    assert drone.pull("b", "a") == ([2, 3], 1)
    assert drone.pull("a") == (1,) and drone.pull() == ()


@pytest.mark.guarantee("work-10")
def test_indexing_pushes_and_pulls(drone):
    drone["x"] = {"k": (1, 2)}
    assert drone["x"] == {"k": (1, 2)}
    drone.doit("x['k'] += (3,)")
    assert drone["x"] == {"k": (1, 2, 3)}


def test_a_name_that_is_not_there_is_an_error_that_names_it(drone):
    for kind in (KeyError, NameError):
        with pytest.raises(kind, match="name 'nowhere' is not defined") as raised:
            drone["nowhere"]
        assert raised.value.name == "nowhere"
        with pytest.raises(kind, match=r"^name 'nowhere' is not defined"):
            drone.pull("nowhere")


def test_it_is_asked_for_a_name_and_cannot_be_walked_through(drone):
    drone["here"] = None
    assert "here" in drone and "nowhere" not in drone and 0 not in drone
    with pytest.raises(TypeError, match="'Drone' object is not iterable"):
        list(drone)


def test_a_name_that_is_no_string_is_refused(drone):
    with pytest.raises(TypeError, match="is a string, not 3"):
        drone[3] = 1
    with pytest.raises(KeyError):
        drone[3]


def test_functions_and_lambdas_can_be_pushed(drone):
    n = 10
    drone["add"] = lambda m: m + n
    assert drone.doit("add(5)") == 15
    assert drone.doit(lambda: [1]) == [1]


def test_what_was_pushed_is_what_it_was_then(drone):
    names = [1]
    drone["names"] = names
    names.append(2)
    assert drone["names"] == [1]


def test_pushed_names_shadow_builtins_only_there(drone):
    drone["len"] = 5
    assert drone["len"] == 5 and len([1]) == 1
    drone.doit("del len")


def test_what_cannot_be_pushed_raises_here_and_the_drone_lives(drone):
    import threading

    with pytest.raises(TypeError):
        drone["lock"] = threading.Lock()
    assert drone.doit("1") == 1


def test_a_value_that_does_not_pickle_cannot_be_pulled_and_the_drone_lives(drone):
    drone.doit("import threading; lock = threading.Lock()")
    with pytest.raises(TypeError):
        drone["lock"]
    assert drone.doit("lock.locked()") is False


def test_a_pools_drone_is_used_like_any_drone():
    with poly.Pool(2) as pool:
        one, two = pool.drones
        one["x"], two["x"] = 1, 2
        assert (one["x"], two["x"], one.doit("x")) == (1, 2, 1)
        assert one == pool.drones[0] and one != two and len({one, *pool.drones}) == 2


def test_large_values_travel_both_ways(drone):
    blob = bytes(range(256)) * 40_000
    drone["blob"] = blob
    assert drone.doit("len(blob)") == len(blob) and drone["blob"] == blob
