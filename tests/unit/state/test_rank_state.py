"""What a rank registers, and the memory in which a state that comes is to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.state.manifest import TensorRecord, decode_manifest, encode_manifest
from quicoll.state.rank_state import RankState
from quicoll.state.tree import flatten
from quicoll.state.version import StateVersion


def registered(held: Any, own: tuple[str, ...] = ()) -> RankState:
    state = RankState()
    state.register(lambda: held, lambda new: None, own)
    return state


def records_of(held: Any) -> tuple[TensorRecord, ...]:
    return decode_manifest(encode_manifest(flatten(held)), giver=0, view_id=1).records


def places(state: RankState, came: Any) -> list[Any]:
    mine = state.read()
    assert mine is not None
    return state.places(records_of(came), mine)


# -- registering -----------------------------------------------------------------------------------------------------


def test_save_and_load_are_plain_functions() -> None:
    async def later() -> dict[str, Any]:
        return {}

    with pytest.raises(LocalError, match="save is a plain function"):
        RankState().register(later, lambda new: None)
    with pytest.raises(LocalError, match="load is a function"):
        RankState().register(dict, None)


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ([1, 2], "a mapping of names to tensors and values, not list"),
        ({1.5: np.ones(1)}, "not 1.5"),
        ({"model": {"w": object()}}, "the state's 'model.w' is a builtins.object"),
    ],
)
def test_what_is_no_state_is_refused_when_it_is_registered(held: Any, said: str) -> None:
    state = RankState()
    with pytest.raises(LocalError) as caught:
        state.register(lambda: held, lambda new: pytest.fail("load is not called"))
    assert said in str(caught.value)
    assert (state.save, state.read()) == (None, None)


def test_own_names_what_the_state_has() -> None:
    assert registered({"data": {"sampler": object()}, "w": np.ones(1)}, ("data.sampler",)).own == (("data", "sampler"),)
    with pytest.raises(LocalError, match=r"own names 'data\.smapler'"):
        registered({"data": {"sampler": 1}}, ("data.smapler",))


# -- memory ----------------------------------------------------------------------------------------------------------


def test_what_comes_ends_in_the_memory_of_the_state_where_it_fits() -> None:
    held = {
        "same": np.zeros(3),
        "other shape": np.zeros(3),
        "other type": np.zeros(3, np.float32),
        "read-only": np.zeros(3),
        "strided": np.zeros((3, 3))[:, 0],
        "parameter": torch.nn.Parameter(torch.zeros(2)),
        "torch here, numpy there": torch.zeros(2),
        "of no element": np.zeros(0),
    }
    held["read-only"].flags.writeable = False
    came = {
        **{name: np.ones(3) for name in ("same", "other type", "read-only", "strided", "new")},
        "other shape": np.ones(4),
        "parameter": torch.ones(2),
        "torch here, numpy there": np.ones(2, np.float32),
        "of no element": np.ones(0),
    }
    state = registered(held)
    found = dict(zip([record.path for record in records_of(came)], places(state, came), strict=True))
    for name, place in found.items():
        like = came[name]
        assert (type(place), place.dtype, place.shape) == (type(like), like.dtype, like.shape), name
    shared = [name for name, place in found.items() if name in held and _one_memory(place, held[name])]
    assert shared == ["parameter", "same"]
    assert not found["parameter"].requires_grad
    assert state.torn


def _one_memory(one: Any, other: Any) -> bool:
    arrays = (each.detach().numpy() if isinstance(each, torch.Tensor) else each for each in (one, other))
    return bool(np.shares_memory(*arrays))


def test_tensors_that_share_memory_are_not_written_where_they_lie() -> None:
    """Tied weights, a view beside its whole, and what is a rank's own beside what is not."""
    base, tied, mine = np.zeros(10), torch.zeros(4), np.zeros(6)
    held = {
        "apart": np.zeros(4),
        "whole": base,
        "view": base[2:4],
        "embedding": tied,
        "head": tied.view(2, 2),
        "half": mine[:3],
        "own": {"rows": mine},
    }
    state = registered(held, ("own",))
    came = {name: value for name, value in held.items() if name != "own"}
    found = dict(zip([record.path for record in records_of(came)], places(state, came), strict=True))
    assert [name for name, place in found.items() if _one_memory(place, held[name])] == ["apart"]


def test_the_memory_of_a_transfer_that_broke_is_kept_until_the_state_is_whole() -> None:
    state = registered({"a": np.zeros(3)})
    came = {"a": np.ones(4), "b": np.ones(2)}
    first = places(state, came)
    again = places(state, came | {"b": np.ones(5)})
    assert again[0] is first[0]
    assert again[1].shape == (5,)
    assert places(state, came)[0] is first[0]
    assert (state.torn, state.version) == (True, StateVersion())
    state.whole(StateVersion(4, 4))
    assert (state.torn, state.version) == (False, StateVersion(4, 4))
    assert places(state, came)[0] is not first[0]
