"""Drones on this machine, forked by a zygote: from a snapshot of this image, or from a bare
interpreter.

    snapshot ──> Launcher (the zygote) ── orders ──> drones
                    └── reports: started, exited, failed ──> the roster

The zygote keeps the snapshot, so a drone that replaces another is the same image. Should the zygote
itself be lost, a new snapshot is taken. A launcher is kept until the last drone of its snapshot is
gone."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ...drone.child import call_as_imported, goes_only_with_the_start, with_heirloom
from ...drone.main import hatch
from ...pool.drone_handle import DroneHandle
from ...pool.handlers import print_lines
from ...promises.promise import Promise
from ...runtime import parent_death
from ...runtime.system_limits import check_descriptors, named, shared_memory_ceiling
from ...runtime.tuning import tuning
from ...store.arena import Arena
from ...store.blocks import Store
from ...store.shared import Shared, share
from ...wire.addresses import channels_of, leave_word
from ...wire.fast_transport import FastTransport
from ...wire.functions import FunctionRegistry
from ...wire.output import OutputSource
from .handle import LocalHandle
from .launcher import Launcher
from .zygote import DroneSpec, Order

if TYPE_CHECKING:
    from ...pool.supervisor import Supervisor

__all__ = ["LocalEngine", "ThisMachine"]

log = logging.getLogger(__name__)


class ThisMachine:
    def usual(self) -> int:
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )

    def check(self, size: int) -> None:
        check_descriptors(size)

    def open(self, roster: Supervisor) -> LocalEngine:
        return LocalEngine(roster)


class LocalEngine:
    def __init__(self, roster: Supervisor) -> None:
        """Takes the snapshot, in the calling thread. Raises `OSError` where the machine's limits
        forbid it."""
        self._roster = roster
        self._crew = roster.crew
        self._plan = self._crew.plan
        self._hub = self._crew.hub
        self._zygote_lost = self._begun = False
        self._free_slots = list(range(2 * self._plan.size - 1, -1, -1))
        self._launchers: list[Launcher] = []
        try:
            self._arena = Arena(shared_memory_ceiling())
        except OSError as error:
            raise named(error) from error
        try:
            self._tidying = False
            self._store = Store(self._arena, 0)
            self._arena.ring = self._tidy_later
            self._heirloom = (
                self._plan.initargs if goes_only_with_the_start(self._plan.initargs) else None
            )
            self._launcher = self.snapshot()
            try:
                self._hub.open_endpoint()
                self._open_book(self._launcher)
            except BaseException:
                self._launcher.end()
                raise
        except BaseException:
            self._arena.end()
            raise

    def _open_book(self, launcher: Launcher) -> None:
        self._roster.book = FunctionRegistry(
            launcher.snapshot, self._store, self._plan.width > 1, self._crew.vault
        )

    def initializer(
        self, initializer: Callable[..., object], initargs: tuple[Any, ...]
    ) -> tuple[Any, tuple[Any, ...]]:
        if self._heirloom is not None:
            return with_heirloom, (initializer,)
        return (
            (call_as_imported, (initializer, *initargs))
            if self._plan.start == "spawn"
            else (initializer, initargs)
        )

    def fail(self, error: Exception) -> None:
        self._crew.fail(error)

    def left_out(self, name: str) -> str | None:
        return self._launcher.left_out(name)

    def share(self, obj: Any) -> Shared[Any]:
        return share(obj, self._roster.book.snapshot, self._store)

    def _tidy_later(self) -> None:
        """From any thread: memory of this image's has come back. It stays warm for a while."""
        if not self._tidying:
            self._tidying = True
            self._hub.post(lambda: self._hub.after(tuning.warm_seconds, self._tidy))

    def _tidy(self) -> None:
        self._tidying = False
        if self._store.tidy():
            self._tidy_later()

    # -- starting ----------------------------------------------------------------------------------

    def begin(self) -> None:
        self._begun = True
        self._take_on(self._launcher)

    def _take_on(self, launcher: Launcher) -> None:
        self._launchers.append(launcher)
        self._hub.watch(launcher.fileno(), partial(self._read_reports, launcher))

    def can_start(self) -> bool:
        return bool(self._free_slots) and not self._zygote_lost

    def start(self, number: int, name: str, index: int) -> LocalHandle | None:
        slot = self._free_slots.pop()
        link = LocalHandle(self._crew, number, slot, name, self._launcher)
        ends: list[int] = []
        try:
            for stream in ("stdout", "stderr"):
                reader, writer = os.pipe2(os.O_CLOEXEC)
                ends.append(writer)
                link.streams.append(OutputSource(reader, name, stream))
            mine, its = FastTransport.pair()
            ends.append(its.detach())
            link.lane = parent_death.own(FastTransport(mine))
            order = Order(
                link.number, slot, link.identity.hex(), name, self._plan.env[index], self._plan.cwd
            )
            self._launcher.start(order, ends)
        except Exception as error:
            link.close()
            self._free_slots.append(slot)
            if not isinstance(error, (BrokenPipeError, ConnectionResetError)):
                self._roster.cannot_start(named(error))
            return None  # or its zygote is gone: the end of its reports tells, and why
        finally:
            for fd in ends:
                os.close(fd)
        for each in link.streams:
            self._hub.watch(each.fileno(), partial(self._read_stream, link, each))
        self._hub.add_link(link)
        return link

    def _read_stream(self, link: LocalHandle, stream: OutputSource) -> None:
        print_lines(link)
        if not stream.open:
            self._hub.unwatch(stream.fileno())
            stream.close()
            if stream in link.streams:
                link.streams.remove(stream)

    def _read_reports(self, launcher: Launcher) -> None:
        reports = launcher.reports()
        if reports is None:
            self._zygote_gone(launcher)
            return
        for report in reports:
            if (
                "names" in report
                and launcher.learn_names(report["names"])
                and launcher is self._launcher
            ):
                self._open_book(launcher)
            link = self._link(
                launcher, report.get("started") or report.get("exited") or report.get("failed")
            )
            if link is None:
                continue
            if "started" in report:
                self._roster.started(link, report["pid"])
            elif "exited" in report:
                code = os.waitstatus_to_exitcode(report["status"])
                if launcher.imports_main and link.pid is None and not self._crew.begun.done():
                    self._crew.cannot_start(_import_trouble(link, code))
                self._roster.died(link, code)
            else:
                number = report["errno"]
                self._roster.not_started(link, named(OSError(number, os.strerror(number))))

    def _links(self, launcher: Launcher) -> list[LocalHandle]:
        return [
            each
            for each in self._roster.links
            if isinstance(each, LocalHandle) and each.launcher is launcher
        ]

    def _link(self, launcher: Launcher, number: int | None) -> LocalHandle | None:
        return next((each for each in self._links(launcher) if each.number == number), None)

    def released(self, link: DroneHandle) -> None:
        assert isinstance(link, LocalHandle)
        if link.slot not in self._free_slots:
            self._free_slots.append(link.slot)
        if link.launcher is not self._launcher and not self._links(link.launcher):
            self._dismiss(link.launcher)  # that was the last drone of an old snapshot

    # -- snapshots ---------------------------------------------------------------------------------

    def snapshot(self) -> Launcher:
        nest = DroneSpec(
            hatch,
            self._hub.endpoint.home,
            2 * self._plan.size,
            parent_death.new_family(),
            self._heirloom,
        )
        try:
            return Launcher(self._plan.start, nest, self._store, self._plan.name)
        except OSError as error:
            raise named(error) from error

    def adopt(self, snapshot: Launcher) -> None:
        self._launcher = snapshot
        self._zygote_lost = False
        self._take_on(snapshot)
        self._open_book(snapshot)

    def discard(self, snapshot: Launcher) -> None:
        snapshot.end()

    def _relaunch(self) -> None:
        """The zygote was lost: another, of the image as it is now. In the hub's thread, outside its
        turn."""
        try:
            launcher = self.snapshot()
        except OSError as error:
            self._hub.post(partial(self._crew.cannot_start, named(error)))
        else:
            self._hub.post(partial(self._use_or_discard, launcher))

    def _use_or_discard(self, launcher: Launcher) -> None:
        self._roster.renew(launcher, Promise())
        if launcher is not self._launcher:  # nobody wants drones any more
            launcher.end()

    # -- zygotes' ends -----------------------------------------------------------------------------

    def _zygote_gone(self, launcher: Launcher) -> None:
        self._hub.unwatch(launcher.fileno())
        launcher.close()
        self._zygote_lost = launcher is self._launcher
        orphaned = self._links(launcher)
        for link in orphaned:
            if (
                link.pid is not None
            ):  # the kernel has killed it with the zygote; not so what it had started
                leave_word(channels_of(self._hub.endpoint.home, link.pid), -signal.SIGKILL)
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(link.pid, signal.SIGKILL)
        if orphaned:
            parent_death.end_family(launcher.family, launcher.pid)
        if self._crew.begun.done():
            for link in orphaned:
                self._roster.died(
                    link, -signal.SIGKILL
                )  # the page tells what each was running: before it is closed
        code = self._reap(launcher)
        if not self._crew.begun.done():
            self._crew.cannot_start(
                RuntimeError(f"the zygote ended (exit code {code}) before it was ready")
            )
            for link in orphaned:
                self._roster.died(link, -signal.SIGKILL)
        elif self._zygote_lost and self._plan.on_death == "replace" and self._crew.wanted():
            log.warning(
                "the zygote of %s was lost (exit code %s): taking a new snapshot",
                self._plan.name,
                code,
            )
            self._hub.run_errand(self._relaunch)
        self._crew.look_for_end = True

    def _dismiss(self, launcher: Launcher) -> None:
        """Its zygote is not needed any more: lets it end, and reaps it then."""
        self._hub.unwatch(launcher.fileno())
        launcher.close()
        if launcher.pidfd is None:
            self._reap(launcher)
        elif launcher in self._launchers:
            self._hub.watch(launcher.pidfd, partial(self._reap, launcher))

    def _reap(self, launcher: Launcher) -> int | None:
        if launcher.pidfd is not None:
            self._hub.unwatch(launcher.pidfd)
        self._launchers.remove(launcher)
        return launcher.reap()

    def end(self) -> None:
        if not self._begun:
            self._launcher.end()
        for launcher in self._launchers:
            self._hub.unwatch(launcher.fileno())
            if launcher.pidfd is not None:
                self._hub.unwatch(launcher.pidfd)
        self._hub.last_zygotes += self._launchers
        self._launchers.clear()
        self._arena.end()


def _import_trouble(link: DroneHandle, code: int) -> RuntimeError:
    print_lines(link)
    told = "\n".join(link.stderr)
    return RuntimeError(
        f"a spawned drone ended (exit code {code}) while it imported the main module. A script that starts drones with "
        "start='spawn' must be importable: keep what it does under `if __name__ == '__main__':`. Its last lines on "
        f"stderr:\n{told}"
    )
