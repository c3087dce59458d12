"""EndpointCore on a virtual clock, without sockets or an event loop: two cores and a list of datagrams between them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import core_pair
import pytest
from core_pair import CONFIG, MS, CredentialsOf, Pair, S
from datagrams import one
from link_pair import payload, tag

from quicoll_transport.carrier import CLOSE_NORMAL
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.errors import ConfigurationError
from quicoll_transport.events import ConnectionDown, ConnectionUp, DialStarted, LinkChanged, PeerRefused
from quicoll_transport.link.core import LinkState
from quicoll_transport.net.runs import joined
from quicoll_transport.security.identity import WORKER, Identity

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address


@pytest.fixture
def pair(credentials_of: CredentialsOf) -> Pair:
    return Pair(credentials_of, CONFIG)


# -- coming up -------------------------------------------------------------------------------------------------------


def test_a_handshake_and_hello_make_a_link_at_both_ends(pair: Pair) -> None:
    ours, theirs = pair.up()
    assert [type(event) for event in pair.a.events] == [DialStarted, LinkChanged, ConnectionUp]
    assert [type(event) for event in pair.b.events] == [LinkChanged, ConnectionUp]
    assert pair.a.states == pair.b.states == [LinkState.UP]
    assert (ours.fingerprint, theirs.fingerprint) == ("of b", "of a")
    assert pair.b.core.connections.strangers == 0
    for node, peer in ((pair.a, ours), (pair.b, theirs)):
        (connection,) = node.core.connections
        assert node.core.connections.of_link[peer] is connection
        assert connection.carries


def test_messages_and_words_arrive_and_are_acknowledged(pair: Pair) -> None:
    ours, theirs = pair.up()
    memory, done = bytearray(100_000), []
    theirs.link.post(tag(1), memoryview(memory), done.append)
    ours.link.send(tag(1), memoryview(payload(1, 100_000)), done.append)
    ours.link.send_app(b"word")
    assert pair.a.core.undelivered
    pair.a.core.touch(ours)
    assert pair.a.core.waiting
    pair.b.core.touch(theirs)
    pair.b.act()
    pair.a.act()
    pair.until(lambda: len(done) == 2 and not pair.a.core.undelivered)
    assert memory == payload(1, 100_000)
    assert pair.b.words == [b"word"]


def test_nothing_is_sent_before_the_core_is_served(pair: Pair) -> None:
    ours, _ = pair.up()
    pair.until(lambda: not pair.under_way)
    ours.link.send_app(b"word")
    pair.a.core.touch(ours)
    assert not pair.a.core.actions
    pair.a.act()
    assert pair.under_way


@pytest.mark.parametrize(("latency_ms", "patience_ns"), [(1, 0), (9, 0), (10, MS), (40, MS)])
def test_what_follows_many_datagrams_of_a_long_path_may_wait_a_part_of_its_round_trip(
    pair: Pair, latency_ms: int, patience_ns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_pair, "LATENCY", latency_ms * MS)
    ours, theirs = pair.up()
    pair.until(lambda: not pair.under_way)
    waiting: list[tuple[bytes, Address]] = []

    def taken(source: Address, target: Address, data: bytes) -> bool:
        waiting.append((data, source))
        return True

    memory = bytearray(12_000)
    theirs.link.post(tag(1), memoryview(memory), lambda error: None)
    pair.taken = taken
    ours.link.send(tag(1), memoryview(payload(1, 12_000)), lambda error: None)
    pair.a.core.touch(ours)
    pair.a.act()
    assert len(waiting) >= 9
    pair.b.core.receive(joined(waiting[:8]), pair.now)
    assert pair.b.core.patience_ns == patience_ns
    pair.b.core.receive(joined(waiting[8:9]), pair.now)
    assert pair.b.core.patience_ns == 0
    pair.b.core.receive(joined([(bytes([0x40]) + bytes(40), ("192.0.2.7", 7))] * 9), pair.now)  # of no connection
    assert pair.b.core.patience_ns == 0


# -- both sides dial -------------------------------------------------------------------------------------------------


def test_an_attempt_that_nobody_answers_does_not_keep_out_the_connection_that_gets_through(pair: Pair) -> None:
    """As between routers of which only one lets in what the other side dials."""
    ours = pair.a.dial(pair.b, ("192.0.2.9", 9))  # a is the lesser one: of two that both work its own is kept
    theirs = pair.b.dial(pair.a)
    pair.until(lambda: ours.link.state is theirs.link.state is LinkState.UP, within=100 * MS)
    assert (ours.attempts, theirs.attempts) == (1, 1)
    assert not pair.b.of(ConnectionDown)


@pytest.mark.parametrize("lost_of_a", range(7))
@pytest.mark.parametrize("lost_of_b", range(7))
def test_where_both_dial_they_come_to_use_one_and_the_same_connection(
    pair: Pair, lost_of_a: int, lost_of_b: int
) -> None:
    """Whichever is answered first, and whichever datagrams are lost until then."""
    left = {pair.a.address: lost_of_a, pair.b.address: lost_of_b}

    def lost(source: Address, data: bytes) -> bool:
        left[source] -= 1
        return left[source] >= 0

    pair.lost = lost
    ours, theirs = pair.a.dial(pair.b), pair.b.dial(pair.a)
    pair.until(lambda: ours.link.state is theirs.link.state is LinkState.UP)
    ours.link.send_app(b"to b")
    theirs.link.send_app(b"to a")
    pair.a.core.touch(ours)
    pair.b.core.touch(theirs)
    pair.a.act()
    pair.b.act()
    pair.until(lambda: (pair.a.words, pair.b.words) == ([b"to a"], [b"to b"]))
    pair.until(lambda: len(list(pair.a.core.connections)) == len(list(pair.b.core.connections)) == 1)
    (here,), (there,) = pair.a.core.connections, pair.b.core.connections
    assert here.dialled is not there.dialled
    assert not ours.link.ended
    assert not theirs.link.ended


# -- refusals --------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_refused_hears_no_reason_and_the_observer_hears_it(pair: Pair) -> None:
    pair.b.refuses = "not on the list"
    ours = pair.a.dial(pair.b)
    pair.until(lambda: bool(pair.b.of(PeerRefused)))
    pair.until(lambda: bool(ours.link.refusal))
    assert "not on the list" in pair.b.of(PeerRefused)[0].reason
    assert pair.b.core.refused == ["not on the list (peer=worker/a)"]
    assert ours.link.refusal == "refused: refused"
    assert pair.b.core.peers == {}
    assert len(pair.b.core.connections) == 0


def test_a_dialler_gives_up_at_its_connect_deadline_and_says_why(pair: Pair) -> None:
    pair.b.refuses = "no"
    began, ours = pair.now, pair.a.dial(pair.b)
    pair.until(lambda: ours.link.ended)
    assert pair.now == began + CONFIG.connect_ns
    assert ours.link.cause == "not reached within 20.0 s (refused: refused)"
    assert ours.attempts > 10
    assert pair.a.ended == [ours]
    assert pair.a.core.peers == {}


def test_a_denied_certificate_is_refused_and_its_links_end_at_once(pair: Pair) -> None:
    ours, theirs = pair.up()
    pair.b.denied.add("a")
    pair.b.core.deny("of a", pair.now)
    pair.b.act()
    assert theirs.link.cause == "its certificate is denied"
    assert pair.b.ended == [theirs]
    assert len(pair.b.core.connections) == 0
    pair.until(lambda: ours.link.ended)
    again = pair.a.dial(pair.b)
    pair.until(lambda: again.link.refusal != "")
    assert again.link.state is LinkState.CONNECTING
    assert "denied" in pair.b.core.refused[-1]


def test_a_link_that_nobody_takes_over_is_closed(pair: Pair) -> None:
    pair.b.takes_over = False
    ours = pair.a.dial(pair.b)
    pair.until(lambda: ours.link.ended)
    assert "could not be taken over" in ours.link.cause
    assert pair.b.core.peers == {}


def test_a_dialled_node_must_be_the_one_that_was_meant(pair: Pair) -> None:
    peer = pair.a.core.peer(Identity("j", WORKER, "c"), addresses=[pair.b.address], dial=True, now_ns=pair.now)
    pair.a.act()
    pair.until(lambda: peer.link.refusal != "")
    assert peer.link.refusal == "we refuse the peer: dialled worker/c, found worker/b (peer=worker/b)"


def test_no_more_links_than_the_settings_allow(credentials_of: CredentialsOf) -> None:
    pair = Pair(credentials_of, EndpointConfig(max_links=1))
    pair.a.dial(pair.b)
    with pytest.raises(ConfigurationError, match="more than 1 links"):
        pair.a.core.peer(Identity("j", WORKER, "c"), addresses=[], dial=False, now_ns=pair.now)


# -- losses and redialling -------------------------------------------------------------------------------------------


def test_a_handshake_survives_lost_datagrams(pair: Pair) -> None:
    count = 0

    def every_third(source: Address, data: bytes) -> bool:
        nonlocal count
        count += 1
        return count % 3 == 0

    pair.lost = every_third
    pair.up()


def test_a_connection_that_fails_is_dialled_again_and_the_link_goes_on(pair: Pair) -> None:
    ours, theirs = pair.up()
    connection = pair.a.core.connections.of_link[ours]
    pair.a.core.traffic.fail(connection, 0x7FFF, "cut")
    pair.a.act()
    assert ours.link.state is LinkState.DOWN
    pair.until(lambda: ours.link.state is theirs.link.state is LinkState.UP)
    assert ours.attempts == 2
    assert ours.link.stats.connections == theirs.link.stats.connections == 2
    assert [event.reason for event in pair.a.of(ConnectionDown)] == ["cut"]


def test_the_pause_between_rounds_doubles_up_to_a_second(pair: Pair) -> None:
    dialled: list[int] = []
    ours = pair.a.dial(pair.b)

    def refuse() -> bool:
        if ours.attempts > len(dialled):
            dialled.append(pair.now)
            pair.a.core.unreachable(pair.b.address, "nothing listens there", pair.now, refused=True)
            pair.a.act()
        return len(dialled) == 8

    pair.until(refuse)
    pauses = [(after - before) // MS for before, after in itertools.pairwise(dialled)]
    assert pauses == [50, 100, 200, 400, 800, 1000, 1000]
    assert ours.link.refusal == "nothing listens there"


def test_the_next_address_is_dialled_at_once_when_one_is_unreachable(pair: Pair) -> None:
    nowhere = ("192.0.2.9", 9)
    ours = pair.a.dial(pair.b, nowhere, pair.b.address)
    pair.until(lambda: ours.attempts == 1)
    began = pair.now
    pair.a.core.unreachable(nowhere, "nothing listens there", pair.now, refused=True)
    pair.a.act()
    assert ours.link.refusal == "192.0.2.9:9: nothing listens there"
    pair.until(lambda: ours.attempts == 2)
    assert pair.now == began
    pair.until(lambda: ours.link.state is LinkState.UP)


def test_an_address_that_is_silent_gives_way_to_the_next(pair: Pair) -> None:
    began = pair.now
    ours = pair.a.dial(pair.b, ("192.0.2.9", 9), pair.b.address)
    pair.until(lambda: ours.attempts == 2)
    assert pair.now - began == 250 * MS
    assert ours.link.refusal == "192.0.2.9:9: no answer"


def test_silence_ends_a_link_exactly_at_its_deadline(pair: Pair) -> None:
    ours, _ = pair.up()
    pair.until(lambda: not pair.under_way)
    heard = max(connection.carrier.heard_ns or 0 for connection in pair.a.core.connections)
    pair.lost = lambda source, data: True
    pair.until(lambda: ours.link.ended)
    assert pair.now == heard + 2 * S
    assert "silent for" in ours.link.cause
    assert pair.a.core.peers == {}


def test_a_closed_link_is_told_to_the_peer(pair: Pair) -> None:
    ours, theirs = pair.up()
    pair.a.core.close(ours, "work is done", pair.now)
    pair.a.act()
    assert ours.link.state is LinkState.CLOSED
    pair.until(lambda: theirs.link.ended)
    assert theirs.link.cause == "closed by the peer (work is done)"
    assert pair.b.of(ConnectionDown)[-1].code == CLOSE_NORMAL


def test_a_host_where_nothing_listens_any_more_ends_a_link_before_its_silence_would(pair: Pair) -> None:
    ours, _ = pair.up()
    began = pair.now
    pair.lost = lambda source, data: True
    while not ours.link.ended:
        pair.a.core.unreachable(pair.b.address, "nothing listens there", pair.now, refused=True)
        pair.a.act()
        pair.step()
    assert pair.now - began < 1 * S


# -- names -----------------------------------------------------------------------------------------------------------


def test_names_are_looked_up_by_the_shell_and_then_dialled(pair: Pair) -> None:
    ours = pair.a.dial(pair.b, ("b.example", 2))
    pair.until(lambda: bool(pair.a.look_ups))
    (asked,) = pair.a.look_ups
    assert (asked.peer, asked.addresses) == (ours.number, (("b.example", 2),))
    assert ours.attempts == 0
    pair.a.core.looked_up(asked.peer, [pair.b.address], [], pair.now)
    pair.a.act()
    pair.until(lambda: ours.link.state is LinkState.UP)


def test_a_name_that_is_not_found_is_asked_for_again_after_a_pause(pair: Pair) -> None:
    ours = pair.a.dial(pair.b, ("b.example", 2))
    pair.until(lambda: bool(pair.a.look_ups))
    began = pair.now
    pair.a.core.looked_up(ours.number, [], ["cannot resolve 'b.example'"], pair.now)
    pair.a.act()
    assert ours.link.refusal == "cannot resolve 'b.example'"
    pair.until(lambda: len(pair.a.look_ups) == 2)
    assert pair.now == began + 50 * MS


def test_a_look_up_is_cancelled_with_its_link_and_a_late_answer_is_dropped(pair: Pair) -> None:
    ours = pair.a.dial(pair.b, ("b.example", 2))
    pair.until(lambda: bool(pair.a.look_ups))
    pair.a.core.close(ours, "no longer needed", pair.now)
    pair.a.act()
    assert pair.a.cancelled == [ours.number]
    pair.a.core.looked_up(ours.number, [pair.b.address], [], pair.now)
    pair.a.act()
    assert len(pair.a.core.connections) == 0
    assert not pair.under_way


# -- ends ------------------------------------------------------------------------------------------------------------


def test_a_core_that_is_shut_closes_everything_and_keeps_nothing(pair: Pair) -> None:
    ours, theirs = pair.up()
    pair.a.core.shut("endpoint closed", pair.now)
    pair.a.act()
    assert ours.link.cause == "endpoint closed"
    assert (len(pair.a.core.connections), pair.a.core.connections.by_cid, pair.a.core.peers) == (0, {}, {})
    assert pair.a.core.next_timer() is None
    pair.until(lambda: theirs.link.ended)
    pair.a.core.receive([one(bytes(1200), pair.b.address)], pair.now)
    pair.a.core.handle_timer(pair.now)
    assert not pair.a.core.actions


def test_a_core_that_closes_lets_no_stranger_in(pair: Pair) -> None:
    pair.b.core.begin_close()
    ours = pair.a.dial(pair.b)
    pair.until(lambda: ours.link.ended)
    assert len(pair.b.core.connections) == 0


def test_what_is_no_datagram_of_ours_changes_nothing(pair: Pair) -> None:
    pair.up()
    pair.until(lambda: not pair.under_way)
    before = len(pair.b.core.connections)
    for data in (b"", b"x", bytes(1200), bytes([0xC0, 0, 0, 0, 1]) + bytes(1195)):
        pair.b.core.receive(joined([(data, ("192.0.2.66", 6))]), pair.now)
        pair.b.act()
    assert len(pair.b.core.connections) == before
    assert pair.b.log == []


def test_a_packet_that_was_too_large_limits_the_next_ones(pair: Pair) -> None:
    ours, theirs = pair.up()
    pair.a.core.limit_datagrams(pair.b.address, 1300, pair.now)
    sizes: list[int] = []

    def look(source: Address, data: bytes) -> bool:
        if source == pair.a.address:
            sizes.append(len(data))
        return False

    pair.lost = look
    done: list[Any] = []
    theirs.link.post(tag(1), memoryview(bytearray(50_000)), done.append)
    ours.link.send(tag(1), memoryview(bytes(50_000)), done.append)
    for node, peer in ((pair.a, ours), (pair.b, theirs)):
        node.core.touch(peer)
        node.act()
    pair.until(lambda: len(done) == 2)
    assert max(sizes) == 1300
