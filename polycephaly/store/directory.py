"""The vault: what the drones of a crew keep, and for whom.

    promise(fn, keep=True) ── result ──> Deposit 17: holders {drone 0}, nbytes          Kept ──┐
    a call that takes it ──ticket──> drone 0: the value itself                          Kept ──┼──> Deposit 17
                         └─────────> drone 1: FETCH from 0, PACKED, BRING to 1          calls ─┘    (strong references)
    Kept.value ─────────────────────────> FETCH, PACKED, opened here

Who owns what. A `RemoteObject` stands for one kept value. It is owned by references: of handles, of
the payloads of calls that take it (placeholders.py), and of recipes. The vault itself knows it
weakly. When the last reference has gone, in any thread and in the middle of anything, a finalizer
appends the number to a deque of each link that has the value, and takes no lock; the drone is told
(DROP) with the next work or soon after. Nobody else frees anything. (A finalizer, and no `__del__`:
while that runs, the vault could still find the deposit.)

What a drone has made itself (`Kept(value)`) is also held by the handles that there are in it. It
may give such handles away many times, one perhaps while an older one is dropped: there may be two
deposits of a value, one after the other. So drones count the hub's claims, and DROP gives up as
many as its deposit had (drone/store.py).

A value is in up to three forms, and exists while there is one of them:

    on the shelf of drones    put there by the work itself (first holder), or brought (then `packed` is there too)
    packed                    in the pool's shared memory, once anybody but its first holder asked for it: as a loan of
                              the drone's to this image, which lends it on. No byte of it is touched here.
    as a recipe               the work and its arguments, where it was given with retries

Interleavings, and why each is right:

* The last handle goes while a call that takes it waits, or runs: the call's payload holds the
  deposit until its answer replaces it; a drone that runs it has its own reference to the value.
* A drone is told to drop what a call still to come needs: no. That call's payload would have held
  the deposit; no number is used for a second value; and a second deposit of the same value has
  claims of its own.
* A call is given back, or lost and run again: its payload is unchanged. Each time it is sent,
  `fits` looks at where its deposits are at that moment.
* The holder dies before the answer that tells of the value is heard: what it had sent, or left in
  its page, is heard first, and `add` finds the drone dead. After that: `died` takes it from the
  holders of all deposits. Both in turns.
* The holder dies while it packs: no PACKED will come; `died` tells who waits, and each looks again.
* A drone retires (max_tasks, max_memory, refresh): what only it has is fetched first, and it ends
  when that is here.
* The handle is dropped while its value is on its way from the drone: PACKED finds no deposit, and
  its loan goes back.
* Work with keep=True is cancelled while it runs: its deposit is made, nobody has it, and it is
  dropped like any other.
* The pool ends: all who wait are told; what is packed stays readable in this image, the rest is
  lost.

Whoever waits for something of a deposit leaves a function in `waiting`. Whenever anything changes,
all of these are called, in a turn, and look for themselves; so no change needs to know who it is
for."""

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
    """How a value can be computed again."""

    definition: RemoteFunction
    kind: int
    args: tuple[Any, ...] | None
    payload: Any
    timeout: float | None


class RefCount:
    """What the drones hold for a deposit. It outlives that, until they are told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.holders: dict[
            DroneHandle, int
        ] = {}  # who has it, or will before any call that takes it: how many claims
        self._pid = os.getpid()

    def give_up(self) -> None:
        """In any thread, in the middle of anything."""
        if os.getpid() == self._pid:
            for handle, claims in self.holders.items():
                handle.drop(self.number, claims)


class RemoteObject:
    """One kept value. It is changed in turns only; any thread may look."""

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
        self.unpackable: bytes | None = None  # the error of its pickling, pickled
        self.asked: DroneHandle | None = None  # who packs it
        self.recipe: Recipe | None = None
        self.retries = 0
        self.again: Task | None = None  # it is being computed once more
        self.lost: BaseException | None = None
        self.waiting: list[Callable[[], object]] = []

    @property
    def home(self) -> str | None:
        return next((handle.name for handle in list(self.holders) if handle.alive), None)

    @property
    def burden(self) -> int:
        """Bytes that are pickled, copied or unpickled to have it elsewhere, about. What is packed
        is mapped there."""
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
        """It is there, and does not pickle."""
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
        """The value, built anew. Waits; raises what `Kept.value` says."""
        dispatcher, packed = self.directory.dispatcher, self.packed
        if self.directory.pid != os.getpid():
            raise RuntimeError(
                f"{self.what} belongs to another process, of which this one is a fork"
            )
        if packed is None:
            fetch = _Fetch(self.directory)
            dispatcher.reactor.post(partial(self.directory.fetch, self, fetch))

            def over(_: Promise[None]) -> None:  # there are no turns any more
                fetch._settle(FINISHED, None, self.directory.why(self))

            dispatcher.ended._hook(over)
            try:
                packed = fetch.result()
            finally:
                dispatcher.ended._unhook(over)
        return load(packed)


class _Fetch(Signal[Any]):
    """Of a value in its packed form."""

    def __init__(self, directory: ObjectDirectory) -> None:
        super().__init__()
        self._reactor = directory.dispatcher.reactor

    def _help(self, end: float | None) -> None:
        self._reactor.drive(self, end)


class ObjectDirectory:
    """A crew's. All but `home` is called in turns."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.pid = os.getpid()
        self._remote_objects: WeakValueDictionary[int, RemoteObject] = WeakValueDictionary()

    @property
    def name(self) -> str:
        return self.dispatcher.config.name

    def home(self, remote_objects: Iterable[RemoteObject]) -> tuple[DroneHandle | None, int]:
        """Who has most bytes of these, of those who take work; the least loaded of several. And how
        many bytes it takes to have them elsewhere. In any thread."""
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

    # -- what comes, and what goes -----------------------------------------------------------------

    def add(self, handle: DroneHandle, task: KeptTask, payload: Any) -> RemoteObject:
        """`link` has answered `work`: its value is on the shelf there."""
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
        """`link` has made these itself, and handles of them are in what comes of `work`, or will
        be."""
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
        """What was to bring it did not arrive."""
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
        """Nothing more is heard of it."""
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
        """It is to end: what only it has is fetched."""
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

    # -- who needs it ------------------------------------------------------------------------------

    def fits(self, task: Task, handle: DroneHandle) -> bool:
        """Can it be sent to `link` now? Else it has been put where it can be, or waits for what it
        takes."""
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
        stall_detector = next(
            (each for each in missing if each.is_stuck or not self._bring_about(each)), None
        )
        if stall_detector is not None:
            self.dispatcher.reject(task, partial(self.why, stall_detector))
        else:
            self.dispatcher.hold(task)
            missing[0].waiting.append(partial(self.dispatcher.go_on, task))
        return False

    def can_move(self, task: Task, handle: DroneHandle) -> bool:
        """Whether it can be sent to `link`; has what it takes packed, if it cannot yet, but could
        then."""
        here = True
        for each in task.payload.remote_objects.values():
            if handle not in each.holders and each.packed is None:
                here = False
                if not each.is_stuck:
                    self._bring_about(each)
        return here

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
        """Sees to it that it will be packed, or that something else changes; False where it is
        lost."""
        if self.dispatcher.over:
            return False
        return self._ask(remote_object) or self._compute_again(remote_object)

    def _ask(self, remote_object: RemoteObject) -> bool:
        """Has it packed by who has it."""
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
        if (
            remote_object.again is promise
        ):  # or it is being computed once more, as it was lost again before this
            remote_object.again = None
        if promise._exception is not None:
            remote_object.lost, remote_object.recipe = promise._exception, None
        self._changed(remote_object)

    def why(self, remote_object: RemoteObject) -> BaseException:
        """Why nobody can have it any more. Not in a turn: the error of its own pickling is
        unpickled."""
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
