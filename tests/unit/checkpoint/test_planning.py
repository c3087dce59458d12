"""Who writes what: everything once, in about equal parts, and the same for every rank that computes it."""

from __future__ import annotations

import numpy as np
import pytest

from quicoll.checkpoint.parts import Local, Shard, parts_of
from quicoll.checkpoint.planning import LEAST, MOST, assignment
from quicoll.checkpoint.regions import Region, uncovered


def state(rank: int, world: int) -> dict[str, object]:
    rows = [64 * each // world for each in (rank, rank + 1)]
    return {
        "big": np.zeros((1000, 700), np.float32),
        "small": np.zeros(3),
        "scalar": np.float32(1),
        "empty": np.zeros((0, 4)),
        "moments": Shard(np.zeros((rows[1] - rows[0], 9)), shape=(64, 9), offset=(rows[0], 0)),
        "position": Local(np.zeros(2, np.int64)),
    }


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_all_hold_is_written_once_in_about_equal_parts_and_shards_by_their_owners(world: int) -> None:
    common: dict[str, list[Region]] = {}
    loads = []
    for rank in range(world):
        parts = parts_of(state(rank, world), node=f"n{rank}")
        load = 0
        for part, region in assignment(parts, rank=rank, world_size=world, divide=True):
            assert region.size * part.width <= MOST
            if part.replicated:
                common.setdefault(part.name, []).append(region)
                load += region.size * part.width
        own = [
            part.name for part, _ in assignment(parts, rank=rank, world_size=world, divide=True) if not part.replicated
        ]
        assert own == ["moments", "position"]
        loads.append(load)
    total = 1000 * 700 * 4 + 3 * 8 + 4
    assert sum(loads) == total
    for name, shape in {"big": (1000, 700), "small": (3,), "scalar": ()}.items():
        assert uncovered(Region.whole(shape), common[name]) is None
    assert max(loads) <= total / world + 2 * max(LEAST, total / (4 * world))


def test_where_disks_are_not_shared_every_rank_writes_all_that_it_holds() -> None:
    for rank in range(3):
        parts = parts_of(state(rank, 3), node=f"n{rank}")
        chosen = assignment(parts, rank=rank, world_size=3, divide=False)
        for part in parts:
            assert uncovered(part.region, [region for each, region in chosen if each is part]) is None
