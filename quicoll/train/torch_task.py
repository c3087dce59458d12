"""A torch module, its optimizer and a loss as a task.

Random numbers. torch's global generator is seeded for each forward pass by the part (step and shard), and is afterwards
as it was: dropout draws the same for a shard on whichever rank it is, and however often the step is begun.

Buffers that a forward pass changes (running means of BatchNorm) differ by rank as soon as the ranks see different
samples, and change in steps that are aborted, too. A module with such is refused; use another normalisation, or
`track_running_stats=False`.

torch is imported when a task is made: the room does without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import torch

    from quicoll.checkpoint.parts import Array
    from quicoll.train.task import Part

__all__ = ["TorchTask"]


class TorchTask:
    """See the module's head. Parameters are float32; those that require no gradient stay as they are."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, Part], torch.Tensor],
        *,
        scheduler: Any = None,
    ) -> None:
        """Make a task.

        Args:
            module: What is trained.
            optimizer: Of its parameters.
            loss: Gives the mean loss over the samples of a part, a scalar: from `part.samples` with a feed, else
                from `part.indices`. It calls no backward itself.
            scheduler: Its `step()` follows each of the optimizer's; part of the state.
        Raises:
            LocalError: The module has buffers that its forward pass changes, or a parameter that is not float32.
        """
        for name, part in module.named_modules():
            if getattr(part, "running_mean", None) is not None:
                raise LocalError(
                    f"{name or 'the module'} is a {type(part).__name__}, whose forward pass changes its running mean: "
                    "ranks would hold different states; use another normalisation, or track_running_stats=False"
                )
        self._module = module
        self._optimizer = optimizer
        self._loss = loss
        self._scheduler = scheduler
        self._parameters = {name: value for name, value in module.named_parameters() if value.requires_grad}
        for name, value in self._parameters.items():
            if str(value.dtype) != "torch.float32":
                raise LocalError(f"parameter {name} is {value.dtype}; what is trained is float32")

    def architecture(self) -> Mapping[str, Any]:
        """Return the module as torch prints it, and the optimizer with its settings at the start."""
        defaults = {name: value for name, value in sorted(self._optimizer.defaults.items()) if name != "params"}
        found = {"module": repr(self._module), "optimizer": f"{type(self._optimizer).__name__} {defaults}"}
        return found if self._scheduler is None else found | {"scheduler": type(self._scheduler).__name__}

    def parameters(self) -> Mapping[str, Array]:
        """Return the module's parameters that require a gradient."""
        return dict(self._parameters)

    def forward(self, part: Part) -> Any:
        """Compute the loss of a part, with torch's generator seeded for it."""
        import torch

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(part.seed))
            return self._loss(self._module, part)

    def backward(self, loss: Any) -> Sequence[Array]:
        """Compute the gradients; zeros where a parameter had no part in the loss."""
        import torch

        values = list(self._parameters.values())
        return list(torch.autograd.grad(loss, values, allow_unused=True, materialize_grads=True))

    def apply(self, average: Sequence[Array]) -> None:
        """Give the optimizer the gradients, and let it step."""
        import torch

        for parameter, gradient in zip(self._parameters.values(), average, strict=True):
            parameter.grad = torch.as_tensor(gradient).to(parameter.device)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()

    def state(self) -> Mapping[Any, Any]:
        """Return what `state_dict` of the module, the optimizer and the scheduler give."""
        found = {"module": self._module.state_dict(), "optimizer": self._optimizer.state_dict()}
        return found if self._scheduler is None else found | {"scheduler": self._scheduler.state_dict()}

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Load them."""
        self._module.load_state_dict(state["module"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
