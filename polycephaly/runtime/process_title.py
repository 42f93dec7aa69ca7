"""The name and the title of this process, which ps, top and htop show.

The kernel reads a title where the command line was at the start. The environment follows there, by
which other processes find a family (parent_death.py), so a longer title must not be written there.
Instead, the kernel is told that the command line is elsewhere.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from functools import cache

from .procfs import stat_of

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
_NO_FILE = 0xFFFFFFFF
_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_uint64
_title = ctypes.create_string_buffer(0)


_ADDRESSES = (
    "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack",
    "arg_start", "arg_end", "env_start", "env_end", "auxv",
)  # fmt: skip


class _MemoryMap(ctypes.Structure):  # struct prctl_mm_map
    _fields_ = (
        *((name, ctypes.c_uint64) for name in _ADDRESSES),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


@cache
def _areas() -> _MemoryMap | None:
    """Return where the parts of this process are, and so in its forks; None without /proc."""
    fields = ["", "", "", *stat_of("self")]  # by their numbers in proc_pid_stat(5)
    if len(fields) <= 51:
        return None
    return _MemoryMap(
        start_code=int(fields[26]),
        end_code=int(fields[27]),
        start_stack=int(fields[28]),
        start_data=int(fields[45]),
        end_data=int(fields[46]),
        start_brk=int(fields[47]),
        env_start=int(fields[50]),
        env_end=int(fields[51]),
        exe_fd=_NO_FILE,
    )


def set_process_title(name: str, title: str) -> None:
    """Have `ps -e` and top show this process as `name`, of which the kernel keeps 15 bytes, and
    `ps -ef` and htop show `title` as the command line, if the kernel permits.

    No other thread may run: the kernel is told the end of the heap, which must not move meanwhile.
    """
    global _title
    with suppress(OSError), open("/proc/self/comm", "wb") as comm:
        comm.write(name.encode("utf-8", "replace"))
    areas = _areas()
    if areas is None:
        return
    text = ctypes.create_string_buffer(f"polycephaly: {title}".encode("utf-8", "replace"))
    areas.arg_start = ctypes.addressof(text)
    areas.arg_end = areas.arg_start + len(text)
    size = ctypes.c_ulong(ctypes.sizeof(areas))
    areas.brk = _libc.sbrk(0)
    if _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(areas), size, 0) == 0:
        _title = text  # which the kernel reads from now on
