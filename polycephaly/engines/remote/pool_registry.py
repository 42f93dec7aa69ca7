"""The registry of this user's named pools: connection files in the user's runtime directory.

    serve(pool, name="lab") ── claim, leave ──> /run/user/1000/polycephaly/lab.json
    connect("lab") ── find ──> the same file      running ──> all files; removes those of dead pools

A connection file names its server's process by pid and creation time, so a reused pid misleads no
reader. Writers hold `.lock` (flock) while they look at one file and write or remove it. A file
appears whole (by rename) and after its server listens, so readers need no lock. The races:

* claim, claim: the second looks after the first has written, finds a live pool and is refused.
* claim, running: before `running` removes a dead pool's file, it looks again, under the lock.
* claim, leave: an old server that closes late removes the file only if it is still its own.
* the lock's holder dies: the kernel releases the lock. A half-written file is named after the
  holder's pid, and is removed when that process is gone.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...runtime.procfs import birth_of
from .keys import Card, check_address, check_key

__all__ = [
    "card_of",
    "check_free",
    "check_name",
    "claim",
    "find",
    "folder",
    "leave",
    "path_of",
    "running",
]

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def check_name(name: str) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"a pool's name is up to 64 letters, digits and any of - _ . and begins with none of - . (not {name!r})"
        )
    return name


def folder(*, make: bool = False) -> Path:
    """Return the registry's directory.

    Raise `PermissionError` if another user could write there, or `OSError`.
    """
    for above in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        # Not another user's directory, as after sudo: its owner could not use files created here.
        if os.path.isabs(above) and os.path.isdir(above) and os.stat(above).st_uid == os.getuid():
            place = Path(above, "polycephaly")
            break
    else:
        place = Path(tempfile.gettempdir(), f"polycephaly-{os.getuid()}")
    if make:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
    try:
        # A symbolic link is refused below: its creator could make it point anywhere.
        status = place.lstat()
    except FileNotFoundError:
        if make:
            raise
        return place  # reading does not create the directory
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{place} must be a directory of yours and of mode 0700, not {stat.filemode(status.st_mode)} of user "
            f"{status.st_uid}: whoever writes there can be your pools; remove it, or set XDG_RUNTIME_DIR"
        )
    return place


def path_of(name: str) -> Path:
    """Return the path of the connection file of the pool `name`, whether or not the pool runs.

    Raise `ValueError` if `name` is malformed.
    """
    return folder() / f"{check_name(name)}.json"


def running() -> list[Card]:
    """Return the connection files of running pools, by name, and remove those of ended pools."""
    place = folder()
    for new in place.glob(".*.json.*"):
        if not birth_of(int(new.suffix[1:]) if new.suffix[1:].isdigit() else 0):
            new.unlink(missing_ok=True)
    found = []
    for path in sorted(place.glob("[!.]*.json")):
        card = _living(path)
        if card is not None:
            found.append(card)
    return found


def find(name: str) -> Card:
    """Return the connection file of the pool `name`.

    Raise `ConnectionError` if no such pool runs, `PermissionError` and `ValueError` as `Card.read`
    does.
    """
    path = path_of(name)
    with suppress(FileNotFoundError):
        card = Card.read(path)
        if card.lives():
            return card
    others = ", ".join(card.name for card in running())
    hint = f" (for the file of that name: connect('./{name}'))" if os.path.isfile(name) else ""
    raise ConnectionError(f"no pool named {name!r} is running; running: {others or 'none'}{hint}")


def card_of(
    where: str | os.PathLike[str],
    server_key: str | None = None,
    keys: tuple[str, str] | None = None,
) -> Card:
    """Return the connection file for the arguments of `connect` or `join`; raise as these do."""
    if not isinstance(where, (str, os.PathLike)):
        raise TypeError(
            f"a pool is found by its name, a connection file or an address, not by {where!r}"
        )
    if server_key is None and keys is None:
        if os.fspath(where).startswith("tcp://"):
            return _at(os.fspath(where))
        return find(where) if isinstance(where, str) and "/" not in where else Card.read(where)
    if server_key is None or keys is None:
        raise ValueError("server_key= and keys= go together")
    return Card(
        check_address(os.fspath(where)),
        check_key(server_key),
        check_key(keys[0]),
        check_key(keys[1]),
    )


def _at(address: str) -> Card:
    """Return the connection file of this user's running pool at `address`: its keys are known."""
    check_address(address)
    card = next((card for card in running() if card.address == address), None)
    if card is None:
        raise ValueError(
            f"no pool of yours runs here at {address}, and else an address alone does not do: give server_key= and "
            "keys=, or a connection file"
        )
    return card


def check_free(name: str) -> None:
    """Raise `FileExistsError` if a pool of that name runs.

    Another pool may take the name afterwards: `claim` decides.
    """
    _refuse(_living(path_of(name)))


def claim(card: Card) -> None:
    """Register `card` under its name.

    Raise `FileExistsError` if another pool of that name runs, or `OSError`.
    """
    folder(make=True)
    path = path_of(card.name)
    with _locked(path.parent):
        with suppress(FileNotFoundError):
            other = Card.read(path)
            _refuse(other if other.lives() else None)
        card.write(path)


def leave(card: Card) -> None:
    """Remove `card` if it is still registered. Raise nothing: this may run at interpreter exit."""
    with suppress(OSError, ValueError):
        path = path_of(card.name)
        with _locked(path.parent):
            if Card.read(path).server == card.server:
                path.unlink()


def _living(path: Path) -> Card | None:
    """Return the connection file at `path` if its server is alive; remove it if the server is dead.

    Files that are not connection files of this user are left alone.
    """
    try:
        card = Card.read(path)
        if card.lives():
            return card
        with _locked(path.parent):
            card = Card.read(path)
            if card.lives():
                return card
            path.unlink()
    except (OSError, ValueError):  # removed, another user's, or of another version
        pass
    return None


def _refuse(card: Card | None) -> None:
    if card is not None:
        raise FileExistsError(
            f"a pool named {card.name!r} is running already, as process {card.pid}: stop it first"
        )


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    fd = os.open(place / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            # Unlock explicitly: a child forked meanwhile shares the lock, and closing the
            # descriptor here would leave the child with it.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
