"""`pdb.set_trace()` in a drone does what `breakpoint()` does.

A drone does not import pdb until a task does, because that takes about 3 ms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def replace_set_trace(hook: Callable[..., None]) -> None:
    """Replace `pdb.set_trace` by `hook`: now if pdb is imported, otherwise when it is. Code that
    has imported `set_trace` by name before keeps the original.
    """
    module: Any = sys.modules.get("pdb")
    if module is not None:
        module.set_trace = hook
    else:
        sys.meta_path.insert(0, _Finder(hook))


class _Finder:
    """Finds pdb as usual, and replaces its `set_trace` after the module has been executed."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == "pdb" else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                # Only now: `importlib.util.find_spec` finds modules and imports none.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                execute(module)
                module.set_trace = self._hook

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
