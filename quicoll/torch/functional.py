"""Collectives that gradients go through: part of a forward pass, and of the backward pass that follows from it.

    y = functional.all_reduce(partial, group)              # the sum over ranks; its gradient is summed over ranks too
    rows = functional.all_gather(mine, group)              # the gradient comes back reduced and scattered
    routed, counts = functional.all_to_all(tokens, group, counts=[3, 0, 5])

The loss that is differentiated is the sum of the losses of all ranks, each of which calls `backward` on its own. So the
gradient of a sum is the sum of the gradients, on every rank. Where all ranks compute one and the same loss from what
they hold in common, as in tensor parallel layers, that would count it once for each rank: there `enter` (forward as it
is, gradients summed) stands before what is divided, and `leave` (summed, gradients as they are) behind it; likewise
`own_part` (a rank's own piece, gradients put together) and `join_parts` (put together, the gradient's own piece).

Each waits until it is over, on the thread that calls it: the caller's going forward, torch's going backward. Every rank
issues the same operations in the same order, which is so where every rank has the same graph. Gradients of gradients go
through as well. Bits are those of the group's operations: they depend on the ranks' tensors in their order alone.

Failures are those of the group's operations, raised by the call, or by `backward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from quicoll.errors import LocalError
from quicoll.torch.groups import blocking_group

if TYPE_CHECKING:
    from quicoll.collectives.blocking_group import Group

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "enter",
    "join_parts",
    "leave",
    "own_part",
    "reduce_scatter",
]

Sum = Literal["sum", "avg"]


def all_reduce(x: torch.Tensor, group: Any = None, *, op: Sum = "sum") -> torch.Tensor:
    """Add the ranks' tensors; every rank gets the sum. The gradient is reduced in the same way.

    Args:
        x: Of one shape and dtype on all ranks, floating point or complex where it requires a gradient.
        group: As for `quicoll.torch.groups.blocking_group`: `job.group`, a process group, or None.
        op: "sum", or "avg" for the mean.
    Returns:
        A new tensor of x's shape.
    Raises:
        LocalError: Another op, or as `Group.all_reduce`.
        QuicollError: The operation failed.
    """
    if op not in ("sum", "avg"):
        raise LocalError(f"the gradient goes through a sum or a mean, not through {op!r}")
    return _applied(_AllReduce, x, blocking_group(group), op)


def enter(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Give x on, which is equal on all ranks, to parts that each rank computes; their gradients are added.

    Args:
        x: Equal on all ranks.
        group: As for `all_reduce`.
    Returns:
        x's values.
    Raises:
        QuicollError: From `backward`, where the sum of the gradients fails.
    """
    return _applied(_Enter, x, blocking_group(group))


def leave(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Add the parts that the ranks have computed, to what is equal on all of them; the gradient goes on as it is.

    Args:
        x: This rank's part, of one shape and dtype on all ranks.
        group: As for `all_reduce`.
    Returns:
        The sum.
    Raises:
        QuicollError: The operation failed.
    """
    return _applied(_Leave, x, blocking_group(group))


def own_part(x: torch.Tensor, group: Any = None, *, dim: int = 0, counts: Sequence[int]) -> torch.Tensor:
    """Take this rank's part of x, which is equal on all ranks; the gradients of the parts are put together.

    Args:
        x: Equal on all ranks.
        group: As for `all_reduce`.
        dim: The dimension that is divided.
        counts: How much each rank takes of it, by rank.
    Returns:
        A view of x.
    Raises:
        LocalError: The counts are not those of x.
        QuicollError: From `backward`, where putting them together fails.
    """
    own = blocking_group(group)
    known = _checked(counts, own)
    rows = x.movedim(dim, 0)
    if sum(known) != rows.shape[0]:
        raise LocalError(f"counts are {sum(known)} in all, and dimension {dim} is {rows.shape[0]}")
    return _applied(_OwnPart, rows, own, known).movedim(0, dim)


def join_parts(x: torch.Tensor, group: Any = None, *, dim: int = 0, counts: Sequence[int]) -> torch.Tensor:
    """Put the ranks' parts together, to what is equal on all of them; of the gradient each takes its part.

    Args:
        x: This rank's part.
        group: As for `all_reduce`.
        dim: The dimension along which they are put together.
        counts: How much each rank has of it, by rank.
    Returns:
        A new tensor.
    Raises:
        LocalError: The counts are not the ranks'.
        QuicollError: The operation failed.
    """
    own = blocking_group(group)
    known = _checked(counts, own)
    rows = x.movedim(dim, 0)
    if known[own.rank] != rows.shape[0]:
        raise LocalError(f"rank {own.rank} has {rows.shape[0]} along dimension {dim}, and counts say {known[own.rank]}")
    return _applied(_JoinParts, rows, own, known).movedim(0, dim)


def all_gather(
    x: torch.Tensor, group: Any = None, *, dim: int = 0, counts: Sequence[int] | None = None
) -> torch.Tensor:
    """Put the ranks' tensors together along a dimension, by rank. Each rank's gradient is the sum of all ranks' for it.

    Args:
        x: Of one dtype and equal but for `dim` on all ranks.
        group: As for `all_reduce`.
        dim: The dimension.
        counts: How much each rank has of it, by rank, equal on all ranks. None asks for it, which takes a message more.
    Returns:
        A new tensor.
    Raises:
        LocalError: The counts are not the ranks', or as `Group.all_gather`.
        QuicollError: The operation failed.
    """
    own = blocking_group(group)
    rows = x.movedim(dim, 0)
    if counts is None:
        with torch.no_grad():
            counts = own.all_gather(torch.tensor([rows.shape[0]]), counts=[1] * own.world_size).tolist()
    known = _checked(counts, own)
    if known[own.rank] != rows.shape[0]:
        raise LocalError(f"rank {own.rank} has {rows.shape[0]} along dimension {dim}, and counts say {known[own.rank]}")
    return _applied(_AllGather, rows, own, known).movedim(0, dim)


def reduce_scatter(
    x: torch.Tensor, group: Any = None, *, dim: int = 0, counts: Sequence[int] | None = None, op: Sum = "sum"
) -> torch.Tensor:
    """Add the ranks' tensors; each rank gets its part of the sum. The gradients of the parts are put together.

    Args:
        x: Of one shape and dtype on all ranks.
        group: As for `all_reduce`.
        dim: The dimension that is divided.
        counts: How much each rank gets of it, by rank; None for equal parts.
        op: As for `all_reduce`.
    Returns:
        A new tensor, x's part of this rank.
    Raises:
        LocalError: It cannot be divided so, or as `Group.reduce_scatter`.
        QuicollError: The operation failed.
    """
    own = blocking_group(group)
    rows = x.movedim(dim, 0)
    if op not in ("sum", "avg"):
        raise LocalError(f"the gradient goes through a sum or a mean, not through {op!r}")
    if counts is None:
        each, left = divmod(rows.shape[0], own.world_size)
        if left:
            raise LocalError(
                f"{rows.shape[0]} along dimension {dim} gives {own.world_size} ranks no equal parts: counts="
            )
        counts = [each] * own.world_size
    known = _checked(counts, own)
    if sum(known) != rows.shape[0]:
        raise LocalError(f"counts are {sum(known)} in all, and dimension {dim} is {rows.shape[0]}")
    return _applied(_ReduceScatter, rows, own, known, op).movedim(0, dim)


def all_to_all(x: torch.Tensor, group: Any = None, *, counts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Send each rank its rows; the gradient of a row goes back to where it came from.

    Args:
        x: (n, ...), of one dtype and trailing shape on all ranks.
        group: As for `all_reduce`.
        counts: How many of the rows go to each rank, by rank; n in all. Every rank has its own.
    Returns:
        The rows that came, by rank, and how many came from each.
    Raises:
        LocalError: The counts are not of x's rows, or as `Group.all_to_all`.
        QuicollError: The operation failed.
    """
    own = blocking_group(group)
    known = _checked(counts, own)
    if sum(known) != x.shape[0]:
        raise LocalError(f"counts are {sum(known)} in all, and there are {x.shape[0]} rows")
    came: list[int] = []
    return _applied(_AllToAll, x, own, known, came), came


def broadcast(x: torch.Tensor, group: Any = None, *, root: int = 0) -> torch.Tensor:
    """Give every rank the root's tensor; the root's gradient is the sum of all ranks', the others' is zero.

    Args:
        x: Of one shape and dtype on all ranks; the values of the root's are used.
        group: As for `all_reduce`.
        root: The rank whose tensor it is.
    Returns:
        A new tensor.
    Raises:
        LocalError: As `Group.broadcast`.
        QuicollError: The operation failed.
    """
    return _applied(_Broadcast, x, blocking_group(group), root)


# -- what torch calls -------------------------------------------------------------------------------------------------

# Backward passes call the functions above, and not the group, so that gradients of gradients go through.


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, op: Sum) -> torch.Tensor:
        ctx.group, ctx.op = group, op
        return group.all_reduce(_plain(x), op=op)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_reduce(gradients[0], ctx.group, op=ctx.op), None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return leave(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return group.all_reduce(_plain(x))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return enter(gradients[0], ctx.group), None


class _OwnPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, counts: list[int]) -> torch.Tensor:
        ctx.group, ctx.counts = group, counts
        return x.narrow(0, sum(counts[: group.rank]), counts[group.rank])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return join_parts(gradients[0], ctx.group, counts=ctx.counts), None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, counts: list[int]) -> torch.Tensor:
        ctx.group, ctx.counts = group, counts
        return group.all_gather(_plain(x), counts=counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return reduce_scatter(gradients[0], ctx.group, counts=ctx.counts), None, None


class _JoinParts(_AllGather):
    """As `_AllGather` going forward."""

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return own_part(gradients[0], ctx.group, counts=ctx.counts), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, counts: list[int], op: Sum) -> torch.Tensor:
        ctx.group, ctx.counts, ctx.op = group, counts, op
        return group.reduce_scatter(_plain(x), counts=counts, op=op)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        all_rows = all_gather(gradients[0], ctx.group, counts=ctx.counts)
        return (all_rows if ctx.op == "sum" else all_rows / ctx.group.world_size), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, counts: list[int], came: list[int]) -> torch.Tensor:
        parts = group.all_to_all(list(torch.split(_plain(x), counts)))
        came[:] = [part.shape[0] for part in parts]
        ctx.group, ctx.came = group, came
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_to_all(gradients[0], ctx.group, counts=ctx.came)[0], None, None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        ctx.group, ctx.root = group, root
        return group.broadcast(_plain(x), root=root)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _applied(_ReduceTo, gradients[0], ctx.group, ctx.root), None, None


class _ReduceTo(torch.autograd.Function):
    """The way back of a broadcast; other ranks than the root have zeros, which have a gradient too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, root: int) -> torch.Tensor:
        ctx.group, ctx.root = group, root
        total = group.reduce(_plain(x), root=root)
        return torch.zeros_like(x) if total is None else total

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return broadcast(gradients[0], ctx.group, root=ctx.root), None, None


def _applied(function: type[torch.autograd.Function], *given: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*given)  # type: ignore[no-untyped-call]  # torch has no types for it
    return result


def _plain(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous()


def _checked(counts: Sequence[int], group: Group) -> list[int]:
    known = [int(count) for count in counts]
    if len(known) != group.world_size or min(known) < 0:
        raise LocalError(f"counts are one for each of the {group.world_size} ranks, none negative, not {known}")
    return known
