"""The times that follow from `lost_after`: each outlasts what it waits for, whatever the setting."""

from __future__ import annotations

import pytest

from quicoll.deadlines import Deadlines, earlier
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.service import coordinator_config

SETTINGS = (1e-9, 0.01, 0.1, 0.25, 0.5, 1.0, 2.0, 3.3, 10.0, 60.0, 3600.0, 999_999.0)


@pytest.mark.parametrize("lost_after", SETTINGS)
def test_each_deadline_outlasts_what_it_waits_for(lost_after: float) -> None:
    at = Deadlines.of(lost_after)
    assert at.gather_ns < at.lost_ns <= at.settle_ns
    assert at.lost_ns < at.connect_ns < at.form_ns < at.propose_ns < at.answer_ns
    assert at.vote_ns < at.decision_ns


@pytest.mark.parametrize("lost_after", SETTINGS)
def test_a_decline_has_half_a_second_to_reach_the_coordinator(lost_after: float) -> None:
    at = Deadlines.of(lost_after)
    assert at.propose_ns - at.form_ns >= 500_000_000


def test_the_times_of_the_default() -> None:
    seconds = {name: getattr(Deadlines.of(2.0), name) / 1e9 for name in Deadlines.__slots__}
    assert seconds == {
        "lost_ns": 2.0,
        "connect_ns": 3.0,
        "form_ns": 3.5,
        "propose_ns": 6.0,
        "answer_ns": 34.0,
        "gather_ns": 0.333333333,
        "settle_ns": 2.0,
        "retry_ns": 1.0,
        "rejoin_ns": 16.0,
        "vote_ns": 300.0,
        "decision_ns": 330.0,
    }


def test_a_longer_silence_makes_no_deadline_shorter() -> None:
    made = [Deadlines.of(lost_after) for lost_after in SETTINGS]
    for name in Deadlines.__slots__:
        times = [getattr(each, name) for each in made]
        assert times == sorted(times), name


def test_the_coordinator_takes_its_times_from_here() -> None:
    at, config = Deadlines.of(5.0), coordinator_config(3, 5.0, seed=1)
    assert isinstance(config, CoordinatorConfig)
    assert (config.propose_timeout_ns, config.gather_ns, config.settle_ns, config.vote_timeout_ns) == (
        at.propose_ns,
        at.gather_ns,
        at.settle_ns,
        at.vote_ns,
    )


@pytest.mark.parametrize(
    ("a", "b", "first"), [(None, None, None), (3, None, 3), (None, 3, 3), (3, 4, 3), (4, 3, 3), (0, None, 0), (0, 3, 0)]
)
def test_of_two_times_the_earlier_counts_and_what_is_none_does_not(
    a: int | None, b: int | None, first: int | None
) -> None:
    assert earlier(a, b) == first
