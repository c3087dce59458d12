"""Plans of all ranks, and networks to walk them on."""

from __future__ import annotations

from typing import Any

from quicoll import plan
from quicoll.plan.network import NetworkModel

__all__ = ["MS", "alike", "plans", "reductions", "two_sites"]

MS = 1e-3


def plans(name: str, world: int, **arguments: Any) -> list[plan.Plan]:
    return [getattr(plan, name)(rank=rank, world=world, **arguments) for rank in range(world)]


def reductions(
    algorithm: str, network: NetworkModel, nbytes: int, *, op: str = "all_reduce", **more: Any
) -> list[plan.Plan]:
    world = network.world
    given = {
        "elements": nbytes // 4,
        "leaves": world,
        "itemsize": 4,
        "wide_itemsize": 4,
        "sites": network.sites,
        **more,
    }
    return plans(op, world, algorithm=algorithm, **given)


def alike(world: int, *, latency: float = 10 * MS, rate: float = 1e8, message: float = 0.0) -> NetworkModel:
    return NetworkModel.between((0,) * world, latency=latency, rate=rate, message=message)


def two_sites(each: int, *, far_rate: float = 1e7, message: float = 1e-4) -> NetworkModel:
    return NetworkModel.between(
        (0,) * each + (1,) * each, latency=1e-4, rate=1.25e8, far_latency=25 * MS, far_rate=far_rate, message=message
    )
