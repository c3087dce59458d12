"""What a member waits for, and until when: one thing at a time, each with a deadline.

    ANSWER        to its Join
    LINKS         to the members of a proposed view; without them in time the view is declined
    INSTALLATION  of the view, or its end, once the proposal is answered
    DECISION      of the step, once it is voted on: as long as the coordinator waits for the last vote, and a margin

Without the links the member answers all the same. The other three are the coordinator's to give: where one does not
come, the link to it is given up, and the member joins again.
"""

from __future__ import annotations

import enum
from typing import Final

from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError

__all__ = ["ANSWER_NS", "DECISION_MARGIN_NS", "FORM_NS", "Awaited", "Wait"]

_SECOND: Final = 1_000_000_000

FORM_NS: Final = 15 * _SECOND
ANSWER_NS: Final = 30 * _SECOND
DECISION_MARGIN_NS: Final = 30 * _SECOND


class Awaited(enum.Enum):
    ANSWER = "the answer to Join"
    LINKS = "the links to the members"
    INSTALLATION = "the installation of the view"
    DECISION = "the decision of the step"


class Wait:
    """Nothing is awaited at first.

    Args:
        form_ns: For LINKS.
        answer_ns: For ANSWER and INSTALLATION.
        margin_ns: For DECISION, beyond `vote_timeout_ns`.
    Raises:
        LocalError: A time is not above 0.

    Attributes:
        form_ns: As given, or as adopted since.
        vote_timeout_ns: How long the coordinator waits for the last vote of a step; 0 before it was heard.
        deadline_ns: Until when the awaited has to come; None while nothing is awaited.
    """

    def __init__(self, *, form_ns: int, answer_ns: int, margin_ns: int) -> None:
        if min(form_ns, answer_ns, margin_ns) <= 0:
            raise LocalError("form_timeout_ns, answer_timeout_ns and decision_margin_ns have to be above 0")
        self.form_ns = form_ns
        self.vote_timeout_ns = 0
        self.deadline_ns: int | None = None
        self._answer_ns = answer_ns
        self._margin_ns = margin_ns
        self._awaited: Awaited | None = None

    def adopt(self, lost_after_ns: int) -> None:
        """Take the times that go with another `lost_after_ns`."""
        at = Deadlines.of_ns(lost_after_ns)
        self.form_ns, self._answer_ns = at.form_ns, at.answer_ns

    def begin(self, awaited: Awaited, *, now_ns: int) -> None:
        """Wait for this, and for nothing else any more."""
        if awaited is Awaited.DECISION:
            duration_ns = self.vote_timeout_ns + self._margin_ns
        else:
            duration_ns = self.form_ns if awaited is Awaited.LINKS else self._answer_ns
        self._awaited = awaited
        self.deadline_ns = now_ns + duration_ns

    def end(self) -> None:
        """Wait for nothing."""
        self._awaited = self.deadline_ns = None

    def overdue(self, *, now_ns: int) -> Awaited | None:
        """Return what should have come by now, and wait for it no more; None where nothing is overdue."""
        if self.deadline_ns is None or now_ns < self.deadline_ns:
            return None
        awaited = self._awaited
        self.end()
        return awaited
