"""The exceptions of the package.

`DroneDied` is a `BrokenProcessPool`, so code that is written for the standard library's executor
catches it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from types import (
    BuiltinFunctionType,
    FrameType,
    GetSetDescriptorType,
    MemberDescriptorType,
    TracebackType,
)
from typing import Any

try:
    from concurrent.futures.process import BrokenProcessPool
except RuntimeError as error:  # "can't register atexit after shutdown"
    raise RuntimeError(
        "the main thread has ended, and CPython loads no process pools any more: name "
        "polycephaly.Pool (or Drone, or connect) once before that, and the pools of other threads "
        "work"
    ) from error


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


def copy_error(error: BaseException) -> BaseException:
    """Return a fresh copy of `error`, or `error` itself if it cannot be copied faithfully. Never
    raises.

    Raising an error attaches a traceback, which holds the frames of the thread that raises it. So
    each waiter gets a copy, and the stored original is never raised.
    """
    for make_copy in (_copy_by_reduce, copy_state):
        try:
            twin = make_copy(error)
            if type(twin) is type(error) and tuple(map(id, twin.args)) == tuple(
                map(id, error.args)
            ):
                set_base_field(twin, "__cause__", error.__cause__)
                set_base_field(twin, "__suppress_context__", error.__suppress_context__)
                if hasattr(error, "__notes__"):  # in a list of its own: notes may be added to one
                    twin.__dict__["__notes__"] = [*error.__notes__]
                return twin
        except Exception:
            continue
    return error.with_traceback(None)


def _copy_by_reduce(error: BaseException) -> BaseException:
    """Copy an error as its class says, without regard to `copyreg`: by the functions that tblib
    registers there for all exceptions, both would have one `__dict__`.
    """
    if not says_how_to_pickle(type(error)):
        raise TypeError("copied by its state")
    reduced: Any = error.__reduce_ex__(4)
    make, args, *state = reduced
    twin: BaseException = make(*args)
    if state and state[0]:
        twin.__setstate__(state[0])
    return twin


# -- the state of an exception ---------------------------------------------------------------------

# Pickle calls an exception's class with its `args`, and sets `__dict__`. That fails, or makes a
# different exception, if the constructor takes other arguments than it passes on; and it loses what
# lies in fields of C structures (`SystemExit.code`) and in slots. The functions below read and
# write all of these, and call no constructor but the builtin one.

_MISSING = object()


def says_how_to_pickle(kind: type[BaseException]) -> bool:
    """Return whether a class of exceptions, or a base of it, defines how it is pickled. What the
    builtin classes define does not count: it loses what their subclasses add.
    """
    return any(
        base.__module__ != "builtins" and not vars(base).keys().isdisjoint(REDUCE_METHODS)
        for base in kind.__mro__
    )


REDUCE_METHODS = ("__reduce__", "__reduce_ex__")


def _fields(kind: type[BaseException]) -> dict[str, Any]:
    """Return the descriptors of the fields in C structures and of the slots, by their full names.

    Those of `BaseException` are its links and `args`; those of groups are set as these are made.
    """
    return {
        f"{base.__module__}.{base.__qualname__}.{name}": field
        for base in kind.__mro__
        if base not in (BaseException, BaseExceptionGroup)
        for name, field in vars(base).items()
        if isinstance(field, MemberDescriptorType | GetSetDescriptorType)
        and name not in ("__dict__", "__weakref__")
    }


def _read(error: BaseException, field: Any) -> Any:
    try:
        return field.__get__(error)
    except Exception:  # an empty slot; `characters_written` of most errors
        return _MISSING


def fields_of(error: BaseException) -> dict[str, Any]:
    """Return the values of the fields and slots of `error` that have one."""
    values = {name: _read(error, field) for name, field in _fields(type(error)).items()}
    return {name: value for name, value in values.items() if value is not _MISSING}


def make_exception(
    kind: type[BaseException],
    made_from: tuple[Any, ...],
    args: tuple[Any, ...],
    attributes: dict[str, Any],
    fields: dict[str, Any],
) -> BaseException:
    """Return an exception of the given state. `made_from` are the arguments for the builtin
    constructor: message and members of a group, else `args`.

    Raises `TypeError` or `AttributeError` if the class allows no such state.
    """
    error = allocate_exception(kind, made_from)
    set_state(error, args, attributes, fields)
    return error


def allocate_exception(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Make an exception by the constructor of its builtin base, which fills in what it takes from
    these arguments; without them, if it refuses them.
    """
    base: Any = kind
    while not isinstance(vars(base).get("__new__"), BuiltinFunctionType):
        base = base.__base__
    error: BaseException
    try:
        error = base.__new__(kind, *args)
        base.__init__(error, *args)
    except Exception:
        error = base.__new__(kind)
    return error


def set_state(
    error: BaseException, args: tuple[Any, ...], attributes: dict[str, Any], fields: dict[str, Any]
) -> None:
    set_base_field(error, "args", args)
    known = _fields(type(error))
    for name in known | fields:
        value = fields.get(name, _MISSING)
        if name in known:
            _set_field(error, known[name], value)
        elif value is not None:  # as of another version of Python or of a library
            raise TypeError(f"the class has no {name} in this process")
    error.__dict__.update(attributes)


def set_base_field(error: BaseException, name: str, value: object) -> None:
    """Set `args`, or a link to another error, though the class (a frozen dataclass) forbids it."""
    vars(BaseException)[name].__set__(error, value)


def _set_field(error: BaseException, field: Any, value: Any) -> None:
    before = _read(error, field)
    if before is value:
        return
    if value is None or value is _MISSING:
        # An empty field of a C structure reads as None, and an empty slot not at all. `str` shows
        # None where it was set.
        with suppress(AttributeError, TypeError):
            field.__delete__(error)
        before = _read(error, field)
        if before is value or before is None:
            return
    try:
        if value is _MISSING:
            raise TypeError(f"{field.__name__} cannot be emptied")
        field.__set__(error, value)
    except (AttributeError, TypeError):
        if not before == value:  # else computed from the rest, and read-only
            raise


def copy_state(error: BaseException) -> BaseException:
    """Return an exception with the same objects in all its fields, without links and traceback.

    Raises `TypeError` if its copy reads otherwise, as that of a class in C with hidden state may.
    """
    state = args_to_make(error), error.args, error.__dict__, fields_of(error)
    twin = make_exception(type(error), *state)
    for show in (str, repr):
        # If they differ in their own addresses, two copies differ, too.
        shown = text_by(show, twin)
        if shown != text_by(show, error) and shown == text_by(
            show, make_exception(type(error), *state)
        ):
            raise TypeError(f"its copy reads otherwise: {shown[:MAX_SHOWN_CHARACTERS]}")
    return twin


MAX_SHOWN_CHARACTERS = 100


def args_to_make(error: BaseException) -> tuple[Any, ...]:
    """Return `made_from` for `make_exception`."""
    return (
        (error.message, error.exceptions) if isinstance(error, BaseExceptionGroup) else error.args
    )


def text_by(show: Callable[[BaseException], str], error: BaseException) -> str:
    """Return ``show(error)``, where `show` is `str` or `repr`; never raises."""
    try:
        return show(error)
    except BaseException as broken:  # a SystemExit of the error's own code, too
        return f"<__{show.__name__}__ raised {type(broken).__name__}>"


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
