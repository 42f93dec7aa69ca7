"""A backend for joblib, and so for scikit-learn and all that is built on it.

    Parallel(...)(delayed(f)(x) for x in xs)
        │ batches of calls                                large arrays: into shared memory, once
        ▼                                                     ▼
    PolycephalyBackend.submit ──> pool.submit(run_batch, batch) ──> drone ──> callback ──> joblib dispatches the next

joblib asks for a backend instance for each `parallel_config`, or for each `Parallel` outside of
one. The instance has the pool: it is started by the first call of `Parallel`, used by all that come
under the same `parallel_config`, and ends with the last reference to the instance; outside of a
`parallel_config`, with the call. A pool that is used again takes a new snapshot first, if functions
of `__main__` could see there something else than sequential calls would.

**Threads of native libraries.** A drone is a fork, in which these libraries have been loaded, so
that environment variables come too late: their threads are limited by threadpoolctl, where it is
installed. GNU's OpenMP hangs in a fork of a process that has used it, as soon as it would use a
second thread; so in forked drones it has one.

This module has the name of the library, which inside it is the absolute import.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from mmap import mmap
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

from .drone.child import call_as_imported
from .pool.pool import Pool
from .promises.promise import Promise
from .store.shared import Contents
from .wire.pickling import ATOMS, MainSnapshot, main_namespace

try:
    import joblib
    from joblib._memmapping_reducer import reduce_array_memmap_backward
    from joblib._parallel_backends import (
        AutoBatchingMixin,
        FallbackToBackend,
        ParallelBackendBase,
        SequentialBackend,
    )

    if not hasattr(ParallelBackendBase, "submit"):
        raise ImportError(f"this is joblib {joblib.__version__}")
except ImportError as error:
    raise ImportError(
        "polycephaly.joblib needs joblib 1.5 or later: pip install 'polycephaly[joblib]'"
    ) from error

__all__ = ["PolycephalyBackend", "register"]

KEPT = 8
"""Arrays that stay in shared memory for the calls to come."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_OF_MEMMAPS = ("temp_folder", "mmap_mode", "verbose", "context", "prefer", "require")
"""What joblib tells every backend for the sake of its own ones."""


def register(*, make_default: bool = False) -> None:
    """Makes ``"polycephaly"`` a name of a backend; with `make_default`, the one that joblib uses.
    Twice is no error.

    >>> import joblib, polycephaly as poly
    >>> poly.joblib.register()
    >>> with joblib.parallel_config("polycephaly", n_jobs=2):
    ...     joblib.Parallel()(joblib.delayed(abs)(-i) for i in range(3))
    [0, 1, 2]
    """
    joblib.register_parallel_backend("polycephaly", PolycephalyBackend, make_default=make_default)


class PolycephalyBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """What joblib calls. Options of a `Pool` are those of the backend, and pass through:
    ``parallel_config("polycephaly", n_jobs=4, start="spawn", retries=1)``; those that are none
    raise `TypeError`.

    ``n_jobs=-1`` is as many drones as usable cores, -2 one less. ``inner_max_num_threads`` limits
    the threads of native libraries in each drone (else the cores are shared out). ``max_nbytes``
    (joblib's "1M"): an array of that size that several calls of one `Parallel` are given is copied
    once; a call may write into it, and no other sees that. None copies it for each call. A memory
    map of a file arrives as one: what is written there is in the file. `Parallel` in a drone uses
    threads, and sequential calls below these."""

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    verbose = 0

    MIN_IDEAL_BATCH_DURATION = 0.02  # seconds: a piece of work costs a pool little
    MAX_IDEAL_BATCH_DURATION = 0.5

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pool: Pool | None = None
        self._shape: dict[str, Any] = {}
        self._under_way: dict[Promise[Any], None] = {}  # in their order
        self._arrays = _Arrays(None)
        self._newest: Callable[[], Any] = lambda: None

    @property
    def parallel(self) -> Any:
        """The newest `Parallel`, to which joblib's `AutoBatchingMixin` reports: it asks for
        `verbose`, and prints.

        The reference is weak, since `Parallel` and backend would keep each other and the pool
        alive. An outer one that goes on after a newer one has gone reports to nothing, for which
        the backend stands with its ``verbose = 0``."""
        return self._newest() or self

    # -- a call of Parallel: its beginning and end -------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            # Its first words are those of joblib's own backends, which callers may look for.
            raise ValueError(
                "n_jobs == 0 in Parallel has no meaning: -1 is all usable cores, 1 none but this"
            )
        if n_jobs is None:
            return 1
        return n_jobs if n_jobs > 0 else max(joblib.cpu_count() + 1 + n_jobs, 1)

    def configure(
        self, n_jobs: int = 1, parallel: Any = None, max_nbytes: int | None = None, **options: Any
    ) -> int:
        n_jobs = self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        options = {**self.backend_kwargs, **options}
        shape = {
            "n_jobs": n_jobs,
            **{name: options[name] for name in options if name not in _OF_MEMMAPS},
        }
        if self._pool is not None and (
            shape != self._shape or self._pool._dispatcher.refusal is not None
        ):
            self._end()
        if self._pool is None:
            self._pool, self._shape = self._start(**shape), shape
        elif self._pool._dispatcher.config.start != "spawn" and _may_differ(
            self._pool._dispatcher.registry.snapshot
        ):
            self._pool.refresh()
        if parallel is not None:
            self._newest = weakref.ref(parallel)
        self._arrays = _Arrays(max_nbytes)
        return n_jobs

    def _start(
        self,
        n_jobs: int,
        env: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        **options: Any,
    ) -> Pool:
        limits: dict[str, str] = self._prepare_worker_env(n_jobs)
        threads = int(limits["OMP_NUM_THREADS"].partition(",")[0])
        if callable(env):
            own: Any = lambda index: {**limits, **env(index)}  # noqa: E731
        else:
            own = {**limits, **(env or {})}
        return Pool(
            n_jobs,
            env=own,
            initializer=_prepare,
            initargs=(threads, initializer, initargs),
            **options,
        )

    def _end(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def terminate(self) -> None:
        """The call is over, or the ``with Parallel(...)`` block."""
        self.reset_batch_stats()
        self._arrays = _Arrays(self._arrays.least)  # which an outer call goes on to use
        if joblib.parallel.get_active_backend()[0] is not self:
            self._end()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Withdraws what waits, and interrupts what runs. The pool goes on."""
        for each in reversed(
            list(self._under_way)
        ):  # a drone whose call ends by this would begin the next one
            each.cancel()

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, func: Any, callback: Callable[[Any], object] | None = None) -> Promise[Any]:
        promise: Promise[Any]
        try:
            assert self._pool is not None
            func.items = self._arrays.replaced(self._pool, func.items)
            promise = self._pool.submit(run_batch, func)
        except (
            Exception
        ) as error:  # joblib submits from callbacks too, where raising would tell nobody
            promise = Promise()
            promise.set_exception(error)
        self._under_way[promise] = None
        promise.add_done_callback(partial(self._under_way.pop, promise))
        if callback is not None:
            promise.add_done_callback(partial(self._go_on, callback))
        return promise

    def _go_on(self, callback: Any, promise: Promise[Any]) -> None:
        """Call joblib's callback, which dispatches the next calls. The caller of `Parallel` waits
        for these, so if the callback fails, the caller must be told: joblib raises there what a
        source of calls raises in any thread."""
        try:
            callback(promise)
        except Exception as error:
            self._newest = lambda: (
                None
            )  # because reporting may be what fails, and a dispatch reports as well
            source = _raising(error)
            while callback.parallel.dispatch_one_batch(
                source
            ):  # batches that were read before come first
                pass

    def retrieve_result_callback(self, out: Promise[Any]) -> Any:
        return out.result()


def _raising(error: Exception) -> Iterator[Call]:
    raise error
    yield


def _may_differ(snapshot: MainSnapshot) -> bool:
    """May what functions of `__main__` see there have changed? Names have, or one of these
    functions names a list, an array or the like: whether its content has changed could only be told
    by comparing all of it."""
    if not snapshot.is_current():
        return True
    main = main_namespace()
    codes: list[Any] = []
    for value in list(main.values()):
        for each in vars(value).values() if isinstance(value, type) else (value,):
            if isinstance(each, FunctionType) and each.__globals__ is main:
                codes.append(each.__code__)
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    return any(not isinstance(main[name], _STAYS_AS_IT_IS) for name in names if name in main)


_STAYS_AS_IT_IS = (ModuleType, FunctionType, BuiltinFunctionType, type, *ATOMS)


def run_batch(batch: Callable[[], Any]) -> Any:
    """In a drone."""
    return batch()


def _prepare(
    threads: int, initializer: Callable[..., object] | None, initargs: tuple[Any, ...]
) -> None:
    """Each drone's first work."""
    _limit_threads(threads)
    if initializer is not None:
        call_as_imported(initializer, *initargs)


def _limit_threads(threads: int) -> None:
    """Of native libraries that are loaded. Those that are loaded later look at the environment."""
    if "numpy" not in sys.modules:
        return
    try:
        import threadpoolctl
    except ImportError:
        return
    threadpoolctl.threadpool_limits({"openmp": 1, "blas": threads})


class _Mapped:
    """Stands for an array that is a memory map of a file, or a part of one, and is unpickled as the
    same map."""

    def __init__(self, array: Any) -> None:
        self._reduced = reduce_array_memmap_backward(array)

    def __reduce__(self) -> Any:
        return self._reduced


def _lies_in_a_file(array: Any) -> bool:
    numpy = sys.modules.get("numpy")
    while numpy is not None and isinstance(array, numpy.ndarray):
        if isinstance(array, numpy.memmap) and isinstance(array.base, mmap):
            return array.filename is not None
        array = array.base
    return False


class _Arrays:
    """The large arrays that calls of one `Parallel` are given, each in shared memory once: the last
    `KEPT` of them, and those no longer than the caller has them. As with joblib's own backends,
    what the caller writes into one during the call of `Parallel` is not seen, and memory maps of
    files arrive as such. Used under joblib's lock."""

    def __init__(self, least: int | None) -> None:
        self.least = least
        self._shared: dict[int, tuple[weakref.ref[Any], Contents]] = {}

    def replaced(self, pool: Pool, calls: list[Call]) -> list[Call]:
        kinds = {
            type(arg)
            for _, args, kwargs in calls
            for arg in (chain(args, kwargs.values()) if kwargs else args)
        }
        if not any(hasattr(kind, "nbytes") for kind in kinds):
            return calls
        return [
            (
                fn,
                tuple(self._stand_in(pool, arg) for arg in args),
                {name: self._stand_in(pool, arg) for name, arg in kwargs.items()},
            )
            for fn, args, kwargs in calls
        ]

    def _stand_in(self, pool: Pool, arg: Any) -> Any:
        if _lies_in_a_file(arg):
            return _Mapped(arg)
        size = getattr(arg, "nbytes", None)
        if (
            self.least is None
            or not isinstance(size, int)
            or size < self.least
            or not type(arg).__weakrefoffset__
        ):
            return arg
        key, shared = id(arg), self._shared
        known, contents = shared.pop(key, (None, None))
        if known is None or contents is None or known() is not arg:
            try:
                contents = Contents(pool.share(arg))
            except MemoryError:  # no room: it goes as any argument does
                return arg
            known = weakref.ref(arg, lambda _: shared.pop(key, None))
        shared[key] = known, contents
        if len(shared) > KEPT:
            shared.pop(next(iter(shared)), None)
        return contents
