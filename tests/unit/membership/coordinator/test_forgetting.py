"""Nodes that an operator gives up: when they are forgotten, and when that is refused."""

from __future__ import annotations

import pytest

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator.actions import NodesForgotten, Note, Persist, TellMember, ViewWithheld
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.coordinator.history import Committed, Forgotten, History, InstalledView, Proposed, Seeded
from quicoll.membership.view import Member, View

SECOND = 1_000_000_000
PATIENCE = 10 * SECOND


def history(nodes: str = "abcde", step: int = 3) -> History:
    members = tuple(
        Member(rank=rank, node=node, incarnation=1, addresses=((f"10.0.0.{rank}", 1),), committed_step=0)
        for rank, node in enumerate(nodes)
    )
    view = View(view_id=1, members=members, seed=5, committed_step=0, committed_view=0)
    commits = [Committed(number, 1, b"d") for number in range(1, step + 1)]
    return History.of([Seeded(5), Proposed(1), InstalledView(view), *commits])


class Bench:
    def __init__(self, forget: str, *, nodes: str = "abcde") -> None:
        config = CoordinatorConfig(world_size=5, forget=tuple(forget), forget_after_ns=PATIENCE, settle_ns=0)
        self.core = CoordinatorCore(config, history(nodes), now_ns=0)
        self.records: list[object] = []
        self.held: list[str] = []
        self.forgotten: list[tuple[str, ...]] = []
        self.proposed: list[View] = []
        self._drain()

    def _drain(self) -> None:
        while (action := self.core.next_action()) is not None:
            match action:
                case Persist():
                    self.records.append(action.record)
                case Note(event=ViewWithheld(cause=cause)):
                    self.held.append(cause)
                case Note(event=NodesForgotten(nodes=nodes)):
                    self.forgotten.append(nodes)
                case TellMember(message=m.Propose(view=view)) if view not in self.proposed:
                    self.proposed.append(view)

    def join(self, nodes: str, *, step: int = 3, at: int = SECOND) -> None:
        for node in nodes:
            self.core.receive(node, m.Join(incarnation=2, committed_step=step), now_ns=at)
            self._drain()

    def tick(self, at: int) -> None:
        self.core.handle_timer(at)
        self._drain()


def test_a_lost_quorum_without_the_wish_is_waited_for_for_ever() -> None:
    bench = Bench("")
    bench.join("ab")
    bench.tick(1000 * SECOND)
    assert bench.held[-1] == "no quorum: 2 of the last view's 5 nodes are here; without c, d, e"
    assert bench.proposed == []


def test_nodes_that_stay_away_are_forgotten_after_their_time_and_the_others_go_on() -> None:
    bench = Bench("cde")
    bench.join("ab")
    assert "c, d, e not forgotten: they have 10 s from the coordinator's start to join" in bench.held[-1]
    assert bench.core.next_timer() == PATIENCE
    bench.tick(PATIENCE - 1)
    assert bench.forgotten == []
    bench.tick(PATIENCE)
    assert bench.forgotten == [("c", "d", "e")]
    assert bench.records[0] == Forgotten(("c", "d", "e"))
    assert [view.nodes for view in bench.proposed] == [("a", "b")]
    assert bench.core.history.base == ("a", "b")


def test_a_node_that_joins_is_alive_and_nobody_is_forgotten_any_more() -> None:
    bench = Bench("cde")
    bench.join("a")
    bench.join("c")
    assert "c, d, e not forgotten: c is alive: it has joined" in bench.held[-1]
    bench.core.member_lost("c", "gone", now_ns=2 * SECOND)
    bench.tick(1000 * SECOND)
    assert bench.forgotten == []
    assert bench.core.history.base == ("a", "b", "c", "d", "e")


def test_who_is_left_has_to_be_a_majority_of_those_that_would_count() -> None:
    """d and e may be alive together elsewhere, two of the three that are left: a alone must not go on."""
    bench = Bench("bc")
    bench.join("a")
    bench.tick(PATIENCE)
    assert "b, c not forgotten: there is no quorum without them either; d, e is missing" in bench.held[-1]
    assert bench.forgotten == []
    bench.join("d", at=PATIENCE + SECOND)  # two of three are here now
    assert bench.forgotten == [("b", "c")]


def test_nobody_is_forgotten_who_alone_may_hold_the_last_step() -> None:
    bench = Bench("cde")
    bench.join("ab", step=2)
    bench.tick(PATIENCE)
    assert "not forgotten: nobody here holds step 3, and they may" in bench.held[-1]
    assert bench.forgotten == []


def test_all_cannot_be_forgotten_and_a_stranger_cannot() -> None:
    bench = Bench("abcde")
    bench.tick(PATIENCE)
    assert "there is no quorum without them either" in bench.held[-1]
    bench = Bench("cx")
    bench.join("a")
    assert "x does not count: it is none of a, b, c, d, e" in bench.held[-1]
    bench.tick(PATIENCE)
    assert bench.forgotten == []


def test_a_wish_that_was_not_needed_is_not_kept_for_a_later_loss() -> None:
    bench = Bench("de")
    bench.join("abc")
    assert [view.nodes for view in bench.proposed] == [("a", "b", "c")]
    for node in "bc":
        bench.core.member_lost(node, "gone", now_ns=2 * SECOND)
    bench.tick(1000 * SECOND)
    assert bench.forgotten == []


def test_a_forgotten_node_that_comes_back_is_let_in_as_any_other_and_hears_of_its_doubt() -> None:
    bench = Bench("cde")
    bench.join("ab")
    bench.tick(PATIENCE)
    bench.core.receive("e", m.Join(incarnation=1, committed_step=2, doubt=(1, 3)), now_ns=PATIENCE + 1)
    answers = []
    while (action := bench.core.next_action()) is not None:
        if isinstance(action, TellMember) and action.node == "e":
            answers.append(action.message)
    assert isinstance(answers[0], m.Welcome)
    assert answers[0].doubt_committed is True


def test_the_history_forgets_only_nodes_that_count() -> None:
    for nodes in ((), ("x",), ("a", "x")):
        with pytest.raises(LocalError, match="is forgotten, but the last view has no such node"):
            history().apply(Forgotten(nodes))
    after = history().apply(Forgotten(("d", "e")))
    assert after.base == ("a", "b", "c")
    with pytest.raises(LocalError):
        after.apply(Forgotten(("d",)))
