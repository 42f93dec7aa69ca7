"""The Mandelbrot set, as JVMCSP measured it: in sequence, with a process for each row, with one for
each pixel.

    python examples/mandelbrot.py [WIDTH HEIGHT] [--steps N] [--drones N]        theirs was 4000 by
    3000

Green threads compute no faster than a loop does: what the ratios show is what so many of them cost.
With `--drones` the rows are computed in other images, on other cores."""

import argparse
import time
from collections.abc import Callable
from functools import partial

import polycephaly as poly
from polycephaly import green

Image = list[bytes]


class Plane:
    """The part of the complex plane that is shown, and how closely one looks."""

    def __init__(self, width: int, height: int, steps: int) -> None:
        self.width = width
        self.height = height
        self.steps = steps

    def pixel(self, x: int, y: int) -> int:
        """After how many steps the point has escaped; `steps` if it has not."""
        c = complex(3.5 * x / self.width - 2.5, 2.0 * y / self.height - 1.0)
        z = 0j
        for step in range(self.steps):
            if z.real * z.real + z.imag * z.imag > 4.0:
                return step
            z = z * z + c
        return self.steps

    def row(self, y: int) -> bytes:
        return bytes(self.pixel(x, y) for x in range(self.width))


def in_sequence(plane: Plane) -> Image:
    return [plane.row(y) for y in range(plane.height)]


def process_per_row(plane: Plane) -> Image:
    async def row(y: int) -> bytes:
        return plane.row(y)

    return green.par(*(row(y) for y in range(plane.height)))


def process_per_pixel(plane: Plane) -> Image:
    """All of them at once: a process for each pixel, and one for each row that waits for its
    pixels."""

    async def pixel(x: int, y: int) -> int:
        return plane.pixel(x, y)

    async def row(y: int) -> bytes:
        return bytes(await green.par(*(pixel(x, y) for x in range(plane.width))))

    return green.par(*(row(y) for y in range(plane.height)))


def in_drones(drones: int, plane: Plane) -> Image:
    with poly.Pool(drones) as pool:
        return list(pool.map(plane.row, range(plane.height)))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("width", nargs="?", type=int, default=80)
    options.add_argument("height", nargs="?", type=int, default=60)
    options.add_argument("--steps", type=int, default=100, choices=range(1, 256), metavar="1..255")
    options.add_argument("--drones", type=int, help="also in so many drones")
    chosen = options.parse_args()
    plane = Plane(chosen.width, chosen.height, chosen.steps)
    ways: dict[str, Callable[[Plane], Image]] = {
        "in sequence": in_sequence,
        "a process per row": process_per_row,
        "a process per pixel": process_per_pixel,
    }
    if chosen.drones:
        ways[f"in {chosen.drones} drones"] = partial(in_drones, chosen.drones)

    print(f"{plane.width} x {plane.height}, at most {plane.steps} steps")
    first: Image = []
    sequential = 0.0
    for name, way in ways.items():
        began = time.perf_counter()
        image = way(plane)
        seconds = time.perf_counter() - began
        first, sequential = first or image, sequential or seconds
        assert image == first, f"another image: {name}"
        print(f"{name:20s} {seconds:.2f} s, {seconds / sequential:.2f} times the sequential one")
    print("all images are equal")


if __name__ == "__main__":
    main()
