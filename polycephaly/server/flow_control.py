"""What one peer may have of a server's memory, and how the server tells a peer that takes more.

    what the peer sends             what allows it, and so bounds it
    PING                            one of ours, which it sends back: it has read all that came before
    LIVES                           time: one every `tuning.client_sign_seconds`
    calls                           `AHEAD` that are unanswered, and of these `BYTES_AHEAD` and one more
    CANCEL                          the calls that it has given
    ASK, SHARE                      `ASKS` that are unanswered
    SEEN, GIVE_UP                   what was printed, what it shares
    a message longer than `PIECE`   comes as PARTs, each a message of its own; what all clients have
                                    unfinished, unanswered and unread has a ceiling, at which the largest is put out
    what it does not read           `tuning.unread_bytes` lie ready at once; the answers after these stay with their
                                    calls, which count as unanswered. Meanwhile no call of it is begun; nor are ever
                                    more than give as much, if each gives what the largest of its newest results had

A peer of ours keeps to all of this, so one that does not is no peer of ours: it is put out at the
first such message. Nothing depends on how fast either side is, or the way between them. Silence is
counted in the server's own looks, so a server that stood still itself blames nobody for it."""

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

RESULT = 256 << 10  # bytes that a client's first results are taken to have
MESSAGE = 128  # bytes that each message counts for, beside its frames: libzmq's share


class Flow:
    """Of any peer."""

    def __init__(self, now: float) -> None:
        self.heard = now
        self.silent = 0  # looks of the server since then
        self.unfinished = 0  # bytes of the message that comes in parts
        self._parts: list[bytes] = []
        self._sent = self._read = 0  # bytes
        self._probes: deque[int] = (
            deque()
        )  # of each PING that has not come back yet: `_sent` when it was sent

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
        """Bytes that the server has of it."""
        return self.unfinished

    # -- what it reads -----------------------------------------------------------------------------

    @property
    def unread(self) -> int:
        """Bytes, at most: it may have read some of them since it was asked."""
        return self._sent - self._read

    def sends(self, frames: Sequence[bytes]) -> None:
        self._sent += sum(map(len, frames)) + MESSAGE

    @property
    def is_probed(self) -> bool:
        """Will it be known that it has read all that was sent?"""
        return bool(self._probes) and self._probes[-1] == self._sent

    def probe(self) -> list[bytes]:
        """Return a PING for it to send back."""
        self._probes.append(self._sent)
        return pack_numbers(PING, [self._sent])

    def came_back(self, frames: list[bytes]) -> None:
        """Raises `Malformed`."""
        if not self._probes or read_numbers(frames) != [self._probes[0]]:
            raise Malformed("a PING that does not answer one of the server's")
        self._read = self._probes.popleft()


class ClientFlow(Flow):
    def __init__(self, now: float) -> None:
        super().__init__(now)
        self.owed: dict[int, int] = {}  # calls that are unanswered, and their bytes
        self.owed_bytes = 0
        self._cancellable = 0
        self.recalled = False
        self.defined = 0  # bytes of its definitions
        self._asked = 0
        self._since = now
        self._signs = 0
        self._result = RESULT
        self.outbox_bytes = 0
        self.outbox: deque[tuple[list[bytes], Sequence[int], int]] = deque()
        """What is to be sent when it has read more: with the calls that it answers, and how many
        questions."""

    @property
    def held(self) -> int:
        return self.unfinished + self.defined + self.owed_bytes + self.outbox_bytes

    @property
    def room(self) -> int:
        """How many of its calls the pool may have at once."""
        return min(AHEAD, tuning.unread_bytes // self._result)

    def gave(self, largest: int) -> None:
        """Of its newest results, the largest had so many bytes."""
        self._result = largest + MESSAGE

    def call(self, number: int, size: int) -> None:
        """Raises `Malformed`."""
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
        """Raises `Malformed`. Those of a client that keeps to its clock come half as often; its
        first one comes after our welcome, so that they may all come late, but never early."""
        self._signs += 1
        every = tuning.client_sign_seconds
        if self._signs > 1 + 2 * (now - self._since) / every:
            raise Malformed(f"more signs of life than one every {every:g} s")

    def cancels(self, numbers: Sequence[int]) -> None:
        """Raises `Malformed`."""
        self._cancellable -= len(numbers)
        if self._cancellable < 0 or not numbers:
            raise Malformed("more cancelled calls than there were")
        self.answered(numbers)

    def asks(self) -> None:
        """Raises `Malformed`."""
        self._asked += 1
        if self._asked > ASKS:
            raise Malformed(f"more than {ASKS} unanswered questions")

    def answered(self, numbers: Sequence[int] = (), questions: int = 0) -> None:
        self._asked -= questions
        for number in numbers:
            self.owed_bytes -= self.owed.pop(number, 0)
