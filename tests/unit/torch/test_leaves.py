"""What a shard contributes: by the state and the shard alone, and without a trace in the module."""

from __future__ import annotations

import pytest
import torch

from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed
from quicoll.torch.leaves import LeafRecorder, LeafShape


def shape(*layers: torch.nn.Module) -> tuple[torch.nn.Sequential, LeafShape]:
    model = torch.nn.Sequential(*layers)
    return model, LeafShape(model, torch.optim.SGD(model.parameters(), lr=0.1))


def leaf(model: torch.nn.Module, found: LeafShape, seed: int, weight: float = 1.0) -> list[torch.Tensor]:
    recorder = LeafRecorder(found)
    recorder.begin(Seed(seed))
    recorder.backward(model(torch.arange(12.0).reshape(4, 3)).square().mean())
    recorder.end(weight)
    recorder.over()
    return recorder.leaves[0]


def test_a_leaf_depends_on_the_seed_of_its_shard_and_leaves_no_trace() -> None:
    model, found = shape(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5))
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    generator = torch.get_rng_state()
    first, second, again = leaf(model, found, 1), leaf(model, found, 2), leaf(model, found, 1)
    assert all(map(torch.equal, first, again))
    assert not all(map(torch.equal, first, second))
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert all(value.grad is None for value in model.parameters())


def test_what_was_in_grad_before_is_no_part_of_a_leaf() -> None:
    model, found = shape(torch.nn.Linear(3, 4))
    first = leaf(model, found, 1)
    for value in model.parameters():
        value.grad = torch.full_like(value, 9.0)
    assert all(map(torch.equal, first, leaf(model, found, 1)))


def test_a_weight_counts_for_gradients_and_loss_but_not_for_which_there_are() -> None:
    model, found = shape(torch.nn.Linear(3, 4))
    *gradients, had, loss = leaf(model, found, 1)
    *half, still, less = leaf(model, found, 1, 0.5)
    assert all(torch.equal(each * 0.5, other) for each, other in zip(gradients, half, strict=True))
    assert torch.equal(had, still)
    assert float(less) == 0.5 * float(loss)


def test_leaves_have_the_shapes_and_dtypes_of_one_without_samples() -> None:
    model, found = shape(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    pairs = zip(found.zeros(), leaf(model, found, 1), strict=True)
    assert all(one.shape == other.shape and one.dtype == other.dtype for one, other in pairs)


def test_running_means_that_are_not_float32_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4).double(), torch.nn.BatchNorm1d(4).double())
    with pytest.raises(LocalError, match=r"buffer 1\.running_mean is torch\.float64"):
        LeafShape(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_tensors_travel_by_dtype() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4).bfloat16(), torch.nn.Linear(4, 2))
    found = LeafShape(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert found.runs() == [[0, 1], [2, 3, 4, 5]]


def test_an_attempt_that_is_abandoned_leaves_no_trace() -> None:
    model, found = shape(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before = model[1].running_mean.clone()
    generator = torch.get_rng_state()
    recorder = LeafRecorder(found)
    recorder.begin(Seed(1))
    model(torch.arange(12.0).reshape(4, 3))
    assert recorder.computing
    recorder.over()
    assert not recorder.computing
    assert torch.equal(before, model[1].running_mean)
    assert torch.equal(generator, torch.get_rng_state())


def test_a_parameter_without_a_gradient_in_any_shard_has_none_in_the_mean() -> None:
    model, found = shape(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    recorder = LeafRecorder(found)
    recorder.begin(Seed(1))
    recorder.backward(model[0](torch.ones(2, 3)).mean())
    recorder.end(1.0)
    loss = found.put(recorder.leaves[0])
    assert loss == float(recorder.leaves[0][-1])
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


def test_a_sparse_gradient_and_an_optimizer_without_parameters_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True))
    found = LeafShape(model, torch.optim.SGD(model.parameters(), lr=0.1))
    recorder = LeafRecorder(found)
    recorder.begin(Seed(1))
    recorder.backward(model(torch.tensor([1, 2])).sum())
    with pytest.raises(LocalError, match=r"the gradient of 0\.weight is torch\.sparse_coo"):
        recorder.end(1.0)
    recorder.over()
    fixed = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(LocalError, match="no parameter that requires a gradient"):
        LeafShape(fixed, torch.optim.SGD(fixed.parameters(), lr=0.1))
    on_meta = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(LocalError, match="weight is on the meta device"):
        LeafShape(on_meta, torch.optim.SGD(on_meta.parameters(), lr=0.1))
