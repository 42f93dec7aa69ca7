"""Securities, the five lists that the demo loads, and the pages of funds.

This module does not depend on the source of a security. The symbol is the key: several symbols may
have the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase

LISTS = ("nyse", "amex", "nasdaq", "etfs", "funds")
"""The names of the five lists, in the order in which they are loaded and shown."""

OTHER_PAGE = "0-9"
PAGES = (OTHER_PAGE, *ascii_uppercase)
"""The pages of funds: one for names that do not begin with a letter (3i, 1290, 'Advised'), then one
per letter.
"""

NYSE, AMEX, NASDAQ = "N", "A", "Q"
"""Exchange codes of the files. The NASDAQ file has no such column: it lists one exchange."""


# No slots: frozen dataclasses with slots are pickled and unpickled by Python code, at half the
# speed.
@dataclass(frozen=True)
class Security:
    """The attributes that all securities have."""

    symbol: str
    name: str


@dataclass(frozen=True)
class Listing(Security):
    """A security that trades on an exchange: a stock, an ETF, or an issue for tests."""

    exchange: str
    tier: str
    etf: bool
    test: bool
    round_lot: int

    @property
    def stock(self) -> bool:
        return not self.etf and not self.test


@dataclass(frozen=True)
class Fund(Security):
    """A mutual fund, unit trust or annuity."""

    family: str
    kind: str
    category: str
    agent: str


Lists = Mapping[str, Sequence[Security]]
"""The result of one experiment: a list of securities under each name of `LISTS`."""


def stocks(listings: Iterable[Listing], exchange: str) -> list[Listing]:
    """Return the stocks of one exchange, without its ETFs and test issues."""
    return [listing for listing in listings if listing.exchange == exchange and listing.stock]


def etfs(listings: Iterable[Listing]) -> list[Listing]:
    """Return the exchange-traded funds of all exchanges."""
    return [listing for listing in listings if listing.etf]


def page_of(name: str) -> str:
    """Return the page of `PAGES` for a fund of this name.

    >>> page_of("iShares"), page_of("3i Growth"), page_of("'Advised' Income")
    ('I', '0-9', '0-9')
    """
    initial = name[:1].upper()
    return initial if initial in PAGES else OTHER_PAGE
