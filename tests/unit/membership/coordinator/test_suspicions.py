"""Suspicions: which nodes a view is formed without, so that no broken pair is left."""

from __future__ import annotations

import itertools
import random

from coordinator_bench import letters
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.membership.coordinator.suspicions import vertex_cover


@given(st.integers(2, 9), st.integers(0, 2**32))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_cover_leaves_no_broken_pair_and_does_not_depend_on_the_order_of_complaints(size: int, seed: int) -> None:
    chance = random.Random(seed)
    nodes = letters(size)
    pairs = [pair for pair in itertools.permutations(nodes, 2) if chance.random() < 0.2]
    out = vertex_cover(nodes, pairs)
    assert all(one in out or other in out for one, other in pairs)
    chance.shuffle(pairs)
    assert vertex_cover(nodes, [(other, one) for one, other in pairs] + pairs[:2]) == out
    # nobody is left out in vain: put back alone, each would meet a broken pair
    assert all(
        any(node in pair and (set(pair) - {node}).isdisjoint(out[:index]) for pair in pairs)
        for index, node in enumerate(out)
    )
