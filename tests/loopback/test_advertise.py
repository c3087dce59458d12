"""Ranks that are reached at another address than they bind: behind a mapped port, all on loopback."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from forwarder import Forwarder
from ports import named_port

import quicoll
from quicoll import Event
from quicoll.membership.serving import serve
from quicoll_transport.security.authority import create_authority, issue


async def test_ranks_meet_at_their_mapped_ports_and_the_coordinator_at_its_own(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    create_authority(certs, job="alpha")
    issue(certs, role="coordinator", node="coordinator")
    for node in ("a", "b"):
        issue(certs, role="worker", node=node)
    listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    told: list[dict[str, Any]] = []

    def observe(event: Event) -> None:
        if event.kind == "listening":
            listening.set_result(int(event.fields["address"].rpartition(":")[2]))

    task = asyncio.create_task(
        serve(
            certs=certs, observer=observe, job="alpha", world_size=2, listen="127.0.0.1:0",
            journal=tmp_path / "journal.db",
        )
    )  # fmt: skip
    try:
        home = ("127.0.0.1", await listening)
        ports = [named_port(), named_port()]
        async with Forwarder(home) as gate, Forwarder(("127.0.0.1", ports[0])) as a, Forwarder() as b:
            b.target = ("127.0.0.1", ports[1])

            async def member(node: str, port: int, mapped: Forwarder) -> int:
                async with quicoll.join(
                    coordinator=f"127.0.0.1:{gate.port}",
                    certs=str(certs),
                    node=node,
                    job="alpha",
                    listen=f"127.0.0.1:{port}",
                    advertise=f"127.0.0.1:{mapped.port}",
                    join_timeout=100.0,
                    observer=lambda event: told.append(event.fields) if event.kind == "listening" else None,
                ) as job:
                    addresses = {member.node: member.addresses for member in job.view.members}
                    assert addresses[node] == (("127.0.0.1", mapped.port),)
                    return int((await job.group.all_reduce(np.ones(100_000)))[0])

            join = partial(asyncio.wait_for, timeout=100)
            sums = await join(asyncio.gather(member("a", ports[0], a), member("b", ports[1], b)))
            assert sums == [2, 2]
            assert gate.count > 4
            assert b.count > 4  # "a" dials "b", where "b" is told to be
            assert {(one["address"], one["advertised"]) for one in told} == {
                (f"127.0.0.1:{port}", f"127.0.0.1:{mapped.port}") for port, mapped in zip(ports, (a, b), strict=True)
            }
    finally:
        task.cancel()
        await asyncio.wait({task})
