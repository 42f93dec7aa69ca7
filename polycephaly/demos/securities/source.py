"""The source of the securities: a loopback site that lives as long as a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...pool.drone import Drone
from .server import serve
from .site import Site


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
