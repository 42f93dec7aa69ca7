"""CURVE keys, addresses, and the connection file that gives a client access to a server.

    serve ──> connection file (mode 0600): address, server's public key, a client's key pair,
              the server process ──> connect

A key is 40 characters of Z85, as `zmq.curve_keypair` makes them. The server knows its clients by
their public keys, the *allow-list*. A client knows its server by the server's public key. Both
sides prove that they hold the secret half before anything else is sent (CurveZMQ, which is
CurveCP's handshake: perfect forward secrecy, no certificates).

A process that can read the connection file can run code as its owner. Therefore the file is created
with mode 0600, and its contents never appear on a command line. A file of another owner, or one
that group or others can access, is refused.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from ...runtime.procfs import start_time_of

KEY_CHARACTERS = 40
MAX_FILE_BYTES = 1 << 20


def new_key_pair() -> tuple[str, str]:
    """Return a public and a secret key.

    Raise `RuntimeError` if libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise RuntimeError(
            "libzmq was built without CURVE, so no pool can be served over tcp://; "
            "install a pyzmq whose libzmq has CURVE"
        )
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def check_key(key: str) -> str:
    try:
        if not isinstance(key, str) or len(key) != KEY_CHARACTERS:
            raise ValueError
        z85.decode(key)
    except Exception:
        raise ValueError(
            f"a key must be {KEY_CHARACTERS} characters of Z85, as zmq.curve_keypair() makes them, "
            f"not {key!r}"
        ) from None
    return key


def check_address(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if (
        not address.startswith("tcp://")
        or not host
        or not (port == "*" or (port.isdigit() and int(port) < 1 << 16))
    ):
        raise ValueError(
            f"an address is tcp://HOST:PORT, where port 0 means any free port, not {address!r}"
        )
    return address


def is_every_host(host: str) -> bool:
    """Return whether a server listens at `host` on all its addresses, none of which is named."""
    return host in ("*", "0.0.0.0", "::", "[::]")


def wants_ipv6(address: str) -> bool:
    """Return False for IPv4 numbers only: a host name may stand for either kind of address."""
    return not address.removeprefix("tcp://").rpartition(":")[0].replace(".", "").isdigit()


@dataclass(frozen=True)
class Card:
    """A connection file: a server's address and process, and the keys that a client needs.

    The `repr` shows no secret.
    """

    address: str
    server: str
    public: str
    secret: str
    name: str = ""  # by which other processes find the pool (pool_registry.py), if any
    pid: int = 0  # the server's process id
    birth: str = ""  # when that process was created, from `procfs.start_time_of`
    started: float = 0.0  # when the server was, in seconds since 1970

    def is_server_alive(self) -> bool:
        """Return whether the server's process is alive, seen from the server's own machine."""
        return bool(self.birth) and start_time_of(self.pid) == self.birth

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically, never readable by another user. Raise `OSError`."""
        target = Path(path)
        # pool_registry.py reads the pid at the end of the name, and removes the file of a dead
        # process. The name is unique, since that process may have had this pid.
        fd, new = tempfile.mkstemp(f".{os.getpid()}", f".{target.name}.", target.parent)
        try:
            with open(fd, "w") as file:
                json.dump(asdict(self), file, indent=1)
            os.replace(new, target)
        except BaseException:
            os.unlink(new)
            raise

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Card:
        """Read a connection file.

        Raise `PermissionError` if the file has another owner, or group or others can access it,
        `ValueError` if it is no connection file, `OSError` if it cannot be read.
        """
        text = read_private(path)
        try:
            data: dict[str, Any] = json.loads(text)
            known = {each.name for each in fields(cls)}
            missing = {"address", "server", "public", "secret"}.difference(data)
            if missing:
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
            card = cls(**{name: data[name] for name in data if name in known})
            check_address(card.address)
            for key in (card.server, card.public, card.secret):
                check_key(key)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} is not a connection file: {error}") from None
        return card

    def __repr__(self) -> str:
        return f"<Card of {self.address}>"


def read_private(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a small private file of this user.

    No other user can decide the contents, or how long this takes.

    Raises
    ------
    PermissionError
        If the file has another owner, or a mode by which group or others can access it.
    ValueError
        If `path` is no regular file (but a named pipe, a device), or is larger than
        `MAX_FILE_BYTES`.
    OSError
        If the file cannot be opened or read.
    """
    name = os.fspath(path)
    # O_NONBLOCK: opening a named pipe would wait for a writer, and some devices for a line.
    fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)  # of the opened file: the name may refer to another one by now
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{name} is not a regular file ({stat.filemode(status.st_mode)})")
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(
                f"{name} must be yours and of mode 0600, not {stat.S_IMODE(status.st_mode):04o} of "
                f"user {status.st_uid}: a user who can read it can run code as you, and a user who "
                "can write it can redirect you to another server"
            )
        with open(fd, "rb", closefd=False) as file:
            contents = file.read(MAX_FILE_BYTES + 1)
    finally:
        os.close(fd)
    if len(contents) > MAX_FILE_BYTES:
        raise ValueError(f"{name} has more than {MAX_FILE_BYTES:,} bytes")
    return contents
