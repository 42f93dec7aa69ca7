"""The population of a pool: which drones there are, and which come and go.

    start_missing ──> `Start` ──> STARTING ──> PREPARING ──prepared──> READY
                         │                         │                     │ retire: refresh, resize,
                         │ start_failed            │ not_prepared        v max_tasks, release
                         v                         v                  RETIRING
                 again in a second        STOPPING: `Stop`, and <────────┘ its last task has gone
                                          `Kill` five seconds later

    any of these ──died, ended──> start_missing. The pool breaks after a few failures in a row.

A pool that is closed has its drones stopped when no task is left for them, and gives `EndPool` when
the last one has gone.

As in pool_state.py, whose `PoolState` has an object of `Population`, nothing here sends, waits or
looks at a clock, and no action comes back here before the event is over. `Start` and `Evacuate` are
carried out at once, because the event goes on by what they change: the list of drones, and the
values that a drone is to pack.
"""

from __future__ import annotations

import errno
import itertools
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .drone_record import DroneRecord
from .interfaces import State
from .limits import Kill

if TYPE_CHECKING:
    from ..errors import DroneDied
    from .config import PoolConfig

STOP_GRACE_SECONDS = 5.0  # seconds for a drone's exit handlers
MAX_FAILED_STARTS = 3
MAX_KILLED_STARTS = 100  # in a row, if the drones were killed from outside this package
START_RETRY_SECONDS = 1.0  # seconds after a failed start of a pool that was complete
# Of a start: a limit was reached, perhaps only for a while.
PASSING_ERRORS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


class Start(NamedTuple):
    """Start a drone and add its record to `Assignment.drones`, at once. An engine that cannot start
    it adds none, and reports that later: see `Population.start_failed`.
    """

    number: int
    name: str
    place: int  # of its name, which is also that of its environment


class TryAgain(NamedTuple):
    """Report that a drone could not be started, and will be tried again."""

    error: BaseException


class Complete(NamedTuple):
    """Tell those who wait for it that all drones have started, but for those that failed to."""


class Recall(NamedTuple):
    """Have a drone give back what it has not begun."""

    drone: Any  # a `DroneHandle`


class Evacuate(NamedTuple):
    """Have the values packed that only this drone has: at once, `packing` names them."""

    drone: Any


class Stop(NamedTuple):
    """Have a drone end by itself."""

    drone: Any


class ReportDeath(NamedTuple):
    """Report a death that breaks nothing."""

    error: BaseException


class Close(NamedTuple):
    """Refuse new tasks with `error`: the only drone has died."""

    error: BaseException


class TurnAgain(NamedTuple):
    """Look again whether the pool may end, when the promises are settled that have answers."""


class EndPool(NamedTuple):
    """End the pool, of which no drone and no task is left."""


PopulationAction = (
    Start
    | TryAgain
    | Complete
    | Recall
    | Evacuate
    | Stop
    | ReportDeath
    | Close
    | TurnAgain
    | EndPool
)


class Death(NamedTuple):
    """The death of a drone that was not told to end, and the errors of a pool that it breaks."""

    before: State  # of the drone
    error: DroneDied
    unready: BaseException  # if drones die before they are ready
    terminated: BaseException  # if drones get SIGTERM before their first call
    calls_done: int  # by all drones of the pool


class Tasks(Protocol):
    """What a population knows of the tasks of its pool: a `PoolState`."""

    closing: bool
    abandoned: bool

    def needs_drones(self) -> bool: ...
    def is_unfinished(self) -> bool: ...
    def has_tasks_for(self, drone: DroneRecord, /) -> bool: ...
    def drone_retires(self, drone: DroneRecord, now: float, /) -> None: ...
    def broke(self, error: BaseException, now: float, /) -> None: ...


class Population:
    def __init__(
        self,
        config: PoolConfig,
        drones: list[Any],
        tasks: Tasks,
        do: Callable[[Any], object],
        call_at: Callable[..., Any],
        cancel_call: Callable[[Any], None],
    ) -> None:
        self.size = config.size  # how many drones there should be while the pool is open
        self._on_death = config.on_death
        self._name_of = config.drone_name
        self._max_tasks = config.max_tasks
        self._drones = drones  # those of the `Assignment`
        self._tasks = tasks
        self._do = do
        self._call_at = call_at  # of `PoolState`: returns a timer for `cancel_call`
        self._cancel_call = cancel_call
        # Returns whether the engine has room for a drone. Set by the supervisor.
        self.can_start: Callable[[], bool]
        self._numbers = itertools.count(1)
        self._has_begun = False  # a drone has started
        self._was_complete = False  # as many drones as wanted have started
        self._failed_starts = 0  # in a row
        self._retry: Any = None  # the timer that tries a failed start again
        self.too_large_in_a_row = 0  # drones that were too large before their first task
        # Drones that got SIGTERM before their first call, since the pool had done so many calls.
        self._terminated = self._calls_done = 0
        self._graces: dict[DroneRecord, Any] = {}  # timers of those that stop
        self.has_ended = False

    # -- any thread --------------------------------------------------------------------------------

    def current(self) -> list[Any]:
        """Return the drones that are to stay, without those that retire or will retire as soon as
        they are ready.
        """
        return [
            drone
            for drone in [*self._drones]
            if drone.state < State.RETIRING and not drone.retire_when_ready
        ]

    # -- drones start ------------------------------------------------------------------------------

    def wanted(self) -> int:
        """Return how many drones there should be now."""
        tasks = self._tasks
        is_over = tasks.abandoned or self.has_ended or (tasks.closing and not tasks.needs_drones())
        return 0 if is_over else self.size

    def start_missing(self) -> None:
        """Start drones until there are as many as wanted, not counting those that are retiring or
        stopping.
        """
        # A lone drone is not replaced.
        if not self.can_start() or (self._on_death == "end" and self._has_begun):
            return
        for _ in range(self.wanted() - len(self.current())):
            if not self.can_start() or not self._start_one():
                return

    def _start_one(self) -> bool:
        used = {each.name for each in self.current()}
        index = next(i for i in itertools.count() if self._name_of(i) not in used)
        before = len(self._drones)
        self._do(Start(next(self._numbers), self._name_of(index), index))
        return len(self._drones) > before

    def start_failed(self, error: BaseException, broken: BaseException, now: float) -> None:
        """Handle a drone that could not be started. If other drones are ready, try again later; if
        none is, a few times. But a pool that was never complete is too large for a limit: it breaks
        with the error `broken`.
        """
        may_retry = any(each.state is State.READY for each in self._drones)
        if not may_retry and getattr(error, "errno", None) in PASSING_ERRORS:
            self._failed_starts += 1
            may_retry = self._failed_starts < MAX_FAILED_STARTS
        if may_retry and self._was_complete:
            self._do(TryAgain(error))
            if self._retry is None or self._retry.is_over:
                self._retry = self._call_at(now + START_RETRY_SECONDS, self._try_again)
        else:
            self._tasks.broke(broken, now)

    def _try_again(self, now: float) -> None:
        self.start_missing()

    def started(self) -> None:
        """Note that a drone has a pid."""
        self._has_begun = True
        self.check_complete()

    def check_complete(self) -> None:
        """Tell if all drones have started, but for those that failed to."""
        drones = self._drones
        if drones and all(each.pid for each in drones) and not self._waits_for_room():
            self._was_complete = True
            self._do(Complete())

    def _waits_for_room(self) -> bool:
        """Return whether drones will be started as soon as others, which are ending, have ended."""
        return (
            len(self.current()) < self.wanted()
            and not self.can_start()
            and any(each.state is State.STOPPING for each in self._drones)
        )

    def prepared(self, drone: DroneRecord, now: float) -> None:
        """Let a drone take tasks that is prepared, or prepared anew."""
        if drone.state < State.READY:
            drone.become(State.READY)
            self._failed_starts = 0
        if drone.retire_when_ready:
            self.retire(drone, now)
        self.stop_if_retired(drone, now)

    def not_prepared(self, drone: DroneRecord, error: BaseException, now: float) -> None:
        """Stop a drone on which the initializer or a push has failed, with `error` if that breaks
        the pool.
        """
        self._count_failed_start(error, MAX_FAILED_STARTS, now)
        # Only after the count: if that breaks the pool, which kills the drone, a thread that
        # gives a lone drone a task is told the reason.
        if drone.state <= State.RETIRING:
            self._stop(drone, now)

    def _count_failed_start(self, error: BaseException, tries: int, now: float) -> None:
        """Count a drone that did not become ready, and break the pool after a few in a row."""
        self._failed_starts += 1
        if self._failed_starts >= tries or self._on_death != "replace":
            self._tasks.broke(error, now)

    def too_large(self, drone: DroneRecord, usage: str, error: BaseException, now: float) -> None:
        """Kill a drone that is too large before its first task. After a few in a row the pool
        breaks with `error`, because the next drone would be as large.
        """
        self._do(Kill(drone, usage))
        self.too_large_in_a_row += 1
        if self.too_large_in_a_row >= MAX_FAILED_STARTS:
            self._tasks.broke(error, now)

    def fits(self) -> None:
        """Note that a drone is ready and keeps the limit of its memory."""
        self.too_large_in_a_row = 0

    # -- drones retire and stop --------------------------------------------------------------------

    def resize(self, size: int, now: float) -> None:
        """Start drones, or retire some, so that `size` drones take tasks."""
        self.size = size
        for drone in surplus(self.current(), size):
            self.retire(drone, now)
        self.start_missing()

    def replace(self, now: float) -> None:
        """Retire all drones, and start as many."""
        for drone in [*self._drones]:
            self.retire(drone, now)
        self.start_missing()

    def answered(self, drone: DroneRecord, now: float) -> None:
        """Note that tasks of a drone have left flight: it may have had its last one."""
        if drone.state is not State.READY:
            self.stop_if_retired(drone, now)
        elif drone.tasks_left(self._max_tasks) <= 0 and len(drone.in_flight) <= 1:
            # Not with more in flight: retiring would recall tasks that the drone may still run.
            self.retire(drone, now)

    def retire(self, drone: DroneRecord, now: float) -> None:
        """Send `drone` no new tasks, and stop it when its dedicated tasks are done."""
        if drone.state is State.READY:
            drone.become(State.RETIRING)
            if len(drone.in_flight) > 1 or drone.has_calls_behind_one():
                self._do(Recall(drone))
            self._do(Evacuate(drone))
            self._tasks.drone_retires(drone, now)
        elif drone.state < State.READY and self._tasks.has_tasks_for(drone):
            drone.retire_when_ready = True  # after it is ready, because it has dedicated tasks
        elif drone.state < State.READY:
            drone.become(State.STOPPING)
            self._do(Kill(drone, ""))
        self.start_missing()

    def stop_if_retired(self, drone: DroneRecord, now: float) -> None:
        """Stop the drone if it retires and its last task has gone."""
        if drone.state is State.RETIRING and not (
            drone.in_flight or drone.packing or self._tasks.has_tasks_for(drone)
        ):
            self._stop(drone, now)

    def _stop(self, drone: DroneRecord, now: float) -> None:
        drone.become(State.STOPPING)
        self._do(Stop(drone))
        self._graces[drone] = self._call_at(now + STOP_GRACE_SECONDS, self._end_grace, drone)

    def _end_grace(self, drone: DroneRecord, now: float) -> None:
        del self._graces[drone]
        seconds = f"{STOP_GRACE_SECONDS:g} s"
        self._do(Kill(drone, f"its exit handlers ran for more than {seconds}"))

    # -- drones end --------------------------------------------------------------------------------

    def died(self, drone: DroneRecord, death: Death, now: float) -> None:
        """Handle a death that was not asked for. `PoolState.drone_died` comes before, and `ended`
        later.
        """
        on_death, error = self._on_death, death.error
        was_unready = death.before < State.READY
        # After SIGTERM to all drones, the others finish their calls.
        if on_death == "break" and not ended_in_order(error.exitcode, error.running):
            self._tasks.broke(error, now)
        elif was_unready and on_death == "end" and self.wanted():
            self._tasks.broke(error, now)  # no other drone takes its place
        elif error.exitcode == -signal.SIGTERM and on_death != "end" and not drone.tasks_done:
            self._do(ReportDeath(error))
            self._count_terminated(death, now)
        elif was_unready and self.wanted():
            # Killed by others: that says little about whether drones can start.
            by_others = drone.killed_on_request or not drone.is_killed
            is_killed = by_others and error.exitcode == -signal.SIGKILL
            tries = MAX_KILLED_STARTS if is_killed else MAX_FAILED_STARTS
            self._count_failed_start(death.unready, tries, now)
        elif on_death == "end":
            self._tasks.closing = True
            self._do(Close(error))
        else:
            self._do(ReportDeath(error))

    def _count_terminated(self, death: Death, now: float) -> None:
        """Count a drone that got SIGTERM before its first call, and break the pool after many with
        no call done meanwhile: an initializer that sends the signal would never let one begin.
        """
        if self._calls_done != death.calls_done:
            self._terminated, self._calls_done = 0, death.calls_done
        self._terminated += 1
        if self._terminated >= MAX_KILLED_STARTS:
            self._tasks.broke(death.terminated, now)

    def forget(self, drone: DroneRecord) -> None:
        """Forget a drone that has ended."""
        grace = self._graces.pop(drone, None)
        if grace is not None:
            self._cancel_call(grace)

    def ended(self) -> None:
        """Fill the place of a drone that has ended. It may have been the last that had not
        started.
        """
        self.start_missing()
        self.check_complete()

    def end_if_done(self, now: float) -> None:
        """Stop the drones of a pool that is closing, and then end it, if all tasks are done."""
        tasks = self._tasks
        if tasks.is_unfinished():
            if not tasks.needs_drones():
                self._do(TurnAgain())
            # A kept value was requested after the last drone had ended, and is computed again.
            if not self._drones:
                self.start_missing()
            return
        for drone in [*self._drones]:
            if drone.state is State.READY:
                self._stop(drone, now)
            elif drone.state < State.READY:
                self.retire(drone, now)
            else:  # the task that the drone waited for may have been cancelled
                self.stop_if_retired(drone, now)
        if not self._drones:
            self.has_ended = True
            self._do(EndPool())

    # -- a check, for tests and `POLYCEPHALY_VALIDATE=1` ------------------------------------------

    def validate(self) -> None:
        """Raise `AssertionError` if there are drones that should not be, or a count is wrong."""
        current = self.current()
        names = sorted(each.name for each in current)
        assert len({*names}) == len(names), f"two drones have one name: {names}"
        assert len(current) <= self.size, f"{names} are more than {self.size}"
        for drone in self._drones:
            assert drone.state >= State.STOPPING or not self._tasks.abandoned, (
                f"{drone.name} is {drone.state.name}, and its pool has been given up"
            )
            is_timed = drone in self._graces or drone.is_killed
            assert drone.state is not State.STOPPING or is_timed, f"{drone.name} stops for ever"
        for drone in self._graces:
            assert drone in self._drones, f"{drone.name} has ended, and is to be killed"


def surplus(drones: Sequence[DroneRecord], size: int) -> list[DroneRecord]:
    """Return the drones to retire so that `size` are left: idle ones first, then those that will
    soonest have done the tasks that they have; of equal ones those that were started last.
    """

    def cost(drone: DroneRecord) -> tuple[int, int, float, int]:
        own = len(drone.dedicated) + len(drone.preferred)
        unknown = drone.unknown + drone.overlapping
        return own, unknown, drone.load, -drone.number

    return sorted(drones, key=cost)[: max(0, len(drones) - size)]


def ended_in_order(code: int | None, running: object) -> bool:
    """Return whether a drone has ended because of SIGTERM, after its call."""
    return code == -signal.SIGTERM and running is None
