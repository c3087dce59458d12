"""A rank that was asked to stop: it may go at once, unless it would take the state along."""

from __future__ import annotations

import pytest
from coordinator_bench import SECOND, Bench

from quicoll.membership import messages as m
from quicoll.membership.coordinator.actions import NodeReleased


def may_go(bench: Bench, node: str) -> bool:
    return any(isinstance(message, m.MayLeave) for message in bench.inbox.get(node, []))


def alone_with_state(*newcomers: str) -> Bench:
    """A job of one rank, which has committed a step, and nodes that come then."""
    bench = Bench(1, max_world_size=4)
    bench.installed("a")
    bench.commit("a")
    bench.join(*newcomers)
    bench.inbox.clear()
    return bench


@pytest.mark.parametrize("nodes", ["a", "ab"])
def test_a_rank_may_go_at_once_where_nobody_needs_its_state(nodes: str) -> None:
    bench = Bench(len(nodes))
    bench.installed(*nodes)
    bench.commit(*nodes)
    bench.say("a", m.AskToLeave())
    assert may_go(bench, "a")
    assert [note.event.node for note in bench.notes(NodeReleased)] == ["a"]


def test_the_only_holder_stays_until_another_one_has_begun_a_step_from_its_state() -> None:
    bench = alone_with_state("b", "c")
    bench.say("a", m.AskToLeave())
    bench.advance(SECOND)
    assert bench.confirm().nodes == ("a", "b", "c")
    assert not may_go(bench, "a")
    assert not bench.notes(NodeReleased)
    bench.begin("b")
    assert may_go(bench, "a")
    bench.say("a", m.Leave(reason="terminated", committed_step=1))
    assert bench.core.view is None
    assert bench.confirm().nodes == ("b", "c")
    bench.commit("b", "c")
    assert bench.core.history.committed_step == 2


def test_of_several_holders_that_stop_at_once_the_last_one_stays() -> None:
    bench = Bench(2, max_world_size=4)
    bench.installed("a", "b")
    bench.commit("a", "b")
    bench.join("c")
    bench.say("b", m.AskToLeave())
    bench.say("a", m.AskToLeave())
    assert may_go(bench, "b")
    assert not may_go(bench, "a")


def test_where_everybody_is_asked_to_stop_everybody_may_go() -> None:
    bench = alone_with_state("b")
    bench.say("a", m.AskToLeave())
    assert not may_go(bench, "a")
    bench.say("b", m.AskToLeave())
    assert may_go(bench, "a")
    assert may_go(bench, "b")


def test_a_rank_may_go_when_those_who_waited_for_its_state_are_gone() -> None:
    bench = alone_with_state("b")
    bench.say("a", m.AskToLeave())
    bench.lose("b")
    assert may_go(bench, "a")


def test_a_rank_that_is_behind_may_go_although_the_others_are_too() -> None:
    bench = alone_with_state("b", "c")
    bench.say("b", m.AskToLeave())
    assert may_go(bench, "b")


def test_a_node_that_joins_anew_has_not_asked() -> None:
    bench = alone_with_state("b")
    bench.say("a", m.AskToLeave())
    bench.join("a", incarnation=2, committed_step=1)  # started anew, from its checkpoint
    bench.inbox.clear()
    bench.say("b", m.AskToLeave())
    bench.lose("b")
    assert not may_go(bench, "a")


def test_a_rank_hears_that_it_may_go_once_for_each_link() -> None:
    bench = Bench(1)
    bench.installed("a")
    for _ in range(2):
        bench.say("a", m.AskToLeave())
    assert [type(message) for message in bench.inbox["a"]] == [m.MayLeave]
