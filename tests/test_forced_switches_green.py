"""The bell and the fast paths of channels: other threads wake the owner of green threads, serve one
of these, or fork, with a switch at every bytecode. Nothing is lost or doubled: the owner wakes."""

import sys
from _thread import allocate_lock, start_new_thread
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from types import SimpleNamespace

import pytest
from switches import PATIENCE, Telling, every_meeting

from polycephaly import ChannelClosed, green
from polycephaly.green import channel as channels
from polycephaly.green import scheduler as scheduling
from polycephaly.green import thread as threads
from polycephaly.green import waiting


@pytest.fixture
def scheduler(monkeypatch):
    """Not the process's own. Its owner gives up as soon as there is nothing to do. The next
    runs in the thread that rings for it."""
    own, made = scheduling.scheduler, scheduling.Scheduler()
    made.workers = SimpleNamespace(start_urgently=lambda job: job() or True)
    for name in [each for each in sys.modules if each.startswith("polycephaly.green")]:
        for attribute, value in {"scheduler": made, "ready": made.ready, "bell": made.bell}.items():
            if getattr(sys.modules[name], attribute, None) is getattr(own, attribute, own):
                monkeypatch.setattr(sys.modules[name], attribute, value)
    monkeypatch.setattr(scheduling, "allocate_lock", lambda: Telling(allocate_lock()))
    monkeypatch.setattr(scheduling, "DEADLOCK_GRACE_SECONDS", 0)
    monkeypatch.setattr(scheduling, "IDLE_WORKER_SECONDS", 0)
    return made


def assert_at_rest(scheduler, place):
    """There is nothing to do, and whoever comes next will find how to start an owner."""
    assert not scheduler.ready and scheduler.owner == 0, place
    assert scheduler.bell == [scheduler._start_owner], place


BOTH = pytest.mark.parametrize("turned", [False, True])


@BOTH
@pytest.mark.parametrize("other", ["the owner", "another posting"])
def test_what_is_posted_while_the_owner_gives_up_is_done_once(other, turned, scheduler):
    done = []

    def pair():
        done.clear()
        if other == "the owner":
            scheduler.bell.clear()
            both = (lambda: scheduler.post(lambda: done.append(1))), scheduler._drive
        else:
            both = tuple(lambda i=i: scheduler.post(lambda: done.append(i)) for i in (1, 2))
        return both[::-1] if turned else both

    for *_, place in every_meeting(pair, scheduling):
        assert sorted(done) == ([1] if other == "the owner" else [1, 2]), place
        assert_at_rest(scheduler, place)


@BOTH
def test_what_is_posted_while_the_owner_falls_asleep_wakes_it(turned, scheduler, monkeypatch):
    monkeypatch.setattr(scheduling, "DEADLOCK_GRACE_SECONDS", 10 * PATIENCE)

    def pair():
        scheduler.ready.clear()
        scheduler.bell.clear()
        both = (lambda: scheduler.post(int)), (lambda: scheduler._sleep(scheduling.Driver()))
        return both[::-1] if turned else both

    for *_, place in every_meeting(pair, scheduling):
        assert len(scheduler.ready) == 1 and not scheduler.bell, place


def test_of_two_that_post_one_wakes_the_sleeping_owner(scheduler):
    rung = []

    def pair():
        rung.clear()
        scheduler.ready.clear()
        scheduler.bell[:] = [lambda: rung.append(1)]
        return (lambda: scheduler.post(int)), (lambda: scheduler.post(abs))

    for *_, place in every_meeting(pair, scheduling):
        assert rung == [1] and len(scheduler.ready) == 2 and not scheduler.bell, place


# -- forks -----------------------------------------------------------------------------------------


@pytest.fixture
def forking(scheduler, monkeypatch):
    """The pause of a fork, in which switches are forced too, and whether it goes on now. Owners run
    in threads of their own: who forks may ring."""
    owners, ended = [], SimpleQueue()

    def start_urgently(job):
        owners.append(start_new_thread(lambda: ended.put(job()), ()))
        return True

    scheduler.workers = SimpleNamespace(
        start_urgently=start_urgently, wait_for_ending=lambda seconds: None
    )
    monkeypatch.setattr(scheduling, "MAX_FORK_PAUSE_SECONDS", 10 * PATIENCE)
    forking = SimpleNamespace(now=False)

    @contextmanager
    def pause():
        with scheduler.paused_for_fork():
            forking.now = True
            yield scheduler.random_below(2)
            forking.now = False

    def wait_for_owners():
        while owners:
            owners.pop()
            ended.get(timeout=PATIENCE)

    forking.pause, forking.wait_for_owners = pause, wait_for_owners
    return forking


@pytest.mark.guarantee("green-24")
@BOTH
@pytest.mark.parametrize("other", ["the owner", "another posting"])
def test_no_step_runs_during_a_fork_and_none_is_lost(other, turned, scheduler, forking):
    during = []

    def fork():
        with forking.pause():
            pass

    def post():
        scheduler.post(lambda: during.append(forking.now))

    def pair():
        during.clear()
        if other == "the owner":
            scheduler.bell.clear()
            post()
        both = fork, (scheduler._drive if other == "the owner" else post)
        return both[::-1] if turned else both

    for *_, place in every_meeting(pair, scheduling):
        forking.wait_for_owners()
        assert during == [False], place
        assert_at_rest(scheduler, place)


@pytest.mark.guarantee("green-24")
def test_an_owner_that_sleeps_when_a_fork_begins_does_so_until_its_end(scheduler, forking):
    told, its_time_is_over = SimpleQueue(), SimpleQueue()

    class Lock:
        woken = SimpleQueue()
        release = staticmethod(partial(woken.put, None))

        def acquire(self, timeout=-1):
            told.put("asleep" if timeout > 0 else "waiting for its waker")
            (its_time_is_over if timeout > 0 else self.woken).get(timeout=PATIENCE)
            return timeout < 0

    driver = scheduling.Driver()
    driver.lock = Lock()
    scheduler.timers.after(1000, int)
    scheduler.on_busy = partial(told.put, "awake")
    scheduler.bell.clear()
    owner = Thread(target=scheduler._sleep, args=(driver,))
    owner.start()
    assert told.get(timeout=PATIENCE) == "asleep"
    with forking.pause():
        its_time_is_over.put(None)
        assert told.get(timeout=PATIENCE) == "waiting for its waker"
        scheduler.post(int)
        assert told.empty() and driver.lock.woken.empty()
    assert told.get(timeout=PATIENCE) == "awake"
    owner.join()
    assert not scheduler.bell and driver.lock.woken.empty()


# -- channels --------------------------------------------------------------------------------------


def on_fast_path(operation):
    """What a thread that is not the owner got without waiting; False if it would have to."""
    try:
        operation.send(None)
    except StopIteration as stop:
        return stop.value or True
    except RuntimeError as error:
        assert "only in green threads" in str(error)
        return False
    raise AssertionError("it waits")


def end_of(thread):
    """Of a green thread: its value, or how it ended without one; None if it waits."""
    if not thread.done():
        return None
    if thread.cancelled():
        return "cancelled"
    return "closed" if isinstance(thread.exception(), ChannelClosed) else thread.result() or True


on_traced_generators = pytest.mark.skipif(
    sys.version_info[:2] == (3, 12),
    reason="CPython 3.12 crashes where threads that are traced share the code of a generator",
)
OTHERS = ["the same", "the owner serves", "cancel", "close", "a second waits"]
LEFT = {"cancel": "cancelled", "close": "closed", "a second waits": None}
"""Of the thread that waits, if it was not served: how it has ended."""


class Meeting:
    """A new channel, at one end of which a green thread waits, that others may serve."""

    def __init__(self, waits):
        self.waits, self.serves = waits, "send" if waits == "receive" else "receive"
        self.channel, self.threads = green.Channel(), {}
        self.spawn(waits, "first")

    def _operation(self, end, name):
        return getattr(self.channel, end), *([name] if end == "send" else [])

    def spawn(self, end, name):
        self.threads[name] = green.spawn(*self._operation(end, name), name=name)

    def serve(self, name):
        fn, *args = self._operation(self.serves, name)
        return on_fast_path(fn(*args))

    def ends(self):
        return {name: end_of(each) for name, each in self.threads.items()}


@on_traced_generators
@BOTH
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("waits", ["receive", "send"])
def test_a_waiting_thread_is_served_once(waits, other, turned, scheduler):
    """By a thread that is not the owner. Where CPython switches: the fast paths rely on that."""
    met = None

    def pair():
        nonlocal met
        met = Meeting(waits)
        others = {
            "the same": lambda: met.serve("B"),
            "the owner serves": lambda: met.spawn(met.serves, "C"),
            "cancel": lambda: met.threads["first"].cancel() and None,
            "close": met.channel.close,
            "a second waits": lambda: met.spawn(waits, "second"),
        }
        both = (lambda: met.serve("A")), others[other]
        return both[::-1] if turned else both

    def check(by_a, by_other, place):
        assert_at_rest(scheduler, place)
        ends = met.ends()
        first = ends.pop("first")
        if other in LEFT:
            assert first == (LEFT[other] if not by_a else True if waits == "send" else "A"), place
        else:
            assert first, place
        served = [first] * (first not in LEFT.values())
        serving = {"A": by_a, "B": by_other, "C": ends.pop("C", None)}
        serving = {name: value for name, value in serving.items() if value}
        if waits == "receive":
            assert list(serving) == served, place
        else:
            assert list(serving.values()) == ["first"] * len(served), place
        if other == "a second waits":
            assert not any(ends.values()), place
            for name in ["first"] * (first is None) + ["second"]:  # in their order
                met.spawn(met.serves, f"to {name}")
                assert met.ends()[name] == (waits == "send" or f"to {name}"), place
        if other != "the owner serves":
            assert not met.channel._sender and not met.channel._receiver, place

    for *values, place in every_meeting(
        pair, channels, waiting, threads, scheduling, anywhere=False
    ):
        check(*(values[::-1] if turned else values), place)
    met.ends()  # of the last two, which have not met


@on_traced_generators
@pytest.mark.parametrize("waits", ["receive", "send"])
def test_when_a_channel_is_closed_nothing_goes_by_it(waits, scheduler):
    """Though the owner, which tells the one that waits, has other things to do first."""
    met = None

    def pair():
        nonlocal met
        met = Meeting(waits)
        return (lambda: scheduler.post(int)), (lambda: met.channel.close() or met.serve("A"))

    for _, by_a, place in every_meeting(pair, scheduling, anywhere=False):
        assert not by_a and met.ends() == {"first": "closed"}, place
        assert_at_rest(scheduler, place)
    met.ends()
