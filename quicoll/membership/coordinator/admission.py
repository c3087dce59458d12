"""Whether nodes are enough for a view, and whether a node can take part at all: pure functions that explain a "no"."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from quicoll.membership.view import has_quorum

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.messages import Join

__all__ = ["differs", "join_refusal", "name_list", "shortfall"]


def shortfall(nodes: Sequence[str], *, history: History, config: CoordinatorConfig) -> str:
    """Return why these nodes are too few for a view, "" if they are not.

    The first view needs `world_size` nodes, or fewer where an operator has asked for fewer; so does one after all nodes
    have left. Every other needs a quorum of the nodes of the last view that have not left.
    """
    base = history.base
    first = config.world_size if history.wanted is None else min(config.world_size, history.wanted)
    if not base and len(nodes) < first:
        return f"{len(nodes)} of {first} nodes are here{': ' if nodes else ''}{name_list(nodes)}"
    if base and not has_quorum(nodes, base):
        missing = [node for node in base if node not in nodes]
        here = len(base) - len(missing)
        return f"no quorum: {here} of the last view's {len(base)} nodes are here; without {name_list(missing)}"
    if len(nodes) < config.min_world_size:
        return f"{len(nodes)} nodes are here, a view needs {config.min_world_size}"
    return ""


def join_refusal(node: str, join: Join, *, history: History, config: CoordinatorConfig) -> str:
    """Return why a node cannot take part, whatever comes later; "" if it can.

    A journal that knows less than a member was lost, restored from a copy, or is another job's. To go on with it would
    commit steps a second time. Only a new journal takes a member's step, as the checkpoint to go on from.

    The world size says what the first view waits for, so nodes of that view have to agree on it with the coordinator.
    A node that comes to a job at work may have any: it was started for the size that the job has, or shall have.
    """
    if config.nodes and not any(fnmatchcase(node, pattern) for pattern in config.nodes):
        return f"{node} is none of the nodes that may join: {name_list(config.nodes)}"
    if not history.base and join.world_size not in (None, config.world_size):
        return f"the coordinator was started for world size {config.world_size}, not {join.world_size}"
    if not join.adopts and differs(join, config=config):
        return (
            f"the coordinator's lost_after is {_seconds(config.lost_after_ns)}, this node's "
            f"{_seconds(join.lost_after_ns)}; set both alike, or leave the node's out"
        )
    if join.seed is not None and join.seed != history.seed:
        return f"the job's seed is {history.seed}, this node's {join.seed}; set both alike, or leave the node's out"
    if config.insists_on_vote_timeout and (contradiction := _vote_contradiction(join, config=config)):
        return contradiction
    if history.view is not None and join.committed_step > history.committed_step:
        return f"the node holds step {join.committed_step}, the journal ends at {history.committed_step}"
    if join.doubt is not None and join.doubt[0] > history.last_view_id:
        view_id, step = join.doubt
        return f"the node is in doubt of step {step} in view {view_id}, of which the journal knows nothing"
    return ""


def differs(join: Join, *, config: CoordinatorConfig) -> bool:
    """Whether node and coordinator have different values of a setting that they have to share."""
    return None is not join.lost_after_ns != config.lost_after_ns is not None


def _vote_contradiction(join: Join, *, config: CoordinatorConfig) -> str:
    """Return which settings of a node contradict the deadline for votes, "" if none does.

    Votes are waited for from the first one on. Where a collective may take longer, the wait ends for the vote of a rank
    that is still inside of it, and blames that rank; where a rank waits less long for the decision, it takes itself for
    cut off while the others still vote.
    """
    votes = f"the coordinator waits {_seconds(config.vote_timeout_ns)} for votes (--vote-timeout)"
    if join.timeout_ns is not None and join.timeout_ns > config.vote_timeout_ns:
        return f"{votes}, this node's timeout is {_seconds(join.timeout_ns)}: it has to be no longer"
    if join.hold_timeout_ns is not None and join.hold_timeout_ns <= config.vote_timeout_ns:
        return f"{votes}, this node's hold_timeout is {_seconds(join.hold_timeout_ns)}: it has to be longer"
    return ""


def _seconds(duration_ns: int | None) -> str:
    return f"{(duration_ns or 0) / 1e9:.12g} s"


def name_list(nodes: Iterable[str]) -> str:
    """Return names for a message to people, few enough to be read."""
    listed = list(nodes)
    return ", ".join(listed) if len(listed) <= 8 else f"{', '.join(listed[:8])} and {len(listed) - 8} more"
