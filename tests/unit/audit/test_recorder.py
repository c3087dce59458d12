"""The queue between collectives that end in any order and a file whose lines are in the order of the calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from quicoll.audit.log import AuditLog, OperationRecord, StepBegun, read_log
from quicoll.audit.recorder import Auditor, IssuedCall, PendingEntry
from quicoll.errors import AuditError
from quicoll.numerics.bundle import Joined


class Written:
    """An auditor, its file, and what stands in it: the step of each beginning, the name of each operation."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "a.audit"
        self.log = AuditLog(self.path, job="test", node="a")
        self.auditor = Auditor(self.log)

    def begin(self, step: int) -> None:
        self.auditor.begin(step=step, view=1, rank=0, world=1)

    def issue(self, op: str, step: int | None) -> tuple[PendingEntry, Callable[[int], None]]:
        call = IssuedCall("world", op, [(0, np.arange(3))], lambda: np.arange(4), agreed=True)
        entry = self.auditor.issued(call, view=1, step=step, rank=0, world=1)
        return entry, partial(self.auditor.succeeded, entry)

    @property
    def lines(self) -> list[int | str]:
        return [line.step if isinstance(line, StepBegun) else line.op for line in read_log(self.path).lines]


def test_lines_stand_in_the_order_of_the_calls_and_not_of_the_ends(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.begin(1)
    (_, first), (_, second), (_, third) = (written.issue(op, 1) for op in ("first", "second", "third"))
    third(2)
    second(1)
    assert written.lines == [1]
    first(0)
    assert written.lines == [1, "first", "second", "third"]
    written.auditor.close()


def test_what_failed_leaves_no_line_and_holds_up_nothing(tmp_path: Path) -> None:
    written = Written(tmp_path)
    (failing, _), (good, ended) = written.issue("failing", None), written.issue("good", None)
    ended(1)
    written.auditor.over(good)
    written.auditor.over(failing)
    assert written.lines == ["good"]
    written.auditor.close()


def test_an_operation_from_outside_that_ends_in_a_step_stands_before_it(tmp_path: Path) -> None:
    written = Written(tmp_path)
    _, outside = written.issue("outside", None)
    written.begin(1)
    _, inside = written.issue("inside", 1)
    inside(0)
    assert written.lines == []
    outside(0)
    assert written.lines == ["outside", 1, "inside"]
    written.auditor.close()


def test_what_an_attempt_left_unfinished_is_forgotten_when_the_next_begins(tmp_path: Path) -> None:
    written = Written(tmp_path)
    written.begin(1)
    entry, late = written.issue("late", 1)
    written.begin(1)
    _, ended = written.issue("again", 1)
    late(0)
    written.auditor.over(entry)
    ended(0)
    assert written.lines == [1, 1, "again"]
    written.auditor.close()


def test_a_list_of_tensors_has_the_digest_of_its_elements_in_one(tmp_path: Path) -> None:
    written, rng = Written(tmp_path), np.random.default_rng(0)
    parts = [rng.standard_normal(size) for size in (3, 1 << 18, 70_000)]
    for elements in (Joined(parts), np.concatenate(parts)):
        call = IssuedCall("world", "x", [(5, elements)], None, agreed=False)
        written.auditor.succeeded(written.auditor.issued(call, view=1, step=None, rank=0, world=1), 0)
    one, other = (line for line in read_log(written.path).lines if isinstance(line, OperationRecord))
    assert one == other
    assert (one.inputs[0][0], one.result, one.agreed) == (5, "", False)
    written.auditor.close()


def test_a_failure_to_write_is_kept_until_somebody_asks(tmp_path: Path) -> None:
    written = Written(tmp_path)
    _, first = written.issue("first", None)
    written.log.close()
    first(0)
    with pytest.raises(AuditError, match="closed"):
        written.auditor.check()
    with pytest.raises(AuditError, match="closed"):
        written.begin(1)
