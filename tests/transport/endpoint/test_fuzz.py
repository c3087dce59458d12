"""Slices of the fuzzer (docs/internals/fuzzing.md); that it repeats itself, and what it has found.

QUICOLL_TEST_FUZZ_INPUTS=1000000 throws so many inputs instead of the slice; QUICOLL_TEST_FUZZ_SEED takes other ones.
"""

from __future__ import annotations

import os
import random
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from datagrams import one
from depth import deep
from quicoll_fuzz.episode import Finding, run_episode
from quicoll_fuzz.hostile import Tally
from quicoll_fuzz.mutate import mutate_datagram, mutate_frames, varint
from stock_session import StockSession

from quicoll_transport.carrier import CLOSE_REFUSED
from quicoll_transport.endpoint.core.connection import Connection
from quicoll_transport.endpoint.core.table import Table
from quicoll_transport.errors import ProtocolError
from quicoll_transport.link.control_stream import ControlReader, encode_control
from quicoll_transport.link.frames import Cancel, Header
from quicoll_transport.net.runs import apart
from quicoll_transport.quic import Gate, Session, SessionConfig, handshake_in_memory
from quicoll_transport.security.identity import Identity
from quicoll_transport.security.limits import Pace, PaceConfig

INPUTS = int(os.environ.get("QUICOLL_TEST_FUZZ_INPUTS", deep("4500", "15000")))
SEED = int(os.environ.get("QUICOLL_TEST_FUZZ_SEED", "1"))
SLICES = 3


@pytest.mark.slow
@pytest.mark.timeout(60 + INPUTS / 50)
@pytest.mark.parametrize("number", range(SLICES))
def test_endpoints_live_and_honest_links_work_whatever_the_others_send(number: int) -> None:
    """The oracle is in the episode; the third one also watches memory, which makes it slow, so it is a smaller one."""
    tally = Tally()
    size = min(INPUTS // SLICES, 20_000)
    for episode in range(number, max(INPUTS // size, number + 1), SLICES):
        traced = episode == 2
        run_episode(SEED, episode, min(size, 1500) if traced else size, tally, trace=traced)
    size = min(size, 1500) if number == 2 else size
    assert tally.inputs >= size
    assert min(tally.datagrams, tally.controls, tally.headers, tally.connections, tally.served, tally.honest) > 0


@pytest.mark.slow
def test_an_episode_repeats_itself() -> None:
    tallies = [Tally(), Tally()]
    for tally in tallies:
        run_episode(5, 0, 100, tally)
    assert asdict(tallies[0]) == asdict(tallies[1])


def test_the_oracle_notices_what_is_altered_and_says_how_to_see_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll_transport.link.inbox.checksum", lambda data: 0)
    with pytest.raises(Finding, match="python -m quicoll_fuzz --seed 6 --episode 3 --size 100"):
        run_episode(6, 3, 100, Tally())


@pytest.mark.interpreted
@pytest.mark.slow
def test_the_oracle_notices_an_exception_of_our_own_on_a_peers_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = ControlReader.feed

    def breaks(self: ControlReader, data: bytes) -> list[Any]:
        found = feed(self, data)
        if any(isinstance(message, Cancel) for message in found):
            raise KeyError("a table that a peer's bytes can miss")
        return found

    monkeypatch.setattr(ControlReader, "feed", breaks)
    with pytest.raises(Finding, match="our own code raised on a peer's bytes"):
        run_episode(7, 0, 3000, Tally())


@pytest.mark.slow
def test_the_oracle_notices_a_dialler_that_takes_whoever_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_until_another_member_answers() -> None:
        for number in range(5):  # about every tenth server is one; the first episode has one, as this is written
            run_episode(13, number, 2500, Tally(), only="servers")

    monkeypatch.setattr(Identity, "__eq__", lambda self, other: True)
    with pytest.raises(Finding, match="after servers: a link to who is not the node that was dialled"):
        run_until_another_member_answers()


@pytest.mark.slow
def test_the_oracle_notices_an_endpoint_that_turns_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "next_timer", lambda self: 0)
    with pytest.raises(Finding, match="time stands still"):
        run_episode(8, 0, 100, Tally())


def test_spoilt_frames_keep_their_size_and_spoilt_datagrams_differ() -> None:
    rng = random.Random(1)
    for size in (1, 20, 1200):
        data = bytes(rng.randbytes(size))
        assert all(len(mutate_frames(data, rng, [data])) == size for _ in range(200))
        assert sum(mutate_datagram(data, rng, [data]) != data for _ in range(200)) > 150
    assert [varint(n).hex() for n in (37, 15293, 494878333)] == ["25", "7bbd", "9d7f3e7d"]  # RFC 9000, appendix A.1


# -- what it has found -------------------------------------------------------------------------------------------------


def test_a_connection_id_that_is_announced_again_is_kept_once() -> None:
    """QUIC announces an id again when the packet was lost; each time it was noted once more, for ever."""

    session: Any = SimpleNamespace(cids=[b"one", b"two", b"one"], retired_cids=[], reset_token=None)
    connection = Connection(session, dialled=False, deadline_ns=0, pace=Pace(PaceConfig()))
    table = Table()
    table.add(connection)
    assert sorted(connection.cids) == [b"one", b"two"]
    session.retired_cids = [b"one"]
    table.refresh(connection)
    assert connection.cids == list(table.by_cid) == [b"two"]


def test_the_last_words_to_an_unvalidated_address_stay_within_three_times_what_it_sent(credentials_of: Any) -> None:
    """aioquic leaves CONNECTION_CLOSE out of the limit of RFC 9000 section 8.1."""
    config, stranger = SessionConfig(), ("192.0.2.1", 1)
    client = Session.client(credentials=credentials_of("a"), config=config, address=("192.0.2.1", 2), now_ns=10**18)
    gate = Gate(credentials=credentials_of("b"), config=config, retry=False)
    (first, _), *_ = apart(client.datagrams_to_send(10**18))
    first += bytes(8)  # so that the server's three flights leave a little of the limit
    server = gate.admit(first, stranger, 10**18)
    assert isinstance(server, Session)
    server.receive(one(first, stranger), 10**18)
    now, sent = 10**18, 0
    while now < 10**18 + 2 * 10**9:  # probes, until the limit stops them
        sent += sum(len(data) for data, _ in apart(server.datagrams_to_send(now)))
        at = server.next_timer()
        assert at is not None
        if at > 10**18 + 2 * 10**9:
            break
        now = max(now, at)
        server.handle_timer(now)
    server.close(CLOSE_REFUSED, "refused")
    sent += sum(len(data) for data, _ in apart(server.datagrams_to_send(now)))
    assert 2 * len(first) < sent <= 3 * len(first)


@pytest.mark.parametrize("word", ["reset_stream", "stop_stream"])
def test_a_peer_that_gives_up_the_control_stream_breaks_the_protocol(credentials_of: Any, word: str) -> None:
    """Our next word on it was an error inside QUIC, and a traceback in the log for each such connection."""
    client = StockSession.client(
        credentials=credentials_of("a"), config=SessionConfig(), address=("192.0.2.1", 2), now_ns=10**18
    )
    server, _, _ = handshake_in_memory(client, Gate(credentials=credentials_of("b"), config=SessionConfig()))
    now = 10**18 + 10**9
    for source, target in ((client, server), (server, client)):  # open at both ends
        source.send_control(b"word")
        for data, _ in apart(source.datagrams_to_send(now)):
            target.receive(one(data, ("192.0.2.1", 1 + source.is_client)), now)
    getattr(client._quic, word)(0, 0x7100)
    ((data, _),) = apart(client.datagrams_to_send(now))
    with pytest.raises(ProtocolError, match="gave up the control stream"):
        server.receive(one(data, ("192.0.2.1", 1)), now)


def test_a_sequence_at_the_end_of_the_numbers_is_refused_before_its_acknowledgement_is_made() -> None:
    """2^64 - 1 gave an acknowledgement up to 2^64, which msgpack cannot carry: OverflowError in the endpoint's turn."""
    with pytest.raises(ProtocolError, match="malformed control message: Expected `int`"):
        ControlReader().feed(encode_control(Cancel((1 << 64) - 1, 0)))
    with pytest.raises(ProtocolError, match="out of range"):
        Header.decode(Header(bytes(24), (1 << 64) - 1, 0, 0).encode())
