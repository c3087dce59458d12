"""A DistributedDataParallel whose gradients have the same bits on any number of ranks.

    model = DistributedDataParallel(net)                 # over Gloo, NCCL or "quicoll"
    hook = quicoll.torch.CanonicalHook(model, shards=8)  # and then as before
    for step, (x, y) in enumerate(batches):
        for shard in hook.shards(step):                  # those of this rank
            loss(model(x[shard::8]), y[shard::8]).backward()
        optimizer.step()

DDP averages over ranks, each of which has summed over its own samples: with another number of ranks other numbers are
added in another order. Here a batch is divided into logical shards, whose number stays; each has a backward pass of its
own, and what is averaged are the shards, in the canonical order (quicoll.numerics.canonical_order).

States of a step:

    between steps --shards()--> in shard 1 .. n-1    under DDP's no_sync: its gradients stay here, and are kept
                                in shard n, the last DDP hands over each bucket, which is reduced with what was kept
    in a shard --next, after its backward pass--> the next one, or between steps

Invariants.
1. When a shard begins no parameter has a gradient, so what there is after its backward pass is this shard's alone.
2. Each rank has one pass in a step that DDP knows of, however many shards it has: what DDP sends by itself, as buffers
   or the order of buckets, is sent by all ranks or by none.
3. Every rank reduces each bucket once in a step, in DDP's order, which is the same on all ranks. An element's bits are
   those of the tree over the shards, whichever bucket it travels in.

Failures: a rank for which there is no shard, a model that looks for unused parameters (which it takes for unused would
depend on the last shard of a rank), a shard that leaves a parameter without gradient: LocalError. What fails in a
reduction arrives from `backward`, as DDP's own errors do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from quicoll.checks import whole
from quicoll.errors import LocalError, QuicollError
from quicoll.numerics.seed import Seed
from quicoll.torch.groups import blocking_group, no_engine_thread
from quicoll.torch_backend.failures import for_torch
from quicoll.torch_backend.process_group import Described
from quicoll.torch_backend.work import OperationWork, WorkHome

if TYPE_CHECKING:
    from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, though not in its __all__
    from torch.nn.parallel import DistributedDataParallel

    from quicoll.collectives.shards import Shards

__all__ = ["CanonicalHook"]

_DEFAULT_S = 1800.0  # torch's own


class CanonicalHook:
    """A communication hook of DDP: gradients are means over logical shards, with the same bits on any number of ranks.

    See the module's head for how a loop uses it. The hook is for gradients: buffers, as BatchNorm's running statistics,
    stay DDP's, which gives all ranks those of rank 0. Where these have to agree as well, `quicoll.torch.Training`.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        shards: int,
        group: Any = None,
        seed: int | None = None,
        timeout: float = _DEFAULT_S,
    ) -> None:
        """Register the hook.

        Args:
            model: What DDP has wrapped, with whichever backend; no hook is registered, and no backward pass was run.
            shards: In how many logical shards each batch is divided, at least as many as there are ranks.
            group: What reduces, of the same ranks: `job.group`, or a process group of the backend "quicoll". None takes
                the model's own process group where its backend is "quicoll", else torch's default group.
            seed: For each shard torch's generators are seeded from this, the step and the shard, so that dropout draws
                the same on whichever rank it is. None leaves them alone.
            timeout: Seconds for the reduction of a bucket.
        Raises:
            LocalError: There is no group of quicoll's, its ranks are not the model's, a rank would have no shard, or
                the model looks for unused parameters.
        """
        own: Any = model.process_group
        self._group = blocking_group(own if group is None and isinstance(own, Described) else group).for_threads()
        self._total = whole(shards, "shards")
        self._seed = None if seed is None else Seed(seed)
        self._timeout = timeout
        if model.find_unused_parameters:
            raise LocalError(
                "a model with find_unused_parameters=True: which parameters are unused would depend on the shards that "
                "a rank has last; make every parameter part of every loss, or use quicoll.torch.Training"
            )
        mine = (self._group.rank, self._group.world_size)
        torchs = (model.process_group.rank(), model.process_group.size())
        if mine != torchs:
            raise LocalError(f"rank {torchs[0]} of {torchs[1]} in the model's group is {mine[0]} of {mine[1]} here")
        if self._total < mine[1]:
            raise LocalError(f"{self._total} shards for {mine[1]} ranks: each rank needs at least one")
        self._parameters = [each for each in model.parameters() if each.requires_grad]
        self._model = model
        self._home = WorkHome(no_engine_thread)
        self._shards: Shards | None = None  # while its last shard is open
        self._kept: dict[int, list[torch.Tensor]] = {}  # by a parameter's identity, the leaves of the earlier shards
        # A lambda, because torch compares annotations with classes, and here they are text.
        model.register_comm_hook(self, lambda hook, bucket: hook.reduce(bucket))

    def shards(self, step: int) -> Iterator[int]:
        """Go through this rank's shards of a step; after each comes one backward pass.

        Args:
            step: Its number, equal on all ranks; what `seed` is drawn for.
        Yields:
            The number of a shard, below `shards`. After the last one's backward pass gradients are the mean over all.
        Raises:
            LocalError: The shard before had no backward pass that reached all parameters.
        """
        own, last = self._group.shards(self._total), None
        rows: list[list[torch.Tensor]] = []
        try:
            for place, shard in enumerate(own):
                for parameter in self._parameters:
                    parameter.grad = None
                if self._seed is not None:
                    torch.manual_seed(int(self._seed.for_step(step).for_shard(shard)))
                if place < len(own) - 1:
                    with self._model.no_sync():
                        yield shard
                    rows.append(self._gradients(shard))
                    continue
                self._kept = {id(each): list(leaves) for each, *leaves in zip(self._parameters, *rows, strict=True)}
                self._shards = last = own
                yield shard
                self._gradients(shard)
                if self._kept:
                    raise LocalError(f"shard {shard} had no backward pass outside of the model's no_sync")
        finally:
            if last is not None:
                self._shards = None
                self._kept = {}

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket: DDP calls this, in a backward pass.

        Args:
            bucket: Gradients of this shard, flat; in its memory the result will be.
        Returns:
            A future of the bucket's tensor.
        Raises:
            LocalError: Outside of a shard, or for the second time in one.
            QuicollError: The reduction cannot be started.
        """
        own, flat, parameters = self._shards, bucket.buffer(), bucket.parameters()
        if own is None:
            raise for_torch(LocalError("a backward pass of DDP's outside of `for shard in hook.shards(step)`"))
        kept = [self._kept.pop(id(each), None) for each in parameters]
        if None in kept:
            raise for_torch(
                LocalError("a second backward pass in a shard; all but the last go under the model's no_sync")
            )
        earlier = [[leaves[place] for leaves in kept if leaves] for place in range(len(own) - 1)]
        leaves = own.leaves([*earlier, [each.detach() for each in bucket.gradients()]])
        try:
            handle = self._group.all_reduce(leaves, op="avg", timeout=self._timeout)
        except QuicollError as error:
            raise for_torch(error) from error.__cause__

        def put(results: list[Any]) -> None:
            for gradient, mean in zip(bucket.gradients(), results[0], strict=True):
                gradient.copy_(mean)

        work = OperationWork(self._home, "the reduction of a bucket", [handle.pending], [flat], put, self._timeout)
        future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda ended: ended.value()[0])
        return future

    def _gradients(self, shard: int) -> list[torch.Tensor]:
        """Return the gradients that a shard has left. Raises LocalError where one is missing."""
        found = [each.grad for each in self._parameters if each.grad is not None]
        if len(found) != len(self._parameters):
            missing = len(self._parameters) - len(found)
            raise LocalError(f"{missing} parameters had no gradient in the backward pass of shard {shard}")
        return found
