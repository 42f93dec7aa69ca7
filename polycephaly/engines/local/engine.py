"""Drones on this machine, forked by a zygote.

    snapshot ──> Launcher ── orders ──> zygote ── fork ──> drones
                    └── reports of the zygote: started, exited, failed, names ──> the supervisor

The zygote is a fork of this process or a bare interpreter, and keeps its snapshot. So a replacement
drone starts with the same data as the drone before. If the zygote itself is lost, its drones are
too, and the engine takes a new snapshot if drones are to be replaced. A launcher is kept until the
last drone of its snapshot is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from ...drone.child import call_as_imported, call_with_inherited_args, needs_inheritance
from ...memory.arena import Arena
from ...memory.blocks import Store
from ...pool.drone_handle import DroneHandle
from ...pool.engine import Engine
from ...runtime import parent_death
from ...runtime.hidden import Hidden
from ...runtime.system_limits import (
    check_descriptors,
    check_processes,
    name_limit,
    shared_memory_ceiling,
    usable_processors,
)
from ...runtime.tuning import tuning
from ...store.shared import Shared, share
from ...wire.addresses import channel_address, record_exit
from ...wire.debugging import can_be_asked, frames_address
from ...wire.functions import FunctionRegistry
from ...wire.message_socket import MessageSocket
from ...wire.output import OutputSource
from ...wire.private_directory import PrivateDirectory
from ...wire.ring import RingReader
from ...wire.status_page import make_memory_of_drone, map_memory
from .drone import drone_main
from .handle import LocalHandle
from .launcher import Launcher, shared_variables
from .native_libraries import ThreadLimit, make_limit, names_set_by_user, threads_to_share
from .zygote import DroneSpec, Order, Variables

if TYPE_CHECKING:
    from ...pool.dispatcher import Dispatcher
    from ...runtime.timers import Timer

log = logging.getLogger(__name__)

STACK_SECONDS = 0.5
"""Time for a zygote that hangs to write its stack."""


class ThisMachine:
    """The present machine as a place for drones; see `pool.machine.Machine`."""

    def default_size(self) -> int:
        return usable_processors()

    def check(self, size: int, running: int = 0) -> None:
        check_processes(size)
        check_descriptors(max(0, size - running))

    def open(self, dispatcher: Dispatcher) -> LocalEngine:
        return LocalEngine(dispatcher)


class LocalEngine(Engine):
    """The local engine of one pool. `pool.engine.Engine` says which thread calls which method."""

    name = "local"

    def __init__(self, dispatcher: Dispatcher) -> None:
        """Take the snapshot, in the calling thread. Raises `OSError` at a limit of the machine."""
        self._supervisor = dispatcher.supervisor
        self._dispatcher = dispatcher
        self._config = self._dispatcher.config
        self._reactor = self._dispatcher.reactor
        self._directory = self._reactor.source(PrivateDirectory)
        self._threads_to_share = threads_to_share()
        self.make_room(self._config.size)
        self._launchers: list[Launcher] = []  # in use, until they are reaped
        self._start_timer: Timer | None = None  # reports that the last launcher's zygote hangs
        try:
            self._arena = Arena(shared_memory_ceiling())
        except OSError as error:
            raise name_limit(error) from error
        with ExitStack() as undo:
            undo.callback(self._arena.end)
            self._tidy_scheduled = False
            self._store = Store(self._arena, 0)
            self._arena.request_cleanup = self._schedule_tidy
            initargs = self._config.initargs.value
            self._inherited_args = Hidden(initargs if needs_inheritance(initargs) else None)
            del initargs  # a drone inherits this frame
            self._launcher = self.snapshot()
            undo.callback(self._launcher.end)
            self._directory.open()
            self._create_registry(self._launcher)
            undo.pop_all()

    def _create_registry(self, launcher: Launcher) -> None:
        self._dispatcher.registry = FunctionRegistry(
            launcher.snapshot, self._store, self._config.width > 1, self._dispatcher.directory
        )

    def initializer(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        if self._inherited_args.value is not None:
            return call_with_inherited_args, (initializer,)
        if self._config.start == "spawn":
            return call_as_imported, (initializer, *initargs)
        return initializer, initargs

    def why_no_forks(self) -> str | None:
        return self._launcher.why_no_forks()

    def left_out(self, name: str) -> str | None:
        return self._launcher.left_out(name)

    def share(self, obj: Any) -> Shared[Any]:
        return share(obj, self._dispatcher.registry.snapshot, self._store)

    def frames_address(self, task: int) -> str | None:
        return frames_address(self._directory.path, task) if self._config.post_mortem else None

    def shared_memory(self) -> tuple[int | None, int | None]:
        used = 0
        with suppress(OSError):  # just closed
            used = 0 if self._arena.ended else self._arena.used()
        return used, self._arena.ceiling

    def _schedule_tidy(self) -> None:
        """Schedule `_tidy`, because a reader has returned memory of this process.

        Any thread may call this. The memory stays warm for `tuning.warm_seconds`.
        """
        if not self._tidy_scheduled:
            self._tidy_scheduled = True
            self._dispatcher.post(self._dispatcher.call_later, tuning.warm_seconds, self._tidy)

    def _tidy(self) -> None:
        self._tidy_scheduled = False
        if self._store.free_idle_memory():
            self._schedule_tidy()

    # -- starting ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._add_launcher(self._launcher)

    def _add_launcher(self, launcher: Launcher) -> None:
        self._launchers.append(launcher)
        self._watch(launcher.fileno(), self._read_reports, launcher)
        if launcher.pidfd is not None:
            self._watch(launcher.pidfd, self._on_zygote_ended, launcher)
        if not launcher.is_ready:
            self._start_timer = self._dispatcher.call_later(
                tuning.start_report_seconds, self._ask_for_stack, launcher
            )

    def _ask_for_stack(self, launcher: Launcher) -> None:
        if launcher in self._launchers and not launcher.is_ready:
            launcher.ask_for_stack()
            self._dispatcher.call_later(STACK_SECONDS, self._report_slow_start, launcher)

    def _report_slow_start(self, launcher: Launcher) -> None:
        if launcher in self._launchers and not launcher.is_ready:
            stack = "\n".join(launcher.start_stack())
            where = "; it is here, perhaps in a function given to os.register_at_fork:\n"
            text = (
                f"the zygote of {self._config.name} (process {launcher.pid}) is not ready after "
                f"{tuning.start_report_seconds:g} seconds{stack and where + stack}"
            )
            self._reactor.deliver(partial(warnings.warn, text, RuntimeWarning, 2))

    def _forget_start_timer(self) -> None:
        if self._start_timer is not None:
            self._reactor.timers.cancel(self._start_timer)
            self._start_timer = None

    def _watch(self, fd: int, callback: Callable[..., object], *args: Any) -> None:
        self._reactor.watch(fd, partial(self._dispatcher.run_guarded, callback, *args))

    def can_start(self) -> bool:
        return self._launcher in self._launchers and self._count_alive() < self._max_drones

    def make_room(self, size: int) -> None:
        # Twice: until a drone has ended, another has begun. Many may be retiring after a `resize`.
        self._max_drones = max(2 * size, self._count_alive() + size)

    def _count_alive(self) -> int:
        return sum(handle.alive for handle in self._dispatcher.handles)

    def start(self, number: int, name: str, index: int) -> LocalHandle | None:
        handle = LocalHandle(self._dispatcher, number, name, self._launcher)
        ends: list[int] = []
        try:
            for stream in ("stdout", "stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(writer)
                handle.add_stream(OutputSource(reader, name, stream))
            for line in (handle.work, handle.control):
                mine, theirs = MessageSocket.pair()
                ends.append(theirs.detach())
                line.socket = parent_death.close_in_child(MessageSocket(mine))
            ends.append(make_memory_of_drone())
            handle.status_page, ring = map_memory(ends[-1])
            handle.ring = RingReader(ring)
            env = self._dispatcher.environments[index]
            env, limit = self._limited(env, self._launcher.set_by_user)
            order = Order(handle.number, name, env, self._config.cwd, limit)
            for each in handle.streams:
                read = partial(self._dispatcher.run_guarded, self._read_stream, handle, each)
                self._reactor.watch_output(each.fileno(), read)
            handle.open()
            self._launcher.start(order, ends)
        except Exception as error:
            handle.close()
            if not isinstance(error, (BrokenPipeError, ConnectionResetError)):
                # Later: this is in the middle of the event that needs the drone.
                self._dispatcher.post(self._supervisor.on_start_error, name_limit(error))
            return None  # if the zygote is gone, `_read_reports` handles the loss
        finally:
            for fd in ends:
                os.close(fd)
        return handle

    def native_threads(self) -> int:
        given = self._config.native_threads
        if given is None and self._config.on_death == "end":  # a lone drone
            return 0
        return max(1, self._threads_to_share // self._dispatcher.size) if given is None else given

    def _limited(
        self, env: Variables, set_by_user: Collection[str]
    ) -> tuple[Variables, ThreadLimit]:
        """Return the variables of a drone that starts now, and the limit of its native libraries.

        `env` is what the user gives the drone.
        """
        at_most = self._config.native_threads is None
        limit = make_limit(self.native_threads(), at_most, set_by_user, env.value)
        return Hidden({**limit.environment(), **env.value}), limit

    def _read_stream(self, handle: LocalHandle, stream: OutputSource) -> None:
        handle.print_output()
        if not stream.open:
            self._reactor.unwatch(stream.fileno())
            handle.remove_stream(stream)

    def _read_reports(self, launcher: Launcher) -> None:
        reports = launcher.reports()
        if reports is None:
            self._on_zygote_gone(launcher)
            return
        for report in reports:
            if launcher is self._launcher and launcher.is_ready:
                self._forget_start_timer()
            names = report.get("names")
            if names is not None and launcher.learn_names(names) and launcher is self._launcher:
                self._create_registry(launcher)
            number = report.get("started") or report.get("exited") or report.get("failed")
            handles = self._handles_of(launcher)
            handle = next((each for each in handles if each.number == number), None)
            if handle is None:
                continue
            if "started" in report:
                self._supervisor.on_started(handle, report["pid"])
            elif "exited" in report:
                code = os.waitstatus_to_exitcode(report["status"])
                has_started = handle.pid is not None or self._dispatcher.begun.done()
                if launcher.imports_main and not has_started:
                    self._dispatcher.give_up_starting(_import_error(handle, code))
                self._supervisor.on_died(handle, code)
            else:
                error = OSError(report["errno"], os.strerror(report["errno"]))
                self._supervisor.on_not_started(handle, name_limit(error))

    def _handles_of(self, launcher: Launcher) -> list[LocalHandle]:
        return [
            each
            for each in self._dispatcher.handles
            if isinstance(each, LocalHandle) and each.launcher is launcher
        ]

    def reclaim(self, handle: DroneHandle) -> None:
        assert isinstance(handle, LocalHandle)
        if handle.launcher is not self._launcher and not self._handles_of(handle.launcher):
            self._retire_launcher(handle.launcher)  # the last drone of an old snapshot is gone

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self) -> Launcher:
        self._directory.check_user()
        spec = DroneSpec(
            drone_main,
            self._directory.path,
            parent_death.new_family(),
            self._config.name,
            self._inherited_args,
            limits_libraries=self.native_threads() > 0,
            post_mortem=self._config.post_mortem,
            debugger_patience=None if can_be_asked() else self._config.report_waiting or inf,
        )
        try:
            start, name, set_by_user = self._config.start, self._config.name, names_set_by_user()
            envs = [self._limited(env, set_by_user)[0] for env in self._dispatcher.environments]
            env = shared_variables(envs)
            return Launcher(start, spec, self._store, name, env, set_by_user)
        except OSError as error:
            raise name_limit(error) from error

    def adopt(self, snapshot: Launcher) -> None:
        previous, self._launcher = self._launcher, snapshot
        if not self._handles_of(previous):  # its drones were never started
            self._retire_launcher(previous)
        self._add_launcher(snapshot)
        self._create_registry(snapshot)

    def discard(self, snapshot: Launcher) -> None:
        snapshot.end()

    def _replace_zygote(self) -> None:
        """Replace a lost zygote by one with a new snapshot of this process.

        Runs in the reactor's thread, without the reactor's lock.
        """
        try:
            launcher = self.snapshot()
        except Exception as error:
            self._dispatcher.post(self._dispatcher.give_up_starting, name_limit(error))
        else:
            self._dispatcher.post(self._use_or_discard, launcher)

    def _use_or_discard(self, launcher: Launcher) -> None:
        if not self._supervisor.replace_all(launcher):  # the pool needs no more drones
            launcher.end()

    # -- zygotes' ends -----------------------------------------------------------------------------

    def _on_zygote_ended(self, launcher: Launcher) -> None:
        """Handle the end of a zygote whose end of the socket another process may still have: a
        child that a thread of the user forked while the zygote was made.
        """
        self._read_reports(launcher)
        if launcher in self._launchers:
            self._on_zygote_gone(launcher)

    def _on_zygote_gone(self, launcher: Launcher) -> None:
        self._reactor.unwatch(launcher.fileno())
        launcher.close()
        is_current = launcher is self._launcher
        orphaned = self._handles_of(launcher)
        for handle in orphaned:
            # The kernel has killed the drone, but not the programs that the drone had started.
            if handle.pid is not None:
                address = channel_address(self._directory.path, handle.pid)
                record_exit(address, -signal.SIGKILL)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(handle.pid, signal.SIGKILL)
        if orphaned:
            parent_death.end_family(launcher.family, launcher.pid)
        code = self._reap(launcher)
        has_begun = self._dispatcher.begun.done()
        if not has_begun:
            self._dispatcher.give_up_starting(
                self._dispatcher.refusal  # it was released meanwhile
                or RuntimeError(f"the zygote ended (exit code {code}) before it was ready")
            )
        for handle in orphaned:
            self._supervisor.on_died(handle, -signal.SIGKILL)
        may_replace = has_begun and is_current and self._config.on_death == "replace"
        if may_replace and self._dispatcher.state.population.wanted():
            log.warning(
                "the zygote of %s was lost (exit code %s): taking a new snapshot",
                self._config.name,
                code,
            )
            self._reactor.run_outside_lock(self._replace_zygote)

    def _retire_launcher(self, launcher: Launcher) -> None:
        """Let a zygote end that is no longer needed, and reap it then."""
        launcher.snapshot.forget_values()
        if launcher not in self._launchers:  # it has ended by itself
            return
        self._reactor.unwatch(launcher.fileno())
        launcher.close()
        if launcher.pidfd is None:
            self._reap(launcher)
        else:
            self._reactor.unwatch(launcher.pidfd)
            self._watch(launcher.pidfd, self._reap, launcher)

    def _reap(self, launcher: Launcher) -> int | None:
        if launcher.pidfd is not None:
            self._reactor.unwatch(launcher.pidfd)
        self._launchers.remove(launcher)
        return launcher.reap()

    def give_up_starts(self) -> None:
        for launcher in self._launchers:
            if not launcher.is_ready:  # it may hang, and then no drone of it would ever be reported
                launcher.signal_zygote(signal.SIGKILL)

    def end_at_once(self) -> None:
        for launcher in self._launchers[:]:
            launcher.signal_zygote(signal.SIGKILL)
            self._on_zygote_gone(launcher)

    def end(self) -> None:
        if self._launcher not in self._launchers:  # it was not used, or has ended by itself
            self._launcher.end()
        self._forget_start_timer()
        for launcher in self._launchers:
            self._reactor.unwatch(launcher.fileno())
            if launcher.pidfd is not None:
                self._reactor.unwatch(launcher.pidfd)
        # If this process is killed, a zygote removes its directory: the last ones end after that.
        self._reactor.last_callbacks += [launcher.end for launcher in self._launchers]
        self._launchers.clear()
        self._arena.end()


def _import_error(handle: DroneHandle, code: int) -> RuntimeError:
    handle.print_output()
    last_lines = "\n".join(handle.stderr)
    return RuntimeError(
        f"a spawned drone ended (exit code {code}) while importing the main module. A script that "
        "starts drones with start='spawn' must be importable: put its statements under "
        f"`if __name__ == '__main__':`. Last lines of the drone's stderr:\n{last_lines}"
    )
