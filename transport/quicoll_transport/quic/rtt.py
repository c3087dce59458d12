"""How long a round trip takes: the estimates of RFC 9002 section 5, in integer nanoseconds.

Before the first sample `smoothed_ns` is what the handshake saw, or a guess; `min_ns` is not known then. A sample is at
least one microsecond, so that a path without delay, in a simulation, divides nothing by zero.
"""

from __future__ import annotations

__all__ = ["GRANULARITY_NS", "RoundTrips"]

GRANULARITY_NS = 1_000_000  # kGranularity of RFC 9002 section 6.1.2
_LEAST_NS = 1_000


class RoundTrips:
    """Round trips of one path.

    probe_timeout_ns: how long an acknowledgement may take, without backing off (section 6.2.1).
    """

    __slots__ = ("_max_ack_delay_ns", "latest_ns", "min_ns", "probe_timeout_ns", "smoothed_ns", "variance_ns")

    def __init__(self, *, initial_ns: int, max_ack_delay_ns: int) -> None:
        """Begin a path.

        Args:
            initial_ns: What a round trip is taken to be until one was measured.
            max_ack_delay_ns: By how much the peer says it delays acknowledgements at most.
        """
        self._max_ack_delay_ns = max_ack_delay_ns
        self.smoothed_ns = max(initial_ns, _LEAST_NS)
        self.variance_ns = self.smoothed_ns // 2  # section 5.3
        self.latest_ns = self.smoothed_ns
        self.min_ns: int | None = None
        self.probe_timeout_ns = self._probe_timeout()

    def on_sample(self, elapsed_ns: int, ack_delay_ns: int) -> None:
        """Take a measurement.

        Args:
            elapsed_ns: From sending a packet to its acknowledgement.
            ack_delay_ns: How long the peer says that it waited with it.
        """
        latest = max(elapsed_ns, _LEAST_NS)
        self.latest_ns = latest
        if self.min_ns is None:
            self.min_ns = self.smoothed_ns = latest
            self.variance_ns = latest // 2
        else:
            self.min_ns = min(self.min_ns, latest)
            delay = min(ack_delay_ns, self._max_ack_delay_ns)
            adjusted = latest - delay if latest >= self.min_ns + delay else latest
            self.variance_ns = (3 * self.variance_ns + abs(self.smoothed_ns - adjusted)) // 4
            self.smoothed_ns = (7 * self.smoothed_ns + adjusted) // 8
        self.probe_timeout_ns = self._probe_timeout()

    def on_persistent_congestion(self) -> None:
        """Take the newest sample for the shortest: the path may be another one by now (section 5.2)."""
        self.min_ns = self.latest_ns

    def _probe_timeout(self) -> int:
        return self.smoothed_ns + max(4 * self.variance_ns, GRANULARITY_NS) + self._max_ack_delay_ns
