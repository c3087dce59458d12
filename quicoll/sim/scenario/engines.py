"""The engines of a random scenario that are in processes of their own, and what befalls them.

A seventh of the seeds have some: that of one rank, of half of the ranks, or of all of them. What goes wrong besides is
drawn as without.

    engine      the process of an engine ends, or does nothing any more; at times of its own, or just after another
                fault. Its program ends by that, and is started again, as a pod is

A third of these seeds have no such fault: there the other faults meet engines that are a line away from their programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quicoll.sim.scenario.drawing import drawn_for
from quicoll.sim.scenario.events import ENGINE_FAULTS, EngineFault

if TYPE_CHECKING:
    from quicoll.sim.outcome import Settings
    from quicoll.sim.scenario.drawing import SwarmDraw
    from quicoll.sim.scenario.events import Fault

__all__ = ["disturb_engines", "engines_of", "with_engines"]

_SHARE = 0.15
_MS = 1_000_000


def engines_of(seed: int, wanted: Sequence[str]) -> SwarmDraw | None:
    """Return by what engines of this seed, and what befalls them, are drawn; None where all are in their programs."""
    draw = drawn_for("engines", seed)
    alone = list(wanted) == ["engine"]
    return draw if "engine" in wanted and draw.chance(1.0 if alone else _SHARE) else None


def with_engines(draw: SwarmDraw, settings: Settings) -> Settings:
    """Return the settings with engines in processes of their own."""
    workers = settings.ranks + settings.spares
    return replace(settings, engine_processes=draw.one_of((1, max(1, workers // 2), workers)))


def disturb_engines(
    draw: SwarmDraw,
    settings: Settings,
    others: Sequence[int],
    *,
    begin_ns: int,
    horizon_ns: int,
    put: Callable[[int, Fault], None],
) -> None:
    """Let processes of engines fail, twice at most.

    Args:
        draw: By which all of it is drawn.
        settings: Of the cluster, which has such engines.
        others: When other faults come.
        begin_ns: When the first may come.
        horizon_ns: Within which they come.
        put: Called with each fault and its time.
    """
    workers = settings.ranks + settings.spares
    for _ in range(draw.one_of((0, 1, 2))):
        at_ns = begin_ns + round(horizon_ns * draw.between(0.0, 1.0))
        after_ns = round(draw.log_between(_MS / 2, 2e9 * settings.lost_after))
        if draw.chance(0.4) and others:
            at_ns = draw.one_of(others) + after_ns
        node = f"worker-{draw.one_of(range(workers - settings.engine_processes, workers))}"
        put(at_ns, EngineFault(node, draw.one_of(ENGINE_FAULTS)))
