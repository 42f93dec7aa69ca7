"""Which input runs at a prompt: a cell of IPython or Jupyter, or a line of Python's own prompt."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from .._compat import current_frames

if TYPE_CHECKING:
    from asyncio import Task


class Cell(NamedTuple):
    number: int  # one more for each cell


_cell = Cell(0)
_counted: Any = None  # the shell whose cells are noted


def running_input() -> object | None:
    """Return the object that stands for the input that runs now, or ran last; None in a program
    without a prompt.

    A cell has one such object; each line of Python's own prompt is its own. Any thread may call
    this. While no line runs, each call gives another object.
    """
    shell = running_shell()
    if shell is not None:
        _note_cells(shell)
        return _cell
    return _running_line() if hasattr(sys, "ps1") else None


def running_cell() -> Cell | None:
    """Return the cell of IPython or Jupyter that runs now, or ran last; None if there is no shell
    of these. Cells are counted from the first call on.
    """
    running = running_input()
    return running if isinstance(running, Cell) else None


def running_shell() -> Any:
    """Return the shell of IPython or of a kernel of it; None if this program has none."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_ipython is None else get_ipython()


def _note_cells(shell: Any) -> None:
    global _counted
    if _counted is not shell:
        _counted = shell
        shell.events.register("pre_run_cell", _on_cell)


def _on_cell(*_: object) -> None:
    global _cell
    _cell = Cell(_cell.number + 1)


def _running_line() -> object:
    """Return the code of the line that the main thread runs: a prompt compiles each anew."""
    frame = current_frames().get(threading.main_thread().ident or 0)
    namespace = vars(sys.modules["__main__"])
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is namespace:
            return frame.f_code
        frame = frame.f_back
    return object()


def _is_prompt_task(task: Task[Any]) -> bool:
    """Return whether a prompt made `task` to run the code that was typed in.

    ``python -m asyncio`` makes a task of each line that awaits. IPython and its kernels make a task
    of each cell, and of each message of a widget. Tasks that the user's code makes there have
    coroutines of the user's.
    """
    frame = getattr(task.get_coro(), "cr_frame", None)
    if frame is None:  # a generator, or a coroutine of a compiled extension
        return False
    if frame.f_code.co_name == "<module>":  # only a prompt compiles a module's code to a coroutine
        return True
    return str(frame.f_globals.get("__name__")).partition(".")[0] in ("IPython", "ipykernel")


def running_asyncio_task() -> Task[Any] | None:
    """Return the asyncio task that runs in this thread, unless it is a cell or line of a prompt."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None:
        return None
    task: Task[Any] | None = asyncio.current_task()
    return None if task is None or _is_prompt_task(task) else task
