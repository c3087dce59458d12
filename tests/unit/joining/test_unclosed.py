"""Jobs that nobody has left: when they are left, and what is said."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from quicoll import LocalError
from quicoll.joining.unclosed import EXIT_S, Unclosed

NAME = ("alpha", "a")


class Left:
    """Stands in for a job; `reasons` has how it was left."""

    def __init__(self, error: Exception | None = None) -> None:
        self.reasons: list[str] = []
        self._error = error

    async def aclose(self, reason: str, *, patience: float | None, finished: bool) -> None:
        assert patience == EXIT_S
        assert not finished, "nobody has said that its work is done"
        self.reasons.append(reason)
        if self._error is not None:
            raise self._error


@pytest.fixture
def ends() -> list[Callable[[], None]]:
    return []


@pytest.fixture
def unclosed(ends: list[Callable[[], None]]) -> Unclosed:
    return Unclosed(ends.append)


def test_what_is_open_when_the_process_ends_is_left_with_a_warning_each(
    unclosed: Unclosed, ends: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other = Left(LocalError("the engine is blocked")), Left()
    unclosed.hold(NAME, stuck)
    unclosed.hold(("alpha", "b"), other)
    (end,) = ends
    end()
    end()
    assert stuck.reasons == other.reasons == ["its program ended"]
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the program ends while a is in job 'alpha'",
        "the program ends while b is in job 'alpha'",
    ]


def test_what_was_left_in_time_is_not_mentioned(
    unclosed: Unclosed, ends: list[Callable[[], None]], caplog: pytest.LogCaptureFixture
) -> None:
    job = Left()
    unclosed.hold(NAME, job)()
    ends[0]()
    assert job.reasons == []
    assert not caplog.records


async def test_a_node_that_connects_again_leaves_its_former_job_first_and_no_other(
    unclosed: Unclosed, caplog: pytest.LogCaptureFixture
) -> None:
    former, other, present = Left(), Left(), Left()
    left = unclosed.hold(NAME, former)
    unclosed.hold(("beta", "a"), other)
    await unclosed.replace(NAME)
    assert (former.reasons, other.reasons) == (["connects again"], [])
    assert "a is still in job 'alpha' and connects again" in caplog.text
    unclosed.hold(NAME, present)
    left()  # the former one's end, which may come late, is not the present one's
    await unclosed.replace(NAME)
    assert present.reasons == ["connects again"]


async def test_the_child_of_a_fork_leaves_nothing_of_its_parents(
    unclosed: Unclosed, ends: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents, own = Left(), Left()
    unclosed.hold(NAME, parents)
    child = os.getpid() + 1
    monkeypatch.setattr(os, "getpid", lambda: child)
    ends[0]()
    await unclosed.replace(NAME)
    assert parents.reasons == []
    unclosed.hold(("alpha", "b"), own)
    await unclosed.replace(("alpha", "b"))
    assert (parents.reasons, own.reasons, len(ends)) == ([], ["connects again"], 1)
