"""When a step compares the ranks' states, and what becomes of it where they differ."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from step_rank import Rank, raising, view

import quicoll.state.keeper
from quicoll.errors import Corrupted, Diverged, LocalError, Partitioned, PeerError, QuicollError, StepAborted
from quicoll.state.comparison import row
from quicoll.state.rank_state import RankState
from quicoll.state.synchronisation import Unequal, ViewState
from quicoll.state.tree import flatten
from quicoll.state.version import StateVersion
from quicoll.step.protocol import StepPhase


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
    rank.group.others = [row(lowest, None, check_every=0, learn_from=0)]
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
