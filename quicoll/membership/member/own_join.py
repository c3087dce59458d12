"""What this process joins with, and what of it changes when the coordinator says so.

    Adopt      the coordinator has another value of a setting that all have to share: taken over, once, where this
               process did not insist on its own
    Outdated   there is, or was, a later process of this node. One that was never admitted starts over above that
               (membership/incarnation.py), up to MOST_STARTS times; one that was is over: another process of its name
               has joined after it

Both answer a Join, before the Welcome. Nothing is sent from here: the core joins again, or stops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from quicoll.errors import LocalError
from quicoll.membership.incarnation import MOST_STARTS, above
from quicoll.membership.member.actions import Refused, StartOver

if TYPE_CHECKING:
    from quicoll.membership.member.job_progress import JobProgress
    from quicoll.membership.messages import Join

__all__ = ["OwnJoin", "broken_protocol"]


def broken_protocol(what: str) -> str:
    """Return why a member stops, for people: the coordinator did what its rules exclude."""
    return f"the coordinator broke the protocol: {what}"


class OwnJoin:
    """The Join of a process of `node`; `join` is its first."""

    def __init__(self, node: str, join: Join) -> None:
        self._node = node
        self._join = join
        self._starts = 0  # how often it has started over

    @property
    def incarnation(self) -> int:
        return self._join.incarnation

    def message(self, progress: JobProgress) -> Join:
        """Return the Join to send, with what this process holds now."""
        return msgspec.structs.replace(
            self._join, committed_step=progress.holds, doubt=progress.doubt, owns=progress.owns
        )

    def adopt(self, lost_after_ns: int) -> str:
        """Take over the coordinator's setting; return why it cannot be meant, "" if it was taken."""
        if not self._join.adopts or lost_after_ns == self._join.lost_after_ns:
            return f"a setting that was not asked for: lost_after {lost_after_ns / 1e9:.12g} s"
        self._join = msgspec.structs.replace(self._join, lost_after_ns=lost_after_ns)
        return ""

    def outdated(self, latest: int, *, admitted: bool) -> StartOver | Refused:
        """Take in that there is a later process of this node; return what follows.

        Args:
            latest: Its incarnation.
            admitted: Whether a coordinator has ever taken this process into its job.
        """
        if admitted:
            return Refused(f"another process of {self._node} has joined after this one")
        if latest < self.incarnation:
            return Refused(broken_protocol(f"incarnation {latest} is said to be later than {self.incarnation}"))
        if self._starts >= MOST_STARTS:
            return Refused(f"{self._starts} other processes of {self._node} came before this one was admitted")
        try:
            incarnation = above(latest, self.incarnation)
        except LocalError as error:
            return Refused(error.message)
        self._starts += 1
        self._join = msgspec.structs.replace(self._join, incarnation=incarnation)
        return StartOver(incarnation)
