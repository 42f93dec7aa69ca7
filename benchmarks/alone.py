"""One figure, in a process of its own: `python -m benchmarks.alone MEASUREMENT PEER SIZES` prints
it as JSON."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module

from .suite import SUITE, Sizes, Skipped


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a peer prints is not the answer
    name, peer, sizes = sys.argv[1:]
    module, _, function = SUITE[name].take.partition(":")
    try:
        take = getattr(import_module(f"{__package__}.{module}"), function)
        answer = take(peer, Sizes(**json.loads(sizes)))
    except Skipped as reason:
        answer = {"skipped": str(reason)}
    os.write(answers, json.dumps(answer).encode())


if __name__ == "__main__":
    main()
