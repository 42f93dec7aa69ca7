"""What a drone runs before its tasks: the initializer, and what was pushed to the pool.

    a drone's HELLO ──> initializer, pushes ─┐
                                             ├──> handle.preparations ──> one by one ──> READY
    Pool.push ────────> each drone there is ─┘

Each of them was pickled once, when the pool was made or `push` was called. A drone is sent one at a
time, when it has nothing else, and takes no task before it has run the last one. So no call that
was submitted after a `push` overtakes that on any drone.

Methods are called while holding the reactor's lock, unless their docstrings say otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..promises.promise import Promise, Signal, reject, stored_error, when_settled
from ..wire.placeholders import PayloadWithRefs
from . import namespace
from .dispatcher_base import DispatcherBase, pool_error
from .drone_handle import DroneHandle
from .interfaces import State
from .task import Task
from .task_state import ENDING


class Step:
    """The initializer, or what one `push` has pushed."""

    def __init__(self, task: Task, label: str, names: Sequence[str] = ()) -> None:
        self.task = task  # captured and never submitted: each drone gets one like this
        self.label = label
        self.names = frozenset(names)  # those pushed; none of the initializer
        self.loaded: Signal[None] = Signal()
        """Settled when the first drone has run it, or no drone is free for that soon."""
        self.is_accepted = not names
        """False until then: an error is one of the caller of `push`."""
        self.is_withdrawn = False  # because of such an error


class Preparation:
    """The preparation of the drones of one pool."""

    def __init__(
        self,
        dispatcher: DispatcherBase,
        on_ready: Callable[[DroneHandle], None],
        on_failed: Callable[[DroneHandle, BaseException], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._steps: list[Step] = []

    @property
    def has_pushes(self) -> bool:
        return any(step.names for step in self._steps)

    # -- any thread, without the lock --------------------------------------------------------------

    def set_initializer(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...], pool: str
    ) -> None:
        """Pickle the initializer, before there is a drone. Raises the errors of pickling."""
        what = f"the initializer {self._dispatcher.registry.define(initializer).label}"
        task = self._capture(f"{what} or its initargs contain", initializer, initargs, {})
        self._steps.append(Step(task, f"the initializer of {pool}"))

    def capture_push(self, names: dict[str, Any]) -> Step:
        """Pickle the values. Raises the errors of pickling, with a note that has the name."""
        texts = ", ".join(map(repr, names))
        task = self._capture(f"the values of {texts} contain", namespace.push, (), names)
        return Step(task, f"the push of {texts}", [*names])

    def _capture(
        self,
        contain: str,
        work: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Task:
        definition = self._dispatcher.registry.define(work)
        task = Task(self._dispatcher)
        inputs = definition.takes_function or task.capture(definition, args, kwargs)
        if inputs or type(task.payload) is PayloadWithRefs:
            raise TypeError(
                f"{contain} a promise, a kept value, or a value shared on Ray: pass the value "
                "itself"
            )
        return task

    def _report(self, handle: DroneHandle, step: Step, promise: Promise[Any]) -> None:
        """Report how a step has ended on a drone. Called without the lock, because the error's text
        may be made by code of users.
        """
        error = stored_error(promise)
        reason = error and pool_error(f"{step.label} failed", error)
        self._dispatcher.post(self._on_ended, handle, step, error, reason)

    # -- holding the reactor's lock ----------------------------------------------------------------

    def begin(self, handle: DroneHandle) -> None:
        """Prepare a drone that has just started."""
        handle.preparations.extend(self._steps)
        handle.become(State.PREPARING)
        self.go_on(handle)

    def add_push(self, step: Step) -> None:
        """Push to all drones that there are, and to all that will be."""
        self._steps.append(step)
        current = self._dispatcher.current_drones()
        for handle in current:
            if handle.state > State.STARTING:
                handle.preparations.append(step)
                handle.changed()
                self.go_on(handle)
        if current and all(map(_runs_calls, current)):  # perhaps for long
            self._accept(step)

    def go_on(self, handle: DroneHandle) -> None:
        """Send the next step, if the drone has nothing else to do. After the last one it is
        ready.
        """
        if not _is_up(handle):
            return
        if not handle.preparations:
            self._on_ready(handle)
        elif not (handle.in_flight or handle.is_preparing):
            step = handle.preparations[0]
            handle.is_preparing = True
            task = Task(self._dispatcher)
            task.definition, task.target = step.task.definition, handle
            task.args, task.kind, task.payload = step.task.args, step.task.kind, step.task.payload
            task.state = ENDING  # it comes from no queue
            when_settled(task.promise, partial(self._report, handle, step))
            now = self._dispatcher.reactor.timers.now()
            send = self._dispatcher.assignment.choose(handle, deque([task]), 1, now)
            assert send is not None  # it has no other task
            _, runs = send
            handle.send(handle.pack(runs), [task])

    def _on_ended(
        self,
        handle: DroneHandle,
        step: Step,
        error: BaseException | None,
        reason: BaseException | None,
    ) -> None:
        if not _is_up(handle):
            return
        if reason is not None and step.is_accepted:
            self._on_failed(handle, reason)
            return
        if error is None:
            self._accept(step)
        else:
            self._withdraw(step, error)
        handle.is_preparing = False
        handle.preparations.popleft()
        handle.changed()
        self.go_on(handle)

    def _accept(self, step: Step) -> None:
        if not (step.is_accepted or step.is_withdrawn):
            step.is_accepted = True
            self._steps = _needed(self._steps)
            self._dispatcher.settle_signal(step.loaded)

    def _withdraw(self, step: Step, error: BaseException) -> None:
        """Forget a push that the first drone could not load. Its caller gets the error."""
        if not step.is_withdrawn:
            step.is_withdrawn = True
            if step in self._steps:
                self._steps.remove(step)
            self._dispatcher.reactor.deliver(partial(reject, step.loaded, error))


def _needed(steps: Sequence[Step]) -> list[Step]:
    """Return `steps` without those pushes of which each name was pushed again later."""
    needed = []
    again: frozenset[str] = frozenset()
    for step in reversed(steps):
        if not step.names or not step.names <= again:
            needed.append(step)
        if step.is_accepted:
            again |= step.names
    return needed[::-1]


def _is_up(handle: DroneHandle) -> bool:
    return State.PREPARING <= handle.state <= State.RETIRING


def _runs_calls(handle: DroneHandle) -> bool:
    return handle.state is State.READY and bool(handle.in_flight) and not handle.is_preparing
