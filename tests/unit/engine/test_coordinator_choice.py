"""Which coordinator a rank dials: in turn, who is named, and back to who named one that does not answer."""

from __future__ import annotations

import pytest

from quicoll.engine.coordinator_choice import CoordinatorChoice
from quicoll.errors import LocalError

SECOND = 1_000_000_000
AVOID = 2 * SECOND
A, B, C = ("10.0.0.1", 1), ("10.0.0.2", 1), ("10.0.0.3", 1)


def choice(*addresses: tuple[str, int]) -> CoordinatorChoice:
    return CoordinatorChoice(addresses, avoid_ns=AVOID)


def test_those_that_fail_are_followed_by_the_next_in_turn() -> None:
    tried = choice(A, B, C)
    seen = []
    for at in range(5):
        seen.append(tried.present)
        tried.failed(now_ns=at * SECOND)
    assert seen == [A, B, C, A, B]


def test_who_is_named_is_dialled_unless_it_is_there_or_nobody_of_ours_or_has_failed_a_moment_ago() -> None:
    tried = choice(A, B, C)
    assert not tried.named(A, now_ns=0)
    assert not tried.named(("10.9.9.9", 1), now_ns=0)
    tried.failed(now_ns=SECOND)
    assert tried.present == B
    assert not tried.named(A, now_ns=SECOND + AVOID - 1)
    assert tried.named(A, now_ns=SECOND + AVOID)
    assert tried.present == A


def test_who_reaches_the_last_one_only_stays_there_but_for_trials_of_the_leader() -> None:
    tried = choice(A, B, C)
    now_ns, there_ns, dials = 0, 0, []
    while now_ns < 60 * SECOND:
        dials.append(tried.present)
        if tried.present != C:
            now_ns += 2 * SECOND  # a link is tried
            tried.failed(now_ns=now_ns)
        while tried.present == C and not tried.named(A, now_ns=now_ns):
            now_ns += SECOND // 10
            there_ns += SECOND // 10
    assert dials.count(B) == 1
    assert there_ns > 25 * SECOND


def test_one_that_was_named_and_has_failed_is_followed_by_who_named_it_and_that_by_the_next() -> None:
    tried = choice(A, B, C)
    tried.failed(now_ns=0)
    assert tried.named(C, now_ns=0)
    tried.failed(now_ns=SECOND)
    assert tried.present == B
    tried.failed(now_ns=SECOND)
    assert tried.present == C


def test_a_rank_needs_an_address_and_takes_each_once() -> None:
    assert choice(A, B, A).addresses == (A, B)
    with pytest.raises(LocalError, match="the address of a coordinator"):
        choice()
