"""Activations that are computed again in the backward pass, and not kept: with the same bits, in a part of the memory.

    y = recomputed(block, x, group=group)        # x is equal on all ranks, as before tensor parallel layers
    y = recomputed(block, x)                     # x is this rank's own, as with sequence parallel

torch's own checkpoint (arXiv:1604.06174) forgets what a block's forward pass would keep, and computes the block again
when the backward pass needs it. What is left is the block's input, once for each block; with a group each rank keeps
its share of that alone, and the shares are put together for the second pass (arXiv:2205.05198, section 5: partial
activations). That costs an all_gather for each block, in the backward pass.

States of a call, which is one block in one forward pass:

    made --first pass--> kept --second pass--> kept --...--> forgotten, with the graph
    kept: the inputs, or shares of them; what the running buffers were before; digests, where `check` asks for them

Invariants. The second pass has the bits of the first one:
1. Its inputs have the same bits in the same layout, and begin at the same place within a vector (`VECTOR` bytes).
2. torch's generators, of processor and device, and autocast are as they were, so dropout has the same masks; afterwards
   they are as if there had been no second pass.
3. Buffers of a module that the first pass changes (BatchNorm's) are as they were before it, and change once, not twice.
4. Operations among ranks inside of the block are issued a second time, by all ranks in one order: that of the graph,
   which is the same on all of them. So all ranks call `recomputed` with the same options.

Failures. An input that was written in place since, where it is not divided: LocalError. A second pass of other bits
(`check`): Corrupted, which names the block and the rank, by the backward pass; it is a function that is no function of
its inputs, or a memory or processor that fails. `quicoll.torch.Training` adds the step, and begins it again. Inputs
that are not equal on all ranks, though divided (`check`): the same, before anything is computed of them. A rank that is
lost: as `quicoll.torch.functional`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from quicoll.errors import Corrupted, LocalError
from quicoll.numerics.buffers import tensor_digest
from quicoll.torch.groups import blocking_group
from quicoll.torch.parallel import parts

if TYPE_CHECKING:
    from quicoll.collectives.blocking_group import Group

__all__ = ["recomputed"]

VECTOR = 64
"""Bytes: torch's own memory begins at a multiple of them, and no vector of a processor is longer."""


def recomputed(
    block: Callable[..., Any], /, *inputs: Any, group: Any = None, check: bool = False, name: str = ""
) -> Any:
    """Compute a block of layers, and compute it again in the backward pass where its activations are needed.

    Args:
        block: A module or function of the inputs; what it gives follows from them, from its parameters and torch's
            generators. A module, where it has buffers that a forward pass changes (BatchNorm).
        *inputs: What it is given; tensors require gradients or not.
        group: Among whose ranks the tensors of the inputs, which are equal on all of them, are divided until then: as
            for `quicoll.torch.functional.all_reduce`, but None divides nothing.
        check: Whether the second pass is compared with the first one, bit for bit; it costs digests of what goes in and
            comes out.
        name: Of the block, for errors; empty: its class or function.
    Returns:
        What the block gives.
    Raises:
        QuicollError: An operation in the block failed.
    """
    if not torch.is_grad_enabled():
        return block(*inputs)
    known = None if group is None else blocking_group(group)
    twice = _Twice(block, inputs, known, check, name or _name_of(block))
    # torch finds the devices whose generators it keeps by its arguments; the inputs themselves are ours to keep.
    markers = [each.detach().reshape(-1)[:0] for each in inputs if isinstance(each, torch.Tensor)]
    markers = [each.clone() for each in markers]  # not a view, which would keep the input
    with ExitStack() as stack:
        if check:
            stack.enter_context(set_checkpoint_early_stop(False))  # to its end, where there is something to compare
        return checkpoint(twice, *markers, use_reentrant=False)


class _Twice:
    """One block in one forward pass. See the module's head."""

    def __init__(
        self, block: Callable[..., Any], inputs: tuple[Any, ...], group: Group | None, check: bool, name: str
    ) -> None:
        self._block = block
        self._inputs: tuple[Any, ...] | None = inputs  # until the first pass
        self._kept: list[Any] = []
        self._check = check
        self._group = group
        self._name = name
        self._changed: list[tuple[torch.nn.Module, str, torch.Tensor]] = []  # buffers, as they were before
        self._digests: list[bytes] = []

    def __call__(self, *markers: torch.Tensor) -> Any:
        if self._inputs is not None:
            return self._first(self._inputs)
        inputs = [each.again() if isinstance(each, _Kept) else each for each in self._kept]
        now = [getattr(owner, name) for owner, name, _ in self._changed]
        try:
            for owner, name, before in self._changed:
                setattr(owner, name, before.clone())
            given = self._block(*inputs)
        finally:
            for (owner, name, _), value in zip(self._changed, now, strict=True):
                setattr(owner, name, value)
        if self._check:
            self._compare(given)
        return None

    def _first(self, inputs: tuple[Any, ...]) -> Any:
        for place, each in enumerate(inputs):
            what = f"input {place} of {self._name}"
            self._kept.append(_Kept(each, self._group, self._check, what) if isinstance(each, torch.Tensor) else each)
        self._inputs = None
        buffers = _buffers(self._block)
        copies = [value.clone() for _, _, value in buffers]
        given = self._block(*inputs)
        # By value: torch's kernels write running means without counting it.
        self._changed = [
            (owner, name, copy)
            for (owner, name, value), copy in zip(buffers, copies, strict=True)
            if getattr(owner, name) is not value or not torch.equal(value, copy)
        ]
        if self._check:
            self._digests = [tensor_digest(each.detach()) for each in _tensors(given)]
        return given

    def _compare(self, given: Any) -> None:
        found = [tensor_digest(each.detach()) for each in _tensors(given)]
        odd = [place for place, (one, other) in enumerate(zip(found, self._digests, strict=False)) if one != other]
        if len(found) != len(self._digests) or odd:
            what = f"result {odd[0]}" if odd else f"{len(found)} results, not {len(self._digests)},"
            raise Corrupted(
                f"{self._name} computed again gives other bits than before: {what} of its second pass differs",
                rank=None if self._group is None else self._group.rank,
            )


class _Kept:
    """A tensor that is needed again: this rank's share of its elements, in the order of its memory, or itself."""

    def __init__(self, value: torch.Tensor, group: Group | None, check: bool, what: str) -> None:
        self._what = what
        self._needs = value.requires_grad
        self._group = group
        self._digest = tensor_digest(value.detach()) if check else b""
        self._whole: torch.Tensor | None = None
        plain = value.detach()
        if group is None or group.world_size == 1 or not _dense(plain):
            self._group, self._whole = None, plain
            self._mark = _marked(plain)
            return
        self._shape, self._stride, self._dtype, self._device = plain.shape, plain.stride(), plain.dtype, plain.device
        self._lead = plain.data_ptr() % VECTOR // plain.element_size()
        self._counts = parts(plain.numel(), group.world_size)
        begin = sum(self._counts[: group.rank])
        flat = plain.as_strided((plain.numel(),), (1,))
        self._share = flat[begin : begin + self._counts[group.rank]].clone()

    def again(self) -> torch.Tensor:
        """The tensor as it was; all ranks that have shares call it."""
        if self._whole is not None:
            if _marked(self._whole) != self._mark:
                raise LocalError(f"{self._what} was written in place since, and cannot be computed with again")
            value = self._whole.detach()
        else:
            value = self._together()
        if self._digest and tensor_digest(value) != self._digest:
            raise Corrupted(
                f"{self._what}, put together from the shares of all ranks, is not what it was here: it is not equal on "
                "all ranks, or a memory fails",
                rank=None if self._group is None else self._group.rank,
            )
        return value.requires_grad_(self._needs)

    def _together(self) -> torch.Tensor:
        assert self._group is not None  # noqa: S101 - for the type checker: there are no shares without a group
        flat = self._group.all_gather(self._share)
        room = torch.empty(flat.numel() + self._lead, dtype=self._dtype, device=self._device)
        value = room.as_strided(self._shape, self._stride, self._lead)
        value.as_strided((flat.numel(),), (1,), self._lead).copy_(flat)
        return value


def _buffers(block: Any) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    return [
        (owner, name, value)
        for owner in (block.modules() if isinstance(block, torch.nn.Module) else ())
        for name, value in owner.named_buffers(recurse=False)
    ]


def _marked(value: torch.Tensor) -> int:
    """How often it was written in place, which torch counts for autograd."""
    return value._version  # noqa: SLF001 - torch documents it under this name, and has no other one


def _dense(value: torch.Tensor) -> bool:
    """Whether the elements lie one after the other in memory, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return value.layout is torch.strided and value.numel() > 0


def _tensors(given: Any) -> list[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        return [given]
    if isinstance(given, dict):
        return [each for value in given.values() for each in _tensors(value)]
    return [each for value in given for each in _tensors(value)] if isinstance(given, list | tuple) else []


def _name_of(block: Any) -> str:
    return getattr(block, "__qualname__", type(block).__name__)
