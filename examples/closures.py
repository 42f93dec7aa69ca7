"""What travels by name and what by value.

    python examples/closures.py

A drone holds what this image held at the snapshot, so a function of that time goes by name and
finds its data there: the table below is never sent. What came later, or has no name, goes by value
with what it captured."""

import polycephaly as poly

table = {n: n * n for n in range(100_000)}


def look_up(n: int) -> int:
    return table[n]


def main() -> None:
    with poly.Pool(2) as pool:
        by_name = pool.promise(look_up, 12)
        print("a function by name:", by_name.value, f"({by_name.spans.bytes_sent} bytes sent)")

        factor = 3
        print("a lambda with what it captured:", pool.doit(lambda n: look_up(n) * factor, 12))

        numbers = [1, 2, 3]
        total = pool.promise(sum, numbers)  # arguments are captured at the call
        numbers.clear()
        print("cleared afterwards, summed all the same:", total.value)

        table[12] = 0  # after the snapshot: the drones do not see it
        print("the snapshot's table:", pool.doit(look_up, 12))
        pool.refresh()  # a new snapshot
        print("the refreshed one's:", pool.doit(look_up, 12))


if __name__ == "__main__":
    main()
