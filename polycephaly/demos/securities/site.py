"""Load the five lists over HTTP.

Each experiment uses this module and divides the tasks in its own way. A `Site` is only an address,
so it can be sent: its methods go to drones as callables, and its `repr` is an expression for code
strings.

    site.load_funds()   ==   load_letter(page) for each page   <--HTTP--   /funds/A, /funds/B, ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx

from ... import Promise, green
from . import parse
from .model import AMEX, NASDAQ, NYSE, PAGES, Fund, Listing, Security, etfs, page_of, stocks
from .parse import FUNDS, NASDAQ_LISTED, OTHER_LISTED, Document, SourceError

Page = tuple[Callable[[Document], Sequence[Security]], Document]
"""A page that is not parsed yet, with the function that parses it."""

NASDAQ_TRADER = "https://www.nasdaqtrader.com/dynamic/SymDir"
RESPONSE_TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Site:
    """A server of the three files, and of the pages of funds below `/funds/`.

    Each method downloads its files anew, and raises `SourceError` if that fails. A site holds no
    connection and each download has a client of its own, so any number of threads may load from one
    site.
    """

    url: str

    # On the loopback, neither a proxy from the environment nor a certificate store is used.
    _client: ClassVar[Mapping[str, Any]] = {"trust_env": False, "verify": False}
    _fund_pages: ClassVar[Sequence[str]] = [f"funds/{letter}" for letter in PAGES]

    def load_nyse(self) -> list[Listing]:
        """Return the stocks of the New York Stock Exchange."""
        return stocks(parse.other_listed(self.get(OTHER_LISTED)), NYSE)

    def load_amex(self) -> list[Listing]:
        """Return the stocks of NYSE American, the former AMEX."""
        return stocks(parse.other_listed(self.get(OTHER_LISTED)), AMEX)

    def load_nasdaq(self) -> list[Listing]:
        """Return the stocks of NASDAQ."""
        return stocks(parse.nasdaq_listed(self.get(NASDAQ_LISTED)), NASDAQ)

    def load_etfs(self) -> list[Listing]:
        """Return the exchange-traded funds of all exchanges, those of NASDAQ first."""
        nasdaq = parse.nasdaq_listed(self.get(NASDAQ_LISTED))
        return etfs(nasdaq + parse.other_listed(self.get(OTHER_LISTED)))

    def load_letter(self, letter: str) -> list[Fund]:
        """Return the funds on one of `PAGES`."""
        return parse.funds(self.get(f"funds/{letter}"))

    def load_funds(self) -> list[Fund]:
        """Return all funds, loaded one page after another."""
        return [fund for letter in PAGES for fund in self.load_letter(letter)]

    def load_pages(self) -> list[Page]:
        """Return the two files of listings and the pages of funds, for the demo's second part."""
        return [
            (parse.nasdaq_listed, self.get(NASDAQ_LISTED)),
            (parse.other_listed, self.get(OTHER_LISTED)),
            *((parse.funds, page) for page in green.map(self.get, self._fund_pages)),
        ]

    def clear_cache(self) -> None:
        """Drop the data that this process keeps of the site, so that experiments start alike."""

    def get(self, path: str) -> Document:
        url = f"{self.url}/{path}"
        try:
            with httpx.Client(timeout=RESPONSE_TIMEOUT_SECONDS, **self._client) as client:
                response = client.get(url)
        except httpx.HTTPError as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise SourceError(url, f"no answer: {reason}") from error
        if response.status_code != httpx.codes.OK:
            status = f"{response.status_code} {response.reason_phrase}"
            raise SourceError(url, f"expected a file; got status {status}")
        return Document.decode(url, response.content)


@dataclass(frozen=True, slots=True)
class LiveSite(Site):
    """The server of the exchange.

    The server has no pages of funds: each process cuts them from one download.
    """

    url: str = NASDAQ_TRADER

    _client: ClassVar[Mapping[str, Any]] = {"follow_redirects": True}
    _fund_pages: ClassVar[Sequence[str]] = [FUNDS]

    def load_letter(self, letter: str) -> list[Fund]:
        return _pages(self).get(letter, [])

    def clear_cache(self) -> None:
        _page_promises.pop(self.url, None)


Pages = Mapping[str, list[Fund]]

_page_promises: dict[str, Promise[Pages]] = {}
"""The pages of each live site that were cut in this process, or are being cut."""

# After a fork, no thread of the child would finish a cut that was in progress.
os.register_at_fork(after_in_child=_page_promises.clear)


def _pages(site: LiveSite) -> Pages:
    """Return the pages of a site, downloaded once.

    If several threads come together, one downloads, and all get its result or its error. After an
    error, the next caller tries again.
    """
    own_promise: Promise[Pages] = Promise()
    # Atomic: exactly one thread gets its own promise.
    promise = _page_promises.setdefault(site.url, own_promise)
    if promise is own_promise:
        try:
            pages: dict[str, list[Fund]] = {}
            for fund in parse.funds(site.get(FUNDS)):
                pages.setdefault(page_of(fund.name), []).append(fund)
        except BaseException as error:
            _page_promises.pop(site.url, None)
            promise.set_exception(error)
            raise
        promise.set_result(pages)
    return promise.value
