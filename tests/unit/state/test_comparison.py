"""The first thing in which states differ: every rank finds the same, with rows of a bounded size."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from memory_group import Hub, MemoryGroup

from quicoll.state import comparison
from quicoll.state.comparison import FirstDifference, first_difference, read, row
from quicoll.state.rank_state import RankState
from quicoll.state.tree import flatten
from quicoll.state.version import StateVersion, compare

NODES = [f"worker-{rank}" for rank in range(8)]


async def first(*states: Any) -> tuple[FirstDifference, Hub]:
    """What all ranks find; they hold these states at one version. None: none is registered."""
    hub = Hub(len(states))

    async def one(rank: int) -> FirstDifference:
        group = MemoryGroup(hub, rank)
        flat = None if states[rank] is None else flatten(states[rank])
        state = RankState()
        state.version = StateVersion(5, 5)
        held = read(await group.all_gather(row(state, flat, check_every=7, learn_from=0))).held
        found = compare(held)
        lines = () if flat is None else flat.lines
        return await first_difference(group, lines, held, found.sides, alike=found.alike)

    found = await asyncio.gather(*(one(rank) for rank in range(len(states))))
    assert all(each == found[0] for each in found)
    return found[0], hub


async def test_a_row_tells_all_that_is_compared() -> None:
    flat, state = flatten({"w": np.ones(3)}), RankState()
    state.version, state.torn, state.learned = StateVersion(1 << 40, 7), True, True
    rows = [
        row(state, flat, check_every=9, learn_from=1 << 40, pupils=3),
        row(RankState(), None, check_every=3, learn_from=0),
    ]
    told = read(np.concatenate(rows))
    assert (told.check_every, told.learn_from) == (9, 1 << 40)
    mine, other = told.held
    assert (mine.version, mine.able, mine.torn, mine.lines) == (state.version, True, True, 2)
    assert (mine.nbytes, mine.learned, other.nbytes, other.learned) == (24, True, 0, False)
    assert (mine.pupils, other.pupils) == (3, 0)
    assert (mine.kind, mine.digest) == (flat.kind_digest, flat.digest)
    assert (other.version, other.able, other.torn) == (StateVersion(), False, False)


@pytest.mark.parametrize("at", [0, 1, 700, 1999])
async def test_one_tensor_of_many_is_found(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    monkeypatch.setattr(comparison, "RANGES", 16)
    right = {f"t{number:04}": np.full(2, number) for number in range(2000)}
    wrong = right | {f"t{at:04}": np.full(2, -1), "t1999": np.full(2, -2)}
    found, hub = await first(right, wrong, None, right)
    assert found == FirstDifference(f"t{at:04}", (("int64 (2,), other bits", (1,)),))
    assert found.describe(NODES) == f"the first difference is in 't{at:04}': int64 (2,), other bits on worker-1"
    assert hub.log == ["all_gather"] * 4
    assert max(len(row) for given in hub.gathered for row in given.values()) <= 512


@pytest.mark.parametrize(
    ("states", "path", "texts"),
    [
        # The majority's first; a small value is shown.
        (({"n": 4}, {"n": 3}, {"n": 3}), "n", (("int 3", (1, 2)), ("int 4", (0,)))),
        (({"s": "secret"}, {"s": "other"}), "s", (("str, other bits", (1,)),)),
        (
            ({"w": np.ones(3)}, {"w": np.ones(4)}, {"w": np.ones(3)}),
            "w",
            (("float64 (3,)", (0, 2)), ("float64 (4,)", (1,))),
        ),
        # A value that differs too, and comes first, is not what is named where the kinds differ.
        (
            ({"a": 1.0, "w": np.ones(3)}, {"a": 2.0, "w": np.ones(3, np.float32)}),
            "w",
            (("float64 (3,)", (0,)), ("float32 (3,)", (1,))),
        ),
        (({"a": 1, "b": 2}, {"a": 1}), "", (("mapping of 2", (0,)), ("mapping of 1", (1,)))),
        (({"a": 1, "b": 2}, {"a": 1, "c": 2}), "b", (("int 2", (0,)), ("'c', int 2", (1,)))),
        (({"l": [1, 2]}, {"l": (1, 2)}), "l", (("list of 2", (0,)), ("tuple of 2", (1,)))),
    ],
)
async def test_what_differs_is_said_with_what_is_there_on_which_rank(states: Any, path: str, texts: Any) -> None:
    found, _ = await first(*states)
    assert (found.path, found.texts) == (path, texts)


async def test_a_long_path_is_cut() -> None:
    found, _ = await first({"x" * 900: 1}, {"x" * 900: 2})
    assert found.path == "x" * 240
