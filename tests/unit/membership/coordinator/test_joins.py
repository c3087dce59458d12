"""What a Join is answered with, without a coordinator around it."""

from __future__ import annotations

from typing import Any

import pytest

from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.coordinator.history import Committed, History, InstalledView, Proposed, Seeded
from quicoll.membership.coordinator.joins import Acceptance, Adoption, Refusal, answer_to
from quicoll.membership.messages import Join
from quicoll.membership.view import MAX_MEMBERS, Member, View

VIEW = View(
    view_id=1,
    members=tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate("ab")),
    seed=7,
    committed_step=0,
    committed_view=0,
)
HISTORY = History.of([Seeded(7), Proposed(1), InstalledView(VIEW), Committed(1, 1, b"d"), Committed(2, 1, b"d")])


def answer(*, connected: int = 0, config: dict[str, Any] | None = None, **join: Any) -> Refusal | Adoption | Acceptance:
    settings = CoordinatorConfig(world_size=2, **(config or {}))
    return answer_to("a", Join(incarnation=2, **join), connected=connected, history=HISTORY, config=settings, now_ns=9)


def test_a_node_is_admitted_with_the_step_that_it_holds() -> None:
    admission = answer(committed_step=1)
    assert isinstance(admission, Acceptance)
    candidate = admission.candidate
    assert (candidate.node, candidate.incarnation, candidate.committed_step, candidate.joined_ns) == ("a", 2, 1, 9)
    assert admission.doubt_committed is None


@pytest.mark.parametrize(("doubt", "committed", "holds"), [((1, 2), True, 2), ((1, 3), False, 1)])
def test_a_doubt_is_settled_by_the_journal(doubt: tuple[int, int], committed: bool, holds: int) -> None:
    admission = answer(committed_step=1, doubt=doubt)
    assert isinstance(admission, Acceptance)
    assert (admission.doubt_committed, admission.candidate.committed_step) == (committed, holds)


def test_a_node_that_contradicts_the_journal_is_refused() -> None:
    assert answer(committed_step=3) == Refusal("the node holds step 3, the journal ends at 2")


def test_a_node_for_which_there_is_no_room_is_refused() -> None:
    assert isinstance(answer(connected=MAX_MEMBERS - 1), Acceptance)
    assert answer(connected=MAX_MEMBERS) == Refusal(f"{MAX_MEMBERS} nodes are connected already")


def test_a_node_with_another_setting_adopts_the_coordinator_s_where_it_can() -> None:
    config = {"lost_after_ns": 10}
    assert answer(config=config, lost_after_ns=20, adopts=True) == Adoption(10)
    assert isinstance(answer(config=config, lost_after_ns=20), Refusal)
    assert isinstance(answer(config=config, lost_after_ns=10, adopts=True), Acceptance)
    assert isinstance(answer(lost_after_ns=20, adopts=True), Acceptance)  # each has its own
