"""Which of several coordinators leads, where they share a journal in a database.

The database has one row for each job: a token, who holds the lease, and until when by the database's own clock; how
many nodes are linked to its holder, and since when that has led no view. This core says what to ask the database, and
when; what follows from the answers is said here, and only here.

    STANDBY   somebody else leads, or it is not known who: the lease is asked for again and again
    LEADING   this process has taken the lease, with a token that nobody had before
    ENDED     it was taken over, or could not be renewed in time: for good. A process that stands by again does so with
              a core of its own for that (leadership.py), which has no token and knows of no lease

    TAKE      "give me the lease, with a new token, if it may be taken; else say who has it, and for how long. So many
              nodes wait here"
    RENEW     "let it run for the whole time again, if the token is still mine. So many nodes are linked to me, and I
              have led a view of them since I asked last; or none"

A lease may be taken (`may_take`) when it has run out, and before that from a leader that leads nobody: one may well
reach the database, and none of the ranks, or too few, while they wait elsewhere. See invariants 5 to 7.

Invariants:

1. Tokens grow with every taking, in the database. So of any two leaders one is the later.
2. Every append names its leader's token and is refused by the database where the token is not the last one, in the
   transaction that appends. So once a lease is taken nobody else's append goes in, however late it comes; and whoever
   has taken it reads the journal after that, so it misses nothing.
3. Whether a lease has run out is judged by the database's clock alone. The clock here only says when to ask. One that
   runs fast asks too often, or gives up a lease that was good; one that runs slowly, or stands, loses its lease to
   another. Neither can append anything that the others do not know. No time of day is ever compared with that of
   another machine. The database's clock may be set, too: forward, and a lease runs out early; back, and it would run
   for as much longer, so one that ends more than two of its lengths from now counts as one that has run out.
4. A leader that does not know yet that it was deposed decides nothing: a commit, a view and a node's leave are appends.
   What it says of views that it has proposed itself stays right, since votes count only with the coordinator that
   proposed the view. What rests on the journal as a whole (`actions.rests_on_journal`) it says only after the database
   has confirmed its token.
5. From a leader with a view at work the lease is never taken before it has run out, however many nodes wait elsewhere:
   of a network that is cut in two, the side with the view goes on.
6. From one that has led no view for a whole lease it is taken by one at which more nodes wait than are linked to that;
   after `TURN` leases by one at which any wait: counting does not tell whose nodes are a quorum, so they take turns. A
   job without a view whose nodes are all linked to the leader, or that has no nodes, changes no leader.
7. A coordinator that stands by says who leads, and its nodes go there. Only those count as waiting that are here at two
   requests, one after the other: whoever reaches the leader is gone by the second.

8. Whoever loses the lease sooner than one length after it has taken it rests before it asks again: as long as a lease
   runs, and twice as long each time that this happens again, up to `TURN` of them (`rest_ns`). Else two of them could
   take it from each other for ever, each before it leads a view: where the database's clock runs fast, or requests take
   longer than a lease. The other has it meanwhile, undisturbed. Who had it for longer asks again at once.

Time: a lease runs for `lease_ns` and is renewed after a quarter of it. One that stands by asks again when the lease
that it has seen would run out, and not later than after a fifth of the whole time. So another one leads
`lease_ns` and a request after the last renewal at the latest; after a clean end, which gives the lease up, a fifth
of `lease_ns` and a request. From a leader that loses all ranks and keeps the database: what it needs to find them lost
(`lost_after`), a quarter of `lease_ns` until it says so, `lease_ns`, a fifth, and a request.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from quicoll.errors import LocalError

__all__ = [
    "LEASE_TRANSITIONS",
    "TURN",
    "Following",
    "HeldBy",
    "LeaseCore",
    "LeaseRequest",
    "LeaseState",
    "Taken",
    "may_take",
    "rest_ns",
]

TURN = 8
"""Leases without a view, after which it is the turn of another at which nodes wait: a view needs far less, once its
nodes are there."""

_LEAST_WAIT_NS = 10_000_000
"""Between two requests, where the lease is about to run out."""


class LeaseState(enum.Enum):
    STANDBY = "stands by"
    LEADING = "leads"
    ENDED = "ended"


class LeaseRequest(enum.Enum):
    TAKE = "take the lease"
    RENEW = "renew the lease"


@dataclass(frozen=True, slots=True)
class Following:
    """The nodes of the coordinator that asks.

    Attributes:
        nodes: How many there are: linked to the leader, or waiting where it stands by.
        at_work: Whether it has led a view of them since it asked last.
    """

    nodes: int = 0
    at_work: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """The lease is ours, from now on by this token."""

    token: int


@dataclass(frozen=True, slots=True)
class HeldBy:
    """The lease is another's.

    Attributes:
        token: Its token.
        holder: The address of that coordinator, for members and people.
        left_ns: How long it still runs, by the database's clock; below 0 where it has run out.
    """

    token: int
    holder: str
    left_ns: int


def may_take(*, left_ns: int, length_ns: int, idle_ns: int | None, nodes: int, waiting: int) -> bool:
    """Return whether a lease may be taken by who asks for it. The database judges by the same rule, in its own words.

    Args:
        left_ns: How long it still runs, by the database's clock, as the next two.
        length_ns: How long it runs when it is new.
        idle_ns: How long its holder has led no view; None where it leads one.
        nodes: How many are linked to its holder.
        waiting: How many wait at who asks.
    """
    if left_ns <= 0 or left_ns > 2 * length_ns:
        return True
    if idle_ns is None or waiting == 0:
        return False
    return idle_ns >= length_ns * (1 if waiting > nodes else TURN)


def rest_ns(lost_early: int, *, length_ns: int) -> int:
    """Return how long who has lost the lease rests until it asks again.

    Args:
        lost_early: How often in a row it has lost it before it had it for its length.
        length_ns: How long it runs when it is new.
    """
    return 0 if lost_early == 0 else length_ns * min(1 << min(lost_early - 1, 30), TURN)


LEASE_TRANSITIONS: dict[LeaseState, tuple[LeaseState, ...]] = {
    LeaseState.STANDBY: (LeaseState.LEADING, LeaseState.ENDED),
    LeaseState.LEADING: (LeaseState.ENDED,),
    LeaseState.ENDED: (),
}


class LeaseCore:
    """Answers, failures and time in, requests out, for one leadership; see the head of this module.

    The shell asks `due` whenever `next_timer` has passed, makes the request, and tells how it ended. One request is
    under way at a time.

    Args:
        lease_ns: How long a lease runs.
        now_ns: The time now, of any monotonic clock.
        rest_ns: How long to wait with the first request.
    Raises:
        LocalError: lease_ns is not above 0.
    """

    def __init__(self, *, lease_ns: int, now_ns: int, rest_ns: int = 0) -> None:
        if lease_ns <= 0:
            raise LocalError("lease_ns has to be above 0")
        self._lease_ns = lease_ns
        self._state = LeaseState.STANDBY
        self._due_ns = now_ns + rest_ns
        self._taken_ns: int | None = None
        self._under_way: LeaseRequest | None = None
        self._asked_ns = now_ns
        self._held: HeldBy | None = None
        self._token = 0
        self._cause = ""

    def __repr__(self) -> str:
        return f"<LeaseCore {self._state.name} token={self._token} held={self._held}>"

    @property
    def state(self) -> LeaseState:
        return self._state

    @property
    def token(self) -> int:
        """The token of the lease that was taken; 0 before."""
        return self._token

    @property
    def cause(self) -> str:
        """Why it ended, or why it is not known who leads; for people."""
        return self._cause

    @property
    def leader(self) -> str:
        """The address of who leads, as far as it is known here; "" where it is not, or its lease is about to run out.

        A leader renews long before half of its time is over. One that has not may be gone, and is no one to go to.
        """
        held = self._held
        return "" if held is None or 2 * held.left_ns < self._lease_ns else held.holder

    def is_early(self, now_ns: int) -> bool:
        """Return whether the lease, if it is lost now, is lost before it was had for its length."""
        return self._taken_ns is not None and now_ns < self._taken_ns + self._lease_ns

    def next_timer(self) -> int | None:
        """Return when `due` has to be called; None while a request is under way, and after the end."""
        return None if self._under_way is not None or self._state is LeaseState.ENDED else self._due_ns

    def due(self, now_ns: int) -> LeaseRequest | None:
        """Return the request to be made now, which is under way from here on; None where none is due."""
        at = self.next_timer()
        if at is None or now_ns < at:
            return None
        self._under_way = LeaseRequest.TAKE if self._state is LeaseState.STANDBY else LeaseRequest.RENEW
        self._asked_ns = now_ns
        return self._under_way

    def answered(self, answer: Taken | HeldBy, *, now_ns: int) -> None:
        """Take in what the database has answered to the request that is under way.

        Args:
            answer: Its answer; to a RENEW, `Taken` with the token that it has.
            now_ns: The time now.
        """
        request, self._under_way = self._under_way, None
        if request is None:
            raise LocalError(f"{answer} answers no request")
        if self._state is LeaseState.LEADING:
            self._renewed(answer)
        elif isinstance(answer, Taken):
            self._move(LeaseState.LEADING)
            self._token, self._held, self._cause = answer.token, None, ""
            self._taken_ns = self._asked_ns
            self._due_ns = self._asked_ns + self._lease_ns // 4
        else:
            self._held, self._cause = answer, ""
            wait_ns = min(self._lease_ns // 5, max(answer.left_ns, _LEAST_WAIT_NS))
            self._due_ns = now_ns + wait_ns

    def failed(self, cause: str, *, now_ns: int) -> None:
        """Take in that the database gave no answer to the request that is under way, in the time that it has for one.

        Args:
            cause: Why, for people.
            now_ns: The time now.
        """
        self._under_way = None
        self._cause, self._held = cause, None
        if self._state is LeaseState.LEADING:
            self._move(LeaseState.ENDED)
        self._due_ns = now_ns + self._lease_ns // 5

    def _renewed(self, answer: Taken | HeldBy) -> None:
        if isinstance(answer, Taken) and answer.token == self._token:
            self._due_ns = self._asked_ns + self._lease_ns // 4
            return
        self._held = answer if isinstance(answer, HeldBy) else None
        who = f"{answer.holder} with token {answer.token}" if isinstance(answer, HeldBy) else f"token {answer.token}"
        self._cause = f"the lease with token {self._token} was taken over by {who}"
        self._move(LeaseState.ENDED)

    def _move(self, state: LeaseState) -> None:
        if state not in LEASE_TRANSITIONS[self._state]:
            raise LocalError(f"a coordinator that {self._state.value} cannot be one that {state.value}")
        self._state = state
