"""The peers of a server, and flow control: limits on the memory of the server that a peer may use.

    results, lines, replies ── send ──> outbox ── once earlier messages were read ──> the client

Every message that a peer may send is allowed by something, and thereby bounded: a PING by one of
the server's, a call by the number and bytes of unanswered calls (`MAX_UNANSWERED_CALLS`,
`MAX_UNANSWERED_BYTES`), an ALIVE by the time, and so on. A regular peer stays within these limits,
so a peer that exceeds one is disconnected at the first such message. No limit depends on the speed
of either side or of the network. Silence is counted in the server's own checks, so that a server
that was stopped for a while blames no peer for its own pause.

See docs/decisions/0010-flow-control-and-security-of-served-pools.md.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ..engines.remote.messages import (
    LINE_OVERHEAD_BYTES,
    MAX_UNANSWERED_BYTES,
    MAX_UNANSWERED_CALLS,
    MAX_UNANSWERED_REQUESTS,
    OUTPUT,
    PART,
    PING,
    pack_json,
    pack_numbers,
    read_numbers,
)
from ..errors import Malformed
from ..runtime.tuning import tuning
from ..wire.output import Line
from .session import ClientSession

INITIAL_RESULT_BYTES = 256 << 10  # assumed for a client's first results
MESSAGE_OVERHEAD_BYTES = 128  # counted for each message beside its frames: libzmq's overhead


class Peer:
    """A client or a joined host. `send_now` sends a message to it at once, and returns False if it
    cannot be sent. Methods are called while holding the lock of the server's loop.
    """

    def __init__(
        self, identity: bytes, key: str, name: str, send_now: Callable[[list[bytes]], bool]
    ) -> None:
        self.identity = identity
        self.key = key
        self.name = name
        self.send_now = send_now
        self.silent_checks = 0  # checks of the server since the last message
        self.unfinished_bytes = 0  # bytes of the message that arrives in parts
        self._parts: list[bytes] = []
        self._sent_bytes = self._read_bytes = 0
        # For each PING that has not come back yet: `_sent_bytes` when it was sent.
        self._probes: deque[int] = deque()

    def reassemble(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the message that ends with `frames`, or None if more of it is to come.

        Raise `Malformed`.
        """
        if frames[:1] == [PART]:
            if len(frames) != 2 or not frames[1]:  # an empty frame takes memory, too
                raise Malformed("a malformed part of a message")
            self._parts += frames[1:]
            self.unfinished_bytes += sum(map(len, frames)) + MESSAGE_OVERHEAD_BYTES
            return None
        if self._parts:
            frames = self._parts + frames
            self._parts, self.unfinished_bytes = [], 0
        return frames

    @property
    def held_bytes(self) -> int:
        """Bytes that the server holds of this peer."""
        return self.unfinished_bytes

    # -- messages to the peer ----------------------------------------------------------------------

    @property
    def unread_bytes(self) -> int:
        """Bytes that the peer may not have read yet. An upper bound: PINGs come back later."""
        return self._sent_bytes - self._read_bytes

    def count_sent(self, frames: Sequence[bytes]) -> None:
        """Count a message to the peer."""
        self._sent_bytes += sum(map(len, frames)) + MESSAGE_OVERHEAD_BYTES

    @property
    def is_probed(self) -> bool:
        """Whether a PING is on its way that will prove that the peer has read all messages."""
        return bool(self._probes) and self._probes[-1] == self._sent_bytes

    def probe(self) -> list[bytes]:
        """Return a PING, to be sent back by the peer after it has read all earlier messages."""
        self._probes.append(self._sent_bytes)
        return pack_numbers(PING, [self._sent_bytes])

    def on_ping_returned(self, frames: list[bytes]) -> None:
        """Count as read all messages before the PING that came back. Raise `Malformed`."""
        if not self._probes or read_numbers(frames) != [self._probes[0]]:
            raise Malformed("a PING that does not answer one of the server's")
        self._read_bytes = self._probes.popleft()


class Client(Peer):
    """A connected client. `name` names its process."""

    session: ClientSession

    def __init__(
        self,
        identity: bytes,
        key: str,
        name: str,
        send_now: Callable[[list[bytes]], bool],
        now: float,
    ) -> None:
        super().__init__(identity, key, name, send_now)
        self.has_left = False  # or was dropped
        # Marks its tasks and the lines that they print: a secret, and its name for pool/status.py.
        self.tag = f"{secrets.token_hex(8)} {name}"
        self.unacknowledged_bytes = 0  # bytes of such lines that the client has not handled yet
        self.omitted_lines = 0
        self.long_request_lock = threading.Lock()  # held for a long request: one at a time
        self.unanswered_calls: dict[int, int] = {}  # numbers and bytes
        self.unanswered_bytes = 0
        self._cancellable = 0
        self.has_recalled = False
        self.definition_bytes = 0  # of the client's functions
        self._unanswered_requests = 0
        self._connected_at = now
        self._alive_count = 0
        self._result_bytes = INITIAL_RESULT_BYTES
        self.outbox_bytes = 0
        self.outbox: deque[tuple[list[bytes], Sequence[int], int]] = deque()
        """Messages to send later, with the calls that each one answers and its number of requests.

        Each waits until the client has read enough of the earlier ones.
        """

    @property
    def held_bytes(self) -> int:
        return (
            self.unfinished_bytes
            + self.definition_bytes
            + self.unanswered_bytes
            + self.outbox_bytes
        )

    @property
    def credit(self) -> int:
        """How many of the client's calls the pool may have at once.

        If each had a result of the largest recent size, they would fill `tuning.unread_bytes`.
        """
        return min(MAX_UNANSWERED_CALLS, tuning.unread_bytes // self._result_bytes)

    def record_result_bytes(self, largest: int) -> None:
        """Note the size of the largest of the newest results."""
        self._result_bytes = largest + MESSAGE_OVERHEAD_BYTES

    def count_call(self, number: int, size: int) -> None:
        """Count a call. Raise `Malformed`."""
        if len(self.unanswered_calls) >= MAX_UNANSWERED_CALLS:
            raise Malformed(f"more than {MAX_UNANSWERED_CALLS} unanswered calls")
        if self.unanswered_calls and self.unanswered_bytes >= MAX_UNANSWERED_BYTES:
            raise Malformed(f"more than {MAX_UNANSWERED_BYTES:,} bytes of unanswered calls")
        if number in self.unanswered_calls:
            raise Malformed("a call with a number that is in use")
        self.unanswered_calls[number] = size
        self.unanswered_bytes += size
        self._cancellable += 1

    def count_alive(self, now: float) -> None:
        """Count a heartbeat (ALIVE). Raise `Malformed` if there are too many.

        Twice as many are allowed as a regular client sends. A client's first one follows the
        server's HELLO, so that all may be late but none can be early. But the server's clock stands
        still while its machine sleeps: a client may have sent heartbeats until it gave the server
        up.
        """
        self._alive_count += 1
        interval = tuning.client_sign_seconds
        seconds = 2 * (now - self._connected_at) + tuning.client_silence_seconds
        if self._alive_count > 1 + seconds / interval:
            raise Malformed(f"more heartbeats than one every {interval:g} s")

    def count_cancelled(self, numbers: Sequence[int]) -> None:
        """Count cancelled calls. Raise `Malformed` if there are none, or more than the calls."""
        self._cancellable -= len(numbers)
        if self._cancellable < 0 or not numbers:
            raise Malformed("more cancelled calls than submitted ones")
        self.count_answered(numbers)

    def count_request(self) -> None:
        """Count a request. Raise `Malformed` if too many are unanswered."""
        self._unanswered_requests += 1
        if self._unanswered_requests > MAX_UNANSWERED_REQUESTS:
            raise Malformed(f"more than {MAX_UNANSWERED_REQUESTS} unanswered requests")

    def count_answered(self, numbers: Sequence[int] = (), requests: int = 0) -> None:
        """Count calls and requests as answered."""
        self._unanswered_requests -= requests
        for number in numbers:
            self.unanswered_bytes -= self.unanswered_calls.pop(number, 0)

    # -- messages to the client --------------------------------------------------------------------

    def send(self, frames: list[bytes], answers: Sequence[int] = (), requests: int = 0) -> None:
        """Send a message as soon as the client has read enough of the earlier ones."""
        self.outbox.append((frames, answers, requests))
        self.outbox_bytes += sum(map(len, frames))
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send the messages for which the client has read enough of the earlier ones."""
        while self.outbox and self.unread_bytes <= tuning.unread_bytes:
            frames, answers, requests = self.outbox.popleft()
            self.outbox_bytes -= sum(map(len, frames))
            self.count_answered(answers, requests)
            self.count_sent(frames)
            self.send_now(frames)
        if self.outbox and not self.is_probed:
            self.send_now(self.probe())

    def send_lines(self, lines: list[Line]) -> None:
        """Send lines; omit lines for a client that does not read them, to bound the memory."""
        packed: list[tuple[str, str, str]] = []
        for line in lines:
            if self.unacknowledged_bytes > tuning.unseen_bytes:
                self.omitted_lines += 1
                continue
            if self.omitted_lines:
                gap = f"[{self.omitted_lines} lines were omitted here]"
                packed.append((gap, line.drone, line.stream))
                self.unacknowledged_bytes += len(gap) + LINE_OVERHEAD_BYTES
                self.omitted_lines = 0
            packed.append((line.text, line.drone, line.stream))
            self.unacknowledged_bytes += len(line.text) + LINE_OVERHEAD_BYTES
        if packed and not self.has_left:
            self.send(pack_json(OUTPUT, {"lines": packed}))
