"""A drone of a notebook is no kernel: what ipykernel put in place of functions that ask its user is
taken away again.

The kernel's `input` and `getpass` write to its sockets and wait there for an answer. That is the
kernel's own business: two processes at one ZeroMQ socket harm each other. A drone's standard input
is empty. What it displays is printed, as in a plain Python."""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

__all__ = ["leave_the_kernel"]


def leave_the_kernel() -> None:
    if not {"ipykernel", "IPython.core.interactiveshell"} <= sys.modules.keys():
        return  # that ipykernel was imported makes no kernel, and each drone would import IPython for nothing
    if not isinstance(builtins.input, types.BuiltinFunctionType):
        builtins.input = _input
    getpass: Any = sys.modules.get("getpass")
    if getpass is not None:
        getpass.getpass = getpass.unix_getpass
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.getipython import get_ipython

    shell: Any = get_ipython()
    if shell is not None:
        shell.display_pub = DisplayPublisher(shell=shell)  # type: ignore[no-untyped-call]


def _input(prompt: object = "", /) -> str:
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError("a drone's standard input is empty")
    return line.removesuffix("\n")
