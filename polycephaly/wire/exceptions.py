"""Pickling of exceptions, so that an error reaches the controller as the exception it was.

Pickle calls an exception's class with its `args`. That fails, or builds something else, for every
class whose constructor takes other arguments than it passes to `Exception.__init__`. Pickle also
leaves out the cause, the context and the traceback. So an exception travels as a
`_PackedException`: the first body below that rebuilds the exception correctly (tested in the drone,
before sending), its cause and context packed likewise, and its traceback as text.

    "pickled"   its own pickle gives the same type and args
    "rebuilt"   class.__new__, then args and attributes, without __init__; not used if the class
                itself defines how it is pickled and that fails: then it is not meant to be pickled
    "group"     an exception group: message, and each member packed likewise
    "text"      none of these works: the error arrives as RemoteError, with the reason

The rebuilt exception has the original's cause and context. The remote traceback becomes the last
cause of the chain, a `concurrent.futures.process._RemoteTraceback`, so that printing the exception
shows the remote lines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pickle import dumps, loads
from traceback import format_exception
from types import TracebackType
from typing import Any, NamedTuple

from .._compat import remote_traceback_type
from ..errors import RemoteError

_OS_FIELDS = ("errno", "strerror", "filename", "filename2")
_REDUCE_METHODS = ("__reduce__", "__reduce_ex__")
_MAX_CHAIN_LENGTH = 100
"""Exceptions of a chain that travel; the text has more of them."""
MAX_DESCRIPTION_CHARACTERS = 300
"""Of an error's message, in a list of errors."""


class _PackedException(NamedTuple):
    body: str
    data: bytes
    members: tuple[Any, ...]
    type_name: str
    message: str
    extra: dict[str, Any]  # attributes that are in neither args nor __dict__
    cause: Any
    context: Any
    suppress_context: bool


def pack_exception(error: BaseException, pickle_value: Callable[[object], bytes]) -> bytes:
    """Return `error` with its whole chain as bytes.

    Never fails: an exception that cannot be pickled is sent as text.
    """
    text = "".join(format_exception(type(error), error, _without_own_frames(error.__traceback__)))
    return dumps((_pack(error, pickle_value, {}, 0), text), 5)


def unpack_exception(data: bytes) -> BaseException:
    """Return the exception, or a `RemoteError` if this process cannot rebuild it."""
    packed, text = loads(data)
    error = _unpack(packed, text, {})
    last, seen = error, {id(error)}
    while last.__cause__ is not None and id(last.__cause__) not in seen:
        last = last.__cause__
        seen.add(id(last))
    if last.__cause__ is None:
        last.__cause__ = remote_traceback_type()(f'\n"""\n{text}"""')
    return error


def _pack(
    error: BaseException,
    pickle_value: Callable[[object], bytes],
    packed: dict[int, tuple[Any, ...] | None],
    depth: int,
) -> tuple[Any, ...]:
    """Return `error` as plain data. `packed` has the errors that were met before, by `id`: several
    may have the same cause, and a chain may contain itself.
    """
    packed[id(error)] = None

    def linked(other: BaseException | None) -> tuple[Any, ...] | None:
        if other is None or id(other) in packed or depth == _MAX_CHAIN_LENGTH:
            return packed.get(id(other))
        return _pack(other, pickle_value, packed, depth + 1)

    members: tuple[Any, ...] = ()
    if isinstance(error, BaseExceptionGroup):
        members = tuple(filter(None, map(linked, error.exceptions)))
    body, data = _body(error, pickle_value)
    cls = type(error)
    prefix = "" if cls.__module__ == "builtins" else f"{cls.__module__}."
    has_name = isinstance(error, NameError | AttributeError)
    name = getattr(error, "name", None) if has_name else None
    fields = packed[id(error)] = tuple(
        _PackedException(
            body=body,
            data=data,
            members=members,
            type_name=prefix + cls.__qualname__,
            message=message_of(error),
            extra={"name": name} if type(name) is str else {},
            cause=linked(error.__cause__),
            context=None if error.__context__ is error.__cause__ else linked(error.__context__),
            suppress_context=error.__suppress_context__,
        )
    )
    return fields


def _body(error: BaseException, pickle_value: Callable[[object], bytes]) -> tuple[str, bytes]:
    members: Sequence[BaseException] = ()
    if isinstance(error, BaseExceptionGroup):
        members = error.exceptions
        bodies: dict[str, Any] = {"group": (type(error), (error.message,), error.__dict__, {})}
    else:
        fields = {f: getattr(error, f) for f in _OS_FIELDS} if isinstance(error, OSError) else {}
        bodies = {"pickled": error, "rebuilt": (type(error), error.args, error.__dict__, fields)}
    reason = ""  # why its own pickle does not serve, in words that follow "because"
    for body, value in bodies.items():
        try:
            data = pickle_value(value)
            if _is_same(_rebuild(body, data, members), error):
                return body, data
            reason = reason or "its copy is another exception"
        except Exception as failure:
            reason = reason or f"it cannot be pickled: {describe_error(failure)}"
            # An inherited definition does not count: it may not know the subclass's constructor.
            if body == "pickled" and not vars(type(error)).keys().isdisjoint(_REDUCE_METHODS):
                break
    return "text", reason.encode()


def _is_same(copy: BaseException, error: BaseException) -> bool:
    return type(copy) is type(error) and (
        isinstance(error, BaseExceptionGroup)
        or dumps(copy.args, 5) == dumps(error.args, 5)
        or dumps(copy.args, 5)
        # A copied array may be laid out in another order.
        == dumps(loads(dumps(error.args, 5)), 5)
        or bool(copy.args == error.args)
    )


def _rebuild(body: str, data: bytes, members: Sequence[BaseException]) -> BaseException:
    """Return the exception that has this body; `members` are those of a group."""
    error: BaseException
    if body == "pickled":
        error = loads(data)
        return error
    cls, args, attributes, fields = loads(data)
    if body == "group":
        args = *args, list(members)
    error = cls.__new__(cls, *args)
    error.args = args
    for name, value in fields.items():
        setattr(error, name, value)
    error.__dict__.update(attributes)
    return error


def _unpack(fields: tuple[Any, ...], text: str, made: dict[int, BaseException]) -> BaseException:
    """Return the error made of `fields`. `made` has those that were made before, by `id`."""
    if id(fields) in made:
        return made[id(fields)]
    packed = _PackedException(*fields)
    error: BaseException = RemoteError(packed.type_name, packed.message, text)
    if packed.body == "text":
        error.add_note(f"the exception arrives as text, because {packed.data.decode()}")
    else:
        try:
            members = [_unpack(each, text, made) for each in packed.members]
            error = _rebuild(packed.body, packed.data, members)
        except Exception as failure:
            error.add_note(
                "the exception could not be rebuilt in this process: "
                f"{type(failure).__name__}: {failure}"
            )
    made[id(fields)] = error
    for name, value in packed.extra.items():
        setattr(error, name, value)
    if packed.context is not None:
        error.__context__ = _unpack(packed.context, text, made)
    if packed.cause is not None:
        error.__cause__ = _unpack(packed.cause, text, made)
        # `raise ... from`: Python sets context and cause to the same exception
        if packed.context is None:
            error.__context__ = error.__cause__
    error.__suppress_context__ = packed.suppress_context
    return error


def describe_error(error: BaseException) -> str:
    """Return the type of `error` and the first line of its message, as text that has UTF-8. Raises
    no error: the caller has yet to settle the task.
    """
    message = str.partition(message_of(error), "\n")[0][:MAX_DESCRIPTION_CHARACTERS]
    message = message.encode("utf-8", "backslashreplace").decode()  # of a file's name, perhaps
    return f"{type(error).__qualname__}: {message}" if message else type(error).__qualname__


def message_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as broken:  # a SystemExit of the error's own code, too
        return f"<__str__ raised {type(broken).__name__}>"


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame that does not belong to the drone's own work. A C
    function has none.
    """
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(
        "polycephaly.drone"
    ):
        trace = trace.tb_next
    return trace
