"""Incarnations: what tells two processes of one node apart, and which of them is the later one. No clock is asked.

    bits 62..32   generation: 1 for every process that starts; above the highest one known when it starts over
    bits 31..0    chance, drawn once by each process, so that two processes of one generation differ

The order comes from the coordinator. A process that is not the latest of its node, as far as the coordinator knows
(its journal, its roster, its living links), hears the highest incarnation there is. If it was never admitted it starts
over above that one; if it was, another process of its node was admitted after it, and it ends. So the process that was
admitted last stays, whatever the hosts' clocks say, and an earlier one never climbs over it. Two that start at the same
time and were both not admitted may pass each other, `MOST_STARTS` times at most.
"""

from __future__ import annotations

from typing import Final

from quicoll.errors import LocalError
from quicoll.membership.view import MAX_INT

__all__ = ["CHANCE_BYTES", "MOST_STARTS", "above", "first"]

CHANCE_BYTES: Final = 4
MOST_STARTS: Final = 8
"""How often a process that was never admitted starts over."""
_CHANCE_BITS = 8 * CHANCE_BYTES


def first(chance: bytes) -> int:
    """Return the incarnation of a process that starts. chance: `CHANCE_BYTES` random bytes."""
    if len(chance) != CHANCE_BYTES:
        raise LocalError(f"an incarnation takes {CHANCE_BYTES} random bytes, not {len(chance)}")
    return 1 << _CHANCE_BITS | int.from_bytes(chance, "big")


def above(latest: int, own: int) -> int:
    """Return the incarnation above `latest` of the process that began as `own`.

    Args:
        latest: The highest one known of the node.
        own: Any that the process has had; its chance stays.
    Raises:
        LocalError: There is none above.
    """
    generation = (latest >> _CHANCE_BITS) + 1
    incarnation = generation << _CHANCE_BITS | own & (1 << _CHANCE_BITS) - 1
    if incarnation > MAX_INT:
        raise LocalError(f"there is no incarnation above {latest}")
    return incarnation
