"""A job that is asked for another number of ranks while it runs: who leaves, when, and what may come in between."""

from __future__ import annotations

from coordinator_bench import SECOND, Bench

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.history import History, Left, Scaled


def asked(bench: Bench, world_size: int | None, *leave: str) -> str:
    refusal = bench.core.scale(world_size, leave, now_ns=bench.now)
    bench.drain()
    return refusal


def waiting_for(bench: Bench) -> str:
    return bench.core.standing(now_ns=bench.now).waiting_for


def test_the_highest_ranks_leave_with_the_decision_of_the_open_step_and_the_others_go_on() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    bench.begin(*"abcd")
    assert asked(bench, 2) == ""
    assert bench.core.standing(now_ns=bench.now).leave == ("d", "c")
    bench.vote(*"abcd")
    for node in "cd":
        decision = bench.inbox[node][0]
        assert isinstance(decision, m.Decide)
        assert decision.commit
        assert decision.dismissal == f"{node} leaves the job, which is to have 2 ranks"
        assert not any(isinstance(message, m.Aborted) for message in bench.inbox[node])
    view = bench.confirm()
    assert view.nodes == ("a", "b")  # two of four are no quorum, but of those that have not left
    assert view.committed_step == 1
    assert waiting_for(bench) == ""
    assert [action.event.node for action in bench.notes(a.NodeDismissed)] == ["d", "c"]


def test_between_steps_the_leaving_are_told_once_no_begin_can_be_on_its_way() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.inbox.clear()
    asked(bench, 2)
    assert not bench.inbox
    bench.advance(SECOND)
    assert isinstance(bench.inbox["c"][0], m.Dismiss)
    assert bench.confirm().nodes == ("a", "b")


def test_the_wish_is_in_the_journal_before_anybody_is_told() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    asked(bench, 2)
    assert bench.records[-1] == Scaled(2, ("c",))
    bench.commit(*"abc")
    kinds = [type(record) for record in bench.records]
    assert kinds[-3:] == [Left, Scaled, type(bench.records[-1])]
    assert History.of(bench.records).wanted == 2
    assert History.of(bench.records).to_leave == ()


def test_a_coordinator_that_is_started_again_goes_on_with_the_wish() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    asked(bench, 2)
    again = Bench(3, records=bench.records)
    again.join(*"abc")
    assert again.confirm().nodes == ("a", "b", "c")  # all are needed for the quorum, until one is told to go
    again.advance(SECOND)
    assert isinstance(again.inbox["c"][-1], m.Dismiss)
    assert again.confirm().nodes == ("a", "b")


def test_a_request_that_comes_twice_changes_nothing_more() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    asked(bench, 2)
    written = len(bench.records)
    assert asked(bench, 2) == ""
    assert len(bench.records) == written
    bench.commit(*"abc")
    bench.confirm()
    written = len(bench.records)
    assert asked(bench, 2) == ""
    assert len(bench.records) == written
    assert len(bench.notes(a.ScaleAsked)) == 1


def test_a_request_while_a_view_forms_waits_for_its_first_boundary() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    bench.lose("d")
    assert asked(bench, 1) == ""
    assert bench.confirm().nodes == ("a", "b", "c")
    bench.advance(SECOND)
    assert bench.confirm().nodes == ("a",)


def test_what_cannot_be_is_refused_with_both_numbers_and_changes_nothing() -> None:
    bench = Bench(3, min_world_size=2, max_world_size=4)
    bench.installed(*"abc")
    written = len(bench.records)
    assert asked(bench, 1) == "1 ranks are below --min-world-size 2"
    assert asked(bench, 5) == "5 ranks are above --max-world-size 4"
    assert asked(bench, 2, "x") == "x cannot leave: not in the job"
    assert len(bench.records) == written
    assert bench.core.standing(now_ns=bench.now).world_size is None


def test_nodes_that_join_make_the_job_as_large_as_it_was_asked_to_be_and_no_larger() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    asked(bench, 4)
    assert waiting_for(bench) == "2 of 4 ranks are at work; 2 more have to join"
    bench.join(*"cde", world_size=4)
    bench.advance(SECOND)
    assert bench.confirm().nodes == ("a", "b", "c", "d")
    assert waiting_for(bench) == ""
    bench.lose("b")
    assert bench.confirm().nodes == ("a", "c", "d", "e")


def test_a_node_that_is_named_leaves_when_the_one_that_takes_its_place_is_there() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    assert asked(bench, None, "a") == ""
    bench.commit(*"abc")
    bench.advance(SECOND)
    assert bench.core.view is not None
    assert bench.core.view.nodes == ("a", "b", "c")
    assert waiting_for(bench) == "a shall leave at a step boundary, once 3 others are there and hold the last step"
    bench.join("d")
    bench.advance(SECOND)
    assert isinstance(bench.inbox["a"][-1], m.Dismiss)
    assert bench.confirm().nodes == ("b", "c", "d")
    assert waiting_for(bench) == ""


def test_a_node_that_dies_before_it_left_is_told_to_go_when_it_comes_back() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin(*"abc")
    asked(bench, 2)
    bench.lose("c")
    assert bench.confirm().nodes == ("a", "b")
    bench.join("c", incarnation=2)
    bench.advance(SECOND)
    assert isinstance(bench.inbox["c"][-1], m.Dismiss)
    assert bench.core.view is not None
    assert bench.core.view.nodes == ("a", "b")


def test_a_node_that_dies_while_it_leaves_is_waited_for_by_nobody() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    asked(bench, 2)
    bench.commit(*"abc")
    bench.lose("c")
    assert bench.confirm().nodes == ("a", "b")
    bench.commit("a", "b")
    assert bench.core.history.committed_step == 2


def test_nobody_who_holds_the_last_step_alone_is_told_to_leave() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.lose("a")
    bench.advance(20 * SECOND)
    bench.join("a", incarnation=2)
    bench.advance(SECOND)
    assert bench.confirm().nodes == ("a", "b")
    assert asked(bench, 1) == ""
    bench.advance(20 * SECOND)
    assert bench.core.view is not None
    assert bench.core.view.nodes == ("a", "b")  # "b" alone has the state, until a step is begun from it
    bench.commit("a", "b")
    assert bench.confirm().nodes == ("a",)


def two_of_three_are_wanted_and_one_has_started_anew(node: str) -> Bench:
    """It is in the view again, and has not got the only step yet."""
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.lose(node)
    bench.confirm()
    bench.join(node, incarnation=2)
    bench.advance(20 * SECOND)
    assert bench.confirm().nodes == ("a", "b", "c")
    assert asked(bench, 2) == ""
    bench.advance(20 * SECOND)
    return bench


def test_who_holds_the_last_step_stays_until_all_others_of_the_view_hold_it_too() -> None:
    bench = two_of_three_are_wanted_and_one_has_started_anew("a")
    assert not bench.notes(a.NodeDismissed), "b alone would hold it, and a gets it"
    assert waiting_for(bench) == "c shall leave at a step boundary, once 2 others are there and hold the last step"
    bench.commit(*"abc")
    assert bench.confirm().nodes == ("a", "b")
    assert waiting_for(bench) == ""


def test_who_does_not_hold_the_last_step_may_go_before_it_does() -> None:
    bench = two_of_three_are_wanted_and_one_has_started_anew("c")
    assert bench.confirm().nodes == ("a", "b")


def test_a_later_request_takes_back_what_is_not_done_yet() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.begin(*"abc")
    asked(bench, 2)
    asked(bench, 3)
    bench.vote(*"abc")
    bench.advance(SECOND)
    assert bench.core.view is not None
    assert bench.core.view.nodes == ("a", "b", "c")


def test_a_job_that_begins_anew_waits_for_no_more_than_are_wanted() -> None:
    bench = Bench(3, records=[*Bench(3).records, Scaled(2)])
    bench.join("a", "b")
    assert bench.confirm().nodes == ("a", "b")


def test_a_node_that_comes_to_a_job_at_work_may_expect_any_world_size() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.join("c", world_size=7)
    bench.advance(SECOND)
    assert bench.confirm().nodes == ("a", "b", "c")


# -- ranks that own parts of the state -------------------------------------------------------------------------------


def owning(bench: Bench, *nodes: str) -> None:
    """A step is committed, by whose votes all of these own part of the state."""
    bench.begin(*nodes)
    for node in nodes:
        bench.say(node, m.Vote(view_id=bench.view_id, step=bench.step, ok=True, digest=b"d", owns=True))


def test_owners_are_named_in_a_view_of_their_own_before_they_go_and_the_first_to_part_lets_all_go() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    asked(bench, 2)
    owning(bench, *"abcd")
    assert all(not isinstance(each, m.Decide) or not each.dismissal for told in bench.inbox.values() for each in told)
    view = bench.confirm()
    assert (view.nodes, view.parting) == (("a", "b", "c", "d"), ("c", "d"))
    bench.inbox.clear()
    bench.advance(SECOND)
    assert not bench.inbox  # nobody is told to go while things are handed over
    bench.say("d", m.Leave(reason="Dismissed", parted=True, committed_step=1))
    assert bench.proposed().nodes == ("a", "b")
    assert bench.proposed().parting == ()
    assert isinstance(bench.inbox["c"][-1], m.Dismiss)
    assert bench.confirm().nodes == ("a", "b")
    assert History.of(bench.records).to_leave == ()
    assert sorted(action.event.node for action in bench.notes(a.NodeDismissed)) == ["c", "d"]


def test_where_the_view_ends_before_that_the_next_one_has_the_same_marks() -> None:
    bench = Bench(4)
    bench.installed(*"abcd")
    asked(bench, 2)
    owning(bench, *"abcd")
    bench.confirm()
    bench.lose("b")
    view = bench.confirm()
    assert (view.nodes, view.parting) == (("a", "c", "d"), ("c", "d"))
    bench.say("d", m.Leave(reason="failed", committed_step=1))  # of its own will: it has handed over nothing
    assert "c" in bench.proposed().nodes


def test_an_owner_that_is_asked_to_stop_ends_the_step_that_others_begin_without_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    owning(bench, *"abc")
    bench.begin("a", "b")
    bench.inbox.clear()
    bench.say("c", m.AskToLeave(owns=True))
    assert not any(isinstance(message, m.MayLeave) for message in bench.inbox["c"])
    assert isinstance(bench.inbox["a"][0], m.Decide)
    assert not bench.inbox["a"][0].commit
    view = bench.confirm()
    assert (view.nodes, view.parting) == (("a", "b", "c"), ("c",))
    bench.say("c", m.Leave(reason="terminated", parted=True, committed_step=1))
    assert bench.confirm().nodes == ("a", "b")
    assert not bench.notes(a.NodeDismissed)  # no operator has asked for that


def test_an_owner_that_asks_while_a_view_forms_is_heard_when_others_begin_in_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    owning(bench, *"abc")
    bench.lose("b")
    bench.say("c", m.AskToLeave(owns=True))
    assert bench.confirm().parting == ()
    bench.begin("a")
    assert bench.confirm().parting == ("c",)


def test_the_next_process_of_an_owner_that_was_asked_to_stop_was_asked_nothing() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    owning(bench, *"abc")
    bench.lose("b")
    bench.say("c", m.AskToLeave(owns=True))
    bench.lose("c")
    bench.join("c", incarnation=2)  # started anew, before a view has named it
    bench.advance(5 * SECOND)
    view = bench.confirm()
    assert (view.view_id, view.nodes, view.parting) == (3, ("a", "c"), ())
    bench.inbox.clear()
    bench.begin("a")
    assert not any(isinstance(message, m.Decide) for message in bench.inbox.get("a", [])), "nobody has to make way"


def test_an_owner_alone_may_go() -> None:
    bench = Bench(1)
    bench.installed("a")
    owning(bench, "a")
    bench.say("a", m.AskToLeave(owns=True))
    assert isinstance(bench.inbox["a"][-1], m.MayLeave)
