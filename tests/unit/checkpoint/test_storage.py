"""Places of checkpoints: directories, file:// and what fsspec knows; the same promises in each."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quicoll import checkpoint
from quicoll.checkpoint.storage import DiskStorage, Storage, UrlStorage, split_place, storage_at
from quicoll.errors import CheckpointError, LocalError

fsspec = pytest.importorskip("fsspec", reason="URLs of checkpoints need fsspec, which is not installed")


@pytest.fixture(params=["path", "file", "memory", "chained"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    unused = uuid.uuid4().hex
    return {
        "path": str(tmp_path / "c"),
        "file": f"file://{tmp_path}/c d".replace(" ", "%20"),
        "memory": f"memory://{unused}/c",
        "chained": f"dir::memory://{unused}/d",
    }[request.param]


def test_what_is_written_is_read_replaced_listed_and_removed(place: str) -> None:
    storage: Storage = storage_at(place)
    with pytest.raises(FileNotFoundError):
        storage.names()
    storage.write("b", [b"one", memoryview(b"two")])
    storage.write("a", [])
    assert storage.names() == ["a", "b"]
    assert (storage.read("b"), storage.read("b", 2, 4), storage.read("b", 4), storage.size("b")) == (
        b"onetwo",
        b"et",
        b"wo",
        6,
    )
    assert (storage.read("b", 0, 100), storage.read("b", 5, 100)) == (b"onetwo", b"o")
    memory = bytearray(b".....")
    assert (storage.read_into("b", 4, memoryview(memory)), memory) == (2, b"wo...")
    storage.write("b", [b"new"])
    assert storage.read("b") == b"new"
    storage.clean()
    storage.remove(["a", "was never there"])
    assert storage.names() == ["b"]
    for call in (lambda: storage.read("a"), lambda: storage.size("a")):
        with pytest.raises(OSError, match="a"):
            call()
    assert storage.token() != storage.token()


def test_checkpoints_are_saved_found_pruned_and_loaded_by_url(place: str) -> None:
    assert checkpoint.latest(place) is None
    for step in range(4):
        path = checkpoint.save(place, step=step, tensors={"x": np.full(3, step)}, keep=2)
    assert checkpoint.load(path).tensors["x"].tolist() == [3, 3, 3]
    assert [each.step for each in checkpoint.stored(place)] == [3, 2]
    assert checkpoint.of_step(place, 2).tensors["x"].tolist() == [2, 2, 2]
    storage = storage_at(place)
    assert len(storage.names()) == 4
    (data,) = [name for name in storage.names() if name.startswith("step-00000003.r")]
    good = storage.read(data)
    storage.write(data, [good[:-1] + bytes([good[-1] ^ 1])])
    found = checkpoint.latest(place)
    assert found is not None
    assert found.step == 2


def test_a_write_that_breaks_off_leaves_what_was_there_or_nothing_that_counts(place: str) -> None:
    def torn() -> Any:
        yield b"half"
        raise RuntimeError("the writer ends")

    storage = storage_at(place)
    with pytest.raises((RuntimeError, OSError), match="the writer ends"):
        storage.write("step-00000001.manifest.json", torn())
    assert storage.names() == []


def test_a_torn_manifest_at_a_url_is_no_checkpoint() -> None:
    place = f"memory://{uuid.uuid4().hex}"
    for step in (1, 2):
        checkpoint.save(place, step=step, tensors={"x": np.zeros(2)})
    storage = storage_at(place)
    whole = storage.read("step-00000002.manifest.json")
    for length in range(0, len(whole), 37):
        storage.write("step-00000002.manifest.json", [whole[:length]])
        found = checkpoint.latest(place)
        assert found is not None
        assert found.step == 1


def test_file_urls_are_written_by_the_disk_and_synced() -> None:
    assert isinstance(storage_at("file:///data/x"), DiskStorage)
    assert storage_at("file:///data/a%20b").where == "/data/a b"
    assert isinstance(storage_at("memory://x"), UrlStorage)
    assert isinstance(storage_at("relative/c:d"), DiskStorage)


def test_places_that_cannot_be_used_are_the_callers_mistake() -> None:
    with pytest.raises(LocalError, match="nosuch://x"):
        storage_at("nosuch://x")


def test_errors_of_a_store_are_errors_of_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each store has errors of its own, which are no OSError."""

    class StoreError(Exception):
        pass

    def refused(*arguments: object, **options: object) -> None:
        raise StoreError("access denied")

    place = f"memory://{uuid.uuid4().hex}"
    checkpoint.save(place, step=1, tensors={"x": np.zeros(2)})
    memory = type(fsspec.filesystem("memory"))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "open", refused)
        with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 2: StoreError: access denied"):
            checkpoint.save(place, step=2, tensors={"x": np.zeros(2)})
        patch.setattr(memory, "ls", refused)
        with pytest.raises(CheckpointError, match="cannot look for checkpoints: StoreError"):
            checkpoint.latest(place)
    found = checkpoint.latest(place)
    assert found is not None
    assert found.step == 1


def test_a_path_is_split_into_place_and_name() -> None:
    assert split_place("/a/b/c") == ("/a/b", "c")
    assert split_place("c") == (".", "c")
    assert split_place("/c") == ("/", "c")
    assert split_place("s3://bucket/run/c") == ("s3://bucket/run", "c")
