"""A chunk: several calls of a `map`, which are sent together.

    Source ──Chunk: calls 0..999──> a drone ──answers──> parts: 0..321, then 322 ──> the consumer
                 │   while 322 runs there, another drone has nothing to do
                 └── 323..999, given back ──> `rests`: 323..661 and 662..999, for any drone

The drone answers some calls at a time, and goes on. A chunk's promise is settled when nothing of it
is left: with None, since the answers are in its `parts`, or with an error, if its drone has died,
for example. The consumer takes the parts in order, and then the `rests`, which have taken the place
of what the drone has given back.

The loop's thread adds to `parts` before it settles the promise. So a consumer who finds the promise
settled, and then no part, has taken all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..promises.promise import Promise, fulfill, stored_error, when_settled
from ..wire.functions import RemoteFunction
from ..wire.map_chunks import Answers, Calls, args_of_call, calls_between
from ..wire.messages import CALL_CHUNK
from ..wire.status_page import unpack_calls_begun
from .interfaces import TaskRunner
from .task import MAX_ITEM_BYTES, Answer, Task

MIN_CHUNK_SECONDS = 0.0002
"""Seconds of calls in the smallest chunks: about what a task of its own costs."""


class Part(NamedTuple):
    """The answers of some calls of a chunk."""

    item: int
    """The index in the `map` of the first of them."""
    answers: Answers
    times: Answer | None
    """None if they were stored by an earlier run."""

    @property
    def calls(self) -> int:
        """How many calls are answered, a failed one included."""
        return len(self.answers) + (self.answers.error is not None)


class Chunk(Task):
    """Several calls of one function. If it `is_whole`, a drone that has begun it gives none of its
    calls back.
    """

    kind = CALL_CHUNK
    first_item = 0
    answered = 0  # how many of its calls the drone has answered
    rests: Sequence[Chunk] = ()
    on_part: Callable[[Chunk, Part], None] | None = None
    """Called with each part before the consumer may have it."""
    on_lost: Callable[[Chunk, BaseException], None] | None = None
    """Called with the error if the calls that were not answered are lost."""
    notify: Callable[[Chunk], None] | None = None
    """Called when there is a part, or no more will come."""
    _arrival: Promise[None] | None = None
    _has_failed = False  # the last call that is answered

    def __init__(
        self,
        dispatcher: TaskRunner,
        definition: RemoteFunction,
        calls: Calls,
        count: int,
        *,
        is_whole: bool = False,
    ) -> None:
        super().__init__(dispatcher)
        self.definition = definition
        self.payload = calls
        self.count = count
        self.is_divisible = not is_whole
        self.parts: deque[Part] = deque()
        if len(calls) <= MAX_ITEM_BYTES * count:
            self.item_payload = calls
        when_settled(self.promise, self._on_settled)

    @property
    def calls_left(self) -> int:
        return self.count - self.answered

    @property
    def items(self) -> tuple[int | None, int]:
        drone = self.handle
        if self.lost_call is None and drone is not None and drone.last_started() == self.number:
            begun, run_length = unpack_calls_begun(drone.status_page.call)
            if run_length == 1 and begun <= self.count:
                return self.first_item + begun - 1, 1
        if self.lost_call is not None:
            return self.first_item + self.lost_call, 1
        return self.first_item + self.answered, self.calls_left

    def item_args(self, index: int) -> Sequence[Any]:
        args: Sequence[Any] = ()
        if self.item_payload and 0 <= index < self.count:
            args = args_of_call(self.item_payload, index)
        return self.definition.given_args(args)

    # -- the loop's thread: see PoolState ----------------------------------------------------------

    def take_rest(self, calls: int) -> Chunk:
        """Return the last `calls` of its calls as a chunk of their own."""
        rest = self._part(self.count - calls, self.count)
        self.count -= calls
        self.payload = calls_between(self.payload, 0, self.count)  # if it is sent again
        return rest

    def divided(self, pieces: int) -> list[Chunk]:
        """Return its calls in so many chunks of about the same size."""
        ends = [self.count * piece // pieces for piece in range(pieces + 1)]
        if pieces == 1:
            return [self]
        return [self._part(*each) for each in pairwise(ends)]

    def _part(self, start: int, stop: int) -> Chunk:
        calls = calls_between(self.payload, start, stop)
        part = Chunk(
            self.dispatcher, self.definition, calls, stop - start, is_whole=not self.is_divisible
        )
        part.retries, part.priority = self.retries, self.priority
        part.first_item = self.first_item + start
        part.on_part, part.on_lost, part.notify = self.on_part, self.on_lost, self.notify
        return part

    def drop_answered(self) -> None:
        """Forget the calls that are answered, because the others are to be sent again."""
        answered, self.answered = self.answered, 0
        if answered:
            self.payload = calls_between(self.payload, answered, self.count)
            if self.item_payload:
                self.item_payload = self.payload
            self.count -= answered
            self.first_item += answered

    # -- the loop's thread, after the reactor's lock is released -----------------------------------

    def give(self, part: Part) -> None:
        """Give the consumer a part."""
        if not self.promise.done():  # else it was cancelled
            if self.on_part is not None:
                self.on_part(self, part)
            self._has_failed = part.answers.error is not None
            self.parts.append(part)
            self._tell()

    def _on_settled(self, promise: Promise[Any]) -> None:
        error = None if promise.cancelled() else stored_error(promise)
        if error is not None and self.on_lost is not None:
            self.on_lost(self, error)
        if error is None and not self._has_failed:
            self.item_payload = b""  # calls that have not failed need no names
        self._tell()

    def _tell(self) -> None:
        if self.notify is not None:
            self.notify(self)
        arrival = self._arrival
        if arrival is not None:
            fulfill(arrival)

    # -- the consumer ------------------------------------------------------------------------------

    def next_arrival(self) -> Promise[None] | None:
        """Return a promise that is settled when there is a part, or no more will come. None if it
        is so now.
        """
        # Before the check: so either this sees what has come, or `_tell` sees the promise.
        arrival = self._arrival = Promise()
        return None if self.parts or self.promise.done() else arrival

    def is_read(self) -> bool:
        """Return whether all parts were taken, and only the rests are left."""
        if not self.promise.done() or self.parts:
            return False
        return not self.promise.cancelled() and stored_error(self.promise) is None


def with_rests(tasks: Iterable[Task]) -> list[Task]:
    """Return `tasks`, each chunk followed by what has taken the place of its last calls."""
    found: list[Task] = []
    todo = deque(tasks)
    while todo:
        task = todo.popleft()
        found.append(task)
        if isinstance(task, Chunk):
            todo.extendleft(reversed(task.rests))
    return found
