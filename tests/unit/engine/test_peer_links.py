"""The tasks that make links: what they report, and what takes the place of what."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from quicoll.engine.peer_links import PeerLinks
from quicoll.membership.member.actions import ProbePaths
from quicoll.membership.view import Member, View
from quicoll_transport.endpoint import LinkState
from quicoll_transport.errors import LinkLost
from quicoll_transport.sim import World

S = 1_000_000_000
MEMBERS = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate("abc"))


class Link:
    """A link that comes up, or is lost, when the test says so."""

    def __init__(self, node: str, loop: asyncio.AbstractEventLoop, *, dial: bool) -> None:
        self.node, self.dial, self.remote_incarnation = node, dial, 0
        self.state, self.closed = LinkState.CONNECTING, ""
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
        endpoint: Any = self
        self.peers = PeerLinks(
            endpoint,
            job="test",
            node="b",
            loop=self.loop,
            on_message=lambda link, message: None,
            on_state=lambda link: None,
            on_formed=lambda view, unreachable: self.formed.append((view.view_id, unreachable)),
            on_reached=self.reached.append,
        )

    def link(self, identity: Any, *, addresses: Any, dial: bool) -> Link:
        link = self.links.get(identity)
        if link is None or link.closed:
            link = self.links[identity] = Link(identity.node, self.loop, dial=dial)
            self.made.append(link)
        return link

    def form(self, view_id: int) -> None:
        self.peers.form(View(view_id=view_id, members=MEMBERS, seed=0, committed_step=0, committed_view=0))
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
