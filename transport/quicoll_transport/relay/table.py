"""What a relay passes on: who asks for whom, from where to where, and how much. Without IO; see the room's head.

A *leg* is one direction of a pair, and belongs to the node that sends by it. A pair is open while both have a leg.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.relay.wire import LABEL_BYTES
from quicoll_transport.security.limits import TokenBucket

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["RelayLimits", "RelayTable"]

_IP_UDP_BYTES = 28
_MOST_RATE = 1_000_000_000
_BURST_PART = 10  # of a second's bytes, which may come at once
_LEAST_BURST = 1 << 17


@dataclass(frozen=True, slots=True)
class RelayLimits:
    """Bounds of a relay. Bytes are counted with their IP and UDP headers.

    Attributes:
        leg_rate: Bytes a second from one node to another.
        total_rate: Bytes a second of all together.
        legs: Nodes that one node may ask for.
    Raises:
        ConfigurationError: A rate is not 1 to 10^9, or nobody may be asked for.
    """

    leg_rate: int = 50_000_000
    total_rate: int = 100_000_000
    legs: int = 1024

    def __post_init__(self) -> None:
        for name in ("leg_rate", "total_rate"):
            if not 1 <= getattr(self, name) <= _MOST_RATE:
                raise ConfigurationError(f"{name} must be 1 to {_MOST_RATE} bytes a second, is {getattr(self, name)}")
        if self.legs < 1:
            raise ConfigurationError(f"legs must be positive, is {self.legs}")


@dataclass(slots=True)
class _Leg:
    source: str
    target: str
    label: bytes
    bucket: TokenBucket
    back: _Leg | None = field(default=None, repr=False)  # the other direction, once that is asked for too


class RelayTable:
    """See the module's head.

    Attributes:
        passed: Datagrams that were passed on.
        refused: Datagrams that were not: an unknown label, the wrong source, nobody at the other end.
        exceeded: Datagrams that were lost because there were too many.
    """

    def __init__(
        self, limits: RelayLimits, *, place_of: Callable[[str], Address | None], draw: Callable[[int], bytes]
    ) -> None:
        """Begin with nobody.

        Args:
            limits: Bounds.
            place_of: Where a node has shown itself to be; None: nowhere at present.
            draw: Returns so many bytes that nobody can guess.
        """
        self._limits = limits
        self._place_of = place_of
        self._draw = draw
        self._by_label: dict[bytes, _Leg] = {}
        self._by_pair: dict[str, dict[str, _Leg]] = {}  # by source and target
        self._total = _bucket(limits.total_rate)
        self.passed = self.refused = self.exceeded = 0

    def __len__(self) -> int:
        """Return the number of legs."""
        return len(self._by_label)

    def ask(self, source: str, target: str) -> bytes | None:
        """Return the label under which a node sends to another one; None: it asks for too many, or for itself.

        Args:
            source: The node that asks.
            target: The other one; there may be no such node.
        """
        legs = self._by_pair.get(source, {})
        leg = legs.get(target)
        if leg is not None:
            return leg.label
        if source == target or len(legs) >= self._limits.legs:
            return None
        label = self._draw(LABEL_BYTES)
        while label in self._by_label:
            label = self._draw(LABEL_BYTES)
        leg = self._by_label[label] = _Leg(source, target, label, _bucket(self._limits.leg_rate))
        self._by_pair.setdefault(source, {})[target] = leg
        leg.back = self._by_pair.get(target, {}).get(source)
        if leg.back is not None:
            leg.back.back = leg
        return label

    def gone(self, node: str) -> None:
        """Forget a node: its link has ended."""
        for leg in self._by_pair.pop(node, {}).values():
            del self._by_label[leg.label]
            if leg.back is not None:
                leg.back.back = None

    def forward(self, label: bytes, source: Address, size: int, now_ns: int) -> tuple[bytes, Address] | None:
        """Return under which label and where to a datagram goes on; None: it is lost.

        Args:
            label: As it came.
            source: Where it came from.
            size: Its bytes.
            now_ns: The time.
        """
        leg = self._by_label.get(label)
        if leg is None or leg.back is None or not _same(self._place_of(leg.source), source):
            self.refused += 1
            return None
        target = self._place_of(leg.target)
        if target is None:
            self.refused += 1
            return None
        size += _IP_UDP_BYTES
        if not leg.bucket.take(now_ns, size) or not self._total.take(now_ns, size):
            self.exceeded += 1
            return None
        self.passed += 1
        return leg.back.label, target


def _bucket(rate: int) -> TokenBucket:
    return TokenBucket(rate, max(_LEAST_BURST, rate // _BURST_PART))


def _same(place: Address | None, source: Address) -> bool:
    return place is not None and place[:2] == source[:2]
