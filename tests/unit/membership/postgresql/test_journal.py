"""The journal in PostgreSQL: the lease, lost connections and answers, and what is no sound journal."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from postgresql_server import Proxy, Server

from quicoll.errors import JournalError, LocalError
from quicoll.membership.coordinator.history import Committed, History, InstalledView, JournalRecord, Proposed, Seeded
from quicoll.membership.coordinator.lease import TURN, Following, HeldBy, Taken, may_take
from quicoll.membership.journal import LeaseLost
from quicoll.membership.postgresql.connection import DatabaseConnection, Disconnected, Rejected
from quicoll.membership.postgresql.journal import JournalUnreachable, PostgresJournal
from quicoll.membership.view import Member, View

pytestmark = pytest.mark.slow  # it starts a server

LEASE = 30.0  # of which nobody waits for the end
SHORT = 1.0  # for what has to end by itself


@pytest.fixture
def server(postgresql: Server) -> Server:
    return postgresql


@pytest.fixture
def job(request: pytest.FixtureRequest) -> str:
    return request.node.name


def opened(url: str, job: str, *, lease: float = LEASE) -> PostgresJournal:
    journal = PostgresJournal(url, job=job, lease=lease)
    journal.open()
    return journal


def run_out(server: Server, job: str) -> None:
    server.execute("UPDATE quicoll.leases SET until = clock_timestamp() WHERE job = $1::text", job)


def leading(url: str, job: str, *, lease: float = LEASE) -> PostgresJournal:
    journal = opened(url, job, lease=lease)
    assert isinstance(journal.take("a:1", Following()), Taken)
    journal.load()
    return journal


def test_tokens_grow_and_the_lease_is_its_holders_until_the_databases_clock_says_so(server: Server, job: str) -> None:
    first, second = leading(server.url, job), opened(server.url, job)
    held = second.take("b:1", Following())
    assert isinstance(held, HeldBy)
    assert (held.token, held.holder) == (1, "a:1")
    assert 0 < held.left_ns <= LEASE * 1e9
    first.append(Seeded(5))
    run_out(server, job)
    first.confirm()  # it has run out, but nobody has taken it
    assert isinstance(second.take("b:1", Following()), HeldBy)
    first.close()  # which gives it up
    assert second.take("b:1", Following()) == Taken(2)
    assert second.load() == History.of([Seeded(5)])
    assert second.renew(Following(1, at_work=True)) == Taken(2)
    second.close()


def test_the_database_judges_by_the_rule_who_may_take_the_lease(server: Server, job: str) -> None:
    """Times in leases; two nodes are linked to the holder. A clock that was set by hours is among them."""
    journal = opened(server.url, job)
    connection = DatabaseConnection.connect(server.url, until=time.monotonic() + 20.0)
    whole = round(LEASE * 1e9)
    lefts, idles = (-0.1, 0.5, 1.9, 2.1, 7200.0), (None, -7200.0, 0.9, 1.1, TURN - 0.1, TURN + 0.1)
    taken = 0
    for left, idle, waiting in itertools.product(lefts, idles, (0, 1, 2, 3)):
        connection.execute(
            "UPDATE quicoll.leases SET length = interval '30 seconds', nodes = 2, "
            "until = clock_timestamp() + $2::float8 * interval '30 seconds', "
            "idle_since = clock_timestamp() - $3::float8 * interval '30 seconds' WHERE job = $1::text",
            (job, str(left), None if idle is None else str(idle)),
            until=time.monotonic() + 20.0,
        )
        expected = may_take(
            left_ns=round(left * whole),
            length_ns=whole,
            idle_ns=None if idle is None else round(idle * whole),
            nodes=2,
            waiting=waiting,
        )
        answer = journal.take("b:1", Following(waiting))
        assert isinstance(answer, Taken) is expected, (left, idle, waiting)
        if expected:
            journal.close()
            journal = PostgresJournal(server.url, job=job, lease=LEASE)
        taken += expected
    assert 0 < taken < len(lefts) * len(idles) * 4
    connection.close()
    journal.close()


def test_since_when_a_leader_leads_no_view_is_kept_until_it_leads_one(server: Server, job: str) -> None:
    def row() -> tuple[object, object]:
        (found,) = server.execute(
            "SELECT nodes, EXTRACT(EPOCH FROM clock_timestamp() - idle_since)::bigint FROM quicoll.leases "
            "WHERE job = $1::text",
            job,
        )
        return found[0], found[1]

    def age(seconds: int) -> None:
        server.execute(
            "UPDATE quicoll.leases SET idle_since = clock_timestamp() - $2::bigint * interval '1 second' "
            "WHERE job = $1::text",
            job,
            seconds,
        )

    journal = leading(server.url, job)
    assert row() == (0, 0)
    age(7)
    journal.renew(Following(3))
    assert row() == (3, 7)
    journal.append(Seeded(5))
    journal.confirm()
    assert row() == (3, 7)
    journal.renew(Following(3, at_work=True))
    assert row() == (3, None)
    journal.renew(Following(2))
    assert row() == (2, 0)
    age(-7200)  # the clock was set back since
    journal.renew(Following(2))
    assert row() == (2, 0)
    journal.close()


def test_who_has_not_the_lease_neither_reads_nor_appends(server: Server, job: str) -> None:
    journal = opened(server.url, job)
    with pytest.raises(JournalError, match="read by who has the lease"):
        journal.load()
    with pytest.raises(JournalError, match="appended to by who has the lease"):
        journal.append(Seeded(5))
    journal.close()


def test_an_append_of_a_deposed_leader_waits_for_nothing_and_changes_nothing(server: Server, job: str) -> None:
    first = leading(server.url, job)
    run_out(server, job)
    second = leading(server.url, job)
    second.append(Seeded(5))
    with pytest.raises(JournalError, match=r"token 1, a:1 has taken it with token 2 \(found at 20"):
        first.append(Seeded(9))
    assert [row[0] for row in server.execute("SELECT kind FROM quicoll.records WHERE job = $1::text", job)] == [
        "seeded"
    ]
    assert second.load().seed == 5
    first.close()
    second.confirm()  # the close of the first has not given up the lease of the second
    second.close()


def test_a_server_that_restarts_is_connected_to_again_and_what_was_appended_is_there(server: Server, job: str) -> None:
    journal = leading(server.url, job, lease=30.0)
    journal.append(Seeded(5))
    server.stop()
    starting = threading.Timer(0.3, server.start)
    starting.start()
    journal.append(Proposed(1))  # the connection is gone, then the server is not there, then it starts
    starting.join()
    journal.append(Proposed(2))
    assert journal.load().last_view_id == 2
    journal.close()


def test_a_network_that_is_cut_ends_an_append_in_time_with_since_when(server: Server, job: str) -> None:
    with Proxy(server.port) as proxy:
        journal = leading(server.url_at(proxy.port), job, lease=SHORT)
        journal.append(Seeded(5))
        proxy.cut()
        began = time.monotonic()
        with pytest.raises(
            JournalUnreachable, match=r"record 2 \(proposed\) could not be appended: no answer for"
        ) as told:
            journal.append(Proposed(1))
        assert SHORT * 0.8 < time.monotonic() - began < SHORT + 20.0
        assert f"127.0.0.1:{proxy.port}" in str(told.value)
        with pytest.raises(LeaseLost, match="closed, or it has failed"):  # a call that waited behind it
            journal.append(Proposed(1))
        second = opened(server.url, job)
        while isinstance(second.take("b:1", Following()), HeldBy):
            time.sleep(0.02)
        second.load()
        second.append(Proposed(7))
        proxy.repair()  # what the cut held back comes now: too late
        time.sleep(0.1)
        assert second.renew(Following(1, at_work=True)) == Taken(2)
        rows = server.execute("SELECT number, token FROM quicoll.records WHERE job = $1::text ORDER BY number", job)
        assert rows[0] == (1, 1)
        assert rows[-1] == (len(rows), 2)
        third_reads = second.load()
        assert third_reads.last_view_id == 7
        journal.close()
        second.close()


def test_an_append_whose_answer_is_lost_is_not_made_twice(server: Server, job: str) -> None:
    """The statement goes through, and the connection is lost before its answer: the repetition finds the record."""

    class Deaf(DatabaseConnection):
        lost = 0

        def execute(self, statement, values=(), *, until):
            rows = super().execute(statement, values, until=until)
            if "INSERT INTO quicoll.records" in statement and not Deaf.lost:
                Deaf.lost += 1
                self.close()
                raise Disconnected("the answer is lost")
            return rows

    journal = leading(server.url, job)
    assert journal._connection is not None
    journal._connection = Deaf(journal._connection._connection)
    journal.append(Seeded(5))
    assert Deaf.lost == 1
    assert journal.load() == History.of([Seeded(5)])
    journal.append(Proposed(1))
    assert server.execute("SELECT count(*) FROM quicoll.records WHERE job = $1::text", job) == [(2,)]
    journal.close()


def test_a_lock_that_somebody_keeps_ends_an_append_in_time(
    server: Server, job: str, request: pytest.FixtureRequest
) -> None:
    journal = leading(server.url, job, lease=SHORT)
    other = DatabaseConnection.connect(server.url, until=time.monotonic() + 20)
    request.addfinalizer(other.close)
    other.execute("BEGIN", until=time.monotonic() + 20)
    other.execute("SELECT 1 FROM quicoll.leases WHERE job = $1::text FOR UPDATE", (job,), until=time.monotonic() + 20)
    with pytest.raises(JournalUnreachable, match=r"lock timeout|statement timeout|no sign of (an answer|a connection)"):
        journal.append(Seeded(5))
    journal.close()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            "UPDATE quicoll.records SET body = '\\x91ff'::bytea WHERE job = $1::text AND number = 2",
            "checksum of record 2",
        ),
        ("UPDATE quicoll.records SET number = 9 WHERE job = $1::text AND number = 2", "record 2 is missing"),
        ("UPDATE quicoll.records SET kind = 'committed' WHERE job = $1::text AND number = 2", "checksum of record 2"),
        ("UPDATE quicoll.records SET token = 7 WHERE job = $1::text AND number = 2", "checksum of record 2"),
        ("UPDATE quicoll.leases SET token = 0 WHERE job = $1::text", "record 3 has token 2, the lease 1"),
    ],
)
def test_a_journal_with_damage_is_refused_as_it_stands(server: Server, job: str, damage: str, words: str) -> None:
    journal = leading(server.url, job)
    for record in (Seeded(5), Proposed(1)):
        journal.append(record)
    journal.close()
    journal = leading(server.url, job)
    journal.append(Proposed(2))
    journal.close()
    server.execute(damage, job)
    journal = opened(server.url, job)
    journal.take("a:1", Following())
    with pytest.raises(JournalError, match=f"damaged: {words}"):
        journal.load()
    assert server.execute("SELECT count(*) FROM quicoll.records WHERE job = $1::text", job) == [(3,)]
    journal.close()


def test_tables_of_another_version_and_a_server_that_may_forget_are_refused(server: Server, job: str) -> None:
    opened(server.url, job).close()
    server.execute("UPDATE quicoll.about SET version = 9")
    try:
        with pytest.raises(JournalError, match="have the version 9, this quicoll knows 2"):
            opened(server.url, job)
    finally:
        server.execute("UPDATE quicoll.about SET version = 2")
    server.execute("ALTER SYSTEM SET fsync = off")
    server.execute("SELECT pg_reload_conf()")
    try:
        while server.execute("SELECT current_setting('fsync')") != [("off",)]:
            time.sleep(0.01)
        with pytest.raises(JournalError, match="fsync=off"):
            opened(server.url, job)
    finally:
        server.execute("ALTER SYSTEM RESET fsync")
        server.execute("SELECT pg_reload_conf()")


def test_who_opens_at_the_same_time_finds_the_same_tables(server: Server, job: str) -> None:
    server.execute("DROP SCHEMA IF EXISTS quicoll CASCADE")
    made: list[PostgresJournal] = []
    threads = [threading.Thread(target=lambda: made.append(opened(server.url, job, lease=LEASE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = sorted(type(journal.take("a:1", Following())).__name__ for journal in made)
    assert answers == ["HeldBy", "HeldBy", "HeldBy", "Taken"]
    for journal in made:
        journal.close()


def test_a_long_journal_is_read_in_parts_while_the_lease_is_kept(
    server: Server, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quicoll.membership.postgresql.journal._CHUNK", 7)
    journal = leading(server.url, job)
    member = Member(rank=0, node="a", incarnation=1, addresses=(("10.0.0.1", 1),), committed_step=0)
    view = View(view_id=1, members=(member,), seed=5, committed_step=0, committed_view=0)
    records: list[JournalRecord] = [Seeded(5), Proposed(1), InstalledView(view)]
    records += [Committed(step, 1, b"d") for step in range(1, 19)]
    for record in records:
        journal.append(record)
    journal.close()
    journal = opened(server.url, job)
    journal.take("a:1", Following())
    assert journal.load() == History.of(records)
    journal.append(Committed(19, 1, b"d"))
    journal.close()


def test_a_server_that_is_not_there_is_said_with_its_address_and_without_the_password(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quicoll.membership.postgresql.journal._OPEN_S", 0.2)
    with pytest.raises(JournalUnreachable, match="cannot be opened: no answer for") as told:
        PostgresJournal("postgresql://me:hush@127.0.0.1:1/db", job="job", lease=0.2).open()
    assert "postgresql 127.0.0.1:1/db" in str(told.value)
    assert "hush" not in str(told.value)
    with pytest.raises(LocalError, match="malformed") as malformed:
        PostgresJournal("postgresql://me:hush@h:port:1/db?x", job="job", lease=1.0)
    assert "hush" not in str(malformed.value)
    assert malformed.value.__cause__ is None


def test_a_statement_that_is_refused_says_so_and_the_connection_goes_on(server: Server) -> None:
    connection = DatabaseConnection.connect(server.url, until=time.monotonic() + 20)
    with pytest.raises(Rejected, match="does not exist") as refused:
        connection.execute("SELECT * FROM nowhere", until=time.monotonic() + 20)
    assert refused.value.code == "42P01"
    values: object = connection.execute(
        "SELECT $1::bigint, $2::text, $3::bytea, NULL::text, true",
        (-(2**60), "ä", b"\0\xff"),
        until=time.monotonic() + 9,
    )
    assert values == [(-(2**60), "ä", b"\0\xff", None, 1)]
    with pytest.raises(Disconnected, match="in time"):
        connection.execute("SELECT pg_sleep(5)", until=time.monotonic() + 0.05)
    assert connection.closed


def test_an_append_of_an_earlier_leadership_of_the_same_holder_is_refused_by_its_token(
    server: Server, job: str
) -> None:
    first = leading(server.url, job)
    first.append(Seeded(5))
    run_out(server, job)
    second = leading(server.url, job)
    assert (first.token, second.token) == (1, 2)
    with pytest.raises(LeaseLost, match="a:1 has taken it with token 2") as told:
        first.append(Proposed(1))
    assert told.value.leader == "a:1"
    first.close()  # which gives up nothing of the second
    second.append(Proposed(1))
    assert server.execute("SELECT token FROM quicoll.records WHERE job = $1::text ORDER BY number", job) == [(1,), (2,)]
    second.close()


def test_a_journal_has_one_token_in_all_its_life(server: Server, job: str) -> None:
    journal = leading(server.url, job)
    run_out(server, job)
    with pytest.raises(LocalError, match="another leadership needs another journal"):
        journal.take("a:1", Following())
    journal.close()


def test_one_that_stands_by_needs_no_database_to_begin_with(server: Server, job: str) -> None:
    """As after a leadership that ended because the database was away: it is asked for until it is there."""
    with Proxy(server.port) as proxy:
        proxy.cut()
        journal = PostgresJournal(server.url_at(proxy.port), job=job, lease=SHORT)
        with pytest.raises(JournalUnreachable):
            journal.take("a:1", Following())
        proxy.repair()
        assert journal.take("a:1", Following()) == Taken(1)
        journal.close()
