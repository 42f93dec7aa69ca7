"""Where the pools of this user are told by name: connection files in his runtime directory.

    serve(pool, name="lab") ── claim ──> /run/user/1000/polycephaly/lab.json <── find ── connect("lab")
                            <─ leave ──                       ^── running: lists them, drops those of the dead

A card tells its server's process by pid and birth, so a pid that another process has got since
misleads nobody.

Whoever changes the directory holds `.lock` (flock), for as long as it takes to look at one card and
write or remove it. A card appears whole (by rename) and after its server listens, so reading needs
no lock. What could meet:

    claim, claim     the second looks after the first has written, and finds a living one: refused
    claim, running   `running` has found the card of a dead one; before it removes that it looks again, under the lock,
                     and finds the new one's
    claim, leave     an old server that closes late removes the card only if it is still its own
    a death          of who holds the lock: the kernel lets go of it. What he had begun to write has his pid in its
                     name, and goes when he is gone
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
    """The directory. Raises `PermissionError` where somebody else could write there, `OSError`."""
    for above in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        # Not another's, as that of who has called sudo: he could not use what we make there.
        if os.path.isabs(above) and os.path.isdir(above) and os.stat(above).st_uid == os.getuid():
            place = Path(above, "polycephaly")
            break
    else:
        place = Path(tempfile.gettempdir(), f"polycephaly-{os.getuid()}")
    if make:
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
    try:
        status = (
            place.lstat()
        )  # a link is none of ours: whoever made it could have it point anywhere
    except FileNotFoundError:
        if make:
            raise
        return place  # who only looks makes none
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{place} must be a directory of yours and of mode 0700, not {stat.filemode(status.st_mode)} of user "
            f"{status.st_uid}: whoever writes there can be your pools; remove it, or set XDG_RUNTIME_DIR"
        )
    return place


def path_of(name: str) -> Path:
    """Where the connection file of that pool is, if it runs. Raises `ValueError` for what is no
    name."""
    return folder() / f"{check_name(name)}.json"


def running() -> list[Card]:
    """The cards of pools that run, by name. Files of those that do not are removed."""
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
    """The card of the pool of that name. Raises `ConnectionError` where none runs,
    `PermissionError` and `ValueError` as `Card.read` does."""
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
    """The card of the pool that `connect` and `join` were told of. Raises as `connect` does."""
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
    """Its keys are known where it is one of the pools that are told of here."""
    check_address(address)
    card = next((card for card in running() if card.address == address), None)
    if card is None:
        raise ValueError(
            f"no pool of yours runs here at {address}, and else an address alone does not do: give server_key= and "
            "keys=, or a connection file"
        )
    return card


def check_free(name: str) -> None:
    """Raises `FileExistsError` if a pool of that name runs. Another may come in the meantime:
    `claim` decides."""
    _refuse(_living(path_of(name)))


def claim(card: Card) -> None:
    """Makes `card` the one of its name. Raises `FileExistsError` if another pool of that name runs,
    `OSError`."""
    folder(make=True)
    path = path_of(card.name)
    with _locked(path.parent):
        with suppress(FileNotFoundError):
            other = Card.read(path)
            _refuse(other if other.lives() else None)
        card.write(path)


def leave(card: Card) -> None:
    """Removes it, if it is still there. Raises nothing: it may be called at the very end."""
    with suppress(OSError, ValueError):
        path = path_of(card.name)
        with _locked(path.parent):
            if Card.read(path).server == card.server:
                path.unlink()


def _living(path: Path) -> Card | None:
    """The card there, if its server lives; if that is dead, it is removed. What is none of ours is
    left alone."""
    try:
        card = Card.read(path)
        if card.lives():
            return card
        with _locked(path.parent):
            card = Card.read(path)
            if card.lives():
                return card
            path.unlink()
    except (OSError, ValueError):  # gone, another user's, or of another version
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
            fcntl.flock(
                fd, fcntl.LOCK_UN
            )  # a child forked meanwhile has the lock too, and it ends for both
    finally:
        os.close(fd)
