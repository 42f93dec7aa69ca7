"""`polycephaly stacks`: the task and the frames of each drone of a pool at this moment."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

import click

from .listing import JSON, status_of
from .reach import POOL_NAME, connect_to, one_line_errors
from .tables import as_json, printable

INTERPRETER_DIR = os.path.dirname(sys.executable)  # of a virtual environment that is not activated


@click.command(
    epilog="""\b
Examples:
  polycephaly stacks lab
  polycephaly stacks lab --native       with C frames; needs py-spy, and the right to use it

\b
Each drone is shown with its task, the time since the task was sent, and the Python
frames of the task and of other threads. No task is stopped. A drone in C code that
holds its interpreter cannot answer; --native shows where it is.
"""
)
@POOL_NAME
@click.option("--native", is_flag=True, help="Run py-spy dump --native on each drone instead.")
@JSON
def stacks(name: str, native: bool, in_json: bool) -> None:
    """Show where the tasks of the drones of pool NAME are."""
    if native and in_json:
        raise click.UsageError("--native prints the text of py-spy: leave out --json")
    if native:
        _dump_native(name)
        return
    with one_line_errors(), connect_to(name) as pool:
        taken = pool.stacks()
    if in_json:
        as_json([stack.as_dict() for stack in taken])
        return
    for line in str(taken).split("\n"):
        click.echo(printable(line.expandtabs()))


def _dump_native(name: str) -> None:
    path = os.pathsep.join([INTERPRETER_DIR, os.environ.get("PATH", os.defpath)])
    py_spy = shutil.which("py-spy", path=path)
    if py_spy is None:
        raise click.ClickException(
            "--native needs py-spy, which is not installed: pip install py-spy"
        )
    failed = []
    for drone in status_of(name)["drones"]:
        click.echo(printable(f"{drone['name']} (pid {drone['pid']})"))
        sys.stdout.flush()
        if drone["host"] != socket.gethostname():
            click.echo(printable(f"on {drone['host']}: run py-spy there"))
        elif subprocess.run([py_spy, "dump", "--native", "--pid", str(drone["pid"])]).returncode:
            failed.append(drone["name"])
    if failed:
        raise click.ClickException(f"py-spy failed for {', '.join(failed)}")
