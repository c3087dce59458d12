"""Words that ranks leave each other in a directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quicoll.errors import LocalError
from quicoll.rendezvous.stores import MAX_VALUE, DirectoryStore, TorchStore


def test_a_word_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    one, other = DirectoryStore(tmp_path / "new", "job/1"), DirectoryStore(tmp_path / "new", "job/1")
    assert other.get("a/ask/1") is None
    one.set("a/ask/1", b"first")
    one.set("a/ask/1", b"second")
    assert other.get("a/ask/1") == b"second"
    one.set("long", bytes(MAX_VALUE + 1))
    assert other.get("long") is None
    (directory,) = (tmp_path / "new").iterdir()
    assert all(not path.name.startswith(".") for path in directory.iterdir())


def test_what_another_launch_left_is_cleared_and_made_anew(tmp_path: Path) -> None:
    one, other = DirectoryStore(tmp_path, "job"), DirectoryStore(tmp_path, "job")
    one.set("a", b"1")
    one.clear()
    assert list(tmp_path.iterdir()) == []
    assert other.get("a") is None
    other.set("a", b"2")
    assert one.get("a") == b"2"


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    DirectoryStore(tmp_path, "job")
    (directory,) = tmp_path.iterdir()
    directory.chmod(0o777)
    with pytest.raises(LocalError, match="chmod 700"):
        DirectoryStore(tmp_path, "job")


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    os.mkdir(tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", tmp_path / "quicoll-job")
    with pytest.raises(LocalError, match="of yours alone"):
        DirectoryStore(tmp_path, "job")


@pytest.mark.parametrize("put", [os.rename, os.symlink])
def test_a_directory_that_was_put_in_its_place_is_not_used(put: Callable[[Path, Path], None], tmp_path: Path) -> None:
    """Who may write to the shared one can move ours away and leave words of his own."""
    store = DirectoryStore(tmp_path, "job")
    store.set("open", b"ours")
    (tmp_path / "quicoll-job").rename(tmp_path / "away")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "open").write_bytes(b"theirs")
    (tmp_path / "others").chmod(0o777)
    put(tmp_path / "others", tmp_path / "quicoll-job")
    for use in (lambda: store.get("open"), lambda: store.set("open", b"again")):
        with pytest.raises(LocalError, match="of yours alone"):
            use()
    store.clear()
    assert (tmp_path / "quicoll-job" / "open").read_bytes() == b"theirs"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="name a directory that all nodes share"):
        DirectoryStore(tmp_path / "file", "job")


@pytest.mark.parametrize("port", ["", "x"])
def test_a_malformed_port_of_torchruns_is_named(port: str) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": "1", "TORCHELASTIC_RUN_ID": "x"}
    with pytest.raises(LocalError, match="MASTER_PORT"):
        TorchStore(environ, timeout=1.0)
