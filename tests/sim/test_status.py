"""Somebody looks at simulated jobs whenever a coordinator has done something: it is so, and changes nothing."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.cli.link_words import link_facts
from quicoll.errors import Partitioned, StepAborted
from quicoll.membership.operators import StandsBy, decode_answer
from quicoll.membership.service import CoordinatorService
from quicoll.membership.status import MAX_STATUS, JobStatus, condition_of, is_late
from quicoll.sim import Conditions, Settings, Simulation, fleet
from quicoll.sim.runner import run_seed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from quicoll.job import Job
    from quicoll.membership.coordinator.actions import CoordinatorAction
    from quicoll.sim import Outcome
    from quicoll_transport.endpoint import Link

    Life = Callable[[Job, Simulation], Awaitable[bytes]]

STEPS = 12


class Eye:
    """What was seen, in order: by which process of a coordinator, and what it said."""

    def __init__(self, *, links: bool = False) -> None:
        self.seen: list[tuple[CoordinatorService, JobStatus | StandsBy]] = []
        self._links = links

    def look(self, service: CoordinatorService) -> None:
        data = service._look(self._links)
        assert len(data) <= MAX_STATUS
        answer = decode_answer(data, node="coordinator")
        assert isinstance(answer, JobStatus | StandsBy)
        if isinstance(answer, JobStatus):
            check(answer)
        self.seen.append((service, answer))

    @property
    def statuses(self) -> list[JobStatus]:
        return [answer for _, answer in self.seen if isinstance(answer, JobStatus)]

    @property
    def conditions(self) -> list[str]:
        """One after the other, each once in a row."""
        found = [condition_of(status) for status in self.statuses]
        return [each for at, each in enumerate(found) if at == 0 or found[at - 1] != each]

    def states(self, node: str) -> set[str]:
        return {each.state for status in self.statuses for each in status.members if each.node == node}


def check(status: JobStatus) -> None:
    """What holds for every status."""
    ranks = sorted(each.rank for each in status.members if each.rank is not None)
    assert ranks == list(range(len(ranks)))
    names = [each.node for each in status.members]
    assert len(names) == len({*names})
    assert bool(status.view_id) == bool(ranks)
    assert bool(status.view_id) == (status.stage != "forming")
    inside = {each.state for each in status.members if each.rank is not None}
    outside = {each.state for each in status.members if each.rank is None}
    if status.stage == "proposed":
        assert inside <= {"asked", "confirmed", "declined"} | {"lost", "gone", "done"}
    elif status.open_step:
        assert inside <= {"outside", "computing", "voted", "spare"}
        assert status.open_step == status.committed_step + 1
        assert status.votes == sum(each.state == "voted" for each in status.members)
    else:
        assert inside <= {"at work", "leaving", "spare"}
        assert status.votes == 0
    assert not outside & {"at work", "outside", "computing", "voted", "asked", "confirmed", "declined"}
    assert (status.without_ns == 0) or status.stage != "installed"
    assert not (status.held and status.stage != "forming")


def opened(monkeypatch: pytest.MonkeyPatch, *, links: bool = False) -> Eye:
    """It looks whenever a coordinator has heard or done something; no timer and no message is needed for that."""
    found = Eye(links=links)

    class Seen(CoordinatorService):
        def _on_app(self, link: Link, data: bytes) -> None:
            super()._on_app(link, data)
            found.look(self)

        def _carry_out(self, action: CoordinatorAction) -> None:
            super()._carry_out(action)
            found.look(self)

        def stand_by(self, leader: str) -> None:
            super().stand_by(leader)
            found.look(self)

    monkeypatch.setattr(fleet, "CoordinatorService", Seen)
    return found


@pytest.fixture
def eye(monkeypatch: pytest.MonkeyPatch) -> Eye:
    return opened(monkeypatch)


async def worker(job: Job, sim: Simulation) -> bytes:
    held = {"sum": np.zeros(3, np.float32)}
    job.register_state(lambda: held, lambda state: held.update(sum=state["sum"].copy()))
    while job.committed_step < STEPS:
        try:
            async with job.step() as step:
                total = await job.group.all_reduce(np.ones(3, np.float32))
                step.on_commit(lambda total=total: held.update(sum=held["sum"] + total))
        except (StepAborted, Partitioned):
            continue
        await asyncio.sleep(0.01)
    return held["sum"].tobytes()


def run(events: Callable[[Simulation], Any], *, life: Life | None = None, **settings: Any) -> Outcome:
    chosen = Settings(**{"ranks": 3, "lost_after": 0.5, "limit": 60.0, **settings})
    sim = Simulation(life or worker, seed=3, settings=chosen, compute=0.1)
    events(sim)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    return outcome


def test_a_job_is_forming_until_all_are_there_then_at_work_and_in_the_end_done(eye: Eye) -> None:
    run(lambda sim: None)
    assert eye.conditions[:2] == ["forming", "at work"]
    assert eye.conditions[-1] == "done"
    steps = [status.committed_step for status in eye.statuses]
    assert steps == sorted(steps)
    assert steps[-1] == STEPS
    states = set[str]().union(*(eye.states(f"worker-{number}") for number in range(3)))
    assert states == {"joining", "asked", "confirmed", "at work", "outside", "computing", "voted", "done"}


def test_of_a_job_that_loses_two_of_three_it_is_seen_who_is_lost_and_that_it_is_held_for_that(eye: Eye) -> None:
    run(lambda sim: (sim.at(0.6).crash(1), sim.at(0.6).crash(2), sim.at(4.0).restart(1), sim.at(4.2).restart(2)))
    held = [status for status in eye.statuses if condition_of(status) == "held" and status.committed_step]
    assert held
    lost = {each.node: each.why for each in held[-1].members if each.state == "lost"}
    assert held[-1].held
    assert all(f"{node} was lost" in why for node, why in lost.items())
    assert {"lost", "computing", "done"} <= eye.states("worker-2")
    last = eye.statuses[-1]
    assert (condition_of(last), last.final_step) == ("done", STEPS)


def test_a_rank_that_does_not_go_on_is_seen_to_be_waited_for_before_it_is_lost(eye: Eye) -> None:
    async def watched(job: Job, sim: Simulation) -> bytes:
        async def look() -> None:
            while True:
                await asyncio.sleep(0.2)
                eye.look(eye.seen[-1][0])

        looking = asyncio.create_task(look()) if job.node == "worker-0" else None
        try:
            return await worker(job, sim)
        finally:
            if looking is not None:
                looking.cancel()

    run(lambda sim: sim.at(0.65).pause(2, 8.0), life=watched, lost_after=10.0)
    troubled = {
        each.node for status in eye.statuses for each in status.members if each.doubted or is_late(status, each)
    }
    assert troubled == {"worker-2"}
    assert "lost" not in eye.states("worker-2")
    patient = [condition_of(status) for status in eye.statuses if status.open_ns]
    hasty = [condition_of(status, patience_ns=4 * 10**9) for status in eye.statuses if status.open_ns]
    assert (set(patient), set(hasty)) == ({"at work"}, {"at work", "stalled"})


def test_a_node_that_is_cut_off_from_one_other_is_left_out_with_why(eye: Eye) -> None:
    run(lambda sim: (sim.at(0.5).partition({1}, {2}), sim.at(6.0).repair()))
    out = [each for status in eye.statuses for each in status.members if each.state == "left out"]
    assert out
    assert all(each.why for each in out)
    assert any(each.out_ns for each in out)


def test_spares_are_seen_as_such_and_take_a_lost_ranks_place(eye: Eye) -> None:
    run(lambda sim: sim.at(0.9).crash(1) and sim.at(3.0).heal(), spares=1, warm_spares=1)
    assert {"spare", "at work", "done"} <= eye.states("worker-3")
    assert {"lost", "at work"} <= eye.states("worker-1")


def test_of_coordinators_that_take_over_one_leads_and_the_others_say_who(eye: Eye) -> None:
    run(
        lambda sim: (sim.at(0.7).crash("coordinator"), sim.at(6.0).restart("coordinator")),
        coordinators=2,
        lease=1.0,
    )
    tokens: dict[int, int] = {}
    for service, answer in eye.seen:
        if isinstance(answer, JobStatus):
            assert answer.token
            tokens.setdefault(answer.token, id(service))
            assert tokens[answer.token] == id(service)  # nobody else ever leads by it
    assert len(tokens) >= 2
    order = [answer.token for _, answer in eye.seen if isinstance(answer, JobStatus)]
    assert order == sorted(order)
    leaders = {answer.leader for _, answer in eye.seen if isinstance(answer, StandsBy)}
    assert any(leaders)
    last = eye.statuses[-1]
    assert (condition_of(last), last.final_step) == ("done", STEPS)


@pytest.mark.parametrize("seed", [40, 41, 45, 901])
def test_whatever_befalls_a_job_each_status_is_consistent_and_looking_changes_no_bit_of_the_run(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = run_seed(seed)
    eye = opened(monkeypatch)
    outcome = run_seed(seed)
    assert outcome.error is None, outcome.error
    assert outcome.digest == unseen.digest
    assert len(eye.statuses) > 20


def test_a_path_that_loses_packets_is_the_worst_link_of_those_that_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One direction between two of five ranks loses; so its sender loses, and nobody else does."""
    eye = opened(monkeypatch, links=True)

    async def busy(job: Job, sim: Simulation) -> bytes:
        while job.committed_step < 40:
            try:
                async with job.step():
                    await job.group.all_reduce(np.ones(60_000, np.float32))
            except (StepAborted, Partitioned):
                continue
            await asyncio.sleep(0.2)
        return b""

    lossy = Conditions(loss=0.05)
    run(lambda sim: sim.at(0.5).conditions(lossy, 3, 1), life=busy, ranks=5, lost_after=2.0)
    told = [status for status in eye.statuses if sum(each.links is not None for each in status.members) == 5]
    assert told
    for status in told[len(told) // 2 :]:
        worst, *others = link_facts(status)
        assert (worst["node"], worst["peer"]) == ("worker-3", "worker-1")
        assert 0.01 < worst["loss"] < 0.12
        assert all(each["loss"] == 0.0 for each in others)
        assert all(each["sent_rate"] > 0 and each["rtt_s"] > 0 for each in (worst, *others))
        assert len(others) == 5 * 4 - 1
        assert all(each["ago_s"] < 4.5 for each in others)


def test_ranks_of_one_host_say_that_its_memory_carries_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    eye = opened(monkeypatch, links=True)

    async def slow(job: Job, sim: Simulation) -> bytes:
        while job.committed_step < 20:
            try:
                async with job.step():
                    await job.group.all_reduce(np.ones(60_000, np.float32))
            except (StepAborted, Partitioned):
                continue
            await asyncio.sleep(0.4)
        return b""

    run(lambda sim: None, life=slow, hosts=("one", "one", "other"))
    facts = [each for status in eye.statuses for each in link_facts(status)]
    carriers = {(each["rank"], each["peer_rank"]): each["carrier"] for each in facts}
    assert carriers == {
        (rank, peer): "memory" if {rank, peer} == {0, 1} else "link"
        for rank in range(3)
        for peer in range(3)
        if rank != peer
    }
