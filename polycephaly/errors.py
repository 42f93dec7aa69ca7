"""The exceptions of the package.

`DroneDied` is a `BrokenProcessPool`, so code that is written for the standard library's executor
catches it.
"""

from __future__ import annotations

import signal
from concurrent.futures.process import BrokenProcessPool
from types import FrameType, TracebackType
from typing import Any


class RemoteError(Exception):
    """A remote exception that cannot be pickled, or cannot be rebuilt in this process.

    Attributes
    ----------
    type_name
        Dotted name of the original type.
    message
        ``str`` of the original exception.
    traceback
        The remote traceback as text.
    """

    def __init__(self, type_name: str, message: str, traceback: str = "") -> None:
        super().__init__(type_name, message, traceback)
        self.type_name = type_name
        self.message = message
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}" if self.message else self.type_name


class DroneDied(BrokenProcessPool):
    """The drone that had this task ended before it could return a result.

    Attributes
    ----------
    drone
        Name of the drone.
    exitcode
        Exit code. Negative: the signal that ended the drone, as in `multiprocessing`.
    running
        The task that was running, or None.
    stderr
        The last lines that the drone's process wrote to stderr.
    stack
        The stack that `faulthandler` wrote there, or "".

    Examples
    --------
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


class Lost(DroneDied):
    """A value was lost, because the drone that kept it ended; see `Kept`.

    The attributes are those of `DroneDied`, if the drone died.

    Examples
    --------
    >>> import os, polycephaly as poly
    >>> with poly.Pool(1) as pool:
    ...     kept = pool.promise(list, range(3), keep=True).value
    ...     died = pool.promise(os._exit, 3).exception()
    ...     kept.value
    Traceback (most recent call last):
    polycephaly.errors.Lost: ...
    """


class NoSuchName(NameError, KeyError):
    """A drone's namespace has no such name.

    Both the error of a mapping (`KeyError`) and of code that uses the name (`NameError`).

    Examples
    --------
    >>> import polycephaly as poly
    >>> with poly.Drone() as drone:
    ...     try:
    ...         drone["x"]
    ...     except KeyError as error:
    ...         print(error)
    name 'x' is not defined
    """

    __str__ = Exception.__str__  # KeyError would show the repr of the text


class ChannelClosed(Exception):
    """The channel was closed: nothing more can be sent, and no item is left to receive.

    Examples
    --------
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
    """The pore was closed, or its owner ended: no message can be sent, and no mapping made.

    Attributes
    ----------
    pore
        Name of the pore.
    owner
        Process id of the owner.
    ended
        Whether the owner has ended.
    """

    def __init__(
        self, message: str, *, pore: str = "", owner: int = 0, ended: bool = False
    ) -> None:
        super().__init__(message)
        self.pore = pore
        self.owner = owner
        self.ended = ended


class ItemLost(Exception):
    """An item was sent to another process, which ended before it acknowledged the item.

    Whether that process received the item is unknown. Raised by `Channel.send`. No other receiver
    gets the item: send the item again if receiving twice is better than not at all.
    """


class Deadlock(RuntimeError):
    """All threads, or the promises of a cycle, wait for each other, and nothing can wake any of
    them.

    The message lists the threads and where they wait, or the promises.
    """


_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by Python code


def copy_error(error: BaseException) -> BaseException:
    """Return a fresh copy of `error`, or `error` itself if it cannot be copied faithfully. Never
    raises.

    Raising an error attaches a traceback, which holds the frames of the thread that raises it. So
    each waiter gets a copy, and the stored original is never raised.
    """
    for make_copy in (_copy_by_reduce, _copy_without_init):
        try:
            twin = make_copy(error)
            if type(twin) is type(error) and tuple(map(id, twin.args)) == tuple(
                map(id, error.args)
            ):
                twin.__cause__, twin.__suppress_context__ = (
                    error.__cause__,
                    error.__suppress_context__,
                )
                if hasattr(error, "__notes__"):  # in a list of its own: notes may be added to one
                    twin.__notes__ = [*error.__notes__]
                return twin
        except Exception:
            continue
    return error.with_traceback(None)


def _copy_by_reduce(error: BaseException) -> BaseException:
    """Copy an error as `copy.copy` does, without regard to `copyreg`: by the functions that tblib
    registers there for all exceptions, both would have one `__dict__`, and slots would be lost.
    """
    reduced: Any = error.__reduce_ex__(4)
    make, args, *state = reduced
    twin: BaseException = make(*args)
    if state and state[0]:
        twin.__setstate__(state[0])
    return twin


def _copy_without_init(error: BaseException) -> BaseException:
    """Copy an error whose constructor takes other arguments than it passes on.

    Raise `TypeError` if the error has more state than `args` and `__dict__`: C fields, as an
    `OSError` has, or slots.
    """
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


def stop_as_error(stop: StopIteration | StopAsyncIteration, raised_by: str) -> RuntimeError:
    """Return the error to raise in place of `stop` where a loop would take `stop` for its end (PEP
    479). It has the notes of `stop`, which say what has failed.
    """
    kind = type(stop).__qualname__
    error = RuntimeError(f"{raised_by} raised {kind}, which a loop would take for its end")
    for note in getattr(stop, "__notes__", ()):
        error.add_note(note)
    error.__cause__ = stop
    return error


def is_own_frame(frame: FrameType) -> bool:
    """Return whether the frame is of this package."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "polycephaly"


def skip_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame of users on. A program that keeps the error would
    otherwise keep messages with their shared memory, or other requests, to which our frames refer.
    """
    while trace is not None and is_own_frame(trace.tb_frame):
        trace = trace.tb_next
    return trace


def type_with_article(value: object) -> str:
    """Return the name of the type of `value` for a message, as in "an Engine"."""
    name = type(value).__qualname__
    return f"{'an' if name[:1] in 'AEIOUaeiou' else 'a'} {name}"


def describe_exit(code: int) -> str:
    """Return how a process with this exit code ended, in words that follow its name."""
    if code >= 0:
        return f"ended with exit status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


class Malformed(ValueError):
    """A message with an invalid format. Such messages are logged and dropped."""
