"""NewReno: RFC 9002 section 7 and appendix B, in bytes.

Below the threshold the window grows by what is acknowledged; above it, by one datagram for each window that is
acknowledged. Invariants: the window is never below two datagrams, and never
grows by packets that were sent before the present recovery period, or while it is not in use.
"""

from __future__ import annotations

from quicoll_transport.quic.controller import AckSample, LossBased, LossSample, minimum_window

__all__ = ["NewReno"]


class NewReno(LossBased):
    """A Controller."""

    def __init__(self, datagram: int) -> None:
        """Begin a path that carries datagrams of `datagram` bytes."""
        super().__init__(datagram)
        self._before: tuple[int, int | None] | None = None  # window and threshold of before the last reduction

    def on_acked(self, sample: AckSample) -> None:
        if not sample.fresh or not sample.fills(self._window, slow_start=self._slow_start):
            return
        if self._slow_start:
            self._window += sample.fresh
            return
        self._credit += sample.fresh * self._datagram
        growth = self._credit // self._window
        self._credit -= growth * self._window
        self._window += growth

    def on_lost(self, sample: LossSample) -> None:
        if sample.begins_period:
            self._before = (self._window, self._threshold)
            self._window = self._threshold = max(self._window // 2, minimum_window(self._datagram))
            self._credit = 0

    def on_spurious(self, now_ns: int) -> None:
        if self._before is not None:
            window, self._threshold = self._before
            self._window = max(self._window, window)
            self._before = None

    def on_persistent_congestion(self, now_ns: int) -> None:
        self._window = minimum_window(self._datagram)
        self._credit, self._before = 0, None
