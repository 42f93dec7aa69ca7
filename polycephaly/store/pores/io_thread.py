"""The pore I/O thread: one native thread for all pores that a process owns, while it owns any.

    a listener is readable ──> a holder connects ──> its hello ──> greeting, with the descriptor
    a member is readable   ──> Inbox.pieces; waiting receivers are woken
    the eventfd            ──> requests: "open", "go on" (there is room again), "close" an inbox

A sender wakes a waiting receiver, and often has to yield the processor to it, so that each message
costs a process switch. So if data arrive less than `NAP` after the last, the thread sleeps for
`NAP` first, wakes no receiver in that time, and then reads all data at once. A single message is
not delayed. A stream of messages takes a fifth to a quarter less time this way, and half of the
owner's processor time.

Only this thread uses the epoll object and the members, so they need no lock. Other threads `ask`:
they append a request and write to the eventfd. The thread ends when it has no inbox and no request;
`ask`, start and end exclude each other by a lock. A finalizer may close an inbox in a thread that
holds this lock. The lock is reentrant, and the finalizer finds the I/O thread running, because the
thread runs for as long as any inbox is open.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from time import monotonic, sleep
from typing import Any

from ...runtime import parent_death
from ...runtime.fork_guard import OwnThread
from .inbox import ROOM, ConnectedHolder, Inbox, may_be_trusted

__all__ = ["PoreIOThread", "io_thread"]

NAP = 0.0002  # seconds; see the module's docstring

AGAIN = 0.1  # seconds between attempts to accept holders that found no free descriptor


class PoreIOThread:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset in a forked child, to which no pore belongs.

        `parent_death` has closed the inherited descriptors.
        """
        self._lock = threading.RLock()
        self._thread: OwnThread | None = None
        self._asked: deque[tuple[str, Inbox]] = deque()
        self._desks: set[Inbox] = set()
        self._turned_away: set[Inbox] = set()
        self._bell = parent_death.Descriptor(-1)

    def take_over(self, inbox: Inbox) -> None:
        """Serve this inbox from now on. Raises `OSError` if the system has no descriptor left."""
        with self._lock:
            if self._thread is None:
                self._begin()
            self.ask("open", inbox)

    def _begin(self) -> None:
        self._files: dict[int, Inbox | ConnectedHolder] = {}
        self._poll = parent_death.own(select.epoll())
        try:
            self._bell = parent_death.own(
                parent_death.Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            )
            self._poll.register(self._bell.fd, select.EPOLLIN)
            thread = OwnThread("polycephaly-pores", self._serve)
            thread.start()
        except BaseException:
            self._end()
            raise
        self._thread = thread

    def _end(self) -> None:
        self._thread = None
        parent_death.close(self._poll)
        parent_death.close(self._bell)

    def ask(self, what: str, inbox: Inbox) -> None:
        """Queue a request for the I/O thread.

        If no such thread runs, the inbox is closed already, and nothing is left to do.
        """
        # Otherwise the thread might take the request, end, and close the eventfd before the write.
        with self._lock:
            if self._thread is not None:
                self._asked.append((what, inbox))
                os.eventfd_write(self._bell.fd, 1)

    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _serve(self) -> None:
        last = 0.0
        while True:
            news = self._poll.poll(AGAIN if self._turned_away else None)
            now = monotonic()
            if now - last < NAP:
                sleep(NAP)
            last = now
            for inbox in list(self._turned_away):
                if self._watch_all(inbox):
                    self._turned_away.discard(inbox)
            for fd, _ in news:
                file = self._files.get(fd)
                if isinstance(file, Inbox):
                    self._let_knock(file)
                elif file is not None:
                    self._hear(file)
                elif fd == self._bell.fd:
                    os.eventfd_read(fd)
            while self._asked:
                what, inbox = self._asked.popleft()
                self._DO[what](self, inbox)
            if not self._desks:
                with self._lock:
                    if not self._asked:
                        self._end()
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

    def _forget(self, fd: int) -> None:
        if self._files.pop(fd, None) is not None:
            self._poll.unregister(fd)

    # -- requests ----------------------------------------------------------------------------------

    def _open(self, inbox: Inbox) -> None:
        self._desks.add(inbox)
        self._try_to_watch(inbox)

    def _go_on(self, inbox: Inbox) -> None:
        if inbox.stopped and not inbox.ended:
            inbox.stopped = False
            self._try_to_watch(inbox)

    def _try_to_watch(self, inbox: Inbox) -> None:
        # The system refuses to watch more descriptors: try again soon.
        if not self._watch_all(inbox):
            self._turned_away.add(inbox)

    def _watch_all(self, inbox: Inbox) -> bool:
        """Watch the listener, and the members unless the inbox waits for room.

        Returns False if the system refuses.
        """
        files: list[tuple[int, Inbox | ConnectedHolder]] = [(inbox.listener.fileno(), inbox)]
        if not inbox.stopped:
            files += inbox.members.items()
        return all(self._watch(fd, file) for fd, file in files)

    def _close(self, inbox: Inbox) -> None:
        for fd in (inbox.listener.fileno(), *inbox.members):
            self._forget(fd)
        inbox.end()
        self._desks.discard(inbox)
        self._turned_away.discard(inbox)

    _DO: dict[str, Any] = {"open": _open, "go on": _go_on, "close": _close}  # noqa: RUF012 - a table, never changed

    # -- events ------------------------------------------------------------------------------------

    def _let_knock(self, inbox: Inbox) -> None:
        try:
            end, _ = inbox.listener.accept()
        except BlockingIOError:  # the client has disconnected again
            return
        except OSError:  # no descriptors are left: the client waits, other work goes on
            self._forget(inbox.listener.fileno())
            self._turned_away.add(inbox)
            return
        end.setblocking(False)
        if not may_be_trusted(end):
            end.close()
            return
        member = ConnectedHolder(inbox, end)
        if self._watch(end.fileno(), member):
            inbox.members[end.fileno()] = member
        else:
            member.leave()

    def _hear(self, member: ConnectedHolder) -> None:
        inbox = member.inbox
        fd = member.end.fileno()
        try:
            stays = member.let_in() if member.name is None else member.read()
        except OSError:
            stays = False
        if inbox.stopped:
            self._forget(fd)
        if not stays:
            self._forget(fd)
            del inbox.members[fd]
            member.leave()
        if inbox.waiting and inbox.pieces:
            inbox.tell_waiting()
        if inbox.came - inbox.taken >= ROOM and not inbox.stopped:
            self._stop(inbox)

    def _stop(self, inbox: Inbox) -> None:
        for fd, member in inbox.members.items():
            if member.name is not None:  # a holder that has just connected is still let in
                self._forget(fd)
        inbox.stopped = True
        if inbox.came - inbox.taken < ROOM:
            self._go_on(inbox)


io_thread = PoreIOThread()
os.register_at_fork(after_in_child=io_thread.forget)
