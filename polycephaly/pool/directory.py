"""The object directory: the values kept by the drones of a dispatcher, and their references.

    promise(fn, keep=True) ── result ──> RemoteObject 17: holders {drone 0}, nbytes  Kept ──┐
    a call that takes it ──placeholder──> drone 0: the value itself                  Kept ──┼──> 17
                         └──────────────> drone 1: FETCH from 0, PACKED, STORE to 1  calls ─┘
    Kept.value ──────────────────────────> FETCH, PACKED, opened here

A `RemoteObject` stands for one kept value. It is owned by its references: handles, payloads of
calls that take it (placeholders.py), and recipes; the directory refers to it weakly. When the last
reference is gone, a finalizer, which takes no lock, queues a DROP for each drone that has the
value. Nothing else frees a value.

Code that waits for a change of a remote object adds a function to `change_callbacks`. After any
change all of these are called, holding the reactor's lock, and check for themselves.

See docs/decisions/0006-object-references.md for the ownership rules and the interleavings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, finalize

from ..errors import DroneDied, Lost
from ..memory.references import Received, load
from ..promises.promise import (
    Promise,
    Signal,
    fulfill,
    pickling_state,
    reject,
    stored_error,
    when_settled,
)
from ..store.kept import Kept
from ..wire.exceptions import unpack_exception
from ..wire.kept_values import unpack_answer, unpack_kept_values
from ..wire.messages import FETCH, pack_numbers
from ..wire.placeholders import known_owners, resolve
from .dispatcher_base import DispatcherBase
from .drone_handle import DroneHandle
from .drone_record import DroneRecord
from .interfaces import State
from .task import Task
from .task_state import PARKED


def _queue_drops(number: int, holders: dict[DroneHandle, int], pid: int) -> None:
    """Queue a DROP for each drone that has a value. Any thread, at any point of its code."""
    if os.getpid() == pid:
        for handle, claims in holders.items():
            handle.drop(number, claims)


class RemoteObject:
    """One kept value.

    Changed only while holding the reactor's lock; any thread may read.
    """

    def __init__(
        self, directory: ObjectDirectory, number: int, label: str, nbytes: int, kind: str
    ) -> None:
        self.directory = directory
        self.number = number
        self.label = label
        self.nbytes = nbytes
        self.kind = kind
        # Drones that have the value, or will have it before any call that takes it, with the number
        # of claims of each.
        self.holders: dict[DroneHandle, int] = {}
        finalize(self, _queue_drops, number, self.holders, os.getpid()).atexit = False
        self.packed: bytes | Received | None = None
        self.pickling_error: bytes | None = None  # the pickled error of the value's own pickling
        self.packing_drone: DroneHandle | None = None  # the drone that was asked to pack the value
        # Definition, kind, args, payload, timeout, priority and resources of the task that can
        # compute the value again.
        self.recipe: tuple[Any, ...] | None = None
        self.retries = 0
        self.recomputation: Task | None = None  # the task that computes the value again
        self.loss_cause: BaseException | None = None
        self.change_callbacks: list[Callable[[], object]] = []

    @property
    def holder_name(self) -> str | None:
        return next((handle.name for handle in list(self.holders) if handle.alive), None)

    @property
    def transfer_bytes(self) -> int:
        """The approximate bytes to pickle, copy or unpickle for a use elsewhere.

        Packed buffers do not count: they are mapped.
        """
        packed = self.packed
        if packed is None:
            return self.nbytes
        return packed.pickle_bytes if isinstance(packed, Received) else len(packed)

    @property
    def state(self) -> str:
        where = self.holder_name
        if where is None:
            where = "shared memory" if self.packed is not None else "nowhere: lost"
        return f"{self.kind}, {self.nbytes:,} bytes in {where}"

    @property
    def description(self) -> str:
        return f"the value of {self.label} in {self.directory.name}"

    def make_placeholder(self) -> tuple[Callable[[int], Any], tuple[int]]:
        context = pickling_state.context
        other = None if context is None else context.directory
        if context is None or other is not self.directory:
            where = "was pickled outside a call"
            if other is not None:
                where = f"was passed to a call of {other.name}"
            raise TypeError(
                f"{self.description} is kept in {self.holder_name or 'shared memory'}, and its "
                f"handle {where}: pass the handle to calls of its own pool only; elsewhere, send "
                "its `value`"
            )
        context.remote_objects = {**(context.remote_objects or {}), self.number: self}
        return resolve, (self.number,)

    def fetch_value(self) -> Any:
        """Return the value, rebuilt. Blocks; raises the errors listed at `Kept.value`."""
        dispatcher, packed = self.directory.dispatcher, self.packed
        if self.directory.pid != os.getpid():
            raise RuntimeError(
                f"{self.description} belongs to another process, from which this one was forked"
            )
        if packed is None:
            fetch: Signal[Any] = Signal()
            dispatcher.post(self.directory.fetch, self, fetch)

            # The reactor's lock will never be taken again for this pool.
            def on_pool_ended(_: Promise[None]) -> None:
                reject(fetch, self.directory.loss_error(self))

            when_settled(dispatcher.over, on_pool_ended)
            try:
                packed = fetch.result()
            finally:
                dispatcher.over.remove_done_callback(on_pool_ended)
                del fetch  # see `Promise.result`
        return load(packed)


class KeptTask(Task):
    """A task whose value stays in the drone. Its result is a handle of the value."""

    keeps = True
    weight = Task.weight + 1  # so that `_take_similar` does not put it into a run of plain calls
    remote_object: RemoteObject | None = None  # if the task computes a lost value again

    unpickle: Callable[[Any], Any] = staticmethod(Kept._from_owner)

    def is_opened_at_once(self, payload: Any) -> bool:
        return True


class ObjectDirectory:
    """The object directory of a dispatcher.

    Methods need the reactor's lock, except `best_holder`, and `loss_error`, which must be called
    without it.
    """

    def __init__(self, dispatcher: DispatcherBase) -> None:
        self.dispatcher = dispatcher
        self.pid = os.getpid()
        self._remote_objects: WeakValueDictionary[int, RemoteObject] = WeakValueDictionary()

    @property
    def name(self) -> str:
        return self.dispatcher.config.name

    def best_holder(self, remote_objects: Iterable[RemoteObject]) -> tuple[DroneHandle | None, int]:
        """Return the drone that has most bytes of these, and the `transfer_bytes` of all.

        Only drones that accept tasks count; of several, the least loaded one is taken. Any thread
        may call this.
        """
        held: dict[DroneHandle, int] = {}
        transfer_bytes = 0
        for remote_object in remote_objects:
            transfer_bytes += remote_object.transfer_bytes
            for handle in list(remote_object.holders):
                if handle.state < State.RETIRING:
                    held[handle] = held.get(handle, 0) + remote_object.nbytes
        best = max(
            held,
            key=lambda handle: (held[handle], -len(handle.preferred), -len(handle.in_flight)),
            default=None,
        )
        return best, transfer_bytes

    # -- values come and go ------------------------------------------------------------------------

    def add(self, handle: DroneHandle, task: KeptTask, payload: Any) -> RemoteObject:
        """Record that `task` was answered by drone `handle`, which keeps the value."""
        remote_object = task.remote_object
        if remote_object is None:
            nbytes, kind = unpack_answer(payload)
            remote_object = RemoteObject(self, task.number, task.definition.label, nbytes, kind)
            self._remote_objects[task.number] = remote_object
            if task.retries > 0 and task.target is None:
                call = task.definition, task.kind, task.args, task.payload
                remote_object.recipe = *call, task.timeout, task.priority, task.resources
        remote_object.recomputation = task.remote_object = remote_object.pickling_error = None
        remote_object.retries = task.retries
        self._add_holder(remote_object, handle)
        self._notify_changed(remote_object)
        return remote_object

    def on_kept_values(self, handle: DroneHandle, task: Task | None, payload: Any) -> None:
        """Record values that drone `handle` made itself.

        Handles of these are, or will be, in the result of `task`.
        """
        given: list[object] = []
        for number, nbytes, kind in unpack_kept_values(payload):
            remote_object = self._remote_objects.get(number)
            if remote_object is None:
                label = task.definition.label if task is not None else "a lost task"
                remote_object = self._remote_objects[number] = known_owners[number] = RemoteObject(
                    self, number, label, nbytes, kind
                )
            self._add_holder(remote_object, handle)
            given.append(remote_object)
        if task is not None:
            before = task.answer_objects
            task.answer_objects = given if before is None else before + given

    def any_kept(self) -> str | None:
        """Return a description of a value that a drone keeps, or None. Any thread may call this."""
        for each in self._remote_objects.values():  # a copy of the references
            if each.holders:
                return f"the value of {each.label} #{each.number}: {each.state}"
        return None

    def _add_holder(self, remote_object: RemoteObject, handle: DroneHandle) -> None:
        if handle.alive:
            remote_object.holders[handle] = remote_object.holders.get(handle, 0) + 1
            if handle.state >= State.RETIRING:
                self._request_packing(remote_object)
        else:
            remote_object.loss_cause = handle.death

    def on_store_lost(self, handle: DroneHandle, number: int) -> None:
        """Record that a message which should have brought the value did not arrive."""
        remote_object = self._remote_objects.get(number)
        if remote_object is not None and handle in remote_object.holders:
            remote_object.holders[handle] -= 1
            if not remote_object.holders[handle]:
                del remote_object.holders[handle]

    def on_packed(self, handle: DroneHandle, number: int, payload: Any, failed: bool) -> None:
        """Record the answer to a FETCH: the packed value or, if that `failed`, the error."""
        handle.packing.discard(number)
        remote_object = self._remote_objects.get(number)
        if remote_object is None:
            return
        if remote_object.packing_drone is handle:
            remote_object.packing_drone = None
        if failed:
            remote_object.pickling_error = bytes(payload)
        else:
            remote_object.packed = payload if isinstance(payload, Received) else bytes(payload)
        self._notify_changed(remote_object)

    def on_drone_died(self, handle: DroneHandle) -> None:
        """Remove a drone that sends no more messages from all holders."""
        handle.packing.clear()
        for remote_object in list(self._remote_objects.values()):
            if handle in remote_object.holders:
                del remote_object.holders[handle]
                if remote_object.packing_drone is handle:
                    remote_object.packing_drone = None
                if handle.death is not None:
                    remote_object.loss_cause = handle.death
                self._notify_changed(remote_object)

    def evacuate(self, handle: DroneHandle) -> None:
        """Fetch the values that only this drone has, because it is about to end."""
        for remote_object in list(self._remote_objects.values()):
            if handle in remote_object.holders:
                self._request_packing(remote_object)

    def close(self) -> None:
        for remote_object in list(self._remote_objects.values()):
            remote_object.holders.clear()
            self._notify_changed(remote_object)

    def _notify_changed(self, remote_object: RemoteObject) -> None:
        callbacks, remote_object.change_callbacks = remote_object.change_callbacks, []
        for callback in callbacks:
            callback()

    # -- values are needed -------------------------------------------------------------------------

    def prepare_to_send(self, task: Task, handle: DroneHandle) -> bool:
        """Return whether `task` can be sent to drone `handle` now.

        If not, the task was moved to a queue where it can be sent, or waits for the values that it
        takes, or was rejected.
        """
        missing = self._missing_values(task, handle)
        if not missing:
            return True
        # A task with resources was given the best of the drones that can take it now.
        if task.target is None and not task.resources:
            best, _ = self.best_holder(task.payload.remote_objects.values())
            if best is not None and best is not handle:
                task.preferred_drone = best
                self.dispatcher.assignment.leave_queue(task)
                self.dispatcher.state.insert(task, self.dispatcher.reactor.timers.now())
                return False
        lost = next((each for each in missing if not self._request_value(each)), None)
        if lost is not None:
            self.dispatcher.state.refused(task, partial(self.loss_error, lost))
        else:
            self.dispatcher.assignment.leave_queue(task, PARKED)
            self.dispatcher.state.parked.add(task)
            missing[0].change_callbacks.append(partial(self.dispatcher.resume, task))
        return False

    def can_move(self, task: Task, handle: DroneRecord) -> bool:
        """Return whether `task` can be sent to drone `handle`.

        If not, values that it takes are packed, so that the task can be sent there later.
        """
        missing = self._missing_values(task, handle)
        for each in missing:
            self._request_value(each)
        return not missing

    def _missing_values(self, task: Task, handle: DroneRecord) -> list[RemoteObject]:
        """Return the values that `task` takes and that cannot go to drone `handle` with it."""
        return [
            each
            for each in task.payload.remote_objects.values()
            if handle not in each.holders and each.packed is None
        ]

    def fetch(self, remote_object: RemoteObject, fetch: Promise[Any]) -> None:
        if fetch.done():
            return
        if remote_object.packed is not None:
            self.dispatcher.reactor.deliver(partial(fulfill, fetch, remote_object.packed))
        elif self._request_value(remote_object):
            remote_object.change_callbacks.append(partial(self.fetch, remote_object, fetch))
        else:
            self.dispatcher.reactor.deliver(lambda: reject(fetch, self.loss_error(remote_object)))

    def _request_value(self, remote_object: RemoteObject) -> bool:
        """Have the value packed or computed again; return False if it is lost, or a drone has it
        and cannot pickle it.
        """
        is_unpicklable = remote_object.pickling_error is not None and remote_object.holders
        if self.dispatcher.has_ended or is_unpicklable:
            return False
        return self._request_packing(remote_object) or self._recompute(remote_object)

    def _request_packing(self, remote_object: RemoteObject) -> bool:
        """Ask a drone that has the value to pack it; return False if no drone can."""
        if remote_object.packed is not None or remote_object.packing_drone is not None:
            return True
        handle = next(
            (each for each in remote_object.holders if each.state <= State.RETIRING), None
        )
        if handle is None or remote_object.pickling_error is not None:
            return False
        remote_object.packing_drone = handle
        handle.packing.add(remote_object.number)
        handle.send(pack_numbers(FETCH, (remote_object.number,)))
        return True

    def _recompute(self, remote_object: RemoteObject) -> bool:
        recipe = remote_object.recipe
        if remote_object.recomputation is not None:
            return True
        if recipe is None or remote_object.retries <= 0:
            return False
        task = remote_object.recomputation = KeptTask(self.dispatcher)
        task.number = remote_object.number
        task.remote_object = remote_object
        task.definition, task.kind, task.args, task.payload, *limits = recipe
        task.timeout, task.priority, task.resources = limits
        remote_object.retries -= 1
        task.retries = remote_object.retries
        on_recomputed = partial(self.dispatcher.post, self._on_recomputed, remote_object, task)
        when_settled(task.promise, on_recomputed)
        self.dispatcher.unsettled[task] = None
        self.dispatcher.resume(task)
        return True

    def _on_recomputed(
        self, remote_object: RemoteObject, task: Task, promise: Promise[Any]
    ) -> None:
        # Otherwise the value was lost again before this call, and another task computes it.
        if remote_object.recomputation is task:
            remote_object.recomputation = None
        error = stored_error(promise)
        if error is not None:
            remote_object.loss_cause, remote_object.recipe = error, None
        self._notify_changed(remote_object)

    def loss_error(self, remote_object: RemoteObject) -> BaseException:
        """Return the error that tells why the value is lost.

        Must not be called holding the reactor's lock: the value's own pickling error is unpickled
        here.
        """
        cause, pickled_error = remote_object.loss_cause, remote_object.pickling_error
        pickling_error = None if pickled_error is None else unpack_exception(pickled_error)
        if pickling_error is not None and remote_object.holders:
            return pickling_error
        reason = f"the value of {remote_object.label} was lost"
        if self.dispatcher.has_ended or (self.dispatcher.state.closing and cause is None):
            reason += f" when {self.name} ended: read `value` before the end"
        elif cause is None:
            reason += " with its drone, which was replaced"
        elif isinstance(cause, DroneDied):
            reason += f": {cause}"
        else:
            reason += f", and computing it again failed: {type(cause).__name__}: {cause}"
        details: dict[str, Any]
        details = {name: getattr(cause, name, "") for name in ("drone", "stderr", "stack")}
        details |= {name: getattr(cause, name, None) for name in ("exitcode", "running")}
        error = Lost(reason, **details)
        error.__cause__ = pickling_error or cause
        return error
