"""Engines in processes of their own: what goes through them, what ends with what, what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from side_processes import engines

import quicoll
import quicoll_transport
from quicoll import Event, LocalError, Mismatch, PeerError, StepAborted
from quicoll.local.sealing import unusable
from quicoll.membership.serving import serve
from quicoll.testing import cluster, cut_network
from quicoll_transport.security.authority import create_authority, issue

if TYPE_CHECKING:
    from quicoll import Job

pytestmark = [
    pytest.mark.loopback,
    pytest.mark.skipif(bool(unusable()), reason=unusable() or "there is shared memory"),
]

SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]
ELEMENTS = 300_000
LONG_S = 500.0
"""Of silence: whoever is missed before was heard to go."""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    create_authority(directory, job="alpha")
    issue(directory, role="coordinator", node="coordinator")
    for node in ("a", "b"):
        issue(directory, role="worker", node=node)
    return directory


@contextlib.asynccontextmanager
async def coordinator(certs: Path, tmp_path: Path, **settings: Any) -> AsyncIterator[str]:
    """A coordinator for two ranks; its address."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def observe(event: Event) -> None:
        if event.kind == "listening" and not address.done():
            address.set_result(event.fields["address"])

    options: dict[str, Any] = {"world_size": 2, "journal": tmp_path / "journal.db", "listen": "127.0.0.1:0", **settings}
    task = asyncio.create_task(serve(certs=certs, job="alpha", observer=observe, **options))
    await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield await address
    finally:
        task.cancel()
        await asyncio.wait({task})


def joining(address: str, certs: Path, node: str, **settings: Any) -> Any:
    options = {"listen": "127.0.0.1:0", "join_timeout": 100.0, "engine": "process", **settings}
    return quicoll.join(coordinator=address, certs=str(certs), node=node, job="alpha", **options)


def program(script: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a program of another rank."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], env=environment, stdout=subprocess.PIPE, stderr=None, text=True
    )


async def train(job: Job, steps: int) -> np.ndarray:
    """Take steps with a state, which is returned."""
    state = {"w": np.zeros(ELEMENTS)}
    job.register_state(lambda: state, state.update)
    while job.committed_step < steps:
        async with job.step() as step:
            total = await job.group.all_reduce(np.full(ELEMENTS, float(job.rank + step.number)))

            def apply(total: np.ndarray = total) -> None:
                state["w"] = state["w"] + total

            step.on_commit(apply)
    return state["w"]


async def test_operations_and_steps_of_engines_in_processes_and_in_threads_go_together() -> None:
    events: list[Event] = []
    async with cluster(3, engine="process", observer=events.append) as jobs:
        assert len(engines()) == 3
        given = [np.random.default_rng(rank).standard_normal(ELEMENTS).astype(np.float32) for rank in range(3)]
        outs = [np.empty(ELEMENTS, np.float32) for _ in jobs]
        calls = [job.group.all_reduce(x, out=out) for job, x, out in zip(jobs, given, outs, strict=True)]
        found = await asyncio.gather(*calls)
        expected = (given[0] + given[1]) + given[2]
        assert all(np.array_equal(each, expected) for each in found)
        assert all(each is out for each, out in zip(found, outs, strict=True))
        trained = await asyncio.gather(*(train(job, 3) for job in jobs))
        assert all(
            np.array_equal(each, np.full(ELEMENTS, float(3 * (0 + 1 + 2) + 3 * (1 + 2 + 3)))) for each in trained
        )
        assert [link.peer for link in await jobs[1].links()] == [
            "coordinator/coordinator",
            "worker/worker-0",
            "worker/worker-2",
        ]
        jobs[2].emit("progress", step=3)
        refused = await asyncio.gather(
            *(job.group.all_reduce(np.ones(3 + job.rank)) for job in jobs), return_exceptions=True
        )
        assert [type(each) for each in refused] == [Mismatch] * 3
        assert "shape (3,) on rank 0, (4,) on rank 1" in str(refused[0])
        with pytest.raises(LocalError, match="in a process of its own"):
            cut_network(jobs[0], 1.0)
    assert engines() == []
    told = [(event.node, event.fields["step"]) for event in events if event.kind == "progress"]
    assert told == [("worker-2", 3)]
    assert {event.node for event in events if event.kind == "view_installed"} >= {f"worker-{i}" for i in range(3)}


async def test_what_lies_in_memory_of_quicoll_empty_is_not_copied_and_no_large_result_is() -> None:
    async with cluster(2, engine="process") as jobs:
        given = [quicoll.empty(ELEMENTS, np.float32) for _ in jobs]
        outs = [quicoll.empty(ELEMENTS, np.float32) for _ in jobs]
        for job, x in zip(jobs, given, strict=True):
            x[:] = job.rank + 1
        places = [job.internals.engine._places for job in jobs]
        copied: list[int] = []
        for each in places:
            take = each._recycler.take
            each._recycler = SimpleNamespace(take=lambda nbytes, take=take: copied.append(nbytes) or take(nbytes))
        calls = zip(jobs, given, outs, strict=True)
        await asyncio.gather(*(job.group.all_reduce(x, out=out) for job, x, out in calls))
        assert all((out == 3).all() for out in outs)
        calls = zip(jobs, given, strict=True)
        assert all((out == 3).all() for out in await asyncio.gather(*(job.group.all_reduce(x) for job, x in calls)))
        assert copied == []
        small = [np.ones(5_000), np.ones(5_000)]
        await asyncio.gather(*(job.group.all_reduce(x) for job, x in zip(jobs, small, strict=True)))
        assert copied == [1 << 16] * 4


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_ends_or_stands_still_ends_its_ranks_calls_and_the_others_view(
    number: signal.Signals,
) -> None:
    async with cluster(3, engine="process", lost_after=1.0) as jobs:
        await asyncio.gather(*(job.group.barrier() for job in jobs))
        first = jobs[0].internals.engine
        process = first._process.pid
        out = np.full(ELEMENTS, -1.0)
        waiting = asyncio.ensure_future(jobs[0].group.all_reduce(np.ones(ELEMENTS), out=out))
        os.kill(process, number)
        with pytest.raises(LocalError, match="the engine's process is gone: ") as told:
            await waiting
        why = "its process has ended (signal 9)" if number == signal.SIGKILL else "it has given no sign of life for 2 s"
        assert why in str(told.value)
        assert not told.value.usable
        assert (out == -1.0).all()
        others = [job.group.all_reduce(np.ones(ELEMENTS)) for job in jobs[1:]]
        for lost in await asyncio.gather(*others, return_exceptions=True):
            assert isinstance(lost, PeerError)
            assert lost.node == "worker-0", str(lost)
        with pytest.raises(LocalError, match="the engine's process is gone"):
            async with jobs[0].step():
                pass
        with pytest.raises(LocalError, match="the engine's process is gone"):
            await jobs[0].group.barrier()
        assert len(engines()) == 2
    assert engines() == []


LOCKED = """
import asyncio, ctypes, sys
import numpy as np
import quicoll

async def main():
    async with quicoll.join(coordinator=sys.argv[1], certs=sys.argv[2], node="b", job="alpha", listen="127.0.0.1:0",
                            join_timeout=100.0, engine=sys.argv[3]) as job:
        await job.group.barrier()
        ctypes.PyDLL(None).usleep(3_000_000)  # which gives the interpreter's lock to nobody
        await job.group.all_reduce(np.ones(3))
        print(job.view.view_id, flush=True)

asyncio.run(main())
"""


async def test_a_program_that_keeps_its_interpreter_for_long_is_lost_to_nobody(certs: Path, tmp_path: Path) -> None:
    async with coordinator(certs, tmp_path, lost_after=1.0) as address:
        other = program(LOCKED, address, str(certs), "process")
        async with joining(address, certs, "a") as job:
            view = job.view.view_id
            await job.group.barrier()
            assert (await job.group.all_reduce(np.ones(3))).tolist() == [2, 2, 2]
            assert job.internals.engine.view_at_work == view
        assert await asyncio.to_thread(other.communicate) == (f"{view}\n", None)


KILLED = """
import asyncio, sys
import quicoll

async def main():
    async with quicoll.join(coordinator=sys.argv[1], certs=sys.argv[2], node="b", job="alpha", listen="127.0.0.1:0",
                            join_timeout=100.0, engine="process") as job:
        await job.group.barrier()
        print("ready", flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


async def test_the_engine_of_a_program_that_is_killed_says_so_to_the_others_and_ends(
    certs: Path, tmp_path: Path
) -> None:
    async with coordinator(certs, tmp_path, lost_after=LONG_S) as address:
        other = program(KILLED, address, str(certs))
        assert other.stdout is not None
        async with joining(address, certs, "a", lost_after=LONG_S) as job:
            await job.group.barrier()
            await asyncio.to_thread(other.stdout.readline)
            (process,) = engines(other.pid)
            ended = os.pidfd_open(process)
            other.kill()
            with pytest.raises(StepAborted) as told:
                async with job.step():
                    await job.group.barrier()
            assert told.value.node == "b"
            await asyncio.to_thread(select.select, [ended], [], [])
            os.close(ended)
        await asyncio.to_thread(other.communicate)


FORKED = """
import os, sys, time
import numpy as np
import quicoll, quicoll.blocking

with quicoll.blocking.join(coordinator=sys.argv[1], certs=sys.argv[2], node="b", job="alpha", listen="127.0.0.1:0",
                           join_timeout=100.0, engine="process") as job:
    job.group.barrier()
    child = os.fork()
    if not child:
        try:
            job.group.barrier()
        except quicoll.LocalError as error:
            print(error, flush=True)
        time.sleep(100)
        os._exit(0)
    job.group.all_reduce(np.ones(300_000))
    print(child, flush=True)
"""


async def test_a_child_that_the_program_forks_has_no_part_in_it_and_keeps_nothing_alive(
    certs: Path, tmp_path: Path
) -> None:
    async with coordinator(certs, tmp_path, lost_after=LONG_S) as address:
        other = program(FORKED, address, str(certs))
        assert other.stdout is not None
        async with joining(address, certs, "a", lost_after=LONG_S) as job:
            await job.group.barrier()
            (process,) = engines(other.pid)
            ended = os.pidfd_open(process)
            assert (await job.group.all_reduce(np.ones(ELEMENTS)))[0] == 2
        lines = [await asyncio.to_thread(other.stdout.readline) for _ in range(2)]
        (child,) = [int(line) for line in lines if line.strip().isdecimal()]
        assert any("a fork of the one that joined" in line for line in lines), lines
        await asyncio.to_thread(other.wait)
        await asyncio.to_thread(select.select, [ended], [], [])
        os.close(ended)
        os.kill(child, signal.SIGKILL)
        other.stdout.close()


def test_the_blocking_face_has_it_as_well(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy as np, quicoll.blocking\n"
        "with quicoll.blocking.join() as job:\n"
        "    handle = job.group.all_reduce(np.arange(5.0), async_op=True)\n"
        "    with job.step():\n"
        "        total = job.group.all_reduce(np.ones(300_000))\n"
        "    assert total[-1] == 2 and handle.wait()[4] == 8\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES), "QUICOLL_ENGINE": "process"}
    command = [sys.executable, "-c", "from quicoll.cli.main import main; main()", "run", "-n", "2", str(script)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr + run.stdout


async def test_certificates_are_renewed_and_shut_out_and_an_audit_is_signed(certs: Path, tmp_path: Path) -> None:
    async with coordinator(certs, tmp_path) as address:

        async def rank(node: str) -> str:
            async with joining(address, certs, node) as job:
                before = job.internals.engine.endpoint.credentials.fingerprint
                job.audit(tmp_path / "audit")
                if node == "a":
                    for suffix in ("pem", "key"):
                        (certs / f"worker-a.{suffix}").unlink()
                    issue(certs, role="worker", node="a")
                    after = await job.rotate_certificates()
                    assert after == job.internals.engine.endpoint.credentials.fingerprint != before
                with pytest.raises(LocalError, match="fingerprint"):
                    await job.deny("no fingerprint")
                async with job.step():
                    await job.group.all_reduce(np.ones(4))
                return node

        assert await asyncio.gather(rank("a"), rank("b")) == ["a", "b"]
    command = [sys.executable, "-c", "from quicoll.cli.main import main; main()", "audit", "verify"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    where = [str(tmp_path / "audit"), "--ca", str(certs / "ca.pem")]
    run = await asyncio.to_thread(
        subprocess.run, [*command, *where], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


async def test_what_the_engine_logs_and_tells_is_logged_once_by_the_program(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="quicoll"):
        async with cluster(1, engine="process", hold_timeout=1.0) as jobs:
            await jobs[0].group.barrier()
    lines = [record.getMessage() for record in caplog.records if "worker-0" in record.getMessage()]
    assert lines.count("worker-0: rank 0 of 1 in view 1: worker-0") == 1, lines
    assert sum("hold_timeout is 1 s" in line for line in lines) == 1, lines


async def test_what_is_wrong_is_said_before_anything_is_joined(certs: Path, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="no-such-host"):
        async with joining("no-such-host.invalid:4433", certs, "a"):
            pass
    with pytest.raises(LocalError, match=r"engine = 'fork' \(from argument\): must be one of thread, process"):
        async with joining("127.0.0.1:1", certs, "a", engine="fork"):
            pass
    with pytest.raises(LocalError, match="worker-c"):
        async with joining("127.0.0.1:1", certs, "c"):
            pass
    assert engines() == []


LIMITED = """
import asyncio, resource, sys
import quicoll
resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))

async def main():
    try:
        async with quicoll.join(coordinator="127.0.0.1:1", certs=sys.argv[1], node="a", job="alpha", engine="process"):
            pass
    except quicoll.LocalError as error:
        print(error)

asyncio.run(main())
"""


async def test_a_limit_of_addresses_is_named(certs: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY
    limited = program(LIMITED, str(certs))
    told, _ = await asyncio.to_thread(limited.communicate)
    assert told.strip() == "engine = 'process' (from argument): the process's addresses are limited (ulimit -v)"
