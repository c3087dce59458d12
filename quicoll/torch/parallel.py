"""Layers whose weights are divided among ranks (tensor parallel), with uneven parts where they do not come out even.

    up = ColumnParallelLinear.of(nn.Linear(64, 250), group)     # each rank computes some of the outputs
    down = RowParallelLinear.of(nn.Linear(250, 64), group)      # each rank uses some of the inputs; parts are added
    y = down(torch.relu(up(x)))                                 # as the two layers give it, on every rank

As in Megatron-LM (arXiv:1909.08053): what goes into a column parallel layer and what comes out of a row parallel one is
equal on all ranks, and so is the loss, which every rank computes and differentiates on its own. In between each rank
has its own part, and nothing is sent. With `sequence_parallel` (arXiv:2205.05198) what goes in and comes out is divided
along dimension -2, the sequence, as `parts` says: half of the messages' bytes stay, and none of the memory.

Every layer is made of an undivided one, of which each rank keeps its part: so all begin with the numbers that one
process would begin with, however many ranks there are. `whole` gives the undivided layer back, for checkpoints and for
another number of ranks. All ranks call it.

Numbers. A column parallel layer's outputs are those of the undivided one, up to what a matrix product of another shape
rounds otherwise. The parts of a row parallel layer are added in the canonical order of the ranks, so their bits are the
same in every run with equally many ranks, and others with another number. Gradients of weights are of the rank's part;
of what all ranks hold alike (a row parallel bias) they are equal on all ranks.

Failures: as `quicoll.torch.functional`. A layer that is given another number of features raises torch's own error.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from quicoll.errors import LocalError
from quicoll.torch import functional
from quicoll.torch.groups import blocking_group

__all__ = ["ColumnParallelLinear", "ParallelAttention", "ParallelMLP", "RowParallelLinear", "parts"]

_SEQUENCE = -2
_MORE = {"bias_k", "bias_v"}  # parameters of an attention that are not divided


def parts(total: int, world_size: int) -> list[int]:
    """Divide a number into one part for each rank, as even as can be; the first ones are the larger ones.

    Args:
        total: What is divided, e.g. features, heads, or the length of a sequence.
        world_size: Of the group.
    Returns:
        The parts, by rank; some are zero where there are more ranks.
    """
    least, more = divmod(total, world_size)
    return [least + (rank < more) for rank in range(world_size)]


class _Linear(Protocol):
    """An undivided layer, e.g. nn.Linear."""

    @property
    def weight(self) -> torch.Tensor: ...

    @property
    def bias(self) -> torch.Tensor | None: ...


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs. See the module's head."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, group: Any, counts: list[int], *, sequence_parallel: bool
    ) -> None:
        """Make this rank's part of a layer; `of` is how programs do it.

        Args:
            weight: This rank's rows of the weight, (outputs of this rank, inputs).
            bias: This rank's part of the bias, or None.
            group: As for `quicoll.torch.functional.all_reduce`.
            counts: How many outputs each rank has.
            sequence_parallel: Whether what comes in is divided along dimension -2.
        """
        super().__init__()
        self.group, self.counts, self.sequence_parallel = blocking_group(group), counts, sequence_parallel
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @classmethod
    def of(
        cls, layer: _Linear, group: Any = None, *, counts: list[int] | None = None, sequence_parallel: bool = False
    ) -> ColumnParallelLinear:
        """Take this rank's part of a layer, which is equal on all ranks.

        Args:
            layer: The undivided layer.
            group: As for `quicoll.torch.functional.all_reduce`.
            counts: How many outputs each rank computes; None for parts as even as can be.
            sequence_parallel: What comes in is this rank's part of the sequence, of which every rank gets the whole.
        Returns:
            The layer. It gives this rank's outputs, (..., counts[rank]); `together` puts those of all ranks together.
        Raises:
            LocalError: The counts are not those of the outputs.
        """
        own = blocking_group(group)
        known = _counts(counts, layer.weight.shape[0], own)
        begin, length = sum(known[: own.rank]), known[own.rank]
        bias = None if layer.bias is None else layer.bias.narrow(0, begin, length)
        weight = layer.weight.narrow(0, begin, length)
        return cls(weight, bias, own, known, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's outputs.

        Args:
            x: (..., inputs), equal on all ranks; or with `sequence_parallel` this rank's part of the sequence.
        Returns:
            (..., outputs of this rank).
        """
        if self.sequence_parallel:
            x = functional.all_gather(x, self.group, dim=_SEQUENCE)
        else:
            x = functional.enter(x, self.group)
        return F.linear(x, self.weight, self.bias)

    def together(self, y: torch.Tensor) -> torch.Tensor:
        """Put the outputs of all ranks together, for what needs all of them.

        Args:
            y: What the layer gave, or something of the same last dimension.
        Returns:
            (..., outputs), equal on all ranks.
        """
        return functional.join_parts(y, self.group, dim=-1, counts=self.counts)

    def whole(self) -> nn.Linear:
        """Return the undivided layer, with the present weights. All ranks call it."""
        with torch.no_grad():
            weight = functional.join_parts(self.weight, self.group, counts=self.counts)
            bias = None if self.bias is None else functional.join_parts(self.bias, self.group, counts=self.counts)
        return _linear(weight, bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank uses some of the inputs; what they give is added. See the module's head."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, group: Any, counts: list[int], *, sequence_parallel: bool
    ) -> None:
        """Make this rank's part of a layer; `of` is how programs do it.

        Args:
            weight: This rank's columns of the weight, (outputs, inputs of this rank).
            bias: The bias, which all ranks hold, or None.
            group: As for `quicoll.torch.functional.all_reduce`.
            counts: How many inputs each rank has.
            sequence_parallel: Whether what comes out is divided along dimension -2.
        """
        super().__init__()
        self.group, self.counts, self.sequence_parallel = blocking_group(group), counts, sequence_parallel
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    @classmethod
    def of(
        cls, layer: _Linear, group: Any = None, *, counts: list[int] | None = None, sequence_parallel: bool = False
    ) -> RowParallelLinear:
        """Take this rank's part of a layer, which is equal on all ranks.

        Args:
            layer: The undivided layer.
            group: As for `quicoll.torch.functional.all_reduce`.
            counts: How many inputs each rank has; None for parts as even as can be.
            sequence_parallel: Each rank gets its part of the sequence, as `parts` divides it, and not the whole.
        Returns:
            The layer. It takes this rank's inputs, (..., counts[rank]).
        Raises:
            LocalError: The counts are not those of the inputs.
        """
        own = blocking_group(group)
        known = _counts(counts, layer.weight.shape[1], own)
        weight = layer.weight.narrow(1, sum(known[: own.rank]), known[own.rank])
        return cls(weight, layer.bias, own, known, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute this rank's share of the outputs, and add those of all ranks.

        Args:
            x: (..., inputs of this rank), as a column parallel layer gives them.
        Returns:
            (..., outputs), equal on all ranks; or with `sequence_parallel` this rank's part of the sequence.
        """
        y = F.linear(x, self.weight)
        if self.sequence_parallel:
            counts = parts(y.shape[_SEQUENCE], self.group.world_size)
            y = functional.reduce_scatter(y, self.group, dim=_SEQUENCE, counts=counts)
            # Each rank adds it to its own part of the sequence: its gradient is the sum over all of them.
            return y if self.bias is None else y + functional.enter(self.bias, self.group)
        y = functional.leave(y, self.group)
        return y if self.bias is None else y + self.bias

    def whole(self) -> nn.Linear:
        """Return the undivided layer, with the present weights. All ranks call it."""
        with torch.no_grad():
            weight = functional.join_parts(self.weight, self.group, dim=1, counts=self.counts)
        return _linear(weight, self.bias)


class ParallelMLP(nn.Module):
    """Two linear layers and what is between them, one operation forward and one backward."""

    def __init__(
        self,
        up: _Linear,
        down: _Linear,
        group: Any = None,
        *,
        activation: Any = F.gelu,
        sequence_parallel: bool = False,
    ) -> None:
        """Take this rank's part of the layers, which are equal on all ranks.

        Args:
            up: The first layer, undivided.
            down: The second one, undivided; its inputs are the outputs of the first.
            group: As for `quicoll.torch.functional.all_reduce`.
            activation: What is computed of each hidden feature by itself.
            sequence_parallel: What comes in and goes out is this rank's part of the sequence.
        Raises:
            LocalError: The layers do not fit.
        """
        super().__init__()
        if up.weight.shape[0] != down.weight.shape[1]:
            raise LocalError(f"a layer of {up.weight.shape[0]} outputs before one of {down.weight.shape[1]} inputs")
        self.activation = activation
        self.up = ColumnParallelLinear.of(up, group, sequence_parallel=sequence_parallel)
        self.down = RowParallelLinear.of(down, group, sequence_parallel=sequence_parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute both layers.

        Args:
            x: (..., inputs), equal on all ranks; or with `sequence_parallel` this rank's part of the sequence.
        Returns:
            (..., outputs), likewise.
        """
        y: torch.Tensor = self.down(self.activation(self.up(x)))
        return y


class ParallelAttention(nn.Module):
    """Self-attention of which each rank computes some of the heads, one operation forward and one backward."""

    def __init__(self, attention: nn.MultiheadAttention, group: Any = None, *, sequence_parallel: bool = False) -> None:
        """Take this rank's heads of an attention, which is equal on all ranks.

        Args:
            attention: The undivided one: self-attention with one width and no dropout, `batch_first=True`.
            group: As for `quicoll.torch.functional.all_reduce`.
            sequence_parallel: What comes in and goes out is this rank's part of the sequence.
        Raises:
            LocalError: It is of a kind that is not divided.
        """
        super().__init__()
        one_width = attention.kdim == attention.vdim == attention.embed_dim
        if (
            not one_width
            or attention.add_zero_attn
            or not attention.batch_first
            or attention.dropout
            or _MORE & {*_names(attention)}
        ):
            raise LocalError("an attention is divided that is batch_first, of one width, without dropout and bias_k")
        own = blocking_group(group)
        self.heads = parts(attention.num_heads, own.world_size)
        self.width = attention.head_dim
        self.mine = self.heads[own.rank]
        begin, length = sum(self.heads[: own.rank]) * self.width, self.mine * self.width
        given: Any = attention  # torch's stubs say that there is a bias in any case
        weight, bias = given.in_proj_weight, given.in_proj_bias
        rows = torch.cat([torch.arange(begin, begin + length) + at * attention.embed_dim for at in range(3)])
        self.into = ColumnParallelLinear(
            weight[rows], None if bias is None else bias[rows], own, [3 * count * self.width for count in self.heads],
            sequence_parallel=sequence_parallel,
        )  # fmt: skip
        self.out = RowParallelLinear.of(
            attention.out_proj, own,
            counts=[count * self.width for count in self.heads], sequence_parallel=sequence_parallel,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor | None = None, is_causal: bool = False) -> torch.Tensor:
        """Attend.

        Args:
            x: (batch, sequence, width), equal on all ranks; with `sequence_parallel` this rank's part of the sequence.
            mask: As for `torch.nn.functional.scaled_dot_product_attention`, of the whole sequence and for all heads.
            is_causal: Each place attends to itself and what is before it.
        Returns:
            As x.
        """
        found = self.into(x)
        batch, length = found.shape[0], found.shape[1]
        q, k, v = found.view(batch, length, 3, self.mine, self.width).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        y: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, self.mine * self.width))
        return y


def _names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def _counts(counts: list[int] | None, total: int, group: Any) -> list[int]:
    known = parts(total, group.world_size) if counts is None else list(counts)
    if len(known) != group.world_size or sum(known) != total or min(known) < 0:
        raise LocalError(f"counts of {total} for {group.world_size} ranks, not {known}")
    return known


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype, device="meta")
    made.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone())
    return made
