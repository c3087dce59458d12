"""Who gets in and who does not, with certificates in files and everything a user meets first. REQUIREMENTS C2, S8."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import quicoll
from quicoll import Event, LocalError, PeerError, StepAborted
from quicoll.errors import JournalError
from quicoll.membership.serving import serve
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
    from quicoll.config import JoinSettings


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    create_authority(directory, job="alpha")
    issue(directory, role="coordinator", node="coordinator")
    for node in ("a", "b"):
        issue(directory, role="worker", node=node)
    return directory


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same names of the same job, by another authority."""
    directory = tmp_path_factory.mktemp("foreign")
    create_authority(directory, job="alpha")
    issue(directory, role="coordinator", node="coordinator")
    issue(directory, role="worker", node="a")
    return directory


@asynccontextmanager
async def coordinator(certs: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[str]:
    """A coordinator, on a free port where `listen` does not say; its address."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def observe(event: Event) -> None:
        if event.kind == "listening" and not address.done():
            address.set_result(event.fields["address"])

    options = {"job": "alpha", "world_size": 1, "journal": tmp_path / "journal.db", "listen": "127.0.0.1:0", **settings}
    task = asyncio.create_task(serve(certs=certs, observer=observe, **options))
    done, _ = await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
    if task in done:
        task.result()
    try:
        yield await address
    finally:
        task.cancel()
        await asyncio.wait({task})


async def joined(address: str, certs: Path, node: str = "a", **settings: Any) -> int:
    options = {"job": "alpha", "listen": "127.0.0.1:0", "join_timeout": 100.0, **settings}
    async with quicoll.join(coordinator=address, certs=str(certs), node=node, **options) as job:
        return int((await job.group.all_reduce(np.ones(1)))[0])


async def test_ranks_with_certificates_of_the_job_join_and_work(certs: Path, tmp_path: Path) -> None:
    async with coordinator(certs, tmp_path, world_size=2) as address:
        assert await asyncio.gather(joined(address, certs, "a"), joined(address, certs, "b")) == [2, 2]


async def test_a_job_goes_on_from_its_journal_when_the_coordinator_is_started_again(
    certs: Path, tmp_path: Path
) -> None:
    async def steps(address: str, count: int) -> tuple[int, int]:
        async with quicoll.join(
            coordinator=address, certs=str(certs), node="a", job="alpha", listen="127.0.0.1:0"
        ) as job:
            for _ in range(count):
                async with job.step():
                    await job.group.barrier()
            return job.view.view_id, int(job.seed)

    async with coordinator(certs, tmp_path) as address:
        first = await steps(address, 3)
    async with coordinator(certs, tmp_path) as address:
        second = await steps(address, 2)
    assert second[0] > first[0]
    assert second[1] == first[1]


async def test_a_foreign_authority_is_refused_by_both_sides(
    certs: Path, foreign: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="quicoll"):
        async with coordinator(certs, tmp_path) as address:
            while "certificate" not in caplog.text:  # how long a handshake takes is the machine's
                with pytest.raises(PeerError, match=r"not joined.*cannot reach the coordinator"):
                    await joined(address, foreign, join_timeout=1.0)


async def test_a_client_that_trusts_us_but_was_signed_elsewhere_is_refused_with_the_reason_in_our_log(
    certs: Path, foreign: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = tmp_path / "mixed"
    mixed.mkdir(mode=0o700)
    # It trusts both authorities, so it accepts our coordinator; its own certificate is the foreign one.
    (mixed / "ca.pem").write_bytes((foreign / "ca.pem").read_bytes() + (certs / "ca.pem").read_bytes())
    for suffix in ("pem", "key"):
        path = mixed / f"worker-a.{suffix}"
        path.write_bytes((foreign / f"worker-a.{suffix}").read_bytes())
        path.chmod(0o600)
    with caplog.at_level(logging.WARNING, logger="quicoll"):
        async with coordinator(certs, tmp_path) as address:
            while "refused a peer" not in caplog.text:  # how long a handshake takes is the machine's
                with pytest.raises(PeerError, match="not joined"):
                    await joined(address, mixed, join_timeout=1.0)
            # An honest rank still gets in.
            assert await joined(address, certs) == 1


async def test_a_workers_certificate_does_not_make_a_coordinator(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = tmp_path / "fake"
    fake.mkdir(mode=0o700)
    (fake / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
    for suffix in ("pem", "key"):
        path = fake / f"coordinator-coordinator.{suffix}"
        path.write_bytes((certs / f"worker-b.{suffix}").read_bytes())
        path.chmod(0o600)
    with pytest.raises(LocalError, match="worker/b"):
        async with coordinator(fake, tmp_path):
            pass


async def test_a_certificate_of_another_job_is_refused(
    certs: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = tmp_path_factory.mktemp("other")
    create_authority(other, job="beta")
    issue(other, role="worker", node="a")
    issue(other, role="coordinator", node="coordinator")
    with pytest.raises(LocalError, match="for job 'beta', not 'alpha'"):
        await joined("127.0.0.1:9", other)
    with pytest.raises(LocalError, match="for job 'beta', not 'alpha'"):
        async with coordinator(other, tmp_path):
            pass


async def test_a_node_without_a_certificate_is_told_which_file_is_missing(certs: Path) -> None:
    with pytest.raises(LocalError, match=r"worker-c\.pem"):
        await joined("127.0.0.1:9", certs, "c")


async def test_a_rank_started_by_itself_is_told_in_one_line_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of how that was found out: the traceback has the caller's lines, and two of ours."""
    for name in [name for name in os.environ if name.startswith("QUICOLL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["examples/allreduce.py"])
    with pytest.raises(LocalError) as told:
        async with quicoll.join(certs="nowhere", node="a"):
            pass
    assert str(told.value) == (
        "there is no job to join: no coordinator is named, and nowhere/worker-a.pem: cannot be read: "
        "No such file or directory. To start a coordinator and two ranks, run: quicoll run -n 2 examples/allreduce.py"
    )
    assert told.value.__cause__ is None
    ours = [entry.path.name for entry in told.traceback if "quicoll" in entry.path.parts[-3:]]
    assert ours == ["entry.py", "entry.py"]


async def test_a_rank_of_a_launcher_without_a_store_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("QUICOLL_")]:
        monkeypatch.delenv(name)
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LocalError, match=r"a launcher starts \(SLURM_PROCID\) meet .*: set QUICOLL_RENDEZVOUS$"):
        async with quicoll.join():
            pass


async def test_an_unreachable_coordinator_is_a_clear_error_at_the_deadline(certs: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(PeerError, match=rf"not joined within 0.5 s: cannot reach the coordinator at 127.0.0.1:{port}"):
        await joined(f"127.0.0.1:{port}", certs, join_timeout=0.5)


async def steps_without_end(job: quicoll.Job) -> None:
    while True:
        with suppress(StepAborted):
            async with job.step():
                await job.group.barrier()


async def test_of_two_processes_under_one_name_that_start_together_one_stays_and_the_other_hears_why(
    certs: Path, tmp_path: Path
) -> None:
    async with coordinator(certs, tmp_path, world_size=2) as address:
        both = [asyncio.create_task(joined(address, certs)) for _ in range(2)]
        (told,), (stays,) = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(PeerError, match="another process of a has joined after this one"):
            told.result()
        assert await asyncio.gather(stays, joined(address, certs, "b")) == [2, 2]


async def test_a_process_at_work_ends_when_another_one_of_its_name_joins(certs: Path, tmp_path: Path) -> None:
    settings: JoinSettings = {"certs": str(certs), "node": "a", "job": "alpha", "listen": "127.0.0.1:0"}
    async with (
        coordinator(certs, tmp_path) as address,
        quicoll.join(coordinator=address, **settings) as earlier,
        quicoll.join(coordinator=address, **settings) as later,
    ):
        with pytest.raises(PeerError, match="another process of a has joined after this one"):
            await steps_without_end(earlier)
        assert (await later.group.all_reduce(np.ones(1)))[0] == 1


@pytest.mark.parametrize("listen", [None, "127.0.0.1:0"])
async def test_a_coordinator_whose_name_has_no_address_is_a_clear_error_at_once(
    certs: Path, listen: str | None
) -> None:
    with pytest.raises(LocalError, match=r"cannot resolve 'no-such-host\.invalid'"):
        await joined("no-such-host.invalid:1", certs, listen=listen, join_timeout=600.0)


@pytest.mark.parametrize("listen", [None, "127.0.0.1:0"])
async def test_a_name_server_that_does_not_answer_is_a_clear_error_at_the_deadline(
    certs: Path, monkeypatch: pytest.MonkeyPatch, listen: str | None
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(60.0))
    with pytest.raises(LocalError, match=r"no answer to the look-up of .*'slow\.invalid' within 0\.2 s"):
        await joined("slow.invalid:1", certs, listen=listen, join_timeout=0.2)
    answer.set()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has all of 127.0.0.0/8 on its loopback")
async def test_a_coordinator_that_comes_back_at_another_address_of_its_name_is_found(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = "127.0.0.1"

    def getaddrinfo(name: str, port: int, **options: Any) -> list[tuple[Any, ...]]:
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (host if name == "home.invalid" else name, port))]

    async def commit(job: quicoll.Job) -> None:
        while True:
            try:
                async with job.step():
                    await job.group.barrier()
                return
            except quicoll.StepAborted:
                continue

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    settings = {"certs": str(certs), "node": "a", "job": "alpha", "listen": "127.0.0.1:0", "hold_timeout": 30.0}
    async with AsyncExitStack() as stack:
        async with coordinator(certs, tmp_path) as address:
            port = address.rpartition(":")[2]
            job = await stack.enter_async_context(quicoll.join(coordinator=f"home.invalid:{port}", **settings))
            await commit(job)
        host = "127.0.0.2"
        async with coordinator(certs, tmp_path, listen=f"{host}:{port}"):
            await commit(job)
            await stack.aclose()


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])  # noqa: S104 - what becomes of it is the subject
async def test_ranks_that_listen_on_every_address_tell_each_other_one_that_can_be_reached(
    certs: Path, tmp_path: Path, host: str
) -> None:
    async def addresses(address: str, node: str) -> list[str]:
        async with quicoll.join(
            coordinator=address, certs=str(certs), node=node, job="alpha", listen=f"{host}:0", join_timeout=100.0
        ) as job:
            assert (await job.group.all_reduce(np.ones(1))).tolist() == [2.0]
            return [shown for member in job.view.members for shown, _ in member.addresses]

    async with coordinator(certs, tmp_path, world_size=2, listen=f"{host}:0") as listening:
        address = f"127.0.0.1:{listening.rpartition(':')[2]}"
        assert await asyncio.gather(addresses(address, "a"), addresses(address, "b")) == [["127.0.0.1"] * 2] * 2


@pytest.mark.parametrize(("listen", "target"), [("127.0.0.1:0", "[::1]:9"), ("127.0.0.1:0", "192.0.2.1:9")])
async def test_an_address_from_which_nothing_reaches_the_coordinator_is_refused_at_once(
    certs: Path, listen: str, target: str
) -> None:
    with pytest.raises(LocalError, match=r"listen = '127\.0\.0\.1:0': nothing sent from there reaches the coordinator"):
        await joined(target, certs, listen=listen, join_timeout=600.0)


async def test_an_occupied_port_is_a_clear_error(certs: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(LocalError, match="port is in use"):
            await joined("127.0.0.1:9", certs, listen=address)
        with pytest.raises(LocalError, match="port is in use"):
            await serve(listen=address, job="alpha", certs=certs, journal=tmp_path / "j.db", world_size=1)


async def test_a_damaged_journal_ends_the_coordinator_with_its_path(certs: Path, tmp_path: Path) -> None:
    path = tmp_path / "journal.db"
    path.write_bytes(b"this is no database, whatever its name says" * 100)
    with pytest.raises(JournalError, match=r"journal\.db"):
        async with coordinator(certs, tmp_path):
            pass
    assert path.read_bytes().startswith(b"this is no database")


async def test_a_rank_that_wants_another_world_size_is_refused_with_the_reason(certs: Path, tmp_path: Path) -> None:
    async with coordinator(certs, tmp_path, world_size=1) as address:
        with pytest.raises(PeerError, match=r"refuses this rank.*world"):
            await joined(address, certs, world_size=3)


async def test_joining_alone_when_two_are_wanted_says_who_is_missing(certs: Path, tmp_path: Path) -> None:
    said = ""
    async with coordinator(certs, tmp_path, world_size=2) as address:
        while "not joined within 1 s: 1 of 2 nodes are here: a" not in said:
            with pytest.raises(PeerError) as told:
                await joined(address, certs, join_timeout=1.0)
            said = str(told.value)
            assert "1 of 2" in said or "cannot reach the coordinator" in said  # not in so short a time


async def test_who_waits_for_others_says_for_whom_while_it_waits(
    certs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quicoll.joining.entry._TELL_AFTER_S", 0.01)
    async with coordinator(certs, tmp_path, world_size=2) as address:
        waits = asyncio.create_task(joined(address, certs, join_timeout=60.0))
        while "a: waits: 1 of 2 nodes are here: a (join_timeout 60 s)" not in caplog.messages:
            assert not waits.done()
            await asyncio.sleep(0.01)
        waits.cancel()
        await asyncio.wait({waits})


async def test_who_waits_for_a_coordinator_that_is_not_there_says_so_while_it_waits(
    certs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("quicoll.joining.entry._TELL_AFTER_S", 0.01)
    waits = asyncio.create_task(joined("127.0.0.1:9", certs, join_timeout=60.0))
    while not any("a: waits: cannot reach the coordinator at 127.0.0.1:9" in said for said in caplog.messages):
        assert not waits.done()
        await asyncio.sleep(0.01)
    waits.cancel()
    await asyncio.wait({waits})


def test_the_blocking_face_has_the_same_names_and_results(certs: Path, tmp_path: Path) -> None:
    import threading

    ready = threading.Event()
    stop: list[Any] = []
    found: list[str] = []

    def run() -> None:
        async def main() -> None:
            stop.extend([asyncio.get_running_loop(), asyncio.Event()])
            async with coordinator(certs, tmp_path, world_size=2) as address:
                found.append(address)
                ready.set()
                await stop[1].wait()

        asyncio.run(main())

    server = threading.Thread(target=run)
    server.start()
    ready.wait()
    results: dict[str, Any] = {}

    def rank(node: str) -> None:
        with quicoll.blocking.join(
            coordinator=found[0], certs=str(certs), node=node, job="alpha", listen="127.0.0.1:0"
        ) as job:
            shards = job.group.shards(4)
            total = job.group.all_reduce(shards.leaves([np.full(2, float(s)) for s in shards]))
            gathered = job.group.all_gather(np.array([job.rank]))
            told = job.group.broadcast(np.array([job.rank + 7]), root=1)
            job.group.barrier()
            first = job.rank == 0
            assert job.group.all_gather_object({"rank": job.rank}) == [{"rank": 0}, {"rank": 1}]
            assert job.group.broadcast_object("x" if first else None) == "x"
            assert job.group.reduce_scatter(np.arange(4.0)).tolist() == ([0.0, 2.0] if first else [4.0, 6.0])
            assert (job.group.reduce(np.ones(1), root=1) is None) is first
            assert (job.group.gather(np.ones(1), root=0) is None) is not first
            assert job.group.scatter(np.arange(2.0)).tolist() == [float(job.rank)]
            assert job.group.all_to_all(np.arange(2.0)).tolist() == [float(job.rank)] * 2
            if first:
                job.group.send(np.full(3, 5.0), to=1)
            else:
                assert job.group.recv(np.empty(3), source=0).tolist() == [5.0] * 3
            committed: list[int] = []
            with job.step() as step:
                job.group.barrier()
                step.on_commit(lambda: committed.append(step.number))
            heard: list[int] = []
            job.tiers.on_change(lambda before, after: heard.append(after.version))
            job.tiers.propose(job.tiers.current.changed(active=["hot"]))
            cold, hot = job.shared_state("cold", consistency="eventual"), job.shared_state("hot")
            cold.write({node: b"from " + node.encode()})
            with job.step() as step:
                assert job.tiers.agree(step).active == ("hot",)
                pieces = cold.strong()
                hot.stage(step, pieces)
            assert (heard, job.tiers.pending, job.tiers.current.active) == ([1], None, ("hot",))
            assert hot.read() == hot.state() == cold.read() == {"a": b"from a", "b": b"from b"}
            results[node] = (total.tolist(), gathered.tolist(), told.tolist(), committed, job.committed_step)

    threads = [threading.Thread(target=rank, args=(node,)) for node in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop[0].call_soon_threadsafe(stop[1].set)
    server.join()
    assert results == {node: ([6.0, 6.0], [0, 1], [8], [1], 2) for node in ("a", "b")}


async def test_the_blocking_face_refuses_to_block_a_running_loop() -> None:
    with pytest.raises(LocalError, match=r"async with quicoll\.join"), quicoll.blocking.join():
        pass
