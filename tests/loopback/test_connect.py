"""A job without a block around it: `connect` and `aclose`, and what becomes of it where nobody calls the second."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import quicoll
import quicoll_transport
from quicoll import Event
from quicoll.membership.serving import serve
from quicoll_transport.security.authority import create_authority, issue

pytestmark = pytest.mark.loopback

SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]
NEVER_S = 500.0
"""Of silence: whoever is missed before was heard to go."""
FORGETFUL = """
import asyncio, sys
import quicoll

async def main():
    job = await quicoll.connect(coordinator=sys.argv[1], certs=sys.argv[2], node="b", job="alpha",
                                listen="127.0.0.1:0", join_timeout=100.0, lost_after=float(sys.argv[3]))
    await job.group.barrier()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certs")
    create_authority(directory, job="alpha")
    issue(directory, role="coordinator", node="coordinator")
    for node in ("a", "b"):
        issue(directory, role="worker", node=node)
    return directory


@pytest.fixture
async def address(request: pytest.FixtureRequest, certs: Path, tmp_path: Path) -> AsyncIterator[str]:
    """Of a coordinator, for as many ranks as the test says."""
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def observe(event: Event) -> None:
        if event.kind == "listening" and not heard.done():
            heard.set_result(event.fields["address"])

    task = asyncio.create_task(
        serve(
            certs=certs, job="alpha", world_size=getattr(request, "param", 1), journal=tmp_path / "journal.db",
            listen="127.0.0.1:0", lost_after=NEVER_S, observer=observe,
        )
    )  # fmt: skip
    await asyncio.wait({task, heard}, return_when=asyncio.FIRST_COMPLETED)
    yield await heard
    task.cancel()
    await asyncio.wait({task})


async def connected(address: str, certs: Path, node: str = "a") -> quicoll.Job:
    return await quicoll.connect(
        coordinator=address, certs=str(certs), node=node, job="alpha", listen="127.0.0.1:0", join_timeout=100.0,
        lost_after=NEVER_S, handle_sigterm=True,
    )  # fmt: skip


async def test_a_job_without_a_block_works_and_gives_back_what_it_took(
    address: str, certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    job = await connected(address, certs)
    assert signal.getsignal(signal.SIGTERM) is not before
    async with job.step():
        assert (await job.group.all_reduce(np.ones(2))).tolist() == [1.0, 1.0]
    await job.aclose()
    await job.aclose()
    assert signal.getsignal(signal.SIGTERM) is before
    assert "aclose" not in caplog.text


async def test_a_cell_that_is_run_twice_leaves_its_first_job_and_joins_again(
    address: str, certs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = await connected(address, certs)
    second = await connected(address, certs)
    assert second.view.view_id > first.view.view_id
    assert (await second.group.all_reduce(np.ones(1))).tolist() == [1.0]
    with pytest.raises(quicoll.LocalError, match="closed"):
        await first.group.barrier()
    await second.aclose()
    assert caplog.text.count("a is still in job 'alpha' and connects again") == 1


@pytest.mark.parametrize("address", [2], indirect=True)
async def test_a_program_that_forgets_to_leave_is_heard_to_go_and_is_told(
    address: str, certs: Path, tmp_path: Path
) -> None:
    """Not by silence, for which nobody here would wait."""
    (tmp_path / "forgetful.py").write_text(FORGETFUL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    program = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "forgetful.py"), address, str(certs), str(NEVER_S),
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    job = await connected(address, certs)
    await job.group.barrier()
    _, said = await program.communicate()
    await job.ready(timeout=NEVER_S)
    assert job.view.nodes == ("a",)
    await job.aclose()
    assert program.returncode == 0
    assert said.decode().splitlines() == [
        "the program ends while b is in job 'alpha': it is left now. `await job.aclose()` at the end leaves it in order"
    ]
