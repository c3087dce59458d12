"""The steps of a rank that is asked to stop."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from step_rank import STOP_TIMEOUT, Rank, virtually

from quicoll.errors import JobDone, PeerError, StepAborted, Terminated
from quicoll.membership.member.actions import FreeToLeave, JobOver
from quicoll.state.version import StateVersion
from quicoll.step.protocol import StepPhase


@virtually
async def test_a_rank_that_is_asked_to_stop_ends_its_open_step_and_enters_no_other() -> None:
    rank = Rank()
    assert await rank.one(body=rank.stop.ask) == 1
    assert (rank.ran, rank.state.version.step) == ([1], 1)
    asked = len(rank.engine.calls)
    for entry in (rank.one, rank.protocol.ready):
        with pytest.raises(Terminated):
            await entry()
    assert (len(rank.engine.calls), rank.protocol.phase, rank.ran) == (asked, StepPhase.OUTSIDE, [1])


@virtually
async def test_a_wait_at_the_entry_ends_when_the_rank_is_asked_to_stop() -> None:
    rank = Rank()
    rank.engine.answers["wait_view"] = lambda: rank.stop.ask() or asyncio.Event()
    forever = rank.engine._answer

    async def answer(method: str, *arguments: Any) -> Any:
        given = await forever(method, *arguments)
        return await given.wait() if isinstance(given, asyncio.Event) else given

    rank.engine._answer = answer
    with pytest.raises(Terminated):
        await rank.one()
    assert (rank.ran, rank.protocol.phase) == ([], StepPhase.OUTSIDE)
    assert rank.engine.asked("give_up") == []


@virtually
async def test_a_decision_in_doubt_is_not_waited_for_by_a_rank_that_is_asked_to_stop() -> None:
    rank = Rank()
    await rank.in_doubt()
    rank.engine.answers["decision"] = asyncio.Event()
    asyncio.get_running_loop().call_soon(rank.stop.ask)
    with pytest.raises(Terminated):
        await rank.one()
    assert (rank.ran, rank.state.version.step) == ([], 0)


@virtually
async def test_a_step_that_does_not_end_is_given_up_on_all_ranks_some_time_after_the_rank_is_asked_to_stop() -> None:
    rank = Rank()
    other = asyncio.get_running_loop().create_future()
    rank.engine.answers["give_up"] = lambda: other.set_exception(PeerError("left its step: terminated", node="a"))

    async def one() -> None:
        async with rank.step() as step:
            step.on_commit(lambda: rank.ran.append(step.number))
            rank.stop.ask()
            await other  # a collective that another rank does not call

    with pytest.raises(StepAborted, match="left its step: terminated"):
        await one()
    assert rank.engine.asked("give_up") == [(1, "terminated")]
    assert (rank.ran, rank.engine.asked("vote")) == ([], [])
    with pytest.raises(Terminated):
        await rank.one()


@virtually
async def test_a_step_that_ends_in_time_is_committed_and_nothing_is_given_up_later() -> None:
    rank = Rank()
    await rank.one(rank.stop.ask)
    await asyncio.sleep(5 * STOP_TIMEOUT)
    assert (rank.ran, rank.engine.asked("give_up")) == ([1], [])


@pytest.mark.parametrize("asked", ["in the body", "in the wait"])
@virtually
async def test_a_decision_that_does_not_come_is_not_waited_for_when_the_rank_is_asked_to_stop(asked: str) -> None:
    rank = Rank()
    rank.engine.answers |= {"vote": asyncio.Event(), "unanswered": (1, 11)}

    async def ask_in_the_wait() -> None:
        while not rank.engine.asked("vote"):  # noqa: ASYNC110 - the vote is no event
            await asyncio.sleep(0)
        rank.stop.ask()

    asking = asyncio.ensure_future(ask_in_the_wait()) if asked == "in the wait" else None
    with pytest.raises(Terminated):
        await rank.one(rank.stop.ask if asking is None else lambda: None)
    assert asking is None or asking.done()
    assert (rank.ran, rank.protocol.in_doubt, rank.protocol.phase) == ([], True, StepPhase.OUTSIDE)
    assert rank.engine.asked("unanswered") == [(1, "CancelledError")]


@virtually
async def test_a_job_that_is_done_is_said_at_the_entry_and_ends_a_program_well() -> None:
    rank = Rank()
    rank.engine.answers["wait_view"] = JobOver(7)
    for enter in (rank.protocol.ready, rank.one):
        caught = None
        try:
            await enter()
        except JobDone as error:
            caught = error
        assert caught is not None
        assert (caught.step, caught.code, isinstance(caught, SystemExit)) == (7, 0, True)
        assert "its other ranks have ended; the final state is not here, but in the checkpoint of step 7" in str(caught)
        assert not caught.holds_state
    assert rank.protocol.phase is StepPhase.OUTSIDE


@pytest.mark.parametrize(("step", "holds"), [(7, True), (6, False)])
@virtually
async def test_a_rank_knows_whether_it_holds_the_final_state(step: int, holds: bool) -> None:
    rank = Rank()
    rank.engine.answers["wait_view"] = JobOver(7)
    rank.state.register(lambda: {}, lambda new: None)
    rank.state.version = StateVersion(3, step)
    for torn in (False, True):
        rank.state.torn = torn
        caught = None
        try:
            await rank.protocol.ready()
        except JobDone as error:
            caught = error
        assert caught is not None
        assert caught.holds_state is (holds and not torn)
        assert ("this rank holds the final state" in str(caught)) is caught.holds_state


@virtually
async def test_a_rank_with_a_state_asks_whether_it_may_go_and_goes_when_it_may() -> None:
    rank = Rank()
    rank.state.register(lambda: {}, lambda new: None)
    await rank.one()
    rank.engine.answers |= {"ask_to_leave": True, "wait_view": FreeToLeave()}
    rank.stop.ask()
    with pytest.raises(Terminated):
        await rank.one()
    assert (len(rank.engine.asked("ask_to_leave")), rank.protocol.phase) == (1, StepPhase.OUTSIDE)


@virtually
async def test_a_rank_that_nobody_lets_go_goes_all_the_same_after_its_stop_timeout() -> None:
    rank = Rank()
    rank.state.register(lambda: {}, lambda new: None)
    await rank.one()
    rank.engine.answers |= {"ask_to_leave": True, "wait_view": asyncio.Event()}
    rank.stop.ask()
    asked_at = asyncio.get_running_loop().time()
    with pytest.raises(Terminated):
        await rank.one()
    assert asyncio.get_running_loop().time() - asked_at == pytest.approx(STOP_TIMEOUT)
    assert (len(rank.engine.asked("wait_view")), rank.protocol.phase) == (2, StepPhase.OUTSIDE)


@virtually
async def test_a_rank_that_cannot_ask_goes_at_once() -> None:
    rank = Rank()
    rank.state.register(lambda: {}, lambda new: None)
    rank.engine.answers["ask_to_leave"] = False
    rank.stop.ask()
    with pytest.raises(Terminated):
        await rank.one()
    assert rank.engine.asked("wait_view") == []
