"""The lanes of a random scenario, what they have to carry, and what befalls them.

A fifth of the seeds with two ranks or more have lanes, one for each rank or two, and steps with messages so long that
they go by them (`Settings.long_bytes`): mostly somewhat more than 64 KiB, now and then up to 8 MiB where paths are
such that it gets through in time. Chunks are shorter than some of these messages, longer than others. A quarter of them
have a provider for each lane, so that one is quicker than the other, or neither quick.

    lane        processes of lanes end, hang, are cut off from all others, or slow; what lanes receive has another bit.
                All lanes of a worker, or one. At times of their own, or just after another fault: a lane breaks while
                a view forms, a rank comes back, a liar lies

What befalls lanes costs no view by itself, whatever it is; so every other fault is drawn beside it, as it is without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quicoll.sim.scenario.drawing import drawn_for
from quicoll.sim.scenario.events import LANE_FAULTS, LaneFault
from quicoll_transport.sim import AccessLink

if TYPE_CHECKING:
    from quicoll.sim.outcome import Settings
    from quicoll.sim.scenario.drawing import SwarmDraw
    from quicoll.sim.scenario.events import Fault

__all__ = ["disturb_lanes", "lanes_of", "with_lanes"]

_SHARE = 0.2
_KIB = 1 << 10
_MS = 1_000_000
_PROVIDERS = (2_000_000, 4_000_000, 16_000_000)  # bytes a second
_QUEUE = 256 * _KIB


def lanes_of(seed: int, ranks: int, wanted: Sequence[str]) -> SwarmDraw | None:
    """Return what the lanes of this seed, and what befalls them, are drawn by; None where it has none."""
    draw = drawn_for("lanes", seed)
    alone = list(wanted) == ["lane"]
    return draw if ranks > 1 and "lane" in wanted and draw.chance(1.0 if alone else _SHARE) else None


def with_lanes(draw: SwarmDraw, settings: Settings) -> Settings:
    """Return the settings with lanes, and with messages that they carry."""
    lanes = draw.one_of((1, 1, 2))
    quick = settings.conditions.loss == 0 and settings.conditions.latency_ns <= 2 * _MS and settings.timeout >= 5
    provided, size = draw.chance(0.25), draw.between(0.0, 1.0)
    access: tuple[AccessLink, ...] = ()
    for rate in [draw.one_of(_PROVIDERS) for _ in range(lanes)]:
        access += (AccessLink(up=rate, down=rate, up_queue=_QUEUE, down_queue=_QUEUE),) if provided else ()
    chunk = draw.one_of((96 * _KIB, 1024 * _KIB, 1024 * _KIB, 8192 * _KIB))
    shorter = draw.log_between(65 * _KIB, 95 * _KIB) * draw.one_of((1, 1, 2))  # two chunks are longer than 64 KiB, too
    longer = draw.log_between(256 * _KIB, 1024 * _KIB) if size < 0.9 else draw.log_between(1024 * _KIB, 8192 * _KIB)
    return replace(
        settings,
        lanes=lanes,
        lane_access=access,
        chunk_bytes=chunk,
        long_bytes=round(longer if quick and not provided and size > 0.7 else shorter),
    )


def disturb_lanes(
    draw: SwarmDraw,
    settings: Settings,
    others: Sequence[int],
    *,
    begin_ns: int,
    horizon_ns: int,
    put: Callable[[int, Fault], None],
) -> None:
    """Let lanes fail, once to three times.

    Args:
        draw: By which all of it is drawn.
        settings: Of the cluster, which has lanes.
        others: When other faults come.
        begin_ns: When the first may come.
        horizon_ns: Within which they come.
        put: Called with each fault and its time.
    """
    lost_ns = settings.lost_after * 1e9
    for _ in range(draw.one_of((1, 1, 2, 3))):
        at_ns = begin_ns + round(horizon_ns * draw.between(0.0, 1.0))
        after_ns = round(draw.log_between(_MS / 2, 2 * lost_ns))
        if draw.chance(0.4) and others:
            at_ns = draw.one_of(others) + after_ns
        node = f"worker-{draw.one_of(range(settings.ranks + settings.spares))}"
        only = draw.one_of((None, *range(settings.lanes))) if settings.lanes > 1 else None
        put(at_ns, LaneFault(node, draw.one_of(LANE_FAULTS), only))
