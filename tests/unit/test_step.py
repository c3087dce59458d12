"""The step protocol against an engine that answers as each test says: what the caller gets, what runs, what is sent.

The engine and the caller's context are fakes; the only clock is the tests' own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import quicoll.state.keeper
from quicoll.engine.decisions import Decision
from quicoll.errors import (
    AuditError,
    CheckpointError,
    Corrupted,
    Diverged,
    JobDone,
    LocalError,
    Mismatch,
    Partitioned,
    PeerError,
    QuicollError,
    StepAborted,
    Terminated,
)
from quicoll.membership.member.actions import JobOver
from quicoll.membership.view import Member, View
from quicoll.state.comparison import row
from quicoll.state.rank_state import RankState
from quicoll.state.synchronisation import Unequal, ViewState
from quicoll.state.tree import flatten
from quicoll.state.version import StateVersion
from quicoll.step import Step, StepPhase, StepProtocol
from quicoll.stop import StopRequest

HOLD = 60.0


def view(number: int, world: int = 1) -> View:
    members = tuple(Member(rank=rank, node=f"worker-{rank}", incarnation=1) for rank in range(world))
    return View(view_id=number, members=members, seed=0, committed_step=0, committed_view=0)


def committed(index: int = 11) -> Decision:
    return Decision(index, True, "", (), "", "failed")


def aborted(kind: Any = "failed") -> Decision:
    return Decision(11, False, "worker-1 was lost", ("worker-1",), "worker-1", kind)


class FakeRuntime:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()

    def call(self, work: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        return asyncio.ensure_future(work)

    async def aclose(self) -> None: ...


class FakeEngine:
    """Answers with `answers[method]`: a value, an error to raise, or a function. `calls`: what was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {
            "wait_view": view(1),
            "begin": None,
            "vote": committed(),
            "unanswered": None,
            "decision": committed(),
            "give_up": None,
            "break_view": None,
        }

    async def _answer(self, method: str, *arguments: Any) -> Any:
        self.calls.append((method, *arguments))
        answer = self.answers[method]
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, asyncio.Event):  # an answer that nobody waits for to its end
            await answer.wait()
        return answer() if callable(answer) else answer

    async def wait_view(self, timeout: float) -> Any:
        return await self._answer("wait_view", timeout)

    async def begin(self, view_id: int, number: int) -> None:
        await self._answer("begin", view_id, number)

    async def vote(self, view_id: int, digest: bytes, groups: Any, *, timeout: float, unfinished: int) -> Any:
        return await self._answer("vote", view_id, digest, groups, timeout, unfinished)

    async def unanswered(self, view_id: int, reason: str) -> Any:
        return await self._answer("unanswered", view_id, reason)

    async def decision(self, view_id: int, index: int, timeout: float) -> Any:
        return await self._answer("decision", view_id, index, timeout)

    async def give_up(self, view_id: int, reason: str) -> None:
        await self._answer("give_up", view_id, reason)

    async def break_view(self, view_id: int, error: QuicollError) -> None:
        await self._answer("break_view", view_id, error)

    def state_received(self, rank: int, step: int, index: int, confirmed_by: list[str]) -> None:
        self.calls.append(("state_received", rank, step, index, *confirmed_by))

    def state_torn(self, step: int, cause: str) -> None:
        self.calls.append(("state_torn", step, cause))

    @property
    def observers(self) -> FakeEngine:
        return self

    def emit(self, kind: str, **fields: Any) -> None:
        self.calls.append((kind, fields))

    def asked(self, method: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == method]


class FakeAuditor:
    def __init__(self, error: AuditError | None = None) -> None:
        self.error = error
        self.begun: list[dict[str, int]] = []

    def begin(self, **step: int) -> None:
        self.begun.append(step)

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class FakeContext:
    """Of the caller: one rank."""

    def __init__(self) -> None:
        self.view = view(1)
        self.rank = 0
        self.world_size = 1
        self.auditor: FakeAuditor | None = None
        self.unfinished = 0
        self.log: list[Any] = []

    def enter(self, view: View) -> None:
        self.view = view

    def open(self, step: int) -> None:
        self.log.append(step)

    def close(self) -> None:
        self.log.append("closed")

    def settle(self) -> int:
        return self.unfinished

    def digests(self, step: int) -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        return b"digest of %d" % step, ((5, b"of group 5"),)


HEARD = 2
"""Words of the digest of what a rank has heard."""


class FakeGroup:
    """Of this rank, and of others that hold `others`, tell it as rows, and have heard the same."""

    def __init__(self) -> None:
        self.rank = 0
        self.compared = 0
        self.others: list[Any] = []
        self.error: BaseException | None = None

    async def all_gather(self, mine: Any) -> Any:
        self.compared += len(mine) != HEARD
        if self.error is not None:
            raise self.error
        if len(mine) == HEARD:
            return np.concatenate([mine] * (1 + len(self.others)))
        return np.concatenate([mine, *self.others])


def told(version: StateVersion, held: Any) -> Any:
    """The row of a rank that holds this."""
    state = RankState()
    state.version = version
    return row(state, flatten(held), check_every=0)


class FakeCheck:
    """In the place of StateCheck: `found` is what it comes to."""

    begun = 0
    found: Any = None

    def __init__(self, state: RankState, group: Any) -> None:
        type(self).begun += 1

    async def result(self, nodes: Any, view_id: int) -> Any:
        if isinstance(self.found, BaseException):
            raise self.found
        if isinstance(self.found, asyncio.Event):
            await self.found.wait()
        return self.found


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> type[FakeCheck]:
    class Checks(FakeCheck): ...

    monkeypatch.setattr(quicoll.state.keeper, "StateCheck", Checks)
    return Checks


class Rank:
    def __init__(self, check_every: int = 0) -> None:
        self.engine = FakeEngine()
        self.context = FakeContext()
        self.group = FakeGroup()
        self.state = RankState()
        self.stop = StopRequest()
        self.protocol = StepProtocol(
            self.context,  # type: ignore[arg-type]
            self.engine,  # type: ignore[arg-type]
            FakeRuntime(),
            state=self.state,
            state_group=self.group,  # type: ignore[arg-type]
            hold_timeout=HOLD,
            check_every=check_every,
            stop=self.stop,
            stop_timeout=0.001,
        )
        self.ran: list[int] = []

    def step(self) -> Step:
        return Step(self.protocol)

    async def one(self, body: Callable[[], None] = lambda: None) -> int:
        """A step whose callbacks note its number, and whose body is as given."""
        async with self.step() as step:
            step.on_commit(lambda: self.ran.append(step.number))
            body()
        return step.number

    async def in_doubt(self, **answers: Any) -> None:
        """A step that was voted for, and whose decision did not come in time."""
        self.engine.answers |= {"vote": Partitioned("no decision within 60 s"), "unanswered": (1, 11), **answers}
        with pytest.raises(Partitioned):
            await self.one()
        assert self.protocol.in_doubt


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


# -- outcomes --------------------------------------------------------------------------------------------------------


async def test_a_committed_step_runs_its_callbacks_in_order_and_then_counts() -> None:
    rank = Rank()
    ran: list[tuple[str, int]] = []
    async with rank.step() as step:
        assert (step.number, step.view, rank.protocol.phase) == (1, view(1), StepPhase.OPEN)
        for name in "ab":
            step.on_commit(lambda name=name: ran.append((name, rank.state.version.step)))  # type: ignore[misc]
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

    with pytest.raises(ValueError, match="out of memory"):  # noqa: PT012
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
    rank.group.others = [told(StateVersion(9, 9), {})]
    with pytest.raises(LocalError, match="register_state"):
        await rank.one()
    ((view_id, reason),) = rank.engine.asked("give_up")
    assert (view_id, "LocalError: this rank's state is after step 0" in reason) == (1, True)
    assert rank.protocol.phase is StepPhase.OUTSIDE


async def test_a_step_that_the_engine_cannot_begin_is_aborted() -> None:
    rank = Rank()
    rank.engine.answers["begin"] = PeerError("the view is over")
    with pytest.raises(StepAborted, match="step 1 was not committed: the view is over"):
        await rank.one()
    assert (rank.protocol.phase, rank.context.log, rank.engine.asked("give_up")) == (StepPhase.OUTSIDE, [], [])


async def test_an_entry_that_is_cancelled_ends_the_view_since_the_step_may_have_begun() -> None:
    rank = Rank()
    rank.engine.answers["begin"] = asyncio.Event()
    task = asyncio.ensure_future(rank.one())
    while not rank.engine.asked("begin"):  # noqa: ASYNC110 - one turn of the loop after the other
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rank.engine.asked("give_up") == [(1, "CancelledError")]
    assert rank.protocol.phase is StepPhase.OUTSIDE


# -- the phases ------------------------------------------------------------------------------------------------------


async def test_steps_do_not_nest_and_ready_comes_between_them() -> None:
    rank = Rank()
    async with rank.step():
        with pytest.raises(LocalError, match="do not nest"):
            await rank.one()
        with pytest.raises(LocalError, match="already open"):
            await rank.protocol.ready()
    assert rank.state.version.step == 1


@pytest.mark.parametrize(("method", "phase"), [("wait_view", StepPhase.ENTRY), ("vote", StepPhase.END)])
async def test_one_task_at_a_time_is_at_the_entry_or_the_end(method: str, phase: StepPhase) -> None:
    rank, gate = Rank(), asyncio.Event()
    answer, rank.engine.answers[method] = rank.engine.answers[method], gate
    task = asyncio.ensure_future(rank.one())
    while not rank.engine.asked(method):  # noqa: ASYNC110 - one turn of the loop after the other
        await asyncio.sleep(0)
    assert rank.protocol.phase is phase
    for other in (rank.protocol.ready(), rank.one()):
        with pytest.raises(LocalError, match="another task"):
            await other
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    rank.engine.answers[method] = answer
    assert await rank.one() == 1


async def test_a_step_is_one_attempt() -> None:
    rank = Rank()
    attempt = rank.step()
    assert (attempt.number, attempt.view) == (0, None)
    async with attempt:
        pass
    with pytest.raises(LocalError, match="one attempt"):
        async with attempt:
            pass
    with pytest.raises(LocalError, match="step 1 has been left"):
        attempt.on_commit(lambda: None)


async def test_a_step_that_is_not_open_cannot_be_left() -> None:
    rank = Rank()
    for attempt in (rank.step(), rank.step()):
        with pytest.raises(LocalError, match="not open"):
            await attempt.__aexit__(None, None, None)
        await attempt.__aenter__()
        await attempt.__aexit__(None, None, None)
        with pytest.raises(LocalError, match="not open"):
            await attempt.__aexit__(None, None, None)
    assert len(rank.engine.asked("vote")) == 2


async def test_only_plain_functions_run_at_a_commit() -> None:
    async def later() -> None: ...

    rank = Rank()
    async with rank.step() as step:
        with pytest.raises(LocalError, match="a plain function"):
            step.on_commit(later)  # type: ignore[arg-type]
    with pytest.raises(LocalError, match="its work is not done"):
        async with rank.step() as step:
            step.on_commit(lambda: later())  # type: ignore[arg-type]


# -- comparing states ------------------------------------------------------------------------------------------------


async def test_states_are_compared_after_so_many_committed_steps_since_the_last_time(checks: type[FakeCheck]) -> None:
    rank = Rank(check_every=3)
    begun = []
    for _ in range(8):
        await rank.one()
        begun.append(checks.begun)
    assert begun == [0, 1, 1, 1, 2, 2, 2, 3]  # after the view's first step, then after 4 and 7
    rank.engine.answers["wait_view"] = view(2)
    for _ in range(4):
        await rank.one()
        begun.append(checks.begun)
    assert begun[8:] == [3, 4, 4, 4]


async def test_states_are_not_compared_between_views_where_the_setting_is_zero(checks: type[FakeCheck]) -> None:
    rank = Rank(check_every=0)
    for _ in range(5):
        await rank.one()
    assert checks.begun == 0


async def test_the_lowest_ranks_setting_holds(checks: type[FakeCheck]) -> None:
    rank, lowest = Rank(check_every=1), RankState()
    rank.group.rank = 1
    rank.group.others = [row(lowest, None, check_every=0)]

    async def lowest_first(mine: Any) -> Any:
        return np.concatenate([*rank.group.others, mine] if len(mine) != HEARD else [mine, mine])

    rank.group.all_gather = lowest_first  # type: ignore[method-assign]
    for _ in range(3):
        await rank.one()
    assert checks.begun == 0


async def test_states_that_differ_abort_the_step_before_its_vote_and_name_who_and_what(
    checks: type[FakeCheck],
) -> None:
    rank = Rank(check_every=1)
    rank.engine.answers["wait_view"] = view(1, world=3)
    await rank.one()
    checks.found = Unequal((2,), "net.w", 0, "the state of worker-2 is not what most ranks hold")
    with pytest.raises(StepAborted, match="step 2 was not committed: the state of worker-2 is not") as caught:
        await rank.one()
    assert (caught.value.rank, caught.value.node, rank.ran) == (2, "worker-2", [1])
    ((view_id, error),) = rank.engine.asked("break_view")
    assert (view_id, type(error), error.node) == (1, Corrupted, "worker-2")
    assert len(rank.engine.asked("vote")) == 1
    assert (rank.protocol.phase, rank.protocol.in_doubt) == (StepPhase.OUTSIDE, False)
    # The next view begins with a comparison, and the step keeps its number.
    rank.engine.answers["wait_view"] = view(2, world=3)
    checks.found = None
    assert await rank.one() == 2
    assert rank.group.compared == 2


async def test_states_of_which_nobody_knows_the_right_one_blame_nobody(checks: type[FakeCheck]) -> None:
    rank = Rank(check_every=1)
    await rank.one()
    checks.found = Unequal((0, 1), "w", None, "the ranks hold different states")
    with pytest.raises(StepAborted) as caught:
        await rank.one()
    assert (caught.value.rank, caught.value.node) == (None, "")


@pytest.mark.parametrize("kind", [PeerError, Corrupted, Partitioned])
async def test_a_comparison_that_a_lost_rank_ends_aborts_the_step(
    checks: type[FakeCheck], kind: type[QuicollError]
) -> None:
    rank = Rank(check_every=1)
    await rank.one()
    checks.found = kind("worker-1 was lost")
    with pytest.raises(StepAborted, match="worker-1 was lost"):
        await rank.one()
    assert (rank.engine.asked("give_up"), len(rank.engine.asked("vote"))) == ([], 1)


async def test_a_step_that_is_cancelled_while_states_are_compared_ends_on_the_others_too(
    checks: type[FakeCheck],
) -> None:
    rank = Rank(check_every=1)
    await rank.one()
    checks.found = asyncio.Event()
    task = asyncio.ensure_future(rank.one())
    while rank.protocol.phase is not StepPhase.END:  # noqa: ASYNC110 - one turn of the loop after the other
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rank.engine.asked("give_up") == [(1, "CancelledError")]
    assert (rank.protocol.phase, len(rank.engine.asked("vote"))) == (StepPhase.OUTSIDE, 1)


async def test_a_step_that_fails_by_itself_leaves_its_comparison_alone(checks: type[FakeCheck]) -> None:
    rank = Rank(check_every=1)
    await rank.one()
    checks.found = AssertionError("nobody looks at it")
    with pytest.raises(ZeroDivisionError):
        await rank.one(raising(ZeroDivisionError()))
    assert checks.begun == 1


async def test_what_save_raises_when_states_are_compared_ends_the_view() -> None:
    rank = Rank(check_every=1)
    rank.state.register(lambda: {"w": np.ones(2)}, lambda new: None)
    await rank.one()

    def save() -> Any:
        raise ValueError("no memory, say")

    rank.state.save = save
    with pytest.raises(ValueError, match="no memory"):
        await rank.one()
    assert rank.engine.asked("give_up") == [(1, "ValueError: no memory, say")]
    assert (rank.protocol.phase, len(rank.engine.asked("begin"))) == (StepPhase.OUTSIDE, 1)


async def test_ranks_that_have_diverged_begin_no_step_any_more_and_leave_the_view_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def diverged(*arguments: Any, **settings: Any) -> Any:
        raise Diverged("the ranks hold different states", step=40, view=1, nodes=("worker-0", "worker-1"), tensor="w")

    rank = Rank()
    with monkeypatch.context() as patched:
        patched.setattr(quicoll.state.keeper, "synchronise", diverged)
        with pytest.raises(Diverged, match="different states"):
            await rank.one()
    with pytest.raises(Diverged, match="different states"):
        await rank.protocol.ready()
    await asyncio.sleep(0)
    assert rank.engine.asked("give_up") == []
    ((fields,),) = rank.engine.asked("state_differs")
    assert fields == {"step": 40, "nodes": ["worker-0", "worker-1"], "tensor": "w", "from_node": ""}


async def test_on_demand_states_are_compared_whatever_was_before() -> None:
    rank = Rank()
    with pytest.raises(LocalError, match=r"call job\.register_state"):
        await rank.protocol.check_state()
    held = {"w": np.ones(2)}
    rank.state.register(lambda: held, lambda new: None)
    assert await rank.protocol.check_state() == flatten(held).digest
    before = rank.group.compared
    held["w"][0] = 3.0
    assert await rank.protocol.check_state() == flatten(held).digest
    assert rank.group.compared == before + 1
    async with rank.step():
        with pytest.raises(LocalError, match="already open"):
            await rank.protocol.check_state()


async def test_what_became_of_states_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ViewState(
        b"", StateVersion(3, 8), StateVersion(0, 5), 0, 0, Unequal((0, 1), "w", 2, "the state of worker-0 is not")
    )

    async def synchronised(*arguments: Any, **settings: Any) -> ViewState:
        return found

    rank = Rank()
    rank.engine.answers["wait_view"] = view(1, world=3)
    rank.state.register(lambda: {"sampler": 3}, lambda new: None, ("sampler",))
    monkeypatch.setattr(quicoll.state.keeper, "synchronise", synchronised)
    await rank.protocol.ready()
    await asyncio.sleep(0)
    assert rank.engine.calls[1:] == [
        ("state_differs", {"step": 8, "nodes": ["worker-0", "worker-1"], "tensor": "w", "from_node": "worker-2"}),
        ("state_received", 0, 8, 3),
        ("own_state_kept", {"names": ["sampler"], "own_step": 5, "step": 8}),
    ]


async def test_a_state_that_is_torn_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()

    async def tear(*arguments: Any, **settings: Any) -> ViewState:
        rank.state.torn = True
        raise PeerError("worker-1 was lost")

    monkeypatch.setattr(quicoll.state.keeper, "synchronise", tear)
    for _ in range(2):
        with pytest.raises(StepAborted):
            await rank.protocol.ready()
    await asyncio.sleep(0)
    assert rank.engine.asked("state_torn") == [(0, "PeerError: worker-1 was lost")]


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


# -- a rank that is asked to stop ------------------------------------------------------------------------------------


async def test_a_rank_that_is_asked_to_stop_ends_its_open_step_and_enters_no_other() -> None:
    rank = Rank()
    assert await rank.one(body=rank.stop.ask) == 1
    assert (rank.ran, rank.state.version.step) == ([1], 1)
    asked = len(rank.engine.calls)
    for entry in (rank.one, rank.protocol.ready):
        with pytest.raises(Terminated):
            await entry()
    assert (len(rank.engine.calls), rank.protocol.phase, rank.ran) == (asked, StepPhase.OUTSIDE, [1])


@pytest.mark.parametrize("waits_in", ["wait_view", "begin"])
async def test_a_wait_at_the_entry_ends_when_the_rank_is_asked_to_stop(waits_in: str) -> None:
    rank = Rank()
    rank.engine.answers[waits_in] = lambda: rank.stop.ask() or asyncio.Event()
    forever = rank.engine._answer

    async def answer(method: str, *arguments: Any) -> Any:
        given = await forever(method, *arguments)
        return await given.wait() if isinstance(given, asyncio.Event) else given

    rank.engine._answer = answer  # type: ignore[method-assign]
    with pytest.raises(Terminated):
        await rank.one()
    assert (rank.ran, rank.protocol.phase) == ([], StepPhase.OUTSIDE)
    # Nobody may wait for a step that this rank has perhaps begun, and will never vote for.
    assert rank.engine.asked("give_up") == ([] if waits_in == "wait_view" else [(1, "terminated")])


async def test_a_decision_in_doubt_is_not_waited_for_by_a_rank_that_is_asked_to_stop() -> None:
    rank = Rank()
    await rank.in_doubt()
    rank.engine.answers["decision"] = asyncio.Event()
    asyncio.get_running_loop().call_soon(rank.stop.ask)
    with pytest.raises(Terminated):
        await rank.one()
    assert (rank.ran, rank.state.version.step) == ([], 0)


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


async def test_a_step_that_ends_in_time_is_committed_and_nothing_is_given_up_later() -> None:
    rank = Rank()
    await rank.one(rank.stop.ask)
    await asyncio.sleep(0.005)  # five times what the open step had
    assert (rank.ran, rank.engine.asked("give_up")) == ([1], [])


@pytest.mark.parametrize("asked", ["in the body", "in the wait"])
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
        assert (
            "the job is done: its other ranks have ended; the final state is not here, but in the checkpoint of"
            in str(caught)
        )
        assert not caught.holds_state
    assert rank.protocol.phase is StepPhase.OUTSIDE


@pytest.mark.parametrize(("step", "holds"), [(7, True), (6, False)])
async def test_a_rank_knows_whether_it_holds_the_final_state(step: int, holds: bool) -> None:
    rank = Rank()
    rank.engine.answers["wait_view"] = JobOver(7)
    rank.state.register(lambda: {}, lambda new: None)
    rank.state.version = StateVersion(3, step)
    try:
        await rank.protocol.ready()
    except JobDone as error:
        caught = error
    assert caught.holds_state is holds
    assert ("this rank holds the final state" in str(caught)) is holds
    rank.state.torn = True
    try:
        await rank.protocol.ready()
    except JobDone as error:
        caught = error
    assert not caught.holds_state
