"""Samples of stacks as a flame graph (`flame.html`), as a speedscope file, and as a table.

Names come from users. They are in the JSON of the page, where every ``<`` is escaped, and the
script shows them as text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from html import escape

from ..runtime.sampler import Frame
from ..runtime.version import __version__
from .page import data_of, make_page, read_text
from .picture import OTHERS_COLOUR, PALETTE

CONTROLLER = "controller"
"""The name of this process."""
Samples = Counter[tuple[Frame, ...]]
"""Of one process: the number of samples of each stack, outermost frame first."""


def own_samples(samples: Samples) -> Counter[tuple[str, str]]:
    """Return how many samples each function, by name and file, was the innermost frame of."""
    own: Counter[tuple[str, str]] = Counter()
    for stack, count in samples.items():
        own[stack[-1][:2]] += count
    return own


def of_drones(processes: Mapping[str, Samples]) -> Samples:
    """Return the samples of all processes but the controller."""
    of_each = (samples for name, samples in processes.items() if name != CONTROLLER)
    return sum(of_each, Counter())


def _shared(
    processes: Mapping[str, Samples],
) -> tuple[list[Frame], dict[str, list[tuple[list[int], int]]]]:
    """Return all frames, and the stacks of each process as indices of frames, with their counts."""
    frames: dict[Frame, int] = {}
    stacks = {
        name: [
            ([frames.setdefault(frame, len(frames)) for frame in stack], count)
            for stack, count in samples.items()
        ]
        for name, samples in processes.items()
    }
    return list(frames), stacks


def speedscope_of(processes: Mapping[str, Samples], hertz: int, title: str) -> bytes:
    """Return a file for https://www.speedscope.app, with a profile of each process."""
    frames, stacks = _shared(processes)
    profiles = [
        {
            "type": "sampled",
            "name": name,
            "unit": "seconds",
            "startValue": 0,
            "endValue": sum(count for _, count in each) / hertz,
            "samples": [stack for stack, _ in each],
            "weights": [count / hertz for _, count in each],
        }
        for name, each in stacks.items()
    ]
    contents = {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "exporter": f"polycephaly {__version__}",
        "name": title,
        "activeProfileIndex": 0,
        "shared": {
            "frames": [
                {"name": name, "file": file, "line": line} if file else {"name": name}
                for name, file, line in frames
            ]
        },
        "profiles": profiles,
    }
    return json.dumps(contents).encode()


def page_of(processes: Mapping[str, Samples], hertz: int, title: str, note: str) -> bytes:
    """Return the flame graphs of all drones together, and of each process, as one page."""
    frames, stacks = _shared({"all drones": of_drones(processes), **processes})
    contents = {
        "hertz": hertz,
        "frames": frames,
        "processes": [*stacks.items()],
        "palette": PALETTE,
        "other": OTHERS_COLOUR,
    }
    return make_page(
        read_text(__package__, "flame.html"),
        title=title,
        style=read_text(__package__, "page.css", "flame.css"),
        note=escape(note),
        data=data_of(contents),
    )
