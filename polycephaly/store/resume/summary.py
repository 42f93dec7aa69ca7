"""What a file of results has: `polycephaly.resumed`."""

from __future__ import annotations

import os
from contextlib import closing
from typing import NamedTuple

from .calls import connect


class FailedCall(NamedTuple):
    """A call that has failed, as `resumed` gives it.

    Attributes
    ----------
    function : str
        The function's module and name, as in ``__main__:load``.
    item : int
        The index of the call in its `map`.
    arguments : str
        The shortened `repr` of its arguments; "" if it is not known.
    error : str
        The type and message of the error.
    traceback : str
        The traceback, with that in the drone.
    """

    function: str
    item: int
    arguments: str
    error: str
    traceback: str

    def __str__(self) -> str:
        arguments = f": {self.arguments}" if self.arguments else ""
        return f"{self.function}, item {self.item}{arguments}: {self.error}"


class Resumed(NamedTuple):
    """What the file of a map with ``resume=`` has; ``str()`` gives some lines.

    Attributes
    ----------
    finished : int
        How many calls have a result, which will not be made again.
    failed : int
        How many calls have failed, and will be made again.
    failures : list of FailedCall
        Those, in the order of their items.
    """

    finished: int
    failed: int
    failures: list[FailedCall]

    def __str__(self) -> str:
        head = f"{self.finished:,} calls finished, {self.failed:,} failed"
        return "\n".join([head, *map(str, self.failures)])


def resumed(path: str | os.PathLike[str]) -> Resumed:
    """Return what is in a file that `Pool.map` was given as ``resume=``.

    The file may be in use: what ended in the last half second may be missing. No result is
    unpickled.

    Parameters
    ----------
    path
        The file.

    Returns
    -------
    Resumed
        How many calls have finished and failed, and the failures.

    Raises
    ------
    OSError
        If the file is not there or cannot be opened.
    ValueError
        If it is another kind of file.

    Examples
    --------
    >>> import os, tempfile
    >>> import polycephaly as poly
    >>> def invert(n):
    ...     return 1 / n
    >>> path = os.path.join(tempfile.mkdtemp(), "run.db")
    >>> with poly.Pool(2) as pool:
    ...     results = list(pool.map(invert, [1, 2, 0], resume=path, return_exceptions=True))
    >>> found = poly.resumed(path)
    >>> found.finished, found.failed
    (2, 1)
    >>> found.failures[0].item, found.failures[0].error
    (2, 'ZeroDivisionError: division by zero')
    """
    with closing(connect(os.path.realpath(os.fspath(path)), create=False)) as db:
        (finished,) = db.execute("SELECT count(*) FROM calls WHERE error IS NULL").fetchone()
        found = db.execute(
            "SELECT functions.name, item, arguments, error, traceback FROM calls "
            "JOIN functions ON functions.id = function WHERE error IS NOT NULL "
            "ORDER BY functions.name, item"
        ).fetchall()
    return Resumed(finished, len(found), [FailedCall(*each) for each in found])
