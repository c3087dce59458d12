"""One bad member of a whole cluster: the others go on, with the right bits, and hear who it may be."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest
from depth import deep, some

from quicoll.engine.messages import Announce, encode_message
from quicoll.errors import Diverged, JobDone, LocalError, QuicollError
from quicoll.membership import messages as m
from quicoll.membership.messages import COORDINATOR_NODE
from quicoll.sim import Settings, Simulation
from quicoll.sim.misconduct import respelt
from quicoll_transport.endpoint import Link
from quicoll_transport.security.identity import COORDINATOR

if TYPE_CHECKING:
    from quicoll.engine.engine import Engine
    from quicoll.job import Job

SECONDS = 10.0
COMPUTE = 0.2
ELEMENTS = 160  # so that the size tells these tensors from whatever else is sent


def lie(monkeypatch: pytest.MonkeyPatch, pairs: Sequence[tuple[str, str]]) -> None:
    """Let tensors that go from one host to another have one bit changed, before their checksums are made."""
    honest, announcing = Link.send_copy, Link.send_app

    def changed(payload: memoryview) -> memoryview:
        found = bytearray(payload)
        if len(found) == 4 * ELEMENTS:
            found[2] ^= 0x10
        return memoryview(found)

    def lies(link: Link) -> bool:
        loop: Any = link.loop
        return (loop.host.name, link.node) in pairs

    def send(link: Link, tag: bytes, payload: memoryview) -> None:
        honest(link, tag, changed(payload) if lies(link) else payload)

    def announce(link: Link, data: bytes) -> None:
        announcing(link, respelt(data, changed) if lies(link) else data)

    monkeypatch.setattr(Link, "send_copy", send)
    monkeypatch.setattr(Link, "send_app", announce)


class Steps:
    """A cluster whose ranks reduce for SECONDS, and what they find.

    committed: (time, node, result is right) of each commit. failed: (time, words) of each step that `reporter` tried
    and that was given up.
    """

    def __init__(self, ranks: int, *, reporter: str) -> None:
        self.committed: list[tuple[float, str, bool]] = []
        self.failed: list[tuple[float, str]] = []
        self._reporter = reporter
        settings = Settings(ranks=ranks, hold_timeout=SECONDS, limit=4 * SECONDS, lost_after=2.0)
        self.sim = Simulation(self.work, seed=3, settings=settings)

    async def work(self, job: Job) -> None:
        sim = self.sim
        total = np.zeros(1, np.float32)
        job.register_state(lambda: {"total": total.copy()}, lambda state: np.copyto(total, state["total"]))
        while sim.now < SECONDS:
            try:
                async with job.step() as step:
                    await asyncio.sleep(COMPUTE)
                    # By messages, and in announcements.
                    algorithm: Literal["exchange", "auto"] = "exchange" if step.number % 2 else "auto"
                    part = await job.group.all_reduce(
                        np.full(ELEMENTS, step.number, np.float32), op="avg", algorithm=algorithm
                    )
                    step.on_commit(lambda: total.__iadd__(1.0))
                self.committed.append((sim.now, job.node, bool(np.all(part == step.number))))
            except QuicollError as error:
                if job.node == self._reporter and sim.now < SECONDS:
                    self.failed.append((sim.now, str(error)))

    def committers(self, since: float) -> set[str]:
        return {node for at, node, _ in self.committed if at > since}


def sends_other_bits(monkeypatch: pytest.MonkeyPatch, liar: str, victims: tuple[str, ...], ranks: int) -> None:
    lie(monkeypatch, [(liar, victim) for victim in victims])


def has_bad_memory(monkeypatch: pytest.MonkeyPatch, node: str, victims: tuple[str, ...], ranks: int) -> None:
    """What it gets has other bits when it reads it, whoever sent it."""
    lie(monkeypatch, [(f"worker-{rank}", node) for rank in range(ranks)])


SLOW = pytest.mark.slow
BAD = [
    (3, sends_other_bits, (0,)),
    (4, sends_other_bits, (0, 2)),  # two sides of equal size tell nothing
    (5, sends_other_bits, (0, 2, 3, 4)),
    (3, has_bad_memory, ()),
]
MORE = [
    (4, sends_other_bits, (0,)),
    (5, sends_other_bits, (4,)),
    (5, sends_other_bits, (0, 2)),  # both odd ones are innocent
    (3, sends_other_bits, (0, 2)),
    (4, sends_other_bits, (0, 2, 3)),
    (4, has_bad_memory, ()),
    (5, has_bad_memory, ()),
]
"""All of them without a cluster: tests/unit/membership/coordinator/test_elimination.py."""


@pytest.mark.parametrize(
    ("ranks", "is_bad", "victims"),
    [BAD[0], *(pytest.param(*each, marks=SLOW) for each in deep(BAD[1:], BAD[1:] + MORE))],
)
def test_a_bad_rank_is_found_and_the_others_go_on_without_it(
    ranks: int, is_bad: Callable[..., None], victims: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who computed wrongly and who sent it cannot be told from digests alone; whose absence ends it, can."""
    is_bad(monkeypatch, "worker-1", tuple(f"worker-{rank}" for rank in victims), ranks)
    steps = Steps(ranks, reporter="worker-2")
    outcome = steps.sim.run()
    assert outcome.error is None
    assert all(right for _, _, right in steps.committed)
    first = min(at for at, _, _ in steps.committed)
    assert len([at for at, _ in steps.failed if at < first]) <= 2 + ranks
    others = {f"worker-{rank}" for rank in range(ranks)} - {"worker-1"}
    found = max(at for at, _ in steps.failed)  # the latest trial of worker-1
    assert len(steps.failed) <= 3 + 3 * ranks
    late = [sum(at > SECONDS / 2 and node == each for at, node, _ in steps.committed) for each in sorted(others)]
    assert len(set(late)) == 1, late
    assert late[0] > 0.7 * SECONDS / 2 / (COMPUTE + 0.01)
    assert steps.committers(SECONDS / 2) == others
    assert steps.committers(found) == others


@pytest.mark.slow
def test_what_is_said_of_a_liar_is_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    sends_other_bits(monkeypatch, "worker-1", ("worker-0",), 3)
    steps = Steps(3, reporter="worker-0")
    assert steps.sim.run().error is None
    words = [said for _, said in steps.failed]
    assert all("worker-0, or who sends to it" in said for said in words[:3])
    assert "worker-0 is left out for 1 s, for what failed again and again: worker-0, or who sends to it" in words[2]
    (found,) = (said for said in words if "worker-1 is left out for 2 s" in said)
    assert "for what failed again and again: worker-0 or worker-1, and only when they work together" in found


def test_a_coordinator_that_starts_again_keeps_a_liar_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sends_other_bits(monkeypatch, "worker-1", ("worker-0",), 3)
    steps = Steps(3, reporter="worker-0")
    steps.sim.at(6.0).crash("coordinator")
    steps.sim.at(6.2).restart("coordinator")
    outcome = steps.sim.run()
    assert outcome.error is None
    assert all(right for _, _, right in steps.committed)
    assert steps.committers(7.0) == {"worker-0", "worker-2"}
    assert len([at for at, said in steps.failed if at > 7.0 and "differ" in said]) <= 2


class Handovers:
    """A cluster whose worker-3 is killed and comes back; worker-0, which would give it the state, is bad from then on.

    loaded: by node, each state that was loaded. committed: of each node, when it committed.
    """

    def __init__(self) -> None:
        self.loaded: list[tuple[str, dict[str, Any]]] = []
        self.committed: dict[str, list[float]] = {f"worker-{rank}": [] for rank in range(4)}
        self.failed: list[str] = []
        settings = Settings(ranks=4, hold_timeout=SECONDS, limit=4 * SECONDS, lost_after=1.0)
        self.sim = Simulation(self.work, seed=3, settings=settings)
        self.sim.at(0.5).crash(3)
        self.sim.at(0.8).restart(3)

    async def work(self, job: Job) -> None:
        sim = self.sim
        mine: dict[str, Any] = {"n": 0, "w": np.zeros(ELEMENTS)}

        def load(state: Any) -> None:
            self.loaded.append((job.node, state))
            mine.update(state)

        def apply(total: Any) -> None:
            mine.update(n=int(mine["n"]) + 1, w=mine["w"] + total)

        job.register_state(lambda: mine, load)
        while sim.now < SECONDS:
            try:
                async with job.step() as step:
                    await asyncio.sleep(COMPUTE)
                    total = await job.group.all_reduce(np.ones(ELEMENTS), algorithm="exchange")
                    step.on_commit(lambda total=total: apply(total))
                self.committed[job.node].append(sim.now)
            except JobDone:
                break
            except (LocalError, Diverged):
                raise
            except QuicollError as error:
                self.failed.append(str(error))

    def run(self) -> None:
        outcome = self.sim.run()
        assert outcome.error is None
        others = [len([at for at in times if at > SECONDS / 2]) for times in list(self.committed.values())[1:]]
        assert min(others) == max(others) > 0.7 * SECONDS / 2 / (COMPUTE + 0.01), self.failed


def test_a_rank_that_lies_to_the_one_that_comes_back_does_not_keep_it_out() -> None:
    """Every payload between them has another bit: what it is told of states, the manifest, digests and chunks."""
    handovers = Handovers()
    handovers.sim.at(0.6).lie(0, 3)
    handovers.run()
    assert any(
        "told different things of their states: worker-3, or who sends to it" in said for said in handovers.failed
    )
    assert [node for node, _ in handovers.loaded] == ["worker-3"]
    assert [at for at in handovers.committed["worker-0"] if at > SECONDS / 2] == []


FORGED = (
    ("chunks", "as rank 0 sent it, fails its digest"),
    ("manifest", "rank 0 announces another state than the one that it and all other holders have told"),
    ("state", "the state of worker-0 after step"),
    ("version", "worker-0 says that it holds the state after decision"),
)


@pytest.mark.parametrize(("what", "said"), some(FORGED, 2, first=1))
def test_a_giver_that_forges_its_state_in_agreement_with_itself_is_refused_and_the_others_go_on(
    what: str, said: str
) -> None:
    """A process gone mad, or memory that changes what is read from it."""
    handovers = Handovers()
    handovers.sim.at(0.6).forge(0, what)
    handovers.run()
    assert any(said in each for each in handovers.failed)
    assert "worker-3" in [node for node, _ in handovers.loaded]
    for _, state in handovers.loaded:
        assert len(set(state["w"].tolist())) == 1  # a forged one has another bit in one number


@pytest.mark.slow
def test_a_member_that_joins_as_another_process_and_announces_what_is_to_come_harms_itself_alone() -> None:
    """Over real links: a second Join, of a process that is not at its end; then 8 MB for views that nobody proposed."""
    steps = Steps(3, reporter="worker-0")
    kept: list[int] = []
    work = steps.work

    async def mad(job: Job) -> None:
        if job.node == "worker-2":
            asyncio.get_running_loop().create_task(go_mad(job))
        await work(job)

    async def go_mad(job: Job) -> None:
        engine: Engine = job.internals.engine
        await asyncio.sleep(2.0)
        announce = encode_message(Announce(1 << 30, 0, 0, "s" * 4000))
        for identity, link in list(engine.endpoint.links.items()):
            if identity.role == COORDINATOR:
                assert identity.node == COORDINATOR_NODE
                link.send_app(m.encode(m.Join(incarnation=link.remote_incarnation + 9)))
            else:
                for _ in range(1000):
                    link.send_app(announce)

    async def watched(job: Job) -> None:
        task = asyncio.get_running_loop().create_task(mad(job))
        while not task.done():
            kept.append(job.internals.engine._views._early.size)
            await asyncio.wait({task}, timeout=0.1)
        await task

    steps.sim = Simulation(watched, seed=3, settings=Settings(ranks=3, hold_timeout=SECONDS, limit=4 * SECONDS))
    outcome = steps.sim.run()
    assert outcome.error is None
    assert max(kept) < 10_000
    assert outcome.views <= 4
    assert steps.committers(SECONDS - 2) == {"worker-0", "worker-1", "worker-2"}
    assert outcome.committed > 0.8 * SECONDS / (COMPUTE + 0.01)
