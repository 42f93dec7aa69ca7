"""Assignment: which drone of a pool gets which of its queued tasks, and when.

    queue, dedicated, preferred, resources ──assign──> (drone, runs), (drone, runs), ...
           ^                                                │
           └── returned, or its drone died before it began ─┘

Nothing here sends, waits or looks at a clock: `assign` tells what is to be sent, and `Dispatcher`
packs and sends that. Before anything else come the tasks that only one drone may run, and those
whose kept values a drone has (locality.py); then those that need resources (resources.py) and those
of `queue`, by priority.

A drone receives up to `tuning.batch_seconds` of known short tasks at once, but only one task at a
time if the task is long or its length is not known yet. If a drone turns out to be busy with tasks
behind the running one while another drone is idle, the tasks that have not begun are recalled, as
are the calls of a chunk (chunk.py).

No step looks at all drones, but at most at those that take more beside what they have. Each record
reports its changes, and the next step looks at those that have changed; so the lists of idle
drones, of those that take more, and of those with more than one task are always up to date.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from ..promises.promise import PENDING
from ..runtime.tuning import tuning
from ..wire.placeholders import PayloadWithRefs, split_remote_objects
from .drone_record import DroneRecord
from .interfaces import State
from .queues import drop_settled, insert_in_order
from .resources import Resources
from .task import Sending, Task
from .task_state import ENDING, QUEUED, SENT, TaskState

if TYPE_CHECKING:
    from ..wire.functions import RemoteFunction

# Seconds that a task counts at least, so that the number of short tasks in flight has a bound.
MIN_TASK_SECONDS = 2e-6
# A batch of this size is full, so that it mostly goes in one packet.
MAX_BATCH_BYTES = 32 * 1024
_MAX_BATCH_TASKS = 2048
_number = attrgetter("number")


Send: TypeAlias = tuple[Any, list[list[Task]]]
"""A drone (a `DroneHandle`), and the tasks that it is to be sent, and that count as sent. In order:
each run of calls whose arguments are pickled together, and each other task alone.
"""


class Assignment:
    """The queues of one pool, and its drones by what they take.

    Changed only by the loop's thread. Any thread may read `queue` and `queued`.
    """

    def __init__(
        self, width: int, max_tasks: int | None, resource_sizes: Iterable[tuple[str, int]]
    ) -> None:
        self.width = width
        self._max_tasks = max_tasks
        self.drones: list[Any] = []  # `DroneHandle`s, in the order in which they were started
        self.queue: deque[Task] = deque()
        # How many tasks that any drone may run are `QUEUED` and in a queue. Each record counts its
        # own.
        self.queued = 0
        self.resources = Resources(resource_sizes, self.leave_queue)
        self.has_resources = bool(self.resources.sizes)
        self.release_resources: Callable[[Task], None] = self.resources.release
        self._last_reserved: tuple[DroneRecord | None, int] = None, 0  # and its `sent_count`
        # Returns whether a task that takes kept values can go to that drone now. If not, it has got
        # another place. Set by the directory.
        self.prepare: Callable[[Task, Any], bool]
        self.runs_one_at_a_time = False  # one message of tasks, in the whole pool
        # By number, so the first drones get the tasks of a pool that has few.
        self.idle: list[DroneRecord] = []
        self.partly_busy: list[DroneRecord] = []  # they take more beside what they have
        self.busy: set[DroneRecord] = set()
        self.crowded: set[DroneRecord] = set()  # with tasks behind one, which may be recalled
        self.preferring: set[DroneRecord] = set()  # with tasks that prefer them
        self.with_own: set[DroneRecord] = set()  # those that may take tasks of their own queues
        self.changed: set[DroneRecord] = set()  # those for `update` to look at
        self.note_change: Callable[[DroneRecord], None] = self.changed.add

    def add(self, drone: DroneRecord) -> None:
        self.drones.append(drone)
        self.changed.add(drone)

    def remove(self, drone: DroneRecord) -> None:
        """Forget a drone that has ended, and has no task left."""
        if drone in self.drones:
            self.drones.remove(drone)
        if self._last_reserved[0] is drone:
            self._last_reserved = None, 0
        self.changed.add(drone)

    # -- queues ------------------------------------------------------------------------------------

    def enter_queue(self, task: Task) -> None:
        """Note that `task` comes into a queue."""
        owner: Any = task.target or self
        owner.queued += 1
        task.state = QUEUED

    def leave_queue(self, task: Task, state: TaskState = ENDING) -> None:
        """Note the state that `task` gets. If it was queued, it counts as that no more."""
        if task.state is QUEUED:
            owner: Any = task.target or self
            owner.queued -= 1
        task.state = state

    def place(self, task: Task, now: float, *, first: bool = False) -> None:
        """Put `task`, which counts as queued, behind the tasks of its priority; if `first`, before
        them.
        """
        preferred = task.preferred_drone
        if task.resources:
            self.resources.add(task, first=first)
        elif task.target is not None:
            insert_in_order(task.target.dedicated, task, first=first)
            self.changed.add(task.target)
        elif preferred is not None and preferred.state < State.RETIRING:
            if not first:
                task.preferred_since = now
            insert_in_order(preferred.preferred, task, first=first)
            self.changed.add(preferred)
        else:
            insert_in_order(self.queue, task, first=first)

    def count_in_queues(self) -> int:
        """Return how many tasks the queues hold, with those that were cancelled there."""
        return sum(map(len, self.queues()))

    def drop_settled(self) -> None:
        """Remove the tasks from all queues that were cancelled there."""
        for queue in self.queues():
            for task in drop_settled(queue):
                self.leave_queue(task)
        self.changed.update(self.drones)

    def drop_all(self) -> None:
        """Remove all tasks from all queues."""
        for queue in self.queues():
            self._drain(queue)
        self.changed.update(self.drones)

    def take_dedicated(self, drone: DroneRecord) -> list[Task]:
        """Take the queued tasks that only `drone` may run, which has died."""
        self.changed.add(drone)
        queues = [drone.dedicated, *self.resources.remove_queues(drone)]
        return [task for queue in queues for task in self._drain(queue)]

    def take_preferring(self, drone: DroneRecord) -> list[Task]:
        """Take the queued tasks that prefer `drone`, which takes no more."""
        self.changed.add(drone)
        return self._drain(drone.preferred)

    def move_preferring(self, task: Task, drone: DroneRecord, to: DroneRecord) -> None:
        """Let `task`, which prefers `drone`, be the next one that prefers another."""
        self.drop_preferring(task, drone)
        to.preferred.appendleft(task)
        self.changed.add(to)

    def drop_preferring(self, task: Task, drone: DroneRecord) -> None:
        drone.preferred.remove(task)
        self.changed.add(drone)

    def queues(self) -> list[deque[Task]]:
        """Return all queues, those of the drones last."""
        own = [queue for each in self.drones for queue in (each.dedicated, each.preferred)]
        return [self.queue, *self.resources.queues.values(), *own]

    def _drain(self, queue: deque[Task]) -> list[Task]:
        tasks = [*queue]
        queue.clear()
        for task in tasks:
            self.leave_queue(task)
        return tasks

    def tasks_of(self, drone: DroneRecord) -> list[Task]:
        """Return the queued tasks that go to `drone`, unless it ends."""
        scarce = [task for queue in self.resources.queues_of(drone) for task in queue]
        return [*scarce, *drone.dedicated, *drone.preferred]

    # -- drones by what they take ------------------------------------------------------------------

    def update(self) -> None:
        """Look at the drones that have changed. Called before what this has found is read."""
        changed, max_tasks = self.changed, self._max_tasks
        while changed:
            drone = changed.pop()
            in_flight = drone.in_flight
            takes = drone.can_take() and (max_tasks is None or drone.tasks_left(max_tasks) > 0)
            place: list[DroneRecord] | None = None
            # What each drone belongs to: plain tests, because each task and its answer come here.
            if in_flight:
                self.busy.add(drone)
                if takes:
                    place = self.partly_busy
            else:
                self.busy.discard(drone)
                if takes:
                    place = self.idle
            if in_flight and drone.is_crowded():
                self.crowded.add(drone)
            elif self.crowded:
                self.crowded.discard(drone)
            before = drone.listed_in
            if place is not before:
                if before is not None:
                    del before[bisect_left(before, drone.number, key=_number)]
                if place is not None:
                    insort(place, drone, key=_number)
                drone.listed_in = place
            if drone.preferred:
                self.preferring.add(drone)
                if takes:
                    self.with_own.add(drone)
            elif self.preferring:
                self.preferring.discard(drone)
            if drone.dedicated and drone.can_take(dedicated=True):
                self.with_own.add(drone)

    def is_any_idle(self) -> bool:
        return bool(self.idle) and not (self.runs_one_at_a_time and self.busy)

    def could_overlap(self) -> bool:
        """Return whether a drone could take one more task beside those that it overlaps. False if
        the head of the queue does not overlap, because no task overtakes that one.
        """
        with suppress(IndexError):
            if not self.queue[0].definition.overlaps:
                return False
        reserved = self.resources.reserved
        return any(each.overlapping and each is not reserved for each in self.partly_busy)

    def take_crowded(self) -> list[Any]:
        """Return the drones with tasks behind the one that runs, each until it is recalled."""
        crowded = sorted(self.crowded, key=_number)
        self.crowded.clear()
        for drone in crowded:
            drone.recall_pending = True
        return crowded

    def note_recalled(self, drone: DroneRecord) -> None:
        drone.recall_pending = False
        self.changed.add(drone)

    # -- which drone gets what ---------------------------------------------------------------------

    def _is_blocked(self) -> bool:
        return self.runs_one_at_a_time and bool(self.busy)

    def assign(self, now: float) -> Iterator[Send]:
        """Yield what is to be sent, drone by drone, so that the first can begin while the tasks of
        the next are chosen.
        """
        queue, resources = self.queue, self.resources
        while True:
            if self.with_own:
                yield from self._assign_own(now)
            if resources.queues:
                yield from self._assign_with_resources(now)
            while queue:
                takers = self._takers(len(queue))
                if not takers:
                    break
                share = -(-len(queue) // len(takers))
                is_any_sent = False
                for drone in takers:
                    send = self.choose(drone, queue, share, now)
                    if send is not None:
                        is_any_sent = True
                        yield send
                        if not queue:
                            break
                    elif drone.load and queue and not queue[0].definition.overlaps:
                        break  # the others have more to do, and would not take it either
                if not is_any_sent:
                    break
            if resources.queues:  # the tasks that came behind those of the queue
                yield from self._assign_with_resources(now)
            if self.changed:
                self.update()
            # Again if a task that takes kept values has got another drone meanwhile: see `prepare`.
            if not self.with_own or self._is_blocked():
                return

    def _assign_own(self, now: float) -> Iterator[Send]:
        for drone in sorted(self.with_own, key=_number):
            if self._is_blocked():
                return
            self.with_own.discard(drone)
            for queue, is_own in ((drone.dedicated, True), (drone.preferred, False)):
                if queue and drone.can_take(dedicated=is_own):
                    send = self.choose(drone, queue, len(queue), now)
                    if send is not None:
                        yield send
            self.update()

    def _assign_with_resources(self, now: float) -> Iterator[Send]:
        resources = self.resources
        while (found := resources.take_next(self.queue, self._taker, self._next_free)) is not None:
            drone, task = found
            one = deque([task])
            send = self.choose(drone, one, 1, now)
            if send is not None:
                yield send
                continue
            resources.release(task)
            if one:  # else it was just cancelled, or waits for kept values
                resources.add(task, first=True)
                return

    def _takers(self, count: int) -> list[DroneRecord]:
        """Return the drones for `count` tasks that any drone may run: idle ones first, then those
        that will soonest have done what they have.
        """
        if self.changed:
            self.update()
        if self.runs_one_at_a_time:
            return [] if self._is_blocked() else self.idle[:1]
        takers, reserved = self.idle[: count + 1], self.resources.reserved
        if count > len(takers) and self.partly_busy:
            takers += sorted(self.partly_busy, key=_load)
        if reserved in takers:
            takers.remove(reserved)
        return takers

    def _taker(self, task: Task) -> DroneRecord | None:
        """Return a drone that can begin `task` at once: the one with its kept values, if possible.

        A task that waited in a busy drone would hold its resources without using them.
        """
        self.update()
        drone: DroneRecord | None = task.target
        overlaps = task.definition.overlaps
        if drone is not None:
            is_free = not drone.in_flight or (overlaps and drone.overlapping)
            takes = drone.can_take(dedicated=True) and drone.tasks_left(self._max_tasks) > 0
            return drone if is_free and takes and not self._is_blocked() else None
        takers = self._takers(1) if self.runs_one_at_a_time else self.idle
        beside = [each for each in self.partly_busy if each.overlapping] if overlaps else []
        drone = task.preferred_drone
        if drone is not None and (drone.listed_in is takers or drone in beside):
            return drone
        return takers[0] if takers else min(beside, key=_overlapping, default=None)

    def _next_free(self) -> DroneRecord | None:
        """Return the drone that is expected to be free first: the one that was reserved last, if it
        has got no task since, so that not all are looked at each time.
        """
        drone, sent = self._last_reserved
        if drone is None or drone.sent_count != sent or not _works(drone):
            drone = min(filter(_works, self.busy), key=_expected_end, default=None)
            self._last_reserved = drone, 0 if drone is None else drone.sent_count
        return drone

    def choose(self, drone: DroneRecord, queue: deque[Task], share: int, now: float) -> Send | None:
        """Move tasks that fit the current load of `drone` from the head of `queue` into its flight,
        at most `share`. None if there is none for it.

        A task of unknown length goes alone. Overlapped tasks go only with their like, up to the
        width. Tasks that are settled already (cancelled while queued) are dropped.
        """
        limit = min(share, _MAX_BATCH_TASKS)
        if self._max_tasks is not None:
            limit = min(limit, drone.tasks_left(self._max_tasks))
        runs: list[list[Task]] = []
        before = len(queue)
        in_flight, load = drone.in_flight, drone.load
        definition: Any = None
        is_open = False  # the last run may go on
        size = count = 0
        left = 0  # tasks that were counted as queued
        owner: Any = None  # has counted them: their only drone, or this object
        while queue and count < limit and size < MAX_BATCH_BYTES:
            task = queue.popleft()
            owner = task.target or self
            if task.promise._state != PENDING:
                left += task.state is QUEUED
                task.state = ENDING
                continue
            if (
                task.args is None
                and type(task.payload) is PayloadWithRefs
                and not self.prepare(task, drone)
            ):
                continue
            if task.definition is not definition:
                definition, is_open = task.definition, False
            estimate = self._estimate(drone, task, load)
            if estimate is None:
                queue.appendleft(task)
                break
            if definition.overlaps:
                drone.overlapping += 1
            elif estimate < 0:
                drone.unknown += 1
                limit = 1
            else:
                load += estimate
                if task.timeout is not None:
                    limit = 1
            left += task.state is QUEUED
            sending = task.sending = Sending(drone.reference, drone.name, now, estimate)
            task.state = SENT
            drone.sent_count = task.position = drone.sent_count + 1
            in_flight[task.number] = task
            count += 1
            if not task.shares_pickle():
                runs.append([task])
                size += _message_bytes(task)
                is_open = False
                continue
            if is_open:
                runs[-1].append(task)
            else:
                runs.append([task])
                is_open = True
            size += task.weight
            if queue and estimate > 0 and task.weight == Task.weight:
                room = min(
                    limit - count,
                    int((tuning.batch_seconds - load) / estimate),
                    (MAX_BATCH_BYTES - size) // task.weight,
                )
                more = _take_similar(definition, queue, room, sending, drone.sent_count)
                drone.sent_count += len(more)
                numbers = [each.number for each in more]
                in_flight.update(zip(numbers, more, strict=True))
                runs[-1] += more
                left += len(more)
                load += estimate * len(more)
                count += len(more)
                size += task.weight * len(more)
        if left:
            owner.queued -= left
        if len(queue) != before:
            self.changed.add(drone)
        if not runs:
            return None
        drone.load, drone.last_contact_at = load, now
        return drone, runs

    def _estimate(self, drone: DroneRecord, task: Task, load: float) -> float | None:
        """Return the seconds by which `task` adds to the `load`, negative if they are not known.
        None if the drone does not take it now.
        """
        definition, in_flight = task.definition, drone.in_flight
        if definition.overlaps or drone.overlapping:
            alike = definition.overlaps and drone.overlapping == len(in_flight)
            return 0.0 if alike and drone.overlapping < self.width else None
        seconds = definition.seconds
        # One with a time limit goes alone, so that no other task uses up its time.
        if in_flight and (seconds is None or task.timeout is not None):
            return None
        if seconds is None:
            return -1.0
        estimate = max(seconds * task.count, MIN_TASK_SECONDS)
        if in_flight and load + estimate > tuning.batch_seconds:
            return estimate if task.is_divisible and drone.takes_chunk_behind() else None
        return estimate

    # -- a check, for tests and `POLYCEPHALY_VALIDATE=1` ------------------------------------------

    def validate(self) -> None:
        """Raise `AssertionError` if a count or a list is wrong."""
        for drone in self.drones:
            queues = [drone.dedicated, *self.resources.queues_of(drone)]
            count = _count_queued(queues)
            assert count == drone.queued, f"{drone.name}: {count}, not {drone.queued}, are queued"
            assert all(task.target is drone for queue in queues for task in queue)
        shared = [self.queue, *self.resources.queues_of(None)]
        shared += [drone.preferred for drone in self.drones]
        count = _count_queued(shared)
        assert count == self.queued, f"{count}, not {self.queued}, are queued"
        self._validate_resources()
        self._validate_lists()

    def _validate_resources(self) -> None:
        held = Counter[str]()
        for drone in self.drones:
            for task in drone.in_flight.values():
                held.update(dict(task.resources))
        free = self.resources.free()
        for name, size in self.resources.sizes.items():
            assert free[name] + held[name] == size, f"{name}: {free[name]} are free"
            assert free[name] >= 0, f"{name}: {free[name]} are free"

    def _validate_lists(self) -> None:
        self.update()
        drones = self.drones
        ready = [
            each for each in drones if each.can_take() and each.tasks_left(self._max_tasks) > 0
        ]
        lists = {
            "idle": [each for each in ready if not each.in_flight],
            "partly_busy": [each for each in ready if each.in_flight],
            "busy": {each for each in drones if each.in_flight},
            "preferring": {each for each in drones if each.preferred},
            "crowded": {each for each in drones if each.is_crowded()},
        }
        for name, expected in lists.items():
            found = getattr(self, name)
            assert found == expected, f"{name}: {_names(found)}, not {_names(expected)}"
        for drone in drones:
            assert drone in self.with_own or not self._has_own_to_begin(drone), (
                f"{drone.name} is idle, and its own tasks are forgotten"
            )

    def validate_idle(self) -> None:
        """Raise `AssertionError` if an idle drone has tasks of its own, after all was sent that
        `assign` has told.
        """
        self.update()
        for drone in self.drones:
            assert self._is_blocked() or not self._has_own_to_begin(drone), (
                f"{drone.name} is idle, and its own tasks wait"
            )

    def _has_own_to_begin(self, drone: DroneRecord) -> bool:
        takes_own = drone.can_take(dedicated=True) and not drone.in_flight
        return bool(drone.dedicated and takes_own) or bool(drone.preferred and drone in self.idle)


def _message_bytes(task: Task) -> int:
    """Return about how many bytes of a message a task takes that is an item of its own."""
    payload, _ = split_remote_objects(task.payload)
    return task.weight + (len(payload) if isinstance(payload, bytes) else 0)


def _take_similar(
    definition: RemoteFunction, queue: deque[Task], limit: int, sending: Sending, position: int
) -> list[Task]:
    """Take at most `limit` calls of `definition` that can be pickled together from the head of
    `queue`, up to one that is settled, and note them as sent, with the positions after `position`.
    """
    more: list[Task] = []
    weight, popleft = Task.weight, queue.popleft
    with suppress(IndexError):
        for _ in range(limit):
            task = popleft()
            if (
                task.promise._state == PENDING
                and task.definition is definition
                and task.args is not None
                and task.weight == weight
                and not task.timeout
            ):
                more.append(task)
                task.state, task.sending = SENT, sending
                position += 1
                task.position = position
            else:
                queue.appendleft(task)
                break
    return more


def _works(drone: DroneRecord) -> bool:
    return drone.state is State.READY and not (drone.unresponsive or drone.is_killed)


def _load(drone: DroneRecord) -> float:
    return drone.load


def _overlapping(drone: DroneRecord) -> int:
    return drone.overlapping


def _expected_end(drone: DroneRecord) -> tuple[int, int, float, int]:
    return drone.unknown, drone.overlapping, drone.load, drone.number


def _names(drones: Iterable[DroneRecord]) -> list[str]:
    return sorted(drone.name for drone in drones)


def _count_queued(queues: Iterable[Iterable[Task]]) -> int:
    return sum(task.state is QUEUED for queue in queues for task in queue)
