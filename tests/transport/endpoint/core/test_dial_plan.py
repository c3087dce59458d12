"""Dialling in rounds: each address once, families in turn, the one that worked first, patience that grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll_transport.endpoint.core.dial_plan import MAX_CANDIDATES, DialPlan, alternate

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

MS = 1_000_000
V4 = [("192.0.2.1", 1), ("192.0.2.2", 1), ("192.0.2.3", 1)]
V6 = [("2001:db8::1", 1, 0, 0), ("2001:db8::2", 1, 0, 0)]


def test_families_alternate_beginning_with_the_first() -> None:
    assert alternate([*V6, *V4]) == [V6[0], V4[0], V6[1], V4[1], V4[2]]
    assert alternate([*V4, *V6, *V4]) == [V4[0], V6[0], V4[1], V6[1], V4[2]]
    assert alternate([]) == []


def rest(plan: DialPlan) -> list[Address]:
    found = []
    while (address := plan.next()) is not None:
        found.append(address)
    return found


def test_a_round_tries_each_address_once() -> None:
    plan = DialPlan()
    assert plan.next() is None
    plan.begin([*V4, *V6])
    assert plan.more
    assert rest(plan) == alternate([*V4, *V6])
    assert not plan.more


def test_the_address_that_worked_goes_first_in_the_next_round() -> None:
    plan = DialPlan()
    plan.begin(V4)
    plan.next()
    assert plan.next() == V4[1]
    plan.worked()
    assert not plan.more, "the rest of a round that succeeded is not dialled"
    plan.begin(V4)
    assert rest(plan) == [V4[1], V4[0], V4[2]]
    plan.begin([V4[2], V4[0]])
    assert rest(plan) == [V4[2], V4[0]], "an address that is no longer the peer's is not dialled"


def test_patience_doubles_with_every_round_up_to_the_handshake() -> None:
    plan = DialPlan()
    seen = []
    for _ in range(6):
        plan.begin(V4)
        seen.append(plan.patience_ns(3000 * MS) // MS)
    assert seen == [250, 500, 1000, 2000, 3000, 3000]
    plan.worked()
    plan.begin(V4)
    assert plan.patience_ns(3000 * MS) == 250 * MS


def test_a_single_address_has_all_the_time() -> None:
    plan = DialPlan()
    plan.begin(V4[:1])
    assert plan.patience_ns(3000 * MS) == 3000 * MS


def test_reasons_name_their_addresses_where_there_are_several() -> None:
    plan = DialPlan()
    plan.begin(V4[:1])
    plan.next()
    assert plan.failed("refused") == "refused"
    plan.begin([V4[0], V6[0]])
    plan.next()
    plan.failed("refused")
    plan.next()
    assert plan.failed("no answer") == "192.0.2.1:1: refused; [2001:db8::1]:1: no answer"


def test_a_round_is_bounded_whatever_a_resolver_says() -> None:
    plan = DialPlan()
    plan.begin([("192.0.2.1", port) for port in range(1, 1000)])
    assert len(rest(plan)) == MAX_CANDIDATES


def test_an_address_that_becomes_known_in_a_round_is_tried_last_in_it_and_once() -> None:
    plan = DialPlan()
    assert not plan.add(V4[0]), "no round is under way"
    plan.begin(V4[:1])
    plan.next()
    assert plan.patience_ns(3000 * MS) == 3000 * MS
    assert plan.add(V4[1])
    assert not plan.add(V4[1])
    assert not plan.add(V4[0])
    assert plan.patience_ns(3000 * MS) == 250 * MS
    assert rest(plan) == [V4[1]]


def test_a_round_does_not_grow_beyond_its_bound() -> None:
    plan = DialPlan()
    plan.begin([(f"192.0.2.{n}", 1) for n in range(MAX_CANDIDATES)])
    plan.next()
    assert not plan.add(("198.51.100.1", 1))
