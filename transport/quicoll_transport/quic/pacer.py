"""When packets may leave: a bucket of bytes that fills at the controller's rate. Sans-IO, integers, nothing is rounded.

Promises
    Never faster: over any stretch of time, what was allowed is at most the bucket and what the rate gives in it,
    however often and unevenly it is asked. (A pacer that lets anything through while its credit is above nothing sends
    up to a burst too much each time: 22 % on a wide-area link without loss.)
    Never slower: credit is kept in byte-nanoseconds, so no remainder is lost, and `due_ns` is the first nanosecond at
    which there is enough.
    Bursts stay whole: what is asked for is allowed when all of it fits, or a full burst if it is larger than that;
    never a few bytes now and a few later. Packets made as one run cost a tenth of the same packets made singly.

A burst is what the rate gives in one millisecond, two datagrams at least; the bucket holds two bursts, so that a timer
that is late by a millisecond costs nothing, and ten datagrams at least, the burst that RFC 9002 section 7.7 allows.
Probes do not wait for the pacer (section 6.2.4): `spend` may overdraw it, and what follows waits for the debt.
A rate that changes holds from then on; the time before it counts at the rate of before.
"""

from __future__ import annotations

__all__ = ["Pacer"]

_NS = 1_000_000_000
_BURST_NS = 1_000_000
_BURSTS = 2  # that the bucket holds
_LEAST_DATAGRAMS = 2  # of a burst
_BUCKET_DATAGRAMS = 10


class Pacer:
    """Ask `allowance` before sending, tell `spend` what was sent, come back at `due_ns`.

    The credit stays as it is while there is no rate.
    """

    __slots__ = ("_at_ns", "_credit", "_datagram", "_rate", "due_ns")

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
        self.due_ns: int | None = None  # when what was refused last may leave; None: nothing was

    def allowance(self, rate: int | None, wanted: int, now_ns: int) -> int:
        """Return how many bytes may leave now: 0, or `wanted`, or a burst and more if that is less.

        Args:
            rate: Bytes a second, at least 1; None: without pacing.
            wanted: What there is to send, and the window has room for; at least one datagram is assumed.
            now_ns: The present time.
        """
        elapsed, self._at_ns = max(now_ns - self._at_ns, 0), max(now_ns, self._at_ns)
        before, self._rate = self._rate, rate
        self.due_ns = None
        if rate is None:
            return wanted
        burst = max(_LEAST_DATAGRAMS * self._datagram, rate * _BURST_NS // _NS)
        bucket = max(_BUCKET_DATAGRAMS * self._datagram, _BURSTS * burst) * _NS
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
