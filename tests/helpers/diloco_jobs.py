"""DiLoCo jobs in simulated clusters: small models, and what a run of rounds comes to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from quicoll.data import Sampler
from quicoll.sim import Settings, Simulation
from quicoll.train import DiLoCo

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.job import Job
    from quicoll.train import Part

WORKERS, EVERY, ROUNDS = 4, 6, 4


def of_layers() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def of_dropout() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


def samples(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a logical worker has in an inner step."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * step + worker))
    return x, torch.tanh(x.sum(1)) + 0.1 * worker


def loss_of(model: nn.Module, part: Part) -> torch.Tensor:
    x, y = samples(part.shard, part.step)
    return functional.mse_loss(model(x)[:, 0], y)


def of_indices(model: nn.Module, part: Part) -> torch.Tensor:
    assert part.indices is not None
    x = torch.from_numpy(part.indices)[:, None] * torch.linspace(-1.0, 1.0, 6) / 50
    return functional.mse_loss(model(x)[:, 0], torch.sin(3 * x.sum(1)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def nesterov(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)


class Ended:
    """What a run has come to."""

    def __init__(self) -> None:
        self.models: list[dict[str, torch.Tensor]] = []
        self.losses: dict[int, float] = {}
        self.digests: set[str] = set()
        self.aborted = 0
        self.journals: set[str] = set()
        self.seconds = 0.0

    def same(self, other: Ended) -> None:
        assert self.digests == other.digests
        assert len(self.digests) == 1
        assert self.losses == other.losses


def trained(
    ranks: int,
    *,
    rounds: int = ROUNDS,
    make: Callable[[], nn.Module] = of_layers,
    inner: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    events: Callable[[Simulation], None] | None = None,
    pace: float | Callable[[Job], float] = 0.0,
    data: bool = False,
    backup: int = 1,
    shards: int = WORKERS,
    sites: str = "",
    **options: Any,
) -> Ended:
    """Train on so many ranks. pace: simulated seconds of an inner step, also by rank. sites: a letter for each rank."""
    ended = Ended()

    async def worker(job: Job, _: Simulation) -> None:
        model = make()
        sampler = Sampler(50, batch_size=2 * shards, shards=shards, seed=3) if data else None
        diloco = DiLoCo(
            job, model, inner(model), nesterov(model), of_indices if data else loss_of, data=sampler, shards=shards,
            backup=backup,
            on_step=lambda number: ended.losses.setdefault(number, diloco.loss) == diloco.loss or pytest.fail("loss"),
            on_inner_step=lambda _: asyncio.sleep(pace if isinstance(pace, float) else pace(job)),
            **({"every": EVERY, "fragments": 1, "delay": 0} | options),
        )  # fmt: skip
        result = await diloco.run(steps=rounds)
        ended.digests.add(result.digest)
        ended.journals.add(diloco.journal)
        ended.models.append({name: value.detach().clone() for name, value in model.named_parameters()})

    simulation = Simulation(worker, seed=3, settings=Settings(ranks=ranks, limit=400.0, sites=tuple(sites)))
    if events is not None:
        events(simulation)
    outcome = simulation.run()
    if outcome.error is not None:
        raise outcome.error
    ended.aborted, ended.seconds = outcome.aborted, outcome.virtual_s
    return ended
