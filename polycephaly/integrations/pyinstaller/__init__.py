"""Tells PyInstaller where the hook of this package is; see the entry points in pyproject.toml."""

import os


def get_hook_dirs() -> list[str]:
    return [os.path.dirname(__file__)]
