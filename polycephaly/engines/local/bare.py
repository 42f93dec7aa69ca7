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
import signal
import socket
import subprocess
import sys
from multiprocessing import reduction, resource_tracker, spawn
from multiprocessing.context import set_spawning_popen
from multiprocessing.popen_spawn_posix import Popen
from multiprocessing.process import current_process
from typing import TYPE_CHECKING, Any, NoReturn

from ...memory.arena import Arena
from ...runtime import fork_guard
from ...runtime.hidden import Hidden
from ...wire.main_names import MainSnapshot
from ...wire.main_snapshot import Snapshot
from .main_maker import MainMaker
from .native_libraries import LoadedLibraries
from .zygote import GROUP_SIGNALS, Variables

if TYPE_CHECKING:
    from .zygote import DroneSpec

_MAIN_MODULE_KEYS = ("init_main_from_name", "init_main_from_path")
"""The keys in which `multiprocessing` names the main module that a child imports."""


class _BareZygote:
    """Pickled for the fresh interpreter, in which `multiprocessing` calls `_bootstrap`."""

    def __init__(self, control: int, arena: Arena, spec: DroneSpec) -> None:
        self.descriptors = control, arena.fd
        self._ceiling = arena.ceiling
        self._spec = spec
        self._authkey = current_process().authkey
        self._owner = os.getpid()

    def _bootstrap(self, parent_sentinel: int) -> NoReturn:
        from .zygote import Zygote

        if self._spec.main is not None and self._spec.main.snapshot is not None:
            # Its drones will need it: imported once, for all of them.
            from ...wire import by_value  # noqa: F401

        current_process().authkey = self._authkey
        del self._authkey
        os.close(parent_sentinel)  # which is one of the three, where they were closed
        fork_guard.fill_standard_descriptors()
        for fd in self.descriptors:
            os.set_inheritable(fd, False)
        control, arena = self.descriptors
        end = socket.socket(fileno=control)
        shared = Arena(self._ceiling, arena)
        Zygote(end, self._spec, shared, MainSnapshot(()), self._owner, LoadedLibraries()).run()


class _PopenStandIn:
    """A stand-in for the `Popen` of `multiprocessing`, which registers here the descriptors of
    queues and locks that are pickled, so that the zygote inherits them.
    """

    DupFd = Popen.DupFd

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(fd)
        return fd


def start_bare_zygote(
    control: int, arena: Arena, spec: DroneSpec, snapshot: Snapshot | None, env: Variables
) -> int:
    """Start a bare zygote for `spec`, and return its pid.

    An interpreter reads some variables only when it starts (PYTHONHASHSEED, LD_PRELOAD), so it
    starts with `env`, the variables that all its drones have.

    Its drones get `snapshot`, or import the main module if `snapshot` is None. Raises the error of
    the pool's `initargs` if these cannot be pickled, and `RuntimeError` if this process is itself
    a spawned one that is still importing its main module.
    """
    _check_not_started_again()
    preparation_data = main_and_settings()
    # `multiprocessing` would keep it in a local of a frame below all tasks.
    del preparation_data["authkey"]
    module = {
        key: preparation_data.pop(key) for key in _MAIN_MODULE_KEYS if key in preparation_data
    }
    # The import path is the controller's, as in `multiprocessing`, which forgets PYTHONPATH.
    if "PYTHONPATH" in env.value and not sys.flags.ignore_environment:
        after_script = 0 if sys.flags.safe_path else 1
        added = env.value["PYTHONPATH"].split(os.pathsep)
        preparation_data["sys_path"][after_script:after_script] = filter(None, added)
    spawning, pickled = _PopenStandIn(), io.BytesIO()
    set_spawning_popen(spawning)  # type: ignore[arg-type]  # has the needed methods
    try:
        args = spec.inherited_args.value
        inherited_args = Hidden(None if args is None else _pickled(args))
        zygote = _BareZygote(
            control,
            arena,
            spec._replace(inherited_args=inherited_args, main=MainMaker(snapshot, module)),
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
        # Until the zygote ignores these signals, it must not be killed by them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
        try:
            zygote_process = subprocess.Popen(
                command, executable=spawn.get_executable(), pass_fds=inherited_fds,
                env={**os.environ, **env.value}, restore_signals=False,
            )  # fmt: skip
            zygote_process.returncode = 0  # the launcher reaps it, not this object
            return zygote_process.pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        os.close(pickle_fd)


def _check_not_started_again() -> None:
    """Raise `RuntimeError` in a frozen program that was started as a child of `multiprocessing`.

    Its `freeze_support()` would not have come here. Each child would start others, without end.
    """
    if getattr(sys, "frozen", False) and any(
        arg == "--multiprocessing-fork" or arg.startswith("from multiprocessing.")
        for arg in sys.argv[1:]
    ):
        raise RuntimeError(
            "this frozen program was started again, to be a process of a pool, and makes a pool "
            "itself: call multiprocessing.freeze_support() first under `if __name__ == "
            "'__main__':`, before the first pool"
        )


def main_and_settings() -> dict[str, Any]:
    """Return the data of this process and its main module that `multiprocessing` gives a child."""
    main = vars(sys.modules["__main__"])
    has_spec = "__spec__" in main  # not in CPython 3.11 under `python -m pdb`
    main.setdefault("__spec__", None)
    try:
        return spawn.get_preparation_data("polycephaly-zygote")
    finally:
        if not has_spec:
            del main["__spec__"]


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
