"""Settings that coordinator and members share: they agree, or are refused with both values named."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_bench import Bench

from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as c
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.member import actions as a
from quicoll.membership.member.core import MemberCore
from quicoll.membership.member.states import MemberState

SECOND = 1_000_000_000


def drained(core: MemberCore) -> list[a.MemberAction]:
    found = []
    while (action := core.next_action()) is not None:
        found.append(action)
    return found


def joining(**fields: Any) -> MemberCore:
    core = MemberCore("a", 1, **fields)
    core.connected(now_ns=0)
    assert [type(action) for action in drained(core)] == [a.TellCoordinator]
    return core


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"lost_after_ns": 2 * SECOND},
        {"lost_after_ns": 2 * SECOND, "adopts": True},
    ],
)
def test_a_node_that_says_the_same_or_nothing_is_welcome(said: dict[str, Any]) -> None:
    bench = Bench(1, lost_after_ns=2 * SECOND)
    bench.join("a", **said)
    assert bench.all_told("a") == {"a": [m.Welcome, m.Propose]}


def test_a_node_that_insists_on_another_value_is_refused_and_hears_both() -> None:
    bench = Bench(1, lost_after_ns=SECOND)
    bench.join("a", lost_after_ns=10 * SECOND)
    assert bench.told("a", m.RefuseJoin).reason == (
        "the coordinator's lost_after is 1 s, this node's 10 s; set both alike, or leave the node's out"
    )
    bench.join("a", lost_after_ns=SECOND + 1)  # a difference that six digits do not show
    assert "is 1 s, this node's 1.000000001 s" in bench.told("a", m.RefuseJoin).reason


def test_a_node_that_adopts_is_told_the_value_and_is_no_candidate_until_it_has_it() -> None:
    bench = Bench(1, lost_after_ns=10 * SECOND)
    bench.join("a", lost_after_ns=2 * SECOND, adopts=True)
    assert bench.told("a", m.Adopt).lost_after_ns == 10 * SECOND
    joined = [each for each in bench.carried_out if isinstance(each, c.Note) and isinstance(each.event, c.NodeJoined)]
    assert joined == []
    bench.lose("a")  # its link with the old setting
    bench.join("a", lost_after_ns=10 * SECOND, adopts=True)
    assert bench.all_told("a") == {"a": [m.Welcome, m.Propose]}


def test_a_coordinator_without_the_setting_lets_each_node_have_its_own() -> None:
    bench = Bench(2)
    bench.join("a", lost_after_ns=SECOND)
    bench.join("b", lost_after_ns=2 * SECOND, adopts=True)
    assert bench.all_told("a", "b") == {"a": [m.Welcome, m.Propose], "b": [m.Welcome, m.Propose]}


def test_a_member_that_adopts_says_so_to_its_shell_and_joins_again_with_the_value_and_its_deadlines() -> None:
    core = joining(lost_after_ns=2 * SECOND, adopts=True)
    core.receive(m.Adopt(lost_after_ns=10 * SECOND), now_ns=0)
    assert drained(core) == [a.AdoptLostAfter(10 * SECOND)]
    assert (core.state, core.next_timer()) == (MemberState.DETACHED, None)
    core.connected(now_ns=SECOND)
    (told,) = drained(core)
    assert isinstance(told, a.TellCoordinator)
    assert told.message == m.Join(incarnation=1, lost_after_ns=10 * SECOND, adopts=True)
    assert core.next_timer() == SECOND + Deadlines.of(10.0).answer_ns


@pytest.mark.parametrize("fields", [{"lost_after_ns": 2 * SECOND}, {"lost_after_ns": 10 * SECOND, "adopts": True}])
def test_a_coordinator_that_has_a_member_adopt_what_it_did_not_offer_breaks_the_protocol(
    fields: dict[str, Any],
) -> None:
    core = joining(**fields)
    core.receive(m.Adopt(lost_after_ns=10 * SECOND), now_ns=0)
    (refused,) = drained(core)
    assert isinstance(refused, a.Refused)
    assert "broke the protocol: a setting that was not asked for: lost_after 10 s" in refused.reason


def test_nothing_is_adopted_once_the_member_is_in() -> None:
    core = joining(lost_after_ns=2 * SECOND, adopts=True)
    core.receive(m.Welcome(seed=7, committed_step=0, waiting_for="1 of 2"), now_ns=0)
    drained(core)
    core.receive(m.Adopt(lost_after_ns=10 * SECOND), now_ns=0)
    assert [type(action) for action in drained(core)] == [a.Refused]


def test_a_member_that_leaves_before_it_has_joined_does_not_come_back_to_adopt() -> None:
    core = joining(lost_after_ns=2 * SECOND, adopts=True)
    core.leave(now_ns=0)
    core.receive(m.Adopt(lost_after_ns=10 * SECOND), now_ns=0)
    assert core.state is MemberState.LEFT


def test_a_silence_of_nothing_is_no_setting() -> None:
    with pytest.raises(LocalError, match="lost_after_ns has to be above 0"):
        CoordinatorConfig(world_size=1, lost_after_ns=0)


@pytest.mark.parametrize("said", [{}, {"seed": 7}])
def test_a_node_that_asks_for_the_jobs_seed_or_none_is_welcome_and_gets_it(said: dict[str, Any]) -> None:
    bench = Bench(1, seed=7)
    bench.join("a", **said)
    assert bench.told("a", m.Propose).view.seed == 7


@pytest.mark.parametrize("said", [6, 0])
def test_a_node_that_asks_for_another_seed_is_refused_and_hears_both(said: int) -> None:
    bench = Bench(1, seed=7)
    bench.join("a", seed=said)
    assert bench.told("a", m.RefuseJoin).reason == (
        f"the job's seed is 7, this node's {said}; set both alike, or leave the node's out"
    )


def test_the_journals_seed_is_the_jobs_whoever_asks() -> None:
    bench = Bench(1, records=Bench(1, seed=7).records, seed=None)
    bench.join("a", seed=8)
    assert "the job's seed is 7, this node's 8" in bench.told("a", m.RefuseJoin).reason
    with pytest.raises(LocalError, match="seed 8 is asked for, but the journal was begun with 7"):
        Bench(1, records=bench.records, seed=8)


def test_a_member_asks_for_its_seed_at_every_join() -> None:
    core = MemberCore("a", 1, seed=7)
    for _ in range(2):
        core.connected(now_ns=0)
        (told,) = drained(core)
        assert isinstance(told, a.TellCoordinator)
        assert told.message == m.Join(incarnation=1, seed=7)
        core.disconnected("silence", now_ns=0)
        drained(core)


def test_a_member_takes_no_other_seed_than_the_one_that_it_asked_for() -> None:
    core = joining(seed=7)
    core.receive(m.Welcome(seed=8, committed_step=0), now_ns=0)
    (refused,) = drained(core)
    assert isinstance(refused, a.Refused)
    assert "the seed was 7 and is 8" in refused.reason


@pytest.mark.parametrize(
    ("node", "nodes", "may"),
    [
        ("gpu-7", (), True),
        ("gpu-7", ("gpu-*",), True),
        ("gpu-7", ("cpu-0", "gpu-7"), True),
        ("gpu-77", ("gpu-?",), False),
        ("GPU-7", ("gpu-7",), False),
    ],
)
def test_who_may_join_is_a_list_of_names_and_patterns(node: str, nodes: tuple[str, ...], may: bool) -> None:
    bench = Bench(1, nodes=nodes)
    bench.join(node)
    if may:
        assert bench.all_told(node) == {node: [m.Welcome, m.Propose]}
    else:
        reason = f"{node} is none of the nodes that may join: {', '.join(nodes)}"
        assert bench.told(node, m.RefuseJoin).reason == reason


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            {"timeout_ns": 61 * SECOND},
            "waits 60 s for votes (--vote-timeout), this node's timeout is 61 s: it has to be no",
        ),
        ({"hold_timeout_ns": 60 * SECOND}, "(--vote-timeout), this node's hold_timeout is 60 s: it has to be longer"),
    ],
)
def test_a_deadline_for_votes_and_a_rank_that_contradicts_it_do_not_meet(said: dict[str, int], reason: str) -> None:
    bench = Bench(1, vote_timeout_ns=60 * SECOND, insists_on_vote_timeout=True)
    bench.join("a", **said)
    assert reason in bench.told("a", m.RefuseJoin).reason
    bench.join("a", timeout_ns=60 * SECOND, hold_timeout_ns=61 * SECOND)
    assert bench.told("a", m.Propose).view.nodes == ("a",)
    lenient = Bench(1, vote_timeout_ns=60 * SECOND)
    lenient.join("a", **said)
    assert lenient.told("a", m.Propose).view.nodes == ("a",)


def test_a_member_waits_longer_for_the_decision_than_the_coordinator_for_votes() -> None:
    bench = Bench(1, vote_timeout_ns=1000 * SECOND)
    core = joining(decision_margin_ns=30 * SECOND)
    bench.join("a")
    for message in bench.inbox.pop("a"):
        core.receive(message, now_ns=0)
    core.links_ready(1, now_ns=0)
    core.receive(m.Install(view_id=1), now_ns=0)
    core.begin(1, now_ns=0)
    core.vote(1, ok=True, now_ns=5 * SECOND)
    assert core.next_timer() == 1035 * SECOND
