"""`Graph`: the graph that `flow` has made, as text for Mermaid or Graphviz.

    flow ── for each node: number, label, numbers of its inputs ──> _nodes, the last `MAX_NODES`
    Graph(promise) ── upstream, by `_nodes` and by pending promises ──> .mermaid(), .dot()

The records keep no promise and no value alive. If the promise of a node is gone, the node counts as
done unless a failure was recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple
from weakref import ref

from ..promises.promise import Promise, stored_error
from ..runtime.checks import brief
from ..timeline.spans import short_name
from .task_promise import TaskPromise, facts_of

MAX_NODES = 20_000
"""Number of nodes whose inputs are remembered: about 5 MB."""

_FILL_COLORS = {
    "waiting": "#f2f2f2",
    "ready": "#fff3c4",
    "running": "#cfe3ff",
    "done": "#d5f0d5",
    "rejected": "#f8cfcf",
    "cancelled": "#e0d0e8",
}
WAITING, READY, RUNNING, DONE, REJECTED, NODE_CANCELLED = _FILL_COLORS


class Node(NamedTuple):
    """One call, or a promise that is no call (``number`` is 0 or less).

    Attributes
    ----------
    number
        Number of the call.
    label
        Name of the function.
    state
        "waiting" (for inputs), "ready", "running", "done", "rejected" or "cancelled".
    drone
        Name of the drone, "" if not known.
    inputs
        Numbers of the nodes that the call takes values from.
    """

    number: int
    label: str
    state: str
    drone: str
    inputs: tuple[int, ...]


_nodes: deque[tuple[int, str, tuple[int, ...], ref[Promise[Any]]]] = deque(maxlen=MAX_NODES)
_failed: deque[tuple[int, str]] = deque(maxlen=MAX_NODES)
"""Number and state of nodes that have no value, and will have none."""


def record_node(
    number: int, label: str, input_numbers: tuple[int, ...], promise: Promise[Any]
) -> None:
    """Remember the call of `promise` as a node."""
    _nodes.append((number, label, input_numbers, ref(promise)))


def record_failure(number: int, cancelled: bool) -> None:
    """Remember that a node has no value, and will have none."""
    _failed.append((number, NODE_CANCELLED if cancelled else REJECTED))


class Graph:
    """The nodes that `promises` depend on, as of now.

    ``str()`` is `mermaid`. Notebooks that support Mermaid show the picture.

    Parameters
    ----------
    *promises
        Promises of pending or finished calls.
    many
        Maximum number of nodes. Those nearest to `promises` are shown.

    Raises
    ------
    TypeError
        If an argument is not a promise.
    ValueError
        If `many` is below 1.

    Notes
    -----
    The last 20,000 calls of all `flow` functions are known. Dependencies by way of `gather`, `then`
    or promises that are no calls are shown while these are pending. A graph may be used from any
    thread.

    Examples
    --------
    >>> import polycephaly as poly
    >>> double = poly.flow(lambda x: 2 * x)
    >>> with poly.Pool(1):
    ...     eight = double(double(2))
    >>> [(node.state, len(node.inputs)) for node in poly.Graph(eight).nodes]
    [('done', 0), ('done', 1)]
    """

    def __init__(self, *promises: Promise[Any], many: int = 200) -> None:
        for each in promises:
            if not isinstance(each, Promise):
                raise TypeError(f"Graph takes promises, not {brief(each)}")
        if many < 1:
            raise ValueError(f"many must be at least 1, not {many}")
        found = list(islice(_upstream(promises), many + 1))
        self.whole = len(found) <= many
        """Whether the graph has all nodes."""
        self.nodes = sorted(found[:many])
        """The nodes, as `Node`; inputs come before the nodes that take them."""

    def mermaid(self) -> str:
        """Return text for Mermaid, which GitHub, GitLab, Jupyter and https://mermaid.live draw."""
        lines = ["flowchart TD"]
        for node in self.nodes:
            lines.append(f'    {_name(node.number)}["{_escaped(_text(node))}"]:::{node.state}')
        lines += [f"    {start} --> {end}" for start, end in self._edges()]
        lines += [] if self.whole else ['    more["..."]']
        used = dict.fromkeys(node.state for node in self.nodes)
        lines += [
            f"    classDef {state} fill:{_FILL_COLORS[state]},stroke:#555,color:#111"
            for state in used
        ]
        return "\n".join(lines)

    def dot(self) -> str:
        """Return text for Graphviz: ``dot -Tsvg``."""
        lines = [
            "digraph flow {",
            '    node [shape=box, style="rounded,filled", fontname="sans-serif"];',
        ]
        for node in self.nodes:
            text = _text(node).replace("\\", "\\\\").replace('"', '\\"')
            color = _FILL_COLORS[node.state]
            lines.append(f'    {_name(node.number)} [label="{text}", fillcolor="{color}"];')
        lines += [f"    {start} -> {end};" for start, end in self._edges()]
        lines += [] if self.whole else ['    more [label="..."];']
        return "\n".join([*lines, "}"])

    def _edges(self) -> Iterator[tuple[str, str]]:
        known = {node.number for node in self.nodes}
        for node in self.nodes:
            for each in node.inputs:
                if each in known:
                    yield _name(each), _name(node.number)

    def __str__(self) -> str:
        return self.mermaid()

    def __repr__(self) -> str:
        states = [node.state for node in self.nodes]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        return f"<Graph of {len(self.nodes)}{'' if self.whole else ' and more'} nodes: {counts}>"

    def _repr_markdown_(self) -> str:
        return f"```mermaid\n{self.mermaid()}\n```"


def _upstream(promises: Iterable[Promise[Any]]) -> Iterator[Node]:
    """Yield the nodes, the nearest first. A promise that is no call gets a number below 1."""
    # The promises first: one that is gone by then has recorded its failure.
    records = {number: (label, inputs, task()) for number, label, inputs, task in list(_nodes)}
    failed = dict(list(_failed))
    promise_numbers: dict[int, int] = {}
    seen: set[int] = set()
    todo: deque[Promise[Any] | int] = deque(promises)

    def number_of(promise: Any) -> int:
        if isinstance(promise, TaskPromise):
            return facts_of(promise).call_number
        return promise_numbers.setdefault(id(promise), -len(promise_numbers))

    while todo:
        each = todo.popleft()
        number = each if isinstance(each, int) else number_of(each)
        if number in seen:
            continue
        seen.add(number)
        name, needed, task = records.get(number, (None, None, None))
        promise: Any = task if isinstance(each, int) else each
        dependencies = () if promise is None else promise._dependencies()
        pending = [other for other in dependencies if isinstance(other, Promise)]
        facts = facts_of(promise) if isinstance(promise, TaskPromise) else None
        if needed is None:
            needed = () if facts is None else facts.input_numbers
        inputs = dict.fromkeys(needed)
        inputs |= dict.fromkeys(map(number_of, pending))
        todo += pending
        todo += inputs
        if promise is not None:
            label, drone = ("promise", "") if facts is None else (facts.label, facts.drone or "")
            yield Node(number, short_name(label), _state(promise), drone, tuple(inputs))
        elif name is not None:
            state = failed.get(number, DONE)
            yield Node(number, short_name(name), state, "", tuple(inputs))


def _state(promise: Promise[Any]) -> str:
    if promise.done():
        if promise.cancelled():
            return NODE_CANCELLED
        return DONE if stored_error(promise) is None else REJECTED
    if promise.running():
        return RUNNING
    is_call = isinstance(promise, TaskPromise)
    return WAITING if promise._dependencies() or not is_call else READY


def _name(number: int) -> str:
    return f"n{number}" if number > 0 else f"p{-number}"


def _text(node: Node) -> str:
    named = f"{node.label} {node.number}" if node.number > 0 else node.label
    return f"{named} on {node.drone}" if node.drone else named


def _escaped(text: str) -> str:
    from html import escape  # not with each pool: it takes a millisecond

    return escape(text, quote=False).replace('"', "&quot;").replace("#", "#35;")
