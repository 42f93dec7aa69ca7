"""Undo, in a drone of a notebook, the changes that ipykernel made to functions that ask its user.

The kernel's `input` and `getpass` write to its sockets and wait there for an answer. Only the
kernel may do so, because two processes at one ZeroMQ socket harm each other. A drone's standard
input is empty. Displayed objects are printed, as in plain Python.
"""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any


def replace_kernel_input() -> None:
    # An imported ipykernel alone makes no kernel, and each drone would import IPython in vain.
    if not {"ipykernel", "IPython.core.interactiveshell"} <= sys.modules.keys():
        return
    if not isinstance(builtins.input, types.BuiltinFunctionType):
        builtins.input = _read_line
    getpass: Any = sys.modules.get("getpass")
    if getpass is not None:
        getpass.getpass = getpass.unix_getpass
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is not None:
        shell.display_pub = DisplayPublisher(shell=shell)  # type: ignore[no-untyped-call]


def _read_line(prompt: object = "", /) -> str:
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("a drone's standard input is empty")
    return line.removesuffix("\n")
