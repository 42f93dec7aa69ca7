"""Reading small files with secrets.

No other user can decide the contents, or how long a read takes.
"""

from __future__ import annotations

import os
import stat

MAX_FILE_BYTES = 1 << 20


def read_private(path: str | os.PathLike[str]) -> bytes:
    """Return the contents of a small private file of this user.

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
