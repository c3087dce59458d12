"""A torch optimizer that steps a block of elements at a time, for a state that is divided between ranks.

The optimizer is the user's own, with its groups and their settings, as a scheduler changes them. For one block it gets
the elements of each parameter in it as a parameter of its own, with that part of the state, and steps; then its own
parameters are back in place. So nothing but the block and the settings has a say in what comes out.

That is the step of the whole parameter only where the optimizer works element by element (SGD, Adam, AdamW, RMSprop).
Others (LBFGS, Adafactor, Muon) are refused: two steps of eight elements, a matrix, have to give what its halves give,
which are vectors.

    moments     state of a parameter's shape: a piece of what is divided, under torch's name for it
    counters    the rest of a parameter's state, such as Adam's `step`: it depends on the settings and on the steps in
                which the parameter had a gradient, and on no value. So each rank has it. Parameters of one group that
                had their gradients in the same steps are a class, and have one copy; it moves by a step of one element

A parameter that has no gradient in a step is passed over, as torch does it: its class divides from that of the others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import torch

__all__ = ["BlockOptimizer", "StepCounters"]


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


@dataclass(frozen=True, slots=True, eq=False)
class StepCounters:
    """How far the parameters are.

    classes: of each parameter on the axis, in its order; -1 where the optimizer does not know it.
    counters: of each class; None where its parameters have had no gradient yet. They are not changed in place.
    """

    classes: tuple[int, ...]
    counters: tuple[Mapping[str, Any] | None, ...]


class BlockOptimizer:
    """See the module's head.

    Attributes:
        moments: What is kept for each element: element types by name.
        progress: How far the parameters are.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.Tensor],
        *,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Take an optimizer that has not stepped.

        Args:
            optimizer: Of the parameters.
            parameters: Those on the axis, of one dtype, in its order.
            starts: Where each begins on the axis; None: one after the other.
        Raises:
            LocalError: It has a state already, or does not work element by element.
        """
        if optimizer.state:
            raise LocalError(f"{type(optimizer).__name__} has a state already: only one that has none can be divided")
        self._optimizer = optimizer
        of = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        self._spans: list[_Span] = []
        start = 0
        for place, each in enumerate(parameters):
            start = start if starts is None else starts[place]
            self._spans.append(_Span(start, start + each.numel(), each, of.get(id(each))))
            start += each.numel()
        self._stops = [span.stop for span in self._spans]
        groups = sorted({span.group for span in self._spans if span.group is not None})
        self._names = self._tried(groups)
        self.moments = {name: dtype for names in self._names.values() for name, dtype in names.items()}
        classes = tuple(-1 if span.group is None else groups.index(span.group) for span in self._spans)
        self.progress = StepCounters(classes, (None,) * len(groups))

    def update(
        self, start: int, stop: int, average: Any, moments: Mapping[str, Any], had: Sequence[bool] | None = None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the next step of elements [start, stop), and change nothing.

        Args:
            start: The first element.
            stop: The one after the last.
            average: Their mean gradients, an array or a tensor on the host. What belongs to no parameter of the
                optimizer is taken for a value.
            moments: What is kept for them, likewise. Not written.
            had: Whether each parameter on the axis had a gradient; None: all had.
        Returns:
            Their new values, and what is kept for them then, on the host.
        """
        import torch

        values = _copied(average)
        kept = {name: torch.zeros(stop - start, dtype=getattr(torch, dtype)) for name, dtype in self.moments.items()}
        work, places = [], []
        for number in range(bisect_right(self._stops, start), len(self._spans)):
            span = self._spans[number]
            if span.start >= stop:
                break
            first, last = max(start, span.start), min(stop, span.stop)
            at = slice(first - start, last - start)
            held = span.parameter.detach().reshape(-1)[first - span.start : last - span.start]
            if span.group is None or (had is not None and not had[number]):
                values[at] = held.cpu()
                for name in () if span.group is None else self._names[span.group]:
                    kept[name][at] = _copied(moments[name][at])
                continue
            state = self._state(self.progress.classes[number])
            if state is not None:
                names = self._names[span.group]
                state |= {name: _copied(moments[name][at]).to(held.device) for name in names}
            work.append(_piece(span.group, held, _copied(average[at]).to(held.device), state))
            places.append(at)
        for at, each, after in zip(places, work, self._stepped(work), strict=True):
            values[at] = each.parameter.detach().cpu()
            for name in self._names[each.group]:
                kept[name][at] = after[name].cpu()
        return values, kept

    def advanced(self, had: Sequence[bool] | None = None) -> StepCounters:
        """Return how far the parameters are after a step; nothing has changed yet.

        Args:
            had: Whether each parameter had a gradient; None: all had.
        """
        import torch

        firsts: dict[tuple[int, bool], int] = {}  # the first parameter of each class, old number and gradient
        numbers: dict[tuple[int, bool], int] = {}
        classes = []
        for place, (span, before) in enumerate(zip(self._spans, self.progress.classes, strict=True)):
            if span.group is None:
                classes.append(-1)
                continue
            key = before, had is None or bool(had[place])
            firsts.setdefault(key, place)
            classes.append(numbers.setdefault(key, len(numbers)))
        work = []
        for (before, steps), place in firsts.items():
            span = self._spans[place]
            if not steps or span.group is None:
                continue
            one, state = span.parameter.new_zeros(1), self._state(before)
            if state is not None:
                state |= {
                    name: torch.zeros(1, dtype=getattr(torch, dtype), device=one.device)
                    for name, dtype in self._names[span.group].items()
                }
            work.append(_piece(span.group, one, one, state))
        stepped = iter(zip(work, self._stepped(work), strict=True))
        counters: list[Mapping[str, Any] | None] = []
        for before, steps in firsts:
            if not steps:
                counters.append(self.progress.counters[before])
                continue
            each, after = next(stepped)
            names = self._names[each.group]
            counters.append({name: value for name, value in after.items() if name not in names})
        return StepCounters(tuple(classes), tuple(counters))

    def state(self) -> dict[str, Any]:
        """Return how far the parameters are, as part of a state. It aliases live memory."""
        return {"classes": list(self.progress.classes), "counters": list(self.progress.counters)}

    def load(self, groups: Sequence[Mapping[str, Any]], state: Mapping[str, Any]) -> None:
        """Take over the groups' settings and how far the parameters are, as another rank has them.

        Args:
            groups: As the optimizer's `state_dict` has them.
            state: What `state` returned there.
        Raises:
            LocalError: It is of another number of parameters.
        """
        classes = tuple(int(each) for each in state["classes"])
        if len(classes) != len(self._spans):
            raise LocalError(f"counters of {len(classes)} parameters, where {len(self._spans)} are trained")
        for mine, given in zip(self._optimizer.param_groups, groups, strict=True):
            mine.update({name: value for name, value in given.items() if name != "params"})
        self.progress = StepCounters(
            classes, tuple(None if each is None else _copy(each) for each in state["counters"])
        )

    def _state(self, number: int) -> dict[str, Any] | None:
        """The counters of a class in memory of their own, which a step changes in place; None before the first one."""
        counters = self.progress.counters[number]
        return None if counters is None else _copy(counters)

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

    def _tried(self, groups: Sequence[int]) -> dict[int, dict[str, str]]:
        """What each group keeps for its elements, types by name, from two steps on eight, together and apart."""
        import torch

        dtype = self._spans[0].parameter.dtype if self._spans else torch.float32
        values = torch.tensor([1.0, -2.0, 3.0, 0.5, 0.25, 1.5, -1.0, 2.0], dtype=dtype)
        gradients = torch.tensor([0.5, -0.25, 0.125, 2.0, -0.5, 0.75, 1.0, -1.5], dtype=dtype)
        settings = [_copy(group) for group in self._optimizer.param_groups]
        try:
            whole, *halves = (
                self._two_steps(groups, values[cut].reshape(shape), gradients[cut].reshape(shape))
                for cut, shape in ((slice(0, 8), (2, 4)), (slice(0, 4), (4,)), (slice(4, 8), (4,)))
            )
        except Exception as error:  # whatever an optimizer says of elements without their parameter
            raise self._refused(f"{type(error).__name__}: {error}") from error
        for before, group in zip(settings, self._optimizer.param_groups, strict=True):
            odd = [name for name in group if name != "params" and not _same(before.get(name), group[name])]
            group.update({name: before[name] for name in odd if name in before})
            if odd:
                raise self._refused(f"a step changes {', '.join(odd)} of its groups, which each block would do again")
        tolerance = 1e-5 if dtype.itemsize > 2 else 2.0**-6
        found = {}
        for number, one, *parts in zip(groups, whole, *halves, strict=True):
            apart = torch.cat([each.parameter for each in parts]).reshape(2, 4)
            if not torch.allclose(one.parameter, apart, rtol=tolerance, atol=1e-7):
                raise self._refused("it does not work element by element")
            state = one.state or {}
            found[number] = {
                name: str(each.dtype).removeprefix("torch.")
                for name, each in state.items()
                if getattr(each, "shape", ()) == (2, 4)
            }
        return found

    def _two_steps(self, groups: Sequence[int], values: torch.Tensor, gradient: torch.Tensor) -> list[_Piece]:
        work = [_piece(number, values, gradient, None) for number in groups]
        for _ in range(2):
            states = self._stepped(work)
            work = [
                _piece(each.group, each.parameter.detach(), gradient, state)
                for each, state in zip(work, states, strict=True)
            ]
        return work

    def _refused(self, why: str) -> LocalError:
        return LocalError(f"the state of {type(self._optimizer).__name__} cannot be divided: {why}")


def _copied(values: Any) -> torch.Tensor:
    import torch

    return values.clone() if isinstance(values, torch.Tensor) else torch.tensor(values)


def _copy(counters: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in counters.items()}


def _same(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one is other or one == other)


def _piece(group: int, values: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any] | None) -> _Piece:
    import torch

    parameter = torch.nn.Parameter(values.clone())
    parameter.grad = gradient.clone()
    return _Piece(group, parameter, state)
