"""Random numbers that can be repeated: call i of a seed draws the same ones wherever it runs.

    (entropy, spawn_key), i ── as SeedSequence(entropy, spawn_key=(*spawn_key, i)) ──┐
                                                                                     │
      the global generators of `random`, NumPy and torch, where imported  <── words ─┤
      `rng()` in the call  <── NumPy's own SeedSequence of the same numbers ─────────┘

Of the words, `random` gets the first four, NumPy the next four and torch the last two. They are
computed here, because a program that draws with `random` alone need not have NumPy, and gets the
same numbers where it has. NumPy promises that its algorithm, by M. E. O'Neill ("Developing a
seed_seq alternative", 2015), never changes.

The global generators belong to the program: what they were before is put back by `give_back`, not
after each call, which would take several times as long as to seed them, but before anything else
runs.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.random import Generator

_WORD = 0xFFFFFFFF
_INIT_A, _MULT_A = 0x43B0D7E5, 0x931E8875
_INIT_B, _MULT_B = 0x8B51F9DD, 0x58F38DED
_MIX_LEFT, _MIX_RIGHT = 0xCA01F9DD, 0x4973F715
POOL_SIZE = 4
"""Words of the pool of a `SeedSequence`, by default."""
_STATE_WORDS = 10

Entropy = int | tuple[int, ...]


def state_words(entropy: Entropy, spawn_key: tuple[int, ...], index: int) -> list[int]:
    """Return ``SeedSequence(entropy, spawn_key=(*spawn_key, index)).generate_state(10)``."""
    absorbed, factor = _absorbed(entropy, spawn_key)
    pool = list(absorbed)
    for word in _words(index):
        factor = _absorb(pool, word, factor)
    words = []
    factor = _INIT_B
    for i in range(_STATE_WORDS):
        word = pool[i % POOL_SIZE] ^ factor
        factor = factor * _MULT_B & _WORD
        word = word * factor & _WORD
        words.append(word ^ word >> 16)
    return words


@lru_cache(maxsize=64)
def _absorbed(entropy: Entropy, spawn_key: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Return the pool and the factor after all numbers but the index, which comes last."""
    words = [*_words(entropy)]
    words += [0] * (POOL_SIZE - len(words))
    pool, factor = [], _INIT_A
    for word in words[:POOL_SIZE]:
        mixed, factor = _hash(word, factor)
        pool.append(mixed)
    for source in range(POOL_SIZE):
        for target in range(POOL_SIZE):
            if source != target:
                mixed, factor = _hash(pool[source], factor)
                pool[target] = _mix(pool[target], mixed)
    for word in (*words[POOL_SIZE:], *_words(spawn_key)):
        factor = _absorb(pool, word, factor)
    return tuple(pool), factor


def _absorb(pool: list[int], word: int, factor: int) -> int:
    for target in range(POOL_SIZE):
        mixed, factor = _hash(word, factor)
        pool[target] = _mix(pool[target], mixed)
    return factor


def _hash(word: int, factor: int) -> tuple[int, int]:
    word ^= factor
    factor = factor * _MULT_A & _WORD
    word = word * factor & _WORD
    return word ^ word >> 16, factor


def _mix(left: int, right: int) -> int:
    mixed = _MIX_LEFT * left - _MIX_RIGHT * right & _WORD
    return mixed ^ mixed >> 16


def _words(number: Entropy) -> Iterator[int]:
    """Yield 32 bits at a time, the lowest first; of a tuple, those of its numbers in order."""
    if isinstance(number, tuple):
        for each in number:
            yield from _words(each)
        return
    yield number & _WORD
    while number := number >> 32:
        yield number & _WORD


# -- the global generators -------------------------------------------------------------------------

displaced: dict[int, dict[str, Callable[[], object]]] = {}
"""By thread: what puts the generators back that its seeded calls have changed.

A drone has one such thread. Those of inline pools may run within a call of another one.
"""


def seed_generators(entropy: Entropy, spawn_key: tuple[int, ...], index: int) -> None:
    """Seed the global generators of this process for one call."""
    import random

    words = state_words(entropy, spawn_key, index)
    changed = displaced.setdefault(get_ident(), {})
    if "random" not in changed:
        changed["random"] = _later(random.setstate, random.getstate())
    random.seed(_joined(words[:4]))
    # Half loaded, if another thread is importing it: then there is nothing to seed yet.
    with suppress(AttributeError):
        if (numpy := sys.modules.get("numpy.random.mtrand")) is not None:
            if "numpy" not in changed:
                changed["numpy"] = _later(numpy.set_state, numpy.get_state(legacy=False))
            numpy.seed(words[4:8])
    with suppress(AttributeError):
        if (torch := sys.modules.get("torch")) is not None:
            generator = torch.default_generator
            if "torch" not in changed:
                changed["torch"] = _later(generator.set_state, generator.get_state())
            generator.manual_seed(_joined(words[8:]))


def give_back() -> None:
    """Put the generators back that the seeded calls of this thread have changed."""
    for put_back in displaced.pop(get_ident(), {}).values():
        put_back()


def _later(put_back: Callable[[Any], object], state: Any) -> Callable[[], object]:
    return lambda: put_back(state)


def _joined(words: list[int]) -> int:
    return sum(word << 32 * i for i, word in enumerate(words))


# -- the generator of a call -----------------------------------------------------------------------


class SeededCall:
    """A call with a seed, while it runs. Its generator is made when it is first asked for."""

    __slots__ = ("_entropy", "_generator", "_spawn_key")

    def __init__(self, entropy: Entropy, spawn_key: tuple[int, ...]) -> None:
        self._entropy, self._spawn_key = entropy, spawn_key
        self._generator: Generator | None = None

    def generator(self) -> Generator:
        if self._generator is None:
            numpy = _numpy_random()
            sequence = numpy.SeedSequence(self._entropy, spawn_key=self._spawn_key)
            self._generator = numpy.default_rng(sequence)
        assert self._generator is not None
        return self._generator


seeded_call: ContextVar[SeededCall | None] = ContextVar("polycephaly seeded call", default=None)
"""The seeded call that runs in this thread or green thread."""


def rng() -> Generator:
    """Return a generator of random numbers for the task that calls this.

    In a call with a seed (``pool.map(fn, items, seed=42)``, or `options` with ``seed=42``), it is
    the generator of that call: ``numpy.random.default_rng(SeedSequence(42, spawn_key=(i,)))`` for
    call i, and the same object whenever that call asks again. So a call draws the same numbers
    wherever, whenever and however often it runs. Elsewhere, it is a new generator of fresh entropy.

    Returns
    -------
    numpy.random.Generator
        Belongs to the call. A thread that the call starts gets a generator of fresh entropy here:
        give it one of ``rng().spawn(n)``. Green threads of the call share its generator.

    Raises
    ------
    ModuleNotFoundError
        If NumPy is missing: ``pip install 'numpy>=1.26'``.

    Notes
    -----
    Any thread may call this. The idea is that of ``future.seed=TRUE`` in R's package *future*: a
    stream of random numbers belongs to an item, not to a process. The streams are those of NumPy's
    ``SeedSequence.spawn``.

    Examples
    --------
    >>> import polycephaly as poly
    >>> def throw(_):
    ...     return int(poly.rng().integers(1, 7))
    >>> with poly.Pool(2) as pool:
    ...     first = list(pool.map(throw, range(5), seed=42))
    >>> with poly.Pool(1) as pool:
    ...     first == list(pool.map(throw, range(5), seed=42))
    True
    """
    call = seeded_call.get()
    if call is not None:
        return call.generator()
    generator: Generator = _numpy_random().default_rng()
    return generator


def _numpy_random() -> Any:
    try:
        import numpy.random
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "polycephaly.rng() gives a numpy.random.Generator, and NumPy is missing: "
            "pip install 'numpy>=1.26' (or draw with the functions of `random`, which seed= seeds "
            "too)",
            name=error.name,
        ) from error
    return numpy.random
