"""Values of many types, and the digests of their encodings: `python keyed_values.py` prints these,
as a program whose `__main__` has the classes. They are the same in each process and on each
Python: those of keyed_values.txt."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import ipaddress
import operator
import pathlib
import re
import types
import uuid
import zoneinfo
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple

from polycephaly.store.resume.encoding import encode
from polycephaly.store.resume.identity import identify


class Colour(enum.Enum):
    RED = 1
    BLUE = "blue"


class Mode(enum.IntFlag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: int


class Plain:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.b, self.a = 2, {"x", "y"}


@dataclasses.dataclass
class Record:
    name: str
    tags: set[str] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str
    size: float = 1.5


class Own:
    """Pickled by a method of its own."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        return Own, (self.n,), None


class Words(set):  # type: ignore[type-arg]
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


def function(x: int) -> int:
    return x


def scaled(factor: float) -> Any:
    """A closure."""

    def scale(x: float, *, offset: float = 0.5) -> float:
        return x * factor + offset  # a comment

    return scale


def _cycle() -> Any:
    outer: list[Any] = [1]
    outer.append({"inside": (outer, 2)})
    return outer


def values() -> dict[str, Any]:
    words = ["spam", "egg", "bacon", "ham", "x" * 40, "é", "日本"]
    counted = collections.Counter("abracadabra")
    default = collections.defaultdict(list, {"a": [1], "b": []})
    tree: dict[str, Any] = {"set": set(words), "frozen": frozenset(map(tuple, words)), "row": words}
    found: dict[str, Any] = {
        "none": None, "true": True, "int": 1, "big": -(3**500), "float": 1.0, "nan": -float("nan"),
        "inf": float("-inf"), "complex": 1 - 0.5j, "str": "a\udcff\0b", "bytes": b"ab",
        "bytearray": bytearray(b"ab"), "view": memoryview(b"abcd")[::2], "tuple": (1, (2,), ()),
        "list": [1, [2]], "dict": {"b": 1, "a": 2}, "tree": tree, "cycle": _cycle(),
        "set of sets": {frozenset({"a", "b"}), frozenset({1, "c"})}, "words": Words(words),
        "table": Table(b=1, a=2), "ordered": collections.OrderedDict(b=1, a=2), "counter": counted,
        "default": default, "deque": collections.deque([1, 2], 5),
        "namespace": types.SimpleNamespace(a=1, b={"x", "y"}), "range": range(1, 10, 3),
        "slice": slice(1, None), "ellipsis": ..., "array": array.array("d", [1.5, 2.5]),
        "enum": Colour.BLUE, "flags": Mode.READ | Mode.WRITE, "named tuple": Point(1, 2),
        "plain": Plain(b={"q", "r"}, a=1), "slots": Slotted(), "record": Record("x", set(words)),
        "frozen record": Frozen("x"), "own": Own(3), "class": Plain, "function": function,
        "builtin": len, "method": "abc".upper, "class method": datetime.date.fromisoformat,
        "partial": functools.partial(function, 1, y={"k", "l"}),
        "getter": operator.itemgetter(1, 2), "date": datetime.date(2024, 2, 29),
        "time": datetime.time(1, 2, 3, 4, fold=1), "delta": datetime.timedelta(-1, 5),
        "datetime": datetime.datetime(2024, 1, 2, 3, tzinfo=datetime.UTC),
        "zone": datetime.datetime(2024, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "offset": datetime.timezone(datetime.timedelta(hours=5), "five"),
        "decimal": decimal.Decimal("-1.50"), "fraction": fractions.Fraction(3, -9),
        "uuid": uuid.UUID(int=7), "path": pathlib.PurePosixPath("/a/../b"),
        "own path": pathlib.Path("a//b"), "address": ipaddress.ip_address("10.0.0.1"),
        "network": ipaddress.ip_network("10.0.0.0/8"), "pattern": re.compile("a+", re.I),
        "alias": list[int], "error": ValueError("bad", 1),
    }  # fmt: skip
    return found


def functions() -> list[Any]:
    """What a map may call."""
    return [
        function, scaled(2.5), functools.partial(function, 1, y={"k", "l"}), Own, Words().union,
        functools.lru_cache(function), len, str.upper, operator.itemgetter(1),
        functools.partial(scaled(lambda: 1), Colour.RED),
    ]  # fmt: skip


def values_of_numpy() -> dict[str, Any]:
    import numpy as np

    structured = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    return {
        "array": np.arange(6.0).reshape(2, 3), "transposed": np.arange(6).reshape(3, 2).T,
        "strided": np.arange(10)[::3], "empty": np.zeros((0, 3)), "no axis": np.array(5),
        "objects": np.array([{"a", "b"}, None], dtype=object), "bool": np.array([True]),
        "texts": np.array(["a", "bcd"]), "structured": structured, "record": structured[0],
        "days": np.array(["2024-01-01"], dtype="M8[D]"), "float64": np.float64(1.0),
        "float32": np.float32(1.0), "int64": np.int64(1), "str_": np.str_("a"),
        "dtype": np.dtype("f4"), "day": np.datetime64("2024-01-01"),
        "masked": np.ma.masked_array([1, 2], [True, False]),
    }  # fmt: skip


def digests(some: dict[str, Any]) -> dict[str, str]:
    return {name: blake2b(encode(value), digest_size=4).hexdigest() for name, value in some.items()}


if __name__ == "__main__":
    with suppress(ImportError):
        print(*(f"numpy {name}: {it}" for name, it in digests(values_of_numpy()).items()), sep="\n")
    print(*(f"{name}: {it}" for name, it in digests(values()).items()), sep="\n")
    for fn in functions():
        name, digest = identify(fn, has_keys=False)
        print(f"{name}: {digest.hex()}")
