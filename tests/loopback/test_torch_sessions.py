"""How a process's part in a torch job begins and ends: over sockets, with real coordinators, ranks on threads."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the check that there is a torch
from torch_processes import HELPERS, environment  # noqa: E402 - likewise

import quicoll  # noqa: E402 - likewise
from quicoll.engine.engine import Engine  # noqa: E402 - likewise
from quicoll.membership.member.actions import JobOver  # noqa: E402 - likewise
from quicoll.torch_backend import group_at  # noqa: E402 - likewise

pytestmark = pytest.mark.slow


def ranks(use: Any, timeout: timedelta, world: int = 2) -> list[Any]:
    """What `use` gives for each rank's group, or the error; each is made and used on a thread of its own."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        try:
            return use(group_at(store, rank, world, timeout=timeout), rank)
        except BaseException as error:
            return error

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(one, range(world)))


def test_a_rank_that_looks_when_the_other_has_left_has_a_group_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_view = Engine.wait_view

    async def late(self: Engine, timeout: float | None, *, joining: bool = False, after: int = 0) -> Any:
        while self.config.node == "worker-1" and not left(self):  # noqa: ASYNC110 - an engine has no event for it
            await asyncio.sleep(0.01)
        return await wait_view(self, timeout, joining=joining, after=after)

    def left(engine: Engine) -> bool:
        communicator = engine._views.communicator
        return communicator is not None and (communicator.error is not None or communicator.view.world_size == 1)

    monkeypatch.setattr(Engine, "wait_view", late)

    def use(group: Any, rank: int) -> Any:
        if rank == 0:
            group.shutdown()
            return None
        place = group.rank(), group.size()
        with pytest.raises(quicoll.PeerError) as found:
            group.allreduce([torch.ones(1)]).wait()
        group.shutdown()
        return place, found.value.node, isinstance(found.value, dist.DistBackendError)

    assert ranks(use, timedelta(milliseconds=1)) == [None, ((1, 2), "worker-0", True)]


def test_a_job_that_is_done_before_a_rank_is_in_it_is_an_error_and_no_end_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_view = Engine.wait_view

    async def told(self: Engine, timeout: float | None, *, joining: bool = False, after: int = 0) -> Any:
        found = await wait_view(self, timeout, joining=joining, after=after)
        return JobOver(0) if self.config.node == "worker-1" else found

    monkeypatch.setattr(Engine, "wait_view", told)
    first, second = ranks(lambda group, rank: group.shutdown(), timedelta(seconds=1))
    assert first is None
    assert isinstance(second, quicoll.PeerError)
    assert not isinstance(second, SystemExit)
    assert "ended their work before rank 1 was in their view" in str(second)


@pytest.mark.warm("torch")
def test_a_rank_that_is_through_goes_on_and_the_others_keep_their_view_though_its_process_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(HELPERS / "torch_parting.py"), str(tmp_path)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, ran.stdout[-1000:] + ran.stderr[-5000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(3)]
    assert found == [[1.0, 2.0], [0.0, *[2.0] * 20], [0.0, *[1.0] * 20]]


def test_an_end_that_is_hurried_waits_for_nobody() -> None:
    left = threading.Event()

    def use(group: Any, rank: int) -> Any:
        x = torch.tensor([1.0])
        if rank:
            group.send([x], 0, 0).wait()
            assert left.wait(100)
            with pytest.raises(quicoll.PeerError) as found:
                group.barrier().wait()
            group.abort()
            return found.value.node
        for other in (1, 2):
            group.recv([x], other, 0).wait()
        group.shutdown()
        session = group._session
        stays = session._thread.is_alive()  # for the others, who may still use the view without this rank
        session.stay(hurried=True)
        left.set()
        return stays, session._thread.is_alive()

    assert ranks(use, timedelta(seconds=200), 3) == [(True, False), "worker-0", "worker-0"]


@pytest.mark.parametrize("asked_for", [True, False])
def test_a_torchcomms_that_is_installed_gets_a_group_where_it_is_asked_for_and_not_elsewhere(asked_for: bool) -> None:
    """torch asks quicoll nothing there, as the documents say. It looks at its import, so no fork of a torch will do."""
    given = environment() | {"TORCH_DISTRIBUTED_USE_TORCHCOMMS": "1" if asked_for else "0"}
    given["PYTHONPATH"] += os.pathsep + str(HELPERS / "stand_in_torchcomms")
    program = (
        "import torch, torch.distributed as dist, quicoll.torch_backend\n"
        "dist.init_process_group('quicoll', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=500, check=False
    )
    assert ("a group was given to torchcomms" in ran.stderr) == asked_for, ran.stderr[-5000:]
    assert (ran.returncode != 0) == asked_for, ran.stderr[-5000:]
