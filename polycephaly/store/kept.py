"""`Kept`: a handle of a result that stays where it was computed."""

from __future__ import annotations

from typing import Any, Generic, Self, TypeVar

from ..wire.placeholders import ValueOwner, current_store, known_owners
from .handle import StoredHandle

T = TypeVar("T")


class Kept(StoredHandle[ValueOwner], Generic[T]):
    """A handle of a value that one of a pool's drones keeps.

    ``pool.promise(..., keep=True)`` returns the promise of such a handle. Among the arguments of
    that pool's calls, at any depth, the handle arrives as the value (so does its promise). The call
    goes to the drone that has the value, where the value is neither copied nor pickled: every call
    gets the same object, so a call must not change it, but make a new one. If that drone is busy
    for longer than moving the value would take while another drone is idle, the value is sent to
    the other drone.

    A task in a drone may keep several values: ``Kept(value)`` makes a handle, which the task
    returns, alone or inside other values. Such a value cannot be computed again.

    Parameters
    ----------
    value
        The value that the calling drone is to keep.

    Raises
    ------
    RuntimeError
        If the caller does not run in a drone.

    Notes
    -----
    The value is freed after the last of its handles and the last call that takes it have ended, or
    by `release`. If the drone that keeps the value dies, the value is computed again, provided that
    its task was submitted with ``retries`` and some are left. Otherwise the value is lost, and
    callers that need it get `Lost`. Values that other drones or `value` have requested are also in
    the pool's shared memory, and survive their drone. Any thread may use a handle.

    Examples
    --------
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

    __slots__ = ("__weakref__",)

    _how = "kept"

    def __init__(self, value: T) -> None:
        store = current_store()
        if store is None:
            raise RuntimeError(
                "Kept(value) was called in a process that is no drone: a value can be kept only by "
                "the drone whose task calls it; use pool.share(value) for shared memory"
            )
        self._content = store.make(value)

    @classmethod
    def _from_owner(cls, owner: ValueOwner) -> Self:
        """Return another handle of a value that is kept already."""
        handle = object.__new__(cls)
        handle._content = owner
        return handle

    @property
    def value(self) -> T:
        """The value, fetched from its drone and rebuilt at each access.

        The access blocks until the value has arrived. Large buffers in the value are shared memory,
        to which this process may write privately.

        Raises
        ------
        Lost
            If the drone has died, or the pool has ended.
        ValueError
            If the handle was released.
        Exception
            The errors of the value's own pickling.
        """
        value: T = self._get_content().fetch_value()
        return value

    @property
    def nbytes(self) -> int:
        """The approximate size of the value in bytes.

        ``nbytes`` or ``sys.getsizeof`` of the value, and of its items or attributes.

        Raises
        ------
        ValueError
            If the handle was released.
        """
        return self._get_content().nbytes

    @property
    def drone(self) -> str | None:
        """The name of the drone that keeps the value; None if no drone does.

        The value is then in shared memory only, or lost.

        Raises
        ------
        ValueError
            If the handle was released.
        """
        return self._get_content().holder_name

    def _state(self, content: ValueOwner) -> str:
        return content.state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, tuple[int]]:
        return self._get_content().make_placeholder()


def restore_handle(number: int) -> Kept[Any]:
    """Return a handle that a drone has made. Pickles contain this function's name."""
    owner = known_owners.get(number)
    if owner is None:
        raise LookupError(
            "the handle of a kept value arrived in a process that does not know the value: the "
            "value belongs to a pool of another process"
        )
    return Kept._from_owner(owner)
