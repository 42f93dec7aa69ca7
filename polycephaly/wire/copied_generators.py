"""Find the generators of random numbers that a function reads, and of which each drone has a copy.

A copy of a generator draws what the original would have drawn: so three drones draw the same three
numbers, in silence. NumPy tells people to make such a generator, ``rng = default_rng(5)``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from .. import _compat
from .main_names import MainSnapshot, global_names, main_namespace

_NamesOf = Callable[[CodeType], dict[str, Iterable[str]]]


class CopiedGenerator(NamedTuple):
    name: str
    """As the function reads it: ``rng``, ``self.rng``, ``config.rng``."""
    generator: object
    cure: str
    """How to give each call one of its own."""


def find_copied(fn: Any, snapshot: MainSnapshot, *, shares_objects: bool) -> CopiedGenerator | None:
    """Return the first generator that `fn` or a function that it calls reads, or None.

    Looked at are closures, defaults, globals, `partial` arguments, attributes of ``self`` and of
    modules, in functions of the user's own code: of `__main__` and of the package of `fn`. If
    `shares_objects`, what `__main__` had at the snapshot is no copy: the drones are in this
    process.
    """
    # The names of globals and of attributes are one list: `poly.rng()` reads no global `rng`. To
    # tell them apart takes longer, and is needed only if there is something to tell.
    if _find(fn, snapshot, shares_objects, _all_names) is None:
        return None
    return _find(fn, snapshot, shares_objects, _loaded_names)


def _find(
    fn: Any, snapshot: MainSnapshot, shares_objects: bool, names_of: _NamesOf
) -> CopiedGenerator | None:
    cures = dict(_cures())
    for name, value, travels in _values(fn, snapshot, names_of):
        # Of a method, such as `rng.normal`, its generator. Asked of the type, because an object may
        # run code when it is asked.
        owner = value.__self__ if hasattr(type(value), "__self__") else value
        kind = next((kind for kind in cures if issubclass(type(owner), kind)), None)
        if kind is not None and (travels or not (shares_objects or _is_reseeded(owner))):
            return CopiedGenerator(name, owner, cures[kind])
    return None


def _cures() -> Iterator[tuple[type, str]]:
    """Yield the kinds of generators that this process can have, and for each what to map over."""
    module: Any = sys.modules.get("numpy.random")
    with suppress(AttributeError):  # half loaded
        if module is not None:
            yield module.Generator, "rng.spawn(n)"
            yield module.RandomState, "map(numpy.random.RandomState, range(n))"
    module = sys.modules.get("random")
    with suppress(AttributeError):
        if module is not None:
            yield module.Random, "map(random.Random, range(n))"


def _is_reseeded(generator: object) -> bool:
    """Return whether it is one that each drone seeds anew: those of global functions."""
    return any(generator is each for each in _compat.global_generators())


def _values(fn: Any, snapshot: MainSnapshot, names_of: _NamesOf) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name of each value that `fn` reads, the value, and whether it travels with `fn`."""
    package = _package_of(fn)
    seen: set[int] = set()
    todo: list[tuple[str, Any, bool]] = [("", fn, True)]
    while todo:
        name, each, travels = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if name or not isinstance(each, FunctionType):
            yield name or _name_of(each), each, travels
        found: list[tuple[str, Any, bool]] = []
        if isinstance(each, partial):
            found += [("", each.func, travels)]
            found += [(f"argument {i}", arg, travels) for i, arg in enumerate(each.args)]
            found += [(key, arg, travels) for key, arg in each.keywords.items()]
        elif isinstance(each, MethodType):
            found += [("", each.__func__, travels), *_attributes(each.__self__, travels)]
        elif isinstance(each, FunctionType):
            if name == "" or _package_of(each) in ("__main__", package):
                found += _read_by(each, snapshot, names_of)
        elif not name and not isinstance(each, type):  # a callable object
            found += [("", getattr(type(each), "__call__", None), False)]  # noqa: B004
            found += _attributes(each, travels)
        todo += reversed(found)


def _read_by(
    fn: FunctionType, snapshot: MainSnapshot, names_of: _NamesOf
) -> Iterator[tuple[str, Any, bool]]:
    travels = not snapshot.goes_by_reference(fn)
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is empty
            yield name, cell.cell_contents, travels
    parameters = fn.__code__.co_varnames[: fn.__code__.co_argcount]
    defaults = fn.__defaults__ or ()
    for name, value in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True):
        yield name, value, travels
    for name, value in (fn.__kwdefaults__ or {}).items():
        yield name, value, travels
    of_main = fn.__globals__ is main_namespace()
    for name, attributes in names_of(fn.__code__).items():
        if name in fn.__globals__:
            value = fn.__globals__[name]
            yield name, value, travels and not (of_main and snapshot.unchanged(name, value))
            if isinstance(value, ModuleType):
                of_module = vars(value)
                for attribute in attributes:
                    if attribute in of_module:
                        yield f"{name}.{attribute}", of_module[attribute], False


def _all_names(code: CodeType) -> dict[str, Iterable[str]]:
    """Return all names that may be globals, each with all that may be attributes of it."""
    names = dict.fromkeys(global_names(code))
    return dict.fromkeys(names, names)


def _loaded_names(code: CodeType) -> dict[str, Iterable[str]]:
    """Return the names of the globals that `code` loads, with the attributes of them."""
    from dis import get_instructions  # takes milliseconds to import

    loaded: dict[str, set[str]] = {}
    name = ""
    for instruction in get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            name = instruction.argval
            loaded.setdefault(name, set())
        else:
            if name and instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                loaded[name].add(instruction.argval)
            name = ""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            for name, attributes in _loaded_names(constant).items():
                loaded.setdefault(name, set()).update(attributes)
    return dict(loaded)


def _attributes(owner: object, travels: bool) -> list[tuple[str, Any, bool]]:
    if isinstance(owner, (type, ModuleType)):
        return []
    return [
        (f"self.{name}", value, travels) for name, value in getattr(owner, "__dict__", {}).items()
    ]


def _package_of(fn: Any) -> str:
    while isinstance(fn, partial):
        fn = fn.func
    return str(getattr(fn, "__module__", None)).partition(".")[0]


def _name_of(fn: Any) -> str:
    return str(
        getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__name__
    )
