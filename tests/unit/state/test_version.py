"""Who gives to whom: the newest version, the majority of its holders, and where nobody knows what is right."""

from __future__ import annotations

import pytest

from quicoll.state.version import HeldState, StateComparison, StateVersion, compare

V = StateVersion


def held(
    version: StateVersion, digest: str = "x", *, kind: str = "k", able: bool = True, torn: bool = False
) -> HeldState:
    return HeldState(version, able, torn, kind.encode(), digest.encode() if able else b"")


def no(version: StateVersion) -> HeldState:
    return held(version, able=False)


def result(ranks: list[HeldState]) -> tuple[StateVersion, int | None, tuple[int, ...]]:
    found = compare(ranks)
    return found.newest, found.giver, found.receivers


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        ([held(V(3, 3))], (V(3, 3), 0, ())),
        ([no(V(3, 3))] * 2, (V(3, 3), None, ())),
        ([held(V(2, 2)), held(V(3, 3)), held(V(3, 3))], (V(3, 3), 1, (0,))),
        # The decision counts first: a checkpoint of a higher step is older than what the job did since.
        ([held(V(0, 90)), held(V(4, 4))], (V(4, 4), 1, (0,))),
        ([held(V(0, 90)), held(V(0, 80))], (V(0, 90), 0, (1,))),
        # The lowest current rank that can give does so.
        ([no(V(3, 3)), held(V(3, 3)), held(V(1, 1))], (V(3, 3), 1, (2,))),
        # One rank that cannot take it is enough for none to be given.
        ([held(V(3, 3)), no(V(1, 1)), held(V(1, 1))], (V(3, 3), None, (1, 2))),
        ([no(V(3, 3)), held(V(1, 1))], (V(3, 3), None, (1,))),
    ],
)
def test_the_lowest_rank_with_the_newest_state_gives_it_to_all_that_are_behind(
    ranks: list[HeldState], found: tuple[StateVersion, int | None, tuple[int, ...]]
) -> None:
    assert result(ranks) == found
    assert compare(ranks).agreed


def test_at_the_start_the_lowest_rank_gives_to_all_that_differ_from_it() -> None:
    found = compare([no(V()), held(V(), "b"), held(V(), "a"), held(V(), "b"), held(V(), "a")])
    assert found == StateComparison(V(), (), ((1, 3), (2, 4)), 1)
    assert (found.differing, found.receivers) == ((2, 4), (2, 4))


def test_later_more_than_half_of_the_holders_are_right() -> None:
    three = [held(V(7, 7), digest) for digest in "abb"]
    assert compare(three) == StateComparison(V(7, 7), (), ((1, 2), (0,)), 1)
    # Those behind are given it too, and have no voice, whatever they hold.
    behind = [*three, held(V(6, 6), "a"), held(V(6, 6), "a")]
    assert result(behind) == (V(7, 7), 1, (0, 3, 4))
    # Ranks without a state have none either.
    assert result([*three, no(V(7, 7)), no(V(7, 7))]) == (V(7, 7), 1, (0,))


def test_a_rank_that_counts_the_steps_of_one_decision_otherwise_than_most_is_wrong_and_not_ahead() -> None:
    for step in (8, 6):
        found = compare([held(V(7, step), "x"), held(V(7, 7), "x"), held(V(7, 7), "x"), held(V(5, 5))])
        assert found == StateComparison(V(7, 7), (3,), ((1, 2), (0,)), 1)
        assert found.receivers == (0, 3)
    assert not compare([held(V(7, 8)), held(V(7, 7))]).agreed
    # Before the first decision steps are those of checkpoints, and the newest one counts.
    assert result([held(V(0, 8)), held(V(0, 7)), held(V(0, 7))]) == (V(0, 8), 0, (1, 2))


@pytest.mark.parametrize("digests", ["ab", "abc", "aabb", "aabc"])
def test_where_no_more_than_half_agree_nobody_gives(digests: str) -> None:
    found = compare([*(held(V(0, 40), digest) for digest in digests), held(V(0, 39))])
    assert (found.agreed, found.alike, found.giver) == (False, True, None)


@pytest.mark.parametrize("version", [V(), V(7, 7)])
def test_a_state_of_another_kind_is_never_overwritten_whoever_is_more(version: StateVersion) -> None:
    found = compare([held(version, "a"), held(version, "a"), held(version, "b", kind="another")])
    assert (found.agreed, found.alike, found.giver) == (False, False, None)
    # Who is behind has nothing yet that could be lost: optimizers begin without any state.
    assert result([held(V(7, 7)), held(V(), kind="another")]) == (V(7, 7), 0, (1,))


def test_a_torn_state_is_behind_every_other_and_is_never_given() -> None:
    torn = held(V(9, 9), "t", torn=True)
    assert result([torn, held(V(7, 7)), held(V(7, 7))]) == (V(7, 7), 1, (0,))
    assert result([torn, held(V(0, 4))]) == (V(0, 4), 1, (0,))
    assert result([torn, held(V())]) == (V(), 1, (0,))
    assert result([torn, torn]) == (V(), None, (0, 1))


@pytest.mark.parametrize(
    ("ranks", "found"),
    [
        # One was left out at step 7; the others went on to step 9 and started anew, from a checkpoint of that.
        ([held(V(0, 9)), held(V(7, 7)), held(V(0, 9))], (V(0, 9), 0, (1,))),
        ([held(V(0, 6)), held(V(7, 7))], (V(7, 7), 1, (0,))),
        ([held(V(0, 7)), held(V(7, 7))], (V(7, 7), 1, (0,))),
        ([held(V(0, 6)), held(V(8, 7)), held(V(6, 9))], (V(8, 7), 1, (0, 2))),  # it began anew in between
        ([held(V(8, 8), torn=True), held(V(7, 7)), held(V(0, 9))], (V(0, 9), 2, (0, 1))),
    ],
)
def test_where_nobody_holds_the_last_decision_a_checkpoint_of_more_steps_is_the_newest(
    ranks: list[HeldState], found: tuple[StateVersion, int | None, tuple[int, ...]]
) -> None:
    result = compare(ranks, committed=9)
    assert (result.newest, result.giver, result.receivers) == found


def test_while_a_rank_holds_the_last_decision_a_checkpoint_of_more_steps_is_older() -> None:
    found = compare([held(V(0, 90)), held(V(9, 4)), held(V(7, 7))], committed=9)
    assert (found.newest, found.giver, found.receivers) == (V(9, 4), 1, (0, 2))
