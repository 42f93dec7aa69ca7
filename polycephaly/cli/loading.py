"""The image that a command's drones are copies of: what was asked for is loaded into a `__main__` of its own."""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

__all__ = ["CannotLoad", "load"]


class CannotLoad(Exception):
    """Its text is the traceback of what was to be loaded."""


def load(modules: tuple[str, ...], file: Path | None) -> None:
    """Makes a new `__main__`, which is not this command's, with `modules` imported and `file` run in it; the current
    directory comes on `sys.path`, as for a script. Raises `CannotLoad`."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    names = main.__dict__
    names["__builtins__"] = builtins
    sys.path.insert(0, os.getcwd())
    try:
        for module in modules:
            importlib.import_module(module)
            top = module.partition(".")[0]
            names[top] = sys.modules[top]
        if file is not None:
            names["__file__"] = str(file)
            exec(compile(file.read_bytes(), file, "exec", dont_inherit=True), names)
    except (Exception, SystemExit) as error:
        raise CannotLoad(_from_theirs(error)) from None


def _from_theirs(error: BaseException) -> str:
    """The traceback, from the first line that is neither ours nor the import machinery's."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in (__file__, importlib.__file__)
        or trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
