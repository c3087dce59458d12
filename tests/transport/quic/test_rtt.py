"""Round trips by RFC 9002 section 5, worked out by hand."""

from __future__ import annotations

from quicoll_transport.quic.rtt import RoundTrips

MS = 1_000_000


def of(*samples: tuple[int, int], max_ack_delay_ns: int = 25 * MS) -> RoundTrips:
    rtt = RoundTrips(initial_ns=100 * MS, max_ack_delay_ns=max_ack_delay_ns)
    for elapsed, delay in samples:
        rtt.on_sample(elapsed, delay)
    return rtt


def test_a_guess_until_the_first_sample() -> None:
    rtt = of()
    assert (rtt.smoothed_ns, rtt.variance_ns, rtt.min_ns) == (100 * MS, 50 * MS, None)
    assert rtt.probe_timeout_ns == (100 + 200 + 25) * MS


def test_the_first_sample_replaces_it_without_its_delay() -> None:
    rtt = of((40 * MS, 10 * MS))
    assert (rtt.smoothed_ns, rtt.variance_ns, rtt.min_ns, rtt.latest_ns) == (40 * MS, 20 * MS, 40 * MS, 40 * MS)


def test_later_samples_are_weighed_and_the_peers_delay_is_taken_off() -> None:
    rtt = of((40 * MS, 0), (72 * MS, 8 * MS))
    assert rtt.variance_ns == (3 * 20 + 24) * MS // 4
    assert rtt.smoothed_ns == (7 * 40 + 64) * MS // 8
    assert (rtt.min_ns, rtt.latest_ns) == (40 * MS, 72 * MS)


def test_a_delay_that_would_make_it_shorter_than_the_shortest_is_not_believed() -> None:
    assert of((40 * MS, 0), (44 * MS, 5 * MS)).smoothed_ns == (7 * 40 + 44) * MS // 8


def test_a_delay_above_the_peers_own_bound_is_not_believed() -> None:
    assert of((40 * MS, 0), (100 * MS, 60 * MS)).smoothed_ns == (7 * 40 + 75) * MS // 8


def test_the_shortest_is_of_the_path_as_it_is_now_after_persistent_congestion() -> None:
    rtt = of((40 * MS, 0), (90 * MS, 0))
    rtt.on_persistent_congestion()
    assert rtt.min_ns == 90 * MS


def test_a_path_without_delay_has_a_round_trip_all_the_same() -> None:
    rtt = of((0, 0), (0, 0), max_ack_delay_ns=0)
    assert rtt.smoothed_ns == 1000
    assert rtt.probe_timeout_ns >= MS
