"""How callers wait for a view and for a decision, and what they are told who wait in vain."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from quicoll.engine.decisions import Decision
from quicoll.engine.waiting import Waiting
from quicoll.errors import LocalError, Partitioned, PeerError, QuicollError
from quicoll.membership.member.actions import JobOver
from quicoll.membership.view import Member, View
from quicoll_transport.sim import World

S = 1_000_000_000
VIEW = View(view_id=7, members=(Member(rank=0, node="a", incarnation=1),), seed=0, committed_step=0, committed_view=0)
DECISION = Decision(3, commit=True, cause="", lost=(), culprit="", kind="failed")


class Bench:
    """A rank that waits on a simulated clock. absence: what there is to say of the coordinator."""

    def __init__(self, world: World, *, default_address: bool = False) -> None:
        self.world = world
        self.loop = world.host("a").start()
        self.absence = ""
        self.view: View | None = None
        self.decided: Decision | None = None
        self.waiting = Waiting(loop=self.loop, node="a", default_address=default_address, absence=lambda: self.absence)

    def turn(self, seconds: float = 0.0) -> None:
        self.world.run(limit_ns=round(seconds * S))

    def wait_view(self, timeout: float = 5.0, *, joining: bool = False) -> asyncio.Task[Any]:
        task = self.loop.create_task(self.waiting.view(lambda: self.view, timeout, joining=joining))
        self.turn()
        return task

    def wait_decision(self, timeout: float = 5.0) -> asyncio.Future[Any]:
        told: asyncio.Future[Any] = self.loop.create_future()

        def ended(decision: Decision | None, error: BaseException | None) -> None:
            if error is None:
                told.set_result(decision)
            elif isinstance(error, asyncio.CancelledError):
                told.cancel()
            else:
                told.set_exception(error)

        self.wait = self.waiting.decision(lambda: self.decided, timeout, view_id=7, ended=ended)
        self.turn()
        return told


@pytest.fixture
def bench() -> Iterator[Bench]:
    with World(1) as world:
        yield Bench(world)


def error_of(task: asyncio.Future[Any]) -> QuicollError:
    assert task.done()
    error = task.exception()
    assert isinstance(error, QuicollError)
    return error


def test_what_is_there_already_is_not_waited_for(bench: Bench) -> None:
    bench.view, bench.decided = VIEW, DECISION
    assert bench.wait_view(timeout=0.0).result() is VIEW
    assert bench.wait_decision(timeout=0.0).result() is DECISION


def test_all_who_wait_look_again_after_a_change_and_go_on_waiting_where_it_is_not_theirs(bench: Bench) -> None:
    views, decision = [bench.wait_view(), bench.wait_view()], bench.wait_decision()
    bench.view = VIEW
    bench.waiting.wake()
    bench.turn()
    assert [task.result() for task in views] == [VIEW, VIEW]
    assert not decision.done()
    bench.decided = DECISION
    bench.waiting.wake()
    bench.turn()
    assert decision.result() is DECISION


def test_one_that_is_cancelled_takes_nobody_else_with_it(bench: Bench) -> None:
    first, second = bench.wait_view(), bench.wait_view()
    first.cancel()
    bench.turn()
    bench.view = VIEW
    bench.waiting.wake()
    bench.turn()
    assert first.cancelled()
    assert second.result() is VIEW


def test_a_job_that_is_done_has_no_more_views_and_may_have_a_decision(bench: Bench) -> None:
    view, decision = bench.wait_view(), bench.wait_decision()
    bench.waiting.end(JobOver(12))
    bench.turn()
    assert view.result() == JobOver(12)
    assert bench.wait_view().result() == JobOver(12)
    assert not decision.done()


def test_a_refusal_reaches_all_who_wait_and_all_who_come_later(bench: Bench) -> None:
    views, decision = [bench.wait_view()], bench.wait_decision()
    bench.waiting.refuse("no place")
    bench.turn()
    views.append(bench.wait_view())
    assert [error_of(task).message for task in views] == ["the coordinator refuses this rank: no place"] * 2
    assert all(isinstance(task.exception(), PeerError) for task in views)
    doubt = error_of(decision)
    assert isinstance(doubt, Partitioned)
    assert doubt.view == 7
    assert doubt.message == ("the coordinator refuses this rank: no place; whether the step is committed is not known")


def test_a_wait_for_a_decision_that_is_cancelled_is_told_so_once(bench: Bench) -> None:
    decision = bench.wait_decision()
    bench.wait.cancel()
    bench.decided = DECISION
    bench.waiting.wake()
    bench.wait.cancel()
    bench.turn(6.0)
    assert decision.cancelled()


def test_a_decision_that_is_known_is_told_at_once_and_no_timer_is_left(bench: Bench) -> None:
    bench.decided = DECISION
    assert bench.wait_decision(1.0).result() is DECISION
    bench.turn(2.0)


def test_the_end_of_the_engine_comes_before_every_other_reason(bench: Bench) -> None:
    tasks: list[asyncio.Future[Any]] = [bench.wait_view(), bench.wait_decision()]
    assert not bench.waiting.closed
    bench.waiting.close()
    bench.waiting.refuse("no place")
    bench.waiting.end(JobOver(12))
    bench.turn()
    assert bench.waiting.closed
    for task in [*tasks, bench.wait_view(), bench.wait_decision()]:
        assert isinstance(error_of(task), LocalError)
        assert not error_of(task).usable


@pytest.mark.parametrize(
    ("absence", "held", "why"),
    [
        ("", "", "the view is not complete"),
        ("", "2 of 3 ranks are there", "2 of 3 ranks are there"),
        ("the coordinator is gone", "2 of 3 ranks are there", "the coordinator is gone"),
    ],
)
def test_who_waits_in_vain_is_told_what_was_missing_at_the_end(bench: Bench, absence: str, held: str, why: str) -> None:
    joining, later = bench.wait_view(2.0, joining=True), bench.wait_view(2.5)
    bench.absence = absence
    bench.waiting.held(held)
    bench.turn(1.9)
    assert not joining.done()
    bench.turn(1.0)
    assert isinstance(error_of(joining), PeerError)
    assert error_of(joining).message == f"not joined within 2 s: {why}"
    assert isinstance(error_of(later), Partitioned)
    assert error_of(later).message == f"no view within 2.5 s: {why}"


def test_a_cause_that_holds_no_more_is_not_told() -> None:
    with World(1) as world:
        bench = Bench(world)
        bench.waiting.held("2 of 3 ranks are there")
        bench.waiting.held("")
        task = bench.wait_view(1.0)
        bench.turn(1.5)
        assert error_of(task).message == "no view within 1 s: the view is not complete"


def test_an_address_that_nobody_gave_is_named_as_such_where_nobody_answers() -> None:
    with World(1) as world:
        bench = Bench(world, default_address=True)
        bench.absence = "cannot reach the coordinator"
        task = bench.wait_view(1.0)
        bench.turn(1.5)
        assert error_of(task).message == (
            "no view within 1 s: cannot reach the coordinator; that is the default address, none was given"
        )


@pytest.mark.parametrize(("absence", "said"), [("", ""), ("it is gone", " (it is gone)")])
def test_a_decision_that_does_not_come_leaves_the_step_in_doubt(bench: Bench, absence: str, said: str) -> None:
    bench.absence = absence
    task = bench.wait_decision(2.0)
    bench.turn(2.5)
    assert isinstance(error_of(task), Partitioned)
    assert error_of(task).message == (f"no decision within 2 s{said}; whether the step is committed is not known yet")


def test_each_wait_for_a_decision_ends_by_its_own_time_whichever_was_begun_first(bench: Bench) -> None:
    long, short, between = bench.wait_decision(4.0), bench.wait_decision(1.0), bench.wait_decision(2.0)
    for seconds, over in ((0.9, 0), (0.2, 1), (0.8, 1), (0.2, 2), (1.8, 2), (0.2, 3)):
        bench.turn(seconds)
        assert [task.done() for task in (short, between, long)] == [number < over for number in range(3)]
    assert [error_of(task).message.split(";")[0] for task in (short, between, long)] == [
        f"no decision within {seconds} s" for seconds in (1, 2, 4)
    ]


def test_a_wait_that_is_over_takes_no_time_from_those_after_it(bench: Bench) -> None:
    """The timer of the first is still there when the others begin, and comes before their time is up."""
    bench.wait_decision(1.0)
    bench.wait.cancel()
    bench.turn(0.5)
    later = bench.wait_decision(1.0)
    bench.turn(0.9)
    assert not later.done()
    bench.turn(0.2)
    assert error_of(later).message.startswith("no decision within 1 s")
    alone = bench.wait_decision(1.0)
    bench.decided = DECISION
    bench.waiting.wake()
    assert alone.result() is DECISION


def test_a_closed_engine_has_no_timer_left(bench: Bench) -> None:
    bench.wait_decision(1.0)
    bench.waiting.close()
    assert not bench.loop.timers
