"""The coordinator's settings."""

from __future__ import annotations

from dataclasses import dataclass

from quicoll.errors import LocalError
from quicoll.membership.view import MAX_INT, MAX_MEMBERS

__all__ = ["CoordinatorConfig"]

_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """Raises LocalError for settings that cannot work. Times are nanoseconds.

    Attributes:
        world_size: Nodes of the first view.
        min_world_size: Least nodes of every view.
        max_world_size: Most nodes of every view; those beyond stand by and take the places of those that go.
        warm_spares: How many of those that stand by are kept warm (coordinator/spares.py).
        nodes: Who may join: names, or patterns with * and ?; empty lets in every node with a certificate of the job.
        seed: The job's; None takes the journal's.
        forget: Nodes of the last view that an operator gives up (coordinator/forgetting.py).
        forget_after_ns: How long these are given to join.
        lost_after_ns: Silence after which a member is lost. A node that insists on another one is refused; None lets
            each have its own.
        propose_timeout_ns: A member that neither confirms nor declines a proposal for so long is left out. Has to be
            longer than a member takes to form its links.
        gather_ns: From the first report of a failure to the decision; about as long as detectors differ in seeing the
            same loss.
        settle_ns: Grace for nodes of the last view that are missing although there is a quorum.
        quiet_ns: Without an open step for so long, the boundary is taken to be one on every member; about a round trip.
        vote_timeout_ns: From the first vote of a step to the last; the members that are late are left out. Has to be
            longer than ranks may differ in the work of a step.
        insists_on_vote_timeout: Whether a node is refused that insists on settings which contradict it: a collective
            that may take longer, or a wait for the decision that ends sooner.
        relay: What members are told of the job's relay, as in Welcome.
        retry_min_ns: Least back-off of a node that was left out.
        retry_max_ns: Most back-off of a node that was left out; one that cannot show that it reaches the others is
            tried after so long.
    """

    world_size: int
    min_world_size: int = 1
    max_world_size: int = MAX_MEMBERS
    warm_spares: int = 0
    nodes: tuple[str, ...] = ()
    seed: int | None = None
    forget: tuple[str, ...] = ()
    forget_after_ns: int = 10 * _SECOND
    lost_after_ns: int | None = None
    propose_timeout_ns: int = 20 * _SECOND
    gather_ns: int = _SECOND // 2
    settle_ns: int = 5 * _SECOND
    quiet_ns: int = _SECOND // 4
    vote_timeout_ns: int = 300 * _SECOND
    insists_on_vote_timeout: bool = False
    relay: str = ""
    retry_min_ns: int = _SECOND
    retry_max_ns: int = 30 * _SECOND

    def __post_init__(self) -> None:
        if not 1 <= self.min_world_size <= self.world_size <= self.max_world_size <= MAX_MEMBERS:
            raise LocalError(
                f"not 1 <= min_world_size {self.min_world_size} <= world_size {self.world_size}"
                f" <= max_world_size {self.max_world_size} <= {MAX_MEMBERS}"
            )
        if not 0 <= self.warm_spares <= MAX_MEMBERS:
            raise LocalError(f"warm_spares is 0 to {MAX_MEMBERS}, not {self.warm_spares}")
        if self.seed is not None and not 0 <= self.seed <= MAX_INT:
            raise LocalError(f"seed {self.seed} is not in 0..2**63-1")
        if self.lost_after_ns is not None and self.lost_after_ns <= 0:
            raise LocalError("lost_after_ns has to be above 0")
        if min(self.propose_timeout_ns, self.vote_timeout_ns, self.retry_min_ns) <= 0:
            raise LocalError("propose_timeout_ns, vote_timeout_ns and retry_min_ns have to be above 0")
        if self.forget_after_ns <= 0:
            raise LocalError("forget_after_ns has to be above 0")
        if min(self.gather_ns, self.settle_ns, self.quiet_ns) < 0 or self.retry_max_ns < self.retry_min_ns:
            raise LocalError("gather_ns, settle_ns and quiet_ns cannot be below 0, nor retry_max_ns below retry_min_ns")
