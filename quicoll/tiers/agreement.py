"""How ranks agree on the next set of tiers: pure functions, which every rank calls with the same values.

    idle       no rank has proposed a set
    proposed   a rank holds one that it has not brought into a step yet: any rank, at any time
    chosen     in a step all ranks have told what they hold and propose (`TierBallot`); `choose_tiers` says which it is
    weighed    all ranks have said whether they can go over to it (`TierVerdict`); one that cannot refuses it for all
    voted      every rank's vote for the step covers both exchanges: they are results that all ranks have
    in force   the step was committed: on all ranks, at its boundary, before any of them begins the next step
    as before  the step was aborted, on all ranks; what was proposed is proposed again in the next attempt

Conflict. Proposals are for the number after that of the set in force. Of several sets for it the one of the lowest rank
is chosen; the same set from several ranks is one proposal. The others are refused and their proposers told: what they
were made for has passed, and who still wants them proposes anew, against the set that is in force then.

Invariants.
1. The set in force is a function of the step that was committed last, and the same on every rank that holds it. It
   changes in a commit's callback alone, or by a state that is handed over, of which it is a part (quicoll.tiers.tiers).
2. A set that is agreed names no node that was not in the view of its agreement.
3. Ranks that hold different sets agree on nothing: `choose_tiers` refuses, on all ranks, and names them.

Failures.
- A rank is lost, or the network is cut, in or after either exchange: the step is aborted or in doubt, as always. So is
  what was agreed: in doubt it is settled with the step, before the next one begins (quicoll.step.protocol).
- A rank refuses a set, or cannot say whether it can take it (`weigh` raises): refused for all, with its words.
- A rank was told something else than the others: the votes differ, and the step is committed nowhere.
- A peer's ballot is malformed: PeerError, naming it, before anything follows from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from quicoll.errors import LocalError, PeerError
from quicoll.tiers.tier_set import MAX_TIER_SET, TierSet

if TYPE_CHECKING:
    from quicoll.membership.view import View

__all__ = ["MAX_REASON", "RefusedTiers", "TierBallot", "TierChoice", "TierVerdict", "choose_tiers", "refusals"]

MAX_REASON = 512
"""Characters in which a rank says why it cannot go over to a set."""


class TierBallot(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank holds and proposes. held: the digest of its set. proposal: an encoded set; empty: none."""

    held: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    version: Annotated[int, msgspec.Meta(ge=0)]
    proposal: Annotated[bytes, msgspec.Meta(max_length=MAX_TIER_SET)] = b""


class TierVerdict(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Whether a rank can go over to the set that was chosen. reason: why not; empty: it can."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)] = ""


@dataclass(frozen=True, slots=True)
class RefusedTiers:
    """A set that does not come into force. ranks: who proposed it. reason: why not."""

    tier_set: TierSet
    ranks: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class TierChoice:
    """chosen: what all ranks may go over to; None where nothing can be. ranks: who proposed it."""

    chosen: TierSet | None = None
    ranks: tuple[int, ...] = ()
    refused: tuple[RefusedTiers, ...] = ()


def choose_tiers(current: TierSet, ballots: Sequence[TierBallot], view: View) -> TierChoice:
    """Return the set that all ranks may go over to.

    Args:
        current: The set in force on this rank.
        ballots: Of all ranks, by rank.
        view: The view of the step.
    Raises:
        LocalError: The ranks hold different sets. All of them raise it.
        PeerError: A proposal is malformed.
    """
    _demand_one_set(current, ballots, view)
    proposers: dict[TierSet, list[int]] = {}  # in the order of their lowest ranks
    for rank, ballot in enumerate(ballots):
        if ballot.proposal:
            proposers.setdefault(_proposed(ballot, rank, view), []).append(rank)
    chosen: TierSet | None = None
    refused = []
    for proposed, ranks in proposers.items():
        reason = _unfit(proposed, current, view)
        if not reason and chosen is not None:
            reason = f"{view.nodes[proposers[chosen][0]]} proposed another set in the same step, and has the lower rank"
        if reason:
            refused.append(RefusedTiers(proposed, tuple(ranks), reason))
        else:
            chosen = proposed
    return TierChoice(chosen, tuple(proposers[chosen]) if chosen is not None else (), tuple(refused))


def refusals(choice: TierChoice, verdicts: Sequence[TierVerdict], view: View) -> TierChoice:
    """Return what is left of a choice when all ranks have said whether they can go over to it.

    Args:
        choice: With a set that was chosen.
        verdicts: Of all ranks, by rank.
        view: The view of the step.
    """
    against = [f"{view.nodes[rank]}: {verdict.reason}" for rank, verdict in enumerate(verdicts) if verdict.reason]
    if choice.chosen is None or not against:
        return choice
    more = f", and {len(against) - 3} more" if len(against) > 3 else ""
    refused = RefusedTiers(choice.chosen, choice.ranks, "; ".join(against[:3]) + more)
    return TierChoice(None, (), (*choice.refused, refused))


def _demand_one_set(current: TierSet, ballots: Sequence[TierBallot], view: View) -> None:
    held: dict[tuple[int, bytes], list[str]] = {}
    for rank, ballot in enumerate(ballots):
        held.setdefault((ballot.version, ballot.held), []).append(view.nodes[rank])
    if len(held) > 1 or (current.version, current.digest) not in held:
        sides = "; ".join(f"version {version} on {', '.join(nodes)}" for (version, _), nodes in sorted(held.items()))
        raise LocalError(
            f"the ranks hold different sets of tiers ({sides}): let save give job.tiers.state(), and load give it to "
            "job.tiers.load_state(), so that every rank gets the set with the state"
        )


def _proposed(ballot: TierBallot, rank: int, view: View) -> TierSet:
    try:
        return TierSet.decode(ballot.proposal)
    except LocalError as error:
        raise PeerError(
            f"proposes what is no set of tiers: {error.message}", rank=rank, node=view.nodes[rank], view=view.view_id
        ) from error


def _unfit(proposed: TierSet, current: TierSet, view: View) -> str:
    """Why a set cannot follow the one in force in this view, whoever proposed it; "" if it can."""
    if proposed.version != current.version + 1:
        return f"it was made to be version {proposed.version}, and version {current.version} is in force"
    absent = proposed.absent(view)
    if absent:
        more = f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        return f"it names nodes that are not in view {view.view_id}: {', '.join(absent[:8])}{more}"
    return ""
