"""How many ranks the job shall have, as an operator asks while it runs, and who leaves it for that.

    free       nobody has asked: every node that comes takes part, up to `max_world_size`
    asked      so many ranks are wanted (`Scaled`, in the journal). A view has no more of them than that; nodes beyond
               stand by. Some nodes of the job are named to leave, and stay at work until the others are enough
    settled    the view has just so many ranks, and nobody is left who was named

A later request takes the place of the one before; "asked" is for ever otherwise, so that a coordinator that is started
again goes on with it, and a node that comes later stands by instead of making the job larger than it was asked to be.

Who leaves: the nodes that the operator names, then those of the highest ranks, until so many are left as are wanted.
They are named when the request is taken, by node and not by rank, so that all who ask hear the same, and a restarted
coordinator goes on with the same ones. Only where a view had to have one more than are wanted, because that one alone
held the state (formation.py), is somebody named later, at the first boundary (`surplus`).

When: at a step boundary of an installed view, where none of its steps is open, as nodes come. Each is then taken out of
the base of quorums (`Left`), as if it had gone of its own will, and told to go (`Dismiss`, or in the decision of the
step). So a view may shrink below half at once: whoever is left is there and holds the state. That is looked at before
anything is written (`due`):

- as many are left as are wanted: where a node is named to leave for one that is still to come, it stays until then;
- one of those that stay is in the view and holds the last committed step;
- while others that stay in the view do not hold it yet, whoever does stays too: it hands it over, and the one from
  which they would get it otherwise may be lost just then;
- they are a quorum of what the base is then, and no fewer than `min_world_size`;
- no node of the view has ended its work: what is about to end is not made smaller.

Where ranks own parts of the state (`Candidate.owns`) nobody goes before others have them. The boundary then brings a
view of the same nodes in which those who go are named (`View.parting`), as it does for a node that asks for that
because it is to stop (`AskToLeave`). In it no step begins: the members redistribute what is owned, meet in a barrier,
and those who part leave. The first of them that says so (`Leave.parted`) says it for all, who are then let go at once.
Where the view ends before that, the next one has the same marks.

Failure cases:

the request is lost           nothing was written; the operator hears no answer and asks again
it comes twice                it says how many, not how many more: the second one changes nothing
while a view forms            it is taken, and waits for that view's first boundary. While there is none a view may have
                              all nodes of the last one, however many are wanted: fewer might be no quorum
a worker never comes          the view stays smaller; the operator is told how many are missing (`standing`)
a node dies before it left    its view ends as with any loss, and the next one is without it. It is still named: when it
                              comes back it is told to go
a node dies before it has      its view ends; the next one has what it owned from copies or a checkpoint, or the
 handed over                   members' error names what is lost
a node that parts never goes   its view stays, and waits for it, until it is lost or ends
a node dies while it leaves   it is in no view any more, and nobody waits for it
below min, above max          refused with both numbers; nothing changes
the coordinator ends          after the record: the next one goes on with it. Before: the operator asks again
ended between `Left` and      the node is named still, and joins anew; it is taken in where it is needed for a quorum,
`Scaled`, or before it told   and told to go at the next boundary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.admission import name_list
from quicoll.membership.coordinator.history import Left, Scaled

if TYPE_CHECKING:
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.coordinator.formation import Formation
    from quicoll.membership.coordinator.history import History
    from quicoll.membership.coordinator.roster import Candidate, Roster
    from quicoll.membership.view import View

__all__ = ["ScaleRefusal", "Standing", "due", "judge_request", "missing", "surplus"]


@dataclass(frozen=True, slots=True)
class ScaleRefusal:
    """The request changes nothing; `reason` is for people."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How far a request is.

    Attributes:
        world_size: Ranks that are wanted; None where nobody has asked.
        leave: Nodes that are still to leave.
        view_id: Of the installed view; 0 while there is none.
        nodes: Of that view, by rank.
        waiting_for: What is missing, for people; "" once the view stands as it was asked for.
    """

    world_size: int | None
    leave: tuple[str, ...]
    view_id: int
    nodes: tuple[str, ...]
    waiting_for: str


def judge_request(
    world_size: int | None, leave: tuple[str, ...], *, history: History, roster: Roster, config: CoordinatorConfig
) -> Scaled | ScaleRefusal:
    """Return what is to be recorded of a request, or why it cannot be met.

    Args:
        world_size: Ranks that are wanted; None: as many as there are, or were wanted before.
        leave: Nodes that shall leave.
        history: What the journal holds.
        roster: Connected nodes.
        config: The coordinator's settings.
    """
    base = history.base
    if world_size is None:
        world_size = history.wanted if history.wanted is not None else len(base) or config.world_size
    if world_size < config.min_world_size:
        return ScaleRefusal(f"{world_size} ranks are below --min-world-size {config.min_world_size}")
    if world_size > config.max_world_size:
        return ScaleRefusal(f"{world_size} ranks are above --max-world-size {config.max_world_size}")
    if history.ended:
        return ScaleRefusal(f"the job is done at step {history.final_step}")
    strange = [node for node in leave if node not in base and node not in roster]
    if strange:
        return ScaleRefusal(f"{name_list(strange)} cannot leave: not in the job")
    named = tuple(dict.fromkeys(leave))
    staying = [node for node in base if node not in named]
    surplus = tuple(reversed(staying[world_size:]))
    before = tuple(node for node in history.to_leave if node in base and node not in named + surplus)
    # Who was to leave before does so still, where so many are to leave: the request that was repeated says the same.
    kept = before if world_size == history.wanted else ()
    return Scaled(world_size, (*named, *surplus, *kept))


def surplus(history: History) -> Scaled | None:
    """Return what is to be recorded where the job has more ranks than are wanted and not so many are named to leave.

    Args:
        history: What the journal holds.
    """
    if history.wanted is None or history.finished:
        return None
    staying = [node for node in history.base if node not in history.to_leave]
    more = tuple(reversed(staying[history.wanted :]))
    return Scaled(history.wanted, (*history.to_leave, *more)) if more else None


def due(view: View, formation: Formation, roster: Roster, history: History, *, now_ns: int) -> list[Candidate]:
    """Return which connected nodes are to leave at this boundary of the installed view; see the head of this module."""
    if not history.to_leave or history.wanted is None or history.finished:
        return []
    named = [candidate for node in history.to_leave if (candidate := roster.get(node)) and not candidate.leaving]
    rest = formation.choose(history, now_ns=now_ns, without=[candidate.node for candidate in named])
    free = len(rest) + len(named) - history.wanted
    going = named[: max(free, 0)]
    members = [candidate for candidate in roster if candidate.node in view.nodes[: view.workers]]
    holders = [candidate for candidate in members if candidate.committed_step >= history.committed_step]
    if any(candidate not in holders and candidate not in going for candidate in members):
        going = [candidate for candidate in going if candidate not in holders]
    names = [candidate.node for candidate in going]
    if not going:
        return []
    after = history
    for node in names:
        if node in history.base:
            after = after.apply(Left(node))
    chosen = formation.choose(after, now_ns=now_ns, without=names)
    holds = any(view.rank_of(one.node) is not None and one.committed_step >= after.committed_step for one in chosen)
    return going if holds and not formation.shortfall(chosen, after) else []


def missing(view: View, history: History, roster: Roster) -> str:
    """Return what the installed view lacks to be as it was asked for, for people; "" if nothing.

    Args:
        view: The installed view.
        history: What the journal holds.
        roster: Connected nodes.
    """
    wanted = history.wanted
    if wanted is None:
        return ""
    parts = []
    if view.world_size < wanted:
        lacking = wanted - view.world_size
        has = "has" if lacking == 1 else "have"
        parts.append(f"{view.world_size} of {wanted} ranks are at work; {lacking} more {has} to join")
    going = [node for node in history.to_leave if node in roster or node in view.nodes]
    if going:
        when = f"once {wanted} others are there and hold the last step"
        parts.append(f"{name_list(going)} shall leave at a step boundary, {when}")
    if not parts and view.world_size > wanted:
        parts.append(f"{view.world_size} ranks are at work, {wanted} are wanted")
    return "; ".join(parts)
