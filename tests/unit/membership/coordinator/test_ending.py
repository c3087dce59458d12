"""The end of a job: who has ended, who goes on, and what a node hears that comes later."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_bench import SECOND, Bench

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.history import Left, WentOn
from quicoll.membership.coordinator.stage import CoordinatorState

SETTLE = 2 * SECOND


def trained(nodes: str, *, steps: int = 2, **config: Any) -> Bench:
    bench = Bench(len(nodes), settle_ns=SETTLE, quiet_ns=0, **config)
    bench.installed(*nodes)
    for _ in range(steps):
        bench.commit(*nodes)
    bench.inbox.clear()
    return bench


def end(bench: Bench, *nodes: str) -> None:
    """Their blocks end without an error; their users count 40 steps more than the coordinator."""
    step = bench.core.history.committed_step
    for node in nodes:
        bench.say(node, m.Leave(reason="done", finished=step + 40, committed_step=step))


def hears_the_end(bench: Bench, node: str) -> None:
    bench.advance(SETTLE)
    assert bench.told(node, m.JobEnded).step == 42
    assert bench.carried_out[-1] == a.DropLink(node, bench.incarnations[node], "the job is done")
    bench.say(node, m.Leave(reason="the job is done", finished=42))
    bench.inbox.clear()


def test_a_node_that_was_killed_just_before_the_end_comes_back_and_hears_that_the_job_is_done() -> None:
    bench = trained("abc")
    bench.lose("b")
    end(bench, "a", "c")
    bench.advance(SETTLE)
    (done,) = bench.notes(a.JobFinished)
    assert (done.event.step, done.event.nodes) == (42, ("a", "c"))
    bench.join("b", incarnation=2)
    hears_the_end(bench, "b")
    assert bench.core.history.finished == ("a", "c", "b")
    assert bench.core.state is CoordinatorState.FORMING


def test_it_hears_so_from_a_coordinator_that_was_started_again_on_its_journal() -> None:
    bench = trained("abc")
    bench.lose("b")
    end(bench, "a", "c")
    again = Bench(3, settle_ns=SETTLE, records=bench.records)
    again.advance(SETTLE)
    assert again.notes(a.JobFinished)[0].event.step == 42
    again.join("b", incarnation=2)
    hears_the_end(again, "b")


def test_a_node_that_comes_back_while_the_others_end_is_not_left_alone_with_no_state() -> None:
    """It was in the last view, and nobody was left to hand it the state."""
    bench = trained("abc")
    bench.lose("b")
    bench.confirm()
    bench.join("b", incarnation=2)
    bench.confirm()
    end(bench, "a", "c")
    assert bench.core.view is None
    hears_the_end(bench, "b")


def test_a_spare_and_a_node_that_was_never_there_hear_it_too() -> None:
    bench = trained("ab", max_world_size=2)
    bench.join("s")
    end(bench, "a", "b")
    bench.join("z")
    bench.advance(SETTLE)
    assert bench.told("s", m.JobEnded).step == bench.told("z", m.JobEnded).step == 42


def test_a_spare_does_not_take_the_place_of_the_last_one_that_ends() -> None:
    bench = trained("a", max_world_size=1)
    bench.join("s")
    end(bench, "a")
    assert bench.core.view is None
    hears_the_end(bench, "s")
    assert bench.core.state is CoordinatorState.FORMING


def test_a_member_that_holds_the_last_step_goes_on() -> None:
    bench = trained("abc")
    end(bench, "a", "b")
    bench.confirm()
    bench.advance(10 * SETTLE)
    assert bench.core.view is not None
    assert bench.core.view.nodes == ("c",)
    bench.commit("c")
    assert bench.core.history.finished == ()


def test_a_member_that_lost_its_link_meanwhile_has_time_to_come_back() -> None:
    bench = trained("abc")
    bench.lose("c")
    end(bench, "a", "b")
    bench.advance(SETTLE - 1)
    assert bench.notes(a.JobFinished) == []
    bench.join("c", committed_step=2)
    assert bench.proposed().nodes == ("c",)


def test_whoever_begins_a_step_after_some_have_ended_goes_on_and_nobody_has_ended() -> None:
    bench = trained("abcd")
    end(bench, "a", "b")
    bench.confirm()
    bench.begin("c")
    assert bench.records[-1] == WentOn(bench.view_id)
    bench.begin("d")
    assert bench.records.count(WentOn(bench.view_id)) == 1
    for node in "cd":
        bench.lose(node)
    bench.join("c", "d", incarnation=2)
    assert bench.proposed().nodes == ("c", "d"), "the job was not at its end"


def test_one_that_leaves_a_job_that_shrinks_does_not_end_it() -> None:
    bench = trained("abc")
    end(bench, "a")
    for node in "bc":
        bench.lose(node)
    bench.join("b", "c", incarnation=2)
    assert bench.proposed().nodes == ("b", "c")


@pytest.mark.parametrize(
    "leave",
    [
        m.Leave(reason="KeyboardInterrupt", committed_step=2),
        m.Leave(reason="done", finished=40, committed_step=0),
    ],
    ids=["by an error", "behind the others"],
)
def test_who_leaves_otherwise_has_not_ended(leave: m.Leave) -> None:
    bench = trained("ab", steps=0)
    bench.lose("b")
    bench.join("b", incarnation=2)
    bench.confirm()
    bench.commit("a", "b")
    bench.commit("a", "b")
    # one that came back, and holds nothing of what was committed since
    bench.lose("b")
    bench.join("b", incarnation=3)
    bench.confirm()
    bench.say("b", leave if leave.finished is not None else m.Leave(reason=leave.reason))
    assert bench.core.history.finished == ()


def test_nodes_that_have_ended_and_come_back_begin_anew() -> None:
    bench = trained("abc")
    bench.lose("b")
    end(bench, "a", "c")
    bench.join("b", "a", incarnation=2)
    assert bench.records[-1] == Left("b"), "the rest of the last view is waited for no more"
    assert "2 of 3 nodes are here" in bench.told("a", m.Withhold).cause
    bench.advance(10 * SETTLE)
    bench.join("c", incarnation=2)
    assert bench.confirm().nodes == ("a", "b", "c")
    assert bench.core.history.finished == ()
    for node in "abc":
        bench.lose(node)
    bench.join(*"abc", incarnation=3)
    assert bench.proposed().nodes == ("a", "b", "c")


def test_a_job_of_no_steps_is_done_as_well() -> None:
    bench = trained("abc", steps=0)
    bench.lose("b")
    for node in "ac":
        bench.say(node, m.Leave(finished=42))
    bench.join("b", incarnation=2)
    hears_the_end(bench, "b")
