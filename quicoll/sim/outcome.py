"""What a simulated cluster is given, and what comes of its run."""

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
    """A cluster's settings. Seconds of simulated time, bytes.

    ranks: workers at the start, the world size of the first view. lost_after, timeout, join_timeout, hold_timeout,
    chunk_bytes: as for `quicoll.join`. sites: the site of each of these workers; none has one by default. conditions:
    every path's. restart_after: until a process that ended by an error is started again. recovery: after a heal every
    rank commits within it. limit: of the whole run.
    """

    ranks: int = 4
    lost_after: float = 1.0
    timeout: float = 20.0
    join_timeout: float = 60.0
    hold_timeout: float = 60.0
    chunk_bytes: int = 1 << 20
    sites: tuple[str, ...] = ()
    conditions: Conditions = field(default_factory=Conditions)
    restart_after: float = 1.0
    recovery: float = 60.0
    limit: float = 600.0

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= 256:
            raise LocalError(f"a simulated cluster has 1 to 256 ranks, not {self.ranks}")
        sites: object = self.sites
        if not isinstance(sites, tuple) or not all(isinstance(site, str) and site for site in sites):
            raise LocalError(f"sites are a tuple of names, not {sites!r}")
        if self.sites and len(self.sites) != self.ranks:
            raise LocalError(f"{len(self.sites)} sites for {self.ranks} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a run.

    error: None if all is well. injected: faults by kind; of scheduled ones the events that were carried out, without
    those that only end others (heal, repair, ...); of the network's the datagrams.
    committed, aborted, views: by the coordinator. virtual_s, wall_s: simulated and real seconds. digest: of the trace.
    results: what the workers returned, by rank.
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
