"""What two workers train, compared: everything that differs is named, and nothing else is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quicoll.errors import LocalError
from quicoll.state.tree import flatten
from quicoll.train.architecture import Architecture


def of(shapes: dict[str, tuple[int, ...]], **settings: Any) -> Architecture:
    return Architecture.of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, settings)


def test_equal_ones_are_equal_whether_of_numpy_or_torch() -> None:
    one = Architecture.of({"w": np.zeros((2, 3), np.float32)}, {"b": 1, "a": 2})
    other = Architecture.of({"w": torch.nn.Parameter(torch.ones(2, 3))}, {"a": 2, "b": 1})
    assert one.digest == other.digest
    one.demand_same(other)
    assert Architecture.parse(one.text) == one


@pytest.mark.parametrize(
    ("here", "said"),
    [
        (of({"w": (3, 2)}, rate=0.1), r"parameter w is float32 \(3, 2\) here and float32 \(2, 3\) in the job$"),
        (of({"w": (2, 3)}, rate=0.2), "rate is 0.2 here and 0.1 in the job$"),
        (of({"w": (2, 3), "v": (1,)}, rate=0.1), r"parameter v is float32 \(1,\) here and not there in the job$"),
        (of({}, rate=0.1), r"parameter w is not there here and float32 \(2, 3\) in the job$"),
        (of({"w": (2, 3), **{str(n): (n,) for n in range(7)}}, rate=0.1), "; and 2 more$"),
    ],
)
def test_what_differs_is_named(here: Architecture, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        here.demand_same(of({"w": (2, 3)}, rate=0.1))


def test_the_order_of_parameters_counts() -> None:
    one, other = of({"a": (1,), "b": (1,)}), of({"b": (1,), "a": (1,)})
    with pytest.raises(LocalError, match="stand in another order"):
        one.demand_same(other)


def test_states_with_different_descriptions_are_of_one_kind_so_that_one_may_be_handed_over() -> None:
    one, other = (flatten({"architecture": each.text}) for each in (of({"w": (2,)}), of({"v": (3,), "w": (2,)})))
    assert one.kind_digest == other.kind_digest
    assert one.digest != other.digest


@pytest.mark.parametrize("text", ["", "{", "[1]", '[["a"]]', '[["a", 1]]', None])
def test_what_is_no_description_is_refused(text: Any) -> None:
    with pytest.raises(LocalError, match="no description"):
        Architecture.parse(text)
