"""Connections that have ended, for as long as their peers may not know it (RFC 9000 section 10.2).

What a peer hears last may be lost, and then it sends on. So of each connection its ids and its last words are kept for
the time that its carrier names (three probe timeouts), and the words are said again to what comes for it. Where the
peer has ended it there are no words, and nothing is said (10.2.2): it is only known that nobody is to be told that we
know nothing of it.

A repetition costs no key and no state of the carrier, and what draws it is not authenticated (10.2.1). So it goes to
the address that the carrier had and to no other, for the first datagram, the second, the fourth and so on, and never
more bytes than three times those that have come.

Bounds: `MOST` connections and `MOST_BYTES` of words, the oldest goes first; what goes early is answered like any
unknown connection. A new connection of the same peer has ids of its own, and nothing here concerns it.

Nothing here waits for time: what is over is dropped when the endpoint has something to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll_transport.carrier import LastWords
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

__all__ = ["ClosedConnections"]

MOST = 512
MOST_BYTES = 512 * 1024
_FACTOR = 3  # bytes for each that has come


@dataclass(slots=True, eq=False)
class _Ended:
    """One of them. size: bytes of its words. datagrams, received: that have come since it ended. sent: bytes."""

    cids: tuple[bytes, ...]
    words: tuple[tuple[bytes, Address], ...]
    until_ns: int
    size: int
    datagrams: int = 0
    received: int = 0
    sent: int = 0


class ClosedConnections:
    """See the module's head. nbytes: of all words."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._by_cid: dict[bytes, _Ended] = {}
        self._all: dict[_Ended, None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._all)

    def add(self, cids: Sequence[bytes], last: LastWords, now_ns: int) -> None:
        """Keep what is left of a connection.

        Args:
            cids: That led to it.
            last: From its carrier.
            now_ns: The time.
        """
        size = sum(len(data) for data, _ in last.words)
        ended = _Ended(tuple(cids), last.words, last.until_ns, size)
        self._all[ended] = None
        self.nbytes += size
        for cid in ended.cids:
            self._by_cid[cid] = ended
        self.expire(now_ns)
        while len(self._all) > MOST or self.nbytes > MOST_BYTES:
            self._drop(next(iter(self._all)))

    def answer(self, cid: bytes, run: DatagramRun, now_ns: int) -> Sequence[tuple[bytes, Address]] | None:
        """Return what to say to datagrams for an id, maybe nothing; None: it is not the id of one of these."""
        ended = self._by_cid.get(cid)
        if ended is None:
            return None
        if ended.until_ns <= now_ns:
            self._drop(ended)
            return None
        before = ended.datagrams
        ended.datagrams += len(run)
        ended.received += len(run.memory)
        is_turn = before.bit_length() < ended.datagrams.bit_length()
        if not is_turn or ended.sent + ended.size > _FACTOR * ended.received:
            return ()
        ended.sent += ended.size
        return ended.words

    def expire(self, now_ns: int) -> None:
        """Drop those whose time is over, as far as none that is older has more."""
        while self._all and (oldest := next(iter(self._all))).until_ns <= now_ns:
            self._drop(oldest)

    def _drop(self, ended: _Ended) -> None:
        del self._all[ended]
        self.nbytes -= ended.size
        for cid in ended.cids:
            if self._by_cid.get(cid) is ended:
                del self._by_cid[cid]
