"""The web site of the demo: a process that serves the files and the pages of funds on the loopback.

    stdin:  parent-death pipe: ends when the owner ends, in any way, and then this process ends.
    stdout: one line of JSON: {"port": n}, or {"error": [where, problem]} if a file cannot be read.
    HTTP:   /nasdaqlisted.txt  /otherlisted.txt  /mfundslist.txt  /funds/0-9  /funds/A ... /funds/Z

Each answer is delayed by the set latency, in a thread of its own, so that the waits of many
requests overlap. All files are read and checked before the port is printed, so a port means a
working site.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from . import files, parse
from .generate import symbol_directory
from .model import PAGES, page_of
from .parse import Document, SourceError


def contents(documents: Mapping[str, Document]) -> dict[str, bytes]:
    """Return the answer for each path. All documents are parsed, so a bad one is found here."""
    parse.nasdaq_listed(documents[files.NASDAQ_LISTED])
    parse.other_listed(documents[files.OTHER_LISTED])
    table = parse.fund_table(documents[files.FUNDS])
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


def main() -> int:
    """Serve until stdin ends. The exit status is 1 if the files cannot be read."""
    parser = argparse.ArgumentParser(description="Serve symbol-directory files until stdin ends.")
    parser.add_argument(
        "--data", type=Path, help="directory of the files; without it, generated ones"
    )
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve at")
    options = parser.parse_args()
    try:
        answers = contents(
            files.read_directory(options.data) if options.data else symbol_directory()
        )
    except SourceError as error:
        print(json.dumps({"error": [error.where, error.problem]}), flush=True)
        return 1
    with FixtureServer(answers, options.latency, options.host) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        print(json.dumps({"port": server.server_port}), flush=True)
        sys.stdin.buffer.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())
