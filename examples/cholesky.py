"""The tile Cholesky factorization: three loops, as in a textbook. In a pool's block they make a
graph that runs itself.

Tiles of one column need each other's results, and those of the next begin while the last are still
at work: which may start when is nowhere in this program. A tile stays in the drone that computed
it, and what needs it runs there, if that drone is free. Outside a block the same is plain code in
one process."""

import os
import sys
import time

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # for a drone, as for one process without drones

import numpy as np

import polycephaly as poly


@poly.flow(keep=True)
def factor(a):
    return np.linalg.cholesky(a)


@poly.flow(keep=True)
def solve(diagonal, a):
    return np.linalg.solve(diagonal, a.T).T


@poly.flow(keep=True)
def update(c, a, b):
    return c - a @ b.T


def cholesky(tiles):
    """Replaces the lower tiles of a symmetric positive definite matrix by those of its factor."""
    n = len(tiles)
    for k in range(n):
        tiles[k][k] = factor(tiles[k][k])
        for i in range(k + 1, n):
            tiles[i][k] = solve(tiles[k][k], tiles[i][k])
        for i in range(k + 1, n):
            for j in range(k + 1, i + 1):
                tiles[i][j] = update(tiles[i][j], tiles[i][k], tiles[j][k])
    return tiles


def split(matrix, side):
    cuts = range(0, len(matrix), side)
    return [
        [np.ascontiguousarray(matrix[i : i + side, j : j + side]) for j in cuts if j <= i]
        for i in cuts
    ]


@poly.flow
def joined(tiles):
    side = len(tiles[0][0])
    matrix = np.zeros((len(tiles) * side, len(tiles) * side))
    for i, row in enumerate(tiles):
        for j, tile in enumerate(row):
            matrix[i * side : (i + 1) * side, j * side : (j + 1) * side] = tile
    return matrix


def main():
    size, side = (int(argument) for argument in sys.argv[1:] or (1200, 200))
    noise = np.random.default_rng(1).random((size, size))
    matrix = noise @ noise.T + size * np.eye(size)
    expected = np.linalg.cholesky(matrix)

    began = time.perf_counter()
    plain = joined(cholesky(split(matrix, side)))
    alone = time.perf_counter() - began

    with poly.Pool(2):
        began = time.perf_counter()
        flowed = joined(cholesky(split(matrix, side))).value
        together = time.perf_counter() - began

    print(f"{size} x {size} in tiles of {side} x {side}: both as numpy has it:", end=" ")
    print(np.allclose(plain, expected) and np.allclose(flowed, expected))
    print(f"plain {alone:.3f} s, two drones {together:.3f} s, {alone / together:.2f} times as fast")


if __name__ == "__main__":
    main()
