"""Late ranks are asked where they are: whom, how often, who may ask, and what is said where nothing comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quicoll.engine.late_stacks import AGAIN_S, LateStacks, ahead
from quicoll.engine.messages import MAX_TOLD, AskStack, StackTold, decode_message
from quicoll.errors import PeerError
from quicoll.membership.view import Member, View
from quicoll_transport.errors import LinkLost

VIEW = View(
    view_id=7,
    members=tuple(Member(rank=rank, node="abc"[rank], incarnation=1) for rank in range(3)),
    seed=0,
    committed_step=0,
    committed_view=0,
)


class StandInLink:
    """Keeps what is sent by it."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.sent: list[Any] = []
        self.lost = False

    def send_app(self, data: bytes) -> None:
        if self.lost:
            raise LinkLost("lost", peer=self.node)
        self.sent.append(decode_message(data, node=self.node))


class Bench:
    """Node a, whose clock and stacks a test sets."""

    def __init__(self, *, shows: bool = True) -> None:
        self.now = 100.0
        self.made = 0
        self.waits: list[Callable[[], None]] | None = None  # where stacks come later
        self.told: list[tuple[str, str]] = []
        self.links: dict[str, Any] = {node: StandInLink(node) for node in "bcx"}
        self.late = LateStacks(
            shows=shows,
            stacks=self.stacks,
            now=lambda: self.now,
            link_to=self.links.get,
            on_told=lambda node, text: self.told.append((node, text)),
        )

    def stacks(self, most: int, give: Callable[[str], None]) -> None:
        self.made += 1
        text = f"stack {self.made}"[:most]
        if self.waits is None:
            give(text)
        else:
            self.waits.append(lambda: give(text))

    def notes(self, *, node: str = "b", view: int = 7) -> list[str]:
        error = PeerError("late", node=node, view=view)
        self.late.explain(error)
        return list(getattr(error, "__notes__", []))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_the_answer_of_a_late_rank_is_in_the_notes_of_the_error_and_in_the_flight_file(bench: Bench) -> None:
    bench.late.ask(VIEW, [1])
    assert bench.links["b"].sent == [AskStack(7)]
    bench.now += 0.5
    bench.late.receive(bench.links["b"], StackTold(7, "thread MainThread:\n  x.py:3 in f"), VIEW)
    bench.now += 1.0
    assert bench.notes() == ["where b was 1.0 s before this error:\nthread MainThread:\n  x.py:3 in f"]
    assert bench.told == [("b", "thread MainThread:\n  x.py:3 in f")]


def test_what_a_peer_says_steers_no_terminal(bench: Bench) -> None:
    bench.late.ask(VIEW, [1])
    bench.late.receive(bench.links["b"], StackTold(7, "thread x:\n  \x1b[2Jf"), VIEW)
    assert bench.told == [("b", "thread x:\n   [2Jf")]
    assert bench.notes()[0].endswith("thread x:\n   [2Jf")


def test_that_no_answer_came_is_said(bench: Bench) -> None:
    bench.late.ask(VIEW, [1])
    bench.now += 1.5
    (note,) = bench.notes()
    assert note.startswith("b was asked where it is, and did not answer within 1.5 s: its process stands still")
    bench.late.receive(bench.links["b"], StackTold(7, "awake again"), VIEW)
    assert bench.notes() == [note]
    assert bench.told == [("b", note)], "once, and nothing that comes after the error"


def test_a_rank_is_asked_once_in_a_while_and_each_for_itself(bench: Bench) -> None:
    for _ in range(5):
        bench.late.ask(VIEW, [1, 2])
        bench.now += AGAIN_S / 10
    assert [len(bench.links[node].sent) for node in "bc"] == [1, 1]
    bench.now += AGAIN_S
    bench.late.ask(VIEW, [1])
    assert [len(bench.links[node].sent) for node in "bc"] == [2, 1]


def test_an_error_shows_only_whom_it_names_and_only_of_its_view(bench: Bench) -> None:
    bench.late.ask(VIEW, [1, 2])
    assert len(bench.notes(node="b")) == 1
    assert len(bench.notes(node="")) == 2
    assert bench.notes(node="b", view=8) == []
    assert bench.notes(node="x") == []


def test_an_answer_that_was_not_asked_for_or_comes_twice_is_dropped(bench: Bench) -> None:
    bench.late.receive(bench.links["b"], StackTold(7, "lie"), VIEW)
    bench.late.ask(VIEW, [1])
    bench.late.receive(bench.links["c"], StackTold(7, "lie"), VIEW)
    bench.late.receive(bench.links["b"], StackTold(7, "true"), VIEW)
    bench.late.receive(bench.links["b"], StackTold(7, "lie"), VIEW)
    bench.late.receive(bench.links["b"], StackTold(8, "lie"), None)
    assert bench.told == [("b", "true")]
    assert "lie" not in bench.notes()[0]


def test_only_members_of_the_view_are_answered_and_seldom(bench: Bench) -> None:
    bench.late.receive(bench.links["x"], AskStack(7), VIEW)
    bench.late.receive(bench.links["b"], AskStack(9), None)
    assert bench.made == 0
    for _ in range(50):
        bench.late.receive(bench.links["b"], AskStack(7), VIEW)
        bench.late.receive(bench.links["c"], AskStack(7), VIEW)
    assert bench.made == 1, "one look serves all"
    assert bench.links["b"].sent == bench.links["c"].sent == [StackTold(7, "stack 1")]
    assert bench.links["x"].sent == []
    bench.now += 1.0
    bench.late.receive(bench.links["b"], AskStack(7), VIEW)
    assert bench.links["b"].sent[1:] == [StackTold(7, "stack 2")]


def test_stacks_that_are_given_later_are_told_then(bench: Bench) -> None:
    bench.waits = []
    bench.late.receive(bench.links["b"], AskStack(7), VIEW)
    assert bench.links["b"].sent == []
    bench.waits.pop()()
    assert bench.links["b"].sent == [StackTold(7, "stack 1")]
    bench.now += 0.5  # they are new enough for another
    bench.late.receive(bench.links["c"], AskStack(7), VIEW)
    assert bench.links["c"].sent == [StackTold(7, "stack 1")]


def test_a_rank_that_keeps_its_stacks_says_so_and_asks_nobody() -> None:
    keeps, asks = Bench(shows=False), Bench()
    keeps.late.ask(VIEW, [1])
    assert keeps.links["b"].sent == []
    keeps.late.receive(keeps.links["b"], AskStack(7), VIEW)
    assert keeps.links["b"].sent == [StackTold(7, "")]
    assert keeps.made == 0
    asks.late.ask(VIEW, [1])
    asks.late.receive(asks.links["b"], StackTold(7, ""), VIEW)
    assert asks.notes() == ["b does not tell where it is: its setting late_stacks is off"]


def test_a_link_that_is_gone_is_no_trouble_here(bench: Bench) -> None:
    bench.links["b"].lost = True
    del bench.links["c"]
    bench.late.ask(VIEW, [1, 2])
    bench.late.receive(bench.links["b"], AskStack(7), VIEW)
    assert bench.notes() == []


def test_ranks_are_asked_in_time_for_short_and_for_long_operations() -> None:
    assert ahead(0.4) == pytest.approx(0.1)
    assert ahead(300.0) == 2.0


def test_the_text_that_a_peer_sends_is_bounded() -> None:
    from quicoll.engine.messages import encode_message

    with pytest.raises(PeerError):
        decode_message(encode_message(StackTold(7, "x" * (MAX_TOLD + 1))), node="b")
    with pytest.raises(PeerError):
        decode_message(encode_message(AskStack(-1)), node="b")
