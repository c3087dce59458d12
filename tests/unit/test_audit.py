"""Audits: what is written can be read after any crash, and the first difference is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from quicoll.audit import AuditLog, Difference, Record, audit_file, diff, load_run, read_log
from quicoll.cli.main import main
from quicoll.errors import AuditError, LocalError

SUM, GATHER = "all_reduce float32 (3) sum default", "scatter float32 (3)"


def record(step: int | None, rank: int, **fields: Any) -> Record:
    defaults: dict[str, Any] = {
        "view": 1,
        "world": 2,
        "group": "world",
        "seq": 0,
        "op": SUM,
        "inputs": ((rank, f"in{step}.{rank}"),),
        "result": f"out{step}",
    }
    return Record(step=step, rank=rank, **{**defaults, **fields})


class Scripted:
    """Writes a run: for each rank a file; `change` may replace a record before it is written."""

    def __init__(self, directory: Path, *, world: int = 2, leaves: int = 4) -> None:
        self.directory, self.world, self.leaves = directory, world, leaves
        self.logs = [
            AuditLog(audit_file(directory, f"worker-{rank}"), job="test", node=f"worker-{rank}")
            for rank in range(world)
        ]

    def step(self, step: int, *, view: int = 1, change: Any = lambda record: record) -> None:
        for rank, log in enumerate(self.logs):
            log.begin(step=step, view=view, rank=rank, world=self.world)
            mine = range(rank * self.leaves // self.world, (rank + 1) * self.leaves // self.world)
            for seq in range(2):
                inputs = tuple((leaf, f"in{step}.{seq}.{leaf}") for leaf in mine)
                written = change(
                    record(step, rank, view=view, world=self.world, seq=seq, inputs=inputs, result=f"out{step}.{seq}")
                )
                if written is not None:
                    log.record(written)

    def close(self) -> None:
        for log in self.logs:
            log.close()


def script(directory: Path, *, world: int = 2, steps: int = 3, change: Any = lambda record: record) -> Path:
    run = Scripted(directory, world=world)
    for step in range(1, steps + 1):
        run.step(step, change=change)
    run.close()
    return directory


def changed(step: int, seq: int, rank: int | None, **fields: Any) -> Any:
    def change(item: Record) -> Record:
        if (item.step, item.seq) == (step, seq) and rank in (None, item.rank):
            values = {name: getattr(item, name) for name in item.__struct_fields__}
            return Record(**{**values, **fields})
        return item

    return change


def compared(a: Path, b: Path) -> Difference | None:
    return diff(load_run(a), load_run(b))


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


# ---------------------------------------------------------------------------------------------------------------------
# The first difference


def test_equal_runs_have_none_whatever_their_world_size(tmp_path: Path) -> None:
    runs = [script(tmp_path / str(world), world=world) for world in (1, 2, 3, 4)]
    for a in runs:
        for b in runs:
            assert compared(a, b) is None


def test_another_leaf_is_named_before_the_results_that_follow_from_it(tmp_path: Path) -> None:
    a = script(tmp_path / "a")

    def change(item: Record) -> Record:
        item = changed(2, 1, 1, inputs=((2, "other"), (3, "in2.1.3")))(item)
        return changed(2, 1, None, result="other")(item)

    found = compared(a, script(tmp_path / "b", change=change))
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.rank, found.leaf) == ("inputs", 2, 1, (1, 1), 2)
    assert (found.a, found.b, found.op) == ("in2.1.2", "other", SUM)
    assert str(found).splitlines()[0] == "step 2, call 1, rank 1: leaf 2 has other bits"


def test_another_leaf_is_found_between_worlds_of_different_size(tmp_path: Path) -> None:
    b = Scripted(tmp_path / "b", world=4)
    for step in (1, 2, 3):
        b.step(step, change=lambda item: changed(3, 0, 3, inputs=((3, "other"),))(item))
    b.close()
    found = compared(script(tmp_path / "a", world=2), tmp_path / "b")
    assert found is not None
    assert (found.kind, found.place.step, found.leaf, found.rank) == ("inputs", 3, 3, (1, 3))
    assert "rank 1 of A, 3 of B" in str(found)


@pytest.mark.parametrize("world", [2, 3])
def test_another_result_of_equal_inputs_is_named_by_rank(tmp_path: Path, world: int) -> None:
    a = script(tmp_path / "a", world=2)
    b = script(tmp_path / "b", world=world, change=changed(1, 1, 1, result="other"))
    found = compared(a, b)
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.rank[1]) == ("result", 1, 1, 1)


def test_results_that_belong_to_a_rank_are_not_compared_between_other_worlds(tmp_path: Path) -> None:
    def own(item: Record) -> Record:
        return changed(item.step or 0, item.seq, None, agreed=False, result=f"{item.world}.{item.rank}", op=GATHER)(
            item
        )

    runs = [script(tmp_path / str(world), world=world, change=own) for world in (2, 3)]
    assert compared(*runs) is None
    other = script(tmp_path / "other", change=lambda item: changed(2, 0, 1, result="x")(own(item)))
    found = compared(runs[0], other)
    assert found is not None
    assert (found.kind, found.rank) == ("result", (1, 1))


def test_other_calls_and_missing_ones_are_named(tmp_path: Path) -> None:
    a = script(tmp_path / "a")
    found = compared(a, script(tmp_path / "b", change=changed(2, 0, 1, op="barrier")))
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.rank) == ("calls", 2, 0, (1, 1))
    assert found.b == "barrier in group world"
    found = compared(a, script(tmp_path / "c", change=lambda item: None if (item.step, item.seq) == (3, 1) else item))
    assert found is not None
    assert (found.kind, found.place.step, found.index, found.b) == ("missing", 3, 1, "nothing")
    found = compared(a, script(tmp_path / "d", steps=2))
    assert found is not None
    assert (found.kind, found.place.step, found.a, found.b) == ("missing", 3, "2 ranks", "nothing")


def test_the_same_leaf_in_two_groups_at_once_is_two(tmp_path: Path) -> None:
    def grouped(item: Record) -> Record:
        return changed(item.step or 0, item.seq, None, group=f"half{item.rank}", inputs=((0, f"{item.rank}"),))(item)

    a = script(tmp_path / "a", change=grouped)
    b = script(tmp_path / "b", change=lambda item: changed(1, 0, 0, inputs=((0, "x"),))(grouped(item)))
    found = compared(a, b)
    assert found is not None
    assert (found.kind, found.rank, found.leaf, found.b) == ("inputs", (0, 0), 0, "x")


def test_attempts_that_were_given_up_do_not_count(tmp_path: Path) -> None:
    a = script(tmp_path / "a")
    b = Scripted(tmp_path / "b")
    b.step(1)
    b.step(2, change=lambda item: changed(2, 0, None, inputs=((0, "x"),))(item) if item.seq == 0 else None)
    b.step(2, view=2)
    b.step(3, view=2, change=changed(3, 0, None, result="x"))
    b.step(2, view=3)  # back to an earlier checkpoint
    b.step(3, view=3)
    b.close()
    assert compared(a, tmp_path / "b") is None


def test_of_two_files_with_one_rank_that_of_the_later_view_counts(tmp_path: Path) -> None:
    a = script(tmp_path / "a")
    b = script(tmp_path / "b", change=changed(2, 0, 1, result="given up"))
    substitute = AuditLog(audit_file(b, "worker-9"), job="test", node="worker-9")
    substitute.begin(step=2, view=2, rank=1, world=2)
    for seq in range(2):
        inputs = tuple((leaf, f"in2.{seq}.{leaf}") for leaf in (2, 3))
        substitute.record(record(2, 1, view=2, seq=seq, inputs=inputs, result=f"out2.{seq}"))
    substitute.close()
    assert compared(a, b) is None


def test_calls_outside_of_steps_have_a_place_of_their_own(tmp_path: Path) -> None:
    for name, result in (("a", "r"), ("b", "x")):
        log = AuditLog(audit_file(tmp_path / name, "worker-0"), job="test", node="worker-0")
        log.record(record(None, 0))
        log.begin(step=1, view=1, rank=0, world=1)
        log.record(record(1, 0))
        log.record(record(None, 0, result=result))
        log.close()
    found = compared(tmp_path / "a", tmp_path / "b")
    assert found is not None
    assert str(found).startswith("after step 1, outside of any, call 0, rank 0: equal inputs gave another result")


# ---------------------------------------------------------------------------------------------------------------------
# The command


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int) or ended.value.code is None
    return ended.value.code or 0


def test_the_command_names_the_difference_and_says_so_in_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = script(tmp_path / "a"), script(tmp_path / "b", change=changed(2, 1, 0, result="other"))
    assert run("audit", "diff", str(a), str(a)) == 0
    assert capsys.readouterr().out == "equal: 3 steps, 12 calls in A, 12 in B\n"
    assert run("audit", "diff", str(a), str(b)) == 1
    out = capsys.readouterr().out.splitlines()
    assert out == [
        "step 2, call 1, rank 0: equal inputs gave another result",
        f"  {SUM}",
        "  A: out2.1",
        "  B: other",
    ]
    assert run("audit", "diff", "--json", str(a), str(b)) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False
    assert found["difference"]["place"] == {"step": 2, "outside": False}
    assert found["runs"][0]["last_step"] == 3
    one_rank = [str(directory / "worker-1.audit") for directory in (a, b)]
    assert run("audit", "diff", *one_rank) == 0


def test_the_command_says_which_file_is_damaged_and_fails_on_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = script(tmp_path / "a")
    with open(a / "worker-1.audit", "ab") as file:
        file.write(b"half a li")
    assert run("audit", "diff", str(a), str(a)) == 0
    assert "A: worker-1.audit is good up to its line 10 and not after" in capsys.readouterr().err
    assert run("audit", "diff", str(a), str(tmp_path / "none")) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_the_command_shows_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = script(tmp_path / "a", steps=1)
    assert run("audit", "show", str(a)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step 1: ranks 0, 1",
        f"  0  {SUM}  group world  result out1.0",
        f"  1  {SUM}  group world  result out1.1",
    ]
    assert run("audit", "show", "--json", str(a)) == 0
    assert json.loads(capsys.readouterr().out)["calls"] == 4
