"""The methods that drones and pools share, local and remote: `TaskTarget` accepts tasks, a
`DroneBase` is one drone, an `ExecutorBase` has several.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextvars import ContextVar
from importlib import import_module
from threading import Lock
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    ParamSpec,
    Self,
    TypeAlias,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)
from weakref import WeakKeyDictionary, ref

from .._compat import caller_stacklevel, renew_in_child
from ..promises.promise import Handle, Promise
from ..runtime.checks import check_at_least, check_seconds
from ..runtime.progress import Progress, total_of
from ..runtime.prompt import running_asyncio_task
from ..store.kept import Kept
from . import namespace
from .config import (
    check_keep,
    check_names,
    check_needs,
    check_priority,
    check_resume,
    check_retries,
    check_timeout,
    check_work,
)
from .directory import KeptTask
from .interfaces import LivePage, TaskOptions, TaskRunner, with_seed
from .map import Ordered, Results, Unordered, start_map
from .map_source import Source
from .mistaken_names import POOL_METHODS_HERE, tells_options

if TYPE_CHECKING:
    from .retry import Retry
    from .seed import Seed, SeedLike

T = TypeVar("T")
T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
P = ParamSpec("P")

Handles: TypeAlias = Handle | Sequence[Handle] | Mapping[Any, Handle]
"""What type checkers accept as the first or second argument of a call, or as all of them, in place
of its function's parameters. A type "one of these anywhere" cannot be written."""


Async: TypeAlias = Callable[..., Coroutine[Any, Any, T]]
"""A coroutine function, or another callable that gives a coroutine."""


class _MapOptions(TypedDict, total=False):
    seed: SeedLike | None
    timeout: float | None
    chunksize: int | None
    buffersize: int | None
    ordered: bool
    progress: bool
    resume: str | os.PathLike[str] | None
    key: Callable[..., str] | None
    changed: Literal["refuse", "again", "keep"]


class _RaisingMapOptions(_MapOptions, total=False):
    return_exceptions: Literal[False]


class _NotGiven:
    def __repr__(self) -> str:
        return "False"


class _AsBefore:
    def __repr__(self) -> str:
        return "..."  # in the reference, which parses signatures


_NOT_GIVEN: Any = _NotGiven()
_AS_BEFORE: Any = _AsBefore()  # None lifts a limit

_blocked_loop_was_told = False


def _warn_of_blocked_loop() -> None:
    global _blocked_loop_was_told
    if not _blocked_loop_was_told:
        _blocked_loop_was_told = True
        warnings.warn(
            "doit blocks asyncio's loop, and all other tasks of it, until the drone has answered: "
            "use `await pool.promise(...)`",
            RuntimeWarning,
            stacklevel=caller_stacklevel(),
        )


_pages: WeakKeyDictionary[TaskRunner, LivePage] = WeakKeyDictionary()
"""The live pages, by the dispatchers of their pools."""
_pages_lock = Lock()
renew_in_child(_pages_lock)


class TaskTarget:
    _dispatcher: TaskRunner
    _handle: Any = None  # the handle of the only drone that may run the tasks, if set
    _task_options: TaskOptions | None = None  # if they differ from the dispatcher's
    # The pool or drone that `options` has copied, which has to live as long as this copy.
    _original: TaskTarget | None = None

    @overload
    def promise(self, work: str, /, *, keep: Literal[True]) -> Promise[Kept[Any]]: ...
    @overload
    def promise(self, work: str, /) -> Promise[Any]: ...
    @overload
    def promise(
        self, work: Async[T], /, *args: Any, keep: Literal[True], **kwargs: Any
    ) -> Promise[Kept[T]]: ...
    @overload
    def promise(
        self, work: Callable[..., T], /, *args: Any, keep: Literal[True], **kwargs: Any
    ) -> Promise[Kept[T]]: ...
    @overload
    def promise(
        self, work: Callable[..., Any], /, *args: Any, keep: bool, **kwargs: Any
    ) -> Promise[Any]: ...
    @overload
    def promise(self, work: Async[T], /, *args: Handles, **kwargs: Handles) -> Promise[T]: ...
    @overload
    def promise(
        self, work: Callable[..., T], /, *args: Handles, **kwargs: Handles
    ) -> Promise[T]: ...
    @overload
    def promise(
        self, work: Async[T], first: Handles, /, *args: Any, **kwargs: Any
    ) -> Promise[T]: ...
    @overload
    def promise(
        self, work: Callable[..., T], first: Handles, /, *args: Any, **kwargs: Any
    ) -> Promise[T]: ...
    @overload
    def promise(
        self, work: Async[T], first: Any, second: Handles, /, *args: Any, **kwargs: Any
    ) -> Promise[T]: ...
    @overload
    def promise(
        self, work: Callable[..., T], first: Any, second: Handles, /, *args: Any, **kwargs: Any
    ) -> Promise[T]: ...
    @overload
    def promise(
        self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Promise[T]: ...
    @overload
    def promise(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Promise[T]: ...

    def promise(  # type: ignore[misc]  # of some overloads, `keep` may be a parameter of `work`
        self, work: str | Callable[..., Any], /, *args: Any, keep: bool = _NOT_GIVEN, **kwargs: Any
    ) -> Promise[Any]:
        """Run `work` on a drone, in submission order, and return a promise of its result.

        Parameters
        ----------
        work
            A callable, a coroutine function, or a code string. A code string runs in the drone's
            `__main__` namespace, and the value of its last expression is the result.
        *args, **kwargs
            Arguments of the callable. Promises, kept and shared values arrive as their values,
            wherever they stand: as an argument, inside one, or captured by the callable. The task
            waits for the promises.
        keep
            If True, the value stays in its drone and the promise is of a handle: see `Kept`. If a
            function has a parameter of this name, use ``functools.partial``.

        Returns
        -------
        Promise
            Rejected by any error of the task itself, including errors of pickling.

        Raises
        ------
        TypeError
            If `work` is neither a string nor callable, or ``keep=False`` is given, and `work` has a
            parameter of this name, too.
        RuntimeError
            If the drone was released, or the pool was shut down.

        Notes
        -----
        Type checkers compare the arguments with the parameters of `work`. They accept handles, and
        lists and dicts of them, as the first two arguments, or as all of them: then, and with
        `keep`, only the type of the result is known. For a handle elsewhere, use ``typing.cast``.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     six, seven = pool.promise("6"), pool.promise(lambda: 7)
        ...     pool.promise(pow, six, seven).value
        279936
        """
        if not callable(work):
            check_work(work, args, kwargs)
        if self._task_options is not None:
            work, args = self._with_seed(work, args)
        if keep is not _NOT_GIVEN and check_keep(keep, work):
            return self._dispatcher.submit(
                work, args, kwargs, self._handle, self._task_options, KeptTask(self._dispatcher)
            )
        return self._dispatcher.submit(work, args, kwargs, self._handle, self._task_options)

    def _submit(
        self, work: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Promise[Any]:
        """Do as `promise` does, but pass all keywords to the task."""
        check_work(work, args, kwargs)
        if self._task_options is not None:
            work, args = self._with_seed(work, args)
        return self._dispatcher.submit(work, args, kwargs, self._handle, self._task_options)

    def _with_seed(
        self, work: str | Callable[..., Any], args: tuple[Any, ...]
    ) -> tuple[str | Callable[..., Any], tuple[Any, ...]]:
        """Return `work` and `args` of the next call, with the seed of these options, if any."""
        return with_seed(self._task_options, work, args, self._dispatcher.width)

    @overload
    def doit(self, work: str, /) -> Any: ...
    @overload
    def doit(self, work: Async[T], /, *args: Handles, **kwargs: Handles) -> T: ...
    @overload
    def doit(self, work: Callable[..., T], /, *args: Handles, **kwargs: Handles) -> T: ...
    @overload
    def doit(self, work: Async[T], first: Handles, /, *args: Any, **kwargs: Any) -> T: ...
    @overload
    def doit(self, work: Callable[..., T], first: Handles, /, *args: Any, **kwargs: Any) -> T: ...
    @overload
    def doit(
        self, work: Async[T], first: Any, second: Handles, /, *args: Any, **kwargs: Any
    ) -> T: ...
    @overload
    def doit(
        self, work: Callable[..., T], first: Any, second: Handles, /, *args: Any, **kwargs: Any
    ) -> T: ...
    @overload
    def doit(
        self, work: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T: ...
    @overload
    def doit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...

    def doit(self, work: str | Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run `work` on a drone and return its result.

        The parameters and errors are those of `promise`, without `keep`. If the wait is interrupted
        (Ctrl-C), the task is cancelled. In a task of asyncio, one warning tells to await a promise
        instead.
        """
        if running_asyncio_task() is not None:
            _warn_of_blocked_loop()
        __tracebackhide__ = True
        return wait_for(self._submit(work, args, kwargs))

    @tells_options()
    def options(
        self,
        *,
        timeout: float | None = _AS_BEFORE,
        retries: int | Retry | None = None,
        priority: int | None = None,
        resources: Mapping[str, int] | None = None,
        seed: SeedLike | None = None,
    ) -> Self:
        """Return the same drone or pool with other options for its tasks.

        Parameters
        ----------
        timeout
            Seconds after which a running task is interrupted and rejected with `TimeoutError`.
            None: no limit. Not given: as before.
        retries
            How often a task is run again if its drone dies, or a `Retry`, for tasks that raise
            exceptions too. None: as before. A number has no effect on a lone drone, because no
            other drone can run its tasks.
        priority
            Of the tasks that wait for a drone, those with the largest number are sent first; 0 if
            never given. Tasks that a drone has are not overtaken: it gets short ones for a few
            milliseconds ahead. None: as before.
        resources
            How much a task needs of the pool's `resources`, as in ``{"db": 1}``: it is sent when
            that much is free, and holds it until it is over. Tasks that need nothing may overtake
            it. ``{}``: nothing. None: as before.
        seed
            A whole number, a sequence of them, or a ``numpy.random.SeedSequence``: calls draw
            random numbers that can be repeated. The n-th call that is made by `submit`, `promise`
            or `doit` through the object that is returned here, from 0, draws as the n-th call of a
            `map` with this seed. Each `map` begins with 0. See `map`. None: as before.

        Raises
        ------
        TypeError
            If an option has a wrong type.
        ValueError
            If a number is out of range, or the pool never has so much of a resource.

        Examples
        --------
        >>> import polycephaly as poly, time
        >>> with poly.Pool(1) as pool:
        ...     type(pool.options(timeout=0.1).promise(time.sleep, 100).exception())
        <class 'TimeoutError'>
        """
        own = self._task_options or self._dispatcher.task_options
        sizes = self._dispatcher.resource_sizes
        other = object.__new__(type(self))
        original = self if self._original is None else self._original
        other.__dict__.update(self.__dict__, _original=original)
        other._task_options = TaskOptions(
            own.timeout if timeout is _AS_BEFORE else check_timeout(timeout),
            own.retries if retries is None else check_retries(retries),
            own.priority if priority is None else check_priority(priority),
            own.resources if resources is None else check_needs(resources, sizes),
            own.seed if seed is None else _checked(seed),
        )
        return other

    def _ask(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Return the result of a function of this package, which draws nothing and has no seed."""
        return wait_for(  # type: ignore[no-any-return]
            self._dispatcher.submit(fn, args, kwargs, self._handle, self._task_options)
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled, because it belongs to the process that "
            "made it; a task that needs drones can start drones of its own"
        )


class DroneBase(TaskTarget):
    """One drone, with a namespace that persists between tasks."""

    def __getitem__(self, name: str) -> Any:
        """Return the value of a name in the drone's namespace.

        Raises
        ------
        KeyError
            If the namespace does not have the name. The error is a `NameError` too.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Drone() as drone:
        ...     drone["x"] = 41
        ...     drone.doit("x += 1")
        ...     drone["x"]
        42
        """
        return self.pull(name)[0]

    def __setitem__(self, name: str, value: Any) -> None:
        """Bind a name in the drone's namespace, and wait until that is done."""
        self.push({name: value})

    def __contains__(self, name: object) -> bool:
        """Return whether the drone's namespace has the name. Asks the drone."""
        return isinstance(name, str) and self._ask(namespace.has, name)

    if not TYPE_CHECKING:  # or type checkers would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property that has raised: raise its own error
                object.__getattribute__(self, name)
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("map", "submit"):
                text += ": a Pool has, of one drone as well; a drone has promise(f, *args)"
            elif not name.startswith("_"):
                text += f": the names of its namespace are got by drone[{name!r}]"
            raise AttributeError(text, name=name, obj=self)

    __iter__ = None  # without this, Python would iterate over drone[0], drone[1] and so on

    def push(self, names: Mapping[str, Any]) -> None:
        """Bind names in the drone's namespace, and wait until that is done.

        Parameters
        ----------
        names
            The values by name. Errors of pickling a value are raised, with a note that has its
            name.

        Raises
        ------
        TypeError
            If a name is not a string.
        """
        self._ask(namespace.push, **check_names(names))

    def pull(self, *names: str) -> tuple[Any, ...]:
        """Return the values of `names` in the drone's namespace, in that order.

        Raises
        ------
        NameError
            If the namespace does not have a name. The error is a `KeyError` too.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Drone() as drone:
        ...     drone.push({"a": 1, "b": 2})
        ...     drone.pull("b", "a")
        (2, 1)
        """
        return self._ask(namespace.pull, *names)


class ExecutorBase(TaskTarget, Executor):
    """Several drones, which code for the standard library's executors can use too."""

    # Those of `map` that may not have been read in full, by `id`. Each use is one atomic step.
    _maps: dict[int, ref[Ordered]]

    if not TYPE_CHECKING:  # or type checkers would accept any name

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):  # a property that has raised: raise its own error
                object.__getattribute__(self, name)
            here = POOL_METHODS_HERE.get(name)
            if name == "terminate" and not hasattr(self, "terminate_workers"):  # a served pool's
                here = "shutdown(cancel_futures=True)"
            cure = here and (
                f": instead of multiprocessing's {name}, use {here}, or take "
                "polycephaly.multiprocessing.Pool, which has it"
            )
            text = f"{type(self).__name__!r} object has no attribute {name!r}{cure or ''}"
            raise AttributeError(text, name=name, obj=self)

    @property
    def drones(self) -> Sequence[TaskTarget]:
        raise NotImplementedError

    @property
    def _max_workers(self) -> int:
        """The number of drones. Dask looks for it under this name of the standard library."""
        return self._dispatcher.size

    @overload
    def everywhere(self, work: str, /) -> list[Promise[Any]]: ...
    @overload
    def everywhere(self, work: Async[T], /, *args: Any, **kwargs: Any) -> list[Promise[T]]: ...
    @overload
    def everywhere(
        self, work: Callable[..., T], /, *args: Any, **kwargs: Any
    ) -> list[Promise[T]]: ...

    def everywhere(
        self, work: str | Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> list[Promise[Any]]:
        """Run `work` once on each drone.

        A drone that replaces another one later does not run `work`. For a task that every drone
        needs, see `initializer`.

        Parameters
        ----------
        work, *args, **kwargs
            As for `promise`.

        Returns
        -------
        list of Promise
            One promise per drone.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     pids = [promise.value for promise in pool.everywhere("import os; os.getpid()")]
        ...     sorted(pids) == sorted(drone.pid for drone in pool.drones)
        True
        """
        check_work(work, args, kwargs)
        self._dispatcher.check_open()
        promises = []
        with self._dispatcher.calls():
            self._dispatcher.wait_complete()
            for drone in self.drones:
                try:
                    promises.append(drone._submit(work, args, kwargs))
                except RuntimeError as error:  # the drone has died since the drones were listed
                    lost: Promise[Any] = Promise()
                    lost.set_exception(error)
                    promises.append(lost)
        return promises

    @overload  # type: ignore[override]  # the base compares no arguments
    def map(
        self,
        fn: Callable[[T1], Coroutine[Any, Any, T]],
        items1: Iterable[T1 | Handles],
        /,
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[T1], T],
        items1: Iterable[T1 | Handles],
        /,
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[T1, T2], Coroutine[Any, Any, T]],
        items1: Iterable[T1 | Handles],
        items2: Iterable[T2 | Handles],
        /,
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[T1, T2], T],
        items1: Iterable[T1 | Handles],
        items2: Iterable[T2 | Handles],
        /,
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[T1, T2, T3], Coroutine[Any, Any, T]],
        items1: Iterable[T1 | Handles],
        items2: Iterable[T2 | Handles],
        items3: Iterable[T3 | Handles],
        /,
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[T1, T2, T3], T],
        items1: Iterable[T1 | Handles],
        items2: Iterable[T2 | Handles],
        items3: Iterable[T3 | Handles],
        /,
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Async[T],
        items1: Iterable[Any],
        items2: Iterable[Any],
        items3: Iterable[Any],
        items4: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        items1: Iterable[Any],
        items2: Iterable[Any],
        items3: Iterable[Any],
        items4: Iterable[Any],
        /,
        *iterables: Iterable[Any],
        **options: Unpack[_RaisingMapOptions],
    ) -> Results[T]: ...
    @overload
    def map(
        self,
        fn: Async[T],
        /,
        *iterables: Iterable[Any],
        return_exceptions: bool,
        **options: Unpack[_MapOptions],
    ) -> Results[T | Exception]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        /,
        *iterables: Iterable[Any],
        return_exceptions: bool,
        **options: Unpack[_MapOptions],
    ) -> Results[T | Exception]: ...

    @tells_options(
        "an argument of the function is given by functools.partial(f, ...), or as one more iterable"
    )
    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | None = None,
        buffersize: int | None = None,
        ordered: bool = True,
        progress: bool = False,
        return_exceptions: bool = False,
        seed: SeedLike | None = None,
        resume: str | os.PathLike[str] | None = None,
        key: Callable[..., str] | None = None,
        changed: str = "refuse",
        keep: bool = False,
    ) -> Results[Any]:
        """Return an iterator over the results of ``fn(*items)``, in the order of the inputs.

        Both ends are lazy. Inputs are taken only as far ahead as keeps the drones busy, so they may
        be endless, and a slow consumer slows the drones down.

        Parameters
        ----------
        fn
            A callable or a coroutine function.
        *iterables
            The arguments, taken in step.
        timeout
            Seconds from this call on, after which waiting for a result raises `TimeoutError`.
        chunksize
            So many consecutive calls are sent to a drone together, whatever time and room they
            take, and no other drone is given any of them once the first has begun. For calls that
            belong together, because they read the same file, for example. None: short calls are
            sent together as their measured times suggest, and given back if another drone has
            nothing to do. Calls with a time limit, a `Retry` or resources, calls whose errors are
            returned, coroutines that overlap, and calls of a pool with `max_tasks` or of a served
            one are sent one by one in any case, as is a call with a promise, a kept value or an end
            of a channel among its arguments.
        buffersize
            Maximum number of calls in flight; of chunks, as in the standard library, if calls are
            sent in chunks of `chunksize`. None: as many as keep the drones busy; 2,048 for a served
            pool.
        ordered
            If False, results are given in the order in which they arrive.
        progress
            If True, a bar on stderr shows how many calls are done.
        return_exceptions
            If True, the error of a call is given in the place of its result, instead of being
            raised, and the other calls go on. `CancelledError`, and errors that are no `Exception`
            (`KeyboardInterrupt`, for example), are raised. Each call is then sent as a task by
            itself, which costs some microseconds for each.
        seed
            A whole number, a sequence of them, or a ``numpy.random.SeedSequence``: calls draw
            random numbers that can be repeated. Before call i, the global generators of `random`,
            NumPy and torch, as far as the drone has imported them, are seeded from
            ``SeedSequence(seed, spawn_key=(i,))``, and `rng` gives a generator of that call. So the
            results are the same for any number of drones and on any engine. None: that of
            `options`, or else calls draw numbers of their drones' own.
        resume
            The path of an SQLite file, made if it is not there, in which the result of each call is
            stored, at most half a second after the call has ended, whether results are read or not.
            A later map of the same function with this file makes no call again that has a result
            there, and gives the stored one in its place. A call is known by the function's module
            and name, and by its arguments as they mean: also in another process and on another
            Python; of equal items, the n-th is the n-th call. With `seed`, the seed and the index
            count, too. Failures are stored, and their calls made again: see `resumed`.
        key
            With `resume`: a function that gives the key of a call, a string, in place of its
            arguments. For items that cannot be pickled, and if `fn` is a lambda.
        changed
            With `resume`: what to do if the source, defaults, closure or ``partial`` arguments of
            `fn` are others than those of the stored results. "refuse": an error; "again": all its
            calls are made again; "keep": the results are used. What `fn` calls is not looked at.
        keep
            Not for `map`: see `promise`.

        Returns
        -------
        Results
            An iterator for one consumer: a second thread, asyncio task or green thread, or `next`
            beside ``async for``, gets a `RuntimeError`. In a coroutine, ``async for`` takes the
            results without blocking asyncio's loop or other green threads. The error of a call is
            raised in place of its result, with a note that has the item's index and, if the pickled
            arguments take at most 4 KiB, their shortened `repr`.
            After that, or after the iterator is closed, all calls in flight are cancelled.

            When the pool's block ends, or in `shutdown`, the remaining calls are sent, and their
            results can be taken after that. An input that has a length is taken whole. One without
            a length may be endless, and is left alone if results were read before, as of a stream,
            or if it has more than 100,000 items left or does not end within 10 seconds. So is a map
            with `buffersize`, or if the pool's `max_queued` tasks wait. Then reading on raises
            `RuntimeError`, with the reason, after the results of the calls that were sent. The time
            is looked at after each item, so an input that blocks, as a queue may, keeps the pool
            from ending if no result was read. Close the iterator if no more results are wanted.

        Raises
        ------
        TypeError
            If `fn` is not callable, or `seed` is no seed. With `resume`, if a later run would not
            find the calls of `fn` (a lambda or local class) again without `key`; for an item, when
            results are read.
        ValueError
            If a number is out of range. With `resume`, if `fn` has changed, the file is of another
            kind, or the pool is a served one.
        RuntimeError
            If the file of `resume` is in use.

        Examples
        --------
        >>> import itertools, polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     squares = pool.map(lambda n: n * n, itertools.count())
        ...     list(itertools.islice(squares, 4))
        [0, 1, 4, 9]
        """
        if timeout is not None:
            timeout = check_seconds("timeout", timeout)
        if chunksize is not None:
            chunksize = check_at_least("chunksize", chunksize, 1)
        if buffersize is not None:
            buffersize = check_at_least("buffersize", buffersize, 1)
        check_work(fn, iterables or ((),), {})
        dispatcher = self._dispatcher
        check_resume(resume, key, changed, keep, dispatcher.stores_results)
        dispatcher.check_open()
        task_options = self._task_options or dispatcher.task_options
        chosen = task_options.seed if seed is None else _checked(seed)
        dispatcher.warn_if_stale(fn)
        with dispatcher.calls():
            source = (
                Source(dispatcher, task_options, fn, iterables, chosen, chunksize)
                if resume is None
                else _resumed(
                    *(dispatcher, task_options, fn, iterables, chosen),
                    *(resume, key, changed, chunksize),
                )
            )
            bar = Progress(source.label, total_of(iterables)) if progress else None
            kind = Ordered if ordered else Unordered
            stream = kind(source, buffersize, timeout, bar, return_exceptions, self)
            results = start_map(stream)
            maps, number = self._maps, id(stream)
            maps[number] = ref(stream, lambda _: maps.pop(number, None))
        return results

    def dashboard(self, port: int = 0, *, host: str = "127.0.0.1") -> LivePage:
        """Serve a live page of this pool, from a thread of this process.

        The page has the timeline as it grows; for each drone its task, memory and processor time,
        its stack at a click, and buttons to interrupt and kill; the last failures; and ``/metrics``
        for Prometheus.

        Parameters
        ----------
        port
            Port to listen at. 0: a free one.
        host
            Address to listen at, and that of ``url``. What goes over the network is not encrypted,
            so other machines should come by a tunnel (``ssh -L``).

        Returns
        -------
        LivePage
            Has the ``url``, with a token that is the only key to the page, the ``read_only_url``,
            for those who may only look, and `close`; also a context manager. While one is open, the
            pool has no other, and this call returns it. It does not keep the pool: hold that in a
            variable.

        Raises
        ------
        ModuleNotFoundError
            If starlette or uvicorn is missing: ``pip install 'starlette>=0.37' 'uvicorn>=0.29'``.
        OSError
            If the port is in use.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool, pool.dashboard() as page:
        ...     page.url.startswith("http://127.0.0.1:")
        True
        """
        # Loaded by name: a layer above this one, which few programs need.
        package = import_module("polycephaly.integrations.dashboard")
        pool = self if self._original is None else self._original
        with _pages_lock:
            page = _pages.get(self._dispatcher)
            if page is None or page.closed:
                page = _pages[self._dispatcher] = package.Dashboard(pool, port, host)
        return page

    @overload
    def submit(
        self, fn: Callable[P, Coroutine[Any, Any, T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Promise[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Promise[T]: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Promise[Any]:
        """Run ``fn(*args, **kwargs)`` on a drone: the standard library's name for `promise`.

        As in the standard library, a program that ends without an error first finishes all tasks of
        a pool on which `submit` was called. Type checkers accept no promises and handles in place
        of arguments here, as they do for `promise`.
        """
        if not callable(fn):
            check_work(fn, args, kwargs)
        self._dispatcher.finishes_at_exit = True
        work: str | Callable[..., Any] = fn
        if self._task_options is not None:
            work, args = self._with_seed(fn, args)
        return self._dispatcher.submit(work, args, kwargs, None, self._task_options)

    def __enter__(self) -> Self:
        _pools.set((*_pools.get(), ref(self)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._leave(kind)
        except BaseException:  # Ctrl-C, or an error of an input
            self._dispatcher.finish(cancel=True)
            raise
        self._dispatcher.finish(cancel=kind is not None)

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self._leave(kind)
        except BaseException:
            await self._dispatcher.finish_async(cancel=True)
            raise
        await self._dispatcher.finish_async(cancel=kind is not None)

    def _send_maps(self) -> None:
        """Send the remaining calls of each `map`, as the standard library does at the call."""
        for each in list(self._maps.values()):
            if (stream := each()) is not None:
                stream.send_rest()

    def _leave(self, error: type[BaseException] | None) -> None:
        _pools.set(tuple(each for each in _pools.get() if each() is not self))
        if error is None:
            self._send_maps()


_pools: ContextVar[tuple[ref[ExecutorBase], ...]] = ContextVar("polycephaly pools", default=())
"""The pools whose ``with`` blocks enclose the running code, the innermost last, for this thread,
asyncio task or green thread. The references are weak, because copies of a context may live longer
than the block."""
# They belong to the parent of a forked child.
os.register_at_fork(after_in_child=lambda: _pools.set(()))


def innermost_pool() -> ExecutorBase | None:
    """Return the pool of the innermost ``with`` block, as needed by `flow`."""
    for each in reversed(_pools.get()):
        pool = each()
        if pool is not None:
            return pool
    return None


def _checked(seed: SeedLike) -> Seed:
    from .seed import Seed  # not with each pool: most need none

    return Seed(seed)


def _resumed(*args: Any) -> Source:
    from .resume import ResumedSource  # with SQLite, which other maps do not need

    return ResumedSource(*args)


def wait_for(promise: Promise[T]) -> T:
    try:
        return promise.result()
    except BaseException:
        __tracebackhide__ = True
        promise.cancel()  # has no effect, unless the wait itself was interrupted
        raise
    finally:
        del promise  # see `Promise.result`
