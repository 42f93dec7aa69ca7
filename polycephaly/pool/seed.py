"""`Seed`: what `seed=` gives, and the numbers of the calls that are made with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

from ..errors import type_with_article
from ..runtime.checks import check_whole
from ..runtime.coroutines import is_coroutine_function
from ..runtime.random_numbers import POOL_SIZE, Entropy
from ..wire.seeding import SeededFunction, run_seeded, run_seeded_beside_others

if TYPE_CHECKING:
    from numpy.random import SeedSequence

    SeedLike: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | SeedSequence
    """What users give as a seed."""

_WHAT = "seed is a whole number, a sequence of them, or a numpy.random.SeedSequence"


class Seed:
    """A seed that was checked, and the number of the next call that is made with it alone.

    Any thread may use it. Two threads that submit at once get two numbers, in either order.
    """

    def __init__(self, seed: SeedLike) -> None:
        self._entropy, self._spawn_key = check_seed(seed)
        self._numbers = itertools.count()
        # The last function that was submitted, so that one that is submitted often is sent once.
        self._last: SeededFunction | None = None

    def bind(self, work: str | Callable[..., Any], width: int) -> SeededFunction:
        """Return `work` as a function that takes the index of the call after its arguments.

        A drone runs `width` calls at once, if they are of a coroutine function.
        """
        beside_others = width > 1 and is_coroutine_function(work)
        run = run_seeded_beside_others if beside_others else run_seeded
        return SeededFunction(run, work, self._entropy, self._spawn_key)

    def next_call(
        self, work: str | Callable[..., Any], args: tuple[Any, ...], width: int
    ) -> tuple[SeededFunction, tuple[Any, ...]]:
        """Return `work` and `args` as those of the next call."""
        last = self._last
        if last is None or last.work is not work:
            last = self._last = self.bind(work, width)
        return last, (*args, next(self._numbers))


def check_seed(seed: Any) -> tuple[Entropy, tuple[int, ...]]:
    """Return the entropy and the spawn key of a `SeedSequence` of this seed."""
    if hasattr(seed, "spawn_key"):
        if seed.pool_size != POOL_SIZE:
            raise ValueError(
                f"seed has pool_size={seed.pool_size}, and streams are made with {POOL_SIZE}: use "
                "SeedSequence(entropy) without pool_size"
            )
        return _check_entropy(seed.entropy, seed), tuple(map(int, seed.spawn_key))
    return _check_entropy(seed, seed), ()


def _check_entropy(entropy: Any, seed: Any) -> Entropy:
    if hasattr(type(entropy), "__index__") and getattr(entropy, "ndim", 0) == 0:
        return _check_number(entropy, seed)
    # An array of NumPy is no `Sequence`.
    is_sequence = isinstance(entropy, Sequence) or getattr(entropy, "ndim", 0) == 1
    if not is_sequence or isinstance(entropy, (str, bytes)):
        raise TypeError(f"{_WHAT}, not {seed!r}{_cure(seed)}")
    if not len(entropy):
        raise ValueError(f"seed is an empty {type(seed).__name__}: give at least one number")
    return tuple(_check_number(each, seed) for each in entropy)


def _check_number(number: Any, seed: Any) -> int:
    whole = check_whole(number, _WHAT)
    if whole < 0:
        raise ValueError(f"seed must not be negative, and is {seed!r}: use abs(...), for example")
    return whole


def _cure(seed: Any) -> str:
    if isinstance(seed, (str, bytes)):
        return ": of a text, give the bytes as numbers, list(text.encode())"
    if isinstance(seed, float):
        return ": use int(...)"
    if hasattr(seed, "integers"):
        return f" ({type_with_article(seed)}): draw one from it, int(rng.integers(2**63))"
    if hasattr(seed, "getrandbits"):
        return f" ({type_with_article(seed)}): draw one from it, rng.getrandbits(64)"
    return ""
