"""`Kept`: the handle of a result that stays where it was computed."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from . import placeholders
from .placeholders import ValueOwner, known

__all__ = ["Kept", "arrive"]

T = TypeVar("T")


class Kept(Generic[T]):
    """The handle of a value that one of a pool's drones keeps; what ``pool.promise(...,
    keep=True)`` settles with.

    Among the arguments of that pool's calls, at any depth, it arrives as the value (so does the
    promise of it). Such work goes to the drone that has the value, which is neither copied nor
    pickled there: every call is given the very same object, so a call must not change it, but make
    a new one. Where that drone is busy for longer than moving the value would take while another is
    idle, the value goes there, from drone to drone.

    The value is freed with the last of its handles and of the calls that take it; or by `release`.
    When the drone that keeps it dies, it is computed again, if it was computed with ``retries``
    that are left; else it is lost, and who asks for it gets `Lost`. What other drones or `value`
    have asked for lies in the pool's shared memory too, and outlives its drone. Any thread may use
    a handle.

    Work in a drone may keep several values: ``Kept(value)`` makes a handle there, which it returns,
    also inside others. Such a value cannot be computed again. Raises `RuntimeError` where no drone
    runs.

    >>> import polycephaly as poly
    >>> with poly.Pool(2) as pool:
    ...     table = pool.promise(dict, a=1, keep=True).value
    ...     pool.doit(len, table), table.value
    (1, {'a': 1})
    >>> with poly.Pool(2) as pool:
    ...     low, high = pool.doit(lambda: [poly.Kept("abc"), poly.Kept("xyz")])
    ...     pool.doit(lambda a, b: a + b, low, high)
    'abcxyz'
    """

    __slots__ = ("__weakref__", "_custody")

    def __init__(self, value: T) -> None:
        if placeholders.shelf is None:
            raise RuntimeError(
                "Kept(value) keeps a value in the drone whose work it is called in, and this is no drone: "
                "pool.share(value) puts one into shared memory"
            )
        self._custody: ValueOwner | None = placeholders.shelf.make(value)

    @classmethod
    def of(cls, custody: ValueOwner) -> Self:
        """One more handle of what is kept already."""
        handle = object.__new__(cls)
        handle._custody = custody
        return handle

    @property
    def value(self) -> T:
        """The value, fetched from its drone and built anew each time; large buffers in it are
        shared memory, into which this image may write without anybody seeing it. Waits.

        Raises `Lost` where the drone has died, or the pool has ended; what the value's own pickling
        raises; and `ValueError` after `release`."""
        value: T = self._opened().fetched()
        return value

    @property
    def nbytes(self) -> int:
        """Bytes of the value, about: those of its buffers, and what Python says of the first
        thousand objects in it. Raises `ValueError` after `release`."""
        return self._opened().nbytes

    @property
    def drone(self) -> str | None:
        """The name of the drone that keeps it; None where it is in shared memory only, or lost.
        Raises `ValueError` after `release`."""
        return self._opened().home

    def release(self) -> None:
        """Gives the value up, as far as this handle goes: calls that were given it still get it.
        Twice is no error."""
        self._custody = None

    def _opened(self) -> ValueOwner:
        custody = self._custody
        if custody is None:
            raise ValueError("this kept value was released")
        return custody

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[int]]:
        return self._opened().ticket()

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        custody = self._custody
        return f"<Kept {'released' if custody is None else custody.state} at {id(self):#x}>"


def arrive(number: int) -> Kept[Any]:
    """A handle that a drone has made. (Its pickles name this function.)"""
    custody = known.get(number)
    if custody is None:
        raise LookupError(
            "a handle of a kept value that is not known here: it belongs to a pool of another process"
        )
    return Kept.of(custody)
