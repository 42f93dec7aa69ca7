"""Steps that lead to more of their kind are all done, by the outermost, whatever happens to any of
them."""

from __future__ import annotations

import os
import random
import signal
import threading

import pytest

from polycephaly.promises.trampoline import Trampoline

MANY = 400


@pytest.mark.parametrize("deep", [1, 3])
def test_each_is_done_once_and_none_too_deep(deep):
    cascade, done, depths, depth = Trampoline(deep), [], [], 0

    def step(number):
        nonlocal depth
        depth += 1
        depths.append(depth)
        done.append(number)
        for follower in (2 * number, 2 * number + 1):
            if follower < MANY:
                cascade.run(step, follower)
        depth -= 1

    cascade.run(step, 1)
    assert sorted(done) == list(range(1, MANY))
    assert max(depths) == deep


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt(), SystemExit(3)])
def test_what_one_raises_comes_when_all_are_done(error):
    cascade, done = Trampoline(1), []

    def step(number):
        done.append(number)
        if number < MANY:
            cascade.run(step, number + 1)
        if number == MANY // 2:
            raise error

    for _ in range(2):  # and it is as good as new
        with pytest.raises(type(error)):
            cascade.run(step, 1)
    assert done == list(range(1, MANY + 1)) * 2


def test_each_thread_has_its_own():
    cascade, done = Trampoline(1), []

    def in_a_thread():
        cascade.run(done.append, "there")

    def step():
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
        done.append("here")

    cascade.run(step)
    assert done == ["there", "here"]


def test_an_interrupt_at_any_moment_leaves_none_undone():
    seed = random.randrange(1 << 32)
    print("seed", seed)
    dice = random.Random(seed)

    def interrupt(*_):
        raise KeyboardInterrupt

    cascade, interrupted = Trampoline(1), 0
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(1000):
            begun, done = [], []

            def step(number, begun=begun, done=done):
                begun.append(number)
                if number < MANY:
                    cascade.run(step, number + 1)
                done.append(number)

            try:
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 3e-4))
                cascade.run(step, 1)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
            assert not cascade._postponed and not cascade._depth
            assert len(begun) - len(done) <= 1  # the one in which it came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted


@pytest.mark.parametrize("deep", [1, 3])
def test_a_fork_within_a_step_begins_anew(deep):
    cascade = Trampoline(deep)
    statuses = []

    def step(number):
        if number < deep:
            cascade.run(step, number + 1)
            return
        cascade.run(statuses.append, "put off")
        pid = os.fork()
        if pid == 0:
            done = []
            cascade.run(done.append, 1)
            os._exit(0 if done == [1] and not statuses else 1)
        statuses.append(os.waitpid(pid, 0)[1])

    cascade.run(step, 1)
    assert statuses == [0, "put off"]
