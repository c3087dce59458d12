"""Audits: what is written can be read after any crash, and of several files what counts is found."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from scripted_audit import record, script

from quicoll.audit.log import AuditLog, audit_file, load_run, read_log
from quicoll.errors import AuditError, LocalError

# ---------------------------------------------------------------------------------------------------------------------
# The file


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "worker-0.audit"
    log = AuditLog(path, job="test", node="worker-0")
    lines = [record(1, 0), record(None, 0, inputs=(), result="", agreed=False), record(2, 0, op="barrier", view=7)]
    log.begin(step=1, view=1, rank=0, world=2)
    for line in lines:
        log.record(line)
    log.close()
    read = read_log(path)
    assert (read.job, read.node, read.whole) == ("test", "worker-0", True)
    assert list(read.lines[1:]) == lines
    assert oct(path.stat().st_mode & 0o777) == "0o600"


def test_equal_runs_write_equal_files(tmp_path: Path) -> None:
    one, other = script(tmp_path / "a"), script(tmp_path / "b")
    for rank in range(2):
        name = f"worker-{rank}.audit"
        assert (one / name).read_bytes() == (other / name).read_bytes()


def test_lines_are_the_ones_they_always_were(tmp_path: Path) -> None:
    """Golden: an audit of today is read in a year."""
    path = tmp_path / "x.audit"
    log = AuditLog(path, job="j", node="n")
    log.begin(step=1, view=1, rank=0, world=1)
    log.record(record(1, 0))
    log.close()
    assert path.read_text() == GOLDEN


GOLDEN = (
    'cd50cd9bedf8ba6d {"kind":"header","format":"quicoll-audit-1","job":"j","node":"n"}\n'
    '88884e01a2a4c835 {"kind":"begin","step":1,"view":1,"rank":0,"world":1}\n'
    '62ad7f27f8eea61a {"kind":"op","view":1,"step":1,"rank":0,"world":2,"group":"world","seq":0,'
    '"op":"all_reduce float32 (3) sum default","inputs":[[0,"in1.0"]],"result":"out1","agreed":true}\n'
)


def test_every_cut_leaves_a_readable_prefix_and_can_be_continued(tmp_path: Path) -> None:
    whole = (script(tmp_path / "a", world=1, steps=1) / "worker-0.audit").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "worker-0.audit"
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        complete = sum(end <= cut for end in ends)
        if complete == 0:
            with pytest.raises(AuditError, match="it should begin with quicoll-audit-1"):
                read_log(path)
        else:
            read = read_log(path)
            assert len(read.lines) == complete - 1
            assert read.whole == (cut in ends)
        log = AuditLog(path, job="test", node="worker-0")
        log.record(record(9, 0))
        log.close()
        read = read_log(path)
        assert read.whole
        assert len(read.lines) == max(complete, 1)
        assert read.lines[-1] == record(9, 0)


def test_no_flipped_bit_and_no_missing_or_moved_line_is_read_over(tmp_path: Path) -> None:
    path = script(tmp_path / "a", world=1, steps=1) / "worker-0.audit"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for position in range(len(lines[0]), len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 4
        path.write_bytes(damaged)
        before = whole[:position].count(b"\n")
        read = read_log(path)
        assert (len(read.lines), read.whole) == (before - 1, False)
    for damaged_lines, good in [
        (lines[:2] + lines[3:], 1),
        ([*lines[:2], lines[3], lines[2]], 1),
        (lines + lines[1:2], 3),
    ]:
        path.write_bytes(b"".join(damaged_lines))
        read = read_log(path)
        assert (len(read.lines), read.whole) == (good, False)


def test_the_file_of_another_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.audit"
    AuditLog(path, job="test", node="worker-0").close()
    for job, node in (("other", "worker-0"), ("test", "worker-1")):
        with pytest.raises(AuditError, match="it is the audit of another"):
            AuditLog(path, job=job, node=node)
    AuditLog(path, job="test", node="worker-0").close()


def test_what_cannot_be_written_or_read_is_an_audit_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(AuditError, match="cannot be written"):
        AuditLog(blocked / "a.audit", job="j", node="n")
    log = AuditLog(tmp_path / "a.audit", job="j", node="n")
    log.close()
    log.close()
    with pytest.raises(AuditError, match="it is closed"):
        log.record(record(1, 0))
    with pytest.raises(AuditError, match="cannot be read"):
        read_log(tmp_path / "none.audit")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AuditError, match=r"there is no \*.audit in it"):
        load_run(tmp_path / "empty")
    for name in ("", ".hidden", "a/b"):
        with pytest.raises(LocalError, match="cannot be the name of a file"):
            audit_file(tmp_path, name)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), 5])
def test_a_full_disk_is_an_audit_error_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Any
) -> None:
    path = tmp_path / "a.audit"
    log = AuditLog(path, job="j", node="n")
    log.record(record(1, 0))
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if isinstance(failure, OSError):
            raise failure
        return write(fd, data[:failure])

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(AuditError, match=r"No space left|only 5 of \d+ bytes"):
        log.record(record(2, 0))
    monkeypatch.undo()
    assert [line.step for line in read_log(path).lines] == [1]
    log.record(record(3, 0))  # there is space again
    log.close()
    assert [line.step for line in read_log(path).lines] == [1, 3]
