"""Ranks behind address translators: by which way they reach each other, and that it changes no bit."""

from __future__ import annotations

from itertools import pairwise, permutations, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.engine.ways import DIALS_TOO_S, LATE_OPENER, OPENERS_S
from quicoll.errors import LocalError
from quicoll.membership.coordinator.probes import AGAIN_NS
from quicoll.sim import Recording, Settings, Simulation, workload
from quicoll.sim.scenario.events import MEDDLINGS
from quicoll.sim.scenario.language import parse_events
from quicoll.sim.translators import opens
from quicoll_transport.endpoint import Endpoint
from quicoll_transport.relay.wire import PASSED_ON

if TYPE_CHECKING:
    from random import Random

    from quicoll.job import Job
    from quicoll.sim import Outcome
    from quicoll_transport.faults.compose import Datagram, Delivery
    from quicoll_transport.net.addresses import Address

LOST_AFTER = 0.5
FULL, RESTRICTED, PORTS, SYMMETRIC = "full-cone", "restricted-cone", "port-restricted-cone", "symmetric"
COMMON: dict[str, Any] = {"lost_after": LOST_AFTER, "recovery": 20.0}
LOAD = workload.Load(elements=300, whole_every=1, operations=("barrier",))


def run(nats: tuple[str, ...], script: str = "", *, steps: int = 6, **settings: Any) -> tuple[Outcome, Recording]:
    """A job whose state after each step has to be the one that a single process computes, whatever the way."""

    async def life(job: Job, sim: Simulation) -> int:
        return await workload.worker(job, lambda: sim.everyone_at(steps), load=LOAD)

    recording = Recording()
    outcome = Simulation(
        life,
        settings=Settings(**({"ranks": len(nats), "nats": nats, "limit": 30.0} | COMMON | settings)),
        events=parse_events(script),
        replay=workload.Reference(LOAD),
        compute=workload.COMPUTE_S,
        recorder=recording.record,
    ).run()
    return outcome, recording


def held(nats: tuple[str, ...], script: str = "", *, steps: int = 6, **settings: Any) -> tuple[Outcome, Recording]:
    outcome, recording = run(nats, script, steps=steps, **settings)
    assert outcome.error is None, outcome.error
    assert outcome.committed >= steps
    return outcome, recording


def longest_gap(recording: Recording) -> float:
    """Between two committed steps, in seconds."""
    commits = [
        entry.t_ns / 1e9 for entry in recording.entries if entry.kind == "step_committed" and entry.who == "coordinator"
    ]
    return max(after - before for before, after in pairwise(commits))


@pytest.mark.parametrize("nats", [(PORTS, PORTS), (RESTRICTED, PORTS), (FULL, SYMMETRIC)])
def test_two_ranks_behind_cones_open_their_ways_to_each_other(nats: tuple[str, ...]) -> None:
    outcome, recording = held(nats, relay="none")
    assert longest_gap(recording) < LOST_AFTER / 2
    assert outcome.injected["datagram_nat"] > 0  # what was announced is dialled first, and leads nowhere


@pytest.mark.parametrize("nats", [(SYMMETRIC, ""), ("", SYMMETRIC)])
def test_a_rank_behind_nat_dials_the_one_that_is_behind_none_whatever_their_names(nats: tuple[str, ...]) -> None:
    outcome, _ = held(nats)
    assert outcome.injected["datagram_nat"] == 1  # the opener, which needs to get nowhere


@pytest.mark.parametrize("opens", [True, False])
def test_openers_save_the_time_until_both_sides_dial(monkeypatch: pytest.MonkeyPatch, opens: bool) -> None:
    if not opens:
        monkeypatch.setattr(Endpoint, "knock", lambda self, address: None)
    _, recording = held((PORTS, PORTS), relay="none")
    formed_s = next(entry.t_ns / 1e9 for entry in recording.entries if entry.kind == "view_installed")
    assert (formed_s < DIALS_TOO_S) is opens
    assert formed_s < DIALS_TOO_S + 0.5
    causes = [str(entry.what["cause"]) for entry in recording.entries if entry.kind == "view_ended"]
    assert not any("no answer" in cause for cause in causes)


@pytest.mark.parametrize(("nats", "some"), [(("", ""), False), (("", PORTS), True), ((PORTS, PORTS), True)])
def test_openers_go_out_where_one_of_two_is_behind_nat_and_not_otherwise(
    monkeypatch: pytest.MonkeyPatch, nats: tuple[str, ...], some: bool
) -> None:
    sent: list[Address] = []

    def knock(self: Endpoint, address: Address) -> None:
        sent.append(address)
        original(self, address)

    original = Endpoint.knock
    monkeypatch.setattr(Endpoint, "knock", knock)
    held(nats)
    assert bool(sent) is some
    assert all(str(address[0]).startswith("198.18.") for address in sent)


@pytest.mark.parametrize("nats", [(PORTS, PORTS), (PORTS, PORTS, PORTS)])
def test_a_translator_that_loses_its_mappings_costs_a_view_and_a_moment(nats: tuple[str, ...]) -> None:
    outcome, recording = held(nats, "sim.at(0.4).rebind(1)", steps=20, relay="none")
    assert outcome.injected["rebind"] == 1
    assert outcome.aborted > 0
    assert longest_gap(recording) < 2 * LOST_AFTER + 0.5


def test_a_translator_that_loses_its_mappings_again_and_again_is_outlived() -> None:
    held((PORTS, RESTRICTED, PORTS), "sim.at(0.4).rebind(1); sim.at(1.6).rebind(2); sim.at(2.8).rebind(1)", steps=25)


@pytest.mark.parametrize(
    ("nats", "relay"), [((SYMMETRIC, SYMMETRIC), ""), ((SYMMETRIC, SYMMETRIC), "own"), ((PORTS, SYMMETRIC, ""), "")]
)
def test_ranks_behind_symmetric_translators_reach_each_other_by_the_relay(nats: tuple[str, ...], relay: str) -> None:
    _, recording = held(nats, relay=relay)
    assert longest_gap(recording) < LOST_AFTER / 2


def test_by_a_relay_a_translator_that_loses_its_mappings_costs_no_view() -> None:
    outcome, recording = held((SYMMETRIC, SYMMETRIC), "sim.at(0.8).rebind(1)", steps=15)
    assert outcome.injected["rebind"] == 1
    assert longest_gap(recording) < LOST_AFTER / 2
    assert not silences(recording)


def silences(recording: Recording) -> list[str]:
    """Why ranks lost each other, but for those that had ended."""
    lost = [entry.what["cause"] for entry in recording.entries if entry.kind == "peer_lost"]
    return [cause for cause in lost if "left the job" not in cause]


def test_a_relay_that_dies_costs_a_view_at_once_and_is_used_again_when_it_is_back() -> None:
    script = "sim.at(0.9).crash('relay'); sim.at(2.0).restart('relay')"
    _outcome, recording = held((SYMMETRIC, PORTS, PORTS), script, steps=30, relay="own")
    assert longest_gap(recording) < 2 * LOST_AFTER + 0.3, "the other two go on"
    assert all("the relay at" in cause and "cannot be reached" in cause for cause in silences(recording)[:2])
    views = [len(each.what["nodes"]) for each in recording.entries if each.kind == "view_installed"]
    assert views.index(2) < len(views) - 1 - views[::-1].index(3)


def test_a_coordinator_that_is_the_relay_takes_its_links_along_and_they_are_made_again() -> None:
    script = "sim.at(0.9).crash('coordinator'); sim.at(1.5).restart('coordinator')"
    outcome, _ = held((SYMMETRIC, PORTS), script, steps=20)
    assert outcome.injected["coordinator_crash"] == 1


def test_where_there_is_no_way_left_every_rank_hears_by_its_deadline_which_were_tried() -> None:
    outcome, recording = run((SYMMETRIC, SYMMETRIC), relay="none", join_timeout=5.0, limit=6.0)
    assert outcome.committed == 0
    ends = [str(entry.what) for entry in recording.entries if entry.kind == "process_ended"]
    assert len(ends) == 2
    for end in ends:
        assert "not joined within 5 s" in end
        assert "worker-1 is left out" in end
        assert "198.18.0.2:20000: no answer" in end
        assert "the job has no relay (--relay)" in end


KINDS = (FULL, RESTRICTED, PORTS, SYMMETRIC)


@pytest.mark.parametrize("nats", [*product(KINDS, KINDS)], ids="-".join)
def test_which_two_kinds_of_translator_need_a_relay(nats: tuple[str, str]) -> None:
    """What `opens` says, by which the swarm draws who is the relay, is what the ranks find out."""
    outcome, _ = run(nats, relay="none", steps=3, join_timeout=7.0, limit=8.0)
    assert (outcome.committed >= 3) is opens(nats, 0, 1)


MOMENTS = {
    "while they join": "sim.at(0.0015).rebind(0); sim.at(0.002).rebind(1); sim.at(1.0).heal()",
    "while links are made": "sim.at(0.15).rebind(1); sim.at(1.0).heal()",
    "in a step, of the one": "sim.at(0.6).rebind(0); sim.at(1.0).heal()",
    "in a step, of the other": "sim.at(0.6).rebind(1); sim.at(1.0).heal()",
    "in a step, of both": "sim.at(0.6).rebind(0); sim.at(0.6).rebind(1); sim.at(1.0).heal()",
    "when links are lost over it": "sim.at(0.6).rebind(1); sim.at(1.15).rebind(0); sim.at(2.0).heal()",
    "while one is left out": "sim.at(0.6).partition({0}, {1}); sim.at(2.3).rebind(0); sim.at(9.0).heal()",
    "while the other is left out": "sim.at(0.6).partition({0}, {1}); sim.at(2.3).rebind(1); sim.at(9.0).heal()",
    "around a restart of the one": "sim.at(0.6).crash(0); sim.at(0.7).rebind(1); sim.at(1.5).restart(0); "
    "sim.at(2.1).rebind(1); sim.at(3.0).heal()",
    "around a restart of the other": "sim.at(0.6).crash(1); sim.at(0.7).rebind(1); sim.at(1.5).restart(1); "
    "sim.at(2.1).rebind(0); sim.at(3.0).heal()",
}
# The bound at the head of quicoll.engine.ways, and what a view takes: to find a link lost, the back-off, a step.
SOON_S = AGAIN_NS / 1e9 + 1.5 + 2 * LOST_AFTER + 1.0


@pytest.mark.parametrize("nats", [each for each in product(KINDS, KINDS) if opens(each, 0, 1)], ids="-".join)
@pytest.mark.parametrize("script", MOMENTS.values(), ids=MOMENTS)
def test_two_that_need_no_relay_reach_each_other_soon_after_their_routers_have_lost_what_they_knew(
    nats: tuple[str, str], script: str
) -> None:
    """From whatever state. Both are needed for each step, so a step says that they do; mappings live for a moment."""
    outcome, recording = held(nats, script, steps=8, relay="none", nat_lifetime=2 * LOST_AFTER)
    healed_s = parse_events(script)[-1].at_ns / 1e9
    commits = [each.t_ns / 1e9 for each in recording.entries if each.kind == "step_committed"]
    assert outcome.injected["rebind"] > 0
    assert min(at for at in [*commits, outcome.virtual_s] if at >= healed_s) < healed_s + SOON_S
    assert outcome.virtual_s < healed_s + SOON_S + 2.0


@pytest.mark.parametrize("nats", [("", PORTS), ("", RESTRICTED), ("", FULL)])
def test_a_rank_behind_a_firewall_lets_in_one_that_is_behind_nat_as_it_opens_for_it(nats: tuple[str, str]) -> None:
    """It translates nothing, so the coordinator sees the rank where the rank says that it is."""
    firewall = Firewall("worker-0", "worker-1", round(LOST_AFTER * 1e9))

    async def life(job: Job, sim: Simulation) -> int:
        if job.rank == 0 and not firewall.stands:
            firewall.stand(sim)
        return await workload.worker(job, lambda: sim.everyone_at(8), load=LOAD)

    outcome = Simulation(
        life,
        settings=Settings(ranks=2, nats=nats, relay="none", limit=30.0, **COMMON),
        events=parse_events("sim.at(0.6).partition({0}, {1}); sim.at(4.0).heal()"),
        replay=workload.Reference(LOAD),
        compute=workload.COMPUTE_S,
    ).run()
    assert outcome.error is None, outcome.error
    assert firewall.stopped > 0, "what came before it was opened"
    assert outcome.virtual_s < 4.0 + SOON_S


def behind_firewalls(script: str = "", *, ranks: int = 2, steps: int = 6, **settings: Any) -> tuple[Outcome, Recording]:
    """A job of which each rank has a firewall against every other one, from the beginning; none translates."""
    names = [f"worker-{rank}" for rank in range(ranks)]
    walls = [Firewall(*pair, 3 * round(LOST_AFTER * 1e9)) for pair in permutations(names, 2)]
    recording = Recording()

    async def life(job: Job, sim: Simulation) -> int:
        return await workload.worker(job, lambda: sim.everyone_at(steps), load=LOAD)

    def record(*what: Any) -> None:
        for wall in walls:
            if not wall.stands:
                wall.stand(simulation)
        recording.record(*what)

    simulation = Simulation(
        life,
        settings=Settings(ranks=ranks, **({"limit": 90.0} | COMMON | {"recovery": 60.0} | settings)),
        events=parse_events(script),
        replay=workload.Reference(LOAD),
        compute=0.3,
        recorder=record,
    )
    outcome = simulation.run()
    assert all(wall.stands for wall in walls)
    assert sum(wall.stopped for wall in walls) > 0, "who dials first was let in"
    return outcome, recording


FIREWALLED_S = OPENERS_S[LATE_OPENER] + 1.5  # the bound at the head of quicoll.engine.ways, and a handshake


def formed_s(recording: Recording) -> list[float]:
    return [entry.t_ns / 1e9 for entry in recording.entries if entry.kind == "view_installed"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_behind_firewalls_that_translate_nothing_open_their_ways_to_each_other(ranks: int) -> None:
    outcome, recording = behind_firewalls(ranks=ranks)
    assert outcome.error is None, outcome.error
    assert formed_s(recording)[0] < FIREWALLED_S


def test_without_openers_ranks_behind_firewalls_do_not_meet_in_the_first_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Endpoint, "knock", lambda self, address: None)
    _, recording = behind_firewalls(join_timeout=7.0, limit=8.0)
    assert min(formed_s(recording), default=8.0) > FIREWALLED_S


@pytest.mark.parametrize(
    "script",
    [
        "sim.at(0.9).crash(1); sim.at(3.0).restart(1)",
        "sim.at(0.9).crash(0); sim.at(3.0).restart(0)",
        "sim.at(0.9).crash('coordinator'); sim.at(3.0).restart('coordinator')",
    ],
)
def test_behind_firewalls_who_starts_anew_is_let_in_again(script: str) -> None:
    outcome, recording = behind_firewalls(script, ranks=3, steps=10)
    assert outcome.error is None, outcome.error
    assert formed_s(recording)[-1] < 3.0 + 2 * FIREWALLED_S


def test_who_was_cut_off_until_the_firewalls_had_forgotten_it_is_back_within_the_longest_back_off() -> None:
    script = "sim.at(0.9).partition({0}, {1, 2}); sim.at(6.0).heal()"
    outcome, recording = behind_firewalls(script, ranks=3, steps=8)
    assert outcome.error is None, outcome.error
    views = [(each.t_ns / 1e9, each.what["nodes"]) for each in recording.entries if each.kind == "view_installed"]
    apart = [at for at, nodes in views if len(nodes) == 2]
    again = [at for at, nodes in views if len(nodes) == 3 and at > 6.0]
    assert apart
    assert again
    assert again[0] < 6.0 + 30.0 + 2 * FIREWALLED_S


class Firewall:
    """Lets in what another one sends from where its host has sent to not long ago."""

    def __init__(self, host: str, other: str, lifetime_ns: int) -> None:
        self.host, self.other, self.lifetime_ns = host, other, lifetime_ns
        self.stands, self.stopped = False, 0
        self.sent_ns: dict[Address, int] = {}

    def stand(self, sim: Simulation) -> None:
        network, self.stands = sim._world.network, True
        network.add_rule(Outward(self), self.host, self.other)
        network.add_rule(Inward(self), self.other, self.host)


class Outward:
    def __init__(self, firewall: Firewall) -> None:
        self.firewall = firewall

    def decide(self, datagram: Datagram, now_ns: int, rng: Random) -> None:
        self.firewall.sent_ns[datagram.destination[:2]] = now_ns


class Inward:
    def __init__(self, firewall: Firewall) -> None:
        self.firewall = firewall

    def decide(self, datagram: Datagram, now_ns: int, rng: Random) -> list[Delivery] | None:
        at_ns = self.firewall.sent_ns.get(datagram.source[:2])
        if at_ns is not None and now_ns - at_ns <= self.firewall.lifetime_ns:
            return None
        self.firewall.stopped += 1
        return []


def test_two_ranks_behind_one_translator_need_neither_openers_nor_a_relay_nor_its_mappings() -> None:
    script = "sim.at(0.4).rebind(0); sim.at(0.6).rebind(1)"
    outcome, recording = held((SYMMETRIC, "0"), script, relay="none", steps=20)
    assert outcome.injected["rebind"] == 2
    assert not silences(recording)
    views = [each.what["nodes"] for each in recording.entries if each.kind == "view_installed"]
    assert views.count(["worker-0", "worker-1"]) == 3, "one, told to two ranks and kept by the coordinator"


def test_links_keep_their_mappings_alive_and_a_rank_that_stood_still_gets_others() -> None:
    settings: dict[str, Any] = {"nat_lifetime": 0.8 * LOST_AFTER, "relay": "none"}
    outcome, _ = held((PORTS, PORTS, ""), steps=20, **settings)
    assert "mapping_expired" not in outcome.injected
    outcome, _ = held((PORTS, PORTS, ""), "sim.at(0.6).pause(1, 1.2); sim.at(2.0).heal()", steps=20, **settings)
    assert outcome.injected["mapping_expired"] > 0


@pytest.mark.parametrize("relay", ["", "own"])
@pytest.mark.parametrize("what", MEDDLINGS)
def test_a_relay_that_meddles_delays_and_changes_no_bit(what: str, relay: str) -> None:
    script = f"sim.at(0.4).meddle({what!r}); sim.at(4.0).heal()"
    outcome, _ = held((SYMMETRIC, SYMMETRIC, PORTS), script, steps=12, relay=relay)
    assert outcome.injected[f"meddled_{what}"] > 20


class Ear:
    """A rule that hears what passes, and has no opinion."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []

    def decide(self, datagram: Datagram, now_ns: int, rng: Random) -> None:
        self.heard.append(bytes(datagram.data))


def test_a_relay_sees_ciphertext_alone() -> None:
    ear, word = Ear(), b"what one rank says to another is for the two alone; "
    words = np.frombuffer(word * 200, np.uint8)

    async def life(job: Job, sim: Simulation) -> None:
        if job.rank == 0:
            for worker in ("worker-0", "worker-1"):
                sim._world.network.add_rule(ear, "relay", worker)
        async with job.step():
            heard = await job.group.broadcast(words.copy(), root=0)
            assert bytes(heard) == bytes(words)

    settings = Settings(ranks=2, nats=(SYMMETRIC, SYMMETRIC), relay="own")
    outcome = Simulation(life, settings=settings).run()
    assert outcome.error is None, outcome.error
    passed = [data for data in ear.heard if data[0] == PASSED_ON]
    assert sum(map(len, passed)) > words.nbytes, "all of it goes by the relay"
    assert not any(word[at : at + 8] in data for data in passed for at in range(len(word) - 8))


def test_only_a_node_behind_a_translator_can_lose_its_mappings() -> None:
    with pytest.raises(LocalError, match="worker-0 is behind no address translator"):
        run(("", PORTS), "sim.at(0.4).rebind(0)")
    with pytest.raises(LocalError, match="'round' is no kind of address translator"):
        Settings(ranks=1, nats=("round",))
    with pytest.raises(LocalError, match="2 address translators for 1 workers"):
        Settings(ranks=1, nats=("", PORTS))


@pytest.mark.parametrize("nats", [("0",), ("1", PORTS), ("", "0"), (PORTS, "0", "1"), (PORTS, "-0")])
def test_the_number_of_a_worker_stands_for_the_translator_that_an_earlier_one_has(nats: tuple[str, ...]) -> None:
    with pytest.raises(LocalError, match="nor an earlier worker that has one of its own"):
        Settings(ranks=3, nats=nats)
    assert Settings(ranks=3, nats=(PORTS, "0", "0")).nats == (PORTS, "0", "0")


def test_a_relay_that_there_is_not_meddles_with_nothing() -> None:
    for nats, relay in (((PORTS, PORTS), "none"), (("", ""), "own")):
        with pytest.raises(LocalError, match="nobody passes anything on"):
            run(nats, 'sim.at(0.4).meddle("lose")', relay=relay)
