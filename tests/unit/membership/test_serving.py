"""One leadership after the other in one process: what is begun anew for each, and what ends the process.

The store answers at once, and its leases run for hours, so nothing waits for a clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, Any

import pytest

from quicoll.errors import JournalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator.history import (
    Committed,
    Forgotten,
    History,
    InstalledView,
    JournalRecord,
    Proposed,
    Seeded,
)
from quicoll.membership.coordinator.lease import Following, HeldBy, Taken
from quicoll.membership.journal import LeaseLost
from quicoll.membership.service import coordinator_config
from quicoll.membership.serving import serve_in_turn
from quicoll.membership.term import Term
from quicoll.membership.view import Member, View
from quicoll.observability.events import Observers

if TYPE_CHECKING:
    from quicoll.membership.coordinator.config import CoordinatorConfig

HOUR = 3600.0


class Inline(Executor):
    """Calls at once, on the loop."""

    ended = False

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self.ended = True


class Database:
    """One lease, which may be taken at any time, and the records."""

    def __init__(self, *records: JournalRecord, kind: type[Store] | None = None) -> None:
        self._kind = kind or Store
        self.token = 0
        self.records = list(records)
        self.stores: list[Store] = []
        self.executors: list[Inline] = []
        self.fails: JournalError | None = None  # the next append, and so on until it is taken back
        self.opened = 0

    def reach(self) -> tuple[Store, Inline]:
        assert all(store.closed for store in self.stores), "a leadership begins before the last one has ended"
        assert all(executor.ended for executor in self.executors)
        self.stores.append(self._kind(self))
        self.executors.append(Inline())
        return self.stores[-1], self.executors[-1]


class Store:
    path = "database"

    def __init__(self, database: Database) -> None:
        self.database = database
        self.token = 0
        self.closed = False

    def open(self) -> None:
        self.database.opened += 1

    def take(self, holder: str, following: Following) -> Taken | HeldBy:
        self.database.token += 1
        self.token = self.database.token
        return Taken(self.token)

    def renew(self, following: Following) -> Taken | HeldBy:
        return Taken(self.token)

    def load(self) -> History:
        return History.of(self.database.records)

    def append(self, record: JournalRecord) -> None:
        if self.database.fails is not None:
            raise self.database.fails
        assert self.token == self.database.token
        self.database.records.append(record)

    def confirm(self) -> None:
        if self.database.fails is not None:
            raise self.database.fails

    def close(self) -> None:
        self.closed = True


class Service:
    """What `serve_in_turn` needs of a service: a term, and nobody who is linked to it."""

    address = "a:1"

    def __init__(self) -> None:
        self.term: Term | None = None
        self.configs: list[CoordinatorConfig] = []
        self.stepped_down: list[tuple[str, str]] = []
        self.stood_by: list[str] = []
        self.closed = ""

    @property
    def core(self) -> Any:
        assert self.term is not None
        return self.term.core

    def following(self) -> Following:
        return Following()

    def stand_by(self, leader: str) -> None:
        self.stood_by.append(leader)

    def lead(self, journal: Any, executor: Executor, config: CoordinatorConfig, *, token: int) -> None:
        self.configs.append(config)
        loop = asyncio.get_running_loop()
        self.term = Term(config, journal, loop=loop, executor=executor, carry_out=lambda action: None)
        self.term.work()

    async def wait_failed(self) -> None:
        assert self.term is not None
        await self.term.wait_failed()

    def step_down(self, cause: str, leader: str) -> None:
        assert self.term is not None
        self.stepped_down.append((cause, leader))
        self.term.end()
        self.term = None

    async def aclose(self, reason: str) -> None:
        self.closed = reason
        if self.term is not None:
            self.term.end()


class Turns:
    """A process that serves; a context."""

    def __init__(self, database: Database, *, forget: tuple[str, ...] = ()) -> None:
        self.database = database
        self.service: Any = Service()
        self.tokens: list[int] = []
        self._led = asyncio.Event()
        observers = Observers("a", lambda: 0, self._observe)
        config = coordinator_config(1, 1.0, None, forget=forget)
        serving = serve_in_turn(self.service, database.reach, config=config, lease=HOUR, observers=observers)
        self.task = asyncio.get_running_loop().create_task(serving)

    def _observe(self, event: Any) -> None:
        if event.kind == "leads":
            self.tokens.append(event.fields["token"])
            self._led.set()

    async def leads(self) -> None:
        """Wait until the next leadership has begun."""
        waiting = asyncio.ensure_future(self._led.wait())
        await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self.task.done():
            await self.task
        self._led.clear()

    async def __aenter__(self) -> Turns:
        await self.leads()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def lose(self, error: JournalError) -> None:
        """Whatever is asked of the journal next fails so."""
        term = self.service.term
        self.database.fails = error
        term.receive("a", m.Join(incarnation=1), incarnation=1)
        term.when_durable(lambda: None)
        self.database.fails = None


def last_view() -> list[JournalRecord]:
    members = tuple(Member(rank=rank, node=node, incarnation=1, addresses=()) for rank, node in enumerate("abc"))
    view = View(view_id=1, members=members, seed=5, committed_step=0, committed_view=0)
    return [Seeded(5), Proposed(1), InstalledView(view), Committed(1, 1, b"d")]


@pytest.fixture(autouse=True)
def nobody_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaderships are short here, and the lease runs for an hour."""
    monkeypatch.setattr("quicoll.membership.leadership.rest_ns", lambda lost_early, *, length_ns: 0)


async def test_each_leadership_has_a_journal_of_its_own_and_reads_it_anew() -> None:
    database = Database()
    async with Turns(database) as turns:
        seed = turns.service.core.history.seed
        turns.lose(LeaseLost("b:1 has taken it", path="database", leader="b:1"))
        database.records.append(Proposed(41))  # by another one, meanwhile
        await turns.leads()
        assert turns.service.core.history.last_view_id == 41
        assert turns.service.core.history.seed == seed
        assert turns.service.stepped_down == [("journal database: b:1 has taken it", "b:1")]
    assert turns.tokens == [1, 2]
    assert database.opened == 1  # at the start, to say what is wrong; later ones stand by whatever the database says
    assert [store.closed for store in database.stores] == [True, True]
    assert turns.service.closed == "stopped"


async def test_a_lease_that_is_lost_while_the_journal_is_read_is_waited_for_again() -> None:
    reads: list[int] = []

    class Unlucky(Store):
        def load(self) -> History:
            reads.append(self.token)
            if len(reads) == 1:
                raise LeaseLost("b:1 has taken it", path="database", leader="b:1")
            return super().load()

    async with Turns(Database(kind=Unlucky)) as turns:
        assert turns.tokens == [2]
        assert (turns.service.stood_by, turns.service.stepped_down) == (["b:1"], [])


async def test_a_journal_that_refuses_a_record_ends_the_process() -> None:
    async with Turns(Database()) as turns:
        turns.lose(JournalError("the server has no room", path="database"))
        with pytest.raises(JournalError, match="no room"):
            await turns.leads()
        assert turns.service.closed == "cannot go on"
    assert turns.tokens == [1]


async def test_a_journal_that_cannot_be_opened_at_the_start_ends_the_process() -> None:
    class Away(Store):
        def open(self) -> None:
            raise LeaseLost("no answer for 10 s", path="database")

    with pytest.raises(JournalError, match="no answer for 10 s"):
        async with Turns(Database(kind=Away)):
            pass


async def test_nodes_that_an_operator_gives_up_are_given_up_by_the_next_term_too_while_that_is_open() -> None:
    database = Database(*last_view())
    lost = LeaseLost("b:1 has taken it", path="database", leader="b:1")
    async with Turns(database, forget=("b", "c")) as turns:
        turns.lose(lost)
        await turns.leads()
        assert turns.service.configs[-1].forget == ("b", "c")
        database.records.append(Forgotten(("b", "c")))  # by another one
        database.records.append(Proposed(2))
        member = Member(rank=0, node="a", incarnation=1, addresses=(), committed_step=1)
        view = View(view_id=2, members=(member,), seed=5, committed_step=1, committed_view=1)
        turns.lose(lost)
        database.records.append(InstalledView(view))
        await turns.leads()
        assert turns.service.configs[-1].forget == ()


async def test_a_wish_to_forget_whose_record_the_journal_did_not_take_is_one_of_the_next_term() -> None:
    database = Database(*last_view())
    lost = LeaseLost("no answer for 3 s", path="database")
    async with Turns(database, forget=("b", "c")) as turns:
        core, now_ns = turns.service.core, turns.service.term.now_ns()
        core.receive("a", m.Join(incarnation=1, committed_step=1), now_ns=now_ns)
        core.handle_timer(now_ns + round(HOUR * 1e9))
        assert core.history.base == ("a",)  # as if it were written
        turns.lose(lost)
        await turns.leads()
        assert turns.service.core.history.base == ("a", "b", "c")
        assert turns.service.configs[-1].forget == ("b", "c")
        database.records.append(Forgotten(("b", "c")))
        turns.lose(lost)
        await turns.leads()
        assert turns.service.configs[-1].forget == ()
