"""A client of a served pool, and the messages to it.

results, lines, replies ── send ──> outbox ── once earlier messages were read ──> the connection
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

from ..engines.remote.messages import LINE_OVERHEAD_BYTES, OUTPUT, pack_json
from ..runtime.tuning import tuning
from ..wire.output import Line
from .flow_control import ClientFlow
from .session import ClientSession


class Client(ClientFlow):
    """A connected client. `name` names its process. `send_now` sends a message to it at once.

    Methods are called while holding the lock of the server's loop.
    """

    session: ClientSession

    def __init__(
        self,
        identity: bytes,
        key: str,
        name: str,
        now: float,
        send_now: Callable[[list[bytes]], object],
    ) -> None:
        super().__init__(now)
        self.identity = identity
        self.key = key
        self.name = name
        self._send_now = send_now
        self.has_left = False  # or was dropped
        # Marks its tasks and the lines that they print: a secret, and its name for pool/status.py.
        self.tag = f"{secrets.token_hex(8)} {name}"
        self.unacknowledged_bytes = 0  # bytes of such lines that the client has not handled yet
        self.omitted_lines = 0
        self.long_request_lock = threading.Lock()  # held for a long request: one at a time

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
            self._send_now(frames)
        if self.outbox and not self.is_probed:
            self._send_now(self.probe())

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
