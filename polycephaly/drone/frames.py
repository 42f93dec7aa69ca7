"""Report the frames of a drone's tasks and threads, and the line at which each task runs or waits.

    reactor ──FRAMES, a request──> control thread (or main thread, between tasks)
    reactor <──FRAMES, `frames_now` as JSON── the same thread

No thread is stopped: `sys._current_frames` shows where each one is. While C code holds the
interpreter, the control thread cannot run, and the reply has to wait. No file is read here, because
a file system may be the reason for a hang: see `_source_of`.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, takewhile
from types import CodeType, FrameType
from typing import Any

from .._compat import current_frames
from ..promises import promise
from ..wire import code_strings, seeding

Entry = tuple[str, int, str, str]
"""File, line and function of a frame, and the text of the line if known, else ""."""
Place = tuple[str, int, str]
"""File, line and function; for a green thread, the function or operation that runs or waits."""

MAX_FRAMES = 200
"""Innermost frames of one thread: a deep recursion would fill megabytes."""

_DRONE_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
OWN_FILES = (_DRONE_DIR, os.path.abspath(code_strings.__file__), os.path.abspath(seeding.__file__))
"""Directories and files of the frames that lie around a task."""
_PACKAGE_DIR = os.path.dirname(os.path.dirname(_DRONE_DIR)) + os.sep
_LIBRARY_DIR = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED_DIRS = tuple(_LIBRARY_DIR + name + os.sep for name in ("site-packages", "dist-packages"))
_RAY_DIR = f"-packages{os.sep}ray{os.sep}"  # where Ray's own threads run


def frames_now(
    main: int,
    runner: CodeType,
    current: int,
    overlapped: Mapping[int, Any],
    with_threads: bool = True,
) -> dict[str, Any]:
    """Return plain data for JSON. Any thread may call it.

    ``current`` is as given. ``tasks`` has for each running task, by its number, its frames,
    innermost first. ``threads`` has the name and the frames of each other native thread that runs
    code from outside this package and the standard library. ``places`` has for each running task
    the place where the task is: the innermost frame that is neither of this package nor of the
    standard library, else the innermost frame outside this package, else None. If the task is or
    awaits a green thread, the place is that thread's.

    Parameters
    ----------
    main
        The identifier of the thread that runs the tasks.
    runner
        The function of that thread that runs one task. The frames outside this one belong to the
        drone, or to the process from which the drone was forked.
    current
        The number of the task that the thread runs, or 0.
    overlapped
        The green threads of tasks that run beside each other, by their numbers.
    with_threads
        False if the other native threads do not belong to the drone.
    """
    frames = current_frames()
    tasks = {number: _entries(_green_frames(each, frames)) for number, each in overlapped.items()}
    places = {number: _place_of_green(each, frames) for number, each in overlapped.items()}
    if current > 0:
        awaited, _ = promise.waiting_threads.get(main, (None, None))
        own, green = _task_frames(frames.get(main), runner), _green_frames(awaited, frames)
        if green:  # which the main thread only waits for
            own = [*green, *(each for each in own if not _file(each).startswith(_PACKAGE_DIR))]
        tasks[current] = _entries(own)
        places[current] = _place_of_green(awaited, frames) or _place_of(own)
    others = [each for each in threading.enumerate() if with_threads and each.ident != main]
    stacks = [(each.name, list(_walk(frames.get(each.ident or 0)))) for each in others]
    threads = [(name, _entries(stack)) for name, stack in stacks if any(map(_is_users, stack))]
    return {"current": current, "tasks": tasks, "threads": threads, "places": places}


def sampled_threads(main: int, runner: str) -> list[tuple[int, str]]:
    """Return the threads that run tasks now, each with the file of the functions that run them.

    `main` runs the functions of the file `runner`; 0 if no task runs there. The owner of green
    threads, if that is another thread, runs tasks beside each other (``width=``).
    """
    threads = [(main, runner)] if main else []
    green: Any = sys.modules.get("polycephaly.green.scheduler")
    scheduler = getattr(green, "scheduler", None)  # None if the module is being imported
    if scheduler is not None and scheduler.owner not in (0, main):
        threads.append((scheduler.owner, green.__file__))
    return threads


def _walk(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _task_frames(frame: FrameType | None, runner: CodeType) -> list[FrameType]:
    """Return the frames of the task, innermost first, without the outermost ones of the drone."""
    frames = list(takewhile(lambda each: each.f_code is not runner, _walk(frame)))
    while frames and _file(frames[-1]).startswith(OWN_FILES):
        frames.pop()
    return frames


def _entries(frames: Iterable[FrameType]) -> list[Entry]:
    return [(*_place(each), _source_of(each)) for each in islice(frames, MAX_FRAMES)]


def _source_of(frame: FrameType) -> str:
    """Return the text of the line, if `linecache` has read the file already.

    That is so for code strings, which have no file. The controller reads the lines of files.
    """
    entry = linecache.cache.get(_file(frame), ())
    lines, line = entry[2] if len(entry) == 4 else [], frame.f_lineno
    return lines[line - 1] if line is not None and 0 < line <= len(lines) else ""


def _place(frame: FrameType) -> Place:
    return _file(frame), frame.f_lineno or 0, frame.f_code.co_qualname


def _place_of(frames: list[FrameType]) -> Place | None:
    outside_package = [each for each in frames if not _file(each).startswith(_PACKAGE_DIR)]
    users = (each for each in outside_package if _is_users(each))
    frame = next(users, outside_package[0] if outside_package else None)
    return None if frame is None else _place(frame)


def _is_users(frame: FrameType) -> bool:
    file = _file(frame)
    library = file.startswith(("<frozen ", _LIBRARY_DIR)) and not file.startswith(_INSTALLED_DIRS)
    return not (library or file.startswith(_PACKAGE_DIR) or _RAY_DIR in file)


def _file(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _green_frames(awaited: object, frames: Mapping[int, FrameType]) -> list[FrameType]:
    """Return the frames of a green thread, innermost first; [] for other objects."""
    # None if another thread is importing the module.
    frames_of = getattr(sys.modules.get("polycephaly.green.report"), "frames_of", None)
    return [] if frames_of is None else frames_of(awaited, frames)


def _place_of_green(awaited: object, frames: Mapping[int, FrameType]) -> Place | None:
    """Return the place of a green thread.

    None for other objects, and for green threads that run only code of this package, such as the
    one by which plain code waits.
    """
    info_of = getattr(sys.modules.get("polycephaly.green.report"), "info_of", None)
    info = None if info_of is None else info_of(awaited, frames)
    if info is None or info.file.startswith(_PACKAGE_DIR):
        return None
    return info.file, info.line, info.doing
