"""Timelines: what drones and green threads did, and when; as text, pictures, a page, or a trace.

hearing ──entry for each batch──> Record (a crew's, bounded) ──> Timeline ──> text, verdict
green   ──what threads did──────────┘                               ├──> svg, png, html   (rows, picture)
                                                                    └──> json             (trace)
"""

from __future__ import annotations

from .spans import Span, Sums
from .timeline import Timeline

__all__ = ["Span", "Sums", "Timeline"]
