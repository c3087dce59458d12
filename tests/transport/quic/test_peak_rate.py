"""The most that a rate has come to lately."""

from __future__ import annotations

from quicoll_transport.quic.peak_rate import PERIOD_NS, PeakRate

MS = 1_000_000


def carry(peak: PeakRate, begin_ns: int, ms: int, rate: int) -> int:
    for at in range(ms):
        peak.pass_until(begin_ns + at * MS, 50 * MS)
        peak.on_measured(rate)
    return begin_ns + ms * MS


def test_the_largest_counts() -> None:
    peak = PeakRate()
    for rate in (300, 700, 500):
        peak.on_measured(rate)
    assert peak.rate == 700


def test_a_smaller_rate_is_believed_after_two_periods_of_it() -> None:
    peak, period = PeakRate(), PERIOD_NS // MS
    at = carry(peak, 0, period // 2, 1000)
    at = carry(peak, at, period + 1, 100)
    assert peak.rate == 1000, "a period and a half: of the present one and the one before"
    carry(peak, at, period, 100)
    assert peak.rate == 100


def test_a_silence_makes_it_no_smaller() -> None:
    peak = PeakRate()
    at = carry(peak, 0, 100, 1000)
    carry(peak, at + 100 * PERIOD_NS, 100, 10)
    assert peak.rate == 1000


def test_a_time_that_goes_back_counts_for_nothing() -> None:
    peak = PeakRate()
    peak.on_measured(1000)
    for _ in range(PERIOD_NS // MS):
        peak.pass_until(50 * MS, 50 * MS)
        peak.pass_until(10 * MS, 50 * MS)
    peak.on_measured(10)
    peak.on_measured(10)
    assert peak.rate == 1000
