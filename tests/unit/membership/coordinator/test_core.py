"""The coordinator's core, rule by rule: what it is told, what it says, and what it writes before it says it.

What a part of it decides by itself is tested with that part: test_membership_muster.py, _proposal, _work and _hearing.
"""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_bench import MS, SECOND, Bench, declined, told_end

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator import joins
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.history import Committed, Left, Proposed
from quicoll.membership.coordinator.stage import CoordinatorState

# Settings


@pytest.mark.parametrize(
    "settings_",
    [
        {"world_size": 0},
        {"world_size": 2, "min_world_size": 3},
        {"world_size": 2, "max_world_size": 1},
        {"world_size": 2, "max_world_size": 4096},
        {"world_size": 2, "seed": -1},
        {"world_size": 2, "propose_timeout_ns": 0},
        {"world_size": 2, "gather_ns": -1},
        {"world_size": 2, "retry_min_ns": 2, "retry_max_ns": 1},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings_: dict[str, Any]) -> None:
    with pytest.raises(LocalError):
        CoordinatorConfig(**settings_)


def test_a_node_that_expects_another_world_size_is_refused() -> None:
    bench = Bench(3)
    bench.join("a", world_size=4)
    assert "world size 3, not 4" in bench.told("a", m.RefuseJoin).reason
    assert isinstance(bench.carried_out[-1], a.DropLink)
    bench.join("b", "c", "d", world_size=3)
    assert bench.proposed().nodes == ("b", "c", "d")


def test_nodes_that_are_connected_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "MAX_MEMBERS", 3)
    bench = Bench(4)
    bench.join(*"abcd")
    assert bench.told("d", m.RefuseJoin).reason == "3 nodes are connected already"
    bench.lose("a")
    bench.join("d")
    assert bench.told("d", m.Welcome).waiting_for


# Losses and reports


def test_a_loss_inside_a_step_aborts_it_and_the_others_go_on_at_once() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin("a", "c")
    bench.vote("c")
    bench.lose("c")
    decision = bench.inbox["a"][0]
    assert decision == m.Decide(view_id=1, step=1, commit=False, cause="c was lost: silence", lost=("c",), culprit="c")
    assert bench.all_told("a", "b") == {"a": [m.Decide, m.Propose], "b": [m.Aborted, m.Propose]}
    view = bench.confirm()
    assert (view.view_id, view.nodes) == (2, ("a", "b"))


def test_a_step_that_is_heard_of_after_the_end_of_its_view_is_noted_as_rejected_once() -> None:
    """Nobody had said that it was open: it was short."""
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.lose("c")
    assert bench.proposed().nodes == ("a", "b")
    assert bench.notes(a.StepRejected) == []
    for node in "ab":
        bench.say(node, m.BeginStep(view_id=1, step=2))
    (noted,) = bench.notes(a.StepRejected)
    assert noted.event == a.StepRejected(
        now_ns=0, view_id=1, step=2, cause="c was lost: silence", lost=("c",), culprit="c"
    )
    assert bench.confirm().nodes == ("a", "b")


def test_a_step_that_is_heard_of_before_the_end_of_its_view_is_announced_is_noted_with_it() -> None:
    bench = Bench(4, gather_ns=500 * MS)
    bench.installed(*"abcd")
    bench.say("b", m.Report(view_id=1, lost=(("d", "silence"),)))
    bench.say("a", m.BeginStep(view_id=1, step=1))
    assert bench.notes(a.StepRejected) == []
    bench.advance(500 * MS)
    (noted,) = bench.notes(a.StepRejected)
    assert (noted.event.step, noted.event.lost) == (1, ("d",))
    assert isinstance(bench.inbox["a"][0], m.Decide)
    assert isinstance(bench.inbox["c"][0], m.Aborted)


def test_a_step_that_a_change_of_members_met_is_noted_as_rejected() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.join("c")
    bench.advance(SECOND)
    assert bench.proposed().nodes == ("a", "b", "c")
    bench.say("a", m.BeginStep(view_id=1, step=2))
    (noted,) = bench.notes(a.StepRejected)
    assert (noted.event.step, noted.event.cause) == (2, "view 2 is proposed")


@pytest.mark.parametrize(
    ("node", "step"),
    [("a", 1), ("a", 3), ("d", 2)],
    ids=["one that was committed", "one that could not begin", "of a node that was not in the view"],
)
def test_what_cannot_have_been_open_in_the_last_view_is_not_noted(node: str, step: int) -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.lose("c")
    bench.join("d")
    bench.say(node, m.BeginStep(view_id=1, step=step))
    assert bench.notes(a.StepRejected) == []


@pytest.mark.parametrize("kind", ["failed", "mismatch", "corrupted"])
def test_a_failed_collective_ends_the_view_for_all_and_says_what_kind_of_failure_it_was(kind: Any) -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin("a")
    bench.say("b", m.Report(view_id=1, reason="all_reduce#3", culprit="a", kind=kind))
    decision = bench.inbox["a"][0]
    assert isinstance(decision, m.Decide)
    cause = "all_reduce#3" if kind == "mismatch" else "b: all_reduce#3"
    assert (decision.cause, decision.culprit, decision.kind) == (cause, "a", kind)
    assert bench.proposed().nodes == ("a", "b")


def test_reports_about_one_loss_are_heard_before_the_judgement() -> None:
    """With the first report alone "d" would go, which everybody else can reach."""
    bench = Bench(4, gather_ns=500 * MS)
    bench.installed(*"abcd")
    bench.say("b", m.Report(view_id=1, lost=(("d", "silence"),)))
    assert bench.core.state is CoordinatorState.FORMING
    bench.advance(100 * MS)
    bench.say("a", m.Report(view_id=1, lost=(("b", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("b", "silence"),)))
    bench.advance(399 * MS)
    assert bench.core.state is CoordinatorState.FORMING
    bench.advance(1 * MS)
    assert bench.proposed().nodes == ("a", "c", "d")


def test_the_judgement_comes_at_once_when_all_have_reported() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.say("a", m.Report(view_id=1, lost=(("b", "silence"),)))
    bench.say("b", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("b", "silence"),)))
    assert bench.proposed().nodes == ("a", "c")


def test_a_loss_that_the_coordinator_sees_too_explains_the_reports() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.say("c", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.lose("a")
    assert bench.proposed().nodes == ("b", "c")


def test_members_that_accuse_each_other_are_told_the_same_once_all_were_heard() -> None:
    bench = Bench(3, gather_ns=500 * MS)
    bench.installed(*"abc")
    bench.begin("a", "b")
    bench.say("b", m.Report(view_id=1, blamed=("c",), culprit="c", kind="corrupted", reason="spoiled"))
    assert not any(told_end(bench, node) for node in "abc")
    bench.advance(100 * MS)
    bench.say("a", m.Report(view_id=1, blamed=("b",), culprit="b", kind="corrupted", reason="spoiled too"))
    bench.advance(400 * MS)
    ends = [told_end(bench, node)[0] for node in "abc"]
    assert [type(end) for end in ends] == [m.Decide, m.Decide, m.Aborted]  # "c" was not known to be inside
    told = [(end.kind, end.culprit, end.cause, end.lost) for end in ends]
    assert told == [("corrupted", "b", "b: spoiled; a: spoiled too", ())] * 3
    assert bench.proposed().nodes == tuple("abc")


def test_a_step_whose_view_is_closed_is_not_committed_by_the_last_vote() -> None:
    bench = Bench(3, gather_ns=500 * MS)
    bench.installed(*"abc")
    bench.vote("a", digest=b"x")
    bench.vote("b", digest=b"x")
    bench.say("a", m.Report(view_id=1, lost=(("b", "silence"),)))
    bench.say("c", m.Vote(view_id=1, step=1, ok=True, digest=b"x"))
    bench.advance(500 * MS)
    assert bench.core.history.committed_step == 0
    ends = [told_end(bench, node)[0] for node in "abc"]
    assert [(end.culprit, end.lost) for end in ends] == [("b", ("b",))] * 3


@pytest.mark.parametrize("leaves", [False, True])
def test_a_member_that_goes_while_a_view_is_judged_ends_the_wait(leaves: bool) -> None:
    bench = Bench(3, gather_ns=500 * MS)
    bench.installed(*"abc")
    bench.begin(*"abc")
    bench.say("a", m.Report(view_id=1, lost=(("b", "silence"),)))
    assert not any(told_end(bench, node) for node in "abc")
    if leaves:
        bench.say("c", m.Leave(reason="done"))
    else:
        bench.lose("c")
    ends = {node: [(end.culprit, end.lost) for end in told_end(bench, node)] for node in "abc"}
    blamed = ("b", ("b",)) if leaves else ("c", ("b", "c"))
    assert ends == {"a": [blamed], "b": [blamed], "c": [blamed] if leaves else []}


def test_a_member_that_joins_anew_while_a_view_is_judged_is_told_nothing_of_that_view() -> None:
    bench = Bench(3, gather_ns=500 * MS)
    bench.installed(*"abc")
    bench.say("a", m.Report(view_id=1, lost=(("b", "silence"),)))
    bench.inbox.clear()
    bench.join("b")
    assert isinstance(bench.inbox["b"][0], m.Welcome)
    assert not told_end(bench, "b")
    assert [end.culprit for end in told_end(bench, "a")] == ["b"]


def test_a_decline_that_crossed_the_installation_is_a_report() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.say("a", m.Decline(view_id=1, unreachable=("b",), reason="reset"))
    bench.advance(bench.config.gather_ns)
    assert bench.notes(a.ViewAborted)[0].event.cause == "a cannot reach b: reset"


# Coming and going


def test_a_newcomer_does_not_disturb_a_step_and_comes_in_with_its_decision() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin("a")
    bench.join("c")
    assert bench.told("c", m.Welcome).waiting_for == "view 1 is at work; the next one comes at a step boundary"
    bench.advance(60 * SECOND)
    assert bench.core.state is CoordinatorState.INSTALLED
    bench.begin("b")
    bench.vote("b", "a")
    decision = bench.told("a", m.Decide)
    assert decision.commit
    assert decision.next_view is not None
    assert decision.next_view.nodes == ("a", "b", "c")
    assert decision.next_view.committed_step == 1
    assert bench.told("c", m.Propose).view == decision.next_view
    assert bench.told("b", m.Decide) == decision
    bench.confirm()
    assert bench.core.history.view == decision.next_view


def test_a_newcomer_waits_for_quiet_because_begins_may_be_on_their_way() -> None:
    bench = Bench(2, quiet_ns=250 * MS)
    bench.installed(*"ab")
    bench.join("c")
    bench.advance(249 * MS)
    assert bench.core.state is CoordinatorState.INSTALLED
    bench.begin("a", "b")
    bench.advance(10 * SECOND)
    bench.vote("a", "b")
    assert bench.core.history.committed_step == 1
    assert bench.proposed().nodes == ("a", "b", "c")


def test_a_newcomer_comes_in_after_the_quiet_though_nothing_else_happens() -> None:
    bench = Bench(2, quiet_ns=250 * MS)
    bench.installed(*"ab")
    bench.join("c")
    bench.advance(250 * MS)
    assert bench.proposed().nodes == ("a", "b", "c")


def test_a_newcomer_comes_in_at_once_where_nobody_takes_steps() -> None:
    bench = Bench(2, quiet_ns=250 * MS)
    bench.installed(*"ab")
    bench.advance(10 * SECOND)
    bench.join("c")
    assert bench.all_told(*"abc") == {"a": [m.Propose], "b": [m.Propose], "c": [m.Welcome, m.Propose]}


def test_a_newcomer_that_fails_to_get_links_costs_the_others_no_place() -> None:
    bench = Bench(2, quiet_ns=0)
    bench.installed(*"ab")
    bench.join("c")
    declined(bench, {"c": "ab"})
    assert bench.proposed().nodes == ("a", "b")


def test_who_leaves_inside_a_step_goes_with_its_decision() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin(*"abc")
    bench.say("b", m.Leave(reason="done"))
    bench.vote(*"abc")
    assert bench.core.history.committed_step == 1
    assert bench.told("a", m.Decide).next_view == bench.proposed()
    assert bench.proposed().nodes == ("a", "c")
    decision = bench.inbox["b"][0]
    assert isinstance(decision, m.Decide)
    assert decision.commit
    assert decision.next_view is None
    assert bench.records[-3:] == [Committed(1, 1, b"d"), Left("b"), Proposed(2)]


def test_who_leaves_between_steps_goes_at_once() -> None:
    bench = Bench(3, quiet_ns=10 * SECOND)
    bench.installed(*"abc")
    bench.say("b", m.Leave())
    assert bench.proposed().nodes == ("a", "c")
    assert bench.all_told("a", "c") == {"a": [m.Propose], "c": [m.Propose]}


def test_a_step_that_the_leaver_did_not_begin_cannot_end_and_is_aborted() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin("a")
    bench.say("b", m.Leave(reason="done"))
    decision = bench.inbox["a"][0]
    assert isinstance(decision, m.Decide)
    assert not decision.commit
    assert decision.cause == "b has finished and left the job"


def test_a_leaver_that_is_lost_before_the_boundary_has_left_all_the_same() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin(*"ab")
    bench.say("b", m.Leave())
    bench.lose("b")
    assert Left("b") in bench.records
    assert bench.proposed().nodes == ("a",)


# Incarnations


def test_a_member_that_started_anew_ends_its_view_and_is_in_the_next() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin(*"ab")
    bench.vote("a")
    bench.join("b", incarnation=5)
    assert isinstance(bench.inbox["a"][0], m.Decide)
    member = bench.confirm().member("b")
    assert member is not None
    assert member.incarnation == 5
    assert bench.core.history.committed_step == 0


def test_a_member_that_lost_its_link_and_joins_again_ends_its_view() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.join("b")
    assert bench.notes(a.ViewAborted)[0].event.cause == "b lost its link and joined again"
    assert bench.proposed().view_id == 2


def test_an_older_incarnation_hears_of_the_newer_one_which_is_not_disturbed() -> None:
    bench = Bench(2)
    bench.installed(*"ab", incarnation=5)
    bench.core.receive("b", m.Join(incarnation=4), now_ns=0, incarnation=4)
    bench.drain()
    assert bench.carried_out[-1] == a.TellMember("b", 4, m.Outdated(latest=5))
    assert bench.core.state is CoordinatorState.INSTALLED


def test_a_restarted_coordinator_knows_the_incarnations_of_the_last_view() -> None:
    bench = Bench(2)
    bench.installed(*"ab", incarnation=5)
    again = Bench(2, records=bench.records)
    again.join("a", incarnation=4)
    assert again.told("a", m.Outdated).latest == 5
    again.join("a", incarnation=6)
    assert again.told("a", m.Welcome).seed == 7


def test_what_an_old_link_says_or_how_it_ends_does_not_concern_the_new_one() -> None:
    bench = Bench(2)
    bench.installed(*"ab", incarnation=5)
    bench.core.receive("b", m.Report(view_id=1), now_ns=0, incarnation=4)
    bench.core.member_lost("b", "silence", now_ns=0, incarnation=4)
    bench.core.member_lost("x", "silence", now_ns=0)
    bench.drain()
    assert bench.core.state is CoordinatorState.INSTALLED


# Rules that a member breaks


def test_who_speaks_before_it_has_joined_is_dropped() -> None:
    bench = Bench(2)
    bench.say("x", m.Confirm(view_id=1))
    assert bench.carried_out[-1] == a.DropLink("x", 0, "Confirm before Join")
    bench.say("x", m.Leave())
    assert len([action for action in bench.carried_out if isinstance(action, a.DropLink)]) == 1


@pytest.mark.parametrize("message", [m.Vote(view_id=9, step=1, ok=True), m.Confirm(view_id=9), m.Report(view_id=9)])
def test_who_speaks_of_a_view_that_does_not_exist_is_put_out(message: m.MemberMessage) -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.say("c", message)
    assert bench.told("c", m.RefuseJoin).reason == "c spoke of view 9, of which it cannot be a member"
    assert bench.proposed().nodes == ("a", "b")


@pytest.mark.parametrize(
    "message", [m.Vote(view_id=1, step=1, ok=True), m.Report(view_id=1), m.BeginStep(view_id=1, step=1)]
)
def test_who_is_not_a_member_has_no_say_in_the_view(message: m.MemberMessage) -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.join("c")
    bench.say("c", message)
    assert bench.told("c", m.RefuseJoin)
    assert bench.core.state is CoordinatorState.INSTALLED
    bench.commit(*"ab")
    assert bench.core.history.committed_step == 1


# Learners


def learning(*nodes: str, learner: str = "c", **config: Any) -> Bench:
    """A view of these at step 1; the learner has come anew, and steps out of the view that has it again."""
    bench = Bench(len(nodes), **config)
    bench.installed(*nodes)
    bench.commit(*nodes)
    bench.lose(learner)
    if len(nodes) > 2:
        bench.confirm()
    bench.join(learner, incarnation=2)
    bench.advance(SECOND)
    bench.confirm()
    bench.inbox.clear()
    bench.say(learner, m.Learn(view_id=bench.view_id))
    return bench


def test_a_learner_is_taken_out_of_its_view_as_if_it_had_left_and_stays_out() -> None:
    bench = learning(*"abc")
    assert Left("c") in bench.records
    assert bench.all_told(*"abc") == {"a": [m.Propose], "b": [m.Propose], "c": [m.Aborted]}
    assert bench.confirm().nodes == ("a", "b")
    for _ in range(3):
        bench.commit(*"ab")
        bench.advance(5 * SECOND)
    assert bench.core.view is not None
    assert bench.core.view.nodes == ("a", "b")


def test_a_learner_that_has_learned_is_in_the_next_view() -> None:
    bench = learning(*"abc")
    bench.confirm()
    bench.say("c", m.Learned())
    bench.begin(*"ab")
    bench.vote(*"ab")
    view = bench.confirm()
    assert (view.nodes, view.committed_step) == (("a", "b", "c"), 2)
    assert [member.committed_step for member in view.members] == [2, 2, 0]


def test_a_learner_is_in_a_view_at_once_where_the_others_are_too_few() -> None:
    bench = learning(*"abc", min_world_size=3)
    assert bench.proposed().nodes == ("a", "b", "c")
    assert bench.confirm().min_world_size == 3


def test_a_learner_takes_the_place_of_one_that_leaves_where_a_view_needs_it() -> None:
    bench = learning(*"abc", min_world_size=2)
    bench.confirm()
    bench.say("b", m.Leave(reason="done"))
    assert bench.confirm().nodes == ("a", "c")


def test_the_last_of_two_goes_on_alone_and_may_come_to_its_end() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.say("b", m.Leave(reason="terminated"))
    assert bench.confirm().nodes == ("a",)
    bench.join("b", incarnation=2)
    bench.advance(SECOND)
    assert bench.confirm().nodes == ("a", "b")
    bench.say("b", m.Learn(view_id=bench.view_id))
    assert bench.confirm().nodes == ("a",)
    bench.commit("a")
    bench.say("a", m.Leave(reason="done", finished=2, committed_step=2))
    bench.inbox.clear()
    bench.advance(60 * SECOND)
    assert bench.told("b", m.JobEnded).step == 2


def test_a_learner_that_joins_anew_learns_no_more() -> None:
    bench = learning(*"abc")
    bench.confirm()
    bench.lose("c")
    bench.join("c", incarnation=3)
    bench.advance(SECOND)
    assert bench.proposed().nodes == ("a", "b", "c")


def test_who_learns_while_a_step_is_open_aborts_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin("a")
    bench.inbox.clear()
    bench.say("c", m.Learn(view_id=1))
    assert isinstance(bench.inbox["a"][0], m.Decide)
    assert bench.inbox["a"][0].commit is False
    assert bench.proposed().nodes == ("a", "b")


def test_a_word_of_learning_that_is_not_of_the_view_changes_nothing() -> None:
    bench = learning(*"abc")
    bench.say("c", m.Learn(view_id=1))
    bench.say("a", m.Learned())
    assert bench.confirm().nodes == ("a", "b")
