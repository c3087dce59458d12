"""What is trained by DiLoCo, as a task: the module with the job's parameters, the outer optimizer, and the journal.

It is the part of the state that all ranks have: handed over, written to checkpoints, and moved by commits alone. The
recipe is in the architecture, which is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quicoll.train.diloco_journal import RoundJournal
from quicoll.train.torch_task import TorchTask

if TYPE_CHECKING:
    import torch

    from quicoll.train.task import Part

__all__ = ["RoundsTask"]

_JOURNAL = "journal"


class RoundsTask(TorchTask):
    """See the module's head.

    Attributes:
        journal: Of the committed rounds.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        outer: torch.optim.Optimizer,
        loss: Callable[[torch.nn.Module, Part], torch.Tensor],
        *,
        inner: torch.optim.Optimizer,
        **recipe: object,
    ) -> None:
        """Say what is trained.

        Args:
            module: As in `TorchTask`.
            outer: The optimizer of the job's parameters.
            loss: As in `TorchTask`.
            inner: The optimizer of the inner steps.
            recipe: What else has to be the same on all ranks.
        """
        super().__init__(module, outer, loss)
        self._recipe = {"inner optimizer": _said(inner), **recipe}
        self.journal = RoundJournal()

    def architecture(self) -> Mapping[str, Any]:
        """Return what a torch task returns, and the recipe."""
        return {**super().architecture(), **self._recipe}

    def state(self) -> Mapping[Any, Any]:
        """Return what a torch task returns, and the journal where there is anything in it."""
        found = super().state()
        return {**found, _JOURNAL: self.journal.text} if self.journal.text else found

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Load them.

        Raises:
            LocalError: The journal is none; nothing has changed.
        """
        journal = RoundJournal.parse(state.get(_JOURNAL, ""))
        super().load_state(state)
        self.journal = journal


def _said(optimizer: torch.optim.Optimizer) -> str:
    defaults = {name: value for name, value in sorted(optimizer.defaults.items()) if name != "params"}
    return f"{type(optimizer).__name__} {defaults}"
