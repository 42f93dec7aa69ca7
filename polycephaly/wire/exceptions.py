"""Pickling of exceptions, so that an error reaches the controller as the exception it was.

Pickle calls an exception's class with its `args`. That fails, or builds something else, for every
class whose constructor takes other arguments than it passes to `Exception.__init__`. Pickle also
leaves out the cause, the context and the traceback. So an exception that a task raised travels as a
`_PackedException`: the first body below that rebuilds the exception correctly (tested in the drone,
before sending), its cause and context packed likewise, and its traceback as text.

    "pickled"   as its class says, if that gives the same type, args and fields
    "rebuilt"   its state (see errors.py), without __init__; not used if the class itself defines
                how it is pickled and that fails: then it is not meant to be pickled
    "text"      none of these works: the error arrives as RemoteError, with the reason

The rebuilt exception has the original's cause and context. The remote traceback becomes the last
cause of the chain, a `concurrent.futures.process._RemoteTraceback`, so that printing the exception
shows the remote lines. An exception within a value goes by `reduce_exception`.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Sequence
from pickle import dumps, loads
from traceback import format_exception
from types import TracebackType
from typing import Any, NamedTuple

from .._compat import remote_traceback_type
from ..errors import (
    REDUCE_METHODS,
    RemoteError,
    allocate_exception,
    args_to_make,
    copy_state,
    fields_of,
    make_exception,
    says_how_to_pickle,
    set_base_field,
    set_state,
    text_by,
)
from .main_names import ATOMIC_TYPES

_MAX_CHAIN_LENGTH = 100
"""Exceptions of a chain that travel; the text has more of them."""
MAX_DESCRIPTION_CHARACTERS = 300
"""Of an error's message, in a list of errors."""
_HINTS = ("builtins.AttributeError.obj", "builtins.AttributeError.name", "builtins.NameError.name")
"""Fields from which the interpreter derives "Did you mean". They may hold any object, however
large, that nobody meant to send; so they travel only if they are small and immutable."""


class _PackedException(NamedTuple):
    body: str
    data: bytes
    members: tuple[Any, ...]
    type_name: str
    message: str
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
    last = last_cause(error)
    if last.__cause__ is None:
        set_base_field(last, "__cause__", remote_traceback_type()(f'\n"""\n{text}"""'))
    return error


def last_cause(error: BaseException) -> BaseException:
    """Return the end of the chain of causes; if it leads back into itself, the last one before."""
    seen = {id(error)}
    while error.__cause__ is not None and id(error.__cause__) not in seen:
        error = error.__cause__
        seen.add(id(error))
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
    fields = packed[id(error)] = tuple(
        _PackedException(
            body=body,
            data=data,
            members=members,
            type_name=_full_name(type(error)),
            message=message_of(error),
            cause=linked(error.__cause__),
            context=None if error.__context__ is error.__cause__ else linked(error.__context__),
            suppress_context=error.__suppress_context__,
        )
    )
    return fields


def _body(error: BaseException, pickle_value: Callable[[object], bytes]) -> tuple[str, bytes]:
    kind = type(error)
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    bodies: list[tuple[str, Callable[[], bytes]]] = []
    # Each member of a group is packed by itself, with its cause and context.
    if not members and (says_how_to_pickle(kind) or kind in copyreg.dispatch_table):
        bodies.append(("pickled", lambda: _pickle_as_said(error, pickle_value)))
    bodies.append(("rebuilt", lambda: _pickle_state(error, members, pickle_value)))
    reason = ""  # why its own pickle does not serve, in words that follow "because"
    for body, make in bodies:
        try:
            return body, make()
        except _Different as difference:
            reason = reason or str(difference)
        except Exception as failure:
            reason = reason or f"it cannot be pickled: {describe_error(failure)}"
            # An inherited definition does not count: it may not know the subclass's constructor.
            if body == "pickled" and not vars(kind).keys().isdisjoint(REDUCE_METHODS):
                break
    return "text", reason.encode()


class _Different(Exception):
    """The copy of an exception is another one."""


def _pickle_as_said(error: BaseException, pickle_value: Callable[[object], bytes]) -> bytes:
    data = pickle_value(error)
    copy = loads(data)
    if not (
        type(copy) is type(error)
        and _are_same(copy.args, error.args)
        and _are_same(_sent_fields(copy), _sent_fields(error))
        and message_of(copy) == message_of(error)
        and text_by(repr, copy) == text_by(repr, error)
    ):
        raise _Different("its copy is another exception")
    return data


def _are_same(one: object, other: object) -> bool:
    return (
        dumps(one, 5) == dumps(other, 5)
        # A copied array may be laid out in another order.
        or dumps(one, 5) == dumps(loads(dumps(other, 5)), 5)
        or bool(one == other)
    )


def _pickle_state(
    error: BaseException, members: Sequence[BaseException], pickle_value: Callable[[object], bytes]
) -> bytes:
    _check_copy(error)
    args = tuple(_MembersAs(type(each)) if _is_all(each, members) else each for each in error.args)
    message = error.message if isinstance(error, BaseExceptionGroup) else None
    data = pickle_value((type(error), message, args, error.__dict__, _sent_fields(error)))
    _rebuild("rebuilt", data, members)
    return data


def _check_copy(error: BaseException) -> None:
    try:
        copy_state(error)
    except Exception as failure:
        raise _Different(f"it cannot be copied: {describe_error(failure)}") from failure


class _MembersAs(NamedTuple):
    """Stands for the members of a group among its `args`."""

    kind: type


def _is_all(arg: object, members: Sequence[BaseException]) -> bool:
    return (
        bool(members)
        and type(arg) in (list, tuple)
        and len(arg) == len(members)  # type: ignore[arg-type]
        and all(one is other for one, other in zip(arg, members, strict=True))  # type: ignore[call-overload]
    )


def _sent_fields(error: BaseException) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields_of(error).items()
        if name not in _HINTS or type(value) in ATOMIC_TYPES
    }


def _rebuild(body: str, data: bytes, members: Sequence[BaseException]) -> BaseException:
    """Return the exception that has this body; `members` are those of a group."""
    error: BaseException
    if body == "pickled":
        error = loads(data)
        return error
    kind, message, args, attributes, fields = loads(data)
    args = tuple(each.kind(members) if type(each) is _MembersAs else each for each in args)
    made_from = args if message is None else (message, tuple(members))
    return make_exception(kind, made_from, args, attributes, fields)


# -- an exception within an argument, a result or another value ------------------------------------


def reduce_exception(error: BaseException) -> Any:
    """Reduce an exception for pickle, with the state that pickle by itself would lose. As with
    pickle, cause, context and traceback stay behind.

    An exception that cannot be rebuilt arrives as `RemoteError`.
    """
    kind = type(error)
    if says_how_to_pickle(kind):
        return _with_args(error, error.__reduce_ex__(5))
    try:
        _check_copy(error)
    except _Different as difference:
        reason = f"the exception arrives as text, because {difference}"
        substitute = RemoteError(_full_name(kind), message_of(error))
        substitute.add_note(reason)
        return reduce_exception(substitute)
    state = error.args, error.__dict__, _sent_fields(error)
    # Filled only then, because its attributes may lead back to it.
    return allocate_exception, (kind, args_to_make(error)), state, None, None, _set_state


def _with_args(error: BaseException, reduced: Any) -> Any:
    """Return `reduced`, which the class of `error` gave, with the `args`. A constructor that gets
    less than in the first place makes other ones, and so another message: that of urllib3's errors
    would lack the host, because they leave out the connection.
    """
    if (
        type(reduced) is tuple
        and len(reduced) == 2
        and reduced[0] is type(error)
        and all(type(each) in ATOMIC_TYPES for each in error.args)
    ):
        return *reduced, error.args, None, None, _set_args
    return reduced


def _set_args(error: BaseException, args: tuple[Any, ...]) -> None:
    """Set the `args` of an exception that was just made. Pickles contain this function's name."""
    set_base_field(error, "args", args)


def _set_state(error: BaseException, state: Any) -> None:
    """Fill an exception that was just made. Pickles contain this function's name."""
    set_state(error, *state)


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
    if packed.context is not None:
        set_base_field(error, "__context__", _unpack(packed.context, text, made))
    if packed.cause is not None:
        set_base_field(error, "__cause__", _unpack(packed.cause, text, made))
        # `raise ... from`: Python sets context and cause to the same exception
        if packed.context is None:
            set_base_field(error, "__context__", error.__cause__)
    set_base_field(error, "__suppress_context__", packed.suppress_context)
    return error


def describe_error(error: BaseException) -> str:
    """Return the type of `error` and the first line of its message, as text that has UTF-8. Raises
    no error: the caller has yet to settle the task.
    """
    message = str.partition(message_of(error), "\n")[0][:MAX_DESCRIPTION_CHARACTERS]
    message = message.encode("utf-8", "backslashreplace").decode()  # of a file's name, perhaps
    return f"{type(error).__qualname__}: {message}" if message else type(error).__qualname__


def message_of(error: BaseException) -> str:
    return text_by(str, error)


def _full_name(kind: type) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


_OWN_MODULES = ("polycephaly.drone", "polycephaly.wire.code_strings", "polycephaly.wire.seeding")


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the first frame that does not belong to the drone's own work. A C
    function has none.
    """
    while trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(
        _OWN_MODULES
    ):
        trace = trace.tb_next
    return trace
