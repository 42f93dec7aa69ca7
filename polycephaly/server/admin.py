"""Admin requests of clients: status, the end of the pool, single drones; and shared values.

    ASK, SHARE ──> AdminService ──> at once, or in a short-lived thread ── tell ──> TELL

A thread of its own is used for requests that may take long (a status reads memory figures, a
timeline is long, a refresh forks, a large value is copied) and for code of the pool's owner
(`on_stop`). All else is done in the server's thread, holding the server's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from typing import TYPE_CHECKING, Any

from ..engines.remote.messages import TELL, pack_note
from ..pool.drone_handle import State
from ..promises.promise import Promise
from ..runtime import fork_guard
from ..store.shared import Shared, hold
from ..timeline.plain import pack_timeline
from ..timeline.timeline import Timeline
from ..wire.messages import Malformed
from .answers import OF_DRONES, Tell
from .state import KNOWN, known_of

if TYPE_CHECKING:
    from .server import Client, Server

__all__ = ["AdminService"]

SOON = 5.0  # seconds that joined hosts have to send their timelines
ASIDE = 1.0  # seconds that closing the server waits for a reply in preparation


class AdminService:
    def __init__(self, server: Server, on_stop: Callable[[bool], object] | None) -> None:
        self._server = server
        self._pool = server._pool
        self._on_stop = on_stop
        # Long computations run one at a time; `Client.asking` queues those of one client.
        self._long = threading.Lock()
        self._asides: set[threading.Thread] = set()

    def finish(self) -> None:
        """Wait for replies in preparation: a client that asks for the server's end gets a reply."""
        for aside in list(self._asides):
            # A thread that is just being started cannot be joined yet.
            if aside is not threading.current_thread() and aside.is_alive():
                aside.join(ASIDE)

    def ask(self, client: Client, note: dict[str, Any]) -> None:
        """Answer an admin request. Raise `Malformed`."""
        what, number, drone = note.get("what"), note.get("id"), note.get("drone", 0)
        if not (isinstance(what, str) and isinstance(number, int) and isinstance(drone, int)):
            raise Malformed("a question that is none")
        tell = partial(self._tell, client, number)
        workers = self._server._workers
        try:
            if what in OF_DRONES:
                if workers.has(drone):
                    workers.ask(what, drone, tell)
                else:
                    OF_DRONES[what](self._pool, drone, tell)
            elif what == "status":
                self._aside(tell, partial(self._look, client, self._server.status))
            elif what == "drones":
                own = [
                    known_of(handle)
                    for handle in list(self._pool._dispatcher.handles)
                    if handle.state < State.RETIRING
                ]
                tell(
                    value=own + [{name: each[name] for name in KNOWN} for each in workers.drones()]
                )
            elif what == "setup":
                tell(value=self._server.setup)
            elif what == "timeline":
                self._aside(tell, partial(self._timeline, client, workers.timelines()))
            elif what == "refresh":
                self._aside(tell, self._pool.refresh)
            elif what == "stop":
                self._stop(tell, bool(note.get("now")))
            else:
                tell(error=f"this server does not know what {what!r} is")
        except RuntimeError as error:
            tell(error=str(error))

    def _timeline(self, client: Client, joined: list[Promise[Timeline]]) -> dict[str, Any] | None:
        wait(joined, SOON)

        def look() -> dict[str, Any]:
            timeline = self._pool.timeline
            for theirs in joined:
                if theirs.done() and theirs.exception() is None:
                    timeline += theirs.result()
            return pack_timeline(timeline)

        return self._look(client, look)

    def _look(self, client: Client, look: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        """Compute a long reply, one at a time.

        At most one request of each client waits for those of others, so that a client with many
        requests delays only itself.
        """
        with client.asking, self._long:
            if client.identity not in self._server._clients:  # the client has left
                return None
            return look()

    def _stop(self, tell: Tell, now: bool) -> None:
        if self._on_stop is None:
            raise RuntimeError(f"the owner of {self._server.name} does not let clients stop it")
        self._aside(tell, partial(self._on_stop, now))

    def hold(self, client: Client, number: int, asked: int, runs: list[list[bytes]]) -> None:
        """Copy a client's value into the pool's shared memory."""

        def put() -> None:
            store = self._pool._dispatcher.registry.store
            assert store is not None
            self._server._post(partial(self._keep, client, number, hold(runs, store)))

        self._aside(partial(self._tell, client, asked), put)

    def _keep(self, client: Client, number: int, value: Shared[Any]) -> None:
        # The client may have left in the meantime.
        if self._server._clients.get(client.identity) is client:
            client.desk.shared[number] = value

    def _tell(self, client: Client, number: int, **said: Any) -> None:
        """Send a reply. Any thread may call this."""
        server = self._server
        # A note may be long: pack it here, not in the server's thread.
        note = pack_note(TELL, {"id": number, **said})
        server._post(lambda: server._say(client, note, questions=1))

    def _aside(self, tell: Tell, act: Callable[[], Any]) -> None:
        def go() -> None:
            try:
                tell(value=act())
            except MemoryError as error:
                tell(error=str(error), kind="MemoryError")
            except Exception as error:
                tell(error=f"{type(error).__name__}: {error}")
            finally:
                self._asides.discard(aside)

        aside = fork_guard.OwnThread("polycephaly-aside", go)
        self._asides.add(aside)
        aside.start()
