"""Symbol-directory files: on disk, plain or compressed, named when they cannot be read; and
generated."""

from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import pytest

from polycephaly.demos.securities import generate, parse
from polycephaly.demos.securities.model import page_of
from polycephaly.demos.securities.parse import (
    FILES,
    FUNDS,
    NASDAQ_LISTED,
    OTHER_LISTED,
    SourceError,
    read_directory,
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, document in generate.symbol_directory().items():
        (tmp_path / name).write_bytes(document.text.encode())
    return tmp_path


def pack(path: Path) -> Path:
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed


def test_plain_and_compressed_files_read_the_same(directory: Path) -> None:
    plain = read_directory(directory)
    for name in FILES:
        pack(directory / name)
    packed = read_directory(directory)
    assert [packed[name].text for name in FILES] == [plain[name].text for name in FILES]
    assert packed[FUNDS].where == str(directory / "mfundslist.txt.gz")


def test_compression_is_told_by_content(directory: Path) -> None:
    pack(directory / FUNDS).rename(directory / FUNDS)
    assert read_directory(directory)[FUNDS].text.startswith("Fund Symbol|")


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="nowhere: no such directory"):
        read_directory(tmp_path / "nowhere")


def test_a_file_in_place_of_the_directory_is_named(directory: Path) -> None:
    with pytest.raises(SourceError, match=r"mfundslist\.txt: not a directory"):
        read_directory(directory / FUNDS)


def test_a_missing_file_is_named(directory: Path) -> None:
    (directory / OTHER_LISTED).unlink()
    with pytest.raises(SourceError, match=r"otherlisted\.txt: no such file"):
        read_directory(directory)


def test_a_truncated_archive_is_named(directory: Path) -> None:
    packed = pack(directory / NASDAQ_LISTED)
    packed.write_bytes(packed.read_bytes()[:1000])
    with pytest.raises(SourceError, match=r"nasdaqlisted\.txt\.gz: broken gzip data"):
        read_directory(directory)


def test_a_directory_under_a_file_name_is_named(directory: Path) -> None:
    (directory / FUNDS).unlink()
    (directory / FUNDS).mkdir()
    with pytest.raises(SourceError, match=r"mfundslist\.txt: Is a directory"):
        read_directory(directory)


def test_the_generated_files_are_the_same_each_time() -> None:
    assert generate.symbol_directory() == generate.symbol_directory()


def test_the_generated_symbols_are_unique() -> None:
    files = generate.symbol_directory()
    rows = [
        *parse.nasdaq_listed(files[NASDAQ_LISTED]),
        *parse.other_listed(files[OTHER_LISTED]),
        *parse.funds(files[FUNDS]),
    ]
    assert [
        symbol for symbol, times in Counter(row.symbol for row in rows).items() if times > 1
    ] == []


def test_the_generated_funds_are_spread_like_the_real_ones() -> None:
    funds = parse.funds(generate.symbol_directory()[FUNDS])
    pages = Counter(page_of(fund.name) for fund in funds)
    assert pages.most_common(1)[0][0] == "F"
    assert pages["X"] == 0
    assert pages["0-9"] == 2
    assert len(funds) == sum(generate.FUNDS_PER_LETTER.values()) + len(generate.ODD_FUND_ROWS)


def test_the_generated_files_hold_odd_rows() -> None:
    files = generate.symbol_directory()
    funds = {fund.symbol: fund for fund in parse.funds(files[FUNDS])}
    others = {listing.symbol: listing for listing in parse.other_listed(files[OTHER_LISTED])}
    assert funds["METAX"].name == "ALPINE | Metis Micro Cap Fund Class A"
    assert "\t" in funds["TABSX"].name
    assert others["NA"].stock
    assert not others["CTEST.E"].stock
