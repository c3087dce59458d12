"""Limits on the work that strangers and peers cause: token buckets, a bounded table of unfinished handshakes.

Space is bounded where it is taken (inbox, outbox, frames, quic). Here is the rest: work. A stranger costs us, in the
order in which it gets further,

    a lost packet        for a connection that there is not: an answer of 43 bytes at most, shorter than it was
    an Initial           looking at it, and a Retry or the test of its token: some tens of microseconds
    a handshake          signatures and key exchange: milliseconds; and a slot in the table, with a session's memory
    a Hello              from here on it is a peer, with a certificate, and has a `Pace`

Each step has buckets. Whoever sends its first Initial may have invented its address (RFC 9000 section 8.1), so that
step has no table of sources that could be filled: one bucket for all. A handshake needs the token of a Retry, which
proves the address (one of loopback is proved by the kernel), so that step has a bucket per source as well; one source
is an IPv4 address or an IPv6 /64, which is the least that a site is given (RFC 6177).

Sources from which a peer came before form a lane of their own: a flood takes nothing from the nodes of a job that has
run once. The lane is for addresses, and lets nobody in: whoever comes through it still needs its certificate.

A full table is no way to lock others out: the newest handshake takes the place of the oldest, of its own source where
that has too many, otherwise of all. Because handshakes are let in by a bucket of `handshakes` and `handshake_burst`,
each has its place for at least

    (slots - handshake_burst) / handshakes   seconds                                                  (1.7 by default)

whatever the others do, which is a round trip of any path and more. So a flood costs CPU up to the buckets, memory up to
the table, and newcomers a part of their tries; links that are up do not notice.

Buckets are GCRA (ITU-T I.371 annex A): one integer, the time at which the bucket will be full again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Hashable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Generic, TypeVar

from quicoll_transport.errors import ConfigurationError, ProtocolError

if TYPE_CHECKING:
    from quicoll_transport.net.addresses import Address

__all__ = ["Guard", "GuardConfig", "Pace", "PaceConfig", "TokenBucket", "source_of"]

_SECOND = 1_000_000_000
_MOST = 1_000_000_000  # per second: one per nanosecond

Key = TypeVar("Key", bound=Hashable)


class _Positive:
    """Settings that are all numbers from 1 on."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for one in fields(self):  # type: ignore[arg-type]  # those of what inherits it
            value = getattr(self, one.name)
            if not 1 <= value <= _MOST:
                raise ConfigurationError(f"{one.name} must be 1 to {_MOST}, is {value}")


@dataclass(frozen=True, slots=True)
class GuardConfig(_Positive):
    """Bounds on strangers. Rates are per second, bursts are what an idle bucket holds.

    initials: first datagrams that are looked at, of all sources together. A busy process pays some tens of microseconds
        for each.
    unknown: datagrams for connections that there are not, which are answered; of all sources, which may be invented.
    handshakes: that are begun, of all sources; source_handshakes: of one. Each costs milliseconds of CPU.
    source_slots: unfinished handshakes of one source.
    sources: whose buckets are remembered; a forgotten one is full again. known: sources remembered as those of peers.
    Raises ConfigurationError.
    """

    initials: int = 4000
    initial_burst: int = 4000
    unknown: int = 200
    unknown_burst: int = 200
    handshakes: int = 150
    handshake_burst: int = 256
    source_handshakes: int = 75
    source_burst: int = 128
    source_slots: int = 256
    sources: int = 4096
    known: int = 4096


@dataclass(frozen=True, slots=True)
class PaceConfig(_Positive):
    """Bounds on a peer's connection, per second, far above what an honest one does; bursts are for what a path held.

    controls: control messages; pings: those among them that we must answer; resets: message streams that it gives up
    after it has opened them, which cost us and bring nothing.
    """

    controls: int = 10_000
    control_burst: int = 65_536
    pings: int = 1000
    ping_burst: int = 10_000
    resets: int = 1000
    reset_burst: int = 16_384


class TokenBucket:
    """`rate` per second, `burst` at once."""

    __slots__ = ("_full_ns", "_slack_ns", "_step_ns")

    def __init__(self, rate: int, burst: int) -> None:
        self._step_ns = max(1, _SECOND // rate)
        self._slack_ns = (burst - 1) * self._step_ns
        self._full_ns = -(1 << 63)

    def take(self, now_ns: int, count: int = 1) -> bool:
        """Take `count`, or nothing and False."""
        full = max(self._full_ns, now_ns) + (count - 1) * self._step_ns
        if full - now_ns > self._slack_ns:
            return False
        self._full_ns = full + self._step_ns
        return True

    def full(self, now_ns: int) -> bool:
        return self._full_ns <= now_ns


def source_of(address: Address) -> str:
    """Return what counts as one source: an IPv4 address, the /64 of an IPv6 address, or any other text itself."""
    text = str(address[0])
    if ":" not in text:
        return text
    try:
        packed = ipaddress.IPv6Address(text.partition("%")[0]).packed
    except ValueError:
        return text
    return packed[:8].hex()


class _Lane:
    """Sources that share their fate."""

    __slots__ = ("handshakes", "initials")

    def __init__(self, config: GuardConfig) -> None:
        self.initials = TokenBucket(config.initials, config.initial_burst)
        self.handshakes = TokenBucket(config.handshakes, config.handshake_burst)


class Guard(Generic[Key]):
    """See the module's head. `slots`: unfinished handshakes of all sources; keys are the caller's names for them.

    dropped: Initials that found their bucket empty; refused: handshakes that did; displaced: handshakes whose place was
    taken by a newer one.
    """

    def __init__(self, config: GuardConfig, *, slots: int) -> None:
        self.dropped = 0
        self.refused = 0
        self.displaced = 0
        self._config = config
        self._slots = slots
        self._unknown = TokenBucket(config.unknown, config.unknown_burst)
        self._strangers = _Lane(config)
        self._peers = _Lane(config)
        self._buckets: dict[str, TokenBucket] = {}  # the least recently used first
        self._known: dict[str, None] = {}  # likewise
        self._open: dict[Key, str] = {}  # the oldest first
        self._of_source: dict[str, dict[Key, None]] = {}

    def __len__(self) -> int:
        """Unfinished handshakes."""
        return len(self._open)

    @property
    def remembered(self) -> int:
        """Entries of all tables."""
        return len(self._buckets) + len(self._known) + len(self._open) + len(self._of_source)

    def initial(self, address: Address, now_ns: int) -> bool:
        """Return whether to look at a first datagram, whose source may be invented."""
        allowed = self._lane(source_of(address)).initials.take(now_ns)
        self.dropped += not allowed
        return allowed

    def unknown(self, now_ns: int) -> bool:
        """Return whether to answer a datagram for a connection that there is not."""
        return self._unknown.take(now_ns)

    def handshake(self, address: Address, now_ns: int) -> bool:
        """Return whether to begin a handshake with a source that has shown its address."""
        source = source_of(address)
        # Its own bucket first: a source that has used up its share must not use up that of others.
        allowed = self._bucket(source).take(now_ns) and self._lane(source).handshakes.take(now_ns)
        self.refused += not allowed
        return allowed

    def opened(self, key: Key, address: Address) -> Key | None:
        """Add a handshake; return the one that has to make room for it, if any, which counts as closed."""
        source = source_of(address)
        siblings = self._of_source.setdefault(source, {})
        victim: Key | None = None
        if len(siblings) >= self._config.source_slots:
            victim = next(iter(siblings))
        elif len(self._open) >= self._slots:
            victim = self._oldest()
        self._open[key] = source
        siblings[key] = None
        if victim is not None:
            self.displaced += 1
            self.closed(victim)
        return victim

    def closed(self, key: Key) -> None:
        """Remove a handshake that is over; keys that are not open are fine."""
        source = self._open.pop(key, None)
        if source is not None:
            siblings = self._of_source[source]
            del siblings[key]
            if not siblings:
                del self._of_source[source]

    def proved(self, address: Address) -> None:
        """Note that a peer with a certificate came from this source."""
        source = source_of(address)
        self._known.pop(source, None)
        self._known[source] = None
        if len(self._known) > self._config.known:
            del self._known[next(iter(self._known))]

    def _oldest(self) -> Key:
        """Of the strangers; of all where there are only peers."""
        return next((key for key, source in self._open.items() if source not in self._known), next(iter(self._open)))

    def _lane(self, source: str) -> _Lane:
        return self._peers if source in self._known else self._strangers

    def _bucket(self, source: str) -> TokenBucket:
        bucket = self._buckets.pop(source, None)
        if bucket is None:
            bucket = TokenBucket(self._config.source_handshakes, self._config.source_burst)
        self._buckets[source] = bucket
        if len(self._buckets) > self._config.sources:
            del self._buckets[next(iter(self._buckets))]
        return bucket


class Pace:
    """Limits how much work the peer of one connection causes. Raises ProtocolError when it is more."""

    __slots__ = ("_config", "_controls", "_pings", "_resets")

    def __init__(self, config: PaceConfig) -> None:
        self._config = config
        self._controls = TokenBucket(config.controls, config.control_burst)
        self._pings = TokenBucket(config.pings, config.ping_burst)
        self._resets = TokenBucket(config.resets, config.reset_burst)

    def control(self, now_ns: int, *, ping: bool) -> None:
        """Count a control message."""
        if not self._controls.take(now_ns):
            raise ProtocolError(f"more than {self._config.controls} control messages in a second")
        if ping and not self._pings.take(now_ns):
            raise ProtocolError(f"more than {self._config.pings} heartbeats in a second")

    def resets(self, now_ns: int, count: int) -> None:
        """Count message streams that the peer gave up."""
        if count and not self._resets.take(now_ns, count):
            raise ProtocolError(f"more than {self._config.resets} message streams given up in a second")
