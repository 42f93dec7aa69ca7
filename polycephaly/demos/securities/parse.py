"""From the text of a symbol-directory file to securities.

    Document (text, and where it came from) --> Table (header, lines) --> Listing, Fund

The format: pipe-delimited, one header line, no quoting, and a footer `File Creation Time: ...` in
most copies. Columns go by name, as their number and order differ by year. A row never disappears:
what cannot be read is a `SourceError` that names the file and says what came instead. That includes
HTML, which the exchange answers with status 200 for a missing file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .model import NASDAQ, Fund, Listing

FOOTER = "File Creation Time"


class SourceError(Exception):
    """A source did not give what it should: `where` names it, `problem` says what came instead."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and the path or URL to name when it turns out wrong."""

    where: str
    text: str

    @classmethod
    def decode(cls, where: str, raw: bytes) -> Document:
        """UTF-8 as the files are; a stray byte spoils one character, not the row and not the
        file."""
        return cls(where, raw.decode("utf-8-sig", errors="replace"))


class Table:
    """The data lines of a document, and how to split them into named fields.

    A line with more fields than the header has pipes in its `name` column: whatever stands left of
    that column counts from the left, whatever stands right of it from the right."""

    def __init__(self, document: Document, *, name: str, needs: Sequence[str]) -> None:
        # Not splitlines(): to it, a form feed or U+2028 inside a name ends a line.
        numbered = ((n, line.rstrip("\r")) for n, line in enumerate(document.text.split("\n"), 1))
        lines = [(n, line) for n, line in numbered if line.strip()]
        self.where = document.where
        self.header = lines[0][1] if lines else ""
        self.columns = [column.strip() for column in self.header.split("|")]
        required = (name, *needs)
        if not set(required) <= set(self.columns):
            expected = ", ".join(required)
            raise SourceError(
                self.where, f"expected a header with {expected}; got {_what(document.text)}"
            )
        self.lines = [line for line in lines[1:] if not line[1].startswith(FOOTER)]
        self._name = self.columns.index(name)

    def __iter__(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Each data line as it stands, and its fields by column."""
        for number, line in self.lines:
            fields = line.split("|")
            surplus = len(fields) - len(self.columns)
            if surplus < 0:
                problem = f"line {number} has {len(fields)} fields where the header has {len(self.columns)}"
                raise SourceError(self.where, problem)
            name = slice(self._name, self._name + surplus + 1)
            fields[name] = ["|".join(fields[name])]
            yield (
                line,
                {column: field.strip() for column, field in zip(self.columns, fields, strict=True)},
            )


def nasdaq_listed(document: Document) -> list[Listing]:
    """Everything in `nasdaqlisted.txt`, test issues included. Old copies have no ETF column, and no
    ETFs."""
    table = Table(document, name="Security Name", needs=("Symbol", "Test Issue"))
    return [_listing(row, row["Symbol"], NASDAQ) for _, row in table]


def other_listed(document: Document) -> list[Listing]:
    """Everything in `otherlisted.txt`: what trades on the other exchanges, test issues included."""
    table = Table(
        document, name="Security Name", needs=("ACT Symbol", "Exchange", "ETF", "Test Issue")
    )
    return [_listing(row, row["ACT Symbol"], row["Exchange"]) for _, row in table]


def fund_table(document: Document) -> Table:
    """The table in `mfundslist.txt`, or on one page of funds."""
    return Table(document, name="Fund Name", needs=("Fund Symbol",))


def funds(document: Document) -> list[Fund]:
    """Everything in `mfundslist.txt`, or on one page of funds."""
    return [
        Fund(
            symbol=row["Fund Symbol"],
            name=row["Fund Name"],
            family=row.get("Fund Family Name", ""),
            kind=row.get("Type", ""),
            category=row.get("Category", ""),
            agent=row.get("Pricing Agent", ""),
        )
        for _, row in fund_table(document)
    ]


def _listing(row: dict[str, str], symbol: str, exchange: str) -> Listing:
    lot = row.get("Round Lot Size", "")
    return Listing(
        symbol=symbol,
        name=row["Security Name"],
        exchange=exchange,
        tier=row.get("Market Category", ""),
        etf=row.get("ETF") == "Y",
        test=row["Test Issue"] == "Y",
        round_lot=int(lot) if lot.isdecimal() else 0,
    )


def _what(text: str) -> str:
    """What a text is that is no symbol-directory file, in a few words on one line."""
    start = text.lstrip()[:60]
    if not start:
        return "nothing: it is empty"
    if start.startswith("<"):
        return "an HTML page"
    first_line = start.partition("\n")[0].rstrip()
    return f"text that begins {first_line!r}"
