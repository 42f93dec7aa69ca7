"""Work that computes, for the demo's second part: indicators of a year of prices.

The prices are simulated, the same for a symbol at every run, because price histories are not free.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, stdev

DAYS = 250
"""Days of trading in a year."""
WINDOW_DAYS = 20
"""Days of a moving average."""

Indicators = tuple[float, float, float]
"""Volatility of a day, greatest fall from a previous maximum, and share of the days whose price is
above the moving average.
"""


def indicators(symbol: str) -> Indicators:
    """Return the indicators of the security with this symbol."""
    random = Random(symbol)
    prices = [100.0]
    for _ in range(DAYS):
        prices.append(prices[-1] * random.gauss(1.0003, 0.015))
    changes = [after / before - 1 for before, after in pairwise(prices)]
    highest, fall = prices[0], 0.0
    for price in prices:
        highest = max(highest, price)
        fall = max(fall, 1 - price / highest)
    averages = [fmean(prices[day - WINDOW_DAYS : day]) for day in range(WINDOW_DAYS, len(prices))]
    above = sum(map(float.__gt__, prices[WINDOW_DAYS:], averages))
    return stdev(changes), fall, above / len(averages)
