"""Promises among the arguments of a call: how they are found, what takes their place, and what
follows when one fails.

    arguments ──pickled──> a hole for each promise met ──> the drone: `filled(index)`, the value
                              └──> Holes.inputs: for these the call waits

It is the pickler that finds them, at any depth, since it looks at everything anyway: for all that
is no promise this costs nothing. A hole is opened as the value, so what is shared within the
arguments is shared in the drone too. Only lists, tuples and values of dicts may hold one. A set
would compare it, and an object may rely on its being a promise: there it is refused. (Not where the
same one is at a right place too: the pickler meets each object once.)

A graph of thousands of calls that wait for each other falls as one: the calls that a rejection
reaches are settled one after another, by the thread that came first, and never one within the
other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from ..drone.functions import filled
from ..errors import another
from ..promises.promise import CANCELLED, FINISHED, PENDING, Promise, misplaced, pickling
from ..promises.trampoline import Trampoline

if TYPE_CHECKING:
    from .task import Task

__all__ = ["CONTAINERS", "Placeholder", "Placeholders", "cancel_upstream", "fall", "forget"]

CONTAINERS = frozenset((list, tuple, dict))
"""In these, and in no subclasses of them, a promise is found."""
_FEW = 32
_CAME_BY = "the promise that brought it: "


class Placeholder:
    """A handle that arrives as the value where it is an argument by itself. What stands for that is
    a promise, which is settled."""

    def stands_for(self) -> Promise[Any]:
        raise NotImplementedError


class Placeholders:
    """A ``with`` block in which this thread pickles arguments."""

    def __init__(self) -> None:
        self.inputs: list[Promise[Any]] = []
        self._indices: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._before = pickling.stand_in
        pickling.stand_in = self._stand_in
        return self

    def __exit__(self, *_: object) -> None:
        pickling.stand_in = self._before

    def _stand_in(self, promise: Promise[Any]) -> tuple[Any, tuple[int]]:
        index = self._indices.setdefault(id(promise), len(self.inputs))
        if index == len(self.inputs):
            self.inputs.append(promise)
        return filled, (index,)

    def check(self, *arguments: object) -> None:
        """Raises `TypeError` where one was met in something else than `CONTAINERS`."""
        anywhere = {id(each) for each in self.inputs if each._may_be_anywhere}
        stray = self._indices.keys() - anywhere
        if stray:
            stray -= _in_containers(arguments, stray)
        if stray:
            raise misplaced(self.inputs[self._indices[stray.pop()]])


def _in_containers(arguments: object, wanted: set[int]) -> set[int]:
    """The ids of those of the promises `wanted` that are there."""
    found: set[int] = set()
    seen: set[int] = set()
    todo: list[Any] = [arguments]
    while todo and len(found) < len(wanted):
        container = todo.pop()
        if id(container) in seen:
            continue
        seen.add(id(container))
        values: Iterable[Any] = container.values() if type(container) is dict else container
        kinds = set(map(type, values))
        if not any(kind in CONTAINERS or issubclass(kind, Promise) for kind in kinds):
            continue
        for value in values:
            if isinstance(value, Promise):
                if id(value) in wanted:
                    found.add(id(value))
            elif type(value) in CONTAINERS:
                todo.append(value)
    return found


# -- what follows when one fails -------------------------------------------------------------------


_falling = Trampoline(deep=1)


def fall(task: Task, settled: Promise[Any]) -> None:
    """`settled`, an input of `work`, has no value: nor will `work`. Its error is like the other's,
    and says by whom it came."""
    if settled._state == CANCELLED:
        error: BaseException = CancelledError(
            f"{settled._named()}, for which {task._named()} waited, was cancelled"
        )
    else:
        assert settled._exception is not None
        error = _own(settled._exception)
        _say_by_whom(error, settled)
    _falling.go(_reject, task, error)


def _reject(task: Task, error: BaseException) -> None:
    try:
        task._settle(FINISHED, None, error)
    finally:
        task.let_go()
        task.dispatcher.filled(task)


def _own(error: BaseException) -> BaseException:
    """The same for one more promise. One that all share would get, wherever one of them is asked,
    the lines of whoever asks, and keep his frames as long as there is any of them."""
    trace, context = error.__traceback__, error.__context__
    own = another(error).with_traceback(trace)
    with suppress(Exception):  # as in `another`
        own.__context__ = context
        if own is not error and hasattr(error, "__notes__"):
            own.__notes__ = list(error.__notes__)
    return own


def _say_by_whom(error: BaseException, settled: Promise[Any]) -> None:
    """Once: a path of a thousand calls is no thousand lines."""
    notes: Sequence[object] = getattr(error, "__notes__", ())
    if not any(isinstance(note, str) and note.startswith(_CAME_BY) for note in notes):
        with suppress(Exception):  # an error that takes none
            error.add_note(f"{_CAME_BY}{settled._named()}")


def forget(inputs: Iterable[Any]) -> None:
    """A work that waited for these is settled. What stays pending, while works that wait for it
    come and go, is not to keep them all: when about half of its hooks are theirs, these are taken
    off. So each hook is looked at twice, about."""
    for each in inputs:
        if isinstance(each, Promise) and not each.done():
            each._gone += 1  # threads may do so at once: it need not be exact
            if each._gone > _FEW and 2 * each._gone > len(each._hooks or ()):
                each._gone = 0
                for _ in _waiters(each):
                    pass


def cancel_upstream(inputs: Sequence[Any], running: bool) -> None:
    """A node of a graph was cancelled that had these: so are the nodes among them, and theirs, that
    led only there."""
    todo = [inputs]
    while todo:
        for each in todo.pop():
            if getattr(each, "is_node", False) and each._state == PENDING and not _is_wanted(each):
                inputs = each.inputs
                if Promise.cancel(each, running):
                    todo.append(inputs)


def _is_wanted(node: Promise[Any]) -> bool:
    """Does anybody wait for it, but nodes that are settled?"""
    return node._made_condition is not None or any(True for _ in _waiters(node))


def _waiters(promise: Promise[Any]) -> Iterator[Any]:
    """The hooks of who waits for it, from the newest. Those of works that are settled are taken
    off, as many together as stand together, and so looked at once: many may be cancelled in any
    order. Who says `_only_follows`, as the end of a channel that went with a call, does not
    wait."""
    hooks = promise._hooks or []
    index = end = len(hooks)
    first = last = None
    with suppress(IndexError):
        while index:
            index -= 1
            hook = hooks[index]
            waits = getattr(hook, "__self__", None)
            if isinstance(waits, Promise):
                is_over = waits._state != PENDING
            else:
                is_over = getattr(waits, "_only_follows", None) is True
            if is_over and hook == getattr(waits, "_one_settled", None):
                first, last = hook, hook if last is None else last
                continue
            if last is not None:
                _take_off(hooks, slice(index + 1, end), first, last)
                last = None
            end = index
            if not is_over:
                yield hook
        if last is not None:
            _take_off(hooks, slice(0, end), first, last)


def _take_off(hooks: list[Any], run: slice, first: object, last: object) -> None:
    """If they are still there: where others take some off meanwhile, or pop or turn them, no two of
    them do. The look and the removal are straight-line code, as in `Promise._unhook`, in which
    nothing is made that is collected."""
    start, end = run.start, run.stop - 1
    if hooks[start] is first and hooks[end] is last:
        del hooks[run]
