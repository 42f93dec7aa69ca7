"""What clients ask beside work: status, the end, single drones; and what they want to lie in shared
memory.

    ASK, SHARE ──> here ──> at once, or in a short-lived thread ── tell ──> TELL

In a thread of its own is what may take long (a status looks at memory, a timeline is long, a
refresh forks, a large value is copied), and what is code of the pool's owner (`on_stop`). All else
is done in the server's turn."""

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

SOON = 5.0  # seconds that joined drones have to tell what they have done
ASIDE = 1.0  # seconds that the server's end waits for an answer that is just being made


class AdminService:
    def __init__(self, server: Server, on_stop: Callable[[bool], object] | None) -> None:
        self._server = server
        self._pool = server._pool
        self._on_stop = on_stop
        self._long = (
            threading.Lock()
        )  # one at a time of what takes the processor for long; each client's in turn
        self._asides: set[threading.Thread] = set()

    def finish(self) -> None:
        """Who has asked for the server's end is to be told that he was heard, though it comes at
        once."""
        for aside in list(self._asides):
            if (
                aside is not threading.current_thread() and aside.is_alive()
            ):  # not if it is just being started
                aside.join(ASIDE)

    def ask(self, client: Client, note: dict[str, Any]) -> None:
        """Raises `Malformed`."""
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
        """One question of each client waits for those of others, so many that one asks delay
        himself only."""
        with client.asking, self._long:
            if client.identity not in self._server._clients:  # it has gone: nobody needs it
                return None
            return look()

    def _stop(self, tell: Tell, now: bool) -> None:
        if self._on_stop is None:
            raise RuntimeError(f"the owner of {self._server.name} does not let clients stop it")
        self._aside(tell, partial(self._on_stop, now))

    def hold(self, client: Client, number: int, asked: int, runs: list[list[bytes]]) -> None:
        """Puts it into the pool's shared memory."""

        def put() -> None:
            store = self._pool._dispatcher.registry.store
            assert store is not None
            self._server._post(partial(self._keep, client, number, hold(runs, store)))

        self._aside(partial(self._tell, client, asked), put)

    def _keep(self, client: Client, number: int, value: Shared[Any]) -> None:
        if self._server._clients.get(client.identity) is client:  # it has not left in the meantime
            client.desk.shared[number] = value

    def _tell(self, client: Client, number: int, **said: Any) -> None:
        """In any thread."""
        server = self._server
        note = pack_note(
            TELL, {"id": number, **said}
        )  # here, as it may be long: not in the server's turn
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
