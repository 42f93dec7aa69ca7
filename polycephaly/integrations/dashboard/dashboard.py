"""The server of a live page, in a thread of this process."""

from __future__ import annotations

import secrets
import socket
import threading
import weakref
from html import escape
from typing import TYPE_CHECKING

from ...runtime import fork_guard, parent_death

if TYPE_CHECKING:
    from ...engines.remote.client import RemotePool
    from ...pool.pool import Pool

MAX_CONNECTIONS = 64
MISSING = "the live page needs starlette and uvicorn: pip install 'starlette>=0.37' 'uvicorn>=0.29'"


class Dashboard:
    """The `LivePage` of a pool."""

    def __init__(self, pool: Pool | RemotePool, port: int, host: str) -> None:
        try:
            import uvicorn

            from .app import make_app
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(MISSING, name=error.name) from error
        tokens = secrets.token_urlsafe(16), secrets.token_urlsafe(16)
        find_pool = weakref.ref(pool, self._on_collected)
        config = uvicorn.Config(
            make_app(find_pool, *tokens),
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,  # uvicorn's would change the logging of the program
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        # The access log would contain the tokens. The argument `access_log=False` would also turn
        # off the access logs of the program's other servers.
        config.access_log = False
        self._server = uvicorn.Server(config)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = parent_death.close_in_child(
            socket.create_server((host, port), family=family)
        )
        shown = f"[{host}]" if ":" in host else host
        origin = f"http://{shown}:{self._socket.getsockname()[1]}"
        self.url, self.read_only_url = (f"{origin}/?token={each}" for each in tokens)
        self._thread = fork_guard.OwnThread("polycephaly-dashboard", self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            parent_death.close(self._socket)

    def _on_collected(self, pool: object) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self._server.should_exit = True
        if threading.current_thread() is not self._thread:
            self._thread.join()

    @property
    def closed(self) -> bool:
        return self._server.should_exit or not self._thread.is_alive()

    def __enter__(self) -> Dashboard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Dashboard at {self.url}{', closed' * self.closed}>"

    def _repr_html_(self) -> str:
        return f'<a href="{escape(self.url)}" target="_blank">{escape(self.url)}</a>'
