"""Looking at jobs over real sockets: one that runs, a worker of it stopped and killed; what cannot be seen, and why."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from quicoll import join
from quicoll.cli.status_words import picture_of
from quicoll.errors import LocalError, PeerError
from quicoll.launch.supervisor import Supervisor
from quicoll.membership.service import CoordinatorService, coordinator_config
from quicoll.membership.serving import serve
from quicoll.membership.status import condition_of
from quicoll.membership.status_client import JobWatch
from quicoll.observability.events import Observers
from quicoll_transport.endpoint import EndpointConfig
from quicoll_transport.net.udp import UdpSocket
from quicoll_transport.security.access import Access
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from quicoll.membership.status import JobStatus
    from quicoll.membership.status_client import Glance

pytestmark = pytest.mark.loopback

COMMAND = [sys.executable, "-m", "quicoll.cli.main"]

STEPS = """
import asyncio
import os
import numpy as np
import quicoll

async def main():
    if os.environ["QUICOLL_RESTARTS"] != "0":
        await asyncio.sleep(100_000)  # it was killed, and is to stay away
    async with quicoll.join() as job:
        held = {"sum": np.zeros(2, np.float32)}
        job.register_state(lambda: held, held.update)
        while True:
            try:
                async with job.step() as step:
                    total = await job.group.all_reduce(np.ones(2, np.float32))
                    step.on_commit(lambda: held.update(sum=total))
            except quicoll.StepAborted:
                continue
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


async def command(*arguments: object, status: int) -> tuple[str, str]:
    """What the command writes to stdout and to stderr; it ends with this status."""
    process = await asyncio.create_subprocess_exec(*COMMAND, *map(str, arguments), stdout=PIPE, stderr=PIPE)
    out, err = (part.decode() for part in await process.communicate())
    assert process.returncode == status, out + err
    return out, err


def certificates(directory: Path, *, job: str = "seen") -> Path:
    create_authority(directory, job=job)
    for role in ("coordinator", "reader", "operator", "worker"):
        issue(directory, role=role, node=role)
    return directory


async def started(certs: Path, **settings: Any) -> tuple[CoordinatorService, asyncio.Task[None]]:
    ready: asyncio.Future[CoordinatorService] = asyncio.get_running_loop().create_future()
    options = {"job": "seen", "listen": "127.0.0.1:0", "journal": certs / "journal.db", "world_size": 2, **settings}
    task = asyncio.create_task(serve(certs=certs, ready=ready.set_result, **options))
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    return ready.result(), task


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[tuple[str, Path]]:
    """One without workers: its address, and its certificates."""
    service, task = await started(certificates(tmp_path / "certs"))
    yield service.address, tmp_path / "certs"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_run_whose_worker_is_stopped_and_killed_is_seen_as_such(tmp_path: Path) -> None:
    """Waits for what the status says, however long that takes."""
    script, certs = tmp_path / "steps.py", tmp_path / "certs"
    script.write_text(STEPS)
    create_authority(certs, job="seen")
    for role, node in (("coordinator", "coordinator"), ("reader", "reader")):
        issue(certs, role=role, node=node)
    for number in range(3):
        issue(certs, role="worker", node=f"worker-{number}")
    lines: list[str] = []
    supervisor = Supervisor(
        [sys.executable, str(script)],
        workers=3,
        job="seen",
        certs=certs,
        events=tmp_path / "events",
        lost_after=100.0,
        output=lambda node, line: lines.append(f"{node}: {line}"),
    )
    running = asyncio.create_task(supervisor.run())
    address = await listening(tmp_path / "events", running, lines)
    async with JobWatch(address, certs) as watch:

        async def until(so: Callable[[JobStatus], object]) -> JobStatus:
            while True:
                assert not running.done(), "\n".join(lines)
                glance = await watch.look(timeout=60.0, links=True)
                if glance.status is not None and so(glance.status):
                    return glance.status
                await asyncio.sleep(0.1)

        status = await until(lambda status: status.committed_step > 2)
        assert status.world_size == len(status.members) == 3
        assert all(each.rtt_ns is not None and each.address for each in status.members)
        where = ("--coordinator", address, "--certs", certs, "--timeout", 60)
        await until(lambda status: all(each.links is not None for each in status.members))
        (line,) = (await command("top", *where, "--once", "--json", status=0))[0].splitlines()
        check_links(json.loads(line)["links"])
        check_links(json.loads((await command("status", *where, "--json", status=0))[0])["links"])
        table, _ = await command("top", *where, "--once", status=0)
        head = next(at for at, said in enumerate(table.splitlines()) if said.split()[:2] == ["FROM", "TO"])
        assert all(said.split()[0].startswith("worker-") for said in table.splitlines()[head + 1 : head + 7])
        table, _ = await command("top", *where, "--once", "--links", "none", status=0)
        assert "FROM" not in table
        stopped = supervisor.pid("worker-2")
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        # Far from lost: a step is open that used to take a tenth of a second, and nobody can commit it.
        status = await until(lambda status: status.open_ns > 3 * 10**9)
        assert condition_of(status, patience_ns=10**9) == "stalled"
        assert states(status)["worker-2"] in ("outside", "computing")
        said, _ = await command("status", *where, "--stalled-after", 1, status=1)
        assert said.startswith(f"job seen: stalled: step {status.open_step} has been open for ")
        os.kill(stopped, signal.SIGCONT)
        step = status.open_step
        await until(lambda status: status.committed_step > step)
        os.kill(stopped, signal.SIGKILL)
        status = await until(lambda status: states(status).get("worker-2") == "lost")
        (lost,) = (each for each in status.members if each.node == "worker-2")
        assert lost.why
        assert any(each.kind == "peer_lost" and "worker-2" in each.said for each in status.events)
    supervisor.stop()
    await running


def check_links(links: list[dict[str, Any]]) -> None:
    """All links of three ranks that add up a few numbers, each seen from both ends."""
    ends = [(each["rank"], each["peer_rank"]) for each in links]
    assert sorted(ends) == [(rank, peer) for rank in range(3) for peer in range(3) if rank != peer]
    for each in links:
        assert (each["node"], each["peer"]) == (f"worker-{each['rank']}", f"worker-{each['peer_rank']}")
        assert each["rtt_s"] > 0
        assert each["window_s"] > 1
        assert each["ago_s"] >= 0
        assert each["sent_rate"] >= 0
        assert each["received_rate"] >= 0
        assert each["sent_packets"] >= each["lost_packets"]
        assert each["carrier"] in ("memory", "link")


def states(status: JobStatus) -> dict[str, str]:
    return {each.node: each.state for each in status.members}


async def listening(events: Path, running: asyncio.Task[Any], lines: list[str]) -> str:
    """The coordinator's address, as its events have it."""
    report = events / "coordinator.jsonl"
    while True:
        for line in report.read_text().splitlines() if report.exists() else ():
            if '"listening"' in line:
                return str(json.loads(line)["address"])
        assert not running.done(), "\n".join(lines)
        await asyncio.sleep(0.05)


async def come_and_leave(watch: JobWatch, address: str, certs: Path) -> None:
    """Have one of two nodes join until it gives up, so that the coordinator knows of it."""
    while (status := (await watch.look(timeout=60.0)).status) is None or "gone" not in states(status).values():
        with pytest.raises(PeerError, match="not joined within 1 s"):
            async with join(coordinator=address, certs=str(certs), job="seen", node="worker", join_timeout=1.0):
                raise AssertionError("there are not two")


async def test_a_job_that_nobody_has_joined_yet_is_forming_and_one_that_somebody_has_left_is_held(
    coordinator: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, certs = coordinator
    monkeypatch.setattr("quicoll.membership.status._GATHER_NS", 10**15)  # however long this test takes
    async with JobWatch(address, certs) as watch:
        picture = picture_of(await watch.look(timeout=60.0), patience_ns=None)
        assert picture.sentence == "job seen: forming: 0 of 2 nodes are here"
        assert picture.exit_status == 0
        await come_and_leave(watch, address, certs)
        assert picture_of(await watch.look(timeout=60.0), patience_ns=None).condition == "held"


async def test_a_job_that_can_have_no_view_is_held_in_a_sentence_in_json_and_in_a_table(
    coordinator: tuple[str, Path],
) -> None:
    address, certs = coordinator
    async with JobWatch(address, certs) as watch:
        await come_and_leave(watch, address, certs)
    where = ("--coordinator", address, "--certs", certs, "--timeout", 60)
    said, _ = await command("status", *where, status=1)
    assert said.startswith("job seen: held for ")
    assert said.endswith("0 of 2 nodes are here\n")
    facts = json.loads((await command("status", *where, "--json", status=1))[0])
    assert (facts["job"], facts["condition"], facts["coordinator"]) == ("seen", "held", address)
    assert [each["state"] for each in facts["status"]["members"]] == ["gone"]
    table, _ = await command("top", *where, status=1)  # no terminal: once
    assert table.splitlines()[0].startswith(" HELD  job seen: for ")
    assert "\x1b" not in table
    (line,) = (await command("top", *where, "--json", "--once", status=1))[0].splitlines()
    assert json.loads(line)["condition"] == "held"


async def test_an_operators_certificate_may_look_too_and_two_who_look_with_one_see_both(
    coordinator: tuple[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    address, certs = coordinator
    async with (
        JobWatch(address, certs, named="operator/operator") as operator,
        JobWatch(address, certs) as one,
        JobWatch(address, certs) as other,
    ):
        for _ in range(3):  # each ends the other's link
            for watch in (operator, one, other):
                glance = await watch.look(timeout=60.0)
                assert glance.status is not None, glance.trouble
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []  # nobody left behind


async def test_who_cannot_look_hears_why(coordinator: tuple[str, Path], tmp_path: Path) -> None:
    address, certs = coordinator
    with pytest.raises(LocalError, match="'worker/worker' cannot look at a job"):
        JobWatch(address, certs, named="worker/worker")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LocalError, match=r"quicoll certs issue .* --role reader --node reader"):
        JobWatch(address, tmp_path / "empty")
    _, said = await command("status", "--coordinator", address, "--certs", certs, "--as", "reader/nobody", status=2)
    assert "reader-nobody.pem: cannot be read" in said
    strangers = certificates(tmp_path / "strangers")
    _, said = await command("status", "--coordinator", address, "--certs", strangers, "--timeout", 3, status=2)
    assert said.startswith(f"quicoll: job seen: nothing is known of it: the coordinator at {address} gives no answer")
    assert len(said.splitlines()) == 1


async def test_a_coordinator_that_is_not_there_is_said_so_and_one_that_comes_later_is_seen(tmp_path: Path) -> None:
    certs = certificates(tmp_path / "certs")
    service, task = await started(certs)
    address = service.address
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    async with JobWatch(address, certs) as watch:
        glance = await watch.look(timeout=0.5)
        assert glance.status is None
        assert address in glance.trouble
        looking = asyncio.create_task(watch.look(timeout=60.0))
        service, task = await started(certs, listen=address)
        assert (await looking).status is not None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_of_several_coordinators_the_one_that_leads_is_seen_and_a_follower_says_who_that_is(
    tmp_path: Path,
) -> None:
    certs = certificates(tmp_path / "certs")
    leader, leading = await started(certs)
    loop = asyncio.get_running_loop()
    follower = CoordinatorService(
        credentials=Access.read(certs, role="coordinator", node="coordinator").credentials,
        io=UdpSocket("127.0.0.1", 0, loop=loop),
        journal=None,
        config=coordinator_config(2, 2.0, None),
        transport=EndpointConfig(),
        loop=loop,
        incarnation=1,
        observers=Observers("coordinator", lambda: 0),
    )
    follower.stand_by(leader.address)
    try:
        async with JobWatch(f"{follower.address},{leader.address}", certs) as watch:
            glance: Glance = await watch.look(timeout=60.0)
            assert (glance.coordinator, glance.trouble) == (leader.address, "")
        async with JobWatch(follower.address, certs) as watch:
            glance = await watch.look(timeout=3.0)
            assert glance.status is None
            assert glance.trouble == f"the coordinator at {follower.address} stands by: {leader.address} leads"
    finally:
        await follower.aclose()
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
