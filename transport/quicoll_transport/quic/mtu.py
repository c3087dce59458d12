"""How large datagrams may be: path MTU discovery by probes (RFC 8899, RFC 9000 section 14.3). Sans-IO.

`size` is what datagrams have: at first `base`, later the largest that a probe has shown to pass. A probe is a packet
with PING and PADDING, alone in its datagram; the caller asks `probe_size` whenever it sends something anyway, and tells
what became of the probe. Nothing but probes is ever larger than `size`, so a path without jumbo frames costs some
probes and no data. No router may cut datagrams into fragments, or all sizes pass: that is the socket's part.

States (RFC 8899 section 5.2)
    searching   between `_good`, which passes, and `_bad`, which does not: first `most` itself, which is right on a
                loopback interface or a link with jumbo frames; then the common sizes; then halves, until less than
                `_CLOSE` bytes are at stake. A size is bad when three probes of it were lost, for one may be lost to
                congestion
    complete    for `_RAISE_NS`; then what was found bad is tried again, as routes change

A black hole (section 4.3) is a path that no longer carries what it did. It shows as losses of datagrams above the least
size at three different times, with none of that size, sent later than the lost ones, arriving in between: back to
`base`, or to the least size where that was no more than `base`, and search anew. That the losses are noticed at all
needs small datagrams that pass: what repeats after a probe timeout goes in datagrams of LEAST_DATAGRAM_BYTES.

A router's or the kernel's word (`limit`) is taken, down to the least size, which QUIC needs in any case: a forged one
makes datagrams small and no more (RFC 9000 section 14.2.1).
"""

from __future__ import annotations

__all__ = ["LEAST_DATAGRAM_BYTES", "PathMtu"]

LEAST_DATAGRAM_BYTES = 1200  # of UDP payload: every path of QUIC carries it (RFC 9000 section 14)
_COMMON = (8952, 8900, 4352, 1472, 1452, 1392)
_CLOSE = 24
_TRIES = 3  # MAX_PROBES of RFC 8899 section 5.1.2
_HOLES = 3
_RAISE_NS = 600_000_000_000  # PMTU_RAISE_TIMER of section 5.1.1


class PathMtu:
    """The size of datagrams on one path."""

    __slots__ = (
        "_bad",
        "_base",
        "_good",
        "_holes",
        "_lost_ns",
        "_most",
        "_noticed_ns",
        "_passed_ns",
        "_probe",
        "_raise_ns",
        "_tries",
        "size",
    )

    def __init__(self, *, base: int, most: int) -> None:
        """Begin a path.

        Args:
            base: Bytes of UDP payload to begin with.
            most: Bytes to search up to; `base` itself for no search.
        """
        self._base, self._most = max(min(base, most), LEAST_DATAGRAM_BYTES), max(most, LEAST_DATAGRAM_BYTES)
        self.size = self._base
        self._raise_ns: int | None = None  # when to search again
        self._begin()

    def _begin(self) -> None:
        """Search from the present size on."""
        self._good, self._bad = self.size, self._most + 1
        self._tries = self._probe = 0  # probes lost of the size that is tried, and the size of the one under way
        self._holes, self._lost_ns, self._noticed_ns, self._passed_ns = 0, -1, -1, -1
        self._raise_ns = None

    @property
    def is_searching(self) -> bool:
        """Whether a probe is under way or to be sent."""
        return self._candidate() is not None

    def probe_size(self, now_ns: int) -> int | None:
        """Return the size of the probe that is to be sent now, or None."""
        if self._raise_ns is not None and now_ns >= self._raise_ns:
            self._begin()
        return None if self._probe else self._candidate()

    def on_probe_sent(self, size: int) -> None:
        """The probe has left; there is no other until its fate is known."""
        self._probe = size

    def on_probe_acked(self, size: int, now_ns: int) -> None:
        """A probe has arrived, be it after it was taken for lost."""
        if size == self._probe:
            self._probe = 0
        if self.size < size <= self._most:
            self.size = self._good = size
            self._tries = 0
            self._bad = max(self._bad, size + 1)
        self._look_up(now_ns)

    def on_probe_lost(self, size: int, now_ns: int) -> None:
        """A probe was declared lost."""
        if size != self._probe:
            return
        self._probe = 0
        self._tries += 1
        if self._tries >= _TRIES:
            self._bad, self._tries = min(self._bad, size), 0
        self._look_up(now_ns)

    def on_acked(self, size: int, sent_ns: int) -> None:
        """Datagrams of at most `size` bytes, and one of that size, have arrived, be they probes or not."""
        if size > LEAST_DATAGRAM_BYTES:
            self._passed_ns = max(self._passed_ns, sent_ns)
            if self._passed_ns >= self._lost_ns:
                self._holes = 0

    def on_lost(self, size: int, sent_ns: int, now_ns: int) -> bool:
        """Datagrams of `size` bytes were declared lost, no probes; return whether `size` has changed.

        Args:
            size: Of the largest datagram.
            sent_ns: When they were sent.
            now_ns: The present time: losses noticed together count once.
        """
        if not LEAST_DATAGRAM_BYTES < size <= self.size or sent_ns <= self._passed_ns:
            return False
        self._lost_ns = max(self._lost_ns, sent_ns)
        if now_ns > self._noticed_ns:
            self._noticed_ns = now_ns
            self._holes += 1
        if self._holes < _HOLES:
            return False
        self.size = self._base if self.size > self._base else LEAST_DATAGRAM_BYTES
        self._begin()
        return True

    def limit(self, most: int) -> bool:
        """Take the word of a router or of the kernel that nothing above `most` bytes passes; whether `size` changed."""
        self._most = max(min(self._most, most), LEAST_DATAGRAM_BYTES)
        self._bad = min(self._bad, self._most + 1)
        if self.size <= self._most:
            return False
        self.size = min(self._base, self._most)
        self._begin()
        return True

    def _look_up(self, now_ns: int) -> None:
        if self._candidate() is None:
            self._raise_ns = now_ns + _RAISE_NS

    def _candidate(self) -> int | None:
        """The next size to try."""
        if self._bad > self._most:
            return self._most if self._most > self._good else None
        if self._bad - self._good <= _CLOSE:
            return None
        for size in _COMMON:
            if self._good < size < self._bad:
                return size
        return (self._good + self._bad) // 2
