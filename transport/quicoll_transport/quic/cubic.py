"""CUBIC (RFC 9438), in bytes, nanoseconds and integers.

After a reduction the window follows a cube of time around `_most`, the window at which packets were lost last: fast
back to near it, slowly past it, then ever faster. Where NewReno would have grown a larger window by now, that is taken
(section 4.3): `_friendly` is what NewReno would have.

State: `_epoch_ns` is when the present period of congestion avoidance began, None in slow start and before its first
acknowledgement; with it go `_most`, `_turn_ns` (K: how long it takes to come back to `_most`) and `_friendly`. Time in
which the application left the window unused is none of it (section 5.8): the epoch moves along.
Integers because a cube root from the C library differs from machine to machine, and with it a simulated run.
"""

from __future__ import annotations

from dataclasses import dataclass

from quicoll_transport.quic.controller import AckSample, LossBased, LossSample, minimum_window

__all__ = ["Cubic"]

_NS_CUBED = 10**27
_UNIT = 1000  # `_friendly` is kept in thousandths of a byte, because it grows by less than one


@dataclass(frozen=True, slots=True)
class _Epoch:
    """What a reduction overwrites."""

    window: int
    threshold: int | None
    epoch_ns: int | None
    most: int
    turn_ns: int
    friendly: int
    prior: int


class Cubic(LossBased):
    """A Controller."""

    def __init__(self, datagram: int) -> None:
        """Begin a path that carries datagrams of `datagram` bytes."""
        super().__init__(datagram)
        self._epoch_ns: int | None = None
        self._most = self._turn_ns = self._friendly = self._prior = 0
        self._acked_ns = 0
        self._before: _Epoch | None = None

    def on_acked(self, sample: AckSample) -> None:
        since, self._acked_ns = self._acked_ns, sample.now_ns
        if not sample.fills(self._window, slow_start=self._slow_start):
            if self._epoch_ns is not None:
                self._epoch_ns += sample.now_ns - max(since, self._epoch_ns)
        elif sample.fresh and self._slow_start:
            self._window += sample.fresh
        elif sample.fresh:
            self._avoid(sample)

    def _avoid(self, sample: AckSample) -> None:
        """Grow in congestion avoidance (RFC 9438 sections 4.2 to 4.5)."""
        epoch_ns = self._epoch_ns
        if epoch_ns is None:  # slow start ended at its threshold rather than by a loss: section 4.8
            epoch_ns = self._begin(sample.now_ns, most=self._window)
        elapsed = sample.now_ns - epoch_ns
        # alpha of section 4.3: 3 (1 - 0.7) / (1 + 0.7) = 9/17, and 1 once the window of before is reached.
        share = (9, 17) if self._friendly < self._prior * _UNIT else (1, 1)
        self._friendly += share[0] * sample.fresh * self._datagram * _UNIT // (share[1] * self._window)
        friendly = self._friendly // _UNIT
        if self._cube(elapsed) < friendly:
            self._window = max(self._window, friendly)
            return
        target = min(max(self._cube(elapsed + sample.smoothed_ns), self._window), self._window * 3 // 2)
        self._credit += (target - self._window) * sample.fresh
        growth = self._credit // self._window
        self._credit -= growth * self._window
        self._window += growth

    def _begin(self, now_ns: int, *, most: int) -> int:
        self._epoch_ns = now_ns
        self._most = most
        self._turn_ns = _cube_root((most - self._window) * 10 * _NS_CUBED // (4 * self._datagram))
        self._friendly = self._window * _UNIT
        self._credit = 0
        return now_ns

    def _cube(self, elapsed_ns: int) -> int:
        """W_cubic of section 4.2: C (t - K)^3 + W_max, with C = 0.4 datagrams per second cubed."""
        return self._most + 4 * self._datagram * (elapsed_ns - self._turn_ns) ** 3 // (10 * _NS_CUBED)

    def on_lost(self, sample: LossSample) -> None:
        if not sample.begins_period:
            return
        self._before = _Epoch(
            self._window, self._threshold, self._epoch_ns, self._most, self._turn_ns, self._friendly, self._prior
        )
        window = self._window
        most = window * 17 // 20 if window < self._most else window  # fast convergence, section 4.7
        self._prior = window
        self._window = self._threshold = max(window * 7 // 10, minimum_window(self._datagram))
        self._begin(sample.now_ns, most=max(most, self._window))

    def on_spurious(self, now_ns: int) -> None:
        before, self._before = self._before, None
        if before is not None:  # section 4.9.2
            self._window = max(self._window, before.window)
            self._threshold, self._epoch_ns = before.threshold, before.epoch_ns
            self._most, self._turn_ns = before.most, before.turn_ns
            self._friendly, self._prior = before.friendly, before.prior

    def on_persistent_congestion(self, now_ns: int) -> None:
        self._window = minimum_window(self._datagram)
        self._epoch_ns = self._before = None
        self._most = self._credit = 0


def _cube_root(value: int) -> int:
    """Return the largest integer whose cube is not above `value`."""
    if value <= 0:
        return 0
    root = 1 << -(-value.bit_length() // 3)
    while True:  # Newton's method, from above
        better = (2 * root + value // (root * root)) // 3
        if better >= root:
            return root
        root = better
