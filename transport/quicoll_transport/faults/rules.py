"""Rules: one thing each that a network does to datagrams. `compose` composes and installs them.

A rule looks at one datagram at a time `now_ns` and either has no opinion (None) or says what becomes of it: a list of
deliveries, each a delay and the bytes; an empty list drops it. The caller carries the deliveries out: the earlier due
first, equal ones in the order of the calls. So the same rules serve a socket (`socket.FaultyIO`) and a simulator with
one `Faults` per host or per link.

Rules are exact, not measured: times are integers of nanoseconds, randomness comes from the generator that is given,
and every rule draws the same number of times whatever comes out of the draws, unless it says otherwise. The work per
datagram is constant (what it costs to copy it aside), the memory bounded.

Memory of a rule. Delay, Rate, BurstLoss and Hold remember what they saw; one instance belongs to one place in one
`Faults`. Settings are frozen, what is remembered is not compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quicoll_transport.errors import ConfigurationError

__all__ = [
    "BurstLoss",
    "Corrupt",
    "Cut",
    "Datagram",
    "Delay",
    "Delivery",
    "Drop",
    "Duplicate",
    "Hold",
    "Partition",
    "Rate",
    "Released",
    "Reorder",
    "Rng",
    "Rule",
    "matches",
]

_MAX_PATHS = 4096  # whose order a Delay remembers
_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Datagram:
    """A datagram on its way.

    Attributes:
        data: Its bytes.
        address: The other side's.
        outgoing: Whether this side sends it.
        local: This side's address; () where it is not known.
    """

    data: bytes
    address: tuple[Any, ...]
    outgoing: bool
    local: tuple[Any, ...] = ()

    @property
    def source(self) -> tuple[Any, ...]:
        return self.local if self.outgoing else self.address

    @property
    def destination(self) -> tuple[Any, ...]:
        return self.address if self.outgoing else self.local


@dataclass(frozen=True, slots=True)
class Delivery:
    data: bytes
    delay_ns: int = 0


Released = tuple[Datagram, list[Delivery]]


class Rng(Protocol):
    """What a rule needs of a generator; `random.Random(seed)` is one."""

    def random(self) -> float: ...
    def randrange(self, stop: int, /) -> int: ...


class Rule(Protocol):
    """A rule that keeps datagrams (Hold, and what is composed of rules) also has

        release(now_ns, rng) -> list[Released]

    which gives them back in order and keeps nothing from then on.
    """

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None: ...


Addresses = tuple[tuple[Any, ...], ...]


def matches(address: tuple[Any, ...], wanted: frozenset[tuple[Any, ...]]) -> bool:
    """Return whether an address is among the wanted: (host, port), or (host,) for every port of a host.

    Flow and scope of an IPv6 address do not matter.
    """
    return address[:2] in wanted or address[:1] in wanted


def address_set(addresses: Sequence[tuple[Any, ...] | str]) -> frozenset[tuple[Any, ...]]:
    for address in addresses:
        if isinstance(address, str) or not address:  # a plain string would match nothing, quietly
            raise ConfigurationError(f"an address is (host, port) or (host,), not {address!r}")
    return frozenset(tuple(address[:2]) for address in addresses)


def check_probability(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ConfigurationError(f"a probability lies between 0 and 1, not {value}")
    return value


def check_least(name: str, value: int, least: int) -> int:
    if value < least:
        raise ConfigurationError(f"{name} is {least} or more, not {value}")
    return value


@dataclass(frozen=True, slots=True)
class Cut:
    """Drop everything until `until_ns` (None: for ever); only one direction, or only some addresses, if given."""

    until_ns: int | None = None
    outgoing: bool | None = None
    addresses: Addresses = ()
    _wanted: frozenset[tuple[Any, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_wanted", address_set(self.addresses))

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if self.until_ns is not None and now_ns >= self.until_ns:
            return None
        if self.outgoing is not None and datagram.outgoing is not self.outgoing:
            return None
        if self.addresses and not matches(datagram.address, self._wanted):
            return None
        return []


@dataclass(frozen=True, slots=True)
class Partition:
    """Drop what goes from `one` set of addresses to the `other`, and back unless `one_way`.

    It needs to know both ends of a datagram (`Datagram.local`); an end that nobody told matches nothing. On a socket
    bound to a wildcard address use Cut, which only looks at the other side.
    """

    one: Addresses
    other: Addresses
    one_way: bool = False
    until_ns: int | None = None
    _one: frozenset[tuple[Any, ...]] = field(init=False, repr=False, compare=False)
    _other: frozenset[tuple[Any, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_one", address_set(self.one))
        object.__setattr__(self, "_other", address_set(self.other))

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if self.until_ns is not None and now_ns >= self.until_ns:
            return None
        source, destination = datagram.source, datagram.destination
        if matches(source, self._one) and matches(destination, self._other):
            return []
        if not self.one_way and matches(source, self._other) and matches(destination, self._one):
            return []
        return None


@dataclass(frozen=True, slots=True)
class Drop:
    """Lose each datagram with this probability, independently of all others."""

    probability: float

    def __post_init__(self) -> None:
        check_probability(self.probability)

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        return [] if rng.random() < self.probability else None


@dataclass(frozen=True, slots=True)
class BurstLoss:
    """Loss in bursts: the model of Gilbert (BSTJ 1960) and Elliott (BSTJ 1963), one chain per direction.

    With each datagram the chain may go from good to bad (`to_bad`) or from bad to good (`to_good`); then the datagram
    is lost with `bad_loss` or `good_loss`. It starts good. In the long run a share of `stationary_loss` is lost; bad
    times last `1 / to_good` datagrams in the mean. Two draws per datagram.
    """

    to_bad: float
    to_good: float
    good_loss: float = 0.0
    bad_loss: float = 1.0
    _bad: dict[bool, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for value in (self.to_bad, self.to_good, self.good_loss, self.bad_loss):
            check_probability(value)

    @classmethod
    def mean(cls, loss: float, *, burst: float) -> BurstLoss:
        """The chain that loses a share of `loss`, in bursts of `burst` datagrams in the mean (1 or more)."""
        check_probability(loss)
        if loss == 1.0 or not burst >= 1.0 or loss / (burst * (1.0 - loss)) > 1.0:
            raise ConfigurationError(f"no chain loses {loss} in bursts of {burst}")
        return cls(to_bad=loss / (burst * (1.0 - loss)), to_good=1.0 / burst)

    @property
    def stationary_loss(self) -> float:
        if self.to_bad == 0.0:
            return self.good_loss
        bad = self.to_bad / (self.to_bad + self.to_good)
        return bad * self.bad_loss + (1.0 - bad) * self.good_loss

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        bad = self._bad.get(datagram.outgoing, False)
        move, lose = rng.random(), rng.random()
        if move < (self.to_good if bad else self.to_bad):
            bad = not bad
            self._bad[datagram.outgoing] = bad
        return [] if lose < (self.bad_loss if bad else self.good_loss) else None


@dataclass(frozen=True, slots=True)
class Delay:
    """Deliver later: `delay_ns` plus up to `jitter_ns`, uniformly.

    Datagrams between the same two addresses keep their order, as on a path with one queue: one that drew less waits
    for the one before it. `reorder` lets them overtake each other.
    """

    delay_ns: int
    jitter_ns: int = 0
    reorder: bool = False
    # the due time of the last datagram of a path
    _last: dict[tuple[Any, ...], int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_least("delay_ns", self.delay_ns, 0)
        check_least("jitter_ns", self.jitter_ns, 0)

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        delay = self.delay_ns
        if self.jitter_ns:
            delay += rng.randrange(self.jitter_ns + 1)
            if not self.reorder:
                path = (datagram.outgoing, datagram.address, datagram.local)
                last = self._last.pop(path, now_ns)
                delay = max(delay, last - now_ns)
                self._last[path] = now_ns + delay
                if len(self._last) > _MAX_PATHS:  # the path that was silent longest loses its order, nothing else
                    del self._last[next(iter(self._last))]
        return [Delivery(datagram.data, delay)]


@dataclass(frozen=True, slots=True)
class Reorder:
    """With this probability a datagram comes `later_ns` later, so that whatever is sent meanwhile overtakes it.

    In a chain it belongs behind the rules that keep order (Delay, Rate), or they would undo it.
    """

    probability: float
    later_ns: int = 5_000_000

    def __post_init__(self) -> None:
        check_probability(self.probability)
        check_least("later_ns", self.later_ns, 1)

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        return [Delivery(datagram.data, self.later_ns)] if rng.random() < self.probability else None


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Deliver again with this probability: `copies` more times, each `later_ns` after the one before."""

    probability: float
    later_ns: int = 1_000_000
    copies: int = 1

    def __post_init__(self) -> None:
        check_probability(self.probability)
        check_least("later_ns", self.later_ns, 0)
        if not 1 <= self.copies <= 16:
            raise ConfigurationError(f"copies are 1 to 16, not {self.copies}")

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if rng.random() >= self.probability:
            return None
        return [Delivery(datagram.data, i * self.later_ns) for i in range(self.copies + 1)]


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flip `bits` different bits of a datagram (all of it, if it has fewer) with this probability; QUIC's AEAD must
    reject it. Draws once, and once or more per bit where it hits."""

    probability: float
    bits: int = 1

    def __post_init__(self) -> None:
        check_probability(self.probability)
        if not 1 <= self.bits <= 64:
            raise ConfigurationError(f"bits are 1 to 64, not {self.bits}")

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if not datagram.data or rng.random() >= self.probability:
            return None
        changed = bytearray(datagram.data)
        flip_bits(memoryview(changed), self.bits, rng)
        return [Delivery(bytes(changed))]


def flip_bits(view: memoryview, bits: int, rng: Rng) -> None:
    """Flip `bits` different bits of flat bytes; fewer where there are fewer."""
    size = 8 * len(view)
    flipped: list[int] = []
    while len(flipped) < min(bits, size):
        bit = rng.randrange(size)
        if bit not in flipped:  # 64 at most, so that a list will do
            flipped.append(bit)
            view[bit // 8] ^= 1 << bit % 8


@dataclass(frozen=True, slots=True)
class Rate:
    """A link of `bytes_per_second` in each direction, with a queue before it: first in, first out, tail dropped.

    burst_bytes: 0, a serialising line: a datagram is through when its last byte is. More, a token bucket that holds so
    many: a datagram leaves as soon as there are tokens for it; it starts full. A datagram larger than the bucket
    leaves when the bucket would have had enough.
    queue_bytes: what may wait, this datagram included; queue_ns: for how long it may. Beyond either it is dropped, but
    the queue limit in bytes never drops what finds nothing waiting. None: no such limit; one of the two is needed.
    overhead_bytes: counted with each datagram; 28 is IPv4 and UDP, 48 IPv6 and UDP.

    Promise: in any time t no more leaves than bytes_per_second * t + max(burst_bytes, the largest datagram), and as
    long as something waits, nothing less. A datagram counts as waiting until its last token is there, so the queue is a
    fluid one: half a datagram through is half a datagram less.

    Method: virtual scheduling (ITU-T I.371, GCRA). `_full` is the time at which the bucket would be full again, in
    units of 1 / (bytes_per_second) ns, in which a byte costs a whole 10**9; so no rounding adds up.
    """

    bytes_per_second: int
    burst_bytes: int = 0
    queue_bytes: int | None = 256 << 10
    queue_ns: int | None = None
    overhead_bytes: int = 0
    _full: dict[bool, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_least("bytes_per_second", self.bytes_per_second, 1)
        check_least("burst_bytes", self.burst_bytes, 0)
        check_least("overhead_bytes", self.overhead_bytes, 0)
        if self.queue_bytes is None and self.queue_ns is None:
            raise ConfigurationError("a queue without an end: give queue_bytes or queue_ns")
        check_least("queue_bytes", self.queue_bytes or 0, 0)
        check_least("queue_ns", self.queue_ns or 0, 0)

    def backlog_bytes(self, now_ns: int, *, outgoing: bool) -> int:
        """Return the bytes that wait in a direction, rounded up."""
        return -(-max(0, self._behind(now_ns, outgoing)) // _SECOND)

    def _behind(self, now_ns: int, outgoing: bool) -> int:
        """Return how far the tokens are short of what was accepted, scaled; negative while tokens are left."""
        now = now_ns * self.bytes_per_second
        return max(self._full.get(outgoing, now), now) - self.burst_bytes * _SECOND - now

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        cost = (len(datagram.data) + self.overhead_bytes) * _SECOND
        behind = self._behind(now_ns, datagram.outgoing)
        waits = behind + cost  # until there are tokens for it
        delay = -(-max(0, waits) // self.bytes_per_second)  # up: never before its last token
        if self.queue_bytes is not None and behind > 0 and waits > self.queue_bytes * _SECOND:
            return []
        if self.queue_ns is not None and delay > self.queue_ns:
            return []
        self._full[datagram.outgoing] = waits + self.burst_bytes * _SECOND + now_ns * self.bytes_per_second
        return [Delivery(datagram.data, delay)]


@dataclass(slots=True, eq=False)
class Hold:
    """Keep every datagram; what was kept is delivered in order when the rule is released (`Installed.release`) or
    removed, and from then on it has no opinion. With `until_ns` it releases itself at that time.

    limit_bytes, limit: how much it keeps; beyond that it drops, and counts in `overflowed`.
    """

    until_ns: int | None = None
    limit_bytes: int = 16 << 20
    limit: int = 65536
    overflowed: int = 0
    _kept: deque[Datagram] = field(default_factory=deque, init=False, repr=False)
    _bytes: int = field(default=0, init=False, repr=False)
    _count: int = field(default=0, init=False, repr=False)  # with until_ns they wait elsewhere, but count here
    _open: bool = field(default=False, init=False, repr=False)

    @property
    def kept(self) -> int:
        """Number of datagrams that wait for `release`."""
        return len(self._kept)

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if self._open or (self.until_ns is not None and now_ns >= self.until_ns):
            return None
        if self._count >= self.limit or self._bytes + len(datagram.data) > self.limit_bytes:
            self.overflowed += 1
            return []
        self._count += 1
        self._bytes += len(datagram.data)
        if self.until_ns is not None:
            return [Delivery(datagram.data, self.until_ns - now_ns)]
        self._kept.append(datagram)
        return []

    def release(self, now_ns: int, rng: Rng) -> list[Released]:
        self._open = True
        kept, self._kept = self._kept, deque()
        self._bytes = self._count = 0
        return [(datagram, [Delivery(datagram.data)]) for datagram in kept]
