"""What a worker trains: the parts of a step that are the user's, forward, backward and the update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quicoll.checkpoint.parts import Array
    from quicoll.numerics.seed import Seed
    from quicoll.tiers.tier_set import TierSet

__all__ = ["Part", "Task"]


@dataclass(frozen=True, slots=True)
class Part:
    """One logical shard of one step: what `Task.forward` computes at a time.

    Attributes:
        step: The step's number, from 1.
        shard: From 0; the same samples are of the same shard on any number of ranks.
        seed: For whatever is random in it (dropout): of the job, the step and the shard, on whichever rank it is.
        indices: Of its samples, where the worker has data; else None, and the task finds its data itself.
        samples: What a feed's loader made of them; None without a feed.
        tiers: The set of tiers in force in this step, where the worker has tiers.
    """

    step: int
    shard: int
    seed: Seed
    indices: NDArray[np.int64] | None = None
    samples: Any = None
    tiers: TierSet | None = None


class Task(Protocol):
    """The thing that is trained. The worker calls its methods one at a time, from one thread."""

    def architecture(self) -> Mapping[str, Any]:
        """Return what has to be the same on all ranks beside the parameters: layers, learning rate, ... May be empty.

        Names to values whose text (`str`) says all of them.
        """
        ...

    def parameters(self) -> Mapping[str, Array]:
        """Return what is trained, by name: float32, in the order, and of the shapes, of the gradients.

        State that `forward` would move, such as running statistics, may stand among it: its "gradient" is by how much.
        """
        ...

    def forward(self, part: Part) -> Any:
        """Compute the mean loss of one shard's samples at the present state.

        A pure function of the state and the part, to the last bit; so is `backward`. For what is random there is
        `part.seed`.

        Args:
            part: The shard.
        Returns:
            Whatever `backward` needs.
        """
        ...

    def backward(self, loss: Any) -> Sequence[Array]:
        """Compute the gradients of a mean loss.

        Args:
            loss: What `forward` returned.
        Returns:
            float32 tensors, in the order and of the shapes of `parameters`.
        """
        ...

    def apply(self, average: Sequence[Array]) -> None:
        """Update the state. Called only for committed steps.

        Args:
            average: The mean over all samples of the step; kinds, shapes and order as `parameters` returns them.
        """
        ...

    def state(self) -> Mapping[Any, Any]:
        """Return parameters and optimizer state by name: all that the methods depend on. May alias live memory.

        As for `Job.register_state`: tensors, and mappings, lists and values among them, as `state_dict()` gives.
        """
        ...

    def load_state(self, state: Mapping[Any, Any]) -> None:
        """Take over a state.

        Args:
            state: What `state` returned, here or on another rank. Copy what is kept.
        """
        ...
