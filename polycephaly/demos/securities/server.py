"""The web site of the demo, which serves the files and the pages of funds.

    /nasdaqlisted.txt  /otherlisted.txt  /mfundslist.txt  /funds/0-9  /funds/A ... /funds/Z

Each answer is delayed by the set latency, in a thread of its own, so that the waits of many
requests overlap.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from ...pool.drone import Drone
from . import parse
from .generate import symbol_directory
from .model import PAGES, page_of
from .parse import Document
from .site import Site


def contents(documents: Mapping[str, Document]) -> dict[str, bytes]:
    """Return the answer for each path. All documents are parsed, so a bad one is found here."""
    parse.nasdaq_listed(documents[parse.NASDAQ_LISTED])
    parse.other_listed(documents[parse.OTHER_LISTED])
    table = parse.fund_table(documents[parse.FUNDS])
    pages: dict[str, list[str]] = {page: [table.header] for page in PAGES}
    for line, row in table:
        pages[page_of(row["Fund Name"])].append(line)
    answers = {f"/{name}": document.text.encode() for name, document in documents.items()}
    return answers | {
        f"/funds/{page}": "\r\n".join(lines).encode() for page, lines in pages.items()
    }


class Handler(BaseHTTPRequestHandler):
    """Answers one request, after the latency."""

    server: FixtureServer

    def do_GET(self) -> None:
        body = self.server.answers.get(self.path)
        if body is None:
            self.send_error(404)
            return
        time.sleep(self.server.latency)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the demo's report."""


class FixtureServer(ThreadingHTTPServer):
    """An HTTP server on a free port."""

    # With the default of 5, the sixth drone that connects at once waits a second for a TCP retry.
    request_queue_size = 128

    def __init__(
        self, answers: Mapping[str, bytes], latency: float, host: str = "127.0.0.1"
    ) -> None:
        super().__init__((host, 0), Handler)
        self.answers = answers
        self.latency = latency

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has gone (a killed drone), which is no error of the site."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve(data: Path | None, latency: float, host: str) -> int:
    """Serve the files in `data`, or generated ones, until this process ends. Return the port.

    All files are read and checked before. Raises `SourceError`.
    """
    answers = contents(parse.read_directory(data) if data else symbol_directory())
    server = FixtureServer(answers, latency, host)
    Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


@contextmanager
def loopback(
    data: Path | None = None, latency: float = 0.0, host: str = "127.0.0.1"
) -> Iterator[Site]:
    """Start a site on the loopback, or at the address `host`, in a drone.

    The site ends with the block, serves the symbol-directory files in `data`, or generated ones,
    and answers each request after `latency` seconds. Raises `SourceError`, which names the file, if
    a file in `data` is missing or invalid.

    >>> with loopback() as site:
    ...     len(site.load_amex()) < len(site.load_nyse())
    True
    """
    # "fork": the site uses no library whose threads a fork does not copy.
    with Drone(name="site", start="fork", detached=True) as drone:
        yield Site(f"http://{host}:{drone.doit(serve, data, latency, host)}")
