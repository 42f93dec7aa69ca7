"""Loading modules and a file into a fresh `__main__`, from which a command's drones are forked.

    start: modules, file ── Setup.read ──> load     join: the server's setup, by REQUEST ──┐
                               └── serve(_setup=)         its own modules, file ───────────┴──> load

The fresh `__main__` contains none of the command's own names.
"""

from __future__ import annotations

import builtins
import importlib
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple


class CannotLoad(Exception):
    """Loading failed. The text is the traceback of the user's code."""


class Setup(NamedTuple):
    """Modules to import, and then a file to run. The file's text is included for other hosts, as
    Latin-1, because JSON holds no bytes.
    """

    modules: Sequence[str] = ()
    file: str | None = None
    text: str = ""

    @classmethod
    def read(cls, modules: Sequence[str], file: Path | None) -> Setup:
        """Read the file. Raise `OSError`."""
        if file is None:
            return cls(modules)
        return cls(modules, str(file), file.read_bytes().decode("latin-1"))


def load(*setups: Setup) -> None:
    """Replace `__main__` by a new module; import the setups' modules and run their files there.

    The current directory is put on `sys.path`, as for a script. Raise `CannotLoad`.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    names = main.__dict__
    names["__builtins__"] = builtins
    sys.path.insert(0, os.getcwd())
    try:
        for setup in setups:
            for module in setup.modules:
                importlib.import_module(module)
                top = module.partition(".")[0]
                names[top] = sys.modules[top]
            if setup.file is not None:
                names["__file__"] = setup.file
                source = setup.text.encode("latin-1")
                code = compile(source, setup.file, "exec", dont_inherit=True)
                if not os.path.exists(setup.file):  # another host's file: tracebacks need its lines
                    lines = source.decode("utf-8", "replace").splitlines(keepends=True)
                    linecache.cache[setup.file] = len(source), None, lines, setup.file
                exec(code, names)
    except (Exception, SystemExit) as error:
        raise CannotLoad(_user_traceback(error)) from None


def _user_traceback(error: BaseException) -> str:
    """Return the traceback from the first frame outside this module and the import machinery."""
    trace = error.__traceback__
    while trace is not None and (
        trace.tb_frame.f_code.co_filename in (__file__, importlib.__file__)
        or trace.tb_frame.f_code.co_filename.startswith("<frozen importlib")
    ):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()
