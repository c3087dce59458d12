"""The roster: how long a node that was left out has to wait."""

from __future__ import annotations

from quicoll.membership.coordinator.roster import Backoff


def test_a_back_off_ends_when_a_node_was_in_for_long() -> None:
    backoff = Backoff()
    assert [backoff.exclude(0, shortest_ns=1, longest_ns=5) for _ in range(4)] == [1, 2, 4, 5]
    assert backoff.exclude(5 + 10, shortest_ns=1, longest_ns=5) == 15 + 5
    assert backoff.exclude(20 + 11, shortest_ns=1, longest_ns=5) == 31 + 1
