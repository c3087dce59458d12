"""A cell in the simulator: the real code of all ranks in one process, on a virtual clock.

What the machine does meanwhile, or how fast it is, changes nothing, and a seed's run is the same again. So processor
time counts for nothing either. Each host has an access link with the link's rate and queue, which all its paths share;
delay and losses are those of the paths.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quicoll.bench.contenders import Quicoll
from quicoll.bench.wan_timing import WanSamples, time_operations
from quicoll.errors import LocalError
from quicoll.sim import AccessLink, Conditions, Settings, Simulation

if TYPE_CHECKING:
    from quicoll.bench.wan import WanCell, WanLink

__all__ = ["simulate_cell"]

_START_S = 120.0
"""Simulated seconds for what is before and after the operations."""


def simulate_cell(cell: WanCell, seed: int) -> WanSamples:
    """Run a cell once.

    Args:
        cell: What is measured.
        seed: Of what the links lose.
    Raises:
        LocalError: The run itself failed, which is a fault in quicoll.
    """

    async def worker(job: Any, sim: Any) -> WanSamples:
        return await time_operations(job, Quicoll(job), cell, lambda: float(sim.now))

    link = cell.link
    settings = Settings(
        ranks=cell.ranks,
        conditions=Conditions(latency_ns=round(link.rtt_ms * 500_000), loss=link.loss, burst=link.burst),
        access=_access(link),
        congestion=cell.congestion,
        lost_after=8.0,
        timeout=cell.limit_s,
        hold_timeout=400.0,
        limit=cell.limit_s * 2 + _START_S,
    )
    simulation = Simulation(worker, seed=seed, settings=settings)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # an operation that is given up is told of in the table
    try:
        outcome = simulation.run()
    finally:
        logging.disable(before)
    if outcome.error is not None:
        raise LocalError(f"{cell}, seed {seed}: {outcome.error}")
    samples: WanSamples = outcome.results[0]
    return samples


def _access(link: WanLink) -> tuple[AccessLink, ...]:
    """Return the access links of rank 0 and of all others."""
    rate, queue = round(link.mbit * 125_000), link.queue_bytes(link.mbit)
    others = AccessLink(up=rate, down=rate, up_queue=queue, down_queue=queue)
    if not link.back_mbit:
        return (others,)
    back, back_queue = round(link.back_mbit * 125_000), link.queue_bytes(link.back_mbit)
    return replace(others, down=back, down_queue=back_queue), others
