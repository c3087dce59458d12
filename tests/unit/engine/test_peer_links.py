"""The tasks that make links: what they report, and what takes the place of what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from quicoll.engine.lanes import Lanes
from quicoll.engine.neighbours import Neighbours
from quicoll.engine.peer_links import PeerLinks
from quicoll.engine.ways import DIALS_TOO_S, LATE_OPENER, OPENERS_S
from quicoll.membership.member.actions import ExpectPeer, ProbePaths
from quicoll.membership.view import Member, View
from quicoll_transport.endpoint import LinkState
from quicoll_transport.errors import LinkLost
from quicoll_transport.sim import World

S = 1_000_000_000
MEMBERS = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate("abc"))
SEEN = {node: (f"203.0.113.{number}", 40000) for number, node in enumerate("abc", 1)}
HIDDEN = tuple(
    Member(rank=rank, node=node, incarnation=1, addresses=(("10.0.0.1", 5),), seen_at=SEEN[node])
    for rank, node in enumerate("abc")
)


class Link:
    """A link that comes up, or is lost, when the test says so."""

    def __init__(self, node: str, loop: asyncio.AbstractEventLoop, *, dial: bool) -> None:
        self.node, self.dial, self.remote_incarnation = node, dial, 0
        self.state, self.closed = LinkState.CONNECTING, ""
        self.identity: Any = None
        self.addresses: list[Any] = []
        self.proved_address: Any = None
        self.outcome: asyncio.Future[None] = loop.create_future()

    def listen(self, on_app: Any, on_state: Any) -> None:
        pass

    async def wait_up(self) -> None:
        await asyncio.shield(self.outcome)

    def close(self, cause: str) -> None:
        self.closed = cause


class Bench:
    """Node "b" of three, on a simulated clock."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = world.host("b").start()
        self.links: dict[Any, Link] = {}
        self.made: list[Link] = []
        self.formed: list[tuple[int, tuple[str, ...]]] = []
        self.reached: list[int] = []
        self.knocks: list[tuple[Any, float]] = []
        self.dialled: dict[str, list[Any]] = {}
        self.paired: list[Any] = []
        endpoint: Any = self
        self.asked: list[str] = []
        self.ways: dict[str, Any] = {}
        self.detours: Any = SimpleNamespace(way=self._way, trouble=lambda: "the relay sleeps")
        self.peers = PeerLinks(
            endpoint,
            self.detours,
            job="test",
            node="b",
            loop=self.loop,
            pair=self.paired.append,
            neighbours=Neighbours(loop=self.loop, node="b", host=None, emit=lambda kind, **fields: None),
            lanes=Lanes(loop=self.loop, node="b", advertised="", emit=lambda kind, **fields: None),
            on_message=lambda link, message: None,
            on_state=lambda link: None,
            on_formed=self._formed,
            on_reached=self.reached.append,
        )

    def _way(self, node: str) -> Any:
        self.asked.append(node)
        return self.ways.get(node)

    def _formed(self, view: View, unreachable: tuple[str, ...], why: str) -> None:
        self.formed.append((view.view_id, unreachable))
        self.why = why

    def knock(self, address: Any) -> None:
        self.knocks.append((address, round(self.world.elapsed_ns / S, 3)))

    def link(self, identity: Any, *, addresses: Any, dial: bool) -> Link:
        self.dialled[identity.node] = list(addresses)
        link = self.links.get(identity)
        if link is None or link.closed:
            link = self.links[identity] = Link(identity.node, self.loop, dial=dial)
            self.made.append(link)
        link.identity, link.addresses, link.dial = identity, list(addresses) or link.addresses, link.dial or dial
        return link

    def form(self, view_id: int, members: tuple[Member, ...] = MEMBERS) -> None:
        self.peers.form(View(view_id=view_id, members=members, seed=0, committed_step=0, committed_view=0))
        self.turn()

    def probe(self, number: int, pace: float = 1.0) -> None:
        self.peers.probe(ProbePaths(number, MEMBERS), pace=pace)
        self.turn()

    def up(self) -> None:
        for link in self.links.values():
            if not link.outcome.done():
                link.state = LinkState.UP
                link.outcome.set_result(None)
        self.turn()

    def turn(self, seconds: float = 0.0) -> None:
        self.world.run(limit_ns=round(seconds * S))


@pytest.fixture
def bench() -> Iterator[Bench]:
    with World(1) as world:
        yield Bench(world)


def test_a_view_is_formed_when_all_links_are_up_and_one_of_two_nodes_dials(bench: Bench) -> None:
    bench.form(7)
    assert [(link.node, link.dial) for link in bench.made] == [("a", False), ("c", True)]
    assert bench.formed == []
    bench.up()
    assert bench.formed == [(7, ())]


def test_nodes_that_cannot_be_reached_are_named_when_all_are_known(bench: Bench) -> None:
    bench.form(7)
    first, second = bench.made
    first.outcome.set_exception(LinkLost("silence", peer="a", silent_for=1.0))
    bench.turn()
    assert bench.formed == []
    second.outcome.set_result(None)
    bench.turn()
    assert bench.formed == [(7, ("a",))]


def test_a_later_view_takes_the_place_of_one_that_is_being_formed(bench: Bench) -> None:
    bench.form(7)
    bench.form(8)
    bench.up()
    assert bench.formed == [(8, ())]


def test_a_probe_dials_every_node_and_again_until_all_are_up(bench: Bench) -> None:
    bench.probe(3)
    first = list(bench.made)
    assert [(link.node, link.dial) for link in first] == [("a", True), ("c", True)]
    bench.turn(1.5)
    assert [link.closed for link in first] == ["dialled again"] * 2
    assert len(bench.made) == 4
    assert bench.reached == []
    bench.up()
    assert bench.reached == [3]


def test_a_later_probe_and_a_view_take_the_place_of_a_probe(bench: Bench) -> None:
    bench.probe(3)
    bench.probe(4)
    bench.up()
    assert bench.reached == [4]
    bench.links.clear()
    bench.probe(5)
    bench.form(7)
    bench.up()
    assert (bench.reached, bench.formed) == ([4], [(7, ())])


def test_what_is_stopped_reports_nothing_and_dials_no_more(bench: Bench) -> None:
    bench.probe(3)
    bench.peers.stop_probing()
    bench.form(7)
    bench.peers.stop()
    bench.turn(5.0)
    made = len(bench.made)
    bench.up()
    assert (bench.reached, bench.formed, made) == ([], [], 2)


def test_behind_nat_the_one_that_dials_tries_what_is_seen_too_and_the_other_opens_for_it(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    assert bench.dialled == {"a": [], "c": [("10.0.0.1", 5), SEEN["c"]]}
    bench.turn(10.0)
    assert bench.knocks == [(SEEN["a"], at) for at in OPENERS_S]


def test_who_opens_dials_as_well_where_there_is_no_link_by_then(bench: Bench) -> None:
    bench.ways["a"] = WAY
    bench.form(7, HIDDEN)
    bench.turn(DIALS_TOO_S - 0.01)
    assert [link.dial for link in bench.made] == [False, True]
    bench.turn(0.02)
    assert [(link.node, link.dial) for link in bench.made] == [("a", True), ("c", True)]
    assert bench.dialled["a"] == [("10.0.0.1", 5), SEEN["a"], WAY]


def test_who_opens_does_not_dial_where_there_is_a_link_by_then(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    bench.up()
    bench.turn(5.0)
    assert [link.dial for link in bench.made] == [False, True]


def test_a_peer_that_is_seen_elsewhere_by_now_is_opened_for_and_dialled_there(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    bench.turn(0.2)
    moved = {node: replace(member, seen_at=("203.0.113.9", 41000)) for node, member in zip("abc", HIDDEN, strict=True)}
    for node in "ac":
        bench.peers.expect(ExpectPeer(moved[node], HIDDEN[1]))
    assert bench.dialled["c"] == [("10.0.0.1", 5), ("203.0.113.9", 41000)]
    bench.knocks.clear()
    bench.turn(10.0)
    assert {address for address, _ in bench.knocks} == {("203.0.113.9", 41000)}
    assert bench.dialled["a"] == [("10.0.0.1", 5), ("203.0.113.9", 41000)]
    assert len(bench.made) == 2


def test_where_a_peer_is_heard_to_be_goes_before_what_the_view_said_until_the_next_one(bench: Bench) -> None:
    """Both come together, and the task that makes the view's links has not begun when the later word is taken in."""
    view = View(view_id=7, members=HIDDEN, seed=0, committed_step=0, committed_view=0)
    bench.peers.form(view)
    bench.peers.expect(ExpectPeer(replace(HIDDEN[2], seen_at=("203.0.113.9", 41000)), HIDDEN[1]))
    bench.turn()
    assert bench.dialled["c"] == [("10.0.0.1", 5), ("203.0.113.9", 41000)]
    bench.peers.of_view(view)
    assert bench.dialled["c"] == [("10.0.0.1", 5), ("203.0.113.9", 41000)]
    bench.form(8, HIDDEN)
    assert bench.dialled["c"] == [("10.0.0.1", 5), SEEN["c"]]


def test_no_opener_is_sent_once_there_is_a_link_or_another_one_is_made(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    bench.turn(0.2)
    bench.form(8, HIDDEN)
    bench.turn(0.05)
    assert [at for _, at in bench.knocks] == [0.0, 0.1, 0.2]
    bench.up()
    bench.turn(5.0)
    assert len(bench.knocks) == 3


def test_no_opener_is_sent_after_the_end(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    bench.peers.stop()
    bench.turn(5.0)
    assert len(bench.knocks) == 1


OPEN = tuple(replace(member, addresses=((f"10.0.0.{member.rank + 1}", 5),)) for member in MEMBERS)


def test_where_nobody_is_behind_nat_a_link_that_comes_soon_needs_no_opener(bench: Bench) -> None:
    bench.form(7, OPEN)
    bench.turn(OPENERS_S[LATE_OPENER] - 0.01)
    bench.up()
    bench.turn(5.0)
    assert bench.knocks == []


def test_where_nobody_is_behind_nat_who_is_dialled_opens_late_for_a_firewall_and_dials_not(bench: Bench) -> None:
    bench.form(7, OPEN)
    bench.turn(10.0)
    assert bench.knocks == [(OPEN[0].addresses[0], at) for at in OPENERS_S[LATE_OPENER:]]
    assert [(link.node, link.dial) for link in bench.made] == [("a", False), ("c", True)]
    assert bench.asked == []


def test_who_has_told_no_address_is_not_opened_for(bench: Bench) -> None:
    bench.form(7)
    bench.turn(5.0)
    assert bench.knocks == []


def test_who_is_expected_is_opened_for_and_dialled_by_the_one_that_can(bench: Bench) -> None:
    bench.peers.expect(ExpectPeer(HIDDEN[0], HIDDEN[1]))
    bench.turn()
    assert [address for address, _ in bench.knocks] == [SEEN["a"]]
    assert [(link.node, link.dial) for link in bench.made] == [("a", False)]
    bench.peers.expect(ExpectPeer(MEMBERS[0], HIDDEN[1]))
    assert [(link.node, link.dial) for link in bench.made] == [("a", True)]


def test_a_rank_behind_no_nat_opens_for_one_that_is_as_there_may_be_a_firewall_in_front_of_it(bench: Bench) -> None:
    bench.form(7, (HIDDEN[0], *MEMBERS[1:]))
    bench.turn(0.05)
    assert bench.knocks == [(SEEN["a"], 0.0)]


def test_a_probe_behind_nat_takes_the_time_that_its_addresses_need(bench: Bench) -> None:
    bench.peers.probe(ProbePaths(3, HIDDEN, HIDDEN[1]), pace=0.1)
    bench.turn(0.9)
    assert len(bench.made) == 2
    assert bench.dialled["a"] == [("10.0.0.1", 5), SEEN["a"]]
    bench.turn(1.0)
    assert len(bench.made) == 4


WAY = ("240.0.0.1", 1)


def test_behind_nat_the_relay_is_asked_by_both_sides_and_for_no_link_that_is_up(bench: Bench) -> None:
    bench.ways["c"] = WAY
    bench.form(7, HIDDEN)
    assert bench.asked == ["a", "c"]
    assert bench.dialled == {"a": [], "c": [("10.0.0.1", 5), SEEN["c"], WAY]}
    bench.up()
    bench.form(8, HIDDEN)
    assert bench.asked == ["a", "c"]
    bench.form(9)
    assert bench.asked == ["a", "c"], "nobody is behind NAT"


def test_a_way_that_opens_while_a_link_is_made_is_tried_too_and_not_when_it_is_up(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    bench.detours.on_way("c", WAY)
    bench.detours.on_way("a", WAY)
    bench.detours.on_way("x", WAY)
    assert bench.dialled == {"a": [], "c": [("10.0.0.1", 5), SEEN["c"], WAY]}
    bench.detours.on_way("c", ("240.0.0.2", 1))
    assert bench.dialled["c"] == [("10.0.0.1", 5), SEEN["c"], ("240.0.0.2", 1)], "the way before is shut"
    bench.up()
    bench.detours.on_way("c", WAY)
    assert bench.dialled["c"][-1] == ("240.0.0.2", 1)


def test_a_link_by_a_way_that_is_shut_ends_with_the_reason_and_others_stay(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    bench.up()
    direct, by_relay = bench.made
    direct.proved_address, by_relay.proved_address = SEEN["a"], WAY
    for node in ("a", "c", "x"):
        bench.detours.on_shut(node, WAY, "the relay is gone")
    assert (direct.closed, by_relay.closed) == ("", "the relay is gone")


def test_the_error_says_by_which_ways_a_node_was_tried(bench: Bench) -> None:
    bench.form(7, HIDDEN)
    _, second = bench.made
    bench.made[0].outcome.set_result(None)
    second.outcome.set_exception(LinkLost("by relay: no answer", peer="c", silent_for=1.0))
    bench.turn()
    assert bench.formed == [(7, ("c",))]
    assert bench.why == "no link to c: by relay: no answer (behind NAT; dialled from here; the relay sleeps)"


def test_nothing_is_dialled_any_more_when_the_rank_has_left(bench: Bench) -> None:
    """Seed 6152: the relay's answer came while the endpoint said good-bye, which makes no links any more."""
    bench.form(7, HIDDEN)
    dialled = {node: list(addresses) for node, addresses in bench.dialled.items()}
    bench.peers.stop()
    bench.detours.on_way("c", ("192.0.2.9", 4433))
    bench.peers.expect(ExpectPeer(HIDDEN[0], HIDDEN[1]))
    bench.turn()
    assert bench.dialled == dialled
    assert len(bench.made) == 2
