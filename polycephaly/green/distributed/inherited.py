"""Channels that came with a fork: a drone is a snapshot of an image, and has a copy of each channel
that was there.

    snapshot ──fork──> drone: ch.put(1) ──older than this image──> remote end of the original ──its address──> home

A copy is of no use to anybody: so when a drone first uses it, it becomes a remote end of the
original. Its number is made of what the two have in common: the address in memory, and the
generation. The address is the original's as long as that lives; another channel that has it later
is of a later generation, since each fork begins one. So the home finds it, or finds that it is no
more, by looking through its objects, once for all that were there at the snapshot.

In a process that the program itself has forked, they are channels of its own, in which nobody
waits."""

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
"""By generation and address: those that were found at the last look."""


def settle(channel: Any) -> None:
    """In a forked image: makes a copy what it is from now on."""
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
    if (
        isinstance(channel, OwnedChannel) and channel._extra.post in of_parents
    ):  # not one of a pool that had ended before
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
    """The proper number of the original; 0 if it is no more."""
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
    if found is None and gc.get_freeze_count():  # such objects are not listed
        gc.unfreeze()
        return _look(made, address)
    return found
