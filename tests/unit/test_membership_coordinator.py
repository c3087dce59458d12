"""The coordinator's core, rule by rule: what it is told, what it says, and what it writes before it says it."""

from __future__ import annotations

import itertools
import random
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.errors import LocalError
from quicoll.membership import actions as a
from quicoll.membership import messages as m
from quicoll.membership.complaints import Backoff, cover
from quicoll.membership.config import CoordinatorConfig
from quicoll.membership.coordinator import TRANSITIONS, Cause, CoordinatorCore, State, transition
from quicoll.membership.history import Committed, History, InstalledView, Left, Proposed, Record, Seeded
from quicoll.membership.roster import Roster
from quicoll.membership.view import View

MS = 1_000_000
SECOND = 1000 * MS
Message = TypeVar("Message", bound=m.CoordinatorMessage)


class Bench:
    """A coordinator, its journal and its clock; what it told each node is kept until it is read."""

    def __init__(self, world_size: int, *, records: list[Record] | None = None, **config: Any) -> None:
        self.now = 0
        self.records: list[Record] = list(records or [])
        self.inbox: dict[str, list[m.CoordinatorMessage]] = {}
        self.carried_out: list[a.Action] = []
        self.incarnations: dict[str, int] = {}
        self.config = CoordinatorConfig(**{"world_size": world_size, "seed": 7, **config})
        self.core = CoordinatorCore(self.config, History.of(self.records), now_ns=0)
        self.drain()

    def drain(self) -> None:
        while (action := self.core.next_action()) is not None:
            self.carried_out.append(action)
            if isinstance(action, a.Persist):
                self.records.append(action.record)
            elif isinstance(action, a.Tell):
                self.inbox.setdefault(action.node, []).append(action.message)
        at = self.core.next_timer()
        assert at is None or at > self.now

    def say(self, node: str, message: m.MemberMessage) -> None:
        self.core.receive(node, message, now_ns=self.now, incarnation=self.incarnations.get(node))
        self.drain()

    def join(self, *nodes: str, incarnation: int | None = None, **fields: Any) -> None:
        for node in nodes:
            self.incarnations[node] = incarnation if incarnation is not None else self.incarnations.get(node, 1)
            self.say(node, m.Join(incarnation=self.incarnations[node], **fields))

    def lose(self, node: str) -> None:
        self.core.member_lost(node, "silence", now_ns=self.now)
        self.drain()

    def advance(self, nanoseconds: int) -> None:
        """Time passes; every timer is served at its very moment."""
        until = self.now + nanoseconds
        while (at := self.core.next_timer()) is not None and at <= until:
            self.now = at
            self.core.handle_timer(at)
            self.drain()
        self.now = until

    def told(self, node: str, kind: type[Message]) -> Message:
        """The last message told to the node, which is of this kind; everything told to it is then forgotten."""
        message = self.inbox.pop(node, [None])[-1]
        assert isinstance(message, kind), message
        return message

    def all_told(self, *nodes: str) -> dict[str, list[type[m.CoordinatorMessage]]]:
        found = {node: [type(message) for message in self.inbox.pop(node, [])] for node in nodes}
        assert not self.inbox
        return found

    def proposed(self) -> View:
        """The last view that was proposed."""
        views = [action.event.view for action in self.notes(a.ViewProposed)]
        return views[-1]

    def notes(self, kind: type[Any]) -> list[Any]:
        return [action for action in self.carried_out if isinstance(action, a.Note) and isinstance(action.event, kind)]

    def confirm(self, *nodes: str) -> View:
        view = self.proposed()
        for node in nodes or view.nodes:
            self.say(node, m.Confirm(view_id=view.view_id))
        return view

    def installed(self, *nodes: str, **fields: Any) -> View:
        self.join(*nodes, **fields)
        view = self.confirm()
        assert self.core.view == view
        self.inbox.clear()
        return view

    @property
    def view_id(self) -> int:
        assert self.core.view is not None
        return self.core.view.view_id

    @property
    def step(self) -> int:
        return self.core.history.committed_step + 1

    def begin(self, *nodes: str) -> None:
        for node in nodes:
            self.say(node, m.Begin(view_id=self.view_id, step=self.step))

    def vote(self, *nodes: str, digest: bytes = b"d") -> None:
        for node in nodes:
            self.say(node, m.Vote(view_id=self.view_id, step=self.step, ok=True, digest=digest))

    def commit(self, *nodes: str) -> None:
        """Every member takes one step."""
        self.begin(*nodes)
        self.vote(*nodes)


def letters(count: int) -> list[str]:
    return [chr(ord("a") + index) for index in range(count)]


# The table


@pytest.mark.parametrize(("state", "cause"), list(itertools.product(State, Cause)))
def test_only_the_table_moves_the_coordinator(state: State, cause: Cause) -> None:
    if cause in TRANSITIONS[state]:
        assert transition(state, cause) is TRANSITIONS[state][cause]
    else:
        with pytest.raises(LocalError, match=f"{cause.name} cannot happen to a coordinator that is {state.name}"):
            transition(state, cause)


def test_every_state_can_be_reached_and_left() -> None:
    assert set(TRANSITIONS) == set(State)
    assert {after for causes in TRANSITIONS.values() for after in causes.values()} == set(State)
    assert all(TRANSITIONS.values())


# The first view


@pytest.mark.parametrize("order", list(itertools.permutations(["n1", "n2", "n10"])))
def test_the_first_view_comes_with_the_last_node_and_ranks_do_not_depend_on_who_was_first(
    order: tuple[str, ...],
) -> None:
    bench = Bench(3)
    bench.join(*order[:2])
    assert bench.core.state is State.FORMING
    assert not bench.notes(a.ViewProposed)
    bench.join(order[2])
    view = bench.told(order[0], m.Propose).view
    assert view.nodes == ("n1", "n2", "n10")
    assert (view.view_id, view.seed, view.committed_step, view.committed_view) == (1, 7, 0, 0)


def test_rank_hints_order_the_ranks() -> None:
    bench = Bench(3)
    for node, hint in (("a", 2), ("b", 0), ("c", None)):
        bench.join(node, rank_hint=hint)
    assert bench.proposed().nodes == ("b", "a", "c")


def test_a_member_is_described_as_it_joined() -> None:
    bench = Bench(1)
    bench.join("a", incarnation=9, addresses=(("h", 1),), site="fra", committed_step=4)
    member = bench.proposed().members[0]
    assert (member.node, member.incarnation, member.addresses, member.site) == ("a", 9, (("h", 1),), "fra")


def test_a_node_that_expects_another_world_size_is_refused() -> None:
    bench = Bench(3)
    bench.join("a", world_size=4)
    assert "world size 3, not 4" in bench.told("a", m.Refuse).reason
    assert isinstance(bench.carried_out[-1], a.Drop)
    bench.join("b", "c", "d", world_size=3)
    assert bench.proposed().nodes == ("b", "c", "d")


def test_who_waits_is_told_for_what_and_each_reason_once() -> None:
    bench = Bench(3)
    bench.join("a")
    assert bench.told("a", m.Welcome).waiting_for == "1 of 3 nodes are here: a"
    bench.join("b")
    assert bench.told("b", m.Welcome).waiting_for == "2 of 3 nodes are here: a, b"
    assert bench.told("a", m.Hold).cause == "2 of 3 nodes are here: a, b"
    bench.advance(60 * SECOND)
    assert not bench.inbox


def test_a_view_is_installed_when_all_have_confirmed_and_is_written_first() -> None:
    bench = Bench(2)
    bench.join("a", "b")
    bench.confirm("a")
    assert bench.core.state is State.PROPOSED
    view = bench.proposed()
    bench.carried_out.clear()
    bench.say("b", m.Confirm(view_id=1))
    assert bench.core.state is State.INSTALLED
    assert bench.carried_out[:3] == [
        a.Persist(InstalledView(view)),
        a.Tell("a", 1, m.Install(view_id=1)),
        a.Tell("b", 1, m.Install(view_id=1)),
    ]


def test_a_view_id_is_used_up_before_anyone_hears_of_it() -> None:
    bench = Bench(1)
    bench.join("a")
    told = next(
        index for index, act in enumerate(bench.carried_out) if act == a.Tell("a", 1, m.Propose(view=bench.proposed()))
    )
    assert bench.carried_out.index(a.Persist(Proposed(1))) < told


def test_a_new_journal_goes_on_from_the_newest_checkpoint_that_a_node_has_loaded() -> None:
    bench = Bench(2)
    bench.join("a", committed_step=90)
    bench.join("b", committed_step=40)
    view = bench.confirm()
    assert view.committed_step == 90
    assert [member.committed_step for member in view.members] == [90, 40]
    bench.commit("a", "b")
    assert bench.core.history.committed_step == 91


# Proposals that fail


def declined(bench: Bench, edges: dict[str, str]) -> None:
    view = bench.proposed()
    for node in view.nodes:
        if node in edges:
            bench.say(node, m.Decline(view_id=view.view_id, unreachable=tuple(edges[node]), reason="no answer"))
        else:
            bench.say(node, m.Confirm(view_id=view.view_id))


@pytest.mark.parametrize(
    ("edges", "left"),
    [
        ({"a": "c"}, "abde"),  # who of two is at fault cannot be told: the higher rank goes
        ({"c": "a"}, "abde"),  # whoever says it
        ({"a": "bcde"}, "bcde"),  # a node that reaches nobody does not take all others out
        ({"b": "a", "c": "a", "d": "a", "e": "a"}, "bcde"),
        ({"a": "b", "b": "a", "c": "d"}, "ace"),
        ({"a": "x"}, "bcde"),  # who names nobody that is in the view has only itself
        ({"d": ""}, "abce"),
    ],
)
def test_of_members_that_cannot_reach_each_other_the_fewest_are_left_out(edges: dict[str, str], left: str) -> None:
    bench = Bench(5)
    bench.installed(*"abcde")
    bench.say("a", m.Report(view_id=1, reason="again"))
    declined(bench, edges)
    assert "".join(bench.proposed().nodes) == left


def test_one_complaint_waits_for_the_others_before_anyone_is_judged() -> None:
    """With the first complaint alone "d" would go, because it has the higher rank of the broken pair."""
    bench = Bench(4, gather_ns=500 * MS)
    bench.installed(*"abcd")
    bench.say("a", m.Report(view_id=1, reason="again"))
    bench.say("a", m.Decline(view_id=2, unreachable=("d",)))
    assert bench.core.state is State.PROPOSED
    bench.say("a", m.Decline(view_id=2, unreachable=("c",)))
    bench.say("b", m.Decline(view_id=2, unreachable=("a",)))
    bench.advance(499 * MS)
    assert bench.core.state is State.PROPOSED
    bench.advance(1 * MS)
    assert bench.proposed().nodes == ("b", "c", "d")


def test_a_silent_member_is_left_out_when_the_time_is_up() -> None:
    bench = Bench(3, propose_timeout_ns=20 * SECOND)
    bench.installed(*"abc")
    bench.say("a", m.Report(view_id=1, reason="again"))
    bench.confirm("a", "c")
    bench.advance(20 * SECOND - 1)
    assert bench.proposed().view_id == 2
    bench.inbox.clear()
    bench.advance(1)
    assert bench.proposed().nodes == ("a", "c")
    assert "did not answer within 20 s" in bench.told("b", m.Hold).cause


def test_a_member_that_is_lost_while_a_view_is_formed_is_not_waited_for() -> None:
    bench = Bench(3)
    bench.join(*"abc")
    bench.inbox.clear()
    bench.lose("b")
    assert bench.all_told("a", "c") == {"a": [m.Aborted, m.Hold], "c": [m.Aborted, m.Hold]}
    bench.join("b", incarnation=2)
    assert bench.confirm().view_id == 2
    assert bench.core.state is State.INSTALLED


def test_what_was_said_before_a_loss_still_counts() -> None:
    bench = Bench(5)
    bench.installed(*"abcde")
    bench.say("a", m.Report(view_id=1, reason="again"))
    bench.say("a", m.Decline(view_id=2, unreachable=("c",)))
    bench.lose("e")
    assert bench.proposed().nodes == ("a", "b", "d")


def test_a_confirmation_can_be_taken_back_until_the_view_is_installed() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.say("a", m.Report(view_id=1, reason="again"))
    bench.confirm("a", "b")
    bench.say("b", m.Report(view_id=2, lost=(("a", "silence"),)))
    bench.confirm("c")
    assert bench.core.view is None
    assert bench.proposed().nodes == ("a", "c")


def test_a_broken_pair_is_tried_again_after_waits_that_double_up_to_a_bound() -> None:
    bench = Bench(3, quiet_ns=0, retry_min_ns=1 * SECOND, retry_max_ns=4 * SECOND, propose_timeout_ns=1 * SECOND)
    bench.installed(*"abc")
    bench.say("a", m.Report(view_id=1, lost=(("c", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.say("b", m.Report(view_id=1, reason="me too"))
    tries: list[int] = []
    for _ in range(6):
        assert bench.confirm().nodes == ("a", "b")
        out_at = bench.now
        for _ in range(100):
            if bench.proposed().nodes == ("a", "b"):
                bench.advance(100 * MS)
        assert bench.proposed().nodes == ("a", "b", "c")
        tries.append((bench.now - out_at) // SECOND)
        declined(bench, {"a": "c", "c": "a"})
    assert tries == [1, 2, 4, 4, 4, 4]


def test_a_node_that_starts_anew_is_not_kept_out() -> None:
    bench = Bench(3, quiet_ns=0)
    bench.installed(*"abc")
    bench.say("a", m.Report(view_id=1, reason="again"))
    declined(bench, {"a": "c"})
    bench.confirm("a", "b")
    bench.join("c", incarnation=2)
    assert bench.proposed().nodes == ("a", "b", "c")


@given(st.integers(2, 9), st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_cover_leaves_no_broken_pair_and_does_not_depend_on_the_order_of_complaints(size: int, seed: int) -> None:
    chance = random.Random(seed)
    nodes = letters(size)
    pairs = [pair for pair in itertools.permutations(nodes, 2) if chance.random() < 0.2]
    out = cover(nodes, pairs)
    assert all(one in out or other in out for one, other in pairs)
    chance.shuffle(pairs)
    assert cover(nodes, [(other, one) for one, other in pairs] + pairs[:2]) == out
    # nobody is left out in vain: put back alone, each would meet a broken pair
    assert all(
        any(node in pair and (set(pair) - {node}).isdisjoint(out[:index]) for pair in pairs)
        for index, node in enumerate(out)
    )


def test_a_back_off_ends_when_a_node_was_in_for_long() -> None:
    backoff = Backoff()
    assert [backoff.evict(0, shortest_ns=1, longest_ns=5) for _ in range(4)] == [1, 2, 4, 5]
    assert backoff.evict(5 + 10, shortest_ns=1, longest_ns=5) == 15 + 5
    assert backoff.evict(20 + 11, shortest_ns=1, longest_ns=5) == 31 + 1


# Steps


def test_a_step_is_committed_when_all_have_voted_and_is_written_first() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin(*"abc")
    bench.vote("c", "a")
    assert not bench.inbox
    bench.carried_out.clear()
    bench.vote("b")
    decision = m.Decision(view_id=1, step=1, commit=True)
    assert bench.carried_out[0] == a.Persist(Committed(1, 1, b"d"))
    assert [action for action in bench.carried_out if isinstance(action, a.Tell)] == [
        a.Tell(node, 1, decision) for node in "abc"
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
    assert isinstance(decision, m.Decision)
    assert not decision.commit
    assert (decision.cause, decision.culprit) == ("b voted no: not a number", "b")
    # "c" was not known to be inside the step
    assert bench.all_told(*"abc") == {
        "a": [m.Decision, m.Propose],
        "b": [m.Decision, m.Propose],
        "c": [m.Aborted, m.Propose],
    }
    assert not any(isinstance(record, Committed) for record in bench.records)


@pytest.mark.parametrize(
    ("votes", "culprit", "words"),
    [
        ("xxy", "c", "in the minority: c (a, b have 78; c have 79)"),
        ("yxx", "a", "in the minority: a"),
        ("xyxzx", "", "in the minority: b, d"),
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
    decision = next(message for message in bench.inbox["a"] if isinstance(message, m.Decision))
    assert not decision.commit
    assert decision.culprit == culprit
    assert decision.kind == "corrupted"
    assert words in decision.cause
    assert bench.core.history.committed_step == 0


GROUP_VOTES: list[tuple[list[dict[int, bytes]], str, str]] = [
    ([{5: b"x"}, {5: b"x"}, {9: b"y"}, {}], "commit", ""),
    ([{5: b"x", 9: b"z"}, {5: b"x"}, {9: b"z"}, {}], "commit", ""),
    ([{5: b"x"}, {5: b"y"}, {5: b"x"}, {}], "b", "in the minority: b (a, c have 78; b have 79)"),
    ([{}, {5: b"x"}, {}, {5: b"y"}], "", "no side is larger: b have 78; d have 79"),
    ([{5: b"x", 9: b"x"}, {5: b"x", 9: b"y"}, {5: b"x", 9: b"x"}, {5: b"x"}], "b", "in the minority: b"),
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
    decision = next(message for message in bench.inbox["a"] if isinstance(message, m.Decision))
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
    decision = next(message for message in bench.inbox["a"] if isinstance(message, m.Decision))
    assert "digests of step 1 differ" in decision.cause


@pytest.mark.parametrize("message", [m.Begin(view_id=1, step=3), m.Vote(view_id=1, step=3, ok=True)])
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
    assert "a voted twice" in bench.notes(a.StepAborted)[0].event.cause


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
    assert bench.core.state is State.INSTALLED
    bench.advance(1)
    assert "no vote on step 1 within 300 s from b" in bench.notes(a.StepAborted)[0].event.cause
    assert bench.proposed().nodes == ("a", "c")


def test_stragglers_stay_when_the_others_could_not_go_on_without_them() -> None:
    bench = Bench(3, vote_timeout_ns=1 * SECOND)
    bench.installed(*"abc")
    bench.vote("a")
    bench.advance(1 * SECOND)
    assert bench.notes(a.StepAborted)[0].event.lost == ("b", "c")
    assert bench.proposed().nodes == ("a", "b", "c")


def test_a_deadline_for_votes_ends_with_its_step() -> None:
    bench = Bench(2, vote_timeout_ns=1 * SECOND)
    bench.installed(*"ab")
    bench.commit(*"ab")
    assert bench.core.next_timer() is None


# Losses and reports


def test_a_loss_inside_a_step_aborts_it_and_the_others_go_on_at_once() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin("a", "c")
    bench.vote("c")
    bench.lose("c")
    decision = bench.inbox["a"][0]
    assert decision == m.Decision(
        view_id=1, step=1, commit=False, cause="c was lost: silence", lost=("c",), culprit="c"
    )
    assert bench.all_told("a", "b") == {"a": [m.Decision, m.Propose], "b": [m.Aborted, m.Propose]}
    view = bench.confirm()
    assert (view.view_id, view.nodes) == (2, ("a", "b"))


def test_a_minority_holds_and_tells_whom_it_waits_for() -> None:
    bench = Bench(5)
    bench.installed(*"abcde")
    for node in "cde":
        bench.inbox.clear()
        bench.lose(node)
    assert bench.told("a", m.Hold).cause == "no quorum: 2 of the last view's 5 nodes are here; without c, d, e"
    assert bench.core.state is State.FORMING
    bench.advance(3600 * SECOND)
    assert bench.core.view is None


def test_a_quorum_shrinks_only_with_views_that_were_installed() -> None:
    bench = Bench(5)
    bench.installed(*"abcde")
    bench.lose("e")
    bench.confirm()
    bench.lose("d")
    bench.confirm()
    assert bench.core.view is not None
    assert bench.core.view.nodes == ("a", "b", "c")
    bench.lose("c")
    bench.lose("b")  # before {a, b} was installed: "a" is one of three
    assert bench.core.state is State.FORMING


@pytest.mark.parametrize("kind", ["failed", "mismatch", "corrupted"])
def test_a_failed_collective_ends_the_view_for_all_and_says_what_kind_of_failure_it_was(kind: Any) -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin("a")
    bench.say("b", m.Report(view_id=1, reason="all_reduce#3", culprit="a", kind=kind))
    decision = bench.inbox["a"][0]
    assert isinstance(decision, m.Decision)
    assert (decision.cause, decision.culprit, decision.kind) == ("b: all_reduce#3", "a", kind)
    assert bench.proposed().nodes == ("a", "b")


def test_reports_about_one_loss_are_heard_before_the_judgement() -> None:
    """With the first report alone "d" would go, which everybody else can reach."""
    bench = Bench(4, gather_ns=500 * MS)
    bench.installed(*"abcd")
    bench.say("b", m.Report(view_id=1, lost=(("d", "silence"),)))
    assert bench.core.state is State.FORMING
    bench.advance(100 * MS)
    bench.say("a", m.Report(view_id=1, lost=(("b", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("b", "silence"),)))
    bench.advance(399 * MS)
    assert bench.core.state is State.FORMING
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


def told_end(bench: Bench, node: str) -> list[m.Decision | m.Aborted]:
    return [message for message in bench.inbox.get(node, []) if isinstance(message, m.Decision | m.Aborted)]


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
    assert [type(end) for end in ends] == [m.Decision, m.Decision, m.Aborted]  # "c" was not known to be inside
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
    assert bench.core.state is State.INSTALLED
    bench.begin("b")
    bench.vote("b", "a")
    decision = bench.told("a", m.Decision)
    assert decision.commit
    assert decision.next_view is not None
    assert decision.next_view.nodes == ("a", "b", "c")
    assert decision.next_view.committed_step == 1
    assert bench.told("c", m.Propose).view == decision.next_view
    assert bench.told("b", m.Decision) == decision
    bench.confirm()
    assert bench.core.history.view == decision.next_view


def test_a_newcomer_waits_for_quiet_because_begins_may_be_on_their_way() -> None:
    bench = Bench(2, quiet_ns=250 * MS)
    bench.installed(*"ab")
    bench.join("c")
    bench.advance(249 * MS)
    assert bench.core.state is State.INSTALLED
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


def test_nodes_beyond_the_largest_world_stand_by_and_take_a_place_that_is_free() -> None:
    bench = Bench(2, max_world_size=2, quiet_ns=0)
    bench.installed("b", "c")
    bench.join("a")  # sorts first, but does not push a member out
    bench.advance(10 * SECOND)
    bench.commit("b", "c")
    assert bench.core.state is State.INSTALLED
    bench.lose("c")
    assert "no quorum" in bench.told("b", m.Hold).cause  # one of two; a spare has no say in it
    bench.join("c", incarnation=2)
    assert bench.proposed().nodes == ("b", "c")


def test_a_spare_replaces_a_lost_member() -> None:
    bench = Bench(3, max_world_size=3)
    bench.installed(*"abc")
    bench.join("d")
    bench.lose("b")
    assert bench.proposed().nodes == ("a", "c", "d")


def test_a_view_is_never_below_the_least_world_size() -> None:
    bench = Bench(3, min_world_size=3)
    bench.installed(*"abc")
    bench.inbox.clear()
    bench.lose("c")
    assert bench.told("a", m.Hold).cause == "2 nodes are here, a view needs 3"


def test_who_leaves_inside_a_step_goes_with_its_decision() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin(*"abc")
    bench.say("b", m.Leave(reason="done"))
    bench.vote(*"abc")
    assert bench.core.history.committed_step == 1
    assert bench.told("a", m.Decision).next_view == bench.proposed()
    assert bench.proposed().nodes == ("a", "c")
    decision = bench.inbox["b"][0]
    assert isinstance(decision, m.Decision)
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
    assert isinstance(decision, m.Decision)
    assert not decision.commit
    assert decision.cause == "b left: done"


def test_who_left_does_not_count_for_the_quorum_and_a_restart_remembers_it() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    bench.lose("d")  # lost, so it counts: three of four
    bench.say("c", m.Leave())
    bench.say("b", m.Leave())
    assert "no quorum: 1 of the last view's 2 nodes" in bench.told("a", m.Hold).cause
    again = Bench(4, records=bench.records, settle_ns=0)
    again.join("a")
    assert "without d" in again.told("a", m.Welcome).waiting_for
    again.join("d")
    assert again.proposed().nodes == ("a", "d")


def test_a_leaver_that_is_lost_before_the_boundary_has_left_all_the_same() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin(*"ab")
    bench.say("b", m.Leave())
    bench.lose("b")
    assert Left("b") in bench.records
    assert bench.proposed().nodes == ("a",)


def test_after_all_have_left_a_full_set_of_nodes_is_needed_again() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.say("a", m.Leave())
    bench.say("b", m.Leave())
    bench.join("c")
    assert bench.told("c", m.Welcome).waiting_for == "1 of 2 nodes are here: c"
    bench.join("d")
    assert bench.proposed().nodes == ("c", "d")


# Incarnations


def test_a_member_that_started_anew_ends_its_view_and_is_in_the_next() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin(*"ab")
    bench.vote("a")
    bench.join("b", incarnation=5)
    assert isinstance(bench.inbox["a"][0], m.Decision)
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


def test_an_older_incarnation_is_refused_and_the_newer_one_not_disturbed() -> None:
    bench = Bench(2)
    bench.installed(*"ab", incarnation=5)
    bench.core.receive("b", m.Join(incarnation=4), now_ns=0, incarnation=4)
    bench.drain()
    assert [action for action in bench.carried_out if isinstance(action, a.Drop)] == [
        a.Drop("b", 4, "incarnation 5 of b has replaced 4")
    ]
    assert bench.core.state is State.INSTALLED


def test_a_restarted_coordinator_refuses_incarnations_older_than_the_last_view() -> None:
    bench = Bench(2)
    bench.installed(*"ab", incarnation=5)
    again = Bench(2, records=bench.records)
    again.join("a", incarnation=4)
    assert "has replaced 4" in again.told("a", m.Refuse).reason


def test_what_an_old_link_says_or_how_it_ends_does_not_concern_the_new_one() -> None:
    bench = Bench(2)
    bench.installed(*"ab", incarnation=5)
    bench.core.receive("b", m.Report(view_id=1), now_ns=0, incarnation=4)
    bench.core.member_lost("b", "silence", now_ns=0, incarnation=4)
    bench.core.member_lost("x", "silence", now_ns=0)
    bench.drain()
    assert bench.core.state is State.INSTALLED


# Rules that a member breaks


def test_who_speaks_before_it_has_joined_is_dropped() -> None:
    bench = Bench(2)
    bench.say("x", m.Confirm(view_id=1))
    assert bench.carried_out[-1] == a.Drop("x", 0, "Confirm before Join")
    bench.say("x", m.Leave())
    assert len([action for action in bench.carried_out if isinstance(action, a.Drop)]) == 1


@pytest.mark.parametrize("message", [m.Vote(view_id=9, step=1, ok=True), m.Confirm(view_id=9), m.Report(view_id=9)])
def test_who_speaks_of_a_view_that_does_not_exist_is_put_out(message: m.MemberMessage) -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.say("c", message)
    assert bench.told("c", m.Refuse).reason == "c spoke of view 9, of which it cannot be a member"
    assert bench.proposed().nodes == ("a", "b")


@pytest.mark.parametrize(
    "message", [m.Vote(view_id=1, step=1, ok=True), m.Report(view_id=1), m.Begin(view_id=1, step=1)]
)
def test_who_is_not_a_member_has_no_say_in_the_view(message: m.MemberMessage) -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.join("c")
    bench.say("c", message)
    assert bench.told("c", m.Refuse)
    assert bench.core.state is State.INSTALLED
    bench.commit(*"ab")
    assert bench.core.history.committed_step == 1


# The journal


def test_a_doubt_is_answered_from_the_journal() -> None:
    """REQUIREMENTS S9: after a vote only the coordinator knows; it answers even after it was killed and restarted."""
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.vote("a")
    again = Bench(2, records=bench.records)
    again.join("a", committed_step=0, doubt=(1, 1))
    welcome = again.told("a", m.Welcome)
    assert welcome.doubt_committed is True
    assert welcome.committed_step == 1
    again.join("b", committed_step=1, doubt=(1, 2))
    welcomes = [message for message in again.inbox["b"] if isinstance(message, m.Welcome)]
    assert welcomes[0].doubt_committed is False
    assert [member.committed_step for member in again.proposed().members] == [1, 1]


def test_a_doubt_about_the_view_at_work_is_settled_by_ending_it() -> None:
    """Else "not committed" could become wrong when the last vote comes."""
    bench = Bench(2)
    bench.installed(*"ab")
    bench.vote("b")
    bench.join("b", doubt=(1, 1))
    assert next(m_ for m_ in bench.inbox["b"] if isinstance(m_, m.Welcome)).doubt_committed is False
    bench.say("a", m.Vote(view_id=1, step=1, ok=True, digest=b"d"))
    assert bench.core.history.committed_step == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"committed_step": 2}, "holds step 2, the journal ends at 1"),
        ({"doubt": (5, 2)}, "in doubt of step 2 in view 5, of which the journal knows nothing"),
    ],
)
def test_a_node_that_knows_more_than_the_journal_is_refused(fields: dict[str, Any], words: str) -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.join("c", **fields)
    assert words in bench.told("c", m.Refuse).reason


def test_a_restarted_coordinator_goes_on_with_larger_views_and_the_next_step() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.say("a", m.Report(view_id=1, reason="again"))  # view 2 is proposed, and never installed
    again = Bench(2, records=bench.records)
    again.join(*"ab")
    view = again.confirm()
    assert (view.view_id, view.committed_step, view.committed_view, view.seed) == (3, 1, 1, 7)
    again.commit(*"ab")
    assert again.core.history.commits == ((1, 1, 1), (3, 2, 2))


def test_after_a_restart_missing_nodes_get_a_grace_but_not_for_ever() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    again = Bench(3, records=bench.records, settle_ns=5 * SECOND)
    again.join("a", "b")
    assert again.told("a", m.Hold).cause == "there is a quorum; c of the last view may still come"
    again.advance(5 * SECOND - 1)
    assert not again.notes(a.ViewProposed)
    again.advance(1)
    assert again.proposed().nodes == ("a", "b")


def test_the_grace_ends_when_all_are_back() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    again = Bench(3, records=bench.records)
    again.join("a", "b", "c")
    assert again.proposed().nodes == ("a", "b", "c")


def test_the_grace_begins_anew_when_the_quorum_was_lost_meanwhile() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    again = Bench(3, records=bench.records, settle_ns=5 * SECOND)
    again.join("a", "b")
    again.advance(4 * SECOND)
    again.lose("b")
    again.advance(60 * SECOND)
    again.join("b", incarnation=2)
    again.advance(4 * SECOND)
    assert not again.notes(a.ViewProposed)
    again.advance(1 * SECOND)
    assert again.proposed().nodes == ("a", "b")


def test_the_seed_is_the_jobs_for_ever() -> None:
    """REQUIREMENTS S3."""
    bench = Bench(1, seed=11)
    assert bench.records == [Seeded(11)]
    again = Bench(1, records=bench.records, seed=None)
    again.join("a")
    assert again.told("a", m.Propose).view.seed == 11
    with pytest.raises(LocalError, match="seed 12 is asked for, but the journal was begun with 11"):
        Bench(1, records=bench.records, seed=12)
    with pytest.raises(LocalError, match="a new journal needs a seed"):
        Bench(1, seed=None)


@pytest.mark.parametrize(
    "records",
    [
        [Seeded(1), Seeded(1)],
        [Proposed(1), Proposed(1)],
        [Left("a")],
        [Committed(1, 1, b"")],
    ],
)
def test_a_history_that_contradicts_itself_is_refused(records: list[Record]) -> None:
    with pytest.raises(LocalError):
        History.of(records)


def test_a_history_refuses_commits_out_of_turn_and_views_that_skip_them() -> None:
    bench = Bench(1)
    view = bench.installed("a")
    history = bench.core.history
    with pytest.raises(LocalError, match="step 2 is committed after step 0"):
        history.apply(Committed(2, 1, b""))
    with pytest.raises(LocalError, match="which is not installed"):
        history.apply(Committed(1, 2, b""))
    with pytest.raises(LocalError, match="installed twice"):
        history.apply(InstalledView(view))
    with pytest.raises(LocalError, match="the last one proposed is 1"):
        history.apply(InstalledView(View(view_id=4, members=view.members, seed=7, committed_step=0, committed_view=0)))
    after = history.apply(Committed(1, 1, b"x")).apply(Proposed(2))
    assert (after.committed(1, 1), after.committed(1, 2), after.committed(2, 1)) == (True, False, False)
    assert after.committed_digest == b"x"
    with pytest.raises(LocalError, match="goes on from step 0, not 1"):
        after.apply(InstalledView(View(view_id=2, members=view.members, seed=7, committed_step=0, committed_view=0)))


def test_tier_metadata_is_the_same_in_every_view() -> None:
    """REQUIREMENTS S4."""
    bench = Bench(1, tiers={"cold": "disk"})
    bench.join("a")
    assert bench.proposed().tiers == {"cold": "disk"}


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


def a_majority_that_has_started_anew(*, committed: bool = True) -> Bench:
    """Of a, b and c, which held step 1, c is cut off, and a and b are new processes."""
    bench = Bench(3)
    bench.installed("a", "b", "c")
    if committed:
        bench.commit("a", "b", "c")
    for node in ("c", "a", "b"):
        bench.lose(node)
    bench.inbox.clear()
    bench.join("a", "b", incarnation=2)
    bench.advance(60_000_000_000)
    return bench


def test_a_quorum_without_the_state_waits_for_the_node_that_may_hold_it() -> None:
    bench = a_majority_that_has_started_anew()
    assert bench.core.view is None
    assert "nobody here holds step 1; c may" in bench.notes(a.Held)[-1].event.cause
    bench.join("c", committed_step=1)  # it was alive all the time
    view = bench.confirm()
    assert view.nodes == ("a", "b", "c")
    assert [member.committed_step for member in view.members] == [0, 0, 1]


def test_a_quorum_without_the_state_goes_on_when_no_node_is_left_that_could_hold_it() -> None:
    bench = a_majority_that_has_started_anew()
    bench.join("c", incarnation=2)  # it has started anew as well
    assert bench.confirm().nodes == ("a", "b", "c")


def test_a_quorum_waits_for_nobody_while_there_is_no_state() -> None:
    bench = a_majority_that_has_started_anew(committed=False)
    assert bench.confirm().nodes == ("a", "b")


def test_a_member_that_begins_a_step_holds_the_one_before() -> None:
    """It was given the state by another one; when that one is lost, nobody is waited for."""
    bench = Bench(3)
    bench.installed("a", "b", "c")
    bench.commit("a", "b", "c")
    bench.lose("a")
    bench.join("a", incarnation=2)
    bench.advance(60_000_000_000)
    bench.confirm()
    bench.begin("a", "b", "c")
    for node in ("b", "c"):
        bench.lose(node)
    bench.inbox.clear()
    bench.join("b", incarnation=2)
    bench.advance(60_000_000_000)
    assert bench.confirm().nodes == ("a", "b")


def test_a_node_that_is_leaving_is_not_waited_for() -> None:
    bench = Bench(3)
    bench.installed("a", "b", "c")
    bench.commit("a", "b", "c")
    bench.say("c", m.Leave(reason="done"))
    bench.advance(60_000_000_000)
    bench.confirm()
    for node in ("a", "b"):
        bench.lose(node)
    bench.inbox.clear()
    bench.join("a", "b", incarnation=2)
    bench.advance(60_000_000_000)
    assert bench.confirm().nodes == ("a", "b")
