"""A round of DiLoCo as one rank computes it: what it begins from, and how far it is.

    opened      by where the round before has left the job and the workers here (`RoundEnd`): committed, or to be
                committed. The workers' memory is the attempt's own; nothing of it is sent
    started     the step has begun for all ranks: they hear each other (quicoll.train.diloco_stretches)
    done        so many inner steps; before the start no more than until the first exchange

Plain values: who does what with them is said in quicoll.train.diloco.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from quicoll.data.portions import Position
    from quicoll.train.diloco_lanes import SiteLanes
    from quicoll.train.diloco_stretches import Stretches
    from quicoll.train.diloco_workers import LogicalWorker

__all__ = ["RoundEnd", "RoundWork"]


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """What a round has come to, by which the next one begins.

    Attributes:
        rows: Of the logical workers that are here, one after the other.
        values: The job's parameters.
        position: Where the data stands; None where there is none.
    """

    rows: torch.Tensor
    values: Sequence[torch.Tensor]
    position: Position | None


@dataclass(slots=True, eq=False)
class RoundWork:
    """See the module's head.

    Attributes:
        number: Of the round.
        lanes: The groups in which it is exchanged, of the view in which it was opened.
        workers: The logical workers that are here.
        said: What they do, and what all ranks say of it.
        position: Where the data stands after the inner steps that are done; None where there is none.
        started: Whether the step has begun.
        done: So many inner steps.
        samples: Of these, on all ranks; 0 where there is no data.
    """

    number: int
    lanes: SiteLanes
    workers: Sequence[LogicalWorker]
    said: Stretches
    position: Position | None
    started: bool = False
    done: int = 0
    samples: int = 0
