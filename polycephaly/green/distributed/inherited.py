"""Channels that a drone has inherited with its snapshot.

    snapshot ──fork──> drone: ch.put(1) ──older than this process──> proxy ──address──> original

A drone is a snapshot of a process, and has a copy of each of its channels. The copy alone is of no
use, so it becomes a proxy of the original at its first use. If the original had no number for other
processes yet, the proxy's number is made of the address in memory and the generation, which copy
and original share. The original keeps its address as long as it lives. A channel that has the
address later is of a later generation, because each fork begins one. So the owning process finds
the original, or finds that it is gone, by one search of its objects for all channels that were
there at the snapshot.

In a process that the program itself has forked, inherited channels become channels of that process,
without waiters.
"""

from __future__ import annotations

import gc
from collections import deque
from typing import Any
from weakref import WeakValueDictionary

from ...wire import addresses
from .. import channel as channels
from ..channel import Channel
from .owner import OwnedChannel
from .packed import unpack_item
from .proxy import ChannelProxy, make_proxy, proxies
from .transport import ChannelTransport, inherited_transports

_INHERITED_BIT = 1 << 63
_ADDRESS_BITS = 48
_MAX_GENERATIONS = 1 << 15

_originals: WeakValueDictionary[tuple[int, int], Channel[Any]] = WeakValueDictionary()
"""The channels found at the last search, by generation and address."""


def convert_inherited(channel: Any) -> None:
    """In a forked process: turn an inherited copy into a proxy, or into a channel of this
    process.
    """
    if isinstance(channel, ChannelProxy):
        channel.generation = -channels.generation
        return
    generation = abs(channel.generation)
    owner_address = next(
        (address for before, address in channels.lineage if generation < before), None
    )
    if owner_address is None:
        if channel.buffer:
            channel.buffer = deque(map(unpack_item, channel.buffer), channel.capacity)
        sign = -1 if channel.closed else 1
        channel.become(channels.Channel, None, sign * channels.generation)
        return
    if isinstance(channel, OwnedChannel) and channel.rare_state.transport in inherited_transports:
        # The transport is not that of a pool that had ended before the fork.
        number = channel.rare_state.number
    elif generation < _MAX_GENERATIONS and id(channel) < 1 << _ADDRESS_BITS:
        number = _INHERITED_BIT | generation << _ADDRESS_BITS | id(channel)
    else:
        raise RuntimeError(
            f"{channel!r} is part of the snapshot, but the drone cannot address the original: "
            "pass the channel as an argument"
        )
    pid = addresses.pid_of(owner_address)
    proxies.setdefault(
        (owner_address, number),
        make_proxy(channel, owner_address, number, f"the process of the snapshot (pid {pid})"),
    )


def is_inherited(number: int) -> bool:
    return bool(number & _INHERITED_BIT)


def number_of_inherited(transport: ChannelTransport, number: int) -> int:
    """Return the proper number of the original, or 0 if it is gone."""
    own_number = transport.aliases.get(number)
    if own_number is None:
        generation = (number & ~_INHERITED_BIT) >> _ADDRESS_BITS
        address = number & ((1 << _ADDRESS_BITS) - 1)
        original = _originals.get((generation, address)) or _find_original(generation, address)
        own_number = transport.aliases[number] = (
            0 if original is None else transport.number_of(original)
        )
    return own_number


def _find_original(generation: int, address: int) -> Channel[Any] | None:
    for each in gc.get_objects():
        if isinstance(each, channels.Channel) and not each.is_remote:
            _originals[abs(each.generation), id(each)] = each
    original = _originals.get((generation, address))
    if original is None and gc.get_freeze_count():  # frozen objects are not listed
        gc.unfreeze()
        return _find_original(generation, address)
    return original
