"""The page of a timeline in a real browser: it zooms, tells what is under the pointer, and runs no
code of names.

Needs playwright, and Debian's chromium; without them these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import polycephaly as poly
from polycephaly.demos.securities import report
from polycephaly.demos.securities.experiments import (
    FUND_THREADS,
    Experiment,
    ExperimentOutcome,
    drones_and_threads,
)
from polycephaly.demos.securities.server import loopback
from polycephaly.timeline import Span, files

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
)  # fmt: skip

if not CHROMIUM.exists():
    pytest.skip("there is no chromium", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page; in the end, looks whether it had something to complain about."""
    complaints: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch_persistent_context(
            tmp_path / "profile",
            executable_path=CHROMIUM,
            args=FLAGS,
            viewport={"width": 1200, "height": 800},
        )
        page = browser.new_page()
        page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda asked: complaints.append(asked.url) if asked.url.startswith("http") else None,
        )

        def open_page(path: Path) -> Any:
            page.goto(path.as_uri())
            return page

        yield open_page
        browser.close()
    assert not complaints


def combined_run(path: Path) -> poly.Timeline:
    timelines: list[poly.Timeline] = []
    with loopback(None, 0.02) as site:
        lists = drones_and_threads(site, timelines)
    rows = {name: len(rows) for name, rows in lists.items()}
    outcomes = [
        ExperimentOutcome(Experiment(name, drones, threads, drones_and_threads), seconds, rows, ())
        for name, drones, threads, seconds in (
            ("sequential", 0, 1, 2.0),
            ("combined", 5, FUND_THREADS, 0.25),
        )
    ]
    files.write(timelines[0], path, "Five lists of securities", report.bars(outcomes))
    return timelines[0]


@pytest.fixture
def combined(tmp_path: Path) -> tuple[poly.Timeline, Path]:
    return combined_run(tmp_path / "run.html"), tmp_path / "run.html"


def seen(page: Any) -> tuple[float, float]:
    """What part of the time is in view, in microseconds."""
    start, end = page.evaluate("[view.from, view.to]")
    return start, end


def test_the_combined_demo_zooms_and_tells_what_is_under_the_pointer(combined, opened):
    timeline, path = combined
    page = opened(path)
    assert page.title() == "Five lists of securities"
    assert page.locator("#bottleneck").inner_text() == timeline.bottleneck
    assert "combined, 5 drones and 13 threads" in page.locator("#bars").inner_text()
    legend = page.locator("#legend button").all_inner_texts()
    assert {"load_funds", "Site.load_letter", "Site.load_nyse"} <= set(legend)
    assert page.locator("#table tr").count() == 2 + len(legend)

    chart = page.locator("#chart").bounding_box()
    rows = page.evaluate(
        "rows.map(row => [row.drone, row.thread !== '', row.top + AXIS + row.height / 2])"
    )
    assert sum(thread for _, thread, _ in rows) == FUND_THREADS
    [height] = [top for drone, thread, top in rows if drone == "funds" and not thread]
    funds = "[...Array(count).keys()].find(i => data.names[spans.name[i]].name === 'load_funds')"
    moment = page.evaluate(f"(spans.started[{funds}] + spans.finished[{funds}]) / 2")
    middle = page.evaluate("moment => xOf(moment)", moment)
    page.mouse.move(chart["x"] + middle, chart["y"] + height)
    page.wait_for_function("document.querySelector('#tip').innerText.startsWith('load_funds\\n')")
    told = page.locator("#tip").inner_text()
    assert "funds" in told and "of that on a processor" in told and " kB" in told

    whole = seen(page)
    for _ in range(4):
        page.mouse.wheel(0, -200)
    page.wait_for_function("view.to - view.from < data.length / 5")
    narrow = seen(page)
    assert (
        whole[0] < narrow[0] < moment < narrow[1] < whole[1]
    )  # what was under the pointer still is

    thread = next(top for drone, thread, top in rows if thread)
    [item] = page.evaluate(
        "[...Array(count).keys()].filter(i => spans.row[i] === rows.findIndex(row => row.thread))"
        ".slice(0, 1)"
        ".map(i => { show(spans.started[i], spans.finished[i]); return label(i); })"
    )
    assert item.startswith("Site.load_letter('")
    page.mouse.move(chart["x"] + chart["width"] * 0.6, chart["y"] + thread)
    page.wait_for_function(
        "item => document.querySelector('#tip').innerText.startsWith(item)", arg=item
    )
    told = page.locator("#tip").inner_text()
    assert "green thread" in told

    page.mouse.down()
    page.mouse.move(chart["x"] + middle + 103, chart["y"] + thread)
    page.mouse.up()
    dragged = seen(page)
    page.keyboard.press("Tab")
    page.locator("#chart").focus()
    page.keyboard.press("ArrowRight")
    assert seen(page)[0] > dragged[0]
    page.keyboard.press("0")
    assert seen(page) == whole
    page.locator("button[data-act=in]").click()
    assert seen(page)[1] - seen(page)[0] == pytest.approx(whole[1] / 2)


def test_names_are_shown_and_never_run(tmp_path, opened):
    nasty = "</script><img src=x onerror='document.title=`run`'>{{ data }}\u2028"
    spans = [
        Span(nasty, nasty, 1.0, 2.0, 0.5, 0.75, 2.5, note=nasty),
        Span(nasty, nasty, 1.2, 1.5, thread=nasty + " #1"),
        Span("gone", "second", 1.0, 3.0, 0.5, 0.75, 3.0, "died"),
    ]
    poly.Timeline(spans).save(tmp_path / "nasty.html", title=nasty)
    page = opened(tmp_path / "nasty.html")
    assert page.title() == nasty
    assert page.evaluate("data.names.map(each => each.name)") == [nasty, "gone"]
    assert page.locator("img").count() == 0 and page.locator("script").count() == 2
    chart = page.locator("#chart").bounding_box()
    page.mouse.move(chart["x"] + page.evaluate("xOf(1e6)"), chart["y"] + 35)
    assert page.locator("#tip strong").inner_text().startswith("</script><img")


def test_of_a_hundred_thousand_spans_only_what_can_be_seen_is_drawn(tmp_path, opened):
    spans = [
        Span(
            f"f{n % 7}",
            f"d{n % 4}",
            n / 1000,
            n / 1000 + 0.003,
            n / 1000,
            n / 1000,
            n / 1000 + 0.0031,
        )
        for n in range(100_000)
    ]
    poly.Timeline(spans).save(tmp_path / "large.html")
    page = opened(tmp_path / "large.html")
    drawn = (
        "(() => { let n = 0; const fill = pen.fillRect; "
        "pen.fillRect = (...box) => { n++; fill.apply(pen, box); };"
    )
    drawn += " draw(); pen.fillRect = fill; return n; })()"
    assert page.evaluate("count") == 100_000
    assert (
        1000 < page.evaluate(drawn) < 4 * 4 * 1200
    )  # four rows, not more than some boxes for each pixel of them
    page.evaluate("show(5e7, 5e7 + 50000)")
    assert 50 < page.evaluate(drawn) < 400
