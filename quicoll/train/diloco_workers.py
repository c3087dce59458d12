"""The logical workers of DiLoCo: what each has of its own, as memory of an attempt and as one row of numbers.

A logical worker trains by itself between exchanges, so it has what nobody else has: its parameters, where they differ
from the job's; the state of its inner optimizer; what its wire format has lost so far and is yet to be sent (the
residual). That belongs to the worker, not to the rank that computes it: it is one block of a `quicoll.Sharded`, owned
by the rank that has the logical shard of this number, and it changes with the commit of an outer step alone.

    row         begun, stepped: 0 or 1 | own parameters | the inner optimizer's state | residuals, fragment by fragment
    begin       a row becomes memory of its own (`LogicalWorker`): an attempt never touches the row
    turns       inner steps run in that memory: for the length of one inner step it stands in the place of the module's
                parameters and of the optimizer's state, and is taken out again before anything is awaited
    stage       memory becomes a row again

A row of zeros is a worker that has not begun: the job's parameters, the inner optimizer as it was made, no residual.

Invariants.
1. Outside of `stepping` the module has the job's parameters and the optimizer the state it was made with: what reads
   them between two awaits (states that are handed over, checkpoints) never sees a worker's own.
2. What an inner step computes depends on the worker's memory and the part alone, whichever rank does it and whatever
   other workers were computed before.

Failures: an inner optimizer whose state is no float32, or whose step changes the settings of its groups, cannot be put
into a row, and is refused when it is looked at, by name.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import torch

__all__ = ["LogicalWorker", "WorkerRows", "in_place_of", "kept_by", "step_apart"]

State = dict[str, Any]


@dataclass(slots=True, eq=False)
class LogicalWorker:
    """A logical worker in an attempt.

    Attributes:
        shard: Its number.
        values: Its parameters.
        state: Its inner optimizer's, one for each parameter; None: as the optimizer was made.
        residuals: Of each fragment, flat; empty without error feedback.
        begun: Whether its row was one; otherwise it begins anew.
        loss: The sum over its inner steps in this attempt.
        steps: How many these are.
    """

    shard: int
    values: list[torch.Tensor]
    state: list[State] | None
    residuals: list[torch.Tensor]
    begun: bool = True
    loss: torch.Tensor | float = 0.0
    steps: int = 0


@dataclass(slots=True, eq=False)
class WorkerRows:
    """How workers are rows.

    Attributes:
        parameters: Of the module; they have the job's values.
        carried: The numbers of the parameters that may differ from the job's at the end of a round.
        kept: What the inner optimizer keeps for each parameter: names and shapes.
        fragments: The elements of each fragment that have a residual; empty without error feedback.
        length: Of a row.
    """

    parameters: Sequence[torch.Tensor]
    carried: Sequence[int]
    kept: Sequence[Mapping[str, tuple[int, ...]]]
    fragments: Sequence[int]
    length: int = field(init=False)

    def __post_init__(self) -> None:
        """Add up."""
        own = sum(self.parameters[number].numel() for number in self.carried)
        self.length = 2 + own + sum(prod(shape) for its in self.kept for shape in its.values()) + sum(self.fragments)

    def worker(self, shard: int, row: torch.Tensor, job: Sequence[torch.Tensor] | None = None) -> LogicalWorker:
        """Return the worker of a row, in memory of its own.

        Args:
            shard: Its number.
            row: As a round has left it; on the host.
            job: The job's parameters, as the same round has left them; None: those that the module has.
        """
        import torch

        values = [each.detach().clone() for each in (self.parameters if job is None else job)]
        begun, stepped = (bool(each) for each in row[:2].tolist())
        residuals = [torch.zeros(size) for size in self.fragments]
        if not begun:
            return LogicalWorker(shard, values, None, residuals, begun=False)
        at = 2
        for number in self.carried:
            at = _read(row, at, values[number])
        state: list[State] = []
        for parameter, names in zip(self.parameters, self.kept, strict=True):
            state.append({})
            for name, shape in names.items():
                # A scalar, such as Adam's count of steps, is on the host, where torch's optimizers have it.
                device = parameter.device if shape else "cpu"
                state[-1][name] = torch.empty(shape, device=device)
                at = _read(row, at, state[-1][name])
        for residual in residuals:
            at = _read(row, at, residual)
        return LogicalWorker(shard, values, state if stepped else None, residuals)

    def write(self, worker: LogicalWorker, row: torch.Tensor) -> None:
        """Write what a worker has become into a row.

        Args:
            worker: At the end of a round.
            row: On the host.
        """
        row[0], row[1] = 1.0, float(worker.state is not None)
        at = 2
        for number in self.carried:
            at = _write(row, at, worker.values[number])
        for number, names in enumerate(self.kept):
            for name, shape in names.items():
                if worker.state is None:
                    row[at : at + prod(shape)] = 0.0
                    at += prod(shape)
                else:
                    at = _write(row, at, worker.state[number][name])
        for residual in worker.residuals:
            at = _write(row, at, residual)


def _read(row: torch.Tensor, at: int, out: torch.Tensor) -> int:
    out.copy_(row[at : at + out.numel()].view(out.shape))
    return at + out.numel()


def _write(row: torch.Tensor, at: int, values: torch.Tensor) -> int:
    row[at : at + values.numel()] = values.detach().reshape(-1)
    return at + values.numel()


@contextmanager
def in_place_of(
    parameters: Sequence[torch.nn.Parameter],
    values: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    state: Sequence[State] | None = None,
) -> Iterator[list[State]]:
    """Make a block in which parameters have other memory, and their optimizer another state. Nothing is awaited in it.

    Args:
        parameters: The parameters.
        values: The memory that is in their place; it is written by what writes the parameters.
        optimizer: Whose state is exchanged too; None: none is.
        state: Of each parameter; None: as the optimizer has it, in copies.
    Yields:
        A list that holds, after the block, the state of each parameter.
    """
    before, held = [each.data for each in parameters], None if optimizer is None else optimizer.state
    after: list[State] = []
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        if optimizer is not None and held is not None:
            given = [_copied(held.get(each, {})) for each in parameters] if state is None else state
            optimizer.state = defaultdict(dict, {p: its for p, its in zip(parameters, given, strict=True) if its})
        yield after
        if optimizer is not None:
            after.extend(optimizer.state.get(each, {}) for each in parameters)
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data = value
            parameter.grad = None
        if optimizer is not None and held is not None:
            optimizer.state = held


def step_apart(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    gradients: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[State]]:
    """Compute a step of an optimizer, and change nothing but gradients: all of its parameters have none afterwards.

    Args:
        optimizer: The optimizer.
        parameters: Those that step; the others have no gradient.
        gradients: Of each.
    Returns:
        Their new values, and what the optimizer keeps for each then.
    """
    values = [each.detach().clone() for each in parameters]
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = None  # one that a program has left would move a parameter that is not in this step
    with in_place_of(parameters, values, optimizer) as state:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return values, state


def kept_by(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> tuple[dict[str, tuple[int, ...]], ...]:
    """Return what an optimizer keeps for each parameter, by a step that is thrown away.

    Args:
        optimizer: It has not stepped.
        parameters: All that are trained.
    Returns:
        Names and shapes.
    Raises:
        LocalError: It knows other parameters than these, has a state that is no float32, or a step changes the settings
            of its groups.
    """
    import torch

    kind = type(optimizer).__name__
    known = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if known != {id(each) for each in parameters}:
        raise LocalError(f"{kind} has other parameters than those of the model that require a gradient")
    settings = [_settings(group) for group in optimizer.param_groups]
    try:
        _, state = step_apart(optimizer, parameters, [torch.zeros_like(each) for each in parameters])
    except TypeError as error:  # LBFGS, for one, computes the loss itself
        raise LocalError(f"{kind} cannot be used here: {error}") from error
    changed = sorted(
        {
            name
            for before, group in zip(settings, optimizer.param_groups, strict=True)
            for name, value in _settings(group).items()
            if before.get(name) != value
        }
    )
    if changed:
        raise LocalError(f"a step of {kind} changes {', '.join(changed)} of its groups, and each worker would do so")
    found: list[dict[str, tuple[int, ...]]] = []
    for its in state:
        found.append({})
        for name in sorted(its):
            value = its[name]
            if value is None:
                continue
            if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
                what = str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__
                raise LocalError(f"{kind} keeps {name}, a {what}; what a logical worker keeps is float32 tensors")
            found[-1][name] = tuple(value.shape)
    return tuple(found)


def _settings(group: Mapping[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in group.items() if name != "params"}


def _copied(state: Mapping[str, Any]) -> State:
    return {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}
