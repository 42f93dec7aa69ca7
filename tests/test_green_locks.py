"""Semaphore, Lock, Event and Barrier: fair, exact when somebody is cancelled, and of use to plain
threads."""

import pickle
import random
import threading
from concurrent.futures import CancelledError

import pytest
from greens import outcome, run, turns

from polycephaly import green
from polycephaly.green import Barrier, Event, Lock, Semaphore

MAKERS = pytest.mark.parametrize("make", [Lock, Semaphore, lambda: Semaphore(1)])


async def hold(lock, log, name, until=None):
    async with lock:
        log.append(name)
        if until is not None:
            await until.wait()
        else:
            await turns(1)


# -- Semaphore and Lock ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_semaphore_lets_in_so_many_at_a_time(n):
    async def main():
        semaphore, inside, most = Semaphore(n), 0, 0

        async def visitor():
            nonlocal inside, most
            async with semaphore:
                inside += 1
                most = max(most, inside)
                await turns(2)
                inside -= 1

        async with green.Group() as group:
            for _ in range(20):
                group.spawn(visitor)
        assert (most, inside, semaphore.value) == (n, 0, n)

    run(main)


@pytest.mark.guarantee("green-13")
@MAKERS
def test_who_came_first_is_let_in_first(make):
    async def main():
        lock, log = make(), []
        async with green.Group() as group:
            for i in range(20):
                group.spawn(hold, lock, log, i)
        assert log == list(range(20))

    run(main)


@MAKERS
def test_nobody_overtakes_those_who_wait(make):
    async def main():
        lock, log = make(), []
        await lock.acquire()
        waiting = green.spawn(hold, lock, log, "waited")
        await turns()
        lock.release()
        await lock.acquire()  # at once, before the other has run
        log.append("came later")
        lock.release()
        await waiting
        assert log == ["waited", "came later"]

    run(main)


def test_a_semaphore_may_be_shut_at_first():
    async def main():
        semaphore, log = Semaphore(0), []
        waiting = green.spawn(hold, semaphore, log, "in")
        await turns()
        assert log == [] and semaphore.value == 0
        semaphore.release()
        await waiting
        assert log == ["in"] and semaphore.value == 1

    run(main)


def test_a_semaphore_of_less_than_nothing_is_a_value_error():
    with pytest.raises(ValueError, match="-1"):
        Semaphore(-1)


@MAKERS
def test_the_block_may_fail_and_the_lock_is_released(make):
    async def main():
        lock = make()
        with pytest.raises(KeyError):
            async with lock:
                raise KeyError
        await lock.acquire()
        lock.release()

    run(main)


@pytest.mark.guarantee("green-13")
@MAKERS
def test_a_waiter_that_is_cancelled_leaves_the_line(make):
    async def main():
        lock, log = make(), []
        await lock.acquire()
        threads = [green.spawn(hold, lock, log, i) for i in range(4)]
        await turns()
        threads[0].cancel(), threads[2].cancel()
        await turns()
        lock.release()
        assert [await outcome(each) for each in threads] == [
            CancelledError,
            None,
            CancelledError,
            None,
        ]
        assert log == [1, 3]

    run(main)


@MAKERS
def test_who_is_cancelled_when_it_was_let_in_already_lets_the_next_one_in(make):
    async def main():
        lock, log, never = make(), [], Event()
        await lock.acquire()
        first, second = green.spawn(hold, lock, log, 1, never), green.spawn(hold, lock, log, 2)
        await turns()
        lock.release()
        first.cancel()
        assert await outcome(first) is CancelledError
        await second
        assert log == [1, 2]
        async with lock:
            pass

    run(main)


@MAKERS
def test_who_leaves_from_the_middle_of_a_long_line_leaves_the_others_in_their_order(make):
    async def main():
        rng, lock, log = random.Random(3), make(), []

        async def visitor(i):
            try:
                await lock.acquire()
            except green.Cancelled:
                if i % 2:
                    raise
                await lock.acquire()  # at the end of the line, again
            log.append(i)
            lock.release()

        await lock.acquire()
        threads = [green.spawn(visitor, i) for i in range(300)]
        await turns()
        gone = rng.sample(range(300), 250)
        for i in gone:
            threads[i].cancel()
        await turns()
        again = [i for i in gone if i % 2 == 0]
        for i in again[:20]:
            threads[i].cancel()
        await turns()
        assert len(lock._queue) == 50 + len(again) - 20
        lock.release()
        await turns(400)
        assert log == [i for i in range(300) if i not in gone] + again[20:]

    run(main)


@MAKERS
def test_when_holders_and_waiters_are_cancelled_at_random_the_lock_stays_whole(make):
    async def main():
        rng, lock, inside = random.Random(5), make(), 0

        async def visitor():
            nonlocal inside
            while True:
                async with lock:
                    inside += 1
                    assert inside == 1
                    try:
                        await turns(rng.randrange(3))
                    finally:
                        inside -= 1
                await turns(rng.randrange(2))

        threads = []
        for _ in range(300):
            threads.append(green.spawn(visitor))
            await turns(rng.randrange(3))
            if len(threads) > 4:
                threads.pop(rng.randrange(len(threads))).cancel()
        for each in threads:
            each.cancel()
            assert await outcome(each) is CancelledError
        await lock.acquire()
        assert lock.value == 0 and inside == 0

    run(main)


@MAKERS
def test_plain_threads_use_with(make):
    lock, count = make(), 0

    def plain():
        nonlocal count
        for _ in range(50):
            with lock:
                mine = count
                threading.Event().wait(0)
                count = mine + 1

    async def greens():
        nonlocal count
        for _ in range(50):
            async with lock:
                mine = count
                await turns(1)
                count = mine + 1

    async def main():
        await green.par(plain, greens, plain, greens)
        assert count == 200 and lock.value == 1

    run(main)


@MAKERS
def test_a_plain_thread_may_release_what_a_green_thread_waits_for(make):
    async def main():
        lock, log = make(), []
        await lock.acquire()
        waiting = green.spawn(hold, lock, log, "in")
        await turns()
        await green.spawn(lock.release)
        await waiting
        assert log == ["in"]

    run(main)


@MAKERS
def test_with_inside_a_coroutine_says_what_to_use_instead(make):
    async def main():
        with pytest.raises(RuntimeError, match="async with"), make():
            pass

    run(main)


@MAKERS
def test_acquire_outside_of_green_threads_says_what_to_use_instead(make):
    with pytest.raises(RuntimeError, match=r"green\.run"):
        make().acquire().send(None)


@MAKERS
def test_a_plain_function_that_waits_for_a_lock_can_be_cancelled(make):
    def plain(lock):
        with lock:
            pass

    async def main():
        lock = make()
        async with lock:
            waiting = green.spawn(plain, lock)
            while not lock._queue:
                await green.sleep(0.001)
            waiting.cancel()  # false if its native thread does not wait yet
            assert await outcome(waiting) is CancelledError
        await lock.acquire()
        assert lock.value == 0

    run(main)


def test_a_lock_says_whether_it_is_locked():
    async def main():
        lock = Lock()
        assert not lock.locked()
        async with lock:
            assert lock.locked()
            waiting = green.spawn(lock.acquire)
            await turns()
        assert lock.locked()  # it was handed on
        await waiting
        lock.release()
        assert not lock.locked()

    run(main)


def test_their_reprs_say_how_they_are_and_how_many_wait():
    async def main():
        lock, semaphore, event, barrier = (
            Lock(),
            green.Semaphore(2),
            green.Event(),
            green.Barrier(3),
        )
        await lock.acquire()
        waiting = [
            green.spawn(each) for each in (lock.acquire, event.wait, barrier.sync, barrier.sync)
        ]
        await turns()
        told = [repr(each).partition(" at ")[0] for each in (lock, semaphore, event, barrier)]
        assert told[:2] == ["<Lock held, 1 waiting", "<Semaphore 2"]
        assert told[2:] == ["<Event not set, 1 waiting", "<Barrier of 3, 2 waiting"]
        lock.release(), event.set(), barrier.resign()
        for each in waiting:
            await each
        lock.release()
        assert repr(lock).startswith("<Lock free at") and repr(event).startswith("<Event set at")

    run(main)


def test_a_lock_that_nobody_holds_cannot_be_released():
    async def main():
        lock = Lock()
        with pytest.raises(RuntimeError, match="was not held"):
            lock.release()
        async with lock:
            pass
        with pytest.raises(RuntimeError, match="was not held"):
            lock.release()

    run(main)


def test_a_plain_thread_that_releases_a_lock_twice_is_told():
    lock = Lock()
    for _ in range(20):
        green.run(lock.acquire)
        lock.release()
        assert not lock.locked()
        with pytest.raises(RuntimeError, match="was not held"):
            lock.release()


# -- Event -----------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-13")
def test_all_who_wait_for_an_event_go_on_in_the_order_of_their_coming():
    async def main():
        event, log = Event(), []

        async def waiter(i):
            assert await event.wait() is None
            log.append(i)

        async with green.Group() as group:
            for i in range(10):
                group.spawn(waiter, i)
            await turns()
            assert log == [] and not event.is_set()
            event.set()
            assert event.is_set()
        assert log == list(range(10))
        await event.wait()

    run(main)


def test_an_event_can_be_cleared_and_set_again():
    async def main():
        event = Event()
        event.set(), event.set()
        event.clear()
        assert not event.is_set()
        waiting = green.spawn(event.wait)
        await turns()
        assert not waiting.done()
        event.set()
        await waiting

    run(main)


def test_who_waits_when_an_event_is_set_and_cleared_goes_on_and_who_comes_later_waits():
    async def main():
        event = Event()
        first = green.spawn(event.wait)
        await turns()
        event.set()
        event.clear()
        second = green.spawn(event.wait)
        await first
        await turns()
        assert not second.done()

    run(main)


def test_the_same_holds_when_a_plain_thread_sets_and_clears_it():
    async def main():
        event = Event()
        for _ in range(30):
            first = green.spawn(event.wait)
            await turns()

            def set_and_clear():
                event.set()
                event.clear()

            thread = threading.Thread(target=set_and_clear)
            thread.start()
            thread.join()  # the scheduler stands still: what was posted has not been done
            second = green.spawn(event.wait)
            await first
            await turns()
            assert not second.done()
            second.cancel()

    run(main)


def test_a_plain_thread_may_set_an_event():
    async def main():
        event = Event()
        waiting = [green.spawn(event.wait) for _ in range(3)]
        await turns()
        await green.spawn(event.set)
        for each in waiting:
            await each

    run(main)


@pytest.mark.guarantee("green-13")
def test_who_is_cancelled_waiting_for_an_event_does_not_disturb_the_others():
    async def main():
        event = Event()
        threads = [green.spawn(event.wait) for _ in range(3)]
        await turns()
        threads[1].cancel()
        await turns()
        event.set()
        assert [await outcome(each) for each in threads] == [None, CancelledError, None]

    run(main)


# -- Barrier ---------------------------------------------------------------------------------------


@pytest.mark.guarantee("green-13")
def test_a_barrier_holds_all_until_the_last_has_come_and_again():
    async def main():
        barrier, log = Barrier(3), []

        async def runner(i):
            for phase in range(5):
                log.append(phase)
                await turns(i)
                await barrier.sync()

        await green.par(*(lambda i=i: runner(i) for i in range(3)))
        assert log == sorted(log) and len(log) == 15
        assert (barrier.enrolled, barrier.waiting) == (3, 0)

    run(main)


def test_each_is_told_in_which_place_it_came():
    async def main():
        barrier = Barrier(3)
        threads = [green.spawn(barrier.sync) for _ in range(3)]
        assert [await each for each in threads] == [0, 1, 2]

    run(main)


def test_places_are_told_without_gaps_when_somebody_was_cancelled():
    async def main():
        barrier = Barrier(3)
        threads = [green.spawn(barrier.sync) for _ in range(2)]
        await turns()
        threads[0].cancel()
        await turns()
        assert barrier.waiting == 1
        more = [green.spawn(barrier.sync) for _ in range(2)]
        assert [await each for each in [threads[1], *more]] == [0, 1, 2]

    run(main)


def test_a_barrier_for_one_holds_nobody():
    async def main():
        barrier = Barrier(1)
        assert [await barrier.sync() for _ in range(3)] == [0, 0, 0]

    run(main)


@pytest.mark.parametrize("n", [0, -1])
def test_a_barrier_for_nobody_is_a_value_error(n):
    with pytest.raises(ValueError, match="at least 1 green thread"):
        Barrier(n)


@pytest.mark.parametrize("n", [1.0, "2", None, True])
def test_a_barrier_for_no_whole_number_is_a_type_error(n):
    with pytest.raises(TypeError, match="number"):
        Barrier(n)


def test_who_resigns_as_the_last_lets_the_others_go_on():
    async def main():
        for resign in (lambda b: b.resign(), lambda b: b.resign(1)):
            barrier = Barrier(3)
            threads = [green.spawn(barrier.sync) for _ in range(2)]
            await turns()
            assert not threads[0].done()
            resign(barrier)
            assert [await each for each in threads] == [0, 1]
            assert (barrier.enrolled, barrier.waiting) == (2, 0)

    run(main)


def test_a_plain_thread_may_resign_and_enroll():
    async def main():
        barrier = Barrier(2)
        waiting = green.spawn(barrier.sync)
        await turns()
        await green.spawn(barrier.resign)
        await waiting
        await green.spawn(barrier.enroll, 2)
        assert barrier.enrolled == 3

    run(main)


def test_who_is_enrolled_later_is_waited_for():
    async def main():
        barrier = Barrier(2)
        first = green.spawn(barrier.sync)
        await turns()
        barrier.enroll()
        second = green.spawn(barrier.sync)
        await turns()
        assert barrier.waiting == 2 and not first.done()
        assert await barrier.sync() == 2
        await first, await second

    run(main)


def test_who_waits_cannot_be_resigned():
    async def main():
        barrier = Barrier(2)
        waiting = green.spawn(barrier.sync)
        await turns()
        with pytest.raises(ValueError, match="resign"):
            barrier.resign(2)
        barrier.resign()
        await waiting

    run(main)


def test_a_barrier_that_all_have_left_says_so():
    async def main():
        barrier = Barrier(1)
        barrier.resign()
        with pytest.raises(RuntimeError, match="enroll"):
            await barrier.sync()
        barrier.enroll()
        assert await barrier.sync() == 0

    run(main)


def test_who_is_cancelled_at_a_barrier_is_enrolled_still():
    async def main():
        barrier = Barrier(2)
        gone = green.spawn(barrier.sync)
        await turns()
        gone.cancel()
        assert await outcome(gone) is CancelledError
        assert (barrier.enrolled, barrier.waiting) == (2, 0)
        other = green.spawn(barrier.sync)
        await turns()
        assert not other.done()
        barrier.resign()
        assert await other == 0

    run(main)


def test_an_event_set_by_a_plain_thread_at_any_moment_wakes_who_waits():
    async def wait(event, gate):
        await gate.wait()
        await event.wait()

    for _ in range(150):
        events = [green.Event() for _ in range(5)]
        gate = green.Event()
        waiting = [green.spawn(wait, event, gate) for event in events]
        gate.set()
        for event in events:
            event.set()
        for thread in waiting:
            thread.result(30)


@pytest.mark.parametrize("wrong", [1.5, True, "a"])
def test_a_number_that_is_none_is_refused(wrong):
    with pytest.raises(TypeError, match="number"):
        Semaphore(wrong)
    for change in (Barrier(2).enroll, Barrier(2).resign):
        with pytest.raises(TypeError, match="number"):
            change(wrong)
        with pytest.raises(ValueError, match="number"):
            change(-1)


@pytest.mark.parametrize(
    "made", [Lock(), Semaphore(2), Event(), Barrier(2)], ids=lambda made: type(made).__name__
)
def test_they_do_not_leave_their_process(made):
    with pytest.raises(TypeError, match=f"green.{type(made).__name__} is for .* one process"):
        pickle.dumps(made)
