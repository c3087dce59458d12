"""Who is waited for in a round, what workers count for, and the journal of it."""

from __future__ import annotations

import pytest

from quicoll.errors import LocalError
from quicoll.train.diloco_journal import RoundEntry, RoundJournal
from quicoll.train.diloco_quorum import StretchEnds, demand_quorum, shares_in, stretches_of
from quicoll.train.diloco_turns import turns_of


def test_a_rank_goes_on_until_there_is_a_quorum_and_then_for_the_grace() -> None:
    here = StretchEnds(3, 500)
    assert not here.over(10**12)
    here.arrived(2, 1000)
    assert not here.over(10**12)
    here.arrived(1, 2000)
    assert [here.over(now) for now in (2000, 2499, 2500, 9000)] == [False, False, True, True]


def test_who_comes_after_the_quorum_does_not_begin_the_grace_again() -> None:
    here = StretchEnds(1, 500)
    here.arrived(1, 1000)
    here.arrived(1, 1400)
    assert here.over(1500)


def test_a_rank_with_several_workers_counts_with_all_and_one_without_any_with_none() -> None:
    here = StretchEnds(2, 0)
    here.arrived(0, 1)
    assert not here.over(1)
    here.arrived(3, 2)
    assert here.over(2)


@pytest.mark.parametrize(
    ("every", "fragments", "delay", "lengths"),
    [(6, 1, 0, [6, 0]), (6, 1, 2, [4, 2]), (6, 2, 2, [1, 3, 2]), (6, 2, 3, [0, 3, 3]), (10, 3, 0, [4, 3, 3, 0])],
)
def test_stretches_end_where_exchanges_begin_and_hold_each_inner_step_once(
    every: int, fragments: int, delay: int, lengths: list[int]
) -> None:
    found = stretches_of(turns_of(every, fragments, delay), every)
    assert [len(each) for each in found] == lengths
    assert [step for each in found for step in each] == list(range(1, every + 1))


def test_what_a_worker_counts_for_is_what_it_did_since_the_exchange_of_that_fragment_before() -> None:
    stretches = (range(1, 2), range(2, 5), range(5, 7))
    before, now = [[1, 1], [3, 0], [2, 1]], [[1, 1], [2, 3], [2, 2]]
    assert shares_in(0, stretches, before, now[:1]) == ([6, 2], 6)
    assert shares_in(1, stretches, before, now[:2]) == ([5, 5], 6)
    assert shares_in(1, stretches, None, now[:2]) == ([3, 4], 4)


def test_a_journal_is_read_from_its_text() -> None:
    entries = [RoundEntry(2, anew=(0, 3)), RoundEntry(7, done=((2, 1, 2, 2), (0, 0, 0, 0)))]
    journal = RoundJournal().with_entry(entries[0]).with_entry(RoundEntry(5)).with_entry(entries[1])
    again = RoundJournal.parse(journal.text)
    assert again.text == journal.text == '[{"number":2,"anew":[0,3]},{"number":7,"done":[[2,1,2,2],[0,0,0,0]]}]'
    assert [again.of_round(number) for number in (2, 5, 7)] == [entries[0], RoundEntry(5), entries[1]]
    again.demand(4, (range(1, 3), range(3, 3)))


def test_a_journal_in_which_nothing_happened_is_no_text() -> None:
    assert RoundJournal().with_entry(RoundEntry(1)).text == ""
    assert RoundJournal.parse("").text == ""


@pytest.mark.parametrize(
    "text", ["[", "{}", '[{"number":0}]', '[{"number":1,"anew":[-1]}]', '[{"number":1,"more":2}]', '[{"number":1.5}]']
)
def test_what_is_no_journal_is_refused(text: str) -> None:
    with pytest.raises(LocalError, match="no journal of DiLoCo"):
        RoundJournal.parse(text)


@pytest.mark.parametrize(
    "entry",
    [
        RoundEntry(1, anew=(4,)),
        RoundEntry(1, done=((1, 1, 1, 1),)),
        RoundEntry(1, done=((3, 1, 1, 1), (0, 0, 0, 0))),
        RoundEntry(1, done=((1, 1, 1), (0, 0, 0))),
        RoundEntry(1, done=((), ())),
    ],
)
def test_a_journal_of_another_recipe_is_refused_by_its_round(entry: RoundEntry) -> None:
    with pytest.raises(LocalError, match="the journal's round 1 is not one of 4 workers and 2 stretches of 2, 0"):
        RoundJournal([entry]).demand(4, (range(1, 3), range(3, 3)))


def test_a_quorum_is_of_workers_that_there_are() -> None:
    demand_quorum(None, 0.0, 4)
    demand_quorum(1, 0.0, 4)
    demand_quorum(4, 3.5, 4)
    with pytest.raises(LocalError, match="grace is for the ranks"):
        demand_quorum(None, 1.0, 4)
    with pytest.raises(LocalError, match="not nan"):
        demand_quorum(2, float("nan"), 4)
