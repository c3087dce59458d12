"""What a rank does in a cell: the operation again and again, timed in the same way by every contender and clock.

Before each operation all ranks meet at quicoll's barrier, whoever the contender is, and after it each tells how long it
took; that of the slowest counts. All ranks see the same figures, and so agree on whether there is time for another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.bench.cases import Case, size_text
from quicoll.errors import QuicollError

if TYPE_CHECKING:
    from quicoll.bench.contenders import Contender
    from quicoll.bench.wan import WanCell
    from quicoll.job import Job

__all__ = ["WanSamples", "time_operations"]


@dataclass(frozen=True, slots=True)
class WanSamples:
    """What a contender did in one run of a cell.

    Attributes:
        seconds: Of each operation, that of the slowest rank.
        failed: Why there are no more of them; "" where all are there, or the time was over.
    """

    seconds: tuple[float, ...]
    failed: str = ""


async def time_operations(job: Job, contender: Contender, cell: WanCell, now: Callable[[], float]) -> WanSamples:
    """Do a cell's operation as often as it says, or as long as its time lasts.

    Args:
        job: This rank's.
        contender: Who does it.
        cell: What is to be done.
        now: The clock, in seconds.
    """
    case = Case(f"{cell.kind} {size_text(cell.nbytes)}", cell.kind, cell.nbytes)
    await contender.prepare(case)
    seconds: list[float] = []
    opened = now()
    try:
        for _ in range(cell.operations):
            await job.group.barrier()
            began = now()
            await contender.call(case)
            ended = now()
            told = await job.group.all_gather_object([ended - began, ended - opened])
            seconds.append(max(each[0] for each in told))
            if max(each[1] for each in told) + seconds[-1] > cell.limit_s:
                break
    except (QuicollError, RuntimeError) as error:  # RuntimeError: of torch, and so of Gloo
        return WanSamples(tuple(seconds), f"{type(error).__name__}: {error}")
    return WanSamples(tuple(seconds))
