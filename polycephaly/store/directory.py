"""The object directory: the values kept by the drones of a dispatcher, and their references.

    promise(fn, keep=True) ── result ──> RemoteObject 17: holders {drone 0}, nbytes  Kept ──┐
    a call that takes it ──placeholder──> drone 0: the value itself                  Kept ──┼──> 17
                         └──────────────> drone 1: FETCH from 0, PACKED, BRING to 1  calls ─┘
    Kept.value ──────────────────────────> FETCH, PACKED, opened here

A `RemoteObject` stands for one kept value. It is owned by its references: handles, payloads of
calls that take it (placeholders.py), and recipes; the directory refers to it weakly. When the last
reference is gone, a finalizer, which takes no lock, queues a DROP for each drone that has the
value. Nothing else frees a value.

Code that waits for a change of a remote object adds a function to `waiting`. After any change all
of these are called, holding the reactor's lock, and check for themselves.

See docs/decisions/0006-object-references.md for the ownership rules and the interleavings.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary, finalize

from ..drone.store import described, grants
from ..errors import DroneDied, Lost
from ..pool.drone_handle import State
from ..pool.task import KeptTask, Task
from ..promises.promise import FINISHED, Promise, Signal
from ..wire.exceptions import unpack_exception
from .placeholders import here, known, resolve
from .references import Received, load

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher
    from ..pool.drone_handle import DroneHandle
    from ..wire.functions import RemoteFunction

__all__ = ["ObjectDirectory", "RemoteObject"]


class Recipe(NamedTuple):
    """The task that can compute a value again."""

    definition: RemoteFunction
    kind: int
    args: tuple[Any, ...] | None
    payload: Any
    timeout: float | None


class RefCount:
    """The controller's claims on the drones that hold a value.

    Outlives the remote object until these drones have been informed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        # Drones that have the value, or will have it before any call that takes it, with the number
        # of claims of each.
        self.holders: dict[DroneHandle, int] = {}
        self._pid = os.getpid()

    def give_up(self) -> None:
        """Queue a DROP for each holder. Any thread, at any point of its code."""
        if os.getpid() == self._pid:
            for handle, claims in self.holders.items():
                handle.drop(self.number, claims)


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
        stake = RefCount(number)
        self.holders = stake.holders
        finalize(self, stake.give_up).atexit = False
        self.packed: bytes | Received | None = None
        self.unpackable: bytes | None = None  # the pickled error of the value's own pickling
        self.asked: DroneHandle | None = None  # the drone that was asked to pack the value
        self.recipe: Recipe | None = None
        self.retries = 0
        self.again: Task | None = None  # the task that computes the value again
        self.lost: BaseException | None = None
        self.waiting: list[Callable[[], object]] = []

    @property
    def home(self) -> str | None:
        return next((handle.name for handle in list(self.holders) if handle.alive), None)

    @property
    def burden(self) -> int:
        """The approximate bytes to pickle, copy or unpickle for a use elsewhere.

        Packed buffers do not count: they are mapped.
        """
        packed = self.packed
        return (
            self.nbytes
            if packed is None
            else packed.pickle_bytes
            if isinstance(packed, Received)
            else len(packed)
        )

    @property
    def is_stuck(self) -> bool:
        """True if a drone has the value, but the value cannot be pickled."""
        return self.unpackable is not None and bool(self.holders)

    @property
    def state(self) -> str:
        where = self.home
        if where is None:
            where = "shared memory" if self.packed is not None else "nowhere: lost"
        return f"{self.kind}, {self.nbytes:,} bytes in {where}"

    @property
    def what(self) -> str:
        return f"what {self.label} gave in {self.directory.name}"

    def ticket(self) -> tuple[Callable[[int], Any], tuple[int]]:
        now = here.now
        other = None if now is None else now.directory
        if now is None or other is not self.directory:
            where = (
                f"was given to a call of {other.name}"
                if other is not None
                else "was to be pickled elsewhere"
            )
            raise TypeError(
                f"{self.what} is kept in {self.home or 'shared memory'}, and its handle {where}: "
                "it goes among the arguments of its own pool's calls; elsewhere, send its `value`"
            )
        now.met = {self.number: self} if now.met is None else now.met | {self.number: self}
        return resolve, (self.number,)

    def fetched(self) -> Any:
        """Return the value, rebuilt. Blocks; raises the errors listed at `Kept.value`."""
        dispatcher, packed = self.directory.dispatcher, self.packed
        if self.directory.pid != os.getpid():
            raise RuntimeError(
                f"{self.what} belongs to another process, of which this one is a fork"
            )
        if packed is None:
            fetch = _Fetch(self.directory)
            dispatcher.reactor.post(partial(self.directory.fetch, self, fetch))

            # The reactor's lock will never be taken again for this pool.
            def over(_: Promise[None]) -> None:
                fetch._settle(FINISHED, None, self.directory.why(self))

            dispatcher.ended._hook(over)
            try:
                packed = fetch.result()
            finally:
                dispatcher.ended._unhook(over)
        return load(packed)


class _Fetch(Signal[Any]):
    """The fetching of a value in its packed form."""

    def __init__(self, directory: ObjectDirectory) -> None:
        super().__init__()
        self._reactor = directory.dispatcher.reactor

    def _help(self, end: float | None) -> None:
        self._reactor.drive(self, end)


class ObjectDirectory:
    """The object directory of a dispatcher. All methods except `home` need the reactor's lock."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.pid = os.getpid()
        self._remote_objects: WeakValueDictionary[int, RemoteObject] = WeakValueDictionary()

    @property
    def name(self) -> str:
        return self.dispatcher.config.name

    def home(self, remote_objects: Iterable[RemoteObject]) -> tuple[DroneHandle | None, int]:
        """Return the drone that has most bytes of these, and the `burden` of all.

        Only drones that accept tasks count; of several, the least loaded one is taken. Any thread
        may call this.
        """
        held: dict[DroneHandle, int] = {}
        burden = 0
        for remote_object in remote_objects:
            burden += remote_object.burden
            for handle in list(remote_object.holders):
                if handle.state < State.RETIRING:
                    held[handle] = held.get(handle, 0) + remote_object.nbytes
        best = max(
            held,
            key=lambda handle: (held[handle], -len(handle.preferred), -len(handle.in_flight)),
            default=None,
        )
        return best, burden

    # -- values come and go ------------------------------------------------------------------------

    def add(self, handle: DroneHandle, task: KeptTask, payload: Any) -> RemoteObject:
        """Record that `task` was answered by drone `handle`, which keeps the value."""
        remote_object = task.remote_object
        if remote_object is None:
            nbytes, kind = described(payload)
            remote_object = RemoteObject(self, task.number, task.definition.label, nbytes, kind)
            self._remote_objects[task.number] = remote_object
            if task.retries > 0 and task.target is None:
                remote_object.recipe = Recipe(
                    task.definition, task.kind, task.args, task.payload, task.timeout
                )
        remote_object.again = task.remote_object = remote_object.unpackable = None
        remote_object.retries = task.retries
        self._put(remote_object, handle)
        self._changed(remote_object)
        return remote_object

    def given(self, handle: DroneHandle, task: Task | None, payload: Any) -> None:
        """Record values that drone `handle` made itself.

        Handles of these are, or will be, in the result of `task`.
        """
        given = []
        for number, nbytes, kind in grants(payload):
            remote_object = self._remote_objects.get(number)
            if remote_object is None:
                label = task.definition.label if task is not None else "work that was lost"
                remote_object = self._remote_objects[number] = known[number] = RemoteObject(
                    self, number, label, nbytes, kind
                )
            self._put(remote_object, handle)
            given.append(remote_object)
        if task is not None:
            task.given = given if task.given is None else task.given + given

    def _put(self, remote_object: RemoteObject, handle: DroneHandle) -> None:
        if handle.alive:
            remote_object.holders[handle] = remote_object.holders.get(handle, 0) + 1
            if handle.state >= State.RETIRING:
                self._ask(remote_object)
        else:
            remote_object.lost = handle.death

    def not_brought(self, handle: DroneHandle, number: int) -> None:
        """Record that a message which should have brought the value did not arrive."""
        remote_object = self._remote_objects.get(number)
        if remote_object is not None and handle in remote_object.holders:
            remote_object.holders[handle] -= 1
            if not remote_object.holders[handle]:
                del remote_object.holders[handle]

    def packed(self, handle: DroneHandle, number: int, payload: Any) -> None:
        remote_object = self._answered(handle, number)
        if remote_object is not None:
            remote_object.packed = payload if isinstance(payload, Received) else bytes(payload)
            self._changed(remote_object)

    def not_packed(self, handle: DroneHandle, number: int, payload: Any) -> None:
        remote_object = self._answered(handle, number)
        if remote_object is not None:
            remote_object.unpackable = bytes(payload)
            self._changed(remote_object)

    def _answered(self, handle: DroneHandle, number: int) -> RemoteObject | None:
        handle.packing.discard(number)
        remote_object = self._remote_objects.get(number)
        if remote_object is not None and remote_object.asked is handle:
            remote_object.asked = None
        return remote_object

    def died(self, handle: DroneHandle) -> None:
        """Remove a drone that sends no more messages from all holders."""
        handle.packing.clear()
        for remote_object in list(self._remote_objects.values()):
            if handle in remote_object.holders:
                del remote_object.holders[handle]
                if remote_object.asked is handle:
                    remote_object.asked = None
                if handle.death is not None:
                    remote_object.lost = handle.death
                self._changed(remote_object)

    def evacuate(self, handle: DroneHandle) -> None:
        """Fetch the values that only this drone has, because it is about to end."""
        for remote_object in list(self._remote_objects.values()):
            if handle in remote_object.holders:
                self._ask(remote_object)

    def close(self) -> None:
        for remote_object in list(self._remote_objects.values()):
            remote_object.holders.clear()
            self._changed(remote_object)

    def _changed(self, remote_object: RemoteObject) -> None:
        waiting, remote_object.waiting = remote_object.waiting, []
        for look in waiting:
            look()

    # -- values are needed -------------------------------------------------------------------------

    def fits(self, task: Task, handle: DroneHandle) -> bool:
        """Return whether `task` can be sent to drone `handle` now.

        If not, the task was moved to a queue where it can be sent, or waits for the values that it
        takes, or was rejected.
        """
        remote_objects = task.payload.remote_objects.values()
        missing = [
            each for each in remote_objects if handle not in each.holders and each.packed is None
        ]
        if not missing:
            return True
        home = self.home(remote_objects)[0] if task.target is None else handle
        if home is not None and home is not handle:
            self.dispatcher.locality.add(task, home)
            return False
        lost = next(
            (each for each in missing if each.is_stuck or not self._bring_about(each)), None
        )
        if lost is not None:
            self.dispatcher.reject(task, partial(self.why, lost))
        else:
            self.dispatcher.hold(task)
            missing[0].waiting.append(partial(self.dispatcher.go_on, task))
        return False

    def can_move(self, task: Task, handle: DroneHandle) -> bool:
        """Return whether `task` can be sent to drone `handle`.

        If not, values that it takes are packed, so that the task can be sent there later.
        """
        can_be_sent = True
        for each in task.payload.remote_objects.values():
            if handle not in each.holders and each.packed is None:
                can_be_sent = False
                if not each.is_stuck:
                    self._bring_about(each)
        return can_be_sent

    def fetch(self, remote_object: RemoteObject, fetch: Promise[Any]) -> None:
        if fetch.done():
            return
        if remote_object.packed is not None:
            self.dispatcher.reactor.deliver(
                partial(fetch._settle, FINISHED, remote_object.packed, None)
            )
        elif not remote_object.is_stuck and self._bring_about(remote_object):
            remote_object.waiting.append(partial(self.fetch, remote_object, fetch))
        else:
            self.dispatcher.reactor.deliver(
                lambda: fetch._settle(FINISHED, None, self.why(remote_object))
            )

    def _bring_about(self, remote_object: RemoteObject) -> bool:
        """Have the value packed or computed again; return False if it is lost."""
        if self.dispatcher.over:
            return False
        return self._ask(remote_object) or self._compute_again(remote_object)

    def _ask(self, remote_object: RemoteObject) -> bool:
        """Ask a drone that has the value to pack it; return False if no drone can."""
        if remote_object.packed is not None or remote_object.asked is not None:
            return True
        handle = next(
            (each for each in remote_object.holders if each.state <= State.RETIRING), None
        )
        if handle is None or remote_object.unpackable is not None:
            return False
        remote_object.asked = handle
        handle.packing.add(remote_object.number)
        self.dispatcher.fetch_from(handle, remote_object.number)
        return True

    def _compute_again(self, remote_object: RemoteObject) -> bool:
        recipe = remote_object.recipe
        if remote_object.again is not None:
            return True
        if recipe is None or remote_object.retries <= 0:
            return False
        task = remote_object.again = KeptTask(self.dispatcher)
        task.number = remote_object.number
        task.remote_object = remote_object
        task.definition, task.kind, task.args, task.payload, task.timeout = recipe
        remote_object.retries -= 1
        task.retries = remote_object.retries
        task._hook(
            lambda promise: self.dispatcher.reactor.post(
                partial(self._computed_again, remote_object, promise)
            )
        )
        self.dispatcher.go_on(task)
        return True

    def _computed_again(self, remote_object: RemoteObject, promise: Promise[Any]) -> None:
        # Otherwise the value was lost again before this call, and another task computes it.
        if remote_object.again is promise:
            remote_object.again = None
        if promise._exception is not None:
            remote_object.lost, remote_object.recipe = promise._exception, None
        self._changed(remote_object)

    def why(self, remote_object: RemoteObject) -> BaseException:
        """Return the error that tells why the value is lost.

        Must not be called holding the reactor's lock: the value's own pickling error is unpickled
        here.
        """
        told, cause, unpackable = (
            f"what {remote_object.label} gave",
            remote_object.lost,
            remote_object.unpackable,
        )
        refused = None if unpackable is None else unpack_exception(unpackable)
        if refused is not None and remote_object.holders:
            return refused
        if self.dispatcher.over or (self.dispatcher.closing and cause is None):
            why = f"{self.name} has ended, and {told} with it: read `value` before"
        elif cause is None:
            why = f"{told} was lost with its drone, which was replaced"
        elif isinstance(cause, DroneDied):
            why = f"{told} was lost: {cause}"
        else:
            why = f"{told} was lost, and computing it again failed: {type(cause).__name__}: {cause}"
        known = {name: getattr(cause, name, "") for name in ("drone", "stderr", "stack")}
        error = Lost(
            why,
            exitcode=getattr(cause, "exitcode", None),
            running=getattr(cause, "running", None),
            **known,
        )
        error.__cause__ = refused or cause
        return error
