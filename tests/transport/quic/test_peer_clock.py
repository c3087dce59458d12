"""When acknowledgements were sent, whatever their queue was: clocks that differ, run apart, or lie."""

from __future__ import annotations

import pytest

from quicoll_transport.quic.peer_clock import PeerClock

MS = 1_000_000
S = 1_000_000_000
WAY = 25 * MS


@pytest.mark.parametrize("ahead", [0, 10**15, -(10**15)])
def test_a_packet_that_waited_counts_as_if_it_had_not(ahead: int) -> None:
    clock = PeerClock()
    assert clock.undelayed(ahead, WAY) == WAY
    assert clock.undelayed(S + ahead, S + WAY + 70 * MS) == S + WAY
    assert clock.undelayed(2 * S + ahead, 2 * S + WAY) == 2 * S + WAY


def test_it_is_never_later_than_the_arrival_and_a_shorter_way_counts_at_once() -> None:
    clock = PeerClock()
    assert clock.undelayed(0, WAY + 70 * MS) == WAY + 70 * MS, "nothing better is known yet"
    assert clock.undelayed(S, S + WAY) == S + WAY
    assert clock.undelayed(2 * S, 2 * S + WAY + 70 * MS) == 2 * S + WAY


@pytest.mark.parametrize("millionths", [50, -50])
def test_clocks_that_run_apart_are_off_by_a_millisecond_at_most(millionths: int) -> None:
    clock = PeerClock()
    for at in range(0, 300 * S, 100 * MS):
        found = clock.undelayed(at + at * millionths // 1_000_000, at + WAY)
        assert at + WAY - MS <= found <= at + WAY


def test_what_was_known_before_a_long_silence_is_not_believed() -> None:
    clock = PeerClock()
    clock.undelayed(0, WAY)
    later = 3600 * S
    slow = later - later * 50 // 1_000_000
    assert clock.undelayed(slow, later + WAY) == later + WAY


def test_a_way_that_has_become_longer_is_the_way_after_twenty_seconds() -> None:
    clock = PeerClock()
    for at in range(0, 5 * S, 100 * MS):
        clock.undelayed(at, at + WAY)
    found = [clock.undelayed(at, at + 2 * WAY) - at for at in range(5 * S, 30 * S, 100 * MS)]
    assert found[0] == WAY
    assert found[-1] == 2 * WAY
