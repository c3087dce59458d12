"""Checkpoints: whole or not there, bit for bit, and never a loss of what was there before (C5, S7)."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import random
import re
import resource
import struct
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from quicoll import checkpoint
from quicoll.checkpoint.disk import Disk, OsDisk
from quicoll.errors import CheckpointError, LocalError
from quicoll.sim.disk.disk import SimDisk

SMALL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([-0.0, np.nan])}


@pytest.fixture(params=["real", "simulated"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Disk:
    """The same tests on both disks, so that the simulated one cannot drift."""
    if request.param == "real":
        return OsDisk()
    return SimDisk(random.Random(1), now_ns=lambda: 0, directories=(tmp_path,))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def plain(name: str) -> str:
    """A name without the digits that are chance."""
    return re.sub(r"(\.r\d{4}\.)[0-9a-f]+", r"\1*", name)


def files(step: int) -> list[str]:
    """What one process leaves of a checkpoint."""
    return [f"step-{step:08d}.manifest.json", f"step-{step:08d}.r0000.*.safetensors"]


@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64"],
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3, 4)])
def test_numpy_arrays_come_back_bit_for_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(7)
    count = int(np.prod(shape))
    value = rng.bytes(count * np.dtype(dtype).itemsize)
    array = np.frombuffer(value, dtype=dtype).reshape(shape) if dtype != "bool" else rng.random(shape) > 0.5
    loaded = checkpoint.load(checkpoint.save(tmp_path, step=1, tensors={"x": np.asarray(array)}))
    back = loaded.tensors["x"]
    assert isinstance(back, np.ndarray)
    assert (back.dtype, back.shape, back.tobytes()) == (np.dtype(dtype), shape, np.asarray(array).tobytes())
    assert back.flags.writeable


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_torch_tensors_come_back_as_torch_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(7)
    width = torch.empty((), dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (*shape, width), generator=generator, dtype=torch.uint8)
    value = raw.view(dtype).reshape(shape)
    back = checkpoint.load(checkpoint.save(tmp_path, step=1, tensors={"x": value})).tensors["x"]
    assert isinstance(back, torch.Tensor)
    assert (back.dtype, back.shape) == (dtype, value.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_one_file_holds_torch_and_numpy_side_by_side(tmp_path: Path, disk: Disk) -> None:
    tensors = {"t": torch.ones(2, dtype=torch.bfloat16), "n": np.ones(2)}
    loaded = checkpoint.load(
        checkpoint.save(tmp_path, step=3, tensors=tensors, metadata={"epoch": "2"}, disk=disk), disk=disk
    )
    assert isinstance(loaded.tensors["t"], torch.Tensor)
    assert isinstance(loaded.tensors["n"], np.ndarray)
    assert (loaded.step, loaded.metadata) == (3, {"epoch": "2"})
    assert loaded.digest == checkpoint.digest(tensors)


def test_layout_in_memory_does_not_change_what_is_saved(tmp_path: Path) -> None:
    plain = np.arange(12, dtype=np.int32).reshape(3, 4)
    layouts = [np.asfortranarray(plain), plain.astype(">i4"), np.repeat(plain, 2, axis=1)[:, ::2]]
    assert {checkpoint.digest({"x": layout}) for layout in layouts} == {checkpoint.digest({"x": plain})}
    assert checkpoint.digest({"x": torch.from_numpy(plain.T.copy()).T}) == checkpoint.digest({"x": plain})
    back = checkpoint.load(checkpoint.save(tmp_path, step=0, tensors={"x": layouts[1]})).tensors["x"]
    assert np.array_equal(np.asarray(back), plain)


def test_digest_tells_apart_name_dtype_shape_and_every_bit() -> None:
    values = [
        {"x": np.zeros(4, np.float32)},
        {"y": np.zeros(4, np.float32)},
        {"x": np.zeros(4, np.int32)},
        {"x": np.zeros((2, 2), np.float32)},
        {"x": -np.zeros(4, np.float32)},
        {"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)},
        {},
    ]
    assert len({checkpoint.digest(value) for value in values}) == len(values)
    forward = {"a": np.ones(1), "b": np.zeros(1)}
    assert checkpoint.digest(forward) == checkpoint.digest(dict(reversed(forward.items())))


def test_digest_is_what_its_definition_says() -> None:
    """Digests are compared between processes and kept in reports, so the definition is spelled out a second time."""
    label, data = b'["x", "F32", [3]]', struct.pack("<3f", 0, 1, 2)
    content = struct.pack("<QQ", len(label), len(data)) + label + data
    expected = hashlib.blake2b(content, digest_size=32).hexdigest()
    assert checkpoint.digest({"x": np.arange(3, dtype=np.float32)}) == expected
    assert checkpoint.digest({"x": torch.arange(3, dtype=torch.float32)}) == expected


def test_the_data_file_is_plain_safetensors(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3, dtype=torch.uint8), "b": torch.arange(4, dtype=torch.float64)}
    checkpoint.save(tmp_path, step=9, tensors=tensors)
    (path,) = tmp_path.glob("*.safetensors")
    back = safetensors.torch.load_file(path)
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert sorted(safetensors.numpy.load_file(path)) == ["a", "b"]


@pytest.mark.slow
def test_a_flipped_bit_in_any_byte_is_found(tmp_path: Path) -> None:
    """Of the manifest and of the data: what loads is what was saved, or the file is named."""
    path = checkpoint.save(tmp_path, step=120, tensors=SMALL, metadata={"note": "x"})
    for name in sorted(names(tmp_path)):
        file = tmp_path / name
        good = file.read_bytes()
        for place in range(len(good)):
            damaged = bytearray(good)
            damaged[place] ^= 1 << (place * 5 % 8)
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=re.escape(name)):
                checkpoint.load(path)
        file.write_bytes(good)
    assert checkpoint.load(path).digest == checkpoint.digest(SMALL)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, step=120, tensors=SMALL)
    for name in sorted(names(tmp_path)):
        file = tmp_path / name
        good = file.read_bytes()
        for length in range(len(good)):
            file.write_bytes(good[:length])
            with pytest.raises(CheckpointError, match=re.escape(name)):
                checkpoint.load(path)
        file.write_bytes(good)


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    foreign = tmp_path / "step-00000001.manifest.json"
    for data in (b"", b"{}", b"[1]", b'{"seal":"x","content":{}}', b"\xff", b"[" * 100_000):
        foreign.write_bytes(data)
        with pytest.raises(CheckpointError, match="manifest") as caught:
            checkpoint.load(foreign)
        assert str(foreign) in str(caught.value)
        assert caught.value.usable
    with pytest.raises(CheckpointError, match="cannot read"):
        checkpoint.load(tmp_path / "absent.manifest.json")


def test_latest_skips_a_damaged_newest_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step=step, tensors={"x": np.full(3, step)})
    (newest,) = tmp_path.glob("step-00000003.*.safetensors")
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "quicoll.checkpoint"):
        found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 2
    assert str(newest) in caplog.text


def test_latest_skips_a_file_under_another_steps_name(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, tensors=SMALL)
    Path(checkpoint.save(tmp_path, step=2, tensors=SMALL)).rename(tmp_path / "step-00000009.manifest.json")
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_the_checkpoint_of_one_step_is_read_and_no_other_is_taken_for_it(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint of step 9"):
        checkpoint.of_step(tmp_path / "missing", 9)
    with pytest.raises(CheckpointError, match="no checkpoint of step 9; there is none at all"):
        checkpoint.of_step(tmp_path, 9)
    for step in (7, 8):
        checkpoint.save(tmp_path, step=step, tensors={"w": np.full(2, step)})
    assert checkpoint.of_step(tmp_path, 7).tensors["w"].tolist() == [7, 7]
    with pytest.raises(CheckpointError, match="no checkpoint of step 9; the newest is of step 8"):
        checkpoint.of_step(tmp_path, 9)
    (tmp_path / "step-00000007.manifest.json").replace(tmp_path / "step-00000009.manifest.json")
    with pytest.raises(CheckpointError, match="it holds step 7 under the name of 9"):
        checkpoint.of_step(tmp_path, 9)


def test_latest_raises_only_when_all_are_damaged(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (1, 2):
        Path(checkpoint.save(tmp_path, step=step, tensors=SMALL)).write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints is whole"):
        checkpoint.latest(tmp_path)


def test_latest_orders_by_number_beyond_eight_digits(tmp_path: Path, disk: Disk) -> None:
    for step in (99_999_999, 100_000_000):
        checkpoint.save(tmp_path, step=step, tensors=SMALL, disk=disk)
    found = checkpoint.latest(tmp_path, disk=disk)
    assert found is not None
    assert found.step == 100_000_000


def test_only_the_newest_stay_and_foreign_names_are_left_alone(tmp_path: Path, disk: Disk) -> None:
    disk.create(tmp_path / "notes.txt", [b"mine"])
    for step in range(5):
        checkpoint.save(tmp_path, step=step, tensors=SMALL, keep=2, disk=disk)
    assert [plain(name) for name in disk.names(tmp_path)] == ["notes.txt", *files(3), *files(4)]


def test_a_damaged_newer_file_does_not_push_out_the_last_good_one(tmp_path: Path) -> None:
    Path(checkpoint.save(tmp_path, step=8, tensors=SMALL)).write_bytes(b"junk")
    checkpoint.save(tmp_path, step=5, tensors=SMALL, keep=1)
    assert [plain(name) for name in names(tmp_path)] == [*files(5), *files(8)]


def test_a_killed_writers_leftover_goes_and_a_live_writers_file_stays(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".step-00000001.manifest.json.aa.tmp", tmp_path / ".step-00000002.manifest.json.bb.tmp"
    for path in (old, fresh):
        path.write_bytes(b"part")
    os.utime(old, (0, 0))
    checkpoint.save(tmp_path, step=3, tensors=SMALL)
    assert [plain(name) for name in names(tmp_path)] == [fresh.name, *files(3)]


@contextmanager
def fsync_fails(patch: pytest.MonkeyPatch, code: int) -> Iterator[None]:
    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    with patch.context() as here:
        here.setattr(os, "fsync", fail)
        yield


@contextmanager
def no_more_room(patch: pytest.MonkeyPatch, code: int) -> Iterator[None]:
    """A real refusal by the kernel in the middle of the write: EFBIG from the limit on a file's size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def rename_fails(patch: pytest.MonkeyPatch, code: int) -> Iterator[None]:
    def fail(source: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code))

    with patch.context() as here:
        here.setattr(Path, "replace", fail)
        yield


@pytest.mark.parametrize(
    ("failure", "code"),
    [(fsync_fails, errno.ENOSPC), (no_more_room, errno.EFBIG), (rename_fails, errno.EACCES), (fsync_fails, errno.EIO)],
)
def test_a_failed_save_leaves_everything_as_it_was(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: Callable[[pytest.MonkeyPatch, int], AbstractContextManager[None]],
    code: int,
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path, step=step, tensors=SMALL, keep=2)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    large = {"x": np.zeros(100_000)}
    with failure(monkeypatch, code), pytest.raises(CheckpointError, match=os.strerror(code)) as caught:
        checkpoint.save(tmp_path, step=3, tensors=large, keep=1)
    assert "step-00000003." in caught.value.path
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    checkpoint.save(tmp_path, step=3, tensors=large, keep=1)
    assert [plain(name) for name in names(tmp_path)] == files(3)


def test_missing_directories_are_made(tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "a" / "b" / "c"
    assert checkpoint.latest(folder, disk=disk) is None
    for step in (1, 2):
        checkpoint.save(folder, step=step, tensors=SMALL, disk=disk)
    found = checkpoint.latest(folder, disk=disk)
    assert found is not None
    assert found.step == 2


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, disk: Disk) -> None:
    disk.create(tmp_path / "file", [b"in the way"])
    with pytest.raises(CheckpointError, match="cannot write the checkpoint of step 1"):
        checkpoint.save(tmp_path / "file" / "below", step=1, tensors=SMALL, disk=disk)
    with pytest.raises(CheckpointError, match="cannot look for checkpoints"):
        checkpoint.latest(tmp_path / "file", disk=disk)


def test_what_one_process_wrote_and_is_damaged_is_named_by_tensor_and_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=1, tensors=SMALL)
    (data,) = tmp_path.glob("*.safetensors")
    whole = bytearray(data.read_bytes())
    whole[-1] ^= 1
    data.write_bytes(whole)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.latest(tmp_path)
    assert f"of tensor 'w' is damaged: not the bytes that were written: {data}" in str(caught.value)


def test_the_callers_mistakes_are_local_errors_and_write_nothing(tmp_path: Path) -> None:
    target = tmp_path / "new"
    with pytest.raises(LocalError, match="step is 0 or more"):
        checkpoint.save(target, step=-1, tensors=SMALL)
    with pytest.raises(LocalError, match="keep is 1 or more"):
        checkpoint.save(target, step=1, tensors=SMALL, keep=0)
    with pytest.raises(LocalError, match="may not begin with"):
        checkpoint.save(target, step=1, tensors=SMALL, metadata={"quicoll.step": "7"})
    with pytest.raises(LocalError, match="complex128"):
        checkpoint.save(target, step=1, tensors={"x": np.zeros(1, complex)})
    with pytest.raises(LocalError, match="object"):
        checkpoint.save(target, step=1, tensors={"x": np.array([None])})
    with pytest.raises(LocalError, match="only dense"):
        checkpoint.save(target, step=1, tensors={"x": torch.ones(2, 2).to_sparse()})
    with pytest.raises(LocalError, match="__metadata__"):
        checkpoint.save(target, step=1, tensors={"__metadata__": np.ones(1)})
    assert not target.exists()


def test_a_snapshot_shares_no_memory_with_its_source() -> None:
    source = {"t": torch.zeros(2, requires_grad=True), "n": np.zeros(2)}
    copy = checkpoint.snapshot(source)
    before = checkpoint.digest(copy)
    with torch.no_grad():
        source["t"].add_(1)
    source["n"] += 1
    assert checkpoint.digest(copy) == before
