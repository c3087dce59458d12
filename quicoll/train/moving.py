"""Buffers of a torch module that its forward pass moves: running means and variances of normalisation layers.

They are state of the job, like weights, and change as these do: once a step, at its commit, by the mean over the
step's parts of what each part's forward pass adds to them.

    attempt     each part's forward pass begins with the buffers as they were after the last committed step, in copies
                that take the buffers' places meanwhile: nothing of an attempt is left behind
    parts       by how much a part has moved each buffer goes with its gradients, and is averaged with them: in the
                order of logical shards, weighted by the part's samples. So the bits are those of any number of ranks
    commit      the mean is added. Counters, which are whole numbers, move by the mean as well: by one a step

What each part is normalised by are the statistics of its own samples, on whichever rank it is; what moves the running
ones is the mean over the parts, as one worker with the same parts would have it.

A buffer that a forward pass changes without being declared is refused when it does: each rank would hold another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import torch

__all__ = ["MovingBuffers"]


class MovingBuffers:
    """See the module's head."""

    def __init__(self, module: torch.nn.Module, declared: Sequence[str] = ()) -> None:
        """Find them: all buffers of the layers that keep running statistics, and those that are declared.

        Args:
            module: The module.
            declared: Further ones, by their names in `named_buffers()`.
        Raises:
            LocalError: There is no buffer of a declared name, or one is neither float32 nor of whole numbers.
        """
        names = {
            f"{prefix}.{name}".lstrip("."): (owner, name)
            for prefix, owner in module.named_modules()
            for name, value in owner.named_buffers(recurse=False)
            if value is not None
        }
        for name in declared:
            if name not in names:
                raise LocalError(f"the module has no buffer {name!r}; it has {', '.join(names) or 'none'}")
        self._places = {
            name: (owner, own)
            for name, (owner, own) in names.items()
            if name in declared or getattr(owner, "running_mean", None) is not None
        }
        kept = module.state_dict()
        self._others = {name: place for name, place in names.items() if name not in self._places and name in kept}
        for name, value in self.values().items():
            if str(value.dtype) not in ("torch.float32", "torch.int64", "torch.int32"):
                raise LocalError(
                    f"buffer {name} is {value.dtype}; what a forward pass moves is float32 or whole numbers"
                )

    def values(self) -> Mapping[str, torch.Tensor]:
        """Return the buffers as they are, by name."""
        return {name: getattr(owner, own) for name, (owner, own) in self._places.items()}

    @contextmanager
    def attempt(self) -> Iterator[list[torch.Tensor]]:
        """Make a block in which a forward pass may move them.

        Yields:
            A list that holds, after the block, by how much each has moved, in float32.
        Raises:
            LocalError: The pass has changed another buffer.
        """
        import torch

        before = self.values()
        marks = {name: _marked(owner, own) for name, (owner, own) in self._others.items()}
        copies = {name: value.clone() for name, value in before.items()}
        moves: list[torch.Tensor] = []
        try:
            for name, (owner, own) in self._places.items():
                setattr(owner, own, copies[name])
            yield moves
            after = self.values()
        finally:
            for name, (owner, own) in self._places.items():
                setattr(owner, own, before[name])
        with torch.no_grad():
            moves.extend((after[name] - value).to(torch.float32) for name, value in before.items())
        for name, (owner, own) in self._others.items():
            (was, then), (now, after_it) = marks[name], _marked(owner, own)
            if now is not was or after_it != then:
                raise LocalError(
                    f"the forward pass changes buffer {name}, which each rank would do by itself: declare it, "
                    f"TorchTask(..., moving=[{name!r}]), and all ranks get the mean of what it is moved by"
                )

    def move(self, by: Sequence[torch.Tensor]) -> None:
        """Add what all parts have moved them by, on average.

        Args:
            by: In the order of `values`.
        """
        import torch

        with torch.no_grad():
            for value, mean in zip(self.values().values(), by, strict=True):
                value.add_((mean if value.is_floating_point() else mean.round()).to(value))


def _marked(owner: torch.nn.Module, own: str) -> tuple[torch.Tensor, int]:
    """Return a buffer, and how often it was changed in place, which torch counts for autograd."""
    value: torch.Tensor = getattr(owner, own)
    return value, value._version  # noqa: SLF001 - torch documents it under this name, and has no other one
