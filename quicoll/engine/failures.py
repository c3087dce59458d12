"""Failures between errors, which callers get, and the words of the membership protocol: both ways, in one place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.errors import Corrupted, LocalError, Mismatch, Partitioned, PeerError, QuicollError

if TYPE_CHECKING:
    from quicoll.membership.member.actions import Deactivate
    from quicoll.membership.messages import FailureKind
    from quicoll.membership.view import View

__all__ = ["error_of_end", "failed_node", "kind_of"]

_KINDS: dict[FailureKind, type[QuicollError]] = {
    "mismatch": Mismatch,
    "corrupted": Corrupted,
    "differs": Corrupted,
}


def error_of_end(view: View, action: Deactivate) -> QuicollError:
    """Return the error that all ranks are given for a view that has ended."""
    kind = Partitioned if action.partitioned else _KINDS.get(action.kind, PeerError)
    node = action.culprit or (action.lost[0] if action.lost else "")
    return kind(action.cause, rank=view.rank_of(node), node=node, view=action.view_id, lost=action.lost)


def kind_of(error: QuicollError) -> FailureKind:
    """Return how the membership protocol calls a failure of this kind."""
    if isinstance(error, Corrupted) and error.odd is not None:
        return "differs"
    return next((kind for kind, known in _KINDS.items() if isinstance(error, known)), "failed")


def failed_node(view: View, error: QuicollError, own: str) -> str:
    """Return the node that caused an error, "" if no single one did.

    Args:
        view: The view that broke.
        error: What broke it.
        own: This rank's node, which caused what its own caller did wrong.
    """
    node = error.node if error.rank is None else view.members[error.rank].node
    return own if not node and isinstance(error, LocalError) else node
