"""`flow`: functions whose calls make a graph, which runs itself.

    with pool:                               counter   runs
        a, b = load(1), load(2)     nodes:   0, 0      at once, on two drones
        c = join(a, b)                       2         when a and b are there
        d = report([a, c])                   2         when c is

A call inside a pool's ``with`` block is a *node*: work whose promise comes back at once, and which
runs to its end on one drone as soon as its last input is there (CEFOS: a zero-wait thread, with a
synchronization counter). Its inputs are the promises among its arguments, so the graph is made by
the calls themselves, in the order in which a plain program would make them; without a pool they are
that plain program.

A node whose inputs are all there goes as any piece of work does. What goes on when one fails is in
inputs.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any, NamedTuple, overload

from ..runtime.coroutines import is_coroutine_function
from ..wire.functions import by_reference
from ..wire.pickling import MainSnapshot
from .config import TaskOptions, check_at_least, check_keep, check_timeout
from .current import innermost
from .flow_graph import note, note_failure
from .task import KeptTask

__all__ = ["flow"]


@overload
def flow(fn: Callable[..., Any], /) -> Callable[..., Any]: ...
@overload
def flow(
    *, timeout: float | None = None, retries: int | None = None, keep: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def flow(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    timeout: float | None = None,
    retries: int | None = None,
    keep: bool = False,
) -> Callable[..., Any]:
    """Makes `fn` one whose calls inside a pool's ``with`` block are nodes of a graph: each gives a
    promise at once.

    Promises among the arguments, also in lists, tuples and values of dicts there, are the node's
    inputs. It runs on a drone of the pool as soon as they all have values. The pool is the one
    whose block was entered last by this thread, asyncio task or green thread; where there is none,
    and in drones, the call is a plain call of `fn`. `timeout` and `retries` are as in
    `Pool.options`. ``keep=True`` is as in `Pool.promise`: the promise is of a handle, the value
    stays in its drone, and nodes that take it run there if they can. `fn` may be a function, a
    method (below it: ``@staticmethod`` and the like go above), a coroutine function or any other
    callable; ``__wrapped__`` is it.

    A node that fails, or whose input has no value, is rejected, and so is all that depends on it,
    with a copy of the error; a note says which node that was. A node that is cancelled rejects what
    depends on it with `CancelledError`; and cancels the nodes that only led to it: that no other
    node which is still wanted needs, and for which nobody waits in another way. Keeping a node's
    promise in a variable is not waiting.

    Raises `TypeError` for what is not callable, `ValueError` for numbers that make no sense; the
    calls raise what `Pool.promise` raises. Any thread may make calls.

    >>> import polycephaly as poly
    >>> @poly.flow
    ... def add(a, b):
    ...     return a + b
    >>> with poly.Pool(2):
    ...     total = add(add(1, 2), add(3, 4))
    ...     total.value
    10
    >>> add(1, 2)
    3
    """
    if keep is not False:
        check_keep(keep)
    options = None
    if timeout is not None or retries is not None:
        options = _Options(
            check_timeout(timeout),
            None if retries is None else check_at_least("retries", retries, 0),
        )
    if fn is None:
        return lambda fn: _flow(fn, options, keep)
    return _flow(fn, options, keep)


def _flow(fn: Callable[..., Any], options: _Options | None, keep: bool) -> Callable[..., Any]:
    if not callable(fn) or isinstance(fn, staticmethod):
        cure = (
            ": put it below, next to the function"
            if isinstance(fn, (staticmethod, classmethod, property))
            else ""
        )
        raise TypeError(f"flow takes a callable, not {fn!r}{cure}")
    last = _Sent()

    def call(*args: Any, **kwargs: Any) -> Any:
        pool = innermost()
        if pool is None:
            return fn(*args, **kwargs)
        dispatcher = pool._dispatcher
        if dispatcher.registry.snapshot is not last.snapshot:
            last.look(dispatcher.registry.snapshot, call, fn)
        task_options = pool._task_options
        if options is not None:
            task_options = options.over(task_options or dispatcher.task_options)
        task = dispatcher.submit(
            last.sent, args, kwargs, None, task_options, KeptTask(dispatcher) if keep else None
        )
        task.is_node = True
        note(task)
        if (
            task._exception is not None or task.cancelled()
        ):  # by now, when nobody knew it for a node
            note_failure(task, task._state)
        return task

    update_wrapper(call, fn, updated=("__dict__",) if isinstance(fn, FunctionType) else ())
    if is_coroutine_function(fn):
        call.parks = True  # type: ignore[attr-defined]  # so that it is known for one
    return call


class _Options(NamedTuple):
    timeout: float | None
    retries: int | None

    def over(self, own: TaskOptions) -> TaskOptions:
        return TaskOptions(
            own.timeout if self.timeout is None else self.timeout,
            own.retries if self.retries is None else self.retries,
        )


class _Sent:
    """What stands for a function in an image of that snapshot, as it was last found out. It stays
    here when the function is pickled."""

    __slots__ = ("sent", "snapshot")

    def __init__(self) -> None:
        self.snapshot: MainSnapshot | None = None
        self.sent: Callable[..., Any]

    def look(
        self, snapshot: MainSnapshot, wrapper: Callable[..., Any], fn: Callable[..., Any]
    ) -> None:
        """Where the other image finds the wrapper under its name, the name is enough. Else it gets
        the function."""
        self.sent = wrapper if by_reference(wrapper, snapshot) else fn
        self.snapshot = snapshot

    def __reduce__(self) -> tuple[type[_Sent], tuple[()]]:
        return _Sent, ()
