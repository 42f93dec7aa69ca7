"""Functions whose calls make a graph that runs itself: `flow`.

    with pool:                               counter   runs
        a, b = load(1), load(2)     nodes:   0, 0      at once, on two drones
        c = join(a, b)                       2         when a and b have values
        d = report([a, c])                   2         when c has a value

A call inside a pool's ``with`` block is a *node*: the call returns a promise without waiting for
the value, and its task runs to the end on one drone as soon as its last input has a value (as in
CEFOS: a zero-wait thread, with a synchronization counter). The inputs of a node are the promises
among its arguments. So the calls themselves make the graph, in the order in which a plain program
would make them. Without a pool the calls are that plain program.

A node whose inputs have values is sent as any other task. Failures are handled in inputs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, overload

from ..promises.forgotten import shown_as_promise
from ..promises.promise import FINISHED
from ..runtime.checks import brief
from ..runtime.coroutines import is_coroutine_function
from ..wire.main_names import MainSnapshot
from .base import Handles, innermost_pool
from .config import check_keep, check_retries, check_timeout
from .directory import KeptTask
from .flow_graph import record_failure, record_node
from .inputs import waiters
from .interfaces import with_seed
from .task import Task
from .task_promise import TaskPromise, facts_of

if TYPE_CHECKING:
    from .retry import Retry

P = ParamSpec("P")


class Node(Protocol[P]):
    """The type of the functions that `flow` returns, for type checkers. A call gives a promise or,
    without a pool, a value, and the promise of a node may stand for any argument of another: so the
    type of a call is Any.
    """

    @property
    def __wrapped__(self) -> Callable[P, Any]: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def __call__(self, *args: Handles, **kwargs: Handles) -> Any: ...
    @overload
    def __call__(self, first: Handles, /, *args: Any, **kwargs: Any) -> Any: ...
    @overload
    def __call__(self, first: Any, second: Handles, /, *args: Any, **kwargs: Any) -> Any: ...

    # A call of a method is not compared with its parameters.
    def __get__(self, instance: Any, owner: type | None = None, /) -> Callable[..., Any]: ...


@overload
def flow(fn: Callable[P, object], /) -> Node[P]: ...
@overload
def flow(
    *, timeout: float | None = None, retries: int | Retry | None = None, keep: bool = False
) -> Callable[[Callable[P, object]], Node[P]]: ...


def flow(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    timeout: float | None = None,
    retries: int | Retry | None = None,
    keep: bool = False,
) -> Any:
    """Make the calls of `fn` inside a pool's ``with`` block nodes of a graph.

    Such a call returns a promise without waiting for the value. (In a pool with `max_queued`, the
    call may wait for room in the queue.) Promises in the arguments, at any depth, are the node's
    inputs. The node runs on a drone of the pool as soon as all inputs have values. The pool is the
    one whose block this thread, asyncio task or green thread entered last. If there is no such
    pool, the call is a plain call of `fn`. So are calls in drones, until code there enters a pool's
    block.

    Parameters
    ----------
    fn
        A function, method, coroutine function or other callable. Decorators such as
        ``@staticmethod`` go above ``@flow``.
    timeout, retries
        As for `Pool.options`; None: the pool's.
    keep
        As for `Pool.promise`: the promise is of a handle, and the value stays in its drone. Nodes
        that take the value run there if they can.

    Returns
    -------
    Callable
        Replaces `fn`. ``__wrapped__`` is `fn`. Calls raise the errors that `Pool.promise` raises.

    Raises
    ------
    TypeError
        If `fn` is not callable or is a `staticmethod`, or an option has a wrong type.
    ValueError
        If a number is out of range.

    Notes
    -----
    If a node fails, all nodes that depend on it are rejected with copies of its error. A note names
    the failed node. If a node is cancelled, all nodes that depend on it are rejected with
    `CancelledError`. The nodes that led only to the cancelled node are cancelled too: those that no
    other wanted node needs, and that no other code waits for. Keeping a node's promise in a
    variable is not waiting. Calls may be made from any thread; a new native thread has entered no
    pool's block.

    Type checkers compare the arguments with the parameters of `fn`, as for `Pool.promise`, except
    for methods. The type of a call is Any, so that it may stand for any argument of another call.

    Examples
    --------
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
    check_keep(keep)
    options: dict[str, Any] = {}
    if timeout is not None:
        options["timeout"] = check_timeout(timeout)
    if retries is not None:
        options["retries"] = check_retries(retries)
    if fn is None:
        return lambda fn: _flow(fn, options, keep)
    return _flow(fn, options, keep)


def _flow(fn: Callable[..., Any], options: dict[str, Any], keep: bool) -> Callable[..., Any]:
    if not callable(fn) or isinstance(fn, staticmethod):
        cure = ""
        if isinstance(fn, (staticmethod, classmethod, property)):
            cure = ": put @flow below the other decorator, next to the function"
        raise TypeError(f"flow takes a callable, not {brief(fn)}{cure}")
    cache = _SentFunction()

    def call(*args: Any, **kwargs: Any) -> Any:
        pool = innermost_pool()
        if pool is None:
            return fn(*args, **kwargs)
        dispatcher = pool._dispatcher
        snapshot = dispatcher.registry.snapshot
        if snapshot is not cache.snapshot:
            # The wrapper, if a drone finds that under its name.
            cache.function = call if snapshot.goes_by_reference(call) else fn
            cache.snapshot = snapshot
        task_options = pool._task_options
        if options:
            task_options = (task_options or dispatcher.task_options)._replace(**options)
        task = _KeptNodeTask(dispatcher) if keep else _NodeTask(dispatcher)
        work, args = with_seed(task_options, cache.function, args, dispatcher.width)
        dispatcher.submit(work, args, kwargs, None, task_options, task)
        record_node(task.number, task.label, task.input_numbers, task.promise)
        return task.promise

    update_wrapper(call, fn, updated=("__dict__",) if isinstance(fn, FunctionType) else ())
    if is_coroutine_function(fn):
        call.parks = True  # type: ignore[attr-defined]  # marks a coroutine function
    return call


@shown_as_promise
class _NodePromise(TaskPromise[Any]):
    """The promise of a node of a graph."""

    def cancel(self, running: bool = True) -> bool:
        """Cancel it, and then the nodes that led only to it, and so on upstream."""
        inputs = self._dependencies()
        cancelled = super().cancel(running)
        todo = [inputs] if cancelled else []
        while todo:
            for each in todo.pop():
                if isinstance(each, _NodePromise) and not each.done() and not _is_wanted(each):
                    inputs = each._dependencies()
                    if TaskPromise.cancel(each, running):
                        todo.append(inputs)
        return cancelled

    def _settle(
        self, state: str, result: Any, exception: BaseException | None, unless_running: bool = False
    ) -> bool:
        is_ours = super()._settle(state, result, exception, unless_running)
        if is_ours and (exception is not None or state != FINISHED):
            record_failure(facts_of(self).call_number, self.cancelled())
        return is_ours


def _is_wanted(node: _NodePromise) -> bool:
    """Return whether anything but settled nodes waits for `node`."""
    return node._made_condition is not None or any(True for _ in waiters(node))


class _NodeTask(Task):
    is_node, promise_type = True, _NodePromise


class _KeptNodeTask(_NodeTask, KeptTask):
    pass


class _SentFunction:
    """A cache of `function`, the object that is sent for a function to drones of one snapshot.

    Valid until the snapshot changes. The cache is not pickled with the function.
    """

    snapshot: MainSnapshot | None = None
    function: Callable[..., Any]

    def __reduce__(self) -> tuple[type[_SentFunction], tuple[()]]:
        return _SentFunction, ()
