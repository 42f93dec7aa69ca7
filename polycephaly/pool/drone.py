"""One drone process: `Drone`; and `promise` and `doit`, which run one task on a fresh drone."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from ..promises import callbacks_thread
from ..promises.promise import Promise
from ..runtime.checks import check_at_least
from ..runtime.hidden import Hidden
from ..runtime.prompt import running_asyncio_task
from ..timeline import Timeline
from ..wire.output import forward
from .base import Async, DroneBase, wait_for
from .collecting import take_timeline
from .config import (
    PoolConfig,
    check_cwd,
    check_env,
    check_hang_timeout,
    check_initializer,
    check_memory,
    check_retries,
    check_start,
    check_timeout,
    check_work,
)
from .dispatcher import Dispatcher
from .drone_handle import DroneHandle
from .interfaces import TaskOptions
from .machine import find_machine
from .stack_requests import ANSWER_SECONDS
from .status import drone_state, drone_table, held_memory, running_label

if TYPE_CHECKING:
    from .retry import Retry
    from .stacks import Stack
    from .waiting import Waiting

T = TypeVar("T")

_names = itertools.count(1)


class Drone(DroneBase):
    """A forked copy of this process, with a namespace that persists between tasks.

    A ``with`` or ``async with`` block finishes its tasks at the end. An exception in the block
    cancels them.

    Parameters
    ----------
    name
        Name of the drone. None: ``drone-N``.
    start
        None: fork this process as it is now. If native threads of a library, or sub-interpreters,
        make that unsafe, start a fresh interpreter, which gets the contents of `__main__` by value,
        and issue a `RuntimeWarning` that says why. "fork": always fork. "spawn": start a fresh
        interpreter, which imports the main module.
    env
        Variables that are added to the drone's environment. Those that an interpreter reads when it
        starts, such as ``PYTHONHASHSEED``, have effect with ``start="spawn"`` only.
    cwd
        The drone's working directory.
    initializer, initargs
        ``initializer(*initargs)`` runs in the drone before any task.
    retries
        A `Retry`: a task that raises one of its exceptions is run again. A number has no effect,
        because no other drone can run the tasks if this one dies.
    timeout
        Seconds after which a running task is interrupted and rejected with `TimeoutError`.
    hang_timeout, report_waiting, max_memory, width
        As for `Pool`. The drone is killed if it exceeds `hang_timeout` or `max_memory`.
    detached
        By default the drone ends with its owner: with the green thread, native thread or asyncio
        task that made it. If True, the drone lasts until this process ends. In both cases a drone
        to which no reference is left finishes its tasks and ends. A cell of a notebook is no owner:
        a drone that is made there belongs to the main thread.
    engine, **options
        As for `Pool`.

    Raises
    ------
    ValueError
        If the start method is unknown.
    OSError
        If no process can be started.

    Notes
    -----
    All methods may be called from any thread.

    Examples
    --------
    >>> import polycephaly as poly
    >>> with poly.Drone() as drone:
    ...     drone.doit("x = 41")
    ...     drone.doit("x + 1")
    42
    """

    _dispatcher: Dispatcher
    _handle: DroneHandle

    def __init__(
        self,
        *,
        name: str | None = None,
        start: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        retries: int | Retry = 0,
        timeout: float | None = None,
        hang_timeout: float | None = None,
        report_waiting: float | None = 60.0,
        max_memory: int | str | None = None,
        width: int = 1,
        detached: bool = False,
        engine: str = "local",
        **options: Any,
    ) -> None:
        machine = find_machine(engine, options)
        name = name or f"drone-{next(_names)}"
        config = PoolConfig(
            size=1,
            name=name,
            drone_name=lambda index: name,
            start=check_start(start),
            env=check_env(env, 1),
            cwd=check_cwd(cwd),
            initializer=check_initializer(initializer),
            initargs=Hidden(tuple(initargs)),
            output=forward,
            width=check_at_least("width", width, 1),
            task_options=TaskOptions(check_timeout(timeout), check_retries(retries)),
            max_memory=check_memory(max_memory),
            hang_timeout=check_hang_timeout(hang_timeout),
            report_waiting=check_timeout(report_waiting, "report_waiting"),
            on_death="end",
        )
        machine.check(1)
        # Drones inherit this frame, and tools that log errors print the locals of all frames.
        del env, initargs
        dispatcher = self._dispatcher = Dispatcher(config, machine.open)
        dispatcher.close_when_collected(self)
        if not detached:
            end_with_owner(dispatcher)
        dispatcher.wait_begun()
        handle, dispatcher.supervisor.first = dispatcher.supervisor.first, None
        assert handle is not None  # because the dispatcher has begun
        self._handle = handle

    @classmethod
    def _from_handle(
        cls, dispatcher: Dispatcher, handle: DroneHandle, task_options: TaskOptions | None
    ) -> Drone:
        """Return a `Drone` for one drone of a pool."""
        drone = cls.__new__(cls)
        drone._dispatcher, drone._handle, drone._task_options = dispatcher, handle, task_options
        return drone

    # -- stopping ----------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Interrupt the running task as Ctrl-C would.

        The task's promise is rejected with `KeyboardInterrupt`. Does not wait for that. Has no
        effect if no task runs.
        """
        self._dispatcher.post(self._dispatcher.interrupt, self._handle)

    def kill(self) -> None:
        """Kill the drone with SIGKILL, and wait until it is dead.

        The tasks that it runs are rejected with `DroneDied`.
        """
        self._dispatcher.post(self._handle.kill, "kill() was called", True)
        self._handle.ended.result()

    def release(self, wait: bool = True) -> None:
        """Accept no more tasks, finish those accepted before, and end the drone.

        A second call is no error.

        Parameters
        ----------
        wait
            Whether to wait for the end.
        """
        if self._dispatcher.config.on_death == "end":
            self._dispatcher.close()
            if wait:
                self._dispatcher.finish()
        else:
            self._dispatcher.post(self._dispatcher.supervisor.retire, self._handle)
            if wait and not self._dispatcher.reactor.belongs_to_parent:
                self._handle.ended.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._dispatcher.config.on_death == "end":
            self._dispatcher.finish(cancel=kind is not None)
        else:  # a drone of a pool, which continues
            if kind is not None:
                self._dispatcher.post(self._dispatcher.cancel_dedicated, self._handle)
            self.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._dispatcher.config.on_death == "end":
            await self._dispatcher.finish_async(cancel=kind is not None)
        else:
            if kind is not None:
                self._dispatcher.post(self._dispatcher.cancel_dedicated, self._handle)
            self.release(wait=False)
            if not self._dispatcher.reactor.belongs_to_parent:
                await self._handle.ended

    # -- state -------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The drone's process id. Waits a moment if the drone is just being started.

        Raises
        ------
        RuntimeError
            If the drone could not be started.
        """
        self._handle.pid_known.result()
        if self._handle.pid is None:
            raise RuntimeError(f"drone {self.name} could not be started")
        return self._handle.pid

    @property
    def name(self) -> str:
        """The name given, or ``drone-N``; for a drone of a pool ``POOL.INDEX``.

        The name precedes each line that the drone prints.
        """
        return self._handle.name

    @property
    def alive(self) -> bool:
        """Whether the process exists, as far as is known. It may be starting, busy, idle or about
        to end.
        """
        return self._handle.alive

    @property
    def timeline(self) -> Timeline:
        """The tasks run so far, and their times; also after the drone's end. See `Timeline`."""
        return take_timeline(self._dispatcher, self._handle.name)

    @property
    def unresponsive(self) -> str | None:
        """Why the drone shows no sign of life although it has tasks, or None.

        Reasons are: the process is stopped, it waits for the disk, or C code holds its interpreter
        without using processor time. Drones are checked twice a second, and reported after two
        seconds.
        """
        return self._handle.unresponsive

    @property
    def waiting(self) -> Waiting | None:
        """The wait in which a drone with a task has spent `report_waiting` seconds, or None.

        Set if neither the drone nor a process that it started has run for so long (60 seconds by
        default): the drone waits for a lock, a pipe, a timer or a thread that does not exist.

        Notes
        -----
        Such a wait may be a hang, or intended, as `time.sleep` is. The two look alike, so the drone
        is left alone, and each wait is logged once, as a warning. A polling loop is no wait in this
        sense, nor is a wait while another thread of the drone runs. Always None for drones of Ray,
        because the kernel of their node is not asked.
        """
        return self._handle.waiting

    def stack(self, timeout: float = ANSWER_SECONDS) -> Stack:
        """Return the drone's task and the frames of its threads at this moment.

        The task is not stopped. A drone in C code that holds its interpreter cannot answer; then
        the ``state`` of the `Stack` says so.

        Parameters
        ----------
        timeout
            Seconds to wait for the answer, which usually takes a millisecond.

        Raises
        ------
        RuntimeError
            If the drone has ended: `DroneDied` if its end was not requested.

        Examples
        --------
        >>> import polycephaly as poly, time
        >>> with poly.Drone() as drone:
        ...     nap = drone.promise("import time; time.sleep(60)")
        ...     while not nap.running():
        ...         time.sleep(0.01)
        ...     stack = drone.stack()
        ...     nap.cancel()
        ...     stack.task, stack.frames[-1].line
        True
        ("code 'import time; time.sleep(60)'", 'import time; time.sleep(60)')
        """
        (stack,) = self._dispatcher.stack_requests.take([self._handle], timeout)
        if stack is None:
            raise self._handle.closed_error()
        return stack

    @property
    def running(self) -> str | None:
        """The name of the task that the drone runs, as in errors, or None. If tasks overlap, their
        number follows: ``f and 2 more``.
        """
        return running_label(self._handle)

    @property
    def memory(self) -> int | None:
        """The bytes that the drone and the processes it started hold for themselves, in memory or
        swapped out.

        Memory that is shared with the controller since the fork does not count. None if the drone
        has ended, if it runs in this process (``engine="inline"``), or on Ray, unless `max_memory`
        is set. Takes milliseconds for each gigabyte.
        """
        return held_memory(self._handle)

    @property
    def exitcode(self) -> int | None:
        """The exit code, or None while the drone lives.

        A negative number is the signal that ended the drone, as in `multiprocessing`.
        """
        return self._handle.exitcode

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Drone) and other._handle is self._handle

    def __hash__(self) -> int:
        return hash(self._handle)

    def __repr__(self) -> str:
        if "_handle" not in vars(self):  # as in the frame of `__init__` that drones inherit
            return "<Drone, being made>"
        return f"<Drone {self.name} pid {self._handle.pid}, {drone_state(self._handle)}>"

    def _repr_html_(self) -> str:
        return drone_table(repr(self), [self._handle])


@overload
def promise(work: str, /) -> Promise[Any]: ...
@overload
def promise(work: Async[T], /, *args: Any, **kwargs: Any) -> Promise[T]: ...
@overload
def promise(work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Promise[T]: ...


def promise(work: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Promise[Any]:
    """Run one task on a fresh drone, forked from this process as it is now.

    The drone ends after the task; or earlier, with the thread or asyncio task that called this
    function. Each call starts two processes, the drone and its zygote: in loops, use a `Pool`.

    Parameters
    ----------
    work, *args, **kwargs
        As for `Pool.promise`.

    Returns
    -------
    Promise
        The result of the task.

    Raises
    ------
    TypeError
        If `work` is neither a code string nor callable.
    OSError
        If no process can be started.

    Examples
    --------
    >>> import polycephaly as poly
    >>> poly.promise("6 * 7").value
    42
    """
    check_work(work, args, kwargs)
    drone = Drone()
    made = drone._submit(work, args, kwargs)
    drone.release(wait=False)
    return made


@overload
def doit(work: str, /) -> Any: ...
@overload
def doit(work: Async[T], /, *args: Any, **kwargs: Any) -> T: ...
@overload
def doit(work: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...


def doit(work: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run one task on a fresh drone and return its result.

    The parameters and errors are those of `promise`. If the wait is interrupted (Ctrl-C), the task
    is cancelled.
    """
    return wait_for(promise(work, *args, **kwargs))


# -- drones end with their owner -------------------------------------------------------------------


class _OwnerCallback:
    """Ends a dispatcher together with its owner, and names the owner as the reason.

    The callback refers to the dispatcher only weakly, so that no owner keeps the dispatcher alive.
    The dispatcher refers to the callback, so that the callback lives equally long.
    """

    def __init__(self, dispatcher: Dispatcher, owner: str) -> None:
        self._dispatcher = weakref.ref(dispatcher)
        self._owner = owner
        dispatcher.owner_callback = self

    def kill(self, _: object = None) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None:
            dispatcher.kill(
                f"its owner, {self._owner}, has ended (use Drone(detached=True) or a Pool to "
                "outlive the owner)"
            )


class _ThreadDrones(weakref.WeakSet[_OwnerCallback]):
    """The drones that a native thread started. CPython drops a thread's locals, and so this object,
    when the thread ends.
    """

    def __del__(self) -> None:
        for owner_callback in list(self):
            owner_callback.kill()


_locals = threading.local()


def end_with_owner(dispatcher: Dispatcher) -> None:
    """End `dispatcher` with the running green thread or asyncio task, or else with this native
    thread.

    A drone that is made at a prompt belongs to the process, as the main thread's drones do.
    """
    green = sys.modules.get("polycephaly.green.thread")
    owner = green.calling_thread() if green is not None else None
    if owner is not None:
        owner.own(_OwnerCallback(dispatcher, f"green thread {owner.name!r}"))
        return
    task = running_asyncio_task()
    if task is not None:
        owner_callback = _OwnerCallback(dispatcher, f"asyncio task {task.get_name()!r}")
        task.add_done_callback(owner_callback.kill)
        return
    thread = threading.current_thread()
    # The thread for callbacks ends whenever it has been idle.
    if thread is not threading.main_thread() and not callbacks_thread.callbacks_thread.is_here():
        drones = _locals.__dict__.setdefault("drones", _ThreadDrones())
        drones.add(_OwnerCallback(dispatcher, f"thread {thread.name!r}"))
