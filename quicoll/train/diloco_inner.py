"""The inner steps of DiLoCo: what a rank computes of them, in the memory of logical workers.

    parts       of each worker of its home the logical shards that are this rank's, with their samples
    alone       where a worker is one shard: forward, backward, `inner.step()`, in the worker's memory. Nothing is sent
    together    where it is several: their gradients are reduced between the ranks of the home, which all step

Invariant: what an inner step computes is a function of the worker's memory, the number of the step and the samples. It
moves what is in `RoundWork` and nothing else: a round that has not begun, or is aborted, leaves no trace.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from quicoll.data.feed import Feed
from quicoll.train.diloco_workers import in_place_of
from quicoll.train.task import Part

if TYPE_CHECKING:
    import torch

    from quicoll.data.portions import Position
    from quicoll.data.sampler import Sampler
    from quicoll.job import Job
    from quicoll.train.diloco_lanes import SiteLanes
    from quicoll.train.diloco_round import RoundWork
    from quicoll.train.diloco_sites import WorkerHome
    from quicoll.train.diloco_stretches import Stretches
    from quicoll.train.diloco_task import RoundsTask
    from quicoll.train.diloco_workers import LogicalWorker
    from quicoll.train.figures import StepTimes
    from quicoll.train.worker import OnStep

__all__ = ["InnerSteps"]


class InnerSteps:
    """See the module's head."""

    def __init__(
        self,
        job: Job,
        task: RoundsTask,
        inner: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        *,
        data: Sampler | Feed | None,
        shards: int,
        parts: int,
        every: int,
        schedule: Callable[[int], float] | None,
        on_inner_step: OnStep | None,
    ) -> None:
        """Say what is computed.

        Args:
            job: Of the ranks.
            task: Forward and backward.
            inner: The optimizer of the workers, as it was made.
            parameters: Those of the module that are trained.
            data: As in `DiLoCo`, and so are the others.
            shards: Of an inner step.
            parts: Of them, those of a worker.
            every: Inner steps of a round.
            schedule: By what the rates are multiplied in an inner step.
            on_inner_step: Is called after each.
        """
        self._job, self._task, self._inner, self._parameters = job, task, inner, parameters
        self._data = data
        self._sampler = data.sampler if isinstance(data, Feed) else data
        self._shards, self._parts, self._every = shards, parts, every
        self._rates = [group["lr"] for group in inner.param_groups]
        self._schedule, self._on_inner_step = schedule, on_inner_step

    async def do(self, work: RoundWork, times: StepTimes) -> None:
        """Do the next inner step of a round for each logical worker here.

        Args:
            work: The round; so far as it is done afterwards.
            times: What it takes, and what of that is waiting, is added here.
        Raises:
            PeerError: A rank of the home was lost.
            Exception: What the loss, the loader or `on_inner_step` raises.
        """
        work.done += 1
        lanes, workers, said, done, position = work.lanes, work.workers, work.said, work.done, work.position
        number = (work.number - 1) * self._every + done
        clock = asyncio.get_running_loop().time
        if self._parts == 1 and said.late:
            said.stop(done - 1)
        doing = [said.does(place, done) for place in range(len(workers))]
        began = clock()
        parts_of = self._parts_of(lanes.home, number, position if any(doing) or not workers else None)
        weights = [[1.0] * len(lanes.home.parts) for _ in workers]
        if self._sampler is not None and position is not None:
            # At the end of an epoch some parts, or all of a worker, may have no samples.
            samples = self._sampler.samples(position)
            total, cuts = self._shards, range(0, self._shards + 1, self._parts)
            of_workers = [b * samples // total - a * samples // total for a, b in pairwise(cuts)]
            doing = [does and of_workers[worker.shard] > 0 for worker, does in zip(workers, doing, strict=True)]
            weights = [
                [(0 if part.indices is None else part.indices.size) * self._parts / max(mine, 1) for part in parts]
                for parts, mine in zip(parts_of, (of_workers[worker.shard] for worker in workers), strict=True)
            ]
            work.samples += samples
            work.position = self._sampler.after(position)
        times.data += clock() - began
        factor = 1.0 if self._schedule is None else self._schedule(number)
        if self._parts == 1:
            for worker, (part,), does in zip(workers, parts_of, doing, strict=True):
                if does:
                    loss, gradients = self._gradients(worker, part)
                    self._train_worker(worker, loss, gradients, factor)
        elif any(doing):
            chosen = [place for place, does in enumerate(doing) if does]
            late = await self._train_together(
                lanes, [workers[place] for place in chosen], [parts_of[place] for place in chosen],
                [weights[place] for place in chosen], said, factor, times,
            )  # fmt: skip
            if late:
                said.stop(done)
        if not any(doing) and workers:
            return
        waiting = None if self._on_inner_step is None else self._on_inner_step(number)
        # Whoever wants to be heard on this loop, such as the handler of SIGTERM, is heard after each inner step.
        await (waiting if inspect.isawaitable(waiting) else asyncio.sleep(0))

    def _parts_of(self, home: WorkerHome, number: int, position: Position | None) -> list[list[Part]]:
        """The parts of an inner step that this rank computes, of each worker of its home.

        position: of their samples; None: these are not used, or there is no data.
        """
        seed, count = self._job.seed.for_step(number), len(home.parts)
        firsts = [worker * self._parts + home.parts.start for worker in home.workers] if count else []
        nothing = replace(self._job.group.shards(self._shards), first=0, count=0)
        runs = [replace(nothing, first=first, count=count) for first in firsts] or [nothing]
        if self._data is None or position is None:
            found = [Part(number, shard, seed.for_shard(shard)) for run in runs for shard in run]
        else:
            found = [
                Part(number, each.shard, seed.for_shard(each.shard), each.indices, each.samples)
                for each in self._data.portions(position, *runs)
            ]
        return [found[place * count : (place + 1) * count] for place in range(len(home.workers))]

    def _gradients(self, worker: LogicalWorker, part: Part) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """The loss of a part, and the gradients, of a worker."""
        import torch

        with in_place_of(self._parameters, worker.values):
            loss = self._task.forward(part)
            return loss[0].detach(), [torch.as_tensor(each) for each in self._task.backward(loss)]

    async def _train_together(
        self,
        lanes: SiteLanes,
        workers: Sequence[LogicalWorker],
        work: Sequence[Sequence[Part]],
        weights: Sequence[Sequence[float]],
        said: Stretches,
        factor: float,
        times: StepTimes,
    ) -> bool:
        """Do an inner step of workers, with all ranks of this home; return whether any of these is late."""
        import torch

        size, leaves = sum(each.numel() for each in self._parameters), []
        for place in range(len(lanes.home.parts)):
            leaf = []
            for worker, parts, its in zip(workers, work, weights, strict=True):
                flat = torch.zeros(size + 2)  # the loss and the word of a late rank go along
                if its[place]:
                    loss, gradients = self._gradients(worker, parts[place])
                    torch.cat([*(each.reshape(-1) for each in gradients), loss.reshape(1)], out=flat[:-1])
                    flat *= its[place]
                flat[-1] = float(said.late)
                leaf.append(flat)
            leaves.append(leaf)
        clock = asyncio.get_running_loop().time
        began = clock()
        means = await lanes.mean(leaves, [torch.empty(size + 2) for _ in workers])
        times.communication += clock() - began
        sizes = [each.numel() for each in self._parameters]
        for worker, mean in zip(workers, means, strict=True):
            flats = zip(torch.split(mean[:size], sizes), self._parameters, strict=True)
            gradients = [flat.view_as(each).to(each.device) for flat, each in flats]
            self._train_worker(worker, mean[size], gradients, factor)
        return any(float(mean[-1]) > 0.0 for mean in means)

    def _train_worker(
        self, worker: LogicalWorker, loss: torch.Tensor, gradients: Sequence[torch.Tensor], factor: float
    ) -> None:
        """Let a worker's inner optimizer step."""
        with in_place_of(self._parameters, worker.values, self._inner, worker.state) as state:
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
                group["lr"] = rate * factor
            try:
                self._inner.step()
            finally:
                for group, rate in zip(self._inner.param_groups, self._rates, strict=True):
                    group["lr"] = rate
        worker.state = state
        worker.loss = worker.loss + loss.double()  # read at the end of the round: a device is not waited for
        worker.steps += 1
