"""The pore I/O thread: one native thread for all pores that a process owns, while it owns any.

    a listener is readable ──> a holder connects ──> its hello ──> greeting, with the descriptor
    a holder is readable   ──> Inbox.chunks; waiting receivers are woken
    posted: `open`, `resume` (there is room again), `close` an inbox

A sender wakes a waiting receiver, and often has to yield the processor to it, so that each message
costs a process switch. So if data arrive less than `BATCH_DELAY_SECONDS` after the last, the thread
sleeps for that time first, wakes no receiver in that time, and then reads all data at once. A
single message is not delayed. A stream of messages takes a fifth to a quarter less time this way,
and half of the owner's processor time.

Only this thread uses the holders and the loop's lock, so receivers may be woken under it. A
finalizer may open or close a pore at any point of any thread's code. So all others `post`, and
never wait for the loop's lock or for `fork_guard.guard`. `add_inbox` and the thread's end exclude
each other by `_lock`: see docs/decisions/0008-pores.md.
"""

from __future__ import annotations

import os
import threading
from _thread import get_ident
from collections.abc import Callable
from functools import partial
from time import monotonic, sleep

from ...promises.event_loop import EventLoop
from ...runtime import parent_death
from .inbox import MAX_UNRECEIVED_BYTES, ConnectedHolder, Inbox, is_trusted_peer

BATCH_DELAY_SECONDS = 0.0002
"""See the module's docstring."""
RETRY_SECONDS = 0.1
"""Time between attempts to accept holders for which no descriptor was free."""

io_thread: PoreIOThread | None = None
_lock = threading.RLock()


def add_inbox(inbox: Inbox) -> None:
    """Serve this inbox from now on.

    Raises `OSError` or `RuntimeError` if the system has no descriptor or thread left.
    """
    global io_thread
    with _lock:
        thread = io_thread or PoreIOThread()
        thread.inboxes.add(inbox)
        if thread is not io_thread:
            thread.start()
            io_thread = thread
        inbox.io_thread = thread
        thread.post(partial(thread.watch_all, inbox))


def _forget() -> None:
    """In a forked child: no pore belongs to it. `parent_death` has closed the descriptors."""
    global io_thread, _lock
    io_thread, _lock = None, threading.RLock()


os.register_at_fork(after_in_child=_forget)


class PoreIOThread(EventLoop):
    def __init__(self) -> None:
        super().__init__("polycephaly-pores")
        self.inboxes: set[Inbox] = set()
        self.unwatched: set[Inbox] = set()
        self._last_poll = 0.0

    # -- any thread --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. A fork need not wait for it: nothing of it is used in the child."""
        try:
            self.thread.start()
        except BaseException:
            self.release_resources()
            raise

    def release_resources(self) -> None:
        self._files.close()

    def is_this_thread(self) -> bool:
        # `current_thread` would enter a thread that `threading` has not started, for ever.
        return self.thread.ident == get_ident()

    def resume(self, inbox: Inbox) -> None:
        self.post(partial(self._resume, inbox))

    def close(self, inbox: Inbox) -> None:
        self.post(partial(self._close, inbox))

    # -- the loop ----------------------------------------------------------------------------------

    def _poll(self, timeout: float) -> list[tuple[int, int]]:
        events = super()._poll(timeout)
        now = monotonic()
        if now - self._last_poll < BATCH_DELAY_SECONDS:
            sleep(BATCH_DELAY_SECONDS)
        self._last_poll = now
        return events

    def _end_if_over(self) -> bool:
        global io_thread
        if self.inboxes:
            return False
        with _lock:
            if self.inboxes:  # another thread has just added one
                return False
            if io_thread is self:
                io_thread = None
        self.release_resources()
        return True

    def _try_watch(self, fd: int, callback: Callable[[], object]) -> bool:
        """Watch a descriptor; return False if the system refuses."""
        if fd not in self._watched:
            try:
                self.watch(fd, callback)
            except OSError:
                return False
        return True

    def watch_all(self, inbox: Inbox) -> None:
        """Watch the listener, and the holders unless the inbox is paused.

        If the system refuses to watch more descriptors, try again soon.
        """
        watched = self._try_watch(inbox.listener.fileno(), partial(self._accept_holder, inbox))
        if not inbox.is_paused:
            for fd, holder in inbox.holders.items():
                watched &= self._try_watch(fd, partial(self._read_holder, holder))
        if not watched:
            self._retry_later(inbox)

    def _retry_later(self, inbox: Inbox) -> None:
        if not self.unwatched:
            self.call_later(RETRY_SECONDS, self._retry)
        self.unwatched.add(inbox)

    def _retry(self) -> None:
        inboxes, self.unwatched = self.unwatched, set()
        for inbox in inboxes:
            self.watch_all(inbox)

    def _resume(self, inbox: Inbox) -> None:
        if inbox.is_paused and not inbox.ended:
            inbox.is_paused = False
            self.watch_all(inbox)

    def _close(self, inbox: Inbox) -> None:
        for fd in (inbox.listener.fileno(), *inbox.holders):
            self.unwatch(fd)
        inbox.shut_down()
        self.inboxes.discard(inbox)
        self.unwatched.discard(inbox)

    # -- events ------------------------------------------------------------------------------------

    def _accept_holder(self, inbox: Inbox) -> None:
        try:
            connection, _ = inbox.listener.accept()
        except BlockingIOError:  # the client has disconnected again
            return
        except OSError:  # no descriptors are left: the client waits, the others are served
            self.unwatch(inbox.listener.fileno())
            self._retry_later(inbox)
            return
        connection.setblocking(False)
        if not is_trusted_peer(connection):
            connection.close()
            return
        holder = ConnectedHolder(inbox, connection)
        if self._try_watch(connection.fileno(), partial(self._read_holder, holder)):
            inbox.holders[connection.fileno()] = holder
        else:
            parent_death.close(holder.connection)

    def _read_holder(self, holder: ConnectedHolder) -> None:
        inbox = holder.inbox
        fd = holder.connection.fileno()
        try:
            stays = holder.handle_hello() if holder.name is None else holder.read()
        except OSError:
            stays = False
        if inbox.is_paused:
            self.unwatch(fd)
        if not stays:
            self.unwatch(fd)
            del inbox.holders[fd]
            parent_death.close(holder.connection)
        if inbox.waiters and inbox.chunks:
            inbox.wake_waiters()
        if inbox.bytes_read - inbox.bytes_split >= MAX_UNRECEIVED_BYTES and not inbox.is_paused:
            self._pause_reading(inbox)

    def _pause_reading(self, inbox: Inbox) -> None:
        for fd, holder in inbox.holders.items():
            if holder.name is not None:  # a holder that has just connected is still let in
                self.unwatch(fd)
        inbox.is_paused = True
        if inbox.bytes_read - inbox.bytes_split < MAX_UNRECEIVED_BYTES:
            self._resume(inbox)
