"""What an endpoint remembers of the paths to its peers, from one connection to the next. Sans-IO, integers only.

A connection that begins from nothing needs eight round trips or so until it has found the rate of a long path; one that
knows what the last connection found has it at once. An endpoint has one `PathMemory` for all its connections, whether
they were dialled or came in. As with careful resume
(draft-ietf-tsvwg-careful-resume-20) a memory is only ever a suggestion: `bbr` tries it, and what it measures decides.

An entry is of one peer, by the fingerprint of the certificate that it has shown and signed with, at one address:
without the port, which is another after a restart; another address may be another path.

    none -> remembered    a controller has learned a rate
    remembered            overwritten by what is found out later; while STARTUP goes on, only by more, since what it has
                          seen so far is a lower bound
    remembered -> none    its first round trip says that this is another path (half as long or less, or twice as long or
                          more); everything was lost for long; `_KEPT_NS` have passed; the table is full and it was
                          learned longest ago

Invariants
    There are `_MOST` entries at most, whoever connects. Rates and round trips in it are above nothing.
    What is in it never blocks or fails anything: without it a connection begins as if nothing was known.

Failure cases
    A wrong memory: the controller finds out within a few round trips, and overwrites it.
    A peer without a certificate, or with a new one: nothing is remembered.
    Several connections to one peer at once: the last that learned something is right.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KnownPath", "PathMemory", "RememberedPath"]

_MOST = 4096
_KEPT_NS = 600 * 10**9


class KnownPath(NamedTuple):
    """What was found out of a path. rate: bytes a second. rtt_ns: the shortest round trip."""

    rate: int
    rtt_ns: int


class PathMemory:
    """See the module's head."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, str], tuple[KnownPath, int]] = {}  # with the time; in the order of learning

    def __len__(self) -> int:
        return len(self._known)

    def of(self, peer: bytes, host: str) -> RememberedPath:
        """Return what concerns one path.

        Args:
            peer: Fingerprint of the peer's certificate.
            host: Its address, without the port.
        """
        return RememberedPath(self._known, (peer, host))


class RememberedPath:
    """One path of a PathMemory."""

    __slots__ = ("_key", "_known")

    def __init__(self, known: dict[tuple[bytes, str], tuple[KnownPath, int]], key: tuple[bytes, str]) -> None:
        """known: the memory's. key: of this path in it."""
        self._known, self._key = known, key

    def recall(self, now_ns: int) -> KnownPath | None:
        """Return what is remembered; None: nothing, or nothing that is new enough."""
        entry = self._known.get(self._key)
        if entry is None:
            return None
        path, learned_ns = entry
        if now_ns - learned_ns > _KEPT_NS:
            self.forget()
            return None
        return path

    def learn(self, path: KnownPath, now_ns: int, *, is_certain: bool) -> None:
        """Remember this. is_certain: not just a lower bound, which overwrites only less."""
        if path.rate < 1 or path.rtt_ns < 1:
            return
        if not is_certain and (known := self.recall(now_ns)) is not None and known.rate >= path.rate:
            return
        self._known.pop(self._key, None)
        while len(self._known) >= _MOST:
            del self._known[next(iter(self._known))]
        self._known[self._key] = (path, now_ns)

    def forget(self) -> None:
        """Remember nothing of this path."""
        self._known.pop(self._key, None)
