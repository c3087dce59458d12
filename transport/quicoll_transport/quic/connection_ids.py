"""Connection ids (RFC 9000 section 5.1): ours, by which packets find us, and the peer's, which our packets carry.

Ours (`OwnIds`). The first comes from the handshake; then so many are issued as the peer keeps, `_MOST` at most. What
the peer retires is replaced, so that it always has one for a new path. Each has a stateless reset token that follows
from the id and a key that outlives the process (`reset_key`, section 10.3.2), so nothing has to be remembered to say
"this connection is gone", not even by a process that was started anew.

The peer's (`PeerIds`). Each path has one (section 9.5; `paths` says which paths share one), `current` is that of the
path in use. Where the peer has given too few, one serves two paths: to be linked is better than to be silent. The peer
may issue up to our limit, and ask that those below a number be retired, which is done at once. An id that we retire is
remembered by number until the peer has the RETIRE_CONNECTION_ID frame. Numbers go into use as they rise; one that comes
and is not above the newest that was ever in use (`_latest`) was retired before or is late, and is retired, unless
nothing else is left. Only the tokens of ids in use mean anything (section 10.3.1). A client's first id has none, so its
server uses another one as soon as there is one.

Bounds. A peer cannot make us keep more ids than our limit (CONNECTION_ID_LIMIT_ERROR), nor owe it more retirements
than `_MOST_OWED` (the same). It cannot make us issue more than it retires, and what waits to be told is what is active.

Failure cases (section 19.15, 19.16): a number for two ids or an id for two numbers, an id where we chose none, all ids
to be retired, a retirement of what was never issued: PROTOCOL_VIOLATION.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from hashlib import sha256

from quicoll_transport.quic.frames import (
    PROTOCOL_VIOLATION,
    FrameError,
    NewConnectionIdFrame,
    RetireConnectionIdFrame,
)

__all__ = [
    "CONNECTION_ID_LIMIT_ERROR",
    "RESET_LEAST",
    "TOKEN_BYTES",
    "OwnIds",
    "PeerIds",
    "reset_datagram",
    "reset_key",
    "reset_token",
]

CONNECTION_ID_LIMIT_ERROR = 0x09
TOKEN_BYTES = 16
RESET_LEAST = 21  # bytes of the smallest stateless reset (RFC 9000 section 10.3)
_RESET_MOST = 43  # of ours: as long as a packet that would be answered by one that is no longer
_PACKET_MORE = 22  # bytes that any packet is longer than the least id, so that it may be answered (section 10.3)
_MOST = 4  # of our ids that are active; the peer needs one for each path, and one to go to
_MOST_OWED = 64


def reset_key(secret: bytes, port: int) -> bytes:
    """Return the static key of an endpoint: the same one after a restart, and not that of another endpoint.

    Two endpoints with one key would answer for each other: whoever sees a packet to one could send it to the other, and
    have the token (sections 10.3.2 and 21.11). So the port is part of it.

    Args:
        secret: What nobody else has, and what lasts: of the node's private key.
        port: Where it listens.
    """
    return hmac.digest(secret, b"quicoll: keys of stateless resets" + port.to_bytes(2, "big"), sha256)


def reset_token(key: bytes, cid: bytes) -> bytes:
    """Return the stateless reset token of one of our ids (RFC 9000 section 10.3.2).

    Args:
        key: Static, secret, of this process.
        cid: The id.
    """
    return hmac.digest(key, cid, sha256)[:TOKEN_BYTES]


def reset_datagram(key: bytes, cid: bytes, size: int, draw: Callable[[int], bytes]) -> bytes | None:
    """Return what tells the sender of a short-header packet that its connection is gone, or None: say nothing.

    It is shorter than what it answers, so that two who know nothing of each other do not answer for ever (section
    10.3.3), and looks like any other packet. What is too short for a packet is not answered.

    Args:
        key: As for `reset_token`.
        cid: Whom the packet was for.
        size: Bytes of the datagram that it came in.
        draw: Returns so many bytes of chance.
    """
    length = min(size - 1, _RESET_MOST)
    if length < RESET_LEAST or size < len(cid) + _PACKET_MORE:
        return None
    noise = draw(length - TOKEN_BYTES)
    return bytes((noise[0] & 0x3F | 0x40,)) + noise[1:] + reset_token(key, cid)


class OwnIds:
    """Our ids; see the module's head.

    fresh: ids that came into use, and `gone`: that went out of it, until whoever looks datagrams up takes them out.
    news: numbers of which the peer is to be told (`frame`); whoever sends takes them out.
    size: bytes of each.
    """

    def __init__(self, first: bytes, *, limit: int, key: bytes, draw: Callable[[int], bytes]) -> None:
        """Begin with the id of the handshake.

        Args:
            first: That id.
            limit: The peer's active_connection_id_limit.
            key: For the reset tokens.
            draw: Returns so many bytes of chance.
        """
        self._by_number = {0: first}
        self._active = {first: 0}
        self.size = len(first)
        self._key = key
        self._draw = draw
        self._next = 1
        self.news: list[int] = []
        self.fresh: list[bytes] = []
        self.gone: list[bytes] = []
        while self.size and len(self._active) < min(limit, _MOST):
            self._issue()

    def __contains__(self, cid: bytes) -> bool:
        return cid in self._active

    def __len__(self) -> int:
        return len(self._active)

    def _issue(self) -> None:
        cid = self._draw(self.size)
        while cid in self._active:
            cid = self._draw(self.size)
        number, self._next = self._next, self._next + 1
        self._by_number[number] = cid
        self._active[cid] = number
        self.news.append(number)
        self.fresh.append(cid)

    def retire(self, number: int, carried_by: bytes) -> None:
        """Take a RETIRE_CONNECTION_ID frame; another id takes the place.

        Args:
            number: Of the id.
            carried_by: The id that the packet with the frame was for.
        Raises:
            FrameError: It was never issued, or the peer still uses it (section 19.16).
        """
        if number >= self._next:
            raise FrameError(PROTOCOL_VIOLATION, "an id is retired that was never issued")
        cid = self._by_number.get(number)
        if cid is None:
            return  # a repetition
        if cid == carried_by:
            raise FrameError(PROTOCOL_VIOLATION, "an id is retired by a packet that is for it")
        del self._by_number[number], self._active[cid]
        self.gone.append(cid)
        self._issue()

    def frame(self, number: int) -> bytes | None:
        """Return the NEW_CONNECTION_ID frame that tells of a number; None if the peer has retired it."""
        cid = self._by_number.get(number)
        return None if cid is None else NewConnectionIdFrame(number, 0, cid, reset_token(self._key, cid)).encode()


class PeerIds:
    """The peer's ids; see the module's head.

    current: the one that our packets carry by the path in use. path: the number of that path (`Path.ids`).
    token: the stateless reset token of `current`; None: it has none.
    news: numbers of retired ones, of which the peer is to be told (`frame`); whoever sends takes them out.
    """

    def __init__(self, first: bytes, *, limit: int, token: bytes | None = None) -> None:
        """Begin with the id of the handshake, on the path of number 0.

        Args:
            first: That id; empty where the peer wants none, and then it never has others.
            limit: Our active_connection_id_limit.
            token: Its stateless reset token, if the peer's transport parameters have one.
        """
        self.current, self.token = first, token
        self.path = 0
        self._limit = limit
        self._known: dict[int, tuple[bytes, bytes | None]] = {0: (first, token)}
        self._in_use = {0: 0}  # numbers of ids by those of paths
        self._latest = 0
        self._before = 0
        self._owed: dict[int, None] = {}  # retirements that the peer is not known to have
        self.news: list[int] = []

    def add(self, frame: NewConnectionIdFrame) -> None:
        """Take a NEW_CONNECTION_ID frame. Raises FrameError; see the module's head."""
        if not self.current:
            raise FrameError(PROTOCOL_VIOLATION, "an id of a peer that wants none")
        known = self._known.get(frame.sequence)
        if known is not None and known[0] != frame.cid:
            raise FrameError(PROTOCOL_VIOLATION, "one number for two connection ids")
        if known is None:
            if any(cid == frame.cid for cid, _ in self._known.values()):
                raise FrameError(PROTOCOL_VIOLATION, "one connection id with two numbers")
            is_late = frame.sequence < self._before or frame.sequence <= self._latest
            if is_late and any(number >= frame.retire_prior_to for number in self._known):
                self._owe(frame.sequence)
            elif frame.sequence in self._owed:
                raise FrameError(PROTOCOL_VIOLATION, "all ids are to be retired")
            else:
                self._known[frame.sequence] = (frame.cid, frame.reset_token)
        if self.token is None:
            self._prefer_token()
        if frame.retire_prior_to > self._before:
            self._retire_before(frame.retire_prior_to)
        if len(self._known) > self._limit:
            raise FrameError(CONNECTION_ID_LIMIT_ERROR, f"{len(self._known)} ids where {self._limit} are allowed")

    def _retire_before(self, before: int) -> None:
        self._before = before
        for path in sorted(self._in_use, key=lambda path: path != self.path):  # the one in use chooses first
            if self._in_use[path] < before:
                self._in_use[path] = self._unused()
        self._use()
        for number in [number for number in self._known if number < before]:
            del self._known[number]
            self._owe(number)

    def _unused(self) -> int:
        """Return the number of an id for another path; of one that is in use where there is no other."""
        able = [number for number in self._known if number >= self._before]
        free = [number for number in able if number not in self._in_use.values()]
        number = min(free) if free else max(able)
        self._latest = max(self._latest, number)
        return number

    def of(self, path: int) -> bytes:
        """Return the id that packets to a path carry; the first time, one that no other path has seen."""
        if path not in self._in_use:
            self._in_use[path] = self._unused()
        return self._known[self._in_use[path]][0]

    def use(self, path: int) -> None:
        """Take note that another path is in use."""
        self.of(path)
        self.path = path
        self._use()

    def leave(self, path: int) -> None:
        """Take note that a path, which is not in use, is gone: its id is retired."""
        number = self._in_use.pop(path, None)
        if number is not None:
            self._drop(number)

    def is_reset(self, datagram: bytes | memoryview) -> bool:
        """Return whether a datagram that is no packet for us says that the peer knows nothing of us (section 10.3.1).

        The tokens of all ids in use are compared, each in constant time, and of no others: nobody could have answered
        a packet that carried them.
        """
        if len(datagram) < RESET_LEAST:
            return False
        end = bytes(datagram[-TOKEN_BYTES:])
        found = False
        for number in self._in_use.values():
            token = self._known[number][1]
            found |= token is not None and hmac.compare_digest(end, token)
        return found

    def frame(self, number: int) -> bytes | None:
        """Return the RETIRE_CONNECTION_ID frame for a number; None if the peer has it."""
        return RetireConnectionIdFrame(number).encode() if number in self._owed else None

    def on_acked(self, number: int) -> None:
        """Take note that the peer has the frame with this number."""
        self._owed.pop(number, None)

    def _use(self) -> None:
        self.current, self.token = self._known[self._in_use[self.path]]

    def _prefer_token(self) -> None:
        """Let the id in use, which has no token, give way to one that has."""
        old = self._in_use[self.path]
        able = [number for number, (_, token) in self._known.items() if token is not None and number > self._latest]
        if not able:
            return
        self._in_use[self.path] = self._latest = min(able)
        self._use()
        self._drop(old)

    def _drop(self, number: int) -> None:
        if number not in self._in_use.values():
            del self._known[number]
            self._owe(number)

    def _owe(self, number: int) -> None:
        if number not in self._owed:
            self._owed[number] = None
            self.news.append(number)
        if len(self._owed) > _MOST_OWED:
            raise FrameError(CONNECTION_ID_LIMIT_ERROR, "ids come and go faster than we can say so")
