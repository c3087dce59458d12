"""Composed rules, their installation, and rules for decoded payloads.

`rules` says what a rule is and has the plain ones; their names are here too. Composed rules are rules:

    Chain   a datagram passes through all of them in order, each may drop, delay, alter or duplicate it
    First   the first with an opinion decides
    Only    a rule for one direction or some addresses
    Between a rule for some time

`Faults` is a First of what was installed, in the order of installation, and gives a handle for each that counts and
takes it away again. Laws, which the tests check: Chain() has no opinion; Chain(a) is a; a chain in a chain is as if its
rules stood there; likewise First. In a chain a later rule sees a datagram at the time at which it leaves the one
before, but in the order in which they were sent: rules that keep order come before those that break it.

The part that carries out deliveries sets `Faults.wake`, which is called when datagrams that a Hold kept are free, and
takes them with `Faults.released`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.faults.rules import (
    BurstLoss,
    Corrupt,
    Cut,
    Datagram,
    Delay,
    Delivery,
    Drop,
    Duplicate,
    Hold,
    Partition,
    Rate,
    Released,
    Reorder,
    Rng,
    Rule,
    address_set,
    check_least,
    check_probability,
    flip_bits,
    matches,
)

__all__ = [
    "Between",
    "BurstLoss",
    "Chain",
    "Corrupt",
    "Cut",
    "Datagram",
    "Delay",
    "Delivery",
    "Drop",
    "Duplicate",
    "Faults",
    "First",
    "Hold",
    "Installed",
    "InstalledPayload",
    "Only",
    "Partition",
    "PayloadCorrupt",
    "PayloadRule",
    "Rate",
    "Released",
    "Reorder",
    "Rng",
    "Rule",
    "RuleStats",
]

_MAX_COPIES = 256  # deliveries of one datagram; chained Duplicates multiply


@dataclass(slots=True)
class RuleStats:
    """Effects of a rule, in datagrams.

    Attributes:
        seen: Shown to it.
        decided: On which it had an opinion.
        dropped: Of these, dropped or kept by a Hold.
        delayed: Of these, whose first delivery was not at once.
        altered: Of these, with a delivery of other bytes.
        copies: Deliveries beyond the first.
        bytes_dropped: Bytes of the dropped ones.
    """

    seen: int = 0
    decided: int = 0
    dropped: int = 0
    delayed: int = 0
    altered: int = 0
    copies: int = 0
    bytes_dropped: int = 0

    def count(self, datagram: Datagram, deliveries: list[Delivery] | None) -> None:
        self.seen += 1
        if deliveries is None:
            return
        self.decided += 1
        if not deliveries:
            self.dropped += 1
            self.bytes_dropped += len(datagram.data)
            return
        self.delayed += deliveries[0].delay_ns > 0
        self.copies += len(deliveries) - 1
        data = datagram.data
        for delivery in deliveries:
            if delivery.data is not data and delivery.data != data:
                self.altered += 1
                return


def _release(rule: Rule, now_ns: int, rng: Rng) -> list[Released]:
    release = getattr(rule, "release", None)
    return release(now_ns, rng) if release is not None else []


def _flat(kind: type[Chain] | type[First], rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Nested ones of the same kind dissolve, so that nesting changes nothing, not even the order of draws."""
    flat: list[Rule] = []
    for rule in rules:
        flat.extend(rule.rules if isinstance(rule, kind) else (rule,))
    return tuple(flat)


class Chain:
    """Each rule decides on what those before it deliver, at the time at which they deliver it. `stats`: by rule."""

    __slots__ = ("rules", "stats")

    def __init__(self, *rules: Rule) -> None:
        self.rules = _flat(Chain, rules)
        self.stats = tuple(RuleStats() for _ in self.rules)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.rules))})"

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        deliveries, decided = self._pass(datagram, [Delivery(datagram.data)], 0, now_ns, rng)
        return deliveries if decided else None

    def _pass(
        self, datagram: Datagram, deliveries: list[Delivery], start: int, now_ns: int, rng: Rng
    ) -> tuple[list[Delivery], bool]:
        """Return what comes out when `deliveries` enter at rule `start`, and whether any rule had an opinion."""
        decided = False
        for i in range(start, len(self.rules)):
            through: list[Delivery] = []
            for delivery in deliveries:
                same = delivery.data is datagram.data
                seen = (
                    datagram if same else Datagram(delivery.data, datagram.address, datagram.outgoing, datagram.local)
                )
                answer = self.rules[i].decide(seen, now_ns + delivery.delay_ns, rng)
                self.stats[i].count(seen, answer)
                if answer is None:
                    through.append(delivery)
                    continue
                decided = True
                if delivery.delay_ns:
                    through += [Delivery(after.data, delivery.delay_ns + after.delay_ns) for after in answer]
                else:
                    through += answer
            deliveries = through[:_MAX_COPIES]
            if not deliveries:
                break
        return deliveries, decided

    def release(self, now_ns: int, rng: Rng) -> list[Released]:
        # From the end: what waits further on goes first, and what follows it does not wait there again.
        freed: list[Released] = []
        for i in reversed(range(len(self.rules))):
            for datagram, deliveries in _release(self.rules[i], now_ns, rng):
                freed.append((datagram, self._pass(datagram, deliveries, i + 1, now_ns, rng)[0]))
        return freed


class First:
    """The first rule that has an opinion decides. `stats`: by rule."""

    __slots__ = ("rules", "stats")

    def __init__(self, *rules: Rule) -> None:
        self.rules = _flat(First, rules)
        self.stats = tuple(RuleStats() for _ in self.rules)

    def __repr__(self) -> str:
        return f"First({', '.join(map(repr, self.rules))})"

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        for rule, stats in zip(self.rules, self.stats, strict=True):
            answer = rule.decide(datagram, now_ns, rng)
            stats.count(datagram, answer)
            if answer is not None:
                return answer
        return None

    def release(self, now_ns: int, rng: Rng) -> list[Released]:
        return [freed for rule in self.rules for freed in _release(rule, now_ns, rng)]


@dataclass(frozen=True, slots=True)
class Only:
    """`rule` for one direction, or for some addresses of the other side: (host, port) or (host,)."""

    rule: Rule
    outgoing: bool | None = None
    addresses: tuple[tuple[Any, ...], ...] = ()
    _wanted: frozenset[tuple[Any, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_wanted", address_set(self.addresses))

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if self.outgoing is not None and datagram.outgoing is not self.outgoing:
            return None
        if self.addresses and not matches(datagram.address, self._wanted):
            return None
        return self.rule.decide(datagram, now_ns, rng)

    def release(self, now_ns: int, rng: Rng) -> list[Released]:
        return _release(self.rule, now_ns, rng)


@dataclass(frozen=True, slots=True)
class Between:
    """`rule` from `start_ns` (included) to `stop_ns` (not included; None: for ever), by the clock of `now_ns`.

    A Hold in it keeps what it has beyond the end; give the Hold an `until_ns` to release by the clock.
    """

    start_ns: int
    stop_ns: int | None
    rule: Rule

    def __post_init__(self) -> None:
        if self.stop_ns is not None and self.stop_ns < self.start_ns:
            raise ConfigurationError(f"a time that ends ({self.stop_ns} ns) before it starts ({self.start_ns} ns)")

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if now_ns < self.start_ns or (self.stop_ns is not None and now_ns >= self.stop_ns):
            return None
        return self.rule.decide(datagram, now_ns, rng)

    def release(self, now_ns: int, rng: Rng) -> list[Released]:
        return _release(self.rule, now_ns, rng)


class PayloadRule(Protocol):
    """May change a decoded payload in place, before its checksum is looked at; says whether it did."""

    def apply(self, view: memoryview, rng: Rng) -> bool: ...


@dataclass(slots=True)
class PayloadCorrupt:
    """Flip `bits` bits of decoded payloads, as broken memory or a broken proxy would: only the end-to-end checksum can
    notice.

    min_bytes, max_bytes: only payloads of such a length (both included) count. every: of these, every so-many-th, the
    n-th first. probability: each of those with this probability. times: so often in all.
    """

    probability: float = 1.0
    every: int = 1
    min_bytes: int = 1
    max_bytes: int | None = None
    times: int | None = None
    bits: int = 1
    _counted: int = field(default=0, init=False, repr=False, compare=False)
    _done: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_probability(self.probability)
        check_least("every", self.every, 1)
        check_least("min_bytes", self.min_bytes, 1)
        check_least("times", self.times or 0, 0)
        if self.max_bytes is not None and self.max_bytes < self.min_bytes:
            raise ConfigurationError(f"no length lies between {self.min_bytes} and {self.max_bytes} bytes")
        if not 1 <= self.bits <= 64:
            raise ConfigurationError(f"bits are 1 to 64, not {self.bits}")

    def apply(self, view: memoryview, rng: Rng) -> bool:
        size = len(view)
        if size < self.min_bytes or (self.max_bytes is not None and size > self.max_bytes):
            return False
        self._counted += 1
        if self._counted % self.every or (self.times is not None and self._done >= self.times):
            return False
        if rng.random() >= self.probability:
            return False
        self._done += 1
        flip_bits(view, self.bits, rng)
        return True


@dataclass(slots=True, eq=False)
class Installed:
    """A rule in force; `remove` ends it. Also a context manager.

    release: let go what the rule keeps (Hold), which goes on without an opinion; `remove` does so too.
    """

    rule: Rule
    _faults: Faults
    stats: RuleStats = field(default_factory=RuleStats)

    @property
    def decided(self) -> int:
        """Datagrams that it decided."""
        return self.stats.decided

    def release(self) -> None:
        self._faults.free(self)

    def remove(self) -> None:
        self._faults.rules = [other for other in self._faults.rules if other is not self]
        self.release()

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


@dataclass(slots=True, eq=False)
class InstalledPayload:
    """A payload rule in force; `remove` ends it. seen: payloads shown to it, changed: which it changed."""

    rule: PayloadRule
    _faults: Faults
    seen: int = 0
    changed: int = 0

    def remove(self) -> None:
        self._faults.payload_rules = [other for other in self._faults.payload_rules if other is not self]

    def __enter__(self) -> InstalledPayload:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


@dataclass(slots=True)
class Faults:
    """The rules of one endpoint (or of one link of a simulator). Nothing here may be called from another thread than
    the one that carries the deliveries out.

    payload_fault: if set, may change a decoded payload before its checksum is looked at, ahead of `payload_rules`.
    wake: called when `released` has something to give; set by the part that carries out deliveries.
    """

    rng: Rng
    rules: list[Installed] = field(default_factory=list)
    payload_fault: Callable[[memoryview], None] | None = None
    payload_rules: list[InstalledPayload] = field(default_factory=list)
    wake: Callable[[], None] | None = field(default=None, repr=False)
    _freed: list[Installed] = field(default_factory=list, init=False, repr=False)

    def add(self, rule: Rule) -> Installed:
        installed = Installed(rule, self)
        self.rules = [*self.rules, installed]
        return installed

    def add_payload(self, rule: PayloadRule) -> InstalledPayload:
        installed = InstalledPayload(rule, self)
        self.payload_rules = [*self.payload_rules, installed]
        return installed

    def decide(self, datagram: Datagram, now_ns: int) -> list[Delivery]:
        """Return the deliveries of one datagram. What `released` has comes before them."""
        for installed in self.rules:
            deliveries = installed.rule.decide(datagram, now_ns, self.rng)
            installed.stats.count(datagram, deliveries)
            if deliveries is not None:
                return deliveries
        return [Delivery(datagram.data)]

    def released(self, now_ns: int) -> list[Released]:
        """Return the datagrams that were kept and are free now, in order, and the deliveries of each."""
        freed, self._freed = self._freed, []
        return [each for installed in freed for each in _release(installed.rule, now_ns, self.rng)]

    def free(self, installed: Installed) -> None:
        """Let go what an installed rule keeps."""
        if hasattr(installed.rule, "release"):
            self._freed.append(installed)
            if self.wake is not None:
                self.wake()

    def apply_payload(self, view: memoryview) -> None:
        if self.payload_fault is not None:
            self.payload_fault(view)
        for installed in self.payload_rules:
            installed.seen += 1
            installed.changed += installed.rule.apply(view, self.rng)
