"""Channels that a drone has inherited with its snapshot.

    snapshot ──fork──> drone: ch.put(1) ──older than this process──> proxy ──address──> original

A drone is a snapshot of a process, and has a copy of each of its channels. The copy alone is of no
use, so it becomes a proxy of the original at its first use. If the original had no number for other
processes yet, the proxy's number is made of the address in memory and the generation, which copy
and original share. The original keeps its address as long as it lives. A channel that has the
address later is of a later generation, because each fork begins one. So the owning process finds
the original, or finds that it is gone, by one look through its objects for all channels that were
there at the snapshot.

In a process that the program itself has forked, inherited channels become channels of that process,
without waiters.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .. import channel as channels

if TYPE_CHECKING:
    from ..channel import Channel
    from .transport import ChannelTransport

__all__ = ["is_inherited", "number_of_inherited", "settle"]

_MARK = 1 << 63
_ADDRESS_BITS = 48
_GENERATIONS = 1 << 15

_originals: WeakValueDictionary[tuple[int, int], Channel[Any]] = WeakValueDictionary()
"""The channels found at the last look, by generation and address."""


def settle(channel: Any) -> None:
    """In a forked process: turn an inherited copy into a proxy, or into a channel of this
    process."""
    from .owner import OwnedChannel
    from .proxy import ChannelProxy, become_remote, ends
    from .transport import of_parents

    if isinstance(channel, ChannelProxy):
        return
    made = abs(channel._plain)
    home = next((address for before, address in channels.lineage if made < before), None)
    if home is None:
        _adopt(channel)
        return
    if isinstance(channel, OwnedChannel) and channel._extra.post in of_parents:
        # The transport is not that of a pool that had ended before the fork.
        number = channel._extra.number
    elif made < _GENERATIONS and id(channel) < 1 << _ADDRESS_BITS:
        number = _MARK | made << _ADDRESS_BITS | id(channel)
    else:
        raise RuntimeError(
            f"{channel!r} came with the snapshot, and has no number: give it as an argument"
        )
    pid = os.path.basename(home).partition(".")[0]
    ends.setdefault(
        (home, number),
        become_remote(channel, home, number, f"the image that this one is of (pid {pid})"),
    )


def _adopt(channel: Any) -> None:
    channel.__class__ = channels._Buffered if channel.capacity else channels.Channel
    channel._receiver = channel._sender = channel._item = channel._extra = None
    channel._plain = -channels.generation if channel._closed else channels.generation


def is_inherited(number: int) -> bool:
    return bool(number & _MARK)


def number_of_inherited(post: ChannelTransport, number: int) -> int:
    """Return the proper number of the original, or 0 if it is gone."""
    proper = post.aliases.get(number)
    if proper is None:
        made = (number & ~_MARK) >> _ADDRESS_BITS
        address = number & ((1 << _ADDRESS_BITS) - 1)
        found = _originals.get((made, address)) or _look(made, address)
        proper = post.aliases[number] = 0 if found is None else post.number_of(found)
    return proper


def _look(made: int, address: int) -> Channel[Any] | None:
    for each in gc.get_objects():
        if isinstance(each, channels.Channel) and not each.is_remote:
            _originals[abs(each._plain), id(each)] = each
    found = _originals.get((made, address))
    if found is None and gc.get_freeze_count():  # frozen objects are not listed
        gc.unfreeze()
        return _look(made, address)
    return found
