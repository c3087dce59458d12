"""The temporary directory of a run: its own, private, gone afterwards, and removed by the next if its process was."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from quicoll.errors import LocalError
from quicoll.rendezvous import scratch
from quicoll.rendezvous.scratch import remove_abandoned, scratch_directory


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are made here; the machine's own place is not the tests' to tidy."""
    here = tmp_path / "tmp"
    here.mkdir()
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(here))
    return here


def left(base: Path, name: str = "quicoll-run-left") -> Path:
    """A directory as a process leaves it that SIGKILL ends."""
    path = base / name
    (path / "certs").mkdir(parents=True)
    path.chmod(0o700)
    (path / "certs" / "ca.pem").write_text("key")
    (path / "link").symlink_to(base.parent)
    (path / "lock").touch()
    return path


def test_it_is_private_and_gone_afterwards(base: Path) -> None:
    with scratch_directory() as path:
        assert path.parent == base
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        (path / "certs").mkdir()
        (path / "certs" / "key").write_text("x")
    assert list(base.iterdir()) == []


def test_it_is_gone_after_an_error_too(base: Path) -> None:
    with pytest.raises(ZeroDivisionError), scratch_directory():
        raise ZeroDivisionError
    assert list(base.iterdir()) == []


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_by_the_next(base: Path) -> None:
    program = "from quicoll.rendezvous.scratch import scratch_directory\nimport signal\n" + (
        "with scratch_directory() as path:\n    (path / 'key').write_text('x')\n    print(path, flush=True)\n"
        "    signal.pause()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(base)}) as child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        with scratch_directory():
            assert path.parent == base
            assert (path / "key").exists(), "its process lives"
        child.kill()
    with scratch_directory() as mine:
        assert list(base.iterdir()) == [mine]


def test_what_only_looks_like_one_is_left_alone(base: Path) -> None:
    for name in ("quicoll-demo-x", "another"):
        left(base, name)
    (base / "quicoll-run-file").write_text("no directory")
    (base / "quicoll-run-new").mkdir(mode=0o700)  # without a lock: it is just being made
    (base / "elsewhere").mkdir()
    (base / "elsewhere" / "lock").touch()
    (base / "quicoll-run-link").symlink_to(base / "elsewhere")
    (base / "quicoll-run-open").mkdir()
    (base / "quicoll-run-open").chmod(0o777)
    (base / "quicoll-run-open" / "lock").touch()
    there = sorted(base.iterdir())
    remove_abandoned(base)
    assert sorted(base.iterdir()) == there
    assert (base / "elsewhere" / "lock").exists()


def test_what_another_user_left_is_left_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left(base)
    monkeypatch.setattr(scratch.os, "geteuid", lambda: path.stat().st_uid + 1)
    remove_abandoned(base)
    assert (path / "certs" / "ca.pem").exists()


def test_a_locked_one_is_left_alone_and_the_link_in_it_is_not_followed(base: Path) -> None:
    path = left(base)
    with (path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_abandoned(base)
        assert (path / "certs" / "ca.pem").exists()
    remove_abandoned(base)
    assert list(base.iterdir()) == []
    assert base.parent.exists()


def test_a_removal_that_was_cut_short_is_finished_by_the_next(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left(base)

    def fails(*arguments: object, **options: object) -> None:
        raise OSError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(scratch.shutil, "rmtree", fails)
        remove_abandoned(base)
    assert (path / "lock").exists()
    remove_abandoned(base)
    assert list(base.iterdir()) == []


def test_a_place_that_cannot_be_read_is_no_obstacle(base: Path) -> None:
    remove_abandoned(base / "missing")


def test_a_directory_that_cannot_be_made_is_an_error_and_leaves_nothing(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(scratch.fcntl, "flock", fails)
    with pytest.raises(LocalError, match="cannot make a temporary directory: No locks available"):
        scratch_directory().__enter__()
    assert list(base.iterdir()) == []
    monkeypatch.setattr(scratch.tempfile, "tempdir", str(base / "missing"))
    with pytest.raises(LocalError, match="cannot make a temporary directory: No such file or directory"):
        scratch_directory().__enter__()
