"""What an operator does to a running job: rotates and denies certificates, looks at links, traces and events."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import quicoll
from quicoll import Event, LocalError, PeerError, StepAborted, Terminated
from quicoll.membership.serving import serve
from quicoll.observability.transport import TRANSPORT_KINDS
from quicoll.testing import cluster
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.credentials import Credentials, node_files

if TYPE_CHECKING:
    from quicoll.membership.service import CoordinatorService

ROLES = {"coordinator": "coordinator", "a": "worker", "b": "worker", "c": "worker"}


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    directory = tmp_path / "certs"
    create_authority(directory, job="alpha")
    for node, role in ROLES.items():
        issue(directory, role=role, node=node)
    return directory


def reissue(certs: Path, node: str) -> str:
    """Another certificate for a node, in the place of its first; its fingerprint."""
    for file in node_files(certs, role=ROLES[node], node=node):
        file.unlink()
    return issue(certs, role=ROLES[node], node=node).fingerprint


def fingerprint(certs: Path, node: str) -> str:
    return Credentials.from_directory(certs, role=ROLES[node], node=node).fingerprint


class Seen:
    """The events of everybody, and a wait for one."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._more.set)

    def of(self, kind: str, **fields: Any) -> list[Event]:
        return [each for each in self.events if each.kind == kind and fields.items() <= each.fields.items()]

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(100):
            while not condition():
                self._more.clear()
                await self._more.wait()


@asynccontextmanager
async def coordinator(certs: Path, **settings: Any) -> AsyncIterator[CoordinatorService]:
    ready: asyncio.Future[CoordinatorService] = asyncio.get_running_loop().create_future()
    options = {"job": "alpha", "listen": "127.0.0.1:0", "journal": certs.parent / "journal.db", **settings}
    task = asyncio.create_task(serve(certs=certs, ready=ready.set_result, **options))
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield ready.result()
    finally:
        task.cancel()
        await asyncio.wait({task})


def joining(service: CoordinatorService, certs: Path, node: str, **settings: Any) -> Any:
    options = {"certs": str(certs), "job": "alpha", "listen": "127.0.0.1:0", "join_timeout": 100.0, **settings}
    return quicoll.join(coordinator=service.address, node=node, **options)


async def commit(jobs: list[quicoll.Job]) -> None:
    """One step on all ranks, tried again while the view changes."""

    async def one(job: quicoll.Job) -> None:
        while True:
            try:
                async with job.step():
                    await job.group.barrier()
                return
            except StepAborted:
                continue

    await asyncio.gather(*map(one, jobs))


async def test_a_rotated_certificate_is_what_new_connections_show_and_living_links_go_on(certs: Path) -> None:
    seen = Seen()
    denied = certs.parent / "denied"
    denied.touch()
    async with coordinator(certs, world_size=2, observer=seen, deny=denied) as service, AsyncExitStack() as stack:
        jobs = await asyncio.gather(
            *(stack.enter_async_context(joining(service, certs, node, observer=seen)) for node in ("a", "b"))
        )
        first = fingerprint(certs, "a")
        second = reissue(certs, "a")
        assert await jobs[0].rotate_certificates() == second != first
        assert seen.of("certificates_rotated", fingerprint=second)
        await commit(jobs)
        assert not seen.of("peer_lost")
        # Its link was made with the first certificate and ends with it; the one that follows shows the second.
        denied.write_text(first)
        service.reload()
        await seen.until(lambda: len(seen.of("node_joined", peer="a")) == 2)
        await commit(jobs)


async def test_a_certificate_that_the_coordinator_denies_leaves_the_job_and_does_not_come_back(certs: Path) -> None:
    seen = Seen()
    denied = certs.parent / "denied"
    denied.write_text("# nobody yet\n")
    async with coordinator(certs, world_size=3, observer=seen, deny=denied) as service, AsyncExitStack() as stack:
        jobs = await asyncio.gather(
            *(stack.enter_async_context(joining(service, certs, node, hold_timeout=100.0)) for node in ("a", "b")),
            stack.enter_async_context(joining(service, certs, "c", hold_timeout=0.5)),
        )
        denied.write_text(f"{fingerprint(certs, 'c')}  # stolen\n")
        service.reload()
        assert seen.of("certificate_denied", fingerprint=fingerprint(certs, "c"))
        await seen.until(lambda: seen.of("peer_lost", peer="c"))
        await commit(jobs[:2])
        assert sorted(jobs[0].view.nodes) == ["a", "b"]
        with pytest.raises(PeerError, match=r"not joined within 0\.5 s: cannot reach the coordinator"):
            await joining(service, certs, "c", join_timeout=0.5).__aenter__()
        reissue(certs, "c")  # the node is welcome with another certificate
        async with joining(service, certs, "c") as again:
            assert sorted(again.view.nodes) == ["a", "b", "c"]


async def test_a_rank_that_denies_a_certificate_ends_its_link_and_refuses_it(certs: Path) -> None:
    seen = Seen()
    async with coordinator(certs, world_size=2) as service, AsyncExitStack() as stack:
        a, _ = await asyncio.gather(
            stack.enter_async_context(joining(service, certs, "a", observer=seen)),
            stack.enter_async_context(joining(service, certs, "b")),
        )
        await a.deny(fingerprint(certs, "b").upper())
        assert seen.of("certificate_denied", fingerprint=fingerprint(certs, "b"))
        assert [each.fields["cause"] for each in seen.of("peer_lost", peer="b")] == ["its certificate is denied"]
        assert "worker/b" not in [each.peer for each in await a.links()]
        with pytest.raises(LocalError, match="a fingerprint is SHA-256"):
            await a.deny("worker-b")


async def test_files_that_cannot_be_used_change_nothing(certs: Path) -> None:
    denied = certs.parent / "denied"
    denied.write_text("")
    async with coordinator(certs, world_size=1, deny=denied) as service:
        async with joining(service, certs, "a", deny=str(denied)) as job:
            denied.write_text("worker-b\n")
            with pytest.raises(LocalError, match="denied, line 1: a fingerprint is SHA-256"):
                await job.rotate_certificates()
            with pytest.raises(LocalError, match="denied, line 1: a fingerprint is SHA-256"):
                service.reload()
            await commit([job])
        with pytest.raises(LocalError, match="denied, line 1"):
            await joining(service, certs, "b", deny=str(denied)).__aenter__()
        (certs.parent / "file").touch()
        with pytest.raises(LocalError, match="cannot write qlog to"):
            await joining(service, certs, "b", qlog=str(certs.parent / "file")).__aenter__()


async def test_links_have_round_trips_and_bytes_of_each_peer_and_the_coordinator() -> None:
    async with cluster(3) as jobs:
        await asyncio.gather(*(job.group.all_reduce(np.ones(1000)) for job in jobs))
        links = await jobs[0].links()
        assert [link.peer for link in links] == ["coordinator/coordinator", "worker/worker-1", "worker/worker-2"]
        assert all(link.path_rtt_ns is not None and link.path_rtt_ns > 0 for link in links)
        assert all(link.bytes_sent > 0 and link.bytes_received > 0 for link in links[1:])


async def test_the_transports_events_and_qlog_traces_come_on_request(tmp_path: Path) -> None:
    seen = Seen()
    async with cluster(2, observer=seen, transport_events=True, qlog=str(tmp_path / "qlog")):
        assert {"link_changed", "dial_started", "connection_up"} <= {event.kind for event in seen.events}
        assert {each.fields["peer"] for each in seen.of("connection_up")} == {"coordinator", "worker-0", "worker-1"}
    traces = sorted((tmp_path / "qlog").glob("worker-*.qlog"))
    assert len(traces) >= 3  # of both ranks: to the coordinator each, and one pair
    assert all(json.loads(each.read_text())["traces"] for each in traces)
    async with cluster(2, observer=(quiet := Seen())):
        pass
    assert not {event.kind for event in quiet.events} & set(TRANSPORT_KINDS.values())


async def test_a_running_coordinator_reads_its_files_anew_on_sighup_and_has_the_options(certs: Path) -> None:
    here = certs.parent
    denied = here / "denied"
    denied.write_text("")
    command = [sys.executable, "-m", "quicoll.cli.main", "coordinator", "--job", "alpha", "--certs", certs]
    command += ["--journal", here / "j.db", "--world-size", "1", "--listen", "127.0.0.1:0", "--deny", denied]
    command += ["--events", here, "--transport-events", "--qlog", here / "qlog"]
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=PIPE, stderr=PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        address = (await process.stdout.readline()).decode().split()[-1]
        old = here / "old"
        old.write_text(fingerprint(certs, "coordinator"))
        reissue(certs, "coordinator")
        process.send_signal(signal.SIGHUP)
        assert await process.stdout.readline() == b"certificates and deny list are read anew\n"
        settings = {"coordinator": address, "job": "alpha", "certs": str(certs), "listen": "127.0.0.1:0"}
        async with quicoll.join(node="a", deny=str(old), **settings) as job:  # it would refuse the old certificate
            denied.write_text("no fingerprint\n")
            process.send_signal(signal.SIGHUP)
            assert (await process.stderr.readline()).startswith(b"quicoll: nothing is changed by SIGHUP: ")
            await commit([job])
    finally:
        process.terminate()
        await process.communicate()
    assert process.returncode == 0
    kinds = [json.loads(line)["kind"] for line in (here / "coordinator.jsonl").read_text().splitlines()]
    assert kinds.count("certificates_rotated") == 1
    assert "connection_up" in kinds
    assert list((here / "qlog").glob("coordinator-*.qlog"))


async def test_a_rank_that_does_not_set_lost_after_takes_the_coordinators_for_every_link(certs: Path) -> None:
    seen = Seen()
    async with coordinator(certs, world_size=2, lost_after=7.5, observer=seen) as service, AsyncExitStack() as stack:
        jobs = await asyncio.gather(
            stack.enter_async_context(joining(service, certs, "a", observer=seen)),
            stack.enter_async_context(joining(service, certs, "b", observer=seen, lost_after=7.5)),
        )
        await commit(jobs)
        assert [job.config.lost_after for job in jobs] == [7.5, 7.5]
        assert [job.config.sources["lost_after"] for job in jobs] == ["coordinator", "argument"]
        for job in jobs:
            assert [link.lost_after_ns for link in await job.links()] == [7_500_000_000] * 2
        assert not seen.of("peer_lost")  # that a link is made anew for it is no loss
        assert len(seen.of("node_joined")) == 2


async def test_a_rank_that_sets_another_lost_after_is_refused_with_both_values(certs: Path) -> None:
    async with coordinator(certs, world_size=1, lost_after=1.0) as service:
        with pytest.raises(PeerError, match="the coordinator's lost_after is 1 s, this node's 10 s"):
            await joining(service, certs, "a", lost_after=10.0).__aenter__()


async def test_a_rank_that_asks_for_another_seed_is_refused_with_both_values(certs: Path) -> None:
    async with coordinator(certs, world_size=1, seed=7) as service:
        with pytest.raises(PeerError, match="the job's seed is 7, this node's 8"):
            await joining(service, certs, "a", seed=8).__aenter__()
        async with joining(service, certs, "a", seed=7) as job:
            assert job.view.seed == 7


async def test_members_hear_that_their_coordinator_was_stopped(certs: Path) -> None:
    seen = Seen()
    async with AsyncExitStack() as stack:
        async with coordinator(certs, world_size=1) as service:
            await stack.enter_async_context(joining(service, certs, "a", observer=seen))
        await seen.until(
            lambda: any("closed by the peer (stopped)" in each.fields["cause"] for each in seen.of("held"))
        )


async def test_a_rank_that_is_asked_to_stop_leaves_as_one_that_is_done_and_the_others_go_on(certs: Path) -> None:
    seen = Seen()
    async with coordinator(certs, world_size=3, observer=seen) as service, AsyncExitStack() as stack:
        leaving = joining(service, certs, "c")
        a, b, c = await asyncio.gather(
            *(stack.enter_async_context(joining(service, certs, node)) for node in ("a", "b")),
            leaving.__aenter__(),
        )
        await commit([a, b, c])
        c.stop()
        assert c.stopping
        with pytest.raises(Terminated) as ended:
            async with c.step():
                pytest.fail("the step was entered")
        assert not await leaving.__aexit__(Terminated, ended.value, ended.value.__traceback__)
        # A step that the others enter before they have heard of the next view is one of this view, and ends with it.
        await seen.until(lambda: seen.of("view_installed", view=2))
        await commit([a, b])
        assert [event.fields["cause"] for event in seen.of("peer_lost")] == ["c left the job: terminated"]
        assert not seen.of("step_aborted")


async def test_a_rank_that_is_asked_to_stop_does_not_wait_for_ranks_that_are_not_ready(certs: Path) -> None:
    """In a blocking call, whose thread can do nothing meanwhile."""
    inside: asyncio.Future[quicoll.blocking.Job] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def stopped(service: CoordinatorService) -> None:
        settings = {"job": "alpha", "certs": str(certs), "listen": "127.0.0.1:0", "stop_timeout": 0.1}
        with quicoll.blocking.join(coordinator=service.address, node="a", **settings) as job:
            with pytest.raises(StepAborted, match="terminated"):
                waiting(job)
            with pytest.raises(Terminated):
                job.step().__enter__()

    def waiting(job: quicoll.blocking.Job) -> None:
        with job.step():
            loop.call_soon_threadsafe(inside.set_result, job)
            job.group.barrier()

    async def computing(job: quicoll.Job) -> None:
        async with job.step():
            (await inside).stop()
            await blocking
            await job.group.barrier()

    async with coordinator(certs, world_size=2) as service:
        blocking = asyncio.create_task(asyncio.to_thread(stopped, service))
        async with joining(service, certs, "b") as other:
            with pytest.raises(StepAborted, match="terminated"):
                await computing(other)


async def test_sigterm_ends_the_wait_for_the_first_view_where_it_is_handled_and_the_node_leaves(certs: Path) -> None:
    seen = Seen()
    async with coordinator(certs, world_size=2, observer=seen) as service:
        waiting = asyncio.create_task(outcome(joining(service, certs, "a", handle_sigterm=True)))
        await seen.until(lambda: seen.of("node_joined", peer="a"))
        os.kill(os.getpid(), signal.SIGTERM)
        assert await waiting == "terminated"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        await seen.until(lambda: seen.of("peer_lost", peer="a", left=True))


async def outcome(entering: Any) -> str:
    """How it ended. A SystemExit that leaves a task would end the whole loop."""
    try:
        await entering.__aenter__()
    except Terminated:
        return "terminated"
    return "joined"
