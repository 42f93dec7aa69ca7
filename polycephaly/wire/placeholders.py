"""Placeholders in pickles for values that drones keep, and the pickling context of a call.

    controller: Kept ─┬─> placeholder 17 in the pickle ──> drone: resolve(17) ──> the value
                      └─> the pickling context: RemoteObject 17 ──> PayloadWithRefs
                          STORE 17, if the drone does not have the value

A handle can be pickled only for a call of its own pool: `PicklingContext`, the pickling context,
names the pool and collects the remote objects of the handles. A payload with placeholders becomes a
`PayloadWithRefs`, which holds their remote objects. So no value that a call needs is given up
before the call is answered; then the answer replaces the payload.

Handles made by a drone travel the other way, in results, also as numbers. The reactor receives
these numbers (KEPT_VALUES) before the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakValueDictionary

from ..memory.references import Serialized
from ..promises.promise import Promise, pickling_state

if TYPE_CHECKING:
    from .main_names import MainSnapshot


class Directory(Protocol):
    """A pool's record of the values that its drones keep."""

    @property
    def name(self) -> str: ...


class PicklingContext:
    """The pickling context: values pickled in this block belong to a call of that directory's pool.

    `snapshot` is shared with the process that runs the call; if None, shared values travel as
    handles. `inputs` is given where promises may stand in the values, and gets each promise with
    the index of its placeholder. `remote_objects` holds the kept values found, by number. `moved`
    holds the objects that follow the call's fate (see `_follow_task`). The context is entered for
    every call whose arguments are pickled, and costs a third of a microsecond.
    """

    __slots__ = ("_outer", "directory", "inputs", "moved", "remote_objects", "snapshot")

    def __init__(
        self,
        directory: Directory | None,
        snapshot: MainSnapshot | None = None,
        inputs: dict[int, tuple[int, Promise[Any]]] | None = None,
    ) -> None:
        self.directory = directory
        self.snapshot = snapshot
        self.inputs = inputs
        self.remote_objects: dict[int, Any] | None = None
        self.moved: list[Any] | None = None

    def add_input(self, promise: Promise[Any]) -> tuple[Callable[[int], Any], tuple[int]]:
        """Return the value to pickle in place of `promise`, in the form of `__reduce__`."""
        assert self.inputs is not None
        # By identity: a class of users may be unhashable.
        index, _ = self.inputs.setdefault(id(promise), (len(self.inputs), promise))
        return promised_value, (index,)

    def add_moved(self, thing: Any) -> None:
        if self.moved is None:
            self.moved = [thing]
        # The value is pickled twice if a faster pickler has failed.
        elif all(each is not thing for each in self.moved):
            self.moved.append(thing)

    def __enter__(self) -> Self:
        self._outer = pickling_state.context
        pickling_state.context = self
        return self

    def __exit__(self, *_: object) -> None:
        pickling_state.context = self._outer


class PayloadWithRefs:
    """A payload with placeholders, and the remote objects that these stand for."""

    __slots__ = ("payload", "remote_objects")

    def __init__(self, payload: bytes | Serialized, remote_objects: dict[int, Any]) -> None:
        self.payload = payload
        self.remote_objects = remote_objects

    def __len__(self) -> int:
        return len(self.payload)


def sent_bytes(payload: Any) -> int:
    """Return the bytes sent with a call: neither data only referred to, nor kept values."""
    if type(payload) is PayloadWithRefs:
        payload = payload.payload
    return payload.bytes_sent if isinstance(payload, Serialized) else len(payload)


def with_remote_objects(payload: Any, remote_objects: dict[int, Any]) -> Any:
    """Return `payload`, holding `remote_objects` in addition."""
    inner, before = split_remote_objects(payload)
    return PayloadWithRefs(inner, before | remote_objects) if remote_objects else payload


def split_remote_objects(payload: Any) -> tuple[Any, dict[int, Any]]:
    """Return the payload itself, and the remote objects that it holds."""
    if type(payload) is PayloadWithRefs:
        return payload.payload, payload.remote_objects
    return payload, {}


def resolve(number: int) -> Any:
    """Return the kept value, in a drone. Pickles contain this function's name."""
    store = current_store()
    if store is None:
        raise LookupError(f"kept value {number} was requested in a process that is no drone")
    return store.value(number)


# Its `values` are those of promises among the arguments, while this thread of a drone unpickles
# these.
promised_values = threading.local()


def promised_value(index: int) -> Any:
    """Return the value of a promise that is sent beside the arguments.

    Pickles contain this function's name.
    """
    return promised_values.values[index]


class ValueOwner(Protocol):
    """The object behind a handle: a `RemoteObject`, or `LocalKeptValue` in a drone."""

    @property
    def nbytes(self) -> int: ...
    @property
    def holder_name(self) -> str | None: ...
    @property
    def state(self) -> str: ...
    def fetch_value(self) -> Any: ...
    def make_placeholder(self) -> tuple[Callable[[int], Any], tuple[int]]:
        """Return how a handle is pickled in this thread's context.

        Raises `TypeError` if the handle cannot be pickled there.
        """


class LocalStore(Protocol):
    def value(self, number: int) -> Any: ...
    def make(self, value: Any) -> ValueOwner: ...


local_store: LocalStore | None = None
"""The store of this drone; None if this process is no drone."""
drone_thread = threading.local()
"""Its `store` is that of the drone that this thread runs, with `engine="inline"`."""
inline_stores: list[LocalStore] = []
"""The stores of the inline drones that run tasks, for threads and coroutines of these tasks: those
of the task that began last. Others run at the same time in another pool, or were given up.
"""


def current_store() -> LocalStore | None:
    """Return the store of the drone in which this thread runs, if any."""
    store: LocalStore | None = getattr(drone_thread, "store", None)
    return store or local_store or next(reversed(inline_stores), None)


last_arrived_end = 0
"""Token of the channel end that has arrived last in this drone; 0 if none has."""

known_owners: WeakValueDictionary[int, ValueOwner] = WeakValueDictionary()
"""Values kept by a drone's own `Kept(value)`, by number: in the drone that made the value, and
where a handle of it has arrived.
"""
