"""`RemoteShared`: a value in the shared memory of a served pool, for many calls of one client.

    share(obj) ── SHARE: pickle, buffers ──> server ──> segment <── each drone maps its pages
    call with the handle ── value's number ──> server: call, value beside it ──> `shared_value`

The server unpickles none of it; the server only stores the bytes. They are freed when the client
disconnects, or when the handle is released or lost and no unsent call refers to the value: each
such call holds the handle's `SharedRef` until the call is sent, so that RELEASE is sent after it.
"""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

from ...drone.forwarded import shared_value
from ...pool.base import ExecutorBase
from ...promises.promise import misplaced_error
from ...store.handle import StoredHandle
from .messages import RELEASE, pack_numbers
from .server_connection import ServerConnection

T = TypeVar("T")


class _PicklingCall(threading.local):
    """The call whose arguments this thread is pickling: its connection and the values it takes."""

    def __init__(self) -> None:  # called in each thread
        self.connection: object = None
        self.shared_refs: list[SharedRef] = []


pickling_call = _PicklingCall()


class SharedRef:
    """Shared ownership of a value in a server's memory.

    RELEASE is sent when the last object that holds it is lost.
    """

    def __init__(self, connection: ServerConnection, number: int) -> None:
        self.number = number
        self.connection = connection

    def __del__(self) -> None:
        # `post` takes no lock, as a finalizer requires.
        self.connection.post(self.connection.send, pack_numbers(RELEASE, [self.number]))


class RemoteShared(StoredHandle[SharedRef], Generic[T]):
    """The handle of a value in a served pool's shared memory; made by `RemotePool.share`.

    In a call of that pool, the handle arrives as the value, wherever the handle stands. Large
    buffers in the value (arrays, data frames) are not copied: every drone maps the same memory, and
    a call's writes are private to that call. The value lives until `release`, the end of the
    handle's ``with`` block, the loss of the last reference, or the end of the connection. Any
    thread may use a handle.

    Examples
    --------
    >>> import polycephaly as poly, os, tempfile
    >>> card = os.path.join(tempfile.mkdtemp(), "pool.json")
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
    ...     with remote.share(bytearray(1_000_000)) as zeros:
    ...         remote.doit(len, zeros)
    1000000
    """

    def __init__(self, pool: ExecutorBase, ref: SharedRef, nbytes: int) -> None:
        super().__init__(ref, nbytes)
        self._pool = pool

    @property
    def value(self) -> T:
        """The value, fetched from the pool. Raises `ValueError` after `release`."""
        self._get_content()
        value: T = self._pool.doit(_identity, self)
        return value

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        ref = self._get_content()
        if pickling_call.connection is not ref.connection:
            raise misplaced_error(
                "a remote shared value can be pickled only for calls of its own pool"
            )
        pickling_call.shared_refs.append(ref)
        return shared_value, (len(pickling_call.shared_refs) - 1,)


def _identity(value: T) -> T:
    return value
