"""`Pore`: memory, or an open file, with one owner, which other processes use without a copy."""

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
from itertools import count
from mmap import MAP_SHARED
from operator import index
from typing import TYPE_CHECKING, Any, Self, SupportsIndex

from ...errors import PoreClosed
from ...memory.arena import make_memory, map_range
from ...promises import promise
from ...runtime import parent_death
from ...runtime.checks import check_seconds
from ...runtime.clock import monotonic
from ...runtime.deferred_sigint import DeferredSigint
from ...runtime.procfs import start_time_of
from ...runtime.system_limits import shared_memory_ceiling
from ...wire import main_names, pickling
from .frames import HEAD, MAX_MESSAGE_BYTES, TOLD, WROTE, Message, message_of
from .holder import Content, Holder, PoreIdentity, process_name
from .inbox import Inbox
from .io_thread import add_inbox

if TYPE_CHECKING:
    import numpy

# Bit mask: every 128th `receive` lets other green threads run first.
YIELD_MASK = 127

_numbers = count(1)


class Pore:
    """Shared memory, or an open file, owned by the process that makes the pore.

    Passed to a drone, as an argument, in a result or captured by a function, a pore arrives as a
    pore on the same pages: every process sees the writes of all others. ``Pore(nbytes)`` is plain
    memory and ``Pore(shape, dtype)`` a numpy array, filled with zeros. ``Pore(file=file)`` is an
    open file instead.

    Each process that has the pore may `tell` the owner something, or `write`, which also notifies
    the owner. The owner receives `Message` objects with ``for message in pore`` (in plain code),
    ``async for`` (in green threads and asyncio), `get` or `receive`.

    Parameters
    ----------
    shape : int or sequence of int, optional
        The number of items, or the shape of the array.
    dtype : optional
        The numpy type of the items; None for bytes.
    file : optional
        An object with a descriptor (`fileno()`), such as a socket or device, or a descriptor's
        number.
    name : str, optional
        A name for messages.

    Raises
    ------
    ValueError, TypeError
        If the shape and type, or the file, are not valid.
    MemoryError
        If the size is more than half of the machine's memory.

    Notes
    -----
    The owner closes the pore by `close`, by the end of its ``with`` block, by losing its last
    reference, or by ending in any way. So a drone has to keep a pore that it makes: a pore that a
    function only returns is closed when the function has returned. After that, each operation
    raises `PoreClosed`, and operations that wait do so at once. Views of the memory stay valid. The
    end of a holder changes nothing. Any thread may use a pore.

    Examples
    --------
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
                "a pore is either memory of a shape, or a file: use Pore(shape, dtype) or "
                "Pore(file=file)"
            )
        sides, dtype, size = _check_shape(shape, dtype) if file is None else ((), None, 0)
        if name is not None and not isinstance(name, str):
            raise TypeError(f"the name of a pore is a string, not {name!r}")
        address = f"polycephaly-pore-{secrets.token_hex(16)}"
        identity = PoreIdentity(
            pore=name or f"pore {next(_numbers)}",
            address=address,
            secret=secrets.token_bytes(16),
            owner=os.getpid(),
            owner_name=process_name(),
            owner_start_time=start_time_of(os.getpid()),
        )
        # A Ctrl-C would leak descriptors that no object holds, or that only the I/O thread holds.
        with DeferredSigint(), ExitStack() as made:
            fd = make_memory("polycephaly-pore", size) if file is None else _duplicate(file)
            descriptor = parent_death.close_in_child(parent_death.Descriptor(fd))
            made.callback(parent_death.close, descriptor)
            content: Content = descriptor
            if file is None:
                content = memoryview(map_range(descriptor.fd, 0, size, MAP_SHARED))
            listener = parent_death.close_in_child(
                socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            )
            made.callback(parent_death.close, listener)
            listener.setblocking(False)
            listener.bind("\0" + address)
            listener.listen(socket.SOMAXCONN)
            inbox = Inbox(identity.secret, descriptor, listener)
            add_inbox(inbox)
            made.pop_all()
            self._set(identity, sides, dtype, size, content, inbox)

    def _set(
        self,
        identity: PoreIdentity,
        shape: tuple[int, ...],
        dtype: Any,
        size: int,
        content: Content | None = None,
        inbox: Inbox | None = None,
    ) -> None:
        self._identity = identity
        self._shape = shape
        self._dtype = dtype
        self._size = size
        self._content = content
        self._received = 0
        self._renew(inbox)
        _pores[identity.address] = self

    def _renew(self, inbox: Inbox | None = None) -> None:
        """Begin anew in this process, which owns the pore if it has the inbox."""
        content = self._content
        memory = content if isinstance(content, memoryview) else None
        self._inbox = inbox
        # The owner has a holder too, for its own `tell`.
        self._holder = Holder(self._identity, self._size, memory, content is not None)

    # -- properties --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name given to the pore, or "pore" and a number."""
        return self._identity.pore

    @property
    def owner(self) -> int:
        """The number of the process that owns the pore."""
        return self._identity.owner

    @property
    def nbytes(self) -> int:
        """The size of the memory in bytes; 0 if the pore is a file."""
        return self._size

    @property
    def closed(self) -> bool:
        """True if the pore is closed, or its owner has ended.

        In a process that has not used the pore yet, this is its first use.
        """
        try:
            self._get_content()
        except PoreClosed:
            return True
        return False

    @property
    def memory(self) -> memoryview:
        """The pore's bytes, readable and writable, in the same pages in every process.

        Raises
        ------
        PoreClosed
            If the pore is closed.
        """
        return self._get_memory()[: self._size]

    @property
    def array(self) -> numpy.ndarray[Any, Any]:
        """The memory as a numpy array of the pore's shape and type.

        Raises
        ------
        PoreClosed
            If the pore is closed.
        """
        import numpy

        return numpy.frombuffer(self.memory, dtype=self._dtype or "u1").reshape(self._shape)

    def fileno(self) -> int:
        """Return the descriptor of the pore's file in this process.

        Returns
        -------
        int
            A descriptor for ``os.pread``, ``socket.fromfd``, ``mmap``, ``os.dup``.

        Raises
        ------
        PoreClosed
            If the pore is closed.
        io.UnsupportedOperation
            If the pore is memory.

        Notes
        -----
        The open file is the same in every process: all share one file position and one socket
        state. The descriptor belongs to the pore. It is valid until this process closes the pore or
        loses its last reference, whatever the owner does, and in this process only: a forked child
        must ask again. Use ``os.dup`` for a descriptor that lasts longer.
        """
        while True:
            content = self._get_content()
            if isinstance(content, memoryview):
                raise io.UnsupportedOperation(
                    f"the pore {self.name!r} is memory and has no file descriptor"
                )
            if (fd := content.fd) >= 0:
                return fd
            # Another thread has just closed the descriptor: for all processes, which is reported
            # now, or for this process, which connects again.

    # -- any process -------------------------------------------------------------------------------

    def tell(self, message: Any, *, wait: bool = True) -> bool:
        """Send a small message to the owner.

        Parameters
        ----------
        message
            At most 32,000 bytes, pickled like an argument of a drone's call.
        wait : bool, default True
            Whether to wait for room if the owner does not keep up.

        Returns
        -------
        bool
            True if the message was sent: it is received unless the owner ends before. False if
            there was no room, or another thread was sending, with ``wait=False``; then nothing was
            sent.

        Raises
        ------
        PoreClosed
            If the pore is closed.
        ValueError
            If the message is too large.
        RuntimeError
            If a green thread's coroutine would have to wait: use ``await green.call(pore.tell,
            message)``.
        Exception
            The errors of pickling the message.
        """
        pickled = pickling.capture(message, main_names.common_snapshot())
        if len(pickled) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {len(pickled):,} bytes is too large for the pore {self.name!r}, "
                f"which takes {MAX_MESSAGE_BYTES:,}: write large data into its memory"
            )
        return self._send(HEAD.pack(TOLD, len(pickled), 0) + pickled, wait, "tell")

    def write(self, offset: int, data: Any, *, wait: bool = True) -> bool:
        """Write bytes into the memory, and notify the owner of the place.

        Parameters
        ----------
        offset : int
            The first byte to write.
        data
            Any buffer: the bytes of an array are written in the order of its items.
        wait : bool, default True
            As for `tell`. With ``wait=False`` and no room the bytes are written, but the owner is
            not notified.

        Returns
        -------
        bool
            True if the owner was notified.

        Raises
        ------
        PoreClosed, RuntimeError
            As for `tell`.
        ValueError
            If the bytes would not be inside the memory.
        """
        view = memoryview(data)
        # Only such a view can be cast.
        content = view.cast("B") if view.c_contiguous and view.nbytes else view.tobytes()
        size = len(content)
        memory = self._get_memory(check=False)  # if the pore is closed, `_send` raises the error
        if not 0 <= offset <= self._size - size:
            raise ValueError(
                f"{size:,} bytes at {offset:,} are not inside the pore {self.name!r} "
                f"of {self._size:,} bytes"
            )
        memory[offset : offset + size] = content
        return self._send(HEAD.pack(WROTE, size, offset), wait, "write")

    def _send(self, frame: bytes, wait: bool, method: str) -> bool:
        if not wait or not _is_in_green_thread():
            return self._get_holder().send(frame, wait)
        if self._get_holder().send(frame, wait=False):
            return True
        raise RuntimeError(
            f"the pore {self.name!r} has no room for a message, and waiting for room would stop "
            f"every green thread of this process: use `await green.call(pore.{method}, ...)`"
        )

    # -- the owner ---------------------------------------------------------------------------------

    def get(self, timeout: float | None = None) -> Message:
        """Return the next message, for plain code.

        Parameters
        ----------
        timeout : float, optional
            Seconds to wait; None for no limit.

        Raises
        ------
        TimeoutError
            If no message arrives in time.
        PoreClosed
            If the pore is closed and all messages sent before have been received.
        RuntimeError
            If the caller is not the owner, or is a green thread's coroutine that would have to
            wait.
        Exception
            The errors of unpickling the message.
        """
        inbox = self._get_own_inbox("get")
        deadline = None if timeout is None else monotonic() + check_seconds("timeout", timeout)
        while (sent := inbox.take_frame()) is None:
            self._check_not_exhausted(inbox)
            if _is_in_green_thread():
                raise RuntimeError(
                    "`pore.get()` would stop every green thread of this process: use "
                    "`await pore.receive()`"
                )
            with inbox.message_signal() as signal:
                try:
                    signal.result(None if deadline is None else max(0.0, deadline - monotonic()))
                except TimeoutError:
                    raise TimeoutError(
                        f"no message arrived at the pore {self.name!r} within {timeout} s"
                    ) from None
        return message_of(*sent)

    async def receive(self) -> Message:
        """Return the next message, for green threads and asyncio; otherwise like `get`."""
        inbox = self._get_own_inbox("receive")
        self._received += 1
        if not self._received & YIELD_MASK and _is_in_green_thread():
            from ...green import sleep

            await sleep(0)  # before taking a message: a cancelled task would lose it
        while (sent := inbox.take_frame()) is None:
            self._check_not_exhausted(inbox)
            with inbox.message_signal() as signal:
                await signal
        return message_of(*sent)

    def __iter__(self) -> Iterator[Message]:
        """Yield messages until the pore is closed; see `get`."""
        while True:
            try:
                yield self.get()
            except PoreClosed:
                return

    def __aiter__(self) -> AsyncIterator[Message]:
        """Iterate over messages until the pore is closed; see `receive`."""
        return self

    async def __anext__(self) -> Message:
        try:
            return await self.receive()
        except PoreClosed:
            raise StopAsyncIteration from None

    def close(self) -> None:
        """Close the pore. A second call does nothing.

        Called by the owner, `close` is for all processes: messages sent before can still be
        received. Once it has returned, every operation of a process raises `PoreClosed`, and a
        file's descriptor is closed. Called by a holder, it is for this process only, until the pore
        is used again; while another thread of this process sends or connects, the call does
        nothing.
        """
        self._close()
        if self._inbox is not None:
            self._inbox.wait_until_ended()

    def _close(self) -> None:
        if self._inbox is not None:
            self._inbox.close()
        self._holder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if "_holder" in self.__dict__ and not finalizing():
            self._close()

    # -- connection to the owner -------------------------------------------------------------------

    def _get_holder(self) -> Holder:
        if self._inbox is not None and self._inbox.closed:
            raise self._identity.closed_error(ended=False)
        return self._holder

    def _get_content(self, check: bool = True) -> Content:
        holder = self._get_holder()
        if self._inbox is None:
            self._content = holder.content(check)
        assert self._content is not None
        return self._content

    def _get_memory(self, check: bool = True) -> memoryview:
        content = self._get_content(check)
        if not isinstance(content, memoryview):
            raise TypeError(
                f"the pore {self.name!r} is an open file and has no memory: use its `fileno()`"
            )
        return content

    def _get_own_inbox(self, method: str) -> Inbox:
        if self._inbox is None:
            raise RuntimeError(
                f"`{method}` is for the owner of the pore {self.name!r}, process {self.owner} "
                f"({self._identity.owner_name}): in other processes, use `tell` and `write`"
            )
        return self._inbox

    def _check_not_exhausted(self, inbox: Inbox) -> None:
        """Raise `PoreClosed` if no message is left and none will come."""
        if inbox.ended and not inbox.frames:
            raise self._identity.closed_error(ended=False)

    def __reduce__(self) -> tuple[Any, ...]:
        served = sys.modules.get("polycephaly.engines.remote.shared")
        if served is not None and served.pickling_call.connection is not None:
            raise TypeError(
                f"the pore {self.name!r} is for processes of this machine, and cannot be sent to "
                "a served pool"
            )
        return _rebuild, (self._identity, self._shape, self._dtype, self._size)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        inbox = self._inbox
        owner = f"of {self._identity.owner_name}" if inbox is None else "here"
        state = ", closed" if inbox is not None and inbox.closed else ""
        content = f"{self._size:,} bytes" if self._size else "a file"
        return f"<Pore {self.name!r} {owner}, {content}{state}>"


_pores: weakref.WeakValueDictionary[str, Pore] = weakref.WeakValueDictionary()
"""The pores of this process by address: a pore that arrives several times is one object."""


def _renew_in_child() -> None:
    """In a forked child: the pores are the parent's, and this process is not connected."""
    for pore in list(_pores.values()):
        pore._renew()


os.register_at_fork(after_in_child=_renew_in_child)


def _rebuild(identity: PoreIdentity, shape: tuple[int, ...], dtype: Any, size: int) -> Pore:
    pore = _pores.get(identity.address)
    if pore is None:
        pore = Pore.__new__(Pore)
        pore._set(identity, shape, dtype, size)
    return pore


def _check_shape(shape: Any, dtype: Any) -> tuple[tuple[int, ...], Any, int]:
    dimensions = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    if not dimensions or any(
        isinstance(side, bool) or not isinstance(side, SupportsIndex) for side in dimensions
    ):
        raise TypeError(
            f"the shape of a pore is a number of items, or a tuple of numbers, not {shape!r}"
        )
    sides = tuple(map(index, dimensions))
    item_bytes = 1
    if dtype is not None:
        import numpy

        dtype = numpy.dtype(dtype)
        if dtype.hasobject:
            raise TypeError(f"a pore cannot hold {dtype}: Python objects belong to one process")
        item_bytes = dtype.itemsize
    size = math.prod(sides) * item_bytes
    if size < 1 or min(sides) < 1:
        raise ValueError(f"a pore of the shape {shape!r} would hold nothing")
    if size > (limit := shared_memory_ceiling()):
        raise MemoryError(
            f"a pore of {size:,} bytes is larger than half of this machine's memory, "
            f"which is {limit:,} bytes"
        )
    return sides, dtype, size


def _duplicate(file: Any) -> int:
    """Return another descriptor of the same open file."""
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
        raise ValueError(f"{file!r} is no open file: descriptor {fd} does not exist") from None


def _is_in_green_thread() -> bool:
    """Return whether the caller is code of a green thread, between two awaits."""
    return promise.green_hooks is not None and promise.green_hooks[0]()
