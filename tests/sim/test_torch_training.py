"""An ordinary torch loop as atomic steps, in simulated clusters: the bits of one rank, through aborts too."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import torch
from depth import deep
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import quicoll.blocking
from quicoll.errors import LocalError
from quicoll.sim import Settings, Simulation
from quicoll.torch import AsyncTraining, Training
from quicoll.train import Divide

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.job import Job

SAMPLES = 44  # no multiple of the batches: an epoch ends with a short step, in which shards differ in samples
EPOCHS = 2


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1.0, 1.0, 6) * (index + 1) / SAMPLES
        return x, torch.sin(3 * x.sum())


def of_ordinary_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def of_dropout_and_running_means() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))


class WithUnused(nn.Module):
    """One layer that no loss ever reaches: weight decay must not move it, as in an ordinary loop."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 1), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def trained(
    ranks: int,
    *,
    make: Callable[[], nn.Module],
    events: Callable[[Simulation], None] | None = None,
    pace: float = 0.0,
    samples: int = SAMPLES,
    batch_size: int = 16,
    **options: Any,
) -> tuple[str, list[float]]:
    """Train on so many ranks; the digest of the state at the end, and the losses of all steps."""
    autocast, clip, accumulate = (options.pop(name, None) for name in ("autocast", "clip", "accumulate"))
    ends: list[str] = []
    losses: dict[int, float] = {}
    generators: list[bool] = []

    async def worker(job: Job, _: Simulation) -> None:
        torch.manual_seed(5)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        training = AsyncTraining(
            job, model, optimizer, Points(samples), batch_size=batch_size, shards=8, scheduler=scheduler, **options
        )
        before = torch.get_rng_state()
        async for step in training.epochs(EPOCHS):
            async with step:
                for x, y in step.shards:
                    with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
                        for part in range(accumulate or 1):
                            rows = slice(part, None, accumulate)
                            share = len(x[rows]) / len(x)
                            loss = functional.mse_loss(model(x[rows])[:, 0].float(), y[rows]) * share
                            step.backward(loss, more=part + 1 < (accumulate or 1))
                await asyncio.sleep(pace)
                if clip:
                    await step.reduce()
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
            if step.committed:
                assert losses.setdefault(step.number, step.loss) == step.loss
        generators.append(bool(torch.equal(before, torch.get_rng_state())))
        ends.append(training.digest())

    simulation = Simulation(worker, seed=3, settings=Settings(ranks=ranks, limit=300.0))
    if events is not None:
        events(simulation)
    outcome = simulation.run()
    assert outcome.error is None, outcome.error
    assert (outcome.aborted > 0) == (events is not None)
    assert len(set(ends)) == 1
    assert all(generators), "torch's generator is as it was"
    return ends[0], [losses[number] for number in sorted(losses)]


CASES = {
    "ordinary": {"make": of_ordinary_layers},
    "dropout and BatchNorm": {"make": of_dropout_and_running_means, "samples": 80, "batch_size": 32},
    "clipping": {"make": of_ordinary_layers, "clip": 0.1},
    "accumulation": {"make": of_ordinary_layers, "accumulate": 2, "samples": 80, "batch_size": 32},
    "a layer without gradients": {"make": WithUnused},
    "more shards than samples": {"make": of_ordinary_layers, "samples": 20},
    "bfloat16": {"make": lambda: of_ordinary_layers().to(torch.bfloat16), "autocast": True},
    "autocast": {"make": of_ordinary_layers, "autocast": True},
    "a scheduler each epoch": {"make": of_ordinary_layers, "scheduler_each": "epoch"},
}


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_one_rank_on_any_number_of_them(case: str) -> None:
    alone = trained(1, **CASES[case])
    assert len(alone[1]) >= EPOCHS * 2
    assert alone[1][-1] < alone[1][0]
    for ranks in deep((2, 8) if list(CASES).index(case) % 2 else (3, 5), (2, 3, 5, 8)):
        assert trained(ranks, **CASES[case]) == alone, ranks


@pytest.mark.parametrize("case", deep(list(CASES)[:4], list(CASES)))
def test_gradients_that_travel_in_the_backward_pass_have_the_same_bits(case: str) -> None:
    alone = trained(1, **CASES[case])
    for ranks, bucket_bytes in deep([(3, 100)], [(1, 1), (3, 100), (8, 1)]):
        assert trained(ranks, bucket_bytes=bucket_bytes, **CASES[case]) == alone, ranks


def test_a_rank_that_is_killed_while_gradients_travel_changes_no_bit() -> None:
    def events(sim: Simulation) -> None:
        for number in range(6):
            sim.at(0.4 + 1.3 * number).crash(1)
            sim.at(0.9 + 1.3 * number).restart(1)

    case: dict[str, Any] = {"make": of_dropout_and_running_means, "samples": 80, "batch_size": 32}
    assert trained(3, events=events, pace=0.25, bucket_bytes=1, **case)[0] == trained(1, **case)[0]


def test_a_rank_that_is_killed_and_comes_back_changes_no_bit() -> None:
    def events(sim: Simulation) -> None:
        sim.at(0.5).crash(1)
        sim.at(1.5).restart(1)

    case: dict[str, Any] = {"make": of_dropout_and_running_means, "samples": 80, "batch_size": 32}
    assert trained(3, events=events, pace=0.25, **case)[0] == trained(1, **case)[0]


def wrong(body: Callable[[AsyncTraining, torch.nn.Module], Any], **options: Any) -> str:
    """Run a wrong loop on one rank of two, a right one on the other; what the wrong one is told."""
    said: list[str] = []

    async def worker(job: Job, _: Simulation) -> None:
        model = of_ordinary_layers()
        training = AsyncTraining(
            job, model, torch.optim.SGD(model.parameters(), lr=0.1), Points(), batch_size=16, shards=8, **options
        )
        weights = [value.clone() for value in model.parameters()]
        if job.rank == 0:
            with pytest.raises(LocalError) as refused:
                await body(training, model)
            said.append(str(refused.value))
            assert all(map(torch.equal, weights, model.parameters())), "nothing was applied"
            assert all(value.grad is None for value in model.parameters())
        async for step in training.steps(1):
            async with step:
                for x, y in step.shards:
                    step.backward(functional.mse_loss(model(x)[:, 0], y))

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=2, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    return said[0]


async def never_entered(training: AsyncTraining, model: nn.Module) -> None:
    async for _ in training.steps(1):
        pass


async def left_early(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                step.backward(functional.mse_loss(model(x)[:, 0], y))
                break


async def computed_twice(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for _ in range(2):
                for x, y in step.shards:
                    step.backward(functional.mse_loss(model(x)[:, 0], y))


async def a_loss_for_each_sample(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                step.backward((model(x)[:, 0] - y).square())


async def reduced_twice(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                step.backward(functional.mse_loss(model(x)[:, 0], y))
            await step.reduce()
            await step.reduce()


def of_a_shard(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x)[:, 0], y)


async def a_backward_of_torchs(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                torch.autograd.backward(of_a_shard(model, x, y))


async def a_backward_of_torchs_before_ours(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                torch.autograd.backward(of_a_shard(model, x, y))
                step.backward(of_a_shard(model, x, y))


async def a_shard_without_backward(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for place, (x, y) in enumerate(step.shards):
                if place != 2:
                    step.backward(of_a_shard(model, x, y))


async def gradients_thrown_away_in_a_shard(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                step.backward(of_a_shard(model, x, y))
                model.zero_grad()


async def gradients_thrown_away_between_two_passes(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                for half in (slice(0, 1), slice(1, 2)):
                    model.zero_grad()
                    step.backward(of_a_shard(model, x[half], y[half]) / 2)


async def gradients_thrown_away_before_the_update(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                step.backward(of_a_shard(model, x, y))
            await step.reduce()
            model.zero_grad()


async def a_loss_outside(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            step.backward(model(torch.ones(2, 6)).mean())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (never_entered, "`with step:` around its work"),
        (left_early, "0 of the 4 shards of this rank are computed"),
        (computed_twice, "are computed once"),
        (a_loss_for_each_sample, "not of shape"),
        (reduced_twice, "reduced once"),
        (a_loss_outside, "outside of"),
        (a_backward_of_torchs, "call step.backward(loss) in place of loss.backward()"),
        (a_backward_of_torchs_before_ours, "call step.backward(loss) in place of loss.backward()"),
        (a_shard_without_backward, "a shard ended without step.backward(loss)"),
        (gradients_thrown_away_in_a_shard, "that step.backward(loss) has left are gone: remove zero_grad()"),
        (gradients_thrown_away_between_two_passes, "that step.backward(loss) has left are gone: remove zero_grad()"),
        (gradients_thrown_away_before_the_update, "that step.reduce() has left are gone: remove zero_grad()"),
    ],
)
def test_a_loop_that_is_wrong_is_told_so_changes_nothing_and_costs_the_others_one_attempt(
    body: Callable[[AsyncTraining, nn.Module], Any], words: str
) -> None:
    assert words in wrong(body)


@pytest.mark.parametrize("divide", [None, Divide(4)])
def test_what_training_steps_nobody_else_does_and_a_loop_that_tries_has_the_bits_of_one_that_does_not(
    divide: Divide | None,
) -> None:
    said: list[str] = []
    digests: list[str] = []

    async def looped(job: Job, tries: bool) -> None:
        torch.manual_seed(5)
        model = of_ordinary_layers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        training = AsyncTraining(
            job, model, optimizer, Points(), batch_size=16, shards=8, scheduler=scheduler, divide=divide
        )

        def tried() -> None:
            before = training.digest()
            for owned in (optimizer, scheduler) if tries else ():
                with pytest.raises(LocalError) as refused:
                    owned.step()
                said.append(str(refused.value))
                assert training.digest() == before

        async for step in training.steps(2):
            optimizer.zero_grad()  # harmless here
            async with step:
                for x, y in step.shards:
                    optimizer.zero_grad()  # and here
                    step.backward(of_a_shard(model, x, y))
                    tried()
                tried()
                await step.reduce()
                tried()
            tried()
            optimizer.zero_grad()
        digests.append(training.digest())
        if divide is None:
            optimizer.step()
        scheduler.step()  # both are the program's again
        assert training.digest() != digests[-1]
        assert type(scheduler) is torch.optim.lr_scheduler.CosineAnnealingLR

    async def refused(job: Job, _: Simulation) -> None:
        await looped(job, True)

    async def plain(job: Job, _: Simulation) -> None:
        await looped(job, False)

    for worker in (refused, plain):
        outcome = Simulation(worker, seed=3, settings=Settings(ranks=2, limit=100.0)).run()
        assert outcome.error is None, outcome.error
    assert len(digests) == 4
    assert len(set(digests)) == 1
    assert {words.split(", but")[0] for words in said} == {
        "optimizer.step() was called by the program",
        "scheduler.step() was called by the program",
    }
    assert "remove optimizer.step() from the loop" in said[0]
    assert all("changed nothing" in words for words in said)


async def two_last_passes(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                for half in (slice(0, 1), slice(1, 2)):
                    step.backward(functional.mse_loss(model(x[half])[:, 0], y[half]) / 2)


async def a_gradient_that_comes_twice(training: AsyncTraining, model: nn.Module) -> None:
    async for step in training.steps(1):
        async with step:
            for x, y in step.shards:
                again = checkpoint(model, x.requires_grad_(), use_reentrant=True)
                step.backward(functional.mse_loss(model(x)[:, 0], y) + again.mean())


@pytest.mark.parametrize(
    ("body", "words"),
    [(two_last_passes, "but its last says more=True"), (a_gradient_that_comes_twice, "came again after")],
)
def test_a_gradient_that_comes_after_its_bucket_was_sent_is_an_error_and_nothing_is_applied(
    body: Callable[[AsyncTraining, nn.Module], Any], words: str
) -> None:
    assert words in wrong(body, bucket_bytes=1)


def labels(wrong: bool) -> torch.utils.data.Dataset[Any]:
    x = torch.linspace(-1.0, 1.0, 6 * SAMPLES).reshape(SAMPLES, 6)
    y = torch.sin(3 * x.sum(1))
    y[7] += 0.25 * wrong
    return torch.utils.data.TensorDataset(x, y)


def test_a_blocking_loop_in_a_scenario_is_told_what_to_use_there() -> None:
    async def worker(job: Job, _: Simulation) -> None:
        model = of_ordinary_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(LocalError, match="AsyncTraining"), quicoll.blocking.join():
            pass
        with pytest.raises(LocalError, match=r"with a quicoll\..*Job.* use AsyncTraining"):
            Training(job, model, optimizer, Points(), batch_size=16, shards=8)

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=1, limit=100.0)).run()
    assert outcome.error is None, outcome.error


ANOTHER: dict[str, tuple[str, list[str]]] = {
    "model": ("module, line 3", ["ReLU", "Tanh"]),
    "lr": ("'optimizer, lr of SGD': 0.1 on worker-0, worker-1 and 0.2 on worker-2. Nothing was handed over: make", []),
    "data": ("'data': 44 samples, digest ", [" on worker-0, worker-1 and 44 samples, digest "]),
}


@pytest.mark.parametrize("another", ANOTHER)
def test_a_rank_with_another_model_setting_or_data_is_refused_by_name_and_the_others_train(another: str) -> None:
    committed: list[int] = []
    refused: list[str] = []

    async def worker(job: Job, _: Simulation) -> None:
        odd = another if job.node == "worker-2" else ""
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU() if odd == "model" else nn.Tanh(), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if odd == "lr" else 0.1)
        training = AsyncTraining(job, model, optimizer, labels(odd == "data"), batch_size=16, shards=8)
        try:
            async for step in training.steps(3):
                async with step:
                    for x, y in step.shards:
                        step.backward(of_a_shard(model, x, y))
        except LocalError as error:
            assert odd
            refused.append(str(error))
        else:
            committed.append(job.committed_step)

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=3, limit=100.0)).run()
    assert outcome.error is None, outcome.error
    assert committed == [3, 3]
    where, words = ANOTHER[another]
    assert len(refused) == 1
    assert all(each in refused[0] for each in ("this worker, worker-2, ", where, *words))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 16}, "shards="),
        ({"batch_size": 17, "shards": 8}, "must be a multiple of the 8 shards"),
        ({"data": None}, "how many logical shards"),
        ({"data": None, "shards": 8, "batch_size": 16}, "batch_size and loader are of a data set"),
        ({"data": 5, "shards": 8, "batch_size": 16}, "this is a int"),
        ({"batch_size": 16, "shards": 8, "scheduler_each": "day"}, "'step' or 'epoch', not 'day'"),
        ({"batch_size": 16, "shards": 8, "moving": ["mean"]}, "no buffer 'mean'"),
        ({"batch_size": 16, "shards": 8, "bucket_bytes": -1}, "bucket_bytes is 0 or more"),
    ],
)
def test_what_cannot_be_trained_is_refused_when_it_is_said(options: dict[str, Any], words: str) -> None:
    async def worker(job: Job, _: Simulation) -> None:
        model = of_ordinary_layers()
        with pytest.raises(LocalError, match=words):
            AsyncTraining(job, model, torch.optim.SGD(model.parameters(), lr=0.1), **{"data": Points(), **options})

    outcome = Simulation(worker, seed=3, settings=Settings(ranks=1, limit=100.0)).run()
    assert outcome.error is None, outcome.error
