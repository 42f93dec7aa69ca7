"""`Retry`: the failures after which a task runs again, and the delays before it does."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from random import SystemRandom
from typing import Any

from ..errors import DroneDied
from ..runtime.checks import check_at_least, check_real

MAX_DELAY_SECONDS = 86_400.0

# The state of `random` belongs to the program: a seed there must give the same numbers as ever.
_random = SystemRandom().random


@dataclass(frozen=True, slots=True)
class Retry:
    """When a failed task runs again. Passed as ``retries=``, in place of a number.

    A task is repeated if its drone dies, as with a number, and also if the task raises one of the
    exceptions `on`. The repetition number n begins ``delay * factor ** (n - 1)`` seconds after the
    failure, at most a day. During the delay the task holds no drone.

    Parameters
    ----------
    times
        Maximum number of repetitions, whatever the reasons.
    on
        Exception class, or a tuple of classes, that are matched as by an ``except`` clause. The
        death of the drone (`DroneDied`) always counts. The time limit of a task counts if
        `TimeoutError` matches. An empty tuple: nothing but deaths.
    delay
        Seconds before the first repetition.
    factor
        Factor of each further delay to the one before.
    jitter
        If True, each delay is multiplied by a random number between 0.5 and 1, so that tasks that
        failed together are not repeated together.

    Raises
    ------
    TypeError
        If an argument has a wrong type, or `on` has a class that is no `Exception`.
    ValueError
        If a number is out of range.

    Notes
    -----
    A cancelled task is never repeated. Each repetition gets the arguments as they were at the call,
    and the whole time limit. After the last one, or an error that does not match, the promise has
    that error, with a note that gives the number of attempts. A task for a single drone runs again
    only there, and so not after the death of that drone. A `map` sends its calls one by one, so
    that each is repeated alone. Errors of pickling the arguments, or of unpickling the result in
    this process, are not repeated. A kept or stored value that is lost is computed again at most
    as often as attempts are left, and for deaths only.

    Examples
    --------
    >>> import polycephaly as poly
    >>> def flaky():
    ...     if "been_here" not in globals():
    ...         globals()["been_here"] = True
    ...         raise ConnectionError("try again")
    ...     return "done"
    >>> with poly.Pool(1) as pool:
    ...     pool.options(retries=poly.Retry(3, on=ConnectionError, delay=0.01)).doit(flaky)
    'done'
    """

    times: int
    on: type[Exception] | tuple[type[Exception], ...] = (Exception,)
    delay: float = 0.1
    factor: float = 2.0
    jitter: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", check_at_least("times", self.times, 0))
        for name, given, least in (("delay", self.delay, 0), ("factor", self.factor, 1)):
            number = check_real(name, given)
            if not (number >= least and isfinite(number)):
                raise ValueError(f"{name} must be finite and at least {least}, not {given!r}")
            object.__setattr__(self, name, number)
        if not isinstance(self.jitter, bool):
            raise TypeError(f"jitter is True or False, not {self.jitter!r}")
        kinds: Any = self.on if isinstance(self.on, tuple) else (self.on,)
        for kind in kinds:
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"on is an exception class or a tuple of them, not {kind!r}")
            if not issubclass(kind, Exception):
                raise TypeError(
                    f"on has {kind.__name__}, which is no Exception: cancellations, interrupts and "
                    "exits are meant to end a task, so they are not repeated"
                )
        object.__setattr__(self, "on", kinds)

    def covers(self, error: BaseException) -> bool:
        """Return whether a task that failed with `error` is to be repeated.

        Runs no code of users, so it may be called while holding the reactor's lock.
        """
        kinds: Any = self.on
        mro = type(error).__mro__
        return isinstance(error, DroneDied) or any(kind in mro for kind in kinds)

    def next_delay(self, error: BaseException, attempts: int) -> float | None:
        """Return the seconds until the next attempt, or None if there is none.

        The last of `attempts` attempts has failed with `error`.
        """
        if attempts > self.times or not self.covers(error):
            return None
        try:
            seconds = self.delay * self.factor ** (attempts - 1)
        except OverflowError:
            seconds = MAX_DELAY_SECONDS if self.delay else 0.0
        seconds = min(seconds, MAX_DELAY_SECONDS)
        return seconds * (1 + _random()) / 2 if self.jitter else seconds
