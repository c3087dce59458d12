"""Which fair rates are tried, which lower a rate, and when one that was refused is tried again."""

from __future__ import annotations

import pytest

from quicoll_transport.quic.arrival_line import FairRate
from quicoll_transport.quic.fair_rate_trial import FairRateTrial


def worth(
    trial: FairRateTrial, rate: int, count: int, *, allotted: int = 100, full: bool = False, queue: bool = False
) -> int | None:
    return trial.worth(FairRate(allotted, full), rate, rate, queue=queue, count=count)


@pytest.mark.parametrize(("full", "queue", "rate", "lowered"), [
    (True, True, 150, 100),
    (True, True, 106, 100),
    (True, True, 105, None),
    (False, True, 150, None),
    (True, False, 150, None),
    (True, True, 1000, 250),
])  # fmt: skip
def test_who_has_more_than_is_allotted_is_lowered_where_the_line_is_full_and_there_is_a_queue(
    full: bool, queue: bool, rate: int, lowered: int | None
) -> None:
    assert FairRateTrial().lowered(FairRate(100, full), rate, queue=queue) == lowered


def test_a_fair_rate_of_nothing_lowers_to_a_quarter_and_never_to_nothing() -> None:
    assert FairRateTrial().lowered(FairRate(0, is_full=True), 100, queue=True) == 25
    assert FairRateTrial().lowered(FairRate(0, is_full=True), 2, queue=True) == 1


def test_clearly_more_is_tried_and_four_times_as_much_at_most() -> None:
    trial = FairRateTrial()
    assert worth(trial, 80, 1) == 100
    assert worth(trial, 87, 1) is None
    assert worth(trial, 10, 1) == 40
    assert worth(trial, 10, 1, allotted=1 << 61) == 40, "whatever a receiver says"


def test_with_a_queue_only_where_the_line_is_full() -> None:
    trial = FairRateTrial()
    assert worth(trial, 50, 1, queue=True) is None
    assert worth(trial, 50, 1, queue=True, full=True) == 100


def test_who_has_given_way_does_not_come_back_by_it_to_what_he_had() -> None:
    trial, fair_rate = FairRateTrial(), FairRate(100, is_full=True)
    assert trial.worth(fair_rate, 75, 100, queue=False, count=1) is None
    assert trial.worth(FairRate(120, is_full=True), 75, 100, queue=False, count=1) == 120


def test_what_was_refused_is_tried_again_after_ever_more_rounds() -> None:
    trial, count, waits = FairRateTrial(), 10, []
    for _ in range(6):
        trial.begin(count)
        trial.end(100, count, is_right=False)
        assert not trial.is_on
        waits.append(next(wait for wait in range(200) if worth(trial, 50, count + wait) is not None))
        count += waits[-1]
    assert waits == [8, 16, 32, 64, 64, 64]
    trial.begin(count)
    trial.end(100, count, is_right=True)
    assert worth(trial, 50, count) == 100
    trial.end(100, count, is_right=False)
    assert worth(trial, 50, count + 7) is None
    assert worth(trial, 50, count + 8) == 100


def test_another_rate_than_the_one_that_was_refused_is_tried_at_once() -> None:
    trial = FairRateTrial()
    trial.begin(1)
    trial.end(100, 1, is_right=False)
    assert worth(trial, 50, 2, allotted=149) is None
    assert worth(trial, 50, 2, allotted=151) == 151
    assert worth(trial, 40, 2, allotted=50) == 50


def test_what_is_lost_in_the_round_in_which_a_trial_begins_was_sent_before_it() -> None:
    trial = FairRateTrial()
    assert trial.blames(3), "what tries a memory has nothing before it"
    trial.begin(3)
    assert not trial.blames(3)
    assert trial.blames(4)
    trial.end(100, 4, is_right=True)
    assert trial.blames(4)
