"""A task: one call on its way to a drone, and the promise of its result.

    call ──> Task.capture ──> (waits for inputs that are promises) ──> queue ──> a drone ──> promise

Arguments are pickled when the call is made. For a promise among them, a *placeholder* is pickled in
its place (see inputs.py). A synchronization counter (as in CEFOS) counts the pending promises, and
the task is queued when the counter reaches zero. If all arguments are promises or small and
immutable, they are pickled only then: they cannot change, so the delay is invisible."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pickle import dumps, loads
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Lost, another
from ..promises.promise import CANCELLED, DICT_AT_BIRTH, FINISHED, PENDING, Promise, Spans, outcome
from ..store.blocks import pristine_view
from ..store.kept import Kept
from ..store.placeholders import PayloadWithRefs, meeting, taking, untaken
from ..store.references import Received, Serialized, load, load_beside
from ..store.shared import Shared
from ..wire.functions import FunctionRegistry, RemoteFunction
from ..wire.messages import CALL, CALL_FILLED, CALL_KEYWORDS, CALL_SLICE
from ..wire.pickling import LARGE_BUFFER, MainSnapshot, capture, join, pack
from ..wire.slices import SHORT, SMALL, Answers, part_of
from .flow_graph import note_failure
from .inputs import CONTAINERS, Placeholder, Placeholders, cancel_upstream, fall, forget

if TYPE_CHECKING:
    from ..store.directory import RemoteObject
    from .dispatcher import Dispatcher
    from .drone_handle import DroneHandle

__all__ = ["Answer", "AnswersTogether", "KeptTask", "Sending", "Slice", "Task"]

_numbers = itertools.count(1)
_CURE = " (a future of the standard library does not go along: give `polycephaly.race(future)`, a promise of its value)"


class Task(Promise[Any]):
    """One object for the task and its promise. After the call, its state as a task is changed only
    while holding the reactor's lock."""

    _can_be_interrupted = True
    target: DroneHandle | None = None  # the only drone that may run the task, if any
    prefers: DroneHandle | None = None  # the drone that has most of its kept values
    burden = 0  # bytes that would have to be moved to another drone
    preferred = 0.0  # the time since when the task waits for `prefers`
    keeps = False  # the value stays in the drone that computes it
    sending: Sending | None = None  # shared by the tasks of one message; None before sending
    kind = CALL
    # Small immutable arguments, which are pickled together with those of other tasks; None if the
    # arguments are pickled by themselves. While the task waits, there may be promises among them.
    args: tuple[Any, ...] | None = None
    weight = 16  # approximate bytes of `args`
    # The pickled arguments. Once answered, the answer, until that is unpickled.
    payload: Any = b""
    status = 0  # of the answer, as in wire/messages.py
    count = 1  # number of calls
    item: int | None = None  # in a `map`: the index of its first call
    place = 0  # if overlapped: its position among the overlapped tasks sent to the drone, from 1
    definition: RemoteFunction
    answer: Answer | AnswersTogether | None = None
    timeout: float | None = None  # seconds that the task may run
    retries = 0  # how many more times the task is run if its drone dies
    party = ""  # tag of the submitting client, in a served pool (server/fairness.py)
    relays: Any = None  # the client's function, if a joined host may run it (server/session.py)
    # Leases of a remote pool's shared values (engines/remote/shared.py), held until sending.
    leases: Any = None
    # Kept values whose handles are in the answer, held until the answer is unpickled.
    given: list[RemoteObject] | None = None
    lent = False  # leased to another process, which may be running it
    runs_elsewhere = False  # another process has reported the start
    # While the task waits: the promises to wait for, and the other values in `args`.
    inputs: Sequence[Any] = ()
    # The pickled arguments, kept if the value is stored on a node that may be lost, and `retries`
    # allow that the value is computed again.
    recipe: Any = None
    # If an input is stored on another node: the payload with open placeholders, and the inputs.
    unfilled: tuple[Any, Sequence[Promise[Any]]] | None = None
    _lying: Any = None
    needed: tuple[int, ...] = ()  # the numbers of the tasks among its inputs
    followed: Sequence[Any] = ()  # ends of channels in the call, which must learn if they arrived
    is_node = False  # of a graph (flow.py): see `cancel`
    # The synchronization counter: an iterator with one step less than there are inputs.
    _filling: Iterator[int]

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._open = None  # as in Promise.__init__
        if DICT_AT_BIRTH:
            self.__dict__  # noqa: B018
        self.number = next(_numbers)
        self.dispatcher = dispatcher
        self.queued = monotonic()

    def capture(
        self,
        definition: RemoteFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        registry: FunctionRegistry,
    ) -> Sequence[Promise[Any]]:
        """Pickle the arguments, and return the promises among them. Raises the errors of
        pickling."""
        self.definition = definition
        inputs: list[Promise[Any]] = []
        together, bulky, shared, nested = not kwargs, False, False, False
        for arg in (*args, *kwargs.values()) if kwargs else args:
            kind = type(arg)
            if kind in SMALL:
                continue
            if kind is Task:
                inputs.append(arg)
                continue
            if kind is str or kind is bytes:
                size = len(arg)
                self.weight += size
                together = together and size < SHORT
                bulky = bulky or size >= LARGE_BUFFER
                continue
            if isinstance(arg, Promise):
                inputs.append(arg)
                continue
            together = False
            if kind in CONTAINERS:
                nested = True
            elif isinstance(arg, Placeholder):
                shared = nested = True
            elif kind is Shared:
                shared = True
            elif kind is bytearray:
                bulky = bulky or len(arg) >= LARGE_BUFFER
        if together:
            self.args = args
            return inputs
        if shared:
            args, kwargs = _with_stand_ins(args, kwargs, registry.snapshot)
        if inputs or nested:
            return self._capture_with_holes(args, kwargs, registry, bulky)
        with meeting(registry.directory) as pickling:
            try:
                if kwargs:
                    self.kind = CALL_KEYWORDS
                    self.payload = pack((args, kwargs), registry.snapshot, registry.store, bulky)
                elif args:
                    self.payload = pack(args, registry.snapshot, registry.store, bulky)
            except Exception as error:
                error.add_note(
                    f"while pickling the arguments of {definition.label}: {_culprit(args, kwargs, registry)}"
                )
                raise
        self._note(pickling)
        return inputs

    def _capture_with_holes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], registry: FunctionRegistry, bulky: bool
    ) -> Sequence[Promise[Any]]:
        self.kind = CALL_KEYWORDS
        with Placeholders() as holes, meeting(registry.directory) as pickling:
            try:
                self.payload = pack((args, kwargs), registry.snapshot, registry.store, bulky)
                if holes.inputs:
                    holes.check(args, kwargs)
            except Exception as error:
                error.add_note(
                    f"while pickling the arguments of {self.definition.label}: {_culprit(args, kwargs, registry)}"
                )
                raise
        self._note(pickling)
        return holes.inputs

    def _note(self, pickling: meeting) -> None:
        if pickling.met:
            self.take(pickling.met)
        if pickling.moved:
            self._followed_by(pickling.moved)

    def take_captured(self) -> None:
        """Hold the kept values that the function captures until this call is answered."""
        definition = self.definition
        kept, definition.kept = definition.kept, {}
        self.take(kept)
        if definition.moved:
            self._followed_by(definition.moved)

    def _followed_by(self, moved: list[Any]) -> None:
        self.followed = [*self.followed, *moved]
        for each in moved:
            each._goes_with(self)

    def never_began(self) -> None:
        """Release the payload of a task that was settled while in flight, and that the drone has
        not opened and will not open, or has died. Called while holding the reactor's lock."""
        self.payload = b""
        followed, self.followed = self.followed, ()
        for each in followed:
            self.dispatcher.reactor.deliver(partial(each._never_arrived, self))

    def take(self, remote_objects: dict[int, RemoteObject]) -> None:
        """Add kept values to those that the task takes."""
        # With promises among `args`, `_fill` does this later.
        if self.args is not None and not any(isinstance(arg, Promise) for arg in self.args):
            self.args, self.payload = None, dumps(self.args, 5) if self.args else b""
        self.payload = taking(self.payload, remote_objects)

    def captured(self) -> tuple[Any, ...]:
        """Return the arguments of a call without keywords and promises again."""
        if self.args is not None:
            return self.args
        payload = self.payload
        if isinstance(payload, Serialized):
            views = [
                pristine_view(segment)[at : at + length] for segment, at, length in payload.places
            ]
            args: tuple[Any, ...] = load_beside(payload.inline, views)
        else:
            args = loads(payload) if payload else ()
        return args

    def wait_for(self, inputs: Sequence[Promise[Any]]) -> None:
        """Have `Dispatcher.filled` called once: when all `inputs` have values, or when one has
        failed and this task is rejected for that."""
        self.inputs = inputs if self.args is None else self.args
        self.needed = tuple([each.number for each in inputs if isinstance(each, Task)])
        self._filling = iter(range(1, len(inputs)))
        settled = self._one_settled
        for each in inputs:
            hooks, state = each._hooks, each._state
            if state in (FINISHED, CANCELLED):
                settled(each)
            elif hooks is None:
                each._hook(settled)
            else:  # the same as `_hook`, without the call
                hooks.append(settled)
                if each._state != PENDING and each.done():
                    each._run_hooks(each._first)

    def _one_settled(self, settled: Promise[Any]) -> None:
        if self._state == PENDING:
            if settled._exception is not None or settled._state != FINISHED:
                fall(self, settled)
            # One atomic step of the counter, which also shows the last thread that it is the last.
            elif next(self._filling, None) is None:
                self._fill()

    def _fill(self) -> None:
        self.queued = monotonic()
        args, inputs = self.args, self.inputs
        if args is not None:
            values = [
                arg._result if isinstance(arg, Promise) and not arg._lies else arg for arg in args
            ]
            captured = (
                self.payload.remote_objects if type(self.payload) is PayloadWithRefs else None
            )
            if SMALL.issuperset(map(type, values)):
                self.args = tuple(values)
                self.inputs = ()
                if captured:
                    self.take(captured)
                self.dispatcher.filled(self)
                return
        try:
            registry = self.dispatcher.registry
            if args is not None:
                self.args, self.payload, self.weight = None, b"", type(self).weight
                if any(isinstance(value, Promise) for value in values):
                    inputs = self._capture_with_holes(tuple(values), {}, registry, True)
                else:
                    inputs = self.capture(self.definition, tuple(values), {}, registry)
                if not all(each._lies for each in inputs):
                    raise TypeError("the value of a promise is, or has in it, another promise")
                if captured:
                    self.take(captured)
            if self.kind == CALL_KEYWORDS and inputs:
                parts = {
                    index: part
                    for index, each in enumerate(inputs)
                    if (part := each._part(registry)) is not None
                }
                results = [
                    None if index in parts else each.result() for index, each in enumerate(inputs)
                ]
                with meeting(registry.directory) as pickling:
                    packed = pack(results, registry.snapshot, registry.store)
                inner = pickling.met or {}
                if pickling.moved:
                    self._followed_by(pickling.moved)
                if any(each._is_far() for each in inputs):
                    self.unfilled = self.payload, inputs
                outer, remote_objects = untaken(self.payload)
                joined = join([*parts], (outer, packed, *parts.values()), registry.store)
                self.payload = taking(joined, remote_objects | inner)
                self.kind = CALL_FILLED
            self.inputs = ()
        except Exception as error:
            error.add_note(f"while pickling a promise's value for {self.definition.label}")
            self._settle(FINISHED, None, error)
            self.let_go()
        self.dispatcher.filled(self)

    read: Callable[[Any], Any] = staticmethod(load)
    """Build the value from the answer. Raises the errors of unpickling."""

    def open(self, payload: Any) -> Any:
        """Return the value, or become a `LazyTask`, which leaves the value where it is stored.

        A value that contains handles of kept values is always unpickled, because the handles are
        written for this process."""
        if isinstance(payload, Received) and not self.given and (self.is_node or payload.is_far()):
            self._lying = payload  # first: other threads read this after the next line
            # The class adds only methods: attributes are stored as before.
            self.__class__ = LazyTask
            return None
        return self.read(payload)

    # -- as a promise ------------------------------------------------------------------------------

    def cancel(self, running: bool = True) -> bool:
        """Cancel like any promise. If this is a node of a graph, also cancel the inputs that led
        only to it: see `flow`."""
        inputs = self.inputs
        cancelled = super().cancel(running)
        if cancelled and inputs and self.is_node:
            cancel_upstream(inputs, running)
        return cancelled

    def _settle(
        self, state: str, result: Any, exception: BaseException | None, unless_running: bool = False
    ) -> bool:
        settled = super()._settle(state, result, exception, unless_running)
        if self.is_node and settled and (exception is not None or state != FINISHED):
            note_failure(self, state)
        return settled

    def fill_again(self, lost: Lost) -> None:
        """Compute the lost inputs of this task again, which was not begun because of the loss.

        Raises `lost` like `computed_again`. Called while holding the reactor's lock."""
        if self.unfilled is None:
            raise lost
        (self.payload, inputs), self.unfilled = self.unfilled, None
        self.kind, self.args, self.sending = CALL_KEYWORDS, None, None
        far = [each if isinstance(each, LazyTask) and each._is_far() else None for each in inputs]
        self.wait_for(
            [
                it if each is None else each.computed_again(lost)
                for each, it in zip(far, inputs, strict=True)
            ]
        )

    def let_go(self) -> None:
        """Release the inputs and the arguments, because the task is settled."""
        inputs = self.inputs
        if inputs:
            self.inputs, self.payload = (), b""
            if self.args is not None:
                self.args = ()
            forget(inputs)

    def _withdraw(self) -> None:
        self.let_go()
        self.dispatcher.reactor.post(partial(self.dispatcher.withdraw, self))

    def _break_off(self) -> None:
        self.cancel()

    def _waits_for(self) -> Sequence[Promise[Any]]:
        return [each for each in self.inputs if isinstance(each, Promise) and not each.done()]

    def _help(self, end: float | None) -> None:
        if self.inputs and end is None:
            self.dispatcher.somebody_waits(self)
        self.dispatcher.reactor.drive(self, end)

    @property
    def handle(self) -> DroneHandle | None:
        """The drone that the task was sent to, if any."""
        sending = self.sending  # read once: a thread with the reactor's lock may clear it
        return sending.handle if sending is not None else None

    @property
    def label(self) -> str:
        """A short name of the function. (If the function could not be pickled, there is no
        definition.)"""
        definition = getattr(self, "definition", None)
        return "a call" if definition is None else str(definition.label)

    def _named(self) -> str:
        return f"{self.label} #{self.number}"

    def running(self) -> bool:
        handle = self.handle
        return self._state == PENDING and (
            self.runs_elsewhere or (handle is not None and handle.runs(self.number))
        )

    @property
    def spans(self) -> Spans:
        sending, answer = self.sending, self.answered_with()
        sent, name = (sending.at, sending.handle.name) if sending is not None else (None, None)
        if answer is None:
            return Spans(queued=self.queued, sent=sent, drone=name)
        there, back = answer.there, answer.back
        # The arguments were pickled together with others: count the bytes that they take alone.
        if self.args is not None:
            there = len(dumps(self.args, 5))
            back = back or len(dumps(self._result, 5))
        return Spans(
            self.queued, sent, answer.started, answer.finished, answer.received, there, back, name
        )

    def answered_with(self) -> Answer | None:
        answer = self.answer
        return answer.of(self.number) if isinstance(answer, AnswersTogether) else answer


class LazyTask(Task):
    """A task whose value is stored elsewhere, as the drone has written it, and is unpickled on
    first access. Other tasks receive the value from where it is stored.

    The values of nodes of a graph stay in shared memory; with Ray, all values stay on a node of the
    cluster."""

    _lies = True
    _opened = False
    _unopened: Exception | None = None  # why unpickling failed
    _again: Task | None = None

    def _bring_here(self) -> Any:
        if not self._opened:
            if self._unopened is not None:
                raise another(self._unopened)
            try:
                self._result = load(self._lying)
            except Lost as lost:
                self._result = self.computed_again(lost).result()
            except Exception as error:
                self._unopened = error
                raise
            self._opened = True
        return self._result

    def _get_snapshot(self) -> tuple[bool, bool, Any, BaseException | None]:
        """Replace `result` and `exception` for asyncio, from CPython 3.14 on."""
        return (
            self.done(),
            self.cancelled(),
            *(outcome(self) if self._state == FINISHED else (None, None)),
        )

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error as any promise, or the error of unpickling the value.

        A value on another node is not fetched just to find out whether unpickling fails."""
        error = super().exception(timeout)
        if error is None and not self._is_far():
            try:
                self._bring_here()
            except Exception as unopened:
                error = unopened
        return error

    def __repr__(self) -> str:
        unopened = not self._opened and self._state == FINISHED and self._exception is None
        return f"<Promise fulfilled at {id(self):#x}>" if unopened else super().__repr__()

    def computed_again(self, lost: Lost) -> Task:
        """Return a task that computes the lost value again, the same one for all callers. Raises
        `lost` if `retries` do not allow that."""
        if self._again is not None:
            return self._again
        if not self.retries or self.recipe is None:
            raise lost
        again = self._again = Task(self.dispatcher)
        again.definition, again.kind, again.args, again.payload = (
            self.definition,
            self.kind,
            self.args,
            self.recipe,
        )
        again.unfilled, again.timeout, again.retries = self.unfilled, self.timeout, self.retries - 1
        self.dispatcher.start(again)
        return again

    def _is_far(self) -> bool:
        return not self._opened and bool(self._lying.is_far())

    def _part(self, registry: FunctionRegistry) -> Serialized | None:
        return self._lying.parcel() if self._lying.lies_in(registry.store) else None


class KeptTask(Task):
    """A task whose value stays in the drone. Its result is a handle of the value."""

    keeps = True
    weight = Task.weight + 1  # so that `_more_of` does not put it into a run of plain calls
    remote_object: RemoteObject | None = None  # if the task computes a lost value again

    read: Callable[[Any], Any] = staticmethod(Kept.of)


class Sending:
    """The data that tasks sent in one message have in common."""

    __slots__ = ("at", "by_bulk", "estimate", "handle")

    def __init__(
        self, handle: DroneHandle, at: float, estimate: float, by_bulk: bool = False
    ) -> None:
        self.handle = handle
        self.at = at
        self.estimate = estimate  # seconds of each task in the drone's load; negative: unknown
        self.by_bulk = by_bulk


class Answer(NamedTuple):
    """The times of an answer, and the bytes in both directions."""

    started: float
    finished: float
    received: float
    there: int = 0
    back: int = 0


class AnswersTogether:
    """The answers of many tasks, in the form in which they arrived."""

    __slots__ = ("_finished", "_numbers", "_received", "_started")

    def __init__(
        self, numbers: list[int], started: list[float], finished: list[float], received: float
    ) -> None:
        self._numbers = numbers
        self._started = started
        self._finished = finished
        self._received = received

    def of(self, number: int) -> Answer:
        index = self._numbers.index(number)
        return Answer(self._started[index], self._finished[index], self._received)


class Slice(Task):
    """Several calls of one function. The value is an `Answers`."""

    kind = CALL_SLICE
    followers: Sequence[Slice] = ()
    """The slices that take its place, if the drone answered before the last call."""
    continues = False
    """True for the rest of a slice that was cut while running. A slice is cut only once, so a
    second cut is a repeated message."""

    def __init__(
        self, dispatcher: Dispatcher, definition: RemoteFunction, calls: bytes, count: int
    ) -> None:
        super().__init__(dispatcher)
        self.definition = definition
        self.payload = calls
        self.count = count

    read = staticmethod(Answers)

    def open(self, payload: Any) -> Answers:
        """Return the answers at once, wherever they are stored: the reader takes one by one."""
        return Answers(payload)

    def split(self, done: int, rest: int) -> tuple[Slice, Slice]:
        """Return the running call, if any, and the `rest`, of a slice whose first `done` calls are
        answered. Called while holding the reactor's lock."""
        begun = self.count - rest
        running, later = (
            Slice(
                self.dispatcher, self.definition, part_of(self.payload, start, stop), stop - start
            )
            for start, stop in ((done, begun), (begun, self.count))
        )
        running.retries = later.retries = self.retries
        running.given = self.given
        running.continues = True
        if self.item is not None:
            running.item, later.item = self.item + done, self.item + begun
        return running, later


def _with_stand_ins(
    args: tuple[Any, ...], kwargs: dict[str, Any], snapshot: MainSnapshot
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def stand_in(arg: Any) -> Any:
        if isinstance(arg, Placeholder):
            return arg.stands_for()
        return arg.stand_in(snapshot) if type(arg) is Shared else arg

    return tuple(map(stand_in, args)), {name: stand_in(arg) for name, arg in kwargs.items()}


def _culprit(args: tuple[Any, ...], kwargs: dict[str, Any], registry: FunctionRegistry) -> str:
    """Return which argument cannot be pickled."""
    for name, arg in [*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()]:
        try:
            with Placeholders() as holes:
                capture(arg, registry.snapshot)
            holes.check(arg)
        except Exception:
            return f"{name}, a {type(arg).__qualname__}{_CURE if _has_future(arg) else ''}"
    return "all of them together"


def _has_future(arg: Any) -> bool:
    """Return whether a `concurrent.futures.Future` is in `arg`, where a promise could be."""
    todo, seen = [arg], {id(arg)}
    for each in todo:
        if isinstance(each, Future) and not isinstance(each, Promise):
            return True
        if type(each) in CONTAINERS:
            new = {
                id(it): it
                for it in (each.values() if type(each) is dict else each)
                if id(it) not in seen
            }
            seen.update(new)
            todo += new.values()
    return False
