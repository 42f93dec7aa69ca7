"""Many green threads ask one by one; foreign code is called once for all who wait.

python examples/wrapped_requests.py
"""

import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path

from polycephaly import green

ORDERS = 1000


class Shop:
    """Its database may be used by one native thread at a time, as calls of a batch use it."""

    def __init__(self, folder: Path) -> None:
        self.db = sqlite3.connect(folder / "shop.db", check_same_thread=False)
        self.db.execute("create table orders (customer integer)")

    def insert(self, rows: list[tuple[int]]) -> None:
        with self.db:  # one transaction
            self.db.executemany("insert into orders values (?)", rows)

    def count(self) -> int:
        total: int = self.db.execute("select count(*) from orders").fetchone()[0]
        return total


@green.call.batch
def read_all(paths: list[Path]) -> list[object]:
    texts: list[object] = []
    for path in paths:
        try:
            texts.append(path.read_text())
        except OSError as error:  # the error of this request only
            texts.append(error)
    return texts


async def seconds_for(order: Callable[[tuple[int]], Awaitable[None]]) -> float:
    async def customer(number: int) -> None:
        await order((number,))

    began = time.perf_counter()
    await green.par(*(customer(number) for number in range(ORDERS)))
    return time.perf_counter() - began


async def main(folder: Path) -> None:
    shop = Shop(folder)
    with closing(shop.db):
        async with green.call.batch(shop.insert) as insert:
            together = await seconds_for(insert)
            print(f"{ORDERS} orders of {ORDERS} green threads, in {insert.crossings} transaction")
        async with green.call.batch(shop.insert, limit=1) as insert_one:
            alone = await seconds_for(insert_one)
            print(f"{ORDERS} more, in {insert_one.crossings}")
        print(f"{shop.count()} are there; together was {alone / together:.1f} times as fast")

    paths = [folder / f"{number}.txt" for number in range(200)]
    for path in paths[:-1]:
        path.write_text(path.stem)
    reads = [green.spawn(read_all, path) for path in paths]
    texts = [await each for each in reads[:-1]]
    print(f"{len(texts)} files, read in {read_all.crossings} crossing, the last is {texts[-1]}")
    try:
        await reads[-1]
    except FileNotFoundError as error:
        print("only one was not there:", Path(error.filename).name)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        green.run(main, Path(folder))
