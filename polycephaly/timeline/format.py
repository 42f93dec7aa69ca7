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


def printable(name: str) -> str:
    """Replace the characters of a user's name that would move the cursor or change colours."""
    return "".join(each if each.isprintable() else " " for each in name)
