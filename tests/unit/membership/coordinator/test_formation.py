"""Whether there can be a view, of whom, and how long the missing are waited for."""

from __future__ import annotations

import itertools

import pytest
from coordinator_bench import SECOND, Bench, declined

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.stage import CoordinatorState

# The first view


@pytest.mark.parametrize("order", list(itertools.permutations(["n1", "n2", "n10"])))
def test_the_first_view_comes_with_the_last_node_and_ranks_do_not_depend_on_who_was_first(
    order: tuple[str, ...],
) -> None:
    bench = Bench(3)
    bench.join(*order[:2])
    assert bench.core.state is CoordinatorState.FORMING
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


def test_who_waits_is_told_for_what_and_each_reason_once() -> None:
    bench = Bench(3)
    bench.join("a")
    assert bench.told("a", m.Welcome).waiting_for == "1 of 3 nodes are here: a"
    bench.join("b")
    assert bench.told("b", m.Welcome).waiting_for == "2 of 3 nodes are here: a, b"
    assert bench.told("a", m.Withhold).cause == "2 of 3 nodes are here: a, b"
    bench.advance(60 * SECOND)
    assert not bench.inbox


def test_a_new_journal_goes_on_from_the_newest_checkpoint_that_a_node_has_loaded() -> None:
    bench = Bench(2)
    bench.join("a", committed_step=90)
    bench.join("b", committed_step=40)
    view = bench.confirm()
    assert view.committed_step == 90
    assert [member.committed_step for member in view.members] == [90, 40]
    bench.commit("a", "b")
    assert bench.core.history.committed_step == 91


# Quorum and the size of the world


def test_a_minority_holds_and_tells_whom_it_waits_for() -> None:
    bench = Bench(5)
    bench.installed(*"abcde")
    for node in "cde":
        bench.inbox.clear()
        bench.lose(node)
    assert bench.told("a", m.Withhold).cause == "no quorum: 2 of the last view's 5 nodes are here; without c, d, e"
    assert bench.core.state is CoordinatorState.FORMING
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
    assert bench.core.state is CoordinatorState.FORMING


def test_nodes_beyond_the_largest_world_stand_by_and_take_a_place_that_is_free() -> None:
    bench = Bench(2, max_world_size=2, quiet_ns=0)
    bench.installed("b", "c")
    bench.join("a")  # sorts first, but does not push a member out
    bench.advance(10 * SECOND)
    bench.commit("b", "c")
    assert bench.core.state is CoordinatorState.INSTALLED
    bench.lose("c")
    assert "no quorum" in bench.told("b", m.Withhold).cause  # one of two; a spare has no say in it
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
    assert bench.told("a", m.Withhold).cause == "2 nodes are here, a view needs 3"


def test_who_left_does_not_count_for_the_quorum_and_a_restart_remembers_it() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    bench.lose("d")  # lost, so it counts: three of four
    bench.say("c", m.Leave())
    bench.say("b", m.Leave())
    assert "no quorum: 1 of the last view's 2 nodes" in bench.told("a", m.Withhold).cause
    again = Bench(4, records=bench.records, settle_ns=0)
    again.join("a")
    assert "without d" in again.told("a", m.Welcome).waiting_for
    again.join("d")
    assert again.proposed().nodes == ("a", "d")


def test_after_all_have_left_a_full_set_of_nodes_is_needed_again() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.say("a", m.Leave())
    bench.say("b", m.Leave())
    bench.join("c")
    assert bench.told("c", m.Welcome).waiting_for == "1 of 2 nodes are here: c"
    bench.join("d")
    assert bench.proposed().nodes == ("c", "d")


# The grace


def test_after_a_restart_missing_nodes_get_a_grace_but_not_for_ever() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    again = Bench(3, records=bench.records, settle_ns=5 * SECOND)
    again.join("a", "b")
    assert again.told("a", m.Withhold).cause == "there is a quorum; c of the last view may still come"
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


# The state


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
    assert "nobody here holds step 1; c may" in bench.notes(a.ViewWithheld)[-1].event.cause
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


# The newest state that is left


def both_at_work_have_started_anew() -> Bench:
    """Of a, b and c, which held step 1, a and b have gone on to step 2 without c, and are new processes by now."""
    bench = Bench(3, quiet_ns=0, retry_min_ns=1 * SECOND, retry_max_ns=8 * SECOND)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.say("a", m.Report(view_id=1, lost=(("c", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.say("b", m.Report(view_id=1, reason="me too"))
    assert bench.confirm().nodes == ("a", "b")
    bench.commit("a", "b")
    bench.lose("a")
    bench.lose("b")
    bench.inbox.clear()
    bench.join("a", "b", incarnation=2)
    return bench


def test_where_the_last_step_is_lost_a_node_that_is_left_out_and_holds_an_older_one_is_in_at_once() -> None:
    view = both_at_work_have_started_anew().confirm()
    assert view.nodes == ("a", "b", "c")
    assert [member.committed_step for member in view.members] == [0, 0, 1]


def test_a_node_that_failed_again_when_it_was_asked_for_its_state_is_waited_for_no_more() -> None:
    bench = both_at_work_have_started_anew()
    declined(bench, {"a": "c", "b": "c", "c": "ab"})
    bench.advance(1 * SECOND)  # views have failed in a row
    assert bench.confirm().nodes == ("a", "b")
    bench.commit("a", "b")  # of what they have
    assert bench.proposed().nodes == ("a", "b")
    for node in "ab":
        bench.lose(node)
    bench.join("a", "b", incarnation=3)
    assert bench.proposed().nodes == ("a", "b", "c"), "it is asked again when that is lost, too"


def test_a_node_that_is_left_out_for_its_digests_is_in_at_once_where_it_holds_the_newest_state() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    while bench.proposed().nodes == ("a", "b", "c"):
        for node in "abc":
            bench.vote(node, digest=b"wrong" if node == "b" else b"d")
        bench.confirm()
    bench.commit("a", "c")
    for node in "ac":
        bench.lose(node)
    bench.join("a", "c", incarnation=2)
    view = bench.confirm()
    assert view.nodes == ("a", "b", "c")
    bench.commit(*"abc")
    assert bench.proposed() == view, "and it stays"


def test_a_spare_that_holds_the_newest_state_takes_the_place_of_a_node_that_has_none() -> None:
    bench = Bench(3, max_world_size=3, quiet_ns=0)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.join("d")
    bench.say("a", m.Report(view_id=1, lost=(("c", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.say("b", m.Report(view_id=1, reason="me too"))
    assert bench.confirm().nodes == ("a", "b", "d")
    bench.commit("a", "b", "d")
    bench.advance(60 * SECOND)  # c might take part again, and there is no place for it
    for node in ("a", "b", "d"):
        bench.lose(node)
    bench.join("a", "b", "d", incarnation=2)
    view = bench.confirm()
    assert view.nodes == ("a", "b", "c")
    bench.commit(*"abc")
    assert bench.proposed() == view, "and it stays"


def two_are_wanted_and_both_have_started_anew() -> Bench:
    """And c, which was cut off and holds the only step, is here."""
    bench = Bench(3, quiet_ns=0)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.say("a", m.Report(view_id=1, lost=(("c", "silence"),)))
    bench.say("c", m.Report(view_id=1, lost=(("a", "silence"),)))
    bench.say("b", m.Report(view_id=1, reason="me too"))
    assert bench.confirm().nodes == ("a", "b")
    bench.core.scale(2, (), now_ns=bench.now)
    for node in "ab":
        bench.lose(node)
    bench.join("a", "b", incarnation=2)
    return bench


def test_whoever_holds_the_only_state_has_a_place_beyond_those_that_are_wanted_for_a_step() -> None:
    bench = two_are_wanted_and_both_have_started_anew()
    view = bench.confirm()
    assert (view.nodes, view.workers) == (("a", "b", "c"), 3)
    assert [member.committed_step for member in view.members] == [0, 0, 1]
    bench.advance(60 * SECOND)
    assert bench.proposed() == view, "it stays until the others have what it holds"
    bench.commit(*"abc")
    assert bench.confirm().nodes == ("a", "b")
    assert bench.core.standing(now_ns=bench.now).waiting_for == ""


def test_who_alone_holds_the_state_is_waited_for_and_asked_again_where_it_was_lost_meanwhile() -> None:
    bench = two_are_wanted_and_both_have_started_anew()
    first = bench.proposed()
    bench.lose("c")
    bench.advance(60 * SECOND)
    assert bench.proposed() == first, "nothing is proposed without it"
    assert "nobody here holds step 1; c may" in bench.notes(a.ViewWithheld)[-1].event.cause
    bench.join("c", committed_step=1)
    assert bench.confirm().nodes == ("a", "b", "c")
    bench.commit(*"abc")
    assert bench.proposed().nodes == ("a", "b")


def test_who_may_hold_the_last_step_is_waited_for_though_a_view_was_made_without_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.lose("c")
    assert bench.confirm().nodes == ("a", "b")
    for node in "ab":
        bench.lose(node)
    bench.join("a", "b", incarnation=2)
    bench.advance(600 * SECOND)
    assert bench.proposed().view_id == 2, "nothing is proposed without it"
    assert "nobody here holds step 1; c may" in bench.notes(a.ViewWithheld)[-1].event.cause
    again = Bench(3, records=bench.records)
    again.join("a", "b", incarnation=2)
    again.advance(600 * SECOND)
    assert "nobody here holds step 1; c may" in again.notes(a.ViewWithheld)[-1].event.cause
    again.join("c", committed_step=1)
    view = again.confirm()
    assert [(member.node, member.committed_step) for member in view.members] == [("a", 0), ("b", 0), ("c", 1)]


@pytest.mark.parametrize("how", ["starts anew", "leaves", "another step"])
def test_who_holds_the_last_step_no_more_is_not_waited_for(how: str) -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.lose("c")
    assert bench.confirm().nodes == ("a", "b")
    if how == "another step":
        bench.commit("a", "b")
    if how == "leaves":
        bench.join("c", committed_step=1)
        bench.say("c", m.Leave())
    for node in "ab":
        bench.lose(node)
    bench.join("a", "b", incarnation=2)
    if how == "starts anew":
        bench.join("c", incarnation=2)
    assert set(bench.confirm().nodes) >= {"a", "b"}


def test_a_spare_takes_no_place_that_the_quorum_needs_whatever_it_holds() -> None:
    bench = Bench(3)
    bench.installed("a", "b", "d")
    bench.commit("a", "b", "d")
    bench.commit("a", "b", "d")
    again = Bench(2, records=bench.records, max_world_size=2)
    again.join("c", committed_step=1)
    again.join("a", "b", "d", incarnation=2)
    assert again.confirm().nodes == ("a", "b")
