"""`Timeline`: the work of drones and green threads, and its times."""

from __future__ import annotations

import os

from .contents import Contents

MAX_NOTEBOOK_BYTES = 1 << 21  # of a picture: a notebook keeps all outputs


class Timeline(Contents):
    """The work of drones and green threads at one moment, with its times.

    `Pool.timeline`, `Drone.timeline` and `green.timeline()` return one. Tasks that run then are
    shown as running; later ones are not included. ``str()`` gives a chart, a table of times and the
    bottleneck in a sentence; `save` writes a page, a picture or a trace. ``a + b`` is one timeline
    of both; if both have a drone of the same name, the second one gets a number.

    Attributes
    ----------
    spans
        The spans, in the order in which tasks were answered; then those of green threads.
    waiting
        Number of tasks in the queue that were not yet sent to a drone.
    cores
        Number of cores of the machine that the drones were on; None if that is not known, as on a
        cluster, or of timelines that were added.
    native_threads
        How many threads the native libraries of a drone may use (see `Pool`); 0 if they are left
        alone, None if that is not known, as on a cluster.
    spans_lost
        Number of earlier spans of tasks, of all drones of the pool, that are no longer kept.
    threads_lost
        Number of calls of green threads that were too many to be kept.

    Notes
    -----
    Any thread may use it. Calls of less than 0.1 ms that were answered together are one span, from
    the first to the last; a call between them that was answered by itself lies within that. A pool
    keeps the last 30,000 spans, and counts the earlier ones in `spans_lost`.

    Examples
    --------
    >>> import polycephaly as poly
    >>> with poly.Pool(2, name="two") as pool:
    ...     total = sum(pool.map(abs, range(-99, 1)))
    >>> timeline = pool.timeline
    >>> sum(span.calls for span in timeline.spans), {span.name for span in timeline.spans}
    (100, {'abs'})
    """

    def save(self, path: str | os.PathLike[str], *, title: str = "Timeline") -> None:
        """Write the timeline to a file, in the format given by the suffix of its name.

        Parameters
        ----------
        path
            ``.html`` is a single page to zoom and hover in, ``.svg`` is a picture, ``.json`` is a
            trace for https://ui.perfetto.dev or ``chrome://tracing``.
        title
            Title of the page or picture.

        Raises
        ------
        ValueError
            For any other suffix.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> import os, polycephaly as poly, tempfile
        >>> with tempfile.TemporaryDirectory() as folder, poly.Drone() as drone:
        ...     drone.doit("sum(range(1000))")
        ...     drone.timeline.save(f"{folder}/run.json")
        ...     os.listdir(folder)
        499500
        ['run.json']
        """
        from .files import write

        write(self, path, title)

    @property
    def bottleneck(self) -> str:
        """The reason that the run was not faster, in one sentence."""
        from .bottleneck import bottleneck_of

        return bottleneck_of(self)

    def text(self, width: int | None = None) -> str:
        """Return the text of ``str()``.

        Parameters
        ----------
        width
            Number of columns; by default those of the terminal, or 100.
        """
        from .text import text

        return text(self, width)

    def _repr_html_(self) -> str:
        """Return the picture for a notebook, or the text if the picture would be too large."""
        from base64 import b64encode
        from html import escape

        from .svg import svg_of

        picture = svg_of(self, "Timeline") if self else b""
        if not 0 < len(picture) <= MAX_NOTEBOOK_BYTES:
            return f"<pre>{escape(str(self))}</pre>"
        source = f"data:image/svg+xml;base64,{b64encode(picture).decode()}"
        return f'<img alt="{escape(self.bottleneck)}" src="{source}">'

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        from .format import count

        spans = count(len(self.spans), "span")
        return f"<Timeline of {count(len(self.drones), 'drone')}, {spans}>"
