"""The steps of an installed view, from the first Begin to the decision."""

from __future__ import annotations

import pytest
from coordinator_bench import SECOND, Bench, letters

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.active_view import ActiveView
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.history import Committed
from quicoll.membership.coordinator.roster import Roster
from quicoll.membership.coordinator.stage import CoordinatorState
from quicoll.membership.view import Member, View


def test_a_step_is_committed_when_all_have_voted_and_is_written_first() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin(*"abc")
    bench.vote("c", "a")
    assert not bench.inbox
    bench.carried_out.clear()
    bench.vote("b")
    decision = m.Decide(view_id=1, step=1, commit=True)
    assert bench.carried_out[0] == a.Persist(Committed(1, 1, b"d"))
    assert [action for action in bench.carried_out if isinstance(action, a.TellMember)] == [
        a.TellMember(node, 1, decision) for node in "abc"
    ]


def test_steps_are_committed_one_by_one_and_the_next_view_goes_on_after_the_last() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    for step in range(1, 4):
        bench.commit(*"abc")
        assert bench.core.history.committed_step == step
    bench.lose("c")
    assert bench.proposed().committed_step == 3
    assert bench.proposed().committed_view == 1
    assert [member.committed_step for member in bench.proposed().members] == [3, 3]


def test_one_no_aborts_at_once_and_names_who_said_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin("a", "b")
    bench.say("b", m.Vote(view_id=1, step=1, ok=False, reason="not a number"))
    decision = bench.inbox["a"][0]
    assert isinstance(decision, m.Decide)
    assert not decision.commit
    assert (decision.cause, decision.culprit) == ("b voted no: not a number", "b")
    # "c" was not known to be inside the step
    assert bench.all_told(*"abc") == {
        "a": [m.Decide, m.Propose],
        "b": [m.Decide, m.Propose],
        "c": [m.Aborted, m.Propose],
    }
    assert not any(isinstance(record, Committed) for record in bench.records)


@pytest.mark.parametrize(
    ("votes", "culprit", "words"),
    [
        ("xxy", "c", "wrong: c, or who sends to it (a, b have 78; c have 79)"),
        ("yxx", "a", "wrong: a"),
        ("xyxzx", "", "wrong: b, d"),
        ("xy", "", "no side is larger: a have 78; b have 79"),
        ("xyz", "", "no side is larger"),
    ],
)
def test_differing_digests_abort_and_the_minority_is_named(votes: str, culprit: str, words: str) -> None:
    bench = Bench(len(votes))
    nodes = letters(len(votes))
    bench.installed(*nodes)
    for node, digest in zip(nodes, votes, strict=True):
        bench.vote(node, digest=digest.encode())
    decision = next(message for message in bench.inbox["a"] if isinstance(message, m.Decide))
    assert not decision.commit
    assert decision.culprit == culprit
    assert decision.kind == "corrupted"
    assert words in decision.cause
    assert bench.core.history.committed_step == 0


GROUP_VOTES: list[tuple[list[dict[int, bytes]], str, str]] = [
    ([{5: b"x"}, {5: b"x"}, {9: b"y"}, {}], "commit", ""),
    ([{5: b"x", 9: b"z"}, {5: b"x"}, {9: b"z"}, {}], "commit", ""),
    ([{5: b"x"}, {5: b"y"}, {5: b"x"}, {}], "b", "wrong: b, or who sends to it (a, c have 78; b have 79)"),
    ([{}, {5: b"x"}, {}, {5: b"y"}], "", "no side is larger: b have 78; d have 79"),
    ([{5: b"x", 9: b"x"}, {5: b"x", 9: b"y"}, {5: b"x", 9: b"x"}, {5: b"x"}], "b", "wrong: b"),
]


@pytest.mark.parametrize(("votes", "culprit", "words"), GROUP_VOTES)
def test_digests_of_a_sub_group_are_compared_among_those_who_have_them(
    votes: list[dict[int, bytes]], culprit: str, words: str
) -> None:
    bench = Bench(len(votes))
    nodes = letters(len(votes))
    bench.installed(*nodes)
    bench.begin(*nodes)
    for node, groups in zip(nodes, votes, strict=True):
        bench.say(node, m.Vote(view_id=1, step=1, ok=True, digest=b"d", groups=tuple(groups.items())))
    decision = next(message for message in bench.inbox["a"] if isinstance(message, m.Decide))
    if culprit == "commit":
        assert decision.commit
        return
    assert not decision.commit
    assert (decision.culprit, decision.kind) == (culprit, "corrupted")
    assert "digests of a sub-group's results in step 1" in decision.cause
    assert words in decision.cause
    assert bench.core.history.committed_step == 0


def test_digests_of_all_are_compared_before_those_of_sub_groups() -> None:
    bench = Bench(2)
    bench.installed("a", "b")
    for node, digest in (("a", b"x"), ("b", b"y")):
        bench.say(node, m.Vote(view_id=1, step=1, ok=True, digest=digest, groups=((5, digest),)))
    decision = next(message for message in bench.inbox["a"] if isinstance(message, m.Decide))
    assert "digests of step 1 differ" in decision.cause


@pytest.mark.parametrize("message", [m.BeginStep(view_id=1, step=3), m.Vote(view_id=1, step=3, ok=True)])
def test_another_step_than_the_next_ends_the_view(message: m.MemberMessage) -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.inbox.clear()
    bench.say("b", message)
    aborted = bench.inbox["a"][0]
    assert isinstance(aborted, m.Aborted)
    assert "step 3, but the next one is 2" in aborted.cause
    assert aborted.culprit == "b"


def test_a_second_vote_is_not_counted_for_another_member() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.vote("a")
    bench.vote("a")
    assert bench.core.history.committed_step == 0
    assert "a voted twice" in bench.notes(a.StepRejected)[0].event.cause


def test_votes_of_a_view_that_is_over_do_not_count() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.vote("a", "b")
    bench.lose("c")
    bench.say("a", m.Vote(view_id=1, step=1, ok=True, digest=b"d"))
    bench.confirm()
    bench.say("b", m.Vote(view_id=1, step=1, ok=True, digest=b"d"))
    bench.vote("a")
    assert bench.core.history.committed_step == 0
    bench.vote("b")
    assert bench.core.history.commits == ((2, 1, 1),)


def test_members_whose_votes_do_not_come_are_named_and_left_out() -> None:
    """REQUIREMENTS A6, A7: a straggler without an end is a deadlock, and is not waited for without an end."""
    bench = Bench(3, vote_timeout_ns=300 * SECOND)
    bench.installed(*"abc")
    bench.begin(*"abc")
    bench.advance(1000 * SECOND)  # computing is not limited, waiting for the last vote is
    bench.vote("a", "c")
    bench.advance(300 * SECOND - 1)
    assert bench.core.state is CoordinatorState.INSTALLED
    bench.advance(1)
    assert "no vote on step 1 within 300 s from b" in bench.notes(a.StepRejected)[0].event.cause
    assert bench.proposed().nodes == ("a", "c")


def test_stragglers_stay_when_the_others_could_not_go_on_without_them() -> None:
    bench = Bench(3, vote_timeout_ns=1 * SECOND)
    bench.installed(*"abc")
    bench.vote("a")
    bench.advance(1 * SECOND)
    assert bench.notes(a.StepRejected)[0].event.lost == ("b", "c")
    assert bench.proposed().nodes == ("a", "b", "c")


def test_a_deadline_for_votes_ends_with_its_step() -> None:
    bench = Bench(2, vote_timeout_ns=1 * SECOND)
    bench.installed(*"ab")
    bench.commit(*"ab")
    assert bench.core.next_timer() is None


def test_votes_do_not_each_walk_through_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step of n members would cost n squared at the one process that all wait for."""
    nodes = [f"n{index}" for index in range(64)]
    bench = Bench(64)
    bench.installed(*nodes)
    walks: list[int] = []
    choose = Roster.choose
    monkeypatch.setattr(Roster, "choose", lambda roster, **how: (walks.append(1), choose(roster, **how))[1])
    bench.begin(*nodes)
    bench.vote(*nodes)
    assert bench.core.history.committed_step == 1
    assert len(walks) <= 4


# The part alone


def work() -> ActiveView:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate("abc"))
    view = View(view_id=1, members=members, seed=7, committed_step=4, committed_view=0)
    return ActiveView(view, CoordinatorConfig(world_size=3, quiet_ns=10, vote_timeout_ns=100), now_ns=1000)


def test_votes_are_late_only_after_a_first_one_and_until_the_decision() -> None:
    part = work()
    part.receive("a", m.BeginStep(view_id=1, step=5), expected=5, now_ns=1001)
    assert part.late_ns is None
    assert part.late(10_000) is None
    for now_ns, node in ((1002, "b"), (1050, "a")):
        assert part.receive(node, m.Vote(view_id=1, step=5, ok=True, digest=b"d"), expected=5, now_ns=now_ns) is None
    assert part.late_ns == 1102  # of the first vote
    assert part.late(1101) is None
    late = part.late(1102)
    assert late is not None
    assert (late.lost, late.culprit, late.contradiction.enough) == (("c",), "c", True)
    part.step_decided(now_ns=1060)
    assert part.late_ns is None
    assert part.late(10_000) is None


def test_the_quiet_of_a_boundary_begins_with_the_installation_and_anew_with_each_decision() -> None:
    part = work()
    assert part.quiet_ns == 1010
    part.step_decided(now_ns=2000)
    assert part.quiet_ns == 2010


@pytest.mark.parametrize("message", [m.BeginStep(view_id=1, step=6), m.Vote(view_id=1, step=4, ok=True)])
def test_another_step_than_the_next_opens_none(message: m.BeginStep | m.Vote) -> None:
    part = work()
    outcome = part.receive("a", message, expected=5, now_ns=1001)
    assert outcome is not None
    assert (outcome.commit, outcome.culprit) == (False, "a")
    assert part.ballot is None
    assert not part.entered("a")
