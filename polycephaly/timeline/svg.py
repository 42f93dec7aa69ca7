"""A timeline as an SVG file, and a bar chart as an `svg` element for an HTML page.

The file has its own colours, for light and dark mode (`prefers-color-scheme`). The element takes
the colours from variables of the page (page.css).
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from .format import printable
from .picture import Bar, Box, Drawing, TextLabel, draw, draw_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .contents import Contents

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
STYLE = """
  svg { --ink: #1c2126; --soft: #66707a; --line: #e3e7eb; --paper: #ffffff; --alarm: #d11f2f; }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e8ebee; --soft: #97a1ab; --line: #30363d; --paper: #14181c; --alarm: #ff5a67; }
  }
"""


def svg_of(timeline: Contents, title: str, bars: Sequence[Bar] = ()) -> bytes:
    """Return the SVG file: `title` as a heading, `bars` if there are any, and the timeline."""
    drawing = draw(timeline, title, bars)
    page = Box(0, 0, drawing.width, drawing.height, "paper")
    parts = [
        f"<title>{_escape(title)}</title>",
        f"<style>{STYLE}</style>",
        *_elements(Drawing(parts=[page])),
        *_elements(drawing),
    ]
    return _document(drawing, parts).encode("utf-8", "replace")


def bars_of(bars: Sequence[Bar]) -> str:
    """Return a bar chart for a page that defines the colours."""
    drawing = Drawing(height=4)
    draw_bars(drawing, bars)
    return _document(drawing, _elements(drawing))


def _document(drawing: Drawing, parts: Iterator[str] | list[str]) -> str:
    width, height = round(drawing.width), round(drawing.height)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}"'
    )
    return "\n".join([f'{head} font-family="{FONT}">', *parts, "</svg>", ""])


def _elements(drawing: Drawing) -> Iterator[str]:
    for part in drawing.parts:
        fill = part.colour if part.colour.startswith("#") else f"var(--{part.colour})"
        if isinstance(part, TextLabel):
            weight = ' font-weight="600"' if part.bold else ""
            anchor = f' text-anchor="{part.anchor}"' if part.anchor != "start" else ""
            position = f'x="{part.x:.1f}" y="{part.y:.1f}" font-size="{part.size:g}"'
            yield f'<text {position}{anchor}{weight} fill="{fill}">{_escape(part.text)}</text>'
            continue
        opacity = f' fill-opacity="{part.opacity:g}"' if part.opacity < 1 else ""
        position = (
            f'x="{part.x:.2f}" y="{part.y:.2f}" width="{part.width:.2f}" height="{part.height:.2f}"'
        )
        end = f"><title>{_escape(part.title)}</title></rect>" if part.title else "/>"
        yield f'<rect {position} fill="{fill}"{opacity}{end}'


def _escape(text: str) -> str:
    return escape(printable(text))
