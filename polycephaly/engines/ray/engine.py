"""The Ray engine: starts actors, sends them messages, receives reports, and notices deaths.

    reactor ── start, send, kill ──> Ray          Ray's threads ── post ──> reactor

An answer of Ray comes as a future's callback in a thread of Ray, which posts to the reactor. So all
changes of handles and the supervisor happen while holding the reactor's lock, as on one machine.
Messages from and to a drone that runs a task go through another actor, the switch (switch.py).

If an actor dies, Ray fails each call that the actor has not answered. A drone without such a call
is probed now and then (`_check_drones`). After a death the exit record is read: by this
process, if the drone was on the driver's node, else by a task on the drone's node, if that node is
alive. The supervisor learns of the death only then, or after `EXIT_RECORD_TIMEOUT_SECONDS`, because
the supervisor decides by the tasks that had begun.

The actors belong to one session of Ray (buffers.py). If the session ends, answers that come later
are dropped, and the pool breaks: at the next `_check_drones`, when a message cannot be sent,
or at the next error (`loss`). See docs/decisions/0011-ray-engine.md.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, WorkerCrashedError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from ...memory.arena import Full
from ...pool.engine import Engine
from ...pool.interfaces import State
from ...runtime.clock import monotonic
from ...runtime.procfs import boot_id
from ...runtime.tuning import tuning
from ...wire import main_snapshot as snapshot
from ...wire.functions import FunctionRegistry
from ...wire.main_names import MainSnapshot
from ...wire.main_snapshot import Snapshot
from .buffers import LazyBuffers, OutOfBandBuffers, RayStore, current_session
from .drone import DroneActor, SpawnReply, SpawnRequest
from .exit_record import FinalState, kill_owner, read_exit_record
from .handle import RayHandle
from .shared import RayShared, share
from .switch import Switch

if TYPE_CHECKING:
    from ...pool.dispatcher import Dispatcher

log = logging.getLogger(__name__)

# After which a silent drone is probed. A short `hang_timeout` shortens this time, and for idle
# drones of a large pool the time is longer.
PROBE_INTERVAL_SECONDS = 2.0
# Limit for all idle drones together, because a probe costs the driver a millisecond.
MAX_PROBES_PER_SECOND = 50
EXIT_RECORD_TIMEOUT_SECONDS = 6.0  # for the task that reads an exit record on a dead drone's node
MIN_SWITCH_DRONES = 1000  # for which the switch has room, because `resize` may add some
MAX_SWITCH_CALLS = 512  # that may wait in the switch, besides four for each drone
_DEATH_ERRORS = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
)  # after each of these the actor counts as dead, and `on_call_failed` kills the actor to be sure


@cache  # because Ray keeps each remote function that is made
def _remote(act: Callable[..., Any]) -> Any:
    return ray.remote(act)


class RayEngine(Engine):
    """The Ray engine of one pool. `pool.engine.Engine` says which thread calls which method."""

    name = "ray"

    def __init__(self, dispatcher: Dispatcher, placement: dict[str, Any]) -> None:
        self.dispatcher = dispatcher
        self._supervisor = dispatcher.supervisor
        self._config = self.dispatcher.config
        self._session = current_session()
        self._placement = placement
        self._ended = False
        hang = self._config.hang_timeout
        self._probe_interval = (
            PROBE_INTERVAL_SECONDS if hang is None else min(PROBE_INTERVAL_SECONDS, hang / 4)
        )
        self._driver_node = ray.get_runtime_context().get_node_id()
        self._store: Any = RayStore()
        size = max(self._config.size, MIN_SWITCH_DRONES)
        options = {"num_cpus": 0, "max_concurrency": MAX_SWITCH_CALLS + 4 * size}
        here = NodeAffinitySchedulingStrategy(self._driver_node, soft=False)
        self.switch = ray.remote(Switch).options(**options, scheduling_strategy=here).remote()
        # Made once, because Ray keeps each of these for ever.
        self._actor_class = ray.remote(DroneActor)
        self._next_warning_at = 0.0
        self.adopt(self.snapshot())

    def is_connected(self) -> bool:
        """Return True if this process is still connected to the session of this pool."""
        return ray.is_initialized() and current_session() == self._session

    def loss(self) -> BaseException | None:
        if self._ended or self.is_connected():
            return None
        return RuntimeError(f"Ray was shut down while {self._config.name} was open")

    # -- starting ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._request_reports()
        self.dispatcher.call_later(self._probe_interval, self._check_drones)

    def can_start(self) -> bool:
        return not self._ended and self.is_connected()

    def start(self, number: int, name: str, index: int) -> RayHandle | None:
        env, cwd = self.dispatcher.environments[index], self._config.cwd
        watches_memory = self._config.max_memory is not None
        spawn_request = SpawnRequest(
            number, name, env, cwd, sys.path[:], self.switch, watches_memory
        )
        try:
            actor = self._actor_class.options(max_restarts=0, **self._placement).remote(
                spawn_request, self._ref
            )
        except Exception as error:
            self.dispatcher.post(self._supervisor.on_start_error, error)
            return None
        handle = RayHandle(self, number, name, actor)
        self.when_done(
            actor.begin.remote(),
            partial(self._on_started, handle),
            partial(self._on_not_started, handle),
        )
        return handle

    def _on_started(self, handle: RayHandle, reply: SpawnReply) -> None:
        handle.spawn_reply = reply
        if reply.boot_id != boot_id():
            requested_at = monotonic()
            self.when_done(
                handle.actor.clock.remote(),
                partial(self._set_clock, handle, requested_at),
                partial(self.on_call_failed, handle),
            )
        self._supervisor.on_started(handle, reply.pid)
        self._supervisor.on_hello(handle)

    def _set_clock(self, handle: RayHandle, requested_at: float, drone_time: float) -> None:
        """Estimate by how much the drone's clock is ahead.

        The drone read its clock about halfway between request and answer.
        """
        handle.clock_offset = drone_time - (requested_at + monotonic()) / 2

    def _on_not_started(self, handle: RayHandle, error: Exception) -> None:
        """Handle a failed `begin` call: the actor's death, or a drone that Ray could not start."""
        init_failed = isinstance(error, RayActorError) and error.actor_init_failed
        if handle.dying or (
            isinstance(error, _DEATH_ERRORS) and not init_failed and not _is_unschedulable(error)
        ):
            self.on_call_failed(handle, error)
            return
        if handle.state is not State.DEAD:
            handle.note_dying()
            start_error = RuntimeError(
                f"Ray could not start {handle.name}: {_failure_reason(error)}"
            )
            start_error.__cause__ = error
            self._supervisor.on_not_started(handle, start_error)

    def _warn_of_waiting_drones(self, starting: list[RayHandle], now: float) -> None:
        """Warn now and then of drones that have waited long for their resources."""
        if not starting:
            self._next_warning_at = 0.0
            return
        long_ago = now - tuning.start_report_seconds
        if now >= self._next_warning_at and any(each.requested_at <= long_ago for each in starting):
            self._next_warning_at = now + 6 * tuning.start_report_seconds
            more = len(starting) - 1
            log.warning(
                "%s still waits for %s%s%s; the cluster has %s free",
                self._config.name, starting[0].name, f" and {more} more" if more else "",
                _describe_placement_group(self._placement), ray.available_resources(),
            )  # fmt: skip

    # -- for handles, holding the reactor's lock ---------------------------------------------------

    def store_attachment(self, attachment: Any) -> LazyBuffers | OutOfBandBuffers:
        """Return the buffers that came beside a report, in the object store if there is room.

        `attachment` is a reference to an object of the store, or `OutOfBandBuffers`, which are put
        there now.
        """
        if isinstance(attachment, OutOfBandBuffers):
            try:
                stored: LazyBuffers = self._store.put(attachment)
                return stored
            except Full:  # the buffers stay in this process
                return attachment
        return LazyBuffers(attachment, self._session)

    def on_ended(self, handle: RayHandle) -> None:
        """Handle the end of a stopped drone: all reports are read, or the time for them is over."""
        if handle.state is not State.DEAD:
            if self.is_connected():
                ray.kill(handle.actor)
            self._report_death(handle, 0)

    def kill(self, handle: RayHandle) -> None:
        if not self.is_connected():  # the actors have ended with their session
            handle.exit_reason = "Ray was shut down"
            self.dispatcher.call_later(0.0, self._report_death, handle, None)
            return
        handle.exitcode = -signal.SIGKILL
        reply = handle.spawn_reply
        # Before Ray: a worker that Ray ends kills its children first, and so the zygotes of nested
        # pools before they have removed their directories.
        try:
            if reply is not None and reply.node == self._driver_node:
                kill_owner(reply.folder)
            elif reply is not None and self._is_node_alive(reply.node):
                self._remote_on_node(reply.node, kill_owner).remote(reply.folder)
        finally:
            ray.kill(handle.actor)
        handle.probe()

    def _is_node_alive(self, node: str) -> bool:
        return any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())

    def _remote_on_node(self, node: str, act: Callable[..., Any]) -> Any:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        return _remote(act).options(num_cpus=0, scheduling_strategy=there, max_retries=0)

    def forget(self, handle: RayHandle) -> None:
        if not self._ended and self.is_connected():
            self.switch.forget.remote(handle.number)

    # -- deaths ------------------------------------------------------------------------------------

    def on_call_failed(self, handle: RayHandle, error: Exception) -> None:
        """Handle a failed call of a drone: its death, or else an error of the engine."""
        if handle.dying:
            return
        if not isinstance(error, _DEATH_ERRORS):
            self.dispatcher.fail(error)
            return
        handle.note_dying()
        # Without the traceback, because its frames refer to the pool.
        handle.exit_reason, handle.cause = (_failure_reason(error), error.with_traceback(None))
        # An actor that was only unreachable for a moment must not go on.
        ray.kill(handle.actor)
        reply, act = handle.spawn_reply, partial(self._on_exit_record, handle)
        if reply is None:
            act(FinalState())
            return
        place = reply.folder, handle.out_read, handle.err_read
        if reply.node == self._driver_node:
            act(read_exit_record(*place))
        elif self._is_node_alive(reply.node):
            final_state = self._remote_on_node(reply.node, read_exit_record).remote(*place)
            self.when_done(final_state, act, lambda _: act(None))
            self.dispatcher.call_later(EXIT_RECORD_TIMEOUT_SECONDS, act, None)
        else:
            act(None)

    def _on_exit_record(self, handle: RayHandle, final_state: FinalState | None) -> None:
        if handle.state is not State.DEAD:
            handle.set_final_state(final_state)
            self._report_death(handle, handle.exitcode)

    def _report_death(self, handle: RayHandle, exitcode: int | None) -> None:
        if handle.state is not State.DEAD:
            handle.note_dying()
            self._supervisor.on_died(handle, exitcode)

    def _check_drones(self) -> None:
        """Probe silent drones without an unanswered call, because they may have died; warn of those
        that cannot start.

        Breaks the pool if Ray's session has ended.
        """
        if self._ended or self.dispatcher.break_if_lost():
            return
        now = self.dispatcher.reactor.timers.now()
        handles = [each for each in self.dispatcher.handles if isinstance(each, RayHandle)]
        self._warn_of_waiting_drones([each for each in handles if each.alive and not each.pid], now)
        idle_interval = max(self._probe_interval, len(handles) / MAX_PROBES_PER_SECOND)
        for handle in handles:
            if handle.spawn_reply is None or handle.unanswered_calls or not handle.is_up():
                continue
            interval = self._probe_interval if handle.in_flight else idle_interval
            if now - handle.last_contact_at >= interval:
                handle.probe()
        self.dispatcher.call_later(self._probe_interval, self._check_drones)

    # -- receiving ---------------------------------------------------------------------------------

    def _request_reports(self) -> None:
        self.when_done(self.switch.get_reports.remote(), self._on_reports, self._on_switch_lost)

    def _on_reports(self, reports: list[tuple[int, Any]]) -> None:
        """Handle reports that came through the switch, each with the number of the drone."""
        if self._ended:
            return
        for number, (packed, attachment) in reports:
            handle = next((each for each in self.dispatcher.handles if each.number == number), None)
            if isinstance(handle, RayHandle):
                handle.handle_report(packed, attachment)
        self._request_reports()

    def _on_switch_lost(self, error: Exception) -> None:
        if not self._ended:
            self.dispatcher.break_pool(
                RuntimeError(
                    f"the switch of {self._config.name} was lost: {_failure_reason(error)}"
                )
            )

    def when_done(
        self, ref: Any, act: Callable[[Any], object], failed: Callable[[Exception], object]
    ) -> None:
        """Call `act` or `failed` with the outcome of `ref`, holding the reactor's lock."""

        def post_outcome(future: Any) -> None:
            try:
                value = future.result()
            except Exception as error:
                self.dispatcher.post(self._call_if_connected, failed, error)
            else:
                self.dispatcher.post(self._call_if_connected, act, value)

        ref.future().add_done_callback(post_outcome)

    def _call_if_connected(self, act: Callable[[Any], object], value: Any) -> None:
        if self.is_connected():
            act(value)

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return snapshot.take_snapshot()

    def adopt(self, snapshot: Snapshot) -> None:
        """Put the snapshot into Ray's object store, and give the dispatcher a new registry."""
        self._main_copy = snapshot
        if self.is_connected():
            self._ref = ray.put(snapshot)
            names, overlaps = MainSnapshot(snapshot.names), self._config.width > 1
            self.dispatcher.registry = FunctionRegistry(
                names, self._store, overlaps, self.dispatcher.directory
            )

    def left_out(self, name: str) -> str | None:
        return self._main_copy.left_out.get(name)

    def share(self, obj: Any) -> RayShared[Any]:
        return share(obj, self.dispatcher.registry)

    def end(self) -> None:
        self._ended = True
        if not sys.is_finalizing() and self.is_connected():
            ray.kill(self.switch)


def _failure_reason(error: Exception) -> str:
    """Return the first line of Ray's reason for a failure, without the table of details."""
    text = str(error).strip()
    _, found, reason = text.partition("The actor is dead because ")
    lines = (reason if found else text).splitlines() or [type(error).__name__]
    return lines[0].partition(" Some common causes")[0].strip()


def _is_unschedulable(error: Exception) -> bool:
    """Return True if Ray can never start the actor: no node fits, or its environment fails."""
    return type(error).__name__ in ("ActorUnschedulableError", "RuntimeEnvSetupError")


def group_strategy(placement: Mapping[str, Any]) -> PlacementGroupSchedulingStrategy | None:
    """Return the scheduling strategy of drones that run in a placement group; None of others."""
    strategy = placement.get("scheduling_strategy")
    in_group = isinstance(strategy, PlacementGroupSchedulingStrategy) and strategy.placement_group
    return strategy if in_group else None


def _describe_placement_group(placement: Mapping[str, Any]) -> str:
    """Return the placement group and its state, for a message; "" if there is no group."""
    strategy = group_strategy(placement)
    if strategy is None:
        return ""
    state = ray.util.placement_group_table(strategy.placement_group).get("state", "not known")
    return f", in placement group {strategy.placement_group.id.hex()} ({state})"
