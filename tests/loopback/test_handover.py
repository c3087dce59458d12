"""A state handed over between real ranks: its memory, its bytes on the wire, a cut in it, and one found wrong."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quicoll.errors import Corrupted, QuicollError, StepAborted
from quicoll.state.manifest import decode_manifest, encode_manifest
from quicoll.state.transfer import CHUNK_BYTES, transfer
from quicoll.state.tree import flatten
from quicoll.testing import Cluster, cluster, disturb_network
from quicoll_transport.faults.compose import Cut

if TYPE_CHECKING:
    from quicoll import Event, Job
    from quicoll.state.manifest import TensorRecord
    from quicoll_transport.faults.compose import Datagram, Delivery, Rng

MIB = 1 << 20


def drawn(mib: int) -> dict[str, Any]:
    """A state of three large tensors and a hundred small ones."""
    rng = np.random.default_rng(5)
    state: dict[str, Any] = {f"large{i}": rng.standard_normal(mib * MIB // 12, dtype=np.float32) for i in range(3)}
    return state | {f"small{i}": rng.standard_normal(25) for i in range(100)}


def written(state: Mapping[str, Any]) -> dict[str, Any]:
    """Memory for a state, of which every page is there already."""
    return {name: np.full_like(value, 1) for name, value in state.items()}


def records_of(state: Mapping[str, Any]) -> tuple[TensorRecord, ...]:
    return decode_manifest(encode_manifest(flatten(state)), giver=0, view_id=1).records


async def hand_over(jobs: Sequence[Job], held: Mapping[str, Mapping[str, Any]], records: Any) -> list[Any]:
    """From worker-0 to the other nodes that hold something. What each call gives or raises."""

    async def one(job: Job) -> None:
        ranks = {member.node: member.rank for member in job.view.members}
        chain = [ranks[node] for node in held]
        tensors = [held[job.node][record.path] for record in records]
        await transfer(
            job.group, giver=chain[0], receivers=tuple(chain[1:]), records=records, tensors=tensors,
            view_id=job.view.view_id,
        )  # fmt: skip

    return await asyncio.gather(*(one(job) for job in jobs if job.node in held), return_exceptions=True)


async def received(job: Job) -> int:
    """Bytes of payload that a rank's links have brought."""
    return sum(link.bytes_received for link in await job.links())


def resident(figure: str) -> int:
    """Bytes of this process's memory, as Linux has them: VmRSS or VmHWM, the most since it was set back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{figure}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(figure)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux sets back the most memory held")
async def test_what_two_ranks_hold_beside_the_state_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are in this process: a window at each end, and what the receiver's link holds before it is asked for."""
    monkeypatch.setattr("quicoll.state.transfer.CHUNK_BYTES", MIB)
    state = drawn(48)
    held, records = {"worker-0": state, "worker-2": written(state)}, records_of(state)
    async with cluster(3) as jobs:
        others = [await received(job) for job in jobs[:2]]
        gc.collect()
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # noqa: ASYNC240 - no file: a question to the kernel
        assert await hand_over(jobs, held, records) == [None, None]
        assert resident("VmHWM") - before < 24 * MIB  # half the state; some of it is what any traffic takes
        # The rank that takes no part hears nothing, the giver a request.
        assert (await received(jobs[1]), await received(jobs[0])) == (others[1], others[0] + 7)
    assert all(np.array_equal(state[name], held["worker-2"][name]) for name in state)


class CutAfter:
    """Passes so many bytes, and then nothing any more."""

    def __init__(self, size: int) -> None:
        self._left = size

    def decide(self, datagram: Datagram, now_ns: int, rng: Rng) -> list[Delivery] | None:
        self._left -= len(datagram.data)
        return None if self._left > 0 else []


@pytest.mark.slow
async def test_a_transfer_that_a_cut_ended_goes_on_in_the_next_view_with_the_rest() -> None:
    """64 MiB to a rank that loses its network in the middle. The chunks that had come do not travel again."""
    state = drawn(64)
    size = sum(value.nbytes for value in state.values())
    held, records = {"worker-0": state, "worker-2": written(state)}, records_of(state)
    async with cluster(3, lost_after=1.0) as jobs:
        for job in jobs:
            job.register_state(lambda: {"x": np.zeros(1)}, lambda new: None)
        await asyncio.gather(*(job.ready() for job in jobs))
        async with disturb_network(jobs[2], CutAfter(size // 2)):
            for failed in await hand_over(jobs, held, records):
                assert isinstance(failed, QuicollError)
                assert not failed.usable
        came = sum(int((held["worker-2"][name] == state[name]).sum()) * state[name].itemsize for name in state)
        assert size // 4 < came < size
        await whole_again(jobs)
        before = await received(jobs[2])
        assert await hand_over(jobs, held, records) == [None, None]
        again = await received(jobs[2]) - before
    assert all(np.array_equal(state[name], held["worker-2"][name]) for name in state)
    assert again < size - came + CHUNK_BYTES * 2


async def whole_again(jobs: Cluster) -> None:
    """Wait until all ranks are in one view."""

    async def entered(job: Job) -> None:
        while True:
            try:
                await job.ready()
                await job.group.barrier()
                if job.world_size == len(jobs):
                    return
                raise StepAborted("not all are here")
            except QuicollError:
                await asyncio.sleep(0.05)

    await asyncio.gather(*(entered(job) for job in jobs))


async def test_a_state_that_is_found_to_be_wrong_ends_the_view_for_all_who_are_told_whose_it_was() -> None:
    async with cluster(3) as jobs:
        view = jobs[0].view.view_id
        waiting = [asyncio.ensure_future(job.group.barrier()) for job in jobs[1:]]
        found = Corrupted("the state's 'w' fails its digest", rank=0, view=view)
        await jobs[0].internals.runtime.call(jobs[0].internals.engine.break_view(view, found))
        for failed in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(failed, Corrupted)
            assert "the state's 'w' fails its digest" in str(failed)


async def test_a_rank_that_is_behind_gets_the_state_through_the_whole_job() -> None:
    state = drawn(2)
    got: dict[str, Mapping[str, Any]] = {}
    async with cluster(3) as jobs:
        for job in jobs:
            own = state if job.rank == 1 else written(state)
            job.register_state(lambda own=own: own, lambda new, node=job.node: got.update({node: dict(new)}))
            if job.rank == 1:
                job.resume_from(4)
        await asyncio.gather(*(job.ready() for job in jobs))
        assert [job.committed_step for job in jobs] == [4] * 3
    assert sorted(got) == ["worker-0", "worker-2"]
    assert all(np.array_equal(new[name], state[name]) for new in got.values() for name in state)


async def test_the_others_commit_steps_while_a_rank_that_was_cut_off_learns_the_state() -> None:
    """While it is away they change 4 MiB, to what they are from then on, and a few bytes in each step."""
    told: list[Event] = []
    commits: dict[str, list[int]] = {}
    cut = AsyncExitStack()

    def commit(job: Job, state: dict[str, Any], number: int) -> None:
        if job.world_size == 2:
            state["large"][:] = 7
        state["hot"] += number
        commits[job.node].append(number)

    async def work(job: Job, state: dict[str, Any]) -> None:
        commits[job.node] = []
        over = False
        while not over:
            behind = job.node == "worker-2"
            learned = any(event.kind == "state_learned" for event in told)
            with suppress(StepAborted):
                async with job.step() as step:
                    await asyncio.sleep(0.02)
                    over = bool((await job.group.all_reduce(np.array([int(behind and learned)])))[0])
                    step.on_commit(lambda step=step: commit(job, state, step.number))
                if behind and step.number == 4:
                    await cut.enter_async_context(disturb_network(job, Cut()))
                alone = len(commits["worker-0"]) - len(commits["worker-2"])
                if job.node == "worker-0" and job.world_size == 2 and alone > 3:
                    await cut.aclose()

    states = [{"large": np.zeros(4 * MIB, np.uint8), "hot": np.zeros(8)} for _ in range(3)]
    async with cluster(3, lost_after=0.8, observer=told.append, learn_from_bytes=MIB) as jobs:
        for job, state in zip(jobs, states, strict=True):
            job.register_state(lambda state=state: state, state.update)
        async with asyncio.timeout(300):
            await asyncio.gather(*(work(job, state) for job, state in zip(jobs, states, strict=True)))
        (began,) = [event for event in told if event.kind == "state_learning"]
        (ended,) = [event for event in told if event.kind == "state_learned"]
        assert (began.node, began.fields["from_node"], began.fields["chunks"]) == ("worker-2", "worker-0", 65)
        assert ended.fields["cause"] == ""
        assert 65 <= ended.fields["chunks"] < 2 * 65  # what did not change meanwhile has come once
        assert len(commits["worker-2"]) < len(commits["worker-0"])
        assert states[0]["hot"].tolist() == states[2]["hot"].tolist()
        assert states[2]["large"].tolist() == [7] * (4 * MIB)
