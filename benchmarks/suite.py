"""The measurements: what is taken of whom, and how large. What people do comes first."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .peers import FLOORS

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
class Row:
    """One figure of a measurement."""

    figure: str
    title: str
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


SUBMITTING = ("multiprocessing", "futures", "loky", "mpire", "ray", "dask", "ipyparallel")

SUITE = {
    "values": Measurement(
        "values:values",
        tuple(
            Row(name, f"map of {what}, µs an item")
            for name, what in (
                ("dicts", "dicts of three fields"),
                ("tuples", "tuples of three"),
                ("objects", "objects of a class of __main__"),
                ("dates", "dates"),
                ("decimals", "decimals"),
                ("arrays", "arrays of 100 floats"),
                ("strings", "short strings"),
                ("long_strings", "strings of 14 kB"),
                ("partial", "ints, by a partial with 1 MB"),
            )
        ),
        ("multiprocessing", "futures", "loky"),
        "tasks",
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
    "mixed": Measurement(
        "tasks:mixed",
        (
            Row("over", "map of mixed tasks, wall time / perfect"),
            Row("stretch", "... the tasks' own times / wanted", alone=True),
        ),
        ("multiprocessing", "futures", "joblib", "mpire"),
    ),
    "search": Measurement(
        "work:search", (Row("ms", "GridSearchCV, 60 fits of 3 ms, ms"),), ("loky",)
    ),
    "array": Measurement(
        "arrays:array",
        (
            Row("there_copies", "{array} array there, warm copies"),
            Row("back_copies", "... and another back, warm copies"),
            Row("there_ms", "... there, ms", alone=True),
            Row("back_ms", "... there and back, ms", alone=True),
            Row("cold_ms", "... there, the first one, ms", alone=True),
            Row("copy_ms", "... one warm copy, ms", alone=True),
        ),
        ("multiprocessing", "futures", "loky", "joblib", "ray", "dask"),
    ),
    "share": Measurement(
        "arrays:share",
        (Row("copies", "{shared} array held by {holders} workers, copies in all"),),
        ("ray",),
    ),
    "first": Measurement(
        "starting:first",
        (Row("ms", "from nothing to the first answer, ms"),),
        ("multiprocessing", "futures", "mpire"),
    ),
    "script": Measurement(
        "starting:script",
        (Row("ms", "first answer of a fresh script, imports included, ms"),),
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
            Row("package_ms", "import polycephaly, ms"),
            Row("pool_ms", "... and polycephaly.Pool, ms"),
        ),
    ),
    "threads": Measurement(
        "work:threads",
        (Row("us", "eight threads: round trips, µs a task"),),
        ("multiprocessing", "futures", "loky"),
        "trips",
    ),
    "map": Measurement(
        "tasks:map_noops",
        (Row("us", "map, µs an item"),),
        ("multiprocessing", "futures", "loky", "joblib", "mpire", "ray", "dask", "ipyparallel"),
        "items",
    ),
    "gather": Measurement(
        "tasks:gather", (Row("us", "submit + gather, µs a task"),), SUBMITTING, "tasks"
    ),
    "main_function": Measurement(
        "tasks:main_function",
        (Row("us", "... a function of __main__"),),
        ("multiprocessing", "futures"),
        "tasks",
    ),
    "main_lambda": Measurement(
        "tasks:main_lambda", (Row("us", "... a lambda of __main__"),), ("loky",), "tasks"
    ),
    "trip": Measurement(
        "tasks:trip", (Row("us", "round trip, µs"),), (*SUBMITTING, *FLOORS), "trips"
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
    "on_ray": Measurement(
        "work:on_ray", (Row("us", "on Ray: submit + gather, µs a task"),), ("ray",), "tasks"
    ),
}
