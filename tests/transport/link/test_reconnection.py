"""The core of a link: what outlives a connection that dies, and payloads that arrive corrupted."""

from __future__ import annotations

import itertools
import random

import pytest
from link_pair import Flip, Pair, assert_clean, holds, payload, tag

from quicoll_transport.errors import MessageCorrupted, MessageRefused
from quicoll_transport.link.core import LinkState, SendState
from quicoll_transport.link.frames import MAX_APP, checksum

# -- connections that die --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("first", [None, "a", "b"])
@pytest.mark.parametrize("steps", range(24))
def test_resumed_message_arrives_exactly_once_wherever_the_connection_died(
    steps: int, first: str | None, credit: int
) -> None:
    pair = Pair(credit=credit).up()
    told: list[object] = []
    buffer = bytearray(3000)
    posted = pair.b.core.post(tag(1), memoryview(buffer), told.append)
    sent = pair.a.core.send(tag(1), memoryview(payload(1, 3000)), told.append)
    pair.a.core.send_app(b"x")
    works = [(pair.pull, pair.a), (pair.hear, pair.b), (pair.flow, pair.b), (pair.pull, pair.b), (pair.hear, pair.a)]
    for work, side in itertools.islice(itertools.cycle(works), steps):
        work(side)
    pair.die(first=None if first is None else getattr(pair, first))
    if first is not None:  # the other side still takes what has reached it, and answers into the void
        rest = pair.other(getattr(pair, first))
        while pair.hear(rest) or pair.flow(rest) or pair.pull(rest):
            pass
    pair.up()
    pair.settle()
    assert sent.state is SendState.ACKED
    assert holds(posted, 1)
    assert told.count(posted) == told.count(sent) == 1
    assert pair.b.core.stats.messages_received == 1
    assert pair.b.apps == [b"x"]
    assert_clean(pair)


def test_a_message_whose_acknowledgement_was_lost_is_not_sent_again() -> None:
    pair = Pair().up()
    sent, posted = pair.send(1, 3000), pair.post(1, 3000)
    while pair.pull(pair.a):
        pass
    while pair.flow(pair.b):
        pass
    assert posted.done
    assert sent.state is SendState.SENDING
    pair.die()
    pair.up()
    assert sent.state is SendState.ACKED
    assert pair.a.core.stats.resends == 0
    assert_clean(pair)


def test_application_messages_stay_in_order_and_single_over_any_number_of_connections() -> None:
    pair = Pair().up()
    rng = random.Random(17)
    words = [str(n).encode() for n in range(200)]
    for n, word in enumerate(words):
        pair.a.core.send_app(word)
        for _ in range(rng.randrange(6)):
            rng.choice([pair.pull, pair.hear])(rng.choice([pair.a, pair.b]))
        if n % 10 == 9:
            pair.die(first=rng.choice([None, pair.a, pair.b]))
            if n % 30 == 9:
                while pair.hear(pair.b):
                    pass
            pair.join()
    pair.settle()
    assert pair.b.apps == words
    assert pair.a.core.drained
    assert_clean(pair)


@pytest.mark.parametrize("size", [0, MAX_APP])
def test_application_messages_that_wait_are_bounded_in_number_and_sum(size: int) -> None:
    pair = Pair()

    def flood() -> None:
        for _ in range(100_000):
            pair.a.core.send_app(bytes(size))

    with pytest.raises(MessageRefused, match="wait for the peer"):
        flood()
    pair.up()
    pair.settle()
    assert pair.a.core.drained
    pair.a.core.send_app(b"there is room again")
    pair.settle()
    assert pair.b.apps[-1] == b"there is room again"
    assert_clean(pair)


def test_application_message_above_the_limit_is_refused_here() -> None:
    with pytest.raises(MessageRefused, match="above"):
        Pair().a.core.send_app(bytes(MAX_APP + 1))


def test_offers_and_grants_are_made_again_after_a_reconnection() -> None:
    pair = Pair(credit=0).up()
    waiting, granted = pair.send(1, 2000), pair.send(2, 2000)
    posted = pair.post(2, 2000)
    pair.pull(pair.a), pair.pull(pair.a), pair.hear(pair.b), pair.hear(pair.b)  # Grant is on its way
    pair.die()
    pair.up()
    pair.settle()
    assert holds(posted, 2)
    assert granted.state is SendState.ACKED
    late = pair.post(1, 2000)
    pair.settle()
    assert holds(late, 1)
    assert waiting.state is SendState.ACKED
    assert_clean(pair)


def test_a_refusal_that_died_with_its_connection_does_not_pass_for_success() -> None:
    pair = Pair().up()
    posted, sent = pair.post(1, 10), pair.send(1, 2000)
    while pair.pull(pair.a):
        pass
    while pair.flow(pair.b):
        pass
    assert isinstance(posted.error, MessageRefused)
    for _ in range(3):
        pair.die()
        pair.join()
        while pair.hear(pair.b) or pair.pull(pair.b):
            pass
    pair.up()
    pair.settle()
    assert isinstance(sent.error, MessageRefused)
    assert_clean(pair)


# -- corruption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("times", [1, 2])
def test_corrupt_payload_is_sent_again_from_the_source(times: int, posted_first: bool, credit: int) -> None:
    pair = Pair(max_resends=2, fault=Flip(times), credit=credit).up()
    posted = pair.post(1, 3000) if posted_first else None
    sent = pair.send(1, 3000)
    pair.settle()
    posted = posted or pair.post(1, 3000)
    pair.settle()
    assert sent.state is SendState.ACKED
    assert holds(posted, 1)
    assert sent.attempt == pair.a.core.stats.resends == pair.b.core.stats.corrupt == times
    assert_clean(pair)


@pytest.mark.parametrize("credit", [100_000, 100])
@pytest.mark.parametrize("posted_first", [True, False])
@pytest.mark.parametrize("dies", [False, True])
def test_payload_that_stays_corrupt_fails_at_both_ends_with_both_digests(
    dies: bool, posted_first: bool, credit: int
) -> None:
    pair = Pair(max_resends=2, fault=Flip(3), credit=credit).up()
    posted = pair.post(1, 3000) if posted_first else None
    sent = pair.send(1, 3000)
    if not posted_first and credit == 100:
        pair.settle()
        posted = pair.post(1, 3000)
    while pair.b.core.stats.corrupt < 3:
        pair.walk("pa fb hb pb ha")
    if dies:  # the news of it too
        pair.die()
        pair.up()
    pair.settle()
    posted = posted or pair.post(1, 3000)
    pair.settle()
    for error in (sent.error, posted.error):
        assert isinstance(error, MessageCorrupted)
        assert error.expected == checksum(payload(1, 3000))
        assert error.found != error.expected
    assert sent.error.found == posted.error.found
    assert pair.b.core.stats.messages_received == 0
    assert pair.a.core.state is LinkState.UP
    assert_clean(pair)


def test_failed_checksums_are_counted_over_reconnections() -> None:
    pair = Pair(max_resends=2, fault=Flip(99)).up()
    posted, sent = pair.post(1, 3000), pair.send(1, 3000)
    for expected in (1, 2, 3):
        while pair.b.core.stats.corrupt < expected:
            pair.walk("pa pb ha hb fb")
        pair.die()
        pair.join()
    pair.settle()
    assert isinstance(sent.error, MessageCorrupted)
    assert isinstance(posted.error, MessageCorrupted)
    assert_clean(pair)
