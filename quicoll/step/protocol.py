"""A step: entered on all ranks, voted on by all, committed on all or on none.

    enter   wait for a view that is at work; if it is a new one, bring every rank to the same state, or let those that
            are far behind learn it outside of views (quicoll.state.learning), and teach them; then begin
    body    compute, call collectives; an error here ends the step on all ranks
    leave   vote with the digest of all results; the coordinator decides; committed on all ranks or on none

Where the view goes on, nothing is waited for at the entry: what begins the step is posted to the engine, and the vote,
which follows it there, is the one thing of a step that is waited for. A view that ends between the last look at it and
the step's begin is noticed by the first operation, or by the vote: the step has not begun then, and nothing of it is
voted for.

With `job.step(overlap=True)` a step is left when its vote is cast. The next step may be entered at once, ahead of the
decision, and may compute; that step begins when the decision is there, which is awaited in one place (`conclude`): in
`Step.ready` of the next step, else where that is left, else by `ready`, `check_state`, or the end of the job's block.
Until then nothing of the next step exists for any other rank, so none of them, and no part of the engine, knows of it:

    the state      is the one before the first step. Its callbacks run where the decision is awaited, and nowhere else
    collectives    are refused, in a step and out of one: no result is seen that the decision could make void
    on_commit      is refused: what would be applied depends on a state that is not there yet
    the view       of the second step is the first one's. Where that is over by then, the step's first operation says
                   so, or its vote, as wherever a view ends between the last look at it and a step's begin

    the first step     what is raised where the decision is awaited    the second step
    is committed       nothing                                         begins
    is aborted         StepAborted or Mismatch, of the first step      is no more; the next attempt is at the first one
    is in doubt        Partitioned                                     is no more; the next entry waits for the decision

Where the body of the second step raises before it has awaited the decision, that is awaited first, and the outcome of
the first step stands; then the view ends for all ranks, as for any step that is left by an error.

It is one level deep: the vote of the second step is cast after the decision on the first, so there is one vote at most
whose decision is not known.

States are compared when a view begins and, at times, beside a step (quicoll.state.keeper): the digest is made at the
step's entry, its exchange goes on beside the body, and is looked at when the step is left, before the vote. Where
states differ, the step is aborted on all ranks, which ends its view, and the next entry heals it.

    outcome         the caller gets             its callbacks of on_commit
    committed       a normal exit               have run, in order
    aborted         StepAborted                 never run
    in doubt        Partitioned                 run at the next step's entry, if it turns out to be committed
    in doubt        CancelledError, of the      the same
                    wait for the decision
    own error       that error; others abort    never run
    states differ   StepAborted                 never run
    and no majority Diverged, from then on      no step begins any more
    a part of a     ShardLost, at the entry     no step begins without it
    state is lost

A rank that was asked to stop (quicoll.stop) enters no step: it gets Terminated, before the entry or out of a wait
there. Where it alone holds the state that others wait for, it hands that over first: it is in the views that bring
others to it, begins no step in them, and goes when the coordinator says that it may, or after `stop_timeout`. A step
that is open goes on for `stop_timeout`, and is aborted on all ranks then. So does the wait for a decision, which is
Terminated then.

A rank that owns part of a sharded state does not go before others have it, whether it was asked to stop or told to
leave. It is in one more view, where it is named as one that parts (`View.parting`): states are synchronised in it, so
that what it owns is handed over, and no step begins. It gets Terminated or Dismissed then, and the others wait for the
next view. What keeps it from that for `hold_timeout` is logged, and it goes.

The phases of a rank's protocol. One task at a time is in ENTRY, OPEN or END; another one gets a LocalError:

    OUTSIDE --ready(), enter()--> ENTRY --begun--> OPEN --leave()--> END --> OUTSIDE
                                  ENTRY --ready() is done, or the entry failed--> OUTSIDE
    OUTSIDE --enter(), a decision is left to be awaited--> AHEAD --proceed()--> ENTRY --begun--> OPEN
                                  ENTRY --the decision, or the view, is against it--> AHEAD --leave()--> OUTSIDE

Beside its phase the protocol may have one vote in doubt: cast, and its decision not known here. A vote counts as in
doubt from just before it is cast until its decision arrives, or until it is certain that it was never cast.

A vote is left to be decided (`_left`) from the end of a step with overlap until its decision is awaited. That is a
doubt as well, of which the caller has not been told: whatever keeps it from being awaited leaves it to the next entry.

Invariants: while a vote is in doubt no other step begins here, because the next number and the state depend on it; the
callbacks of an attempt run at most once, and only after a commit; `state.version` moves after they have run.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quicoll.checks import seconds
from quicoll.errors import (
    AuditError,
    Corrupted,
    Dismissed,
    Diverged,
    JobDone,
    LocalError,
    Mismatch,
    Partitioned,
    PeerError,
    QuicollError,
    ShardLost,
    StepAborted,
    Terminated,
)
from quicoll.membership.member.actions import Dismissal, FreeToLeave, JobOver
from quicoll.state.keeper import StateKeeper
from quicoll.state.version import StateVersion
from quicoll.step.attempt import StepAttempt, aborted, not_committed, reason_of
from quicoll.stop import StopRequest

if TYPE_CHECKING:
    from quicoll.collectives.context import CallContext
    from quicoll.collectives.group import Group
    from quicoll.engine.answers import Begin
    from quicoll.engine.decisions import Decision
    from quicoll.engine.face import EngineFace
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.state.rank_state import RankState
    from quicoll.state.synchronisation import StateCheck, ViewState

__all__ = ["StepPhase", "StepProtocol", "at_work"]

_log = logging.getLogger("quicoll")


class StepPhase(enum.Enum):
    """Where this rank's protocol stands; see the module's head."""

    OUTSIDE = "outside"
    ENTRY = "entry"
    AHEAD = "ahead"
    OPEN = "open"
    END = "end"


@dataclass(frozen=True, slots=True)
class _Doubt:
    """A vote that was cast, or is about to be, and whose decision is not known here."""

    attempt: StepAttempt
    view_id: int


class StepProtocol:
    """One rank's side of the step protocol, on the caller's loop. See the module's head.

    `synchronise`, `enter`, `proceed`, `begin`, `commit`, `decided` and `apply` may be overridden to look at what
    happens; the simulator's checks do.
    """

    def __init__(
        self,
        context: CallContext,
        engine: EngineFace,
        runtime: Runtime,
        *,
        state: RankState,
        state_group: Group,
        hold_timeout: float,
        check_every: int,
        learn_from: int,
        stop: StopRequest | None = None,
        stop_timeout: float = 5.0,
    ) -> None:
        """Make a protocol that is outside of any step.

        Args:
            context: The view that the rank's caller is in, and the results for its vote.
            engine: The rank's engine, called by way of runtime.
            runtime: The loop on which the engine lives.
            state: What this rank holds.
            state_group: All ranks of the present view, for what is sent when a view begins.
            hold_timeout: Seconds to wait for a view, and for a decision.
            check_every: Committed steps from one comparison of states to the next; 0: only when a view begins.
            learn_from: Bytes of a state from which on a rank that is behind learns it outside of views; 0: none is.
            stop: Asked, no step is entered; None is never asked.
            stop_timeout: Seconds that the open step has then; the wait for its decision has as many.
        """
        self.state = state
        self._context = context
        self._engine = engine
        self._runtime = runtime
        self._keeper = StateKeeper(engine, runtime, state, state_group, check_every=check_every, learn_from=learn_from)
        self._hold_timeout = hold_timeout
        self._stop = stop or StopRequest()
        self._stop_timeout = stop_timeout
        self._unlimit: Callable[[], object] = lambda: None  # while a step is open: lets it go on as long as it likes
        self._giving_up: asyncio.Task[None] | None = None  # the loop itself keeps no task alive
        self._phase = StepPhase.OUTSIDE
        self._open: StepAttempt | None = None  # in AHEAD, and in OPEN
        self._doubt: _Doubt | None = None
        self._left: asyncio.Future[Decision] | None = None  # the decision on the vote in doubt, if nobody awaits it yet
        self._dismissed = ""  # why this rank is to leave, once it has handed over what it owned
        self._synchronised = 0  # the view in which our state was compared with the others'
        self._check: StateCheck | None = None  # under way beside the open step

    @property
    def phase(self) -> StepPhase:
        """Where the protocol stands."""
        return self._phase

    @property
    def in_doubt(self) -> bool:
        """True while a vote was cast whose decision is not known here."""
        return self._doubt is not None

    @property
    def entered(self) -> bool:
        """True while the caller is inside a step."""
        return self._phase in (StepPhase.AHEAD, StepPhase.OPEN)

    # -- entry ---------------------------------------------------------------------------------------------------

    async def ready(self, timeout: float | None = None) -> None:
        """Wait for a view at work and bring this rank's state up to date in it.

        Args:
            timeout: Seconds; None takes hold_timeout.
        Raises:
            LocalError: A step is open, another task is in the protocol, or the state cannot be taken here.
            Partitioned: There is no such view, or no decision on a vote in doubt, within timeout.
            StepAborted: A rank was lost meanwhile. Call it again.
            Diverged: The ranks hold different states, and nobody knows which is right.
            Terminated: This rank was asked to stop.
        """
        await self._enter(partial(self._ready, timeout))

    async def check_state(self) -> bytes:
        """Compare all ranks' states now, and heal what differs; return the digest that all have then.

        Raises:
            LocalError: No state is registered; else as `ready`.
            Partitioned: As `ready`.
            StepAborted: As `ready`.
            Diverged: As `ready`.
        """
        await self._enter(self._compare)
        return self._keeper.digest

    async def _compare(self) -> None:
        if self.state.save is None:
            raise LocalError("there is no state to compare: call job.register_state(save, load) first")
        await self._ready()
        await self._synchronise()

    async def enter(self, attempt: StepAttempt) -> None:
        """Begin a step: `ready`, then tell the engine. Or enter it ahead of the decision on the one before it.

        Raises:
            LocalError: The attempt was entered before, or as `ready`.
            Partitioned: As `ready`.
            StepAborted: The view ended meanwhile; the step was committed nowhere. Or the step before it was, which was
                left before it was decided.
            Mismatch: The ranks differed in the step before it, which was left before it was decided.
            Terminated: This rank was asked to stop; no step is open.
        """
        if attempt.number:
            raise LocalError("a Step is one attempt: call job.step() for the next one")
        undecided = self._doubt if self._left is not None and not self._stop.asked else None
        # A signal may have ended the wait for the decision on a step without overlap: that is awaited here.
        if undecided is not None and undecided.attempt.overlap and self._phase is StepPhase.OUTSIDE:
            attempt.number, attempt.view = undecided.attempt.number + 1, self._context.view
            self._open, self._phase = attempt, StepPhase.AHEAD
            return
        await self._enter(partial(self._begin, attempt))

    async def _begin(self, attempt: StepAttempt) -> None:
        await self._ready()
        attempt.number, attempt.view = self.state.version.step + 1, self._context.view
        await self.begin(attempt, self._context.view)

    def is_decided(self, attempt: StepAttempt) -> bool:
        """Return whether `proceed` would wait for no decision."""
        return not (self._open is attempt and self._phase is StepPhase.AHEAD) or self._left is None or self._left.done()

    async def proceed(self, attempt: StepAttempt) -> None:
        """Begin a step that was entered ahead of the decision on the one before it, once that is there.

        Nothing for a step that has begun.

        Raises:
            LocalError: The attempt was not entered, or has been left, or another task is in here.
            StepAborted: The step before it was committed nowhere, or this one cannot begin; this attempt is no more.
            Mismatch: The ranks differed in the step before it, which was committed nowhere.
            Partitioned: The vote on the step before it is in doubt.
            Terminated: This rank was asked to stop, and no decision came; the vote is in doubt.
        """
        if self._open is not attempt or attempt.view is None:
            raise LocalError("this step is not open: it was left before, or never entered")
        if self._phase is StepPhase.OPEN:
            return
        if self._phase is not StepPhase.AHEAD:
            raise LocalError("another task waits for this step to begin")
        if attempt.failure is not None:
            raise attempt.failure
        self._phase = StepPhase.ENTRY
        try:
            with self._stop.interrupting(after=self._stop_timeout):
                await self.conclude()
            if attempt.over:
                raise LocalError(f"step {attempt.number} was left while it waited to begin")
            await self.begin(attempt, attempt.view)
        except BaseException as error:
            attempt.failure = error
            self._phase = StepPhase.AHEAD
            if attempt.over:
                self._drop(attempt)
            raise

    def demand_begun(self, attempt: StepAttempt) -> None:
        """Raise LocalError where an attempt was entered and waits for the decision on the step before it."""
        if self._open is attempt and self._phase is not StepPhase.OPEN:
            raise LocalError(
                f"step {attempt.number} has not begun, since step {attempt.number - 1} is not decided: "
                "call `await step.ready()` first"
            )

    async def begin(self, attempt: StepAttempt, view: View) -> None:
        """Begin a step; the state is the one after the step before it, and `view` was at work a moment ago."""
        auditor = self._context.auditor
        if auditor is not None:
            auditor.begin(
                step=attempt.number, view=view.view_id, rank=self._context.rank, world=self._context.world_size
            )
        try:
            await self._keeper.teach(view, timeout=self._context.config.timeout)
            self._check = self._keeper.begin_check()
            self._runtime.post(partial(self._engine.voting.begin, view.view_id, attempt.number))
        except (PeerError, Corrupted, Partitioned) as error:
            raise self._aborted(error, attempt.number) from error
        except BaseException as error:
            # Cancelled, for one: the others may be in the step, and nobody here would ever vote for it.
            await self._give_up(view.view_id, self._why_given_up(error))
            raise
        self._context.open(attempt.number, attempt.callbacks.append)
        self._open, self._phase = attempt, StepPhase.OPEN
        self._limit(attempt, view.view_id)

    def _limit(self, attempt: StepAttempt, view_id: int) -> None:
        """Give the open step up if it is still open `stop_timeout` after this rank was asked to stop.

        On the engine's loop, which goes on while the caller's thread waits in a blocking call. What the caller waits
        for fails there; its step is aborted, on all ranks, and at the next entry it finds that it was asked to stop.
        """
        loop = self._runtime.loop

        def overdue() -> None:
            if self._open is attempt:
                self._giving_up = loop.create_task(self._engine.give_up(view_id, "terminated"))

        self._unlimit = self._stop.limit(loop, self._stop_timeout, overdue)

    def _claim(self, phase: StepPhase) -> None:
        """Hold off other tasks, until `_release`: two would both bring the state up to date, or begin the step, and the
        others once."""
        if self._phase is not StepPhase.OUTSIDE:
            if self.entered:
                raise LocalError("a step is already open; steps do not nest, and ready() comes between them")
            raise LocalError("another task is in ready(), or at the entry or the end of a step, of this job")
        self._phase = phase

    def _release(self, phase: StepPhase) -> None:
        if self._phase is phase:  # an entry that went well has made it OPEN
            self._phase = StepPhase.OUTSIDE

    async def _enter(self, work: Callable[[], Awaitable[None]]) -> None:
        """Make an entry, which is given up when this rank is asked to stop; then, if needed, hand the state over."""
        self._claim(StepPhase.ENTRY)
        try:
            if self._left is not None:
                with self._stop.interrupting(after=self._stop_timeout):
                    await self.conclude()
            try:
                with self._stop.interrupting():
                    await work()
            except Terminated:
                await self._hand_over()
                raise
        finally:
            self._release(StepPhase.ENTRY)

    async def _hand_over(self) -> None:
        """Stay while others wait for the state that only this rank holds.

        For `stop_timeout` at most; where it owns part of a sharded state, which takes longer, `hold_timeout`.
        Whatever is in the way, this rank goes: it was asked to.
        """
        if self.state.save is None or self.state.torn or self._doubt is not None or self._dismissed:
            return
        owns = self.state.sharded is not None and self.state.sharded.agreed and self._context.world_size > 1
        with suppress(QuicollError, JobDone, Dismissed, Terminated, TimeoutError):
            async with asyncio.timeout(self._hold_timeout if owns else self._stop_timeout):
                if not await self._runtime.call(self._engine.ask_to_leave()):
                    return
                while True:
                    with suppress(StepAborted):  # a rank was lost: the next view is without it
                        await self._ready(after=self._synchronised)
                        await self._keeper.end_lessons()  # learners have the rest of the state in their next view
        if owns and not self._dismissed:
            _log.error("this rank was asked to stop, and goes without having handed over what it owns")

    async def _ready(self, timeout: float | None = None, *, after: int = 0) -> None:
        """after: a view that is not waited for."""
        self._keeper.demand_one_state()
        if self._dismissed:
            raise Dismissed(self._dismissed)
        timeout = self._hold_timeout if timeout is None else seconds(timeout)
        if self._doubt is not None:
            clock = asyncio.get_running_loop().time
            deadline = clock() + timeout
            await self._settle(self._doubt, timeout)
            timeout = max(deadline - clock(), 0.0)
        left = after
        if not after and self._synchronised and self._engine.view_at_work == self._synchronised:
            return
        while True:
            version = None if self.state.torn or self.state.save is None else self.state.version
            view = at_work(await self._runtime.call(self._engine.wait_view(timeout, after=left)), version)
            if view.view_id == self._synchronised:
                return
            self._context.enter(view)
            found = await self._synchronise()
            if not found.learners and not view.parting:
                self._synchronised = view.view_id
                return
            if not found.learners and self._context.config.node in view.parting:
                await self._runtime.call(self._engine.parted())
                self._dismissed = f"{self._context.config.node} leaves the job, and others have what it owned"
                raise Dismissed(self._dismissed)
            # This view ends without a failure; the next one has those that go on, and later those that learned.
            left = view.view_id
            if self._context.is_spare:
                await self._keeper.stand_by(view, found.lesson, timeout=self._context.config.timeout)
            elif found.lesson is not None:
                await self._keeper.learn(found.lesson, timeout=self._context.config.timeout)

    async def _synchronise(self) -> ViewState:
        try:
            found = await self.synchronise()
            if not found.learners:
                await self._keeper.redistribute(found, self._context.view)
            return found
        except (Diverged, ShardLost):
            # All ranks raise it, each when it has all that it needs. To end the view would keep others from that.
            raise
        except (PeerError, Corrupted, Partitioned) as error:
            # What no operation met, a digest that is wrong for instance, nobody else knows of yet.
            await self._runtime.call(self._engine.break_view(self._context.view.view_id, error))
            raise self._aborted(error, self.state.version.step + 1) from error
        except BaseException as error:
            # Of save() or load(), or a state that cannot be taken here: the others must not wait for their deadline.
            await self._give_up(self._context.view.view_id, self._why_given_up(error))
            raise

    def _why_given_up(self, error: BaseException) -> str:
        return "terminated" if self._stop.asked and isinstance(error, asyncio.CancelledError) else reason_of(error)

    async def synchronise(self) -> ViewState:
        """Bring every rank of the present view to the newest state that any of them holds, and to one state."""
        return await self._keeper.synchronise(self._context.view)

    async def _settle(self, doubt: _Doubt, timeout: float) -> None:
        """Wait for the decision on a vote in doubt, for at most `timeout` seconds. Raises Partitioned without one."""
        vote = await self._unanswered(doubt.view_id, "left its step before its vote")
        if vote is not None:
            wait: Begin[Decision] = partial(self._engine.voting.decision, *vote, timeout=timeout)
            decision = await self._runtime.begin(wait, self._engine.endpoint)
            if decision.commit:
                await self.apply(doubt.attempt, decision.index)
        self._doubt = None

    # -- end -----------------------------------------------------------------------------------------------------

    async def leave(self, attempt: StepAttempt, error: BaseException | None) -> None:
        """End the open step: vote for it if its body ended well, else end it on all ranks.

        Args:
            attempt: The open one.
            error: What the body raised. An error that says why the step is aborted passes as it is or as the cause of
                a StepAborted; any other is the caller's own and ends the step on the other ranks too.
        Raises:
            LocalError: The attempt is not the open one.
            StepAborted: The step was committed nowhere.
            Mismatch: The ranks' results or calls differ; the step was committed nowhere.
            Partitioned: The vote is in doubt.
            AuditError: The audit could not be written; the step was committed nowhere.
            Terminated: This rank was asked to stop, and no decision came; the vote is in doubt.
        """
        if self._open is not attempt:
            raise LocalError("this step is not open: it was left before, or never entered")
        if self._phase is StepPhase.AHEAD:
            if error is None:
                try:
                    await self.proceed(attempt)
                except BaseException:
                    self._drop(attempt)
                    raise
            else:
                await self._leave_ahead(attempt, error)
                return
        elif self._phase is not StepPhase.OPEN:
            attempt.over = True  # it does not begin any more
            raise LocalError("this step has not begun: another task waits for that")
        attempt.over = True
        self._unlimit()
        unfinished = self._context.settle()
        self._context.close()
        self._open, self._phase = None, StepPhase.OUTSIDE
        check, self._check = self._check, None
        self._claim(StepPhase.END)
        try:
            with self._stop.interrupting(after=self._stop_timeout):
                await self._end(attempt, error, unfinished, check)
        finally:
            self._release(StepPhase.END)

    async def settle(self) -> None:
        """Act on the decision of a step that was left before it was decided, if there is one; as `proceed` raises."""
        if self._left is not None and self._phase is StepPhase.OUTSIDE:
            self._claim(StepPhase.END)
            try:
                with self._stop.interrupting(after=self._stop_timeout):
                    await self.conclude()
            finally:
                self._release(StepPhase.END)

    def _drop(self, attempt: StepAttempt) -> None:
        attempt.over = True
        self._open, self._phase = None, StepPhase.OUTSIDE

    async def _leave_ahead(self, attempt: StepAttempt, error: BaseException) -> None:
        """Leave a step that has not begun, by an error of its body."""
        self._drop(attempt)
        if attempt.view is None or (error is attempt.failure and isinstance(error, QuicollError | Terminated)):
            return
        if isinstance(error, Exception):  # who is cancelled waits no more: the vote is left to be decided
            with suppress(QuicollError, Terminated):
                await self.settle()
        await self._give_up(attempt.view.view_id, reason_of(error))  # the others wait in this step

    async def _end(
        self, attempt: StepAttempt, error: BaseException | None, unfinished: tuple[str, ...], check: StateCheck | None
    ) -> None:
        view_id = self._context.view.view_id
        if error is None:
            await self._check_audit(view_id)
            if check is not None:
                await self._end_check(attempt, view_id, check)
            await self.commit(attempt, view_id, unfinished)
        elif isinstance(error, PeerError | Corrupted | Partitioned):
            # What no operation met, as a block that is not what its owner told, nobody else knows of yet. Then the view
            # is dead: no vote of ours can come from this step any more, and it is committed nowhere.
            await asyncio.shield(asyncio.ensure_future(self._runtime.call(self._engine.break_view(view_id, error))))
            raise self._aborted(error, attempt.number) from error
        elif not isinstance(error, Mismatch | StepAborted):  # those two say that all ranks know
            await self._give_up(view_id, reason_of(error))

    async def _end_check(self, attempt: StepAttempt, view_id: int, check: StateCheck) -> None:
        """Look at the comparison that began at the step's entry. Raises StepAborted where states differ."""
        nodes = self._context.view.nodes
        try:
            unequal = await self._keeper.end_check(check, self._context.view, attempt.number)
        except (PeerError, Corrupted, Partitioned) as error:
            await self._runtime.call(self._engine.break_view(view_id, error))  # nothing, where an operation met it
            raise self._aborted(error, attempt.number) from error
        except BaseException as error:
            await self._give_up(view_id, self._why_given_up(error))
            raise
        if unequal is None:
            return
        # Every rank says so, and all in the same words, whichever the coordinator hears first.
        node = nodes[unequal.ranks[0]] if len(unequal.ranks) == 1 else ""
        odd = () if unequal.giver is None else unequal.ranks
        found = Corrupted(unequal.text, rank=unequal.ranks[0] if node else None, node=node, view=view_id, odd=odd)
        await asyncio.shield(asyncio.ensure_future(self._runtime.call(self._engine.break_view(view_id, found))))
        raise self._aborted(found, attempt.number) from found

    async def _check_audit(self, view_id: int) -> None:
        if self._context.auditor is None:
            return
        try:
            self._context.auditor.check()
        except AuditError as error:
            await self._give_up(view_id, str(error))
            raise

    async def commit(self, attempt: StepAttempt, view_id: int, unfinished: tuple[str, ...]) -> None:
        """Vote for a step, and unless it overlaps with the next one wait for the decision and act on it.

        Args:
            attempt: The step.
            view_id: The view in which it ran.
            unfinished: The names of its operations that had not ended when it was left. The engine refuses the vote if
                there is one.
        """
        # Before the vote: whatever ends the wait, it has been cast or it has not.
        doubt = self._doubt = _Doubt(attempt, view_id)
        try:
            digest, groups = self._context.digests(attempt.number)
            vote: Begin[Decision] = partial(
                self._engine.voting.vote, view_id, digest, groups, timeout=self._hold_timeout, unfinished=unfinished
            )
            self._context.undecided = attempt.number if attempt.overlap else None
            self._left = self._runtime.begin(vote, self._engine.endpoint)
        except LocalError:  # the job is closed: there is nobody left to ask
            raise
        except BaseException as error:  # of a signal handler
            self._context.undecided = None
            await self._unheard(doubt, error)
            raise
        if not attempt.overlap:
            await self.conclude()

    async def conclude(self) -> None:
        """Wait for the decision on the vote that was cast last, and act on it. Nothing where none is left to decide."""
        doubt, decided, self._left = self._doubt, self._left, None
        if doubt is None or decided is None:
            return
        attempt = doubt.attempt
        try:
            decision = await decided
        except (PeerError, Corrupted) as error:
            self._doubt = None
            raise self._aborted(error, attempt.number) from error
        except LocalError:  # the job is closed: there is nobody left to ask
            raise
        except BaseException as error:  # Partitioned, cancelled, or of a signal handler
            await self._unheard(doubt, error)
            raise
        finally:
            self._context.undecided = None
        await self.decided(attempt, decision)

    async def _unheard(self, doubt: _Doubt, error: BaseException) -> None:
        """Find out whether a vote was cast whose decision is awaited no more. Raises StepAborted where it was not."""
        # Shielded: another cancellation must not leave us without knowing whether the vote was cast.
        cast = await asyncio.shield(asyncio.ensure_future(self._unanswered(doubt.view_id, type(error).__name__)))
        if cast is None:
            self._doubt = None
            if isinstance(error, Partitioned):
                raise self._aborted(error, doubt.attempt.number) from error

    async def decided(self, attempt: StepAttempt, decision: Decision) -> None:
        """Apply a step that was committed; raise the error of one that was not."""
        if decision.commit:
            await self.apply(attempt, decision.index)
            return
        self._doubt = None
        raise not_committed(decision, number=attempt.number, view_id=self._context.view.view_id)

    async def apply(self, attempt: StepAttempt, index: int) -> None:
        """Change the state of a step that is committed, and say that it is changed, in this order.

        Args:
            attempt: The step, whose callbacks run.
            index: The coordinator's number of the decision.
        """
        self._doubt = None  # whatever becomes of the callbacks, they are not run another time
        try:
            attempt.run_callbacks()
        except BaseException as error:
            reason = f"{type(error).__name__} while applying step {attempt.number}"
            await self._end_view(self._context.view.view_id, reason)
            raise
        self.state.version = StateVersion(index, attempt.number)

    # -- what both ends need -------------------------------------------------------------------------------------

    async def _unanswered(self, view_id: int, reason: str) -> tuple[int, int] | None:
        return await self._runtime.call(self._engine.voting.unanswered(view_id, reason))

    async def _give_up(self, view_id: int, reason: str) -> None:
        """End the view for all ranks, because our own code failed. Bounded: the engine only queues a message.

        Shielded, since a cancellation is often why we are here.
        """
        await asyncio.shield(asyncio.ensure_future(self._end_view(view_id, reason)))

    async def _end_view(self, view_id: int, reason: str) -> None:
        await self._runtime.call(self._engine.give_up(view_id, reason))

    def _aborted(self, error: QuicollError, number: int) -> StepAborted:
        return aborted(error, number=number, view_id=self._context.view.view_id)


def at_work(found: View | JobOver | Dismissal | FreeToLeave, version: StateVersion | None = None) -> View:
    """Return the view that an engine has found.

    Args:
        found: A view, or that there will be none.
        version: Of the state that this rank holds whole; None where it holds none.
    Raises:
        JobDone: There will be none.
        Dismissed: There will be none for this rank, which was told to leave.
        Terminated: This rank was asked to stop, and may go.
    """
    if isinstance(found, Dismissal):
        raise Dismissed(found.reason)
    if isinstance(found, FreeToLeave):
        raise Terminated
    if not isinstance(found, JobOver):
        return found
    holds = version is not None and version.step == found.step
    state = "this rank holds the final state"
    if not holds:
        state = f"the final state is not here, but in the checkpoint of step {found.step}, where the job wrote one"
    raise JobDone(f"the job is done: its other ranks have ended; {state}", step=found.step, holds_state=holds)
