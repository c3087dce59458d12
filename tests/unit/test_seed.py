"""Derived seeds: golden values, so that no version changes them."""

from __future__ import annotations

from quicoll import Seed

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
