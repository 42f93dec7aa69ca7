"""The interfaces through which tasks, maps and pools use a `Dispatcher` and its reactor, or else a
`Connection` to a pool of another process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..promises.promise import Promise, Signal
from ..wire.functions import FunctionRegistry

if TYPE_CHECKING:
    from .config import TaskOptions

__all__ = ["EventLoop", "TaskOwner", "TaskRunner"]


class EventLoop(Protocol):
    """Any thread may call `post` and `drive`, only callbacks of the loop the others."""

    def post(self, callback: Callable[[], object], /) -> None: ...
    def call_later(self, seconds: float, callback: Callable[[], object], /) -> object: ...
    def deliver(self, callback: Callable[[], object], /) -> None: ...
    def drive(self, promise: Promise[Any], deadline: float | None, /) -> None: ...


class TaskOwner(Protocol):
    """The interface for tasks."""

    @property
    def reactor(self) -> EventLoop: ...
    @property
    def registry(self) -> FunctionRegistry: ...
    def post(self, callback: Callable[..., object], /, *args: Any) -> None: ...
    def submit_task(self, task: Any, /) -> None: ...
    def withdraw(self, task: Any, /) -> None: ...
    def on_inputs_ready(self, task: Any, /) -> None: ...
    def note_waiting_thread(self, task: Any, /) -> None: ...
    def explain(self, error: BaseException, /) -> None: ...


class TaskRunner(TaskOwner, Protocol):
    """The interface for pools and maps."""

    finishes_at_exit: bool
    task_options: TaskOptions
    ended: Signal[None]

    @property
    def refusal(self) -> BaseException | None: ...
    def check_open(self) -> None: ...
    def submit(
        self,
        work: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: Any = None,
        task_options: TaskOptions | None = None,
        task: Any = None,
    ) -> Promise[Any]: ...
