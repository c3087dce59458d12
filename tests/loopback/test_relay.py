"""Ranks on real sockets that do not reach each other: met where they are seen, or through a relay."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import quicoll
from quicoll.errors import LocalError
from quicoll.membership.relay_service import serve_relay
from quicoll.membership.serving import serve
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
    from quicoll.membership.service import CoordinatorService
    from quicoll_transport.net.addresses import Address
    from quicoll_transport.net.runs import DatagramRun

NOWHERE = "127.0.0.2:0"  # what others are told in place of where a rank is: nothing listens there


class Walled(UdpSocket):
    """A rank's socket, from which nothing gets to another rank's: `open_to` has the ports that it gets to."""

    open_to: frozenset[int] | None = None

    def send(self, runs: Sequence[DatagramRun]) -> None:
        ports = type(self).open_to
        super().send([run for run in runs if ports is None or run.address[1] in ports])


def walled(addresses: Sequence[Address], *, loop: asyncio.AbstractEventLoop) -> Walled:
    ((host, port, *_),) = addresses
    return Walled(str(host), int(port), loop=loop)


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    create_authority(directory, job="alpha")
    issue(directory, role="coordinator", node="coordinator")
    issue(directory, role="relay", node="relay")
    for node in ("a", "b"):
        issue(directory, role="worker", node=node)
    return directory


@asynccontextmanager
async def coordinator(certs: Path, journal: Path, **options: Any) -> AsyncIterator[CoordinatorService]:
    ready: asyncio.Future[CoordinatorService] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        serve(
            certs=certs, job="alpha", world_size=2, listen="127.0.0.1:0", journal=journal, ready=ready.set_result,
            **options,
        )
    )  # fmt: skip
    try:
        yield await asyncio.wait_for(ready, 100)
    finally:
        task.cancel()
        await asyncio.wait({task})


async def sums(address: str, certs: Path, **options: Any) -> list[int]:
    async def member(node: str) -> int:
        async with quicoll.join(
            coordinator=address, certs=str(certs), node=node, job="alpha", join_timeout=100.0, **options
        ) as job:
            assert all(member.seen_at is not None for member in job.view.members)
            async with job.step():
                total = await job.group.all_reduce(np.arange(300_000))
            return int(total[-1])

    return list(await asyncio.wait_for(asyncio.gather(member("a"), member("b")), 200))


async def test_ranks_that_announce_what_leads_nowhere_meet_where_the_coordinator_sees_them(
    certs: Path, tmp_path: Path
) -> None:
    async with coordinator(certs, tmp_path / "journal", relay="none") as service:
        assert await sums(service.address, certs, advertise=NOWHERE, listen="127.0.0.1:0") == [2 * 299_999] * 2


@pytest.mark.interpreted  # the socket is one of the test's own, of the one that may be compiled
async def test_ranks_between_whom_nothing_passes_meet_through_the_coordinator(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quicoll.engine.start.bound_io", walled)
    async with coordinator(certs, tmp_path / "journal") as service:
        monkeypatch.setattr(Walled, "open_to", frozenset({service.endpoint.address[1]}))
        assert await sums(service.address, certs, advertise=NOWHERE, listen="127.0.0.1:0") == [2 * 299_999] * 2
        table = service.desk.table
        assert table.passed > 1000
        async with asyncio.timeout(100):
            while len(table):  # noqa: ASYNC110 - what is known of ranks goes with them, and nobody tells of it
                await asyncio.sleep(0.01)


@pytest.mark.interpreted  # the socket is one of the test's own, of the one that may be compiled
async def test_ranks_between_whom_nothing_passes_meet_through_a_relay_of_its_own(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quicoll.engine.start.bound_io", walled)
    relay = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; from quicoll.cli.main import main; sys.exit(main())",
        "relay", "--job", "alpha", "--certs", str(certs), "--listen", "127.0.0.1:0",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert relay.stdout is not None
        line = (await asyncio.wait_for(relay.stdout.readline(), 100)).decode()
        assert line.startswith("relay of job alpha, listening on 127.0.0.1:")
        port = int(line.rpartition(":")[2])
        async with coordinator(certs, tmp_path / "journal", relay=f"127.0.0.1:{port}") as service:
            monkeypatch.setattr(Walled, "open_to", frozenset({service.endpoint.address[1], port}))
            assert await sums(service.address, certs, advertise=NOWHERE, listen="127.0.0.1:0") == [2 * 299_999] * 2
            assert len(service.desk.table) == service.desk.table.passed == 0
    finally:
        relay.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(relay.wait(), 100) == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"certs": "elsewhere"}, "cannot be read"),
        ({"job": "beta"}, "the certificate is for job 'alpha'"),
        ({"rate": 0.0}, "megabytes a second"),
        ({"listen": "192.0.2.1:1"}, "192.0.2.1"),
    ],
)
async def test_a_relay_that_cannot_work_does_not_begin(certs: Path, wrong: dict[str, Any], says: str) -> None:
    settings = {"listen": "127.0.0.1:0", "job": "alpha", "certs": certs, "rate": 1.0} | wrong
    with pytest.raises(LocalError, match=says):
        await serve_relay(**settings, incarnation=1, ready=lambda address: None)
