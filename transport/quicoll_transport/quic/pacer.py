"""When packets may leave: a bucket of bytes that fills at the controller's rate. Sans-IO, integers, nothing is rounded.

Promises
    Never faster: over any stretch of time, what was allowed is at most the bucket, the arrears, and what the rate gives
    in it, however often and unevenly it is asked. (A pacer that lets anything through while its credit is above nothing
    sends up to a burst too much each time: 22 % on a wide-area link without loss.)
    Never slower: credit is kept in byte-nanoseconds, so no remainder is lost, and `due_ns` is the first nanosecond at
    which there is enough.
    Bursts stay whole: what is asked for is allowed when all of it fits, or a full burst if it is larger than that;
    never a few bytes now and a few later. Packets made as one run cost a tenth of the same packets made singly.

A burst is what the rate gives in one millisecond, two datagrams at least; the bucket holds two bursts, so that a timer
that is late by a millisecond costs nothing, and ten datagrams at least, the burst that RFC 9002 section 7.7 allows.
Probes do not wait for the pacer (section 6.2.4): `spend` may overdraw it, and what follows waits for the debt.
A rate that changes holds from then on; the time before it counts at the rate of before.

Arrears. Where processors are short a turn comes ten milliseconds after it was due, and with a bucket alone a fifth of
the rate is used; which makes the turns many and short, and processors shorter. So who asks after `due_ns` is given
what the rate would have sent since then, on top of the bucket: few long turns in place of many short ones. It leaves
at once, and somebody's queue has to take it, so the controller says how much at most (`Controller.arrears_ns`). Only
who was refused in the turn before can be late: after a pause there is the bucket and no more.
"""

from __future__ import annotations

__all__ = ["Pacer"]

_NS = 1_000_000_000
_BURST_NS = 1_000_000
_BURSTS = 2  # that the bucket holds
_LEAST_DATAGRAMS = 2  # of a burst
_BUCKET_DATAGRAMS = 10


class Pacer:
    """In each turn: `begin_turn`, ask `allowance` before sending, tell `spend` what was sent, come back at `due_ns`.

    The credit stays as it is while there is no rate.
    """

    __slots__ = ("_at_ns", "_credit", "_datagram", "_rate", "_waited_ns", "due_ns")

    def __init__(self, datagram: int, now_ns: int) -> None:
        """Begin with a full bucket.

        Args:
            datagram: Bytes of a full datagram.
            now_ns: The present time.
        """
        self._datagram = datagram
        self._rate: int | None = None
        self._credit = _BUCKET_DATAGRAMS * datagram * _NS  # in byte-nanoseconds
        self._at_ns = now_ns
        self.due_ns: int | None = None  # when what was refused last in this turn may leave; None: nothing was
        self._waited_ns: int | None = None  # `due_ns` of the turn before

    def begin_turn(self) -> None:
        """What was refused is asked for again, or not any more."""
        self._waited_ns, self.due_ns = self.due_ns, None

    def allowance(self, rate: int | None, wanted: int, now_ns: int, arrears_ns: int = 0) -> int:
        """Return how many bytes may leave now: 0, or `wanted`, or a burst and more if that is less.

        Args:
            rate: Bytes a second, at least 1; None: without pacing.
            wanted: What there is to send, and the window has room for; at least one datagram is assumed.
            now_ns: The present time.
            arrears_ns: For how long at most the rate counts on top of the bucket, since what was refused was due.
        """
        elapsed, self._at_ns = max(now_ns - self._at_ns, 0), max(now_ns, self._at_ns)
        before, self._rate = self._rate, rate
        self.due_ns = None
        if rate is None:
            return wanted
        burst = max(_LEAST_DATAGRAMS * self._datagram, rate * _BURST_NS // _NS)
        bucket = max(_BUCKET_DATAGRAMS * self._datagram, _BURSTS * burst) * _NS
        if self._waited_ns is not None and self._at_ns > self._waited_ns:
            bucket += min(self._at_ns - self._waited_ns, arrears_ns) * rate
        self._credit = min(self._credit + elapsed * (before or 0), bucket)
        needed = min(max(wanted, 1), burst) * _NS
        if self._credit >= needed:
            return min(wanted, self._credit // _NS)
        self.due_ns = self._at_ns - (self._credit - needed) // rate
        return 0

    def spend(self, nbytes: int) -> None:
        """Take off what was sent since the allowance, at the same time."""
        if self._rate is not None:
            self._credit -= nbytes * _NS

    def on_datagram_size(self, size: int) -> None:
        """Datagrams are of this size from now on."""
        self._datagram = size
