"""Read symbol-directory files, and parse them into securities.

    Document (text, and where it came from) --> Table (header, lines) --> Listing, Fund

The format is pipe-delimited, with one header line, no quoting, and in most copies a footer `File
Creation Time: ...`. Columns are found by name, because their number and order differ by year. No
row is dropped silently: unreadable content is a `SourceError` that names the file and describes the
content. That includes HTML, which the exchange returns with status 200 for a missing file.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .model import NASDAQ, Fund, Listing

NASDAQ_LISTED = "nasdaqlisted.txt"
OTHER_LISTED = "otherlisted.txt"
FUNDS = "mfundslist.txt"
FILES = (NASDAQ_LISTED, OTHER_LISTED, FUNDS)

_GZIP_MAGIC = b"\x1f\x8b"

FOOTER = "File Creation Time"


class SourceError(Exception):
    """Unexpected content of a source: `where` names the source, `problem` describes the content."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where = where
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Document:
    """A text, with the path or URL to name if the text is invalid."""

    where: str
    text: str

    @classmethod
    def decode(cls, where: str, raw: bytes) -> Document:
        """Decode UTF-8. An invalid byte spoils one character, not the row or the file."""
        return cls(where, raw.decode("utf-8-sig", errors="replace"))


def read_directory(directory: Path) -> dict[str, Document]:
    """Return the three files of a directory by plain name.

    Each may be plain or compressed (`nasdaqlisted.txt` or `nasdaqlisted.txt.gz`). If both exist,
    the plain one is read. Raises `SourceError`, which names the file, if one cannot be read.
    """
    if not directory.is_dir():
        raise SourceError(
            str(directory), "not a directory" if directory.exists() else "no such directory"
        )
    return {name: _read(directory / name) for name in FILES}


def _read(plain: Path) -> Document:
    packed = plain.with_name(plain.name + ".gz")
    path = packed if packed.exists() and not plain.exists() else plain
    try:
        raw = path.read_bytes()
        # Compression is recognised by content, because downloads lose and gain suffixes.
        return Document.decode(
            str(path), gzip.decompress(raw) if raw.startswith(_GZIP_MAGIC) else raw
        )
    except FileNotFoundError:
        raise SourceError(str(path), "no such file, neither plain nor .gz") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise SourceError(str(path), f"broken gzip data: {error}") from error
    except OSError as error:
        raise SourceError(str(path), error.strerror or str(error)) from error


class Table:
    """The data lines of a document, split into named fields.

    If a line has more fields than the header, the surplus pipes belong to the `name` column: fields
    left of that column are counted from the left, fields right of it from the right.
    """

    def __init__(self, document: Document, *, name: str, needs: Sequence[str]) -> None:
        # Not splitlines(), because a form feed or U+2028 inside a name would end a line.
        numbered = ((n, line.rstrip("\r")) for n, line in enumerate(document.text.split("\n"), 1))
        lines = [(n, line) for n, line in numbered if line.strip()]
        self.where = document.where
        self.header = lines[0][1] if lines else ""
        self.columns = [column.strip() for column in self.header.split("|")]
        required = (name, *needs)
        if not set(required) <= set(self.columns):
            expected = ", ".join(required)
            raise SourceError(
                self.where,
                f"expected a header with {expected}; got {_describe_text(document.text)}",
            )
        self.lines = [line for line in lines[1:] if not line[1].startswith(FOOTER)]
        self._name = self.columns.index(name)

    def __iter__(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each data line unchanged, with its fields by column."""
        for number, line in self.lines:
            fields = line.split("|")
            surplus = len(fields) - len(self.columns)
            if surplus < 0:
                problem = (
                    f"line {number} has {len(fields)} fields where the header has "
                    f"{len(self.columns)}"
                )
                raise SourceError(self.where, problem)
            name = slice(self._name, self._name + surplus + 1)
            fields[name] = ["|".join(fields[name])]
            yield line, dict(zip(self.columns, map(str.strip, fields), strict=True))


def nasdaq_listed(document: Document) -> list[Listing]:
    """Return all listings of `nasdaqlisted.txt`, test issues included.

    Old copies have no ETF column, and no ETFs.
    """
    table = Table(document, name="Security Name", needs=("Symbol", "Test Issue"))
    return [_listing(row, row["Symbol"], NASDAQ) for _, row in table]


def other_listed(document: Document) -> list[Listing]:
    """Return all listings of `otherlisted.txt` (the other exchanges), test issues included."""
    table = Table(
        document, name="Security Name", needs=("ACT Symbol", "Exchange", "ETF", "Test Issue")
    )
    return [_listing(row, row["ACT Symbol"], row["Exchange"]) for _, row in table]


def fund_table(document: Document) -> Table:
    """Return the table of `mfundslist.txt`, or of one page of funds."""
    return Table(document, name="Fund Name", needs=("Fund Symbol",))


def funds(document: Document) -> list[Fund]:
    """Return all funds of `mfundslist.txt`, or of one page of funds."""
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


def _describe_text(text: str) -> str:
    """Describe, in a few words on one line, a text that is no symbol-directory file."""
    start = text.lstrip()[:60]
    if not start:
        return "an empty file"
    if start.startswith("<"):
        return "an HTML page"
    first_line = start.partition("\n")[0].rstrip()
    return f"text that begins {first_line!r}"
