"""What a torch program's state is, in the form that `Job.register_state` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from quicoll.data.feed import Feed
from quicoll.data.sampler import Sampler
from quicoll.errors import LocalError

__all__ = ["ModelState", "Stateful", "state_of"]


class Stateful(Protocol):
    """As torch's modules, optimizers and schedulers are."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take over a state."""
        ...


class ModelState(NamedTuple):
    """`job.register_state(*state_of(model, optimizer))`.

    Attributes:
        save: Returns the state, by the names of `state_of`'s arguments. It aliases live memory.
        load: Takes over what save returned, here or on another rank.
    """

    save: Callable[[], dict[str, Any]]
    load: Callable[[Mapping[Any, Any]], None]


def state_of(
    model: Stateful,
    optimizer: Stateful | None = None,
    scheduler: Stateful | None = None,
    sampler: Sampler | Feed | None = None,
    **others: Stateful,
) -> ModelState:
    """Return how the state of a torch program is read and written.

    Args:
        model: What is trained.
        optimizer: Of its parameters.
        scheduler: Of the learning rate.
        sampler: Where the data stands; of a feed its sampler.
        others: Whatever else has `state_dict` and `load_state_dict`, such as a second optimizer, by name.
    Returns:
        The two functions that `Job.register_state` takes.
    Raises:
        LocalError: Something has no state; names it.
    """
    found: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, **others}
    parts = {name: part for name, part in found.items() if part is not None}
    for name, part in parts.items():
        if not callable(getattr(part, "state_dict", None)) or not callable(getattr(part, "load_state_dict", None)):
            raise LocalError(f"{name} is a {type(part).__name__}, without state_dict and load_state_dict")
    position = sampler.sampler if isinstance(sampler, Feed) else sampler
    if position is not None and not isinstance(position, Sampler):
        raise LocalError(f"sampler is a quicoll.data.Sampler or Feed, not a {type(position).__name__}")

    def save() -> dict[str, Any]:
        state = {name: part.state_dict() for name, part in parts.items()}
        return state if position is None else state | {"data": position.state()}

    def load(state: Mapping[Any, Any]) -> None:
        expected = [*parts, *([] if position is None else ["data"])]
        if sorted(map(str, state)) != sorted(expected):
            raise LocalError(f"the state is of {', '.join(map(str, state))}; here it is of {', '.join(expected)}")
        if position is not None:
            position.demand_same(state["data"])
        for name, part in parts.items():
            part.load_state_dict(state[name])
        if position is not None:
            position.load_state(state["data"])

    return ModelState(save, load)
