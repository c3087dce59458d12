"""How callers begin a step, vote for it, and hear what became of it.

The states of a step on this rank are those of decisions.py; here are the calls by which it goes from one to the next:

    begin         -> open, where its view is at work; else whatever is called in it fails, and so does its vote
    vote          open -> voted, where all of it has ended; the wait for the decision begins
    decision      waits for what became of a vote, again where its caller has left it in doubt
    unanswered    voted -> in doubt; a step that is open takes its view with it, as its vote never comes

Invariants: a step is voted for where the view that it was begun in is still at work, and all that it has called has
ended; else its caller hears why not, and nothing is voted for. Everything on the engine's loop.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from quicoll.errors import PeerError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from quicoll.engine.answers import Cancellable
    from quicoll.engine.decisions import Decision, StepOutcomes
    from quicoll.engine.views import Views
    from quicoll.engine.waiting import Waiting
    from quicoll.membership.member.core import MemberCore
    from quicoll.observability.flight import FlightRecorder

__all__ = ["Voting"]

_NAMED = 4
"""Operations that an error names."""


class Voting:
    """See the module's head."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        node: str,
        views: Views,
        member: MemberCore,
        outcomes: StepOutcomes,
        waiting: Waiting,
        flight: FlightRecorder | None,
        give_up: Callable[[int, str], Awaitable[None]],
        on_change: Callable[[], None],
    ) -> None:
        """Begin without a step.

        Args:
            loop: The engine's.
            node: This rank's node.
            views: The communicator, and how views ended.
            member: This rank's membership.
            outcomes: What became of steps.
            waiting: How callers wait.
            flight: The recorder of this rank.
            give_up: Breaks a view: its id, why.
            on_change: Called when the membership wants something.
        """
        self._loop = loop
        self._node = node
        self._views = views
        self._member = member
        self._outcomes = outcomes
        self._waiting = waiting
        self._flight = flight
        self._give_up = give_up
        self._on_change = on_change

    def _now_ns(self) -> int:
        return round(self._loop.time() * 1e9)

    def begin(self, view_id: int, number: int) -> None:
        """Begin a step. Where its view is not at work any more, its operations fail, and so does its vote.

        Args:
            view_id: The view that the caller is in.
            number: The caller's number of the step.
        """
        communicator, index = self._views.at_work(view_id), self._member.next_step
        if communicator is None or index is None:
            self._outcomes.not_begun()
            return
        communicator.begun(index)
        self._outcomes.begin(index, number)
        if self._flight is not None:
            self._flight.began(number, view_id)
        self._member.begin(index, now_ns=self._now_ns())
        self._on_change()

    def vote(
        self,
        view_id: int,
        digest: bytes,
        groups: tuple[tuple[int, bytes], ...],
        ended: Callable[[Decision | None, BaseException | None], None],
        *,
        timeout: float,
        unfinished: tuple[str, ...],
    ) -> Cancellable | None:
        """Vote for the open step and wait for the decision.

        A wait that ends without the decision, by its time or by cancelling, leaves the step in doubt: `decision` gives
        later what became of the vote that `unanswered` names.

        Args:
            view_id: The view that the caller is in.
            digest: Of the results that all ranks have.
            groups: (id, digest) of those that a sub-group has.
            ended: Called once, with what became of the vote or with an error: as `decision` has them, or why the view
                broke before the vote; nothing was voted for then.
            timeout: Seconds to wait.
            unfinished: The names of the step's operations that had not ended when the digest was made.
        Returns:
            The wait, by which it is cancelled; None where it has ended.
        """
        communicator = self._views.at_work(view_id)
        if self._outcomes.open is None or communicator is None:
            return self._tell_why_over(view_id, ended)
        if unfinished or communicator.running:
            left = _left_running(unfinished, communicator.running)
            error = PeerError(left, rank=communicator.rank, node=self._node, view=view_id)
            communicator.fail(error)
            ended(None, error)
            return None
        index, _ = self._outcomes.open
        self._outcomes.voted(view_id)
        self._member.vote(index, ok=True, digest=digest, groups=groups, now_ns=self._now_ns())
        self._on_change()
        return self.decision(view_id, index, ended, timeout=timeout)

    def _tell_why_over(self, view_id: int, ended: Callable[[None, BaseException], None]) -> Cancellable:
        """Tell why a view is over, when all ranks are told. A task of its own: no step that goes well needs it."""

        async def wait() -> None:
            error: BaseException
            try:
                error = await self._views.why_over(view_id)
            except BaseException as raised:  # cancelled; whatever it is, somebody waits
                error = raised
            ended(None, error)

        return self._loop.create_task(wait())

    def decision(
        self,
        view_id: int,
        index: int,
        ended: Callable[[Decision | None, BaseException | None], None],
        *,
        timeout: float,
    ) -> Cancellable:
        """Wait for what became of a vote.

        The view may be at work all that time, when another rank has not voted yet, or be long over.

        Args:
            view_id: The view of the vote.
            index: The coordinator's number of the step.
            ended: As `quicoll.engine.waiting.Waiting.decision` has it.
            timeout: Seconds.
        Returns:
            The wait, by which it is cancelled.
        """
        known = partial(self._outcomes.decision, view_id, index)
        return self._waiting.decision(known, timeout, view_id=view_id, ended=ended)

    async def unanswered(self, view_id: int, reason: str) -> tuple[int, int] | None:
        """Take note that the caller waits no longer for its step.

        Args:
            view_id: The view of the step.
            reason: Why, for the other ranks.
        Returns:
            (view, index) of its vote, for `decision`; None where it has not voted. Then the view is given up, because
            it never will.
        """
        if self._outcomes.cast is not None and self._outcomes.cast[0] == view_id:
            return self._outcomes.cast
        await self._give_up(view_id, reason)
        return None


def _left_running(unfinished: tuple[str, ...], running: int) -> str:
    """Return that a step was left too early. running: collectives of the view, where none is known by its name."""
    if not unfinished:
        return f"the step was left with {running} collective{'' if running == 1 else 's'} still running"
    more = f" and {len(unfinished) - _NAMED} more" if len(unfinished) > _NAMED else ""
    it = "it" if len(unfinished) == 1 else "them"
    return f"the step was left with {', '.join(unfinished[:_NAMED])}{more} still running: await {it} inside of the step"
