"""The web application of a live page: its routes.

    GET  /                the page
    GET  /data?entries=&threads=[&start=]   the pool's state, and the chart's part since a cursor
    GET  /stack?drone=    the task and the frames of a drone, and its last lines on stderr
    POST /interrupt?drone=, /kill?drone=    end the tasks of a drone, or the drone
    GET  /timeline.html[?save]   the timeline so far, as a page to keep
    GET  /metrics         for Prometheus

Every request needs a token: in the URL, or in the header ``Authorization: Bearer TOKEN``. There are
two: with the read-only one, nothing can be POSTed, and the page has no buttons for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from math import isfinite
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ...promises.promise import Promise, fulfill, reject
from ...runtime import fork_guard
from ...timeline.page import STATUSES, data_of, make_page, page_of, part_of, read_text
from ...timeline.picture import PALETTE
from ...timeline.timeline import Timeline
from .metrics import CONTENT_TYPE, metrics_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ...engines.remote.client import RemotePool
    from ...pool.pool import Pool

NO_TOKEN = "The token is missing or wrong: use the whole address that the program has printed.\n"
READ_ONLY = "This address may only look: interrupt and kill need the program's other one.\n"
CHARTS = "polycephaly.timeline"  # the package that has the files of charts
POLICY = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; frame-ancestors 'none'; form-action 'none'"
    ),
    "Referrer-Policy": "no-referrer",  # the address has the token
    "Cache-Control": "no-store",
}


def make_app(
    find_pool: Callable[[], Pool | RemotePool | None], token: str, read_only_token: str
) -> ASGIApp:
    """Return the application. `find_pool` returns None when the pool was collected."""
    views = _Views(find_pool)
    routes = [
        Route("/", _in_own_thread(views.page)),
        Route("/data", _in_own_thread(views.data)),
        Route("/stack", _in_own_thread(views.stack)),
        Route("/interrupt", _in_own_thread(views.interrupt), methods=["POST"]),
        Route("/kill", _in_own_thread(views.kill), methods=["POST"]),
        Route("/timeline.html", _in_own_thread(views.timeline)),
        Route("/metrics", _in_own_thread(views.metrics)),
    ]
    errors = dict.fromkeys((ConnectionError, RuntimeError, TimeoutError), _tell_error)
    return _only_with_token(
        Starlette(routes=routes, exception_handlers=errors), token, read_only_token
    )


def _in_own_thread(view: Callable[[Request], Response]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that runs `view`, which may block, in a new thread. The threads of
    Starlette would make forks unsafe, an `OwnThread` does not.
    """

    async def endpoint(request: Request) -> Response:
        answer: Promise[Response] = Promise()

        def run() -> None:
            try:
                fulfill(answer, view(request))
            except Exception as error:
                reject(answer, error)

        fork_guard.OwnThread("polycephaly-dashboard", run).start()
        return await answer

    return endpoint


def _tell_error(request: Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 410)


def _only_with_token(app: ASGIApp, token: str, read_only_token: str) -> ASGIApp:
    """Return an application that refuses requests without a token, before looking at anything else
    in them, and adds the headers of `POLICY` to all answers.
    """

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_with_policy(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                MutableHeaders(scope=message).update(POLICY)
            await send(message)

        given = _tokens_of(scope)
        may_act, may_look = _contains(given, token), _contains(given, read_only_token)
        if not (may_act or may_look):
            answer: ASGIApp = PlainTextResponse(NO_TOKEN, 403)
        elif not may_act and scope["method"] not in ("GET", "HEAD"):
            answer = PlainTextResponse(READ_ONLY, 403)
        else:
            scope["read_only"] = not may_act
            answer = app
        try:
            await answer(scope, receive, send_with_policy)
        except asyncio.CancelledError:
            if not begun:
                closed = PlainTextResponse("the page is being closed", 503)
                await closed(scope, receive, send_with_policy)

    return guarded


def _tokens_of(scope: Scope) -> list[str]:
    connection = HTTPConnection(scope)
    header = connection.headers.get("authorization", "")
    return [*connection.query_params.getlist("token"), header.removeprefix("Bearer ")]


def _contains(given: list[str], token: str) -> bool:
    return any(secrets.compare_digest(each.encode(), token.encode()) for each in given)


class _Views:
    def __init__(self, find_pool: Callable[[], Pool | RemotePool | None]) -> None:
        self._find_pool = find_pool

    def _pool(self) -> Pool | RemotePool:
        pool = self._find_pool()
        if pool is None:
            raise HTTPException(410, "the pool is gone")
        return pool

    def page(self, request: Request) -> Response:
        contents = {
            "statuses": STATUSES,
            "palette": PALETTE,
            "part": part_of(Timeline(), 0.0),
            "length": 0,
            "read_only": request.scope.get("read_only", False),
        }
        page = make_page(
            read_text(__package__, "live.html"),
            title=self._pool().status()["name"],
            style=read_text(CHARTS, "page.css") + read_text(__package__, "live.css"),
            script=read_text(CHARTS, "chart.js") + read_text(__package__, "live.js"),
            data=data_of(contents),
            policy="",  # it is in the header
        )
        return HTMLResponse(page)

    def data(self, request: Request) -> Response:
        pool = self._pool()
        try:
            cursor = int(request.query_params["entries"]), int(request.query_params["threads"])
            given = request.query_params.get("start")
            start = None if given is None else float(given)
            if start is not None and not isfinite(start):
                raise ValueError
        except (KeyError, ValueError):
            raise HTTPException(400, "entries, threads and start are numbers") from None
        timeline, cursor = pool._news(cursor)
        status = pool.status()
        start, end = timeline.start if start is None else start, timeline.end
        return JSONResponse(
            {
                "status": status,
                "cursor": cursor,
                "start": start,
                "end": round((end - start) * 1e6) if timeline else None,
                "part": part_of(timeline, start),
            }
        )

    def stack(self, request: Request) -> Response:
        drone = self._drone(request)
        text = str(drone.stack())
        lines = [*getattr(drone._handle, "stderr", ())]  # only a local pool has them
        if lines:
            text += "\n\nlast lines on stderr:\n" + "\n".join(lines)
        return PlainTextResponse(text)

    def interrupt(self, request: Request) -> Response:
        self._drone(request).interrupt()
        return Response(status_code=204)

    def kill(self, request: Request) -> Response:
        self._drone(request).kill()
        return Response(status_code=204)

    def _drone(self, request: Request) -> Any:
        name = request.query_params.get("drone")
        for drone in self._pool().drones:
            if drone.name == name:
                return drone
        raise HTTPException(404, f"the pool has no drone {name!r} any more")

    def timeline(self, request: Request) -> Response:
        pool = self._pool()
        name = str(pool.status()["name"])
        saved = {"Content-Disposition": "attachment"} if "save" in request.query_params else {}
        page = page_of(pool.timeline, f"Timeline of {name}")
        return HTMLResponse(page, headers=saved)

    def metrics(self, request: Request) -> Response:
        return PlainTextResponse(metrics_of(self._pool().status()), media_type=CONTENT_TYPE)
