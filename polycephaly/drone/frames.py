"""Report the frames of a drone's threads, and the line at which each of its tasks runs or waits.

    reactor ──FRAMES, a request──> control thread (or main thread, between tasks)
    reactor <──FRAMES, `frames_now` as JSON── the same thread

No thread is stopped: `sys._current_frames` shows where each one is. While C code holds the
interpreter, the control thread cannot run, and the reply has to wait.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from types import FrameType
from typing import Any

from ..promises import promise

__all__ = ["frames_now"]

Place = tuple[str, int, str]
"""File, line and function; for a green thread, the function or operation that runs or waits."""

MAX_FRAMES = 200
"""Innermost frames of one thread: a deep recursion would fill megabytes."""

_PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY_DIR = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED_DIRS = tuple(_LIBRARY_DIR + name + os.sep for name in ("site-packages", "dist-packages"))


def frames_now(main: int, current: int, overlapped: Mapping[int, Any]) -> dict[str, Any]:
    """Return plain data for JSON. Any thread may call it.

    ``threads`` has for each thread that `threading` knows its ``id`` (the kernel's), its ``name``,
    whether it is the ``main`` one, and its ``frames`` as (file, line, function), innermost first.
    ``places`` has for each running task, by its number, the place where the task is: the innermost
    frame that is neither of this package nor of the standard library, else the innermost frame
    outside this package, else None. If the task is or awaits a green thread, the place is that
    thread's.

    Parameters
    ----------
    main
        The identifier of the thread that runs the tasks.
    current
        The number of the task that it runs, or 0.
    overlapped
        The green threads of tasks that run beside each other, by their numbers.
    """
    frames = sys._current_frames()
    threads = [
        {
            "id": thread.native_id,
            "name": thread.name,
            "main": thread.ident == main,
            "frames": list(islice(_places(frames.get(thread.ident or 0)), MAX_FRAMES)),
        }
        for thread in threading.enumerate()
    ]
    places = {number: _place_of_green(thread) for number, thread in overlapped.items()}
    if current > 0:
        awaited, _ = promise.waiting_threads.get(main, (None, None))
        places[current] = _place_of_green(awaited) or _place_of(list(_places(frames.get(main))))
    return {"threads": threads, "places": places}


def _places(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname
        frame = frame.f_back


def _place_of(places: list[Place]) -> Place | None:
    outside_package = [each for each in places if not each[0].startswith(_PACKAGE_DIR)]
    return next(
        (each for each in outside_package if not _is_library(each[0])),
        outside_package[0] if outside_package else None,
    )


def _is_library(file: str) -> bool:
    return file.startswith(("<frozen ", _LIBRARY_DIR)) and not file.startswith(_INSTALLED_DIRS)


def _place_of_green(awaited: object) -> Place | None:
    """Return the place of a green thread.

    None for other objects, and for green threads that run only code of this package, such as the
    one by which plain code waits.
    """
    green = sys.modules.get("polycephaly.green.report")
    info = None if green is None else green.info_of(awaited)
    if info is None or info.file.startswith(_PACKAGE_DIR):
        return None
    return info.file, info.line, info.doing
