"""`polycephaly stacks`: the task and the frames of each drone of a pool at this moment."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import click

from ..timeline.format import printable
from .listing import JSON
from .reach import POOL_NAME, Command, connect_to
from .tables import as_json

INTERPRETER_DIR = os.path.dirname(sys.executable)  # of a virtual environment that is not activated


@click.command(cls=Command)
@POOL_NAME
@click.option("--native", is_flag=True, help="Also print the C frames, by py-spy dump --native.")
@JSON
def stacks(name: str, native: bool, in_json: bool) -> None:
    """Show where the tasks of the drones of pool NAME are.

    Examples
    --------
    polycephaly stacks lab
    polycephaly stacks lab --native       with C frames; needs py-spy, and the right to use it

    Notes
    -----
    Each drone is shown with its task, the time since the task was sent, and the Python
    frames of the task and of other threads. No task is stopped. A drone in C code that
    holds its interpreter cannot answer; the C frames, which --native adds, show where it is.
    """
    if native and in_json:
        raise click.UsageError("--native prints the text of py-spy: leave out --json")
    py_spy = _find_py_spy() if native else ""
    with connect_to(name) as pool:
        taken = pool.stacks()
        drones = pool.status()["drones"] if native else []
    if in_json:
        as_json([stack.as_dict() for stack in taken])
        return
    if not native:
        _print(str(taken))
        return
    hosts = {(drone["name"], drone["pid"]): drone["host"] for drone in drones}
    failed = []
    for stack in taken:
        _print(f"{stack}\n")
        host = hosts.get((stack.drone, stack.pid))  # None if the drone has ended since
        if host not in (None, socket.gethostname()):
            _print(f"on {host}: run py-spy there")
        elif stack.pid is not None and _dump(py_spy, stack.pid):
            failed.append(stack.drone)
        _print("")
    if failed:
        raise click.ClickException(f"py-spy failed for {', '.join(failed)}")


def _dump(py_spy: str, pid: int) -> int:
    return subprocess.run([py_spy, "dump", "--native", "--pid", str(pid)]).returncode


def _print(text: str) -> None:
    for line in text.split("\n"):
        click.echo(printable(line.expandtabs()))
    sys.stdout.flush()  # before py-spy prints


def _find_py_spy() -> str:
    path = os.pathsep.join([INTERPRETER_DIR, os.environ.get("PATH", os.defpath)])
    py_spy = shutil.which("py-spy", path=path)
    if py_spy is None:
        raise click.ClickException(
            "--native needs py-spy, which is not installed: pip install py-spy"
        )
    return py_spy
