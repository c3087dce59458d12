"""One connection to PostgreSQL on which every call ends by a deadline.

libpq's calls that block have no deadline of their own for the answer to a statement: a peer whose packets are lost, or
that is stopped, keeps them for as long as TCP tries. So only those are used that do not block, and what is waited for
between them is the socket, until the time that the caller names. (PostgreSQL's documentation, "Asynchronous Command
Processing", "Database Connection Control Functions".)

    connecting   `connect` makes the connection, or raises
    open         statements are carried out one at a time, each a transaction of its own
    closed       by `close`, or because a statement was not answered: whether it was carried out is not known, and
                 nothing more is asked over this connection

Errors: `Disconnected` where it is not known what became of a statement, `Rejected` where the server said no and did
nothing.
"""

from __future__ import annotations

import select
import struct
import time
from typing import TYPE_CHECKING, TypeAlias

from psycopg import OperationalError, pq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from psycopg.pq.abc import PGconn, PGresult

__all__ = ["DatabaseConnection", "Disconnected", "Rejected", "Value"]

Value: TypeAlias = int | str | bytes | None

_BYTES = 17  # types by their numbers, as the server's catalogue has them: bytea,
_TEXTS = (25, 19, 1043)  # text, name, varchar,
_WHOLE = {20: ">q", 23: ">i", 21: ">h", 16: ">?"}  # int8, int4, int2, bool
_DONE = (pq.ExecStatus.COMMAND_OK, pq.ExecStatus.TUPLES_OK, pq.ExecStatus.EMPTY_QUERY)


class Disconnected(Exception):
    """The connection cannot be made or is lost, or no answer came in time."""


class Rejected(Exception):
    """The server refused a statement, which changed nothing. code: its SQLSTATE."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class DatabaseConnection:
    """See the module's head. Made by `connect`; used by one thread at a time."""

    def __init__(self, connection: PGconn) -> None:
        self._connection = connection
        self._closed = False

    @classmethod
    def connect(cls, conninfo: str, *, until: float) -> DatabaseConnection:
        """Connect.

        Args:
            conninfo: As libpq takes it: a URL, or keywords and values.
            until: By `time.monotonic`.
        Raises:
            Disconnected: There is no connection in time, or the server refuses it.
        """
        made = cls(pq.PGconn.connect_start(conninfo.encode()))
        try:
            made._establish(until)
        except BaseException:
            made.close()
            raise
        made._connection.nonblocking = 1
        return made

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def close(self) -> None:
        """Close it; further calls do nothing. Waits for nobody."""
        self._closed = True
        self._connection.finish()

    def execute(self, statement: str, values: Sequence[Value] = (), *, until: float) -> list[tuple[Value, ...]]:
        """Carry out one statement as a transaction of its own; return its rows.

        Args:
            statement: With $1, $2, ... for the values, each with a cast to its type.
            values: The values.
            until: By `time.monotonic`.
        Raises:
            Disconnected: It is not known whether the statement was carried out. The connection is closed.
            Rejected: The server did not carry it out.
        """
        given = [
            None if value is None else value if isinstance(value, bytes) else str(value).encode() for value in values
        ]
        formats = [pq.Format.BINARY if isinstance(value, bytes) else pq.Format.TEXT for value in values]
        return self._run(
            lambda: self._connection.send_query_params(
                statement.encode(), given, param_formats=formats, result_format=pq.Format.BINARY
            ),
            until,
        )

    def script(self, statements: str, *, until: float) -> None:
        """Carry out several statements in one transaction; errors as those of `execute`."""
        self._run(lambda: self._connection.send_query(statements.encode()), until)

    def _establish(self, until: float) -> None:
        connection = self._connection
        ready: int = pq.PollingStatus.WRITING
        while ready != pq.PollingStatus.OK:
            if ready == pq.PollingStatus.FAILED or connection.status == pq.ConnStatus.BAD:
                raise Disconnected(_words(connection.get_error_message()))
            if ready == pq.PollingStatus.READING:
                self._wait(until, "a connection", reading=True)
            else:
                self._wait(until, "a connection", reading=False)
            ready = connection.connect_poll()

    def _run(self, send: Callable[[], None], until: float) -> list[tuple[Value, ...]]:
        """Send, and wait for the results; return the rows of the last."""
        results: list[PGresult] = []
        try:
            send()
            while self._connection.flush():
                self._wait(until, "a statement to be taken", reading=False)
            while (result := self._result(until)) is not None:
                results.append(result)
        except OperationalError as error:
            self.close()
            raise Disconnected(_words(str(error))) from error
        except Disconnected:
            self.close()
            raise
        return self._rows(results)

    def _result(self, until: float) -> PGresult | None:
        while self._connection.is_busy():
            self._wait(until, "an answer", reading=True)
            self._connection.consume_input()
        return self._connection.get_result()

    def _rows(self, results: list[PGresult]) -> list[tuple[Value, ...]]:
        for result in results:
            if result.status not in _DONE:
                code = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
                words = _words(result.get_error_message())
                if not code or self._connection.status != pq.ConnStatus.OK:
                    self.close()  # the server was lost while it answered: what it did is not known
                    raise Disconnected(words)
                raise Rejected(words, code)
        if not results:
            self.close()
            raise Disconnected("the server gave no result")
        last = results[-1]
        types = [last.ftype(column) for column in range(last.nfields)]
        return [
            tuple(_value(last.get_value(row, column), kind) for column, kind in enumerate(types))
            for row in range(last.ntuples)
        ]

    def _wait(self, until: float, awaited: str, *, reading: bool) -> None:
        """Wait until the socket can be read, or written and read, in which case what came is taken in."""
        poll = select.poll()
        poll.register(self._connection.socket, select.POLLIN if reading else select.POLLIN | select.POLLOUT)
        left = until - time.monotonic()
        if left <= 0 or not poll.poll(left * 1e3):
            raise Disconnected(f"no sign of {awaited} from the server in time")


def _value(data: bytes | None, kind: int) -> Value:
    if data is None or kind == _BYTES:
        return data
    if kind in _WHOLE:
        return int(struct.unpack(_WHOLE[kind], data)[0])
    if kind in _TEXTS:
        return data.decode()
    raise Disconnected(f"the server gave a value of type {kind}, which nobody asked for")


def _words(message: str) -> str:
    return " ".join(message.split())
