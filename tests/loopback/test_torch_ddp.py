"""DistributedDataParallel with a CanonicalHook: the same bits, whatever the number of ranks, backend and buckets."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the check that there is a torch
from torch.nn.parallel import DistributedDataParallel  # noqa: E402 - likewise
from torch_hook import SHARDS, STEPS, loss_of, network  # noqa: E402 - likewise
from torch_processes import environment  # noqa: E402 - likewise

from quicoll.errors import LocalError  # noqa: E402 - likewise
from quicoll.numerics.seed import Seed  # noqa: E402 - likewise
from quicoll.torch import CanonicalHook  # noqa: E402 - likewise

PROGRAM = Path(__file__).parents[1] / "helpers" / "torch_hook.py"
LIMIT_S = 500

pytestmark = [pytest.mark.slow, pytest.mark.warm("torch")]


def trained_by(directory: Path, backend: str, world: int, *options: str) -> dict[str, Any]:
    """The state of the model that so many processes end with."""
    directory.mkdir()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(directory), str(rank), str(world), backend, *options],
            env=environment(),
            stderr=subprocess.PIPE,
        )
        for rank in range(world)
    ]
    errors = [each.communicate(timeout=LIMIT_S)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0] * world, errors
    found: dict[str, Any] = torch.load(directory / "model.pt")
    return found


def trained_alone() -> dict[str, Any]:
    """What plain torch makes of the same shards, added as quicoll's order says: for five, ((0+1)+(2+3))+4."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        rows = []
        for shard in range(SHARDS):
            model.zero_grad()
            torch.manual_seed(int(Seed(7).for_step(step).for_shard(shard)))
            loss_of(model, step, shard).backward()
            rows.append([each.grad for each in model.parameters()])
        for place, parameter in enumerate(model.parameters()):
            a, b, c, d, e = (row[place] for row in rows)
            parameter.grad = (((a + b) + (c + d)) + e) / SHARDS
        optimizer.step()
    return dict(model.state_dict())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(torch.equal(one[name].view(torch.int32), other[name].view(torch.int32)) for name in one)


def test_the_bits_are_those_of_one_process_at_any_world_size_over_quicoll_and_beside_gloo(tmp_path: Path) -> None:
    alone = trained_alone()
    assert same(trained_by(tmp_path / "one", "quicoll", 1), alone)
    assert same(trained_by(tmp_path / "two", "gloo", 2), alone)
    assert same(trained_by(tmp_path / "three", "quicoll", 3, "gradient_as_bucket_view=1"), alone)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as the only rank of a group."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("quicoll", store=store, rank=0, world_size=1, timeout=timedelta(seconds=200))
    yield
    dist.destroy_process_group()


def hooked(shards: int = 3) -> tuple[DistributedDataParallel, CanonicalHook]:
    model = DistributedDataParallel(network())
    return model, CanonicalHook(model, shards=shards)


def step(model: DistributedDataParallel, hook: CanonicalHook, passes: dict[int, int]) -> None:
    """A step with so many backward passes in each shard."""
    for shard in hook.shards(0):
        for _ in range(passes[shard]):
            loss_of(model, 0, shard).backward()


@pytest.mark.usefixtures("alone")
def test_a_rank_without_a_shard_and_a_search_for_unused_parameters_are_refused() -> None:
    with pytest.raises(LocalError, match="0 shards for 1 ranks"):
        CanonicalHook(DistributedDataParallel(network()), shards=0)
    with pytest.raises(LocalError, match="find_unused_parameters"):
        CanonicalHook(DistributedDataParallel(network(), find_unused_parameters=True), shards=3)


@pytest.mark.usefixtures("alone")
def test_a_shard_without_its_backward_pass_is_named() -> None:
    for missing in range(3):
        model, hook = hooked()
        with pytest.raises(LocalError, match=f"parameters had no gradient in the backward pass of shard {missing}"):
            step(model, hook, {shard: int(shard != missing) for shard in range(3)})


@pytest.mark.usefixtures("alone")
def test_backward_passes_that_belong_to_no_shard_are_refused() -> None:
    model, hook = hooked()
    with pytest.raises(LocalError, match="outside of `for shard in hook"):
        loss_of(model, 0, 0).backward()
    model, hook = hooked(1)
    with pytest.raises(LocalError, match="a second backward pass in a shard"):
        step(model, hook, {0: 2})


@pytest.mark.usefixtures("alone")
def test_the_loss_of_a_shard_in_parts_adds_up() -> None:
    model, hook = hooked()
    model.eval()  # without dropout
    for shard in hook.shards(0):
        with model.no_sync():
            (loss_of(model, 0, shard) / 2).backward()
        (loss_of(model, 0, shard) / 2).backward()
    halves = [each.grad.clone() for each in model.parameters()]
    step(model, hook, dict.fromkeys(range(3), 1))
    for half, whole in zip(halves, model.parameters(), strict=True):
        torch.testing.assert_close(half, whole.grad)
