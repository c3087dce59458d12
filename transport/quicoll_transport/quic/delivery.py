"""How many bytes a second a path takes, by what is acknowledged while there is more to send than it takes.

A congestion window over the shortest round trip (RFC 9002 has no other rate) says what a path might take. Where the
processor is the limit, and nothing is lost, windows grow without end: on a loopback interface they stood for three
thousand times the rate there was. So here is measured instead, after Cheng, Cardwell, Hassas Yeganeh and Jacobson,
"Delivery Rate Estimation" (draft-cheng-iccrg-delivery-rate-estimation): bytes newly acknowledged, over the time this
took, and only while the sender was not the limit ("app-limited" there). What is simpler: nothing is kept for each
packet. A sample spans several acknowledgements and at least a round trip, so that acknowledgements which come in bursts
do not count as speed; and it begins with an acknowledgement, so that the first round trip, in which none can come, does
not count as slowness.

`rate` is the median of the last few samples. Slow start and a busy processor make some too small; a lost packet makes
one too small and the next too large, because what was acknowledged behind it counts when it is repaired.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

__all__ = ["DeliveryRate"]

_SAMPLES = 8
_LEAST_NS = 10_000_000
_LEAST_BYTES = 64 * 1024  # what one slice of a message may hold up


class DeliveryRate:
    """Fed by the sender, each time it has looked for more to send."""

    def __init__(self) -> None:
        self._samples: deque[int] = deque(maxlen=_SAMPLES)
        self._since: tuple[int, int] | None = None  # (acknowledged, now_ns) where the present sample begins
        self._clocked = False  # whether it begins with an acknowledgement

    @property
    def rate(self) -> int | None:
        """Bytes a second; None until there was enough to send for long enough."""
        return median_low(self._samples) if self._samples else None

    def note(self, acknowledged: int, now_ns: int, *, rtt_ns: int, more: bool) -> None:
        """acknowledged: bytes so far. rtt_ns: of a round trip, 0 if not known. more: whether something is left that
        could not be sent yet."""
        if self._since is not None:
            delivered, elapsed = acknowledged - self._since[0], now_ns - self._since[1]
            if self._clocked and delivered >= _LEAST_BYTES and elapsed >= max(_LEAST_NS, rtt_ns):
                self._samples.append(delivered * 1_000_000_000 // elapsed)
                self._since = (acknowledged, now_ns)
            elif not self._clocked and delivered:
                self._since, self._clocked = (acknowledged, now_ns), True
        if not more:
            self.interrupt()
        elif self._since is None:
            self._since = (acknowledged, now_ns)

    def interrupt(self) -> None:
        """Nothing is left to send, or the count of what was acknowledged has jumped."""
        self._since, self._clocked = None, False
