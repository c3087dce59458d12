"""Connections at work: memory of what is to be sent is the carrier's."""

from __future__ import annotations

from typing import Any, cast

from quicoll_transport.carrier import CLOSE_NORMAL
from quicoll_transport.endpoint.core.agenda import Agenda
from quicoll_transport.endpoint.core.closed import ClosedConnections
from quicoll_transport.endpoint.core.connection import Connection
from quicoll_transport.endpoint.core.table import Table
from quicoll_transport.endpoint.core.terms import Actions, SendRuns
from quicoll_transport.endpoint.core.traffic import Traffic
from quicoll_transport.net.runs import DatagramRun, apart
from quicoll_transport.security.limits import Guard, GuardConfig, Pace, PaceConfig

ADDRESS = ("192.0.2.1", 1)


class Reusing:
    """A carrier that writes everything into the same memory, as it may."""

    peer_address = ADDRESS
    resets = 0
    reset_token = None

    def __init__(self) -> None:
        self.memory = bytearray(4)
        self.cids: list[bytes] = []
        self.retired_cids: list[bytes] = []
        self.words = [b"aabb", b"bye!", b""]

    def datagrams_to_send(self, now_ns: int) -> list[DatagramRun]:
        word = self.words.pop(0)
        self.memory[: len(word)] = word
        return [DatagramRun(memoryview(self.memory), 2, ADDRESS)] if word else []

    def next_timer(self) -> None:
        return None

    def close(self, code: int, reason: str) -> None:
        pass

    def last_words(self, now_ns: int) -> None:
        pass

    def release(self) -> None:
        self.memory[:] = bytes(4)


def traffic(actions: Actions) -> tuple[Traffic, Connection]:
    door: Guard[Connection] = Guard(GuardConfig(), slots=1)
    made = Traffic(
        table=Table(),
        closed=ClosedConnections(),
        agenda=Agenda(),
        door=door,
        actions=actions,
        on_failed=lambda *_: None,
    )
    connection = Connection(cast("Any", Reusing()), dialled=True, deadline_ns=10**9, pace=Pace(PaceConfig()))
    made.register(connection)
    return made, connection


def sent(actions: Actions) -> list[bytes]:
    out: list[bytes] = []
    while actions.queue:
        action = actions.queue.popleft()
        assert isinstance(action, SendRuns)
        out += [data for data, _ in apart(action.runs)]
    return out


def test_what_waits_to_be_sent_is_whole_although_its_carrier_was_asked_again() -> None:
    actions = Actions(observed=False)
    work, connection = traffic(actions)
    work.transmit(connection)
    work.transmit(connection)
    assert sent(actions) == [b"aa", b"bb", b"by", b"e!"]


def test_what_was_sent_is_not_copied() -> None:
    actions = Actions(observed=False)
    work, connection = traffic(actions)
    work.transmit(connection)
    (action,) = actions.queue
    assert isinstance(action, SendRuns)
    (run,) = action.runs
    actions.queue.clear()
    work.transmit(connection)
    assert action.runs == [run]


def test_last_words_outlive_their_carrier_and_change_nothing_that_goes_before() -> None:
    actions = Actions(observed=False)
    work, connection = traffic(actions)
    work.transmit(connection)
    work.close(connection, CLOSE_NORMAL, "over")
    assert sent(actions) == [b"aa", b"bb", b"by", b"e!"]
