"""Groups of green threads, none of which outlives the block that started them.

If a member fails, the others and the block are cancelled. When all have ended, the block raises an
`ExceptionGroup`.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar, overload

from .scheduler import scheduler
from .spawning import start
from .thread import Cancelled, GreenThread, Wake, outside_error

T = TypeVar("T")

_NO_WAKE = Wake()
_NO_WAKE.thread = None


class Group:
    """A block that ends when all the green threads spawned in it have ended.

    Use ``async with green.Group() as g:`` and ``g.spawn(fn, *args)``. The first error cancels the
    other members and the block. All errors are raised together in an `ExceptionGroup`. A plain
    function that is in foreign code cannot be cancelled, so the block waits for it.

    Examples
    --------
    >>> from polycephaly import green
    >>> async def main():
    ...     async with green.Group() as group:
    ...         squares = [group.spawn(pow, i, 2) for i in range(3)]
    ...     return [promise.value for promise in squares]
    >>> green.run(main)
    [0, 1, 4]
    """

    __slots__ = (
        "_cancel_count", "_errors", "_interruption", "_is_over", "_wake", "children",
        "is_cancelling", "owner",
    )  # fmt: skip

    def __init__(self) -> None:
        self.children: set[GreenThread[Any]] = set()
        self._errors: list[BaseException] = []
        self.owner: GreenThread[Any] | None = None
        self._wake: Wake | None = None
        self.is_cancelling = self._is_over = False
        self._interruption: Cancelled | None = None

    @overload
    def spawn(
        self, fn: Coroutine[Any, Any, T], /, *, name: str | None = None, bound: bool = False
    ) -> GreenThread[T]: ...
    @overload
    def spawn(
        self,
        fn: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        name: str | None = None,
        bound: bool = False,
    ) -> GreenThread[T]: ...
    @overload
    def spawn(
        self, fn: Callable[..., T], /, *args: Any, name: str | None = None, bound: bool = False
    ) -> GreenThread[T]: ...

    def spawn(
        self, fn: Any, /, *args: Any, name: str | None = None, bound: bool = False
    ) -> GreenThread[Any]:
        """Start a green thread as a member of this group, as `green.spawn` does.

        Parameters
        ----------
        fn, *args, name, bound
            As for `green.spawn`.

        Returns
        -------
        GreenThread
            The promise of the value.

        Raises
        ------
        RuntimeError
            Outside of the group's block.
        """
        if self.owner is None or self._is_over:
            raise RuntimeError("a group takes green threads only inside its `async with` block")
        child = start(fn, args, self, name, bound)
        if self.is_cancelling:
            child.cancel()
        return child

    def cancel(self) -> None:
        """Cancel all members and the block, which then ends without an error. Any thread may call
        this.
        """
        owner = self.owner
        if self.is_cancelling or owner is None or self._is_over:
            return
        self._cancel_children()
        # Store the interruption before the look at `_wake`: if another thread calls this, the block
        # may end in between. `__aexit__` sets `_wake` and then looks at the interruption. So either
        # this code sees that the block has ended, or `__aexit__` calls the interruption off.
        self._interruption = interruption = Cancelled(
            "the group of this green thread was cancelled"
        )
        if self._wake is None:
            owner.interrupt(interruption)

    # Removes a member that has ended. Called by the scheduler's owner thread.
    def on_child_end(self, child: GreenThread[Any], error: BaseException | None) -> None:
        self.children.discard(child)
        if error is not None:
            self._errors.append(error)
            self.cancel()
        if not self.children and self._wake is not None:
            self._wake.now()

    async def __aenter__(self) -> Group:
        if self.owner is not None or self._is_over:
            raise RuntimeError("a group can be used for one block only: make another group")
        if get_ident() != scheduler.owner:
            raise outside_error("green.Group")
        self.owner = owner = scheduler.current
        self._cancel_count = owner.cancel_count
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, at: object) -> bool:
        self._wake = _NO_WAKE  # from here on, `cancel` reaches only the members
        if self._interruption is not None and error is not self._interruption:
            self._interruption.withdrawn = True  # must not hit the code after the block
        # If the thread itself was cancelled as well, the error counts as that: see `timeout`.
        is_own_cancel = (
            error is not None
            and error is self._interruption
            and scheduler.current.cancel_count == self._cancel_count
        )
        if error is not None and not is_own_cancel:
            # A GeneratorExit ends the asynchronous generator that the block is part of.
            if not isinstance(error, (Cancelled, GeneratorExit)) and not any(
                error is known for known in self._errors
            ):
                self._errors.append(error)
            if not self.is_cancelling:  # else this would break off the members' clean-up
                self._cancel_children()
        cancelled = error if isinstance(error, Cancelled) and not is_own_cancel else None
        late: list[Cancelled] = []
        while self.children:
            self._wake = Wake()
            try:
                await self._wake
            except Cancelled as another:
                if cancelled is None or another.is_cancel:
                    cancelled = another
                else:
                    late.append(another)
                if another.is_cancel or not self.is_cancelling:
                    self._cancel_children()
            except BaseException as another:
                self._errors.append(another)
                self._cancel_children()
            finally:
                self._wake = _NO_WAKE
        self._is_over = True
        while late:  # of time limits or groups around this one: raised at later awaits
            scheduler.current.interrupt(late.pop(0))
        try:
            if self._errors:
                if cancelled is not None:
                    scheduler.current.interrupt(cancelled)  # not lost: raised at the next await
                raise BaseExceptionGroup(
                    "errors in a group of green threads", self._errors
                ) from None
            if cancelled is not None:
                raise cancelled
            return is_own_cancel
        finally:
            # An error's traceback has the frame of the block, which may hold this object: no cycle.
            self._errors = []
            self.owner = self._interruption = None
            del error, cancelled

    def _cancel_children(self) -> None:
        self.is_cancelling = True
        for child in list(self.children):
            child.cancel()
