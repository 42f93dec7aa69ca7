"""The interfaces between the parts of a pool, for modules that stand below the ones they describe.

tasks, maps ──> TaskRunner (a `Dispatcher`, or else a `Connection` to a remote pool)
reactor, DroneHandle ──> Tenant, in reactor.py (a `Dispatcher`)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import copy_error
from ..promises.promise import Promise, Signal
from ..wire.functions import FunctionRegistry

if TYPE_CHECKING:
    from .retry import Retry
    from .seed import Seed


class State(IntEnum):
    """The state of a drone: see drone_handle.py."""

    STARTING, PREPARING, READY, RETIRING, STOPPING, DEAD = range(6)


class TaskOptions(NamedTuple):
    """The options of one task.

    The seconds that it may run; how often it is run again; its priority; how much it needs of which
    resources, sorted by their names; and what its random numbers are drawn from, if that is given.
    """

    timeout: float | None = None
    retries: int | Retry = 0
    priority: int = 0
    resources: tuple[tuple[str, int], ...] = ()
    seed: Seed | None = None


def with_seed(
    task_options: TaskOptions | None,
    work: str | Callable[..., Any],
    args: tuple[Any, ...],
    width: int,
) -> tuple[str | Callable[..., Any], tuple[Any, ...]]:
    """Return `work` and `args` of the next call with these options, with its seed, if any."""
    seed = None if task_options is None else task_options.seed
    return (work, args) if seed is None else seed.next_call(work, args, width)


class EventLoop(Protocol):
    """Any thread may call `post`, only callbacks of the loop the others."""

    belongs_to_parent: bool  # this process is a fork of the one that has the loop

    def post(self, callback: Callable[[], object], /) -> None: ...
    def call_later(self, seconds: float, callback: Callable[[], object], /) -> object: ...
    def deliver(self, callback: Callable[[], object], /) -> None: ...
    def wake(self) -> None: ...


def refuse_in_fork(promise: Promise[Any], loop: EventLoop) -> None:
    """Raise `RuntimeError` if `promise` is settled by `loop`, which only the process has of which
    this one is a fork.
    """
    if loop.belongs_to_parent:
        raise RuntimeError(f"{promise!r} belongs to another process, of which this one is a fork")


class End(Signal[None]):
    """Settles when a pool has ended, or a connection to one, and the callbacks of its tasks were
    called.
    """

    def __init__(self, owner: TaskRunner) -> None:
        super().__init__()
        self._owner = owner
        owner.callbacks_left, owner.unsettled, owner.openings_left = deque(), {}, {}

    def _check_in_callback(self) -> None:
        owner = self._owner
        if owner.has_callbacks_left():
            raise RuntimeError(
                "a callback waited for the end of a pool in the thread that calls callbacks, "
                "for which that end waits: end the pool in another thread"
            )
        owner.ends_without_callbacks = True  # this thread could not call them meanwhile


class TaskRunner:
    """The base of dispatchers and connections, as pools, maps and tasks see them."""

    callbacks_left: deque[None]
    """An entry for each callback of its tasks that was handed to the thread for callbacks, and was
    not called yet.
    """
    unsettled: dict[Any, None]
    """Of a dispatcher: all tasks that were taken and not settled yet, in the order of the calls,
    wherever they are, so that none is forgotten when the pool breaks or ends. A task stays there if
    the thread that cancels it is interrupted in the middle of that.
    """
    openings_left: dict[Any, None]
    """Those whose answers the opener has to open before they are settled."""
    waits_for_callbacks = ends_without_callbacks = False

    finishes_at_exit = False  # whether all tasks are finished before the interpreter ends
    task_options: TaskOptions
    width: int
    size: int
    resource_sizes: Mapping[str, int]
    ended: Signal[None]  # an `End`
    finish: Callable[..., None]
    finish_async: Callable[..., Awaitable[None]]
    submit: Callable[..., Promise[Any]]
    reactor: EventLoop
    registry: FunctionRegistry  # of an engine: functions are pickled against its snapshot
    refusal: BaseException | None  # the error for new tasks
    describes_items = True  # whether errors of a `map` may have the `repr` of its items
    stores_results = True  # whether a `map` may store its results in a file
    sends_chunks = True  # whether a `map` may send several calls as one task
    calls_ahead = 0  # calls that a `map` keeps in flight; 0: as many as their times suggest
    post: Callable[..., None]
    submit_task: Callable[[Any], None]
    withdraw: Callable[[Any], None]
    on_failed: Callable[[Any, BaseException], None]
    on_inputs_ready: Callable[[Any], None]

    def has_callbacks_left(self) -> bool:
        return bool(self.callbacks_left) and not self.ends_without_callbacks

    def has_anything_left(self) -> bool:
        """Return whether other threads have yet to settle tasks, or to call their callbacks."""
        return bool(self.openings_left) or self.has_callbacks_left()

    def on_opened(self, task: Any) -> None:
        """Note that the answer of `task` was opened."""
        self.openings_left.pop(task, None)
        if self.waits_for_callbacks:
            self.end_if_called_back()
        else:
            self.reactor.wake()  # the pool may end now

    def on_callback(self) -> None:
        """Count a callback that is handed to the thread for callbacks."""
        self.callbacks_left.append(None)

    def on_called_back(self) -> None:
        """Count a callback that was called."""
        self.callbacks_left.pop()
        # Set before the end looks at the count: so one of the two sees the other.
        if self.waits_for_callbacks:
            self.end_if_called_back()

    def end_if_called_back(self) -> None:
        """Have the end go on that waits for callbacks, unless some are left. Any thread may call
        this.
        """

    def has_room(self) -> bool:
        return True

    def check_open(self) -> None:
        if self.refusal is not None:
            raise copy_error(self.refusal)

    def calls(self) -> AbstractContextManager[None]:
        """Return a context in which calls are made. Raises the errors of taking a snapshot."""
        return nullcontext()

    def wait_complete(self) -> None:
        """Wait until all drones that a new snapshot is to have are there."""

    def warn_if_stale(self, work: Any) -> None:
        """Warn if `work` reads data that its drones have as they were before, if that is known."""

    def pickling(self, task: Any) -> AbstractContextManager[None]:
        """Return a context in which the arguments of `task` are pickled."""
        return nullcontext()

    def note_waiting_thread(self) -> None:
        """Note that a thread waits for a task, which itself waits for promises."""

    def explain(self, error: BaseException) -> None:
        """Add the remedy to an error of a task, if there is one."""

    def note_failure(
        self,
        task: str,
        item: int | None,
        drone: str | None,
        error: BaseException,
        number: int | None = None,
    ) -> None:
        """Note that the task of that name has failed. Any thread may call this, without the
        reactor's lock. `number`: of the task that the drone had, if it was one.
        """

    def frames_address(self, task: int) -> str | None:
        """Return where the frames of a failed task are kept; None if they are not."""
        return None


class LivePage(Protocol):
    """A live page of a pool: see `Pool.dashboard`. The class is in integrations/dashboard.

    The page is served until `close`, the end of a ``with`` block or of the program, or until the
    pool is collected; also after the end of the pool.

    Attributes
    ----------
    url : str
        The address of the page. Its token is the only key: who has it may see what the tasks are
        called and where they are, and interrupt and kill drones.
    read_only_url : str
        An address with another token, which may only look.
    """

    url: str
    read_only_url: str

    @property
    def closed(self) -> bool:
        """Whether the page is served no more."""

    def close(self) -> None:
        """Stop serving the page. May be called more than once, from any thread."""

    def __enter__(self) -> LivePage: ...
    def __exit__(self, *error: object) -> None: ...
