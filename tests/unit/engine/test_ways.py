"""Who dials whom, where, and what has to be opened first."""

from __future__ import annotations

from itertools import product

import pytest

from quicoll.engine.ways import OPENERS_S, behind_nat, dials, opened_address, own_addresses
from quicoll.membership.view import Member


def member(node: str, *, nat: bool = False) -> Member:
    seen = (f"203.0.113.{ord(node)}", 40000) if nat else None
    return Member(rank=0, node=node, incarnation=1, addresses=((f"10.0.0.{ord(node)}", 5000),), seen_at=seen)


@pytest.mark.parametrize(("a_nat", "b_nat"), list(product((False, True), repeat=2)))
def test_exactly_one_of_two_dials_and_it_is_the_one_behind_nat_where_there_is_one(a_nat: bool, b_nat: bool) -> None:
    a, b = member("a", nat=a_nat), member("b", nat=b_nat)
    assert dials(a, b) is not dials(b, a)
    assert dials(a, b) is (a_nat if a_nat is not b_nat else True)
    assert behind_nat(a, b) is behind_nat(b, a) is (a_nat or b_nat)


def test_what_is_announced_is_dialled_first_and_then_where_the_coordinator_sees_it() -> None:
    assert own_addresses(member("a")) == [("10.0.0.97", 5000)]
    assert own_addresses(member("a", nat=True)) == [("10.0.0.97", 5000), ("203.0.113.97", 40000)]


def test_only_a_rank_behind_nat_opens_and_towards_where_the_other_one_sends_from() -> None:
    behind, open_ = member("b", nat=True), member("a")
    assert opened_address(open_, behind) is None
    assert opened_address(None, behind) is None
    assert opened_address(behind, member("a", nat=True)) == ("203.0.113.97", 40000)
    assert opened_address(behind, open_) == ("10.0.0.97", 5000)
    assert opened_address(behind, Member(rank=0, node="x", incarnation=1)) is None


def test_openers_are_few_and_in_order() -> None:
    assert list(OPENERS_S) == sorted(OPENERS_S)
    assert OPENERS_S[0] == 0.0
    assert len(OPENERS_S) <= 8
