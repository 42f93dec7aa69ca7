"""The three symbol-directory files: their names, and how to read them from a directory.

Each may be plain or compressed (`nasdaqlisted.txt` or `nasdaqlisted.txt.gz`). If both exist, the
plain one is read.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from .parse import Document, SourceError

NASDAQ_LISTED = "nasdaqlisted.txt"
OTHER_LISTED = "otherlisted.txt"
FUNDS = "mfundslist.txt"
FILES = (NASDAQ_LISTED, OTHER_LISTED, FUNDS)

_GZIP_MAGIC = b"\x1f\x8b"


def read_directory(directory: Path) -> dict[str, Document]:
    """Return the three files of a directory by plain name.

    Raises `SourceError`, which names the file, if one cannot be read.
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
