"""Which algorithm is the cheapest: each one's plans are walked on the network that all ranks have agreed on.

`choose` predicts each algorithm that keeps the canonical bits and takes the cheapest. It is a function of its
arguments alone and computes with IEEE 754 doubles, in one order, so ranks that hold equal arguments choose alike.
What ranks measure differs, therefore they exchange it, take the elementwise maximum and round up to powers of two
(`agreed`): a difference of less than a factor of two is not worth a disagreement between two runs.

Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from quicoll.errors import LocalError
from quicoll.plan.broadcasts import all_gather, broadcast
from quicoll.plan.chunks import MIB
from quicoll.plan.forecast import predict
from quicoll.plan.hierarchical import MOVES
from quicoll.plan.moves import gather, scatter
from quicoll.plan.reductions import CANONICAL, MIN_SHARE_BYTES, all_reduce, reduce, reduce_scatter
from quicoll.plan.routes import normal_sites

if TYPE_CHECKING:
    from quicoll.plan.model import Plan
    from quicoll.plan.network import NetworkModel

__all__ = ["MAX_WALKED", "RULES", "choose", "has_choice"]

RULES: Final = 2
"""The number of these rules. Ranks compare it as they agree on their network: those of two versions of quicoll would
choose differently, and wait for each other. So whoever has another choice made for anything gives another number."""

# Beyond this many ranks a walk takes longer than it can save (0.1 s of the engine's time); see `choose`.
MAX_WALKED = 16
# Beyond, exchange is never the cheapest, having (world - 1) times the bytes, and expensive to walk.
_EXCHANGE_BYTES = 1 << 18

_PLANNERS: dict[str, Callable[..., Plan]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
}
_KNOWN: dict[str, tuple[str, ...]] = {**CANONICAL, **MOVES}


def choose(
    op: str,
    world: int,
    nbytes: int,
    leaves: int,
    sites: Sequence[int],
    network: NetworkModel,
    *,
    chunk_bytes: int = MIB,
    itemsize: int = 4,
    wide_itemsize: int = 4,
    loose: int = 1,
    root: int = 0,
    thrifty: bool = False,
) -> str:
    """Choose the cheapest algorithm.

    Parts count as equal, the size as the next power of two; ties go to the first in `CANONICAL` or `MOVES`. Beyond
    MAX_WALKED ranks nothing is walked: hierarchical if there are several sites; else for a reduction tree where the
    tensor has one owner and its messages to all ranks take longer than the tree's levels; else the first.

    Args:
        op: One of `CANONICAL` or `MOVES`.
        world: Number of ranks.
        nbytes: Of the tensor.
        leaves: Of a reduction.
        sites: A number for each rank.
        network: Equal on all ranks, so that all choose alike.
        chunk_bytes: The longest message.
        itemsize: Bytes of an element.
        wide_itemsize: Bytes of an element of a reduction's accumulator.
        loose: As in `quicoll.plan.reductions`.
        root: Where there is one.
        thrifty: A wire format was asked for, and so fewer bytes: between more than two ranks nothing is exchanged,
            which saves a delay and sends the most.
    Returns:
        The algorithm's name.
    Raises:
        LocalError: The operation has one algorithm only.
    """
    known = _KNOWN.get(op, ())
    if not known:
        raise LocalError(f"{op} has one algorithm")
    numbered = normal_sites(sites, world)
    several = max(numbered) > 0
    if not has_choice(op, world, nbytes, sites):
        return known[0]
    if world > MAX_WALKED:
        if several:
            return "hierarchical"
        return "tree" if nbytes <= MIN_SHARE_BYTES and _levels_pay(network) else known[0]
    size = 1 << (nbytes - 1).bit_length()
    item = itemsize, wide_itemsize, loose, root
    return _choose(op, world, size, leaves, numbered, network, chunk_bytes, item, thrifty and world > 2)


def has_choice(op: str, world: int, nbytes: int, sites: Sequence[int]) -> bool:
    """Return whether `choose` depends on the network: moves differ only where there are several sites."""
    return world > 1 and nbytes > 0 and (op in CANONICAL or (op in MOVES and len(set(sites)) > 1))


def _levels_pay(network: NetworkModel) -> bool:
    """Return whether log2(world) delays in a row are shorter than world messages in a row, for few bytes."""
    world = network.world
    delay = max(map(max, network.latency))
    levels = (world - 1).bit_length()
    return levels * (delay + 2 * network.message) < delay + (world - 1) * network.message


@lru_cache(maxsize=256)
def _choose(
    op: str,
    world: int,
    nbytes: int,
    leaves: int,
    sites: tuple[int, ...],
    network: NetworkModel,
    chunk_bytes: int,
    item: tuple[int, int, int, int],
    thrifty: bool,
) -> str:
    best = ("", float("inf"))
    for algorithm in _KNOWN[op]:
        if algorithm == "hierarchical" and max(sites) == 0:
            continue  # it is direct then
        if algorithm == "exchange" and (thrifty or nbytes > _EXCHANGE_BYTES):
            continue
        seconds = predict(_sketch(op, algorithm, world, nbytes, leaves, sites, chunk_bytes, item), network).seconds
        if seconds < best[1]:
            best = (algorithm, seconds)
    return best[0]


def _sketch(
    op: str,
    algorithm: str,
    world: int,
    nbytes: int,
    leaves: int,
    sites: tuple[int, ...],
    chunk_bytes: int,
    item: tuple[int, int, int, int],
) -> list[Plan]:
    """Plans in at most two chunks for each owner: enough to tell costs apart, quickly walked."""
    itemsize, wide_itemsize, loose, root = item
    elements = -(-nbytes // itemsize)
    counts = [elements // world + (rank < elements % world) for rank in range(world)]
    given: dict[str, Any] = {
        "algorithm": algorithm,
        "world": world,
        "itemsize": itemsize,
        "chunk_bytes": max(chunk_bytes, -(-nbytes // (2 * world))),
        "sites": sites,
    }
    if op in CANONICAL:
        given |= {"leaves": leaves, "wide_itemsize": wide_itemsize, "loose": loose}
    given |= {"elements": elements} if op in ("all_reduce", "reduce", "broadcast") else {"counts": counts}
    if op in ("reduce", "broadcast", "gather", "scatter"):
        given["root"] = root
    return [_PLANNERS[op](rank=rank, **given) for rank in range(world)]
