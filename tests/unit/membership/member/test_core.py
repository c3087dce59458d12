"""The member's core: one view at a time, and never a word about a step whose fate it cannot know."""

from __future__ import annotations

from typing import Any

import pytest

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.member import actions as a
from quicoll.membership.member.core import MemberCore
from quicoll.membership.member.local_view import BEGIN_NS
from quicoll.membership.member.states import MemberState
from quicoll.membership.view import Member, View

SECOND = 1_000_000_000


def view(view_id: int = 1, *, nodes: str = "abc", committed: int = 0, by: int = 0, seed: int = 7) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(nodes))
    return View(view_id=view_id, members=members, seed=seed, committed_step=committed, committed_view=by)


class Bench:
    """Member "a", its clock, and the actions since they were last looked at."""

    def __init__(self, **fields: Any) -> None:
        self.now = 0
        self.core = MemberCore("a", 1, **fields)
        self.actions: list[a.MemberAction] = []

    def do(self, name: str, *args: Any, **fields: Any) -> list[a.MemberAction]:
        """Give an input to the core; what it wants done."""
        getattr(self.core, name)(*args, now_ns=self.now, **fields)
        return self.drain()

    def drain(self) -> list[a.MemberAction]:
        self.actions = []
        while (action := self.core.next_action()) is not None:
            self.actions.append(action)
        return self.actions

    def hear(self, *messages: m.CoordinatorMessage) -> list[a.MemberAction]:
        found: list[a.MemberAction] = []
        for message in messages:
            found += self.do("receive", message)
        return found

    def join(self, **fields: Any) -> None:
        self.do("connected")
        self.hear(m.Welcome(**{"seed": 7, "committed_step": 0, **fields}))

    def active(self, proposal: View | None = None) -> View:
        proposal = proposal or view()
        self.join(committed_step=proposal.committed_step)
        self.hear(m.Propose(view=proposal))
        self.do("links_ready", proposal.view_id)
        self.hear(m.Install(view_id=proposal.view_id))
        assert self.core.state is MemberState.ACTIVE
        return proposal

    def in_step(self, step: int = 1, *, voted: bool = False) -> None:
        self.active(view(committed=step - 1))
        self.do("begin", step)
        if voted:
            self.do("vote", step, ok=True, digest=b"d")

    def tick(self, nanoseconds: int) -> list[a.MemberAction]:
        self.now += nanoseconds
        self.core.handle_timer(self.now)
        return self.drain()


# From the first link to the first step


def test_a_link_begins_with_join() -> None:
    bench = Bench(addresses=[("h", 1)], world_size=3, rank_hint=2, site="fra", committed_step=4)
    assert bench.do("connected") == [
        a.TellCoordinator(
            m.Join(incarnation=1, addresses=(("h", 1),), world_size=3, rank_hint=2, site="fra", committed_step=4)
        )
    ]
    assert bench.do("connected") == []


def test_a_view_is_formed_confirmed_and_activated() -> None:
    bench = Bench()
    bench.join()
    proposal = view()
    assert bench.hear(m.Propose(view=proposal)) == [a.FormLinks(proposal)]
    assert bench.do("links_ready", 1) == [a.TellCoordinator(m.Confirm(view_id=1))]
    assert bench.do("links_ready", 1) == []
    assert bench.hear(m.Install(view_id=1)) == [a.Activate(proposal)]
    assert bench.core.view == proposal
    assert bench.core.next_step == 1


def test_links_of_another_view_confirm_nothing() -> None:
    bench = Bench()
    bench.join()
    bench.hear(m.Propose(view=view(2)))
    assert bench.do("links_ready", 1) == []
    assert bench.do("links_failed", 1, ["b"], "no answer") == []


def test_links_that_fail_are_named() -> None:
    bench = Bench()
    bench.join()
    bench.hear(m.Propose(view=view()))
    assert bench.do("links_failed", 1, ["b"], "no answer") == [
        a.TellCoordinator(m.Decline(view_id=1, unreachable=("b",), reason="no answer"))
    ]


def test_a_link_that_breaks_after_the_confirmation_takes_it_back() -> None:
    bench = Bench()
    bench.join()
    bench.hear(m.Propose(view=view()))
    assert bench.do("peer_lost", "b", "reset") == []  # still being formed: links_failed will tell
    bench.do("links_ready", 1)
    assert bench.do("peer_lost", "b", "reset") == [
        a.TellCoordinator(m.Decline(view_id=1, unreachable=("b",), reason="reset"))
    ]
    # the installation was on its way: it acts, and hears of the end at once
    assert bench.hear(m.Install(view_id=1)) == [a.Activate(view())]


def test_what_it_waits_for_is_told_until_a_view_is_activated() -> None:
    bench = Bench()
    bench.do("connected")
    assert bench.hear(m.Welcome(seed=7, committed_step=0, waiting_for="2 of 3")) == [a.Held("2 of 3")]
    assert bench.hear(m.Withhold(cause="2 of 3")) == []
    assert bench.hear(m.Withhold(cause="no quorum")) == [a.Held("no quorum")]
    bench.hear(m.Propose(view=view()))
    bench.do("links_ready", 1)
    assert bench.hear(m.Install(view_id=1)) == [a.Resumed(), a.Activate(view())]


# One view at a time


def test_the_old_view_ends_before_the_next_is_formed() -> None:
    bench = Bench()
    bench.active()
    assert bench.hear(m.Propose(view=view(2))) == [a.Deactivate(1, "view 2 is proposed"), a.FormLinks(view(2))]
    assert bench.do("links_ready", 2) == [a.TellCoordinator(m.Confirm(view_id=2))]


def test_the_old_view_ends_by_the_names_of_those_whom_the_next_one_leaves_out() -> None:
    bench = Bench()
    bench.active()
    without_b = view(2, nodes="ac")
    assert bench.hear(m.Propose(view=without_b))[0] == a.Deactivate(1, "view 2 is proposed without b", lost=("b",))


def test_a_proposal_that_comes_to_nothing_ends_too() -> None:
    bench = Bench()
    bench.join()
    bench.hear(m.Propose(view=view()))
    assert bench.hear(m.Aborted(view_id=1, cause="b declined", lost=("b",))) == [
        a.Deactivate(1, "b declined", lost=("b",))
    ]
    assert bench.core.state is MemberState.JOINING


def test_a_proposal_that_meets_a_step_the_coordinator_did_not_know_of_aborts_it() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    actions = bench.hear(m.Propose(view=view(2)))
    assert actions == [
        a.Deactivate(1, "view 2 is proposed"),
        a.Decided(1, 1, False, "view 2 is proposed"),
        a.FormLinks(view(2)),
    ]


def test_a_proposal_that_counts_the_step_commits_it() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    following = view(2, committed=1, by=1)
    actions = bench.hear(m.Propose(view=following))
    assert actions == [a.Decided(1, 1, True), a.Deactivate(1, "view 2 is proposed"), a.FormLinks(following)]
    assert bench.core.committed_step == 1


def test_a_step_committed_by_another_view_is_not_taken_for_ours() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    actions = bench.hear(m.Propose(view=view(3, committed=1, by=2)))
    assert isinstance(actions[-1], a.Refused)
    assert not any(isinstance(action, a.Decided) for action in actions)


# Steps


def test_a_step_is_begun_voted_for_and_committed() -> None:
    bench = Bench()
    bench.active(view(committed=4, by=0))
    assert bench.core.next_step == 5
    assert bench.do("begin", 5) == [a.TellCoordinator(m.BeginStep(view_id=1, step=5))]
    assert bench.core.open_step == 5
    assert bench.core.next_step is None
    assert bench.do("vote", 5, ok=True, digest=b"d") == [
        a.TellCoordinator(m.Vote(view_id=1, step=5, ok=True, digest=b"d"))
    ]
    assert bench.hear(m.Decide(view_id=1, step=5, commit=True)) == [a.Decided(1, 5, True)]
    assert bench.core.committed_step == 5
    assert bench.core.next_step == 6


def second_step() -> Bench:
    """A member inside the second step of its view."""
    bench = Bench()
    bench.in_step(voted=True)
    bench.hear(m.Decide(view_id=1, step=1, commit=True))
    assert bench.do("begin", 2) == []
    return bench


def test_the_first_step_of_a_view_is_announced_at_once_and_once() -> None:
    bench = Bench()
    bench.active()
    assert bench.do("begin", 1) == [a.TellCoordinator(m.BeginStep(view_id=1, step=1))]
    assert bench.core.next_timer() is None
    assert bench.tick(BEGIN_NS) == []


def test_a_later_step_that_lasts_is_announced_before_its_vote_and_once() -> None:
    bench = second_step()
    assert bench.core.next_timer() == BEGIN_NS
    assert bench.tick(BEGIN_NS - 1) == []
    assert bench.tick(1) == [a.TellCoordinator(m.BeginStep(view_id=1, step=2))]
    assert bench.core.next_timer() is None
    assert bench.tick(BEGIN_NS) == []
    assert bench.do("vote", 2, ok=True) == [a.TellCoordinator(m.Vote(view_id=1, step=2, ok=True))]


def test_a_later_step_that_is_voted_on_soon_is_announced_by_nothing_else() -> None:
    bench = second_step()
    bench.do("vote", 2, ok=True)
    assert bench.tick(BEGIN_NS) == []
    bench.hear(m.Decide(view_id=1, step=2, commit=True))
    assert bench.core.next_timer() is None
    assert bench.tick(BEGIN_NS) == []


def test_a_step_is_announced_at_the_latest_when_its_view_ends_and_not_after_it() -> None:
    """So that the coordinator can say that it was lost."""
    bench = second_step()
    assert bench.hear(m.Aborted(view_id=1, cause="b was lost")) == [
        a.TellCoordinator(m.BeginStep(view_id=1, step=2)),
        a.Deactivate(1, "b was lost"),
        a.Decided(1, 2, False, "b was lost"),
    ]
    assert bench.core.next_timer() is None
    assert bench.tick(BEGIN_NS) == []


def test_a_step_that_a_proposal_ends_is_announced_before_it_is_answered() -> None:
    bench = second_step()
    following = view(2, committed=1, by=1)
    actions = bench.hear(m.Propose(view=following))
    assert actions[0] == a.TellCoordinator(m.BeginStep(view_id=1, step=2))
    assert actions[-1] == a.FormLinks(following)


def test_a_decision_may_bring_the_next_view() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    following = view(2, committed=1, by=1)
    assert bench.hear(m.Decide(view_id=1, step=1, commit=True, next_view=following)) == [
        a.Decided(1, 1, True),
        a.Deactivate(1, "view 2 is proposed"),
        a.FormLinks(following),
    ]


@pytest.mark.parametrize("voted", [False, True])
def test_an_abort_is_told_after_everything_of_the_view_has_ended(voted: bool) -> None:
    bench = Bench()
    bench.in_step(voted=voted)
    told = m.Decide(view_id=1, step=1, commit=False, cause="b was lost", lost=("b",), culprit="b", kind="corrupted")
    assert bench.hear(told) == [
        a.Deactivate(1, "b was lost", ("b",), "b", kind="corrupted"),
        a.Decided(1, 1, False, "b was lost", ("b",), "b", "corrupted"),
    ]
    assert bench.core.state is MemberState.JOINING
    assert bench.core.committed_step == 0


def test_the_end_of_the_view_aborts_a_step_that_the_coordinator_did_not_know_of() -> None:
    bench = Bench()
    bench.in_step()
    actions = bench.hear(m.Aborted(view_id=1, cause="b was lost"))
    assert [type(action) for action in actions] == [a.Deactivate, a.Decided]


@pytest.mark.parametrize(
    ("setup", "call", "args"),
    [
        ("join", "begin", {"step": 1}),
        ("active", "begin", {"step": 2}),
        ("in_step", "begin", {"step": 1}),
        ("active", "vote", {"step": 1, "ok": True}),
        ("in_step", "vote", {"step": 2, "ok": True}),
    ],
)
def test_a_step_out_of_turn_is_the_callers_error(setup: str, call: str, args: dict[str, Any]) -> None:
    bench = Bench()
    getattr(bench, setup)()
    with pytest.raises(LocalError):
        bench.do(call, **args)
    assert bench.drain() == []


def test_a_step_is_voted_for_once() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    with pytest.raises(LocalError, match="nothing to vote"):
        bench.do("vote", 1, ok=True)


def test_no_step_begins_in_a_view_that_cannot_go_on() -> None:
    bench = Bench()
    bench.active()
    assert bench.do("failed", "all_reduce#3 was cancelled", culprit="a", kind="mismatch") == [
        a.TellCoordinator(m.Report(view_id=1, reason="all_reduce#3 was cancelled", culprit="a", kind="mismatch"))
    ]
    assert bench.do("failed", "all_reduce#4 was cancelled") == []
    with pytest.raises(LocalError):
        bench.do("begin", 1)


def test_every_lost_peer_is_reported_once() -> None:
    bench = Bench()
    bench.active()
    assert bench.do("peer_lost", "b", "silence") == [
        a.TellCoordinator(m.Report(view_id=1, lost=(("b", "silence"),), culprit="b"))
    ]
    assert bench.do("peer_lost", "b", "silence") == []
    assert len(bench.do("peer_lost", "c", "x" * 1000)) == 1
    assert bench.do("peer_lost", "a", "silence") == []
    assert bench.do("peer_lost", "z", "silence") == []
    assert bench.core.next_step is None


def test_state_from_another_member_counts_from_then_on() -> None:
    bench = Bench()
    bench.active(view(committed=4))
    bench.core.caught_up(4)
    assert bench.core.committed_step == 4
    for step in (3, 5):
        with pytest.raises(LocalError):
            bench.core.caught_up(step)
    bench.do("disconnected", "silence")
    joined = bench.do("connected")[0]
    assert isinstance(joined, a.TellCoordinator)
    assert isinstance(joined.message, m.Join)
    assert joined.message.committed_step == 4


# Losing the coordinator


def test_without_the_coordinator_a_member_is_partitioned() -> None:
    bench = Bench()
    bench.active()
    cause = "the coordinator was lost: silence"
    assert bench.do("disconnected", "silence") == [a.Deactivate(1, cause, partitioned=True), a.Held(cause)]
    assert bench.core.next_step is None
    assert bench.do("disconnected", "silence") == []


def test_a_step_without_a_vote_is_aborted_by_the_loss_itself() -> None:
    """Without this member's vote it can be committed nowhere."""
    bench = Bench()
    bench.in_step()
    assert [type(action) for action in bench.do("disconnected", "silence")] == [a.Deactivate, a.Decided, a.Held]
    assert bench.core.doubt is None


def test_a_step_that_it_voted_against_is_aborted_by_the_loss_itself() -> None:
    bench = Bench()
    bench.in_step()
    bench.do("vote", 1, ok=False, reason="not a number")
    assert a.Decided(1, 1, False, "the coordinator was lost: silence") in bench.do("disconnected", "silence")


@pytest.mark.parametrize("committed", [False, True])
def test_a_vote_without_a_decision_stays_in_doubt_until_the_journal_answers(committed: bool) -> None:
    """REQUIREMENTS S9: neither applied nor discarded before the answer, however often the link is lost."""
    bench = Bench()
    bench.in_step(voted=True)
    assert [type(action) for action in bench.do("disconnected", "silence")] == [a.Deactivate, a.Held]
    assert bench.core.doubt == (1, 1)
    bench.do("connected")
    assert bench.do("disconnected", "reset") == [a.Held("the coordinator was lost: reset")]
    joined = bench.do("connected")[0]
    assert joined == a.TellCoordinator(m.Join(incarnation=1, committed_step=0, doubt=(1, 1)))
    actions = bench.hear(m.Welcome(seed=7, committed_step=5, doubt_committed=committed))
    assert actions == [a.Decided(1, 1, committed, "settled after the coordinator was lost")]
    assert bench.core.committed_step == int(committed)
    assert bench.core.doubt is None


def test_a_view_that_was_being_formed_ends_with_the_link() -> None:
    bench = Bench()
    bench.join()
    bench.hear(m.Propose(view=view()))
    bench.do("links_ready", 1)
    assert [type(action) for action in bench.do("disconnected", "silence")] == [a.Deactivate, a.Held]
    assert bench.core.next_timer() is None


@pytest.mark.parametrize(
    "late",
    [m.Install(view_id=1), m.Decide(view_id=1, step=1, commit=True), m.Withhold(cause="x"), m.Propose(view=view(2))],
    ids=lambda message: type(message).__name__,
)
def test_what_was_meant_for_the_link_before_is_ignored(late: m.CoordinatorMessage) -> None:
    """The coordinator may tell a node something between the new link and the Join that comes on it."""
    bench = Bench()
    bench.in_step(voted=True)
    bench.do("disconnected", "silence")
    assert bench.hear(late) == []
    bench.do("connected")
    assert bench.hear(late) == []
    assert bench.core.doubt == (1, 1)


# Deadlines


@pytest.mark.parametrize(
    ("setup", "timeout"),
    [("connected", 30), ("confirmed", 30), ("declined", 30), ("voted", 330)],
)
def test_an_answer_that_the_coordinator_owes_is_not_waited_for_without_end(setup: str, timeout: int) -> None:
    """DESIGN promise 3. A new link and a new Join settle whatever was asked."""
    bench = Bench()
    if setup == "connected":
        bench.do("connected")
    elif setup == "voted":
        bench.in_step(voted=True)
    else:
        bench.join()
        bench.hear(m.Propose(view=view()))
        if setup == "confirmed":
            bench.do("links_ready", 1)
        else:
            bench.do("links_failed", 1, ["b"], "no answer")
    assert bench.core.next_timer() == timeout * SECOND
    assert bench.tick(timeout * SECOND - 1) == []
    actions = bench.tick(1)
    assert isinstance(actions[0], a.Reconnect)
    assert bench.core.state is MemberState.DETACHED
    assert bench.core.next_timer() is None
    assert bench.do("disconnected", "closed") == []  # the shell tells what it was just asked to do
    assert bench.core.doubt == ((1, 1) if setup == "voted" else None)
    assert isinstance(bench.do("connected")[0], a.TellCoordinator)


def test_links_that_are_not_formed_in_time_decline_the_view() -> None:
    bench = Bench(form_timeout_ns=15 * SECOND)
    bench.join()
    bench.hear(m.Propose(view=view()))
    assert bench.tick(15 * SECOND) == [a.TellCoordinator(m.Decline(view_id=1, reason="no links within 15 s"))]
    assert bench.core.next_timer() == 45 * SECOND


def test_nothing_is_awaited_while_the_user_computes_or_a_view_cannot_be_formed() -> None:
    bench = Bench()
    bench.join(waiting_for="2 of 3")
    assert bench.core.next_timer() is None
    bench = Bench()
    bench.in_step()
    assert bench.core.next_timer() is None
    bench.do("vote", 1, ok=True)
    bench.hear(m.Decide(view_id=1, step=1, commit=True))
    assert bench.core.next_timer() is None


def test_deadlines_of_zero_are_refused() -> None:
    with pytest.raises(LocalError):
        MemberCore("a", 1, form_timeout_ns=0)


# Leaving


def test_who_leaves_between_steps_is_gone_at_once() -> None:
    bench = Bench()
    bench.active()
    assert bench.do("leave", "done") == [a.TellCoordinator(m.Leave(reason="done")), a.Deactivate(1, "this node left")]
    assert bench.core.state is MemberState.LEFT
    assert bench.do("leave") == []
    assert bench.hear(m.Propose(view=view(2))) == []
    assert bench.do("connected") == []


@pytest.mark.parametrize("commit", [True, False])
def test_who_leaves_inside_a_step_stays_for_its_decision(commit: bool) -> None:
    bench = second_step()
    begin, leave = m.BeginStep(view_id=1, step=2), m.Leave(reason="done", committed_step=1)
    # It would be taken to leave at a boundary otherwise, where nobody waits for its vote.
    assert bench.do("leave", "done") == [a.TellCoordinator(begin), a.TellCoordinator(leave)]
    bench.do("vote", 2, ok=True)
    actions = bench.hear(m.Decide(view_id=1, step=2, commit=commit, cause="x"))
    decided = next(action for action in actions if isinstance(action, a.Decided))
    assert decided.commit is commit
    assert any(isinstance(action, a.Deactivate) for action in actions)
    assert bench.core.state is MemberState.LEFT


def test_who_leaves_without_a_link_is_gone_at_once() -> None:
    bench = Bench()
    assert bench.do("leave") == []
    assert bench.core.state is MemberState.LEFT


def test_who_leaves_before_it_was_welcomed_says_so_then() -> None:
    bench = Bench()
    bench.do("connected")
    assert bench.do("leave") == []
    assert bench.hear(m.Welcome(seed=7, committed_step=0)) == [a.TellCoordinator(m.Leave())]
    assert bench.core.state is MemberState.LEFT


def test_who_leaves_in_doubt_comes_back_for_the_answer() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    bench.do("leave")
    bench.do("disconnected", "silence")
    assert bench.core.state is MemberState.DETACHED
    bench.do("connected")
    actions = bench.hear(m.Welcome(seed=7, committed_step=1, doubt_committed=True))
    assert [type(action) for action in actions] == [a.Decided, a.TellCoordinator]
    assert bench.core.state is MemberState.LEFT


def test_who_leaves_and_is_not_in_doubt_does_not_come_back() -> None:
    bench = Bench()
    bench.in_step()
    bench.do("leave")
    bench.do("disconnected", "silence")
    assert bench.core.state is MemberState.LEFT


def test_a_proposal_finds_the_leaver_gone() -> None:
    bench = Bench()
    bench.in_step()
    bench.do("leave")
    actions = bench.hear(m.Propose(view=view(2)))
    assert [type(action) for action in actions] == [a.Deactivate, a.Decided]
    assert bench.core.state is MemberState.LEFT


# A coordinator that breaks the rules


def test_a_refusal_is_final() -> None:
    bench = Bench()
    bench.active()
    assert bench.hear(m.RefuseJoin(reason="other world size")) == [
        a.Deactivate(1, "refused: other world size"),
        a.Refused("other world size"),
    ]
    assert bench.core.state is MemberState.LEFT
    assert bench.do("disconnected", "closed") == []


@pytest.mark.parametrize(
    "message",
    [
        m.Welcome(seed=7, committed_step=0),
        m.Install(view_id=1),
        m.Install(view_id=2),
        m.Withhold(cause="x"),
        m.Propose(view=view(1)),
        m.Propose(view=view(2, nodes="bc")),
        m.Propose(view=view(2, seed=8)),
        m.Decide(view_id=1, step=1, commit=True),
        m.Decide(view_id=2, step=1, commit=True),
        m.Aborted(view_id=2),
    ],
    ids=repr,
)
def test_what_the_rules_exclude_stops_the_member(message: m.CoordinatorMessage) -> None:
    bench = Bench()
    bench.active()
    actions = bench.hear(message)
    assert isinstance(actions[-1], a.Refused)
    assert "broke the protocol" in actions[-1].reason
    assert bench.core.state is MemberState.LEFT


def test_a_commit_without_this_members_vote_is_not_believed() -> None:
    bench = Bench()
    bench.in_step()
    actions = bench.hear(m.Decide(view_id=1, step=1, commit=True))
    assert isinstance(actions[-1], a.Refused)
    assert bench.core.committed_step == 0


def test_a_member_that_stops_in_doubt_does_not_call_the_step_aborted() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    actions = bench.hear(m.Withhold(cause="x"))
    assert [type(action) for action in actions] == [a.Deactivate, a.Refused]
    assert bench.core.doubt == (1, 1)


@pytest.mark.parametrize(
    "message",
    [
        m.Install(view_id=1),
        m.Propose(view=view(2, committed=3)),
    ],
    ids=repr,
)
def test_a_view_is_not_installed_unconfirmed_nor_proposed_behind_what_the_node_holds(
    message: m.CoordinatorMessage,
) -> None:
    bench = Bench(committed_step=4)
    bench.join(committed_step=4)
    bench.hear(m.Propose(view=view(committed=4)))
    assert isinstance(bench.hear(message)[-1], a.Refused)


def test_an_install_of_another_view_installs_nothing() -> None:
    bench = Bench()
    bench.join()
    bench.hear(m.Propose(view=view(2)))
    bench.do("links_ready", 2)
    assert [type(action) for action in bench.hear(m.Install(view_id=1))] == [a.Deactivate, a.Refused]


@pytest.mark.parametrize(
    "welcome",
    [m.Welcome(seed=7, committed_step=0), m.Welcome(seed=8, committed_step=0, doubt_committed=False)],
    ids=repr,
)
def test_a_welcome_that_does_not_answer_the_doubt_or_has_another_seed_is_not_believed(welcome: m.Welcome) -> None:
    bench = Bench()
    bench.in_step(voted=True)
    bench.do("disconnected", "silence")
    bench.do("connected")
    assert [type(action) for action in bench.hear(welcome)] == [a.Refused]


def test_it_says_where_it_stands() -> None:
    bench = Bench()
    bench.in_step()
    assert repr(bench.core) == "<MemberCore a#1 ACTIVE view=1 step=1>"


# Left out, and the end of the job


def test_a_member_that_is_left_out_says_when_it_reaches_the_others() -> None:
    bench = Bench()
    bench.join()
    assert bench.hear(m.Probe(number=3, members=view(nodes="bc").members)) == [
        a.ProbePaths(3, view(nodes="bc").members)
    ]
    bench.core.reached(3)
    assert bench.drain() == [a.TellCoordinator(m.Reached(number=3))]
    bench.hear(m.Propose(view=view()))
    bench.core.reached(3)
    assert bench.drain() == [], "it is in the next view already"


@pytest.mark.parametrize("where", ["joining", "forming", "active"])
def test_who_is_asked_to_reach_a_member_is_expected_by_it_wherever_it_is(where: str) -> None:
    bench = Bench()
    if where == "active":
        bench.active()
    else:
        bench.join()
    if where == "forming":
        bench.hear(m.Propose(view=view()))
    one, other = view(nodes="bc").members
    assert bench.hear(m.Expect(member=one, own=other)) == [a.ExpectPeer(one, other)]


def test_a_member_that_hears_of_the_end_says_that_it_has_heard_and_is_done() -> None:
    bench = Bench()
    bench.join(committed_step=5)
    assert bench.hear(m.JobEnded(step=45)) == [
        a.TellCoordinator(m.Leave(reason="the job is done", finished=45)),
        a.JobOver(45),
    ]
    assert bench.core.state is MemberState.LEFT
    assert bench.do("leave", "done", finished=45) == []


def test_a_member_that_leaves_says_whether_its_work_has_ended_and_what_it_holds() -> None:
    bench = Bench()
    bench.active(view(committed=4, by=0, view_id=2))
    bench.core.caught_up(4)
    told = bench.do("leave", "done", finished=9)[0]
    assert told == a.TellCoordinator(m.Leave(reason="done", finished=9, committed_step=4))


def test_a_member_that_is_told_to_leave_in_a_decision_has_the_step_and_begins_no_other() -> None:
    bench = Bench()
    bench.in_step(voted=True)
    found = bench.hear(m.Decide(view_id=1, step=1, commit=True, dismissal="a leaves"))
    assert found == [
        a.Decided(1, 1, True),
        a.Deactivate(1, "a leaves"),
        a.TellCoordinator(m.Leave(reason="a leaves", committed_step=1)),
        a.Dismissal("a leaves"),
    ]
    assert bench.core.state is MemberState.LEFT
    assert bench.core.next_step is None
    assert bench.do("leave", "done") == []


@pytest.mark.parametrize("where", ["joining", "forming", "active"])
def test_a_member_is_told_to_leave_between_steps_wherever_it_is(where: str) -> None:
    bench = Bench()
    if where == "active":
        bench.active()
    else:
        bench.join()
    if where == "forming":
        bench.hear(m.Propose(view=view()))
    assert bench.hear(m.Dismiss(reason="a leaves"))[-1] == a.Dismissal("a leaves")
    assert bench.core.state is MemberState.LEFT


@pytest.mark.parametrize("message", [m.Probe(number=1, members=()), m.JobEnded(step=1)])
def test_in_a_view_neither_is_said(message: m.CoordinatorMessage) -> None:
    bench = Bench()
    bench.active()
    assert isinstance(bench.hear(message)[-1], a.Refused)


# Learning outside of views


def test_a_member_steps_out_between_two_steps_and_asks_to_be_back_once() -> None:
    bench = Bench()
    bench.active()
    bench.core.step_out()
    assert bench.drain() == [a.TellCoordinator(m.Learn(view_id=1))]
    bench.hear(m.Aborted(view_id=1, cause="not in view 2"))
    assert bench.core.state is MemberState.JOINING
    bench.core.learned()
    bench.core.learned()
    assert bench.drain() == [a.TellCoordinator(m.Learned())]


def test_nobody_steps_out_of_an_open_step_or_of_no_view() -> None:
    bench = Bench()
    with pytest.raises(LocalError):
        bench.core.step_out()
    bench.in_step()
    with pytest.raises(LocalError):
        bench.core.step_out()


def test_who_is_proposed_anew_or_has_lost_the_coordinator_learns_no_more() -> None:
    for end in ("proposed", "disconnected", "left"):
        bench = Bench()
        bench.active()
        bench.core.step_out()
        bench.hear(m.Aborted(view_id=1, cause="not in view 2"))
        if end == "proposed":
            bench.hear(m.Propose(view=view(2)))
        elif end == "disconnected":
            bench.do("disconnected", "silence")
        else:
            bench.do("leave")
        bench.drain()
        bench.core.learned()
        assert bench.drain() == []
