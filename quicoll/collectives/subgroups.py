"""Division of a group: which rank goes where (`divide`), and the identity of what comes of it (`Scope`, `derived_id`).

    split of a group    every member brings (color, key). Those of one color are a sub-group, in the order of (key, rank
                        in the group that is split); a member without a color is in none. The meaning is that of
                        MPI_Comm_split (MPI 4.1, 7.4.2).
    subgroup of a group ranks that are told to each of its members, and a name; nobody else calls anything. The meaning
                        is that of MPI_Comm_create_group (MPI 4.1, 7.4.2), without a message: the id is derived from
                        the name and the ranks. Members that name others are in another group, whose operations the
                        deadline ends.
    sub-group           ranks of one view, numbered from 0 anew. It is split like any other group.

Identity without a counter that all ranks share. The messages of a group carry its id, and only members of it exchange
them. An id is derived (BLAKE2b, 61 bits) from the id of the group that was split, the number of the split among the
splits of that group in the view, and the color. Members agree on the first two because all of them called the same
splits in the same order, which the split itself compares, and on the third because they have it in common. A clash of
two ids could matter only to a rank that is in both groups; that rank knows both of them, and refuses the second
(`CallContext.claim` in quicoll.collectives.context). So no two groups of any rank ever have one id; what 61 bits make
unlikely is the refusal.

Why concurrent operations on overlapping groups cannot deadlock. An operation is (view, group, seq), with seq counted in
its group alone. It
    - takes nothing that another operation has to give back: lanes, memory and messages are its own; a link sends a
      message to memory that waits for it whatever else stands unclaimed (quicoll_transport.link.core, "granted");
    - ends when each of its members has issued it and their messages have arrived, and waits for nothing else.
Through the memory of one host each group has room of its own, in which only its own earlier calls are waited for; what
that needs where a rank has calls of more than 192 sub-groups under way is in quicoll.local.rooms.
So a set of operations that have been issued by all their members all end, in whatever order they were issued. What is
left is the program's own waiting: the ranks must not wait for each other's calls in a circle. It suffices that there is
one order of all operations, the same on all ranks, such that every rank awaits its own in it; or that a rank issues all
that the others may wait for before it awaits any (handles). Two ranks that call operations of two groups in opposite
order and await each before the next wait for each other: as anywhere, the deadline passes, PeerError says which rank
did not call what, and what it called instead, and the view ends for all.

Within one group the order of the calls is the identity, so it is the same on all its members, or Mismatch.

Failure. Whatever breaks an operation of a sub-group ends the view, for ranks outside of the sub-group too: they would
commit a step with ranks that cannot.

A sub-group belongs to the view in which it was made. Ranks are numbered anew in the next one, some may be gone and
others new; only the program knows what the division is for, so it has to say again which rank is in which sub-group.
Using it in another view is a LocalError. (`job.group` follows the job: "all ranks" means something in every view.)

The vote of a step. Results that are equal on all ranks have one digest, which all votes have in common. Results of a
sub-group are equal on its members alone, so the vote has one digest for each sub-group beside it, under the group's id;
the coordinator compares those of one id with each other (quicoll.membership.coordinator.ballot). Wrong bits on one
member of a sub-group keep the step from being committed anywhere, as everywhere else.

Everything here is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

__all__ = [
    "MAX_COLOR",
    "MAX_DEPTH",
    "MAX_KEY",
    "PIECES_DOWN",
    "PIECES_UP",
    "STATE",
    "TIERS",
    "WORLD",
    "Scope",
    "derived_id",
    "divide",
    "is_derived",
]

MAX_COLOR = (1 << 61) - 1
MAX_KEY = (1 << 60) - 1  # of a key's absolute value
MAX_DEPTH = 32  # splits of splits; bounds a group's name

_DERIVED = 1 << 61  # set in every derived id: clear of the few that are given


@dataclass(frozen=True, slots=True)
class Scope:
    """The identity of a group.

    name: "" for all ranks; of a sub-group what led to it, joined by "/": "number:color" for a split, or its name.
    ranks: of the view, by rank in the group; None: all, in every view. rank: this rank's number in it, where there are
    `ranks`. view_id: the view that it belongs to; None: any.
    watched: whether a rank that comes late to its operations is a straggler.
    """

    group_id: int
    name: str = ""
    ranks: tuple[int, ...] | None = None
    rank: int = 0
    view_id: int | None = None
    watched: bool = True

    @property
    def depth(self) -> int:
        """The number of splits that led to it."""
        return self.name.count(":")

    def sub(self, number: int, color: int, ranks: tuple[int, ...], rank: int, *, view_id: int) -> Scope:
        """The sub-group of this color that comes of split `number`, as its member `rank` sees it."""
        name = f"{self.name}/{number}:{color}" if self.name else f"{number}:{color}"
        return Scope(derived_id(self.group_id, "split", number, color), name, ranks, rank, view_id, self.watched)

    def named(self, name: str, ranks: tuple[int, ...], rank: int, *, view_id: int) -> Scope:
        """The sub-group that its members alone have agreed on, as its member `rank` sees it."""
        whole = f"{self.name}/{name}" if self.name else name
        return Scope(derived_id(self.group_id, "named", name, *ranks), whole, ranks, rank, view_id, self.watched)


WORLD = Scope(0)  # the users' collectives
STATE = Scope(1, "state", watched=False)  # the library's own, when a view begins: ranks begin when they are ready
TIERS = Scope(2, "tiers", watched=False)  # what ranks agree on of tiers and shared state, beside the users' collectives
PIECES_UP = Scope(3, "pieces up", watched=False)  # when a view begins; pieces of the state that go to a higher rank
PIECES_DOWN = Scope(4, "pieces down", watched=False)  # and to a lower one: what goes both ways between two is apart


def divide(chosen: Sequence[tuple[int | None, int]]) -> dict[int, tuple[int, ...]]:
    """Divide ranks by color.

    Args:
        chosen: (color, key) of each rank, by rank; the color may be None.
    Returns:
        The ranks that chose each color, in the order of (key, rank); by color, ascending.
    """
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, (color, key) in enumerate(chosen):
        if color is not None:
            members.setdefault(color, []).append((key, rank))
    return {color: tuple(rank for _, rank in sorted(members[color])) for color in sorted(members)}


def derived_id(parent: int, *what: str | int) -> int:
    """Derive the id of what belongs to a group: a sub-group, or the messages from one of its ranks to another.

    Args:
        parent: The id of the group.
        what: Tells it apart from all else that belongs to the group.
    Returns:
        The id, clear of those that are given.
    """
    state = blake2b("\0".join(map(str, (parent, *what))).encode(), digest_size=8)
    return _DERIVED | int.from_bytes(state.digest(), "big") >> 3


def is_derived(group_id: int) -> bool:
    """Return whether the id was derived: of a sub-group, or of messages between two ranks."""
    return bool(group_id & _DERIVED)
