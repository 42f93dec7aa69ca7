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
from types import FrameType
from typing import Any

from ..engines.remote import pool_registry
from ..pool.pool import Pool
from ..server.server import Server, serve
from .daemon import ReportStart
from .journal import Journal
from .loading import CannotLoad, Setup, load

__all__ = ["Serving"]

log = logging.getLogger("polycephaly")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndNow(BaseException):
    """End without waiting for running tasks."""


class EndRequest:
    """The request to end. The main thread waits for the request; any thread may make it."""

    def __init__(self) -> None:
        self.reason = ""
        self._requested = threading.Event()
        self._at_once = False
        self._main = threading.get_ident()

    def request(self, reason: str, at_once: bool = False) -> None:
        if not self._requested.is_set():
            self.reason = reason
            self._at_once = at_once
            self._requested.set()
        elif at_once:  # the main thread is ending, and waits for running tasks
            signal.pthread_kill(self._main, signal.SIGTERM)

    def wait(self) -> None:
        """Wait for the request. Raise `EndNow`, now or later, if the end is to come at once."""
        for number in _SIGNALS:
            # Under nohup the process outlives SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        self._requested.wait()
        if self._at_once:
            raise EndNow

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested.is_set():
            raise EndNow
        self.request(signal.Signals(number).name)


class Serving:
    """A named pool and its server, in this process."""

    def __init__(
        self,
        name: str,
        drones: int | None,
        address: str,
        modules: tuple[str, ...],
        file: Path | None,
        options: dict[str, Any],
        in_background: bool,
    ) -> None:
        """Check the name and open the log.

        Raise `ValueError` if `name` is malformed, `FileExistsError` if a pool of that name runs,
        `OSError`.
        """
        pool_registry.check_name_available(name)
        self._name = name
        self._drones = drones
        self._address = address
        self._modules = modules
        self._file = file
        self._options = options
        self._in_background = in_background
        self._journal = Journal(name, in_background)

    def run(self, report_start: ReportStart) -> int:
        """Serve until asked to end; return the exit status. Raise as `Pool` and `serve` do."""
        try:
            setup = Setup.read(self._modules, self._file)
            load(setup)
        except CannotLoad as error:
            report_start(str(error), 1)
            return 1
        ending = EndRequest()
        pool = Pool(self._drones, name=self._name, output=self._journal.write_line, **self._options)
        try:
            with (
                pool,
                serve(
                    pool,
                    self._address,
                    name=self._name,
                    on_stop=lambda now: ending.request("stop", now),
                    _setup=setup.to_plain(),
                ) as server,
            ):
                pool._dispatcher.ended._hook(
                    lambda _: ending.request(f"its drones have ended: {pool._dispatcher.refusal}")
                )
                report_start(self._startup_text(server))
                log.info(
                    "%s serves %d drones at %s",
                    self._name,
                    pool._dispatcher.config.size,
                    server.address,
                )
                ending.wait()
                broken = pool._dispatcher.ended.done()
                log.log(
                    logging.ERROR if broken else logging.INFO,
                    "%s ends: %s",
                    self._name,
                    ending.reason,
                )
                pool.shutdown(cancel_futures=True)
        except EndNow:
            log.info("%s has ended at once: %s", self._name, ending.reason)
            return 0
        return int(broken)

    def _startup_text(self, server: Server) -> str:
        size = len(server._pool._dispatcher.handles)
        lines = [
            f"{self._name}: {size} drone{'s' * (size != 1)}, process {os.getpid()}, "
            f"log {self._journal.path}"
        ]
        if not server.address.startswith("tcp://127."):
            file = pool_registry.card_path(self._name)
            lines += [
                f"The pool listens at {server.address}. "
                "On another host, with the same version of Python and polycephaly:",
                f"  scp {socket.gethostname()}:{file} .     "
                "(a user who can read this file can run code as you)",
                f"  polycephaly doit ./{file.name} CODE     "
                f"runs a task, as does polycephaly.connect('./{file.name}')",
                f"  polycephaly join ./{file.name} -n 4     lends four drones to the pool",
            ]
        if not self._in_background:
            lines.append("Ctrl-C ends the pool.")
        return "\n".join(lines)
