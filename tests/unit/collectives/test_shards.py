"""Logical shards and the leaves that a rank passes for them."""

from __future__ import annotations

import numpy as np
import pytest

from quicoll import LocalError, Shards


def test_shards_iterate_and_contain_what_this_rank_holds() -> None:
    shards = Shards(total=8, first=3, count=2, view_id=1)
    assert list(shards) == [3, 4]
    assert len(shards) == 2
    assert 4 in shards
    assert 5 not in shards


def test_there_must_be_one_leaf_for_each_shard() -> None:
    with pytest.raises(LocalError, match="1 leaves for the 2 shards of this rank, 3 to 4 of 8"):
        Shards(8, 3, 2, 1).leaves([np.ones(2)])


def test_a_rank_without_shards_has_to_say_what_the_leaves_are_like() -> None:
    shards = Shards(2, 1, 0, 1)
    with pytest.raises(LocalError, match="pass like="):
        shards.leaves([])
    assert shards.leaves([], like=np.ones(2)).values == ()
