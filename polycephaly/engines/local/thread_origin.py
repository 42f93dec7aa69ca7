"""Tells which library started a native thread, and what the thread runs.

    kernel: get_robust_list(thread) ──> the C library's descriptor of the thread
      ├─ start function ──> its library, and its name if that is exported
      └─ argument ──> of std::thread an object ──> its class ──> the C++ name of what was started

The kernel knows a list in the thread's descriptor, whether the thread waits or runs. The start
function of a `std::thread` is one of the C++ library, so the class of its argument tells more: the
class is made by the compiler for what the thread was given, and its name holds the name of that,
also in a library that is stripped of its symbols.

Nothing here stops the thread, so what is read may be out of date. It is read through the kernel,
which returns an error where there is no memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
from contextlib import suppress
from itertools import pairwise
from threading import get_ident
from typing import NamedTuple

PYTHON = "<Python>"
_WORD_BYTES = struct.calcsize("P")
_GET_ROBUST_LIST = 274 if os.uname().machine == "x86_64" and _WORD_BYTES == 8 else None
_DESCRIPTOR_WORDS = 288  # of glibc's thread descriptor, up to what the thread was started with
_MAX_NAME_BYTES = 4096
_STATE_OF_THREAD = re.compile(rb"\*?NSt6thread\d+_")  # `*`: a type of one library only
_INSTALLED = re.compile(r".*/(?:site|dist)-packages/(.*)")


class Origin(NamedTuple):
    """Where a thread comes from."""

    library: str
    """The file name of its library, or `PYTHON`."""
    start: str = ""
    """The qualified name of the C++ function, or the name of the C function, that it was started
    with, as in ``arrow::internal::ThreadPool::LaunchWorkersUnlocked``; empty if unknown."""
    path: str = ""
    identity: int = 0
    """What Python calls `ident`: the address of its descriptor."""

    def __str__(self) -> str:
        """Return the library, with the folder of the package that it was installed with."""
        found = _INSTALLED.fullmatch(os.path.normpath(self.path))
        where = found[1] if found else self.library
        return f"{where} ({self.start})" if self.start else where


def find_origin(thread: int) -> Origin | None:
    """Return the origin of a thread of this process; None if it is unknown, or the thread ends."""
    with suppress(OSError, ValueError):
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_origin(memory, thread)
        finally:
            os.close(memory)
    return None


def _read_origin(memory: int, thread: int) -> Origin | None:
    descriptor = _find_list(thread) - _LIST_OFFSET
    words = _read(memory, descriptor, _DESCRIPTOR_WORDS)
    if not words[0] == words[2] == descriptor:  # as on x86-64
        return None
    end = descriptor + len(words) * _WORD_BYTES
    for word, behind in pairwise(words):  # noqa: B007
        found = None if descriptor <= word < end else _find_symbol(word)
        # The dynamic linker holds the head of the list of all threads, and a descriptor points at
        # its neighbours.
        if found is not None and not os.path.basename(found[0]).startswith("ld-"):
            break
    else:
        return None
    path, name = found
    if path != PYTHON:
        with suppress(OSError, ValueError):  # the argument is no address
            path, name = _read_state(memory, behind) or found
    return Origin(os.path.basename(path), qualified_name(name), path, descriptor)


def _find_list(thread: int) -> int:
    """Return the address of the list that a thread's descriptor holds for the kernel."""
    head, size = ctypes.c_void_p(), ctypes.c_size_t()
    if _GET_ROBUST_LIST is None or _syscall(
        _GET_ROBUST_LIST, ctypes.c_int(thread), ctypes.byref(head), ctypes.byref(size)
    ):
        raise ValueError("the thread has ended, or the kernel does not tell")
    if not head.value:
        raise ValueError("the thread was not started by the C library, or only just now")
    return head.value


def _read_state(memory: int, state: int) -> tuple[str, str] | None:
    """Return the library and the C++ name of what a `std::thread` with that argument runs.

    None if the argument is none of `std::thread`.
    """
    (table,) = _read(memory, state, 1)
    (of_type,) = _read(memory, table - _WORD_BYTES, 1)
    _, address = _read(memory, of_type, 2)
    library = _find_symbol(table)
    name, _, _ = _read_bytes(memory, address, _MAX_NAME_BYTES).partition(b"\0")
    if library is None or not _STATE_OF_THREAD.match(name):
        return None
    return library[0], name.decode("ascii", "replace")


def _read(memory: int, address: int, count: int) -> tuple[int, ...]:
    content = _read_bytes(memory, address, count * _WORD_BYTES)
    if len(content) < count * _WORD_BYTES:
        raise ValueError("there is no memory")
    return struct.unpack(f"{count}P", content)


def _read_bytes(memory: int, address: int, size: int) -> bytes:
    if not 0 < address < 1 << 47:
        raise ValueError("no user-space address")
    return os.pread(memory, size, address)  # less at the end of what is mapped


class _Symbol(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p), ("at", ctypes.c_void_p),
    )  # fmt: skip


_c_library = ctypes.CDLL(None)
_dladdr = getattr(_c_library, "dladdr", None)
_syscall = _c_library.syscall


def _find_symbol(address: int) -> tuple[str, str] | None:
    """Return the path of the library that is loaded at `address`, or `PYTHON`; None if none is.

    And the name of the function that begins there, "" if it is not exported.
    """
    if _dladdr is None or not 1 << 16 < address < 1 << 47:  # no user-space address
        return None
    symbol = _Symbol()
    if not _dladdr(address, ctypes.byref(symbol)):
        return None
    if symbol.base == _python.base:
        return PYTHON, ""
    name = symbol.name if symbol.at == address else None
    return os.fsdecode(symbol.file or b""), (name or b"").decode("ascii", "replace")


def qualified_name(mangled: str) -> str:
    """Return the first name in a C++ name that is not the standard library's, without its types.

    What is no C++ name is returned as it is.
    """
    if not mangled.startswith(("_Z", "N", "*N")):
        return mangled
    for begin in re.finditer(r"[NZ](?=\d)", mangled):
        names, at = [], begin.end()
        while size := re.match(r"\d+", mangled[at:]):
            at += size.end()
            names.append(mangled[at : at + int(size[0])])
            at += int(size[0])
        return "::".join(each for each in names if not each.startswith("_GLOBAL_"))
    return ""


_LIST_OFFSET = 0
_python = _Symbol()
if _dladdr is not None:
    _dladdr.argtypes = ctypes.c_void_p, ctypes.c_void_p
    _dladdr(ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p), ctypes.byref(_python))
with suppress(ValueError):  # origins are unknown then
    _LIST_OFFSET = _find_list(0) - get_ident()  # of the calling thread: the same for each
