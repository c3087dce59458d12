"""Checkpoints of many ranks: written by all, read at any number of them, and never a mix of two states (S7, A5).

The oracle is the state itself, computed for any step in one process.
"""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from memory_job import MemoryCluster, MemoryJob

from quicoll import checkpoint
from quicoll.checkpoint import Contents, Local, Shard
from quicoll.checkpoint.datafile import write_share
from quicoll.checkpoint.lending import CopyMemory
from quicoll.errors import CheckpointError, LocalError, PeerError
from quicoll.sim.disk.disk import SimDisk
from quicoll.sim.disk.files import DiskFailure, Halted
from quicoll.train import Checkpointer, checkpointer

if TYPE_CHECKING:
    from quicoll.train.fetching import FetchedCheckpoint

ROWS, COLUMNS = 30, 7
FOLDER = "/data/checkpoints"


def whole(step: int) -> dict[str, Any]:
    """The state after a step."""
    rng = np.random.default_rng(step)
    return {
        "w": rng.standard_normal((37, 11)).astype(np.float32),
        "half": torch.from_numpy(rng.standard_normal(300)).to(torch.bfloat16),
        "count": np.int64(step),
        "none": np.zeros((0, 3)),
        "m": rng.standard_normal((ROWS, COLUMNS)),
    }


def rows(rank: int, world: int) -> tuple[int, int]:
    return ROWS * rank // world, ROWS * (rank + 1) // world


def held(step: int, job: MemoryJob) -> Contents:
    """What one rank has of it: all but the moments, of which it has some rows; and its own position."""
    tensors = whole(step)
    first, end = rows(job.rank, job.world_size)
    tensors["m"] = Shard(tensors["m"][first:end], shape=(ROWS, COLUMNS), offset=(first, 0))
    tensors["position"] = Local(np.array([step, job.rank]))
    return Contents(tensors, {"epoch": str(step // 10)})


async def train(
    cluster: MemoryCluster, place: Any, *, steps: int, every: int = 2, **options: Any
) -> list[Checkpointer]:
    """Steps on all ranks, then `finish`."""

    async def rank(job: MemoryJob) -> Checkpointer:
        saver = Checkpointer(job, place, every=every, **options)
        while job.committed_step < steps:
            async with job.step() as step:
                await saver.in_step(step, lambda: held(job.committed_step, job))
            await saver.settle()
        await saver.finish(lambda: held(job.committed_step, job))
        return saver

    return list(await asyncio.gather(*map(rank, cluster.jobs)))


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def same(found: dict[str, Any], step: int) -> bool:
    return checkpoint.digest(found) == checkpoint.digest(whole(step))


async def test_saved_by_four_ranks_it_is_read_by_any_number_to_equal_bits(tmp_path: Path) -> None:
    savers = await train(MemoryCluster(4), tmp_path, steps=7)
    assert [(saver.error, saver.newest) for saver in savers] == [(None, 7)] * 4
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert (found.step, found.metadata) == (7, {"epoch": "0"})
    assert same(found.tensors, 7)
    (stored, *_) = checkpoint.stored(tmp_path)
    for world in (1, 2, 3, 8):
        parts = []
        for rank in range(world):
            first, end = rows(rank, world)
            parts.append(np.asarray(stored.read("m", offset=(first, 0), shape=(end - first, COLUMNS))))
        assert np.concatenate(parts).tobytes() == whole(7)["m"].tobytes()
    columns = np.asarray(stored.read("m", offset=(3, 2), shape=(20, 4)))  # across the bounds of those who wrote it
    assert np.array_equal(columns, whole(7)["m"][3:23, 2:6])
    assert stored.load("n2").tensors["position"].tolist() == [7, 2]
    with pytest.raises(LocalError, match="no tensor 'position'"):
        stored.read("position")


async def test_what_all_hold_is_written_once_and_divided(tmp_path: Path) -> None:
    big = np.arange(600_000, dtype=np.float64)
    cluster = MemoryCluster(3, step=1)

    async def rank(job: MemoryJob) -> None:
        saver = Checkpointer(job, tmp_path, every=1)
        await saver.finish(lambda: Contents({"big": big}))
        saver.raise_last()

    await asyncio.gather(*map(rank, cluster.jobs))
    sizes = sorted(path.stat().st_size for path in files(tmp_path, "*.safetensors"))
    assert len(sizes) == 3
    assert sum(sizes) < big.nbytes * 1.01
    assert sizes[-1] < big.nbytes * 0.45
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert np.asarray(found.tensors["big"]).tobytes() == big.tobytes()


async def test_a_reader_reads_no_more_than_the_pieces_that_it_needs(tmp_path: Path) -> None:
    await train(MemoryCluster(4), tmp_path, steps=3)
    (stored, *_) = checkpoint.stored(tmp_path)
    for path in files(tmp_path, f"step-{stored.step:08d}.r0003.*"):
        path.unlink()
    first, end = rows(1, 4)
    part = stored.read("m", offset=(first, 0), shape=(end - first, COLUMNS))
    assert np.array_equal(np.asarray(part), whole(3)["m"][first:end])
    with pytest.raises(CheckpointError, match=r"r0003"):
        stored.read("m")


async def test_the_state_may_change_while_it_is_written(tmp_path: Path) -> None:
    """What is written is the state after the step, though every later step changes the same memory."""
    cluster = MemoryCluster(2)

    async def rank(job: MemoryJob) -> None:
        saver = Checkpointer(job, tmp_path, every=1, keep=100)
        numbers, tensor = np.zeros(2000), torch.zeros(2000)
        contents = Contents({"n": numbers, "t": tensor})
        for _ in range(12):
            async with job.step() as step:
                await saver.in_step(step, lambda: contents)
                np.add(numbers, 1, out=numbers)
                tensor.add_(1)
        await saver.finish(lambda: contents)

    await asyncio.gather(*map(rank, cluster.jobs))
    found = list(checkpoint.stored(tmp_path))
    assert len(found) >= 2
    for each in found:
        values = each.load().tensors
        assert np.unique(np.asarray(values["n"])).tolist() == [each.step]
        assert np.unique(values["t"].numpy()).tolist() == [each.step]


class Writes:
    """Stands in for `write_share`: which memory each write read, and writes that wait to be let go on."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.memory: list[dict[int, None]] = []
        self.held = threading.Event()
        self.begun = threading.Event()
        self.hold = self.fail = False
        patch.setattr(checkpointer, "write_share", self)

    def __call__(self, storage: Any, **what: Any) -> Any:
        pages = [address // 64 for _, _, data in what["pieces"] for address in (self.first(data), self.last(data))]
        self.memory.append(dict.fromkeys(pages))
        self.begun.set()
        if self.hold:
            self.hold = False
            assert self.held.wait(60)
        if self.fail:
            raise OSError(5, "Input/output error")
        return write_share(storage, **what)

    @staticmethod
    def first(data: memoryview) -> int:
        found: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return found

    @classmethod
    def last(cls, data: memoryview) -> int:
        return cls.first(data) + data.nbytes - 1


async def test_the_memory_of_the_copy_is_used_again_and_each_checkpoint_has_the_bits_of_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    await train(MemoryCluster(1), tmp_path, steps=12, keep=100)
    assert len(writes.memory) >= 3
    assert all(memory == writes.memory[0] for memory in writes.memory)
    for each in checkpoint.stored(tmp_path):
        assert same({name: each.read(name) for name in whole(each.step)}, each.step)


async def test_memory_that_a_writer_still_reads_is_not_used_by_the_checkpoint_of_the_next_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The view ends while the file of its checkpoint is written; the next one takes a checkpoint at once."""
    writes = Writes(monkeypatch)
    writes.hold = True
    cluster = MemoryCluster(1)
    (job,) = cluster.jobs
    saver = Checkpointer(job, tmp_path, every=2, keep=100)
    copied = []

    async def steps(until: int) -> None:
        while job.committed_step < until:
            async with job.step() as step:
                await saver.in_step(step, lambda: held(job.committed_step, job))

    def lend(self: Any, sizes: Any) -> Any:
        loan = honest(self, sizes)
        copied.append(dict.fromkeys(at // 64 for data in loan.pieces for at in (Writes.first(data), Writes.last(data))))
        return loan

    honest = CopyMemory.lend
    monkeypatch.setattr(CopyMemory, "lend", lend)
    await steps(3)  # that of step 2 is begun in step 3
    await asyncio.to_thread(writes.begun.wait, 60)
    assert len(copied) == 1
    cluster.view.view_id += 1
    await steps(7)
    assert len(copied) == 2
    assert not copied[0].keys() & copied[1].keys()
    writes.held.set()
    await saver.finish(lambda: held(job.committed_step, job))
    saver.raise_last()
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert same({name: found.tensors[name] for name in whole(7)}, 7)


async def test_after_a_write_that_failed_or_was_not_waited_for_memory_is_not_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    given: list[object] = []
    monkeypatch.setattr(CopyMemory, "take_back", lambda self, whole: given.append(whole))
    (job,) = MemoryCluster(1, step=4).jobs
    saver = Checkpointer(job, tmp_path, every=1)
    writes.fail = True
    await saver.finish(lambda: held(4, job))
    assert "Input/output error" in str(saver.error)
    assert given == []
    writes.fail, writes.hold = False, True
    writes.begun.clear()
    finishing = asyncio.ensure_future(saver.finish(lambda: held(5, job)))
    job.committed_step = 5
    await asyncio.to_thread(writes.begun.wait, 60)
    assert saver._work is not None
    saver._work.cancel()  # the thread goes on, and reads
    await asyncio.wait([saver._work])
    finishing.cancel()
    await asyncio.wait([finishing])
    writes.held.set()
    assert given == []


async def test_with_a_disk_for_each_rank_each_holds_all_that_its_rank_holds(tmp_path: Path) -> None:
    cluster = MemoryCluster(3, step=4)

    async def rank(job: MemoryJob) -> None:
        saver = Checkpointer(job, tmp_path / job.node, every=1, shared=False)
        await saver.finish(lambda: held(4, job))
        saver.raise_last()

    await asyncio.gather(*map(rank, cluster.jobs))
    for job in cluster.jobs:
        (stored,) = checkpoint.stored(tmp_path / job.node)
        common = {name: stored.read(name) for name in ("w", "half", "count", "none")}
        assert checkpoint.digest(common) == checkpoint.digest({name: whole(4)[name] for name in common})
        first, end = rows(job.rank, 3)
        mine = stored.read("m", offset=(first, 0), shape=(end - first, COLUMNS))
        assert np.array_equal(np.asarray(mine), whole(4)["m"][first:end])
        with pytest.raises(CheckpointError, match="cannot read"):
            stored.read("m")


async def test_disks_that_are_not_shared_though_it_is_said_are_noticed_and_nothing_is_complete(tmp_path: Path) -> None:
    cluster = MemoryCluster(2, step=4)

    async def rank(job: MemoryJob) -> Checkpointer:
        saver = Checkpointer(job, tmp_path / job.node, every=1)
        await saver.finish(lambda: held(4, job))
        return saver

    for saver in await asyncio.gather(*map(rank, cluster.jobs)):
        with pytest.raises(CheckpointError, match=r"the file that n1 wrote is not seen from n0.*shared=False"):
            saver.raise_last()
    assert files(tmp_path, "*.manifest.json") == []


async def test_a_rank_that_is_lost_takes_the_checkpoint_under_way_along_and_the_next_view_takes_another(
    tmp_path: Path,
) -> None:
    before = MemoryCluster(3)
    await train(before, tmp_path, steps=4)
    torn = MemoryCluster(3, view=2, step=10)

    async def rank(job: MemoryJob) -> None:
        saver = Checkpointer(job, tmp_path, every=2, resumed_from=4)
        for _ in range(2):
            async with job.step() as step:
                await saver.in_step(step, lambda: held(10, job))
                await saver.settle()
                if step.number == 12:
                    await torn.lose()

    with pytest.raises(PeerError):
        await asyncio.gather(*map(rank, torn.jobs))
    assert len(files(tmp_path, "step-00000010.*")) == 3
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert same(found.tensors, 4)
    await train(MemoryCluster(2, view=3, step=10), tmp_path, steps=12, resumed_from=4)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert same(found.tensors, 12)
    left = {path.name[:13] for path in files(tmp_path, "step-00000010.*.safetensors")}
    assert left == {path.name[:13] for path in files(tmp_path, "step-00000010.manifest.json")}


async def test_the_newest_that_all_ranks_can_read_is_restored(tmp_path: Path) -> None:
    await train(MemoryCluster(4), tmp_path, steps=9, every=3)
    steps = sorted(each.step for each in checkpoint.stored(tmp_path))
    (damaged, *_) = files(tmp_path, f"step-{steps[-1]:08d}.r0002.*")
    data = bytearray(damaged.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte after the header: of the moments
    damaged.write_bytes(data)

    async def restored(world: int) -> list[Any]:
        async def rank(job: MemoryJob) -> Any:
            first, end = rows(job.rank, world)

            async def mine(stored: FetchedCheckpoint) -> Any:
                return np.asarray(await stored.read("m", offset=(first, 0), shape=(end - first, COLUMNS)))

            saver = Checkpointer(job, tmp_path, every=3)
            return await saver.restore(mine)

        return list(await asyncio.gather(*map(rank, MemoryCluster(world).jobs)))

    for world in (1, 3, 8):
        found = await restored(world)
        assert [step for step, _ in found] == [steps[-2]] * world
        assert np.array_equal(np.concatenate([part for _, part in found]), whole(steps[-2])["m"])
    for path in files(tmp_path, "*.safetensors"):
        path.write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="no checkpoint that all ranks can read"):
        await restored(2)
    for path in files(tmp_path, "*"):
        path.unlink()
    assert await restored(2) == [None, None]


async def test_contents_that_differ_between_ranks_complete_nothing_and_are_named(tmp_path: Path) -> None:
    for other, said in (
        (Contents({"w": np.zeros(4)}), "tensor 'w'"),
        (Contents({"w": np.zeros(3)}, {"a": "b"}), "metadata"),
    ):
        cluster = MemoryCluster(2, step=4)

        async def rank(job: MemoryJob, other: Contents = other) -> str:
            saver = Checkpointer(job, tmp_path, every=1)
            await saver.finish(lambda: other if job.rank else Contents({"w": np.zeros(3)}))
            return str(saver.error)

        errors = await asyncio.gather(*map(rank, cluster.jobs))
        assert errors[0] == errors[1]
        assert said in errors[0]
    assert list(checkpoint.stored(tmp_path)) == []


# Crashes, at every operation of the disk in turn. All ranks and the disk are one machine, which loses power


def new_disk(seed: int) -> SimDisk:
    return SimDisk(random.Random(seed), now_ns=lambda: 0)


async def run_on(disk: SimDisk, monkeypatch: pytest.MonkeyPatch, *, world: int, first: int) -> int:
    """Train from `first` on until the disk goes down; the newest checkpoint that a rank was told to be complete."""
    savers: list[Checkpointer] = []
    down = asyncio.Event()

    async def here(saver: Checkpointer, function: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except Halted:
            down.set()  # this process is dead: nothing of it goes on
            await asyncio.Event().wait()

    monkeypatch.setattr(Checkpointer, "_in_thread", here)
    cluster = MemoryCluster(world, view=first + 1, step=first)

    async def rank(job: MemoryJob) -> None:
        saver = Checkpointer(job, FOLDER, every=1, keep=2, disk=disk, resumed_from=first)
        savers.append(saver)
        while job.committed_step < first + 9:
            async with job.step() as step:
                await saver.in_step(step, lambda: held(job.committed_step, job))
            for _ in range(4):
                await asyncio.sleep(0)

    running = [asyncio.ensure_future(rank(job)) for job in cluster.jobs]
    waiting = asyncio.ensure_future(down.wait())
    await asyncio.wait([asyncio.gather(*running), waiting], return_when=asyncio.FIRST_COMPLETED)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    return max(saver.newest for saver in savers)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DiskFailure.POWER_LOSS, DiskFailure.KILL])
async def test_after_a_crash_at_any_operation_the_newest_or_the_one_before_is_found_whole(
    fault: DiskFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = new_disk(0)
    await run_on(disk, monkeypatch, world=2, first=0)
    operations = disk.operations
    assert operations > 30
    kinds = set()
    for after in range(operations):
        disk = new_disk(after)
        disk.arm(fault, after=after)
        told = await run_on(disk, monkeypatch, world=2, first=0)
        assert disk.is_down
        disk.restart()
        found = checkpoint.latest(FOLDER, disk=disk)
        step = 0 if found is None else found.step
        assert step >= told, after
        assert found is None or same(found.tensors, step), after
        kinds.add(step > told)
        if after % 7 == 0:  # and the next process, of another world size, goes on from there
            told = await run_on(disk, monkeypatch, world=3, first=step)
            found = checkpoint.latest(FOLDER, disk=disk)
            assert found is not None
            assert found.step >= told > step
            assert same(found.tensors, found.step)
            manifests = [name for name in disk.names(Path(FOLDER)) if name.endswith(".json")]
            assert len(manifests) <= 3
    assert kinds == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [DiskFailure.SYNC_ERROR, DiskFailure.WRITE_ERROR])
async def test_a_disk_that_fails_at_any_operation_costs_one_checkpoint_at_most(
    fault: DiskFailure, monkeypatch: pytest.MonkeyPatch
) -> None:
    for after in range(0, 40, 3):
        disk = new_disk(after)
        disk.arm(fault, after=after)
        told = await run_on(disk, monkeypatch, world=2, first=0)
        disk.crash()
        disk.restart()
        found = checkpoint.latest(FOLDER, disk=disk)
        assert found is not None
        assert found.step >= told >= 1
        assert same(found.tensors, found.step)


@pytest.mark.parametrize("seed", range(12))
async def test_a_rotten_bit_anywhere_costs_the_newest_checkpoint_at_most(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = new_disk(seed)
    told = await run_on(disk, monkeypatch, world=3, first=0)
    where = disk.rot()
    assert where is not None
    found = checkpoint.latest(FOLDER, disk=disk)
    assert found is not None
    assert same(found.tensors, found.step)
    newest = max(int(name[5:13]) for name in disk.names(Path(FOLDER)) if name.endswith(".json"))
    assert newest >= told
    assert (found.step == newest) == (f"step-{newest:08d}" not in where)
