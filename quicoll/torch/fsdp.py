"""FSDP2's traffic over a group of quicoll's, where the mesh of a model is Gloo's or another backend's.

    model = fully_shard(net, mesh=mesh)            # its mesh over Gloo
    quicoll.torch.carry_shards(model, job.group)   # and its parameters and gradients over quicoll

torch takes objects that gather parameters and that reduce gradients (`set_custom_all_gather` and
`set_custom_reduce_scatter`); these do it by the group's operations, in the canonical order of the ranks and with every
check. Where the mesh itself is of the backend "quicoll" all of this is so already. Tensors are on the CPU.

Failures are raised by the forward or backward pass in which they happen, as quicoll's errors and torch's both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quicoll.errors import LocalError
from quicoll.torch.groups import blocking_group, no_engine_thread
from quicoll.torch_backend.failures import for_torch
from quicoll.torch_backend.methods import Methods

__all__ = ["GradientScatter", "ParameterGather", "carry_shards"]

_DEFAULT_S = 1800.0  # torch's own


class _Carried:
    def __init__(self, group: Any = None, *, timeout: float = _DEFAULT_S) -> None:
        """Carry it over a group.

        Args:
            group: As for `quicoll.torch.functional.all_reduce`; its ranks are those of the mesh.
            timeout: Seconds for an operation.
        """
        self._group = blocking_group(group).for_threads()
        self._methods = Methods()
        self._methods.begin_methods(self._group, timeout=timeout, engine_thread=no_engine_thread)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Make a tensor that is sent or received.

        Args:
            size: Its shape.
            dtype: Its type.
            device: Where it lies.
        """
        return torch.empty(*size, dtype=dtype, device=device)

    def _demand(self, group: Any) -> None:
        mine, theirs = (self._group.rank, self._group.world_size), (group.rank(), group.size())
        if mine != theirs:
            raise for_torch(
                LocalError(f"rank {theirs[0]} of {theirs[1]} in the mesh is {mine[0]} of {mine[1]} in quicoll's group")
            )


class ParameterGather(_Carried):
    """Gathers the parts of parameters: for `FSDPModule.set_custom_all_gather`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> Any:
        """Gather; torch calls this.

        Args:
            output_tensor: Where all parts go, by rank.
            input_tensor: This rank's part.
            group: The mesh's.
            async_op: Whether to return before it is over.
        Returns:
            A Work with `async_op`, else None.
        Raises:
            QuicollError: The operation failed, or the group's ranks are not the mesh's.
        """
        self._demand(group)
        work = self._methods.all_gather_single(output_tensor, input_tensor)
        return work if async_op else _waited(work)


class GradientScatter(_Carried):
    """Reduces gradients and gives each rank its part: for `FSDPModule.set_custom_reduce_scatter`."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        """Reduce; torch calls this.

        Args:
            output_tensor: Where this rank's part goes.
            input_tensor: This rank's gradients, in one part for each rank.
            group: The mesh's.
            op: How they are reduced.
            async_op: Whether to return before it is over.
        Returns:
            A Work with `async_op`, else None.
        Raises:
            QuicollError: The operation failed, or the group's ranks are not the mesh's.
        """
        self._demand(group)
        work = self._methods.reduce_scatter_single(output_tensor, input_tensor, op=op)
        return work if async_op else _waited(work)


def carry_shards(model: nn.Module, group: Any = None, *, timeout: float = _DEFAULT_S) -> None:
    """Carry the traffic of every fully sharded part of a model over a group.

    Args:
        model: What `fully_shard` was called for, with whichever mesh of one dimension.
        group: As for `quicoll.torch.functional.all_reduce`; its ranks are those of the mesh.
        timeout: Seconds for an operation.
    Raises:
        LocalError: No part of the model is fully sharded, or there is no such group.
    """
    from torch.distributed.fsdp import FSDPModule  # slow to import, and needed by few

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        raise LocalError("no part of the model is fully sharded: call torch.distributed.fsdp.fully_shard first")
    gather, scatter = ParameterGather(group, timeout=timeout), GradientScatter(group, timeout=timeout)
    for module in sharded:
        module.set_custom_all_gather(gather)  # type: ignore[arg-type]  # torch does not give out the class it asks for
        module.set_custom_reduce_scatter(scatter)  # type: ignore[arg-type]  # likewise; it calls `allocate` and this


def _waited(work: Any) -> None:
    work.wait()
