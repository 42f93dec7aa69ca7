"""Calls that type checkers accept, and those that they report (`# wrong`): see test_typing.py."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar, assert_type

import polycephaly as poly
from polycephaly import green

P = ParamSpec("P")
T = TypeVar("T")


def half(number: float) -> float:
    return number / 2


def repeat(n: int, text: str = "") -> str:
    return n * text


def join(a: int, b: str, c: bytes, d: float = 0) -> str:
    return f"{a}{b}{c!r}{d}"


async def name_of(n: int) -> str:
    return str(n)


@green.aio
async def load(n: int) -> bytes:
    return bytes(n)


@poly.flow
def add(a: float, b: float = 1) -> float:
    return a + b


@poly.flow(keep=True)
def collect(numbers: list[float], title: str = "") -> str:
    return f"{title}{numbers}"


@poly.flow
async def node_of(n: int) -> int:
    return n


class Account:
    def __init__(self, number: int) -> None:
        self.number = number

    def pay(self, amount: int) -> str:
        return str(amount)

    @poly.flow
    def book(self, amount: int) -> int:
        return amount

    @staticmethod
    @poly.flow
    def open(number: int) -> Account:
        return Account(number)


def promises(pool: poly.Pool, anything: Any) -> None:
    assert_type(pool.promise(half, 3), poly.Promise[float])
    assert_type(pool.promise(half, anything), poly.Promise[float])
    assert_type(pool.promise(repeat, 3, text="x"), poly.Promise[str])
    assert_type(pool.promise(name_of, n=3), poly.Promise[str])
    assert_type(pool.promise(load, 3), poly.Promise[bytes])
    assert_type(pool.promise(green.aio(name_of), 3), poly.Promise[str])
    assert_type(pool.promise(Account, 3), poly.Promise[Account])
    assert_type(pool.promise(Account(1).pay, 3), poly.Promise[str])
    assert_type(pool.promise(partial(repeat, 3), "x"), poly.Promise[str])
    assert_type(pool.promise(half, 3, keep=True).value, poly.Kept[float])
    assert_type(pool.doit(half, 3), float)
    assert_type(pool.doit(name_of, 3), str)
    assert_type(pool.drones[0].doit(half, 3), float)
    assert_type(pool.submit(half, number=3), poly.Promise[float])
    pool.promise("1 + 1")
    pool.doit(print, "a", 1, sep="")
    pool.promise(pow, 2, 3)
    pool.promise(lambda a, b: a + b, 1, 2)

    pool.promise(half, "3")  # wrong
    pool.promise(half, 1, 2)  # wrong
    pool.promise(half, digit=3)  # wrong
    pool.promise(repeat, 3, 4)  # wrong
    pool.promise(name_of, "3")  # wrong
    pool.promise(load, "3")  # wrong
    pool.promise(Account(1).pay, "3")  # wrong
    pool.doit(half, "3")  # wrong
    pool.doit(name_of, "3")  # wrong
    pool.drones[0].promise(half, "3")  # wrong
    pool.submit(half, "3")  # wrong
    pool.submit(half)  # wrong
    pool.promise("1 + 1", 1)  # wrong


def handles(pool: poly.Pool) -> None:
    promise, shared = pool.promise(half, 3), pool.share([1, 2])
    kept = pool.promise(half, 3, keep=True).value
    assert_type(pool.promise(half, promise), poly.Promise[float])
    assert_type(pool.promise(half, number=kept), poly.Promise[float])
    assert_type(pool.promise(name_of, promise), poly.Promise[str])
    assert_type(pool.promise(name_of, n=promise), poly.Promise[str])
    assert_type(pool.promise(repeat, 3, promise), poly.Promise[str])
    assert_type(pool.promise(repeat, promise, text="x"), poly.Promise[str])
    assert_type(pool.doit(len, shared), int)
    pool.promise(sum, [promise, promise])
    pool.promise(dict, {"a": promise})
    pool.promise(pow, promise, promise)


def maps(pool: poly.Pool, anything: Any) -> None:
    promise = pool.promise(repeat, 3)
    assert_type(list(pool.map(half, range(3))), list[float])
    assert_type(list(pool.map(name_of, [1], timeout=3, ordered=False)), list[str])
    assert_type(list(pool.map(load, [1])), list[bytes])
    assert_type(list(pool.map(repeat, [1])), list[str])
    assert_type(list(pool.map(repeat, [1], ["a"])), list[str])
    assert_type(list(pool.map(join, [1], "a", [b"c"])), list[str])
    assert_type(list(pool.map(join, [1], "a", [b"c"], [1.5])), list[str])
    assert_type(list(pool.map(repeat, [1], [promise])), list[str])
    assert_type(list(pool.map(half, [1], return_exceptions=True)), list[float | Exception])
    assert_type(list(pool.map(half, [1], return_exceptions=False)), list[float])
    assert_type(list(pool.map(lambda n: str(n), range(3))), list[str])
    for each in pow, max, print, operator.add, lambda a, b: (a, b):
        pool.map(each, [1], [2])
    pool.map(repeat, *zip(*[(1, "a"), (2, "b")], strict=True))
    pool.map(half, anything)

    pool.map(half, ["3"])  # wrong
    pool.map(half, 3)  # wrong
    pool.map(half, [1], [2])  # wrong
    pool.map(name_of, ["3"])  # wrong
    pool.map(load, ["3"])  # wrong
    pool.map(repeat, [1], [2])  # wrong
    pool.map(join, [1], ["a"])  # wrong
    pool.map(join, [1], ["a"], ["c"])  # wrong
    pool.map(half, [1], ordered="no")  # wrong


def flows(pool: poly.Pool) -> None:
    end = add(add(1, 2), b=add(3))
    collect([add(1), 2], title=end)
    collect(pool.share([1.5]))
    add(1, pool.promise(half, 3))
    Account(1).book(3)
    Account.open(node_of(3))
    add.__wrapped__(1)

    add("1")  # wrong
    add(1, 2, 3)  # wrong
    add(1, b="2")  # wrong
    collect([1], 3)  # wrong
    node_of("1")  # wrong
    poly.flow(3)  # wrong


def pass_on(pool: poly.Pool, fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    pool.promise(fn, *args, **kwargs)
    return pool.doit(fn, *args, **kwargs)


def pass_anything_on(
    pool: poly.Pool, fn: Callable[..., Any], work: str | Callable[[], int], *args: Any
) -> None:
    pool.promise(fn, *args)
    pool.map(fn, *args)
    pool.promise(work)
