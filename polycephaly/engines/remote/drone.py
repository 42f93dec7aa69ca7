"""`RemoteDrone`: one drone of a pool in another process, used as one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ...pool.base import DroneBase
from ...pool.waiting import Waiting

if TYPE_CHECKING:
    from .client import RemotePool

__all__ = ["RemoteDrone", "RemoteHandle"]


class RemoteHandle(NamedTuple):
    """Where it is: to work that only this drone may do, what a link is in the pool's own
    process."""

    number: int
    name: str
    pid: int | None
    host: str


class RemoteDrone(DroneBase):
    """A drone of a `RemotePool`, from its `drones`. Work given to it is run by it alone, in a
    namespace that stays.

    When it has ended, work is rejected with `RuntimeError`; what it was running, with `DroneDied`.
    Any thread may use it.

    >>> import polycephaly as poly, os, tempfile
    >>> card = os.path.join(tempfile.mkdtemp(), "pool.json")
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
    ...     drone = remote.drones[0]
    ...     drone["x"] = 41
    ...     drone.doit("x + 1")
    42
    """

    def __init__(self, pool: RemotePool, remote_handle: RemoteHandle) -> None:
        self._dispatcher = pool._dispatcher
        self._task_options = pool._task_options
        self._original = pool
        self._handle = remote_handle  # type: ignore[assignment]  # it does what a link does
        self._remote_handle = remote_handle

    @property
    def name(self) -> str:
        return self._remote_handle.name

    @property
    def host(self) -> str:
        """The name of the machine that it runs on."""
        return self._remote_handle.host

    @property
    def pid(self) -> int:
        """Its process, on that machine; waits a moment where it is just being started."""
        pid = self._remote_handle.pid or self._ask("drone")["pid"]
        if pid is None:
            raise RuntimeError(f"drone {self.name} could not be started")
        return int(pid)

    @property
    def alive(self) -> bool:
        try:
            self._ask("drone")
        except RuntimeError:
            return False
        return True

    @property
    def unresponsive(self) -> str | None:
        """Why nothing is heard of it while it should work, as `Drone.unresponsive` tells."""
        why: str | None = self._ask("drone")["unresponsive"]
        return why

    @property
    def waiting(self) -> Waiting | None:
        """In what it has waited without processor time, as `Drone.waiting` tells; `since` is of its
        machine's clock."""
        told = self._ask("drone").get("waiting")
        return None if told is None else Waiting(**told)

    def interrupt(self) -> None:
        """Stops what runs, also another client's, as Ctrl-C would: its promise is rejected with
        `KeyboardInterrupt`."""
        self._ask("interrupt")

    def kill(self) -> None:
        """SIGKILL: what it runs is rejected with `DroneDied`. Returns once it is dead."""
        self._ask("kill")

    def _ask(self, what: str) -> Any:
        connection: Any = self._dispatcher
        return connection.ask(what, drone=self._remote_handle.number).result()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteDrone) and (
            other._dispatcher,
            other._remote_handle.number,
        ) == (self._dispatcher, self._remote_handle.number)

    def __hash__(self) -> int:
        return hash((self._dispatcher, self._remote_handle.number))

    def __repr__(self) -> str:
        return f"<RemoteDrone {self.name} pid {self._remote_handle.pid} on {self.host}>"
