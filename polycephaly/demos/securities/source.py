"""The source of the securities: a loopback site that lives as long as a `with` block.

owner --stdin (parent-death pipe)--> server process --stdout: its port--> owner
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .parse import SourceError
from .site import Site


@contextmanager
def loopback(
    data: Path | None = None, latency: float = 0.0, host: str = "127.0.0.1"
) -> Iterator[Site]:
    """Start a site on the loopback, or at the address `host`, in a process of its own.

    The site ends with the block, serves the symbol-directory files in `data`, or generated ones,
    and answers each request after `latency` seconds. Raises `SourceError`, which names the file, if
    a file in `data` is missing or invalid.

    >>> with loopback() as site:
    ...     len(site.load_amex()) < len(site.load_nyse())
    True
    """
    command = [
        sys.executable,
        "-m",
        "polycephaly.demos.securities.server",
        "--latency",
        str(latency),
        "--host",
        host,
    ]
    if data is not None:
        command += ["--data", str(data)]
    # A session of its own: Ctrl-C goes to the owner, which ends the server itself.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        try:
            yield Site(f"http://{host}:{_port(server)}")
        finally:
            # Closing the pipe may not suffice: drones forked meanwhile hold copies of it until they
            # end.
            server.terminate()


def _port(server: subprocess.Popen[bytes]) -> int:
    assert server.stdout is not None
    line = server.stdout.readline()
    if not line:
        raise RuntimeError(
            f"the loopback server ended with status {server.wait()} before the server was ready"
        )
    answer = json.loads(line)
    if "error" in answer:
        raise SourceError(*answer["error"])
    return int(answer["port"])
