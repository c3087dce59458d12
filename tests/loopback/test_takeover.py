"""Coordinators that take over from each other, as processes with a PostgreSQL server of the test's own.

One run for all: what starts is dear. A lease is short here, and no time is judged but by what follows from it.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from postgresql_server import Proxy
from takeover import JOB, Cluster, Ranks

from quicoll.membership.coordinator.history import Committed
from quicoll.membership.postgresql.records import row_record

if TYPE_CHECKING:
    from postgresql_server import Server


def commits(server: Server) -> list[tuple[int, int]]:
    """Return (step, token) of all commits in the journal, in their order."""
    rows = server.execute("SELECT kind, body, token FROM quicoll.records WHERE job = $1::text ORDER BY number", JOB)
    found = []
    for kind, body, token in rows:
        assert isinstance(body, bytes)
        assert isinstance(token, int)
        record = row_record(str(kind), body)
        if isinstance(record, Committed):
            found.append((record.step, token))
    return found


async def looked_at(cluster: Cluster, first: str) -> None:
    """Whoever is asked first: the one that leads answers, by the token of its lease."""
    name, status = await cluster.look(first)
    assert f"lease with token {status.token}\n" in cluster.said(name)
    assert status.committed_step > 0


async def test_a_job_goes_on_whichever_way_its_leader_is_lost(postgresql: Server, tmp_path: Path) -> None:
    """Killed; the database restarted under it; cut off from the database; stopped in order.

    Who is cut off stands by again, in its own process, and is the one that leads when the other is stopped.
    """
    with ExitStack() as stack:
        proxies = {name: stack.enter_context(Proxy(postgresql.port)) for name in "ab"}
        cluster = stack.enter_context(Cluster(tmp_path, nodes=2, lost_after=1.0, lease=2.0))
        for name, proxy in proxies.items():
            cluster.start(name, postgresql.url_at(proxy.port))
        async with Ranks(cluster) as ranks:
            await ranks.goes_on()

            killed = cluster.leader()
            asked = asyncio.create_task(cluster.ask_for_ranks())  # of whom is lost before it answers, or just after
            cluster.kill(killed)
            await ranks.goes_on()
            assert cluster.leader() != killed
            assert (await asked).world_size == 2
            assert (await cluster.ask_for_ranks(first=killed)).nodes == (
                "worker-0",
                "worker-1",
            )  # nothing answers there
            await looked_at(cluster, killed)

            cluster.start(killed, postgresql.url_at(proxies[killed].port))
            postgresql.stop()
            postgresql.start()
            await ranks.goes_on()
            await cluster.until(lambda: cluster.said(killed).count("standing by") >= 2, f"{killed} stands by")
            standby = next(name for name in proxies if name != cluster.leader())
            assert (await cluster.ask_for_ranks(first=standby)).refusal == ""
            await looked_at(cluster, standby)

            cut = cluster.leader()
            was = cluster.processes[cut]
            proxies[cut].cut()
            await cluster.until(lambda: cluster.leader() != cut, "another leads")
            await ranks.goes_on()
            await cluster.until(lambda: "\nstands by again: " in cluster.said(cut), f"{cut} stands by again")
            proxies[cut].repair()

            stopped = cluster.leader()
            cluster.processes[stopped].terminate()
            await cluster.until(lambda: cluster.leader() == cut, f"{cut} leads again")
            await ranks.goes_on()
            assert cluster.processes[stopped].wait(60) == 0
            assert was is cluster.processes[cut]
            assert was.poll() is None
        ranks.check()
        written = commits(postgresql)
        assert [step for step, _ in written] == list(range(1, len(written) + 1))
        assert [token for _, token in written] == sorted(token for _, token in written)
        assert len(written) == ranks.step
        assert len({token for _, token in written}) >= 4
