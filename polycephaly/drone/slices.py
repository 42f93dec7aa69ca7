"""A slice of a `map`, as a drone runs it.

    calls ──main thread: popleft, call──> done ──> the outcome
      └──the ear: pop, from the end──> given back, when it takes longer than it should

A slice is made for a millisecond of work, by what such calls have taken. Where one takes longer
than the ear's window, the ear *cuts* it: gives back what has not been begun, so that others can run
it, and sends the answers that there are. The main thread goes on with the call that it runs, and
answers that one by itself.

`calls` is a deque, and each of its two ends has one taker, so a call is either run or given back.
What the ear sends and what the main thread sends in the end is divided by `sent`, which is changed
and read under the socket's turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pickle import loads
from time import monotonic
from typing import Any

from ..runtime import forked
from ..runtime.coroutines import is_coroutine
from ..wire.slices import ITEMS, PICKLED, SMALL, TOGETHER, Packed, unpack_calls

__all__ = ["SliceRun"]

ANSWERS_MOST = 256 * 1024
"""Bytes of answers after which a slice ends, and gives back the rest."""


class SliceRun:
    """`open_function` gives the function; each time a fresh one, if that is asked for."""

    def __init__(
        self,
        number: int,
        payload: Any,
        open_function: Callable[[bool], Callable[..., Any]],
        pack: Callable[[Any], Any],
    ) -> None:
        self.number = number
        self.done: list[Any] = []
        self.sent = 0  # of `done`
        self.packed = False  # some of `done` are `Packed`
        self.was_cut = False
        self.started = monotonic()
        self.error: BaseException | None = None
        self._form, self._fresh, rows = unpack_calls(payload)
        self.calls: deque[Any] = deque(rows)
        self._count = len(rows)
        self._taken_away = 0
        self._open = open_function
        self._pack = pack
        self._bytes = 0

    def run(self) -> None:
        """Runs the calls, to the first that fails. What is left in `calls` then was not begun: see
        `blame`."""
        generation = forked.generation
        try:
            if self._form == ITEMS and not self._fresh:
                self._run_items(self._open(False))
            else:
                self._run_rows()
        except BaseException as error:
            self.error = error
        forked.leave_if_forked(
            generation, self.error
        )  # in a child that a call has forked: see `Runner.stay_behind`

    def _run_items(self, function: Callable[..., Any]) -> None:
        take, note = self.calls.popleft, self.done.append
        while True:
            try:
                item = take()
            except IndexError:
                return
            value = function(item)
            if type(value) in SMALL:
                note(value)
            elif self._note_other(value):
                return

    def _run_rows(self) -> None:
        function = self._open(False)
        while True:
            try:
                row = self.calls.popleft()
            except IndexError:
                return
            if self._form == ITEMS:
                row = (row,)
            elif self._form == PICKLED:
                row = _arguments(row, function)
            value = function(*row)
            del row
            if type(value) in SMALL:
                self.done.append(value)
            elif self._note_other(value):
                return
            del value
            if self._fresh:
                function = self._open(True)

    def _note_other(self, value: Any) -> bool:
        """Whether there are so many answers now that the slice is to end."""
        self.done.append(self._packed(value))
        return self._bytes > ANSWERS_MOST

    def _packed(self, value: Any) -> Any:
        if is_coroutine(value):
            from ..green import run

            value = run(value)
        if type(value) is tuple and len(value) < 16 and TOGETHER.issuperset(map(type, value)):
            self._bytes += sum(len(each) for each in value if isinstance(each, (str, bytes)))
            if self._bytes < ANSWERS_MOST:
                return value
        if type(value) in TOGETHER:
            self._bytes += len(value) if isinstance(value, (str, bytes)) else 0
            if self._bytes < ANSWERS_MOST:
                return value
        self.packed = True
        packed = self._pack(value)
        self._bytes += len(packed)
        return Packed(packed)

    def blame(self) -> None:
        """Holding the socket's turn, after it has ended with an error: sees to it that this is that
        of the call after those that are done. It may have come between two calls, as an interrupt
        does, or when the function was opened: then it is the next one's, or, if there is none,
        nobody's."""
        begun = self._count - self._taken_away - len(self.calls)
        if begun == len(self.done):
            try:
                self.calls.popleft()
            except IndexError:
                self.error = None

    def cut(self) -> int:
        """Holding the socket's turn, in any thread: how many calls were taken away at the end."""
        taken = 0
        with suppress(IndexError):
            while True:
                self.calls.pop()
                taken += 1
        self._taken_away += taken
        return taken


def _arguments(pickled: bytes, function: Any) -> Any:
    try:
        return loads(pickled)
    except BaseException as error:
        error.add_note(
            f"while unpickling the arguments of {getattr(function, '__qualname__', function)}"
        )
        raise
