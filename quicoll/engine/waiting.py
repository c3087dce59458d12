"""What callers wait for: a view at work, or the decision of a step. And what they are told where it does not come.

    waiting    it may still come; every change in the engine wakes all who wait, and they look again. Who waits for a
               view is a task; a decision, of which there is one a step, is told by a call
    refused    the coordinator refuses this rank: no view comes any more, and no decision
    over       the job is done, or this rank was told to leave it: no view comes any more; a decision still may
    closed     the engine is closed: nothing comes any more

Invariant: every wait ends, with what it is for or by its own time, and who waits in vain is told what was missing.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quicoll.errors import LocalError, Partitioned, PeerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.engine.answers import Cancellable
    from quicoll.engine.decisions import Decision
    from quicoll.membership.member.actions import Dismissal, FreeToLeave, JobOver
    from quicoll.membership.view import View

__all__ = ["Waiting", "job_closed"]


class Waiting:
    """See the module's head."""

    def __init__(
        self, *, loop: asyncio.AbstractEventLoop, node: str, default_address: bool, absence: Callable[[], str]
    ) -> None:
        """Begin with nobody who waits.

        Args:
            loop: The loop on which they wait.
            node: This rank's node, for errors.
            default_address: Whether nobody said where the coordinator is, which may be why it is not found.
            absence: Says that the coordinator is not there, since when and why; "" where it is.
        """
        self._loop = loop
        self._node = node
        self._default_address = default_address
        self._absence = absence
        self._changed: asyncio.Future[None] | None = None  # of those who wait for a view; None: nobody does
        self._verdicts: dict[_Verdict, None] = {}  # an ordered set: who waits for a decision
        self._timer: asyncio.TimerHandle | None = None  # at `_timer_at` it is seen who of them has waited too long
        self._timer_at = 0.0
        self._held = ""  # why the coordinator cannot form a view
        self._refused = ""
        self._over: JobOver | Dismissal | FreeToLeave | None = (
            None  # why there is no view any more, where the coordinator says so
        )
        self.closed = False
        """Whether the engine is closed; `close` says so."""
        self.on_wake: Callable[[], None] = lambda: None
        """Called whenever all who wait look again, before they do."""

    def wake(self) -> None:
        """Have all who wait look again."""
        self.on_wake()
        if self._changed is not None:
            changed, self._changed = self._changed, None
            changed.set_result(None)
        for verdict in list(self._verdicts):
            self._look(verdict)

    def held(self, cause: str) -> None:
        """Take note of why no view can be formed now, "" where one can. Nobody is woken by that."""
        self._held = cause

    def refuse(self, reason: str) -> None:
        """Tell all who wait that the coordinator refuses this rank."""
        self._refused = reason
        self.wake()

    def end(self, over: JobOver | Dismissal | FreeToLeave) -> None:
        """Tell all who wait for a view that they need not, since the job is done or goes on without this rank."""
        self._over = over
        self.wake()

    def close(self) -> None:
        """Tell all who wait, and all who will, that the engine is closed."""
        self.closed = True
        self.wake()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def view(
        self, at_work: Callable[[], View | None], timeout: float | None, *, joining: bool
    ) -> View | JobOver | Dismissal | FreeToLeave:
        """Wait for a view.

        Args:
            at_work: Gives the view that is at work, None while there is none.
            timeout: Seconds; None: whoever calls this ends it.
            joining: Whether this is the first view of the job, for the error.
        Returns:
            The view; or that there will be none, and why.
        Raises:
            LocalError: The engine is closed.
            PeerError: The coordinator refuses this rank; or, when joining, no view came in time.
            Partitioned: No view came in time.
        """
        try:
            async with asyncio.timeout(timeout):
                while (view := at_work()) is None:
                    if self.closed:
                        raise job_closed()
                    if self._refused:
                        raise PeerError(self._refusal())
                    if self._over is not None:
                        return self._over
                    if self._changed is None:
                        self._changed = self._loop.create_future()
                    await asyncio.shield(self._changed)
        except TimeoutError:
            why = self.missing() or "the view is not complete"
            if joining:
                raise PeerError(f"not joined within {timeout:g} s: {why}") from None
            raise Partitioned(f"no view within {timeout:g} s: {why}", node=self._node) from None
        return view

    def decision(
        self,
        known: Callable[[], Decision | None],
        timeout: float,
        *,
        view_id: int,
        ended: Callable[[Decision | None, BaseException | None], None],
    ) -> Cancellable:
        """Wait for what became of a vote.

        Args:
            known: Gives the decision, None until it is known.
            timeout: Seconds.
            view_id: The view of the vote, for errors.
            ended: Called once, with the decision or with an error: Partitioned where it is not known in time or the
                coordinator refuses this rank, LocalError where the engine is closed, CancelledError where the wait is
                cancelled. At once, where it is known.
        Returns:
            The wait, by which it is cancelled.
        """
        verdict = _Verdict(self, known, view_id, ended, timeout=timeout, until=self._loop.time() + timeout)
        self._verdicts[verdict] = None
        self._look(verdict)
        if verdict in self._verdicts:
            self._watch(verdict.until)
        return verdict

    def _watch(self, until: float) -> None:
        """See to it that a wait ends then. A timer for an earlier time stays: there is a wait with each step, which
        hardly ever lasts, and to look in vain once in a while costs less than to set a timer for each."""
        if self._timer is not None:
            if self._timer_at <= until:
                return
            self._timer.cancel()
        self._timer_at = until
        self._timer = self._loop.call_at(until, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = max(self._loop.time(), self._timer_at)  # a loop may wake us a little before the time
        for verdict in list(self._verdicts):
            if verdict.until <= now:
                self._too_late(verdict)
        if self._verdicts:
            self._watch(min(verdict.until for verdict in self._verdicts))

    def _look(self, verdict: _Verdict) -> None:
        decision = verdict.known()
        if decision is not None:
            self._settle(verdict, decision, None)
        elif self.closed:
            self._settle(verdict, None, job_closed())
        elif self._refused:
            doubt = f"{self._refusal()}; whether the step is committed is not known"
            self._settle(verdict, None, Partitioned(doubt, node=self._node, view=verdict.view_id))

    def _too_late(self, verdict: _Verdict) -> None:
        absence = self._absence()
        doubt = (
            f"no decision within {verdict.timeout:g} s{f' ({absence})' if absence else ''}; whether the step is "
            "committed is not known yet"
        )
        self._settle(verdict, None, Partitioned(doubt, node=self._node, view=verdict.view_id))

    def _settle(self, verdict: _Verdict, decision: Decision | None, error: BaseException | None) -> None:
        if verdict not in self._verdicts:
            return
        del self._verdicts[verdict]
        verdict.ended(decision, error)

    def give_up(self, verdict: _Verdict) -> None:
        """Wait for a decision no more."""
        self._settle(verdict, None, asyncio.CancelledError())

    def _refusal(self) -> str:
        return f"the coordinator refuses this rank: {self._refused}"

    def missing(self) -> str:
        """Return what keeps a view from being formed, as far as it is known; "" where nothing is known to."""
        absence = self._absence()
        if absence and self._default_address:
            absence += "; that is the default address, none was given"
        return absence or self._held


class _Verdict:
    """One who waits for a decision. timeout: how many seconds; until: by the loop's time."""

    def __init__(
        self,
        waiting: Waiting,
        known: Callable[[], Decision | None],
        view_id: int,
        ended: Callable[[Decision | None, BaseException | None], None],
        *,
        timeout: float,
        until: float,
    ) -> None:
        self.known = known
        self.view_id = view_id
        self.ended = ended
        self.timeout = timeout
        self.until = until
        self._waiting = waiting

    def cancel(self) -> None:
        self._waiting.give_up(self)


def job_closed() -> LocalError:
    """Return the error for a call that comes, or is still under way, when the engine is closed."""
    return LocalError("the job is closed", usable=False)
