"""Ends of connections as both endpoints see them: words that are lost, processes that are started anew, forgeries."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from core_pair import CONFIG, CredentialsOf, Node, Pair, S
from datagrams import one

from quicoll_transport.carrier import CLOSE_FORGOTTEN, CLOSE_REFUSED, CLOSE_REPLACED
from quicoll_transport.endpoint.core.connection import Connection
from quicoll_transport.endpoint.core.table import Table
from quicoll_transport.events import ConnectionDown
from quicoll_transport.link.core import LinkState
from quicoll_transport.security.limits import Pace, PaceConfig

if TYPE_CHECKING:
    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.net.addresses import Address

SHORT, LONG = 0x40, 0xC0
CID = b"12345678"


@pytest.fixture
def pair(credentials_of: CredentialsOf) -> Pair:
    return Pair(credentials_of, CONFIG)


def calm(pair: Pair) -> None:
    pair.until(lambda: not pair.under_way)


def told(pair: Pair, node: Node, data: bytes, source: Address) -> list[bytes]:
    """What a node answers to a datagram, and to where it came from."""
    before = len(pair.under_way)
    node.core.receive([one(data, source)], pair.now)
    node.act()
    answers = sorted(pair.under_way)[before:] if before else sorted(pair.under_way)
    assert all(target == source for _, _, _, target, _ in answers)
    return [data for _, _, _, _, data in answers]


def started_anew(pair: Pair, node: Node) -> Node:
    """The node's process dies, says nothing, and another takes its place."""
    return Node(pair, node.credentials, node.address, CONFIG, incarnation=2)


# -- last words ------------------------------------------------------------------------------------------------------


def test_last_words_that_are_lost_are_said_again_to_a_peer_that_goes_on(pair: Pair) -> None:
    ours, theirs = pair.up()
    calm(pair)
    pair.lost = lambda source, data: source == pair.a.address
    pair.a.core.traffic.fail(pair.a.core.connections.of_link[ours], CLOSE_REPLACED, "cut")
    pair.a.act()
    calm(pair)
    assert not pair.b.of(ConnectionDown)
    pair.lost = lambda source, data: source == pair.a.address and bool(data[0] & 0x80)  # no other connection comes up
    theirs.link.send_app(b"are you there?")
    pair.b.core.touch(theirs)
    pair.b.act()
    pair.until(lambda: bool(pair.b.of(ConnectionDown)))
    (down,) = pair.b.of(ConnectionDown)
    assert (down.code, down.reason, down.by_peer) == (CLOSE_REPLACED, "cut", True)
    assert theirs.link.state is LinkState.DOWN
    assert not pair.a.of(ConnectionDown)[1:]


def test_last_words_of_a_handshake_are_said_again_too(pair: Pair) -> None:
    ours = pair.a.dial(pair.b)
    pair.until(lambda: len(pair.b.core.connections) > 0)
    (connection,) = pair.b.core.connections
    assert connection.identity is None
    pair.lost = lambda source, data: source == pair.b.address
    pair.b.core.traffic.fail(connection, CLOSE_REFUSED, "too many handshakes")
    pair.b.act()
    calm(pair)
    pair.lost = lambda source, data: False
    pair.until(lambda: ours.link.refusal != "")
    assert pair.now - 10**12 < CONFIG.handshake_ns // 2, "not when the dialler loses its patience"
    pair.until(lambda: ours.link.state is LinkState.UP)


def test_where_the_peer_has_closed_nothing_is_said_to_what_comes_late(pair: Pair) -> None:
    ours, _ = pair.up()
    calm(pair)
    heard: list[bytes] = []
    pair.lost = lambda source, data: source == pair.a.address and bool(heard.append(data))
    pair.until(lambda: bool(heard))
    pair.lost = lambda source, data: False
    pair.a.core.close(ours, "done", pair.now)
    pair.a.act()
    pair.until(lambda: bool(pair.b.of(ConnectionDown)))
    assert len(pair.b.core.connections) == 0
    assert [told(pair, pair.b, data, pair.a.address) for data in heard * 3] == [[]] * (3 * len(heard))


def test_a_new_connection_of_the_same_peer_is_not_delayed_by_the_old_one(pair: Pair) -> None:
    began = pair.now
    pair.up()
    first = pair.now - began
    for count in (2, 3, 4):
        ours = pair.a.peer(pair.b)
        pair.a.core.traffic.fail(pair.a.core.connections.of_link[ours], CLOSE_REPLACED, "cut")
        pair.a.act()
        assert len(pair.a.core.closed_connections) > 0
        pair.until(lambda count=count: pair.a.peer(pair.b).attempts == count)
        began = pair.now
        pair.until(lambda: pair.a.peer(pair.b).link.state is LinkState.UP)
        assert pair.now - began <= first


def test_what_is_left_of_connections_goes_in_time(pair: Pair) -> None:
    ours, _ = pair.up()
    for _ in range(20):
        pair.a.core.traffic.fail(pair.a.core.connections.of_link[ours], CLOSE_REPLACED, "cut")
        pair.a.act()
        pair.until(lambda: ours.link.state is LinkState.UP)
    assert len(pair.a.core.closed_connections) > 0
    end = pair.now + 5 * S
    pair.until(lambda: pair.now >= end)
    assert (len(pair.a.core.closed_connections), len(pair.b.core.closed_connections)) == (0, 0)


# -- processes that are started anew ---------------------------------------------------------------------------------


def notices(pair: Pair, peer: Peer) -> int:
    """Return after how long a peer notices that the process behind it is another."""
    began = pair.now
    pair.until(lambda: peer.link.state is not LinkState.UP)
    return pair.now - began


def test_a_process_that_was_started_anew_says_so_to_who_dialled_the_one_before(pair: Pair) -> None:
    ours, _ = pair.up()
    calm(pair)
    pair.b, began = started_anew(pair, pair.b), pair.now
    taken = notices(pair, ours)
    (down,) = pair.a.of(ConnectionDown)
    assert (down.code, down.reason) == (CLOSE_FORGOTTEN, "the peer knows nothing of this connection")
    assert taken < CONFIG.lost_after_ns // 4, "at the next heartbeat"
    pair.until(lambda: ours.link.ended)
    assert "unknown link" in ours.link.cause
    assert pair.now - began < CONFIG.lost_after_ns // 2


def test_a_process_that_was_started_anew_says_so_to_whom_the_one_before_had_dialled(pair: Pair) -> None:
    _, theirs = pair.up()
    calm(pair)
    pair.a = started_anew(pair, pair.a)
    assert notices(pair, theirs) < CONFIG.lost_after_ns // 4
    assert pair.b.of(ConnectionDown)[0].code == CLOSE_FORGOTTEN


def test_without_a_reset_it_takes_the_whole_deadline(pair: Pair) -> None:
    ours, _ = pair.up()
    calm(pair)
    pair.b = started_anew(pair, pair.b)
    pair.lost = lambda source, data: source == pair.b.address and not data[0] & 0x80 and len(data) <= 43
    heard = max(connection.carrier.heard_ns or 0 for connection in pair.a.core.connections)
    pair.until(lambda: ours.link.ended)
    assert pair.now == heard + CONFIG.lost_after_ns


def test_another_endpoint_of_the_same_node_cannot_be_made_to_say_it(pair: Pair) -> None:
    """RFC 9000 section 21.11: who sees a packet may send it to where the same certificate is shown."""
    ours, _ = pair.up()
    calm(pair)
    seen: list[bytes] = []
    pair.lost = lambda source, data: source == pair.a.address and bool(seen.append(data))
    pair.until(lambda: bool(seen))
    pair.lost = lambda source, data: False
    beside = Node(pair, pair.b.credentials, ("192.0.2.2", 22), CONFIG)
    answers = told(pair, beside, seen[-1], ("192.0.2.66", 6))
    assert len(answers) == 1
    for address in (pair.b.address, ("192.0.2.66", 6)):
        pair.a.core.receive([one(answers[0], address)], pair.now)
        pair.a.act()
    assert ours.link.state is LinkState.UP
    assert not pair.a.of(ConnectionDown)


# -- forgeries and floods --------------------------------------------------------------------------------------------


def test_forged_resets_end_nothing(pair: Pair) -> None:
    ours, theirs = pair.up()
    calm(pair)
    rng = random.Random(1)
    cids = list(pair.a.core.connections.by_cid)
    for _ in range(500):
        for node, source in ((pair.a, pair.b.address), (pair.b, pair.a.address), (pair.a, ("192.0.2.66", 6))):
            head = bytes([SHORT]) + (rng.choice(cids) if rng.random() < 0.5 else rng.randbytes(8))
            told_nothing = one(head + rng.randbytes(rng.randrange(0, 60)), source)
            node.core.receive([told_nothing], pair.now)
            node.core.actions.clear()
    assert ours.link.state is theirs.link.state is LinkState.UP
    assert not pair.a.of(ConnectionDown)
    assert not pair.b.of(ConnectionDown)
    assert ours.link.stats.connections == 1


def test_a_real_reset_from_elsewhere_is_not_taken_by_a_client(pair: Pair) -> None:
    ours, _ = pair.up()
    calm(pair)
    token = pair.a.core.connections.of_link[ours].reset_token
    assert token is not None
    reset = bytes([SHORT]) + bytes(24) + token
    assert told(pair, pair.a, reset, ("192.0.2.66", 6)) == []
    assert not pair.a.of(ConnectionDown)
    told(pair, pair.a, reset, pair.b.address)
    assert pair.a.of(ConnectionDown)[0].code == CLOSE_FORGOTTEN


def test_answers_to_what_is_unknown_are_shorter_bounded_and_for_short_headers_only(pair: Pair) -> None:
    rng = random.Random(2)
    answers = []
    for i in range(5000):
        size = rng.choice((9, 20, 29, 30, 31, 44, 100, 1200))
        data = bytes([rng.choice((SHORT, LONG, 0, 0x80)) | rng.randrange(64)]) + rng.randbytes(size - 1)
        came = told(pair, pair.b, data, ("192.0.2.66", 6 + i))
        pair.under_way.clear()
        assert len(came) <= 1
        for answer in came:
            assert data[0] & 0xC0 == SHORT, "no long header, and nothing that is no packet"
            assert answer[0] & 0xC0 == SHORT
            assert 21 <= len(answer) < len(data)
        answers += came
    assert len(answers) == CONFIG.guard.unknown_burst
    assert [pair.b.gate.disown(bytes([form]) + bytes(99)) is None for form in (LONG, 0x80, 0, SHORT)] == [True] * 3 + [
        False
    ]
    pair.now += S
    again = 0
    for _ in range(300):
        again += len(told(pair, pair.b, bytes([SHORT]) + rng.randbytes(99), ("192.0.2.66", 6)))
        pair.under_way.clear()
    assert again == CONFIG.guard.unknown


def test_no_token_leads_to_a_connection_that_is_over_or_has_another_one() -> None:
    carrier: Any = SimpleNamespace(cids=[CID], retired_cids=[], reset_token=b"the first token.")
    connection = Connection(carrier, dialled=True, deadline_ns=S, pace=Pace(PaceConfig()))
    table = Table()
    table.add(connection)
    first, second = (memoryview(bytes(20) + token) for token in (b"the first token.", b"the other token."))
    assert table.disowned(first) is connection
    carrier.reset_token = b"the other token."
    table.refresh(connection)
    assert (table.disowned(first), table.disowned(second)) == (None, connection)
    table.remove(connection)
    assert table.disowned(second) is None
