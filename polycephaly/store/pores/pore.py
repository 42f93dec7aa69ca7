"""`Pore`: memory, or an open file, with one owner; others use it without a copy, and tell him
things through it."""

from __future__ import annotations

import errno
import io
import math
import os
import secrets
import socket
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK, fcntl
from itertools import count
from mmap import MAP_SHARED
from operator import index
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from ...errors import PoreClosed
from ...runtime import parent_death
from ...runtime.deferred_sigint import DeferredSigint
from ...runtime.procfs import birth_of
from ...runtime.system_limits import shared_memory_ceiling
from ...wire import pickling as capturing
from ..arena import map_range
from .frames import HEAD, MOST, TOLD, WROTE, Message, message_of
from .holder import Content, Holder, Home, image_name, machine
from .inbox import Inbox
from .io_thread import io_thread

if TYPE_CHECKING:
    import numpy

__all__ = ["Pore"]

TURN = 127  # a bit mask: after so many messages that were there without a wait, other green threads have a turn

_numbers = count(1)


class Pore:
    """Shared memory that the image which makes it owns. Given to a drone, as an argument, in a
    result or captured by a function, it arrives as a pore on the same pages: what one writes, all
    see.

    ``Pore(nbytes)`` is plain memory, ``Pore(shape, dtype)`` a numpy array (`dtype` None: bytes). It
    is all zeros. ``Pore(file=file)`` is an open file instead, a socket or a device: whatever has a
    descriptor (`fileno()`), or the number of one. Whoever has it may `tell` its owner something, or
    `write`, which tells; the owner receives `Message` objects with ``for message in pore`` (in
    plain code), ``async for`` (in green threads and asyncio), `get` or `receive`.

    It is closed by its owner (`close`, the end of its ``with`` block, the loss of the owner's last
    reference) or by the owner's end, however that comes. (So a drone keeps a pore that it makes:
    one that its function only returns is closed when that has returned.) From then on each
    operation on it raises `PoreClosed`, and who waits in one is told at once; views of its memory
    stay what they are. The end of a holder changes nothing. Any thread may use it.

    Raises `ValueError` and `TypeError` for what cannot be its shape and type, or a file, and
    `MemoryError` for more than half of the machine's memory.

    >>> import polycephaly as poly
    >>> def fill(pore, row):
    ...     pore.array[row] = row
    ...     pore.tell(row)
    >>> with poly.Pool(2) as pool, poly.Pore((3, 4), "i8") as pore:
    ...     done = pool.map(fill, [pore] * 3, range(3))
    ...     rows = sorted(pore.get().value for _ in range(3))
    ...     rows, pore.array.sum(axis=1).tolist()
    ([0, 1, 2], [0, 4, 8])
    """

    def __init__(
        self,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        dtype: Any = None,
        *,
        file: Any = None,
        name: str | None = None,
    ) -> None:
        if (shape is None) == (file is None) or (dtype is not None and file is not None):
            raise TypeError(
                "a pore is either memory of a shape, or a file: Pore(shape, dtype) or Pore(file=file)"
            )
        sides, dtype, size = _checked(shape, dtype) if file is None else ((), None, 0)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"the name of a pore is a string, not {name!r}")
        address = f"polycephaly-pore-{secrets.token_hex(16)}"
        home = Home(
            pore=name or f"pore {next(_numbers)}",
            address=address,
            secret=secrets.token_bytes(16),
            owner=os.getpid(),
            owner_name=image_name(),
            birth=birth_of(os.getpid()),
            machine=machine(),
        )
        with (
            DeferredSigint(),
            ExitStack() as made,
        ):  # a Ctrl-C would leave descriptors that nobody knows, or a porter who does
            descriptor = parent_death.own(
                parent_death.Descriptor(_pages(size) if file is None else _another(file))
            )
            made.callback(parent_death.close, descriptor)
            content: Content = descriptor
            if file is None:
                content = memoryview(map_range(descriptor.fd, 0, size, MAP_SHARED))
            listener = parent_death.own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made.callback(parent_death.close, listener)
            listener.setblocking(False)
            listener.bind("\0" + address)
            listener.listen(socket.SOMAXCONN)
            inbox = Inbox(io_thread, home.secret, descriptor, listener)
            io_thread.take_over(inbox)
            made.pop_all()
            self._set(home, sides, dtype, size, content, inbox)

    def _set(
        self,
        home: Home,
        shape: tuple[int, ...],
        dtype: Any,
        size: int,
        content: Content | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self._home = home
        self._shape = shape
        self._dtype = dtype
        self._size = size
        self._content = content
        self._inbox = inbox  # in the image that made it; and, meaning nothing, in its children
        self._received = 0
        self._holder: Holder | None = None
        _here[home.address] = self

    # -- what it is --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._home.pore

    @property
    def owner(self) -> int:
        """The process that owns it."""
        return self._home.owner

    @property
    def nbytes(self) -> int:
        """Of its memory; 0 if it is a file."""
        return self._size

    @property
    def closed(self) -> bool:
        """Whether it is closed, or its owner has ended. In an image that has not used it yet, this
        is its first use."""
        try:
            self._reached()
        except PoreClosed:
            return True
        return False

    @property
    def memory(self) -> memoryview:
        """Its bytes, to be read and written: the same pages in every image. Raises `PoreClosed`."""
        return self._mapped()[: self._size]

    @property
    def array(self) -> numpy.ndarray[Any, Any]:
        """Its memory as a numpy array of its shape and type. Raises `PoreClosed`."""
        import numpy

        return numpy.frombuffer(self._mapped()[: self._size], dtype=self._dtype or "u1").reshape(
            self._shape
        )

    def fileno(self) -> int:
        """The descriptor of its file in this image: for ``os.pread``, ``socket.fromfd``, ``mmap``,
        ``os.dup``.

        It is the same open file everywhere, so all have one position in it, and one state of the
        socket. The number is the pore's: it is good until this image closes the pore or has lost
        its last reference, whatever a holder's owner does, and in this process only: a forked child
        asks again. What is to last longer is an ``os.dup`` of it. Raises `PoreClosed`, and
        ``io.UnsupportedOperation`` if it is memory."""
        while True:
            content = self._reached()
            if isinstance(content, memoryview):
                raise io.UnsupportedOperation(
                    f"the pore {self.name!r} is memory: it has no file descriptor"
                )
            if (fd := content.fd) >= 0:
                return fd
            # Another thread has just closed it: for all, which is told now, or for this image,
            # which reaches it again.

    # -- from any image ----------------------------------------------------------------------------

    def tell(self, message: Any, *, wait: bool = True) -> bool:
        """Sends the owner something small (32,000 bytes, pickled as an argument of a drone's call
        is). Raises `PoreClosed`, and what its pickling raises.

        Where the owner does not keep up, it waits for room; with ``wait=False`` it gives False
        then, and has sent nothing. Inside a coroutine of a green thread it cannot wait: use ``await
        green.call(pore.tell, message)``. True means that it is on its way: it is received unless
        the owner ends before."""
        pickled = capturing.capture(message, capturing.common())
        if len(pickled) > MOST:
            raise ValueError(
                f"a message of {len(pickled):,} bytes was told to the pore {self.name!r}, which takes {MOST:,}: "
                "write what is large into its memory"
            )
        return self._send(HEAD.pack(TOLD, len(pickled), 0) + pickled, wait, "tell")

    def write(self, offset: int, data: Any, *, wait: bool = True) -> bool:
        """Writes bytes (any buffer) into its memory from byte `offset` on, and tells the owner
        where; as `tell`.

        With ``wait=False`` and no room it is written, and not told. Raises `ValueError` for what is
        not inside of it."""
        content = memoryview(data).cast("B") if not isinstance(data, bytes) else data
        size = len(content)
        memory = self._mapped(look=False)  # if it is closed, the telling says so
        if not 0 <= offset <= self._size - size:
            raise ValueError(
                f"{size:,} bytes at {offset:,} are not inside the pore {self.name!r} of {self._size:,}"
            )
        memory[offset : offset + size] = content
        return self._send(HEAD.pack(WROTE, size, offset), wait, "write")

    def _send(self, frame: bytes, wait: bool, what: str) -> bool:
        if not wait or not _in_step():
            return self._held().send(frame, wait)
        if self._held().send(frame, wait=False):
            return True
        raise RuntimeError(
            f"there is no room for what is told to the pore {self.name!r}, and waiting for it would stop every green "
            f"thread here: use `await green.call(pore.{what}, ...)`"
        )

    # -- from the owner ----------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> Message:
        """The next message, for plain code; waits for one, `timeout` seconds at most, then raises
        `TimeoutError`.

        Raises `PoreClosed` when it is closed and all that was told before has been received,
        `RuntimeError` where the caller is not the owner, and whatever the message's unpickling
        raises."""
        inbox = self._owned("get")
        end = None if timeout is None else monotonic() + timeout
        while (taken := inbox.take()) is None:
            self._may_come(inbox)
            if _in_step():
                raise RuntimeError(
                    "`pore.get()` would stop every green thread here: use `await pore.receive()`"
                )
            with inbox.news() as news:
                try:
                    news.result(None if end is None else max(0.0, end - monotonic()))
                except TimeoutError:
                    raise TimeoutError(
                        f"nothing was told to the pore {self.name!r} within {timeout} s"
                    ) from None
        return message_of(*taken)

    async def receive(self) -> Message:
        """The next message, for green threads and asyncio: as `get`."""
        inbox = self._owned("receive")
        self._received += 1
        if not self._received & TURN and _in_step():
            from ...green import sleep

            await sleep(0)  # here, and not with a message in hand: who is cancelled would lose it
        while (taken := inbox.take()) is None:
            self._may_come(inbox)
            with inbox.news() as news:
                await news
        return message_of(*taken)

    def __iter__(self) -> Iterator[Message]:
        """Messages, until it is closed: `get`."""
        while True:
            try:
                yield self.get()
            except PoreClosed:
                return

    def __aiter__(self) -> AsyncIterator[Message]:
        """Messages, until it is closed: `receive`."""
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.receive()
        except PoreClosed:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """By the owner: for all. What was told before can still be received. By a holder: for this
        image, until it is used again; while another thread of it tells or connects, it does
        nothing. Twice is no error."""
        self._let_go()
        if self._is_mine() and not self._size:
            assert self._inbox is not None
            self._inbox.wait_until_ended()  # or a socket's address, say, would still be in use

    def _let_go(self) -> None:
        if self._is_mine():
            assert self._inbox is not None
            self._inbox.close()
        if self._holder is not None and self._holder.pid == os.getpid():
            self._holder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if "_holder" in self.__dict__ and not finalizing():
            self._let_go()

    # -- how it is held ----------------------------------------------------------------------------

    def _is_mine(self) -> bool:
        return self._inbox is not None and self._inbox.pid == os.getpid()

    def _held(self) -> Holder:
        """The owner is a holder, too, where it tells itself something."""
        if self._is_mine():
            assert self._inbox is not None
            if self._inbox.closed:
                raise self._home.closed(ended=False)
        holder = self._holder
        if holder is None or holder.pid != os.getpid():
            content = self._content
            memory = content if isinstance(content, memoryview) else None
            fresh, before = (
                Holder(self._home, self._size, memory, was_let_in=content is not None),
                holder,
            )
            holder = self._holder
            if (
                holder is before
            ):  # no call since the look: of several threads, one brings the holder
                holder = self._holder = fresh
        assert holder is not None
        return holder

    def _reached(self, look: bool = True) -> Content:
        holder = self._held()
        if not self._is_mine():
            self._content = holder.content(look)
        assert self._content is not None
        return self._content

    def _mapped(self, look: bool = True) -> memoryview:
        content = self._reached(look)
        if not isinstance(content, memoryview):
            raise TypeError(
                f"the pore {self.name!r} is an open file: it has a `fileno()`, and no memory"
            )
        return content

    def _owned(self, what: str) -> Inbox:
        if not self._is_mine():
            raise RuntimeError(
                f"`{what}` is for the owner of the pore {self.name!r}, process {self.owner} ({self._home.owner_name}): "
                "others `tell` and `write`"
            )
        assert self._inbox is not None
        return self._inbox

    def _may_come(self, inbox: Inbox) -> None:
        if inbox.is_over():
            raise self._home.closed(ended=False)

    def __reduce__(self) -> tuple[Any, ...]:
        served = sys.modules.get("polycephaly.engines.remote.shared")
        if served is not None and served.here.connection is not None:
            raise TypeError(
                f"the pore {self.name!r} is for images of this machine: it does not go to a served pool"
            )
        return _arrive, (self._home, self._shape, self._dtype, self._size)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        of = "here" if self._is_mine() else f"of {self._home.owner_name}"
        state = (
            ", closed" if self._is_mine() and self._inbox is not None and self._inbox.closed else ""
        )
        return f"<Pore {self.name!r} {of}, {f'{self._size:,} bytes' if self._size else 'a file'}{state}>"


_here: weakref.WeakValueDictionary[str, Pore] = weakref.WeakValueDictionary()
"""Each pore is there once in an image, however often it arrives."""


def _arrive(home: Home, shape: tuple[int, ...], dtype: Any, size: int) -> Pore:
    pore = _here.get(home.address)
    if pore is None:
        pore = Pore.__new__(Pore)
        pore._set(home, shape, dtype, size)
    return pore


def _checked(shape: Any, dtype: Any) -> tuple[tuple[int, ...], Any, int]:
    given = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if not given or any(
        isinstance(side, bool) or not isinstance(side, SupportsIndex) for side in given
    ):
        raise TypeError(
            f"the shape of a pore is a number of items, or a tuple of such, not {shape!r}"
        )
    sides = tuple(map(index, given))
    each = 1
    if dtype is not None:
        import numpy

        dtype = numpy.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"a pore cannot hold {dtype}: objects of Python belong to one process")
        each = dtype.itemsize
    size = math.prod(sides) * each
    if size < 1 or min(sides) < 1:
        raise ValueError(f"a pore of the shape {shape!r} would hold nothing")
    if size > (most := shared_memory_ceiling()):
        raise MemoryError(
            f"a pore of {size:,} bytes is more than half of this machine's memory, which is {most:,}"
        )
    return sides, dtype, size


def _pages(size: int) -> int:
    """A descriptor of so many bytes of new memory, for ever of this size."""
    fd = os.memfd_create("polycephaly-pore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _another(file: Any) -> int:
    """Another descriptor of the same open file."""
    fileno = getattr(file, "fileno", None)
    fd = fileno() if callable(fileno) else file
    if not isinstance(fd, int) or isinstance(fd, bool):
        raise TypeError(
            f"file= is an open file, a socket or the number of a descriptor, not {file!r}"
        )
    try:
        return os.dup(fd)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno != errno.EBADF:
            raise
        raise ValueError(f"{file!r} is no open file: there is no descriptor {fd}") from None


def _in_step() -> bool:
    """Is the caller code of a green thread, between two awaits?"""
    scheduler: Any = sys.modules.get("polycephaly.green.scheduler")
    return scheduler is not None and bool(scheduler.scheduler.in_step())
