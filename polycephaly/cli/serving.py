"""The process of a pool that was started by name, from loading to its end.

    clean __main__ ── modules, file ──> loaded process ── fork ──> drones
                                          └── serve(name) ── waits for: SIGINT, SIGTERM, SIGHUP,
                                                             a client's `stop`, the pool's end

When asked to end, the process takes no more tasks, finishes the running ones, delivers their
results, and ends. When asked again, or asked to end at once, running tasks are not waited for:
`EndNow` is raised in the main thread, wherever that thread waits.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

from ..engines.remote import pool_registry
from ..pool.pool import Pool, dispatcher_of
from ..server.server import Server, serve
from ..timeline.format import count
from .daemon import ReportStart
from .journal import Journal
from .loading import CannotLoad, Setup, load

log = logging.getLogger("polycephaly")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndNow(BaseException):
    """End without waiting for running tasks."""


class EndRequest:
    """The request to end. The main thread waits for the request; any thread may make it."""

    def __init__(self) -> None:
        self.reason = ""  # not empty once the end was requested
        self._requested: SimpleQueue[None] = SimpleQueue()  # which signal handlers may put into
        self._at_once = False
        self._main = threading.get_ident()

    def request(self, reason: str, at_once: bool = False) -> None:
        if not self.reason:
            self.reason = reason
            self._at_once = at_once
            self._requested.put(None)
        elif at_once:  # the main thread is ending, and waits for running tasks
            signal.pthread_kill(self._main, signal.SIGTERM)

    def wait(self) -> None:
        """Wait for the request. Raise `EndNow`, now or later, if the end is to come at once."""
        for number in _SIGNALS:
            # Under nohup the process outlives SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._requested.get()
        if self._at_once:
            raise EndNow

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.reason:
            raise EndNow
        self.request(signal.Signals(number).name)


def serve_pool(
    name: str,
    drones: int | None,
    address: str,
    modules: tuple[str, ...],
    file: Path | None,
    options: dict[str, Any],
    in_background: bool,
    report_start: ReportStart,
) -> int:
    """Serve a named pool, in this process, until asked to end; return the exit status.

    Raise `ValueError` if `name` is malformed, `FileExistsError` if a pool of that name runs,
    `OSError`, and as `Pool` and `serve` do.
    """
    pool_registry.check_name_available(name)
    journal = Journal(name, in_background)
    try:
        setup = Setup.read(modules, file)
        load(setup)
    except CannotLoad as error:
        report_start(str(error), 1)
        return 1
    ending = EndRequest()
    pool = Pool(drones, name=name, output=journal.write_line, **options)
    dispatcher = dispatcher_of(pool)
    try:
        with (
            pool,
            serve(
                pool,
                address,
                name=name,
                on_stop=lambda now: ending.request("stop", now),
                _setup=setup._asdict(),
            ) as server,
        ):
            dispatcher.ended.add_done_callback(
                lambda _: ending.request(f"its drones have ended: {dispatcher.refusal}")
            )
            text = _startup_text(server, dispatcher.config.size, journal.path, in_background)
            report_start(text, 0)
            drones_text = count(dispatcher.config.size, "drone")
            log.info("%s serves %s at %s", name, drones_text, server.address)
            ending.wait()
            broken = dispatcher.ended.done()
            level = logging.ERROR if broken else logging.INFO
            log.log(level, "%s ends: %s", name, ending.reason)
            pool.shutdown(cancel_futures=True)
    except EndNow:
        log.info("%s has ended at once: %s", name, ending.reason)
        return 0
    return int(broken)


def _startup_text(server: Server, size: int, log_path: Path, in_background: bool) -> str:
    lines = [f"{server.name}: {count(size, 'drone')}, process {os.getpid()}, log {log_path}"]
    if not server.address.startswith("tcp://127."):
        file = pool_registry.card_path(server.name)
        lines += [
            f"The pool listens at {server.address}. "
            "On another host, with the same version of Python and polycephaly:",
            f"  scp {socket.gethostname()}:{file} .     "
            "(a user who can read this file can run code as you)",
            f"  polycephaly doit ./{file.name} CODE     "
            f"runs a task, as does polycephaly.connect('./{file.name}')",
            f"  polycephaly join ./{file.name} -n 4     lends four drones to the pool",
        ]
    if not in_background:
        lines.append("Ctrl-C ends the pool.")
    return "\n".join(lines)
