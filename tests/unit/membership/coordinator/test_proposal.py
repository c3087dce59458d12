"""A proposed view and the answers to it."""

from __future__ import annotations

from typing import Any

import pytest
from coordinator_bench import MS, SECOND, Bench, declined

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.history import InstalledView, Proposed
from quicoll.membership.coordinator.probes import AGAIN_NS, MOVES_NS
from quicoll.membership.coordinator.stage import CoordinatorState


def test_a_view_is_installed_when_all_have_confirmed_and_is_written_first() -> None:
    bench = Bench(2)
    bench.join("a", "b")
    bench.confirm("a")
    assert bench.core.state is CoordinatorState.PROPOSED
    view = bench.proposed()
    bench.carried_out.clear()
    bench.say("b", m.Confirm(view_id=1))
    assert bench.core.state is CoordinatorState.INSTALLED
    assert bench.carried_out[:3] == [
        a.Persist(InstalledView(view)),
        a.TellMember("a", 1, m.Install(view_id=1)),
        a.TellMember("b", 1, m.Install(view_id=1)),
    ]


def test_a_view_id_is_used_up_before_anyone_hears_of_it() -> None:
    bench = Bench(1)
    bench.join("a")
    told = next(
        index
        for index, act in enumerate(bench.carried_out)
        if act == a.TellMember("a", 1, m.Propose(view=bench.proposed()))
    )
    assert bench.carried_out.index(a.Persist(Proposed(1))) < told


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
    bench.differ()
    declined(bench, edges)
    assert "".join(bench.proposed().nodes) == left


def test_one_complaint_waits_for_the_others_before_anyone_is_judged() -> None:
    """With the first complaint alone "d" would go, because it has the higher rank of the broken pair."""
    bench = Bench(4, gather_ns=500 * MS)
    bench.installed(*"abcd")
    bench.differ()
    bench.say("a", m.Decline(view_id=2, unreachable=("d",)))
    assert bench.core.state is CoordinatorState.PROPOSED
    bench.say("a", m.Decline(view_id=2, unreachable=("c",)))
    bench.say("b", m.Decline(view_id=2, unreachable=("a",)))
    bench.advance(499 * MS)
    assert bench.core.state is CoordinatorState.PROPOSED
    bench.advance(1 * MS)
    assert bench.proposed().nodes == ("b", "c", "d")


def test_a_silent_member_is_left_out_when_the_time_is_up() -> None:
    bench = Bench(3, propose_timeout_ns=20 * SECOND)
    bench.installed(*"abc")
    bench.differ()
    bench.confirm("a", "c")
    bench.advance(20 * SECOND - 1)
    assert bench.proposed().view_id == 2
    bench.inbox.clear()
    bench.advance(1)
    assert bench.proposed().nodes == ("a", "c")
    assert any(isinstance(one, m.Withhold) and "did not answer within 20 s" in one.cause for one in bench.inbox["b"])


def test_a_member_that_is_lost_while_a_view_is_formed_is_not_waited_for() -> None:
    bench = Bench(3)
    bench.join(*"abc")
    bench.inbox.clear()
    bench.lose("b")
    assert bench.all_told("a", "c") == {"a": [m.Aborted, m.Withhold], "c": [m.Aborted, m.Withhold]}
    bench.join("b", incarnation=2)
    assert bench.confirm().view_id == 2
    assert bench.core.state is CoordinatorState.INSTALLED


def test_what_was_said_before_a_loss_still_counts() -> None:
    bench = Bench(5)
    bench.installed(*"abcde")
    bench.differ()
    bench.say("a", m.Decline(view_id=2, unreachable=("c",)))
    bench.lose("e")
    assert bench.proposed().nodes == ("a", "b", "d")


def test_a_confirmation_can_be_taken_back_until_the_view_is_installed() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.differ()
    bench.confirm("a", "b")
    bench.say("b", m.Report(view_id=2, lost=(("a", "silence"),)))
    bench.confirm("c")
    assert bench.core.view is None
    assert bench.proposed().nodes == ("a", "c")


def left_out(*, retry_max_ns: int = 8 * SECOND, **config: int) -> Bench:
    """c is left out, since a and c have lost each other; a and b are at work."""
    bench = Bench(3, quiet_ns=0, retry_min_ns=1 * SECOND, retry_max_ns=retry_max_ns, **config)
    bench.installed(*"abc")
    bench.say("a", m.Report(view_id=1, lost=(("c", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.say("b", m.Report(view_id=1, reason="me too"))
    assert bench.confirm().nodes == ("a", "b")
    return bench


def test_a_node_that_is_left_out_comes_back_when_it_reaches_the_others() -> None:
    bench = left_out()
    probe = bench.told("c", m.Probe)
    assert [member.node for member in probe.members] == ["a", "b"]
    bench.advance(5 * SECOND)
    assert bench.proposed().nodes == ("a", "b"), "nobody is disturbed while the pair is broken"
    bench.say("c", m.Reached(number=probe.number + 1))
    assert bench.proposed().nodes == ("a", "b"), "an answer to another probe proves nothing"
    bench.say("c", m.Reached(number=probe.number))
    assert bench.proposed().nodes == ("a", "b", "c")


def test_a_pair_that_answers_and_fails_in_use_is_tried_after_waits_that_double_up_to_a_bound() -> None:
    bench = left_out(propose_timeout_ns=1 * SECOND)
    tries: list[int] = []
    for _ in range(6):
        out_at = bench.now
        bench.say("c", m.Reached(number=bench.told("c", m.Probe).number))
        while bench.proposed().nodes == ("a", "b"):
            bench.advance(100 * MS)
        tries.append((bench.now - out_at) // SECOND)
        declined(bench, {"a": "c", "c": "a"})
        assert bench.confirm().nodes == ("a", "b")
        bench.commit("a", "b")
    assert tries == [1, 2, 4, 8, 8, 8]


def test_a_node_that_cannot_show_it_is_tried_seldom_and_comes_back_at_once_when_it_can() -> None:
    bench = left_out()
    for _ in range(5):
        bench.advance(8 * SECOND - 1)
        assert bench.proposed().nodes == ("a", "b")
        bench.advance(1)
        assert bench.proposed().nodes == ("a", "b", "c")
        declined(bench, {"a": "c", "c": "a"})
        assert bench.confirm().nodes == ("a", "b")
        bench.commit("a", "b")
    bench.advance(1 * SECOND)
    bench.say("c", m.Reached(number=bench.told("c", m.Probe).number))
    assert bench.proposed().nodes == ("a", "b", "c"), "trials that nothing spoke for have not made the wait longer"


def test_a_probe_follows_the_members_and_goes_on_where_there_is_no_view() -> None:
    bench = left_out()
    first = bench.told("c", m.Probe)
    bench.join("d")
    assert bench.confirm().nodes == ("a", "b", "d")
    second = bench.told("c", m.Probe)
    assert second.number > first.number
    assert [member.node for member in second.members] == ["a", "b", "d"]
    bench.lose("b")
    bench.lose("d")
    assert bench.core.view is None
    assert [member.node for member in bench.told("c", m.Probe).members] == ["a"]


def test_a_view_says_where_a_node_is_seen_if_that_is_not_what_it_announces() -> None:
    bench = Bench(3)
    bench.saw("a", ("203.0.113.1", 1))
    bench.saw("b", ("10.0.0.2", 5))
    bench.join("a", addresses=(("10.0.0.1", 5),))
    bench.join("b", addresses=(("10.0.0.2", 5),))
    bench.join("c", addresses=(("10.0.0.3", 5),))
    assert [member.seen_at for member in bench.proposed().members] == [("203.0.113.1", 1), None, None]


def test_a_node_that_is_seen_elsewhere_by_and_by_is_in_the_next_view_so() -> None:
    bench = Bench(2, quiet_ns=0)
    for node, host in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
        bench.saw(node, ("203.0.113.1", ord(node)))
        bench.join(node, addresses=((host, 5),))
    bench.confirm()
    bench.saw("b", ("203.0.113.1", 9))
    assert bench.core.view == bench.proposed(), "an address is no reason for another view"
    bench.say("a", m.Report(view_id=1, reason="silence"))
    assert [member.seen_at for member in bench.proposed().members] == [("203.0.113.1", 97), ("203.0.113.1", 9)]


def left_out_behind_nat() -> Bench:
    """c is left out, a is behind NAT, a and b are at work; nothing that they were told was read."""
    bench = Bench(3, quiet_ns=0, retry_min_ns=1 * SECOND, retry_max_ns=60 * SECOND)
    bench.saw("a", ("203.0.113.1", 1))
    for node in "abc":
        bench.join(node, addresses=((f"10.0.0.{ord(node)}", 5),))
    bench.confirm()
    bench.say("a", m.Report(view_id=1, lost=(("c", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.say("b", m.Report(view_id=1, reason="me too"))
    assert bench.proposed().nodes == ("a", "b")
    return bench


def expected(bench: Bench, node: str) -> list[tuple[str, Any, Any]]:
    """Whom a node was told to expect since this was asked last, and where that one and itself are seen."""
    told = [message for message in bench.inbox.pop(node, []) if isinstance(message, m.Expect)]
    return [(one.member.node, one.member.seen_at, one.own.seen_at) for one in told]


def test_the_others_hear_of_a_probe_where_one_of_the_two_is_behind_nat() -> None:
    bench = left_out_behind_nat()
    probe = bench.told("c", m.Probe)
    assert probe.own is not None
    assert (probe.own.node, probe.own.seen_at) == ("c", None)
    assert [member.seen_at for member in probe.members] == [("203.0.113.1", 1), None]
    assert expected(bench, "a") == [("c", None, ("203.0.113.1", 1))]
    assert expected(bench, "b") == []


@pytest.mark.parametrize("step_is_open", [False, True])
def test_they_hear_of_it_again_and_again_until_the_probe_is_answered(step_is_open: bool) -> None:
    bench = left_out_behind_nat()
    bench.confirm()
    probe = bench.told("c", m.Probe)
    expected(bench, "a")
    if step_is_open:
        bench.begin("a", "b")
    bench.advance(AGAIN_NS - 1)
    assert expected(bench, "a") == []
    for _ in range(3):
        bench.advance(AGAIN_NS)
        assert expected(bench, "a") == [("c", None, ("203.0.113.1", 1))]
        assert expected(bench, "b") == []
    assert "c" not in bench.inbox, "its probe goes on"
    bench.say("c", m.Reached(number=probe.number))
    bench.inbox.clear()
    bench.advance(3 * AGAIN_NS)
    assert expected(bench, "a") == []


def test_where_nobody_is_behind_nat_nothing_of_a_probe_is_repeated() -> None:
    bench = left_out(retry_max_ns=60 * SECOND)
    bench.told("c", m.Probe)
    bench.inbox.clear()
    bench.advance(3 * AGAIN_NS)
    assert bench.inbox == {}


@pytest.mark.parametrize("step_is_open", [False, True])
def test_a_probe_begins_anew_when_one_that_it_is_about_is_seen_elsewhere(step_is_open: bool) -> None:
    bench = left_out_behind_nat()
    bench.confirm()
    first = bench.told("c", m.Probe)
    expected(bench, "a")
    if step_is_open:
        bench.begin("a", "b")
    bench.advance(MOVES_NS)
    bench.saw("a", ("203.0.113.1", 2))
    second = bench.told("c", m.Probe)
    assert second.number > first.number
    assert [member.seen_at for member in second.members] == [("203.0.113.1", 2), None]
    assert expected(bench, "a") == [("c", None, ("203.0.113.1", 2))]
    bench.advance(MOVES_NS)
    bench.saw("c", ("203.0.113.3", 1))
    third = bench.told("c", m.Probe)
    assert third.own is not None
    assert third.own.seen_at == ("203.0.113.3", 1)
    assert expected(bench, "a") == [("c", ("203.0.113.3", 1), ("203.0.113.1", 2))]
    assert expected(bench, "b") == [("c", ("203.0.113.3", 1), None)]
    bench.advance(MOVES_NS)
    bench.saw("c", ("203.0.113.3", 1))
    assert bench.inbox == {}, "it is where it was"


def test_a_node_that_moves_all_the_time_costs_the_others_little() -> None:
    bench = left_out_behind_nat()
    bench.confirm()
    bench.advance(MOVES_NS)
    bench.inbox.clear()
    for port in range(1, 100):
        bench.saw("c", ("203.0.113.3", port))
        bench.advance(30 * MS)
    assert len(expected(bench, "b")) == 3
    bench.advance(MOVES_NS)
    assert expected(bench, "b")[-1:] == [("c", ("203.0.113.3", 99), None)], "where it is at last they do hear"

    bench = Bench(2, quiet_ns=0)
    for node in "ab":
        bench.saw(node, ("203.0.113.1", ord(node)))
        bench.join(node, addresses=((f"10.0.0.{ord(node)}", 5),))
    bench.inbox.clear()
    for port in range(1, 100):
        bench.saw("b", ("203.0.113.1", port))
        bench.advance(30 * MS)
    assert len(expected(bench, "a")) == 3


def test_who_forms_links_hears_at_once_that_a_member_is_seen_elsewhere() -> None:
    bench = Bench(3, quiet_ns=0)
    for node in "abc":
        bench.saw(node, ("203.0.113.1", ord(node)))
        bench.join(node, addresses=((f"10.0.0.{ord(node)}", 5),))
    bench.inbox.clear()
    bench.saw("b", ("203.0.113.1", 9))
    assert expected(bench, "a") == [("b", ("203.0.113.1", 9), ("203.0.113.1", 97))]
    assert expected(bench, "c") == [("b", ("203.0.113.1", 9), ("203.0.113.1", 99))]
    assert bench.inbox == {}
    bench.confirm()
    bench.inbox.clear()
    bench.saw("b", ("203.0.113.1", 10))
    assert bench.inbox == {}, "their links are up; where they end the view does, and the next one says it"


def test_a_node_that_starts_anew_is_not_kept_out() -> None:
    bench = Bench(3, quiet_ns=0)
    bench.installed(*"abc")
    bench.differ()
    declined(bench, {"a": "c"})
    bench.confirm("a", "b")
    bench.join("c", incarnation=2)
    assert bench.proposed().nodes == ("a", "b", "c")
