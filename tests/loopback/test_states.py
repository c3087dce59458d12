"""Ranks whose states differ without a word: found, named, healed, or the job stops. REQUIREMENTS S8, S12."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch

from quicoll import Diverged, Event, Job, LocalError, StepAborted
from quicoll.testing import cluster


class Model:
    """A model of torch with BatchNorm, its optimizer and its scheduler, as a user has them: nothing is prepared."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    def save(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }

    def load(self, state: Any) -> None:
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])

    async def step(self, job: Job, data: torch.Tensor) -> int:
        async with job.step() as step:
            # The forward pass changes the buffers; where the step is aborted they are put back.
            buffers = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
            try:
                self.optimizer.zero_grad()
                self.net(data).square().mean().backward()
                gradients = [parameter.grad for parameter in self.net.parameters()]
                averages = [await job.group.all_reduce(gradient, op="avg") for gradient in gradients]
            except BaseException:
                for name, buffer in self.net.named_buffers():
                    buffer.copy_(buffers[name])
                raise

            def apply() -> None:
                for parameter, average in zip(self.net.parameters(), averages, strict=True):
                    parameter.grad = average
                self.optimizer.step()
                self.scheduler.step()

            step.on_commit(apply)
        return step.number


def bits(value: Any) -> Any:
    """A state with its tensors as bytes, for comparing."""
    if isinstance(value, torch.Tensor):
        return value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    return [bits(each) for each in value] if isinstance(value, list | tuple) else value


def all_equal(models: list[Model]) -> bool:
    return all(bits(model.save()) == bits(models[0].save()) for model in models)


async def train(
    jobs: list[Job], models: list[Model], *, steps: int, after: Callable[[Job, int], None] = lambda job, step: None
) -> list[Any]:
    """Every rank trains until `steps` are committed, on the same data or, by its seed, on its own."""

    async def one(job: Job) -> list[StepAborted]:
        aborted = []
        while job.committed_step < steps:
            try:
                number = await models[job.rank].step(job, torch.ones(4, 3) * torch.arange(4.0).unsqueeze(1))
            except StepAborted as error:
                aborted.append(error)
            else:
                after(job, number)
        return aborted

    return list(await asyncio.gather(*(one(job) for job in jobs), return_exceptions=True))


def register(jobs: list[Job], models: list[Model]) -> None:
    for job in jobs:
        job.register_state(models[job.rank].save, models[job.rank].load)


async def test_ranks_that_forgot_their_seed_begin_with_the_lowest_ranks_state(caplog: pytest.LogCaptureFixture) -> None:
    events: list[Event] = []
    async with cluster(3, observer=events.append) as jobs:
        models = [Model(seed) for seed in (1, 2, 3)]
        first = bits(models[0].save())
        register(jobs, models)
        await asyncio.gather(*(job.ready() for job in jobs))
        assert all_equal(models)
        assert bits(models[2].save()) == first
        assert await train(jobs, models, steps=2) == [[], [], []]
        assert all_equal(models)
        digests = await asyncio.gather(*(job.check_state() for job in jobs))
        assert len(set(digests)) == 1
        assert len(digests[0]) == 32
    handed = [event for event in events if event.kind == "state_handed"]
    assert len(handed) == 3
    assert all(
        event.fields
        == {"step": 0, "nodes": ["worker-1", "worker-2"], "tensor": "model.0.bias", "from_node": "worker-0"}
        for event in handed
    )
    assert [event.node for event in events if event.kind == "state_received"] != []
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert any("the state of worker-1, worker-2 at the start is not that of worker-0" in line for line in warned)


async def test_two_ranks_with_two_checkpoints_of_one_step_stop_with_one_message() -> None:
    async with cluster(2) as jobs:
        models = [Model(1), Model(2)]
        before = [bits(model.save()) for model in models]
        register(jobs, models)
        for job in jobs:
            job.resume_from(40)
        found = await train(jobs, models, steps=41)
        assert [type(error) for error in found] == [Diverged, Diverged]
        assert str(found[0]) == str(found[1])
        assert (
            "hold 2 different states after step 40 (worker-0 | worker-1): the first difference is in 'model.0.bias'"
            in str(found[0])
        )
        assert (found[0].nodes, found[0].usable) == (("worker-0", "worker-1"), False)
        assert [type(error) for error in await train(jobs, models, steps=41)] == [Diverged, Diverged]
        assert [bits(model.save()) for model in models] == before


async def test_of_three_checkpoints_of_one_step_the_one_that_differs_is_healed() -> None:
    events: list[Event] = []
    async with cluster(3, observer=events.append) as jobs:
        models = [Model(1), Model(2), Model(2)]
        right = bits(models[1].save())
        register(jobs, models)
        for job in jobs:
            job.resume_from(40)
        await asyncio.gather(*(job.ready() for job in jobs))
        assert all_equal(models)
        assert bits(models[0].save()) == right
        assert await train(jobs, models, steps=42) == [[], [], []]
    found = [event.fields for event in events if event.kind == "state_differs"]
    assert found == [{"step": 40, "nodes": ["worker-0"], "tensor": "model.0.bias", "from_node": "worker-1"}] * 3


@pytest.mark.parametrize("damage", ["a buffer", "a bit"])
async def test_a_state_that_changes_on_one_rank_alone_aborts_a_step_and_is_healed(damage: str) -> None:
    """A forward pass that one rank does more, as for a validation without eval(); a bit that flips in its memory."""
    events: list[Event] = []
    async with cluster(3, observer=events.append, state_check_every=3) as jobs:
        models = [Model(1) for _ in jobs]
        register(jobs, models)

        def spoil(job: Job, step: int) -> None:
            if (job.rank, step) != (1, 5) or spoiled:
                return
            spoiled.append(step)
            if damage == "a bit":
                models[1].net[2].weight.data.numpy().reshape(-1).view(np.uint8)[7] ^= 1
            else:
                with torch.no_grad():
                    models[1].net(torch.full((4, 3), 9.0) * torch.arange(4.0).unsqueeze(1))

        spoiled: list[int] = []
        aborted = await train(jobs, models, steps=9, after=spoil)
        assert spoiled == [5]
        tensor = {"a bit": "model.2.weight", "a buffer": "model.1.num_batches_tracked"}[damage]
        errors = [error for each in aborted for error in each if error.node == "worker-1"]
        assert errors
        assert all(error.step == 8 and f"in '{tensor}'" in str(error) for error in errors), errors
        # Whoever begins again early may meet the others still in the old view.
        assert {error.step for each in aborted for error in each} == {8}
        assert all_equal(models)
        assert {job.committed_step for job in jobs} == {9}
    found = [event.fields for event in events if event.kind == "state_differs"]
    assert found
    assert all((fields["step"], fields["nodes"], fields["tensor"]) == (7, ["worker-1"], tensor) for fields in found)


@pytest.mark.parametrize("averaged", [False, True])
async def test_buffers_that_each_rank_changes_by_its_own_data_are_found_after_the_first_step(averaged: bool) -> None:
    async with cluster(3) as jobs:
        models = [Model(1) for _ in jobs]
        register(jobs, models)

        async def one(job: Job) -> None:
            model = models[job.rank]
            while job.committed_step < 3:
                async with job.step() as step:
                    model.net(torch.full((4, 3), job.rank + 1.0) * torch.arange(4.0).unsqueeze(1))
                    buffers = [buffer for buffer in model.net.buffers() if buffer.is_floating_point()]
                    means = [await job.group.all_reduce(buffer, op="avg") for buffer in buffers]

                    def apply(buffers: Any = buffers, means: Any = means) -> None:
                        for buffer, mean in zip(buffers, means, strict=True):
                            if averaged:
                                buffer.copy_(mean)

                    step.on_commit(apply)

        found = await asyncio.gather(*map(one, jobs), return_exceptions=True)
        if averaged:
            assert found == [None] * 3
            assert all_equal(models)
        else:
            assert {type(error) for error in found} <= {Diverged, StepAborted}
            assert all("the first difference is in 'model.1.running_mean'" in str(error) for error in found)
            assert {job.committed_step for job in jobs} == {1}
            with pytest.raises(Diverged, match="BatchNorm's buffers"):
                await asyncio.gather(*(job.ready() for job in jobs))


async def test_a_bit_that_flips_between_two_ranks_stops_both() -> None:
    async with cluster(2, state_check_every=1) as jobs:
        models = [Model(1) for _ in jobs]
        register(jobs, models)

        def spoil(job: Job, step: int) -> None:
            if (job.rank, step) == (1, 2):
                models[1].net[0].bias.data[0] += 1.0

        found = await train(jobs, models, steps=9, after=spoil)
        assert [type(error) for error in found] == [Diverged, Diverged]
        assert "'model.0.bias'" in str(found[0])
        assert {job.committed_step for job in jobs} == {2}


async def test_ranks_with_other_settings_compare_as_often_as_the_lowest() -> None:
    async with cluster(2, state_check_every=2) as jobs:
        jobs[1]._steps._keeper._own_check_every = 5
        models = [Model(1) for _ in jobs]
        register(jobs, models)
        assert await train(jobs, models, steps=7) == [[], []]
        assert [job._steps._keeper._compared for job in jobs] == [5, 5]


async def test_what_is_no_state_is_refused_when_it_is_registered() -> None:
    async with cluster(1) as (job,):
        model = Model(1)
        with pytest.raises(LocalError, match=r"the state's 'model\.net' is a torch\.nn"):
            job.register_state(lambda: {"model": {"net": model.net}}, lambda state: None)
        with pytest.raises(LocalError, match=r"call job\.register_state"):
            await job.check_state()
        job.register_state(lambda: {"net": model.net.state_dict(), "data": object()}, lambda state: None, own=["data"])
        assert len(await job.check_state()) == 32


async def test_a_callback_that_fails_on_one_rank_is_made_good_from_a_nested_state() -> None:
    async with cluster(3) as jobs:
        models = [Model(1) for _ in jobs]
        register(jobs, models)
        await train(jobs, models, steps=2)
        step = copy.copy(models[1].optimizer.step)

        def fail() -> None:
            models[1].optimizer.step = step
            step()
            raise ValueError("after the optimizer's step, before the scheduler's")

        models[1].optimizer.step = fail

        async def again(job: Job) -> None:
            while job.committed_step < 5:
                with suppress(StepAborted, ValueError):
                    await models[job.rank].step(job, torch.ones(4, 3) * torch.arange(4.0).unsqueeze(1))

        await asyncio.gather(*(again(job) for job in jobs))
        assert all_equal(models)
