"""An operator over real sockets: a job grows, shrinks below half at once, and who may ask is looked at."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import elastic_task
import numpy as np
import pytest

import quicoll
from quicoll import checkpoint
from quicoll.demo.timeline import EventReader
from quicoll.errors import LocalError, PeerError
from quicoll.launch.supervisor import RunExit, Supervisor
from quicoll.membership.operator_client import ask_for_ranks
from quicoll.membership.serving import serve
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.membership.operators import OperatorAnswer
    from quicoll.membership.service import CoordinatorService

pytestmark = pytest.mark.loopback


class Elastic:
    """A coordinator and ranks on this loop. Each takes steps until it is told to stop, or to leave."""

    def __init__(self, certs: Path, address: str) -> None:
        self.certs = certs
        self.address = address
        self.stops = False
        self.sums: dict[int, set[bytes]] = {}
        self.works = asyncio.Event()

    async def rank(self, number: int, world_size: int) -> str:
        settings = {"coordinator": self.address, "certs": str(self.certs), "listen": "127.0.0.1:0", "job": "elastic"}
        try:
            async with quicoll.join(**settings, node=f"worker-{number}", world_size=world_size) as job:
                held: dict[str, Any] = {"sum": np.zeros(3, np.float32)}
                job.register_state(lambda: held, lambda state: held.update(sum=state["sum"].copy()))
                while not self.stops:
                    await self.step(job, held)
        except quicoll.Dismissed as dismissal:
            return dismissal.message
        return "done"

    async def step(self, job: quicoll.Job, held: dict[str, Any]) -> None:
        try:
            async with job.step() as step:
                shards, number = job.group.shards(8), step.number
                leaves = [held["sum"] * np.float32(0.1) + np.float32(shard / 3) for shard in shards]
                total = await job.group.all_reduce(shards.leaves(leaves, like=held["sum"]))
                step.on_commit(lambda: held.update(sum=total))
                step.on_commit(lambda: self.sums.setdefault(number, set()).add(total.tobytes()))
                step.on_commit(self.works.set)
        except quicoll.StepAborted:
            pass

    async def ask(self, world_size: int, **more: Any) -> OperatorAnswer:
        return await ask_for_ranks(world_size, coordinator=self.address, certs=self.certs, **more)


async def within(asked: asyncio.Task[OperatorAnswer], ranks: list[asyncio.Task[str]]) -> OperatorAnswer:
    """Return the answer, or raise what a rank has failed with meanwhile."""
    while not asked.done():
        await asyncio.wait([asked, *(rank for rank in ranks if not rank.done())], return_when=asyncio.FIRST_COMPLETED)
        for rank in ranks:
            if rank.done():
                rank.result()
    return await asked


async def test_a_job_grows_and_shrinks_as_it_is_asked_to_and_nobody_else_may_ask(tmp_path: Path) -> None:
    create_authority(tmp_path, job="elastic")
    issue(tmp_path, role="coordinator", node="coordinator")
    issue(tmp_path, role="operator", node="operator")
    for number in range(3):
        issue(tmp_path, role="worker", node=f"worker-{number}")
    listening: asyncio.Future[CoordinatorService] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(
        serve(
            listen="127.0.0.1:0",
            job="elastic",
            certs=tmp_path,
            journal=tmp_path / "journal",
            world_size=2,
            max_world_size=3,
            ready=listening.set_result,
        )
    )
    elastic = Elastic(tmp_path, (await listening).address)
    ranks = [asyncio.create_task(elastic.rank(number, 2)) for number in range(2)]
    asked = asyncio.create_task(elastic.ask(3))
    await elastic.works.wait()
    ranks.append(asyncio.create_task(elastic.rank(2, 3)))  # to a job at work, another world size does not matter
    assert (await within(asked, ranks)).nodes == ("worker-0", "worker-1", "worker-2")
    with pytest.raises(LocalError, match="4 ranks are above --max-world-size 3"):
        await elastic.ask(4)
    assert (await within(asyncio.create_task(elastic.ask(1)), ranks)).nodes == ("worker-0",)
    assert await ranks[1] == "worker-1 leaves the job, which is to have 1 ranks"
    assert await ranks[2] == "worker-2 leaves the job, which is to have 1 ranks"
    for suffix in ("pem", "key"):  # a worker's certificate under an operator's name
        (tmp_path / f"operator-intruder.{suffix}").write_bytes((tmp_path / f"worker-worker-2.{suffix}").read_bytes())
        (tmp_path / f"operator-intruder.{suffix}").chmod(0o600)
    with pytest.raises((LocalError, PeerError)):
        await elastic.ask(3, node="intruder", timeout=2.0)
    elastic.stops = True
    assert await ranks[0] == "done"
    assert all(len(results) == 1 for results in elastic.sums.values())
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


class Led:
    """A `quicoll run` of processes that take a step when they are told to, and what its coordinator says of it."""

    def __init__(self, directory: Path, *, workers: int) -> None:
        self.certs, self.checkpoints, self._gate = directory / "certs", directory / "checkpoints", directory / "gate"
        self._gate.write_text("0")
        create_authority(self.certs, job="led")
        issue(self.certs, role="coordinator", node="coordinator")
        issue(self.certs, role="operator", node="operator")
        for number in range(16):  # one that was told to leave and has not ended yet is replaced by a new name
            issue(self.certs, role="worker", node=f"worker-{number}")
        self.lines: list[str] = []
        self.address = ""
        self.asked = 0
        self.here: dict[str, None] = {}
        self.worlds: dict[int, int] = {}  # by view
        self.steps: list[int] = []  # of how many ranks each committed step was
        self._events = EventReader(directory / "events")
        supervisor = Supervisor(
            [sys.executable, elastic_task.__file__, str(self._gate), str(self.checkpoints)],
            workers=workers,
            job="led",
            certs=self.certs,
            events=directory / "events",
            lost_after=10.0,
            most=16,
            output=lambda node, line: self.lines.append(f"{node}: {line}"),
        )
        self._running = asyncio.create_task(supervisor.run())

    async def until(self, so: Callable[[], bool]) -> None:
        while True:
            over = self._running.done()
            for moment in self._events.read():
                if moment.node == "coordinator":
                    self._take(moment.kind, moment.fields)
            if so():
                return
            assert not over, "\n".join(self.lines)
            await asyncio.wait([self._running], timeout=0.02)

    def _take(self, kind: str, fields: dict[str, Any]) -> None:
        match kind:
            case "listening":
                self.address = fields["address"]
            case "scale_asked":
                self.asked = fields["world_size"]
            case "node_joined":
                self.here[fields["peer"]] = None
            case "peer_lost":
                self.here.pop(fields["peer"], None)
            case "view_installed":
                self.worlds[fields["view"]] = fields["world_size"]
            case "step_committed":
                assert fields["step"] == len(self.steps) + 1
                self.steps.append(self.worlds[fields["view"]])

    async def take_a_step(self) -> None:
        number = len(self.steps) + 1
        self.open(number)
        await self.until(lambda: len(self.steps) >= number)

    def open(self, number: int) -> None:
        fresh = self._gate.with_suffix(".new")
        fresh.write_text(str(number))
        os.replace(fresh, self._gate)

    async def scale(self, world_size: int) -> None:
        """Ask for so many ranks by the command, and take steps until one was of them."""
        command = [sys.executable, "-m", "quicoll.cli.main", "scale", str(world_size)]
        command += ["--coordinator", self.address, "--certs", str(self.certs), "--json"]
        command += ["--no-wait"]  # it would have a deadline
        asking = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await asking.communicate()
        assert asking.returncode == 0
        assert [json.loads(line)["world_size"] for line in said.splitlines()] == [world_size]
        await self.until(lambda: self.asked == world_size)
        await self.until(lambda: len(self.here) >= world_size)
        while self.steps[-1] != world_size:
            await self.take_a_step()

    async def end(self) -> RunExit:
        self.open(elastic_task.STEPS)
        await self.until(lambda: len(self.steps) == elastic_task.STEPS)
        return await self._running


def whole_state(directory: Path) -> dict[str, bytes]:
    found = checkpoint.latest(directory)
    assert found is not None
    assert found.step == elastic_task.STEPS
    return {name: np.asarray(value).tobytes() for name, value in found.tensors.items()}


@pytest.mark.slow
async def test_a_run_of_four_three_eight_two_and_four_processes_has_the_bits_of_one_and_uses_each_sample_once(
    tmp_path: Path,
) -> None:
    """S2, S8, C1: with divided moments and a sampler, by `quicoll scale`; tests/sim/test_elastic.py has the same."""
    async with quicoll.testing.cluster(1) as (job, *_):
        await elastic_task.train(job, elastic_task.Elastic(), tmp_path / "alone")
    led = Led(tmp_path, workers=4)
    await led.until(lambda: bool(led.worlds))
    await led.take_a_step()
    for size in (3, 8, 2, 4):
        await led.scale(size)
    outcome = await led.end()
    assert (outcome.exit_status, outcome.reason) == (0, ""), "\n".join(led.lines)
    seen = iter(led.steps)
    assert all(size in seen for size in (4, 3, 8, 2, 4)), led.steps  # a larger one may come in two views
    said = [line for line in led.lines if "each sample once" in line]
    assert len(said) == 4
    assert all(line.endswith(f"step {elastic_task.STEPS}, each sample once in every epoch: True") for line in said)
    assert whole_state(led.checkpoints) == whole_state(tmp_path / "alone")
