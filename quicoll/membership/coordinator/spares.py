"""Nodes beyond the most ranks of a view: they stand by, and some of them are kept warm.

A node that joins while all places are taken waits for one. Its program waits with it, in `quicoll.join`: it has no
view, and no state. A warm one (`warm_spares`) has both:

    cold     waits for a view; nothing is known of its state
    shown    in a view, with the rank after the last, as a spare (`Member.spare`). No step begins there: the ranks
             compare what their states are made of, and a holder of the state is named that teaches it
             (quicoll.state.learning). It steps out at once (`Learn`), and the others go on as before
    warm     stands by; it learns what changes, over links to all of them that are there. It has the first place that
             becomes free, in the next view, like any member that is behind
    at work  in a view as a rank

Its place. Ranks stand in the order of their hints and names, a spare that takes a place among them. The view in which
it is shown tells it after how many of the ranks that is (`Member.place`): the ranks' hints are known here alone. So the
blocks that it is kept warm with are those of the place that it gets, whichever rank is lost: that one, or the one
before it. Were it given the lost rank's place, and the others kept theirs, it would have to be warm for any of them,
with the blocks of all; as it is, those behind the lost rank move up by one, to blocks of which they have the copies.

Invariants: a spare counts neither for a quorum nor as a holder of the state; it takes no rank of another one, and no
place while the others need none; one at a time is shown, at a boundary of an installed view, after a step was
committed, and only where all places are taken.

Failure cases:

lost while it is shown        that view ends as with any loss; the next one is made without waiting for it
lost while it is warm         it is gone; another one that stands by is shown in its place
it learns no more             it says so (`Learned`), is cold, and is shown again after a pause that doubles: each time
(its teacher is gone)         costs the others two changes of the view
a place is free               it is proposed where it stands, cold or warm; warm ones first
the coordinator ends          all join the next one, and the spares are cold there
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quicoll.membership.coordinator.roster import Candidate

__all__ = ["cold_again", "to_show", "warmed"]


def to_show(standing_by: Iterable[Candidate], *, wanted: int, now_ns: int) -> list[Candidate]:
    """Return who is to be shown now: one node at most.

    Args:
        standing_by: Nodes that could be in the next view if there were more places, by rank.
        wanted: How many are to be warm.
        now_ns: The time now.
    """
    waiting = list(standing_by)
    warm = sum(candidate.warm for candidate in waiting)
    if warm >= wanted:
        return []
    fit = [candidate for candidate in waiting if not candidate.warm and candidate.show_ns <= now_ns]
    # Who was shown before waits in its program for that to go on; `sorted` is stable, so then by rank.
    return sorted(fit, key=lambda candidate: not candidate.shown)[:1]


def warmed(candidate: Candidate) -> None:
    """Take in that a spare has stepped out of the view in which it was shown."""
    candidate.warm = True


def cold_again(candidate: Candidate, *, pause_ns: int, longest_ns: int, now_ns: int) -> None:
    """Take in that a warm spare learns no more.

    Args:
        candidate: It.
        pause_ns: Time until it is shown again, the first time.
        longest_ns: Most of that time.
        now_ns: The time now.
    """
    candidate.warm = False
    candidate.show_ns = now_ns + min(pause_ns << min(candidate.shown, 32), longest_ns)
