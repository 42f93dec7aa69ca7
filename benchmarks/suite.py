"""The measurements: what is taken of whom, how large, and what was promised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from .peers import FLOORS, OURS

WORKERS = 2

Figures = dict[str, float]


class Skipped(Exception):
    """It cannot be measured here; the message says why."""


@dataclass(frozen=True)
class Sizes:
    tasks: int = 20_000
    trips: int = 2_000
    items: int = 100_000
    mixed: int = 3_000
    long: float = (
        0.1  # seconds, one of a hundred mixed tasks; the others take a tenth of a millisecond
    )
    array: int = 100_000_000  # bytes
    repetitions: int = 10
    shared: int = 1 << 30  # bytes
    holders: int = 8
    image: int = 4 << 30  # bytes
    drones: int = 100
    many_drones: int = 500
    imports: int = 15
    computing: float = 2.0  # seconds, shared out among calls
    seed: int = 1  # of this run's mixed tasks


FULL = Sizes()
QUICK = Sizes(
    tasks=200,
    trips=50,
    items=1_000,
    mixed=200,
    long=0.01,
    array=4_000_000,
    repetitions=2,
    shared=16 << 20,
    holders=2,
    image=64 << 20,
    drones=4,
    many_drones=8,
    imports=3,
    computing=0.05,
)


@dataclass(frozen=True)
class Mark:
    """What was promised: of our figure itself, or of the ratio to a peer's in the same run."""

    limit: float
    kind: Literal["figure", "times ours", "of it"]

    def __str__(self) -> str:
        if self.kind == "figure":
            return f"<= {self.limit:g}"
        return (
            f">= {self.limit:g} times ours"
            if self.kind == "times ours"
            else f"ours <= {self.limit:g} of it"
        )

    def holds(self, median: float) -> bool:
        return median >= self.limit if self.kind == "times ours" else median <= self.limit


@dataclass(frozen=True)
class Row:
    """One figure of a measurement, and where it is marked, by whom it is compared with."""

    figure: str
    title: str
    marks: Mapping[str, Mark] = field(default_factory=dict)
    alone: bool = False  # only ours is shown; the peers' are in the JSON

    def heading(self, sizes: Sizes) -> str:
        return self.title.format_map(
            {
                **asdict(sizes),
                "array": f"{sizes.array / 1e6:.0f} MB",
                "shared": f"{sizes.shared >> 20:,} MiB",
                "image": f"{sizes.image >> 20:,} MiB",
            }
        )


@dataclass(frozen=True)
class Measurement:
    take: str  # "module:function", called with the peer's name and the sizes
    rows: tuple[Row, ...]
    peers: tuple[str, ...] = ()
    counts: str | None = None  # the field of `Sizes` that a slow peer gets less of


def at_least(times: float) -> Mark:
    return Mark(times, "times ours")


def at_most(of_it: float) -> Mark:
    return Mark(of_it, "of it")


def within(limit: float) -> Mapping[str, Mark]:
    return {OURS: Mark(limit, "figure")}


SUBMITTING = ("multiprocessing", "futures", "loky", "mpire", "ray", "dask", "ipyparallel")

SUITE = {
    "gather": Measurement(
        "tasks:gather",
        (
            Row(
                "us",
                "submit + gather, µs a task",
                {"multiprocessing": at_least(10), "futures": at_least(30)},
            ),
        ),
        SUBMITTING,
        "tasks",
    ),
    "main_function": Measurement(
        "tasks:main_function",
        (
            Row(
                "us",
                "... a function of __main__",
                {"multiprocessing": at_least(10), "futures": at_least(30)},
            ),
        ),
        ("multiprocessing", "futures"),
        "tasks",
    ),
    "main_lambda": Measurement(
        "tasks:main_lambda",
        (Row("us", "... a lambda of __main__", {"loky": at_least(5)}),),
        ("loky",),
        "tasks",
    ),
    "trip": Measurement(
        "tasks:trip",
        (Row("us", "round trip, µs", {"multiprocessing": at_most(0.8), "futures": at_most(0.6)}),),
        (*SUBMITTING, *FLOORS),
        "trips",
    ),
    "map": Measurement(
        "tasks:map_noops",
        (Row("us", "map, µs an item", {"multiprocessing": at_most(1.5)}),),
        ("multiprocessing", "futures", "loky", "joblib", "mpire", "ray", "dask", "ipyparallel"),
        "items",
    ),
    "values": Measurement(
        "values:values",
        tuple(
            Row(name, f"map of {what}, µs an item", {"multiprocessing": at_most(limit)})
            for name, what, limit in (
                ("dicts", "dicts of three fields", 2.5),
                ("tuples", "tuples of three", 2),
                ("objects", "objects of a class of __main__", 3),
                ("dates", "dates", 2),
                ("decimals", "decimals", 2),
                ("arrays", "arrays of 100 floats", 2),
                ("strings", "short strings", 2),
                ("long_strings", "strings of 14 kB", 2),
                ("partial", "ints, by a partial with 1 MB", 2),
            )
        ),
        ("multiprocessing", "futures", "loky"),
        "tasks",
    ),
    "mixed": Measurement(
        "tasks:mixed",
        (
            Row("over", "map of mixed tasks, wall time / perfect", within(1.1)),
            Row("stretch", "... the tasks' own times / wanted", alone=True),
        ),
        ("multiprocessing", "futures", "joblib", "mpire"),
    ),
    "calls": Measurement(
        "work:calls",
        (
            Row("short_map", "map of calls of 0.1 ms, wall time / best"),
            Row("short_submit", "... by submit"),
            Row("middle_map", "map of calls of 0.6 ms, wall time / best"),
            Row("middle_submit", "... by submit"),
            Row("long_map", "map of calls of 5 ms, wall time / best"),
            Row("long_submit", "... by submit"),
        ),
        ("multiprocessing", "futures", "loky"),
    ),
    "one_core": Measurement(
        "work:one_core",
        (
            Row("gather_us", "on one core: submit + gather, µs a task"),
            Row("trip_us", "... round trip, µs"),
        ),
        ("multiprocessing", "futures", "loky"),
        "tasks",
    ),
    "threads": Measurement(
        "work:threads",
        (Row("us", "eight threads: round trips, µs a task"),),
        ("multiprocessing", "futures", "loky"),
        "trips",
    ),
    "search": Measurement(
        "work:search", (Row("ms", "GridSearchCV, 60 fits of 3 ms, ms"),), ("loky",)
    ),
    "on_ray": Measurement(
        "work:on_ray", (Row("us", "on Ray: submit + gather, µs a task"),), ("ray",), "tasks"
    ),
    "array": Measurement(
        "arrays:array",
        (
            Row("there_copies", "{array} array there, warm copies", within(2.5)),
            Row("back_copies", "... and another back, warm copies", within(5)),
            Row("there_ms", "... there, ms", alone=True),
            Row("back_ms", "... there and back, ms", alone=True),
            Row("cold_ms", "... there, the first one, ms", alone=True),
            Row("copy_ms", "... one warm copy, ms", alone=True),
        ),
        ("multiprocessing", "futures", "loky", "joblib", "ray", "dask"),
    ),
    "share": Measurement(
        "arrays:share",
        (Row("copies", "{shared} array held by {holders} workers, copies in all", within(1.1)),),
        ("ray",),
    ),
    "first": Measurement(
        "starting:first",
        (Row("ms", "from nothing to the first answer, ms", {"futures": at_most(2)}),),
        ("multiprocessing", "futures", "mpire"),
    ),
    "script": Measurement(
        "starting:script",
        (
            Row(
                "ms",
                "first answer of a fresh script, imports included, ms",
                {"futures": at_most(1.5)},
            ),
        ),
        ("multiprocessing", "futures"),
    ),
    "start": Measurement(
        "starting:start",
        (
            Row("few_s", "{drones} drones have answered, s"),
            Row("idle_kib", "... PSS of each, KiB"),
            Row("many_s", "{many_drones} drones have answered, s"),
        ),
    ),
    "image": Measurement(
        "starting:image",
        (
            Row("ms", "first answer from an image of {image}, ms"),
            Row("growth_mib", "... growth of PSS, MiB"),
        ),
        ("multiprocessing", "futures"),
    ),
    "imports": Measurement(
        "starting:imports",
        (
            Row("package_ms", "import polycephaly, ms", within(60)),
            Row("pool_ms", "... and polycephaly.Pool, ms"),
        ),
    ),
}
