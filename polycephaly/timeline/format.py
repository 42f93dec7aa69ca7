"""Numbers and names as a timeline shows them."""

from __future__ import annotations


def seconds(value: float) -> str:
    """Return a time with three significant digits and a suitable unit."""
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if value < limit * 0.9995:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def size(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def printable(name: object) -> str:
    """Replace the characters that would move the cursor or change colours, and that XML lacks."""
    return "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(name)
    )


def shorten(name: str, columns: int) -> str:
    """Return a name as printable text of at most so many characters."""
    name = printable(name)
    if len(name) <= columns:
        return name
    # The number of a green thread distinguishes it from others of the same name, so it is kept.
    name, mark, number = name.rpartition(" #")
    keep = columns - len(mark + number) - 1
    if mark and keep > 4:
        return f"{name[:keep]}…{mark}{number}"
    return f"{(name + mark + number)[: max(1, columns - 1)]}…"
