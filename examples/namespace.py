"""A drone that is kept: an interactive session without a terminal.

    python examples/namespace.py

What cannot be pickled, such as an open database, is made in the drone and stays there. Only rows
travel."""

import polycephaly as poly

ROWS = [("IBM", 101), ("HP", 87), ("DEC", 54)]


def main() -> None:
    with poly.Drone(name="db") as drone:
        drone.doit(
            """
import sqlite3

db = sqlite3.connect(":memory:")
db.execute("create table prices (symbol text, price int)")
print("database made")
"""
        )
        drone["rows"] = ROWS
        drone.doit("db.executemany('insert into prices values (?, ?)', rows)\nNone")
        print(drone.doit("db.execute('select symbol from prices where price > 60').fetchall()"))

        def dearest(limit: int) -> list[tuple[str, int]]:
            """By value; `db` is found in the drone's own namespace."""
            found = db.execute("select * from prices order by price desc limit ?", (limit,))  # type: ignore[name-defined]  # noqa: F821
            return found.fetchall()

        print(drone.doit(dearest, 1))
        try:
            drone["db"]
        except TypeError as error:
            print("the connection itself stays:", error)


if __name__ == "__main__":
    main()
