"""`Profile`: the functions in which the drones of a pool, and this process, spend their time.

Profile.__enter__ ──PROFILE, hertz──> each drone: a thread samples its tasks (runtime/sampler.py)
Profile.__exit__  ──PROFILE, 0──────> control thread, or main thread between tasks
                  <──PROFILE: samples as JSON──┘   settled by `StackRequests.on_answer`
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, Self

from ..errors import Malformed
from ..promises.combining import race
from ..promises.promise import Signal, fulfill
from ..runtime.checks import check_at_least
from ..runtime.clock import monotonic
from ..runtime.sampler import MAX_HERTZ, StackSampler
from ..runtime.tuning import tuning
from ..timeline.flame import CONTROLLER, Samples, of_drones, own_samples, page_of, speedscope_of
from ..wire.messages import PROFILE
from .dispatcher import Dispatcher
from .interfaces import State
from .stack_requests import DroneRequest

ENDED = "the drone ended before the block"
TOP = 10
"""Functions in the text of a profile."""


class Profile:
    """The functions in which the time of a ``with pool.profile()`` block went: see `Pool.profile`.

    ``print(profile)`` shows the ten functions with most samples of their own.

    Attributes
    ----------
    hertz : int
        Samples a second.
    samples : dict
        By the name of each drone, and ``"controller"``: the number of samples of each stack, a
        tuple of (function, file, line), outermost first. Empty before the end of the block. A
        second block begins anew.
    missing : dict of str to str
        The drones whose samples are missing, and why.
    """

    def __init__(self, dispatcher: Dispatcher, hertz: int) -> None:
        self.hertz = check_at_least("hertz", hertz, 1)
        if hertz > MAX_HERTZ:
            raise ValueError(f"hertz must be at most {MAX_HERTZ}, not {hertz}")
        self.samples: dict[str, Samples] = {}
        self.missing: dict[str, str] = {}
        self._dispatcher = dispatcher

    def __enter__(self) -> Self:
        dispatcher = self._dispatcher
        dispatcher.check_open()
        if not dispatcher.profile_lock.acquire(blocking=False):
            raise RuntimeError(f"{dispatcher.config.name} is being profiled: one profile at a time")
        try:
            thread = threading.get_ident()
            self._sampler = StackSampler(self.hertz, lambda: [(thread, "")])
        except BaseException:
            dispatcher.profile_lock.release()
            raise
        self.samples, self.missing = {}, {}
        dispatcher.post(self._begin)
        return self

    def __exit__(self, *error: object) -> None:
        dispatcher = self._dispatcher
        asked: Signal[list[SamplesRequest]] = Signal()
        try:
            dispatcher.post(self._end, asked)
            self._sampler.stop(wait=True)
            self._collect(asked)
        finally:
            dispatcher.profile_lock.release()
        self.samples[CONTROLLER] = read_samples(self._sampler.report())

    # -- holding the reactor's lock ----------------------------------------------------------------

    def _begin(self) -> None:
        dispatcher = self._dispatcher
        dispatcher.profile_hertz, dispatcher.profiled = self.hertz, []
        for handle in dispatcher.handles:
            if State.STARTING < handle.state < State.STOPPING:
                dispatcher.profile(handle)  # the others follow when they are up

    def _end(self, asked: Signal[list[SamplesRequest]]) -> None:
        dispatcher = self._dispatcher
        dispatcher.profile_hertz = 0
        requests = [SamplesRequest(dispatcher, handle) for handle in dispatcher.profiled]
        for request in requests:
            dispatcher.stack_requests.send(request)
        dispatcher.reactor.deliver(partial(fulfill, asked, requests))

    # -- the thread of the block -------------------------------------------------------------------

    def _collect(self, asked: Signal[list[SamplesRequest]]) -> None:
        deadline = monotonic() + tuning.profile_answer_seconds
        late = f"no answer within {tuning.profile_answer_seconds:g} s"
        with suppress(TimeoutError):
            race(asked, self._dispatcher.over).result(tuning.profile_answer_seconds)
        if not asked.done():
            why = ENDED if self._dispatcher.has_ended else late
            self.missing = {handle.name: why for handle in self._dispatcher.profiled}
            return
        for request in asked.result():
            name, why = request.handle.name, ENDED
            try:
                samples = request.result(max(0.0, deadline - monotonic()))
            except TimeoutError:
                samples, why = None, late
            if samples is None:
                self.missing[name] = why
            else:  # drones that followed each other may have the same name
                self.samples.setdefault(name, Counter()).update(samples)

    # -- the result --------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, title: str = "Profile") -> None:
        """Write the profile to a file, in the format given by the suffix of its name.

        Parameters
        ----------
        path
            ``.html`` is a flame graph as a single page, ``.json`` a file for
            https://www.speedscope.app.
        title
            Title of the page, or name of the profile.

        Raises
        ------
        ValueError
            For any other suffix.
        OSError
            If the file cannot be written.
        """
        path = Path(path)
        match path.suffix.lower():
            case ".html":
                contents = self._page(title)
            case ".json":
                contents = speedscope_of(self.samples, self.hertz, title)
            case _:
                raise ValueError(f"a profile is saved as .html or .json, not as {path.name!r}")
        path.write_bytes(contents)

    def _page(self, title: str) -> bytes:
        note = "".join(f"Without {each}: {why}. " for each, why in self.missing.items())
        return page_of(self.samples, self.hertz, title, note)

    def _repr_html_(self) -> str:
        """Return the flame graph, in a frame of its own, for a notebook."""
        page = escape(self._page("Profile").decode(), quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 480px; border: 0"></iframe>'

    def __str__(self) -> str:
        own = own_samples(of_drones(self.samples))
        total, drones = own.total(), len(self.samples.keys() - {CONTROLLER})
        lines = [f"Profile: {total:,} samples of {drones} drone{'s' * (drones != 1)}", ""]
        lines += ["samples    share  function"] if own else ["No task was running."]
        for (function, file), count in own.most_common(TOP):
            lines.append(f"{count:7,}  {count / total:7.1%}  {function}{f'  {file}' * bool(file)}")
        lines += [f"missing: {name}: {why}" for name, why in self.missing.items()]
        return "\n".join(lines)


class SamplesRequest(DroneRequest[Samples]):
    """A request to end sampling."""

    question = (PROFILE, 0)

    def read(self, answer: dict[str, Any]) -> Samples:
        return read_samples(answer)


def read_samples(report: dict[str, Any]) -> Samples:
    """Return the samples of a report of `StackSampler`. Raises `Malformed`."""
    samples: Samples = Counter()
    try:
        frames = [(str(name), str(file), int(line)) for name, file, line in report["frames"]]
        for stack, count in report["stacks"]:
            samples[tuple(frames[index] for index in stack)] += int(count)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise Malformed(f"a report without samples: {error!r}") from error
    return samples
