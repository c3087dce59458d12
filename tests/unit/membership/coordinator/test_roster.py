"""The roster: how long a node that was left out has to wait."""

from __future__ import annotations

from quicoll.membership.coordinator.roster import Backoff


def left_out(backoff: Backoff, now_ns: int, *, reached: bool = True) -> int:
    """It was tried, with or without having shown that it reaches the others, and is left out; return its wait."""
    backoff.reached = reached
    return backoff.exclude(now_ns, shortest_ns=1, longest_ns=5) - now_ns


def test_a_back_off_ends_when_a_node_was_in_for_long() -> None:
    backoff = Backoff()
    assert [left_out(backoff, 0) for _ in range(4)] == [1, 2, 4, 5]
    assert left_out(backoff, 5 + 5) == 5
    assert left_out(backoff, 10 + 5 + 6) == 1


def test_a_blind_trial_does_not_make_the_next_wait_longer() -> None:
    backoff = Backoff()
    assert left_out(backoff, 0) == 1
    assert (backoff.ready_ns, backoff.retry_ns) == (1, 5)
    assert left_out(backoff, 5, reached=False) == 1
    backoff.reached = True
    assert backoff.retry_ns == 6
