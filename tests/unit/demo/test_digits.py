"""The demo's task: learns, and gives the same bits on any rank and in any order of its shards (D8, C6)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from quicoll import checkpoint
from quicoll.demo import digits
from quicoll.demo.digits import BATCH, SHARDS, Digits, baseline, pin_torch
from quicoll.errors import LocalError
from quicoll.train.bucket import Bucket


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    pin_torch()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def as_bytes(gradients: list[torch.Tensor]) -> list[bytes]:
    return [gradient.numpy().tobytes() for gradient in gradients]


def test_a_shards_gradient_depends_on_state_shard_and_step_alone() -> None:
    first, second = Digits(seed=3), Digits(seed=3)
    expected = {shard: as_bytes(first.gradients(shard, 5)) for shard in range(SHARDS)}
    torch.manual_seed(99)
    torch.rand(1000)
    np.random.default_rng().random(10)
    for shard in reversed(range(SHARDS)):
        second.gradients(shard, 4)
        assert as_bytes(second.gradients(shard, 5)) == expected[shard]


def test_seed_shard_and_step_each_draw_other_samples() -> None:
    task = Digits(seed=3)
    drawn = [as_bytes(task.gradients(shard, step)) for shard in (0, 1) for step in (1, 2)]
    assert all(a != b for a, b in pairwise(drawn))
    assert as_bytes(Digits(seed=4).gradients(0, 1)) != drawn[0]


def test_apply_is_sgd_with_momentum() -> None:
    task = Digits(seed=0)
    before = checkpoint.snapshot(task.state())
    ones = [torch.ones_like(gradient) for gradient in task.gradients(0, 1)]
    task.apply(ones)
    task.apply(ones)
    after = task.state()
    for name, value in before.items():
        if name.startswith("parameter."):
            expected = np.asarray(value) - 0.1 * 1 - 0.1 * 1.9
            np.testing.assert_allclose(np.asarray(after[name]), expected, rtol=0, atol=1e-6)
        else:
            np.testing.assert_allclose(np.asarray(after[name]), 1.9, rtol=1e-6)


def test_a_state_handed_over_continues_with_the_same_bits() -> None:
    giver, taker = baseline(steps=2, seed=1), Digits(seed=1)
    taker.load_state(checkpoint.snapshot(giver.state()))
    for task in (giver, taker):
        task.apply(task.gradients(6, 3))
        task.apply(task.gradients(2, 4))
    assert checkpoint.digest(giver.state()) == checkpoint.digest(taker.state())


def test_a_foreign_state_is_refused_and_changes_nothing() -> None:
    task = Digits()
    before = checkpoint.digest(task.state())
    state = checkpoint.snapshot(task.state())
    state["parameter.out.bias"] = torch.zeros(11)
    with pytest.raises(LocalError, match="this task has"):
        task.load_state(state)
    assert checkpoint.digest(task.state()) == before


def test_the_baseline_averages_over_the_canonical_tree() -> None:
    """Eight leaves: ((0+1)+(2+3)) + ((4+5)+(6+7)), then one division, here in plain numpy."""
    task = Digits(seed=5)
    gradients = [task.gradients(shard, 1) for shard in range(SHARDS)]
    bucket = Bucket.of(gradients[0])
    f = [bucket.pack(gradient) for gradient in gradients]
    average = (((f[0] + f[1]) + (f[2] + f[3])) + ((f[4] + f[5]) + (f[6] + f[7]))) / np.float32(8)
    task.apply(bucket.unpack(average, gradients[0]))
    assert checkpoint.digest(task.state()) == checkpoint.digest(baseline(steps=1, seed=5).state())


def test_before_training_it_can_only_guess() -> None:
    """That it learns, and that another process has the same digest, is seen in tests/loopback/test_demo.py."""
    assert Digits(seed=0).accuracy() < 0.3


def test_half_of_the_training_set_is_in_every_step() -> None:
    """Enough work per step for two workers to share; the speed-up of C6 is measured on it."""
    assert SHARDS * BATCH >= 0.5 * (1797 - 1797 // 5)


def test_a_bucket_gives_back_what_went_in() -> None:
    gradients = [torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.zeros(0, 4), torch.ones(3)]
    bucket = Bucket.of(gradients)
    flat = bucket.pack(gradients)
    assert (bucket.size, flat.shape, flat.dtype) == (10, (10,), np.float32)
    back = bucket.unpack(flat, gradients)
    assert all(isinstance(a, torch.Tensor) and torch.equal(a, b) for a, b in zip(back, gradients, strict=True))
    assert all(isinstance(view, np.ndarray) for view in bucket.unpack(flat, [np.asarray(g) for g in gradients]))
    flat[:] = -1
    assert float(back[0].sum()) == -6, "views, so that nothing is copied twice"


def test_a_bucket_refuses_what_it_was_not_made_for() -> None:
    bucket = Bucket.of([np.zeros(3, np.float32)])
    with pytest.raises(LocalError, match="shapes"):
        bucket.pack([np.zeros(4, np.float32)])
    for wrong in (np.zeros(3), torch.zeros(3, dtype=torch.bfloat16)):
        with pytest.raises(LocalError, match=r"float64|bfloat16"):
            bucket.pack([wrong])


@pytest.mark.slow  # imports scikit-learn
def test_the_digits_are_those_that_scikit_learn_loads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from_file = digits._load()
    elsewhere = ModuleSpec("sklearn", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(digits, "find_spec", lambda name: elsewhere)
    for found, loaded in zip(from_file, digits._load(), strict=True):
        assert found.dtype == loaded.dtype
        assert torch.equal(found, loaded)


def test_without_scikit_learn_there_are_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(LocalError, match="scikit-learn"):
        Digits()
