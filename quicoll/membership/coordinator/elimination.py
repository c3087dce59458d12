"""Whose absence ends a contradiction of digests: the candidates, one of whom is left out after the other.

Digests that differ show who is odd, the minority, and not why: it computed wrongly or has bad memory, or somebody sends
it other bits than the others. Who sent to whom is not known here, so every other member is taken for a sender. One
culprit is looked for that explains all failures:

    candidates    who is part of every failure. Where digests differ without a node, that node is none
    fitting       those without which a view worked, until the node was back and digests differed again
    odd           those that were in a minority

    failure       the candidates that were not part of it are none any more; one that was fitting is only not fitting
                  any more, for a single failure may have another cause. Where none is left, all begins anew with it
    a view works  until the next failure of other members: the candidates that were not in it are fitting. Where all
                  odd ones were in it, the other candidates in it neither compute wrongly nor lie to an odd one

Who is to be left out next, of the candidates that were part of the last failure: first those that were not tried, the
odd ones before those that sent to them. So an odd one that comes back and is odd again stays, and its senders are left
out one by one. Where nobody is left to be tried,

    one odd, one not     work each without the other, and not together. The sender goes: its bits came with a checksum
                         that holds, and from all others the odd one takes what is right
    else                 who was left out less often; so they take turns, for longer and longer, and one without which
                         digests differ is none any more

In a large world not all senders are tried in a row: after TRIALS of them without a commit a fitting one goes, and the
others' turn comes when it is back.

Invariants. Every failure takes a candidate away, or makes one fitting, or is followed by a longer time without one; so
there are at most as many failures as members before the culprit is left out, and those of its trials afterwards. Pure:
the same calls give the same order. Memory: four lists of names of one view at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from quicoll.membership.coordinator.lessons import Lessons

__all__ = ["TRIALS", "Elimination"]

TRIALS: Final = 4
"""Senders that are left out one after the other without a commit in between."""


class Elimination:
    """See the module's head. Its attributes are ordered sets.

    Attributes:
        candidates: Who may be the culprit.
        fitting: Those of them without which a view worked.
        odd: Who was in a minority.
        tried: Who was left out for it, cleared by now or not.
        last_own_ns: When the last failure was, in the evidence's own time.
    """

    def __init__(self) -> None:
        self.candidates: dict[str, None] = {}
        self.fitting: dict[str, None] = {}
        self.odd: dict[str, None] = {}
        self.tried: dict[str, None] = {}
        self.last_own_ns = 0
        self._worked: tuple[str, ...] = ()  # members of the view that worked last, since the last failure
        self._in_a_row = 0  # nodes left out since the last commit

    @classmethod
    def restored(cls, lessons: Lessons) -> Elimination | None:
        """Return the elimination that was going on; None where there was none."""
        if not lessons.candidates:
            return None
        found = cls()
        found.candidates = dict.fromkeys(lessons.candidates)
        found.fitting = dict.fromkeys(lessons.fitting)
        found.odd = dict.fromkeys(lessons.odd)
        found.tried = dict.fromkeys(lessons.tried)
        return found

    @property
    def begun(self) -> bool:
        """Whether a node was left out for it."""
        return bool(self.tried)

    def failed(self, members: Collection[str], odd: Sequence[str], others: Sequence[str]) -> tuple[str, ...]:
        """Take in that digests differed.

        Args:
            members: Of the view.
            odd: The minority; all whose digests were compared, where there is none.
            others: The rest of those whose digests were compared.
        Returns:
            Those that were left out for nothing.
        """
        if any(node not in self._worked for node in members):
            self._conclude()
        self._worked = ()
        part = (*odd, *others)
        absent = [node for node in self.candidates if node not in part]
        removed = [node for node in absent if node not in self.fitting]
        for node in absent:
            self.fitting.pop(node, None)
        for node in removed:
            del self.candidates[node]
        cleared = tuple(node for node in removed if node in self.tried)
        if not self.candidates:
            self.candidates = dict.fromkeys(part)
            self.fitting, self.odd, self.tried = {}, {}, {}
        if others:
            self.odd |= dict.fromkeys(odd)
        return cleared

    def worked(self, members: tuple[str, ...]) -> None:
        """Take in that a view committed a step."""
        self._worked = members
        self._in_a_row = 0

    def next(self, odd: Sequence[str], others: Sequence[str], order: Callable[[str], tuple[int, ...]]) -> list[str]:
        """Return who is to be left out, the first choice first; nobody, where no candidate was part of the failure.

        Args:
            odd: As of `failed`.
            others: As of `failed`.
            order: Of two that are alike here the one with the larger value goes.
        """
        present = [node for node in self.candidates if node in (*odd, *others)]
        untried = [node for node in present if node not in self.fitting]
        untried.sort(key=lambda node: (node in odd, *order(node)), reverse=True)
        fitting = [node for node in present if node in self.fitting]
        if self._pair:
            fitting.sort(key=lambda node: node in self.odd)
        else:
            fitting.sort(key=order, reverse=True)
        return [*fitting, *untried] if fitting and self._in_a_row >= TRIALS else [*untried, *fitting]

    def leave_out(self, node: str) -> None:
        """Take in that a candidate is left out."""
        self.tried[node] = None
        self._in_a_row += 1

    def is_trial(self, node: str) -> bool:
        """Return whether leaving this one out is to show whether it sends wrong bits to an odd one."""
        return node in self.candidates and node not in self.fitting and node not in self.odd and bool(self.odd)

    def known(self) -> str:
        """Return who it may be, as far as it is known; for people."""
        names = list(self.candidates)
        if self._pair:
            return f"{names[0]} or {names[1]}, and only when they work together"
        odd = [node for node in names if node in self.odd]
        if odd and len(odd) < len(names):
            return f"{' or '.join(odd)}, or who sends to {'it' if len(odd) == 1 else 'them'}"
        return " or ".join(names) if len(names) <= TRIALS else f"one of {len(names)} nodes"

    @property
    def _pair(self) -> bool:
        """Whether an odd one and a sender are left, each of which does well without the other."""
        odd = [node for node in self.candidates if node in self.odd]
        return len(self.candidates) == len(self.fitting) == 2 and len(odd) == 1

    def _conclude(self) -> None:
        """Learn from the view that worked: it had some candidates, and the next failure has others."""
        worked = self._worked
        if not worked:
            return
        self.fitting |= {node: None for node in self.candidates if node not in worked}
        if self.odd and self.fitting and all(node in worked for node in self.odd):
            self.candidates = {
                node: None for node in self.candidates if node not in worked or node in (*self.fitting, *self.odd)
            }
