"""`Drone`: one headless image of one's own. `promise` and `doit`: a fresh one for one piece of
work."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from ..promises.promise import Promise
from ..timeline import Timeline
from ..timeline.taking import take
from ..wire.output import forward
from .base import DroneBase, wait_for
from .config import (
    PoolConfig,
    TaskOptions,
    check_at_least,
    check_cwd,
    check_env,
    check_hang_timeout,
    check_initializer,
    check_memory,
    check_report_waiting,
    check_start,
    check_timeout,
    check_work,
)
from .dispatcher import Dispatcher
from .drone_handle import DroneHandle, State
from .engine import machine
from .waiting import Waiting

if TYPE_CHECKING:
    import asyncio

__all__ = ["Drone", "doit", "promise"]

T = TypeVar("T")

_names = itertools.count(1)


class Drone(DroneBase):
    """A headless copy of this image, with a namespace that stays.

    It is forked from the image as it is at this moment. Where native threads of a library make that
    unsafe, it is a fresh interpreter that gets what `__main__` holds by value, and a
    `RuntimeWarning` names the library; ``start="fork"`` forks all the same, ``start="spawn"``
    imports the main module in a fresh interpreter. `env` is added to its environment, `cwd` is its
    directory, ``initializer(*initargs)`` runs in it before any work; work that runs longer than
    `timeout` seconds is interrupted and rejected with `TimeoutError`; see `Pool` for `hang_timeout`
    and `max_memory`, beyond which it is killed, and for `width` and `report_waiting`.

    A ``with`` or ``async with`` block ends by finishing what it was given; an exception in it
    cancels that.

    It ends with whoever made it: a green or native thread (when that ends), an asyncio task, or,
    when no reference to it is left, at once; ``detached=True`` leaves only the last of these and
    the end of this process. A cell of a notebook is no such task: a drone made there lasts as one
    of the main thread does. All methods may be called from any thread. See `Pool` for `engine` and
    its options.

    Raises `ValueError` for a start method that there is not, and `OSError` where no process can be
    started.

    >>> import polycephaly as poly
    >>> with poly.Drone() as drone:
    ...     drone.doit("x = 41")
    ...     drone.doit("x + 1")
    42
    """

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
        timeout: float | None = None,
        hang_timeout: float | None = None,
        report_waiting: float | None = 60.0,
        max_memory: int | None = None,
        width: int = 1,
        detached: bool = False,
        engine: str = "local",
        **options: Any,
    ) -> None:
        name = name or f"drone-{next(_names)}"
        config = PoolConfig(
            size=1,
            name=name,
            drone_name=lambda index: name,
            start=check_start(start),
            env=check_env(env, 1),
            cwd=check_cwd(cwd),
            initializer=check_initializer(initializer),
            initargs=tuple(initargs),
            output=forward,
            width=check_at_least("width", width, 1),
            task_options=TaskOptions(check_timeout(timeout), 0),
            max_tasks=None,
            max_memory=check_memory(max_memory),
            max_queued=None,
            hang_timeout=check_hang_timeout(hang_timeout),
            report_waiting=check_report_waiting(report_waiting),
            machine=machine(engine, options),
            on_death="end",
        )
        self._own(Dispatcher(config), detached)

    def _own(self, dispatcher: Dispatcher, detached: bool) -> None:
        dispatcher.close_without(self)
        self._dispatcher = dispatcher
        if not detached:
            end_with_owner(dispatcher)
        try:
            dispatcher.begun.result()
        except BaseException:
            dispatcher.kill()
            dispatcher.wait_ended()
            raise
        handle = dispatcher.supervisor.first
        assert handle is not None  # it has begun
        self._handle = handle

    @classmethod
    def _of(
        cls, dispatcher: Dispatcher, handle: DroneHandle, task_options: TaskOptions | None
    ) -> Drone:
        """A pool's drone."""
        drone = cls.__new__(cls)
        drone._dispatcher, drone._handle, drone._task_options = dispatcher, handle, task_options
        return drone

    # -- stopping ----------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Stops what runs, as Ctrl-C would: its promise is rejected with `KeyboardInterrupt`. Does
        not wait for that; where nothing runs, nothing happens."""
        self._dispatcher.reactor.post(lambda: self._dispatcher.interrupt(self._handle))

    def kill(self) -> None:
        """SIGKILL: what it runs is rejected with `DroneDied`. Returns once it is dead."""
        self._dispatcher.reactor.post(self._handle.kill)
        self._handle.ended.result()

    def release(self, wait: bool = True) -> None:
        """Takes no more work, finishes what it has, and ends; waits for that unless told not to.
        Twice is no error."""
        if self._dispatcher.config.on_death == "end":
            self._dispatcher.close()
            if wait:
                self._dispatcher.finish()
        else:
            self._dispatcher.reactor.post(lambda: self._dispatcher.supervisor.retire(self._handle))
            if wait:
                self._handle.ended.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._dispatcher.config.on_death == "end":
            self._dispatcher.finish(cancel=kind is not None)
        else:  # one of a pool's, which goes on
            if kind is not None:
                self._cancel_own()
            self.release()

    def _cancel_own(self) -> None:
        self._dispatcher.reactor.post(lambda: self._dispatcher.cancel_own(self._handle))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._dispatcher.config.on_death == "end":
            await self._dispatcher.finish_async(cancel=kind is not None)
        else:
            if kind is not None:
                self._cancel_own()
            self.release(wait=False)
            await self._handle.ended

    # -- what it is --------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """Its process; waits a moment where it is just being started."""
        self._handle.born.result()
        if self._handle.pid is None:
            raise RuntimeError(f"drone {self.name} could not be started")
        return self._handle.pid

    @property
    def name(self) -> str:
        """As given, or ``drone-N``; of a pool's drone ``POOL.INDEX``. It stands before each line
        that it prints."""
        return self._handle.name

    @property
    def alive(self) -> bool:
        """Whether its process is there, as far as is known: it may be starting, busy, or about to
        end."""
        return self._handle.alive

    @property
    def timeline(self) -> Timeline:
        """What it has done so far, and when; also after its end. See `Timeline`."""
        return take(self._dispatcher, self._handle.name)

    @property
    def unresponsive(self) -> str | None:
        """Why nothing is heard of it while it should work, if that is so: it is stopped, waits for
        the disk, or C code holds its interpreter without doing anything. Looked at twice a second,
        told after two seconds."""
        return self._handle.unresponsive

    @property
    def waiting(self) -> Waiting | None:
        """In what it has waited, if it has work and neither it nor a process that it has started
        was let run for `report_waiting` seconds (by default 60): for a lock, a pipe, a timer, a
        thread that is not there.

        Such a wait may be a hang, or may be meant, as `time.sleep` is: these look alike, so nothing
        is done about it. Each wait is logged once, as a warning. A loop that looks again and again
        is no wait in this sense, nor is a wait beside which another thread of the drone runs.
        Always None for drones of Ray, as the kernel of their node is not asked."""
        return self._handle.waiting

    @property
    def exitcode(self) -> int | None:
        """None while it lives; negative: the signal that ended it, as in `multiprocessing`."""
        return self._handle.exitcode

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Drone) and other._handle is self._handle

    def __hash__(self) -> int:
        return hash(self._handle)

    def __repr__(self) -> str:
        if self._handle.state is State.DEAD:
            state = f"ended, exit code {self.exitcode}"
        elif self._handle.unresponsive:
            state = f"unresponsive: {self._handle.unresponsive}"
        elif self._handle.in_flight:
            state = "busy"
        else:
            state = "idle"
        return f"<Drone {self.name} pid {self._handle.pid}, {state}>"

    def _repr_html_(self) -> str:
        from ..integrations.html import drone_table

        return drone_table(self)


@overload
def promise(work: str, /) -> Promise[Any]: ...
@overload
def promise(
    work: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any
) -> Promise[T]: ...
@overload
def promise(work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Promise[T]: ...


def promise(work: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Promise[Any]:
    """Has one piece of work done by a fresh drone, forked from this image as it is now.

    The drone ends when the work is done; or before, with the thread or asyncio task that called
    this. Raises `TypeError` for what is neither a code string nor callable, and `OSError` where no
    process can be started.

    >>> import polycephaly as poly
    >>> poly.promise("6 * 7").value
    42
    """
    check_work(work, args, kwargs)
    drone = Drone()
    made = drone._give(work, args, kwargs)
    drone.release(wait=False)
    return made


@overload
def doit(work: str, /) -> Any: ...
@overload
def doit(work: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any) -> T: ...
@overload
def doit(work: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...


def doit(work: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """`promise(...)`, waited for. A wait that is broken off (Ctrl-C) cancels the work."""
    return wait_for(promise(work, *args, **kwargs))


# -- whose end is whose ----------------------------------------------------------------------------


class _Bond:
    """Ends a crew with its owner, and says so. It lives as long as the crew, which nobody is to
    keep for its sake."""

    def __init__(self, dispatcher: Dispatcher, owner: str) -> None:
        self._dispatcher = weakref.ref(dispatcher)
        self._owner = owner
        dispatcher.bond = self

    def kill(self, _: object = None) -> None:
        dispatcher = self._dispatcher()
        if dispatcher is not None:
            dispatcher.kill(
                f"its owner, {self._owner}, has ended (Drone(detached=True), or a Pool, would go on)"
            )


class _ThreadsDrones:
    """What a native thread started. A thread's locals are dropped when it ends, and this with
    them."""

    def __init__(self) -> None:
        self.bonds: weakref.WeakSet[_Bond] = weakref.WeakSet()

    def __del__(self) -> None:
        for bond in list(self.bonds):
            bond.kill()


class _Locals(threading.local):
    def __init__(self) -> None:
        self.drones = _ThreadsDrones()


_locals = _Locals()


def end_with_owner(dispatcher: Dispatcher) -> None:
    """End `crew` with the green thread or asyncio task that runs here, or else with this native
    thread. A drone made at a prompt belongs to the image, as those of the main thread do."""
    green = sys.modules.get("polycephaly.green.thread")
    owner = green.here() if green is not None else None
    if owner is not None:
        owner.own(_Bond(dispatcher, f"green thread {owner.name!r}"))
        return
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        task = asyncio.current_task()
        if task is not None and not _runs_a_prompt(task):
            task.add_done_callback(_Bond(dispatcher, f"asyncio task {task.get_name()!r}").kill)
            return
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        _locals.drones.bonds.add(_Bond(dispatcher, f"thread {thread.name!r}"))


def _runs_a_prompt(task: asyncio.Task[Any]) -> bool:
    """Return whether a prompt made `task`, to run what was typed into it.

    ``python -m asyncio`` makes a task of each line that awaits, and IPython and its kernels of each
    cell and of each message of a widget. Tasks that the user's code makes there have coroutines of
    the user's."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    if frame is None:  # a generator, or a coroutine of a compiled extension
        return False
    if frame.f_code.co_name == "<module>":  # only a prompt compiles a module's code to a coroutine
        return True
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("IPython", "ipykernel")
