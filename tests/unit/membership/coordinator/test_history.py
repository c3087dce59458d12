"""What the journal holds, and what a coordinator makes of it after a restart."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from coordinator_bench import SECOND, Bench

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator.history import (
    Committed,
    Forgotten,
    History,
    InstalledView,
    JournalRecord,
    Left,
    Proposed,
    Seeded,
    WentOn,
)
from quicoll.membership.coordinator.lessons import Lessons, NodeLesson
from quicoll.membership.view import Member, View

# Its records


@pytest.mark.parametrize(
    "records",
    [
        [Seeded(1), Seeded(1)],
        [Proposed(1), Proposed(1)],
        [Left("a")],
        [Left("a", 1)],
        [WentOn(0)],
        [Committed(1, 1, b"")],
    ],
)
def test_a_history_that_contradicts_itself_is_refused(records: list[JournalRecord]) -> None:
    with pytest.raises(LocalError):
        History.of(records)


def test_holders_are_those_of_the_view_that_committed_and_of_those_after_it() -> None:
    bench = Bench(3)
    bench.installed(*"abc")
    bench.commit(*"abc")
    for node in "abc":
        bench.lose(node)
    bench.join("b", "c", "d", committed_step=1)
    bench.advance(20 * SECOND)
    assert bench.confirm().nodes == ("b", "c", "d")
    assert bench.core.history.holders == ("b", "c", "d", "a"), "d may have got it there"
    with pytest.raises(LocalError, match="z leaves, but the last view has no such node"):
        bench.core.history.apply(Left("z"))
    assert bench.core.history.apply(Left("a")).holders == ("b", "c", "d")
    assert bench.core.history.apply(Left("a")).left == (), "a counts in no quorum"
    assert bench.core.history.apply(Left("d")).holders == ("b", "c", "a")
    assert bench.core.history.apply(Forgotten(("d",))).holders == ("b", "c", "a")
    bench.commit(*"bcd")
    assert bench.core.history.holders == ("b", "c", "d")


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


# What a restarted coordinator knows


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
    assert words in bench.told("c", m.RefuseJoin).reason


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


def test_a_commit_leaves_all_that_it_does_not_change_as_it_was() -> None:
    """It is made field by field, so one that is added to the class has to be there, too."""
    view = View(
        view_id=4,
        members=tuple(Member(rank=rank, node="ab"[rank], incarnation=1) for rank in range(2)),
        seed=7,
        committed_step=2,
        committed_view=3,
    )
    before = History(
        seed=7,
        last_view_id=5,
        view=view,
        left=("b",),
        holders=("a", "b", "c"),
        commits=((3, 1, 2),),
        committed_step=2,
        committed_view=3,
        committed_digest=b"before",
        finished=("b",),
        final_step=9,
        crowd=2,
        lessons=Lessons((NodeLesson("c", 1, 2, 3, 4),)),
        wanted=3,
        to_leave=("b",),
    )
    plain = {field.name: getattr(History(), field.name) for field in fields(History)}
    assert all(getattr(before, name) != value for name, value in plain.items()), "each one is another than at first"
    after = before.apply(Committed(3, 4, b"after"))
    changed = {field.name for field in fields(History) if getattr(after, field.name) != getattr(before, field.name)}
    assert changed == {
        *("holders", "commits", "committed_step", "committed_view", "committed_digest"),
        *("finished", "final_step", "crowd"),
    }
    assert (after.holders, after.commits) == (("a",), ((3, 1, 2), (4, 3, 3)))
