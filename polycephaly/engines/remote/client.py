"""`connect`: a pool in another process, used like one's own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self, TypeVar

from ...drone.forwarded import NOTHING
from ...pool.base import ExecutorBase
from ...pool.config import check_output, check_timeout
from ...pool.current import entered, left
from ...pool.map_source import OneByOne
from ...timeline import Timeline
from ...timeline.plain import unpack_timeline
from ...wire.output import Line
from ...wire.pickling import pack_beside
from . import pool_registry
from .connection import Connection
from .drone import RemoteDrone, RemoteHandle
from .messages import AHEAD
from .shared import RemoteShared

__all__ = ["RemotePool", "connect"]

T = TypeVar("T")


class RemotePool(ExecutorBase):
    """A served pool, from another process; made by `connect`. Any thread may use it.

    Work is given, cancelled and answered as with a `Pool` of one's own; code strings and functions
    run in drones of the server's image. What is `__main__` here travels by value. When the
    connection is lost, what was not answered is rejected with `ConnectionError`. It is closed when
    nobody has it any more.

    Callbacks of its promises, and `output`, are called in the thread that speaks with the server:
    one that does not come back for 15 seconds is taken for the end of this client."""

    def __init__(self, connection: Connection) -> None:
        self._dispatcher = connection  # type: ignore[assignment]  # it does what a crew does
        self._connection = connection
        weakref.finalize(self, connection.close, wait=False).atexit = False

    def _source(self, fn: Callable[..., Any], iterables: tuple[Iterable[Any], ...]) -> OneByOne:
        return OneByOne(self._dispatcher, self._task_options, fn, iterables, AHEAD)

    def share(self, obj: T) -> RemoteShared[T]:
        """Gives `obj` to the pool once, into shared memory: the handle stands for it in any number
        of this client's calls; see `RemoteShared`. They are run by the drones of the server's host,
        also where others have joined.

        Raises what the pickling of `obj` raises, and `MemoryError` where it would be more than the
        pool may share."""
        pickled, buffers = pack_beside(obj, NOTHING)
        runs = [pickled, *buffers]
        return RemoteShared(self, self._connection.share(runs), sum(map(len, runs)))

    # -- the pool itself ---------------------------------------------------------------------------

    @property
    def drones(self) -> list[RemoteDrone]:
        """Its drones at this moment; work given to one of them is run by that one."""
        return [
            RemoteDrone(self, RemoteHandle(**each))
            for each in self._connection.ask("drones").result()
        ]

    def _drones(self) -> list[RemoteDrone]:
        return self.drones

    def refresh(self) -> None:
        """Has the pool take a new snapshot of its image; for everybody who uses it. See
        `Pool.refresh`."""
        self._connection.ask("refresh").result()

    @property
    def timeline(self) -> Timeline:
        """What the pool's drones have done so far, for whomever, and when; those that have joined
        as well, if their hosts tell it within five seconds. Times are of the clock of the pool's
        machine. See `Timeline`."""
        return unpack_timeline(self._connection.ask("timeline").result())

    def status(self) -> dict[str, Any]:
        """What the pool is doing, as plain data that JSON can hold:

        ``name``, ``pid``, ``host``, ``version`` (of polycephaly), ``address``, ``started`` (seconds
        since 1970), ``width``, ``clients``, ``queued`` (pieces of work that no drone has got),
        ``tasks_done`` (of clients, since it is served) and ``drones``: of each its ``number``,
        ``name``, ``pid`` and ``host``, its ``state`` ("starting", "idle", "busy", "retiring" or
        "unresponsive: why"), what it is ``running`` (a label or None), for how many ``seconds`` it
        has been so (or None), in what it has been ``waiting`` without processor time (None, or the
        attributes of a `Waiting`, with its ``seconds``), the ``memory`` that it and what it has
        started hold for themselves, in bytes, and ``tasks_done``."""
        found: dict[str, Any] = self._connection.ask("status").result()
        return found

    def stop(self, now: bool = False) -> None:
        """Asks the pool's owner to end it: when what runs is finished, or `now`. Returns when he
        was asked.

        Raises `RuntimeError` where he lets nobody do that (see `serve`)."""
        self._connection.ask("stop", now=now).result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leaves, when what was submitted is done; the pool itself goes on. With `cancel_futures`,
        what no drone has begun is cancelled. Twice is no error."""
        self._connection.close(cancel="not begun" if cancel_futures else "", wait=wait)

    def __enter__(self) -> Self:
        entered(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        left(self)
        self._connection.close(cancel="all" if kind is not None else "")

    async def __aenter__(self) -> Self:
        entered(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        left(self)
        self._connection.close(cancel="all" if kind is not None else "", wait=False)
        try:
            await self._connection.ended
        except BaseException:
            self._connection.close(cancel="all", wait=False)
            await self._connection.ended
            raise

    def __repr__(self) -> str:
        connection = self._connection
        if connection.refusal is not None:
            return f"<RemotePool at {connection.address}, closed>"
        return f"<RemotePool {connection.name} at {connection.address}: {connection.drones} drones>"


def connect(
    where: str | os.PathLike[str],
    *,
    server_key: str | None = None,
    keys: tuple[str, str] | None = None,
    timeout: float = 5.0,
    output: str | Callable[[Line], object] = "forward",
) -> RemotePool:
    """A pool that another process serves. `where` is the name under which one of your own does on
    this machine; or a connection file (a path, or a string with a ``/`` in it); or its address
    (``tcp://HOST:PORT``) with its public key and one's own public and secret key
    (`zmq.curve_keypair`), of which it must allow the public one. The keys of what has a name on
    this machine are known. `output` says what becomes of the lines that this client's work prints,
    as for a `Pool`; nobody else gets them.

    Raises `ConnectionError` where no pool of that name runs, nobody answers within `timeout`
    seconds or the keys do not fit, `PermissionError` for a file that others may read, `ValueError`
    for what is no name, file, address or key."""
    check_timeout(timeout)
    return RemotePool(
        Connection(pool_registry.card_of(where, server_key, keys), timeout, check_output(output))
    )
