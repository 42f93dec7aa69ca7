"""Who may speak to a server: CURVE keys, and the file that hands them on.

    serve ──> connection file (mode 0600): address, the server's public key, one client's pair, whose it is ──> connect

A pair of keys is 40 characters of Z85 each, as `zmq.curve_keypair` makes them. The server knows its
clients by their public keys, the *allow-list*; a client knows its server by that one's. Both prove
that they have the secret half before anything else is said (CurveZMQ, which is CurveCP's handshake:
perfect forward secrecy, no certificates).

Whoever can read the file can run code as its owner: so it is made with mode 0600, is refused with
any other, and is never on a command line."""

from __future__ import annotations

import json
import os
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from ...runtime.procfs import birth_of
from .private_files import read_private

__all__ = ["Card", "check_address", "check_key", "new_pair", "wants_ipv6"]

KEY = 40  # characters


def new_pair() -> tuple[str, str]:
    """A public and a secret key. Raises `RuntimeError` where this ZeroMQ was built without
    CURVE."""
    if not zmq.has("curve"):
        raise RuntimeError(
            "this libzmq was built without CURVE, so nothing can be served by tcp://"
        )
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def check_key(key: str) -> str:
    try:
        if not isinstance(key, str) or len(key) != KEY:
            raise ValueError
        z85.decode(key)
    except Exception:
        raise ValueError(
            f"a public key is {KEY} characters of Z85, as zmq.curve_keypair() makes them, not {key!r}"
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
            f"an address is tcp://HOST:PORT, with port 0 for any that is free, not {address!r}"
        )
    return address


def wants_ipv6(address: str) -> bool:
    """All but IPv4 numbers do: a name may stand for either."""
    return not address.removeprefix("tcp://").rpartition(":")[0].replace(".", "").isdigit()


@dataclass(frozen=True)
class Card:
    """What a client has to know, and whose it is. Printing it shows no secret."""

    address: str
    server: str
    public: str
    secret: str
    name: str = ""  # under which it is found (pool_registry.py), if any
    pid: int = 0  # of the server
    birth: str = ""  # of that process, as `procfs.birth_of` tells it
    started: float = 0.0  # the server, in seconds since 1970
    version: str = ""  # of polycephaly

    def lives(self) -> bool:
        """Whether the server's process does, seen from its own machine."""
        return bool(self.birth) and birth_of(self.pid) == self.birth

    def write(self, path: str | os.PathLike[str]) -> None:
        """Atomically, and never readable by anybody else. Raises `OSError`."""
        target = Path(path)
        new = target.with_name(f".{target.name}.{os.getpid()}")
        fd = os.open(
            new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            with open(fd, "w") as file:
                json.dump(asdict(self), file, indent=1)
            os.replace(new, target)
        except BaseException:
            os.unlink(new)
            raise

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Card:
        """Raises `OSError`, `PermissionError` where others may have read or written it,
        `ValueError` if it is none."""
        text = read_private(path)
        try:
            found: dict[str, Any] = json.loads(text)
            known = [
                each.name for each in fields(cls) if each.default is MISSING or each.name in found
            ]
            card = cls(**{name: found[name] for name in known})
            check_address(card.address)
            for key in (card.server, card.public, card.secret):
                check_key(key)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as wrong:
            raise ValueError(f"{os.fspath(path)} is no connection file: {wrong}") from None
        return card

    def __repr__(self) -> str:
        return f"<Card of {self.address}>"
