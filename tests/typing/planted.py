"""A user's program with eleven errors, each of which a type checker reports: see test_typing.py."""

from __future__ import annotations

import polycephaly as poly
from polycephaly import green


def half(number: float) -> float:
    return number / 2


async def name_of(n: int) -> str:
    return str(n)


async def main() -> None:
    await green.call(half, "1")  # wrong
    await green.slep(1)  # wrong
    text: str = await green.call(half, 1)  # wrong
    print(text)


with poly.Pool(2) as pool:
    pool.map(half, ["1"])  # wrong
    pool.map(name_of, ["1"])  # wrong
    pool.promise(half, "1")  # wrong
    text: str = pool.doit(half, 1)  # wrong
    pool.doit(half, 1, 2)  # wrong
poly.Pol(2)  # wrong
poly.Pool(2, timeout="3")  # wrong
channel: green.Channel[int] = green.Channel()
channel.put("item")  # wrong
green.run(main)
