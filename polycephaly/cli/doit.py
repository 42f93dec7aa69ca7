"""`polycephaly doit`: run a task from the shell, with its output, value and exit status.

    pool ── lines, and None for each task that is done ──> queue ──> this thread ──> stdout, stderr

The connection's thread only puts lines into the queue. If a slow reader (`| less`) blocked that
thread, the server would treat this client as gone.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .reach import FILE, SECONDS, Command, complete_pool, connect_to
from .tables import as_json

if TYPE_CHECKING:
    from ..pool.base import TaskTarget
    from ..promises.promise import Promise
    from ..wire.output import Line


@click.command(cls=Command)
@click.argument("name", required=False, shell_complete=complete_pool)
@click.argument("code", nargs=-1, metavar="[CODE|-] [ARGS]...")
@click.option("-f", "--file", type=FILE, help="Run this file.")
@click.option(
    "--timeout", type=SECONDS, metavar="SECONDS", help="Interrupt the code after so long."
)
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

    Examples
    --------
    polycephaly doit lab "sum(range(10))"           prints 45
    polycephaly doit lab -f report.py -- --year 3   runs a file, with arguments
    polycephaly doit lab - < report.py              the same from the standard input
    polycephaly doit lab --everywhere "import numpy"
    polycephaly doit lab --json "2 ** 100" | jq -r .value

    Notes
    -----
    Exit status: 0 after success; 1 after an error; n after sys.exit(n) in the code;
    130 after Ctrl-C, which interrupts the task.
    """
    from queue import SimpleQueue

    from ..drone.program import Program
    from ..engines.remote.pool_registry import is_name

    if name is not None and not code and file is None:
        code, name = (name,), None
    name = name or "default"
    if code and not (is_name(name) or name.startswith("tcp://") or Path(name).is_file()):
        raise click.UsageError(f"{name!r} is no pool's name. With ARGS, NAME comes first.")
    if file is not None:
        program = Program(_read_source(file), str(file), [str(file), *code])
    elif not code:
        raise click.UsageError("No code: give CODE, - (for the standard input) or --file.")
    elif code[0] == "-" and sys.stdin is None:
        raise click.UsageError("The standard input is closed.")
    else:
        source = sys.stdin.read() if code[0] == "-" else code[0]
        program = Program(source, None, ["-" if code[0] == "-" else "-c", *code[1:]])

    lines: SimpleQueue[Line | None] = SimpleQueue()
    captured: defaultdict[tuple[str, str], str] = defaultdict(str)  # by drone and stream
    with connect_to(name, lines.put) as pool:
        drones: list[tuple[str, TaskTarget]] = [("", pool)]
        if everywhere:
            drones = [(each.name, each) for each in pool.drones]
        promises = [
            (each if timeout is None else each.options(timeout=timeout)).promise(program)
            for _, each in drones
        ]
        for promise in promises:
            promise.add_done_callback(lambda _: lines.put(None))
        for _ in promises:
            while (line := lines.get()) is not None:
                if in_json:
                    captured[line.drone if everywhere else "", line.stream] += f"{line.text}\n"
                else:
                    click.echo(line if everywhere else line.text, err=line.stream == "stderr")
        outcomes = [_outcome_of(promise) for promise in promises]
    results = []
    for (drone, _), (outcome, error_text) in zip(drones, outcomes, strict=True):
        if in_json:
            streams = {stream: captured[drone, stream] for stream in ("stdout", "stderr")}
            results.append(({"drone": drone} if drone else {}) | outcome | streams)
            continue
        prefix = f"[{drone}] " if drone else ""
        if outcome["value"] is not None and file is None:
            click.echo(prefix + outcome["value"])
        if error_text:
            click.echo(prefix + error_text, err=True)
    if in_json:
        as_json(results if everywhere else results[0])
    sys.exit(max((outcome["status"] for outcome, _ in outcomes), default=0))


def _read_source(file: Path) -> str:
    """Return the text of a file in the encoding that it declares, as `python` reads it."""
    import tokenize

    try:
        with tokenize.open(file) as text:
            return text.read()
    except (SyntaxError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{file}: {error}") from None


def _outcome_of(promise: Promise[Any]) -> tuple[dict[str, Any], str]:
    """Return the outcome of one run as data for JSON, and the text for stderr."""
    value, status, error, text = None, 0, None, ""
    try:
        value = promise.result()
    except SystemExit as end:
        # As the interpreter does: None is status 0, an integer is the status; anything else is
        # printed, and the status is 1.
        if isinstance(end.code, int):
            status = end.code & 0xFF
        elif end.code is not None:
            status, text = 1, str(end.code)
            error = {"type": "SystemExit", "message": text, "traceback": text}
    except BaseException as failure:
        status, text = 1, traceback_text(failure)
        error = {"type": type(failure).__name__, "message": str(failure), "traceback": text}
    return {"value": value, "status": status, "error": error}, text


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
