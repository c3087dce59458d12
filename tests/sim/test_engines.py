"""Simulated engines in processes of their own: the bits they give, what becomes of a job whose engine fails."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import JobDone, LocalError, QuicollError, StepAborted
from quicoll.sim import Settings, Simulation
from quicoll.sim.scenario.engines import engines_of
from quicoll.sim.scenario.events import ENGINE_FAULTS, EngineFault
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.scenario.swarm import FAULT_KINDS, generate

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome

QUICK: dict[str, Any] = {"lost_after": 0.5, "restart_after": 0.1, "recovery": 10.0, "limit": 90.0}


async def operations(job: Job) -> tuple[bytes, ...]:
    """Calls of every kind: announced ones, some with a plan, some that ask for the network or for others' sizes."""
    group, draw = job.group, np.random.default_rng(job.rank)
    found: list[Any] = []
    for count in (0, 1, 7, 5_000, 70_000):
        x = draw.standard_normal(count).astype(np.float32)
        found += [await group.all_reduce(x, algorithm=way) for way in ("auto", "direct", "tree")]
        out = np.empty_like(x)
        found.append(await group.all_reduce(x, out=out))
        found.append(await group.all_reduce([x, x.reshape(-1, 1), x[: count // 2]]))
        found.append(await group.all_reduce(x, precision="exact"))
        if count:
            found.append(await group.all_reduce(x, wire="int8"))
            found.append(await group.all_reduce(x, wire="topk:1/4"))
        found.append(await group.all_gather(x[: count // (job.rank + 1)]))
        found.append(await group.reduce_scatter(x))
        found.append(await group.broadcast(x if job.rank == 2 else np.empty_like(x), root=2))
        found.append(await group.all_to_all(x, counts=[count - 2 * (count // 3), count // 3, count // 3]))
        handles = [group.all_reduce(x * i) for i in range(1, 4)]
        found += [await handle for handle in handles]
    await group.barrier()
    half = await group.split(color=job.rank % 2, key=0)
    assert half is not None
    found.append(await half.all_reduce(np.ones(3) * job.rank))
    if job.rank == 0:
        await group.send(np.arange(9_000.0), to=1)
    if job.rank == 1:
        found.append(await group.recv(np.empty(9_000), source=0))
    found.append(await group.all_gather_object({"rank": job.rank, "text": "x" * 3_000}))
    return tuple(each.tobytes() if isinstance(each, np.ndarray) else repr(each).encode() for each in found)


def simulate(apart: int, seed: int = 0) -> Outcome:
    outcome = Simulation(operations, seed=seed, settings=Settings(ranks=3, engine_processes=apart, **QUICK)).run()
    assert outcome.error is None, outcome.error
    return outcome


@pytest.fixture(scope="module")
def together() -> tuple[Any, ...]:
    return simulate(0).results


@pytest.mark.parametrize("apart", [1, 3])
def test_a_call_has_the_bits_that_it_has_of_an_engine_beside_its_program(apart: int, together: tuple[Any, ...]) -> None:
    assert simulate(apart).results == together


class Trained:
    """What ranks do in a job that has an end: steps with a state that is handed over to whoever comes back."""

    def __init__(self, steps: int = 12) -> None:
        self.steps = steps
        self.errors: list[tuple[str, QuicollError]] = []
        self.states: dict[str, tuple[int, bytes]] = {}

    async def __call__(self, job: Job) -> None:
        state = {"w": np.zeros(40_000), "n": 0}
        job.register_state(lambda: state, state.update)
        try:
            await self.train(job, state)
        except QuicollError as error:
            self.errors.append((job.node, error))
            raise
        self.states[job.node] = state["n"], state["w"].tobytes()

    async def train(self, job: Job, state: dict[str, Any]) -> None:
        while True:
            try:
                async with job.step() as step:
                    if state["n"] == self.steps:
                        return
                    await asyncio.sleep(0.1)
                    total = await job.group.all_reduce(np.full(40_000, state["n"] + 1.0))
                    step.on_commit(lambda total=total / job.world_size: self.apply(state, total))
            except (LocalError, JobDone):
                raise
            except QuicollError:
                continue

    def apply(self, state: dict[str, Any], total: Any) -> None:
        state["w"] = state["w"] + total
        state["n"] += 1


@pytest.mark.parametrize("at", [0.25, 0.6, 0.95])
@pytest.mark.parametrize("what", ENGINE_FAULTS)
def test_a_rank_whose_engine_fails_is_told_so_and_comes_back_to_the_same_bits(what: str, at: float) -> None:
    trained = Trained()
    sim = Simulation(trained, seed=1, settings=Settings(ranks=3, engine_processes=3, **QUICK))
    sim.at(at).engine(1, what)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert outcome.injected == {"engine": 1}
    (node, error), *others = trained.errors
    assert node == "worker-1"
    assert isinstance(error, LocalError)
    assert not error.usable
    why = "its process has ended (signal 9)" if what == "kill" else "it has given no sign of life for 1 s"
    assert error.message == f"the engine's process is gone: {why}"
    assert not others
    expected = 12, np.full(40_000, float(sum(range(1, 13)))).tobytes()
    assert set(trained.states.values()) == {expected}
    # One that hung for longer than the others went on comes to a job that is done.
    assert len(trained.states) == 3 or what == "hang"


def test_the_peers_of_an_engine_that_ends_lose_one_view_and_no_step() -> None:
    ends: list[str] = []

    def heard(t_ns: int, kind: str, who: str, what: Any) -> None:
        if kind == "view_ended" and who == "coordinator" and "has finished" not in what["cause"]:
            ends.append(what["cause"])

    trained = Trained()
    settings = Settings(ranks=3, engine_processes=1, **QUICK)
    sim = Simulation(trained, seed=2, settings=settings, recorder=heard)
    sim.at(0.5).engine(2, "kill")
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert ends == ["worker-2 was lost: nothing listens at its address any more"]
    assert len(trained.states) == 3


def test_an_engine_that_hangs_holds_no_call_beyond_its_deadline() -> None:
    """Which comes before its peers would miss it; the checker holds every call to that."""
    trained = Trained()
    settings = Settings(ranks=3, engine_processes=3, **{**QUICK, "lost_after": 4.0}, timeout=1.0)
    sim = Simulation(trained, seed=1, settings=settings)
    sim.at(0.55).engine(1, "hang")
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert [(node, type(error)) for node, error in trained.errors] == [("worker-1", LocalError)]
    assert "no sign of life for" in str(trained.errors[0][1])


def test_a_plan_of_a_call_that_is_refused_is_known_when_it_is_called_again() -> None:
    """Views end for nothing while ranks compute, so calls come when their view is over, and again in the next one."""
    refused: list[str] = []

    async def worker(job: Job) -> None:
        state = {"n": 0}
        job.register_state(lambda: state, state.update)
        while job.committed_step < 12:
            try:
                async with job.step() as step:
                    await asyncio.sleep(0.1)
                    x = np.full(1_000 + step.number, 1.0)  # of which no plan was told before
                    assert (await job.group.all_reduce(x, algorithm="tree")).sum() == job.world_size * x.size
                    step.on_commit(lambda number=step.number: state.update(n=number))
            except StepAborted as error:
                refused.append(str(error))

    sim = Simulation(worker, seed=4, settings=Settings(ranks=3, engine_processes=3, **QUICK))
    sim.at(0.2).alarm(1, 0.23)
    sim.at(1.6).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert len(refused) > 3


def test_a_fault_of_an_engine_needs_one_that_has_a_process() -> None:
    sim = Simulation(operations, settings=Settings(ranks=3, **QUICK))
    sim.at(0.5).engine(1, "kill")
    with pytest.raises(LocalError, match=r"no engine has a process; Settings\(engine_processes=...\)"):
        sim.run()
    with pytest.raises(LocalError, match="an engine fails in one of the ways kill, hang, not 'stop'"):
        sim.at(0.5).engine(1, "stop")
    with pytest.raises(LocalError, match="4 engines in processes of their own for 3 ranks"):
        Settings(ranks=3, engine_processes=4)


def test_seeds_have_engines_apart_some_with_faults_and_those_without_are_what_they_were() -> None:
    others = [kind for kind in FAULT_KINDS if kind != "engine"]
    made = [generate(seed) for seed in range(200)]
    some = [scenario for scenario in made if scenario.settings.engine_processes]
    assert 15 < len(some) < 50
    faults = [event.fault for each in some for event in each.events if isinstance(event.fault, EngineFault)]
    assert {fault.what for fault in faults} == set(ENGINE_FAULTS)
    assert {each.settings.engine_processes for each in some} >= {1, 2, 4}
    for seed, scenario in enumerate(made):
        if not scenario.settings.engine_processes:
            assert scenario == generate(seed, kinds=others)
    assert engines_of(3, ["loss"]) is None


def test_an_engine_fault_is_written_and_read() -> None:
    fault = EngineFault("worker-1", "hang")
    (event,) = parse_events(f"sim.at(0.5).{fault.source()}")
    assert event.fault == fault
