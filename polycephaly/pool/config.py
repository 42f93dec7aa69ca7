"""The configuration of pools and tasks, and its checks.

Wrong input is refused at the call, with an error that gives the value and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import type_with_article
from ..runtime.checks import (
    brief,
    check_at_least,
    check_bytes,
    check_positive_seconds,
    check_seconds,
    check_whole,
)
from ..runtime.hidden import Hidden
from ..wire.output import Line, forward
from .interfaces import TaskOptions

if TYPE_CHECKING:
    from .retry import Retry

START_METHODS = ("fork", "spawn")
MIN_HANG_TIMEOUT_SECONDS = 0.5
MIN_MAX_MEMORY_BYTES = 1 << 20  # a smaller limit is a mistake
MAX_PRIORITY = 1 << 30  # fits the message of a client


class PoolConfig(NamedTuple):
    """The configuration of a pool or a lone drone, from the arguments of `Pool` or `Drone`."""

    size: int  # at the start: see `Pool.resize`
    name: str
    drone_name: Callable[[int], str]
    start: str | None  # None: fork if that is safe
    env: tuple[Hidden[dict[str, str]], ...]  # of the first `size` drones, by index
    cwd: str | None
    initializer: Callable[..., object] | None
    initargs: Hidden[tuple[Any, ...]]
    output: Callable[[Line], object] | None
    width: int
    task_options: TaskOptions
    max_memory: int | None  # bytes
    hang_timeout: float | None
    report_waiting: float | None  # seconds
    on_death: str  # "replace", "break" (the standard library's rule) or "end" (a lone drone)
    max_tasks: int | None = None
    max_queued: int | None = None
    post_mortem: bool = False
    fresh: bool = False  # the first call after the pool was idle takes a new snapshot
    describe_items: bool = True  # the errors of a `map` have the `repr` of its items
    resources: tuple[tuple[str, int], ...] = ()  # names and sizes
    native_threads: int | None = None  # None: the usable cores are shared out


def check_work(work: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if callable(work):
        return
    if not isinstance(work, str):
        raise TypeError(
            f"work is a code string, a callable or a coroutine function, not {brief(work)}: give "
            "the function and its arguments, promise(f, x), and not what it returns, promise(f(x))"
        )
    if args or kwargs:
        raise TypeError("a code string takes no arguments: push them, or use a callable")


def check_start(start: str | None) -> str | None:
    if start is not None and start not in START_METHODS:
        raise ValueError(
            f"unknown start method {start!r}: use one of {', '.join(map(repr, START_METHODS))}"
        )
    return start


def check_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    return None if timeout is None else check_positive_seconds(name, timeout)


def check_hang_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    seconds = check_seconds("hang_timeout", timeout)
    if seconds < MIN_HANG_TIMEOUT_SECONDS:
        raise ValueError(
            f"hang_timeout must be at least {MIN_HANG_TIMEOUT_SECONDS} seconds, not {timeout!r}, "
            "because a drone, which is asked for a sign of life four times in it, may be slow"
        )
    return seconds


def check_retries(retries: int | Retry) -> int | Retry:
    if not hasattr(type(retries), "__index__"):
        from .retry import Retry  # not with each pool: dataclasses take milliseconds to import

        if isinstance(retries, Retry):
            return retries
        raise TypeError(f"retries is a whole number or a polycephaly.Retry, not {retries!r}")
    return check_at_least("retries", retries, 0)


def check_priority(priority: int) -> int:
    priority = check_whole(priority, "priority is a whole number (a larger one comes first)")
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(
            f"priority must be between {-MAX_PRIORITY} and {MAX_PRIORITY}, not {priority}"
        )
    return priority


def check_resources(resources: Mapping[str, int] | None) -> tuple[tuple[str, int], ...]:
    """Return names and amounts, sorted by name."""
    if resources is None:
        return ()
    if not isinstance(resources, Mapping) or not all(isinstance(name, str) for name in resources):
        raise TypeError(
            f"resources maps names to whole numbers, as in {{'db': 2}}, not {resources!r}"
        )
    return tuple(
        (name, check_at_least(f"resources[{name!r}]", resources[name], 1))
        for name in sorted(resources)
    )


def check_needs(
    resources: Mapping[str, int], sizes: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """Return what a task needs, sorted by name, if a pool with these `sizes` ever has so much."""
    needs = check_resources(resources)
    for name, amount in needs:
        if name not in sizes:
            known = f"has {', '.join(map(repr, sizes))}" if sizes else "has none"
            raise ValueError(
                f"there is no resource {name!r} here: the pool {known}. A local pool has what its "
                f"maker gives it, as in Pool(resources={{{name!r}: {amount}}})"
            )
        if amount > sizes[name]:
            raise ValueError(
                f"a task that needs {amount} of the resource {name!r} would never run: the pool "
                f"has {sizes[name]}"
            )
    return needs


def check_fresh(fresh: bool, start: str | None, engine: str) -> bool:
    if fresh and (start == "spawn" or engine == "ray"):
        how = f"engine={engine!r}" if engine == "ray" else f"start={start!r}"
        raise ValueError(
            f"fresh=True takes snapshots by forks of this process, and drones of {how} are none"
        )
    return bool(fresh)


def check_names(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a mapping of names of a drone's namespace."""
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise TypeError(f"a name in a drone's namespace is a string, not {wrong[0]!r}")
    return dict(names)


def check_native_threads(threads: int | None, engine: str) -> int | None:
    if threads is None:
        return None
    if engine != "local":
        raise ValueError(
            "native_threads limits the native libraries of drones that are processes of this "
            f"machine, for which the engine is 'local', not {engine!r}. (Ray gives each of its "
            "workers OMP_NUM_THREADS, by num_cpus.)"
        )
    return check_at_least("native_threads", threads, 0)


def check_memory(limit: int | str | None) -> int | None:
    if limit is None:
        return None
    limit = check_bytes("max_memory", limit)
    if limit < MIN_MAX_MEMORY_BYTES:
        raise ValueError(f"max_memory must be at least {MIN_MAX_MEMORY_BYTES:,} bytes, not {limit}")
    return limit


def check_cwd(cwd: str | os.PathLike[str] | None) -> str | None:
    if cwd is None:
        return None
    path = cwd.__fspath__() if isinstance(cwd, os.PathLike) else cwd
    if not isinstance(path, str):
        raise TypeError(f"cwd is a str or a pathlib.Path, not {cwd!r}")
    if not os.path.isdir(path):
        kind = NotADirectoryError if os.path.exists(path) else FileNotFoundError
        raise kind(f"cwd={path!r} is not a directory")
    return os.path.abspath(path)


def check_env(env: Any, size: int, first: int = 0) -> tuple[Hidden[dict[str, str]], ...]:
    """Return the environments of the drones with the indices from `first` to ``size - 1``.

    A callable `env` is called now, because replacements are started where no code of users may
    run.
    """
    if env is None or isinstance(env, Mapping):
        return (Hidden(_check_variables("env", env or {})),) * (size - first)
    if not callable(env):
        raise TypeError(f"env is a mapping, or a callable from a drone's index to one, not {env!r}")
    environments = []
    for index in range(first, size):
        one = env(index)
        if not isinstance(one, Mapping):
            raise TypeError(
                f"env({index}) returned {one!r}, not a mapping of variables for that drone"
            )
        environments.append(Hidden(_check_variables(f"env({index})", one)))
    return tuple(environments)


def _check_variables(env: str, variables: Mapping[Any, Any]) -> dict[str, str]:
    """Return the `variables` of an environment that errors call `env`, if a process can have them.

    Errors show no values, which may be secret.
    """
    for name, value in variables.items():
        if not isinstance(name, str):
            raise TypeError(f"{env} has the name {name!r}: names of variables are str")
        if not isinstance(value, str):
            raise TypeError(
                f"{env}[{name!r}] is {type_with_article(value)}, and values of environment "
                f"variables are str: use {{{name!r}: str(...)}}, or leave the variable out"
            )
        if not name or "=" in name or "\0" in name:
            raise ValueError(
                f"{env} has the name {name!r}: names of variables have at least one character, and "
                "no = or NUL"
            )
        if "\0" in value:
            raise ValueError(f"{env}[{name!r}] has a NUL, where the system ends the value")
        try:
            os.fsencode(name + value)
        except UnicodeEncodeError as error:
            raise ValueError(f"{env}[{name!r}] cannot be encoded: {error.reason}") from None
    return dict(variables)


def check_initializer(initializer: Any) -> Any:
    if initializer is not None and not callable(initializer):
        raise TypeError(f"initializer must be a callable, not {initializer!r}")
    return initializer


def check_output(output: Any) -> Callable[[Line], object] | None:
    if output == "forward":
        return forward
    if output == "discard":
        return None
    if callable(output):
        return output  # type: ignore[no-any-return]
    raise ValueError(f"output is 'forward', 'discard' or a callable, not {output!r}")


def check_resume(resume: Any, key: Any, changed: Any, keep: Any, stores_results: bool) -> None:
    """Check the options of a `map` that can be resumed. `stores_results`: the pool can do so."""
    if resume is None:
        if keep:
            raise TypeError(
                "map has no keep=True: use [pool.promise(fn, item, keep=True) for item in items]"
            )
        if key is not None or changed != "refuse":
            raise ValueError("key= and changed= of map are for a map with resume=")
        return
    if not isinstance(resume, (str, os.PathLike)):
        raise TypeError(f"resume is the path of a file, not {resume!r}")
    if keep:
        raise ValueError("keep=True leaves results in drones, and resume= stores them in a file")
    if key is not None and not callable(key):
        raise TypeError(f"key is a function from an item to a string, not {key!r}")
    if changed not in ("refuse", "again", "keep"):
        raise ValueError(f"changed is 'refuse', 'again' or 'keep', not {changed!r}")
    if not stores_results:
        raise ValueError(
            "a map of a served pool cannot be resumed yet: use resume= with a pool of this process"
        )


def check_keep(keep: Any, work: object = None) -> bool:
    """Return `keep`. Raise `TypeError` if it is no boolean, or if a False is probably meant for
    `work`, which has a parameter of this name.
    """
    is_for_work = keep is False and callable(work) and _has_parameter(work, "keep")
    if is_for_work or not isinstance(keep, bool):
        raise TypeError(
            f"keep is True or False, not {keep!r} (True: the value stays in its drone); pass an "
            "argument of this name to the function by functools.partial"
        )
    return keep


def _has_parameter(fn: Callable[..., object], name: str) -> bool:
    from inspect import signature

    try:
        return name in signature(fn).parameters
    except (TypeError, ValueError):  # a function of C that does not tell
        return False
