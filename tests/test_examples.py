"""Each example runs as a person would run it, and prints what it should."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"

PRINTED = {  # with # for any number
    "quickstart": """\
2**31 - 1 is prime: True
1229 primes below 10000, the last is 9973
""",
    "closures": """\
a function by name: 144 (51 bytes sent)
a lambda with what it captured: 432
cleared afterwards, summed all the same: 6
the snapshot's table: 144
the refreshed one's: 0
""",
    "namespace": """\
[db] database made
[('IBM',), ('HP',)]
[('IBM', 101)]
the connection itself stays: cannot pickle 'sqlite3.Connection' object
""",
    "endless_map": """\
703 is the first to take more than 150 steps: 170
inputs taken ahead are bounded: True
""",
    "errors_and_death": """\
3 of apples wanted (item: apples); the remote line is told: True
died: exit code -9, while running code 'os.kill(os.getpid(), 9)'
its neighbours: [1, 2, 4, 8, 16]
done at the second try
too long: interrupted
""",
    "kept_results": """\
40 questions, the same answers: True
kept, it is not unpickled: # times as fast
sorted, and still in the drones: [9927, 10183, 9886, 10004]
in order: True
""",
    "in_asyncio": """\
6e766f32 a5b96aac
[2, 4, 8]
['6e76', 'a5b9', 'a72d']
the deadline interrupted the drone, too
and it is free again
""",
    "commstime": """\
it counts: [0, 1, 2, 3, 4]
20000 rounds: # us each
""",
    "commstime_drones": """\
it counts: [0, 1, 2, 3, 4]
1000 rounds: # us each
""",
    "token_ring": """\
20 rounds in 8 drones: the token was handed on 160 times
# us each
""",
    "sharded": """\
one image: 7000 processes, # bytes each, # s
2 drones: 14000 processes, # bytes each, # s
""",
    "process_count": """\
3501 processes: # bytes each, # s
7001 processes: # bytes each, # s
14001 processes: # bytes each, # s
""",
    "mandelbrot": """\
80 x 60, at most 100 steps
in sequence          # s, 1.00 times the sequential one
a process per row    # s, # times the sequential one
a process per pixel  # s, # times the sequential one
all images are equal
""",
    "cholesky": """\
1200 x 1200 in tiles of 200 x 200: both as numpy has it: True
plain # s, two drones # s, # times as fast
""",
    "green_calls": """\
50 naps of 0.2 s, in less than 10 s: True
kept: ['one', 'three', 'two']
and so did a plain function
""",
    "wrapped_requests": """\
1000 orders of 1000 green threads, in 1 transaction
1000 more, in 1000
2000 are there; together was # times as fast
199 files, read in 1 crossing, the last is 198
only one was not there: 199.txt
""",
    "pore": """\
25 % are painted
50 % are painted
75 % are painted
100 % are painted
240 rows by 12 calls; bytes that came back: 0
the same as results: True; bytes that came back: #
and now the pore 'picture' is closed
""",
}


def test_every_example_has_its_output_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == PRINTED.keys()


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_prints_what_it_should(name: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert (run.returncode, run.stderr) == (0, "")
    assert re.fullmatch(re.escape(PRINTED[name]).replace(r"\#", r"[\d.,]+"), run.stdout), run.stdout
