"""A torch optimizer that steps a block of elements at a time, for a state that is divided between ranks.

The optimizer is the user's own, with its groups and their settings, as a scheduler changes them. For one block it gets
the elements of each parameter in it as a parameter of its own, with that part of the state, and steps; then its own
parameters are back in place. So nothing but the block and the settings has a say in what comes out.

That is the step of the whole parameter only where the optimizer works element by element (SGD, Adam, AdamW, RMSprop).
Others (LBFGS, Adafactor, Muon) are refused: two steps of four elements together have to give what they give apart.

    moments     state of a parameter's shape: a piece of what is divided, under torch's name for it
    counters    the rest of a parameter's state, such as Adam's `step`: the same for all of a group, so each rank has
                it, and it moves by a step of one element without a gradient
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import torch

    from quicoll.train.divided import Flat

__all__ = ["BlockOptimizer"]


@dataclass(frozen=True, slots=True, eq=False)
class _Span:
    """A parameter on the axis. group: its number; None where the optimizer does not know it."""

    start: int
    stop: int
    parameter: torch.Tensor
    group: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """What the optimizer gets as a parameter. state: None before the first step."""

    group: int
    parameter: torch.nn.Parameter
    state: Mapping[str, Any] | None


class BlockOptimizer:
    """See the module's head.

    Attributes:
        moments: What is kept for each element: element types by name.
        counters: What else is kept, by group; empty before the first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Take an optimizer that has not stepped.

        Args:
            optimizer: Of the parameters.
            parameters: All that are trained, in the order of the axis.
        Raises:
            LocalError: It has a state already, or does not work element by element.
        """
        if optimizer.state:
            raise LocalError(f"{type(optimizer).__name__} has a state already: only one that has none can be divided")
        self._optimizer = optimizer
        self._names = self._tried()
        self.moments = {name: "float32" for names in self._names for name in names}
        self.counters: list[dict[str, Any]] = []
        of = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        self._spans, start = [], 0
        for each in parameters:
            self._spans.append(_Span(start, start + each.numel(), each, of.get(id(each))))
            start += each.numel()

    def update(self, start: int, stop: int, average: Flat, moments: Mapping[str, Flat]) -> tuple[Flat, dict[str, Flat]]:
        """Compute the next step of elements [start, stop); see `quicoll.train.DivisibleTask.update`."""
        import torch

        values = np.array(average)
        kept = {name: np.zeros(stop - start, np.float32) for name in self.moments}
        work, places = [], []
        for span in self._spans:
            first, last = max(start, span.start), min(stop, span.stop)
            if first >= last:
                continue
            at = slice(first - start, last - start)
            held = span.parameter.detach().reshape(-1)[first - span.start : last - span.start]
            if span.group is None:
                values[at] = held.cpu().numpy()
                continue
            piece = torch.nn.Parameter(held.clone())
            piece.grad = torch.tensor(average[at], device=held.device)
            state = self._copied(span.group)
            if state is not None:
                state |= {name: torch.tensor(moments[name][at], device=held.device) for name in self._names[span.group]}
            work.append(_Piece(span.group, piece, state))
            places.append(at)
        for at, each, after in zip(places, work, self._stepped(work), strict=True):
            values[at] = each.parameter.detach().cpu().numpy()
            for name in self._names[each.group]:
                kept[name][at] = after[name].cpu().numpy()
        return values, kept

    def advance(self) -> None:
        """Move the counters by a step."""
        import torch

        work = []
        for group in range(len(self._names)):
            state = self._copied(group)
            if state is not None:
                state |= {name: torch.zeros(1) for name in self._names[group]}
            work.append(_piece(group, torch.zeros(1), torch.zeros(1), state))
        self.counters = [
            {name: value for name, value in after.items() if name not in names}
            for names, after in zip(self._names, self._stepped(work), strict=True)
        ]

    def load(self, groups: Sequence[Mapping[str, Any]], counters: Sequence[Mapping[str, Any]]) -> None:
        """Take over the groups' settings and the counters, as another rank has them."""
        for mine, given in zip(self._optimizer.param_groups, groups, strict=True):
            mine.update({name: value for name, value in given.items() if name != "params"})
        self.counters = [_copy(each) for each in counters]

    def _copied(self, group: int) -> dict[str, Any] | None:
        """The counters of a group in memory of their own, which a step changes in place; None before the first one."""
        return _copy(self.counters[group]) if self.counters else None

    def _stepped(self, work: Sequence[_Piece]) -> list[Mapping[str, Any]]:
        """Let the optimizer step these in the place of its parameters; return their states then."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        parameters, state = [group["params"] for group in groups], optimizer.state
        try:
            for number, group in enumerate(groups):
                group["params"] = [each.parameter for each in work if each.group == number]
            optimizer.state = defaultdict(dict)
            for each in work:
                if each.state is not None:
                    optimizer.state[each.parameter] = dict(each.state)
            optimizer.step()
            return [optimizer.state[each.parameter] for each in work]
        finally:
            optimizer.state = state
            for group, its in zip(groups, parameters, strict=True):
                group["params"] = its

    def _tried(self) -> list[tuple[str, ...]]:
        """The names of what each group keeps for its elements, from two steps on four of them, together and apart."""
        import torch

        name = type(self._optimizer).__name__
        values, gradients = torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.tensor([0.5, -0.25, 0.125, 2.0])
        cuts = (slice(0, 4), slice(0, 2), slice(2, 4))
        numbers = range(len(self._optimizer.param_groups))
        try:
            work = [_piece(number, values[cut], gradients[cut], None) for number in numbers for cut in cuts]
            for _ in range(2):
                states = self._stepped(work)
                work = [
                    _piece(each.group, each.parameter.detach(), gradients[cuts[place % 3]], state)
                    for place, (each, state) in enumerate(zip(work, states, strict=True))
                ]
        except Exception as error:  # whatever an optimizer says of elements without their parameter
            raise LocalError(f"the state of {name} cannot be divided: {type(error).__name__}: {error}") from error
        found = []
        for number in numbers:
            whole, one, other = work[3 * number : 3 * number + 3]
            if not torch.allclose(whole.parameter, torch.cat((one.parameter, other.parameter)), rtol=1e-5, atol=1e-7):
                raise LocalError(f"the state of {name} cannot be divided: it does not work element by element")
            state = whole.state or {}
            moments = {key: each for key, each in state.items() if getattr(each, "shape", ()) == (4,)}
            if any(each.dtype is not torch.float32 for each in moments.values()):
                raise LocalError(f"the state of {name} cannot be divided: not all of it is float32")
            found.append(tuple(moments))
        return found


def _copy(counters: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in counters.items()}


def _piece(group: int, values: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any] | None) -> _Piece:
    import torch

    parameter = torch.nn.Parameter(values.clone())
    parameter.grad = gradient.clone()
    return _Piece(group, parameter, state)
