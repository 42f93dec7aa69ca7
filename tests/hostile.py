"""Key holders who mean harm, beside a good client of the same served pool.

    python tests/hostile.py --messages 1000000          every kind in turn, so many messages
    together python tests/hostile.py --kind pings --messages 5000

    attackers ── a process ──x            what is told of each kind: messages said, connections they
    server ───── a process    <── good    took, how many of them were ended by the server, the good
                                  client  client's answers and its slowest one, the server's memory
                                          at most

Each message is said by one who has a key, as the good client's: only what he says is wrong. The
exit status is 1 if the good client got an error, or the server's memory passed `--most` MB."""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:1] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import zmq

import polycephaly as poly
from polycephaly.engines.remote import messages as frames
from polycephaly.engines.remote.keys import Card
from polycephaly.engines.remote.messages import Item
from polycephaly.wire.messages import CALL, DEFINE_CODE

BURST = 2000  # messages that one connection says before it looks whether it is still there
PATIENCE = 60.0  # seconds for the server's word that it is out
CODE = 2
PIECE = bytes(1 << 20)

Frames = list[Any]


def calls_of(code: str, count: int) -> Iterator[Frames]:
    """Never read: what each gives is large."""
    yield frames.pack_work([Item(1, 0, DEFINE_CODE, code.encode(), extra=b'{"label": "x"}')])
    for number in range(count):
        yield frames.pack_work([Item(CODE + number, 1, CALL)])


def pings(dice: random.Random) -> Iterator[Frames]:
    while True:
        yield [frames.PING]


def garbage(dice: random.Random) -> Iterator[Frames]:
    while True:
        yield [dice.randbytes(dice.randrange(60)) for _ in range(dice.randrange(1, 5))]


def malformed(dice: random.Random) -> Iterator[Frames]:
    good = [
        frames.pack_work([Item(1, 0, CALL, b"x" * 100)]),
        frames.pack_json(frames.REQUEST, {"id": 1, "what": "status"}),
        frames.pack_numbers(frames.CANCEL, [1, 2]),
        frames.pack_numbers(frames.OUTPUT_ACK, [1]),
        frames.pack_shared_value(2, [b"a pickle", bytes(100)]),
    ]
    while True:
        said = [bytearray(part) for part in dice.choice(good)]
        part = dice.choice(said)
        part[dice.randrange(len(part))] ^= 1 << dice.randrange(8)
        yield [bytes(part) for part in said]


def huge_frames(dice: random.Random) -> Iterator[Frames]:
    large = bytes(64 << 20)
    while True:
        yield [frames.WORK, large]


def long_messages(dice: random.Random) -> Iterator[Frames]:
    """One message of 4 GB: to the server it is unfinished as long as it comes."""
    while True:
        yield [frames.WORK, *[PIECE] * 4000]


def unfinished(dice: random.Random) -> Iterator[Frames]:
    while True:
        yield [frames.PART, PIECE]


def unread(dice: random.Random) -> Iterator[Frames]:
    yield from calls_of("bytes(1 << 20)", 1 << 30)


def questions(dice: random.Random) -> Iterator[Frames]:
    while True:
        yield frames.pack_json(frames.REQUEST, {"id": 1, "what": "timeline"})


def forged(dice: random.Random) -> Iterator[Frames]:
    """As a joined host: log records and lines of drones that are none, for clients that are
    none."""
    record = '\x1epoly:L9.9+{"msg": "' + "a" * 4000 + "\x1e"
    while True:
        line = [record, "lab.0", "stderr", f"{dice.getrandbits(64):016x}"]
        yield frames.pack_json(frames.OUTPUT, {"lines": [line] * 20})


def forged_in_drones(dice: random.Random) -> Iterator[Frames]:
    code = (
        r"import os; [os.write(2, b'\x1epoly:L%d.1+7 [50%s\x1e' % (i, b'0' * 3000)) "
        r"for i in range(200)]; 0"
    )
    yield from calls_of(code, 1 << 30)


KINDS: dict[str, tuple[Callable[[random.Random], Iterator[Frames]], int, int]] = {
    # what is said; how many messages one connection says at most; how many connections at once
    "pings": (pings, BURST, 1),
    "pings of 50 at once": (pings, BURST, 50),
    "garbage": (garbage, BURST, 1),
    "malformed": (malformed, BURST, 1),
    "huge frames": (huge_frames, 2, 1),
    "long messages": (long_messages, 1, 4),
    "unfinished messages": (unfinished, 100_000, 1),
    "never reads": (unread, 3000, 1),
    "questions": (questions, BURST, 1),
    "forged output": (forged, BURST, 1),
    "forged log records": (forged_in_drones, 300, 1),
}
FEW = {"huge frames": 20, "long messages": 8, "unfinished messages": 1000, "never reads": 6000,
       "forged log records": 600, "forged output": 4000}  # fmt: skip
"""Messages that are enough of a kind: these are large."""


class Attacker:
    def __init__(self, context: zmq.Context[Any], card: Card, kind: str, seed: int) -> None:
        end = self.end = context.socket(zmq.DEALER)
        end.linger, end.sndhwm, end.reconnect_ivl = 0, 100_000, -1
        end.curve_serverkey, end.curve_publickey, end.curve_secretkey = (
            key.encode() for key in (card.server, card.public, card.secret)
        )
        self.monitor = end.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        end.connect(card.address)
        role = (
            {"role": "worker", "name": "far", "host": "x"}
            if kind == "forged output"
            else {"output": True}
        )
        end.send_multipart(frames.pack_hello(1, **role))
        self.says, self.most, _ = KINDS[kind]
        self.speech = self.says(random.Random(seed))
        self.said = 0
        self.reads = kind != "never reads"

    def say(self, count: int) -> None:
        for _ in range(min(count, self.most)):
            try:
                self.end.send_multipart(next(self.speech), zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self.said += 1

    def is_out(self) -> bool:
        """The server's word, or its end of the connection."""
        with suppress(zmq.Again):
            while self.reads:
                if self.end.recv_multipart(zmq.NOBLOCK)[0] == frames.REFUSED:
                    return True
        return bool(self.monitor.poll(20))

    def close(self) -> None:
        self.end.disable_monitor()
        self.monitor.close()
        self.end.close()


def attack(card: Card, kind: str, messages: int, seed: int) -> dict[str, int]:
    context = zmq.Context()
    said = connections = out = 0
    while said < messages:
        attackers = [
            Attacker(context, card, kind, seed + connections + i) for i in range(KINDS[kind][2])
        ]
        connections += len(attackers)
        for each in attackers:
            each.say(messages - said)
            said += each.said
        end = time.monotonic() + PATIENCE
        for each in attackers:
            while not (gone := each.is_out()) and time.monotonic() < end:
                pass
            out += gone
            each.close()
    context.destroy(linger=0)
    return {"said": said, "connections": connections, "out": out}


def serve(path: str) -> None:
    logging.basicConfig()
    with poly.Pool(2, name="lab", output="discard") as pool, poly.serve(pool, file=path):
        print("up", flush=True)
        sys.stdin.read()


def peak_of(pid: int) -> int:
    """MB of resident memory, at most since the last call."""
    status = Path(f"/proc/{pid}/status").read_text()
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields.get("VmHWM", fields["VmRSS"]).split()[0]) >> 10


class Good:
    """Gives one call after the other."""

    def __init__(self, card: str) -> None:
        self.remote = poly.connect(card, timeout=30)
        self.answers, self.slowest, self.error = 0, 0.0, ""
        self._over = False
        self._thread = threading.Thread(target=self._live)
        self._thread.start()

    def _live(self) -> None:
        while not self._over:
            begun = time.monotonic()
            try:
                assert self.remote.promise(abs, -self.answers).result(120) == self.answers
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                return
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.answers += 1

    def close(self) -> None:
        self._over = True
        self._thread.join()
        if not self.error:
            self.remote.shutdown()


def run(kinds: list[str], messages: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each kind, and the server's log."""
    here = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "card")
        log = open(os.path.join(folder, "log"), "w+")  # noqa: SIM115 - closed below
        with (
            log,
            subprocess.Popen(
                [*here, "--serve", path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            ) as server,
        ):
            assert server.stdin is not None
            assert server.stdout is not None
            assert server.stdout.readline() == "up\n"
            for kind in kinds:
                peak_of(server.pid)
                good = Good(path)
                count = min(messages // len(kinds), FEW.get(kind, messages))
                done = subprocess.run(
                    [
                        *here,
                        "--attack",
                        path,
                        "--kind",
                        kind,
                        "--messages",
                        str(max(1, count)),
                        "--seed",
                        str(seed),
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                good.close()
                told = json.loads(done.stdout)
                if (status := server.poll()) is not None:
                    log.seek(0)
                    raise AssertionError(
                        f"{kind}: the server has ended with status {status}: {log.read()}"
                    )
                yield {"kind": kind, **told, "answers": good.answers, "slowest": good.slowest,
                       "memory": peak_of(server.pid), "error": good.error}  # fmt: skip
            server.stdin.close()
            server.wait(60)
            log.seek(0)
            yield {"log": log.read()}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=[*KINDS], action="append")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=int, default=1000, help="MB of the server's memory")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.serve:
        serve(told.serve)
        return 0
    if told.attack:
        print(json.dumps(attack(Card.read(told.attack), told.kind[0], told.messages, told.seed)))
        return 0
    print(
        "kind                   messages  connections  put out  good answers  slowest ms  server MB"
    )
    said, bad = 0, False
    for row in run(told.kind or [*KINDS], told.messages, told.seed):
        if "log" in row:
            print(
                f"{said:,} hostile messages, {len(row['log'].splitlines())} lines "
                "in the server's log"
            )
            continue
        said += row["said"]
        bad |= bool(row["error"]) or row["memory"] > told.most
        print("{kind:21} {said:9,} {connections:12,} {out:8,} {answers:13,} "
              "{0:11,.0f} {memory:10,}  {error}".format(
                  row["slowest"] * 1000, **row), flush=True)  # fmt: skip
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
