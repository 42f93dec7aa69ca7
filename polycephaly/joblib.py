"""A backend for joblib, and so for scikit-learn and all that is built on joblib.

    Parallel(...)(delayed(f)(x) for x in xs)
        │ batches of calls              large arrays: into shared memory, once
        ▼                                   ▼
    PolycephalyBackend.submit ──> pool.submit(run_batch, batch) ──> drone ──> callback
                                  joblib dispatches the next batch <──────────────┘

joblib makes a backend instance for each `parallel_config`, or for each `Parallel` outside of one.
The instance owns the pool: see docs/decisions/0014-joblib-backend.md, also for the threads of
native libraries.

Inside this module, ``import joblib`` is an absolute import of the library with the same name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from .pool.pool import Pool, dispatcher_of
from .promises.promise import Promise
from .runtime.hidden import Hidden
from .store.shared import Shared
from .wire.main_names import ATOMIC_TYPES, MainSnapshot, global_names, main_namespace
from .wire.reducers import extra_reducers

try:
    import joblib
    from joblib._memmapping_reducer import _get_backing_memmap, reduce_array_memmap_backward
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
        "polycephaly.joblib needs joblib 1.5 or later: pip install 'joblib>=1.5'"
    ) from error

__all__ = ["PolycephalyBackend", "register"]

MAX_BATCHES = 8
"""Number of batches for which an array stays in shared memory that none of them uses."""

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

_MEMMAP_OPTIONS = ("temp_folder", "mmap_mode", "verbose", "context", "prefer", "require")
"""Options that joblib passes to every backend and that only its own backends use."""


def register(*, make_default: bool = False) -> None:
    """Register ``"polycephaly"`` as the name of a backend. A second call is no error.

    Parameters
    ----------
    make_default
        If True, joblib uses the backend by default.

    Examples
    --------
    >>> import joblib, polycephaly as poly
    >>> poly.joblib.register()
    >>> with joblib.parallel_config("polycephaly", n_jobs=2):
    ...     joblib.Parallel()(joblib.delayed(abs)(-i) for i in range(3))
    [0, 1, 2]
    """
    joblib.register_parallel_backend("polycephaly", PolycephalyBackend, make_default=make_default)


class PolycephalyBackend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """The backend, as called by joblib.

    Options of a `Pool` are options of the backend and are passed through:
    ``parallel_config("polycephaly", n_jobs=4, start="spawn", retries=1)``. Unknown options raise
    `TypeError`.

    Parameters
    ----------
    n_jobs
        Number of drones: -1 is the number of usable cores, -2 one less.
    inner_max_num_threads
        Maximum number of threads of native libraries in each drone. By default the cores are
        divided among the drones.
    max_nbytes
        An array of this size or more that several calls of one `Parallel` are given is copied
        once, also inside a data frame, a sparse matrix, a list or another object (joblib's default
        is "1M"). A call may write into the array, and no other call sees that. None: copy the array
        for each call. A memory map of a file arrives as a memory map, and writes to it go to the
        file.

    Notes
    -----
    `Parallel` in a drone uses threads; below these, calls are sequential.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True
    verbose = 0

    MIN_IDEAL_BATCH_DURATION = 0.02  # seconds, because a task costs a pool little
    MAX_IDEAL_BATCH_DURATION = 0.5

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._pool: Pool | None = None
        self._pool_options: dict[str, Any] = {}
        self._under_way: dict[Promise[Any], None] = {}  # in the order of submission
        self._arrays = _SharedArrays(None, None)
        self._newest_parallel: Callable[[], Any] = lambda: None

    @property
    def parallel(self) -> Any:
        """The newest `Parallel`, to which joblib's `AutoBatchingMixin` reports: the mixin reads
        `verbose` and prints.

        The reference is weak, because `Parallel` and the backend would otherwise keep each other
        and the pool alive. If an outer `Parallel` continues after a newer one is gone, the backend
        takes the place of the receiver, with its ``verbose = 0``.
        """
        return self._newest_parallel() or self

    # -- begin and end of a call of Parallel -------------------------------------------------------

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            # The message begins as joblib's own backends' does, because callers may check for that.
            raise ValueError(
                "n_jobs == 0 in Parallel has no meaning: n_jobs=-1 uses all usable cores, "
                "n_jobs=1 uses this process only"
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
        options = {"n_jobs": n_jobs, **self.backend_kwargs, **options}
        options["env"] = Hidden(options.get("env"))  # drones inherit this frame
        pool_options = {name: options[name] for name in options if name not in _MEMMAP_OPTIONS}
        if self._pool is not None and (
            pool_options != self._pool_options or dispatcher_of(self._pool).refusal is not None
        ):
            self._end_pool()
        if self._pool is None:
            self._pool, self._pool_options = self._start_pool(**pool_options), pool_options
        elif dispatcher_of(self._pool).config.start != "spawn" and _may_have_changed(
            dispatcher_of(self._pool).registry.snapshot
        ):
            self._pool.refresh()
        if parallel is not None:
            self._newest_parallel = weakref.ref(parallel)
        self._arrays = _SharedArrays(self._pool, max_nbytes)
        return n_jobs

    def _start_pool(self, n_jobs: int, env: Hidden[Any], **options: Any) -> Pool:
        # As variables that the user has set: joblib's rule says which of them stay.
        limits = {} if "native_threads" in options else self._prepare_worker_env(n_jobs)

        def drone_env(index: int) -> dict[str, str]:
            own = env.value
            return {**limits, **(own(index) if callable(own) else own or {})}

        return Pool(n_jobs, env=drone_env, **options)

    def _end_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def terminate(self) -> None:
        """End the call of `Parallel`, or the ``with Parallel(...)`` block."""
        self.reset_batch_stats()
        if joblib.parallel.get_active_backend()[0] is not self:
            self._end_pool()
        # A fresh object, because an outer call continues to use `_arrays`.
        self._arrays = _SharedArrays(self._pool, self._arrays.min_bytes)

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """Withdraw the waiting batches and interrupt the running ones. The pool continues."""
        # The last one first: a drone whose task ends by this would begin the next one.
        for each in reversed(list(self._under_way)):
            each.cancel()

    # -- calls -------------------------------------------------------------------------------------

    def submit(self, func: Any, callback: Callable[[Any], object] | None = None) -> Promise[Any]:
        promise: Promise[Any]
        try:
            promise = self._arrays.submit(func)
        # joblib submits from callbacks too, and no caller would see an error that is raised there.
        except Exception as error:
            promise = Promise()
            promise.set_exception(error)
        self._under_way[promise] = None
        promise.add_done_callback(partial(self._under_way.pop, promise))
        if callback is not None:
            promise.add_done_callback(partial(self._dispatch_next, callback))
        return promise

    def _dispatch_next(self, callback: Any, promise: Promise[Any]) -> None:
        """Call joblib's callback, which dispatches the next calls.

        The caller of `Parallel` waits for these. So if the callback fails, the caller must get the
        error: joblib raises an error of the source of calls, from any thread, in the caller.
        """
        try:
            callback(promise)
        except Exception as error:
            # Reporting may be the part that fails, and a dispatch reports as well.
            self._newest_parallel = lambda: None
            source = _calls_that_raise(error)
            # Batches that were read before come first.
            while callback.parallel.dispatch_one_batch(source):
                pass

    def retrieve_result_callback(self, out: Promise[Any]) -> Any:
        return out.result()


def _calls_that_raise(error: Exception) -> Iterator[Call]:
    raise error
    yield


def _may_have_changed(snapshot: MainSnapshot) -> bool:
    """Return whether names that functions of `__main__` use may have changed since `snapshot`.

    True if names have changed, or if one of these functions names a list, an array or the like.
    Changes inside such an object could only be found by comparing all of its content.
    """
    if not snapshot.is_current():
        return True
    main = main_namespace()
    names: set[str] = set()
    for value in list(main.values()):
        for each in vars(value).values() if isinstance(value, type) else (value,):
            if isinstance(each, FunctionType) and each.__globals__ is main:
                names.update(global_names(each.__code__))
    return any(not isinstance(main[name], _IMMUTABLE_TYPES) for name in names if name in main)


_IMMUTABLE_TYPES = (ModuleType, FunctionType, BuiltinFunctionType, type, *ATOMIC_TYPES)


def run_batch(batch: Callable[[], Any]) -> Any:
    """Run a batch of calls, in a drone."""
    return batch()


class _SharedArrays:
    """The large arrays in the calls of one `Parallel`, each in shared memory once.

    A table of reducers by type: wherever an array stands in a call (in a data frame, a list, an
    estimator), its place in shared memory is pickled instead. Holds the arrays of the last
    `MAX_BATCHES` batches, and each only as long as the caller has the array. As with joblib's own
    backends, the drones do not see the caller's writes into an array during the call of `Parallel`,
    and memory maps of files arrive as memory maps. Used under joblib's lock.
    """

    def __init__(self, pool: Pool | None, min_bytes: int | None) -> None:
        self._pool = pool
        self.min_bytes = min_bytes
        self._batch = 0
        # By `id`, those that were used last at the end, each with the number of its last batch.
        self._shared: dict[int, tuple[weakref.ref[Any], Shared[Any], int]] = {}

    def submit(self, batch: Any) -> Promise[Any]:
        assert self._pool is not None
        self._batch += 1
        with extra_reducers(self):
            promise = self._pool.submit(run_batch, batch)
        for key in list(self._shared):
            _, _, last_batch = self._shared.get(key, (None, None, 0))
            if last_batch > self._batch - MAX_BATCHES:
                break
            self._shared.pop(key, None)
        return promise

    def __getitem__(self, kind: type) -> Callable[[Any], Any]:
        if hasattr(kind, "nbytes") and kind.__weakrefoffset__:
            return self._reduce
        raise KeyError(kind)

    def _reduce(self, array: Any) -> Any:
        if getattr(_get_backing_memmap(array), "filename", None) is not None:
            return reduce_array_memmap_backward(array)
        return (self._find_or_share(array) or array).__reduce_ex__(5)

    def _find_or_share(self, array: Any) -> Shared[Any] | None:
        size = array.nbytes
        if (
            self.min_bytes is None
            or not isinstance(size, int)
            or size < self.min_bytes
            # Its objects may refer to what is pickled around it.
            or getattr(getattr(array, "dtype", None), "hasobject", False)
        ):
            return None
        assert self._pool is not None
        key, shared = id(array), self._shared
        reference, handle, _ = shared.pop(key, (None, None, 0))
        if reference is None or handle is None or reference() is not array:
            try:
                with extra_reducers(None):
                    handle = self._pool.share(array)
            except MemoryError:  # no room: the array is passed as any argument
                return None
            reference = weakref.ref(array, lambda _: shared.pop(key, None))
        shared[key] = reference, handle, self._batch
        return handle
