"""Channels between processes: a channel stays where it was made, and works elsewhere by proxies.

    process A: owner.py  the channel itself, its queues  <──OFFER, DEMAND──  proxy.py  process B
               ├─ transaction.py     one sender, one receiver, exactly once
               └─ handlers.py        messages of process B (opcodes.py lists all messages)
    in each process: transport.py, its connections; packed.py, items in transit; ends.py, ends
    that are counted; inherited.py, channels that came with a fork

The *owning process* of a channel is the process that made it. If a drone makes a channel and
returns it, that is the drone. Processes connect to each other directly: a message between two
drones crosses a third process only if the channel lives there.

See docs/decisions/0007-channels-between-processes.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...wire import addresses
from ..channel import Channel
from ..scheduler import scheduler
from . import ends, handlers, proxy
from .ends import new_end
from .inherited import convert_inherited
from .owner import OwnedChannel, make_owned
from .proxy import unpickle_channel
from .transport import LOSS_CALLBACKS, get_transport

__all__ = ["convert_inherited", "get_transport", "new_end", "reduce_channel"]

# The owner side first, so that its outcomes come before errors of the proxies.
LOSS_CALLBACKS += [handlers.on_loss, ends.on_loss, proxy.on_loss]


def reduce_channel(channel: Channel[Any]) -> Any:
    """Return how to pickle a channel of this process. Any thread may call this."""
    if type(channel) not in (Channel, OwnedChannel):
        raise TypeError(
            f"a {type(channel).__qualname__} cannot be sent to another process: "
            "only Channel itself can"
        )
    transport = get_transport()
    number = transport.number_of(channel)
    scheduler.post(partial(make_owned, channel, transport, number))
    return unpickle_channel, (transport.address, number, channel.capacity, addresses.own_name)
