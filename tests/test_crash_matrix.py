"""The crash matrix: every way to fail, in every place where code of users runs; in drones, with
forked and with spawned ones.

Each promise is answered within 10 s, neighbours are unharmed, and the pool goes on; where it
is the controller's own process that a fault ends, nothing is left of it."""

import gc
import logging

import pytest
from engines import on_ray, poly, told
from faults import (
    ENDS_A_PROCESS,
    HOWS,
    STATUS,
    Failed,
    FailsToPickle,
    FailsToUnpickle,
    FailsWhenCollected,
    collect_what_fails,
    fail,
    give_what_fails_to_pickle,
    give_what_fails_to_unpickle,
    hold_until,
    take,
    wait_for,
)
from scripts import Script

SOON = 60.0  # seconds: ten, on a machine that lets us run
STARTS = ("fork", "spawn")
ERRORS = {"raise": Failed, "sys.exit": SystemExit}

IN_A_DRONE = {
    "unpickling the arguments": (take, FailsToUnpickle),
    "running": (fail, str),
    "pickling the result": (give_what_fails_to_pickle, str),
    "__del__ during garbage collection": (collect_what_fails, str),
}


def submit_among_neighbours(pool, place, how):
    work, make = IN_A_DRONE[place]
    before = [pool.promise(abs, -i) for i in range(50)]
    it = pool.promise(work, make(how))
    after = [pool.promise(abs, -i) for i in range(50)]
    return it, before + after


def check_neighbours(neighbours):
    assert [p.result(SOON) for p in neighbours] == [*range(50), *range(50)]


def check_in_a_drone(pool, place, how):
    it, neighbours = submit_among_neighbours(pool, place, how)
    error = it.exception(SOON)
    if how in ENDS_A_PROCESS:
        assert isinstance(error, poly.DroneDied)
        assert error.exitcode == told(STATUS[how])
    elif place.startswith("__del__"):
        assert it.result() == "collected"  # what a finalizer raises is reported, and harms nobody
    else:
        assert isinstance(error, ERRORS[how])
    check_neighbours(neighbours)


@pytest.mark.guarantee("death-7")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("place", IN_A_DRONE)
def test_in_a_drone(place, how, start):
    with poly.Pool(2, start=start) as pool:
        for _ in range(3):
            check_in_a_drone(pool, place, how)
        assert len({drone.pid for drone in pool.drones}) == 2


@on_ray
@pytest.mark.parametrize("place", IN_A_DRONE)
def test_in_a_drone_on_ray(place):
    with poly.Pool(2, output="discard") as pool:
        for how in HOWS:
            check_in_a_drone(pool, place, how)
        assert len({drone.pid for drone in pool.drones}) == 2


@pytest.mark.guarantee("death-7")
@pytest.mark.parametrize("how", ERRORS)
def test_pickling_the_arguments(how):
    with poly.Pool(2) as pool:
        before = [pool.promise(abs, -i) for i in range(50)]
        if how == "raise":
            it = pool.promise(take, FailsToPickle(how))
            assert isinstance(it.exception(SOON), Failed)
        else:  # the script's own code ends the script, as it would anywhere
            with pytest.raises(SystemExit):
                pool.promise(take, FailsToPickle(how))
        check_neighbours(before + [pool.promise(abs, -i) for i in range(50)])


@pytest.mark.guarantee("death-7")
@pytest.mark.parametrize("how", ERRORS)
def test_unpickling_the_result(how):
    with poly.Pool(2) as pool:
        before = [pool.promise(abs, -i) for i in range(50)]
        it = pool.promise(give_what_fails_to_unpickle, how)
        after = [pool.promise(abs, -i) for i in range(50)]
        assert isinstance(it.exception(SOON), ERRORS[how])
        check_neighbours(before + after)


@pytest.mark.guarantee("death-7")
@pytest.mark.parametrize("how", ERRORS)
def test_in_a_done_callback(how, caplog, tmp_path):
    asked = tmp_path / "asked"
    with poly.Pool(2) as pool, caplog.at_level(logging.ERROR):
        called = []

        def callback(promise):
            called.append(promise)
            fail(how)

        it = pool.promise(hold_until, str(asked))
        it.add_done_callback(callback)
        neighbours = [pool.promise(abs, -i) for i in range(100)]
        asked.touch()
        assert it.result(SOON) == "held"
        assert [p.result(SOON) for p in neighbours] == list(range(100))
        wait_for(lambda: called)  # by the thread for callbacks
        settled = pool.promise(take, how)
        settled.result(SOON)
        if how == "raise":
            settled.add_done_callback(callback)
        else:  # called here and now, so it is this thread's
            with pytest.raises(SystemExit):
                settled.add_done_callback(callback)
        assert called == [it, settled]
        assert "callback" in caplog.text


@pytest.mark.guarantee("death-7")
@pytest.mark.parametrize("how", ERRORS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_in_a_finalizer_of_the_controller(how):
    with poly.Pool(2) as pool:
        promises = []
        for i in range(300):
            FailsWhenCollected(how)
            promises.append(pool.promise(abs, -i))
            if i % 10 == 0:
                gc.collect()
        assert [p.result(SOON) for p in promises] == list(range(300))
        gc.collect()


CONTROLLER = """
    import gc, sys
    import polycephaly as poly
    from faults import *

    PLACES = {
        "pickling the arguments": lambda: pool.doit(take, FailsToPickle(how)),
        "unpickling the result": lambda: pool.doit(give_what_fails_to_unpickle, how),
        "in a done-callback": lambda: (
            pool.promise(take, 1).add_done_callback(lambda _: fail(how)), block_for_ever()
        ),
        "__del__ during garbage collection": lambda: (FailsWhenCollected(how), gc.collect()),
    }

    if __name__ == "__main__":
        place, how, start, up = sys.argv[1:]
        pool = poly.Pool(2, start=start)
        pool.promise(block_for_ever, up)
        wait_for(lambda: lines(up))
        PLACES[place]()
        print("went on")
"""


@pytest.mark.parametrize("how", ENDS_A_PROCESS)
@pytest.mark.parametrize(
    ("place", "start"),
    [
        ("pickling the arguments", "fork"),
        ("unpickling the result", "fork"),
        ("in a done-callback", "fork"),
        ("in a done-callback", "spawn"),
        ("__del__ during garbage collection", "fork"),
    ],
)
def test_what_ends_the_controller_ends_everything(place, how, start, tmp_path):
    with Script(CONTROLLER, place, how, start, str(tmp_path / "up")) as script:
        assert script.wait() == STATUS[how], script.process.stderr.read()
        assert not script.left()
