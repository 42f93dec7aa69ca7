"""The loopback site: what it serves, that its waits overlap, and that it never outlives its
owner."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, build_opener

import psutil
import pytest
from faults import wait_for_ends

from polycephaly.demos.securities import generate, parse, server
from polycephaly.demos.securities.experiments import sequential
from polycephaly.demos.securities.model import LISTS, PAGES
from polycephaly.demos.securities.parse import FUNDS, NASDAQ_LISTED, OTHER_LISTED, SourceError
from polycephaly.demos.securities.server import FixtureServer, loopback
from polycephaly.demos.securities.site import LiveSite, Site

ROOT = Path(__file__).parents[1]


@contextmanager
def serving(answers: Mapping[str, bytes], latency: float = 0.0) -> Iterator[str]:
    """Any answers at all, from a thread of this process: the URL."""
    with FixtureServer(answers, latency) as site:
        site.daemon_threads = False
        thread = Thread(target=site.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()
        thread.join()


def server_process(site: Site) -> psutil.Process:
    (pid,) = (
        each.pid
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr.port == urlsplit(site.url).port
    )
    return psutil.Process(pid)


def test_the_pages_together_are_the_funds_file() -> None:
    with loopback() as site:
        paged = [fund for page in PAGES for fund in site.load_letter(page)]
        assert paged == site.load_funds()
    whole = parse.funds(generate.symbol_directory()[FUNDS])
    assert len(paged) == len(whole)
    assert set(paged) == set(whole)


def test_a_page_without_funds_is_an_empty_list() -> None:
    with loopback() as site:
        assert site.load_letter("X") == []


def test_the_lists_hold_what_their_filters_say() -> None:
    with loopback() as site:
        lists = sequential(site)
    assert tuple(lists) == LISTS
    files = generate.symbol_directory()
    nasdaq, other = (
        parse.nasdaq_listed(files[NASDAQ_LISTED]),
        parse.other_listed(files[OTHER_LISTED]),
    )
    assert lists["nyse"] == [x for x in other if x.exchange == "N" and not x.etf and not x.test]
    assert lists["amex"] == [x for x in other if x.exchange == "A" and not x.etf and not x.test]
    assert lists["nasdaq"] == [x for x in nasdaq if not x.etf and not x.test]
    assert lists["etfs"] == [x for x in nasdaq + other if x.etf]


def test_each_answer_waits_and_the_waits_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = 20
    all_wait, waits = Barrier(requests), []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        all_wait.wait(30)

    monkeypatch.setattr(server, "time", SimpleNamespace(sleep=wait))
    get = build_opener(ProxyHandler({})).open  # whatever proxy is in the environment
    with serving({"/": b"here"}, latency=1.5) as url, ThreadPoolExecutor(requests) as pool:
        answers = list(pool.map(lambda _: get(url).read(), range(requests)))
    assert answers == [b"here"] * requests and waits == [1.5] * requests


def test_a_proxy_in_the_environment_does_not_come_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with loopback() as site:
        assert site.load_amex()


def test_a_client_that_goes_away_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    with loopback(latency=0.2) as site:
        with socket.create_connection(("127.0.0.1", urlsplit(site.url).port or 0)) as client:
            client.sendall(b"GET /mfundslist.txt HTTP/1.0\r\n\r\n")
            # A reset, not an orderly close: the server's answer fails.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert site.load_amex()
    assert capfd.readouterr().err == ""


def test_the_server_ends_with_its_block() -> None:
    with loopback() as site:
        server = server_process(site)
    assert not server.is_running()


def test_the_server_ends_when_its_block_raises() -> None:
    with pytest.raises(ZeroDivisionError), loopback() as site:
        server = server_process(site)
        raise ZeroDivisionError
    assert not server.is_running()


@pytest.mark.parametrize(
    "last_words", ["os._exit(3)", "os.kill(os.getpid(), 9)", "os.abort()", "sys.exit('bye')"]
)
def test_the_server_ends_with_its_owner_however_that_ends(last_words: str) -> None:
    program = f"""
import os, sys
from polycephaly.demos.securities.server import loopback
with loopback(latency=60):
    print(flush=True)
    sys.stdin.readline()
    {last_words}
"""
    command = [sys.executable, "-c", program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        children = psutil.Process(owner.pid).children(recursive=True)
        assert len(children) == 2  # a zygote and the drone
        pidfds = [os.pidfd_open(each.pid) for each in children]
        owner.communicate(b"\n")
    wait_for_ends(pidfds)


def test_a_server_that_cannot_read_its_files_says_which(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"nasdaqlisted\.txt: no such file"), loopback(tmp_path):
        pytest.fail("the block must not be entered")


def test_an_html_page_under_a_file_name_names_the_url() -> None:
    with serving({"/otherlisted.txt": b"\r\n<html>sorry</html>"}) as url:
        with pytest.raises(SourceError) as caught:
            Site(url).load_nyse()
        assert caught.value.where == f"{url}/otherlisted.txt"
        assert caught.value.problem.endswith("got an HTML page")


def test_a_status_other_than_ok_names_the_url() -> None:
    with (
        serving({}) as url,
        pytest.raises(SourceError, match=r"nasdaqlisted\.txt: .* status 404 Not Found"),
    ):
        Site(url).load_nasdaq()


def test_no_connection_is_one_line_that_names_the_url() -> None:
    with socket.socket() as taken:  # by nobody who would listen, while this lasts
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SourceError) as caught:
            Site(url).load_letter("A")
    assert str(caught.value).startswith(f"{url}/funds/A: no answer: ")
    assert "\n" not in str(caught.value)


def test_the_live_site_cuts_the_same_pages_from_one_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with loopback() as site:
        live = LiveSite(site.url)
        assert live.load_funds() == site.load_funds()
    assert live.load_letter("X") == []
    live.clear_cache()
    with pytest.raises(SourceError, match="no answer"):
        live.load_letter("X")


def test_the_repr_of_a_site_is_an_expression_for_it() -> None:
    for site in Site("http://127.0.0.1:1"), LiveSite():
        assert eval(repr(site)) == site


def test_the_server_does_not_hear_the_terminals_interrupt() -> None:
    with loopback() as site:
        assert os.getpgid(server_process(site).pid) != os.getpgid(0)
        assert site.load_amex()
