"""An optimizer whose state is divided between the ranks (ZeRO-1), for a torch loop: all ranks have the parameters, one
rank and its backups the moments of each.

    training = quicoll.torch.Training(job, model, torch.optim.AdamW(model.parameters()), ..., divide=Divide())

For each dtype of the parameters there is an **axis**: all elements of those parameters, cut into blocks, as many on any
number of ranks. Who owns and keeps what, and how it follows the ranks, is quicoll.state.sharded's part; how the
optimizer steps a block quicoll.train.block_optimizer's. What happens here is one step of a loop:

    computed   --reduce()-------> `.grad` is the mean on all ranks; what the program does with it is its own
               --no reduce()----> each rank gets the mean of what it owns, and no more (reduce_scatter)
    owned      --block by block-> new values and moments of what this rank owns, in memory of their own
    staged     the moments are offered to the step (Sharded.stage): digests to all, copies to the backups
    gathered   all ranks have all new values
    committed  on all ranks: values into the parameters, moments and counters are those of the step
    aborted    all of it is forgotten

Invariants.
1. Nothing but the commit changes a parameter, a moment or a counter; and a commit only copies.
2. What a block becomes depends on its values, gradients and moments, on the counters and the groups' settings: on
   neither its owner nor the number of ranks. So the bits are those of one rank.
3. They are those of the undivided optimizer, too. torch computes most elements of a tensor with vector instructions and
   those left over at its end one by one, which may round otherwise (bfloat16). So each parameter begins at a multiple
   of `ALIGNMENT` elements, and so does each block: whatever is cut off a parameter but its end consists of whole
   vectors. What lies between is zero and counts for nothing. Where torch cuts a tensor of more than 32,768 elements
   among its threads it is torch that begins in the middle of a vector: then float32 still agrees, and a bfloat16 may
   differ in its last bit from the undivided one; not from that on another number of ranks.
4. The optimizer's own `state` is empty: no rank has memory for moments that it neither owns nor keeps for others.

Failures. An optimizer that does not work element by element, has a state already, or has none to divide: LocalError,
when it is said. A state that was saved of another division, or of none: LocalError from `load_state_dict`. A rank that
is lost with what it owned: its backup; else a checkpoint of that step; else ShardLost, on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quicoll.errors import LocalError
from quicoll.state.sharded import Sharded
from quicoll.train.block_optimizer import BlockOptimizer, StepCounters
from quicoll.train.divided import PieceArchive

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Shard
    from quicoll.checkpoint.storage import Place
    from quicoll.collectives.group import Group
    from quicoll.collectives.shards import Shards
    from quicoll.plan.schedule import AlgorithmName
    from quicoll.state.sharded import StagingStep
    from quicoll.train.divided import Divide

__all__ = ["ALIGNMENT", "DividedOptimizer"]

ALIGNMENT = 64
"""Elements: two vectors of 512 bits of bfloat16, which is what torch's widest loops take at once."""


class DividedOptimizer:
    """See the module's head. It has `state_dict` and `load_state_dict` in the optimizer's place.

    Attributes:
        sharded: What is divided, by name, for `Job.register_state`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        divide: Divide,
        directory: Place | None = None,
    ) -> None:
        """Take an optimizer that has not stepped.

        Args:
            optimizer: Of the parameters, and perhaps of others, which it is not given.
            parameters: Those that are trained, by name.
            divide: How its state is divided.
            directory: Where checkpoints are; None: nowhere.
        Raises:
            LocalError: It cannot be divided, or keeps nothing for its parameters.
        """
        self._optimizer = optimizer
        dtypes = dict.fromkeys(each.dtype for each in parameters.values())
        of_dtype = {dtype: [n for n, each in enumerate(parameters.values()) if each.dtype is dtype] for dtype in dtypes}
        values = list(parameters.values())
        self._axes = [
            _Axis(optimizer, dtype, places, [values[place] for place in places], divide, directory)
            for dtype, places in of_dtype.items()
        ]
        self.sharded = {axis.name: axis.sharded for axis in self._axes}

    @property
    def text(self) -> str:
        """What has to be the same on all ranks."""
        return "; ".join(f"{axis.name}: {axis.sharded.pieces.spec.text}" for axis in self._axes)

    # -- the state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what all ranks have: the groups' settings, and how far the parameters are."""
        groups = self._optimizer.state_dict()["param_groups"]
        return {"param_groups": groups, "progress": {axis.name: axis.blocks.state() for axis in self._axes}}

    def load_state_dict(self, state_dict: Mapping[Any, Any], /) -> None:
        """Take that over.

        Args:
            state_dict: What `state_dict` returned, here or on another rank.
        Raises:
            LocalError: It is of an optimizer that is not divided, or divided otherwise.
        """
        progress = state_dict.get("progress")
        if not isinstance(progress, Mapping) or sorted(progress) != sorted(self.sharded):
            raise LocalError(
                f"the state is of an optimizer that is not divided as this one is, into {', '.join(self.sharded)}"
            )
        for axis in self._axes:
            axis.blocks.load(state_dict["param_groups"], progress[axis.name])

    def digests(self) -> dict[str, Any]:
        """Return the digests of all blocks as of the last committed step: equal on all ranks, and on any number."""
        return {axis.name: axis.sharded.pieces.record()["digests"] for axis in self._axes}

    def parts(self) -> dict[str, Shard]:
        """Return what this rank writes of it in a checkpoint."""
        return {name: part for axis in self._axes for name, part in axis.archive.parts(axis.sharded).items()}

    # -- a step --------------------------------------------------------------------------------------------------------

    def owned(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return this rank's elements of gradients that all ranks have.

        Args:
            gradients: Of each parameter, in their order; None where it has none.
        Returns:
            For each axis the elements that this rank owns.
        """
        return [axis.flat(gradients, axis.sharded.mine.start, axis.sharded.mine.stop) for axis in self._axes]

    async def scattered(
        self, group: Group, shards: Shards, leaves: Sequence[Sequence[torch.Tensor]], algorithm: AlgorithmName
    ) -> list[torch.Tensor]:
        """Average gradients over all shards; each rank gets what it owns.

        Args:
            group: The job's.
            shards: Those of this rank.
            leaves: The gradients of each of them, in the parameters' order.
            algorithm: As in `Group.reduce_scatter`.
        Returns:
            As `owned`.
        Raises:
            PeerError: A rank was lost.
        """
        handles = []
        for axis in self._axes:
            length = axis.sharded.pieces.spec.length
            flats = [axis.flat(leaf, 0, length) for leaf in leaves]
            handles.append(
                group.reduce_scatter(
                    shards.leaves(flats, like=torch.empty(length, dtype=axis.dtype)),
                    op="avg",
                    counts=axis.sharded.counts,
                    algorithm=algorithm,
                )
            )
        return [await handle for handle in handles]

    async def stage(
        self, step: StagingStep, group: Group, owned: Sequence[torch.Tensor], had: Sequence[bool]
    ) -> Callable[[], None]:
        """Compute the step of what this rank owns, and give all ranks the new values. Nothing has changed then.

        Args:
            step: The open step.
            group: The job's.
            owned: The gradients of what this rank owns, as `owned` returns them.
            had: Whether each parameter has a gradient in this step; equal on all ranks.
        Returns:
            What is left for the commit.
        Raises:
            PeerError: A rank was lost.
            Corrupted: A copy that came is not what its owner told.
        """
        commits: list[Callable[[], None]] = []
        for axis, gradients in zip(self._axes, owned, strict=True):
            its = [had[place] for place in axis.places]
            values, moments = axis.updated(gradients, its)
            progress = axis.blocks.advanced(its)
            gathered = group.all_gather(values, counts=axis.sharded.counts)
            await axis.sharded.stage(step, moments)
            commits.append(partial(axis.commit, await gathered, progress))
        return partial(_all, commits)


class _Axis:
    """The parameters of one dtype, one after the other. places: their numbers among all that are trained."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        dtype: torch.dtype,
        places: Sequence[int],
        parameters: Sequence[torch.nn.Parameter],
        divide: Divide,
        directory: Place | None,
    ) -> None:
        self.dtype = dtype
        self.name = f"optimizer.{str(dtype).removeprefix('torch.')}"
        self.places = places
        self._parameters = parameters
        self._starts, end = [], 0
        for each in parameters:
            self._starts.append(end)
            end += _rounded(each.numel(), ALIGNMENT)
        self.blocks = BlockOptimizer(optimizer, parameters, starts=self._starts)
        if not self.blocks.moments:
            raise LocalError(
                f"{type(optimizer).__name__} keeps no state for its parameters: there is nothing to divide"
            )
        self.archive = PieceArchive(f"divided.{self.name}.", directory, "torch")
        self.sharded = Sharded(
            _rounded(end, ALIGNMENT * divide.blocks),
            self.blocks.moments,
            blocks=divide.blocks,
            backup=divide.backup,
            read=self._read,
            torch=True,
        )
        self.sharded.index = self.archive

    def _read(self, step: int, name: str, start: int, stop: int) -> Any:
        return self.archive.read(self.sharded, step, name, start, stop)

    def flat(self, gradients: Sequence[torch.Tensor | None], start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the axis, on the host; zeros where there is no gradient."""
        found = torch.zeros(stop - start, dtype=self.dtype)
        for place, begin in zip(self.places, self._starts, strict=True):
            gradient = gradients[place]
            if gradient is None:
                continue
            first, last = max(start, begin), min(stop, begin + gradient.numel())
            if first < last:
                found[first - start : last - start] = gradient.detach().reshape(-1)[first - begin : last - begin]
        return found

    def updated(self, gradients: torch.Tensor, had: Sequence[bool]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """New values and moments of what this rank owns, block by block: their bounds do not depend on the ranks."""
        spec, first = self.sharded.pieces.spec, self.sharded.mine.start
        held = {name: self.sharded[name] for name in spec.dtypes}
        values = torch.empty_like(gradients)
        kept = {name: torch.empty_like(each) for name, each in held.items()}
        for block in self.sharded.pieces.owned:
            start, stop = spec.bounds(range(block, block + 1))
            at = slice(start - first, stop - first)
            values[at], moments = self.blocks.update(
                start, stop, gradients[at], {name: each[at] for name, each in held.items()}, had
            )
            for name, each in moments.items():
                kept[name][at] = each
        return values, kept

    def commit(self, values: torch.Tensor, progress: StepCounters) -> None:
        with torch.no_grad():
            for parameter, start in zip(self._parameters, self._starts, strict=True):
                parameter.copy_(values[start : start + parameter.numel()].view(parameter.shape))
        self.blocks.progress = progress


def _rounded(count: int, to: int) -> int:
    return -(-count // to) * to


def _all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
