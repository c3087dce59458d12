"""Faults on purpose: seeded rules that judge datagrams, and decoded payloads.

A rule looks at one datagram and either has no opinion (None) or says what becomes of it: a list of deliveries, each
a delay and the bytes; an empty list drops it. The first rule with an opinion wins, in the order of installation.
`Faults.add` gives a handle that takes the rule away again. The same rules serve a real socket (FaultyIO) and a
simulated network. Randomness comes from one seeded generator, so that a run repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .errors import ConfigurationError

__all__ = ["Corrupt", "Cut", "Datagram", "Delay", "Delivery", "Drop", "Duplicate", "Faults", "Installed", "Rng", "Rule"]


@dataclass(frozen=True, slots=True)
class Datagram:
    """`address`: the other side's; `outgoing`: we send it."""

    data: bytes
    address: tuple[Any, ...]
    outgoing: bool


@dataclass(frozen=True, slots=True)
class Delivery:
    data: bytes
    delay_ns: int = 0


class Rng(Protocol):
    """What a rule needs of a generator; `random.Random(seed)` is one."""

    def random(self) -> float: ...
    def randrange(self, stop: int, /) -> int: ...


class Rule(Protocol):
    def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None: ...


def _probability(value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise ConfigurationError(f"a probability lies between 0 and 1, not {value}")
    return value


@dataclass(frozen=True, slots=True)
class Cut:
    """Drop everything until `until_ns` (None: for ever); only one direction, or only some addresses, if given."""

    until_ns: int | None = None
    outgoing: bool | None = None
    addresses: tuple[tuple[Any, ...], ...] = ()

    def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if self.until_ns is not None and now_ns >= self.until_ns:
            return None
        if self.outgoing is not None and datagram.outgoing is not self.outgoing:
            return None
        if self.addresses and datagram.address[:2] not in self.addresses:
            return None
        return []


@dataclass(frozen=True, slots=True)
class Drop:
    """Lose each datagram with this probability."""

    probability: float

    def __post_init__(self) -> None:
        _probability(self.probability)

    def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        return [] if rng.random() < self.probability else None


@dataclass(frozen=True, slots=True)
class Delay:
    """Deliver later: `delay_ns` plus up to `jitter_ns`, which reorders."""

    delay_ns: int
    jitter_ns: int = 0

    def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        return [Delivery(datagram.data, self.delay_ns + (rng.randrange(self.jitter_ns + 1) if self.jitter_ns else 0))]


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Deliver twice with this probability, the copy `later_ns` later."""

    probability: float
    later_ns: int = 1_000_000

    def __post_init__(self) -> None:
        _probability(self.probability)

    def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if rng.random() >= self.probability:
            return None
        return [Delivery(datagram.data), Delivery(datagram.data, self.later_ns)]


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Flip one bit of a datagram with this probability; QUIC's AEAD must reject it."""

    probability: float

    def __post_init__(self) -> None:
        _probability(self.probability)

    def judge(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if not datagram.data or rng.random() >= self.probability:
            return None
        changed = bytearray(datagram.data)
        bit = rng.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
        return [Delivery(bytes(changed))]


@dataclass(slots=True)
class Installed:
    """A rule in force; `remove` ends it. Also a context manager."""

    rule: Rule
    _faults: Faults
    judged: int = 0  # datagrams that it decided

    def remove(self) -> None:
        self._faults.rules = [other for other in self._faults.rules if other is not self]

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


@dataclass(slots=True)
class Faults:
    """The rules of one endpoint. `payload_fault`, if set, may change a decoded payload before its checksum is
    looked at; that is what the end-to-end checksum exists for."""

    rng: Rng
    rules: list[Installed] = field(default_factory=list)
    payload_fault: Callable[[memoryview], None] | None = None

    def add(self, rule: Rule) -> Installed:
        installed = Installed(rule, self)
        self.rules = [*self.rules, installed]
        return installed

    def judge(self, datagram: Datagram, now_ns: int) -> list[Delivery]:
        """What becomes of one datagram."""
        for installed in self.rules:
            deliveries = installed.rule.judge(datagram, now_ns, self.rng)
            if deliveries is not None:
                installed.judged += 1
                return deliveries
        return [Delivery(datagram.data)]

    def apply_payload(self, view: memoryview) -> None:
        if self.payload_fault is not None:
            self.payload_fault(view)
