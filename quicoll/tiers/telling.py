"""Each rank tells all others something, and reads what they have told: for tiers and for shared state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from quicoll.errors import LocalError, PeerError

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.membership.view import View

__all__ = ["exchanged", "told"]

T = TypeVar("T")


async def exchanged(group: Group, mine: T, *, view: View, what: str, timeout: float | None = None) -> list[T]:
    """Tell all ranks of a view something, and return what each of them has told, by rank.

    Args:
        group: All ranks. Every one of them calls this.
        mine: What this rank tells: a msgspec.Struct.
        view: Their view, for errors.
        what: It is told of, for errors.
        timeout: Seconds; None takes the job's.
    Raises:
        PeerError: A rank has told what cannot be.
        QuicollError: As any collective.
    """
    return told(type(mine), await group.all_gather_object(mine, timeout=timeout), view=view, what=what)


def told(kind: type[T], values: Sequence[object], *, view: View, what: str) -> list[T]:
    """Read what ranks have told, by rank.

    Args:
        kind: A msgspec.Struct that each should be.
        values: As they came.
        view: The view, for errors.
        what: They tell of, for errors.
    Raises:
        PeerError: One is malformed.
    """
    found = []
    for rank, value in enumerate(values):
        try:
            found.append(msgspec.convert(value, kind, builtin_types=(bytes,)))
        except (msgspec.ValidationError, LocalError) as error:
            raise PeerError(
                f"tells what cannot be of {what}: {error}", rank=rank, node=view.nodes[rank], view=view.view_id
            ) from error
    return found
