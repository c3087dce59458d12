"""Lanes of simulated ranks: what goes by them, and what becomes of it whatever breaks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import Diverged, JobDone, LocalError, QuicollError
from quicoll.sim import AccessLink, Settings, Simulation
from quicoll.sim.scenario.language import parse_events
from quicoll_transport.faults.rules import Cut

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome

QUICK: dict[str, Any] = {"lost_after": 0.5, "restart_after": 0.1, "recovery": 10.0, "limit": 60.0}
CHUNK = 96 << 10


class Told:
    """What the ranks tell of lanes, and how many bytes the datagrams of each socket had."""

    def __init__(self) -> None:
        self.lanes: list[tuple[float, str, str, Any]] = []
        self.views = 0

    def __call__(self, t_ns: int, kind: str, who: str, what: Any) -> None:
        if kind.startswith("lane_"):
            self.lanes.append((t_ns / 1e9, kind, who, what))
        self.views += kind == "view_installed" and who == "coordinator"

    def of(self, kind: str) -> list[Any]:
        return [what for _, each, _, what in self.lanes if each == kind]


async def operations(job: Job) -> tuple[bytes, ...]:
    """Operations with messages that go by lanes, and with some that are too short or too long; for some seconds."""
    group, draw = job.group, np.random.default_rng(job.rank)
    found: list[Any] = []
    for count in (7, 30_000, 90_000):
        x = draw.standard_normal(count).astype(np.float32)
        for way in ("auto", "direct", "tree"):
            found.append(await group.all_reduce(x, algorithm=way))
            await asyncio.sleep(0.25)
        found.append(await group.all_gather(x, algorithm="direct"))
        found.append(await group.broadcast(x if job.rank == 2 else np.empty_like(x), root=2, algorithm="tree"))
        handles = [group.all_reduce(x * i) for i in range(1, 4)]
        found += [await handle for handle in handles]
        await asyncio.sleep(0.3)
    return tuple(each.tobytes() for each in found)


def simulate(
    *faults: tuple[float, int, str], lanes: int = 1, seed: int = 0, told: Told | None = None
) -> tuple[Outcome, Told]:
    told = told or Told()
    settings = Settings(ranks=3, lanes=lanes, chunk_bytes=CHUNK, **QUICK)
    sim = Simulation(operations, seed=seed, settings=settings, recorder=told)
    for at, rank, what in faults:
        sim.at(at).lane(rank, what)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    return outcome, told


@pytest.fixture(scope="module")
def by_links() -> tuple[Any, ...]:
    return simulate(lanes=0)[0].results


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_goes_by_lanes_has_the_bits_that_it_has_over_links(lanes: int, by_links: tuple[Any, ...]) -> None:
    outcome, told = simulate(lanes=lanes)
    assert outcome.results == by_links
    assert len(told.of("lane_used")) == 3 * 2 * lanes
    assert told.of("lane_shut") == told.of("lane_lost") == []


@pytest.mark.parametrize("what", ["kill", "hang", "cut", "spoil", "slow"])
@pytest.mark.parametrize("at", [0.1, 1.1, 2.3])
def test_lanes_that_fail_cost_no_view_and_no_bit(what: str, at: float, by_links: tuple[Any, ...]) -> None:
    outcome, told = simulate((at, 1, what))
    assert outcome.results == by_links
    assert told.views == 1
    assert outcome.injected["lane"] == 1
    if what == "slow":
        assert told.of("lane_lost") == []


async def steps(job: Job, sim: Simulation) -> None:
    """Steps whose operations go by lanes, until all ranks have done some after the last fault."""
    count = np.zeros(1, np.float32)
    job.register_state(lambda: {"count": count.copy()}, lambda state: np.copyto(count, state["count"]))
    while not sim.everyone_at(6):
        try:
            async with job.step() as step:
                await asyncio.sleep(0.1)
                world, x = job.view.world_size, np.full(60_000, job.rank + 1, np.float32)
                total = await job.group.all_reduce(x)
                assert np.array_equal(total, np.full(60_000, world * (world + 1) / 2, np.float32))
                step.on_commit(lambda: np.add(count, 1, out=count))
        except (LocalError, Diverged, JobDone):
            raise
        except QuicollError:
            continue


@pytest.mark.parametrize("seed", range(2))
def test_ranks_that_crash_are_cut_off_or_paused_cost_what_they_cost_without_lanes(seed: int) -> None:
    told = Told()
    settings = Settings(ranks=3, lanes=1, chunk_bytes=CHUNK, **QUICK)
    sim = Simulation(steps, seed=seed, settings=settings, recorder=told)
    sim.at(0.5).crash(1)
    sim.at(2.0).lane(2, "cut")
    sim.at(2.6).partition({0}, {1, 2})
    sim.at(3.2).lane(0, "slow")
    sim.at(4.0).pause(2, 1.0)
    sim.at(5.5).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert told.views >= 3
    assert len({(who, what["view"]) for _, kind, who, what in told.lanes if kind == "lane_used"}) > 6


def test_a_link_that_is_cut_while_its_lane_lives_ends_the_view_as_ever() -> None:
    told = Told()

    async def cut_off(job: Job, sim: Simulation) -> None:
        if job.rank == 1 and job.view.view_id == 1:
            loop = asyncio.get_running_loop()
            faults = job._engine.faults
            loop.call_later(0.6, lambda: faults.add(Cut(until_ns=round(loop.time() * 1e9) + 2 * 10**9)))
        await steps(job, sim)

    settings = Settings(ranks=3, lanes=1, chunk_bytes=CHUNK, **QUICK)
    sim = Simulation(cut_off, settings=settings, recorder=told)
    sim.at(4.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert told.views >= 3  # without it, and with it again
    assert {what["peer"] for what in told.of("lane_used")} == {"worker-0", "worker-1", "worker-2"}


def test_a_lane_that_is_killed_while_its_end_is_waited_for_has_ended() -> None:
    """Of a rank that is about to leave: it waited for its lane's answer for ever."""

    async def short(job: Job, sim: Simulation) -> None:
        async with job.step():
            await job.group.barrier()

    left = 0
    for number in range(40):
        told = Told()
        sim = Simulation(short, settings=Settings(ranks=2, lanes=2, limit=30.0), recorder=told, seed=number)
        sim.at(0.1 + number / 400).lane(1, "kill")
        outcome = sim.run()
        assert outcome.error is None, (number, outcome.error)
        left += not told.of("lane_lost")
    assert left > 0, "none was killed after its rank had begun to end"


def test_a_fault_of_lanes_is_a_line_that_can_be_written_again_and_needs_lanes() -> None:
    for line in ('sim.at(1.0).lane(2, "cut")', 'sim.at(1.0).lane(2, "cut", only=0)'):
        (event,) = parse_events(line)
        assert parse_events(str(event)) == (event,)
    with pytest.raises(LocalError, match="a number from 0 to 7"):
        parse_events('sim.at(1.0).lane(2, "cut", only=8)')
    with pytest.raises(LocalError, match="one of the ways"):
        parse_events('sim.at(1.0).lane(2, "lost")')
    with pytest.raises(LocalError, match="no rank has a lane"):
        Simulation(operations, settings=Settings(ranks=3), events=(event,)).run()
    (event,) = parse_events('sim.at(1.0).lane(2, "cut", only=1)')
    with pytest.raises(LocalError, match="a rank has 1 lanes, which are numbered from 0"):
        Simulation(operations, settings=Settings(ranks=3, lanes=1), events=(event,)).run()


@pytest.mark.parametrize("nbytes", [-1, (64 << 20) + 1])
def test_long_messages_have_a_bound(nbytes: int) -> None:
    with pytest.raises(LocalError, match="long messages have 0 to 67108864 bytes"):
        Settings(long_bytes=nbytes)


async def exchanges(job: Job, sim: Simulation) -> None:
    """Steps in which each rank reduces what all have sent it, by lanes, and looks at nothing."""
    count = np.zeros(1, np.float32)
    job.register_state(lambda: {"count": count.copy()}, lambda state: np.copyto(count, state["count"]))
    while not sim.everyone_at(6):
        try:
            async with job.step() as step:
                await asyncio.sleep(0.1)
                await job.group.all_reduce(np.full(20_000, job.rank + 1, np.float32), algorithm="exchange")
                step.on_commit(lambda: np.add(count, 1, out=count))
        except (LocalError, Diverged, JobDone):
            raise
        except QuicollError:
            continue


def test_a_rank_that_lies_by_its_lanes_is_found_by_the_votes_and_no_lane_is_to_blame() -> None:
    """Its lie has a checksum that holds, as that of a bad memory has: what its lane carries is what it was given."""
    told, causes = Told(), dict[str, None]()

    def recorder(t_ns: int, kind: str, who: str, what: Any) -> None:
        told(t_ns, kind, who, what)
        if kind == "step_aborted":
            causes[what["cause"]] = None

    settings = Settings(ranks=3, lanes=1, chunk_bytes=CHUNK, **QUICK)
    sim = Simulation(exchanges, settings=settings, recorder=recorder)
    sim.at(0.4).lie(0, 1)
    sim.at(1.5).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert any("wrong: worker-1, or who sends to it" in cause for cause in causes), causes
    assert told.of("lane_shut") == []


MEGABYTE = 1_000_000
PROVIDERS = (
    AccessLink(up=4 * MEGABYTE, down=4 * MEGABYTE, up_queue=1 << 20, down_queue=1 << 20),
    AccessLink(up=MEGABYTE, down=MEGABYTE, up_queue=1 << 20, down_queue=1 << 20),
)


async def a_large_one(job: Job) -> tuple[float, bytes]:
    """One all_reduce when the lanes are there, and what it took, in simulated seconds."""
    await asyncio.sleep(0.5)
    x = np.random.default_rng(job.rank).standard_normal(1 << 19).astype(np.float32)
    took = 0.0
    for _ in range(2):
        began = asyncio.get_running_loop().time()
        total = await job.group.all_reduce(x)
        took = asyncio.get_running_loop().time() - began
    return took, total.tobytes()


def by_providers(
    *access: AccessLink, fault: tuple[float, str, int] | None = None
) -> tuple[list[float], list[bytes], Told]:
    told = Told()
    settings = Settings(ranks=2, lanes=len(access), lane_access=access, chunk_bytes=CHUNK, **QUICK)
    sim = Simulation(a_large_one, settings=settings, recorder=told)
    if fault is not None:
        at, what, only = fault
        sim.at(at).lane(1, what, only=only)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    return [took for took, _ in outcome.results], [bits for _, bits in outcome.results], told


def test_two_providers_are_used_at_once_each_by_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll.sim.lanes._SimLaneHost.slots", 64)  # nothing goes over the link, which has no bound
    both, bits, _ = by_providers(*PROVIDERS)
    quick, of_quick, _ = by_providers(PROVIDERS[0])
    assert bits == of_quick
    assert bits[0] == bits[1]
    assert max(both) < 0.95 * max(quick)  # 5/4 of the rate; equal parts would take longer than alone


@pytest.mark.parametrize("what", ["cut", "kill"])
@pytest.mark.parametrize("only", [0, 1])
def test_a_provider_that_fails_in_the_middle_of_an_operation_costs_no_view_and_no_bit(what: str, only: int) -> None:
    _, bits, _ = by_providers(*PROVIDERS)
    _, after, told = by_providers(*PROVIDERS, fault=(1.0, what, only))
    assert after == bits
    assert told.views == 1
    assert {shut["lane"] for shut in told.of("lane_shut")} == {only}
