"""Channels between processes: a channel stays where it was made, and works elsewhere by proxies.

    process A: owner.py  the channel itself, its queues  <──OFFER, DEMAND──  proxy.py  process B
               ├─ transaction.py     one sender, one receiver, exactly once
               ├─ credit.py          its buffer, and the processes that may fill it
               └─ handlers.py        messages of process B (opcodes.py lists all messages)
    in each process: transport.py, its sockets; connection.py, one connection; packed.py, items
    in transit; ends.py, ends that are counted; inherited.py, channels that came with a fork

The *owning process* of a channel is the process that made it. If a drone makes a channel and
returns it, that is the drone. Processes connect to each other directly: a message between two
drones crosses a third process only if the channel lives there.

See docs/decisions/0007-channels-between-processes.md.
"""

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
    """Return how to pickle a channel of this process. Any thread may call this."""
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
