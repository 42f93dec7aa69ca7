"""A logger whose users' filters and handlers cannot end the thread that logs."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress
from typing import Any


class SafeLog(logging.LoggerAdapter[logging.Logger]):
    """A logger for threads that serve all: errors of users' filters and handlers are printed."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        try:
            self.logger.log(level, msg, *args, stacklevel=2, **kwargs)  # of the caller of `log`
        except Exception:
            if logging.raiseExceptions and sys.stderr is not None:  # as logging's own errors
                with suppress(Exception):
                    traceback.print_exc()
