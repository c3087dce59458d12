"""What a benchmark measures."""

from __future__ import annotations

import msgspec
import pytest

from quicoll.bench.cases import RIVALS, WORKS, Programme, size_text
from quicoll.errors import LocalError


@pytest.mark.parametrize("work", WORKS)
def test_every_work_has_cases_and_is_the_same_after_the_way_to_a_rank(work: str) -> None:
    plan = Programme.of(work, rivals=RIVALS[work], rounds=3)
    assert plan.cases
    assert len({case.name for case in plan.cases}) == len(plan.cases)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Programme) == plan


def test_sizes_are_taken_as_they_are_given() -> None:
    plan = Programme.of("step", sizes=(0, 3 << 20))
    assert [case.name for case in plan.cases] == ["empty step", "step with 3 MiB"]


@pytest.mark.parametrize(("work", "rival"), [("transfer", "gloo"), ("allreduce", "aioquic"), ("step", "mpi")])
def test_who_cannot_do_a_work_is_refused_with_who_can(work: str, rival: str) -> None:
    with pytest.raises(LocalError, match=f"{work} is compared with {RIVALS[work][0]}, not with '{rival}'"):
        Programme.of(work, rivals=(rival,))


@pytest.mark.parametrize(("work", "size"), [("allreduce", 0), ("transfer", 0), ("step", (4 << 30) + 1)])
def test_a_size_that_cannot_be_is_refused(work: str, size: int) -> None:
    with pytest.raises(LocalError, match=f"{work} takes sizes from"):
        Programme.of(work, sizes=(size,))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (4, "4 B"), (1025, "1025 B"), (64 << 10, "64 KiB"), (3 << 20, "3 MiB"), (4 << 30, "4 GiB")],
)
def test_a_size_is_written_as_people_do(size: int, text: str) -> None:
    assert size_text(size) == text
