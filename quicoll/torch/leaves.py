"""One step of a torch loop in leaves: what each logical shard contributes to the mean over the batch.

A leaf is a list of tensors: the gradient of each parameter that the optimizer has, by how much each moving buffer has
moved (quicoll.train.moving), which parameters had a gradient at all, and the loss. The last three are float32.

States of a step's `LeafRecorder`:

    empty --begin--> in a shard --end--> between shards --begin--> ...
                     in a shard --abandon--> over        an error in the user's code, or the step was aborted
    between shards --over--> over

In the last shard gradients may be handed over while the backward pass goes on (quicoll.torch.early).

Invariants.
1. Within a shard torch's global generators are seeded for (job, step, shard), the buffers are as they were after the
   last committed step, and no parameter has a gradient when the shard begins. So what a shard's forward and backward
   pass compute depends on the state and the shard alone, on whichever rank it is and whatever was computed before it.
2. When it is over, torch's generators are as they were when the step began, and the buffers too: an attempt leaves no
   trace but gradients, which are dropped.
3. A parameter that no shard had a gradient for has none in the mean either (`None`), as after an ordinary backward
   pass: an optimizer passes over it. One that some shards had a gradient for counts as zero in the others.

Failures: a gradient that is sparse, a parameter on the meta device, a loss that is no scalar: LocalError, by name.
A shard that ends without a call of `backward`, gradients that came past it (`loss.backward()`: they would be right, but
the loss unknown), gradients that were thrown away again (`zero_grad()`): LocalError.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from quicoll.errors import LocalError
from quicoll.torch.early import EarlyGradients, cut_early, sparse_gradient
from quicoll.train.moving import MovingBuffers

if TYPE_CHECKING:
    from quicoll.numerics.seed import Seed

__all__ = ["LeafRecorder", "LeafShape"]

Leaf = list[torch.Tensor]
T = TypeVar("T")


class LeafShape:
    """Which tensors a leaf has: fixed by the model and its optimizer."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        moving: Sequence[str] = (),
        *,
        bucket_bytes: int = 0,
    ) -> None:
        """Look at a model.

        Args:
            model: The model.
            optimizer: Of its parameters.
            moving: Names of further buffers that a forward pass moves.
            bucket_bytes: Of the gradients that travel together while the backward pass goes on; 0: none do.
        Raises:
            LocalError: It cannot be trained so.
        """
        names = {id(value): name for name, value in model.named_parameters()}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        for number, group in enumerate(optimizer.param_groups):
            for place, value in enumerate(group["params"]):
                if value.requires_grad:
                    self.parameters[names.get(id(value), f"parameter {place} of the optimizer's group {number}")] = (
                        value
                    )
        if not self.parameters:
            raise LocalError("the optimizer has no parameter that requires a gradient")
        for name, value in self.parameters.items():
            if value.is_meta:
                raise LocalError(f"{name} is on the meta device: it has no values yet")
        self.buffers = MovingBuffers(model, moving)
        self.early = cut_early(list(self.parameters.values()), bucket_bytes)

    def zeros(self) -> Leaf:
        """Return the leaf of a shard without samples, which is also what says shapes and dtypes where there is none."""
        values = [torch.zeros_like(value, requires_grad=False) for value in self.parameters.values()]
        moves = [torch.zeros_like(value, dtype=torch.float32) for value in self.buffers.values().values()]
        return [*values, *moves, torch.zeros(len(self.parameters)), torch.zeros(1)]

    def runs(self) -> list[list[int]]:
        """Return which tensors of a leaf travel together, in the order in which they do.

        First the buckets that travel in the backward pass (`early`), then what is left: of each dtype, in the order in
        which they come first.
        """
        early = {place for bucket in self.early for place in bucket}
        runs: dict[torch.dtype, list[int]] = {}
        dtypes = [value.dtype for value in self.parameters.values()]
        dtypes += [torch.float32] * (len(self.buffers.values()) + 2)
        for place, dtype in enumerate(dtypes):
            if place not in early:
                runs.setdefault(dtype, []).append(place)
        return [*self.early, *runs.values()]

    def put(self, mean: Leaf) -> float:
        """Put the mean gradients where backward passes leave theirs. Returns the mean loss."""
        had = mean[-2].tolist()
        for (parameter, gradient), share in zip(zip(self.parameters.values(), mean, strict=False), had, strict=True):
            parameter.grad = gradient.to(parameter.device) if share else None
        return float(mean[-1])

    def gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(parameter.grad is not None for parameter in self.parameters.values())

    def demand_gradients(self, rest: Sequence[torch.Tensor]) -> None:
        """Refuse to step with no gradient left of those that `put` has put there. rest: of that mean.

        Some may be missing: between `reduce` and the update `.grad` is the program's.

        Raises:
            LocalError: All are gone.
        """
        if bool(rest[-2].any()) and not self.gradients():
            raise _thrown_away("step.reduce()")

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def __len__(self) -> int:
        """Return how many tensors a leaf has."""
        return len(self.parameters) + len(self.buffers.values()) + 2

    def rest(self, leaf: Sequence[T]) -> list[T]:
        """Return what stands behind the gradients: moves of the buffers, which gradients there are, the loss."""
        return list(leaf[len(self.parameters) :])


class LeafRecorder:
    """See the module's head."""

    def __init__(self, shape: LeafShape) -> None:
        self._shape = shape
        self._leaves: list[Leaf] = []
        self._shard = ExitStack()
        self._moves: list[torch.Tensor] | None = None  # of the shard that is open
        self._loss = 0.0
        self._called = self._given = False  # backward, in the shard that is open; and a parameter had a gradient then
        self._last = False  # of the shard that is open: its last backward pass was
        self._early: EarlyGradients | None = None
        self._generators: Any = None

    @property
    def leaves(self) -> list[Leaf]:
        """The leaves of the shards that are over, in their order."""
        return self._leaves

    @property
    def computing(self) -> bool:
        """Whether a shard is open."""
        return self._moves is not None

    def begin(self, seed: Seed, early: EarlyGradients | None = None) -> None:
        """Begin a shard.

        Args:
            seed: For what is random in it.
            early: Where gradients of it may be handed over before it ends.
        """
        self._early = early
        if self._generators is None:
            self._generators = torch.get_rng_state(), _cuda_states()
        self._shape.clear()
        self._moves = self._shard.enter_context(self._shape.buffers.attempt())
        self._loss, self._called, self._given, self._last = 0.0, False, False, False
        torch.manual_seed(int(seed))

    def backward(self, loss: torch.Tensor, *, more: bool = False) -> None:
        """Compute gradients, and take note of the loss. more: this is not the shard's last backward pass."""
        if self._moves is None:
            raise LocalError("a loss outside of `for ... in step.shards`")
        if loss.numel() != 1:
            raise LocalError(f"the loss is a scalar, the mean over the samples, not of shape {tuple(loss.shape)}")
        self._demand_own_gradients()
        if self._last and self._shape.early:
            # In every shard, also where none is early: the same program fails on any number of ranks.
            raise LocalError("with bucket_bytes every backward() of a shard but its last says more=True")
        self._last = not more
        if self._early is not None:
            self._early.paused = more
        self._called = True
        loss.backward()  # type: ignore[no-untyped-call] # torch has no types for it
        self._given = self._given or self._gradients()
        self._loss += float(loss.detach())

    def _gradients(self) -> bool:
        return (self._early is not None and bool(self._early.handed)) or self._shape.gradients()

    def _demand_own_gradients(self) -> None:
        """Refuse gradients that did not come by `backward`, and the loss of those that did."""
        there = self._gradients()
        if there and not self._called:
            raise LocalError(
                "a shard has gradients of which the loss is not known: call step.backward(loss) in place of "
                "loss.backward()"
            )
        if self._given and not there:
            raise _thrown_away("step.backward(loss)")

    def end(self, weight: float) -> None:
        """End the shard: its gradients become a leaf. weight: by which it counts in the mean over the shards."""
        self._demand_own_gradients()
        if not self._called:
            raise LocalError("a shard ended without step.backward(loss): each shard's loss is given to it")
        self._shard.close()
        moves, self._moves = self._moves or [], None
        early, self._early = self._early, None
        handed = {} if early is None else early.handed
        if early is not None:
            early.over()
        leaf: Leaf = []
        had = torch.zeros(len(self._shape.parameters))
        for number, (name, parameter) in enumerate(self._shape.parameters.items()):
            gradient, parameter.grad = parameter.grad, None
            if number in handed:
                gradient = handed[number]
                had[number] = 1.0
            elif gradient is None:
                gradient = torch.zeros_like(parameter, requires_grad=False)
            elif gradient.layout != torch.strided:
                raise sparse_gradient(name, gradient)
            else:
                had[number] = 1.0
            leaf.append(gradient)
        leaf += [*moves, had, torch.tensor([self._loss])]
        if weight != 1.0:
            for number, tensor in enumerate([*leaf[:-2], leaf[-1]]):
                if number not in handed:
                    tensor.mul_(weight)
        self._leaves.append(leaf)

    def skip(self) -> None:
        """Pass over a shard that has no samples."""
        self._leaves.append(self._shape.zeros())

    def over(self) -> None:
        """Leave torch's generators as they were. After an error, the buffers as well."""
        if self._early is not None:
            self._early.over()
            self._early = None
        if self._moves is not None:
            self._moves = None
            error = RuntimeError("abandoned")
            self._shard.__exit__(type(error), error, None)
        if self._generators is not None:
            states, self._generators = self._generators, None
            torch.set_rng_state(states[0])
            for number, state in enumerate(states[1]):
                torch.cuda.set_rng_state(state, number)


def _thrown_away(call: str) -> LocalError:
    return LocalError(
        f"the gradients that {call} has left are gone: remove zero_grad() from the loop; a step drops them at its end"
    )


def _cuda_states() -> list[torch.Tensor]:
    begun = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # as above
    return torch.cuda.get_rng_state_all() if begun else []
