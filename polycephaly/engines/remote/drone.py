"""`RemoteDrone`: one drone of a pool that another process serves."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...pool.base import DroneBase, ExecutorBase
from ...pool.stacks import Stack
from ...pool.waiting import Waiting


class RemoteHandle(NamedTuple):
    """The identity of a remote drone; the target of its tasks, as a local drone handle is."""

    number: int
    name: str
    pid: int | None
    host: str


class RemoteDrone(DroneBase):
    """A drone of a `RemotePool`, taken from its `drones`.

    Tasks that are submitted to a remote drone run on that drone only, in a namespace that persists.
    After the drone has ended, new tasks are rejected with `RuntimeError`; the tasks that it was
    running are rejected with `DroneDied`. Any thread may use a remote drone.

    Examples
    --------
    >>> import polycephaly as poly, os, tempfile
    >>> card = os.path.join(tempfile.mkdtemp(), "pool.json")
    >>> with poly.Pool(1) as pool, poly.serve(pool, file=card), poly.connect(card) as remote:
    ...     drone = remote.drones[0]
    ...     drone["x"] = 41
    ...     drone.doit("x + 1")
    42
    """

    def __init__(self, pool: ExecutorBase, remote_handle: RemoteHandle) -> None:
        self._dispatcher: Any = pool._dispatcher  # a `Connection`
        self._task_options = pool._task_options
        self._original = pool
        self._handle: RemoteHandle = remote_handle

    @property
    def name(self) -> str:
        """The name of the drone."""
        return self._handle.name

    @property
    def host(self) -> str:
        """The name of the machine that the drone runs on."""
        return self._handle.host

    @property
    def pid(self) -> int:
        """The process id on the drone's machine.

        Blocks for a moment if the drone is just being started.

        Raises
        ------
        RuntimeError
            If the drone could not be started.
        """
        pid = self._handle.pid or self._request("drone")["pid"]
        if pid is None:
            raise RuntimeError(f"drone {self.name} could not be started")
        return int(pid)

    @property
    def alive(self) -> bool:
        """True if the drone has not ended."""
        try:
            self._request("drone")
        except RuntimeError:
            return False
        return True

    @property
    def unresponsive(self) -> str | None:
        """Why the drone makes no progress, or None if it does. See `Drone.unresponsive`."""
        reason: str | None = self._request("drone")["unresponsive"]
        return reason

    @property
    def waiting(self) -> Waiting | None:
        """The drone's current wait without processor time, or None. See `Drone.waiting`.

        ``since`` is of the clock of the drone's machine.
        """
        fields = self._request("drone").get("waiting")
        return None if fields is None else Waiting(**fields)

    def stack(self) -> Stack:
        """Return the drone's task and its frames at this moment: see `Drone.stack`.

        The server waits for at most two seconds for the drone's answer.

        Raises
        ------
        RuntimeError
            If the drone has ended.
        """
        return Stack.from_dict(self._request("stack"))

    @property
    def running(self) -> str | None:
        """The name of the task that the drone runs, also of other clients, or None. See
        `Drone.running`.
        """
        label: str | None = self._status().get("running")
        return label

    @property
    def memory(self) -> int | None:
        """The bytes that the drone holds for itself, or None. See `Drone.memory`."""
        size: int | None = self._status().get("memory")
        return size

    def _status(self) -> dict[str, Any]:
        """Return the drone's entry in the pool's status; empty if the drone has ended."""
        drones = self._dispatcher.request("status").result()["drones"]
        return next((each for each in drones if each["number"] == self._handle.number), {})

    def interrupt(self) -> None:
        """Interrupt the running task, also if it is another client's.

        As after Ctrl-C, the task's promise is rejected with `KeyboardInterrupt`.
        """
        self._request("interrupt")

    def kill(self) -> None:
        """Kill the drone with SIGKILL and return after its death.

        The running task is rejected with `DroneDied`.
        """
        self._request("kill")

    def _request(self, kind: str) -> Any:
        return self._dispatcher.request(kind, drone=self._handle.number).result()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteDrone) and (other._dispatcher, other._handle.number) == (
            self._dispatcher,
            self._handle.number,
        )

    def __hash__(self) -> int:
        return hash((self._dispatcher, self._handle.number))

    def __repr__(self) -> str:
        return f"<RemoteDrone {self.name} pid {self._handle.pid} on {self.host}>"
