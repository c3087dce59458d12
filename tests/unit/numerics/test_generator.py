"""Agreed randomness: known answers, golden values, and that numbers are what their names say."""

from __future__ import annotations

import hashlib
import math
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from quicoll import Seed
from quicoll.errors import LocalError
from quicoll.numerics.generator import Generator, natural_log, normal_quantile
from quicoll.numerics.philox import random_words

FLOAT_NAMES = ["float16", "bfloat16", "float32", "float64"]


def fresh(kind: Any = "numpy") -> Generator:
    return Seed(42).generator(kind)


def digest(value: Any) -> str:
    flat = value.view(torch.uint8).numpy() if isinstance(value, torch.Tensor) else value.view(np.uint8)
    return hashlib.sha256(flat.tobytes()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Bits


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    first = counter[0] | counter[1] << 32
    assert tuple(random_words(key, first, 1, (counter[2], counter[3]))[0].tolist()) == expected


def test_blocks_are_numbered_across_words() -> None:
    """Against scalars of Python, around the number where the second word of the counter begins to count."""
    rows = random_words((7, 9), (1 << 32) - 3, 6, (5, 0))
    for index, row in enumerate(rows.tolist()):
        number = (1 << 32) - 3 + index
        assert row == philox_by_hand([number & 0xFFFFFFFF, number >> 32, 5, 0], [7, 9])


def philox_by_hand(counter: list[int], key: list[int]) -> list[int]:
    a, b, c, d = counter
    for _ in range(10):
        left, right = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = right >> 32 ^ b ^ key[0], right & 0xFFFFFFFF, left >> 32 ^ d ^ key[1], left & 0xFFFFFFFF
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return [a, b, c, d]


def test_elements_are_mapped_to_counters_as_documented() -> None:
    seed = (3 << 32) | 5
    generator = Generator(seed)
    generator.uniform(1)
    singles = generator.uniform(10)
    doubles = generator.uniform(5, dtype="float64")
    for i in range(10):
        word = philox_by_hand([i // 4, 0, 1, 0], [5, 3])[i % 4]
        assert singles[i] == (word >> 8) / 2**24
    for i in range(5):
        block = philox_by_hand([i // 2, 0, 2, 0], [5, 3])
        bits = block[2 * (i % 2)] | block[2 * (i % 2) + 1] << 32
        assert doubles[i] == (bits >> 11) / 2**53


def test_draws_are_the_ones_they_always_were() -> None:
    """Golden: a change of any is a breaking change."""
    generator = fresh()
    found = {
        "uniform": [generator.uniform(3).tolist(), digest(generator.uniform(1000))],
        "normal": [
            generator.normal(3).tolist(),
            digest(generator.normal(1000)),
            digest(generator.normal(99, dtype="float64")),
        ],
        "integers": [
            generator.integers(8, low=-5, high=6).tolist(),
            digest(generator.integers(1000, high=1 << 63, dtype="uint64")),
        ],
        "bernoulli": [generator.bernoulli(8, 0.5).tolist(), digest(generator.bernoulli(1000, 0.1))],
        "permutation": [generator.permutation(8).tolist(), digest(generator.permutation(1000))],
    }
    assert found == GOLDEN


GOLDEN: dict[str, Any] = {
    "uniform": [[0.6129598617553711, 0.4685865044593811, 0.07323169708251953], "a179c8d6e4dd0894"],
    "normal": [[0.05075198411941528, 0.5011369585990906, 1.1926367282867432], "b1215b64c24db8f5", "aad53a7c8958f63d"],
    "integers": [[1, 1, -2, 5, 3, -2, -4, 4], "dd9ec2cfcb7cd4ac"],
    "bernoulli": [[False, True, True, True, False, False, True, False], "e86630eef259bf79"],
    "permutation": [[5, 3, 6, 0, 4, 2, 7, 1], "72727f92fdfebce2"],
}


def test_derived_seeds_are_the_ones_they_always_were() -> None:
    seed = Seed(42)
    assert seed.for_layer(3).for_token(17).for_step(5) == seed.derive("layer", 3).derive("token", 17).derive("step", 5)
    assert seed.for_shard(2) == seed.derive("shard", 2)
    assert int(seed.for_layer(3).for_token(17).for_step(5)) == 4681959248319484718
    paths = {
        int(s) for i in range(20) for s in (seed.for_layer(i), seed.for_token(i), seed.for_step(i), seed.for_shard(i))
    }
    assert len(paths) == 80


# ---------------------------------------------------------------------------------------------------------------------
# numpy and torch, parts and wholes


@pytest.mark.parametrize("name", FLOAT_NAMES)
@pytest.mark.parametrize("method", ["uniform", "normal"])
def test_numpy_and_torch_have_the_same_bits(method: str, name: str) -> None:
    ours, theirs = (getattr(fresh(kind), method)((3, 5, 7), dtype=name) for kind in ("numpy", "torch"))
    assert isinstance(theirs, torch.Tensor)
    assert theirs.dtype is getattr(torch, name)
    assert ours.dtype.name == name
    assert ours.shape == tuple(theirs.shape) == (3, 5, 7)
    assert digest(ours) == digest(theirs)


def test_the_other_draws_are_tensors_too() -> None:
    for draw in (
        lambda g: g.integers((2, 3), high=10, dtype="int32"),
        lambda g: g.bernoulli((2, 3), 0.5),
        lambda g: g.permutation(9),
    ):
        ours, theirs = draw(fresh()), draw(fresh("torch"))
        assert str(theirs.dtype) == f"torch.{ours.dtype.name}"
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "draw",
    [
        lambda g, n, s: g.uniform(n, start=s),
        lambda g, n, s: g.uniform(n, start=s, dtype="float64"),
        lambda g, n, s: g.normal(n, start=s),
        lambda g, n, s: g.integers(n, high=3 << 61, dtype="uint64", start=s),
        lambda g, n, s: g.bernoulli(n, 0.3, start=s),
    ],
    ids=["uniform float32", "uniform float64", "normal", "integers", "bernoulli"],
)
def test_a_part_of_a_draw_is_that_part_of_the_whole(draw: Any) -> None:
    size = (1 << 14) + 77  # more than is made at a time
    whole = draw(fresh(), size, 0)
    for start, stop in [(0, 0), (0, 1), (1, 2), (3, 9), (5, 5), (2, size), (1 << 14, size), (size - 1, size)]:
        assert draw(fresh(), stop - start, start).tobytes() == whole[start:stop].tobytes()


def test_a_generators_draws_differ_and_another_generator_repeats_them() -> None:
    one, other = fresh(), fresh()
    first, second = one.uniform(8), one.uniform(8)
    assert first.tolist() != second.tolist()
    assert one.draws == 2
    assert [other.uniform(8).tolist(), other.uniform(8).tolist()] == [first.tolist(), second.tolist()]
    assert Seed(43).generator().uniform(8).tolist() != first.tolist()


@pytest.mark.slow
def test_torch_is_imported_only_for_who_asks_for_tensors() -> None:
    program = (
        "import sys\nfrom quicoll.numerics.seed import Seed\ng = Seed(1).generator()\ng.normal(5); g.permutation(5)\n"
        "assert 'torch' not in sys.modules and 'ml_dtypes' not in sys.modules\n"
        "Seed(1).generator('torch').normal(5)\nassert 'torch' in sys.modules\n"
    )
    path = ":".join(entry for entry in sys.path if entry)
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": path})


# ---------------------------------------------------------------------------------------------------------------------
# Distributions


@pytest.mark.parametrize("name", FLOAT_NAMES)
def test_uniform_numbers_fill_the_interval_evenly(name: str) -> None:
    values = fresh("torch").uniform(200_000, dtype=name).to(torch.float64).numpy()
    assert values.min() >= 0
    assert values.max() < 1
    counts = np.histogram(values, bins=16, range=(0, 1))[0]
    assert ((counts - 12_500) ** 2 / 12_500).sum() < 40  # chi-squared of 15 degrees: 1 in 2000


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    values = fresh().normal(400_000, dtype="float64")
    assert abs(values.mean()) < 0.006
    assert abs(values.var() - 1) < 0.01
    assert abs((values**3).mean()) < 0.03
    assert abs((values**4).mean() - 3) < 0.1
    inside = [(np.abs(values) < limit).mean() for limit in (1, 2, 3)]
    np.testing.assert_allclose(inside, [0.682689, 0.9545, 0.9973], atol=0.003)


def test_the_quantile_is_that_of_the_standard_library() -> None:
    p = np.concatenate([np.linspace(0, 1, 4001)[1:-1], 2.0 ** -np.arange(1.0, 54), 1 - 2.0 ** -np.arange(1.0, 54)])
    expected = np.array([statistics.NormalDist().inv_cdf(value) for value in p.tolist()])
    np.testing.assert_allclose(normal_quantile(p), expected, rtol=4e-15, atol=1e-16)


def test_the_quantile_is_odd_and_rises() -> None:
    p = np.linspace(2.0**-40, 0.5, 10_000)
    p = np.round(p * 2**50) / 2**50  # so that 1 - p is exact
    np.testing.assert_array_equal(normal_quantile(p), -normal_quantile(1 - p))
    assert (np.diff(normal_quantile(p)) > 0).all()


def test_the_logarithm_is_right_to_the_last_place_but_one() -> None:
    rng = np.random.default_rng(1)
    x = np.concatenate(
        [rng.random(20_000), 2.0 ** rng.uniform(-60, 60, 20_000), [0.5, 1.0, 2.0, 2.0**-53, math.sqrt(0.5)]]
    )
    expected = np.array([math.log(value) for value in x.tolist()])
    assert (np.abs(natural_log(x) - expected) <= np.spacing(np.abs(expected))).all()


def test_integers_are_even_over_a_width_that_does_not_divide_two_to_64() -> None:
    values = fresh().integers(90_000, low=-4, high=5, dtype="int8")
    counts = np.bincount(values.astype(int) + 4, minlength=9)
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 30
    # Of a width of three quarters of 2**64 every fourth number is refused; else the lower third would be doubled.
    wide = fresh().integers(60_000, high=3 << 62, dtype="uint64")
    thirds = np.bincount((wide >> np.uint64(62)).astype(int), minlength=3)
    assert thirds.size == 3
    assert ((thirds - 20_000) ** 2 / 20_000).sum() < 16


def test_integers_of_the_whole_range_of_a_type() -> None:
    for name in ("int8", "uint8", "int64", "uint64"):
        limits = np.iinfo(name)
        values = fresh().integers(5000, low=limits.min, high=limits.max + 1, dtype=name)
        assert values.dtype.name == name
        assert values.min() < limits.min // 2 + limits.max // 4
        assert values.max() > limits.max // 2
    assert fresh().integers(10, low=7, high=8).tolist() == [7] * 10


def test_bernoulli_is_true_as_often_as_asked() -> None:
    assert fresh().bernoulli(1000, 0.0).sum() == 0
    assert fresh().bernoulli(1000, 1.0).all()
    for p in (0.1, 0.5, 0.9):
        assert abs(fresh().bernoulli(100_000, p).mean() - p) < 0.005


def test_permutations_are_permutations_and_even() -> None:
    assert sorted(fresh().permutation(1000).tolist()) == list(range(1000))
    assert fresh().permutation(0).tolist() == []
    generator = fresh()
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(6000):
        order = tuple(generator.permutation(3).tolist())
        seen[order] = seen.get(order, 0) + 1
    assert len(seen) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in seen.values()) < 22


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda g: g.uniform(3, dtype="int8"),
            "int8 is not drawn here; use one of float16, bfloat16, float32, float64",
        ),
        (lambda g: g.normal(3, dtype="float8_e5m2"), "float8_e5m2 is not drawn here"),
        (lambda g: g.uniform(-1), "has a negative number in it"),
        (lambda g: g.uniform((2, -1)), "has a negative number in it"),
        (lambda g: g.uniform(3, start=-1), "has a negative number in it"),
        (lambda g: g.integers(3, high=0), r"integers in \[0, 0\) are none of int64"),
        (lambda g: g.integers(3, high=129, dtype="int8"), r"integers in \[0, 129\) are none of int8"),
        (lambda g: g.integers(3, low=-1, high=4, dtype="uint8"), "are none of uint8"),
        (lambda g: g.integers(3, high=4, dtype="float32"), "are none of float32"),
        (lambda g: g.bernoulli(3, 1.5), r"a probability is in \[0, 1\], not 1.5"),
        (lambda g: g.bernoulli(3, math.nan), "not nan"),
        (lambda g: g.uniform(3, dtype="float31"), "dtype 'float31' is not supported"),
    ],
)
def test_arguments_out_of_range_are_refused_and_use_up_no_draw(draw: Any, message: str) -> None:
    generator = fresh()
    with pytest.raises(LocalError, match=message):
        draw(generator)
    assert generator.draws == 0


def test_a_generator_of_nothing_known_is_refused() -> None:
    with pytest.raises(LocalError, match="kind 'jax' is not known"):
        Seed(1).generator("jax")
    for seed in (-1, 1 << 64):
        with pytest.raises(LocalError, match="has 64 bits"):
            Generator(seed)
