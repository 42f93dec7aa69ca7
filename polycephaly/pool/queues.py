"""Queues of tasks: by priority, then in the order of the calls."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from contextlib import suppress
from typing import TypeVar

from .task import Task

T = TypeVar("T")


def insert_in_order(queue: deque[Task], task: Task, *, first: bool = False) -> None:
    """Insert `task` behind the tasks of the same or a higher priority; if `first`, only behind
    those of a higher priority.
    """
    if first and (not queue or queue[0].priority <= task.priority):
        queue.appendleft(task)
    elif first:
        queue.insert(bisect_left(queue, -task.priority, key=_descending), task)
    elif not queue or queue[-1].priority >= task.priority:
        queue.append(task)
    else:
        queue.insert(bisect_right(queue, -task.priority, key=_descending), task)


def _descending(task: Task) -> int:
    return -task.priority


def drain(queue: deque[T]) -> list[T]:
    """Take all items from `queue`, one by one. An item that another thread adds meanwhile is taken,
    or stays.
    """
    items = []
    with suppress(IndexError):
        while True:
            items.append(queue.popleft())
    return items


def drop_settled(queue: deque[Task]) -> list[Task]:
    """Remove the settled tasks from `queue`, to which other threads only append meanwhile, and
    return them.
    """
    tasks = [queue.popleft() for _ in range(len(queue))]
    settled = [task for task in tasks if task.promise.done()]
    queue.extendleft(task for task in reversed(tasks) if not task.promise.done())
    return settled
