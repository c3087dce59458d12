"""What a state is of: who is refused by it, and that this is found before anything of a state is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_group import Hub, MemoryGroup

from quicoll.errors import Diverged, LocalError, PeerError
from quicoll.membership.view import Member, View
from quicoll.state.description import Description, Misfits, misfits
from quicoll.state.rank_state import RankState
from quicoll.state.synchronisation import synchronise
from quicoll.state.version import HeldState, StateVersion, compare

A, B = ({"model": "line", "rate": "0.1"}, {"model": "line", "rate": "0.2"})


def held(described: str, *, step: int = 3, able: bool = True, torn: bool = False) -> HeldState:
    return HeldState(StateVersion(step, step), able=able, torn=torn, described=described.encode())


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([held("a"), held("a")], None),
        ([held("a"), held("b", able=False)], None),  # registered nothing
        ([held("a"), held("b"), held("a")], Misfits(((0, 2), (1,)), agreed=True)),
        ([held("b", step=1), held("a"), held("b", step=1)], Misfits(((1,), (0, 2)), agreed=True)),  # the job's is newer
        ([held("b", torn=True), held("a")], Misfits(((1,), (0,)), agreed=True)),
        ([held("a"), held("b")], Misfits(((0,), (1,)), agreed=False)),
        ([held("a"), held("b"), held("c"), held("a")], Misfits(((0, 3), (1,), (2,)), agreed=False)),
        ([held("", step=0), held("a", step=0), held("a", step=0)], Misfits(((1, 2), (0,)), agreed=True)),
    ],
)
def test_what_most_holders_of_the_newest_state_describe_is_right(told: list[HeldState], expected: Any) -> None:
    assert misfits(told, compare(told)) == expected


def test_a_spare_has_no_say_and_is_refused_like_others() -> None:
    told = [held("a"), held("b"), held("b")]
    assert misfits(told, compare(told[:1])) == Misfits(((0,), (1, 2)), agreed=True)


def test_descriptions_are_equal_where_names_texts_and_order_are() -> None:
    assert Description.of(dict(A)) == Description.of(dict(A))
    others = [A, B, {}, {"rate": "0.1", "model": "line"}, {"model": "line rate", "": "0.1"}, {"model": "line"}]
    assert len({Description.of(each).digest for each in others}) == len(others)


@pytest.mark.parametrize("wrong", [{"model": 3}, {3: "model"}, ["model"]])
def test_what_is_no_description_is_refused(wrong: Any) -> None:
    with pytest.raises(LocalError, match="described by names and texts"):
        RankState().register(dict, lambda state: None, architecture=wrong)


async def bring_together(*ranks: tuple[int, Mapping[str, str]]) -> tuple[list[Any], Hub, list[Any]]:
    """Ranks that hold the state after a step and say what it is of; what each got, and the weights that each has."""
    hub, weights = Hub(len(ranks)), [{"w": np.full(4, float(step))} for step, _ in ranks]
    members = tuple(Member(rank=rank, node=f"n{rank}", incarnation=1) for rank in range(len(ranks)))
    last = max(step for step, _ in ranks)
    view = View(view_id=7, members=members, seed=0, committed_step=last, committed_view=0, min_world_size=1)

    async def one(rank: int) -> Any:
        state, group = RankState(), MemoryGroup(hub, rank)
        state.version = StateVersion(ranks[rank][0], ranks[rank][0])
        state.register(lambda: weights[rank], weights[rank].update, architecture=ranks[rank][1])
        teacher: Any = SimpleNamespace(pupils=0)
        member: Any = group
        return await synchronise(state, member, view, check_every=0, learn_from=0, teacher=teacher)

    ends = await asyncio.gather(*map(one, range(len(ranks))), return_exceptions=True)
    return ends, hub, [each["w"].tolist() for each in weights]


async def test_a_rank_behind_of_another_description_is_refused_by_all_before_anything_is_sent_to_it() -> None:
    (one, odd, other), hub, weights = await bring_together((5, A), (0, B), (5, A))
    assert isinstance(odd, LocalError)
    assert "this worker, n1, does not train what the job trains" in str(odd)
    assert "'rate': 0.1 on n0, n2 and 0.2 on n1" in str(odd)
    for each in (one, other):
        assert isinstance(each, PeerError)
        assert (each.rank, each.node) == (1, "n1")
        assert "n1 does not train what the job trains, and is refused" in str(each)
    assert set(hub.log) == {"all_gather"}
    assert weights == [[5.0] * 4, [0.0] * 4, [5.0] * 4]


async def test_the_same_state_of_another_description_is_refused_too() -> None:
    ends, hub, _ = await bring_together((5, A), (5, A), (5, {}))
    assert [type(each) for each in ends] == [PeerError, PeerError, LocalError]
    assert "'model': line on n0, n1 and nothing on n2" in str(ends[2])
    assert set(hub.log) == {"all_gather"}


async def test_where_nobody_knows_what_is_right_all_stop_and_nothing_is_sent() -> None:
    ends, hub, weights = await bring_together((0, A), (0, B))
    assert [type(each) for each in ends] == [Diverged, Diverged]
    assert [(each.nodes, each.tensor) for each in ends] == [(("n0", "n1"), "rate")] * 2
    assert set(hub.log) == {"all_gather"}
    assert weights == [[0.0] * 4] * 2
