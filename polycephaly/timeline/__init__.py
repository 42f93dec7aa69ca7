"""Timelines: the times at which drones and green threads worked, as text, picture, page or trace.

handlers ──entry for each batch──> TraceBuffer (bounded) ──> Timeline ──> text, bottleneck
green    ──calls of threads────────────┘                        ├──> svg, html  (rows, picture)
                                                                └──> json            (trace)
"""

from __future__ import annotations

from .spans import Span, Sums
from .timeline import Timeline

__all__ = ["Span", "Sums", "Timeline"]
