"""A rank's part in the agreement on tiers: what becomes of its proposals, and who hears of a change and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from quicoll.errors import LocalError
from quicoll.membership.view import Member, View
from quicoll.tiers.tier_set import TierSet
from quicoll.tiers.tiers import Tiers

if TYPE_CHECKING:
    from quicoll.collectives.group import Group

VIEW = View(view_id=9, members=(Member(rank=0, node="n0", incarnation=1),), seed=1, committed_step=0, committed_view=0)


class Alone:
    """The group of one rank."""

    async def all_gather_object(self, value: Any, *, timeout: float | None = None) -> list[Any]:
        return [msgspec.msgpack.decode(msgspec.msgpack.encode(value))]


class Attempt:
    """A step whose end the test says."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def on_commit(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    def commit(self) -> None:
        for callback in self.callbacks:
            callback()


class Bench:
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.tiers = Tiers(
            cast("Group", Alone()), lambda: VIEW, lambda kind, **fields: self.events.append((kind, fields["version"]))
        )


async def test_a_proposal_is_kept_until_a_step_with_it_is_committed() -> None:
    bench = Bench()
    following = bench.tiers.current.changed(active=["a"])
    bench.tiers.propose(following)
    aborted, committed = Attempt(), Attempt()
    assert await bench.tiers.agree(aborted) == following
    assert (bench.tiers.current.version, bench.tiers.pending) == (0, following)
    assert await bench.tiers.agree(committed) == following
    assert bench.events == []
    committed.commit()
    assert (bench.tiers.current, bench.tiers.pending) == (following, None)
    assert bench.events == [("tiers_changed", 1)]


async def test_a_step_without_a_proposal_changes_nothing() -> None:
    bench, step = Bench(), Attempt()
    assert (await bench.tiers.agree(step)).version == 0
    assert step.callbacks == []


async def test_what_is_proposed_after_the_ranks_agreed_is_refused_when_it_has_come_too_late() -> None:
    bench, step = Bench(), Attempt()
    bench.tiers.propose(TierSet(["a"], version=1))
    await bench.tiers.agree(step)
    bench.tiers.propose(TierSet(["b"], version=1))
    step.commit()
    assert (bench.tiers.current.active, bench.tiers.pending) == (("a",), None)
    assert bench.events == [("tiers_refused", 1), ("tiers_changed", 1)]


@pytest.mark.parametrize("weigh", [lambda proposed: "no", lambda proposed: 1 / 0, lambda proposed: None])
async def test_a_rank_that_does_not_say_that_it_can_cannot(weigh: Any) -> None:
    bench, step = Bench(), Attempt()
    bench.tiers.weigh(weigh)
    bench.tiers.propose(TierSet(["a"], version=1))
    assert (await bench.tiers.agree(step)).version == 0
    step.commit()
    assert (bench.tiers.current.version, bench.tiers.pending) == (0, None)
    assert bench.events == [("tiers_refused", 1)]


async def test_functions_hear_of_each_change_once_and_again_after_one_has_raised() -> None:
    bench, step = Bench(), Attempt()
    heard: list[tuple[int, int]] = []
    broken = [True]

    def fragile(before: TierSet, after: TierSet) -> None:
        if broken:
            raise MemoryError(broken.pop())

    bench.tiers.on_change(lambda before, after: heard.append((before.version, after.version)))
    bench.tiers.on_change(fragile)
    bench.tiers.propose(TierSet(["a"], version=1))
    await bench.tiers.agree(step)
    with pytest.raises(MemoryError):
        step.commit()
    state = bench.tiers.state()  # as another rank has it, which hands it over now
    bench.tiers.load_state(state)
    bench.tiers.load_state(state)
    assert heard == [(0, 1), (0, 1)]
    bench.tiers.load_state({"tier_set": TierSet(["b"], version=4).encoded})
    assert heard[2:] == [(1, 4)]


@pytest.mark.parametrize("state", [{}, {"tier_set": "text"}, {"tier_set": b"\xc1"}])
def test_what_is_no_state_of_tiers_is_refused(state: Any) -> None:
    bench = Bench()
    with pytest.raises(LocalError):
        bench.tiers.load_state(state)
    assert bench.tiers.current.version == 0


@pytest.mark.parametrize("proposed", [TierSet(["a"]), TierSet(["a"], version=2), None, "a"])
def test_what_cannot_be_the_next_set_is_not_proposed(proposed: Any) -> None:
    with pytest.raises(LocalError):
        Bench().tiers.propose(proposed)


async def coroutine(*_: Any) -> str:
    return ""


def test_functions_that_nobody_would_await_are_refused() -> None:
    tiers: Any = Bench().tiers
    with pytest.raises(LocalError):
        tiers.on_change(coroutine)
    with pytest.raises(LocalError):
        tiers.weigh(coroutine)
