"""What a congestion controller is: what it is told, and what it says. Sans-IO, integers only.

A controller sees no packets. `recovery` tells it, once for each acknowledgement, what was lost and then what arrived;
so its decisions do not depend on how packets were put together into runs. Two numbers come back: `window`, how many
bytes may be in flight, and `rate`, how fast they may leave. `arrears_ns` says what of the rate a sender that came late
may make up for.

Recovery periods (RFC 9002 section 7.3.2) are kept by recovery, for all controllers alike: one begins with a loss of a
packet that was sent after the last began. `LossSample.begins_period` says so, and `AckSample.fresh` counts only
packets that were sent after it began. When everything that was lost in a period turns out to have arrived late, the
period was a mistake: `on_spurious`.

Samples of the delivery rate follow draft-cheng-iccrg-delivery-rate-estimation: each run remembers how much had been
delivered when it was sent, and the newest run of an acknowledgement tells how much was delivered since, over the longer
of the times that it took to send and to acknowledge it. A sample that is `app_limited` says what the application asked
for rather than what the path takes.

Hosts that come late. A program that computes reads what came to its host when it has time to, all at once. To take that
for the path's doing is to see a queue, and then a rate above the path's; a sender on two busy processors ended its
start at a third of the rate, gave way to single losses, and in the next round filled the queue. So round trips and
times of arrival here are the path's: without what the peer says that its acknowledgement has waited, however long, and
without what that has waited here until it was read (`net.arrival`). A round trip is no shorter for it than the
shortest that was seen with all waits, so a peer that names waits which were none wins nothing. Nor is it the path's
what an acknowledgement meets on its way back, where the peer stamps it (`peer_clock`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from quicoll_transport.quic.arrival_line import FairRate

__all__ = ["AckSample", "Controller", "LossBased", "LossSample", "minimum_window", "paced_rate", "start_window"]

_NS = 1_000_000_000


class AckSample:
    """What one acknowledgement brought.

    now_ns: the time. path_ns: the same without the time for which it, or the packet that it is for, has waited at
        either host or, where the peer stamps it, on its way back; so the differences of these are the path's. Never
        below that of the one before.
    acked: bytes newly acknowledged. fresh: those of them that were sent after the last recovery period began.
    prior_in_flight, in_flight: bytes in flight before it, and now, with what it showed to be lost taken away.
    delivered: bytes acknowledged so far. prior_delivered: the same when the newest of these packets was sent: a round
        is over when it reaches the `delivered` at which the round began.
    rate: bytes a second; None where no sample could be taken.
    app_limited: there was too little to send when the newest of these packets was sent.
    rtt_ns: this round trip, without the peer's delay; None: it gave no sample. smoothed_ns, min_ns: of all.
    sent_ns: when the newest of these packets was sent.
    fair_rate: what the receiver has allotted with it; None: nothing.
    """

    __slots__ = (
        "acked",
        "app_limited",
        "delivered",
        "fair_rate",
        "fresh",
        "in_flight",
        "min_ns",
        "now_ns",
        "path_ns",
        "prior_delivered",
        "prior_in_flight",
        "rate",
        "rtt_ns",
        "sent_ns",
        "smoothed_ns",
    )

    def __init__(
        self,
        now_ns: int,
        path_ns: int,
        acked: int,
        fresh: int,
        prior_in_flight: int,
        in_flight: int,
        delivered: int,
        prior_delivered: int,
        rate: int | None,
        app_limited: bool,
        rtt_ns: int | None,
        smoothed_ns: int,
        min_ns: int,
        sent_ns: int,
        fair_rate: FairRate | None = None,
    ) -> None:
        self.now_ns = now_ns
        self.path_ns = path_ns
        self.acked = acked
        self.fresh = fresh
        self.prior_in_flight = prior_in_flight
        self.in_flight = in_flight
        self.delivered = delivered
        self.prior_delivered = prior_delivered
        self.rate = rate
        self.app_limited = app_limited
        self.rtt_ns = rtt_ns
        self.smoothed_ns = smoothed_ns
        self.min_ns = min_ns
        self.sent_ns = sent_ns
        self.fair_rate = fair_rate

    def fills(self, window: int, *, slow_start: bool) -> bool:
        """Return whether so large a window was in use, which it has to be to grow (RFC 9002 section 7.8).

        In slow start half of it is enough: what was sent in the last round trip is half of what may be sent now.
        """
        if not self.app_limited:
            return True
        return self.prior_in_flight * (2 if slow_start else 1) >= window * (4 if slow_start else 3) // 4


class LossSample(NamedTuple):
    """What was found to be lost at one time.

    lost: bytes. prior_in_flight: bytes in flight before.
    sent_ns: when the newest of the packets was sent.
    begins_period: a recovery period begins here, see the module's head.
    """

    now_ns: int
    lost: int
    prior_in_flight: int
    sent_ns: int
    begins_period: bool


class Controller(Protocol):
    """One path's congestion control."""

    @property
    def window(self) -> int:
        """Bytes that may be in flight."""

    def rate(self, smoothed_ns: int) -> int | None:
        """Return the bytes a second at which to send, given a round trip; None: as fast as the window lets."""

    @property
    def arrears_ns(self) -> int:
        """Of how long a sender that came late may send at once what it missed, in nanoseconds of its rate."""

    def on_sent(self, nbytes: int, in_flight: int, now_ns: int) -> None:
        """Packets have left; `in_flight` is what was in flight before them."""

    def on_acked(self, sample: AckSample) -> None:
        """Packets have arrived; losses that the same acknowledgement showed were told before."""

    def on_lost(self, sample: LossSample) -> None:
        """Packets were lost, not counting probes of the path's MTU."""

    def on_spurious(self, now_ns: int) -> None:
        """All that was lost in the present recovery period has arrived after all, late."""

    def on_persistent_congestion(self, now_ns: int) -> None:
        """Nothing came through for several probe timeouts (RFC 9002 section 7.6)."""

    def on_datagram_size(self, size: int) -> None:
        """Datagrams are of this size from now on."""


class LossBased:
    """What controllers share that take losses for congestion: a window, and slow start until the first loss.

    State: `_threshold` is None until then, and slow start is below it; `_credit` is what was acknowledged towards the
    window's next growth, in bytes times bytes.
    """

    def __init__(self, datagram: int) -> None:
        """Begin a path that carries datagrams of `datagram` bytes."""
        self._datagram = datagram
        self._window = start_window(datagram)
        self._threshold: int | None = None
        self._credit = 0

    @property
    def window(self) -> int:
        """See Controller."""
        return self._window

    @property
    def _slow_start(self) -> bool:
        return self._threshold is None or self._window < self._threshold

    def rate(self, smoothed_ns: int) -> int | None:
        """See Controller."""
        return paced_rate(self._window, smoothed_ns, slow_start=self._slow_start)

    @property
    def arrears_ns(self) -> int:
        """See Controller; of queues it knows only that they overflow."""
        return 0

    def on_sent(self, nbytes: int, in_flight: int, now_ns: int) -> None:
        """See Controller; the window says all."""

    def on_datagram_size(self, size: int) -> None:
        """See Controller."""
        self._datagram = size
        self._window = max(self._window, minimum_window(size))


def start_window(datagram: int) -> int:
    """Return the window to begin with (RFC 9002 section 7.2)."""
    return min(10 * datagram, max(14_720, 2 * datagram))


def minimum_window(datagram: int) -> int:
    """Return what no congestion lowers a window below (the same section)."""
    return 2 * datagram


def paced_rate(window: int, smoothed_ns: int, *, slow_start: bool) -> int:
    """Return the rate that sends a window in less than a round trip, so that it gets used (section 7.7).

    A quarter more than the window asks for; twice as much in slow start, where the window doubles in a round trip.
    """
    return max(window * (8 if slow_start else 5) // 4 * _NS // max(smoothed_ns, 1), 1)
