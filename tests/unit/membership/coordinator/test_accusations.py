"""Who is left out of a view for broken pairs, and for how long."""

from __future__ import annotations

import itertools
import random

from coordinator_bench import letters
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.membership.coordinator.accusations import Backoff, cover


@given(st.integers(2, 9), st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_cover_leaves_no_broken_pair_and_does_not_depend_on_the_order_of_complaints(size: int, seed: int) -> None:
    chance = random.Random(seed)
    nodes = letters(size)
    pairs = [pair for pair in itertools.permutations(nodes, 2) if chance.random() < 0.2]
    out = cover(nodes, pairs)
    assert all(one in out or other in out for one, other in pairs)
    chance.shuffle(pairs)
    assert cover(nodes, [(other, one) for one, other in pairs] + pairs[:2]) == out
    # nobody is left out in vain: put back alone, each would meet a broken pair
    assert all(
        any(node in pair and (set(pair) - {node}).isdisjoint(out[:index]) for pair in pairs)
        for index, node in enumerate(out)
    )


def test_a_back_off_ends_when_a_node_was_in_for_long() -> None:
    backoff = Backoff()
    assert [backoff.evict(0, shortest_ns=1, longest_ns=5) for _ in range(4)] == [1, 2, 4, 5]
    assert backoff.evict(5 + 10, shortest_ns=1, longest_ns=5) == 15 + 5
    assert backoff.evict(20 + 11, shortest_ns=1, longest_ns=5) == 31 + 1
