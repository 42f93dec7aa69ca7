"""One piece of work on its way: what was called, where it is, and, being a promise, what came of it.

    call ──> Work.capture ──> (inputs that are promises: waits for them) ──> crew.queue ──> a drone ──> promise

Arguments are pickled when the call is made. Where one of them is a promise, a *hole* is pickled in its place;
a synchronization counter (CEFOS) counts the promises still open, and the work is queued as it reaches zero.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from functools import partial
from pickle import dumps, loads
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from .image.definitions import Hole
from .promises import CANCELLED, FINISHED, PENDING, Promise, Spans
from .shared import Shared
from .wire.capture import LARGE_BUFFER, MainSnapshot, capture, join, pack
from .wire.definitions import Book, Definition
from .wire.loans import Parcel, load, load_beside
from .wire.messages import CALL, CALL_FILLED, CALL_KEYWORDS, CALL_SLICE
from .wire.slices import SHORT, SMALL, Answers, part_of
from .wire.store import pristine_view

if TYPE_CHECKING:
    from .crew import Crew
    from .link import Link

__all__ = ["Answer", "AnswersTogether", "Sending", "Slice", "Work"]

_numbers = itertools.count(1)


class Work(Promise[Any]):
    """The work is its promise: one object for both. After the call it is changed in the hub's turns only."""

    _can_be_interrupted = True
    target: Link | None = None  # the only drone it may run on, if there is one
    sending: Sending | None = None  # with which it was sent
    kind = CALL
    args: tuple[Any, ...] | None = None  # small and immutable ones, which are pickled together with those of others
    weight = 16  # bytes of these, about
    payload: Any = b""  # the pickled arguments; when it is answered, what came back, until that is unpickled
    status = 0  # of the answer, as in wire/messages.py
    count = 1  # calls
    place = 0  # among the overlapped work that was sent to its drone, from 1
    definition: Definition
    answer: Answer | AnswersTogether | None = None
    timeout: float | None = None  # seconds that it may run
    retries = 0  # how often it is run again when its drone dies
    relays: Any = None  # what of another process's it is, where it is such (net/desk.py)
    leases: Any = None  # of a remote pool's shared values (net/shared.py), until it is sent
    lent = False  # another process has it, and may be running it

    def __init__(self, crew: Crew) -> None:
        self._open = None  # as Promise.__init__ does
        self.number = next(_numbers)
        self.crew = crew
        self.queued = monotonic()

    def capture(
        self, definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any], book: Book
    ) -> Sequence[Promise[Any]]:
        """Pickles the arguments; gives the promises among them. Raises what their pickling raises."""
        self.definition = definition
        inputs: Sequence[Promise[Any]] = ()
        together, bulky, shared = not kwargs, False, False
        for arg in (*args, *kwargs.values()) if kwargs else args:
            kind = type(arg)
            if kind in SMALL:
                continue
            if kind is str or kind is bytes:
                size = len(arg)
                self.weight += size
                together = together and size < SHORT
                bulky = bulky or size >= LARGE_BUFFER
                continue
            together = False
            if isinstance(arg, Promise):
                inputs = [*inputs, arg]
            elif kind is Shared:
                shared = True
            elif kind is bytearray:
                bulky = bulky or len(arg) >= LARGE_BUFFER
        if together:
            self.args = args
            return inputs
        if inputs or shared:
            args, kwargs = _with_stand_ins(args, kwargs, book.snapshot)
        try:
            if kwargs or inputs:
                self.kind = CALL_KEYWORDS
                self.payload = pack((args, kwargs), book.snapshot, book.store, bulky)
            elif args:
                self.payload = pack(args, book.snapshot, book.store, bulky)
        except Exception as error:
            error.add_note(f"while pickling the arguments of {definition.label}: {_culprit(args, kwargs, book)}")
            raise
        return inputs

    def captured(self) -> tuple[Any, ...]:
        """Once more the arguments of a call without keywords and promises."""
        if self.args is not None:
            return self.args
        payload = self.payload
        if isinstance(payload, Parcel):
            views = [pristine_view(segment)[at : at + length] for segment, at, length in payload.places]
            args: tuple[Any, ...] = load_beside(payload.inline, views)
        else:
            args = loads(payload) if payload else ()
        return args

    def when_filled(self, inputs: Sequence[Promise[Any]], go: Callable[[Work], None]) -> None:
        """Calls `go` once, when all `inputs` have values; rejects this work when one is rejected."""
        turn = itertools.count(1)

        def one_settled(settled: Promise[Any]) -> None:
            if settled._state == CANCELLED:
                self._settle(FINISHED, None, CancelledError("a promise among the arguments was cancelled"))
            elif settled._exception is not None:
                self._settle(FINISHED, None, settled._exception)
            else:
                if next(turn) < len(inputs):  # the synchronization counter: one step, which also tells who is the last
                    return
                self._fill([p._result for p in inputs])
            go(self)

        for each in inputs:
            each._hook(one_settled)

    def _fill(self, values: list[Any]) -> None:
        try:
            book = self.crew.book
            packed = pack(values, book.snapshot, book.store)
            self.payload = join(None, (self.payload, packed), book.store)
            self.kind = CALL_FILLED
        except Exception as error:
            error.add_note(f"while pickling a promise's value for {self.definition.label}")
            self._settle(FINISHED, None, error)

    read: Callable[[Any], Any] = staticmethod(load)
    """From what came back to its value. Raises what unpickling raises."""

    # -- what it says of itself as a promise ----------------------------------------------------------

    def _withdraw(self) -> None:
        self.crew.hub.post(partial(self.crew.withdraw, self))

    def _break_off(self) -> None:
        self.cancel()

    def _help(self, end: float | None) -> None:
        self.crew.hub.drive(self, end)

    @property
    def link(self) -> Link | None:
        """The drone it was sent to."""
        sending = self.sending  # a turn in another thread may take it away
        return sending.link if sending is not None else None

    def running(self) -> bool:
        link = self.link
        return self._state == PENDING and link is not None and link.runs(self.number)

    @property
    def spans(self) -> Spans:
        sending, answer = self.sending, self.answered_with()
        sent, name = (sending.at, sending.link.name) if sending is not None else (None, None)
        if answer is None:
            return Spans(queued=self.queued, sent=sent, drone=name)
        there, back = answer.there, answer.back
        if self.args is not None:  # they went together with others: so many bytes is what it would be by itself
            there = len(dumps(self.args, 5))
            back = back or len(dumps(self._result, 5))
        return Spans(self.queued, sent, answer.started, answer.finished, answer.received, there, back, name)

    def answered_with(self) -> Answer | None:
        answer = self.answer
        return answer.of(self.number) if isinstance(answer, AnswersTogether) else answer


class Sending:
    """What works have in common that went to a drone in one message."""

    __slots__ = ("at", "by_bulk", "estimate", "link")

    def __init__(self, link: Link, at: float, estimate: float, by_bulk: bool = False) -> None:
        self.link = link
        self.at = at
        self.estimate = estimate  # seconds, as each counts in the link's load; negative: not known
        self.by_bulk = by_bulk


class Answer(NamedTuple):
    """Times, and bytes there and back."""

    started: float
    finished: float
    received: float
    there: int = 0
    back: int = 0


class AnswersTogether:
    """Those of many works, as they came."""

    __slots__ = ("_finished", "_numbers", "_received", "_started")

    def __init__(self, numbers: list[int], started: list[float], finished: list[float], received: float) -> None:
        self._numbers = numbers
        self._started = started
        self._finished = finished
        self._received = received

    def of(self, number: int) -> Answer:
        index = self._numbers.index(number)
        return Answer(self._started[index], self._finished[index], self._received)


class Slice(Work):
    """Several calls of one function. Its value is `Answers`."""

    kind = CALL_SLICE
    followers: Sequence[Slice] = ()
    """What comes after it, where it was answered before its end."""

    def __init__(self, crew: Crew, definition: Definition, calls: bytes, count: int) -> None:
        super().__init__(crew)
        self.definition = definition
        self.payload = calls
        self.count = count

    read = staticmethod(Answers)

    def split(self, done: int, rest: int) -> tuple[Slice, Slice]:
        """In a turn. Its first calls are `done`: the one that is being run, if there is one, and the `rest`."""
        begun = self.count - rest
        running, later = (
            Slice(self.crew, self.definition, part_of(self.payload, start, stop), stop - start)
            for start, stop in ((done, begun), (begun, self.count))
        )
        running.retries = later.retries = self.retries
        return running, later


def _with_stand_ins(
    args: tuple[Any, ...], kwargs: dict[str, Any], snapshot: MainSnapshot
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    places = itertools.count()

    def stand_in(arg: Any) -> Any:
        if isinstance(arg, Promise):
            return Hole(next(places))
        return arg.stand_in(snapshot) if type(arg) is Shared else arg

    return tuple(map(stand_in, args)), {name: stand_in(arg) for name, arg in kwargs.items()}


def _culprit(args: tuple[Any, ...], kwargs: dict[str, Any], book: Book) -> str:
    """Which argument it was that does not pickle."""
    for name, arg in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
        try:
            capture(arg, book.snapshot)
        except Exception:
            return f"{name}, a {type(arg).__qualname__}"
    return "all of them together"
