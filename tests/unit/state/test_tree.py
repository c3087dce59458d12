"""Nested states: taken apart and put together again, compared by their lines, refused by path and type."""

from __future__ import annotations

import math
from collections import OrderedDict, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.errors import LocalError
from quicoll.numerics.buffers import tensor_digest
from quicoll.state import tree
from quicoll.state.tree import MAX_DEPTH, flatten, own_paths, rebuild, tensors_of


def again(state: Any) -> Any:
    flat = flatten(state)
    return rebuild(flat.skeleton, [part.value for part in flat.tensors])


def same(one: Any, other: Any) -> bool:
    """Equal types and bits, to the last."""
    if isinstance(one, np.ndarray | torch.Tensor):
        return (
            type(one) is type(other)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and tensor_digest(one) == tensor_digest(other)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return sorted(map(repr, one)) == sorted(map(repr, other)) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float | complex | np.generic):
        return np.asarray(one).tobytes() == np.asarray(other).tobytes()
    return bool(one == other)


arrays = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from([np.float32, np.int64, np.bool_, np.float16, np.complex64]),
    st.integers(0, 9),
)
texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
small = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    texts,
    st.binary(max_size=8),
    st.sampled_from([np.float32(1.5), np.int8(-3), np.bool_(True)]),
)
values = st.recursive(
    st.one_of(small, arrays, arrays.map(torch.from_numpy)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(texts, st.integers(-(2**63), 2**64 - 1)), inner, max_size=4),
    ),
    max_leaves=20,
)
states = st.dictionaries(st.one_of(texts, st.integers(-9, 9)), values, max_size=4)


@settings(max_examples=60, deadline=None)
@given(states)
def test_a_state_comes_back_with_the_types_and_bits_that_it_had(state: dict[Any, Any]) -> None:
    back = again(state)
    assert same(back, state)
    assert (flatten(back).digest, flatten(back).kind_digest) == (flatten(state).digest, flatten(state).kind_digest)


@settings(max_examples=40, deadline=None)
@given(states, states)
def test_digests_are_equal_only_for_equal_states(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    assert (flatten(one).digest == flatten(other).digest) == same(_as_numpy(one), _as_numpy(other))


def _as_numpy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_numpy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_as_numpy, value))
    return value.numpy() if isinstance(value, torch.Tensor) else value


def test_the_order_of_keys_and_the_kind_of_tensor_do_not_count() -> None:
    one = {"b": np.arange(3.0), "a": {2: "x", 1: torch.ones(2)}}
    other = OrderedDict(a={1: np.ones(2, np.float32), 2: "x"}, b=torch.arange(3.0, dtype=torch.float64))
    assert flatten(one).digest == flatten(other).digest
    assert [part.path for part in flatten(one).tensors] == ["a.1", "b"]
    assert list(again(one)) == ["a", "b"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": {"b": 1}}, {"a.b": 1}),
        ({"1": 0}, {1: 0}),
        ({"a": [1, 2]}, {"a": (1, 2)}),
        ({"a": [[1], 2]}, {"a": [[1, 2]]}),
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": "x"}, {"a": b"x"}),
        ({"a": None}, {}),
        ({"a": np.float32(1)}, {"a": np.ones((), np.float32)}),
        ({"a": np.ones(2)}, {"a": np.ones((2, 1))}),
        ({"a": {}}, {"a": []}),
    ],
)
def test_states_that_look_alike_differ(one: Any, other: Any) -> None:
    assert flatten(one).digest != flatten(other).digest


def test_one_bit_changes_the_digest_and_not_the_kind() -> None:
    one, other = np.ones(1000, np.float32), np.ones(1000, np.float32)
    other.view(np.uint32)[777] ^= 1 << 3
    assert flatten({"w": one}).digest != flatten({"w": other}).digest
    assert flatten({"w": one}).kind_digest == flatten({"w": other}).kind_digest
    assert flatten({"w": one, "n": 3}).kind_digest == flatten({"w": one, "n": 4}).kind_digest
    assert flatten({"w": one, "n": 3}).kind_digest != flatten({"w": one, "n": 3.0}).kind_digest


def trained(make: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = make(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    ],
)
@pytest.mark.parametrize(
    "scheduled",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    ],
)
def test_what_torch_calls_a_state_dict_is_a_state_as_it_is(make: Any, scheduled: Any) -> None:
    model, optimizer = trained(make)
    scheduler = scheduled(optimizer)
    optimizer.step()
    scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    back = again(state)
    torch.manual_seed(99)
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    fresh = make(other.parameters())
    rate = scheduled(fresh)
    other.load_state_dict(back["model"])
    fresh.load_state_dict(back["optimizer"])
    rate.load_state_dict(back["scheduler"])
    after = {"model": other.state_dict(), "optimizer": fresh.state_dict(), "scheduler": rate.state_dict()}
    assert flatten(after).digest == flatten(state).digest
    assert "optimizer.state.0.exp_avg" in [part.path for part in flatten(state).tensors] or "SGD" in repr(optimizer)


def test_generators_states_are_states() -> None:
    import random

    numpy = np.random.default_rng(1)
    state = {"numpy": numpy.bit_generator.state, "python": random.Random(1).getstate(), "torch": torch.get_rng_state()}
    assert same(again(state), state)


# -- what is refused -------------------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Color(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "a mapping of names to tensors and values, not NoneType"),
        ([1, 2], "not list"),
        ({1.5: 0}, "a key of the state is a str or an int, not 1.5"),
        ({True: 0}, "not True"),
        ({"a": {None: 0}}, "a key of 'a' in the state"),
        ({"\ud800": 0}, "no text that can be encoded"),
        ({"a": "\ud800"}, "'a' is no text"),
        ({"a": [0, {"b": {1, 2}}]}, "the state's 'a.1.b' is a builtins.set"),
        ({"a": Point(1, 2)}, "Point"),
        ({"a": Color.RED}, "Color"),
        ({"a": math.sin}, "builtin_function"),
        ({"a": torch.float32}, "torch.dtype"),
        ({"a": np.array(["x"])}, "the state's 'a': "),
        ({"a": np.datetime64(1, "s")}, "the state's 'a': "),
        ({"a": torch.ones(2).to_sparse()}, "the state's 'a': a tensor of layout"),
        ({"a": bytearray(3)}, "bytearray"),
        ({"a": 1 << 9000}, "an int of 9001 bits"),
    ],
)
def test_what_is_no_state_is_named_by_path_and_type(state: Any, said: str) -> None:
    with pytest.raises(LocalError) as caught:
        flatten(state)
    assert said in str(caught.value)


def test_depth_and_number_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = 1
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert same(again({"a": deep}), {"a": deep})
    with pytest.raises(LocalError, match="deeper than 64 levels"):
        flatten({"a": [deep]})
    round_and_round: list[Any] = []
    round_and_round.append(round_and_round)
    with pytest.raises(LocalError, match="deeper than 64 levels"):
        flatten({"a": round_and_round})
    monkeypatch.setattr(tree, "MAX_NODES", 3)
    flatten({"a": 1, "b": 2})
    with pytest.raises(LocalError, match="at most 3 values"):
        flatten({"a": 1, "b": 2, "c": 3})
    monkeypatch.setattr(tree, "MAX_SKELETON", 10)
    with pytest.raises(LocalError, match="at most 10 are taken"):
        flatten({"a": "x" * 20})


@pytest.mark.parametrize(
    "skeleton",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        [],
        ["m"],
        ["m", ["a"]],
        ["m", [1.5, 0]],
        ["m", [True, 0]],
        ["m", ["a", ["#", 1]]],
        ["m", ["a", ["#", 0], "b", ["#", 0]]],
        ["m", ["a", ["#", "0"]]],
        ["m", ["a", ["s", "float33", b""]]],
        ["m", ["a", ["s", "float32", b"123"]]],
        ["m", ["a", {"b": 1}]],
        ["m", ["a", ["x", 1]]],
        ["m", []],  # no tensor, and there is one
        ["l", [["#", 0]]],
        "text",
        b"\xa1\xff",  # text that is not UTF-8
    ],
)
def test_a_skeleton_that_is_none_is_refused(skeleton: Any) -> None:
    import msgspec

    packed = skeleton if isinstance(skeleton, bytes) else msgspec.msgpack.encode(skeleton)
    with pytest.raises(LocalError):
        rebuild(packed, [np.ones(1)])


# -- what is a rank's own --------------------------------------------------------------------------------------------


def test_what_is_a_ranks_own_stays_and_the_rest_comes() -> None:
    own = own_paths(("sampler", "data.seen"))
    given = {"w": np.ones(2), "sampler": np.array([100]), "data": {"seen": 3, "files": ["a"]}}
    mine = {"w": np.zeros(2), "sampler": object(), "data": {"seen": 7, "files": []}}
    here, there = flatten(mine, own), flatten(given, own)
    assert [line.path for line in there.lines] == ["", "data", "data.files", "data.files.0", "w"]
    back = rebuild(there.skeleton, [part.value for part in there.tensors], here.own)
    assert back == {"w": given["w"], "sampler": mine["sampler"], "data": {"seen": 7, "files": ["a"]}}
    assert flatten(given, own).digest == flatten(given | {"sampler": None}, own).digest


def test_a_state_without_a_place_for_what_is_a_ranks_own_is_refused() -> None:
    here = flatten({"data": {"seen": 1}}, own_paths(["data.seen"]))
    with pytest.raises(LocalError, match=r"no place for this rank's own 'data\.seen'"):
        rebuild(flatten({"data": 3}).skeleton, [], here.own)


@pytest.mark.parametrize("own", ["sampler", 3, [1], [""], ["a..b"]])
def test_own_is_a_sequence_of_names(own: Any) -> None:
    with pytest.raises(LocalError, match="own names"):
        own_paths(own)


def test_the_tensors_alone_are_those_of_the_whole_in_the_same_order_and_the_very_same_objects() -> None:
    state = {"b": [np.ones(2), {"x": torch.ones(3), 7: 1.5}], "a": np.zeros((2, 2)), "own": np.ones(9), "n": None}
    own = own_paths(["own"])
    found = tensors_of(state, own)
    flat = flatten(state, own)
    assert [path for path, _ in found] == [part.path for part in flat.tensors] == ["a", "b.0", "b.1.x"]
    assert all(value is part.value for (_, value), part in zip(found, flat.tensors, strict=True))
    assert flat.nbytes == 32 + 16 + 12


@pytest.mark.parametrize("state", [[np.ones(1)], {1.5: np.ones(1)}])
def test_the_tensors_of_what_is_no_state_are_refused(state: Any) -> None:
    with pytest.raises(LocalError):
        tensors_of(state)
