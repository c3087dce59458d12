"""Whose is a message, an ended link, a call: of the view that is formed, of the one installed last, or of none."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.engine.messages import Announce, Farewell, decode_message, encode_message
from quicoll.engine.views import Views
from quicoll.errors import Partitioned, PeerError, QuicollError
from quicoll.membership.member.actions import Deactivate
from quicoll.membership.view import Member, View
from quicoll.observability.events import Event, Observers
from quicoll.observability.stragglers import Stragglers
from quicoll_transport.sim import World

S = 1_000_000_000
BIG = Announce(8, 0, 0, "s" * 4096, tuple(range(10**6, 10**6 + 1024)), (10**9,) * 2048)


def view(view_id: int, nodes: str = "abc") -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(nodes))
    return View(view_id=view_id, members=members, seed=0, committed_step=0, committed_view=0)


class Peer:
    """The link to a node, as far as views have to do with it."""

    def __init__(self, node: str, number: int) -> None:
        self.node, self.number = node, number
        self.ended, self.closed = False, ""
        self.sent: list[Any] = []
        self.rtt_ns = 0
        self.stats = self
        self.corrupt = 0

    def send_app(self, data: bytes) -> None:
        self.sent.append(decode_message(data, node="a"))

    def discard(self, prefix: bytes) -> None:
        pass

    def close(self, cause: str) -> None:
        self.closed = cause


class Bench:
    """Rank 0, node "a", on a simulated clock."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loop = world.host("a").start()
        self.events: list[Event] = []
        self.failed: list[tuple[int, QuicollError, tuple[int, ...]]] = []
        self.peers: dict[str, Any] = {node: Peer(node, number) for number, node in enumerate("bcx")}
        self.views = Views(
            loop=self.loop,
            node="a",
            stragglers=Stragglers(after_ns=S),
            emit=Observers("a", lambda: 0, self.events.append).emit,
            on_failure=lambda view, error, ranks: self.failed.append((view.view_id, error, ranks)),
        )

    def install(self, view: View) -> None:
        self.views.install(view, {member.rank: self.peers[member.node] for member in view.members if member.rank})

    def hear(self, node: str, message: Announce | Farewell) -> None:
        self.views.receive(self.peers[node], message)

    def why_over(self, view_id: int) -> QuicollError:
        task = self.loop.create_task(self.views.why_over(view_id))
        self.world.run(limit_ns=60 * S)
        return task.result()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with World(1) as world:
        yield Bench(world)


def absurd(view_id: int = 7) -> Announce:
    """An announcement that breaks the communicator that it reaches: nobody is so far ahead."""
    return Announce(view_id, 0, 10**9, "barrier")


def test_before_the_first_view_there_is_none_for_anybody(bench: Bench) -> None:
    views = bench.views
    assert (views.present(), views.installed(7), views.at_work(7), views.lost) == (None, None, None, ())
    assert not views.end(Deactivate(7, "never installed here"))
    assert views.link_ended(bench.peers["b"]) is None
    assert "the view is over" in bench.why_over(7).message


def test_a_view_is_at_work_until_it_breaks_and_installed_until_the_next_one_is(bench: Bench) -> None:
    views = bench.views
    bench.install(view(7))
    communicator = views.communicator
    assert communicator is not None
    assert views.present() == view(7)
    assert views.at_work(7) is views.installed(7) is communicator
    assert views.installed(8) is None
    communicator.fail(PeerError("broken"))
    assert (views.present(), views.at_work(7), views.installed(7)) == (None, None, communicator)
    assert [(number, error.message) for number, error, _ in bench.failed] == [(7, "broken")]
    bench.install(view(8))
    assert views.installed(7) is None
    assert views.present() == view(8)


def test_the_view_that_was_installed_first_stays_known_though_others_follow(bench: Bench) -> None:
    assert bench.views.first is None
    for number in (7, 8, 9):
        bench.install(view(number))
        assert bench.views.first == view(7)


def test_a_slow_link_excuses_nobody_who_calls_late_through_memory(bench: Bench) -> None:
    for peer in bench.peers.values():
        peer.rtt_ns = 10 * S
    bench.install(view(7))
    communicator: Any = bench.views.communicator
    call: Any = SimpleNamespace(name="all_gather#0")
    communicator.near_called(call, {0: 0, 1: 0, 2: 3 * S})
    told = [event.fields for event in bench.events if event.kind == "straggler"]
    assert [(each["rank"], each["seconds"]) for each in told] == [(2, 3.0)]


def test_words_reach_the_communicator_of_their_view_and_no_other(bench: Bench) -> None:
    bench.install(view(7, "ab"))
    for node, word in [("b", absurd(view_id=6)), ("b", absurd(view_id=8)), ("x", absurd())]:
        bench.hear(node, word)
    assert bench.failed == []
    bench.hear("b", absurd())
    assert [number for number, _, _ in bench.failed] == [7]


def test_what_is_announced_for_a_view_that_is_formed_is_there_when_it_is_installed(bench: Bench) -> None:
    bench.install(view(7))
    bench.views.expect(view(8))
    bench.hear("b", absurd(view_id=8))
    assert bench.failed == []
    bench.install(view(8))
    assert [number for number, _, _ in bench.failed] == [8]


def test_a_link_that_ends_takes_what_was_announced_on_it_along(bench: Bench) -> None:
    bench.views.expect(view(8))
    bench.hear("b", absurd(view_id=8))
    assert bench.views.link_ended(bench.peers["b"]) is None
    bench.install(view(8))
    assert bench.failed == []
    bench.hear("b", absurd(view_id=8))
    assert [number for number, _, _ in bench.failed] == [8]


def test_a_peer_that_announces_too_much_for_a_view_to_come_loses_its_link(bench: Bench) -> None:
    bench.views.expect(view(8))
    data = encode_message(BIG)
    for _ in range(1000):
        message = decode_message(data, node="b")
        bench.hear("b", message)
        if bench.peers["b"].closed:
            break
    assert bench.peers["b"].closed == "too many announcements for a view to come"
    assert bench.peers["c"].closed == ""


def test_a_farewell_in_a_view_in_which_nothing_runs_here_is_answered_at_once(bench: Bench) -> None:
    bench.install(view(7))
    bench.hear("b", Farewell(6))
    bench.hear("b", Farewell(6, done=True))  # an answer has no answer
    assert bench.peers["b"].sent == [Farewell(6, done=True)]


def test_a_link_that_ends_is_a_loss_to_the_installed_view_alone(bench: Bench) -> None:
    views = bench.views
    bench.install(view(7))
    assert views.link_ended(bench.peers["x"]) is None
    assert views.lost == ()
    for node in "cbc":
        assert views.link_ended(bench.peers[node]) is views.communicator
    assert views.lost == ("b", "c")
    bench.install(view(8))
    assert views.lost == ()
    views.end(Deactivate(8, "rank 1 left", ("b",)))
    assert views.link_ended(bench.peers["c"]) is None  # it has ended already: nothing is lost to it


def test_a_loss_that_only_the_coordinator_has_noticed_is_told_before_the_end_and_none_is_told_twice(
    bench: Bench,
) -> None:
    def losses(action: Deactivate) -> list[tuple[str, str | None]]:
        bench.events.clear()
        assert bench.views.end(action)
        return [(event.kind, event.fields.get("peer")) for event in bench.events]

    bench.install(view(7))
    bench.views.link_ended(bench.peers["b"])  # the engine tells of this one
    told = losses(Deactivate(7, "b was lost: silence", ("a", "b", "c"), culprit="b"))
    assert told == [("peer_lost", "c"), ("view_ended", None)]  # of itself a rank says nothing
    bench.install(view(8))
    assert losses(Deactivate(8, "c was lost: silence", ("c",), culprit="c"))[0] == ("peer_lost", "c")


def test_a_peer_that_left_between_views_is_no_loss(bench: Bench) -> None:
    bench.install(view(7))
    assert bench.views.end(Deactivate(7, "view 8 is proposed without c", ("c",)))
    assert [event.kind for event in bench.events] == ["view_installed", "view_ended"]


def test_a_view_that_has_ended_has_one_error_for_all_who_ask_then_and_later(bench: Bench) -> None:
    views = bench.views
    bench.install(view(7))
    assert views.end(Deactivate(7, "lost: silence", ("b",), culprit="b"))
    assert not views.end(Deactivate(6, "an earlier one"))
    now = bench.why_over(7)
    bench.install(view(8))
    later = [bench.why_over(7), views.past(7, op="all_reduce", step=3)]
    assert {(type(error), error.message, error.node, error.view) for error in [now, *later]} == {
        (PeerError, "lost: silence", "b", 7)
    }
    assert (later[1].op, later[1].step) == ("all_reduce", 3)
    kinds = [(event.kind, event.fields["view"]) for event in bench.events if event.kind != "peer_lost"]
    assert kinds == [("view_installed", 7), ("view_ended", 7), ("view_installed", 8)]


def test_who_asks_before_the_coordinator_has_spoken_waits_for_what_all_ranks_are_told(bench: Bench) -> None:
    bench.install(view(7))
    communicator = bench.views.communicator
    assert communicator is not None
    communicator.fail(PeerError("what this rank saw"))
    task: asyncio.Task[QuicollError] = bench.loop.create_task(bench.views.why_over(7))
    bench.world.run(limit_ns=S // 10)
    assert not task.done()
    bench.views.end(Deactivate(7, "what all are told", partitioned=True))
    bench.world.run(limit_ns=S // 10)
    assert isinstance(task.result(), Partitioned)
    assert task.result().message == "what all are told"
