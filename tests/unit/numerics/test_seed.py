"""Derived seeds: golden values, so that no version changes them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quicoll import LocalError, Seed

GOLDEN = (8228203689658789681, 389555937500299965, 3440379443208891862)


def test_derived_seeds_are_the_ones_they_always_were() -> None:
    assert int(Seed(0).derive("dropout", 3)) == GOLDEN[0]
    assert int(Seed(1234567890123456789).derive("routing", 0, "tokens")) == GOLDEN[1]
    assert int(Seed(7).derive()) == GOLDEN[2]


def test_labels_of_another_type_or_grouping_give_another_seed() -> None:
    seed = Seed(42)
    derived = [seed.derive("a", "b"), seed.derive("ab"), seed.derive("a", "b", ""), seed.derive(1), seed.derive("1")]
    assert len(set(derived)) == len(derived)


def test_derived_seeds_fit_where_an_integer_seed_is_wanted() -> None:
    for label in range(100):
        assert 0 <= int(Seed(5).derive(label)) < 1 << 63


def test_an_index_counts_by_its_value_whatever_its_type() -> None:
    seed = Seed(7)
    for make in (np.int64, np.uint8, torch.tensor):
        assert seed.for_layer(make(3)) == seed.for_layer(3)
        assert seed.for_token(make(3)) == seed.for_token(3)
        assert seed.for_step(make(3)) == seed.for_step(3)
        assert seed.for_shard(make(3)) == seed.for_shard(3)
        assert seed.derive("x", make(3)) == seed.derive("x", 3)
    assert seed.derive("3") != seed.derive(3)
    assert type(Seed(np.int64(7)).value) is int


@pytest.mark.parametrize("label", [True, 3.0, object(), None, b"x", np.float64(3), "\ud800"])
def test_what_is_neither_text_nor_an_integer_is_no_label(label: object) -> None:
    with pytest.raises(LocalError):
        Seed(7).derive("x", label)


@pytest.mark.parametrize("index", ["3", True, 3.0, None])
def test_what_is_no_integer_is_no_index(index: object) -> None:
    for derive in (Seed(7).for_layer, Seed(7).for_token, Seed(7).for_step, Seed(7).for_shard):
        with pytest.raises(LocalError, match="must be an integer"):
            derive(index)


@pytest.mark.parametrize("value", [-1, 1 << 63, 1.5, True, "7"])
def test_what_is_no_integer_of_63_bits_is_no_seed(value: object) -> None:
    with pytest.raises(LocalError):
        Seed(value)
