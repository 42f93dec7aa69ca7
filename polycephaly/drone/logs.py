"""Send log records of a drone to the loggers of the controller.

    log.warning(...) ── loggers' levels and filters ──> LogForwarder ── chunk ──> stderr's pipe
    reactor ── after releasing its lock ──> getLogger(record.name).handle(record), with record.drone

The handlers that a drone has inherited write to files and streams of the controller, so they are
neither used nor flushed nor closed here. A `LogForwarder` replaces them: at the root, and at each
logger that does not propagate and had handlers. Handlers that tasks add in the drone belong to the
drone and work in addition. Code that removes the root's handlers
(`logging.basicConfig(force=True)`, `logging.config`) removes the forwarder too; records then go to
the handlers which that code adds.

A forwarder takes no lock and uses no stream: a record is one write to a pipe (more, if the record
is long). So a signal handler or a finalizer may log at any point, and records logged before a crash
have arrived.
"""

from __future__ import annotations

import logging
from typing import Any

from .. import _compat
from ..wire.log_records import pack_record
from .console import send_log_record

_inherited: list[Any] = []  # the controller's handlers, kept so that none is closed here


class LogForwarder(logging.Handler):
    """Handler that sends each record to the controller."""

    def createLock(self) -> None:  # noqa: N802 - a method of `logging.Handler`
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        passed = self.filter(record)
        if passed:
            self.emit(passed if isinstance(passed, logging.LogRecord) else record)
        return bool(passed)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            send_log_record(pack_record(record))
        except Exception:  # for example, arguments that do not fit the message
            self.handleError(record)


def install_log_forwarding() -> None:
    """Install the forwarders in a new drone, after its console."""
    _inherited.extend(_compat.detach_log_handlers())
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        if isinstance(logger, logging.Logger):
            _inherited.extend(logger.handlers)
            forwarder = LogForwarder()
            # The formatter is not used here, but code that starts processes copies the formatter of
            # multiprocessing's logger.
            formatters = (handler.formatter for handler in logger.handlers)
            forwarder.setFormatter(next(filter(None, formatters), logging.Formatter()))
            forwards = logger is logging.root or (logger.handlers and not logger.propagate)
            logger.handlers = [forwarder] if forwards else []
