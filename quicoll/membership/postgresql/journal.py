"""The coordinator's journal in a PostgreSQL database: several coordinators may have it, one may append.

Tables, in the database's schema `quicoll`, which the first coordinator makes:

    about      the version of these tables
    leases     one row for each job: the token, who holds the lease, until when; how long it runs when it is new;
               the number of its holder's nodes, and since when that has led no view (coordinator/lease.py)
    records    the job's records, numbered from 1 without a gap, each with the token of the leader that wrote it

    opened     `take` asks for the lease; `load` and `append` are not possible yet
    leading    `load` reads the records once, then `append` adds to them
    closed     by `close`, or by any error: nothing more is asked, for good. Who is to lead again gets another object

It takes the lease once, so it has one token in all its life: whatever it has sent bears that one, and what arrives
after another taking is refused, whoever took it.

Invariants, and what each rests on:

- An append is one statement, so one transaction: it finds the lease's row by job and token, locks it, and inserts the
  record. Where another has taken the lease the row is not found, and nothing is inserted. A taking that comes during an
  append waits for the row's lock; so whoever has taken it finds in `records` all that was ever appended before.
- A record's number is part of its key: a statement that arrives twice, late over a connection that was given up, is
  refused by the key the second time. So an append of which the answer was lost is simply repeated, and where the key
  refuses it, the row that is there tells whether it was ours.
- The lease's end is written and judged with `clock_timestamp()`, which is the server's at that moment, not at the
  transaction's begin: a statement that waited for a lock does not judge by an old time.
- `synchronous_commit` is on, and a server with `fsync=off` is refused: an append that has returned is on the server's
  disk, and on those of its synchronous standbys where it has some. A server that is replaced by an asynchronous
  standby loses what that did not have; then a member holds more than the journal, and is refused (rule 12).
- Statements have a time limit in the server, connections one in the client (connection.py). A call that finds the
  connection lost makes a new one, and repeats what it asked, for `patience` seconds in all. Then it raises, with since
  when, and the leadership is over: whether its last record is there is known only to who reads the journal next.

Secrets: a URL may hold a password; errors, events and `repr` name host, port and database, and nothing else of it.
"""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from quicoll.errors import JournalError, LocalError
from quicoll.membership.coordinator.history import History
from quicoll.membership.coordinator.lease import TURN, HeldBy, Taken
from quicoll.membership.journal import LeaseLost
from quicoll.membership.postgresql.connection import DatabaseConnection, Disconnected, Rejected
from quicoll.membership.postgresql.records import row_body, row_checksum, row_kind, row_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.membership.coordinator.history import JournalRecord
    from quicoll.membership.coordinator.lease import Following
    from quicoll.membership.postgresql.connection import Value

__all__ = ["JournalUnreachable", "PostgresJournal"]

_T = TypeVar("_T")

_SCHEMA = 2  # as `_MAKE` has it
_CHUNK = 2000  # records read by one statement, so that none takes long, however long the job is
_ATTEMPTS = 3  # within the patience, each with a connection of its own
_PAUSE_S = 0.05
_OPEN_S = 10.0
"""Patience until the journal is open, where a lease is shorter: nobody waits for this coordinator yet, and a database
that is started with it may come later."""
_AWAY = ("57P01", "57P02", "57P03", "57014", "55P03", "53300", "40001", "40P01", "25006")
"""The server shuts down, starts, ended the statement by its limit, waited too long for a lock, has too many
connections, gave up a transaction for another's sake, or can only be read from for now: to be tried again."""

_MAKE = """
SELECT pg_advisory_xact_lock(8161204877541);
CREATE SCHEMA IF NOT EXISTS quicoll;
CREATE TABLE IF NOT EXISTS quicoll.about (version int NOT NULL);
INSERT INTO quicoll.about SELECT 2 WHERE NOT EXISTS (SELECT 1 FROM quicoll.about);
CREATE TABLE IF NOT EXISTS quicoll.leases (
    job text PRIMARY KEY, token bigint NOT NULL, holder text NOT NULL, until timestamptz NOT NULL,
    length interval NOT NULL, nodes bigint NOT NULL, idle_since timestamptz
);
CREATE TABLE IF NOT EXISTS quicoll.records (
    job text NOT NULL, number bigint NOT NULL, token bigint NOT NULL, kind text NOT NULL, body bytea NOT NULL,
    crc bigint NOT NULL, written timestamptz NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (job, number)
);
"""
_TAKE = """
UPDATE quicoll.leases SET token = token + 1, holder = $2::text,
    until = clock_timestamp() + $3::bigint * interval '1 microsecond', length = $3::bigint * interval '1 microsecond',
    nodes = $4::bigint, idle_since = clock_timestamp()
WHERE job = $1::text AND (
    until <= clock_timestamp() OR until > clock_timestamp() + 2 * length
    OR idle_since <= clock_timestamp() - length *
        CASE WHEN $4::bigint > nodes THEN 1 WHEN $4::bigint > 0 THEN $5::int END
) RETURNING token
"""  # `may_take`; no idle_since, or nobody who waits, makes the last of these unknown, which is no yes
_LOOK = """
SELECT token, holder, GREATEST(-1, EXTRACT(EPOCH FROM until - clock_timestamp()) * 1000000)::bigint
FROM quicoll.leases WHERE job = $1::text
"""
_EXTEND = """
UPDATE quicoll.leases SET until = clock_timestamp() + $3::bigint * interval '1 microsecond'
WHERE job = $1::text AND token = $2::bigint RETURNING token
"""
# LEAST: a clock that was set back makes nobody idle in times to come.
_RENEW = """
UPDATE quicoll.leases SET until = clock_timestamp() + $3::bigint * interval '1 microsecond', nodes = $4::bigint,
    idle_since = CASE WHEN $5::bool THEN NULL ELSE LEAST(idle_since, clock_timestamp()) END
WHERE job = $1::text AND token = $2::bigint RETURNING token
"""
_GIVE_UP = """
UPDATE quicoll.leases SET until = clock_timestamp() WHERE job = $1::text AND token = $2::bigint RETURNING token
"""
_APPEND = """
WITH held AS (
    UPDATE quicoll.leases SET until = clock_timestamp() + $3::bigint * interval '1 microsecond'
    WHERE job = $1::text AND token = $2::bigint RETURNING job, token
)
INSERT INTO quicoll.records (job, number, token, kind, body, crc)
SELECT job, $4::bigint, token, $5::text, $6::bytea, $7::bigint FROM held RETURNING number
"""
_READ = """
SELECT number, token, kind, body, crc FROM quicoll.records
WHERE job = $1::text AND number > $2::bigint ORDER BY number LIMIT $3::bigint
"""


class JournalUnreachable(LeaseLost):
    """The database gave no answer for as long as was waited for one: a lease that was held may have run out."""


class PostgresJournal:
    """See the module's head. Used by one thread at a time; `open` and `take` connect.

    Args:
        conninfo: URL or keywords, as libpq takes them.
        job: The job's name.
        lease: Seconds that a lease runs.
    Raises:
        LocalError: The URL is malformed.
    """

    def __init__(self, conninfo: str, *, job: str, lease: float) -> None:
        try:
            given: dict[str, str | int | None] = dict(conninfo_to_dict(conninfo))
            # A coordinator that only reads is none; a URL with several hosts finds the one that takes writes.
            defaults = {"application_name": "quicoll", "target_session_attrs": "read-write"}
            self._conninfo = make_conninfo("", **(defaults | given))
        except ProgrammingError:
            # libpq quotes what it does not understand, which may be a part of the password
            raise LocalError(
                "the journal's URL is malformed; it is postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
            ) from None
        where = [str(given[name]) for name in ("host", "hostaddr") if given.get(name)] or ["the default host"]
        self.path = f"postgresql {where[0]}:{given.get('port') or 5432}/{given.get('dbname') or ''}"
        self._job = job
        self._lease_us = round(lease * 1e6)
        self._patience = lease
        self._connection: DatabaseConnection | None = None
        self._closed = False
        self._failure: JournalError | None = None  # the first one
        self._token = 0
        self._history: History | None = None
        self._number = 0  # of the last record

    def open(self) -> None:
        """Connect, and make the tables where there are none.

        Raises:
            JournalError: The database cannot be reached or used, or was written by another version.
        """
        try:
            self._asked("it cannot be opened", lambda until: None, patience=max(self._patience, _OPEN_S))
        except BaseException:
            self._drop()
            raise

    def __repr__(self) -> str:
        return f"<PostgresJournal {self.path} job={self._job!r} token={self._token}>"

    @property
    def token(self) -> int:
        """Of the lease that was taken; 0 before."""
        return self._token

    # The lease

    def take(self, holder: str, following: Following) -> Taken | HeldBy:
        """Take the lease if it may be taken; else say who has it.

        Args:
            holder: This coordinator's address, for members.
            following: Its nodes.
        Raises:
            LocalError: It was taken by this object before.
            JournalError: The database gives no answer, or a wrong one.
        """
        if self._token:
            raise LocalError(f"the lease was taken with token {self._token}; another leadership needs another journal")

        def ask(until: float) -> Taken | HeldBy:
            taken = self._execute(_TAKE, self._job, holder, self._lease_us, following.nodes, TURN, until=until)
            if taken:
                self._token = _whole(taken[0][0])
                return Taken(self._token)
            return self._held(until)

        return self._asked("the lease could not be asked for", ask)

    def renew(self, following: Following) -> Taken | HeldBy:
        """Let the lease run for the whole time again, if it is still ours; else say who has it.

        Args:
            following: Its nodes.
        Raises:
            JournalError: The database gives no answer, or a wrong one.
        """
        return self._extend(_RENEW, following.nodes, following.at_work)

    def _extend(self, statement: str, *values: Value) -> Taken | HeldBy:
        def ask(until: float) -> Taken | HeldBy:
            if self._execute(statement, self._job, self._token, self._lease_us, *values, until=until):
                return Taken(self._token)
            return self._held(until)

        return self._asked("the lease could not be renewed", ask)

    def confirm(self) -> None:
        """Raise JournalError unless the lease is ours at this moment: then nobody else has appended anything."""
        answer = self._extend(_EXTEND)
        if isinstance(answer, HeldBy):
            raise self._deposed(answer)

    def give_up(self) -> None:
        """Let the lease run out at once, if it is ours: another coordinator need not wait. Errors change nothing."""
        if not self._token or self._closed or self._connection is None:
            return
        with contextlib.suppress(Disconnected, Rejected):  # it runs out by itself
            self._execute(_GIVE_UP, self._job, self._token, until=time.monotonic() + self._patience / _ATTEMPTS)

    # The records

    def load(self) -> History:
        """Return the history of all records; the first call after the lease is taken reads them.

        Raises:
            JournalError: They are damaged, or the database gives no answer, or another has taken the lease.
        """
        if self._history is not None:
            return self._history
        if not self._token:
            raise JournalError("it is read by who has the lease", path=self.path)
        history, number, more = History(), 0, True
        while more:
            self.confirm()  # a long job takes longer to be read than a lease runs
            rows = self._asked("it could not be read", partial(self._read, number, _CHUNK))
            for row in rows:
                history = self._replay(history, number + 1, row)
                number += 1
            more = len(rows) == _CHUNK
        self._history, self._number = history, number
        return history

    def append(self, record: JournalRecord) -> None:
        """Make the record durable before returning.

        Raises:
            LocalError: It contradicts the journal; nothing was asked.
            LeaseLost: Another coordinator has taken the lease, or the database gave no answer.
            JournalError: The database refuses the record.
        """
        if self._history is None and not self._closed:
            raise JournalError("it is appended to by who has the lease and has read it", path=self.path)
        if self._history is None:
            raise self._ended()
        history = self._history.apply(record)
        number, kind, body = self._number + 1, row_kind(record), row_body(record)
        row = (kind, body, row_checksum(self._job, number, self._token, kind, body))

        def ask(until: float) -> None:
            try:
                values = (self._job, self._token, self._lease_us, number, *row)
                if not self._execute(_APPEND, *values, until=until):
                    raise self._deposed(self._held(until))
            except Rejected as error:
                if error.code != "23505" or not self._is_there(number, row, until):
                    raise

        self._history = None  # until it is known to be there
        self._asked(f"record {number} ({kind}) could not be appended", ask)
        self._history, self._number = history, number

    def close(self) -> None:
        """Give the lease up and the connection back; further calls do nothing."""
        self.give_up()
        self._closed = True
        self._history = None
        self._drop()

    # Asking

    def _asked(self, failure: str, ask: Callable[[float], _T], *, patience: float | None = None) -> _T:
        """Return what `ask` returns, over a new connection where the one there was is lost, and again where the server
        is away; until the patience is over.

        Args:
            failure: What has failed where it is over, for the error.
            ask: Asks the database, until the time that it is given.
            patience: Seconds; None takes the lease's.
        Raises:
            JournalError: It is over, or the server says no.
        """
        if self._closed:
            raise self._ended()
        patience = self._patience if patience is None else patience
        began = time.monotonic()
        over = began + patience
        while True:
            until = min(over, time.monotonic() + patience / _ATTEMPTS)
            try:
                self._connect(until)
                return ask(until)
            except Disconnected as error:
                self._drop()
                last = str(error)
            except Rejected as error:
                if error.code not in _AWAY:
                    raise self._failed(JournalError(f"{failure}: {error} ({error.code})", path=self.path)) from error
                self._drop()
                last = str(error)
            except JournalError as error:
                raise self._failed(error) from None
            if time.monotonic() + _PAUSE_S >= over:
                waited = time.monotonic() - began
                since = (datetime.now(UTC) - timedelta(seconds=waited)).isoformat(timespec="milliseconds")
                raise self._failed(
                    JournalUnreachable(
                        f"{failure}: no answer for {waited:.1f} s, since {since} ({last})", path=self.path
                    )
                )
            time.sleep(_PAUSE_S)

    def _ended(self) -> JournalError:
        words = "closed, or it has failed; open it anew to see what it holds"
        failure = self._failure
        if isinstance(failure, LeaseLost):  # a call that waited behind the one that has failed is no worse than that
            return LeaseLost(words, path=self.path, leader=failure.leader)
        return JournalError(words, path=self.path)

    def _failed(self, error: JournalError) -> JournalError:
        """Take in that a leader's call has failed: it asks nothing more. Who stands by may ask again."""
        if self._token:
            self._closed = True
            self._failure = self._failure or error
            self._history = None
            self._drop()
        return error

    def _connect(self, until: float) -> None:
        if self._connection is not None and not self._connection.closed:
            return
        self._connection = DatabaseConnection.connect(self._conninfo, until=until)
        # Shorter than what is waited for here: the server then says what it waited for.
        limit_ms = max(1, round(self._patience / _ATTEMPTS * 0.8e3))
        self._connection.script(
            f"SET synchronous_commit = on; SET statement_timeout = {limit_ms}; SET lock_timeout = {limit_ms}; "
            f"SET default_transaction_isolation = 'read committed'",
            until=until,
        )
        if not self._execute("SELECT to_regclass('quicoll.records') IS NOT NULL", until=until)[0][0]:
            self._connection.script(_MAKE, until=until)
        self._identify(until)

    def _identify(self, until: float) -> None:
        """Raise unless the database keeps what it has confirmed, and its tables are of a version that we know."""
        if self._execute("SELECT current_setting('fsync')", until=until)[0][0] != "on":
            raise JournalError("the server runs with fsync=off: it may lose what was committed", path=self.path)
        versions = [row[0] for row in self._execute("SELECT version FROM quicoll.about", until=until)]
        if versions != [_SCHEMA]:
            found = ", ".join(str(version) for version in versions) or "none"
            raise JournalError(f"its tables have the version {found}, this quicoll knows {_SCHEMA}", path=self.path)
        new = "INSERT INTO quicoll.leases VALUES ($1::text, 0, '', to_timestamp(0), '0', 0) ON CONFLICT DO NOTHING"
        if not self._execute("SELECT 1 FROM quicoll.leases WHERE job = $1::text", self._job, until=until):
            self._execute(new, self._job, until=until)

    def _execute(self, statement: str, *values: Value, until: float) -> list[tuple[Value, ...]]:
        if self._connection is None:
            raise Disconnected("there is no connection")
        return self._connection.execute(statement, values, until=until)

    def _read(self, after: int, most: int, until: float) -> list[tuple[Value, ...]]:
        return self._execute(_READ, self._job, after, most, until=until)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _held(self, until: float) -> HeldBy:
        rows = self._execute(_LOOK, self._job, until=until)
        if not rows:
            raise JournalError(f"the lease of job {self._job!r} is not there any more", path=self.path)
        token, holder, left_us = rows[0]
        return HeldBy(_whole(token), str(holder), _whole(left_us) * 1000)

    def _deposed(self, held: HeldBy) -> LeaseLost:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        return LeaseLost(
            f"this coordinator does not lead any more: its lease has token {self._token}, {held.holder} has taken it "
            f"with token {held.token} (found at {now})",
            path=self.path,
            leader=held.holder,
        )

    def _is_there(self, number: int, row: tuple[str, bytes, int], until: float) -> bool:
        """Return whether the record of this number is ours, from a statement whose answer was lost."""
        rows = self._read(number - 1, 1, until)
        return bool(rows) and rows[0] == (number, self._token, *row)

    def _replay(self, history: History, expected: int, row: tuple[Value, ...]) -> History:
        number, token, kind, body, crc = _whole(row[0]), _whole(row[1]), str(row[2]), row[3], _whole(row[4])
        try:
            if number != expected:
                raise LocalError(f"record {expected} is missing")
            if not isinstance(body, bytes) or row_checksum(self._job, number, token, kind, body) != crc:
                raise LocalError(f"checksum of record {number}")
            if token > self._token:
                raise LocalError(f"record {number} has token {token}, the lease {self._token}")
            return history.apply(row_record(kind, body))
        except LocalError as error:
            raise self._failed(
                JournalError(f"damaged: {error.message}; nothing was changed, restore a copy", path=self.path)
            ) from error


def _whole(value: Value) -> int:
    if not isinstance(value, int):
        raise Disconnected(f"the server gave {value!r} where a number was asked for")
    return value
