"""The messages about channels between two processes.

    each message    kind, channel, number, bytes of the payload (HEADER), then the payload

The table below has all kinds. A select number is 0 for a plain send or receive. An item is a
pickle; only the process that receives an item unpickles it.

See docs/decisions/0007-channels-between-processes.md for the protocol.
"""

from __future__ import annotations

from struct import Struct

HEADER = Struct("<BQQQ")
SELECT = Struct("<Q")

# kind       direction  number meaning                                    payload
# HELLO      both              identifies the process; the first message  JSON
# OFFER      -> owner   op     a thread sends this                        select number, item
# DEMAND     -> owner   op     a thread wants to receive                  select number
# ITEM       -> owner          fills a place that was granted             item
# WITHDRAW   -> owner   op     the thread does not wait any more
# TAKE       -> owner   op     the item of GIVE is received: it has happened
# PASS       -> owner   op     declined: the select has chosen another, or is over
# RETURN     -> owner          its receiver is gone: for another one      item
# HELD       -> owner   op     the select waits for COMMIT or RELEASE
# REFUND     -> owner   places gives back that many granted places
# CLOSE      -> owner          close the channel
# OPENED     -> owner   end    this process holds the end                 tokens: new, previous
# ENDED      -> owner   end    the end is closed                          tokens, not used
# DROPPED    -> owner   end    nothing here refers to the end any more    its token
# MISPLACED  -> owner   end    sent with a call that came to nothing      its token, reason
# DONE       owner ->   op     a receiver, or the buffer, has the item
# WITHDRAWN  owner ->   op     no receiver has the item, none will
# GIVE       owner ->   op     take this: answer TAKE or PASS             item
# HOLD       owner ->   op     hold the select: answer HELD or PASS
# COMMIT     owner ->   op     the held operation has happened
# RELEASE    owner ->   op     the held operation has not happened
# REFUSED    owner ->   op     not happened; op 0: the channel is closed  pickled exception
# CREDIT     owner ->   places that many items may be sent as ITEM
# ALIAS      owner ->   number that of the channel known by an inherited number
# RECALL     owner ->          give back the unused places
# BYE        both              this process ends, and has sent everything
(
    HELLO, OFFER, DEMAND, ITEM, WITHDRAW, TAKE, PASS, RETURN, HELD, REFUND,
    CLOSE, OPENED, ENDED, DROPPED, MISPLACED, DONE, WITHDRAWN, GIVE, HOLD,
    COMMIT, RELEASE, REFUSED, CREDIT, ALIAS, RECALL, BYE,
) = range(1, 27)  # fmt: skip

NAMES = {kind: name for name, kind in [*globals().items()] if isinstance(kind, int)}
