"""What a path's acknowledgements tell a controller, where a test says only what it is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll_transport.quic.controller import AckSample

if TYPE_CHECKING:
    from quicoll_transport.quic.arrival_line import FairRate

__all__ = ["acknowledged"]


def acknowledged(
    now_ns: int,
    acked: int,
    *,
    rtt_ns: int,
    in_flight: int = 0,
    wait_ns: int = 0,
    delivered: int = 0,
    prior_delivered: int = 0,
    rate: int | None = None,
    app_limited: bool = False,
    min_ns: int | None = None,
    fair_rate: FairRate | None = None,
) -> AckSample:
    """Return the sample of an acknowledgement whose newest packet left one round trip ago.

    Args:
        now_ns: The time.
        acked: Bytes that it acknowledges, all of them sent after the last recovery period began.
        rtt_ns: The round trip; the smoothed one is the same.
        in_flight: Bytes in flight after it.
        wait_ns: For how long it, or its packet, has waited at a host.
        delivered: Bytes acknowledged so far.
        prior_delivered: The same when the packet was sent.
        rate: Bytes a second; None: no sample could be taken.
        app_limited: Whether there was too little to send then.
        min_ns: The shortest round trip; None: this one.
        fair_rate: Of the receiver; None: nothing.
    """
    return AckSample(
        now_ns=now_ns,
        path_ns=now_ns - wait_ns,
        acked=acked,
        fresh=acked,
        prior_in_flight=in_flight + acked,
        in_flight=in_flight,
        delivered=delivered,
        prior_delivered=prior_delivered,
        rate=rate,
        app_limited=app_limited,
        rtt_ns=rtt_ns,
        smoothed_ns=rtt_ns,
        min_ns=rtt_ns if min_ns is None else min_ns,
        sent_ns=now_ns - rtt_ns,
        fair_rate=fair_rate,
    )
