"""Steps that are left before they are decided: what the next one may do ahead of that, and what becomes of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from step_rank import Rank, aborted, committed, raising, view, virtually

from quicoll.errors import LocalError, Mismatch, Partitioned, PeerError, QuicollError, StepAborted, Terminated
from quicoll.state.version import StateVersion
from quicoll.step.protocol import StepPhase

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quicoll.engine.decisions import Decision
    from quicoll.step.context import Step

AFTER_ONE = StateVersion(11, 1)


class Ahead(Rank):
    """A rank that has left its first step; that is decided when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.engine.view_at_work = 1
        self.decision: asyncio.Future[Decision] = asyncio.get_running_loop().create_future()
        self.engine.answers["vote"] = self.decision

    async def leave(self) -> None:
        async with self.step(overlap=True) as step:
            step.on_commit(lambda: self.ran.append(step.number))
        await asyncio.sleep(0)
        self.demand_untouched()

    def decide(self, decision: Decision) -> None:
        self.decision.set_result(decision)
        self.engine.answers["vote"] = committed(12)

    def demand_untouched(self) -> None:
        """Nothing has followed from the first step but its vote."""
        assert (self.ran, self.state.version) == ([], StateVersion())
        assert (self.engine.asked("begin"), len(self.engine.asked("vote"))) == ([(1, 1)], 1)
        assert (self.protocol.in_doubt, self.context.undecided) == (True, 1)


async def ahead() -> Ahead:
    rank = Ahead()
    await rank.leave()
    return rank


async def second(rank: Ahead, body: Callable[[Step], Awaitable[None]]) -> None:
    async with rank.step() as step:
        await body(step)


async def waiting(step: Step) -> None:
    await step.ready()


async def going_on(step: Step) -> None:
    """It does not look at the decision before it is left."""


# -- what the second step may do ---------------------------------------------------------------------------------------


async def test_a_step_is_entered_ahead_of_the_decision_and_begins_with_it() -> None:
    rank = await ahead()
    async with rank.step() as step:
        assert (step.number, step.view, rank.protocol.phase) == (2, view(1), StepPhase.AHEAD)
        await asyncio.sleep(0)
        rank.demand_untouched()
        assert not step.decided
        with pytest.raises(LocalError, match=r"step 2 has not begun, since step 1 is not decided"):
            step.on_commit(lambda: rank.ran.append(2))
        rank.decide(committed())
        await asyncio.wait_for(asyncio.shield(rank.decision), 5.0)
        for _ in range(3):  # from the engine to the vote's answer
            await asyncio.sleep(0)
        assert step.decided
        assert rank.ran == []  # it is applied where it is awaited, and nowhere else
        await step.ready()
        assert step.decided
        assert (rank.ran, rank.state.version, rank.protocol.phase) == ([1], AFTER_ONE, StepPhase.OPEN)
        assert (rank.context.undecided, rank.engine.asked("begin")) == (None, [(1, 1), (1, 2)])
        await step.ready()  # nothing more
        step.on_commit(lambda: rank.ran.append(2))
    assert (rank.ran, rank.state.version) == ([1, 2], StateVersion(12, 2))


async def test_leaving_a_step_waits_for_the_decision_where_that_was_not_done() -> None:
    rank = await ahead()
    rank.decide(committed())
    async with rank.step():
        rank.demand_untouched()
    assert (rank.ran, rank.state.version) == ([1], StateVersion(12, 2))


async def test_no_vote_is_cast_before_the_one_before_it_is_decided() -> None:
    rank = await ahead()
    rank.decide(committed())
    for number in (2, 3):
        async with rank.step(overlap=True) as step:
            assert step.number == number
    assert rank.state.version == StateVersion(12, 2)
    assert rank.protocol.in_doubt
    await rank.protocol.settle()
    assert (rank.state.version.step, rank.protocol.in_doubt) == (3, False)


async def test_one_task_at_a_time_waits_for_the_begin_of_a_step() -> None:
    rank = await ahead()
    async with rank.step() as step:
        first = asyncio.ensure_future(step.ready())
        await asyncio.sleep(0)
        with pytest.raises(LocalError, match="another task waits"):
            await step.ready()
        with pytest.raises(LocalError, match="another task"):
            await rank.protocol.ready()
        rank.decide(committed())
        await first
        with pytest.raises(LocalError, match="do not nest"):
            await rank.one()
    with pytest.raises(LocalError, match="was left before"):
        await step.ready()


async def test_a_step_that_is_left_while_another_task_waits_for_its_begin_does_not_begin() -> None:
    rank = await ahead()
    others: list[asyncio.Future[None]] = []

    async def elsewhere(step: Step) -> None:
        others.append(asyncio.ensure_future(step.ready()))
        await asyncio.sleep(0)

    with pytest.raises(LocalError, match="another task waits for that"):
        await second(rank, elsewhere)
    rank.decide(committed())
    with pytest.raises(LocalError, match="left while it waited to begin"):
        await others[0]
    assert (rank.ran, rank.protocol.phase, rank.engine.asked("begin")) == ([1], StepPhase.OUTSIDE, [(1, 1)])
    assert await rank.one() == 2


# -- what becomes of it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "error"), [("failed", StepAborted), ("mismatch", Mismatch)])
@pytest.mark.parametrize("body", [waiting, going_on])
async def test_an_abort_of_the_first_step_ends_the_second_by_the_same_error(
    kind: str, error: type[QuicollError], body: Callable[[Step], Awaitable[None]]
) -> None:
    rank = await ahead()
    rank.decide(aborted(kind))
    with pytest.raises(error) as caught:
        await second(rank, body)
    assert caught.value.step == 1
    assert (rank.ran, rank.state.version, rank.protocol.phase) == ([], StateVersion(), StepPhase.OUTSIDE)
    assert (rank.engine.asked("begin"), rank.engine.asked("give_up")) == ([(1, 1)], [])
    assert await rank.one() == 1
    assert rank.ran == [1]


async def test_a_second_step_whose_body_swallows_the_abort_of_the_first_is_not_committed() -> None:
    rank = await ahead()
    rank.decide(aborted())

    async def careless(step: Step) -> None:
        for _ in range(2):
            with pytest.raises(StepAborted):
                await step.ready()

    with pytest.raises(StepAborted, match="step 1 was not committed"):
        await second(rank, careless)
    assert len(rank.engine.asked("vote")) == 1


async def test_where_the_view_is_over_the_second_step_is_aborted_with_the_reason_and_the_first_one_stands() -> None:
    rank = await ahead()

    async def late(step: Step) -> None:
        rank.engine.view_at_work, rank.engine.answers["wait_view"] = 2, view(2, committed_step=1)
        rank.decide(committed())
        rank.engine.answers["vote"] = PeerError("worker-1 was lost", view=1)
        await step.ready()

    with pytest.raises(StepAborted, match="step 2 was not committed: worker-1 was lost") as caught:
        await second(rank, late)
    assert (caught.value.view, caught.value.step) == (1, 2)
    assert (rank.ran, rank.state.version) == ([1], AFTER_ONE)
    rank.engine.answers["vote"] = committed(12)
    assert await rank.one() == 2


async def test_a_decision_that_does_not_come_leaves_the_first_step_in_doubt_for_the_next_entry() -> None:
    rank = await ahead()
    rank.engine.answers["unanswered"] = (1, 11)
    rank.decision.set_exception(Partitioned("no decision within 60 s"))
    with pytest.raises(Partitioned):
        await second(rank, waiting)
    assert (rank.ran, rank.protocol.in_doubt) == ([], True)
    rank.engine.answers["vote"] = committed(12)
    assert await rank.one() == 2
    assert rank.ran == [1, 2]


async def test_a_body_that_fails_ahead_of_the_decision_ends_the_view_and_the_first_step_stands() -> None:
    rank = await ahead()
    rank.decide(committed())
    with pytest.raises(ZeroDivisionError):
        async with rank.step():
            raising(ZeroDivisionError("by zero"))()
    assert (rank.ran, rank.state.version) == ([1], AFTER_ONE)
    assert rank.engine.asked("give_up") == [(1, "ZeroDivisionError: by zero")]
    assert await rank.one() == 2


async def test_a_body_that_is_cancelled_ahead_waits_for_nothing_and_the_decision_is_still_to_come() -> None:
    rank = await ahead()
    with pytest.raises(asyncio.CancelledError):
        async with rank.step():
            raising(asyncio.CancelledError())()
    assert len(rank.engine.asked("give_up")) == 1
    rank.demand_untouched()
    rank.decide(committed())
    async with rank.step() as again:
        await again.ready()
    assert (again.number, rank.ran) == (2, [1])


# -- where else the decision is awaited --------------------------------------------------------------------------------


@pytest.mark.parametrize("at_the_end", [True, False])
async def test_ready_and_the_end_of_the_job_wait_for_the_decision(at_the_end: bool) -> None:
    for decision in (committed(), aborted()):
        rank = await ahead()
        rank.decide(decision)
        wait = rank.protocol.settle if at_the_end else rank.protocol.ready
        if decision.commit:
            await wait()
        else:
            with pytest.raises(StepAborted):
                await wait()
        assert rank.ran == [1] * decision.commit
        assert not rank.protocol.in_doubt
        await wait()


async def test_a_rank_that_is_asked_to_stop_enters_no_step_ahead_and_applies_what_was_committed() -> None:
    rank = await ahead()
    rank.decide(committed())
    rank.stop.ask()
    with pytest.raises(Terminated):
        async with rank.step():
            raise AssertionError("no step is entered")
    assert rank.ran == [1]


@virtually
async def test_a_rank_that_is_asked_to_stop_ahead_waits_for_the_decision_no_longer_than_it_may() -> None:
    rank = await ahead()
    rank.engine.answers["unanswered"] = (1, 11)

    async def asked(step: Step) -> None:
        rank.stop.ask()
        await step.ready()

    with pytest.raises(Terminated):
        await second(rank, asked)
    assert (rank.ran, rank.protocol.in_doubt) == ([], True)
