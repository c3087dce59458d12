"""Who dials whom first, where, and what has to be opened."""

from __future__ import annotations

from itertools import product

import pytest

from quicoll.engine.ways import (
    DIALS_TOO_S,
    LATE_OPENER,
    OPENERS_S,
    behind_nat,
    dials_first,
    opened_address,
    own_addresses,
)
from quicoll.membership.view import Member


def member(node: str, *, nat: bool = False) -> Member:
    seen = (f"203.0.113.{ord(node)}", 40000) if nat else None
    return Member(rank=0, node=node, incarnation=1, addresses=((f"10.0.0.{ord(node)}", 5000),), seen_at=seen)


@pytest.mark.parametrize(("a_nat", "b_nat"), list(product((False, True), repeat=2)))
def test_exactly_one_of_two_dials_first_and_it_is_the_one_behind_nat_where_there_is_one(
    a_nat: bool, b_nat: bool
) -> None:
    a, b = member("a", nat=a_nat), member("b", nat=b_nat)
    assert dials_first(a, b) is not dials_first(b, a)
    assert dials_first(a, b) is (a_nat if a_nat is not b_nat else True)
    assert behind_nat(a, b) is behind_nat(b, a) is (a_nat or b_nat)


def test_what_is_announced_is_dialled_first_and_then_where_the_coordinator_sees_it() -> None:
    assert own_addresses(member("a")) == [("10.0.0.97", 5000)]
    assert own_addresses(member("a", nat=True)) == [("10.0.0.97", 5000), ("203.0.113.97", 40000)]


def test_who_is_dialled_opens_towards_where_the_other_one_sends_from() -> None:
    assert opened_address(member("c")) == ("10.0.0.99", 5000)
    assert opened_address(member("b", nat=True)) == ("203.0.113.98", 40000)
    assert opened_address(Member(rank=0, node="x", incarnation=1)) is None


def test_openers_are_few_and_in_order() -> None:
    assert list(OPENERS_S) == sorted(OPENERS_S)
    assert OPENERS_S[0] == 0.0
    assert len(OPENERS_S) <= 8


def test_who_opens_dials_as_well_when_the_other_one_has_tried_the_first_of_its_addresses() -> None:
    assert DIALS_TOO_S in OPENERS_S
    assert 0.2 <= OPENERS_S[LATE_OPENER] < DIALS_TOO_S
    assert 0.5 <= DIALS_TOO_S <= 1.0
