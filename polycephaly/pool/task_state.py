"""The states of a task. That all tasks of a pool are where their states say is checked by
validation.py.

    state     where the task is                     what comes next
    --------  ------------------------------------  -----------------------------------------------
    INBOUND   in the inbox, or about to come        the loop takes it: QUEUED
    WAITING   in `awaiting_inputs`, and then, with  the loop takes it from the inbox: QUEUED
              all inputs, in the inbox
    QUEUED    in one of the queues                  a drone takes it: SENT; another process takes
                                                    it: LEASED; it takes values that are not there
                                                    yet: PARKED
    PARKED    behind a kept value (directory.py)    the value has come: QUEUED
    SENT      in `in_flight` of one drone           answered: ENDING; returned, or its drone died
                                                    before it began: QUEUED; an input was lost:
                                                    WAITING
    LEASED    with a joined host (leases.py)        answered: ENDING; returned: QUEUED
    DELAYED   in `delayed`, with its time           its time has come: QUEUED
    ENDING    nowhere: its promise is settled, or   its drone has not begun it, or `retries` allow
              about to be                           another attempt: DELAYED or QUEUED

A call begins as INBOUND or WAITING. From each state, a task that is cancelled, or that has no drone
or pool any more, comes to ENDING; one that is SENT only when its drone has stopped it. Only the
loop's thread changes a state.
"""

from __future__ import annotations

from enum import Enum


class TaskState(Enum):
    INBOUND, WAITING, QUEUED, PARKED, SENT, LEASED, DELAYED, ENDING = range(8)


# A global is looked up faster than a member.
INBOUND, WAITING, QUEUED, PARKED, SENT, LEASED, DELAYED, ENDING = TaskState
