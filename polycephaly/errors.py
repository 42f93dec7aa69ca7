"""What can go wrong, in words a caller can act on.

`DroneDied` is a `BrokenProcessPool`, so code written for the standard library's executor catches
it."""

from __future__ import annotations

import copy
from concurrent.futures.process import BrokenProcessPool
from typing import Any

__all__ = [
    "ChannelClosed", "Deadlock", "DroneDied", "ItemLost", "Lost", "NoSuchName", "PoreClosed", "RemoteError", "another",
]  # fmt: skip


class RemoteError(Exception):
    """Stands for a remote exception that cannot be pickled, or cannot be rebuilt here.

    Attributes: ``type_name`` (dotted name of the original type), ``message`` (its ``str``) and
    ``traceback`` (the remote traceback as text).
    """

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(type_name, message, traceback)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


class DroneDied(BrokenProcessPool):
    """The drone that held this work ended before it could answer.

    Attributes: ``drone`` (its name), ``exitcode`` (negative: ended by that signal, as in
    `multiprocessing`), ``running`` (what it was running, or None), ``stderr`` (the last lines that
    its program wrote there) and ``stack`` (what `faulthandler` wrote there, or "").

    >>> import os, polycephaly as poly
    >>> with poly.Pool(1) as pool:
    ...     died = pool.promise(os._exit, 3).exception()
    >>> died.exitcode, died.drone[-2:]
    (3, '.0')
    """

    def __init__(
        self,
        message: str,
        *,
        drone: str = "",
        exitcode: int | None = None,
        running: str | None = None,
        stderr: str = "",
        stack: str = "",
    ) -> None:
        super().__init__(message)
        self.drone = drone
        self.exitcode = exitcode
        self.running = running
        self.stderr = stderr
        self.stack = stack

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__


class Lost(DroneDied):
    """The drone that kept a value ended, and the value with it; see `Kept`.

    Attributes as of `DroneDied`, where it died.

    >>> import os, polycephaly as poly
    >>> with poly.Pool(1) as pool:
    ...     kept = pool.promise(list, range(3), keep=True).value
    ...     died = pool.promise(os._exit, 3).exception()
    ...     kept.value
    Traceback (most recent call last):
    polycephaly.errors.Lost: ...
    """


class NoSuchName(NameError, KeyError):
    """A drone's namespace has no such name: the error of a mapping, and of code that uses the name.

    >>> import polycephaly as poly
    >>> with poly.Drone() as drone:
    ...     try:
    ...         drone["x"]
    ...     except KeyError as error:
    ...         print(error)
    name 'x' is not defined
    """

    __str__ = Exception.__str__  # a KeyError shows the repr of its text


class ChannelClosed(Exception):
    """The channel was closed: nothing can be sent any more, and there is nothing left to receive.

    >>> from polycephaly import green
    >>> channel = green.Channel(1)
    >>> channel.put("last")
    >>> channel.close()
    >>> channel.get()
    'last'
    >>> channel.get()
    Traceback (most recent call last):
    polycephaly.errors.ChannelClosed: ...
    """


class PoreClosed(Exception):
    """The pore was closed, or its owner has ended: nothing can be told, and it cannot be mapped any
    more.

    Attributes: ``pore`` (its name), ``owner`` (the process that owned it) and ``ended`` (whether
    that has ended)."""

    def __init__(
        self, message: str, *, pore: str = "", owner: int = 0, ended: bool = False
    ) -> None:
        super().__init__(message)
        self.pore = pore
        self.owner = owner
        self.ended = ended

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__


class ItemLost(Exception):
    """An item was given to another image, which ended before it said that it had it: whether it had
    is not known.

    Raised by `Channel.send`. Nobody else will get the item: send it again if twice is better than
    never."""


class Deadlock(RuntimeError):
    """Everybody waits, and nothing can wake anybody. The message lists who waits, and where."""


_HEAP_TYPE = 1 << 9  # of a class made by Python code


def another(error: BaseException) -> BaseException:
    """The same once more. An error that is raised gets a traceback, which holds the frames of
    whoever met it: so each one gets an error of his own, and what we keep is never raised. (But for
    one that cannot be copied truly: that is given itself.) Never raises."""
    for copied in (copy.copy, _without_init):
        try:
            twin = copied(error)
            if type(twin) is type(error) and tuple(map(id, twin.args)) == tuple(
                map(id, error.args)
            ):
                twin.__cause__, twin.__suppress_context__ = (
                    error.__cause__,
                    error.__suppress_context__,
                )
                return twin
        except Exception:
            continue
    return error.with_traceback(None)


def _without_init(error: BaseException) -> BaseException:
    """For a class whose constructor takes other arguments than it hands on. Raises where it has
    more than its `args` and its `__dict__`: fields of C, as an `OSError` has, or slots."""
    kind = type(error)
    builtin = next(base for base in kind.__mro__ if not base.__flags__ & _HEAP_TYPE)
    if builtin.__basicsize__ != BaseException.__basicsize__ or any(
        "__slots__" in vars(base) for base in kind.__mro__
    ):
        raise TypeError(f"{kind.__qualname__} cannot be copied")
    twin: BaseException = kind.__new__(kind, *error.args)
    twin.args = error.args
    twin.__dict__.update(error.__dict__)
    return twin
