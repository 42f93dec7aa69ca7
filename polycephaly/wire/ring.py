"""The ring: shared memory in which a drone writes records, and from which the controller reads.

    cells   END       checksum << 32 | position   stored by the writer, after the bytes
            CONSUMED  the same, of what was read  stored by the reader
    bytes   ... | key, record | key, record | ...      from CONSUMED to END, in a circle

Both are in the format of `marshal`, so the bytes from CONSUMED to END are the content of a dict of
that format, and one call decodes all records that have come. No two keys that are read together
are equal. A key of bytes has a meaning (messages.py). Those of `next_key`, which are int, have
none, and the record behind them is a tuple.

A position is a count of bytes, and the checksum is that of all bytes up to there. So an END that is
seen before the bytes, as may happen on processors that do not keep stores in order, is one that has
not come yet; and so is that of a drone which has written over its ring.

What was written before the writer died is read: a record counts from the moment that END is stored,
which is one store of an aligned word. One thread at a time writes, and one reads.

A record that is longer than a quarter of the ring goes in pieces: the length of it and its key, an
int, then their bytes. They follow each other, and a record of which not all pieces have come is
none.

See docs/decisions/0002-one-ring-home.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from marshal import dumps, loads
from struct import Struct
from typing import Any
from zlib import crc32

from ..errors import Malformed

RING_BYTES = 256 * 1024  # a power of two
HEADER_BYTES = 128
_END, _CONSUMED = 0, 8  # words: each has a cache line of its own
_POSITION = (1 << 32) - 1
_pack_key = Struct("<cI").pack
_MAX_KEY = (1 << 31) - 1
FORMAT = 2
"""The version of `marshal` that has no references to earlier objects, so that records can be put
behind each other."""

Record = tuple[Any, ...]
Records = dict[Any, Any]
"""Records by their keys, in the order in which they were written."""

_LOST: Records = {-1: ()}
"""In place of records of which not all has come."""
_keys = count()


def next_key() -> bytes:
    """Return a key that no other has of those that are read together, packed."""
    return _pack_key(b"i", next(_keys) & _MAX_KEY)


class _Ring:
    def __init__(self, memory: memoryview) -> None:
        self._cells = memory[:HEADER_BYTES].cast("Q")
        self._bytes = memory[HEADER_BYTES:]
        self._size = len(self._bytes)


class RingWriter(_Ring):
    """All that it knows stands in END, so an exception between two statements leaves nothing half
    written.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self.max_bytes = self._size // 4
        """How long a record with its key may be that is written at once."""

    def end(self) -> int:
        """Return what END has: everything up to there was written."""
        end: int = self._cells[_END]
        return end

    def write(self, record: bytes) -> bool:
        """Write a record behind its key; return False if it is longer than `max_bytes`, or there is
        no room for it now.
        """
        cells, size = self._cells, self._size
        end = cells[_END]
        length = len(record)
        if length + ((end - cells[_CONSUMED]) & _POSITION) > size or length > self.max_bytes:
            return False
        at = end % size
        after = at + length
        if after <= size:
            self._bytes[at:after] = record
        else:
            self._bytes[at:] = record[: size - at]
            self._bytes[: after - size] = record[size - at :]
        cells[_END] = crc32(record, end >> 32) << 32 | (end + length) & _POSITION
        return True

    def write_any(self, record: bytes, wait_for_room: Callable[[int], object]) -> None:
        """Write a record of any length. While there is no room, `wait_for_room` is called with the
        number of its calls for this before.
        """
        for piece in [record] if len(record) < self.max_bytes // 2 else self._pieces(record):
            waits = 0
            while not self.write(piece):
                wait_for_room(waits)
                waits += 1

    def _pieces(self, record: bytes) -> Iterator[bytes]:
        yield next_key() + dumps(len(record), FORMAT)
        step = self.max_bytes // 2
        for at in range(0, len(record), step):
            yield next_key() + dumps(record[at : at + step], FORMAT)

    def forget(self, end: int) -> None:
        """Make room: what was written up to `end` will not be read from here."""
        self._cells[_CONSUMED] = end


class RingReader(_Ring):
    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._read = self._cells[_CONSUMED]
        self._long: bytearray | None = None  # a record of which not all pieces have come
        self._long_bytes = 0
        self.length = 0
        """Bytes that the last `read` has decoded."""

    def read(self) -> Records | None:
        """Return the records that have come since the last call. None if the bytes are not there
        yet; if that does not change, they never will be. Raises `Malformed`.
        """
        end, read = self._cells[_END], self._read
        if end == read:
            return {}
        size, at = self._size, read % self._size
        self.length = length = (end - read) & _POSITION
        after = at + length
        if length > size:
            return None
        if after <= size:
            entries = bytes(self._bytes[at:after])
        else:
            entries = bytes(self._bytes[at:]) + bytes(self._bytes[: after - size])
        if crc32(entries, read >> 32) != end >> 32:
            return None
        self._read = self._cells[_CONSUMED] = end
        records = decode(entries)
        if self._long is not None or not {bytes}.issuperset(map(type, records)):
            records = self._join(records)
        return records

    def _join(self, items: Records) -> Records:
        """Put the records together that came in pieces. An empty one stands for what is none."""
        whole: Records = {}
        for key, each in items.items():
            long, kind = self._long, type(each) if type(key) is int else None
            if kind is bytes and long is not None:
                long += each
                if len(long) < self._long_bytes:
                    continue
                self._long = None
                is_whole = len(long) == self._long_bytes
                try:
                    whole |= (is_whole and decode(bytes(long))) or _LOST
                except Malformed:
                    whole |= _LOST
                continue
            if long is not None:  # of which not all pieces have come
                self._long = None
                whole |= _LOST
            if kind is int:
                self._long, self._long_bytes = bytearray(), each
            else:
                whole[key] = each
        return whole


def decode(packed: bytes) -> Records:
    """Return records that were packed behind each other, with their keys. Raises `Malformed`."""
    try:
        records: Records = loads(b"{" + packed + b"0")
    except (ValueError, EOFError, TypeError) as error:
        raise Malformed(f"{len(packed)} bytes that are no records: {error}") from error
    return records
