"""Drones fill one picture, without a copy, and tell its owner how far they are.

python examples/pore.py
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

import polycephaly as poly
from polycephaly import green

HEIGHT, WIDTH, STEPS = 240, 320, 50
TILES = [slice(top, top + 20) for top in range(0, HEIGHT, 20)]


def mandelbrot(rows: slice) -> "np.ndarray[Any, Any]":
    y, x = np.mgrid[-1.2 : 1.2 : HEIGHT * 1j, -2.2 : 1.0 : WIDTH * 1j][:, rows]
    c = x + 1j * y
    z = np.zeros_like(c)
    steps = np.zeros(c.shape, np.uint8)
    for _ in range(STEPS):
        inside = abs(z) <= 2
        z[inside] = z[inside] ** 2 + c[inside]
        steps += inside
    return steps


def paint(picture: poly.Pore, rows: slice) -> None:
    picture.array[rows] = mandelbrot(rows)
    picture.tell(rows.stop - rows.start)


async def show_progress(picture: poly.Pore) -> int:
    done = 0
    async for message in picture:  # until it is closed
        before, done = done, done + message.value
        if done * 4 // HEIGHT > before * 4 // HEIGHT:
            print(f"{done * 100 // HEIGHT} % are painted")
    return done


def main() -> None:
    with poly.Pool(3) as pool, poly.Pore((HEIGHT, WIDTH), "u1", name="picture") as picture:
        progress = green.spawn(show_progress, picture)
        painting = [pool.promise(paint, picture, rows) for rows in TILES]
        poly.gather(*painting).result()
        image = picture.array  # stays what it is when the pore is closed
        picture.close()
        print(
            f"{progress.value} rows by {len(painting)} calls; "
            f"bytes that came back: {came_back(painting)}"
        )

        copied = [pool.promise(mandelbrot, rows) for rows in TILES]
        same = np.concatenate(poly.gather(*copied).value)
        print(
            f"the same as results: {np.array_equal(image, same)}; "
            f"bytes that came back: {came_back(copied):,}"
        )

        try:
            pool.doit(paint, picture, TILES[0])
        except poly.PoreClosed as closed:
            print("and now", str(closed).partition(": its owner")[0])


def came_back(works: Sequence[poly.Promise[Any]]) -> int:
    return sum(each.spans.bytes_received for each in works)


if __name__ == "__main__":
    main()
