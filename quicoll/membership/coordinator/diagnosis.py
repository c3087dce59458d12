"""Why a view ended: collected from reports of its members, then announced to all of them alike.

    ended       the first report has come. No step of the view can be committed any more; it is not announced yet
    announced   every member gets the same cause, the same kind of failure and the same culprit
    complete    reports that come after that count too; then the next view may be proposed, without nodes left out

A report comes from one end of a pair. Its other end reports the first, and a third member would get whichever came
sooner. So the announcement waits for the others, for `gather_ns` from the first report against a pair or until all have
reported; the next view waits as long in any case. Where no report is about a pair (an exception in a step, a deadline),
or a node is known to be gone, nothing is waited for; unless the view before this one failed too (`patient`), for who is
in every failure is better known from all reports than from the fastest.

    failure      pairs in the reports                  culprit
    failed       who lost whom                         the first of those left out (suspicions.py)
                 who names whom                        who is in most pairs, or whom the first names
    corrupted    who got corrupt bits from whom        who is in most pairs, or the source of the first
    differs      who has another digest than most      who is in most pairs, or whom the first names
    mismatch     who called something else than whom   who is in most pairs, if in more than half as many as there are
                                                       nodes in any; otherwise nobody

A node with damaged memory corrupts what it gets from everybody, or what everybody gets from it; both show as many pairs
that share one node. A single pair does not tell which end it was, or whether it was the path; the source is named,
since its checksum is what the bits do not fit, and the cause names both.

Of each member one reason is kept, and at most one pair with each other member, however often it reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quicoll.membership.coordinator.evidence import NOBODY, Contradiction, contradiction_of
from quicoll.membership.coordinator.suspicions import Suspicions
from quicoll.membership.messages import Decline, FailureKind, Report, clip

if TYPE_CHECKING:
    from quicoll.membership.coordinator.ballot import Ballot
    from quicoll.membership.view import View

__all__ = ["Diagnosis", "ViewFailure", "most_suspected"]


@dataclass(frozen=True, slots=True)
class ViewFailure:
    """Why a view ended, as announced to every member.

    Attributes:
        cause: For people.
        kind: Kind of failure; decides which error callers get.
        culprit: The node that caused it, "" where no single one did.
        lost: Nodes that are gone, or left out of the next view.
        contradiction: Who can have caused it, of those that may be in the next view; nobody where nothing failed.
    """

    cause: str
    kind: FailureKind = "failed"
    culprit: str = ""
    lost: tuple[str, ...] = ()
    contradiction: Contradiction = NOBODY


def most_suspected(pairs: Iterable[tuple[str, str]]) -> tuple[str, int, int]:
    """Return the node in most pairs ("" where two are in as many), its number of pairs, and the number of nodes.

    Args:
        pairs: In any order and direction; both directions of a pair count once.
    """
    partners: dict[str, dict[str, None]] = {}
    for a, b in pairs:
        partners.setdefault(a, {})[b] = None
        partners.setdefault(b, {})[a] = None
    most = max((len(others) for others in partners.values()), default=0)
    worst = [node for node, others in partners.items() if len(others) == most]
    return (worst[0] if len(worst) == 1 else ""), most, len(partners)


class Diagnosis:
    """Reports on the end of `view`, from its end to the next proposal.

    Args:
        view: The view.
        ballot: Of the step that is open.
        gather_ns: How long other reports are waited for.
        weights: How much is held against nodes from before, for `vertex_cover`.
        patient: Whether they are waited for in any case.

    Attributes:
        view: The view that ended.
        ballot: Of the step that was open; None if none was.
        announced: Whether the members know the cause.
        deadline_ns: When further reports are waited for no more; None while none is about a pair.
    """

    def __init__(
        self,
        view: View,
        ballot: Ballot | None,
        *,
        gather_ns: int,
        weights: Mapping[str, int] | None = None,
        patient: bool = False,
    ) -> None:
        self.view = view
        self.ballot = ballot
        self.announced = False
        self.deadline_ns: int | None = None
        self._gather_ns = gather_ns
        self._kind: FailureKind = "failed"
        self._patient = patient
        self._causes: dict[str, str] = {}  # by member that reports, its first reason
        self._reported_culprit = ""  # as the first report has it
        self._lost: dict[str, str] = {}
        self._suspicions = Suspicions(weights or {})
        self._accused: dict[tuple[str, str], None] = {}  # who named whom, in whatever way; an ordered set
        self._blamed: dict[tuple[str, str], None] = {}  # an ordered set
        self._reporters: dict[str, None] = {}  # an ordered set

    def add_report(self, node: str, report: Report | Decline, *, connected: Sequence[str], now_ns: int) -> None:
        """Take in a report.

        Args:
            node: The member that reports.
            report: That the view cannot go on. A Decline comes from a member that confirmed, then lost a link while
                the installation was on its way: the same as a report.
            connected: Nodes that may be named; what is reported about others does not count.
            now_ns: The time now.
        """
        if isinstance(report, Decline):
            unreachable = tuple((other, report.reason) for other in report.unreachable)
            reason = "" if unreachable else report.reason
            report = Report(view_id=report.view_id, lost=unreachable, reason=reason)
        others = dict.fromkeys(connected)  # looked up for each name in a report, of which there may be a thousand
        others.pop(node, None)
        lost = [(other, cause) for other, cause in report.lost if other in others]
        blamed = [other for other in report.blamed if other in others]
        if not self._reporters:
            self._kind = report.kind
            self._reported_culprit = report.culprit
        self._reporters[node] = None
        for other, cause in lost:
            self._suspicions.add(node, other, cause)
        if report.kind == self._kind:
            self._blamed |= {(node, other): None for other in blamed}
            if report.reason or not lost:
                self._causes.setdefault(node, report.reason or "the view cannot go on")
        unreached = [other for other, _ in lost]
        culprit = (report.culprit,) if report.culprit in others and report.culprit not in unreached else ()
        named = [*blamed, *culprit]
        self._accused |= {(node, other): None for other in named}
        if (lost or blamed or self._waits) and self.deadline_ns is None:
            self.deadline_ns = now_ns + self._gather_ns

    def node_lost(self, node: str, cause: str) -> None:
        """Take in that `node` is gone; that explains every suspicion by or about it."""
        if self.view.rank_of(node) is not None:
            self._lost[node] = cause
            self._suspicions.drop(node)

    def complete(self, present: Sequence[str], *, now_ns: int) -> bool:
        """Return whether no further report is waited for. present: nodes of the view that are still connected."""
        suspected = self._suspicions or ((self._blamed or self._waits) and not self.announced)
        all_reported = all(node in self._reporters for node in present)
        return self.deadline_ns is None or not suspected or all_reported or now_ns >= self.deadline_ns

    @property
    def _waits(self) -> bool:
        """Whether reports are waited for although none names anybody. The odd one cannot say who is odd."""
        return self._patient or self._kind == "differs"

    def failure(self, present: Sequence[str]) -> ViewFailure:
        """Return the failure by the reports so far. present: as in `complete`."""
        if self._kind == "failed":
            lost = tuple(node for node in self.view.nodes if node in self._lost or node in self.excluded(present))
            common = self._contradiction().strong if self._accused else ()
            order = (*self._lost, *self.excluded(present), *(common if len(common) == 1 else (self._reported_culprit,)))
            causes = [*self._lost.values(), self._suspicions.describe(), *self._reasons()]
            cause = clip("; ".join(filter(None, causes)))
            return ViewFailure(cause, culprit=order[0], lost=lost, contradiction=self._contradiction())
        # Those of a mismatch name the ranks that differ, alike at all ends.
        reasons = dict.fromkeys(self._causes.values()) if self._kind == "mismatch" else self._reasons()
        cause = clip("; ".join(reasons))
        return ViewFailure(cause, self._kind, self._cause_node(), contradiction=self._contradiction())

    def _contradiction(self) -> Contradiction:
        if self._lost:
            return Contradiction(tuple(self._lost), paths=True)
        pairs = [*self._accused, *self._suspicions.pairs]
        if not pairs:
            differs = self._kind == "differs"
            return Contradiction(self.view.nodes if differs else tuple(self._reporters), sent=differs)
        # Who names nobody, while others do, most likely saw what followed from it.
        named = contradiction_of(pairs, paths=not self._accused)
        if self._kind == "differs":  # whoever sent to the odd one may be it, also who reports nothing
            rest = tuple(node for node in self.view.nodes if node not in named.strong)
            return Contradiction(named.strong, rest, sent=True)
        rest = tuple(node for node in self._reporters if node not in named)
        return replace(named, weak=(*named.weak, *rest))

    def _reasons(self) -> list[str]:
        """Return the reasons that were given, each once, with the nodes that gave it."""
        nodes: dict[str, list[str]] = {}
        for node, reason in self._causes.items():
            nodes.setdefault(reason, []).append(node)
        return [f"{', '.join(given)}: {reason}" for reason, given in nodes.items()]

    def excluded(self, present: Sequence[str]) -> dict[str, str]:
        """Return connected nodes that the next view is formed without, each with the reason, in order of decision."""
        return self._suspicions.excluded(present)

    def _cause_node(self) -> str:
        node, pairs, involved = most_suspected(self._blamed)
        if self._kind == "mismatch" and self._blamed:
            return node if 2 * pairs > involved else ""
        return node or self._reported_culprit
