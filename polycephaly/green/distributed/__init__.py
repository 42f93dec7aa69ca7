"""Channels in several images: a channel that is sent away stays at home, and works elsewhere
through remote ends.

    image A: owner.py    the channel itself, its lines  <──OFFER, DEMAND── remote end: proxy.py   image B
               ├─ transaction.py     one sender, one receiver, exactly once
               ├─ credit.py   its buffer, and who may fill it
               └─ handlers.py    what image B says                           opcodes.py: all that can be said
    in each image: transport.py, its sockets, looked after by the scheduler's owner; connection.py, a connection;
    packed.py, items on their way; ends.py, ends that are counted; inherited.py, channels that came with a fork

The home is the image where the channel was made: a drone that makes one and returns it is where it
lives. Images are connected with each other directly; what goes between two drones crosses a third
image only if the channel lives there."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ...wire import addresses
from ..scheduler import scheduler
from . import handlers as handlers
from .credit import bring_home
from .ends import Receiver, Sender, new_end
from .proxy import remote_end
from .transport import the_post

if TYPE_CHECKING:
    from ..channel import Channel

__all__ = ["Receiver", "Sender", "export", "new_end", "remote_end"]


def export(channel: Channel[Any]) -> Any:
    """How a channel of this image is pickled. From any thread."""
    from ..channel import Channel, _Buffered
    from .owner import OwnedChannel

    if type(channel) not in (Channel, _Buffered) and not isinstance(channel, OwnedChannel):
        raise TypeError(
            f"{type(channel).__qualname__}: only Channel itself can be sent to another image"
        )
    post = the_post()
    number = post.number_of(channel)
    scheduler.post(partial(bring_home, channel, post, number))
    return remote_end, (post.address, number, channel.capacity, addresses.name_here)
