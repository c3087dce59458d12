"""A torch module, its optimizer and a loss as a task.

Random numbers. torch's global generator is seeded for each forward pass by the part (step and shard), and is afterwards
as it was: dropout draws the same for a shard on whichever rank it is, and however often the step is begun.

Buffers that a forward pass moves (running means of BatchNorm) move at the commit, by the mean over all parts of the
step (quicoll.train.moving): they stand among the task's parameters, and what moves them among the gradients.

Where the optimizer's state is divided between the ranks, it steps a block of elements at a time
(quicoll.train.block_optimizer).

torch is imported when a task is made: the room does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll.train.block_optimizer import BlockOptimizer
from quicoll.train.moving import MovingBuffers

if TYPE_CHECKING:
    import torch

    from quicoll.checkpoint.parts import Array
    from quicoll.train.divided import Flat
    from quicoll.train.task import Part

__all__ = ["TorchTask", "settings_of"]


def settings_of(module: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """Return what has to be the same on all ranks beside the parameters, as texts by name."""
    defaults = {name: value for name, value in sorted(optimizer.defaults.items()) if name != "params"}
    found = {"module": repr(module), "optimizer": f"{type(optimizer).__name__} {defaults}"}
    return found if scheduler is None else found | {"scheduler": type(scheduler).__name__}


class TorchTask:
    """See the module's head. Parameters are float32; those that require no gradient stay as they are."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, Part], torch.Tensor],
        *,
        scheduler: Any = None,
        moving: Sequence[str] = (),
    ) -> None:
        """Make a task.

        Args:
            module: What is trained.
            optimizer: Of its parameters.
            loss: Gives the mean loss over the samples of a part, a scalar: from `part.samples` with a feed, else
                from `part.indices`. It calls no backward itself.
            scheduler: Its `step()` follows each of the optimizer's; part of the state.
            moving: Names of buffers, beside those of layers with running statistics, that the forward pass moves.
        Raises:
            LocalError: A parameter is not float32, or there is no buffer of a name in `moving`.
        """
        self._module = module
        self._optimizer = optimizer
        self._loss = loss
        self._scheduler = scheduler
        self._parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        for name, value in self._parameters.items():
            if str(value.dtype) != "torch.float32":
                raise LocalError(f"parameter {name} is {value.dtype}; what is trained is float32")
        self._moving = MovingBuffers(module, moving)
        self._blocks: BlockOptimizer | None = None

    def architecture(self) -> Mapping[str, Any]:
        """Return the module as torch prints it, and the optimizer with its settings at the start."""
        return settings_of(self._module, self._optimizer, self._scheduler)

    def parameters(self) -> Mapping[str, Array]:
        """Return the module's parameters that require a gradient, and the buffers that its forward pass moves."""
        return {**self._parameters, **self._moving.values()}

    def forward(self, part: Part) -> Any:
        """Compute the loss of a part, with torch's generator seeded for it; no buffer has moved after it."""
        import torch

        with torch.random.fork_rng(devices=[]), self._moving.attempt() as moves:
            torch.manual_seed(int(part.seed))
            loss = self._loss(self._module, part)
        return loss, moves

    def backward(self, loss: Any) -> Sequence[Array]:
        """Compute the gradients, zeros where a parameter had no part in the loss; and by how much the buffers move."""
        import torch

        mean, moves = loss
        values = list(self._parameters.values())
        return [*torch.autograd.grad(mean, values, allow_unused=True, materialize_grads=True), *moves]

    def apply(self, average: Sequence[Array]) -> None:
        """Give the optimizer the gradients, let it step, and move the buffers."""
        import torch

        found = [torch.as_tensor(each) for each in average]
        for parameter, gradient in zip(self._parameters.values(), found[: len(self._parameters)], strict=True):
            parameter.grad = gradient.to(parameter.device)
        self._moving.move(found[len(self._parameters) :])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()

    # -- with a divided state ----------------------------------------------------------------------------------------

    def divide(self) -> Mapping[str, str]:
        """Divide the optimizer's state. Not for one that does not work element by element, or that has begun."""
        if self._blocks is None:
            self._blocks = BlockOptimizer(self._optimizer, list(self._parameters.values()))
        return self._blocks.moments

    def update(self, start: int, stop: int, average: Flat, moments: Mapping[str, Flat]) -> tuple[Flat, dict[str, Flat]]:
        """Let the optimizer step these elements. What the buffers are moved by stays what it is."""
        values, kept = self._divided().update(start, stop, average, moments)
        return values.numpy(), {name: each.numpy() for name, each in kept.items()}

    def advance(self, values: Sequence[Array]) -> None:
        """Take the new parameters, and move the buffers."""
        import torch

        found = [torch.as_tensor(each) for each in values]
        with torch.no_grad():
            for parameter, value in zip(self._parameters.values(), found[: len(self._parameters)], strict=True):
                parameter.copy_(value)
        self._moving.move(found[len(self._parameters) :])
        blocks = self._divided()
        blocks.progress = blocks.advanced()
        if self._scheduler is not None:
            self._scheduler.step()

    def _divided(self) -> BlockOptimizer:
        if self._blocks is None:
            raise LocalError("the state of this task is not divided: Worker(..., divide=quicoll.train.Divide())")
        return self._blocks

    # -- the state ---------------------------------------------------------------------------------------------------

    def state(self) -> Mapping[Any, Any]:
        """Return what `state_dict` of the module, the optimizer and the scheduler give, less what is divided."""
        optimizer = self._optimizer.state_dict()
        if self._blocks is not None:
            optimizer = {"param_groups": optimizer["param_groups"], **self._blocks.state()}
        found = {"module": self._module.state_dict(), "optimizer": optimizer}
        return found if self._scheduler is None else found | {"scheduler": self._scheduler.state_dict()}

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Load them."""
        self._module.load_state_dict(state["module"])
        optimizer = state["optimizer"]
        if self._blocks is None:
            self._optimizer.load_state_dict(optimizer)
        else:
            self._blocks.load(optimizer["param_groups"], optimizer)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
