"""Turns of fragments in a round: by numbers alone, each once, none under way at the end."""

from __future__ import annotations

from itertools import product

import pytest

from quicoll.errors import LocalError
from quicoll.train.diloco_turns import FragmentTurn, cut_fragments, turns_of


def test_one_fragment_without_delay_is_exchanged_and_applied_at_the_end() -> None:
    assert turns_of(100, 1, 0) == (FragmentTurn(100, 0, True), FragmentTurn(100, 0, False))


def test_turns_are_spread_over_the_round_and_each_result_waits_for_the_delay() -> None:
    turns = turns_of(10, 2, 3)
    assert [(turn.at, turn.fragment, turn.begins) for turn in turns] == [
        (2, 0, True), (5, 0, False), (7, 1, True), (10, 1, False),
    ]  # fmt: skip


@pytest.mark.parametrize(("every", "fragments"), list(product([1, 2, 7, 10, 16, 100], [1, 2, 3, 7, 8])))
def test_every_fragment_begins_and_is_applied_once_a_delay_later_and_the_last_at_the_end(
    every: int, fragments: int
) -> None:
    if fragments > every:
        with pytest.raises(LocalError, match="at most every"):
            turns_of(every, fragments, 0)
        return
    for delay in range(-(-every // fragments) + 1):
        turns = turns_of(every, fragments, delay)
        begun: dict[int, int] = {}
        applied: list[int] = []
        for before, turn in zip([0, *(each.at for each in turns)], turns, strict=False):
            assert 0 <= before <= turn.at <= every
            if turn.begins:
                assert turn.fragment not in begun
                begun[turn.fragment] = turn.at
            else:
                assert turn.at == begun[turn.fragment] + delay
                applied.append(turn.fragment)
        assert applied == list(range(fragments))
        assert turns[-1].at == every


def test_what_was_under_way_is_applied_before_the_next_exchange_begins_at_the_same_step() -> None:
    turns = turns_of(4, 2, 2)
    assert [(turn.at, turn.fragment, turn.begins) for turn in turns] == [
        (0, 0, True), (2, 0, False), (2, 1, True), (4, 1, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0, 1, 0), "every and fragments are 1 or more"),
        ((10, 0, 0), "every and fragments are 1 or more"),
        ((10, 2, -1), "delay 0 or more"),
        ((10, 11, 0), "11 fragments have no turn each in 10 inner steps"),
        ((10, 1, 11), "a delay of 11 inner steps is longer"),
        ((10, 4, 4), "which is 3 of the 10 inner steps of a round with 4 fragments"),
        ((2.5, 1, 0), "every"),
    ],
)
def test_a_round_that_cannot_be_is_refused(numbers: tuple[int, int, int], words: str) -> None:
    with pytest.raises(LocalError, match=words):
        turns_of(*numbers)


@pytest.mark.parametrize(
    ("sizes", "fragments", "lengths"),
    [
        ([5], 1, [1]),
        ([1, 1, 1, 1], 2, [2, 2]),
        ([100, 1, 1, 1], 2, [1, 3]),
        ([1, 1, 1, 100], 2, [3, 1]),
        ([100, 1, 1, 1], 4, [1, 1, 1, 1]),
        ([0, 0, 8, 0], 3, [1, 2, 1]),
    ],
)
def test_fragments_are_runs_of_whole_parameters_of_nearly_equal_size(
    sizes: list[int], fragments: int, lengths: list[int]
) -> None:
    cuts = cut_fragments(sizes, fragments)
    assert [len(cut) for cut in cuts] == lengths
    assert [number for cut in cuts for number in cut] == list(range(len(sizes)))


def test_more_fragments_than_parameters_are_refused() -> None:
    with pytest.raises(LocalError, match="5 fragments of 4 parameters"):
        cut_fragments([1, 1, 1, 1], 5)
