"""What tests give to drones as work, where it matters little what that is. What goes wrong is in
`faults.py`, what runs in green threads in `greens.py`."""

from __future__ import annotations

import gc
import time
from typing import Any


def echo(value: Any) -> Any:
    return value


def arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def double(x: Any) -> Any:
    return 2 * x


def invert(x: float) -> float:
    return 1 / x


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def fail(text: object) -> None:
    raise ValueError(text)


def fail_with(item: object) -> None:
    raise KeyError("no")


def loaded_functions() -> int:
    """How many functions this drone has, its own and those of clients."""
    gc.collect()
    return sum(type(each).__qualname__ == "LoadedFunction" for each in gc.get_objects())
