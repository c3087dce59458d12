"""Which set of tiers ranks go over to: the same on all of them, whatever they propose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicoll.errors import LocalError, PeerError
from quicoll.membership.view import Member, View
from quicoll.tiers.agreement import TierBallot, TierChoice, TierVerdict, choose_tiers, refusals
from quicoll.tiers.tier_set import TierSet

NODES = ("n0", "n1", "n2", "n3")
VIEW = View(
    view_id=9,
    members=tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(NODES)),
    seed=1,
    committed_step=0,
    committed_view=0,
)
NOW = TierSet(["a"], version=3)
NEXT = [NOW.changed(active=[name]) for name in "abc"]
STALE, FAR, ELSEWHERE = (
    TierSet(["b"], version=3),
    TierSet(["b"], version=5),
    NOW.changed(placement={"a": ["n1", "n7"]}),
)


def ballots(*proposed: TierSet | None) -> list[TierBallot]:
    return [TierBallot(NOW.digest, NOW.version, b"" if each is None else each.encoded) for each in proposed]


def test_nothing_is_chosen_where_nothing_is_proposed() -> None:
    assert choose_tiers(NOW, ballots(None, None, None, None), VIEW) == TierChoice()


def test_of_two_sets_the_one_of_the_lower_rank_is_chosen_and_the_other_refused() -> None:
    choice = choose_tiers(NOW, ballots(None, NEXT[1], NEXT[0], NEXT[1]), VIEW)
    assert (choice.chosen, choice.ranks) == (NEXT[1], (1, 3))
    (refused,) = choice.refused
    assert (refused.tier_set, refused.ranks) == (NEXT[0], (2,))
    assert "n1 proposed another set" in refused.reason


def test_a_set_that_cannot_follow_does_not_stand_in_the_way_of_one_that_can() -> None:
    choice = choose_tiers(NOW, ballots(STALE, FAR, ELSEWHERE, NEXT[2]), VIEW)
    assert (choice.chosen, choice.ranks) == (NEXT[2], (3,))
    assert [each.reason for each in choice.refused] == [
        "it was made to be version 3, and version 3 is in force",
        "it was made to be version 5, and version 3 is in force",
        "it names nodes that are not in view 9: n7",
    ]


@given(st.lists(st.sampled_from([None, *NEXT, STALE, FAR, ELSEWHERE]), min_size=4, max_size=4))
def test_every_proposal_is_chosen_or_refused_and_the_choice_can_follow(proposed: list[TierSet | None]) -> None:
    choice = choose_tiers(NOW, ballots(*proposed), VIEW)
    ranks = sorted([*choice.ranks, *(rank for each in choice.refused for rank in each.ranks)])
    assert ranks == [rank for rank, each in enumerate(proposed) if each is not None]
    fit = [each for each in proposed if each in NEXT]
    assert choice.chosen == (fit[0] if fit else None)


def test_ranks_that_hold_different_sets_agree_on_nothing() -> None:
    held = [*ballots(None, None, NEXT[0]), TierBallot(NEXT[1].digest, NEXT[1].version)]
    with pytest.raises(LocalError, match=r"version 3 on n0, n1, n2; version 4 on n3.*job\.tiers\.state\(\)"):
        choose_tiers(NOW, held, VIEW)
    with pytest.raises(LocalError, match="different sets"):
        choose_tiers(NEXT[1], ballots(None, None, None, None), VIEW)  # this rank is the odd one


def test_a_malformed_proposal_is_its_ranks_fault() -> None:
    with pytest.raises(PeerError, match="proposes what is no set of tiers") as caught:
        choose_tiers(NOW, [*ballots(None, None), TierBallot(NOW.digest, 3, b"\xc1"), *ballots(None)], VIEW)
    assert (caught.value.rank, caught.value.node) == (2, "n2")


def test_one_rank_that_cannot_refuses_for_all() -> None:
    choice = choose_tiers(NOW, ballots(NEXT[1], None, NEXT[0], None), VIEW)
    assert refusals(choice, [TierVerdict()] * 4, VIEW) == choice
    left = refusals(choice, [TierVerdict(), TierVerdict("no memory"), TierVerdict(), TierVerdict("no disk")], VIEW)
    assert (left.chosen, left.ranks) == (None, ())
    assert [(each.tier_set, each.reason) for each in left.refused] == [
        (NEXT[0], "n0 proposed another set in the same step, and has the lower rank"),
        (NEXT[1], "n1: no memory; n3: no disk"),
    ]
