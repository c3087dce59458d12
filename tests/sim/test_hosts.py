"""Ranks that share a simulated host: what goes through its memory, and what becomes of it whatever breaks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import quicoll
from quicoll.errors import JobDone, LocalError, Mismatch, PeerError, QuicollError
from quicoll.sim import Settings, Simulation
from quicoll.sim.runner import run_scenario
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.scenario.swarm import Scenario
from quicoll.sim.subgroups import Grouping, grouping

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome

ONE = ("one", "one", "one")
QUICK: dict[str, Any] = {"lost_after": 0.5, "restart_after": 0.1, "recovery": 10.0, "limit": 60.0}


class Told:
    """What the ranks tell of shared memory: by view and node, whether it is used, and why not."""

    def __init__(self) -> None:
        self.used: dict[int, dict[str, bool]] = {}
        self.reasons: list[str] = []

    def __call__(self, t_ns: int, kind: str, who: str, what: Any) -> None:
        if kind == "shared_memory":
            self.used.setdefault(what["view"], {})[who] = what["used"]
            self.reasons += [what["reason"]] if what["reason"] else []


def run(text: str, told: Told, *, hosts: tuple[str, ...] = ONE, seed: int = 3, steps: int = 4) -> Outcome:
    """Run the built-in workload, and look at the verdict of each view: all of a host who have come to one have the
    same."""
    settings = Settings(ranks=len(hosts), hosts=hosts, **QUICK)
    scenario = Scenario(seed=seed, steps=steps, compute_s=0.1, settings=settings, events=parse_events(text))
    outcome = run_scenario(scenario, recorder=told)
    assert outcome.error is None, f"{text}: {outcome.error}"
    for view, found in told.used.items():
        for host in hosts:
            party = {used for who, used in found.items() if hosts[int(who.rpartition("-")[2])] == host}
            assert len(party) < 2, f"{text}: view {view}: {found}"
    return outcome


def test_ranks_of_one_host_meet_and_use_its_memory_in_each_view() -> None:
    told = Told()
    run("sim.at(0.4).crash(2); sim.at(1.5).heal()", told)
    assert len(told.used) >= 3
    assert all(all(found.values()) for found in told.used.values())
    assert {len(found) for found in told.used.values()} == {2, 3}


def test_two_ranks_of_a_host_share_its_memory_with_and_without_one_that_is_elsewhere() -> None:
    told = Told()
    run("sim.at(0.4).crash(2); sim.at(2.5).heal()", told, hosts=("one", "one", "other"), steps=30)
    assert len(told.used) >= 3
    assert all(found == {"worker-0": True, "worker-1": True} for found in told.used.values())


TWO = ("one", "one", "two", "two")


async def two_hosts(job: Job) -> tuple[bytes, ...]:
    """Operations with messages that are parcels, and with some that are too short or too long."""
    group, draw = job.group, np.random.default_rng(job.rank)
    found: list[Any] = []
    for count in (7, 20_000, 70_000):
        x = draw.standard_normal(count).astype(np.float32)
        found += [await group.all_reduce(x, algorithm=way) for way in ("auto", "direct", "tree", "hierarchical")]
        for way in ("direct", "hierarchical"):
            found.append(await group.all_gather(x, algorithm=way))
            found.append(await group.broadcast(x if job.rank == 2 else np.empty_like(x), root=2, algorithm="tree"))
            found.append(await group.gather(x, root=1, algorithm=way) if job.rank == 1 else None)
            if job.rank != 1:
                await group.gather(x, root=1, algorithm=way)
        handles = [group.all_reduce(x * i) for i in range(1, 7)]
        found += [await handle for handle in handles]
    return tuple(b"" if each is None else each.tobytes() for each in found)


def two_hosts_run(hosts: tuple[str, ...], *, sites: bool = True, fault: tuple[int, str] | None = None) -> Any:
    """Return the outcome, how many datagrams went between two ranks of one of TWO, and what was told of memory."""
    told = Told()
    ways: list[tuple[str, str]] = []
    places: dict[str, str] = {}

    def record(t_ns: int, kind: str, who: str, what: Any) -> None:
        told(t_ns, kind, who, what)
        if kind == "send" and who.startswith("worker"):
            source, target = what.split()
            places[source] = TWO[int(who.rpartition("-")[2])]
            ways.append((source, target))

    settings = Settings(ranks=4, hosts=hosts, sites=TWO if sites else (), **(QUICK | {"timeout": 20.0}))
    sim = Simulation(two_hosts, settings=settings, recorder=record)
    if fault is not None:
        sim.at(0.02).memory(*fault)
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    inside = sum(places[source] == places.get(target) for source, target in ways)
    return outcome, inside, told


def test_what_stays_inside_a_host_of_several_is_no_datagram_and_the_bits_are_those_of_the_network() -> None:
    shared, through_memory, told = two_hosts_run(TWO)
    apart, by_network, _ = two_hosts_run(())
    assert told.used == {1: dict.fromkeys(("worker-0", "worker-1", "worker-2", "worker-3"), True)}
    assert shared.results == apart.results
    assert through_memory * 2 < by_network


def test_where_there_is_no_memory_for_a_parcel_its_payload_goes_by_the_network() -> None:
    whole, _, _ = two_hosts_run(TWO)
    outcome, _, told = two_hosts_run(TWO, fault=(1, "full"))
    assert told.used == {1: dict.fromkeys(("worker-0", "worker-1", "worker-2", "worker-3"), True)}
    assert outcome.injected["memory_full"] > 0
    assert outcome.results == whole.results


def test_a_parcel_with_another_bit_ends_the_view_and_names_its_writer() -> None:
    async def worker(job: Job) -> tuple[str, str] | None:
        try:
            await job.group.all_reduce(np.ones(30_000))
        except QuicollError as error:
            return type(error).__name__, error.node
        return None

    sim = Simulation(worker, settings=Settings(ranks=4, hosts=TWO, **QUICK))
    sim.at(0.0).memory(3, "spoil")
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert set(outcome.results) == {("Corrupted", "worker-2")}
    assert outcome.injected == {"memory": 1, "memory_spoil": 1}


@pytest.mark.slow
@pytest.mark.parametrize("first", [1, 11, 21])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_killed_at_any_step_of_its_party_or_of_a_parcel_is_survived_by_both_hosts(rank: int, first: int) -> None:
    killed = 0
    for after in range(first, first + 10):
        text = f"sim.at(0.0).memory({rank}, 'kill', after={after}); sim.at(1.2).heal()"
        killed += run(text, Told(), hosts=TWO, seed=after, steps=2).injected.get("memory_kill", 0)
    assert killed == 10


def test_no_datagram_carries_what_goes_through_memory_and_the_bits_are_the_same() -> None:
    def sent(hosts: tuple[str, ...]) -> tuple[int, tuple[Any, ...]]:
        datagrams = 0

        def record(t_ns: int, kind: str, who: str, what: Any) -> None:
            nonlocal datagrams
            datagrams += kind == "send"

        async def worker(job: Job) -> list[bytes]:
            draw = np.random.default_rng(job.rank)
            found = []
            async with job.step():
                for count in (1, 1000, 200_000):
                    result: Any = await job.group.all_reduce(draw.standard_normal(count).astype(np.float32))
                    found.append(result.tobytes())
                await job.group.barrier()
            return found

        outcome = Simulation(worker, settings=Settings(ranks=3, hosts=hosts), recorder=record).run()
        assert outcome.error is None, outcome.error
        return datagrams, outcome.results

    shared, same = sent(ONE)
    apart, bits = sent(())
    assert same == bits == (bits[0],) * 3
    assert shared * 4 < apart  # of 3.2 MB, in datagrams of 1.5 kB


def test_where_there_is_no_memory_for_one_all_go_on_over_the_network_and_say_why() -> None:
    told = Told()
    run("sim.at(0.0).memory(1, 'full'); sim.at(1.0).heal()", told)
    assert told.used[1] == dict.fromkeys(("worker-0", "worker-1", "worker-2"), False)
    assert all("No space left" in reason for reason in told.reasons)


def test_where_there_is_no_memory_for_a_room_the_view_ends_and_the_next_ones_share_none() -> None:
    told = Told()

    async def worker(job: Job) -> list[tuple[int, str]]:
        found = []
        await asyncio.sleep(1.0)  # of simulated time: they have met
        for _ in range(3):
            try:
                pair = await job.group.split(0)
                assert pair is not None
                assert (await pair.all_reduce(np.ones(3))).tolist() == [2.0] * 3
                found.append((job.view.view_id, ""))
            except QuicollError as error:
                found.append((error.view or 0, f"{type(error).__name__} {error.node}"))
                async with job.step():
                    await job.group.barrier()
        return found

    sim = Simulation(worker, settings=Settings(ranks=2, hosts=("one", "one"), **QUICK), recorder=told)
    sim.at(0.8).memory(1, "full")
    sim.at(5.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert [list(found.values()) for found in told.used.values()] == [[True] * 2, [False] * 2]
    assert list(outcome.results) == [[(1, "PeerError worker-1"), (2, ""), (2, "")]] * 2


def test_a_payload_with_another_bit_ends_the_view_and_names_its_writer() -> None:
    async def worker(job: Job) -> tuple[str, str] | None:
        try:
            await job.group.all_reduce(np.ones(3))
        except QuicollError as error:
            return type(error).__name__, error.node
        return None

    sim = Simulation(worker, settings=Settings(ranks=2, hosts=("one", "one"), **QUICK))
    sim.at(0.0).memory(1, "spoil")
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert outcome.results[1] == ("Corrupted", "worker-0")
    assert outcome.injected == {"memory": 1, "memory_spoil": 1}


def test_a_rank_that_stands_still_is_named_by_its_silence() -> None:
    async def worker(job: Job) -> str | None:
        try:
            while True:
                await job.group.all_reduce(np.ones(3))
                await job.group.all_reduce(np.ones(30_000))
                await job.group.barrier()
                await asyncio.sleep(0.02)  # of simulated time, of which calls through memory take next to none
        except PeerError as error:
            return error.node
        return None

    sim = Simulation(worker, settings=Settings(ranks=3, hosts=ONE, **QUICK))
    sim.at(0.3).pause(1)
    sim.at(3.0).heal()
    outcome = sim.run()
    assert outcome.error is None, outcome.error
    assert outcome.results[0] == outcome.results[2] == "worker-1"


def test_ranks_that_call_different_things_are_told_so() -> None:
    async def worker(job: Job) -> str:
        with pytest.raises(Mismatch) as caught:
            await job.group.all_reduce(np.ones(3), op="max" if job.rank == 1 else "sum")
        return caught.value.message

    outcome = Simulation(worker, settings=Settings(ranks=3, hosts=ONE)).run()
    assert outcome.error is None, outcome.error
    assert all("op" in result for result in outcome.results)


def test_power_is_lost_by_all_of_a_host() -> None:
    told = Told()
    outcome = run(
        "sim.at(0.5).crash(1, power=True); sim.at(1.5).heal()", told, hosts=("one", "one", "two", "two", "two"), steps=8
    )
    assert outcome.injected["power"] == 1
    assert {"worker-2", "worker-3", "worker-4"} in [{*found} for found in told.used.values()]


LENT = 60_000  # elements: some rounds of the chunks here


def lending_run(*faults: tuple[int, str, int], seed: int = 1, late: int = 1) -> Outcome:
    """Ranks that give tensors of `quicoll.empty`, and change them whenever they are theirs again: after a call, and
    after an error as well. One of them is woken late each time, so it reads late."""

    async def worker(job: Job) -> list[str]:
        lent, errors, done = quicoll.empty(LENT, "float64"), [], 0
        job.register_state(lambda: {}, lambda state: None)
        while done < 6:
            try:
                async with job.step() as step:
                    turn = step.number
                    world, first = job.world_size, sum(rank + turn for rank in range(job.world_size))
                    lent[:] = np.arange(LENT) * (job.rank + turn)
                    handles = [job.group.all_reduce(np.ones(LENT)), job.group.all_reduce(lent)]
                    handles += [job.group.all_gather(lent[: LENT // 3]), job.group.reduce_scatter(lent)]
                    found = [await handle for handle in handles]
                    lent[:] = -1
                    assert (found[1] == np.arange(LENT) * first).all()
                    share = [LENT // world + (rank < LENT % world) for rank in range(world)]
                    start = sum(share[: job.rank])
                    assert (found[3] == np.arange(start, start + share[job.rank]) * first).all()
                    for rank, part in enumerate(np.split(found[2], world)):
                        assert (part == np.arange(LENT // 3) * (rank + turn)).all()
                    assert (found[0] == world).all()
                done = turn
            except JobDone:  # the others have done it while this one was away
                break
            except QuicollError as error:
                lent[:] = -2
                errors.append(f"{type(error.__cause__ or error).__name__} {error.node}")
        return errors

    sim = Simulation(worker, seed=seed, settings=Settings(ranks=3, hosts=ONE, **QUICK))
    for rank, what, after in ((late, "late", 1), *faults):
        sim.at(0.0).memory(rank, what, after=after)
    sim.at(2.0).heal()
    outcome = sim.run()
    assert outcome.error is None, (faults, outcome.error)
    return outcome


@pytest.mark.parametrize("late", range(3))
def test_tensors_that_are_lent_give_right_results_and_are_their_callers_again(late: int) -> None:
    assert list(lending_run(late=late).results) == [[], [], []]


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
def test_nobody_is_blamed_for_a_tensor_that_changes_when_another_rank_was_killed(rank: int) -> None:
    killed = 0
    for after in range(20 + rank, 420, 13):
        outcome = lending_run((rank, "kill", after), seed=after, late=(rank + 1 + after % 2) % 3)
        killed += outcome.injected.get("memory_kill", 0)
        for each in [each for errors in outcome.results if errors for each in errors]:
            assert each.endswith(f" worker-{rank}"), (after, each)
            assert not each.startswith("Corrupted"), (after, each)
    assert killed > 20


def test_a_bit_of_a_lent_tensor_that_was_read_wrong_names_its_writer() -> None:
    spoilt = 0
    for after in range(1, 60, 7):
        outcome = lending_run((2, "spoil", after), seed=after)
        spoilt += outcome.injected.get("memory_spoil", 0)
        told = [each for errors in outcome.results if errors for each in errors]
        assert outcome.injected.get("memory_spoil", 0) == bool(told)
        assert {each.endswith("worker-2") for each in told} <= {False}
    assert spoilt > 4


GROUPED = 10  # a seed whose workload splits in each step
MEETING = range(1, 21)  # steps that each of three ranks takes until it has met, or fewer
BEYOND = (21, 22, 24, 25, 30, 40, 60, 100, 160, 250)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_killed_at_any_step_of_a_meeting_or_in_memory_is_survived_by_all_others(rank: int) -> None:
    """All others come to the same verdict of the view, by the memory or by the network; leave nothing behind; and go
    on with the right bits, as the invariants of every run say."""
    killed = 0
    for after in (*MEETING, *BEYOND):
        text = f"sim.at(0.0).memory({rank}, 'kill', after={after}); sim.at(1.2).heal()"
        killed += run(text, Told(), seed=after, steps=2).injected.get("memory_kill", 0)
    assert killed > len(MEETING)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_killed_in_the_rooms_of_its_sub_groups_is_survived_by_all_others(rank: int) -> None:
    """In each step it splits all ranks in four ways, and works in all of these groups at once."""
    assert grouping(GROUPED) == Grouping(every=1, keeps=False)
    killed = 0
    for after in range(20, 420, 50):
        text = f"sim.at(0.0).memory({rank}, 'kill', after={after}); sim.at(1.2).heal()"
        killed += run(text, Told(), seed=GROUPED, steps=2).injected.get("memory_kill", 0)
    assert killed == 8


def test_a_seed_gives_the_same_run_twice() -> None:
    digests = [run("sim.at(0.0).memory(1, 'kill', after=40); sim.at(1.2).heal()", Told()).digest for _ in range(2)]
    assert digests[0] == digests[1]


def test_hosts_are_a_name_for_each_rank_and_their_faults_need_them() -> None:
    with pytest.raises(LocalError, match="hosts are a tuple of names"):
        Settings(ranks=2, hosts=("one", ""))
    with pytest.raises(LocalError, match="1 hosts for 2 ranks"):
        Settings(ranks=2, hosts=("one",))
    scenario = Scenario(seed=1, events=parse_events("sim.at(1.0).memory(1, 'full')"), settings=Settings(ranks=2))
    with pytest.raises(LocalError, match="no two share a host"):
        run_scenario(scenario)
    with pytest.raises(LocalError, match="memory fails in one of the ways"):
        parse_events("sim.at(1.0).memory(1, 'burns')")
    with pytest.raises(LocalError, match="memory fails after"):
        parse_events("sim.at(1.0).memory(1, 'kill', after=0)")
    shared = replace(scenario, settings=Settings(ranks=2, hosts=("one", "one")))
    assert parse_events(str(shared)) == shared.events
