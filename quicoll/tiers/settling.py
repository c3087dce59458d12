"""What the ranks of a view make of what each has told of its pieces: pure functions, which all call with the same.

    summary    from each rank: a digest of all its versions, its horizon, and the last step that it knows of
    listing    from each rank, where the digests differ: its versions
    newest     of each piece the newest version that counts: what all ranks have when this is over
    lack       from each rank: what it could not get
    horizon    the one to which all ranks go then: see quicoll.tiers.pieces

What counts. All that ranks with the newest horizon list. Of a rank that is behind, what is of that horizon's step or
later, and what has a name that they list; the rest may have been deleted and forgotten, and the rank lets it go. What
it gave to nobody it has written anew before it told its listing.

When deletions are forgotten. All ranks hold `newest` when each has said that it lacks nothing. From then on no rank of
the view takes anything older back, and ranks that were not in it are behind. So all deletions in it may be forgotten
that are older than the last step that every rank had committed: whoever writes a name anew writes it of that step or
later, and so newer than the deletion. Where the exchange ends on some ranks only, these are ahead, and the others
follow: no rank has to know what another one has heard last.

A horizon is made once: its step is later than that of any horizon that was told, and views are numbered. Two views of
which each lacks a rank of the other can make one of the same step, and then it is told apart by its view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec

from quicoll.checks import MAX_NAME
from quicoll.errors import LocalError, PeerError
from quicoll.tiers.pieces import MAX_COUNT, MAX_PIECES, Horizon, PieceEntry, newest_entries

if TYPE_CHECKING:
    from quicoll.membership.view import View

__all__ = [
    "MAX_LACK",
    "PieceLack",
    "PieceListing",
    "PieceSummary",
    "Settlement",
    "newest_horizon",
    "next_horizon",
    "settlement",
]

MAX_LACK = 200
"""Characters in which a rank says why it lacks a piece."""

_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class PieceSummary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """state: the name of the shared state. digest, horizon: of its store. step: the last that is known as committed."""

    state: _Name
    digest: Annotated[bytes, msgspec.Meta(max_length=16)]
    horizon: Horizon
    step: Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class PieceListing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All versions of a store, deletions as well."""

    entries: Annotated[tuple[PieceEntry, ...], msgspec.Meta(max_length=MAX_PIECES)]


class PieceLack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank lacks. pieces: their names. reason: of the first of them."""

    pieces: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_PIECES)]
    reason: Annotated[str, msgspec.Meta(max_length=MAX_LACK)] = ""


@dataclass(frozen=True, slots=True)
class Settlement:
    """What follows from listings.

    newest: what all ranks have at the end. holders: the nodes that have just this version, by name. known: all that
    ranks at `horizon` have, by which those that are behind settle. horizon: the newest that any rank has told.
    """

    newest: Mapping[str, PieceEntry]
    holders: Mapping[str, Sequence[str]]
    known: Mapping[str, PieceEntry]
    horizon: Horizon

    def kept(self, after: Horizon) -> dict[str, PieceEntry]:
        """Return what is left when all have gone to a horizon: all but deletions that are older."""
        return {
            name: entry
            for name, entry in self.newest.items()
            if not (entry.deleted and entry.version.step < after.step)
        }


def newest_horizon(summaries: Sequence[PieceSummary], view: View, known_step: int) -> Horizon:
    """Return the newest horizon that any rank has told.

    Args:
        summaries: Of all ranks, by rank.
        view: The view.
        known_step: The last step that this rank knows to be committed. No rank of the view can have a later horizon,
            and a false one would keep all from forgetting anything again.
    Raises:
        LocalError: The ranks name different states. All of them raise it.
        PeerError: A horizon cannot be.
    """
    names = {summary.state: None for summary in summaries}
    if len(names) > 1:
        raise LocalError(f"the ranks make different states strong: {', '.join(sorted(names))}")
    for rank, summary in enumerate(summaries):
        if summary.horizon.step > known_step or summary.horizon.view > view.view_id:
            raise PeerError(
                f"has forgotten deletions up to step {summary.horizon.step} of view {summary.horizon.view}; step "
                f"{known_step} is the last one that was committed",
                rank=rank,
                node=view.nodes[rank],
                view=view.view_id,
            )
    return max(summary.horizon for summary in summaries)


def next_horizon(summaries: Sequence[PieceSummary], newest: Mapping[str, PieceEntry], view: View) -> Horizon | None:
    """Return the horizon to which all ranks can go when all hold the same; None where nothing is to be forgotten.

    Args:
        summaries: Of all ranks, by rank.
        newest: What they hold.
        view: The view.
    """
    step = min(summary.step for summary in summaries)
    old = any(entry.deleted and entry.version.step < step for entry in newest.values())
    if not old or step <= max(summary.horizon.step for summary in summaries):
        return None
    return Horizon(step, view.view_id)


def settlement(
    summaries: Sequence[PieceSummary], listings: Sequence[PieceListing], view: View, horizon: Horizon
) -> Settlement:
    """Return what follows from what all ranks have told.

    Args:
        summaries: By rank.
        listings: By rank.
        view: The view.
        horizon: The newest of the summaries.
    """
    ahead = [summary.horizon == horizon for summary in summaries]
    known = newest_entries(listing.entries for listing, first in zip(listings, ahead, strict=True) if first)
    counting = [
        [entry for entry in listing.entries if first or entry.name in known or entry.version.step >= horizon.step]
        for listing, first in zip(listings, ahead, strict=True)
    ]
    newest = newest_entries(counting)
    holders: dict[str, list[str]] = {name: [] for name in newest}
    for node, entries in zip(view.nodes, counting, strict=True):
        for entry in entries:
            if entry == newest[entry.name]:
                holders[entry.name].append(node)
    return Settlement(newest, holders, known, horizon)
