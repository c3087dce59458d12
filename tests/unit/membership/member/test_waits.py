"""What a member waits for: one thing at a time, each for its own time."""

from __future__ import annotations

import pytest

from quicoll.deadlines import Deadlines
from quicoll.errors import LocalError
from quicoll.membership.member.waits import Awaited, Wait


def waits() -> Wait:
    wait = Wait(form_ns=10, answer_ns=20, margin_ns=30)
    wait.vote_timeout_ns = 100
    return wait


@pytest.mark.parametrize(
    ("awaited", "for_ns"),
    [(Awaited.ANSWER, 20), (Awaited.LINKS, 10), (Awaited.INSTALLATION, 20), (Awaited.DECISION, 130)],
)
def test_each_thing_is_overdue_after_its_own_time_and_once(awaited: Awaited, for_ns: int) -> None:
    wait = waits()
    wait.begin(awaited, now_ns=5)
    assert wait.deadline_ns == 5 + for_ns
    assert wait.overdue(now_ns=4 + for_ns) is None
    assert wait.overdue(now_ns=5 + for_ns) is awaited
    assert wait.deadline_ns is None
    assert wait.overdue(now_ns=1000) is None


def test_another_wait_takes_the_place_of_the_first() -> None:
    wait = waits()
    wait.begin(Awaited.LINKS, now_ns=0)
    wait.begin(Awaited.INSTALLATION, now_ns=5)
    assert wait.overdue(now_ns=10) is None
    assert wait.overdue(now_ns=25) is Awaited.INSTALLATION


def test_nothing_is_overdue_once_it_has_come() -> None:
    wait = waits()
    wait.begin(Awaited.ANSWER, now_ns=0)
    wait.end()
    assert (wait.deadline_ns, wait.overdue(now_ns=1000)) == (None, None)


def test_the_times_follow_a_setting_that_is_adopted() -> None:
    wait, at = waits(), Deadlines.of_ns(3_000_000_000)
    wait.adopt(3_000_000_000)
    wait.begin(Awaited.LINKS, now_ns=0)
    assert wait.deadline_ns == at.form_ns
    wait.begin(Awaited.ANSWER, now_ns=0)
    assert wait.deadline_ns == at.answer_ns


@pytest.mark.parametrize("short", ["form_ns", "answer_ns", "margin_ns"])
def test_no_time_is_0(short: str) -> None:
    with pytest.raises(LocalError, match="above 0"):
        Wait(**{"form_ns": 1, "answer_ns": 1, "margin_ns": 1, short: 0})
