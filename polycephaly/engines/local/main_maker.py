"""The recipe by which a drone of a bare zygote makes its `__main__` (see bare.py)."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from io import open_code
from pkgutil import get_importer
from runpy import run_path
from types import ModuleType
from typing import Any, NamedTuple

from ..._compat import importing_main
from ...memory.arena import Arena
from ...runtime.fork_guard import flush_standard_streams
from ...wire.main_names import MainSnapshot
from ...wire.main_snapshot import Snapshot, restore_snapshot


class MainMaker(NamedTuple):
    snapshot: Snapshot | None  # None: import the main module
    module: dict[str, str]  # names the main module; empty if there is none, as under `python -c`

    def make(self, arena: Arena) -> MainSnapshot:
        """Make `__main__`, in a drone. Raises the errors of importing the main module."""
        if self.snapshot is None and getattr(sys, "frozen", False):
            # The program itself runs here, as far as `freeze_support()`: it has no file to import.
            sys.modules["__mp_main__"] = sys.modules["__main__"]
            return MainSnapshot()
        _old_main.append(sys.modules["__main__"])  # kept alive, because its code still runs
        sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
        if self.snapshot is not None:
            return restore_snapshot(self.snapshot, arena)
        with importing_main():
            _import_main(**self.module)
        flush_standard_streams()
        return MainSnapshot()


_old_main: list[ModuleType] = []


def _import_main(init_main_from_name: str = "", init_main_from_path: str = "") -> None:
    """Run the main module's code in `__main__` itself.

    `multiprocessing` runs the code in another namespace and copies the results, so that functions
    of the module would not see names that are set in `__main__` later.
    """
    main = vars(sys.modules["__main__"])
    main["__name__"] = "__mp_main__"
    name, path = init_main_from_name, init_main_from_path
    program = os.path.basename(path).partition(".")[0]
    if name.endswith("__main__") or program in ("ipython", "<stdin>"):
        return  # a command line, or no file: `multiprocessing` does not import the former either
    if name:
        spec: Any = find_spec(name)
        if spec is None:
            raise ImportError(f"the main module {name!r} was not found", name=name)
        main.update(
            __spec__=spec, __loader__=spec.loader, __package__=spec.parent, __file__=spec.origin
        )
        exec(spec.loader.get_code(name), main)
    elif path and get_importer(path) is not None:  # a directory or an archive
        main.update(run_path(path, run_name="__mp_main__"))
    elif path:
        main["__file__"] = path
        with open_code(path) as file:
            exec(compile(file.read(), path, "exec", dont_inherit=True), main)
