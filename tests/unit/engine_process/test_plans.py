"""Plans and networks come to another process as they are, and each once."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from plan_networks import alike, plans, reductions, two_sites

from quicoll.engine_process.plans import ValuesHeard, ValuesTold, network_of, network_row, plan_of, plan_row

if TYPE_CHECKING:
    from quicoll.plan import Plan


def many_plans() -> list[Plan]:
    """Of every collective and algorithm, with chunks, several leaves of a rank, and partial results that are wide."""
    found: list[Plan] = []
    for sizes in (0, 4, 4_000, 400_000):
        for algorithm in ("direct", "tree", "exchange", "hierarchical", "ring"):
            found += reductions(algorithm, alike(4), sizes, chunk_bytes=100_000)
        found += reductions("direct", two_sites(2), sizes, leaves=7, wide_itemsize=44, loose=3, chunk_bytes=9_000)
        found += reductions("tree", alike(3), sizes, op="reduce", root=1, chunk_bytes=9_000)
        found += plans("broadcast", 3, root=2, elements=sizes, itemsize=1, chunk_bytes=1_000, algorithm="tree")
        found += plans("all_gather", 3, counts=(sizes, 0, 5), itemsize=2, chunk_bytes=1_000, algorithm="direct")
        found += plans("send", 2, source=0, to=1, elements=sizes, itemsize=4, chunk_bytes=1_000)
    counts = ((1, 2, 3), (0, 0, 9_000), (7, 7, 7))
    return [*found, *plans("all_to_all", 3, counts=counts, itemsize=4, chunk_bytes=1_000), *plans("barrier", 3)]


def test_every_plan_is_heard_as_it_was_told() -> None:
    told, heard = ValuesTold(plan_row), ValuesHeard(plan_of)
    for plan in many_plans():
        found = heard.value(*told.word(plan))
        assert found == plan
        assert [lane.waits for lane in found.lanes] == [lane.waits for lane in plan.lanes]


@pytest.mark.parametrize("network", [alike(3), two_sites(4)])
def test_a_network_is_heard_as_it_was_told(network: object) -> None:
    told, heard = ValuesTold(network_row), ValuesHeard(network_of)
    assert heard.value(*told.word(network)) == network


def test_a_plan_is_told_once_and_both_forget_the_same_ones() -> None:
    told, heard = ValuesTold(plan_row), ValuesHeard(plan_of)
    many = many_plans()[:150]
    assert len(many) > 100
    first = many[0]
    assert told.word(first)[1]
    number, again = told.word(first)
    assert not again
    with pytest.raises(KeyError):
        heard.value(number, b"")
    told = ValuesTold(plan_row)
    for plan in many:
        assert heard.value(*told.word(first)) == first  # used again and again, it is never forgotten
        word = told.word(plan)
        assert heard.value(*word) == plan
        assert bool(word[1]) is (plan is not first)
    word = told.word(many[1])
    assert word[1]  # forgotten, so told anew
    assert heard.value(*word) == many[1]


def test_another_plan_at_the_address_of_one_that_is_gone_is_not_taken_for_it() -> None:
    told = ValuesTold(plan_row)
    for elements in range(1, 300):
        plan = plans("broadcast", 2, root=0, elements=elements, itemsize=4, chunk_bytes=64, algorithm="tree")[0]
        assert told.word(plan)[1]
        del plan
        gc.collect(0)
