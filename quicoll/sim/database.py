"""The database in which several simulated coordinators have their journal, and their ways to it.

What it answers is what PostgreSQL answers (membership/postgresql/journal.py), by the same rules: a lease with a token
that grows, judged by the database's clock alone; an append that names its token and its number, and is refused where
either is not the right one; a call that finds no answer is made again, and gives up after the patience. The rest is the
real code: `LeaseCore`, `Leadership`, the service.

    a call      leaves the coordinator, arrives after the path's latency, is carried out at that moment, and its answer
                takes the latency back. On a path that is not open, or while the database is away, it is made again
                every `_RETRY_NS`; an answer that is lost is asked for again in the same way
    given up    after the patience, which is the lease's length: the coordinator hears that, and asks nothing
                more. The call itself may have been carried out, or may be still: that is what the fence is for

A coordinator that ends, or stands by again, takes nothing back: what has left it arrives, with the token of the
leadership that has sent it. The database itself loses nothing; it is a server that has synced what it has confirmed.

Faults strike the next append: "refused" is an error of the server, and nothing is written; with "answer" it is written,
and its coordinator never hears of it; "late" keeps it on its way until its coordinator has given up and its lease
has run out, so that another may lead when it arrives.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quicoll.errors import JournalError, LocalError
from quicoll.membership.coordinator.history import History
from quicoll.membership.coordinator.lease import Following, HeldBy, Taken, may_take
from quicoll.membership.journal import LeaseLost
from quicoll.sim.scenario.events import DATABASE_HOST
from quicoll_transport.sim import SimulatedExecutor
from quicoll_transport.sim.network import PathState

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from quicoll.membership.coordinator.history import JournalRecord
    from quicoll.sim.invariants import Checker
    from quicoll_transport.sim import HostLoop, World
    from quicoll_transport.sim.clock import HostClock

__all__ = ["DatabaseCalls", "SimDatabase", "SimStore"]

_T = TypeVar("_T")

_NOBODY = Following()
_RETRY_NS = 50_000_000
_WHERE = "the simulated database"


class _Underway(Exception):
    """An append that stays on its way, and is carried out later, by calling `late`."""

    def __init__(self, late: Callable[[], object]) -> None:
        super().__init__()
        self.late = late


class SimDatabase:
    """One lease, and records with the tokens of their leaders.

    Args:
        world: Where it stands; it gets a host of its own, so that paths to it can be cut.
        lease_ns: How long a lease runs; also what a call waits for an answer.
        checker: Told of every record.
    """

    def __init__(self, world: World, *, lease_ns: int, checker: Checker) -> None:
        self.world = world
        self.lease_ns = lease_ns
        self.checker = checker
        self.away = False
        self.injected: dict[str, int] = {}
        self.fault = ""  # that strikes the next append
        self._token = 0
        self._holder = ""
        self._until_ns = 0  # by its own clock, as all times that it keeps
        self._nodes = 0  # of who holds it
        self._idle_ns: int | None = None  # since when it has led no view
        self._records: list[tuple[int, JournalRecord]] = []
        self._history = History()
        self.host = world.host(DATABASE_HOST)

    @property
    def holder(self) -> str:
        """The address of who has a lease that runs; "" where nobody has."""
        return self._holder if self._now_ns < self._until_ns else ""

    @property
    def _now_ns(self) -> int:
        """The time of day of its machine, which may be set."""
        return self.host.clock.wall(self.world.now_ns)

    def heal(self) -> None:
        self.away, self.fault = False, ""
        self.host.set_drift(0)

    def struck(self, *faults: str) -> str:
        """Return the fault that strikes now, if it is one of these; it strikes once."""
        if self.fault not in faults:
            return ""
        fault, self.fault = self.fault, ""
        self.injected[f"journal_{fault}"] = self.injected.get(f"journal_{fault}", 0) + 1
        return fault

    # What is asked of it. Each is carried out at one moment, like a transaction

    def take(self, holder: str, following: Following = _NOBODY) -> Taken | HeldBy:
        now_ns = self._now_ns
        idle_ns = None if self._idle_ns is None else now_ns - self._idle_ns
        left_ns, waiting = self._until_ns - now_ns, following.nodes
        if not may_take(left_ns=left_ns, length_ns=self.lease_ns, idle_ns=idle_ns, nodes=self._nodes, waiting=waiting):
            return self._held()
        self._token += 1
        self._holder, self._until_ns = holder, now_ns + self.lease_ns
        self._nodes, self._idle_ns = waiting, now_ns
        self.world.note("lease_taken", DATABASE_HOST, f"{self._token} {holder}")
        return Taken(self._token)

    def renew(self, token: int, following: Following) -> Taken | HeldBy:
        if not self.leads(token):
            return self._held()
        now_ns, idle_ns = self._now_ns, self._idle_ns
        self._nodes = following.nodes
        self._idle_ns = None if following.at_work else now_ns if idle_ns is None else min(idle_ns, now_ns)
        return self.extend(token)

    def extend(self, token: int) -> Taken | HeldBy:
        if not self.leads(token):
            return self._held()
        self._until_ns = self._now_ns + self.lease_ns
        return Taken(token)

    def give_up(self, token: int) -> None:
        if self.leads(token):
            self._until_ns = self._now_ns

    def leads(self, token: int) -> bool:
        """Return whether nobody has taken the lease after who has this token."""
        return token == self._token

    def append(self, token: int, number: int, record: JournalRecord) -> HeldBy | None:
        """Take a record; return who leads where that is another than who has the token, None where it is written.

        Args:
            token: Of the lease by which it is appended.
            number: Of the record, from 1 on.
            record: What is appended; once more where its answer was lost.
        Raises:
            JournalError: There is another record of this number.
        """
        if not self.leads(token):
            return self._held()
        if number <= len(self._records):
            if self._records[number - 1] == (token, record):
                return None
            raise JournalError(f"there is a record {number} already", path=_WHERE)
        self._until_ns = self._now_ns + self.lease_ns
        self._history = self._history.apply(record)
        self._records.append((token, record))
        self.world.note("appended", DATABASE_HOST, f"{number} {token} {type(record).__name__}")
        self.checker.appended_by(token, self._token, record)
        return None

    def read(self) -> tuple[int, History]:
        """Return how many records there are, and the history of all."""
        return len(self._records), self._history

    def _held(self) -> HeldBy:
        return HeldBy(self._token, self._holder, self._until_ns - self._now_ns)


class SimStore:
    """The journal in the database for one leadership: a `SharedStore`. Its calls are made by way of `DatabaseCalls`."""

    path = _WHERE

    def __init__(self, database: SimDatabase, host: str) -> None:
        """Prepare; nothing is asked. host: the coordinator's."""
        self._database = database
        self.host = host
        self.unreachable = False  # a call was given up: nothing more is asked
        self.answer_lost = False  # the call that was made last is done, and nobody will ever hear of it
        self._token = 0
        self._number = 0
        self._history: History | None = None
        self._last: JournalRecord | None = None

    def open(self) -> None:
        """The way to it is all there is to be reached."""

    def take(self, holder: str, following: Following) -> Taken | HeldBy:
        if self._token:
            raise LocalError("another leadership needs another journal")
        answer = self._database.take(holder, following)
        if isinstance(answer, Taken):
            self._token = answer.token
        return answer

    def renew(self, following: Following) -> Taken | HeldBy:
        self._check_usable()
        return self._database.renew(self._token, following)

    def confirm(self) -> None:
        self._check_usable()
        answer = self._database.extend(self._token)
        if isinstance(answer, HeldBy):
            raise self._deposed(answer)

    def load(self) -> History:
        if self._history is None:
            self.confirm()
            self._number, self._history = self._database.read()
            self._database.checker.opened(self._history)
        return self._history

    def append(self, record: JournalRecord) -> None:
        self._check_usable()
        if self._history is None:
            raise JournalError("it is appended to by who has the lease and has read it", path=self.path)
        if record is self._last:  # once more, as its answer was lost
            number, history = self._number, self._history
        else:
            number, history = self._number + 1, self._history.apply(record)
        fault = self._database.struck("refused", "answer", "late")
        if fault == "refused":
            raise JournalError(f"record {number} could not be appended: the server has no room", path=self.path)
        if fault == "late":
            raise _Underway(partial(self._database.append, self._token, number, record))
        held = self._database.append(self._token, number, record)
        if held is not None:
            raise self._deposed(held)
        self.answer_lost = fault == "answer"
        self._last, self._number, self._history = record, number, history

    def close(self) -> None:
        if self._token and not self.unreachable:
            self._database.give_up(self._token)

    def gave_up(self) -> None:
        """Take in that a call had no answer. Who stands by may ask again."""
        self.unreachable = bool(self._token)

    def _check_usable(self) -> None:
        """Once a call was given up it is not known what became of it, and none follows."""
        if self.unreachable:
            raise LeaseLost("closed, or it has failed; open it anew to see what it holds", path=self.path)

    def _deposed(self, held: HeldBy) -> LeaseLost:
        return LeaseLost(
            f"this coordinator does not lead any more: its lease has token {self._token}, {held.holder} has taken it "
            f"with token {held.token}",
            path=self.path,
            leader=held.holder,
        )


class DatabaseCalls(SimulatedExecutor):
    """The way from one coordinator to the database and back. As on a thread, one call is made after the other."""

    def __init__(self, database: SimDatabase, store: SimStore) -> None:
        self._database = database
        self._store = store
        self._waiting: deque[_Call] = deque()  # the first one is under way

    def begin(self, loop: HostLoop, function: Callable[[], _T]) -> asyncio.Future[_T]:
        call = _Call(self._database, self._store, loop, function, self._next)
        self._waiting.append(call)
        if len(self._waiting) == 1:
            call.begin()
        return call.future

    def _next(self) -> None:
        self._waiting.popleft()
        if self._waiting:
            self._waiting[0].begin()


class _Call:
    """States: waiting, until `begin`; on its way, until it arrives; carried out, until the answer is there; over."""

    def __init__(
        self,
        database: SimDatabase,
        store: SimStore,
        loop: HostLoop,
        function: Callable[[], Any],
        over: Callable[[], None],
    ) -> None:
        self._database = database
        self._world = database.world
        self._store = store
        self._loop = loop
        self._function = function
        self._over = over
        self._until_ns = 0  # by the coordinator's own clock, as its patience is
        self.future: asyncio.Future[Any] = loop.create_future()

    def begin(self) -> None:
        self._until_ns = self._clock.local(self._world.now_ns) + self._database.lease_ns
        if self._store.unreachable:  # it says so itself
            self._loop.call_soon(self._tell, *self._carried_out())
        else:
            self._world.after(self._latency_ns, self._arrive)

    def _arrive(self) -> None:
        if not self._open():
            self._again()
            return
        self._store.answer_lost = False
        result, error = self._carried_out()
        if isinstance(error, _Underway):
            self._function = error.late
            self._world.at(self._over_ns + self._database.lease_ns // 2, self._carried_out)
        if isinstance(error, _Underway) or self._store.answer_lost:
            self._world.at(self._over_ns, self._give_up)
        else:
            self._world.after(self._latency_ns, self._answer, result, error)

    def _carried_out(self) -> tuple[Any, Exception | None]:
        try:
            return self._function(), None
        except (JournalError, _Underway) as error:
            return None, error

    def _answer(self, result: Any, error: Exception | None) -> None:
        if self._open():
            self._loop.call_soon(self._tell, result, error)
        else:
            self._again()

    def _again(self) -> None:
        if self._loop.dead:
            return
        if self._world.now_ns + _RETRY_NS >= self._over_ns:
            self._world.at(self._over_ns, self._give_up)
        else:
            self._world.after(_RETRY_NS, self._arrive)

    def _give_up(self) -> None:
        self._loop.call_soon(self._unanswered)

    def _unanswered(self) -> None:
        self._store.gave_up()
        self._tell(None, LeaseLost(f"no answer for {self._database.lease_ns / 1e9:g} s", path=_WHERE))

    def _tell(self, result: Any, error: Exception | None) -> None:
        if not self.future.done():  # else nobody waits for it any more
            if error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(result)
        self._over()

    @property
    def _clock(self) -> HostClock:
        return self._loop.host.clock

    @property
    def _over_ns(self) -> int:
        """When its patience ends, by true time."""
        return max(self._clock.true(self._until_ns), self._world.now_ns)

    @property
    def _latency_ns(self) -> int:
        return self._world.network.default.latency_ns

    def _open(self) -> bool:
        state = self._world.network.state
        here, there = self._store.host, DATABASE_HOST
        return not self._database.away and state(here, there) is state(there, here) is PathState.OPEN
