"""`polycephaly doit`: run a task from the shell, with its output, value and exit status.

    pool ── lines, and None for each task that is done ──> queue ──> this thread ──> stdout, stderr

The connection's thread only puts lines into the queue. If a slow reader (`| less`) blocked that
thread, the server would treat this client as gone.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .reach import FILE, complete_pool, connect_to, one_line_errors
from .tables import as_json

if TYPE_CHECKING:
    from ..pool.base import TaskTarget
    from ..promises.promise import Promise
    from ..wire.output import Line

EXAMPLES = """\b
Examples:
  polycephaly doit lab "sum(range(10))"           prints 45
  polycephaly doit lab -f report.py -- --year 3   runs a file, with arguments
  polycephaly doit lab - < report.py              the same from the standard input
  polycephaly doit lab --everywhere "import numpy"
  polycephaly doit lab --json "2 ** 100" | jq -r .value

\b
Exit status: 0 after success; 1 after an error; n after sys.exit(n) in the code;
130 after Ctrl-C, which interrupts the task.
"""


@click.command(epilog=EXAMPLES)
@click.argument("name", required=False, shell_complete=complete_pool)
@click.argument("code", nargs=-1, metavar="[CODE|-] [ARGS]...")
@click.option("-f", "--file", type=FILE, help="Run this file.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Interrupt the code after so long.")
@click.option("-e", "--everywhere", is_flag=True, help="Run the code once in each drone.")
@click.option(
    "--json",
    "in_json",
    is_flag=True,
    help="Print a JSON object with value, output and error; with -e a list of these.",
)
def doit(
    name: str | None,
    code: tuple[str, ...],
    file: Path | None,
    timeout: float | None,
    everywhere: bool,
    in_json: bool,
) -> None:
    """Run CODE, or a file, in a drone of pool NAME, or of "default" if only CODE is given.

    The code runs in the __main__ of any free drone, and names that it defines stay there. Its
    output appears here, line by line. The value of a last expression is printed as at Python's
    prompt, but not the value of a file's last expression. ARGS become sys.argv[1:].
    """
    from queue import SimpleQueue

    from ..drone.program import Program
    from ..engines.remote.pool_registry import is_name

    if name is not None and not code and file is None:
        code, name = (name,), None
    name = name or "default"
    if code and not is_name(name):
        raise click.UsageError(f"{name!r} is no pool's name. With ARGS, NAME comes first.")
    if file is not None:
        with one_line_errors():
            program = Program(file.read_text(encoding="utf-8-sig"), str(file), [str(file), *code])
    elif not code:
        raise click.UsageError("No code: give CODE, - (for the standard input) or --file.")
    elif code[0] == "-" and sys.stdin is None:
        raise click.UsageError("The standard input is closed.")
    else:
        source = sys.stdin.read() if code[0] == "-" else code[0]
        program = Program(source, None, ["-" if code[0] == "-" else "-c", *code[1:]])

    lines: SimpleQueue[Line | None] = SimpleQueue()
    captured: list[Line] = []
    with connect_to(name, lines.put) as pool:
        drones = pool.drones if everywhere else []
        names = [drone.name for drone in drones] if everywhere else [""]
        targets: list[TaskTarget] = [*drones] if everywhere else [pool]
        promises = [
            (each if timeout is None else each.options(timeout=timeout)).promise(program)
            for each in targets
        ]
        for promise in promises:
            promise.add_done_callback(lambda _: lines.put(None))
        for _ in promises:
            while (line := lines.get()) is not None:
                if in_json:
                    captured.append(line)
                else:
                    click.echo(line if everywhere else line.text, err=line.stream == "stderr")
        outcomes = [Outcome(drone, promise) for drone, promise in zip(names, promises, strict=True)]
    if in_json:
        results = [outcome.to_json(captured) for outcome in outcomes]
        as_json(results if everywhere else results[0])
    else:
        for outcome in outcomes:
            outcome.show(with_value=file is None)
    sys.exit(max((outcome.status for outcome in outcomes), default=0))


class Outcome:
    """The outcome of one run. `drone` is empty unless the code ran in each drone."""

    def __init__(self, drone: str, promise: Promise[Any]) -> None:
        self.drone = drone
        self.value: str | None = None
        self.error: BaseException | None = None
        self.status = 0
        self.stderr_text = ""
        try:
            self.value = promise.result()
        except SystemExit as end:
            # As the interpreter does: None is status 0, an integer is the status; anything else is
            # printed, and the status is 1.
            self.status = (
                0 if end.code is None else end.code & 0xFF if isinstance(end.code, int) else 1
            )
            if end.code is not None and not isinstance(end.code, int):
                self.stderr_text = str(end.code)
        except BaseException as error:
            self.error = error
            self.status = 1
            self.stderr_text = traceback_text(error)

    def show(self, with_value: bool) -> None:
        prefix = f"[{self.drone}] " if self.drone else ""
        if self.value is not None and with_value:
            click.echo(prefix + self.value)
        if self.stderr_text:
            click.echo(prefix + self.stderr_text, err=True)

    def to_json(self, captured: list[Line]) -> dict[str, Any]:
        """Return data for JSON, with those lines of `captured` that belong to this outcome."""
        own_lines = [line for line in captured if not self.drone or line.drone == self.drone]
        streams = {
            stream: "".join(f"{line.text}\n" for line in own_lines if line.stream == stream)
            for stream in ("stdout", "stderr")
        }
        error = None
        if self.error is not None:
            error = {
                "type": type(self.error).__name__,
                "message": str(self.error),
                "traceback": self.stderr_text,
            }
        drone = {"drone": self.drone} if self.drone else {}
        return {**drone, "value": self.value, "status": self.status, "error": error, **streams}


def traceback_text(error: BaseException) -> str:
    """Return the traceback from the drone, or the error's own text if there is none.

    There is none after the death of a drone, for instance.
    """
    import traceback
    from concurrent.futures import CancelledError

    from .._compat import remote_traceback_type

    if isinstance(error, CancelledError):
        return "cancelled"
    if isinstance(error, SyntaxError):
        return "".join(traceback.format_exception_only(error)).rstrip()
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, remote_traceback_type()):
            return str(cause).strip().strip('"').strip("\n")
        cause = cause.__cause__
    return "".join(traceback.format_exception_only(error)).rstrip()
