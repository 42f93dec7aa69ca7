"""The registry of this user's named pools: connection files in the user's runtime directory.

    serve(pool, name="lab") ── register, unregister ──> /run/user/1000/polycephaly/lab.json
    connect("lab") ── find_card ──> the same file
    running_cards ──> all files; removes those of dead pools

A connection file names its server's process by pid and creation time, so a reused pid misleads no
reader. Writers hold `.lock` (flock) while they look at one file and write or remove it. A file
appears whole (by rename) and after its server listens, so readers need no lock. The races:

* register, register: the second looks after the first has written, finds a live pool and is
  refused.
* register, running_cards: before `running_cards` removes a dead pool's file, it looks again, under
  the lock.
* register, unregister: an old server that closes late removes the file only if it is still its own.
* register_again, register: a server whose file is gone (a logout removes the runtime directory)
  finds another living pool's file, and leaves it.
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

from ...runtime.procfs import start_time_of
from ...runtime.system_limits import lock_file
from .keys import Card, check_address, check_key

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    if not is_name(name):
        raise ValueError(
            "a pool's name is 1 to 64 letters, digits, '-', '_' or '.', and does not begin with "
            f"'-' or '.' (not {name!r})"
        )
    return name


def registry_directory(*, make: bool = False) -> Path:
    """Return the registry's directory.

    Raise `PermissionError` if another user could write there, or `OSError`.
    """
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.getuid()}"):
        # Not another user's directory, as after sudo: its owner could not use files created here.
        if os.path.isabs(base) and os.path.isdir(base) and os.stat(base).st_uid == os.getuid():
            directory = Path(base, "polycephaly")
            break
    else:
        directory = Path(tempfile.gettempdir(), f"polycephaly-{os.getuid()}")
    if make:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
    try:
        # A symbolic link is refused below: its creator could make it point anywhere.
        status = directory.lstat()
    except FileNotFoundError:
        if make:
            raise
        return directory  # reading does not create the directory
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{directory} must be a directory of yours and of mode 0700, "
            f"not {stat.filemode(status.st_mode)} of user {status.st_uid}: "
            "a user who can write there could replace your pools; "
            "remove it, or set XDG_RUNTIME_DIR"
        )
    return directory


def card_path(name: str) -> Path:
    """Return the path of the connection file of the pool `name`, whether or not the pool runs.

    Raise `ValueError` if `name` is malformed.
    """
    return registry_directory() / f"{check_name(name)}.json"


def running_cards() -> list[Card]:
    """Return the connection files of running pools, by name, and remove those of ended pools."""
    directory = registry_directory()
    for temporary in directory.glob(".*.json.*"):
        if not start_time_of(int(temporary.suffix[1:]) if temporary.suffix[1:].isdigit() else 0):
            temporary.unlink(missing_ok=True)
    cards = map(_read_if_running, sorted(directory.glob("[!.]*.json")))
    return [card for card in cards if card is not None]


def find_card(name: str) -> Card:
    """Return the connection file of the pool `name`.

    Raise `ConnectionError` if no such pool runs, `PermissionError` and `ValueError` as `Card.read`
    does.
    """
    path = card_path(name)
    with suppress(FileNotFoundError):
        card = Card.read(path)
        if card.is_server_alive():
            return card
    others = ", ".join(card.name for card in running_cards())
    hint = f" (for the file of that name: connect('./{name}'))" if os.path.isfile(name) else ""
    raise ConnectionError(f"no pool named {name!r} is running; running: {others or 'none'}{hint}")


def resolve_card(
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
            return _find_by_address(os.fspath(where))
        return find_card(where) if isinstance(where, str) and "/" not in where else Card.read(where)
    if server_key is None or keys is None:
        raise ValueError("server_key= and keys= must be given together")
    return Card(
        check_address(os.fspath(where)),
        check_key(server_key),
        check_key(keys[0]),
        check_key(keys[1]),
    )


def _find_by_address(address: str) -> Card:
    """Return the connection file of this user's running pool at `address`: its keys are known."""
    check_address(address)
    card = next((card for card in running_cards() if card.address == address), None)
    if card is None:
        raise ValueError(
            f"no pool of yours on this machine is at {address}, and for any other pool the address "
            "is not enough: give server_key= and keys=, or a connection file"
        )
    return card


def check_name_available(name: str) -> None:
    """Raise `FileExistsError` if a pool of that name runs, and as `Card.read` does.

    Another pool may take the name afterwards: `register` decides.
    """
    _check_available(card_path(name))


def register(card: Card, *, wait: bool = True) -> Path:
    """Register `card` under its name, and return the path of the file.

    Raise `FileExistsError` if another pool of that name runs, `OSError`, and as `Card.read` does.
    With ``wait=False``, raise `BlockingIOError` while another process writes in the directory.
    """
    registry_directory(make=True)
    path = card_path(card.name)
    with _locked(path.parent, wait):
        _check_available(path)
        card.write(path)
    return path


def register_again(card: Card) -> Path | None:
    """Register `card`, which was registered before, if its file is gone.

    Return the path of the new file, or None if the old one is there. Raise as ``register(card,
    wait=False)`` does.
    """
    with suppress(FileNotFoundError):
        if Card.read(card_path(card.name)).server == card.server:
            return None
    return register(card, wait=False)


def unregister(card: Card, path: Path) -> None:
    """Remove `card` if it is still at `path`. Raise nothing: this may run at interpreter exit."""
    with suppress(OSError, ValueError), _locked(path.parent):
        if Card.read(path).server == card.server:
            path.unlink()


def _read_if_running(path: Path) -> Card | None:
    """Return the connection file at `path` if its server is alive; remove it if the server is dead.

    Files that are not connection files of this user are left alone.
    """
    try:
        card = Card.read(path)
        if card.is_server_alive():
            return card
        with _locked(path.parent):
            card = Card.read(path)
            if card.is_server_alive():
                return card
            path.unlink()
    except (OSError, ValueError):  # removed, another user's, or of another version
        pass
    return None


def _check_available(path: Path) -> None:
    with suppress(FileNotFoundError):
        card = Card.read(path)
        if card.is_server_alive():
            raise FileExistsError(
                f"a pool named {card.name!r} is running already, as process {card.pid}: stop it "
                "first"
            )


@contextmanager
def _locked(directory: Path, wait: bool = True) -> Iterator[None]:
    path = os.fspath(directory / ".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        cure = "set XDG_RUNTIME_DIR to a directory of another one"
        lock_file(fd, path, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, cure)
        try:
            yield
        finally:
            # Unlock explicitly: a child forked meanwhile shares the lock, and closing the
            # descriptor here would leave the child with it.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
