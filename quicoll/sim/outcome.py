"""Settings of a simulated cluster, and the outcome of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quicoll.checks import MAX_ADDRESSES, MAX_LANES
from quicoll.errors import LocalError
from quicoll.sim.translators import translators
from quicoll_transport.quic.terms import CONTROLLERS, PARITY_MODES
from quicoll_transport.sim import AccessLink, Conditions

if TYPE_CHECKING:
    from quicoll.sim.errors import RunFailed

__all__ = ["Outcome", "Settings"]

_LONGEST = 64 << 20  # bytes of a message of the built-in workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a simulated cluster. Times are seconds of simulated time.

    Attributes:
        ranks: Workers at the start, the world size of the first view.
        spares: More workers, that stand by. With any, no view has more than `ranks` ranks.
        warm_spares: How many of them are kept warm.
        lost_after: As for `quicoll.join`.
        timeout: As for `quicoll.join`.
        join_timeout: As for `quicoll.join`.
        hold_timeout: As for `quicoll.join`.
        chunk_bytes: As for `quicoll.join`.
        state_check_every: As for `quicoll.join`.
        learn_from_bytes: As for `quicoll.join`.
        congestion, parity: As for `quicoll.join`.
        coordinators: 1 has its journal on its own disk; 2 or 3 share one in a database, and take over from each other.
        lease: As for `quicoll coordinator`, where there are several.
        sites: The site of each worker; () for no sites.
        hosts: The host of each worker; those of one host share its memory, while all of a view are there. () for a host
            of its own for each.
        lanes: As for `quicoll.join`; each a simulated process.
        paths: Addresses of each host, each in a network of its own.
        engine_processes: How many workers, the last ones, have their engine in a process of its own.
        lane_access: The access link of each worker's lanes, by their number, as if each had a provider of its own; ()
            for none.
        nats: The kind of address translator that each worker is behind, one of its own: "full-cone", "restricted-cone",
            "port-restricted-cone", "symmetric"; "0", the number of an earlier worker, for the one that this is behind;
            "" for none. () for no translators.
        nat_lifetime: How long a mapping of theirs lives that nothing goes out by.
        relay: Who passes on datagrams between workers that cannot reach each other: "" for the coordinator, "none" for
            nobody, "own" for a process on a host of its own, "relay".
        tiers: Whether the built-in workload changes sets of tiers and shares pieces of state.
        long_bytes: Of the long messages that the built-in workload sends in some of its steps; 0 for none.
        conditions: Of every path.
        access: The access link of each worker's host, by its number, which all its paths share; the last one is that of
            all further workers too. () for none: then paths share nothing.
        restart_after: Time until a process that ended by an error is started again.
        recovery: After a heal every rank has to commit within it.
        limit: Of the whole run.
    Raises:
        LocalError: A value is out of its range.
    """

    ranks: int = 4
    spares: int = 0
    warm_spares: int = 0
    lost_after: float = 1.0
    timeout: float = 20.0
    join_timeout: float = 60.0
    hold_timeout: float = 60.0
    chunk_bytes: int = 1 << 20
    state_check_every: int = 100
    learn_from_bytes: int = 64 << 20
    congestion: str = "cubic"
    parity: str = "auto"
    coordinators: int = 1
    lease: float = 2.0
    sites: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    lanes: int = 0
    engine_processes: int = 0
    paths: int = 1
    lane_access: tuple[AccessLink, ...] = ()
    nats: tuple[str, ...] = ()
    nat_lifetime: float = 120.0
    relay: str = ""
    tiers: bool = False
    long_bytes: int = 0
    conditions: Conditions = field(default_factory=Conditions)
    access: tuple[AccessLink, ...] = ()
    restart_after: float = 1.0
    recovery: float = 60.0
    limit: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 256:
            raise LocalError(f"a simulated cluster has 1 to 256 ranks, not {self.ranks}")
        if not 1 <= self.coordinators <= 3:
            raise LocalError(f"a simulated cluster has 1 to 3 coordinators, not {self.coordinators}")
        if self.parity not in PARITY_MODES:
            raise LocalError(f"parity is {' or '.join(PARITY_MODES)}, not {self.parity!r}")
        if self.congestion not in CONTROLLERS:
            raise LocalError(f"congestion control is one of {', '.join(CONTROLLERS)}, not {self.congestion!r}")
        if not 0.1 <= self.lease < 3600:
            raise LocalError(f"a lease runs for a tenth of a second to an hour, not for {self.lease!r} s")
        if not 0 <= self.warm_spares <= self.spares <= 16:
            raise LocalError(f"not 0 <= warm_spares {self.warm_spares} <= spares {self.spares} <= 16")
        for what in ("sites", "hosts"):
            names: object = getattr(self, what)
            if not isinstance(names, tuple) or not all(isinstance(name, str) and name for name in names):
                raise LocalError(f"{what} are a tuple of names, not {names!r}")
            if names and len(names) != self.ranks:
                raise LocalError(f"{len(names)} {what} for {self.ranks} ranks")
        if not 0 <= self.lanes <= MAX_LANES:
            raise LocalError(f"a rank has 0 to {MAX_LANES} lanes, not {self.lanes}")
        if not 0 <= self.engine_processes <= self.ranks + self.spares:
            raise LocalError(f"{self.engine_processes} engines in processes of their own for {self.ranks} ranks")
        if not 1 <= self.paths <= MAX_ADDRESSES:
            raise LocalError(f"a host has 1 to {MAX_ADDRESSES} addresses, not {self.paths}")
        if self.paths > 1 and self.nats:
            raise LocalError("hosts behind address translators have one address in a simulation")
        if not 0 <= self.long_bytes <= _LONGEST:
            raise LocalError(f"long messages have 0 to {_LONGEST} bytes, not {self.long_bytes}")
        translators(self.nats)
        if not 0.1 <= self.nat_lifetime <= 86400:
            raise LocalError(f"a mapping lives for a tenth of a second to a day, not for {self.nat_lifetime!r} s")
        if self.relay not in ("", "none", "own"):
            raise LocalError(f"the relay is '', 'none' or 'own', not {self.relay!r}")
        for what in ("access", "lane_access"):
            links: object = getattr(self, what)
            if not isinstance(links, tuple) or not all(isinstance(each, AccessLink) for each in links):
                raise LocalError(f"{what} is a tuple of AccessLink(...), not {links!r}")
        if len(self.lane_access) > self.lanes:
            raise LocalError(f"{len(self.lane_access)} access links for {self.lanes} lanes")
        if len(self.access) > self.ranks + self.spares:
            raise LocalError(f"{len(self.access)} access links for {self.ranks + self.spares} workers")
        if len(self.nats) > self.ranks + self.spares:
            raise LocalError(f"{len(self.nats)} address translators for {self.ranks + self.spares} workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        seed: Its seed.
        error: None if all is well.
        injected: Number of faults by kind: of scheduled ones the events carried out, without those that only end others
            (heal, repair, ...); of the network's the datagrams.
        committed: Steps that the coordinator committed.
        aborted: Steps that it aborted.
        views: Views that it installed.
        virtual_s: Simulated seconds.
        wall_s: Real seconds.
        digest: Of the trace.
        events: Number of events in it.
        results: What the workers returned, by rank.
    """

    seed: int
    error: RunFailed | None
    injected: dict[str, int]
    committed: int
    aborted: int
    views: int
    virtual_s: float
    wall_s: float
    digest: str
    events: int
    results: tuple[Any, ...] = ()

    @property
    def ok(self) -> bool:
        return self.error is None
