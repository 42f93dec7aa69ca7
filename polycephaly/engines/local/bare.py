"""A bare zygote: a fresh interpreter that has imported this package and no code of the user.

    controller ── spawned as by `multiprocessing` ──> bare zygote ──fork──> drone: makes __main__

A bare zygote has one thread and has never run user code. So a fork is safe at any time, whatever
the controller process and the drones do with threads. Each drone makes its `__main__` after the
fork: from the controller's `__main__`, copied by value (wire/main_snapshot.py), or, with
``start="spawn"``, by importing the main module, as the standard library's spawned processes do.

`multiprocessing` starts an interpreter with the same flags, path and keys, and hands over its
queues and locks, but would import the main module in the zygote too. So this module repeats its
steps without that import.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from io import open_code
from multiprocessing import process, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from pkgutil import get_importer
from runpy import run_path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from ...memory.arena import Arena
from ...wire.main_snapshot import Snapshot, restore_snapshot
from ...wire.pickling import MainSnapshot
from ...wire.status_table import StatusTable

if TYPE_CHECKING:
    from .zygote import DroneSpec

__all__ = ["MainMaker", "start_bare_zygote"]

_MAIN_MODULE_KEYS = ("init_main_from_name", "init_main_from_path")
"""The keys in which `multiprocessing` names the main module that a child imports."""


@dataclass(frozen=True, slots=True)
class MainMaker:
    """The recipe by which a drone of a bare zygote makes its `__main__`."""

    snapshot: Snapshot | None  # None: import the main module
    module: dict[str, str]  # names the main module; empty if there is none, as under `python -c`

    def make(self, arena: Arena) -> MainSnapshot:
        """Make `__main__`, in a drone. Raises the errors of importing the main module."""
        _old_main.append(sys.modules["__main__"])  # kept alive, because its code still runs
        sys.modules["__main__"] = sys.modules["__mp_main__"] = ModuleType("__main__")
        if self.snapshot is not None:
            return restore_snapshot(self.snapshot, arena)
        current: Any = process.current_process()
        # With this flag `multiprocessing` refuses, with the reason, to start processes while the
        # script is being imported.
        current._inheriting = True
        try:
            _import_main(**self.module)
        finally:
            del current._inheriting
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
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
    if name.endswith("__main__") or os.path.basename(path).partition(".")[0] == "ipython":
        return  # the command line of a package: `multiprocessing` does not import that again either
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


class _BareZygote:
    """Pickled for the fresh interpreter, in which `multiprocessing` calls `_bootstrap`."""

    def __init__(self, control: int, status_table_fd: int, arena: Arena, spec: DroneSpec) -> None:
        self.descriptors = control, status_table_fd, arena.fd
        self._ceiling = arena.ceiling
        self._spec = spec
        self._owner = os.getpid()

    def _bootstrap(self, parent_sentinel: int) -> NoReturn:
        from .zygote import run_zygote

        os.close(parent_sentinel)
        for fd in self.descriptors:
            os.set_inheritable(fd, False)
        control, status_table_fd, arena = self.descriptors
        run_zygote(
            socket.socket(fileno=control),
            self._spec,
            StatusTable(self._spec.slots, status_table_fd),
            Arena(self._ceiling, arena),
            MainSnapshot(()),
            self._owner,
        )


class _PopenStandIn:
    """A stand-in for the `Popen` of `multiprocessing`, which registers here the descriptors of
    queues and locks that are pickled, so that the zygote inherits them.
    """

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(fd)
        return fd

    class DupFd:
        def __init__(self, fd: int) -> None:
            self.fd = fd

        def detach(self) -> int:
            return self.fd


def start_bare_zygote(
    control: int, status_table_fd: int, arena: Arena, spec: DroneSpec, snapshot: Snapshot | None
) -> int:
    """Start a bare zygote for `spec`, and return its pid.

    Its drones get `snapshot`, or import the main module if `snapshot` is None. Raises the error of
    the pool's `initargs` if these cannot be pickled, and `RuntimeError` if this process is itself
    a spawned one that is still importing its main module.
    """
    preparation_data = spawn.get_preparation_data("polycephaly-zygote")
    module = {
        key: preparation_data.pop(key) for key in _MAIN_MODULE_KEYS if key in preparation_data
    }
    spawning, pickled = _PopenStandIn(), io.BytesIO()
    set_spawning_popen(spawning)  # type: ignore[arg-type]  # has the needed methods
    try:
        inherited_args = None if spec.inherited_args is None else _pickled(spec.inherited_args)
        zygote = _BareZygote(
            control,
            status_table_fd,
            arena,
            replace(spec, inherited_args=inherited_args, main=MainMaker(snapshot, module)),
        )
        reduction.dump(preparation_data, pickled)
        reduction.dump(zygote, pickled)
    finally:
        set_spawning_popen(None)
    tracker: Any = resource_tracker.getfd()
    pickle_fd = os.memfd_create("polycephaly-zygote", os.MFD_CLOEXEC)
    try:
        with open(pickle_fd, "wb", closefd=False) as file:
            file.write(pickled.getbuffer())
        os.lseek(pickle_fd, 0, os.SEEK_SET)
        command = spawn.get_command_line(tracker_fd=tracker, pipe_handle=pickle_fd)
        inherited_fds = [pickle_fd, tracker, *zygote.descriptors, *spawning.descriptors]
        return util.spawnv_passfds(os.fsencode(spawn.get_executable()), command, inherited_fds)
    finally:
        os.close(pickle_fd)


def _pickled(inherited_args: Any) -> bytes:
    try:
        return bytes(reduction.ForkingPickler.dumps(inherited_args))
    except Exception as error:
        error.add_note(
            "the initargs cannot be pickled for drones that are fresh interpreters: make queues "
            "and locks with multiprocessing.get_context('spawn'), which serves forked drones too, "
            "or use start='fork'"
        )
        raise
