"""Calls with a seed, as a drone runs them.

    fn, (entropy, spawn_key) ── SeededFunction ──> a drone:  fn(*args), its generators seeded
    args, i ── a row of arguments, the index last ──┘

The index of a call is an argument of that call. So it goes wherever the call goes: into a chunk of
a `map`, to another drone after a death, into a second attempt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from ..runtime.coroutines import is_coroutine
from ..runtime.random_numbers import Entropy, SeededCall, seed_generators, seeded_call
from .code_strings import Code


class SeededFunction(partial[Any]):
    """`run_seeded` or `run_seeded_beside_others`, bound to a function or code string and a seed."""

    is_ours = True  # `args[0]` is the user's
    takes_index = True

    @property
    def work(self) -> str | Callable[..., Any]:
        work: str | Callable[..., Any] = self.args[0]
        return work


def run_seeded(
    work: str | Callable[..., Any],
    entropy: Entropy,
    spawn_key: tuple[int, ...],
    /,
    *row: Any,
    **kwargs: Any,
) -> Any:
    """Call `work`, or start its coroutine, with all generators seeded.

    The global ones stay so when this returns: see `random_numbers.give_back`.
    """
    *args, index = row
    seed_generators(entropy, spawn_key, index)
    call = SeededCall(entropy, (*spawn_key, index))
    token = seeded_call.set(call)
    try:
        value = (_code(work) if isinstance(work, str) else work)(*args, **kwargs)
    finally:
        seeded_call.reset(token)
    return _awaited(call, value) if is_coroutine(value) else value


async def run_seeded_beside_others(
    fn: Callable[..., Any],
    entropy: Entropy,
    spawn_key: tuple[int, ...],
    /,
    *row: Any,
    **kwargs: Any,
) -> Any:
    """Await a call of a coroutine function, one of several that a drone runs at once.

    They share the global generators, which so cannot be those of one call.
    """
    *args, index = row
    return await _awaited(SeededCall(entropy, (*spawn_key, index)), fn(*args, **kwargs))


async def _awaited(call: SeededCall, coro: Any) -> Any:
    token = seeded_call.set(call)
    try:
        return await coro
    finally:
        seeded_call.reset(token)


@lru_cache(maxsize=64)
def _code(source: str) -> Code:
    return Code(source.encode("utf-8", "surrogatepass"))
