"""Reducers for types that pickle cannot handle, copies needlessly, or is slow with, and for
exceptions.

All picklers of this package use them. The first attempt, the plain pickler, uses those for NumPy's
arrays and for exceptions only: pickle would lose part of these without an error.
"""

from __future__ import annotations

import array
import copyreg
import functools
import os
import sys
import threading
import types
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from operator import attrgetter, methodcaller
from pickle import PickleBuffer
from typing import Any, ForwardRef, NoReturn

from .. import _compat
from .annotations import reduce_forward_reference
from .arrays import is_array_type, reduce_array
from .exceptions import reduce_exception


def _reduce_memoryview(view: memoryview) -> tuple[Any, tuple[Any, ...]]:
    if view.format not in _NATIVE_FORMATS:
        raise TypeError(
            f"a memoryview of format {view.format!r} cannot be sent: cast it to bytes, bytes(view)"
        )
    if view.ndim > 1 and not view.nbytes:
        # A memoryview cannot be cast to such a shape, but can be created from an array that has
        # this shape.
        import numpy

        return memoryview, (numpy.asarray(view),)
    content = PickleBuffer(
        view if view.c_contiguous else view.tobytes() if view.readonly else bytearray(view)
    )
    return _rebuild_memoryview, (content, view.format, view.shape)


def _rebuild_memoryview(content: Any, format: str, shape: tuple[int, ...]) -> memoryview:
    flat = memoryview(content).cast("B")
    return flat.cast(format) if 0 in shape else flat.cast(format, shape)  # type: ignore[call-overload,no-any-return]


def _reduce_array(values: array.array[Any]) -> tuple[Any, tuple[Any, ...]]:
    return _rebuild_array, (values.typecode, PickleBuffer(values))


def _rebuild_array(typecode: str, buffer: Any) -> array.array[Any]:
    made: array.array[Any] = array.array(typecode)
    made.frombytes(buffer)
    return made


def _reduce_descriptor(descriptor: Any) -> tuple[Any, ...]:
    return (
        type(descriptor),
        (descriptor.func,),
        {name: value for name, value in vars(descriptor).items() if name not in _MADE_BY_INIT},
    )


def _reduce_partial_method(method: Any) -> tuple[Any, ...]:
    """Keep the function: CPython 3.14's own pickling would lose it."""
    return type(method), (method.func, *method.args), vars(method)


def _reduce_environment(environment: Any) -> Any:
    """By name: a drone has its own, and `os.environ.update` is a task or an initializer there."""
    for name in ("environ", "environb"):
        if environment is getattr(os, name):
            return getattr, (os, name)
    return object.__reduce_ex__(environment, 5)


def _refuse_temporary_file(file: Any) -> NoReturn:
    raise TypeError(
        f"{file.name} is a temporary file, which its last copy would delete: pass its name"
    )


def _refuse_connection(connection: Connection) -> NoReturn:
    raise TypeError(
        "a connection of multiprocessing is open in its own process only: pass it as one of the "
        "`initargs`, or use a green.Channel"
    )


# For all picklers but that of `multiprocessing`, which has its own way. The plain pickler would
# copy the number of the descriptor, and the copy's finalizer would close another's file.
copyreg.pickle(Connection, _refuse_connection)


_MADE_BY_INIT = ("lock", "_method_cache")
"""Unpicklable attributes in CPython 3.11 (cached_property), 3.13.0 (singledispatchmethod)."""


def _reduce_lazy_import(lazy: Any) -> tuple[Any, ...]:
    return _imported, (lazy.resolve(),)


def _imported(value: Any) -> Any:
    return value


LazyImport: Any = getattr(types, "LazyImportType", None)
"""On 3.15, the type of names of `lazy import` that were not used yet."""
CACHED_TYPE: Any = type(functools.cache(abs))
"""The type of functions under `functools.cache` and `lru_cache`."""
_NATIVE_FORMATS = frozenset("bBhHiIlLqQnNfdc?")
REDUCERS: dict[Any, Any] = {
    memoryview: _reduce_memoryview,
    array.array: _reduce_array,
    functools.cached_property: _reduce_descriptor,
    functools.partialmethod: _reduce_partial_method,
    functools.singledispatchmethod: _reduce_descriptor,
    type(os.environ): _reduce_environment,
    ForwardRef: reduce_forward_reference,
    _compat.TemporaryFile: _refuse_temporary_file,
}
if LazyImport is not None:
    REDUCERS[LazyImport] = _reduce_lazy_import


class _ExtraReducers(threading.local):
    reducers: Any = None


_extra = _ExtraReducers()


@contextmanager
def extra_reducers(reducers: Any) -> Iterator[None]:
    """In this block and thread, `pack` asks `reducers` too: a table of reducers by type, or None.

    Reducers that are registered for a type come first.
    """
    outer, _extra.reducers = _extra.reducers, reducers
    try:
        yield
    finally:
        _extra.reducers = outer


def has_extra_reducers() -> bool:
    return _extra.reducers is not None


def with_extra(*tables: Any) -> ChainMap[Any, Any]:
    return _Reducers(*tables) if _extra.reducers is None else _Reducers(*tables, _extra.reducers)


class _Reducers(ChainMap[Any, Any]):
    def __missing__(self, kind: type) -> Any:
        if issubclass(kind, BaseException):
            return reduce_exception
        if is_array_type(kind):
            return reduce_array
        raise KeyError(kind)


class PlainReducers(dict[type, Any]):
    """A dispatch table with the reducers of `copyreg` and one for all exceptions.

    The pickler asks for the type of every object that is no builtin container, number or string.
    So that this takes no Python code, the table keeps the types that are reduced by default. A type
    that another one may replace under its name is not kept, because it could not be freed.
    """

    registered = 0  # how many types `copyreg` had

    def __missing__(self, kind: type) -> Any:
        reducer = copyreg.dispatch_table.get(kind)
        if reducer is not None:
            return reducer
        if issubclass(kind, BaseException):
            return reduce_exception
        if not _is_of_module(kind):
            raise KeyError(kind)
        if len(self) >= _MAX_KNOWN_TYPES:
            self.clear()
        if is_array_type(kind):
            default: Any = reduce_array
        else:
            default = _name if issubclass(kind, type) else _reduce_by_default
        self[kind] = default
        if kind in copyreg.dispatch_table:  # since a moment, by another thread
            self.pop(kind, None)
            return copyreg.dispatch_table[kind]
        return default

    def update_registered(self) -> None:
        """Forget what is known, because types were registered since."""
        self.clear()
        self.registered = len(copyreg.dispatch_table)


def _is_of_module(kind: type) -> bool:
    name = kind.__module__
    module = sys.modules.get(name) if type(name) is str and name != "__main__" else None
    return getattr(module, kind.__name__, None) is kind


_reduce_by_default = methodcaller("__reduce_ex__", 5)
_name = attrgetter("__qualname__")
"""For a class with a metaclass, which pickle takes by its name."""
_MAX_KNOWN_TYPES = 512
