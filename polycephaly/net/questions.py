"""What clients ask beside work: status, the end, single drones; and what they want to lie in shared memory.

    ASK, SHARE ──> here ──> at once, or in a short-lived thread ── tell ──> TELL

In a thread of its own is what may take long (a status looks at memory, a timeline is long, a refresh forks, a large
value is copied), and what is code of the pool's owner (`on_stop`). All else is done in the server's turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ..launch import safepoint
from ..link import State
from ..shared import Shared, hold
from ..timeline.plain import pack_timeline
from ..wire.messages import Malformed
from .answers import OF_DRONES, Tell
from .frames import TELL, pack_note
from .state import KNOWN, known_of

if TYPE_CHECKING:
    from .server import Client, Server

__all__ = ["Questions"]

ASIDE = 1.0  # seconds that the server's end waits for an answer that is just being made


class Questions:
    def __init__(self, server: Server, on_stop: Callable[[bool], object] | None) -> None:
        self._server = server
        self._pool = server._pool
        self._on_stop = on_stop
        self._asides: set[threading.Thread] = set()

    def finish(self) -> None:
        """Who has asked for the server's end is to be told that he was heard, though it comes at once."""
        for aside in list(self._asides):
            if aside is not threading.current_thread():
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
                self._aside(tell, self._server.status)
            elif what == "drones":
                own = [known_of(link) for link in list(self._pool._crew.links) if link.state < State.RETIRING]
                tell(value=own + [{name: each[name] for name in KNOWN} for each in workers.drones()])
            elif what == "timeline":
                self._aside(tell, lambda: pack_timeline(self._pool.timeline))
            elif what == "refresh":
                self._aside(tell, self._pool.refresh)
            elif what == "stop":
                self._stop(tell, bool(note.get("now")))
            else:
                tell(error=f"this server does not know what {what!r} is")
        except RuntimeError as error:
            tell(error=str(error))

    def _stop(self, tell: Tell, now: bool) -> None:
        if self._on_stop is None:
            raise RuntimeError(f"the owner of {self._server.name} does not let clients stop it")
        self._aside(tell, partial(self._on_stop, now))

    def hold(self, client: Client, number: int, asked: int, runs: list[list[bytes]]) -> None:
        """Puts it into the pool's shared memory."""

        def put() -> None:
            store = self._pool._crew.book.store
            assert store is not None
            self._server._post(partial(self._keep, client, number, hold(runs, store)))

        self._aside(partial(self._tell, client, asked), put)

    def _keep(self, client: Client, number: int, value: Shared[Any]) -> None:
        if self._server._clients.get(client.identity) is client:  # it has not left in the meantime
            client.desk.shared[number] = value

    def _tell(self, client: Client, number: int, **said: Any) -> None:
        """In any thread."""
        server = self._server
        server._post(lambda: server._send(client.identity, pack_note(TELL, {"id": number, **said})))

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

        aside = safepoint.OwnThread("polycephaly-aside", go)
        self._asides.add(aside)
        aside.start()
