"""A job whose hosts have two addresses, 127.0.0.1 and 127.0.0.2: one of the two paths is cut in an operation.

The cut is a rule on the sockets, which loses all that goes between two addresses of the first path.
"""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ports import named_port

import quicoll
from quicoll import Event
from quicoll.membership.serving import serve
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
    from quicoll_transport.faults.rules import Datagram, Delivery, Rng

FIRST, SECOND = "127.0.0.1", "127.0.0.2"
COUNT = 1 << 20  # numbers of 4 bytes


class CutFirst:
    """Loses what goes by the first path."""

    def __init__(self) -> None:
        self.lost = 0

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        if datagram.address[0] != FIRST:
            return None
        self.lost += 1
        return []


async def test_a_path_that_is_cut_in_the_middle_of_a_message_costs_neither_a_view_nor_a_bit(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    create_authority(certs, job="alpha")
    issue(certs, role="coordinator", node="coordinator")
    for node in ("a", "b"):
        issue(certs, role="worker", node=node)
    listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    views: list[Any] = []
    services: list[Any] = []
    changes: list[tuple[str, Any]] = []

    def observe(event: Event) -> None:
        if event.kind == "listening":
            listening.set_result(None)
        if event.kind == "view_installed":
            views.append(event.fields)

    port = named_port()
    both = f"{FIRST}:{port}+{SECOND}:{port}"
    task = asyncio.create_task(
        serve(
            certs=certs, observer=observe, job="alpha", world_size=2, listen=both, lost_after=10.0,
            journal=tmp_path / "journal.db", ready=services.append,
        )
    )  # fmt: skip
    cuts = [CutFirst() for _ in range(3)]

    async def member(node: str, cut: CutFirst) -> list[np.ndarray[Any, Any]]:
        async with quicoll.join(
            coordinator=both,
            certs=str(certs),
            node=node,
            job="alpha",
            listen=f"{FIRST}:0+{SECOND}:0",
            local=False,
            join_timeout=100.0,
            observer=lambda event: changes.append((node, event.fields)) if event.kind == "path_changed" else None,
        ) as job:
            (told,) = (member.addresses for member in job.view.members if member.node == node)
            assert [host for host, _ in told] == [FIRST, SECOND]
            x = np.arange(COUNT, dtype=np.float32) * (job.rank + 1)
            found = [await job.group.all_reduce(x)]
            handle = job.group.all_reduce(x)
            await asyncio.sleep(0.02)  # so that the path is cut in the middle of it
            await job._runtime.call(_add(job, cut))
            if node == "a":
                services[0].faults.add(cuts[2])
            found.append(await handle)
            async with job.step():
                found.append(await job.group.all_reduce(np.ones(7, np.float32)))
            await asyncio.sleep(11.0)  # longer than lost_after: whoever is taken for lost would be by now
            found.append(await job.group.all_reduce(x[:100]))
            return found

    try:
        await listening
        join = partial(asyncio.wait_for, timeout=100)
        results = await join(asyncio.gather(member("a", cuts[0]), member("b", cuts[1])))
    finally:
        task.cancel()
        await asyncio.wait({task})
    expected = np.arange(COUNT, dtype=np.float32) * 3
    for first, cut_through, small, last in results:
        assert np.array_equal(first, expected)
        assert np.array_equal(cut_through, expected)
        assert np.array_equal(small, np.full(7, 2, np.float32))
        assert np.array_equal(last, expected[:100])
    assert len(views) == 1
    assert {(node, told["peer"]) for node, told in changes} >= {("a", "b"), ("b", "a"), ("a", "coordinator")}
    assert all(told["address"].startswith(SECOND) and told["before"].startswith(FIRST) for _, told in changes)
    assert all(cut.lost for cut in cuts)


async def _add(job: Any, cut: CutFirst) -> None:
    job._engine.faults.add(cut)
