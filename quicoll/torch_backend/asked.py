"""What torch asks for, read: options and overloads of its calls, reduce operations, tensors as flat memory.

torch calls a group in three ways: with an options object, from its Python functions; with plain arguments (a lone
tensor, a bare ReduceOp, a root), as its C++ class takes them; and from C++, as the first. An option that is not set has
a timeout of -1 ms.

Tensors are given to the group as flat tensors outside of autograd, by `.data`: what is written to those does not count
as a change of a tensor that a backward pass needs, as with torch's own backends. Those on other devices go by way of
the host (`staged`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import AllreduceOptions, ReduceOp

from quicoll.numerics.dtypes import DTYPES
from quicoll.torch_backend.failures import refused
from quicoll.torch_backend.staged import read_device, write_device

__all__ = ["OPS", "Asked", "flat", "listed", "movable", "put", "read_options", "reduced_by", "seconds_of"]

# By the hash, which torch makes what it counts them as, of a kind and of a ReduceOp of that kind alike (a test looks).
# To ask a ReduceOp for its kind makes an object, and to look up one of the two asks for both.
OPS = {
    hash(ReduceOp.SUM): "sum",
    hash(ReduceOp.AVG): "avg",
    hash(ReduceOp.PRODUCT): "product",
    hash(ReduceOp.MIN): "min",
    hash(ReduceOp.MAX): "max",
    hash(ReduceOp.BAND): "band",
    hash(ReduceOp.BOR): "bor",
    hash(ReduceOp.BXOR): "bxor",
}
_OF_BOOLS = {"sum": "bor", "product": "band"}
_MOST_S = 900_000.0  # below a million seconds, the most that an operation takes


class Asked(NamedTuple):
    """What a call asks for beside its tensors. timeout: seconds; None: the group's."""

    op: Any
    root: int
    timeout: float | None


def seconds_of(timeout: timedelta | None) -> float | None:
    """Return a timeout in seconds; None where it is not set, which torch says by a negative one."""
    if timeout is None or timeout.days < 0:
        return None
    return min(timeout.total_seconds(), _MOST_S) or None


def read_options(options: Any, *more: Any, **named: Any) -> Asked:
    """Read what a call was given after its tensors.

    Args:
        options: An options object of torch's, or the first plain argument, or None.
        *more: Further plain arguments.
        **named: The same by name: op, root, timeout.
    Raises:
        LocalError: There is something that is none of these.
    """
    if type(options) is AllreduceOptions and not more and not named:  # the most frequent call
        return Asked(options.reduceOp, 0, seconds_of(options.timeout))
    op: Any = ReduceOp.SUM
    root = 0
    timeout: timedelta | None = None
    for given in (options, *more, *named.values()):
        if given is None:
            continue
        if isinstance(given, ReduceOp | ReduceOp.RedOpType):
            op = given
        elif isinstance(given, timedelta):
            timeout = given
        elif isinstance(given, int):
            root = given
        elif hasattr(given, "timeout"):
            op = getattr(given, "reduceOp", op)
            root = int(getattr(given, "rootRank", root))
            timeout = given.timeout
        else:
            raise refused(f"a {type(given).__name__} is no option of an operation")
    return Asked(op, root, seconds_of(timeout))


def listed(tensors: Any) -> list[Any]:
    """Return what may be a lone tensor as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in order on the host, as one dimension outside of autograd; its memory if it can be.

    Raises LocalError for what is no dense tensor, and for one on a device that torch cannot wait for.
    """
    if tensor.layout is not torch.strided:
        raise refused(f"a tensor of layout {tensor.layout} is taken by all_reduce alone; pass tensor.to_dense()")
    if not tensor.is_cpu:
        return read_device(tensor).reshape(-1)
    data = tensor.data  # holds the memory, whatever the program sets the tensor's own to meanwhile
    return data if data.dim() == 1 and data.is_contiguous() else data.reshape(-1)


def movable(tensor: torch.Tensor) -> torch.Tensor:
    """As `flat`, for what is moved and not computed with: types that the group does not know go as bytes."""
    data = flat(tensor)
    return data if str(data.dtype).removeprefix("torch.") in DTYPES else data.contiguous().view(torch.uint8)


def put(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Write elements in order into a tensor, which autograd does not see.

    Args:
        tensor: Of any strides.
        result: As many elements, of one dimension; or their bytes.
    """
    if result.dtype is not tensor.dtype:
        result = result.view(tensor.dtype)
    if tensor.is_cpu and not tensor.is_inference():
        tensor.data.copy_(result.view(tensor.shape))  # `data` is outside of autograd as it is
        return
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        if not tensor.is_cpu:
            write_device(tensor, result.view(tensor.shape))
        else:
            tensor.data.copy_(result.view(tensor.shape))


def reduced_by(op: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Return a flat tensor, and the operation of the group that reduces it as torch's does.

    PREMUL_SUM is the sum of the products, each of which is rounded to the tensor's type. Of bools SUM and MAX are "or",
    PRODUCT and MIN "and".

    Args:
        op: A ReduceOp, or one of its kinds.
        tensor: As for `flat`.
    Raises:
        LocalError: The operation is not defined for its type.
    """
    name = OPS.get(hash(op))
    data = flat(tensor)
    if name is None:
        if getattr(op, "op", op) == ReduceOp.PREMUL_SUM:
            return (data * op.factor).to(data.dtype), "sum"
        raise refused(f"{op} is no operation of a reduction")
    return data, _OF_BOOLS.get(name, name) if data.dtype is torch.bool else name
