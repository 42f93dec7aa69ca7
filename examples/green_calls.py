"""Plain blocking code that overlaps: a thread that waits stops no other.

python examples/green_calls.py
"""

import sqlite3
import tempfile
import time
from pathlib import Path

from polycephaly import green


async def nap() -> str:
    await green.call(time.sleep, 0.2)  # any function that blocks
    return "slept"


async def keep_notes(note: green.Channel[str]) -> list[str]:
    """Bound, as a sqlite3 connection belongs to the native thread that opened it."""
    db = await green.call(sqlite3.connect, ":memory:")
    await green.call(db.execute, "create table notes (text)")
    async for text in note:
        await green.call(db.execute, "insert into notes values (?)", (text,))
    rows = (await green.call(db.execute, "select text from notes order by text")).fetchall()
    await green.call(db.close)
    return [text for (text,) in rows]


async def read_file(path: Path, note: green.Channel[str]) -> None:
    await note.send(await green.call(path.read_text))


async def main(folder: Path) -> None:
    began = time.perf_counter()
    naps = await green.par(*(nap() for _ in range(50)))
    print(f"{len(naps)} naps of 0.2 s, in less than 10 s: {time.perf_counter() - began < 10}")

    note: green.Channel[str] = green.Channel()
    keeper = green.spawn(keep_notes, note, bound=True)
    paths = [folder / f"{name}.txt" for name in ("one", "three", "two")]
    for path in paths:
        path.write_text(path.stem)
    await green.par(*(read_file(path, note) for path in paths))
    note.close()
    print("kept:", await keeper)

    plain = green.spawn(time.sleep, 0.1)  # a plain function is a green thread as well
    async with green.timeout(5):
        await plain
    print("and so did a plain function")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        green.run(main, Path(folder))
