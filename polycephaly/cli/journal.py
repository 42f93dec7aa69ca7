"""The log of a named pool: the output of its drones and the messages of its server.

    drones' lines ─────┐
    logging ───────────┼──> $XDG_STATE_HOME/polycephaly/NAME.log (0600) ── at 8 MiB ──> NAME.log.1
    descriptors 1, 2 ──┘ (of a pool in the background)

The log stays after the pool has ended in any way, because it may contain the reason. The server's
process writes the log. In the background, child processes that inherit descriptors 1 and 2, such as
the zygote, write to the log by these. Forked children inherit the handlers and remove them: the
drones' own log records arrive through the drones' pipes.
"""

from __future__ import annotations

import logging
import os
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING

from ..engines.remote.pool_registry import check_name
from ..runtime.tuning import tuning
from ..wire.output import Line, forward

if TYPE_CHECKING:
    from io import TextIOWrapper

_FILE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
_TERMINAL_FORMAT = "%(levelname)s: %(message)s"
_CURE = "set XDG_STATE_HOME to a directory that you may write into"


def log_path(name: str) -> Path:
    """Return the path of the log of the pool `name`, whether or not there is one.

    Raise `ValueError` if `name` is malformed, and `RuntimeError` if no home directory is known.
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/state")
    if not os.path.isabs(base):  # no HOME, and a user without a passwd entry, as in a container
        raise RuntimeError(f"without a home directory, there is no place for logs: {_CURE}")
    return Path(base, "polycephaly", f"{check_name(name)}.log")


def rotated_path(path: Path) -> Path:
    """Return the path of the older part of the log, from before the last rotation."""
    return path.with_name(f"{path.name}.1")


class _LogFile(RotatingFileHandler):
    """A rotating log file.

    With ``streams``, descriptors 1 and 2 go to the file as well: output of C code, or of an
    interpreter that dies.
    """

    def __init__(self, path: Path, streams: bool) -> None:
        self._streams = streams
        super().__init__(path, maxBytes=tuning.log_bytes, backupCount=1, encoding="utf-8")

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.baseFilename, flags, 0o600)
        file = os.fdopen(fd, "a", encoding=self.encoding, errors="backslashreplace")
        if self._streams:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        return file


class Journal:
    """Writes the root logger's records, and drones' lines, to the log until this process ends.

    In the foreground both also go to the terminal. In the background descriptors 1 and 2 go to the
    log. The level of the logger "polycephaly" becomes INFO. Raise `OSError` if the log cannot be
    written.
    """

    def __init__(self, name: str, in_background: bool) -> None:
        self.path = log_path(name)
        self._in_background = in_background
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = _LogFile(self.path, streams=in_background)
        except OSError as error:
            text = f"{error.strerror}, so the log cannot be written: {_CURE}"
            raise OSError(error.errno, text, error.filename) from None
        self._file.setFormatter(logging.Formatter(_FILE_FORMAT))
        self._handlers: list[logging.Handler] = [self._file]
        if not in_background:
            terminal = logging.StreamHandler(sys.stderr)
            terminal.setFormatter(logging.Formatter(_TERMINAL_FORMAT))
            self._handlers.append(terminal)
        for handler in self._handlers:
            logging.getLogger().addHandler(handler)
        logging.getLogger("polycephaly").setLevel(logging.INFO)
        os.register_at_fork(after_in_child=self._remove_handlers)

    def write_line(self, line: Line) -> None:
        """Write a line of a drone to the log and, in the foreground, to this process's streams.

        Any thread may call this.
        """
        self._file.handle(logging.makeLogRecord({"levelname": f"[{line.drone}]", "msg": line.text}))
        if not self._in_background:
            forward(line)

    def _remove_handlers(self) -> None:
        """In a forked child: remove the handlers, because only the parent process uses them."""
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)
