"""What is logged in a drone goes to the controller's loggers.

    log.warning(...) ── its logger's level and filters, as in the snapshot ──> Courier ── a chunk ──> stderr's pipe
    hub ── after the turn ──> logging.getLogger(record.name).handle(record)      with record.drone

The handlers that the drone has inherited write to the main image's files and streams: none of them
is used here, nor flushed or closed. In their place stands a `Courier`: at the root, and at each
logger that does not propagate and had handlers. Those that work adds in the drone are the drone's
own, and work there in addition; what takes the root's handlers away
(`logging.basicConfig(force=True)`, `logging.config`) takes the courier too: then what is logged is
just printed.

A courier takes no lock and uses no stream: a record is one write to a pipe (more, if it is long).
So a signal handler or a finalizer may log wherever it comes, and what was logged before a crash has
arrived."""

from __future__ import annotations

import logging
from typing import Any

from ..wire.log_records import pack_record
from .console import send_record

__all__ = ["send_logs_home"]

_inherited: list[Any] = []


class Courier(logging.Handler):
    """Sends each record home."""

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        passed = self.filter(record)
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            send_record(pack_record(record))
        except Exception:  # its arguments do not fit its message, say
            self.handleError(record)


def send_logs_home() -> None:
    """In a fresh drone, once it has its console."""
    module: Any = logging
    _inherited.extend((module._handlerList[:], dict(module._handlers)))
    del module._handlerList[
        :
    ]  # or `logging.config` and `logging.shutdown` would flush and close them
    module._handlers.clear()
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            _inherited.extend(logger.handlers)
            courier = Courier()
            # The formatter formats nothing here, but what starts processes copies that of
            # multiprocessing's logger.
            formatters = (handler.formatter for handler in logger.handlers)
            courier.setFormatter(next(filter(None, formatters), logging.Formatter()))
            takes = logger is logging.root or (logger.handlers and not logger.propagate)
            logger.handlers = [courier] if takes else []
