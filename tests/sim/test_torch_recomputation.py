"""A torch loop with atomic steps whose layers are computed again: the same state, and errors that say in which step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from quicoll.errors import Corrupted
from quicoll.sim import Settings, Simulation
from quicoll.torch import AsyncTraining, recomputed

pytestmark = pytest.mark.usefixtures("one_thread")

if TYPE_CHECKING:
    from quicoll.job import Job


class Net(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(6, 8), nn.Linear(8, 1), again
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y = recomputed(self.block, y, check=True) if self.again else self.block(y)
        out: torch.Tensor = self.last(y)
        return out


def trained(ranks: int, again: bool) -> tuple[set[str], list[float]]:
    digests: set[str] = set()
    losses: dict[int, float] = {}

    async def worker(job: Job, _: Simulation) -> None:
        torch.manual_seed(5)
        net = Net(again)
        training = AsyncTraining(job, net, torch.optim.AdamW(net.parameters(), lr=0.05), shards=8)
        async for step in training.steps(4):
            async with step:
                for _, _ in step.shards:
                    step.backward(net(torch.rand(6, 6)).square().mean())
            losses[step.number] = step.loss
        digests.add(training.digest())

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=ranks, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    return digests, [*losses.values()]


def test_the_state_is_that_of_a_loop_that_keeps_all_activations_on_any_number_of_ranks() -> None:
    kept = trained(1, again=False)
    assert len(kept[0]) == 1
    assert len(set(kept[1])) == 4
    for ranks in (1, 3):
        assert trained(ranks, again=True) == kept


def test_a_second_pass_of_other_bits_names_block_rank_and_step_and_the_step_is_begun_again() -> None:
    found: list[Corrupted] = []
    weights: list[list[float]] = []

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls, self.odd = nn.Parameter(torch.ones(3)), 0, False

        def forward(self, x: torch.Tensor) -> Any:
            self.calls += 1
            return self.weight * x + (self.calls if self.odd else 0)

    async def worker(job: Job, _: Simulation) -> None:
        net = Odd()
        training = AsyncTraining(job, net, torch.optim.SGD(net.parameters(), lr=0.1), shards=2)
        async for step in training.steps(3):
            net.odd = (job.rank, step.number, len(found)) == (1, 2, 0)
            async with step:
                for _, _ in step.shards:
                    loss = recomputed(net, torch.ones(3), check=True, name="layer 7").square().mean()
                    try:
                        step.backward(loss)
                    except Corrupted as error:
                        found.append(error)
                        raise
        weights.append(net.weight.tolist())

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=2, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    assert (outcome.committed, outcome.aborted) == (3, 1)
    assert weights[0] == weights[1]
    (error,) = found
    assert (error.rank, error.step, error.node) == (1, 2, "worker-1")
    assert "layer 7 computed again gives other bits than before" in str(error)
