"""The clock of all limits, heartbeats and spans: `time.monotonic`, whoever has replaced that.

Tests stop the clock of a program (freezegun puts functions of its own in place of `time.monotonic`
in every module that has it), also of one that loads this package meanwhile. Limits of pools must be
reached then, too, and times of drones be comparable.
"""

from __future__ import annotations

from functools import partial
from time import CLOCK_MONOTONIC, clock_gettime

monotonic = partial(clock_gettime, CLOCK_MONOTONIC)
"""Return seconds, as `time.monotonic` does, which reads the same clock of the system."""
