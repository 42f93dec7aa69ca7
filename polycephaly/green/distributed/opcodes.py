"""What two images say to each other about channels: one table.

    each message    kind, channel, number, bytes of the payload (HEAD), then the payload

    kind       direction   number   meaning                                                    payload
    HELLO      both                 who I am; the first message                                JSON
    OFFER      -> home     op       I send this                                                the select's number, item
    DEMAND     -> home     op       I would receive                                            the select's number
    ITEM       -> home              I send this, into a place that I had been granted          item
    WITHDRAW   -> home     op       not any more
    TAKE       -> home     op       I have what you gave: it has happened
    PASS       -> home     op       not I: my select has chosen another, or is over
    RETURN     -> home              I had this, and who was to have it is gone: for another    item
    HELD       -> home     op       my select waits for your COMMIT or RELEASE
    BACK       -> home     places   I give back so many granted places
    CLOSE      -> home              close it
    OPENED     -> home     end      I hold this end of it                                      whose it is now, and was
    ENDED      -> home     end      it is closed
    LET_GO     -> home     end      nothing here refers to it any more                         whose it was
    ASTRAY     -> home     end      I have sent it on, and it has come to nobody               whose it was, and why
    DONE       home ->     op       a receiver has what you sent
    WITHDRAWN  home ->     op       nobody has it, nobody will
    GIVE       home ->     op       take this: answer TAKE or PASS                             item
    HOLD       home ->     op       can you? answer HELD or PASS
    COMMIT     home ->     op       you were held: it has happened
    RELEASE    home ->     op       you were held: it has not
    REFUSED    home ->     op       it has not, for this reason; op 0: the channel is closed   pickled exception
    CREDIT     home ->     places   so many items you may send as ITEM
    ALIAS      home ->     other    the channel, which you know by an inherited number, has this one
    RECALL     home ->              give back what you have not used
    BYE        both                 I end, and have said all

A select's number is 0 for a plain send or receive. An item is a pickle; who receives it opens it,
and nobody else."""

from __future__ import annotations

from struct import Struct

__all__ = ["HEAD", "NAMES", "SELECT"]

HEAD = Struct("<BQQQ")
SELECT = Struct("<Q")

NAMES = (
    "HELLO", "OFFER", "DEMAND", "ITEM", "WITHDRAW", "TAKE", "PASS", "RETURN", "HELD", "BACK", "CLOSE", "OPENED",
    "ENDED", "LET_GO", "ASTRAY", "DONE", "WITHDRAWN", "GIVE", "HOLD", "COMMIT", "RELEASE", "REFUSED", "CREDIT",
    "ALIAS", "RECALL", "BYE",
)  # fmt: skip

(
    HELLO, OFFER, DEMAND, ITEM, WITHDRAW, TAKE, PASS, RETURN, HELD, BACK, CLOSE, OPENED,
    ENDED, LET_GO, ASTRAY, DONE, WITHDRAWN, GIVE, HOLD, COMMIT, RELEASE, REFUSED, CREDIT, ALIAS, RECALL, BYE,
) = range(1, len(NAMES) + 1)  # fmt: skip
