"""The file of a map that can be resumed: the results and failures of calls, by their keys.

    functions   name, digest                      what the functions were made of
    calls       key, function, item, result       or the error, its traceback and the arguments

It is an SQLite file with a rollback journal, since the other kind, WAL, needs memory that all
processes share, which a network file system does not have.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from .identity import Identity

APPLICATION_ID = 0x706F6C79
VERSION = 1
_BUSY_SECONDS = 30.0
"""How long to wait while somebody else reads the file, as with the command `sqlite3`."""
_MAX_INLINE_BYTES = 4096
"""Results up to this size are read when the keys are looked up."""

_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {VERSION};
CREATE TABLE functions (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, digest BLOB NOT NULL);
CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    function INTEGER NOT NULL REFERENCES functions,
    item INTEGER NOT NULL,
    result BLOB,
    python TEXT,
    error TEXT,
    traceback TEXT,
    arguments TEXT
);
"""
_FIND = f"""
SELECT id, python, CASE WHEN length(result) <= {_MAX_INLINE_BYTES} THEN result END
FROM calls WHERE key = ? AND error IS NULL
"""
_ADD = """
INSERT OR REPLACE INTO calls (function, key, item, result, python, error, traceback, arguments)
VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_REFUSALS = (sqlite3.DataError, OverflowError)
"""Errors of one row: SQLite's limit of a gigabyte."""


class Ended(NamedTuple):
    """A call that has ended, as it is stored: with a result, or else an error."""

    key: bytes
    item: int  # its index in the map
    result: bytes | None
    # Of a result that carries code by value, the version of Python that can run it.
    python: str | None = None
    error: str | None = None
    traceback: str | None = None
    arguments: str | None = None


class Found(NamedTuple):
    """A stored result: the pickle, or the number under which `CallFile.read` gives it."""

    id: int
    python: str | None
    result: bytes | None


class CallFile:
    """The open file, for all threads of the process that has opened it.

    `lock` is held while SQLite works, so that a fork in another thread can wait for that.
    """

    def __init__(self, path: str) -> None:
        self.lock = Lock()
        self._db = connect(path, create=True)
        self._function = 0

    def use(self, identity: Identity, changed: str) -> int:
        """Store and find calls of this function from now on. Return how many results it has.

        Raises `ValueError` if the function has changed and `changed` is "refuse".
        """
        name, digest = identity
        with self.lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            row = self._db.execute(
                "SELECT id, digest FROM functions WHERE name = ?", (name,)
            ).fetchone()
            if row is None:
                add = "INSERT INTO functions (name, digest) VALUES (?, ?)"
                row = self._db.execute(add, identity).lastrowid, digest
            elif row[1] != digest:
                if changed == "refuse":
                    raise Changed(name)
                if changed == "again":
                    self._db.execute("DELETE FROM calls WHERE function = ?", row[:1])
                self._db.execute("UPDATE functions SET digest = ? WHERE id = ?", (digest, row[0]))
            self._function = row[0]
            count = "SELECT count(*) FROM calls WHERE function = ? AND error IS NULL"
            (results,) = self._db.execute(count, row[:1]).fetchone()
        return int(results)

    def find(self, keys: Iterable[bytes]) -> list[Found | None]:
        """Return the results of the calls with these keys, None where there is none."""
        with self.lock, self._db:
            self._db.execute("BEGIN")  # else SQLite would lock the file for each key
            rows = [self._db.execute(_FIND, (key,)).fetchone() for key in keys]
        return [None if row is None else Found(*row) for row in rows]

    def read(self, number: int) -> bytes:
        """Return the result of this number."""
        with self.lock:
            row = self._db.execute("SELECT result FROM calls WHERE id = ?", (number,)).fetchone()
        result: bytes = row[0]
        return result

    def add(self, ended: Sequence[Ended]) -> list[tuple[Ended, Exception]]:
        """Store calls, all or none, but for those that SQLite refuses, as a result of more than a
        gigabyte; return these, with the reasons.
        """
        try:
            self._add_all(ended)
            return []
        except _REFUSALS as error:
            if len(ended) == 1:
                return [(ended[0], error)]
        return [refused for each in ended for refused in self.add([each])]

    def _add_all(self, ended: Sequence[Ended]) -> None:
        function = self._function
        with self.lock, self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(_ADD, ((function, *each) for each in ended))

    def close(self) -> None:
        with self.lock:
            self._db.close()


class Changed(ValueError):
    """The function of this name is another one than that of the file."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def connect(path: str, *, create: bool) -> sqlite3.Connection:
    """Open a file of results; if `create`, one that is not there or is empty is made.

    Raises `ValueError` if it is another kind of file, and `OSError` if it cannot be opened.
    """
    if not create and not os.path.exists(path):
        raise FileNotFoundError(f"there is no file {path!r}")
    try:
        db = sqlite3.connect(
            path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
    except sqlite3.OperationalError as error:
        raise OSError(f"{path!r} cannot be opened: {error}") from error
    try:
        _check(db, path, create)
    except BaseException as error:
        db.close()
        if type(error) is sqlite3.DatabaseError:
            raise ValueError(f"{path!r} is no file of results: {error}") from error
        raise
    return db


def _check(db: sqlite3.Connection, path: str, create: bool) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if tables == application == version == 0:
        if create:
            db.execute("PRAGMA journal_mode = DELETE")
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            return
        raise ValueError(f"{path!r} is empty")
    if application != APPLICATION_ID:
        raise ValueError(f"{path!r} is an SQLite file of another program")
    if version != VERSION:
        raise ValueError(
            f"{path!r} was written by another version of polycephaly (its format is {version}, "
            f"and this one's is {VERSION})"
        )
    if create:
        db.execute("PRAGMA journal_mode = DELETE")
