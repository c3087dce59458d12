"""Slow ranks in a round of DiLoCo: how long the others wait for a rank, and what its workers count for. Pure.

A round is cut into stretches: each ends where an exchange begins, the last one with the round. With a `quorum`, a rank
that is still in a stretch when so many logical workers have ended it, and `grace` seconds have passed since it heard of
that, stops there: its workers leave out the rest of the stretch, and go on with the next one together with all others.

States of a logical worker in a stretch:

    in time     it has done all inner steps of the stretch, before or after there was a quorum, within the grace
    cut short   there was a quorum, the grace was over: it has done the first d of them, and counts with these
    left out    the same with d = 0: it has nothing new, and counts with what it did in the stretches before

Who decides. The rank that is slow, about its own workers: it hears that others have arrived, looks at its clock between
two inner steps, and says in the exchange how many it has done (d for each worker). No one else has a say in d, and no
time of arrival is in what is said. All ranks gather what all have said; it is compared in the step's vote as any result
of a collective, and is in the journal (quicoll.train.diloco_journal) when the round is committed. What is heard in
between, that a rank has arrived, is a hint and no more: one that comes early, late or in another order changes d, and
the bits only through d. With the same d the bits are the same, on any number of ranks.

Weights. What an exchange averages is what each worker has done since the exchange of that fragment before: as many
inner steps in all as a round has. A worker's weight is the share of these that it did; steps have as many samples, and
so tokens, as each other. Of workers with shares s the mean is sum(s * x) / sum(s), in canonical order; where all have
done all, each weight is 1, and the bits are those without a quorum. What a worker's wire format has lost stays in its
residual, and is sent with its next exchange, also of a worker with nothing new. Its samples of the steps that it left
out are not used: the data moves on by whole rounds for all.

Below the quorum nothing is cut: all wait, as without one, for at most the setting `timeout`. A rank that does not
answer at all is not slow but lost, and the membership's affair: a round is one atomic step, and is committed by all
ranks of the view, so a rank has to be heard once in a round. A slow line makes no rank late here: late is who computes.

Invariants.
1. d is whole, from 0 to the length of the stretch, and of the first steps of it.
2. A rank is never cut while fewer than `quorum` workers have arrived, nor earlier than `grace` after it heard of them.
3. Shares are computed from what was gathered and from the journal alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.train.diloco_turns import FragmentTurn

Counts = Sequence[Sequence[int]]
"""Inner steps that were done: for each stretch of a round, of each worker."""

__all__ = ["Counts", "StretchEnds", "demand_quorum", "shares_in", "stretches_of"]


def demand_quorum(quorum: int | None, grace: float, workers: int) -> None:
    """Refuse what is no quorum.

    Args:
        quorum: Of so many workers; None: there is none.
        grace: Seconds.
        workers: How many there are.
    Raises:
        LocalError: It is not from 1 to the number of workers, or the grace is no time.
    """
    if quorum is not None and not 1 <= quorum <= workers:
        raise LocalError(f"quorum is 1 to the number of logical workers, {workers}, not {quorum}")
    if not 0.0 <= grace <= 86400.0:
        raise LocalError(f"grace is 0 to 86400 seconds, not {grace}")
    if quorum is None and grace:
        raise LocalError("grace is for the ranks that a quorum does not wait for: give a quorum=")


class StretchEnds:
    """What a rank that is in a stretch has heard of the others."""

    def __init__(self, quorum: int, grace_ns: int) -> None:
        """Begin a stretch.

        Args:
            quorum: Of so many workers.
            grace_ns: How long a rank goes on after it has heard of a quorum.
        """
        self._missing = quorum
        self._grace_ns = grace_ns
        self._since_ns: int | None = None

    def arrived(self, workers: int, now_ns: int) -> None:
        """Take in that another rank has ended the stretch.

        Args:
            workers: How many it has.
            now_ns: The time.
        """
        self._missing -= workers
        if self._missing <= 0 and self._since_ns is None:
            self._since_ns = now_ns

    def over(self, now_ns: int) -> bool:
        """Return whether this rank is to stop where it is.

        Args:
            now_ns: The time.
        """
        return self._since_ns is not None and now_ns - self._since_ns >= self._grace_ns


def stretches_of(turns: Sequence[FragmentTurn], every: int) -> tuple[range, ...]:
    """Return the inner steps of each stretch of a round, by their numbers in it, from 1.

    Args:
        turns: Of the round.
        every: Inner steps of it.
    """
    ends = [turn.at for turn in turns if turn.begins] + [every]
    return tuple(range(start + 1, end + 1) for start, end in zip([0, *ends], ends, strict=False))


def shares_in(
    stretch: int,
    stretches: Sequence[range],
    before: Counts | None,
    now: Counts,
) -> tuple[list[int], int]:
    """Return how many inner steps each worker has done since an exchange, and how many it could have done.

    Args:
        stretch: At whose end the exchange begins, in each round.
        stretches: Of a round.
        before: What each did in each stretch of the round before; None: there was none.
        now: What each did in this round's, up to this one.
    """
    done = [sum(row) for row in zip(*now[: stretch + 1], strict=True)]
    due = sum(len(each) for each in stretches[: stretch + 1])
    if before is not None:
        rest = before[stretch + 1 :]
        done = [mine + sum(row[worker] for row in rest) for worker, mine in enumerate(done)]
        due += sum(len(each) for each in stretches[stretch + 1 :])
    return done, due
