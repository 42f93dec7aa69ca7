"""The Ray engine: starts actors, sends them messages, receives reports, and notices deaths.

    reactor ── start, send, kill ──> Ray          Ray's threads ── post ──> reactor

An answer of Ray comes as a future's callback in a thread of Ray, which posts to the reactor. So all
changes of handles and the supervisor happen while holding the reactor's lock, as on one machine.

If an actor dies, Ray fails each call that the actor has not answered. A drone without such a call
is probed now and then (`_look`). After a death a task on the drone's node reads the exit record, if
the node is alive. Only then does the supervisor learn of the death, because the supervisor decides
by the tasks that had begun.

The actors belong to one session of Ray (buffers.py). Each call of Ray from the reactor first checks
that the session is still there. If not, the pool breaks: at the next `_look`, or when a message
cannot be sent. See docs/decisions/0011-ray-engine.md."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...errors import Lost
from ...pool.drone_handle import DroneHandle, State
from ...pool.task import Task
from ...runtime.procfs import boot_of_this_machine
from ...runtime.tuning import tuning
from ...store.arena import Full
from ...wire import main_snapshot as snapshot
from ...wire.functions import FunctionRegistry
from ...wire.main_snapshot import Snapshot
from ...wire.pickling import MainSnapshot
from .buffers import LazyBuffers, OutOfBandBuffers, RayStore, session
from .cluster import where_in
from .drone import DroneActor, Report, SpawnReply, SpawnRequest
from .exit_record import FinalState, kill_owner, read_remains
from .handle import RayHandle
from .shared import RayShared, share
from .switch import MOST, Switch

if TYPE_CHECKING:
    from ...pool.supervisor import Supervisor

__all__ = ["RayEngine"]

log = logging.getLogger(__name__)

PROBE_EVERY = 2.0  # seconds after which a silent drone is probed
# Limit for all idle drones together, because a probe costs the driver a millisecond.
PROBES_A_SECOND = 50
LAST_WITHIN = 5.0  # seconds to wait for reports that an ending drone has sent by the switch
REMAINS_WITHIN = 6.0  # seconds for the task that reads an exit record on a dead drone's node
SWITCH_CALLS = 2 * MOST
_DEATHS = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
)  # each of these means that the actor is dead


class RayEngine:
    """The Ray engine of one pool. `pool.engine.Engine` says which thread calls which method."""

    def __init__(self, supervisor: Supervisor, placement: dict[str, Any]) -> None:
        self.dispatcher = supervisor.dispatcher
        self._supervisor = supervisor
        self._config = self.dispatcher.config
        self._reactor = self.dispatcher.reactor
        self._session = session()
        self._placement = placement
        self._ended = False
        hang = self._config.hang_timeout
        self._probe_every = PROBE_EVERY if hang is None else min(PROBE_EVERY, hang / 4)
        self._home = ray.get_runtime_context().get_node_id()
        self._taken = self.snapshot()
        self._store = RayStore()
        options = {"num_cpus": 0, "max_concurrency": SWITCH_CALLS + 4 * self._config.size}
        here = NodeAffinitySchedulingStrategy(self._home, soft=False)
        self._switch = ray.remote(Switch).options(**options, scheduling_strategy=here).remote()
        self._nest = ray.remote(DroneActor)  # made once, because Ray keeps each of these for ever
        self._says_what_is_awaited = False
        self._open_book()

    def _open_book(self) -> None:
        names = self._taken.names()
        self._ref = ray.put(self._taken)
        store: Any = self._store
        self._supervisor.registry = FunctionRegistry(
            MainSnapshot(names), store, self._config.width > 1, self.dispatcher.directory
        )

    def is_there(self) -> bool:
        """Return True if this process is still connected to the session of this pool."""
        return ray.is_initialized() and session() == self._session

    def fail(self, error: Exception) -> None:
        if not self._is_lost():
            self.dispatcher.fail(error)

    def _is_lost(self) -> bool:
        lost = not self.is_there()
        if lost and not self._ended:
            self.dispatcher.break_(
                RuntimeError(f"Ray was shut down while {self._config.name} was open")
            )
        return lost

    def initializer(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        return initializer, initargs

    # -- starting ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._listen()
        self._reactor.after(self._probe_every, self._look)

    def can_start(self) -> bool:
        return not self._ended and self.is_there()

    def start(self, number: int, name: str, index: int) -> RayHandle | None:
        config = self._config
        birth = SpawnRequest(
            number,
            name,
            config.env[index],
            config.cwd,
            sys.path[:],
            self._switch,
            config.max_memory is not None,
        )
        try:
            actor = self._nest.options(max_restarts=0, **self._placement).remote(birth, self._ref)
        except Exception as error:
            self._supervisor.cannot_start(error)
            return None
        handle = RayHandle(self, number, name, actor)
        self._when_done(
            actor.begin.remote(), partial(self._started, handle), partial(self._not_started, handle)
        )
        if not self._says_what_is_awaited:
            self._says_what_is_awaited = True
            self._reactor.after(tuning.start_report_seconds, self._say_what_is_awaited)
        return handle

    def _started(self, handle: RayHandle, born: SpawnReply) -> None:
        handle.born_as = born
        if born.boot != boot_of_this_machine():
            asked = monotonic()
            self._when_done(
                handle.actor.clock.remote(),
                partial(self._set_clock, handle, asked),
                partial(self.lost, handle),
            )
        self._supervisor.started(handle, born.pid)
        self._supervisor.hello(handle)

    def _set_clock(self, handle: RayHandle, asked: float, its: float) -> None:
        """Estimate by how much the drone's clock is ahead.

        The drone read its clock about halfway between request and answer.
        """
        handle.ahead = its - (asked + monotonic()) / 2

    def _not_started(self, handle: RayHandle, error: Exception) -> None:
        init_failed = isinstance(error, RayActorError) and error.actor_init_failed
        if handle.dying or (
            isinstance(error, _DEATHS) and not init_failed and not _cannot_be(error)
        ):
            self.lost(handle, error)
            return
        if handle.state is not State.DEAD:
            handle.dying = True
            why = RuntimeError(f"Ray could not start {handle.name}: {_fate(error)}")
            why.__cause__ = error
            self._supervisor.not_started(handle, why)

    def _say_what_is_awaited(self) -> None:
        """Warn of drones that have waited long for their resources.

        Repeats for as long as drones are starting.
        """
        starting = [
            handle
            for handle in self._supervisor.handles
            if isinstance(handle, RayHandle) and not handle.pid and handle.alive
        ]
        self._says_what_is_awaited = bool(starting) and not self._ended and self.is_there()
        if not self._says_what_is_awaited:
            return
        wait = (
            min(handle.asked_for for handle in starting)
            + tuning.start_report_seconds
            - self._reactor.timers.now()
        )
        if wait <= 0:
            more = len(starting) - 1
            log.warning(
                "%s still waits for %s%s%s; the cluster has %s free",
                self._config.name, starting[0].name, f" and {more} more" if more else "", where_in(self._placement),
                ray.available_resources(),
            )  # fmt: skip
            wait = 6 * tuning.start_report_seconds
        self._reactor.after(wait, self._say_what_is_awaited)

    # -- for handles, holding the reactor's lock ---------------------------------------------------

    def await_answer(
        self,
        handle: RayHandle,
        answer: Any,
        cargo: Any,
        frames: Sequence[bytes] = (),
        tasks: Sequence[Task] = (),
    ) -> None:
        handle.calls += 1
        not_answered = partial(self._not_answered, handle, frames, tasks)
        self._when_done(answer, partial(self._answered, handle, cargo), not_answered)

    def _not_answered(
        self, handle: RayHandle, frames: Sequence[bytes], tasks: Sequence[Task], error: Exception
    ) -> None:
        handle.calls -= 1
        cause = error.cause if isinstance(error, RayTaskError) else error
        if not isinstance(cause, ObjectLostError):
            self.lost(handle, error)
        elif handle.is_up():
            why = str(cause).strip().splitlines()[0]
            lost = Lost(
                f"what work was to take lay with a node that is lost: {why}", drone=handle.name
            )
            handle.not_begun(frames, tasks, lost)

    def _answered(self, handle: RayHandle, cargo: Any, told: bytes) -> None:
        handle.calls -= 1
        handle.last_heard = self._reactor.timers.now()
        handle.hear(Report.unpack(told), cargo)

    def not_sent(
        self, handle: RayHandle, frames: list[bytes], tasks: Sequence[Task], error: Exception
    ) -> None:
        """Handle a failed send, later.

        The caller still holds the reactor's lock and goes on with other drones. So the failure is
        posted.
        """
        if not self.is_there():
            self._reactor.post(self._is_lost)
        elif tasks:
            self._reactor.post(partial(handle.not_sent, frames, tasks, error))
        else:
            raise error

    def land(self, cargo: Any) -> LazyBuffers | OutOfBandBuffers:
        """Return the buffers that came beside a report, in the object store if there is room."""
        if isinstance(cargo, OutOfBandBuffers):
            try:
                ref = self._store.put(cargo, sum(memoryview(each).nbytes for each in cargo.buffers))
            except Full:  # the buffers stay in this process
                return cargo
            return LazyBuffers(ref, self._session)
        return LazyBuffers(cargo, self._session)

    def order(self, handle: RayHandle, frames: list[bytes]) -> None:
        self._switch.order.remote(handle.number, frames)

    def stop(self, handle: RayHandle) -> None:
        answer, cargo = handle.call_end()
        handle.calls += 1
        self._when_done(answer, partial(self._stopped, handle, cargo), partial(self.lost, handle))

    def _stopped(self, handle: RayHandle, cargo: Any, told: bytes) -> None:
        handle.last_report = Report.unpack(told).number
        self._answered(handle, cargo, told)
        self._reactor.after(LAST_WITHIN, partial(self.ended, handle))

    def ended(self, handle: RayHandle) -> None:
        """Handle the end of a drone that was stopped and whose reports have all been read."""
        if handle.state is not State.DEAD:
            if self.is_there():
                ray.kill(handle.actor)
            self._died(handle, 0)

    def kill(self, handle: RayHandle) -> None:
        if not self.is_there():  # the actors have ended with their session
            handle.fate = "Ray was shut down"
            self._reactor.after(0.0, partial(self._died, handle, None))
            return
        handle.exitcode = -signal.SIGKILL
        ray.kill(handle.actor)
        born = handle.born_as
        if born is not None and born.node == self._home:
            kill_owner(born.folder)
        elif born is not None and self._lives(born.node):
            self._on_node(born.node, kill_owner).remote(born.folder)
        handle.probe()

    def _lives(self, node: str) -> bool:
        return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())

    def _on_node(self, node: str, act: Callable[..., Any]) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return ray.remote(act).options(num_cpus=0, scheduling_strategy=there, max_retries=0)

    def forget(self, handle: RayHandle) -> None:
        if not self._ended and self.is_there():
            self._switch.forget.remote(handle.number)

    # -- deaths ------------------------------------------------------------------------------------

    def lost(self, handle: RayHandle, error: Exception) -> None:
        """Handle a failed call of a drone: its death, or else an error of the engine."""
        if handle.dying:
            return
        if not isinstance(error, _DEATHS):
            self.fail(error)
            return
        handle.dying = handle.deaf = True
        # Without the traceback, because its frames refer to the pool.
        handle.fate, handle.cause = (_fate(error), error.with_traceback(None))
        # An actor that was only unreachable for a moment must not go on.
        ray.kill(handle.actor)
        born = handle.born_as
        if born is None:
            self._buried(handle, FinalState())
        elif born.node == self._home:
            self._buried(handle, read_remains(born.folder, handle.out_read, handle.err_read))
        elif self._lives(born.node):
            remains = self._on_node(born.node, read_remains).remote(
                born.folder, handle.out_read, handle.err_read
            )
            self._when_done(
                remains, partial(self._buried, handle), lambda _: self._buried(handle, None)
            )
            self._reactor.after(REMAINS_WITHIN, partial(self._buried, handle, None))
        else:
            self._buried(handle, None)

    def _buried(self, handle: RayHandle, remains: FinalState | None) -> None:
        if handle.state is not State.DEAD:
            handle.leave(remains)
            self._died(handle, handle.exitcode)

    def _died(self, handle: RayHandle, exitcode: int | None) -> None:
        if handle.state is not State.DEAD:
            handle.dying = True
            self._supervisor.died(handle, exitcode)

    def released(self, handle: DroneHandle) -> None:
        """Do nothing, because Ray has released the resources."""

    def _look(self) -> None:
        """Probe silent drones without an unanswered call, because they may have died."""
        if self._ended or self._is_lost():
            return
        now = self._reactor.timers.now()
        handles = self._supervisor.handles
        idle_every = max(self._probe_every, len(handles) / PROBES_A_SECOND)
        for handle in handles:
            if (
                not isinstance(handle, RayHandle)
                or handle.born_as is None
                or handle.calls
                or not handle.is_up()
            ):
                continue
            if now - handle.last_heard >= (self._probe_every if handle.in_flight else idle_every):
                handle.probe()
        self._reactor.after(self._probe_every, self._look)

    # -- receiving ---------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._when_done(self._switch.news.remote(), self._hear, self._deaf)

    def _hear(self, news: list[tuple[int, Any]]) -> None:
        if self._ended:
            return
        for number, (told, cargo) in news:
            handle = next(
                (each for each in self._supervisor.handles if each.number == number), None
            )
            if isinstance(handle, RayHandle):
                handle.last_heard = self._reactor.timers.now()
                handle.hear(Report.unpack(told), cargo)
        self._listen()

    def _deaf(self, error: Exception) -> None:
        if not self._ended:
            why = RuntimeError(f"the switch of {self._config.name} was lost: {_fate(error)}")
            self.dispatcher.break_(why)

    def _when_done(
        self, ref: Any, act: Callable[[Any], object], failed: Callable[[Exception], object]
    ) -> None:
        """Call `act` or `failed` with the outcome of `ref`, holding the reactor's lock."""
        reactor = self._reactor

        def tell(future: Any) -> None:
            try:
                value = future.result()
            except Exception as error:
                reactor.post(_Turn(self, failed, error))
            else:
                reactor.post(_Turn(self, act, value))

        ref.future().add_done_callback(tell)

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return snapshot.take()

    def adopt(self, snapshot: Snapshot) -> None:
        self._taken = snapshot
        if self.is_there():
            self._open_book()

    def discard(self, snapshot: Snapshot) -> None:
        """Do nothing, because a snapshot is only bytes."""

    def left_out(self, name: str) -> str | None:
        return self._taken.left_out.get(name)

    def share(self, obj: Any) -> RayShared[Any]:
        return share(obj, self._supervisor.registry)

    def end(self) -> None:
        self._ended = True
        if not sys.is_finalizing() and self.is_there():
            ray.kill(self._switch)


class _Turn:
    """A callback for the reactor; does nothing if the engine's Ray session is gone.

    If the callback raises, the reactor calls `RayEngine.fail`. The reactor finds the engine by
    `__self__`, as with a bound method.
    """

    def __init__(self, engine: RayEngine, act: Callable[[Any], object], value: Any) -> None:
        self.__self__ = engine
        self._act = act
        self._value = value

    def __call__(self) -> None:
        if self.__self__.is_there():
            self._act(self._value)


def _fate(error: Exception) -> str:
    """Return the first line of Ray's reason for a failure, without the table of details."""
    text = str(error).strip()
    _, found, why = text.partition("The actor is dead because ")
    lines = (why if found else text).splitlines() or [type(error).__name__]
    return lines[0].partition(" Some common causes")[0].strip()


def _cannot_be(error: Exception) -> bool:
    return type(error).__name__ in ("ActorUnschedulableError", "RuntimeEnvSetupError")
