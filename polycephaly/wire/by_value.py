"""Pickling of functions, classes and code by value, by cloudpickle.

A process loads this module when it first pickles or unpickles such a value, because cloudpickle and
its imports take 10 ms and 2 MB.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from collections.abc import Callable
from enum import EnumType
from pickle import PickleBuffer
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any
from weakref import WeakSet

import cloudpickle

from .._compat import (
    class_number,
    class_of_number,
    class_setstate,
    free_class_numbers_in_child,
    function_setstate,
    number_class,
    reduce_code,
)
from ..runtime.sources import add_lines, lines_of
from .annotations import annotations_of, has_lazy_annotations
from .enums import enum_arguments, enum_state, fill_enum, make_enum
from .main_names import (
    MainSnapshot,
    bind_free_names,
    global_names,
    goes_with_calls,
    main_namespace,
    name_of,
)
from .named_objects import NAMED_TYPES, reduce_named
from .reducers import CACHED_TYPE, REDUCERS, LazyImport, with_extra


def _reduce_code_with_source(code: CodeType) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a code object, together with its source lines if these are in no file."""
    reduced = reduce_code(code)
    lines = lines_of(code)
    return (_make_code, (lines, *reduced)) if lines else reduced


def _make_code(lines: str, make: Any, args: tuple[Any, ...]) -> CodeType:
    code: CodeType = make(*args)
    add_lines(code.co_filename, code.co_firstlineno, lines)
    return code


class ByValuePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by name if the other process has the value, and by value if it cannot import it.

    `snapshot` tells which names of `__main__` the other process has.
    """

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        REDUCERS | {CodeType: _reduce_code_with_source}
    )

    def __init__(
        self, target: Any, snapshot: MainSnapshot, out_of_band: Callable[[PickleBuffer], bool]
    ) -> None:
        self.dispatch_table = with_extra(*type(self).dispatch_table.maps)  # read by __init__
        super().__init__(target, protocol=5, buffer_callback=out_of_band)
        self._snapshot = snapshot

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, (type, FunctionType, CACHED_TYPE)):
            if type(obj) not in NAMED_TYPES:
                return NotImplemented
            return name_of(obj) if self._snapshot.goes_by_reference(obj) else reduce_named(obj)
        if getattr(obj, "__module__", None) == "__main__" and self._snapshot.holds(obj):
            return NotImplemented  # the default: by reference
        if isinstance(obj, CACHED_TYPE) or (
            isinstance(obj, FunctionType) and obj.__code__ is _DISPATCH_CODE
        ):
            return NotImplemented if self._snapshot.goes_by_reference(obj) else _reduce_wrapper(obj)
        reduced = self._reduce_definition(obj)
        if not isinstance(obj, FunctionType):
            return _reduce_class(obj, reduced)
        if obj.__globals__ is main_namespace():
            reduced = self._reduce_function_of_main(reduced)
        if LazyImport and isinstance(reduced, tuple) and _import_lazy_names(obj, reduced):
            return self.reducer_override(obj)  # which finds the submodules that are used
        return reduced

    def _reduce_definition(self, obj: Any) -> Any:
        try:
            return super().reducer_override(obj)
        except Exception:
            # It evaluates the annotations, of which some may exist for type checkers only.
            if not isinstance(obj, FunctionType) or not has_lazy_annotations(obj):
                raise
        return super().reducer_override(_with_annotations(obj, annotations_of(obj)))

    def _reduce_function_of_main(self, reduced: Any) -> Any:
        """Leave out the captured globals that the other process has.

        Otherwise, `lambda i: table[i]` would carry the whole table each time.
        """
        if not isinstance(reduced, tuple):
            return reduced  # cloudpickle can import the function
        captured = reduced[2][1]["__globals__"]
        for name, value in list(captured.items()):
            if self._snapshot.unchanged(name, value) and not goes_with_calls(value):
                del captured[name]
        return *reduced[:-1], _set_function_of_main


def _import_lazy_names(function: FunctionType, reduced: Any) -> bool:
    """Import what the function uses of `lazy import` statements. Return whether there was any."""
    names = reduced[2][1]["__globals__"]
    lazy = [name for name, value in names.items() if type(value) is LazyImport]
    values = [eval(name, function.__globals__) for name in lazy]  # as when it is first used
    used = set(global_names(function.__code__))
    submodules = [
        each
        for module in (*names.values(), *values)
        if type(module) is ModuleType
        for each in [*sys.lazy_modules]  # type: ignore[attr-defined]
        if each.startswith(f"{module.__name__}.") and each not in sys.modules
        if used.issuperset(each[len(module.__name__) + 1 :].split("."))
    ]
    for each in submodules:
        importlib.import_module(each)
    return bool(lazy or submodules)


def _with_annotations(function: FunctionType, annotations: dict[str, Any]) -> FunctionType:
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    for name in ("__kwdefaults__", "__qualname__", "__module__", "__doc__"):
        setattr(copied, name, getattr(function, name))
    copied.__dict__.update(function.__dict__)
    copied.__annotations__ = annotations
    return copied


_function_setstate = function_setstate()


def _set_function_of_main(function: FunctionType, state: Any) -> None:
    """Fill a function that was just made. Pickles contain this function's name."""
    captured = state[1]["__globals__"]
    _function_setstate(function, state)
    bind_free_names(function, captured)


# -- wrappers of functools that are pickled by value -----------------------------------------------

_DISPATCH_CODE = functools.singledispatch(abs).__code__  # type: ignore[attr-defined]
"""The code object that all functions made by `singledispatch` share."""
_MADE_ANEW = {"cache_parameters", "dispatch", "register", "registry", "_clear_cache", "__wrapped__"}
_NAME_ATTRIBUTES = ("__module__", "__name__", "__qualname__", "__doc__")


def _reduce_wrapper(obj: Any) -> Any:
    """Reduce a cached or dispatching function; a cached one arrives with an empty cache.

    A recursive one is reduced twice: while the wrapped function is pickled, its wrapper is met
    again, and pickle keeps the inner reduction. When that is rebuilt, the wrapped function has no
    `__name__` and so on yet that could be copied. So the state has the wrapper's own; the form
    ``(None, state)`` makes pickle set them one by one.
    """
    # A wrapper of a partial has no names.
    state = {name: getattr(obj, name) for name in _NAME_ATTRIBUTES if hasattr(obj, name)}
    state.update((name, value) for name, value in vars(obj).items() if name not in _MADE_ANEW)
    if isinstance(obj, CACHED_TYPE):
        return _rebuild_cached, (obj.__wrapped__, obj.cache_parameters()), (None, state)
    return _rebuild_dispatching, (list(obj.registry.items()),), (None, state)


def _rebuild_cached(wrapped: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(wrapped)


def _rebuild_dispatching(registry: list[tuple[type, Callable[..., Any]]]) -> Any:
    made = functools.singledispatch(dict(registry)[object])
    for kind, function in registry:
        made.register(kind, function)
    return made


# -- classes pickled by value ----------------------------------------------------------------------

# cloudpickle recognises a class that arrives twice, and sets all its attributes anew, even in the
# process that the class comes from, when an instance returns there. The methods would then have
# copies of their globals. So the class is left unchanged in its own process.

_sent_classes: WeakSet[type] = WeakSet()
"""Classes of this process that were sent elsewhere."""
_received_classes: WeakSet[type] = WeakSet()
"""Classes that arrived here by value."""


_class_setstate = class_setstate()


def _reduce_class(obj: object, reduced: Any) -> Any:
    if not (
        isinstance(obj, type) and isinstance(reduced, tuple) and reduced[-1] is _class_setstate
    ):
        return reduced
    if obj not in _received_classes:
        _sent_classes.add(obj)
    number, state = class_number(obj), reduced[2]
    if has_lazy_annotations(obj):  # cloudpickle leaves them out
        state[0].pop("__annotations_cache__", None)
        state[0]["__annotations__"] = annotations_of(obj)
    if isinstance(obj, EnumType):
        made_by = make_enum, enum_arguments(obj)
        return _make_class, (number, *made_by), enum_state(obj, state), None, None, _set_enum
    kind, name, bases, content = reduced[1][:4]
    content = {"__qualname__": obj.__qualname__} | content | _slots(obj, bases)
    return (
        _make_class,
        (number, _new_class, (kind, name, bases, content)),
        (_without_slots(obj, state[0]), state[1]),
        None,
        None,
        _set_received_class,
    )


def _slots(obj: type, bases: tuple[Any, ...]) -> dict[str, Any]:
    # `typing.NamedTuple` among the bases, which its class does not have, makes its own.
    own = "__slots__" in vars(obj) and types.resolve_bases(bases) == obj.__bases__
    return {"__slots__": vars(obj)["__slots__"]} if own else {}


def _without_slots(obj: type, content: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in content.items()
        if not isinstance(value, MemberDescriptorType) or value.__objclass__ is not obj
    }


def _make_class(number: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """Return the class that this process has of this number, else make it: a class is made once
    only, so that a registry in an `__init_subclass__` or metaclass meets it once.
    """
    known: type | None = class_of_number(number)
    if known is not None:
        return known
    try:
        made = make(*args)
    except Exception as error:
        error.add_note(
            f"while making the class {args[1]} anew, which was sent by value. A class of a module "
            "that both processes can import is sent by its name, and not made anew"
        )
        raise
    numbered: type = number_class(number, made)
    return numbered


def _new_class(kind: type, name: str, bases: tuple[Any, ...], content: dict[str, Any]) -> type:
    return types.new_class(name, bases, {"metaclass": kind}, lambda names: names.update(content))


def _set_received_class(made: type, state: Any) -> type:
    if made not in _sent_classes:
        _received_classes.add(made)
        _class_setstate(made, state)
    return made


def _set_enum(made: EnumType, state: Any) -> None:
    class_state, attributes, values = state
    if made not in _sent_classes:
        _set_received_class(made, class_state)
        fill_enum(made, attributes, values)


def _mark_sent_as_received() -> None:
    """Treat the parent's classes as arrived ones, in a forked child.

    The parent may change these classes and send them again.
    """
    _received_classes.update(_sent_classes)
    _sent_classes.clear()


os.register_at_fork(after_in_child=_mark_sent_as_received)


# -- the definitions of `__main__` -----------------------------------------------------------------


class DefinitionPickler(ByValuePickler):
    """Pickle definitions by value, with the drone's `__main__` as their globals. `snapshot` has no
    names.
    """

    def _reduce_function_of_main(self, reduced: Any) -> Any:
        if not isinstance(reduced, tuple):
            return reduced
        make, (code, _, *rest), state, *others = reduced
        state[1]["__globals__"] = {}
        return make, (code, _Main(), *rest), state, *others


class _Main:
    """Unpickled as the receiving process's `__main__`."""

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return main_namespace, ()


free_class_numbers_in_child()
