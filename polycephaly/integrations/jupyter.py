"""Magics for Jupyter and IPython: `%load_ext polycephaly`.

    %%doit [POOL]        ── the cell, as a code string ──> one drone      ── value ──> Out
                                                            └── output ──> under the cell
    %%everywhere [POOL]  ───────────────────────────────> each drone     ── one value per drone

A cell is run as any code string: as statements in the drone's `__main__`, where the value of a last
expression is the result. So `!commands` and magics do not work inside. An interrupt of the kernel
cancels the task, and the pool continues.
"""

from __future__ import annotations

import contextvars
import re
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class

from ..pool.base import ExecutorBase, TaskTarget, wait_for
from ..promises.combining import gather
from ..promises.promise import Promise
from ..wire import output

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_OPTIONS = "|".join(
    rf"(?:-{name[0]}|--{name})(?:=|\s+|$)(?P<{name}>\S*)" for name in ("pool", "drone", "timeout")
)
_ARGUMENT = re.compile(rf"\s*(?:(?P<flag>-a|--async)(?!\S)|{_OPTIONS}|(?P<word>[^-\s]\S*))")


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics. Called by `%load_ext polycephaly`."""
    shell.register_magics(PolycephalyMagics)
    shell.events.register("pre_run_cell", _remember_cell)
    _remember_cell()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    shell.events.unregister("pre_run_cell", _remember_cell)
    output.delivery_context = None
    for kind in ("line", "cell"):
        for name in ("doit", "everywhere"):
            shell.magics_manager.magics[kind].pop(name, None)


def _remember_cell(*_: object) -> None:
    """Show the output of drones under the current cell from now on, whichever thread reads the
    output.

    A kernel finds the cell in the context of the code that prints. (ipykernel 6 would show the
    output under the cell that started the reactor's thread.)
    """
    output.delivery_context = contextvars.copy_context()


@magics_class
class PolycephalyMagics(Magics):
    """The magics `%doit` and `%everywhere`."""

    @line_cell_magic
    def doit(self, line: str, cell: str | None = None) -> Any:
        """Run the cell in a drone and return the value of its last expression.

            %%doit [POOL] [--drone NAME] [--timeout SECONDS] [--async]
            %doit [--pool POOL] [...] CODE

        POOL is a variable that holds a pool or a drone, or the name of a pool. Default: the pool
        that was used last, or made last. `--drone` selects a drone of the pool. `--timeout`
        interrupts the task after so many seconds. `--async` (`-a`) does not wait, and returns the
        promise.
        """
        __tracebackhide__ = True  # IPython hides such frames
        call = _MagicArguments(line, cell)
        promise = call.target(self._pools(), self).promise(call.code)
        return promise if call.no_wait else wait_for(promise)

    @line_cell_magic
    def everywhere(self, line: str, cell: str | None = None) -> Any:
        """Run the cell once in each drone of a pool and return the list of values.

        Return None if all values are None.

            %%everywhere [POOL] [--timeout SECONDS] [--async]
            %everywhere [--pool POOL] [...] CODE

        The options are those of `%%doit`.
        """
        __tracebackhide__ = True
        call = _MagicArguments(line, cell)
        target = call.target(self._pools(), self)
        each = getattr(target, "everywhere", None)
        if each is None or call.drone:
            name = call.drone or type(target).__name__
            _fail(f"everywhere takes a pool of this process, not {name}")
        promises: list[Promise[Any]] = each(call.code)
        if call.no_wait:
            return promises
        try:
            values = wait_for(gather(*promises))
        except BaseException:
            for promise in promises:
                promise.cancel()
            raise
        return values if any(value is not None for value in values) else None

    last_used: Callable[[], TaskTarget | None] = staticmethod(lambda: None)

    def _pools(self) -> dict[str, TaskTarget]:
        """Return the open pools and drones by the names of their variables."""
        assert self.shell is not None
        return {
            name: each
            for name, each in self.shell.user_ns.items()
            if isinstance(each, TaskTarget)
            and each._dispatcher.refusal is None
            and not re.match(r"_\d*$|__", name)
        }


class _MagicArguments:
    """The arguments of a magic: options, and for a line magic the code after them."""

    def __init__(self, line: str, cell: str | None) -> None:
        given: dict[str | None, str] = {}
        rest = line
        while found := _ARGUMENT.match(rest):
            option = found.lastgroup
            if option == "word":
                if cell is None or "pool" in given:
                    break
                option = "pool"
            given[option] = found[found.lastgroup or 0]
            if not given[option]:
                _fail(f"--{option} needs a value")
            rest = rest[found.end() :]
        if cell is not None and rest.strip():
            _fail(
                f"unknown argument: {rest.strip()!r}; options are --drone NAME, --timeout SECONDS "
                "and --async"
            )
        self.code = rest.strip() if cell is None else cell
        if not self.code.strip():
            _fail("there is no code to run")
        if self.code.lstrip().startswith(("!", "%")):
            _fail(
                f"{self.code.split()[0]!r} is a command of IPython, and a drone runs Python: use "
                "subprocess.run(...), or leave the magic out"
            )
        self.pool, self.drone = given.get("pool"), given.get("drone")
        self.no_wait = "flag" in given
        try:
            self.timeout = float(given["timeout"]) if "timeout" in given else None
        except ValueError:
            _fail(f"--timeout takes seconds, not {given['timeout']!r}")

    def target(self, targets: dict[str, TaskTarget], magics: PolycephalyMagics) -> TaskTarget:
        """Return the pool or drone that runs the code."""
        chosen = self._choose(targets, magics.last_used())
        magics.last_used = weakref.ref(chosen)  # weak, so that an unused pool can end
        if self.drone:
            drones = {each.name: each for each in getattr(chosen, "drones", ())}
            found = drones.get(self.drone)
            if found is None:
                _fail(f"no drone {self.drone!r}: there are {', '.join(drones) or 'none'}")
            chosen = found
        return chosen if self.timeout is None else chosen.options(timeout=self.timeout)

    def _choose(self, targets: dict[str, TaskTarget], last_used: TaskTarget | None) -> TaskTarget:
        if not targets:
            _fail("there is no pool: make one, as in pool = polycephaly.Pool(2)")
        if self.pool is None:
            if last_used is not None and last_used in targets.values():
                return last_used
            candidates = [*targets.values()]
            pools = [each for each in candidates if isinstance(each, ExecutorBase)]
            return pools[-1] if pools else candidates[-1]
        by_name = {name_of(each): each for each in targets.values()} | targets
        if self.pool not in by_name:
            names = ", ".join(f"{name} ({name_of(each)})" for name, each in targets.items())
            _fail(f"no pool {self.pool!r}: there are {names}")
        return by_name[self.pool]


def name_of(target: TaskTarget) -> str:
    dispatcher: Any = target._dispatcher
    return str(getattr(dispatcher, "config", dispatcher).name)


def _fail(message: str) -> NoReturn:
    raise UsageError(message)
