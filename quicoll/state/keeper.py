"""One rank's state in the course of a job: made one with the others' when a view begins, compared beside steps.

    synchronised    when a view begins, and on demand: all ranks' states are compared and made one; then what is divided
                    between the ranks comes to its owners (quicoll.state.redistribution)
    checked         beside a step's body: at the entry of the view's second step (what makes ranks differ mostly does so
                    at once), and of each step before which `check_every` were committed since the last comparison
    aside           a rank that is behind learns a large state outside of views, which others teach at the entries of
                    their steps (quicoll.state.learning); then states are synchronised in another view
    standing by     a spare that was shown in a view steps out of it and waits for one with a place for it; it learns
                    meanwhile, and its lessons may end and begin again in another view; of sharded states it gets
                    the blocks of the place that it will have (quicoll.state.warm_blocks)
    diverged        the ranks hold different states and nobody knows which is right. For good: no step begins any more

Invariant: whether a step is checked is the same on all ranks of a view. It depends on `check_every`, which is agreed
when the view begins, and on the step after which states were last found equal. All ranks compare when their view
begins; within it, a step that is not committed on all ranks ends it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from quicoll.errors import Diverged, LocalError, QuicollError
from quicoll.state.learning import Course, Teacher, learn
from quicoll.state.redistribution import redistribute
from quicoll.state.reports import StateReports
from quicoll.state.synchronisation import StateCheck, synchronise
from quicoll.state.transfer import all_done
from quicoll.state.warm_blocks import BlockGiver, receive_blocks, wanted

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from quicoll.collectives.group import Group
    from quicoll.engine.face import EngineFace
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.state.learning import Lesson
    from quicoll.state.rank_state import RankState
    from quicoll.state.synchronisation import Unequal, ViewState

__all__ = ["StateKeeper"]

log = logging.getLogger("quicoll")


class StateKeeper:
    """See the module's head."""

    def __init__(
        self, engine: EngineFace, runtime: Runtime, state: RankState, group: Group, *, check_every: int, learn_from: int
    ) -> None:
        """Keep a state that has been compared with nobody's.

        Args:
            engine: The rank's engine, which emits events.
            runtime: The loop on which the engine lives.
            state: What this rank holds.
            group: All ranks of the present view, with operations numbered apart from the user's.
            check_every: Committed steps from one comparison to the next; 0: only when a view begins.
            learn_from: Bytes of a state from which on a rank that is behind learns it outside of views; 0: none is.
        """
        self._engine = engine
        self._runtime = runtime
        self._state = state
        self._group = group
        self._reports = StateReports(engine, runtime, state)
        self._teacher = Teacher(state, engine.lessons, runtime)
        self._blocks = BlockGiver(state, engine.block_lessons, runtime)
        self._learn_from = learn_from
        self._own_check_every = check_every
        self._check_every = 0  # as all ranks of the view have it
        self._compared = 0  # the step after which states were last found equal
        self._first = True  # the next check is the first one of its view
        self._digest = b""
        self._diverged: Diverged | None = None

    @property
    def digest(self) -> bytes:
        """Of the state that all ranks had when it was compared last; b"" where this one registered none."""
        return self._digest

    def demand_one_state(self) -> None:
        """Raise Diverged where the ranks have diverged."""
        if self._diverged is not None:
            raise self._diverged

    async def synchronise(self, view: View) -> ViewState:
        """Bring every rank of a view to the newest state that any of them holds, and to one state.

        Returns:
            What was found and done; where it has learners, the view ends, and the next one has to be synchronised.
        Raises:
            QuicollError: As `quicoll.state.synchronisation.synchronise`.
        """
        try:
            if view.workers < view.world_size:
                await self._blocks.take(view, self._group.rank, timeout=self._engine.config.timeout)
            found = await synchronise(
                self._state,
                self._group,
                view,
                check_every=self._own_check_every,
                learn_from=self._learn_from,
                teacher=self._teacher,
            )
        except Diverged as error:
            self._diverged = error
            self._reports.diverged(error)
            raise
        except BaseException as error:
            self._reports.failed(error)
            raise
        if not found.learners:
            self._check_every, self._digest = found.check_every, found.digest
            self._compared, self._first = self._state.version.step, True
            self._reports.synchronised(found, view)
        return found

    async def redistribute(self, found: ViewState, view: View) -> None:
        """Bring the blocks of sharded states to their places, after all ranks have come to one state.

        Args:
            found: What `synchronise` has found.
            view: The view.
        Raises:
            QuicollError: As `quicoll.state.redistribution.redistribute`.
            LocalError: A rank has registered no state.
        """
        sharded = self._state.sharded
        if sharded is None:
            return
        if not found.registered:
            raise LocalError("a sharded state is divided between all ranks, and not all of them have registered one")
        blocks = await redistribute(sharded, self._group, view)
        if blocks:
            self._reports.emit("shards_received", blocks=blocks, view=view.view_id)

    async def learn(self, lesson: Lesson, *, timeout: float) -> None:
        """Step out of the view and learn, until that is enough, or this rank is in a view again, or cannot be.

        Args:
            lesson: What is learned.
            timeout: Seconds for each answer of the teacher.
        """
        course = Course(len(lesson.state.table))
        clock, loop = asyncio.get_running_loop().time, self._runtime.loop
        began, cause = clock(), "it ended"
        try:
            await self._runtime.call(self._engine.step_out(lesson.number))
            self._reports.emit("state_learning", from_node=lesson.teacher, chunks=len(lesson.state.table))
            cause = await self._learn(lesson, course, timeout)
        except QuicollError as error:
            cause = error.message
        finally:  # without an await: also of a process that comes to its end
            loop.call_soon_threadsafe(self._engine.step_in)
            self._reports.learned(course, clock() - began, cause)

    async def stand_by(self, view: View, lesson: Lesson | None, *, timeout: float) -> None:
        """Step out of the view in which this rank is a spare; return when there is a view for it, or can be none.

        Args:
            view: The one in which it is a spare.
            lesson: What can be learned meanwhile; None where no state is known of.
            timeout: Seconds for each answer of the teacher.
        """
        back = asyncio.ensure_future(self._runtime.call(self._engine.wait_view(None, after=view.view_id)))
        refreshing = asyncio.ensure_future(self._refresh(view, lesson, timeout))
        try:
            done, _ = await asyncio.wait((refreshing, back), return_when=asyncio.FIRST_COMPLETED)
            if back not in done:
                refreshing.result()  # an error of `save` is the caller's; whatever else ends it, there is a view later
                await asyncio.wait((back,))
        finally:
            for each in (refreshing, back):
                each.cancel()
                each.add_done_callback(_seen)
            self._runtime.loop.call_soon_threadsafe(self._engine.step_in)

    async def _refresh(self, view: View, lesson: Lesson | None, timeout: float) -> None:
        """Learn what changes, for as long as it can be learned; then be a spare that has to be shown again."""
        course = Course(0 if lesson is None else len(lesson.state.table), endless=True)
        try:
            await self._runtime.call(self._engine.step_out(view.view_id))
            self._reports.emit("standing_by", from_node="" if lesson is None else lesson.teacher)
            work: list[Awaitable[object]] = []
            if lesson is not None:
                work.append(learn(lesson, course, self._engine.lessons, self._runtime, timeout=timeout))
            sharded, traffic = self._state.sharded, self._engine.block_lessons
            if sharded is not None:
                work += [
                    receive_blocks(each, view, sharded, traffic, self._runtime, timeout=timeout)
                    for each in wanted(sharded, view, self._engine.config.node)
                ]
            await all_done(work)
        except QuicollError as error:
            log.info("this spare learns no more: %s", error.message)
            self._runtime.loop.call_soon_threadsafe(self._engine.step_in)

    async def _learn(self, lesson: Lesson, course: Course, timeout: float) -> str:
        """Learn until there is a view for this rank. Return why no further, "" if it was enough."""
        learning = asyncio.ensure_future(learn(lesson, course, self._engine.lessons, self._runtime, timeout=timeout))
        back = asyncio.ensure_future(self._runtime.call(self._engine.wait_view(None, after=lesson.number)))
        try:
            await asyncio.wait((learning, back), return_when=asyncio.FIRST_COMPLETED)
            if not learning.done():
                return "there is a view for this rank, or none any more"
            return learning.result()
        finally:
            # A task that is cancelled goes no further than the wait that it is in, so it writes nothing any more.
            for each in (learning, back):
                each.cancel()
                each.add_done_callback(_seen)

    async def teach(self, view: View, *, timeout: float) -> None:
        """Answer a rank that learns, if one has asked and it is time, and let spares have blocks; between two steps.

        Args:
            view: At work.
            timeout: Seconds that a chunk has to arrive.
        Raises:
            LocalError: What `save` returned is no state.
        """
        await self._teacher.between_steps(view, timeout=timeout)
        await self._blocks.between_steps(view)

    async def end_lessons(self) -> None:
        """Teach nobody any more: whoever learned is in a view again, which hands it the state."""
        await self._teacher.end_lessons()

    def begin_check(self) -> StateCheck | None:
        """Begin to compare states beside the step that is about to begin, if it is time.

        Here states are at rest: no code of the user can run.

        Raises:
            LocalError: What `save` returned is no state.
        """
        every = min(self._check_every, 1) if self._first else self._check_every
        if not every or self._state.version.step - self._compared < every:
            return None
        return StateCheck(self._state, self._group)

    async def end_check(self, check: StateCheck, view: View, step: int) -> Unequal | None:
        """Wait for a comparison.

        Args:
            check: What `begin_check` gave at the step's entry.
            view: The step's.
            step: Its number.
        Returns:
            In what states differ; None where they do not.
        Raises:
            Corrupted: A rank was told something else than the others.
            PeerError: A rank was lost.
        """
        unequal = await check.result(view.nodes, view.view_id)
        if unequal is None:
            self._compared, self._first = step - 1, False
        else:
            self._reports.unequal(unequal, step)
        return unequal


def _seen(future: asyncio.Future[Any]) -> None:
    """What a wait raises that nobody is in any more is no news."""
    if not future.cancelled():
        future.exception()
