"""Token buckets, the table of unfinished handshakes, and the pace of a peer, on a clock of the test's own."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quicoll_transport.errors import ConfigurationError, ProtocolError
from quicoll_transport.security.limits import Guard, GuardConfig, Pace, PaceConfig, TokenBucket, source_of

SECOND = 1_000_000_000
START = 5 * SECOND


def at(number: int) -> tuple[str, int]:
    return (f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}", 1000 + number % 50_000)


# -- buckets ---------------------------------------------------------------------------------------------------------


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(10, 5)
    assert [bucket.take(START) for _ in range(7)] == [True] * 5 + [False] * 2
    assert not bucket.take(START + SECOND // 10 - 1)
    assert bucket.take(START + SECOND // 10)
    assert not bucket.take(START + SECOND // 10)


def test_a_bucket_that_rests_is_full_again_and_not_fuller() -> None:
    bucket = TokenBucket(10, 5)
    assert all(bucket.take(START) for _ in range(5))
    assert not bucket.full(START)
    later = START + 100 * SECOND
    assert bucket.full(later)
    assert [bucket.take(later) for _ in range(6)] == [True] * 5 + [False]


def test_several_are_taken_together_or_not_at_all() -> None:
    bucket = TokenBucket(10, 5)
    assert not bucket.take(START, 6)
    assert bucket.take(START, 5)
    assert not bucket.take(START)


@pytest.mark.parametrize("seed", range(5))
def test_in_no_interval_does_a_bucket_give_more_than_burst_and_rate(seed: int) -> None:
    rng = random.Random(seed)
    rate, burst = rng.randrange(1, 1000), rng.randrange(1, 100)
    bucket, now, taken = TokenBucket(rate, burst), START, []
    for _ in range(3000):
        now += rng.choice((0, 0, 1, rng.randrange(SECOND // rate * 3)))
        if bucket.take(now):
            taken.append(now)
    for first in range(0, len(taken), 37):
        for last in range(first, len(taken), 53):
            allowed = burst + (taken[last] - taken[first]) // (SECOND // rate)
            assert last - first + 1 <= allowed


# -- sources ---------------------------------------------------------------------------------------------------------


def test_a_source_is_an_ipv4_address_or_a_network_of_64_bits() -> None:
    assert source_of(("10.0.0.1", 1)) == source_of(("10.0.0.1", 2)) != source_of(("10.0.0.2", 1))
    near = source_of(("2001:db8::1", 1, 0, 0))
    assert near == source_of(("2001:db8::ffff:1", 2, 0, 0)) != source_of(("2001:db8:0:1::1", 1, 0, 0))
    assert source_of(("fe80::1%eth0", 1, 0, 2)) == source_of(("fe80::2%eth1", 1, 0, 3))
    assert source_of(("no:address", 1)) == "no:address"


# -- the table of handshakes -----------------------------------------------------------------------------------------


def guard(*, slots: int = 8, **settings: int) -> Guard[int]:
    return Guard(GuardConfig(**settings), slots=slots)


def test_first_datagrams_share_one_bucket_so_that_invented_sources_fill_no_table() -> None:
    door = guard(initials=100, initial_burst=50)
    assert sum(door.initial(at(n), START) for n in range(10_000)) == 50
    assert door.dropped == 9950
    assert door.remembered == 0


def test_one_source_gets_its_share_of_handshakes_and_leaves_the_rest_to_others() -> None:
    door = guard(handshake_burst=100, source_burst=10)
    assert sum(door.handshake(at(1), START) for _ in range(1000)) == 10
    assert sum(door.handshake(at(n), START) for n in range(2, 1000)) == 90
    assert door.refused == 990 + 908


def test_sources_of_peers_lose_nothing_to_a_flood_of_strangers() -> None:
    door = guard(initials=1, initial_burst=10, handshakes=1, handshake_burst=10)
    door.proved(at(1))
    for n in range(2, 1000):
        door.initial(at(n), START)
        door.handshake(at(n), START)
    assert not door.initial(at(5), START)
    assert door.initial(at(1), START)
    assert door.handshake(at(1), START)


def test_a_full_table_gives_the_place_of_the_oldest_stranger_to_the_newest() -> None:
    door = guard(slots=3)
    door.proved(at(0))
    assert [door.opened(n, at(n)) for n in range(3)] == [None] * 3
    assert door.opened(3, at(3)) == 1, "0 comes from where a peer came from"
    assert door.opened(4, at(4)) == 2
    door.closed(3)
    assert door.opened(5, at(5)) is None
    assert (len(door), door.displaced) == (3, 2)


def test_where_only_sources_of_peers_are_in_the_table_the_oldest_of_them_goes() -> None:
    door = guard(slots=2)
    for n in range(3):
        door.proved(at(n))
    assert [door.opened(n, at(n)) for n in range(3)] == [None, None, 0]


def test_a_source_with_too_many_handshakes_displaces_its_own() -> None:
    door = guard(slots=10, source_slots=2)
    assert door.opened(0, at(7)) is None
    assert [door.opened(n, at(1)) for n in range(1, 5)] == [None, None, 1, 2]
    assert len(door) == 3


def test_a_handshake_keeps_its_place_for_the_promised_time_whatever_comes() -> None:
    config = GuardConfig()
    slots = 512
    door: Guard[int] = Guard(config, slots=slots)
    promised = (slots - config.handshake_burst) * SECOND // config.handshakes
    since: dict[int, int] = {}
    number, now, shortest = 0, START, 1 << 62
    while now < START + 20 * SECOND:
        now += SECOND // 1000
        for _ in range(5):  # five thousand a second, each from a source of its own
            number += 1
            if door.handshake(at(number), now):
                since[number] = now
                victim = door.opened(number, at(number))
                if victim is not None:
                    shortest = min(shortest, now - since.pop(victim))
    assert shortest < 1 << 62, "the table was full"
    assert shortest >= promised >= 1.7 * SECOND


def test_tables_are_bounded_and_empty_when_all_is_over() -> None:
    door = guard(slots=50, sources=100, known=30, handshakes=1_000_000, handshake_burst=1_000_000)
    for n in range(5000):
        assert door.handshake(at(n), START)
        door.opened(n, at(n))
        if n % 3 == 0:
            door.proved(at(n))
        assert door.remembered <= 100 + 30 + 2 * 50
    for n in range(5000):
        door.closed(n)
    assert len(door) == 0
    assert door.remembered <= 130


# -- the pace of a peer ----------------------------------------------------------------------------------------------


def test_a_peer_may_be_quick_and_not_too_quick() -> None:
    pace = Pace(PaceConfig(controls=10, control_burst=20, pings=5, ping_burst=5, resets=1, reset_burst=4))
    for _ in range(5):
        pace.control(START, ping=True)
    with pytest.raises(ProtocolError, match="more than 5 heartbeats in a second"):
        pace.control(START, ping=True)
    for _ in range(14):
        pace.control(START, ping=False)
    with pytest.raises(ProtocolError, match="more than 10 control messages in a second"):
        pace.control(START, ping=False)
    pace.control(START + SECOND, ping=True)
    pace.resets(START, 0)
    pace.resets(START, 4)
    with pytest.raises(ProtocolError, match="more than 1 message streams given up"):
        pace.resets(START, 1)


@pytest.mark.parametrize("kind", [GuardConfig, PaceConfig])
@pytest.mark.parametrize("value", [0, -1, 1_000_000_001])
def test_settings_are_numbers_from_1_on(kind: Any, value: int) -> None:
    for name in kind.__dataclass_fields__:
        with pytest.raises(ConfigurationError, match=f"{name} must be 1 to"):
            kind(**{name: value})
