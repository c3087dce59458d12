"""How the job is, as somebody sees it who looks: each node in one state, steps, who is late, what is held and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator_bench import MS, SECOND, Bench, declined

from quicoll.membership import messages as m
from quicoll.membership.coordinator import actions as a
from quicoll.membership.coordinator.chronicle import MAX_LOST, Chronicle
from quicoll.membership.status import MAX_STATUS_EVENTS, condition_of, is_late

if TYPE_CHECKING:
    from quicoll.membership.status import JobStatus, MemberStatus


def look(bench: Bench) -> JobStatus:
    return bench.core.status(now_ns=bench.now)


def states(bench: Bench) -> dict[str, str]:
    return {each.node: each.state for each in look(bench).members}


def member(bench: Bench, node: str) -> MemberStatus:
    (found,) = (each for each in look(bench).members if each.node == node)
    return found


def test_before_the_first_view_it_is_forming_and_says_how_many_are_missing_and_held_when_that_lasts() -> None:
    bench = Bench(3)
    bench.now = 4 * SECOND
    bench.join("a")
    status = look(bench)
    assert (status.stage, status.view_id, condition_of(status)) == ("forming", 0, "forming")
    assert "1 of 3" in status.held
    assert (status.without_ns, status.committed_ns) == (4 * SECOND, None)
    assert (states(bench), member(bench, "a").rank) == ({"a": "joining"}, None)
    bench.now = 64 * SECOND
    assert condition_of(look(bench)) == "held"


def test_a_view_that_is_proposed_says_who_has_answered_what() -> None:
    bench = Bench(3)
    bench.join(*"abc")
    bench.say("a", m.Confirm(view_id=1))
    bench.say("b", m.Decline(view_id=1, unreachable=("c",), reason="no answer"))
    status = look(bench)
    assert (status.stage, status.view_id, condition_of(status)) == ("proposed", 1, "forming")
    assert states(bench) == {"a": "confirmed", "b": "declined", "c": "asked"}
    assert [each.rank for each in status.members] == [0, 1, 2]


def test_a_view_at_work_says_since_when_a_step_is_open_who_has_begun_and_who_has_voted() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.now += 100 * MS
    assert (states(bench), condition_of(look(bench))) == (dict.fromkeys("abc", "at work"), "at work")
    bench.begin("a", "b")
    bench.now += 300 * MS
    assert states(bench) == {"a": "computing", "b": "computing", "c": "outside"}
    bench.vote("a")
    bench.now += 200 * MS
    status = look(bench)
    assert (status.open_step, status.open_ns, status.voting_ns, status.votes) == (1, 500 * MS, 200 * MS, 1)
    assert states(bench) == {"a": "voted", "b": "computing", "c": "outside"}
    bench.vote("b", "c")
    status = look(bench)
    assert (status.open_step, status.open_ns, status.voting_ns, status.votes) == (0, 0, None, 0)
    assert (status.committed_step, status.committed_ns) == (1, 0)
    assert member(bench, "c").step == 1


def test_late_is_who_keeps_the_others_waiting_and_nobody_while_all_compute() -> None:
    bench = Bench(3)
    bench.installed(*"abc")

    def late() -> list[str]:
        status = look(bench)
        return [each.node for each in status.members if is_late(status, each)]

    bench.begin("a", "b")
    assert late() == []
    bench.now += 2 * SECOND
    assert late() == ["c"]  # it has not begun
    bench.begin("c")
    assert late() == []
    bench.now += 60 * SECOND
    assert late() == []
    bench.vote("a", "b")
    assert late() == []
    bench.now += 2 * SECOND
    assert late() == ["c"]  # it has not voted


def test_late_goes_by_how_long_steps_take() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    for _ in range(3):
        bench.now += 10 * SECOND
        bench.commit(*"ab")
    bench.begin("a")
    bench.now += 19 * SECOND
    status = look(bench)
    assert status.step_ns == 10 * SECOND
    assert not is_late(status, status.members[1])
    bench.now += 2 * SECOND
    status = look(bench)
    assert is_late(status, status.members[1])


def test_a_step_that_is_open_for_ten_times_as_long_as_usual_is_stalled() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin("a")
    bench.now += 299 * SECOND
    assert condition_of(look(bench)) == "at work"  # the first step may take long
    assert condition_of(look(bench), patience_ns=60 * SECOND) == "stalled"
    bench.vote("b", "a")
    for _ in range(3):
        bench.now += 5 * SECOND
        bench.commit(*"ab")
    bench.begin("a", "b")
    bench.now += 49 * SECOND
    assert condition_of(look(bench)) == "at work"
    bench.now += 2 * SECOND
    assert condition_of(look(bench)) == "stalled"


def test_a_view_without_a_step_for_a_while_is_idle_and_not_stalled() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.now += 500 * MS
    assert condition_of(look(bench)) == "at work"
    bench.now += 3600 * SECOND
    assert condition_of(look(bench)) == "idle"


def test_the_rate_of_steps_falls_while_none_comes() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    assert look(bench).recent == (0, 0)
    for _ in range(5):
        bench.now += SECOND // 2
        bench.commit(*"ab")
    assert look(bench).recent == (4, 2 * SECOND)
    bench.now += 6 * SECOND
    assert look(bench).recent == (4, 8 * SECOND)
    for _ in range(100):
        bench.now += SECOND
        bench.commit(*"ab")
    assert look(bench).recent == (63, 63 * SECOND)


def test_a_lost_node_is_shown_with_the_cause_until_it_is_back() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.lose("c")
    bench.confirm()
    bench.now += 12 * SECOND
    lost = member(bench, "c")
    assert (lost.state, lost.for_ns, lost.why) == ("lost", 12 * SECOND, "c was lost: silence")
    assert condition_of(look(bench)) == "idle"  # the others may go on
    bench.join("c", incarnation=2)
    assert (member(bench, "c").state, member(bench, "c").why) == ("asked", "")


def test_too_few_for_a_quorum_are_held_with_the_words_that_they_hear() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.lose("b")
    bench.lose("c")
    bench.advance(30 * SECOND)
    status = look(bench)
    assert condition_of(status) == "held"
    assert status.held == bench.told("a", m.Withhold).cause
    assert "quorum" in status.held
    assert states(bench) == {"a": "joining", "b": "lost", "c": "lost"}
    assert status.without_ns == 30 * SECOND


def test_a_restarted_coordinator_says_who_is_missing_without_knowing_why() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    again = Bench(3, records=bench.records)
    again.join("a")
    assert states(again) == {"a": "joining", "b": "missing", "c": "missing"}
    assert member(again, "b").for_ns is None


def test_a_node_that_is_left_out_says_for_how_long_and_why() -> None:
    bench = Bench(3)
    bench.join(*"abc")
    declined(bench, {"c": ""})
    bench.advance(SECOND // 2)
    bench.confirm("a", "b")
    out = member(bench, "c")
    assert (out.state, out.rank) == ("left out", None)
    assert "c declined" in out.why
    assert out.out_ns > 0
    bench.advance(40 * SECOND)
    assert member(bench, "c").out_ns == 0


def test_who_has_no_place_stands_by_and_who_comes_later_joins() -> None:
    bench = Bench(2, max_world_size=2)
    bench.installed(*"ab")
    bench.join("c")
    assert states(bench)["c"] == "standing by"
    free = Bench(2)
    free.installed(*"ab")
    free.join("c")
    assert states(free)["c"] == "joining"
    assert "view 1 is at work" in member(free, "c").why


def test_who_has_left_is_gone_and_a_job_whose_ranks_have_ended_is_done() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.commit(*"ab")
    bench.say("b", m.Leave(reason="terminated"))
    assert states(bench)["b"] == "gone"
    done = Bench(2)
    done.installed(*"ab")
    done.commit(*"ab")
    for node in "ab":
        done.say(node, m.Leave(reason="done", finished=1, committed_step=1))
    status = look(done)
    assert (condition_of(status), status.final_step, status.finished) == ("done", 1, 2)
    assert states(done) == {"a": "done", "b": "done"}


def test_who_learns_the_state_beside_the_others_is_no_rank() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    bench.say("c", m.Learn(view_id=1))
    bench.confirm()
    assert (member(bench, "c").state, member(bench, "c").rank) == ("learning", None)


def test_what_an_operator_waits_for_is_said() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    assert (look(bench).wanted, look(bench).waiting_for) == (None, "")
    bench.core.scale(3, now_ns=bench.now)
    bench.drain()
    assert (look(bench).wanted, look(bench).waiting_for) == (3, "2 of 3 ranks are at work; 1 more has to join")


def test_looking_changes_nothing() -> None:
    seen, unseen = Bench(3), Bench(3)
    for bench in (seen, unseen):
        for node in "abc":
            bench.join(node)
            if bench is seen:
                look(bench)
        bench.confirm()
        bench.begin("a")
        bench.lose("b")
        if bench is seen:
            look(bench)
        bench.advance(20 * SECOND)
    assert seen.carried_out == unseen.carried_out


def test_a_commit_counts_as_one_that_was_when_the_journal_has_it() -> None:
    bench = Bench(2)
    bench.installed(*"ab")
    bench.begin(*"ab")
    vote = m.Vote(view_id=bench.view_id, step=1, ok=True, digest=b"d")
    for node in "ab":
        bench.core.receive(node, vote, now_ns=bench.now, incarnation=1)
    actions: list[a.CoordinatorAction] = []
    while not actions or not isinstance(actions[-1], a.Persist):
        action = bench.core.next_action()
        assert action is not None
        actions.append(action)
    assert look(bench).committed_ns is None  # the disk may refuse it
    bench.drain()
    assert look(bench).committed_ns == 0


def test_the_chronicle_is_bounded_and_steps_push_nothing_out() -> None:
    chronicle = Chronicle(now_ns=0)
    chronicle.take(a.NodeJoined(now_ns=1, node="first", incarnation=1))
    for at in range(10_000):
        chronicle.take(a.StepCommitted(now_ns=at, view_id=1, step=at, digest=b""))
    assert [type(event) for event in chronicle.events] == [a.NodeJoined]
    for at in range(1000):
        chronicle.take(a.NodeLost(now_ns=at, node=f"n{at}", cause="silence", left=False))
    assert len(chronicle.events) == MAX_STATUS_EVENTS
    assert len(chronicle.departed) == MAX_LOST
    assert list(chronicle.departed)[-1] == "n999"
