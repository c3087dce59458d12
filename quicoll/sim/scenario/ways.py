"""The ways between ranks of a random scenario: address translators, a relay, and what befalls them.

Three of four workers of such a seed are behind a translator each, of any kind, some two behind one. Mappings live for
the time after which a link is lost, or a few times that, so that they run out while a process stands still or is down;
or for two minutes, as with most routers. The coordinator is the relay, or a process of its own; there is none only
where every pair can do without.

    rebind      a translator loses its mappings, as by a restart
    relay       its process ends or its machine loses power, and is mostly started again; the paths to some workers are
                cut, or bad; or it meddles with what it passes on

Nothing befalls a relay that there is not; one that is the coordinator meddles, and is hit as the coordinator is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from quicoll.sim.scenario.drawing import drawn_for
from quicoll.sim.scenario.events import (
    MEDDLINGS,
    RELAY_HOST,
    Crash,
    Meddle,
    PartitionPath,
    Rebind,
    Repair,
    Restart,
    SetConditions,
    node_name,
)
from quicoll.sim.translators import opens, translators
from quicoll_transport.sim import NatKind

if TYPE_CHECKING:
    from quicoll.sim.outcome import Settings
    from quicoll.sim.scenario.drawing import SwarmDraw
    from quicoll.sim.scenario.events import Fault
    from quicoll_transport.sim import Conditions

__all__ = ["WAY_KINDS", "disturb_ways", "ways_of", "with_translators"]

WAY_KINDS = ("rebind", "relay")

_SHARE = 0.09
_S = 1_000_000_000


def ways_of(seed: int, wanted: Sequence[str]) -> SwarmDraw | None:
    """Return what the translators of this seed, and what befalls them, are drawn by; None where it has none."""
    draw = drawn_for("ways", seed)
    of_these = [kind for kind in wanted if kind in WAY_KINDS]
    return draw if of_these and draw.chance(1.0 if of_these == list(wanted) else _SHARE) else None


def with_translators(draw: SwarmDraw, settings: Settings) -> Settings:
    """Return the settings with address translators, one at least, and with who passes on for them."""
    workers = settings.ranks + settings.spares
    kinds = [kind.value for kind in NatKind]
    kinds = draw.one_of((kinds, kinds, kinds[:3]))  # the first three, cones, need no relay
    nats = [draw.one_of(kinds) if draw.chance(0.75) else "" for _ in range(workers)]
    first = draw.one_of(range(workers))
    nats[first] = nats[first] or NatKind.PORT_RESTRICTED_CONE.value
    if first + 1 < workers and draw.chance(0.35):
        nats[draw.one_of(range(first + 1, workers))] = str(first)
    need_none = all(opens(nats, *pair) for pair in combinations(range(workers), 2))
    relay = draw.one_of(("", "own", "none", "none") if need_none else ("", "", "own", "own"))
    lifetime = draw.one_of((0.8 * settings.lost_after, 1.5 * settings.lost_after, 4 * settings.lost_after, 120.0))
    return replace(settings, nats=tuple(nats), nat_lifetime=lifetime, relay=relay)


def disturb_ways(
    draw: SwarmDraw,
    settings: Settings,
    kinds: Sequence[str],
    *,
    begin_ns: int,
    horizon_ns: int,
    put: Callable[[int, Fault], None],
) -> None:
    """Let translators and relays fail.

    Args:
        draw: By which all of it is drawn.
        settings: With translators.
        kinds: Of `WAY_KINDS`, those that may come.
        begin_ns: Nothing comes before.
        horizon_ns: All of it begins within so long after that.
        put: Takes each fault and its time.
    """
    behind = [node_name(worker) for worker in translators(settings.nats)]
    for _ in range(draw.one_of((1, 2, 2, 3))):
        at_ns = begin_ns + round(horizon_ns * draw.between(0.0, 1.0))
        until_ns = at_ns + round(settings.lost_after * _S * draw.one_of((0.3, 0.9, 1.1, 2.0)))
        if draw.one_of(kinds) == "rebind":
            put(at_ns, Rebind(draw.one_of(behind)))
            continue
        if settings.relay == "none":
            continue
        fault, end = _of_relay(draw, settings)
        put(at_ns, fault)
        if end is not None and draw.chance(0.7):
            put(until_ns, end)


def _of_relay(draw: SwarmDraw, settings: Settings) -> tuple[Fault, Fault | None]:
    """A fault of the relay, and what ends it."""
    workers = [node_name(worker) for worker in range(settings.ranks + settings.spares)]
    some = tuple(sorted(draw.some_of(workers)))
    match draw.one_of(("crash", "crash", "cut", "bad", "meddle", "meddle")) if settings.relay else "meddle":
        case "crash":
            return Crash(RELAY_HOST, power=draw.chance(0.2)), Restart(RELAY_HOST)
        case "cut":
            one, other = ((RELAY_HOST,), some) if draw.chance(0.5) else (some, (RELAY_HOST,))
            return PartitionPath(one, other, draw.chance(0.4)), Repair(one, other)
        case "bad":
            one, other = ((RELAY_HOST,), some) if draw.chance(0.5) else (some, (RELAY_HOST,))
            bad = _bad(draw, settings.conditions)
            return SetConditions(bad, one, other), SetConditions(settings.conditions, one, other)
        case _:
            return Meddle(draw.one_of(MEDDLINGS)), None


def _bad(draw: SwarmDraw, usual: Conditions) -> Conditions:
    return draw.one_of(
        (
            replace(usual, loss=0.2),
            replace(usual, corrupt=0.1),
            replace(usual, reorder=0.3, reorder_ns=20_000_000),
            replace(usual, duplicate=0.5),
            replace(usual, latency_ns=usual.latency_ns + 60_000_000),
            replace(usual, mtu=1300),
        )
    )
