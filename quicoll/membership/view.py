"""Views: who works together, in which order, from which committed step on.

A view is made by the coordinator alone and is the same value on every member: two members that act in view v hold
equal `View` objects, so whatever is derived from one (ranks, seeds, the shape of a reduction) needs no further
agreement. Ranks are 0..n-1 in the order of (rank hint where one was given, natural order of the node name), so the
same nodes get the same ranks whatever the order in which they came.

The bounds below hold for everything a peer can make us store; they are part of the types, so that a value which
breaks one can be neither built from the wire nor written to the journal.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from typing import Annotated

import msgspec

from quicoll.checks import MAX_ADDRESSES, MAX_MEMBERS, MAX_NAME, MAX_WHOLE

__all__ = [
    "MAX_INT",
    "MAX_MEMBERS",
    "MAX_NAME",
    "Incarnation",
    "Member",
    "MemberAddresses",
    "NodeName",
    "SeedValue",
    "StepNumber",
    "View",
    "ViewId",
    "WorldSize",
    "has_quorum",
    "natural_key",
    "rank_key",
]

MAX_INT = MAX_WHOLE

NodeName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Incarnation = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
ViewId = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
StepNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
SeedValue = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT)]
WorldSize = Annotated[int, msgspec.Meta(ge=1, le=MAX_MEMBERS)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]  # RFC 1035, 2.3.4: a name has at most 255 octets
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
MemberAddresses = Annotated[tuple[tuple[_Host, _Port], ...], msgspec.Meta(max_length=MAX_ADDRESSES)]
_Site = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class Member(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One member of a view.

    rank: 0..world_size-1. node: the name in its certificate. incarnation: of its process. addresses: where the others
    reach it, best first. seen_at: where the coordinator sees it send from, if that is none of these: then it is behind
    NAT, and is reached there by whom it has sent to (quicoll.engine.ways). site: "" or the place whose nodes are near
    each other. committed_step: the last step whose result it is known to hold; one that is behind the view's
    `committed_step` needs state from one that is not.
    spare: it is here to be told what the state is made of; no step begins in a view with one, after which it stands by.
    place: of a spare; after so many of the ranks it comes in their order. So it gets this rank when one of the others
    is lost, and the rank before when one of these is.
    """

    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)]
    node: NodeName
    incarnation: Incarnation
    addresses: MemberAddresses = ()
    seen_at: tuple[_Host, _Port] | None = None
    site: _Site = ""
    committed_step: StepNumber = 0
    spare: bool = False
    place: Annotated[int, msgspec.Meta(ge=0, lt=MAX_MEMBERS)] = 0

    @property
    def host(self) -> str:
        """Where it is reached, without the port; "" where it has no address."""
        return self.addresses[0][0] if self.addresses else ""


class View(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A membership; `view_id` grows with every change and every failed step, and is never used twice.

    members: by rank. seed: the job's one global seed. committed_step: the last committed step when the view was made,
    so its first step is `committed_step + 1`. committed_view: the view which committed that step, 0 if none did.
    min_world_size: the coordinator's setting, below which no view goes. parting: members that are about to leave; no
    step is begun in a view that has some, they hand over what they alone hold.
    """

    view_id: Annotated[int, msgspec.Meta(ge=1, le=MAX_INT)]
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    seed: SeedValue
    committed_step: StepNumber
    committed_view: ViewId
    min_world_size: WorldSize = 1
    parting: Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()

    def __post_init__(self) -> None:
        # msgspec turns a ValueError raised here into its own when it decodes, so this also guards the wire.
        if any(member.rank != rank for rank, member in enumerate(self.members)):
            raise ValueError("members are not in the order of ranks 0..n-1")
        if len({member.node for member in self.members}) != len(self.members):
            raise ValueError("a node is in the view twice")
        if any(member.spare for member in self.members[: self.workers]) or not self.workers:
            raise ValueError("spares have the last ranks, and are not alone")
        if any(member.place > (self.workers if member.spare else 0) for member in self.members):
            raise ValueError("a spare comes after more ranks than there are")
        if self.committed_view >= self.view_id:
            raise ValueError("the view that committed last is not an earlier one")

    @property
    def world_size(self) -> int:
        return len(self.members)

    @cached_property
    def workers(self) -> int:
        """How many of the members, the first ones, are no spares."""
        return sum(not member.spare for member in self.members)

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Node names by rank."""
        return tuple(member.node for member in self.members)

    def member(self, node: str) -> Member | None:
        """The member called `node`, None if it is not in this view."""
        rank = self._ranks.get(node)
        return None if rank is None else self.members[rank]

    def rank_of(self, node: str) -> int | None:
        """The rank of `node`, None if it is not in this view."""
        return self._ranks.get(node)

    def quorum(self, base: Iterable[str]) -> bool:
        """Return whether this view holds more than half of the nodes named in `base`."""
        return has_quorum(self.nodes, base)

    @cached_property
    def _ranks(self) -> dict[str, int]:
        return {node: rank for rank, node in enumerate(self.nodes)}


def has_quorum(nodes: Iterable[str], base: Iterable[str]) -> bool:
    """Return whether `nodes` hold more than half of `base`.

    Nodes count by name: a restarted one counts, a new one does not. So any two sets with a quorum of the same base
    have a node in common, and a minority can never go on by itself.
    """
    wanted = list(base)
    present = set(nodes)
    return 2 * sum(node in present for node in wanted) > len(wanted)


def natural_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Sort key in which "node-2" comes before "node-10"; total, so that no two names are equal."""
    parts: list[str | int] = []
    for index, part in enumerate(re.split(r"([0-9]+)", name)):
        # re.split gives text at even and digits at odd places, so a str is only ever compared with a str
        parts.append(int(part) if index % 2 else part)
    return tuple(parts), name


def rank_key(node: str, rank_hint: int | None) -> tuple[int, int, tuple[tuple[str | int, ...], str]]:
    """Sort key of ranks: those with a hint first, by hint; then by natural name."""
    return (1, 0, natural_key(node)) if rank_hint is None else (0, rank_hint, natural_key(node))
