"""What the server of a live page answers.

    GET  /                the page
    GET  /data            the pool's state, and the part of the chart since a cursor
    GET  /stack           the task and the frames of a drone
    POST /interrupt       the task that a drone runs;  /kill  the drone
    GET  /timeline.html   the timeline so far, as a page to keep
    GET  /metrics         for Prometheus

Every request needs the token: in the URL, or in the header ``Authorization: Bearer TOKEN``.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ...timeline.page import STATUSES, data_of, fill, page_of, part_of
from ...timeline.picture import OTHERS_COLOUR, PALETTE
from ...timeline.timeline import Timeline
from .metrics import CONTENT_TYPE, metrics_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from ...engines.remote.client import RemotePool
    from ...pool.pool import Pool

__all__ = ["make_app"]

NO_TOKEN = "The token is missing or wrong: use the whole address that the program has printed.\n"
GONE = "the pool is gone"
POLICY = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'none'"
    ),
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cache-Control": "no-store",
}


def make_app(find_pool: Callable[[], Pool | RemotePool | None], token: str) -> ASGIApp:
    """Return the application. `find_pool` returns None when the pool was collected."""
    views = _Views(find_pool)
    # Functions, not coroutines: each runs in a thread of its own, and may wait.
    routes = [
        Route("/", views.page),
        Route("/data", views.data),
        Route("/stack", views.stack),
        Route("/interrupt", views.interrupt, methods=["POST"]),
        Route("/kill", views.kill, methods=["POST"]),
        Route("/timeline.html", views.timeline),
        Route("/metrics", views.metrics),
    ]
    return _OnlyWithToken(Starlette(routes=routes), token)


class _OnlyWithToken:
    """Refuses requests without the token, before anything of them is looked at."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._has_token(scope):
            await PlainTextResponse(NO_TOKEN, 403, POLICY)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        given = [
            value.encode()
            for value in parse_qs(scope["query_string"].decode("latin-1")).get("token", ())
        ]
        given += [
            value.removeprefix(b"Bearer ")
            for name, value in scope["headers"]
            if name == b"authorization"
        ]
        return any(secrets.compare_digest(each, self._token) for each in given)


class _Views:
    def __init__(self, find_pool: Callable[[], Pool | RemotePool | None]) -> None:
        self._find_pool = find_pool

    def _pool(self) -> Pool | RemotePool:
        pool = self._find_pool()
        if pool is None:
            raise HTTPException(410, GONE)
        return pool

    def page(self, request: Request) -> Response:
        here, charts = files(__package__), files("polycephaly.timeline")
        parts = {
            "title": escape(self._pool().status()["name"]),
            "style": charts.joinpath("page.css").read_text("utf-8")
            + here.joinpath("live.css").read_text("utf-8"),
            "script": charts.joinpath("chart.js").read_text("utf-8")
            + here.joinpath("live.js").read_text("utf-8"),
            "data": data_of(
                {
                    "statuses": STATUSES,
                    "palette": [*PALETTE, OTHERS_COLOUR],
                    "part": part_of(Timeline(), 0.0),
                    "length": 0,
                }
            ),
        }
        return HTMLResponse(
            fill(here.joinpath("live.html").read_text("utf-8"), parts), headers=POLICY
        )

    def data(self, request: Request) -> Response:
        pool = self._pool()
        try:
            cursor = int(request.query_params["entries"]), int(request.query_params["threads"])
            start = (
                float(request.query_params["start"]) if "start" in request.query_params else None
            )
        except (KeyError, ValueError):
            raise HTTPException(400, "entries, threads and start are numbers") from None
        try:
            timeline, cursor = pool._news(cursor)
            status = pool.status()
        except (ConnectionError, RuntimeError) as error:  # of the pool that served it
            raise HTTPException(410, str(error)) from None
        start, end = timeline.start if start is None else start, timeline.end
        return JSONResponse(
            {
                "status": status,
                "cursor": cursor,
                "start": start,
                "end": round((end - start) * 1e6) if timeline else None,
                "part": part_of(timeline, start),
            },
            headers=POLICY,
        )

    def stack(self, request: Request) -> Response:
        drone = self._drone(request)
        text = str(drone.stack())
        lines = [*getattr(drone._handle, "stderr", ())]  # only a local pool has them
        if lines:
            text += "\n\nlast lines on stderr:\n" + "\n".join(lines)
        return PlainTextResponse(text, headers=POLICY)

    def interrupt(self, request: Request) -> Response:
        self._drone(request).interrupt()
        return Response(status_code=204)

    def kill(self, request: Request) -> Response:
        self._drone(request).kill()
        return Response(status_code=204)

    def _drone(self, request: Request) -> Any:
        name = request.query_params.get("drone")
        try:
            for drone in self._pool().drones:
                if drone.name == name:
                    return drone
        except (ConnectionError, RuntimeError) as error:
            raise HTTPException(410, str(error)) from None
        raise HTTPException(404, f"the pool has no drone {name!r} any more")

    def timeline(self, request: Request) -> Response:
        pool = self._pool()
        name = str(pool.status()["name"])
        saved = {"Content-Disposition": "attachment"} if "save" in request.query_params else {}
        page = page_of(pool.timeline, f"Timeline of {name}")
        return HTMLResponse(page, headers={"Cache-Control": "no-store", **saved})

    def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics_of(self._pool().status()), media_type=CONTENT_TYPE)
