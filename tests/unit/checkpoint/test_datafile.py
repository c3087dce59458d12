"""Reading pieces: right bits or an error, whatever of the pieces is damaged, and however they overlap."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quicoll import checkpoint
from quicoll.checkpoint import digesting
from quicoll.checkpoint.datafile import PieceReader, write_share
from quicoll.checkpoint.disk import OsDisk
from quicoll.checkpoint.manifest import CheckpointManifest, merged
from quicoll.checkpoint.parts import Shard, bytes_of, parts_of
from quicoll.checkpoint.regions import Region, uncovered
from quicoll.checkpoint.storage import DiskStorage
from quicoll.errors import CheckpointError
from quicoll.sim.disk.disk import SimDisk

FOLDER = Path("/data/c")


def tensor(shape: tuple[int, ...]) -> Any:
    return np.random.default_rng(len(shape)).integers(1, 1 << 30, shape, np.int64)


def box(rng: random.Random, shape: tuple[int, ...]) -> Region:
    begins = [rng.randrange(length) for length in shape]
    return Region(
        tuple(begins),
        tuple(rng.randint(1, length - begin) for length, begin in zip(shape, begins, strict=True)),
    )


def written(storage: DiskStorage, whole: Any, regions: Iterable[Region]) -> CheckpointManifest:
    """Each region as a piece of its own rank's file."""
    shares = []
    for rank, region in enumerate(regions):
        held = Shard(whole[region.slices()], shape=whole.shape, offset=region.offset)
        parts = parts_of({"x": held}, node=f"n{rank}")
        pieces = [(part, part.region, bytes_of(part, part.region)) for part in parts]
        shares.append(write_share(storage, step=3, rank=rank, node=f"n{rank}", parts=parts, pieces=pieces, metadata={}))
    return merged(shares, step=3, view=1, metadata={})


class Late(Future[str]):
    """A digest that is there when somebody waits for it, and by itself only now and then."""

    def __init__(self, rng: random.Random, data: bytes | memoryview) -> None:
        super().__init__()
        self._rng, self._data = rng, data

    def done(self) -> bool:
        if not super().done() and self._rng.random() < 0.05:
            self.result()
        return super().done()

    def result(self, timeout: float | None = None) -> str:
        if not super().done():
            self.set_result(digesting.digest_of(self._data))
        return super().result()


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_any_region_is_right_or_refused_whatever_is_damaged(
    seed: int, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if threads:
        monkeypatch.setattr(digesting, "_SMALL", 0)
    read_what_may_be_damaged(seed)


def test_so_it_is_where_digests_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a busy processor: many pieces have been read by then."""
    for seed in range(400):
        late = random.Random(seed)
        monkeypatch.setattr(digesting.Digesting, "begin", lambda self, data, late=late: Late(late, data))
        read_what_may_be_damaged(seed)


def read_what_may_be_damaged(seed: int) -> None:
    """Pieces that overlap in any way, some of them damaged. The oracle: which regions are in pieces that are whole."""
    rng = random.Random(seed)
    disk = SimDisk(random.Random(seed), now_ns=lambda: 0)
    storage = DiskStorage(FOLDER, disk)
    shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 3)))
    whole = tensor(shape)
    boxes = list(dict.fromkeys([*(box(rng, shape) for _ in range(rng.randint(1, 8))), Region.whole(shape)]))
    rng.shuffle(boxes)
    copied = [each for each in boxes for _ in range(rng.choice((1, 1, 2)))]
    manifest = written(storage, whole, copied)
    right = []
    for piece in manifest.pieces:
        file = manifest.files[piece.file].name
        damage = rng.random()
        data = bytearray(storage.read(file))
        if damage < 0.25:
            data[piece.at + rng.randrange(piece.nbytes)] ^= 1 << rng.randrange(8)
        elif damage < 0.35:
            data = data[:-1]
        elif damage < 0.4:
            data[rng.randrange(piece.at)] ^= 2
        else:
            right.append(piece.region)
        storage.write(file, [bytes(data)])
    for _ in range(6):
        wanted = [box(rng, shape) for _ in range(rng.randint(1, 3))]
        reader = PieceReader(storage, manifest)
        if all(uncovered(each, right) is None for each in wanted):
            found = reader.regions([(0, each) for each in wanted])
            for region, value in zip(wanted, found, strict=True):
                assert np.array_equal(np.asarray(value), whole[region.slices()])
        else:
            with pytest.raises(CheckpointError):
                reader.regions([(0, each) for each in wanted])


@pytest.mark.parametrize("place", [4, 5, 6, 9])
def test_a_damaged_piece_overwrites_nothing_that_is_right(place: int) -> None:
    """It lies over the end of one that is there already, and what is missing then comes from a third."""
    storage = DiskStorage(FOLDER, SimDisk(random.Random(1), now_ns=lambda: 0))
    whole = tensor((10,))
    manifest = written(storage, whole, [Region((0,), (6,)), Region((4,), (6,)), Region((6,), (4,))])
    (damaged,) = [piece for piece in manifest.pieces if piece.offset == (4,)]
    name = manifest.files[damaged.file].name
    data = bytearray(storage.read(name))
    data[damaged.at + 8 * (place - 4)] ^= 1
    storage.write(name, [bytes(data)])
    found = PieceReader(storage, manifest).region(0, Region.whole((10,)))
    assert np.array_equal(np.asarray(found), whole)


def test_each_piece_has_the_sha_256_of_its_bytes_in_the_file(tmp_path: Path) -> None:
    """Beside the disk or at once, by size: anybody can compute it from the file."""
    tensors = {"small": np.arange(5), "large": np.random.default_rng(1).random(300_000), "half": np.ones(9, np.float16)}
    checkpoint.save(tmp_path, step=1, tensors=tensors)
    (stored,) = checkpoint.stored(tmp_path)
    data = (tmp_path / stored.manifest.files[0].name).read_bytes()
    assert len(stored.manifest.pieces) == 3
    for piece in stored.manifest.pieces:
        assert piece.digest == hashlib.sha256(data[piece.at : piece.at + piece.nbytes]).hexdigest()
    assert stored.load().digest == checkpoint.digest(tensors)


def test_no_thread_reads_the_memory_any_more_when_a_write_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails while the first digests are made and others wait for their turn."""
    begun, finished = threading.Event(), []
    honest = digesting.digest_of

    def slow(data: bytes | memoryview) -> str:
        begun.set()
        found = "".join(honest(data) for _ in range(20))
        finished.append(threading.current_thread().name)
        return found

    class Failing(DiskStorage):
        def write(self, name: str, chunks: Iterable[bytes | memoryview]) -> None:
            assert begun.wait(60)
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(digesting, "digest_of", slow)
    parts = parts_of({f"t{n:02}": np.zeros(1 << 20, np.uint8) for n in range(40)}, node="")
    pieces = [(part, part.region, bytes_of(part, part.region)) for part in parts]
    with pytest.raises(CheckpointError, match="No space left"):
        write_share(Failing(tmp_path, OsDisk()), step=1, rank=0, node="", parts=parts, pieces=pieces, metadata={})
    assert finished
    assert not [each for each in threading.enumerate() if each.name.startswith("quicoll-digest")]


class Spoiling(DiskStorage):
    """A disk that changes what is put aside."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(FOLDER, disk)
        self.spoils = 0

    def read_into(self, name: str, start: int, memory: memoryview) -> int:
        came = super().read_into(name, start, memory)
        if name.endswith(".tmp") and self.spoils:
            self.spoils -= 1
            memory[0] ^= 1
        return came


@pytest.mark.parametrize(("spoils", "good"), [(0, True), (1, True), (2, False), (1000, False)])
def test_a_piece_put_aside_that_is_damaged_there_comes_once_more_and_not_for_ever(spoils: int, good: bool) -> None:
    storage = Spoiling(SimDisk(random.Random(1), now_ns=lambda: 0))
    whole = tensor((6,))
    region = Region.whole((6,))
    manifest = written(storage, whole, [region])
    name = manifest.files[0].name
    before = PieceReader(storage, manifest)
    data = before.piece(0)
    storage.remove([name])
    before = PieceReader(storage, manifest)
    before.put_aside(0, data)  # by a process that is gone
    storage.spoils = spoils
    reader = PieceReader(storage, manifest)
    rounds, said = 0, ""
    while True:
        try:
            found = np.asarray(reader.region(0, region))
            break
        except CheckpointError as error:
            lacking = reader.lacking(0, region)
            if not lacking:
                said = str(error)
                break
            assert lacking == [0]
            reader.put_aside(0, data)
            rounds += 1
            assert rounds < 3
    assert ("cannot read the checkpoint" in said) is not good
    if good:
        assert np.array_equal(found, whole)
        reader.drop_aside()
        assert storage.names() == []
