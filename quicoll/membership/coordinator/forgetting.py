"""A lost quorum's way out: an operator gives nodes of the last view up, on purpose.

    ASKED     the operator named the nodes; whether they are gone is being found out
    DONE      `Forgotten` was handed to the journal: once it is there, they count in the base of quorums no longer
    GIVEN_UP  for good, in this process: the wish would be wrong, or is not needed any more

Unless it is GIVEN_UP it goes on from one leadership of the process to the next, until a journal says that it is done,
or that there was a view in between (serving.py); the nodes are given the time to come once more. So it does where it is
DONE, too: the lease may be lost before the journal has taken the record.

Quorums are there so that a handful of nodes does not go on alone while the others are merely away. Forgetting takes
that protection away for the nodes named, so it is done only where they can do no harm:

- None of them is here, and none joins for `patience_ns` after the coordinator has begun: that is as long as a live
  node takes to find out that its coordinator was started anew, and to join again. One that joins is alive: the wish is
  given up, and the node counts as before.
- Those that are here are a majority of the nodes that would be left to count. So no majority is elsewhere, whichever of
  the missing nodes live. Until they are, the wish waits.
- One of those that are here holds the last committed step. Else the step would be taken back: the wish waits.
- Where there is a quorum without it, there is nothing to forget: the wish is given up.

A forgotten node that lives all the same cannot act: only the coordinator that has the journal forms views and commits,
and a view with it has to be installed by that journal first. When it comes back it is a node like one that was never
here: in doubt of a step, it hears from the journal what became of it, and it gets the state from the others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.admission import name_list
from quicoll.membership.coordinator.history import Forgotten
from quicoll.membership.view import has_quorum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quicoll.membership.coordinator.history import History
    from quicoll.membership.coordinator.roster import Candidate, Roster

__all__ = ["Forgetting", "ForgettingState", "Prospect"]


class ForgettingState(enum.Enum):
    ASKED = "asked"
    DONE = "done"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class Prospect:
    """What is to be done.

    Attributes:
        record: To be recorded, and then a view to be looked for; None where the nodes count as before.
        refusal: Why they are not forgotten now; "" where nothing is to be said.
        wake_ns: When to look again although nothing came in; None where only an input can change it.
    """

    record: Forgotten | None = None
    refusal: str = ""
    wake_ns: int | None = None


class Forgetting:
    """The wish to forget `nodes`; empty where there is none.

    Args:
        nodes: The nodes.
        patience_ns: How long they are given to come.
        now_ns: The time now, at which the coordinator begins.
    """

    def __init__(self, nodes: Sequence[str], *, patience_ns: int, now_ns: int) -> None:
        self._nodes = tuple(dict.fromkeys(nodes))
        self._patience_ns = patience_ns
        self._ready_ns = now_ns + patience_ns
        self._refusal = ""
        self.state = ForgettingState.ASKED if nodes else ForgettingState.GIVEN_UP

    @property
    def asked(self) -> bool:
        """Whether an operator has asked for it, and it is not done."""
        return bool(self._nodes) and self.state is not ForgettingState.DONE

    @property
    def wanted(self) -> tuple[str, ...]:
        """The nodes, unless the wish is given up; whether the journal has it is not said."""
        return () if self.state is ForgettingState.GIVEN_UP else self._nodes

    def joined(self, node: str) -> None:
        """Take in that a node has joined: it is alive."""
        if self.state is ForgettingState.ASKED and node in self._nodes:
            self._give_up(f"{node} is alive: it has joined")

    def unneeded(self) -> None:
        """Take in that there is a view, with them or without: what becomes of a later one is another matter."""
        if self.state is ForgettingState.ASKED:
            self._give_up("there was a quorum with them")

    def look(self, roster: Roster, chosen: Sequence[Candidate], history: History, *, now_ns: int) -> Prospect:
        """Look at the wish while no view is installed or proposed.

        Args:
            roster: The nodes that are here.
            chosen: Those of them that would be in a view.
            history: What the journal holds.
            now_ns: The time now.
        """
        if self.state is not ForgettingState.ASKED:
            return Prospect(refusal=self._refusal)
        here = [candidate.node for candidate in chosen]
        base = history.base
        if strange := [node for node in self._nodes if node not in base]:
            return self._give_up(f"{name_list(strange)} does not count: it is none of {name_list(base) or 'no nodes'}")
        if has_quorum(here, base):
            return self._give_up("there is a quorum with them")
        if now_ns < self._ready_ns:
            return Prospect(
                refusal=f"they have {self._patience_ns / 1e9:.12g} s from the coordinator's start to join",
                wake_ns=self._ready_ns,
            )
        rest = [node for node in base if node not in self._nodes]
        if not rest or not has_quorum(here, rest):
            missing = [node for node in rest if node not in roster]
            return Prospect(
                refusal=f"there is no quorum without them either; {name_list(missing) or 'nobody'} is missing"
            )
        if all(candidate.committed_step < history.committed_step for candidate in chosen):
            return Prospect(refusal=f"nobody here holds step {history.committed_step}, and they may")
        self.state = ForgettingState.DONE
        return Prospect(Forgotten(self._nodes))

    def _give_up(self, why: str) -> Prospect:
        self.state = ForgettingState.GIVEN_UP
        self._refusal = why
        return Prospect(refusal=why)

    def words(self, refusal: str) -> str:
        """Return for people that the nodes are not forgotten, and why."""
        return f"{name_list(self._nodes)} not forgotten: {refusal}"
