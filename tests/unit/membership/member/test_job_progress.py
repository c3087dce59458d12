"""What a member knows from view to view, and what contradicts it."""

from __future__ import annotations

import pytest

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.member.job_progress import JobProgress
from quicoll.membership.view import Member, View


def view(view_id: int = 3, *, seed: int = 7, committed_step: int = 4) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate("abc"))
    return View(view_id=view_id, members=members, seed=seed, committed_step=committed_step, committed_view=0)


def begun() -> JobProgress:
    progress = JobProgress(4)
    progress.welcome(m.Welcome(seed=7, committed_step=4))
    progress.proposed(view())
    return progress


@pytest.mark.parametrize(
    ("proposed", "words"),
    [
        (view(3), "view 3 is proposed after view 3"),
        (view(4, seed=8), "seed 8, this node step 4 and seed 7"),
        (view(4, committed_step=3), "step 3 and seed 7, this node step 4"),
    ],
)
def test_a_view_that_takes_something_back_contradicts(proposed: View, words: str) -> None:
    assert words in begun().contradiction_of_view(proposed, node="a", incarnation=1)


def test_a_view_without_this_process_contradicts_and_a_later_one_with_it_does_not() -> None:
    assert "no a of incarnation 2" in begun().contradiction_of_view(view(4), node="a", incarnation=2)
    assert "no x of incarnation 1" in begun().contradiction_of_view(view(4), node="x", incarnation=1)
    assert begun().contradiction_of_view(view(4), node="a", incarnation=1) == ""


@pytest.mark.parametrize("committed", [None, True, False])
@pytest.mark.parametrize("doubt", [None, (3, 5)])
def test_a_doubt_is_answered_and_nothing_else_is(doubt: tuple[int, int] | None, committed: bool | None) -> None:
    progress = begun()
    progress.doubt = doubt
    welcome = m.Welcome(seed=7, committed_step=4, doubt_committed=committed)
    assert bool(progress.contradiction(welcome)) == ((doubt is None) != (committed is None))
    assert progress.welcome(welcome) == doubt
    assert progress.doubt is None


def test_the_state_of_another_member_is_of_a_step_that_can_be_committed() -> None:
    progress = JobProgress(2)
    progress.proposed(view(committed_step=4))
    progress.caught_up(3)
    for step in (2, 5):
        with pytest.raises(LocalError, match=f"step {step} is not in 3..4"):
            progress.caught_up(step)
    assert (progress.holds, progress.committed) == (3, 4)
    progress.state_lost()
    assert (progress.holds, progress.committed) == (0, 4)
    progress.caught_up(0)  # of a job that begins anew from a checkpoint


def test_where_the_last_step_is_lost_a_checkpoint_is_taken_in_place_of_an_older_state() -> None:
    progress = JobProgress(2)
    progress.proposed(view(committed_step=4))
    progress.caught_up(0)
    assert (progress.holds, progress.committed) == (0, 4)
