"""What a value means, as bytes that are the same in each process.

A pickle is not: it shows which parts are one object, the order in which a set is iterated over
(which depends on the hash seed), and how this version of Python reduces a path. So values are
walked here. Types of the standard library whose reductions differ between versions, and NumPy's,
have an encoding of their own. All others are reduced as for a pickle, and what that gives is walked
in turn. Functions and classes are their names.

Each encoding begins with a letter for its type and tells its own length, so that no two different
values have the same one.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Callable, Iterable
from enum import Enum, Flag
from pathlib import PurePath
from struct import Struct
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, ClassVar

_DOUBLE = Struct(">d")
_PROTOCOL = 4  # with 5, NumPy and pandas would give buffers beside the pickle
_DEFAULT_REDUCTIONS = ("__newobj__", "__newobj_ex__", "_reconstructor")


def encode(value: object) -> bytes:
    """Return the encoding of `value`.

    Raises `TypeError` if a part of it has none, and the errors of the value's own reduction.
    """
    encoder = Encoder()
    encoder.add(value)
    return b"".join(encoder.parts)


class Encoder:
    """One walk. The encoding is in `parts`."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        # The depths of the values that enclose the next one, by their `id`, the innermost last.
        self._around: dict[int, int] = {}

    def add(self, value: Any) -> None:
        """Append the encoding of `value`."""
        add = self._encodings.get(type(value))
        if add is not None:
            add(self, value)
        elif self.enter(value):
            self.add_object(value)
            self.leave()

    def enter(self, value: object) -> bool:
        """Note that what follows is inside `value`, and return True. If `value` is inside itself,
        append how far up it is instead.
        """
        around = self._around
        depth = around.get(id(value))
        if depth is not None:
            self.parts.append(b"^%d;" % (len(around) - depth))
            return False
        around[id(value)] = len(around)
        return True

    def leave(self) -> None:
        self._around.popitem()

    def mark(self) -> tuple[list[bytes], int, int]:
        """Return where this walk is, for `go_back`."""
        return self.parts, len(self.parts), len(self._around)

    def go_back(self, mark: tuple[list[bytes], int, int]) -> None:
        """Undo what was appended since `mark`, after an error."""
        self.parts, length, depth = mark
        del self.parts[length:]
        while len(self._around) > depth:
            self._around.popitem()

    def add_object(self, value: Any) -> None:
        """Append the encoding of a value whose type has no encoding of its own."""
        kind = type(value)
        add = self._late_encodings.get((kind.__module__, kind.__qualname__))
        if add is not None:
            add(self, value)
        elif isinstance(value, type):
            self.add_name(b"k", value)
        elif kind is FunctionType:
            self.add_function(value)
        elif kind is BuiltinFunctionType and isinstance(value.__self__, (ModuleType, type(None))):
            self.add_name(b"g", value)
        elif isinstance(value, Enum):
            # The name of a combined flag differs between versions.
            self.add_name(b"e", kind)
            self.add(value.value if isinstance(value, Flag) else value.name)
        elif isinstance(value, PurePath) and not hasattr(value, "__dict__"):
            self.parts.append(b"p")
            # Where pathlib has its classes differs between versions.
            self._add_str(kind.__module__.partition(".")[0])
            self._add_str(kind.__qualname__)
            self._add_str(str(value))
        elif isinstance(value, (set, frozenset)):
            self.add_name(b"z", kind)
            self._add_sorted(value)
            self._add_state(vars(value) if hasattr(value, "__dict__") else None)
        elif not self._add_of_numpy(value):
            self.add_reduced(value)

    def add_function(self, function: Any) -> None:
        self.add_name(b"g", function)

    def add_name(self, letter: bytes, named: Any) -> None:
        """Append the module and the qualified name of a class or function."""
        name = named.__qualname__
        if "<" in name:
            what = "a lambda" if name.endswith("<lambda>") else "defined in a function"
            raise TypeError(f"{name} is {what}, so no other process finds it by its name")
        self.parts.append(letter)
        self._add_str(named.__module__ or "builtins")
        self._add_str(name)

    def add_reduced(self, value: Any) -> None:
        """Append what `value` is made of, as it tells `pickle`."""
        kind = type(value)
        reduce = copyreg.dispatch_table.get(kind)
        reduced = value.__reduce_ex__(_PROTOCOL) if reduce is None else reduce(value)
        if isinstance(reduced, str):  # a global of this name
            self.parts.append(b"n")
            self._add_str(getattr(value, "__module__", None) or "builtins")
            self._add_str(reduced)
            return
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        self.parts.append(b"r")
        self.add(make)
        self.add(tuple(args))
        by_default = getattr(make, "__module__", None) == "copyreg" and (
            getattr(make, "__name__", None) in _DEFAULT_REDUCTIONS
        )
        if by_default:
            self._add_state(state)
        else:
            self.add(state)
        self.add(None if items is None else list(items))
        self.add(None if pairs is None else [tuple(pair) for pair in pairs])

    def _add_state(self, state: Any) -> None:
        """Append the attributes of an object. Unlike that of a dict, their order has no meaning."""
        if type(state) is tuple and len(state) == 2:  # attributes, and those in slots
            self.parts.append(b"2")
            self._add_state(state[0])
            self._add_state(state[1])
        elif type(state) is dict and all(type(name) is str for name in state):
            self.add(dict(sorted(state.items())))
        else:
            self.add(state)

    def _add_of_numpy(self, value: Any) -> bool:
        """Append an array, scalar or type of NumPy and return True, if `value` is one."""
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or not hasattr(numpy, "generic"):
            return False
        if type(value) is numpy.ndarray:
            self.parts.append(b"a")
        elif isinstance(value, numpy.generic):
            self.parts.append(b"v")
        elif isinstance(value, numpy.dtype):
            self.parts.append(b"y")
            self._add_dtype(value)
            return True
        else:
            return False
        self._add_dtype(value.dtype)
        self.add(value.shape)
        if value.dtype.hasobject:
            self.add(value.ravel().tolist() if value.shape else [value.item()])
        else:
            self.add(value.tobytes())
        return True

    def _add_dtype(self, dtype: Any) -> None:
        if dtype.names is None and dtype.subdtype is None:
            self.add((dtype.str, str(dtype)))  # the latter has the unit of a time
        else:
            self.add_reduced(dtype)

    def _add_str(self, text: str) -> None:
        data = text.encode("utf-8", "surrogatepass")
        self.parts += b"s%d:" % len(data), data

    def _add_bytes(self, data: Any) -> None:
        self.parts += b"b%d:" % len(data), data

    def _add_bytearray(self, data: bytearray) -> None:
        self.parts += b"B%d:" % len(data), bytes(data)

    def _add_memoryview(self, view: memoryview) -> None:
        self.parts.append(b"m")
        self.add((view.format, view.shape, view.tobytes()))

    def _add_none(self, _: None) -> None:
        self.parts.append(b"N")

    def _add_bool(self, value: bool) -> None:
        self.parts.append(b"T" if value else b"F")

    def _add_int(self, value: int) -> None:
        self.parts.append(b"i%x;" % value)

    def _add_float(self, value: float) -> None:
        self.parts += b"f", _DOUBLE.pack(value if value == value else float("nan"))

    def _add_complex(self, value: complex) -> None:
        self.parts.append(b"c")
        self._add_float(value.real)
        self._add_float(value.imag)

    def _add_tuple(self, values: tuple[Any, ...]) -> None:
        # If it is inside itself, it is so by a list, say, which is met again.
        self.parts.append(b"(%d:" % len(values))
        for each in values:
            self.add(each)

    def _add_list(self, values: list[Any]) -> None:
        if self.enter(values):
            self.parts.append(b"[%d:" % len(values))
            for each in values:
                self.add(each)
            self.leave()

    def _add_dict(self, values: dict[Any, Any]) -> None:
        if self.enter(values):
            self.parts.append(b"{%d:" % len(values))
            for key, value in values.items():
                self.add(key)
                self.add(value)
            self.leave()

    def _add_set(self, values: set[Any]) -> None:
        self.parts.append(b"<")
        self._add_sorted(values)

    def _add_frozenset(self, values: frozenset[Any]) -> None:
        self.parts.append(b">")
        self._add_sorted(values)

    def _add_sorted(self, values: Iterable[Any]) -> None:
        outer, encodings = self.parts, []
        for each in values:
            self.parts = []
            self.add(each)
            encodings.append(b"".join(self.parts))
        self.parts = outer
        outer.append(b"%d:" % len(encodings))
        outer += sorted(encodings)

    def _add_decimal(self, value: Any) -> None:
        self.parts.append(b"d")
        self._add_str(str(value))

    def _add_fraction(self, value: Any) -> None:
        self.parts.append(b"q")
        self.add((value.numerator, value.denominator))

    def _add_uuid(self, value: Any) -> None:
        self.parts.append(b"u")
        self.add(value.int)

    _encodings: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        type(None): _add_none,
        bool: _add_bool,
        int: _add_int,
        float: _add_float,
        complex: _add_complex,
        str: _add_str,
        bytes: _add_bytes,
        bytearray: _add_bytearray,
        memoryview: _add_memoryview,
        tuple: _add_tuple,
        list: _add_list,
        dict: _add_dict,
        set: _add_set,
        frozenset: _add_frozenset,
    }
    # By module and name, so that nothing is imported for them.
    _late_encodings: ClassVar[dict[tuple[str, str], Callable[[Any, Any], None]]] = {
        ("decimal", "Decimal"): _add_decimal,
        ("fractions", "Fraction"): _add_fraction,
        ("uuid", "UUID"): _add_uuid,
    }
