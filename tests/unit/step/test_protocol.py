"""The step protocol against an engine that answers as each test says: what the caller gets, what runs, what is sent.

The engine and the caller's context are fakes; the only clock is the tests' own.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from step_rank import HOLD, FakeAuditor, Rank, aborted, committed, raising, told, view

from quicoll.errors import (
    AuditError,
    CheckpointError,
    Corrupted,
    LocalError,
    Mismatch,
    Partitioned,
    PeerError,
    QuicollError,
    StepAborted,
)
from quicoll.state.version import StateVersion
from quicoll.step.attempt import StepAttempt
from quicoll.step.protocol import StepPhase

if TYPE_CHECKING:
    from quicoll.engine.decisions import Decision

# -- outcomes --------------------------------------------------------------------------------------------------------


async def test_a_committed_step_runs_its_callbacks_in_order_and_then_counts() -> None:
    rank = Rank()
    ran: list[tuple[str, int]] = []
    async with rank.step() as step:
        assert (step.number, step.view, rank.protocol.phase) == (1, view(1), StepPhase.OPEN)
        for name in "ab":
            step.on_commit(lambda name=name: ran.append((name, rank.state.version.step)))
        assert ran == []
    assert ran == [("a", 0), ("b", 0)]
    assert rank.state.version == StateVersion(11, 1)
    assert (rank.protocol.phase, rank.protocol.in_doubt) == (StepPhase.OUTSIDE, False)
    assert rank.context.log == [1, "closed"]
    assert rank.engine.calls == [
        ("wait_view", HOLD),
        ("begin", 1, 1),
        ("vote", 1, b"digest of 1", ((5, b"of group 5"),), HOLD, 0),
    ]
    assert await rank.one() == 2


async def test_an_aborted_step_says_who_was_lost_and_is_attempted_under_the_same_number() -> None:
    rank = Rank()
    rank.engine.answers["vote"] = aborted()
    with pytest.raises(StepAborted, match="step 1 was not committed: worker-1 was lost") as caught:
        await rank.one()
    error = caught.value
    assert (error.lost, error.node, error.view, error.step) == (("worker-1",), "worker-1", 1, 1)
    assert (rank.ran, rank.state.version, rank.protocol.in_doubt) == ([], StateVersion(), False)
    rank.engine.answers["vote"] = committed()
    assert await rank.one() == 1
    assert rank.ran == [1]


async def test_ranks_that_did_different_things_get_a_mismatch() -> None:
    rank = Rank()
    rank.engine.answers["vote"] = aborted("mismatch")
    with pytest.raises(Mismatch, match="worker-1 was lost") as caught:
        await rank.one()
    assert (caught.value.view, caught.value.step, rank.ran) == (1, 1, [])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (asyncio.CancelledError(), "CancelledError"),
        (LocalError("bad option"), "LocalError: bad option"),
        (CheckpointError("disk full", path="x"), "CheckpointError: disk full: x"),
        (AuditError("disk full", path="x"), "AuditError: audit x: disk full"),
    ],
)
async def test_an_own_error_reaches_the_caller_and_ends_the_step_on_the_others(
    error: BaseException, reason: str
) -> None:
    rank = Rank()
    with pytest.raises(type(error)) as caught:
        await rank.one(raising(error))
    assert caught.value is error
    assert rank.engine.asked("give_up") == [(1, reason)]
    assert (rank.engine.asked("vote"), rank.ran) == ([], [])


@pytest.mark.parametrize("kind", [PeerError, Corrupted, Partitioned])
async def test_an_operation_that_failed_aborts_the_step_without_a_vote(kind: type[QuicollError]) -> None:
    rank = Rank()
    error = kind("worker-1 is late", rank=1, node="worker-1", op="all_reduce#3", lost=("worker-1",))
    with pytest.raises(StepAborted, match="step 1 was not committed: worker-1 is late") as caught:
        await rank.one(raising(error))
    found = caught.value
    assert found.__cause__ is error
    assert (found.rank, found.node, found.op, found.lost) == (1, "worker-1", "all_reduce#3", ("worker-1",))
    assert (rank.engine.asked("give_up"), rank.engine.asked("vote"), rank.ran) == ([], [], [])


@pytest.mark.parametrize("error", [Mismatch("other shapes"), StepAborted("elsewhere")])
async def test_an_error_that_all_ranks_have_passes_as_it_is(error: QuicollError) -> None:
    rank = Rank()
    with pytest.raises(type(error)) as caught:
        await rank.one(raising(error))
    assert caught.value is error
    assert (rank.engine.asked("give_up"), rank.engine.asked("vote"), rank.ran) == ([], [], [])


async def test_operations_that_have_not_ended_are_counted_in_the_vote() -> None:
    rank = Rank()
    rank.context.unfinished = 2
    await rank.one()
    assert rank.engine.asked("vote")[0][-1] == 2


@pytest.mark.parametrize("kind", [PeerError, Corrupted])
async def test_a_view_that_broke_before_the_vote_leaves_no_doubt(kind: type[QuicollError]) -> None:
    rank = Rank()
    rank.engine.answers["vote"] = kind("the view is over")
    with pytest.raises(StepAborted, match="the view is over"):
        await rank.one()
    assert (rank.protocol.in_doubt, rank.ran) == (False, [])


async def test_being_cut_off_before_the_vote_was_cast_is_an_abort() -> None:
    rank = Rank()
    rank.engine.answers |= {"vote": Partitioned("cut off"), "unanswered": None}
    with pytest.raises(StepAborted, match="cut off"):
        await rank.one()
    assert not rank.protocol.in_doubt


async def test_a_step_of_a_job_that_is_closed_stays_in_doubt() -> None:
    rank = Rank()
    rank.engine.answers["vote"] = LocalError("the job is closed")
    with pytest.raises(LocalError, match="closed"):
        await rank.one()
    assert (rank.protocol.in_doubt, rank.ran) == (True, [])


# -- doubt -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decision", "ran", "number"), [(committed(), [1, 2], 2), (aborted(), [1], 1)])
async def test_a_vote_in_doubt_is_settled_before_the_next_step_begins(
    decision: Decision, ran: list[int], number: int
) -> None:
    rank = Rank()
    await rank.in_doubt()
    assert rank.ran == []
    rank.engine.calls.clear()
    rank.engine.answers |= {"decision": decision, "vote": committed(12)}
    assert await rank.one() == number
    assert rank.ran == ran
    assert [call[0] for call in rank.engine.calls] == ["unanswered", "decision", "wait_view", "begin", "vote"]
    assert not rank.protocol.in_doubt


async def test_while_nothing_is_decided_nothing_is_forgotten_and_nothing_begins() -> None:
    rank = Rank()
    await rank.in_doubt(decision=Partitioned("not known yet"))
    for _ in range(2):
        with pytest.raises(Partitioned, match="not known yet"):
            await rank.protocol.ready()
        assert (rank.protocol.in_doubt, rank.protocol.phase, rank.ran) == (True, StepPhase.OUTSIDE, [])
    assert len(rank.engine.asked("begin")) == 1
    rank.engine.answers["decision"] = committed()
    await rank.protocol.ready()
    assert (rank.ran, rank.state.version) == ([1], StateVersion(11, 1))


async def test_the_wait_for_a_decision_and_for_a_view_share_one_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    rank, now = Rank(), [100.0]
    await rank.in_doubt()
    rank.engine.calls.clear()

    def decide() -> Decision:
        now[0] += 4.0
        return aborted()

    rank.engine.answers["decision"] = decide
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now[0])
    await rank.protocol.ready(10.0)
    assert rank.engine.asked("decision") == [(1, 11, 10.0)]
    assert rank.engine.asked("wait_view") == [(6.0,)]


@pytest.mark.parametrize(("cast", "doubt"), [((1, 11), True), (None, False)])
async def test_a_wait_for_the_decision_that_is_cancelled_knows_whether_the_vote_was_cast(
    cast: tuple[int, int] | None, doubt: bool
) -> None:
    rank = Rank()
    rank.engine.answers |= {"vote": asyncio.Event(), "unanswered": cast}
    task = asyncio.ensure_future(rank.one())
    while not rank.engine.asked("vote"):  # noqa: ASYNC110 - one turn of the loop after the other
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (rank.protocol.in_doubt, rank.protocol.phase, rank.ran) == (doubt, StepPhase.OUTSIDE, [])
    assert rank.engine.asked("unanswered") == [(1, "CancelledError")]


async def test_a_callback_that_raises_leaves_the_rank_behind_and_runs_no_other_time() -> None:
    rank = Rank()
    ran: list[str] = []

    def fail() -> None:
        ran.append("failed")
        raise ValueError("out of memory, say")

    with pytest.raises(ValueError, match="out of memory"):  # noqa: PT012 - the end of the step raises
        async with rank.step() as step:
            step.on_commit(fail)
            step.on_commit(lambda: ran.append("after it"))
    assert (ran, rank.state.version, rank.protocol.in_doubt) == (["failed"], StateVersion(), False)
    assert rank.engine.asked("give_up") == [(1, "ValueError while applying step 1")]
    assert await rank.one() == 1
    assert ran == ["failed"]


# -- entry -----------------------------------------------------------------------------------------------------------


async def test_states_are_compared_once_in_each_view() -> None:
    rank = Rank()
    for _ in range(2):
        await rank.one()
    assert rank.group.compared == 1
    rank.engine.answers["wait_view"] = view(2)
    await rank.protocol.ready()
    await rank.protocol.ready()
    assert (rank.group.compared, rank.context.view) == (2, view(2))


@pytest.mark.parametrize("kind", [PeerError, Corrupted, Partitioned])
async def test_a_view_that_breaks_while_states_are_compared_aborts_the_step_that_was_to_come(
    kind: type[QuicollError],
) -> None:
    rank = Rank()
    rank.state.version = StateVersion(0, 41)
    rank.group.error = kind("worker-1 was lost")
    with pytest.raises(StepAborted, match="step 42 was not committed"):
        await rank.one()
    assert (rank.protocol.phase, rank.engine.asked("give_up")) == (StepPhase.OUTSIDE, [])
    # The engine knows already what an operation met, and nothing of a digest that was found to be wrong.
    assert rank.engine.asked("break_view") == [(1, rank.group.error)]
    rank.group.error = None
    assert await rank.one() == 42
    assert rank.group.compared == 2


async def test_a_rank_that_cannot_take_the_state_ends_the_view_for_the_others() -> None:
    rank = Rank()
    rank.engine.answers["wait_view"] = view(1, 2, committed_step=9)
    rank.group.others = [told(StateVersion(9, 9), {})]
    with pytest.raises(LocalError, match="register_state"):
        await rank.one()
    ((view_id, reason),) = rank.engine.asked("give_up")
    assert (view_id, "LocalError: this rank's state is after step 0" in reason) == (1, True)
    assert rank.protocol.phase is StepPhase.OUTSIDE


async def test_while_the_view_goes_on_nothing_is_waited_for_at_the_entry() -> None:
    rank = Rank()
    await rank.one()
    rank.engine.view_at_work = 1
    rank.engine.calls.clear()
    entry = rank.protocol.enter(attempt := StepAttempt())
    with pytest.raises(StopIteration):  # it is over without a turn of the loop
        entry.send(None)
    assert rank.engine.calls == [("begin", 1, 2)]
    await rank.protocol.leave(attempt, None)
    rank.engine.view_at_work, rank.engine.answers["wait_view"] = 2, view(2)
    await rank.one()
    assert [call[0] for call in rank.engine.calls] == ["begin", "vote", "wait_view", "begin", "vote"]


# -- the audit -------------------------------------------------------------------------------------------------------


async def test_an_audit_hears_of_each_attempt() -> None:
    rank = Rank()
    rank.context.auditor = auditor = FakeAuditor()
    await rank.one()
    assert auditor.begun == [{"step": 1, "view": 1, "rank": 0, "world": 1}]


async def test_a_step_whose_audit_cannot_be_written_is_not_voted_for() -> None:
    rank = Rank()
    rank.context.auditor = FakeAuditor(AuditError("disk full", path="x"))
    with pytest.raises(AuditError, match="disk full"):
        await rank.one()
    assert rank.engine.asked("give_up") == [(1, "audit x: disk full")]
    assert (rank.engine.asked("vote"), rank.ran) == ([], [])


async def test_what_is_found_above_the_operations_of_a_step_breaks_the_view_for_all_ranks() -> None:
    """Nobody else may wait for the vote of a rank that has seen something wrong."""
    rank = Rank()
    found = Corrupted("block 3 is not what its owner told", rank=0, node="worker-0", view=1)
    with pytest.raises(StepAborted, match="block 3"):
        await rank.one(raising(found))
    assert rank.engine.asked("break_view") == [(1, found)]
    assert rank.engine.asked("vote") == []
