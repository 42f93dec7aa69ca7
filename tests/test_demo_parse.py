"""The parser keeps every row of a symbol-directory file, however odd, and names a file that is
none."""

from __future__ import annotations

import pickle

import pytest

from polycephaly.demos.securities import parse
from polycephaly.demos.securities.model import Fund, Listing, page_of
from polycephaly.demos.securities.parse import Document, SourceError

FUND_HEADER = "Fund Symbol|Fund Name|Fund Family Name|Type|Category|Pricing Agent"
NASDAQ_HEADER_BEFORE_ETFS = (
    "Symbol|Security Name|Market Category|Test Issue|Financial Status|Round Lot Size"
)
NASDAQ_HEADER = f"{NASDAQ_HEADER_BEFORE_ETFS}|ETF|NextShares"
OTHER_HEADER = (
    "ACT Symbol|Security Name|Exchange|CQS Symbol|ETF|Round Lot Size|Test Issue|NASDAQ Symbol"
)


def funds(*rows: str, end: str = "\r\n") -> list[Fund]:
    return parse.funds(Document("funds", end.join([FUND_HEADER, *rows, ""])))


def nasdaq(*rows: str) -> list[Listing]:
    return parse.nasdaq_listed(Document("nasdaq", "\r\n".join([NASDAQ_HEADER, *rows, ""])))


def other(*rows: str) -> list[Listing]:
    return parse.other_listed(Document("other", "\r\n".join([OTHER_HEADER, *rows, ""])))


def test_every_column_of_a_fund_arrives() -> None:
    (fund,) = funds("AAAAX|DWS Real Assets - Class A|Deutsche DWS|MS|O|State Street")
    assert fund == Fund(
        "AAAAX", "DWS Real Assets - Class A", "Deutsche DWS", "MS", "O", "State Street"
    )


def test_every_column_of_a_listing_arrives() -> None:
    assert nasdaq("AACG|ATA Global - ADS|G|N|N|100|N|N") == [
        Listing(
            "AACG", "ATA Global - ADS", exchange="Q", tier="G", etf=False, test=False, round_lot=100
        )
    ]
    assert other("SPY|SPDR S&P 500|P|SPY|Y|100|N|SPY") == [
        Listing("SPY", "SPDR S&P 500", exchange="P", tier="", etf=True, test=False, round_lot=100)
    ]


def test_a_pipe_inside_a_fund_name_stays_in_the_name() -> None:
    one, two = funds("METAX|ALPS | Metis Fund|Trust|MS|O|Alps", "PIPEX|a|b|c|Trust|MF|C|Agent")
    assert (one.name, one.family, one.agent) == ("ALPS | Metis Fund", "Trust", "Alps")
    assert (two.name, two.family, two.kind, two.category) == ("a|b|c", "Trust", "MF", "C")


def test_a_pipe_inside_a_listing_name_stays_in_the_name() -> None:
    (listing,) = nasdaq("PIPE|Pipe | Co - Common Stock|S|Y|N|10|Y|N")
    assert (listing.name, listing.tier) == ("Pipe | Co - Common Stock", "S")
    assert (listing.test, listing.etf, listing.round_lot) == (True, True, 10)


@pytest.mark.parametrize("fields", [0, 1, 5, 7, 12])
def test_a_footer_of_any_number_of_fields_is_no_fund(fields: int) -> None:
    rows = funds("AAAAX|Name|Family|MF|O|Agent", "File Creation Time: 0602202214:01" + "|" * fields)
    assert [fund.symbol for fund in rows] == ["AAAAX"]


def test_without_a_footer_the_last_row_is_a_fund() -> None:
    assert (
        funds("AAAAX|Name|Family|MF|O|Agent", "ZZZZX|Name|Family|MF|O|Agent")[-1].symbol == "ZZZZX"
    )


def test_a_last_line_without_an_end_is_a_row() -> None:
    text = f"{FUND_HEADER}\r\nAAAAX|Name|Family|MF|O|Agent"
    assert len(parse.funds(Document("funds", text))) == 1


def test_crlf_and_lf_give_the_same_rows() -> None:
    rows = ("AAAAX|Name|Family|MF|O|Agent", "BBBBX|Other|Family|MF|O|Agent")
    assert funds(*rows, end="\r\n") == funds(*rows, end="\n")


def test_an_unbalanced_quote_quotes_nothing() -> None:
    first, second = funds(
        'QUOTX|The "Unbalanced Fund|Family|MF|O|Agent', "NEXTX|Next|Family|MF|O|Agent"
    )
    assert first.name == 'The "Unbalanced Fund'
    assert second.symbol == "NEXTX"


def test_dashes_no_break_spaces_and_tabs_inside_a_name_stay() -> None:
    name = "Growth \N{EN DASH} Income\N{NO-BREAK SPACE}Fund\tSerie \N{RIGHT SINGLE QUOTATION MARK}A"
    document = Document.decode(
        "funds", f"{FUND_HEADER}\r\nAAAAX|{name}|Family|MF|O|Agent\r\n".encode()
    )
    assert parse.funds(document)[0].name == name


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_only_line_feeds_end_a_row(separator: str) -> None:
    (fund,) = funds(f"AAAAX|One{separator}Fund|Family|MF|O|Agent")
    assert fund.name == f"One{separator}Fund"


def test_blanks_around_a_field_go() -> None:
    (listing,) = other("AA|Alcoa Corporation Common Stock  |N|AA|N|100|N|AA ")
    assert listing.name == "Alcoa Corporation Common Stock"


def test_a_byte_that_is_not_utf_8_costs_no_row() -> None:
    raw = f"{FUND_HEADER}\nAAAAX|Caf\xe9 Fund|Family|MF|O|Agent\n".encode("latin-1")
    (fund,) = parse.funds(Document.decode("funds", raw))
    assert fund.name == "Caf\N{REPLACEMENT CHARACTER} Fund"


def test_a_byte_order_mark_is_not_part_of_the_header() -> None:
    raw = f"\ufeff{FUND_HEADER}\nAAAAX|Name|Family|MF|O|Agent\n".encode()
    assert len(parse.funds(Document.decode("funds", raw))) == 1


def test_columns_are_found_by_name_in_any_order_and_number() -> None:
    text = "New|ETF|Test Issue|Security Name|ACT Symbol|Exchange\nx|N|N|Odd | Order Inc.|ODD|A\n"
    (listing,) = parse.other_listed(Document("other", text))
    assert (listing.symbol, listing.name, listing.exchange) == ("ODD", "Odd | Order Inc.", "A")


def test_a_nasdaq_file_from_before_etfs_has_none() -> None:
    text = f"{NASDAQ_HEADER_BEFORE_ETFS}\nA|A Inc.|Q|N|N|100\n"
    (listing,) = parse.nasdaq_listed(Document("nasdaq", text))
    assert listing.stock


@pytest.mark.parametrize("symbol", ["NA", "TRUE", "ON", "NULL", "ZXYZ.A", "AAIC$B", "1E5"])
def test_symbols_are_taken_literally(symbol: str) -> None:
    (listing,) = nasdaq(f"{symbol}|Some Inc. - Common Stock|Q|N|N|100|N|N")
    assert listing.symbol == symbol


def test_a_test_issue_with_an_empty_etf_column_is_neither_stock_nor_etf() -> None:
    (listing,) = other("CTEST|NYSE Test One|N|CTEST||100|Y|CTEST")
    assert not listing.stock
    assert not listing.etf


@pytest.mark.parametrize(("lot", "number"), [("1", 1), ("10", 10), ("100", 100), ("", 0)])
def test_round_lots_are_numbers(lot: str, number: int) -> None:
    (listing,) = nasdaq(f"AAAA|A Inc.|Q|N|N|{lot}|N|N")
    assert listing.round_lot == number


def test_two_symbols_may_share_a_name() -> None:
    rows = funds("TWINAX|Same|Family|MF|O|Agent", "TWINCX|Same|Family|MF|O|Agent")
    assert [fund.symbol for fund in rows] == ["TWINAX", "TWINCX"]


def test_a_header_alone_is_an_empty_list() -> None:
    assert funds() == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "empty"),
        ("\r\n \r\n", "empty"),
        ("\r\n\r\n<!DOCTYPE html PUBLIC><html><body>Not here</body></html>", "an HTML page"),
        (NASDAQ_HEADER, "text that begins 'Symbol|Security Name|"),
        ("no such file\nreally", "text that begins 'no such file'"),
    ],
)
def test_what_is_no_funds_file_is_named_with_what_came_instead(text: str, what: str) -> None:
    with pytest.raises(SourceError) as caught:
        parse.funds(Document("http://site/mfundslist.txt", text))
    message = str(caught.value)
    assert message.startswith("http://site/mfundslist.txt: ")
    assert what in message
    assert "\n" not in message


def test_a_row_cut_short_is_an_error_that_names_its_line() -> None:
    with pytest.raises(SourceError, match="funds: line 3 has 2 fields where the header has 6"):
        funds("AAAAX|Name|Family|MF|O|Agent", "BBBBX|Na")


def test_a_source_error_survives_the_way_home_from_a_drone() -> None:
    error = pickle.loads(pickle.dumps(SourceError("here", "nothing came")))
    assert (error.where, error.problem, str(error)) == (
        "here",
        "nothing came",
        "here: nothing came",
    )


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("Fidelity", "F"),
        ("iShares", "I"),
        ("3i", "0-9"),
        ("'Advised'", "0-9"),
        ("(Closed)", "0-9"),
        ("\N{LATIN SMALL LETTER SHARP S}eta", "0-9"),
        ("\N{LATIN CAPITAL LETTER E WITH ACUTE}toile", "0-9"),
        ("", "0-9"),
    ],
)
def test_every_name_has_a_page(name: str, page: str) -> None:
    assert page_of(name) == page
