"""`connect` and `RemotePool`: a pool that another process serves, used like a local pool."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

from ...drone.forwarded import NO_SHARED_NAMES
from ...pool.base import ExecutorBase
from ...pool.config import check_output
from ...pool.stacks import Stack, Stacks
from ...pool.status import COLUMNS
from ...promises.html import table
from ...runtime.checks import check_at_least, check_positive_seconds
from ...timeline import Timeline
from ...timeline.plain import unpack_timeline
from ...wire.output import Line
from ...wire.pickling import pack_out_of_band
from . import pool_registry
from .connection import Connection
from .drone import RemoteDrone, RemoteHandle
from .shared import RemoteShared, SharedRef

T = TypeVar("T")


class RemotePool(ExecutorBase):
    """A pool that another process serves; made by `connect`.

    Tasks are submitted, cancelled and answered as with a local `Pool`. Code strings and functions
    run in drones of the server process. Functions and classes of the client's `__main__` travel by
    value. The connection is closed when no reference to the pool is left.

    Notes
    -----
    Any thread may use a remote pool.

    If the connection is lost, unanswered tasks are rejected with `ConnectionError`.

    Results are unpickled in the thread that talks to the server. If that does not return for 15
    seconds, the server treats the client as gone.
    """

    _dispatcher: Connection

    def __init__(self, connection: Connection) -> None:
        self._dispatcher = connection
        self._maps = {}
        weakref.finalize(self, connection.close, wait=False).atexit = False

    def share(self, obj: T) -> RemoteShared[T]:
        """Copy `obj` once into the pool's shared memory and return a handle.

        The handle stands for the value in any number of this client's calls. Such calls are run by
        drones of the server's own host, even if other hosts have joined.

        Parameters
        ----------
        obj : object
            The value. It is pickled here.

        Returns
        -------
        RemoteShared
            The handle.

        Raises
        ------
        MemoryError
            If the value would exceed the memory that the pool may share.
        Exception
            Any error of pickling `obj`.
        """
        pickled, out_of_band = pack_out_of_band(obj, NO_SHARED_NAMES)
        buffers = [pickled, *out_of_band]
        ref = SharedRef(self._dispatcher, self._dispatcher.share(buffers))
        return RemoteShared(self, ref, sum(map(len, buffers)))

    # -- the pool itself ---------------------------------------------------------------------------

    @property
    def drones(self) -> list[RemoteDrone]:
        """The current drones. A task that is submitted to one of them runs on that drone only."""
        return [
            RemoteDrone(self, RemoteHandle(**each))
            for each in self._dispatcher.request("drones").result()
        ]

    def refresh(self) -> None:
        """Make the pool take a new snapshot of the server process. See `Pool.refresh`.

        The snapshot is new for all users of the pool.
        """
        self._dispatcher.request("refresh").result()

    def resize(self, drones: int) -> None:
        """Change the number of drones for all users of the pool. See `Pool.resize`.

        Drones of joined hosts do not count.
        """
        check_at_least("drones", drones, 1)
        self._dispatcher.request("resize", drones=drones).result()
        self._dispatcher.size = drones

    @property
    def timeline(self) -> Timeline:
        """A `Timeline` of the tasks that the drones have run so far for all clients.

        Drones of joined hosts are included if their hosts answer within five seconds. Times are of
        the clock of the server's machine.
        """
        return unpack_timeline(self._dispatcher.request("timeline").result())

    def _news(self, cursor: tuple[int, int]) -> tuple[Timeline, tuple[int, int]]:
        news = self._dispatcher.request("news", cursor=cursor).result()
        entries, threads = news["cursor"]
        return unpack_timeline(news["timeline"]), (entries, threads)

    def status(self) -> dict[str, Any]:
        """Return the state of the pool as plain data that JSON can hold: see `Pool.status`.

        ``name`` is the name by which the pool is found, if it has one. Tasks of all clients count,
        including those that wait at the server for their turn. ``drones`` includes those of joined
        hosts, as their hosts last reported them.
        """
        status: dict[str, Any] = self._dispatcher.request("status").result()
        return status

    def stacks(self) -> list[Stack]:
        """Return the task and the frames of each drone at this moment: see `Pool.stacks`.

        Drones of joined hosts are included. The server waits for at most two seconds for the answer
        of each drone.
        """
        request = self._dispatcher.request
        drones = [each["number"] for each in request("status").result()["drones"]]
        replies = [request("stack", drone=number) for number in drones]
        stacks = Stacks()
        for reply in replies:
            try:
                stacks.append(Stack.from_dict(reply.result()))
            except RuntimeError as error:  # the drone has ended since the drones were listed
                if not str(error).startswith("the drone has ended"):
                    raise
        return stacks

    def profile(self, *, hertz: int = 50) -> NoReturn:
        """Raise `RuntimeError`: only the process that serves the pool can profile its drones."""
        raise RuntimeError(
            f"pool {self._dispatcher.name} is served by another process: use pool.profile() there, "
            "or stacks() here for the lines at which its tasks are now"
        )

    def push(self, names: Mapping[str, Any]) -> NoReturn:
        """Raise `RuntimeError`: only the process that serves the pool can push names to all its
        drones, and to those that start later.
        """
        raise RuntimeError(
            f"pool {self._dispatcher.name} is served by another process, and its clients cannot "
            "push names to all drones yet: use pool.push() there, or everywhere() here, which "
            "reaches the drones that there are now"
        )

    def cancel_tasks(self, *clients: str) -> list[str]:
        """Cancel all tasks of some clients of the pool.

        Their promises then say that they were cancelled. The clients stay connected, and may submit
        more tasks.

        Parameters
        ----------
        *clients : str
            The clients, named as in the field ``client`` of `status`: all connections of these
            processes. If there are none, all connections but this one. Tasks of the pool's own
            process are left alone.

        Returns
        -------
        list of str
            Those of the clients that had tasks at the server.

        Raises
        ------
        RuntimeError
            If there is no such client.
        """
        names: list[str] = self._dispatcher.request("cancel", clients=clients).result()
        return names

    def stop(self, now: bool = False) -> None:
        """Ask the owner of the pool to end it. Return when the owner has been asked.

        Parameters
        ----------
        now : bool
            If true, running tasks are not waited for.

        Raises
        ------
        RuntimeError
            If the owner does not let clients stop the pool (see `serve`).
        """
        self._dispatcher.request("stop", now=now).result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Disconnect after the submitted tasks are done. The pool itself goes on.

        May be called more than once.

        Parameters
        ----------
        wait : bool
            If true, return after the connection is closed.
        cancel_futures : bool
            If true, cancel the tasks that no drone has begun.
        """
        if not cancel_futures:
            self._send_maps()
        self._dispatcher.close(cancel="not begun" if cancel_futures else "", wait=wait)

    def __repr__(self) -> str:
        connection = self._dispatcher
        if connection.refusal is not None:
            return f"<RemotePool at {connection.address}, closed>"
        drones = f"{connection.size} drone{'s' * (connection.size != 1)}"
        return f"<RemotePool {connection.name} at {connection.address}: {drones}>"

    def _repr_html_(self) -> str:
        keys = ("name", "pid", "state", "running", "tasks_done")
        drones: list[list[Any]] = []
        picture = ""
        if self._dispatcher.refusal is None:
            with suppress(ConnectionError):  # just lost
                drones = [[drone[key] for key in keys] for drone in self.status()["drones"]]
                if timeline := self.timeline:
                    picture = timeline._repr_html_()
        rows = [tuple("" if each is None else each for each in drone) for drone in drones]
        return table(repr(self), COLUMNS, rows) + picture


def connect(
    where: str | os.PathLike[str],
    *,
    server_key: str | None = None,
    keys: tuple[str, str] | None = None,
    timeout: float = 5.0,
    output: str | Callable[[Line], object] = "forward",
) -> RemotePool:
    """Connect to a pool that another process serves.

    Parameters
    ----------
    where : str or path
        The name of a pool of this user on this machine; a connection file (a path, or a string with
        a ``/``); or an address ``tcp://HOST:PORT``, which needs `server_key` and `keys` unless the
        pool has a name on this machine.
    server_key : str, optional
        The server's public key.
    keys : tuple of str, optional
        The client's public and secret key (see `zmq.curve_keypair`). The server must allow the
        public key.
    timeout : float
        Seconds to wait for the server's answer.
    output : str or callable
        What to do with lines that this client's tasks print, as for `Pool`. No other client gets
        them.

    Returns
    -------
    RemotePool
        The connected pool.

    Raises
    ------
    ConnectionError
        If no pool of that name runs, if the server does not answer in time, or if the keys do not
        fit.
    PermissionError
        If other users may read the connection file.
    ValueError
        If a name, file, address or key is malformed.
    """
    timeout = check_positive_seconds("timeout", timeout)
    card = pool_registry.resolve_card(where, server_key, keys)
    return RemotePool(Connection(card, timeout, check_output(output)))


def connect_for_requests(where: str) -> RemotePool:
    """Connect to a pool, whatever Python it runs on: to look at it or end it, not to give it tasks.

    Raises the errors of `connect`.
    """
    card = pool_registry.resolve_card(where)
    return RemotePool(Connection(card, 5.0, check_output("discard"), only_requests=True))
