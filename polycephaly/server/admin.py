"""Admin requests of clients (`AdminService.handle_request` lists them), and their shared values.

    REQUEST, SHARE ──> AdminService ──> at once, or in a short-lived thread ──> REPLY

A thread of its own is used for requests that may take long (a status reads memory figures, a
timeline is long, a refresh forks, a large value is copied) and for code of the pool's owner
(`on_stop`). All else is done in the server's thread, holding the server's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from functools import partial
from typing import Any

from ..engines.remote.messages import REPLY, pack_json
from ..errors import Malformed
from ..pool.collecting import take_news
from ..pool.pool import Pool, dispatcher_of
from ..pool.status import IDENTITY_FIELDS, describe_identity
from ..promises.promise import Promise
from ..runtime.tuning import tuning
from ..store.shared import Shared, store_pickled
from ..timeline.plain import pack_timeline
from ..timeline.timeline import Timeline
from .drone_requests import DRONE_REQUESTS, Reply, reply_thread
from .flow_control import Client
from .joined import JoinedHosts

TIMELINE_TIMEOUT_SECONDS = 5.0  # for joined hosts to send their timelines


class AdminService:
    """The replies to the admin requests of one server's clients, and the values that they share.

    `post` has the server's loop call a function. `setup` is the reply to the request of that name.
    """

    def __init__(
        self,
        pool: Pool,
        joined_hosts: JoinedHosts,
        post: Callable[[Callable[[], object]], object],
        status: Callable[[], dict[str, Any]],
        cancel_tasks: Callable[[Sequence[str], Client], list[str]],
        on_stop: Callable[[bool], object],
        setup: dict[str, Any] | None,
    ) -> None:
        self._pool = pool
        self._dispatcher = dispatcher_of(pool)
        self._joined_hosts = joined_hosts
        self._post = post
        self._status = status
        self._cancel_tasks = cancel_tasks
        self._on_stop = on_stop
        self._setup = setup
        # Held while a status or a timeline is computed. `Client.long_request_lock` queues such
        # requests of one client.
        self._long_requests = threading.Lock()
        self._reply_threads: list[threading.Thread] = []

    def wait_for_replies(self) -> None:
        """Wait for replies in preparation, at most `tuning.reply_seconds` for each.

        So a client that asks for the server's end usually gets a reply. Only the replies of
        short-lived threads are waited for.
        """
        for thread in self._reply_threads:
            # A thread that is just being started cannot be joined yet.
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(tuning.reply_seconds)

    def handle_request(self, client: Client, request: dict[str, Any]) -> None:
        """Reply to an admin request, at once or later. Raise `Malformed` for a malformed one."""
        kind, number, drone = request.get("what"), request.get("id"), request.get("drone", 0)
        if not (isinstance(kind, str) and isinstance(number, int) and isinstance(drone, int)):
            raise Malformed("a malformed request")
        reply = partial(self._reply, client, number)
        run, compute = partial(self._run_in_thread, reply), partial(self._compute, client)
        joined_hosts, size = self._joined_hosts, request.get("drones", 0)
        try:
            if kind in DRONE_REQUESTS:
                if joined_hosts.is_joined_drone(drone):
                    joined_hosts.request(kind, drone, reply)
                else:
                    DRONE_REQUESTS[kind](self._dispatcher, drone, reply)
            elif kind == "status":
                run(partial(compute, self._status))
            elif kind == "drones":
                own = [describe_identity(each) for each in self._dispatcher.current_drones()]
                joined = [
                    {name: each[name] for name in IDENTITY_FIELDS} for each in joined_hosts.drones()
                ]
                reply(value=own + joined)
            elif kind == "setup":
                reply(value=self._setup)
            elif kind == "timeline":
                run(partial(self._timeline, client, joined_hosts.timelines()))
            elif kind == "news":
                cursor = _read_cursor(request.get("cursor"))
                run(partial(compute, partial(self._news, cursor)))
            elif kind == "refresh":
                run(self._pool.refresh)
            elif kind == "resize":
                run(partial(self._pool.resize, size))
            elif kind == "cancel":
                reply(value=self._cancel_tasks(_read_names(request.get("clients")), client))
            elif kind == "stop":
                self._stop(reply, bool(request.get("now")))
            else:
                reply(error=f"this server does not know the request {kind!r}")
        except RuntimeError as error:
            reply(error=str(error))

    def _timeline(
        self, client: Client, joined_timelines: list[Promise[Timeline]]
    ) -> dict[str, Any] | None:
        wait(joined_timelines, TIMELINE_TIMEOUT_SECONDS)

        def compute() -> dict[str, Any]:
            timeline = self._pool.timeline
            for joined_timeline in joined_timelines:
                if joined_timeline.done() and joined_timeline.exception() is None:
                    timeline += joined_timeline.result()
            return pack_timeline(timeline)

        return self._compute(client, compute)

    def _news(self, cursor: tuple[int, int]) -> dict[str, Any]:
        timeline, cursor = take_news(self._dispatcher, cursor)
        return {"timeline": pack_timeline(timeline), "cursor": cursor}

    def _compute(
        self, client: Client, compute: Callable[[], dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Compute a long reply, one at a time.

        At most one request of each client waits for those of others, so that a client with many
        requests delays only itself.
        """
        with client.long_request_lock, self._long_requests:
            return None if client.has_left else compute()

    def _stop(self, reply: Reply, now: bool) -> None:
        def stop() -> None:  # without the result, which may be any object
            self._on_stop(now)

        self._run_in_thread(reply, stop)

    def store_shared_value(self, client: Client, number: int, buffers: list[list[bytes]]) -> None:
        """Copy a client's value into the pool's shared memory."""

        def copy() -> None:
            store = self._dispatcher.registry.store
            assert store is not None
            value = store_pickled(buffers, store)
            self._post(partial(self._add_shared_value, client, number, value))

        self._run_in_thread(partial(self._reply, client, number), copy)

    def _add_shared_value(self, client: Client, number: int, value: Shared[Any]) -> None:
        """Keep a shared value for the client's later calls, unless the client has left."""
        if not client.has_left:
            client.session.shared[number] = value

    def _reply(self, client: Client, number: int, **fields: Any) -> None:
        """Send a reply. Any thread may call this."""
        # Packed by the caller, because a long reply comes from a short-lived thread.
        frames = pack_json(REPLY, {"id": number, **fields})
        self._post(partial(client.send, frames, requests=1))

    def _run_in_thread(self, reply: Reply, function: Callable[[], Any]) -> None:
        """Call `function` in a short-lived thread; send its result or its error as the reply."""
        thread = reply_thread(reply, function)
        self._reply_threads = [each for each in self._reply_threads if each.is_alive()] + [thread]
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started
            reply(error=str(error))


def _read_names(names: Any) -> list[str]:
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise Malformed("a request without a list of clients")
    return names


def _read_cursor(cursor: Any) -> tuple[int, int]:
    if not isinstance(cursor, list) or [*map(type, cursor)] != [int, int]:
        raise Malformed("a request for news without a cursor")
    return cursor[0], cursor[1]
