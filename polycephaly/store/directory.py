"""The vault: what the drones of a crew keep, and for whom.

    promise(fn, keep=True) ── result ──> Deposit 17: holders {drone 0}, nbytes          Kept ──┐
    a call that takes it ──ticket──> drone 0: the value itself                          Kept ──┼──> Deposit 17
                         └─────────> drone 1: FETCH from 0, PACKED, BRING to 1          calls ─┘    (strong references)
    Kept.value ─────────────────────────> FETCH, PACKED, opened here

Who owns what. A `RemoteObject` stands for one kept value. It is owned by references: of handles, of
the payloads of calls that take it (placeholders.py), and of recipes. The vault itself knows it
weakly. When the last reference has gone, in any thread and in the middle of anything, a finalizer
appends the number to a deque of each link that has the value, and takes no lock; the drone is told
(DROP) with the next work or soon after. Nobody else frees anything. (A finalizer, and no `__del__`:
while that runs, the vault could still find the deposit.)

What a drone has made itself (`Kept(value)`) is also held by the handles that there are in it. It
may give such handles away many times, one perhaps while an older one is dropped: there may be two
deposits of a value, one after the other. So drones count the hub's claims, and DROP gives up as
many as its deposit had (drone/store.py).

A value is in up to three forms, and exists while there is one of them:

    on the shelf of drones    put there by the work itself (first holder), or brought (then `packed` is there too)
    packed                    in the pool's shared memory, once anybody but its first holder asked for it: as a loan of
                              the drone's to this image, which lends it on. No byte of it is touched here.
    as a recipe               the work and its arguments, where it was given with retries

Interleavings, and why each is right:

* The last handle goes while a call that takes it waits, or runs: the call's payload holds the
  deposit until its answer replaces it; a drone that runs it has its own reference to the value.
* A drone is told to drop what a call still to come needs: no. That call's payload would have held
  the deposit; no number is used for a second value; and a second deposit of the same value has
  claims of its own.
* A call is given back, or lost and run again: its payload is unchanged. Each time it is sent,
  `fits` looks at where its deposits are at that moment.
* The holder dies before the answer that tells of the value is heard: what it had sent, or left in
  its page, is heard first, and `add` finds the drone dead. After that: `died` takes it from the
  holders of all deposits. Both in turns.
* The holder dies while it packs: no PACKED will come; `died` tells who waits, and each looks again.
* A drone retires (max_tasks, max_memory, refresh): what only it has is fetched first, and it ends
  when that is here.
* The handle is dropped while its value is on its way from the drone: PACKED finds no deposit, and
  its loan goes back.
* Work with keep=True is cancelled while it runs: its deposit is made, nobody has it, and it is
  dropped like any other.
* The pool ends: all who wait are told; what is packed stays readable in this image, the rest is
  lost.

Whoever waits for something of a deposit leaves a function in `waiting`. Whenever anything changes,
all of these are called, in a turn, and look for themselves; so no change needs to know who it is
for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary, finalize

from ..drone.store import described, grants
from ..errors import DroneDied, Lost
from ..pool.drone_handle import State
from ..pool.task import KeptTask, Task
from ..promises.promise import FINISHED, Promise, Signal
from ..wire.exceptions import unpack_exception
from .placeholders import here, known, redeem
from .references import Received, load

if TYPE_CHECKING:
    from ..pool.dispatcher import Dispatcher
    from ..pool.drone_handle import DroneHandle
    from ..wire.functions import RemoteFunction

__all__ = ["ObjectDirectory", "RemoteObject"]


class Recipe(NamedTuple):
    """How a value can be computed again."""

    definition: RemoteFunction
    kind: int
    args: tuple[Any, ...] | None
    payload: Any
    timeout: float | None


class RefCount:
    """What the drones hold for a deposit. It outlives that, until they are told."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.holders: dict[
            DroneHandle, int
        ] = {}  # who has it, or will before any call that takes it: how many claims
        self._pid = os.getpid()

    def give_up(self) -> None:
        """In any thread, in the middle of anything."""
        if os.getpid() == self._pid:
            for link, claims in self.holders.items():
                link.drop(self.number, claims)


class RemoteObject:
    """One kept value. It is changed in turns only; any thread may look."""

    def __init__(
        self, vault: ObjectDirectory, number: int, label: str, nbytes: int, kind: str
    ) -> None:
        self.vault = vault
        self.number = number
        self.label = label
        self.nbytes = nbytes
        self.kind = kind
        stake = RefCount(number)
        self.holders = stake.holders
        finalize(self, stake.give_up).atexit = False
        self.packed: bytes | Received | None = None
        self.unpackable: bytes | None = None  # the error of its pickling, pickled
        self.asked: DroneHandle | None = None  # who packs it
        self.recipe: Recipe | None = None
        self.retries = 0
        self.again: Task | None = None  # it is being computed once more
        self.lost: BaseException | None = None
        self.waiting: list[Callable[[], object]] = []

    @property
    def home(self) -> str | None:
        return next((link.name for link in list(self.holders) if link.alive), None)

    @property
    def burden(self) -> int:
        """Bytes that are pickled, copied or unpickled to have it elsewhere, about. What is packed
        is mapped there."""
        packed = self.packed
        return (
            self.nbytes
            if packed is None
            else packed.pickle_bytes
            if isinstance(packed, Received)
            else len(packed)
        )

    @property
    def is_stuck(self) -> bool:
        """It is there, and does not pickle."""
        return self.unpackable is not None and bool(self.holders)

    @property
    def state(self) -> str:
        where = self.home
        if where is None:
            where = "shared memory" if self.packed is not None else "nowhere: lost"
        return f"{self.kind}, {self.nbytes:,} bytes in {where}"

    @property
    def what(self) -> str:
        return f"what {self.label} gave in {self.vault.name}"

    def ticket(self) -> tuple[Callable[[int], Any], tuple[int]]:
        now = here.now
        other = None if now is None else now.vault
        if now is None or other is not self.vault:
            where = (
                f"was given to a call of {other.name}"
                if other is not None
                else "was to be pickled elsewhere"
            )
            raise TypeError(
                f"{self.what} is kept in {self.home or 'shared memory'}, and its handle {where}: "
                "it goes among the arguments of its own pool's calls; elsewhere, send its `value`"
            )
        now.met = {self.number: self} if now.met is None else now.met | {self.number: self}
        return redeem, (self.number,)

    def fetched(self) -> Any:
        """The value, built anew. Waits; raises what `Kept.value` says."""
        crew, packed = self.vault.crew, self.packed
        if self.vault.pid != os.getpid():
            raise RuntimeError(
                f"{self.what} belongs to another process, of which this one is a fork"
            )
        if packed is None:
            fetch = _Fetch(self.vault)
            crew.hub.post(partial(self.vault.fetch, self, fetch))

            def over(_: Promise[None]) -> None:  # there are no turns any more
                fetch._settle(FINISHED, None, self.vault.why(self))

            crew.ended._hook(over)
            try:
                packed = fetch.result()
            finally:
                crew.ended._unhook(over)
        return load(packed)


class _Fetch(Signal[Any]):
    """Of a value in its packed form."""

    def __init__(self, vault: ObjectDirectory) -> None:
        super().__init__()
        self._hub = vault.crew.hub

    def _help(self, end: float | None) -> None:
        self._hub.drive(self, end)


class ObjectDirectory:
    """A crew's. All but `home` is called in turns."""

    def __init__(self, crew: Dispatcher) -> None:
        self.crew = crew
        self.pid = os.getpid()
        self._deposits: WeakValueDictionary[int, RemoteObject] = WeakValueDictionary()

    @property
    def name(self) -> str:
        return self.crew.plan.name

    def home(self, deposits: Iterable[RemoteObject]) -> tuple[DroneHandle | None, int]:
        """Who has most bytes of these, of those who take work; the least loaded of several. And how
        many bytes it takes to have them elsewhere. In any thread."""
        held: dict[DroneHandle, int] = {}
        burden = 0
        for deposit in deposits:
            burden += deposit.burden
            for link in list(deposit.holders):
                if link.state < State.RETIRING:
                    held[link] = held.get(link, 0) + deposit.nbytes
        best = max(
            held,
            key=lambda link: (held[link], -len(link.favoured), -len(link.flight)),
            default=None,
        )
        return best, burden

    # -- what comes, and what goes -----------------------------------------------------------------

    def add(self, link: DroneHandle, work: KeptTask, payload: Any) -> RemoteObject:
        """`link` has answered `work`: its value is on the shelf there."""
        deposit = work.deposit
        if deposit is None:
            nbytes, kind = described(payload)
            deposit = RemoteObject(self, work.number, work.definition.label, nbytes, kind)
            self._deposits[work.number] = deposit
            if work.retries > 0 and work.target is None:
                deposit.recipe = Recipe(
                    work.definition, work.kind, work.args, work.payload, work.timeout
                )
        deposit.again = work.deposit = deposit.unpackable = None
        deposit.retries = work.retries
        self._put(deposit, link)
        self._changed(deposit)
        return deposit

    def given(self, link: DroneHandle, work: Task | None, payload: Any) -> None:
        """`link` has made these itself, and handles of them are in what comes of `work`, or will
        be."""
        given = []
        for number, nbytes, kind in grants(payload):
            deposit = self._deposits.get(number)
            if deposit is None:
                label = work.definition.label if work is not None else "work that was lost"
                deposit = self._deposits[number] = known[number] = RemoteObject(
                    self, number, label, nbytes, kind
                )
            self._put(deposit, link)
            given.append(deposit)
        if work is not None:
            work.given = given if work.given is None else work.given + given

    def _put(self, deposit: RemoteObject, link: DroneHandle) -> None:
        if link.alive:
            deposit.holders[link] = deposit.holders.get(link, 0) + 1
            if link.state >= State.RETIRING:
                self._ask(deposit)
        else:
            deposit.lost = link.death

    def not_brought(self, link: DroneHandle, number: int) -> None:
        """What was to bring it did not arrive."""
        deposit = self._deposits.get(number)
        if deposit is not None and link in deposit.holders:
            deposit.holders[link] -= 1
            if not deposit.holders[link]:
                del deposit.holders[link]

    def packed(self, link: DroneHandle, number: int, payload: Any) -> None:
        deposit = self._answered(link, number)
        if deposit is not None:
            deposit.packed = payload if isinstance(payload, Received) else bytes(payload)
            self._changed(deposit)

    def not_packed(self, link: DroneHandle, number: int, payload: Any) -> None:
        deposit = self._answered(link, number)
        if deposit is not None:
            deposit.unpackable = bytes(payload)
            self._changed(deposit)

    def _answered(self, link: DroneHandle, number: int) -> RemoteObject | None:
        link.packing.discard(number)
        deposit = self._deposits.get(number)
        if deposit is not None and deposit.asked is link:
            deposit.asked = None
        return deposit

    def died(self, link: DroneHandle) -> None:
        """Nothing more is heard of it."""
        link.packing.clear()
        for deposit in list(self._deposits.values()):
            if link in deposit.holders:
                del deposit.holders[link]
                if deposit.asked is link:
                    deposit.asked = None
                if link.death is not None:
                    deposit.lost = link.death
                self._changed(deposit)

    def evacuate(self, link: DroneHandle) -> None:
        """It is to end: what only it has is fetched."""
        for deposit in list(self._deposits.values()):
            if link in deposit.holders:
                self._ask(deposit)

    def close(self) -> None:
        for deposit in list(self._deposits.values()):
            deposit.holders.clear()
            self._changed(deposit)

    def _changed(self, deposit: RemoteObject) -> None:
        waiting, deposit.waiting = deposit.waiting, []
        for look in waiting:
            look()

    # -- who needs it ------------------------------------------------------------------------------

    def fits(self, work: Task, link: DroneHandle) -> bool:
        """Can it be sent to `link` now? Else it has been put where it can be, or waits for what it
        takes."""
        deposits = work.payload.deposits.values()
        missing = [each for each in deposits if link not in each.holders and each.packed is None]
        if not missing:
            return True
        home = self.home(deposits)[0] if work.target is None else link
        if home is not None and home is not link:
            self.crew.favours.add(work, home)
            return False
        stuck = next(
            (each for each in missing if each.is_stuck or not self._bring_about(each)), None
        )
        if stuck is not None:
            self.crew.reject(work, partial(self.why, stuck))
        else:
            self.crew.hold(work)
            missing[0].waiting.append(partial(self.crew.go_on, work))
        return False

    def can_move(self, work: Task, link: DroneHandle) -> bool:
        """Whether it can be sent to `link`; has what it takes packed, if it cannot yet, but could
        then."""
        here = True
        for each in work.payload.deposits.values():
            if link not in each.holders and each.packed is None:
                here = False
                if not each.is_stuck:
                    self._bring_about(each)
        return here

    def fetch(self, deposit: RemoteObject, fetch: Promise[Any]) -> None:
        if fetch.done():
            return
        if deposit.packed is not None:
            self.crew.hub.deliver(partial(fetch._settle, FINISHED, deposit.packed, None))
        elif not deposit.is_stuck and self._bring_about(deposit):
            deposit.waiting.append(partial(self.fetch, deposit, fetch))
        else:
            self.crew.hub.deliver(lambda: fetch._settle(FINISHED, None, self.why(deposit)))

    def _bring_about(self, deposit: RemoteObject) -> bool:
        """Sees to it that it will be packed, or that something else changes; False where it is
        lost."""
        if self.crew.over:
            return False
        return self._ask(deposit) or self._compute_again(deposit)

    def _ask(self, deposit: RemoteObject) -> bool:
        """Has it packed by who has it."""
        if deposit.packed is not None or deposit.asked is not None:
            return True
        link = next((each for each in deposit.holders if each.state <= State.RETIRING), None)
        if link is None or deposit.unpackable is not None:
            return False
        deposit.asked = link
        link.packing.add(deposit.number)
        self.crew.fetch_from(link, deposit.number)
        return True

    def _compute_again(self, deposit: RemoteObject) -> bool:
        recipe = deposit.recipe
        if deposit.again is not None:
            return True
        if recipe is None or deposit.retries <= 0:
            return False
        work = deposit.again = KeptTask(self.crew)
        work.number = deposit.number
        work.deposit = deposit
        work.definition, work.kind, work.args, work.payload, work.timeout = recipe
        deposit.retries -= 1
        work.retries = deposit.retries
        work._hook(
            lambda promise: self.crew.hub.post(partial(self._computed_again, deposit, promise))
        )
        self.crew.go_on(work)
        return True

    def _computed_again(self, deposit: RemoteObject, promise: Promise[Any]) -> None:
        if (
            deposit.again is promise
        ):  # or it is being computed once more, as it was lost again before this
            deposit.again = None
        if promise._exception is not None:
            deposit.lost, deposit.recipe = promise._exception, None
        self._changed(deposit)

    def why(self, deposit: RemoteObject) -> BaseException:
        """Why nobody can have it any more. Not in a turn: the error of its own pickling is
        unpickled."""
        told, cause, unpackable = f"what {deposit.label} gave", deposit.lost, deposit.unpackable
        refused = None if unpackable is None else unpack_exception(unpackable)
        if refused is not None and deposit.holders:
            return refused
        if self.crew.over or (self.crew.closing and cause is None):
            why = f"{self.name} has ended, and {told} with it: read `value` before"
        elif cause is None:
            why = f"{told} was lost with its drone, which was replaced"
        elif isinstance(cause, DroneDied):
            why = f"{told} was lost: {cause}"
        else:
            why = f"{told} was lost, and computing it again failed: {type(cause).__name__}: {cause}"
        known = {name: getattr(cause, name, "") for name in ("drone", "stderr", "stack")}
        error = Lost(
            why,
            exitcode=getattr(cause, "exitcode", None),
            running=getattr(cause, "running", None),
            **known,
        )
        error.__cause__ = refused or cause
        return error
