"""A torch loop whose optimizer's state is divided between the ranks: the bits of torch's own optimizer, undivided."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from depth import some
from torch import nn
from torch.nn import functional

from quicoll.errors import LocalError
from quicoll.sim import RunFailed, Settings, Simulation
from quicoll.torch import AsyncTraining
from quicoll.torch.divided_optimizer import ALIGNMENT
from quicoll.train import CheckpointPolicy, Divide

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from quicoll.job import Job

WIDTH = 50  # 300 weights and 50 biases: parameters that blocks of 64 elements cut, and that do not end with a vector
STEPS = 7


pytestmark = pytest.mark.usefixtures("one_thread")


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1.0, 1.0, 6) * (index + 1) / 80
        return x, torch.sin(3 * x.sum())


class Net(nn.Module):
    """One layer that no loss ever reaches, and one that is used in some steps and not in others."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 1)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.at_times, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)
        self.at_times.to(dtype)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.drop(torch.relu(self.norm(self.first(x))))
        if self.step % 3:
            y = self.at_times(y.to(self.at_times.weight.dtype)).float()
        out: torch.Tensor = self.last(y)[:, 0]
        return out


def two_groups(net: Net) -> torch.optim.Optimizer:
    late = [*net.at_times.parameters()]
    early = [each for each in net.parameters() if all(each is not other for other in late)]
    return torch.optim.AdamW(
        [{"params": early, "lr": 0.05}, {"params": late, "weight_decay": 0.3, "betas": (0.8, 0.9)}]
    )


OPTIMIZERS: dict[str, Callable[[Net], torch.optim.Optimizer]] = {
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.05, amsgrad=True),
    "AdamW in two groups": two_groups,
}
MIXED = torch.bfloat16  # some parameters are of it, and some float32: two axes


class Ended:
    """What one run has come to: bits of all that counts, put together from what each rank holds."""

    def __init__(self) -> None:
        self.model: list[dict[str, Any]] = []
        self.moments: dict[str, dict[str, Any]] = {}  # of each parameter by its name
        self.counters: list[dict[str, Any]] = []
        self.settings: list[Any] = []
        self.losses: dict[int, float] = {}
        self.held: dict[int, int] = {}  # bytes of moments by rank
        self.digests: set[str] = set()

    def same(self, other: Ended) -> None:
        for one in self.model:
            for name, value in other.model[0].items():
                assert torch.equal(one[name], value), name
        assert sorted(self.moments) == sorted(other.moments)
        for name, its in other.moments.items():
            assert sorted(self.moments[name]) == sorted(its)
            for key, value in its.items():
                assert torch.equal(self.moments[name][key], value), (name, key)
        for counters in self.counters:
            assert counters == other.counters[0]
        assert all(each == other.settings[0] for each in self.settings)
        assert self.losses == other.losses


def plain(state: Any) -> dict[str, Any]:
    """Counters as numbers; what torch keeps none for is as what it has kept none for yet."""
    return {name: float(value) for name, value in (state or {}).items() if value is not None}


def whole_state(ended: Ended, net: Net, optimizer: torch.optim.Optimizer) -> None:
    """What torch's own optimizer holds."""
    names = {id(value): name for name, value in net.named_parameters()}
    counters = {}
    for parameter, state in optimizer.state.items():
        name = names[id(parameter)]
        shape = parameter.shape
        ended.moments[name] = {
            key: each.clone() for key, each in state.items() if getattr(each, "shape", None) == shape
        }
        counters[name] = plain({key: each for key, each in state.items() if key not in ended.moments[name]})
    ended.held[0] = sum(each.nbytes for its in ended.moments.values() for each in its.values())
    ended.counters.append(counters)


def divided_state(ended: Ended, training: Any, net: Net, rank: int) -> None:
    """What this rank owns of it, put into its place in the parameters."""
    divided, counters = training._loop.divided, {}
    held = 0
    for axis in divided._axes:
        sharded, mine = axis.sharded, axis.sharded.mine
        spec = sharded.pieces.spec
        held += sum(part.nbytes for block in sharded.pieces.here for part in sharded.pieces.parts(block))
        names = {id(value): name for name, value in net.named_parameters()}
        for place, (parameter, start) in enumerate(zip(axis._parameters, axis._starts, strict=True)):
            name = names[id(parameter)]
            its = axis.blocks.progress.counters[axis.blocks.progress.classes[place]]
            if its is None:
                continue
            counters[name] = plain(its)
            for key in spec.dtypes:
                empty = torch.zeros_like(parameter, requires_grad=False)
                flat = ended.moments.setdefault(name, {}).setdefault(key, empty)
                first, last = max(start, mine.start), min(start + flat.numel(), mine.stop)
                if first < last:
                    part = sharded[key][first - mine.start : last - mine.start]
                    flat.view(-1)[first - start : last - start] = part
    ended.held[rank] = held
    ended.counters.append(counters)


def trained(
    ranks: int,
    make: Callable[[Net], torch.optim.Optimizer],
    *,
    divide: Divide | None = None,
    dtype: torch.dtype = torch.float32,
    clip: float = 0.0,
    events: Callable[[Simulation], None] | None = None,
    steps: int = STEPS,
    pace: float = 0.0,
    **options: Any,
) -> Ended:
    ended = Ended()

    async def worker(job: Job, _: Simulation) -> None:
        torch.manual_seed(5)
        net = Net(dtype)
        optimizer = make(net)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps + 1)  # momentum too
        training = AsyncTraining(
            job, net, optimizer, Points(), batch_size=16, shards=8, scheduler=scheduler, divide=divide, **options
        )
        async for step in training.steps(steps):
            async with step:
                net.step = step.number
                for x, y in step.shards:
                    step.backward(functional.mse_loss(net(x), y))
                await asyncio.sleep(pace)
                if clip:
                    await step.reduce()
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
            if step.committed:
                assert ended.losses.setdefault(step.number, step.loss) == step.loss
        ended.model.append({name: value.clone() for name, value in net.state_dict().items()})
        ended.settings.append(optimizer.state_dict()["param_groups"])
        ended.digests.add(training.digest())
        if divide is None:
            whole_state(ended, net, optimizer)
        else:
            assert not optimizer.state
            divided_state(ended, training, net, job.rank)

    simulation = Simulation(worker, seed=3, settings=Settings(ranks=ranks, limit=300.0))
    if events is not None:
        events(simulation)
    outcome = simulation.run()
    if outcome.error is not None:
        raise outcome.error
    assert len(ended.digests) == 1
    return ended


@pytest.mark.parametrize(("name", "clip", "dtype"), some(product(OPTIMIZERS, [0.0, 0.05], [torch.float32, MIXED]), 3))
def test_the_bits_are_those_of_the_undivided_optimizer_on_any_number_of_ranks(
    name: str, clip: float, dtype: torch.dtype
) -> None:
    undivided = trained(1, OPTIMIZERS[name], dtype=dtype, clip=clip)
    found = [
        trained(ranks, OPTIMIZERS[name], dtype=dtype, clip=clip, divide=Divide(blocks=32, backup=1))
        for ranks in (1, 2, 3, 5)
    ]
    for each in found:
        each.same(undivided)
    assert len({digest for each in found for digest in each.digests}) == 1


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_gradients_may_travel_in_the_backward_pass(clip: float) -> None:
    undivided = trained(1, two_groups, dtype=MIXED, clip=clip)
    trained(3, two_groups, dtype=MIXED, clip=clip, divide=Divide(blocks=32), bucket_bytes=500).same(undivided)


def test_each_rank_has_the_memory_of_its_part_and_of_one_backup() -> None:
    undivided = trained(1, OPTIMIZERS["Adam"], steps=2).held[0]
    for ranks in (2, 4):
        for backup in (0, 1):
            held = trained(ranks, OPTIMIZERS["Adam"], steps=2, divide=Divide(blocks=64, backup=backup)).held
            part = undivided / ranks * (1 + backup)
            gaps = 3 * 4 * ALIGNMENT * (64 + 10)  # three pieces of float32: to the next vector, once for a parameter
            assert len(held) == ranks
            assert all(part - gaps <= each <= part + gaps for each in held.values())


def test_an_owner_that_is_killed_leaves_its_part_with_its_backup_and_the_next_one_too() -> None:
    """Four ranks, then three, then two, and what was lost is made anew in between."""

    def events(sim: Simulation) -> None:
        sim.at(1.3).crash(1)
        sim.at(4.2).crash(3)
        sim.at(60.0).restart(1).restart(3)  # when the job is done

    make = OPTIMIZERS["AdamW in two groups"]
    found = trained(
        4, make, divide=Divide(blocks=32, backup=1), events=events, steps=24, pace=0.25, clip=0.05, dtype=MIXED
    )
    assert sorted(found.held) == [0, 1]
    found.same(trained(1, make, steps=24, clip=0.05, dtype=MIXED))


def test_ranks_that_come_and_go_by_order_need_no_backup() -> None:
    def events(sim: Simulation) -> None:
        sim.at(1.3).scale(3)
        sim.at(3.3).scale(2)
        sim.at(5.3).scale(4)

    make = OPTIMIZERS["Adam"]
    found = trained(4, make, divide=Divide(blocks=32, backup=0), events=events, steps=28, pace=0.25)
    assert sorted(found.held) == [0, 1, 2, 3]
    found.same(trained(1, make, steps=28))


def test_without_a_backup_a_killed_owner_stops_the_job_and_is_named() -> None:
    with pytest.raises(RunFailed, match="ShardLost") as lost:
        trained(
            3, OPTIMIZERS["Adam"], divide=Divide(blocks=32, backup=0), steps=24, pace=0.25,
            events=lambda sim: [sim.at(1.3).crash(1)],
        )  # fmt: skip
    assert "worker-1, which owned them" in str(lost.value)
    assert "'optimizer.float32' (exp_avg, exp_avg_sq, max_exp_avg_sq)" in str(lost.value)


def gone(
    directory: Path, steps: int, ranks: int, *, dtype: torch.dtype = torch.float32, divide: Divide | None
) -> tuple[BaseException | None, list[dict[str, Any]], set[str]]:
    """Train with checkpoints, from the newest one on; how it failed, parameters on each rank, digests."""
    models: list[dict[str, Any]] = []
    digests: set[str] = set()

    async def worker(job: Job) -> None:
        torch.manual_seed(5)
        net = Net(dtype)
        training = AsyncTraining(
            job, net, two_groups(net), Points(), batch_size=16, shards=8, divide=divide,
            checkpoints=CheckpointPolicy(str(directory), every=4),
        )  # fmt: skip
        async for step in training.steps(steps):
            async with step:
                net.step = step.number
                for x, y in step.shards:
                    step.backward(functional.mse_loss(net(x), y))
        models.append({name: value.clone() for name, value in net.state_dict().items()})
        digests.add(training.digest())

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=ranks, limit=300.0)).run()
    return outcome.error, models, digests


@pytest.mark.parametrize("dtype", [torch.float32, MIXED])
def test_a_job_goes_on_from_its_checkpoint_on_another_number_of_ranks(tmp_path: Path, dtype: torch.dtype) -> None:
    divide = Divide(blocks=32, backup=0)
    assert gone(tmp_path / "one", 4, 3, dtype=dtype, divide=divide)[0] is None
    assert any((tmp_path / "one").iterdir())
    error, models, digests = gone(tmp_path / "one", 9, 2, dtype=dtype, divide=divide)
    assert error is None
    _, (at_once,), its = gone(tmp_path / "other", 9, 1, dtype=dtype, divide=divide)
    assert digests == its
    assert all(torch.equal(each[name], at_once[name]) for each in models for name in at_once)


def test_a_checkpoint_of_a_divided_state_is_refused_by_a_loop_that_does_not_divide_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    divide = Divide(blocks=32)
    gone(tmp_path / "divided", 4, 2, divide=divide)
    gone(tmp_path / "whole", 4, 2, divide=None)
    assert "is divided between ranks: pass divide=" in str(gone(tmp_path / "divided", 9, 2, divide=None)[0])
    assert "an optimizer that is not divided as this one is" in str(gone(tmp_path / "whole", 9, 2, divide=divide)[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda given: torch.optim.LBFGS(given), "LBFGS cannot be divided"),
        (lambda given: torch.optim.Adafactor(given), "Adafactor cannot be divided"),
        (lambda given: torch.optim.SGD(given, lr=0.1), "keeps no state for its parameters"),
        (lambda given: torch.optim.Adagrad(given), "has a state already"),
    ],
)
def test_an_optimizer_that_cannot_be_divided_is_refused_when_it_is_said(
    make: Callable[[Any], torch.optim.Optimizer], words: str
) -> None:
    async def worker(job: Job, _: Simulation) -> None:
        net = Net()
        with pytest.raises(LocalError, match=words):
            AsyncTraining(job, net, make([*net.parameters()]), Points(), batch_size=16, shards=8, divide=Divide())

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=1, limit=100.0)).run()
    assert outcome.error is None, outcome.error


def test_an_algorithm_that_divides_nothing_is_refused() -> None:
    async def worker(job: Job, _: Simulation) -> None:
        net = Net()
        with pytest.raises(LocalError, match="reduce_scatter"):
            AsyncTraining(
                job, net, OPTIMIZERS["Adam"](net), Points(), batch_size=16, shards=8, divide=Divide(),
                algorithm="exchange",
            )  # fmt: skip

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=1, limit=100.0)).run()
    assert outcome.error is None, outcome.error


def test_a_rank_that_divides_otherwise_is_refused_by_name() -> None:
    refused: list[str] = []

    async def worker(job: Job, _: Simulation) -> None:
        odd = job.node == "worker-2"
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        training = AsyncTraining(
            job, net, optimizer, Points(), batch_size=16, shards=8, divide=Divide(blocks=16 if odd else 32)
        )
        try:
            async for step in training.steps(2):
                async with step:
                    for x, y in step.shards:
                        step.backward(functional.mse_loss(net(x), y))
        except LocalError as error:
            assert odd
            refused.append(str(error))

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=3, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    assert "the first difference is in 'divided'" in refused[0]
