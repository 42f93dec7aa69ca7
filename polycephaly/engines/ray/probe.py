"""A quick check that a server at an address speaks gRPC, as the head of a Ray cluster does.

    preface, SETTINGS, a request ──> server
                                 <── SETTINGS first: HTTP/2; then an answer of status 200: gRPC

Ray itself tries for minutes if no server answers, and for 20 seconds if a proxy or a gateway
answers in place of the cluster. A gRPC server answers any request with status 200, and reports
errors later.
"""

from __future__ import annotations

import os
import socket
from time import monotonic

__all__ = ["check_grpc_server"]

_HEADERS, _SETTINGS = 1, 4  # frames of HTTP/2
_MAX_FRAME_BYTES = 1 << 14  # a larger frame is taken for another protocol
_REQUEST = (
    b"\x83\x86\x04\x0c/polycephaly\x01\x03ray"  # POST, http, path, authority
    b"\x0f\x10\x10application/grpc\x00\x02te\x08trailers"
)
_PREFACE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0))
    + bytes((0, 0, len(_REQUEST), _HEADERS, 5, 0, 0, 0, 1)) + _REQUEST
)  # fmt: skip
_NOT_200 = bytes((*range(0x89, 0x8F), 0x08, 0x18, 0x48))
"""First bytes of a block of headers whose status is not 200, or is written out. Any other first
byte counts as status 200.
"""


def check_grpc_server(address: str, timeout: float) -> None:
    """Check that a gRPC server answers at `address` within `timeout` seconds.

    Connecting may take half of that time. If RAY_USE_TLS is set, only the connection is checked.
    Raises `ConnectionError` if no such server answers, and `ValueError` if `address` is not
    "HOST:PORT".
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"address is 'auto' or 'HOST:PORT', not {address!r}")
    deadline = monotonic() + timeout
    try:
        server = host.strip("[]"), int(port)
        with socket.create_connection(server, timeout=timeout / 2) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            connection.sendall(_PREFACE)
            speaks_grpc = _speaks_grpc(connection, deadline)
    except OSError as error:
        raise ConnectionError(f"no Ray cluster can be reached at {address}: {error}") from error
    if not speaks_grpc:
        raise ConnectionError(
            f"no Ray cluster can be reached at {address}: the server speaks another protocol"
        )


def _speaks_grpc(connection: socket.socket, deadline: float) -> bool:
    """Read frames up to the first HEADERS; return True if they may be those of a gRPC server."""
    kind = None
    while kind != _HEADERS:
        head = _read(connection, 9, deadline)
        first, kind, size = kind is None, head[3], int.from_bytes(head[:3], "big")
        if size > _MAX_FRAME_BYTES or (first and kind != _SETTINGS):
            return False
        content = _read(connection, size, deadline)
    return content[:1] not in _NOT_200


def _read(connection: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        connection.settimeout(max(0.001, deadline - monotonic()))
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise ConnectionResetError("the server closed the connection")
        received += chunk
    return received
