"""Errors come home as what they were.

Pickle calls an exception's class with its ``args``, which fails, or builds something else, for
every class whose constructor takes other arguments than it hands to ``Exception.__init__``; and it
leaves out the cause, the context and the traceback. So an exception travels as a *parcel*: the
first body that rebuilds it truly (tried on the drone, before sending), the parcels it is linked to,
and its traceback as text.

    body      "pickled"   its own pickle gives the same type and args
              "rebuilt"   class.__new__ and then args and attributes, without __init__: but where the class says itself
                          how it is pickled, and that fails, it is not to be pickled
              "group"     an exception group: message, and a parcel for each member
              "text"      nothing of the kind works: it arrives as RemoteError

The rebuilt exception has the original's cause and context; the remote traceback is the last cause
of the chain, a `concurrent.futures.process._RemoteTraceback`, so that printing it shows the remote
lines."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures.process import _RemoteTraceback
from pickle import dumps, loads
from traceback import format_exception
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import RemoteError

__all__ = ["pack_exception", "unpack_exception"]

_OS_FIELDS = ("errno", "strerror", "filename", "filename2")
_WAYS = ("__reduce__", "__reduce_ex__")


class _Parcel(NamedTuple):
    body: str
    data: bytes
    members: tuple[Any, ...]
    type_name: str
    message: str
    extra: dict[str, Any]  # what neither args nor __dict__ carry
    cause: Any
    context: Any
    suppress_context: bool


def pack_exception(error: BaseException, capture: Callable[[object], bytes]) -> bytes:
    """`error` with all it is linked to, as bytes. Never fails: what cannot travel goes as text."""
    text = "".join(format_exception(type(error), error, _without_our_frames(error.__traceback__)))
    return dumps((_parcel(error, capture, {}), text), 5)


def unpack_exception(data: bytes) -> BaseException:
    """The exception, or a `RemoteError` where this image cannot build it."""
    parcel, text = loads(data)
    error = _open(_Parcel(*parcel), text)
    last, seen = error, {id(error)}
    while last.__cause__ is not None and id(last.__cause__) not in seen:
        last = last.__cause__
        seen.add(id(last))
    if last.__cause__ is None:
        last.__cause__ = _RemoteTraceback(f'\n"""\n{text}"""')  # type: ignore[arg-type]  # typeshed errs
    return error


def _parcel(
    error: BaseException, capture: Callable[[object], bytes], open_: dict[int, None]
) -> tuple[Any, ...]:
    open_ = {**open_, id(error): None}  # the path from the root: a chain may be a circle

    def linked(other: BaseException | None) -> tuple[Any, ...] | None:
        return None if other is None or id(other) in open_ else _parcel(other, capture, open_)

    members: tuple[Any, ...] = ()
    if isinstance(error, BaseExceptionGroup):
        members = tuple(filter(None, map(linked, error.exceptions)))
    body, data = _body(error, capture)
    cls = type(error)
    name = getattr(error, "name", None) if isinstance(error, NameError) else None
    return tuple(
        _Parcel(
            body=body,
            data=data,
            members=members,
            type_name=cls.__qualname__
            if cls.__module__ == "builtins"
            else f"{cls.__module__}.{cls.__qualname__}",
            message=_message(error),
            extra={} if name is None else {"name": name},
            cause=linked(error.__cause__),
            context=None if error.__context__ is error.__cause__ else linked(error.__context__),
            suppress_context=error.__suppress_context__,
        )
    )


def _body(error: BaseException, capture: Callable[[object], bytes]) -> tuple[str, bytes]:
    if isinstance(error, BaseExceptionGroup):
        recipe: Any = (type(error), error.message, error.__dict__)
        bodies: list[tuple[str, Any, Callable[[Any], BaseException]]] = [
            ("group", recipe, lambda r: _regroup(r, error.exceptions))
        ]
    else:
        fields = {f: getattr(error, f) for f in _OS_FIELDS} if isinstance(error, OSError) else {}
        bodies = [
            ("pickled", error, lambda e: e),
            ("rebuilt", (type(error), error.args, error.__dict__, fields), _rebuild),
        ]
    for body, value, build in bodies:
        try:
            data = capture(value)
            if _same(build(loads(data)), error):
                return body, data
        except Exception:
            if body == "pickled" and _says_how(type(error)):
                break
    return "text", b""


def _says_how(kind: type) -> bool:
    """Whether it is pickled in a way of its own. One that it inherits may know nothing of how it is
    made."""
    return any(name in vars(kind) for name in _WAYS)


def _same(copy: BaseException, error: BaseException) -> bool:
    return type(copy) is type(error) and (
        isinstance(error, BaseExceptionGroup)
        or dumps(copy.args, 5) == dumps(error.args, 5)
        or dumps(copy.args, 5)
        == dumps(loads(dumps(error.args, 5)), 5)  # a copy of an array may be in another order
        or bool(copy.args == error.args)
    )


def _rebuild(recipe: Any) -> BaseException:
    cls, args, attributes, fields = recipe
    error: BaseException = cls.__new__(cls, *args)
    error.args = args
    for name, value in fields.items():
        setattr(error, name, value)
    error.__dict__.update(attributes)
    return error


def _regroup(recipe: Any, members: Any) -> BaseException:
    cls, message, attributes = recipe
    group: BaseException = cls.__new__(cls, message, list(members))
    group.__dict__.update(attributes)
    return group


def _open(parcel: _Parcel, text: str) -> BaseException:
    error: BaseException
    try:
        if parcel.body == "pickled":
            error = loads(parcel.data)
        elif parcel.body == "rebuilt":
            error = _rebuild(loads(parcel.data))
        elif parcel.body == "group":
            error = _regroup(loads(parcel.data), [_open(_Parcel(*m), text) for m in parcel.members])
        else:
            error = RemoteError(parcel.type_name, parcel.message, text)
    except Exception as why:
        error = RemoteError(parcel.type_name, parcel.message, text)
        error.add_note(f"it could not be rebuilt here: {type(why).__name__}: {why}")
    for name, value in parcel.extra.items():
        setattr(error, name, value)
    if parcel.context is not None:
        error.__context__ = _open(_Parcel(*parcel.context), text)
    if parcel.cause is not None:
        error.__cause__ = _open(_Parcel(*parcel.cause), text)
        if parcel.context is None:  # `raise ... from`: Python makes the two the same
            error.__context__ = error.__cause__
    error.__suppress_context__ = parcel.suppress_context
    return error


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"<its __str__ raised {type(broken).__name__}>"


def _without_our_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame that is the user's."""
    first = trace
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(
        "polycephaly.drone"
    ):
        trace = trace.tb_next
    return trace or first
