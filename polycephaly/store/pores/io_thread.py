"""The pore I/O thread: one native thread for all pores that a process owns, while it owns any.

    a listener is readable ──> a holder connects ──> its hello ──> greeting, with the descriptor
    a holder is readable   ──> Inbox.chunks; waiting receivers are woken
    the eventfd            ──> requests: "open", "resume" (there is room again), "close" an inbox

A sender wakes a waiting receiver, and often has to yield the processor to it, so that each message
costs a process switch. So if data arrive less than `BATCH_DELAY_SECONDS` after the last, the thread
sleeps for that time first, wakes no receiver in that time, and then reads all data at once. A
single message is not delayed. A stream of messages takes a fifth to a quarter less time this way,
and half of the owner's processor time.

Only this thread uses the epoll object and the holders, so they need no lock. Other threads call
`request`, which appends a request and writes to the eventfd. The thread ends when it has no inbox
and no request; `request`, start and end exclude each other by a lock. A finalizer may close an
inbox in a thread that holds this lock. The lock is reentrant, and the finalizer finds the I/O
thread running, because the thread runs for as long as any inbox is open.
"""

from __future__ import annotations

import os
import select
import threading
from _thread import get_ident
from collections import deque
from time import monotonic, sleep

from ...runtime import parent_death
from ...runtime.fork_guard import OwnThread
from .inbox import MAX_UNRECEIVED_BYTES, ConnectedHolder, Inbox, is_trusted_peer

BATCH_DELAY_SECONDS = 0.0002
"""See the module's docstring."""
RETRY_SECONDS = 0.1
"""Time between attempts to accept holders for which no descriptor was free."""


class PoreIOThread:
    def __init__(self) -> None:
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Reset in a forked child, to which no pore belongs.

        `parent_death` has closed the inherited descriptors.
        """
        self._lock = threading.RLock()
        self._thread: OwnThread | None = None
        self._requests: deque[tuple[str, Inbox]] = deque()
        self._inboxes: set[Inbox] = set()
        self._unwatched: set[Inbox] = set()
        self._wakeup = parent_death.Descriptor(-1)

    def add_inbox(self, inbox: Inbox) -> None:
        """Serve this inbox from now on. Raises `OSError` if the system has no descriptor left."""
        with self._lock:
            if self._thread is None:
                self._start_thread()
            self.request("open", inbox)

    def _start_thread(self) -> None:
        self._files: dict[int, Inbox | ConnectedHolder] = {}
        self._poll = parent_death.close_in_child(select.epoll())
        try:
            self._wakeup = parent_death.close_in_child(
                parent_death.Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            )
            self._poll.register(self._wakeup.fd, select.EPOLLIN)
            thread = OwnThread("polycephaly-pores", self._serve)
            thread.start()
        except BaseException:
            self._stop_thread()
            raise
        self._thread = thread

    def _stop_thread(self) -> None:
        self._thread = None
        parent_death.close(self._poll)
        parent_death.close(self._wakeup)

    def request(self, kind: str, inbox: Inbox) -> None:
        """Queue a request for the I/O thread.

        If no such thread runs, the inbox is closed already, and nothing is left to do.
        """
        # Otherwise the thread might take the request, end, and close the eventfd before the write.
        with self._lock:
            if self._thread is not None:
                self._requests.append((kind, inbox))
                os.eventfd_write(self._wakeup.fd, 1)

    def is_this_thread(self) -> bool:
        # `current_thread` would enter a thread that `threading` has not started, for ever.
        thread = self._thread
        return thread is not None and thread.ident == get_ident()

    def _serve(self) -> None:
        last = 0.0
        while True:
            events = self._poll.poll(RETRY_SECONDS if self._unwatched else None)
            now = monotonic()
            if now - last < BATCH_DELAY_SECONDS:
                sleep(BATCH_DELAY_SECONDS)
            last = now
            for inbox in list(self._unwatched):
                self._watch_all(inbox)
            for fd, _ in events:
                file = self._files.get(fd)
                if isinstance(file, Inbox):
                    self._accept_holder(file)
                elif file is not None:
                    self._read_holder(file)
                elif fd == self._wakeup.fd:
                    os.eventfd_read(fd)
            while self._requests:
                kind, inbox = self._requests.popleft()
                getattr(self, f"_{kind}")(inbox)
            if not self._inboxes:
                with self._lock:
                    if not self._requests:
                        self._stop_thread()
                        return

    def _watch(self, fd: int, file: Inbox | ConnectedHolder) -> bool:
        """Watch a descriptor; return False if the system refuses."""
        if fd not in self._files:
            try:
                self._poll.register(fd, select.EPOLLIN)
            except OSError:
                return False
            self._files[fd] = file
        return True

    def _unwatch(self, fd: int) -> None:
        if self._files.pop(fd, None) is not None:
            self._poll.unregister(fd)

    # -- requests: `_open`, `_resume`, `_close` ----------------------------------------------------

    def _open(self, inbox: Inbox) -> None:
        self._inboxes.add(inbox)
        self._watch_all(inbox)

    def _resume(self, inbox: Inbox) -> None:
        if inbox.is_paused and not inbox.ended:
            inbox.is_paused = False
            self._watch_all(inbox)

    def _watch_all(self, inbox: Inbox) -> None:
        """Watch the listener, and the holders unless the inbox is paused.

        If the system refuses to watch more descriptors, try again soon.
        """
        files: list[tuple[int, Inbox | ConnectedHolder]] = [(inbox.listener.fileno(), inbox)]
        if not inbox.is_paused:
            files += inbox.holders.items()
        if all(self._watch(fd, file) for fd, file in files):
            self._unwatched.discard(inbox)
        else:
            self._unwatched.add(inbox)

    def _close(self, inbox: Inbox) -> None:
        for fd in (inbox.listener.fileno(), *inbox.holders):
            self._unwatch(fd)
        inbox.shut_down()
        self._inboxes.discard(inbox)
        self._unwatched.discard(inbox)

    # -- events ------------------------------------------------------------------------------------

    def _accept_holder(self, inbox: Inbox) -> None:
        try:
            connection, _ = inbox.listener.accept()
        except BlockingIOError:  # the client has disconnected again
            return
        except OSError:  # no descriptors are left: the client waits, the others are served
            self._unwatch(inbox.listener.fileno())
            self._unwatched.add(inbox)
            return
        connection.setblocking(False)
        if not is_trusted_peer(connection):
            connection.close()
            return
        holder = ConnectedHolder(inbox, connection)
        if self._watch(connection.fileno(), holder):
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
            self._unwatch(fd)
        if not stays:
            self._unwatch(fd)
            del inbox.holders[fd]
            parent_death.close(holder.connection)
        if inbox.waiters and inbox.chunks:
            inbox.wake_waiters()
        if inbox.bytes_read - inbox.bytes_split >= MAX_UNRECEIVED_BYTES and not inbox.is_paused:
            self._pause_reading(inbox)

    def _pause_reading(self, inbox: Inbox) -> None:
        for fd, holder in inbox.holders.items():
            if holder.name is not None:  # a holder that has just connected is still let in
                self._unwatch(fd)
        inbox.is_paused = True
        if inbox.bytes_read - inbox.bytes_split < MAX_UNRECEIVED_BYTES:
            self._resume(inbox)


io_thread = PoreIOThread()
os.register_at_fork(after_in_child=io_thread.reset_after_fork)
