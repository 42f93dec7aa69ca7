"""The private parts of CPython, cloudpickle, NumPy and Ray that this package uses.

`tests/test_compat.py` fails if one of them changes.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import sys
import tempfile
import threading
from _signal import getsignal as getsignal  # type: ignore[import-not-found]
from _signal import signal as signal  # `signal.signal` takes five times as long
from _thread import RLock
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType, FunctionType
from typing import Any

current_frames = sys._current_frames
"""The frame in which each native thread is, by its identity."""

get_frame = sys._getframe

_importlib: Any = importlib._bootstrap

TemporaryFile = tempfile._TemporaryFileWrapper

_FILE_NAME_INDEX = 10  # among the arguments of `CodeType`


def check_platform(*, any_unix: bool = False) -> None:
    """Raise `ImportError` if this is not CPython on Linux, or, with `any_unix`, on a Unix.

    Called by the packages that do not work elsewhere, before they import what is not there.
    """
    is_there = sys.platform == "linux" or (any_unix and hasattr(os, "register_at_fork"))
    if not is_there or sys.implementation.name != "cpython":
        raise ImportError(
            f"{'green threads' if any_unix else 'pools and drones'} of polycephaly need CPython on "
            f"{'Unix' if any_unix else 'Linux'}, and this is {sys.implementation.name} on "
            f"{sys.platform}: use a Linux machine or container (on Windows, WSL)"
        )


def run_exit_handlers() -> None:
    atexit._run_exitfuncs()


def clear_exit_handlers() -> None:
    """In any forked child: drop the exit handlers of the parent.

    The processes for which `multiprocessing`'s own exit handler waits are the parent's, too.
    """
    atexit._clear()
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process._children = set()
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        atexit.register(util._exit_function)


def reset_multiprocessing(name: str) -> None:
    """In a forked child that is to be called `name`: reset the state of `multiprocessing`."""
    process: Any = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().name = name
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()


@contextmanager
def importing_main() -> Iterator[None]:
    """Have `multiprocessing` refuse, with the reason, to start processes meanwhile."""
    from multiprocessing import process

    current: Any = process.current_process()
    current._inheriting = True
    try:
        yield
    finally:
        del current._inheriting


is_held_here: Callable[[RLock], bool] = RLock._is_owned  # type: ignore[attr-defined]
"""A method of `RLock`, in C: whether the calling thread holds the lock."""


def renew_in_child(lock: Any) -> None:
    """Make `lock`, a `threading.Lock`, free in each forked child, though a thread may hold it."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)


def forget_dummy_thread() -> None:
    """Remove the entry that `threading.current_thread` has made for the calling thread, which
    `threading` has not started, and which ends now.
    """
    if sys.version_info < (3, 13):  # later versions do so themselves
        active: dict[int, Any] = threading._active  # type: ignore[attr-defined]
        if isinstance(active.get(threading.get_ident()), threading._DummyThread):
            del active[threading.get_ident()]


def detach_log_handlers() -> list[object]:
    """Have `logging` forget all handlers, and return its references to them.

    `logging.config` and `logging.shutdown` would otherwise flush and close them.
    """
    module: Any = logging
    references = [module._handlerList[:], dict(module._handlers)]
    del module._handlerList[:]
    module._handlers.clear()
    return references


def end_profiler() -> None:
    """In a forked child: end the parent's profiler, which would slow the child and refuse another.

    Its samples here are nobody's. From Python 3.12 on, `cProfile` is the one tool of a process.
    """
    threading.setprofile(None)
    sys.setprofile(None)
    monitoring: Any = getattr(sys, "monitoring", None)
    tool = monitoring and monitoring.PROFILER_ID
    if not monitoring or monitoring.get_tool(tool) is None:
        return
    callback = monitoring.register_callback(tool, monitoring.events.PY_START, None)
    profiler: Any = getattr(callback, "__self__", None)
    c_profile: Any = sys.modules.get("_lsprof")
    if c_profile is not None and isinstance(profiler, c_profile.Profiler):
        profiler.disable()  # so that it knows: its own end, in this process, would fail
    else:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)


def count_sub_interpreters() -> int:
    """Return how many interpreters this process has beside the first one."""
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    try:
        return len(importlib.import_module(name).list_all()) - 1
    except ImportError:  # left out of a frozen program, so nothing there makes any
        return 0


def imports_elsewhere() -> list[str]:
    """Return the names of the modules that other threads import at this moment."""
    locks = [reference() for reference in list(_importlib._module_locks.values())]
    return [lock.name for lock in locks if lock and lock.owner not in (None, threading.get_ident())]


def end_imports_elsewhere() -> None:
    """In a forked child: forget what the parent's other threads were importing.

    The child has copies of their locks, but not the threads that would release them. A module that
    one of them had half imported is imported anew when it is needed.
    """
    for name in imports_elsewhere():
        if getattr(getattr(sys.modules.get(name), "__spec__", None), "_initializing", False):
            del sys.modules[name]
    _importlib._module_locks.clear()
    _importlib._blocking_on.clear()


def seed_numpy() -> None:
    """Seed NumPy's global generator anew, in a forked child."""
    mtrand: Any = sys.modules.get("numpy.random.mtrand")
    with suppress(AttributeError):  # half loaded: another thread of the parent was importing it
        lock = mtrand._rand._bit_generator.lock
        # If the lock is a copy of one that another thread held, seeding would wait for ever.
        if lock.acquire(blocking=False):
            lock.release()
            mtrand.seed()


def numba_threads() -> int:
    """Return how many threads Numba uses in parallel code; 0 if it is not imported."""
    numba: Any = sys.modules.get("numba")
    threads: int = getattr(getattr(numba, "config", None), "NUMBA_NUM_THREADS", 0)
    return threads


def set_numba_threads(threads: int) -> None:
    """In a zygote: set how many threads Numba uses in its forks.

    Numba's own function loads the library of its threads first, and GNU's OpenMP, if it is that,
    would end each fork that runs parallel code. As long as no code has done so, the number is set
    as Numba itself sets it by NUMBA_NUM_THREADS.
    """
    numba: Any = sys.modules["numba"]
    parallel: Any = sys.modules.get("numba.np.ufunc.parallel")
    if getattr(parallel, "_is_initialized", True):
        numba.set_num_threads(threads)
    else:
        numba.config.NUMBA_NUM_THREADS = parallel.NUM_THREADS = threads


def global_generators() -> list[object]:
    """Return the generators of the global functions of `random` and NumPy, where imported."""
    names = [("random", "_inst"), ("numpy.random.mtrand", "_rand")]
    return [getattr(sys.modules.get(module), name, None) for module, name in names]


def remote_traceback_type() -> type[Exception]:
    """Return the exception as which `concurrent.futures` shows the traceback of a worker."""
    from concurrent.futures import process

    return process._RemoteTraceback


def allows_input(read_line: object) -> bool:
    """Return whether `read_line`, the builtin `input`, asks in a notebook.

    A kernel replaces it while a cell runs, and refuses where there is no user, as in nbconvert.
    """
    kernel: Any = getattr(read_line, "__self__", None)
    return getattr(kernel, "_allow_stdin", False) is True


def kernel_allows_input() -> bool:
    """Return whether the last cell of this notebook could ask; False if this is no notebook."""
    module: Any = sys.modules.get("ipykernel.kernelapp")
    if module is None or not module.IPKernelApp.initialized():
        return False
    return getattr(module.IPKernelApp.instance().kernel, "_allow_stdin", False) is True


def class_setstate() -> Callable[[type, Any], type]:
    """Return the function with which cloudpickle fills a class that it has made."""
    from cloudpickle import cloudpickle

    setstate: Callable[[type, Any], type] = cloudpickle._class_setstate
    return setstate


def free_class_numbers_in_child() -> None:
    """Make the lock of cloudpickle's numbers free in each forked child: another thread may hold it
    at the fork, and the child would wait for ever with the first class that is sent by value.
    """
    from cloudpickle import cloudpickle

    renew_in_child(cloudpickle._DYNAMIC_CLASS_TRACKER_LOCK)


def class_number(made: object) -> str:
    """Return the text by which cloudpickle knows a class or type variable in all processes."""
    from cloudpickle import cloudpickle

    number: str = cloudpickle._get_or_create_tracker_id(made)
    return number


def class_of_number(number: str) -> Any:
    """Return what this process has of that number, or None."""
    from cloudpickle import cloudpickle

    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(number)


def number_class(number: str, made: Any) -> Any:
    """Give what was just made its number. Return it, or what another thread has made meanwhile."""
    from cloudpickle import cloudpickle

    return cloudpickle._lookup_class_or_track(number, made)


def function_setstate() -> Callable[[FunctionType, Any], object]:
    """Return the function with which cloudpickle fills a function that it has made."""
    from cloudpickle import cloudpickle

    setstate: Callable[[FunctionType, Any], object] = cloudpickle._function_setstate
    return setstate


def reduce_code(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a code object as cloudpickle does, with its file name.

    cloudpickle 3.1.3 leaves the name out, so that equal functions have equal pickles. Then the
    traceback of a function that was pickled by value has no source lines.
    """
    from cloudpickle import Pickler

    make, args = Pickler.dispatch_table[CodeType](code)
    # A new string, because a string that is shared with others of the function is pickled once.
    name = "".join(code.co_filename)
    return make, (*args[:_FILE_NAME_INDEX], name, *args[_FILE_NAME_INDEX + 1 :])


def disable_ray_auto_connect() -> None:
    """In an actor: have a call of Ray's API start no cluster."""
    from ray._private import auto_init_hook

    auto_init_hook.enable_auto_connect = False


def ray_session_dir() -> str | None:
    """Return the directory of this node's session, or None if this process is in none."""
    import ray

    node: Any = getattr(ray._private.worker, "_global_node", None)
    return None if node is None else str(node.get_session_dir_path())


def caller_stacklevel() -> int:
    """Return how many frames above the caller the first frame outside this package is.

    Where joblib has called this package, it is the first frame of code that is not installed, as
    joblib and all that is built on it are; joblib's caller if there is no such frame. From Python
    3.12 on, `skip_file_prefixes` of `warnings.warn` finds frames, but would have to know all that.
    """
    frame, level = _leave(get_frame(1), 1, _is_ours)
    if not _is_of_joblib(frame):
        return level
    frame, level = _leave(frame, level, _is_of_joblib)
    outer, level_of_outer = _leave(frame, level, _is_installed)
    return level if _is_installed(outer) else level_of_outer


def _leave(
    frame: FrameType, level: int, is_inside: Callable[[FrameType], bool]
) -> tuple[FrameType, int]:
    """Return the first frame from `frame` outward that is not inside, and its level."""
    while frame.f_back is not None and is_inside(frame):
        frame, level = frame.f_back, level + 1
    return frame, level


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_PACKAGE)


def _is_of_joblib(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("joblib.")


def _is_installed(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_LIBRARY) or "/site-packages/" in file or "/dist-packages/" in file


_PACKAGE = __name__.partition(".")[0] + "."
_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
