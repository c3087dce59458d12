"""The desk of a relay: which links it answers on, and what it forgets with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quicoll.errors import LocalError
from quicoll.membership.messages import AskRelay
from quicoll.membership.relaying import RelayDesk, relay_limits
from quicoll_transport.relay.table import RelayLimits


def link(node: str, address: Any) -> Any:
    return SimpleNamespace(node=node, proved_address=address)


def desk(**limits: int) -> RelayDesk:
    io: Any = SimpleNamespace()
    loop: Any = SimpleNamespace(time=lambda: 0.0)
    return RelayDesk(io, RelayLimits(**limits), loop=loop)


def test_a_pair_that_has_asked_is_passed_on_to_where_its_links_are() -> None:
    made, a, b = desk(), link("a", ("192.0.2.1", 1)), link("b", ("192.0.2.2", 2))
    ab, ba = made.ask(a, AskRelay(peer="b")).label, made.ask(b, AskRelay(peer="a")).label
    assert made.table.forward(ab, a.proved_address, 10, 0) == (ba, b.proved_address)
    b.proved_address = ("192.0.2.2", 3)
    assert made.table.forward(ab, a.proved_address, 10, 0) == (ba, ("192.0.2.2", 3))
    b.proved_address = None
    assert made.table.forward(ab, a.proved_address, 10, 0) is None


def test_a_node_that_comes_again_asks_again_and_the_end_of_its_first_link_changes_nothing() -> None:
    made, first, second = desk(), link("a", ("192.0.2.1", 1)), link("a", ("192.0.2.1", 9))
    b = link("b", ("192.0.2.2", 2))
    old = made.ask(first, AskRelay(peer="b")).label
    ba = made.ask(b, AskRelay(peer="a")).label
    new = made.ask(second, AskRelay(peer="b")).label
    assert new != old
    made.ended(first)
    assert made.table.forward(ba, b.proved_address, 10, 0) == (new, ("192.0.2.1", 9))
    made.ended(second)
    assert made.table.forward(ba, b.proved_address, 10, 0) is None
    assert len(made.table) == 1


def test_who_asks_for_too_many_or_for_itself_hears_why_not() -> None:
    made, a = desk(legs=1), link("a", ("192.0.2.1", 1))
    assert made.ask(a, AskRelay(peer="a")).label == b""
    assert made.ask(a, AskRelay(peer="b")).label
    refused = made.ask(a, AskRelay(peer="c"))
    assert (refused.peer, refused.label) == ("c", b"")
    assert "too many" in refused.reason


def test_a_rate_is_that_of_all_and_half_of_it_that_of_one_direction() -> None:
    assert relay_limits(100.0) == RelayLimits(leg_rate=50_000_000, total_rate=100_000_000)
    for wrong in (0.0, 1001.0, float("nan")):
        with pytest.raises(LocalError, match="megabytes a second"):
            relay_limits(wrong)
