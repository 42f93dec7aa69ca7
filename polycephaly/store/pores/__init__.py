"""Pores: memory, or an open file, owned by one process, used by others, with messages to the owner.

    owner                                     holder: a drone, the controller, a drone's drone
    Pore(shape, dtype)                        the same pore, received as an argument or in a result
      memfd, sealed ──── descriptor, by SCM_RIGHTS ──> the same pages, mapped
      Inbox <─ PoreIOThread <── a Unix stream for each holder ── Holder <── tell(message),
        └──> for message in pore: the driver                                write(offset, data)

After LING's pores: a native resource is passive, has one owner, sends messages instead of calling
back, and is closed when its owner ends, however that happens.

    pore.py       Pore: the object that users hold, in every process
    inbox.py      the owner's side of one pore: accepts holders, and keeps their messages
    io_thread.py  the owner's native thread, with the event loop of all its pores
    holder.py     a holder's side: the connection, the mapping, detection of the pore's closing
    frames.py     the format of the data on a connection

See docs/decisions/0008-pores.md for the ownership rules and the interleavings.
"""

from __future__ import annotations

from .frames import Message
from .pore import Pore

__all__ = ["Message", "Pore"]
