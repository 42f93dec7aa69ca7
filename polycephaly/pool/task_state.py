"""The states of a task. That all tasks of a pool are where their states say is checked by
validation.py.

    state     where the task is                     what comes next
    --------  ------------------------------------  -----------------------------------------------
    WAITING   in `awaiting_inputs`                  all inputs have values: QUEUED
    QUEUED    in the inbox, or in one of the        a drone takes it: SENT; another process takes
              queues                                it: LEASED; it takes values that are not there
                                                    yet: PARKED
    PARKED    behind a kept value (directory.py)    the value has come: QUEUED
    SENT      in `in_flight` of one drone           answered: ENDING; returned, or its drone died
                                                    before it began: QUEUED; an input was lost:
                                                    WAITING
    LEASED    with a joined host (leases.py)        answered: ENDING; returned: QUEUED
    DELAYED   in `delayed`, with a timer            its time has come: QUEUED
    ENDING    nowhere: its promise is about to be   a `Retry` allows another attempt: DELAYED or
              settled                               QUEUED

A call begins as WAITING or QUEUED. From each state, a task that is cancelled, or that has no drone
or pool any more, comes to ENDING. Only the loop's thread changes a state, except that a caller, or
the thread that settles the last input, makes a task QUEUED as it puts that into the inbox.
"""

from __future__ import annotations

from enum import Enum


class TaskState(Enum):
    WAITING, QUEUED, PARKED, SENT, LEASED, DELAYED, ENDING = range(7)


# A global is looked up faster than a member.
WAITING, QUEUED, PARKED, SENT, LEASED, DELAYED, ENDING = TaskState
