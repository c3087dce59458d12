"""A disk for each rank: what a rank needs and its disk does not have comes from the others' disks (S7, S8, A5)."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from memory_job import MemoryCluster, MemoryJob

from quicoll.checkpoint import Contents, Local, Shard
from quicoll.checkpoint.lending import CopyMemory
from quicoll.errors import CheckpointError, LocalError, PeerError
from quicoll.train import Checkpointer, copies, fetching

if TYPE_CHECKING:
    from quicoll.train.fetching import FetchedCheckpoint

ROWS, COLUMNS = 48, 1000
STEP = 12


def moments(step: int) -> Any:
    return np.random.default_rng(step).standard_normal((ROWS, COLUMNS))


def weights(step: int) -> Any:
    return np.random.default_rng(-step % 1000).standard_normal(3000).astype(np.float32)


def bounds(rank: int, world: int) -> tuple[int, int]:
    return ROWS * rank // world, ROWS * (rank + 1) // world


def held(job: MemoryJob, step: int) -> Contents:
    first, end = bounds(job.rank, job.world_size)
    m = Shard(moments(step)[first:end], shape=(ROWS, COLUMNS), offset=(first, 0))
    return Contents({"m": m, "w": weights(step), "position": Local(np.array([step, job.rank]))}, {"epoch": "3"})


async def saved(place: Path, nodes: str, *, copies: int = 1, step: int = STEP) -> list[Checkpointer]:
    """A checkpoint by these nodes, each with a disk of its own."""

    async def rank(job: MemoryJob) -> Checkpointer:
        saver = Checkpointer(job, place / job.node, every=1, shared=False, copies=copies)
        await saver.finish(lambda: held(job, step))
        saver.raise_last()
        return saver

    return list(await asyncio.gather(*map(rank, MemoryCluster(len(nodes), step=step, nodes=nodes).jobs)))


async def part_of(stored: FetchedCheckpoint, rank: int, world: int) -> tuple[Any, Any, int]:
    first, end = bounds(rank, world)
    m, w = await asyncio.gather(
        stored.read("m", offset=(first, 0), shape=(end - first, COLUMNS)), stored.read("w")
    )  # fmt: skip
    return np.asarray(m), np.asarray(w), stored.step


async def restored(place: Path, nodes: str, cluster: MemoryCluster | None = None) -> list[Any]:
    cluster = cluster or MemoryCluster(len(nodes), nodes=nodes)

    async def rank(job: MemoryJob) -> Any:
        saver = Checkpointer(job, place / job.node, every=1, shared=False)
        return await saver.restore(lambda stored: part_of(stored, job.rank, job.world_size))

    return list(await asyncio.gather(*map(rank, cluster.jobs)))


def names(place: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in place.rglob(pattern))


def right(found: list[Any], step: int = STEP) -> bool:
    m = np.concatenate([part for _, (part, _, _) in found])
    alike = all(np.array_equal(w, weights(step)) for _, (_, w, _) in found)
    return alike and m.tobytes() == moments(step).tobytes() and {number for number, _ in found} == {step}


@pytest.mark.parametrize("nodes", ["abcd", "dcba", "abcdefgh", "xyzdabc"])
async def test_what_four_nodes_saved_is_restored_on_more_and_other_ranks_if_their_disks_are_there(
    nodes: str, tmp_path: Path
) -> None:
    await saved(tmp_path, "abcd")
    assert right(await restored(tmp_path, nodes))


@pytest.mark.parametrize("nodes", ["ab", "xa", "bcd"])
async def test_a_shard_on_no_disk_that_is_there_is_named_with_who_wrote_it(nodes: str, tmp_path: Path) -> None:
    await saved(tmp_path, "abcd")
    with pytest.raises(CheckpointError, match=r"tensor 'm', which \w wrote, can be read on no rank's disk"):
        await restored(tmp_path, nodes)


@pytest.mark.parametrize(("lost", "nodes"), [("b", "acd"), ("a", "bcdxy"), ("d", "dabc"), ("bd", "ac")])
async def test_with_two_copies_the_loss_of_any_disk_loses_nothing(lost: str, nodes: str, tmp_path: Path) -> None:
    await saved(tmp_path, "abcd", copies=2)
    for node in lost:
        for path in (tmp_path / node).iterdir():
            path.unlink()
    found = await restored(tmp_path, nodes)
    assert right(found)
    assert names(tmp_path, "*.tmp") == []  # what came is put away again


async def test_what_is_a_nodes_own_is_copied_and_found_on_the_disk_of_another(tmp_path: Path) -> None:
    await saved(tmp_path, "abc", copies=2)
    for path in (tmp_path / "b").iterdir():
        path.unlink()

    async def rank(job: MemoryJob) -> Any:
        saver = Checkpointer(job, tmp_path / job.node, every=1, shared=False)
        return await saver.restore(lambda stored: stored.read("position", node=job.node))

    found = await asyncio.gather(*map(rank, MemoryCluster(3, nodes="abc").jobs))
    assert [np.asarray(value).tolist() for _, value in found] == [[STEP, 0], [STEP, 1], [STEP, 2]]


async def test_a_damaged_file_is_made_good_by_a_copy_and_without_one_the_checkpoint_before_is_taken(
    tmp_path: Path,
) -> None:
    def damage(node: str, step: int, part: float = 0.5) -> None:
        (path,) = (tmp_path / node).glob(f"step-{step:08d}.r*")
        data = bytearray(path.read_bytes())
        data[int(part * len(data))] ^= 1
        path.write_bytes(data)

    await saved(tmp_path, "abc", copies=2, step=STEP)
    await saved(tmp_path, "abc", copies=2, step=STEP + 1)
    damage("b", STEP + 1)
    assert right(await restored(tmp_path, "abc"), STEP + 1)
    for node in "bc":  # the headers: b's shard is in both files
        damage(node, STEP + 1, 0.0)
    assert right(await restored(tmp_path, "abc"), STEP)


async def test_several_disks_share_the_work_of_what_all_of_them_have(tmp_path: Path) -> None:
    await saved(tmp_path, "abcd")
    cluster = MemoryCluster(8, nodes="abcdwxyz")
    assert right(await restored(tmp_path, "", cluster))
    given = [sum(count for (giver, _), count in cluster.bytes.items() if giver == rank) for rank in range(8)]
    # Who gives how much depends on which disk has answered by then: all of them give, and none gives most of it.
    assert min(given[:4]) > 0
    assert max(given[:4]) < 0.5 * sum(given)
    assert max(given[4:]) < 20_000  # the manifest goes from one to the next
    m, w = moments(STEP).nbytes, weights(STEP).nbytes
    pieces = 7 * m / 4 + 4 * w  # each rank but one needs a shard that is on another's disk; four have no weights
    assert pieces <= sum(given) < pieces + 20_000  # nothing comes twice


async def test_a_restore_that_was_cut_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tensors, one after the other; a rank is lost while the second one is on its way."""
    nodes = "abcx"
    await saved(tmp_path, "abc")
    first = MemoryCluster(4, nodes=nodes)
    asked = asyncio.Event()

    async def one_by_one(stored: FetchedCheckpoint) -> Any:
        w = await stored.read("w")
        asked.set()
        return np.asarray(w), np.asarray(await stored.read("m"))

    async def rank(job: MemoryJob) -> Any:
        saver = Checkpointer(job, tmp_path / job.node, every=1, shared=False)
        return await saver.restore(one_by_one if job.node == "x" else lambda stored: stored.read("w"))

    async def cut() -> None:
        await asked.wait()
        await first.lose()

    with pytest.raises(PeerError):
        await asyncio.gather(cut(), *map(rank, first.jobs))
    for _ in range(10):
        await asyncio.sleep(0)
    kept = [path.name for path in (tmp_path / "x").iterdir()]
    assert len(kept) == 1
    assert kept[0].startswith(f".step-{STEP:08d}.")
    second = MemoryCluster(4, nodes=nodes)
    asked.clear()
    found = await asyncio.gather(*map(rank, second.jobs))
    assert [step for step, _ in found] == [STEP] * 4
    w, m = found[3][1]
    assert np.array_equal(w, weights(STEP))
    assert np.array_equal(m, moments(STEP))
    came = sum(count for (_, to), count in second.bytes.items() if to == 3)
    assert m.nbytes < came < m.nbytes + w.nbytes
    assert list((tmp_path / "x").iterdir()) == []


async def test_more_than_a_round_takes_comes_in_several_and_no_rank_holds_more_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quicoll.checkpoint.exchange.PORTION", 20_000)
    monkeypatch.setattr("quicoll.checkpoint.planning.MOST", 8_000)
    await saved(tmp_path, "abc")
    rounds: list[int] = []
    planned = fetching.planned_moves

    def recorded(manifest: Any, *rest: Any) -> Any:
        plan, nowhere = planned(manifest, *rest)
        for rank in range(4):
            size = sum(manifest.pieces[move.piece].nbytes for move in plan if move.receiver == rank)
            rounds.append(size)
        return plan, nowhere

    monkeypatch.setattr(fetching, "planned_moves", recorded)
    assert right(await restored(tmp_path, "xabc"))
    assert max(rounds) <= 20_000
    assert len(rounds) > 4 * 3


async def test_a_manifest_comes_to_nodes_that_have_none_and_a_newer_one_that_cannot_be_read_is_passed_over(
    tmp_path: Path,
) -> None:
    await saved(tmp_path, "ab")
    await saved(tmp_path, "c", step=STEP + 5)
    for path in (tmp_path / "c").glob("*.safetensors"):
        path.unlink()
    assert right(await restored(tmp_path, "xabc"))
    assert await restored(tmp_path, "uvw") == [None] * 3


async def test_a_reader_that_fails_fails_for_all_and_says_where(tmp_path: Path) -> None:
    await saved(tmp_path, "ab")

    async def rank(job: MemoryJob) -> Any:
        saver = Checkpointer(job, tmp_path / job.node, every=1, shared=False)
        return await saver.restore(lambda stored: stored.read("none" if job.rank else "w"))

    with pytest.raises(CheckpointError, match=r"b: the checkpoint of step 12 has no tensor 'none'"):
        await asyncio.gather(*map(rank, MemoryCluster(2, nodes="ab").jobs))


async def test_copies_are_for_disks_of_their_own(tmp_path: Path) -> None:
    job = MemoryCluster(2).jobs[0]
    for options in ({"copies": 2}, {"copies": 0, "shared": False}):
        with pytest.raises(LocalError, match="copies"):
            Checkpointer(job, tmp_path, every=1, **options)


async def copied(place: Path, **options: Any) -> list[BaseException | None]:
    """The beginning of a checkpoint with second copies by three ranks; what each of them raises."""

    async def rank(job: MemoryJob) -> None:
        saver = Checkpointer(job, place / job.node, every=1, shared=False, copies=2, **options)
        async with job.step() as step:
            await saver.in_step(step, lambda: held(job, STEP))
        await saver.settle()

    jobs = MemoryCluster(3, step=STEP, nodes="abc").jobs
    return list(await asyncio.gather(*map(rank, jobs), return_exceptions=True))


def given(extent: tuple[int, ...], **changed: Any) -> dict[str, Any]:
    """A piece as a giver tells of it."""
    offset = (0,) * len(extent)
    piece = {
        "name": "m", "node": "", "code": "F64", "shape": extent, "part_offset": offset, "part_shape": extent,
        "torch": False, "offset": offset, "extent": extent, "digest": bytes(16),
    }  # fmt: skip
    return {**piece, **changed}


MIB = 1 << 20
HOSTILE = (
    ("more than memory", [given((1 << 40,))], r"gives 8796093022208 bytes as second copies, and a rank gives 1048576"),
    ("a byte too much", [given((MIB + 1,), code="U8")], r"gives 1048577 bytes as second copies"),
    ("many that are small", [given((1024,))] * 129, r"gives 1056768 bytes as second copies"),
    ("beyond 64 bits", [given((1 << 62, 1 << 62))], r"gives \d{39} bytes as second copies"),
    ("two that overlap", [given((MIB // 8,))] * 2, r"gives 2097152 bytes as second copies"),
    ("nothing", [given((0, 4))], r"of which it holds"),
    (
        "what it does not hold",
        [given((4,), shape=(9,), offset=(5,))],
        r"told of \[5:9\] of tensor 'm', of which it holds",
    ),
    ("beyond its tensor", [given((4,), shape=(3,))], r"told of a shard that cannot be: tensor 'm'"),
    ("another dtype", [given((4,), code="F3")], r"told of a shard that cannot be: 'F3'"),
    ("dimensions", [given((1,) * 65)], r"no list of shards"),
    ("a negative length", [given((-4, -4))], r"no list of shards"),
    ("no list", 7, r"no list of shards"),
)


@pytest.mark.parametrize(("told", "said"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
async def test_a_giver_of_copies_that_names_too_much_is_refused_by_all_before_memory_is_taken(
    told: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent: list[int] = []
    lend = CopyMemory.lend

    def recorded(self: CopyMemory, sizes: Any) -> Any:
        lent.append(sum(sizes))
        return lend(self, sizes)

    monkeypatch.setattr(CopyMemory, "lend", recorded)
    honest = copies._told
    pieces = msgspec.msgpack.encode([list(each.values()) for each in told] if isinstance(told, list) else told)

    def hostile(own: Any) -> bytes:
        return pieces if any(part.node == "b" for part, _, _ in own) else honest(own)

    monkeypatch.setattr(copies, "_told", hostile)
    errors = await copied(tmp_path, copy_limit=MIB)
    for error in errors:
        assert isinstance(error, PeerError)
        assert error.rank == 1
        assert re.search(said, str(error)), error
    assert len(lent) == 3  # of each rank's own state
    assert max(lent) < MIB


async def test_a_rank_whose_own_shards_are_above_the_limit_says_so_before_it_tells_anything(tmp_path: Path) -> None:
    nbytes = 16 * COLUMNS * 8 + 2 * 8  # of each rank's rows, and of its position
    assert await copied(tmp_path / "as many", copy_limit=nbytes) == [None] * 3
    errors = await copied(tmp_path / "one fewer", copy_limit=nbytes - 1)
    for error in errors:
        assert isinstance(error, LocalError)
        assert f"the shards of this rank have {nbytes} bytes" in str(error)
        assert "a larger copy_limit, on all ranks, allows more" in str(error)
    with pytest.raises(LocalError, match="copy_limit is 1 byte or more"):
        Checkpointer(MemoryCluster(2).jobs[0], tmp_path, every=1, shared=False, copies=2, copy_limit=0)


async def test_ranks_that_hold_other_bits_of_what_all_hold_complete_nothing(tmp_path: Path) -> None:
    async def rank(job: MemoryJob) -> str:
        saver = Checkpointer(job, tmp_path / job.node, every=1, shared=False)
        await saver.finish(lambda: Contents({"w": np.full(5, job.rank)}))
        return str(saver.error)

    errors = await asyncio.gather(*map(rank, MemoryCluster(2, step=3, nodes="ab").jobs))
    assert "[0:5] of tensor 'w' has other bits on b than on a" in errors[0]
    assert names(tmp_path, "*.manifest.json") == []
