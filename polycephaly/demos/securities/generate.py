"""Generate symbol-directory files, the same at every run, so that the demo needs no exchange.

The companies are invented, in the formats of the exchange. The number of funds is a seventh of the
real one, spread over the letters as the real ones are. The files differ in line ends and footers,
and contain the rows with which parsers of real files fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import cycle, islice, product

from .parse import FUNDS, NASDAQ_LISTED, OTHER_LISTED, Document

HOUSES = """
    Alder Ashford Avon Birch Beacon Bramley Cedar Corvid Cobalt Dover Drake Dunmore Elm Eastgate
    Ember Fairfax Falcon Fenwick Garnet Gale Glade Harrow Hazel Hollis Iris Ives Inver Juniper Jura
    Jasper Kestrel Kendal Kite Larch Lindale Loxley Maple Merlin Moor Northam Nettle Noble Oak Otter
    Orme Pine Plover Paxton Quill Quarry Quince Rowan Raven Ripley Sable Sorrel Stour Tansy Teal
    Thorne Umber Ulver Usk Vale Verity Vesper Willow Wren Wexford Yarrow Yew Yarm Zephyr Zinnia Zeal
""".split()  # noqa: SIM905
"""Three invented houses per letter; none with X, because the exchange's file of 2015 has no fund
with X.
"""

# fmt: off
FUNDS_PER_LETTER = {
    "A": 509, "B": 239, "C": 373, "D": 173, "E": 70, "F": 1031, "G": 193, "H": 89, "I": 145,
    "J": 252, "K": 13, "L": 110, "M": 347, "N": 147, "O": 44, "P": 309, "Q": 5, "R": 86,
    "S": 152, "T": 363, "U": 41, "V": 221, "W": 75, "Y": 3, "Z": 3,
}
# fmt: on

REGIONS = ("Global", "European", "Emerging", "Domestic", "Pacific")
STYLES = (
    "Growth", "Value", "Income", "Equity", "Bond", "Balanced", "Index", "Small Cap", "Large Cap",
)  # fmt: skip
CLASSES = (
    "Class A", "Class C", "Class I", "Institutional", "Investor", "Retirement", "Service",
    "Premier",
)  # fmt: skip
TRADES = (
    "Mining", "Foods", "Systems", "Pharma", "Energy", "Rail", "Air", "Media", "Steel", "Retail",
)  # fmt: skip

# Without vowels, so that no generated symbol is a word: NA, ON and TRUE come from the odd rows
# only.
_SYMBOL_LETTERS = "BCDFGHJKLMNPQRSTVWZ"

NASDAQ_HEADER = (
    "Symbol|Security Name|Market Category|Test Issue|Financial Status|Round Lot Size|ETF|NextShares"
)
OTHER_HEADER = (
    "ACT Symbol|Security Name|Exchange|CQS Symbol|ETF|Round Lot Size|Test Issue|NASDAQ Symbol"
)
FUND_HEADER = "Fund Symbol|Fund Name|Fund Family Name|Type|Category|Pricing Agent"

ODD_NASDAQ_ROWS = (
    "TRUE|Truth Machines Corp. - Common Stock|S|N|N|100|N|N",
    "ON|Onward Semiconductors - Common Stock |Q|N|D|100|N|N",
    "ODDLOT|Costly Shares Ltd. - Class B|Q|N|N|1|N|N",
    "ZXYZ.A|Nasdaq Symbology Test Common Stock|Q|Y|N|100||N",
)
ODD_OTHER_ROWS = (
    "NA|Nano Abacus Ltd Ordinary Shares|A|NA|N|100|N|NA",
    "AAIC$B|Alder Investment Corp 7.00% |N|AAICpB|N|100|N|AAIC-B",
    "TENLOT|Ten at a Time Inc. Common Stock|N|TENLOT|N|10|N|TENLOT",
    "CTEST.E|NYSE Test One Common Stock|N|CTEST.E||100|Y|CTEST.E",
)
ODD_FUND_ROWS = (
    "METAX|ALPINE | Metis Micro Cap Fund Class A|Financial Investors Trust|MS|O|"
    "Alpine Distributors, Inc.",
    'QUOTX|The "Unbalanced Allocation Fund|Quoted Trust|MF|O|Nasdaq',
    "DASHX|Growth \N{EN DASH} Income Fund|Dash & Sons\N{NO-BREAK SPACE}|MF|O|Nasdaq",
    "TABSX|Hartford Management\tSerie|Tabular Advisors, Inc.|US|E|Nasdaq",
    "LOWCX|iOwnIt Fund|Lower Case Trust|AN|M|Nasdaq",
    "THRIX|3 Oaks Growth Fund|Three Oaks|MF|O|Nasdaq",
    "PAREX|(Closed) Bond Fund|Parenthetical Trust|MF|C|Nasdaq",
    "TWINAX|The Same Name Fund|Twin Trust|MF|O|Nasdaq",
    "TWINCX|The Same Name Fund|Twin Trust|MF|O|Nasdaq",
)


def symbol_directory() -> dict[str, Document]:
    """Return the three generated files by name, as `read_directory` does for a directory."""
    texts = {
        NASDAQ_LISTED: _file(NASDAQ_HEADER, [*_nasdaq_rows(), *ODD_NASDAQ_ROWS], footer="|||||||"),
        OTHER_LISTED: _file(OTHER_HEADER, [*_other_rows(), *ODD_OTHER_ROWS], footer="||||||"),
        FUNDS: _file(FUND_HEADER, [*_fund_rows(), *ODD_FUND_ROWS], footer=None),
    }
    return {name: Document(f"generated {name}", text) for name, text in texts.items()}


def _file(header: str, rows: Iterable[str], footer: str | None) -> str:
    """Return a whole file, sorted by symbol.

    With a footer, lines end in CRLF, as in fresh downloads.
    """
    lines = [header, *sorted(rows)]
    if footer is None:
        return "\n".join(lines) + "\n"
    return "\r\n".join([*lines, f"File Creation Time: 1120200916:00{footer}"]) + "\r\n"


def _nasdaq_rows() -> Iterator[str]:
    tickers = _tickers("N")
    for name, tier in zip(_companies(700), cycle("QGSS"), strict=False):
        yield f"{next(tickers)}|{name} - Common Stock|{tier}|N|N|100|N|N"
    for name in _trackers(100):
        yield f"{next(tickers)}|{name}|G|N|N|100|Y|N"


def _other_rows() -> Iterator[str]:
    tickers = _tickers("T")
    for exchange, stocks, etfs in ("N", 520, 0), ("A", 60, 0), ("P", 0, 240), ("Z", 0, 80):
        names = [(f"{name} Common Stock", "N") for name in _companies(stocks)]
        names += [(name, "Y") for name in _trackers(etfs)]
        for name, etf in names:
            ticker = next(tickers)
            yield f"{ticker}|{name}|{exchange}|{ticker}|{etf}|100|N|{ticker}"


def _fund_rows() -> Iterator[str]:
    tickers = _tickers("F")
    kinds = cycle(("MF", "MS", "US", "CT"))
    for letter, number in FUNDS_PER_LETTER.items():
        houses = [house for house in HOUSES if house.startswith(letter)]
        for region, style, share, house in islice(
            product(REGIONS, STYLES, CLASSES, houses), number
        ):
            name = f"{house} {region} {style} Fund - {share}"
            symbol, kind = next(tickers), next(kinds)
            yield f"{symbol}X|{name}|{house} Funds|{kind}|O|{house} Services & Trust Company"


def _companies(number: int) -> Iterator[str]:
    return (f"{house} {trade} Inc." for trade, house in islice(product(TRADES, HOUSES), number))


def _trackers(number: int) -> Iterator[str]:
    return (f"{house} {style} ETF" for style, house in islice(product(STYLES, HOUSES), number))


def _tickers(first: str) -> Iterator[str]:
    return (first + "".join(letters) for letters in product(_SYMBOL_LETTERS, repeat=3))
