"""Tickets: what stands in a pickle for a value that a drone keeps.

    controller: Kept ──pickled for a call of its pool──> ticket 17 ┐       drone: redeem(17) ──> the shelf ──> the value
                  └── met: deposit 17 ──> Taking(payload, deposits)┘ BRING 17, where it is not there

A handle says how it is pickled only to who pickles for its own pool: `meeting` tells it so, and
notes which handles were met. A payload with tickets is a `PayloadWithRefs`, which holds what the
tickets stand for. So nothing that a call needs is given up before it is answered; then the payload
makes room for the answer, and holds it no more.

Handles that a drone has made itself travel the other way, in results: as a number too, of which the
hub is told (GIVEN) before the result comes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, Self
from weakref import WeakValueDictionary

from .references import Serialized

if TYPE_CHECKING:
    from .directory import ObjectDirectory, RemoteObject

__all__ = [
    "PayloadWithRefs",
    "ValueOwner",
    "here",
    "known",
    "meeting",
    "resolve",
    "taking",
    "untaken",
]


class meeting:
    """What is pickled in this block is for a call of that vault's pool; `met` are the kept values
    in it, by number, and `moved` is what wants to know what becomes of the call (`_goes_with`).

    It is entered for every call whose arguments are pickled, and costs a third of a microsecond."""

    __slots__ = ("_outer", "directory", "met", "moved")

    def __init__(self, directory: ObjectDirectory | None) -> None:
        self.directory = directory
        self.met: dict[int, RemoteObject] | None = None
        self.moved: list[Any] | None = None

    def moves(self, thing: Any) -> None:
        if self.moved is None:
            self.moved = [thing]
        elif all(
            each is not thing for each in self.moved
        ):  # it is pickled twice, where a quicker way has failed
            self.moved.append(thing)

    def __enter__(self) -> Self:
        self._outer = here.now
        here.now = self
        return self

    def __exit__(self, *_: object) -> None:
        here.now = self._outer


class _Here(threading.local):
    now: meeting | None = None  # for what this thread is pickling, if that is a call
    asked_for = False  # what it is pickling is what this drone keeps, for another image


here = _Here()


class PayloadWithRefs:
    """A payload with tickets in it, and what they stand for."""

    __slots__ = ("payload", "remote_objects")

    def __init__(
        self, payload: bytes | Serialized, remote_objects: dict[int, RemoteObject]
    ) -> None:
        self.payload = payload
        self.remote_objects = remote_objects

    def __len__(self) -> int:
        return len(self.payload)


def travelling(payload: Any) -> int:
    """Bytes that go with a call: neither what it only refers to, nor what it takes."""
    payload = untaken(payload)[0]
    return payload.travels if isinstance(payload, Serialized) else len(payload)


def taking(payload: Any, remote_objects: dict[int, RemoteObject]) -> Any:
    """`payload`, which takes these too."""
    inner, before = untaken(payload)
    return PayloadWithRefs(inner, before | remote_objects) if remote_objects else payload


def untaken(payload: Any) -> tuple[Any, dict[int, RemoteObject]]:
    """The payload itself, and what it takes."""
    return (
        (payload.payload, payload.remote_objects)
        if type(payload) is PayloadWithRefs
        else (payload, {})
    )


def resolve(number: int) -> Any:
    """In a drone: the value. (Its pickles name this function.)"""
    if shelf is None:
        raise LookupError(f"kept value {number} was asked for where none is kept")
    return shelf.value(number)


class ValueOwner(Protocol):
    """What a handle is of: a `RemoteObject`, or what a drone has `KeptHere`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def home(self) -> str | None: ...
    @property
    def state(self) -> str: ...
    def fetched(self) -> Any: ...
    def ticket(self) -> tuple[Callable[[int], Any], tuple[int]]:
        """How a handle of it is pickled, for whom this thread is pickling. Raises `TypeError` where
        it cannot be."""


class LocalStore(Protocol):
    def value(self, number: int) -> Any: ...
    def make(self, value: Any) -> ValueOwner: ...


shelf: LocalStore | None = None
"""This drone's, in a drone."""

known: WeakValueDictionary[int, ValueOwner] = WeakValueDictionary()
"""What drones made themselves, by its number: where it was made, and where a handle of it has
come."""
