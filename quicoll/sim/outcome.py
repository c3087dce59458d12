"""Settings of a simulated cluster, and the outcome of its run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError
from quicoll_transport.sim import Conditions

if TYPE_CHECKING:
    from quicoll.sim.errors import RunFailed

__all__ = ["Outcome", "Settings"]


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
        sites: The site of each worker; () for no sites.
        conditions: Of every path.
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
    sites: tuple[str, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    restart_after: float = 1.0
    recovery: float = 60.0
    limit: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 256:
            raise LocalError(f"a simulated cluster has 1 to 256 ranks, not {self.ranks}")
        if not 0 <= self.warm_spares <= self.spares <= 16:
            raise LocalError(f"not 0 <= warm_spares {self.warm_spares} <= spares {self.spares} <= 16")
        sites: object = self.sites
        if not isinstance(sites, tuple) or not all(isinstance(site, str) and site for site in sites):
            raise LocalError(f"sites are a tuple of names, not {sites!r}")
        if self.sites and len(self.sites) != self.ranks:
            raise LocalError(f"{len(self.sites)} sites for {self.ranks} ranks")


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
