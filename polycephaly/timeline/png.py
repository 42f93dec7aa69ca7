"""A drawing as PNG, made by Pillow (``pip install 'pillow>=11'``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from .picture import Bar, TextLabel, draw

if TYPE_CHECKING:
    from .contents import Contents

SCALE = 2  # pixels of the picture for one of the drawing
MAX_HEIGHT_PIXELS = 32_000  # the rest is cut off
LIGHT_COLOURS = {
    "ink": "#1c2126", "soft": "#66707a", "line": "#e3e7eb", "paper": "#ffffff", "alarm": "#d11f2f",
}  # fmt: skip


def png_of(timeline: Contents, title: str, bars: Sequence[Bar] = ()) -> bytes:
    from PIL import Image, ImageDraw

    drawing = draw(timeline, title, bars)
    height = min(MAX_HEIGHT_PIXELS, round(drawing.height * SCALE))
    image = Image.new("RGB", (round(drawing.width * SCALE), height), LIGHT_COLOURS["paper"])
    pen = ImageDraw.Draw(image, "RGBA")
    for part in drawing.parts:
        colour = LIGHT_COLOURS.get(part.colour, part.colour)
        if isinstance(part, TextLabel):
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[part.anchor]
            font = _font(round(part.size * SCALE))
            stroke = 0.4 * SCALE if part.bold else 0
            place = part.x * SCALE, part.y * SCALE
            pen.text(place, part.text, colour, font, anchor, stroke_width=stroke)
            continue
        right, bottom = (part.x + part.width) * SCALE - 1, (part.y + part.height) * SCALE - 1
        if right < part.x * SCALE or bottom < part.y * SCALE:
            continue
        alpha = f"{round(255 * part.opacity):02x}"
        pen.rectangle((part.x * SCALE, part.y * SCALE, right, bottom), f"{colour}{alpha}")
    out = BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


@lru_cache(maxsize=16)
def _font(size: int) -> Any:
    from PIL import ImageFont

    try:
        return ImageFont.truetype("DejaVuSans.ttf", size)
    except OSError:
        return ImageFont.load_default(size)
