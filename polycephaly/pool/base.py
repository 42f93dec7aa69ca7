"""`TaskTarget`: what can be given work, as a `Drone` and a `Pool` can."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal, NoReturn, Self, TypeVar, overload

from ..drone import namespace
from ..promises.promise import Promise
from ..store.kept import Kept
from .config import (
    TaskOptions,
    check_at_least,
    check_keep,
    check_seconds,
    check_timeout,
    check_work,
)
from .dispatcher import Dispatcher
from .drone_handle import DroneHandle
from .map import Results, results
from .map_source import OneByOne
from .progress import total_of
from .task import KeptTask

__all__ = ["DroneBase", "ExecutorBase", "TaskTarget", "wait_for"]

T = TypeVar("T")


class TaskTarget:
    _dispatcher: Dispatcher
    _handle: DroneHandle | None = None  # the only drone that may do it, if there is one
    _task_options: TaskOptions | None = None  # if they are not its crew's own
    _original: TaskTarget | None = None  # whose options these are: it lives as long

    @overload
    def promise(self, work: str, /, *, keep: Literal[True]) -> Promise[Kept[Any]]: ...
    @overload
    def promise(self, work: str, /) -> Promise[Any]: ...
    @overload
    def promise(
        self,
        work: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        keep: Literal[True],
        **kwargs: Any,
    ) -> Promise[Kept[T]]: ...
    @overload
    def promise(
        self, work: Callable[..., T], /, *args: Any, keep: Literal[True], **kwargs: Any
    ) -> Promise[Kept[T]]: ...
    @overload
    def promise(
        self,
        work: Callable[..., Coroutine[Any, Any, T]],
        /,
        *args: Any,
        keep: bool = False,
        **kwargs: Any,
    ) -> Promise[T]: ...
    @overload
    def promise(
        self, work: Callable[..., T], /, *args: Any, keep: bool = False, **kwargs: Any
    ) -> Promise[T]: ...

    def promise(
        self, work: str | Callable[..., Any], /, *args: Any, keep: bool = False, **kwargs: Any
    ) -> Promise[Any]:
        """Has `work` done, after what was given before; a promise of its value.

        `work` is a code string, run in the drone's `__main__` namespace (the value of a last
        expression is the result), or a callable with arguments, or a coroutine function. Promises
        among the arguments, also in lists, tuples and values of dicts there, are waited for first
        and arrive as their values. With ``keep=True`` the value stays in its drone, and the promise
        is of a handle of it: see `Kept`. (A function that has a parameter of that name gets it by
        ``functools.partial``.)

        Raises `TypeError` for anything else, `RuntimeError` after the release. What goes wrong with
        the work itself, its pickling included, rejects the promise.

        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     six, seven = pool.promise("6"), pool.promise(lambda: 7)
        ...     pool.promise(pow, six, seven).value
        279936
        """
        if not callable(work):
            check_work(work, args, kwargs)
        if keep is not False:
            check_keep(keep)
            return self._dispatcher.submit(
                work, args, kwargs, self._handle, self._task_options, KeptTask(self._dispatcher)
            )
        return self._dispatcher.submit(work, args, kwargs, self._handle, self._task_options)

    def _give(
        self, work: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Promise[Any]:
        """`promise`, where all keywords are the work's own."""
        check_work(work, args, kwargs)
        return self._dispatcher.submit(work, args, kwargs, self._handle, self._task_options)

    @overload
    def doit(self, work: str, /) -> Any: ...
    @overload
    def doit(
        self, work: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any
    ) -> T: ...
    @overload
    def doit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> T: ...

    def doit(self, work: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """`promise(...)`, waited for. A wait that is broken off (Ctrl-C) cancels the work."""
        return wait_for(self._give(work, args, kwargs))

    def options(self, *, timeout: float | None = None, retries: int | None = None) -> Self:
        """The same drone or pool on other terms, for single pieces of work; what is not named
        stays.

        Work that runs longer than `timeout` seconds is interrupted and rejected with
        `TimeoutError`; it is run again up to `retries` times when its drone dies (a pool's work: a
        lone drone has nobody else to run it).

        >>> import polycephaly as poly, time
        >>> with poly.Pool(1) as pool:
        ...     type(pool.options(timeout=0.1).promise(time.sleep, 100).exception())
        <class 'TimeoutError'>
        """
        own = self._task_options or self._dispatcher.task_options
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _original=self)
        other._task_options = TaskOptions(
            own.timeout if timeout is None else check_timeout(timeout),
            own.retries if retries is None else check_at_least("retries", retries, 0),
        )
        return other

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, as it belongs to the process that made it; "
            "work that needs drones can start its own"
        )


class DroneBase(TaskTarget):
    """One drone, with a namespace that stays."""

    def __getitem__(self, name: str) -> Any:
        """The value of a name in its namespace. A name that is not there: `KeyError` (that is a
        `NameError` too).

        >>> import polycephaly as poly
        >>> with poly.Drone() as drone:
        ...     drone["x"] = 41
        ...     drone.doit("x += 1")
        ...     drone["x"]
        42
        """
        return self.doit(namespace.get, name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Binds a name in its namespace; done when it returns."""
        self.push({name: value})

    def __contains__(self, name: object) -> bool:
        """Whether its namespace has that name: it is asked."""
        return isinstance(name, str) and self.doit(namespace.has, name) is True

    __iter__ = None  # or Python would ask for drone[0], drone[1] and so on

    def push(self, names: Mapping[str, Any]) -> None:
        """Binds names in the drone's namespace; done when it returns. Raises what the pickling of a
        value raises."""
        wrong = [name for name in names if not isinstance(name, str)]
        if wrong:
            raise TypeError(f"a name in a drone's namespace is a string, not {wrong[0]!r}")
        self.doit(namespace.push, dict(names))

    def pull(self, *names: str) -> tuple[Any, ...]:
        """The values of `names`, in that order. A name that is not there: `NameError` (that is a
        `KeyError` too).

        >>> import polycephaly as poly
        >>> with poly.Drone() as drone:
        ...     drone.push({"a": 1, "b": 2})
        ...     drone.pull("b", "a")
        (2, 1)
        """
        return self.doit(namespace.pull, *names)


class ExecutorBase(TaskTarget, Executor):
    """Several drones, which the standard library's code may use as an executor."""

    def _drones(self) -> Sequence[TaskTarget]:
        raise NotImplementedError

    @overload
    def everywhere(self, work: str, /) -> list[Promise[Any]]: ...
    @overload
    def everywhere(
        self, work: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any
    ) -> list[Promise[T]]: ...
    @overload
    def everywhere(
        self, work: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> list[Promise[T]]: ...

    def everywhere(
        self, work: str | Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Promise[Any]]:
        """Has `work` done once by each drone: a list of promises, one per drone.

        A drone that replaces another later has not done it; for what every drone needs, see
        `initializer`.

        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     pids = [promise.value for promise in pool.everywhere("import os; os.getpid()")]
        ...     sorted(pids) == sorted(drone.pid for drone in pool.drones)
        True
        """
        check_work(work, args, kwargs)
        self._dispatcher.check_open()
        made = []
        for drone in self._drones():
            try:
                made.append(drone._give(work, args, kwargs))
            except RuntimeError as error:  # it has died since it was listed
                lost: Promise[Any] = Promise()
                lost.set_exception(error)
                made.append(lost)
        return made

    def _source(self, fn: Callable[..., Any], iterables: tuple[Iterable[Any], ...]) -> OneByOne:
        raise NotImplementedError

    @overload
    def map(
        self,
        fn: Callable[..., Coroutine[Any, Any, T]],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
        progress: bool = False,
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
        progress: bool = False,
    ) -> Results[T]: ...

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
        progress: bool = False,
    ) -> Results[Any]:
        """The results of ``fn(*items)`` for items of `iterables` in step, in their order.

        Lazy at both ends: inputs are taken only as far ahead as keeps the drones busy (or
        `buffersize` calls; from a served pool, 2,048), so they may be endless, and a slow consumer
        slows the drones down. ``ordered=False`` gives results as they come. `timeout` seconds from
        this call, waiting raises `TimeoutError`. A call's error is raised in its place; then, or
        when the iterator is closed, what is under way is cancelled. `chunksize` is accepted for the
        standard library's sake: there is nothing to tune. With `progress` a bar on stderr shows how
        many calls are done.

        In a coroutine, ``async for`` takes the results without holding up asyncio's loop or other
        green threads.

        Raises `TypeError` for what is no callable, `ValueError` for numbers that make no sense, at
        the call. The iterator is for one thread at a time.

        >>> import itertools, polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     squares = pool.map(lambda n: n * n, itertools.count())
        ...     list(itertools.islice(squares, 4))
        [0, 1, 4, 9]
        """
        check_seconds("timeout", timeout)
        if chunksize is not None:
            check_at_least("chunksize", chunksize, 1)
        if buffersize is not None:
            check_at_least("buffersize", buffersize, 1)
        check_work(fn, iterables or ((),), {})
        self._dispatcher.check_open()
        total = total_of(iterables)
        return results(
            self, self._source(fn, iterables), total, timeout, buffersize, ordered, progress
        )

    @overload
    def submit(
        self, fn: Callable[..., Coroutine[Any, Any, T]], /, *args: Any, **kwargs: Any
    ) -> Promise[T]: ...
    @overload
    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Promise[T]: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Promise[Any]:
        """The standard library's spelling of `promise`. As there, a program that ends without an
        error finishes first what a pool has that was given work in this way."""
        if not callable(fn):
            check_work(fn, args, kwargs)
        self._dispatcher.has_promised_to_finish = True
        return self._dispatcher.submit(fn, args, kwargs, None, self._task_options)


def wait_for(promised: Promise[T]) -> T:
    try:
        return promised.result()
    except BaseException:
        promised.cancel()  # nothing, unless it was the wait that was broken off
        raise
