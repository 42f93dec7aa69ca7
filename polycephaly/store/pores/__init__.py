"""Pores: memory, or an open file, that one image owns and others use, and what they tell the owner
of it.

    owner                                              holder: a drone, the controller, a drone of a drone
    ─────                                              ──────
    Pore(shape, dtype)                                 the same pore, come as an argument, or in a result
      memfd, sealed ──── its descriptor, by SCM_RIGHTS ──> the same pages, mapped
      Desk <─ Porter <── a unix stream for each holder ─── Holder <── tell(message), write(offset, data)
        └──> for message in pore: the driver

After LING's pores: a native resource is passive, has one owner, sends messages instead of calling
back, and is closed when its owner ends, however that happens.

    pore.py      Pore: what users hold, in every image inbox.py      the owner's side of one pore:
    who is connected, what came and was not read yet io_thread.py    the owner's native thread for
    all its pores: lets holders in, takes what they tell holder.py    a holder's side: the
    connection, the mapping, how it learns that the pore is closed frames.py    what goes through a
    connection

Who owns what. The owner has the listening socket, one end of each connection, and the memfd; a
holder has the other end; of a file it has a descriptor, of memory none. A forked child closes its
copies of them (`launch.lifeline.OURS`; only one that another thread has just been given, and has
not put there yet, would slip through): a child of the owner's, or of a holder's, is a holder that
has not connected yet, whatever objects it inherited. The memory itself is mapped for as long as
anybody looks at it: a view that was handed out is never taken away, and its size is sealed. So
there is no access to it that could fail; what fails is the next operation on the pore. A holder's
descriptor of a file is not taken away either, since its number could be somebody else's by then: it
goes with the holder's pore.

What can come at the same time:

* tell and close. The owner shuts the connections for reading, reads what is in them, says good-bye
  and closes. A tell is either in what was read, and will be received, or fails.
* tell and the owner's death. The kernel closes the connections; who waits for room is woken. What
  was told and not received is lost with the owner, as nobody is there to be told it.
* tell and the teller's death. What it told is there and will be received; half a frame is dropped.
* map and close. Whoever is not let in finds the connection refused or closed, which is the same as
  being told. Who was let in has the memory.
* two closes, or a close and the loss of the last reference: one of them takes the desk's only
  token, and acts.
* fork and anything. The child has none of the descriptors. The porter's thread is not there, and its pores are the
  parent's. The addresses are random and not used again, so a child or a late holder cannot come to another pore, and
  no process number tells who is whom.
"""

from __future__ import annotations

from .frames import Message
from .pore import Pore

__all__ = ["Message", "Pore"]
