"""A task: one call on its way to a drone. Its promise is an object of its own: task_promise.py.

    call ──> Task.capture ──> (waits for inputs that are promises) ──> queue ──> a drone ──> promise

Arguments are pickled when the call is made. For a promise among them, a *placeholder* is pickled in
its place (see inputs.py). A synchronization counter (as in CEFOS) counts the pending promises, and
the task is queued when the counter reaches zero. If all arguments are promises or small and
immutable, they are pickled only then: they cannot change, so the delay is invisible.
"""

from __future__ import annotations

import copyreg
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pickle import dumps, loads
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from ..errors import Lost, skip_own_frames, type_with_article
from ..memory.blocks import pristine_view
from ..memory.references import Received, Serialized, load, load_with_buffers
from ..promises import opener_thread
from ..promises.opener_thread import is_settling_thread
from ..promises.promise import (
    NeedsPlaceholder,
    Promise,
    reject,
    request_opening,
    settle_promise,
    stored_error,
    stored_value,
    unopened,
    when_settled,
)
from ..promises.sealed import Sealed, is_sealed
from ..runtime.clock import monotonic
from ..runtime.signal_handlers import is_of_signal_handler
from ..wire.functions import FunctionRegistry, RemoteFunction, find_unpicklable
from ..wire.map_chunks import MIN_SEPARATE_LENGTH
from ..wire.messages import CALL, CALL_FILLED, CALL_KEYWORDS
from ..wire.pickling import MIN_LARGE_BUFFER_BYTES, join_payloads, pack
from ..wire.placeholders import (
    PayloadWithRefs,
    PicklingContext,
    split_remote_objects,
    with_remote_objects,
)
from ..wire.shareable import SMALL_TYPES
from .inputs import propagate_failure, remove_settled_hooks
from .interfaces import TaskOptions, TaskRunner
from .task_promise import TaskPromise, facts_of
from .task_state import INBOUND, LEASED

if TYPE_CHECKING:
    from .retry import Retry

MAX_ITEM_BYTES = 4096
"""Bytes of pickled arguments of a call that a `map` keeps until it has succeeded, to name the item
of an error.
"""
MAX_BYTES_OPENED_AT_ONCE = 16 * 1024
"""Bytes of a pickled value up to which it is built where promises are settled, if that takes no
code of users. It takes 0.04 to 0.2 ms for numbers, texts and dicts, and 0.6 ms for empty lists.
"""
_PLAIN_TYPES = SMALL_TYPES | {str, bytes}
_numbers = itertools.count(1)
_FUTURE_CURE = (
    " (a future of the standard library cannot be pickled: pass `polycephaly.race(future)`, a "
    "promise of its value)"
)


class Task:
    """The pool's record of one call. After the call, it is changed only while holding the reactor's
    lock.
    """

    promise_type: type[TaskPromise[Any]] = TaskPromise
    state = INBOUND
    # `DroneHandle`s, or None: the only drone that may run the task (of a client, a `RemoteHandle`),
    # and the drone that has most of its kept values.
    target: Any = None
    preferred_drone: Any = None
    bytes_to_move = 0  # bytes that would have to be moved to another drone
    preferred_since = 0.0  # the time since when the task waits for `preferred_drone`
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
    definition_bytes = 0  # of its function, if that was sent to the drone with this task
    count = 1  # number of calls
    is_divisible = False  # calls of it that were not begun may be run elsewhere
    first_item: int | None = None  # in a `map`: the index of its first call
    lost_call: int | None = None  # of its calls, the one in which its drone died, if known
    # In a `map`: the pickled arguments, to name the item of an error.
    item_payload: bytes | Serialized = b""
    position = 0  # among the tasks that its drone was sent, from 1
    definition: RemoteFunction
    answer: Answer | None = None  # of a task that was answered by itself
    timeout: float | None = None  # seconds that the task may run
    retries = 0  # how many more times the task may run again
    priority = 0  # a task of a larger one is sent first
    # How much the task needs of which resources, sorted by name: see resources.py.
    resources: tuple[tuple[str, int], ...] = ()
    retry: Retry | None = None  # if errors of the task are reasons to run again, too
    first_number = 0  # of the first attempt, if the task runs again because of `retry`
    # The time limit is over, and the task is to run again as soon as the drone has stopped it.
    overrun: TimeoutError | None = None
    timed_out = False  # its time limit has struck, if the promise does not show that yet
    client_tag = ""  # `Client.tag` of the client of a served pool that has submitted the task
    # The client's function, if a joined host may run the task (server/session.py).
    client_function: Any = None
    may_be_lent = True  # not if it takes shared values, which are in this machine's memory
    # References to a remote pool's shared values (engines/remote/shared.py), held until sending.
    shared_refs: Any = None
    # Kept values whose handles are in the answer, held until the answer is unpickled.
    answer_objects: list[object] | None = None
    is_special = False  # it is in the inbox, with an entry in `Dispatcher._special`
    is_withdrawn = False  # cancelled, and counted as such
    runs_elsewhere = False  # another process has reported the start
    # While the task waits: the promises to wait for, and the other values in `args`.
    inputs: Sequence[Any] = ()
    # The pickled arguments, kept if the value is stored on a node that may be lost, and `retries`
    # allow that the value is computed again; or if the task has failed and may run again.
    recompute_payload: Any = None
    # If an input is stored on another node: the payload with open placeholders, and the inputs.
    unfilled: tuple[Any, Sequence[Promise[Any]]] | None = None
    input_numbers: tuple[int, ...] = ()  # the numbers of the tasks among its inputs
    is_node = False  # of a graph: see flow.py
    # The synchronization counter: an iterator with one step less than there are inputs.
    _countdown: Iterator[int]

    def __init__(self, dispatcher: TaskRunner) -> None:
        self.number = next(_numbers)
        self.dispatcher = dispatcher
        self.queued = monotonic()
        # Here, so that CPython has room for them in each task: else it makes a dict for each.
        self.state = INBOUND
        self.sending = None
        self.position = 0
        self.promise = self.promise_type(self)

    def set_options(self, task_options: TaskOptions) -> None:
        self.timeout, retries, self.priority, self.resources, _ = task_options
        if isinstance(retries, int):
            self.retries = retries
        else:
            self.retry, self.retries = retries, retries.times

    def capture(
        self, definition: RemoteFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Sequence[Promise[Any]]:
        """Pickle the arguments, and return the promises among them. Raises the errors of
        pickling.
        """
        self.definition = definition
        inputs: list[Promise[Any]] = []
        together, bulky = not kwargs, False
        for arg in (*args, *kwargs.values()) if kwargs else args:
            kind = type(arg)
            if kind in SMALL_TYPES:
                continue
            if kind is TaskPromise:
                inputs.append(arg)
                continue
            if kind is str or kind is bytes:
                size = len(arg)
                self.weight += size
                together = together and size < MIN_SEPARATE_LENGTH
                bulky = bulky or size >= MIN_LARGE_BUFFER_BYTES
                continue
            if isinstance(arg, Promise):
                inputs.append(arg)
                continue
            together = False
            if kind is bytearray:
                bulky = bulky or len(arg) >= MIN_LARGE_BUFFER_BYTES
        if together:
            self.args = args
            return inputs
        return self._pack_arguments(args, kwargs, bulky)

    def _pack_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], bulky: bool
    ) -> Sequence[Promise[Any]]:
        registry = self.dispatcher.registry
        inputs: dict[int, tuple[int, Promise[Any]]] = {}
        self.kind = CALL_KEYWORDS
        with PicklingContext(registry.directory, registry.snapshot, inputs) as pickling:
            try:
                self.payload = pack((args, kwargs), registry.snapshot, registry.store, bulky)
            except NeedsPlaceholder as misplaced:  # of another pool: no call can carry it
                raise TypeError(*misplaced.args) from None
            except Exception as error:
                if is_of_signal_handler(error):
                    raise
                first = -self.definition.takes_function
                error.add_note(
                    f"while pickling the arguments of {self.definition.label}: "
                    f"{_describe_unpicklable(args, kwargs, registry, first)}"
                )
                raise
        if pickling.remote_objects:
            self.add_kept_values(pickling.remote_objects)
        if pickling.moved:
            self._add_followers(pickling.moved)
        elif (
            self.first_item is not None
            and not inputs
            and type(self.payload) is bytes
            and len(self.payload) <= MAX_ITEM_BYTES
        ):
            self.item_payload = self.payload
        return [promise for _, promise in inputs.values()]

    def hold_captured(self) -> None:
        """Hold the kept values that the function captures until this call is answered."""
        definition = self.definition
        kept, definition.kept = definition.kept, {}
        self.add_kept_values(kept)
        self._add_followers(definition.moved)

    def _add_followers(self, moved: list[Any]) -> None:
        for each in moved:
            each._follow_task(self.promise)

    def add_kept_values(self, remote_objects: dict[int, Any]) -> None:
        """Add kept values to those that the task takes."""
        # With promises among `args`, `_fill_inputs` does this later.
        if self.args is not None and not any(isinstance(arg, Promise) for arg in self.args):
            self.args, self.payload = None, dumps(self.args, 5) if self.args else b""
        self.payload = with_remote_objects(self.payload, remote_objects)

    def captured_args(self) -> tuple[Any, ...]:
        """Return the arguments of a call without keywords and promises again."""
        if self.args is not None:
            return self.args
        payload = self.payload
        if isinstance(payload, Serialized):
            views = [
                pristine_view(segment)[at : at + length] for segment, at, length in payload.places
            ]
            args = load_with_buffers(payload.inline, views)
        else:
            args = loads(payload)
        positional: tuple[Any, ...] = args[0]
        return positional

    def wait_for(self, inputs: Sequence[Promise[Any]]) -> None:
        """Have `Dispatcher.on_inputs_ready` called once: when all `inputs` have values, or when one
        has failed and this task is rejected for that.
        """
        self.inputs = inputs if self.args is None else self.args
        self.input_numbers = tuple(
            [facts_of(each).call_number for each in inputs if isinstance(each, TaskPromise)]
        )
        self._countdown = iter(range(1, len(inputs)))
        on_settled = self._on_input_settled  # one object for all inputs
        for each in inputs:
            if each.done():
                on_settled(each)  # not as a hook, so that the caller gets its error
            else:
                when_settled(each, on_settled)

    def _on_input_settled(self, settled: Promise[Any]) -> None:
        try:
            if self.promise.done():
                return
            if settled.cancelled() or stored_error(settled) is not None:
                propagate_failure(self, settled)
            # One atomic step of the counter, which also shows the last thread that it is the last.
            elif next(self._countdown, None) is None:
                self._fill_inputs()
        except BaseException as error:  # no memory: this call is the only one for that input
            reject(self.promise, error)
            raise

    def _fill_inputs(self) -> None:
        """Put the values of the inputs into the call."""
        self.queued = monotonic()
        values, parts, is_remote = self._take_values()
        if self.args is not None and SMALL_TYPES.issuperset(map(type, values)):
            captured = self._captured_values()
            self.args = tuple(values)
            self.inputs = ()
            if captured:
                self.add_kept_values(captured)
            self.dispatcher.on_inputs_ready(self)
        elif is_settling_thread() and not all(
            type(value) in _PLAIN_TYPES or id(value) in parts for value in values
        ):
            # The pickling of values runs code of users, which would delay other promises here.
            self._pickle_in_opener()
        else:
            self._pickle_inputs(values, parts, is_remote)

    def _take_values(self) -> tuple[list[Any], dict[int, Serialized], bool]:
        """Return the values of the inputs, or the promises of those that are sealed; by `id` of
        these promises, the values that can go into the call as they have come; and whether one may
        be on another machine. What another thread opens from here on stays in these as it was.
        """
        values = [_value_in_call(each) for each in self.inputs]
        parts: dict[int, Serialized] = {}
        is_remote = False
        for each in values:
            if isinstance(each, Promise):
                is_remote = is_remote or _remote_value(each) is not None
                value = stored_value(each)
                part = value.serialized(self.dispatcher.registry) if is_sealed(value) else None
                if part is not None:
                    parts[id(each)] = part
        return values, parts, is_remote

    def _pickle_in_opener(self, _: object = None) -> None:
        opener_thread.opener_thread.add(lambda: self._pickle_inputs(*self._take_values()))

    def _captured_values(self) -> dict[int, Any] | None:
        return self.payload.remote_objects if type(self.payload) is PayloadWithRefs else None

    def _pickle_inputs(
        self, values: list[Any], parts: dict[int, Serialized], is_remote: bool
    ) -> None:
        """Put values into the call that `_take_values` has returned, after opening those that
        cannot go into it as they have come.
        """
        try:
            sealed = [
                each for each in values if isinstance(each, Promise) and id(each) not in parts
            ]
            for each in sealed:
                value = unopened(each) if is_settling_thread() else None
                if value is not None:
                    when_settled(request_opening(value), self._pickle_in_opener)
                    return
                error = each.exception()
                if error is not None:
                    propagate_failure(self, each, error)
                    return
            inputs = self.inputs
            with self.dispatcher.pickling(self):
                if self.args is not None:
                    opened = [
                        each if id(each) in parts else _value_in_call(each) for each in values
                    ]
                    inputs = self._capture_values(opened, self._captured_values())
                if self.kind == CALL_KEYWORDS and inputs:
                    self._join_values(inputs, parts, is_remote)
            self.inputs = ()
        except BaseException as error:  # a SystemExit of the value's own code, too
            error.add_note(f"while pickling a promise's value for {self.definition.label}")
            reject(self.promise, error)
            self.release_inputs()
            if isinstance(error, KeyboardInterrupt):
                raise
        self.dispatcher.on_inputs_ready(self)

    def _capture_values(
        self, values: list[Any], captured: dict[int, Any] | None
    ) -> Sequence[Promise[Any]]:
        """Pickle the arguments, now that each promise among them has its value in `values`, unless
        that is sealed. Return the promises of those.
        """
        sealed = [value for value in values if isinstance(value, Promise)]
        self.args, self.payload, self.weight = None, b"", type(self).weight
        if sealed:
            inputs = self._pack_arguments(tuple(values), {}, True)
        else:
            inputs = self.capture(self.definition, tuple(values), {})
        if not all(any(each is one for one in sealed) for each in inputs):
            raise TypeError("the value of a promise is or contains another promise")
        if captured:
            self.add_kept_values(captured)
        return inputs

    def _join_values(
        self, inputs: Sequence[Promise[Any]], stored_parts: dict[int, Serialized], is_remote: bool
    ) -> None:
        """Add the values of `inputs` to the arguments, which were pickled with placeholders."""
        registry = self.dispatcher.registry
        parts = {
            index: part
            for index, each in enumerate(inputs)
            if (part := stored_parts.get(id(each))) is not None
        }
        results = [None if index in parts else each.result() for index, each in enumerate(inputs)]
        with PicklingContext(registry.directory, registry.snapshot) as pickling:
            packed = pack(results, registry.snapshot, registry.store)
        inner = pickling.remote_objects or {}
        self._add_followers(pickling.moved or [])
        if is_remote:
            self.unfilled = self.payload, inputs
        outer, remote_objects = split_remote_objects(self.payload)
        joined = join_payloads([*parts], (outer, packed, *parts.values()), registry.store)
        self.payload = with_remote_objects(joined, remote_objects | inner)
        self.kind = CALL_FILLED

    unpickle: Callable[[Any], Any] = staticmethod(load)
    """Build the value from the answer. Raises the errors of unpickling."""

    def is_opened_at_once(self, payload: Any) -> bool:
        """Return whether the value can be built where promises are settled: it is small, and takes
        no code of users.
        """
        if not payload:
            return True
        if isinstance(payload, Received) or len(payload) > MAX_BYTES_OPENED_AT_ONCE:
            return False
        # A pickle, as drones write it, can run code of users only if it names a class or function:
        # by this opcode, for which any other byte of the same value is taken too, or by a number.
        return b"\x93" not in bytes(payload) and not copyreg._inverted_registry  # type: ignore[attr-defined]

    def shares_pickle(self) -> bool:
        """Return whether the arguments are pickled together with those of the calls of the same
        function behind this one.
        """
        definition = self.definition
        return not (self.args is None or self.keeps or definition.overlaps or definition.captures)

    def unpack(self, payload: Any) -> Any:
        """Return the value of an answer. Raises the errors of unpickling."""
        value = self.unpickle(payload)
        if self.item_payload:
            self.item_payload = b""  # a call that has not failed needs no name
        return value

    def recompute_inputs(self, lost: Lost) -> None:
        """Compute the lost inputs of this task again, which was not begun because of the loss.

        Raises `lost` like `recompute`. Called while holding the reactor's lock.
        """
        if self.unfilled is None:
            raise lost
        (self.payload, inputs), self.unfilled = self.unfilled, None
        self.kind, self.args, self.sending = CALL_KEYWORDS, None, None
        values = [(each, _remote_value(each)) for each in inputs]
        self.wait_for([each if value is None else value.recompute(lost) for each, value in values])

    # -- another attempt (`retry`): called while holding the reactor's lock ------------------------

    def next_delay(self, error: BaseException) -> float | None:
        """Return the seconds until the task, which failed with `error`, runs again, or None."""
        return None if self.retry is None else self.retry.next_delay(error, self._attempts)

    def start_over(self) -> None:
        """Make the task ready to be queued again.

        The task gets a new number: late messages and the status page name the attempt before.
        """
        self.first_number = self.call_number
        self.number = next(_numbers)
        self.retries -= 1
        if self.recompute_payload is not None:
            self.payload, self.recompute_payload = self.recompute_payload, None
        self.sending = self.answer = self.overrun = None
        self.timed_out = False
        self.runs_elsewhere = False
        self.promise.output = ""

    def with_attempts(self, error: BaseException) -> BaseException:
        """Return `error`, with a note that tells the number of attempts if there were several."""
        if self.first_number:
            with suppress(Exception):  # if the error accepts no notes
                error.add_note(f"failed {self._attempts} times; this is the last error")
        return error

    @property
    def _attempts(self) -> int:
        return 1 if self.retry is None else self.retry.times - self.retries + 1

    def release_inputs(self) -> None:
        """Release the inputs and the arguments, because the task is settled."""
        inputs = self.inputs
        if inputs:
            self.inputs, self.payload = (), b""
            if self.args is not None:
                self.args = ()
            remove_settled_hooks(inputs)

    @property
    def is_leased(self) -> bool:
        """Whether the task is leased to another process, which may be running it."""
        return self.state is LEASED

    @property
    def handle(self) -> Any:
        """The `DroneHandle` of the drone that the task was sent to, if any."""
        sending = self.sending  # read once: a thread with the reactor's lock may clear it
        return sending.handle() if sending is not None else None

    @property
    def label(self) -> str:
        """A short name of the function.

        If the function could not be pickled, there is no definition.
        """
        try:
            return self.definition.label
        except AttributeError:
            return "a call"

    @property
    def item(self) -> int | None:
        """The index in a `map` of the call that runs; None if it may be one of several."""
        item, calls = self.items
        return item if calls == 1 else None

    @property
    def items(self) -> tuple[int | None, int]:
        """In a `map`: the index of the first call that may have been running, and how many may."""
        if self.lost_call is None or self.first_item is None:
            return self.first_item, self.count
        return self.first_item + self.lost_call, 1

    def item_args(self, index: int) -> Sequence[Any]:
        """Return copies of the arguments of a call of a `map`, of which this task has those from
        `first_item` on; () if they are not known here: they are large, or belong to the drone.

        Runs code of users, and raises the errors of unpickling.
        """
        if self.args is not None:
            return self.definition.given_args(self.args)
        if not self.item_payload:
            return ()
        assert isinstance(self.item_payload, bytes)
        args: tuple[Any, ...] = loads(self.item_payload)[0]
        return self.definition.given_args(args)

    def note_failure(self, error: BaseException) -> None:
        """Note that the task is about to be rejected with `error`, unless it was cancelled."""
        if not self.promise.done():
            sending = self.sending
            drone = None if sending is None else sending.drone
            self.dispatcher.note_failure(self.label, self.item, drone, error, self.number)

    @property
    def calls_left(self) -> int:
        """How many of its calls were not answered."""
        return 1

    @property
    def call_number(self) -> int:
        """The number of the call, the same for all attempts."""
        return self.first_number or self.number

    def is_running(self) -> bool:
        handle = self.handle
        return self.runs_elsewhere or (handle is not None and handle.is_running(self.number))

    def facts(self) -> tuple[Any, ...]:
        """Return what the promise keeps, as the fields of `Facts`."""
        sending, answer = self.sending, self.answer
        sent, drone = (None, None) if sending is None else (sending.at, sending.drone)
        if answer is None:
            started = finished = received = args = None
            bytes_sent = bytes_received = 0
        else:
            started, finished, received, bytes_sent, bytes_received = answer
            args = self.args  # else there may be promises among them
            if args is not None:
                bytes_sent = self.definition_bytes
        return (
            self.number, self.label, self.queued, sent, drone, started, finished, received,
            args, bytes_sent, bytes_received, self.first_number, self.input_numbers,
            self.timed_out, ref(self.dispatcher),
        )  # fmt: skip


def fail(task: Task, error: BaseException) -> None:
    """Reject a task that was run, and note that. Not called while holding the reactor's lock."""
    try:
        task.note_failure(error)
    finally:  # also if there is no memory for that
        settle_promise(task.promise, None, error)


def _value_in_call(arg: Any) -> Any:
    """Return the value of an argument that is a promise, now that all are settled, or the promise
    itself if its value is sealed. Return any other argument as it is.
    """
    if not isinstance(arg, Promise):
        return arg
    value = stored_value(arg)
    if is_sealed(value):
        return value.open() if value.is_open and not value.stays_sealed else arg
    return value


def _remote_value(promise: Promise[Any]) -> StoredValue | None:
    """Return the value of a task if it may be on another machine, and be lost with that."""
    value = stored_value(promise)
    return value if isinstance(value, StoredValue) and value.is_slow() else None


class StoredValue(Sealed):
    """The value of a task as the drone has written it, which other tasks can be given as it is.

    The values of nodes of a graph stay in shared memory, and with Ray, all values stay on a node of
    the cluster, so that other tasks can be given these when they were opened, too.
    """

    __slots__ = ("_label", "_payload", "_recipe", "_runner", "stays_sealed")

    def __init__(self, task: Task, payload: Any) -> None:
        super().__init__()
        is_received = isinstance(payload, Received)
        self._payload = payload if is_received else bytes(payload)
        self._label = task.label
        self._runner = ref(task.dispatcher)
        self._recipe = None if task.recompute_payload is None else Recipe(task)
        self.stays_sealed = is_received and (task.is_node or self.is_slow())

    def build(self) -> Any:
        payload = self._payload
        if payload is None:  # another thread has opened this meanwhile
            return super().build()
        try:
            return load(payload)
        except Lost as lost:
            return self.recompute(lost).result()
        except BaseException as error:
            error.__traceback__ = skip_own_frames(error.__traceback__)
            with suppress(Exception):  # if the error accepts no notes
                error.add_note(f"while unpickling the result of {self._label}")
            raise

    def recompute(self, lost: Lost) -> Promise[Any]:
        """Return a promise of the lost value, computed again, the same one for all callers. Raises
        `lost` if `retries` do not allow that.
        """
        runner = self._runner()
        if self._recipe is None or runner is None:
            raise lost
        return self._recipe.compute(runner)

    def forget(self) -> None:
        if not self.stays_sealed:
            self._payload = None

    def is_slow(self) -> bool:
        payload = self._payload
        return not self.is_open and isinstance(payload, Received) and payload.is_slow_to_open()

    def serialized(self, registry: FunctionRegistry) -> Serialized | None:
        payload, runner = self._payload, self._runner()
        if not self.stays_sealed and (runner is None or runner.registry is not registry):
            return None  # to drones of another pool, the names in it may mean something else
        if not isinstance(payload, Received):
            return None if payload is None else Serialized(payload, [])
        return payload.to_serialized() if payload.is_readable_in(registry.store) else None


class Recipe:
    """How a value is computed again that is lost with the node of a cluster that has it."""

    def __init__(self, task: Task) -> None:
        self._call = task.definition, task.kind, task.args, task.recompute_payload, task.unfilled
        self._limits = task.timeout, task.priority, task.retries
        self._tasks: dict[None, Task] = {}  # at most one

    def compute(self, runner: TaskRunner) -> Promise[Any]:
        """Return a promise of the value, the same one for all callers. Any thread may call this."""
        task = self._tasks.get(None)
        if task is None:
            made = Task(runner)
            made.definition, made.kind, made.args, made.payload, made.unfilled = self._call
            made.timeout, made.priority, retries = self._limits
            made.retries = retries - 1
            task = self._tasks.setdefault(None, made)  # atomic: the first one stays
            if task is made:
                try:
                    runner.submit_task(task)
                except BaseException as error:  # the pool takes no more tasks
                    reject(task.promise, error)
        return task.promise


class Sending:
    """The data that tasks sent in one message have in common."""

    __slots__ = ("at", "drone", "estimate", "handle")

    def __init__(self, handle: ref[Any], drone: str, at: float, estimate: float) -> None:
        self.handle = handle
        self.drone = drone  # its name
        self.at = at
        self.estimate = estimate  # seconds of each task in the drone's load; negative: unknown


class Answer(NamedTuple):
    """The times of an answer, and the bytes in both directions."""

    started: float
    finished: float
    received: float
    bytes_sent: int = 0
    bytes_received: int = 0


def _describe_unpicklable(
    args: tuple[Any, ...], kwargs: dict[str, Any], registry: FunctionRegistry, first: int
) -> str:
    """Return which argument cannot be pickled. `first` is the number of the first one."""
    named = [*((f"argument {i}", a) for i, a in enumerate(args, first)), *kwargs.items()]
    found = find_unpicklable(named, registry.directory, registry.snapshot)
    if found is None:
        return "all arguments together"
    name, arg = found
    parts = [arg, *arg] if isinstance(arg, (list, tuple)) else [arg]
    has_future = any(isinstance(each, Future) and not isinstance(each, Promise) for each in parts)
    return f"{name}, {type_with_article(arg)}{_FUTURE_CURE if has_future else ''}"
