"""Errors come home; a death is told; the pool goes on.

python examples/errors_and_death.py
"""

import os
import signal
import tempfile
from pathlib import Path

import polycephaly as poly


class OutOfStock(Exception):
    """Two constructor arguments: plain pickle could not rebuild it."""

    def __init__(self, item: str, wanted: int) -> None:
        super().__init__(f"{wanted} of {item} wanted")
        self.item = item


def order(item: str) -> None:
    raise OutOfStock(item, 3)


def fails_once(mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "done at the second try"


def main() -> None:
    with poly.Pool(2) as pool:
        try:
            pool.doit(order, "apples")
        except OutOfStock as error:
            told = "raise OutOfStock(item, 3)" in str(error.__cause__)
            print(f"{error} (item: {error.item}); the remote line is told: {told}")

        doomed = pool.promise("os.kill(os.getpid(), 9)")
        others = [pool.promise(pow, 2, n) for n in range(5)]
        died = doomed.exception()
        assert isinstance(died, poly.DroneDied)
        print(f"died: exit code {died.exitcode}, while running {died.running}")
        print("its neighbours:", [p.value for p in others])

    with tempfile.TemporaryDirectory() as place, poly.Pool(2, retries=1) as pool:
        print(pool.doit(fails_once, Path(place, "mark")))

    with poly.Pool(1, timeout=0.2) as pool:
        try:
            pool.doit("import time; time.sleep(60)")
        except TimeoutError:
            print("too long: interrupted")


if __name__ == "__main__":
    main()
