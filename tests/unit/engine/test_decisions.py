"""What became of steps and views, for callers who ask late."""

from __future__ import annotations

from quicoll.engine.decisions import Decision, StepOutcomes, ViewEnds
from quicoll.errors import Corrupted, PeerError
from quicoll.membership.member.actions import Decided
from quicoll.observability.events import Event, Observers


def observed() -> tuple[StepOutcomes, list[Event]]:
    events: list[Event] = []
    return StepOutcomes(Observers("a", lambda: 0, events.append).emit), events


def test_a_step_that_was_not_voted_on_is_aborted_where_the_view_breaks() -> None:
    steps, events = observed()
    steps.begin(7, 70)
    steps.broke(3, "lost: silence", ("b",))
    assert steps.open is None
    assert [(event.kind, event.fields["step"]) for event in events] == [("step_aborted", 70)]


def test_a_step_that_was_voted_on_is_decided_by_the_coordinator_alone() -> None:
    steps, events = observed()
    steps.begin(7, 70)
    steps.voted(3)
    steps.broke(3, "lost: silence", ("b",))
    assert steps.open == (7, 70)
    assert events == []
    steps.decided(Decided(3, 7, True, ""))
    assert steps.open is None
    assert [(event.kind, event.fields["step"]) for event in events] == [("step_committed", 70)]


def test_a_vote_in_one_step_says_nothing_of_the_next() -> None:
    steps, _ = observed()
    steps.begin(7, 70)
    steps.voted(3)
    steps.decided(Decided(3, 7, True, ""))
    steps.begin(8, 71)
    steps.broke(3, "why", ())
    assert steps.open is None


def test_a_step_that_could_not_begin_has_not_the_vote_of_the_one_before_it() -> None:
    steps, _ = observed()
    steps.begin(7, 70)
    steps.voted(3)
    steps.decided(Decided(3, 7, True, ""))
    steps.not_begun()
    assert (steps.open, steps.cast) == (None, None)


def test_a_decision_is_of_one_view_though_an_index_is_tried_in_many() -> None:
    steps, events = observed()
    steps.decided(Decided(3, 7, False, "b was lost", ("b",), "b"))
    steps.decided(Decided(4, 7, True, ""))
    assert steps.decision(3, 7) == Decision(7, False, "b was lost", ("b",), "b", "failed")
    assert steps.decision(4, 7) == Decision(7, True, "", (), "", "failed")
    assert steps.decision(5, 7) is None
    assert events == []  # none of them was open here


def test_what_is_kept_is_bounded_and_the_oldest_goes_first() -> None:
    steps, _ = observed()
    ends = ViewEnds()
    for number in range(100):
        steps.decided(Decided(1, number, True, ""))
        ends.keep(number, Corrupted(f"view {number}", view=number))
    assert [number for number in range(100) if steps.decision(1, number) is not None] == list(range(84, 100))
    assert [number for number in range(100) if isinstance(ends.past(number), Corrupted)] == list(range(84, 100))


def test_who_speaks_of_a_view_that_is_over_is_told_how_it_ended_whatever_followed() -> None:
    ends = ViewEnds()
    ends.keep(3, Corrupted("spoiled", node="b", rank=1, view=3))
    ends.keep(4, PeerError("lost", node="c", rank=2, view=4))
    error = ends.past(3, op="all_reduce", step=5)
    assert isinstance(error, Corrupted)
    told = (error.message, error.node, error.rank, error.view, error.op, error.step)
    assert told == ("spoiled", "b", 1, 3, "all_reduce", 5)
    unknown = ends.past(2)
    assert isinstance(unknown, PeerError)
    assert (unknown.message, unknown.view) == ("the view is over", 2)
