"""The live page of a pool: who may see it, what it shows, and that it ends."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpx
import pytest
from faults import hold_until, wait_for

import polycephaly as poly
from polycephaly.integrations.dashboard.metrics import metrics_of
from polycephaly.pool.record import TraceBuffer
from polycephaly.runtime.tuning import tuning
from polycephaly.timeline import Span
from polycephaly.timeline.event_log import EventLog

testclient = pytest.importorskip("starlette.testclient", reason="starlette is not installed")
CHROMIUM = Path("/usr/bin/chromium")

STATUS = {
    "name": 'a "lab"\n', "engine": "local", "state": "open", "reason": None, "pid": 1, "host": "h",
    "version": "1", "address": None, "clients": 0, "started": 0.0, "size": 2, "width": 1,
    "queued": 3, "waiting": 0, "in_flight": 1, "running": 1, "tasks_done": 7, "tasks_failed": 2,
    "tasks_cancelled": 0, "resources": {"db": {"size": 2, "free": 1}}, "shared_memory": None,
    "shared_memory_limit": None,
    "failures": [{"at": 0.0, "task": "f", "item": 3, "drone": "d0", "error": "KeyError: 3"}],
    "drones": [
        {"name": "d0", "number": 1, "state": "busy", "memory": 4096, "processor": 1.5},
        {"name": "d1", "number": 2, "state": "unresponsive: it hangs", "memory": None},
    ],
}  # fmt: skip


class FakeDrone:
    name = "d0"
    _handle = None

    def __init__(self) -> None:
        self.told: list[str] = []

    def stack(self) -> str:
        return "d0 (pid 1): idle"

    def interrupt(self) -> None:
        self.told.append("interrupt")

    def kill(self) -> None:
        self.told.append("kill")


class FakePool:
    def __init__(self) -> None:
        self.drones = [FakeDrone()]
        self.closed: Exception | None = None
        self.timeline = poly.Timeline()

    def status(self) -> dict[str, Any]:
        if self.closed is not None:
            raise self.closed
        return STATUS

    def _news(self, cursor: tuple[int, int]) -> tuple[poly.Timeline, tuple[int, int]]:
        assert cursor == (4, 5)
        span = poly.timeline.Span("f", "d0", 10.0, 11.0)
        return poly.Timeline([span], ["d0", "d1"]), (6, 7)


@pytest.fixture
def pool() -> FakePool:
    return FakePool()


@pytest.fixture
def client(pool: FakePool) -> Any:
    from polycephaly.integrations.dashboard.app import make_app

    app = make_app(lambda: pool, "key", "look")  # type: ignore[arg-type,return-value]
    return testclient.TestClient(app, headers={"Authorization": "Bearer key"})


# -- who may see it --------------------------------------------------------------------------------


@pytest.mark.guarantee("remote-13")
@pytest.mark.parametrize(
    "path", ["/", "/data", "/metrics", "/stack?drone=d0", "/timeline.html", "/no"]
)
@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer kez"}, {"Authorization": "key "}])
def test_a_stranger_without_the_token_sees_nothing(client, pool, path, given):
    client.headers.pop("Authorization")
    for method in ("GET", "POST", "HEAD"):
        answer = client.request(method, path, headers=given)
        assert answer.status_code == 403
        assert not answer.content or answer.text.startswith("The token is missing or wrong")


def test_a_stranger_can_neither_interrupt_nor_kill(client, pool):
    client.headers.pop("Authorization")
    for path in ("/interrupt?drone=d0", "/kill?drone=d0&token=kez"):
        assert client.post(path).status_code == 403
    assert pool.drones[0].told == []


def test_the_token_may_stand_in_the_address(client):
    client.headers.pop("Authorization")
    assert client.get("/metrics?token=key").status_code == 200


def test_the_read_only_token_shows_all_and_does_nothing(client, pool):
    assert '"read_only":false' in client.get("/").text.replace(" ", "")
    client.headers["Authorization"] = "Bearer look"
    assert '"read_only":true' in client.get("/").text.replace(" ", "")
    for path in ("/metrics", "/data?entries=4&threads=5", "/stack?drone=d0", "/timeline.html"):
        assert client.get(path).status_code == 200
    for path in ("/interrupt?drone=d0", "/kill?drone=d0", "/kill?drone=d0&token=look"):
        refused = client.post(path)
        assert refused.status_code == 403 and "may only look" in refused.text
    assert pool.drones[0].told == []
    assert client.post("/kill?drone=d0&token=key").status_code == 204  # it has the other, too


# -- what it answers -------------------------------------------------------------------------------


@pytest.mark.guarantee("remote-13")
def test_the_page_needs_nothing_from_elsewhere(client):
    answer = client.get("/")
    assert answer.status_code == 200 and "<canvas" in answer.text
    assert "http:" not in answer.text and "https:" not in answer.text
    assert "a &quot;lab&quot;" in answer.text
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_news_come_with_a_cursor_for_the_next_ones(client):
    news = client.get("/data?entries=4&threads=5&start=9.5").json()
    assert news["cursor"] == [6, 7] and news["status"]["tasks_done"] == 7
    assert (news["start"], news["end"]) == (9.5, 1_500_000)
    assert news["part"]["rows"] == [["d0", ""], ["d1", ""]]
    assert news["part"]["spans"]["started"] == [500_000]


@pytest.mark.parametrize(
    "wrong", ["", "entries=4", "entries=x&threads=5", "entries=4&threads=5&start=nan"]
)
def test_a_cursor_that_is_none_is_refused(client, wrong):
    assert client.get(f"/data?{wrong}").status_code == 400


def test_drones_are_interrupted_and_killed_by_their_names(client, pool):
    assert client.get("/stack?drone=d0").text == "d0 (pid 1): idle"
    assert client.post("/interrupt?drone=d0").status_code == 204
    assert client.post("/kill?drone=d0").status_code == 204
    assert pool.drones[0].told == ["interrupt", "kill"]
    gone = client.post("/kill?drone=d9")
    assert gone.status_code == 404 and "no drone 'd9' any more" in gone.text
    assert client.get("/kill?drone=d0").status_code == 405  # a link cannot kill


def test_a_pool_that_is_gone_is_told(client, pool):
    pool.closed = ConnectionError("the server has ended")
    for path in ("/", "/data?entries=4&threads=5", "/metrics", "/timeline.html"):
        answer = client.get(path)
        assert (answer.status_code, answer.text) == (410, "the server has ended")


@pytest.mark.parametrize("path", ["/", "/metrics", "/timeline.html", "/no", "/data", "/stack"])
def test_all_answers_have_the_policy(client, path):
    policy = client.get(path).headers
    assert "default-src 'none'" in policy["Content-Security-Policy"]
    assert (policy["Referrer-Policy"], policy["Cache-Control"]) == ("no-referrer", "no-store")


def test_the_timeline_so_far_can_be_kept(client, pool):
    pool.timeline = poly.Timeline([poly.timeline.Span("f", "d0", 10.0, 11.0)])
    assert "Timeline of a" in client.get("/timeline.html").text
    assert client.get("/timeline.html?save").headers["Content-Disposition"] == "attachment"


def test_metrics_are_in_the_format_of_prometheus():
    lines = metrics_of(STATUS).splitlines()
    assert 'polycephaly_tasks_done_total{pool="a \\"lab\\"\\n"} 7' in lines
    assert 'polycephaly_resource_free{pool="a \\"lab\\"\\n",resource="db"} 1' in lines
    assert 'polycephaly_drones{pool="a \\"lab\\"\\n",state="unresponsive"} 1' in lines
    assert sum("drone_memory_bytes{" in line for line in lines) == 1  # that of d1 is not known
    assert not any("shared_memory" in line for line in lines)
    for line in lines:
        assert line.startswith(("# HELP polycephaly_", "# TYPE polycephaly_", "polycephaly_"))
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))


# -- what was recorded since -----------------------------------------------------------------------


def test_a_reader_gets_each_entry_once_and_misses_only_what_is_not_kept(monkeypatch):
    monkeypatch.setattr(tuning, "trace_spans", 40)
    record, cursor = TraceBuffer(), (0, 0)
    got: list[str] = []
    for number in range(200):
        of = SimpleNamespace(label=f"f{number}")
        task = Mock(queued=1.0, sending=Mock(at=1.0), weight=1, definition=of, definition_bytes=0)
        record.add_batch("d", [task], [float(number)], [float(number)], 0.0, 1.0, 0)
        if number % 7 == 0 and not 60 <= number < 160:
            entries, _, cursor = record.since(cursor)
            got += [entry.name for entry in entries]
            assert record.since(cursor)[0] == []
    numbers = [int(name[1:]) for name in got]
    assert numbers == sorted(set(numbers)) and numbers[-1] == 196
    missing = set(range(197)) - set(numbers)
    assert missing and missing <= set(range(57, 130))  # while it did not look


def test_a_reader_gets_each_call_of_a_green_thread_once():
    record, cursor = TraceBuffer(), (0, 0)
    log = EventLog()
    for number in range(3):
        log.events.append(Span(f"f{number}", "", 1.0, 2.0, thread="thread #1"))
        record.add_events("d", log.pop_packed(), 0.0)
        _, threads, cursor = record.since(cursor)
        assert [span.name for span in threads] == [f"f{number}"]
    assert record.since(cursor)[1] == []


# -- with processes --------------------------------------------------------------------------------


def part_of(page: Any, path: str) -> httpx.Response:
    split = urlsplit(page.url)
    token = split.query.removeprefix("token=")
    return httpx.get(
        f"http://{split.netloc}/{path}",
        headers={"Authorization": f"Bearer {token}"},
        timeout=30,
        trust_env=False,
    )


def divide(a, b):
    return a / b


def test_a_page_shows_a_pool_until_it_is_closed(tmp_path):
    gate = str(tmp_path / "gate")
    with poly.Pool(2, name="lab") as pool:
        page = pool.dashboard()
        assert pool.dashboard() is page and pool.options(timeout=60).dashboard() is page
        held = pool.promise(hold_until, gate)
        wait_for(held.running)
        news = part_of(page, "data?entries=0&threads=0").json()
        assert news["status"]["running"] == 1 and news["part"]["running"]["name"] == [0]
        busy = next(each for each in news["status"]["drones"] if each["running"] == "hold_until")
        assert busy["processor"] is not None
        stack = part_of(page, f"stack?drone={busy['name']}").text
        assert "in hold_until" in stack and ("time.sleep" in stack or "os.path" in stack)
        Path(gate).touch()
        held.result()
        pool.refresh()  # drones that are forked while the page is served
        address = urlsplit(page.url)
        looking = page.read_only_url
        assert httpx.get(looking, trust_env=False).status_code == 200
        kill = looking.replace("/?", "/kill?drone=lab.0&")
        assert httpx.post(kill, trust_env=False).status_code == 403
        page.close()
        page.close()
        assert page.closed and "closed" in repr(page)
        with pytest.raises(OSError), socket.create_connection((address.hostname, address.port)):
            pass
        with pool.dashboard() as other:
            assert other is not page
            assert part_of(other, "metrics").status_code == 200
        assert pool.doit(abs, -1) == 1


def test_a_page_does_not_keep_its_pool():
    pool = poly.Pool(1)
    page = pool.dashboard()
    del pool
    wait_for(lambda: page.closed)


def test_a_page_leaves_the_logs_of_another_server_alone():
    def state():
        loggers = map(logging.getLogger, ("uvicorn", "uvicorn.access", "uvicorn.error"))
        return [(each.level, each.propagate, [*each.handlers]) for each in loggers]

    uvicorn = pytest.importorskip("uvicorn")
    uvicorn.Config(lambda: None)  # as a program's own server does
    before = state()
    with poly.Pool(1) as pool, pool.dashboard():
        assert state() == before


def test_a_page_is_closed_while_a_drone_does_not_answer(capfd):
    with poly.Pool(1, name="lab") as pool, pool.dashboard() as page:
        os.kill(pool.drones[0].pid, signal.SIGSTOP)
        answers: list[httpx.Response] = []
        asked = threading.Thread(target=lambda: answers.append(part_of(page, "stack?drone=lab.0")))
        asked.start()
        wait_for(lambda: sum(t.name == "polycephaly-dashboard" for t in threading.enumerate()) > 1)
        page.close()
        asked.join()
        assert answers[0].status_code in (200, 503)
        os.kill(pool.drones[0].pid, signal.SIGCONT)
    assert "Traceback" not in capfd.readouterr().err


def test_two_threads_get_one_page():
    with poly.Pool(1) as pool:
        pages: list[Any] = []
        threads = [
            threading.Thread(target=lambda: pages.append(pool.dashboard())) for _ in range(4)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(set(map(id, pages))) == 1
        pages[0].close()


def lose_the_connection(*args, **kwargs):
    raise ConnectionError("lost")


def test_a_served_pool_has_a_page_in_its_clients_too(tmp_path, monkeypatch):
    card = str(tmp_path / "pool.json")
    with (
        poly.Pool(1, name="lab") as pool,
        poly.serve(pool, file=card),
        poly.connect(card) as remote,
    ):
        remote.doit(abs, -1)
        with remote.dashboard() as page:
            news = part_of(page, "data?entries=0&threads=0").json()
            assert news["status"]["tasks_done"] == 1 and len(news["part"]["spans"]["row"]) == 1
            entries, threads = news["cursor"]
            again = part_of(page, f"data?entries={entries}&threads={threads}").json()
            assert again["part"]["spans"]["row"] == []
            assert part_of(page, "stack?drone=lab.0").text.startswith("lab.0 (pid ")
            remote.promise(divide, 1, 0).exception()
            news = part_of(page, "data?entries=0&threads=0").json()
            (failure,) = news["status"]["failures"]
            assert failure["error"] == "ZeroDivisionError: division by zero"
            assert (failure["task"], failure["drone"]) == ("divide", "lab.0")
        html = remote._repr_html_()
        assert "<td>lab.0</td>" in html and "<td>None</td>" not in html
        with monkeypatch.context() as patched:
            patched.setattr(remote._dispatcher, "request", lose_the_connection)
            assert "<td>lab.0</td>" not in remote._repr_html_()
        with remote.dashboard() as page:
            remote.shutdown()
            assert "closed" in remote._repr_html_()
            assert part_of(page, "data?entries=0&threads=0").status_code == 410


def test_without_its_packages_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    with (
        poly.Pool(1, engine="inline") as pool,
        pytest.raises(ModuleNotFoundError, match=r"pip install 'starlette>="),
    ):
        pool.dashboard()


# -- in a browser ----------------------------------------------------------------------------------


@pytest.mark.script
@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no chromium")
def test_the_page_in_a_browser_follows_the_pool_and_kills_at_a_click(tmp_path):
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    complaints: list[str] = []
    with (
        poly.Pool(2, name="lab", resources={"db": 1}, native_threads=3) as pool,
        pool.dashboard() as live,
    ):
        pool.doit(time.sleep, 0.01)
        with sync_api.sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
            )
            page = browser.new_page(viewport={"width": 1200, "height": 800})
            page.on("console", lambda said: complaints.append(f"{said.type}: {said.text}"))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            origin = live.url.partition("/?")[0]
            page.on(
                "request",
                lambda asked: (
                    None if asked.url.startswith(origin) else complaints.append(asked.url)
                ),
            )
            page.on("dialog", lambda dialog: dialog.accept())
            page.goto(live.url)

            def comes_true(expression: str, given: Any = None) -> None:
                # Not `wait_for_function`, which the page's policy does not let in.
                wait_for(lambda: page.evaluate(f"given => {expression}", given))

            comes_true("settled === 1 && rows.length === 2")
            assert page.locator("#legend button").all_inner_texts() == ["sleep"]
            held = pool.promise(time.sleep, 1000)
            comes_true("count > settled")
            comes_true("spans.finished[settled] > given", page.evaluate("spans.finished[settled]"))
            assert "1 of 1" in page.locator("#numbers").inner_text()
            facts = page.locator("#facts").inner_text()
            assert "native libraries: 3 threads a drone, " in facts
            row = page.locator("#drones tbody tr", has_text="busy")
            row.get_by_text("stack").click()
            comes_true("get('stack').innerText.includes('sleep')")
            page.get_by_text("close").click()
            row.get_by_text("kill").click()
            assert isinstance(held.exception(), poly.DroneDied)
            comes_true("get('numbers').innerText.includes('failed\\n1')")
            comes_true("get('failures').innerText.includes('DroneDied: drone lab.')")
            assert page.evaluate("following")
            page.locator("#chart").hover()
            page.mouse.wheel(0, -200)
            comes_true("!following")
            page.locator("#live").click()
            comes_true("following")
            page.goto(live.read_only_url)
            comes_true("shown.size === 2")
            buttons = page.locator("#drones button").all_inner_texts()
            assert buttons == ["stack", "stack"]
            browser.close()
    assert not complaints
