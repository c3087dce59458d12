"""Where the peer is: the path in use, paths that are being validated, migration and NAT rebinding (RFC 9000 section 9).

A path is the peer's address. A client knows its server by one address and takes packets from no other (section 9). To a
server a client's packets may come from anywhere:

    known      an authentic packet came from there (`heard`); nothing goes there but answers to challenges
    in use     the newest packet that is more than a probe came from there (`move`), so everything goes there (9.3)
    validated  the peer has answered a challenge that was sent there (8.2); else it gets 3 times what came from there
    passes     it has answered one of 1200 bytes, the least that a path of QUIC carries

                  heard            move             PATH_RESPONSE                PATH_RESPONSE to one of 1200 bytes
    (nothing) ---------> known ---------> in use ----------------> validated ----------------------------> passes
                                           |  3 PTO without one: the path before that passes is in use again (9.3.2)

Challenges fill 1200 bytes where three times what came allows for it (8.2.1). Where it does not, the answer shows that
the peer is there and not that the path carries what QUIC needs: it is challenged again at once, with 1200 bytes, and
until that is answered it is no path to return to, and no place to look for larger sizes.

On a move both paths are challenged: the new one so that more may be sent there, the old one because a packet that
somebody copied and sent on from elsewhere looks the same; a peer that is still there answers and sends on from there
(9.3.3). When a path to another address passes, the layers above hear of it (`moved`). Nothing is known of the capacity
of one to another host (`changed`, 9.4); where only the port is new, it is the same path with another NAT entry. A path
that is returned to because the new one does not pass is the one that was told last.

Packets to a path carry one of the peer's connection ids that no other path has seen, so that nobody who watches both
can tell that they belong together (9.5). Where the packets from a new address are for the id of ours that they were for
before, it is a NAT that has moved the peer, who knows nothing of it: then the new path shares the id (`Path.ids`).

Bounds. `_MOST` paths, the oldest goes. A peer's challenges: the last one of each path is answered, in one datagram.
Ours: on each path after one probe timeout, two, four, ... (8.2.1), of which the last `_ASKED` may be answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from quicoll_transport.quic.mtu import LEAST_DATAGRAM_BYTES

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["Path", "Paths"]

_MOST = 4
_ASKED = 3
_FACTOR = 3  # bytes to an unvalidated address for each from there (RFC 9000 section 8.1)
_LEAST_NS = 3_000_000_000  # section 8.2.4: three probe timeouts of a path of which nothing is known (RFC 9002 6.2.2)
_CHALLENGE_BYTES = 8


class Path:
    """One address of the peer.

    validated: whether the peer has answered from there. passes: whether it has answered what filled 1200 bytes.
    received, sent: bytes, while it is not validated.
    response: what a challenge of the peer asks to have back; None: nothing is owed.
    ids: paths with the same number share an id of the peer's, see PeerIds. cid: ours that its last packet was for.
    """

    __slots__ = (
        "address", "again_ns", "ask_ns", "asked", "cid", "fails_ns", "ids", "passes", "patience_ns", "received",
        "response", "sent", "validated",
    )  # fmt: skip

    def __init__(self, address: Address, *, validated: bool, ids: int = 0, cid: bytes = b"") -> None:
        self.address = address
        self.ids = ids
        self.cid = cid
        self.validated = self.passes = validated
        self.received = self.sent = 0
        self.response: bytes | None = None
        self.asked: dict[bytes, bool] = {}  # challenges that may be answered, oldest first: whether 1200 bytes went
        self.ask_ns: int | None = None  # when the next challenge is to be sent; None: the path is not challenged
        self.again_ns = 0  # between the last challenge and the next one; doubles each time
        self.patience_ns = 0  # for an answer,
        self.fails_ns = 0  # and when it comes too late

    @property
    def room(self) -> int:
        """How many bytes may be sent there now (RFC 9000 section 8.1)."""
        return 1 << 62 if self.validated else max(0, _FACTOR * self.received - self.sent)


class Paths:
    """See the module's head.

    current: the path in use. changed: whether a path to another host passes; moved: or one to another address; gone:
    numbers of ids (`Path.ids`) that no path uses any more. Whoever acts on these takes them back.
    """

    def __init__(self, address: Address, *, is_client: bool, draw: Callable[[int], bytes]) -> None:
        """Begin with the address of the handshake, which has validated it.

        Args:
            address: The peer's.
            is_client: Whether we are.
            draw: Returns so many bytes of chance.
        """
        self.current = Path(address, validated=True)
        self.changed = self.moved = False
        self.gone: list[int] = []
        self._ids = 1  # the next number
        self._is_client = is_client
        self._draw = draw
        self._all = [self.current]  # the one heard last at the end
        self._fallback = self.current  # the path before that passes
        self._settled = address  # of the last path in use that passed

    def __iter__(self) -> Iterator[Path]:
        return iter(self._all)

    def accepts(self, address: Address) -> bool:
        """Return whether packets from an address are looked at."""
        return not self._is_client or address == self.current.address

    def heard(self, address: Address, nbytes: int, cid: bytes) -> Path:
        """Take note of authentic datagrams; return the path that they came by.

        Args:
            address: Where they came from.
            nbytes: Of all of them.
            cid: The id of ours that they were for.
        """
        path = self.current
        if path.address != address:
            path = next((one for one in self._all if one.address == address), path)
            if path.address != address:
                ids = self.current.ids if cid == self.current.cid else self._new_ids()
                path = Path(address, validated=False, ids=ids)
            else:
                self._all.remove(path)
            self._all.append(path)
            if len(self._all) > _MOST:
                oldest = next(one for one in self._all if one not in (path, self.current, self._fallback))
                self._let_ids_go(oldest)
                self._all.remove(oldest)
        path.cid = cid
        if not path.validated:
            path.received += nbytes
        return path

    def _new_ids(self) -> int:
        number, self._ids = self._ids, self._ids + 1
        return number

    def _let_ids_go(self, path: Path) -> None:
        if all(one is path or one.ids != path.ids for one in self._all):
            self.gone.append(path.ids)

    def move(self, path: Path, now_ns: int, pto_ns: int) -> None:
        """Use a path from now on: the newest packet that is no probe came by it."""
        old = self.current
        if path is old:
            return
        self.current = path
        if old.passes:
            self._fallback = old
            self._challenge(old, now_ns, pto_ns)
        if not path.passes:
            self._challenge(path, now_ns, pto_ns)
        else:
            self._settle(path)

    def _challenge(self, path: Path, now_ns: int, pto_ns: int) -> None:
        path.patience_ns = max(_LEAST_NS, 3 * pto_ns)
        self._ask(path, now_ns)

    @staticmethod
    def _ask(path: Path, now_ns: int) -> None:
        path.again_ns = 0
        path.ask_ns, path.fails_ns = now_ns, now_ns + path.patience_ns

    def _settle(self, path: Path) -> None:
        """A path that passes is in use: does it lead elsewhere than the one before?"""
        self.changed = self.changed or path.address[:1] != self._settled[:1]
        self.moved = self.moved or path.address != self._settled
        self._settled = path.address

    def on_challenge(self, path: Path, data: bytes) -> None:
        """Take a PATH_CHALLENGE frame: it is answered by the path that it came by (section 8.2.2)."""
        path.response = data

    def on_response(self, data: bytes, now_ns: int) -> None:
        """Take a PATH_RESPONSE frame, by whatever path: it validates the one that was asked (section 8.2.3)."""
        for path in self._all:
            if data not in path.asked:
                continue
            path.validated = True
            if not (path.passes or path.asked[data]):
                path.asked.clear()
                self._ask(path, now_ns)
                return
            self._asked_no_more(path)
            if not path.passes:
                path.passes = True
                if path is self.current:
                    self._settle(path)
            return

    @staticmethod
    def _asked_no_more(path: Path) -> None:
        path.asked.clear()
        path.ask_ns = None

    def probes(self, now_ns: int, pto_ns: int) -> list[tuple[Path, bytes | None, bytes | None]]:
        """Return what is to be sent now, each in a datagram of its own: (path, challenge, response)."""
        out = []
        for path in self._all:
            challenge, response = None, path.response
            if path.ask_ns is not None and path.ask_ns <= now_ns:
                challenge = self._draw(_CHALLENGE_BYTES)
                path.asked[challenge] = path.room >= LEAST_DATAGRAM_BYTES
                if len(path.asked) > _ASKED:
                    del path.asked[next(iter(path.asked))]
                path.again_ns = max(2 * path.again_ns, pto_ns)
                path.ask_ns = now_ns + path.again_ns
            if challenge is not None or response is not None:
                path.response = None
                out.append((path, challenge, response))
        return out

    def has_probe(self, now_ns: int) -> bool:
        """Return whether `probes` would return anything."""
        return any(p.response is not None or (p.ask_ns is not None and p.ask_ns <= now_ns) for p in self._all)

    def next_timer(self) -> int | None:
        """Return when a challenge is to be repeated or has failed."""
        due: int | None = None
        for path in self._all:
            if path.ask_ns is not None:
                at = min(path.ask_ns, path.fails_ns)
                due = at if due is None or at < due else due
        return due

    def on_timer(self, now_ns: int) -> None:
        """Give up challenges that were not answered; leave a path that does not pass for the one before."""
        for path in [one for one in self._all if one.ask_ns is not None and one.fails_ns <= now_ns]:
            self._asked_no_more(path)
            if path is self.current and not path.passes:
                self.current = self._fallback
            if path is self.current:
                continue
            self._let_ids_go(path)
            if path.passes:
                path.ids = self._new_ids()  # the peer has left it; it may come back, and is believed then
            else:
                self._all.remove(path)
