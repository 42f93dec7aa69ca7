"""Several drones behind one queue: `Pool`, which is also a `concurrent.futures.Executor`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..runtime.checks import check_at_least
from ..runtime.hidden import Hidden
from ..store.shared import Shared
from ..timeline import Timeline
from ..wire.output import Line
from .base import ExecutorBase
from .collecting import take_news, take_timeline
from .config import (
    PoolConfig,
    check_cwd,
    check_env,
    check_fresh,
    check_hang_timeout,
    check_initializer,
    check_memory,
    check_names,
    check_native_threads,
    check_output,
    check_resources,
    check_retries,
    check_start,
    check_timeout,
)
from .dispatcher import Dispatcher
from .drone import Drone
from .interfaces import TaskOptions
from .machine import find_machine
from .record import Cursor
from .stack_requests import ANSWER_SECONDS
from .status import describe_pool, drone_table

if TYPE_CHECKING:
    from .profile import Profile
    from .retry import Retry
    from .stacks import Stack

T = TypeVar("T")

_names = itertools.count(1)


class Pool(ExecutorBase):
    """Several drones behind one queue, forked from one snapshot of this process, taken now.

    A ``with`` block finishes all submitted tasks at the end. An exception in the block cancels
    them. An ``async with`` block, in asyncio or in a green thread, does the same and blocks no
    other task. A pool to which no reference is left finishes its tasks and ends. The end of the
    program finishes the tasks of a pool on which `submit` was called, as of the standard library's
    executor; without a ``with`` block, all other tasks end with the program.

    Parameters
    ----------
    drones
        Number of drones. None: as many as usable cores (by the affinity mask and the limits of
        control groups, rounded up), or one with ``engine="inline"``.
    max_workers
        Another name of `drones`, which code for the standard library's executors uses.
    name
        Name of the pool. None: ``pool-N``.
    start, cwd, initializer, initargs, timeout
        As for `Drone`.
    env
        As for `Drone`; or a callable from a drone's index to its variables. A fresh interpreter
        starts with those that are the same for all drones.
    width
        How many coroutine functions a drone runs at the same time, as green threads. All other
        tasks of a drone run one by one.
    output
        "forward" (each line that a drone prints goes to this process's streams, prefixed),
        "discard", or a callable that gets each line (a `str` with the attributes ``text``,
        ``drone``, ``stream`` and ``tag``), in a thread for output. Log records of drones are not
        output: they go to this process's loggers, each with its ``drone``, in the same thread.
    retries
        How often a task is run again if its drone dies while running it, or a `Retry`, for tasks
        that raise exceptions too.
    max_tasks
        Number of tasks after which a drone is replaced.
    max_memory
        Bytes, or a text such as "2G", of private memory for a drone and the processes it started. A
        drone that comes near the limit is replaced between two tasks. A drone that exceeds it is
        killed, and its running task lost: give `retries` too, if that may run again.
    max_queued
        How many tasks may wait for a drone. A call that submits one more waits for room. (Threads
        that find room at the same moment may each add one.)
    hang_timeout
        Seconds without a sign of life after which a drone with tasks is killed. The error has the
        frames of the task as its cause, unless the process was stopped. A drone that computes or
        sleeps shows signs of life. See `Drone.unresponsive`.
    report_waiting
        Seconds of one wait without processor time after which a drone with a task is reported. The
        drone is not killed, because a wait and a hang look alike. None: never. See `Drone.waiting`.
        A `breakpoint()` raises `RuntimeError` after this time, if this process has neither a
        terminal nor a notebook, and nobody has attached.
    on_death
        "replace" a drone that died, or "break" the pool, as the standard library's executor does.
    resources
        What is scarce on this machine and how much of it there is, as in ``{"db": 2, "gpu": 1}``:
        `options` says what a task needs of it, and no more tasks run at a time than that allows.
        With ``engine="ray"``, what Ray reserves for each drone.
    native_threads
        How many threads the native libraries of one drone may use: BLAS, OpenMP and the like. None:
        the number of usable cores divided by that of drones, rounded down, but at least 1. 0: they
        are left alone. A drone keeps the number that it started with, also after a `resize`.
        Libraries that this process has loaded are limited in the drones, not here. For those that a
        drone loads later, variables of its environment are set, such as ``OMP_NUM_THREADS``. What
        you have set, in the environment or by `env`, stays. For ``engine="local"`` only: Ray sets
        ``OMP_NUM_THREADS`` of its workers to their ``num_cpus``.
    post_mortem
        If True, the frames of a failed task are kept for `Promise.debug`, in a process that its
        drone forks; the drone goes on. Each drone keeps those of up to eight tasks at a time, until
        they were debugged or released, or the drone ends.
    fresh
        If True, the first call after the pool was idle takes a new snapshot, so that the drones see
        the data of this process as they are at the call. A pool is idle if no call is unsettled and
        no `map` unfinished. In IPython, Jupyter and at Python's own prompt, a snapshot is taken
        only if another cell or line runs since the last one. Calls of several threads at once share
        one. The `initializer` runs again, and what was pushed arrives; all else in the drones'
        namespaces is lost. While a kept value or the frames of a failed task (`post_mortem`) live,
        no snapshot is taken, with one warning. Neither by calls of one of the `drones`, or of
        the clients of a served pool. A call then costs what `refresh` does: see
        docs/performance.md.
    describe_items
        If False, the note of an error of `map` has only the index of the item, and not its
        shortened `repr`, for items that must not appear in logs. Clients of a served pool obey.
        Timelines then have no items of `green.map` and arguments of `green.call` in drones either.
    engine
        "local"; "inline": each task runs in this process, in the order of the calls, for debuggers,
        coverage and tests (then ``start``, ``env`` and ``cwd`` are refused); or "ray": drones are
        Ray actors, with copies of the contents of `__main__`, on any node of the cluster at
        ``address`` (as in Ray: "auto", "HOST:PORT", or None).
    **options
        For Ray: ``address``, ``num_cpus``, ``num_gpus``, ``memory``, ``runtime_env``,
        ``scheduling_strategy`` and the like, which are passed to Ray with each drone.

    Raises
    ------
    ValueError
        If a number or name is out of range, or the cluster lacks the resources; with `fresh`, if
        this process cannot be forked.
    OSError
        If the machine's limits do not allow the first drone, or descriptors for all, or no cluster
        is reached. If a limit stops a later drone, after the pool has begun, the pool breaks with
        this error as the cause.
    ImportError
        If the engine is not installed.

    Notes
    -----
    All methods may be called from any thread. `refresh` takes a new snapshot.

    Examples
    --------
    >>> import polycephaly as poly
    >>> with poly.Pool(2) as pool:
    ...     list(pool.map(abs, [-1, -2, -3]))
    [1, 2, 3]
    """

    _dispatcher: Dispatcher

    def __init__(
        self,
        drones: int | None = None,
        *,
        max_workers: int | None = None,
        width: int = 1,
        name: str | None = None,
        start: str | None = None,
        env: Mapping[str, str] | Callable[[int], Mapping[str, str]] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        output: str | Callable[[Line], object] = "forward",
        retries: int | Retry = 0,
        timeout: float | None = None,
        hang_timeout: float | None = None,
        report_waiting: float | None = 60.0,
        max_tasks: int | None = None,
        max_memory: int | str | None = None,
        max_queued: int | None = None,
        on_death: str = "replace",
        post_mortem: bool = False,
        fresh: bool = False,
        describe_items: bool = True,
        resources: Mapping[str, int] | None = None,
        native_threads: int | None = None,
        engine: str = "local",
        **options: Any,
    ) -> None:
        if drones is not None and max_workers is not None:
            raise TypeError(f"drones={drones} and max_workers={max_workers} are the same: give one")
        drones = max_workers if drones is None else drones
        if post_mortem and engine != "local":
            raise ValueError(
                "post_mortem=True keeps frames in forks of drones, for which the engine is "
                f"'local', not {engine!r}"
            )
        native_threads = check_native_threads(native_threads, engine)
        fresh = check_fresh(fresh, start, engine)
        if engine == "ray" and resources is not None:
            options["resources"], resources = resources, None
        machine = find_machine(engine, options)
        size = check_at_least("drones", machine.default_size() if drones is None else drones, 1)
        machine.check(size)  # before anything is made for each drone
        name = name or f"pool-{next(_names)}"
        if on_death not in ("replace", "break"):
            raise ValueError(f"on_death is 'replace' or 'break', not {on_death!r}")
        config = PoolConfig(
            size=size,
            name=name,
            drone_name=lambda index: f"{name}.{index}",
            start=check_start(start),
            env=check_env(env, size),
            cwd=check_cwd(cwd),
            initializer=check_initializer(initializer),
            initargs=Hidden(tuple(initargs)),
            output=check_output(output),
            width=check_at_least("width", width, 1),
            task_options=TaskOptions(check_timeout(timeout), check_retries(retries)),
            max_tasks=None if max_tasks is None else check_at_least("max_tasks", max_tasks, 1),
            max_memory=check_memory(max_memory),
            max_queued=None if max_queued is None else check_at_least("max_queued", max_queued, 1),
            hang_timeout=check_hang_timeout(hang_timeout),
            report_waiting=check_timeout(report_waiting, "report_waiting"),
            post_mortem=bool(post_mortem),
            fresh=fresh,
            describe_items=bool(describe_items),
            resources=check_resources(resources),
            native_threads=native_threads,
            on_death=on_death,
        )
        self._maps = {}
        self._machine, self._env = machine, env
        # Drones inherit this frame, and tools that log errors print the locals of all frames.
        del env, initargs
        self._dispatcher = Dispatcher(config, machine.open)
        self._dispatcher.maps = self._maps
        self._dispatcher.close_when_collected(self)
        self._dispatcher.wait_begun()

    # -- tasks -------------------------------------------------------------------------------------

    def share(self, obj: T) -> Shared[T]:
        """Copy `obj` into shared memory once, for any number of calls.

        Only arrays and other buffers in `obj` are mapped without a copy: all else, such as a dict
        or a list, is unpickled by each call that takes the handle. For these, use a global that
        exists before the pool, or an `initializer`. Errors of pickling `obj` are raised.

        Returns
        -------
        Shared
            A handle that stands for `obj` among the arguments of calls.

        Raises
        ------
        MemoryError
            If the pool would share more than half of the machine's memory. Results and arguments in
            flight count too.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     table = pool.share({"a": 1})
        ...     pool.doit(lambda t: t["a"], table)
        1
        """
        self._dispatcher.check_open()
        shared: Shared[T] = self._dispatcher.supervisor.engine.share(obj)
        return shared

    def push(self, names: Mapping[str, Any]) -> None:
        """Bind names in the namespaces of all drones, and of those that start later.

        Code strings and functions of `__main__` find the names as globals, in all calls that are
        submitted after this one. Calls that were submitted before and have not begun may find them,
        too. Drones that start later (replacements, those of `resize` and `refresh`) get all that
        was pushed, in the same order, after the `initializer` and before any call: also values that
        are older than those of a new snapshot.

        Parameters
        ----------
        names
            The values by name, as they are now: they are pickled once, for all drones. Large
            arrays lie once in shared memory, and each drone maps them copy-on-write. Values of
            `share` arrive as what they stand for.

        Raises
        ------
        TypeError
            If a name is not a string, or a value is or contains a promise or a kept value.
        Exception
            Any error of pickling a value, with a note that has its name; or of the first drone that
            cannot load it. Then nothing is pushed to the drones that start later.
        RuntimeError
            If the pool is closed or broken.

        Notes
        -----
        Any thread may call this. It returns when one drone has the names, or at once if all drones
        run calls. A drone that cannot load them after that is treated as one whose `initializer`
        has failed.

        With ``engine="inline"``, the names are bound in this process. Drones of hosts that have
        joined a served pool do not get them.

        The values stay in this process's memory (large ones in shared memory) until all their names
        are pushed again, or the pool ends. The idea is that of ipyparallel's ``push``, which knows
        no later engines, and of Dask's ``WorkerPlugin``, which reaches later workers.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(2) as pool:
        ...     pool.push({"rate": 3})
        ...     [promise.value for promise in pool.everywhere("rate * 2")]
        [6, 6]
        """
        self._dispatcher.push(check_names(names))

    # -- the pool itself ---------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name given, or ``pool-N``. The names of the drones begin with it."""
        return self._dispatcher.config.name

    @property
    def drones(self) -> list[Drone]:
        """The drones at this moment. A task that is submitted to one of them runs on that drone
        only.
        """
        self._dispatcher.start_here()
        return [
            Drone._from_handle(self._dispatcher, handle, self._task_options)
            for handle in self._dispatcher.current_drones()
        ]

    def stacks(self, timeout: float = ANSWER_SECONDS) -> list[Stack]:
        """Return the task and the frames of each drone at this moment. See `Drone.stack`.

        Parameters
        ----------
        timeout
            Seconds to wait for the answers of all drones together.

        Returns
        -------
        list of Stack
            In the order of `drones`; drones that are about to end are included. ``str()`` of the
            list gives the texts of all.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(2, name="lab") as pool:
        ...     [(stack.drone, stack.state) for stack in pool.stacks()]
        [('lab.0', 'idle'), ('lab.1', 'idle')]
        """
        dispatcher = self._dispatcher
        dispatcher.start_here()
        alive = [handle for handle in list(dispatcher.handles) if handle.alive]
        from .stacks import Stacks

        stacks = dispatcher.stack_requests.take(alive, timeout)
        return Stacks(stack for stack in stacks if stack is not None)

    def profile(self, *, hertz: int = 50) -> Profile:
        """Return a context manager that samples which functions the drones' tasks spend their
        time in.

        A thread in each drone looks at the stack of the running task `hertz` times a second. Drones
        that start during the block are sampled too. The samples of a drone that ends before the
        block does are lost. The attribute ``missing`` names the drone, as it does for a drone that
        does not answer at the end within five seconds. The thread that enters the block is sampled
        too.

        Parameters
        ----------
        hertz
            Samples a second, at most 1000.

        Returns
        -------
        Profile
            To be printed or saved after the block.

        Raises
        ------
        ValueError
            If `hertz` is less than 1 or more than 1000.
        RuntimeError
            If a profile of this pool is being taken, if the pool is closed, or if its tasks run in
            this process (``engine="inline"``).

        Notes
        -----
        Measured with a task that computes for a second in Python, 22 frames deep, on a virtual
        machine with two cores that others used too: the task and the sampler together took 1.02
        times the processor time at 50 Hz (median of 20 pairs of runs; quartiles 1.016 and 1.034),
        1.03 times at 100 Hz, 1.05 times at 200 Hz.

        Only the thread that runs the tasks is sampled, and the one that runs the tasks beside each
        other (``width=``), not other threads of a task. A sample that C code delays by holding the
        interpreter counts as often as samples were due, for the line that runs next. Waiting is
        sampled as computing is. Of each drone 2,000 distinct stacks are kept, and the innermost 200
        frames of each; the samples of other stacks are shown as ``others``.

        Examples
        --------
        >>> import polycephaly as poly
        >>> def work():
        ...     return sum(n % 7 for n in range(2_000_000))
        >>> with poly.Pool(2) as pool:
        ...     with pool.profile() as profile:
        ...         results = [task.value for task in pool.everywhere(work)]
        >>> "work" in str(profile)  # profile.save("work.html") writes a flame graph
        True
        """
        from .profile import Profile

        if self._dispatcher.supervisor.engine.name == "inline":
            raise RuntimeError("tasks of engine='inline' run in this process: use cProfile")
        return Profile(self._dispatcher, hertz)

    @property
    def timeline(self) -> Timeline:
        """The tasks that the drones have run so far, and their times; also after the end. See
        `Timeline`.
        """
        return take_timeline(self._dispatcher)

    def _news(self, cursor: Cursor) -> tuple[Timeline, Cursor]:
        return take_news(self._dispatcher, cursor)

    def status(self) -> dict[str, Any]:
        """Return the state of the pool as plain data that JSON can hold; also after the end.

        The keys are the same for pools of all engines and for served pools. Any thread may call
        this. It may take milliseconds for each gigabyte that drones hold.

        Returns
        -------
        dict
            ``name``; ``engine`` ("local", "inline" or "ray"); ``state`` ("open", "closing",
            "broken", "ended", or "elsewhere": not started in this process, which is a fork of the
            pool's); ``reason`` (why no task is accepted, or None); ``pid``, ``host``,
            ``version`` (of polycephaly) and ``started`` (seconds since 1970) of the pool's process
            and the pool; ``address`` and ``clients`` of a served pool, as its clients see them
            (otherwise None and 0); ``size`` (the number of drones, without those that retire);
            ``width``;

            ``queued`` (tasks that no drone has been sent), ``waiting`` (tasks that wait for
            promises or kept values among their arguments, for resources, or for another attempt:
            see `Retry`),
            ``in_flight`` (tasks that were sent to drones and not answered) and, of these,
            ``running``;

            ``tasks_done`` (calls that were answered, by a value or an error), ``tasks_failed``
            (calls that raised, exceeded a time limit or were lost with a drone; each try counts)
            and ``tasks_cancelled``, since the pool was made;

            ``failures``, a list of the last tasks that failed, at most 20, the oldest first: a dict
            with ``at`` (seconds since 1970), ``task`` (its name), ``item`` (its index in a `map`,
            or None), ``drone`` (or None) and ``error`` (the type, and the first line of the
            message; empty if a client's task failed on another host);

            ``resources``, a dict from each name to its ``size`` and how much is ``free``;

            ``native_threads``, how many threads the native libraries may use in a drone that starts
            now (0 if they are left alone; None with ``engine="ray"`` or ``"inline"``);

            ``shared_memory`` and ``shared_memory_limit`` (bytes, or None if the engine has none);

            ``drones``, a list with one dict for each drone: ``number``, ``name``, ``pid``,
            ``host``; ``state`` ("starting", "idle", "busy", "retiring" or "unresponsive: why");
            ``running`` (as `Drone.running`), ``item`` (its index in a `map`; None if it may be one
            of several calls) and ``client`` (the process that submitted it to a served pool: its
            pid, followed by ``@`` and its host if that is another one; otherwise None); ``seconds``
            since that task was sent, or since the last answer (or None); ``waiting`` (None, or the
            attributes of a `Waiting` and its ``seconds``); ``memory`` (as `Drone.memory`);
            ``processor`` (seconds of processor time so far, or None if not known here);
            ``tasks_done``.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(2, name="lab") as pool:
        ...     status = pool.status()
        >>> status["name"], status["state"], status["queued"], len(status["drones"])
        ('lab', 'open', 0, 2)
        """
        return describe_pool(self._dispatcher)

    def refresh(self) -> None:
        """Take a new snapshot of this process and replace the drones by new ones, forked from the
        snapshot.

        Running tasks are finished by the old drones. Waiting tasks are run by the new drones. Names
        that were bound in the old drones' namespaces after the old snapshot are lost.

        Raises
        ------
        RuntimeError
            If the pool is closed or has ended, or if this process has become another user (as by
            `os.setuid`) since it opened a pool. In the latter case, the old drones go on.
        """
        self._dispatcher.refresh()

    def resize(self, drones: int) -> None:
        """Change the number of drones, at any time.

        Additional drones come from the snapshot of the others, as replacements do, and start in the
        background. If there are too many drones, idle ones end first, then the least loaded. They
        get no more tasks, give back those that they have not begun, and end after the running ones
        and those that were submitted to them alone. Values that only they keep are fetched first,
        and names in their namespaces are lost, as after `refresh`. A `map` of a local
        pool adapts the number of its calls in flight.

        Returns when the new number is in force, without waiting for drones that start or end.

        Parameters
        ----------
        drones
            The new number of drones, at least 1. With an `env` that is callable, ``env(index)`` is
            called here for each index that the pool has not had yet. A name is used again for
            another drone if its drone has ended or is about to.

        Raises
        ------
        ValueError
            If the number is less than 1, or the drones do not fit into the cluster.
        OSError
            If the machine's limits do not allow so many drones.
        RuntimeError
            If the pool is closed or broken.

        Notes
        -----
        If an additional drone cannot be started, that is logged and tried again. Each drone that is
        replaced before it has ended counts in addition, up to twice the largest number.

        Examples
        --------
        >>> import polycephaly as poly
        >>> with poly.Pool(1) as pool:
        ...     pool.resize(3)
        ...     len(pool.drones)
        3
        """
        size, dispatcher = check_at_least("drones", drones, 1), self._dispatcher
        dispatcher.check_open()
        known = len(dispatcher.environments)
        self._machine.check(size, len(dispatcher.handles))
        environments = check_env(self._env, size, known)
        dispatcher.resize(size, known, environments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more tasks, finish those accepted before, and end.

        A second call is no error.

        Parameters
        ----------
        wait
            Whether to wait for the end.
        cancel_futures
            If True, tasks that no drone has begun are cancelled.
        """
        if not cancel_futures:
            self._send_maps()
        self._dispatcher.close(cancel=cancel_futures)
        if wait:
            self._dispatcher.finish()

    def terminate_workers(self) -> None:
        """Accept no more tasks, cancel all of them, and end, as the standard library's executor
        does from Python 3.14 on. Does not wait for the end.

        Tasks that no drone has begun never run. Running ones are interrupted, as by
        `Promise.cancel`: those that still run after the grace period of a second are killed with
        their drones. All their promises are cancelled.

        Examples
        --------
        >>> import time, polycephaly as poly
        >>> pool = poly.Pool(1)
        >>> nap = pool.promise(time.sleep, 1000)
        >>> pool.terminate_workers()
        >>> pool.shutdown()  # waits for the end
        >>> nap.cancelled()
        True
        """
        self._dispatcher.close(cancel=True, running=True)

    def kill_workers(self) -> None:
        """Accept no more tasks, kill the drones at once, and end, as the standard library's
        executor does from Python 3.14 on. Does not wait for the end.

        Tasks that no drone has begun are cancelled. Running ones are rejected with `DroneDied`.

        Examples
        --------
        >>> import time, polycephaly as poly
        >>> pool = poly.Pool(1)
        >>> nap = pool.promise(time.sleep, 1000)
        >>> pool.kill_workers()
        >>> pool.shutdown()
        """
        self._dispatcher.close(cancel=True)
        self._dispatcher.kill("kill_workers() was called")

    def __repr__(self) -> str:
        if "_dispatcher" not in vars(self):  # as in the frame of `__init__` that drones inherit
            return "<Pool, being made>"
        dispatcher = self._dispatcher
        if dispatcher.has_ended:
            return f"<Pool {dispatcher.config.name}, ended>"
        current, pending = dispatcher.current_drones(), dispatcher.pending()
        drones, busy = len(current), sum(bool(handle.in_flight) for handle in current)
        retiring = len(dispatcher.handles) - drones
        return (
            f"<Pool {dispatcher.config.name}: {drones} drone{'s' * (drones != 1)}, {busy} busy, "
            f"{f'{retiring} retiring, ' if retiring else ''}{pending} task{'s' * (pending != 1)}>"
        )

    def _repr_html_(self) -> str:
        handles = [] if self._dispatcher.has_ended else list(self._dispatcher.handles)
        timeline = self.timeline
        picture = timeline._repr_html_() if timeline else ""
        return drone_table(repr(self), handles) + picture


def dispatcher_of(pool: Pool) -> Dispatcher:
    """Return the dispatcher of `pool`, for the parts of the package that are built on pools."""
    return pool._dispatcher
