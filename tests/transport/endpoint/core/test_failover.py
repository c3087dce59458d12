"""A link whose path is cut goes on over another one, in the middle of what it does. On a virtual clock."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from core_pair import CONFIG, MS, CredentialsOf, Node, Pair, S
from datagrams import one
from link_pair import payload, tag

from quicoll_transport.events import ConnectionDown, ConnectionUp, DialStarted
from quicoll_transport.link.core import LinkState

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll_transport.endpoint.core.peer import Peer
    from quicoll_transport.net.addresses import Address

SIZE = 1 << 20


class Paths:
    """A pair with two addresses each, and a link that a has dialled; a cut is by the address that datagrams leave."""

    def __init__(self, credentials_of: CredentialsOf) -> None:
        self.pair = Pair(credentials_of, CONFIG)
        self.a, self.b = self.pair.a, self.pair.b
        self.first = (self.a.address, self.b.address)
        self.second = tuple(self.pair.second[address] for address in self.first)
        self.cut: set[Address] = set()
        self.pair.lost = lambda source, data: source in self.cut
        self.ours = self.a.dial(self.b, self.b.address, self.second[1])
        self.until(lambda: self.ours.link.state is LinkState.UP and self.a.identity in self.b.core.peers)
        self.theirs = self.b.peer(self.a)
        self.until(lambda: self.theirs.link.state is LinkState.UP)

    def until(self, condition: Callable[[], bool], *, within: int = 60 * S) -> None:
        self.pair.until(condition, within=within)

    def rest(self, ns: int) -> None:
        end = self.pair.now + ns
        self.until(lambda: self.pair.now >= end, within=2 * ns + S)

    def begin(self, source: Peer, target: Peer, number: int) -> tuple[bytearray, list[object]]:
        """A message of SIZE bytes; return its memory at the target, and who has heard of its end."""
        memory, done = bytearray(SIZE), list[object]()
        target.link.post(tag(number), memoryview(memory), done.append)
        source.link.send(tag(number), memoryview(payload(number, SIZE)), done.append)
        for node, peer in ((self.a, self.ours), (self.b, self.theirs)):
            node.core.touch(peer)
            node.act()
        return memory, done

    def is_over(self) -> bool:
        return self.ours.link.ended and self.theirs.link.ended

    def has_ended(self, connections: int) -> bool:
        """Whether so many connections of a's have."""
        return len(self.a.of(ConnectionDown)) >= connections

    def address(self, node: Node) -> Address | None:
        (connection,) = node.core.connections
        return connection.carrier.peer_address


def _both(done: list[object]) -> bool:
    return len(done) == 2


@pytest.fixture
def paths(credentials_of: CredentialsOf) -> Paths:
    return Paths(credentials_of)


@pytest.mark.parametrize("one_way", [(0, 1), (0,), (1,)], ids=["both ways", "from the dialler", "to the dialler"])
@pytest.mark.parametrize("sender", ["dialler", "acceptor", "both"])
@pytest.mark.parametrize("after", [0, 20, 40])
def test_a_message_goes_on_over_the_other_path_when_its_own_is_cut(
    paths: Paths, one_way: tuple[int, ...], sender: str, after: int
) -> None:
    ours, theirs = paths.ours, paths.theirs
    ends = {"dialler": [(ours, theirs)], "acceptor": [(theirs, ours)], "both": [(ours, theirs), (theirs, ours)]}[sender]
    under_way = [(number, *paths.begin(*pair, number)) for number, pair in enumerate(ends)]
    paths.rest(after * MS)
    assert not any(done for _, _, done in under_way)
    before = sum(link.stats.bytes_received for link in (ours.link, theirs.link))
    paths.cut |= {paths.first[at] for at in one_way}
    cut_ns = paths.pair.now
    paths.until(lambda: all(len(done) == 2 for _, _, done in under_way), within=1500 * MS)
    for number, memory, _ in under_way:
        assert memory == payload(number, SIZE)
    assert paths.address(paths.a) == paths.second[1]
    assert paths.address(paths.b) == paths.second[0]
    assert ours.link.state is theirs.link.state is LinkState.UP
    assert [ours.link.stats.connections, theirs.link.stats.connections] == [2, 2]
    assert not paths.a.ended
    assert not paths.b.ended
    assert before == 0
    (up,) = paths.a.of(ConnectionUp)[1:]
    assert cut_ns + 200 * MS <= up.t_ns < cut_ns + 500 * MS
    assert "its path is silent" in [event.reason for event in paths.a.of(ConnectionDown)]


def test_what_had_arrived_does_not_travel_again(paths: Paths) -> None:
    memory, done = paths.begin(paths.ours, paths.theirs, 1)
    paths.rest(60 * MS)
    paths.cut |= set(paths.first)
    paths.until(lambda: len(done) == 2)
    assert memory == payload(1, SIZE)
    assert paths.ours.link.stats.bytes_resumed > 100_000


@pytest.mark.parametrize("idle", [0, 700])
def test_an_idle_link_goes_on_over_the_other_path_before_anybody_suspects(paths: Paths, idle: int) -> None:
    paths.rest(idle * MS)
    paths.cut |= set(paths.first)
    paths.until(lambda: paths.ours.link.stats.connections == 2, within=CONFIG.link().detector.suspect_after_ns)
    paths.rest(10 * S)
    assert not paths.ours.link.ended
    assert not paths.theirs.link.ended
    assert len(paths.a.of(DialStarted)) == 2
    assert len(paths.a.states) == 3, "up, down and up: not suspected"


def test_the_path_that_was_left_is_taken_again_when_the_other_one_is_cut(paths: Paths) -> None:
    for cut in (paths.first, paths.second, paths.first):
        paths.rest(3 * S)
        paths.cut = set(cut)
        _, done = paths.begin(paths.theirs, paths.ours, len(paths.a.of(DialStarted)))
        paths.until(partial(_both, done), within=S)
    assert paths.address(paths.a) == paths.second[1]
    assert paths.ours.link.stats.connections == 4


@pytest.mark.parametrize("busy", [True, False])
def test_when_both_paths_are_cut_the_link_is_lost_when_it_would_be_without_a_second_one(
    credentials_of: CredentialsOf, paths: Paths, busy: bool
) -> None:
    single = Paths(credentials_of)
    single.ours.several = False
    lost = []
    for each in (paths, single):
        if busy:
            each.begin(each.ours, each.theirs, 1)
        each.rest(50 * MS)
        each.cut |= {*each.first, *each.second}
        began = each.pair.now
        each.until(each.is_over)
        assert each.ours.link.cause.startswith("silent for")
        lost.append(each.pair.now - began)
        assert len(each.a.core.connections) == 0
    assert lost[0] == lost[1]
    assert len(paths.a.of(DialStarted)) > 2
    assert len(single.a.of(DialStarted)) == 1


def test_a_peer_that_stands_still_keeps_its_connection(paths: Paths) -> None:
    """What has waited for it is answered in order: the old packets before the handshake of a successor."""
    _, done = paths.begin(paths.ours, paths.theirs, 1)
    paths.rest(30 * MS)
    kept: list[Any] = []
    paths.pair.taken = lambda source, target, data: kept.append((source, target, data)) is None
    paths.rest(600 * MS)
    assert len(paths.a.of(DialStarted)) > 1
    paths.pair.taken = lambda source, target, data: False
    for each in kept:
        paths.pair.send(*each)
    paths.until(lambda: len(done) == 2)
    paths.until(lambda: len(paths.a.core.connections) == 1)
    assert paths.ours.link.stats.connections == 1
    assert paths.address(paths.a) == paths.first[1]


def test_mistakes_come_ever_more_rarely(paths: Paths) -> None:
    """The first path is slow for a moment: what was held up arrives once a successor has been dialled."""
    gaps: list[int] = []
    for known in range(6):
        began, kept = paths.pair.now, list[Any]()

        def hold(source: Address, target: Address, data: bytes, kept: list[Any] = kept) -> bool:
            if target == paths.first[1]:
                kept.append((source, target, data))
            return target == paths.first[1]

        paths.pair.taken = hold
        paths.until(lambda: bool(paths.a.core.connections.successors))
        gaps.append(paths.pair.now - began)
        paths.pair.taken = lambda source, target, data: False
        for each in kept:
            paths.pair.send(*each)
        paths.until(partial(paths.has_ended, known + 1))
        assert paths.a.of(ConnectionDown)[-1].reason == "the path before it answers again"
    assert paths.ours.link.stats.connections == 1
    assert gaps[-1] >= CONFIG.link().detector.suspect_after_ns > gaps[0]


def test_whoever_is_at_the_other_address_has_to_be_the_peer(credentials_of: CredentialsOf, paths: Paths) -> None:
    """A node with a good certificate of another name has taken the second address."""
    stranger = Node(paths.pair, credentials_of("d"), ("203.0.113.9", 9), CONFIG)

    def elsewhere(source: Address, target: Address, data: bytes) -> bool:
        if target == paths.second[1]:
            stranger.core.receive([one(data, paths.second[0])], paths.pair.now)
            stranger.act()
        elif source == stranger.address:
            at = paths.pair.now + 1
            paths.pair.under_way.append((at, 10**9 + at, paths.second[1], paths.first[0], data))
        else:
            return False
        return True

    paths.pair.taken = elsewhere
    paths.cut |= set(paths.first)
    paths.until(lambda: paths.ours.link.ended)
    assert any("dialled worker/b, found worker/d" in refused for refused in paths.a.core.refused)
    assert paths.ours.link.stats.connections == 1


def test_only_addresses_that_were_given_are_dialled(paths: Paths) -> None:
    paths.cut |= {*paths.first, *paths.second}
    paths.until(lambda: paths.ours.link.ended)
    assert {event.address for event in paths.a.of(DialStarted)} == {paths.first[1], paths.second[1]}


def test_who_was_dialled_makes_no_successor(paths: Paths) -> None:
    paths.b.core.peer(paths.a.identity, addresses=[paths.first[0], paths.second[0]], dial=True, now_ns=paths.pair.now)
    paths.cut |= set(paths.first)
    paths.begin(paths.theirs, paths.ours, 1)
    paths.until(lambda: paths.theirs.link.stats.connections == 2)
    assert not paths.b.of(DialStarted)


def test_an_address_that_the_system_cannot_reach_is_left_at_once(paths: Paths) -> None:
    paths.cut |= set(paths.first)
    _, done = paths.begin(paths.ours, paths.theirs, 1)
    began = paths.pair.now
    paths.a.core.unreachable(paths.first[1], "network unreachable", paths.pair.now, refused=False)
    paths.a.act()
    paths.until(lambda: paths.ours.link.stats.connections == 2)
    assert paths.pair.now - began < 100 * MS
    paths.until(lambda: len(done) == 2)


def test_nothing_is_left_of_a_link_that_ends_while_a_successor_shakes_hands(paths: Paths) -> None:
    paths.cut |= {*paths.first, *paths.second}
    paths.until(lambda: bool(paths.a.core.connections.successors))
    paths.a.core.close(paths.ours, "enough", paths.pair.now)
    paths.a.act()
    assert len(paths.a.core.connections) == 0
    assert not paths.a.core.connections.successors
    assert not paths.a.core._failover._doubts
