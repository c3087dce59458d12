"""An operator over real sockets: a job grows, shrinks below half at once, and who may ask is looked at."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import quicoll
from quicoll.errors import LocalError, PeerError
from quicoll.membership.operator_client import ask_for_ranks
from quicoll.membership.serving import serve
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
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
