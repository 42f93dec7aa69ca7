"""Errors that name the cure where a name of another library was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

OPTIONS_HERE = {
    **dict.fromkeys(
        ("max_workers", "n", "n_jobs", "n_workers", "num_workers", "processes", "size", "workers"),
        "`drones`: Pool(4)",
    ),
    **dict.fromkeys(("context", "mp_context", "start_method"), "`start`: None, 'fork' or 'spawn'"),
    **dict.fromkeys(
        ("max_calls", "max_tasks_per_child", "maxtasksperchild", "worker_lifespan"),
        "`max_tasks`, of a Pool",
    ),
    "max_concurrency": "`width`",
    "memory_limit": "`max_memory`",
    **dict.fromkeys(("max_retries", "retry"), "`retries`"),
    **dict.fromkeys(("task_timeout", "time_limit"), "`timeout`"),
    "thread_name_prefix": "`name`",
}
"""Options of other libraries, and their names here."""

OPTIONS_OF_TASKS = ("timeout", "retries", "priority", "resources", "seed")

POOL_METHODS_HERE = {
    "apply": "doit(f, *args)",
    "apply_async": "promise(f, *args)",
    "map_async": "map(f, items)",
    "imap": "map(f, items)",
    "imap_unordered": "map(f, items, ordered=False)",
    "starmap": "map(f, *zip(*rows))",
    "starmap_async": "map(f, *zip(*rows))",
    "close": "shutdown()",
    "join": "shutdown()",
    "terminate": "terminate_workers() or kill_workers()",
}
"""Methods of `multiprocessing.pool.Pool`, and what to use here."""

RESULTS_NAMES = ("get", "join", "result", "results", "value", "values", "wait")
"""What the results of a `map` have in other libraries."""
TAKE_ALL = "it is an iterator over the values, which gives all of them by list(results)"


def cures_of(options: Iterable[str]) -> list[str]:
    return [
        f"instead of {each}, use {OPTIONS_HERE[each]}" for each in options if each in OPTIONS_HERE
    ]


def tells_options(cure: str = "") -> Callable[[F], F]:
    """Let a method refuse keyword arguments that it does not have, with the cure."""

    def decorate(fn: F) -> F:
        known = fn.__kwdefaults__ or {}

        @wraps(fn)
        def checked(*args: Any, **options: Any) -> Any:
            unexpected = [name for name in options if name not in known]
            if unexpected:
                if unexpected[0] in OPTIONS_OF_TASKS:
                    cures = f"use pool.options({unexpected[0]}=...)"
                else:
                    cures = cure or "; ".join(cures_of(unexpected)) or f"it has {', '.join(known)}"
                raise TypeError(
                    f"{fn.__name__}() got an unexpected keyword argument {unexpected[0]!r}: {cures}"
                )
            return fn(*args, **options)

        return checked  # type: ignore[return-value]

    return decorate
