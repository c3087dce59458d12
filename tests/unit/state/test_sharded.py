"""What a user declares of a sharded state, and what is refused."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from memory_group import Hub, MemoryGroup

from quicoll import blocking
from quicoll.errors import LocalError
from quicoll.membership.view import Member, View
from quicoll.state.rank_state import SHARDED, RankState
from quicoll.state.sharded import PieceGroups, Sharded, ShardedSet

VIEW = View(view_id=3, members=(Member(rank=0, node="n0", incarnation=1),), seed=0, committed_step=0, committed_view=0)


def alone(**options: Any) -> tuple[Sharded, ShardedSet]:
    """On one rank, which owns all of it."""
    made = Sharded(10, {"m": "float32", "n": "int64"}, blocks=4, **options)
    group: Any = MemoryGroup(Hub(1), 0)
    found = ShardedSet({"a": made}, PieceGroups(group, group, group))
    found.attach(0)
    for block in range(4):
        for part in made.pieces.place(block):
            part[:] = block
        made.pieces.keep(block)
    made.pieces.settle(range(4))
    return made, found


def step(number: int = 1) -> Any:
    callbacks: list[Any] = []
    return SimpleNamespace(number=number, view=VIEW, on_commit=callbacks.append, callbacks=callbacks)


@pytest.mark.parametrize(
    "arguments",
    [
        {"length": -1},
        {"blocks": 0},
        {"blocks": 1 << 20},
        {"backup": -1},
        {"pieces": {}},
        {"pieces": {"m": "float31"}},
        {"pieces": {3: "float32"}},
        {"length": 2.5},
    ],
)
def test_what_cannot_be_declared_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(LocalError):
        Sharded(**{"length": 10, "pieces": {"m": "float32"}, "blocks": 4, **arguments})


def test_bounds_depend_on_the_number_of_ranks_alone() -> None:
    made, _ = alone()
    assert made.bounds(1) == ((0, 10),)
    assert made.bounds(3) == ((0, 2), (2, 5), (5, 10))
    assert made.bounds(6)[0] == (0, 0)
    assert made.counts == (10,)
    assert made.mine == slice(0, 10)


async def test_values_count_from_the_commit_on_and_are_not_written_in_place() -> None:
    made, _ = alone()
    with pytest.raises(ValueError, match="read-only"):
        made["m"][0] = 1
    new = np.arange(10, dtype=np.float32)
    attempt = step()
    await made.stage(attempt, {"m": new, "n": np.arange(10)})
    new[:] = -1  # the caller's again
    assert made["m"].tolist() == [0, 0, 1, 1, 1, 2, 2, 3, 3, 3]
    attempt.callbacks[0]()
    assert made["m"].tolist() == list(range(10))
    assert made["n"].dtype == np.int64
    assert made.pieces.agreed
    assert (made.pieces.since, made.pieces.owners) == (1, (("n0",),))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"m": np.zeros(10, np.float32)}, "is made of m, n"),
        ({"m": np.zeros(10), "n": np.zeros(10, np.int64)}, "elements of float64 are staged"),
        ({"m": np.zeros(9, np.float32), "n": np.zeros(10, np.int64)}, "9 elements"),
    ],
)
async def test_values_of_another_kind_are_refused(values: Any, said: str) -> None:
    made, _ = alone()
    with pytest.raises(LocalError, match=said):
        await made.stage(step(), values)


def test_without_an_event_loop_the_step_stages() -> None:
    made, _ = alone()
    inner, home = step(), asyncio.run
    blocking.Step(inner, cast("Any", home)).stage(made, {"m": np.ones(10, np.float32), "n": np.zeros(10, np.int64)})
    inner.callbacks[0]()
    assert made["m"].tolist() == [1] * 10


async def test_it_belongs_to_one_job_and_a_step_of_it() -> None:
    made, found = alone()
    with pytest.raises(LocalError, match="inside of a step"):
        await made.stage(step(0), {})
    with pytest.raises(LocalError, match="registered already"):
        ShardedSet({"b": made}, found.groups)
    with pytest.raises(LocalError, match="belongs to no job"):
        _ = Sharded(1, {"m": "int8"}, blocks=1).counts
    with pytest.raises(LocalError, match="no piece 'x'"):
        _ = made["x"]
    wrong: Any = {"b": 3}
    with pytest.raises(LocalError, match="sharded names"):
        ShardedSet(wrong, found.groups)


async def test_torch_tensors_of_types_that_numpy_has_not_keep_their_bits() -> None:
    made = Sharded(10, {"m": "bfloat16"}, blocks=4, torch=True)
    group: Any = MemoryGroup(Hub(1), 0)
    group.world_size = 1
    ShardedSet({"a": made}, PieceGroups(group, group, group)).attach(0)
    for block in range(4):
        for part in made.pieces.place(block):
            part[:] = 0
        made.pieces.keep(block)
    made.pieces.settle(range(4))
    attempt, new = step(), torch.linspace(0, 1, 10, dtype=torch.bfloat16)
    await made.stage(attempt, {"m": new})
    attempt.callbacks[0]()
    assert made["m"].dtype == torch.bfloat16
    assert torch.equal(made["m"], new)


def test_the_record_goes_with_the_replicated_state_and_load_does_not_see_it() -> None:
    made, found = alone()
    state, held = RankState(), {"w": np.ones(2)}
    loaded: list[Any] = []
    other = Sharded(10, {"m": "float32", "n": "int64"}, blocks=4)
    state.register(lambda: held, loaded.append, (), ShardedSet({"a": other}, found.groups))
    assert state.save is not None
    assert state.load is not None
    assert sorted(state.save()) == [SHARDED, "w"]
    record = {**made.pieces.record(), "since": 7, "owners": "n0\nn1"}
    state.load({"w": np.zeros(2), SHARDED: {"a": record}})
    assert [sorted(each) for each in loaded] == [["w"]]
    assert (other.pieces.since, other.pieces.owners) == (7, (("n0",), ("n1",)))
    with pytest.raises(LocalError, match="sharded state 'a': the job's is of 3 elements"):
        state.load({SHARDED: {"a": {**record, "made_of": "3 elements"}}})
    with pytest.raises(LocalError, match="other ones"):
        state.load({SHARDED: {}})
    taken = RankState()
    with pytest.raises(LocalError, match="is the library's"):
        taken.register(lambda: {SHARDED: 1}, loaded.append, (), found)
