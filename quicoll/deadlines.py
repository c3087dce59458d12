"""All times that follow from `lost_after`, the silence after which a peer is lost, in one place.

A chain of waits has to end from the inside out. Where an outer wait ended first, its owner would blame the wrong node,
and the reason that the inner one was about to give would be lost. So each deadline outlasts what it waits for:

    gather  <  lost  <=  settle                     the coordinator hears of a loss, and waits for nodes to come back
    connect  <  form  <  propose  <  answer         a view is proposed, its links form, it is installed
    vote  <  decision                               a step is voted for and decided

The ranks and the coordinator compute them by themselves, so they have to hold the same `lost_after`: a rank that does
not set it takes the coordinator's, and one that sets another is refused (quicoll.membership.coordinator.admission).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Deadlines", "earlier"]

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Nanoseconds. Made by `of`.

    Attributes:
        lost_ns: Silence after which a link is lost.
        connect_ns: For a link to come up. Half as long again as `lost_ns`, so that a peer which is lost during the
            attempt is found to be lost, and at least two seconds, for a handshake with some of its datagrams lost.
        form_ns: For a member to form its links of a proposed view: the links' own deadline comes first and names the
            peer; this one ends what has no deadline of its own.
        propose_ns: For all answers to a proposal, at the coordinator. A member's Decline, which names the members it
            cannot reach, has to be there before the coordinator gives up on the member itself: after the member has
            lost one peer, and has waited that long again for the next.
        answer_ns: For the coordinator's answer to a Join or a Confirm, at a member. Longer than the coordinator may
            wait for the other members; the rest is time for its disk.
        gather_ns: From the first report of a failure to the decision who is left out, at the coordinator, where not
            all have reported before: as long as members differ in seeing the same loss. Who has nothing to send to the
            lost one notices with the next heartbeat, an eighth of `lost_ns` later; the rest is for its report to come.
        settle_ns: For members of the last view to come back before a view is formed without them: who has lost its
            link only, and is alive, notices within `lost_ns` and joins again.
        rejoin_ns: For a node of the last view to join a coordinator that was started anew, before an operator's word is
            taken that it is gone for good. It finds that its coordinator is gone, may first dial one that is not there,
            and then this one; twice that.
        retry_ns: Least wait of a node that was left out, at the coordinator: it comes back within two deadlines of its
            path being good again, of which one is for the path to be found good.
        vote_ns: From the first vote for a step to the last, at the coordinator. Ranks may differ so much in the work of
            a step; it does not depend on the network.
        decision_ns: From a member's vote to the decision. Longer than `vote_ns`: the decision may wait for all others.
    """

    lost_ns: int
    connect_ns: int
    form_ns: int
    propose_ns: int
    answer_ns: int
    gather_ns: int
    settle_ns: int
    retry_ns: int
    rejoin_ns: int
    vote_ns: int = 300 * _SECOND_NS
    decision_ns: int = 330 * _SECOND_NS

    @classmethod
    def of(cls, lost_after: float) -> Deadlines:
        """Return the deadlines that follow from a silence of so many seconds.

        Args:
            lost_after: Seconds, above 0 and below a million, as the setting of this name.
        """
        return cls.of_ns(max(round(lost_after * _SECOND_NS), 1))

    @classmethod
    def of_ns(cls, lost_ns: int) -> Deadlines:
        """Return the deadlines that follow from a silence of so many nanoseconds.

        Args:
            lost_ns: Above 0.
        """
        connect_ns = max(2 * _SECOND_NS, lost_ns + lost_ns // 2)
        form_ns = connect_ns + _SECOND_NS // 2
        return cls(
            lost_ns=lost_ns,
            connect_ns=connect_ns,
            form_ns=form_ns,
            propose_ns=max(2 * lost_ns + 2 * _SECOND_NS, form_ns + _SECOND_NS // 2),
            answer_ns=2 * lost_ns + 30 * _SECOND_NS,
            gather_ns=lost_ns // 6,
            settle_ns=lost_ns,
            rejoin_ns=2 * (lost_ns + 2 * connect_ns),
            retry_ns=max(min(_SECOND_NS, lost_ns // 2), 1),
        )


def earlier(a: int | None, b: int | None) -> int | None:
    """Return the earlier of two times; None, which is no time, where both are that."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
