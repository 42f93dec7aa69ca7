"""Flow control: limits on the memory of the server that one peer may use.

Every message that a peer may send is allowed by something, and thereby bounded: a PING by one of
the server's, a call by the number and bytes of unanswered calls (`AHEAD`, `BYTES_AHEAD`), a LIVES
by the time, and so on. A regular peer stays within these limits, so a peer that exceeds one is
disconnected at the first such message. No limit depends on the speed of either side or of the
network. Silence is counted in the server's own looks, so that a server that was stopped for a while
blames no peer for its own pause.

See docs/decisions/0010-flow-control-and-security-of-served-pools.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..engines.remote.messages import (
    AHEAD,
    ASKS,
    BYTES_AHEAD,
    PART,
    PING,
    pack_numbers,
    read_numbers,
)
from ..runtime.tuning import tuning
from ..wire.messages import Malformed

__all__ = ["ClientFlow", "Flow"]

RESULT = 256 << 10  # assumed bytes of a client's first results
MESSAGE = 128  # bytes counted for each message beside its frames: libzmq's overhead


class Flow:
    """The flow control of any peer, client or joined host."""

    def __init__(self, now: float) -> None:
        self.heard = now
        self.silent = 0  # looks of the server since then
        self.unfinished = 0  # bytes of the message that arrives in parts
        self._parts: list[bytes] = []
        self._sent = self._read = 0  # bytes
        # For each PING that has not come back yet: `_sent` when it was sent.
        self._probes: deque[int] = deque()

    def whole(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the message that ends with `frames`, or None if more of it is to come."""
        if frames[:1] == [PART]:
            self._parts += frames[1:]
            self.unfinished += sum(map(len, frames)) + MESSAGE
            return None
        if self._parts:
            frames = self._parts + frames
            self._parts, self.unfinished = [], 0
        return frames

    @property
    def held(self) -> int:
        """Bytes that the server holds of this peer."""
        return self.unfinished

    # -- messages to the peer ----------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes that the peer may not have read yet. An upper bound: PINGs come back later."""
        return self._sent - self._read

    def sends(self, frames: Sequence[bytes]) -> None:
        """Count a message to the peer."""
        self._sent += sum(map(len, frames)) + MESSAGE

    @property
    def is_probed(self) -> bool:
        """Whether a PING is on its way that will prove that the peer has read all messages."""
        return bool(self._probes) and self._probes[-1] == self._sent

    def probe(self) -> list[bytes]:
        """Return a PING, to be sent back by the peer after it has read all earlier messages."""
        self._probes.append(self._sent)
        return pack_numbers(PING, [self._sent])

    def came_back(self, frames: list[bytes]) -> None:
        """Count as read all messages before the PING that came back. Raise `Malformed`."""
        if not self._probes or read_numbers(frames) != [self._probes[0]]:
            raise Malformed("a PING that does not answer one of the server's")
        self._read = self._probes.popleft()


class ClientFlow(Flow):
    """The flow control of a client."""

    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.owed: dict[int, int] = {}  # unanswered calls and their bytes
        self.owed_bytes = 0
        self._cancellable = 0
        self.recalled = False
        self.defined = 0  # bytes of the client's function definitions
        self._asked = 0
        self._since = now
        self._signs = 0
        self._result = RESULT
        self.outbox_bytes = 0
        self.outbox: deque[tuple[list[bytes], Sequence[int], int]] = deque()
        """Messages to send later, with the calls that each one answers and its number of requests.

        Each waits until the client has read enough of the earlier ones.
        """

    @property
    def held(self) -> int:
        return self.unfinished + self.defined + self.owed_bytes + self.outbox_bytes

    @property
    def room(self) -> int:
        """How many of the client's calls the pool may have at once.

        If each had a result of the largest recent size, they would fill `tuning.unread_bytes`.
        """
        return min(AHEAD, tuning.unread_bytes // self._result)

    def gave(self, largest: int) -> None:
        """Note the size of the largest of the newest results."""
        self._result = largest + MESSAGE

    def call(self, number: int, size: int) -> None:
        """Count a call. Raise `Malformed`."""
        if len(self.owed) >= AHEAD:
            raise Malformed(f"more than {AHEAD} unanswered calls")
        if self.owed and self.owed_bytes >= BYTES_AHEAD:
            raise Malformed(f"more than {BYTES_AHEAD:,} bytes of unanswered calls")
        if number in self.owed:
            raise Malformed("a call with a number that is in use")
        self.owed[number] = size
        self.owed_bytes += size
        self._cancellable += 1

    def lives(self, now: float) -> None:
        """Count a sign of life. Raise `Malformed` if there are too many.

        Twice as many are allowed as a regular client sends. A client's first one follows the
        server's HELLO, so that all may be late but none can be early.
        """
        self._signs += 1
        every = tuning.client_sign_seconds
        if self._signs > 1 + 2 * (now - self._since) / every:
            raise Malformed(f"more signs of life than one every {every:g} s")

    def cancels(self, numbers: Sequence[int]) -> None:
        """Count cancelled calls. Raise `Malformed` if there are none, or more than the calls."""
        self._cancellable -= len(numbers)
        if self._cancellable < 0 or not numbers:
            raise Malformed("more cancelled calls than there were")
        self.answered(numbers)

    def asks(self) -> None:
        """Count a request. Raise `Malformed` if too many are unanswered."""
        self._asked += 1
        if self._asked > ASKS:
            raise Malformed(f"more than {ASKS} unanswered questions")

    def answered(self, numbers: Sequence[int] = (), questions: int = 0) -> None:
        """Count calls and requests as answered."""
        self._asked -= questions
        for number in numbers:
            self.owed_bytes -= self.owed.pop(number, 0)
