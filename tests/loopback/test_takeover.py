"""Coordinators that take over from each other, as processes with a PostgreSQL server of the test's own.

One run for all: what starts is dear. A lease is short here, and no time is judged but by what follows from it.
"""

from __future__ import annotations

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


async def test_a_job_goes_on_whichever_way_its_leader_is_lost(postgresql: Server, tmp_path: Path) -> None:
    """Killed; cut off from the database; the database restarted under it; stopped in order."""
    with Proxy(postgresql.port) as proxy, Cluster(tmp_path, nodes=2, lost_after=1.0, lease=4.0) as cluster:
        cluster.start("a", postgresql.url)
        await cluster.until(lambda: "leads job" in cluster.said("a"), "a leads")
        cluster.start("b", postgresql.url_at(proxy.port))
        await cluster.until(lambda: "standing by" in cluster.said("b"), "b stands by")
        async with Ranks(cluster) as ranks:
            await ranks.goes_on()
            cluster.kill("a")
            await ranks.goes_on()

            cluster.start("a", postgresql.url)
            await cluster.until(lambda: cluster.said("a").count("standing by") >= 2, "a stands by")
            postgresql.stop()
            postgresql.start()
            await ranks.goes_on()

            proxy.cut()  # b's way to the database, whether it leads or not
            await ranks.goes_on()
            proxy.repair()

            await cluster.until(lambda: all(p.poll() is None for p in cluster.processes.values()), "both are there")
            cluster.processes["a"].terminate()
            await ranks.goes_on()
            assert cluster.processes["a"].wait(60) == 0
        ranks.check()
        written = commits(postgresql)
        assert [step for step, _ in written] == list(range(1, len(written) + 1))
        assert [token for _, token in written] == sorted(token for _, token in written)
        assert len(written) == ranks.step
        assert len({token for _, token in written}) >= 3
